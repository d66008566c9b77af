"""Prepared kernel launches on CuPy's current stream through the driver, or in Numba's simulator."""

import ctypes
import importlib
import math
import os
import struct
import threading
from dataclasses import KW_ONLY, dataclass
from functools import cache, lru_cache, partial
from glob import glob
from typing import NamedTuple

import numpy as np

from numba_flash import arrays
from numba_flash.cuda import compile
from numba_flash.cuda.tensor_maps import TensorMaps

DRIVER = "libcuda.so.1"
# Of a PC or server; in WSL; on Jetson boards.
DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu")
# cudaErrorInsufficientDriver, also where there is none; cudaErrorNoDevice.
OLD_DRIVER, NO_DEVICE = 35, 100
# Numbers as kernels read them, each in a word of its own.
WORD, FORMATS = 8, {int: "q", np.uint64: "Q", float: "d", np.float64: "d", np.float32: "f4x"}

_thread = threading.local()


def simulated() -> bool:
    """True if Numba's CUDA simulator stands in for a GPU in this process."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"


@lru_cache(maxsize=1)
def _no_gpu() -> str | None:
    """Reason why no CUDA kernel can run in this process, or None."""
    for module in ("cupy", "cuda.core", "numba_cuda"):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return (
                _no_gpu_in_sight()
                or f"{module} cannot be imported ({error}); install numba_flash[cuda13] or"
                " numba_flash[cuda12]"
            )
    import cupy

    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no NVIDIA GPU found"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        reason = {
            NO_DEVICE: "no NVIDIA GPU found",
            OLD_DRIVER: "the NVIDIA driver is too old for CuPy",
        }.get(error.status, "no GPU can be used")
        return _no_gpu_in_sight() or f"{reason}: {error}"


def _no_gpu_in_sight() -> str | None:
    """Why this machine seems to have no GPU, or None. Asks no driver: one that has been asked is of
    no use to forked children.
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return f"no NVIDIA GPU found: there is no driver ({DRIVER})"
    if not any(map(glob, DEVICES)):
        return f"no NVIDIA GPU found: there is a driver, but no device ({DEVICES[0]})"
    return None


def why_not(x) -> str | None:
    """Reason why no kernel can run on the array `x`, or None."""
    if simulated():
        return None if isinstance(x, np.ndarray) else "the CUDA simulator takes NumPy arrays"
    return _no_gpu()


class Gpu(NamedTuple):
    """What the choice of kernels depends on.

    Attributes
    ----------
    device : int
        Its number; -1 for Numba's simulator.
    capability : tuple of two ints
        Compute capability.
    multiprocessors : int
        How many there are.
    """

    device: int
    capability: tuple[int, int]
    multiprocessors: int


@cache
def gpu(device: int) -> Gpu:
    """The GPU of that number, or the simulator."""
    if device < 0:
        return Gpu(device, (0, 0), 1)
    from cuda.core import Device

    there = Device(device)
    return Gpu(device, tuple(there.compute_capability), there.properties.multiprocessor_count)


def gpu_of(x) -> Gpu:
    """Where kernels run for an array: its own GPU, the simulator, or CuPy's current GPU."""
    device = arrays.device_id(x)
    return gpu(device if device >= 0 or simulated() else arrays.current_gpu().id)


@lru_cache(maxsize=256)
def _kernel(builder: str, config: tuple, device: int, shared_bytes: int):
    """Loaded kernel for one device, allowed to use that much dynamic shared memory."""
    from cuda.bindings import driver
    from cuda.core import Device, ObjectCode

    Device(device).set_current()
    kernel = ObjectCode.from_cubin(
        compile.cubin(builder, config, gpu(device).capability)
    ).get_kernel("kernel")
    if shared_bytes:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuKernelSetAttribute(
            limit, shared_bytes, driver.CUkernel(int(kernel.handle)), driver.CUdevice(device)
        )
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"{builder} needs {shared_bytes} bytes of shared memory: {error.name}"
            )
    return kernel


