"""dQ and the gradient of the bias at once, beside dK and dV, in the `sm80` tier from the host, if a
bias is all that changes scores: which kernels run with which grid.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.arguments import build_extras, chunked, in_vectors, vectors_of
from numba_flash.cuda.passes.prepare_dbias import Shares
from numba_flash.cuda.recipe import Call, Chosen
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.sm80.backward.prepare_backward import shape_of
from numba_flash.cuda.sm80.bias_gradient.dbias_tiles import KEYS_TILE, DqDbiasTile, dq_dbias_tile
from numba_flash.cuda.sm80.bias_gradient.prepare_dbias import KEYS_OF_RUN
from numba_flash.cuda.sm80.config import BackwardConfig, BiasGradientConfig
from numba_flash.cuda.sm80.tiles import hardware
from numba_flash.cuda.work import grid

LOG2E = math.log2(math.e)
MOST_STRIDE = 2**32  # bytes


def tile_of(call: Call) -> DqDbiasTile | None:
    """The tile of a problem that has one, and arrays that are read and written by whole chunks,
    else None. The problem is the one that is given: with lists in the place of its mask it would
    seem to have none, and these kernels know no lists.
    """
    problem, x, y = call.problem, call.inputs, call.results
    if y.dbias is None or not vectors_of(problem, x, KEYS_OF_RUN).bias:
        return None
    optional = () if x.dlse is None else (x.dlse,)
    read_and_written = (x.do, x.o, x.q, x.k, x.v, x.lse, *optional, x.bias, y.dq)
    if not chunked(x.do, x.o, x.q, x.k, x.v, y.dq, y.dk, y.dv) or not all(
        0 <= stride < MOST_STRIDE for each in read_and_written for stride in each.strides
    ):
        return None
    *shared, rows, columns = grid.summed_axes(problem, y.dbias)
    if rows or columns:
        return None
    sizes = (*problem.batch, problem.hq)
    steps = math.prod(n for n, gone in zip(sizes, shared, strict=True) if gone)
    return dq_dbias_tile(problem, hardware(call.gpu.capability), steps)


def prepare(chosen: Chosen) -> Prepared:
    """As `numba_flash.cuda.sm80.backward.prepare_backward.prepare` says."""
    shape = shape_of(chosen, KEYS_OF_RUN)
    dq_dbias = DqDbias(chosen, shape)
    dk_dv = DkDv(chosen, shape, dq_dbias.beside)

    def run(inputs, results, rng=None):
        dk_dv.run(inputs, results, dq_dbias.run(inputs, results))

    return Prepared(run, (*dq_dbias.launches, dk_dv.launch))


class Beside(NamedTuple):
    """What the kernel hands to that of dK and dV: arrays, or their layouts.

    Attributes
    ----------
    rows : float32 (b0, b1, heads, rows, 2)
        As `numba_flash.cuda.sm80.begin_rows` says.
    hides_some : int32
        For each tile of dbias whether a bias in it is -inf.
    """

    rows: Any
    hides_some: Any


class DqDbias:
    """One launch, or two where the walk over what the bias broadcasts is split into shares.

    Parameters
    ----------
    chosen : Chosen
        What it is prepared for.
    shape : Shape
        Of the backward pass.
    """

    def __init__(self, chosen: Chosen, shape):
        p, tile, (_, x, results, gpu, _) = chosen.p, chosen.tile, chosen.call
        dbias = results.dbias
        self._shares = Shares(p, gpu, dbias, tile, gpu.multiprocessors * tile.min_blocks)
        out = self._shares.out
        shape = shape._replace(wide=in_vectors(p, out, KEYS_OF_RUN))
        self._extras_of = build_extras(p.options)
        rows = tile.block_m * grid.blocks(p, p.nq, tile.block_m)
        self.beside = Beside(
            rows=Layout.compact((*p.batch, p.hq, rows, 2), "float32"),
            hides_some=Layout.compact((self._shares.items,), "int32"),
        )
        self._scratch = Scratch(self.beside, ("rows", "tiles of the bias"))
        config = BiasGradientConfig(
            dtype=p.dtype,
            shape=shape,
            options=p.options.structure,
            tile=tile,
            out=out.dtype.name,
            summed=self._shares.summed,
            dlse=x.dlse is not None,
        )
        self._main = Launch(
            chosen.builder,
            (config,),
            gpu,
            grid=self._shares.items,
            threads=tile.threads,
            shared_bytes=tile.layout(*shape.columns).bytes,
            operands=(
                *((x.do, 5), (x.o, 5), (x.q, 5), (x.k, 5), (x.v, 5), (results.dq, 5)),
                *((x.lse, 4), (x.dlse, 4), (self.beside.rows, 5)),
                *((out, 6), (self.beside.hides_some, 1)),
            ),
            extras=grid.extras_layouts(p, x),
            numbers=(np.float32(p.scale * LOG2E), np.float32(p.scale)),
        )
        self.launches = (self._main, *self._shares.launches)

    def run(self, x, results) -> Beside:
        """Launch them."""
        beside, extras = self._scratch.beside(x.q), self._extras_of(x)
        rows, hides_some = beside

        def sum_to(out):
            operands = x.do, x.o, x.q, x.k, x.v, results.dq, x.lse, x.dlse, rows, out, hides_some
            self._main(*operands, extras=extras)

        self._shares.run(results.dbias, sum_to)
        return beside


class DkDv:
    """One launch, after those of `DqDbias`; `beside` has the layouts of what these return."""

    def __init__(self, chosen: Chosen, shape, beside):
        p, tile, (_, x, y, gpu, _) = chosen.p, KEYS_TILE, chosen.call
        self._extras_of = build_extras(p.options)
        self.launch = Launch(
            f"{chosen.recipe.loops[1]}.build",
            (BackwardConfig(p.dtype, shape, p.options.structure, tile),),
            gpu,
            grid=grid.items(p, p.nk, p.hk, tile.block_n),
            threads=tile.threads,
            shared_bytes=tile.layout(*shape.columns).bytes,
            operands=(
                *((x.do, 5), (x.q, 5), (x.k, 5), (x.v, 5), (y.dk, 5), (y.dv, 5)),
                *((beside.rows, 5), (beside.hides_some, 1)),
            ),
            extras=grid.extras_layouts(p, x),
            numbers=(np.float32(p.scale * LOG2E), np.float32(p.scale)),
        )

    def run(self, x, results, beside) -> None:
        """Launch it."""
        operands = x.do, x.q, x.k, x.v, results.dk, results.dv, *beside
        self.launch(*operands, extras=self._extras_of(x))
