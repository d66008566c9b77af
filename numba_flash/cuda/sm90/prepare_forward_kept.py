"""The forward pass of the `sm90` tier with a bias that batch elements share, kept in shared memory,
from the host.
"""

import math

import numpy as np

from numba_flash.cuda import grid, launch, tensor_maps
from numba_flash.cuda.arguments import build_extras, vectors_of
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.sm90.arguments import LOG2E
from numba_flash.cuda.sm90.kept_tiles import FEWEST, MOST, KeptTile, kept_tile
from numba_flash.cuda.sm90.units import KeptScales, UnitSizes
from numba_flash.cuda.swizzle import NARROW
from numba_flash.problem import Prepared

KEYS_OF_RUN = 2  # neighbours among a lane's scores
ALONE = ("bias",)  # the options that there may be
SCALES = 2.0**-20, 2.0**20  # what a bias may be divided by


def serves(problem, inputs, results=None) -> bool:
    """True if there is a bias alone, which so many batch elements share, and it can be kept; and if
    results, where there are any, have the dtype of the others.
    """
    p = problem
    if tuple(p.options.used) != ALONE or p.band != "none" or max(p.d, p.dv) > MOST:
        return False
    if p.dtype not in ("float16", "bfloat16") or 0 in (*p.batch, p.hq, p.nq, p.nk):
        return False
    if results is not None and results.o.dtype.name != p.dtype:
        return False
    if p.batch[1] < FEWEST or not SCALES[0] < p.scale < SCALES[1]:
        return False
    shape, strides = inputs.bias.shape, inputs.bias.strides
    shared = len(shape) < 4 or shape[-4] == 1 or strides[-4] == 0
    return shared and kept_tile(p) is not None


def prepare(problem, inputs, results, gpu=None) -> Prepared:
    """``run(inputs, results)`` on arrays like these layouts."""
    p, gpu = problem, gpu or launch.gpu(inputs.q.device)
    if tensor_maps.why_not("o", results.o) is not None:  # only an array of the user's is like that
        return tensor_maps.through_compact(
            lambda results: prepare(problem, inputs, results, gpu), results
        )
    forward, extras_of = _forward(p, inputs, results, gpu, kept_tile(p)), build_extras(p.options)

    def run(inputs, results):
        forward(inputs.q, inputs.k, inputs.v, *results, extras=extras_of(inputs))

    return Prepared(run, (forward,))


def _forward(p, inputs, results, gpu, tile: KeptTile) -> Launch:
    """The kernel."""
    blocks = grid.blocks(p, p.nq, tile.block_m)
    units = math.prod(p.batch) * p.hq * blocks
    sizes = UnitSizes(
        units=units,
        b1=p.batch[1],
        heads=p.hq,
        blocks=blocks,
        group=p.hq // p.hk,
        queries=p.nq,
        keys=p.nk,
    )
    scales = KeptScales(*map(np.float32, (p.scale, 1 / p.scale, p.scale * LOG2E)))
    vectors, write_lse = vectors_of(p, inputs, KEYS_OF_RUN), results.lse is not None
    box = lambda x, rows: (x, rows, NARROW)
    return Launch(
        "sm90.forward_kept.build",
        (p.dtype, p.d, p.dv, write_lse, vectors, p.options.structure, tile),
        gpu,
        grid=min(units, gpu.multiprocessors),
        threads=tile.threads,
        shared_bytes=tile.layout().bytes,
        operands=((results.o.words(), 5), (results.lse, 4)),
        extras=grid.extras_layouts(p, inputs),
        numbers=(sizes, scales),
        maps=(
            box(inputs.q, tile.block_m), box(inputs.k, tile.block_n), box(inputs.v, tile.block_n),
        ),
    )  # fmt: skip
