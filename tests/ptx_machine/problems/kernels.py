"""Launches on the machine: what a tier would launch on a GPU, executed on NumPy arrays; and the public functions on that."""

import gc
from contextlib import ExitStack, contextmanager
from functools import cache
from unittest import mock

import evidence
import numpy as np
from compiled import SHARED_LIMIT, text
from support import Backend, random_inputs, whole

import numba_flash
from numba_flash import call, reference
from numba_flash.arguments import arrays
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import BackwardResults, ForwardResults
from numba_flash.cuda.runtime import launch, packing
from numba_flash.plan import BACKENDS, tier
from ptx_machine.instructions.sums import EXACT, TensorCore
from ptx_machine.machine.copies import TensorMap
from ptx_machine.machine.machine import Machine
from ptx_machine.machine.memory import Fault

HOPPER = (9, 0)
NANS = 0x7FFF7FFF  # two of 16 bits


@evidence.text_of(lambda *kernel: kernel)
@cache
def ptx(builder: str, config: tuple, capability: tuple[int, int]) -> str:
    """The text of a kernel."""
    gc.disable()  # the compiler makes objects by the million, hardly one of them garbage: that would take a quarter of its time
    try:
        return text(builder, config, capability)
    finally:
        gc.enable()


KINDS = {
    int: "u64",
    np.uint64: "u64",
    np.int32: "u32",
    float: "f64",
    np.float64: "f64",
    np.float32: "f32",
}  # of numbers, as `packing.FORMATS`


class Executed:
    """In the place of a `Launch`'s call: the same arguments, executed by the machine.

    Parameters
    ----------
    prepared : Launch
        What was prepared on paper.
    seed, resident, core
        Of the machine.
    """

    def __init__(self, prepared, seed: int = 0, resident: int | None = None, core: TensorCore | None = EXACT):
        self.prepared, self.seed, self.resident, self.core = prepared, seed, resident, core

    def __call__(self, *operands, extras=(), numbers=None) -> None:
        prepared, trace = self.prepared, evidence.current()
        if trace is not None:
            trace.launch(prepared, operands, extras, numbers)
            if trace.paper:
                return
        machine = self.machine(ptx(prepared.builder, prepared.config, prepared.gpu.capability))
        used, limit = machine.kernel.shared_bytes + prepared.shared_bytes, SHARED_LIMIT[prepared.gpu.capability]
        if used > limit:
            raise Fault(f"{prepared.builder} takes {used} bytes of shared memory; there are {limit}")
        mapped = len(prepared.maps)
        arguments = [TensorMap(self._as_described(x, layout), *box) for x, (layout, *box) in zip(operands, prepared.maps, strict=False)]
        views = (*prepared.operands, *prepared.extras)
        for x, (layout, view) in zip((*operands[mapped:], *extras), views, strict=True):
            described = packing.numba_array(layout, view)
            if x is not None:
                described[4] = machine.memory.place(prepared.builder, x)
            arguments += described
        if isinstance(numbers, bytes):
            numbers = packing.unpacked(numbers, prepared.numbers)
        numbers = packing.flat(prepared.numbers if numbers is None else numbers)
        for number, parameter in zip(numbers, machine.kernel.parameters[len(arguments) :], strict=True):
            if KINDS[type(number)] != parameter.kind:  # the driver copies what it is given
                raise Fault(f"{prepared.builder} is given {number!r} for a parameter that is {parameter.kind}")
        arguments += numbers
        machine.launch(arguments, prepared.grid, prepared.threads, prepared.shared_bytes)

    def machine(self, text: str) -> Machine:
        """What executes it."""
        return Machine(text, self.seed, self.resident, self.core, self.prepared.early)

    @staticmethod
    def _as_described(x: np.ndarray, layout: Layout) -> np.ndarray:
        """The array as five dimensions of 16-bit elements, as its tensor map has it."""
        shape = (1,) * (5 - len(layout.shape)) + layout.shape
        strides = arrays.expanded_strides(layout, 5)
        return np.lib.stride_tricks.as_strided(x.view(np.uint16), shape, strides)


def _unwritten(allocate):
    """The same function, of arrays whose values show that nothing was written: NaN, also of words of two elements, and numbers that no
    kernel counts to.
    """

    def allocated(*arguments):
        x = allocate(*arguments)
        x.fill({"i": -(2**30), "u": NANS}.get(x.dtype.kind, np.nan))
        if (trace := evidence.current()) is not None:
            trace.allocated(x)
        return x

    return allocated


