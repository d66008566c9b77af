"""How the backward kernels get their work and their tiles."""

from functools import partial
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, i32, i64, inline, once, u32, u64
from numba_flash.cuda.sm80.arguments import finds_again
from numba_flash.cuda.sm80.load import build_load
from numba_flash.cuda.sm80.operands import load_float64
from numba_flash.cuda.work import schedule, tile_lists


class QueryTile(NamedTuple):
    """A tile of queries on a block's way through them, the last one of each head first.

    Attributes
    ----------
    head, base : int
        Its head, and the number of the head's first row block.
    at : int
        Its number in its head.
    whole : bool
        Nothing in it is hidden, as far as a list tells (`numba_flash.cuda.work.tile_lists`).
    begins : bool
        It is the first one of its head, or of those that share a flag, in a list.
    tiles_left : int
        How many tiles of its head's list come before it; -1 after the last tile of all.
    """

    head: int
    base: int
    at: int
    whole: bool
    begins: bool
    tiles_left: int


class Loads(NamedTuple):
    """Functions of a block; see `build`."""

    begin: Any
    first: Any
    next: Any
    tiles_left: Any
    keys: Any
    tile: Any


@once
def build(shape, ordered, options, tile, place):
    """`Loads` of a kernel; `place` says where a key is stored in its tile."""
    BLOCK_M, BLOCK_N, THREADS = tile.block_m, tile.block_n, tile.threads
    D, DV = tile.padded(shape.head_dim), tile.padded(shape.head_dim_v)
    SMEM = tile.layout(shape.head_dim, shape.head_dim_v)
    K, V, Q, DO, ROWS = SMEM.k, SMEM.v, SMEM.q, SMEM.do, SMEM.rows
    LSE_BYTES = BLOCK_M * (8 if shape.double else 4)  # and as many of delta
    Q_BYTES, DO_BYTES, ROWS_BYTES = BLOCK_M * SMEM.pitch_k, BLOCK_M * SMEM.pitch_v, 2 * LSE_BYTES
    COPIES = LSE_BYTES // 16
    ORDERED, PACKED, TURING, MASKED = ordered, options.packed, shape.turing, options.tiled
    SHARE, AGAIN = tile.share, finds_again(options, shape, tile)
    item_of = schedule.build_item(options, True, False, BLOCK_N, BLOCK_M, transposed=True)
    first_block = schedule.build_first_block(PACKED, BLOCK_M)
    list_of, in_list = tile_lists.build_access(MASKED)
    memory, columns = (shape.head_dim, shape.head_dim_v), (D, DV)  # of rows there, and in a tile
    if shape.planes:
        memory = columns = shape.planes * D, shape.planes * DV
    build_kv = partial(build_load, BLOCK_N, threads=THREADS, place=place)
    build_q = partial(build_load, BLOCK_M, threads=THREADS, place=None, again=AGAIN)
    if shape.double:
        build_kv = partial(load_float64.build_load, BLOCK_N, threads=THREADS, place=place)
        build_q = partial(load_float64.build_load, BLOCK_M, threads=THREADS)
    load_k, load_q = (
        each(memory[0], columns=columns[0], asynchronous=shape.asynchronous)
        for each in (build_kv, build_q)
    )
    load_v, load_do = (
        each(memory[1], columns=columns[1], asynchronous=shape.asynchronous)
        for each in (build_kv, build_q)
    )

    @inline
    def begin(smem, flags, shape, extras, sizes):
        """This block's `numba_flash.cuda.work.schedule.Item`. If ORDERED, blocks claim them: whom
        an item waits for has been claimed before, by a block at work, however few blocks the GPU
        has room for.
        """
        number = i32(cuda.blockIdx.x)
        if ORDERED:
            if cuda.threadIdx.x == 0:
                last = u64(flags.shape[0] - 1)
                number = ptx.next_number(u64(ptx.global_address(flags) + u64(4) * last))
                ptx.store_shared(smem, number)
            cuda.syncthreads()  # the number is there
            number = ptx.load_shared(smem)
            cuda.syncthreads()  # everybody has read it
        return item_of(number, shape, extras, sizes)

    @inline
    def listed(head, base, group, number, item, rows, extras, sizes):
        """The tile of that number in a head's list, or, below 0, the last one of the next head that
        has one. `group` is that of the last tile, among those of blocks that share a flag.
        """
        stop, block = i32((item.head + 1) * sizes.group), i32(item.row0 // BLOCK_N)
        seen = list_of(extras, item.b0, item.b1, head, block)
        while number < 0 and head + 1 < stop:
            head, base, group = i32(head + 1), i32(base + rows.shape[4] // BLOCK_M), i32(-1)
            seen = list_of(extras, item.b0, item.b1, head, block)
            number = i32(tile_lists.length(seen) - 1)
        tile = in_list(seen, number)
        at = tile.at if number >= 0 else i32(0)
        return QueryTile(head, base, at, tile.whole, at // SHARE != group, number)

    @inline
    def first(item, rows, extras, sizes):
        """The first tile."""
        head = i32(item.head * sizes.group)
        base = first_block(item.b0, item.b1, head, item.columns_begin, rows.shape[1:])
        if MASKED:
            block = i32(item.row0 // BLOCK_N)
            seen = list_of(extras, item.b0, item.b1, head, block)
            last = i32(tile_lists.length(seen) - 1)
            return listed(head, base, i32(-1), last, item, rows, extras, sizes)
        return QueryTile(head, base, i32(item.first + item.count - 1), False, False, i32(0))

    @inline
    def next_tile(walk, item, rows, extras, sizes):
        """The tile before, or the last one of the next head."""
        head, base, at = walk.head, walk.base, i32(walk.at - 1)
        if MASKED:
            group, before = i32(walk.at // SHARE), i32(walk.tiles_left - 1)
            return listed(head, base, group, before, item, rows, extras, sizes)
        if at < item.first:
            head, base = i32(head + 1), i32(base + rows.shape[4] // BLOCK_M)
            at = i32(item.first + item.count - 1)
        return QueryTile(head, base, at, False, False, i32(0))

    @inline
    def tiles_left(walk, item, sizes):
        """How many tiles are left from this one on; with a mask 1 if there is any."""
        tiles = i32(sizes.group * item.count)
        if MASKED:
            tiles = i32(1) if walk.tiles_left >= 0 else i32(0)
        return tiles if item.columns > 0 else i32(0)

    @inline
    def keys(smem, k, v, item):
        """K and V."""
        b0, b1, begin = item.b0, i32(0) if PACKED else item.b1, item.rows_begin
        load_k(u32(smem + u32(K)), k[b0, b1, item.head, begin:], item.row0, item.rows)
        load_v(u32(smem + u32(V)), v[b0, b1, item.head, begin:], item.row0, item.rows)

    @inline
    def load_rows(target, rows, number):
        """The lse and delta of a row block."""
        thread = ptx.bounded_thread_here() if AGAIN else i32(cuda.threadIdx.x)
        if thread < 2 * COPIES:
            which, chunk = i32(thread // COPIES), i32(thread % COPIES)
            at = u64(i64(number) * LSE_BYTES + chunk * 16)
            source = u64(ptx.global_address(rows[which]) + at)
            to = u32(target + u32(thread * 16))
            if TURING:
                ptx.store_shared_vector(to, ptx.load_global_words(source))
            else:
                ptx.copy16(to, source, u32(1))

    @inline
    def load_tile(smem, slot, do, q, rows, item, walk):
        """Q, dO, and what belongs to their rows, into a slot."""
        b0, b1, begin = item.b0, i32(0) if PACKED else item.b1, item.columns_begin
        row0, queries = i32(walk.at * BLOCK_M), item.columns
        q_head, do_head = q[b0, b1, walk.head, begin:], do[b0, b1, walk.head, begin:]
        load_q(u32(smem + u32(Q) + slot * u32(Q_BYTES)), q_head, row0, queries)
        load_do(u32(smem + u32(DO) + slot * u32(DO_BYTES)), do_head, row0, queries)
        to = u32(smem + u32(ROWS) + slot * u32(ROWS_BYTES))
        load_rows(to, rows, i32(walk.base + walk.at))

    return Loads(begin, first, next_tile, tiles_left, keys, load_tile)
