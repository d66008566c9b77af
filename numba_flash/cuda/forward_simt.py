"""Forward pass on any CUDA GPU: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1, one block of threads per block of queries."""

import math

from numba import cuda

from numba_flash import mask
from numba_flash.cuda import schedule, scores, tiles


def build(dtype, head_dim, head_dim_v, write_lse, options, tile):
    """Kernel ``forward_simt(q, k, v, o, lse, extras, scale_log2, low, high, parameters)`` with its signature and compile options.

    Arrays are (b0, b1, heads, n, head_dim), lse is (b0, b1, heads, n); bfloat16 comes as uint16. Scores are kept in base 2:
    ``scale_log2 = scale * log2(e)``; with options in base e, and then it is 1, as they get the scale among the `parameters`. `extras` and
    `parameters` belong to the options, see `numba_flash.cuda.scores`.
    """
    BLOCK_M, BLOCK_N, ROWS, COLS, THREADS_N = tile.block_m, tile.block_n, tile.rows, tile.cols, tile.threads_n
    COLS_O = tile.head_cols(head_dim_v)
    PAD = tiles.pad(dtype)
    PITCH_M, PITCH_N, PITCH_W = BLOCK_M + PAD, BLOCK_N + PAD, COLS_O * THREADS_N
    SCORES, OUTPUTS = ROWS * COLS, ROWS * COLS_O
    DEPTH, DEPTH_OUTER, ALIGNMENT = tile.depth, tile.depth_outer, tiles.ALIGNMENT
    WRITE_LSE, MODIFIED, HIDES = write_lse, options.modifies, scores.hides(options)
    SEQUENCES, PACKED = options.sequences, options.packed
    ACC, index = tiles.ACCUMULATOR[dtype], tiles.index
    NEG_INF = -math.inf
    inner = tiles.build_inner(dtype, tile, head_dim)
    outer = tiles.build_outer(dtype, tile, head_dim_v, "zero" if MODIFIED else "band")
    put_weights, _ = tiles.build_weights(dtype, tile)
    column = tiles.build_column(dtype, THREADS_N, COLS)
    write = tiles.build_write(dtype, tile, head_dim_v)
    Q_OFFSETS, sequence = scores.slots(options).q_lengths, scores.build_sequence(options)
    modify, drop = scores.build_modify(dtype, options, tile, False, False), scores.build_drop(dtype, options, tile, False, False)
    power, log_sum = scores.build_exponential(dtype, options)
    seen, clear = scores.build_seen(options, tile, False), scores.build_clear(dtype, tile, COLS_O)

    def forward_simt(q, k, v, o, lse, extras, scale_log2, low, high, parameters):
        q_smem = cuda.shared.array((DEPTH, PITCH_M), ACC, ALIGNMENT)
        k_smem = cuda.shared.array((DEPTH, PITCH_N), ACC, ALIGNMENT)
        v_smem = cuda.shared.array((DEPTH_OUTER, PITCH_W), ACC, ALIGNMENT)
        p_smem = cuda.shared.array((BLOCK_N, PITCH_M), ACC, ALIGNMENT)
        row_smem = cuda.shared.array((BLOCK_M, THREADS_N), ACC, ALIGNMENT)
        s = cuda.local.array(SCORES, ACC)
        acc = cuda.local.array(OUTPUTS, ACC)
        m_i = cuda.local.array(ROWS, ACC)
        l_i = cuda.local.array(ROWS, ACC)

        nq, nk = q.shape[3], k.shape[3]
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        if PACKED:
            b0, b1, h, m_block = schedule.packed_item(cuda.blockIdx.x, extras[Q_OFFSETS], nq, BLOCK_M)
        else:
            b0, b1, h, m_block = schedule.work_item(cuda.blockIdx.x, (nq + BLOCK_M - 1) // BLOCK_M, q.shape[2], q.shape[1])
        at, heads, rows, factor = (b0, b1, b0 * q.shape[1] + b1, h), q.shape[2], nq, 1.0
        if PACKED:
            b1 = 0
        kv_head = h // (q.shape[2] // k.shape[2])
        q_head, k_head, v_head = q[b0, b1, h], k[b0, b1, kv_head], v[b0, b1, kv_head]
        lse_head = lse[b0, b1, h]
        row0 = m_block * BLOCK_M
        if SEQUENCES:
            q0, nq, k0, nk, move, factor = sequence(extras, at[0], at[1], nq, nk)
            q_head, k_head, v_head = q_head[q0 : q0 + nq], k_head[k0 : k0 + nk], v_head[k0 : k0 + nk]
            low, high = low + move, high + move
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
            edge = col0 + BLOCK_N > nk or not mask.all_visible(row0, row0 + BLOCK_M, col0, col0 + BLOCK_N, low, high)
            if MODIFIED:
                edge = edge or HIDES or row0 + BLOCK_M > nq
                if not seen(at, row0, nq, col0, nk, extras):
                    continue
            # (1) S = Q K^T
            inner(s, q_head, row0, k_head, col0, q_smem, k_smem)
            if MODIFIED:  # the options, on S
                modify(s, s, p_smem, (row0, col0), (nq, nk, low, high), at, extras, parameters)
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
                # (3) m_new = max(m, rowmax(S)); a row that has seen nothing is shifted by 0, so that exp2(-inf - 0) = 0
                m_new = m_i[r]
                for t in range(THREADS_N):
                    m_new = max(m_new, row_smem[index(ty * ROWS + r), index(t)])
                shift = m_new if m_new != ACC(NEG_INF) else ACC(0)
                alpha = power(m_i[r] - shift)
                m_i[r] = m_new
                # (4) P = exp(S - m_new), l = alpha l + rowsum(P); each thread sums its own columns until the end
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
                drop(p_smem, (row0, col0), at, heads, parameters)
            outer(acc, p_smem, v_head, col0, v_smem, row0, edge, low, high)

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
                inverse *= ACC(parameters[2])
            for c in range(COLS_O):
                acc[r * COLS_O + c] *= inverse
            i = row0 + ty * ROWS + r
            if WRITE_LSE and tx == 0 and i < rows:
                lse_head[index(i)] = log_sum(m_i[r], l) if l != ACC(0) else ACC(NEG_INF) * ACC(factor)
        o_head = o[b0, b1, h]
        if PACKED:
            o_head = o_head[q0 : q0 + nq]
        write(o_head, row0, acc, factor)

    signature = tiles.signature(dtype, 4, 1, scores.kernel_arguments(options, ("float64", "int64", "int64")))
    return forward_simt, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
