"""What the backward pass of float32 on Hopper does after its main kernel: dQ from the consumers'
parts of it.
"""

import math

from numba_flash import mask
from numba_flash.cuda import ptx, schedule, softmax
from numba_flash.cuda.arguments import FACTORS, extras_type
from numba_flash.cuda.fragment import first_column
from numba_flash.cuda.lang import cuda, f32, i32, i64, types, u64
from numba_flash.cuda.number import array, index
from numba_flash.cuda.sm90 import wgmma
from numba_flash.cuda.sm90.tiles import DQ_PART, WARP_GROUP


def build(head_dim, options, tile):
    """Kernel ``postprocess_split(dq_sum, dq, extras, nk, low, high, scale)``: dQ = scale dQ, of
    `dq_parts` the sum, out of the order of fragments; a block of threads per row block.

    Row blocks that see no key get 0: nobody has written their sum.
    """
    BLOCK_M, CONSUMERS, PARTS, PACKED = tile.block_m, tile.consumers, tile.dq_parts, options.packed
    CHUNKS, PART_BYTES = head_dim // 8, 4 * DQ_PART  # of parts that follow each other
    LOWERED, NAN = 2.0**-softmax.RAISED_BACKWARD, math.nan
    rows_of = schedule.build_rows(options, tile.block_m)

    def postprocess_split(dq_sum, dq, extras, nk, low, high, scale):
        number = i64(cuda.blockIdx.x)
        rows = rows_of(number, extras, dq.shape, nk)
        row0, queries, keys = rows.row0, rows.queries, rows.keys
        low, high = low + rows.shift, high + rows.shift
        start, stop = mask.kv_range(row0, min(row0 + BLOCK_M, queries), keys, low, high)
        empty = start >= stop or row0 >= queries
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
    return postprocess_split, signature, {"launch_bounds": (WARP_GROUP, 4)}
