"""Merging results over two sets of keys, from the host: see `numba_flash.cuda.passes.merge`. Numba
is not imported here.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

from numba_flash.arguments.arrays import Layout
from numba_flash.cuda.runtime import launch
from numba_flash.cuda.runtime.launch import Gpu, Launch

ROWS, LANES = 8, 32  # of a block, and threads of a row


class Parts(NamedTuple):
    """Two results, and where they are merged to, which may be the first; or the layouts of these.

    Attributes
    ----------
    o1, o2, o : (..., heads, n, head_dim_v)
        Of up to 5 dimensions.
    lse1, lse2, lse : (..., heads, n)
        The dtype of `lse` is that of `o`.
    """

    o1: Any
    lse1: Any
    o2: Any
    lse2: Any
    o: Any
    lse: Any


def merge(parts: Parts) -> None:
    """Merge on the GPU where the parts are, or in the simulator."""
    prepared(Parts(*map(Layout.of, parts)), launch.gpu_of(parts.o))(*parts)


@lru_cache(maxsize=256)
def prepared(parts: Parts, gpu: Gpu) -> Launch:
    """The launch for arrays of these layouts."""
    names = [x.dtype.name for x in (parts.o, parts.o1, parts.lse1, parts.o2, parts.lse2)]
    return Launch(
        "passes.merge.build",
        (*names, ROWS),
        gpu,
        grid=-(-math.prod(parts.o.shape[:-1]) // ROWS) if math.prod(parts.o.shape) else 0,
        threads=ROWS * LANES,
        operands=tuple((x, ndim) for x, ndim in zip(parts, (5, 4) * 3, strict=True)),
    )
