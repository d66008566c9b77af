"""Before a backward pass on tensor cores, once per row of queries (FlashAttention-2, Algorithm 2,
line 4).
"""

import math
import sys

from numba_flash.cuda import ptx, schedule
from numba_flash.cuda.arguments import SPLIT as SPLIT_EXTRAS
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.fragment import ALL_LANES
from numba_flash.cuda.lang import cuda, device, f32, f64, i32, i64, types, u32, u64
from numba_flash.cuda.number import array, index

LOG2E = math.log2(math.e)
LEAST_FLOAT32 = -float.fromhex("0x1.fffffep127")
CHUNK_BYTES = 16  # that a thread loads at a time


def build(
    dtype,
    head_dim_v,
    has_dlse,
    block_m,
    sum_bytes,
    ordered,
    chunked,
    base_2,
    options,
    threads,
    copies=False,
):
    """Kernel ``preprocess(do, o, lse, dlse, rows, dq_sum, flags, extras, nk)`` of one block of
    threads per row block:

    lse2 = lse log2(e), or lse unless in `base_2`, but +inf for a row that saw nothing or does not
    exist, so that its P is 0,
    delta = rowsum(dO * O) - dlse, but 0 there, both in `rows`,
    and flags = 0, one per row block, or as many for each with `copies`, and one more, if `ordered`,
    else dq_sum = 0, `sum_bytes` of each row block; neither if that is 0.

    Float32 is split (`numba_flash.cuda.split`): the lse is that of keys without their centre, o is
    without that of the values, and delta is in units of the products of planes.

    do, o : (b0, b1, heads, nq, head_dim_v); `chunked`: rows are whole chunks of 16 bytes.
        A warp has a thread for each chunk.
        Float64 is read one by one.
    lse, dlse : float32 (b0, b1, heads, nq), of float64 that, as all that follows.
    rows : float32 (2, b0, b1, heads, row blocks * BLOCK_M).
    dq_sum, flags : as in `numba_flash.cuda.sm90.backward.build`'s kernel.
    """
    BLOCK_M, HAS_DLSE, THREADS = block_m, has_dlse, threads
    SPLIT, DOUBLE = dtype == "float32", dtype == "float64"
    ACC = f64 if DOUBLE else f32
    ELEMENT = ACC if SPLIT or DOUBLE else types.uint16
    CHUNKED = chunked = chunked and not DOUBLE
    FLAGS, ZEROS, COPIES = ordered and sum_bytes > 0, sum_bytes > 0 and not ordered, copies
    CHUNK = CHUNK_BYTES // (4 if SPLIT else 2)  # elements
    CHUNKS = -(-head_dim_v // CHUNK)
    FOLDS = (CHUNKS - 1).bit_length() if chunked or SPLIT else 5
    LANES, HEAD_DIM_V, INF = 1 << FOLDS, head_dim_v, math.inf  # LANES: threads per row
    SUM_BYTES, BYTES, UNIT = sum_bytes, ACC.bitwidth // 8, LOG2E if base_2 else 1.0
    ROWS_BYTES, LEAST = BYTES * block_m, -sys.float_info.max if DOUBLE else LEAST_FLOAT32
    rows_of = schedule.build_rows(options, block_m)
    load = ptx.load_global_four if SPLIT else ptx.load_global_words
    unpack = ptx.unpack_bfloat16 if dtype == "bfloat16" else ptx.unpack_float16

    @device
    def product(x, y):
        """Sum of the products of two pairs of elements."""
        high_x, high_y = u32(x >> u32(16)), u32(y >> u32(16))
        return unpack(x) * unpack(y) + unpack(high_x) * unpack(high_y)

    def preprocess(do, o, lse, dlse, rows, dq_sum, flags, extras, nk):
        number = i64(cuda.blockIdx.x)
        at = rows_of(number, extras, lse.shape, nk)
        b0, b1, h, first_row = at.b0, at.b1, at.head, at.memory_row
        lane, first = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        if SPLIT:
            kv_head = h // (lse.shape[2] // extras.factors.shape[2])
            factors, centre = extras.factors[b0, b1, kv_head], extras.centres[1, b0, b1, kv_head]
            own_centre = cuda.local.array(CHUNK, f32)  # of the columns of this thread's chunk
            for e in range(CHUNK):
                d = lane * CHUNK + e
                own_centre[e] = centre[index(d)] if d < HEAD_DIM_V else f32(0)
        lse2_address = ptx.global_address(rows)
        delta_address = u64(lse2_address + u64(i64(cuda.gridDim.x) * ROWS_BYTES))
        for r in range(first, BLOCK_M, THREADS // LANES):
            there, total = at.row0 + r < at.queries, ACC(0)
            if there and not CHUNKED:
                do_row, o_row = do[b0, b1, h, first_row + r], o[b0, b1, h, first_row + r]
                if SPLIT:  # in the same order
                    for e in range(CHUNK):
                        d = lane * CHUNK + e
                        if d < HEAD_DIM_V:
                            total += do_row[index(d)] * (o_row[index(d)] - own_centre[e])
                elif DOUBLE:
                    for d in range(lane, HEAD_DIM_V, LANES):
                        total += do_row[index(d)] * o_row[index(d)]
                else:
                    for d in range(lane, HEAD_DIM_V, LANES):
                        total += unpack(u32(do_row[index(d)])) * unpack(u32(o_row[index(d)]))
            if there and CHUNKED and lane < CHUNKS:
                do_row, o_row = do[b0, b1, h, first_row + r], o[b0, b1, h, first_row + r]
                mine = u64(CHUNK_BYTES * lane)
                x = load(u64(ptx.global_address(do_row) + mine))
                y = load(u64(ptx.global_address(o_row) + mine))
                for i in range(4):
                    total += x[i] * (y[i] - own_centre[i]) if SPLIT else product(x[i], y[i])
            for fold in range(FOLDS):
                total += cuda.shfl_xor_sync(ALL_LANES, total, 1 << fold)
            if lane == 0:
                shift, delta = ACC(INF), ACC(0)
                if there and lse[b0, b1, h, first_row + r] != ACC(-INF):
                    shift, delta = lse[b0, b1, h, first_row + r], total
                    if HAS_DLSE:
                        delta -= dlse[b0, b1, h, first_row + r]
                    if SPLIT:
                        shift -= extras.shifts[b0, b1, h, first_row + r]
                        delta /= factors[2] * factors[3]
                    shift *= ACC(UNIT)
                    if shift < ACC(LEAST):
                        shift = ACC(LEAST)
                offset = u64((number * BLOCK_M + r) * BYTES)
                if DOUBLE:
                    ptx.store_global_float64(u64(lse2_address + offset), shift)
                    ptx.store_global_float64(u64(delta_address + offset), delta)
                else:
                    ptx.store_global(u64(lse2_address + offset), (shift,))
                    ptx.store_global(u64(delta_address + offset), (delta,))
        if FLAGS:
            address, each, last = ptx.global_address(flags), i64(1), i64(cuda.gridDim.x)
            if COPIES:
                last = i64(flags.shape[0] - 1)
                each = i64(u32(last) // u32(cuda.gridDim.x))
            if cuda.threadIdx.x < each:
                own = i64(number * each + cuda.threadIdx.x)
                ptx.store_global(u64(address + u64(own * 4)), (u32(0),))
                if own == 0:
                    ptx.store_global(u64(address + u64(last * 4)), (u32(0),))
        if ZEROS:
            zero = f32(0)
            sum_address = ptx.global_address(dq_sum) + u64(number * SUM_BYTES)
            for i in range(cuda.threadIdx.x * 16, SUM_BYTES, THREADS * 16):
                ptx.store_global(u64(sum_address + u64(i)), (zero, zero, zero, zero))

    signature = types.void(
        *[array(ELEMENT, 5)] * 2,
        *[array(ACC, 4)] * 2,
        *[array(ACC, 5)] * 2,
        array(i32, 1),
        extras_type(options, more=SPLIT_EXTRAS if SPLIT else ()),
        i64,
    )
    return preprocess, signature, {"launch_bounds": (threads, 2)}
