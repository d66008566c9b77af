"""The threads that move data in the backward pass: one writes down work items, one has tiles
fetched, and, where dQ is added up in memory, two do that in turns. The warp of the first may round
dQ, too (`numba_flash.cuda.sm90.dq.round_dq`).
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import FACTORS, extras_type, parameters_type
from numba_flash.cuda.config import OPTIONS
from numba_flash.cuda.number import array
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, named, u32, u64
from numba_flash.cuda.score import relative
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import (
    BACKWARD_SCORES_B1,
    BACKWARD_TILES,
    END,
    BackwardWork,
    OptionScales,
    Scales,
    Sizes,
    StoredNote,
    TileNote,
    may_go_upward,
    one_type,
    words,
)
from numba_flash.cuda.sm90.backward import walk_backward
from numba_flash.cuda.sm90.backward.walk_backward import (
    build_note_tile,
    build_tile_at,
    build_walk,
    goes_together,
    goes_upward,
    lists_of,
)
from numba_flash.cuda.sm90.dq import ds_slots
from numba_flash.cuda.sm90.dq.add_dq import build_add_dq
from numba_flash.cuda.sm90.dq.round_dq import build_write_and_round
from numba_flash.cuda.sm90.hopper_kernel import Arrivals, Producer, Roles, hopper_kernel
from numba_flash.cuda.sm90.pair_tiles import build_load_bias
from numba_flash.cuda.sm90.pipeline import TilePlace
from numba_flash.cuda.sm90.tiles import ADDERS, WARP_GROUP
from numba_flash.cuda.work import schedule, tile_lists

WORD = words(BackwardWork)
BIAS_MAP = 6  # which of the tensor maps, where there is one


class WriteWork(NamedTuple):
    """What `build_write_work` makes."""

    write_work: Any
    write_next: Any


def build_write_work(banded, ordered, options, tile, layout):
    """``write_work(smem, dk, lse2, flags, extras, sizes)``: write down what this block's work items
    are, ahead of the other threads. ``write_next(smem, item_n, dk, lse2, flags, extras, sizes)``:
    only the item `item_n`, where each has something to do; or that there is none: False.

    Arguments are those of `build_kernel` and of its kernel.
    """
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    WORK, FETCHED = one_type(layout.work), one_type(layout.fetched)
    PACKED, QUEUED = options.packed, options.block_sparse and not ordered
    BANDED, CLAIMS = banded, walk_backward.claims(banded, ordered, options, tile)
    UPWARD = may_go_upward(ordered, options)
    item_of = schedule.build_item(options, banded, False, BLOCK_N, BLOCK_M, True, QUEUED, UPWARD)
    first_block = schedule.build_first_block(PACKED, BLOCK_M)
    NOTED, MASKED = options.modifies_or_lists, options.tiled
    IN_SLOTS, IN_PARTS = tile.in_slots, not tile.adds_dq and not tile.in_slots
    listed_together = build_walk(BLOCK_N, layout.work, tile.share).together

    @inline
    def next_number(smem, item_n, taken, flags, extras, sizes):
        """Number of the next work item. If a block CLAIMS it, whom it waits for has been claimed
        before, by a block at work, however few blocks the GPU has room for. It does so when it has
        asked for all tiles of the last one, lest others wait longer; if dS goes to memory, before.
        """
        if CLAIMS:
            if item_n != u32(0):
                pipeline.wait_ready(smem, FETCHED, u32(item_n - u32(1)))
            if IN_SLOTS:
                return ds_slots.claim(extras.places, sizes, 0)
            if QUEUED:
                return tile_lists.take(extras.queue)
            last = u64(flags.shape[0] - 1)
            return ptx.next_number(u64(ptx.global_address(flags) + u64(4) * last))
        if BANDED:
            return schedule.zigzag(taken, cuda.gridDim.x)
        return i32(taken * cuda.gridDim.x + cuda.blockIdx.x)

    @inline
    def write_item(smem, item_n, number, dk, lse2, extras, sizes):
        """Write down a work item; False if it has nothing to do."""
        item = item_of(number, dk.shape, extras, sizes)
        if IN_PARTS:
            block = item.row0 // BLOCK_N
            if not sizes.first_block <= block < sizes.first_block + sizes.blocks:
                return False
        if IN_SLOTS and not ds_slots.in_section(item, extras.places, sizes, BLOCK_N):
            return False
        if PACKED and item.row0 >= item.rows:
            return False  # nothing to store; an impossible sequence has no rows of its own
        head = item.head * i32(sizes.group)
        base = first_block(item.b0, item.b1, head, item.columns_begin, lse2.shape)
        queries, tiles = item.columns, i32(item.count * i32(sizes.group))
        if MASKED:
            tiles = listed_together(item, extras, sizes)
            if tiles == 0:  # one tile of each head, in which everything is hidden
                queries, tiles = i32(0), i32(sizes.group)
        first = i32(~(item.first + item.count - i32(1)))
        if UPWARD and goes_upward(number, i32(item.row0 // BLOCK_N), sizes):
            first = item.first
        work = BackwardWork(
            b0=item.b0,
            b1=i32(0) if PACKED else item.b1,
            kv_head=item.head,
            row0=item.row0,
            k0=item.rows_begin,
            keys=item.rows,
            q0=item.columns_begin,
            queries=queries,
            low=item.low,
            high=item.high,
            invalid=item.invalid,
            first=first,
            count=item.count,
            base=base,
        )
        for word in range(len(work)):
            pipeline.write(smem, WORK, item_n, word, work[word])
        if NOTED:
            pipeline.write(smem, WORK, item_n, BACKWARD_SCORES_B1, item.b1)
            pipeline.write(smem, WORK, item_n, BACKWARD_TILES, tiles)
        return True

    @inline
    def write_work(smem, dk, lse2, flags, extras, sizes):
        item_n, taken, there = u32(0), u32(0), True
        items = ds_slots.items(extras.places, sizes) if IN_SLOTS else sizes.items
        while there:
            pipeline.wait_free(smem, WORK, item_n)
            number = next_number(smem, item_n, taken, flags, extras, sizes)
            taken = u32(taken + 1)
            there = number < items
            if there:
                if not write_item(smem, item_n, number, dk, lse2, extras, sizes):
                    continue
            else:
                pipeline.write(smem, WORK, item_n, WORD.count, END)
            pipeline.commit(smem, WORK, item_n)
            item_n = u32(item_n + 1)

    @inline
    def write_next(smem, item_n, dk, lse2, flags, extras, sizes):
        pipeline.wait_free(smem, WORK, item_n)
        number = next_number(smem, item_n, item_n, flags, extras, sizes)
        there = number < sizes.items
        if there:
            write_item(smem, item_n, number, dk, lse2, extras, sizes)
        else:
            pipeline.write(smem, WORK, item_n, WORD.count, END)
        pipeline.commit(smem, WORK, item_n)
        return there

    return WriteWork(write_work, write_next)


def build_produce(head_dim, head_dim_v, claims, upward, options, tile, layout):
    """``produce(maps, smem, lse2, delta, extras, group, sizes)``: have the copy engine fetch what
    each work item needs; with options, write down a note of each tile before its Q is fetched.

    claims : blocks claim work items, see `numba_flash.cuda.sm90.backward.walk_backward.claims`.
    upward : some of these may go through their tiles upward.
    """
    BLOCK_M, BLOCK_N, ROW_BYTES = tile.block_m, tile.block_n, 4 * tile.block_m
    IN_SLOTS, CLAIMS = tile.in_slots, claims
    DO_FIRST, COPIES_BIAS = not tile.adds_dq and not IN_SLOTS, tile.copies_bias
    K, V, WORK, FETCHED = map(one_type, (layout.k, layout.v, layout.work, layout.fetched))
    width, width_v = tile.width(head_dim), tile.width(head_dim_v)
    RELATIVE, RELATIVE_BYTES = options.relative, tile.relative_bytes if options.relative else 0
    of_q = layout.q, width, BLOCK_M, layout.lse, tile.planes
    load_q = pipeline.build_load_rows(*of_q, RELATIVE_BYTES)
    relative_at = layout.relative if options.relative else 0
    load_relative = pipeline.build_load_numbers(layout.q, relative_at, RELATIVE_BYTES)
    address_of = relative.build_address(BLOCK_M)
    load_do = pipeline.build_load_rows(layout.do, width_v, BLOCK_M, layout.delta, tile.planes)
    load_k = pipeline.build_load(K, width, BLOCK_N, 0, tile.planes, ptx.ONCE)
    load_v = pipeline.build_load(V, width_v, BLOCK_N, 0, tile.planes, ptx.ONCE)
    MASKED, NOTED = options.tiled, options.modifies_or_lists
    note_tile = build_note_tile(layout) if NOTED else None
    walk, tile_at = build_walk(BLOCK_N, layout.work, tile.share), build_tile_at(upward)
    TOGETHER = goes_together(options, tile)
    listing_of, listed, last_slot = walk.listing_of, walk.block_sparse, walk.last_slot
    load_bias = build_load_bias(tile, layout) if COPIES_BIAS else None

    @inline
    def let_claim(smem, item_n, begins):
        """The next work item may be claimed: as this one `begins`, where nobody waits for it."""
        if CLAIMS and begins == IN_SLOTS:
            pipeline.commit(smem, FETCHED, item_n)

    @inline
    def produce(maps, smem, lse2, delta, extras, group, sizes):
        item_n, n, blocks = u32(0), u32(0), i32(lse2.shape[3] // BLOCK_M)
        lse2_address, delta_address = ptx.global_address(lse2), ptx.global_address(delta)
        pipeline.wait_ready(smem, WORK, item_n)
        count = pipeline.read(smem, WORK, item_n, WORD.count)
        while count != END:
            b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
            b1 = pipeline.read(smem, WORK, item_n, WORD.b1)
            kv_head = pipeline.read(smem, WORK, item_n, WORD.kv_head)
            first = pipeline.read(smem, WORK, item_n, WORD.first)
            key = pipeline.read(smem, WORK, item_n, WORD.k0)
            key += pipeline.read(smem, WORK, item_n, WORD.row0)
            pipeline.wait_free(smem, K, item_n)
            load_k(maps[2], smem, item_n, TilePlace(0, key, kv_head, b1, b0))
            begin = n
            let_claim(smem, item_n, True)
            for outer in range(count if TOGETHER else group):
                whole, inners = False, group if TOGETHER else count
                if MASKED:
                    head = i32(kv_head * group + outer)
                    listing = listing_of(smem, item_n, head, extras)
                    inners = listing.count
                if IN_SLOTS:
                    last = last_slot(smem, item_n, head, listing, extras, sizes)
                for inner in range(inners):
                    g, t = (inner, outer) if TOGETHER else (outer, inner)
                    head = i32(kv_head * group + g)
                    base = i32(pipeline.read(smem, WORK, item_n, WORD.base) + g * blocks)
                    at = tile_at(first, t)
                    if MASKED:
                        at, whole = listed(listing, t)
                    if IN_SLOTS:
                        slot = i32(last - t)
                        note_tile(smem, n, StoredNote(i32(at * BLOCK_M), head, i32(whole), slot))
                    elif NOTED:
                        note_tile(smem, n, TileNote(i32(at * BLOCK_M), head, i32(whole)))
                    row = i32(pipeline.read(smem, WORK, item_n, WORD.q0) + at * i32(BLOCK_M))
                    offset = u64(u32(i32(base + at))) * u64(ROW_BYTES)
                    place = TilePlace(0, row, head, b1, b0)
                    if not DO_FIRST:
                        load_q(maps[1], smem, n, place, u64(lse2_address + offset))
                    if RELATIVE:
                        col0 = pipeline.read(smem, WORK, item_n, WORD.row0)
                        address = address_of(extras.relative, head, i32(at * BLOCK_M), col0)
                        load_relative(smem, n, address)
                    if n == begin if MASKED else g == 0 and t == 0:
                        pipeline.wait_free(smem, V, item_n)
                        load_v(maps[3], smem, item_n, TilePlace(0, key, kv_head, b1, b0))
                    load_do(maps[0], smem, n, place, u64(delta_address + offset))
                    if DO_FIRST:
                        load_q(maps[1], smem, n, place, u64(lse2_address + offset))
                    if COPIES_BIAS:
                        of_bias = TilePlace(key, i32(at * BLOCK_M), head, b1, b0)
                        load_bias(maps[BIAS_MAP], smem, n, of_bias, extras.bias)
                    n = u32(n + 1)
            let_claim(smem, item_n, False)
            pipeline.release(smem, WORK, item_n)
            item_n = u32(item_n + 1)
            pipeline.wait_ready(smem, WORK, item_n)
            count = pipeline.read(smem, WORK, item_n, WORD.count)

    return produce


def rings_of(tile, layout):
    """The rings of a block, and who arrives there."""
    CONSUMERS = tile.consumers
    Q, K, V, DO = map(one_type, (layout.q, layout.k, layout.v, layout.do))
    DQ, WORK, FETCHED = map(one_type, (layout.dq, layout.work, layout.fetched))
    readers = CONSUMERS * WARP_GROUP + ADDERS * tile.adds_dq + 1
    rings = (
        Arrivals((WORK,), 1, readers),
        Arrivals((Q, DO, K, V), 1, CONSUMERS),
        Arrivals((DQ,), CONSUMERS * WARP_GROUP, 1),
        Arrivals((FETCHED,), 1, 1),
    )
    return (*rings, Arrivals((one_type(layout.bias),), 1, CONSUMERS)) if tile.copies_bias else rings


def build_producers(config):
    """Roles of the first warp group."""
    options, tile, bfloat16 = config.options, config.tile, config.dtype == "bfloat16"
    SMEM, walked = tile.layout(config.d, config.dv), (config.banded, config.ordered, options, tile)
    claims, upward = walk_backward.claims(*walked), may_go_upward(config.ordered, options)
    write_work, write_next = build_write_work(*walked, SMEM)
    produce = build_produce(config.d, config.dv, claims, upward, options, tile, SMEM)
    add_dq, ADDS_DQ = build_add_dq(config.ordered, options, tile, SMEM), tile.adds_dq
    rounds_dq, write_and_round = tile.rounds_dq, None
    if rounds_dq:
        write_and_round = build_write_and_round(tile, SMEM, bfloat16, write_next)

    def write_alone(smem, me, x):
        write_work(smem, x.dk, x.lse2, x.flags, x.extras, x.sizes)

    def write_rounding(smem, me, x):
        scale = x.scales.scale
        write_and_round(x.maps, smem, x.dk, x.lse2, x.dq_sum, x.flags, x.extras, x.sizes, scale)

    def load(smem, me, x):
        produce(x.maps, smem, x.lse2, x.delta, x.extras, i32(x.sizes.group), x.sizes)

    def add(smem, me, x):
        if ADDS_DQ:
            add_dq(smem, me, x.lse2, x.dq_sum, x.flags, x.extras, x.sizes)

    write = write_rounding if rounds_dq else write_alone
    writer = Producer(write, ADDERS + 1, whole=rounds_dq)
    return writer, Producer(load, ADDERS), Producer(add, 0, ADDERS)


def build_kernel(config, consume, handed=()):
    """Kernel, signature and options of `numba_flash.cuda.sm90.backward.backward.build`: the first
    warp group moves data, every other one does what `consume` says. The former rounds dQ, too, if
    the tile says so. Consumers have `Arrivals` of what they have `handed` to each other.
    """
    options, tile, planes = config.options, config.tile, config.tile.planes
    scales = named(Scales, f32)
    if config.stage == OPTIONS:
        scales = named(OptionScales, f32, f32, parameters_type(options))
    lists = lists_of(options, config.ordered, tile)
    return hopper_kernel(
        (*rings_of(tile, tile.layout(config.d, config.dv)), *handed),
        Roles(tile, build_producers(config), consume),
        begins_early=True,
        maps=(6 if config.to_map else 4) + tile.copies_bias + tile.rounds_dq,
        dk=array(u32 if planes == 1 else f32, 5),
        dv=array(u32 if planes == 1 else f32, 5),
        lse2=array(f32, 4),
        delta=array(f32, 4),
        dq_sum=array(f32, 5),
        flags=array(i32, 1),
        extras=extras_type(options, lists, () if planes == 1 else FACTORS),
        sizes=named(Sizes, i64),
        scales=scales,
    )
