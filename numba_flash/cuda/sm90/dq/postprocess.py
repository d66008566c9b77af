"""What the backward pass on Hopper does after a main kernel that adds up dQ in memory: round it,
and put it in order; of float32, add the consumers' parts of it.
"""

import math

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import FACTORS, extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime import early
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, types, u32, u64
from numba_flash.cuda.score import softmax
from numba_flash.cuda.score.fragment import first_column
from numba_flash.cuda.score.swizzle import ALIGNMENT, panel_bytes
from numba_flash.cuda.sm90 import wgmma
from numba_flash.cuda.sm90.store import build_put
from numba_flash.cuda.sm90.tiles import DQ_PART, WARP_GROUP
from numba_flash.cuda.work import schedule, tile_lists


@inline
def see_no_key(rows, low, high, block_m):
    """Whether a band hides all keys of a row block, or it has no queries."""
    row0, queries = rows.row0, rows.queries
    stop_row = min(row0 + block_m, queries)
    low, high = low + rows.shift, high + rows.shift
    start, stop = mask.kv_range(row0, stop_row, rows.keys, low, high)
    return start >= stop or row0 >= queries


def build(dtype, head_dim, options, tile, lists=()):
    """Kernel ``postprocess(dq_sum, dq, extras, nk, low, high, scale)``: dQ = scale dQ, out of the
    order of fragments, rounded.

    `dq` is seen as words of two elements. Row blocks that see no key get 0: nobody has written
    their sum.

    lists : names of those of a mask's tiles that there are (`numba_flash.cuda.work.tile_lists`).
    """
    IN_ORDER, LISTS = "order" in lists, lists
    BLOCK_M, CONSUMERS = tile.block_m, tile.consumers
    SPLIT_ROWS, PACKED, HEAD_DIM = tile.splits_rows, options.packed, head_dim
    PANEL_BYTES, ROOM, PART_BYTES = panel_bytes(64), tile.consumers * panel_bytes(64), 4 * DQ_PART
    NAN = math.nan
    put = build_put(64, 0, 1, dtype == "bfloat16")
    rows_of = schedule.build_rows(options, tile.block_m)

    def postprocess(dq_sum, dq, extras, nk, low, high, scale):
        early.begin()
        number = i64(cuda.blockIdx.x)
        rows = rows_of(number, extras, dq.shape, nk)
        row0, queries = rows.row0, rows.queries
        empty = see_no_key(rows, low, high, BLOCK_M)
        if IN_ORDER:
            of_head = extras.order[index(rows.b0), index(rows.b1), index(rows.head)]
            after_all, at = index(of_head.shape[0] - 1), index(row0 // BLOCK_M)
            if not empty:
                empty = tile_lists.count_before(of_head[after_all, at]) == 0
        if not PACKED:
            queries = dq.shape[3]
        # shared by the block: a tile of dQ, each consumer's part in a panel
        tile_smem = ptx.shared_address(cuda.shared.array(ROOM, types.uint8, ALIGNMENT))
        me, thread = i32(cuda.threadIdx.x // 128), i32(cuda.threadIdx.x % 128)
        part = (number * CONSUMERS + me) * PART_BYTES + thread * 16
        sums = u64(ptx.global_address(dq_sum) + u64(part))
        acc = cuda.local.array(32, f32)  # registers: a fragment of dQ
        factor = cuda.local.array(2, f32)
        for j in range(8):
            x = (f32(0), f32(0), f32(0), f32(0))
            if not empty:
                x = ptx.load_global_four(u64(sums + u64(2048 * j)))
            for i in range(4):
                acc[4 * j + i] = x[i]
        factor[0] = factor[1] = f32(NAN) if rows.invalid else scale
        put(u32(tile_smem + u32(me * PANEL_BYTES)), acc, factor)
        cuda.syncthreads()  # all rows are there
        row, column = (me * 64, 0) if SPLIT_ROWS else (0, me * 64)
        chunk = thread % 8
        for r in range(thread // 8, 64, 16):
            if row0 + row + r < queries and column + 8 * chunk < HEAD_DIM:
                at = me * PANEL_BYTES + r * 128 + (chunk ^ (r % 8)) * 16
                words = ptx.load_shared_words(u32(tile_smem + u32(at)))
                dq_row = dq[rows.b0, rows.b1, rows.head, rows.memory_row + row + r]
                to = u64(ptx.global_address(dq_row) + u64(2 * column + 16 * chunk))
                ptx.store_global(to, words)

    numbers = i64, i64, i64, f32
    signature = types.void(array(f32, 5), array(u32, 5), extras_type(options, LISTS), *numbers)
    return postprocess, signature, {"launch_bounds": (128 * tile.consumers, 2)}


def build_split(head_dim, options, tile):
    """Kernel ``postprocess_planes(dq_sum, dq, extras, nk, low, high, scale)``: dQ = scale dQ, of
    `dq_parts` the sum, out of the order of fragments; a block of threads per row block.

    Row blocks that see no key get 0: nobody has written their sum.
    """
    BLOCK_M, CONSUMERS, PARTS, PACKED = tile.block_m, tile.consumers, tile.dq_parts, options.packed
    CHUNKS, PART_BYTES = head_dim // 8, 4 * DQ_PART  # of parts that follow each other
    LOWERED, NAN = 2.0**-softmax.RAISED_BACKWARD, math.nan
    rows_of = schedule.build_rows(options, tile.block_m)

    def postprocess_planes(dq_sum, dq, extras, nk, low, high, scale):
        number = i64(cuda.blockIdx.x)
        rows = rows_of(number, extras, dq.shape, nk)
        row0, queries = rows.row0, rows.queries
        empty = see_no_key(rows, low, high, BLOCK_M)
        if not PACKED:
            queries = dq.shape[3]
        kv_head = rows.head // (dq.shape[2] // extras.factors.shape[2])
        of_head = extras.factors[index(rows.b0), index(rows.b1), index(kv_head)]
        of_dp = of_head[2] * of_head[3]
        factor = f32(NAN) if rows.invalid else f32(LOWERED) * scale * of_head[1]
        thread = i32(cuda.threadIdx.x)
        sums = u64(ptx.global_address(dq_sum) + u64(number * CONSUMERS * PART_BYTES + thread * 16))
        for j in range(CHUNKS):
            x = (f32(0), f32(0), f32(0), f32(0))
            if not empty:
                x = ptx.load_global_four(u64(sums + u64(2048 * j)))
                for part in range(1, PARTS):
                    y = ptx.load_global_four(u64(sums + u64(part * PART_BYTES + 2048 * j)))
                    x = (x[0] + y[0], x[1] + y[1], x[2] + y[2], x[3] + y[3])
            for r in range(2):
                i = row0 + wgmma.first_row() + 8 * r
                if i < queries:
                    dq_row = dq[
                        index(rows.b0),
                        index(rows.b1),
                        index(rows.head),
                        index(rows.memory_row - row0 + i),
                    ]
                    to = u64(ptx.global_address(dq_row) + u64(32 * j + 4 * first_column()))
                    pair = (x[2 * r] * of_dp * factor, x[2 * r + 1] * of_dp * factor)
                    ptx.store_global(to, pair)

    numbers = i64, i64, i64, f32
    signature = types.void(
        array(f32, 5), array(f32, 5), extras_type(options, more=FACTORS), *numbers
    )
    return postprocess_planes, signature, {"launch_bounds": (WARP_GROUP, 4)}
