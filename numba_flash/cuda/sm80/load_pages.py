"""Tiles of keys in pages on their way to shared memory: as `numba_flash.cuda.sm80.load` has them,
but for where a row is, which the sequence's table says.
"""

import math
from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.lang import cuda, i32, i64, inline, once, u32, u64
from numba_flash.cuda.number import index
from numba_flash.cuda.pages import build_place
from numba_flash.cuda.sm80.load import build_chunk, build_load
from numba_flash.cuda.sm80.tiles import CHUNK, padded, pitch

MOST_WORDS = 4  # of the table that a thread waits for at the same time


class Lookups(NamedTuple):
    """How a thread that loads several rows of a tile reads the table.

    Attributes
    ----------
    rows : int
        That lie in one page: it is read once for these.
    words, at_once : int
        So often, and so many of them before the first is used.
    """

    rows: int
    words: int
    at_once: int

    @classmethod
    def of(cls, rows: int, step: int, size: int) -> "Lookups":
        """Of a tile of so many rows, which begins at a multiple of that, where a thread loads each
        `step`-th, and pages have so many keys.
        """
        shared = math.gcd(rows, size)  # that many neighbours are always in one page
        of_page = shared // step if shared % step == 0 else 1
        words = rows // step // of_page
        return cls(of_page, words, max(n for n in range(1, MOST_WORDS + 1) if words % n == 0))


@once
def build_load_keys(rows, head_dim, threads, place, asynchronous, options, columns=None):
    """``load(tile, x, first, stop)``: as `numba_flash.cuda.sm80.load.build_load` makes it, if there
    are no pages. Else x is a `numba_flash.cuda.pages.Cache`, `first` a multiple of `rows`, and
    where a page does not exist, there are zeros.
    """
    if options.paged is None:
        return build_load(rows, head_dim, threads, place, asynchronous, columns)
    columns, size = columns or padded(head_dim), options.paged.size
    THREADS, PITCH, CHUNKS = threads, pitch(columns), columns // CHUNK
    TOTAL = rows * CHUNKS
    STEP = threads // CHUNKS  # rows that are loaded at the same time
    REGULAR = threads % CHUNKS == 0 and STEP & (STEP - 1) == 0 and rows % STEP == 0
    lookups = Lookups.of(rows, STEP, size) if REGULAR else Lookups(1, 1, 1)
    OF_PAGE, WORDS, AT_ONCE = lookups
    one, place_of, fetch = (
        build_chunk(head_dim, columns, asynchronous),
        build_place(size),
        ptx.fetch(1),
    )

    @inline
    def look_up(words, w, x, i, stop):
        """Of the table, the page that holds key i."""
        at = u64(ptx.global_address(x.table) + u64(i64(place_of(i).entry) * x.table.strides[0]))
        fetch(words, i32(w), at, u32(1) if i < stop else u32(0))

    @inline
    def copy(x, page, row, chunk, target, there):
        """A chunk of a row of a page, zeros unless it is there."""
        own, there = x.pages[index(page)], there and page < u32(x.pages.shape[0])
        source = u64(ptx.global_address(own) + u64(i64(row) * own.strides[0]))
        one(target, own, u64(source + u64(i64(chunk * (2 * CHUNK)))), i32(row), chunk, there)

    @inline
    def load(tile, x, first, stop):
        words = cuda.local.array(AT_ONCE, u32)
        thread = i32(cuda.threadIdx.x)
        if REGULAR:
            row0, chunk = i32(thread // CHUNKS), i32(thread % CHUNKS)
            target, i0 = (
                u32(tile + u32(place(row0) * PITCH + chunk * (2 * CHUNK))),
                i32(first + row0),
            )
            for turn in range(WORDS // AT_ONCE):
                for w in range(AT_ONCE):
                    step = (turn * AT_ONCE + w) * OF_PAGE
                    look_up(words, w, x, i32(i0 + step * STEP), stop)
                for w in range(AT_ONCE):
                    step = (turn * AT_ONCE + w) * OF_PAGE
                    row = place_of(i32(i0 + step * STEP)).row
                    for n in range(OF_PAGE):
                        at = u32(target + u32(place(i32((step + n) * STEP)) * PITCH))
                        there = i32(i0 + (step + n) * STEP) < stop
                        copy(x, words[w], u32(row + u32(n * STEP)), chunk, at, there)
        else:
            for number in range(thread, TOTAL, THREADS):
                r, chunk = i32(number // CHUNKS), i32(number % CHUNKS)
                i = i32(first + r)
                look_up(words, 0, x, i, stop)
                at = u32(tile + u32(place(r) * PITCH + chunk * (2 * CHUNK)))
                copy(x, words[0], place_of(i).row, chunk, at, i < stop)

    return load
