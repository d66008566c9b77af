"""A backward pass of the `sm90` tier that is being prepared, and the launches of which all such
passes consist.
"""

import math
from typing import NamedTuple

import numpy as np

from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, Problem
from numba_flash.cuda.arguments import BASE_E, ONE_BY_ONE, RAISED_BASE_2, chunked, planes_of
from numba_flash.cuda.config import PreprocessConfig
from numba_flash.cuda.recipe import Chosen, Recipe
from numba_flash.cuda.runtime.launch import Gpu, Launch
from numba_flash.cuda.sm90.arguments import Sizes, scales
from numba_flash.cuda.sm90.backward.backward_tiles import ROUNDED_COLUMNS, ROUNDED_ROWS
from numba_flash.cuda.sm90.backward.prepare_temporaries import (
    RowBlocks,
    Temporaries,
    row_blocks_of,
    temporaries,
)
from numba_flash.cuda.sm90.config import BackwardConfig, DqConfig
from numba_flash.cuda.sm90.dq import prepare_dq_order
from numba_flash.cuda.sm90.tiles import DQ_PART, KEYS, WARP_GROUP
from numba_flash.cuda.work import grid

ROW_THREADS = 256  # of the kernel before the main one


class Pass(NamedTuple):
    """A backward pass that is being prepared: its recipe, the problem, its tile and GPU, layouts
    with heads first; whether its kernels are launched early.
    """

    recipe: Recipe
    p: Problem
    tile: object
    gpu: Gpu
    ordered: bool
    inputs: BackwardInputs
    results: BackwardResults
    row_blocks: RowBlocks
    temporaries: Temporaries
    early: bool = False

    @property
    def extras(self) -> tuple:
        """Layouts of arrays that belong to options."""
        return grid.extras_layouts(self.p, self.inputs)

    @property
    def rows(self) -> Layout:
        """The lse, or delta."""
        return Layout.compact(self.temporaries.rows.shape[1:], "float32")


def pass_of(chosen: Chosen, early: bool = False) -> Pass:
    """The pass of a call."""
    p, tile, (_, inputs, results, gpu, deterministic) = chosen.p, chosen.tile, chosen.call
    row_blocks = row_blocks_of(p, tile)
    return Pass(
        recipe=chosen.recipe,
        p=p,
        tile=tile,
        gpu=gpu,
        ordered=prepare_dq_order.ordered(p, tile, deterministic),
        inputs=grid.inputs_heads_first(p, inputs),
        results=BackwardResults(*grid.heads_first(p, *results[:3])),
        row_blocks=row_blocks,
        temporaries=temporaries(p, tile, row_blocks, gpu.multiprocessors),
        early=early,
    )


def sizes_of(this: Pass, blocks: int = 0) -> Sizes:
    """Numbers of the main kernel's work, for some `blocks` of keys at a time."""
    p, tile = this.p, this.tile
    key_blocks = grid.blocks(p, p.nk, tile.block_n)
    items = grid.items(p, p.nk, p.hk, tile.block_n)
    section = prepare_dq_order.section(p, tile, key_blocks, this.gpu, this.ordered)
    way = prepare_dq_order.way(p, items, section, key_blocks, this.gpu, this.ordered)
    sizes = Sizes.of_keys(p, items, section, blocks=blocks)
    return sizes._replace(upward=way.upward, serpentine=way.serpentine)


def boxes(this: Pass) -> tuple:
    """What the main kernel reads and stores through tensor maps, and rows of a box."""
    x, m, n = this.inputs, this.tile.block_m, this.tile.block_n
    found = (x.do, m), (x.q, m), (x.k, n), (x.v, n)
    if not this.p.options.packed:
        found += (this.results.dk, KEYS), (this.results.dv, KEYS)
    if this.tile.rounds_dq:
        found += ((this.results.dq, ROUNDED_ROWS, ROUNDED_COLUMNS),)
    return found


# ---- launches


