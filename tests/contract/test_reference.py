"""The oracle against central differences, and against attention written a second time, element by element."""

import inspect
import math

import numpy as np
import pytest
from support import random_inputs, whole

import numba_flash
from numba_flash import reference

OPTIONS = [
    {},
    {"scale": -0.7},
    {"causal": True},
    {"causal": True, "q_start": 0},
    {"causal": True, "q_start": -2},  # the first two queries see nothing
    {"window": (1, 0)},
    {"window": (-1, 1), "q_start": 1},
    {"window": (0, 2), "causal": True},
    {"window": (1, 1), "q_start": 40},  # nobody sees anything
]
SHAPES = [{"nq": 3, "nk": 4}, {"nq": 4, "nk": 3, "hq": 4, "hk": 2}, {"nq": 2, "nk": 1, "hq": 3}, {"nq": 3, "nk": 3, "hq": None, "hk": None}]


def inputs(shape, seed=0):
    return random_inputs(batch=() if "hq" in shape else (2,), d=2, dv=3, dtype="float64", seed=seed, **shape)


def sees(i, j, nq, nk, causal=False, window=None, q_start=None):
    position = i + (nk - nq if q_start is None else q_start)
    left, right = window or (-1, -1)
    return not ((causal and j > position) or (left >= 0 and j < position - left) or (right >= 0 and j > position + right))


def attention_by_hand(q, k, v, do, scale=None, **mask):
    """One head: lists of Python floats in, lists of Python floats out; o, lse, dq, dk, dv from their definitions."""
    nq, nk, d, dv_dim = len(q), len(k), len(q[0]), len(v[0])
    scale = 1 / math.sqrt(d) if scale is None else scale
    o, lse = [[0.0] * dv_dim for _ in q], [-math.inf] * nq
    dq, dk, dv = ([[0.0] * len(row) for row in x] for x in (q, k, v))
    for i in range(nq):
        keys = [j for j in range(nk) if sees(i, j, nq, nk, **mask)]
        if not keys:
            continue
        score = {j: scale * sum(a * b for a, b in zip(q[i], k[j], strict=True)) for j in keys}
        total = sum(math.exp(score[j]) for j in keys)
        p = {j: math.exp(score[j]) / total for j in keys}
        lse[i] = math.log(total)
        o[i] = [sum(p[j] * v[j][c] for j in keys) for c in range(dv_dim)]
        dp = {j: sum(do[i][c] * v[j][c] for c in range(dv_dim)) for j in keys}
        for j in keys:
            # the Jacobian of softmax, dp_j / ds_m = p_j (delta_jm - p_m), summed over m
            ds = sum(dp[m] * p[m] * ((1.0 if m == j else 0.0) - p[j]) for m in keys)
            for c in range(d):
                dq[i][c] += scale * ds * k[j][c]
                dk[j][c] += scale * ds * q[i][c]
            for c in range(dv_dim):
                dv[j][c] += p[j] * do[i][c]
    return o, lse, dq, dk, dv


