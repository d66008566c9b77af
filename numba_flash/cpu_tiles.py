"""Tiles of the CPU kernels: packing rows into contiguous matrices of the accumulation dtype, writing them back, products, and the softmax.

float16 arrays come as int16 and bfloat16 arrays as uint16; `numeric.widen` and `numeric.narrow` convert on load and store.
"""

import numpy as np
from numba import njit
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic, overload

from numba_flash import mask, numeric

MINUS_INF = -np.inf


@intrinsic
def as_contiguous(typingctx, x):
    """The array `x`, whose elements are known to be dense in memory, typed as contiguous, so that LLVM vectorises loops over it."""
    contiguous = x.copy(layout="C")

    def codegen(context, builder, signature, args):
        return impl_ret_borrowed(context, builder, contiguous, args[0])

    return contiguous(x), codegen


@njit
def view2d(buffer, rows, columns):
    """The first ``rows * columns`` elements of a 1-D buffer as a contiguous matrix."""
    return buffer[: rows * columns].reshape(rows, columns)


@njit
def load_row(tile_row, row, factor):
    """``tile_row = factor * row``."""
    for c in range(tile_row.size):
        tile_row[c] = numeric.widen(row[c]) * factor


@njit
def pack(x, start, n, buffer, factor):
    """``factor * x[start : start + n]`` as a contiguous matrix of the accumulation dtype, made in `buffer`."""
    tile = view2d(buffer, n, x.shape[1])
    for r in range(n):
        if x.strides[1] == x.itemsize:
            load_row(tile[r], as_contiguous(x[start + r]), factor)
        else:
            load_row(tile[r], x[start + r], factor)
    return tile


def load(x, start, n, buffer):
    """``x[start : start + n]`` as `pack` gives it, but in place where it is so already."""


@overload(load)
def _load(x, start, n, buffer):
    def copied(x, start, n, buffer):
        return pack(x, start, n, buffer, buffer.dtype.type(1))

    def in_place(x, start, n, buffer):
        if x.strides[1] == x.itemsize and x.strides[0] == x.itemsize * x.shape[1]:
            return as_contiguous(x[start : start + n])
        return pack(x, start, n, buffer, buffer.dtype.type(1))

    return in_place if x.dtype == buffer.dtype else copied


@njit(fastmath={"reassoc"})
def all_finite(tile):
    """True if `tile` holds neither NaN nor Inf."""
    zero = tile.dtype.type(0)
    check = zero
    for r in range(tile.shape[0]):
        for c in range(tile.shape[1]):
            check += tile[r, c] * zero
    return check == zero


@njit
def store_row(row, tile_row, factor, add):
    """``row = factor * tile_row``, plus what `row` holds if `add`."""
    for c in range(row.size):
        value = tile_row[c] * factor
        row[c] = numeric.narrow(value + numeric.widen(row[c]) if add else value, row[c])


@njit
def unpack(x, start, tile, factor, add):
    """``x[start : start + len(tile)] = factor * tile``, plus what `x` holds if `add`."""
    for r in range(tile.shape[0]):
        if x.strides[1] == x.itemsize:
            store_row(as_contiguous(x[start + r]), tile[r], factor, add)
        else:
            store_row(x[start + r], tile[r], factor, add)


@njit
def visible_columns(i, j0, n, low, high):
    """Columns ``[first, last)`` of the tile with keys ``[j0, j0 + n)`` that query `i` sees."""
    start, stop = mask.kv_range(i, i + 1, j0 + n, low, high)
    first = min(max(start - j0, 0), n)
    return first, max(stop - j0, first)


@njit
def dot_rows(p, x, out, clean, corner, band):
    """``out = p @ x``. Unless `clean`, x holds NaN or Inf and hidden elements of p, all 0, must be skipped rather than multiplied."""
    if clean:
        np.dot(p, x, out)
        return
    for r in range(p.shape[0]):
        first, last = visible_columns(corner[0] + r, corner[1], p.shape[1], band[0], band[1])
        out[r] = 0
        for c in range(first, last):
            out[r] += p[r, c] * x[c]


@njit
def dot_columns(p, x, out, clean, corner, band):
    """``out = p.T @ x``, with the same care."""
    if clean:
        np.dot(p.T, x, out)
        return
    out[:] = 0
    for r in range(p.shape[0]):
        first, last = visible_columns(corner[0] + r, corner[1], p.shape[1], band[0], band[1])
        for c in range(first, last):
            out[c] += p[r, c] * x[r]


@njit(fastmath={"contract"})
def rescale_add(acc, alpha, x):
    """``acc = alpha * acc + x``, one alpha for each row."""
    for r in range(acc.shape[0]):
        for c in range(acc.shape[1]):
            acc[r, c] = acc[r, c] * alpha[r] + x[r, c]


@njit
def accumulate(acc, x):
    """``acc += x``."""
    for r in range(acc.shape[0]):
        for c in range(acc.shape[1]):
            acc[r, c] += x[r, c]


# ---- softmax ------------------------------------------------------------------------------------------------------------------------


@njit(fastmath={"contract", "reassoc", "nsz"})
def exp2_row(row, shift):
    """``row = exp2(row - shift)``; returns its sum."""
    total = row.dtype.type(0)
    for c in range(row.size):
        p = numeric.exp2(row[c] - shift)
        row[c] = p
        total += p
    return total


@njit
def online_softmax(s, m_i, l_i, alpha, corner, band):
    """One step of the online softmax: s becomes P, m_i and l_i are updated, alpha is the factor for what was accumulated so far."""
    for r in range(s.shape[0]):
        first, last = visible_columns(corner[0] + r, corner[1], s.shape[1], band[0], band[1])
        m_new = max(m_i[r], numeric.row_max(s[r, first:last]))
        shift = s.dtype.type(0) if m_new == MINUS_INF else m_new  # a row whose scores are all -inf gives P = 0, not NaN
        alpha[r] = numeric.exp2(m_i[r] - shift)
        l_i[r] = l_i[r] * alpha[r] + exp2_row(s[r, first:last], shift)
        m_i[r] = m_new
        s[r, :first] = 0
        s[r, last:] = 0


@njit(fastmath={"contract", "nsz"})
def recompute_row(p, dp, shift, delta):
    """``p = exp2(p - shift)``, ``dp = p * (dp - delta)``."""
    for c in range(p.size):
        prob = numeric.exp2(p[c] - shift)
        p[c] = prob
        dp[c] = prob * (dp[c] - delta)


@njit
def recompute_p(s, dp, lse, delta, corner, band):
    """s becomes P = exp2(S - lse), dp becomes dS = P * (dP - delta); hidden elements of both become 0."""
    for r in range(s.shape[0]):
        first, last = visible_columns(corner[0] + r, corner[1], s.shape[1], band[0], band[1])
        shift = s.dtype.type(0) if lse[r] == MINUS_INF else s.dtype.type(lse[r] * s.dtype.type(numeric.LOG2E))
        recompute_row(s[r, first:last], dp[r, first:last], shift, delta[r])
        for hidden in (s[r, :first], s[r, last:], dp[r, :first], dp[r, last:]):
            hidden[:] = 0
