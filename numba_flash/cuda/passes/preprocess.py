"""Before a backward pass on tensor cores, once per row of queries (FlashAttention-2, Algorithm 2,
line 4).
"""

import math
import sys
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import BASE_E, RAISED_BASE_2, extras_type
from numba_flash.cuda.arguments import FP16X2 as FP16X2_EXTRAS
from numba_flash.cuda.config import PreprocessConfig
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime import early
from numba_flash.cuda.runtime.lang import cuda, device, f32, f64, i32, i64, inline, types, u32, u64
from numba_flash.cuda.score.fragment import ALL_LANES
from numba_flash.cuda.score.softmax import raised_backward
from numba_flash.cuda.work import schedule

LOG2E = math.log2(math.e)
LEAST_FLOAT32 = -float.fromhex("0x1.fffffep127")
CHUNK_BYTES = 16  # that a thread loads at a time
# Rows whose chunks a thread has asked for before it looks at the first: memory is waited for once,
# for so many registers. One row after the other takes over a quarter longer. Measured:
# docs/lab/any_gpu.md, `MOST_AT_ONCE`.
MOST_AT_ONCE = 4


class RowWords(NamedTuple):
    """What a thread has of some rows, which are as far apart as the strides say.

    Attributes
    ----------
    words, total : array
        Chunks of dO and O of each row, and the sum of the products of that whose number is the
        lane's; registers.
    lane : int
        The thread's place among those of a row.
    do, o, do_stride, o_stride : int
        Address of its chunk of the first row, and bytes from one row to the next.
    step, rows : int
        The same distance in rows, and how many rows there are from the first one on.
    """

    words: Any
    total: Any
    lane: int
    do: int
    o: int
    do_stride: int
    o_stride: int
    step: int
    rows: int


