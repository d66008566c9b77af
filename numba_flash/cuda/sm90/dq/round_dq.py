"""One warp of the backward pass writes down work items and, between them, rounds tiles of dQ once
all blocks of keys have added to them. Elsewhere `postprocess` does so after the main kernel.

The warp has few registers. Spilled ones would lie in the L1 cache, which is emptied whenever
another thread of its warp group acquires a flag. So the warp keeps in shared memory what it needs
from one part of a tile to the next.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, i32, inline, u32, u64
from numba_flash.cuda.score import fragment
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import one_type, words
from numba_flash.cuda.sm90.backward.backward_tiles import (
    CHUNK_BYTES,
    CHUNKS,
    ROUNDED_BYTES,
    ROUNDED_COLUMNS,
)
from numba_flash.cuda.sm90.backward.walk_backward import blocks_after
from numba_flash.cuda.sm90.tiles import KEYS

DQ_MAP = 6  # which of the tensor maps
PART_BYTES = CHUNKS * CHUNK_BYTES
COLUMNS, PARTS = ROUNDED_COLUMNS, 64 // ROUNDED_COLUMNS  # of what a consumer hands over
ROW_BYTES = 2 * COLUMNS
NAP = 256  # nanoseconds, before it looks again


class Rounding(NamedTuple):
    """What the warp has written down: one int32 each.

    Attributes
    ----------
    row0, head, b1, b0 : int
        Place of the present tile in dQ.
    number, place : int
        Its own among row blocks, and in the order of rounding.
    blocks : int
        How many blocks of keys add to it.
    left : int
        Parts of tiles that the block has yet to round.
    item_n, there : int
        Number of the next work item among those of the block; whether there may be one.
    """

    row0: int
    head: int
    b1: int
    b0: int
    number: int
    place: int
    blocks: int
    left: int
    item_n: int
    there: int


WORD = words(Rounding)


class RoundDq(NamedTuple):
    """What `build` makes."""

    parts: Any
    begin_tile: Any
    is_complete: Any
    round_part: Any


@inline
def is_first():
    """Whether this is the first thread of its warp."""
    return i32(ptx.thread_here() & 31) == i32(0)


def build_access(layout):
    """``read(smem, word)`` and ``write(smem, word, value)`` of a word of `Rounding`."""
    ROUNDING = layout.rounding

    @inline
    def read(smem, word):
        return ptx.load_shared(u32(smem + u32(ROUNDING + 4 * word)))

    @inline
    def write(smem, word, value):
        ptx.store_shared(u32(smem + u32(ROUNDING + 4 * word)), i32(value))

    return read, write


def build(tile, layout, bfloat16):
    """``parts(lse2)``: how many parts of tiles this block rounds.
    ``begin_tile(smem, place, lse2, sizes, keys)``: write down the tile at a place, by one thread.
    Tiles of a head come in the order in which most blocks of keys go through them, and so are
    complete.
    ``is_complete(smem, flags)``: whether all blocks of keys have added to it, whose sums all
    threads of the warp find in memory then.
    ``round_part(maps, smem, part, dq_sum, scale)``: (7) dQ = scale dQ of a part of it, rounded.
    """
    BLOCK_M, BLOCK_N, ALL = tile.block_m, tile.block_n, PARTS * tile.consumers
    SUMS, ROUNDED, SPLIT_ROWS = layout.sums, layout.rounded, tile.splits_rows
    ROUNDED_SLOTS, SUM_SLOTS = tile.rounded_slots, tile.sum_slots
    read, write = build_access(layout)
    _, pack2 = fragment.build_pack(0, bfloat16)
    copy_wait_before = ptx.copy_wait_but(SUM_SLOTS - 1)
    bulk_wait_read_before = ptx.bulk_wait_read_but(ROUNDED_SLOTS - 1)

    @inline
    def parts(lse2):
        row_blocks = u32(u32(lse2.shape[3]) // u32(BLOCK_M) * u32(lse2.shape[2]))
        tiles = u32(u32(row_blocks * u32(lse2.shape[1])) * u32(lse2.shape[0]))
        block, grid = u32(cuda.blockIdx.x), u32(cuda.gridDim.x)
        mine = u32(u32(tiles + u32(grid - u32(1)) - block) // grid)
        return u32(mine * u32(ALL))

    @inline
    def begin_tile(smem, place, lse2, sizes, keys):
        blocks, heads = u32(u32(lse2.shape[3]) // u32(BLOCK_M)), u32(lse2.shape[2])
        pair = u32(place // blocks)
        at = i32(place - u32(pair * blocks))
        if not sizes.upward:
            at = i32(blocks) - i32(1) - at
        b = u32(pair // heads)
        b0 = u32(b // u32(lse2.shape[1]))
        low, queries = i32(sizes.low), i32(sizes.columns)
        write(smem, WORD.row0, at * BLOCK_M)
        write(smem, WORD.head, u32(pair - u32(b * heads)))
        write(smem, WORD.b1, u32(b - u32(b0 * u32(lse2.shape[1]))))
        write(smem, WORD.b0, b0)
        write(smem, WORD.number, u32(pair * blocks) + u32(at))
        write(smem, WORD.place, place)
        after = blocks_after(i32(0), low, at, queries, keys, BLOCK_M, BLOCK_N)
        write(smem, WORD.blocks, after + i32(1))

    @inline
    def is_complete(smem, flags):
        number = u64(u32(read(smem, WORD.number)))
        flag = u64(ptx.global_address(flags) + number * u64(4))
        complete = pipeline.uniform(ptx.load_flag(flag)) == read(smem, WORD.blocks)
        cuda.syncwarp()  # all threads know what the first one has acquired
        return complete

    @inline
    def fetch_chunk(to, address):
        """Have sums of 8 columns copied: each thread those that it will read."""
        for i in range(0, CHUNK_BYTES, 512):
            ptx.copy16(u32(to + u32(i)), u64(address + u64(i)), u32(1))

    @inline
    def round_rows(at, to, scale):
        """Sums of 32 rows and 8 columns, in the order of fragments, to rows."""
        x, y = ptx.load_shared_four(at), ptx.load_shared_four(u32(at + u32(512)))
        a, b = pack2(x[0] * scale, x[1] * scale), pack2(x[2] * scale, x[3] * scale)
        c, d = pack2(y[0] * scale, y[1] * scale), pack2(y[2] * scale, y[3] * scale)
        ptx.stmatrix(to, a, b, c, d)

    @inline
    def store_part(maps, smem, part):
        """By one thread."""
        row0, column = read(smem, WORD.row0), i32(part * u32(COLUMNS))
        if SPLIT_ROWS:
            row0 = i32(row0 + i32(part // u32(PARTS)) * KEYS)
            column = i32(i32(part % u32(PARTS)) * COLUMNS)
        head, b1, b0 = read(smem, WORD.head), read(smem, WORD.b1), read(smem, WORD.b0)
        rounded = u32(smem + u32(ROUNDED) + part % u32(ROUNDED_SLOTS) * u32(ROUNDED_BYTES))
        ptx.tensor_store(rounded, maps[DQ_MAP], column, row0, head, b1, b0)
        ptx.bulk_commit()

    @inline
    def round_part(maps, smem, part, dq_sum, scale):
        row = u32(ptx.thread_here() & 31)
        sums = u32(smem + u32(SUMS) + row * u32(16))
        number = u64(u32(u32(read(smem, WORD.number)) * u32(ALL) + part))
        address = u64(ptx.global_address(dq_sum) + number * u64(PART_BYTES) + u64(row * u32(16)))
        if part == u32(0):
            for i in range(SUM_SLOTS):
                fetch_chunk(u32(sums + u32(i * CHUNK_BYTES)), u64(address + u64(i * CHUNK_BYTES)))
                ptx.copy_commit()
        if is_first():
            bulk_wait_read_before()  # the rows that were in the slot have left
        cuda.syncwarp()
        rounded = u32(smem + u32(ROUNDED) + part % u32(ROUNDED_SLOTS) * u32(ROUNDED_BYTES))
        to = u32(rounded + row * u32(ROW_BYTES) + row // u32(2) % u32(4) * u32(16))
        slot = u32(part * u32(CHUNKS) % u32(SUM_SLOTS))
        at = u32(sums + slot * u32(CHUNK_BYTES))
        for chunk in range(CHUNKS):
            copy_wait_before()
            swizzled = u32(to ^ u32(16 * chunk))
            for half in range(2):
                half_to = u32(swizzled + u32(32 * half * ROW_BYTES))
                round_rows(u32(at + u32(half * CHUNK_BYTES // 2)), half_to, scale)
            if part < u32(ALL - (chunk + SUM_SLOTS) // CHUNKS):  # the tile has such a chunk
                fetch_chunk(at, u64(address + u64((chunk + SUM_SLOTS) * CHUNK_BYTES)))
            ptx.copy_commit()
            at = u32(at + u32(CHUNK_BYTES))
            if at == u32(sums + u32(SUM_SLOTS * CHUNK_BYTES)):
                at = sums
        ptx.fence_proxy_async()
        cuda.syncwarp()
        if is_first():
            store_part(maps, smem, part)

    return RoundDq(parts, begin_tile, is_complete, round_part)


def build_write_and_round(tile, layout, bfloat16, write_next):
    """``write_and_round(maps, smem, dk, lse2, dq_sum, flags, extras, sizes, scale)``, by a warp:
    write down each work item, by `write_next`, as soon as it may be claimed, and round dQ.
    """
    FETCHED, ALL = one_type(layout.fetched), PARTS * tile.consumers
    read, write = build_access(layout)
    parts, begin_tile, is_complete, round_part = build(tile, layout, bfloat16)

    @inline
    def may_claim(smem):
        """Whether there may be another work item, and all tiles of the last one have been asked for
        (or nothing else is left to do).
        """
        there, item_n = read(smem, WORD.there), u32(read(smem, WORD.item_n))
        if there != i32(0) and item_n != u32(0) and read(smem, WORD.left) != i32(0):
            there = pipeline.is_ready(smem, FETCHED, u32(item_n - u32(1)))
        return pipeline.uniform(there) != i32(0)

    @inline
    def next_tile(smem, lse2, sizes, keys):
        """A part is done; begin the next tile if it was the last."""
        left = u32(u32(read(smem, WORD.left)) - u32(1))
        write(smem, WORD.left, left)
        if left % u32(ALL) == u32(0) and left != u32(0):
            place = u32(u32(read(smem, WORD.place)) + u32(cuda.gridDim.x))
            begin_tile(smem, place, lse2, sizes, keys)

    @inline
    def write_and_round(maps, smem, dk, lse2, dq_sum, flags, extras, sizes, scale):
        if is_first():
            write(smem, WORD.left, parts(lse2))
            write(smem, WORD.item_n, i32(0))
            write(smem, WORD.there, i32(1))
            begin_tile(smem, u32(cuda.blockIdx.x), lse2, sizes, i32(dk.shape[3]))
        cuda.syncwarp()
        while read(smem, WORD.there) != i32(0) or read(smem, WORD.left) != i32(0):
            part = u32(u32(u32(0) - u32(read(smem, WORD.left))) % u32(ALL))
            if may_claim(smem):
                if is_first():
                    item_n = u32(read(smem, WORD.item_n))
                    there = write_next(smem, item_n, dk, lse2, flags, extras, sizes)
                    write(smem, WORD.there, i32(there))
                    write(smem, WORD.item_n, read(smem, WORD.item_n) + i32(1))
            elif part != u32(0) or is_complete(smem, flags):
                round_part(maps, smem, part, dq_sum, scale)
                if is_first():
                    next_tile(smem, lse2, sizes, i32(dk.shape[3]))
            else:
                ptx.nap(u32(NAP))
            cuda.syncwarp()
        if is_first():
            ptx.bulk_wait()

    return write_and_round
