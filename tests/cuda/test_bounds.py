"""How much memory and how many blocks the largest problems take, on paper: sums of dq are bounded, and numbers fit into 32 bits."""

import importlib
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import DTYPES, ROOT, SIMULATED, dense_visible
from support.on_paper import on_paper, paper, plan

import numba_flash
from numba_flash import sections
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, Prepared, bind, bind_packed
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.cuda.runtime.packing import flat
from numba_flash.cuda.sm90.backward import prepare_block_sparse
from numba_flash.cuda.work import grid

if SIMULATED:
    pytest.skip("the simulator has one tier", allow_module_level=True)

GPUS = {"sm90": Gpu(0, (9, 0), 132), "sm80": Gpu(0, (8, 0), 108), "simt": Gpu(0, (7, 0), 80)}
TENSOR_CORES = "sm90", "sm80"
MOST = 2**31 - 1
DROPOUT = {"dropout": 0.1, "rng": (1, 2)}


# ---- sums of dq --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sums(monkeypatch):
    """Bytes of sums of dq at the same time, of everything that is prepared."""
    seen, prepare = [], plan.prepare

    def noted(*arguments, **settings):
        prepared = prepare(*arguments, **settings)
        seen.append(prepared.sums)
        return prepared

    monkeypatch.setattr(plan, "prepare", noted)
    return seen


def qk(batch: int, heads: int, n: int, d: int, dtype):
    return (paper(batch, heads, n, d, dtype=dtype),) * 2


def packed(sequences: int, heads: int, n: int, d: int, dtype):
    """So many of n tokens each."""
    return (paper(sequences * n, heads, d, dtype=dtype),) * 2


