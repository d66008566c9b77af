"""The oracle against central differences, and against attention written a second time, element by element."""

import math

import numpy as np
import pytest
from support import random_inputs

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
    o, lse = reference.forward(q, k, v, **options)
    for out, expected in zip((o, lse, *reference.backward(do, q, k, v, **options)), by_hand(q, k, v, do, **options), strict=True):
        assert out.dtype == np.float64
        np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_equal_central_differences(shape, options):
    *xs, do = inputs(shape, seed=1)
    step = 1e-5
    loss = lambda: np.sum(do * reference.forward(*xs, **options)[0])
    for x, gradient in zip(xs, reference.backward(do, *xs, **options), strict=True):
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
    o, lse = reference.forward(q, k, v, causal=True)  # the last query sees both keys, the first one none
    dq, _, _ = reference.backward(do, q, k, v, causal=True)
    assert (o[0, 0] == 0).all()
    assert (dq[0, 0] == 0).all()
    assert lse[0, 0] == -np.inf
    assert np.isfinite(lse[0, 1:]).all()


def test_upcasts_before_any_arithmetic():
    q, k, v, do = random_inputs(batch=(), nq=3, nk=4, d=4, dtype="bfloat16")
    upcast = [x.astype(np.float64) for x in (q, k, v, do)]
    np.testing.assert_array_equal(reference.forward(q, k, v)[0], reference.forward(*upcast[:3])[0])
    np.testing.assert_array_equal(reference.backward(do, q, k, v)[1], reference.backward(upcast[3], *upcast[:3])[1])


@pytest.mark.parametrize("at", ["k", "v"])
def test_hidden_nan_stays_hidden(at):
    q, k, v, do = random_inputs(batch=(), nq=4, nk=4, d=3, dtype="float64")
    clean = (*reference.forward(q, k, v, causal=True), *reference.backward(do, q, k, v, causal=True))
    {"k": k, "v": v}[at][:, 2] = np.nan  # seen by queries 2 and 3
    o, lse = reference.forward(q, k, v, causal=True)
    dq, _, _ = reference.backward(do, q, k, v, causal=True)
    for out, expected in zip((o, lse, dq), clean[:3], strict=True):
        np.testing.assert_allclose(out[:, :2], expected[:, :2], rtol=1e-13)
    assert np.isnan(o[:, 2:]).all()
    assert np.isnan(dq[:, 2:]).all()
    assert np.isnan(lse[:, 2:]).all() == (at == "k")
