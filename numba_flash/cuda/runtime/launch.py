"""Prepared kernel launches on CuPy's current stream through the driver, or in Numba's simulator."""

import ctypes
import importlib
import importlib.util
import math
import os
import sys
import threading
from dataclasses import KW_ONLY, dataclass
from functools import cache, lru_cache, partial
from glob import glob
from typing import NamedTuple

import numpy as np

from numba_flash.arguments import arrays
from numba_flash.cuda.runtime import compile, driver
from numba_flash.cuda.runtime.packing import Block, flat, numba_array
from numba_flash.cuda.runtime.tensor_maps import TensorMaps

# Of a PC or server; in WSL; on Jetson boards.
DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu")
# cudaErrorInsufficientDriver, also where there is none; cudaErrorNoDevice.
OLD_DRIVER, NO_DEVICE = 35, 100
# cudaDeviceAttr: compute capability; how many multiprocessors there are; the clock of the memory in
# kHz, of which each tick moves two bits on each wire; and how many wires there are.
MAJOR, MINOR, MULTIPROCESSORS, MEMORY_CLOCK, MEMORY_WIRES = 75, 76, 16, 36, 37

_thread = threading.local()


def simulated() -> bool:
    """True if Numba's CUDA simulator stands in for a GPU in this process."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"


@lru_cache(maxsize=1)
def _no_gpu() -> str | None:
    """Reason why no CUDA kernel can run in this process, or None."""
    advice = "install numba_flash[cuda13] or numba_flash[cuda12]"
    try:
        import cupy
    except ImportError as error:
        return _no_gpu_in_sight() or f"cupy cannot be imported ({error}); {advice}"
    for module in ("cuda.core", "numba_cuda"):  # wanted once a kernel has to be compiled
        if not _installed(module):
            return _no_gpu_in_sight() or f"{module} is missing; {advice}"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() else "no NVIDIA GPU found"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        reason = {
            NO_DEVICE: "no NVIDIA GPU found",
            OLD_DRIVER: "the NVIDIA driver is too old for CuPy",
        }.get(error.status, "no GPU can be used")
        return _no_gpu_in_sight() or f"{reason}: {error}"


def _installed(module: str) -> bool:
    """True if a module can be found; it is not imported, which takes long."""
    try:
        return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None
    except ImportError:  # of what it is part of
        return False


def _no_gpu_in_sight() -> str | None:
    """Why this machine seems to have no GPU, or None. Asks no driver: one that has been asked is of
    no use to forked children.
    """
    try:
        ctypes.CDLL(driver.NAME)
    except OSError:
        return f"no NVIDIA GPU found: there is no driver ({driver.NAME})"
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
    bandwidth : float
        Bytes a second to and from its memory, by its clock and wires; infinite where nobody tells.
    """

    device: int
    capability: tuple[int, int]
    multiprocessors: int
    bandwidth: float = math.inf


@cache
def gpu(device: int) -> Gpu:
    """The GPU of that number, or the simulator."""
    if device < 0:
        return Gpu(device, (0, 0), 1)
    import cupy

    about = lambda what: cupy.cuda.runtime.deviceGetAttribute(what, device)
    bandwidth = 1000 * about(MEMORY_CLOCK) * 2 * about(MEMORY_WIRES) / 8 or math.inf
    return Gpu(device, (about(MAJOR), about(MINOR)), about(MULTIPROCESSORS), bandwidth)


def gpu_of(x) -> Gpu:
    """Where kernels run for an array: its own GPU, the simulator, or CuPy's current GPU."""
    device = arrays.device_id(x)
    return gpu(device if device >= 0 or simulated() else arrays.current_gpu().id)


@lru_cache(maxsize=256)
def _kernel(builder: str, config: tuple, device: int, shared_bytes: int) -> int:
    """Handle of a kernel that is loaded for one device, the current one."""
    code = compile.cubin(builder, config, gpu(device).capability)
    return driver.load(code, device, shared_bytes, builder)


@lru_cache(maxsize=256)
def _simulated_kernel(builder: str, config: tuple):
    from numba_flash.cuda.runtime.lang import cuda

    module, function = builder.rsplit(".", 1)
    kernel, _, _ = getattr(importlib.import_module(f"numba_flash.cuda.{module}"), function)(*config)
    return cuda.jit(kernel)


