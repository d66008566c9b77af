"""dQ on Hopper from tiles of dS^T in memory: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2,
line 15, after `numba_flash.cuda.sm90.backward.backward_wide` or `backward`.

A block takes 128 queries after the other. One of its threads writes down work items, one has tiles
of dS^T and K fetched, and each of two warp groups sums 64 of the rows, in the order of the keys. If
dS^T was made for some of the keys only, what there is of the sum is kept between one launch and the
next.
"""

import math

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, named, u32, u64
from numba_flash.cuda.score import softmax
from numba_flash.cuda.score.swizzle import panel_bytes
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import END, DqWork, Scales, Sizes, one_type, words
from numba_flash.cuda.sm90.config import DqConfig
from numba_flash.cuda.sm90.dq import dq_block_sparse
from numba_flash.cuda.sm90.hopper_kernel import Arrivals, Producer, Roles, hopper_kernel
from numba_flash.cuda.sm90.pipeline import TilePlace
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.work import schedule

ROWS = 64  # of a consumer
WORD = words(DqWork)
LISTS = ("tiles", "places", "ranks")  # what it wants of a mask


def build_write_work(banded, options, tile, layout):
    """``write_work(smem, dq, lse2, extras, sizes)``: write down what this block's work items are,
    as far as there is room.

    Arguments are those of `build` and of its kernel.
    """
    BLOCK_M, PACKED, WORK = tile.block_m, options.packed, one_type(layout.work)
    item_of = schedule.build_item(options, banded, False, BLOCK_M, tile.block_n)
    first_block = schedule.build_first_block(PACKED, BLOCK_M)

    @inline
    def write_work(smem, dq, lse2, extras, sizes):
        item_n, taken, there = u32(0), u32(0), True
        while there:
            pipeline.wait_free(smem, WORK, item_n)
            at = schedule.zigzag(taken, cuda.gridDim.x)
            taken = u32(taken + 1)
            there = at < sizes.items
            if there:
                item = item_of(at, dq.shape, extras, sizes)
                stop = i32(item.first + (item.count if item.columns > 0 else i32(0)))
                start = max(item.first, i32(sizes.first_block))
                end = min(stop, i32(sizes.first_block + sizes.blocks))
                base = first_block(item.b0, item.b1, item.head, item.rows_begin, lse2.shape)
                number = i32(base + item.row0 // BLOCK_M)
                if start >= end and (stop > 0 or sizes.first_block > 0):
                    continue  # others' keys
                if PACKED and number != at:
                    continue  # an impossible sequence
                kv_head = i32(u32(item.head) // u32(sizes.group))
                work = DqWork(
                    b0=item.b0,
                    b1=i32(0) if PACKED else item.b1,
                    head=item.head,
                    kv_head=kv_head,
                    row0=item.row0,
                    q0=item.rows_begin,
                    queries=item.rows,
                    k0=item.columns_begin,
                    keys=item.columns,
                    invalid=item.invalid,
                    first=start,
                    count=i32(end - start),
                    number=number,
                    begins=i32(1 if start == item.first else 0),
                    ends=i32(1 if end == stop else 0),
                )
                for word in range(len(work)):
                    pipeline.write(smem, WORK, item_n, word, work[word])
            else:
                pipeline.write(smem, WORK, item_n, WORD.count, END)
            pipeline.commit(smem, WORK, item_n)
            item_n = u32(item_n + 1)

    return write_work


def build_produce(head_dim, tile, layout):
    """``produce(maps, smem, ds, extras, sizes)``: have the copy engine fetch tiles of K, and behind
    them those of dS^T.
    """
    BLOCK_N, DS_BYTES = tile.block_n, tile.ds_bytes
    TILES, WORK = map(one_type, (layout.tiles, layout.work))
    K_BYTES = layout.tiles.slot_bytes - tile.ds_bytes
    load_k = pipeline.build_load(TILES, head_dim, BLOCK_N, DS_BYTES)

    @inline
    def produce(maps, smem, ds, extras, sizes):
        item_n, n = u32(0), u32(0)
        pipeline.wait_ready(smem, WORK, item_n)
        count = pipeline.read(smem, WORK, item_n, WORD.count)
        while count != END:
            b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
            b1 = pipeline.read(smem, WORK, item_n, WORD.b1)
            kv_head = pipeline.read(smem, WORK, item_n, WORD.kv_head)
            k0 = pipeline.read(smem, WORK, item_n, WORD.k0)
            first = pipeline.read(smem, WORK, item_n, WORD.first)
            number = pipeline.read(smem, WORK, item_n, WORD.number)
            block = u32(first - i32(sizes.first_block))
            source = u64(u32(number) * u32(sizes.blocks) + block)
            for t in range(count):
                pipeline.wait_free(smem, TILES, n)
                load_k(maps[0], smem, n, TilePlace(0, k0 + (first + t) * BLOCK_N, kv_head, b1, b0))
                at, to = u64(source + u64(t)), u32(pipeline.tile(smem, TILES, n) + u32(K_BYTES))
                address = u64(ptx.global_address(ds) + at * u64(DS_BYTES))
                ready = pipeline.mbarrier(smem, TILES, TILES.ready, n)
                ptx.bulk_load(to, address, u32(DS_BYTES), ready)
                n = u32(n + 1)
            pipeline.release(smem, WORK, item_n)
            item_n = u32(item_n + 1)
            pipeline.wait_ready(smem, WORK, item_n)
            count = pipeline.read(smem, WORK, item_n, WORD.count)

    return produce


def build(config: DqConfig):
    """Kernel of (maps, dq, dq_sum, ds, lse2, extras, sizes, scales) with its signature and compile
    options.

    maps : tensor maps of k as (b0, b1, kv_heads, nk, head_dim), boxes of one panel of a tile, and
        with ``config.to_map`` of dq.
    dq : (b0, b1, heads, nq, head_dim), as words of two elements.
    dq_sum : float32, what there is of the sum: per row block and consumer in the order of
        fragments.
    ds : dS^T, as `numba_flash.cuda.sm90.backward.backward_wide` writes it, or, with
    ``options.block_sparse``,
        `numba_flash.cuda.sm90.dq.dq_sink`.
    lse2 : float32 (b0, b1, heads, row blocks * BLOCK_M); its shape tells how row blocks are
        numbered.
    extras : lengths, and with ``options.block_sparse`` lists, see `numba_flash.cuda.arguments`.
    sizes : `Sizes` of `numba_flash.cuda.sm90.arguments`.
    """
    dtype, head_dim, options, tile = config.dtype, config.d, config.options, config.tile
    banded, to_map = config.banded, config.to_map
    BLOCK_N, CONSUMERS = tile.block_n, tile.consumers
    SMEM = tile.layout(head_dim)
    TILES, WORK = map(one_type, (SMEM.tiles, SMEM.work))
    STAGE, OUTPUTS = SMEM.o, head_dim // 2
    PANEL_BYTES, STAGE_BYTES = panel_bytes(BLOCK_N), panel_bytes(ROWS)
    K_BYTES = SMEM.tiles.slot_bytes - tile.ds_bytes
    SUM_BYTES = 4 * ROWS * head_dim
    TO_MAP, BFLOAT16 = to_map, dtype == "bfloat16"
    SEQUENCES = options.sequences
    NAN, NONE = math.nan, 0
    if options.block_sparse:
        write_work = dq_block_sparse.build_write_work(banded, options, tile, SMEM)
        produce = dq_block_sparse.build_produce(head_dim, tile, SMEM)
    else:
        write_work = build_write_work(banded, options, tile, SMEM)
        produce = build_produce(head_dim, tile, SMEM)
    clear_k = pipeline.build_clear_tail(head_dim, BLOCK_N)
    start_sum = wgmma.build_sum(head_dim, BLOCK_N // 16, 0, 0, BFLOAT16, True)
    zero, _ = softmax.build_zero(OUTPUTS)
    put_row = store.build_put_row(head_dim, False, BFLOAT16)
    stage = store.build_stage(head_dim, 2, BFLOAT16) if TO_MAP else None

    @inline
    def begin_item(smem, item_n, me, dq_sum, acc):
        """What there is of the sum; returns where it is kept."""
        at = u64(u32(pipeline.read(smem, WORK, item_n, WORD.number) * CONSUMERS + me)) * u64(
            SUM_BYTES
        )
        address = u64(ptx.global_address(dq_sum) + at + u64(cuda.threadIdx.x % WARP_GROUP * 16))
        zero(acc)
        if pipeline.read(smem, WORK, item_n, WORD.begins) == 0:
            for j in range(OUTPUTS // 4):
                x = ptx.load_global_four(u64(address + u64(2048 * j)))
                for i in range(4):
                    acc[4 * j + i] = x[i]
        return address

    @inline
    def finish(maps, smem, item_n, me, dq, acc, address, scale):
        """Store dQ = scale dQ, or keep what there is of the sum."""
        factor = cuda.local.array(2, f32)  # registers: what dQ is multiplied by
        b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
        b1 = pipeline.read(smem, WORK, item_n, WORD.b1)
        h = pipeline.read(smem, WORK, item_n, WORD.head)
        row0 = i32(pipeline.read(smem, WORK, item_n, WORD.row0) + me * ROWS)
        rows = i32(pipeline.read(smem, WORK, item_n, WORD.queries))
        q0 = pipeline.read(smem, WORK, item_n, WORD.q0)
        ends = pipeline.read(smem, WORK, item_n, WORD.ends)
        invalid = SEQUENCES and pipeline.read(smem, WORK, item_n, WORD.invalid) != 0
        factor[0] = factor[1] = f32(NAN) if invalid else scale
        pipeline.release(smem, WORK, item_n)
        if ends == 0:
            for j in range(OUTPUTS // 4):
                four = acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]
                ptx.store_global(u64(address + u64(2048 * j)), four)
        elif TO_MAP:
            room = smem + u32(STAGE + me * 2 * STAGE_BYTES)
            stage(maps[1], room, acc, factor, me, TilePlace(0, row0, h, b1, b0))
        else:
            for r in range(2):
                i = row0 + wgmma.first_row() + 8 * r
                if i < rows:
                    dq_row = dq[index(b0), index(b1), index(h), index(q0 + i)]
                    put_row(ptx.global_address(dq_row), acc, factor, r)

    @inline
    def consume(maps, smem, me, dq, dq_sum, scale):
        """(7) dQ = dQ + dS K for 64 rows of each work item and its tiles of keys."""
        acc = cuda.local.array(OUTPUTS, f32)  # registers: a fragment of dQ
        item_n, n = u32(0), u32(0)
        while True:
            pipeline.wait_ready(smem, WORK, item_n)
            count = pipeline.uniform(pipeline.read(smem, WORK, item_n, WORD.count))
            if count == END:
                break
            address = begin_item(smem, item_n, me, dq_sum, acc)
            for t in range(count):
                pipeline.wait_ready(smem, TILES, n)
                if SEQUENCES:
                    keys = pipeline.read(smem, WORK, item_n, WORD.keys)
                    first = pipeline.read(smem, WORK, item_n, WORD.first)
                    clear_k(smem, TILES, n, keys - (first + t) * BLOCK_N, me)
                k_tile = pipeline.tile(smem, TILES, n)
                ds_tile = k_tile + u32(K_BYTES + me * PANEL_BYTES)
                ds_mine = wgmma.descriptor(ds_tile, u32(PANEL_BYTES))
                start_sum(acc, ds_mine, wgmma.descriptor(k_tile, u32(PANEL_BYTES)))
                ptx.wgmma_wait(acc, acc, NONE, OUTPUTS, NONE)
                pipeline.release_group(smem, TILES, n)
                n = u32(n + 1)
            finish(maps, smem, item_n, me, dq, acc, address, scale)
            item_n = u32(item_n + 1)

    rings = Arrivals((WORK,), 1, CONSUMERS * WARP_GROUP + 1), Arrivals((TILES,), 1, CONSUMERS)
    roles = Roles(
        tile,
        producers=(
            Producer(lambda smem, me, x: write_work(smem, x.dq, x.lse2, x.extras, x.sizes), 0),
            Producer(lambda smem, me, x: produce(x.maps, smem, x.ds, x.extras, x.sizes), 1),
        ),
        consume=lambda smem, me, x: consume(x.maps, smem, me, x.dq, x.dq_sum, x.scales.scale),
        senders=WARP_GROUP if to_map else 0,
    )
    return hopper_kernel(
        rings,
        roles,
        maps=2 if to_map else 1,
        dq=array(u32, 5),
        dq_sum=array(f32, 5),
        ds=array(f32, 5),
        lse2=array(f32, 4),
        extras=extras_type(options, LISTS),
        sizes=named(Sizes, i64),
        scales=named(Scales, f32),
    )
