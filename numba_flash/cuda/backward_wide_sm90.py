"""Backward pass on Hopper for head dimensions beyond 128: `backward_sm90` with another division of labour.

dK and dV of 64 keys and 256 columns fill the registers of two warp groups. So a block owns 64 keys, and each of its consumers half of the
columns of dK and dV. Of S^T and dP^T each computes what belongs to 64 of the 128 queries of a tile. P^T and dS^T go through shared memory,
where both consumers read all of them.

A tile of dQ would be eight times as large as the tile of dS that it is made from, and adding it up in memory would take longer than all
products. Instead dS^T of some blocks of keys is written to memory, and `dq_sm90` makes dQ of it.
"""

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import mma, movers_sm90, pipeline, ptx, recompute_sm90, softmax, swizzle
from numba_flash.cuda.movers_sm90 import B0, B1, BASE, BLOCKS, COUNT, END, FIRST_BLOCK, K0, KEYS, KV_HEAD, ROW0
from numba_flash.cuda.recompute_sm90 import LAST


def build(dtype, head_dim, head_dim_v, banded, to_map, ordered, options, tile):
    """Kernel as `numba_flash.cuda.backward_sm90.build`'s, but that

    dq_sum : dS^T, a tile of 64 keys and 128 queries, panels of 64 queries, per (b0, b1, head, row block, block of keys).
    sizes : also the first of the blocks of keys, and how many there are room for; the others' items are not done.
    """  # fmt: skip
    BLOCK_M, BLOCK_N, CONSUMERS, SMEM = tile.block_m, tile.block_n, tile.consumers, tile.layout(head_dim, head_dim_v)
    Q, K, V, DO, WORK = map(pipeline.one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do, SMEM.work))
    P, DS, ROOM = SMEM.p, SMEM.ds, tile.ds_bytes
    Q_PANEL, K_PANEL = swizzle.panel_bytes(BLOCK_M), swizzle.panel_bytes(BLOCK_N)
    HALF_K, HALF_V = tile.width(head_dim) // 2, tile.width(head_dim_v) // 2
    LEFT_K, LEFT_V = swizzle.panels(HALF_K) * Q_PANEL, swizzle.panels(HALF_V) * Q_PANEL  # what is left of a consumer's columns
    MINE = 64 * swizzle.ROW_BYTES  # what is above a consumer's rows
    OUTPUTS_K, OUTPUTS_V, SCORES = HALF_K // 2, HALF_V // 2, 32
    TO_MAP, SEQUENCES, BFLOAT16 = to_map, options.sequences, dtype == "bfloat16"
    ACC, u32, i32, u64 = types.float32, types.uint32, types.int32, types.uint64
    ONES, NONE, ONE = (1.0, 1.0), 0, 1
    shared = recompute_sm90.build(head_dim, head_dim_v, options, tile)
    note_bounds, bound, next_row0, enter_q, enter_do, weigh, differentiate_cap, differentiate, factors = shared
    clear_k, clear_v = (pipeline.build_clear_tail(d, 64) for d in (head_dim, head_dim_v))
    start_scores = mma.build_sum(64, -(-head_dim // 16), K_PANEL, Q_PANEL, BFLOAT16, False)
    start_dp = mma.build_sum(64, -(-head_dim_v // 16), K_PANEL, Q_PANEL, BFLOAT16, False)
    start_dv = mma.build_sum(HALF_V, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    start_dk = mma.build_sum(HALF_K, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
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
    def share(smem, region, me, x):
        """Leave this consumer's half of P^T or dS^T in shared memory, for both; they have read what was there before they released Q."""
        put(u32(smem + u32(region + me * K_PANEL)), x, ONES)
        ptx.fence_proxy_async()
        pipeline.meet_consumers(CONSUMERS)

    @cuda.jit(device=True, forceinline=True)
    def store_ds(smem, me, ds, number, blocks, block):
        """Have this consumer's half of dS^T copied to memory."""
        if cuda.threadIdx.x % pipeline.WARP_GROUP == 0:
            at = u64(u32(number) * u32(blocks) + u32(block)) * u64(CONSUMERS) + u64(me)
            ptx.bulk_store(u64(ptx.global_address(ds) + at * u64(K_PANEL)), u32(smem + u32(DS + me * K_PANEL)), u32(K_PANEL))
            ptx.bulk_commit()

    @cuda.jit(device=True, forceinline=True)
    def await_store():
        """What this thread has had copied has been read; the others know once all consumers have met."""
        if cuda.threadIdx.x % pipeline.WARP_GROUP == 0:
            ptx.bulk_wait_read()

    @cuda.jit(device=True, forceinline=True)
    def finish(maps, smem, turn, me, results, dk_acc, dv_acc, scale):
        """Store this consumer's columns of dK and dV of a work item, by way of where P^T or dS^T was."""
        factor, scaled = cuda.local.array(2, ACC), cuda.local.array(2, ACC)
        b0, b1, h = pipeline.read(smem, WORK, turn, B0), pipeline.read(smem, WORK, turn, B1), pipeline.read(smem, WORK, turn, KV_HEAD)
        row0 = pipeline.read(smem, WORK, turn, ROW0)
        k0, keys = pipeline.read(smem, WORK, turn, K0), pipeline.read(smem, WORK, turn, KEYS)
        factors(smem, turn, factor, scaled, scale)
        pipeline.leave(smem, WORK, turn)
        if TO_MAP:
            room = u32(smem + u32(P + me * ROOM))
            await_store()
            pipeline.meet_consumers(CONSUMERS)  # P^T and dS^T have been read
            stage_dv(maps[5], room, dv_acc, factor, me, CONSUMERS, (me * HALF_V, row0, h, b1, b0))
            stage_dk(maps[4], room, dk_acc, scaled, me, CONSUMERS, (me * HALF_K, row0, h, b1, b0))
            await_store()
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
    def consume(maps, smem, me, arrays, sizes, scales):
        """Equations (1) to (6) for the keys of each work item and all its tiles of queries, the last tile first."""
        s, dp = cuda.local.array(SCORES, ACC), cuda.local.array(SCORES, ACC)
        dk_acc, dv_acc = cuda.local.array(OUTPUTS_K, ACC), cuda.local.array(OUTPUTS_V, ACC)
        p_all, ds_all = mma.descriptor(smem + u32(P), u32(0)), mma.descriptor(smem + u32(DS), u32(0))
        q_tile, do_tile = pipeline.tile(smem, Q, u32(0)), pipeline.tile(smem, DO, u32(0))
        q_rows, do_rows = mma.descriptor(q_tile + u32(me * MINE), u32(0)), mma.descriptor(do_tile + u32(me * MINE), u32(0))
        q_columns = mma.descriptor(q_tile + u32(me * LEFT_K), u32(Q_PANEL))
        do_columns = mma.descriptor(do_tile + u32(me * LEFT_V), u32(Q_PANEL))
        turn, n, row_blocks = u32(0), u32(0), i32(arrays[2].shape[3] // BLOCK_M)
        while True:
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.uniform(pipeline.read(smem, WORK, turn, COUNT))
            if count == END:
                break
            k_rows, v_rows = mma.descriptor(pipeline.tile(smem, K, turn), u32(0)), mma.descriptor(pipeline.tile(smem, V, turn), u32(0))
            block = i32(pipeline.read(smem, WORK, turn, ROW0) // BLOCK_N - sizes[FIRST_BLOCK])
            zero_k(dk_acc)
            zero_v(dv_acc)
            row0, end = start_item(smem, turn, me), u32(n + u32(count * i32(sizes[5])))
            number = i32(pipeline.read(smem, WORK, turn, BASE) + row0 // BLOCK_M)
            # (4) dP^T = V dO^T of the first tile
            enter_do(smem, turn, me, n, row0)
            start_dp(dp, v_rows, do_rows)
            while n != end:
                # (1) S^T = K Q^T
                enter_q(smem, turn, me, n, row0)
                start_scores(s, k_rows, q_rows)
                await_store()
                ptx.wgmma_wait(s, dp, NONE, SCORES, SCORES)
                # (2) P^T = exp(S^T - lse)
                weigh(s, smem, turn, me, n, row0, scales)
                share(smem, P, me, s)
                # (3) dV = dV + P^T dO
                start_dv(dv_acc, p_all, do_columns)
                # (5) dS^T = P^T * (dP^T - delta)
                differentiate_cap(dp, s, smem, me, n, scales[1])
                for chunk in range(0, SCORES // 4, 2):
                    differentiate(dp, s, smem, me, n, chunk)
                share(smem, DS, me, dp)
                store_ds(smem, me, arrays[3], number, sizes[BLOCKS], block)
                # (6) dK = dK + dS^T Q
                start_dk(dk_acc, ds_all, q_columns)
                ptx.wgmma_wait(dv_acc, dv_acc, ONE, OUTPUTS_V, NONE)
                pipeline.release(smem, DO, n)
                before, row0 = row0, next_row0(smem, me, row0)
                number = i32(number - (before - row0) // BLOCK_M + (row_blocks if row0 >= before else i32(0)))
                # (4) dP^T = V dO^T of the next tile; after an item's last, for nothing
                if u32(n + u32(1)) != end:
                    enter_do(smem, turn, me, u32(n + u32(1)), row0)
                start_dp(dp, v_rows, do_rows)
                ptx.wgmma_wait(dk_acc, dk_acc, ONE, OUTPUTS_K, NONE)
                pipeline.release(smem, Q, n)
                n = u32(n + 1)
            ptx.wgmma_wait(dp, dp, NONE, SCORES, NONE)
            pipeline.release(smem, K, turn)
            pipeline.release(smem, V, turn)
            finish(maps, smem, turn, me, arrays, dk_acc, dv_acc, scales[2])
            turn = u32(turn + 1)
        if cuda.threadIdx.x % pipeline.WARP_GROUP == 0:
            ptx.bulk_wait()

    return movers_sm90.build_kernel(head_dim, head_dim_v, banded, to_map, ordered, options, tile, consume)
