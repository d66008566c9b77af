"""Keys and values in pages, and the table of a sequence's pages, on the device."""

from typing import Any, NamedTuple

from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, i32, i64, inline, once, u32


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


class PagePlace(NamedTuple):
    """Where a key is: its page by the number in the table, and its row in it."""

    entry: int
    row: int


@once
def build_keys(options):
    """``capacity(extras, k)``: how many keys there is room for, in an array or by the table.

    ``heads_of(k, v, b0, b1, head)``: a head of both; ``keys_of(k, v, extras, at, first, length)``:
    so many of its keys from the first of a sequence on, of the batch element of the `Head` `at`; in
    pages a `Cache` each.
    """
    PAGED, SIZE = options.paged is not None, options.paged.size if options.paged else 1

    @inline
    def capacity(extras, k):
        if PAGED:
            return extras.page_table.shape[2] * SIZE
        return k.shape[3]

    @inline
    def heads_of(k, v, b0, b1, head):
        if PAGED:
            return k[0, :, head], v[0, :, head]
        return k[b0, b1, head], v[b0, b1, head]

    @inline
    def keys_of(k, v, extras, at, first, length):
        if PAGED:
            table = extras.page_table[at.b0, at.b1]
            return Cache(k, table, length), Cache(v, table, length)
        return k[first : first + length], v[first : first + length]

    return capacity, heads_of, keys_of


@once
def build_place(size):
    """``place(key)``: the `PagePlace` of a key that is not negative; the constant makes a product
    and a shift of the division.
    """
    SIZE = size

    @inline
    def place(key):
        entry = u32(u32(key) // u32(SIZE))
        return PagePlace(entry, u32(u32(key) - u32(entry * u32(SIZE))))

    return place


@once
def build_access(pages):
    """``element(x, i, d)`` and ``length(x)`` of an array (n, head_dim), or of a `Cache` if there
    are `pages` (`numba_flash.arguments.pages.Pages`).
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
def build_missing(options):
    """``missing(k, extras, at, length, part, kv_splits)``: 1 if this thread, of all of a block,
    finds an entry which names no page of k among those that so many keys use, else 0. Each of
    several parts looks at its share.
    """
    PAGED, SIZE = options.paged is not None, options.paged.size if options.paged else 1

    @inline
    def missing(k, extras, at, length, part, kv_splits):
        found = i32(0)
        if PAGED:
            table, pages, used = extras.page_table[at.b0, at.b1], k.shape[1], i64(length)
            used = (used + (SIZE - 1)) // SIZE
            for t in range(cuda.threadIdx.x * kv_splits + part, used, cuda.blockDim.x * kv_splits):
                page = i64(table[index(t)])
                if page < 0 or page >= pages:
                    found = i32(1)
        return found

    return missing
