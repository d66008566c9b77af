"""The CUDA driver, as far as launches need it, by ctypes: to import a library for it takes longer
than all else that comes before a first result.

What is current to CuPy is current here. Names are those of cuda.h.
"""

import ctypes
import os
from ctypes import byref, c_int, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache

NAME = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
STREAM_CAPTURE_STATUS_ACTIVE = 1
TENSOR_MAP_DATA_TYPE_UINT16 = 1
TENSOR_MAP_INTERLEAVE_NONE = 0
TENSOR_MAP_SWIZZLE_128B = 3
TENSOR_MAP_L2_PROMOTION_L2_256B = 3
TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0


class LaunchConfig(ctypes.Structure):
    """A CUlaunchConfig, of seven words."""

    _fields_ = (
        *((name, c_uint) for name in ("grid", "grid_y", "grid_z", "threads", "y", "z", "shared")),
        *(("stream", c_void_p), ("attributes", c_void_p), ("number_of_attributes", c_uint)),
    )


@cache
def library() -> ctypes.CDLL:
    """The driver; who calls one of its functions holds no lock of Python's meanwhile."""
    return ctypes.CDLL(NAME)


def check(error: int, what: str) -> None:
    """Raise if the driver's answer is an error: it says that `what` cannot be."""
    if error:
        name = ctypes.c_char_p()
        library().cuGetErrorName(error, byref(name))
        raise RuntimeError(f"{what}: {(name.value or b'unknown error').decode()} ({error})")


def load(code: bytes, device: int, shared_bytes: int, what: str) -> int:
    """Handle of the kernel called "kernel" in machine code, allowed to use that much dynamic shared
    memory; errors call it `what`. It stays loaded.
    """
    module, kernel, driver = c_void_p(), c_void_p(), library()
    check(
        driver.cuLibraryLoadData(byref(module), code, None, None, 0, None, None, 0),
        f"{what} cannot be loaded",
    )
    check(driver.cuLibraryGetKernel(byref(kernel), module, b"kernel"), f"{what} has no kernel")
    if shared_bytes:
        limit = FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(
            driver.cuKernelSetAttribute(limit, shared_bytes, kernel, device),
            f"{what} needs {shared_bytes} bytes of shared memory",
        )
    return kernel.value


def capture_of(stream: int) -> int | None:
    """The number of the capture into a graph that the stream is in, which no other one has, or
    None.
    """
    status, number = c_int(), c_uint64()
    of_stream = c_void_p(stream), byref(status), byref(number), None, None, None
    error = library().cuStreamGetCaptureInfo_v2(*of_stream)
    check(error, "a stream does not say whether it is being captured")
    return number.value if status.value == STREAM_CAPTURE_STATUS_ACTIVE else None


class TensorMapEncoder:
    """Writes tensor maps of 16-bit elements in five dimensions, in boxes with a swizzle of 128
    bytes.

    Parameters
    ----------
    shape, strides, box : tuples of int
        Of the arrays, from the first axis on; strides in bytes, without that of the last axis.
    """

    def __init__(self, shape, strides, box):
        last_first = lambda kind, numbers: (kind * len(numbers))(*reversed(numbers))
        self._described = (
            *(last_first(c_uint64, shape), last_first(c_uint64, strides)),
            *(last_first(c_uint32, box), last_first(c_uint32, (1,) * len(shape))),
        )
        self._options = tuple(
            map(
                c_int,
                (
                    TENSOR_MAP_INTERLEAVE_NONE,
                    TENSOR_MAP_SWIZZLE_128B,
                    TENSOR_MAP_L2_PROMOTION_L2_256B,
                    TENSOR_MAP_FLOAT_OOB_FILL_NONE,
                ),
            )
        )
        self._rank = len(shape)

    def write(self, place: int, address: int) -> None:
        """That of the array that begins at `address`, to 128 bytes at a multiple of 64."""
        where = c_void_p(place), TENSOR_MAP_DATA_TYPE_UINT16, self._rank, c_void_p(address)
        error = library().cuTensorMapEncodeTiled(*where, *self._described, *self._options)
        check(error, "no tensor map can be made")