def build(config: PreprocessConfig):
    """Kernel ``preprocess(do, o, lse, dlse, rows, dq_sum, flags, extras, nk)`` of one block of
    threads per row block:

    lse2 = lse log2(e), or lse if ``config.lse_in`` is BASE_E, but +inf for a row that saw nothing
    or does not exist, so that its P is 0; rounded up, so that P of a large lse is not too large,
    delta = rowsum(dO * O) - dlse, but 0 there, both in `rows`,
    and flags = 0, one per row block, or as many for each with ``config.copies``, and one more, and
    unless it is ordered dq_sum = 0, ``config.sum_bytes`` of each row block; neither if that is 0.

    If it is RAISED_BASE_2, lse2 is lower by `numba_flash.cuda.score.softmax.raised_backward`, and
    delta is divided by that power of two: what is made of them is a larger P, and dS as it is.

    Float32 is split (`numba_flash.cuda.passes.write_planes`): the lse is that of keys without their
    centre, o is without that of the values, and delta is in units of the products of planes.

    do, o : (b0, b1, heads, nq, head_dim_v); of rows of whole chunks
        a warp has a thread for each chunk, and asks for several rows at once.
        Float64 is read one by one.
    lse, dlse : float32 (b0, b1, heads, nq), of float64 that, as all that follows.
    rows : float32 (2, b0, b1, heads, row blocks * BLOCK_M).
    dq_sum, flags : as in `numba_flash.cuda.sm90.backward.backward.build`'s kernel.
    """
    dtype, head_dim_v, options, lse_in = config.dtype, config.dv, config.options, config.lse_in
    block_m, threads, sum_bytes = config.block_m, config.threads, config.sum_bytes
    BLOCK_M, HAS_DLSE, THREADS = block_m, config.dlse, threads
    FP16X2, DOUBLE = dtype == "float32", dtype == "float64"
    ACC = f64 if DOUBLE else f32
    ELEMENT = ACC if FP16X2 or DOUBLE else types.uint16
    CHUNKED = chunked = config.chunked and not DOUBLE
    FLAGS, ZEROS = sum_bytes > 0, sum_bytes > 0 and not config.ordered
    COPIES, EARLY = config.copies, config.early
    CHUNK = CHUNK_BYTES // (4 if FP16X2 else 2)  # elements
    CHUNKS = -(-head_dim_v // CHUNK)
    FOLDS = (CHUNKS - 1).bit_length() if chunked or FP16X2 else 5
    LANES, HEAD_DIM_V, INF = 1 << FOLDS, head_dim_v, math.inf  # LANES: threads per row
    SUM_BYTES, BYTES, UNIT = sum_bytes, ACC.bitwidth // 8, 1.0 if lse_in == BASE_E else LOG2E
    RAISED = raised_backward(dtype == "bfloat16") if lse_in == RAISED_BASE_2 else 0.0
    IN_BASE_2, LOWERED = lse_in != BASE_E and not DOUBLE, 2.0**-RAISED
    ROWS_BYTES, LEAST = BYTES * block_m, -sys.float_info.max if DOUBLE else LEAST_FLOAT32
    STEP = threads // LANES  # rows that a block has a thread for each chunk of
    BATCHED = chunked and not FP16X2
    AT_ONCE = max(1, min(MOST_AT_ONCE, LANES, block_m // STEP)) if BATCHED else 1
    rows_of = schedule.build_rows(options, block_m)
    WORDS, fetch = 8 * AT_ONCE, ptx.fetch(4, config.early)
    load = ptx.load_global_four if FP16X2 else ptx.load_global_words
    unpack = ptx.unpack_bfloat16 if dtype == "bfloat16" else ptx.unpack_float16

    @device
    def product(x, y):
        """Sum of the products of two pairs of elements."""
        high_x, high_y = u32(x >> u32(16)), u32(y >> u32(16))
        return unpack(x) * unpack(y) + unpack(high_x) * unpack(high_y)

    @inline
    def fetch_row(n, x):
        there = u32(1) if n * x.step < x.rows else u32(0)
        fetch(x.words, i32(8 * n), u64(x.do + u64(n * x.do_stride)), there)
        fetch(x.words, i32(8 * n + 4), u64(x.o + u64(n * x.o_stride)), there)

    @inline
    def add_row(n, x):
        total = ACC(0)
        for i in range(4):
            total += product(x.words[8 * n + i], x.words[8 * n + 4 + i])
        for fold in range(FOLDS):
            total += cuda.shfl_xor_sync(ALL_LANES, total, 1 << fold)
        x.total[0] = total if x.lane == n else x.total[0]

    fetch_rows, add_rows = ptx.repeated(AT_ONCE, fetch_row), ptx.repeated(AT_ONCE, add_row)

    def preprocess(do, o, lse, dlse, rows, dq_sum, flags, extras, nk):
        if EARLY:
            early.begin()
        number = i64(cuda.blockIdx.x)
        at = rows_of(number, extras, lse.shape, nk)
        b0, b1, h, first_row = at.b0, at.b1, at.head, at.memory_row
        lane, first = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        if FP16X2:
            kv_head = h // (lse.shape[2] // extras.factors.shape[2])
            factors, centre = extras.factors[b0, b1, kv_head], extras.centres[1, b0, b1, kv_head]
            own_centre = cuda.local.array(CHUNK, f32)  # of the columns of this thread's chunk
            for e in range(CHUNK):
                d = lane * CHUNK + e
                own_centre[e] = centre[index(d)] if d < HEAD_DIM_V else f32(0)
        lse2_address = ptx.global_address(rows)
        delta_address = u64(lse2_address + u64(i64(cuda.gridDim.x) * ROWS_BYTES))
        words = cuda.local.array(WORDS, u32)  # registers
        own_total = cuda.local.array(1, ACC)
        for r0 in range(first, BLOCK_M, STEP * AT_ONCE):
            r = r0 + lane * STEP if BATCHED else r0  # a row of this thread
            there, total = at.row0 + r < at.queries, ACC(0)
            if BATCHED:
                left = i32(min(BLOCK_M, at.queries - at.row0) - r0) if lane < CHUNKS else i32(0)
                own, mine = first_row + r0, u64(CHUNK_BYTES * lane)
                do_at = u64(ptx.global_address(do[b0, b1, h, own]) + mine)
                o_at = u64(ptx.global_address(o[b0, b1, h, own]) + mine)
                apart = i64(do.strides[3] * STEP), i64(o.strides[3] * STEP)
                held = RowWords(words, own_total, i32(lane), do_at, o_at, *apart, i32(STEP), left)
                fetch_rows(held)
                own_total[0] = ACC(0)
                add_rows(held)
                total = own_total[0]
            if there and not CHUNKED:
                do_row, o_row = do[b0, b1, h, first_row + r], o[b0, b1, h, first_row + r]
                if FP16X2:  # in the same order
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
            if there and CHUNKED and FP16X2 and lane < CHUNKS:
                do_row, o_row = do[b0, b1, h, first_row + r], o[b0, b1, h, first_row + r]
                mine = u64(CHUNK_BYTES * lane)
                x = load(u64(ptx.global_address(do_row) + mine))
                y = load(u64(ptx.global_address(o_row) + mine))
                for i in range(4):
                    total += x[i] * (y[i] - own_centre[i])
            if not BATCHED:
                for fold in range(FOLDS):
                    total += cuda.shfl_xor_sync(ALL_LANES, total, 1 << fold)
            if lane < AT_ONCE and r < BLOCK_M:
                shift, delta = ACC(INF), ACC(0)
                if there and lse[b0, b1, h, first_row + r] != ACC(-INF):
                    shift, delta = lse[b0, b1, h, first_row + r], total
                    if HAS_DLSE:
                        delta -= dlse[b0, b1, h, first_row + r]
                    if FP16X2:
                        shift -= extras.shifts[b0, b1, h, first_row + r]
                        delta /= factors[2] * factors[3]
                    delta *= ACC(LOWERED)
                    if IN_BASE_2:
                        shift = ptx.fma_up(shift, f32(UNIT), f32(-RAISED))
                    else:
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
        extras_type(options, more=FP16X2_EXTRAS if FP16X2 else ()),
        i64,
    )
    return preprocess, signature, {"launch_bounds": (threads, 4 if BATCHED else 2)}
