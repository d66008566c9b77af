"""Fragments of tensor-core products: which element of a tile a register holds, and how registers
are packed for the next product.

The accumulator of a product of a warp, 16 rows and N columns, keeps in register ``4 j + 2 r + c``
of lane l the element

    row = l // 4 + 8 r        column = 8 j + 2 (l % 4) + c

for mma.sync as for each warp of wgmma. It is also how the A operand of the next product wants pairs
of columns, once they are packed: P need not move between threads.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, u32

ROWS = 2  # of a thread, 8 apart
ALL_LANES = 0xFFFFFFFF
NEG_INF = -math.inf


@inline
def first_column():
    """Column of this thread's register 0."""
    return i32(cuda.threadIdx.x % 4 * 2)


@inline
def place_of_key(key):
    """Row of shared memory in which a key of a tile is stored, where lanes are to hold neighbouring
    keys.

    Of 32 keys, lane l gets those from ``8 (l % 4)`` on: column ``8 j + 2 (l % 4) + c`` of the
    fragment is the key ``32 (j // 4) + 8 (l % 4) + 2 (j % 4) + c``.
    """
    return i32((key & ~0x1E) | (key & 0x06) << 2 | (key & 0x18) >> 2)


@inline
def first_key():
    """Key of this thread's register 0 in such a tile."""
    return i32(cuda.threadIdx.x % 4 * 8)


