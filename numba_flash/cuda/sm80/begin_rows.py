"""What a backward pass has to know of each row of queries, where the kernel of dQ has all keys of
it: a thread for each chunk of dO, which it has copied itself, and of O.
"""

import math

from numba_flash.cuda import ptx
from numba_flash.cuda.passes.preprocess import LEAST_FLOAT32
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, u32, u64
from numba_flash.cuda.score import fragment
from numba_flash.cuda.score.fragment import ALL_LANES
from numba_flash.cuda.score.score import LOG2E
from numba_flash.cuda.sm80.bias_gradient.load_dq_dbias import CHUNK_BYTES, head_address, plus
from numba_flash.cuda.sm80.tiles import CHUNK, padded, pitch

ROW_BYTES = 8  # of what is known of a row


@once
def build_rows(dtype, shape, has_dlse, tile):
    """``copy(smem, slot, tensors, place)``: O, lse and dlse of a tile's rows to shared memory;
    ``begin(smem, slot, rows, at, row0, queries)``: of those that have been copied

    lse2 = lse log2(e), but +inf for a row that saw nothing or does not exist, so that its P is 0,
    start = dlse - rowsum(dO * O), which is what sums of dP begin with, but 0 there,

    side by side, in shared memory and in `rows` (b0, b1, heads, at least n, 2). A thread needs
    nothing there that another one has copied, so there is one slot for O.
    """
    BLOCK_M, HAS_DLSE, COLUMNS, INF = tile.block_m, has_dlse, shape.head_dim_v, math.inf
    SMEM, CHUNKS, PITCH = tile.layout(*shape.columns), padded(COLUMNS) // CHUNK, pitch(COLUMNS)
    DO, O, ROWS, DO_BYTES, LEAST = SMEM.do, SMEM.o, SMEM.rows, tile.block_m * PITCH, LEAST_FLOAT32
    FOLDS, ALL = (CHUNKS - 1).bit_length(), tile.block_m * CHUNKS == tile.threads
    element = fragment.build_unpack(dtype == "bfloat16")
    assert tile.block_m * CHUNKS <= tile.threads
    assert CHUNKS == 1 << FOLDS

    @inline
    def copy(smem, slot, x, place):
        at, r, thread = place.at, place.region, ptx.bounded_thread_here()
        row, chunk = i32(thread // CHUNKS), i32(thread % CHUNKS)
        if ALL or row < BLOCK_M:
            i = i32(r.row0 + row)
            there = u32(1) if i < r.rows else u32(0)
            source = plus(head_address(x.o, at, at.head), i, x.o.strides[3])
            source = u64(source + u64(u32(chunk * CHUNK_BYTES)))
            whole = there if chunk * CHUNK < COLUMNS else u32(0)
            ptx.copy16(u32(smem + u32(O) + u32(thread * CHUNK_BYTES)), source, whole)
            to = u32(smem + u32(ROWS) + slot * u32(ROW_BYTES * BLOCK_M) + u32(row * ROW_BYTES))
            if chunk == 0:
                source = plus(head_address(x.lse, at, at.head), i, x.lse.strides[3])
                ptx.copy4(to, source, there)
                if HAS_DLSE:
                    source = plus(head_address(x.dlse, at, at.head), i, x.dlse.strides[3])
                    ptx.copy4(u32(to + u32(4)), source, there)

    @inline
    def begin(smem, slot, rows, at, row0, queries):
        thread = ptx.bounded_thread_here()
        row, chunk = i32(thread // CHUNKS), i32(thread % CHUNKS)
        if ALL or row < BLOCK_M:
            do = u32(smem + u32(DO) + slot * u32(DO_BYTES) + u32(row * PITCH))
            x = ptx.load_shared_words(u32(do + u32(chunk * CHUNK_BYTES)))
            y = ptx.load_shared_words(u32(smem + u32(O) + u32(thread * CHUNK_BYTES)))
            total = f32(0)
            for i in range(4):
                total += element(x[i], 0) * element(y[i], 0) + element(x[i], 1) * element(y[i], 1)
            for fold in range(FOLDS):
                total += cuda.shfl_xor_sync(ALL_LANES, total, 1 << fold)
            if chunk == 0:
                to = u32(smem + u32(ROWS) + slot * u32(ROW_BYTES * BLOCK_M) + u32(row * ROW_BYTES))
                lse, dlse = ptx.load_shared_pair(to)
                shift, start, i = f32(INF), f32(0), i32(row0 + row)
                if i < queries and lse != f32(-INF):
                    shift, start = ptx.multiply_up(lse, f32(LOG2E)), -total
                    if HAS_DLSE:
                        start += dlse
                    if shift < f32(LEAST):
                        shift = f32(LEAST)
                ptx.store_shared_vector(to, (shift, start))
                source = u64(head_address(rows, at, at.head) + u64(u32(ROW_BYTES * i)))
                ptx.store_global(source, (shift, start))

    return copy, begin
