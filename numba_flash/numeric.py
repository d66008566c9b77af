"""Scalar numerics shared by the kernels: sixteen-bit floats as bits, base-2 exponentials, and a row maximum that vectorises.

Numba has no float16 arithmetic on the CPU and no portable bfloat16, so kernels see such arrays as integers and convert on load and
store. The conversions are exact (widening) or round to nearest even (narrowing), for every input including NaN, Inf and subnormals.
They are free of branches, so that LLVM vectorises the loops they are inlined in; `exp2` and `row_max` are written for the same reason
(Numba ships no vector math library).
"""

import math

import numpy as np
from numba import njit, types
from numba.extending import overload

LOG2E, LN2 = 1.0 / math.log(2.0), math.log(2.0)
_F32_SUBNORMAL_SCALE = np.float32(2.0**112)

# Coefficients of 2^f - 1 on [-1/2, 1/2]: minimax in the relative error (9.3e-8 and 4e-18), rounded one after the other.
_EXP2_F32 = np.array([0.69314700365, 0.24022246897, 0.05550710857, 0.00967129413, 0.00132695702], np.float32)
# The same relative to 2^f - 1, one degree higher (1.3e-8).
_EXP2M1_F32 = np.array([0.69314718246, 0.24022649229, 0.05550366268, 0.00961832702, 0.00133878936, 0.00015375005], np.float32)
_EXP2_F64 = (
    0.6931471805599453, 0.24022650695910108, 0.05550410866482173, 0.009618129107601613, 0.001333355814654513, 0.00015403530449020674,
    1.525273363456621e-05, 1.321543884474536e-06, 1.017815998365469e-07, 7.0732314627191485e-09, 4.4388508141274565e-10,
)  # fmt: skip


