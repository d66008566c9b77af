"""Backward pass on any CUDA GPU: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, as two
kernels without atomics, after `numba_flash.cuda.passes.delta`.

`dkdv`:     one block of threads per block of keys walks over the queries (of every head of its
group) and sums dK and dV `dq`:       one block of threads per block of queries walks over the keys
and sums dQ

P is recomputed from q, k and lse in both, so seven products are made instead of five; in return
every sum has one owner and one order, and the gradients are the same bits in every run. Rows of the
micro-tile are keys in `dkdv`, queries in `dq`; the band is always given for column - row. What is
called sT, pT, dpT, dsT is the transpose of S, P, dP, dS.
"""

import math
from typing import Any, NamedTuple

from numba_flash import mask
from numba_flash.cuda.arguments import FLAGS, extras_type, parameters_type
from numba_flash.cuda.number import ACCUMULATOR, array, index
from numba_flash.cuda.runtime.lang import cuda, device, i32, i64, inline, types
from numba_flash.cuda.score import score
from numba_flash.cuda.score.score import Head, Region
from numba_flash.cuda.simt import tiles
from numba_flash.cuda.simt.fallback import build_any_fallback
from numba_flash.cuda.simt.modify import build_clear, build_seen
from numba_flash.cuda.simt.recompute import build_recompute
from numba_flash.cuda.work.row_blocks import build_row_block
from numba_flash.cuda.work.sequence import build_sequence


class Numbers(NamedTuple):
    """Arguments that are numbers, as kernels take them."""

    scale: float
    low: int
    high: int
    parameters: Any


def _signature(dtype, tensors, options, flagged):
    """Of a kernel of so many arrays like q, and two like lse."""
    ACC = ACCUMULATOR[dtype]
    numbers = types.float64, i64, i64
    more = extras_type(options, more=FLAGS if flagged else ()), *numbers, parameters_type(options)
    more += (i64,) if flagged else ()
    return types.void(*[array(dtype, 5)] * tensors, array(ACC, 4), array(ACC, 4), *more)


