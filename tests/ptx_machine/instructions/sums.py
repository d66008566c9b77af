"""How tensor cores add.

NVIDIA does not say it. The model here is the one that MMA-Sim (arXiv 2511.10909) found to agree with hardware bit by bit: in one step a
tensor core takes a few products and the accumulator, aligns them to the largest exponent among them, cuts each off behind F bits, adds
what is left exactly, and cuts the sum off to float32. So sums of positive numbers come out too small, which no rounding to nearest does.
"""

import math
from typing import NamedTuple

import numpy as np

from ptx_machine.instructions.rounding import fma, odd, rounded


class TensorCore(NamedTuple):
    """How one of a generation adds.

    Attributes
    ----------
    fraction : int
        Bits behind the point that are kept of a term, relative to the largest exponent.
    bits : int
        Of the elements of a row that one step takes: 128 are eight of 16 bits, or four of TF32.
    """

    fraction: int
    bits: int


EXACT = None
TURING = TensorCore(24, 128)
AMPERE = TensorCore(24, 128)  # Ada too
HOPPER = TensorCore(25, 256)  # Blackwell too
NOT_A_NUMBER = {2: np.uint16(0x7FFF), 4: np.uint32(0x7FFFFFFF)}  # the only one that tensor cores return


def dot(a: np.ndarray, b: np.ndarray, c: np.ndarray, core: TensorCore | None = EXACT) -> np.ndarray:
    """``a @ b + c`` as a tensor core computes it, in the dtype of c.

    Parameters
    ----------
    a, b : (..., M, K), (..., K, N) np.ndarray
        Of one dtype: float16, bfloat16, float32, which is read as TF32 (the lower 13 bits do not count), or float64.
    c : (..., M, N) np.ndarray
        Float32, float16 or float64.
    core : TensorCore or None
        Which one; None rounds the exact sum of all K products and c once, to nearest. That is no hardware's sum, but the best there is.
        Its products are exact in float64; their sum is not (16 products of float16 alone may need 84 bits), but where its error could
        decide how the result is rounded, it is computed without one.

    Float64 is always a chain of fused multiplications and additions in the order of K, as on hardware.
    """
    if c.dtype == np.float64:
        for k in range(a.shape[-1]):
            c = fma(a[..., k, None], b[..., k, None, :], c, np.float64)
        return c
    if a.dtype == np.float32:
        a, b = (_tf32(x) for x in (a, b))
    if core is EXACT:
        return _finished(_exact(a.astype(np.float64), b.astype(np.float64), c), c.dtype)
    step = core.bits // (32 if a.dtype == np.float32 else 16)
    for k in range(0, a.shape[-1], step):
        c = _step(a[..., k : k + step], b[..., k : k + step, :], c, core.fraction)
    return c


def _tf32(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _finished(value: np.ndarray, dtype) -> np.ndarray:
    """With zeros that are positive, and the NaN of tensor cores."""
    value = np.ascontiguousarray(value + dtype.type(0))
    value[np.isnan(value)] = NOT_A_NUMBER[dtype.itemsize].view(dtype)
    return value


# ---- rounded once ------------------------------------------------------------------------------------------------------------------------


def _last_digit(x: np.ndarray) -> np.ndarray:
    """The largest power of two that a float32, here as float64, is a multiple of; infinite for zero."""
    bits = x.view(np.int64)
    without = (bits & (bits - 1)).view(np.float64)  # its lowest digit, unless that is the one before the point
    digit = np.abs(np.where(bits & (2**52 - 1), x - without, x))
    return np.where(x == 0, np.inf, digit)


def _exact(a, b, c):
    """From a product in float64, whose error is bounded, and none where it has digits enough; what that leaves open is summed exactly."""
    kind, c = c.dtype.type, c.astype(np.float64)
    with np.errstate(all="ignore"):
        sums, most = a @ b + c, np.abs(a) @ np.abs(b) + np.abs(c)
        error = most * ((a.shape[-1] + 2) * 2.0**-52)
        value, low, high = (x.astype(kind) for x in (sums, sums - error, sums + error))
        left_open = (low != high) & np.isfinite(sums)
        if left_open.any():
            unit = _last_digit(a).min(axis=-1)[..., None] * _last_digit(b).min(axis=-2)[..., None, :]
            left_open &= most >= np.minimum(unit, _last_digit(c)) * 2.0**52
    for *at, i, j in zip(*np.nonzero(left_open), strict=True):
        terms = [*(a[(*at, i)] * b[(*at, slice(None), j)]).tolist(), float(c[(*at, i, j)])]
        nearest = math.fsum(terms)
        value[(*at, i, j)] = rounded(odd(nearest, math.fsum([*terms, -nearest])), kind)
    return value


# ---- cut off -----------------------------------------------------------------------------------------------------------------------------


def _exponents(x: np.ndarray) -> np.ndarray:
    """Of subnormal numbers that of the least normal one; -126 of zero."""
    least = -14 if x.dtype == np.float16 else -126
    exponents = np.maximum(np.frexp(x.astype(np.float64))[1] - 1, least)
    return np.where(x == 0, -126, exponents)


def _step(a, b, c, fraction: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        products = a.astype(np.float64)[..., None] * b.astype(np.float64)[..., None, :, :]
        largest = (_exponents(a)[..., None] + _exponents(b)[..., None, :, :]).max(axis=-2)
        largest = np.maximum(largest, _exponents(c))
        unit = np.ldexp(1.0, largest - fraction)
        total = np.trunc(products / unit[..., None, :]).sum(axis=-2) + np.trunc(c.astype(np.float64) / unit)
        total = total * unit
        special = products.sum(axis=-2) + c
        total = np.where(np.isfinite(special), total, special)
        if c.dtype == np.float16:
            return _finished(rounded(total, np.float16), c.dtype)
        value = rounded(total, np.float32, "rz")
        return _finished(np.where(np.abs(total) >= 2.0**128, np.copysign(np.inf, total), value).astype(np.float32), c.dtype)
