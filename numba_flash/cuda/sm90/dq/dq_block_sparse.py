"""What the threads of `numba_flash.cuda.sm90.dq.dq` that move data do where tiles are listed: they
go through the list of a block of queries, and find dS of each tile in its slot.
"""

from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import i32, inline, u32, u64
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import DQ_START, END, DqWork, one_type, words
from numba_flash.cuda.sm90.dq import ds_slots
from numba_flash.cuda.sm90.pipeline import TilePlace
from numba_flash.cuda.work import schedule, tile_lists

WORD = words(DqWork)


class Run(NamedTuple):
    """Of a list, what has slots in a section: the places from one to before another, and the last
    block of keys of these.
    """

    start: int
    stop: int
    last: int


@inline
def slot_of(extras, b0, b1, head, block, at):
    """Slot of a tile, its section times the room of one before it."""
    place = extras.places[index(b0), index(b1), index(head), 0, index(at)]
    rank = extras.ranks[index(b0), index(b1), index(head), index(block), index(at)]
    return i32(place + rank)


@inline
def listed_at(seen, number):
    """The block of keys of that place in a list."""
    return i32(u32(ptx.fetch_word(u64(seen + u64(4 * (number + 1))))) >> u32(1))


@inline
def places_before(section, seen, count, extras, item, block, room):
    """How many tiles of a list of so many have slots in sections before one: slots ascend."""
    low, high = i32(0), i32(count)
    while low < high:
        middle = i32((low + high) // 2)
        at = listed_at(seen, middle)
        slot = slot_of(extras, item.b0, item.b1, item.head, block, at)
        if i32(u32(slot) // u32(room)) < section:
            low = i32(middle + 1)
        else:
            high = middle
    return low


@inline
def run_of(seen, count, extras, item, block, sections, sizes):
    """The `Run` of a list of so many tiles in this section, of so many that there are."""
    start, stop, section, room = i32(0), i32(count), i32(sizes.first_block), i32(sizes.blocks)
    if sections > 1:
        start = places_before(section, seen, count, extras, item, block, room)
        stop = places_before(i32(section + 1), seen, count, extras, item, block, room)
    return Run(start, stop, listed_at(seen, i32(stop - 1)) if stop > start else i32(0))


def build_write_work(banded, options, tile, layout):
    """`numba_flash.cuda.sm90.dq.dq.build_write_work`'s; blocks take work items as they are done."""
    BLOCK_M, WORK = tile.block_m, one_type(layout.work)
    item_of = schedule.build_item(options, banded, False, BLOCK_M, tile.block_n)
    first_block = schedule.build_first_block(False, BLOCK_M)
    list_of, _ = tile_lists.build_access(True)

    @inline
    def write_work(smem, dq, lse2, extras, sizes):
        item_n, sections = u32(0), ds_slots.sections(extras.places, sizes)
        items, there = ds_slots.items(extras.places, sizes), True
        while there:
            pipeline.wait_free(smem, WORK, item_n)
            at = ds_slots.claim(extras.places, sizes, 1)
            there = at < items
            if there:
                item = item_of(at, dq.shape, extras, sizes)
                block = i32(item.row0 // BLOCK_M)
                seen = list_of(extras, item.b0, item.b1, item.head, block)
                count = tile_lists.length(seen)
                run = run_of(seen, count, extras, item, block, sections, sizes)
                if run.start == run.stop and (count > 0 or sizes.first_block > 0):
                    continue  # others' tiles
                base = first_block(item.b0, item.b1, item.head, item.rows_begin, lse2.shape)
                tiles = i32(run.stop - run.start)
                work = DqWork(
                    b0=item.b0,
                    b1=item.b1,
                    head=item.head,
                    kv_head=i32(u32(item.head) // u32(sizes.group)),
                    row0=item.row0,
                    q0=item.rows_begin,
                    queries=item.rows,
                    k0=item.columns_begin,
                    keys=item.columns,
                    invalid=item.invalid,
                    first=i32(run.last - (tiles - 1)),  # an end can only cut the last one
                    count=tiles,
                    number=i32(base + block),
                    begins=i32(1 if run.start == 0 else 0),
                    ends=i32(1 if run.stop == count else 0),
                )
                for word in range(len(work)):
                    pipeline.write(smem, WORK, item_n, word, work[word])
                pipeline.write(smem, WORK, item_n, DQ_START, run.start)
            else:
                pipeline.write(smem, WORK, item_n, WORD.count, END)
            pipeline.commit(smem, WORK, item_n)
            item_n = u32(item_n + 1)

    return write_work


def build_produce(head_dim, tile, layout):
    """``produce(maps, smem, ds, extras, sizes)``: have the copy engine fetch tiles of K, and behind
    them those of dS^T.
    """
    BLOCK_M, BLOCK_N, DS_BYTES = tile.block_m, tile.block_n, tile.ds_bytes
    TILES, WORK = map(one_type, (layout.tiles, layout.work))
    K_BYTES = layout.tiles.slot_bytes - tile.ds_bytes
    load_k = pipeline.build_load(TILES, head_dim, BLOCK_N, DS_BYTES)
    list_of, _ = tile_lists.build_access(True)

    @inline
    def produce(maps, smem, ds, extras, sizes):
        item_n, n = u32(0), u32(0)
        room = i32(sizes.first_block) * i32(sizes.blocks)
        pipeline.wait_ready(smem, WORK, item_n)
        count = pipeline.read(smem, WORK, item_n, WORD.count)
        while count != END:
            b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
            b1 = pipeline.read(smem, WORK, item_n, WORD.b1)
            head = pipeline.read(smem, WORK, item_n, WORD.head)
            kv_head = pipeline.read(smem, WORK, item_n, WORD.kv_head)
            k0 = pipeline.read(smem, WORK, item_n, WORD.k0)
            block = i32(pipeline.read(smem, WORK, item_n, WORD.row0) // BLOCK_M)
            start = pipeline.read(smem, WORK, item_n, DQ_START)
            seen = list_of(extras, b0, b1, head, block)
            following = i32(0)
            if count > 0:
                following = listed_at(seen, start)
            for t in range(count):
                # what is looked up arrives while there is something else to wait for
                at = following
                slot = u64(i32(slot_of(extras, b0, b1, head, block, at) - room))
                following = listed_at(seen, i32(start + min(t + 1, count - 1)))
                pipeline.wait_free(smem, TILES, n)
                load_k(maps[0], smem, n, TilePlace(0, k0 + at * BLOCK_N, kv_head, b1, b0))
                to = u32(pipeline.tile(smem, TILES, n) + u32(K_BYTES))
                address = u64(ptx.global_address(ds) + slot * u64(DS_BYTES))
                ready = pipeline.mbarrier(smem, TILES, TILES.ready, n)
                ptx.bulk_load(to, address, u32(DS_BYTES), ready)
                n = u32(n + 1)
            pipeline.release(smem, WORK, item_n)
            item_n = u32(item_n + 1)
            pipeline.wait_ready(smem, WORK, item_n)
            count = pipeline.read(smem, WORK, item_n, WORD.count)

    return produce
