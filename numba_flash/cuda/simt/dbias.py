"""Gradient of an additive bias on any CUDA GPU: dbias = dS, summed over the axes that the bias
broadcasts.

One block of threads owns a tile of dbias and walks over everything that was broadcast into it,
making S and dP once more: every sum has one owner and one order, and no N x N matrix is stored
unless the bias is one. Where there are too few tiles to fill a GPU, each is split into shares of
that walk, which `numba_flash.cuda.passes.sum_shares` adds in their order.
"""

import math

from numba_flash import mask
from numba_flash.cuda.arguments import FLAGS, extras_type, parameters_type
from numba_flash.cuda.number import ACCUMULATOR, array, build_convert, index
from numba_flash.cuda.runtime.lang import cuda, device, i32, i64, once, types
from numba_flash.cuda.score.score import Head, Region
from numba_flash.cuda.simt import tiles
from numba_flash.cuda.simt.modify import build_seen
from numba_flash.cuda.simt.recompute import build_recompute
from numba_flash.cuda.work.broadcast import Walk, build_coordinates
from numba_flash.cuda.work.sequence import build_sequence


def build_reduce(dtype, out_dtype, summed, tile, adds=False):
    """``reduce(out, row0, col0, acc, w_smem)``: the tile acc[r, c], summed over its rows and
    columns if they are `summed`, to out[i, j], or to what is there already, if it `adds`.
    """
    ROWS, COLS, THREADS_N, THREADS = tile.rows, tile.cols, tile.threads_n, tile.threads
    BLOCK_M, BLOCK_N, (SUM_I, SUM_J) = tile.block_m, tile.block_n, summed[3:]
    ACC, ADDS = ACCUMULATOR[dtype], adds
    load, store = build_convert(out_dtype)
    put_weights, _ = tiles.build_weights(dtype, tile)
    column = tiles.build_column(dtype, THREADS_N, COLS)

    @device
    def write(out, i, j, x):
        if i < out.shape[0] and j < out.shape[1]:
            if ADDS:
                x += load(out[index(i), index(j)])
            out[index(i), index(j)] = store(x)

    @device
    def sum_column(w_smem, n):
        total = ACC(0)
        for m in range(BLOCK_M):
            total += w_smem[index(n), index(m)]
        return total

    @device
    def sum_row(w_smem, m):
        total = ACC(0)
        for n in range(BLOCK_N):
            total += w_smem[index(n), index(m)]
        return total

    @device
    def reduce(out, row0, col0, acc, w_smem):
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        if not SUM_I and not SUM_J:
            for r in range(ROWS):
                for c in range(COLS):
                    write(out, row0 + ty * ROWS + r, col0 + column(tx, c), acc[r * COLS + c])
            return
        put_weights(w_smem, acc)
        cuda.syncthreads()  # the tile is complete
        if SUM_J and not SUM_I:
            for m in range(cuda.threadIdx.x, BLOCK_M, THREADS):
                write(out, row0 + m, 0, sum_row(w_smem, m))
            return
        for n in range(cuda.threadIdx.x, BLOCK_N, THREADS):
            total = sum_column(w_smem, n)
            if SUM_J:
                w_smem[index(n), index(0)] = total
            else:
                write(out, 0, col0 + n, total)
        cuda.syncthreads()  # every column is summed
        if SUM_J and cuda.threadIdx.x == 0:
            write(out, 0, 0, sum_row(w_smem, 0))

    return reduce


@once
def build_any_flagged(summed, threads):
    """``any_flagged(flags, own, sizes)``: whether one of the heads is, over which the block walks
    that owns `own`; all of its threads take part.
    """
    THREADS, (SUM_0, SUM_1, SUM_H, *_) = threads, summed
    _, walked, _ = build_coordinates((*summed[:3], False, False))

    @device
    def any_flagged(flags, own, sizes):
        found = i32(0)
        heads = (sizes.b0 if SUM_0 else 1) * (sizes.b1 if SUM_1 else 1)
        heads *= sizes.head if SUM_H else 1
        for number in range(cuda.threadIdx.x, heads, THREADS):
            walk = walked(i32(number), sizes)
            b0, b1, h = own.b0 + walk.b0, own.b1 + walk.b1, own.head + walk.head
            found |= flags[index(b0), index(b1), index(h)]
        return cuda.syncthreads_or(found) != 0

    return any_flagged


