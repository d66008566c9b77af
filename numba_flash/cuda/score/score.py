"""One score under every option, and its derivative; the same for every tier.

With options, scores stay in base e, and what goes over to base 2 is how far they lie below their
row's maximum (`build_exponential`): times log2(e), a score near the end of the dtype, as of a bias
that is meant to hide, would be Inf.

A hidden score is -inf, and the weight of a hidden or dropped term is -0.0, which no computed weight
is: the products skip it, so that a NaN that a row does not see cannot reach it.
"""

import math
from typing import NamedTuple

from numba_flash.cuda.number import ACCUMULATOR, build_convert, index
from numba_flash.cuda.runtime.lang import device, i32, once, u32

LOG2E, LN2 = math.log2(math.e), math.log(2.0)


class Head(NamedTuple):
    """Which head of the scores.

    Attributes
    ----------
    b0, b1 : int
        Leading indices of the arrays.
    batch : int
        Number of the batch element, or of the packed sequence.
    head, heads : int
        The query head, and how many there are.
    """

    b0: int
    b1: int
    batch: int
    head: int
    heads: int


class Region(NamedTuple):
    """Where a tile of scores lies, and what it may see.

    Attributes
    ----------
    row0, col0 : int
        Its first row and column.
    rows, cols : int
        How many there are in the sequence.
    low, high : int
        The band, for column - row.
    """

    row0: int
    col0: int
    rows: int
    cols: int
    low: int
    high: int


class Capped(NamedTuple):
    """A score under a softcap, and what share of the cap it is."""

    score: float
    unit: float


def hides(options) -> bool:
    """True if single terms may be absent in any tile, not only in those that the band or an end
    cuts.
    """
    return bool(options.score_mod or options.bias or options.mask or options.dropout)


@once
def build_bend(dtype, options, compile=device, capped=False):
    """``bend(raw, i, j, at, parameters)``: the score of query i and key j of the `Head` `at` before
    a bias is added, and its derivative with respect to ``scale * raw``.

    compile : what makes a device function of the user's function.
    capped : it gets scores under a softcap in the place of raw products, and its derivative is that
        with respect to these.
    """
    ACC, CAPPED, MODIFIED = ACCUMULATOR[dtype], bool(options.softcap), options.score_mod is not None
    DIFFERENTIABLE, RAW = MODIFIED and options.score_mod.gradient is not None, not capped
    score_mod = compile(options.score_mod.function) if MODIFIED else None
    score_mod_grad = compile(options.score_mod.gradient) if DIFFERENTIABLE else None

    @compile
    def bend(raw, i, j, at, parameters):
        x, slope = raw, ACC(1)
        if RAW:
            x = raw * ACC(parameters.scale)
        if RAW and CAPPED:
            cap = ACC(parameters.softcap)
            x, unit = _capped(x, cap)
            slope = ACC(1) - unit * unit
        if MODIFIED:
            batch = i32(i32(at.batch) + i32(parameters.first_batch))
            if DIFFERENTIABLE:
                slope *= ACC(score_mod_grad(x, batch, at.head, i, j))
            x = ACC(score_mod(x, batch, at.head, i, j))
        return x, slope

    return bend


@device
def _capped(x, softcap):
    unit = math.tanh(x / softcap)
    return Capped(softcap * unit, unit)


@once
def build_elements(blocks, compile=device):
    """``row_of(i)``, ``column_of(j)``: where in the mask query i and key j are, if it has an
    element for each of its `blocks`; None if it has one for each pair.
    """
    BLOCKED, (QUERIES, KEYS) = blocks is not None, blocks or (1, 1)

    @compile
    def row_of(i):
        if BLOCKED:
            return u32(i) // u32(QUERIES)
        return i

    @compile
    def column_of(j):
        if BLOCKED:
            return u32(j) // u32(KEYS)
        return j

    return row_of, column_of


@once
def build_score(dtype, options):
    """``score(raw, i, j, at, extras, parameters)``: the score of query i and key j of the `Head`
    `at`, and its derivative with respect to ``scale * raw``.
    """  # fmt: skip
    ACC, NEG_INF = ACCUMULATOR[dtype], -math.inf
    BIASED, MASKED = bool(options.bias), options.mask
    load_bias, _ = build_convert(options.bias or "float32")
    bend = build_bend(dtype, options)
    row_of, column_of = build_elements(options.blocks)

    @device
    def score(raw, i, j, at, extras, parameters):
        x, slope = bend(raw, i, j, at, parameters)
        if BIASED:
            bias = extras.bias[index(at.b0), index(at.b1), index(at.head), index(i), index(j)]
            bias = ACC(load_bias(bias))
            x = ACC(NEG_INF) if bias == ACC(NEG_INF) else x + bias
        if MASKED:
            row, column = index(row_of(i)), index(column_of(j))
            visible = extras.mask[index(at.b0), index(at.b1), index(at.head), row, column]
            x = x if visible else ACC(NEG_INF)
        return x, slope

    return score


@once
def build_exponential(dtype, options):
    """``power(x)`` of a difference of scores, and ``log_sum(m, l)``, the lse of a row with maximum
    m and sum l.

    Scores are in base 2, with options in base e.
    """
    ACC, MODIFIED = ACCUMULATOR[dtype], options.modifies

    @device
    def power(x):
        if MODIFIED:
            return math.exp2(x * ACC(LOG2E))
        return math.exp2(x)

    @device
    def log_sum(m, l):
        if MODIFIED:
            return m + math.log2(l) * ACC(LN2)
        return (m + math.log2(l)) * ACC(LN2)

    return power, log_sum


@once
def build_gradient(dtype, options):
    """``gradient(w, dp, delta, slope, parameters)``: dS * slope of a weight w, which is P, -P where
    dropped, and -0.0 where hidden; hidden ones give -0.0.
    """  # fmt: skip
    ACC, DROPOUT = ACCUMULATOR[dtype], bool(options.dropout)

    @device
    def gradient(w, dp, delta, slope, parameters):
        if w == ACC(0) and math.copysign(ACC(1), w) < ACC(0):
            return ACC(-0.0)
        if DROPOUT:
            dp = ACC(0) if w < ACC(0) else dp * ACC(parameters.keep_scale)
            w = abs(w)
        return w * (dp - delta) * slope + ACC(0)  # never -0.0

    return gradient
