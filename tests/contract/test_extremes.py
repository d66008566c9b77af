"""Numbers near the ends of the dtypes: scales and biases, log-sum-exps that float32 cannot hold, softcaps, sums beyond it."""

import re

import numpy as np
import pytest
import support
from support import DTYPES, SIMULATED, random_inputs, whole

import numba_flash
from numba_flash import reference
from numba_flash.cuda.simt.tier import tile_for

simulator = pytest.mark.simulator
N = 5 if SIMULATED else 40
WIDE = ["float32", "float64"]


def run(backend, *arrays, **options):
    """o and lse on the host."""
    on_device = lambda x: backend.to_device(x) if isinstance(x, np.ndarray) else x
    o, lse = backend.forward(*map(on_device, arrays), return_lse=True, **{name: on_device(x) for name, x in options.items()})
    return backend.to_host(o), backend.to_host(lse)


def gradients(backend, do, *arrays, **options):
    on_device = lambda x: backend.to_device(x) if isinstance(x, np.ndarray) else x
    options = {name: on_device(x) for name, x in options.items()}
    arrays = [backend.to_device(x) for x in arrays]
    o, lse = backend.forward(*arrays, return_lse=True, **{name: x for name, x in options.items() if name != "bias_grad"})
    return [backend.to_host(x) for x in backend.backward(backend.to_device(do), *arrays, o, lse, **options)]


