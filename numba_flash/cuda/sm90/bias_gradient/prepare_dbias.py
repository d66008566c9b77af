"""The gradient of a bias in the `sm90` tier from the host: which kernels run with which grid. It is
made beside other gradients; or with them, of narrow heads, where batch elements share the bias: dQ
and dbias, then dK and dV, each by a kernel that keeps its part of the bias.
"""

import math
from typing import NamedTuple

import numpy as np

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.arguments.options import Options
from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.arguments import Extent, build_extras, in_vectors, parameters_of, vectors_of
from numba_flash.cuda.passes.prepare_dbias import Shares
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.runtime import tensor_maps
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.score.prepare_resident_bias import shared_alone, sizes_of
from numba_flash.cuda.score.swizzle import NARROW
from numba_flash.cuda.sm90.arguments import LOG2E, GradientScales
from numba_flash.cuda.sm90.bias_gradient.dbias_tiles import (
    QUERIES,
    DbiasTile,
    dbias_rows_tile,
    keys_tile,
    queries_tile,
)
from numba_flash.cuda.sm90.config import BackwardConfig, BiasGradientConfig
from numba_flash.cuda.sm90.prepare_pairs import HALF, tiles_of_bias
from numba_flash.cuda.work import grid
from numba_flash.cuda.work.prepare_tile_lists import Extras, TileShape

KEYS_OF_RUN = 2  # neighbours among a lane's scores
WARP_ROWS = 16  # queries of a warp, whose part of the gradient it stores
BEGIN = 3  # steps that take as long as the begin of a run, when Q and dO come


def _launch(chosen: Chosen, blocks: int, shared_bytes: int, config: dict, **others) -> Launch:
    """Of so many blocks of the kernel that sums the gradient."""
    p, tile = chosen.p, chosen.tile
    own = {"options": p.options.structure, "tile": tile, "stage": chosen.recipe.stage}
    config = BiasGradientConfig(p.dtype, p.d, p.dv, **own, **config)
    return Launch(
        chosen.builder,
        (config,),
        chosen.call.gpu,
        grid=blocks,
        threads=tile.threads,
        shared_bytes=shared_bytes,
        **others,
    )


def _config_of(p, shares: Shares, x, banded: bool) -> dict:
    """Of a kernel that reads the bias from memory, and stores shares of the gradient."""
    return {
        "banded": banded,
        "out": shares.out.dtype.name,
        "summed": shares.summed,
        "wide": in_vectors(p, shares.out, KEYS_OF_RUN),
        "vectors": vectors_of(p, x, KEYS_OF_RUN),
    }


# ---- beside other gradients


class Dbias:
    """One launch, or two where the walk over what the bias broadcasts is split into shares.

    Parameters
    ----------
    chosen : Chosen
        What it is prepared for.
    inputs : BackwardInputs
        Layouts, with heads first.
    rows : Layout
        The lse in base 2 and delta, as `numba_flash.cuda.passes.preprocess` writes them.
    """

    def __init__(self, chosen: Chosen, inputs, rows):
        p, tile, x, gpu = chosen.p, chosen.tile, inputs, chosen.call.gpu
        self._shares = Shares(p, gpu, chosen.call.results.dbias, tile, gpu.multiprocessors)
        items, extent = self._shares.items, _extent(p)
        self._extras = Extras(p, gpu, x, TileShape(tile.block_m, tile.block_n, bits=True))
        self._numbers = lambda rng=None: (extent, items, parameters_of(p, rng))
        self._sum = _launch(
            chosen,
            min(items, gpu.multiprocessors),
            tile.layout(p.d, p.dv).bytes,
            _config_of(p, self._shares, x, p.band != "none"),
            operands=((rows, 5), (self._shares.out, 6)),
            extras=self._extras.layouts,
            numbers=self._numbers(),
            maps=((x.do, tile.block_m), (x.q, tile.block_m), (x.k, tile.part), (x.v, tile.part)),
        )
        self.launches = (*self._extras.launches, self._sum, *self._shares.launches)

    def run(self, x, rows, dbias, rng) -> None:
        """Launch them, with the generator in the state `rng` if there is one."""
        numbers, extras = None if rng is None else self._numbers(rng), self._extras.of(x)

        def sum_to(out):
            self._sum(x.do, x.q, x.k, x.v, rows, out, extras=extras, numbers=numbers)

        self._shares.run(dbias, sum_to)


