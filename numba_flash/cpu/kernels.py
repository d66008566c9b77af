"""The loops of FlashAttention-2 on the CPU (arXiv:2307.08691, Algorithms 1 and 2), as kernels over ranges of work items.

Tiles of q, k, v and do are made contiguous in the accumulation dtype and multiplied by BLAS; what lies between two products is done row
by row. Exponentials are powers of 2: in plain attention the packed q (in the backward, k) carries scale * log2(e). The options come as
`extras` (see `numba_flash.cpu.scores`).

Every item writes its own part of the result and sums in a fixed order.
"""

import numpy as np

from numba_flash import mask, numeric
from numba_flash.cpu import pages, scores, softmax, tiles
from numba_flash.cpu.arguments import Head, Region, head_of
from numba_flash.cpu.cache import kernel
from numba_flash.cpu.softmax import BackwardRows, ForwardRows
from numba_flash.cpu.tiles import Axes

# Larger tiles give BLAS larger products; smaller ones stay in the caches of a core, beside what a product reads and writes. Full, these are
# 1 to 11 % slower than PyTorch's kernel, causal as fast or faster; other sizes are about as fast. Measured: docs/lab/cpu.md, `BLOCK_M`,
# `BACKWARD_BLOCK_M`.
BLOCK_M, BLOCK_N = 256, 512
BACKWARD_BLOCK_M, BACKWARD_BLOCK_N = 192, 256


