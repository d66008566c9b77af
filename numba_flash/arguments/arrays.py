"""Whose array is this, where does it live, and allocate one like it.

CuPy is looked up in `sys.modules`; it is imported only to hold a foreign device array, or to move NumPy arrays to a GPU.
"""

import math
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from numba_flash import ledger

_DLPACK_CPU = 1
_ALIGNMENT = 512  # bytes, of arrays of CuPy's pool


def cupy():
    """The CuPy module if the process has imported it, else None."""
    return sys.modules.get("cupy")


def library(x) -> str | None:
    """``"numpy"``, ``"cupy"`` or None. Masked arrays are neither: their mask would be dropped."""
    if isinstance(x, np.ndarray):
        return None if isinstance(x, np.ma.MaskedArray) else "numpy"
    cp = cupy()
    return "cupy" if cp is not None and isinstance(x, cp.ndarray) else None


def plain(x) -> bool:
    """True for an array of NumPy or CuPy and of no subclass, and for None."""
    return x is None or type(x) in (np.ndarray, getattr(cupy(), "ndarray", None))


def adopt(x):
    """A plain `numpy.ndarray` or `cupy.ndarray` on the memory of `x`, without a copy.

    Subclasses may index, broadcast and reshape by rules of their own (a `numpy.matrix` keeps two dimensions), so their base class is what
    kernels get. Foreign arrays become NumPy's in host memory, CuPy's in device memory. Anything else comes back unchanged, a masked array
    too, and a device array where CuPy is missing: `problem.bind` says what it wants.
    """
    if plain(x):
        return x
    if isinstance(x, np.ndarray):
        return x if isinstance(x, np.ma.MaskedArray) else np.asarray(x)
    if library(x) == "cupy":
        return cupy().ndarray.view(x, cupy().ndarray)
    if hasattr(x, "__dlpack__") and x.__dlpack_device__()[0] == _DLPACK_CPU:
        return np.from_dlpack(x)
    if hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__"):
        try:
            import cupy as cp
        except ImportError:
            return x
        return cp.from_dlpack(x) if hasattr(x, "__dlpack__") else cp.asarray(x)
    return x


def device_id(x) -> int:
    """CUDA device number, -1 for host memory."""
    return -1 if isinstance(x, np.ndarray) else x.data.device_id


def beside(x):
    """Context in which new arrays are made on the device of `x`."""
    return nullcontext() if isinstance(x, np.ndarray) else x.device


def address(x) -> int:
    """Address of the first element."""
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


def aligned(x) -> bool:
    """True if every element lies at a multiple of the itemsize."""
    return x.size == 0 or address(x) % max(x.dtype.itemsize, 1) == 0


def layouts(xs) -> list[tuple | None]:
    """Everything about each array but its address: shape, strides, dtype, device, alignment (to 16 bytes on a GPU); None for None.

    TypeError, if one of them is not `plain`.
    """
    of_cupy = getattr(sys.modules.get("cupy"), "ndarray", None)
    found = []
    for x in xs:  # a comprehension takes a tenth more, as a function of its own
        if x is None:
            found.append(None)
        elif type(x) is of_cupy:
            data = x.data
            found.append((x.shape, x.strides, x.dtype, data.device_id, data.ptr % 16))
        elif type(x) is np.ndarray:
            found.append((x.shape, x.strides, x.dtype, -1, x.flags.aligned))
        else:
            raise TypeError
    return found