def build_dkdv(dtype, head_dim, head_dim_v, options, tile, flagged=False):
    """Kernel ``dkdv_simt(do, q, k, v, dk, dv, lse, delta, extras, scale, low, high, parameters)``,
    its signature and compile options.

    Arguments are those of `numba_flash.cuda.simt.forward.build`'s kernel; low and high bound query
    - key. If it is `flagged`, there is one more, how many work items there are.
    """
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    COLS_K, COLS_V = tile.head_cols(head_dim), tile.head_cols(head_dim_v)
    SCORES, OUTPUTS_K, OUTPUTS_V = tile.rows * tile.cols, tile.rows * COLS_K, tile.rows * COLS_V
    PITCH_M, PITCH_N, PITCH_X = tiles.pitches(dtype, tile, max(COLS_K, COLS_V))
    ALIGNMENT = tiles.ALIGNMENT
    DEPTH, DEPTH_OUTER = tile.depth, tile.depth_outer
    ACC, NAN = ACCUMULATOR[dtype], math.nan
    MODIFIED, HIDES, BENDS = options.modifies, score.hides(options), options.bends
    SEQUENCES, PACKED, DROPOUT = options.sequences, options.packed, bool(options.dropout)
    absent_p, absent_ds = "band", "band"
    if MODIFIED:
        absent_p, absent_ds = "negative" if DROPOUT else "zero", "zero"
    row_block_of = build_row_block(options, True, BLOCK_M)
    sequence_of = build_sequence(options)
    inner_k = tiles.build_inner(dtype, tile, head_dim)
    inner_v = tiles.build_inner(dtype, tile, head_dim_v)
    outer_q = tiles.build_outer(dtype, tile, head_dim, absent_ds, accumulators=2)
    outer_do = tiles.build_outer(dtype, tile, head_dim_v, absent_p, accumulators=2)
    recompute_p, differentiate = build_recompute(dtype, options, tile, True, BENDS)
    put_weights, _ = tiles.build_weights(dtype, tile)
    write_dk = tiles.build_write(dtype, tile, head_dim)
    write_dv = tiles.build_write(dtype, tile, head_dim_v)
    seen = build_seen(options, tile, True)
    clear_k, clear_v = build_clear(dtype, tile, COLS_K), build_clear(dtype, tile, COLS_V)

    @inline
    def work(number, do, q, k, v, dk, dv, lse, delta, extras, numbers):
        # shared by the block
        a_smem = cuda.shared.array((DEPTH, PITCH_M), ACC, ALIGNMENT)  # some columns of K^T or V^T
        b_smem = cuda.shared.array((DEPTH, PITCH_N), ACC, ALIGNMENT)  # the same of Q^T or dO^T
        x_smem = cuda.shared.array((DEPTH_OUTER, PITCH_X), ACC, ALIGNMENT)  # some rows of dO or Q
        w_smem = cuda.shared.array((BLOCK_N, PITCH_M), ACC, ALIGNMENT)  # P, then dS
        # registers of each thread
        sT = cuda.local.array(SCORES, ACC)  # its part of S^T, then of dP^T
        dk_acc = cuda.local.array(OUTPUTS_K, ACC)  # its part of dK
        dv_acc = cuda.local.array(OUTPUTS_V, ACC)  # its part of dV
        dpT, slope, (scale, low, high, parameters), invalid = sT, sT, numbers, False
        if BENDS:
            slope = cuda.local.array(SCORES, ACC)  # derivatives of its scores
        nq, nk, heads = q.shape[3], k.shape[3], q.shape[2]
        b0, b1, kv_head, block = row_block_of(number, extras, nk, k.shape[2], k.shape[1])
        batch, batch1 = b0 * k.shape[1] + b1, b1
        if PACKED:
            b1 = 0
        row0, k_head, v_head = block * BLOCK_M, k[b0, b1, kv_head], v[b0, b1, kv_head]
        if SEQUENCES:
            sequence = sequence_of(extras, b0, batch1, nq, nk)
            q0, k0, nq, nk = sequence.q0, sequence.k0, sequence.queries, sequence.keys
            k_head, v_head = k_head[k0 : k0 + nk], v_head[k0 : k0 + nk]
            low, high = low - sequence.shift, high - sequence.shift
            invalid = sequence.invalid
        for i in range(OUTPUTS_K):
            dk_acc[i] = ACC(0)
        for i in range(OUTPUTS_V):
            dv_acc[i] = ACC(0)
        start, stop = mask.kv_range(row0, min(row0 + BLOCK_M, nk), nq, low, high)
        if SEQUENCES and row0 >= nk:
            stop = start
        group = heads // k.shape[2]
        for h in range(kv_head * group, (kv_head + 1) * group):
            at = Head(b0, batch1, batch, h, heads)
            q_head, do_head = q[b0, b1, h], do[b0, b1, h]
            lse_head, delta_head = lse[b0, b1, h], delta[b0, b1, h]
            if SEQUENCES:
                q_head, do_head = q_head[q0 : q0 + nq], do_head[q0 : q0 + nq]
                lse_head, delta_head = lse_head[q0 : q0 + nq], delta_head[q0 : q0 + nq]
            for col0 in range(start, stop, BLOCK_N):
                region = Region(row0, col0, nk, nq, low, high)
                edge = tiles.cuts(region, BLOCK_M, BLOCK_N)
                if MODIFIED:
                    edge = edge or HIDES or row0 + BLOCK_M > nk
                    if not seen(region, at, extras):
                        continue
                # (1) S^T = K Q^T
                inner_k(sT, k_head, q_head, region, a_smem, b_smem)
                # (2) P^T = exp(S^T - lse), kept in shared memory
                recompute_p(
                    sT, slope, w_smem, lse_head, region, edge, scale, at, extras, parameters
                )
                # (3) dV = dV + P^T dO
                outer_do(dv_acc, w_smem, do_head, region, x_smem, edge)
                # (4) dP^T = V dO^T
                inner_v(dpT, v_head, do_head, region, a_smem, b_smem)
                # (5) dS^T = P^T * (dP^T - delta), in the place of P^T
                differentiate(dpT, slope, w_smem, delta_head, region, parameters)
                put_weights(w_smem, dpT)
                # (6) dK = dK + dS^T Q
                outer_q(dk_acc, w_smem, q_head, region, x_smem, edge)
        if SEQUENCES:
            clear_k(dk_acc, row0, nk)
            clear_v(dv_acc, row0, nk)
        dk_head, dv_head = dk[b0, b1, kv_head], dv[b0, b1, kv_head]
        if PACKED:
            dk_head, dv_head = dk_head[k0 : k0 + nk], dv_head[k0 : k0 + nk]
        keep_scale = parameters.keep_scale if DROPOUT else 1.0
        write_dk(dk_head, row0, dk_acc, NAN if invalid else scale)
        write_dv(dv_head, row0, dv_acc, NAN if invalid else keep_scale)

    @device
    def is_fallback(number, q, k, extras):
        at = row_block_of(number, extras, k.shape[3], k.shape[2], k.shape[1])
        first = at.head * (q.shape[2] // k.shape[2])  # of q; all of them have the same flag
        return extras.flags[index(at.b0), index(0 if PACKED else at.b1), index(first)] != 0

    any_fallback = build_any_fallback(is_fallback, tile.threads)

    def dkdv_simt(do, q, k, v, dk, dv, lse, delta, extras, scale, low, high, parameters):
        numbers = Numbers(scale, low, high, parameters)
        work(cuda.blockIdx.x, do, q, k, v, dk, dv, lse, delta, extras, numbers)

    def dkdv_simt_fallback(
        do, q, k, v, dk, dv, lse, delta, extras, scale, low, high, parameters, items
    ):
        numbers = Numbers(scale, low, high, parameters)
        if any_fallback(i32(items), q, k, extras):
            for number in range(i32(cuda.blockIdx.x), i32(items), i32(cuda.gridDim.x)):
                if is_fallback(number, q, k, extras):
                    work(number, do, q, k, v, dk, dv, lse, delta, extras, numbers)
                    cuda.syncthreads()  # what is shared has been read

    signature = _signature(dtype, 6, options, flagged)
    options_of_compiler = {"launch_bounds": (tile.threads, tile.min_blocks)}
    if flagged:
        return dkdv_simt_fallback, signature, options_of_compiler
    return dkdv_simt, signature, options_of_compiler


def build_dq(dtype, head_dim, head_dim_v, options, tile, flagged=False):
    """Kernel ``dq_simt(do, q, k, v, dq, lse, delta, extras, scale, low, high, parameters)``, its
    signature and compile options; likewise if it is `flagged`.
    """
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    COLS_K = tile.head_cols(head_dim)
    SCORES, OUTPUTS = tile.rows * tile.cols, tile.rows * COLS_K
    (PITCH_M, PITCH_N, PITCH_X), ALIGNMENT = tiles.pitches(dtype, tile, COLS_K), tiles.ALIGNMENT
    DEPTH, DEPTH_OUTER = tile.depth, tile.depth_outer
    ACC, NAN = ACCUMULATOR[dtype], math.nan
    MODIFIED, HIDES, BENDS = options.modifies, score.hides(options), options.bends
    SEQUENCES, PACKED = options.sequences, options.packed
    row_block_of = build_row_block(options, False, BLOCK_M)
    sequence_of = build_sequence(options)
    inner_q = tiles.build_inner(dtype, tile, head_dim)
    inner_do = tiles.build_inner(dtype, tile, head_dim_v)
    outer_k = tiles.build_outer(dtype, tile, head_dim, "zero" if MODIFIED else "band")
    recompute_p, differentiate = build_recompute(dtype, options, tile, False, BENDS)
    put_weights, _ = tiles.build_weights(dtype, tile)
    write_dq = tiles.build_write(dtype, tile, head_dim)
    seen, clear = build_seen(options, tile, False), build_clear(dtype, tile, COLS_K)

    @inline
    def work(number, do, q, k, v, dq, lse, delta, extras, numbers):
        # shared by the block
        a_smem = cuda.shared.array((DEPTH, PITCH_M), ACC, ALIGNMENT)  # some columns of Q^T or dO^T
        b_smem = cuda.shared.array((DEPTH, PITCH_N), ACC, ALIGNMENT)  # the same of K^T or V^T
        x_smem = cuda.shared.array((DEPTH_OUTER, PITCH_X), ACC, ALIGNMENT)  # some rows of K
        w_smem = cuda.shared.array((BLOCK_N, PITCH_M), ACC, ALIGNMENT)  # P^T, then dS^T
        # registers of each thread
        s = cuda.local.array(SCORES, ACC)  # its part of S, then of dP
        dq_acc = cuda.local.array(OUTPUTS, ACC)  # its part of dQ
        dp, slope, (scale, low, high, parameters) = s, s, numbers
        if BENDS:
            slope = cuda.local.array(SCORES, ACC)  # derivatives of its scores

        nq, nk, heads = q.shape[3], k.shape[3], q.shape[2]
        b0, b1, h, block = row_block_of(number, extras, nq, heads, q.shape[1])
        at, invalid = Head(b0, b1, b0 * q.shape[1] + b1, h, heads), False
        if PACKED:
            b1 = 0
        kv_head = h // (heads // k.shape[2])
        q_head, do_head = q[b0, b1, h], do[b0, b1, h]
        k_head, v_head = k[b0, b1, kv_head], v[b0, b1, kv_head]
        lse_head, delta_head = lse[b0, b1, h], delta[b0, b1, h]
        row0 = block * BLOCK_M
        if SEQUENCES:
            sequence = sequence_of(extras, at.b0, at.b1, nq, nk)
            q0, k0, nq, nk = sequence.q0, sequence.k0, sequence.queries, sequence.keys
            q_head, do_head = q_head[q0 : q0 + nq], do_head[q0 : q0 + nq]
            k_head, v_head = k_head[k0 : k0 + nk], v_head[k0 : k0 + nk]
            lse_head, delta_head = lse_head[q0 : q0 + nq], delta_head[q0 : q0 + nq]
            low, high = low + sequence.shift, high + sequence.shift
            invalid = sequence.invalid
        for i in range(OUTPUTS):
            dq_acc[i] = ACC(0)
        start, stop = mask.kv_range(row0, min(row0 + BLOCK_M, nq), nk, low, high)
        if SEQUENCES and row0 >= nq:
            stop = start
        for col0 in range(start, stop, BLOCK_N):
            region = Region(row0, col0, nq, nk, low, high)
            edge = tiles.cuts(region, BLOCK_M, BLOCK_N)
            if MODIFIED:
                edge = edge or HIDES or row0 + BLOCK_M > nq
                if not seen(region, at, extras):
                    continue
            # (1) S = Q K^T
            inner_q(s, q_head, k_head, region, a_smem, b_smem)
            # (2) P = exp(S - lse), kept in shared memory
            recompute_p(s, slope, w_smem, lse_head, region, edge, scale, at, extras, parameters)
            # (4) dP = dO V^T
            inner_do(dp, do_head, v_head, region, a_smem, b_smem)
            # (5) dS = P * (dP - delta), in the place of P
            differentiate(dp, slope, w_smem, delta_head, region, parameters)
            put_weights(w_smem, dp)
            # (7) dQ = dQ + dS K
            outer_k(dq_acc, w_smem, k_head, region, x_smem, edge)
        if SEQUENCES:
            clear(dq_acc, row0, nq)
        dq_head = dq[b0, b1, h]
        if PACKED:
            dq_head = dq_head[q0 : q0 + nq]
        write_dq(dq_head, row0, dq_acc, NAN if invalid else scale)

    @device
    def is_fallback(number, q, k, extras):
        at = row_block_of(number, extras, q.shape[3], q.shape[2], q.shape[1])
        return extras.flags[index(at.b0), index(0 if PACKED else at.b1), index(at.head)] != 0

    any_fallback = build_any_fallback(is_fallback, tile.threads)

    def dq_simt(do, q, k, v, dq, lse, delta, extras, scale, low, high, parameters):
        numbers = Numbers(scale, low, high, parameters)
        work(cuda.blockIdx.x, do, q, k, v, dq, lse, delta, extras, numbers)

    def dq_simt_fallback(do, q, k, v, dq, lse, delta, extras, scale, low, high, parameters, items):
        numbers = Numbers(scale, low, high, parameters)
        if any_fallback(i32(items), q, k, extras):
            for number in range(i32(cuda.blockIdx.x), i32(items), i32(cuda.gridDim.x)):
                if is_fallback(number, q, k, extras):
                    work(number, do, q, k, v, dq, lse, delta, extras, numbers)
                    cuda.syncthreads()  # what is shared has been read

    signature = _signature(dtype, 5, options, flagged)
    options_of_compiler = {"launch_bounds": (tile.threads, tile.min_blocks)}
    if flagged:
        return dq_simt_fallback, signature, options_of_compiler
    return dq_simt, signature, options_of_compiler
