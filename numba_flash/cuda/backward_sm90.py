"""Backward pass on Hopper: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, in persistent blocks as in `forward_sm90`.

A block owns a block of keys and walks over the queries of every head of its group. Threads of its first warp group move data: Q and dO in,
tiles of dQ out, where they are added up as float32 (`movers_sm90`). Every other warp group, a consumer, owns 64 of the keys. It computes
S^T and dP^T, keys along the rows, so that P^T can be an operand of dV as it is. dS^T goes to shared memory, where each consumer reads its
part for dK, and all of it along the other direction for half of dQ.

A tile of dQ is the sum of what several blocks add. If `ordered`, they do so in the order of their keys: a flag counts who was there.
"""

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import mma, movers_sm90, pipeline, ptx, recompute_sm90, softmax, swizzle
from numba_flash.cuda.movers_sm90 import B0, B1, COUNT, END, K0, KEYS, KV_HEAD, ROW0
from numba_flash.cuda.recompute_sm90 import LAST
from numba_flash.cuda.swizzle import DQ_PART


def build(dtype, head_dim, head_dim_v, banded, to_map, ordered, options, tile):
    """Kernel ``backward_sm90(maps, dk, dv, lse2, delta, dq_sum, flags, extras, sizes, scales)``, its signature and compile options.

    banded : True if some query does not see every key; it makes no difference if `ordered`.
    maps : tensor maps of do, q, k and v as (b0, b1, heads, n, head_dim), boxes of one panel of a tile, and with `to_map` of dk and dv.
    dk, dv : (b0, b1, kv_heads, nk, head_dim), as words of two elements.
    lse2, delta : float32 (b0, b1, heads, row blocks * BLOCK_M), as `numba_flash.cuda.rows_sm90` numbers and writes them.
    dq_sum : float32, 64 x 64 elements per (b0, b1, head, row block, consumer), in the order of fragments.
    flags : int32, one per (b0, b1, head, row block), and one more: the number of the next work item.
    extras : lengths, see `numba_flash.cuda.scores`.
    sizes : items, low, high (of query - key), nq, 1, group, section (see `numba_flash.cuda.schedule`), b0.
    scales : slope, scale_log2, as in the forward kernel, and scale.
    """  # fmt: skip
    BLOCK_M, BLOCK_N, CONSUMERS, SPLIT_ROWS = tile.block_m, tile.block_n, tile.consumers, tile.splits_rows
    SMEM = tile.layout(head_dim, head_dim_v)
    Q, K, V, DO, DQ, WORK = map(pipeline.one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do, SMEM.dq, SMEM.work))
    ROWS, Q_PANEL, K_PANEL = 64, swizzle.panel_bytes(BLOCK_M), swizzle.panel_bytes(BLOCK_N)
    DS, DS_BYTES, MINE = SMEM.ds, SMEM.ds_bytes, ROWS * swizzle.ROW_BYTES
    SCORES, PAIRS, OUTPUTS_K, OUTPUTS_V = BLOCK_M // 2, BLOCK_M // 4, head_dim // 2, head_dim_v // 2
    DQ_TILE, DQ_BYTES = SMEM.dq[pipeline.TILES], 4 * DQ_PART  # where it is, and a consumer's part of it
    TO_MAP, AHEAD, NEXT = to_map, tile.ahead, SCORES if tile.ahead else 0
    SEQUENCES, BFLOAT16 = options.sequences, dtype == "bfloat16"
    ACC, u32, i32 = types.float32, types.uint32, types.int32
    V_BEHIND_K = (SMEM.v[pipeline.TILES] - SMEM.k[pipeline.TILES]) // mma.DESCRIPTOR_UNIT
    ONES, NONE, ONE = (1.0, 1.0), 0, 1
    clear_k, clear_v = pipeline.build_clear_tail(head_dim, BLOCK_N), pipeline.build_clear_tail(head_dim_v, BLOCK_N)
    start_scores = mma.build_scores(BLOCK_M, head_dim, BLOCK_N, BFLOAT16)
    start_dp = mma.build_scores(BLOCK_M, head_dim_v, BLOCK_N, BFLOAT16)
    start_dv = mma.build_values(BLOCK_M, head_dim_v, BFLOAT16)
    start_dq = mma.build_sum(64, BLOCK_N // 16, 0, 0, BFLOAT16, False)
    start_dk = mma.build_sum(head_dim, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    pack, _ = mma.build_pack(PAIRS, BFLOAT16)
    put_ds = mma.build_put_chunks(BLOCK_M, 0, BFLOAT16, BLOCK_N)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    shared = recompute_sm90.build(head_dim, head_dim_v, options, tile)
    note_bounds, bound, next_row0, enter_q, enter_do, weigh, differentiate_cap, differentiate, factors = shared
    put_dk, put_dv = mma.build_put_row(head_dim, False, BFLOAT16), mma.build_put_row(head_dim_v, False, BFLOAT16)
    stage_dk = mma.build_stage(head_dim, 2, BFLOAT16) if TO_MAP else None
    stage_dv = mma.build_stage(head_dim_v, 2, BFLOAT16) if TO_MAP else None

    @cuda.jit(device=True, forceinline=True)
    def publish_dq(smem, n):
        """Let a tile of dQ be added up; later than `put_dq`, when products run while the fence waits for what that has stored."""
        ptx.fence_proxy_async()
        pipeline.publish(smem, DQ, n)

    @cuda.jit(device=True, forceinline=True)
    def finish(maps, smem, turn, me, n, results, dk_acc, dv_acc, scale):
        """Let the last tile of dQ be added up, and store dK and dV of a work item."""
        publish_dq(smem, u32(n - u32(1)))
        ptx.wgmma_wait(dk_acc, dv_acc, NONE, OUTPUTS_K, OUTPUTS_V)
        pipeline.release(smem, K, turn)
        pipeline.release(smem, V, turn)
        factor, scaled = cuda.local.array(2, ACC), cuda.local.array(2, ACC)
        b0, b1, h = pipeline.read(smem, WORK, turn, B0), pipeline.read(smem, WORK, turn, B1), pipeline.read(smem, WORK, turn, KV_HEAD)
        row0 = i32(pipeline.read(smem, WORK, turn, ROW0) + me * ROWS)
        k0, keys = pipeline.read(smem, WORK, turn, K0), pipeline.read(smem, WORK, turn, KEYS)
        factors(smem, turn, factor, scaled, scale)
        pipeline.leave(smem, WORK, turn)
        if TO_MAP:
            pipeline.wait_free(smem, DQ, u32(n + u32(1)))  # tile n - 1 of dQ, which had that slot, has left
            room = u32(smem + u32(DQ_TILE + me * DQ_BYTES))
            stage_dv(maps[5], room, dv_acc, factor, me, CONSUMERS, (0, row0, h, b1, b0))
            stage_dk(maps[4], room, dk_acc, scaled, me, CONSUMERS, (0, row0, h, b1, b0))
            if cuda.threadIdx.x % pipeline.WARP_GROUP == 0:
                ptx.bulk_wait_read()
            pipeline.meet_warp_group(me, CONSUMERS)
        else:
            for r in range(2):
                j = row0 + mma.first_row() + 8 * r
                if j < keys:
                    put_dv(ptx.global_address(results[1][b0, b1, h, k0 + j]), dv_acc, factor, r)
                    put_dk(ptx.global_address(results[0][b0, b1, h, k0 + j]), dk_acc, scaled, r)

    @cuda.jit(device=True, forceinline=True)
    def release_before(smem, n):
        """All products with the Q tile before the n-th are complete."""
        if n != u32(0):
            pipeline.release(smem, Q, u32(n - 1))

    @cuda.jit(device=True, forceinline=True)
    def put_dq(smem, me, n, dq):
        """Store this consumer's part of a tile of dQ to shared memory."""
        pipeline.wait_free(smem, DQ, u32(n + u32(1)))  # tile n - 1, which had that slot, has left
        to = u32(smem + u32(DQ_TILE + me * DQ_BYTES) + u32(cuda.threadIdx.x % pipeline.WARP_GROUP * 16))
        for j in range(8):
            ptx.store_shared_vector(u32(to + u32(2048 * j)), (dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]))

    @cuda.jit(device=True, forceinline=True)
    def start_item(smem, turn, me, n, s, k_rows):
        """Wait for K and V of a work item, and, if AHEAD, for (1) S^T = K Q^T of its first tile; returns row0."""
        note_bounds(smem, turn, me)
        row0, keys = bound(smem, me, LAST), pipeline.read(smem, WORK, turn, KEYS) - pipeline.read(smem, WORK, turn, ROW0)
        pipeline.wait_ready(smem, K, turn)
        if SEQUENCES:
            clear_k(smem, K, turn, keys, me, CONSUMERS)
        if AHEAD:
            enter_q(smem, turn, me, n, row0)
            start_scores(s, k_rows, mma.descriptor(pipeline.tile(smem, Q, n), u32(0)))
        pipeline.wait_ready(smem, V, turn)
        if SEQUENCES:
            clear_v(smem, V, turn, keys, me, CONSUMERS)
        if AHEAD:
            ptx.wgmma_wait(s, s, NONE, SCORES, NONE)
        return row0

    @cuda.jit(device=True, forceinline=True)
    def start_next(smem, turn, me, n, end, row0, s, k_rows):
        """Start (1) S^T = K Q^T of the tile after the n-th; after an item's last, of the same again, for nothing."""
        following = u32(n + u32(1))
        if following == end:
            following = n
        else:
            enter_q(smem, turn, me, following, row0)
        start_scores(s, k_rows, mma.descriptor(pipeline.tile(smem, Q, following), u32(0)))

    @cuda.jit(device=True, forceinline=True)
    def consume(maps, smem, me, arrays, sizes, scales):
        """Equations (1) to (7) for 64 keys of each work item and all its tiles of queries, the last tile first."""
        s, dp, p = cuda.local.array(SCORES, ACC), cuda.local.array(SCORES, ACC), cuda.local.array(PAIRS, u32)
        dk_acc, dv_acc, dq = cuda.local.array(OUTPUTS_K, ACC), cuda.local.array(OUTPUTS_V, ACC), cuda.local.array(32, ACC)
        # half of the columns of dS^T, or of those of K; what it computes of columns that K lacks is left out by `rows_sm90.build_finish`
        ds_half, k_half = (me * K_PANEL, 0) if SPLIT_ROWS else (0, me * K_PANEL)
        mine, turn, n, group = u32(me * MINE), u32(0), u32(0), i32(sizes[5])
        while True:
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.uniform(pipeline.read(smem, WORK, turn, COUNT))
            if count == END:
                break
            k_rows = mma.descriptor(pipeline.tile(smem, K, turn) + mine, u32(0))
            v_rows = u32(k_rows + u32(V_BEHIND_K))
            k_columns = mma.descriptor(pipeline.tile(smem, K, turn) + u32(k_half), u32(K_PANEL))
            zero_k(dk_acc)
            zero_v(dv_acc)
            row0, begin, end = start_item(smem, turn, me, n, s, k_rows), n, u32(n + u32(count * group))
            while n != end:
                q_rows, do_rows = pipeline.tile(smem, Q, n), pipeline.tile(smem, DO, n)
                if not AHEAD:  # (1) S^T = K Q^T
                    enter_q(smem, turn, me, n, row0)
                    start_scores(s, k_rows, mma.descriptor(q_rows, u32(0)))
                enter_do(smem, turn, me, n, row0)
                # (4) dP^T = V dO^T
                start_dp(dp, v_rows, mma.descriptor(do_rows, u32(0)))
                if n != begin:  # (7) of the tile before
                    publish_dq(smem, u32(n - u32(1)))
                if not AHEAD:
                    ptx.wgmma_wait(s, s, ONE, SCORES, NONE)
                    release_before(smem, n)
                # (2) P^T = exp(S^T - lse)
                weigh(s, smem, turn, me, n, row0, scales)
                ptx.wgmma_wait(dp, dp, NONE, SCORES, NONE)
                if AHEAD:
                    release_before(smem, n)
                # (5) dS^T = P^T * (dP^T - delta)
                ds = u32(smem + u32(DS) + n % u32(2) * u32(DS_BYTES))
                differentiate_cap(dp, s, smem, me, n, scales[1])
                for chunk in range(0, SCORES // 4, 2):
                    differentiate(dp, s, smem, me, n, chunk)
                    put_ds(u32(ds + mine), dp, ONES, chunk)
                # (3) dV = dV + P^T dO
                pack(p, s)
                start_dv(dv_acc, p, mma.descriptor(do_rows, u32(Q_PANEL)))
                ptx.fence_proxy_async()
                row0 = next_row0(smem, me, row0)
                if AHEAD:
                    start_next(smem, turn, me, n, end, row0, s, k_rows)
                pipeline.meet_consumers(CONSUMERS)  # all of dS^T is there
                if AHEAD:  # dV is complete: the registers of P are free for dQ
                    ptx.wgmma_wait(dv_acc, dv_acc, ONE, OUTPUTS_V, NONE)
                # (7) dQ = dS K, (6) dK = dK + dS^T Q
                start_dq(dq, mma.descriptor(ds + u32(ds_half), u32(K_PANEL)), k_columns)
                start_dk(dk_acc, mma.descriptor(ds + mine, u32(0)), mma.descriptor(q_rows, u32(Q_PANEL)))
                ptx.wgmma_wait(dq, s, ONE, 32, NEXT)
                pipeline.release(smem, DO, n)
                put_dq(smem, me, n, dq)
                n = u32(n + 1)
            finish(maps, smem, turn, me, n, arrays, dk_acc, dv_acc, scales[2])
            turn = u32(turn + 1)

    return movers_sm90.build_kernel(head_dim, head_dim_v, banded, to_map, ordered, options, tile, consume)
