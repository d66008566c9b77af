"""The oracle: standard attention with the whole N x N matrix, in float64 NumPy. Slow on purpose, independent of every kernel.

Equations: Dao et al., FlashAttention (arXiv:2205.14135), section 2.2 and appendix B. All arrays have five dimensions within. What it is
asked through is `numba_flash.reference`: a `Problem`, and the arrays behind it by name.
"""

from typing import NamedTuple

import numpy as np


def _wide(x, ndim: int = 5) -> np.ndarray:
    """Float64 copy with leading axes of size 1."""
    x = np.asarray(x).astype(np.float64)
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


def _heads(x, group: int) -> np.ndarray:
    """The same with every key/value head repeated for its `group` of query heads."""
    return np.repeat(_wide(x), group, axis=-3)


def _group(problem) -> int:
    """Query heads that share a key/value head."""
    return problem.hq // max(problem.hk, 1)


def _lengths(problem, given) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of queries and keys, arrays that broadcast against (b0, b1, h, i, j)."""
    full = (("q_lengths", problem.nq), ("kv_lengths", problem.nk))
    return tuple(_wide(n if given.get(name) is None else given[name], 2)[..., None, None, None] for name, n in full)


def _visible(problem, given) -> np.ndarray:
    """Boolean (b0, b1, hq, nq, nk): which query sees which key."""
    (nq, nk), i, j = _lengths(problem, given), np.arange(problem.nq)[:, None], np.arange(problem.nk)
    shift = (nk - problem.nk) - (nq - problem.nq) if problem.options.follows else 0
    visible = (problem.low + shift <= j - i) & (j - i <= problem.high + shift) & (i < nq) & (j < nk)
    mask = getattr(given.get("mask"), "dense", lambda *_: given.get("mask"))(problem.nq, problem.nk)  # of a `BlockMask`
    for x, kind, hides in ((mask, bool, np.logical_not), (given.get("bias"), float, np.isneginf)):
        visible = visible if x is None else visible & ~hides(_wide(x).astype(kind))
    return np.broadcast_to(visible, (*problem.batch, problem.hq, problem.nq, problem.nk))


def _product(a, b, present) -> np.ndarray:
    """``a @ b`` for ``a`` that is 0 where not `present`: such terms are absent, even where `b` is NaN or Inf."""
    if np.isfinite(b).all():
        return a @ b
    return np.where(present[..., None], a[..., None] * b[..., None, :, :], 0.0).sum(axis=-2)


def _scores(problem, given, q, k):
    """Scores, their derivative with respect to ``scale * q k^T``, and where they are visible (-inf from score_mod hides)."""
    options, s, slope = problem.options, problem.scale * (q @ k.swapaxes(-1, -2)), np.array(1.0)
    visible = _visible(problem, given)
    if options.softcap:
        s = options.softcap * np.tanh(s / options.softcap)
        slope = 1 - np.square(s / options.softcap)
    if options.score_mod is not None:
        b0, b1, *hij = np.indices(s.shape, sparse=True)
        where = (b0 * problem.batch[1] + b1, *hij)
        apply = lambda f: np.vectorize(lambda x, *at: f(np.float64(x), *at), otypes=[float])(s, *where) if s.size else s
        slope = slope * apply(options.score_mod.gradient) if options.score_mod.gradient is not None else None
        s = apply(options.score_mod.function)
        visible = visible & ~np.isneginf(s)
    return s if given.get("bias") is None else s + _wide(given["bias"]), slope, visible


class Softmax(NamedTuple):
    """P, the factor that dropout puts on it, lse; scores, their derivative with respect to ``scale * q k^T``, where they are visible."""

    p: np.ndarray
    factor: np.ndarray
    lse: np.ndarray
    s: np.ndarray
    slope: np.ndarray | None
    visible: np.ndarray

    @property
    def kept(self) -> np.ndarray:
        """True where a pair is visible and not dropped."""
        return self.visible & (self.factor != 0)


def softmax(problem, given, q, k) -> Softmax:
    """A row that sees nothing has P = 0 and lse = -inf."""
    s, slope, visible = _scores(problem, given, _wide(q), _heads(k, _group(problem)))
    s = np.where(visible, s, -np.inf)
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(m == -np.inf, 0.0, m))
    l = p.sum(axis=-1, keepdims=True)
    p, factor, options = np.where(visible, p / np.where(l == 0.0, 1.0, l), 0.0), np.ones(()), problem.options
    if options.dropout:
        from numba_flash import rng

        heads = np.arange(np.prod(p.shape[:3])).reshape(p.shape[:3])
        factor = rng.keep_all(options.generator, options.dropout, heads, *p.shape[3:]) / (1 - options.dropout)
    return Softmax(p, factor, (m + np.log(l))[..., 0], s, slope, visible)


def forward(problem, found: Softmax, v) -> np.ndarray:
    """o (b0, b1, hq, nq, dv)."""
    return _product(found.p * found.factor, _heads(v, _group(problem)), found.kept)


def backward(problem, found: Softmax, do, q, k, v, dlse=None):
    """dq, dk, dv, and the gradient of the scores (b0, b1, hq, nq, nk): of ``sum(do * o) + sum(dlse * lse)``."""
    group, transpose, dow = _group(problem), lambda x: x.swapaxes(-1, -2), _wide(do)
    (p, factor, _, _, slope, visible), kept = found, found.kept
    qw, kw, vw = _wide(q), _heads(k, group), _heads(v, group)
    dv = _product(transpose(p * factor), dow, transpose(kept))
    dp = np.where(kept, factor * (dow @ transpose(vw)), 0.0)
    delta = np.where(visible, p * dp, 0.0).sum(axis=-1, keepdims=True) - (0.0 if dlse is None else _wide(dlse, 4)[..., None])
    ds = np.where(visible, p * (dp - delta), 0.0)
    dx = np.where(visible, problem.scale * ds * slope, 0.0)
    dq, dk = _product(dx, kw, visible), _product(transpose(dx), qw, transpose(visible))
    per_group = lambda x: x.reshape(*x.shape[:2], problem.hk, group, *x.shape[-2:]).sum(axis=3)
    return dq, per_group(dk), per_group(dv), ds
