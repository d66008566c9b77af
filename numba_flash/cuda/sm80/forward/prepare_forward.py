"""The forward pass of the `sm80` tier from the host: kernels and grids."""

import math
from typing import Any, NamedTuple

import numpy as np

from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.arguments import (
    FP16X2,
    chunked,
    extras_class,
    parameters_of,
    planes_of,
    vectors_of,
)
from numba_flash.cuda.passes import prepare_kv_splits
from numba_flash.cuda.passes.prepare_planes import PlanesWriter
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.score.prepare_relative import Relative
from numba_flash.cuda.sm80.arguments import Shape
from numba_flash.cuda.sm80.config import ForwardConfig
from numba_flash.cuda.sm80.tiles import Tile, hardware, padded
from numba_flash.cuda.work import grid
from numba_flash.cuda.work.prepare_tile_lists import Extras, TileShape

LOG2E = math.log2(math.e)
KEYS_OF_RUN = 8  # neighbours among a lane's scores


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results, rng)`` on arrays like the call's layouts; `rng` is left out if there
    is no dropout.
    """
    p, tile, (_, inputs, results, gpu, _) = chosen.p, chosen.tile, chosen.call
    kv_splits = grid.kv_splits(p, tile.block_m, tile.block_n, gpu.multiprocessors)
    operands = Operands(p, gpu, inputs, tile)
    if kv_splits > 1 and p.dtype != "float64":
        return _prepare_kv_splits(chosen, operands, kv_splits)
    forward, numbers = _forward(chosen, operands, results, 1)

    def run(inputs, results, rng=None):
        x = operands.of(inputs)
        (o,) = grid.heads_first(p, results.o)
        given = None if rng is None else numbers(rng)
        forward(x.q, x.k, x.v, o, results.lse, extras=x.extras, numbers=given)
        return x.flags

    return Prepared(run, (*operands.launches, forward), operands.layouts.flags)


class Read(NamedTuple):
    """What the attention kernel reads: arrays with heads first, or their layouts.

    Attributes
    ----------
    flags : array or None
        Heads that are left to another tier are not 0.
    """

    q: Any
    k: Any
    v: Any
    extras: tuple
    flags: Any


class Operands:
    """The arrays of a call as the attention kernel reads them: float32 in planes of float16, and
    lists of the mask's tiles among the `extras`.

    Attributes
    ----------
    layouts : Read
        Of what is read.
    launches : tuple of Launch
        What makes planes and lists.
    vectors : Vectors
        Of bias and mask.
    """

    def __init__(self, p, gpu, inputs, tile: Tile):
        self._p, self._planes_writer = p, None
        self.vectors = vectors_of(p, inputs, KEYS_OF_RUN)
        listed = TileShape(tile.block_m, tile.block_n)
        if p.options.relative:
            extras = Relative(p, gpu, inputs, tile.block_m, tile.block_n)
        else:
            extras = Extras(p, gpu, inputs, listed)
        self._extras = extras
        self.launches = extras.launches
        if p.dtype != "float32":
            x = grid.heads_first(p, inputs.q, inputs.k, inputs.v)
            self.layouts = Read(*x, extras.layouts, None)
            return
        self._planes_writer = planes_writer = PlanesWriter(
            p, gpu, inputs, (padded(p.d), padded(p.dv))
        )
        self.launches += planes_writer.launches
        made = planes_writer.made
        more = ((made.factors, 4), (made.shifts, 4), (made.centres, 5))
        self.layouts = Read(made.q, made.k, made.v, (*extras.layouts, *more), made.flags)
        self._class = extras_class(p.options, ("tiles",), FP16X2)

    def of(self, inputs) -> Read:
        """Those of a call."""
        extras = self._extras.of(inputs)
        if self._planes_writer is None:
            return Read(*grid.heads_first(self._p, inputs.q, inputs.k, inputs.v), extras, None)
        made = self._planes_writer.of(inputs)
        return Read(made.q, made.k, made.v, self._class(*extras, *made.extras), made.flags)


def shared_bytes(p, tile: Tile, columns) -> int:
    """Of rows of so many columns, with numbers for each distance, if there are any."""
    more = tile.stages * tile.relative_bytes if p.options.relative else 0
    return tile.shared_bytes(*columns) + more


def _prepare_kv_splits(chosen: Chosen, operands: Operands, kv_splits: int) -> Prepared:
    """The same by way of float32 results over parts of the keys, which another kernel combines."""
    partial = prepare_kv_splits.layouts(chosen.p, kv_splits)
    forward, numbers = _forward(chosen, operands, partial, kv_splits)
    combine = prepare_kv_splits.combine(partial, chosen.call.results, chosen.call.gpu, kv_splits)
    scratch = prepare_kv_splits.scratch(partial)

    def run(inputs, results, rng=None):
        o_splits, lse_splits = scratch.beside(inputs.q)
        given = None if rng is None else numbers(rng)
        x = operands.of(inputs)
        forward(x.q, x.k, x.v, o_splits, lse_splits, extras=x.extras, numbers=given)
        combine(o_splits, lse_splits, results.o, results.lse)
        return x.flags

    return Prepared(run, (*operands.launches, forward, combine), operands.layouts.flags)


def _forward(chosen: Chosen, operands: Operands, results, kv_splits: int):
    """The attention kernel, on results of the problem or on float32 parts of them; and its numbers
    as a function of the generator's state.
    """
    p, tile, gpu = chosen.p, chosen.tile, chosen.call.gpu
    (o,), x = grid.heads_first(p, results.o), operands.layouts
    there, double = hardware(gpu.capability), p.dtype == "float64"
    shape = Shape(
        head_dim=p.d,
        head_dim_v=p.dv,
        turing=there.turing,
        asynchronous=not there.turing and chunked(x.q, x.k, x.v),
        wide=chunked(o),
        planes=planes_of(p),
        vectors=operands.vectors,
        double=double,
    )
    number = np.float64 if double else np.float32
    numbers = lambda rng=None: (
        number(LOG2E if p.options.changes else p.scale * LOG2E),
        p.low,
        p.high,
        kv_splits,
        parameters_of(p, rng),
    )
    config = ForwardConfig(
        dtype=p.dtype,
        shape=shape,
        write_lse=results.lse is not None,
        band=p.band,
        kv_splits=kv_splits > 1 or o.dtype.name != p.dtype,  # float32, as those of parts
        options=p.options.structure,
        tile=tile,
    )
    forward = Launch(
        chosen.builder,
        (config,),
        gpu,
        grid=grid.items(p, p.nq, p.hq, tile.block_m) * kv_splits,
        threads=tile.threads,
        shared_bytes=shared_bytes(p, tile, shape.columns),
        operands=((x.q, 5), (x.k, 5), (x.v, 5), (o, 5), (results.lse, 4)),
        extras=x.extras,
        numbers=numbers(),
    )
    return forward, numbers
