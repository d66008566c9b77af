"""Results over parts of the keys, and the kernel that combines them, from the host: see
`numba_flash.cuda.combine`. Numba is not imported here.
"""

import math
import threading

import numpy as np

from numba_flash import arrays
from numba_flash.arrays import Layout, Scratch
from numba_flash.cuda import launch
from numba_flash.cuda.launch import Launch
from numba_flash.problem import ForwardResults

ROWS, LANES = 4, 32
WARPS = 8  # that share many parts of a row
FEWEST_ARRIVALS = 1024
LEGACY_STREAMS = 0, 1  # handles of the one that cannot be captured
# The handle that means another stream in each thread (CUDA runtime, "Stream synchronization
# behavior").
PER_THREAD_STREAM = 2
_arrivals = {}


def layouts(p, parts: int) -> ForwardResults:
    """Of results over so many parts of the keys, in what sums are kept in."""
    shape = (parts * p.batch[0], p.batch[1], p.hq, p.nq)
    accumulator = "float64" if p.dtype == "float64" else "float32"
    return ForwardResults(*(Layout.compact(x, accumulator) for x in ((*shape, p.dv), shape)))


def scratch(partial: ForwardResults) -> Scratch:
    """Where arrays of these layouts come from."""
    return Scratch(partial, ("parts of o", "parts of lse"))


def arrivals_layout(count: int) -> Layout:
    """Of so many of `arrivals`."""
    return Layout.compact((count,), "uint32")


def _stream(like) -> tuple | None:
    """What tells CuPy's current stream from others, and those of other devices; of NumPy arrays the
    calling thread, whose launches follow each other. None if it is being captured into a graph,
    which may run on any stream.
    """
    if isinstance(like, np.ndarray):
        return -1, threading.get_ident()
    stream = arrays.cupy().cuda.get_current_stream()
    if stream.ptr not in LEGACY_STREAMS and stream.is_capturing():
        return None
    thread = threading.get_ident() if stream.ptr == PER_THREAD_STREAM else 0
    return like.data.device_id, stream.ptr, thread


def arrivals(like, count: int):
    """At least so many numbers beside `like` (uint32) that are 0 whenever a kernel begins: those
    that use them leave them so, and kernels of a stream follow each other. Each stream has some; a
    call that is captured has its own, which the graph makes 0.
    """
    stream = _stream(like)
    kept = _arrivals.get(stream)
    if kept is None or kept.size < count:
        kept = arrays.compact("arrivals", like, (max(count, FEWEST_ARRIVALS),), "uint32")
        kept.fill(0)
        if stream is not None:
            _arrivals[stream] = kept
    return kept


def combine(partial: ForwardResults, results: ForwardResults, gpu, parts: int) -> Launch:
    """The kernel that makes results of parts of them."""
    return Launch(
        "combine.build",
        (results.o.dtype.name, results.o.shape[-1], results.lse is not None, parts, ROWS),
        gpu,
        grid=-(-_rows(partial, parts) // ROWS),
        threads=ROWS * LANES,
        operands=((partial.o, 5), (partial.lse, 4), (results.o, 5), (results.lse, 4)),
    )


def combine_many(partial: ForwardResults, results: ForwardResults, gpu, parts: int) -> Launch:
    """The same for any number of parts, which changes with the length of a cache."""
    warps = 1 if launch.simulated() else WARPS
    return Launch(
        "combine.build_many",
        (
            *(partial.o.dtype.name, results.o.dtype.name, results.o.shape[-1]),
            *(results.lse is not None, warps),
        ),
        gpu,
        grid=_rows(partial, parts),
        threads=warps * LANES,
        operands=((partial.o, 5), (partial.lse, 4), (results.o, 5), (results.lse, 4)),
        numbers=(parts,),
    )


def _rows(partial: ForwardResults, parts: int) -> int:
    return math.prod(partial.lse.shape) // parts
