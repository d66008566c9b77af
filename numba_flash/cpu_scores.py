"""What the options do to the scores of a tile, for the CPU kernels: bias, mask, softcap, score_mod, dropout.

Kernels get the options as one argument, `extras`. It is an empty tuple for plain attention, for which every function here compiles to
nothing, and else ``(bias, mask, apply, numbers)``: arrays (b0, b1, hq, nq, nk), of size 0 where absent, the compiled score_mod, and
`numbers` ``(softcap, 1 / (1 - dropout), b, modified, seed, offset, threshold, i)``, where b and i count the batch elements and queries
before the first.

A hidden score is -inf. The weight of a hidden or dropped term is -0.0, which no computed weight is: where the other factor may be NaN or
Inf, products skip it. `at` is (b0, b1, h, batch1, heads), `corner` the first query and key of the tile.
"""

import math
from functools import lru_cache

from numba import njit, types
from numba.extending import overload

from numba_flash import numeric, rng
from numba_flash.cpu_cache import cached
from numba_flash.cpu_tiles import MINUS_INF, as_contiguous
from numba_flash.scoremod import jitted


def row_signature(number):
    """Type of a compiled score_mod: ``apply(row, slope, b, h, i, j0)`` changes scores and multiplies their derivatives into slope."""
    return types.void(types.Array(number, 1, "C"), types.Array(number, 1, "C"), *[types.int64] * 4)


@lru_cache(maxsize=256)
def row_function(score_mod, number):
    """Compiled ``apply`` for a `ScoreMod` (None: leaves the row alone), kept on disk under its fingerprint."""
    function = gradient = None
    if score_mod is not None:
        function, gradient = jitted(score_mod.function), score_mod.gradient and jitted(score_mod.gradient)
    modifies, differentiable = function is not None, gradient is not None

    def apply(row, slope, b, h, i, j0):
        if modifies:
            for c in range(row.size):
                if differentiable:
                    slope[c] *= gradient(row[c], b, h, i, j0 + c)
                row[c] = function(row[c], b, h, i, j0 + c)

    dispatcher = cached(njit(nogil=True)(apply), "none" if score_mod is None else score_mod.fingerprint)
    dispatcher.compile(row_signature(number))
    return dispatcher


@njit
def cap_row(row, slope, cap):
    """Softcap: ``row = cap * tanh(row / cap)``, and its derivative."""
    for c in range(row.size):
        unit = math.tanh(row[c] / cap)
        row[c] = cap * unit
        slope[c] = 1 - unit * unit


@njit
def add_row(row, bias):
    """``row += bias``."""
    for c in range(row.size):
        row[c] += numeric.widen(bias[c])


@njit
def hide_row(row, mask_row):
    """``row = -inf`` where the mask is False."""
    for c in range(row.size):
        row[c] = row[c] if mask_row[c] else MINUS_INF


@njit
def modify_row(row, slope, at, i, j0, extras):
    """Scores in base 2 from ``scale * q . k``, for query i and the keys from j0 on; `slope` receives their derivatives."""
    bias, mask_, apply, numbers = extras
    b0, b1, h, batch1, _ = at
    slope[:] = 1
    if numbers[0] > 0:
        cap_row(row, slope, row.dtype.type(numbers[0]))
    if numbers[3]:
        apply(as_contiguous(row), as_contiguous(slope), numbers[2] + b0 * batch1 + b1, h, numbers[7] + i, j0)
    if bias.size > 0:
        add_row(row, bias[b0, b1, h, i, j0 : j0 + row.size])
    if mask_.size > 0:
        hide_row(row, mask_[b0, b1, h, i, j0 : j0 + row.size])
    for c in range(row.size):
        row[c] *= row.dtype.type(numeric.LOG2E)


@njit
def kept(at, i, j, numbers):
    """False if dropout drops the probability of query i and key j."""
    b0, b1, h, batch1, heads = at
    if numbers[6] == 0:
        return True
    return rng.keep((numbers[4], numbers[5], numbers[6]), (numbers[2] + b0 * batch1 + b1) * heads + h, numbers[7] + i, j)


# ---- what kernels call ----------------------------------------------------------------------------------------------------------------


def unit(extras):
    """Unit of the scores that leave the first product: log2(e) in plain attention, 1 where options see them before."""


def keep_scale(extras):
    """Factor of the probabilities that dropout keeps."""


def seen(extras, at, corner, m, n):
    """False if the mask hides the whole tile."""


def may_hide(extras):
    """True if terms may be absent where the band hides nothing."""


def absent(weight, extras):
    """True if a weight belongs to a hidden or dropped term."""


@overload(unit)
def _unit(extras):
    return (lambda extras: numeric.LOG2E) if extras == types.Tuple(()) else (lambda extras: 1.0)


@overload(keep_scale)
def _keep_scale(extras):
    return (lambda extras: 1.0) if extras == types.Tuple(()) else (lambda extras: extras[3][1])


@overload(may_hide)
def _may_hide(extras):
    plain = extras == types.Tuple(())
    return lambda extras: not plain


@overload(absent)
def _absent(weight, extras):
    if extras == types.Tuple(()):
        return lambda weight, extras: False
    return lambda weight, extras: weight == 0 and math.copysign(1.0, weight) < 0


@overload(seen)
def _seen(extras, at, corner, m, n):
    if extras == types.Tuple(()):
        return lambda extras, at, corner, m, n: True

    def seen(extras, at, corner, m, n):
        if extras[1].size == 0:
            return True
        head = extras[1][at[0], at[1], at[2]]
        for i in range(corner[0], corner[0] + m):
            for j in range(corner[1], corner[1] + n):
                if head[i, j]:
                    return True
        return False

    return seen
