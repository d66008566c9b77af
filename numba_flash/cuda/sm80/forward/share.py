"""Warps that share rows of the forward pass. Two do so for head dimensions at which one warp has
registers for 16 rows of O alone: each makes the scores of its part of a tile's keys, and has its
part of the columns of O.

So a warp has 32 rows, and reads half as much of K and V for each of them; shared memory, which
gives 128 bytes a clock, is what a loop whose warps read all of K and V for 16 rows waits for. The
two tell each other whether O has to be rescaled, the largest scores if so, and P, 32 keys of each
at a time. Lanes have the same rows in both, so P goes from lane to lane as it lies in registers.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.score import fragment
from numba_flash.cuda.sm80.load import build_store
from numba_flash.cuda.sm80.operands import products
from numba_flash.cuda.sm80.tiles import KEYS, WARP, pitch

PAIR = 2 * WARP  # threads
FIRST_BARRIER = 1  # of those with numbers; 0 is that of all threads
QUAD_BYTES = 16  # of four words of a lane


class Share(NamedTuple):
    """Functions of kernels; `smem` is where shared memory begins.

    Attributes
    ----------
    raise_shifts : function
        ``raise_shifts(s, acc, m_i, l_i, scale_log2, smem)``:
        `numba_flash.cuda.score.softmax.Raise`, for all scores of the warp's rows.
    values : function
        ``values(acc, p, v, smem)``: O += P V, in the warp's columns; p is P of its own keys, whose
        values are at v.
    add_sums : function
        ``add_sums(l_i, smem)``: l of all keys.
    store_floats : function
        As `numba_flash.cuda.sm80.load.build_store_floats` makes it, in the warp's columns.
    store : function
        ``store(smem, x, acc, inverse)``: rows of O, each times its `inverse`, by way of shared
        memory to those of a `numba_flash.cuda.sm80.block.Block`.
    """

    raise_shifts: Any
    values: Any
    add_sums: Any
    store_floats: Any
    store: Any


class Rounds(NamedTuple):
    """What a round of `values` works on."""

    acc: Any
    p: Any
    v_own: int
    v_other: int
    own: int
    other: int


@once
def build_meet():
    """``meet()``, and ``meet_any(true)``: whether it is for a thread of the two."""

    @inline
    def barrier():
        return u32(FIRST_BARRIER + cuda.threadIdx.x // PAIR)

    @inline
    def meet():
        ptx.barrier_sync(barrier(), u32(PAIR))

    @inline
    def meet_any(true):
        return ptx.barrier_any(barrier(), u32(PAIR), u32(1) if true else u32(0)) != u32(0)

    return meet, meet_any


@once
def build_exchange(tile, shared):
    """``exchange(x, y, smem)``: y is what the other warp has in x, a number for each row of a lane,
    if all lanes of a row have the same; before others are exchanged the two have to meet.
    """
    ROWS, WARP_ROWS, NUMBERS = 2 * tile.m_tiles, 16 * tile.m_tiles, shared.numbers
    meet, _ = build_meet()

    @inline
    def place(smem, warp, r):
        row = cuda.threadIdx.x % 32 // 4 + r // 2 * 16 + r % 2 * 8
        return u32(smem + u32(NUMBERS) + u32((warp * WARP_ROWS + row) * 4))

    @inline
    def exchange(x, y, smem):
        warp = i32(cuda.threadIdx.x // 32)
        if cuda.threadIdx.x % 4 == 0:
            for r in range(ROWS):
                ptx.store_shared_vector(place(smem, warp, r), (x[r],))
        meet()
        for r in range(ROWS):
            y[r] = ptx.as_float32(u32(ptx.load_shared(place(smem, i32(warp ^ 1), r))))

    return exchange


@once
def build_values(kind, tile, shared, columns):
    """``values(acc, p, v, smem)`` of `Share`, with so many `columns` of a warp's O."""
    M_TILES, WARP_N, ROUNDS = tile.m_tiles, tile.warp_n, tile.warp_n // KEYS
    QUADS = M_TILES * KEYS // 16  # of four words of P: a step of a product
    ALL, BYTES, PAIRS = 4 * QUADS, QUADS * WARP * QUAD_BYTES, tile.warp_n // 4
    WORDS, PITCH, NEXT, OWN = shared.p, shared.pitch_v, KEYS * shared.pitch_v, columns
    product = products.build_nn(kind, M_TILES, OWN, KEYS, PITCH)
    meet, _ = build_meet()

    @inline
    def put(n, x):
        """P of this warp, of the n-th keys."""
        for quad in range(QUADS):
            m, step = quad // (KEYS // 16), quad % (KEYS // 16)
            first = m * PAIRS + n * (KEYS // 4) + 4 * step
            words = x.p[first], x.p[first + 1], x.p[first + 2], x.p[first + 3]
            ptx.store_shared_vector(u32(x.own + u32(quad * (WARP * QUAD_BYTES))), words)

    @inline
    def one_round(n, x):
        mine, others = cuda.local.array(ALL, u32), cuda.local.array(ALL, u32)
        meet()  # P of the other warp is there
        for quad in range(QUADS):
            words = ptx.load_shared_words(u32(x.other + u32(quad * (WARP * QUAD_BYTES))))
            m, step = quad // (KEYS // 16), quad % (KEYS // 16)
            for w in range(4):
                mine[4 * quad + w] = x.p[m * PAIRS + n * (KEYS // 4) + 4 * step + w]
                others[4 * quad + w] = words[w]
        if n + 1 < ROUNDS:
            meet()  # and has been read
            put(i32(n + 1), x)
        product(x.acc, mine, u32(x.v_own + u32(n * NEXT)))
        product(x.acc, others, u32(x.v_other + u32(n * NEXT)))

    rounds = ptx.repeated(ROUNDS, one_round)

    @inline
    def values(acc, p, v, smem):
        thread = ptx.thread_here()  # for registers
        warp, lane = i32(thread // 32), i32(thread % 32)
        words = u32(smem + u32(WORDS + lane * QUAD_BYTES))
        part = i32(warp % 2)
        v = u32(v + u32(part * (2 * OWN)))
        v_other = u32(v + u32((1 - 2 * part) * (WARP_N * PITCH)))
        own, other = u32(words + u32(warp * BYTES)), u32(words + u32((warp ^ 1) * BYTES))
        x = Rounds(acc, p, v, v_other, own, other)
        put(i32(0), x)
        rounds(x)

    return values


@once
def build_store_rows(tile, shape, bfloat16, meet):
    """``store(smem, x, acc, inverse)`` of `Share`."""
    WAYS, M_TILES, WARP_ROWS, STORED = tile.ways, tile.m_tiles, *tile.rows_of_warp
    COLUMNS = tile.columns(shape.head_dim_v)
    OWN, PITCH = COLUMNS // WAYS, pitch(COLUMNS)
    put = products.build_put(M_TILES, OWN, PITCH, bfloat16, shape.turing)
    store_rows = build_store(STORED, shape.head_dim_v, shape.wide, None, COLUMNS)

    @inline
    def store(smem, x, acc, inverse):
        warp = i32(cuda.threadIdx.x // 32)
        first, part = i32(warp // WAYS * WARP_ROWS), i32(warp % WAYS)
        put(u32(smem + u32(first * PITCH + part * (2 * OWN))), acc, inverse)
        meet()  # all of their rows are there
        first = i32(first + part * STORED)
        store_rows(u32(smem + u32(first * PITCH)), x.o, i32(x.row0 + first), x.rows)

    return store


def build_alone(tile, shape, bfloat16, raising, values, store_floats):
    """The `Share` of warps that have their rows alone."""
    raise_all = raising.all

    @inline
    def raise_shifts(s, acc, m_i, l_i, scale_log2, smem):
        raise_all(s, acc, m_i, l_i, scale_log2)

    @inline
    def values_of_all(acc, p, v, smem):
        values(acc, p, v)

    @inline
    def add_sums(l_i, smem):
        pass

    @inline
    def meet():
        cuda.syncwarp()

    store = build_store_rows(tile, shape, bfloat16, meet)
    return Share(raise_shifts, values_of_all, add_sums, store_floats, store)


def build_share(tile, shape, bfloat16, raising, values, store_floats):
    """The `Share` of a tile; with `values` of warps that have their rows alone, and
    `store_floats` of as many columns as a warp has.
    """
    if tile.ways == 1:
        return build_alone(tile, shape, bfloat16, raising, values, store_floats)
    shared, ROWS = tile.shared(shape.head_dim, shape.head_dim_v), 2 * tile.m_tiles
    OWN = tile.columns(shape.head_dim_v) // tile.ways
    meet, meet_any = build_meet()
    exchange = build_exchange(tile, shared)
    find, rescale = raising.find, raising.rescale

    @inline
    def raise_shifts(s, acc, m_i, l_i, scale_log2, smem):
        best, others = cuda.local.array(ROWS, f32), cuda.local.array(ROWS, f32)
        # by now P of the tile before has been read, too
        if meet_any(find(best, s, m_i, scale_log2)):
            for r in range(ROWS):
                best[r] = fragment.row_maximum(best[r])
            exchange(best, others, smem)
            for r in range(ROWS):
                best[r] = ptx.maximum(best[r], others[r])
            rescale(best, acc, m_i, l_i, scale_log2)

    @inline
    def add_sums(l_i, smem):
        others = cuda.local.array(ROWS, f32)
        for r in range(ROWS):
            l_i[r] = fragment.row_sum(l_i[r])
        exchange(l_i, others, smem)
        for r in range(ROWS):  # the sum over lanes follows
            total = l_i[r] + others[r]
            l_i[r] = total if cuda.threadIdx.x % 4 == 0 else f32(0)

    @inline
    def store_columns(x, acc, factor, row, stop, centre, weight):
        own = x[:, index(cuda.threadIdx.x // 32 % 2 * OWN) :]
        store_floats(own, acc, factor, row, stop, centre, weight)

    values = build_values(products.Kind(bfloat16, shape.turing), tile, shared, OWN)
    store = build_store_rows(tile, shape, bfloat16, meet)
    return Share(raise_shifts, values, add_sums, store_columns, store)
