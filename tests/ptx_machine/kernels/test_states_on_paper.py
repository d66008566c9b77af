"""A prepared call takes the state of the dropout's generator that each call brings, not the one that it was prepared with.

Two calls with two states and one preparation, on paper: each launch gets the state of its own call, and what it gets besides is the same.
Every function of the hosts that reads a state is reached by one of these calls, so a new one has to be. On the machine each call drops what
its state says.
"""

import ast
import sys
from collections import OrderedDict
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
from support import DTYPES, SIMULATED, random_inputs

if SIMULATED:
    pytest.skip("its kernels get the arrays themselves", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the machine's stand-ins know what it compiles")

from ptx_machine.problems.kernels import HOPPER, SM80, SM90, in_place_of_launches, lengths_as_numbers, machine
from support.naive import compare
from test_contract import AMPERE, Group, backward, forward

import numba_flash
from numba_flash import call, sections
from numba_flash.arguments import arrays
from numba_flash.cpu import tier as cpu
from numba_flash.cuda.runtime import packing
from numba_flash.plan import tier
from numba_flash.scoremod import functions as scoremod

PACKAGE, FIND = Path(numba_flash.__file__).parent, call.find  # the machine's stand-ins find nothing
STATES = (5, 7, 24, 8), (11, 13)
FIELDS = "seed", "offset", "first_query", "first_key"  # of a state


class Launched(NamedTuple):
    """A kernel, the states among its numbers, the numbers that are no state, and the first batch element of each state's problem."""

    kernel: str
    states: list[tuple]
    others: list
    firsts: list[int]


def launched(kernel: str, numbers) -> Launched:
    """Of numbers and tuples of numbers, among them parameters with a state."""
    parameters = [x for x in numbers if "seed" in getattr(x, "_fields", ())]
    others = [x._replace(**dict.fromkeys(FIELDS, 0)) if "seed" in getattr(x, "_fields", ()) else x for x in numbers]
    assert all(x.threshold > 0 for x in parameters), kernel  # it drops
    states = [tuple(int(getattr(x, name)) for name in FIELDS) for x in parameters]
    return Launched(kernel, states, packing.flat(others), [int(getattr(x, "first_batch", 0)) for x in parameters])


@contextmanager
def recording(launches: list, case):
    """Calls are prepared and kept as those of users are, and launch nothing, but say what they would, on the CPU, too."""

    def of_gpu(prepared):
        def run(*operands, extras=(), numbers=None):
            if isinstance(numbers, bytes):  # whose state, if there is one, is that of the preparation
                numbers = prepared.numbers
            launches.append(launched(prepared.builder, prepared.numbers if numbers is None else numbers))

        return run

    def of_cpu(dispatcher, items, grain, *given):
        found = (x for x in given if hasattr(x, "parameters"))
        launches.append(launched(dispatcher.__name__, [x.parameters for x in found]))

    with ExitStack() as stack:
        stack.enter_context(in_place_of_launches(of_gpu, case.multiprocessors, case.capability))
        for module, name, instead in (
            (call, "find", FIND),
            (scoremod, "_kept", OrderedDict()),
            (cpu, "_run", of_cpu),
            (sections, "MOST", case.most_sums),
            (sections, "room", lambda inputs: case.most_sums),
        ):
            stack.enter_context(mock.patch.object(module, name, instead))
        stack.enter_context(mock.patch.dict(call._prepared, clear=True))
        if case.known_lengths:
            stack.enter_context(lengths_as_numbers())
        if case.copied:
            stack.enter_context(as_if_copied(case.backend))
        yield


@contextmanager
def as_if_copied(backend: str):
    """NumPy arrays go to a GPU and come back, which is not so."""
    gpu = nullcontext()
    gpu.id = 0
    with (
        mock.patch.object(tier(backend), "takes_numpy", return_value=False),
        mock.patch.multiple(arrays, current_gpu=lambda: gpu, to_gpu=lambda name, x: x, to_host=lambda name, x, result: None),
    ):
        yield


class Case(NamedTuple):
    """What a call is given: heads and queries, keys, d, options beside dropout; and the GPU that there seems to be."""

    backend: str
    dtype: str = "float16"
    batch: int = 2
    heads: int = 4
    queries: int = 300
    keys: int = 304
    d: int = 64
    options: dict | None = None
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 132
    most_sums: int = 2**30
    copied: bool = False
    known_lengths: bool = False
    in_one: bool = False
    packed: bool = False
    strided: bool = False


LENGTHS = {"kv_lengths": np.array([3, 300], np.int32)}
SHAPES = {
    "alone": {},
    "both passes in one": {"in_one": True},
    "a bias with gradient": {"options": {"bias": (1, 4, 300, 304), "bias_grad": True}},
    "a bias of each batch element": {"options": {"bias": (2, 4, 300, 304), "bias_grad": True}, "d": 32},
    "a mask": {"options": {"mask": np.ones((300, 304), bool)}},
    "blocks": {"options": {"mask": numba_flash.BlockMask(np.ones((3, 3), bool), 128)}},
    "wide heads": {"d": 256},
    "lengths": {"options": LENGTHS},
    "keys in parts": {"batch": 1, "heads": 1, "queries": 64, "keys": 5000},
    "few queries": {"batch": 64, "queries": 1, "keys": 128, "d": 32},
    "few queries, some parts": {"batch": 1, "heads": 1, "queries": 8, "keys": 4000},
    "few queries, many parts": {"batch": 1, "heads": 1, "queries": 8, "keys": 100_000, "d": 16},
    "few queries, lengths that the host knows": {
        "queries": 1,
        "options": {"kv_lengths": np.array([3, 300], np.int32)},
        "known_lengths": True,
    },
    "packed": {"packed": True},
    "in sections": {"most_sums": 2**17},
    "copied": {"copied": True},
    "to an array that is no block": {"strided": True},
}
TIERS = (
    ("sm90", (9, 0), ("float16",)),
    ("sm80", (8, 0), ("float16", "float32", "float64")),
    ("simt", (9, 0), ("float16", "float32", "float64")),
    ("cpu", (9, 0), ("float16", "float64")),
)
CASES = {
    f"{backend}, {dtype}, {name}": Case(backend, dtype, capability=capability, **more)
    for backend, capability, dtypes in TIERS
    for dtype in dtypes
    for name, more in SHAPES.items()
    if backend != "cpu" or not {"copied", "known_lengths"} & more.keys()
}


def passes(case: Case):
    """Functions of a state: both passes, or what does both."""
    dtype = DTYPES[case.dtype]
    options = {"dropout": 0.25, "backend": case.backend} | (case.options or {})
    if "bias" in options:
        options["bias"] = np.zeros(options["bias"], dtype)
    of_forward = {name: x for name, x in options.items() if name != "bias_grad"}
    if case.packed:
        q, offsets = np.empty((case.queries, case.heads, case.d), dtype), [np.array([0, 100, 300], np.int32)] * 2
        lse = np.empty(q.shape[1::-1], np.float64 if case.dtype == "float64" else np.float32)
        yield partial(numba_flash.forward_packed, q, q, q, *offsets, **of_forward)
        yield partial(numba_flash.backward_packed, q, q, q, q, q, lse, *offsets, **options)
        return
    q, k = (np.empty((case.batch, case.heads, n, case.d), dtype) for n in (case.queries, case.keys))
    lse = np.empty(q.shape[:-1], np.float64 if case.dtype == "float64" else np.float32)
    out = np.empty((*q.shape[:-1], 2 * case.d), dtype)[..., ::2] if case.strided else None
    if case.in_one:
        yield lambda rng: numba_flash.vjp(q, k, k, rng=rng, **options)[-1](q)
        return
    yield partial(numba_flash.forward, q, k, k, out=out, **of_forward)
    yield partial(numba_flash.backward, q, q, k, k, q, lse, **options)


def two_calls(run, launches: list) -> list[list[Launched]]:
    """What each launches; the second one needs no preparation."""
    found = []
    for rng in STATES:
        launches.clear()
        with mock.patch.object(call, "remember", wraps=call.remember) as remember:
            run(rng=rng)
        assert bool(remember.call_count) == (not found)
        found.append([*launches])
    return found


# ---- which functions read a state --------------------------------------------------------------------------------------------------------


class Function(NamedTuple):
    """Where it begins, and its name."""

    file: str
    line: int
    name: str


def takes_state(node) -> bool:
    """A function with a parameter that is one, or that is there if there is one."""
    if not isinstance(node, ast.FunctionDef | ast.Lambda):
        return False
    given = node.args
    return "rng" in {x.arg for x in (*given.args, *given.kwonlyargs)} or (given.vararg is not None and given.vararg.arg == "state")


def reads_state(node) -> bool:
    """Whether it does anything with that."""
    body = node.body if isinstance(node.body, list) else [node.body]
    return any(isinstance(x, ast.Name) and x.id in ("rng", "state") for each in body for x in ast.walk(each))


def functions(*, reading: bool) -> set[Function]:
    """Those of the hosts that take a state, and read it, or do not."""
    hosts = (*sorted((PACKAGE / "cuda").rglob("*.py")), *(PACKAGE / name for name in ("call.py", "plan.py", "sections.py", "cpu/tier.py")))
    texts = {path: path.read_text() for path in hosts}
    return {
        Function(str(path), node.lineno, getattr(node, "name", "<lambda>"))
        for path, text in texts.items()
        if "rng" in text or "*state" in text  # most have neither, and are not gone through
        for node in ast.walk(ast.parse(text))
        if takes_state(node) and reads_state(node) == reading
    }


@contextmanager
def noting_who_gets_a_state(reached: set):
    """`reached` receives each `Function` of the package that gets one."""

    def called(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            given = frame.f_locals
            if given.get("rng") is not None or given.get("state"):
                code = frame.f_code
                reached.add(Function(code.co_filename, code.co_firstlineno, code.co_name))

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield
    finally:
        sys.setprofile(before)


@pytest.fixture(scope="module")
def of_all_cases() -> SimpleNamespace:
    """What each pass of each case launches in two calls, which functions get a state, and what backends refuse."""
    found, reached, refused = {}, set(), {}
    for name, case in CASES.items():
        launches = []
        with recording(launches, case):
            for number, run in enumerate(passes(case)):
                try:
                    with noting_who_gets_a_state(reached):
                        found[f"{name}, pass {number}"] = two_calls(run, launches)
                except NotImplementedError as error:
                    refused[name] = str(error)
                except Exception as error:
                    error.add_note(f"{name}, pass {number}")
                    raise
    return SimpleNamespace(found=found, reached=reached, refused=refused)


def test_each_launch_gets_the_state_of_its_call(of_all_cases):
    wrong = {}
    for name, calls in of_all_cases.found.items():
        for state, launches in zip(STATES, calls, strict=True):
            states = {x for each in launches for x in each.states}
            if states != {(*state, 0, 0)[:4]}:
                wrong[name] = [each for each in launches if each.states and {*each.states} != {(*state, 0, 0)[:4]}]
    assert wrong == {}


def test_nothing_else_depends_on_the_state(of_all_cases):
    for name, (first, second) in of_all_cases.found.items():
        assert [each._replace(states=[]) for each in first] == [each._replace(states=[]) for each in second], name


def test_sections_draw_for_their_own_batch_elements(of_all_cases):
    for name in ("sm90, float16", "sm80, float16", "sm80, float64"):
        launches, _ = of_all_cases.found[f"{name}, in sections, pass 1"]
        assert {first for each in launches for first in each.firsts} == {0, 1}, name


def test_every_function_that_reads_a_state_got_one(of_all_cases):
    """Of a new one the first of these calls that reaches it has to be written down here; one that ignores a state may not get any."""
    assert functions(reading=True) - of_all_cases.reached == set()
    assert functions(reading=False) & of_all_cases.reached == set()
    assert of_all_cases.refused.keys() == {f"{tier}, wide heads" for tier in ("sm90, float16", "sm80, float32", "sm80, float64")}


# ---- on the machine ----------------------------------------------------------------------------------------------------------------------

BIAS = {"bias": np.random.default_rng(0).standard_normal((1, 2, 70, 96)), "bias_grad": True}
ON_MACHINE = {
    "sm90": (Group(SM90, "float16", 64, 64, (), HOPPER), 70, BIAS),
    "sm80": (Group(SM80, "bfloat16", 64, 64, (), AMPERE), 70, BIAS),
    "sm80, float32": (Group(SM80, "float32", 64, 64, (), AMPERE), 70, {}),
    "sm80, few queries": (Group(SM80, "float16", 64, 64, (), AMPERE), 3, {}),
}


@pytest.mark.full
@pytest.mark.machine
@pytest.mark.parametrize("name", ON_MACHINE)
def test_each_call_drops_what_its_state_says(name):
    group, nq, options = ON_MACHINE[name]
    arrays = random_inputs(batch=(1,), hq=2, hk=1, nq=nq, nk=96, d=64, dtype=group.dtype)
    if options:
        options = options | {"bias": options["bias"].astype(DTYPES[group.dtype])}
    with (
        machine(capability=group.capability),
        mock.patch.object(call, "find", FIND),
        mock.patch.dict(call._prepared, clear=True),
        mock.patch.object(call, "remember", wraps=call.remember) as remember,
    ):
        for rng in STATES:
            given = {"dropout": 0.25, "rng": rng} | options
            compare(forward(group, arrays, **given) | backward(group, arrays, **given), *arrays, **given)
    assert remember.call_count == 2  # of each pass
