"""The backward pass of the `sm90` tier from the host: which kernels run with which grid."""

import math

import numpy as np

from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.arguments import (
    FACTORS,
    FP16X2,
    build_extras,
    extras_class,
    parameters_of,
    vectors_of,
)
from numba_flash.cuda.passes.prepare_planes import PlanesWriter
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.score.prepare_relative import Relative
from numba_flash.cuda.sm90.arguments import LOG2E, Sizes, scales
from numba_flash.cuda.sm90.backward.backward_tiles import WIDE_DQ_TILE
from numba_flash.cuda.sm90.backward.prepare_pass import (
    Pass,
    boxes,
    dq_launch,
    main_launch,
    pass_of,
    postprocess_launch,
    preprocess_launch,
    sizes_of,
)
from numba_flash.cuda.sm90.backward.prepare_temporaries import key_parts
from numba_flash.cuda.sm90.forward.prepare_forward import as_float16
from numba_flash.cuda.sm90.prepare_pairs import tiles_of_bias
from numba_flash.cuda.sm90.tiles import DQ_PART, KEYS
from numba_flash.cuda.work import grid
from numba_flash.cuda.work.prepare_tile_lists import Extras, TileShape

KEYS_OF_RUN = 2  # neighbours among a lane's scores
# Work items of a multiprocessor, up to which the kernels of a pass that adds up dQ are launched
# early, before the kernel in front of them has ended. That saves the beginning of a kernel, up to 6
# % of a short pass; of a long one it costs up to 1 %. Only with more items may the main kernel
# round dQ. Measured: docs/lab/hopper_backward.md, `MOST_ITEMS_EARLY`.
MOST_ITEMS_EARLY = 8
# Bytes of sums of dQ of heads whose blocks of keys are handed out together, where these wait for
# each other at tiles of lists: the more heads, the fewer blocks of one are at work at the same
# time, and the less they wait, but the less of the sums is in the L2 cache. With half as many bytes
# every mask is slower; with twice as many, dense ones are, and only the sparsest is faster.
# Measured: docs/lab/hopper_backward.md, `SUMS_AT_WORK`.
SUMS_AT_WORK = 2**26


