"""The oracle: standard attention with the whole N x N matrix, in float64 NumPy. Slow on purpose, independent of every kernel.

Equations: Dao et al., FlashAttention (arXiv:2205.14135), section 2.2 and appendix B.
"""

import numpy as np

from numba_flash import spec


def _dense_visible(problem: spec.Problem) -> np.ndarray:
    """Boolean (nq, nk) matrix of the keys that each query sees."""
    diagonal = np.arange(problem.nk)[None, :] - np.arange(problem.nq)[:, None]
    return (problem.low <= diagonal) & (diagonal <= problem.high)


def _heads(x: np.ndarray, group: int) -> np.ndarray:
    """Float64 copy with the head axis present and every key/value head repeated for its `group` of query heads."""
    x = np.asarray(x).astype(np.float64)
    x = x if x.ndim > 2 else x[None]
    return np.repeat(x, group, axis=-3)


def _finite_product(a: np.ndarray, b: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """``a @ b`` for ``a`` that is 0 where not `visible`: such terms are absent, even where `b` is NaN or Inf."""
    if np.isfinite(b).all():
        return a @ b
    terms = np.where(visible[..., None], a[..., None] * b[..., None, :, :], 0.0)
    return terms.sum(axis=-2)


def _probabilities(problem, q, k):
    """P and lse: softmax over the visible keys; a row that sees nothing has P = 0 and lse = -inf."""
    visible = _dense_visible(problem)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        s = np.where(visible, problem.scale * (q @ np.swapaxes(k, -1, -2)), -np.inf)
        m = s.max(axis=-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(m == -np.inf, 0.0, m))
        l = p.sum(axis=-1, keepdims=True)
        lse = (m + np.log(l))[..., 0]
        return np.where(visible, p / np.where(l == 0.0, 1.0, l), 0.0), lse, visible


def forward(q, k, v, **options) -> tuple[np.ndarray, np.ndarray]:
    """Output and log-sum-exp in float64.

    Parameters
    ----------
    q, k, v : array, shapes (..., Hq, Nq, D), (..., Hk, Nk, D), (..., Hk, Nk, Dv), or 2-D without the head axis
        NumPy arrays of any supported dtype; upcast before any arithmetic.
    **options
        `scale`, `causal`, `window`, `q_start` of `numba_flash.forward`.

    Returns
    -------
    o : array of float64, shape (..., Hq, Nq, Dv)
    lse : array of float64, shape (..., Hq, Nq)
    """
    problem = spec.bind(q, k, v, **options)
    group = problem.hq // max(problem.hk, 1)
    qh, kh, vh = _heads(q, 1), _heads(k, group), _heads(v, group)
    with np.errstate(invalid="ignore", over="ignore"):
        p, lse, visible = _probabilities(problem, qh, kh)
        o = _finite_product(p, vh, visible)
    return o.reshape(*q.shape[:-1], problem.dv), lse.reshape(q.shape[:-1])


def backward(do, q, k, v, **options) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of ``sum(do * o)`` in float64, from the inputs alone (o and lse are recomputed).

    Parameters
    ----------
    do : array, shape (..., Hq, Nq, Dv)
        Gradient with respect to o.
    q, k, v, **options
        As given to `forward`.

    Returns
    -------
    dq, dk, dv : arrays of float64, in the shapes of q, k, v
    """
    problem = spec.bind(q, k, v, **options)
    group = problem.hq // max(problem.hk, 1)
    qh, kh, vh, doh = _heads(q, 1), _heads(k, group), _heads(v, group), _heads(do, 1)
    transpose = lambda x: np.swapaxes(x, -1, -2)
    with np.errstate(invalid="ignore", over="ignore"):
        p, _, visible = _probabilities(problem, qh, kh)
        dv = _finite_product(transpose(p), doh, transpose(visible))
        dp = np.where(visible, doh @ transpose(vh), 0.0)
        delta = np.where(visible, p * dp, 0.0).sum(axis=-1, keepdims=True)
        ds = np.where(visible, problem.scale * p * (dp - delta), 0.0)
        dq = _finite_product(ds, kh, visible)
        dk = _finite_product(transpose(ds), qh, transpose(visible))
    per_group = lambda x: x.reshape(*x.shape[:-3], problem.hk, group, *x.shape[-2:]).sum(axis=-3)
    return dq.reshape(q.shape), per_group(dk).reshape(k.shape), per_group(dv).reshape(v.shape)
