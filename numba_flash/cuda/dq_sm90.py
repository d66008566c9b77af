"""dQ on Hopper from tiles of dS^T in memory: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, line 15, after `backward_wide_sm90`.

A block takes 128 queries after the other. One of its threads describes work items, one has tiles of dS^T and K fetched, and each of two
warp groups sums 64 of the rows, in the order of the keys. If dS^T was made for some of the keys only, what there is of the sum is kept
between one launch and the next.
"""

import math

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import mma, pipeline, ptx, schedule, scores, softmax, swizzle, tiles

# what is written down about a work item; NUMBER is that of its row block, FIRST the first block of keys; BEGINS if there is no sum yet,
# ENDS if it is complete then
B0, B1, HEAD, KV_HEAD, ROW0, Q0, QUERIES, K0, KEYS, IMPOSSIBLE, FIRST, COUNT, NUMBER, BEGINS, ENDS = pipeline.one_type(range(15))
END = -1  # in the place of the count of tiles: there is no more work
FIRST_BLOCK, BLOCKS = 8, 9


def build(dtype, head_dim, banded, to_map, options, tile):
    """Kernel ``dq_sm90(maps, dq, dq_sum, ds, lse2, extras, sizes, scales)``, its signature and compile options.

    maps : tensor maps of k as (b0, b1, kv_heads, nk, head_dim), boxes of one panel of a tile, and with `to_map` of dq.
    dq : (b0, b1, heads, nq, head_dim), as words of two elements.
    dq_sum : float32, what there is of the sum: per row block and consumer in the order of fragments.
    ds : dS^T, as `numba_flash.cuda.backward_wide_sm90` writes it.
    lse2 : float32 (b0, b1, heads, row blocks * BLOCK_M); its shape tells how row blocks are numbered.
    extras : lengths, see `numba_flash.cuda.scores`.
    sizes : items, low, high, nk, 1, kv_heads, section, b0 as in the forward kernel; the first of the blocks of keys that `ds` has, and how
        many it has room for.
    scales : scale.
    """  # fmt: skip
    BLOCK_M, BLOCK_N, CONSUMERS, SMEM = tile.block_m, tile.block_n, tile.consumers, tile.dq_layout(head_dim)
    (FEWEST, REGISTERS), STAGE, ALIGNMENT = tile.registers, SMEM.o, SMEM.ALIGNMENT
    TILES, WORK = map(pipeline.one_type, (SMEM.tiles, SMEM.work))
    PANEL_BYTES, OUTPUTS, ROWS = swizzle.panel_bytes(64), head_dim // 2, 64
    K_BYTES, DS_BYTES, SUM_BYTES = swizzle.panels(head_dim) * PANEL_BYTES, CONSUMERS * PANEL_BYTES, 4 * ROWS * head_dim
    TO_MAP, SEQUENCES, PACKED, BFLOAT16 = to_map, options.sequences, options.packed, dtype == "bfloat16"
    ACC, u32, i32, u64, index = types.float32, types.uint32, types.int32, types.uint64, tiles.index
    NAN, ON, OFF, NONE = math.nan, 1, 0, 0
    item_of = schedule.build_item(options, banded, False, BLOCK_M, BLOCK_N, scores.build_sequence(options), scores.slots(options).q_lengths)
    first_block = schedule.build_first_block(PACKED, BLOCK_M)
    fill_k, clear_k = pipeline.build_fill(TILES, head_dim, BLOCK_N, DS_BYTES), pipeline.build_clear_tail(head_dim, BLOCK_N)
    start_sum = mma.build_sum(head_dim, BLOCK_N // 16, 0, 0, BFLOAT16, True)
    zero, _ = softmax.build_zero(OUTPUTS)
    put_row = mma.build_put_row(head_dim, False, BFLOAT16)
    stage = mma.build_stage(head_dim, 2, BFLOAT16) if TO_MAP else None

    @cuda.jit(device=True, forceinline=True)
    def describe(smem, dq, lse2, extras, sizes):
        """Write down what this block's work items are, as far as there is room."""
        turn, taken, there = u32(0), u32(0), True
        while there:
            pipeline.wait_free(smem, WORK, turn)
            at = schedule.snake(taken, cuda.gridDim.x)
            taken = u32(taken + 1)
            there = at < sizes[0]
            if there:
                (b0, b1, h, row0), (q0, queries, k0, keys, _, _, impossible), (first, count, _) = item_of(at, dq.shape, extras, sizes)
                stop = i32(first + (count if keys > 0 else i32(0)))
                start, end = max(first, i32(sizes[FIRST_BLOCK])), min(stop, i32(sizes[FIRST_BLOCK] + sizes[BLOCKS]))
                number = i32(first_block(b0, b1, h, q0, lse2.shape) + row0 // BLOCK_M)
                if PACKED:
                    b1 = i32(0)
                if (start >= end and (stop > 0 or sizes[FIRST_BLOCK] > 0)) or (PACKED and number != at):
                    continue  # others' keys, or an impossible sequence
                kv_head = i32(u32(h) // u32(u32(dq.shape[2]) // u32(sizes[5])))
                begins, ends = i32(1 if start == first else 0), i32(1 if end == stop else 0)
                work = (b0, b1, h, kv_head, row0, q0, queries, k0, keys, impossible, start, i32(end - start), number, begins, ends)
                for word in range(len(work)):
                    pipeline.write(smem, WORK, turn, word, work[word])
            else:
                pipeline.write(smem, WORK, turn, COUNT, END)
            pipeline.publish(smem, WORK, turn)
            turn = u32(turn + 1)

    @cuda.jit(device=True, forceinline=True)
    def produce(maps, smem, ds, sizes):
        """Have the copy engine fetch tiles of K, and behind them those of dS^T."""
        turn, n = u32(0), u32(0)
        pipeline.wait_ready(smem, WORK, turn)
        count = pipeline.read(smem, WORK, turn, COUNT)
        while count != END:
            b0, b1 = pipeline.read(smem, WORK, turn, B0), pipeline.read(smem, WORK, turn, B1)
            kv_head, k0 = pipeline.read(smem, WORK, turn, KV_HEAD), pipeline.read(smem, WORK, turn, K0)
            first, number = pipeline.read(smem, WORK, turn, FIRST), pipeline.read(smem, WORK, turn, NUMBER)
            source = u64(u32(number) * u32(sizes[BLOCKS]) + u32(first - i32(sizes[FIRST_BLOCK])))
            for t in range(count):
                pipeline.wait_free(smem, TILES, n)
                fill_k(maps[0], smem, n, (k0 + (first + t) * BLOCK_N, kv_head, b1, b0))
                at, to = u64(source + u64(t)), u32(pipeline.tile(smem, TILES, n) + u32(K_BYTES))
                address = u64(ptx.global_address(ds) + at * u64(DS_BYTES))
                ptx.bulk_load(to, address, u32(DS_BYTES), pipeline.mbarrier(smem, TILES, pipeline.READY, n))
                n = u32(n + 1)
            pipeline.leave(smem, WORK, turn)
            turn = u32(turn + 1)
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.read(smem, WORK, turn, COUNT)

    @cuda.jit(device=True, forceinline=True)
    def begin(smem, turn, me, dq_sum, acc):
        """What there is of the sum; returns where it is kept."""
        at = u64(u32(pipeline.read(smem, WORK, turn, NUMBER) * CONSUMERS + me)) * u64(SUM_BYTES)
        address = u64(ptx.global_address(dq_sum) + at + u64(cuda.threadIdx.x % pipeline.WARP_GROUP * 16))
        zero(acc)
        if pipeline.read(smem, WORK, turn, BEGINS) == 0:
            for j in range(OUTPUTS // 4):
                x = ptx.load_global_four(u64(address + u64(2048 * j)))
                for i in range(4):
                    acc[4 * j + i] = x[i]
        return address

    @cuda.jit(device=True, forceinline=True)
    def finish(maps, smem, turn, me, dq, acc, address, scale):
        """Store dQ = scale dQ, or keep what there is of the sum."""
        factor = cuda.local.array(2, ACC)
        b0, b1, h = pipeline.read(smem, WORK, turn, B0), pipeline.read(smem, WORK, turn, B1), pipeline.read(smem, WORK, turn, HEAD)
        row0, rows = i32(pipeline.read(smem, WORK, turn, ROW0) + me * ROWS), i32(pipeline.read(smem, WORK, turn, QUERIES))
        q0, ends = pipeline.read(smem, WORK, turn, Q0), pipeline.read(smem, WORK, turn, ENDS)
        factor[0] = factor[1] = ACC(NAN) if SEQUENCES and pipeline.read(smem, WORK, turn, IMPOSSIBLE) != 0 else scale
        pipeline.leave(smem, WORK, turn)
        if ends == 0:
            for j in range(OUTPUTS // 4):
                ptx.store_global(u64(address + u64(2048 * j)), (acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]))
        elif TO_MAP:
            stage(maps[1], smem + u32(STAGE + me * 2 * PANEL_BYTES), acc, factor, me, CONSUMERS, (0, row0, h, b1, b0))
        else:
            for r in range(2):
                i = row0 + mma.first_row() + 8 * r
                if i < rows:
                    put_row(ptx.global_address(dq[index(b0), index(b1), index(h), index(q0 + i)]), acc, factor, r)

    @cuda.jit(device=True, forceinline=True)
    def consume(maps, smem, me, dq, dq_sum, scale):
        """(7) dQ = dQ + dS K for 64 rows of each work item and its tiles of keys."""
        acc, turn, n = cuda.local.array(OUTPUTS, ACC), u32(0), u32(0)
        while True:
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.uniform(pipeline.read(smem, WORK, turn, COUNT))
            if count == END:
                break
            address = begin(smem, turn, me, dq_sum, acc)
            for t in range(count):
                pipeline.wait_ready(smem, TILES, n)
                if SEQUENCES:
                    rest = pipeline.read(smem, WORK, turn, KEYS) - (pipeline.read(smem, WORK, turn, FIRST) + t) * BLOCK_N
                    clear_k(smem, TILES, n, rest, me, CONSUMERS)
                k_tile = pipeline.tile(smem, TILES, n)
                ds_mine = mma.descriptor(k_tile + u32(K_BYTES + me * PANEL_BYTES), u32(PANEL_BYTES))
                start_sum(acc, ds_mine, mma.descriptor(k_tile, u32(PANEL_BYTES)))
                ptx.wgmma_wait(acc, acc, NONE, OUTPUTS, NONE)
                pipeline.release(smem, TILES, n)
                n = u32(n + 1)
            finish(maps, smem, turn, me, dq, acc, address, scale)
            turn = u32(turn + 1)
        if TO_MAP and cuda.threadIdx.x % pipeline.WARP_GROUP == 0:
            ptx.bulk_wait_read()

    def dq_sm90(maps, dq, dq_sum, ds, lse2, extras, sizes, scales):
        smem = u32((ptx.shared_address(cuda.shared.array(0, types.uint8)) + u32(ALIGNMENT - 1)) & u32(-ALIGNMENT & 0xFFFFFFFF))
        group = pipeline.uniform(i32(cuda.threadIdx.x) // pipeline.WARP_GROUP)
        if cuda.threadIdx.x == 0:
            pipeline.initialise(smem, WORK, 1, CONSUMERS * pipeline.WARP_GROUP + 1)
            pipeline.initialise(smem, TILES, 1, CONSUMERS)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()  # everyone sees the barriers initialised

        if group == 0:
            ptx.setmaxnreg(FEWEST, OFF)
            if cuda.threadIdx.x == 0:
                describe(smem, dq, lse2, extras, sizes)
            elif cuda.threadIdx.x == 32:
                produce(maps, smem, ds, sizes)
        else:
            ptx.setmaxnreg(REGISTERS, ON)
            consume(maps, smem, group - 1, dq, dq_sum, scales[0])

    maps = [f"maps.{i}" for i in range(2 if TO_MAP else 1)]
    array = lambda kind, ndim: types.Array(kind, ndim, "A")
    extras, *_ = scores.kernel_arguments(options, ())
    numbers = types.UniTuple(types.int64, 10), types.UniTuple(types.float32, 1)
    operands = array(u32, 5), array(ACC, 5), array(ACC, 5), array(ACC, 4)
    signature = types.void(types.UniTuple(types.uint64, len(maps)), *operands, extras, *numbers)
    return dq_sm90, signature, {"launch_bounds": (tile.threads, 1), "tensor_maps": tuple(maps)}
