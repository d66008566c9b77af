"""What a backward pass of narrow heads has to know of each row of queries, where the kernel of dQ
has all keys of it: a thread for each of 64 rows.
"""

import math

from numba_flash.cuda import fragment, ptx
from numba_flash.cuda.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.number import index
from numba_flash.cuda.preprocess import LEAST_FLOAT32
from numba_flash.cuda.score import LOG2E
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.gradient_tiles import QUERIES, ROW_BYTES
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.softmax import raised_backward
from numba_flash.cuda.swizzle import NARROW_ROW_BYTES

THREADS = QUERIES  # the last ones of the first warp group
CHUNKS, CHUNK_BYTES = NARROW_ROW_BYTES // 16, 16


@once
def build(dtype, has_dlse, tile, walks):
    """``make_rows(smem, lse, dlse, rows, shares, extras, extent)``: of each tile of a block

    lse2 = lse log2(e), but +inf for a row that saw nothing or does not exist, so that its P is 0,
    delta = rowsum(dO * O) - dlse, but 0 there,

    raised as `numba_flash.cuda.preprocess` says,
    side by side, in shared memory and in `rows` (b0, b1, heads, at least n, 2).
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
    def make_rows(smem, lse, dlse, rows, shares, extras, extent):
        row, n = i32(cuda.threadIdx.x - (WARP_GROUP - THREADS)), u32(0)
        space, _, t = begin(i32(cuda.blockIdx.x), extent, i32(shares))
        i = i32(space.own.i * QUERIES + row)
        swizzle = i32(row // 2 % CHUNKS)
        while t.number < space.stop:
            at = place_of(t.walk, space, extras).at
            b0, b1, head = index(at.b0), index(at.b1), index(at.head)
            shift, delta, there = f32(INF), f32(0), i < space.queries
            value, more = f32(-INF), f32(0)
            if there:
                value = lse[b0, b1, head, index(i)]
                if HAS_DLSE:
                    more = dlse[b0, b1, head, index(i)]
            pipeline.wait_ready(smem, Q, n)
            mine = u32(pipeline.tile(smem, Q, n) + u32(row * NARROW_ROW_BYTES))
            total = f32(0)
            for c in range(CHUNKS):
                chunk = u32(mine + u32((c ^ swizzle) * CHUNK_BYTES))
                x = ptx.load_shared_words(u32(chunk + u32(DO)))
                total += product(x, ptx.load_shared_words(u32(chunk + u32(O))))
            pipeline.release(smem, Q, n)
            if value != f32(-INF):
                shift = max(ptx.fma_up(value, f32(LOG2E), f32(-RAISED)), f32(LEAST))
                delta = (total - more) * f32(LOWERED)
            pipeline.wait_free(smem, NOTES, n)
            to = u32(pipeline.tile(smem, NOTES, n) + u32(row * ROW_BYTES))
            ptx.store_shared_vector(to, (shift, delta))
            pipeline.commit(smem, NOTES, n)
            ptx.store_global(ptx.global_address(rows[b0, b1, head, index(i)]), (shift, delta))
            t, n = proceed(t, space, extras), u32(n + 1)

    return make_rows
