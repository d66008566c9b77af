"""Backward pass on Hopper for head dimensions beyond 128: `numba_flash.cuda.sm90.backward.backward`
with another division of labour.

dK and dV of 64 keys and 256 columns fill the registers of two warp groups. So a block owns 64 keys,
and each of its consumers half of the columns of dK and dV. Of S^T and dP^T each computes what
belongs to 64 of the 128 queries of a tile. P^T and dS^T go through shared memory, where both
consumers read all of them.

A tile of dQ would be eight times as large as the tile of dS that it is made from, and adding it up
in memory would take longer than all products. Instead dS^T of some blocks of keys is written to
memory, and `numba_flash.cuda.sm90.dq.dq` makes dQ of it.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, u32, u64
from numba_flash.cuda.score import softmax
from numba_flash.cuda.score.swizzle import ROW_BYTES, panel_bytes, panels
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import END, one_type
from numba_flash.cuda.sm90.backward import softmax_backward
from numba_flash.cuda.sm90.backward.load_backward import WORD, build_kernel
from numba_flash.cuda.sm90.backward.softmax_backward import BOUND, await_item, place_of
from numba_flash.cuda.sm90.config import BackwardConfig
from numba_flash.cuda.sm90.pipeline import TilePlace
from numba_flash.cuda.sm90.tiles import WARP_GROUP


def build(config: BackwardConfig):
    """Kernel as `numba_flash.cuda.sm90.backward.backward.build`'s, but that

    dq_sum : dS^T, a tile of 64 keys and 128 queries, panels of 64 queries, per (b0, b1, head, row
        block, block of keys).
    sizes : the items of other blocks of keys than those are not done.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    options, tile = config.options, config.tile
    BLOCK_M, BLOCK_N, CONSUMERS = tile.block_m, tile.block_n, tile.consumers
    SMEM = tile.layout(head_dim, head_dim_v)
    Q, K, V, DO, WORK = map(one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do, SMEM.work))
    P, DS, ROOM = SMEM.p, SMEM.ds, tile.ds_bytes
    Q_PANEL, K_PANEL, MINE = panel_bytes(BLOCK_M), panel_bytes(BLOCK_N), 64 * ROW_BYTES
    HALF_K, HALF_V = tile.width(head_dim) // 2, tile.width(head_dim_v) // 2
    # what is left of a consumer's columns
    LEFT_K, LEFT_V = panels(HALF_K) * Q_PANEL, panels(HALF_V) * Q_PANEL
    OUTPUTS_K, OUTPUTS_V, SCORES = HALF_K // 2, HALF_V // 2, 32
    ONES, NONE, ONE = (1.0, 1.0), 0, 1
    TO_MAP, SEQUENCES, BFLOAT16 = config.to_map, options.sequences, dtype == "bfloat16"
    shared = softmax_backward.build(head_dim, head_dim_v, options, tile, BFLOAT16)
    note_bounds, bound, next_step = shared.note_bounds, shared.bound, shared.next_step
    wait_q, wait_do, recompute_p = shared.wait_q, shared.wait_do, shared.recompute_p
    differentiate_cap, differentiate = shared.differentiate_cap, shared.differentiate
    factors = shared.factors
    clear_k = pipeline.build_clear_tail(head_dim, BLOCK_N)
    clear_v = pipeline.build_clear_tail(head_dim_v, BLOCK_N)
    start_scores = wgmma.build_sum(64, -(-head_dim // 16), K_PANEL, Q_PANEL, BFLOAT16, False)
    start_dp = wgmma.build_sum(64, -(-head_dim_v // 16), K_PANEL, Q_PANEL, BFLOAT16, False)
    start_dv = wgmma.build_sum(HALF_V, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    start_dk = wgmma.build_sum(HALF_K, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    put = store.build_put(64, 0, 1, BFLOAT16)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    stage_dk = store.build_stage(HALF_K, 2, BFLOAT16)
    stage_dv = store.build_stage(HALF_V, 2, BFLOAT16)

    def put_half(width, half, first):
        return store.build_put_row(min(half, max(0, width - first)), False, BFLOAT16)

    put_dk_left, put_dk_right = (put_half(head_dim, HALF_K, first) for first in (0, HALF_K))
    put_dv_left, put_dv_right = (put_half(head_dim_v, HALF_V, first) for first in (0, HALF_V))

    @inline
    def begin_item(smem, item_n, me, group):
        """Wait for K and V of a work item; returns its first step."""
        note_bounds(smem, item_n, me, group)
        keys = pipeline.read(smem, WORK, item_n, WORD.keys)
        keys -= pipeline.read(smem, WORK, item_n, WORD.row0)
        pipeline.wait_ready(smem, K, item_n)
        pipeline.wait_ready(smem, V, item_n)
        if SEQUENCES:
            clear_k(smem, K, item_n, keys, me)
            clear_v(smem, V, item_n, keys, me)
        return bound(smem, me, BOUND.begin)

    @inline
    def share(smem, region, me, x):
        """Leave this consumer's half of P^T or dS^T in shared memory, for both; they have read what
        was there before they released Q.
        """
        put(u32(smem + u32(region + me * K_PANEL)), x, ONES)
        ptx.fence_proxy_async()
        pipeline.meet_consumers(CONSUMERS)

    @inline
    def store_ds(smem, me, ds, number, blocks, block):
        """Have this consumer's half of dS^T copied to memory."""
        if cuda.threadIdx.x % WARP_GROUP == 0:
            at = u64(u32(number) * u32(blocks) + u32(block)) * u64(CONSUMERS) + u64(me)
            to = u64(ptx.global_address(ds) + at * u64(K_PANEL))
            ptx.bulk_store(to, u32(smem + u32(DS + me * K_PANEL)), u32(K_PANEL))
            ptx.bulk_commit()

    @inline
    def await_store():
        """What this thread has had copied has been read; the others know once all consumers have
        met.
        """
        if cuda.threadIdx.x % WARP_GROUP == 0:
            ptx.bulk_wait_read()

    @inline
    def finish(maps, smem, item_n, me, dk, dv, dk_acc, dv_acc, scales):
        """Store this consumer's columns of dK and dV of a work item, by way of where P^T or dS^T
        was.
        """
        factor = cuda.local.array(2, f32)  # registers: what dV and dK are multiplied by
        scaled = cuda.local.array(2, f32)
        at = place_of(smem, WORK, item_n, 0)
        k0 = pipeline.read(smem, WORK, item_n, WORD.k0)
        keys = pipeline.read(smem, WORK, item_n, WORD.keys)
        factors(smem, item_n, factor, scaled, scales)
        pipeline.release(smem, WORK, item_n)
        if TO_MAP:
            room = u32(smem + u32(P + me * ROOM))
            await_store()
            pipeline.meet_consumers(CONSUMERS)  # P^T and dS^T have been read
            of_dv = TilePlace(me * HALF_V, at.row, at.head, at.b1, at.b0)
            stage_dv(maps[5], room, dv_acc, factor, me, of_dv)
            of_dk = TilePlace(me * HALF_K, at.row, at.head, at.b1, at.b0)
            stage_dk(maps[4], room, dk_acc, scaled, me, of_dk)
            await_store()
            pipeline.meet_consumers(CONSUMERS)  # there is room for P^T and dS^T again
        else:
            for r in range(2):
                j = at.row + wgmma.first_row() + 8 * r
                if j < keys:
                    to_dv = ptx.global_address(dv[at.b0, at.b1, at.head, k0 + j])
                    to_dk = ptx.global_address(dk[at.b0, at.b1, at.head, k0 + j])
                    if me == 0:
                        put_dv_left(to_dv, dv_acc, factor, r)
                        put_dk_left(to_dk, dk_acc, scaled, r)
                    else:
                        put_dv_right(u64(to_dv + u64(2 * HALF_V)), dv_acc, factor, r)
                        put_dk_right(u64(to_dk + u64(2 * HALF_K)), dk_acc, scaled, r)

    def consume(smem, me, given):
        """Equations (1) to (6) for the keys of each work item and all its tiles of queries, the
        last tile first.
        """
        maps, dk, dv, lse2, ds = given.maps, given.dk, given.dv, given.lse2, given.dq_sum
        sizes, scales = given.sizes, given.scales
        # registers of each thread
        sT = cuda.local.array(SCORES, f32)  # fragment of S^T, then of P^T
        dpT = cuda.local.array(SCORES, f32)  # of dP^T, then of dS^T
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        pT_all = wgmma.descriptor(smem + u32(P), u32(0))
        dsT_all = wgmma.descriptor(smem + u32(DS), u32(0))
        q_tile, do_tile = pipeline.tile(smem, Q, u32(0)), pipeline.tile(smem, DO, u32(0))
        q_rows = wgmma.descriptor(q_tile + u32(me * MINE), u32(0))
        do_rows = wgmma.descriptor(do_tile + u32(me * MINE), u32(0))
        q_columns = wgmma.descriptor(q_tile + u32(me * LEFT_K), u32(Q_PANEL))
        do_columns = wgmma.descriptor(do_tile + u32(me * LEFT_V), u32(Q_PANEL))
        item_n, n, row_blocks = u32(0), u32(0), i32(lse2.shape[3] // BLOCK_M)
        while True:
            count = await_item(smem, WORK, item_n)
            if count == END:
                break
            k_rows = wgmma.descriptor(pipeline.tile(smem, K, item_n), u32(0))
            v_rows = wgmma.descriptor(pipeline.tile(smem, V, item_n), u32(0))
            item_row0 = pipeline.read(smem, WORK, item_n, WORD.row0)
            block = i32(item_row0 // BLOCK_N - sizes.first_block)
            zero_k(dk_acc)
            zero_v(dv_acc)
            step = begin_item(smem, item_n, me, i32(sizes.group))
            end = u32(n + u32(count * i32(sizes.group)))
            number = i32(pipeline.read(smem, WORK, item_n, WORD.base) + step)
            # (4) dP^T = V dO^T of the first tile
            wait_do(smem, item_n, me, n, step)
            start_dp(dpT, v_rows, do_rows)
            while n != end:
                # (1) S^T = K Q^T
                wait_q(smem, item_n, me, n, step)
                start_scores(sT, k_rows, q_rows)
                await_store()
                ptx.wgmma_wait(sT, dpT, NONE, SCORES, SCORES)
                # (2) P^T = exp(S^T - lse), in the place of S^T
                recompute_p(sT, smem, item_n, me, n, step, scales)
                share(smem, P, me, sT)
                # (3) dV = dV + P^T dO
                start_dv(dv_acc, pT_all, do_columns)
                # (5) dS^T = P^T * (dP^T - delta), in the place of dP^T
                differentiate_cap(dpT, sT, smem, me, n, scales.scale_log2)
                for chunk in range(0, SCORES // 4, 2):
                    differentiate(dpT, sT, smem, me, n, chunk)
                share(smem, DS, me, dpT)
                store_ds(smem, me, ds, number, sizes.blocks, block)
                # (6) dK = dK + dS^T Q
                start_dk(dk_acc, dsT_all, q_columns)
                ptx.wgmma_wait(dv_acc, dv_acc, ONE, OUTPUTS_V, NONE)
                pipeline.release_group(smem, DO, n)
                before, step = step, next_step(smem, item_n, me, step)
                next_head = row_blocks if step >= before else i32(0)
                number = i32(number - (before - step) + next_head)
                # (4) dP^T = V dO^T of the next tile; after an item's last one nobody uses it
                if u32(n + u32(1)) != end:
                    wait_do(smem, item_n, me, u32(n + u32(1)), step)
                start_dp(dpT, v_rows, do_rows)
                ptx.wgmma_wait(dk_acc, dk_acc, ONE, OUTPUTS_K, NONE)
                pipeline.release_group(smem, Q, n)
                n = u32(n + 1)
            ptx.wgmma_wait(dpT, dpT, NONE, SCORES, NONE)
            pipeline.release_group(smem, K, item_n)
            pipeline.release_group(smem, V, item_n)
            finish(maps, smem, item_n, me, dk, dv, dk_acc, dv_acc, scales)
            item_n = u32(item_n + 1)
        if cuda.threadIdx.x % WARP_GROUP == 0:
            ptx.bulk_wait()

    return build_kernel(config, consume)
