"""Which tiles of queries a block of keys goes through under a mask: for each head of its group
those of a list (`numba_flash.cuda.tile_lists`), the last one first.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import tile_lists
from numba_flash.cuda.lang import i32, inline, once, u64
from numba_flash.cuda.number import index
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import (
    BACKWARD_SCORES_B1,
    BackwardWork,
    one_type,
    words,
)
from numba_flash.cuda.tile_lists import Listed

WORD = words(BackwardWork)


class Listing(NamedTuple):
    """Tiles of a head: the address of a list, and how many there are; no address if none of the
    heads has a tile, and one tile of each stands for that.
    """

    seen: int
    count: int


class Walk(NamedTuple):
    """Functions; see `build_walk`."""

    together: Any
    listing_of: Any
    listed: Any
    order_of: Any


def lists_of(options, ordered) -> tuple[str, ...]:
    """What the kernels of a backward pass want of a mask."""
    if ordered:
        return ("tiles", "order")
    return ("tiles", "queue") if options.listed else ("tiles",)


@once
def build_walk(block_n, work):
    """`Walk`:

    ``together(item, extras, sizes)``: how many tiles all heads of an `Item` of
        `numba_flash.cuda.schedule` have.
    ``listing_of(smem, turn, head, extras)``: the `Listing` of a head of the work item of a turn.
    ``listed(listing, t)``: its t-th `Listed` tile.
    ``order_of(smem, turn, head, at, extras)``: what the lists say of who adds to dQ of a tile
        before.
    """
    BLOCK_N, WORK = block_n, one_type(work)
    list_of, in_list = tile_lists.build_access(True)

    @inline
    def together(item, extras, sizes):
        first, total = i32(item.head * i32(sizes.group)), i32(0)
        if item.columns != 0:
            for g in range(i32(sizes.group)):
                block = i32(item.row0 // BLOCK_N)
                seen = list_of(extras, item.b0, item.b1, i32(first + g), block)
                total = i32(total + tile_lists.length(seen))
        return total

    @inline
    def listing_of(smem, turn, head, extras):
        b0 = pipeline.read(smem, WORK, turn, WORD.b0)
        b1 = pipeline.read(smem, WORK, turn, BACKWARD_SCORES_B1)
        block = i32(pipeline.read(smem, WORK, turn, WORD.row0) // BLOCK_N)
        seen, count = u64(0), i32(1)
        if pipeline.read(smem, WORK, turn, WORD.queries) != 0:
            seen = list_of(extras, b0, b1, head, block)
            count = tile_lists.length(seen)
        return Listing(seen, count)

    @inline
    def listed(listing, t):
        if listing.seen == u64(0):
            return Listed(i32(0), False)
        return in_list(listing.seen, i32(listing.count - 1 - t))

    @inline
    def order_of(smem, turn, head, at, extras):
        b0 = pipeline.read(smem, WORK, turn, WORD.b0)
        b1 = pipeline.read(smem, WORK, turn, BACKWARD_SCORES_B1)
        block = i32(pipeline.read(smem, WORK, turn, WORD.row0) // BLOCK_N)
        return extras.order[index(b0), index(b1), index(head), index(block), index(at)]

    return Walk(together, listing_of, listed, order_of)
