"""Prepared launches on the machine: what a tier would launch on a GPU, executed on NumPy arrays."""

import gc
from functools import cache

import numpy as np
from copies import TensorMap
from machine import Machine
from sums import EXACT, TensorCore
from support import random_inputs

from numba_flash import arrays, reference
from numba_flash.arrays import Layout
from numba_flash.cuda import compile, launch
from numba_flash.cuda.launch import Gpu
from numba_flash.plan import tier
from numba_flash.problem import BackwardInputs, BackwardResults, ForwardInputs, ForwardResults, bind


@cache
def ptx(builder: str, config: tuple, capability: tuple[int, int]) -> str:
    """The text of a kernel."""
    gc.disable()  # the compiler makes objects by the million, hardly one of them garbage: that would take a quarter of its time
    try:
        return compile.intermediate(builder, config, capability, ptx=True)
    finally:
        gc.enable()


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
        prepared = self.prepared
        machine = self.machine(ptx(prepared.builder, prepared.config, prepared.gpu.capability))
        mapped = len(prepared.maps)
        arguments = [TensorMap(self._as_described(x, layout), rows) for x, (layout, rows) in zip(operands, prepared.maps, strict=False)]
        views = (*prepared.operands, *prepared.extras)
        for x, (layout, view) in zip((*operands[mapped:], *extras), views, strict=True):
            described = launch._numba_array(layout, view)
            if x is not None:
                described[4] = machine.memory.place(prepared.builder, x)
            arguments += described
        arguments += launch._flat(prepared.numbers if numbers is None else numbers)
        if prepared.grid:
            machine.launch(arguments, prepared.grid, prepared.threads, prepared.shared_bytes)

    def machine(self, text: str) -> Machine:
        """What executes it."""
        return Machine(text, self.seed, self.resident, self.core)

    @staticmethod
    def _as_described(x: np.ndarray, layout: Layout) -> np.ndarray:
        """The array as five dimensions of 16-bit elements, as its tensor map has it."""
        shape = (1,) * (5 - len(layout.shape)) + layout.shape
        strides = arrays.expanded_strides(layout, 5)
        return np.lib.stride_tricks.as_strided(x.view(np.uint16), shape, strides)


def on_machine(prepared, inputs, results, seed: int, resident: int | None = None):
    """Run a prepared pass, its launches executed by the machine."""
    for each in prepared.launches:
        run = Executed(each, seed, resident)
        each._submit = lambda operands, extras, numbers, run=run: run(*operands, extras=extras, numbers=numbers)
    prepared.run(inputs, results)


def paper(arrays):
    return type(arrays)(*map(Layout.of, arrays))


UNITS = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
EXTRAS = ("bias", "mask", "q_lengths", "kv_lengths")


def unwritten(x: np.ndarray, dtype=None) -> np.ndarray:
    """An array for results, in which NaN says that nothing was written."""
    return np.full(x.shape, np.nan, dtype or x.dtype)


def forward_pass(backend, arrays, seed, multiprocessors=2, resident=None, **options) -> ForwardResults:
    """Forward on the machine, each result within what the dtype allows of the oracle; `arrays` are q, k, v and do."""
    q, k, v, do = arrays
    problem, gpu = bind(q, k, v, **options), Gpu(0, (9, 0), multiprocessors)
    inputs = ForwardInputs(q, k, v, **{name: options[name] for name in EXTRAS if name in options})
    results = ForwardResults(unwritten(do), unwritten(do[..., 0], np.float32))
    on_machine(tier(backend).prepare_forward(problem, paper(inputs), paper(results), gpu=gpu), inputs, results, seed, resident)
    o, lse = reference.forward(q, k, v, **options)
    unit = UNITS[problem.dtype]
    np.testing.assert_allclose(results.o.astype(np.float64), o, atol=unit, rtol=unit)
    np.testing.assert_allclose(results.lse, lse, atol=4e-6, rtol=4e-6)
    return results


def backward_pass(backend, arrays, seed, multiprocessors=2, resident=None, **options) -> BackwardResults:
    """The same backward, from the oracle's o and lse."""
    q, k, v, do = arrays
    problem, gpu = bind(q, k, v, **options), Gpu(0, (9, 0), multiprocessors)
    o, lse = reference.forward(q, k, v, **options)
    extras = {name: options[name] for name in EXTRAS if name in options}
    inputs = BackwardInputs(do, q, k, v, o.astype(q.dtype), lse.astype(np.float32), **extras)
    gradients = BackwardResults(unwritten(q), unwritten(k), unwritten(v))
    on_machine(tier(backend).prepare_backward(problem, paper(inputs), paper(gradients), gpu=gpu), inputs, gradients, seed, resident)
    unit = 4 * UNITS[problem.dtype]
    for x, ref in zip(gradients, reference.backward(do, q, k, v, **options), strict=False):
        np.testing.assert_allclose(x.astype(np.float64), ref, atol=unit * max(1, np.abs(ref).max()), rtol=unit)
    return gradients


def attention(backend, dtype, d, nq, nk, heads, seed, multiprocessors=2, backward=True, **options):
    """Forward and backward of random arrays on the machine; returns the results of the last pass."""
    hq, hk = heads
    arrays = random_inputs(batch=(1,), hq=hq, hk=hk, nq=nq, nk=nk, d=d, dtype=dtype)
    results = forward_pass(backend, arrays, seed, multiprocessors, **options)
    return backward_pass(backend, arrays, seed, multiprocessors, **options) if backward else results