def preprocess_launch(
    this: Pass, block_m: int | None = None, planes: tuple | None = None
) -> Launch:
    """The lse, delta, and flags or zeros; row blocks have so many rows, or the tile's. Of float32
    in base e, else in base 2: `planes` are layouts that belong to its planes.
    """
    p, x, there = this.p, this.inputs, this.temporaries
    sums = there.dq_sum if this.tile.adds_dq else None
    config = PreprocessConfig(
        dtype=p.dtype,
        dv=p.dv,
        dlse=x.dlse is not None,
        block_m=block_m or this.tile.block_m,
        sum_bytes=4 * DQ_PART * this.tile.consumers if this.tile.adds_dq else 0,
        ordered=this.ordered,
        chunked=planes is None or chunked(x.do, x.o),
        lse_in=RAISED_BASE_2 if planes is None else BASE_E,
        options=p.options.arrays,
        threads=ROW_THREADS,
        early=planes is None,
    )
    return Launch(
        "passes.preprocess.build",
        (config,),
        this.gpu,
        grid=math.prod(this.row_blocks),
        threads=ROW_THREADS,
        early=this.early,
        operands=(
            *((x.do, 5), (x.o, 5), (x.lse, 4), (x.dlse, 4)),
            *((there.rows, 5), (sums, 5), (there.flags, 1)),
        ),
        extras=(*this.extras, *(planes or ())),
        numbers=(p.nk,),
    )


def main_launch(this: Pass, sums: Layout, extras, numbers, maps, vectors=ONE_BY_ONE) -> Launch:
    """The main kernel; `sums` is what its tile makes of dS, and `numbers` begin with `Sizes`."""
    p, tile, rows, (sizes, *_) = this.p, this.tile, this.rows, numbers
    as_stored = lambda x: x if x.dtype.name == "float32" else x.words()
    config = BackwardConfig(
        dtype=p.dtype,
        d=p.d,
        dv=p.dv,
        banded=p.band != "none" and not this.ordered,
        to_map=not p.options.packed and not planes_of(p),
        ordered=this.ordered,
        options=p.options.structure,
        tile=tile,
        vectors=vectors,
        stage=this.recipe.stage,
    )
    return Launch(
        f"{this.recipe.loops[0]}.build",
        (config,),
        this.gpu,
        grid=min(sizes.items, this.gpu.multiprocessors),
        threads=tile.threads,
        early=this.early,
        shared_bytes=tile.layout(*map(tile.width, (p.d, p.dv))).bytes,
        operands=(
            *((as_stored(this.results.dk), 5), (as_stored(this.results.dv), 5)),
            *((rows, 4), (rows, 4), (sums, 5), (this.temporaries.flags, 1)),
        ),
        extras=extras,
        numbers=numbers,
        maps=maps,
    )


def postprocess_launch(this: Pass, extras, lists: tuple = ()) -> Launch:
    """What rounds dQ afterwards; `lists` are names of those of a mask's tiles that there are."""
    p, tile, there = this.p, this.tile, this.temporaries
    config, threads, dq = (p.d, p.options.arrays, tile), WARP_GROUP, this.results.dq
    if not planes_of(p):
        config, threads, dq = (p.dtype, *config, lists), threads * tile.consumers, dq.words()
    return Launch(
        f"sm90.dq.postprocess.build{'_split' if planes_of(p) else ''}",
        config,
        this.gpu,
        grid=math.prod(this.row_blocks),
        threads=threads,
        early=this.early,
        operands=((there.dq_sum, 5), (dq, 5)),
        extras=extras,
        numbers=(p.nk, p.low, p.high, np.float32(p.scale)),
    )


def dq_launch(this: Pass, tile, sizes: Sizes, extras) -> Launch:
    """The kernel that makes dQ of dS, if the main one only stores that."""
    p, there, dq = this.p, this.temporaries, this.results.dq
    config = DqConfig(
        dtype=p.dtype,
        d=p.d,
        banded=p.band != "none",
        to_map=not p.options.packed,
        options=p.options.structure,
        tile=tile,
    )
    maps = ((this.inputs.k, tile.block_n), (dq, KEYS))
    return Launch(
        f"{this.recipe.loops[1]}.build",
        (config,),
        this.gpu,
        grid=min(sizes.items, this.gpu.multiprocessors),
        threads=tile.threads,
        shared_bytes=tile.layout(p.d).bytes,
        operands=((dq.words(), 5), (there.dq_sum, 5), (there.ds, 5), (this.rows, 4)),
        extras=extras,
        numbers=(sizes, scales(p)),
        maps=maps[:1] if p.options.packed else maps,
    )
