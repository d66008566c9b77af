"""Backward pass of float32 on Hopper: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, on
planes of float16 (`passes.write_planes`), in the blocks of `sm90.backward.backward`.

Sums of a tile leave the tensor cores before they are added to dK, dV and dQ. Up to head dimension
64 consumers own keys, and none needs the other: each makes dQ of a tile from its own keys. A power
of two of their own brings its numbers of dS near the end of float16.

Beyond that, registers of a warp group hold dK or dV of 64 keys, not both beside what a tile adds to
them. So a block owns 64 keys, for which one consumer makes S^T, P^T and dV, the other dP^T, dS^T
and dK. P^T goes to the other through shared memory, in float32 and in the order of fragments; of
planes of dS^T, which all its threads have left there, each consumer makes half of the columns of
dQ. The first begins the scores of a tile before dQ of the one before, while the other makes dK.
"""

from dataclasses import replace

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, u32
from numba_flash.cuda.score import softmax
from numba_flash.cuda.score.swizzle import PANEL, ROW_BYTES, panel_bytes, panels
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import END, one_type
from numba_flash.cuda.sm90.backward.load_backward import build_kernel
from numba_flash.cuda.sm90.backward.softmax_backward import BOUND, ROWS, await_item
from numba_flash.cuda.sm90.config import BackwardConfig
from numba_flash.cuda.sm90.fp16x2 import item_planes
from numba_flash.cuda.sm90.hopper_kernel import Arrivals
from numba_flash.cuda.sm90.tiles import KEYS, WARP_GROUP


def build(config: BackwardConfig):
    """Kernel ``backward_sm90(maps, dk, dv, lse2, delta, dq_sum, flags, extras, sizes, scales)``,
    its signature and compile options.

    maps : tensor maps of the planes of do, q, k and v as (b0, b1, heads, n, planes of columns).
    dk, dv : float32 (b0, b1, kv_heads, nk, head_dim).
    lse2, delta : as `numba_flash.cuda.passes.preprocess` writes them for such planes, in base e.
    dq_sum : as in `backward.backward`; if consumers have keys of their own, each one's part is of
        all columns, and dQ is the sum of both.
    flags, extras, sizes, scales : as there, and factors among the `extras`.
    """
    tile, item = config.tile, item_planes.build(config)
    config = replace(config, d=tile.width(config.d), dv=tile.width(config.dv), to_map=False)
    layout = tile.layout(config.d, config.dv)
    if not tile.shares_keys:
        return build_kernel(config, build_keys_apart(config, layout, item))
    handed = one_type(layout.p), one_type(layout.made)
    consume = build_keys_shared(config, layout, item)
    return build_kernel(config, consume, (Arrivals(handed, WARP_GROUP, WARP_GROUP),))


