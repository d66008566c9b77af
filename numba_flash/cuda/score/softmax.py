"""Online softmax on fragments (Milakov and Gimelshein, arXiv:1805.02867; FlashAttention-2,
Algorithm 1, lines 9 to 12).

A thread holds two rows of each tile of 16 of its warp; four neighbouring lanes share them. For
each row, over the tiles seen so far,

    m_i    the shift of the exponents: the largest score, or one that it exceeds by at most LAZY in
    base 2, l_i    this lane's part of sum_j 2^(scale_log2 (s_j - m_i)).

A shift that is not quite the maximum changes neither O nor the LSE, only the range of P, which
reaches 2^LAZY instead of 1; and so O has to be rescaled in few tiles only (FlashAttention-4 does
the same). But a P of 1 is exact, and larger ones are rounded. With LAZY = 2 the error on the
outliers of the FlashAttention-3 paper is 2 % larger than with 0, and attention 2 to 3 % faster;
with 8, 9 % larger and 2 to 4 % faster. Measured: docs/lab/any_gpu.md, `LAZY`.

In float16 the shift is lower still, so that P reaches 2^TOP_OF_P: what lies below 2^-24 is lost
when P is rounded, and would not be missing in l. The shift is rounded up, by at most which P then
is smaller: a score of 2^24 leaves the shift units of 2, and P may be no larger than it is.
"""

import math
from typing import Any, NamedTuple

from numba_flash import numeric
from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, f64, inline, once
from numba_flash.cuda.score.fragment import (
    ALL_LANES,
    build_greatest,
    row_maximum,
    row_maximum_float64,
)

LAZY = 2.0
# Where options change scores, of which the largest of a row's tiles differ more.
LAZIER = 4.0
# Where P becomes a float16, it is no more than 2 to the power of this: float16 ends at 2^16.
TOP_OF_P = 15
# P of split float32 is so many powers of two larger.
RAISED_P = TOP_OF_P - int(LAZY)
# In the backward pass, where the largest is 1.
RAISED_BACKWARD = 14
# Products of larger shifts and log2(e) are off by more than an eighth.
FAR = 2.0**20
NEG_INF = -math.inf


def raised(bfloat16, lazy):
    """Powers of two by which P of 16 bits is larger, if scores may exceed the shift by `lazy`."""
    return 0.0 if bfloat16 else TOP_OF_P - lazy


def raised_backward(bfloat16):
    """The same in a backward pass, where P is at most 1, but for how the lse was rounded."""
    return raised(bfloat16, LAZY)


class Arithmetic(NamedTuple):
    """What sums are kept in, and functions of that: the larger of two, 2^x, a row's largest."""

    number: Any
    maximum: Any
    power: Any
    row_maximum: Any


FLOAT32 = Arithmetic(f32, ptx.maximum, ptx.ex2, row_maximum)
FLOAT64 = Arithmetic(f64, max, numeric.exp2, row_maximum_float64)


@once
def build_reset(tiles, shift=NEG_INF):
    """``reset(m_i, l_i)``: rows that have seen nothing, with that shift."""
    ROWS, SHIFT = 2 * tiles, shift

    @inline
    def reset(m_i, l_i):
        for r in range(ROWS):
            m_i[r] = f32(SHIFT)
            l_i[r] = f32(0)

    return reset


reset = build_reset(1)


@inline
def hand_over(m_i, l_i, m_done, l_done):
    """Keep the state of finished rows."""
    for r in range(2):
        m_done[r] = m_i[r]
        l_done[r] = l_i[r]


