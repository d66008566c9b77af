"""Keys and values in pages, and the table of a sequence's pages, on the device."""

from typing import Any, NamedTuple

from numba_flash.cuda.lang import cuda, i32, i64, inline, once, u32
from numba_flash.cuda.number import index


class Cache(NamedTuple):
    """Keys or values of a head of a sequence, in the place of an array (n, head_dim).

    Attributes
    ----------
    pages : array (pages, size, head_dim)
        All pages.
    table : array
        The sequence's.
    length : int
        How many keys it has.
    """

    pages: Any
    table: Any
    length: int


class Place(NamedTuple):
    """Where a key is: its page by the number in the table, and its row in it."""

    entry: int
    row: int


@once
def build_capacity(options):
    """``capacity(extras)``: how many keys a row of the table has room for."""
    SIZE = options.paged.size

    @inline
    def capacity(extras):
        return extras.page_table.shape[2] * SIZE

    return capacity


@once
def build_place(size):
    """``place(key)``: the `Place` of a key that is not negative; the constant makes a product and
    a shift of the division.
    """
    SIZE = size

    @inline
    def place(key):
        entry = u32(u32(key) // u32(SIZE))
        return Place(entry, u32(u32(key) - u32(entry * u32(SIZE))))

    return place


@once
def build_access(pages):
    """``element(x, i, d)`` and ``length(x)`` of an array (n, head_dim), or of a `Cache` if there
    are `pages` (`numba_flash.pages.Pages`).
    """

    @inline
    def element(x, i, d):
        return x[index(i), index(d)]

    @inline
    def length(x):
        return x.shape[0]

    if pages is None:
        return element, length
    place = build_place(pages.size)

    @inline
    def element_of_page(x, i, d):
        at = place(i)
        return x.pages[index(x.table[index(at.entry)]), index(at.row), index(d)]

    @inline
    def length_of_cache(x):
        return x.length

    return element_of_page, length_of_cache


@once
def build_missing(options, threads):
    """``missing(table, pages, length, part, parts)``: 1 if this thread, of all of a block, finds an
    entry among those that so many keys use which names none of the `pages`, else 0. Each of
    several parts looks at its share.
    """
    SIZE, THREADS = options.paged.size, threads

    @inline
    def missing(table, pages, length, part, parts):
        used, found = (i64(length) + (SIZE - 1)) // SIZE, i32(0)
        for t in range(cuda.threadIdx.x * parts + part, used, THREADS * parts):
            page = i64(table[index(t)])
            if page < 0 or page >= pages:
                found = i32(1)
        return found

    return missing
