"""Lists of the tiles of scores in which a mask leaves something to see: what it hides as a whole
costs a kernel nothing, and tiles in which it hides nothing need not look at it.

They are made once per call, for each block of queries its tiles of keys, or, transposed, for each
block of keys its tiles of queries: int32 (b0, b1, heads, blocks, 1 + tiles), first how many there
are, then, in ascending order, twice the number of each, and one more if all of it is visible: by
the mask, the band and the lengths together. Axes that the mask broadcasts have stride 0.
"""

from typing import Any, NamedTuple

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, i32, i64, inline, once, types, u32, u64
from numba_flash.cuda.score.fragment import ALL_LANES
from numba_flash.cuda.work.sequence import build_sequence

WARP = 32  # threads; tiles that a block looks at together, one by each warp
BATCH = 4  # loads of a lane that are under way together
BLOCKS_AT_ONCE = 8  # whose bits are under way together
FIRST = 24  # bit from which on an order has flags


class MaskRows(NamedTuple):
    """What a lane reads of a tile of the mask: its registers, the address of the tile, bytes from
    one row and one column to the next, how many of each there are, and its first run.
    """

    registers: Any
    base: int
    row: int
    col: int
    rows: int
    cols: int
    number: int


class Found(NamedTuple):
    """The bits of elements that a lane has read: any of them, and all of them."""

    some: int
    all: int


class Entry(NamedTuple):
    """A tile of a list: its number, and whether all of it is visible."""

    at: int
    whole: bool


class Which(NamedTuple):
    """Of the lists: its head, and the number of its block."""

    b0: int
    b1: int
    head: int
    block: int


