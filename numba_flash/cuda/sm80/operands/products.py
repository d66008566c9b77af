"""Products of a warp, by what the loops call them, and its fragments on their way to shared memory.

``nt``: A B^T, rows of both run along the sum. ``nn``: A B. ``tn``: A^T B.
"""

from functools import partial
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.ptx import Matrices, Planes
from numba_flash.cuda.runtime.lang import cuda, i32, inline, once, u32
from numba_flash.cuda.score.fragment import build_pack, build_split
from numba_flash.cuda.sm80.lane import build_lane, build_lane_of_lines
from numba_flash.cuda.sm80.operands.products_planes import build_planes_nn, build_planes_nt
from numba_flash.cuda.sm80.tiles import padded, pitch


class Kind(NamedTuple):
    """Of a product's operands.

    Attributes
    ----------
    bfloat16 : bool
        They are bfloat16, else float16.
    turing : bool
        Tensor cores take 8 along the sum at a time.
    """

    bfloat16: bool
    turing: bool


@once
def build_hold(m_tiles, depth, pitch):
    """``hold(fragments, a)``: rows of A, stored row by row, into registers."""
    load = ptx.load_matrices(m_tiles, depth // 16, Matrices(16 * pitch, 32, False))
    beside, _ = build_lane(pitch)

    @inline
    def hold(fragments, a):
        load(fragments, beside(a))

    return hold


@once
def build_nt(kind, m_tiles, columns, depth, a_pitch, b_pitch, held, fresh=True, lines=False):
    """``product(acc, a, b)``: acc = A B^T, or acc += A B^T unless `fresh`; A is in registers if
    `held`, rows of B are swizzled `lines`.
    """
    HELD = held
    a = None if held else Matrices(16 * a_pitch, 32, False)
    b = Matrices(16 * b_pitch, 32, False, lines)
    multiply = ptx.product(m_tiles, columns // 16, depth // 16, a, b, *kind, fresh)
    beside, _ = build_lane(a_pitch)
    _, below = build_lane_of_lines(b_pitch) if lines else build_lane(b_pitch)

    @inline
    def product(acc, a, b):
        if HELD:
            multiply(acc, a, below(b))
        else:
            multiply(acc, beside(a), below(b))

    return product


@once
def build_nt_from(kind, m_tiles, columns, depth, a_pitch, b_pitch, held=False, by_row=False):
    """``product(acc, a, b, start)``: acc = start + A B^T, with a number for each column, or each
    row if it is `by_row`, as `numba_flash.cuda.ptx.begun_product` takes them.
    """
    HELD = held
    a = None if held else Matrices(16 * a_pitch, 32, False)
    b = Matrices(16 * b_pitch, 32, False)
    sizes = m_tiles, columns // 16, depth // 16
    multiply = ptx.begun_product(*sizes, a, b, *kind, by_row=by_row).multiply_from
    beside, _ = build_lane(a_pitch)
    _, below = build_lane(b_pitch)

    @inline
    def product(acc, a, b, start):
        if HELD:
            multiply(acc, a, below(b), start)
        else:
            multiply(acc, beside(a), below(b), start)

    return product


@once
def build_nn(kind, m_tiles, columns, depth, b_pitch, a_pitch=None, fresh=False, lines=False):
    """``product(acc, a, b)``: acc += A B, or acc = A B if `fresh`, with A in registers unless it
    has a pitch; rows of B are swizzled `lines`.
    """
    HELD = a_pitch is None
    a = None if HELD else Matrices(16 * a_pitch, 32, False)
    b = Matrices(32, 16 * b_pitch, True, lines)
    multiply = ptx.product(m_tiles, columns // 16, depth // 16, a, b, *kind, fresh)
    beside_a, _ = build_lane(a_pitch or 0)
    beside, _ = build_lane_of_lines(b_pitch) if lines else build_lane(b_pitch)

    @inline
    def product(acc, a, b):
        if HELD:
            multiply(acc, a, beside(b))
        else:
            multiply(acc, beside_a(a), beside(b))

    return product


@once
def build_tn(kind, m_tiles, columns, depth, a_pitch, b_pitch, fresh=True):
    """``product(acc, a, b)``: acc = A^T B, or acc += A^T B unless `fresh`, both stored along the
    sum row by row.
    """
    a, b = Matrices(32, 16 * a_pitch, True), Matrices(32, 16 * b_pitch, True)
    multiply = ptx.product(m_tiles, columns // 16, depth // 16, a, b, *kind, fresh)
    _, below = build_lane(a_pitch)
    beside, _ = build_lane(b_pitch)

    @inline
    def product(acc, a, b):
        multiply(acc, below(a), beside(b))

    return product


@once
def build_put_words(m_tiles, columns, pitch, first=0):
    """``put(tile, words)``: a warp's rows, as packed by
    `numba_flash.cuda.score.fragment.build_pack`, to shared memory, from the `first` word on.
    """
    M_TILES, GROUPS, PITCH, FIRST = m_tiles, columns // 8, pitch, first

    @inline
    def put(tile, words):
        lane = i32(cuda.threadIdx.x % 32)
        mine = u32(tile + u32(lane // 4 * PITCH + lane % 4 * 4))
        for m in range(M_TILES):
            for j in range(GROUPS):
                for r in range(2):
                    at = u32(mine + u32((16 * m + 8 * r) * PITCH + 16 * j))
                    ptx.store_shared(at, i32(words[FIRST + (m * GROUPS + j) * 2 + r]))

    return put


@once
def build_put(m_tiles, columns, pitch, bfloat16, turing=False):
    """``put(tile, acc, factor)``: rows of a warp times their factors, rounded, to shared memory."""
    M_TILES, GROUPS, PITCH = m_tiles, columns // 8, pitch
    _, pack2 = build_pack(0, bfloat16, turing)

    @inline
    def put(tile, acc, factor):
        lane = i32(cuda.threadIdx.x % 32)
        mine = u32(tile + u32(lane // 4 * PITCH + lane % 4 * 4))
        for m in range(M_TILES):
            for j in range(GROUPS):
                for r in range(2):
                    e, x = (m * GROUPS + j) * 4 + 2 * r, factor[2 * m + r]
                    at = u32(mine + u32((16 * m + 8 * r) * PITCH + 16 * j))
                    ptx.store_shared(at, i32(pack2(acc[e] * x, acc[e + 1] * x)))

    return put


class Products(NamedTuple):
    """Functions of kernels, as the loop calls them.

    Attributes
    ----------
    scores, more_scores : function
        ``scores(s, q, k)``: S of the first columns of Q and K; with those of the others.
    pack : function
        ``pack(p, s)``: P as `values` takes it.
    values : function
        ``values(acc, p, v)``: O += P V.
    """

    scores: Any
    more_scores: Any
    pack: Any
    values: Any


def build_products(dtype, shape, tile, begin, positive, fresh=True):
    """`Products` of a warp; of `begin` columns first, which are added to what is there unless
    `fresh`. Of P, if only `positive` weights count.
    """
    m_tiles, block_n, (d, dv) = tile.m_tiles, tile.warp_n, map(padded, shape[:2])
    pitch_k, pitch_v = map(pitch, shape.columns)
    pairs = m_tiles * block_n // 4
    if shape.planes:
        planes = Planes(2 * d, 2 * d) if shape.planes > 1 else None
        scores = build_planes_nt(m_tiles, block_n, d, pitch_k, pitch_k, planes)
        planes = Planes(pairs, 2 * dv) if shape.planes > 1 else None
        values, _ = build_planes_nn(m_tiles, dv, block_n, pitch_v, planes)
        pack, _ = build_split(pairs, shape.planes, positive)
        return Products(scores, None, pack, values)
    kind, (k, v) = Kind(dtype == "bfloat16", shape.turing), map(tile.key_rows, shape.columns)
    scores_of = partial(build_nt, kind, m_tiles, block_n, lines=k.lines)
    scores = scores_of(begin, pitch_k, k.bytes, tile.q_registers, fresh)
    more_scores = scores_of(d - begin, pitch_k, k.bytes, False, fresh=False)
    values = build_nn(kind, m_tiles, dv, block_n, v.bytes, lines=v.lines)
    pack, _ = build_pack(pairs, *kind, positive)
    return Products(scores, more_scores, pack, values)
