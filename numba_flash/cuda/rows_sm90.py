"""What the backward pass on Hopper does before and after its main kernel, once per row of queries.

Row blocks have numbers of their own, ``((b0 * B1 + b1) * heads + head) * blocks + block``, and BLOCK_M rows each, full or not, so that a
block of rows begins at a multiple of 16 bytes wherever its sequence begins. Packed sequences count as in `schedule.packed_item`.
"""

import math

from numba import cuda
from numba.cuda import types

from numba_flash import mask
from numba_flash.cuda import mma, pipeline, ptx, schedule, scores
from numba_flash.cuda.swizzle import DQ_PART, panel_bytes

LOG2E = math.log2(math.e)
CHUNK = 8  # elements of 16 bits that a thread loads at a time


def _build_rows(options, block_m):
    """``rows(number, extras, shape, nk)`` of a row block: (b0, b1, head, first row in memory, first row in the sequence, its queries, its
    keys, how far the band shifts, NaN or 1)."""
    BLOCK_M, SEQUENCES, PACKED, OFFSETS = block_m, options.sequences, options.packed, scores.slots(options).q_lengths
    sequence = scores.build_sequence(options)

    @cuda.jit(device=True)
    def rows(number, extras, shape, nk):
        q0, queries, keys, move, factor = types.int64(0), types.int64(shape[3]), types.int64(nk), types.int64(0), 1.0
        if PACKED:
            b0, b1, head, block = schedule.packed_item(number, extras[OFFSETS], shape[3], BLOCK_M)
        else:
            blocks = (shape[3] + BLOCK_M - 1) // BLOCK_M
            block, head = number % blocks, number // blocks
            b1, head = head // shape[2], head % shape[2]
            b0, b1 = b1 // shape[1], b1 % shape[1]
        if SEQUENCES:
            q0, queries, _, keys, move, factor = sequence(extras, b0, b1, shape[3], nk)
        if PACKED:
            b1 = types.int64(0)
        return b0, b1, head, q0 + block * BLOCK_M, block * BLOCK_M, queries, keys, move, factor

    return rows


