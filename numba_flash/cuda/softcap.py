"""Scores of a warp under a softcap, ``softcap * tanh(scale * raw / softcap)``.

Each lane looks at its largest product. While all are small, as most are where a cap is meant for
the few that are large, tanh is a polynomial of the raw products, whose coefficients contain scale
and cap. In 16 bits, larger ones are made in pairs that share an inverse, and up to a share of the cap
every other pair is a polynomial, too: exponentials and products have pipes of their own, and each
would keep the other one waiting. The rest is computed for each score by itself.

What is no larger than a cap needs no other shift of its exponent, if both ends of the range are
numbers: then capped scores come out as what 2 is raised to, `build_range`.
"""

import math
import os
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.fragment import ALL_LANES
from numba_flash.cuda.lang import cuda, f32, inline, once

LOG2E = math.log2(math.e)
# tanh(x) / x - 1 as polynomials in x^2, off by less than 2^-23 of tanh(x) / x up to SMALL; of three
# terms by 2^-20.4 up to FEW, which is less than pairs are off by while scores stay below MOST. Time
# over that without a cap, D = 64, N = 4096, a cap of 20, `sm80` on an H200: forward 1.32, with two
# terms, of smaller scores, 1.50; backward 1.30, 1.32.
SMALL, TANH = 0.55, (-0.33332946634, 0.13320724995, -0.05267180973, 0.01643757402)
FEW, TANH_OF_FEW, MOST = 0.5, (-0.33328159, 0.13205353, -0.04475042), 32.0
# A product of two e^2x and what caps bring in stays a number up to LARGE. Pairs are off by 2^-21 of
# the cap, however small a score is; with the greatest cap that is a 16th of what P may lose when it
# is rounded to float16.
LARGE, LEAST_CAP, GREATEST_CAP = 18.0, 2.0**-10, 64.0
# tanh(x) as x q(x^2), by whether P is rounded to bfloat16, up to REACH of the cap, for caps up to
# CAPS: what scores are off by, 2^-13.1 or 2^-15.9 at most, is a 16th of what P may lose when it is
# rounded. In pairs alone, with one more pass for the row's largest, a cap of 2 took 1.56 of the time
# without one forward and 1.41 backward (`sm80`, D = 64, N = 4096, H200), all of the difference 12
# cycles of exponentials for 32 scores; predicted from 7 cycles of each pipe: 1.30, 1.30. Not timed.
REACH, CAPS = (2.0, 1.5), {True: (3.5, 48.0), False: (2.0, 32.0)}
Q = {
    True: (
        (0.999729106, -0.330361194, 0.123653308, -0.0392110688, 0.00888305294, -0.00119958791, 7.05854687e-05),
        (0.999978038, -0.332930095, 0.131160742, -0.0486326957, 0.0146826764, -0.00293629709, 0.000273799877),
    ),
    False: (
        (0.999928089, -0.332337967, 0.129241756, -0.0461031809, 0.0132144979, -0.00264976941, 0.0003168823, -1.66826398e-05),
        (0.999996025, -0.333240613, 0.132696275, -0.0519587695, 0.0183639817, -0.00511101665, 0.000926401891, -7.81825661e-05),
    ),
}  # fmt: skip
# Caps up to which e^(-2 cap) is a normal number beside TOP, in base 2, as P is rounded.
BOUNDED, TOP = {True: 32.0, False: 9.7}, {True: 0.0, False: 14.0}
# While cap and ``scale / cap`` lie so near 1, coefficients are normal numbers.
NEAR_1, NEAR_1_OF_FEW = 2.0**12, 2.0**15


class Scores(NamedTuple):
    """A lane's registers, and numbers of a softcap: ``scale / softcap``, ``1 / softcap``; what capped
    scores are multiplied by, its inverse, and what is subtracted then.
    """

    s: Any
    scale: float
    softcap: float
    share: float
    inverse: float
    factor: float
    undo: float
    shift: float