@once
def build_key_rows(tiles):
    """``place(key)`` and ``key_of(place)`` where keys are the rows of `tiles` tiles, 1 or 2, of a
    warp: of 16 `tiles` keys, lane l gets those from ``2 tiles (l // 4)`` on; row ``16 m + 8 r + l
    // 4`` is the key ``2 tiles (l // 4) + 2 m + r``.
    """
    SIZE, WIDTH = 16 * tiles, 2 * tiles

    @inline
    def place(key):
        of_lane = key % WIDTH
        return i32(key - key % SIZE + of_lane * 8 + key % SIZE // WIDTH)

    @inline
    def key_of(place):
        return i32(place - place % SIZE + place % 8 * WIDTH + place % SIZE // 8)

    return place, key_of


@inline
def row_maximum(x):
    """Over the four lanes of a row."""
    x = ptx.maximum(x, cuda.shfl_xor_sync(ALL_LANES, x, 1))
    return ptx.maximum(x, cuda.shfl_xor_sync(ALL_LANES, x, 2))


@once
def build_greatest(count):
    """``greatest(s, r)``: of row r's scores, in all of its lanes."""
    GROUPS = count // 4

    @inline
    def greatest(s, r):
        # two chains of maxima, each half as long
        one, other = ptx.maximum(s[2 * r], s[2 * r + 1]), ptx.maximum(s[4 + 2 * r], s[5 + 2 * r])
        for j in range(2, GROUPS, 2):
            e = 4 * j + 2 * r
            one = ptx.maximum(one, ptx.maximum(s[e], s[e + 1]))
            other = ptx.maximum(other, ptx.maximum(s[e + 4], s[e + 5]))
        return row_maximum(ptx.maximum(one, other))

    return greatest


@inline
def row_maximum_float64(x):
    """The same of float64."""
    x = max(x, cuda.shfl_xor_sync(ALL_LANES, x, 1))
    return max(x, cuda.shfl_xor_sync(ALL_LANES, x, 2))


@inline
def row_sum(x):
    """Over the four lanes of a row."""
    x += cuda.shfl_xor_sync(ALL_LANES, x, 1)
    return x + cuda.shfl_xor_sync(ALL_LANES, x, 2)


@once
def build_row(group):
    """``query_of(row)`` and ``head_of(row)``: which query a row of scores is, and of which head,
    counted from the first, where the `group` heads of each query are neighbours;
    ``stop_of(row)``, the query after the last one of the rows before that.
    """
    GROUP = group

    @inline
    def query_of(row):
        return i32(u32(row) // u32(GROUP)) if GROUP > 1 else row

    @inline
    def head_of(row):
        return i32(u32(row) % u32(GROUP)) if GROUP > 1 else i32(0)

    @inline
    def stop_of(row):
        return i32(query_of(i32(row - 1)) + 1) if GROUP > 1 else row

    return query_of, head_of, stop_of


class Runs(NamedTuple):
    """The registers of a lane by runs: a run has one query, and neighbouring keys.

    Attributes
    ----------
    count, width : int
        How many there are, and the keys of each.
    last_query, last_key : int
        Greatest offsets from the lane's first query and key.
    apart : int
        Where several lanes have neighbouring runs of eight keys, how far from each other they are.
    register : function
        ``register(n, x)``: where key x of run n is.
    query, key : function
        ``query(n)``, ``key(n)``: offsets of run n from the lane's first query and key.
    group : int
        Heads whose queries are the rows of a tile, as `build_row` says. If there are several,
        "query" means row here and wherever runs are worked on, and the head is the first of them.
    """

    count: int
    width: int
    last_query: int
    last_key: int
    apart: int
    register: Any
    query: Any
    key: Any
    group: int = 1


def runs_of_queries(m_tiles, block_n, group=1):
    """`Runs` of S, with 16 `m_tiles` rows of a warp, of `group` heads, and columns as
    `place_of_key` stores them.

    Lane l's first query is the warp's ``row0 + l // 4``, its first key ``col0 + 8 (l % 4)``.
    """
    ROWS_OF_LANE, TILES_N = 2 * m_tiles, block_n // 8

    @inline
    def register(n, x):
        row, q = n % ROWS_OF_LANE, n // ROWS_OF_LANE
        return i32(((row // 2) * TILES_N + 4 * q + x // 2) * 4 + 2 * (row % 2) + x % 2)

    @inline
    def query(n):
        return i32(n % ROWS_OF_LANE * 8)

    @inline
    def key(n):
        return i32(n // ROWS_OF_LANE * 32)

    count = ROWS_OF_LANE * block_n // 32
    return Runs(count, 8, 16 * m_tiles - 8, block_n - 25, 0, register, query, key, group)


def runs_of_keys(m_tiles, queries):
    """`Runs` of S^T, with 16 `m_tiles` rows of a warp, stored in such an order that a lane holds
    neighbouring keys, and so many columns.

    Lane l's first query is ``q0 + 2 (l % 4)``, its first key the warp's ``key0 + 2 m_tiles (l //
    4)``.
    """
    WIDTH, TILES_N = 2 * m_tiles, queries // 8

    @inline
    def register(n, x):
        return i32((x // 2 * TILES_N + n // 2) * 4 + 2 * (x % 2) + n % 2)

    @inline
    def query(n):
        return i32(n // 2 * 8 + n % 2)

    @inline
    def key(n):
        return i32(0)

    return Runs(queries // 4, WIDTH, queries - 7, WIDTH - 1, 4, register, query, key)


def runs_of_columns(block_n):
    """`Runs` of S, with 16 rows of a warp, where columns are keys in their order.

    Lane l's first query is the warp's ``row0 + l // 4``, its first key ``col0 + 2 (l % 4)``.
    """

    @inline
    def register(n, x):
        return i32(2 * n + x)

    @inline
    def query(n):
        return i32(n % 2 * 8)

    @inline
    def key(n):
        return i32(n // 2 * 8)

    return Runs(block_n // 4, 2, 8, block_n - 7, 1, register, query, key)


def runs_of_rows(columns):
    """`Runs` of S^T, with 16 rows of a warp, which are keys in their order, and so many columns.

    Lane l's first query is ``q0 + 2 (l % 4)``, its first key the warp's ``key0 + l // 4``; a run is
    an element.
    """

    @inline
    def register(n, x):
        return i32(n)

    @inline
    def query(n):
        return i32(n // 4 * 8 + n % 2)

    @inline
    def key(n):
        return i32(n % 4 // 2 * 8)

    return Runs(columns // 2, 1, columns - 7, 8, 0, register, query, key)


@once
def build_pack(count, bfloat16, turing=False, positive=False, raised=0.0):
    """``pack(p, x)``: pairs of float32 to words of two 16-bit floats, rounded to nearest even, so
    many powers of two larger as they are `raised`; ``pack2`` for one pair, as it is. Negative ones
    become 0 if only `positive` ones count.
    """
    COUNT, BFLOAT16, TURING, POSITIVE, TIMES = count, bfloat16, turing, positive, 2.0**raised

    @inline
    def pack2(x, y):
        if BFLOAT16:
            return ptx.pack_positive_bfloat16(x, y) if POSITIVE else ptx.pack_bfloat16(x, y)
        if TURING and POSITIVE:
            return ptx.pack_positive_float16_on_turing(x, y)
        if TURING:
            return ptx.pack_float16_on_turing(x, y)
        if POSITIVE:
            return ptx.pack_positive_float16(x, y)
        return ptx.pack_float16(x, y)

    @inline
    def pack(p, x):
        for j in range(COUNT):
            p[j] = pack2(x[2 * j] * f32(TIMES), x[2 * j + 1] * f32(TIMES))

    return pack, pack2


@once
def build_unpack(bfloat16):
    """``element(word, x)``: of a word of two 16-bit floats, the lower one for even x, else the
    upper, as float32.
    """
    BFLOAT16 = bfloat16

    @inline
    def element(word, x):
        if BFLOAT16:
            return ptx.as_float32(u32(word & u32(0xFFFF0000)) if x % 2 else u32(word << u32(16)))
        return ptx.unpack_float16_high(word) if x % 2 else ptx.unpack_float16(word)

    return element


@once
def build_split(count, planes=2, positive=False):
    """``split(p, x)``: pairs of float32 to two words of two float16 each, high and low, of which x
    is ``high + low / LOW`` but for its last bits; the low words come after all `count` high ones.
    ``split_pair(p, j, x, y)`` for one pair. Negative ones become 0 if only `positive` ones count.

    The high one is cut off, not rounded, which takes one instruction and a bit of the 22; but
    without low ones, of one of the `planes`, it is rounded.
    """
    COUNT, KEPT, LOW, TWO = count, 0xFFFFE000, ptx.LOW, planes > 1
    pack = ptx.pack_positive_float16 if positive else ptx.pack_float16

    @inline
    def split_pair(p, j, x, y):
        if TWO:
            high_x = ptx.as_float32(ptx.as_uint32(x) & u32(KEPT))
            high_y = ptx.as_float32(ptx.as_uint32(y) & u32(KEPT))
            p[j] = pack(high_x, high_y)
            p[COUNT + j] = pack((x - high_x) * f32(LOW), (y - high_y) * f32(LOW))
        else:
            p[j] = pack(x, y)

    @inline
    def split(p, x):
        for j in range(COUNT):
            split_pair(p, j, x[2 * j], x[2 * j + 1])

    return split, split_pair