def by_hand(q, k, v, do, **options):
    """`attention_by_hand` for every batch and head; key heads sum over the query heads of their group."""
    with_head = [x if x.ndim > 2 else x[None] for x in (q, k, v, do)]
    group = with_head[0].shape[-3] // with_head[1].shape[-3]
    results = [np.zeros(do.shape), np.zeros(do.shape[:-1]), np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)]
    o, lse, dq, dk, dv = (x if x.ndim > n else x[None] for x, n in zip(results, (2, 1, 2, 2, 2), strict=True))
    for *b, h in np.ndindex(with_head[0].shape[:-2]):
        at, kv_at = (*b, h), (*b, h // group)
        q1, k1, v1, do1 = with_head[0][at], with_head[1][kv_at], with_head[2][kv_at], with_head[3][at]
        one = attention_by_hand(q1.tolist(), k1.tolist(), v1.tolist(), do1.tolist(), **options)
        o[at], lse[at], dq[at] = one[:3]
        dk[kv_at] += one[3]
        dv[kv_at] += one[4]
    return results


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_attention_written_by_hand(shape, options):
    q, k, v, do = inputs(shape)
    for out, expected in zip(whole.everything(do, q, k, v, **options), by_hand(q, k, v, do, **options), strict=True):
        assert out.dtype == np.float64
        np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_central_differences(shape, options):
    *xs, do = inputs(shape, seed=1)
    step = 1e-5
    loss = lambda: np.sum(do * reference.forward(*xs, **options))
    for x, gradient in zip(xs, whole.gradients(do, *xs, **options), strict=True):
        difference = np.zeros_like(x)
        for at in np.ndindex(x.shape):
            value = x[at]
            x[at] = value + step
            above = loss()
            x[at] = value - step
            difference[at] = (above - loss()) / (2 * step)
            x[at] = value
        np.testing.assert_allclose(gradient, difference, rtol=0, atol=1e-7 * max(1.0, np.abs(difference).max()))


def test_rows_that_see_nothing():
    q, k, v, do = random_inputs(batch=(), nq=3, nk=2, d=2, dtype="float64")
    o, lse, dq, _, _ = whole.everything(do, q, k, v, causal=True)  # the last query sees both keys, the first one none
    assert (o[0, 0] == 0).all()
    assert (dq[0, 0] == 0).all()
    assert lse[0, 0] == -np.inf
    assert np.isfinite(lse[0, 1:]).all()


def test_upcasts_before_any_arithmetic():
    q, k, v, do = random_inputs(batch=(), nq=3, nk=4, d=4, dtype="bfloat16")
    upcast = [x.astype(np.float64) for x in (q, k, v, do)]
    np.testing.assert_array_equal(reference.forward(q, k, v), reference.forward(*upcast[:3]))
    np.testing.assert_array_equal(whole.gradients(do, q, k, v)[1], whole.gradients(upcast[3], *upcast[:3])[1])


@pytest.mark.parametrize("at", ["k", "v"])
def test_hidden_nan_stays_hidden(at):
    q, k, v, do = random_inputs(batch=(), nq=4, nk=4, d=3, dtype="float64")
    clean = whole.everything(do, q, k, v, causal=True)
    {"k": k, "v": v}[at][:, 2] = np.nan  # seen by queries 2 and 3
    o, lse, dq, _, _ = whole.everything(do, q, k, v, causal=True)
    for out, expected in zip((o, lse, dq), clean[:3], strict=True):
        np.testing.assert_allclose(out[:, :2], expected[:, :2], rtol=1e-13)
    assert np.isnan(o[:, 2:]).all()
    assert np.isnan(dq[:, 2:]).all()
    assert np.isnan(lse[:, 2:]).all() == (at == "k")


# ---- the signatures and results of the functions that it is the reference of -------------------------------------------------------------


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_signatures_are_those_of_the_functions(name):
    """But that there is no `out`."""
    of = lambda function: {name: (p.kind, p.default) for name, p in inspect.signature(function).parameters.items() if name != "out"}
    assert of(getattr(reference, name)) == of(getattr(numba_flash, name))


def test_lse_is_returned_where_it_is_asked_for():
    q, k, v, _ = inputs(SHAPES[0])
    o, lse = reference.forward(q, k, v, return_lse=True)
    np.testing.assert_array_equal(reference.forward(q, k, v), o)
    assert o.shape == q.shape[:-1] + v.shape[-1:]
    assert lse.shape == q.shape[:-1]


def test_options_that_change_nothing_are_checked():
    x = np.eye(3)
    o, lse = reference.forward(x, x, x, precision="ieee", backend="simt", return_lse=True)
    reference.backward(x, x, x, x, o, lse, precision="tf32", backend="sm90", deterministic=False)
    for wrong, named in (
        ({"backend": "gpu"}, "backend must be one of"),
        ({"precision": "half"}, "precision must be one of"),
        ({"causal": 1}, "causal must be True or False"),
    ):
        with pytest.raises((TypeError, ValueError), match=named):
            reference.forward(x, x, x, **wrong)
        with pytest.raises((TypeError, ValueError), match=named):
            reference.backward(x, x, x, x, o, lse, **wrong)
    for wrong in ({"deterministic": 1}, {"bias_grad": 1}, {"bias_grad": True}, {"dlse": lse[:2]}, {"score_mod": lambda s, *_: s}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            reference.backward(x, x, x, x, o, lse, **wrong)
    with pytest.raises(TypeError, match="return_lse must be True or False"):
        reference.forward(x, x, x, return_lse=1)
    with pytest.raises(TypeError, match=r"do\.dtype \(float32\) must be float64"):
        reference.backward(x.astype(np.float32), x, x, x, o, lse)


def test_heads_may_come_after_the_length():
    """Gradients are those of the usual order, and errors count in this one."""
    arrays = random_inputs(batch=(2,), hq=4, hk=2, nq=3, nk=5, d=4, dv=2, dtype="float64")
    swapped = [x.swapaxes(1, 2) for x in arrays]
    o, lse, *gradients = whole.everything(swapped[3], *swapped[:3], causal=True, axes="bnhd")
    expected = whole.everything(arrays[3], *arrays[:3], causal=True)
    np.testing.assert_array_equal(lse, expected[1])
    for x, y in zip((o, *gradients), (expected[0], *expected[2:]), strict=True):
        np.testing.assert_array_equal(x.swapaxes(1, 2), y)
    o[1, 2, 3, 0] += 1
    with pytest.raises(ValueError, match=r"o is not .*: o\[1, 2, 3, 0\] is"):
        reference.backward(swapped[3], *swapped[:3], o, lse, causal=True, axes="bnhd")
    with pytest.raises(ValueError, match="axes must be"):
        reference.forward(*swapped[:3], axes="nhd")


def test_arrays_of_others_are_read():
    class Foreign:
        def __init__(self, x):
            self.__dlpack__, self.__dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    q, k, v, do = inputs(SHAPES[0])
    there = [Foreign(x) for x in (do, q, k, v)]
    for x, expected in zip(whole.everything(*there), whole.everything(do, q, k, v), strict=True):
        np.testing.assert_array_equal(x, expected)


def test_lengths_are_checked():
    x = np.zeros((2, 1, 3, 4))
    with pytest.raises(ValueError, match="kv_lengths must lie between"):
        reference.forward(x, x, x, kv_lengths=np.array([1, 4]))


# ---- o and lse ---------------------------------------------------------------------------------------------------------------------------

bias = np.random.default_rng(3).standard_normal((20, 30)).astype(np.float32)
hiding = np.where(bias > 1, np.finfo(np.float32).min, bias)
COMPUTED = {
    "plain": {},
    "causal": {"causal": True, "q_start": -3},
    "large scores": {"scale": 30.0},
    "softcap": {"softcap": 0.5},
    "bias": {"bias": bias},
    "a bias that hides": {"bias": hiding},
    "mask": {"mask": bias > 0},
    "dropout": {"dropout": 0.4, "rng": (1, 2)},
    "score_mod": {"score_mod": lambda s, b, h, i, j: 3 * s, "score_mod_grad": lambda s, b, h, i, j: 3.0},
    "lengths": {"kv_lengths": np.array([30, 0]), "q_lengths": np.array([7, 20])},
    "tf32": {"precision": "tf32"},
}


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(x, marks=pytest.mark.full_on_cpu) for x in ("float16", "bfloat16", "float64"))]
)
@pytest.mark.parametrize("name", COMPUTED)
def test_what_forward_returns_is_accepted(backend, name, dtype):
    q, k, v, do = random_inputs(batch=(2,), hq=4, hk=2, nq=20, nk=30, d=16, dv=8, dtype=dtype)
    options = COMPUTED[name]
    there = {key: backend.to_device(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    o, lse = map(backend.to_host, backend.forward(*map(backend.to_device, (q, k, v)), return_lse=True, **there))
    for x, expected in zip(reference.backward(do, q, k, v, o, lse, **options), whole.gradients(do, q, k, v, **options), strict=True):
        np.testing.assert_array_equal(x, expected)


def test_numbers_that_the_dtype_cannot_hold_are_accepted():
    """A value beyond float16, a log-sum-exp beyond float32, and what NaN makes of o."""
    x = np.full((2, 3), 60000, np.float16)
    lse = np.array([np.inf, np.inf], np.float32)
    _, own = reference.forward(x, x, x, scale=1e30, return_lse=True)
    assert np.isfinite(own).all()
    assert (own > 1e39).all()
    reference.backward(x, x, x, x, np.full((2, 3), np.inf, np.float16), lse, scale=1e30)
    v = np.array([[np.nan, 1, 1]] * 2, np.float16)
    o, lse = reference.forward(x[:, :1], x[:, :1], v, scale=0.0, return_lse=True)
    reference.backward(v, x[:, :1], x[:, :1], v, o.astype(np.float16), lse, scale=0.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_v_may_have_reached_rows_that_do_not_see_it(value):
    """In no matter which way; where all of v is finite the same number is wrong."""
    q, k, v, do = inputs(SHAPES[0])
    o, lse = reference.forward(q, k, v, causal=True, q_start=0, return_lse=True)
    o[0, ..., 0, 1] = value
    with pytest.raises(ValueError, match=r"^o is not what forward returns for these arguments"):
        reference.backward(do, q, k, v, o, lse, causal=True, q_start=0)
    v[..., 2, 0] = np.inf  # seen by the last query
    o[..., 2, 0] = np.inf
    reference.backward(do, q, k, v, o, lse, causal=True, q_start=0)


FORGOTTEN = {
    "causal": ({"causal": True}, {}),
    "scale": ({"scale": 0.3}, {}),
    "softcap": ({"softcap": 2.0}, {}),
    "bias": ({"bias": bias}, {"bias": bias + np.float32(0.01)}),
    "one pair": ({"mask": np.arange(600).reshape(20, 30) != 300}, {}),
    "dropout": ({"dropout": 0.4, "rng": (1, 2)}, {"dropout": 0.4, "rng": (1, 3)}),
    "lengths": ({"kv_lengths": np.array([30, 29])}, {}),
}


@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(x, marks=pytest.mark.full) for x in ("float16", "bfloat16", "float64"))])
@pytest.mark.parametrize("name", FORGOTTEN)
def test_what_forward_returns_with_other_options_is_refused(name, dtype):
    given, other = FORGOTTEN[name]
    q, k, v, do = random_inputs(batch=(2,), hq=4, hk=2, nq=20, nk=30, d=16, dv=8, dtype=dtype)
    o, lse = numba_flash.forward(q, k, v, return_lse=True, backend="cpu", **given)
    reference.backward(do, q, k, v, o, lse, **given)
    with pytest.raises(ValueError, match=f"{'o' if name == 'dropout' else 'lse'} is not what forward returns for these arguments"):
        reference.backward(do, q, k, v, o, lse, **other)


