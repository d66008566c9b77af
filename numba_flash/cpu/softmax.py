"""Softmax on the tiles of the CPU kernels, forward and backward, and the products whose terms may be absent."""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numba.extending import overload

from numba_flash import mask, numeric
from numba_flash.cpu.arguments import Span, is_plain
from numba_flash.cpu.cache import PART, part
from numba_flash.cpu.scores import absent, drop_row, is_negative_zero, keep_scale, modify_row, unit
from numba_flash.cpu.tiles import MINUS_INF


class ForwardRows(NamedTuple):
    """What the forward pass keeps of the rows of a tile.

    Attributes
    ----------
    m, l : array (rows,)
        Maximum of the scores so far, and sum of their exponentials.
    alpha : array (rows,)
        Factor for what was accumulated before the last tile.
    slope : array (columns,)
        Scratch, for the derivatives of one row of scores.
    """

    m: Any
    l: Any
    alpha: Any
    slope: Any


class BackwardRows(NamedTuple):
    """What the backward pass knows of the rows of a tile.

    Attributes
    ----------
    lse, delta : array (rows,)
        Log-sum-exp, and rowsum(dO * O) - dlse.
    slope : array (columns,)
        Scratch, for the derivatives of one row of scores.
    bend : bool
        dS is to be the gradient of ``scale * q . k``, else that of the final score.
    """

    lse: Any
    delta: Any
    slope: Any
    bend: bool


@njit
def visible_columns(i, region):
    """Columns ``[first, last)`` of the tile that query `i` sees."""
    start, stop = mask.kv_range(i, i + 1, region.j0 + region.n, region.low, region.high)
    first = min(max(start - region.j0, 0), region.n)
    return first, max(stop - region.j0, first)


# ---- products -------------------------------------------------------------------------------------------------------------------------


@njit
def dot_rows(p, x, out, clean, region, extras):
    """``out = p @ x``. Unless `clean`, x holds NaN or Inf and absent terms, whose p is 0, must be skipped rather than multiplied."""
    if clean:
        np.dot(p, x, out)
        return
    for r in range(p.shape[0]):
        first, last = visible_columns(region.i0 + r, region)
        out[r] = 0
        for c in range(first, last):
            if not absent(p[r, c], extras):
                out[r] += p[r, c] * x[c]


@njit
def dot_columns(p, x, out, clean, region, extras):
    """``out = p.T @ x``, with the same care."""
    if clean:
        np.dot(p.T, x, out)
        return
    out[:] = 0
    for r in range(p.shape[0]):
        first, last = visible_columns(region.i0 + r, region)
        for c in range(first, last):
            if not absent(p[r, c], extras):
                out[c] += p[r, c] * x[r]


# ---- rows -----------------------------------------------------------------------------------------------------------------------------


@part(fastmath={"contract", "reassoc", "nsz"})
def exp2_row(row, shift):
    """``row = exp2(row - shift)``; returns its sum."""
    total = row.dtype.type(0)
    for c in range(row.size):
        p = numeric.exp2(row[c] - shift)
        row[c] = p
        total += p
    return total


@part(fastmath={"contract", "reassoc"})
def marked_exp_row(row, shift):
    """``row = exp(row - shift)``, and its sum; the weight of a hidden term is -0.0."""
    total, log2e = row.dtype.type(0), row.dtype.type(numeric.LOG2E)
    for c in range(row.size):
        p = numeric.exp2((row[c] - shift) * log2e)
        row[c] = -0.0 if row[c] == MINUS_INF else p
        total += p
    return total


@part(fastmath={"contract", "nsz"})
def recompute_row(p, dp, shift, delta):
    """``p = exp2(p - shift)``, ``dp = p * (dp - delta)``."""
    for c in range(p.size):
        prob = numeric.exp2(p[c] - shift)
        p[c] = prob
        dp[c] = prob * (dp[c] - delta)


