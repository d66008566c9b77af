"""The CUDA driver, as far as launches need it, through cuda.bindings, which is imported when the
first kernel is loaded. What is current to CuPy is current here.
"""

import os
from functools import cache, partial

# Since when edges of a graph can tell that a kernel begins early: drivers of CUDA 12.3.
EDGES_SINCE = 12030
NAME = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"


@cache
def library():
    """The driver's functions; who calls one of them holds no lock of Python's meanwhile."""
    from cuda.bindings import driver

    return driver


def check(error, what: str) -> None:
    """Raise if the driver's answer is an error: it says that `what` cannot be."""
    if error:
        raise RuntimeError(f"{what}: {error.name} ({int(error)})")


@cache
def launches_early() -> bool:
    """Whether kernels may begin early: older drivers could not capture that into a graph."""
    error, version = library().cuDriverGetVersion()
    check(error, "the driver does not tell its version")
    return version >= EDGES_SINCE


def load(code: bytes, device: int, shared_bytes: int, what: str) -> int:
    """Handle of the kernel called "kernel" in machine code, allowed to use that much dynamic shared
    memory; errors call it `what`. It stays loaded.
    """
    driver = library()
    error, module = driver.cuLibraryLoadData(code, None, None, 0, None, None, 0)
    check(error, f"{what} cannot be loaded")
    error, kernel = driver.cuLibraryGetKernel(module, b"kernel")
    check(error, f"{what} has no kernel")
    if shared_bytes:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        there = driver.CUdevice(device)
        (error,) = driver.cuKernelSetAttribute(limit, shared_bytes, kernel, there)
        check(error, f"{what} needs {shared_bytes} bytes of shared memory")
    return int(kernel)


def launcher(config: int, kernel: int, arguments: int):
    """``launch()``: launch a kernel, and return the driver's answer in a tuple; what it is like is
    in a CUlaunchConfig at an address, and addresses of its arguments from another one on.
    """
    driver = library()
    described = driver.CUlaunchConfig(_ptr=config), driver.CUfunction(kernel)
    return partial(driver.cuLaunchKernelEx, *described, arguments, 0)


def capture_of(stream: int) -> int | None:
    """The number of the capture into a graph that the stream is in, which no other one has, or
    None.
    """
    driver = library()
    error, status, number, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(stream))
    check(error, "a stream does not say whether it is being captured")
    active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    return int(number) if status == active else None


class TensorMapEncoder:
    """Makes tensor maps of 16-bit elements in five dimensions, in boxes with a swizzle of as many
    bytes as their rows have, 64 or 128.

    Parameters
    ----------
    shape, strides, box : tuples of int
        Of the arrays, from the first axis on; strides in bytes, without that of the last axis.
    """

    def __init__(self, shape, strides, box):
        driver = library()
        swizzles, (*_, columns) = driver.CUtensorMapSwizzle, box
        last_first = lambda kind, numbers: [kind(x) for x in reversed(numbers)]
        self._kind = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16, len(shape)
        self._described = (
            last_first(driver.cuuint64_t, shape),
            last_first(driver.cuuint64_t, strides),
            last_first(driver.cuuint32_t, box),
            last_first(driver.cuuint32_t, (1,) * len(shape)),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{2 * columns}B"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )

    def encode(self, address: int):
        """That of the array that begins there, with ``getPtr()``, at a multiple of 16: cuda.h wants
        64, which cuda.bindings does not see to, and drivers do not look at.
        """
        error, made = library().cuTensorMapEncodeTiled(*self._kind, address, *self._described)
        check(error, "no tensor map can be made")
        return made