@pytest.mark.parametrize(("name", "value"), [(name, x) for name in ("o", "lse") for x in (0.25, np.nan, np.inf)] + [("o", -np.inf)])
def test_one_wrong_number_is_named(name, value):
    q, k, v, do = random_inputs(batch=(), hq=2, hk=1, nq=20, nk=30, d=16, dtype="bfloat16")
    results = dict(zip(("o", "lse"), numba_flash.forward(q, k, v, causal=True, q_start=-1, return_lse=True, backend="cpu"), strict=True))
    at = (1, 0, 3) if name == "o" else (1, 0)  # of a row that sees nothing
    results[name][at] = value
    own = "0" if name == "o" else "-inf"
    message = rf"{name} is not what .*: {name}\[{', '.join(map(str, at))}\] is {value:.4g}, not {own}; they may differ by"
    with pytest.raises(ValueError, match=message):
        reference.backward(do, q, k, v, results["o"], results["lse"], causal=True, q_start=-1)


@pytest.mark.parametrize("wrong", ["o", "lse"])
def test_shapes_and_kinds_of_o_and_lse_are_checked(wrong):
    q, k, v, do = inputs(SHAPES[0])
    results = dict(zip(("o", "lse"), reference.forward(q, k, v, return_lse=True), strict=True))
    for x in (results[wrong][..., :2], results[wrong].astype(int), results[wrong].tolist()):
        with pytest.raises((TypeError, ValueError), match=rf"^{wrong}[ .]"):
            reference.backward(do, q, k, v, **results | {wrong: x})
