"""Backward pass on Hopper: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, in persistent blocks as in `forward_sm90`.

A block owns a block of keys and walks over the queries of every head of its group. Its first warp group moves data: one thread, the producer,
fills rings of Q and dO tiles, and one per consumer adds finished tiles of dQ to memory, as float32. Every other warp group, a consumer,
owns 64 of the keys. It computes S^T and dP^T, keys along the rows, so that P^T and dS^T can be operands of dV and dK as they are; dS^T also
goes to shared memory, where the consumers read it along the other direction for dQ, half of it each.

A tile of dQ is the sum of what several blocks add. If `ordered`, they do so in the order of their keys: a flag counts who was there.
"""

import math

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import mma, pipeline, ptx, schedule, scores, softmax, swizzle

# what the producer writes about a work item
B0, B1, KV_HEAD, ROW0, K0, KEYS, Q0, QUERIES, LOW, HIGH, IMPOSSIBLE, FIRST, COUNT, BASE = range(14)  # BASE: number of its first head's first row block
CLEAR_FROM, CLEAR_TO, END_OF_HEAD, LAST = range(4)  # bounds of row0
END = -1  # in the place of the count of query tiles: there is no more work


def build(dtype, head_dim, head_dim_v, band, to_map, ordered, options, tile):
    """Kernel ``backward_sm90(maps, dk, dv, lse2, delta, dq_sum, flags, extras, sizes, scales)``, its signature and compile options.

    band : "none" if every query sees every key, "above" if only keys above a diagonal are hidden, "both" if some below one are, too.
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
    Q, K, V, DO, DQ, WORK, DS, LSE, DELTA, BOUNDS = SMEM.q, SMEM.k, SMEM.v, SMEM.do, SMEM.dq, SMEM.work, SMEM.ds, SMEM.lse, SMEM.delta, SMEM.bounds
    ALIGNMENT, ROWS, Q_PANEL, K_PANEL = SMEM.ALIGNMENT, 64, swizzle.panel_bytes(BLOCK_M), swizzle.panel_bytes(BLOCK_N)
    ROW_BYTES, DS_BYTES, MINE = 4 * BLOCK_M, SMEM.ds_bytes, ROWS * swizzle.ROW_BYTES
    SCORES, PAIRS, OUTPUTS_K, OUTPUTS_V, DQ_FLOATS = BLOCK_M // 2, BLOCK_M // 4, head_dim // 2, head_dim_v // 2, 64 * 64
    BANDED, CAPPED, TO_MAP, ORDERED, EARLY = band != "none", bool(options.softcap), to_map, ordered, tile.early_dv or bool(options.softcap)
    ADAPTIVE = ordered == 2
    AHEAD, PENDING, NEXT = tile.ahead, 1 if EARLY else 0, SCORES if tile.ahead else 0  # PENDING: products behind dP
    SEQUENCES, PACKED, BFLOAT16 = options.sequences, options.packed, dtype == "bfloat16"
    ACC, u32, i32, u64 = types.float32, types.uint32, types.int32, types.uint64
    V_BEHIND_K = (V[pipeline.TILES] - K[pipeline.TILES]) // mma.DESCRIPTOR_UNIT
    NAN, ONES, ON, OFF, NONE, ONE = math.nan, (1.0, 1.0), 1, 0, 0, 1
    item_of = schedule.build_item(
        options, band != "none", False, BLOCK_N, BLOCK_M, scores.build_sequence(options), scores.slots(options).kv_lengths, True
    )
    fill_q = pipeline.build_fill(Q, head_dim, BLOCK_M, ROW_BYTES)
    fill_do = pipeline.build_fill(DO, head_dim_v, BLOCK_M, ROW_BYTES)
    fill_k, fill_v = pipeline.build_fill(K, head_dim, BLOCK_N), pipeline.build_fill(V, head_dim_v, BLOCK_N)
    clear_k, clear_v = pipeline.build_clear_tail(head_dim, BLOCK_N), pipeline.build_clear_tail(head_dim_v, BLOCK_N)
    clear_q, clear_do = pipeline.build_clear_tail(head_dim, BLOCK_M), pipeline.build_clear_tail(head_dim_v, BLOCK_M)
    start_scores = mma.build_scores(BLOCK_M, head_dim, BLOCK_N, BFLOAT16)
    start_dp = mma.build_scores(BLOCK_M, head_dim_v, BLOCK_N, BFLOAT16)
    start_dv = mma.build_values(BLOCK_M, head_dim_v, BFLOAT16)
    start_dq = mma.build_sum(64, BLOCK_N // 16, 0, 0, BFLOAT16, False)
    start_dk = mma.build_sum(head_dim, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    pack, pack2 = mma.build_pack(PAIRS, BFLOAT16)
    put_ds = mma.build_put(BLOCK_M, 0, swizzle.panels(BLOCK_M), BFLOAT16, BLOCK_N)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    cap, hide_row = softmax.build_cap(SCORES), softmax.build_hide(SCORES, True)
    put_dk, put_dv = mma.build_put_row(head_dim, False, BFLOAT16), mma.build_put_row(head_dim_v, False, BFLOAT16)
    stage_dk = mma.build_stage(head_dim, 2, BFLOAT16) if TO_MAP else None
    stage_dv = mma.build_stage(head_dim_v, 2, BFLOAT16) if TO_MAP else None

    @cuda.jit(device=True, forceinline=True)
    def describe(smem, dk, lse2, extras, sizes):
        """Write down what this block's work items are, one ahead of the others."""
        turn, there = u32(0), True
        while there:
            pipeline.wait_free(smem, WORK, turn)
            at = schedule.snake(turn, cuda.gridDim.x) if BANDED else i32(turn * cuda.gridDim.x + cuda.blockIdx.x)
            there = at < sizes[0]
            if there:
                (b0, b1, h, row0), (k0, keys, q0, queries, low, high, impossible), (first, count, _) = item_of(at, dk.shape, extras, sizes)
                base = i32(0)
                if PACKED:
                    base, b1 = i32(q0 // BLOCK_M + b1), i32(0)
                heads = i32((b0 * i32(lse2.shape[1]) + b1) * i32(lse2.shape[2]) + h * i32(sizes[5]))
                base = i32(base + heads * i32(lse2.shape[3] // BLOCK_M))
                work = (b0, b1, h, row0, k0, keys, q0, queries, low, high, impossible, first, count, base)
                for word in range(len(work)):
                    pipeline.write(smem, WORK, turn, word, work[word])
            else:
                pipeline.write(smem, WORK, turn, COUNT, END)
            pipeline.publish(smem, WORK, turn)
            turn = u32(turn + 1)

    @cuda.jit(device=True, forceinline=True)
    def produce(maps, smem, lse2, delta, group):
        """Have the copy engine fetch what each work item needs."""
        turn, n, blocks = u32(0), u32(0), i32(lse2.shape[3] // BLOCK_M)
        lse2_address, delta_address = ptx.global_address(lse2), ptx.global_address(delta)
        pipeline.wait_ready(smem, WORK, turn)
        count = pipeline.read(smem, WORK, turn, COUNT)
        while count != END:
            b0, b1 = pipeline.read(smem, WORK, turn, B0), pipeline.read(smem, WORK, turn, B1)
            kv_head, first = pipeline.read(smem, WORK, turn, KV_HEAD), pipeline.read(smem, WORK, turn, FIRST)
            key = pipeline.read(smem, WORK, turn, K0) + pipeline.read(smem, WORK, turn, ROW0)
            pipeline.wait_free(smem, K, turn)
            fill_k(maps[2], smem, turn, (key, kv_head, b1, b0))
            for g in range(group):
                head = i32(kv_head * group + g)
                base = i32(pipeline.read(smem, WORK, turn, BASE) + g * blocks)
                for t in range(count):
                    at = i32(first + count - i32(1) - t)
                    row = i32(pipeline.read(smem, WORK, turn, Q0) + at * i32(BLOCK_M))
                    offset = u64(u32(i32(base + at))) * u64(ROW_BYTES)
                    pipeline.wait_free(smem, Q, n)
                    fill_q(maps[1], smem, n, (row, head, b1, b0))
                    slot = n % u32(Q[pipeline.SLOTS])
                    to = u32(smem + u32(LSE) + slot * u32(ROW_BYTES))
                    ptx.bulk_load(to, u64(lse2_address + offset), u32(ROW_BYTES), pipeline.mbarrier(smem, Q, pipeline.READY, n))
                    if g == 0 and t == 0:
                        pipeline.wait_free(smem, V, turn)
                        fill_v(maps[3], smem, turn, (key, kv_head, b1, b0))
                    pipeline.wait_free(smem, DO, n)
                    fill_do(maps[0], smem, n, (row, head, b1, b0))
                    slot = n % u32(DO[pipeline.SLOTS])
                    to = u32(smem + u32(DELTA) + slot * u32(ROW_BYTES))
                    ptx.bulk_load(to, u64(delta_address + offset), u32(ROW_BYTES), pipeline.mbarrier(smem, DO, pipeline.READY, n))
                    n = u32(n + 1)
            pipeline.leave(smem, WORK, turn)
            turn = u32(turn + 1)
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.read(smem, WORK, turn, COUNT)

    @cuda.jit(device=True, forceinline=True)
    def add_dq(smem, me, lse2, dq_sum, flags, group):
        """(7) dQ_i = dQ_i + dS_ij K_j: add what consumer `me` has left in shared memory to the sum in memory."""
        turn, n, blocks = u32(0), u32(me), i32(lse2.shape[3] // BLOCK_M)
        sum_address, flag_address = ptx.global_address(dq_sum), ptx.global_address(flags)
        pipeline.wait_ready(smem, WORK, turn)
        count = pipeline.read(smem, WORK, turn, COUNT)
        while count != END:
            first = pipeline.read(smem, WORK, turn, FIRST)
            block, high = i32(pipeline.read(smem, WORK, turn, ROW0) // BLOCK_N), pipeline.read(smem, WORK, turn, HIGH)
            seen = pipeline.read(smem, WORK, turn, QUERIES) != 0
            done = u64(0)
            for g in range(group):
                base = i32(pipeline.read(smem, WORK, turn, BASE) + g * blocks)
                for t in range(count):
                    at = i32(first + count - i32(1) - t)
                    mine = u64(u32(i32(base + at) * i32(CONSUMERS) + me))
                    flag, to, before = u64(flag_address + mine * u64(4)), u64(sum_address + mine * u64(4 * DQ_FLOATS)), i32(1)
                    pipeline.wait_ready(smem, DQ, n)
                    if ORDERED and seen:
                        before = i32(block - max(at * BLOCK_M - high, 0) // BLOCK_N)
                        while ptx.load_flag(flag) != before:
                            pass
                    if seen:
                        if before == 0:
                            ptx.bulk_store(to, pipeline.tile(smem, DQ, n), u32(4 * DQ_FLOATS))
                        else:
                            ptx.bulk_add(to, pipeline.tile(smem, DQ, n), u32(4 * DQ_FLOATS))
                        ptx.bulk_commit()
                    ptx.bulk_wait_read()
                    pipeline.leave(smem, DQ, n)
                    if ORDERED and seen:
                        if ADAPTIVE:
                            if done != u64(0):
                                ptx.bulk_wait_but_last()
                                ptx.fence_proxy_async_all()
                                ptx.add_release(done, i32(1))
                            done = flag
                            if not pipeline.is_ready(smem, DQ, u32(n + CONSUMERS)) or t + 1 == count:
                                ptx.bulk_wait()
                                ptx.fence_proxy_async_all()
                                ptx.add_release(flag, i32(1))
                                done = u64(0)
                        else:
                            ptx.bulk_wait()
                            ptx.fence_proxy_async_all()
                            ptx.add_release(flag, i32(1))
                    n = u32(n + CONSUMERS)
            pipeline.leave(smem, WORK, turn)
            turn = u32(turn + 1)
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.read(smem, WORK, turn, COUNT)
        ptx.bulk_wait()

    @cuda.jit(device=True, forceinline=True)
    def note_bounds(smem, turn, me):
        """Write down the first and last row0 whose tile hides nothing from the warp group's keys, that beyond the last tile's, the first's."""
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
    def exponentiate(s, p, lse2_smem, scale_log2):
        """(2) P^T = exp(S^T - lse) in the place of S^T, and packed into p if it is wanted EARLY; with softcap times the cap's slope there."""
        for j in range(SCORES // 4):
            shift = ptx.load_shared_pair(u32(lse2_smem + u32(32 * j)))
            for r in range(2):
                i = 4 * j + 2 * r
                x, y = ptx.ex2(s[i] * scale_log2 - shift[0]), ptx.ex2(s[i + 1] * scale_log2 - shift[1])
                if EARLY:
                    p[2 * j + r] = pack2(x, y)
                if CAPPED:  # a hidden score is -inf, and its weight 0
                    s[i] = x * (ACC(1) - s[i] * s[i]) if x != ACC(0) else x
                    s[i + 1] = y * (ACC(1) - s[i + 1] * s[i + 1]) if y != ACC(0) else y
                else:
                    s[i], s[i + 1] = x, y

    @cuda.jit(device=True, forceinline=True)
    def differentiate(ds, s, delta_smem):
        """(5) dS^T = P^T * (dP^T - delta), in the place of dP^T."""
        for j in range(SCORES // 4):
            delta = ptx.load_shared_pair(u32(delta_smem + u32(32 * j)))
            for i in range(4):
                ds[4 * j + i] = s[4 * j + i] * (ds[4 * j + i] - delta[i % 2])

    @cuda.jit(device=True, forceinline=True)
    def finish(maps, smem, turn, me, n, dk, dv, dk_acc, dv_acc, scale):
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
                    put_dv(ptx.global_address(dv[b0, b1, h, k0 + j]), dv_acc, factor, r)
                    put_dk(ptx.global_address(dk[b0, b1, h, k0 + j]), dk_acc, scaled, r)

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
    def consume(maps, smem, me, dk, dv, group, scales):
        """Equations (1) to (7) for 64 keys of each work item and all its tiles of queries, the last tile first."""
        s, dp, p = cuda.local.array(SCORES, ACC), cuda.local.array(SCORES, ACC), cuda.local.array(PAIRS, u32)
        dk_acc, dv_acc, dq = cuda.local.array(OUTPUTS_K, ACC), cuda.local.array(OUTPUTS_V, ACC), cuda.local.array(32, ACC)
        ds_half, k_half = (me * K_PANEL, 0) if SPLIT_ROWS else (0, me * K_PANEL)  # of the columns of dS^T, or of those of K
        mine, column, lane_bytes = u32(me * MINE), u32(mma.first_column() * 4), u32(cuda.threadIdx.x % pipeline.WARP_GROUP * 16)
        turn, n = u32(0), u32(0)
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
            pipeline.wait_ready(smem, K, turn)
            if SEQUENCES:
                here = pipeline.read(smem, WORK, turn, KEYS) - pipeline.read(smem, WORK, turn, ROW0)
                clear_k(smem, K, turn, here, me, CONSUMERS)
            note_bounds(smem, turn, me)
            row0 = bound(smem, me, LAST)
            end = u32(n + u32(count * group))
            if AHEAD:  # (1) S^T = K Q^T of the first tile
                enter(smem, turn, me, n, row0)
                start_scores(s, k_rows, mma.descriptor(pipeline.tile(smem, Q, n), u32(0)))
            pipeline.wait_ready(smem, V, turn)
            if SEQUENCES:
                clear_v(smem, V, turn, here, me, CONSUMERS)
            if AHEAD:
                ptx.wgmma_wait(s, s, NONE, SCORES, NONE)
            while n != end:
                q_rows, do_rows = pipeline.tile(smem, Q, n), pipeline.tile(smem, DO, n)
                # (1) S^T = K Q^T, (4) dP^T = V dO^T
                if not AHEAD:
                    enter(smem, turn, me, n, row0)
                    start_scores(s, k_rows, mma.descriptor(q_rows, u32(0)))
                pipeline.wait_ready(smem, DO, n)
                if SEQUENCES:
                    clear_do(smem, DO, n, pipeline.read(smem, WORK, turn, QUERIES) - row0, me, CONSUMERS)
                start_dp(dp, v_rows, mma.descriptor(do_rows, u32(0)))
                if not AHEAD:
                    ptx.wgmma_wait(s, s, ONE, SCORES, NONE)
                    release_before(smem, n)
                # (2) P^T
                if CAPPED:
                    cap(s, scales[0])
                if row0 < bound(smem, me, CLEAR_FROM) or row0 > bound(smem, me, CLEAR_TO):
                    hide(s, smem, turn, me, row0)
                exponentiate(s, p, u32(smem + u32(LSE) + n % u32(Q[pipeline.SLOTS]) * u32(ROW_BYTES) + column), scales[1])
                # (3) dV = dV + P^T dO
                if EARLY:
                    start_dv(dv_acc, p, mma.descriptor(do_rows, u32(Q_PANEL)))
                ptx.wgmma_wait(dp, dp, PENDING, SCORES, NONE)
                if AHEAD:
                    release_before(smem, n)
                # (5) dS^T
                differentiate(dp, s, u32(smem + u32(DELTA) + n % u32(DO[pipeline.SLOTS]) * u32(ROW_BYTES) + column))
                if not EARLY:
                    pack(p, s)
                    start_dv(dv_acc, p, mma.descriptor(do_rows, u32(Q_PANEL)))
                ds = u32(smem + u32(DS) + n % u32(2) * u32(DS_BYTES))
                put_ds(u32(ds + mine), dp, ONES)
                ptx.fence_proxy_async()
                # (1) S^T of the next tile; after the last one, of the same again, for nothing
                row0 = i32(row0 - BLOCK_M)
                if row0 == bound(smem, me, END_OF_HEAD):
                    row0 = bound(smem, me, LAST)
                if AHEAD:
                    following = u32(n + u32(1))
                    if following == end:
                        following = n
                    else:
                        enter(smem, turn, me, following, row0)
                    start_scores(s, k_rows, mma.descriptor(pipeline.tile(smem, Q, following), u32(0)))
                pipeline.meet_consumers(CONSUMERS)
                if AHEAD:  # dV is complete: the registers of P are free for dQ
                    ptx.wgmma_wait(dv_acc, dv_acc, ONE, OUTPUTS_V, NONE)
                # (7) dQ = dS K, (6) dK = dK + dS^T Q
                start_dq(dq, mma.descriptor(ds + u32(ds_half), u32(K_PANEL)), k_columns)
                start_dk(dk_acc, mma.descriptor(ds + mine, u32(0)), mma.descriptor(q_rows, u32(Q_PANEL)))
                ptx.wgmma_wait(dq, s, ONE, 32, NEXT)
                pipeline.release(smem, DO, n)
                # hand dQ over
                ring = u32(n * u32(CONSUMERS) + u32(me))
                pipeline.wait_free(smem, DQ, ring)
                to = u32(pipeline.tile(smem, DQ, ring) + lane_bytes)
                for j in range(8):
                    ptx.store_shared_four(u32(to + u32(2048 * j)), (dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]))
                ptx.fence_proxy_async()
                pipeline.publish(smem, DQ, ring)
                n = u32(n + 1)
            ptx.wgmma_wait(dk_acc, dv_acc, NONE, OUTPUTS_K, OUTPUTS_V)
            pipeline.release(smem, K, turn)
            pipeline.release(smem, V, turn)
            finish(maps, smem, turn, me, u32(n * u32(CONSUMERS) + u32(me)), dk, dv, dk_acc, dv_acc, scales[2])
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
