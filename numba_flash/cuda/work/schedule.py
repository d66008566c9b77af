"""Which piece of the problem a block works on that takes several, one after the other: the
numbering of work items, on the device. `numba_flash.cuda.work.grid` counts them on the host.
"""

from typing import NamedTuple

from numba_flash import mask
from numba_flash.cuda.runtime.lang import cuda, device, i32, i64, inline, once, types, u32
from numba_flash.cuda.work import tile_lists
from numba_flash.cuda.work.row_blocks import packed_row_block
from numba_flash.cuda.work.sequence import build_sequence


class Item(NamedTuple):
    """A work item of a persistent block: some rows of a head, and the tiles of columns that they
    see. All are int32.

    Attributes
    ----------
    b0, b1, head, row0 : int
        Where its rows are; row0 counts from the first row of the sequence.
    rows_begin, rows, columns_begin, columns, low, high, invalid : int
        Its sequence (see `numba_flash.cuda.work.sequence.Sequence`), and the band there. Rows are
        queries, or keys if transposed.
    first, count, kv_split : int
        First tile of columns, how many there are, and which part of all that is.
    """

    b0: int
    b1: int
    head: int
    row0: int
    rows_begin: int
    rows: int
    columns_begin: int
    columns: int
    low: int
    high: int
    invalid: int
    first: int
    count: int
    kv_split: int


class RowBlock(NamedTuple):
    """A row block of queries, by its number among all.

    Attributes
    ----------
    b0, b1, head : int
        Where it is.
    memory_row, row0 : int
        Its first row in the arrays, and in its sequence.
    queries, keys, shift, invalid : int
        Of its sequence, see `numba_flash.cuda.work.sequence.Sequence`.
    """

    b0: int
    b1: int
    head: int
    memory_row: int
    row0: int
    queries: int
    keys: int
    shift: int
    invalid: bool


@once
def build_rows(options, block_m):
    """``rows_of(number, extras, shape, nk)``: the `RowBlock` of a number, in arrays (b0, b1, heads,
    nq, ...) of that shape.

    Numbers are ``((b0 * B1 + b1) * heads + head) * blocks + block``, and every block has BLOCK_M
    rows, full or not, so that it begins at a multiple of 16 bytes wherever its sequence begins;
    packed sequences count as in `packed_row_block`.
    """
    BLOCK_M, SEQUENCES, PACKED = block_m, options.sequences, options.packed
    sequence_of = build_sequence(options)

    @device
    def rows_of(number, extras, shape, nk):
        q0, queries, keys = i64(0), i64(shape[3]), i64(nk)
        shift, invalid = i64(0), False
        if PACKED:
            b0, b1, head, block = packed_row_block(number, extras.q_lengths, shape[3], BLOCK_M)
        else:
            blocks = (shape[3] + BLOCK_M - 1) // BLOCK_M
            block, head = number % blocks, number // blocks
            b1, head = head // shape[2], head % shape[2]
            b0, b1 = b1 // shape[1], b1 % shape[1]
        if SEQUENCES:
            sequence = sequence_of(extras, b0, b1, shape[3], nk)
            q0, queries, keys = sequence.q0, sequence.queries, sequence.keys
            shift, invalid = sequence.shift, sequence.invalid
        if PACKED:
            b1 = i64(0)
        row0 = block * BLOCK_M
        return RowBlock(b0, b1, head, q0 + row0, row0, queries, keys, shift, invalid)

    return rows_of


