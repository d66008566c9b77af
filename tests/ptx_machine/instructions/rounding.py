"""Exact results, rounded once: sums and fused products of NumPy vectors as the ISA defines them."""

from fractions import Fraction

import ml_dtypes
import numpy as np

BFLOAT16 = ml_dtypes.bfloat16
SPLITTER = 2.0**27 + 1
HALF_FLOAT32 = np.uint64(1 << 28)  # the lower 29 bits of a float64 that lies halfway between two float32


def two_sum(a, b):
    """(s, e) where ``s = fl(a + b)`` and ``s + e = a + b`` exactly, in float64, as long as nothing overflows."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def _two_product(a, b):
    """(p, e) where ``p = fl(a * b)`` and ``p + e = a * b`` exactly, in float64, far from overflow and underflow."""
    p, (ah, al), (bh, bl) = a * b, _halves(a), _halves(b)
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


def _halves(x):
    t = SPLITTER * x
    high = t - (t - x)
    return high, x - high


def odd(value, rest):
    """``value + rest``, where `value` is the float64 next to it, rounded to odd: rounded again to 51 bits or fewer, it is rounded once."""
    value = np.array(value, np.float64)
    bits = value.view(np.int64)
    moves = np.isfinite(value) & (rest != 0) & (bits % 2 == 0)
    bits += np.where(moves, np.where((rest > 0) == (value > 0), 1, -1), 0)
    return value


def rounded(x, kind, mode="rn"):
    """Float64 numbers in another format. Modes are those of PTX: to nearest, toward zero, down, up."""
    x = np.asarray(x, np.float64)
    if kind == BFLOAT16:
        return _rounded_to_bfloat16(x, mode)
    y = x.astype(kind)
    if mode == "rn":
        return y
    beyond = {"rz": np.abs(y) > np.abs(x), "rm": y > x, "rp": y < x}[mode]
    toward = {"rz": kind(0), "rm": kind(-np.inf), "rp": kind(np.inf)}[mode]
    return np.where(beyond & np.isfinite(x), np.nextafter(y, toward), y)


def _rounded_to_bfloat16(x, mode):
    single = rounded(x, np.float32, "rz")
    bits = np.array(single).view(np.uint32)
    if mode == "rn":
        bits = bits | (single != x)  # rounded to odd
        bits = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    elif mode != "rz":
        raise KeyError(mode)
    halves = np.where(np.isnan(x), np.uint32(0x7FFF), bits >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isinf(x), x, halves.view(BFLOAT16)).astype(BFLOAT16)


def add(a, b, kind, mode="rn"):
    """``a + b`` of numbers of that kind, rounded once; float64 to the nearest, as below."""
    if mode == "rn" and kind != BFLOAT16:
        return np.asarray(np.add(a, b), kind)
    return rounded(odd(*two_sum(np.asarray(a, np.float64), np.asarray(b, np.float64))), kind, mode)


def multiply(a, b, kind, mode="rn"):
    """``a * b`` of numbers of that kind, rounded once."""
    if mode == "rn" and kind != BFLOAT16:
        return np.asarray(np.multiply(a, b), kind)
    return rounded(np.asarray(a, np.float64) * np.asarray(b, np.float64), kind, mode)


def fma(a, b, c, kind, mode="rn"):
    """``a * b + c`` of numbers of that kind, rounded once."""
    a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
    if kind == np.float64:
        return _fma64(*map(np.array, np.broadcast_arrays(a, b, c)))
    product = a * b  # exact: twice 24 bits
    s = np.asarray(product + c)
    if mode == "rn" and kind == np.float32:
        y = s.astype(np.float32)
        halfway = (s.view(np.uint64) & np.uint64(0x1FFFFFFF)) == HALF_FLOAT32
        if not (halfway | (np.abs(s) < 2.0**-125)).any():  # of all others the float64 sum's own rounding changes nothing
            return y
    return rounded(odd(*two_sum(product, c)), kind, mode)


def _fma64(a, b, c):
    """By sums without error and a rounding to odd (Boldo and Melquiond 2008); by rational numbers near overflow and underflow."""
    p, e = _two_product(a, b)
    high, low = two_sum(c, e)
    top, rest = two_sum(p, high)
    value = np.asarray(top + odd(*two_sum(rest, low)))
    normal = lambda x, bits: (x == 0) | (np.abs(x) > 2.0**-bits) & (np.abs(x) < 2.0**bits)
    for i in zip(*np.nonzero(~(normal(a, 400) & normal(b, 400) & normal(c, 960))), strict=True):
        value[i] = _fma_of_one(float(a[i]), float(b[i]), float(c[i]))
    return value


def _fma_of_one(a: float, b: float, c: float) -> float:
    if not np.isfinite([a, b, c]).all() or 0 in (a, b):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact)
    except OverflowError:
        return float(np.copysign(np.inf, exact))