@njit
def bfloat16_to_float32(bits):
    """Value of the bfloat16 with the given uint16 bits."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit
def float32_to_bfloat16(x):
    """Bits (uint16) of the bfloat16 nearest to the float32 `x`."""
    bits = np.float32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint16(np.uint32(bits + np.uint32(np.uint32(0x7FFF) + odd)) >> np.uint32(16))
    return rounded if x == x else np.uint16(0x7FC0)


@njit
def float16_to_float32(bits):
    """Value of the float16 with the given uint16 bits."""
    magnitude = np.uint32(np.uint32(bits) & np.uint32(0x7FFF))
    sign = np.uint32(np.uint32(np.uint32(bits) & np.uint32(0x8000)) << np.uint32(16))
    # The exponent field moves to float32 with the wrong bias; one exact product mends it, for subnormals as well.
    finite = np.float32(np.uint32(magnitude << np.uint32(13)).view(np.float32) * _F32_SUBNORMAL_SCALE).view(np.uint32)
    special = np.uint32(np.uint32(magnitude << np.uint32(13)) | np.uint32(0x7F800000))
    return np.uint32(sign | (special if magnitude >= np.uint32(0x7C00) else finite)).view(np.float32)


@njit
def float32_to_float16(x):
    """Bits (uint16) of the float16 nearest to the float32 `x`."""
    bits = np.float32(x).view(np.uint32)
    sign = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(0x8000))
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32(np.uint32(magnitude >> np.uint32(13)) & np.uint32(1))
    normal = np.uint32(np.uint32(magnitude + np.uint32(np.uint32(0xC8000FFF) + odd)) >> np.uint32(13))  # 0xC8000000 = (15 - 127) << 23
    # Adding 0.5, whose last bit weighs 2^-24, makes the FPU round a subnormal result.
    subnormal = np.uint32(np.float32(magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000))
    finite = subnormal if magnitude < np.uint32(0x38800000) else normal
    large = np.uint32(0x7E00) if magnitude > np.uint32(0x7F800000) else np.uint32(0x7C00)
    return np.uint16(sign | (large if magnitude >= np.uint32(0x47800000) else finite))


def widen(x):
    """The element `x` of an array in the accumulation dtype; int16 elements are float16 bits, uint16 elements are bfloat16 bits."""


def narrow(x, like):
    """`x`, in the accumulation dtype, as an element of the array that has the element `like`."""


@overload(widen)
def _widen(x):
    if x == types.int16:
        return lambda x: float16_to_float32(x)
    if x == types.uint16:
        return lambda x: bfloat16_to_float32(x)
    return lambda x: x


@overload(narrow)
def _narrow(x, like):
    if like == types.int16:
        return lambda x, like: np.int16(float32_to_float16(x))
    if like == types.uint16:
        return lambda x, like: float32_to_bfloat16(x)
    return lambda x, like: x


def exp2(x):
    """2 to the power `x`, float32 or float64, within 2 ulp; 0 below the normal range, Inf from half a unit below its end, NaN for NaN."""


@overload(exp2, jit_options={"fastmath": {"contract"}})
def _exp2(x):
    # x = n + f with n the nearest integer: adding 1.5 * 2^(mantissa bits) leaves n in the low bits of the sum.
    if x == types.float32:
        c1, c2, c3, c4, c5 = _EXP2_F32
        magic, lowest, highest = np.float32(1.5 * 2**23), np.float32(-127), np.float32(128)

        def exp2_f32(x):
            x = highest if x > highest else x
            x = lowest if x < lowest else x
            shifted = np.float32(x + magic)
            f = x - (shifted - magic)
            power = np.uint32(np.uint32(shifted.view(np.uint32) + np.uint32(127)) << np.uint32(23))
            p = np.float32(1.0) + f * (c1 + f * (c2 + f * (c3 + f * (c4 + f * c5))))
            return p * power.view(np.float32)

        return exp2_f32

    d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11 = _EXP2_F64

    def exp2_f64(x):
        x = 1024.0 if x > 1024.0 else x
        x = -1023.0 if x < -1023.0 else x
        shifted = np.float64(x + 6755399441055744.0)
        f = x - (shifted - 6755399441055744.0)
        power = np.uint64(np.uint64(shifted.view(np.uint64) + np.uint64(1023)) << np.uint64(52))
        tail = d6 + f * (d7 + f * (d8 + f * (d9 + f * (d10 + f * d11))))
        p = 1.0 + f * (d1 + f * (d2 + f * (d3 + f * (d4 + f * (d5 + f * tail)))))
        return p * power.view(np.float64)

    return exp2_f64


def exp2m1(x):
    """2 to the power `x`, less 1, for x <= 0, without cancellation near 0; NaN for NaN."""


@overload(exp2m1, jit_options={"fastmath": {"contract"}})
def _exp2m1(x):
    # 2^n 2^f - 1 = 2^n (2^f - 1) + (2^n - 1), with n and f as in `exp2`.
    if x == types.float32:
        c1, c2, c3, c4, c5, c6 = _EXP2M1_F32
        magic, lowest = np.float32(1.5 * 2**23), np.float32(-126)

        def exp2m1_f32(x):
            x = lowest if x < lowest else x
            shifted = np.float32(x + magic)
            f = x - (shifted - magic)
            power = np.uint32(np.uint32(shifted.view(np.uint32) + np.uint32(127)) << np.uint32(23)).view(np.float32)
            p = f * (c1 + f * (c2 + f * (c3 + f * (c4 + f * (c5 + f * c6)))))
            return power * p + (power - np.float32(1.0))

        return exp2m1_f32

    d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11 = _EXP2_F64

    def exp2m1_f64(x):
        x = -1022.0 if x < -1022.0 else x
        shifted = np.float64(x + 6755399441055744.0)
        f = x - (shifted - 6755399441055744.0)
        power = np.uint64(np.uint64(shifted.view(np.uint64) + np.uint64(1023)) << np.uint64(52)).view(np.float64)
        tail = d6 + f * (d7 + f * (d8 + f * (d9 + f * (d10 + f * d11))))
        p = f * (d1 + f * (d2 + f * (d3 + f * (d4 + f * (d5 + f * tail)))))
        return power * p + (power - 1.0)

    return exp2m1_f64


def tanh(x):
    """Hyperbolic tangent, float32 or float64, within 4 ulp; NaN for NaN."""


@overload(tanh)
def _tanh(x):
    number = np.float32 if x == types.float32 else np.float64
    factor, zero, two = number(-2.0 * LOG2E), number(0), number(2)

    def tanh(x):
        t = exp2m1(factor * abs(x))  # exp(-2 |x|) - 1
        y = -t / (two + t)
        return -y if x < zero else y

    return tanh


def row_max(x):
    """Largest element of the 1-D array `x`, -inf if it is empty. A NaN wins or is passed over, by its sign."""


@overload(row_max)
def _row_max(x):
    # Compared as integers, which LLVM vectorises without permission to ignore NaN: the order of floats is that of their bits, once the
    # bits below the sign are flipped for negative ones.
    integer, sign_bit = (np.int32, np.int32(31)) if x.dtype == types.float32 else (np.int64, np.int64(63))
    floating = np.float32 if x.dtype == types.float32 else np.float64
    rest = np.iinfo(integer).max
    minus_inf = integer(np.array(-np.inf, floating).view(integer) ^ rest)
    rest = integer(rest)

    def row_max(x):
        bits = x.view(integer)
        largest = minus_inf
        for c in range(bits.size):
            ordered = integer(bits[c] ^ integer(integer(bits[c] >> sign_bit) & rest))
            largest = ordered if ordered > largest else largest
        return integer(largest ^ integer(integer(largest >> sign_bit) & rest)).view(floating)

    return row_max
