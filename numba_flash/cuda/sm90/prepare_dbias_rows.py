"""The gradient of a bias from the host where queries of all batch elements that are summed stay in
shared memory: which problems, and the launch.
"""

from typing import NamedTuple

import numpy as np

from numba_flash.cuda import grid, tensor_maps
from numba_flash.cuda.arguments import Extent
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_tile_lists import Extras, Tiles
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.sm90.arguments import LOG2E
from numba_flash.cuda.sm90.config import BiasGradientConfig
from numba_flash.cuda.sm90.dbias_tiles import DbiasRowsTile, dbias_rows_tile
from numba_flash.cuda.sm90.prepare_pairs import HALF, tiles_of_bias
from numba_flash.options import Options

WARP_ROWS = 16  # queries of a warp, whose part of the gradient it stores
BEGIN = 3  # steps that take as long as the begin of a run, when Q and dO come


class Runs(NamedTuple):
    """Tiles of a run, and how many runs there are."""

    across: int
    items: int


def runs_of(rows: int, tiles: int, elements: int, turns: int) -> Runs:
    """Of so many `rows` of `tiles`, each of so many steps: as many that the busiest of `turns` that
    take them in their order is done first.
    """

    def steps(pieces):
        return -(-rows * pieces // turns) * (-(-tiles // pieces) * elements + BEGIN)

    across = -(-tiles // min(range(1, tiles + 1), key=steps))
    return Runs(across, rows * -(-tiles // across))


class DbiasRows:
    """One launch; arguments as of `numba_flash.cuda.sm90.prepare_dbias.Dbias`."""

    def __init__(self, chosen: Chosen, inputs, rows):
        p, tile, x = chosen.p, chosen.tile, inputs
        dbias, gpu = chosen.call.results.dbias, chosen.call.gpu
        self._extras = Extras(p, gpu, x, Tiles(tile.block_m, tile.block_n))
        tiles = grid.Broadcast.of(p, dbias, tile.block_m, tile.block_n).tiles
        across = -(-p.nk // tile.block_n)
        runs = runs_of(tiles // across, across, tile.elements, gpu.multiprocessors)
        extent = Extent(*p.batch, p.hq, p.hk, p.nq, p.nk, p.low, p.high)
        config = BiasGradientConfig(
            dtype=p.dtype,
            d=p.d,
            dv=p.dv,
            banded=False,
            options=p.options.structure,
            tile=tile,
            out=dbias.dtype.name,
            summed=grid.summed_axes(p, dbias),
        )
        self._sum = Launch(
            chosen.builder,
            (config,),
            gpu,
            grid=min(runs.items, gpu.multiprocessors),
            threads=tile.threads,
            shared_bytes=tile.layout(p.d, p.dv).bytes,
            operands=((rows, 5),),
            extras=self._extras.layouts,
            numbers=(extent, *runs, np.float32(p.scale * LOG2E)),
            maps=(
                *((x.do, tile.block_m), (x.q, tile.block_m), (x.k, tile.block_n)),
                *((x.v, tile.block_n), (tiles_of_bias(p, x.bias), tile.block_m)),
                (dbias, WARP_ROWS),
            ),
        )
        self.launches = (self._sum,)

    def run(self, x, rows, dbias, rng) -> None:
        """Launch it."""
        maps = (x.do, x.q, x.k, x.v, x.bias, dbias)
        self._sum(*maps, rows, extras=self._extras.of(x))


def elements_of(problem, dbias) -> int:
    """Batch elements that are summed to one of the gradient."""
    gone = grid.summed_axes(problem, dbias)[:2]
    return int(np.prod([n for n, each in zip(problem.batch, gone, strict=True) if each]))


def tile_of(problem, dbias) -> DbiasRowsTile | None:
    """That of the kernel, if there is room for queries of as many batch elements."""
    return dbias_rows_tile(problem, elements_of(problem, dbias))


def serves(problem, inputs, dbias) -> bool:
    """True if it sums the gradient of layout `dbias`: heads, queries and keys have elements of
    their own, the copy engine brings and takes these, and nothing else acts on scores.
    """
    p = problem
    if p.options.structure != Options(bias=p.options.bias) or p.band != "none":
        return False
    if any(grid.summed_axes(p, dbias)[2:]) or dbias.dtype.name not in HALF:
        return False
    if tile_of(p, dbias) is None:
        return False
    return tiles_of_bias(p, inputs.bias) is not None and tensor_maps.why_not("", dbias) is None
