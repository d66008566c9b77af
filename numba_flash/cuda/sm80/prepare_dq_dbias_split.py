"""dQ and the gradient of the bias at once, beside dK and dV, of float32 in the `sm80` tier from the
host, if a bias is all that changes scores, and all keys of a head fit into shared memory.
"""

import math
from typing import NamedTuple

import numpy as np

from numba_flash.arrays import Layout, Scratch
from numba_flash.cuda import grid
from numba_flash.cuda.arguments import (
    OF_DBIAS,
    SPLIT,
    build_extras,
    chunked,
    extras_class,
    in_vectors,
    vectors_of,
)
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_dbias import Shares
from numba_flash.cuda.prepare_split import Splitter
from numba_flash.cuda.sm80.head_tiles import GradientTiles, gradient_tiles
from numba_flash.cuda.sm80.prepare_dbias import KEYS_OF_RUN
from numba_flash.cuda.sm80.prepare_dq_dbias import MOST_STRIDE
from numba_flash.cuda.sm80.tiles import padded
from numba_flash.problem import Prepared

ROW_THREADS = 256  # of the kernel before the main ones


class Made(NamedTuple):
    """What the first kernel hands to the others: float32 (2, b0, b1, heads, rows), the lse and
    delta.
    """

    rows: Layout


def tiles_of(problem, shape, inputs, results, hardware) -> GradientTiles | None:
    """The tiles of a problem that has some, and arrays that are read and written by whole chunks,
    else None.
    """
    x, dbias = inputs, results.dbias
    if dbias is None or x.dlse is not None or not shape.wide:
        return None
    if not vectors_of(problem, x, KEYS_OF_RUN).bias or dbias.dtype.name != "float32":
        return None
    written = results.dq, results.dk, results.dv, x.bias
    if not all(0 <= stride < MOST_STRIDE for each in written for stride in each.strides):
        return None
    *shared, rows, columns = grid.summed_axes(problem, dbias)
    if rows or columns:
        return None
    sizes = (*problem.batch, problem.hq)
    steps = math.prod(n for n, gone in zip(sizes, shared, strict=True) if gone)
    return gradient_tiles(problem, hardware, steps)


def prepare(problem, gpu, shape, inputs, results, tiles: GradientTiles) -> Prepared:
    """As `numba_flash.cuda.sm80.prepare_backward.prepare` says, of `results` with heads first."""
    p, x, y = problem, inputs, results
    splitter = Splitter(p, gpu, inputs, (padded(p.d), padded(p.dv)))
    planes, extras = splitter.made, grid.extras_layouts(p, x)
    block_m = tiles.dq_dbias.block_m
    blocks = grid.blocks(p, p.nq, block_m)
    made = Made(Layout.compact((2, *p.batch, p.hq, blocks * block_m), "float32"))
    shares = Shares(p, gpu, y.dbias, tiles.dq_dbias, gpu.multiprocessors)
    shape = shape._replace(wide=in_vectors(p, shares.out, KEYS_OF_RUN))
    preprocess = _preprocess(p, gpu, x, made, splitter, block_m)
    of_main = dict(
        extras=(*extras, (planes.factors, 4), (planes.flags, 3)),
        numbers=(np.float32(p.scale),),
    )
    read = ((planes.do, 5), (planes.q, 5), (planes.k, 5), (planes.v, 5))
    dq_dbias = Launch(
        "sm80.dq_dbias_split.build",
        (shape, p.options.structure, shares.summed, tiles.dq_dbias),
        gpu,
        grid=shares.items,
        threads=tiles.dq_dbias.threads,
        shared_bytes=tiles.dq_dbias.layout(shape).bytes,
        operands=(*read, (y.dq, 5), (made.rows, 5), (shares.out, 6)),
        **of_main,
    )
    dk_dv = Launch(
        "sm80.dk_dv_split.build",
        (shape, p.options.structure, tiles.dk_dv),
        gpu,
        grid=math.prod(p.batch) * p.hk,
        threads=tiles.dk_dv.threads,
        shared_bytes=tiles.dk_dv.layout(shape).bytes,
        operands=(*read, (y.dk, 5), (y.dv, 5), (made.rows, 5)),
        **of_main,
    )
    scratch, extras_of = Scratch(made, ("rows",)), build_extras(p.options)
    with_split = extras_class(p.options, more=SPLIT)
    with_flags = extras_class(p.options, more=OF_DBIAS)

    def run(x, y, rng=None):
        made, (rows,), extras = splitter.of(x), scratch.beside(x.q), extras_of(x)
        preprocess(
            x.do, x.o, x.lse, None, rows, None, None, extras=with_split(*extras, *made.extras)
        )
        extras, planes = with_flags(*extras, made.factors, made.flags), (made.do, made.q, made.k)
        dk_dv(*planes, made.v, y.dk, y.dv, rows, extras=extras)
        shares.run(y.dbias, lambda out: dq_dbias(*planes, made.v, y.dq, rows, out, extras=extras))
        return made.flags

    launches = *splitter.launches, preprocess, dk_dv, dq_dbias, *shares.launches
    return Prepared(run, launches, planes.flags)


def _preprocess(p, gpu, x, made: Made, splitter, block_m: int) -> Launch:
    """The lse and delta, of planes."""
    y, rows = splitter.made, made.rows
    return Launch(
        "preprocess.build",
        (
            *(p.dtype, p.dv, False, block_m, 0, False, chunked(x.do, x.o), False),
            *(p.options.arrays, ROW_THREADS),
        ),
        gpu,
        grid=math.prod(rows.shape[1:]) // block_m,
        threads=ROW_THREADS,
        operands=((x.do, 5), (x.o, 5), (x.lse, 4), (None, 4), (rows, 5), (None, 5), (None, 1)),
        extras=(
            *grid.extras_layouts(p, x),
            *((y.factors, 4), (y.shifts, 4), (y.centres, 5)),
        ),
        numbers=(p.nk,),
    )
