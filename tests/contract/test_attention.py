"""Forward and gradients of every backend against the oracle: one suite for all of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    BATCH,
    DTYPES,
    LAYOUTS,
    NK,
    NQ,
    SIMULATED,
    allowed_errors,
    assert_within,
    check,
    compare,
    dense_visible,
    laid_out,
    oracle,
    random_inputs,
    run,
    run_here,
    same_bits,
)

simulator, full_on_cpu = pytest.mark.simulator, pytest.mark.full_on_cpu
NAMES = ("o", "lse", "dq", "dk", "dv")


def in_simulator(value):
    return pytest.param(value, marks=simulator)


def outliers(rng, shape):
    """N(0, 1) + N(0, 100) * Bernoulli(0.001), from FlashAttention-3, section 4.4."""
    return rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)


# ---- dtypes, options, shapes ---------------------------------------------------------------------------------------------------------


@simulator(full=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(backend, dtype):
    check(backend, *random_inputs(dtype=dtype))


@full_on_cpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_dtypes_at_head_dim_64(backend, dtype, causal):
    check(backend, *random_inputs(hq=2, d=64, dtype=dtype, seed=1), causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers(backend, dtype):
    check(backend, *random_inputs(nq=300, nk=300, d=64, dtype=dtype, draw=outliers))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.9},
        pytest.param({"scale": -0.4, "causal": True}, marks=simulator(full=True)),
        {"scale": 0.0},
        {"scale": np.float32(0.3), "q_start": np.int64(2), "causal": np.True_},
        pytest.param({"causal": True, "q_start": 0}, marks=simulator(full=True)),
        {"causal": True, "q_start": 37},
        {"causal": True, "q_start": -3},
        {"causal": True, "window": (3, 5)},
        pytest.param({"window": (2, 1)}, marks=simulator(full=True)),
        {"window": (100, 7)},
        {"window": (0, 0)},
        {"window": (-1, 0)},
        {"window": (0, -1), "q_start": 5},
        {"window": (-1, -1)},
        {"window": (70, 70), "q_start": 2**40},
        {"window": (2**40, 2**40), "q_start": -5},
    ],
)
def test_options(backend, options):
    check(backend, *random_inputs(batch=(), seed=2), **options)


@pytest.mark.parametrize(
    ("hq", "hk", "causal"),
    [
        (2, 1, False),
        pytest.param(2, 1, True, marks=simulator(full=True)),
        pytest.param(4, 2, False, marks=full_on_cpu),
        (4, 2, True),
        (6, 1, False),
        *(pytest.param(*group, marks=full_on_cpu) for group in ((6, 1, True), (3, 3, False), (3, 3, True))),
    ],
)
def test_grouped_queries(backend, hq, hk, causal):
    check(backend, *random_inputs(hq=hq, hk=hk, seed=3), causal=causal)


@pytest.mark.parametrize(
    ("d", "dv"),
    [
        pytest.param(6, 3, marks=simulator(full=True)),
        (1, 1),
        (3, 17),
        (40, 40),
        (64, 24),
        (24, 64),
        (100, 72),
        (128, 128),
        (200, 130),
        (129, 256),
        (256, 256),
    ],
)
def test_head_dims(backend, d, dv):
    check(backend, *random_inputs(batch=(), d=d, dv=dv, seed=4), causal=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_largest_head_dim(backend, dtype):
    check(backend, *random_inputs(batch=(), d=256, dtype=dtype, seed=4), causal=True)


@pytest.mark.parametrize(
    ("batch", "h"),
    [
        ((), None),
        pytest.param((), 2, marks=simulator(full=True)),
        ((3,), 2),
        pytest.param((2, 1), 1, marks=simulator(full=True)),
        ((2, 3), 2),
    ],
)
def test_ranks(backend, batch, h):
    nq, nk = (3, 5) if SIMULATED else (33, 70)
    check(backend, *random_inputs(batch=batch, hq=h, hk=h, nq=nq, nk=nk, seed=5), causal=True)


TILE_EDGES = list(itertools.product((-1, 0, 1), repeat=2))


@pytest.mark.parametrize(("m", "n"), TILE_EDGES)
@pytest.mark.parametrize("kernel", ["forward", "dkdv", pytest.param("dq", marks=full_on_cpu)])
def test_sizes_around_a_tile(backend, kernel, m, n):
    dtype = "float16" if backend.refuses else "float32"
    block_m, block_n = backend.blocks(kernel, dtype, 16)
    inputs = random_inputs(batch=(), nq=block_m + m, nk=block_n + n, dtype=dtype, seed=6)
    check(backend, *inputs)
    check(backend, *inputs, causal=True)


@pytest.mark.parametrize(("m", "n"), [pytest.param(1, 1, marks=simulator), pytest.param(0, -1, marks=simulator(full=True))])
def test_sizes_around_a_small_tile(backend, m, n):
    check(backend, *random_inputs(batch=(), nq=4 + m, nk=8 + n, seed=6), window=(3, 2))


@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 9), (9, 1), (1, 700), (700, 1), (300, 3), (2, 2)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_few_queries_or_keys(backend, nq, nk, dtype):
    check(backend, *random_inputs(nq=nq, nk=nk, dtype=dtype, seed=7), q_start=0)
    check(backend, *random_inputs(nq=nq, nk=nk, dtype=dtype, seed=7), causal=True)


@simulator
def test_one_query(backend):
    check(backend, *random_inputs(batch=(), nq=1, nk=9, seed=7), causal=True)


ZERO_SIZES = [{"batch": (0,)}, {"batch": (2, 0)}, {"hq": 0, "hk": 0}, {"nq": 0, "nk": 0}, {"nk": 0, "hq": None, "hk": None}]


@pytest.mark.parametrize("sizes", [*ZERO_SIZES, *map(in_simulator, ({"hq": 0, "hk": 2}, {"nq": 0}, {"nk": 0}))])
@pytest.mark.parametrize("causal", [False, True])
def test_zero_sizes(backend, sizes, causal):
    sizes = {"batch": (), "nq": 3, "nk": 5, **sizes}
    q, k, v, do = random_inputs(d=4, **sizes)
    results = run(backend, q, k, v, do, causal=causal)
    for name, like in (("o", do), ("lse", do[..., 0]), ("dq", q), ("dk", k), ("dv", v)):
        expected = np.full(like.shape, -np.inf if name == "lse" else 0.0, like.dtype)
        assert same_bits(np.abs(results[name]) if name != "lse" else results[name], expected), name


# ---- memory --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        *((layout, "float32") for layout in ("contiguous", "heads last", "transposed")),
        pytest.param("reversed", "float32", marks=simulator(full=True)),
        pytest.param("strided", "float32", marks=simulator(full=True)),
        *((layout, "bfloat16") for layout in LAYOUTS),
    ],
)
def test_layouts(backend, layout, dtype):
    nq, nk = (3, 5) if SIMULATED else (70, 90)
    inputs = random_inputs(hq=2, hk=2, nq=nq, nk=nk, seed=8, dtype=dtype)
    results = check(backend, *inputs, layouts=(layout,) * 4, causal=True)
    contiguous = run(backend, *inputs, causal=True)
    for name in NAMES:
        assert same_bits(np.ascontiguousarray(results[name]), np.ascontiguousarray(contiguous[name])), name


def test_layouts_may_differ_between_arguments(backend):
    check(backend, *random_inputs(hq=4, hk=2, seed=8), layouts=("reversed", "transposed", "heads last", "strided"), causal=True)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_broadcast_inputs(backend, axis):
    """Stride 0 along an axis of every input."""
    small = random_inputs(batch=(3,), hq=2, hk=2, nq=70, nk=90, d=8, seed=9)
    small = [np.ascontiguousarray(np.take(x, [0], axis)) for x in small]
    shapes = ((3, 2, 70, 8), (3, 2, 90, 8), (3, 2, 90, 8), (3, 2, 70, 8))
    on_device = [backend.to_device(x) for x in small]
    strides = [[0 if i == axis else s for i, s in enumerate(x.strides)] for x in on_device]
    lib = np.lib.stride_tricks if backend.library == "numpy" else __import__("cupy").lib.stride_tricks
    views = [lib.as_strided(x, shape, step) for x, shape, step in zip(on_device, shapes, strides, strict=True)]
    compare(run_here(backend, *views, causal=True), *(np.broadcast_to(x, s) for x, s in zip(small, shapes, strict=True)), causal=True)


def strides_order(x) -> list[int]:
    """Axes from the one with the largest steps in memory to the one with the smallest."""
    return sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))


@pytest.mark.parametrize("layout", ["contiguous", "heads last", "transposed"])
def test_results_follow_the_memory_layout_of_inputs(backend, layout):
    q, k, v, do = (laid_out(backend, x, layout) for x in random_inputs(hq=3, hk=3, nq=7, nk=11, d=5, seed=10))
    o, lse = backend.forward(q, k, v, return_lse=True)
    results = (o, *backend.backward(do, q, k, v, o, lse))
    for x, like in zip(results, (q, q, k, v), strict=True):
        assert strides_order(x) == strides_order(like)
        assert x.nbytes == abs(max(x.strides, key=abs)) * x.shape[strides_order(x)[0]], "the result is not dense"


@pytest.mark.parametrize("layout", [pytest.param(x, marks=simulator(full=True)) for x in ("contiguous", "strided")])
def test_out_is_written_in_place_and_returned(backend, layout):
    inputs = random_inputs(nq=3, nk=5, d=4, dv=2, seed=11)
    q, k, v, do = map(backend.to_device, inputs)
    expected = run(backend, *inputs, causal=True)
    out = laid_out(backend, np.full(do.shape, np.nan, np.float32), layout)
    o, lse = backend.forward(q, k, v, return_lse=True, out=out, causal=True)
    assert o is out
    gradients = tuple(laid_out(backend, np.full(x.shape, np.nan, np.float32), layout) for x in (q, k, v))
    returned = backend.backward(do, q, k, v, o, lse, out=gradients, causal=True)
    assert all(a is b for a, b in zip(returned, gradients, strict=True))
    for name, x in zip(NAMES, (out, lse, *gradients), strict=True):
        np.testing.assert_array_equal(backend.to_host(x), expected[name], err_msg=name)


def test_out_may_be_given_in_part(backend):
    inputs = random_inputs(nq=30, nk=50, seed=11)
    q, k, v, do = map(backend.to_device, inputs)
    expected = run(backend, *inputs)
    o, lse = backend.forward(q, k, v, return_lse=True)
    dk = backend.to_device(np.full(inputs[1].shape, np.nan, np.float32))
    results = backend.backward(do, q, k, v, o, lse, out=(None, dk, None))
    assert results[1] is dk
    for name, x in zip(("dq", "dk", "dv"), results, strict=True):
        assert same_bits(backend.to_host(x), expected[name]), name


def test_out_leaves_the_rest_of_its_buffer_alone(backend):
    """The gaps of a strided out= keep their bytes."""
    q, k, v, _ = random_inputs(batch=(), nq=37, nk=50, seed=12)
    buffer = backend.to_device(np.full((*q.shape[:-2], 2 * 37 + 1, 3 * 16 + 1), 7, np.float32))
    backend.forward(*map(backend.to_device, (q, k, v)), out=buffer[..., 1::2, 1::3])
    written = backend.to_host(buffer).copy()
    written[..., 1::2, 1::3] = 7
    assert (written == 7).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("layout", "nq", "nk"),
    [pytest.param("contiguous", 3, 5, marks=simulator(full=True)), ("strided", 37, 70), ("heads last", 37, 70), ("contiguous", 1, 2000)],
)
def test_out_of_float32_is_what_o_is_rounded_from(backend, dtype, layout, nq, nk):
    """Of one query with many keys a GPU combines results over parts of them."""
    inputs = random_inputs(nq=nq, nk=nk, d=24, dv=16, dtype=dtype, seed=12)
    q, k, v, do = map(backend.to_device, inputs)
    out = laid_out(backend, np.full(do.shape, np.nan, np.float32), layout)
    o, lse = backend.forward(q, k, v, return_lse=True, out=out, causal=True)
    assert o is out
    o, (rounded, same_lse) = backend.to_host(o), backend.forward(q, k, v, return_lse=True, causal=True)
    assert same_bits(backend.to_host(rounded), o.astype(DTYPES[dtype]))
    assert (o != o.astype(DTYPES[dtype])).any()
    assert same_bits(backend.to_host(lse), backend.to_host(same_lse))


@pytest.mark.parametrize("dtype", [in_simulator("float32"), pytest.param("bfloat16", marks=simulator(full=True))])
def test_inputs_are_untouched(backend, dtype):
    host = random_inputs(nq=3, nk=5, dtype=dtype, seed=13) if SIMULATED else random_inputs(dtype=dtype, seed=13)
    q, k, v, do = map(backend.to_device, [x.copy() for x in host])
    o, lse = backend.forward(q, k, v, return_lse=True, causal=True)
    o_before, lse_before = backend.to_host(o).copy(), backend.to_host(lse).copy()
    backend.backward(do, q, k, v, o, lse, causal=True)
    for x, before in zip((q, k, v, do, o, lse), (*host, o_before, lse_before), strict=True):
        assert same_bits(backend.to_host(x), before)


def test_one_array_may_be_all_inputs(backend):
    x = random_inputs(nk=NQ, seed=14)[0]
    same = backend.to_device(x)
    compare(run_here(backend, same, same, same, same, causal=True), x, x, x, x, causal=True)


def test_read_only_inputs_are_accepted(backend):
    inputs = random_inputs(nq=20, nk=30, seed=14)
    for x in inputs:
        x.flags.writeable = False
    check(backend, *inputs)


# ---- what is promised beyond the numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (60, 20)}])
def test_two_runs_give_the_same_bits(backend, dtype, options):
    inputs = random_inputs(hq=4, hk=2, nq=300, nk=700, dtype=dtype, seed=15)
    first, second = (run(backend, *inputs, **options) for _ in range(2))
    for name in NAMES:
        assert same_bits(first[name], second[name]), name


@simulator(full=True)
def test_lse_is_optional_and_changes_nothing(backend):
    q, k, v, _ = map(backend.to_device, random_inputs(seed=16))
    o, lse = backend.forward(q, k, v, return_lse=True, causal=True)
    alone = backend.forward(q, k, v, causal=True)
    assert same_bits(backend.to_host(alone), backend.to_host(o))
    assert lse.shape == q.shape[:-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_and_batches_do_not_depend_on_each_other(backend, dtype):
    """A problem computed alone and as a part of a batch gives the same bits."""
    inputs = random_inputs(batch=(3,), hq=4, hk=2, nq=100, nk=200, dtype=dtype, seed=17)
    together = run(backend, *inputs, causal=True)
    alone = run(backend, *(x[1:2] for x in inputs), causal=True)
    for name in NAMES:
        assert same_bits(together[name][1:2], alone[name]), name


@pytest.mark.parametrize("dtype", [in_simulator("float32"), "float16", "float64"])
def test_rows_that_see_nothing(backend, dtype):
    """o = 0, lse = -inf, gradients 0; whatever their q and do hold."""
    nq, nk = (5, 3) if SIMULATED else (200, 70)
    q, k, v, do = random_inputs(batch=(), nq=nq, nk=nk, dtype=dtype, seed=18)
    blind = nq - nk
    q[:, : blind // 2] = np.nan
    do[:, : blind // 2] = np.nan
    results = run(backend, q, k, v, do, causal=True)
    assert (results["o"][:, :blind] == 0).all()
    assert (results["lse"][:, :blind] == -np.inf).all()
    assert (results["dq"][:, :blind] == 0).all()
    clean = [np.where(np.isnan(x), x.dtype.type(0), x) for x in (q, k, v, do)]
    compare(results, *clean, causal=True)


def test_nobody_sees_anything(backend):
    q, k, v, do = random_inputs(seed=19)
    results = run(backend, q, k, v, do, window=(0, 0), q_start=NK + NQ)
    for name in NAMES:
        assert (results[name] == (-np.inf if name == "lse" else 0)).all(), name


def poisoned(inputs, which, at, value=np.nan):
    """Copies of q, k, v, do with one row of one of them replaced."""
    copies = [x.copy() for x in inputs]
    copies["qkvd".index(which)][..., at, :] = value
    return copies


def compare_poisoned(backend, clean, which, at, value=np.nan, names=NAMES, **options):
    """NaN and Inf appear exactly where the oracle has them; elsewhere results are as accurate as on clean inputs."""
    dirty = poisoned(clean, which, at, value)
    results, allowed = run(backend, *dirty, **options), allowed_errors(*clean, **options)
    with np.errstate(invalid="ignore"):
        expected = oracle(*dirty, **options)
    for name in names:
        assert_within(name, results[name], expected[name], allowed[name])
    return expected


@simulator(full=True)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("which", ["q", "k", "v", "d"])
def test_visible_nan_propagates(backend, which, dtype):
    nq, nk = (3, 5) if SIMULATED else (70, 140)
    clean = random_inputs(batch=(), nq=nq, nk=nk, dtype=dtype, seed=20)
    expected = compare_poisoned(backend, clean, which, 1)
    assert np.isnan(expected["o" if which != "d" else "dv"]).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_visible_inf_propagates(backend, which, value, dtype):
    clean = random_inputs(batch=(), nq=70, nk=140, dtype=dtype, seed=21)
    expected = compare_poisoned(backend, clean, which, 1, value, names=("o", "lse"))
    assert not np.isfinite(expected["o"]).all()


HIDING = [{"causal": True}, {"window": (30, 0)}, {"window": (20, 20), "q_start": 9}]


@pytest.mark.parametrize(
    ("which", "options"),
    [
        pytest.param(
            which,
            options,
            marks=simulator(full=which == "v") if which in "kv" and options == {"causal": True} else (),
            id=f"{which}-{options}",
        )
        for which in "kvqd"
        for options in HIDING
    ],
)
def test_nan_stays_out_of_rows_that_do_not_see_it(backend, which, options):
    """One poisoned row in the middle of a tile: what is hidden from it, or from which it is hidden, stays clean, forward and backward."""
    nq, nk = (6, 9) if SIMULATED else (150, 150)
    clean = random_inputs(batch=(), nq=nq, nk=nk, seed=22)
    at = 5 if which in "kv" else 2
    expected = compare_poisoned(backend, clean, which, at if SIMULATED else at * 20, **options)
    touched = "dq" if which in "kv" else "dk"
    assert np.isnan(expected[touched]).any()
    assert np.isfinite(expected[touched]).any()


@pytest.mark.parametrize("which", [pytest.param(x, marks=simulator(full=x in "qk")) for x in "qkvd"])
def test_nan_at_an_end_stays_out_of_what_would_be_seen_beyond_it(backend, which):
    """What lies beyond the last row of a tile is no copy of that row, with a weight of zero, for those who would see nothing else."""
    of_queries = which in "qd"
    nq, nk = (7, 8) if of_queries else (8, 7)  # in the simulator, ends lie in the second half of the second tile
    options = {"causal": True, "q_start": 0} if of_queries else {"window": (0, 0), "q_start": 0}
    clean = random_inputs(batch=(), nq=nq, nk=nk, seed=24)
    expected = compare_poisoned(backend, clean, which, 6, **options)
    for name in ("dk", "dv") if of_queries else ("o", "dq"):
        assert (expected[name][..., 7, :] == 0).all()
    assert np.isnan(expected["dv" if of_queries else "o"]).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_seen_by_nobody_is_harmless(backend, dtype):
    """Keys and values after the last query's, or before the first query's window.

    On tensor cores keys, and only forward: as in every kernel for them, what a band hides gets the weight 0, and 0 * NaN is NaN. Heads
    of float32 with a NaN are left to others.
    """
    products = backend.tensor_cores and dtype != "float32"
    inputs = random_inputs(batch=(), nq=90, nk=200, dtype=dtype, seed=23)
    options = {"causal": True, "window": (20, 0), "q_start": 40}  # keys 20 to 129 are seen
    visible = dense_visible(90, 200, **options).any(axis=0)
    assert visible.sum() == 110
    dirty = [x.copy() for x in inputs]
    for x in dirty[1 : 2 if products else 3]:
        x[:, ~visible] = np.nan
    if products:
        ours, clean = (backend.forward(*map(backend.to_device, x[:3]), return_lse=True, **options) for x in (dirty, inputs))
        for x, y in zip(ours, clean, strict=True):
            assert backend.to_host(x).tobytes() == backend.to_host(y).tobytes()
    else:
        compare(run(backend, *dirty, **options), *inputs, **options)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_huge_scores_do_not_overflow(backend, dtype):
    """Scores of several thousand, positive and negative: the naive exponential is Inf or 0 for all of them."""
    draw = lambda rng, shape: 60 * rng.standard_normal(shape)
    inputs = random_inputs(batch=(), nq=70, nk=140, dtype=dtype, seed=24, draw=draw)
    results = check(backend, *inputs, use_naive=False)
    assert np.abs(results["lse"]).max() > 2000
    assert all(np.isfinite(results[name].astype(np.float64)).all() for name in NAMES)


@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_shifted_scores_do_not_overflow(backend, shift):
    """A row whose scores are all far from 0, so that the sum of exponentials itself would be Inf or 0."""
    q, k, v, do = random_inputs(batch=(), nq=70, nk=140, d=16, dtype="float64", seed=25)
    k[..., 0], q[..., 0] = 1.0, shift
    check(backend, q, k, v, do, use_naive=False, scale=1.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_sixteen_bit_values(backend, dtype):
    """Scores beyond the largest float16 are fine: they are kept in float32."""
    q, k, v, do = random_inputs(batch=(), nq=70, nk=140, dtype=dtype, seed=26)
    q, k = (q * q.dtype.type(500)), (k * k.dtype.type(500))
    results = run(backend, q, k, v, do)
    ref = oracle(q, k, v, do)
    assert np.abs(ref["lse"]).max() > np.finfo(np.float16).max
    assert_within("o", results["o"], ref["o"], allowed_errors(q, k, v, do, use_naive=False)["o"])


# ---- anything ------------------------------------------------------------------------------------------------------------------------

LONGEST = 9 if SIMULATED else 150
HEAD_DIMS = [(2, 3), (5, 5)] if SIMULATED else [(1, 1), (6, 3), (16, 16), (24, 64), (64, 64)]


@st.composite
def problems(draw):
    """Inputs, layouts and options of a random problem."""
    length = st.integers(0, LONGEST) | st.sampled_from([1, LONGEST])
    hk, (d, dv) = draw(st.integers(1, 2 - SIMULATED)), draw(st.sampled_from(HEAD_DIMS))
    inputs = random_inputs(
        batch=draw(st.sampled_from([(), (1,)] if SIMULATED else [(), (1,), (2,), (2, 3), (0,)])),
        hq=hk * draw(st.integers(1, 3 - SIMULATED)),
        hk=hk,
        nq=draw(length),
        nk=draw(length),
        d=d,
        dv=dv,
        dtype=draw(st.sampled_from(list(DTYPES))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    side = st.just(-1) | st.integers(0, LONGEST // 2)
    options = draw(
        st.fixed_dictionaries(
            {"causal": st.booleans()},
            optional={
                "scale": st.floats(-1, 1, width=32, allow_subnormal=False),
                "window": st.none() | st.tuples(side, side),
                "q_start": st.none() | st.integers(-LONGEST, LONGEST),
            },
        )
    )
    return inputs, draw(st.tuples(*[st.sampled_from(list(LAYOUTS))] * 4)), options


@simulator(full=True)
@settings(max_examples=5 if SIMULATED else 60, deadline=None, derandomize=True, database=None)
@given(problem=problems())
def test_any_problem(backend, problem):
    if backend.refuses:
        pytest.skip("this backend refuses some problems; random ones that it serves are among its own tests")
    inputs, layouts, options = problem
    check(backend, *inputs, layouts=layouts, **options)


def test_batch_default_is_not_trivial():
    """The shapes that most tests use have several blocks, heads and batches to get wrong."""
    assert SIMULATED or (BATCH == (2,) and NQ > 128 and NK > 512)