def build(dtype, head_dim, head_dim_v, options, out_dtype, summed, tile, flagged=False):
    """Kernel ``dbias_simt(do, q, k, v, lse, delta, out, extras, scale, low, high, parameters)``
    with its signature and compile options.

    out : (shares, b0, b1, heads, n, n) of `out_dtype`, with sizes 1 where `summed` (five flags).
    flagged : only heads (b0, b1, head) whose ``extras.flags`` are not 0 are summed, and what they
        make is added to `out`, which has one share; where there are none, it is not touched.
    The others are those of `numba_flash.cuda.simt.backward.build_dq`'s kernel.
    """
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    SCORES, DEPTH = tile.rows * tile.cols, tile.depth
    (PITCH_M, PITCH_N, _), ALIGNMENT = tiles.pitches(dtype, tile, 0), tiles.ALIGNMENT
    ACC, NAN, FLAGGED = ACCUMULATOR[dtype], math.nan, flagged
    SUM_0, SUM_1, SUM_H, SUM_I, SUM_J = summed
    inner_q = tiles.build_inner(dtype, tile, head_dim)
    inner_do = tiles.build_inner(dtype, tile, head_dim_v)
    recompute_p, differentiate = build_recompute(dtype, options, tile, False, False)
    reduce = build_reduce(dtype, out_dtype, summed, tile, flagged)
    any_flagged = build_any_flagged(summed, tile.threads)
    owned, walked, _ = build_coordinates(summed)
    sequence_of, seen = build_sequence(options), build_seen(options, tile, False)

    def dbias_simt(do, q, k, v, lse, delta, out, extras, scale, low, high, parameters):
        # shared by the block
        a_smem = cuda.shared.array((DEPTH, PITCH_M), ACC, ALIGNMENT)  # some columns of Q^T or dO^T
        b_smem = cuda.shared.array((DEPTH, PITCH_N), ACC, ALIGNMENT)  # the same of K^T or V^T
        w_smem = cuda.shared.array((BLOCK_N, PITCH_M), ACC, ALIGNMENT)  # P^T
        # registers of each thread
        s = cuda.local.array(SCORES, ACC)  # its part of S, then of dP, then of dS
        acc = cuda.local.array(SCORES, ACC)  # its part of the sum

        heads, rows, columns = q.shape[2], q.shape[3], k.shape[3]
        row_blocks = (rows + BLOCK_M - 1) // BLOCK_M
        column_blocks = (columns + BLOCK_N - 1) // BLOCK_N
        sizes = Walk(q.shape[0], q.shape[1], heads, row_blocks, column_blocks)
        own, share = owned(cuda.blockIdx.x, sizes)
        steps = (sizes.b0 if SUM_0 else 1) * (sizes.b1 if SUM_1 else 1) * (heads if SUM_H else 1)
        steps *= (row_blocks if SUM_I else 1) * (column_blocks if SUM_J else 1)
        if FLAGGED and not any_flagged(extras.flags, own, sizes):
            return
        for n in range(SCORES):
            acc[n] = ACC(0)

        for step in range(steps * share // out.shape[0], steps * (share + 1) // out.shape[0]):
            walk = walked(i32(step), sizes)
            b0, b1, h = own.b0 + walk.b0, own.b1 + walk.b1, own.head + walk.head
            if FLAGGED and extras.flags[index(b0), index(b1), index(h)] == 0:
                continue
            row0, col0 = (own.i + walk.i) * BLOCK_M, (own.j + walk.j) * BLOCK_N
            at = Head(b0, b1, b0 * q.shape[1] + b1, h, heads)
            sequence = sequence_of(extras, b0, b1, rows, columns)
            nq, nk, shift = sequence.queries, sequence.keys, sequence.shift
            if sequence.invalid:
                for n in range(SCORES):
                    acc[n] = ACC(NAN)
            region = Region(row0, col0, nq, nk, low + shift, high + shift)
            start, stop = mask.kv_range(
                row0, min(row0 + BLOCK_M, nq), nk, low + shift, high + shift
            )
            if row0 >= nq or col0 >= stop or col0 + BLOCK_N <= start:
                continue
            if not seen(region, at, extras):
                continue
            kv_head = h // (heads // k.shape[2])
            lse_head, delta_head = lse[b0, b1, h], delta[b0, b1, h]
            # (1) S = Q K^T
            inner_q(s, q[b0, b1, h], k[b0, b1, kv_head], region, a_smem, b_smem)
            # (2) P = exp(S - lse), kept in shared memory
            recompute_p(s, s, w_smem, lse_head, region, True, scale, at, extras, parameters)
            # (4) dP = dO V^T
            inner_do(s, do[b0, b1, h], v[b0, b1, kv_head], region, a_smem, b_smem)
            # (5) dbias = dbias + dS, where dS = P * (dP - delta)
            differentiate(s, s, w_smem, delta_head, region, parameters)
            for n in range(SCORES):
                acc[n] += s[n]
        reduce(out[share, own.b0, own.b1, own.head], own.i * BLOCK_M, own.j * BLOCK_N, acc, w_smem)

    signature = types.void(
        *[array(dtype, 5)] * 4,
        *[array(ACC, 4)] * 2,
        array(out_dtype, 6),
        extras_type(options, more=FLAGS if flagged else ()),
        *(types.float64, i64, i64),
        parameters_type(options),
    )
    return dbias_simt, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
