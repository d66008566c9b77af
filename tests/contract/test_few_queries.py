"""Few queries with many keys, where heads that share keys are rows of one tile: all options, sizes around tiles, and parts of the keys."""

from types import MappingProxyType

import numpy as np
import pytest
from support import DTYPES, SIMULATED, random_inputs, same_bits
from support.naive import check

import numba_flash
from numba_flash import reference
from numba_flash.arguments import problem
from numba_flash.arguments.arrays import Layout
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.cuda.simt import prepare_decode, tier
from numba_flash.cuda.simt.lanes_tiles import lanes_tile
from numba_flash.plan import choose

simulator = pytest.mark.simulator
MANY = 26 if SIMULATED else 530
TABLE = np.random.default_rng(5).standard_normal((4, 7))


def inputs(nq=2, hq=4, hk=2, nk=MANY, d=5, dv=3, dtype="float32", batch=(2,), seed=0):
    return random_inputs(batch=batch, hq=hq, hk=hk, nq=nq, nk=nk, d=d, dv=dv, dtype=dtype, seed=seed)


@pytest.mark.parametrize("dtype", [pytest.param(x, marks=simulator(full=True)) if x in ("float16", "bfloat16") else x for x in DTYPES])
def test_dtypes(backend, dtype):
    check(backend, *inputs(dtype=dtype), causal=True)


@simulator(full=True)
@pytest.mark.parametrize(("nq", "hq", "hk"), [(1, 1, 1), (1, 3, 1), (3, 2, 2), (2, 8, 1), (16, 2, 2), (5, 6, 2)])
@pytest.mark.parametrize("nk", [MANY - 1, MANY + 6])
def test_rows_of_a_block(backend, nq, hq, hk, nk):
    """Queries of all heads, in one block or several, that are full or not; 24 and 32 keys are whole tiles of the simulator."""
    check(backend, *inputs(nq=nq, hq=hq, hk=hk, nk=nk, batch=()), window=(nk // 2, 1))


@pytest.mark.parametrize(("d", "dv"), [(1, 1), pytest.param(3, 17, marks=simulator(full=True)), (64, 64), (128, 40), (256, 256)])
def test_head_dimensions(backend, d, dv):
    check(backend, *inputs(d=d, dv=dv, batch=()), scale=0.3)


GRADIENTS = {
    "one query": ((1, 4, 2, MANY + 5), {}),
    "causal": ((5, 6, 2, MANY), {"causal": True}),
    "32 rows": ((16, 2, 1, MANY + 70), {"causal": True, "q_start": 300}),
    "window": ((3, 5, 1, 2 * MANY), {"window": (MANY, 3), "q_start": MANY}),
    "lengths": ((4, 4, 2, MANY), {"q_lengths": np.array([4, 2]), "kv_lengths": np.array([MANY - 9, 70])}),
}


@pytest.mark.skipif(SIMULATED, reason="of tensor cores")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_16_bits(backend, name, dtype):
    """Which read K and V once where tensor cores serve them."""
    (nq, hq, hk, nk), options = GRADIENTS[name]
    q, k, v, do = inputs(nq=nq, hq=hq, hk=hk, nk=nk, d=48, dv=40, dtype=dtype)
    check(backend, q, k, v, do, **options)


OPTIONS = {
    "bias": lambda: {"bias": np.random.default_rng(1).standard_normal((4, 2, MANY)).astype(np.float32)},
    "mask": lambda: {"mask": np.random.default_rng(2).random((2, 4, 2, MANY)) < 0.5},
    "softcap, causal": lambda: {"softcap": 0.8, "causal": True},
    "score_mod": lambda: {"score_mod": numba_flash.relative_position(TABLE, 0)},
    "lengths": lambda: {"q_lengths": np.array([2, 1]), "kv_lengths": np.array([0, MANY - 9]), "causal": True},
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=simulator(full=True)) for x in OPTIONS])
def test_options(backend, name):
    options = OPTIONS[name]()
    q, k, v, _ = inputs()
    if "kv_lengths" in options:  # what lies beyond is not read
        k[1, :, options["kv_lengths"][1] :] = np.nan
        v[1, :, options["kv_lengths"][1] :] = np.nan
    here = lambda x: backend.to_device(x) if isinstance(x, np.ndarray) else x
    o, lse = backend.forward(*map(here, (q, k, v)), return_lse=True, **{name: here(x) for name, x in options.items()})
    o_ref, lse_ref = reference.forward(q, k, v, **options, return_lse=True)
    np.testing.assert_allclose(backend.to_host(o), o_ref, atol=2e-6)
    np.testing.assert_allclose(backend.to_host(lse), lse_ref, atol=2e-6)


@simulator(full=True)
def test_a_value_that_a_row_does_not_see_does_not_reach_it(backend):
    """Not even as zero times NaN, on the CPU and `simt`; and a row that sees nothing gives 0."""
    q, k, v, _ = inputs(batch=())
    mask = np.ones((4, 2, MANY), bool)
    mask[0, 0, 20] = mask[3, 1] = False
    v[0, 20] = np.nan
    o = backend.to_host(backend.forward(*map(backend.to_device, (q, k, v)), mask=backend.to_device(mask)))
    if not backend.tensor_cores:
        assert np.isfinite(o[0, 0]).all()
    assert np.isnan(o[0, 1]).all()
    assert (o[3, 1] == 0).all()


