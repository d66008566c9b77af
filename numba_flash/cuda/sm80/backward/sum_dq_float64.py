"""dQ of the backward pass of float64, which blocks of keys add up in memory as
`numba_flash.cuda.sm80.backward.sum_dq` says, but for the size of a number, and that one is added at
a time.
"""

import math

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, f64, i32, i64, inline, once, types, u32, u64
from numba_flash.cuda.score import softmax
from numba_flash.cuda.score.fragment import first_column
from numba_flash.cuda.sm80.backward.sum_dq import lists_of
from numba_flash.cuda.sm80.operands import products_float64 as products
from numba_flash.cuda.sm80.operands.float64_tiles import BYTES
from numba_flash.cuda.work import schedule, tile_lists


@once
def build_place(tile):
    """``place(e)``: bytes from a tile's sums to that of this thread's register e."""
    THREADS = tile.threads

    @inline
    def place(e):
        return u64((i64(e) * THREADS + i64(ptx.thread_here())) * BYTES)

    return place


@once
def build_add(shape, ordered, tile):
    """``add(ds, k, dq_sum, to)``: dQ = dQ + dS K, from tiles of dS^T and K in shared memory; to a
    `numba_flash.cuda.sm80.backward.sum_dq.Sum`.
    """
    BLOCK_M, D, ORDERED = tile.block_m, tile.padded(shape.head_dim), ordered
    WARPS_N, DQ_BYTES = tile.warps // tile.dq, BYTES * tile.block_m * tile.padded(shape.head_dim)
    ROWS, COLUMNS = BLOCK_M // tile.dq, D // WARPS_N
    COUNT, STRIDE = ROWS * COLUMNS // 32, BYTES * tile.threads
    SMEM = tile.layout(shape.head_dim, shape.head_dim_v)
    pitches = SMEM.pitch_ds, SMEM.pitch_k
    product = products.build_tn(ROWS // 16, COLUMNS, tile.block_n, *pitches, tile.terms)
    place = build_place(tile)

    @inline
    def add(ds, k, dq_sum, to):
        acc = cuda.local.array(COUNT, f64)  # registers: fragment of dQ
        warp = i32(ptx.thread_here() // 32)
        row, column = i32(warp // WARPS_N * ROWS), i32(warp % WARPS_N * COLUMNS)
        sums = u64(ptx.global_address(dq_sum) + u64(u32(to.number)) * u64(DQ_BYTES))
        product(acc, u32(ds + u32(row * BYTES)), u32(k + u32(column * BYTES)))
        mine = u64(sums + place(i32(0)))
        if ORDERED and to.first:
            for e in range(COUNT):
                ptx.store_global_float64(u64(mine + u64(e * STRIDE)), acc[e])
        else:
            for e in range(COUNT):
                ptx.add_float64(u64(mine + u64(e * STRIDE)), acc[e])

    return add


def build_postprocess(dtype, shape, ordered, options, tile, has_dlse=False):
    """Kernel ``postprocess_sm80(dq_sum, dq, extras, nk, low, high, scale)``: dQ = scale dQ, out of
    the order of fragments.

    Row blocks that see no key get 0: nobody has written their sum.
    """
    D, BLOCK_M, BLOCK_N = tile.padded(shape.head_dim), tile.block_m, tile.block_n
    WARPS_N, DQ_BYTES = tile.warps // tile.dq, BYTES * BLOCK_M * D
    ROWS, COLUMNS = BLOCK_M // tile.dq, D // WARPS_N
    COUNT, ROWS_HELD = ROWS * COLUMNS // 32, ROWS // 8
    PACKED, NAN = options.packed, math.nan
    IN_ORDER, SHARE = ordered and options.tiled, tile.share
    store = products.build_store(ROWS // 16, COLUMNS, shape.wide)
    zero, _ = softmax.build_zero(COUNT)
    place = build_place(tile)
    rows_of = schedule.build_rows(options, BLOCK_M)

    def postprocess_sm80(dq_sum, dq, extras, nk, low, high, scale):
        acc = cuda.local.array(COUNT, f64)  # registers: fragment of dQ
        factor = cuda.local.array(ROWS_HELD, f64)
        number = i64(cuda.blockIdx.x)
        rows = rows_of(number, extras, dq.shape, nk)
        row0, queries = i32(rows.row0), i32(rows.queries)
        start, stop = mask.kv_range(
            row0, min(row0 + BLOCK_M, queries), rows.keys, low + rows.shift, high + rows.shift
        )
        some = row0 < queries and start < stop
        if IN_ORDER:
            of_head, at = extras.order[rows.b0, rows.b1, rows.head], i32(row0 // BLOCK_M)
            after_all = of_head[index(of_head.shape[0] - 1), index(at // SHARE)]
            some = some and not tile_lists.is_first(after_all, at % SHARE)
        copies, block = u32(dq_sum.shape[4]) // u32(BLOCK_M * D), u32(start) // u32(BLOCK_N)
        summed = u32(0)
        if some:
            summed = min(copies, u32(u32(stop - 1) // u32(BLOCK_N) - block + u32(1)))
        sums = u64(ptx.global_address(dq_sum) + u64(number * DQ_BYTES) * u64(copies))
        for r in range(ROWS_HELD):
            factor[r] = f64(NAN) if rows.invalid else scale
        warp = i32(cuda.threadIdx.x // 32)
        row, column = i32(warp // WARPS_N * ROWS), i32(warp % WARPS_N * COLUMNS)
        dq_head, last = dq[rows.b0, rows.b1, rows.head], i32(dq.shape[3])
        if PACKED:
            dq_head, last = dq_head[rows.memory_row - rows.row0 :], queries
        zero(acc)
        for n in range(summed):
            copy = u64(sums + u64((block + n) % copies) * u64(DQ_BYTES))
            for e in range(COUNT):
                acc[e] += ptx.load_global_float64(u64(copy + place(i32(e))))
        first, column = i32(row0 + row + products.first_row()), i32(column + first_column())
        store(products.Stored(dq_head, acc, factor, first, column, last))

    signature = types.void(
        *(array(f64, 5), array(f64, 5), extras_type(options, lists_of(ordered))),
        *(i64, i64, i64, f64),
    )
    return postprocess_sm80, signature, {"launch_bounds": (tile.threads, 1)}
