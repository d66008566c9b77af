"""The backward pass of the `sm90` tier of narrow heads with a bias that batch elements share, from
the host: dQ and dbias, then dK and dV, each by a kernel that keeps its part of the bias.
"""

import math
from typing import NamedTuple

import numpy as np

from numba_flash.arrays import Layout, Scratch
from numba_flash.cuda import grid
from numba_flash.cuda.arguments import Extent, build_extras, in_vectors, vectors_of
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_dbias import Shares
from numba_flash.cuda.prepare_kept import shared_alone, sizes_of
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.sm90.arguments import LOG2E, GradientScales
from numba_flash.cuda.sm90.config import BackwardConfig, BiasGradientConfig
from numba_flash.cuda.sm90.gradient_tiles import MOST, QUERIES, keys_tile, queries_tile
from numba_flash.cuda.swizzle import NARROW
from numba_flash.problem import Prepared

KEYS_OF_RUN = 2  # neighbours among a lane's scores


class Known(NamedTuple):
    """What the first kernel hands to the second: of each row of queries, as
    `numba_flash.cuda.sm90.begin_rows` says.
    """

    rows: Layout


def serves(problem, inputs, dbias) -> bool:
    """True if there is a bias of 16 bits that can be kept, whose gradient is wanted, and nothing
    else; of as many heads of keys as of queries.
    """
    p = problem
    if not dbias or p.hq != p.hk or p.options.bias not in ("float16", "bfloat16"):
        return False
    if max(p.d, p.dv) > MOST or not shared_alone(p, inputs):
        return False
    if tuple(inputs.bias.shape[-2:]) != (p.nq, p.nk):  # a sum over queries or keys is another's
        return False
    return queries_tile(p) is not None and keys_tile(p) is not None


def prepare(chosen: Chosen) -> Prepared:
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
    p, tile, (_, x, results, gpu, _) = chosen.p, chosen.tile, chosen.call
    out = shares.out
    config = BiasGradientConfig(
        dtype=p.dtype,
        d=p.d,
        dv=p.dv,
        banded=False,
        options=p.options.structure,
        tile=tile,
        out=out.dtype.name,
        summed=shares.summed,
        wide=in_vectors(p, out, KEYS_OF_RUN),
        vectors=vectors_of(p, x, KEYS_OF_RUN),
        dlse=x.dlse is not None,
    )
    box = lambda x, rows: (x, rows, NARROW)
    return Launch(
        chosen.builder,
        (config,),
        gpu,
        grid=shares.items,
        threads=tile.threads,
        shared_bytes=tile.layout().bytes,
        operands=(
            *((results.dq.words(), 5), (x.lse, 4), (x.dlse, 4)),
            *((rows, 5), (out, 6)),
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
