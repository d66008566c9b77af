"""Tiles of rows on their way to shared memory and back.

A tile of keys is stored in an order of `numba_flash.cuda.score.fragment`, so that a lane's scores
belong to neighbouring keys.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, i32, i64, inline, once, types, u32, u64
from numba_flash.cuda.score.fragment import first_column
from numba_flash.cuda.sm80.tiles import CHUNK, WARP, padded, pitch

LINE = 8  # chunks, 128 bytes


@inline
def in_order(row):
    """The place of a row of queries, and the row of a place."""
    return row


@once
def build_chunk(head_dim, columns, asynchronous, around=0):
    """``chunk_of(target, x, source, i, chunk, there)``: one chunk of row i of x, at the address
    `source`, into shared memory; zeros unless it is there. The cache may fetch as many bytes
    `around` it.
    """
    HEAD_DIM, WHOLE, ASYNCHRONOUS = head_dim, head_dim == columns, asynchronous
    copy16 = ptx.copy16_far(around) if around else ptx.copy16

    @inline
    def chunk_of(target, x, source, i, chunk, there):
        if ASYNCHRONOUS:
            if not WHOLE:
                there = there and chunk * CHUNK < HEAD_DIM
            copy16(target, source, u32(1) if there else u32(0))
        else:
            words = cuda.local.array(4, u32)
            for w in range(4):
                words[w] = u32(0)
                for half in range(2):
                    column = chunk * CHUNK + 2 * w + half
                    if there and column < HEAD_DIM:
                        words[w] |= u32(u32(x[index(i), index(column)]) << u32(16 * half))
            ptx.store_shared_vector(target, (words[0], words[1], words[2], words[3]))

    return chunk_of


@once
def build_places(pitch, lines):
    """``place_chunk(tile, row, chunk)``: where a chunk of a row of a tile lies in shared memory;
    ``below(address, rows)``: where that one lies which is so many rows below another, whose row's
    number has none of the same bits.
    """
    PITCH, LINES = pitch, lines

    @inline
    def place_chunk(tile, row, chunk):
        if LINES:
            chunk = i32(chunk ^ (row & 7))
        return u32(tile + u32(row * PITCH + chunk * (2 * CHUNK)))

    @inline
    def below(address, rows):
        if LINES:
            address = u32(address ^ u32((rows & 7) * (2 * CHUNK)))
        return u32(address + u32(rows * PITCH))

    return place_chunk, below


def chunks_across(chunks, threads):
    """Of the chunks of a row, how many are loaded at the same time: all, or a line of memory."""
    return LINE if threads % chunks and chunks % LINE == 0 else chunks


@once
def build_load(
    rows, head_dim, threads, place, asynchronous, columns=None, compact=False, again=False,
    around=0, lines=False,
):  # fmt: skip
    """``load(tile, x, first, stop)``: rows [first, first + rows) of x (n, head_dim), zeros from
    `stop` on, into shared memory.

    place : where a row is stored: None in its order, or a function like `place_of_key`.
    asynchronous : by copies that go on; rows lie at multiples of 16 bytes.
    columns : of the tile, zeros beyond the head dimension.
    compact : rows follow each other; nothing is computed from their stride, which takes registers.
    again : in every call a thread computes anew which rows are its own, for registers.
    around : bytes that the cache may fetch around each copy.
    lines : rows of the tile are lines, swizzled (`numba_flash.cuda.sm80.tiles.KeyRows`).

    The `threads` of a warp load a tile of its own.
    """
    columns = columns or padded(head_dim)
    ROWS, THREADS, AGAIN, OF_WARP = rows, threads, again, threads == WARP
    PITCH, COMPACT, ROW_BYTES = 2 * columns if lines else pitch(columns), compact, 2 * head_dim
    CHUNKS = columns // CHUNK
    TOTAL = rows * CHUNKS
    ACROSS = chunks_across(CHUNKS, threads)
    STEP = threads // ACROSS  # rows that are loaded at the same time
    REGULAR = threads % ACROSS == 0 and STEP & (STEP - 1) == 0 and rows % STEP == 0
    place, one = place or in_order, build_chunk(head_dim, columns, asynchronous, around)
    place_chunk, below = build_places(PITCH, lines)

    @inline
    def load(tile, x, first, stop):
        thread = ptx.bounded_thread_here() if AGAIN else i32(cuda.threadIdx.x)
        if OF_WARP:
            thread = i32(thread % WARP)
        stride = i64(ROW_BYTES) if COMPACT else i64(x.strides[0])
        base = u64(ptx.global_address(x) + u64(i64(first) * stride))
        rest = i32(stop - first)
        if REGULAR:
            row0, chunk = i32(thread // ACROSS), i32(thread % ACROSS)
            source = u64(base + u64(i64(row0) * stride + i64(chunk * (2 * CHUNK))))
            target = place_chunk(tile, place(row0), chunk)
            rest = i32(rest - row0)
            for step in range(ROWS // STEP):
                at = below(target, place(i32(step * STEP)))
                i = i32(first + row0 + step * STEP)
                one(at, x, source, i, chunk, rest > i32(step * STEP))
                for c in range(ACROSS, CHUNKS, ACROSS):
                    here, there = u32(at + u32(c * (2 * CHUNK))), u64(source + u64(c * (2 * CHUNK)))
                    one(here, x, there, i, i32(chunk + c), rest > i32(step * STEP))
                source = u64(source + u64(i64(STEP) * stride))
        else:
            for number in range(thread, TOTAL, THREADS):
                row, chunk = i32(number // CHUNKS), i32(number % CHUNKS)
                source = u64(base + u64(i64(row) * stride + i64(chunk * (2 * CHUNK))))
                target = place_chunk(tile, place(row), chunk)
                one(target, x, source, i32(first + row), chunk, rest > row)

    return load


@once
def build_store(rows, head_dim, wide, row_of=None, columns=None):
    """``store(tile, x, first, stop)``: a warp's rows of a tile in shared memory to rows [first,
    stop) of x (n, head_dim).

    wide : by 16 bytes at a time; rows lie at multiples of that, and are as long.
    row_of : which row is stored at a place: None in their order, or a function like `key_of_place`.
    """
    HEAD_DIM, PITCH, WIDE = head_dim, pitch(columns or head_dim), wide
    CHUNKS = -(-head_dim // CHUNK)
    TOTAL = rows * CHUNKS
    TURNS = -(-TOTAL // WARP)
    REGULAR = TOTAL % WARP == 0
    row_of = row_of or in_order

    @inline
    def store(tile, x, first, stop):
        lane = i32(cuda.threadIdx.x % WARP)
        for turn in range(TURNS):
            number = i32(lane + turn * WARP)
            row, chunk = i32(u32(number) // u32(CHUNKS)), i32(u32(number) % u32(CHUNKS))
            i = i32(first + row_of(row))
            if i < stop and (REGULAR or number < TOTAL):
                words = ptx.load_shared_words(u32(tile + u32(row * PITCH + chunk * (2 * CHUNK))))
                if WIDE:
                    at = u64(i64(i) * x.strides[0] + i64(chunk * (2 * CHUNK)))
                    ptx.store_global(u64(ptx.global_address(x) + at), words)
                else:
                    for w in range(4):
                        column = chunk * CHUNK + 2 * w
                        if column < HEAD_DIM:
                            x[index(i), index(column)] = types.uint16(words[w] & u32(0xFFFF))
                        if column + 1 < HEAD_DIM:
                            high = types.uint16(words[w] >> u32(16))
                            x[index(i), index(column + 1)] = high

    return store


class Floats(NamedTuple):
    """What `build_store_floats` stores."""

    x: Any
    acc: Any
    factor: Any
    row: int
    stop: int
    centre: Any
    weight: Any


@once
def build_store_floats(m_tiles, columns, centred=False, neighbours=False):
    """``store(x, acc, factor, row, stop, centre, weight)``: this thread's part of a warp's rows,
    each times its factor, to x (n, columns or fewer) in float32, rows before `stop`; its first is
    `row`.

    centred : the `centre` (columns) is added, times each row's `weight`.
    neighbours : a lane's rows are (`numba_flash.cuda.score.fragment.build_key_rows`).
    """
    ROWS, GROUPS, CENTRED, NEIGHBOURS = 2 * m_tiles, columns // 8, centred, neighbours

    @inline
    def put(number, rows):
        r, c, j = number % ROWS, number // ROWS % 2, number // ROWS // 2
        i = rows.row + (r if NEIGHBOURS else r // 2 * 16 + r % 2 * 8)
        column = 8 * j + first_column() + c
        if i < rows.stop and column < rows.x.shape[1]:
            value = rows.acc[(r // 2 * GROUPS + j) * 4 + 2 * (r % 2) + c] * rows.factor[r]
            if CENTRED:
                value += rows.weight[r] * rows.centre[index(column)]
            at = u64(i64(i) * rows.x.strides[0] + i64(column) * rows.x.strides[1])
            ptx.store_global(u64(ptx.global_address(rows.x) + at), (value,))

    put_all = ptx.repeated(2 * GROUPS * ROWS, put)

    @inline
    def store(x, acc, factor, row, stop, centre, weight):
        put_all(Floats(x, acc, factor, row, stop, centre, weight))

    return store
