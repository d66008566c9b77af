"""The thread that moves data in the backward pass of narrow heads with a bias that is kept."""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.lang import cuda, i32, inline, once, u32
from numba_flash.cuda.number import index
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.gradient_tiles import QUERIES, ROW_BYTES
from numba_flash.cuda.swizzle import NARROW_ROW_BYTES
from numba_flash.cuda.units import build_units


@inline
def load_box(to, tensor_map, head, row, b1, b0, ready):
    """Have rows of a narrow panel fetched."""
    ptx.tensor_load(to, tensor_map, i32(0), i32(row), i32(head), i32(b1), i32(b0), ready)


@once
def build_produce_queries(tile):
    """``produce(maps, smem, rows, sizes)``: have the copy engine fetch what each unit of this block
    needs: K and V of its keys, and tiles of queries.
    """
    SMEM, TILES = tile.layout(), tile.tiles
    Q, KV, DO, ROWS, V = one_type(SMEM.q), one_type(SMEM.kv), SMEM.do, SMEM.rows, SMEM.v
    QUERIES, KEYS_SLOT = tile.queries, SMEM.kv.slot_bytes
    ROWS_BYTES = QUERIES * ROW_BYTES
    BYTES = 2 * QUERIES * NARROW_ROW_BYTES + ROWS_BYTES
    first_of, unit_of, after = build_units(tile.block_m)

    @inline
    def load_keys(maps, smem, turn, x):
        pipeline.wait_free(smem, KV, turn)
        ready, to = pipeline.mbarrier(smem, KV, KV.ready, turn), pipeline.tile(smem, KV, turn)
        ptx.mbarrier_expect(ready, u32(KEYS_SLOT))
        load_box(to, maps[2], x.head, x.row0, x.b1, x.b0, ready)
        load_box(u32(to + u32(V)), maps[3], x.head, x.row0, x.b1, x.b0, ready)

    @inline
    def load_queries(maps, smem, rows, n, x, row0):
        pipeline.wait_free(smem, Q, n)
        ready, to = pipeline.mbarrier(smem, Q, Q.ready, n), pipeline.tile(smem, Q, n)
        ptx.mbarrier_expect(ready, u32(BYTES))
        load_box(to, maps[1], x.head, row0, x.b1, x.b0, ready)
        load_box(u32(to + u32(DO)), maps[0], x.head, row0, x.b1, x.b0, ready)
        known = rows[index(x.b0), index(x.b1), index(x.head), index(row0)]
        ptx.bulk_load(u32(to + u32(ROWS)), ptx.global_address(known), u32(ROWS_BYTES), ready)

    @inline
    def produce(maps, smem, rows, sizes):
        number = first_of(cuda.blockIdx.x, sizes)
        stop = first_of(cuda.blockIdx.x + 1, sizes)
        x, n, turn = unit_of(number, sizes), u32(0), u32(0)
        while number < stop:
            load_keys(maps, smem, turn, x)
            for t in range(TILES):
                load_queries(maps, smem, rows, n, x, i32(t * QUERIES))
                n = u32(n + 1)
            number, turn = i32(number + 1), u32(turn + 1)
            x = after(x, number, sizes)

    return produce


class Walks(NamedTuple):
    """How a block of dQ and dbias goes through the heads that its part of the bias is shared by,
    `numba_flash.cuda.walk_dbias`.
    """

    begin: Any
    place_of: Any
    proceed: Any


@once
def build_produce_keys(tile, walks):
    """``produce(maps, smem, shares, extras, extent)``: have the copy engine fetch what each tile of
    this block needs: Q, dO and O, and all of K and V.
    """
    SMEM, CONSUMERS, KEYS = tile.layout(), tile.consumers, tile.keys
    Q, KV, DO, O, V = one_type(SMEM.q), one_type(SMEM.kv), SMEM.do, SMEM.o, SMEM.v
    SLOT, KEYS_SLOT, PART = SMEM.q.slot_bytes, SMEM.kv.slot_bytes, tile.keys * NARROW_ROW_BYTES
    begin, place_of, proceed = walks

    @inline
    def load_queries(maps, smem, n, at, row0):
        pipeline.wait_free(smem, Q, n)
        ready, to = pipeline.mbarrier(smem, Q, Q.ready, n), pipeline.tile(smem, Q, n)
        ptx.mbarrier_expect(ready, u32(SLOT))
        load_box(to, maps[1], at.head, row0, at.b1, at.b0, ready)
        load_box(u32(to + u32(DO)), maps[0], at.head, row0, at.b1, at.b0, ready)
        load_box(u32(to + u32(O)), maps[4], at.head, row0, at.b1, at.b0, ready)

    @inline
    def load_keys(maps, smem, n, at, kv_head):
        pipeline.wait_free(smem, KV, n)
        ready, to = pipeline.mbarrier(smem, KV, KV.ready, n), pipeline.tile(smem, KV, n)
        ptx.mbarrier_expect(ready, u32(KEYS_SLOT))
        for part in range(CONSUMERS):
            row, mine = i32(part * KEYS), u32(to + u32(part * PART))
            load_box(mine, maps[2], kv_head, row, at.b1, at.b0, ready)
            load_box(u32(mine + u32(V)), maps[3], kv_head, row, at.b1, at.b0, ready)

    @inline
    def produce(maps, smem, shares, extras, extent):
        space, _, t = begin(i32(cuda.blockIdx.x), extent, i32(shares))
        row0, n = i32(space.own.i * QUERIES), u32(0)
        while t.number < space.stop:
            place = place_of(t.walk, space, extras)
            load_queries(maps, smem, n, place.at, row0)
            load_keys(maps, smem, n, place.at, place.kv_head)
            t, n = proceed(t, space, extras), u32(n + 1)

    return produce
