"""Powers of two that bring the numbers of a warp near the end of float16, where they are kept."""

from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.score.fragment import ALL_LANES


class Power(NamedTuple):
    """Powers of two of a warp: `up` brings its numbers near the end of float16, `down` back."""

    up: float
    down: float


TOP_OF_POWER, EXPONENT, LEAST_EXPONENT = 14, 0x7F800000, 40


@inline
def power_below(largest):
    """The `Power` for numbers of which this is the largest absolute one, and finite."""
    exponent = i32(u32(ptx.as_uint32(largest) & u32(EXPONENT)) >> u32(23))
    exponent = max(exponent, i32(LEAST_EXPONENT))  # its powers are normal numbers, too
    up = ptx.as_float32(u32(u32(254 + TOP_OF_POWER - exponent) << u32(23)))
    return Power(up, ptx.as_float32(u32(u32(exponent - TOP_OF_POWER) << u32(23))))


@once
def build_power(count):
    """``power_of(x)``: the `Power` for `count` numbers of each lane of a warp, all finite;
    ``largest_of(x)``, the largest absolute one.
    """
    COUNT = count

    @inline
    def largest_of(x):
        largest = f32(0)
        for e in range(COUNT):
            largest = ptx.maximum(largest, abs(x[e]))
        for fold in range(5):
            largest = ptx.maximum(largest, cuda.shfl_xor_sync(ALL_LANES, largest, 1 << fold))
        return largest

    @inline
    def power_of(x):
        return power_below(largest_of(x))

    return power_of, largest_of
