"""Forward pass on any CUDA GPU: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1, one block of
threads per block of queries.
"""

import math

from numba_flash import mask
from numba_flash.cuda.arguments import FLAGS, extras_type, parameters_type
from numba_flash.cuda.number import ACCUMULATOR, array, index
from numba_flash.cuda.runtime.lang import cuda, i64, types
from numba_flash.cuda.score import score
from numba_flash.cuda.score.score import Head, Region
from numba_flash.cuda.simt import modify as options_of_tile
from numba_flash.cuda.simt import tiles
from numba_flash.cuda.work.pages import build_keys, build_missing
from numba_flash.cuda.work.row_blocks import build_row_block
from numba_flash.cuda.work.sequence import build_sequence


def build(dtype, out_dtype, head_dim, head_dim_v, write_lse, options, tile, flagged=False):
    """Kernel ``forward_simt(q, k, v, o, lse, extras, scale_log2, low, high, parameters)`` with its
    signature and compile options.

    q, k, v, o : (b0, b1, heads, n, head_dim), o in `out_dtype`; bfloat16 comes as uint16. In pages
        k and v are (1, pages, heads, size, head_dim).
    lse : (b0, b1, heads, n).
    extras, parameters : of the options, see `numba_flash.cuda.arguments`.
    scale_log2 : ``scale * log2(e)``: scores are kept in base 2. With options in base e, and then it
        is 1: they get the scale among the `parameters`.
    low, high : the band.

    With `flagged`, heads (b0, b1, head) alone are computed whose ``extras.flags`` are not 0.
    """
    BLOCK_M, BLOCK_N, THREADS_N = tile.block_m, tile.block_n, tile.threads_n
    ROWS, COLS, COLS_O = tile.rows, tile.cols, tile.head_cols(head_dim_v)
    (PITCH_M, PITCH_N, PITCH_O), ALIGNMENT = tiles.pitches(dtype, tile, COLS_O), tiles.ALIGNMENT
    DEPTH, DEPTH_OUTER = tile.depth, tile.depth_outer
    SCORES, OUTPUTS = ROWS * COLS, ROWS * COLS_O
    WRITE_LSE, MODIFIED, HIDES = write_lse, options.modifies, score.hides(options)
    SEQUENCES, PACKED, FLAGGED = options.sequences, options.packed, flagged
    PAGED = options.paged is not None
    ACC, NEG_INF, NAN = ACCUMULATOR[dtype], -math.inf, math.nan
    row_block_of = build_row_block(options, False, BLOCK_M)
    sequence_of, missing = build_sequence(options), build_missing(options)
    capacity, heads_of, keys_of = build_keys(options)
    inner = tiles.build_inner(dtype, tile, head_dim, options.paged)
    absent = "zero" if MODIFIED else "band"
    outer = tiles.build_outer(dtype, tile, head_dim_v, absent, pages=options.paged)
    put_weights, _ = tiles.build_weights(dtype, tile)
    column = tiles.build_column(dtype, THREADS_N, COLS)
    write = tiles.build_write(dtype, tile, head_dim_v, out_dtype)
    modify = options_of_tile.build_modify(dtype, options, tile, False, False)
    drop = options_of_tile.build_drop(dtype, options, tile, False, False)
    seen = options_of_tile.build_seen(options, tile, False)
    clear = options_of_tile.build_clear(dtype, tile, COLS_O)
    power, log_sum = score.build_exponential(dtype, options)

    def forward_simt(q, k, v, o, lse, extras, scale_log2, low, high, parameters):
        # shared by the block
        q_smem = cuda.shared.array((DEPTH, PITCH_M), ACC, ALIGNMENT)  # some columns of Q^T
        k_smem = cuda.shared.array((DEPTH, PITCH_N), ACC, ALIGNMENT)  # the same of K^T
        v_smem = cuda.shared.array((DEPTH_OUTER, PITCH_O), ACC, ALIGNMENT)  # some rows of V
        p_smem = cuda.shared.array((BLOCK_N, PITCH_M), ACC, ALIGNMENT)  # P^T
        row_smem = cuda.shared.array((BLOCK_M, THREADS_N), ACC, ALIGNMENT)  # parts of row sums
        # registers of each thread
        s = cuda.local.array(SCORES, ACC)  # its part of S, then of P
        acc = cuda.local.array(OUTPUTS, ACC)  # its part of O
        m_i = cuda.local.array(ROWS, ACC)  # maxima of its rows
        l_i = cuda.local.array(ROWS, ACC)  # its part of their sums

        nq, nk, heads = q.shape[3], capacity(extras, k), q.shape[2]
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        b0, b1, h, m_block = row_block_of(cuda.blockIdx.x, extras, nq, heads, q.shape[1])
        at = Head(b0, b1, b0 * q.shape[1] + b1, h, heads)
        rows, invalid = nq, False
        if PACKED:
            b1 = 0
        if FLAGGED and extras.flags[index(b0), index(b1), index(h)] == 0:
            return
        kv_head = h // (heads // k.shape[2])
        q_head, (k_head, v_head) = q[b0, b1, h], heads_of(k, v, b0, b1, kv_head)
        lse_head = lse[b0, b1, h]
        row0 = m_block * BLOCK_M
        if SEQUENCES:
            sequence = sequence_of(extras, at.b0, at.b1, nq, nk)
            q0, nq = sequence.q0, sequence.queries
            k0, nk, invalid = sequence.k0, sequence.keys, sequence.invalid
            if PAGED and cuda.syncthreads_or(missing(k, extras, at, nk, 0, 1)):
                nq, nk, invalid = 0, 0, True
            q_head = q_head[q0 : q0 + nq]
            k_head, v_head = keys_of(k_head, v_head, extras, at, k0, nk)
            low, high = low + sequence.shift, high + sequence.shift
            if PACKED:
                rows, lse_head = nq, lse_head[q0 : q0 + nq]
        for r in range(ROWS):
            m_i[r] = ACC(NEG_INF)
            l_i[r] = ACC(0)
        for i in range(OUTPUTS):
            acc[i] = ACC(0)

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
            inner(s, q_head, k_head, region, q_smem, k_smem)
            if MODIFIED:  # the options, on S
                modify(s, s, p_smem, region, at, extras, parameters)
            # (2) scores in base 2 (with options, in base e); hidden ones are -inf
            for r in range(ROWS):
                partial_max = ACC(NEG_INF)
                for c in range(COLS):
                    x = s[r * COLS + c] * ACC(scale_log2)
                    j = col0 + column(tx, c)
                    if edge and not (j < nk and mask.visible(row0 + ty * ROWS + r, j, low, high)):
                        x = ACC(NEG_INF)
                    s[r * COLS + c] = x
                    partial_max = max(partial_max, x)
                row_smem[index(ty * ROWS + r), index(tx)] = partial_max
            cuda.syncthreads()  # the row's threads see each other's maxima
            for r in range(ROWS):
                # (3) m_new = max(m, rowmax(S)); a row that has seen nothing is shifted by 0,
                # so that exp2(-inf - 0) = 0
                m_new = m_i[r]
                for t in range(THREADS_N):
                    m_new = max(m_new, row_smem[index(ty * ROWS + r), index(t)])
                shift = m_new if m_new != ACC(NEG_INF) else ACC(0)
                alpha = power(m_i[r] - shift)
                m_i[r] = m_new
                # (4) P = exp(S - m_new), l = alpha l + rowsum(P); each thread sums its own columns
                l_i[r] *= alpha
                for c in range(COLS):
                    p = power(s[r * COLS + c] - shift)
                    if MODIFIED and s[r * COLS + c] == ACC(NEG_INF):
                        p = ACC(-0.0)
                    s[r * COLS + c] = p
                    l_i[r] += p
                for c in range(COLS_O):
                    acc[r * COLS_O + c] *= alpha
            # (5) O = alpha O + P V
            put_weights(p_smem, s)
            if MODIFIED:  # dropout, on P
                drop(p_smem, region, at, parameters)
            outer(acc, p_smem, v_head, region, v_smem, edge)

        cuda.syncthreads()  # the last maxima have been read
        for r in range(ROWS):
            row_smem[index(ty * ROWS + r), index(tx)] = l_i[r]
        cuda.syncthreads()  # the row's threads see each other's sums
        if SEQUENCES:
            clear(acc, row0, nq)
        for r in range(ROWS):
            # (6) O = O / l, lse = m + log l; a row that saw nothing has O = 0, lse = -inf
            l = ACC(0)
            for t in range(THREADS_N):
                l += row_smem[index(ty * ROWS + r), index(t)]
            if SEQUENCES and row0 + ty * ROWS + r >= nq:
                l = ACC(0)
            inverse = ACC(0) if l == ACC(0) else ACC(1) / l
            if MODIFIED:
                inverse *= ACC(parameters.keep_scale)
            for c in range(COLS_O):
                acc[r * COLS_O + c] *= inverse
            i = row0 + ty * ROWS + r
            if WRITE_LSE and tx == 0 and i < rows:
                nothing = ACC(NAN) if invalid else ACC(NEG_INF)
                lse_head[index(i)] = log_sum(m_i[r], l) if l != ACC(0) else nothing
        o_head = o[b0, b1, h]
        if PACKED:
            o_head = o_head[q0 : q0 + nq]
        write(o_head, row0, acc, NAN if invalid else 1.0)

    signature = types.void(
        *[array(dtype, 5)] * 3,
        array(out_dtype, 5),
        array(ACC, 4),
        extras_type(options, more=FLAGS if flagged else ()),
        *(types.float64, i64, i64),
        parameters_type(options),
    )
    return forward_simt, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
