"""What a call hands to each kernel is what the kernel was prepared for: as many arrays, none smaller, and numbers of the same kinds.

A kernel that gets others reads beyond its arguments, and no driver says so. Random problems, on paper: nothing is compiled, nothing runs.
Kernels are only built, as far as the compiler would take them, for what they say of their arguments.
"""

import math
import weakref

import numpy as np
import pytest
import random_problems
from support import DTYPES, SIMULATED

if SIMULATED:
    pytest.skip("its kernels get the arrays themselves", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the machine's stand-ins know what it compiles")

from ptx_machine.problems.kernels import in_place_of_launches
from support.launch_arguments import check_arguments
from support.on_paper import on_paper, paper

import numba_flash
from numba_flash import sections
from numba_flash.arguments import arrays
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.options import AS_NUMBERS
from numba_flash.arguments.pages import PagedInputs
from numba_flash.arguments.problem import ForwardInputs, bind, bind_packed, bind_paged
from numba_flash.call import plan
from numba_flash.cpu import tier as cpu
from numba_flash.cuda.passes import prepare_kv_splits
from numba_flash.cuda.runtime import packing
from numba_flash.cuda.runtime.launch import Gpu, Launch
from numba_flash.cuda.work import prepare_lengths

GPUS = {"sm90": [(9, 0)], "sm80": [(7, 5), (8, 0), (8, 6), (9, 0), (10, 0)], "simt": [(7, 0), (9, 0)]}


def bytes_of(x) -> int:
    """Of an array, or of a layout; None has none."""
    return 0 if x is None else math.prod(x.shape) * np.dtype(x.dtype).itemsize


class Compared:
    """In the place of a `Launch`'s call: its arguments beside those that were prepared; `seen` counts launches."""

    seen = 0

    def __init__(self, prepared: Launch):
        self.prepared = prepared
        check_arguments(prepared)

    def __call__(self, *operands, extras=(), numbers=None) -> None:
        prepared, Compared.seen = self.prepared, Compared.seen + 1
        expected = [layout for layout, *_ in (*prepared.maps, *prepared.operands, *prepared.extras)]
        found, wanted = (list(map(bytes_of, each)) for each in ((*operands, *extras), expected))
        assert len(found) == len(wanted), prepared.builder
        there = [arrays.address(x) for x in operands[len(prepared.maps) :] if x is not None and x.size]
        assert len({*there}) == len(there), f"{prepared.builder} gets an array twice"
        assert all(x >= y and (x > 0) == (y > 0) for x, y in zip(found, wanted, strict=True)), f"{prepared.builder}: {found}, {wanted}"
        if isinstance(numbers, bytes):
            numbers = packing.unpacked(numbers, prepared.numbers)
        if numbers is not None:
            assert list(map(type, packing.flat(numbers))) == list(map(type, packing.flat(prepared.numbers))), prepared.builder


def call(inputs, options, backend: str) -> int:
    """Forward and backward, as far as the backend serves them; returns how many of the two it did."""
    q, k, v, do = inputs
    of_forward = {name: x for name, x in options.items() if name not in ("bias_grad", "dlse", "deterministic")}
    o, lse, done = np.zeros_like(do), np.zeros(do.shape[:-1], np.float64 if q.dtype == "float64" else np.float32), 0
    for run in (
        lambda: numba_flash.forward(q, k, v, return_lse=True, backend=backend, **of_forward),
        lambda: numba_flash.backward(do, q, k, v, o, lse, backend=backend, **options),
    ):
        try:
            run()
            done += 1
        except NotImplementedError:  # the backend says why; so do its own tests
            pass
    return done


@pytest.mark.parametrize("count", [3, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", GPUS)
def test_calls_hand_over_what_was_prepared(backend, count, monkeypatch):
    monkeypatch.setattr(random_problems, "MOST", 2000)  # queries or keys: enough for keys in parts
    done, Compared.seen = 0, 0
    for number, structure in enumerate(random_problems.STRUCTURES):
        for problem in range(count):
            rng = np.random.default_rng((7, number, problem))
            capability, multiprocessors = GPUS[backend][rng.integers(len(GPUS[backend]))], int(rng.choice([1, 4, 132]))
            inputs, options = random_problems.drawn(structure, rng)
            options |= {"scale": abs(options["scale"]), "deterministic": bool(rng.integers(2))}
            with in_place_of_launches(Compared, multiprocessors, capability):
                try:
                    done += call(inputs, options, backend)
                except Exception as error:
                    error.add_note(f"structure {number}, problem {problem}, {capability}, {multiprocessors}: {structure}")
                    raise
    assert done >= count * len(random_problems.STRUCTURES) / 2
    assert Compared.seen >= done


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_sections_get_what_they_were_prepared_for(backend, monkeypatch):
    """Also of what has one element for all of them."""
    monkeypatch.setattr(sections, "MOST", 2**12)
    monkeypatch.setattr(sections, "room", lambda inputs: 2**12)
    parts, cut_out = set(), sections._cut

    def checked(problem, cut, given):
        own, group = cut_out(problem, cut, given), problem.hq // problem.hk
        parts.add(cut.axis)
        if cut.axis == "heads" and hasattr(own, "q") and not problem.options.packed and own.q.ndim > 2:
            assert (own.q.shape[-3], own.k.shape[-3]) == ((cut.stop - cut.start) * group, cut.stop - cut.start)
        return own

    monkeypatch.setattr(sections, "_cut", checked)
    with in_place_of_launches(Compared, 132, (9, 0)):
        for number, structure in enumerate(random_problems.STRUCTURES):
            for problem in range(3):
                inputs, options = random_problems.drawn(structure, np.random.default_rng((9, number, problem)))
                call(inputs, options | {"scale": abs(options["scale"])}, backend)
    assert parts == {*sections.AXES}


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_results_have_the_dtype_of_sums(dtype):
    x = np.zeros((2, 1, 3, 8), DTYPES[dtype])
    found = prepare_kv_splits.layouts(bind(x, x, x), 5)
    sums = np.float64 if dtype == "float64" else np.float32
    assert [(each.shape, each.dtype) for each in found] == [((5, 2, 1, 3, 8), sums), ((5, 2, 1, 3), sums)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", GPUS)
def test_shares_of_the_gradient_of_a_bias_are_added_up(backend, dtype):
    """In the dtype of sums, whatever those of q and of the bias are; there are blocks for all shares, and threads for all elements."""
    sums, made, before = "float64" if dtype == "float64" else "float32", [], []

    def noted(prepared):
        if prepared.builder == "passes.sum_shares.build":
            (shares, whole) = (x for x, _ in prepared.operands)
            made.append([shares.dtype.name, whole.dtype.name])
            assert before[-1].grid >= shares.shape[0] > 1
            assert prepared.grid * prepared.threads >= math.prod(whole.shape)
        before.append(prepared)
        return Compared(prepared)

    x, k = (np.zeros((16, 2, n, 64), DTYPES[dtype]) for n in (64, 61))
    biases = [np.zeros((64, 61), kind) for kind in dict.fromkeys((DTYPES[dtype], DTYPES[sums]))]
    with in_place_of_launches(noted, 132, (9, 0)):
        done = [call((x, k, k.copy(), x.copy()), {"bias": bias, "bias_grad": True}, backend) for bias in biases]
    served = backend != "sm90" or dtype in ("float16", "bfloat16")
    assert done == [2 * served] * len(biases)
    assert made == [[sums, bias.dtype.name] for bias in biases if served]


@pytest.mark.parametrize("backend", ["sm80", "simt"])
def test_every_tile_of_the_gradient_of_a_large_bias_has_a_block(backend):
    """Also where there are more tiles than blocks of a kernel that has shares of them: then it is made without shares."""
    x = paper(1, 1, 3000, 64)
    launches = on_paper("backward", x, x, bias=paper(3000, 3000), bias_grad=True).prepared(backend, Gpu(0, (9, 0), 132)).launches
    dbias = next(each for each in launches if "dbias" in each.builder)
    _, (block_m, block_n) = dbias.scores
    tiles = -(-3000 // block_m) * -(-3000 // block_n)
    assert dbias.grid == tiles if backend == "simt" else dbias.grid >= min(132, tiles)


# ---- scratch memory ----------------------------------------------------------------------------------------------------------------------

KEPT = {"arrivals"}  # from call to call


class Foretold:
    """In the place of `plan.prepare` and `arrays.compact`: what calls were prepared to allocate, and what they did."""

    def __init__(self, monkeypatch):
        self.calls, self._prepare, self._compact, self._this, self._runs = [], plan.prepare, arrays.compact, None, False
        monkeypatch.setattr(plan, "prepare", self.prepare)
        monkeypatch.setattr(arrays, "compact", self.compact)

    def prepare(self, *arguments, **settings):
        prepared = self._prepare(*arguments, **settings)

        def run(*arguments):
            if self._runs:  # of which this is a section
                return prepared.run(*arguments)
            self._this, self._runs = Allocated(prepared.scratch), True
            self.calls.append(self._this)
            try:
                return prepared.run(*arguments)
            finally:
                self._runs = False

        return prepared._replace(run=run)

    def compact(self, name, like, shape, dtype):
        x = self._compact(name, like, shape, dtype)
        if name not in KEPT:
            self._this.add(x)
        return x


class Allocated:
    """By one call; bytes that were foretold, of each array, and at most at one time."""

    def __init__(self, foretold: int):
        self.foretold, self.arrays, self.peak, self._now = foretold, [], 0, 0

    def add(self, x: np.ndarray) -> None:
        self.arrays.append(x.nbytes)
        self._now += x.nbytes
        self.peak = max(self.peak, self._now)
        weakref.finalize(x, self._drop, x.nbytes)

    def _drop(self, size: int) -> None:
        self._now -= size


def check_plans(inputs, options, backend: str, foretold: Foretold) -> int:
    """A plan says what a call then allocates; returns how many of both passes allocate something."""
    q, k, v, _ = inputs
    del foretold.calls[:]
    done, more = call(inputs, options, backend), {"return_lse": True, "backend": backend}
    assert len(foretold.calls) == done
    one_by_one = backend == "cpu" and {"q_lengths", "kv_lengths"} & options.keys()
    for each in foretold.calls:
        assert each.peak <= each.foretold
        assert one_by_one or sum(each.arrays) <= each.foretold <= sum(each.arrays) + 512 * len(each.arrays)
    plans = []
    for kind in ("forward", "backward"):
        try:
            plans.append(numba_flash.plan(q, k, v, kind=kind, **options, **more).scratch)
        except NotImplementedError:
            pass
    assert plans == [each.foretold for each in foretold.calls]
    return sum(bool(each.arrays) for each in foretold.calls)


@pytest.mark.parametrize("count", [2, pytest.param(60, marks=pytest.mark.full)])
@pytest.mark.parametrize("backend", [*GPUS, "cpu"])
def test_calls_allocate_what_was_foretold(backend, count, monkeypatch):
    """Each array that a call makes for itself, but for what kernels of the CPU do within, of all kinds of problems."""
    monkeypatch.setattr(random_problems, "MOST", 2000)
    nothing = lambda prepared: lambda *operands, **more: None
    seen, gpus = 0, GPUS.get(backend, [(9, 0)])
    with monkeypatch.context() as patched:
        if backend == "cpu":
            patched.setattr(cpu, "_run", lambda *_: None)
        for number, structure in enumerate(random_problems.STRUCTURES):
            for problem in range(count):
                rng = np.random.default_rng((8, number, problem))
                capability, multiprocessors = gpus[rng.integers(len(gpus))], int(rng.choice([1, 4, 132]))
                inputs, options = random_problems.drawn(structure, rng)
                options["deterministic"] = bool(rng.integers(2))
                with in_place_of_launches(nothing, multiprocessors, capability), monkeypatch.context() as own:
                    seen += check_plans(inputs, options, backend, Foretold(own))
    assert seen > count


WHOLE_OR_IN_PARTS = {
    "few queries": ("simt", (64, 4, 1, 32), 20, "float32", {}),
    "few queries of one head": ("simt", (1, 1, 1, 32), 3000, "float32", {}),
    "a mask on Hopper": ("sm90", (64, 4, 128, 64), 128, "float16", {"mask": np.ones((128, 128), bool)}),
    "a mask of one head": ("sm90", (1, 1, 128, 64), 4096, "float16", {"mask": np.ones((128, 4096), bool)}),
    "float32 on Hopper": ("sm90", (64, 4, 128, 64), 128, "float32", {}),
}


@pytest.mark.parametrize("name", WHOLE_OR_IN_PARTS)
def test_what_parts_of_keys_would_need_is_foretold_where_there_are_parts(name, monkeypatch):
    backend, (*heads, nq, d), nk, dtype, options = WHOLE_OR_IN_PARTS[name]
    q, do, k, v = (np.zeros((*heads, n, d), dtype) for n in (nq, nq, nk, nk))
    with in_place_of_launches(lambda prepared: lambda *operands, **more: None, 4, (9, 0)), monkeypatch.context() as own:
        check_plans((q, k, v, do), options, backend, Foretold(own))  # what it patches goes back before what the machine does


SHARED_BIAS = {"bias": np.zeros((9, 16), np.float16), "bias_grad": True}
SECTIONS = {  # batch and heads, options, bytes of the shares that two sections have of the gradient of a bias
    "alike": ((8, 2), {}, 0),
    "the last one shorter": ((7, 2), {}, 0),
    "a bias that sections share": ((8, 2), SHARED_BIAS, 4 * 2 * 9 * 16),
    "a bias that heads share": ((16,), SHARED_BIAS, 4 * 2 * 9 * 16),
    "a bias of each": ((8, 2), {"bias": np.zeros((8, 2, 9, 16), np.float16), "bias_grad": True}, 0),
    "one axis, then the other": ((3, 8, 2), {}, 0),
}


@pytest.mark.parametrize("backend", ["sm90", "sm80"])
@pytest.mark.parametrize("name", SECTIONS)
def test_memory_of_sections_is_foretold(name, backend, monkeypatch):
    """That of one of them, the largest, and of what all of them add up in the end: neither less nor more."""
    heads, options, shares = SECTIONS[name]
    q, k = np.zeros((*heads, 9, 64), np.float16), np.zeros((*heads, 16, 64), np.float16)
    alone, calls, prepare = {}, [], sections.prepare
    monkeypatch.setattr(sections, "MOST", 3 * 2**16)
    monkeypatch.setattr(sections, "room", lambda inputs: 3 * 2**16)
    monkeypatch.setattr(sections, "too_large", lambda *arguments: None)

    def noted(whole, *arguments):
        part = lambda *of_one: alone.setdefault(of_one[0], whole(*of_one))
        calls.append(prepare(part, *arguments))
        return calls[-1]

    monkeypatch.setattr(sections, "prepare", noted)
    with in_place_of_launches(lambda prepared: lambda *operands, **more: None, 132, (9, 0)), monkeypatch.context() as own:
        foretold = Foretold(own)
        assert call((q, k, k, q), options, backend) == 2
    assert calls
    backward = foretold.calls[-1]
    largest = max(each.scratch for each in alone.values())
    assert largest + shares <= backward.foretold <= largest + 8 * shares
    assert backward.peak <= backward.foretold <= backward.peak + 2**12


@pytest.mark.parametrize("nq", [128, 126])
def test_what_goes_to_out_by_way_of_another_array_is_foretold(nq, monkeypatch):
    """The copy engine cannot write every second column. The lse goes where it belongs, wherever its heads begin."""
    q = np.zeros((64, 4, nq, 64), np.float16)
    out = np.zeros((64, 4, nq, 128), np.float16)[..., ::2]
    foretold = Foretold(monkeypatch)
    with in_place_of_launches(lambda prepared: lambda *operands, **more: None, 4, (9, 0)):
        numba_flash.forward(q, q, q, out=out, return_lse=True, backend="sm90")
    (only,) = foretold.calls
    assert only.foretold == sum(only.arrays) == q.nbytes


# ---- lengths of the host -----------------------------------------------------------------------------------------------------------------


def of_lengths(batch: int | tuple[int, int], *names: str, nq: int = 3, nk: int = 5) -> tuple:
    """A problem of few queries and keys, its inputs, and the greatest of the lengths with these names."""
    batch = batch if isinstance(batch, tuple) else (batch,)
    q, k = np.zeros((*batch, 1, nq, 64), np.float16), np.zeros((*batch, 1, nk, 64), np.float16)
    most = {name: n for name, n in {"q_lengths": nq, "kv_lengths": nk}.items() if name in names}
    given = {name: np.full(batch, n, np.int32) for name, n in most.items()}
    return bind(q, k, k, **given), ForwardInputs(q, k, k, **given), most


def of_pages() -> tuple:
    """The same of pages of 2 keys, 3 for each of two sequences."""
    q, pages, table, lengths = np.zeros((2, 1, 3, 64), np.float16), np.zeros((4, 1, 2, 64), np.float16), np.full((2, 3), 3), np.full(2, 6)
    inputs = PagedInputs(q=q, k=pages, v=pages, page_table=table, kv_lengths=lengths)
    return bind_paged(q, pages, pages, table, lengths), inputs, {"page_table": 3, "kv_lengths": 6}


def of_offsets() -> tuple:
    """The same of two sequences, one after the other; the second has no queries."""
    q, k, offsets = np.zeros((3, 1, 64), np.float16), np.zeros((5, 1, 64), np.float16), (np.array([0, 3, 3]), np.array([0, 2, 5]))
    return bind_packed(q, k, k, *offsets), ForwardInputs(q, k, k, None, None, *offsets), {"q_lengths": 3, "kv_lengths": 5}


SENT = {
    "lengths of keys": of_lengths(2, "kv_lengths"),
    "lengths of queries": of_lengths(2, "q_lengths"),
    "both": of_lengths(2, "q_lengths", "kv_lengths"),
    "of fewer keys than queries": of_lengths(2, "kv_lengths", nq=7),
    "of two axes": of_lengths((2, 3), "kv_lengths"),
    "both, of fewer keys than queries": of_lengths(2, "q_lengths", "kv_lengths", nq=7),
    "as many as go with a launch": of_lengths(64, "kv_lengths"),
    "more": of_lengths(65, "kv_lengths"),
    "both, more": of_lengths(33, "q_lengths", "kv_lengths"),
    "pages": of_pages(),
    "offsets": of_offsets(),
}


@pytest.mark.parametrize("name", SENT)
def test_lengths_are_checked_before_they_are_sent(name, monkeypatch):
    """In every call; the greatest that there may be are sent as they are."""
    (problem, inputs, most), sent = SENT[name], []
    monkeypatch.setattr(arrays, "to_gpu", lambda name, x: sent.append(x.copy()) or x)

    def sending(prepared):
        count = sum(x.shape[0] for x, _ in prepared.operands if x is not None)
        return lambda *_, numbers, **more: sent.append(np.frombuffer(numbers, np.int64)[:count])

    with in_place_of_launches(sending, 4, (9, 0)):
        send = prepare_lengths.sender(problem, inputs, [*most], 0)
        for _ in range(2):
            of_call = send(inputs)
            for each in most:  # those that kernels take as numbers are stored when they are asked for
                assert getattr(of_call, each).data is not None
        assert sent[-1].max() == max(most.values())
        count = len(sent)
        for each, greatest in most.items():
            for bad in (-1, greatest + 1):
                wrong = getattr(inputs, each).copy()
                wrong.flat[-1] = bad
                with pytest.raises(ValueError, match=rf"^({each}|[qk]_offsets).* {bad}$"):
                    send(inputs._replace(**{each: wrong}))
        if name == "offsets":
            for each in most:
                with pytest.raises(ValueError, match=r"^[qk]_offsets must go from 0 to .* it goes from 1 to"):
                    send(inputs._replace(**{each: np.maximum(getattr(inputs, each), 1)}))
        assert len(sent) == count


@pytest.mark.parametrize(("name", "numbers"), [("lengths of keys", True), ("of two axes", False), ("offsets", False), ("both", False)])
def test_lengths_are_numbers_where_kernels_count_batch_elements_along_one_axis(name, numbers):
    """Elsewhere kernels read an array."""
    problem, inputs, most = SENT[name]
    with in_place_of_launches(lambda prepared: lambda *_, **more: None, 4, (9, 0)):
        of_call = prepare_lengths.sender(problem, inputs, [*most], 0)(inputs)
    layouts = type(of_call)(*map(Layout.of, of_call))
    assert layouts.kv_lengths.known == numbers
    assert (prepare_lengths.with_numbers(problem, layouts).options.kv_lengths == AS_NUMBERS) == numbers
