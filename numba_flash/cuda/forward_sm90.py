"""Forward pass on Hopper: FlashAttention-3 (Shah et al., arXiv:2407.08608), Algorithm 1, in persistent blocks.

One thread of the first warp group, the producer, lets the copy engine fill rings of Q, K and V tiles; every other warp group, a consumer,
owns 64 rows of a block of queries. A consumer starts the scores of the next tile before the product P V of the current one, so that its
softmax runs while the tensor cores do. The next tile may belong to the next block of queries: O is finished and stored while the tensor
cores already work on what follows. With `ping_pong` the consumers also take turns at starting products, which keeps their softmaxes apart.
"""

import math

from numba import cuda
from numba.cuda import types

from numba_flash import mask
from numba_flash.cuda import mma, pipeline, ptx, schedule, scores, softmax, swizzle, tiles

# what the producer writes about a work item
B0, B1, HEAD, KV_HEAD, ROW0, Q0, QUERIES, K0, KEYS, LOW, HIGH, IMPOSSIBLE, FIRST, COUNT, PART = pipeline.one_type(range(15))
END = -1  # in the place of the count of key tiles: there is no more work


def build(dtype, head_dim, head_dim_v, write_lse, band, store, options, tile):
    """Kernel ``forward_sm90(maps, o, lse, extras, sizes, scales)`` with its signature and compile options.

    band : "none" if every query sees every key, "above" if only keys above a diagonal are hidden, "both" if some below one are, too.
    maps : tensor maps of q, k and v as (b0, b1, heads, n, head_dim), with boxes of one panel of a tile, and with `store` "map" one of o.
    o : (b0, b1, heads, n, head_dim_v) as words of two elements, or with `store` "parts" as float32, b0 repeated for each part of the keys.
    lse : (b0, b1, heads, n), natural logarithm.
    extras : lengths, see `numba_flash.cuda.scores`.
    sizes : items, low, high, nk, parts, kv_heads, section (see `numba_flash.cuda.schedule`), b0.
    scales : slope, scale_log2. Scores are in base 2 after multiplication by scale_log2; with softcap, slope leads to the tanh before that.
    """
    BLOCK_M, BLOCK_N, CONSUMERS, PING_PONG = tile.block_m, tile.block_n, tile.consumers, tile.ping_pong
    SMEM, (FEWEST, REGISTERS) = tile.layout(head_dim, head_dim_v), tile.registers
    Q, K, V, WORK = map(pipeline.one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.work))
    O_STAGE, O_BYTES = SMEM.o, SMEM.o_panels * swizzle.panel_bytes(64)
    ALIGNMENT, V_PANEL, ROWS = SMEM.ALIGNMENT, swizzle.panel_bytes(BLOCK_N), 64
    SCORES, PAIRS, OUTPUTS = BLOCK_N // 2, BLOCK_N // 4, head_dim_v // 2
    WRITE_LSE, BANDED, CAPPED, TO_MAP, PARTS = write_lse, band != "none", bool(options.softcap), store == "map", store == "parts"
    SEQUENCES, PACKED, BFLOAT16 = options.sequences, options.packed, dtype == "bfloat16"
    ACC, u32, i32, index = types.float32, types.uint32, types.int32, tiles.index
    NEG_INF, NAN, LN2, ON, OFF = -math.inf, math.nan, math.log(2.0), 1, 0
    item_of = schedule.build_item(options, BANDED, PARTS, BLOCK_M, BLOCK_N, scores.build_sequence(options), scores.slots(options).q_lengths)
    fill_q = pipeline.build_fill(Q, head_dim, BLOCK_M)
    fill_k = pipeline.build_fill(K, head_dim, BLOCK_N)
    fill_v = pipeline.build_fill(V, head_dim_v, BLOCK_N)
    clear_tail = pipeline.build_clear_tail(head_dim_v, BLOCK_N)
    zero, zero_rows = softmax.build_zero(OUTPUTS)
    start_scores = mma.build_scores(BLOCK_N, head_dim, BLOCK_M, BFLOAT16)
    start_values = mma.build_values(BLOCK_N, head_dim_v, BFLOAT16)
    wait_scores, wait_all = mma.build_wait(BLOCK_N, head_dim_v)
    pack, _ = mma.build_pack(PAIRS, BFLOAT16)
    put_row = mma.build_put_row(head_dim_v, PARTS, BFLOAT16)
    stage = mma.build_stage(head_dim_v, SMEM.o_panels, BFLOAT16) if TO_MAP else None
    online, rescale = softmax.build_online(SCORES), softmax.build_rescale(OUTPUTS)
    cap, hide_row = softmax.build_cap(SCORES), softmax.build_hide(SCORES, band == "both")

    @cuda.jit(device=True, forceinline=True)
    def describe(smem, turn, o, extras, sizes):
        """Write down what this block's next work item is."""
        pipeline.wait_free(smem, WORK, turn)
        at = schedule.snake(turn, cuda.gridDim.x)
        if at < sizes[0]:
            (b0, b1, h, row0), (q0, queries, k0, keys, low, high, impossible), (first, count, part) = item_of(at, o.shape, extras, sizes)
            kv_head = i32(u32(h) // u32(u32(o.shape[2]) // u32(sizes[5])))
            if PACKED:
                b1 = i32(0)
            work = (b0, b1, h, kv_head, row0, q0, queries, k0, keys, low, high, impossible, first, count, part)
            for word in range(len(work)):
                pipeline.write(smem, WORK, turn, word, work[word])
        else:
            pipeline.write(smem, WORK, turn, COUNT, END)
        pipeline.publish(smem, WORK, turn)

    @cuda.jit(device=True, forceinline=True)
    def produce(maps, smem, o, extras, sizes):
        """Have the copy engine fetch what each work item needs, K one tile ahead of V, and describe the next item in the meantime."""
        turn, n = u32(0), u32(0)
        describe(smem, turn, o, extras, sizes)
        count = pipeline.read(smem, WORK, turn, COUNT)
        while count != END:
            b0, b1 = pipeline.read(smem, WORK, turn, B0), pipeline.read(smem, WORK, turn, B1)
            kv_head = pipeline.read(smem, WORK, turn, KV_HEAD)
            row = pipeline.read(smem, WORK, turn, Q0) + pipeline.read(smem, WORK, turn, ROW0)
            key = i32(pipeline.read(smem, WORK, turn, K0) + (pipeline.read(smem, WORK, turn, FIRST) + count - 1) * BLOCK_N)
            for t in range(count + 1):
                if t < count:
                    pipeline.wait_free(smem, K, u32(n + t))
                    fill_k(maps[1], smem, u32(n + t), (key - t * BLOCK_N, kv_head, b1, b0))
                if t == 0:
                    pipeline.wait_free(smem, Q, turn)
                    fill_q(maps[0], smem, turn, (row, pipeline.read(smem, WORK, turn, HEAD), b1, b0))
                else:
                    pipeline.wait_free(smem, V, u32(n + t - 1))
                    fill_v(maps[2], smem, u32(n + t - 1), (key - (t - 1) * BLOCK_N, kv_head, b1, b0))
                if t == 1:
                    describe(smem, u32(turn + 1), o, extras, sizes)
            n, turn = u32(n + count), u32(turn + 1)
            count = pipeline.read(smem, WORK, turn, COUNT)

    @cuda.jit(device=True, forceinline=True)
    def hide(s, row, col0, keys, band):
        """Scores that the mask hides become -inf; most tiles have none."""
        first = row - row % ROWS  # of the warp group's rows
        if col0 + BLOCK_N > keys or not mask.all_visible(first, first + ROWS, col0, col0 + BLOCK_N, band[0], band[1]):
            column = i32(col0 + mma.first_column())
            for r in range(2):
                start, stop = mask.kv_range(row + 8 * r, row + 8 * r + 1, keys, band[0], band[1])
                hide_row(s, r, i32(start - column), i32(stop - column))

    @cuda.jit(device=True, forceinline=True)
    def soften(s, m_i, l_i, alpha, row, col, keys, band, scales):
        """Softcap and mask, then (2) m_i, (3) P, (4) l_i, of a work item's first tile."""
        if CAPPED:
            cap(s, scales[0])
        hide(s, row, col, keys, band)
        online(s, m_i, l_i, alpha, scales[1])

    @cuda.jit(device=True, forceinline=True)
    def enter(smem, me, turn):
        """(tiles, row, column, keys, low, high, descriptor of Q) of a work item: the thread's first row, the last tile's first column."""
        pipeline.wait_ready(smem, WORK, turn)
        count = pipeline.uniform(pipeline.read(smem, WORK, turn, COUNT))
        row = i32(pipeline.read(smem, WORK, turn, ROW0) + me * ROWS + mma.first_row())
        col = i32((pipeline.read(smem, WORK, turn, FIRST) + count - 1) * BLOCK_N)
        low, high = pipeline.read(smem, WORK, turn, LOW), pipeline.read(smem, WORK, turn, HIGH)
        q_tile = mma.descriptor(pipeline.tile(smem, Q, turn) + u32(me * ROWS * swizzle.ROW_BYTES), u32(0))
        if count != END:
            pipeline.wait_ready(smem, Q, turn)
        return count, row, col, pipeline.read(smem, WORK, turn, KEYS), low, high, q_tile

    @cuda.jit(device=True, forceinline=True)
    def exchange(s, p, acc, smem, me, n, q_tile):
        """Start (1) S = Q K^T of tile n and (5) O += P V of the one before, both in flight; wait for S alone."""
        pipeline.wait_ready(smem, K, n)
        if PING_PONG:
            pipeline.await_turn(me)
        start_scores(s, q_tile, mma.descriptor(pipeline.tile(smem, K, n), u32(0)))
        pipeline.wait_ready(smem, V, u32(n - 1))
        start_values(acc, p, mma.descriptor(pipeline.tile(smem, V, u32(n - 1)), u32(V_PANEL)))
        if PING_PONG:
            pipeline.pass_turn((me + 1) % CONSUMERS)
        wait_scores(s)
        pipeline.release(smem, K, n)

    @cuda.jit(device=True, forceinline=True)
    def finish(maps, smem, turn, me, acc, m_i, l_i, o, lse, numbers):
        """(6) O = O / l, lse = m + log l of a work item, stored; a row that saw nothing has O = 0, lse = -inf."""
        inverse = cuda.local.array(2, ACC)
        b0, b1, h = pipeline.read(smem, WORK, turn, B0), pipeline.read(smem, WORK, turn, B1), pipeline.read(smem, WORK, turn, HEAD)
        row0 = i32(pipeline.read(smem, WORK, turn, ROW0) + me * ROWS)
        q0, queries, rows = i32(0), i32(o.shape[3]), i32(o.shape[3])
        if SEQUENCES:
            q0, queries = pipeline.read(smem, WORK, turn, Q0), pipeline.read(smem, WORK, turn, QUERIES)
        if PARTS:
            b0 = i32(b0 + pipeline.read(smem, WORK, turn, PART) * numbers[1])
        if PACKED:
            rows = queries
        for r in range(2):
            l, i = softmax.row_sum(l_i[r]), row0 + mma.first_row() + 8 * r
            if SEQUENCES and i >= queries:
                l = ACC(0)
            inverse[r] = ACC(0) if l == ACC(0) else ptx.rcp(l)
            value = (m_i[r] * numbers[0] + ptx.lg2(l)) * ACC(LN2) if l != ACC(0) else ACC(NEG_INF)
            if SEQUENCES and pipeline.read(smem, WORK, turn, IMPOSSIBLE) != 0:
                inverse[r], value = ACC(NAN), ACC(NAN)
            if WRITE_LSE and i < rows and cuda.threadIdx.x % 4 == 0:
                lse[index(b0), index(b1), index(h), index(q0 + i)] = value
        if cuda.any_sync(pipeline.ALL_LANES, inverse[0] == ACC(0) or inverse[1] == ACC(0)):
            zero_rows(acc, inverse)  # 0 * NaN is not 0
        pipeline.leave(smem, WORK, turn)
        if TO_MAP:
            stage(maps[3], smem + u32(O_STAGE + me * O_BYTES), acc, inverse, me, CONSUMERS, (0, row0, h, b1, b0))
        else:
            for r in range(2):
                i = row0 + mma.first_row() + 8 * r
                if i < rows:
                    put_row(ptx.global_address(o[index(b0), index(b1), index(h), index(q0 + i)]), acc, inverse, r)

    @cuda.jit(device=True, forceinline=True)
    def consume(maps, smem, me, o, lse, parts_of, scales):
        """Equations (1) to (6) for 64 rows of each work item and all its tiles of keys, the last tile first."""
        s, p, acc = cuda.local.array(SCORES, ACC), cuda.local.array(PAIRS, u32), cuda.local.array(OUTPUTS, ACC)
        m_i, l_i, alpha = cuda.local.array(2, ACC), cuda.local.array(2, ACC), cuda.local.array(2, ACC)
        m_done, l_done = cuda.local.array(2, ACC), cuda.local.array(2, ACC)
        turn, n = u32(0), u32(0)
        count, row, col, keys, low, high, q_tile = enter(smem, me, turn)
        zero(acc)
        softmax.reset(m_i, l_i)
        # (1) S = Q K^T of the first tile of all
        pipeline.wait_ready(smem, K, n)
        start_scores(s, q_tile, mma.descriptor(pipeline.tile(smem, K, n), u32(0)))
        wait_all(acc, s)
        pipeline.release(smem, K, n)
        soften(s, m_i, l_i, alpha, row, col, keys, (low, high), scales)
        pack(p, s)
        while True:
            if SEQUENCES:
                clear_tail(smem, V, n, keys - col, me, CONSUMERS)
            for t in range(1, count):
                n, col = u32(n + 1), i32(col - BLOCK_N)
                exchange(s, p, acc, smem, me, n, q_tile)
                if t == count - 1:
                    pipeline.release(smem, Q, turn)
                # softcap and mask, then (2) m_i, (3) P, (4) l_i, while O += P V runs
                if CAPPED:
                    cap(s, scales[0])
                if BANDED:
                    hide(s, row, col, keys, (low, high))
                online(s, m_i, l_i, alpha, scales[1])
                wait_all(acc, s)
                pipeline.release(smem, V, u32(n - 1))
                # O = alpha O
                rescale(acc, alpha)
                pack(p, s)
            # the next tile is the first of the next work item
            if count == 1:
                pipeline.release(smem, Q, turn)
            turn, n = u32(turn + 1), u32(n + 1)
            count, row, col, keys, low, high, q_tile = enter(smem, me, turn)
            if count == END:
                break
            exchange(s, p, acc, smem, me, n, q_tile)
            softmax.hand_over(m_i, l_i, m_done, l_done)
            soften(s, m_i, l_i, alpha, row, col, keys, (low, high), scales)
            wait_all(acc, s)
            pipeline.release(smem, V, u32(n - 1))
            finish(maps, smem, u32(turn - 1), me, acc, m_done, l_done, o, lse, (scales[1], parts_of))
            zero(acc)
            pack(p, s)
        # (5) O += P V of the last tile of all
        pipeline.wait_ready(smem, V, u32(n - 1))
        start_values(acc, p, mma.descriptor(pipeline.tile(smem, V, u32(n - 1)), u32(V_PANEL)))
        wait_all(acc, s)
        finish(maps, smem, u32(turn - 1), me, acc, m_i, l_i, o, lse, (scales[1], parts_of))

    def forward_sm90(maps, o, lse, extras, sizes, scales):
        smem = u32((ptx.shared_address(cuda.shared.array(0, types.uint8)) + u32(ALIGNMENT - 1)) & u32(-ALIGNMENT & 0xFFFFFFFF))
        group = pipeline.uniform(i32(cuda.threadIdx.x) // pipeline.WARP_GROUP)
        if cuda.threadIdx.x == 0:
            pipeline.initialise(smem, WORK, 1, CONSUMERS * pipeline.WARP_GROUP)
            pipeline.initialise(smem, Q, 1, CONSUMERS)
            pipeline.initialise(smem, K, 1, CONSUMERS)
            pipeline.initialise(smem, V, 1, CONSUMERS)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()  # everyone sees the barriers initialised

        if group == 0:
            ptx.setmaxnreg(FEWEST, OFF)
            if cuda.threadIdx.x == 0:
                produce(maps, smem, o, extras, sizes)
        else:
            ptx.setmaxnreg(REGISTERS, ON)
            me = group - 1
            if PING_PONG and me == CONSUMERS - 1:
                pipeline.pass_turn(0)
            consume(maps, smem, me, o, lse, i32(sizes[7]), scales)
            if PING_PONG and me == 0:
                pipeline.await_turn(0)  # the turn that nobody takes
            if TO_MAP and cuda.threadIdx.x % pipeline.WARP_GROUP == 0:
                ptx.bulk_wait_read()  # shared memory may go: all of O has been read from there

    maps = [f"maps.{i}" for i in range(4 if TO_MAP else 3)]
    operands = types.Array(types.float32 if PARTS else u32, 5, "A"), types.Array(types.float32, 4, "A")
    extras, *_ = scores.kernel_arguments(options, ())
    numbers = types.UniTuple(types.int64, 8), types.UniTuple(types.float32, 2)
    signature = types.void(types.UniTuple(types.uint64, len(maps)), *operands, extras, *numbers)
    return forward_sm90, signature, {"launch_bounds": (tile.threads, 1), "tensor_maps": tuple(maps)}
