"""The backward pass of the `sm90` tier from the host: which kernels run with which grid."""

import math
from typing import NamedTuple

import numpy as np

from numba_flash.arrays import Layout
from numba_flash.cuda import grid
from numba_flash.cuda.arguments import ONE_BY_ONE, RAISED_BASE_2, build_extras
from numba_flash.cuda.config import PreprocessConfig
from numba_flash.cuda.launch import Gpu, Launch
from numba_flash.cuda.prepare_relative import Added
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.sm90 import prepare_turns, rounding_tile
from numba_flash.cuda.sm90.arguments import Sizes, scales
from numba_flash.cuda.sm90.config import BackwardConfig, DqConfig
from numba_flash.cuda.sm90.prepare_temporaries import (
    RowBlocks,
    Temporaries,
    key_parts,
    row_blocks_of,
    temporaries,
)
from numba_flash.cuda.sm90.rounding_tile import RoundingTile
from numba_flash.cuda.sm90.tiles import DQ_PART, KEYS, WARP_GROUP
from numba_flash.problem import BackwardInputs, BackwardResults, Prepared, Problem

ROW_THREADS = 256  # of the kernel before the main one
# Work items of a multiprocessor, up to which the kernels of a pass that adds up dQ are launched
# early. On an H200, bfloat16, 2048 / D heads, one batch element with 512, 1024, 2048, 4096 queries,
# which have up to 8 items, that was 1.063, 1.019, 1.040, 1.009 times as fast at D = 128, causal;
# 1.049, 1.013, 1.025, 1.006 without a band; 1.029, 1.019, 1.028, 1.002 and 1.048, 1.014, 1.019,
# 1.005 at D = 64. As many batch elements as have 16384 queries in all have 15 to 31 items: 0.991 to
# 0.999. Only with more items may the main kernel round dQ.
MOST_ITEMS_EARLY = 8


class Pass(NamedTuple):
    """A backward pass that is being prepared: the problem, its tile, loops and GPU, layouts with
    heads first; whether its kernels are launched early.
    """

    p: Problem
    tile: object
    loops: tuple[str, ...]
    gpu: Gpu
    ordered: bool
    inputs: BackwardInputs
    results: BackwardResults
    row_blocks: RowBlocks
    temporaries: Temporaries
    added: Added | None = None
    early: bool = False

    @property
    def extras(self) -> tuple:
        return grid.extras_layouts(self.p, self.inputs)

    @property
    def rows(self) -> Layout:
        """The lse, or delta."""
        return Layout.compact(self.temporaries.rows.shape[1:], "float32")