@part(fastmath={"contract"})
def marked_gradient_row(p, dp, slope, delta):
    """``dp = p * (dp - delta) * slope`` of weights p, again -0.0 where they are hidden."""
    for c in range(p.size):
        ds = p[c] * (dp[c] - delta) * slope[c] + 0
        dp[c] = -0.0 if is_negative_zero(p[c]) else ds


def scores(row, slope, span, extras):
    """The row of scores of the `arguments.Span`, in their `unit`, and their derivatives."""


def weights(row, shift, span, extras):
    """``row = exp(row - shift)``, by the unit of both, of which dropout drops some; returns the sum of all."""


def gradients(p, dp, slope, shift, delta, bend, span, extras):
    """Scores p become weights P = exp(p - shift), dp becomes dS = P * (dp - delta) * slope; the slope counts only if `bend`."""


@overload(scores)
def _scores(row, slope, span, extras):
    if is_plain(extras):
        return lambda row, slope, span, extras: None
    return lambda row, slope, span, extras: modify_row(row, slope, span, extras)


@overload(weights, jit_options=PART)
def _weights(row, shift, span, extras):
    if is_plain(extras):
        return lambda row, shift, span, extras: exp2_row(row, shift)

    def weights(row, shift, span, extras):
        total = marked_exp_row(row, shift)
        if extras.parameters.threshold > 0:
            drop_row(row, row.dtype.type(1), span, extras.parameters)
        return total

    return weights


@overload(gradients, jit_options=PART)
def _gradients(p, dp, slope, shift, delta, bend, span, extras):
    if is_plain(extras):
        return lambda p, dp, slope, shift, delta, bend, span, extras: recompute_row(p, dp, shift, delta)

    def gradients(p, dp, slope, shift, delta, bend, span, extras):
        marked_exp_row(p, shift)
        if not bend:
            slope[:] = 1
        if extras.parameters.threshold > 0:
            drop_row(dp, p.dtype.type(keep_scale(extras)), span, extras.parameters)
            marked_gradient_row(p, dp, slope, delta)
            drop_row(p, p.dtype.type(1), span, extras.parameters)
        else:
            marked_gradient_row(p, dp, slope, delta)

    return gradients


# ---- tiles ----------------------------------------------------------------------------------------------------------------------------


@part
def online_softmax(s, rows, region, at, extras):
    """One step of the online softmax: s becomes P, and the `ForwardRows` what they are after it."""
    for r in range(s.shape[0]):
        i = region.i0 + r
        first, last = visible_columns(i, region)
        span = Span(at, i, region.j0 + first)
        scores(s[r, first:last], rows.slope[first:last], span, extras)
        m_new = max(rows.m[r], numeric.row_max(s[r, first:last]))
        shift = s.dtype.type(0) if m_new == MINUS_INF else m_new  # a row whose scores are all -inf gives P = 0, not NaN
        rows.alpha[r] = numeric.exp2((rows.m[r] - shift) * s.dtype.type(numeric.LOG2E / unit(extras)))
        rows.l[r] = rows.l[r] * rows.alpha[r] + weights(s[r, first:last], shift, span, extras)
        rows.m[r] = m_new
        s[r, :first] = 0
        s[r, last:] = 0


@part
def recompute_p(s, dp, rows, region, at, extras):
    """s becomes P = exp(S - lse), dp becomes dS = P * (dP - delta); hidden elements of both become 0. `rows` are `BackwardRows`."""
    for r in range(s.shape[0]):
        i = region.i0 + r
        first, last = visible_columns(i, region)
        span = Span(at, i, region.j0 + first)
        slope = rows.slope[first:last]
        scores(s[r, first:last], slope, span, extras)
        shift = s.dtype.type(0) if rows.lse[r] == MINUS_INF else s.dtype.type(rows.lse[r] * s.dtype.type(unit(extras)))
        gradients(s[r, first:last], dp[r, first:last], slope, shift, rows.delta[r], rows.bend, span, extras)
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
