"""Backward pass of float32 on Hopper for head dimensions beyond 64: as
`numba_flash.cuda.sm90.backward_split`, with another division of labour.

Registers of a warp group hold dK or dV of 64 keys, not both beside what a tile adds to them. So a
block owns 64 keys, for which one consumer makes S^T, P^T and dV, the other dP^T, dS^T and dK.
P^T goes to the other through shared memory, in float32 and in the order of fragments; of planes of
dS^T, which all its threads have left there, each consumer makes half of the columns of dQ. The
first begins the scores of a tile before dQ of the one before: the other makes dK meanwhile.
"""

from dataclasses import replace

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.lang import cuda, f32, i32, inline, u32
from numba_flash.cuda.sm90 import item_split, pipeline, softmax_backward, store, wgmma
from numba_flash.cuda.sm90.arguments import END, may_go_upward, one_type
from numba_flash.cuda.sm90.config import BackwardConfig
from numba_flash.cuda.sm90.load_backward import WORD, build_kernel
from numba_flash.cuda.sm90.softmax_backward import BOUND
from numba_flash.cuda.sm90.tiles import KEYS, WARP_GROUP
from numba_flash.cuda.swizzle import PANEL, panel_bytes, panels


def build(config: BackwardConfig):
    """Kernel as `numba_flash.cuda.sm90.backward_split.build`'s, but that a consumer's part in
    `dq_sum` is of some columns, as in `numba_flash.cuda.sm90.backward`.
    """
    options, tile = config.options, config.tile
    D, DV, PLANES = tile.width(config.d), tile.width(config.dv), tile.planes
    BLOCK_M, BLOCK_N, SMEM = tile.block_m, tile.block_n, tile.layout(D, DV)
    Q, K, V, DO = map(one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do))
    CONSUMERS = tile.consumers
    WORK, P, MADE = map(one_type, (SMEM.work, SMEM.p, SMEM.made))
    DS, DS_BYTES, POWER, HALF = SMEM.ds, SMEM.ds_bytes, SMEM.power, panel_bytes(BLOCK_N)
    SCORES, PAIRS, OUTPUTS_K, OUTPUTS_V = BLOCK_M // 2, BLOCK_M // 4, D // 2, DV // 2
    S_SUMS, DP_SUMS, OF_PANEL = SCORES * panels(D), SCORES * panels(DV), PANEL // 2
    P_WORDS, K_PLANE = PLANES * PAIRS, panels(D) * panel_bytes(BLOCK_N)
    start_scores, wait_scores, add_scores = wgmma.build_split_scores(BLOCK_M, D, BLOCK_N, PLANES)
    start_dp, wait_dp, add_dp = wgmma.build_split_scores(BLOCK_M, DV, BLOCK_N, PLANES)
    sum_dv = wgmma.build_split_values(BLOCK_M, DV, PLANES)
    sum_dk = wgmma.build_split_values(BLOCK_M, D, PLANES)

    LEFT, RIGHT = PANEL, D - PANEL  # columns of dQ
    start_left = wgmma.build_split_columns(LEFT, KEYS, DS_BYTES, K_PLANE, PLANES)
    start_right = wgmma.build_split_columns(RIGHT, KEYS, DS_BYTES, K_PLANE, PLANES)
    join_left, _ = wgmma.build_split_sum(LEFT, PLANES)
    join_right, _ = wgmma.build_split_sum(RIGHT, PLANES)
    commit_dq, put_left = store.build_hand_over(SMEM.dq, LEFT)
    _, put_right = store.build_hand_over(SMEM.dq, RIGHT)
    split, _ = fragment.build_split(PAIRS, PLANES)
    put_words = store.build_put_words(BLOCK_M, BLOCK_N)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    upward = may_go_upward(config.ordered, options)
    shared = softmax_backward.build(D, DV, options, tile, upward=upward)
    note_bounds, bound, next_step = shared.note_bounds, shared.bound, shared.next_step
    wait_q, wait_do, recompute_p = shared.wait_q, shared.wait_do, shared.recompute_p
    differentiate = shared.differentiate
    begin_item, common_power, store_dk, store_dv = item_split.build(
        config.d, config.dv, note_bounds, options, tile
    )

    @inline
    def mine(smem, n):
        """Where this thread's part of a fragment of P^T is."""
        return u32(pipeline.tile(smem, P, n) + u32(cuda.threadIdx.x % WARP_GROUP * 16))

    @inline
    def hand_p(smem, n, pT):
        """Leave P^T of the n-th tile to the other consumer."""
        to = mine(smem, n)
        pipeline.wait_free(smem, P, n)
        for j in range(SCORES // 4):
            four = pT[4 * j], pT[4 * j + 1], pT[4 * j + 2], pT[4 * j + 3]
            ptx.store_shared_vector(u32(to + u32(2048 * j)), four)
        pipeline.commit(smem, P, n)

    @inline
    def take_p(smem, n, pT):
        """P^T of the n-th tile from the other consumer."""
        at = mine(smem, n)
        pipeline.wait_ready(smem, P, n)
        for j in range(SCORES // 4):
            four = ptx.load_shared_words(u32(at + u32(2048 * j)))
            for i in range(4):
                pT[4 * j + i] = ptx.as_float32(four[i])
        pipeline.release(smem, P, n)

    @inline
    def hand_ds(smem, n, p, power):
        """Leave planes of dS^T of the n-th tile, which was multiplied by a power of two, to both
        consumers, and what undoes that to the first.
        """
        pipeline.wait_free(smem, MADE, n)
        for plane in range(PLANES):
            put_words(u32(smem + u32(DS + plane * DS_BYTES)), p, plane * PAIRS)
        if cuda.threadIdx.x % WARP_GROUP == 0:
            ptx.store_shared(u32(smem + u32(POWER)), i32(ptx.as_uint32(power.down)))
        ptx.fence_proxy_async()
        pipeline.commit(smem, MADE, n)

    @inline
    def make_left(smem, turn, n, high, low):
        """(7) DQ = dS K of the n-th tile: the columns of the first consumer."""
        pipeline.wait_ready(smem, MADE, n)
        down = ptx.as_float32(u32(ptx.load_shared(u32(smem + u32(POWER)))))
        start_left(high, low, u32(smem + u32(DS)), pipeline.tile(smem, K, turn))
        join_left(high, low)
        pipeline.release(smem, MADE, n)
        put_left(smem, 0, n, high, down)

    @inline
    def consume_scores(smem, dv, high, low, extras, sizes, scales):
        """Equations (1) to (3) of each work item and all its tiles of queries, and (7) for the
        first columns.
        """
        # registers of each thread
        sT = cuda.local.array(S_SUMS, f32)  # fragment of S^T, then of P^T, and sums of S^T behind
        s_low = cuda.local.array(SCORES, f32)  # of its products with low planes
        p = cuda.local.array(P_WORDS, u32)  # of P^T, two elements of 16 bits each
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        turn, n, group = u32(0), u32(0), i32(sizes.group)
        while True:
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.uniform(pipeline.read(smem, WORK, turn, WORD.count))
            if count == END:
                break
            zero_v(dv_acc)
            of_item = begin_item(smem, turn, 0, extras, scales, group)
            k_rows = wgmma.descriptor(pipeline.tile(smem, K, turn), u32(0))
            step = bound(smem, 0, BOUND.begin)
            begin, end = n, u32(n + u32(count * group))
            while n != end:
                # (1) S^T = K Q^T
                wait_q(smem, turn, 0, n, step)
                q_rows = wgmma.descriptor(pipeline.tile(smem, Q, n), u32(0))
                start_scores(sT, s_low, k_rows, q_rows)
                wait_scores(sT, s_low)
                add_scores(sT, s_low)
                # (2) P^T = exp(S^T - lse), in the place of S^T
                recompute_p(sT, smem, turn, 0, n, step, of_item)
                hand_p(smem, n, sT)
                pipeline.release_group(smem, Q, n)  # the other does so after all have left P^T
                if n != begin:  # (7) of the tile before
                    make_left(smem, turn, u32(n - u32(1)), high, low)
                # (3) dV = dV + P^T dO
                wait_do(smem, turn, 0, n, step)
                split(p, sT)
                if n != begin:
                    commit_dq(smem, u32(n - u32(1)))
                sum_dv(dv_acc, high, low, p, pipeline.tile(smem, DO, n), f32(1))
                pipeline.release_group(smem, DO, n)
                step = next_step(smem, turn, 0, step)
                n = u32(n + 1)
            make_left(smem, turn, u32(n - u32(1)), high, low)
            commit_dq(smem, u32(n - u32(1)))
            pipeline.release_group(smem, K, turn)
            pipeline.release_group(smem, V, turn)
            store_dv(smem, turn, 0, dv, dv_acc, extras)
            pipeline.release(smem, WORK, turn)
            turn = u32(turn + 1)

    @inline
    def consume_gradients(smem, dk, high, low, extras, sizes, scales):
        """Equations (4) to (6) likewise, and (7) for the other columns."""
        # registers of each thread
        dpT = cuda.local.array(DP_SUMS, f32)  # fragment of dP^T, then of dS^T, and sums of dP^T
        dp_low = cuda.local.array(SCORES, f32)  # of its products with low planes
        pT = cuda.local.array(SCORES, f32)  # of P^T
        p = cuda.local.array(P_WORDS, u32)  # of dS^T, two elements of 16 bits each
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        turn, n, group = u32(0), u32(0), i32(sizes.group)
        while True:
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.uniform(pipeline.read(smem, WORK, turn, WORD.count))
            if count == END:
                break
            zero_k(dk_acc)
            of_item = begin_item(smem, turn, 1, extras, scales, group)
            k_right = u32(pipeline.tile(smem, K, turn) + u32(HALF))
            v_rows = wgmma.descriptor(pipeline.tile(smem, V, turn), u32(0))
            step = bound(smem, 1, BOUND.begin)
            begin, end = n, u32(n + u32(count * group))
            while n != end:
                # (4) dP^T = V dO^T
                wait_do(smem, turn, 1, n, step)
                do_rows = wgmma.descriptor(pipeline.tile(smem, DO, n), u32(0))
                start_dp(dpT, dp_low, v_rows, do_rows)
                if n != begin:  # (7) of the tile before
                    commit_dq(smem, u32(n - u32(1)))
                wait_dp(dpT, dp_low)
                add_dp(dpT, dp_low)
                # (5) dS^T = P^T * (dP^T - delta)
                take_p(smem, n, pT)
                for chunk in range(0, SCORES // 4, 2):
                    differentiate(dpT, pT, smem, 0, n, chunk)
                power = common_power(smem, 1, dpT)
                pipeline.release_group(smem, DO, n)
                for e in range(SCORES):
                    dpT[e] *= power.up
                split(p, dpT)
                hand_ds(smem, n, p, power)
                # (6) dK = dK + dS^T Q
                pipeline.wait_ready(smem, Q, n)  # zeros beyond it are there since P^T is
                sum_dk(dk_acc, high, low, p, pipeline.tile(smem, Q, n), power.down)
                pipeline.release_group(smem, Q, n)
                # (7) dQ = dS K
                pipeline.wait_ready(smem, MADE, n)
                start_right(high, low, u32(smem + u32(DS)), k_right)
                step = next_step(smem, turn, 1, step)
                join_right(high, low)
                put_right(smem, 1, n, high, power.down)
                n = u32(n + 1)
            commit_dq(smem, u32(n - u32(1)))
            pipeline.release_group(smem, K, turn)
            pipeline.release_group(smem, V, turn)
            store_dk(smem, turn, 0, dk, dk_acc, extras, of_item.scale)
            pipeline.release(smem, WORK, turn)
            turn = u32(turn + 1)

    def consume(smem, me, given):
        """One consumer makes weights, the other gradients of scores."""
        extras, sizes, scales = given.extras, given.sizes, given.scales
        high = cuda.local.array(OF_PANEL, f32)  # registers: of what a tile adds to dV, dK or dQ
        low = cuda.local.array(OF_PANEL, f32)  # of its products with low planes
        if cuda.threadIdx.x % WARP_GROUP == 0 and me == 0:
            pipeline.initialise(smem, P, WARP_GROUP, WARP_GROUP)
            pipeline.initialise(smem, MADE, WARP_GROUP, WARP_GROUP)
            ptx.fence_mbarrier_init()
        pipeline.meet_consumers(CONSUMERS)  # everyone sees the barriers initialised
        if me == 0:
            consume_scores(smem, given.dv, high, low, extras, sizes, scales)
        else:
            consume_gradients(smem, given.dk, high, low, extras, sizes, scales)

    return build_kernel(replace(config, d=D, dv=DV, to_map=False), consume)
