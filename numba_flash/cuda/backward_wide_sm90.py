"""Backward pass on Hopper for head dimensions beyond 128: `backward_sm90` with another division of labour.

dK and dV of 64 keys and 256 columns fill the registers of two warp groups. So a block owns 64 keys, and each of its consumers half of the
columns of dK and dV. Of S^T and dP^T, and so of dQ, each computes what belongs to 64 of the 128 queries of a tile. P^T and dS^T go through
shared memory, where both consumers read all of them. Shared memory has no room for dQ: its parts are added to the sum from registers, when
one of the threads that move data (`movers_sm90`) permits it.
"""

import math

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import mma, movers_sm90, pipeline, ptx, recompute_sm90, softmax, swizzle
from numba_flash.cuda.movers_sm90 import B0, B1, BEFORE, COUNT, END, IMPOSSIBLE, K0, KEYS, KV_HEAD, NOBODY, NUMBER, QUERIES, ROW0
from numba_flash.cuda.recompute_sm90 import LAST


def build(dtype, head_dim, head_dim_v, banded, to_map, ordered, options, tile):
    """Kernel ``backward_wide_sm90``, with arguments as those of `numba_flash.cuda.backward_sm90.build` and of its kernel.

    dq_sum : for each (b0, b1, head, row block, consumer) 64 rows of all columns, in whole pairs of panels, in the order of fragments.
    """  # fmt: skip
    BLOCK_M, CONSUMERS, SMEM = tile.block_m, tile.consumers, tile.layout(head_dim, head_dim_v)
    Q, K, V, DO, DQ, WORK = map(pipeline.one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do, SMEM.dq, SMEM.work))
    P, DS, ROOM = SMEM.p, SMEM.ds, SMEM.ds_bytes
    Q_PANEL, K_PANEL, PART_BYTES = swizzle.panel_bytes(BLOCK_M), swizzle.panel_bytes(64), 4 * swizzle.DQ_PART * tile.parts(head_dim)
    HALF_K, HALF_V, CHUNKS = tile.width(head_dim) // 2, tile.width(head_dim_v) // 2, tile.parts(head_dim) // 2
    HALF_PANELS_K, HALF_PANELS_V = swizzle.panels(HALF_K) * Q_PANEL, swizzle.panels(HALF_V) * Q_PANEL
    OUTPUTS_K, OUTPUTS_V, SCORES, SUMS = HALF_K // 2, HALF_V // 2, 32, 64
    TO_MAP, ORDERED, SEQUENCES, BFLOAT16 = to_map, ordered, options.sequences, dtype == "bfloat16"
    ACC, u32, u64 = types.float32, types.uint32, types.uint64
    NAN, ONES, NONE, ONE, TWO = math.nan, (1.0, 1.0), 0, 1, 2
    note_bounds, bound, next_row0, weigh, differentiate = recompute_sm90.build(head_dim, head_dim_v, options, tile)
    clear_k, clear_v = (pipeline.build_clear_tail(d, 64) for d in (head_dim, head_dim_v))
    clear_q, clear_do = (pipeline.build_clear_tail(d, BLOCK_M) for d in (head_dim, head_dim_v))
    start_scores = mma.build_sum(64, -(-head_dim // 16), K_PANEL, Q_PANEL, BFLOAT16, False)
    start_dp = mma.build_sum(64, -(-head_dim_v // 16), K_PANEL, Q_PANEL, BFLOAT16, False)
    start_dv = mma.build_sum(HALF_V, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    start_dk = mma.build_sum(HALF_K, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    start_dq = mma.build_sum(128, 64 // 16, 0, 0, BFLOAT16, False)
    put = mma.build_put(64, 0, 1, BFLOAT16)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    stage_dk, stage_dv = mma.build_stage(HALF_K, 2, BFLOAT16), mma.build_stage(HALF_V, 2, BFLOAT16)
    put_dk = [mma.build_put_row(min(HALF_K, max(0, head_dim - first)), False, BFLOAT16) for first in (0, HALF_K)]
    put_dv = [mma.build_put_row(min(HALF_V, max(0, head_dim_v - first)), False, BFLOAT16) for first in (0, HALF_V)]
    (put_dk_left, put_dk_right), (put_dv_left, put_dv_right) = put_dk, put_dv

    @cuda.jit(device=True, forceinline=True)
    def start_item(smem, turn, me):
        """Wait for K and V of a work item; returns the first query of its first tile."""
        note_bounds(smem, turn, me)
        keys = pipeline.read(smem, WORK, turn, KEYS) - pipeline.read(smem, WORK, turn, ROW0)
        pipeline.wait_ready(smem, K, turn)
        pipeline.wait_ready(smem, V, turn)
        if SEQUENCES:
            clear_k(smem, K, turn, keys, me, CONSUMERS)
            clear_v(smem, V, turn, keys, me, CONSUMERS)
        return bound(smem, me, LAST)

    @cuda.jit(device=True, forceinline=True)
    def enter(smem, turn, me, n, row0):
        """Wait for tiles of Q and dO, and make zeros of what is beyond their sequence."""
        pipeline.wait_ready(smem, Q, n)
        pipeline.wait_ready(smem, DO, n)
        if SEQUENCES:
            queries = pipeline.read(smem, WORK, turn, QUERIES) - row0
            clear_q(smem, Q, n, queries, me, CONSUMERS)
            clear_do(smem, DO, n, queries, me, CONSUMERS)

    @cuda.jit(device=True, forceinline=True)
    def share(smem, region, me, x):
        """Leave this consumer's half of P^T or dS^T in shared memory, for both; they have read what was there before they released Q."""
        put(u32(smem + u32(region + me * K_PANEL)), x, ONES)
        ptx.fence_proxy_async()
        pipeline.meet_consumers(CONSUMERS)

    @cuda.jit(device=True, forceinline=True)
    def add(dq, address, before):
        """(7) dQ_i = dQ_i + dS_ij K_j for 128 columns; stored if nobody has added `before`."""
        for j in range(SUMS // 4):
            if before == 0:
                ptx.store_global(u64(address + u64(2048 * j)), (dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]))
            elif before != NOBODY:
                ptx.add_global_four(u64(address + u64(2048 * j)), dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3])

    @cuda.jit(device=True, forceinline=True)
    def add_all(smem, me, n, dq_sum, dq, ds, k_columns):
        """The same for all columns, of which the first 128 are being computed."""
        ring = u32(n * u32(CONSUMERS) + u32(me))
        pipeline.wait_ready(smem, DQ, ring)
        number, before = pipeline.read(smem, DQ, ring, NUMBER), pipeline.read(smem, DQ, ring, BEFORE)
        thread = u64(cuda.threadIdx.x % pipeline.WARP_GROUP * 16)
        address = u64(ptx.global_address(dq_sum) + u64(u32(number)) * u64(PART_BYTES) + thread)
        ptx.wgmma_wait(dq, dq, NONE, SUMS, NONE)
        add(dq, address, before)
        if CHUNKS == 2:
            start_dq(dq, ds, u32(k_columns + u32(2 * K_PANEL // mma.DESCRIPTOR_UNIT)))
            ptx.wgmma_wait(dq, dq, NONE, SUMS, NONE)
            add(dq, u64(address + u64(PART_BYTES // 2)), before)

    @cuda.jit(device=True, forceinline=True)
    def leave_sum(smem, me, n):
        """What this consumer has added for the tiles before the n-th is in memory."""
        if n != u32(0):
            if ORDERED:
                ptx.fence_gpu()
            pipeline.leave(smem, DQ, u32((n - u32(1)) * u32(CONSUMERS) + u32(me)))

    @cuda.jit(device=True, forceinline=True)
    def finish(maps, smem, turn, me, results, dk_acc, dv_acc, scale):
        """Store this consumer's columns of dK and dV of a work item, by way of where P^T or dS^T was."""
        factor, scaled = cuda.local.array(2, ACC), cuda.local.array(2, ACC)
        b0, b1, h = pipeline.read(smem, WORK, turn, B0), pipeline.read(smem, WORK, turn, B1), pipeline.read(smem, WORK, turn, KV_HEAD)
        row0 = pipeline.read(smem, WORK, turn, ROW0)
        k0, keys = pipeline.read(smem, WORK, turn, K0), pipeline.read(smem, WORK, turn, KEYS)
        for r in range(2):
            factor[r] = ACC(NAN) if SEQUENCES and pipeline.read(smem, WORK, turn, IMPOSSIBLE) != 0 else ACC(1)
            scaled[r] = factor[r] * scale
        pipeline.leave(smem, WORK, turn)
        if TO_MAP:
            room = u32(smem + u32(P + me * ROOM))
            pipeline.meet_consumers(CONSUMERS)  # both have read P^T and dS^T
            stage_dv(maps[5], room, dv_acc, factor, me, CONSUMERS, (me * HALF_V, row0, h, b1, b0))
            stage_dk(maps[4], room, dk_acc, scaled, me, CONSUMERS, (me * HALF_K, row0, h, b1, b0))
            if cuda.threadIdx.x % pipeline.WARP_GROUP == 0:
                ptx.bulk_wait_read()
            pipeline.meet_consumers(CONSUMERS)  # there is room for P^T and dS^T again
        else:
            for r in range(2):
                j = row0 + mma.first_row() + 8 * r
                if j < keys:
                    to_dv, to_dk = ptx.global_address(results[1][b0, b1, h, k0 + j]), ptx.global_address(results[0][b0, b1, h, k0 + j])
                    if me == 0:
                        put_dv_left(to_dv, dv_acc, factor, r)
                        put_dk_left(to_dk, dk_acc, scaled, r)
                    else:
                        put_dv_right(u64(to_dv + u64(2 * HALF_V)), dv_acc, factor, r)
                        put_dk_right(u64(to_dk + u64(2 * HALF_K)), dk_acc, scaled, r)

    @cuda.jit(device=True, forceinline=True)
    def consume(maps, smem, me, dk, dv, dq_sum, group, scales):
        """Equations (1) to (7) for the keys of each work item and all its tiles of queries, the last tile first."""
        s, dp, dq = cuda.local.array(SCORES, ACC), cuda.local.array(SCORES, ACC), cuda.local.array(SUMS, ACC)
        dk_acc, dv_acc = cuda.local.array(OUTPUTS_K, ACC), cuda.local.array(OUTPUTS_V, ACC)
        p_all, ds_all = mma.descriptor(smem + u32(P), u32(0)), mma.descriptor(smem + u32(DS), u32(0))
        ds_mine = mma.descriptor(smem + u32(DS + me * K_PANEL), u32(K_PANEL))
        turn, n = u32(0), u32(0)
        while True:
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.uniform(pipeline.read(smem, WORK, turn, COUNT))
            if count == END:
                break
            k_rows, v_rows = mma.descriptor(pipeline.tile(smem, K, turn), u32(0)), mma.descriptor(pipeline.tile(smem, V, turn), u32(0))
            k_columns = mma.descriptor(pipeline.tile(smem, K, turn), u32(K_PANEL))
            zero_k(dk_acc)
            zero_v(dv_acc)
            row0, end = start_item(smem, turn, me), u32(n + u32(count * group))
            while n != end:
                q_tile, do_tile, mine = pipeline.tile(smem, Q, n), pipeline.tile(smem, DO, n), u32(me * 64 * swizzle.ROW_BYTES)
                enter(smem, turn, me, n, row0)
                # (1) S^T = K Q^T, (4) dP^T = V dO^T
                start_scores(s, k_rows, mma.descriptor(q_tile + mine, u32(0)))
                start_dp(dp, v_rows, mma.descriptor(do_tile + mine, u32(0)))
                leave_sum(smem, me, n)
                ptx.wgmma_wait(s, s, ONE, SCORES, NONE)
                # (2) P^T = exp(S^T - lse)
                weigh(s, smem, turn, me, n, row0, scales)
                share(smem, P, me, s)
                # (3) dV = dV + P^T dO
                start_dv(dv_acc, p_all, mma.descriptor(do_tile + u32(me * HALF_PANELS_V), u32(Q_PANEL)))
                ptx.wgmma_wait(dp, dp, ONE, SCORES, NONE)
                # (5) dS^T = P^T * (dP^T - delta)
                differentiate(dp, s, smem, me, n, scales[1])
                share(smem, DS, me, dp)
                # (6) dK = dK + dS^T Q, (7) dQ = dS K
                start_dk(dk_acc, ds_all, mma.descriptor(q_tile + u32(me * HALF_PANELS_K), u32(Q_PANEL)))
                start_dq(dq, ds_mine, k_columns)
                ptx.wgmma_wait(dv_acc, dv_acc, TWO, OUTPUTS_V, NONE)
                pipeline.release(smem, DO, n)
                ptx.wgmma_wait(dk_acc, dk_acc, ONE, OUTPUTS_K, NONE)
                pipeline.release(smem, Q, n)
                add_all(smem, me, n, dq_sum, dq, ds_mine, k_columns)
                row0, n = next_row0(smem, me, row0), u32(n + 1)
            pipeline.release(smem, K, turn)
            pipeline.release(smem, V, turn)
            finish(maps, smem, turn, me, (dk, dv), dk_acc, dv_acc, scales[2])
            turn = u32(turn + 1)
        leave_sum(smem, me, n)

    return movers_sm90.build_kernel(head_dim, head_dim_v, banded, to_map, ordered, options, tile, consume)