class Layout(NamedTuple):
    """An array on paper: all that a launch has to know before there is one.

    Attributes
    ----------
    shape, strides : tuple of int
        As an array's.
    dtype : numpy.dtype
        Of its elements.
    device : int
        CUDA device number, -1 for host memory.
    offset : int
        Bytes from a multiple of 16 to the first element, on a GPU.
    known : bool
        The host knows the values of each, which may come as numbers (`numba_flash.cuda.work.prepare_lengths.Known`).
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    device: int = -1
    offset: int = 0
    known: bool = False

    @classmethod
    def of(cls, x) -> "Layout | None":
        """That of an array, or of what has a layout as a `Place` has; a layout itself, and None for None."""
        if x is None or isinstance(x, cls):
            return x
        if hasattr(x, "layout"):
            return x.layout
        device = device_id(x)
        return cls(tuple(x.shape), tuple(x.strides), x.dtype, device, 0 if device < 0 else x.data.ptr % 16)

    @classmethod
    def compact(cls, shape: tuple[int, ...], dtype) -> "Layout":
        """That of what `compact` makes."""
        dtype, strides = np.dtype(dtype), []
        for i in range(len(shape)):
            strides.append(dtype.itemsize * math.prod(shape[i + 1 :]))
        return cls(tuple(shape), tuple(strides), dtype)

    @classmethod
    def like(cls, x: "Layout", shape: tuple[int, ...], dtype) -> "Layout":
        """That of what an `allocator` makes beside arrays of the layout `x`."""
        if x.ndim != len(shape):
            return cls.compact(shape, dtype)
        order = _in_memory(x)
        made = cls.compact(tuple(shape[axis] for axis in order), dtype)
        return made._replace(shape=tuple(shape), strides=tuple(made.strides[at] for at in np.argsort(order)))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Of all its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def swapaxes(self, i: int, j: int) -> "Layout":
        """As that of an array."""
        axes = list(range(self.ndim))
        axes[i], axes[j] = axes[j], axes[i]
        return self._replace(shape=tuple(self.shape[a] for a in axes), strides=tuple(self.strides[a] for a in axes))

    def cut(self, axis: int, start: int, stop: int) -> "Layout":
        """That of some elements of an axis."""
        shape, offset = list(self.shape), self.offset
        shape[axis] = stop - start
        if self.device >= 0:
            offset = (offset + start * self.strides[axis]) % 16
        return self._replace(shape=tuple(shape), offset=offset)

    def words(self) -> "Layout":
        """The same bytes as uint32, two elements of 16 bits each."""
        *shape, last = self.shape
        *strides, _ = self.strides
        return self._replace(shape=(*shape, last // 2), strides=(*strides, 4), dtype=np.dtype(np.uint32))


def expand(x, ndim: int):
    """View with leading axes of size 1 up to `ndim` dimensions."""
    return x[(None,) * (ndim - x.ndim)] if x.ndim < ndim else x


def expanded_strides(x, ndim: int) -> tuple[int, ...]:
    """Strides of ``expand(x, ndim)``, without making the view."""
    return (0,) * (ndim - len(x.strides)) + tuple(x.strides)


@contextmanager
def named(name: str, shape: tuple[int, ...], dtype):
    """A MemoryError from within names the array that is made there, its shape and size."""
    try:
        yield
    except MemoryError as error:
        raise memory_error(name, shape, dtype) from error


def allocator(like, shape: tuple[int, ...], dtype: str | None = None):
    """Function that makes a new array beside arrays of the layout of `like`, each time it is called: its library, device and axis order
    in memory (so heads-last inputs give heads-last results).
    """
    new = np.empty if isinstance(like, np.ndarray) else _new_of_cupy()
    dtype = np.dtype(like.dtype if dtype is None else dtype)
    dtype = dtype.char if dtype.isbuiltin == 1 else dtype  # which CuPy knows in half the time
    if like.ndim != len(shape) or like.flags.c_contiguous:
        return partial(new, tuple(shape), dtype)
    order = _in_memory(like)
    in_order, axes = tuple(shape[axis] for axis in order), np.argsort(order).tolist()
    return lambda: new(in_order, dtype).transpose(axes)


def _in_memory(x) -> list[int]:
    """Axes of an array, from the one whose elements are farthest apart."""
    return sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))


def _new_of_cupy():
    """``new(shape, dtype)``: an array on CuPy's current device. Its `empty` does the same and takes longer; so does its class, which calls
    an `__init__` after this that has nothing to do.
    """
    kind = cupy().ndarray
    return partial(kind.__new__, kind)


def empty(name: str, like, shape: tuple[int, ...], dtype: str | None = None):
    """What an `allocator` makes; MemoryError naming the array if there is no room."""
    with named(name, shape, like.dtype if dtype is None else dtype):
        return allocator(like, shape, dtype)()


def compact(name: str, like, shape: tuple[int, ...], dtype):
    """New array beside `like`, its elements one after the other; MemoryError naming the array if there is no room."""
    try:
        return (np if isinstance(like, np.ndarray) else cupy()).empty(shape, dtype)
    except MemoryError as error:
        raise memory_error(name, shape, dtype) from error


class Scratch:
    """Arrays that kernels of one call hand to each other, which nobody else looks at: on a GPU in one piece of memory.

    Parameters
    ----------
    layouts : named tuple of Layout or None
        What `Layout.compact` says of each.
    names : sequence of str
        What errors call them.
    """

    def __init__(self, layouts, names):
        self._layouts, self._names, self._places, self._bytes = layouts, names, [], 0
        self._named = partial(tuple.__new__, type(layouts))
        for x in layouts:
            self._places.append(x and (self._bytes, x))
            size = 0 if x is None else math.prod(x.shape) * x.dtype.itemsize
            self._bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        ledger.note(self._bytes)

    def beside(self, like):
        """The named tuple of new ones beside `like`: arrays of NumPy, or a `Place` of each on CuPy's current device."""
        if isinstance(like, np.ndarray):
            named = zip(self._names, self._layouts, strict=True)
            return self._named(x and compact(name, like, x.shape, x.dtype) for name, x in named)
        try:
            memory = cupy().cuda.alloc(self._bytes)
        except MemoryError as error:
            raise memory_error(", ".join(self._names), (self._bytes,), "uint8") from error
        return self._named([x and Place(memory + x[0], x[1]) for x in self._places])


