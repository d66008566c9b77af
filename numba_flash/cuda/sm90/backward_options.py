"""Backward pass on Hopper with bias, mask, dropout or a function of the score: blocks, and what
moves data, are those of `numba_flash.cuda.sm90.backward`.

What belongs to a score is read straight from memory by the thread that holds it, while the tensor
cores compute S and dP: two neighbouring keys at a time, for which K and V are put in another order
in shared memory. Of a mask only the tiles are visited that it leaves something of.

It is a loop beside `numba_flash.cuda.sm90.backward` since more than three steps of a tile differ: a
tile goes in parts, for registers; S of the next tile is never begun ahead, dS never an operand from
registers; and where the tile of dQ before is handed over depends on who brings the bias. Where dS
goes, how items end, and what moves data are the same.
"""

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.lang import cuda, f32, i32, inline, u32
from numba_flash.cuda.sm90 import (
    dq_sink,
    pipeline,
    softmax_backward,
    softmax_backward_options,
    store,
    wgmma,
)
from numba_flash.cuda.sm90.arguments import BACKWARD_TILES, END, one_type
from numba_flash.cuda.sm90.bias_tiles import KEPT, build_take_bias
from numba_flash.cuda.sm90.config import BackwardConfig
from numba_flash.cuda.sm90.interleave import build_interleave
from numba_flash.cuda.sm90.load_backward import WORD, build_kernel
from numba_flash.cuda.sm90.softmax_backward import await_item
from numba_flash.cuda.sm90.softmax_backward_options import ROWS
from numba_flash.cuda.swizzle import ROW_BYTES, panel_bytes


