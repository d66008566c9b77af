"""Scores of a warp under a softcap, ``softcap * tanh(scale * raw / softcap)``.

Each lane looks at its largest product. While all are small, as most are where a cap is meant for
the few that are large, tanh is a polynomial of the raw products, whose coefficients contain scale
and cap. In 16 bits, larger ones are made in pairs that share an inverse. The rest is computed for
each score by itself.

Under a small cap, with P in bfloat16, the instruction for tanh does; and the forward pass of `sm80`
needs no shift but the cap, which no score exceeds.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, inline, once
from numba_flash.cuda.score.fragment import ALL_LANES

LOG2E = math.log2(math.e)
# tanh(x) / x - 1 as polynomials in x^2, off by less than 2^-23 of tanh(x) / x up to SMALL; of three
# terms by 2^-20.4 up to FEW, which is less than pairs are off by while scores stay below MOST. With
# two terms fewer scores are small enough for the polynomial, and the forward pass is slower.
# Measured: docs/lab/any_gpu.md, `TANH_OF_FEW`.
SMALL, TANH = 0.55, (-0.33332946634, 0.13320724995, -0.05267180973, 0.01643757402)
FEW, TANH_OF_FEW, MOST = 0.5, (-0.33328159, 0.13205353, -0.04475042), 32.0
# A product of two e^2x and what caps bring in stays a number up to LARGE. Pairs are off by 2^-21 of
# the cap, however small a score is; with the greatest cap that is a 16th of what P may lose when it
# is rounded to float16.
LARGE, LEAST_CAP, GREATEST_CAP = 18.0, 2.0**-10, 64.0
# The instruction for tanh is off by up to 2^-11 of it (PTX ISA, tanh.approx), and a score under a
# cap up to this by 2^-9, as much as P is when it is rounded to bfloat16. With a cap of 2, errors of
# o and gradients were the same in two digits, and a pass took a tenth to a third less time than
# with pairs, polynomials or two instructions. Measured: docs/lab/any_gpu.md, `ROUGHEST`.
ROUGHEST = 4.0
# While cap and ``scale / cap`` lie so near 1, coefficients are normal numbers.
NEAR_1, NEAR_1_OF_FEW = 2.0**12, 2.0**15


class CappedScores(NamedTuple):
    """A lane's registers, and numbers of a softcap; the last two are ``scale / softcap`` and ``1 /
    softcap``.
    """

    s: Any
    scale: float
    softcap: float
    share: float
    inverse: float


@inline
def cap_any(x, softcap):
    """Of any x, as exact near 0 as elsewhere. The inverse of a cap is a normal number."""
    inverse = f32(1) / softcap
    square = x * inverse * (x * inverse)
    more = f32(TANH[3])
    more = more * square + f32(TANH[2])
    more = more * square + f32(TANH[1])
    more = more * square + f32(TANH[0])
    if abs(x * inverse) < f32(SMALL):
        return x * (square * more) + x
    return softcap * (f32(1) - f32(2) * ptx.rcp(f32(1) + ptx.ex2(x * inverse * f32(2 * LOG2E))))


@inline
def lies_near_1(x, factor):
    """Up to its sign, no further than by that factor."""
    return f32(1 / factor) <= abs(x) and abs(x) <= f32(factor)


@once
def build_is_rough(bfloat16):
    """``is_rough(softcap)``: under such a cap tanh is the instruction's, if P is `bfloat16`."""
    BFLOAT16 = bfloat16

    @inline
    def is_rough(softcap):
        return BFLOAT16 and f32(LEAST_CAP) <= softcap and softcap <= f32(ROUGHEST)

    return is_rough


@once
def build_tanh(count, bfloat16):
    """``tanh(s, slope, scale_log2)``: tanh of scores, ``slope = 2 log2(e) scale / softcap`` and
    ``scale_log2 = log2(e) softcap``; ``1 - 2 / (1 + e^2x)`` loses nothing that a score needs.
    """
    COUNT, ONE, TWO, is_rough = count, f32(1), f32(2), build_is_rough(bfloat16)

    @inline
    def tanh(s, slope, scale_log2):
        if is_rough(scale_log2 * f32(1 / LOG2E)):
            share = slope * f32(0.5 / LOG2E)
            for i in range(COUNT):
                s[i] = ptx.tanh(s[i] * share)
        else:
            for i in range(COUNT):
                s[i] = ONE - TWO * ptx.rcp(ONE + ptx.ex2(s[i] * slope))

    return tanh


