"""Products of a warp in float64, by what the loops call them, and its fragments on their way to
shared memory and to arrays.

``nt``: A B^T, rows of both run along the sum. ``nn``: A B. ``tn``: A^T B.

A tile's rows follow each other in shared memory, whole times 128 bytes long; the chunk c of 16
bytes of row r lies in the place ``c ^ swizzle(r)``. So all ways to read an operand meet all banks:
four neighbours of each of 4 rows, and as many columns of 4 neighbouring rows, or of rows that are 2
apart.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.ptx import SwizzledRows
from numba_flash.cuda.runtime.lang import i32, i64, inline, once, u32, u64
from numba_flash.cuda.sm80.load import in_order

BYTES = 8  # of an element


@inline
def swizzle(row):
    """What the numbers of a row's chunks are combined with: 0, 4, 2, 6, 4, 0, 6, 2 for rows 0 to
    7.
    """
    return i32((row & 6) ^ (row & 1) << 2)


@once
def build_lane(pitch, apart=1):
    """``along(tile)`` and ``across(tile)``: this lane's address of an operand whose rows in memory
    run along the sum, and of one whose rows are terms of it, of which lanes read some that are so
    far `apart`. ``pair(tile)``: that of two neighbours of a fragment.

    They are computed anew for every product, for registers.
    """
    PITCH, APART = pitch, apart

    @inline
    def along(tile):
        lane = i32(ptx.thread_here() % 32)
        row, term = i32(lane // 4), i32(lane % 4)
        chunk = term // 2 ^ swizzle(row)
        return u32(tile + u32(row * PITCH + chunk * 16 + term % 2 * BYTES))

    @inline
    def across(tile):
        lane = i32(ptx.thread_here() % 32)
        column, row = i32(lane // 4), i32(lane % 4 * APART)
        chunk = column // 2 ^ swizzle(row)
        return u32(tile + u32(row * PITCH + chunk * 16 + column % 2 * BYTES))

    @inline
    def pair(tile):
        lane = i32(ptx.thread_here() % 32)
        row, term = i32(lane // 4), i32(lane % 4)
        return u32(tile + u32(row * PITCH + (term ^ swizzle(row)) * 16))

    return along, across, pair


@once
def build_nt(m_tiles, columns, depth, pitch, terms):
    """``product(acc, a, b)``: acc = A B^T."""
    a = b = SwizzledRows(pitch, False)
    sizes = m_tiles, columns // 8, depth // 8
    multiply = ptx.product_swizzled(*sizes, a, b, terms, fresh=True)
    along, _, _ = build_lane(pitch)

    @inline
    def product(acc, a, b):
        multiply(acc, along(a), along(b))

    return product


@once
def build_nn(m_tiles, columns, depth, b_pitch, terms, a_pitch=None):
    """``product(acc, a, b)``: acc += A B, with A in registers unless it has a pitch."""
    HELD = a_pitch is None
    a, b = None if HELD else SwizzledRows(a_pitch, False), SwizzledRows(b_pitch, True)
    multiply = ptx.product_swizzled(m_tiles, columns // 8, depth // 8, a, b, terms)
    along, _, _ = build_lane(a_pitch or 0)
    _, across, _ = build_lane(b_pitch, 2 if HELD else 1)

    @inline
    def product(acc, a, b):
        if HELD:
            multiply(acc, a, across(b))
        else:
            multiply(acc, along(a), across(b))

    return product


@once
def build_tn(m_tiles, columns, depth, a_pitch, b_pitch, terms):
    """``product(acc, a, b)``: acc = A^T B, both stored along the sum row by row."""
    sizes = m_tiles, columns // 8, depth // 8
    a, b = SwizzledRows(a_pitch, True), SwizzledRows(b_pitch, True)
    multiply = ptx.product_swizzled(*sizes, a, b, terms, fresh=True)
    _, across_a, _ = build_lane(a_pitch)
    _, across_b, _ = build_lane(b_pitch)

    @inline
    def product(acc, a, b):
        multiply(acc, across_a(a), across_b(b))

    return product


@once
def build_put(m_tiles, columns, pitch):
    """``put(tile, column, x)``: a warp's fragment, of 8 columns or of whole lines of 16 that begin
    with one, to rows of shared memory.
    """
    M_TILES, GROUPS, PITCH = m_tiles, columns // 8, pitch
    _, _, pair = build_lane(pitch)

    @inline
    def put(tile, column, x):
        first = u32(column // 16 * 128)
        mine = u32(pair(tile) ^ u32(column // 8 % 2 * 64))
        for m in range(M_TILES):
            for j in range(GROUPS):
                place = u32(u32(mine ^ u32(j % 2 * 64)) + first)
                for r in range(2):
                    e = (m * GROUPS + j) * 4 + 2 * r
                    at = u32(place + u32((16 * m + 8 * r) * PITCH + j // 2 * 128))
                    ptx.store_shared_float64s(at, x[e], x[e + 1])

    return put


class Stored(NamedTuple):
    """What `build_store` stores."""

    x: Any
    acc: Any
    factor: Any
    row: int
    column: int
    stop: int


@once
def build_store(m_tiles, columns, wide, key_of=None):
    """``store(Stored(x, acc, factor, row, column, stop))``: this lane's part of a warp's fragment,
    each row times its factor, to x (n, head_dim), rows before `stop`; its first are `row` and
    `column`.

    wide : rows lie at multiples of 16 bytes, and are as long.
    key_of : which row of x a row is; all are in order if it is None.
    """
    PLACED, key_of = key_of is not None, key_of or in_order
    ROWS, GROUPS, WIDE = 2 * m_tiles, columns // 8, wide

    @inline
    def put(number, these):
        r, j = number % ROWS, number // ROWS
        i, column = i32(these.row + (r // 2 * 16 + r % 2 * 8)), i32(these.column + 8 * j)
        if PLACED:
            i = key_of(i)
        e, x = (r // 2 * GROUPS + j) * 4 + 2 * (r % 2), these.x
        first, second = these.acc[e] * these.factor[r], these.acc[e + 1] * these.factor[r]
        at = u64(i64(i) * x.strides[0] + i64(column) * x.strides[1])
        at = u64(ptx.global_address(x) + at)
        if i < these.stop:
            if WIDE:
                if column < x.shape[1]:
                    ptx.store_global_float64s(at, first, second)
            else:
                if column < x.shape[1]:
                    ptx.store_global_float64(at, first)
                if column + 1 < x.shape[1]:
                    ptx.store_global_float64(u64(at + u64(x.strides[1])), second)

    return ptx.repeated(GROUPS * ROWS, put)


@inline
def first_row():
    """Of a lane, among those of its warp."""
    return i32(ptx.thread_here() % 32 // 4)
