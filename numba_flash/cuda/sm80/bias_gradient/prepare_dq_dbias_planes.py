"""dQ and the gradient of the bias at once, beside dK and dV, of float32 in the `sm80` tier from the
host, if a bias is all that changes scores, and all keys of a head fit into shared memory.
"""

import math
from typing import NamedTuple

import numpy as np

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.arguments import (
    OF_DBIAS,
    build_extras,
    chunked,
    extras_class,
    in_vectors,
    vectors_of,
)
from numba_flash.cuda.passes.prepare_dbias import Shares
from numba_flash.cuda.recipe import Call, Chosen
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.sm80.backward.prepare_backward import shape_of
from numba_flash.cuda.sm80.bias_gradient.prepare_dbias import KEYS_OF_RUN
from numba_flash.cuda.sm80.bias_gradient.prepare_dq_dbias import MOST_STRIDE
from numba_flash.cuda.sm80.config import BackwardConfig, BiasGradientConfig
from numba_flash.cuda.sm80.short_heads.short_head_tiles import (
    FEWEST_ROWS,
    KINDS,
    GradientTiles,
    gradient_tiles,
    many_heads,
)
from numba_flash.cuda.sm80.tiles import hardware, padded
from numba_flash.cuda.work import grid


class Made(NamedTuple):
    """What the first kernel hands to the others.

    Attributes
    ----------
    do, q, k, v : uint32 (b0, b1, heads, n, columns)
        Planes.
    rows : float32 (3, b0, b1, heads, rows)
        The lse, delta, and powers of two.
    factors, flags
        As in `numba_flash.cuda.passes.write_planes`.
    """

    do: Layout
    q: Layout
    k: Layout
    v: Layout
    rows: Layout
    factors: Layout
    flags: Layout


NAMES = ("planes of do", "planes of q", "planes of k", "planes of v", "rows", "factors", "flags")


def tiles_of(call: Call) -> GradientTiles | None:
    """The tiles of a problem that has some, and arrays that are read and written by whole chunks,
    else None. Its forward pass is that of short heads, so that scores are the same bits.
    """
    problem, x, y, gpu = call.problem, call.inputs, call.results, call.gpu
    dbias = y.dbias
    if dbias is None or x.dlse is not None or not chunked(y.dq, y.dk, y.dv):
        return None
    if not many_heads(problem, gpu.multiprocessors) or problem.nq < FEWEST_ROWS:
        return None
    if not vectors_of(problem, x, KEYS_OF_RUN).bias or dbias.dtype.name != "float32":
        return None
    read = x.do, x.o, x.q, x.k, x.v
    touched = *read, y.dq, y.dk, y.dv, x.bias
    if not all(0 <= stride < MOST_STRIDE for each in touched for stride in each.strides):
        return None
    if not chunked(*read):
        return None
    *shared, rows, columns = grid.summed_axes(problem, dbias)
    if rows or columns:
        return None
    sizes = (*problem.batch, problem.hq)
    steps = math.prod(n for n, gone in zip(sizes, shared, strict=True) if gone)
    return gradient_tiles(problem, hardware(gpu.capability), steps)


def prepare(chosen: Chosen) -> Prepared:
    """As `numba_flash.cuda.sm80.backward.prepare_backward.prepare` says."""
    p, tiles, (_, x, y, gpu, _) = chosen.p, chosen.tile, chosen.call
    extras = grid.extras_layouts(p, x)
    block_m = tiles.dq_dbias.block_m
    made = _made(p, grid.blocks(p, p.nq, block_m) * block_m)
    shares = Shares(p, gpu, y.dbias, tiles.dq_dbias, gpu.multiprocessors)
    shape = shape_of(chosen, KEYS_OF_RUN)
    shape = shape._replace(wide=in_vectors(p, shares.out, KEYS_OF_RUN))
    write_planes = _write_planes(p, gpu, shape, x, made, tiles.write_planes)
    of_main = dict(
        extras=(*extras, (made.factors, 4), (made.flags, 3)),
        numbers=(np.float32(p.scale),),
    )
    read = ((made.do, 5), (made.q, 5), (made.k, 5), (made.v, 5))
    config = BiasGradientConfig(
        dtype=p.dtype,
        shape=shape,
        options=p.options.structure,
        tile=tiles.dq_dbias,
        out="float32",
        summed=shares.summed,
    )
    dq_dbias = Launch(
        chosen.builder,
        (config,),
        gpu,
        grid=shares.items,
        threads=tiles.dq_dbias.threads,
        shared_bytes=tiles.dq_dbias.layout(shape).bytes,
        operands=(*read, (y.dq, 5), (made.rows, 5), (shares.out, 6)),
        **of_main,
    )
    dk_dv = Launch(
        f"{chosen.recipe.loops[1]}.build",
        (BackwardConfig(p.dtype, shape, p.options.structure, tiles.dk_dv),),
        gpu,
        grid=math.prod(p.batch) * p.hk,
        threads=tiles.dk_dv.threads,
        shared_bytes=tiles.dk_dv.layout(shape).bytes,
        operands=(*read, (y.dk, 5), (y.dv, 5), (made.rows, 5)),
        **of_main,
    )
    scratch, extras_of = Scratch(made, NAMES), build_extras(p.options)
    with_flags = extras_class(p.options, more=OF_DBIAS)

    def run(x, y, rng=None):
        made = scratch.beside(x.q)
        write_planes(x.do, x.q, x.k, x.v, x.o, x.lse, *made)
        extras, planes = with_flags(*extras_of(x), made.factors, made.flags), made[:4]
        dk_dv(*planes, y.dk, y.dv, made.rows, extras=extras)
        shares.run(y.dbias, lambda out: dq_dbias(*planes, y.dq, made.rows, out, extras=extras))
        return made.flags

    return Prepared(run, (write_planes, dk_dv, dq_dbias, *shares.launches), made.flags)


def _made(p, rows: int) -> Made:
    """Layouts."""
    of = lambda n, columns: Layout.compact((*p.batch, p.hq, n, padded(columns)), "uint32")
    return Made(
        do=of(p.nq, p.dv),
        q=of(p.nq, p.d),
        k=of(p.nk, p.d),
        v=of(p.nk, p.dv),
        rows=Layout.compact((KINDS, *p.batch, p.hq, rows), "float32"),
        factors=Layout.compact((*p.batch, p.hq, 4), "float32"),
        flags=Layout.compact((*p.batch, p.hq), "int32"),
    )


def _write_planes(p, gpu, shape, x, made: Made, tile) -> Launch:
    """The kernel before the main ones, a block for each head."""
    return Launch(
        "sm80.short_heads.write_head_planes.build",
        (shape, tile),
        gpu,
        grid=math.prod(made.flags.shape),
        threads=tile.threads,
        shared_bytes=tile.layout.bytes,
        operands=(
            *((x.do, 5), (x.q, 5), (x.k, 5), (x.v, 5), (x.o, 5), (x.lse, 4)),
            *((made.do, 5), (made.q, 5), (made.k, 5), (made.v, 5)),
            *((made.rows, 5), (made.factors, 4), (made.flags, 3)),
        ),
        numbers=(np.float32(p.scale),),
    )
