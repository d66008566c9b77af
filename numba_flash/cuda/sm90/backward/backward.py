"""Backward pass on Hopper: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, in persistent
blocks as in the forward pass.

A block owns a block of keys and walks over the queries of every head of its group. Threads of its
first warp group move data (`load_backward`): Q and dO in, tiles of dQ out, where they are added up
as float32 (`add_dq`). Every other warp group, a consumer, owns 64 of the keys. It computes S^T and
dP^T, keys along the rows, so that P^T can be an operand of dV as it is. dS^T goes to shared memory,
where each consumer reads its part for dK, and all of it along the other direction for half of dQ.

What happens to scores is a `numba_flash.cuda.sm90.backward.backward_stage`: of plain scores, or of
bias, mask, dropout or a function of the score. With these a consumer goes through a tile of queries
in parts, for registers, S of the next tile is never begun ahead, and dS never an operand from
registers.

A tile of dQ is the sum of what several blocks add. If `ordered`, they do so in the order of their
keys, or the other way round: a flag counts who was there. Or else dS^T goes to memory, and another
kernel makes dQ of it: `numba_flash.cuda.sm90.dq.dq_sink`.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.config import OPTIONS
from numba_flash.cuda.runtime.lang import cuda, f32, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.swizzle import ROW_BYTES, panel_bytes
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import END, one_type
from numba_flash.cuda.sm90.backward import option_gradients, plain_gradients
from numba_flash.cuda.sm90.backward.backward_stage import PairRegisters
from numba_flash.cuda.sm90.backward.load_backward import build_kernel
from numba_flash.cuda.sm90.backward.softmax_backward import ROWS, await_item
from numba_flash.cuda.sm90.config import BackwardConfig
from numba_flash.cuda.sm90.dq import dq_sink


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
    extras : lengths, arrays of options, and with ``options.block_sparse`` lists, see
        `numba_flash.cuda.arguments`.
    sizes, scales : `Sizes`, and `Scales` or `OptionScales`, of `numba_flash.cuda.sm90.arguments`;
        of a tile ``in_slots`` sizes of the section, and work items of other sections are not done.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    options, tile = config.options, config.tile
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    SMEM = tile.layout(head_dim, head_dim_v)
    Q, K, DO, WORK = map(one_type, (SMEM.q, SMEM.k, SMEM.do, SMEM.work))
    Q_PANEL, K_PANEL, MINE = panel_bytes(BLOCK_M), panel_bytes(BLOCK_N), ROWS * ROW_BYTES
    DS, DS_BYTES = SMEM.ds, SMEM.ds_bytes
    COLUMNS, PARTS, PART_BYTES = tile.columns, BLOCK_M // tile.columns, tile.columns * ROW_BYTES
    SCORES, PAIRS, OUTPUTS_K, OUTPUTS_V = COLUMNS // 2, COLUMNS // 4, head_dim // 2, head_dim_v // 2
    AHEAD, SPLIT_ROWS, KEEPS_DS = tile.ahead, tile.splits_rows, tile.keeps_ds
    BFLOAT16, DROPOUT, NONE, ONE = dtype == "bfloat16", bool(options.dropout), 0, 1
    stage = (option_gradients if config.stage == OPTIONS else plain_gradients).build(config, SMEM)
    begin_item, begin_tile, wait_do = stage.begin_item, stage.begin_tile, stage.wait_do
    start_scores, start_next, read_first = stage.start_scores, stage.start_next, stage.read_first
    part_of, release_before, recompute_p = stage.part_of, stage.release_before, stage.recompute_p
    differentiate_cap, differentiate = stage.differentiate_cap, stage.differentiate
    next_step, EARLY = stage.next_step, stage.early
    SLOPES, WORDS, KEPT = stage.slopes, stage.words, stage.kept
    start_dp = wgmma.build_scores(COLUMNS, head_dim_v, BLOCK_N, BFLOAT16, BLOCK_M)
    start_dv = wgmma.build_values(COLUMNS, head_dim_v, BFLOAT16)
    start_dk = wgmma.build_sum(head_dim, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    start_dk_of = wgmma.build_values(BLOCK_M, head_dim, BFLOAT16)
    pack, _ = fragment.build_pack(PAIRS, BFLOAT16, positive=DROPOUT)
    ds_of, put_ds = (store.build_put_ds if KEEPS_DS else store.build_put_part)(BFLOAT16, BLOCK_N)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    sink = (dq_sink.build_slots if tile.in_slots else dq_sink.build_sums)(config, SMEM, stage)
    begin_sink, hand_over, release_v, share = sink.begin, sink.hand_over, sink.release_v, sink.share
    start_dq, wait_dq, put_dq = sink.start, sink.wait, sink.put
    find_v_rows, finish, end_sink = sink.v_rows, sink.finish, sink.end

    def consume(smem, me, given):
        """Equations (1) to (7) for 64 keys of each work item and all its tiles of queries; `given`
        are the kernel's arguments.
        """
        # registers of each thread
        sT = cuda.local.array(SCORES, f32)  # fragment of S^T, then of P^T, of a part of a tile
        dpT = cuda.local.array(SCORES, f32)  # of dP^T, then of dS^T
        pT = cuda.local.array(PAIRS, u32)  # of P^T, two elements of 16 bits each
        dsT = cuda.local.array(PAIRS, u32)  # of dS^T, likewise
        slope = cuda.local.array(SLOPES, f32)
        bias_mask = cuda.local.array(WORDS, u32)
        box = cuda.local.array(KEPT, u32)
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        dq = cuda.local.array(32, f32)  # of a tile of dQ
        held = PairRegisters(slope, bias_mask, box)
        # half of the columns of dS^T, or of those of K; what it computes of columns that K lacks is
        # left out when it is rounded
        ds_half, k_half = (me * K_PANEL, 0) if SPLIT_ROWS else (0, me * K_PANEL)
        mine, item_n, n = u32(me * MINE), u32(0), u32(0)
        while True:
            count = await_item(smem, WORK, item_n)
            if count == END:
                break
            k_tile = pipeline.tile(smem, K, item_n)
            k_rows = wgmma.descriptor(k_tile + mine, u32(0))
            v_rows = find_v_rows(smem, item_n, k_rows, mine)
            k_columns = wgmma.descriptor(k_tile + u32(k_half), u32(K_PANEL))
            zero_k(dk_acc)
            zero_v(dv_acc)
            begin = n
            step, end = begin_item(held, sT, smem, item_n, me, n, count, k_rows, given)
            begin_sink(smem, item_n, me)
            while n != end:
                q_rows, do_rows = pipeline.tile(smem, Q, n), pipeline.tile(smem, DO, n)
                begin_tile(smem, item_n, me, n, step)
                part, more = u32(0), True
                while more:  # not over a range: LLVM would find late that of one part it is no loop
                    behind = u32(part * u32(PART_BYTES))
                    if not AHEAD:  # (1) S^T = K Q^T
                        start_scores(sT, smem, me, n, part, k_rows)
                    wait_do(smem, item_n, me, n, step)
                    if KEEPS_DS and not AHEAD:  # dK is complete: dP can have the registers of dS
                        ptx.wgmma_wait(dk_acc, dk_acc, ONE, OUTPUTS_K, NONE)
                    # (4) dP^T = V dO^T
                    start_dp(dpT, v_rows, wgmma.descriptor(do_rows + behind, u32(0)))
                    if EARLY and part == 0:
                        hand_over(smem, n, begin)  # (7) of the tile before
                    x = part_of(smem, item_n, me, n, part, step, given)
                    if not AHEAD:
                        ptx.wgmma_wait(sT, sT, ONE, SCORES, NONE)
                        if part == 0:
                            release_before(smem, n, begin)
                    # (2) P^T = exp(S^T - lse), in the place of S^T, between options and dropout
                    recompute_p(sT, held, smem, item_n, me, n, part, x, given)
                    # A branch here keeps the assembler from waiting for dP before P, and one above
                    # from waiting for a bias before S.
                    if not EARLY and part == 0:
                        hand_over(smem, n, begin)  # (7) of the tile before
                    ptx.wgmma_wait(dpT, dpT, NONE, SCORES, NONE)
                    if AHEAD:
                        release_before(smem, n, begin)
                    release_v(smem, item_n, n, end)
                    ds = u32(smem + u32(DS) + n % u32(2) * u32(DS_BYTES))
                    # (5) dS^T = P^T * (dP^T - delta)
                    differentiate_cap(dpT, sT, smem, me, n, given)
                    ds_at, first = ds_of(u32(ds + mine)), u32(part * (COLUMNS // 8))
                    for chunk in range(0, SCORES // 4, 2):
                        differentiate(dpT, sT, held, smem, me, n, x, chunk, given)
                        put_ds(ds_at, dpT, chunk, first)
                    # (3) dV = dV + P^T dO
                    pack(pT, sT)
                    if KEEPS_DS:
                        pack(dsT, dpT)
                    start_dv(dv_acc, pT, wgmma.descriptor(do_rows + behind, u32(Q_PANEL)))
                    part = u32(part + u32(1))
                    more = part != u32(PARTS)
                ptx.fence_proxy_async()
                step = next_step(smem, item_n, me, step)
                if AHEAD:
                    start_next(sT, smem, item_n, me, n, end, step, k_rows)
                share(smem, me, given.dq_sum, n)
                # (7) dQ = dS K, (6) dK = dK + dS^T Q
                start_dq(dq, dv_acc, ds + u32(ds_half), k_columns)
                q_columns = wgmma.descriptor(q_rows, u32(Q_PANEL))
                if KEEPS_DS:
                    start_dk_of(dk_acc, dsT, q_columns)
                else:
                    start_dk(dk_acc, wgmma.descriptor(ds + mine, u32(0)), q_columns)
                read_first(held, smem, item_n, me, u32(n + u32(1)), end, given)
                wait_dq(dq, dv_acc, sT)
                pipeline.release_group(smem, DO, n)
                put_dq(smem, me, n, dq)
                n = u32(n + 1)
            finish(given, smem, item_n, me, n, dk_acc, dv_acc)
            item_n = u32(item_n + 1)
        end_sink()

    return build_kernel(config, consume)