def build_prepare(dtype, head_dim_v, has_dlse, ordered, options, tile, threads):
    """Kernel ``prepare(do, o, lse, dlse, shifts, dq_sum, flags, extras, nk, ())`` of one block of threads per row block:

    lse2 = lse log2(e), but +inf for a row that saw nothing or does not exist, so that its P is 0,
    delta = rowsum(dO * O) - dlse, but 0 there, both in `shifts`,
    and flags = 0, one per row block and one more, if `ordered`, else dq_sum = 0, unless the tile leaves dQ to `numba_flash.cuda.dq_sm90`.
    """  # fmt: skip
    BLOCK_M, HAS_DLSE, THREADS = tile.block_m, has_dlse, threads
    FLAGS, ZEROS = ordered and tile.adds_dq, tile.adds_dq and not ordered
    CHUNKS, FOLDS = head_dim_v // CHUNK, (head_dim_v // CHUNK - 1).bit_length()
    LANES, BFLOAT16, INF = 1 << FOLDS, dtype == "bfloat16", math.inf  # LANES: threads per row
    SUM_BYTES, ROWS_BYTES, ACC, u64 = 4 * DQ_PART * tile.consumers, 4 * tile.block_m, types.float32, types.uint64
    rows = _build_rows(options, tile.block_m)

    @cuda.jit(device=True)
    def product(x, y):
        """Sum of the products of two pairs of elements."""
        high_x, high_y = types.uint32(x >> types.uint32(16)), types.uint32(y >> types.uint32(16))
        if BFLOAT16:
            return ptx.unpack_bfloat16(x) * ptx.unpack_bfloat16(y) + ptx.unpack_bfloat16(high_x) * ptx.unpack_bfloat16(high_y)
        return ptx.unpack_float16(x) * ptx.unpack_float16(y) + ptx.unpack_float16(high_x) * ptx.unpack_float16(high_y)

    def prepare(do, o, lse, dlse, shifts, dq_sum, flags, extras, nk, parameters):
        number = types.int64(cuda.blockIdx.x)
        b0, b1, h, memory_row, row0, queries, _, _, _ = rows(number, extras, lse.shape, nk)
        lane, first = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        lse2_address = ptx.global_address(shifts)
        delta_address = u64(lse2_address + u64(types.int64(cuda.gridDim.x) * ROWS_BYTES))
        for r in range(first, BLOCK_M, THREADS // LANES):
            there, total = row0 + r < queries, ACC(0)
            if there and lane < CHUNKS:
                x = ptx.load_global_words(u64(ptx.global_address(do[b0, b1, h, memory_row + r]) + u64(2 * CHUNK * lane)))
                y = ptx.load_global_words(u64(ptx.global_address(o[b0, b1, h, memory_row + r]) + u64(2 * CHUNK * lane)))
                for i in range(CHUNK // 2):
                    total += product(x[i], y[i])
            for fold in range(FOLDS):
                total += cuda.shfl_xor_sync(pipeline.ALL_LANES, total, 1 << fold)
            if lane == 0:
                shift, value = ACC(INF), ACC(0)
                if there and lse[b0, b1, h, memory_row + r] != ACC(-INF):
                    shift, value = lse[b0, b1, h, memory_row + r] * ACC(LOG2E), total
                    if HAS_DLSE:
                        value -= dlse[b0, b1, h, memory_row + r]
                at = u64((number * BLOCK_M + r) * 4)
                ptx.store_global(u64(lse2_address + at), (shift,))
                ptx.store_global(u64(delta_address + at), (value,))
        if FLAGS:
            if cuda.threadIdx.x == 0:
                ptx.store_global(u64(ptx.global_address(flags) + u64(number * 4)), (types.uint32(0),))
                if number == 0:
                    ptx.store_global(u64(ptx.global_address(flags) + u64(4 * cuda.gridDim.x)), (types.uint32(0),))
        if ZEROS:
            zero = ACC(0)
            sum_address = ptx.global_address(dq_sum) + u64(number * SUM_BYTES)
            for i in range(cuda.threadIdx.x * 16, SUM_BYTES, THREADS * 16):
                ptx.store_global(u64(sum_address + u64(i)), (zero, zero, zero, zero))

    array = lambda kind, ndim: types.Array(kind, ndim, "A")
    extras, *_ = scores.kernel_arguments(options, ())
    results = array(ACC, 5), array(ACC, 5), array(types.int32, 1)
    operands = array(types.uint32, 5), array(types.uint32, 5), array(ACC, 4), array(ACC, 4), *results
    return prepare, types.void(*operands, extras, types.int64, types.Tuple([])), {"launch_bounds": (threads, 2)}


def build_finish(dtype, head_dim, options, tile):
    """Kernel ``finish(dq_sum, dq, extras, nk, low, high, scales)``: dQ = scale dQ, out of the order of fragments, rounded.

    `dq` is seen as words of two elements. Row blocks that see no key get 0: nobody has written their sum.
    """
    BLOCK_M, CONSUMERS, SPLIT_ROWS, PACKED = tile.block_m, tile.consumers, tile.splits_rows, options.packed
    HEAD_DIM, PANEL_BYTES, ROOM, PART_BYTES = head_dim, panel_bytes(64), tile.consumers * panel_bytes(64), 4 * DQ_PART
    ACC, u32, u64 = types.float32, types.uint32, types.uint64
    put = mma.build_put(64, 0, 1, dtype == "bfloat16")
    rows = _build_rows(options, tile.block_m)

    def finish(dq_sum, dq, extras, nk, low, high, scales):
        number = types.int64(cuda.blockIdx.x)
        b0, b1, h, memory_row, row0, queries, keys, move, factor = rows(number, extras, dq.shape, nk)
        start, stop = mask.kv_range(row0, min(row0 + BLOCK_M, queries), keys, low + move, high + move)
        empty = start >= stop or row0 >= queries
        if not PACKED:
            queries = dq.shape[3]
        room = ptx.shared_address(cuda.shared.array(ROOM, types.uint8, 1024))
        me, thread = types.int32(cuda.threadIdx.x // 128), types.int32(cuda.threadIdx.x % 128)
        sums = u64(ptx.global_address(dq_sum) + u64((number * CONSUMERS + me) * PART_BYTES + thread * 16))
        acc, scale = cuda.local.array(32, ACC), cuda.local.array(2, ACC)
        for j in range(8):
            x = (ACC(0), ACC(0), ACC(0), ACC(0))
            if not empty:
                x = ptx.load_global_four(u64(sums + u64(2048 * j)))
            for i in range(4):
                acc[4 * j + i] = x[i]
        scale[0] = scale[1] = scales[0] * ACC(factor)
        put(u32(room + u32(me * PANEL_BYTES)), acc, scale)
        cuda.syncthreads()  # all rows are there
        row, column = (me * 64, 0) if SPLIT_ROWS else (0, me * 64)
        chunk = thread % 8
        for r in range(thread // 8, 64, 16):
            if row0 + row + r < queries and column + 8 * chunk < HEAD_DIM:
                words = ptx.load_shared_words(u32(room + u32(me * PANEL_BYTES + r * 128 + (chunk ^ (r % 8)) * 16)))
                ptx.store_global(u64(ptx.global_address(dq[b0, b1, h, memory_row + row + r]) + u64(2 * column + 16 * chunk)), words)

    array = lambda kind, ndim: types.Array(kind, ndim, "A")
    extras, *_ = scores.kernel_arguments(options, ())
    numbers = types.int64, types.int64, types.int64, types.UniTuple(types.float32, 1)
    return finish, types.void(array(ACC, 5), array(types.uint32, 5), extras, *numbers), {"launch_bounds": (128 * tile.consumers, 2)}
