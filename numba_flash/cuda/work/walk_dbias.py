"""How a block that sums the gradient of a bias goes from one tile of scores to the next: those that
were made of its tile of the gradient, unless all of one is hidden.
"""

from typing import NamedTuple

from numba_flash import mask
from numba_flash.cuda.arguments import Extent
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import i32, inline, once, u32
from numba_flash.cuda.score.score import Head, Region
from numba_flash.cuda.work import tile_lists
from numba_flash.cuda.work.broadcast import Walk, build_coordinates
from numba_flash.cuda.work.sequence import build_sequence


class Space(NamedTuple):
    """What a block walks over: its own coordinates and how many there are of each, its own head of
    k and how many query heads belong to one; the end of its share of the walk; queries and keys of
    the longest possible sequence, and the band there.
    """

    own: Walk
    sizes: Walk
    kv_head: int
    group: int
    stop: int
    queries: int
    keys: int
    low: int
    high: int


class ScorePlace(NamedTuple):
    """Where a tile of scores lies, its head of k, and whether its sequence is invalid."""

    at: Head
    kv_head: int
    region: Region
    invalid: bool


class Step(NamedTuple):
    """A tile of scores on the way: its number, coordinates, whether a sequence up to there was
    invalid, and whether a map says that nothing in the tile is hidden.
    """

    number: int
    walk: Walk
    invalid: bool
    whole: bool


class BiasItem(NamedTuple):
    """What a block sums: a tile of the gradient, one of the shares of its walk, and the first step,
    which need not have anything visible.
    """

    space: Space
    share: int
    step: Step


@inline
def extent_of(q, k, low, high):
    """The `Extent` of a problem with arrays q and k (b0, b1, heads, n, head_dim)."""
    b0, b1, heads, kv_heads = i32(q.shape[0]), i32(q.shape[1]), i32(q.shape[2]), i32(k.shape[2])
    return Extent(b0, b1, heads, kv_heads, i32(q.shape[3]), i32(k.shape[3]), low, high)


@once
def build_share(summed, block_m, block_n=None):
    """``share_of(number, extent, shares)``: of the item of that number, of a problem of some
    `numba_flash.cuda.arguments.Extent`, the `Space`, which share of the walk it has, and the number
    of its first step; a tile of the gradient has all keys if there is no `block_n`.
    """
    SUM_0, SUM_1, SUM_H, SUM_I, SUM_J = summed
    BLOCK_M, BLOCK_N, ALL_KEYS = block_m, block_n or 1, block_n is None
    owned, _, _ = build_coordinates(summed)

    @inline
    def share_of(number, extent, shares):
        nq, nk, heads = i32(extent.queries), i32(extent.keys), i32(extent.heads)
        row_blocks = i32(u32(i32(nq + (BLOCK_M - 1))) // u32(BLOCK_M))
        column_blocks = i32(u32(i32(nk + (BLOCK_N - 1))) // u32(BLOCK_N))
        if ALL_KEYS:
            column_blocks = i32(1)
        sizes = Walk(i32(extent.b0), i32(extent.b1), heads, row_blocks, column_blocks)
        own, share = owned(number, sizes)
        steps = (sizes.b0 if SUM_0 else 1) * (sizes.b1 if SUM_1 else 1) * (heads if SUM_H else 1)
        steps *= (row_blocks if SUM_I else 1) * (column_blocks if SUM_J else 1)
        start, stop = i32(steps * share // shares), i32(steps * (share + 1) // shares)
        group = i32(u32(heads) // u32(extent.kv_heads))
        kv_head = i32(u32(own.head) // u32(group))
        space = Space(own, sizes, kv_head, group, stop, nq, nk, i32(extent.low), i32(extent.high))
        return space, share, start

    return share_of


@once
def build_begin(summed, block_m, block_n):
    """``begin(number, extent, shares)``: the `BiasItem` of that number, likewise."""
    share_of = build_share(summed, block_m, block_n)
    _, walked, _ = build_coordinates(summed)

    @inline
    def begin(number, extent, shares):
        space, share, start = share_of(number, extent, shares)
        walk = space.own if start >= space.stop else walked(start, space.sizes)
        return BiasItem(space, share, Step(start, walk, False, False))

    return begin


@once
def build_places(options, banded, summed, block_m, block_n, flagged=False):
    """``place_of(walk, space, extras)``: the `ScorePlace` of coordinates; ``find(step, space,
    extras)``: the first `Step` from this one on that has something visible; ``proceed(step, space,
    extras)``: the first after it. All have, unless there are lengths or a mask, or the problem is
    `banded`.

    flagged : heads whose ``extras.flags`` are not 0 are left out.
    """
    BLOCK_M, BLOCK_N, SUM_H, MASKED = block_m, block_n, summed[2], options.tiled
    FLAGGED = flagged
    HIDES = banded or options.sequences or options.tiled or flagged
    _, _, following = build_coordinates(summed)
    sequence_of = build_sequence(options)

    @inline
    def place_of(walk, space, extras):
        own, sizes = space.own, space.sizes
        b0, b1 = i32(own.b0 + walk.b0), i32(own.b1 + walk.b1)
        row0, col0 = i32((own.i + walk.i) * BLOCK_M), i32((own.j + walk.j) * BLOCK_N)
        sequence = sequence_of(extras, b0, b1, space.queries, space.keys)
        queries, keys, shift = i32(sequence.queries), i32(sequence.keys), i32(sequence.shift)
        at = Head(b0, b1, i32(b0 * sizes.b1 + b1), i32(own.head + walk.head), sizes.head)
        low, high = i32(space.low + shift), i32(space.high + shift)
        kv_head = i32(u32(at.head) // u32(space.group)) if SUM_H else space.kv_head
        region = Region(row0, col0, queries, keys, low, high)
        return ScorePlace(at, kv_head, region, sequence.invalid)

    @inline
    def find(step, space, extras):
        number, walk, hidden = step.number, step.walk, HIDES
        invalid, whole = step.invalid, step.whole
        while number < space.stop and hidden:
            place = place_of(walk, space, extras)
            r = place.region
            last = min(i32(r.row0 + BLOCK_M), r.rows)
            start, stop = mask.kv_range(r.row0, last, r.cols, r.low, r.high)
            hidden = r.row0 >= r.rows or r.col0 >= stop or i32(r.col0 + BLOCK_N) <= start
            invalid = invalid or place.invalid
            if FLAGGED:
                at = place.at
                hidden = hidden or extras.flags[index(at.b0), index(at.b1), index(at.head)] != 0
            if MASKED and not hidden:
                at, block = place.at, i32(u32(r.row0) // u32(BLOCK_M))
                bits = extras.bits[index(at.b0), index(at.b1), index(at.head), index(block)]
                hidden, whole = tile_lists.look(bits, i32(u32(r.col0) // u32(BLOCK_N)))
            if hidden:
                number, walk = i32(number + 1), following(walk, space.sizes)
        return Step(number, walk, invalid, whole)

    @inline
    def proceed(step, space, extras):
        number, walk = i32(step.number + 1), following(step.walk, space.sizes)
        return find(Step(number, walk, step.invalid, False), space, extras)

    return place_of, find, proceed
