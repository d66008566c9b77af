"""Keys and values in pages: what the pages stand for, nothing else that lies in the cache, and one preparation for all values."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import DTYPES, SIMULATED, random_inputs, same_bits
from support.naive import compare
from support.pages import forward, paged

import numba_flash
from numba_flash import call
from numba_flash.scoremod import functions as scoremod

simulator, full_on_cpu = pytest.mark.simulator, pytest.mark.full_on_cpu
NQ, NK, D = (3, 9, 3) if SIMULATED else (70, 300, 16)
LENGTHS = (NK, NK // 2 - 1, 0)
SIZE = 2 if SIMULATED else 16
HEADS = (2, 1) if SIMULATED else (4, 2)


def arrays_of(size=SIZE, batch=(3,), nq=NQ, lengths=LENGTHS, dtype="float32", d=D, dv=None, seed=0, **more):
    hq, hk = HEADS
    lengths = np.array(lengths)
    nk = max(int(lengths.max(initial=0)), 1)
    q, k, v, do = random_inputs(batch=batch, hq=hq, hk=hk, nq=nq, nk=nk, d=d, dv=dv, dtype=dtype, seed=seed)
    return paged(q, k, v, lengths, size, seed=seed, **more), do


def check(backend, arrays, do, layouts=("contiguous",) * 3, **options) -> dict:
    """Against the oracle on the keys and values that the pages stand for."""
    on_device = {name: backend.to_device(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    results = forward(backend, arrays, layouts, **on_device)
    compare(results, arrays.q, arrays.k, arrays.v, do, kv_lengths=arrays.kv_lengths, **options)
    return results


def normal(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(x, marks=simulator(full=x != "float32") if x == "float32" else [simulator(full=True), full_on_cpu]) for x in DTYPES],
)
def test_dtypes(backend, dtype):
    check(backend, *arrays_of(dtype=dtype), causal=True)


@pytest.mark.parametrize("size", [pytest.param(n, marks=simulator(full=True)) for n in (1, 7, 64, 512)])
@pytest.mark.parametrize("nq", [1, pytest.param(NQ, marks=[simulator(full=True), full_on_cpu])])
def test_sizes_of_pages(backend, size, nq):
    """Of one key, of no power of two, longer than a tile, longer than all keys; the table has entries that nobody uses."""
    check(backend, *arrays_of(size, nq=nq, more=2))


def test_a_page_that_begins_in_the_middle_of_a_tile(backend):
    """And ends beyond it, in tiles of up to 512 keys."""
    check(backend, *arrays_of(7, nq=3, lengths=(600, 513, 520)))


LAST = -(-NK // SIZE) * SIZE  # as many keys as a row of the table has room for
OPTIONS = {
    "window": {"window": (20, 3)},
    "q_start": {"causal": True, "q_start": 1},
    "scale and softcap": {"scale": 0.7, "softcap": 2.0},
    "bias and mask": {"bias": normal(HEADS[0], 1, LAST), "mask": normal(NQ, LAST) > 0},
    "q_lengths": {"causal": True, "q_lengths": np.array([NQ, 1, 2])},
    "alibi": {"score_mod": scoremod.alibi(2.0 ** -np.arange(1, HEADS[0] + 1))},
}


@full_on_cpu
@pytest.mark.parametrize("name", [pytest.param(name, marks=simulator(full=True)) for name in OPTIONS])
def test_options(backend, name):
    options, more = OPTIONS[name], {}
    if name == "alibi":
        more = {"score_mod_grad": options["score_mod"].score_mod_grad}
    arrays, do = arrays_of()
    on_device = {name: backend.to_device(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    results = forward(backend, arrays, **on_device)
    k, v = (np.pad(x, [(0, 0)] * 2 + [(0, LAST - x.shape[-2]), (0, 0)]) for x in (arrays.k, arrays.v))
    compare(results, arrays.q, k, v, do, kv_lengths=arrays.kv_lengths, **options, **more)


@simulator(full=True)
def test_a_table_of_64_bits_with_shared_pages(backend):
    arrays, do = arrays_of(lengths=(NK, NK, NK - 1), dtype="float32", shared=2 if SIMULATED else 9)
    assert (arrays.page_table[0, :2] == arrays.page_table[2, :2]).all()
    wide = arrays._replace(page_table=arrays.page_table.astype(np.int64))
    assert all(map(same_bits, check(backend, arrays, do).values(), check(backend, wide, do).values()))


@pytest.mark.parametrize("layouts", [("strided", "reversed", "transposed"), ("heads last",) * 3])
def test_any_strides(backend, layouts):
    check(backend, *arrays_of(dv=5), layouts)


def test_more_dimensions_and_fewer(backend):
    lengths = np.array([[NK, 3], [0, 17]])
    check(backend, *arrays_of(batch=(2, 2), lengths=lengths), causal=True)
    check(backend, *arrays_of(batch=(), lengths=NK - 1), causal=True)


def test_one_head_without_its_axis(backend):
    arrays, do = arrays_of(batch=(), lengths=NK - 1)
    arrays = arrays._replace(k_pages=arrays.k_pages[:, :1], v_pages=arrays.v_pages[:, :1], k=arrays.k[:1], v=arrays.v[:1])
    alone = forward(backend, arrays._replace(q=arrays.q[0]))
    check(backend, arrays._replace(q=arrays.q[:1]), do[:1])
    assert all(x.shape[:1] == (NQ,) for x in alone.values())


def test_strides_of_the_table(backend):
    arrays, do = arrays_of()
    transposed = arrays._replace(page_table=np.asfortranarray(arrays.page_table))
    assert all(map(same_bits, check(backend, arrays, do).values(), check(backend, transposed, do).values()))


@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 1, 0)])
def test_hardly_any_keys(backend, lengths):
    check(backend, *arrays_of(lengths=lengths))


def test_nothing(backend):
    """No sequences; no queries; no pages; a table without entries."""
    empty = lambda *shape: backend.to_device(np.zeros(shape, np.float32))
    integers = lambda *shape: backend.to_device(np.zeros(shape, np.int32))
    for batch, nq, pages, most in ((0, 3, 2, 1), (2, 0, 2, 1), (2, 3, 0, 1), (2, 3, 2, 0)):
        cache = empty(pages, 1, 4, 8)
        o, lse = backend.forward_paged(empty(batch, 1, nq, 8), cache, cache, integers(batch, most), integers(batch), return_lse=True)
        assert (backend.to_host(o) == 0).all()
        assert (backend.to_host(lse) == -np.inf).all()
        assert (o.shape, lse.shape) == ((batch, 1, nq, 8), (batch, 1, nq))


@full_on_cpu
def test_out_and_no_lse(backend):
    arrays, do = arrays_of(dtype="float16")
    given = [backend.to_device(x) for x in arrays[:5]]
    expected = check(backend, arrays, do)["o"]
    out, wide = (backend.to_device(np.full(do.shape, np.nan, dtype)) for dtype in (np.float16, np.float32))
    assert backend.forward_paged(*given, out=out) is out
    assert same_bits(backend.to_host(out), expected)
    assert backend.forward_paged(*given, out=wide) is wide
    assert same_bits(backend.to_host(wide).astype(np.float16), expected)
    assert same_bits(backend.to_host(backend.forward_paged(*given)), expected)


@settings(max_examples=4 if SIMULATED else 15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    *(st.integers(1, 40), st.integers(1, 5), st.lists(st.integers(0, 12 if SIMULATED else 90), min_size=1, max_size=3)),
    *(st.booleans(), st.integers(0, 3), st.sampled_from((np.int32, np.int64)), st.integers(0, 2**31)),
)
def test_any_pages(backend, size, nq, lengths, causal, shared, dtype, seed):
    batch = (len(lengths),)
    check(backend, *arrays_of(size, batch, nq, lengths, d=4, seed=seed, shared=shared, dtype="float32", more=1), causal=causal)


def test_one_preparation_serves_all_tables_and_lengths(monkeypatch):
    """So a cache that grows by a key in every call costs a look-up."""
    prepared = []
    monkeypatch.setattr(call, "_prepared", {})
    remember = call.remember
    monkeypatch.setattr(call, "remember", lambda key, run: prepared.append(key) or remember(key, run))
    arrays, _ = arrays_of()
    for length in (NK, 5, 0):
        lengths = np.array([length, 1, 2])
        numba_flash.forward_paged(*arrays[:3], np.abs(arrays.page_table) % 3, lengths, backend="cpu")
    assert len(prepared) == 1
    numba_flash.forward_paged(*arrays[:3], np.abs(arrays.page_table[:, 1:]) % 3, lengths, backend="cpu")
    assert len(prepared) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("page", [pytest.param(-1, marks=simulator(full=True)), pytest.param(10**6, marks=simulator)])
def test_a_page_that_does_not_exist_on_a_gpu_gives_nan(monkeypatch, page):
    """Nothing of the sequence is read: the simulator raises where an index lies beyond an array."""
    if SIMULATED:
        xp, backend = np, "simt"
        monkeypatch.setattr(call, "check_values", lambda *_: None)
    else:
        xp, backend = pytest.importorskip("cupy"), None
    arrays, _ = arrays_of(nq=1, lengths=(NK, NK, NK))
    arrays.page_table[1, 2] = page
    for x in numba_flash.forward_paged(*map(xp.asarray, arrays[:5]), return_lse=True, backend=backend):
        assert bool(xp.isnan(x[1]).all())
        assert not bool(xp.isnan(x[::2]).any())


@pytest.mark.gpu
def test_a_table_and_lengths_may_be_on_either_side():
    cp = pytest.importorskip("cupy")
    arrays, _ = arrays_of(dtype="float16")
    inputs = list(map(cp.asarray, arrays[:3]))
    results = [
        numba_flash.forward_paged(*inputs, table(arrays.page_table), lengths(arrays.kv_lengths))
        for table in (cp.asarray, np.asarray)
        for lengths in (cp.asarray, np.asarray)
    ]
    assert all(cp.array_equal(x, results[0]) for x in results)


def test_the_plan_of_pages():
    arrays, _ = arrays_of(dtype="float16")
    q, k, v, table, lengths = arrays[:5]
    plan = numba_flash.plan(q, k, v, page_table=table, kv_lengths=lengths, causal=True, backend="cpu")
    assert plan.problem.options.paged == (SIZE, "int32")
    assert plan.problem.nk == LAST
