"""Attention over two sets of keys from the attention over each, in one pass over their results:
lse = log(exp(lse1) + exp(lse2)), o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2 (FlashAttention-2,
Dao, arXiv:2307.08691, section 3.1).
"""

import math

from numba_flash.cuda.number import STORAGE, array, build_convert, index
from numba_flash.cuda.runtime.lang import cuda, device, once, types

LANES = 32


@once
def build_weights(dtype):
    """``log_sum(x, y)``: log(exp(x) + exp(y)) as NumPy has it; ``weight(part, lse)``: of a part
    in the whole, 0 where it saw no key.
    """
    ACC, NEG_INF, LOG_2 = STORAGE[dtype], -math.inf, math.log(2)

    @device
    def log_sum(x, y):
        if x == y:  # infinite ones, too
            return x + ACC(LOG_2)
        difference = x - y
        if difference > ACC(0):
            return x + math.log1p(math.exp(-difference))
        if difference <= ACC(0):
            return y + math.log1p(math.exp(difference))
        return difference  # NaN

    @device
    def weight(part, lse):
        return ACC(0) if part == ACC(NEG_INF) else math.exp(part - lse)

    return log_sum, weight


def build(dtype, of_o1, of_lse1, of_o2, of_lse2, rows):
    """Kernel ``merge(o1, lse1, o2, lse2, o, lse, extras)``: one warp per row of o (b0, b1, heads,
    n, head_dim_v), which may be o1 itself, and lse lse1.

    dtype : of o and lse.
    of_o1, of_lse1, of_o2, of_lse2 : of the parts.
    rows : of a block.
    """
    ROWS, ACC, NEG_INF = rows, STORAGE[dtype], -math.inf
    load1, _ = build_convert(of_o1)
    load2, _ = build_convert(of_o2)
    log_sum, weight = build_weights(dtype)

    def merge(o1, lse1, o2, lse2, o, lse, extras):
        lane = cuda.threadIdx.x % LANES
        row = cuda.blockIdx.x * ROWS + cuda.threadIdx.x // LANES
        i, row = row % o.shape[3], row // o.shape[3]
        h, row = row % o.shape[2], row // o.shape[2]
        b1, b0 = row % o.shape[1], row // o.shape[1]
        part1 = part2 = whole = ACC(NEG_INF)
        if b0 < o.shape[0]:
            part1 = ACC(lse1[index(b0), index(b1), index(h), index(i)])
            part2 = ACC(lse2[index(b0), index(b1), index(h), index(i)])
            whole = log_sum(part1, part2)
        # lse may lie in the place of lse1, which all lanes have read now
        cuda.syncthreads()
        if b0 < o.shape[0]:
            weight1, weight2 = weight(part1, whole), weight(part2, whole)
            for d in range(lane, o.shape[4], LANES):
                value = ACC(0)
                if part1 != ACC(NEG_INF):  # a row that saw no key has no share, whatever it holds
                    x1 = ACC(load1(o1[index(b0), index(b1), index(h), index(i), index(d)]))
                    value += weight1 * x1
                if part2 != ACC(NEG_INF):
                    x2 = ACC(load2(o2[index(b0), index(b1), index(h), index(i), index(d)]))
                    value += weight2 * x2
                o[index(b0), index(b1), index(h), index(i), index(d)] = value
            if lane == 0:
                lse[index(b0), index(b1), index(h), index(i)] = whole

    operands = array(of_o1, 5), array(of_lse1, 4), array(of_o2, 5), array(of_lse2, 4)
    signature = types.void(*operands, array(dtype, 5), array(dtype, 4), types.Tuple(()))
    return merge, signature, {"launch_bounds": (rows * LANES, 1)}
