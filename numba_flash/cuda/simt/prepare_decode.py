"""Few queries with many keys in the `simt` tier from the host: which kernels run with which grid.
Numba is not imported here.
"""

import math
from dataclasses import replace

import numpy as np

from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.arguments import build_extras, parameters_of
from numba_flash.cuda.passes import prepare_kv_splits
from numba_flash.cuda.runtime import launch
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.simt.decode_tiles import SIMULATOR_TILE, TILES, DecodeTile
from numba_flash.cuda.simt.lanes_tiles import lanes_tile
from numba_flash.cuda.work import grid

LOG2E = math.log2(math.e)
MANY_SIMULATED = 24  # keys


def serves(problem) -> bool:
    """True if a problem is one of reading K and V."""
    return grid.is_decode_without_tensor_cores(
        problem, MANY_SIMULATED if launch.simulated() else grid.MANY
    )


def decode_tile(problem) -> DecodeTile:
    """The tile that serves it."""
    p = problem
    group = p.hq // p.hk
    tiles = TILES["float64" if p.dtype == "float64" else "float32"]
    fit = (tile for tile in tiles if tile.rows >= p.nq * group)
    tile = SIMULATOR_TILE if launch.simulated() else next(fit, tiles[-1])
    return replace(tile, group=group)


def prepare(problem, inputs, results, gpu) -> Prepared:
    """``run(inputs, results, rng)`` on arrays like these layouts, without dropout."""
    p, of_lanes = problem, lanes_tile(problem, inputs, gpu.capability)
    tile = of_lanes or decode_tile(problem)
    scale_log2 = 1.0 if p.options.modifies else p.scale * LOG2E
    if of_lanes and p.dtype == "float32":
        scale_log2 = np.float32(scale_log2)
    kv_splits = grid.decode_kv_splits(p, tile, gpu.multiprocessors * tile.min_blocks)
    partial = prepare_kv_splits.layouts(p, kv_splits) if kv_splits > 1 else results
    combine = (
        prepare_kv_splits.combine_many(partial, results, gpu, kv_splits) if kv_splits > 1 else None
    )
    forward = Launch(
        "simt.decode_lanes.build" if of_lanes else "simt.decode.build",
        (
            *((p.dtype,) if of_lanes else (p.dtype, partial.o.dtype.name)),
            *(p.d, p.dv, partial.lse is not None, p.options.structure, tile),
        ),
        gpu,
        grid=grid.items(p, p.nq * tile.group, p.hk, tile.block_m) * kv_splits,
        threads=tile.threads,
        operands=(
            *((x, 5) for x in (inputs.q, inputs.k, inputs.v, partial.o)),
            (partial.lse, 4),
        ),
        extras=grid.extras_layouts(p, inputs),
        numbers=(
            *(scale_log2, p.low, p.high),
            *((kv_splits,) if of_lanes else (kv_splits, parameters_of(p, None))),
        ),
        shared_bytes=tile.layout.bytes if of_lanes else 0,
    )
    extras_of, scratch = build_extras(p.options), combine and prepare_kv_splits.scratch(partial)

    def run(inputs, results):
        into = scratch.beside(inputs.q) if combine else results
        forward(inputs.q, inputs.k, inputs.v, *into, extras=extras_of(inputs))
        if combine:
            combine(*into, *results)

    return Prepared(run, (forward, combine) if combine else (forward,))
