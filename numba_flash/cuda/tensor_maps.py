"""Tensor maps: descriptors by which the copy engine of Hopper finds tiles of an array."""

from typing import NamedTuple

from numba_flash import arrays
from numba_flash.cuda.swizzle import PANEL

MOST = 256  # of one array of one launch, and of all together
UNIT = 16  # bytes, of strides and addresses


def why_not(name: str, x) -> str | None:
    """Reason why no tensor map can describe an array of this `Layout`, or None."""
    sizes = zip(x.strides, x.shape, strict=True)
    *strides, last = (stride if size > 1 else 0 for stride, size in sizes)
    if last != x.dtype.itemsize:
        return (
            "needs neighbours along the head dimension to be neighbours in memory;"
            f" {name} has strides {x.strides}"
        )
    if any(stride % UNIT or stride < 0 for stride in strides):
        return (
            f"needs strides that are multiples of {UNIT} bytes and not negative;"
            f" {name} has strides {x.strides}"
        )
    if x.offset:
        return (
            f"needs addresses that are multiples of {UNIT};"
            f" {name} begins {x.offset} bytes after one"
        )
    return None


class Described(NamedTuple):
    """Tensor maps of the arrays of a launch, and where each lies."""

    pointers: tuple[int, ...]
    descriptors: tuple


class TensorMaps(dict):
    """Tensor maps for a launch, `Described`, by the addresses of its arrays: programs use the same
    memory again and again.
    """

    def __init__(self, maps):
        self._each = [_TensorMaps(x, rows) for x, rows in maps]

    def __missing__(self, addresses: tuple[int, ...]) -> Described:
        if len(self) >= MOST:
            self.clear()
        there = zip(self._each, addresses, strict=True)
        descriptors = tuple(each[address] for each, address in there)
        pointers = tuple(descriptor.getPtr() for descriptor in descriptors)
        found = self[addresses] = Described(pointers, descriptors)
        return found


class _TensorMaps(dict):
    """Tensor maps of a (..., n, d) array of 16-bit elements as five dimensions, with boxes of
    `rows` rows of one panel of 64 columns, by its address.
    """

    def __init__(self, x, rows: int):
        self._shape, self._rows = (1,) * (5 - len(x.shape)) + tuple(x.shape), rows
        strides = zip(self._shape[:-1], arrays.expanded_strides(x, 5)[:-1], strict=True)
        # the stride of an axis of one element is never used, but checked
        self._strides = tuple(UNIT if n == 1 else stride for n, stride in strides)

    def __missing__(self, address: int):
        if len(self) >= MOST:
            self.clear()
        descriptor = self[address] = self._describe(address)
        return descriptor

    def _describe(self, address: int):
        from cuda.bindings import driver

        # the driver counts axes from the last
        long = lambda numbers: [driver.cuuint64_t(n) for n in reversed(numbers)]
        short = lambda numbers: [driver.cuuint32_t(n) for n in reversed(numbers)]
        error, descriptor = driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
            5,
            address,
            long(self._shape),
            long(self._strides),
            short((1, 1, 1, self._rows, PANEL)),
            short((1, 1, 1, 1, 1)),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if error:
            raise RuntimeError(f"no tensor map for shape {self._shape}: {error.name}")
        return descriptor


def through_compact(prepare, results):
    """`Prepared` by ``prepare(results)``, by way of arrays that a tensor map can describe where
    `results`, named layouts, are not. The lse is written element by element.
    """
    replaced = [
        name != "lse" and x is not None and why_not("", x) is not None
        for name, x in results._asdict().items()
    ]

    def each(results, function):
        chosen = zip(type(results)._fields, results, replaced, strict=True)
        return type(results)(*(function(name, x) if mine else x for name, x, mine in chosen))

    prepared = prepare(each(results, lambda name, x: arrays.Layout.compact(x.shape, x.dtype)))

    def run(inputs, results, *state):
        there = each(
            results,
            lambda name, x: arrays.compact(f"{name} before it goes to out", x, x.shape, x.dtype),
        )
        left = prepared.run(inputs, there, *state)
        for x, y, mine in zip(results, there, replaced, strict=True):
            if mine:
                x[...] = y
        return left

    return prepared._replace(run=run)
