"""Backward pass on Hopper: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, in persistent
blocks as in the forward pass.

A block owns a block of keys and walks over the queries of every head of its group. Threads of its
first warp group move data (`load_backward`): Q and dO in, tiles of dQ out, where they are added up
as float32 (`add_dq`). Every other warp group, a consumer, owns 64 of the keys. It computes S^T and
dP^T, keys along the rows, so that P^T can be an operand of dV as it is. dS^T goes to shared memory,
where each consumer reads its part for dK, and all of it along the other direction for half of dQ.

A tile of dQ is the sum of what several blocks add. If `ordered`, they do so in the order of their
keys, or the other way round: a flag counts who was there. Or else dS^T goes to memory, and another
kernel makes dQ of it: `numba_flash.cuda.sm90.dq_sink`.
"""

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.lang import cuda, f32, i32, u32
from numba_flash.cuda.sm90 import begin_backward, dq_sink, pipeline, softmax_backward, store, wgmma
from numba_flash.cuda.sm90.arguments import END, may_go_upward, one_type
from numba_flash.cuda.sm90.config import BackwardConfig
from numba_flash.cuda.sm90.load_backward import build_kernel
from numba_flash.cuda.sm90.softmax_backward import ROWS, await_item
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
        fragments; of a tile ``in_slots`` dS^T, as panels of 64 queries and the keys of a tile, in
        the slots of a section.
    flags : int32, one per (b0, b1, head, row block), and one more: the number of the next work
        item; none of a tile ``in_slots``.
    extras : lengths, and with ``options.listed`` lists, see `numba_flash.cuda.arguments`.
    sizes, scales : `Sizes` and `Scales` of `numba_flash.cuda.sm90.arguments`; of a tile
        ``in_slots`` sizes of the section, and work items of other sections are not done.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    options, tile = config.options, config.tile
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    SMEM = tile.layout(head_dim, head_dim_v)
    Q, K, DO, WORK = map(one_type, (SMEM.q, SMEM.k, SMEM.do, SMEM.work))
    Q_PANEL, K_PANEL, MINE = panel_bytes(BLOCK_M), panel_bytes(BLOCK_N), ROWS * ROW_BYTES
    DS, DS_BYTES = SMEM.ds, SMEM.ds_bytes
    SCORES, PAIRS, OUTPUTS_K, OUTPUTS_V = BLOCK_M // 2, BLOCK_M // 4, head_dim // 2, head_dim_v // 2
    AHEAD, SPLIT_ROWS, KEEPS_DS = tile.ahead, tile.splits_rows, tile.keeps_ds
    BFLOAT16, ONES, NONE, ONE = dtype == "bfloat16", (1.0, 1.0), 0, 1
    begin = begin_backward.build(head_dim, head_dim_v, options, tile, BFLOAT16)
    release_before, begin_item, tiles_of = begin.release_before, begin.begin_item, begin.tiles_of
    start_scores, start_next = begin.start_scores, begin.start_next
    start_dp = wgmma.build_scores(BLOCK_M, head_dim_v, BLOCK_N, BFLOAT16)
    start_dv = wgmma.build_values(BLOCK_M, head_dim_v, BFLOAT16)
    start_dk = wgmma.build_sum(head_dim, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    start_dk_of = wgmma.build_values(BLOCK_M, head_dim, BFLOAT16)
    pack, _ = fragment.build_pack(PAIRS, BFLOAT16)
    put_ds = store.build_put_chunks(BLOCK_M, 0, BFLOAT16, BLOCK_N)
    ds_of, put_ds_at = store.build_put_ds(BLOCK_M, BFLOAT16, BLOCK_N)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    shared = softmax_backward.build(
        head_dim, head_dim_v, options, tile, BFLOAT16, may_go_upward(config.ordered, options)
    )
    next_step = shared.next_step
    wait_q, wait_do, recompute_p = shared.wait_q, shared.wait_do, shared.recompute_p
    differentiate_cap, differentiate = shared.differentiate_cap, shared.differentiate
    sink = (dq_sink.build_slots if tile.in_slots else dq_sink.build_sums)(
        config, SMEM, shared.factors
    )
    begin_sink, hand_over, release_v, share = sink.begin, sink.hand_over, sink.release_v, sink.share
    start_dq, wait_dq, put_dq = sink.start, sink.wait, sink.put
    find_v_rows, finish, end_sink = sink.v_rows, sink.finish, sink.end

    def consume(smem, me, given):
        """Equations (1) to (7) for 64 keys of each work item and all its tiles of queries; `given`
        are the kernel's arguments.
        """
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
        mine, turn, n, group = u32(me * MINE), u32(0), u32(0), i32(given.sizes.group)
        scales = given.scales
        while True:
            count = await_item(smem, WORK, turn)
            if count == END:
                break
            k_tile = pipeline.tile(smem, K, turn)
            k_rows = wgmma.descriptor(k_tile + mine, u32(0))
            v_rows = find_v_rows(smem, turn, k_rows, mine)
            k_columns = wgmma.descriptor(k_tile + u32(k_half), u32(K_PANEL))
            zero_k(dk_acc)
            zero_v(dv_acc)
            step = begin_item(smem, turn, me, n, sT, k_rows, group)
            begin_sink(smem, turn, me)
            begin, end = n, u32(n + u32(tiles_of(smem, turn, count, group)))
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
                hand_over(smem, n, begin)  # (7) of the tile before
                if not AHEAD:
                    ptx.wgmma_wait(sT, sT, ONE, SCORES, NONE)
                    release_before(smem, n)
                # (2) P^T = exp(S^T - lse), in the place of S^T
                recompute_p(sT, smem, turn, me, n, step, scales)
                ptx.wgmma_wait(dpT, dpT, NONE, SCORES, NONE)
                if AHEAD:
                    release_before(smem, n)
                release_v(smem, turn, n, end)
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
                share(smem, me, given.dq_sum, n)
                # (7) dQ = dS K, (6) dK = dK + dS^T Q
                start_dq(dq, dv_acc, ds + u32(ds_half), k_columns)
                q_columns = wgmma.descriptor(q_rows, u32(Q_PANEL))
                if KEEPS_DS:
                    start_dk_of(dk_acc, dsT, q_columns)
                else:
                    start_dk(dk_acc, wgmma.descriptor(ds + mine, u32(0)), q_columns)
                wait_dq(dq, dv_acc, sT)
                pipeline.release_group(smem, DO, n)
                put_dq(smem, me, n, dq)
                n = u32(n + 1)
            finish(given, smem, turn, me, n, dk_acc, dv_acc)
            turn = u32(turn + 1)
        end_sink()

    return build_kernel(config, consume)
