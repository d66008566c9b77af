"""The loops of FlashAttention-2 on the CPU (arXiv:2307.08691, Algorithms 1 and 2), as kernels over ranges of work items.

Tiles of q, k, v and do are made contiguous in the accumulation dtype and multiplied by BLAS; what lies between two products is done row
by row. Exponentials are powers of 2: in plain attention the packed q (in the backward, k) carries scale * log2(e). The options come as
`extras`, an empty tuple for plain attention (see `numba_flash.cpu.scores`).

Every item writes its own part of the result and sums in a fixed order.
"""

import numpy as np

from numba_flash import mask, numeric
from numba_flash.cpu import scores, softmax, tiles
from numba_flash.cpu.cache import kernel

# Time over that of torch 2.13 SDPA (MKL), medians of interleaved calls, two Zen 3 cores, (B, H, N, D) = (1, 8, 2048, 64), float32:
BLOCK_M, BLOCK_N = 256, 512  # forward 1.07-1.11 full, 0.94-1.03 causal; 192 x 512: 1.05-1.13, 0.95-1.01
BACKWARD_BLOCK_M, BACKWARD_BLOCK_N = 192, 256  # forward + backward 1.01-1.03 full, 0.77-0.95 causal; 256 x 256: 1.04, 0.88


@kernel
def forward_items(start, stop, q, k, v, o, lse, extras, scale, low, high):
    """Algorithm 1 for the work items ``[start, stop)``: one item is one block of queries of one head, the longest first."""
    number, band = lse.dtype.type, (low, high)
    d, dv, hq, nq, nk = q.shape[4], v.shape[4], q.shape[2], q.shape[3], k.shape[3]
    dtype, size_m, size_n = lse.dtype, min(BLOCK_M, nq), min(BLOCK_N, max(nk, 1))
    blocks = (nq + size_m - 1) // size_m
    q_buffer, acc_buffer, pv_buffer = np.empty(size_m * d, dtype), np.empty(size_m * dv, dtype), np.empty(size_m * dv, dtype)
    k_buffer, v_buffer, s_buffer = np.empty(size_n * d, dtype), np.empty(size_n * dv, dtype), np.empty(size_m * size_n, dtype)
    m_i, l_i, alpha, slope = np.empty(size_m, dtype), np.empty(size_m, dtype), np.empty(size_m, dtype), np.empty(size_n, dtype)
    for item in range(start, stop):
        head, block = item // blocks, blocks - 1 - item % blocks
        b0, b1, h = head // hq // q.shape[1], head // hq % q.shape[1], head % hq
        k_head, v_head = k[b0, b1, h // (hq // k.shape[2])], v[b0, b1, h // (hq // k.shape[2])]
        i0 = block * size_m
        m = min(size_m, nq - i0)
        acc, pv = tiles.view2d(acc_buffer, m, dv), tiles.view2d(pv_buffer, m, dv)
        at = (b0, b1, h, q.shape[1], hq)
        q_tile = tiles.pack(q[b0, b1, h], i0, m, q_buffer, number(scale * scores.unit(extras)))
        acc[:], m_i[:], l_i[:] = 0, tiles.MINUS_INF, 0
        first, last = mask.kv_range(i0, i0 + m, nk, low, high)
        for j0 in range(first, last, size_n):
            n = min(size_n, last - j0)
            if not scores.seen(extras, at, (i0, j0), m, n):
                continue
            k_tile, v_tile, s = tiles.load(k_head, j0, n, k_buffer), tiles.load(v_head, j0, n, v_buffer), tiles.view2d(s_buffer, m, n)
            clean = not scores.may_hide(extras) and mask.all_visible(i0, i0 + m, j0, j0 + n, low, high)
            clean = clean or tiles.all_finite(v_tile)
            # (1) S = Q K^T
            np.dot(q_tile, k_tile.T, s)
            # (2) m_new = max(m, rowmax S), P = exp(S - m_new), l = exp(m - m_new) l + rowsum P
            softmax.online_softmax(s, (m_i, l_i, alpha, slope), at, (i0, j0), band, extras)
            # (3) acc = exp(m - m_new) acc + P V
            softmax.dot_rows(s, v_tile, pv, clean, (i0, j0), band, extras)
            tiles.rescale_add(acc, alpha, pv)
        # (4) O = acc / l, lse = m + log l
        for r in range(m):
            l_r = l_i[r] if l_i[r] != 0 else number(1)
            for c in range(dv):
                acc[r, c] /= l_r
            lse[b0, b1, h, i0 + r] = number(m_i[r] / scores.unit(extras)) + np.log(l_r)
        tiles.unpack(o[b0, b1, h], i0, acc, number(scores.keep_scale(extras)), False)


@kernel
def delta_items(start, stop, do, o, delta, dlse):
    """delta = rowsum(dO * O) - dlse for the work items ``[start, stop)``: one item is one row."""
    number = delta.dtype.type
    heads, nq = delta.shape[2], delta.shape[3]
    for item in range(start, stop):
        i, head = item % nq, item // nq
        b0, b1, h = head // heads // delta.shape[1], head // heads % delta.shape[1], head % heads
        do_row, o_row, total = do[b0, b1, h, i], o[b0, b1, h, i], number(0)
        for c in range(do_row.size):
            total += numeric.widen(do_row[c]) * numeric.widen(o_row[c])
        delta[b0, b1, h, i] = total - dlse[b0, b1, h, i]


@kernel
def backward_items(start, stop, do, q, k, v, lse, delta, dq_partial, dk, dv, extras, scale, low, high, first_unit, add):
    """Algorithm 2 for the work items ``[start, stop)``: one item is one of the `chunks` shares of the keys of one key head.

    dk and dv are finished here (added to if `add`); dq_partial (units, chunks, group, nq, d) receives each chunk's share of dQ, in units of
    1 / `scores.unit`.
    """
    number, band = lse.dtype.type, (low, high)
    d, dv_dim, nq, nk, hk = q.shape[4], v.shape[4], q.shape[3], k.shape[3], k.shape[2]
    chunks, group = dq_partial.shape[1], dq_partial.shape[2]
    dtype, size_m, size_n = lse.dtype, min(BACKWARD_BLOCK_M, nq), min(BACKWARD_BLOCK_N, nk)
    blocks = (nk + size_n - 1) // size_n
    q_buffer, do_buffer, dq_buffer = np.empty(size_m * d, dtype), np.empty(size_m * dv_dim, dtype), np.empty(size_m * d, dtype)
    k_buffer, dk_buffer, dk_sum_buffer = np.empty(size_n * d, dtype), np.empty(size_n * d, dtype), np.empty(size_n * d, dtype)
    v_buffer, dv_buffer = np.empty(size_n * dv_dim, dtype), np.empty(size_n * dv_dim, dtype)
    dv_sum_buffer = np.empty(size_n * dv_dim, dtype)
    s_buffer, dp_buffer, slope = np.empty(size_m * size_n, dtype), np.empty(size_m * size_n, dtype), np.empty(size_n, dtype)
    for item in range(start, stop):
        unit, chunk = first_unit + item // chunks, item % chunks
        b0, b1, h_k = unit // hk // k.shape[1], unit // hk % k.shape[1], unit % hk
        dq_item = dq_partial[item // chunks, chunk]
        dq_item[:] = 0
        for turn in range((blocks + chunks - 1) // chunks):
            block = turn * chunks + (chunk if turn % 2 == 0 else chunks - 1 - chunk)
            j0 = block * size_n
            n = min(size_n, nk - j0)
            if n <= 0:
                continue
            k_tile = tiles.pack(k[b0, b1, h_k], j0, n, k_buffer, number(scale * scores.unit(extras)))
            v_tile = tiles.load(v[b0, b1, h_k], j0, n, v_buffer)
            dk_tile, dk_acc = tiles.view2d(dk_buffer, n, d), tiles.view2d(dk_sum_buffer, n, d)
            dv_tile, dv_acc = tiles.view2d(dv_buffer, n, dv_dim), tiles.view2d(dv_sum_buffer, n, dv_dim)
            dk_acc[:], dv_acc[:] = 0, 0
            first, last = mask.q_range(j0, j0 + n, nq, low, high)
            for g in range(group):
                h = h_k * group + g
                at = (b0, b1, h, k.shape[1], hk * group)
                for i0 in range(first, last, size_m):
                    m = min(size_m, last - i0)
                    if not scores.seen(extras, at, (i0, j0), m, n):
                        continue
                    q_tile, do_tile = tiles.load(q[b0, b1, h], i0, m, q_buffer), tiles.load(do[b0, b1, h], i0, m, do_buffer)
                    s, dp, dq_tile = tiles.view2d(s_buffer, m, n), tiles.view2d(dp_buffer, m, n), tiles.view2d(dq_buffer, m, d)
                    clean = not scores.may_hide(extras) and mask.all_visible(i0, i0 + m, j0, j0 + n, low, high)
                    clean = clean or (tiles.all_finite(k_tile) and tiles.all_finite(q_tile) and tiles.all_finite(do_tile))
                    # (1) S = Q K^T, dP = dO V^T
                    np.dot(q_tile, k_tile.T, s)
                    np.dot(do_tile, v_tile.T, dp)
                    # (2) P = exp(S - lse), dS = P * (dP - delta)
                    rows = (lse[b0, b1, h, i0 : i0 + m], delta[b0, b1, h, i0 : i0 + m], slope, True)
                    softmax.recompute_p(s, dp, rows, at, (i0, j0), band, extras)
                    # (3) dV += P^T dO
                    softmax.dot_columns(s, do_tile, dv_tile, clean, (i0, j0), band, extras)
                    tiles.accumulate(dv_acc, dv_tile)
                    # (4) dK += dS^T Q
                    softmax.dot_columns(dp, q_tile, dk_tile, clean, (i0, j0), band, extras)
                    tiles.accumulate(dk_acc, dk_tile)
                    # (5) dQ += dS K
                    softmax.dot_rows(dp, k_tile, dq_tile, clean, (i0, j0), band, extras)
                    tiles.accumulate(dq_item[g, i0 : i0 + m], dq_tile)
            tiles.unpack(dk[b0, b1, h_k], j0, dk_acc, number(scale), add)
            tiles.unpack(dv[b0, b1, h_k], j0, dv_acc, number(scores.keep_scale(extras)), add)


@kernel
def dq_items(start, stop, dq_partial, dq, first_unit, extras):
    """dQ = sum over chunks, in their order, for the work items ``[start, stop)``: one item is one row of one key head's group."""
    chunks, group, nq = dq_partial.shape[1], dq_partial.shape[2], dq_partial.shape[3]
    hk = dq.shape[2] // group
    row = np.empty((1, dq_partial.shape[4]), dq_partial.dtype)
    for item in range(start, stop):
        i, g, part = item % nq, item // nq % group, item // nq // group
        unit = first_unit + part
        b0, b1, h = unit // hk // dq.shape[1], unit // hk % dq.shape[1], unit % hk * group + g
        row[0] = dq_partial[part, 0, g, i]
        for chunk in range(1, chunks):
            row[0] += dq_partial[part, chunk, g, i]
        tiles.unpack(dq[b0, b1, h], i, row, row.dtype.type(1 / scores.unit(extras)), False)


@kernel
def dbias_items(start, stop, do, q, k, v, lse, delta, dbias, extras, scale, low, high):
    """dbias += dS for the work items ``[start, stop)``: one item is one tile of dbias, whose axes of size 1 are summed over."""
    number, band = lse.dtype.type, (low, high)
    d, dv_dim, hq, nq, nk = q.shape[4], v.shape[4], q.shape[2], q.shape[3], k.shape[3]
    dtype, size_m, size_n = lse.dtype, min(BACKWARD_BLOCK_M, nq), min(BACKWARD_BLOCK_N, nk)
    q_buffer, do_buffer = np.empty(size_m * d, dtype), np.empty(size_m * dv_dim, dtype)
    k_buffer, v_buffer, slope = np.empty(size_n * d, dtype), np.empty(size_n * dv_dim, dtype), np.empty(size_n, dtype)
    s_buffer, dp_buffer, acc_buffer = (np.empty(size_m * size_n, dtype), np.empty(size_m * size_n, dtype), np.empty(size_m * size_n, dtype))
    blocks = (q.shape[0], q.shape[1], hq, (nq + size_m - 1) // size_m, (nk + size_n - 1) // size_n)
    for item in range(start, stop):
        own, walk = tiles.split(item, blocks, dbias.shape)
        i_own, j_own = own[3] * size_m, own[4] * size_n
        rows = 1 if dbias.shape[3] == 1 else min(size_m, nq - i_own)
        acc = tiles.view2d(acc_buffer, rows, 1 if dbias.shape[4] == 1 else min(size_n, nk - j_own))
        acc[:] = 0
        for w0, w1, wh, wi, wj in np.ndindex(walk):
            b0, b1, h, i0, j0 = own[0] + w0, own[1] + w1, own[2] + wh, i_own + wi * size_m, j_own + wj * size_n
            at, m, n = (b0, b1, h, q.shape[1], hq), min(size_m, nq - i0), min(size_n, nk - j0)
            first, last = mask.kv_range(i0, i0 + m, nk, low, high)
            if j0 >= last or j0 + n <= first or not scores.seen(extras, at, (i0, j0), m, n):
                continue
            q_tile, do_tile = tiles.load(q[b0, b1, h], i0, m, q_buffer), tiles.load(do[b0, b1, h], i0, m, do_buffer)
            k_tile = tiles.pack(k[b0, b1, h // (hq // k.shape[2])], j0, n, k_buffer, number(scale * scores.unit(extras)))
            v_tile = tiles.load(v[b0, b1, h // (hq // k.shape[2])], j0, n, v_buffer)
            s, dp = tiles.view2d(s_buffer, m, n), tiles.view2d(dp_buffer, m, n)
            # (1) S = Q K^T, dP = dO V^T
            np.dot(q_tile, k_tile.T, s)
            np.dot(do_tile, v_tile.T, dp)
            # (2) P = exp(S - lse), dS = P * (dP - delta)
            softmax.recompute_p(
                s, dp, (lse[b0, b1, h, i0 : i0 + m], delta[b0, b1, h, i0 : i0 + m], slope, False), at, (i0, j0), band, extras
            )
            # (3) dbias += dS
            softmax.fold(acc, dp)
        target = dbias[own[0], own[1], own[2], i_own : i_own + acc.shape[0], j_own : j_own + acc.shape[1]]
        tiles.accumulate(target, acc)