def biases(dtype) -> np.ndarray:
    """Rows: hidden altogether by the least number; all but every third key; a few far above; from one end to the other; -inf among them."""
    last, bias = float(np.finfo(dtype).max), np.zeros((5, N))
    bias[0] = -last
    bias[1, np.arange(N) % 3 > 0] = -last
    bias[2, 1:4] = 0.71 * last, 0.70 * last, last
    bias[3] = np.linspace(-1, 1, N) * last
    bias[4], bias[4, :2] = -0.9 * last, (-np.inf, -last)
    return np.clip(bias, -last, last, where=~np.isneginf(bias), out=bias).astype(dtype)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param("float32", marks=simulator), "float64", *(pytest.param(x, marks=pytest.mark.full) for x in ("float16", "bfloat16"))],
)
@pytest.mark.filterwarnings("ignore:overflow")  # from the simulator, whose floats are NumPy's
def test_biases_at_the_ends_of_the_dtype(backend, dtype):
    """A row of nothing but the least number has all scores equal, and so the mean of v; it is not a row that sees nothing."""
    q, k, v, _ = random_inputs(batch=(), nq=5, nk=N, dtype=dtype)
    bias = biases(np.float32 if dtype == "bfloat16" else DTYPES[dtype])
    o, lse = run(backend, q, k, v, bias=bias)
    if dtype in WIDE:  # a score is rounded to the bias
        np.testing.assert_allclose(o[0, 0], v[0].mean(0), atol=1e-6)
    o_ref, lse_ref = reference.forward(q, k, v, bias=bias, return_lse=True)
    atol = {"float64": 1e-14, "float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    rows = slice(1 if dtype == "float16" else 0, None)  # 65504 in float32 keeps a hundredth of a score, 3e38 nothing
    np.testing.assert_allclose(o[:, rows].astype(float), o_ref[:, rows], atol=atol)
    np.testing.assert_allclose(lse, lse_ref, rtol=1e-5)


@simulator(full=True)
@pytest.mark.filterwarnings("ignore:overflow")
def test_gradients_with_keys_that_the_least_number_hides(backend):
    """As if they were absent; gradients of a row that has only such keys need a log-sum-exp that float32 cannot hold (numerics)."""
    q, k, v, do = random_inputs(batch=(), nq=N, nk=N)
    bias = np.zeros((N, N), np.float32)
    bias[:, ::2] = np.finfo(np.float32).min
    got = gradients(backend, do, q, k, v, bias=bias, bias_grad=True)
    want = whole.gradients(do, q, k, v, bias=bias, bias_grad=True)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert not got[1][:, ::2].any()
    bias[0] = np.finfo(np.float32).min
    do[:, 0] = 0  # a row of padding, which no loss reads
    for a, b in zip(gradients(backend, do, q, k, v, bias=bias), whole.gradients(do, q, k, v, bias=bias), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("dtype", [pytest.param(x, marks=pytest.mark.full_on_cpu) for x in ("float16", "bfloat16")])
@pytest.mark.parametrize("far", [-1.2e9, -1.2e12, -3e30])
def test_rows_of_padding_with_a_bias_far_below(backend, dtype, far):
    """Rows that no loss reads, all of whose keys are hidden by one number: o is a mean of values, and the others' gradients are the same
    without these rows. Products with log2(e) that are rounded in one place and not in another differ by powers of two there.
    """
    n, nk = 3 if SIMULATED else N, N
    q, k, v, do = random_inputs(batch=(), nq=2 * n, nk=nk, d=16, dtype=dtype)
    bias = np.zeros((2 * n, nk), np.float32)
    bias[n:], do[:, n:] = far, 0
    o, lse = run(backend, q, k, v, bias=bias)
    assert (abs(o.astype(float)) <= 1.01 * abs(v.astype(float)).max()).all()
    np.testing.assert_allclose(lse[:, n:], far, rtol=1e-6)
    dq, dk, dv, dbias = (x.astype(float) for x in gradients(backend, do, q, k, v, bias=bias, bias_grad=True))
    assert not dq[:, n:].any()
    assert not dbias[n:].any()
    expected = whole.gradients(do[:, :n], q[:, :n], k, v, bias=bias[:n], bias_grad=True)
    unit = {"float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    for x, y in zip((dq[:, :n], dk, dv, dbias[:n]), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=4 * unit * abs(y).max())


def test_nan_and_infinities_stay_what_they_are(backend):
    q, k, v, _ = random_inputs(batch=(), nq=4, nk=N)
    bias = np.zeros((4, N), np.float32)
    bias[0, 1], bias[1, 1], bias[2, 1], bias[3] = np.nan, np.inf, -np.inf, -np.inf
    o, lse = run(backend, q, k, v, bias=bias)
    assert np.isnan(o[:, :2]).all()
    assert np.isnan(lse[:, 0]).all()
    np.testing.assert_allclose(o[:, 2], reference.forward(q, k, v, bias=bias)[:, 2], atol=1e-6)
    assert (o[:, 3] == 0).all()
    assert (lse[:, 3] == -np.inf).all()


@simulator
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_row_whose_scores_all_overflow_has_no_gradient(backend):
    """All are -inf: nothing is left of the row, and the others' results are what they are without it."""
    n = 3 if SIMULATED else N
    q, k, v, do = random_inputs(batch=(), nq=n, nk=n, d=2)
    q[0, :, 0], k[..., 0] = 0, -1e30
    q[0, 1, 0] = 1e30
    results = support.run(backend, q, k, v, do)
    assert (results["lse"][:, 1] == -np.inf).all()
    assert not results["o"][:, 1].any()
    assert not results["dq"][:, 1].any()
    others = np.arange(n) != 1
    _, dk, dv = whole.gradients(do[:, others], q[:, others], k, v)
    np.testing.assert_allclose(results["dk"], dk, atol=1e-5)
    np.testing.assert_allclose(results["dv"], dv, atol=1e-5)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("largest", [False, True], ids=["least", "greatest"])
def test_the_least_and_the_greatest_softcap(backend, dtype, largest):
    """At the one all scores are 0, at the other they are what they were."""
    tiny = float(np.finfo(dtype).tiny)
    q, k, v, do = random_inputs(batch=(), nq=7, nk=N, dtype=dtype)
    softcap = 1 / tiny if largest else tiny
    o, _ = run(backend, q, k, v, softcap=softcap)
    np.testing.assert_allclose(o, reference.forward(q, k, v, softcap=softcap), atol=1e-5 if dtype == "float32" else 1e-12)
    assert all(np.isfinite(x).all() for x in gradients(backend, do, q, k, v, softcap=softcap))


@pytest.mark.parametrize("option", ["plain", "bias"])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e5])
def test_gradients_are_as_accurate_as_float32_holds_the_lse(backend, size, option):
    """Scores of that size, which differ by a few: relative errors grow with 2**-24 |lse|, and P is known to 1 % up to |lse| = 1e5."""
    q, k, v, do = random_inputs(batch=(), nq=N, nk=N)
    q[..., 0], k[..., 0] = size, 1
    options = {"scale": 1.0} | ({"bias": np.zeros(N, np.float32)} if option == "bias" else {})
    got, want = gradients(backend, do, q, k, v, **options), whole.gradients(do, q, k, v, **options)
    error = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got[1:], want[1:], strict=True)]
    assert max(error) < 4 * 2.0**-24 * size + 1e-6


@pytest.mark.filterwarnings("ignore:overflow")
def test_values_whose_sum_is_beyond_float32(backend):
    """o is a sum over keys, divided at the end: right as long as the sum is finite, else Inf and never another number."""
    last = np.finfo(np.float32).max
    q, k = np.zeros((1, 3, 4), np.float32), np.zeros((1, N, 4), np.float32)
    v = np.full((1, N, 4), last, np.float32)
    o, _ = run(backend, q, k, v * np.float32(0.99 / N))
    np.testing.assert_allclose(o, last * 0.99 / N, rtol=1e-6)
    assert np.isinf(run(backend, q, k, v)[0]).all()


