"""Arguments of kernels as the driver takes them: arrays as Numba describes them, numbers, and the
memory of a launch.
"""

import ctypes
import math
import struct
from functools import partial

import numpy as np

from numba_flash.arguments import arrays
from numba_flash.cuda.runtime import driver

# Numbers as kernels read them, each in a word of its own.
WORD = 8
FORMATS = {
    **{int: "q", np.uint64: "Q", np.int32: "i4x"},
    **{float: "d", np.float64: "d", np.float32: "f4x"},
}
# Of a CUlaunchConfig: grid, threads and shared memory; the stream; attributes and their number.
SHAPE, CONFIG_WORDS, ATTRIBUTES = "7I", 7, 5
# A CUlaunchAttribute: CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION is allowed.
EARLY = struct.pack("Q64s", 6, b"\1")
ADDRESS = 4  # its place in what `numba_array` says


def numba_array(x, view: int | tuple[int, ...]) -> list[int]:
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


def flat(numbers) -> list:
    """Numbers as the driver takes them: those of tuples one by one."""
    return [x for each in numbers for x in (each if isinstance(each, tuple) else (each,))]


def packed(numbers) -> bytes:
    """Numbers, each in a word of its own."""
    numbers = flat(numbers)
    return struct.pack("".join(FORMATS[type(x)] for x in numbers), *numbers)


def unpacked(words: bytes, like) -> list:
    """The numbers that `packed` made these words of, of the kinds that those of `like` have."""
    like = flat(like)
    values = struct.unpack("".join(FORMATS[type(x)] for x in like), words)
    return [type(x)(value) for x, value in zip(like, values, strict=True)]


class Block:
    """Memory with all that one launch at a time hands to the driver, in words::

        grid, threads, shared memory | stream | attributes and their number | addresses of arrays |
        pointers to tensor maps, and to each other argument | other arguments | an attribute or none

    What changes with every call is written at once, and the pointers are those that the driver
    takes, which has read everything when it returns. A stream stays there for the calls that
    follow, as numbers do, and most calls have that of the one before.

    Parameters
    ----------
    kernel : int
        Its handle.
    grid, threads, shared_bytes : int
        As in `Launch`.
    maps : int
        How many tensor maps there are, the first arguments.
    views : sequence of lists
        The arrays, as `numba_array` describes them.
    numbers : sequence
        The arguments after these.
    early : bool
        As in `Launch`.
    """

    def __init__(self, kernel, grid, threads, shared_bytes, maps: int, views, numbers, early):
        fixed = [word for view in views for word in view]
        shape = struct.pack(SHAPE + "4x", grid, 1, 1, threads, 1, 1, shared_bytes)
        pointers = CONFIG_WORDS + len(views)  # the word where they begin
        first = pointers + maps + len(fixed) + len(numbers)
        end = first + len(fixed) + len(numbers)
        memory = ctypes.create_string_buffer(WORD * end + len(EARLY) * early)
        base = ctypes.addressof(memory)
        places = [base + WORD * i for i in range(first, end)]
        at = 0
        for i, view in enumerate(views):
            places[at + ADDRESS] = base + WORD * (CONFIG_WORDS + i)
            at += len(view)
        memory[: len(shape)] = shape
        struct.pack_into(f"{len(places)}Q", memory, WORD * (pointers + maps), *places)
        struct.pack_into(f"{len(fixed)}q", memory, WORD * first, *fixed)
        if early:
            struct.pack_into("QI", memory, WORD * ATTRIBUTES, base + WORD * end, 1)
            memory[WORD * end :] = EARLY
        changing = struct.Struct(f"{len(views) + maps}Q")
        self.write = partial(changing.pack_into, memory, WORD * CONFIG_WORDS)
        self._write_stream = partial(struct.pack_into, "Q", memory, len(shape))
        formats = struct.Struct("".join(FORMATS[type(x)] for x in numbers))
        self._write_numbers = partial(formats.pack_into, memory, WORD * (first + len(fixed)))
        as_bytes = struct.Struct(f"{formats.size}s")
        self._write_bytes = partial(as_bytes.pack_into, memory, WORD * (first + len(fixed)))
        self.stream = self.numbers = None  # that are there
        self._memory = memory  # of what the driver knows by address alone
        self.launch = driver.launcher(base, kernel, base + WORD * pointers)

    def write_stream(self, stream: int) -> None:
        """Put in the stream, which stays there for the calls that follow."""
        self._write_stream(stream)
        self.stream = stream

    def write_numbers(self, numbers) -> None:
        """Put in the numbers, which stay there for the calls that follow."""
        if isinstance(numbers, bytes):
            self._write_bytes(numbers)
        else:
            self._write_numbers(*flat(numbers))
        self.numbers = numbers
