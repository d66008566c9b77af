"""What the functions of the CPU kernels hand to each other: the options, and which scores they are at."""

from typing import Any, NamedTuple

from numba import njit, types


class Parameters(NamedTuple):
    """Numbers of the options.

    Attributes
    ----------
    softcap : float
        Of the score; no cap is 0.
    score_mod : int
        Address of the compiled function (`numba_flash.cpu.row_function.row_function_address`); none is 0.
    keep_scale : float
        ``1 / (1 - dropout)``.
    seed, offset, threshold : uint64
        State of the dropout's generator, and the random bits below which it drops.
    first_query, first_key : int
        Of the matrix whose random bits these are, in the place of query 0 and key 0.
    batch0, query0 : int
        Batch elements and queries before the first in the arrays.
    mask_queries, mask_keys : int
        Of a block of the mask; 1 where it has an element for each pair.
    """

    softcap: float
    score_mod: int
    keep_scale: float
    seed: int
    offset: int
    threshold: int
    first_query: int
    first_key: int
    batch0: int
    query0: int
    mask_queries: int
    mask_keys: int


class Extras(NamedTuple):
    """The options. Kernels of plain attention get an empty tuple in its place (`is_plain`).

    Attributes
    ----------
    bias : array (b0, b1, hq, nq, nk)
        Of size 0 where absent.
    mask : array (b0, b1, hq, blocks of queries, blocks of keys)
        Likewise; of all queries, also where the other arrays have some of them alone.
    parameters : Parameters
        Their numbers.
    """

    bias: Any
    mask: Any
    parameters: Parameters


class Cache(NamedTuple):
    """Keys or values of a sequence in pages, in the place of an array.

    Attributes
    ----------
    pages : array (pages, heads, size, d)
        Of one head, without that axis.
    table : array of int64
        Which page holds its first keys, the next ones, and so on.
    length : int
        How many keys there are.
    """

    pages: Any
    table: Any
    length: int


class Head(NamedTuple):
    """Which head of the scores, or of keys.

    Attributes
    ----------
    b0, b1 : int
        Leading indices of the arrays.
    batch : int
        Number of the batch element in the arrays.
    head, heads : int
        The head, and how many there are.
    """

    b0: int
    b1: int
    batch: int
    head: int
    heads: int


class Region(NamedTuple):
    """Where a tile of scores lies, and what it may see.

    Attributes
    ----------
    i0, j0 : int
        Its first query and key.
    m, n : int
        How many queries and keys it has.
    low, high : int
        The band, for key - query.
    """

    i0: int
    j0: int
    m: int
    n: int
    low: int
    high: int


class Span(NamedTuple):
    """Which scores a row holds: those of one query and consecutive keys.

    Attributes
    ----------
    at : Head
        Their head.
    i : int
        The query.
    j0 : int
        The first key.
    """

    at: Head
    i: int
    j0: int


@njit
def head_of(number, batch1, heads):
    """The `Head` of that number, counted over all batch elements, of arrays (b0, batch1, heads, ...)."""
    batch = number // heads
    return Head(batch // batch1, batch % batch1, batch, number % heads, heads)


def is_plain(extras) -> bool:
    """True if Numba's type `extras` is that of plain attention."""
    return extras == types.Tuple(())
