"""The backward pass of float32 on the `sm90` tier from the host: kernels and grids."""

import math
from dataclasses import replace

import numpy as np

from numba_flash.cuda import grid
from numba_flash.cuda.arguments import (
    BASE_E,
    FACTORS,
    SPLIT,
    build_extras,
    chunked,
    extras_class,
)
from numba_flash.cuda.config import PreprocessConfig
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_split import Splitter
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.sm90 import prepare_turns
from numba_flash.cuda.sm90.arguments import scales
from numba_flash.cuda.sm90.prepare_backward import ROW_THREADS, Pass, config_of, sizes_of
from numba_flash.cuda.sm90.prepare_forward import as_float16
from numba_flash.cuda.sm90.prepare_temporaries import row_blocks_of
from numba_flash.cuda.sm90.prepare_temporaries import temporaries as temporaries_of
from numba_flash.cuda.sm90.tiles import DQ_PART, WARP_GROUP
from numba_flash.problem import BackwardResults, Prepared


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` on arrays like the call's layouts, which returns flags of heads that
    are left to another tier.
    """
    p, tile, (_, inputs, results, gpu, deterministic) = chosen.p, chosen.tile, chosen.call
    row_blocks = row_blocks_of(p, tile)
    do, o = grid.heads_first(p, inputs.do, inputs.o)
    this = Pass(
        p=p,
        tile=tile,
        loops=chosen.recipe.loops,
        gpu=gpu,
        ordered=prepare_turns.ordered(p, tile, deterministic),
        inputs=inputs._replace(do=do, o=o),
        results=BackwardResults(*grid.heads_first(p, *results[:3])),
        row_blocks=row_blocks,
        temporaries=temporaries_of(p, tile, row_blocks, gpu.multiprocessors),
    )
    splitter = Splitter(p, gpu, inputs, (tile.width(p.d), tile.width(p.dv)))
    preprocess, main = _preprocess(this, splitter.made), _main(this, splitter.made)
    postprocess = _postprocess(this, splitter.made)
    extras_of, scratch = build_extras(p.options), this.temporaries.scratch()
    of_rows, of_factors = (extras_class(p.options, more=names) for names in (SPLIT, FACTORS))

    def run(inputs, results):
        extras, there = extras_of(inputs), scratch.beside(inputs.q)
        x = splitter.of(inputs)
        do, o = grid.heads_first(p, inputs.do, inputs.o)
        dq, dk, dv = grid.heads_first(p, *results[:3])
        sums, flags, rows = there.dq_sum, there.flags, there.rows
        own = of_rows(*extras, *x.extras)
        preprocess(do, o, inputs.lse, inputs.dlse, rows, sums, flags, extras=own)
        own = of_factors(*extras, x.factors)
        main(x.do, x.q, x.k, x.v, dk, dv, rows[0], rows[1], sums, flags, extras=own)
        postprocess(sums, dq, extras=own)
        return x.flags

    launches = (*splitter.launches, preprocess, main, postprocess)
    return Prepared(run, launches, splitter.made.flags, sums=this.temporaries.sums(p))


def _preprocess(this: Pass, made) -> Launch:
    """The lse, delta, and flags or zeros."""
    p, x, there, tile = this.p, this.inputs, this.temporaries, this.tile
    config = PreprocessConfig(
        dtype=p.dtype,
        dv=p.dv,
        dlse=x.dlse is not None,
        block_m=tile.block_m,
        sum_bytes=4 * DQ_PART * tile.consumers,
        ordered=this.ordered,
        chunked=chunked(x.do, x.o),
        lse_in=BASE_E,
        options=p.options.arrays,
        threads=ROW_THREADS,
    )
    return Launch(
        "preprocess.build",
        (config,),
        this.gpu,
        grid=math.prod(this.row_blocks),
        threads=ROW_THREADS,
        operands=(
            *((x.do, 5), (x.o, 5), (x.lse, 4), (x.dlse, 4)),
            *((there.rows, 5), (there.dq_sum, 5), (there.flags, 1)),
        ),
        extras=(*this.extras, (made.factors, 4), (made.shifts, 4), (made.centres, 5)),
        numbers=(p.nk,),
    )


def _main(this: Pass, made) -> Launch:
    """The kernel that walks over queries."""
    p, tile, results, there = this.p, this.tile, this.results, this.temporaries
    sizes = sizes_of(this)
    rows = there.rows._replace(shape=there.rows.shape[1:], strides=there.rows.strides[1:])
    boxes = (made.do, tile.block_m), (made.q, tile.block_m), (made.k, tile.block_n)
    boxes += ((made.v, tile.block_n),)
    return Launch(
        f"{this.loops[0]}.build",
        (replace(config_of(this), to_map=False),),
        this.gpu,
        grid=min(sizes.items, this.gpu.multiprocessors),
        threads=tile.threads,
        shared_bytes=tile.layout(tile.width(p.d), tile.width(p.dv)).bytes,
        operands=(
            *((results.dk, 5), (results.dv, 5), (rows, 4), (rows, 4)),
            *((there.dq_sum, 5), (there.flags, 1)),
        ),
        extras=(*this.extras, (made.factors, 4)),
        numbers=(sizes, scales(p)),
        maps=tuple((as_float16(x), n) for x, n in boxes),
    )


def _postprocess(this: Pass, made) -> Launch:
    """dQ from its sums."""
    p = this.p
    return Launch(
        "sm90.postprocess_split.build",
        (p.d, p.options.arrays, this.tile),
        this.gpu,
        grid=math.prod(this.row_blocks),
        threads=WARP_GROUP,
        operands=((this.temporaries.dq_sum, 5), (this.results.dq, 5)),
        extras=(*this.extras, (made.factors, 4)),
        numbers=(p.nk, p.low, p.high, np.float32(p.scale)),
    )