@lru_cache(maxsize=256)
def _simulated_kernel(builder: str, config: tuple):
    from numba import cuda

    module, function = builder.rsplit(".", 1)
    kernel, _, _ = getattr(importlib.import_module(f"numba_flash.cuda.{module}"), function)(*config)
    return cuda.jit(kernel)


ADDRESS = 4  # its place in what `_numba_array` says


def _numba_array(x, view: int | tuple[int, ...]) -> list[int]:
    """A Numba array argument of a layout, flattened: no parent or owner, size, itemsize, address (0
    for now), shape, strides; all 0 for None.
    """
    ndim = view if isinstance(view, int) else len(view)
    if x is None:
        return [0] * (5 + 2 * ndim)
    shape, strides = (1,) * (ndim - x.ndim) + x.shape, arrays.expanded_strides(x, ndim)
    if shape != view and isinstance(view, tuple):
        strides = [0 if n == 1 else stride for n, stride in zip(shape, strides, strict=True)]
        shape = view
    return [0, 0, math.prod(shape), x.dtype.itemsize, 0, *shape, *strides]


def _flat(numbers) -> list:
    """Numbers as the driver takes them: those of tuples one by one."""
    return [x for each in numbers for x in (each if isinstance(each, tuple) else (each,))]


class Block:
    """Memory with all arguments of a kernel, for one call at a time, in words::

        addresses of arrays | pointers to tensor maps, and to each other argument | other arguments

    What changes with every call comes first, so that it is written at once; the pointers are those
    that the driver takes.

    Parameters
    ----------
    maps : int
        How many tensor maps there are, the first arguments.
    views : sequence of lists
        The arrays, as `_numba_array` describes them.
    numbers : sequence
        The arguments after these.
    """

    def __init__(self, maps: int, views, numbers):
        fixed = [word for view in views for word in view]
        first = len(views) + maps + len(fixed) + len(numbers)  # word of the other arguments
        self._memory = memory = ctypes.create_string_buffer(
            WORD * (first + len(fixed) + len(numbers))
        )
        base = ctypes.addressof(memory)
        places = [base + WORD * (first + i) for i in range(len(fixed) + len(numbers))]
        at = 0
        for i, view in enumerate(views):
            places[at + ADDRESS] = base + WORD * i
            at += len(view)
        struct.pack_into(f"<{len(places)}Q", memory, WORD * (len(views) + maps), *places)
        struct.pack_into(f"<{len(fixed)}q", memory, WORD * first, *fixed)
        self.write = partial(struct.Struct(f"<{len(views)}Q{maps}Q").pack_into, memory, 0)
        formats = "".join(FORMATS[type(x)] for x in numbers)
        self._write_numbers = partial(
            struct.Struct(f"<{formats}").pack_into, memory, WORD * (first + len(fixed))
        )
        self.pointers, self._numbers = base + WORD * len(views), None

    def write_numbers(self, numbers) -> None:
        """Put in the numbers, unless they are those of the last call."""
        if numbers is not self._numbers:
            self._write_numbers(*_flat(numbers))
            self._numbers = numbers


