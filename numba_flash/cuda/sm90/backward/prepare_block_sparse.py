"""The backward pass of the `sm90` tier with lists of tiles and dS in memory, from the host: kernels
and grids.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, Prepared
from numba_flash.cuda.arguments import build_extras, extras_class
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.sm90.arguments import Sizes, scales
from numba_flash.cuda.sm90.backward.options_tiles import DQ_TILE
from numba_flash.cuda.sm90.backward.prepare_pass import (
    Pass,
    boxes,
    dq_launch,
    main_launch,
    preprocess_launch,
)
from numba_flash.cuda.sm90.backward.prepare_temporaries import RowBlocks, Temporaries
from numba_flash.cuda.work import grid
from numba_flash.cuda.work.prepare_tile_lists import LISTS, own_axes

# Bytes of dS at a time: all of 8 heads at N = 16k, or, of 10 % of the blocks, of 80. Each section
# costs two launches, also if there are no tiles left, so that half as many bytes take 1 to 3 %
# longer. Measured: docs/lab/hopper_backward.md, `WORKSPACE`.
WORKSPACE = 2**32
# Bytes of Q and dO of heads whose blocks of keys are handed out together, so that they stay in the
# L2 cache (50 MB on an H200) beside dS, which passes through it. Eight times as many take up to 2 %
# longer. Measured: docs/lab/hopper_backward.md, `QUERIES_AT_WORK`.
QUERIES_AT_WORK = 2**24
SLOT_THREADS = 1024
# Sections, up to which there are two launches for each, also where a mask leaves no tiles; beyond,
# blocks add to dQ. To store dS is faster where 1 % of the tiles or more are visible; of a sparser
# mask most launches find nothing, and adding is faster. With 32 heads of 2**20 queries there may be
# 16384 sections. Measured: docs/lab/hopper_backward.md, `MOST_SECTIONS`.
MOST_SECTIONS = 1024


class Slots(NamedTuple):
    """Of dS, in tiles: after how many a section ends, for how many there is room in memory; how
    many sections there may be.
    """

    whole: int
    room: int
    sections: int


class Numbered(NamedTuple):
    """Arrays that are made of a mask: lists for each block of keys and for each block of queries,
    and what `numba_flash.cuda.sm90.dq.ds_slots` makes of those.
    """

    of_keys: Any
    of_queries: Any
    queue: Any
    places: Any
    ranks: Any


class Entry(NamedTuple):
    """What the main kernel and that of dQ get of a mask."""

    main: Any
    dq: Any


def slots_of(p) -> Slots:
    """Those of a problem."""
    rows = grid.blocks(p, p.nq, DQ_TILE.block_m)
    of_a_head = grid.tiles_in_band(p, DQ_TILE.block_m, DQ_TILE.block_n)
    all_tiles = max(1, math.prod(p.batch) * p.hq * of_a_head)
    whole = max(1, WORKSPACE // DQ_TILE.ds_bytes)
    room = min(all_tiles, whole + p.hq // p.hk * rows)
    return Slots(whole, room, -(-all_tiles // whole))


def serves(p) -> bool:
    """True if there are few enough sections; their slots are numbered in 32 bits."""
    slots = slots_of(p)
    return slots.sections <= min(MOST_SECTIONS, grid.MOST_BLOCKS // slots.room)


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` on arrays like the call's layouts."""
    p, tile, (_, inputs, results, gpu, _) = chosen.p, chosen.tile, chosen.call
    slots = slots_of(p)
    row_blocks = RowBlocks(*p.batch, p.hq, grid.blocks(p, p.nq, DQ_TILE.block_m))
    this = Pass(
        recipe=chosen.recipe,
        p=p,
        tile=tile,
        gpu=gpu,
        ordered=False,  # it is so anyway
        inputs=grid.inputs_heads_first(p, inputs),
        results=BackwardResults(*grid.heads_first(p, *results[:3])),
        row_blocks=row_blocks,
        temporaries=_temporaries(p, row_blocks, slots),
    )
    lists = Lists(this, inputs, slots)
    preprocess = preprocess_launch(this, DQ_TILE.block_m)
    main, sum_dq = _main(this, lists, slots), _sum_dq(this, lists, slots)
    extras_of, scratch = build_extras(p.options), this.temporaries.scratch()
    sections = [
        [(each.numbers[0]._replace(first_block=n), each.numbers[1]) for each in (main, sum_dq)]
        for n in range(slots.sections)
    ]

    def run(inputs: BackwardInputs, results, rng=None):
        x, (dq, dk, dv), there = inputs, results[:3], scratch.beside(inputs.q)
        made = lists.of(inputs)
        preprocess(x.do, x.o, x.lse, x.dlse, there.rows, None, None, extras=extras_of(inputs))
        rows = there.rows[0], there.rows[1]
        for now, then in sections:
            arrays = x.do, x.q, x.k, x.v, dk, dv, dk, dv, *rows, there.ds, None
            main(*arrays, extras=made.main, numbers=now)
            sum_dq(x.k, dq, dq, there.dq_sum, there.ds, rows[0], extras=made.dq, numbers=then)

    made = (*lists.launches, preprocess, main, sum_dq)
    return Prepared(run, made, sums=this.temporaries.dq_sum.nbytes)


