"""Backward pass of float32 on Hopper: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, on
planes of float16 (see `numba_flash.cuda.split`), in the blocks of `numba_flash.cuda.sm90.backward`.

Sums of a tile leave the tensor cores before they are added to dK, dV and dQ. A consumer waits for
each of its products while those of the other one run, and neither needs the other: of a tile of dQ
each makes a part, from its own keys. Its numbers of dS have a power of two of their own, by which
they come near the end of float16.
"""

from dataclasses import replace

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.lang import cuda, f32, i32, inline, u32
from numba_flash.cuda.sm90 import item_split, pipeline, softmax_backward, store, wgmma
from numba_flash.cuda.sm90.arguments import END, may_go_upward, one_type
from numba_flash.cuda.sm90.config import BackwardConfig
from numba_flash.cuda.sm90.load_backward import WORD, build_kernel
from numba_flash.cuda.sm90.softmax_backward import BOUND, ROWS
from numba_flash.cuda.swizzle import ROW_BYTES, panel_bytes


def build(config: BackwardConfig):
    """Kernel ``backward_sm90(maps, dk, dv, lse2, delta, dq_sum, flags, extras, sizes, scales)``,
    its signature and compile options.

    maps : tensor maps of the planes of do, q, k and v as (b0, b1, heads, n, planes of columns).
    dk, dv : float32 (b0, b1, kv_heads, nk, head_dim).
    lse2, delta : as `numba_flash.cuda.preprocess` writes them for such planes, in base e.
    dq_sum : as in `numba_flash.cuda.sm90.backward`, but each consumer's part is of all columns, and
        dQ is the sum of both.
    flags, extras, sizes, scales : as there, and factors among the `extras`.
    """
    options, tile = config.options, config.tile
    D, DV, PLANES = tile.width(config.d), tile.width(config.dv), tile.planes
    BLOCK_M, BLOCK_N, SMEM = tile.block_m, tile.block_n, tile.layout(D, DV)
    Q, K, V, DO = map(one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do))
    WORK, DS, DS_BYTES, MINE = one_type(SMEM.work), SMEM.ds, SMEM.ds_bytes, ROWS * ROW_BYTES
    SCORES, PAIRS, OUTPUTS_K, OUTPUTS_V = BLOCK_M // 2, BLOCK_M // 4, D // 2, DV // 2
    OUTPUTS, P_WORDS = max(D, DV) // 2, PLANES * BLOCK_M // 4
    start_scores, _, _ = wgmma.build_split_scores(BLOCK_M, D, BLOCK_N, PLANES)
    start_dp, _, _ = wgmma.build_split_scores(BLOCK_M, DV, BLOCK_N, PLANES)
    start_dv = wgmma.build_split_rows(DV, BLOCK_M, BLOCK_M, PLANES)
    start_dk = wgmma.build_split_rows(D, BLOCK_M, BLOCK_M, PLANES)
    start_dq = wgmma.build_split_columns(D, ROWS, DS_BYTES, panel_bytes(BLOCK_N), PLANES)
    join_scores, _ = wgmma.build_split_sum(BLOCK_M, PLANES, pending=1)
    join_dp, _ = wgmma.build_split_sum(BLOCK_M, PLANES)
    (join_dv, add_dv), (join_dk, add_dk) = (wgmma.build_split_sum(n, PLANES) for n in (DV, D))
    split, _ = fragment.build_split(PAIRS, PLANES)
    put_words = store.build_put_words(BLOCK_M, BLOCK_N)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    upward = may_go_upward(config.ordered, options)
    shared = softmax_backward.build(D, DV, options, tile, upward=upward)
    note_bounds, bound, next_step = shared.note_bounds, shared.bound, shared.next_step
    wait_q, wait_do, recompute_p = shared.wait_q, shared.wait_do, shared.recompute_p
    differentiate = shared.differentiate
    commit_dq, put_dq = store.build_hand_over(SMEM.dq, D)
    begin_item, common_power, store_dk, store_dv = item_split.build(
        config.d, config.dv, note_bounds, options, tile
    )

    @inline
    def finish(smem, turn, me, n, dk, dv, dk_acc, dv_acc, extras, scale):
        """Let the last tile of dQ be added up, and store dK and dV of a work item."""
        commit_dq(smem, u32(n - u32(1)))
        pipeline.release_group(smem, K, turn)
        pipeline.release_group(smem, V, turn)
        store_dv(smem, turn, me * ROWS, dv, dv_acc, extras)
        store_dk(smem, turn, me * ROWS, dk, dk_acc, extras, scale)
        pipeline.release(smem, WORK, turn)

    def consume(smem, me, given):
        """Equations (1) to (7) for 64 keys of each work item and all its tiles of queries."""
        dk, dv, extras = given.dk, given.dv, given.extras
        sizes, scales = given.sizes, given.scales
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
        mine, turn, n, group = u32(me * MINE), u32(0), u32(0), i32(sizes.group)
        ds = u32(smem + u32(DS) + mine)
        while True:
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.uniform(pipeline.read(smem, WORK, turn, WORD.count))
            if count == END:
                break
            k_rows = u32(pipeline.tile(smem, K, turn) + mine)
            v_rows = u32(pipeline.tile(smem, V, turn) + mine)
            zero_k(dk_acc)
            zero_v(dv_acc)
            of_item = begin_item(smem, turn, me, extras, scales, group)
            step = bound(smem, me, BOUND.begin)
            begin, end = n, u32(n + u32(count * group))
            while n != end:
                q_rows, do_rows = pipeline.tile(smem, Q, n), pipeline.tile(smem, DO, n)
                # (1) S^T = K Q^T
                wait_q(smem, turn, me, n, step)
                k_descriptor = wgmma.descriptor(k_rows, u32(0))
                start_scores(sT, s_low, k_descriptor, wgmma.descriptor(q_rows, u32(0)))
                # (4) dP^T = V dO^T
                wait_do(smem, turn, me, n, step)
                v_descriptor = wgmma.descriptor(v_rows, u32(0))
                start_dp(dpT, dp_low, v_descriptor, wgmma.descriptor(do_rows, u32(0)))
                if n != begin:  # (7) of the tile before
                    commit_dq(smem, u32(n - u32(1)))
                # (2) P^T = exp(S^T - lse), in the place of S^T
                join_scores(sT, s_low)
                recompute_p(sT, smem, turn, me, n, step, of_item)
                # (5) dS^T = P^T * (dP^T - delta)
                join_dp(dpT, dp_low)
                for chunk in range(0, SCORES // 4, 2):
                    differentiate(dpT, sT, smem, me, n, chunk)
                # (3) dV = dV + P^T dO
                split(p, sT)
                start_dv(high, low, p, do_rows)
                power = common_power(smem, me, dpT)
                for e in range(SCORES):
                    dpT[e] *= power.up
                join_dv(high, low)
                pipeline.release_group(smem, DO, n)
                add_dv(dv_acc, high, f32(1))
                # (6) dK = dK + dS^T Q
                split(p, dpT)
                for plane in range(PLANES):
                    put_words(u32(ds + u32(plane * DS_BYTES)), p, plane * PAIRS)
                start_dk(high, low, p, q_rows)
                ptx.fence_proxy_async()
                step = next_step(smem, turn, me, step)
                pipeline.meet_warp_group(me)  # dS^T is there; they have read their tile's lse
                join_dk(high, low)
                pipeline.release_group(smem, Q, n)
                add_dk(dk_acc, high, power.down)
                # (7) dQ = dS K
                start_dq(high, low, ds, k_rows)
                join_dk(high, low)
                put_dq(smem, me, n, high, power.down)
                n = u32(n + 1)
            finish(smem, turn, me, n, dk, dv, dk_acc, dv_acc, extras, scales.scale)
            turn = u32(turn + 1)

    return build_kernel(replace(config, d=D, dv=DV, to_map=False), consume)
