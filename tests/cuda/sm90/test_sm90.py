"""The sm90 tier on a Hopper GPU: random problems against dense float64, equal bits, graphs, split keys, memory, refusals, accuracy."""

import math
import os
import threading
from functools import partial

import numpy as np
import pytest
from support import DTYPES, allowed_errors, assert_within, no_gpu, random_inputs
from support.dense import bits, dense, dense_packed, draw_length, draw_mask, draw_offsets, nan, normal, put, verify

import numba_flash
from numba_flash import reference
from numba_flash.arguments.problem import bind
from numba_flash.cuda.runtime import launch, tensor_maps
from numba_flash.cuda.sm90.forward.forward_tiles import kv_split_tile
from numba_flash.cuda.work import grid

NO_HOPPER = no_gpu("sm90")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_HOPPER is not None, reason=f"sm90 cannot run: {NO_HOPPER}")]

forward = partial(numba_flash.forward, backend="sm90")
forward_packed = partial(numba_flash.forward_packed, backend="sm90")
CHUNKS = 15
PROBLEMS = int(os.environ.get("NUMBA_FLASH_FUZZ") or 300)


@pytest.fixture
def cp():
    return pytest.importorskip("cupy")


# ---- random problems -----------------------------------------------------------------------------------------------------------------

HEAD_DIMS = [(64, 64), (128, 128), (256, 256), (40, 72), (192, 128), (8, 256)]
KINDS = ["plain", "kv_lengths", "packed", "softcap", "both lengths"]