def many_items(p, tile, gpu) -> bool:
    """Whether there are so many work items that kernels are not launched early."""
    return grid.items(p, p.nk, p.hk, tile.block_n) > MOST_ITEMS_EARLY * gpu.multiprocessors


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` of plain scores, or of a number for each distance, whose dQ is
    summed in memory, on arrays like the call's layouts.
    """
    p, tile, (_, inputs, _, gpu, _) = chosen.p, chosen.tile, chosen.call
    this = pass_of(chosen, early=not many_items(p, tile, gpu))
    relative = Relative(p, gpu, inputs, tile.block_m, tile.block_n) if p.options.relative else None
    of_main = this.extras if relative is None else relative.layouts
    preprocess, rounds = preprocess_launch(this), tile.rounds_dq
    sums = this.temporaries.dq_sum
    main = main_launch(this, sums, of_main, (sizes_of(this), scales(p)), boxes(this))
    postprocess = () if rounds else (postprocess_launch(this, this.extras),)
    extras_of, scratch = build_extras(p.options.arrays), this.temporaries.scratch()
    added_to = relative and relative.of

    def run(inputs, results):
        x, extras, there = inputs, extras_of(inputs), scratch.beside(inputs.q)
        dq, dk, dv = results.dq, results.dk, results.dv
        preprocess.on((x.do, x.o, x.lse, x.dlse, *there[:3]), extras)
        stored = () if p.options.packed else (dk, dv)
        maps = (x.do, x.q, x.k, x.v, *stored, *((dq,) if rounds else ()))
        rows, own = (there.rows[0], there.rows[1]), added_to(inputs) if added_to else extras
        main.on((*maps, dk, dv, *rows, there.dq_sum, there.flags), own)
        for each in postprocess:
            each.on((there.dq_sum, dq), extras)

    launches = (*(relative.launches if relative else ()), preprocess, main, *postprocess)
    return Prepared(run, launches, sums=this.temporaries.sums(p))


def prepare_options(chosen: Chosen) -> Prepared:
    """``run(inputs, results, rng)`` with options of pairs, or lists of tiles; `rng` is left out if
    there is no dropout.
    """
    p, tile, (_, inputs, _, gpu, deterministic) = chosen.p, chosen.tile, chosen.call
    this, bias_tiles = pass_of(chosen), tiles_of_bias(p, inputs.bias)
    share, queue = (1, False) if deterministic else (0, p.options.block_sparse)
    tiles = TileShape(tile.block_m, tile.block_n, transposed=True, share=share, queue=queue)
    lists, preprocess = Extras(p, gpu, inputs, tiles), preprocess_launch(this)
    sizes, scale_log2 = _sizes(this), np.float32(LOG2E if p.options.changes else p.scale * LOG2E)
    numbers = lambda rng=None: (sizes, scale_log2, np.float32(p.scale), parameters_of(p, rng))
    if p.options.only_lists:
        numbers = lambda: (sizes, scales(p))
    maps = (*boxes(this), *(((bias_tiles, KEYS),) if bias_tiles is not None else ()))
    vectors, sums = vectors_of(p, this.inputs, KEYS_OF_RUN), this.temporaries.dq_sum
    main = main_launch(this, sums, lists.layouts, numbers(), maps, vectors)
    postprocess = postprocess_launch(this, lists.layouts, tiles.names if p.options.tiled else ())
    extras_of, scratch = build_extras(p.options), this.temporaries.scratch()
    dbias = None
    if chosen.beside is not None:
        dbias = chosen.beside.recipe.prepare(chosen.beside, this.inputs, this.temporaries.rows)

    def run(inputs, results, rng=None):
        x, there, own = inputs, scratch.beside(inputs.q), lists.of(inputs)
        dq, dk, dv = results[:3]
        rows, sums, flags, _ = there
        preprocess(x.do, x.o, x.lse, x.dlse, rows, sums, flags, extras=extras_of(inputs))
        mapped = (x.do, x.q, x.k, x.v, dk, dv, x.bias)[: len(main.maps)]
        given = None if rng is None else numbers(rng)
        main(*mapped, dk, dv, rows[0], rows[1], sums, flags, extras=own, numbers=given)
        postprocess(sums, dq, extras=own)
        if dbias is not None:
            dbias.run(x, rows, results.dbias, rng)

    launches = () if dbias is None else dbias.launches
    made = (*lists.launches, preprocess, main, postprocess, *launches)
    return Prepared(run, made, sums=this.temporaries.sums(p))


def _sizes(this: Pass) -> Sizes:
    """Numbers of the main kernel's work with options."""
    p, sizes = this.p, sizes_of(this)
    if not (this.ordered and p.options.block_sparse):
        return sizes
    sums_of_a_head = 4 * DQ_PART * this.tile.consumers * -(-p.nq // this.tile.block_m)
    return sizes._replace(section=max(1, SUMS_AT_WORK // sums_of_a_head))


def prepare_split(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` of float32, which returns flags of heads that are left to another
    tier.
    """
    p, tile, (_, inputs, _, gpu, _) = chosen.p, chosen.tile, chosen.call
    this = pass_of(chosen)
    planes_writer = PlanesWriter(p, gpu, inputs, (tile.width(p.d), tile.width(p.dv)))
    made, sums, m, n = planes_writer.made, this.temporaries.dq_sum, tile.block_m, tile.block_n
    factors = (made.factors, 4)
    preprocess = preprocess_launch(this, planes=(factors, (made.shifts, 4), (made.centres, 5)))
    maps = tuple(
        (as_float16(x), rows)
        for x, rows in ((made.do, m), (made.q, m), (made.k, n), (made.v, n))
    )  # fmt: skip
    of_main = (*this.extras, factors)
    main = main_launch(this, sums, of_main, (sizes_of(this), scales(p)), maps)
    postprocess = postprocess_launch(this, of_main)
    extras_of, scratch = build_extras(p.options), this.temporaries.scratch()
    of_rows, of_factors = (extras_class(p.options, more=names) for names in (FP16X2, FACTORS))

    def run(inputs, results):
        extras, there, x = extras_of(inputs), scratch.beside(inputs.q), planes_writer.of(inputs)
        rows, sums, flags, _ = there
        given = inputs.do, inputs.o, inputs.lse, inputs.dlse, rows, sums, flags
        preprocess(*given, extras=of_rows(*extras, *x.extras))
        dq, dk, dv = results[:3]
        own = of_factors(*extras, x.factors)
        main(x.do, x.q, x.k, x.v, dk, dv, rows[0], rows[1], sums, flags, extras=own)
        postprocess(sums, dq, extras=own)
        return x.flags

    launches = (*planes_writer.launches, preprocess, main, postprocess)
    return Prepared(run, launches, made.flags, sums=this.temporaries.sums(p))


def prepare_wide(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` of plain scores, of a tile that makes dS for some blocks of keys at
    a time, of which `numba_flash.cuda.sm90.dq.dq` makes dQ.
    """
    p, tile, gpu, this = chosen.p, chosen.tile, chosen.call.gpu, pass_of(chosen)
    items, preprocess = math.prod(this.row_blocks), preprocess_launch(this)
    blocks, parts = key_parts(p, tile, items, gpu.multiprocessors)
    sectioned = p.band != "none" and not p.options.packed
    section = grid.even_section(this.row_blocks.blocks, gpu.multiprocessors) if sectioned else 1
    sizes = Sizes.of_queries(p, items, section, blocks=blocks)
    numbers = sizes_of(this, blocks), scales(p)
    main = main_launch(this, this.temporaries.ds, this.extras, numbers, boxes(this))
    sum_dq = dq_launch(this, WIDE_DQ_TILE, sizes, this.extras)
    at_a_time = [
        [(x._replace(first_block=first), scales(p)) for x in (main.numbers[0], sizes)]
        for first in range(0, parts * blocks, blocks)
    ]
    extras_of, scratch = build_extras(p.options.arrays), this.temporaries.scratch()

    def run(inputs, results):
        x, extras, there = inputs, extras_of(inputs), scratch.beside(inputs.q)
        dq, dk, dv = results.dq, results.dk, results.dv
        preprocess.on((x.do, x.o, x.lse, x.dlse, there.rows, None, there.flags), extras)
        stored, stored_dq = ((), ()) if p.options.packed else ((dk, dv), (dq,))
        maps = (x.do, x.q, x.k, x.v, *stored)
        lse2, delta = there.rows[0], there.rows[1]
        for of_main, of_dq in at_a_time:
            main(*maps, dk, dv, lse2, delta, there.ds, None, extras=extras, numbers=of_main)
            sum_dq(x.k, *stored_dq, dq, there.dq_sum, there.ds, lse2, extras=extras, numbers=of_dq)

    return Prepared(run, (preprocess, main, sum_dq), sums=this.temporaries.sums(p))
