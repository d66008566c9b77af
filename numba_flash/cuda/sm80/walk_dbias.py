"""On the way of a block that sums the gradient of the bias: tiles of scores that have something
visible, and what belongs to their queries.
"""

from typing import NamedTuple

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.broadcast import Walk, build_coordinates
from numba_flash.cuda.lang import cuda, i32, i64, inline, u32, u64
from numba_flash.cuda.score import Head, Region
from numba_flash.cuda.sequence import build_sequence


class Space(NamedTuple):
    """What a block walks over: its own coordinates and how many there are of each, the end of its
    share of the walk; queries and keys of the longest possible sequence, and the band there.
    """

    own: Walk
    sizes: Walk
    stop: int
    queries: int
    keys: int
    low: int
    high: int


class Step(NamedTuple):
    """A tile of scores on the way: its number, coordinates, head and region; and whether a sequence
    so far was invalid.
    """

    number: int
    walk: Walk
    at: Head
    region: Region
    invalid: bool


def build_find(options, summed, block_m, block_n):
    """``find(step, space, extras)``: the first `Step` from this one on that has something visible;
    ``proceed(step, space, extras)``: the first after this one.
    """
    BLOCK_M, BLOCK_N = block_m, block_n
    _, _, following = build_coordinates(summed)
    sequence_of = build_sequence(options)

    @inline
    def find(step, space, extras):
        number, walk, at = step.number, step.walk, step.at
        region, invalid = step.region, step.invalid
        own, sizes, hidden = space.own, space.sizes, True
        while number < space.stop and hidden:
            b0, b1 = i32(own.b0 + walk.b0), i32(own.b1 + walk.b1)
            row0, col0 = i32((own.i + walk.i) * BLOCK_M), i32((own.j + walk.j) * BLOCK_N)
            sequence = sequence_of(extras, b0, b1, space.queries, space.keys)
            queries, keys, shift = i32(sequence.queries), i32(sequence.keys), i32(sequence.shift)
            low, high = i32(space.low + shift), i32(space.high + shift)
            invalid = invalid or sequence.invalid
            at = Head(b0, b1, i32(b0 * sizes.b1 + b1), i32(own.head + walk.head), sizes.head)
            region = Region(row0, col0, queries, keys, low, high)
            start, stop = mask.kv_range(row0, min(i32(row0 + BLOCK_M), queries), keys, low, high)
            hidden = row0 >= queries or col0 >= stop or col0 + BLOCK_N <= start
            if hidden:
                number, walk = i32(number + 1), following(walk, sizes)
        return Step(number, walk, at, region, invalid)

    @inline
    def proceed(step, space, extras):
        number, walk = i32(step.number + 1), following(step.walk, space.sizes)
        return find(Step(number, walk, step.at, step.region, step.invalid), space, extras)

    return find, proceed


def build_load_rows(threads, block_m, turing):
    """``load_rows(target, rows, step)``: the lse and delta of a tile's queries; zeros beyond what
    there is.
    """
    THREADS, TURING, CHUNKS = threads, turing, block_m // 4

    @inline
    def load_rows(target, rows, step):
        at, row0 = step.at, step.region.row0
        for number in range(i32(cuda.threadIdx.x), 2 * CHUNKS, THREADS):
            which, row = i32(number // CHUNKS), i32(row0 + number % CHUNKS * 4)
            there, to = row < rows.shape[4], u32(target + u32(number * 16))
            source = ptx.global_address(rows[which, at.b0, at.b1, at.head]) + u64(i64(row) * 4)
            if not TURING:
                ptx.copy16(to, u64(source), u32(16) if there else u32(0))
            elif there:
                ptx.store_shared_vector(to, ptx.load_global_words(u64(source)))

    return load_rows
