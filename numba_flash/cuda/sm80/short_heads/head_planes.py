"""All rows of a head in float32 on their way to planes of float16
(`numba_flash.cuda.passes.write_planes`), in the shared memory of the block that multiplies them:
they are read from memory once, and nobody writes planes there.

A row of float32 takes the bytes of its two planes, so it becomes them where it is.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.passes.write_planes import (
    FARTHEST,
    INFINITE,
    SAMPLES,
    SIGN,
    TOP,
    power_of_two,
    summary_of,
    warp_maximum,
    warp_minimum,
)
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, u32, u64
from numba_flash.cuda.score import fragment
from numba_flash.cuda.score.fragment import ALL_LANES
from numba_flash.cuda.sm80.bias_gradient.load_dq_dbias import plus
from numba_flash.cuda.sm80.tiles import padded, pitch

CHUNK = 4  # of float32, that a thread has at a time
# Exponents of the largest numbers of q and k and of the scale, together, that joined planes are
# made of (`numba_flash.cuda.ptx.joined_product`): no digit of theirs is worth less than 2^-24,
# 2^-38 of the largest number, which must not make of a score more than IEEE sums are off.
MOST_SCORE = 13
WORD = 4  # bytes


class Extremes(NamedTuple):
    """Of some rows, the bits of the largest number, and of that row whose largest is least, but not
    0.
    """

    most: int
    least: int


class HeadPlanes(NamedTuple):
    """Functions of a block of threads; see `build_head`."""

    extremes: Any
    centre: Any
    split: Any


@inline
def magnitude(x):
    """The bits of ``|x|``, which are in the order of the numbers; those of NaN come last."""
    return i32(ptx.as_uint32(x) & u32(SIGN - 1))


@once
def build_head(rows, columns, threads, place, low=ptx.LOW):
    """`HeadPlanes` of a tile of so many rows, zeros where there is none, each where `place` says:

    ``extremes(tile)``: the `Extremes` of this thread's rows.
    ``centre(tile, to, count, column)``: the median of `column`'s samples of `count` rows, if all
    are on one side of 0, else 0, for one thread to store at `to`.
    ``split(tile, centres, moved, power)``: float32 numbers, without the centres that lie at that
    address if they were `moved`, and times a power of two, become planes, high ones first; low ones
    are `low` times larger.
    """
    COLUMNS = padded(columns)
    PITCH, CHUNKS, PLANE, PLACE = pitch(2 * COLUMNS), COLUMNS // CHUNK, 2 * COLUMNS, place
    STEP, FOLDS, LOW = threads // CHUNKS, (CHUNKS - 1).bit_length(), low
    STEPS, ROWS = -(-rows // STEP), rows
    assert CHUNKS == 1 << FOLDS
    assert CHUNKS <= 8
    assert threads % 32 == 0

    @inline
    def mine(tile):
        """Where this thread's chunk of its first row is."""
        thread = ptx.bounded_thread_here()
        return u32(tile + u32(thread // CHUNKS * PITCH + thread % CHUNKS * (CHUNK * WORD)))

    @inline
    def there(step):
        thread = ptx.bounded_thread_here()
        return thread // CHUNKS < ROWS - step * STEP

    @inline
    def extremes(tile):
        at, most, least = mine(tile), i32(0), i32(INFINITE)
        for step in range(STEPS):
            largest = i32(0)
            if there(step):
                x = ptx.load_shared_four(u32(at + u32(step * (STEP * PITCH))))
                for e in range(CHUNK):
                    largest = max(largest, magnitude(x[e]))
            for fold in range(FOLDS):
                largest = max(largest, cuda.shfl_xor_sync(ALL_LANES, largest, 1 << fold))
            most = max(most, largest)
            least = min(least, largest) if largest > 0 else least
        return Extremes(most, least)

    @inline
    def sample(tile, count, column, s):
        row = PLACE(i32(u32(s * count) // u32(SAMPLES)))
        at = u32(tile + u32(row * PITCH + column * WORD))
        return ptx.as_float32(u32(ptx.load_shared(at)))

    @inline
    def centre(tile, to, count, column):
        below, above, median = 0, 0, f32(0)
        for s in range(SAMPLES):
            x = sample(tile, count, column, s)
            below += 1 if x < f32(0) else 0
            above += 1 if x > f32(0) else 0
        if below == SAMPLES or above == SAMPLES:
            for s in range(SAMPLES):
                x, rank = sample(tile, count, column, s), 0
                for t in range(SAMPLES):
                    y = sample(tile, count, column, t)
                    rank += 1 if y < x or (y == x and t < s) else 0
                if rank == SAMPLES // 2:
                    median = x
        ptx.store_shared_vector(to, (median,))
        return median != f32(0)

    @inline
    def split(tile, centres, moved, power):
        at, chunk = mine(tile), i32(ptx.bounded_thread_here() % CHUNKS)
        c = (f32(0), f32(0), f32(0), f32(0))
        if moved:
            c = ptx.load_shared_four(u32(centres + u32(chunk * (CHUNK * WORD))))
        back = u32(chunk * (CHUNK * WORD - 8))  # from a chunk to its words of 16 bits
        for step in range(STEPS):
            here = u32(at + u32(step * (STEP * PITCH)))
            x = (f32(0), f32(0), f32(0), f32(0))
            if there(step):
                x = ptx.load_shared_four(here)
            cuda.syncwarp()  # all chunks of these rows have been read
            a, b = (x[0] - c[0]) * power, (x[1] - c[1]) * power
            y, z = (x[2] - c[2]) * power, (x[3] - c[3]) * power
            high0, high1 = ptx.pack_float16(a, b), ptx.pack_float16(y, z)
            a, b = a - ptx.unpack_float16(high0), b - ptx.unpack_float16_high(high0)
            y, z = y - ptx.unpack_float16(high1), z - ptx.unpack_float16_high(high1)
            low0 = ptx.pack_float16(a * f32(LOW), b * f32(LOW))
            low1 = ptx.pack_float16(y * f32(LOW), z * f32(LOW))
            if there(step):
                ptx.store_shared_vector(u32(here - back), (high0, high1))
                ptx.store_shared_vector(u32(here - back + u32(PLANE)), (low0, low1))

    return HeadPlanes(extremes, centre, split)


@once
def build_meet(warps):
    """``tell(smem, part, own)``: a warp's share of the `Extremes` of one of several parts, to
    shared memory; ``hear(smem, part)``: its `Summary`, once all warps of the block have told.
    """
    WARPS = warps

    @inline
    def tell(smem, part, own):
        most, least = warp_maximum(own.most), warp_minimum(own.least)
        if cuda.threadIdx.x % 32 == 0:
            at = u32(smem + u32((part * WARPS + cuda.threadIdx.x // 32) * 8))
            ptx.store_shared_vector(at, (u32(most), u32(least)))

    @inline
    def hear(smem, part):
        most, least = i32(0), i32(INFINITE)
        for w in range(WARPS):
            at = u32(smem + u32((part * WARPS + w) * 8))
            most = max(most, ptx.load_shared(at))
            least = min(least, ptx.load_shared(u32(at + u32(WORD))))
        return summary_of(most, least)

    return tell, hear


class HeadRows(NamedTuple):
    """Of a warp's rows of A on their way into registers; see `build_rows`."""

    raw: Any
    x: int
    stride: int
    row: int
    stop: int


@once
def build_rows(m_tiles, head_dim):
    """``load(raw, x, row, stop)``: this lane's numbers of rows of x (n, head_dim), the first of
    which is `row`, in the order of A's fragments, zeros from row `stop` on; ``power_of(raw, up,
    down, most)``: for each of its rows powers of two that bring it near the end of float16, and
    back, and whether one cannot be promised, as if its exponent is more than `most`; ``split(words,
    raw, up)``: planes to be joined, high ones first.
    """
    STEPS, HEAD_DIM = padded(head_dim) // 16, head_dim
    WORDS, ROWS_OF_LANE = 4 * m_tiles * STEPS, 2 * m_tiles
    fetch = ptx.fetch(2)

    @inline
    def load_word(number, t):
        m, step, i = number // (4 * STEPS), number // 4 % STEPS, number % 4
        row = i32(t.row + 16 * m + 8 * (i % 2))
        column = i32(16 * step + 8 * (i // 2) + fragment.first_column())
        there = u32(1) if row < t.stop and column < HEAD_DIM else u32(0)
        at = u64(plus(t.x, row, t.stride) + u64(u32(column * WORD)))
        fetch(t.raw, i32(2 * number), at, there)

    load_all = ptx.repeated(WORDS, load_word)

    @inline
    def load(raw, x, row, stop):
        load_all(HeadRows(raw, ptx.global_address(x), x.strides[0], row, stop))

    @inline
    def power_of(raw, up, down, most):
        flagged = i32(0)
        for r in range(ROWS_OF_LANE):
            largest = i32(0)
            for number in range(WORDS):
                if number // (4 * STEPS) * 2 + number % 2 == r:
                    for e in range(2):
                        largest = max(largest, i32(raw[2 * number + e] & u32(SIGN - 1)))
            for fold in range(2):
                largest = max(largest, cuda.shfl_xor_sync(ALL_LANES, largest, 1 << fold))
            exponent = i32((largest >> 23) - 127)
            far = largest >= INFINITE or exponent > FARTHEST or exponent < -FARTHEST
            if largest == 0 or far:
                exponent = i32(TOP)
            flagged |= i32(1) if largest > 0 and (far or exponent > most) else i32(0)
            up[r], down[r] = power_of_two(i32(TOP - exponent)), power_of_two(i32(exponent - TOP))
        return flagged

    @inline
    def split(words, raw, up):
        for number in range(WORDS):
            factor = up[number // (4 * STEPS) * 2 + number % 2]
            x = ptx.as_float32(raw[2 * number]) * factor
            y = ptx.as_float32(raw[2 * number + 1]) * factor
            high = ptx.pack_float16(x, y)
            x, y = x - ptx.unpack_float16(high), y - ptx.unpack_float16_high(high)
            words[number] = high
            words[WORDS + number] = ptx.pack_float16(x, y)

    return load, power_of, split


@inline
def inverse_power(x):
    """Of a power of two."""
    return ptx.as_float32(u32(u32(254 << 23) - ptx.as_uint32(x)))


# P is 2^RAISED larger where its planes are joined (`numba_flash.cuda.ptx.joined_product`), so that
# low ones of weights of one in thousands have all their digits; one of 2^5 would still be a number.
# The exponent is not where to do that: that of a weight near 1 is near 0, and would be rounded.
RAISED = 10


@once
def build_pack(pairs, low=ptx.LOW):
    """``pack(p, s)``: numbers no larger than a float16 can be, in two planes, high ones first. What
    the high one is off, the low one has, also of numbers that are too small for its digits; it is
    `low` times larger.
    """
    PAIRS, LOW = pairs, low

    @inline
    def pack(p, s):
        for j in range(PAIRS):
            x, y = s[2 * j], s[2 * j + 1]
            high = ptx.pack_float16(x, y)
            x, y = x - ptx.unpack_float16(high), y - ptx.unpack_float16_high(high)
            p[j], p[PAIRS + j] = high, ptx.pack_float16(x * f32(LOW), y * f32(LOW))

    return pack


@inline
def exponent_of(x):
    """Of a float32, so that ``2^e <= |x|``; of a product of powers of two their sum."""
    return i32(u32(ptx.as_uint32(x) & u32(SIGN - 1)) >> u32(23)) - 127