@once
def build_zero(count):
    """``zero(acc)``, and ``zero_rows(acc, inverse)`` where the row's inverse is 0."""
    COUNT, ZERO = count, f32(0)

    @inline
    def zero(acc):
        for i in range(COUNT):
            acc[i] = ZERO

    @inline
    def zero_rows(acc, inverse):
        for r in range(2):
            if inverse[r] == ZERO:
                for j in range(COUNT // 4):
                    acc[4 * j + 2 * r] = ZERO
                    acc[4 * j + 2 * r + 1] = ZERO

    return zero, zero_rows


@once
def build_online(count, raised=0.0):
    """``online(s, m_i, l_i, alpha, scale_log2)``: raw scores become P; O has to be multiplied by
    alpha where it is not 1. Here m_i are shifts in base 2, lower by `raised`, and begin with the
    least float32.

    Between the largest score and the first exponential nothing is computed that could be known
    before, and nobody asks whether a row has seen something: all warps wait there, and that
    question made the kernel 2 % slower. A shift is lowered by two instructions: one that multiplies
    and adds made it 3 % slower. Measured: docs/lab/any_gpu.md, `build_online`.
    """
    GROUPS, ACC = count // 4, f32
    RAISED, greatest = raised, build_greatest(count)

    @inline
    def online(s, m_i, l_i, alpha, scale_log2):
        for r in range(2):
            before, m_new = m_i[r], greatest(s, r)
            if RAISED > 0:
                m_new = ptx.add_up(ptx.multiply_up(m_new, scale_log2), ACC(-RAISED))
            else:
                m_new *= scale_log2
            shift = m_new if m_new > before + ACC(LAZY) else before
            alpha[r] = ptx.ex2(before - shift)
            m_i[r] = shift
            l = ACC(0)
            for j in range(GROUPS):
                for e in range(4 * j + 2 * r, 4 * j + 2 * r + 2):
                    s[e] = ptx.ex2(s[e] * scale_log2 - shift)
                l += s[4 * j + 2 * r] + s[4 * j + 2 * r + 1]
            l_i[r] = l_i[r] * alpha[r] + l

    return online


class Raise(NamedTuple):
    """Functions that rescale O and l where scores have outgrown the shift of a row:
    ``all(s, acc, m_i, l_i, scale_log2)`` of a warp that has its rows alone, and its halves,
    ``find(best, s, m_i, scale_log2)``, whether a row needs it, with the largest of this lane's
    scores, and ``rescale(best, acc, m_i, l_i, scale_log2)``, with the largest of all.

    Most tiles need it nowhere; what lanes know of their own scores tells.
    """

    all: Any
    find: Any
    rescale: Any


@once
def build_raise(count, outputs, tiles, lazy=LAZY, arithmetic=FLOAT32):
    """The `Raise` for shifts that scores exceed by no more than `lazy`, of `count` scores and
    `outputs` registers of O of each tile.
    """
    ROWS, COUNT, GROUPS, OUTPUTS, MOST = 2 * tiles, count, count // 4, outputs // 4, lazy
    ACC, maximum = arithmetic.number, arithmetic.maximum
    power, highest = arithmetic.power, arithmetic.row_maximum

    @inline
    def find(best, s, m_i, scale_log2):
        needed = False
        for r in range(ROWS):
            e = r // 2 * COUNT + 2 * (r % 2)
            # two chains of maxima, each half as long
            one, other = maximum(s[e], s[e + 1]), maximum(s[4 + e], s[5 + e])
            for j in range(2, GROUPS, 2):
                one = maximum(one, maximum(s[4 * j + e], s[4 * j + e + 1]))
                other = maximum(other, maximum(s[4 * j + 4 + e], s[4 * j + 5 + e]))
            best[r] = maximum(one, other)
            needed = needed or (best[r] - m_i[r]) * scale_log2 > ACC(MOST)
        return needed

    @inline
    def rescale(best, acc, m_i, l_i, scale_log2):
        for r in range(ROWS):
            alpha = ACC(1)
            if (best[r] - m_i[r]) * scale_log2 > ACC(MOST):
                alpha = power((m_i[r] - best[r]) * scale_log2)
                m_i[r] = best[r]
            l_i[r] *= alpha
            for j in range(OUTPUTS):
                e = r // 2 * OUTPUTS * 4 + 4 * j + 2 * (r % 2)
                acc[e] *= alpha
                acc[e + 1] *= alpha

    @inline
    def all_of_them(s, acc, m_i, l_i, scale_log2):
        best = cuda.local.array(ROWS, ACC)  # of each row
        if cuda.any_sync(ALL_LANES, find(best, s, m_i, scale_log2)):
            for r in range(ROWS):
                best[r] = highest(best[r])
            rescale(best, acc, m_i, l_i, scale_log2)

    return Raise(all_of_them, find, rescale)


@once
def build_exponentials(
    count, tiles, far=False, exact=False, raised=0, apart=False, arithmetic=FLOAT32
):
    """``exponentials(s, m_i, l_i, scale_log2)``: scores become P, and are added to l.

    far : scores may lie far from 0, as with a bias that is meant to hide. There, how far they lie
        below the shift is multiplied: of large products the difference is off by powers of two.
    exact : everywhere, since that loses no digits.
    raised : P and l are so many powers of two larger, into the range of float16's normal numbers.
    apart : not by way of the exponent, which takes no instruction, but loses digits.
    """
    ROWS, COUNT, GROUPS, MAY_BE_FAR, EXACT = 2 * tiles, count, count // 4, far, exact
    UP, TIMES = 0.0 if apart else float(raised), 2.0**raised if apart else 1.0
    ACC, exp2 = arithmetic.number, arithmetic.power

    def build_powers(first):
        """All of a thread, by differences that are made `first`, or by those of products."""

        @inline
        def power(x, shift, scale_log2):
            if first:
                x = (x - shift) * scale_log2
                p = exp2(x + ACC(UP) if UP > 0 else x)
            else:
                p = exp2(x * scale_log2 - shift)
            return p * ACC(TIMES) if TIMES > 1 else p

        @inline
        def powers(s, m_i, l_i, scale_log2):
            for r in range(ROWS):
                e = r // 2 * COUNT + 2 * (r % 2)
                # a row that has seen nothing is shifted by 0, so that 2^(-inf - 0) = 0
                shift = m_i[r] if m_i[r] != ACC(NEG_INF) else ACC(0)
                if not first and UP > 0:  # here, one instruction is faster than two
                    shift = ptx.fma_up(shift, scale_log2, ACC(-UP))
                elif not first:
                    shift *= scale_log2
                s[e], s[e + 1] = power(s[e], shift, scale_log2), power(s[e + 1], shift, scale_log2)
                l = s[e] + s[e + 1]
                for j in range(1, GROUPS):
                    s[4 * j + e] = power(s[4 * j + e], shift, scale_log2)
                    s[4 * j + e + 1] = power(s[4 * j + e + 1], shift, scale_log2)
                    l += s[4 * j + e] + s[4 * j + e + 1]
                l_i[r] += l

        return powers

    by_differences, by_products = build_powers(True), build_powers(False)

    @inline
    def exponentials(s, m_i, l_i, scale_log2):
        differ_first = EXACT
        if MAY_BE_FAR and not EXACT:
            for r in range(ROWS):
                differ_first = differ_first or abs(m_i[r]) >= ACC(FAR)
        if differ_first:
            by_differences(s, m_i, l_i, scale_log2)
        else:
            by_products(s, m_i, l_i, scale_log2)

    return exponentials


@once
def build_rescale(count):
    """``rescale(acc, alpha)``: rows of O times alpha, unless it is 1 in the whole warp."""
    GROUPS, ONE = count // 4, f32(1)

    @inline
    def rescale(acc, alpha):
        if cuda.any_sync(ALL_LANES, alpha[0] != ONE or alpha[1] != ONE):
            for j in range(GROUPS):
                acc[4 * j] *= alpha[0]
                acc[4 * j + 1] *= alpha[0]
                acc[4 * j + 2] *= alpha[1]
                acc[4 * j + 3] *= alpha[1]

    return rescale


@once
def build_hide(count, starts, keys=False):
    """``hide_row(s, r, start, stop)``: -inf outside the columns ``[start, stop)`` of row r, or only
    from `stop` on without `starts`.

    Columns count from the thread's first one; with `keys` they are those of
    `numba_flash.cuda.score.fragment.place_of_key`.
    """
    COUNT, GROUPS, STARTS, KEYS, ACC = count, count // 4, starts, keys, f32

    @inline
    def hide_row(s, r, start, stop):
        for j in range(GROUPS):
            for c in range(2):
                e = r // 2 * COUNT + 4 * j + 2 * (r % 2) + c
                column = 32 * (j // 4) + 2 * (j % 4) + c if KEYS else 8 * j + c
                if column >= stop:
                    s[e] = ACC(NEG_INF)
                if STARTS:
                    if column < start:
                        s[e] = ACC(NEG_INF)

    return hide_row