class Place:
    """Memory of an array on a GPU that only kernels see, all that a launch looks at; and its layout, None of a part of an array."""

    __slots__ = ("data", "layout")

    def __init__(self, data, layout: Layout | None):
        self.data, self.layout = data, layout

    def __getitem__(self, i: int) -> "Place":
        """That of the array's `i`-th element along the first axis."""
        return Place(self.data + i * self.layout.strides[0], None)


def check_size(name: str, like, shape: tuple[int, ...], dtype: str | None = None) -> None:
    """MemoryError if the bytes of such an array cannot even be counted in 63 bits, where the libraries disagree about what to raise."""
    dtype = like.dtype if dtype is None else np.dtype(dtype)
    if math.prod(shape) * dtype.itemsize >= 2**63:
        raise memory_error(name, shape, dtype)


def current_gpu():
    """CuPy's current device."""
    import cupy as cp

    return cp.cuda.Device()


def to_gpu(name: str, x: np.ndarray):
    """Copy on CuPy's current device; MemoryError naming the array if there is no room. Axes of stride 0 stay such."""
    import cupy as cp

    with named(name, x.shape, x.dtype):
        if 0 not in x.strides:
            return cp.asarray(x)
        repeated = tuple(slice(0, 1) if stride == 0 and size > 1 else slice(None) for stride, size in zip(x.strides, x.shape, strict=True))
        return cp.broadcast_to(cp.asarray(x[repeated]), x.shape)


def to_host(name: str, x, result: np.ndarray) -> None:
    """Copy the CuPy array `x` into `result`; MemoryError naming the array if there is no room for what that takes."""
    with named(name, x.shape, x.dtype):
        result[...] = x.get()


def memory_error(name: str, shape: tuple[int, ...], dtype) -> MemoryError:
    """What is raised where there is no room for an array."""
    dtype = np.dtype(dtype)
    return MemoryError(f"{name}: cannot allocate {math.prod(shape) * dtype.itemsize} bytes for shape {tuple(shape)}, dtype {dtype.name}")
