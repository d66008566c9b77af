"""The thread that moves data in the forward pass: it writes down work items for the consumers, and
has the copy engine fetch their tiles.
"""

from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, i32, inline, once, u32
from numba_flash.cuda.score import relative
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import END, SCORES_B1, ForwardWork, one_type, words
from numba_flash.cuda.sm90.hopper_kernel import Arrivals
from numba_flash.cuda.sm90.pipeline import TilePlace
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.work import schedule, tile_lists

WORD = words(ForwardWork)


class KeyTiles(NamedTuple):
    """Of keys of a work item: the number of the first, how many there are, and the keys of the
    sequence; with a mask, numbers in a list (`numba_flash.cuda.work.tile_lists`).
    """

    first: int
    count: int
    keys: int


def lists_of(options) -> tuple[str, ...]:
    """What the kernels want of a mask."""
    return ("tiles", "queue") if options.block_sparse else ("tiles",)


def rings_of(tile, layout, k_readers=1):
    """The rings of a block, and who arrives there: so many of each consumer for a tile of K."""
    CONSUMERS = tile.consumers
    readers = (
        (layout.work, CONSUMERS * WARP_GROUP),
        (layout.q, CONSUMERS),
        (layout.k, CONSUMERS * k_readers),
        (layout.v, CONSUMERS),
    )
    return tuple(Arrivals((one_type(ring),), 1, releases) for ring, releases in readers)


