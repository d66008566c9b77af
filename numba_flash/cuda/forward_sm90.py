"""Forward pass on Hopper: FlashAttention-3 (Shah et al., arXiv:2407.08608), Algorithm 1, in persistent blocks.

One thread of the first warp group, the producer, lets the copy engine fill rings of K and V tiles; every other warp group, a consumer, owns 64
rows of the block's queries. A consumer starts the scores of the next tile before the product P V of the current one, so that its softmax runs
while the tensor cores do; with `ping_pong` the consumers also take turns at starting products, which keeps their softmaxes apart.
"""

import math

from numba import cuda
from numba.cuda import types

from numba_flash import mask
from numba_flash.cuda import mma, pipeline, ptx, schedule, scores, softmax, tiles


def build(dtype, head_dim, head_dim_v, write_lse, banded, split, options, tile):
    """Kernel ``forward_sm90(q_map, k_map, v_map, o, lse, extras, sizes, scales)`` with its signature and compile options.

    The maps are tensor maps of (b0, b1, heads, n, head_dim) arrays with boxes of one panel of a tile; o is a (b0, b1, heads, n, head_dim_v)
    array seen as words of two elements, or float32 itself if `split`, with b0 repeated for each part of the keys; lse is (b0, b1, heads, n).
    `sizes` is (items, low, high, nk, section, parts, kv_heads, b0), `scales` (slope, scale_log2): scores are in base 2 after multiplication
    by scale_log2; with softcap, slope leads to the tanh before that.
    """
    BLOCK_M, BLOCK_N, STAGES, PING_PONG, CONSUMERS = tile.block_m, tile.block_n, tile.stages, tile.ping_pong, tile.consumers
    SMEM, REGISTERS, FEWEST, WARP_GROUP = tile.layout(head_dim, head_dim_v), tile.registers, 24, pipeline.WARP_GROUP
    Q, K, V, Q_READY, Q_FREE = SMEM.q, SMEM.k, SMEM.v, SMEM.q_ready, SMEM.q_free
    K_READY, K_FREE, V_READY, V_FREE = SMEM.k_ready, SMEM.k_free, SMEM.v_ready, SMEM.v_free
    K_SLOT, V_SLOT = SMEM.k_slot // mma.DESCRIPTOR_UNIT, SMEM.v_slot // mma.DESCRIPTOR_UNIT
    V_PANEL, ALIGNMENT = mma.panel_bytes(BLOCK_N), SMEM.ALIGNMENT
    SCORES, PAIRS, OUTPUTS, ROW_WORDS = BLOCK_N // 2, BLOCK_N // 4, head_dim_v // 2, head_dim_v // 8
    WRITE_LSE, BANDED, SPLIT, CAPPED = write_lse, banded, split, bool(options.softcap)
    SEQUENCES, PACKED = options.sequences, options.packed
    ACC, u32, i32, index, NEG_INF, LN2 = types.float32, types.uint32, types.int32, tiles.index, -math.inf, math.log(2.0)
    ON, OFF = 1, 0
    item_of = schedule.build_item(options, BLOCK_M, BLOCK_N, scores.build_sequence(options), scores.slots(options).q_lengths)
    fill_q = pipeline.build_fill(head_dim, BLOCK_M, 1)
    fill_k = pipeline.build_fill(head_dim, BLOCK_N, STAGES)
    fill_v = pipeline.build_fill(head_dim_v, BLOCK_N, STAGES)
    start_scores = mma.build_scores(BLOCK_N, head_dim, BLOCK_M, dtype == "bfloat16")
    start_values = mma.build_values(BLOCK_N, head_dim_v, dtype == "bfloat16")
    wait_scores, wait_all = mma.build_wait(BLOCK_N, head_dim_v)
    pack, pack2 = mma.build_pack(PAIRS, dtype == "bfloat16")
    online, rescale = softmax.build_online(SCORES), softmax.build_rescale(OUTPUTS)
    cap, hide_row = softmax.build_cap(SCORES), softmax.build_hide(SCORES)
    clear_tail = pipeline.build_clear_tail(head_dim_v, BLOCK_N)

    @cuda.jit(device=True, forceinline=True)
    def produce(maps, smem, o, extras, sizes):
        """The copy engine follows the consumers through all work items; K runs one tile ahead of V."""
        turn, n, items_done = 0, u32(0), u32(0)
        at = schedule.snake(turn, cuda.gridDim.x)
        while at < sizes[0]:
            (b0, b1, h, row0), (q0, _, k0, _, _, _, _), (first, count, _) = item_of(at, o.shape, extras, sizes)
            if PACKED:
                b1 = i32(0)
            kv_head = h // (i32(o.shape[2]) // i32(sizes[6]))
            for t in range(count + 1):
                key = k0 + (first + count - 1 - t) * BLOCK_N
                if t < count:
                    fill_k(maps[1], smem + u32(K), smem + u32(K_READY), smem + u32(K_FREE), u32(n + t), (key, kv_head, b1, b0))
                if t == 0 and count > 0:
                    fill_q(maps[0], smem + u32(Q), smem + u32(Q_READY), smem + u32(Q_FREE), items_done, (q0 + row0, h, b1, b0))
                    items_done = u32(items_done + 1)
                if t > 0:
                    fill_v(
                        maps[2], smem + u32(V), smem + u32(V_READY), smem + u32(V_FREE), u32(n + t - 1), (key + BLOCK_N, kv_head, b1, b0)
                    )
            n = u32(n + count)
            turn += 1
            at = schedule.snake(turn, cuda.gridDim.x)

    @cuda.jit(device=True, forceinline=True)
    def soften(s, m_i, l_i, alpha, rows, col0, keys, band, scales):
        """(2) to (4) of a tile of scores: options and mask, then P in the place of S."""
        if CAPPED:
            cap(s, ACC(scales[0]))
        beyond = col0 + BLOCK_N > keys
        if BANDED:
            beyond = beyond or not mask.all_visible(rows - rows % 64, rows - rows % 64 + 64, col0, col0 + BLOCK_N, band[0], band[1])
        if beyond:
            column = i32(col0 + mma.first_column())
            for r in range(2):
                start, stop = mask.kv_range(rows + 8 * r, rows + 8 * r + 1, keys, band[0], band[1])
                hide_row(s, r, i32(start - column), i32(stop - column))
        online(s, m_i, l_i, alpha, ACC(scales[1]))

    def forward_sm90(q_map, k_map, v_map, o, lse, extras, sizes, scales):
        smem = u32((ptx.shared_address(cuda.shared.array(0, types.uint8)) + u32(ALIGNMENT - 1)) & u32(-ALIGNMENT & 0xFFFFFFFF))
        group = i32(cuda.threadIdx.x) // WARP_GROUP
        if cuda.threadIdx.x == 0:
            pipeline.initialise(smem + u32(Q_READY), 1, 1)
            pipeline.initialise(smem + u32(Q_FREE), 1, CONSUMERS)
            for ring in range(2):
                pipeline.initialise(smem + u32(K_READY if ring == 0 else V_READY), STAGES, 1)
                pipeline.initialise(smem + u32(K_FREE if ring == 0 else V_FREE), STAGES, CONSUMERS)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()  # everyone sees the barriers initialised

        if group == 0:
            ptx.setmaxnreg(FEWEST, OFF)
            if cuda.threadIdx.x == 0:
                produce((q_map, k_map, v_map), smem, o, extras, sizes)
        else:
            ptx.setmaxnreg(REGISTERS, ON)
            me = group - 1
            s = cuda.local.array(SCORES, ACC)
            acc = cuda.local.array(OUTPUTS, ACC)
            p = cuda.local.array(PAIRS, types.uint32)
            m_i, l_i, alpha = cuda.local.array(2, ACC), cuda.local.array(2, ACC), cuda.local.array(2, ACC)
            q_tile = mma.descriptor(smem + u32(Q) + u32(me * 64 * mma.ROW_BYTES), u32(0))
            k_tiles, v_tiles = mma.descriptor(smem + u32(K), u32(0)), mma.descriptor(smem + u32(V), u32(V_PANEL))
            if PING_PONG and me == CONSUMERS - 1:
                pipeline.pass_turn(0)
            turn, n, items_done = 0, u32(0), u32(0)
            at = schedule.snake(turn, cuda.gridDim.x)
            while at < sizes[0]:
                where, (q0, queries, k0, keys, low, high, factor), (first, count, part) = item_of(at, o.shape, extras, sizes)
                band, row = (low, high), where[3] + me * 64 + mma.first_row()
                for r in range(2):
                    m_i[r], l_i[r] = ACC(NEG_INF), ACC(0)
                for i in range(OUTPUTS):
                    acc[i] = ACC(0)
                if count > 0:
                    slot, parity = n % u32(STAGES), n // u32(STAGES) % u32(2)
                    pipeline.wait(smem + u32(Q_READY), items_done % u32(2))
                    pipeline.wait(pipeline.barrier(smem + u32(K_READY), slot), parity)
                    # (1) S = Q K^T of the first tile, which is the last of the row block's keys
                    start_scores(s, q_tile, k_tiles + types.uint64(slot * u32(K_SLOT)))
                    wait_all(acc, s)
                    pipeline.release(pipeline.barrier(smem + u32(K_FREE), slot))
                    col0 = (first + count - 1) * BLOCK_N
                    soften(s, m_i, l_i, alpha, row, col0, keys, band, scales)
                    pack(p, s)
                    if SEQUENCES and col0 + BLOCK_N > keys:
                        pipeline.wait(pipeline.barrier(smem + u32(V_READY), slot), parity)
                        clear_tail(smem + u32(V) + slot * u32(V_SLOT * 16), keys - col0, me, CONSUMERS)
                    for t in range(1, count):
                        v_slot, v_parity = slot, parity
                        slot, parity = u32(n + t) % u32(STAGES), u32(n + t) // u32(STAGES) % u32(2)
                        pipeline.wait(pipeline.barrier(smem + u32(K_READY), slot), parity)
                        if PING_PONG:
                            pipeline.await_turn(me)
                        # (1) S = Q K^T of the next tile, and (5) O += P V of this one, both in flight
                        start_scores(s, q_tile, k_tiles + types.uint64(slot * u32(K_SLOT)))
                        pipeline.wait(pipeline.barrier(smem + u32(V_READY), v_slot), v_parity)
                        start_values(acc, p, v_tiles + types.uint64(v_slot * u32(V_SLOT)))
                        if PING_PONG:
                            pipeline.pass_turn((me + 1) % CONSUMERS)
                        wait_scores(s)
                        pipeline.release(pipeline.barrier(smem + u32(K_FREE), slot))
                        # (2) to (4), while O += P V runs
                        soften(s, m_i, l_i, alpha, row, col0 - t * BLOCK_N, keys, band, scales)
                        wait_all(acc, s)
                        pipeline.release(pipeline.barrier(smem + u32(V_FREE), v_slot))
                        # O = alpha O
                        rescale(acc, alpha)
                        pack(p, s)
                    pipeline.release(smem + u32(Q_FREE))
                    # (5) O += P V of the last tile
                    pipeline.wait(pipeline.barrier(smem + u32(V_READY), slot), parity)
                    start_values(acc, p, v_tiles + types.uint64(slot * u32(V_SLOT)))
                    wait_all(acc, s)
                    pipeline.release(pipeline.barrier(smem + u32(V_FREE), slot))
                    items_done = u32(items_done + 1)
                    n = u32(n + count)

                b0, b1 = where[0] + part * i32(sizes[7]), where[1]
                rows = i32(o.shape[3])
                if PACKED:
                    b1, rows = i32(0), queries
                for r in range(2):
                    # (6) O = O / l, lse = m + log l; a row that saw nothing has O = 0, lse = -inf
                    l, i = softmax.row_sum(l_i[r]), row + 8 * r
                    if SEQUENCES and i >= queries:
                        l = ACC(0)
                    inverse = ACC(0) if l == ACC(0) else ptx.rcp(l)
                    if SEQUENCES:
                        inverse *= ACC(factor)
                    if i < rows:
                        o_row = o[index(b0), index(b1), index(where[2]), index(q0 + i)]
                        for j in range(ROW_WORDS):
                            x, y = acc[4 * j + 2 * r] * inverse, acc[4 * j + 2 * r + 1] * inverse
                            if SPLIT:
                                o_row[index(8 * j + mma.first_column())] = x
                                o_row[index(8 * j + mma.first_column() + 1)] = y
                            else:
                                o_row[index(4 * j + mma.first_column() // 2)] = pack2(x, y)
                        if WRITE_LSE and cuda.threadIdx.x % 4 == 0:
                            value = (m_i[r] * ACC(scales[1]) + ptx.lg2(l)) * ACC(LN2) if l != ACC(0) else ACC(NEG_INF) * ACC(factor)
                            lse[index(b0), index(b1), index(where[2]), index(q0 + i)] = value
                turn += 1
                at = schedule.snake(turn, cuda.gridDim.x)
            if PING_PONG and me == 0:
                pipeline.await_turn(0)  # the turn that nobody takes

    word = types.float32 if split else types.uint32
    operands = (types.uint64,) * 3 + (types.Array(word, 5, "A"), types.Array(types.float32, 4, "A"))
    extras, *_ = scores.kernel_arguments(options, ())
    signature = types.void(*operands, extras, types.UniTuple(types.int64, 8), types.UniTuple(types.float64, 2))
    return forward_sm90, signature, {"launch_bounds": (tile.threads, 1), "tensor_maps": ("q_map", "k_map", "v_map")}