def draw(cp, rng, kind: str, dtype: str, dims: tuple[int, int], follows: bool):
    """(call that returns o and lse, expected, v, description) of a random problem of one kind."""
    (d, dv), hk, group, batch = dims, int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(1, 4))
    nq, nk, layouts = draw_length(rng, 700), draw_length(rng, 900), rng.choice(["contiguous", "heads last", "strided", "repeated"], 4)
    options = draw_mask(rng, nq, nk, follows) | ({"softcap": float(rng.choice([1.0, 20.0]))} if kind == "softcap" else {})
    if kind == "packed":
        shapes = (nq, hk * group, d), (nk, hk, d), (nk, hk, dv), (nq, hk * group, dv)
    else:
        shapes = (batch, hk * group, nq, d), (batch, hk, nk, d), (batch, hk, nk, dv), (batch, hk * group, nq, dv)
    what = f"{kind} {dtype} {shapes} {options} {layouts}"
    q, k, v = (rng.standard_normal(shape, np.float32).astype(DTYPES[dtype]) for shape in shapes[:3])
    out = nan(cp, shapes[3], dtype, layouts[3] if layouts[3] != "repeated" else "contiguous")
    if kind == "packed":
        q, k, v = (put(cp, x, layout) for x, layout in zip((q, k, v), layouts, strict=False))
        sequences = int(rng.integers(1, 6))
        offsets = [draw_offsets(rng, sequences, n) for n in (nq, nk)]
        call = lambda: forward_packed(q, k, v, *map(cp.asarray, offsets), return_lse=True, out=out, **options)
        return call, dense_packed(cp, q, k, v, offsets, **options), v, f"{what} {offsets}"
    lengths = {}
    if kind in ("kv_lengths", "both lengths"):
        lengths["kv_lengths"] = rng.integers(0, nk + 1, batch)
    if kind == "both lengths":
        lengths["q_lengths"] = rng.integers(0, nq + 1, batch)
    for x, name, layout in ((q, "q_lengths", layouts[0]), (k, "kv_lengths", layouts[1]), (v, "kv_lengths", layouts[2])):
        if name in lengths:
            for b in range(batch):
                x[b, :, max(lengths[name]) if layout == "repeated" else lengths[name][b] :] = np.nan
    q, k, v = (put(cp, x, layout) for x, layout in zip((q, k, v), layouts, strict=False))
    on_gpu = {name: cp.asarray(x) for name, x in lengths.items()}
    call = lambda: forward(q, k, v, return_lse=True, out=out, **options, **on_gpu)
    return call, dense(cp, q, k, v, **options, **lengths), v, f"{what} {lengths}"


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_problems(cp, chunk):
    """A chunk shares what kernels are built from, as far as possible: there are few to compile."""
    dtype, dims, kind = ("float16", "bfloat16")[(chunk + chunk // 6) % 2], HEAD_DIMS[chunk % 6], KINDS[chunk % 5]
    for number in range(chunk, PROBLEMS, CHUNKS):
        rng = np.random.default_rng((20, number))
        follows = number // CHUNKS % 3 > 0 if kind in ("plain", "softcap") else chunk % 2 == 0
        call, expected, v, what = draw(cp, rng, kind, dtype, dims, follows)
        verify(cp, *call(), expected, v, f"problem {number}: {what}")


# ---- equal bits ----------------------------------------------------------------------------------------------------------------------

BUSY = {
    "128, causal": ((2, 8, 1000, 128), (2, 2, 1000, 128), {"causal": True}),
    "64": ((2, 8, 2000, 64), (2, 8, 2000, 64), {}),
    "256": ((2, 4, 700, 256), (2, 4, 900, 256), {"causal": True}),
    "split keys": ((1, 2, 5, 128), (1, 1, 20000, 128), {}),
}


@pytest.mark.parametrize(("q_shape", "k_shape", "options"), BUSY.values(), ids=BUSY)
def test_twenty_runs_give_the_same_bits(cp, q_shape, k_shape, options):
    q, k, v = normal(cp, *q_shape), normal(cp, *k_shape, seed=1), normal(cp, *k_shape, seed=2)
    runs = [bits(cp, *forward(q, k, v, return_lse=True, out=nan(cp, q_shape), **options)) for _ in range(20)]
    assert all(run == runs[0] for run in runs)
    verify(cp, *forward(q, k, v, return_lse=True, **options), dense(cp, q, k, v, **options), v)


@pytest.mark.parametrize("options", [{}, {"causal": True}])
def test_a_captured_call_computes_from_what_its_arrays_hold(cp, options):
    q, k, v = (normal(cp, 2, 16, 1000, 128, seed=i) for i in range(3))
    eager, again = bits(cp, forward(q, k, v, **options)), bits(cp, forward(k, q, v, **options))
    out, stream = nan(cp, q.shape), cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        forward(q, k, v, out=out, **options)
        out.fill(np.nan)
        stream.begin_capture()
        forward(q, k, v, out=out, **options)
        graph = stream.end_capture()
        graph.launch()
        stream.synchronize()
        assert bits(cp, out) == eager
        swapped = q.copy()
        q[...], k[...] = k, swapped
        graph.launch()
        stream.synchronize()
        assert bits(cp, out) == again


def test_results_do_not_depend_on_addresses(cp):
    """More arrays of one layout than tensor maps are kept of, each computed twice."""
    count = tensor_maps.MOST + 44
    q, k, v = (normal(cp, count, 2, 100, 64, seed=i) for i in range(3))
    together = bits(cp, *forward(q, k, v, causal=True))
    alone = [[x[b].copy() for x in (q, k, v)] for b in range(count)]
    for _ in range(2):
        assert [bits(cp, forward(*arrays, causal=True))[0] for arrays in alone] == together


def test_threads_on_their_own_streams(cp):
    """One prepared call, other arrays: no thread gets another's tensor maps."""
    inputs = [[normal(cp, 2, 4, 500, 128, seed=10 * t + i) for i in range(3)] for t in range(4)]
    expected, results = [bits(cp, forward(*arrays))[0] for arrays in inputs], {}
    cp.cuda.Device().synchronize()

    def work(t):
        with cp.cuda.Stream(non_blocking=True) as stream:
            outs = [forward(*inputs[t]) for _ in range(30)]
            stream.synchronize()
            results[t] = [bits(cp, o)[0] for o in outs]

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [set(results[t]) for t in range(4)] == [{one} for one in expected]


# ---- split keys ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("nq", [1, 5, 64, 150, 300])
@pytest.mark.parametrize("lengths", [None, (20500, 7), (0, 20000)])
def test_split_keys(cp, nq, lengths, d):
    """Few row blocks, many keys: parts, put together afterwards; some of them see nothing."""
    q, k, v = normal(cp, 2, 2, nq, d), normal(cp, 2, 1, 20500, d, seed=1), normal(cp, 2, 1, 20500, d, seed=2)
    given = {} if lengths is None else {"kv_lengths": np.array(lengths)}
    for b, length in enumerate(lengths or ()):
        k[b, :, length:], v[b, :, length:] = np.nan, np.nan
    for options in (given, given | {"causal": True}, given | {"causal": True, "q_start": 9000}):
        problem = bind(q, k, v, **options)
        tile = kv_split_tile(problem)
        assert grid.kv_splits(problem, tile.block_m, tile.block_n, launch.gpu(0).multiprocessors) > 1
        o, lse = forward(q, k, v, return_lse=True, out=nan(cp, q.shape), **options)
        verify(cp, o, lse, dense(cp, q, k, v, **options), v, str(options))
        assert bits(cp, forward(q, k, v, **options)) == bits(cp, o)


# ---- rows that see nothing, lengths, NaN -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (3, 3), "q_start": 1500}, {"causal": True, "q_start": -150}])
def test_rows_that_see_nothing(cp, options):
    q, k, v = normal(cp, 2, 2, 700, 128), normal(cp, 2, 1, 300, 128, seed=1), normal(cp, 2, 1, 300, 128, seed=2)
    o, lse = forward(q, k, v, return_lse=True, out=nan(cp, q.shape), **options)
    expected = dense(cp, q, k, v, **options)
    assert bool((expected[1] == -math.inf).any())
    verify(cp, o, lse, expected, v)


def test_other_packed_sequences_are_not_seen(cp):
    """NaN and Inf in one sequence change no bit of its neighbours, which share tiles with it."""
    offsets = cp.asarray(np.array([0, 70, 200, 207, 400]))
    q, k, v = (normal(cp, 400, 2, 64, seed=i) for i in range(3))
    clean = forward_packed(q, k, v, offsets, offsets)
    q[70:200], k[70:200], v[70:100], v[100:200] = np.nan, np.nan, np.nan, np.inf
    dirty = forward_packed(q, k, v, offsets, offsets)
    assert bits(cp, dirty[:70], dirty[200:]) == bits(cp, clean[:70], clean[200:])
    assert bool(cp.isnan(dirty[70:200]).all())


@pytest.mark.parametrize(("nq", "nk"), [(300, 400), (5, 20000)])
@pytest.mark.parametrize("name", ["kv_lengths", "q_lengths"])
def test_impossible_lengths_give_nan_for_their_element_only(cp, name, nq, nk):
    q, k, v = normal(cp, 3, 2, nq, 64), normal(cp, 3, 2, nk, 64, seed=1), normal(cp, 3, 2, nk, 64, seed=2)
    for length in (-1, max(nq, nk) + 1):
        o, lse = forward(q, k, v, return_lse=True, **{name: cp.asarray(np.array([4, length, 3]))})
        assert bool(cp.isnan(o[1]).all())
        assert bool(cp.isnan(lse[1]).all())
        assert not bool(cp.isnan(o[::2]).any() | cp.isnan(lse[::2]).any())


# ---- memory --------------------------------------------------------------------------------------------------------------------------

OUTS = {
    "every other column": ((2, 4, 300, 256), lambda x: x[..., ::2]),
    "transposed": ((2, 4, 128, 300), lambda x: x.swapaxes(-1, -2)),
    "heads last": ((2, 300, 4, 128), lambda x: x.swapaxes(1, 2)),
    "rows of 260 bytes": ((2, 4, 300, 130), lambda x: x[..., :128]),
    "from the middle": ((2, 4, 300, 136), lambda x: x[..., 4:132]),
    "reversed": ((2, 4, 300, 128), lambda x: x[:, ::-1, ::-1]),
}


@pytest.mark.parametrize(("shape", "view"), OUTS.values(), ids=OUTS)
@pytest.mark.parametrize("nk", [300, 20000])
def test_out_of_any_strides(cp, shape, view, nk):
    """It is written in place, and what lies between its elements is not."""
    nq = 300 if nk == 300 else 5
    q, k, v = normal(cp, 2, 4, nq, 128), normal(cp, 2, 2, nk, 128, seed=1), normal(cp, 2, 2, nk, 128, seed=2)
    buffer = cp.asarray(np.full(shape, 7, np.float16))
    out = view(buffer)[..., :nq, :]
    assert forward(q, k, v, out=out) is out
    assert bits(cp, out) == bits(cp, forward(q, k, v))
    out[...] = 7
    assert bool((buffer == 7).all())


def test_numpy_arrays_go_over_and_come_back(cp):
    q, k, v, _ = random_inputs(batch=(2,), hq=4, hk=2, nq=100, nk=300, d=64, dtype="bfloat16")
    assert numba_flash.plan(q, k, v).backend == "sm90"
    assert bits(cp, numba_flash.forward(q, k, v)) == bits(cp, forward(*map(cp.asarray, (q, k, v))))


# ---- plan ------------------------------------------------------------------------------------------------------------------------------


def test_plan_names_what_runs(cp):
    q = normal(cp, 2, 4, 300, 128)
    plan = numba_flash.plan(q, q, q, causal=True)
    assert (plan.backend, plan.refused, plan.tiles) == ("sm90", (), (("forward", (128, 128)),))
    assert bits(cp, numba_flash.forward(q, q, q, causal=True)) == bits(cp, forward(q, q, q, causal=True))


OF_SHAPE = (2, 4, 30, 64)
REFUSED = {
    "softcap": (OF_SHAPE, lambda cp, x: x, lambda cp: {"softcap": 2000.0}, "needs a softcap between scale / 1e+38 and 1024; got 2000.0"),
    "float64": (OF_SHAPE, lambda cp, x: x.astype("float64"), lambda cp: {}, "serves float16, bfloat16 and float32; q.dtype is float64"),
    "D = 20": ((2, 4, 30, 20), lambda cp, x: x, lambda cp: {}, "needs head dimensions that are multiples of 8; q.shape[-1] is 20"),
    "reversed": (OF_SHAPE, lambda cp, x: x[:, ::-1], lambda cp: {}, "needs strides that are multiples of 16 bytes and not negative; q"),
    "transposed": ((2, 4, 64, 32), lambda cp, x: x.swapaxes(-1, -2), lambda cp: {}, "needs neighbours along the head dimension"),
    "misaligned": ((2, 4, 30, 72), lambda cp, x: x[..., 4:68], lambda cp: {}, "multiples of 16; q begins 8 bytes after one"),
    "scale": (OF_SHAPE, lambda cp, x: x, lambda cp: {"scale": -0.5}, "needs a positive, finite scale; got -0.5"),
    "no keys": ((2, 4, 0, 64), lambda cp, x: x, lambda cp: {}, "needs at least one query and one key"),
}


@pytest.mark.parametrize(("shape", "view", "options", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_sm90_refuses_runs_elsewhere(cp, shape, view, options, sentence):
    x, options = view(cp, normal(cp, *shape)), options(cp)
    plan = numba_flash.plan(x, x, x, **options)
    assert plan.backend in ("sm80", "simt")
    assert plan.refused[0][0] == "sm90"
    assert sentence in plan.refused[0][1]
    with pytest.raises(NotImplementedError, match="backend sm90: "):
        forward(x, x, x, **options)
    assert numba_flash.forward(x, x, x, **options).shape == x.shape


OPTIONS = {
    "bias": lambda cp: {"bias": cp.zeros(30, "float32")},
    "mask": lambda cp: {"mask": cp.ones(30, "bool")},
    "dropout": lambda cp: {"dropout": 0.5, "rng": (1, 2)},
    "score_mod": lambda cp: {"score_mod": numba_flash.alibi([0.5] * 4)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_have_results_of_sm80(cp, options):
    """Which gets the gradients of what `sm90` computed, unless they are demanded; of dropout, the same weights are dropped."""
    x, options = normal(cp, *OF_SHAPE), options(cp)
    assert numba_flash.plan(x, x, x, **options).backend == "sm90"
    other = numba_flash.forward(x, x, x, backend="sm80", **options)
    o, lse = forward(x, x, x, return_lse=True, **options)
    cp.testing.assert_allclose(o, other, atol=4e-3, rtol=4e-3)
    if "score_mod" in options:
        options["score_mod_grad"] = options["score_mod"].score_mod_grad
    ours, others = (numba_flash.backward(x, x, x, x, o, lse, backend=backend, **options) for backend in ("sm90", "sm80"))
    for gradient, expected in zip(ours, others, strict=True):
        cp.testing.assert_allclose(gradient, expected, atol=2e-2, rtol=2e-2)


# ---- accuracy --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_outliers(cp, causal):
    """N(0, 1) + N(0, 100) * Bernoulli(0.001), from FlashAttention-3, section 4.4: the rule of accuracy, and the size of the errors."""
    outliers = lambda rng, shape: rng.standard_normal(shape) + 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001)
    q, k, v, do = random_inputs(batch=(), nq=1024, nk=1024, d=128, dtype="float16", draw=outliers)
    ours = cp.asnumpy(forward(*map(cp.asarray, (q, k, v)), causal=causal))
    ref = reference.forward(q, k, v, causal=causal)
    rmse = float(np.sqrt(np.mean(np.square(ours - ref))))
    print(f"root mean square error {rmse:.2e}")
    assert rmse <= 4e-4
    assert_within("o", ours, ref, allowed_errors(q, k, v, do, causal=causal)["o"])
