"""Tiles of keys in pages on their way to shared memory: as `numba_flash.cuda.sm80.load` has them,
but for where a row is, which the sequence's table says.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, i32, i64, inline, once, u32, u64
from numba_flash.cuda.sm80.load import build_chunk, build_load, build_places
from numba_flash.cuda.sm80.tiles import CHUNK, WARP, padded, pitch
from numba_flash.cuda.work.pages import build_place

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


class Pages(NamedTuple):
    """Functions of kernels for a tile of keys in pages; a thread waits for several words of the
    table before it uses the first.

    Attributes
    ----------
    regular : bool
        A thread always has the same chunk of rows.
    lookups : Lookups
        How it reads the table, if so.
    find : function
        ``find(words, turn, x, first, stop)``: ask for those of a turn, as many as it waits for.
    copy : function
        ``copy(tile, words, turn, x, first, stop)``: the rows that these say.
    copy_each : function
        ``copy_each(tile, x, first, stop)``: all, a word for each row.
    """

    regular: bool
    lookups: Lookups
    find: Any
    copy: Any
    copy_each: Any


@once
def build_pages(
    rows, head_dim, threads, place, asynchronous, size, columns=None, around=0, lines=False
):
    """`Pages` of so many keys, for `rows` keys of a tile whose first one is a multiple of that."""
    columns = columns or padded(head_dim)
    THREADS, CHUNKS = threads, columns // CHUNK
    TOTAL, OF_WARP = rows * CHUNKS, threads == WARP
    STEP = threads // CHUNKS  # rows that are loaded at the same time
    regular = threads % CHUNKS == 0 and STEP & (STEP - 1) == 0 and rows % STEP == 0
    lookups = Lookups.of(rows, STEP, size) if regular else Lookups(1, 1, 1)
    if OF_WARP and not asynchronous:  # loops of more are left as they are, words in memory
        lookups = lookups._replace(at_once=1)
    OF_PAGE, AT_ONCE = lookups.rows, lookups.at_once
    one = build_chunk(head_dim, columns, asynchronous, around)
    place_of, fetch = build_place(size), ptx.fetch(1)
    place_chunk, below = build_places(2 * columns if lines else pitch(columns), lines)

    @inline
    def thread_of():
        return i32(cuda.threadIdx.x % WARP) if OF_WARP else i32(cuda.threadIdx.x)

    @inline
    def look_up(words, w, x, i, stop):
        """Of the table, the page that holds key i."""
        at = u64(ptx.global_address(x.table) + u64(i64(place_of(i).entry) * x.table.strides[0]))
        fetch(words, i32(w), at, u32(1) if i < stop else u32(0))

    @inline
    def copy_chunk(x, page, row, chunk, target, there):
        """A chunk of a row of a page, zeros unless it is there."""
        own, there = x.pages[index(page)], there and page < u32(x.pages.shape[0])
        source = u64(ptx.global_address(own) + u64(i64(row) * own.strides[0]))
        one(target, own, u64(source + u64(i64(chunk * (2 * CHUNK)))), i32(row), chunk, there)

    @inline
    def find(words, turn, x, first, stop):
        i0 = i32(first + thread_of() // CHUNKS)
        for w in range(AT_ONCE):
            step = (turn * AT_ONCE + w) * OF_PAGE
            look_up(words, w, x, i32(i0 + step * STEP), stop)

    @inline
    def copy(tile, words, turn, x, first, stop):
        row0, chunk = i32(thread_of() // CHUNKS), i32(thread_of() % CHUNKS)
        target = place_chunk(tile, place(row0), chunk)
        i0 = i32(first + row0)
        for w in range(AT_ONCE):
            step = (turn * AT_ONCE + w) * OF_PAGE
            row = place_of(i32(i0 + step * STEP)).row
            for n in range(OF_PAGE):
                at = below(target, place(i32((step + n) * STEP)))
                there = i32(i0 + (step + n) * STEP) < stop
                copy_chunk(x, words[w], u32(row + u32(n * STEP)), chunk, at, there)

    @inline
    def copy_each(tile, x, first, stop):
        words = cuda.local.array(1, u32)
        for number in range(thread_of(), TOTAL, THREADS):
            r, chunk = i32(number // CHUNKS), i32(number % CHUNKS)
            i = i32(first + r)
            look_up(words, 0, x, i, stop)
            at = place_chunk(tile, place(r), chunk)
            copy_chunk(x, words[0], place_of(i).row, chunk, at, i < stop)

    return Pages(regular, lookups, find, copy, copy_each)


@once
def build_load_keys(
    rows, head_dim, threads, place, asynchronous, options, columns=None, around=0, lines=False
):
    """``load(tile, x, first, stop)``: as `numba_flash.cuda.sm80.load.build_load` makes it, if there
    are no pages. Else x is a `numba_flash.cuda.work.pages.Cache`, `first` a multiple of `rows`, and
    where a page does not exist, there are zeros.
    """
    if options.paged is None:
        of_rows = rows, head_dim, threads, place, asynchronous, columns
        return build_load(*of_rows, around=around, lines=lines)
    REGULAR, lookups, find, copy, copy_each = build_pages(
        rows, head_dim, threads, place, asynchronous, options.paged.size, columns, around, lines
    )
    AT_ONCE, TURNS = lookups.at_once, lookups.words // lookups.at_once

    @inline
    def load(tile, x, first, stop):
        if REGULAR:
            words = cuda.local.array(AT_ONCE, u32)
            for turn in range(TURNS):
                find(words, turn, x, first, stop)
                copy(tile, words, turn, x, first, stop)
        else:
            copy_each(tile, x, first, stop)

    return load


class DecodeLoads(NamedTuple):
    """Functions of kernels that load a warp's keys and values of a tile.

    Attributes
    ----------
    find : function
        ``find(found, x, first, stop)``: ask in which pages they are.
    load_k, load_v : function
        ``load(tile, x, first, stop, found)``, as of `build_load_keys`.
    words : int
        Of `found`, 1 without use.
    """

    find: Any
    load_k: Any
    load_v: Any
    words: int


def build_load_decode(tile, shape, place, options):
    """`DecodeLoads`. Where K and V are alike, and keys in few pages, the table is read once for
    both of a tile, before the products of another.
    """
    d, dv, rows = shape.head_dim, shape.head_dim_v, tile.warp_n
    common = WARP, place, shape.asynchronous
    more_of = lambda x: {"around": tile.around, "lines": tile.key_rows(x).lines}
    if options.paged and padded(d) == padded(dv):
        size = options.paged.size
        pages = [build_pages(rows, x, *common, size, **more_of(x)) for x in (d, dv)]
        words = pages[0].lookups.words
        if pages[0].regular and words == pages[0].lookups.at_once:
            load_k, load_v = (_load_found(x.copy) for x in pages)
            return DecodeLoads(_find_once(pages[0].find), load_k, load_v, words)
    load_k, load_v = (
        _load_unfound(build_load_keys(rows, x, *common, options, **more_of(x))) for x in (d, dv)
    )
    return DecodeLoads(_find_nothing, load_k, load_v, 1)


@inline
def _find_nothing(found, x, first, stop):
    pass


@once
def _find_once(find):
    @inline
    def find_once(found, x, first, stop):
        find(found, 0, x, first, stop)

    return find_once


@once
def _load_found(copy):
    @inline
    def load(tile, x, first, stop, found):
        copy(tile, found, 0, x, first, stop)

    return load


@once
def _load_unfound(load_keys):
    @inline
    def load(tile, x, first, stop, found):
        load_keys(tile, x, first, stop)

    return load