@once
def build_sparse_tiles(in_kv_splits, block_m):
    """``sparse_tiles(item, extras, sizes)``: the `KeyTiles` that a mask leaves of a work item; if
    that is none, one tile without keys.
    """
    KV_SPLITS, BLOCK_M = in_kv_splits, block_m
    list_of, _ = tile_lists.build_access(True)

    @inline
    def sparse_tiles(item, extras, sizes):
        seen = list_of(extras, item.b0, item.b1, item.head, i32(u32(item.row0) // u32(BLOCK_M)))
        first, count, keys = i32(0), tile_lists.length(seen), item.columns
        if KV_SPLITS:
            share = i32((count + i32(sizes.kv_splits) - 1) // i32(sizes.kv_splits))
            before = min(i32(item.kv_split * share), count)
            first, count = before, i32(min(share, i32(count - before)))
        if count == 0:
            first, count, keys = i32(0), i32(1), i32(0)
        return KeyTiles(first, count, keys)

    return sparse_tiles


def build_write_work(banded, in_kv_splits, options, tile, layout):
    """``write_work(smem, item_n, o, extras, sizes)``: write down this block's next work item."""
    WORK, PACKED, MASKED = one_type(layout.work), options.packed, options.tiled
    OPTIONS, QUEUED = options.modifies_or_lists, options.block_sparse
    item_of = schedule.build_item(
        options, banded, in_kv_splits, tile.block_m, tile.block_n, queued=QUEUED
    )
    sparse_tiles = build_sparse_tiles(in_kv_splits, tile.block_m)

    @inline
    def write_work(smem, item_n, o, extras, sizes):
        pipeline.wait_free(smem, WORK, item_n)
        if not QUEUED:
            number = schedule.zigzag(item_n, cuda.gridDim.x)
        elif item_n == u32(0):  # each block has one
            number = i32(cuda.blockIdx.x)
        else:
            number = i32(tile_lists.take(extras.queue) + i32(cuda.gridDim.x))
        if number < sizes.items:
            item = item_of(number, o.shape, extras, sizes)
            kv_head = i32(u32(item.head) // u32(sizes.group))
            if MASKED:
                tiles = sparse_tiles(item, extras, sizes)
            else:
                tiles = KeyTiles(item.first, item.count, item.columns)
            work = ForwardWork(
                b0=item.b0,
                b1=i32(0) if PACKED else item.b1,
                head=item.head,
                kv_head=kv_head,
                row0=item.row0,
                q0=item.rows_begin,
                queries=item.rows,
                k0=item.columns_begin,
                keys=tiles.keys,
                low=item.low,
                high=item.high,
                invalid=item.invalid,
                first=tiles.first,
                count=tiles.count,
                kv_split=item.kv_split,
            )
            for word in range(len(work)):
                pipeline.write(smem, WORK, item_n, word, work[word])
            if OPTIONS:
                pipeline.write(smem, WORK, item_n, SCORES_B1, item.b1)
        else:
            pipeline.write(smem, WORK, item_n, WORD.count, END)
            if MASKED:  # and no list
                pipeline.write(smem, WORK, item_n, WORD.keys, 0)
        pipeline.commit(smem, WORK, item_n)

    return write_work


@inline
def load_nothing(tensor_map, smem, n, place, extras):
    """Nothing belongs to pairs, or threads read it from memory."""


@once
def build_produce(
    head_dim, head_dim_v, banded, in_kv_splits, options, tile, pairs_map=0, load_pairs=load_nothing
):
    """``produce(maps, smem, o, extras, sizes)``: have the copy engine fetch what each work item
    needs, K one tile ahead of V, and write down the next item in the meantime.

    pairs_map, load_pairs : the number of the map of what belongs to pairs, and what has a tile of
        it fetched, see `numba_flash.cuda.sm90.pair_tiles`.
    """
    BLOCK_N, SMEM = tile.block_n, tile.layout(head_dim, head_dim_v)
    Q, K, V, WORK = map(one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.work))
    # other blocks of rows read the same keys, unless there are so few that keys are split
    USES = None if in_kv_splits else ptx.AGAIN
    write_work = build_write_work(banded, in_kv_splits, options, tile, SMEM)
    load_q = pipeline.build_load(Q, head_dim, tile.block_m, 0, tile.planes, ptx.ONCE)
    RELATIVE, RELATIVE_BYTES = options.relative, tile.relative_bytes if options.relative else 0
    RELATIVE_SMEM = SMEM.relative if options.relative else 0
    load_k = pipeline.build_load(K, head_dim, BLOCK_N, RELATIVE_BYTES, tile.planes, USES)
    load_relative = pipeline.build_load_numbers(K, RELATIVE_SMEM, RELATIVE_BYTES)
    address_of = relative.build_address(tile.block_m)
    load_v = pipeline.build_load(V, head_dim_v, BLOCK_N, 0, tile.planes, USES)
    BLOCK_M, MASKED = tile.block_m, options.tiled
    COPIES_PAIRS, PAIRS_MAP = load_pairs is not load_nothing, pairs_map
    list_of, entry_of = tile_lists.build_access(MASKED)

    @inline
    def list_of_work(smem, item_n, extras):
        """The list of a work item's tiles."""
        b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
        b1 = pipeline.read(smem, WORK, item_n, SCORES_B1)
        head = pipeline.read(smem, WORK, item_n, WORD.head)
        block = i32(u32(pipeline.read(smem, WORK, item_n, WORD.row0)) // u32(BLOCK_M))
        return list_of(extras, b0, b1, head, block)

    @inline
    def listed_column(seen, number, keys):
        """First column of a tile of the list; none of an empty one is read."""
        return i32(entry_of(seen, i32(number)).at * BLOCK_N) if keys > 0 else i32(0)

    @inline
    def produce(maps, smem, o, extras, sizes):
        item_n, n = u32(0), u32(0)
        write_work(smem, item_n, o, extras, sizes)
        count = pipeline.read(smem, WORK, item_n, WORD.count)
        while count != END:
            b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
            b1 = pipeline.read(smem, WORK, item_n, WORD.b1)
            kv_head = pipeline.read(smem, WORK, item_n, WORD.kv_head)
            row = pipeline.read(smem, WORK, item_n, WORD.q0)
            row += pipeline.read(smem, WORK, item_n, WORD.row0)
            k0 = pipeline.read(smem, WORK, item_n, WORD.k0)
            first = pipeline.read(smem, WORK, item_n, WORD.first)
            key = i32(k0 + (first + count - 1) * BLOCK_N)
            if COPIES_PAIRS:
                row0 = pipeline.read(smem, WORK, item_n, WORD.row0)
                head = pipeline.read(smem, WORK, item_n, WORD.head)
                scores_b1 = pipeline.read(smem, WORK, item_n, SCORES_B1)
            if MASKED:
                seen = list_of_work(smem, item_n, extras)
                keys, last = pipeline.read(smem, WORK, item_n, WORD.keys), i32(first + count - 1)
            for t in range(count + 1):
                if t < count:
                    key_k = key - t * BLOCK_N
                    if MASKED:
                        key_k = i32(k0 + listed_column(seen, last - t, keys))
                    pipeline.wait_free(smem, K, u32(n + t))
                    load_k(maps[1], smem, u32(n + t), TilePlace(0, key_k, kv_head, b1, b0))
                    if RELATIVE:
                        row0 = pipeline.read(smem, WORK, item_n, WORD.row0)
                        head = pipeline.read(smem, WORK, item_n, WORD.head)
                        address = address_of(extras.relative, head, row0, i32(key_k - k0))
                        load_relative(smem, u32(n + t), address)
                    if COPIES_PAIRS:
                        pair = TilePlace(i32(key_k - k0), row0, head, scores_b1, b0)
                        load_pairs(maps[PAIRS_MAP], smem, u32(n + t), pair, extras)
                if t == 0:
                    pipeline.wait_free(smem, Q, item_n)
                    head = pipeline.read(smem, WORK, item_n, WORD.head)
                    load_q(maps[0], smem, item_n, TilePlace(0, row, head, b1, b0))
                else:
                    key_v = key - (t - 1) * BLOCK_N
                    if MASKED:
                        key_v = i32(k0 + listed_column(seen, last - (t - 1), keys))
                    pipeline.wait_free(smem, V, u32(n + t - 1))
                    load_v(maps[2], smem, u32(n + t - 1), TilePlace(0, key_v, kv_head, b1, b0))
                if t == 1:
                    write_work(smem, u32(item_n + 1), o, extras, sizes)
            n, item_n = u32(n + count), u32(item_n + 1)
            count = pipeline.read(smem, WORK, item_n, WORD.count)

    return produce
