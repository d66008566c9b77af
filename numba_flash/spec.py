"""What is to be computed: the frozen `Problem`, and `bind`, the only place that raises errors about a user's input."""

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_flash import arrays

DTYPES = ("float16", "bfloat16", "float32", "float64")
MAX_HEAD_DIM = 256
MAX_LENGTH = 2**30  # row and column indices, and their differences, stay within int32 in every kernel


@dataclass(frozen=True)
class Problem:
    """Canonical form of one attention problem; everything below `bind` trusts it.

    Attributes
    ----------
    batch : tuple of two ints
        Leading dimensions; 1 where the arrays have fewer.
    hq, hk : int
        Query heads and key/value heads. Query head h reads key head ``h // (hq // hk)``.
    nq, nk, d, dv : int
        Queries, keys, head dimension of q and k, head dimension of v and o.
    dtype : str
        One of `DTYPES`.
    scale : float
        Factor of ``q . k``.
    low, high : int
        Query i sees key j iff ``low <= j - i <= high``; within ``[-nq, nk]`` (see `numba_flash.mask`).
    """

    batch: tuple[int, int]
    hq: int
    hk: int
    nq: int
    nk: int
    d: int
    dv: int
    dtype: str
    scale: float
    low: int
    high: int

    @property
    def o_shape(self) -> tuple[int, ...]:
        return (*self.batch, self.hq, self.nq, self.dv)

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"


