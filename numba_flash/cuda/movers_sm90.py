"""The threads that move data for `backward_sm90` and `backward_wide_sm90`: one describes work items, one has tiles fetched, and, for the
former, two add up dQ in turns.
"""

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import pipeline, ptx, schedule, scores
from numba_flash.cuda.swizzle import ADDERS, DQ_PART

# what is written down about a work item; BASE is the number of its first head's first row block
B0, B1, KV_HEAD, ROW0, K0, KEYS, Q0, QUERIES, LOW, HIGH, IMPOSSIBLE, FIRST, COUNT, BASE = pipeline.one_type(range(14))
FIRST_BLOCK, BLOCKS = 8, 9  # of keys, if not all: more sizes
END = -1  # in the place of the count of query tiles: there is no more work


def _build_send(ring, columns, rows, values):
    """``send(tensor_map, smem, n, where, address)``: have the n-th tile fetched, and a float32 for each of its rows from an address."""
    RING, VALUES, BYTES, u32 = ring, values, 4 * rows, types.uint32
    fill = pipeline.build_fill(ring, columns, rows, BYTES)

    @cuda.jit(device=True, forceinline=True)
    def send(tensor_map, smem, n, where, address):
        pipeline.wait_free(smem, RING, n)
        fill(tensor_map, smem, n, where)
        to = u32(smem + u32(VALUES) + n % u32(RING[pipeline.SLOTS]) * u32(BYTES))
        ptx.bulk_load(to, address, u32(BYTES), pipeline.mbarrier(smem, RING, pipeline.READY, n))

    return send


