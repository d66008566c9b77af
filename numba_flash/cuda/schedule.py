"""Which piece of the problem a block works on."""

from numba import cuda, njit
from numba.cuda import types

from numba_flash import mask


@njit
def work_item(index, blocks, heads, batch1):
    """(batch0, batch1, head, row block) of a one-dimensional grid; blocks of one head are neighbours, the last block first.

    With a causal mask the last rows see the most keys, so the longest work starts first.
    """
    block = blocks - 1 - index % blocks
    index //= blocks
    head = index % heads
    index //= heads
    return index // batch1, index % batch1, head, block


@cuda.jit(device=True)
def packed_item(index, offsets, total, block):
    """(0, sequence, head, row block) for sequences that lie one after the other in `total` rows, with boundaries known to the device alone.

    Sequence s owns the numbers from ``offsets[s] // block + s`` on: at least as many as it has blocks, at most one more.
    """
    sequences = offsets.shape[0] - 1
    numbers = types.uint32(total // block + sequences)
    head, number = types.int64(types.uint32(index) // numbers), types.int64(types.uint32(index) % numbers)
    first, last = 0, sequences - 1
    while first < last:  # the last sequence that begins at or before `number`
        middle = (first + last + 1) // 2
        if types.int64(offsets[middle]) // block + middle <= number:
            first = middle
        else:
            last = middle - 1
    return 0, first, head, max(number - (types.int64(offsets[first]) // block + first), 0)


def build_first_block(packed, block_m):
    """``first_block(b0, b1, head, q0, shape)``: number of the first row block of a head, or of a packed sequence there, from q0 on.

    `shape` is (b0, b1, heads, row blocks times their rows); see `numba_flash.cuda.rows_sm90`.
    """
    BLOCK_M, PACKED, i32 = block_m, packed, types.int32

    @cuda.jit(device=True, forceinline=True)
    def first_block(b0, b1, head, q0, shape):
        of_sequence = i32(0)
        if PACKED:
            of_sequence, b1 = i32(q0 // BLOCK_M + b1), i32(0)
        heads = i32((b0 * i32(shape[1]) + b1) * i32(shape[2]) + head)
        return i32(of_sequence + heads * i32(shape[3] // BLOCK_M))

    return first_block


@cuda.jit(device=True)
def snake(turn, blocks):
    """Number of this block's work item in a turn: the blocks of the grid take items in turns, every other turn in reverse.

    Where items come longest first, what a block gets more of in one turn it gets less of in the next.
    """
    block = types.int32(cuda.blockIdx.x)
    return types.int32(turn * blocks + (blocks - 1 - block if turn % 2 else block))


def build_item(options, banded, split, block_m, block_n, sequence, offsets, transposed=False):
    """``item(index, shape, extras, sizes)``: work item of a number, as (b0, b1, head, row0), (q0, queries, k0, keys, low, high, impossible)
    of its sequence, and (first tile of keys, their number, part).

    `shape` is (_, b1, heads, nq), `sizes` (items, low, high, nk, parts, _, section, b0). Neighbours are row blocks of one head. With
    a band, where blocks differ in length, heads come in sections, and within one all heads' last blocks first: with a section of a few
    turns of the grid, `snake` gives everyone the same work, and keys are read again while they are in the cache. With `split` each of
    several parts gets its share of the tiles. There is always a tile, if only one in which all is hidden. If `transposed`, queries and keys
    change places, `offsets` and the band too, and the first blocks come first, always in sections.
    """  # fmt: skip
    BLOCK_M, BLOCK_N, PACKED, SEQUENCES, OFFSETS, TRANSPOSED = block_m, block_n, options.packed, options.sequences, offsets, transposed
    IN_SECTIONS, SPLIT, i32, u32 = banded or transposed, split, types.int32, types.uint32

    @cuda.jit(device=True, forceinline=True)
    def item(index, shape, extras, sizes):
        heads, nq, nk, low, high = u32(shape[2]), i32(shape[3]), i32(sizes[3]), i32(sizes[1]), i32(sizes[2])
        index, part = u32(index), u32(0)
        if SPLIT:
            part, index = u32(index % u32(sizes[4])), u32(index // u32(sizes[4]))
        if PACKED:
            b0, b1, head, block = packed_item(index, extras[OFFSETS], nq, BLOCK_M)
        else:
            blocks = u32((nq + BLOCK_M - 1) // BLOCK_M)
            if IN_SECTIONS:
                section, pairs = u32(sizes[6]), u32(u32(sizes[7]) * u32(shape[1]) * heads)
                number = u32(index // u32(section * blocks))
                within, size = u32(index - number * section * blocks), min(section, u32(pairs - number * section))
                block, pair = u32(within // size), u32(number * section + within % size)
                if not TRANSPOSED:
                    block = blocks - u32(1) - block
            else:
                block, pair = u32(index % blocks), u32(index // blocks)
            b, head = u32(pair // heads), u32(pair % heads)
            b0, b1 = u32(b // u32(shape[1])), u32(b % u32(shape[1]))
        q0, k0, queries, keys, impossible = i32(0), i32(0), nq, nk, i32(0)
        if SEQUENCES:
            if TRANSPOSED:
                k0, keys, q0, queries, move, factor = sequence(extras, b0, b1, nk, nq)
                move = -move
            else:
                q0, queries, k0, keys, move, factor = sequence(extras, b0, b1, nq, nk)
            low, high, impossible = low + move, high + move, i32(1 if factor != factor else 0)
        row0 = i32(block * BLOCK_M)
        start, stop = mask.kv_range(row0, min(row0 + BLOCK_M, i32(queries)), i32(keys), i32(low), i32(high))
        first, count = i32(0), i32(0)
        if start < stop and row0 < queries:
            first = i32(start // BLOCK_N)
            count = i32((stop + BLOCK_N - 1) // BLOCK_N) - first
            if SPLIT:
                share = (count + i32(sizes[4]) - 1) // i32(sizes[4])
                first, count = first + part * share, max(0, min(share, count - part * share))
        if count == 0:
            keys, count = i32(0), i32(1)  # one tile in which everything is hidden
        where = (i32(b0), i32(b1), i32(head), row0)
        return where, (i32(q0), i32(queries), i32(k0), i32(keys), i32(low), i32(high), impossible), (i32(first), i32(count), i32(part))

    return item
