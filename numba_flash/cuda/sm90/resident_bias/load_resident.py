"""What goes to shared memory where narrow heads have a bias that is kept: what one thread moves in
the forward pass, and in the backward pass; and what has to be known of each row of queries there,
where the kernel of dQ has all its keys.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.passes.preprocess import LEAST_FLOAT32
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.score import fragment
from numba_flash.cuda.score.score import LOG2E
from numba_flash.cuda.score.softmax import raised_backward
from numba_flash.cuda.score.swizzle import NARROW_ROW_BYTES
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.bias_gradient.dbias_tiles import QUERIES, ROW_BYTES
from numba_flash.cuda.sm90.pipeline import TilePlace
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.work.units import build_units

CHUNKS, CHUNK_BYTES = NARROW_ROW_BYTES // 16, 16


@once
def build_load(ring, rows):
    """``load(tensor_map, smem, n, place)``: have the n-th tile of a ring fetched into its slot once
    that is free (by one thread): so many rows of a narrow panel. What lies outside becomes 0.
    """
    RING, BYTES = one_type(ring), rows * NARROW_ROW_BYTES

    @inline
    def load(tensor_map, smem, n, place):
        pipeline.wait_free(smem, RING, n)
        ready, to = pipeline.mbarrier(smem, RING, RING.ready, n), pipeline.tile(smem, RING, n)
        ptx.mbarrier_expect(ready, u32(BYTES))
        row, head, b1, b0 = i32(place.row), i32(place.head), i32(place.b1), i32(place.b0)
        ptx.tensor_load(to, tensor_map, i32(place.column), row, head, b1, b0, ready)

    return load


@once
def build_produce(tile):
    """``produce(maps, smem, sizes)``: have the copy engine fetch what each unit of this block
    needs.
    """
    SMEM, TILES, BLOCK_N = tile.layout(), tile.tiles, tile.block_n
    load_q = build_load(SMEM.q, tile.block_m)
    load_k, load_v = build_load(SMEM.k, BLOCK_N), build_load(SMEM.v, BLOCK_N)
    first_of, unit_of, after = build_units(tile.block_m)

    @inline
    def produce(maps, smem, sizes):
        number = first_of(cuda.blockIdx.x, sizes)
        stop = first_of(cuda.blockIdx.x + 1, sizes)
        x, n, item_n = unit_of(number, sizes), u32(0), u32(0)
        while number < stop:
            kv_head = i32(u32(x.head) // u32(sizes.group))
            for t in range(TILES):
                keys = TilePlace(0, i32(t * BLOCK_N), kv_head, x.b1, x.b0)
                load_k(maps[1], smem, n, keys)
                if t == 0:
                    load_q(maps[0], smem, item_n, TilePlace(0, x.row0, x.head, x.b1, x.b0))
                load_v(maps[2], smem, n, keys)
                n = u32(n + 1)
            number, item_n = i32(number + 1), u32(item_n + 1)
            x = after(x, number, sizes)

    return produce


# ---- in the backward pass


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
    def load_keys(maps, smem, item_n, x):
        pipeline.wait_free(smem, KV, item_n)
        ready, to = pipeline.mbarrier(smem, KV, KV.ready, item_n), pipeline.tile(smem, KV, item_n)
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
        x, n, item_n = unit_of(number, sizes), u32(0), u32(0)
        while number < stop:
            load_keys(maps, smem, item_n, x)
            for t in range(TILES):
                load_queries(maps, smem, rows, n, x, i32(t * QUERIES))
                n = u32(n + 1)
            number, item_n = i32(number + 1), u32(item_n + 1)
            x = after(x, number, sizes)

    return produce


class Walks(NamedTuple):
    """How a block of dQ and dbias goes through the heads that its part of the bias is shared by,
    `numba_flash.cuda.work.walk_dbias`.
    """

    begin: Any
    place_of: Any
    proceed: Any


@once
def build_produce_keys(tile, walks):
    """``produce(smem, me, x)``, x being the kernel's arguments: have the copy engine fetch what
    each tile of this block needs: Q, dO and O, and all of K and V.
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
    def produce(smem, me, x):
        space, _, t = begin(i32(cuda.blockIdx.x), x.extent, i32(x.out.shape[0]))
        row0, n = i32(space.own.i * QUERIES), u32(0)
        while t.number < space.stop:
            place = place_of(t.walk, space, x.extras)
            load_queries(x.maps, smem, n, place.at, row0)
            load_keys(x.maps, smem, n, place.at, place.kv_head)
            t, n = proceed(t, space, x.extras), u32(n + 1)

    return produce