@once
def build_first_block(packed, block_m):
    """``first_block(b0, b1, head, q0, shape)``: number of the first row block of a head, or of a
    packed sequence there, from q0 on.

    `shape` is (b0, b1, heads, row blocks times their rows); numbers are those of `build_rows`.
    """
    BLOCK_M, PACKED = block_m, packed

    @inline
    def first_block(b0, b1, head, q0, shape):
        of_sequence = i32(0)
        if PACKED:
            of_sequence, b1 = i32(q0 // BLOCK_M + b1), i32(0)
        heads = i32((b0 * i32(shape[1]) + b1) * i32(shape[2]) + head)
        return i32(of_sequence + heads * i32(shape[3] // BLOCK_M))

    return first_block


@device
def zigzag(turn, blocks):
    """Number of this block's work item in a turn: the blocks of the grid take items in turns, every
    other turn in reverse.

    Where items come longest first, what a block gets more of in one turn it gets less of in the
    next.
    """
    block = types.int32(cuda.blockIdx.x)
    return types.int32(turn * blocks + (blocks - 1 - block if turn % 2 else block))


@device
def serpentine_block(place, blocks, serpentine):
    """The block of a head that comes in this place: in its first, third, ... swing the last block
    comes first, in the others the first (and these go upward: `walk_backward.goes_upward`).
    """
    number = types.uint32(place // serpentine)
    if number % types.uint32(2) == types.uint32(1):
        return place
    begin = types.uint32(number * serpentine)
    return types.uint32(
        begin + min(types.uint32(begin + serpentine), blocks) - types.uint32(1) - place
    )


@once
def build_item(
    options, banded, kv_splits, block_m, block_n, transposed=False, queued=False, upward=False
):
    """``item(index, shape, extras, sizes)``: the work `Item` of a number.

    `shape` is (_, b1, heads, rows); `sizes` has the fields low, high, columns, parts, section and
    b0. Neighbours are row blocks of one head. With a band, where blocks differ in length, heads
    come in sections, and within one all heads' last blocks first: with a section of a few turns of
    the grid, `zigzag` gives everyone the same work, and keys are read again while they are in the
    cache. With `kv_splits` each of several parts gets its share of the tiles. There is always a
    tile, if only one in which all is hidden. If `transposed`, queries and keys change places, and
    the band too, and the first blocks come first, always in sections. If `queued`, blocks of a head
    come as its queue says (`numba_flash.cuda.work.tile_lists`), of a group as that of its first
    head. If `upward`, `sizes` has a field of that name: of so many items, the first, last blocks
    come first; and a field `serpentine`: if not 0, they come as `serpentine_block` says.
    """
    BLOCK_M, BLOCK_N, PACKED, SEQUENCES = block_m, block_n, options.packed, options.sequences
    IN_SECTIONS, KV_SPLITS, TRANSPOSED = banded or transposed, kv_splits, transposed
    QUEUED, UPWARD, LAST_FIRST = queued, upward, not transposed and not queued
    sequence_of = build_sequence(options)

    @inline
    def item(index, shape, extras, sizes):
        heads, all_rows, all_columns = u32(shape[2]), i32(shape[3]), i32(sizes.columns)
        low, high = i32(sizes.low), i32(sizes.high)
        index, part = u32(index), u32(0)
        if KV_SPLITS:
            part, index = u32(index % u32(sizes.kv_splits)), u32(index // u32(sizes.kv_splits))
        if PACKED:
            lengths = extras.kv_lengths if TRANSPOSED else extras.q_lengths
            b0, b1, head, block = packed_row_block(index, lengths, all_rows, BLOCK_M)
        else:
            blocks = u32((all_rows + BLOCK_M - 1) // BLOCK_M)
            if IN_SECTIONS:
                section, pairs = u32(sizes.section), u32(u32(sizes.b0) * u32(shape[1]) * heads)
                number = u32(index // u32(section * blocks))
                within = u32(index - number * section * blocks)
                size = min(section, u32(pairs - number * section))
                block, pair = u32(within // size), u32(number * section + within % size)
                if UPWARD and sizes.serpentine > 0:
                    block = serpentine_block(block, blocks, u32(sizes.serpentine))
                elif index < u32(sizes.upward) if UPWARD else LAST_FIRST:
                    block = blocks - u32(1) - block
            else:
                block, pair = u32(index % blocks), u32(index // blocks)
            b, head = u32(pair // heads), u32(pair % heads)
            b0, b1 = u32(b // u32(shape[1])), u32(b % u32(shape[1]))
        if QUEUED:
            of_head = u32(head * u32(sizes.group if TRANSPOSED else 1))
            block = tile_lists.queued(extras.queue, b0, b1, of_head, block)
        rows_begin, columns_begin, invalid = i32(0), i32(0), i32(0)
        rows, columns = all_rows, all_columns
        if SEQUENCES:
            if TRANSPOSED:
                sequence = sequence_of(extras, b0, b1, all_columns, all_rows)
                rows_begin, rows = sequence.k0, sequence.keys
                columns_begin, columns = sequence.q0, sequence.queries
                low, high = low - sequence.shift, high - sequence.shift
            else:
                sequence = sequence_of(extras, b0, b1, all_rows, all_columns)
                rows_begin, rows = sequence.q0, sequence.queries
                columns_begin, columns = sequence.k0, sequence.keys
                low, high = low + sequence.shift, high + sequence.shift
            invalid = i32(1 if sequence.invalid else 0)
        row0 = i32(block * BLOCK_M)
        stop_row = min(row0 + BLOCK_M, i32(rows))
        start, stop = mask.kv_range(row0, stop_row, i32(columns), i32(low), i32(high))
        first, count = i32(0), i32(0)
        if start < stop and row0 < rows:
            first = i32(start // BLOCK_N)
            count = i32((stop + BLOCK_N - 1) // BLOCK_N) - first
            if KV_SPLITS:
                share = (count + i32(sizes.kv_splits) - 1) // i32(sizes.kv_splits)
                first, count = first + part * share, max(0, min(share, count - part * share))
        if count == 0:
            columns, count = i32(0), i32(1)  # one tile in which everything is hidden
        return Item(
            i32(b0), i32(b1), i32(head), row0,
            i32(rows_begin), i32(rows), i32(columns_begin), i32(columns),
            i32(low), i32(high), invalid,
            i32(first), i32(count), i32(part),
        )  # fmt: skip

    return item
