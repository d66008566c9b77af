"""Backward pass on Hopper: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, in persistent
blocks as in the forward pass.

A block owns a block of keys and walks over the queries of every head of its group. Threads of its
first warp group move data (`load_backward`): Q and dO in, tiles of dQ out, where they are added up
as float32 (`add_dq`). Every other warp group, a consumer, owns 64 of the keys. It computes S^T and
dP^T, keys along the rows, so that P^T can be an operand of dV as it is. dS^T goes to shared memory,
where each consumer reads its part for dK, and all of it along the other direction for half of dQ.

A tile of dQ is the sum of what several blocks add. If `ordered`, they do so in the order of their
keys, or the other way round: a flag counts who was there.
"""

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.lang import cuda, f32, i32, inline, u32
from numba_flash.cuda.sm90 import begin_backward, pipeline, softmax_backward, store, wgmma
from numba_flash.cuda.sm90.arguments import BACKWARD_TILES, END, may_go_upward, one_type
from numba_flash.cuda.sm90.config import BackwardConfig
from numba_flash.cuda.sm90.load_backward import WORD, build_kernel
from numba_flash.cuda.sm90.pipeline import Place
from numba_flash.cuda.sm90.softmax_backward import ROWS
from numba_flash.cuda.sm90.tiles import DQ_PART, WARP_GROUP
from numba_flash.cuda.swizzle import ROW_BYTES, panel_bytes