def build(config: BackwardConfig):
    """Kernel ``backward_sm90(maps, dk, dv, lse2, delta, dq_sum, flags, extras, sizes, scales)``,
    its signature and compile options.

    Arguments are those of `numba_flash.cuda.sm90.backward.build` and its kernel, and

    scales : `OptionScales` of `numba_flash.cuda.sm90.arguments`.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    vectors, options, tile = config.vectors, config.options, config.tile
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    SMEM = tile.layout(head_dim, head_dim_v)
    Q, K, V, DO, WORK = map(one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do, SMEM.work))
    Q_PANEL, K_PANEL, MINE = panel_bytes(BLOCK_M), panel_bytes(BLOCK_N), ROWS * ROW_BYTES
    DS, DS_BYTES = SMEM.ds, SMEM.ds_bytes
    COLUMNS, PARTS, PART_BYTES = tile.columns, BLOCK_M // tile.columns, tile.columns * ROW_BYTES
    SCORES, PAIRS, OUTPUTS_K, OUTPUTS_V = COLUMNS // 2, COLUMNS // 4, head_dim // 2, head_dim_v // 2
    SPLIT_ROWS, BFLOAT16, DROPOUT = tile.splits_rows, dtype == "bfloat16", bool(options.dropout)
    V_BEHIND_K = (SMEM.v.tiles - SMEM.k.tiles) // wgmma.UNIT
    COPIES_BIAS, BIAS, NONE, ONE = tile.copies_bias, one_type(SMEM.bias), 0, 1
    FETCHES = options.mask or (bool(options.bias) and not COPIES_BIAS)
    interleave_k = build_interleave(head_dim, BLOCK_N)
    interleave_v = build_interleave(head_dim_v, BLOCK_N)
    start_scores = wgmma.build_scores(COLUMNS, head_dim, BLOCK_N, BFLOAT16, BLOCK_M)
    start_dp = wgmma.build_scores(COLUMNS, head_dim_v, BLOCK_N, BFLOAT16, BLOCK_M)
    start_dv = wgmma.build_values(COLUMNS, head_dim_v, BFLOAT16)
    start_dk = wgmma.build_sum(head_dim, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    pack, _ = fragment.build_pack(PAIRS, BFLOAT16, positive=DROPOUT)
    put_ds = store.build_put_part(BFLOAT16, BLOCK_N)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    shared = softmax_backward.build(head_dim, head_dim_v, options, tile)
    wait_q, wait_do = shared.wait_q, shared.wait_do
    own = softmax_backward_options.build(dtype, head_dim, head_dim_v, vectors, options, tile)
    part_of, fetch, SLOPES, WORDS = own.part_of, own.fetch, own.slopes, own.words
    recompute_p, differentiate = own.recompute_p, own.differentiate
    take_bias = build_take_bias(tile, SMEM.bias)

    @inline
    def begin_item(smem, turn, me):
        """Wait for K and V of a work item, and put their keys in order."""
        keys = pipeline.read(smem, WORK, turn, WORD.keys)
        keys -= pipeline.read(smem, WORK, turn, WORD.row0)
        pipeline.wait_ready(smem, K, turn)
        interleave_k(smem, K, turn, keys, me)
        pipeline.wait_ready(smem, V, turn)
        interleave_v(smem, V, turn, keys, me)

    @inline
    def release_before(smem, n):
        """All products with the Q tile before the n-th are complete, and with its dS."""
        pipeline.release_group(smem, Q, u32(n - u32(1)))
        if COPIES_BIAS:
            pipeline.release_group(smem, BIAS, u32(n - u32(1)))

    sink = dq_sink.build_sums(config, SMEM, own.factors, True, release_before)
    hand_over, share, start_dq = sink.hand_over, sink.share, sink.start
    wait_dq, put_dq, finish = sink.wait, sink.put, sink.finish

    @inline
    def fetch_first(bias_mask, smem, turn, me, n, end, heads, batch1, extras):
        """Begin to read what the options of the n-th tile's first part need, if it is of this item;
        what the producer writes down about a tile is there when its Q is.
        """
        if FETCHES and n != end:
            pipeline.wait_ready(smem, Q, n)
            fetch(bias_mask, part_of(smem, turn, me, n, u32(0), heads, batch1), extras)

    @inline
    def take_first(bias_mask, box, smem, me, n, end):
        """The bias of the n-th tile's first part, if it is of this item."""
        if COPIES_BIAS and n != end:
            take_bias(bias_mask, box, smem, me, n, u32(0))

    @inline
    def begin_tile(smem, turn, me, n):
        """Wait for Q and dO of a tile."""
        wait_q(smem, turn, me, n, i32(0))  # which is noted
        wait_do(smem, turn, me, n, i32(0))

    def consume(smem, me, given):
        """Equations (1) to (7) for 64 keys of each work item and all its tiles of queries."""
        extras, scales = given.extras, given.scales
        # registers of each thread
        sT = cuda.local.array(SCORES, f32)  # fragment of S^T, then of P^T, of a part of a tile
        dpT = cuda.local.array(SCORES, f32)  # of dP^T, then of dS^T
        pT = cuda.local.array(PAIRS, u32)  # of P^T, two elements of 16 bits each
        slope = cuda.local.array(SLOPES, f32)  # derivatives of scores, where options bend them
        bias_mask = cuda.local.array(WORDS, u32)  # of the part
        box = cuda.local.array(KEPT, u32)  # bias of this part and the next, if it is copied
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        dq = cuda.local.array(32, f32)  # of a tile of dQ
        # half of the columns of dS^T, or of those of K; what it computes of columns that K lacks is
        # left out by `postprocess`
        ds_half, k_half = (me * K_PANEL, 0) if SPLIT_ROWS else (0, me * K_PANEL)
        mine, turn, n = u32(me * MINE), u32(0), u32(0)
        heads, batch1 = i32(given.lse2.shape[2]), i32(given.dk.shape[1])
        scale_log2, parameters = scales.scale_log2, scales.parameters
        while True:
            count = await_item(smem, WORK, turn)
            if count == END:
                break
            k_tile = pipeline.tile(smem, K, turn)
            k_rows = wgmma.descriptor(k_tile + mine, u32(0))
            v_rows = u32(k_rows + u32(V_BEHIND_K))
            k_columns = wgmma.descriptor(k_tile + u32(k_half), u32(K_PANEL))
            zero_k(dk_acc)
            zero_v(dv_acc)
            begin, end = n, u32(n + u32(pipeline.read(smem, WORK, turn, BACKWARD_TILES)))
            fetch_first(bias_mask, smem, turn, me, n, end, heads, batch1, extras)
            begin_item(smem, turn, me)
            take_first(bias_mask, box, smem, me, n, end)
            while n != end:
                q_rows, do_rows = pipeline.tile(smem, Q, n), pipeline.tile(smem, DO, n)
                ds = u32(smem + u32(DS) + n % u32(2) * u32(DS_BYTES))
                begin_tile(smem, turn, me, n)
                for number in range(PARTS):
                    part = u32(number)
                    # (1) S^T = K Q^T, (4) dP^T = V dO^T
                    behind = u32(part * u32(PART_BYTES))
                    start_scores(sT, k_rows, wgmma.descriptor(q_rows + behind, u32(0)))
                    start_dp(dpT, v_rows, wgmma.descriptor(do_rows + behind, u32(0)))
                    if FETCHES and part == 0:
                        hand_over(smem, n, begin)  # (7) of the tile before
                    x = part_of(smem, turn, me, n, part, heads, batch1)
                    ptx.wgmma_wait(sT, sT, ONE, SCORES, NONE)
                    if part == 0 and n != begin:
                        release_before(smem, n)
                    # the options, (2) P^T = exp(S^T - lse), in the place of S^T, and dropout
                    recompute_p(sT, slope, bias_mask, x, scale_log2, parameters)
                    if COPIES_BIAS and part != u32(PARTS - 1):
                        take_bias(bias_mask, box, smem, me, n, u32(part + 1))
                    # A branch here keeps the assembler from waiting for dP before P, and one above
                    # from waiting for a bias before S.
                    if not FETCHES and part == 0:
                        hand_over(smem, n, begin)  # (7) of the tile before
                    if FETCHES and part != u32(PARTS - 1):
                        following = part_of(smem, turn, me, n, u32(part + 1), heads, batch1)
                        fetch(bias_mask, following, extras)
                    ptx.wgmma_wait(dpT, dpT, NONE, SCORES, NONE)
                    # (5) dS^T = P^T * (dP^T - delta)
                    first = u32(part * (COLUMNS // 8))
                    for chunk in range(0, SCORES // 4, 2):
                        differentiate(dpT, sT, slope, x, chunk, parameters)
                        put_ds(u32(ds + mine), dpT, chunk, first)
                    # (3) dV = dV + P^T dO
                    pack(pT, sT)
                    start_dv(dv_acc, pT, wgmma.descriptor(do_rows + behind, u32(Q_PANEL)))
                ptx.fence_proxy_async()
                share(smem, me, given.dq_sum, n)
                # (7) dQ = dS K, (6) dK = dK + dS^T Q
                start_dq(dq, dv_acc, ds + u32(ds_half), k_columns)
                dsT_rows = wgmma.descriptor(ds + mine, u32(0))
                start_dk(dk_acc, dsT_rows, wgmma.descriptor(q_rows, u32(Q_PANEL)))
                following = u32(n + u32(1))
                fetch_first(bias_mask, smem, turn, me, following, end, heads, batch1, extras)
                take_first(bias_mask, box, smem, me, following, end)
                wait_dq(dq, dv_acc, sT)
                pipeline.release_group(smem, DO, n)
                put_dq(smem, me, n, dq)
                n = u32(n + 1)
            finish(given, smem, turn, me, n, dk_acc, dv_acc)
            turn = u32(turn + 1)

    return build_kernel(config, consume)
