"""Prepared kernel launches on the caller's stream through cuda.core, or in Numba's CUDA simulator."""

import ctypes
import importlib
import math
import os
import threading
from functools import cache, lru_cache
from glob import glob

import numpy as np

from numba_flash import arrays
from numba_flash.cuda import compile
from numba_flash.cuda.swizzle import PANEL

TENSOR_MAPS_LIMIT = 256  # of one array of one launch
DRIVER = "libcuda.so.1"
DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu")  # of a PC or server; in WSL; on Jetson boards
OLD_DRIVER, NO_DEVICE = 35, 100  # cudaErrorInsufficientDriver, also where there is none; cudaErrorNoDevice

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
            return _no_gpu_in_sight() or f"{module} cannot be imported ({error}); install numba_flash[cuda13] or numba_flash[cuda12]"
    import cupy

    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no NVIDIA GPU found"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        reason = {NO_DEVICE: "no NVIDIA GPU found", OLD_DRIVER: "the NVIDIA driver is too old for CuPy"}.get(
            error.status, "no GPU can be used"
        )
        return _no_gpu_in_sight() or f"{reason}: {error}"


def _no_gpu_in_sight() -> str | None:
    """Why this machine seems to have no GPU, or None. Asks no driver: one that has been asked is of no use to forked children."""
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


@cache
def capability(device: int) -> tuple[int, int]:
    """Compute capability."""
    from cuda.core import Device

    return tuple(Device(device).compute_capability)


@cache
def multiprocessors(device: int) -> int:
    """Number of multiprocessors."""
    from cuda.core import Device

    return Device(device).properties.multiprocessor_count


@lru_cache(maxsize=256)
def _kernel(builder: str, config: tuple, device: int, shared_bytes: int):
    """Loaded kernel for one device, allowed to use that much dynamic shared memory."""
    from cuda.bindings import driver
    from cuda.core import Device, ObjectCode

    Device(device).set_current()
    kernel = ObjectCode.from_cubin(compile.cubin(builder, config, capability(device))).get_kernel("kernel")
    if shared_bytes:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuKernelSetAttribute(limit, shared_bytes, driver.CUkernel(int(kernel.handle)), driver.CUdevice(device))
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{builder} needs {shared_bytes} bytes of shared memory: {error.name}")
    return kernel


@lru_cache(maxsize=256)
def _stream(handle: int):
    from cuda.core import Stream

    return Stream.from_handle(handle)


@lru_cache(maxsize=256)
def _simulated_kernel(builder: str, config: tuple):
    from numba import cuda

    module, function = builder.split(".")
    kernel, _, _ = getattr(importlib.import_module(f"numba_flash.cuda.{module}"), function)(*config)
    return cuda.jit(kernel)


def _numba_array(x, view: int | tuple[int, ...]) -> list[int]:
    """A Numba array argument, flattened: no parent or owner, size, itemsize, address (0 for now), shape, strides; all 0 for None."""
    ndim = view if isinstance(view, int) else len(view)
    if x is None:
        return [0] * (5 + 2 * ndim)
    shape, strides = (1,) * (ndim - x.ndim) + tuple(x.shape), arrays.expanded_strides(x, ndim)
    if shape != view and isinstance(view, tuple):
        strides = [0 if n == 1 else stride for n, stride in zip(shape, strides, strict=True)]
        shape = view
    return [0, 0, math.prod(shape), x.dtype.itemsize, 0, *shape, *strides]