def _temporaries(p, row_blocks: RowBlocks, slots: Slots) -> Temporaries:
    rows = Layout.compact((2, *row_blocks[:3], row_blocks.blocks * DQ_TILE.block_m), "float32")
    several = slots.sections > 1
    dq_sum = Layout.compact((*row_blocks, DQ_TILE.block_m * p.d if several else 0), "float32")
    ds = Layout.compact((1, 1, 1, slots.room, DQ_TILE.ds_bytes // 4), "float32")
    return Temporaries(rows, dq_sum, None, ds)


class Lists:
    """Lists of both kernels, for each block of keys and for each block of queries, and where their
    tiles have their slots.

    Attributes
    ----------
    main, dq : tuple
        Layouts of what either kernel gets.
    launches : tuple of Launch
        What makes them.
    """

    def __init__(self, this: Pass, inputs, slots: Slots):
        p, m, n, counters = this.p, DQ_TILE.block_m, DQ_TILE.block_n, 2 * slots.sections
        rows, columns = -(-p.nq // m), -(-p.nk // n)
        own, all_heads = own_axes(p, inputs.mask), (*p.batch, p.hq)
        made = Numbered(
            of_keys=Layout.compact((*own, columns, 1 + rows), "int32"),
            of_queries=Layout.compact((*own, rows, 1 + columns), "int32"),
            queue=Layout.compact((*own, 1, columns + 1), "int32"),
            places=Layout.compact((*all_heads, 1, columns + 1 + counters), "int32"),
            ranks=Layout.compact((*own, rows, columns), "int32"),
        )
        names = ("of keys", "of queries", "queue", "places of dS", "ranks of tiles")
        self._scratch = Scratch(made, [f"the mask's lists: {name}" for name in names])
        masked = replace(p, options=p.options.as_mask)
        lists = Launch(
            "work.block_lists.build_both",
            (masked.options.arrays, m, n, LISTS),
            this.gpu,
            grid=-(-math.prod(own) * (columns + rows) // LISTS),
            threads=32 * LISTS,
            operands=((made.of_keys, 5), (made.of_queries, 5), (None, 5)),
            extras=grid.extras_layouts(masked, inputs),
            numbers=(p.nq, p.nk, p.low, p.high),
        )
        number = Launch(
            "sm90.dq.ds_slots.build",
            (SLOT_THREADS,),
            this.gpu,
            grid=1 + -(-math.prod(own) * columns // (SLOT_THREADS // 32)),
            threads=SLOT_THREADS,
            operands=tuple((x, 5) for x in (made.of_keys, made.queue, made.places, made.ranks)),
            numbers=((p.hk, p.hq // p.hk, slots.whole, slots.room, counters),),
        )
        of_keys, of_queries, *rest = ((x, (*all_heads, *x.shape[3:])) for x in made)
        queue, places, ranks = rest
        self.main = (*grid.extras_layouts(p, inputs), of_keys, queue, places)
        self.dq = (*grid.extras_layouts(p, inputs), of_queries, places, ranks)
        self._main_class = extras_class(p.options, ("tiles", "queue", "places"))
        self._dq_class = extras_class(p.options, ("tiles", "places", "ranks"))
        self._extras_of, self._extras_of_mask = map(build_extras, (p.options, masked.options))
        self.launches = (lists, number)

    def of(self, inputs) -> Entry:
        """What both kernels get in a call; it is made."""
        (lists, number), x = self.launches, self._scratch.beside(inputs.q)
        lists(x.of_keys, x.of_queries, None, extras=self._extras_of_mask(inputs))
        number(x.of_keys, x.queue, x.places, x.ranks)
        extras = self._extras_of(inputs)
        return Entry(
            self._main_class(*extras, x.of_keys, x.queue, x.places),
            self._dq_class(*extras, x.of_queries, x.places, x.ranks),
        )


def _main(this: Pass, lists: Lists, slots: Slots) -> Launch:
    """The kernel that makes dK, dV and dS."""
    p, tile = this.p, this.tile
    of_a_head = 2 * p.nq * (p.d + p.dv) * (p.hq // p.hk)
    items, section = grid.items(p, p.nk, p.hk, tile.block_n), max(1, QUERIES_AT_WORK // of_a_head)
    sizes = Sizes.of_keys(p, items, section, slots.sections, slots.room)
    return main_launch(this, this.temporaries.ds, lists.main, (sizes, scales(p)), boxes(this))


def _sum_dq(this: Pass, lists: Lists, slots: Slots) -> Launch:
    """The kernel that makes dQ of dS."""
    items = math.prod(this.row_blocks)
    sizes = Sizes.of_queries(this.p, items, kv_splits=slots.sections, blocks=slots.room)
    return dq_launch(this, DQ_TILE, sizes, lists.dq)