@contextmanager
def machine(
    seed: int = 0,
    multiprocessors: int = 2,
    resident: int | None = None,
    core: TensorCore | None = EXACT,
    capability: tuple[int, int] = HOPPER,
):
    """Let calls of the tiers for GPUs be executed by the machine, on NumPy arrays.

    Parameters
    ----------
    seed : int
        Of the order in which warps take turns and copies arrive.
    multiprocessors : int
        Of the GPU that there seems to be.
    resident : int, optional
        How many blocks it has room for at a time; all, by default.
    core : TensorCore, optional
        How its tensor cores add; rounded to nearest, by default.
    capability : tuple of two ints
        What kernels are compiled for.
    """
    with in_place_of_launches(lambda prepared: Executed(prepared, seed, resident, core), multiprocessors, capability):
        yield


@contextmanager
def in_place_of_launches(run_of, multiprocessors: int, capability: tuple[int, int]):
    """Let calls of the tiers for GPUs, on NumPy arrays, go to ``run_of(prepared)`` for each `Launch`, with a call's arguments."""
    gpu, allocator = launch.Gpu(0, capability, multiprocessors), arrays.allocator

    def load(self):
        run = run_of(self)
        self._submit = lambda operands, extras, numbers: run(*operands, extras=extras, numbers=numbers)

    with ExitStack() as stack:
        for module, name, instead in (
            (call, "find", lambda *call: (None, None)),  # what is prepared here runs here alone
            (launch, "why_not", lambda x: None),
            (launch, "gpu", lambda device: gpu),
            (launch, "gpu_of", lambda x: gpu),
            (launch.Launch, "_load", load),
            (arrays, "allocator", lambda *what: _unwritten(allocator(*what))),
            (arrays, "compact", _unwritten(arrays.compact)),
            *((tier(name), "takes_numpy", lambda: True) for name in BACKENDS if name != "cpu"),
        ):
            stack.enter_context(mock.patch.object(module, name, instead))
        yield


@contextmanager
def lengths_as_numbers():
    """Let lengths of keys come to kernels of few queries as those do which are on the host beside queries on a GPU."""
    always = lambda value: property(lambda self: value, lambda self, given: None)
    with mock.patch.multiple(call._Call, create=True, _on_host=always(["kv_lengths"]), _sends=always(True)):
        yield


class OnMachine(Backend):
    """A tier on the machine; what it refuses is left out of a test, forward or backward."""

    _or_another = Backend._or_skip


SM90, SM80, SIMT = OnMachine("sm90", "numpy"), OnMachine("sm80", "numpy", refuses=True), OnMachine("simt", "numpy")

UNITS = {"float64": 1e-13, "float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}


def forward_pass(backend, arrays, seed, multiprocessors=2, resident=None, capability=HOPPER, **options) -> ForwardResults:
    """Forward on the machine, each result within what the dtype allows of the oracle; `arrays` are q, k, v and do."""
    q, k, v, _ = arrays
    with machine(seed, multiprocessors, resident, capability=capability):
        results = ForwardResults(*numba_flash.forward(q, k, v, backend=backend, return_lse=True, **options))
    if evidence.compared(*results):
        return results
    o, lse = reference.forward(q, k, v, **options, return_lse=True)
    unit = UNITS[q.dtype.name]
    np.testing.assert_allclose(results.o.astype(np.float64), o, atol=unit, rtol=unit)
    np.testing.assert_allclose(results.lse, lse, atol=4e-6, rtol=4e-6)
    return results


def backward_pass(backend, arrays, seed, multiprocessors=2, resident=None, capability=HOPPER, **options) -> BackwardResults:
    """The same backward, from the oracle's o and lse."""
    q, k, v, do = arrays
    o, lse = reference.forward(q, k, v, **{name: x for name, x in options.items() if name not in ("bias_grad", "dlse")}, return_lse=True)
    inputs = do, q, k, v, o.astype(q.dtype), lse.astype(np.result_type(q.dtype, np.float32))
    with machine(seed, multiprocessors, resident, capability=capability):
        gradients = numba_flash.backward(*inputs, backend=backend, **options)
    if evidence.compared(*gradients):
        return BackwardResults(*gradients)
    unit = 4 * UNITS[q.dtype.name]
    for x, ref in zip(gradients, whole.gradients(do, q, k, v, **options), strict=True):
        np.testing.assert_allclose(x.astype(np.float64), ref, atol=unit * max(1, np.abs(ref).max()), rtol=unit)
    return BackwardResults(*gradients)


def attention(backend, dtype, d, nq, nk, heads, seed, multiprocessors=2, backward=True, **options):
    """Forward and backward of random arrays on the machine; returns the results of the last pass."""
    hq, hk = heads
    arrays = random_inputs(batch=(1,), hq=hq, hk=hk, nq=nq, nk=nk, d=d, dtype=dtype)
    results = forward_pass(backend, arrays, seed, multiprocessors, **options)
    return backward_pass(backend, arrays, seed, multiprocessors, **options) if backward else results
