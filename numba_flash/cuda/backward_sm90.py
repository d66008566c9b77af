"""Backward pass on Hopper: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, in persistent blocks as in `forward_sm90`.

A block owns a block of keys and walks over the queries of every head of its group. Threads of its first warp group move data: Q and dO in,
tiles of dQ out, where they are added up as float32 (`movers_sm90`). Every other warp group, a consumer, owns 64 of the keys. It computes
S^T and dP^T, keys along the rows, so that P^T can be an operand of dV as it is. dS^T goes to shared memory, where each consumer reads its
part for dK, and all of it along the other direction for half of dQ.

A tile of dQ is the sum of what several blocks add. If `ordered`, they do so in the order of their keys: a flag counts who was there.
"""

import math

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import mma, movers_sm90, pipeline, ptx, scores, softmax, swizzle
from numba_flash.cuda.movers_sm90 import B0, B1, COUNT, END, FIRST, HIGH, IMPOSSIBLE, K0, KEYS, KV_HEAD, LOW, QUERIES, ROW0

CLEAR_FROM, CLEAR_TO, END_OF_HEAD, LAST = pipeline.one_type(range(4))  # bounds of row0


def build(dtype, head_dim, head_dim_v, banded, to_map, ordered, options, tile):
    """Kernel ``backward_sm90(maps, dk, dv, lse2, delta, dq_sum, flags, extras, sizes, scales)``, its signature and compile options.

    banded : True if some query does not see every key.
    maps : tensor maps of do, q, k and v as (b0, b1, heads, n, head_dim), boxes of one panel of a tile, and with `to_map` of dk and dv.
    dk, dv : (b0, b1, kv_heads, nk, head_dim), as words of two elements.
    lse2, delta : float32 (b0, b1, heads, row blocks * BLOCK_M), as `numba_flash.cuda.rows_sm90` numbers and writes them.
    dq_sum : float32, 64 x 64 elements per (b0, b1, head, row block, consumer), in the order of fragments.
    flags : int32, one per (b0, b1, head, row block, consumer).
    extras : lengths, see `numba_flash.cuda.scores`.
    sizes : items, low, high (of query - key), nq, 1, group, section (see `numba_flash.cuda.schedule`), b0.
    scales : slope, scale_log2, as in the forward kernel, and scale.
    """  # fmt: skip
    BLOCK_M, BLOCK_N, CONSUMERS, SPLIT_ROWS = tile.block_m, tile.block_n, tile.consumers, tile.splits_rows
    SMEM, (FEWEST, REGISTERS) = tile.layout(head_dim, head_dim_v), tile.registers
    Q, K, V, DO, DQ, WORK = map(pipeline.one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do, SMEM.dq, SMEM.work))
    DS, LSE, DELTA, BOUNDS = SMEM.ds, SMEM.lse, SMEM.delta, SMEM.bounds
    ALIGNMENT, ROWS, Q_PANEL, K_PANEL = SMEM.ALIGNMENT, 64, swizzle.panel_bytes(BLOCK_M), swizzle.panel_bytes(BLOCK_N)
    ROW_BYTES, DS_BYTES, MINE = 4 * BLOCK_M, SMEM.ds_bytes, ROWS * swizzle.ROW_BYTES
    SCORES, PAIRS, OUTPUTS_K, OUTPUTS_V = BLOCK_M // 2, BLOCK_M // 4, head_dim // 2, head_dim_v // 2
    CAPPED, TO_MAP, AHEAD, NEXT = bool(options.softcap), to_map, tile.ahead, SCORES if tile.ahead else 0
    SEQUENCES, BFLOAT16 = options.sequences, dtype == "bfloat16"
    ACC, u32, i32 = types.float32, types.uint32, types.int32
    V_BEHIND_K = (SMEM.v[pipeline.TILES] - SMEM.k[pipeline.TILES]) // mma.DESCRIPTOR_UNIT
    NAN, ONES, ON, OFF, NONE, ONE = math.nan, (1.0, 1.0), 1, 0, 0, 1
    describe, produce, add_dq = movers_sm90.build(head_dim, head_dim_v, banded, ordered, options, tile)
    clear_k, clear_v = pipeline.build_clear_tail(head_dim, BLOCK_N), pipeline.build_clear_tail(head_dim_v, BLOCK_N)
    clear_q, clear_do = pipeline.build_clear_tail(head_dim, BLOCK_M), pipeline.build_clear_tail(head_dim_v, BLOCK_M)
    start_scores = mma.build_scores(BLOCK_M, head_dim, BLOCK_N, BFLOAT16)
    start_dp = mma.build_scores(BLOCK_M, head_dim_v, BLOCK_N, BFLOAT16)
    start_dv = mma.build_values(BLOCK_M, head_dim_v, BFLOAT16)
    start_dq = mma.build_sum(64, BLOCK_N // 16, 0, 0, BFLOAT16, False)
    start_dk = mma.build_sum(head_dim, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    pack, _ = mma.build_pack(PAIRS, BFLOAT16)
    put_ds = mma.build_put(BLOCK_M, 0, swizzle.panels(BLOCK_M), BFLOAT16, BLOCK_N)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    cap, hide_row = softmax.build_cap(SCORES), softmax.build_hide(SCORES, True)
    put_dk, put_dv = mma.build_put_row(head_dim, False, BFLOAT16), mma.build_put_row(head_dim_v, False, BFLOAT16)
    stage_dk = mma.build_stage(head_dim, 2, BFLOAT16) if TO_MAP else None
    stage_dv = mma.build_stage(head_dim_v, 2, BFLOAT16) if TO_MAP else None

    @cuda.jit(device=True, forceinline=True)
    def note_bounds(smem, turn, me):
        """Write down the first and last row0 whose tile hides nothing from the warp group's keys; those after a head, and of its first."""
        first = i32(pipeline.read(smem, WORK, turn, ROW0) + me * ROWS)
        low, high = pipeline.read(smem, WORK, turn, LOW), pipeline.read(smem, WORK, turn, HIGH)
        last = min(i32(pipeline.read(smem, WORK, turn, QUERIES) - BLOCK_M), i32(high + first - i32(BLOCK_M - 1)))
        if first + ROWS > pipeline.read(smem, WORK, turn, KEYS):
            last = i32(-1)
        before, count = pipeline.read(smem, WORK, turn, FIRST) - i32(1), pipeline.read(smem, WORK, turn, COUNT)
        pipeline.meet_warp_group(me, CONSUMERS)  # nobody reads those of the item before any more
        if cuda.threadIdx.x % pipeline.WARP_GROUP == 0:
            bounds = i32(low + first + i32(ROWS - 1)), last, i32(before * BLOCK_M), i32((before + count) * BLOCK_M)
            for i in range(4):
                ptx.store_shared(u32(smem + u32(BOUNDS + 16 * me + 4 * i)), bounds[i])
        pipeline.meet_warp_group(me, CONSUMERS)

    @cuda.jit(device=True, forceinline=True)
    def bound(smem, me, i):
        """One of the bounds; in shared memory, because registers are short."""
        return ptx.load_shared(u32(smem + u32(BOUNDS + 16 * me + 4 * i)))

    @cuda.jit(device=True, forceinline=True)
    def hide(s, smem, turn, me, row0):
        """Scores that the mask hides, or beyond the ends, become -inf. Rows are keys, columns queries."""
        low, high = pipeline.read(smem, WORK, turn, LOW), pipeline.read(smem, WORK, turn, HIGH)
        keys, queries = pipeline.read(smem, WORK, turn, KEYS), pipeline.read(smem, WORK, turn, QUERIES)
        key = i32(pipeline.read(smem, WORK, turn, ROW0) + me * ROWS + mma.first_row())
        for r in range(2):
            j, column = i32(key + 8 * r), i32(row0 + mma.first_column())
            stop = i32(min(queries, i32(j + i32(1) + high)) - column)
            hide_row(s, r, i32(j + low - column), stop if j < keys else i32(0))

    @cuda.jit(device=True, forceinline=True)
    def row_values(smem, offset, slots, n):
        """Where this thread finds those of its first columns that came with the n-th tile."""
        return u32(smem + u32(offset) + n % u32(slots) * u32(ROW_BYTES) + u32(mma.first_column() * 4))

    @cuda.jit(device=True, forceinline=True)
    def exponentiate(s, lse2_smem, scale_log2):
        """(2) P^T = exp(S^T - lse), in the place of S^T."""
        for j in range(SCORES // 4):
            shift = ptx.load_shared_pair(u32(lse2_smem + u32(32 * j)))
            for i in range(4):
                s[4 * j + i] = ptx.ex2(s[4 * j + i] * scale_log2 - shift[i % 2])

    @cuda.jit(device=True, forceinline=True)
    def differentiate(ds, p, smem, n, scale_log2):
        """(5) dS^T = P^T * (dP^T - delta), in the place of dP^T; with softcap times the cap's slope, for which P gives the score again."""
        delta_smem, lse2_smem = row_values(smem, DELTA, DO[pipeline.SLOTS], n), row_values(smem, LSE, Q[pipeline.SLOTS], n)
        for j in range(SCORES // 4):
            delta = ptx.load_shared_pair(u32(delta_smem + u32(32 * j)))
            for i in range(4):
                ds[4 * j + i] = p[4 * j + i] * (ds[4 * j + i] - delta[i % 2])
            if CAPPED:
                shift = ptx.load_shared_pair(u32(lse2_smem + u32(32 * j)))
                for i in range(4):
                    tanh = (ptx.lg2(p[4 * j + i]) + shift[i % 2]) * ptx.rcp(scale_log2)
                    ds[4 * j + i] = ds[4 * j + i] * (ACC(1) - tanh * tanh) if p[4 * j + i] != ACC(0) else ACC(0)

    @cuda.jit(device=True, forceinline=True)
    def finish(maps, smem, turn, me, n, results, dk_acc, dv_acc, scale):
        """Store dK and dV of a work item."""
        factor, scaled = cuda.local.array(2, ACC), cuda.local.array(2, ACC)
        b0, b1, h = pipeline.read(smem, WORK, turn, B0), pipeline.read(smem, WORK, turn, B1), pipeline.read(smem, WORK, turn, KV_HEAD)
        row0 = i32(pipeline.read(smem, WORK, turn, ROW0) + me * ROWS)
        k0, keys = pipeline.read(smem, WORK, turn, K0), pipeline.read(smem, WORK, turn, KEYS)
        for r in range(2):
            factor[r] = ACC(NAN) if SEQUENCES and pipeline.read(smem, WORK, turn, IMPOSSIBLE) != 0 else ACC(1)
            scaled[r] = factor[r] * scale
        pipeline.leave(smem, WORK, turn)
        if TO_MAP:
            pipeline.wait_free(smem, DQ, n)  # the room is this consumer's, and its dQ has left it
            room = pipeline.tile(smem, DQ, n)
            stage_dv(maps[5], room, dv_acc, factor, me, CONSUMERS, (row0, h, b1, b0))
            stage_dk(maps[4], room, dk_acc, scaled, me, CONSUMERS, (row0, h, b1, b0))
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
    def enter(smem, turn, me, n, row0):
        """Wait for a tile of Q, and make zeros of what is beyond its sequence."""
        pipeline.wait_ready(smem, Q, n)
        if SEQUENCES:
            clear_q(smem, Q, n, pipeline.read(smem, WORK, turn, QUERIES) - row0, me, CONSUMERS)

    @cuda.jit(device=True, forceinline=True)
    def release_before(smem, n):
        """All products with the Q tile before the n-th are complete."""
        if n != u32(0):
            pipeline.release(smem, Q, u32(n - 1))

    @cuda.jit(device=True, forceinline=True)
    def weigh(s, smem, turn, me, n, row0, scales):
        """Softcap and mask, then (2) P^T."""
        if CAPPED:
            cap(s, scales[0])
        if row0 < bound(smem, me, CLEAR_FROM) or row0 > bound(smem, me, CLEAR_TO):
            hide(s, smem, turn, me, row0)
        exponentiate(s, row_values(smem, LSE, Q[pipeline.SLOTS], n), scales[1])

    @cuda.jit(device=True, forceinline=True)
    def hand_over(smem, me, n, dq):
        """Release dO's tile, and leave this consumer's part of a tile of dQ to the thread that adds it up."""
        pipeline.release(smem, DO, n)
        ring = u32(n * u32(CONSUMERS) + u32(me))
        pipeline.wait_free(smem, DQ, ring)
        to = u32(pipeline.tile(smem, DQ, ring) + u32(cuda.threadIdx.x % pipeline.WARP_GROUP * 16))
        for j in range(8):
            ptx.store_shared_vector(u32(to + u32(2048 * j)), (dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]))
        ptx.fence_proxy_async()
        pipeline.publish(smem, DQ, ring)

    @cuda.jit(device=True, forceinline=True)
    def start_item(smem, turn, me, n, s, k_rows):
        """Wait for K and V of a work item, and, if AHEAD, for (1) S^T = K Q^T of its first tile; returns row0."""
        note_bounds(smem, turn, me)
        row0, keys = bound(smem, me, LAST), pipeline.read(smem, WORK, turn, KEYS) - pipeline.read(smem, WORK, turn, ROW0)
        pipeline.wait_ready(smem, K, turn)
        if SEQUENCES:
            clear_k(smem, K, turn, keys, me, CONSUMERS)
        if AHEAD:
            enter(smem, turn, me, n, row0)
            start_scores(s, k_rows, mma.descriptor(pipeline.tile(smem, Q, n), u32(0)))
        pipeline.wait_ready(smem, V, turn)
        if SEQUENCES:
            clear_v(smem, V, turn, keys, me, CONSUMERS)
        if AHEAD:
            ptx.wgmma_wait(s, s, NONE, SCORES, NONE)
        return row0

    @cuda.jit(device=True, forceinline=True)
    def next_row0(smem, me, row0):
        """First query of the next tile: of the same head, or the last tile of the next one."""
        row0 = i32(row0 - BLOCK_M)
        return bound(smem, me, LAST) if row0 == bound(smem, me, END_OF_HEAD) else row0

    @cuda.jit(device=True, forceinline=True)
    def start_next(smem, turn, me, n, end, row0, s, k_rows):
        """Start (1) S^T = K Q^T of the tile after the n-th; after an item's last, of the same again, for nothing."""
        following = u32(n + u32(1))
        if following == end:
            following = n
        else:
            enter(smem, turn, me, following, row0)
        start_scores(s, k_rows, mma.descriptor(pipeline.tile(smem, Q, following), u32(0)))

    @cuda.jit(device=True, forceinline=True)
    def consume(maps, smem, me, dk, dv, group, scales):
        """Equations (1) to (7) for 64 keys of each work item and all its tiles of queries, the last tile first."""
        s, dp, p = cuda.local.array(SCORES, ACC), cuda.local.array(SCORES, ACC), cuda.local.array(PAIRS, u32)
        dk_acc, dv_acc, dq = cuda.local.array(OUTPUTS_K, ACC), cuda.local.array(OUTPUTS_V, ACC), cuda.local.array(32, ACC)
        # half of the columns of dS^T, or of those of K; what it computes of columns that K lacks is left out by `rows_sm90.build_finish`
        ds_half, k_half = (me * K_PANEL, 0) if SPLIT_ROWS else (0, me * K_PANEL)
        mine, turn, n = u32(me * MINE), u32(0), u32(0)
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
            row0, end = start_item(smem, turn, me, n, s, k_rows), u32(n + u32(count * group))
            while n != end:
                q_rows, do_rows = pipeline.tile(smem, Q, n), pipeline.tile(smem, DO, n)
                if not AHEAD:  # (1) S^T = K Q^T
                    enter(smem, turn, me, n, row0)
                    start_scores(s, k_rows, mma.descriptor(q_rows, u32(0)))
                pipeline.wait_ready(smem, DO, n)
                if SEQUENCES:
                    clear_do(smem, DO, n, pipeline.read(smem, WORK, turn, QUERIES) - row0, me, CONSUMERS)
                # (4) dP^T = V dO^T
                start_dp(dp, v_rows, mma.descriptor(do_rows, u32(0)))
                if not AHEAD:
                    ptx.wgmma_wait(s, s, ONE, SCORES, NONE)
                    release_before(smem, n)
                # (2) P^T = exp(S^T - lse)
                weigh(s, smem, turn, me, n, row0, scales)
                ptx.wgmma_wait(dp, dp, NONE, SCORES, NONE)
                if AHEAD:
                    release_before(smem, n)
                # (5) dS^T = P^T * (dP^T - delta)
                differentiate(dp, s, smem, n, scales[1])
                # (3) dV = dV + P^T dO
                pack(p, s)
                start_dv(dv_acc, p, mma.descriptor(do_rows, u32(Q_PANEL)))
                ds = u32(smem + u32(DS) + n % u32(2) * u32(DS_BYTES))
                put_ds(u32(ds + mine), dp, ONES)
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
                hand_over(smem, me, n, dq)
                n = u32(n + 1)
            ptx.wgmma_wait(dk_acc, dv_acc, NONE, OUTPUTS_K, OUTPUTS_V)
            pipeline.release(smem, K, turn)
            pipeline.release(smem, V, turn)
            finish(maps, smem, turn, me, u32(n * u32(CONSUMERS) + u32(me)), (dk, dv), dk_acc, dv_acc, scales[2])
            turn = u32(turn + 1)

    def backward_sm90(maps, dk, dv, lse2, delta, dq_sum, flags, extras, sizes, scales):
        smem = u32((ptx.shared_address(cuda.shared.array(0, types.uint8)) + u32(ALIGNMENT - 1)) & u32(-ALIGNMENT & 0xFFFFFFFF))
        group = pipeline.uniform(i32(cuda.threadIdx.x) // pipeline.WARP_GROUP)
        if cuda.threadIdx.x == 0:
            pipeline.initialise(smem, WORK, 1, CONSUMERS * pipeline.WARP_GROUP + CONSUMERS + 1)
            for ring in (Q, DO, K, V):
                pipeline.initialise(smem, ring, 1, CONSUMERS)
            pipeline.initialise(smem, DQ, pipeline.WARP_GROUP, 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()  # everyone sees the barriers initialised

        if group == 0:
            ptx.setmaxnreg(FEWEST, OFF)
            warp = cuda.threadIdx.x // 32
            if cuda.threadIdx.x % 32 == 0:
                if warp == CONSUMERS + 1:
                    describe(smem, dk, lse2, extras, sizes)
                elif warp == CONSUMERS:
                    produce(maps, smem, lse2, delta, i32(sizes[5]))
                else:
                    add_dq(smem, i32(warp), lse2, dq_sum, flags, i32(sizes[5]))
        else:
            ptx.setmaxnreg(REGISTERS, ON)
            consume(maps, smem, group - 1, dk, dv, i32(sizes[5]), scales)

    maps = [f"maps.{i}" for i in range(6 if TO_MAP else 4)]
    array = lambda kind, ndim: types.Array(kind, ndim, "A")
    operands = array(u32, 5), array(u32, 5), array(ACC, 4), array(ACC, 4), array(ACC, 5), array(types.int32, 5)
    extras, *_ = scores.kernel_arguments(options, ())
    numbers = types.UniTuple(types.int64, 8), types.UniTuple(types.float32, 3)
    signature = types.void(types.UniTuple(types.uint64, len(maps)), *operands, extras, *numbers)
    return backward_sm90, signature, {"launch_bounds": (tile.threads, 1), "tensor_maps": tuple(maps)}
