"""Keys and values of the forward pass on the CPU: an array (b0, b1, heads, n, d), or the pages of a sequence (`Cache`), whose tiles are
gathered in the buffer of a thread.
"""

from numba import types
from numba.extending import overload

from numba_flash.cpu import tiles
from numba_flash.cpu.arguments import Cache


def _paged(x) -> bool:
    return isinstance(x, types.BaseNamedTuple)


def heads(x):
    """How many heads there are."""


@overload(heads)
def _heads(x):
    return (lambda x: x.pages.shape[1]) if _paged(x) else (lambda x: x.shape[2])


def length(x):
    """How many keys there are."""


@overload(length)
def _length(x):
    return (lambda x: x.length) if _paged(x) else (lambda x: x.shape[3])


def columns(x):
    """How many numbers a key has."""


@overload(columns)
def _columns(x):
    return (lambda x: x.pages.shape[3]) if _paged(x) else (lambda x: x.shape[4])


def head(x, at, number):
    """The keys of a head: of the batch element of the `Head` `at`, or of the sequence."""


@overload(head)
def _head(x, at, number):
    of_cache = lambda x, at, number: Cache(x.pages[:, number], x.table, x.length)
    return of_cache if _paged(x) else (lambda x, at, number: x[at.b0, at.b1, number])


def load(x, start, n, buffer):
    """Keys ``[start, start + n)`` of a head as a contiguous matrix: of pages a copy in `buffer`, else what `tiles.load` makes of it."""


@overload(load)
def _load(x, start, n, buffer):
    def gathered(x, start, n, buffer):
        size, d, r = x.pages.shape[1], x.pages.shape[2], 0
        while r < n:
            entry, first = (start + r) // size, (start + r) % size
            rows = min(size - first, n - r)
            tiles.pack(x.pages[x.table[entry]], first, rows, buffer[r * d :], buffer.dtype.type(1))
            r += rows
        return tiles.view2d(buffer, n, d)

    return gathered if _paged(x) else (lambda x, start, n, buffer: tiles.load(x, start, n, buffer))
