"""Backward pass on any CUDA GPU: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, as three kernels without atomics.

`delta`:    delta = rowsum(dO * O) - dlse
`dkdv`:     one block of threads per block of keys walks over the queries (of every head of its group) and sums dK and dV
`dq`:       one block of threads per block of queries walks over the keys and sums dQ

P is recomputed from q, k and lse in both, so seven products are made instead of five; in return every sum has one owner and one order, and
the gradients are the same bits in every run. Rows of the micro-tile are keys in `dkdv`, queries in `dq`; the band is always given for
column - row.
"""

import math

from numba import cuda
from numba.cuda import types

from numba_flash import mask
from numba_flash.cuda import schedule, scores, tiles

LOG2E, NEG_INF = math.log2(math.e), -math.inf


def build_delta(dtype, head_dim_v, has_dlse, lanes, rows):
    """Kernel ``delta_simt(do, o, delta, extras, parameters)``: `lanes` threads add up each of `rows` rows of a block.

    `extras` holds dlse, if the kernel `has_dlse`; there are no parameters.
    """
    HEAD_DIM_V, LANES, ROWS, HAS_DLSE = head_dim_v, lanes, rows, has_dlse
    ACC, index = tiles.ACCUMULATOR[dtype], tiles.index
    load, _ = tiles.build_convert(dtype)

    def delta_simt(do, o, delta, extras, parameters):
        sum_smem = cuda.shared.array((ROWS, LANES), ACC)
        lane, row = cuda.threadIdx.x % LANES, cuda.threadIdx.x // LANES
        b0, b1, h, block = schedule.work_item(cuda.blockIdx.x, (o.shape[3] + ROWS - 1) // ROWS, o.shape[2], o.shape[1])
        do_head, o_head, delta_head = do[b0, b1, h], o[b0, b1, h], delta[b0, b1, h]
        i = block * ROWS + row
        partial = ACC(0)
        if i < o.shape[3]:
            for d in range(lane, HEAD_DIM_V, LANES):
                partial += load(do_head[index(i), index(d)]) * load(o_head[index(i), index(d)])
        sum_smem[index(row), index(lane)] = partial
        cuda.syncthreads()  # the row's threads see each other's sums
        if lane == 0 and i < o.shape[3]:
            total = ACC(0)
            for t in range(LANES):
                total += sum_smem[index(row), index(t)]
            if HAS_DLSE:
                total -= extras[0][index(b0), index(b1), index(h), index(i)]
            delta_head[index(i)] = total

    tuples = (types.Tuple([types.Array(ACC, 4, "A")] * has_dlse), types.Tuple(()))
    return delta_simt, tiles.signature(dtype, 2, 1, tuples), {"launch_bounds": (lanes * rows, 1)}


def build_row_value(dtype, options):
    """``shift(lse, i)`` and ``value(delta, i)``: what row i of the score matrix subtracts, from S (in its base) and from dP.

    A row that saw nothing, or lies beyond the end, is shifted by +inf, so that its P is 0.
    """
    ACC, index, INF = tiles.ACCUMULATOR[dtype], tiles.index, math.inf
    UNIT = 1.0 if options.modifies else LOG2E

    @cuda.jit(device=True)
    def shift(lse, i):
        x = lse[index(min(i, lse.shape[0] - 1))] * ACC(UNIT)
        return ACC(INF) if i >= lse.shape[0] or x == ACC(-INF) else x

    @cuda.jit(device=True)
    def value(delta, i):
        return delta[index(min(i, delta.shape[0] - 1))]

    return shift, value


def build_dkdv(dtype, head_dim, head_dim_v, options, tile):
    """Kernel ``dkdv_simt(do, q, k, v, dk, dv, lse, delta, extras, scale, low, high, parameters)``, its signature and compile options."""
    BLOCK_M, BLOCK_N, ROWS, COLS, THREADS_N = tile.block_m, tile.block_n, tile.rows, tile.cols, tile.threads_n
    COLS_K, COLS_V = tile.head_cols(head_dim), tile.head_cols(head_dim_v)
    SCORES, OUTPUTS_K, OUTPUTS_V = ROWS * COLS, ROWS * COLS_K, ROWS * COLS_V
    PAD = tiles.pad(dtype)
    PITCH_M, PITCH_N, PITCH_X = BLOCK_M + PAD, BLOCK_N + PAD, max(COLS_K, COLS_V) * THREADS_N
    DEPTH, DEPTH_OUTER, ALIGNMENT = tile.depth, tile.depth_outer, tiles.ALIGNMENT
    ACC = tiles.ACCUMULATOR[dtype]
    MODIFIED, HIDES, BENDS = options.modifies, scores.hides(options), scores.bends(options)
    SEQUENCES, PACKED, DROPOUT, K_OFFSETS = options.sequences, options.packed, bool(options.dropout), scores.slots(options).kv_lengths
    absent_p, absent_ds = ("negative" if DROPOUT else "zero", "zero") if MODIFIED else ("band", "band")
    (shift, value), (power, _) = build_row_value(dtype, options), scores.build_exponential(dtype, options)
    inner_k, inner_v = tiles.build_inner(dtype, tile, head_dim), tiles.build_inner(dtype, tile, head_dim_v)
    outer_q, outer_do = tiles.build_outer(dtype, tile, head_dim, absent_ds), tiles.build_outer(dtype, tile, head_dim_v, absent_p)
    write_dk, write_dv = tiles.build_write(dtype, tile, head_dim), tiles.build_write(dtype, tile, head_dim_v)
    put_weights, get_weight = tiles.build_weights(dtype, tile)
    column = tiles.build_column(dtype, THREADS_N, COLS)
    sequence, seen = scores.build_sequence(options), scores.build_seen(options, tile, True)
    modify, drop = scores.build_modify(dtype, options, tile, True, BENDS), scores.build_drop(dtype, options, tile, True, True)
    gradient = scores.build_gradient(dtype, options)
    clear_k, clear_v = scores.build_clear(dtype, tile, COLS_K), scores.build_clear(dtype, tile, COLS_V)

    def dkdv_simt(do, q, k, v, dk, dv, lse, delta, extras, scale, low, high, parameters):
        a_smem = cuda.shared.array((DEPTH, PITCH_M), ACC, ALIGNMENT)
        b_smem = cuda.shared.array((DEPTH, PITCH_N), ACC, ALIGNMENT)
        x_smem = cuda.shared.array((DEPTH_OUTER, PITCH_X), ACC, ALIGNMENT)
        w_smem = cuda.shared.array((BLOCK_N, PITCH_M), ACC, ALIGNMENT)
        s = cuda.local.array(SCORES, ACC)
        dk_acc = cuda.local.array(OUTPUTS_K, ACC)
        dv_acc = cuda.local.array(OUTPUTS_V, ACC)
        if BENDS:
            slope = cuda.local.array(SCORES, ACC)

        nq, nk, group = q.shape[3], k.shape[3], q.shape[2] // k.shape[2]
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        if PACKED:
            b0, b1, kv_head, block = schedule.packed_item(cuda.blockIdx.x, extras[K_OFFSETS], nk, BLOCK_M)
        else:
            b0, b1, kv_head, block = schedule.work_item(cuda.blockIdx.x, (nk + BLOCK_M - 1) // BLOCK_M, k.shape[2], k.shape[1])
        batch, batch1, factor = b0 * k.shape[1] + b1, b1, 1.0
        if PACKED:
            b1 = 0
        k_head, v_head = k[b0, b1, kv_head], v[b0, b1, kv_head]
        row0 = block * BLOCK_M
        if SEQUENCES:
            q0, nq, k0, nk, move, factor = sequence(extras, b0, batch1, nq, nk)
            k_head, v_head = k_head[k0 : k0 + nk], v_head[k0 : k0 + nk]
            low, high = low - move, high - move
        for i in range(OUTPUTS_K):
            dk_acc[i] = ACC(0)
        for i in range(OUTPUTS_V):
            dv_acc[i] = ACC(0)

        start, stop = mask.kv_range(row0, min(row0 + BLOCK_M, nk), nq, low, high)
        if SEQUENCES and row0 >= nk:
            stop = start
        for h in range(kv_head * group, (kv_head + 1) * group):
            q_head, do_head, lse_head, delta_head = q[b0, b1, h], do[b0, b1, h], lse[b0, b1, h], delta[b0, b1, h]
            if SEQUENCES:
                q_head, do_head = q_head[q0 : q0 + nq], do_head[q0 : q0 + nq]
                lse_head, delta_head = lse_head[q0 : q0 + nq], delta_head[q0 : q0 + nq]
            for col0 in range(start, stop, BLOCK_N):
                edge = col0 + BLOCK_N > nq or not mask.all_visible(row0, row0 + BLOCK_M, col0, col0 + BLOCK_N, low, high)
                if MODIFIED:
                    at, heads = (b0, batch1, batch, h), q.shape[2]
                    edge = edge or HIDES or row0 + BLOCK_M > nk
                    if not seen(at, row0, nk, col0, nq, extras):
                        continue
                # (1) S^T = K Q^T
                inner_k(s, k_head, row0, q_head, col0, a_smem, b_smem)
                if MODIFIED:  # the options, on S^T
                    modify(s, slope if BENDS else s, w_smem, (row0, col0), (nk, nq, low, high), at, extras, parameters)
                # (2) P^T = exp(S^T - lse), kept in shared memory
                for c in range(COLS):
                    i = col0 + column(tx, c)
                    row_shift = shift(lse_head, i)
                    for r in range(ROWS):
                        if MODIFIED:
                            x = s[r * COLS + c]
                            s[r * COLS + c] = ACC(-0.0) if x == ACC(NEG_INF) else power(x - row_shift)
                        else:
                            p = power(s[r * COLS + c] * ACC(scale * LOG2E) - row_shift)
                            hidden = edge and (i >= nq or not mask.visible(row0 + ty * ROWS + r, i, low, high))
                            s[r * COLS + c] = ACC(0) if hidden else p
                put_weights(w_smem, s)
                if MODIFIED:  # dropout, on P^T
                    drop(w_smem, (row0, col0), at, heads, parameters)
                # (3) dV = dV + P^T dO
                outer_do(dv_acc, w_smem, do_head, col0, x_smem, row0, edge, low, high)
                # (4) dP^T = V dO^T
                inner_v(s, v_head, row0, do_head, col0, a_smem, b_smem)
                # (5) dS^T = P^T * (dP^T - delta), in the place of P^T; a hidden P is 0, whatever dP is
                for c in range(COLS):
                    row_delta = value(delta_head, col0 + column(tx, c))
                    for r in range(ROWS):
                        p = get_weight(w_smem, r, c)
                        if MODIFIED:
                            bend = slope[r * COLS + c] if BENDS else ACC(1)
                            s[r * COLS + c] = gradient(p, s[r * COLS + c], row_delta, bend, parameters)
                        else:
                            s[r * COLS + c] = p * (s[r * COLS + c] - row_delta) if p != ACC(0) else ACC(0)
                put_weights(w_smem, s)
                # (6) dK = dK + dS^T Q
                outer_q(dk_acc, w_smem, q_head, col0, x_smem, row0, edge, low, high)
        if SEQUENCES:
            clear_k(dk_acc, row0, nk)
            clear_v(dv_acc, row0, nk)
        dk_head = dk[b0, b1, kv_head]
        if PACKED:
            dk_head = dk_head[k0 : k0 + nk]
        write_dk(dk_head, row0, dk_acc, scale * factor)
        if DROPOUT:
            factor *= parameters[2]
        dv_head = dv[b0, b1, kv_head]
        if PACKED:
            dv_head = dv_head[k0 : k0 + nk]
        write_dv(dv_head, row0, dv_acc, factor)

    signature = tiles.signature(dtype, 6, 2, scores.kernel_arguments(options, ("float64", "int64", "int64")))
    return dkdv_simt, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}


def build_dq(dtype, head_dim, head_dim_v, options, tile):
    """Kernel ``dq_simt(do, q, k, v, dq, lse, delta, extras, scale, low, high, parameters)`` with its signature and compile options."""
    BLOCK_M, BLOCK_N, ROWS, COLS, THREADS_N = tile.block_m, tile.block_n, tile.rows, tile.cols, tile.threads_n
    COLS_K = tile.head_cols(head_dim)
    SCORES, OUTPUTS = ROWS * COLS, ROWS * COLS_K
    PAD = tiles.pad(dtype)
    PITCH_M, PITCH_N, PITCH_X = BLOCK_M + PAD, BLOCK_N + PAD, COLS_K * THREADS_N
    DEPTH, DEPTH_OUTER, ALIGNMENT = tile.depth, tile.depth_outer, tiles.ALIGNMENT
    ACC = tiles.ACCUMULATOR[dtype]
    MODIFIED, HIDES, BENDS = options.modifies, scores.hides(options), scores.bends(options)
    SEQUENCES, PACKED, Q_OFFSETS = options.sequences, options.packed, scores.slots(options).q_lengths
    (shift, value), (power, _) = build_row_value(dtype, options), scores.build_exponential(dtype, options)
    inner_q, inner_do = tiles.build_inner(dtype, tile, head_dim), tiles.build_inner(dtype, tile, head_dim_v)
    outer_k = tiles.build_outer(dtype, tile, head_dim, "zero" if MODIFIED else "band")
    write_dq = tiles.build_write(dtype, tile, head_dim)
    put_weights, get_weight = tiles.build_weights(dtype, tile)
    column = tiles.build_column(dtype, THREADS_N, COLS)
    sequence, seen = scores.build_sequence(options), scores.build_seen(options, tile, False)
    modify, drop = scores.build_modify(dtype, options, tile, False, BENDS), scores.build_drop(dtype, options, tile, False, True)
    gradient, clear = scores.build_gradient(dtype, options), scores.build_clear(dtype, tile, COLS_K)

    def dq_simt(do, q, k, v, dq, lse, delta, extras, scale, low, high, parameters):
        a_smem = cuda.shared.array((DEPTH, PITCH_M), ACC, ALIGNMENT)
        b_smem = cuda.shared.array((DEPTH, PITCH_N), ACC, ALIGNMENT)
        x_smem = cuda.shared.array((DEPTH_OUTER, PITCH_X), ACC, ALIGNMENT)
        w_smem = cuda.shared.array((BLOCK_N, PITCH_M), ACC, ALIGNMENT)
        s = cuda.local.array(SCORES, ACC)
        dq_acc = cuda.local.array(OUTPUTS, ACC)
        if BENDS:
            slope = cuda.local.array(SCORES, ACC)

        nq, nk = q.shape[3], k.shape[3]
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        if PACKED:
            b0, b1, h, block = schedule.packed_item(cuda.blockIdx.x, extras[Q_OFFSETS], nq, BLOCK_M)
        else:
            b0, b1, h, block = schedule.work_item(cuda.blockIdx.x, (nq + BLOCK_M - 1) // BLOCK_M, q.shape[2], q.shape[1])
        at, heads, factor = (b0, b1, b0 * q.shape[1] + b1, h), q.shape[2], 1.0
        if PACKED:
            b1 = 0
        kv_head = h // (q.shape[2] // k.shape[2])
        q_head, do_head, k_head, v_head = q[b0, b1, h], do[b0, b1, h], k[b0, b1, kv_head], v[b0, b1, kv_head]
        lse_head, delta_head = lse[b0, b1, h], delta[b0, b1, h]
        row0 = block * BLOCK_M
        if SEQUENCES:
            q0, nq, k0, nk, move, factor = sequence(extras, at[0], at[1], nq, nk)
            q_head, do_head = q_head[q0 : q0 + nq], do_head[q0 : q0 + nq]
            k_head, v_head = k_head[k0 : k0 + nk], v_head[k0 : k0 + nk]
            lse_head, delta_head = lse_head[q0 : q0 + nq], delta_head[q0 : q0 + nq]
            low, high = low + move, high + move
        for i in range(OUTPUTS):
            dq_acc[i] = ACC(0)

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
            inner_q(s, q_head, row0, k_head, col0, a_smem, b_smem)
            if MODIFIED:  # the options, on S
                modify(s, slope if BENDS else s, w_smem, (row0, col0), (nq, nk, low, high), at, extras, parameters)
            # (2) P = exp(S - lse), kept in shared memory
            for r in range(ROWS):
                i = row0 + ty * ROWS + r
                row_shift = shift(lse_head, i)
                for c in range(COLS):
                    if MODIFIED:
                        x = s[r * COLS + c]
                        s[r * COLS + c] = ACC(-0.0) if x == ACC(NEG_INF) else power(x - row_shift)
                    else:
                        p = power(s[r * COLS + c] * ACC(scale * LOG2E) - row_shift)
                        j = col0 + column(tx, c)
                        hidden = edge and (j >= nk or not mask.visible(i, j, low, high))
                        s[r * COLS + c] = ACC(0) if hidden else p
            put_weights(w_smem, s)
            if MODIFIED:  # dropout, on P
                drop(w_smem, (row0, col0), at, heads, parameters)
            # (3) dP = dO V^T
            inner_do(s, do_head, row0, v_head, col0, a_smem, b_smem)
            # (4) dS = P * (dP - delta), in the place of P; a hidden P is 0, whatever dP is
            for r in range(ROWS):
                row_delta = value(delta_head, row0 + ty * ROWS + r)
                for c in range(COLS):
                    p = get_weight(w_smem, r, c)
                    if MODIFIED:
                        bend = slope[r * COLS + c] if BENDS else ACC(1)
                        s[r * COLS + c] = gradient(p, s[r * COLS + c], row_delta, bend, parameters)
                    else:
                        s[r * COLS + c] = p * (s[r * COLS + c] - row_delta) if p != ACC(0) else ACC(0)
            put_weights(w_smem, s)
            # (5) dQ = dQ + dS K
            outer_k(dq_acc, w_smem, k_head, col0, x_smem, row0, edge, low, high)
        if SEQUENCES:
            clear(dq_acc, row0, nq)
        dq_head = dq[b0, b1, h]
        if PACKED:
            dq_head = dq_head[q0 : q0 + nq]
        write_dq(dq_head, row0, dq_acc, scale * factor)

    signature = tiles.signature(dtype, 5, 2, scores.kernel_arguments(options, ("float64", "int64", "int64")))
    return dq_simt, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
