"""The threads of the backward pass that add up dQ in memory, in turns.

Blocks of keys add to a tile of dQ in the order in which they are handed out, which is that of their
keys, or the other way round, or both by turns. A flag for each tile counts who was there.
"""

from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import i32, inline, u32, u64
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import END, BackwardWork, may_go_upward, one_type, words
from numba_flash.cuda.sm90.backward.walk_backward import (
    blocks_after,
    blocks_before,
    build_tile_at,
    build_walk,
    goes_together,
)
from numba_flash.cuda.sm90.tiles import ADDERS, DQ_PART
from numba_flash.cuda.work import tile_lists

WORD = words(BackwardWork)


class LastFirst(NamedTuple):
    """The blocks of keys of a head that come last first: from key `begin` up to key `end`. Where
    the first comes first, `begin` is -1.
    """

    begin: int
    end: int


def build_add_dq(ordered, options, tile, layout):
    """``add_dq(smem, me, lse2, dq_sum, flags, extras, sizes)`` for each of the ADDERS:

    (7) dQ_i = dQ_i + dS_ij K_j: add to the sums in memory what the consumers have left of tiles me,
    me + ADDERS, ...
    """  # fmt: skip
    BLOCK_M, BLOCK_N, ORDERED = tile.block_m, tile.block_n, ordered
    DQ, WORK, DQ_BYTES = one_type(layout.dq), one_type(layout.work), 4 * DQ_PART * tile.consumers
    UPWARD, MASKED = may_go_upward(ordered, options), options.tiled
    TOGETHER = goes_together(options, tile)
    tile_at, walk = build_tile_at(UPWARD), build_walk(BLOCK_N, layout.work)
    listing_of, listed, order_of = walk.listing_of, walk.block_sparse, walk.order_of
    first_sum, add_sum = ptx.bulk_store_of(ptx.AGAIN), ptx.bulk_add_of(ptx.AGAIN)

    @inline
    def last_first_of(smem, item_n, serpentine):
        """The `LastFirst` of a work item: of a swing, or where there are none, of a whole head."""
        upward = pipeline.read(smem, WORK, item_n, WORD.first) >= 0
        if not UPWARD or upward == (serpentine > i32(0)):
            return LastFirst(i32(-1), i32(0))
        keys, begin = pipeline.read(smem, WORK, item_n, WORD.keys), i32(0)
        if serpentine > i32(0):
            block = i32(pipeline.read(smem, WORK, item_n, WORD.row0) // BLOCK_N)
            begin = i32(block // serpentine * serpentine * BLOCK_N)
            keys = min(keys, i32(begin + serpentine * BLOCK_N))
        return LastFirst(begin, keys)

    @inline
    def others_before(smem, item_n, at, last_first):
        """How many blocks of keys add to the at-th row block of a head before this one: those of
        earlier keys, but where the last comes first, of these those of later ones.
        """
        row0 = pipeline.read(smem, WORK, item_n, WORD.row0)
        if UPWARD and last_first.begin >= i32(0):
            low = pipeline.read(smem, WORK, item_n, WORD.low)
            queries = pipeline.read(smem, WORK, item_n, WORD.queries)
            key, end = i32(row0 - last_first.begin), last_first.end
            return blocks_after(key, low, at, queries, end, BLOCK_M, BLOCK_N)
        high = pipeline.read(smem, WORK, item_n, WORD.high)
        return blocks_before(row0, high, at, BLOCK_M, BLOCK_N)

    @inline
    def add_tile(smem, item_n, n, at, number, order, last_first, sum_address, flag_address):
        """Add the n-th tile of dQ to that of the row block `number`, the at-th of its head; if
        ORDERED in its turn.
        """
        flag, to = u64(flag_address + number * u64(4)), u64(sum_address + number * u64(DQ_BYTES))
        before = i32(1)
        seen = pipeline.read(smem, WORK, item_n, WORD.queries) != 0
        if ORDERED and seen:
            before = others_before(smem, item_n, at, last_first)
            if MASKED:
                before = tile_lists.count_before(order)
            while ptx.load_flag(flag) != before:
                pass
        pipeline.wait_ready(smem, DQ, n)
        if seen:
            if before == 0:
                first_sum(to, pipeline.tile(smem, DQ, n), u32(DQ_BYTES))
            else:
                add_sum(to, pipeline.tile(smem, DQ, n), u32(DQ_BYTES))
            ptx.bulk_commit()
        ptx.bulk_wait_read()
        pipeline.release(smem, DQ, n)
        if ORDERED and seen:
            ptx.bulk_wait()
            ptx.add_flag(flag, i32(1))  # whoever sees it finds the sum in memory

    @inline
    def add_dq(smem, me, lse2, dq_sum, flags, extras, sizes):
        group = i32(sizes.group)
        item_n, n, blocks = u32(0), u32(0), i32(lse2.shape[3] // BLOCK_M)
        pipeline.wait_ready(smem, WORK, item_n)
        count = pipeline.read(smem, WORK, item_n, WORD.count)
        while count != END:
            first = pipeline.read(smem, WORK, item_n, WORD.first)
            last_first = last_first_of(smem, item_n, i32(sizes.serpentine))
            for outer in range(count if TOGETHER else group):
                order, inners = i32(0), group if TOGETHER else count
                if MASKED:
                    head = i32(pipeline.read(smem, WORK, item_n, WORD.kv_head) * group + outer)
                    listing = listing_of(smem, item_n, head, extras)
                    inners = listing.count
                for inner in range(inners):
                    if n % u32(ADDERS) == u32(me):
                        g, t = (inner, outer) if TOGETHER else (outer, inner)
                        base = i32(pipeline.read(smem, WORK, item_n, WORD.base) + g * blocks)
                        at = tile_at(first, t)
                        if MASKED:
                            at = listed(listing, t).at
                        if MASKED and ORDERED:
                            order = order_of(smem, item_n, head, at, extras)
                        number = u64(u32(i32(base + at)))
                        sums, counts = ptx.global_address(dq_sum), ptx.global_address(flags)
                        add_tile(smem, item_n, n, at, number, order, last_first, sums, counts)
                    n = u32(n + u32(1))
            pipeline.release(smem, WORK, item_n)
            item_n = u32(item_n + 1)
            pipeline.wait_ready(smem, WORK, item_n)
            count = pipeline.read(smem, WORK, item_n, WORD.count)
        ptx.bulk_wait()

    return add_dq
