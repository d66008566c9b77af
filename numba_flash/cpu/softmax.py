"""Softmax on the tiles of the CPU kernels, forward and backward, and the products whose terms may be absent."""

import numpy as np
from numba import njit, types
from numba.extending import overload

from numba_flash import mask, numeric
from numba_flash.cpu.scores import absent, drop_row, is_negative_zero, keep_scale, modify_row, unit
from numba_flash.cpu.tiles import MINUS_INF


@njit
def visible_columns(i, j0, n, low, high):
    """Columns ``[first, last)`` of the tile with keys ``[j0, j0 + n)`` that query `i` sees."""
    start, stop = mask.kv_range(i, i + 1, j0 + n, low, high)
    first = min(max(start - j0, 0), n)
    return first, max(stop - j0, first)


# ---- products -------------------------------------------------------------------------------------------------------------------------


@njit
def dot_rows(p, x, out, clean, corner, band, extras):
    """``out = p @ x``. Unless `clean`, x holds NaN or Inf and absent terms, whose p is 0, must be skipped rather than multiplied."""
    if clean:
        np.dot(p, x, out)
        return
    for r in range(p.shape[0]):
        first, last = visible_columns(corner[0] + r, corner[1], p.shape[1], band[0], band[1])
        out[r] = 0
        for c in range(first, last):
            if not absent(p[r, c], extras):
                out[r] += p[r, c] * x[c]


@njit
def dot_columns(p, x, out, clean, corner, band, extras):
    """``out = p.T @ x``, with the same care."""
    if clean:
        np.dot(p.T, x, out)
        return
    out[:] = 0
    for r in range(p.shape[0]):
        first, last = visible_columns(corner[0] + r, corner[1], p.shape[1], band[0], band[1])
        for c in range(first, last):
            if not absent(p[r, c], extras):
                out[c] += p[r, c] * x[r]


# ---- rows -----------------------------------------------------------------------------------------------------------------------------


@njit(fastmath={"contract", "reassoc", "nsz"})
def exp2_row(row, shift):
    """``row = exp2(row - shift)``; returns its sum."""
    total = row.dtype.type(0)
    for c in range(row.size):
        p = numeric.exp2(row[c] - shift)
        row[c] = p
        total += p
    return total


@njit(fastmath={"contract", "reassoc"})
def marked_exp_row(row, shift):
    """``row = exp(row - shift)``, and its sum; the weight of a hidden term is -0.0."""
    total, log2e = row.dtype.type(0), row.dtype.type(numeric.LOG2E)
    for c in range(row.size):
        p = numeric.exp2((row[c] - shift) * log2e)
        row[c] = -0.0 if row[c] == MINUS_INF else p
        total += p
    return total


@njit(fastmath={"contract", "nsz"})
def recompute_row(p, dp, shift, delta):
    """``p = exp2(p - shift)``, ``dp = p * (dp - delta)``."""
    for c in range(p.size):
        prob = numeric.exp2(p[c] - shift)
        p[c] = prob
        dp[c] = prob * (dp[c] - delta)


@njit(fastmath={"contract"})
def marked_gradient_row(p, dp, slope, delta):
    """``dp = p * (dp - delta) * slope`` of weights p, again -0.0 where they are hidden."""
    for c in range(p.size):
        ds = p[c] * (dp[c] - delta) * slope[c] + 0
        dp[c] = -0.0 if is_negative_zero(p[c]) else ds


def scores(row, slope, at, i, j0, extras):
    """The row of scores of query i and the keys from j0 on, in their `unit`, and their derivatives."""


def weights(row, shift, at, i, j0, extras):
    """``row = exp(row - shift)``, by the unit of both, of which dropout drops some; returns the sum of all."""


def gradients(p, dp, slope, row, at, i, j0, extras):
    """Scores p become weights P = exp(p - shift), dp becomes dS = P * (dp - delta) * slope.

    `row` is (shift, delta, bend): the slope counts only if `bend`.
    """