def bind(q, k, v, *, scale=None, causal=False, window=None, q_start=None) -> Problem:
    """Check the inputs of a forward pass and fold the options into a `Problem`.

    Raises
    ------
    TypeError
        An argument is of the wrong kind: not an array, arrays of different libraries, a dtype outside `DTYPES`, a non-integer option.
    ValueError
        An argument is of the right kind with a wrong value: rank, shape, byte order, alignment, range.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_array(name, x)
    _check_same("k", k, "q", q)
    _check_same("v", v, "q", q)
    *batch, hq, nq, d = _shape(q)
    k_shape, v_shape = _shape(k), _shape(v)
    for name, shape in (("k", k_shape), ("v", v_shape)):
        if shape[:-3] != tuple(batch):
            raise ValueError(f"{name}.shape[:-3] {shape[:-3]} must equal q.shape[:-3] {tuple(batch)}")
    hk, nk, dv = k_shape[-3], k_shape[-2], v_shape[-1]
    if k_shape[-1] != d:
        raise ValueError(f"k.shape[-1] ({k_shape[-1]}) must equal q.shape[-1] ({d})")
    if v_shape[-3:-1] != (hk, nk):
        raise ValueError(f"v.shape[:-1] {v.shape[:-1]} must equal k.shape[:-1] {k.shape[:-1]}")
    if hq % hk if hk else hq:
        raise ValueError(f"the number of heads q.shape[-3] ({hq}) must be a multiple of k.shape[-3] ({hk})")
    for name, size in (("q", d), ("v", dv)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name}.shape[-1] ({size}) must be between 1 and {MAX_HEAD_DIM}")
    for name, size in (("q", nq), ("k", nk)):
        if size > MAX_LENGTH:
            raise ValueError(f"{name}.shape[-2] ({size}) must be at most {MAX_LENGTH}")
    low, high = _band(nq, nk, _flag("causal", causal), _window(window), _offset(q_start, nk - nq))
    scale = d**-0.5 if scale is None else _real("scale", scale)
    return Problem((1,) * (2 - len(batch)) + tuple(batch), hq, hk, nq, nk, d, dv, q.dtype.name, scale, low, high)


def bind_backward(do, q, k, v, o, lse, **options) -> Problem:
    """Check the inputs of a backward pass: those of `bind`, and `do`, `o`, `lse` of the shapes and dtypes that `forward` returns."""
    problem = bind(q, k, v, **options)
    o_shape = (*q.shape[:-1], v.shape[-1])
    for name, x, dtype, shape in (
        ("do", do, problem.dtype, o_shape),
        ("o", o, problem.dtype, o_shape),
        ("lse", lse, problem.lse_dtype, q.shape[:-1]),
    ):
        _check_layout(name, x)
        _check_library(name, x, "q", q)
        _check_dtype_and_shape(name, x, dtype, shape)
    return problem


def check_out_layout(name: str, out: Any, dtype, shape: tuple[int, ...], inputs: dict[str, Any]) -> None:
    """Check that `out` is of the kind, dtype and shape of a result, and that no element of it stands for another."""
    _check_layout(name, out)
    _check_library(name, out, *next(iter(inputs.items())))
    _check_dtype_and_shape(name, out, dtype, shape)
    if arrays.overlaps_itself(out):
        raise ValueError(f"{name} must not overlap itself; it has strides {out.strides} for shape {out.shape}")


def check_out_memory(name: str, out: Any, inputs: dict[str, Any]) -> None:
    """Check that `out` may be written: not read-only, and disjoint from every input."""
    if not arrays.writeable(out):
        raise ValueError(f"{name} must be writeable; it is read-only")
    for other, x in inputs.items():
        if arrays.overlap(out, x):
            raise ValueError(f"{name} must not overlap {other}; they share memory")


def _shape(x) -> tuple[int, ...]:
    """Shape with the head axis present: ``(n, d)`` means one head."""
    return tuple(x.shape) if x.ndim > 2 else (1, *x.shape)


def _check_layout(name: str, x) -> None:
    """Raise unless `x` is an array that a kernel can address in place."""
    if arrays.library(x) is None:
        raise TypeError(
            f"{name} must be a NumPy or CuPy array, or an object with __dlpack__ or __cuda_array_interface__ (which takes CuPy for device"
            f" memory); got {type(x).__name__}"
        )
    if not x.dtype.isnative:
        raise ValueError(f"{name} must be in native byte order; got dtype {x.dtype.str!r}")
    misfit = [s for s in x.strides if s % max(x.dtype.itemsize, 1)]
    if misfit or not arrays.aligned(x):
        raise ValueError(f"{name} must be aligned to its itemsize ({x.dtype.itemsize} bytes); got strides {x.strides}")


def _check_array(name: str, x) -> None:
    """Raise unless `x` is an array with a supported rank and dtype."""
    _check_layout(name, x)
    if x.dtype.name not in DTYPES:
        raise TypeError(f"{name}.dtype must be one of {', '.join(DTYPES)}; got {x.dtype.name}")
    if not 2 <= x.ndim <= 5:
        raise ValueError(f"{name} must have 2 to 5 dimensions (..., heads, length, head_dim); got shape {tuple(x.shape)}")


def _check_library(name: str, x, other: str, y) -> None:
    if arrays.library(x) != arrays.library(y):
        raise TypeError(f"{name} and {other} must come from one library; {name} is {arrays.library(x)}, {other} is {arrays.library(y)}")
    if arrays.device_id(x) != arrays.device_id(y):
        raise ValueError(f"{name} and {other} must be on one device; {name} is on {arrays.device_id(x)}, {other} on {arrays.device_id(y)}")


def _check_same(name: str, x, other: str, y) -> None:
    _check_library(name, x, other, y)
    if x.dtype != y.dtype:
        raise TypeError(f"{name}.dtype ({x.dtype.name}) must equal {other}.dtype ({y.dtype.name})")
    if x.ndim != y.ndim:
        raise ValueError(f"{name}.ndim ({x.ndim}) must equal {other}.ndim ({y.ndim})")


def _check_dtype_and_shape(name: str, x, dtype: str, shape) -> None:
    if x.dtype.name != dtype:
        raise TypeError(f"{name}.dtype ({x.dtype.name}) must be {dtype}")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}.shape {tuple(x.shape)} must be {tuple(shape)}")


def _flag(name: str, value) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False; got {value!r}")
    return bool(value)


def _integer(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer; got {value!r}")
    return int(value)


def _real(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number; got {value!r}")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite; got {value!r}")
    return number


def _window(window) -> tuple[int, int]:
    """(left, right) with -1 for no limit."""
    if window is None:
        return -1, -1
    if not isinstance(window, tuple) or len(window) != 2:
        raise TypeError(f"window must be a tuple (left, right) or None; got {window!r}")
    left, right = (_integer(f"window[{side}]", size) for side, size in enumerate(window))
    if left < -1 or right < -1:
        raise ValueError(f"window must hold sizes >= 0, or -1 for no limit; got {window!r}")
    return left, right


def _offset(q_start, default: int) -> int:
    return default if q_start is None else _integer("q_start", q_start)


def _band(nq: int, nk: int, causal: bool, window: tuple[int, int], q_start: int) -> tuple[int, int]:
    """The diagonals ``low <= j - i <= high`` that are visible, clipped to ``[-nq, nk]`` where they stop mattering."""
    left, right = window
    if causal:
        right = 0
    low = -nq if left == -1 else min(max(q_start - left, -nq), nk)
    high = nk if right == -1 else min(max(q_start + right, -nq), nk)
    return low, high
