"""Products of a warp of float32 numbers, each of which is two planes of float16, by what the loops
call them: see `numba_flash.cuda.sm80.operands.products`.
"""

import math

from numba_flash.cuda import ptx
from numba_flash.cuda.ptx import Matrices
from numba_flash.cuda.runtime.lang import inline, once, u32
from numba_flash.cuda.sm80.lane import build_lane

MORE = 32  # registers of a lane for sums of products with low planes
AT_ONCE = 16  # registers of a lane for sums of joined planes


@once
def build_planes_nt(m_tiles, columns, depth, a_pitch, b_pitch, planes, held=False):
    """``product(acc, a, b)``: acc = A B^T of float32 numbers, each in two `planes` of float16; A is
    in registers if `held`.
    """
    HELD, b = held, Matrices(16 * b_pitch, 32, False)
    a = None if held else Matrices(16 * a_pitch, 32, False)
    n_tiles = columns // 16
    at_once = math.gcd(n_tiles, MORE // (8 * m_tiles))
    steps = depth // 16
    multiply = ptx.planes_product(m_tiles, n_tiles, steps, a, b, planes, at_once, True, steps)
    beside, _ = build_lane(a_pitch)
    _, below = build_lane(b_pitch)

    @inline
    def product(acc, a, b):
        if HELD:
            multiply(acc, a, below(b), u32(0))
        else:
            multiply(acc, beside(a), below(b), u32(0))

    return product


@once
def build_planes_nn(m_tiles, columns, depth, b_pitch, planes):
    """``product(acc, a, b)``: acc += A B likewise, with A in registers; 16 columns at a time, for
    registers. ``times(acc, a, b, factor)``: acc += factor A B.
    """
    b = Matrices(32, 16 * b_pitch, True)
    sizes = m_tiles, columns // 16, depth // 16
    multiply = ptx.planes_product(*sizes, None, b, planes, 1)
    multiply_times = ptx.planes_product(*sizes, None, b, planes, 1, scaled=True)
    return _beside(multiply, multiply_times, b_pitch)


def _beside(multiply, multiply_times, b_pitch):
    """``product(acc, a, b)`` and ``times(acc, a, b, factor)``: these, with B where a lane reads it
    whose columns lie beside each other.
    """
    beside, _ = build_lane(b_pitch)

    @inline
    def product(acc, a, b):
        multiply(acc, a, beside(b), u32(0))

    @inline
    def times(acc, a, b, factor):
        multiply_times(acc, a, beside(b), factor)

    return product, times


@once
def build_joined_nt(m_tiles, columns, depth, b_pitch, planes, last=False):
    """``product(acc, a, b)``: acc = A B^T of float32 numbers, each the sum of its two `planes`
    (`numba_flash.cuda.ptx.joined_product`), with A in registers.
    """
    b, n_tiles = Matrices(16 * b_pitch, 32, False), columns // 16
    at_once = math.gcd(n_tiles, max(1, AT_ONCE // (8 * m_tiles)))
    sizes = m_tiles, n_tiles, depth // 16
    multiply = ptx.joined_product(*sizes, b, planes, at_once, fresh=True, last=last)
    _, below = build_lane(b_pitch)

    @inline
    def product(acc, a, b):
        multiply(acc, a, below(b), u32(0))

    return product


@once
def build_joined_nn(m_tiles, columns, depth, b_pitch, planes):
    """``product(acc, a, b)``: acc += A B likewise; ``times(acc, a, b, factor)``: acc += factor A B,
    where `factor` is an array.
    """
    b, n_tiles = Matrices(32, 16 * b_pitch, True), columns // 16
    at_once = math.gcd(n_tiles, max(1, AT_ONCE // (8 * m_tiles)))
    sizes = m_tiles, n_tiles, depth // 16
    multiply = ptx.joined_product(*sizes, b, planes, at_once)
    multiply_times = ptx.joined_product(*sizes, b, planes, at_once, scaled=True)
    return _beside(multiply, multiply_times, b_pitch)


@once
def build_planes_tn(m_tiles, columns, depth, a_pitch, b_pitch, planes, groups):
    """``product(acc, a, b, factors)``: acc = A^T B likewise, both stored along the sum row by row,
    whose `groups` have a factor each.
    """
    a, b = Matrices(32, 16 * a_pitch, True), Matrices(32, 16 * b_pitch, True)
    n_tiles = columns // 16
    at_once = math.gcd(n_tiles, max(1, MORE // (8 * m_tiles)))
    sizes = m_tiles, n_tiles, depth // 16
    multiply = ptx.planes_product(*sizes, a, b, planes, at_once, True, groups, True)
    _, below = build_lane(a_pitch)
    beside, _ = build_lane(b_pitch)

    @inline
    def product(acc, a, b, factors):
        multiply(acc, below(a), beside(b), factors)

    return product