@once
def build_make_rows(dtype, has_dlse, tile, walks):
    """``make_rows(smem, me, x)``: a thread for each row, x being the kernel's arguments. Of each
    tile of a block

    lse2 = lse log2(e), but +inf for a row that saw nothing or does not exist, so that its P is 0,
    delta = rowsum(dO * O) - dlse, but 0 there,

    raised as `numba_flash.cuda.passes.preprocess` says,
    side by side, in shared memory and in ``x.rows`` (b0, b1, heads, at least n, 2).
    """
    SMEM, HAS_DLSE, INF, LEAST = tile.layout(), has_dlse, math.inf, LEAST_FLOAT32
    Q, NOTES, DO, O = one_type(SMEM.q), one_type(SMEM.rows), SMEM.do, SMEM.o
    element = fragment.build_unpack(dtype == "bfloat16")
    begin, place_of, proceed = walks
    RAISED = raised_backward(dtype == "bfloat16")
    LOWERED = 2.0**-RAISED

    @inline
    def product(x, y):
        """Sum of the products of two chunks."""
        total = f32(0)
        for i in range(4):
            total += element(x[i], 0) * element(y[i], 0) + element(x[i], 1) * element(y[i], 1)
        return total

    @inline
    def make_rows(smem, me, x):
        row, n = i32(cuda.threadIdx.x - (WARP_GROUP - QUERIES)), u32(0)
        space, _, t = begin(i32(cuda.blockIdx.x), x.extent, i32(x.out.shape[0]))
        i = i32(space.own.i * QUERIES + row)
        swizzle = i32(row // 2 % CHUNKS)
        while t.number < space.stop:
            at = place_of(t.walk, space, x.extras).at
            b0, b1, head = index(at.b0), index(at.b1), index(at.head)
            shift, delta, there = f32(INF), f32(0), i < space.queries
            value, more = f32(-INF), f32(0)
            if there:
                value = x.lse[b0, b1, head, index(i)]
                if HAS_DLSE:
                    more = x.dlse[b0, b1, head, index(i)]
            pipeline.wait_ready(smem, Q, n)
            mine = u32(pipeline.tile(smem, Q, n) + u32(row * NARROW_ROW_BYTES))
            total = f32(0)
            for c in range(CHUNKS):
                chunk = u32(mine + u32((c ^ swizzle) * CHUNK_BYTES))
                do = ptx.load_shared_words(u32(chunk + u32(DO)))
                total += product(do, ptx.load_shared_words(u32(chunk + u32(O))))
            pipeline.release(smem, Q, n)
            if value != f32(-INF):
                shift = max(ptx.fma_up(value, f32(LOG2E), f32(-RAISED)), f32(LEAST))
                delta = (total - more) * f32(LOWERED)
            pipeline.wait_free(smem, NOTES, n)
            to = u32(pipeline.tile(smem, NOTES, n) + u32(row * ROW_BYTES))
            ptx.store_shared_vector(to, (shift, delta))
            pipeline.commit(smem, NOTES, n)
            ptx.store_global(ptx.global_address(x.rows[b0, b1, head, index(i)]), (shift, delta))
            t, n = proceed(t, space, x.extras), u32(n + 1)

    return make_rows
