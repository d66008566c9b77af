"""Checks of single arguments. Each raises an error that names the argument, what came and what was expected."""

import math
import numbers
from typing import NamedTuple

import numpy as np

from numba_flash.arguments import advice, arrays, overlap

INTEGERS = frozenset({"q_lengths", "kv_lengths", "q_offsets", "k_offsets", "page_table"})  # arrays that may be lists
NUMBERS = ("scale", "window", "q_start", "softcap", "dropout", "rng")


def adopt(name: str, x):
    """`x` as a plain NumPy or CuPy array on the same memory, see `arrays.adopt`; raise if it offers that and cannot do it."""
    if arrays.plain(x):
        return x
    if name in INTEGERS and isinstance(x, list | tuple):
        return _block_sparse(name, x)
    if traced := advice.of_tracer(type(x)):
        raise TypeError(f"{name} must be an array that has values; got {type(x).__name__}{traced}")
    try:
        return arrays.adopt(x)
    except Exception as error:  # that of a foreign library, of any kind
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise TypeError(f"{name} cannot be read in place ({reason}); got {type(x).__name__}{advice.of_array(name, x)}") from error


def _block_sparse(name: str, x) -> np.ndarray:
    """The array of a list of integers."""
    try:
        made = np.asarray(x)
    except ValueError as error:  # rows of several lengths
        raise ValueError(f"{name} must be an array, or lists of integers of one length; got {x!r}") from error
    return made if made.size else made.astype(np.int64)


def plain_numbers(given: dict) -> dict:
    """The arguments, those of `NUMBERS` as `plainly` has them."""
    return {name: plainly(value) if name in NUMBERS else value for name, value in given.items()}


def plainly(value):
    """An option as JSON and NumPy may have it: lists as tuples, and arrays without axes as their number, unless that is a flag."""
    if isinstance(value, list | tuple):
        return tuple(map(plainly, value))
    number = arrays.library(value) == "numpy" and value.ndim == 0 and value.dtype != bool
    return value.item() if number else value


def layout(name: str, x, copies: bool = True) -> None:
    """Raise unless `x` is an array that a kernel can address in place; if it `copies`, say how to make one of it."""
    if arrays.library(x) is None:
        raise TypeError(
            f"{name} must be a NumPy or CuPy array, or an object with __dlpack__ or __cuda_array_interface__ (which takes CuPy for device"
            f" memory); got {type(x).__name__}{advice.of_array(name, x) if copies else ''}"
        )
    if not x.dtype.isnative:
        raise ValueError(f"{name} must be in native byte order; got dtype {x.dtype.str!r}")
    misfit = [f"has a stride of {s} bytes" for s in x.strides if s % max(x.dtype.itemsize, 1)]
    misfit += [] if arrays.aligned(x) else [f"begins at address {arrays.address(x):#x}"]
    if misfit:
        copy = f": pass {name}.copy()" if copies else ""
        raise ValueError(f"{name} must be aligned to its itemsize ({x.dtype.itemsize} bytes); it {misfit[0]}{copy}")


def library(name: str, x, other: str, y) -> None:
    """Raise unless `x` and `y` are arrays of one library on one device."""
    if arrays.library(x) != arrays.library(y):
        raise TypeError(f"{name} and {other} must come from one library; {name} is {arrays.library(x)}, {other} is {arrays.library(y)}")
    if arrays.device_id(x) != arrays.device_id(y):
        raise ValueError(f"{name} and {other} must be on one device; {name} is on {arrays.device_id(x)}, {other} on {arrays.device_id(y)}")


def dtype_and_shape(name: str, x, dtype: str, shape, axes) -> None:
    """Raise unless `x` has exactly this dtype and shape, which the error says in the user's `Axes`."""
    if x.dtype.name != dtype:
        raise TypeError(f"{name}.dtype ({x.dtype.name}) must be {dtype}")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}.shape {axes.shape(x.shape)} must be {axes.shape(shape)}")


def broadcastable(name: str, x, target: str, shape: tuple[int, ...]) -> None:
    """Raise unless `x` broadcasts to `shape`, which is called `target`."""
    fits = x.ndim <= len(shape) and all(n in (1, m) for n, m in zip(x.shape[::-1], shape[::-1], strict=False))
    if not fits:
        hint = advice.of_shape(name, tuple(x.shape), shape)
        raise ValueError(f"{name}.shape {tuple(x.shape)} must be broadcastable to {target} {tuple(shape)}{hint}")


def flag(name: str, value) -> bool:
    """`value` as a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False; got {value!r}")
    return bool(value)


def integer(name: str, value) -> int:
    """`value` as an int; booleans and floats are none."""
    value = plainly(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer; got {value!r}{advice.of_number(name, value)}")
    return int(value)


def real(name: str, value) -> float:
    """`value` as a finite float."""
    value = plainly(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number; got {value!r}{advice.of_number(name, value)}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite; got {value!r}")
    return number


def factor(name: str, value, dtype: str) -> float:
    """`value` as a float that is 0 or, in what scores of arrays of that dtype are computed in, a normal number, also times log2(e)."""
    number, accumulator = real(name, value), np.finfo("float64" if dtype == "float64" else "float32")
    least, greatest = float(accumulator.tiny), float(accumulator.max) / 2
    if number and not least <= abs(number) <= greatest:
        raise ValueError(f"{name} must be 0 or lie between {least:.3g} and {greatest:.3g}, computed in {accumulator.dtype}; got {value!r}")
    return number


class Meeting(NamedTuple):
    """Two arrays, by number, which may share memory where the second's address less the first's is between `low` and `high`."""

    first: int
    second: int
    low: int
    high: int


def meetings(xs, outs: int) -> list[Meeting]:
    """Of the last few arrays, `outs` of them, with each before them; the same for all arrays of these layouts."""
    reaches = [overlap.Reach.of(x) for x in xs]
    return [
        Meeting(i, j, reaches[i].low - reaches[j].high, reaches[i].high - reaches[j].low)
        for i in range(len(xs) - outs, len(xs))
        for j in range(i)
    ]


def outs_memory(names, xs, meet, outs: int, on_host: bool) -> None:
    """Check that the last few arrays, `outs` of them, may be written: not read-only, and disjoint from all before them.

    `meet` is what `meetings` says of arrays of these layouts, and `names` what errors call each.
    """
    at = [x.ctypes.data if on_host else x.data.ptr for x in xs]
    if on_host:
        for name, x in zip(names[-outs:], xs[-outs:], strict=True):
            if not x.flags.writeable:
                raise ValueError(f"{name} must be writeable; it is read-only")
    for i, j, low, high in meet:
        if low < at[j] - at[i] < high and overlap.shared(xs[i], xs[j]):
            raise ValueError(f"{names[i]} must not overlap {names[j]}; they share memory")
