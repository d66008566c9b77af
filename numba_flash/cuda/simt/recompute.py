"""What the backward kernels do with a tile of scores: P is recomputed from S and lse, dS from P and
dP (FlashAttention-2, Algorithm 2).
"""

import math

from numba_flash import mask
from numba_flash.cuda.number import ACCUMULATOR, index
from numba_flash.cuda.runtime.lang import cuda, device, once
from numba_flash.cuda.score import score
from numba_flash.cuda.simt.modify import build_drop, build_modify
from numba_flash.cuda.simt.tiles import build_column, build_weights

LOG2E, NEG_INF, INF = math.log2(math.e), -math.inf, math.inf


@once
def build_row_value(dtype, options):
    """``shift(lse, i)`` and ``value(delta, i)``: what row i of the score matrix subtracts, from S
    (in its base) and from dP.

    A row that saw nothing, or lies beyond the end, is shifted by +inf, so that its P is 0.
    """
    ACC, UNIT = ACCUMULATOR[dtype], 1.0 if options.modifies else LOG2E

    @device
    def shift(lse, i):
        x = lse[index(min(i, lse.shape[0] - 1))] * ACC(UNIT)
        return ACC(INF) if i >= lse.shape[0] or x == ACC(-INF) else x

    @device
    def value(delta, i):
        return delta[index(min(i, delta.shape[0] - 1))]

    return shift, value


@once
def build_recompute(dtype, options, tile, transposed, bends):
    """``recompute_p(s, slope, w_smem, lse, region, edge, scale, at, extras, parameters)``: the tile
    S becomes P = exp(S - lse), with every option, in `w_smem`; and ``differentiate(dp, slope,
    w_smem, delta, region, parameters)``: the tile dP becomes dS = P * (dP - delta).

    Rows of the region are keys if `transposed`; `lse` and `delta` belong to queries. The
    derivatives of the scores go into `slope`, and into dS, if they are wanted and the score
    `bends`.
    """  # fmt: skip
    ROWS, COLS, THREADS_N = tile.rows, tile.cols, tile.threads_n
    MODIFIED, TRANSPOSED, BENDS = options.modifies, transposed, bends
    ACC = ACCUMULATOR[dtype]
    shift, value = build_row_value(dtype, options)
    power, _ = score.build_exponential(dtype, options)
    gradient = score.build_gradient(dtype, options)
    modify = build_modify(dtype, options, tile, transposed, bends)
    drop = build_drop(dtype, options, tile, transposed, True)
    put_weights, get_weight = build_weights(dtype, tile)
    column = build_column(dtype, THREADS_N, COLS)

    @device
    def weight(x, row_shift, row, col, region, edge, scale):
        if MODIFIED:
            return ACC(-0.0) if x == ACC(NEG_INF) else power(x - row_shift)
        p = power(x * ACC(scale * LOG2E) - row_shift)
        hidden = edge and (
            col >= region.cols or not mask.visible(row, col, region.low, region.high)
        )
        return ACC(0) if hidden else p

    @device
    def exponentiate(s, lse, region, edge, scale):
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        row0, col0 = region.row0 + ty * ROWS, region.col0
        if TRANSPOSED:
            for c in range(COLS):
                col = col0 + column(tx, c)
                row_shift = shift(lse, col)
                for r in range(ROWS):
                    e = r * COLS + c
                    s[e] = weight(s[e], row_shift, row0 + r, col, region, edge, scale)
        else:
            for r in range(ROWS):
                row_shift = shift(lse, row0 + r)
                for c in range(COLS):
                    e = r * COLS + c
                    col = col0 + column(tx, c)
                    s[e] = weight(s[e], row_shift, row0 + r, col, region, edge, scale)

    @device
    def recompute_p(s, slope, w_smem, lse, region, edge, scale, at, extras, parameters):
        if MODIFIED:  # the options, on S
            modify(s, slope, w_smem, region, at, extras, parameters)
        exponentiate(s, lse, region, edge, scale)
        put_weights(w_smem, s)
        if MODIFIED:  # dropout, on P
            drop(w_smem, region, at, parameters)

    @device
    def ds_of(p, dp, row_delta, slope, e, parameters):
        if MODIFIED:
            bend = slope[e] if BENDS else ACC(1)
            return gradient(p, dp, row_delta, bend, parameters)
        return p * (dp - row_delta) if p != ACC(0) else ACC(0)  # a hidden P is 0, whatever dP is

    @device
    def differentiate(dp, slope, w_smem, delta, region, parameters):
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        if TRANSPOSED:
            for c in range(COLS):
                row_delta = value(delta, region.col0 + column(tx, c))
                for r in range(ROWS):
                    e = r * COLS + c
                    p = get_weight(w_smem, r, c)
                    dp[e] = ds_of(p, dp[e], row_delta, slope, e, parameters)
        else:
            for r in range(ROWS):
                row_delta = value(delta, region.row0 + ty * ROWS + r)
                for c in range(COLS):
                    e = r * COLS + c
                    p = get_weight(w_smem, r, c)
                    dp[e] = ds_of(p, dp[e], row_delta, slope, e, parameters)

    return recompute_p, differentiate