@dataclass(eq=False)
class Launch:
    """One kernel with its grid and every argument but the addresses; a call writes those into a
    `Block`, and launches on CuPy's current stream. Its GPU is current then: `numba_flash.call` sees
    to that, once for all launches of a call.

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
    numbers : tuple of numbers and tuples of numbers
        The arguments after the arrays; a call may bring others, whole numbers also as bytes.
    maps : tuple of (Layout, int) or (Layout, int, int)
        The arrays that the kernel reads through tensor maps, its first arguments, and the rows of
        their boxes, with columns if these are not 64.
    shared_bytes : int
        Dynamic shared memory of a block.
    early : bool
        Whether it may begin while kernels before are still running; if so, it waits for them
        itself (`numba_flash.cuda.runtime.early`).
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
    early: bool = False

    @property
    def scores(self) -> tuple[str, tuple[int, int]] | None:
        """Name of a kernel that computes scores, and the rows and columns of its tiles: the last
        that it is built with; None of another one.
        """
        *_, module, function = self.builder.split(".")
        tile = getattr(self.config[-1], "tile", self.config[-1])
        if not hasattr(tile, "block_n"):
            return None
        name = function.removeprefix("build_") if "_" in function else module
        return name, (tile.block_m, tile.block_n)

    def __post_init__(self):
        self._device = self.gpu.device
        self._submit = self._load_and_submit if self.grid else lambda *_: None

    def __call__(self, *operands, extras=(), numbers=None) -> None:
        """Launch on arrays: those of `maps` first, then `operands`, and `extras` by name; `numbers`
        None are those it was made with.
        """
        self.on(operands, extras, numbers)

    def on(self, operands: tuple, extras=(), numbers=None) -> None:
        """The same, in nine tenths of the time."""
        if self._submit is not None:
            self._submit(operands, extras, numbers)
            return
        addresses = []
        for x in operands + extras:  # a comprehension takes longer, as a function of its own
            addresses.append(0 if x is None else x.data.ptr)
        mapped = self._mapped
        if mapped:
            maps = self._maps[tuple(addresses[:mapped])]  # held until the driver has copied them
            addresses = addresses[mapped:] + maps.pointers
        try:
            block = self._blocks.pop()
        except IndexError:  # the first call, or one beside another
            block = self._new_block()
        block.write(*addresses)
        stream = self._stream().ptr
        if stream != block.stream:
            block.write_stream(stream)
        if numbers is None:
            numbers = self.numbers
        if numbers is not block.numbers:
            block.write_numbers(numbers)
        (error,) = block.launch()
        if error:
            (error,) = self._launch_again(block, error)
        self._blocks.append(block)
        if error:
            driver.check(error, f"{self.builder} cannot be launched")

    def _load_and_submit(self, operands, extras, numbers) -> None:
        self._load()
        self.on(operands, extras, numbers)

    def _load(self) -> None:
        if self._device < 0:
            self._kernel = _simulated_kernel(self.builder, self.config)
            self._submit = self._simulate
            return
        import cupy

        self._stream = cupy.cuda.get_current_stream
        self._gpu = partial(cupy.cuda.Device, self._device)
        with self._gpu() as gpu:
            gpu.use()  # so that there is a context
            kernel = _kernel(self.builder, self.config, self._device, self.shared_bytes)
        views = [numba_array(x, view) for x, view in (*self.operands, *self.extras)]
        self._new_block = partial(
            Block,
            *(kernel, self.grid, self.threads, self.shared_bytes),
            *(len(self.maps), views, flat(self.numbers), self.early and driver.launches_early()),
        )
        self._maps, self._mapped = TensorMaps(self.maps), len(self.maps)
        self._blocks = []  # that no call is using
        self._submit = None  # but what `on` does

    def _launch_again(self, block: Block, error) -> tuple:
        """The driver's answer to the same launch, if this thread has never named a device: until
        then it has no context; else the `error`.
        """
        if self._device in _thread.__dict__:
            return (error,)
        self._gpu().use()
        _thread.__dict__[self._device] = True
        return block.launch()

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
