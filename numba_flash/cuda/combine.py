"""Results over all keys from results over parts of them: attention to a union is the mean of that
to its parts, weighted by exp(lse).
"""

import math

from numba_flash.cuda.lang import cuda, types
from numba_flash.cuda.number import array, build_convert, index

LANES = 32


def build(dtype, head_dim_v, write_lse, parts, rows):
    """Kernel ``combine(o_parts, lse_parts, o, lse, extras)``: one warp per row of o (b0, b1, heads,
    n, head_dim_v).

    The parts are float32; part p of batch element b0 lies at ``p * o.shape[0] + b0`` of their first
    axis.
    """
    HEAD_DIM_V, WRITE_LSE, PARTS, ROWS = head_dim_v, write_lse, parts, rows
    ACC, NEG_INF = types.float32, -math.inf
    _, store = build_convert(dtype)

    def combine(o_parts, lse_parts, o, lse, extras):
        lane = cuda.threadIdx.x % LANES
        row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // LANES
        i, row = row % o.shape[3], row // o.shape[3]
        h, row = row % o.shape[2], row // o.shape[2]
        b1, b0 = row % o.shape[1], row // o.shape[1]
        if b0 < o.shape[0]:
            # lse = log sum_p exp(lse_p); a row that saw nothing in any part is shifted by 0
            largest = ACC(NEG_INF)
            for p in range(PARTS):
                b = p * o.shape[0] + b0
                largest = max(largest, lse_parts[index(b), index(b1), index(h), index(i)])
            shift = largest if largest != ACC(NEG_INF) else ACC(0)
            total = ACC(0)
            for p in range(PARTS):
                b = p * o.shape[0] + b0
                total += math.exp(lse_parts[index(b), index(b1), index(h), index(i)] - shift)
            # o = sum_p exp(lse_p - lse) o_p
            inverse = ACC(0) if total == ACC(0) else ACC(1) / total
            for d in range(lane, HEAD_DIM_V, LANES):
                value = ACC(0)
                for p in range(PARTS):
                    b = p * o.shape[0] + b0
                    lse_part = lse_parts[index(b), index(b1), index(h), index(i)]
                    weight = math.exp(lse_part - shift) * inverse
                    value += weight * o_parts[index(b), index(b1), index(h), index(i), index(d)]
                o[index(b0), index(b1), index(h), index(i), index(d)] = store(value)
            if WRITE_LSE and lane == 0:
                lse[index(b0), index(b1), index(h), index(i)] = shift + math.log(total)

    operands = array(ACC, 5), array(ACC, 4), array(dtype, 5), array(ACC, 4)
    return combine, types.void(*operands, types.Tuple(())), {"launch_bounds": (rows * LANES, 1)}
