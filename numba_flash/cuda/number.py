"""How numbers are stored, and what sums of them are kept in."""

import math
from typing import Any, NamedTuple

from numba_flash import numeric
from numba_flash.cuda import ptx
from numba_flash.cuda.lang import device, inline, once, types

STORAGE = {
    "float16": types.float16,
    "bfloat16": types.uint16,
    "float32": types.float32,
    "float64": types.float64,
}
ACCUMULATOR = {
    "float16": types.float32,
    "bfloat16": types.float32,
    "float32": types.float32,
    "float64": types.float64,
}
# The largest float16, and what a mean of such may be where its weights were rounded to 11 bits, and
# their sum was not.
LARGEST_FLOAT16 = 65504.0
ALMOST_LARGEST = LARGEST_FLOAT16 * (1 + 2.0**-10)
# Every subscript is made unsigned: Numba lets negative ones wrap around, and the test for it costs
# more than the load.
index = types.uint64


def array(dtype, ndim):
    """Numba's type of an array of any strides; `dtype` is a Numba type, or the name of a dtype in
    storage.
    """
    return types.Array(STORAGE[dtype] if isinstance(dtype, str) else dtype, ndim, "A")


@once
def build_convert(dtype):
    """``load(x)``: stored element to accumulator type; ``store(x)``: back, rounding to nearest
    even.
    """
    ACC, OUT, BFLOAT16 = ACCUMULATOR[dtype], STORAGE[dtype], dtype == "bfloat16"

    @device
    def load(x):
        if BFLOAT16:
            return numeric.bfloat16_to_float32(x)
        return ACC(x)

    @device
    def store(x):
        if BFLOAT16:
            return numeric.float32_to_bfloat16(x)
        return OUT(x)

    return load, store


@once
def build_mean(dtype):
    """``mean(x)``: x, or the largest float16 if x is above that no further than a mean may be."""
    FLOAT16 = dtype == "float16"

    @device
    def mean(x):
        if FLOAT16:
            size = abs(x)
            if size > types.float32(LARGEST_FLOAT16) and size <= types.float32(ALMOST_LARGEST):
                x = math.copysign(types.float32(LARGEST_FLOAT16), x)
        return x

    return mean


class Rows(NamedTuple):
    """Registers of some rows of a fragment, and what they will be multiplied by."""

    acc: Any
    factor: Any


@once
def build_mean_rows(count, rows, dtype):
    """``mean_rows(acc, factor)``: the same of `count` registers of a fragment, of so many `rows` of
    a lane, before they are multiplied by the factors of their rows.
    """
    PAIRS, ROWS, FLOAT16 = count // rows // 2, rows, dtype == "float16"
    maximum, f32 = ptx.maximum, types.float32

    @inline
    def bound_pair(n, x):
        factor = x.factor[n // (2 * PAIRS) * 2 + n % 2]
        for c in range(2):
            size = abs(x.acc[2 * n + c] * factor)
            if size > f32(LARGEST_FLOAT16) and size <= f32(ALMOST_LARGEST):
                x.acc[2 * n + c] *= f32(LARGEST_FLOAT16) * ptx.rcp(size)

    bound = ptx.repeated(count // 2, bound_pair)

    @inline
    def mean_rows(acc, factor):
        above = False
        for r in range(ROWS if FLOAT16 else 0):
            largest, first = f32(0), r // 2 * PAIRS * 4 + 2 * (r % 2)
            for j in range(PAIRS):
                two = maximum(abs(acc[first + 4 * j]), abs(acc[first + 4 * j + 1]))
                largest = maximum(largest, two)
            above = above or largest * factor[r] > f32(LARGEST_FLOAT16)
        if FLOAT16 and above:  # hardly ever
            bound(Rows(acc, factor))

    return mean_rows
