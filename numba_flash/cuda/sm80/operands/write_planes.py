"""Rows of a head in float32 on their way from shared memory to planes of float16 in memory, and
what is made of them on this way: for each row of dO its delta and a bound of its dP, for each row
of Q what its lse is too small by.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, f64, i32, inline, once, u32, u64
from numba_flash.cuda.score.fragment import ALL_LANES
from numba_flash.cuda.sm80.bias_gradient.load_dq_dbias import plus
from numba_flash.cuda.sm80.short_heads.head_planes import CHUNK, WORD
from numba_flash.cuda.sm80.tiles import padded, pitch

CHUNK_BYTES = WORD * CHUNK


class PlaneRows(NamedTuple):
    """Rows of an array on their way from shared memory to planes.

    Attributes
    ----------
    tile : int
        Where they are.
    centre : tuple of four float32
        Of this thread's columns, of what belongs to these rows.
    taken : bool
        It is not 0.
    power : float32
        What they are multiplied by.
    to : array
        (n, columns), their planes; of O, where they are.
    count : int
        So many.
    made : int
        Where a number for each of them goes, in shared memory; of rows of dO two.
    others : array
        Chunks of rows of O.
    factor : float32
        Of that number.
    most : array
        Of columns of this thread: the largest number of V.
    """

    tile: int
    centre: Any
    taken: bool
    power: float
    to: Any
    count: int
    made: int
    others: Any
    factor: float
    most: Any


class Writers(NamedTuple):
    """Functions of `PlaneRows`; see `build_writers`."""

    fetch: Any
    keys: Any
    gradients: Any
    queries: Any


@once
def build_writers(rows, columns, threads):
    """`Writers` of a tile of so many rows. ``fetch(rows)``: chunks of O into registers;
    ``keys(rows)``: planes of K or V without their centre; ``gradients(rows)``: those of dO, with
    each row's delta, and the bound behind all of these; ``queries(rows)``: those of Q.
    """
    CHUNKS, PITCH, COLUMNS = padded(columns) // CHUNK, pitch(2 * padded(columns)), columns
    STEP, PLANE = threads // CHUNKS, 2 * padded(columns)
    STEPS, FOLDS, BOUNDS = -(-rows // STEP), (CHUNKS - 1).bit_length(), WORD * rows
    fetch_four = ptx.fetch(4)

    @inline
    def mine():
        """The row and the chunk that this thread begins with."""
        thread = ptx.bounded_thread_here()
        return i32(thread // CHUNKS), i32(thread % CHUNKS)

    @inline
    def fetch_chunk(step, t):
        row, chunk = mine()
        there = row + step * STEP < t.count and chunk * CHUNK < COLUMNS
        first = plus(ptx.global_address(t.to), i32(row + step * STEP), t.to.strides[0])
        at = u64(first + u64(u32(chunk * CHUNK_BYTES)))
        fetch_four(t.others, i32(CHUNK * step), at, u32(1) if there else u32(0))

    fetch_chunks = ptx.repeated(STEPS, fetch_chunk)

    @inline
    def put(row, chunk, values, t):
        """Planes of a chunk, in memory."""
        a, b = values[0] * t.power, values[1] * t.power
        y, z = values[2] * t.power, values[3] * t.power
        high0, high1 = ptx.pack_float16(a, b), ptx.pack_float16(y, z)
        a, b = a - ptx.unpack_float16(high0), b - ptx.unpack_float16_high(high0)
        y, z = y - ptx.unpack_float16(high1), z - ptx.unpack_float16_high(high1)
        first = plus(ptx.global_address(t.to), row, t.to.strides[0])
        at = u64(first + u64(u32(chunk * (CHUNK_BYTES // 2))))
        ptx.store_global(at, (high0, high1))
        ptx.store_global(u64(at + u64(PLANE)), (ptx.pack_float16(a, b), ptx.pack_float16(y, z)))

    @inline
    def read(row, chunk, t):
        at = u32(t.tile + u32(row * PITCH + chunk * CHUNK_BYTES))
        return ptx.load_shared_four(at)

    @inline
    def write_chunk(step, t):
        row, chunk = mine()
        row = i32(row + step * STEP)
        if row < t.count:
            x, c = read(row, chunk, t), t.centre
            x = x[0] - c[0], x[1] - c[1], x[2] - c[2], x[3] - c[3]
            put(row, chunk, x, t)
            for e in range(CHUNK):
                t.most[e] = max(t.most[e], abs(x[e]))

    @inline
    def write_do_chunk(step, t):
        row, chunk = mine()
        row, total, bound = i32(row + step * STEP), f32(0), f32(0)
        if row < t.count:
            x = read(row, chunk, t)
            put(row, chunk, x, t)
            for e in range(CHUNK):
                total += x[e] * (ptx.as_float32(t.others[CHUNK * step + e]) - t.centre[e])
                bound += abs(x[e] * t.power) * t.most[e]
        for fold in range(FOLDS):
            total += cuda.shfl_xor_sync(ALL_LANES, total, 1 << fold)
            bound += cuda.shfl_xor_sync(ALL_LANES, bound, 1 << fold)
        if chunk == 0 and row < t.count:
            to = u32(t.made + u32(row * WORD))
            ptx.store_shared_vector(to, (total * t.power * t.factor,))
            ptx.store_shared_vector(u32(to + u32(BOUNDS)), (bound,))

    @inline
    def write_q_chunk(step, t):
        row, chunk = mine()
        row, total = i32(row + step * STEP), f64(0)
        if row < t.count:
            x = read(row, chunk, t)
            put(row, chunk, x, t)
            if t.taken:
                for e in range(CHUNK):  # of all scores of the row: no average makes it smaller
                    total += f64(x[e]) * f64(t.centre[e])
        if t.taken:
            for fold in range(FOLDS):
                total += cuda.shfl_xor_sync(ALL_LANES, total, 1 << fold)
        if chunk == 0 and row < t.count:
            shift = f32(f64(t.factor) * total)
            ptx.store_shared_vector(u32(t.made + u32(row * WORD)), (shift,))

    write, write_do = ptx.repeated(STEPS, write_chunk), ptx.repeated(STEPS, write_do_chunk)
    write_q = ptx.repeated(STEPS, write_q_chunk)
    return Writers(fetch_chunks, write, write_do, write_q)
