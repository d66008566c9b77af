"""Tiles of rows of float64 on their way to shared memory, by copies that go on."""

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import i32, i64, inline, once, u32, u64
from numba_flash.cuda.sm80.load import in_order
from numba_flash.cuda.sm80.operands.products_float64 import BYTES, swizzle


@once
def build_load(rows, head_dim, columns, threads, asynchronous, unrolled=8, place=None):
    """``load(tile, x, first, stop)``: rows [first, first + rows) of x (n, head_dim), zeros from
    `stop` on and beyond the head dimension, to `columns` columns in shared memory.

    asynchronous : by 16 bytes at a time; rows lie at multiples of that, and are as long. Else by 8,
        and x has any strides.
    unrolled : as many copies of a thread are; more are a loop, for registers.
    place : which row of the tile a row is; all are in order if it is None.
    """
    SIZE = 2 if asynchronous else 1  # elements that are copied at a time
    COPIES, PITCH, HEAD_DIM, WIDE = columns // SIZE, BYTES * columns, head_dim, asynchronous
    TOTAL, THREADS, WHOLE = rows * columns // SIZE, threads, head_dim == columns
    PLACED, place = place is not None, place or in_order
    TURNS, UNROLLED = TOTAL // threads, TOTAL % threads == 0 and TOTAL // threads <= unrolled

    @inline
    def one(tile, x, first, stop, number):
        row, column = i32(number // COPIES), i32(number % COPIES * SIZE)
        i = i32(first + row)
        if PLACED:
            row = place(row)
        chunk = i32(column // 2 ^ swizzle(row))
        there = i < stop
        if not WHOLE:
            there = there and column < HEAD_DIM
        at = u64(i64(i) * x.strides[0] + i64(column) * x.strides[1])
        source = u64(ptx.global_address(x) + at)
        target = u32(tile + u32(row * PITCH + chunk * 16 + column % 2 * BYTES))
        if WIDE:
            ptx.copy16(target, source, u32(1) if there else u32(0))
        else:
            ptx.copy8(target, source, u32(1) if there else u32(0))

    @inline
    def load(tile, x, first, stop):
        if UNROLLED:
            for turn in range(TURNS):
                one(tile, x, first, stop, i32(ptx.thread_here() + turn * THREADS))
        else:
            for number in range(ptx.thread_here(), TOTAL, THREADS):
                one(tile, x, first, stop, i32(number))

    return load