def many_items(p, tile, gpu) -> bool:
    """Whether there are so many work items that kernels are not launched early."""
    return grid.items(p, p.nk, p.hk, tile.block_n) > MOST_ITEMS_EARLY * gpu.multiprocessors


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` on arrays like the call's layouts."""
    p, tile, (_, inputs, results, gpu, deterministic) = chosen.p, chosen.tile, chosen.call
    row_blocks = row_blocks_of(p, tile)
    do, q, k, v, o = grid.heads_first(p, inputs.do, inputs.q, inputs.k, inputs.v, inputs.o)
    dq, dk, dv = grid.heads_first(p, results.dq, results.dk, results.dv)
    this = Pass(
        p=p,
        tile=tile,
        loops=chosen.recipe.loops,
        gpu=gpu,
        ordered=prepare_turns.ordered(p, tile, deterministic),
        inputs=inputs._replace(do=do, q=q, k=k, v=v, o=o),
        results=BackwardResults(dq, dk, dv),
        row_blocks=row_blocks,
        temporaries=temporaries(p, tile, row_blocks, gpu.multiprocessors),
        added=Added(p, gpu, inputs, tile.block_m, tile.block_n) if p.options.relative else None,
        early=tile.adds_dq and not many_items(p, tile, gpu),
    )
    preprocess = preprocess_launch(this)
    main = (_prepare_sums if tile.adds_dq else _prepare_parts)(this)

    extras_of, scratch = build_extras(p.options.arrays), this.temporaries.scratch()
    added_to = this.added and this.added.of

    def run(inputs, results):
        extras = extras_of(inputs)
        there = scratch.beside(inputs.q)
        sums = there.dq_sum if tile.adds_dq else None
        x = inputs
        preprocess.on((x.do, x.o, x.lse, x.dlse, there.rows, sums, there.flags), extras)
        main.run(inputs, results, there, extras, added_to(inputs) if added_to else extras)

    launches = this.added.launches if p.options.relative else ()
    sums = this.temporaries.sums(p)
    return Prepared(run, (*launches, preprocess, *main.launches), sums=sums)


def preprocess_launch(this: Pass, block_m: int | None = None) -> Launch:
    """lse in base 2, delta, and flags or zeros; row blocks have so many rows, or the tile's."""
    p, x, there = this.p, this.inputs, this.temporaries
    sums = there.dq_sum if this.tile.adds_dq else None
    config = PreprocessConfig(
        dtype=p.dtype,
        dv=p.dv,
        dlse=x.dlse is not None,
        block_m=block_m or this.tile.block_m,
        sum_bytes=4 * DQ_PART * this.tile.consumers if this.tile.adds_dq else 0,
        ordered=this.ordered,
        chunked=True,
        lse_in=RAISED_BASE_2,
        options=p.options.arrays,
        threads=ROW_THREADS,
        early=True,
    )
    return Launch(
        "preprocess.build",
        (config,),
        this.gpu,
        grid=math.prod(this.row_blocks),
        threads=ROW_THREADS,
        early=this.early,
        operands=(
            *((x.do, 5), (x.o, 5), (x.lse, 4), (x.dlse, 4)),
            *((there.rows, 5), (sums, 5), (there.flags, 1)),
        ),
        extras=this.extras,
        numbers=(p.nk,),
    )


def boxes(this: Pass) -> tuple:
    """What the main kernel reads and stores through tensor maps, and rows of a box."""
    x, m, n = this.inputs, this.tile.block_m, this.tile.block_n
    found = (x.do, m), (x.q, m), (x.k, n), (x.v, n)
    if not this.p.options.packed:
        found += (this.results.dk, KEYS), (this.results.dv, KEYS)
    if isinstance(this.tile, RoundingTile):
        found += ((this.results.dq, rounding_tile.ROWS, rounding_tile.COLUMNS),)
    return found


def sizes_of(this: Pass, blocks: int = 0) -> Sizes:
    """Numbers of the main kernel's work, for some `blocks` of keys at a time."""
    p, tile = this.p, this.tile
    key_blocks = grid.blocks(p, p.nk, tile.block_n)
    items = grid.items(p, p.nk, p.hk, tile.block_n)
    section = prepare_turns.section(p, tile, key_blocks, this.gpu, this.ordered)
    way = prepare_turns.way(p, items, section, key_blocks, this.gpu, this.ordered)
    return Sizes(
        items=items,
        low=-p.high,
        high=-p.low,
        columns=p.nq,
        parts=1,
        group=p.hq // p.hk,
        section=section,
        b0=p.batch[0],
        upward=way.upward,
        swing=way.swing,
        blocks=blocks,
    )


def config_of(this: Pass, vectors=ONE_BY_ONE) -> BackwardConfig:
    """What the main kernel is compiled for."""
    p = this.p
    return BackwardConfig(
        dtype=p.dtype,
        d=p.d,
        dv=p.dv,
        banded=p.band != "none" and not this.ordered,
        to_map=not p.options.packed,
        ordered=this.ordered,
        options=p.options.structure,
        tile=this.tile,
        vectors=vectors,
    )


def dq_config_of(p, tile) -> DqConfig:
    """What the kernel that makes dQ of dS is compiled for."""
    return DqConfig(
        dtype=p.dtype,
        d=p.d,
        banded=p.band != "none",
        to_map=not p.options.packed,
        options=p.options.structure,
        tile=tile,
    )


def _main(this: Pass, sums: Layout, blocks: int = 0) -> Launch:
    """The main kernel; `sums` is what its tile makes of dS, for some `blocks` of keys at a time."""
    p, tile, results, rows = this.p, this.tile, this.results, this.rows
    sizes = sizes_of(this, blocks)
    return Launch(
        f"{this.loops[0]}.build",
        (config_of(this),),
        this.gpu,
        grid=min(sizes.items, this.gpu.multiprocessors),
        threads=tile.threads,
        early=this.early,
        shared_bytes=tile.layout(p.d, p.dv).bytes,
        operands=(
            *((results.dk.words(), 5), (results.dv.words(), 5)),
            *((rows, 4), (rows, 4), (sums, 5), (this.temporaries.flags, 1)),
        ),
        extras=this.extras if this.added is None else this.added.layouts,
        numbers=(sizes, scales(p)),
        maps=boxes(this),
    )


def _prepare_sums(this: Pass) -> Prepared:
    """``run(inputs, results, temporaries, extras, those of the main kernel)`` of a tile that adds
    up dQ in memory.
    """
    main, rounds = _main(this, this.temporaries.dq_sum), isinstance(this.tile, RoundingTile)
    postprocess = () if rounds else (_postprocess(this),)

    def run(inputs, results, there, extras, of_main):
        stored = () if this.p.options.packed else (results.dk, results.dv)
        stored += (results.dq,) if rounds else ()
        maps = (inputs.do, inputs.q, inputs.k, inputs.v, *stored)
        rows = there.rows[0], there.rows[1]
        main.on((*maps, results.dk, results.dv, *rows, there.dq_sum, there.flags), of_main)
        for each in postprocess:
            each.on((there.dq_sum, results.dq), extras)

    return Prepared(run, (main, *postprocess))


def _postprocess(this: Pass) -> Launch:
    """What rounds dQ afterwards."""
    p, tile, there = this.p, this.tile, this.temporaries
    return Launch(
        "sm90.postprocess.build",
        (p.dtype, p.d, p.options.arrays, tile),
        this.gpu,
        grid=math.prod(this.row_blocks),
        threads=WARP_GROUP * tile.consumers,
        early=this.early,
        operands=((there.dq_sum, 5), (this.results.dq.words(), 5)),
        extras=this.extras,
        numbers=(p.nk, p.low, p.high, np.float32(p.scale)),
    )


def _prepare_parts(this: Pass) -> Prepared:
    """The same, of a tile that makes dS for some blocks of keys at a time, of which
    `numba_flash.cuda.sm90.dq` makes dQ.
    """
    p, tile, there, dq_layout = this.p, this.tile, this.temporaries, this.results.dq
    items, multiprocessors = math.prod(this.row_blocks), this.gpu.multiprocessors
    blocks, parts = key_parts(p, tile, items, multiprocessors)
    sectioned = p.band != "none" and not p.options.packed
    main = _main(this, there.ds, blocks)
    sizes = Sizes(
        items=items,
        low=p.low,
        high=p.high,
        columns=p.nk,
        parts=1,
        group=p.hq // p.hk,
        section=grid.even_section(this.row_blocks.blocks, multiprocessors) if sectioned else 1,
        b0=p.batch[0],
        blocks=blocks,
    )
    maps = ((this.inputs.k, tile.block_n), (dq_layout, KEYS))
    sum_dq = Launch(
        f"{this.loops[1]}.build",
        (dq_config_of(p, tile),),
        this.gpu,
        grid=min(items, multiprocessors),
        threads=tile.threads,
        shared_bytes=tile.dq_layout(p.d).bytes,
        operands=((dq_layout.words(), 5), (there.dq_sum, 5), (there.ds, 5), (this.rows, 4)),
        extras=this.extras,
        numbers=(sizes, scales(p)),
        maps=maps[:1] if p.options.packed else maps,
    )
    at_a_time = [
        [(x._replace(first_block=first), scales(p)) for x in (main.numbers[0], sizes)]
        for first in range(0, parts * blocks, blocks)
    ]

    def run(inputs, results, there, extras, _):
        dq, dk, dv = results.dq, results.dk, results.dv
        stored, stored_dq = ((), ()) if p.options.packed else ((dk, dv), (dq,))
        maps = (inputs.do, inputs.q, inputs.k, inputs.v, *stored)
        lse2, delta = there.rows[0], there.rows[1]
        for of_main, of_dq in at_a_time:
            main(*maps, dk, dv, lse2, delta, there.ds, None, extras=extras, numbers=of_main)
            sum_dq(
                inputs.k, *stored_dq, dq, there.dq_sum, there.ds, lse2, extras=extras, numbers=of_dq
            )

    return Prepared(run, (main, sum_dq))