SHORT, LONGER = (1000000, 4, 16, 64), (300000, 16, 4, 128)
FEW_QUERIES = {  # sizes, options, how many heads share a bias with gradient, packed
    "short": (SHORT, {}, 0, False),
    "short, dropout": (SHORT, DROPOUT, 0, False),
    "short, a shared bias": (SHORT, {}, 4, False),
    "longer": (LONGER, {}, 0, False),
    "longer, dropout": (LONGER, DROPOUT, 0, False),
    "longer, a shared bias": (LONGER, {}, 16, False),
    "many heads": ((1, 300000, 1, 64), {}, 0, False),
    "packed": (SHORT, {}, 0, True),
    "packed, longer": (LONGER, {}, 0, True),
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("backend", TENSOR_CORES)
@pytest.mark.parametrize("name", FEW_QUERIES)
def test_sums_of_few_queries_take_no_more_than_the_inputs(name, backend, dtype, sums):
    """Or a GiB, at a time; and what a call allocates besides is little, but for planes of float32."""
    sizes, options, of_bias, is_packed = FEW_QUERIES[name]
    q, k = (packed if is_packed else qk)(*sizes, DTYPES[dtype])
    if of_bias:
        options = {"bias": paper(of_bias, sizes[2], sizes[2], dtype=DTYPES[dtype]), "bias_grad": True}
    if is_packed:
        options = options | {"offsets": paper(sizes[0] + 1, dtype=np.int32)}
    case = on_paper("backward", q, k, **options)
    if (reason := case.why_not(backend, GPUS[backend])) is not None:
        assert (backend, dtype) == ("sm90", "float32")
        assert reason.startswith("does not know")
        return
    prepared = case.prepared(backend, GPUS[backend])
    inputs = sum(sections._size(x) for x in case.inputs)
    room, planes = max(2**30, inputs), 1.1 * inputs if dtype == "float32" else 0
    most = max(sums)
    assert 2**29 < most <= room
    assert prepared.scratch <= 1.1 * most + planes
    if not is_packed and dtype == "float16":
        assert len(sums) > 1, "of sections, and of all together"
        assert most <= 2**30


CANNOT_BE_CUT = {
    "dropout of heads": (qk, (1, 300000, 4, 64), "the batch elements"),
    "packed, one head": (packed, (1000000, 1, 1, 64), "the heads of a batch element"),
    "packed, dropout": (packed, SHORT, "the batch elements"),
}


@pytest.mark.parametrize("backend", TENSOR_CORES)
@pytest.mark.parametrize("name", CANNOT_BE_CUT)
def test_sums_that_cannot_be_cut_are_refused(name, backend):
    make, sizes, apart = CANNOT_BE_CUT[name]
    options = DROPOUT if "dropout" in name else {}
    if make is packed:
        options = options | {"offsets": paper(sizes[0] + 1, dtype=np.int32)}
    case = on_paper("backward", *make(*sizes, np.float16), **options)
    reason = case.why_not(backend, GPUS[backend])
    needs, rest = reason.removeprefix("needs ").split(" bytes for sums of dq, mostly padding, ")
    assert rest == f"as {apart} of so few queries are not computed apart from each other"
    assert int(needs) > sections.room(case.inputs)
    assert case.why_not("simt", GPUS["simt"]) is None


@pytest.mark.parametrize("sums", [101, 250, 1000])
@pytest.mark.parametrize("of_packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize(("batch", "hq", "hk"), [((2,), 6, 3), ((4, 1), 4, 2), ((2, 5), 2, 2), ((), 4, 4), ((), 10, 5)], ids=str)
def test_sections_have_each_element_once(batch, hq, hk, of_packed, sums, monkeypatch):
    """Of all arrays the same heads of the same batch elements; each number of q, and so of lse, begins with that of its head of k."""
    monkeypatch.setattr(sections, "MOST", 100)
    shapes = [(*batch, heads, n, 8) for heads, n in ((hq, 7), (hk, 5))]
    numbered = lambda shape: np.arange(shape[-3]).reshape(-1, 1, 1) * hk // shape[-3] + np.arange(math.prod(shape)).reshape(shape) / 1e4
    if of_packed:  # all batch elements are tokens of as many sequences
        shapes = [(heads, math.prod(batch) * n, d) for *_, heads, n, d in shapes]
        q, k = (numbered(shape).swapaxes(0, 1) for shape in shapes)
        offsets = [np.arange(math.prod(batch) + 1) * n for n in (7, 5)]
        problem, options = bind_packed(q, k, k, *offsets), dict(zip(("q_lengths", "kv_lengths"), offsets, strict=True))
    else:
        q, k = map(numbered, shapes)
        options = {"bias": q[(0,) * len(batch)][:, :1, :1]}
        problem = bind(q, k, k, **options)
    first_column = lambda q: q[..., 0].swapaxes(0, 1) if of_packed else q[..., 0]
    heads_of = lambda x: np.unique(np.floor(x)).tolist()
    number_of = lambda x: x.shape[1 if of_packed else -3]
    inputs, calls = BackwardInputs(q, q, k, k, q, first_column(q), **options), []
    results = BackwardResults(*map(np.zeros_like, (q, k, k)), None)

    def whole(part, planned, stored):
        def run(x, y):
            assert (part.hq, part.hk) == (number_of(x.q), number_of(x.k))
            assert (x.q.shape, x.k.shape, y.dv.shape) == (planned.q.shape, planned.k.shape, stored.dv.shape)
            np.testing.assert_array_equal(x.lse, first_column(x.q))
            assert heads_of(x.q) == heads_of(x.k)
            assert of_packed or heads_of(x.bias) == heads_of(x.q)
            for y_, x_ in zip(y[:3], (x.q, x.k, x.v), strict=True):
                y_ += x_
            calls.append(part)

        return Prepared(run, ())

    layouts = lambda given: given._make(map(Layout.of, given))
    sections.prepare(whole, problem, layouts(inputs), layouts(results), sums).run(inputs, results)
    size = sections.axis_of(problem).size
    assert len(calls) == min(size, math.ceil(size / max(1, size * 100 // sums)))
    for found, x in zip(results[:3], (q, k, k), strict=True):
        np.testing.assert_array_equal(found, x)


def test_ordinary_problems_have_no_sections(monkeypatch):
    """None of the situations that are measured has, whose backward passes are timed."""
    monkeypatch.syspath_prepend(str(ROOT / "asv_bench" / "studies"))
    situations = importlib.import_module("situation_list").SITUATIONS
    monkeypatch.setattr(sections, "prepare", lambda *arguments: pytest.fail("in sections"))
    seen = 0
    for s in situations:
        dtype = DTYPES[s.dtype]
        q, k = paper(s.batch, s.heads, s.length, s.head_dim, dtype=dtype), paper(s.batch, s.heads_kv, s.length_kv, s.head_dim, dtype=dtype)
        options = {"causal": s.causal} | (DROPOUT if s.dropout else {})
        if s.bias:
            options |= {"bias": paper(1, s.heads, s.length, s.length_kv, dtype=dtype), "bias_grad": True}
        if s.mask:
            options |= {"mask": paper(1, 1, s.length, s.length_kv, dtype=bool)}
        case = on_paper("backward", q, k, **options)
        for backend in TENSOR_CORES if "backward" in s.directions else ():
            if case.why_not(backend, GPUS[backend]) is None:
                case.prepared(backend, GPUS[backend])
                seen += 1
    assert seen > 20


# ---- numbers of 32 bits ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("batch", [(2**31,), (2**16, 2**15)], ids=str)
def test_too_many_heads_are_refused(batch, kind, dtype):
    """By each tier for GPUs, also on demand; the sentence comes before anything is allocated."""
    x = paper(*batch, 1, 1, 8, dtype=DTYPES[dtype])
    case = on_paper(kind, x, x)
    for backend in GPUS:
        assert case.why_not(backend, GPUS[backend]) == f"numbers at most {MOST} blocks of rows; of {grid.SHORTEST} rows, these are {2**31}"
        with pytest.raises(NotImplementedError, match=rf"^backend {backend}: numbers at most {MOST} blocks of rows"):
            plan.choose(case.problem, case.inputs, backend, kind, gpu=GPUS[backend])


def test_few_of_many_rows_are_counted_in_the_smallest_blocks():
    problem = lambda heads, n: bind(*(paper(heads, 1, n, 8),) * 3)
    assert grid.too_many_blocks(problem(2**20, 8 * 2047)) is None
    assert grid.too_many_blocks(problem(2**20, 8 * 2047 + 1)).endswith(f"these are {2**31}")


def blocks(nq, nk, size=128):
    return numba_flash.BlockMask(np.broadcast_to(np.True_, (-(-nq // size), -(-nk // size))), size)


# Batch, heads of q and k, queries, keys: as many of each as tiers accept.
LARGEST = {
    "heads": ((MOST,), (1, 1), (1, 1)),
    "b0 and b1": ((46340, 46340), (1, 1), (1, 1)),
    "heads of one": ((1,), (MOST, MOST), (1, 1)),
    "a fifth of them, of float32": ((MOST // 5,), (1, 1), (1, 1)),
    "heads in groups": ((2**24 - 1,), (128, 1), (1, 1)),
    "few queries": ((2**20,), (8, 8), (1, 2**13)),
    "few queries in groups": ((2**21,), (8, 1), (4, 600)),
    "2**30 of each": ((1,), (1, 1), (2**30, 2**30)),
    "heads of 2**30": ((1,), (15, 15), (2**30, 2**30)),
    "a million of each": ((1,), (32, 32), (2**20, 2**20)),
    "keys": ((1,), (15, 15), (1, 2**30)),
    "keys of one head": ((1,), (1, 1), (1, 2**30)),
    "queries of one key": ((1,), (15, 1), (2**30, 1)),
    "short": ((2**22,), (4, 4), (900, 900)),
}
OPTIONS = {
    "plain": lambda batch, n: {},
    "causal": lambda batch, n: {"causal": True},
    "a window": lambda batch, n: {"window": (1000, 1000)},
    "a bias of keys": lambda batch, n: {"bias": paper(n[1], dtype=np.float32)},
    "a bias": lambda batch, n: {"bias": paper(*n, dtype=np.float32)} if math.prod(n) <= 2**40 else {},
    "a mask": lambda batch, n: {"mask": paper(*n, dtype=bool)},
    "blocks": lambda batch, n: {"mask": blocks(*n)},
    "dropout": lambda batch, n: DROPOUT,
    "lengths": lambda batch, n: dict.fromkeys(("q_lengths", "kv_lengths"), paper(*batch, dtype=np.int32)),
}


@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", [pytest.param(x, marks=pytest.mark.full) if "2**30" in x else x for x in LARGEST])
def test_numbers_of_the_largest_problems_fit_into_32_bits(sizes, options, kind, monkeypatch):
    """Grids, and every integer that a kernel gets; there, no sum of dq is cut, which would make problems smaller."""
    batch, (hq, hk), n = LARGEST[sizes]
    monkeypatch.setattr(sections, "room", lambda inputs: math.inf)
    for backend, gpu in GPUS.items():
        for dtype in ("float16", "float32", "float64"):
            given = OPTIONS[options](batch, n)
            q, k = (paper(*batch, *of_one, 128 if dtype == "float16" else 64, dtype=DTYPES[dtype]) for of_one in ((hq, n[0]), (hk, n[1])))
            case = on_paper(kind, q, k, bias_grad="bias" in given, **given)
            if case.why_not(backend, gpu) is not None:
                continue
            for launch in case.prepared(backend, gpu).launches:
                assert 0 <= launch.grid <= MOST, launch.builder
                integers = [x for x in flat(launch.numbers) if isinstance(x, int | np.int32)]
                assert all(abs(x) <= MOST for x in integers), (launch.builder, launch.numbers)


# ---- lists of tiles ----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    *(st.integers(1, 40) for _ in range(2)),
    st.sampled_from([{}, {"causal": True}, {"window": (3, 5)}, {"window": (0, 0)}, {"window": (-1, 2)}, {"window": (20, -1)}]),
    st.integers(-30, 30),
    *(st.sampled_from([1, 4, 7]) for _ in range(2)),
)
def test_tiles_in_the_band(nq, nk, band, q_start, block_m, block_n):
    """As many as have a pair that is visible; and one for each row of tiles whose band begins beyond the last key."""
    problem = bind(paper(nq, 8), paper(nk, 8), paper(nk, 8), q_start=q_start, **band)
    visible = dense_visible(nq, nk, q_start=q_start, **band)
    rows, columns = range(0, nq, block_m), range(0, nk, block_n)
    expected = sum(bool(visible[i : i + block_m, j : j + block_n].any()) for i in rows for j in columns)
    beyond = sum(problem.low + i >= nk for i in rows)
    assert expected <= grid.tiles_in_band(problem, block_m, block_n) <= expected + beyond


def listed(heads: int, n: int, **options) -> bool:
    return prepare_block_sparse.serves(bind(*(paper(1, heads, n, 128),) * 3, mask=blocks(n, n), **options))


def test_ds_is_kept_where_sections_are_few():
    """Of a head of a million queries and keys; of 32 heads there might be 16,384, with two launches each, and tiles beyond 2**31."""
    assert not listed(32, 2**20)
    assert not listed(3, 2**20)
    assert listed(1, 2**20)
    assert listed(2, 2**20, causal=True)
    assert listed(32, 2**20, window=(4096, 4096))
    q = paper(1, 32, 2**20, 128)
    case = on_paper("backward", q, q, mask=blocks(2**20, 2**20))
    builders = [launch.builder for launch in case.prepared("sm90", GPUS["sm90"]).launches]
    assert "sm90.backward.backward.build" in builders
    assert len(builders) < 6


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 64), st.integers(0, 7), st.integers(7, 25), st.integers(7, 30), st.sampled_from([{}, {"causal": True}]))
@example(1, 7, 21, 13, {})  # few sections, of much room
def test_slots_fit_into_32_bits(hk, log_group, log_nq, log_nk, band):
    """Of whatever is kept: each section's, and all that there could be."""
    nq, nk = 2**log_nq, 2**log_nk
    problem = bind(paper(1, hk << log_group, nq, 128), *(paper(1, hk, nk, 128),) * 2, mask=blocks(nq, nk), **band)
    slots = prepare_block_sparse.slots_of(problem)
    if prepare_block_sparse.serves(problem):
        assert slots.sections * slots.room <= MOST
        assert slots.sections * slots.whole <= MOST


# ---- nothing at all ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("empty", range(4), ids=["batch", "heads", "queries", "keys"])
def test_gradients_of_a_bias_of_nothing_are_prepared(empty, dtype):
    """As those of other biases, with blocks for what there is of each result; `sm90` is not for empty arrays."""
    sizes = [2, 4, 70, 90]
    sizes[empty] = 0
    batch, heads, nq, nk = sizes
    q, k = (paper(batch, heads, n, 16, dtype=DTYPES[dtype]) for n in (nq, nk))
    for shape in (tuple(sizes), (heads, nq, nk), (nk,), (nq, 1)):
        case = on_paper("backward", q, k, bias=paper(*shape, dtype=DTYPES[dtype]), bias_grad=True)
        for backend in ("sm80", "simt"):
            launches = case.prepared(backend, GPUS[backend]).launches
            of_bias = [x for x in launches if "dbias" in x.builder]
            assert of_bias, backend
            assert all((x.grid > 0) == (0 not in shape) for x in of_bias), f"{backend}: {shape}"
