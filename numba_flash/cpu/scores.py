"""What the options do to the scores of a tile, for the CPU kernels: bias, mask, softcap, score_mod, dropout.

Kernels get the options as one argument, `extras`: `numba_flash.cpu.arguments.Extras`, or an empty tuple for plain attention, for which what
they call here compiles to nothing.

Where there are options, scores stay in base e (`unit`), and what goes over to base 2 is how far they lie below their row's maximum: times
log2(e), a score near the end of the dtype, as of a bias that is meant to hide, would be Inf.

A hidden score is -inf. The weight of a hidden or dropped term is -0.0, which no computed weight is: where the other factor may be NaN or
Inf, products skip it.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

from numba_flash import numeric, rng
from numba_flash.arguments.options import SHARING
from numba_flash.cpu.arguments import Region, is_plain
from numba_flash.cpu.tiles import MINUS_INF, as_contiguous


class Blocks(NamedTuple):
    """The least box around what a mask leaves of a region: queries ``[i0, i1)``, keys ``[j0, j1)``; i0 >= i1 if that is nothing."""

    i0: int
    i1: int
    j0: int
    j1: int


@intrinsic
def call_row_function(typingctx, address, row, slope, b, h, i, j0):
    """Call the function at `address` with the other arguments, by Numba's calling convention."""

    def codegen(context, builder, signature, args):
        convention, types_ = context.call_conv, signature.args[1:]
        pointer = builder.inttoptr(args[0], convention.get_function_type(types.none, types_).as_pointer())
        status, _ = convention.call_function(builder, pointer, types.none, types_, args[1:])
        with builder.if_then(status.is_error, likely=False):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.none(address, row, slope, b, h, i, j0), codegen


@njit
def cap_row(row, slope, cap):
    """Softcap: ``row = cap * tanh(row / cap)``, and its derivative."""
    for c in range(row.size):
        unit = numeric.tanh(row[c] / cap)
        row[c] = cap * unit
        slope[c] = 1 - unit * unit


@njit
def add_row(row, bias):
    """``row += bias``; -inf hides whatever the row holds."""
    for c in range(row.size):
        b = numeric.widen(bias[c])
        row[c] = MINUS_INF if b == MINUS_INF else row[c] + b


@njit
def hide_row(row, mask_row):
    """``row = -inf`` where the mask is False."""
    for c in range(row.size):
        row[c] = row[c] if mask_row[c] else MINUS_INF


