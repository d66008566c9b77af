"""How numbers are stored, and what sums of them are kept in."""

from numba_flash import numeric
from numba_flash.cuda.runtime.lang import device, once, types

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