def build(head_dim, head_dim_v, banded, ordered, options, tile):
    """Three functions, each for one thread:

    ``describe(smem, dk, lse2, flags, extras, sizes)``, ``produce(maps, smem, lse2, delta, group)`` and
    ``add_dq(smem, me, lse2, dq_sum, flags, group)`` for each of the ADDERS.
    Arguments are those of `numba_flash.cuda.backward_sm90.build` and of its kernel.
    """  # fmt: skip
    BLOCK_M, BLOCK_N, CONSUMERS, SMEM = tile.block_m, tile.block_n, tile.consumers, tile.layout(head_dim, head_dim_v)
    WIDTH, WIDTH_V, IN_PARTS, DO_FIRST = tile.width(head_dim), tile.width(head_dim_v), not tile.adds_dq, not tile.adds_dq
    Q, K, V, DO, DQ, WORK = map(pipeline.one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do, SMEM.dq, SMEM.work))
    LSE, DELTA, FETCHED = SMEM.lse, SMEM.delta, pipeline.one_type(SMEM.fetched)
    ROW_BYTES, DQ_BYTES, BANDED, ORDERED, PACKED = 4 * BLOCK_M, 4 * DQ_PART * CONSUMERS, banded, ordered, options.packed
    u32, i32, u64 = types.uint32, types.int32, types.uint64
    item_of = schedule.build_item(
        options, banded, False, BLOCK_N, BLOCK_M, scores.build_sequence(options), scores.slots(options).kv_lengths, True
    )
    first_block = schedule.build_first_block(PACKED, BLOCK_M)
    send_q, send_do = _build_send(Q, WIDTH, BLOCK_M, LSE), _build_send(DO, WIDTH_V, BLOCK_M, DELTA)
    fill_k, fill_v = pipeline.build_fill(K, WIDTH, BLOCK_N), pipeline.build_fill(V, WIDTH_V, BLOCK_N)

    @cuda.jit(device=True, forceinline=True)
    def next_item(smem, turn, taken, flags):
        """Number of the next work item. If ORDERED, a block claims it: whom an item waits for has been claimed before, by a block at work,
        however few blocks the GPU has room for. It does so when it has asked for all tiles of the last one, lest others wait longer.
        """
        if ORDERED:
            if turn != u32(0):
                pipeline.wait_ready(smem, FETCHED, u32(turn - u32(1)))
            return ptx.next_number(u64(ptx.global_address(flags) + u64(4) * u64(flags.shape[0] - 1)))
        return schedule.snake(taken, cuda.gridDim.x) if BANDED else i32(taken * cuda.gridDim.x + cuda.blockIdx.x)

    @cuda.jit(device=True, forceinline=True)
    def describe(smem, dk, lse2, flags, extras, sizes):
        """Write down what this block's work items are, ahead of the others; if IN_PARTS those of some blocks of keys."""
        turn, taken, there = u32(0), u32(0), True
        while there:
            pipeline.wait_free(smem, WORK, turn)
            at = next_item(smem, turn, taken, flags)
            taken = u32(taken + 1)
            there = at < sizes[0]
            if there:
                (b0, b1, h, row0), (k0, keys, q0, queries, low, high, impossible), (first, count, _) = item_of(at, dk.shape, extras, sizes)
                if IN_PARTS and not sizes[FIRST_BLOCK] <= row0 // BLOCK_N < sizes[FIRST_BLOCK] + sizes[BLOCKS]:
                    continue
                if PACKED and row0 >= keys:
                    continue  # nothing to store; an impossible sequence has no rows of its own
                base = first_block(b0, b1, h * i32(sizes[5]), q0, lse2.shape)
                if PACKED:
                    b1 = i32(0)
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
                    offset, where = u64(u32(i32(base + at))) * u64(ROW_BYTES), (row, head, b1, b0)
                    if not DO_FIRST:
                        send_q(maps[1], smem, n, where, u64(lse2_address + offset))
                    if g == 0 and t == 0:
                        pipeline.wait_free(smem, V, turn)
                        fill_v(maps[3], smem, turn, (key, kv_head, b1, b0))
                    send_do(maps[0], smem, n, where, u64(delta_address + offset))
                    if DO_FIRST:
                        send_q(maps[1], smem, n, where, u64(lse2_address + offset))
                    n = u32(n + 1)
            if ORDERED:
                pipeline.publish(smem, FETCHED, turn)
            pipeline.leave(smem, WORK, turn)
            turn = u32(turn + 1)
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.read(smem, WORK, turn, COUNT)

    @cuda.jit(device=True, forceinline=True)
    def blocks_before(row0, high, at):
        """How many blocks of keys before that from key row0 on add to the at-th row block: those from the first that it sees on."""
        return i32(row0 // BLOCK_N - max(at * BLOCK_M - high, 0) // BLOCK_N)

    @cuda.jit(device=True, forceinline=True)
    def add_tile(smem, turn, n, at, number, sum_address, flag_address):
        """Add the n-th tile of dQ to that of the row block `number`, the at-th of its head; if ORDERED after the blocks of keys before."""
        flag, to, before = u64(flag_address + number * u64(4)), u64(sum_address + number * u64(DQ_BYTES)), i32(1)
        seen = pipeline.read(smem, WORK, turn, QUERIES) != 0
        if ORDERED and seen:
            before = blocks_before(pipeline.read(smem, WORK, turn, ROW0), pipeline.read(smem, WORK, turn, HIGH), at)
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
            ptx.bulk_wait()
            ptx.add_flag(flag, i32(1))  # whoever sees it finds the sum in memory

    @cuda.jit(device=True, forceinline=True)
    def add_dq(smem, me, lse2, dq_sum, flags, group):
        """(7) dQ_i = dQ_i + dS_ij K_j: add to the sums in memory what the consumers have left of tiles me, me + ADDERS, ..."""
        turn, n, blocks = u32(0), u32(0), i32(lse2.shape[3] // BLOCK_M)
        pipeline.wait_ready(smem, WORK, turn)
        count = pipeline.read(smem, WORK, turn, COUNT)
        while count != END:
            first = pipeline.read(smem, WORK, turn, FIRST)
            for g in range(group):
                base = i32(pipeline.read(smem, WORK, turn, BASE) + g * blocks)
                for t in range(count):
                    if n % u32(ADDERS) == u32(me):
                        at = i32(first + count - i32(1) - t)
                        add_tile(smem, turn, n, at, u64(u32(i32(base + at))), ptx.global_address(dq_sum), ptx.global_address(flags))
                    n = u32(n + u32(1))
            pipeline.leave(smem, WORK, turn)
            turn = u32(turn + 1)
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.read(smem, WORK, turn, COUNT)
        ptx.bulk_wait()

    return describe, produce, add_dq


def build_kernel(head_dim, head_dim_v, banded, to_map, ordered, options, tile, consume):
    """Kernel, signature and options of `numba_flash.cuda.backward_sm90.build`: the first warp group moves data, every other one does

    ``consume(maps, smem, me, (dk, dv, lse2, dq_sum), sizes, scales)``.
    """
    SMEM, CONSUMERS, (FEWEST, REGISTERS), TO_MAP = tile.layout(head_dim, head_dim_v), tile.consumers, tile.registers, to_map
    Q, K, V, DO, DQ, WORK = map(pipeline.one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do, SMEM.dq, SMEM.work))
    FETCHED, ADDS_DQ, NUMBERS = pipeline.one_type(SMEM.fetched), tile.adds_dq, 8 if tile.adds_dq else 10
    ALIGNMENT, ON, OFF, ACC, u32, i32 = SMEM.ALIGNMENT, 1, 0, types.float32, types.uint32, types.int32
    describe, produce, add_dq = build(head_dim, head_dim_v, banded, ordered, options, tile)

    def backward_sm90(maps, dk, dv, lse2, delta, dq_sum, flags, extras, sizes, scales):
        smem = u32((ptx.shared_address(cuda.shared.array(0, types.uint8)) + u32(ALIGNMENT - 1)) & u32(-ALIGNMENT & 0xFFFFFFFF))
        group = pipeline.uniform(i32(cuda.threadIdx.x) // pipeline.WARP_GROUP)
        if cuda.threadIdx.x == 0:
            pipeline.initialise(smem, WORK, 1, CONSUMERS * pipeline.WARP_GROUP + ADDERS * ADDS_DQ + 1)
            for ring in (Q, DO, K, V):
                pipeline.initialise(smem, ring, 1, CONSUMERS)
            pipeline.initialise(smem, DQ, CONSUMERS * pipeline.WARP_GROUP, 1)
            pipeline.initialise(smem, FETCHED, 1, 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()  # everyone sees the barriers initialised

        if group == 0:
            ptx.setmaxnreg(FEWEST, OFF)
            warp = cuda.threadIdx.x // 32
            if cuda.threadIdx.x % 32 == 0:
                if warp == ADDERS + 1:
                    describe(smem, dk, lse2, flags, extras, sizes)
                elif warp == ADDERS:
                    produce(maps, smem, lse2, delta, i32(sizes[5]))
                elif ADDS_DQ:
                    add_dq(smem, i32(warp), lse2, dq_sum, flags, i32(sizes[5]))
        else:
            ptx.setmaxnreg(REGISTERS, ON)
            consume(maps, smem, group - 1, (dk, dv, lse2, dq_sum), sizes, scales)

    maps = [f"maps.{i}" for i in range(6 if TO_MAP else 4)]
    array = lambda kind, ndim: types.Array(kind, ndim, "A")
    operands = array(u32, 5), array(u32, 5), array(ACC, 4), array(ACC, 4), array(ACC, 5), array(types.int32, 1)
    extras, *_ = scores.kernel_arguments(options, ())
    numbers = types.UniTuple(types.int64, NUMBERS), types.UniTuple(types.float32, 3)
    signature = types.void(types.UniTuple(types.uint64, len(maps)), *operands, extras, *numbers)
    return backward_sm90, signature, {"launch_bounds": (tile.threads, 1), "tensor_maps": tuple(maps)}
