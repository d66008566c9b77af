"""Which rows of the problem a block works on, where each block has one block of rows.
`numba_flash.cuda.work.grid` counts them on the host.
"""

from typing import NamedTuple

from numba import njit

from numba_flash.cuda.runtime.lang import device, i32, i64, inline, once, u32

SECTION_BYTES = 2**25  # of keys and values that blocks of several heads read at the same time


class RowBlock(NamedTuple):
    """Batch element (for packed sequences 0 and the sequence), head, and the number of a block of
    rows.
    """

    b0: int
    b1: int
    head: int
    block: int


@njit
def row_block(index, blocks, heads, batch1):
    """The `RowBlock` of a number of a one-dimensional grid; blocks of one head are neighbours, the
    last block first.

    With a causal mask the last rows see the most keys, so the longest work starts first.
    """
    block = blocks - 1 - index % blocks
    index //= blocks
    head = index % heads
    index //= heads
    return RowBlock(index // batch1, index % batch1, head, block)


@njit
def row_block_in_sections(index, blocks, section, pairs, heads, batch1):
    """The same of u32 numbers, where `section` of all `pairs` of batch element and head come
    together, the last blocks of all of them first.
    """
    number = u32(index // u32(section * blocks))
    within = u32(index - u32(u32(number * section) * blocks))
    size = min(section, u32(pairs - u32(number * section)))
    block, pair = u32(within // size), u32(u32(number * section) + within % size)
    b, head = u32(pair // heads), u32(pair % heads)
    return RowBlock(i32(b // batch1), i32(b % batch1), i32(head), i32(blocks - u32(1) - block))


@inline
def row_block_of_decode(index, blocks, heads, batch1):
    """The same of u32 numbers, the first block first. Divisions take long where there is little
    else to do: those by 1, and of numbers that are smaller than what divides them, are left out.
    """
    pair, block, b, head = index, u32(0), u32(0), index
    if blocks > 1:
        pair = u32(index // blocks)
        block = u32(index - u32(pair * blocks))
        head = pair
    if pair >= heads:
        b = u32(pair // heads)
        head = u32(pair - u32(b * heads))
    b0, b1 = u32(0), b
    if b >= batch1:
        b0 = u32(b // batch1)
        b1 = u32(b - u32(b0 * batch1))
    return RowBlock(i32(b0), i32(b1), i32(head), i32(block))


@device
def packed_row_block(index, offsets, total, block):
    """The same for sequences that lie one after the other in `total` rows, with boundaries known to
    the device alone.

    Sequence s owns the numbers from ``offsets[s] // block + s`` on: at least as many as it has
    blocks, at most one more.
    """
    sequences = offsets.shape[0] - 1
    numbers = u32(total // block + sequences)
    head, number = i64(u32(index) // numbers), i64(u32(index) % numbers)
    first, last = 0, sequences - 1
    while first < last:  # the last sequence that begins at or before `number`
        middle = (first + last + 1) // 2
        if i64(offsets[middle]) // block + middle <= number:
            first = middle
        else:
            last = middle - 1
    return RowBlock(0, first, head, max(number - (i64(offsets[first]) // block + first), 0))


@once
def build_row_block(options, transposed, block_m):
    """``row_block_of(index, extras, rows, heads, batch1)``: the `RowBlock` of queries, or of keys
    if `transposed`, of a number.
    """
    PACKED, TRANSPOSED, BLOCK_M = options.packed, transposed, block_m

    @device
    def row_block_of(index, extras, rows, heads, batch1):
        if PACKED:
            if TRANSPOSED:
                return packed_row_block(index, extras.kv_lengths, rows, BLOCK_M)
            return packed_row_block(index, extras.q_lengths, rows, BLOCK_M)
        return row_block(index, (rows + BLOCK_M - 1) // BLOCK_M, heads, batch1)

    return row_block_of


@once
def build_query_block(options, banded, block_m, key_bytes):
    """``query_block_of(index, extras, shape, nk)``: the `RowBlock` of queries of a number, in
    arrays (b0, b1, heads, nq, ...) of that shape.

    With a band, where blocks differ in length, the longest of several heads come first: of as many
    as have their keys and values, of `key_bytes` each, in the cache.
    """
    PACKED, BANDED, BLOCK_M, KEY_BYTES = options.packed, banded, block_m, key_bytes

    @inline
    def query_block_of(index, extras, shape, nk):
        if PACKED:
            return packed_row_block(index, extras.q_lengths, shape[3], BLOCK_M)
        heads, batch1 = u32(shape[2]), u32(shape[1])
        pairs = u32(u32(u32(shape[0]) * batch1) * heads)
        blocks, section = u32(u32(shape[3] + (BLOCK_M - 1)) // u32(BLOCK_M)), u32(1)
        if BANDED:
            most = max(u32(1), u32(u32(SECTION_BYTES // KEY_BYTES) // u32(nk + 1)))
            sections = u32(u32(pairs + most - u32(1)) // most)
            section = u32(u32(pairs + sections - u32(1)) // sections)  # all about the same
        return row_block_in_sections(u32(index), blocks, section, pairs, heads, batch1)

    return query_block_of