def build(config: BackwardConfig):
    """Kernel ``backward_sm90(maps, dk, dv, lse2, delta, dq_sum, flags, extras, sizes, scales)``,
    its signature and compile options.

    maps : tensor maps of do, q, k and v as (b0, b1, heads, n, head_dim), boxes of one panel of a
        tile, and with ``config.to_map`` of dk and dv; where a warp rounds dQ, of dq.
    dk, dv : (b0, b1, kv_heads, nk, head_dim), as words of two elements.
    lse2, delta : float32 (b0, b1, heads, row blocks * BLOCK_M), as
        `numba_flash.cuda.sm90.preprocess` numbers and writes them.
    dq_sum : float32, 64 x 64 elements per (b0, b1, head, row block, consumer), in the order of
        fragments.
    flags : int32, one per (b0, b1, head, row block), and one more: the number of the next work
        item.
    extras : lengths, and with ``options.listed`` lists, see `numba_flash.cuda.arguments`.
    sizes, scales : `Sizes` and `Scales` of `numba_flash.cuda.sm90.arguments`.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    banded, to_map, ordered = config.banded, config.to_map, config.ordered
    options, tile = config.options, config.tile
    BLOCK_M, BLOCK_N, CONSUMERS = tile.block_m, tile.block_n, tile.consumers
    SMEM = tile.layout(head_dim, head_dim_v)
    Q, K, V, DO = map(one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do))
    DQ, WORK = map(one_type, (SMEM.dq, SMEM.work))
    Q_PANEL, K_PANEL, MINE = panel_bytes(BLOCK_M), panel_bytes(BLOCK_N), ROWS * ROW_BYTES
    DS, DS_BYTES = SMEM.ds, SMEM.ds_bytes
    DQ_TILE, DQ_BYTES = SMEM.dq.tiles, 4 * DQ_PART  # where it is, and a consumer's part of it
    SCORES, PAIRS, OUTPUTS_K, OUTPUTS_V = BLOCK_M // 2, BLOCK_M // 4, head_dim // 2, head_dim_v // 2
    TO_MAP, AHEAD, SPLIT_ROWS = to_map, tile.ahead, tile.splits_rows
    KEEPS_DS = tile.keeps_ds
    # a tile of dQ is fenced and let go while the product for dK runs, or else the next one for dP
    AT_ONCE = AHEAD and KEEPS_DS
    NEXT = SCORES if AHEAD else 0
    BFLOAT16, LISTED = dtype == "bfloat16", options.listed
    V_BEHIND_K = (SMEM.v.tiles - SMEM.k.tiles) // wgmma.UNIT
    ONES, NONE, ONE = (1.0, 1.0), 0, 1
    begin = begin_backward.build(head_dim, head_dim_v, options, tile, BFLOAT16)
    release_before, begin_item = begin.release_before, begin.begin_item
    start_scores, start_next = begin.start_scores, begin.start_next
    start_dp = wgmma.build_scores(BLOCK_M, head_dim_v, BLOCK_N, BFLOAT16)
    start_dv = wgmma.build_values(BLOCK_M, head_dim_v, BFLOAT16)
    start_dq = wgmma.build_sum(64, BLOCK_N // 16, 0, 0, BFLOAT16, False)
    start_dk = wgmma.build_sum(head_dim, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    start_dk_of = wgmma.build_values(BLOCK_M, head_dim, BFLOAT16)
    pack, _ = fragment.build_pack(PAIRS, BFLOAT16)
    put_ds = store.build_put_chunks(BLOCK_M, 0, BFLOAT16, BLOCK_N)
    ds_of, put_ds_at = store.build_put_ds(BLOCK_M, BFLOAT16, BLOCK_N)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    shared = softmax_backward.build(
        head_dim, head_dim_v, options, tile, BFLOAT16, may_go_upward(ordered, options)
    )
    next_step = shared.next_step
    wait_q, wait_do, recompute_p = shared.wait_q, shared.wait_do, shared.recompute_p
    differentiate_cap, differentiate = shared.differentiate_cap, shared.differentiate
    factors = shared.factors
    commit_dq, put_dq = store.build_hand_over(SMEM.dq)
    put_dk = store.build_put_row(head_dim, False, BFLOAT16)
    put_dv = store.build_put_row(head_dim_v, False, BFLOAT16)
    stage_dk = store.build_stage(head_dim, 2, BFLOAT16) if TO_MAP else None
    stage_dv = store.build_stage(head_dim_v, 2, BFLOAT16) if TO_MAP else None

    @inline
    def finish(maps, smem, turn, me, n, dk, dv, dk_acc, dv_acc, scale):
        """Let the last tile of dQ be added up, and store dK and dV of a work item."""
        if not AT_ONCE:
            commit_dq(smem, u32(n - u32(1)))
        ptx.wgmma_wait(dk_acc, dv_acc, NONE, OUTPUTS_K, OUTPUTS_V)
        pipeline.release_group(smem, K, turn)
        pipeline.release_group(smem, V, turn)
        factor = cuda.local.array(2, f32)  # registers: what dV and dK are multiplied by
        scaled = cuda.local.array(2, f32)
        b0 = pipeline.read(smem, WORK, turn, WORD.b0)
        b1 = pipeline.read(smem, WORK, turn, WORD.b1)
        h = pipeline.read(smem, WORK, turn, WORD.kv_head)
        row0 = i32(pipeline.read(smem, WORK, turn, WORD.row0) + me * ROWS)
        k0 = pipeline.read(smem, WORK, turn, WORD.k0)
        keys = pipeline.read(smem, WORK, turn, WORD.keys)
        factors(smem, turn, factor, scaled, scale)
        pipeline.release(smem, WORK, turn)
        if TO_MAP:
            # tile n - 1 of dQ, which had the slot of tile n + 1, has left
            pipeline.wait_free(smem, DQ, u32(n + u32(1)))
            room = u32(smem + u32(DQ_TILE + me * DQ_BYTES))
            stage_dv(maps[5], room, dv_acc, factor, me, Place(0, row0, h, b1, b0))
            stage_dk(maps[4], room, dk_acc, scaled, me, Place(0, row0, h, b1, b0))
            if cuda.threadIdx.x % WARP_GROUP == 0:
                ptx.bulk_wait_read()
            pipeline.meet_warp_group(me)
        else:
            for r in range(2):
                j = row0 + wgmma.first_row() + 8 * r
                if j < keys:
                    put_dv(ptx.global_address(dv[b0, b1, h, k0 + j]), dv_acc, factor, r)
                    put_dk(ptx.global_address(dk[b0, b1, h, k0 + j]), dk_acc, scaled, r)

    @inline
    def consume(maps, smem, me, dk, dv, lse2, dq_sum, extras, sizes, scales):
        """Equations (1) to (7) for 64 keys of each work item and all its tiles of queries."""
        # registers of each thread
        sT = cuda.local.array(SCORES, f32)  # fragment of S^T, then of P^T
        dpT = cuda.local.array(SCORES, f32)  # of dP^T, then of dS^T
        pT = cuda.local.array(PAIRS, u32)  # of P^T, two elements of 16 bits each
        dsT = cuda.local.array(PAIRS, u32)  # of dS^T, likewise
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        dq = cuda.local.array(32, f32)  # of a tile of dQ
        # half of the columns of dS^T, or of those of K; what it computes of columns that K lacks is
        # left out when it is rounded
        ds_half, k_half = (me * K_PANEL, 0) if SPLIT_ROWS else (0, me * K_PANEL)
        mine, turn, n, group = u32(me * MINE), u32(0), u32(0), i32(sizes.group)
        while True:
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.uniform(pipeline.read(smem, WORK, turn, WORD.count))
            if count == END:
                break
            k_tile = pipeline.tile(smem, K, turn)
            k_rows = wgmma.descriptor(k_tile + mine, u32(0))
            v_rows = u32(k_rows + u32(V_BEHIND_K))
            k_columns = wgmma.descriptor(k_tile + u32(k_half), u32(K_PANEL))
            zero_k(dk_acc)
            zero_v(dv_acc)
            step = begin_item(smem, turn, me, n, sT, k_rows, group)
            tiles = i32(count * group)
            if LISTED:
                tiles = pipeline.read(smem, WORK, turn, BACKWARD_TILES)
            begin, end = n, u32(n + u32(tiles))
            while n != end:
                q_rows, do_rows = pipeline.tile(smem, Q, n), pipeline.tile(smem, DO, n)
                if not AHEAD:  # (1) S^T = K Q^T
                    wait_q(smem, turn, me, n, step)
                    start_scores(smem, me, n, sT, k_rows)
                wait_do(smem, turn, me, n, step)
                if KEEPS_DS and not AHEAD:  # dK is complete: the registers of dS are free for dP
                    ptx.wgmma_wait(dk_acc, dk_acc, ONE, OUTPUTS_K, NONE)
                # (4) dP^T = V dO^T
                start_dp(dpT, v_rows, wgmma.descriptor(do_rows, u32(0)))
                if not AT_ONCE and n != begin:  # (7) of the tile before
                    commit_dq(smem, u32(n - u32(1)))
                if not AHEAD:
                    ptx.wgmma_wait(sT, sT, ONE, SCORES, NONE)
                    release_before(smem, n)
                # (2) P^T = exp(S^T - lse), in the place of S^T
                recompute_p(sT, smem, turn, me, n, step, scales)
                ptx.wgmma_wait(dpT, dpT, NONE, SCORES, NONE)
                if AHEAD:
                    release_before(smem, n)
                # (5) dS^T = P^T * (dP^T - delta)
                ds = u32(smem + u32(DS) + n % u32(2) * u32(DS_BYTES))
                differentiate_cap(dpT, sT, smem, me, n, scales.scale_log2)
                ds_at = ds_of(u32(ds + mine))
                for chunk in range(0, SCORES // 4, 2):
                    differentiate(dpT, sT, smem, me, n, chunk)
                    if KEEPS_DS:
                        put_ds_at(ds_at, dpT, chunk)
                    else:
                        put_ds(u32(ds + mine), dpT, ONES, chunk)
                # (3) dV = dV + P^T dO
                pack(pT, sT)
                if KEEPS_DS:
                    pack(dsT, dpT)
                start_dv(dv_acc, pT, wgmma.descriptor(do_rows, u32(Q_PANEL)))
                ptx.fence_proxy_async()
                step = next_step(smem, turn, me, step)
                if AHEAD:
                    start_next(smem, turn, me, n, end, step, sT, k_rows)
                pipeline.meet_consumers(CONSUMERS)  # all of dS^T is there
                if AHEAD:  # dV is complete: the registers of P are free for dQ
                    ptx.wgmma_wait(dv_acc, dv_acc, ONE, OUTPUTS_V, NONE)
                # (7) dQ = dS K, (6) dK = dK + dS^T Q
                start_dq(dq, wgmma.descriptor(ds + u32(ds_half), u32(K_PANEL)), k_columns)
                q_columns = wgmma.descriptor(q_rows, u32(Q_PANEL))
                if KEEPS_DS:
                    start_dk_of(dk_acc, dsT, q_columns)
                else:
                    dsT_rows = wgmma.descriptor(ds + mine, u32(0))
                    start_dk(dk_acc, dsT_rows, q_columns)
                ptx.wgmma_wait(dq, sT, ONE, 32, NEXT)
                pipeline.release_group(smem, DO, n)
                put_dq(smem, me, n, dq, f32(1))
                if AT_ONCE:
                    commit_dq(smem, n)
                n = u32(n + 1)
            finish(maps, smem, turn, me, n, dk, dv, dk_acc, dv_acc, scales.scale)
            turn = u32(turn + 1)

    return build_kernel(
        head_dim, head_dim_v, banded, to_map, ordered, options, tile, consume, BFLOAT16
    )
