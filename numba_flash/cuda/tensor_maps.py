"""Tensor maps: descriptors by which the copy engine of Hopper finds tiles of an array."""

from numba_flash import arrays
from numba_flash.cuda.swizzle import PANEL

MOST = 256  # of one array of one launch
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


class _Memory:
    """Device memory at an address, in the protocol that cuda.core reads."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "strides": strides,
            "typestr": "<u2",
            "data": (address, False),
            "stream": None,
        }


class TensorMaps:
    """Tensor maps of (..., n, d) arrays of 16-bit elements as five dimensions, with boxes of `rows`
    rows of one panel of 64 columns.

    One for each address at which an array of this layout was seen: programs use the same memory
    again and again.
    """

    def __init__(self, x, rows: int):
        self._shape, self._rows, self._maps = (1,) * (5 - len(x.shape)) + tuple(x.shape), rows, {}
        strides = zip(self._shape[:-1], arrays.expanded_strides(x, 5)[:-1], strict=True)
        # the stride of an axis of one element is never used, but checked
        self._strides = (*(UNIT if n == 1 else stride for n, stride in strides), 2)

    def at(self, address: int):
        """The descriptor for an array that begins there."""
        descriptor = self._maps.get(address)
        if descriptor is None:
            if len(self._maps) >= MOST:
                self._maps = {}
            descriptor = self._maps[address] = self._describe(address)
        return descriptor

    def _describe(self, address: int):
        from cuda.core import TensorMapDescriptorOptions
        from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle
        from cuda.core.utils import StridedMemoryView

        view = StridedMemoryView.from_cuda_array_interface(
            _Memory(address, self._shape, self._strides), stream_ptr=-1
        )
        box, promotion = (1, 1, 1, self._rows, PANEL), TensorMapL2Promotion.L2_256B
        options = TensorMapDescriptorOptions(
            box_dim=box, swizzle=TensorMapSwizzle.SWIZZLE_128B, l2_promotion=promotion
        )
        return view.as_tensor_map(options=options)


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