@pytest.mark.skipif(not SIMULATED, reason="of simt's kernels in the simulator")
@pytest.mark.parametrize("dtype", [pytest.param(x, marks=simulator(full=True)) for x in ("float32", "float64")])
def test_parts_of_the_keys(backend, dtype):
    """On a GPU with room for many blocks the keys are split, and results over parts are combined; a row that sees nothing stays one."""
    q, k, v, _ = inputs(batch=(), dtype=dtype, nk=45)
    mask = np.ones((2, 45), bool)
    mask[1] = False
    mask[0, :16] = False  # nothing of the first tiles
    p = problem.bind(q, k, v, mask=mask)
    given = problem.ForwardInputs(q, k, v, mask=mask)
    o, lse = np.full((4, 2, 3), np.nan, dtype), np.full((4, 2), np.nan, dtype)
    results = problem.ForwardResults(o, lse)
    prepared = tier.prepare_forward(p, given._make(map(Layout.of, given)), results._make(map(Layout.of, results)), Gpu(-1, (0, 0), 40))
    _, combine = prepared.launches
    assert combine.builder == "passes.combine.build_many"
    prepared.run(given, results)
    o_ref, lse_ref = reference.forward(q, k, v, mask=mask, return_lse=True)
    atol = 1e-6 if dtype == "float32" else 1e-14
    np.testing.assert_allclose(o, o_ref, atol=atol)
    np.testing.assert_allclose(lse, lse_ref, atol=atol)


def test_equal_bits(backend):
    arrays = [backend.to_device(x) for x in inputs(nk=2000)[:3]]
    assert same_bits(*(backend.to_host(backend.forward(*arrays)) for _ in range(2)))


@pytest.mark.parametrize(
    ("sizes", "served"),
    [
        ({}, True),
        ({"nq": 16, "hq": 1, "hk": 1}, True),
        ({"nq": 9, "hq": 4, "hk": 2}, False),  # 18 rows
        ({"nk": 511}, False),
        ({"dropout": 0.1}, False),
    ],
)
@pytest.mark.skipif(SIMULATED, reason="as of a GPU")
def test_which_problems_are_served(sizes, served):
    q, k, v, _ = inputs(**{"nk": 512} | {name: x for name, x in sizes.items() if name != "dropout"})
    options = {"dropout": 0.1, "rng": (0, 0)} if "dropout" in sizes else {}
    assert prepare_decode.serves(problem.bind(q, k, v, **options)) == served


H200 = Gpu(0, (9, 0), 132)
LONG = {"nk": 2**15, "hq": 64, "hk": 8, "nq": 1, "d": 64, "dv": 64, "batch": (4,)}


def on_paper(dtype="float32", options=MappingProxyType({}), make=lambda shape, dtype: np.broadcast_to(np.zeros((), dtype), shape), **sizes):
    """A problem and its inputs, of which nothing is ever read."""
    size = LONG | sizes
    shapes = ((size["hq"], size["nq"], size["d"]), (size["hk"], size["nk"], size["d"]), (size["hk"], size["nk"], size["dv"]))
    arrays = [make((*size["batch"], *shape), DTYPES[dtype]) for shape in shapes]
    return problem.bind(*arrays, **options), problem.ForwardInputs(*arrays)


@pytest.mark.skipif(SIMULATED, reason="as of a GPU")
@pytest.mark.parametrize(
    ("dtype", "sizes", "backend"),
    [
        ("float32", {}, "simt"),
        ("float64", {"nq": 2}, "simt"),
        ("float32", {"nq": 3}, "sm90"),  # 24 rows
        ("float64", {"nq": 17}, "sm80"),
        ("float16", {}, "sm80"),
    ],
)
def test_who_serves_them_on_hopper(dtype, sizes, backend):
    """Tensor cores leave float32 and float64 to the kernel that reads a key once; but not if they are demanded."""
    p, given = on_paper(dtype, **sizes)
    assert choose(p, given, None, gpu=H200).backend == backend
    if backend == "simt":
        assert choose(p, given, "sm80", gpu=H200).backend == "sm80"
        assert "others read a key but once" in str(choose(p, given, None, gpu=H200))


@pytest.mark.skipif(SIMULATED, reason="as of a GPU")
@pytest.mark.parametrize(
    ("sizes", "options", "backend"),
    [
        ({}, {}, "sm80"),
        ({"nq": 4}, {"causal": True}, "sm80"),  # 32 rows
        ({"nq": 4, "d": 128, "dv": 128}, {}, "sm90"),
        ({"nq": 5}, {}, "sm90"),
        ({"nk": 511}, {}, "sm90"),
        ({}, {"softcap": 2.0}, "sm90"),
        ({"d": 256, "dv": 256}, {}, "sm90"),
    ],
)
def test_who_serves_their_gradients_on_hopper(sizes, options, backend):
    """Keys are read, and their gradients written, but once by `sm80`, if its warps have registers for dQ."""
    p, (q, k, v, *_) = on_paper("bfloat16", options, np.empty, **sizes)
    lse = np.empty(q.shape[:-1], np.float32)
    given = problem.BackwardInputs(q, q, k, v, q, lse)
    assert choose(p, given, None, "backward", gpu=H200).backend == backend
    assert choose(p, given, "sm90", "backward", gpu=H200).backend == "sm90"
    assert ("others read a key but once" in str(choose(p, given, None, "backward", gpu=H200))) == (backend == "sm80")