class _Memory:
    """Device memory at an address, in the protocol that cuda.core reads."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]):
        self.__cuda_array_interface__ = {
            "version": 3, "shape": shape, "strides": strides, "typestr": "<u2", "data": (address, False), "stream": None
        }  # fmt: skip


class TensorMaps:
    """Tensor maps of (..., n, d) arrays of 16-bit elements as five dimensions, with boxes of `rows` rows of one panel of 64 columns.

    One for each address at which an array of this layout was seen: programs use the same memory again and again.
    """

    def __init__(self, x, rows: int):
        self._shape, self._rows, self._maps = (1,) * (5 - x.ndim) + tuple(x.shape), rows, {}
        strides = zip(self._shape[:-1], arrays.expanded_strides(x, 5)[:-1], strict=True)
        self._strides = (*(16 if n == 1 else stride for n, stride in strides), 2)  # that of a single element is never used, but checked

    def at(self, address: int):
        """The descriptor for an array that begins there."""
        descriptor = self._maps.get(address)
        if descriptor is None:
            if len(self._maps) >= TENSOR_MAPS_LIMIT:
                self._maps = {}
            descriptor = self._maps[address] = self._describe(address)
        return descriptor

    def _describe(self, address: int):
        from cuda.core import TensorMapDescriptorOptions
        from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle
        from cuda.core.utils import StridedMemoryView

        view = StridedMemoryView.from_cuda_array_interface(_Memory(address, self._shape, self._strides), stream_ptr=-1)
        box, promotion = (1, 1, 1, self._rows, PANEL), TensorMapL2Promotion.L2_256B
        options = TensorMapDescriptorOptions(box_dim=box, swizzle=TensorMapSwizzle.SWIZZLE_128B, l2_promotion=promotion)
        return view.as_tensor_map(options=options)


class Launch:
    """One kernel with its grid and every argument but the addresses; a call costs one list copy and one launch on CuPy's current stream.

    Parameters
    ----------
    builder : str
        ``"module.function"`` inside `numba_flash.cuda`; returns (kernel, signature, compile options).
    config : tuple
        Arguments of the builder, hashable.
    grid : int
        Blocks. A grid of 0 launches nothing.
    block : int or tuple of two ints
        Threads per block, and bytes of dynamic shared memory if there is any.
    operands : tuple of (array or None, ndim or shape)
        Layouts; each is seen by the kernel with leading axes of size 1 up to ndim, or broadcast to the shape.
    scalars : tuple of int or float
        int64 and float64 arguments after the arrays.
    extras : tuple like `operands`
        Layouts of the arrays that the kernel gets as a tuple, after the others.
    parameters : tuple of int or float
        Numbers that the kernel gets as a tuple, after the scalars; a call may bring others, and before them others for the last scalars.
    maps : tuple of (array, int)
        Layouts of the arrays that the kernel reads through tensor maps, its first arguments, and the rows of their boxes.
    """

    def __init__(self, builder, config, grid, block, operands, scalars=(), extras=(), parameters=(), maps=()):
        block, shared_bytes = block if isinstance(block, tuple) else (block, 0)
        self._grid, self._block, self._scalars, self._parameters = grid, block, scalars, parameters
        self._leading, operands = len(operands), (*operands, *extras)
        self._views = [view for _, view in operands]
        self._device = arrays.device_id(operands[0][0])
        if self._device < 0:
            self._kernel, self._submit = _simulated_kernel(builder, config), self._simulate
            return
        import cupy
        from cuda.core import LaunchConfig, launch

        self._cupy, self._launch, self._submit = cupy.cuda, launch, self._submit_to_gpu
        self._kernel = _kernel(builder, config, self._device, shared_bytes)
        self._config = LaunchConfig(grid=max(grid, 1), block=block, shmem_size=shared_bytes)
        self._maps = [TensorMaps(x, rows).at for x, rows in maps]
        self._arguments, self._slots = [0] * len(maps), []
        for x, view in operands:
            self._slots.append(len(self._arguments) + 4)
            self._arguments += _numba_array(x, view)
        self._arguments += (*scalars, *parameters)

    def __call__(self, *operands, parameters=()) -> None:
        if self._grid:
            self._submit(operands, parameters)

    def _submit_to_gpu(self, operands, parameters) -> None:
        if self._cupy.runtime.getDevice() != self._device:
            with self._cupy.Device(self._device):
                return self._submit_to_gpu(operands, parameters)
        if self._device not in _thread.__dict__:  # a new thread has no context until it names a device
            self._cupy.Device(self._device).use()
            _thread.__dict__[self._device] = True
        arguments, mapped = self._arguments.copy(), len(self._maps)
        for i, at in enumerate(self._maps):
            arguments[i] = at(operands[i].data.ptr)
        for slot, x in zip(self._slots, operands[mapped:], strict=True):
            if x is not None:
                arguments[slot] = x.data.ptr
        if parameters:
            arguments[-len(parameters) :] = parameters
        self._launch(_stream(self._cupy.get_current_stream().ptr), self._config, self._kernel, *arguments)

    def _simulate(self, operands, parameters) -> None:
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray, FakeWithinKernelCUDAArray

        nothing = np.empty(operands[0].shape[:-1])
        views = [_view(nothing if x is None else x, view) for x, view in zip(operands, self._views, strict=True)]
        # wrapped by hand, so that any strides are read in place
        views = [FakeCUDAArray(x.view(np.uint16) if x.dtype.name == "bfloat16" else x) for x in views]
        extras = tuple(map(FakeWithinKernelCUDAArray, views[self._leading :]))
        with np.errstate(all="ignore"):
            self._kernel[self._grid, self._block](*views[: self._leading], extras, *self._scalars, parameters or self._parameters)


def _view(x: np.ndarray, view: int | tuple[int, ...]) -> np.ndarray:
    return arrays.expand(x, view) if isinstance(view, int) else np.broadcast_to(x, view)
