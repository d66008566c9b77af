"""Results over all keys from results over parts of them: attention to a union is the mean of that
to its parts, weighted by exp(lse).
"""

import math

from numba_flash.cuda.number import STORAGE, array, build_convert, index
from numba_flash.cuda.runtime.lang import cuda, i32, types

LANES = 32


def build(dtype, head_dim_v, write_lse, kv_splits, rows):
    """Kernel ``combine(o_splits, lse_splits, o, lse, extras)``: one warp per row of o (b0, b1,
    heads, n, head_dim_v).

    The parts are float32; part p of batch element b0 lies at ``p * o.shape[0] + b0`` of their first
    axis.
    """
    HEAD_DIM_V, WRITE_LSE, KV_SPLITS, ROWS = head_dim_v, write_lse, kv_splits, rows
    ACC, NEG_INF = types.float32, -math.inf
    _, store = build_convert(dtype)

    def combine(o_splits, lse_splits, o, lse, extras):
        lane = cuda.threadIdx.x % LANES
        row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // LANES
        i, row = row % o.shape[3], row // o.shape[3]
        h, row = row % o.shape[2], row // o.shape[2]
        b1, b0 = row % o.shape[1], row // o.shape[1]
        if b0 < o.shape[0]:
            # lse = log sum_p exp(lse_p); a row that saw nothing in any part is shifted by 0
            largest = ACC(NEG_INF)
            for p in range(KV_SPLITS):
                b = p * o.shape[0] + b0
                largest = max(largest, lse_splits[index(b), index(b1), index(h), index(i)])
            shift = largest if largest != ACC(NEG_INF) else ACC(0)
            total = ACC(0)
            for p in range(KV_SPLITS):
                b = p * o.shape[0] + b0
                total += math.exp(lse_splits[index(b), index(b1), index(h), index(i)] - shift)
            # o = sum_p exp(lse_p - lse) o_p
            inverse = ACC(0) if total == ACC(0) else ACC(1) / total
            for d in range(lane, HEAD_DIM_V, LANES):
                value = ACC(0)
                for p in range(KV_SPLITS):
                    b = p * o.shape[0] + b0
                    lse_part = lse_splits[index(b), index(b1), index(h), index(i)]
                    weight = math.exp(lse_part - shift) * inverse
                    value += weight * o_splits[index(b), index(b1), index(h), index(i), index(d)]
                o[index(b0), index(b1), index(h), index(i), index(d)] = store(value)
            if WRITE_LSE and lane == 0:
                lse[index(b0), index(b1), index(h), index(i)] = shift + math.log(total)

    operands = array(ACC, 5), array(ACC, 4), array(dtype, 5), array(ACC, 4)
    return combine, types.void(*operands, types.Tuple(())), {"launch_bounds": (rows * LANES, 1)}


def build_many(accumulator, dtype, head_dim_v, write_lse, warps):
    """Kernel ``combine_many(o_splits, lse_splits, o, lse, extras, kv_splits)``: the same of many
    parts, as many as the host says, in `accumulator`; a block per row, whose warps share them.
    """
    HEAD_DIM_V, WRITE_LSE, WARPS, THREADS = head_dim_v, write_lse, warps, warps * LANES
    COLUMNS = -(-head_dim_v // LANES)  # of a lane
    ACC, NEG_INF = STORAGE[accumulator], -math.inf
    _, store = build_convert(dtype)

    def combine_many(o_splits, lse_splits, o, lse, extras, kv_splits):
        sums = cuda.shared.array((WARPS, HEAD_DIM_V), ACC)  # of each warp, of o
        weights = cuda.shared.array(WARPS, ACC)  # of each warp
        largest = cuda.shared.array((WARPS, LANES), ACC)  # lse that a thread has seen
        acc = cuda.local.array(COLUMNS, ACC)
        thread = i32(cuda.threadIdx.x)
        warp, lane, row = thread // LANES, thread % LANES, cuda.blockIdx.x
        i, row = index(row % o.shape[3]), row // o.shape[3]
        h, row = index(row % o.shape[2]), row // o.shape[2]
        b1, b0 = index(row % o.shape[1]), row // o.shape[1]
        kv_splits, b0s = i32(kv_splits), o.shape[0]
        # a row that saw nothing in any part is shifted by 0
        m = ACC(NEG_INF)
        for p in range(thread, kv_splits, THREADS):
            m = max(m, lse_splits[index(p * b0s + b0), b1, h, i])
        largest[warp, lane] = m
        cuda.syncthreads()  # every thread's is there
        if warp == 0:
            for w in range(WARPS):
                m = max(m, largest[w, lane])
            largest[0, lane] = m
        cuda.syncthreads()  # the first warp's are of all
        for other in range(LANES):
            m = max(m, largest[0, other])
        shift, total = m if m != ACC(NEG_INF) else ACC(0), ACC(0)
        # (1) l = sum_p exp(lse_p), (2) O = sum_p exp(lse_p) O_p
        for c in range(COLUMNS):
            acc[c] = ACC(0)
        for p in range(warp, kv_splits, WARPS):
            part = index(p * b0s + b0)
            weight = math.exp(lse_splits[part, b1, h, i] - shift)
            total += weight
            for c in range(COLUMNS):
                d = lane + c * LANES
                if d < HEAD_DIM_V:
                    acc[c] += weight * o_splits[part, b1, h, i, index(d)]
        for c in range(COLUMNS):
            d = lane + c * LANES
            if d < HEAD_DIM_V:
                sums[warp, d] = acc[c]
        if lane == 0:
            weights[warp] = total
        cuda.syncthreads()  # all sums are there
        total = ACC(0)
        for w in range(WARPS):
            total += weights[w]
        inverse = ACC(0) if total == ACC(0) else ACC(1) / total
        for d in range(thread, HEAD_DIM_V, THREADS):
            value = ACC(0)
            for w in range(WARPS):
                value += sums[w, d]
            o[index(b0), b1, h, i, index(d)] = store(value * inverse)
        if WRITE_LSE and thread == 0:
            seen = total != ACC(0)
            lse[index(b0), b1, h, i] = shift + math.log(total) if seen else ACC(NEG_INF)

    operands = array(ACC, 5), array(ACC, 4), array(dtype, 5), array(ACC, 4)
    signature = types.void(*operands, types.Tuple(()), types.int64)
    return combine_many, signature, {"launch_bounds": (THREADS, 1)}
