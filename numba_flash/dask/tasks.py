"""What a task does with the blocks that it gets.

On a GPU nothing waits for the kernels of a task as long as tasks run on the default stream, which all threads share: those that use
their results come after them there. On any other current stream a task waits for its own, since another thread may go on with them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from operator import add

import numpy as np

from numba_flash import api
from numba_flash.arguments import arrays
from numba_flash.merge import merge

SHARED = 0  # address of the stream that all threads have, unless they choose another


def attend(names: tuple[str, ...], options: dict, *blocks):
    """o in float32 or float64 and lse, over a block of keys."""
    x = _named(names, blocks)
    with _beside(x["q"]):
        out = arrays.empty("o", x["q"], (*x["q"].shape[:-1], x["v"].shape[-1]), _accumulator(x["q"].dtype))
        return api.forward(**x, **options, out=out, return_lse=True)


def nothing(dv: int, q):
    """The same of queries that see no key."""
    with _beside(q):
        o = arrays.empty("o", q, (*q.shape[:-1], dv), _accumulator(q.dtype))
        lse = arrays.empty("lse", q, q.shape[:-1], o.dtype.name)
        o[...], lse[...] = 0, -np.inf
        return o, lse


def merged(parts: list):
    """o and lse over all their keys."""
    with _beside(parts[0][0]):
        return reduce(lambda x, y: merge(*map(_received, (*x, *y))), parts)


def rounded_o(dtype, part):
    """o in that dtype."""
    return rounded(dtype, part[0])


def log_sum(part):
    """lse."""
    return part[1]


def differentiate(names: tuple[str, ...], options: dict, *blocks) -> tuple:
    """The part of each gradient that belongs to a block of queries and one of keys."""
    x = _named(names, blocks)
    with _beside(x["q"]):
        return api.backward(**x, **options)


def added(parts: list):
    """Their sum in float32 or float64, from left to right."""
    with _beside(parts[0]):
        return reduce(add, (_in(_accumulator(x.dtype), x) for x in parts))


def rounded(dtype, x):
    """The array, or a copy in that dtype."""
    with _beside(x):
        return _in(dtype, x)


def zeros(x):
    """The gradient of what no query sees, or of a query that sees nothing."""
    x = _received(x)
    with _beside(x):
        gradient = arrays.empty("a gradient", x, x.shape)
        gradient[...] = 0
        return gradient


def moved(x):
    """A copy of a block in host memory on the GPU of the worker."""
    import cupy

    copy = cupy.asarray(x)
    with _beside(copy):
        return copy


@contextmanager
def _beside(x) -> Iterator[None]:
    """What is computed within it is computed where `x` is, and afterwards there for every thread."""
    with arrays.beside(x):
        yield
        if not isinstance(x, np.ndarray):
            _settle(arrays.cupy().cuda.get_current_stream())


def _settle(stream) -> None:
    """Wait for the kernels of a task, unless whatever uses their results comes after them."""
    if stream.ptr != SHARED:
        stream.synchronize()


def _named(names: tuple[str, ...], blocks: tuple) -> dict:
    """Blocks by name."""
    return dict(zip(names, map(_received, blocks), strict=True))


def _received(x):
    """A block as it was before dask sent it: in host memory it may begin at any byte now, and CuPy's bfloat16 has lost its name."""
    if isinstance(x, np.ndarray):
        return np.require(x, requirements="A")
    if x.dtype.name == "void16":
        import ml_dtypes

        return x.view(ml_dtypes.bfloat16)
    return x


def _in(dtype, x):
    """A block in that dtype."""
    return _received(x).astype(dtype, copy=False)


def _accumulator(dtype) -> str:
    return "float64" if dtype.name == "float64" else "float32"
