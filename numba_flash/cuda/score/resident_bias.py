"""A bias that batch elements share, in shared memory: each thread keeps what belongs to its own
scores, and reads sixteen bytes at a time, beside those of its neighbours.

In the forward pass scores are raw products, and begin with ``bias / scale``: then the bias takes no
arithmetic. A group of threads, to whom a product belongs, in whose bias there is Inf, NaN, or a
number so large that this might overflow keeps it as it is, and adds it to scaled products.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.score import fragment
from numba_flash.cuda.score.fetch import build_fetch, held
from numba_flash.cuda.score.score import Head, Region

VECTOR = 16  # bytes that a thread reads at a time
NEG_INF = -math.inf
FAR = 1e30  # biases up to there can be divided by the scale


class Room(NamedTuple):
    """Where a group of threads keeps a bias.

    Attributes
    ----------
    resident : int
        Offset of that of all groups in shared memory.
    tiles, vectors : int
        How many tiles there are, and vectors of a thread in each.
    queries, keys : int
        From the first one of a tile to that of the next; one of them is 0.
    threads : int
        Of a group.
    any_of : function
        ``any_of(me, word)``: a thread of group `me` has a word that is not 0.
    """

    resident: int
    tiles: int
    vectors: int
    queries: int
    keys: int
    threads: int
    any_of: Any

    @property
    def away(self) -> int:
        """Bytes from a vector of a thread to the next."""
        return self.threads * VECTOR


class Filled(NamedTuple):
    """A tile of the bias on its way to shared memory.

    Attributes
    ----------
    words : array
        The thread's part, as `numba_flash.cuda.score.fetch` brings it.
    special : array of one uint32
        Not 0 if there was a special bias: far ones in the forward pass, and those that hide in the
        backward pass.
    at : uint32
        Where the thread keeps it.
    keys : int32
        How many there are from the thread's first one on.
    """

    words: Any
    special: Any
    at: int
    keys: int


class ResidentBias(NamedTuple):
    """Functions of a thread.

    Attributes
    ----------
    fill : function
        ``fill(smem, me, query, key, region, at, extras)``: keep what belongs to a thread's scores,
        of which the first tile's are from this query and key on. Whether a thread of the group has
        a special bias.
    place : function
        ``place(smem, me, t)``: where the thread's part of the t-th tile is.
    """

    fill: Any
    place: Any


@once
def build_resident(options, vectors, runs, room, put_vector):
    """`ResidentBias` of a lane's `runs`.

    put_vector : ``put_vector(filled, n, to)``: keep the n-th vector of a tile: `build_floats`.
    """
    TILES, VECTORS, QUERIES, KEYS = room.tiles, room.vectors, room.queries, room.keys
    RESIDENT, THREADS, AWAY, HELD = (
        room.resident,
        room.threads,
        room.away,
        held(options, runs).words,
    )
    TILE_BYTES, fetch, any_of = VECTORS * AWAY, build_fetch(options, runs, vectors), room.any_of

    @inline
    def place(smem, me, t):
        mine = u32(cuda.threadIdx.x % THREADS * VECTOR)
        return u32(smem + u32(RESIDENT) + u32((me * TILES + t) * TILE_BYTES) + mine)

    @inline
    def put(n, filled):
        put_vector(filled, n, u32(filled.at + u32(n * AWAY)))

    put_all = ptx.repeated(VECTORS, put)

    @inline
    def fill(smem, me, query, key, region, at, extras):
        words = cuda.local.array(HELD, u32)
        special = cuda.local.array(1, u32)
        special[0] = u32(0)
        for t in range(TILES):
            i, j = i32(query + t * QUERIES), i32(key + t * KEYS)
            fetch(words, i, j, region, at, False, extras)
            put_all(Filled(words, special, place(smem, me, t), i32(region.cols - j)))
        return any_of(me, special[0])

    return ResidentBias(fill, place)


@once
def build_floats(options, factor, is_special):
    """``put_vector(filled, n, to)``: of two rows, two keys each, as float32 times a factor; -inf
    beyond the last key. ``look(filled, n, x)``: element x of run n, likewise.

    is_special : ``is_special(bias)``: the group has to know that there is such a bias.
    """
    FLOAT32, FACTOR = options.bias == "float32", factor
    element = fragment.build_unpack(options.bias == "bfloat16")

    @inline
    def look(filled, n, x):
        bias = ptx.as_float32(filled.words[2 * n + x]) if FLOAT32 else element(filled.words[n], x)
        there = i32(n // 2 * 8 + x) < filled.keys
        if there and is_special(bias):
            filled.special[0] = u32(1)
        return bias * f32(FACTOR) if there else f32(NEG_INF)

    @inline
    def put_vector(filled, n, to):
        one, other = i32(2 * n), i32(2 * n + 1)
        four = (
            look(filled, one, 0), look(filled, one, 1),
            look(filled, other, 0), look(filled, other, 1),
        )  # fmt: skip
        ptx.store_shared_vector(to, four)

    return put_vector, look


class BegunScores(NamedTuple):
    """Registers of scores, and where their bias is kept; see `build_keep`."""

    s: Any
    at: int
    factor: float


class Keep(NamedTuple):
    """Functions of a thread; see `build_keep`."""

    fill: Any
    begin: Any
    add: Any


@once
def build_keep(options, vectors, tile, resident, threads, any_of):
    """``fill(smem, me, query, x, extras, keys, inverse)``: keep what belongs to a thread's rows,
    whose first is `query`, of a unit x;
    1 if raw products begin with it, 0 if it is added to scaled ones. ``begin(s, smem, me, t,
    inverse)``: what raw products of the t-th tile begin with. ``add(s, smem, me, t, scale)``:
    scores, of products without it, in base e.

    threads : of a group, of which `me` is the number.
    any_of : ``any_of(me, word)``: a thread of the group has a word that is not 0.
    """
    BLOCK_N, TILES, WIDE = tile.block_n, tile.tiles, tile.wide
    VECTORS = BLOCK_N // 8 if WIDE else BLOCK_N // 16  # of a thread and tile
    room = Room(resident, TILES, VECTORS, 0, BLOCK_N, threads, any_of)
    AWAY, BFLOAT16 = room.away, options.bias == "bfloat16"
    HIDDEN = 0xFF80 if BFLOAT16 else 0xFC00  # -inf in 16 bits
    element = fragment.build_unpack(BFLOAT16)

    @inline
    def is_far(bias):
        return not abs(bias) < f32(FAR)

    put_floats, look = build_floats(options, 1.0, is_far)

    @inline
    def word(filled, n):
        """Two keys of run n in 16 bits."""
        two = filled.words[n]
        for x in range(2):
            look(filled, n, x)
        if i32(n // 2 * 8 + 1) >= filled.keys:
            two = u32((two & u32(0xFFFF)) | u32(HIDDEN << 16))
        if i32(n // 2 * 8) >= filled.keys:
            two = u32(HIDDEN << 16 | HIDDEN)
        return two

    @inline
    def put_halves(filled, j, to):
        four = (
            word(filled, 4 * j), word(filled, 4 * j + 1),
            word(filled, 4 * j + 2), word(filled, 4 * j + 3),
        )  # fmt: skip
        ptx.store_shared_vector(to, four)

    runs = fragment.runs_of_columns(BLOCK_N)
    keep, place = build_resident(options, vectors, runs, room, put_floats if WIDE else put_halves)

    @inline
    def divide(smem, me, inverse):
        for t in range(TILES):
            at = place(smem, me, t)
            for j in range(VECTORS):
                a, b, c, d = ptx.load_shared_four(u32(at + u32(j * AWAY)))
                four = a * inverse, b * inverse, c * inverse, d * inverse
                ptx.store_shared_vector(u32(at + u32(j * AWAY)), four)

    @inline
    def fill(smem, me, query, x, extras, keys, inverse):
        at = Head(x.b0, x.b1, i32(0), x.head, i32(0))
        region = Region(x.row0, i32(0), x.rows, keys, i32(0), i32(0))
        if keep(smem, me, query, fragment.first_column(), region, at, extras):
            return u32(0)
        if WIDE:
            divide(smem, me, inverse)
        return u32(1)

    @inline
    def begin_wide(j, begun):
        s = begun.s
        s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3] = ptx.load_shared_four(
            u32(begun.at + u32(j * AWAY))
        )

    @inline
    def begin_words(j, begun):
        words = ptx.load_shared_words(u32(begun.at + u32(j * AWAY)))
        for e in range(8):
            begun.s[8 * j + e] = element(words[e // 2], e) * begun.factor

    begin_all = ptx.repeated(VECTORS, begin_wide if WIDE else begin_words)

    @inline
    def begin(s, smem, me, t, inverse):
        begin_all(BegunScores(s, place(smem, me, t), inverse))

    @inline
    def plus(s, e, bias, scale):
        """A score that its bias hides is hidden, whatever it is."""
        s[e] = f32(NEG_INF) if bias == f32(NEG_INF) else s[e] * scale + bias

    @inline
    def add_wide(j, begun):
        four = ptx.load_shared_four(u32(begun.at + u32(j * AWAY)))
        for e in range(4):
            plus(begun.s, 4 * j + e, four[e], begun.factor)

    @inline
    def add_words(j, begun):
        words = ptx.load_shared_words(u32(begun.at + u32(j * AWAY)))
        for e in range(8):
            plus(begun.s, 8 * j + e, element(words[e // 2], e), begun.factor)

    add_all = ptx.repeated(VECTORS, add_wide if WIDE else add_words)

    @inline
    def add(s, smem, me, t, scale):
        add_all(BegunScores(s, place(smem, me, t), scale))

    return Keep(fill, begin, add)
