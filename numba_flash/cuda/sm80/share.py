"""Two warps that share rows of the forward pass, for head dimensions at which one warp has
registers for 16 rows of O alone: each makes the scores of its part of a tile's keys, and has its
part of the columns of O.

So a warp has 32 rows, and reads half as much of K and V for each of them; shared memory, which
gives 128 bytes a clock, is what a loop whose warps read all of K and V for 16 rows waits for. The
two tell each other whether O has to be rescaled, the largest scores if so, and P, 32 keys of each
at a time. Lanes have the same rows in both, so P goes from lane to lane as it lies in registers.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import fragment, ptx
from numba_flash.cuda.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.sm80 import products
from numba_flash.cuda.sm80.tiles import KEYS, WARP

PAIR = 2 * WARP  # threads
FIRST_BARRIER = 1  # of those with numbers; 0 is that of all threads
QUAD_BYTES = 16  # of four words of a lane


class Share(NamedTuple):
    """Functions of kernels; `smem` is where shared memory begins.

    Attributes
    ----------
    raise_shifts : function
        ``raise_shifts(s, acc, m_i, l_i, scale_log2, smem)``: as `numba_flash.cuda.softmax.Raise`
        has it for a warp alone.
    values : function
        ``values(acc, p, v, smem)``: O += P V, of the warp's columns; p is packed P of its own keys,
        whose values are at v, columns included.
    add_sums : function
        ``add_sums(l_i, smem)``: l of all keys, in the first lane of a row alone.
    meet : function
        ``meet()``: the two wait for each other.
    """

    raise_shifts: Any
    values: Any
    add_sums: Any
    meet: Any


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
    WORDS, PITCH, NEXT = shared.p, shared.pitch_v, KEYS * shared.pitch_v
    product = products.build_nn(kind, M_TILES, columns, KEYS, PITCH)
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
        warp, lane = i32(cuda.threadIdx.x // 32), i32(cuda.threadIdx.x % 32)
        words = u32(smem + u32(WORDS + lane * QUAD_BYTES))
        v_other = u32(v + u32((1 - 2 * (warp % 2)) * (WARP_N * PITCH)))
        own, other = u32(words + u32(warp * BYTES)), u32(words + u32((warp ^ 1) * BYTES))
        x = Rounds(acc, p, v, v_other, own, other)
        put(i32(0), x)
        rounds(x)

    return values


def build_share(kind, tile, shape, columns, raise_):
    """The `Share` of a tile, with so many `columns` of a warp's O."""
    shared, ROWS = tile.shared(shape.head_dim, shape.head_dim_v), 2 * tile.m_tiles
    meet, meet_any = build_meet()
    exchange = build_exchange(tile, shared)
    find, rescale = raise_.find, raise_.rescale

    @inline
    def raise_shifts(s, acc, m_i, l_i, scale_log2, smem):
        best, others = cuda.local.array(ROWS, f32), cuda.local.array(ROWS, f32)
        # P of the tile before has been read, too
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
        for r in range(ROWS):
            total = l_i[r] + others[r]
            l_i[r] = total if cuda.threadIdx.x % 4 == 0 else f32(0)

    return Share(raise_shifts, build_values(kind, tile, shared, columns), add_sums, meet)
