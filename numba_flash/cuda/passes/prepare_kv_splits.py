"""Results over parts of the keys, and the kernel that combines them, from the host: see
`numba_flash.cuda.passes.combine`. Numba is not imported here.
"""

import math
import threading
from typing import NamedTuple

import numpy as np

from numba_flash.arguments import arrays
from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.arguments.problem import ForwardResults
from numba_flash.cuda.runtime import driver, launch
from numba_flash.cuda.runtime.launch import Launch

ROWS, LANES = 4, 32
WARPS = 8  # that share many parts of a row
FEWEST_ARRIVALS = 1024
LEGACY_STREAMS = 0, 1  # handles of the one that cannot be captured
# The handle that means another stream in each thread (CUDA runtime, "Stream synchronization
# behavior").
PER_THREAD_STREAM = 2
_arrivals = {}  # by stream, the capture that they are for, and they themselves


def layouts(p, kv_splits: int) -> ForwardResults:
    """Of results over so many parts of the keys, in what sums are kept in."""
    shape = (kv_splits * p.batch[0], p.batch[1], p.hq, p.nq)
    accumulator = "float64" if p.dtype == "float64" else "float32"
    return ForwardResults(*(Layout.compact(x, accumulator) for x in ((*shape, p.dv), shape)))


def scratch(partial: ForwardResults) -> Scratch:
    """Where arrays of these layouts come from."""
    return Scratch(partial, ("parts of o", "parts of lse"))


def arrivals_layout(count: int) -> Layout:
    """Of so many of `arrivals`."""
    return Layout.compact((count,), "uint32")


class _Stream(NamedTuple):
    """What tells CuPy's current stream from others.

    Attributes
    ----------
    device, handle, thread : int
        Its own; of NumPy arrays the calling thread, whose launches follow each other.
    capture : int or None
        While it is captured into a graph, that one's number.
    """

    device: int
    handle: int
    thread: int
    capture: int | None

    @classmethod
    def current(cls, like) -> "_Stream":
        """That of arrays like this one."""
        if isinstance(like, np.ndarray):
            return cls(-1, 0, threading.get_ident(), None)
        handle = arrays.cupy().cuda.get_current_stream().ptr
        capture = None if handle in LEGACY_STREAMS else driver.capture_of(handle)
        thread = threading.get_ident() if handle == PER_THREAD_STREAM else 0
        return cls(like.data.device_id, handle, thread, capture)


def arrivals(like, count: int):
    """At least so many numbers beside `like` (uint32) that are 0 whenever a kernel begins: those
    that use them leave them so, and kernels of a stream follow each other. Each stream has some; a
    graph may run on any, so calls that are captured have others, for each stream and graph, which
    the graph makes 0 once.
    """
    stream = _Stream.current(like)
    place = stream._replace(capture=stream.capture is not None)
    capture, kept = _arrivals.get(place, (None, None))
    if kept is None or capture != stream.capture or kept.size < count:
        kept = arrays.compact("arrivals", like, (max(count, FEWEST_ARRIVALS),), "uint32")
        kept.fill(0)
        _arrivals[place] = stream.capture, kept
    return kept


def combine(partial: ForwardResults, results: ForwardResults, gpu, kv_splits: int) -> Launch:
    """The kernel that makes results of parts of them."""
    return Launch(
        "passes.combine.build",
        (results.o.dtype.name, results.o.shape[-1], results.lse is not None, kv_splits, ROWS),
        gpu,
        grid=-(-_rows(partial, kv_splits) // ROWS),
        threads=ROWS * LANES,
        operands=((partial.o, 5), (partial.lse, 4), (results.o, 5), (results.lse, 4)),
    )


def combine_many(partial: ForwardResults, results: ForwardResults, gpu, kv_splits: int) -> Launch:
    """The same for any number of parts, which changes with the length of a cache."""
    warps = 1 if launch.simulated() else WARPS
    return Launch(
        "passes.combine.build_many",
        (
            *(partial.o.dtype.name, results.o.dtype.name, results.o.shape[-1]),
            *(results.lse is not None, warps),
        ),
        gpu,
        grid=_rows(partial, kv_splits),
        threads=warps * LANES,
        operands=((partial.o, 5), (partial.lse, 4), (results.o, 5), (results.lse, 4)),
        numbers=(kv_splits,),
    )


def _rows(partial: ForwardResults, kv_splits: int) -> int:
    return math.prod(partial.lse.shape) // kv_splits