@inline
def which_list(number, shape):
    """The `Which` of that number, among lists of this shape."""
    block, number = u32(number % u32(shape[3])), u32(number // u32(shape[3]))
    head, number = u32(number % u32(shape[2])), u32(number // u32(shape[2]))
    return Which(u32(number // u32(shape[1])), u32(number % u32(shape[1])), head, block)


@inline
def append(tiles, bits, which, first, kind, count):
    """A warp adds 32 tiles, from number `first` on, to a list of `count`, each lane one of its
    kind: 0 hidden, 1 seen, 3 as a whole. Returns the new count.
    """
    lane = i32(cuda.threadIdx.x % WARP)
    b0, b1, head, block = which.b0, which.b1, which.head, which.block
    seen = u32(cuda.ballot_sync(ALL_LANES, kind != 0))
    every_tile = u32(cuda.ballot_sync(ALL_LANES, kind == 3))
    before = i32(cuda.popc(i32(seen & u32(u32(u32(1) << u32(lane)) - u32(1)))))
    if kind != 0:
        own = tiles[index(b0), index(b1), index(head), index(block)]
        own[index(1 + count + before)] = i32(2 * (first + lane) + kind // 2)
    if bits.shape[4] != 0 and lane == 0:
        of_block = bits[index(b0), index(b1), index(head), index(block)]
        of_block[index(first // WARP * 2)] = seen
        of_block[index(first // WARP * 2 + 1)] = every_tile
    return i32(count + i32(cuda.popc(i32(seen))))


def build(options, block_m, block_n, width, transposed):
    """Kernel ``tile_lists(tiles, bits, extras, nq, nk, low, high)``: a block of 32 warps makes a
    list of `tiles`, and its tiles' `bits`, if wanted, uint32 (b0, b1, heads, blocks, 2 words): of
    32 tiles, those in which something may be seen, and those that are visible as a whole.

    width : bytes of a row of the mask that are read at once.
    """
    BLOCK_M, BLOCK_N, WIDTH, TRANSPOSED = block_m, block_n, width, transposed
    RUNS, WORDS, HELD = block_n // width, max(1, width // 4), BATCH * max(1, width // 4)
    ONES = 0x01010101 if width > 1 else 1  # True in every byte
    sequence_of = build_sequence(options)
    fetch = ptx.fetch(WORDS)

    @inline
    def read_run(n, x):
        number = i32(x.number + n * WARP)
        i, j = i32(number // RUNS), i32(number % RUNS * WIDTH)
        there = u32(1) if i < x.rows and j < x.cols else u32(0)
        address = u64(x.base + u64(i64(i) * x.row + i64(j) * x.col))
        if WIDTH > 1:
            fetch(x.registers, i32(n * WORDS), address, there)
        else:
            x.registers[n] = ptx.fetch_byte(address, there)

    read_runs = ptx.repeated(BATCH, read_run)

    @inline
    def read(registers, head, row0, col0, rows, cols):
        """What this lane's part of a tile has."""
        row, col = i64(head.strides[0]), i64(head.strides[1])
        base = u64(ptx.global_address(head) + u64(i64(row0) * row + i64(col0) * col))
        rows = i32(1) if row == 0 else rows  # each is the same
        some, every = u32(0), u32(ONES)
        for number in range(i32(cuda.threadIdx.x % WARP), rows * RUNS, WARP * BATCH):
            read_runs(MaskRows(registers, base, row, col, rows, cols, i32(number)))
            for n in range(BATCH):
                run = i32(number + n * WARP)
                there = run // RUNS < rows and run % RUNS * WIDTH < cols
                for word in range(WORDS):
                    x = registers[n * WORDS + word]
                    some = u32(some | x)
                    every = u32(every & x) if there else every
        return Found(some, every)

    def tile_lists(tiles, bits, extras, nq, nk, low, high):
        kinds = cuda.shared.array((2, WARP), i32)  # 0 hidden, 1 seen, 3 as a whole
        registers = cuda.local.array(HELD, u32)
        number, warp = u32(cuda.blockIdx.x), i32(cuda.threadIdx.x // WARP)
        which = which_list(number, tiles.shape)
        b0, b1, head, block = which.b0, which.b1, which.head, which.block
        sequence = sequence_of(extras, b0, b1, nq, nk)
        queries, keys = i32(sequence.queries), i32(sequence.keys)
        low, high = i32(low + sequence.shift), i32(high + sequence.shift)
        mask_head = extras.mask[index(b0), index(b1), index(head)]
        count, slot = i32(0), i32(0)
        for first in range(0, i32(tiles.shape[4]) - 1, WARP):
            # each warp a tile
            across = i32(first + warp)
            row0 = i32((across if TRANSPOSED else i32(block)) * BLOCK_M)
            col0 = i32((i32(block) if TRANSPOSED else across) * BLOCK_N)
            row1 = min(i32(row0 + BLOCK_M), queries)
            start, stop = mask.kv_range(row0, row1, keys, low, high)
            found = Found(u32(0), u32(0))
            if row0 < queries and col0 < stop and col0 + BLOCK_N > start and start < stop:
                found = read(registers, mask_head, row0, col0, i32(row1 - row0), i32(keys - col0))
            some = cuda.any_sync(ALL_LANES, found.some != u32(0))
            every = cuda.all_sync(ALL_LANES, found.all == u32(ONES))
            inside = row0 + BLOCK_M <= queries and col0 + BLOCK_N <= keys
            clear = inside and mask.all_visible(row0, row1, col0, col0 + BLOCK_N, low, high)
            kind = i32(0)
            if some:
                kind = i32(3) if every and clear else i32(1)
            kinds[slot, warp] = kind
            cuda.syncthreads()  # every warp's kind is there
            if warp == 0:  # each lane a tile
                kind = kinds[slot, i32(cuda.threadIdx.x)]
                count = append(tiles, bits, which, first, kind, count)
            slot = i32(1 - slot)
        if cuda.threadIdx.x == 0:
            tiles[index(b0), index(b1), index(head), index(block), 0] = count

    lists, words = array(types.int32, 5), array(types.uint32, 5)
    signature = types.void(lists, words, extras_type(options), *[types.int64] * 4)
    return tile_lists, signature, {"launch_bounds": (WARP * WARP, 1)}


def build_order(share, threads):
    """Kernel ``order(bits, order, extras)``: who adds to dQ before whom. One thread per group of
    `share` neighbouring blocks of queries.

    bits : of the tiles of each block of keys, as the kernel above makes them.
    order : int32 (b0, b1, heads, blocks of keys + 1, groups): how many blocks of keys before that
        one see something of the group, and, from bit FIRST on, for each of its blocks whether
        none of them sees it.
    """
    SHARE, GROUP, THREADS = share, (1 << share) - 1, threads

    def order_of_blocks(bits, order, extras):
        words = cuda.local.array(BLOCKS_AT_ONCE, u32)  # registers
        number = u32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        groups, heads, b1s = u32(order.shape[4]), u32(order.shape[2]), u32(order.shape[1])
        group, number = index(number % groups), u32(number // groups)
        head, number = index(number % heads), u32(number // heads)
        b0, b1 = index(number // b1s), index(number % b1s)
        if number < u32(order.shape[0]) * b1s:
            word, shift = index(group * SHARE // WARP * 2), u32(group * SHARE % WARP)
            count, some, last = i32(0), u32(0), i32(order.shape[3]) - 1
            for first in range(0, last + 1, BLOCKS_AT_ONCE):
                for n in range(BLOCKS_AT_ONCE):
                    words[n] = u32(0)
                    if first + n < last:
                        words[n] = bits[b0, b1, head, index(first + n), word]
                for n in range(BLOCKS_AT_ONCE):
                    if first + n <= last:
                        none = u32(u32(u32(GROUP) & u32(~some)) << u32(FIRST))
                        order[b0, b1, head, index(first + n), group] = i32(count + i32(none))
                    seen = u32(words[n] >> shift) & u32(GROUP)
                    count = i32(count + 1) if seen != u32(0) else count
                    some = u32(some | u32(seen))

    counts = array(types.int32, 5)
    signature = types.void(array(types.uint32, 5), counts, types.Tuple(()))
    return order_of_blocks, signature, {"launch_bounds": (threads, 1)}


@inline
def put_in_queue(tiles, queue, number):
    """A warp puts the block of the list of that number where it belongs in its head's queue."""
    lane, which = i32(cuda.threadIdx.x % WARP), which_list(number, tiles.shape)
    b0, b1, head, block = which.b0, which.b1, which.head, i32(which.block)
    if b0 < u32(tiles.shape[0]):
        of_head = tiles[index(b0), index(b1), index(head)]
        own, before, blocks = of_head[index(block), 0], i32(0), i32(tiles.shape[3])
        for first in range(0, blocks, WARP):
            other, ahead = i32(first + lane), False
            if other < blocks:
                count = of_head[index(other), 0]
                ahead = count > own or (count == own and other < block)
            before = i32(before + i32(cuda.popc(i32(cuda.ballot_sync(ALL_LANES, ahead)))))
        if lane == 0:
            queue[index(b0), index(b1), index(head), 0, index(before)] = block
            if number == u32(0):
                queue[0, 0, 0, 0, index(blocks)] = i32(0)


def build_queue(threads):
    """Kernel ``queue(tiles, queue, extras)``: which blocks are worked on first: those with the
    longest lists. One warp per list.

    queue : int32 (b0, b1, heads, 1, blocks + 1): numbers of blocks; and, after those of the first
        head, how many work items have been taken.
    """
    WARPS = threads // WARP

    def queue_of_blocks(tiles, queue, extras):
        warp = i32(cuda.threadIdx.x // WARP)
        put_in_queue(tiles, queue, u32(i32(cuda.blockIdx.x) * WARPS + warp))

    lists = array(types.int32, 5)
    signature = types.void(lists, lists, types.Tuple(()))
    return queue_of_blocks, signature, {"launch_bounds": (threads, 1)}


@inline
def queued(queue, b0, b1, head, block):
    """Which block of a head comes at that place; packed sequences have places beyond blocks."""
    of_head = queue[index(b0), index(b1), index(head), 0]
    if u32(block) < u32(of_head.shape[0] - 1):
        return u32(of_head[index(block)])
    return u32(block)


@inline
def take(queue):
    """How many work items had been taken from it before this one."""
    last = u64(queue.shape[4] - 1)
    return ptx.next_number(u64(ptx.global_address(queue) + u64(4) * last))


@inline
def count_before(order):
    """How many blocks of keys come before one, of its word of the order."""
    return i32(order & ((1 << FIRST) - 1))


@inline
def is_first(order, number):
    """True if none of them sees the group's block of queries of this number."""
    return u32(u32(order) >> u32(FIRST + number)) & u32(1) != u32(0)


class Look(NamedTuple):
    """Whether all of a tile is hidden, and whether all of it is visible."""

    hidden: bool
    whole: bool


@inline
def look(bits, tile):
    """The `Look` of a tile, of its block's bits."""
    word, bit = i32(tile // WARP * 2), u32(tile % WARP)
    seen, whole = u32(bits[index(word)] >> bit), u32(bits[index(word + 1)] >> bit)
    return Look(u32(seen & u32(1)) == u32(0), u32(whole & u32(1)) != u32(0))


@inline
def length(address):
    """Of a list."""
    return i32(ptx.fetch_word(address))


@once
def build_access(masked):
    """``list_of(extras, b0, b1, head, block)``: the address of a list; ``entry_of(address,
    number)``: the `Entry` of that number in it. Unless `masked` all tiles are listed, none of them
    as whole.
    """
    MASKED = masked

    @inline
    def list_of(extras, b0, b1, head, block):
        if MASKED:
            return ptx.global_address(extras.tiles[b0, b1, head, block])
        return u64(0)

    @inline
    def entry_of(address, number):
        if MASKED:
            word = ptx.fetch_word(u64(address + u64(i64(number + 1) * 4)))
            return Entry(i32(u32(word >> u32(1))), u32(word & u32(1)) != u32(0))
        return Entry(number, False)

    return list_of, entry_of