@overload(scores)
def _scores(row, slope, at, i, j0, extras):
    if extras == types.Tuple(()):
        return lambda row, slope, at, i, j0, extras: None
    return lambda row, slope, at, i, j0, extras: modify_row(row, slope, at, i, j0, extras)


@overload(weights)
def _weights(row, shift, at, i, j0, extras):
    if extras == types.Tuple(()):
        return lambda row, shift, at, i, j0, extras: exp2_row(row, shift)

    def weights(row, shift, at, i, j0, extras):
        total = marked_exp_row(row, shift)
        if extras[2][6] > 0:
            drop_row(row, row.dtype.type(1), at, i, j0, extras[2])
        return total

    return weights


@overload(gradients)
def _gradients(p, dp, slope, row, at, i, j0, extras):
    if extras == types.Tuple(()):
        return lambda p, dp, slope, row, at, i, j0, extras: recompute_row(p, dp, row[0], row[1])

    def gradients(p, dp, slope, row, at, i, j0, extras):
        shift, delta, bend = row
        marked_exp_row(p, shift)
        if not bend:
            slope[:] = 1
        if extras[2][6] > 0:
            drop_row(dp, p.dtype.type(keep_scale(extras)), at, i, j0, extras[2])
            marked_gradient_row(p, dp, slope, delta)
            drop_row(p, p.dtype.type(1), at, i, j0, extras[2])
        else:
            marked_gradient_row(p, dp, slope, delta)

    return gradients


# ---- tiles ----------------------------------------------------------------------------------------------------------------------------


@njit
def online_softmax(s, rows, at, corner, band, extras):
    """One step of the online softmax: s becomes P.

    Of the four `rows`, m_i and l_i are updated, alpha is the factor for what was accumulated so far, slope is scratch of a row's length.
    """
    m_i, l_i, alpha, slope = rows
    for r in range(s.shape[0]):
        i = corner[0] + r
        first, last = visible_columns(i, corner[1], s.shape[1], band[0], band[1])
        scores(s[r, first:last], slope[first:last], at, i, corner[1] + first, extras)
        m_new = max(m_i[r], numeric.row_max(s[r, first:last]))
        shift = s.dtype.type(0) if m_new == MINUS_INF else m_new  # a row whose scores are all -inf gives P = 0, not NaN
        alpha[r] = numeric.exp2((m_i[r] - shift) * s.dtype.type(numeric.LOG2E / unit(extras)))
        l_i[r] = l_i[r] * alpha[r] + weights(s[r, first:last], shift, at, i, corner[1] + first, extras)
        m_i[r] = m_new
        s[r, :first] = 0
        s[r, last:] = 0


@njit
def recompute_p(s, dp, rows, at, corner, band, extras):
    """s becomes P = exp(S - lse), dp becomes dS = P * (dP - delta); hidden elements of both become 0.

    `rows` is (lse, delta, slope, bend): slope is scratch of a row's length; if `bend`, dS is that of q . k, else of the final score.
    """
    lse, delta, slope, bend = rows
    for r in range(s.shape[0]):
        i = corner[0] + r
        first, last = visible_columns(i, corner[1], s.shape[1], band[0], band[1])
        scores(s[r, first:last], slope[first:last], at, i, corner[1] + first, extras)
        shift = s.dtype.type(0) if lse[r] == MINUS_INF else s.dtype.type(lse[r] * s.dtype.type(unit(extras)))
        row = (shift, delta[r], bend)
        gradients(s[r, first:last], dp[r, first:last], slope[first:last], row, at, i, corner[1] + first, extras)
        for hidden in (s[r, :first], s[r, last:], dp[r, :first], dp[r, last:]):
            hidden[:] = 0


@njit
def fold(acc, x):
    """``acc += x``, summed over the axes of which acc has only one element."""
    for r in range(x.shape[0]):
        row = acc[min(r, acc.shape[0] - 1)]
        if acc.shape[1] == x.shape[1]:
            for c in range(x.shape[1]):
                row[c] += x[r, c]
        else:
            row[0] += x[r].sum()