@once
def build_powers(count, tiles):
    """``powers(s, l_i)``: what 2 is raised to becomes P, and is added to l."""
    ROWS, COUNT, GROUPS = 2 * tiles, count, count // 4

    @inline
    def powers(s, l_i):
        for r in range(ROWS):
            l = f32(0)
            for j in range(GROUPS):
                e = r // 2 * COUNT + 4 * j + 2 * (r % 2)
                s[e], s[e + 1] = ptx.ex2(s[e]), ptx.ex2(s[e + 1])
                l += s[e] + s[e + 1]
            l_i[r] += l

    return powers


@once
def build_cap(count, slopes, exact, turing=False, bfloat16=False, powers=False):
    """``cap_all(s, slope, parameters)``: `count` raw products become scores; with `slopes`, their
    derivatives with respect to scaled products go into `slope`.

    exact : also those far below the cap, when others of the lane are large.
    turing : the GPU has no maximum that tells of a NaN.
    bfloat16 : that is what P is rounded to.
    powers : rough scores become what 2 is raised to, with the cap as the shift.
    """
    is_rough, POWERS = build_is_rough(bfloat16), powers
    COUNT, SLOPES, PAIRS, EXACT = count, slopes, not (exact or turing), exact
    TERMS, LIMIT, NEAR = (TANH, SMALL, NEAR_1) if exact else (TANH_OF_FEW, FEW, NEAR_1_OF_FEW)
    DEGREE = len(TERMS)
    maximum = ptx.maximum if turing else ptx.maximum_or_nan

    @inline
    def by_polynomial(t):
        """``raw p(raw^2)`` with ``p(0) = scale``."""
        terms = cuda.local.array(DEGREE, f32)
        factor = t.scale
        for n in range(DEGREE):
            factor *= t.share * t.share
            terms[n] = f32(TERMS[n]) * factor
        for e in range(COUNT):
            square = t.s[e] * t.s[e]
            p = terms[DEGREE - 1]
            for n in range(1, DEGREE):
                p = p * square + terms[DEGREE - 1 - n]
            t.s[e] = t.s[e] * (p * square + t.scale)

    @inline
    def in_pairs(t):
        """``softcap - 2 softcap / (1 + e^2x)``: one inverse of the product of two sums, in units in
        which a sum's own is what the cap is lowered by.
        """
        exponent, unit = t.share * f32(2 * LOG2E), f32(-0.5) * t.inverse
        for e in range(0, COUNT, 2):
            a = ptx.ex2(t.s[e] * exponent) * unit + unit
            b = ptx.ex2(t.s[e + 1] * exponent) * unit + unit
            both = ptx.rcp(a * b)
            t.s[e] = both * b + t.softcap
            t.s[e + 1] = both * a + t.softcap

    @inline
    def one(e, t):
        t.s[e] = cap_any(t.s[e] * t.scale, t.softcap)

    one_by_one = ptx.repeated(COUNT, one)

    @inline
    def roughly(t, slope):
        factor = t.softcap * f32(LOG2E) if POWERS else t.softcap
        for e in range(COUNT):
            unit = ptx.tanh(t.s[e] * t.share)
            t.s[e] = unit * factor - factor if POWERS else unit * factor
            if SLOPES:
                slope[e] = f32(1) - unit * unit

    @inline
    def closely(t, slope):
        s, softcap, inverse = t.s, t.softcap, t.inverse
        largest = f32(0)
        for e in range(COUNT):
            largest = maximum(largest, abs(s[e]))
        largest *= abs(t.share)
        paired = f32(LEAST_CAP) <= softcap and softcap <= f32(GREATEST_CAP)
        near = lies_near_1(softcap, NEAR) and lies_near_1(t.share, NEAR)
        near = near and (EXACT or largest * softcap < f32(MOST))
        if cuda.all_sync(ALL_LANES, near and largest < f32(LIMIT)):
            by_polynomial(t)
        elif PAIRS and cuda.all_sync(ALL_LANES, paired and largest < f32(LARGE)):
            in_pairs(t)
        else:
            one_by_one(t)
        if SLOPES:
            for e in range(COUNT):
                unit = s[e] * inverse
                slope[e] = f32(1) - unit * unit

    @inline
    def cap_all(s, slope, parameters):
        scale, softcap = f32(parameters.scale), f32(parameters.softcap)
        inverse = f32(1) / softcap
        t = CappedScores(s, scale, softcap, scale * inverse, inverse)
        if is_rough(softcap):
            roughly(t, slope)
        else:
            closely(t, slope)

    return cap_all