@njit
def hide_blocks(row, mask_row, j0, keys):
    """``row = -inf`` of the keys from `j0` on whose block, of so many `keys`, is False."""
    for block in range(j0 // keys, (j0 + row.size - 1) // keys + 1):
        if not mask_row[block]:
            row[max(block * keys - j0, 0) : min((block + 1) * keys - j0, row.size)] = MINUS_INF


@njit
def blocks_seen(region, at, extras):
    """The `Blocks` of the `arguments.Region` that the mask leaves something of."""
    p, head = extras.parameters, extras.mask[at.b0, at.b1, at.head]
    i0, i1 = p.query0 + region.i0, p.query0 + region.i0 + region.m
    j0, j1 = region.j0, region.j0 + region.n
    found = Blocks(i1, i0, j1, j0)
    for row in range(i0 // p.mask_queries, (i1 - 1) // p.mask_queries + 1):
        for column in range(j0 // p.mask_keys, (j1 - 1) // p.mask_keys + 1):
            if head[row, column]:
                found = Blocks(
                    min(found.i0, max(row * p.mask_queries, i0)),
                    max(found.i1, min((row + 1) * p.mask_queries, i1)),
                    min(found.j0, max(column * p.mask_keys, j0)),
                    max(found.j1, min((column + 1) * p.mask_keys, j1)),
                )
    return Blocks(found.i0 - p.query0, found.i1 - p.query0, found.j0, found.j1)


@njit
def modify_row(row, slope, span, extras):
    """Scores from ``scale * q . k``, those of the `arguments.Span`; `slope` receives their derivatives."""
    at = span.at
    parameters = extras.parameters
    slope[:] = 1
    if parameters.softcap > 0:
        cap_row(row, slope, row.dtype.type(parameters.softcap))
    if parameters.score_mod != 0:
        b = parameters.batch0 + at.batch
        i = parameters.query0 + span.i
        call_row_function(parameters.score_mod, as_contiguous(row), as_contiguous(slope), b, at.head, i, span.j0)
    if extras.bias.size > 0:
        add_row(row, extras.bias[at.b0, at.b1, at.head, span.i, span.j0 : span.j0 + row.size])
    if extras.mask.size > 0:
        mask_row = extras.mask[at.b0, at.b1, at.head, (parameters.query0 + span.i) // parameters.mask_queries]
        if parameters.mask_keys == 1:
            hide_row(row, mask_row[span.j0 : span.j0 + row.size])
        else:
            hide_blocks(row, mask_row, span.j0, parameters.mask_keys)


@njit
def drop_row(row, factor, span, parameters):
    """``row = factor * row`` where dropout keeps the probabilities of the `arguments.Span`, -0.0 where it drops them."""
    at = span.at
    head = np.uint64((parameters.batch0 + at.batch) * at.heads + at.head)
    i = np.uint64(parameters.first_query + parameters.query0 + span.i)
    first = parameters.first_key // SHARING
    for eight in range(span.j0 // SHARING, (span.j0 + row.size + SHARING - 1) // SHARING):  # keys that share a counter (`rng.bits`)
        words = rng.words_of(parameters.seed, parameters.offset, head, i, first + eight)
        for lane in range(SHARING):
            c = SHARING * eight + lane - span.j0
            if 0 <= c < row.size:
                row[c] = row[c] * factor if rng.bits_of(words, lane) >= parameters.threshold else -0.0


@njit
def is_negative_zero(weight):
    """True for the weight of a hidden or dropped term."""
    return weight == 0 and math.copysign(1.0, weight) < 0


# ---- what kernels call ----------------------------------------------------------------------------------------------------------------


def unit(extras):
    """Unit of the scores: log2(e) in plain attention, whose scores leave the first product in base 2; 1 where options see them."""


def keep_scale(extras):
    """Factor of the probabilities that dropout keeps."""


def seen(region, at, extras):
    """False if the mask hides the whole `arguments.Region` of the `arguments.Head` `at`."""


def narrow(region, at, extras, rows):
    """The `Region` without the hidden blocks at its first and last keys, or, of its `rows`, queries; without any if all is hidden."""


def may_hide(extras):
    """True if terms may be absent where the band hides nothing."""


def absent(weight, extras):
    """True if a weight belongs to a hidden or dropped term."""


@overload(unit)
def _unit(extras):
    return (lambda extras: numeric.LOG2E) if is_plain(extras) else (lambda extras: 1.0)


@overload(keep_scale)
def _keep_scale(extras):
    return (lambda extras: 1.0) if is_plain(extras) else (lambda extras: extras.parameters.keep_scale)


@overload(may_hide)
def _may_hide(extras):
    plain = is_plain(extras)
    return lambda extras: not plain


@overload(absent)
def _absent(weight, extras):
    if is_plain(extras):
        return lambda weight, extras: False
    return lambda weight, extras: is_negative_zero(weight)


@overload(seen)
def _seen(region, at, extras):
    if is_plain(extras):
        return lambda region, at, extras: True

    def seen(region, at, extras):
        if extras.mask.size == 0:
            return True
        p, head = extras.parameters, extras.mask[at.b0, at.b1, at.head]
        i0, j0 = p.query0 + region.i0, region.j0
        for row in range(i0 // p.mask_queries, (i0 + region.m - 1) // p.mask_queries + 1):
            for column in range(j0 // p.mask_keys, (j0 + region.n - 1) // p.mask_keys + 1):
                if head[row, column]:
                    return True
        return False

    return seen


@overload(narrow)
def _narrow(region, at, extras, rows):
    if is_plain(extras):
        return lambda region, at, extras, rows: region

    def narrow(region, at, extras, rows):
        p = extras.parameters
        if extras.mask.size == 0:
            return region
        if p.mask_queries * p.mask_keys == 1:  # whole tiles: their ends may be hidden from each other
            if seen(region, at, extras):
                return region
            return Region(region.i0, region.j0, 0, 0, region.low, region.high)
        found = blocks_seen(region, at, extras)
        if rows:
            return Region(found.i0, region.j0, found.i1 - found.i0, region.n, region.low, region.high)
        return Region(region.i0, found.j0, region.m, found.j1 - found.j0, region.low, region.high)

    return narrow