def build_keys_apart(config, layout, item):
    """``consume(smem, me, given)`` of consumers that have keys of their own."""
    D, DV, tile = config.d, config.dv, config.tile
    BLOCK_M, BLOCK_N, PLANES = tile.block_m, tile.block_n, tile.planes
    Q, K, V, DO, WORK = map(one_type, (layout.q, layout.k, layout.v, layout.do, layout.work))
    DS, DS_BYTES, MINE = layout.ds, layout.ds_bytes, ROWS * ROW_BYTES
    SCORES, OUTPUTS_K, OUTPUTS_V, OUTPUTS = BLOCK_M // 2, D // 2, DV // 2, max(D, DV) // 2
    P_WORDS = PLANES * BLOCK_M // 4
    start_scores, _, _ = wgmma.build_planes_scores(BLOCK_M, D, BLOCK_N, PLANES)
    start_dp, _, _ = wgmma.build_planes_scores(BLOCK_M, DV, BLOCK_N, PLANES)
    start_dv = wgmma.build_planes_rows(DV, BLOCK_M, BLOCK_M, PLANES)
    start_dk = wgmma.build_planes_rows(D, BLOCK_M, BLOCK_M, PLANES)
    start_dq = wgmma.build_planes_columns(D, ROWS, DS_BYTES, panel_bytes(BLOCK_N), PLANES)
    join_scores, _ = wgmma.build_planes_sum(BLOCK_M, PLANES, pending=1)
    join_dp, _ = wgmma.build_planes_sum(BLOCK_M, PLANES)
    (join_dv, add_dv), (join_dk, add_dk) = (wgmma.build_planes_sum(n, PLANES) for n in (DV, D))
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    commit_dq, put_dq = store.build_hand_over(layout.dq, D)
    scores = item.scores

    def consume(smem, me, given):
        """Equations (1) to (7) for 64 keys of each work item and all its tiles of queries."""
        dk, dv, extras, sizes, scales = given.dk, given.dv, given.extras, given.sizes, given.scales
        # registers of each thread
        sT = cuda.local.array(SCORES, f32)  # fragment of S^T, then of P^T
        dpT = cuda.local.array(SCORES, f32)  # of dP^T, then of dS^T
        s_low = cuda.local.array(SCORES, f32)  # of their products with low planes
        dp_low = cuda.local.array(SCORES, f32)
        p = cuda.local.array(P_WORDS, u32)  # of P^T, then of dS^T, two elements of 16 bits each
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        high = cuda.local.array(OUTPUTS, f32)  # of what a tile adds to one of them, or to dQ
        low = cuda.local.array(OUTPUTS, f32)  # of its products with low planes
        mine, item_n, n, group = u32(me * MINE), u32(0), u32(0), i32(sizes.group)
        ds = u32(smem + u32(DS) + mine)
        while True:
            count = await_item(smem, WORK, item_n)
            if count == END:
                break
            k_rows = u32(pipeline.tile(smem, K, item_n) + mine)
            v_rows = u32(pipeline.tile(smem, V, item_n) + mine)
            zero_k(dk_acc)
            zero_v(dv_acc)
            of_item = item.begin(smem, item_n, me, extras, scales, group)
            step = scores.bound(smem, me, BOUND.begin)
            begin, end = n, u32(n + u32(count * group))
            while n != end:
                q_rows, do_rows = pipeline.tile(smem, Q, n), pipeline.tile(smem, DO, n)
                # (1) S^T = K Q^T
                scores.wait_q(smem, item_n, me, n, step)
                k_descriptor = wgmma.descriptor(k_rows, u32(0))
                start_scores(sT, s_low, k_descriptor, wgmma.descriptor(q_rows, u32(0)))
                # (4) dP^T = V dO^T
                scores.wait_do(smem, item_n, me, n, step)
                v_descriptor = wgmma.descriptor(v_rows, u32(0))
                start_dp(dpT, dp_low, v_descriptor, wgmma.descriptor(do_rows, u32(0)))
                if n != begin:  # (7) of the tile before
                    commit_dq(smem, u32(n - u32(1)))
                # (2) P^T = exp(S^T - lse), in the place of S^T
                join_scores(sT, s_low)
                scores.recompute_p(sT, smem, item_n, me, n, step, of_item)
                # (5) dS^T = P^T * (dP^T - delta)
                join_dp(dpT, dp_low)
                for chunk in range(0, SCORES // 4, 2):
                    scores.differentiate(dpT, sT, smem, me, n, chunk)
                # (3) dV = dV + P^T dO
                item.split(p, sT)
                start_dv(high, low, p, do_rows)
                power = item.common_power(smem, me, dpT)
                for e in range(SCORES):
                    dpT[e] *= power.up
                join_dv(high, low)
                pipeline.release_group(smem, DO, n)
                add_dv(dv_acc, high, f32(1))
                # (6) dK = dK + dS^T Q
                item.split(p, dpT)
                item.put_planes(ds, p)
                start_dk(high, low, p, q_rows)
                ptx.fence_proxy_async()
                step = scores.next_step(smem, item_n, me, step)
                pipeline.meet_warp_group(me)  # dS^T is there; they have read their tile's lse
                join_dk(high, low)
                pipeline.release_group(smem, Q, n)
                add_dk(dk_acc, high, power.down)
                # (7) dQ = dS K
                start_dq(high, low, ds, k_rows)
                join_dk(high, low)
                put_dq(smem, me, n, high, power.down)
                n = u32(n + 1)
            item.end_tiles(smem, item_n, n)
            item.store_dv(smem, item_n, me * ROWS, dv, dv_acc, extras)
            item.store_dk(smem, item_n, me * ROWS, dk, dk_acc, extras, scales.scale)
            pipeline.release(smem, WORK, item_n)
            item_n = u32(item_n + 1)

    return consume


def build_between(layout, tile, item):
    """How consumers that share keys hand P^T and dS^T to each other:
    ``hand_p(smem, n, pT)`` and ``take_p(smem, n, pT)``: P^T of the n-th tile.
    ``hand_ds(smem, n, p, power)``: planes of its dS^T, which was multiplied by a power of two.
    """
    SCORES, P, MADE = tile.block_m // 2, one_type(layout.p), one_type(layout.made)
    DS, POWER = layout.ds, layout.largest

    @inline
    def mine(smem, n):
        """Where this thread's part of a fragment of P^T is."""
        return u32(pipeline.tile(smem, P, n) + u32(cuda.threadIdx.x % WARP_GROUP * 16))

    @inline
    def hand_p(smem, n, pT):
        """Write it for the other consumer."""
        to = mine(smem, n)
        pipeline.wait_free(smem, P, n)
        for j in range(SCORES // 4):
            four = pT[4 * j], pT[4 * j + 1], pT[4 * j + 2], pT[4 * j + 3]
            ptx.store_shared_vector(u32(to + u32(2048 * j)), four)
        pipeline.commit(smem, P, n)

    @inline
    def take_p(smem, n, pT):
        """Read what the other consumer wrote."""
        at = mine(smem, n)
        pipeline.wait_ready(smem, P, n)
        for j in range(SCORES // 4):
            four = ptx.load_shared_words(u32(at + u32(2048 * j)))
            for i in range(4):
                pT[4 * j + i] = ptx.as_float32(four[i])
        pipeline.release(smem, P, n)

    @inline
    def hand_ds(smem, n, p, power):
        """Write them for both consumers, and what undoes the power for the first."""
        pipeline.wait_free(smem, MADE, n)
        item.put_planes(u32(smem + u32(DS)), p)
        if cuda.threadIdx.x % WARP_GROUP == 0:
            ptx.store_shared(u32(smem + u32(POWER)), i32(ptx.as_uint32(power.down)))
        ptx.fence_proxy_async()
        pipeline.commit(smem, MADE, n)

    return hand_p, take_p, hand_ds


def build_keys_shared(config, layout, item):
    """``consume(smem, me, given)`` of consumers that share their keys; in ``given.dq_sum`` each has
    a part that is of some columns.
    """
    D, DV, tile = config.d, config.dv, config.tile
    BLOCK_M, BLOCK_N, PLANES = tile.block_m, tile.block_n, tile.planes
    Q, K, V, DO, WORK = map(one_type, (layout.q, layout.k, layout.v, layout.do, layout.work))
    MADE, DS, DS_BYTES, POWER = one_type(layout.made), layout.ds, layout.ds_bytes, layout.largest
    SCORES, OUTPUTS_K, OUTPUTS_V, OF_PANEL = BLOCK_M // 2, D // 2, DV // 2, PANEL // 2
    S_SUMS, DP_SUMS, P_WORDS = SCORES * panels(D), SCORES * panels(DV), PLANES * BLOCK_M // 4
    HALF, K_PLANE = panel_bytes(BLOCK_N), panels(D) * panel_bytes(BLOCK_N)
    start_scores, wait_scores, add_scores = wgmma.build_planes_scores(BLOCK_M, D, BLOCK_N, PLANES)
    start_dp, wait_dp, add_dp = wgmma.build_planes_scores(BLOCK_M, DV, BLOCK_N, PLANES)
    sum_dv = wgmma.build_planes_values(BLOCK_M, DV, PLANES)
    sum_dk = wgmma.build_planes_values(BLOCK_M, D, PLANES)
    LEFT, RIGHT = PANEL, D - PANEL  # columns of dQ
    start_left = wgmma.build_planes_columns(LEFT, KEYS, DS_BYTES, K_PLANE, PLANES)
    start_right = wgmma.build_planes_columns(RIGHT, KEYS, DS_BYTES, K_PLANE, PLANES)
    join_left, _ = wgmma.build_planes_sum(LEFT, PLANES)
    join_right, _ = wgmma.build_planes_sum(RIGHT, PLANES)
    commit_dq, put_left = store.build_hand_over(layout.dq, LEFT)
    _, put_right = store.build_hand_over(layout.dq, RIGHT)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    hand_p, take_p, hand_ds = build_between(layout, tile, item)
    scores = item.scores

    @inline
    def make_left(smem, item_n, n, high, low):
        """(7) DQ = dS K of the n-th tile: the columns of the first consumer."""
        pipeline.wait_ready(smem, MADE, n)
        down = ptx.as_float32(u32(ptx.load_shared(u32(smem + u32(POWER)))))
        start_left(high, low, u32(smem + u32(DS)), pipeline.tile(smem, K, item_n))
        join_left(high, low)
        pipeline.release(smem, MADE, n)
        put_left(smem, 0, n, high, down)

    @inline
    def consume_scores(smem, given, high, low):
        """Equations (1) to (3) of each work item and all its tiles of queries, and (7) for the
        first columns.
        """
        extras, scales, group = given.extras, given.scales, i32(given.sizes.group)
        # registers of each thread
        sT = cuda.local.array(S_SUMS, f32)  # fragment of S^T, then of P^T, and sums of S^T behind
        s_low = cuda.local.array(SCORES, f32)  # of its products with low planes
        p = cuda.local.array(P_WORDS, u32)  # of P^T, two elements of 16 bits each
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        item_n, n = u32(0), u32(0)
        while True:
            count = await_item(smem, WORK, item_n)
            if count == END:
                break
            zero_v(dv_acc)
            of_item = item.begin(smem, item_n, 0, extras, scales, group)
            k_rows = wgmma.descriptor(pipeline.tile(smem, K, item_n), u32(0))
            step = scores.bound(smem, 0, BOUND.begin)
            begin, end = n, u32(n + u32(count * group))
            while n != end:
                # (1) S^T = K Q^T
                scores.wait_q(smem, item_n, 0, n, step)
                q_rows = wgmma.descriptor(pipeline.tile(smem, Q, n), u32(0))
                start_scores(sT, s_low, k_rows, q_rows)
                wait_scores(sT, s_low)
                add_scores(sT, s_low)
                # (2) P^T = exp(S^T - lse), in the place of S^T
                scores.recompute_p(sT, smem, item_n, 0, n, step, of_item)
                hand_p(smem, n, sT)
                pipeline.release_group(smem, Q, n)  # the other does so after all have left P^T
                if n != begin:  # (7) of the tile before
                    make_left(smem, item_n, u32(n - u32(1)), high, low)
                # (3) dV = dV + P^T dO
                scores.wait_do(smem, item_n, 0, n, step)
                item.split(p, sT)
                if n != begin:
                    commit_dq(smem, u32(n - u32(1)))
                sum_dv(dv_acc, high, low, p, pipeline.tile(smem, DO, n), f32(1))
                pipeline.release_group(smem, DO, n)
                step = scores.next_step(smem, item_n, 0, step)
                n = u32(n + 1)
            make_left(smem, item_n, u32(n - u32(1)), high, low)
            item.end_tiles(smem, item_n, n)
            item.store_dv(smem, item_n, 0, given.dv, dv_acc, extras)
            pipeline.release(smem, WORK, item_n)
            item_n = u32(item_n + 1)

    @inline
    def consume_gradients(smem, given, high, low):
        """Equations (4) to (6) of the same items and tiles, and (7) for the other columns."""
        extras, scales, group = given.extras, given.scales, i32(given.sizes.group)
        # registers of each thread
        dpT = cuda.local.array(DP_SUMS, f32)  # fragment of dP^T, then of dS^T, and sums of dP^T
        dp_low = cuda.local.array(SCORES, f32)  # of its products with low planes
        pT = cuda.local.array(SCORES, f32)  # of P^T
        p = cuda.local.array(P_WORDS, u32)  # of dS^T, two elements of 16 bits each
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        item_n, n = u32(0), u32(0)
        while True:
            count = await_item(smem, WORK, item_n)
            if count == END:
                break
            zero_k(dk_acc)
            of_item = item.begin(smem, item_n, 1, extras, scales, group)
            k_right = u32(pipeline.tile(smem, K, item_n) + u32(HALF))
            v_rows = wgmma.descriptor(pipeline.tile(smem, V, item_n), u32(0))
            step = scores.bound(smem, 1, BOUND.begin)
            begin, end = n, u32(n + u32(count * group))
            while n != end:
                # (4) dP^T = V dO^T
                scores.wait_do(smem, item_n, 1, n, step)
                do_rows = wgmma.descriptor(pipeline.tile(smem, DO, n), u32(0))
                start_dp(dpT, dp_low, v_rows, do_rows)
                if n != begin:  # (7) of the tile before
                    commit_dq(smem, u32(n - u32(1)))
                wait_dp(dpT, dp_low)
                add_dp(dpT, dp_low)
                # (5) dS^T = P^T * (dP^T - delta)
                take_p(smem, n, pT)
                for chunk in range(0, SCORES // 4, 2):
                    scores.differentiate(dpT, pT, smem, 0, n, chunk)
                power = item.common_power(smem, 1, dpT)
                pipeline.release_group(smem, DO, n)
                for e in range(SCORES):
                    dpT[e] *= power.up
                item.split(p, dpT)
                hand_ds(smem, n, p, power)
                # (6) dK = dK + dS^T Q
                pipeline.wait_ready(smem, Q, n)  # zeros beyond it are there since P^T is
                sum_dk(dk_acc, high, low, p, pipeline.tile(smem, Q, n), power.down)
                pipeline.release_group(smem, Q, n)
                # (7) dQ = dS K
                pipeline.wait_ready(smem, MADE, n)
                start_right(high, low, u32(smem + u32(DS)), k_right)
                step = scores.next_step(smem, item_n, 1, step)
                join_right(high, low)
                put_right(smem, 1, n, high, power.down)
                n = u32(n + 1)
            item.end_tiles(smem, item_n, n)
            item.store_dk(smem, item_n, 0, given.dk, dk_acc, extras, of_item.scale)
            pipeline.release(smem, WORK, item_n)
            item_n = u32(item_n + 1)

    def consume(smem, me, given):
        """One consumer makes weights, the other gradients of scores."""
        high = cuda.local.array(OF_PANEL, f32)  # registers: of what a tile adds to dV, dK or dQ
        low = cuda.local.array(OF_PANEL, f32)  # of its products with low planes
        cuda.syncwarp()  # without it ptxas spills more registers
        if me == 0:
            consume_scores(smem, given, high, low)
        else:
            consume_gradients(smem, given, high, low)

    return consume