def _extent(p) -> Extent:
    return Extent(*p.batch, p.hq, p.hk, p.nq, p.nk, p.low, p.high)


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
    """One launch, where queries of all batch elements that are summed stay in shared memory;
    arguments as of `Dbias`.
    """

    def __init__(self, chosen: Chosen, inputs, rows):
        p, tile, x = chosen.p, chosen.tile, inputs
        dbias, gpu = chosen.call.results.dbias, chosen.call.gpu
        self._extras = Extras(p, gpu, x, TileShape(tile.block_m, tile.block_n))
        tiles = grid.Broadcast.of(p, dbias, tile.block_m, tile.block_n).tiles
        across = -(-p.nk // tile.block_n)
        runs = runs_of(tiles // across, across, tile.elements, gpu.multiprocessors)
        summed = grid.summed_axes(p, dbias)
        self._sum = _launch(
            chosen,
            min(runs.items, gpu.multiprocessors),
            tile.layout(p.d, p.dv).bytes,
            {"banded": False, "out": dbias.dtype.name, "summed": summed},
            operands=((rows, 5),),
            extras=self._extras.layouts,
            numbers=(_extent(p), *runs, np.float32(p.scale * LOG2E)),
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


def rows_tile_of(problem, dbias) -> DbiasTile | None:
    """That of the kernel, if there is room for queries of as many batch elements."""
    return dbias_rows_tile(problem, elements_of(problem, dbias))


def rows_stay(problem, inputs, dbias) -> bool:
    """True if `DbiasRows` sums the gradient of layout `dbias`: heads, queries and keys have
    elements of their own, the copy engine brings and takes these, and nothing else acts on scores.
    """
    p = problem
    if p.options.structure != Options(bias=p.options.bias) or p.band != "none":
        return False
    if any(grid.summed_axes(p, dbias)[2:]) or dbias.dtype.name not in HALF:
        return False
    if rows_tile_of(p, dbias) is None:
        return False
    return tiles_of_bias(p, inputs.bias) is not None and tensor_maps.why_not("", dbias) is None


# ---- with other gradients


class Known(NamedTuple):
    """What the first kernel hands to the second: of each row of queries, as
    `numba_flash.cuda.sm90.resident_bias.load_resident` says.
    """

    rows: Layout


def has_resident_bias(problem, inputs, dbias) -> bool:
    """True if there is a bias of 16 bits that can be kept, whose gradient is wanted, and nothing
    else; of as many heads of keys as of queries.
    """
    p = problem
    if not dbias or p.hq != p.hk or p.options.bias not in ("float16", "bfloat16"):
        return False
    if max(p.d, p.dv) > NARROW or not shared_alone(p, inputs):
        return False
    if tuple(inputs.bias.shape[-2:]) != (p.nq, p.nk):  # a sum over queries or keys is another's
        return False
    return queries_tile(p) is not None and keys_tile(p) is not None


def prepare_resident(chosen: Chosen) -> Prepared:
    """``run(inputs, results, rng)`` on arrays like the call's layouts."""
    p, results, gpu = chosen.p, chosen.call.results, chosen.call.gpu
    blocks = grid.blocks(p, p.nq, QUERIES)
    rows = Layout.compact((*p.batch, p.hq, blocks * QUERIES, 2), "float32")
    scratch, extras_of = Scratch(Known(rows), Known._fields), build_extras(p.options)
    shares = Shares(p, gpu, results.dbias, chosen.tile, gpu.multiprocessors)
    dq_dbias, dk_dv = _dq_dbias(chosen, shares, rows), _dk_dv(chosen, rows)

    def run(inputs, results, rng=None):
        x, extras = inputs, extras_of(inputs)
        (rows,) = scratch.beside(x.q)

        def sum_to(out):
            read = x.do, x.q, x.k, x.v, x.o
            dq_dbias(*read, results.dq, x.lse, x.dlse, rows, out, extras=extras)

        shares.run(results.dbias, sum_to)
        dk_dv(x.do, x.q, x.k, x.v, results.dk, results.dv, rows, extras=extras)

    return Prepared(run, (dq_dbias, *shares.launches, dk_dv))


def _scales(p) -> GradientScales:
    return GradientScales(np.float32(p.scale * LOG2E), np.float32(p.scale))


def _dq_dbias(chosen: Chosen, shares: Shares, rows: Layout) -> Launch:
    """The kernel that makes dQ, dbias or shares of it, and what there is to know of rows."""
    p, tile, (_, x, results, _, _) = chosen.p, chosen.tile, chosen.call
    box = lambda x, rows: (x, rows, NARROW)
    return _launch(
        chosen,
        shares.items,
        tile.layout().bytes,
        _config_of(p, shares, x, False) | {"dlse": x.dlse is not None},
        operands=(
            *((results.dq.words(), 5), (x.lse, 4), (x.dlse, 4)),
            *((rows, 5), (shares.out, 6)),
        ),
        extras=grid.extras_layouts(p, x),
        numbers=(Extent(*p.batch, p.hq, p.hk, p.nq, p.nk, -p.nq, p.nk), _scales(p)),
        maps=(
            *(box(each, QUERIES) for each in (x.do, x.q)),
            *(box(each, tile.keys) for each in (x.k, x.v)),
            box(x.o, QUERIES),
        ),
    )


def _dk_dv(chosen: Chosen, rows: Layout) -> Launch:
    """The kernel that makes dK and dV."""
    p, tile, (_, x, results, gpu, _) = chosen.p, keys_tile(chosen.p), chosen.call
    blocks = -(-p.nk // tile.block_m)
    sizes = sizes_of(p, tile.block_m)._replace(
        units=math.prod(p.batch) * p.hk * blocks, blocks=blocks, queries=p.nk, keys=p.nq
    )
    config = BackwardConfig(
        dtype=p.dtype,
        d=p.d,
        dv=p.dv,
        banded=False,
        to_map=False,
        ordered=False,
        options=p.options.structure,
        tile=tile,
        vectors=vectors_of(p, x, 1),
        stage=chosen.recipe.stage,
    )
    return Launch(
        f"{chosen.recipe.loops[1]}.build",
        (config,),
        gpu,
        grid=min(sizes.units, gpu.multiprocessors),
        threads=tile.threads,
        shared_bytes=tile.layout().bytes,
        operands=((results.dk.words(), 5), (results.dv.words(), 5), (rows, 5)),
        extras=grid.extras_layouts(p, x),
        numbers=(sizes, _scales(p)),
        maps=(
            *((each, tile.queries, NARROW) for each in (x.do, x.q)),
            *((each, tile.block_m, NARROW) for each in (x.k, x.v)),
        ),
    )
