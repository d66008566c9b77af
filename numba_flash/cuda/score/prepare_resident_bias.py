"""A bias that batch elements share, and forward kernels keep in shared memory, from the host. Numba
is not imported here.
"""

import math

import numpy as np

from numba_flash.cuda.arguments import ResidentScales, UnitSizes
from numba_flash.cuda.work import grid

LOG2E = math.log2(math.e)
ALONE = ("bias",)  # the options that there may be
SCALES = 2.0**-20, 2.0**20  # what a bias may be divided by
# The fewest batch elements that share a bias for which it is kept: to read it takes a block as long
# as two or three of them. Not timed.
FEWEST = 8


def shared_alone(problem, inputs, results=None) -> bool:
    """True if there is a bias alone, which enough batch elements share, beside arrays of 16 bits;
    and if results, where there are any, have their dtype.
    """
    p = problem
    if tuple(p.options.used) != ALONE or p.band != "none" or p.batch[1] < FEWEST:
        return False
    if p.dtype not in ("float16", "bfloat16") or 0 in (*p.batch, p.hq, p.nq, p.nk):
        return False
    if results is not None and results.o.dtype.name != p.dtype:
        return False
    shape, strides = inputs.bias.shape, inputs.bias.strides
    shared = len(shape) < 4 or shape[-4] == 1 or strides[-4] == 0
    return shared and SCALES[0] < p.scale < SCALES[1]


def sizes_of(p, block_m: int) -> UnitSizes:
    """Of a problem in blocks of so many queries."""
    blocks = grid.blocks(p, p.nq, block_m)
    return UnitSizes(
        units=math.prod(p.batch) * p.hq * blocks,
        b1=p.batch[1],
        heads=p.hq,
        blocks=blocks,
        group=p.hq // p.hk,
        queries=p.nq,
        keys=p.nk,
    )


def scales_of(p) -> ResidentScales:
    """Those of a problem."""
    return ResidentScales(*map(np.float32, (p.scale, 1 / p.scale, p.scale * LOG2E)))