def laid_out(given, chunked=True):
    """Layouts of arrays, of which those of keys and values are compact, or every other column of more."""
    of = lambda x: x if x is None else Layout.compact(x.shape, x.dtype.name)
    every_other = lambda x: x if chunked else x._replace(strides=tuple(2 * s for s in x.strides))
    inputs = given._make(map(of, given))
    return inputs._replace(k=every_other(inputs.k), v=every_other(inputs.v))


@pytest.mark.skipif(SIMULATED, reason="as of a GPU")
@pytest.mark.parametrize(
    ("dtype", "sizes", "options", "gpu", "chunked", "rows"),
    [
        ("float32", {}, {}, H200, True, 8),
        ("float64", {"hq": 16}, {"causal": True}, H200, True, 4),
        ("float32", {"hq": 24, "nq": 2, "d": 256, "dv": 256}, {}, Gpu(0, (8, 6), 80), True, 8),
        ("float32", {"hq": 8}, {}, H200, True, None),  # one row
        ("float32", {"nq": 2}, {}, H200, True, None),  # 16 rows
        ("float16", {}, {}, H200, True, None),
        ("float64", {"d": 136}, {}, H200, True, None),
        ("float32", {"d": 62}, {}, H200, True, None),
        ("float32", {}, {}, H200, False, None),
        ("float32", {}, {"softcap": 2.0}, H200, True, None),
        ("float32", {}, {}, Gpu(0, (7, 5), 80), True, None),
    ],
)
def test_whose_columns_lanes_share(dtype, sizes, options, gpu, chunked, rows):
    """Plain few rows of whole chunks, where copies go on; others have a thread for each key."""
    p, given = on_paper(dtype, options, **sizes)
    tile = lanes_tile(p, laid_out(given, chunked), gpu.capability)
    assert (tile and tile.rows) == rows
    results = problem.ForwardResults(Layout.compact(given.q.shape, dtype), None)
    builder = tier.prepare_forward(p, laid_out(given, chunked), results, gpu).launches[0].builder
    assert builder == ("simt.decode_lanes.build" if rows else "simt.decode.build")


@pytest.mark.skipif(SIMULATED, reason="as of a GPU")
def test_one_kernel_serves_any_length():
    """And as many parts as fill the GPU."""
    results = problem.ForwardResults(Layout.compact((4, 64, 1, 64), "float32"), None)
    launches = []
    for nk in (600, 2**15, 10**6):
        p, given = on_paper(nk=nk)
        launches.append(tier.prepare_forward(p, laid_out(given), results, H200).launches)
    assert len({tuple(launch.config for launch in each) for each in launches}) == 1
    assert {each[0].builder for each in launches} == {"simt.decode_lanes.build"}
    forward, combine = launches[1]
    parts = combine.numbers[0]
    assert forward.grid == 4 * 8 * parts
    assert 132 * 2 <= forward.grid <= 132 * 4 * 8


@simulator(full=True)
@pytest.mark.parametrize("missing", [False, True])
def test_keys_in_pages(backend, missing):
    """As many keys in pages that lie in any order; a page that does not exist gives NaN for its sequence on a GPU, an error on the host."""
    q, k, v, _ = inputs(dv=5)
    size, lengths = 4, np.array([MANY, MANY - 7])
    most = -(-MANY // size)
    order = np.random.default_rng(6).permutation(2 * most).reshape(2, most)
    k_pages, v_pages = (np.full((2 * most, 2, size, 5), np.nan, np.float32) for _ in range(2))
    for b in range(2):
        for j in range(lengths[b]):
            k_pages[order[b, j // size], :, j % size] = k[b, :, j]
            v_pages[order[b, j // size], :, j % size] = v[b, :, j]
    if missing:
        order[1, 2] = 2 * most
    arrays = [backend.to_device(x) for x in (q, k_pages, v_pages, order, lengths)]
    if missing and backend.library == "numpy":
        with pytest.raises(ValueError, match="page_table"):
            backend.forward_paged(*arrays)
        return
    o, lse = map(backend.to_host, backend.forward_paged(*arrays, return_lse=True, causal=True))
    o_ref, lse_ref = reference.forward(q, k, v, kv_lengths=lengths, causal=True, return_lse=True)
    sequences = slice(0, 1 if missing else 2)
    np.testing.assert_allclose(o[sequences], o_ref[sequences], atol=2e-6)
    np.testing.assert_allclose(lse[sequences], lse_ref[sequences], atol=2e-6)
    assert np.isnan(o[1]).all() == np.isnan(lse[1]).all() == missing
