"""K and V with the keys of a tile in the order in which a thread's two scores of a query are those
of neighbouring keys: the copy engine brings rows in their own order.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, i32, inline, once, u32
from numba_flash.cuda.score import swizzle
from numba_flash.cuda.score.fragment import build_key_rows
from numba_flash.cuda.score.swizzle import ROW_BYTES
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.tiles import WARP_GROUP

ROWS = 64  # of a consumer
CHUNK_BYTES = 16


@inline
def first_key():
    """Key of this thread's register 0 within the 64 of its warp group, in this order; the next
    one's row lies 8 below.
    """
    thread = i32(cuda.threadIdx.x % WARP_GROUP)
    return i32(thread // 32 * 16 + thread % 32 // 4 * 2)


@once
def build_interleave(columns, rows):
    """``interleave(smem, ring, n, keys, consumer)``: of each 16 of a consumer's rows of the n-th
    tile, which is there, key ``2 i + r`` goes to row ``i + 8 r`` (`fragment.build_key_rows`). Rows
    from `keys` on become zeros: what lies beyond the end may be NaN, and 0 * NaN is not 0.
    """
    PANELS, PANEL_BYTES = swizzle.panels(columns), swizzle.panel_bytes(rows)
    CHUNKS = ROW_BYTES // CHUNK_BYTES // 2  # of a lane, in a panel
    HELD, (place, _) = 4 * CHUNKS, build_key_rows(1)

    @inline
    def interleave(smem, ring, n, keys, consumer):
        held = cuda.local.array(HELD, u32)  # registers: half of a row of a panel
        thread = ptx.thread_here()
        row = i32(consumer * ROWS + thread % 128 // 32 * 16 + thread % 16)
        to_row, first = place(row), i32(thread % 32 // 16)
        for panel in range(PANELS):
            here = u32(pipeline.tile(smem, ring, n) + u32(panel * PANEL_BYTES))
            for i in range(CHUNKS):
                chunk = i32((2 * i + first) ^ (row % 8))
                words = ptx.load_shared_words(
                    u32(here + u32(row * ROW_BYTES + chunk * CHUNK_BYTES))
                )
                for word in range(4):
                    held[4 * i + word] = words[word] if row < keys else u32(0)
            cuda.syncwarp()  # all 16 rows have been read
            for i in range(CHUNKS):
                chunk = i32((2 * i + first) ^ (to_row % 8))
                at = u32(here + u32(to_row * ROW_BYTES + chunk * CHUNK_BYTES))
                words = held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3]
                ptx.store_shared_vector(at, words)
        ptx.fence_proxy_async()
        pipeline.meet_warp_group(consumer)  # they are there for the products of the warp group

    return interleave
