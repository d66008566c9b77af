"""The gradient of the bias in the `sm80` tier from the host: which kernels run with which grid."""

import math

from numba_flash import arrays
from numba_flash.arrays import Layout
from numba_flash.cuda import grid
from numba_flash.cuda.arguments import (
    OF_DBIAS,
    extras_class,
    in_vectors,
    parameters_of,
    vectors_of,
)
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_tile_lists import Extras, Tiles, choose
from numba_flash.cuda.sm80.dbias_tiles import dbias_tile
from numba_flash.cuda.sm80.tiles import hardware

KEYS_OF_RUN = 8  # neighbours among a lane's scores
SUM_THREADS = 128
MOST_SHARES, SHARE_COST = 32, 4  # of a walk; in steps of it


class Shares:
    """Where blocks put their sums of a gradient of the bias, in tiles of a `grid.Broadcast`: into
    the gradient, or shares of the walk into an array of their own, from which a launch adds them.

    Parameters
    ----------
    p, gpu
        What it is prepared for.
    dbias : Layout
        The gradient.
    this : Broadcast
        Its tiles.
    at_once : int
        Blocks that there is room for at a time.
    """

    def __init__(self, p, gpu, dbias, this, at_once):
        self.count = this.shares(at_once, MOST_SHARES, SHARE_COST)
        of_gradient = (1,) * (5 - dbias.ndim) + dbias.shape
        self._made = Layout.compact((self.count, *of_gradient), "float32")
        self.out = dbias if self.count == 1 else self._made
        self.launches = ()
        if self.count > 1:
            self._sum = Launch(
                "sum_shares.build",
                (p.dtype, dbias.dtype.name, SUM_THREADS),
                gpu,
                grid=-(-math.prod(of_gradient) // SUM_THREADS),
                threads=SUM_THREADS,
                operands=((self._made, 6), (dbias, 5)),
            )
            self.launches = (self._sum,)

    def allocate(self, dbias):
        """What blocks write to."""
        if self.count == 1:
            return dbias
        return arrays.compact("dbias's shares", dbias, self._made.shape, self._made.dtype)

    def add(self, out, dbias) -> None:
        """Into the gradient, when they are written."""
        if self.count > 1:
            self._sum(out, dbias)


class Dbias:
    """One launch, or two where the walk over what the bias broadcasts is split into shares. Of
    float32, heads that are flagged are left out (`numba_flash.cuda.split`).

    Parameters
    ----------
    problem, gpu
        What it is prepared for.
    shape : Shape
        Of the backward pass; its head dimensions are those of planes, if there are some.
    inputs : BackwardInputs
        Layouts.
    dbias, rows : Layout
        The result; the lse and delta, as `numba_flash.cuda.preprocess` writes them.
    planes : Split, optional
        Of float32: layouts of what is read in the place of q, k, v and do.
    """

    def __init__(self, problem, gpu, shape, inputs, dbias, rows, planes=None):
        x, there = inputs, hardware(gpu.capability)
        sums = any(grid.summed_axes(problem, dbias))
        p, tile = choose(problem, lambda p: dbias_tile(p, there, sums))
        this = grid.Broadcast.of(p, dbias, tile.block_m, tile.block_n)
        self._shares = Shares(p, gpu, dbias, this, gpu.multiprocessors * tile.min_blocks)
        out = self._shares.out
        shape = shape._replace(
            vectors=vectors_of(p, x, KEYS_OF_RUN), wide=in_vectors(p, out, KEYS_OF_RUN)
        )
        self._extras = Extras(p, gpu, x, Tiles(tile.block_m, tile.block_n, bits=True))
        read, more = x, ()
        if planes is not None:
            read, more = planes, ((planes.factors, 4), (planes.flags, 3))
        self._with_planes = extras_class(p.options, ("bits",), OF_DBIAS)
        self._numbers = lambda rng=None: (p.low, p.high, parameters_of(p, rng))
        self._sum = Launch(
            "sm80.dbias.build",
            (
                *(p.dtype, shape, p.band != "none", p.options.structure),
                *(out.dtype.name, this.summed, tile),
            ),
            gpu,
            grid=this.tiles * self._shares.count,
            threads=tile.threads,
            shared_bytes=tile.layout(*shape.columns).bytes,
            operands=((read.do, 5), (read.q, 5), (read.k, 5), (read.v, 5), (rows, 5), (out, 6)),
            extras=self._extras.layouts + more,
            numbers=self._numbers(),
        )
        self.launches = (*self._extras.launches, self._sum, *self._shares.launches)

    def run(self, x, rows, results, rng, planes=None) -> None:
        """Launch them, with the generator in the state `rng` if there is one; `planes` of this call
        if they were prepared for some.
        """
        out = self._shares.allocate(results.dbias)
        numbers = None if rng is None else self._numbers(rng)
        read, extras = x, self._extras.of(x)
        if planes is not None:
            read, extras = planes, self._with_planes(*extras, planes.factors, planes.flags)
        self._sum(read.do, read.q, read.k, read.v, rows, out, extras=extras, numbers=numbers)
        self._shares.add(out, results.dbias)
