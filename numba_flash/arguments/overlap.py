"""Whether arrays share memory: by address arithmetic alone, on the host and on a GPU."""

import ctypes
from typing import NamedTuple

import numpy as np

from numba_flash.arguments import arrays


def within(x) -> bool:
    """True if two indices may reach one element (a broadcast axis, or axes that interleave)."""
    if x.size == 0:  # NumPy's own empty arrays have strides of 0
        return False
    extent = 0
    for stride, size in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True) if n > 1):
        if stride <= extent:
            return True
        extent += stride * (size - 1)
    return False


def shared(x, y) -> bool:
    """True if two arrays of one library share an element."""
    (x0, x1), (y0, y1) = _extent(x), _extent(y)
    if x1 <= y0 or y1 <= x0:
        return False
    return bool(np.shares_memory(_shadow(x, x0, x1), _shadow(y, y0, y1)))


class Reach(NamedTuple):
    """Bytes from the address of an array to its lowest element, 0 or less, and to the end of its highest; both 0 for an empty one."""

    low: int
    high: int

    @classmethod
    def of(cls, x) -> "Reach":
        """That of all arrays of one layout."""
        if x.size == 0:
            return cls(0, 0)
        steps = [stride * (size - 1) for stride, size in zip(x.strides, x.shape, strict=True)]
        return cls(sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + x.dtype.itemsize)


def _extent(x) -> tuple[int, int]:
    """First address, and the one past the last, of the elements of `x`; empty arrays have none."""
    start, reach = arrays.address(x), Reach.of(x)
    return start + reach.low, start + reach.high


def _shadow(x, start: int, stop: int) -> np.ndarray:
    """A host array with the addresses and strides of `x`, for address arithmetic only: its memory is never read."""
    memory = (ctypes.c_char * (stop - start)).from_address(start)
    return np.ndarray(x.shape, np.dtype((np.void, x.dtype.itemsize)), memory, arrays.address(x) - start, x.strides)
