"""A bias that batch elements share, in shared memory: each thread keeps what belongs to its own
scores, and reads sixteen bytes at a time, beside those of its neighbours.

Scores are sums of products that begin with ``bias / unit``, where the unit is a power of two: then
a bias of 16 bits takes no arithmetic but a product with a multiple of the unit matrix, for which a
thread keeps words of the operand; one of float32 is read where it is added to. A group of threads,
to whom a product belongs, in whose bias there is Inf, NaN, or a number so large that this might
overflow keeps it as scores lie, and adds it to scaled products.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.fetch import build_fetch, held
from numba_flash.cuda.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.score import Head, Region

VECTOR = 16  # bytes that a thread reads at a time
NEG_INF = -math.inf
FAR = 1e30  # biases up to there can be divided by the unit
PART = 64  # keys that are brought at a time, at most


class Filled(NamedTuple):
    """A part of the bias on its way to shared memory.

    Attributes
    ----------
    words : array
        The thread's part, as `numba_flash.cuda.fetch` brings it.
    strange : array of one uint32
        Not 0 if there was a bias that is treated apart.
    at : uint32
        Where the thread keeps it.
    """

    words: Any
    strange: Any
    at: int


class Begun(NamedTuple):
    """Registers of scores, where their bias is kept, and a factor; see `build_keep`."""

    s: Any
    at: int
    factor: Any


class Keep(NamedTuple):
    """Functions of a thread; see `build_keep`."""

    put_unit: Any
    fill: Any
    begin: Any
    add: Any
    hide: Any


@once
def build_keep(options, vectors, tile, kept, threads, any_of):
    """``fill(smem, me, row0, x, extras, keys, inverse)``: keep what belongs to a thread of a group
    whose first query is row0, of a unit x; 1 if products begin with it, 0 if it is added to scaled
    ones. ``put_unit(smem, inverse)``: what `begin` multiplies by. ``begin(s, smem, me, t)``: what
    products of the t-th tile begin with. ``add(s, smem, me, t, scale)``: scores,
    of products without it, in base e. ``hide(s, keys)``: those beyond so many keys.

    threads : of a group, of which `me` is the number.
    any_of : ``any_of(me, word)``: a thread of the group has a word that is not 0.
    """
    BLOCK_N, TILES, THREADS, (KEPT, UNIT) = tile.block_n, tile.tiles, threads, kept
    FLOAT32, BFLOAT16 = options.bias == "float32", options.bias == "bfloat16"
    KIND = int(BFLOAT16)
    VECTORS = BLOCK_N // 8 if FLOAT32 else BLOCK_N // 16  # of a thread and tile
    AWAY, TILE_BYTES, KEYS = threads * VECTOR, VECTORS * threads * VECTOR, math.gcd(BLOCK_N, PART)
    PARTS, PART_BYTES = BLOCK_N // KEYS, TILE_BYTES // (BLOCK_N // KEYS)
    as_scores, as_operand = fragment.runs_of_columns(KEYS), fragment.runs_of_operand(KEYS)
    HELD = max(held(options, as_scores).words, held(options, as_operand).words)
    fetch_scores, fetch_operand = (
        build_fetch(options, runs, vectors) for runs in (as_scores, as_operand)
    )
    element, (_, pack2) = fragment.build_unpack(BFLOAT16), fragment.build_pack(0, BFLOAT16)
    hide_row = softmax.build_hide(BLOCK_N // 2, False)

    @inline
    def place(smem, me, t):
        """Of a thread's part of a tile."""
        mine = u32(cuda.threadIdx.x % THREADS * VECTOR)
        return u32(smem + u32(KEPT) + u32((me * TILES + t) * TILE_BYTES) + mine)

    @inline
    def note(f, bias):
        """Whether it can be divided is kept in mind."""
        if not abs(bias) < f32(FAR):
            f.strange[0] = u32(1)
        return bias

    @inline
    def number(f, w):
        return note(f, ptx.as_float32(f.words[w]))

    @inline
    def put_numbers(j, f):
        """Of two rows, two keys each."""
        w = i32(4 * j)
        four = number(f, w), number(f, i32(w + 1)), number(f, i32(w + 2)), number(f, i32(w + 3))
        ptx.store_shared_vector(u32(f.at + u32(j * AWAY)), four)

    @inline
    def put_words(j, f):
        """Of four rows, two keys each."""
        w = i32(4 * j)
        four = f.words[w], f.words[w + 1], f.words[w + 2], f.words[w + 3]
        ptx.store_shared_vector(u32(f.at + u32(j * AWAY)), four)

    @inline
    def operand(f, n):
        """Two queries of a key."""
        one, other = f.words[2 * n], f.words[2 * n + 1]
        note(f, element(one, 0))
        note(f, element(other, 0))
        return u32(one | other << u32(16))

    @inline
    def put_operand(j, f):
        n = i32(4 * j)
        four = operand(f, n), operand(f, i32(n + 1)), operand(f, i32(n + 2)), operand(f, i32(n + 3))
        ptx.store_shared_vector(u32(f.at + u32(j * AWAY)), four)

    OF_PART = VECTORS // PARTS
    put = ptx.repeated(OF_PART, put_numbers if FLOAT32 else put_words)
    put_operands = ptx.repeated(OF_PART, put_operand)

    @inline
    def divide(smem, me, inverse):
        for t in range(TILES):
            at = place(smem, me, t)
            for j in range(VECTORS):
                a, b, c, d = ptx.load_shared_four(u32(at + u32(j * AWAY)))
                four = a * inverse, b * inverse, c * inverse, d * inverse
                ptx.store_shared_vector(u32(at + u32(j * AWAY)), four)

    @inline
    def fill(smem, me, row0, x, extras, keys, inverse):
        words = cuda.local.array(HELD, u32)
        strange = cuda.local.array(1, u32)
        strange[0] = u32(0)
        at = Head(x.b0, x.b1, i32(0), x.head, i32(0))
        region = Region(x.row0, i32(0), x.rows, keys, i32(0), i32(0))
        thread = i32(cuda.threadIdx.x % THREADS)
        row, lane = i32(row0 + thread // 32 * 16), i32(thread % 32)
        if not FLOAT32:
            for part in range(TILES * PARTS):
                to = u32(place(smem, me, i32(0)) + u32(part * PART_BYTES))
                key, query = i32(part * KEYS + lane // 4), i32(row + lane % 4 * 2)
                fetch_operand(words, query, key, region, at, False, extras)
                put_operands(Filled(words, strange, to))
            if not any_of(me, strange[0]):
                return u32(1)
        for part in range(TILES * PARTS):
            to = u32(place(smem, me, i32(0)) + u32(part * PART_BYTES))
            key, query = i32(part * KEYS + fragment.first_column()), i32(row + lane // 4)
            fetch_scores(words, query, key, region, at, False, extras)
            put(Filled(words, strange, to))
        if not FLOAT32:
            return u32(0)
        if any_of(me, strange[0]):
            return u32(0)
        divide(smem, me, inverse)
        return u32(1)

    @inline
    def put_unit(smem, inverse):
        """By a warp, before anyone begins."""
        lane = i32(cuda.threadIdx.x)
        if not FLOAT32 and lane < 32:
            one, zero = pack2(inverse, f32(0)), u32(0)
            row, column = i32(lane // 4), fragment.first_column()
            word = one if row == column else u32(one << u32(16)) if row == column + 1 else zero
            at = u32(smem + u32(UNIT) + u32(lane * VECTOR))
            ptx.store_shared_vector(at, (word, zero, zero, word))

    @inline
    def begin_numbers(j, begun):
        s = begun.s
        s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3] = ptx.load_shared_four(
            u32(begun.at + u32(j * AWAY))
        )

    @inline
    def begin_products(j, begun):
        words = ptx.load_shared_words(u32(begun.at + u32(j * AWAY)))
        for half in range(2):
            four = ptx.fresh_product(begun.factor, words[2 * half], words[2 * half + 1], KIND)
            for e in range(4):
                begun.s[8 * j + 4 * half + e] = four[e]

    begin_all = ptx.repeated(VECTORS, begin_numbers if FLOAT32 else begin_products)

    @inline
    def begin(s, smem, me, t):
        if FLOAT32:
            begin_all(Begun(s, place(smem, me, t), f32(0)))
        else:
            unit = u32(smem + u32(UNIT) + u32(cuda.threadIdx.x % 32 * VECTOR))
            begin_all(Begun(s, place(smem, me, t), ptx.load_shared_words(unit)))

    @inline
    def plus(s, e, bias, scale):
        """A score that its bias hides is hidden, whatever it is."""
        s[e] = f32(NEG_INF) if bias == f32(NEG_INF) else s[e] * scale + bias

    @inline
    def add_numbers(j, begun):
        four = ptx.load_shared_four(u32(begun.at + u32(j * AWAY)))
        for e in range(4):
            plus(begun.s, 4 * j + e, four[e], begun.factor)

    @inline
    def add_words(j, begun):
        words = ptx.load_shared_words(u32(begun.at + u32(j * AWAY)))
        for e in range(8):
            plus(begun.s, 8 * j + e, element(words[e // 2], e), begun.factor)

    add_all = ptx.repeated(VECTORS, add_numbers if FLOAT32 else add_words)

    @inline
    def add(s, smem, me, t, scale):
        add_all(Begun(s, place(smem, me, t), scale))

    @inline
    def hide(s, keys):
        for r in range(2):
            hide_row(s, r, i32(0), i32(keys - fragment.first_column()))

    return Keep(put_unit, fill, begin, add, hide)
