"""Tiles of the CPU kernels: packing rows into contiguous matrices of the accumulation dtype, writing them back, adding them up; and which
tiles a work item walks over.

float16 arrays come as int16 and bfloat16 arrays as uint16; `numeric.widen` and `numeric.narrow` convert on load and store.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numba.core.imputils import impl_ret_borrowed
from numba.cpython.unsafe.tuple import tuple_setitem
from numba.extending import intrinsic, overload

from numba_flash import numeric
from numba_flash.cpu.cache import part

MINUS_INF = -np.inf


@intrinsic
def as_contiguous(typingctx, x):
    """The array `x`, whose elements are known to be dense in memory, typed as contiguous, so that LLVM vectorises loops over it."""
    contiguous = x.copy(layout="C")

    def codegen(context, builder, signature, args):
        return impl_ret_borrowed(context, builder, contiguous, args[0])

    return contiguous(x), codegen


@njit
def view2d(buffer, rows, columns):
    """The first ``rows * columns`` elements of a 1-D buffer as a contiguous matrix."""
    return buffer[: rows * columns].reshape(rows, columns)


@njit
def load_row(tile_row, row, factor):
    """``tile_row = factor * row``."""
    for c in range(tile_row.size):
        tile_row[c] = numeric.widen(row[c]) * factor


@njit
def pack(x, start, n, buffer, factor):
    """``factor * x[start : start + n]`` as a contiguous matrix of the accumulation dtype, made in `buffer`."""
    tile = view2d(buffer, n, x.shape[1])
    for r in range(n):
        if x.strides[1] == x.itemsize:
            load_row(tile[r], as_contiguous(x[start + r]), factor)
        else:
            load_row(tile[r], x[start + r], factor)
    return tile


def load(x, start, n, buffer):
    """``x[start : start + n]`` as `pack` gives it, but in place where it is so already."""


@overload(load)
def _load(x, start, n, buffer):
    def copied(x, start, n, buffer):
        return pack(x, start, n, buffer, buffer.dtype.type(1))

    def in_place(x, start, n, buffer):
        if x.strides[1] == x.itemsize and x.strides[0] == x.itemsize * x.shape[1]:
            return as_contiguous(x[start : start + n])
        return pack(x, start, n, buffer, buffer.dtype.type(1))

    return in_place if x.dtype == buffer.dtype else copied


@njit(fastmath={"reassoc"})
def all_finite(tile):
    """True if `tile` holds neither NaN nor Inf."""
    zero = tile.dtype.type(0)
    check = zero
    for r in range(tile.shape[0]):
        for c in range(tile.shape[1]):
            check += tile[r, c] * zero
    return check == zero


@njit
def store_row(row, tile_row, factor, add):
    """``row = factor * tile_row``, plus what `row` holds if `add`."""
    for c in range(row.size):
        value = tile_row[c] * factor
        row[c] = numeric.narrow(value + numeric.widen(row[c]) if add else value, row[c])


@njit
def unpack(x, start, tile, factor, add):
    """``x[start : start + len(tile)] = factor * tile``, plus what `x` holds if `add`."""
    for r in range(tile.shape[0]):
        if x.strides[1] == x.itemsize:
            store_row(as_contiguous(x[start + r]), tile[r], factor, add)
        else:
            store_row(x[start + r], tile[r], factor, add)


@part(fastmath={"contract"})
def rescale_add(acc, alpha, x):
    """``acc = alpha * acc + x``, one alpha for each row."""
    for r in range(acc.shape[0]):
        for c in range(acc.shape[1]):
            acc[r, c] = acc[r, c] * alpha[r] + x[r, c]


@njit
def accumulate(acc, x):
    """``acc += x``."""
    for r in range(acc.shape[0]):
        for c in range(acc.shape[1]):
            acc[r, c] += x[r, c]


class Axes(NamedTuple):
    """A number for each axis of an array (b0, b1, heads, queries, keys)."""

    b0: int
    b1: int
    head: int
    query: int
    key: int


@njit
def split(item, blocks, shape):
    """`Axes` of the block of a work item, along those that `shape` has, and how many of `blocks` it walks over along those of size 1."""
    own = Axes(0, 0, 0, 0, 0)
    walk = Axes(1, 1, 1, 1, 1)
    for axis in range(4, -1, -1):
        if shape[axis] == 1:
            walk = tuple_setitem(walk, axis, blocks[axis])
        else:
            own = tuple_setitem(own, axis, item % blocks[axis])
            item //= blocks[axis]
    return own, walk
