"""Which tiles of queries a block of keys goes through, and which blocks add to their dQ before it.
Under a mask it goes through a list of tiles for each head of its group, the last tile first
(`numba_flash.cuda.work.tile_lists`).
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import i32, inline, once, u32, u64
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import BACKWARD_SCORES_B1, BackwardWork, one_type, words
from numba_flash.cuda.sm90.backward.backward_tiles import NOTE_BYTES
from numba_flash.cuda.work import tile_lists
from numba_flash.cuda.work.tile_lists import Entry

WORD = words(BackwardWork)


def claims(banded, ordered, options, tile) -> bool:
    """Whether blocks claim work items, one after the other, and do not share them out beforehand:
    if one may wait for another, or they differ in length, and sums are in memory.
    """
    return ordered or options.block_sparse or (banded and tile.adds_dq)


def goes_together(options, tile) -> bool:
    """Whether a block goes through the tiles of queries once, each of all heads of its group, and
    not through one head after the other: where dQ is added up, and no head has a list of its own.

    Blocks that begin together then stay together, and find what others read in the L2 cache. Under
    a diagonal, some would be done with a head before others, and with the next one, too.
    """
    return tile.adds_dq and not options.tiled


@once
def build_tile_at(upward):
    """``tile_at(first, t)``: number of the t-th tile of queries of a work item that goes upward,
    beginning with `first`, or, if that is negative, downward, beginning with its complement. None
    does the former if not `upward`.
    """
    UPWARD = upward

    @inline
    def tile_at(first, t):
        at = i32(first + t)
        return at if UPWARD and first >= i32(0) else i32(~at)

    return tile_at


@inline
def goes_upward(number, block, sizes):
    """Whether a work item, of this block of keys, goes through its tiles of queries upward."""
    if sizes.serpentine > 0:
        return i32(block // i32(sizes.serpentine)) % i32(2) == i32(1)
    return number < sizes.upward


@inline
def blocks_before(row0, high, number, block_m, block_n):
    """How many blocks of keys before that from key row0 on add to a row block of that number: those
    from the first that it sees on.
    """
    return i32(row0 // block_n - max(number * block_m - high, 0) // block_n)


@inline
def blocks_after(row0, low, number, queries, keys, block_m, block_n):
    """How many blocks of keys after that from key row0 on add to a row block of that number: those
    up to the last that it sees.
    """
    last = min(min((number + 1) * block_m, queries) - low, keys) - 1
    return i32(last // block_n - row0 // block_n)


def build_note_tile(layout):
    """``note_tile(smem, n, note)``: write down what is noted about the n-th tile of queries, once
    its slot is free.
    """
    Q, NOTES = one_type(layout.q), layout.notes

    @inline
    def note_tile(smem, n, note):
        pipeline.wait_free(smem, Q, n)
        to = u32(smem + u32(NOTES) + n % u32(Q.slots) * u32(NOTE_BYTES))
        for word in range(len(note)):
            ptx.store_shared(u32(to + u32(4 * word)), i32(note[word]))

    return note_tile


class Listing(NamedTuple):
    """Tiles of a head: the address of a list, and how many there are; no address if none of the
    heads has a tile, and one tile of each stands for that.
    """

    seen: int
    count: int


class WalkFunctions(NamedTuple):
    """Functions; see `build_walk`."""

    together: Any
    listing_of: Any
    block_sparse: Any
    order_of: Any
    last_slot: Any


def lists_of(options, ordered, tile) -> tuple[str, ...]:
    """What the kernels of a backward pass want of a mask."""
    if ordered:
        return ("tiles", "order")
    if tile.in_slots:
        return ("tiles", "queue", "places")
    return ("tiles", "queue") if options.block_sparse else ("tiles",)


@once
def build_walk(block_n, work, share=1):
    """`WalkFunctions`:

    ``together(item, extras, sizes)``: how many tiles all heads of an `Item` of
        `numba_flash.cuda.work.schedule` have.
    ``listing_of(smem, item_n, head, extras)``: the `Listing` of a head of the block's work item
    `item_n`. ``listed(listing, t)``: its t-th `Entry` tile. ``order_of(smem, item_n, head, at,
    extras)``: what the lists say of who adds to dQ of a tile
        before.
    ``last_slot(smem, item_n, head, listing, extras, sizes)``: which part of a slot the tile number
    0
        has, the last of the list; the t-th has one so many before. Negative if there is none.

    share : tiles of an entry of a list, the last one first.
    """
    BLOCK_N, WORK, SHARE = block_n, one_type(work), share
    list_of, in_list = tile_lists.build_access(True)

    @inline
    def together(item, extras, sizes):
        first, total = i32(item.head * i32(sizes.group)), i32(0)
        if item.columns != 0:
            for g in range(i32(sizes.group)):
                block = i32(item.row0 // BLOCK_N)
                seen = list_of(extras, item.b0, item.b1, i32(first + g), block)
                total = i32(total + tile_lists.length(seen))
        return i32(total * SHARE)

    @inline
    def listing_of(smem, item_n, head, extras):
        b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
        b1 = pipeline.read(smem, WORK, item_n, BACKWARD_SCORES_B1)
        block = i32(pipeline.read(smem, WORK, item_n, WORD.row0) // BLOCK_N)
        seen, count = u64(0), i32(1)
        if pipeline.read(smem, WORK, item_n, WORD.queries) != 0:
            seen = list_of(extras, b0, b1, head, block)
            count = i32(tile_lists.length(seen) * SHARE)
        return Listing(seen, count)

    @inline
    def listed(listing, t):
        if listing.seen == u64(0):
            return Entry(i32(0), False)
        number = i32(listing.count - 1 - t)
        if SHARE == 1:
            return in_list(listing.seen, number)
        entry = in_list(listing.seen, i32(number // SHARE))
        return Entry(i32(entry.at * SHARE + number % SHARE), entry.whole)

    @inline
    def order_of(smem, item_n, head, at, extras):
        b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
        b1 = pipeline.read(smem, WORK, item_n, BACKWARD_SCORES_B1)
        block = i32(pipeline.read(smem, WORK, item_n, WORD.row0) // BLOCK_N)
        return extras.order[index(b0), index(b1), index(head), index(block), index(at)]

    @inline
    def last_slot(smem, item_n, head, listing, extras, sizes):
        if listing.seen == u64(0):
            return i32(-1)
        b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
        b1 = pipeline.read(smem, WORK, item_n, BACKWARD_SCORES_B1)
        block = i32(pipeline.read(smem, WORK, item_n, WORD.row0) // BLOCK_N)
        place = i32(extras.places[index(b0), index(b1), index(head), 0, index(block)])
        first = i32(place - i32(sizes.first_block) * i32(sizes.blocks))
        return i32(first * SHARE + listing.count - 1)

    return WalkFunctions(together, listing_of, listed, order_of, last_slot)