@pytest.mark.skipif(not SIMULATED, reason="of simt's tiles in the simulator")
@simulator
def test_terms_of_a_tile_are_summed_apart(backend):
    """All weights are 1: o is the sum over tiles of their own sums, divided by N."""
    n, block = 20, tile_for("forward", "float32", 2).block_n
    v = np.random.default_rng(0).standard_normal((1, n, 1)).astype(np.float32)
    q, k = np.zeros((1, 1, 2), np.float32), np.ones((1, n, 2), np.float32)
    sums = np.float32(0)
    for tile in v[0, :, 0].reshape(-1, block):
        of_tile = np.float32(0)
        for x in tile:
            of_tile += x
        sums += of_tile
    in_order = np.float32(0)
    for x in v[0, :, 0]:
        in_order += x
    o, _ = run(backend, q, k, v)
    assert sums != in_order
    assert o.item() == sums / np.float32(n)


# ---- numbers that kernels get ------------------------------------------------------------------------------------------------------------

RANGES = {"float64": "2.23e-308 and 8.99e+307, computed in float64"}
OF_FLOAT32 = "1.18e-38 and 1.7e+38, computed in float32"
BEYOND_FLOAT32, BEYOND_FLOAT64 = (1e39, -1e39, 1.5 * 2.0**127, 1e-39, -1e-45, 10**100), (1e308, -1e-310)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_beyond_what_scores_are_computed_in(dtype):
    x = np.zeros((1, 4, 8), DTYPES[dtype])
    for scale in BEYOND_FLOAT64 if dtype == "float64" else BEYOND_FLOAT32:
        sentence = f"scale must be 0 or lie between {RANGES.get(dtype, OF_FLOAT32)}; got {scale!r}"
        for function in (numba_flash.forward, numba_flash.plan, numba_flash.vjp, reference.forward):
            with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
                function(x, x, x, scale=scale)
        with pytest.raises(ValueError, match=r"^scale must be 0 or lie between"):
            numba_flash.forward_packed(x, x, x, np.array([0, 1]), np.array([0, 1]), scale=scale)


@pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=simulator), "float64", pytest.param("bfloat16", marks=pytest.mark.full_on_cpu)]
)
@pytest.mark.parametrize("factor", [0.0, 1.0, -1.0])
def test_scales_at_the_ends(backend, dtype, factor):
    """0, and the greatest of either sign, with q and k that are so small that scores are not."""
    greatest = float(np.finfo("float64" if dtype == "float64" else "float32").max) / 2
    half = 2.0 ** (-np.log2(greatest) // 2)
    q, k, v, _ = random_inputs(batch=(), nq=3 if SIMULATED else 7, nk=N, d=2 if SIMULATED else 16, dtype=dtype)
    options = {"scale": factor * greatest}
    q, k = ((x.astype(float) * (half / 2)).astype(x.dtype) for x in (q, k))
    o, lse = run(backend, q, k, v, **options)
    o_ref, lse_ref = reference.forward(q, k, v, return_lse=True, **options)
    np.testing.assert_allclose(o.astype(float), o_ref, atol={"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2}[dtype])
    np.testing.assert_allclose(lse, lse_ref, atol=1e-12 if dtype == "float64" else 1e-5)


FUNCTIONS = {
    "slopes": lambda x: numba_flash.alibi(np.array([0.5, x])),
    "table": lambda x: numba_flash.relative_position(np.array([[x], [1.0]])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_of_a_function_beyond_what_scores_are_computed_in(name):
    """In float64 they are none; what is infinite is so everywhere."""
    make = FUNCTIONS[name]
    for dtype in DTYPES:
        x = np.zeros((2, 4, 8), DTYPES[dtype])
        for number in (1e39, -1e39):
            if dtype == "float64":
                assert numba_flash.plan(x, x, x, score_mod=make(number)).problem.options.score_mod
                continue
            sentence = f"{name} must lie between -3.4e+38 and 3.4e+38, computed in float32; got 1e+39"
            for function in (numba_flash.forward, numba_flash.plan):
                with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
                    function(x, x, x, score_mod=make(number))
        assert numba_flash.plan(x, x, x, score_mod=make(-np.inf)).problem.options.score_mod
        assert numba_flash.plan(x, x, x, score_mod=make(3.4e38)).problem.options.score_mod