@dataclass(eq=False)
class Launch:
    """One kernel with its grid and every argument but the addresses; a call writes those into a
    `Block`, and launches on CuPy's current stream.

    The kernel is found or compiled, and loaded, when it runs for the first time.

    Parameters
    ----------
    builder : str
        ``"module.function"`` inside `numba_flash.cuda`; returns (kernel, signature, compile
        options).
    config : tuple
        Arguments of the builder, hashable.
    gpu : Gpu
        Where it will run.
    grid : int
        Blocks. A grid of 0 launches nothing.
    threads : int
        Of a block.
    operands : tuple of (Layout or None, ndim or shape)
        The arrays; each is seen by the kernel with leading axes of size 1 up to ndim, or broadcast
        to the shape.
    extras : tuple like `operands`
        The arrays that the kernel gets as a named tuple, after the others.
    numbers : tuple of numbers and named tuples of numbers
        The arguments after the arrays; a call may bring others.
    maps : tuple of (Layout, int)
        The arrays that the kernel reads through tensor maps, its first arguments, and the rows of
        their boxes.
    shared_bytes : int
        Dynamic shared memory of a block.
    """

    builder: str
    config: tuple
    gpu: Gpu
    _: KW_ONLY
    grid: int
    threads: int
    operands: tuple
    extras: tuple = ()
    numbers: tuple = ()
    maps: tuple = ()
    shared_bytes: int = 0

    def __post_init__(self):
        self._device, self._submit = self.gpu.device, None

    def __call__(self, *operands, extras=(), numbers=None) -> None:
        """Launch on arrays: those of `maps` first, then `operands`, and `extras` by name; `numbers`
        None are those it was made with.
        """
        if self.grid:
            if self._submit is None:
                self._load()
            self._submit(operands, extras, numbers)

    def _load(self) -> None:
        if self._device < 0:
            self._kernel = _simulated_kernel(self.builder, self.config)
            self._submit = self._simulate
            return
        import cupy
        from cuda.bindings import driver

        self._cupy = cupy.cuda
        self._kernel = _kernel(self.builder, self.config, self._device, self.shared_bytes)
        function, shape = (
            driver.CUfunction(int(self._kernel.handle)),
            (self.grid, 1, 1, self.threads, 1, 1),
        )
        self._launch = partial(driver.cuLaunchKernel, function, *shape, self.shared_bytes)
        self._maps = TensorMaps(self.maps)
        views = [_numba_array(x, view) for x, view in (*self.operands, *self.extras)]
        self._new_block = partial(Block, len(self.maps), views, _flat(self.numbers))
        self._blocks = []  # that no call is using
        self._submit = self._submit_to_gpu

    def _submit_to_gpu(self, operands, extras, numbers) -> None:
        if self._cupy.runtime.getDevice() != self._device:
            with self._cupy.Device(self._device):
                return self._submit_to_gpu(operands, extras, numbers)
        if self._device not in _thread.__dict__:
            # a new thread has no context until it names a device
            self._cupy.Device(self._device).use()
            _thread.__dict__[self._device] = True
        addresses = [0 if x is None else x.data.ptr for x in operands + extras]
        mapped = len(self.maps)
        maps = self._maps[tuple(addresses[:mapped])]  # held until the driver has copied them
        try:
            block = self._blocks.pop()
        except IndexError:  # the first call, or one beside another
            block = self._new_block()
        block.write(*addresses[mapped:], *maps.pointers)
        block.write_numbers(self.numbers if numbers is None else numbers)
        (error,) = self._launch(self._cupy.get_current_stream().ptr, block.pointers, 0)
        self._blocks.append(block)
        if error:
            raise RuntimeError(f"{self.builder} cannot be launched: {error.name}")

    def _simulate(self, operands, extras, numbers) -> None:
        from numba.cuda.simulator.cudadrv.devicearray import (
            FakeCUDAArray,
            FakeWithinKernelCUDAArray,
        )

        def fake(x, view):  # wrapped by hand, so that any strides are read in place
            x = _view(np.empty(operands[0].shape[:-1]) if x is None else x, view)
            return FakeCUDAArray(x.view(np.uint16) if x.dtype.name == "bfloat16" else x)

        views = [fake(x, view) for x, (_, view) in zip(operands, self.operands, strict=True)]
        if extras:
            inner = [fake(x, view) for x, (_, view) in zip(extras, self.extras, strict=True)]
            extras = extras._make(map(FakeWithinKernelCUDAArray, inner))
        numbers = self.numbers if numbers is None else numbers
        with np.errstate(all="ignore"):
            self._kernel[self.grid, self.threads](*views, extras, *numbers)


def _view(x: np.ndarray, view: int | tuple[int, ...]) -> np.ndarray:
    return arrays.expand(x, view) if isinstance(view, int) else np.broadcast_to(x, view)