class Range(NamedTuple):
    """Of capped scores: whether no larger shift is needed than the cap's; what they are multiplied by
    then, its inverse, and that shift.
    """

    bounded: bool
    factor: float
    undo: float
    shift: float


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


@once
def build_range(bfloat16):
    """``range_of(softcap)``: the `Range` of scores under it."""
    MOST, HIGHEST = BOUNDED[bfloat16], TOP[bfloat16]

    @inline
    def range_of(softcap):
        bounded = softcap <= f32(MOST)
        factor, undo = f32(LOG2E if bounded else 1), f32(1 / LOG2E if bounded else 1)
        return Range(bounded, factor, undo, softcap * f32(LOG2E) - f32(HIGHEST) if bounded else f32(0))

    return range_of


@inline
def lies_near_1(x, factor):
    """Up to its sign, no further than by that factor."""
    return f32(1 / factor) <= abs(x) and abs(x) <= f32(factor)


@once
def build_cap(count, slopes, exact, turing=False, bfloat16=False, powers=False):
    """``cap_all(s, slope, parameters)``: `count` raw products become scores; with `slopes`, their
    derivatives with respect to scaled products go into `slope`.

    exact : also those far below the cap, when others of the lane are large.
    turing : the GPU has no maximum that tells of a NaN.
    bfloat16 : P is rounded to that, else to float16.
    powers : scores become what 2 is raised to where their range is bounded.
    """
    POWERS, range_of = powers, build_range(bfloat16)
    VARIANT = int(os.environ.get("SOFTCAP_VARIANT", 0))
    SOME = (0.998995001, -0.324855441, 0.112091283, -0.0289337507, 0.0044785007, -0.000298658879)
    (FAR, FARTHER), (WIDEST, WIDER) = REACH, CAPS[bfloat16]
    Q_FAR, Q_FARTHER = Q[bfloat16]
    OF_Q = len(Q_FAR)
    COUNT, SLOPES, PAIRS, EXACT = count, slopes, not (exact or turing), exact
    TERMS, LIMIT, NEAR = (TANH, SMALL, NEAR_1) if exact else (TANH_OF_FEW, FEW, NEAR_1_OF_FEW)
    DEGREE = len(TERMS)
    maximum = ptx.maximum if turing else ptx.maximum_or_nan

    @inline
    def by_polynomial(t):
        """``raw p(raw^2)`` with ``p(0) = scale``."""
        terms = cuda.local.array(DEGREE, f32)
        first = t.scale * t.factor
        factor = first
        for n in range(DEGREE):
            factor *= t.share * t.share
            terms[n] = f32(TERMS[n]) * factor
        for e in range(COUNT):
            square = t.s[e] * t.s[e]
            p = terms[DEGREE - 1]
            for n in range(1, DEGREE):
                p = p * square + terms[DEGREE - 1 - n]
            t.s[e] = t.s[e] * (p * square + first) - t.shift

    @inline
    def pair(t, e, exponent, unit, top):
        """``softcap - 2 softcap / (1 + e^2x)`` of two registers: one inverse of the product of two
        sums, in units in which a sum's own is what the cap is lowered by.
        """
        a = ptx.ex2(t.s[e] * exponent) * unit + unit
        b = ptx.ex2(t.s[e + 1] * exponent) * unit + unit
        both = ptx.rcp(a * b)
        t.s[e] = both * b + top
        t.s[e + 1] = both * a + top

    @inline
    def in_pairs(t):
        exponent, unit = t.share * f32(2 * LOG2E), f32(-0.5) * t.inverse * t.undo
        top = t.softcap * t.factor - t.shift
        for e in range(0, COUNT, 2):
            pair(t, e, exponent, unit, top)

    @inline
    def mixed(t):
        """Every other pair by a polynomial of its share of the cap."""
        exponent, unit = t.share * f32(2 * LOG2E), f32(-0.5) * t.inverse * t.undo
        top = t.softcap * t.factor - t.shift
        terms = cuda.local.array(OF_Q, f32)
        for n in range(OF_Q):
            q = f32(Q_FAR[n]) if t.softcap <= f32(WIDEST) else f32(Q_FARTHER[n])
            terms[n] = q * t.softcap * t.factor
        for e in range(0, COUNT, 4):
            pair(t, e, exponent, unit, top)
            for c in range(2, 4):
                x = t.s[e + c] * t.share
                p = terms[OF_Q - 1]
                for n in range(1, OF_Q):
                    p = p * (x * x) + terms[OF_Q - 1 - n]
                t.s[e + c] = x * p - t.shift

    @inline
    def by_tanh(t, step):
        cap = t.softcap * t.factor
        for e in range(0, COUNT, step):
            for c in range(2):
                t.s[e + c] = ptx.tanh(t.s[e + c] * t.share) * cap - t.shift

    @inline
    def half(t):
        terms = cuda.local.array(6, f32)
        for n in range(6):
            terms[n] = f32(SOME[n]) * t.softcap * t.factor
        cap = t.softcap * t.factor
        for e in range(0, COUNT, 4):
            for c in range(2):
                t.s[e + c] = ptx.tanh(t.s[e + c] * t.share) * cap - t.shift
            for c in range(2, 4):
                x = t.s[e + c] * t.share
                p = terms[5]
                for n in range(1, 6):
                    p = p * (x * x) + terms[5 - n]
                t.s[e + c] = x * p - t.shift

    @inline
    def one(e, t):
        t.s[e] = cap_any(t.s[e] * t.scale, t.softcap) * t.factor - t.shift

    one_by_one = ptx.repeated(COUNT, one)

    @inline
    def cap_all(s, slope, parameters):
        scale, softcap = f32(parameters.scale), f32(parameters.softcap)
        inverse = f32(1) / softcap
        factor, undo, shift = f32(1), f32(1), f32(0)
        if POWERS:
            _, factor, undo, shift = range_of(softcap)
        t = Scores(s, scale, softcap, scale * inverse, inverse, factor, undo, shift)
        if VARIANT == 1 or VARIANT == 2:
            if VARIANT == 2:
                of_others = f32(0)
                for e in range(0, COUNT, 4):
                    of_others = maximum(maximum(of_others, abs(s[e + 2])), abs(s[e + 3]))
                if cuda.all_sync(ALL_LANES, of_others * abs(t.share) < f32(2)):
                    half(t)
                else:
                    by_tanh(t, 2)
            elif SLOPES:
                for e in range(COUNT):
                    unit = ptx.tanh(s[e] * t.share)
                    s[e] = unit * softcap
                    slope[e] = f32(1) - unit * unit
            else:
                by_tanh(t, 2)
            return
        largest, of_others = f32(0), f32(0)  # of every other pair, and of the pairs between
        for e in range(0, COUNT, 4):
            largest = maximum(maximum(largest, abs(s[e])), abs(s[e + 1]))
            of_others = maximum(maximum(of_others, abs(s[e + 2])), abs(s[e + 3]))
        largest *= abs(t.share)
        of_others *= abs(t.share)
        near_enough = softcap <= f32(WIDER)
        near_enough = near_enough and of_others < f32(FAR if softcap <= f32(WIDEST) else FARTHER)
        largest_of_some = largest
        largest = maximum(largest, of_others)
        paired = f32(LEAST_CAP) <= softcap and softcap <= f32(GREATEST_CAP)
        near = lies_near_1(softcap, NEAR) and lies_near_1(t.share, NEAR)
        near = near and (EXACT or largest * softcap < f32(MOST))
        if cuda.all_sync(ALL_LANES, near and largest < f32(LIMIT)):
            by_polynomial(t)
        elif PAIRS and cuda.all_sync(
            ALL_LANES, paired and near_enough and largest_of_some < f32(LARGE)
        ):
            mixed(t)
        elif PAIRS and cuda.all_sync(ALL_LANES, paired and largest < f32(LARGE)):
            in_pairs(t)
        else:
            one_by_one(t)
        if SLOPES:
            for e in range(COUNT):
                unit = s[e] * inverse
                slope[e] = f32(1) - unit * unit

    return cap_all
