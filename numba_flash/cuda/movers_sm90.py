"""The threads that move data for `backward_sm90`: one describes work items, one has tiles fetched, one per consumer adds up dQ."""

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import pipeline, ptx, schedule, scores
from numba_flash.cuda.swizzle import DQ_PART

# what is written down about a work item; BASE is the number of its first head's first row block
B0, B1, KV_HEAD, ROW0, K0, KEYS, Q0, QUERIES, LOW, HIGH, IMPOSSIBLE, FIRST, COUNT, BASE = pipeline.one_type(range(14))
END = -1  # in the place of the count of query tiles: there is no more work


def build(head_dim, head_dim_v, banded, ordered, options, tile):
    """Three functions, each for one thread:

    ``describe(smem, dk, lse2, extras, sizes)``, ``produce(maps, smem, lse2, delta, group)`` and
    ``add_dq(smem, me, lse2, dq_sum, flags, group)``.
    Arguments are those of `numba_flash.cuda.backward_sm90.build` and of its kernel.
    """  # fmt: skip
    BLOCK_M, BLOCK_N, CONSUMERS, SMEM = tile.block_m, tile.block_n, tile.consumers, tile.layout(head_dim, head_dim_v)
    Q, K, V, DO, DQ, WORK = map(pipeline.one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do, SMEM.dq, SMEM.work))
    LSE, DELTA = SMEM.lse, SMEM.delta
    ROW_BYTES, DQ_BYTES, BANDED, ORDERED, PACKED = 4 * BLOCK_M, 4 * DQ_PART, banded, ordered, options.packed
    u32, i32, u64 = types.uint32, types.int32, types.uint64
    item_of = schedule.build_item(
        options, banded, False, BLOCK_N, BLOCK_M, scores.build_sequence(options), scores.slots(options).kv_lengths, True
    )
    fill_q = pipeline.build_fill(Q, head_dim, BLOCK_M, ROW_BYTES)
    fill_do = pipeline.build_fill(DO, head_dim_v, BLOCK_M, ROW_BYTES)
    fill_k, fill_v = pipeline.build_fill(K, head_dim, BLOCK_N), pipeline.build_fill(V, head_dim_v, BLOCK_N)

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
            for g in range(group):
                base = i32(pipeline.read(smem, WORK, turn, BASE) + g * blocks)
                for t in range(count):
                    at = i32(first + count - i32(1) - t)
                    mine = u64(u32(i32(base + at) * i32(CONSUMERS) + me))
                    flag, to, before = u64(flag_address + mine * u64(4)), u64(sum_address + mine * u64(DQ_BYTES)), i32(1)
                    if ORDERED and seen:
                        before = i32(block - max(at * BLOCK_M - high, 0) // BLOCK_N)
                        while ptx.load_flag(flag) != before:
                            pass
                    pipeline.wait_ready(smem, DQ, n)
                    if seen:
                        if before == 0:
                            ptx.bulk_store(to, pipeline.tile(smem, DQ, n), u32(DQ_BYTES))
                        else:
                            ptx.bulk_add(to, pipeline.tile(smem, DQ, n), u32(DQ_BYTES))
                        ptx.bulk_commit()
                    ptx.bulk_wait_read()
                    pipeline.leave(smem, DQ, n)
                    if ORDERED and seen:
                        ptx.bulk_wait()  # the sum is in memory
                        ptx.add_flag(flag, i32(1))
                    n = u32(n + CONSUMERS)
            pipeline.leave(smem, WORK, turn)
            turn = u32(turn + 1)
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.read(smem, WORK, turn, COUNT)
        ptx.bulk_wait()

    return describe, produce, add_dq