@kernel
def forward_items(start, stop, q, k, v, o, lse, extras, scale, low, high):
    """Algorithm 1 for the work items ``[start, stop)``: one item is one block of queries of one head, the longest first.

    k and v are arrays or pages (`numba_flash.cpu.pages`).
    """
    number, dtype = lse.dtype.type, lse.dtype
    d, dv = q.shape[4], pages.columns(v)
    batch1, heads, nq, nk = q.shape[1], q.shape[2], q.shape[3], pages.length(k)
    size_m = min(BLOCK_M, nq)
    size_n = min(BLOCK_N, max(nk, 1))
    blocks = (nq + size_m - 1) // size_m
    q_buffer = np.empty(size_m * d, dtype)
    k_buffer = np.empty(size_n * d, dtype)
    v_buffer = np.empty(size_n * dv, dtype)
    s_buffer = np.empty(size_m * size_n, dtype)
    pv_buffer = np.empty(size_m * dv, dtype)
    acc_buffer = np.empty(size_m * dv, dtype)
    rows = ForwardRows(np.empty(size_m, dtype), np.empty(size_m, dtype), np.empty(size_m, dtype), np.empty(size_n, dtype))
    for item in range(start, stop):
        at = head_of(item // blocks, batch1, heads)
        kv_head = at.head // (heads // pages.heads(k))
        k_head, v_head = pages.head(k, at, kv_head), pages.head(v, at, kv_head)
        i0 = (blocks - 1 - item % blocks) * size_m
        m = min(size_m, nq - i0)
        acc, pv = tiles.view2d(acc_buffer, m, dv), tiles.view2d(pv_buffer, m, dv)
        q_tile = tiles.pack(q[at.b0, at.b1, at.head], i0, m, q_buffer, number(scale * scores.unit(extras)))
        acc[:] = 0
        rows.m[:] = tiles.MINUS_INF
        rows.l[:] = 0
        first, last = mask.kv_range(i0, i0 + m, nk, low, high)
        for j0 in range(first, last, size_n):
            region = scores.narrow(Region(i0, j0, m, min(size_n, last - j0), low, high), at, extras, False)
            j0, n = region.j0, region.n
            if n <= 0:
                continue
            k_tile = pages.load(k_head, j0, n, k_buffer)
            v_tile = pages.load(v_head, j0, n, v_buffer)
            s = tiles.view2d(s_buffer, m, n)
            clean = not scores.may_hide(extras) and mask.all_visible(i0, i0 + m, j0, j0 + n, low, high)
            clean = clean or tiles.all_finite(v_tile)
            # (1) S = Q K^T
            np.dot(q_tile, k_tile.T, s)
            # (2) m_new = max(m, rowmax S), P = exp(S - m_new), l = exp(m - m_new) l + rowsum P
            softmax.online_softmax(s, rows, region, at, extras)
            # (3) acc = exp(m - m_new) acc + P V
            softmax.dot_rows(s, v_tile, pv, clean, region, extras)
            tiles.rescale_add(acc, rows.alpha, pv)
        # (4) O = acc / l, lse = m + log l
        for r in range(m):
            l = rows.l[r] if rows.l[r] != 0 else number(1)
            for c in range(dv):
                acc[r, c] /= l
            lse[at.b0, at.b1, at.head, i0 + r] = number(rows.m[r] / scores.unit(extras)) + np.log(l)
        tiles.unpack(o[at.b0, at.b1, at.head], i0, acc, number(scores.keep_scale(extras)), False)


@kernel
def delta_items(start, stop, do, o, delta, dlse):
    """delta = rowsum(dO * O) - dlse for the work items ``[start, stop)``: one item is one row."""
    number = delta.dtype.type
    batch1, heads, nq = delta.shape[1], delta.shape[2], delta.shape[3]
    for item in range(start, stop):
        at, i = head_of(item // nq, batch1, heads), item % nq
        do_row, o_row = do[at.b0, at.b1, at.head, i], o[at.b0, at.b1, at.head, i]
        total = number(0)
        for c in range(do_row.size):
            total += numeric.widen(do_row[c]) * numeric.widen(o_row[c])
        delta[at.b0, at.b1, at.head, i] = total - dlse[at.b0, at.b1, at.head, i]


@kernel
def backward_items(start, stop, do, q, k, v, lse, delta, dq_partial, dk, dv, extras, scale, low, high, first_unit, add):
    """Algorithm 2 for the work items ``[start, stop)``: one item is one of the `chunks` shares of the keys of one key head.

    dk and dv are finished here (added to if `add`); dq_partial (units, chunks, group, nq, d) receives each chunk's share of dQ, in units of
    1 / `scores.unit`.
    """
    number, dtype = lse.dtype.type, lse.dtype
    d, dv_dim = q.shape[4], v.shape[4]
    batch1, kv_heads, nq, nk = k.shape[1], k.shape[2], q.shape[3], k.shape[3]
    chunks, group = dq_partial.shape[1], dq_partial.shape[2]
    size_m = min(BACKWARD_BLOCK_M, nq)
    size_n = min(BACKWARD_BLOCK_N, nk)
    blocks = (nk + size_n - 1) // size_n
    q_buffer = np.empty(size_m * d, dtype)
    k_buffer = np.empty(size_n * d, dtype)
    v_buffer = np.empty(size_n * dv_dim, dtype)
    do_buffer = np.empty(size_m * dv_dim, dtype)
    s_buffer = np.empty(size_m * size_n, dtype)
    dp_buffer = np.empty(size_m * size_n, dtype)
    dq_buffer = np.empty(size_m * d, dtype)
    dk_buffer = np.empty(size_n * d, dtype)
    dv_buffer = np.empty(size_n * dv_dim, dtype)
    dk_acc_buffer = np.empty(size_n * d, dtype)
    dv_acc_buffer = np.empty(size_n * dv_dim, dtype)
    slope = np.empty(size_n, dtype)
    for item in range(start, stop):
        own, chunk = head_of(first_unit + item // chunks, batch1, kv_heads), item % chunks
        k_head, v_head = k[own.b0, own.b1, own.head], v[own.b0, own.b1, own.head]
        dq_item = dq_partial[item // chunks, chunk]
        dq_item[:] = 0
        for turn in range((blocks + chunks - 1) // chunks):
            block = turn * chunks + (chunk if turn % 2 == 0 else chunks - 1 - chunk)
            j0 = block * size_n
            n = min(size_n, nk - j0)
            if n <= 0:
                continue
            k_tile = tiles.pack(k_head, j0, n, k_buffer, number(scale * scores.unit(extras)))
            v_tile = tiles.load(v_head, j0, n, v_buffer)
            dk_tile, dk_acc = tiles.view2d(dk_buffer, n, d), tiles.view2d(dk_acc_buffer, n, d)
            dv_tile, dv_acc = tiles.view2d(dv_buffer, n, dv_dim), tiles.view2d(dv_acc_buffer, n, dv_dim)
            dk_acc[:] = 0
            dv_acc[:] = 0
            first, last = mask.q_range(j0, j0 + n, nq, low, high)
            for g in range(group):
                at = Head(own.b0, own.b1, own.batch, own.head * group + g, kv_heads * group)
                q_head, do_head = q[at.b0, at.b1, at.head], do[at.b0, at.b1, at.head]
                for i0 in range(first, last, size_m):
                    region = scores.narrow(Region(i0, j0, min(size_m, last - i0), n, low, high), at, extras, True)
                    i0, m = region.i0, region.m
                    if m <= 0:
                        continue
                    q_tile = tiles.load(q_head, i0, m, q_buffer)
                    do_tile = tiles.load(do_head, i0, m, do_buffer)
                    s, dp = tiles.view2d(s_buffer, m, n), tiles.view2d(dp_buffer, m, n)
                    dq_tile = tiles.view2d(dq_buffer, m, d)
                    clean = not scores.may_hide(extras) and mask.all_visible(i0, i0 + m, j0, j0 + n, low, high)
                    clean = clean or (tiles.all_finite(k_tile) and tiles.all_finite(q_tile) and tiles.all_finite(do_tile))
                    # (1) S = Q K^T, dP = dO V^T
                    np.dot(q_tile, k_tile.T, s)
                    np.dot(do_tile, v_tile.T, dp)
                    # (2) P = exp(S - lse), dS = P * (dP - delta)
                    lse_rows, delta_rows = lse[at.b0, at.b1, at.head, i0 : i0 + m], delta[at.b0, at.b1, at.head, i0 : i0 + m]
                    softmax.recompute_p(s, dp, BackwardRows(lse_rows, delta_rows, slope, True), region, at, extras)
                    # (3) dV += P^T dO
                    softmax.dot_columns(s, do_tile, dv_tile, clean, region, extras)
                    tiles.accumulate(dv_acc, dv_tile)
                    # (4) dK += dS^T Q
                    softmax.dot_columns(dp, q_tile, dk_tile, clean, region, extras)
                    tiles.accumulate(dk_acc, dk_tile)
                    # (5) dQ += dS K
                    softmax.dot_rows(dp, k_tile, dq_tile, clean, region, extras)
                    tiles.accumulate(dq_item[g, i0 : i0 + m], dq_tile)
            tiles.unpack(dk[own.b0, own.b1, own.head], j0, dk_acc, number(scale), add)
            tiles.unpack(dv[own.b0, own.b1, own.head], j0, dv_acc, number(scores.keep_scale(extras)), add)


@kernel
def dq_items(start, stop, dq_partial, dq, first_unit, extras):
    """dQ = sum over chunks, in their order, for the work items ``[start, stop)``: one item is one row of one key head's group."""
    chunks, group, nq = dq_partial.shape[1], dq_partial.shape[2], dq_partial.shape[3]
    batch1, kv_heads = dq.shape[1], dq.shape[2] // group
    row = np.empty((1, dq_partial.shape[4]), dq_partial.dtype)
    for item in range(start, stop):
        i, g, unit = item % nq, item // nq % group, item // nq // group
        at = head_of(first_unit + unit, batch1, kv_heads)
        row[0] = dq_partial[unit, 0, g, i]
        for chunk in range(1, chunks):
            row[0] += dq_partial[unit, chunk, g, i]
        dq_head = dq[at.b0, at.b1, at.head * group + g]
        tiles.unpack(dq_head, i, row, row.dtype.type(1 / scores.unit(extras)), False)


@kernel
def dbias_items(start, stop, do, q, k, v, lse, delta, dbias, extras, scale, low, high):
    """dbias += dS for the work items ``[start, stop)``: one item is one tile of dbias, whose axes of size 1 are summed over."""
    number, dtype = lse.dtype.type, lse.dtype
    d, dv_dim = q.shape[4], v.shape[4]
    batch1, heads, nq, nk = q.shape[1], q.shape[2], q.shape[3], k.shape[3]
    size_m = min(BACKWARD_BLOCK_M, nq)
    size_n = min(BACKWARD_BLOCK_N, nk)
    q_buffer = np.empty(size_m * d, dtype)
    k_buffer = np.empty(size_n * d, dtype)
    v_buffer = np.empty(size_n * dv_dim, dtype)
    do_buffer = np.empty(size_m * dv_dim, dtype)
    s_buffer = np.empty(size_m * size_n, dtype)
    dp_buffer = np.empty(size_m * size_n, dtype)
    acc_buffer = np.empty(size_m * size_n, dtype)
    slope = np.empty(size_n, dtype)
    blocks = Axes(q.shape[0], batch1, heads, (nq + size_m - 1) // size_m, (nk + size_n - 1) // size_n)
    for item in range(start, stop):
        own, walk = tiles.split(item, blocks, dbias.shape)
        own_i0, own_j0 = own.query * size_m, own.key * size_n
        own_m = 1 if dbias.shape[3] == 1 else min(size_m, nq - own_i0)
        own_n = 1 if dbias.shape[4] == 1 else min(size_n, nk - own_j0)
        acc = tiles.view2d(acc_buffer, own_m, own_n)
        acc[:] = 0
        for w0, w1, w_head, w_query, w_key in np.ndindex(walk.b0, walk.b1, walk.head, walk.query, walk.key):
            b0, b1, head = own.b0 + w0, own.b1 + w1, own.head + w_head
            at = Head(b0, b1, b0 * batch1 + b1, head, heads)
            i0, j0 = own_i0 + w_query * size_m, own_j0 + w_key * size_n
            m, n = min(size_m, nq - i0), min(size_n, nk - j0)
            region = Region(i0, j0, m, n, low, high)
            first, last = mask.kv_range(i0, i0 + m, nk, low, high)
            if j0 >= last or j0 + n <= first or not scores.seen(region, at, extras):
                continue
            kv_head = head // (heads // k.shape[2])
            q_tile = tiles.load(q[b0, b1, head], i0, m, q_buffer)
            do_tile = tiles.load(do[b0, b1, head], i0, m, do_buffer)
            k_tile = tiles.pack(k[b0, b1, kv_head], j0, n, k_buffer, number(scale * scores.unit(extras)))
            v_tile = tiles.load(v[b0, b1, kv_head], j0, n, v_buffer)
            s, dp = tiles.view2d(s_buffer, m, n), tiles.view2d(dp_buffer, m, n)
            # (1) S = Q K^T, dP = dO V^T
            np.dot(q_tile, k_tile.T, s)
            np.dot(do_tile, v_tile.T, dp)
            # (2) P = exp(S - lse), dS = P * (dP - delta)
            lse_rows, delta_rows = lse[b0, b1, head, i0 : i0 + m], delta[b0, b1, head, i0 : i0 + m]
            softmax.recompute_p(s, dp, BackwardRows(lse_rows, delta_rows, slope, False), region, at, extras)
            # (3) dbias += dS
            softmax.fold(acc, dp)
        target = dbias[own.b0, own.b1, own.head, own_i0 : own_i0 + own_m, own_j0 : own_j0 + own_n]
        tiles.accumulate(target, acc)
