"""The optional arrays of a call with lists of the mask's tiles, from the host: see
`numba_flash.cuda.work.tile_lists`. Numba is not imported here.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.cuda.arguments import build_extras, extras_class, in_vectors
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.work import grid

THREADS, ORDER_THREADS, LISTS = 1024, 128, 4  # of a block, where each warp makes one
QUEUE_THREADS = 128
WORD = 32  # tiles
WIDTHS = (16, 4, 1)  # bytes of the mask that may be read at once


class TileShape(NamedTuple):
    """What a kernel wants to know of a mask's tiles.

    Attributes
    ----------
    block_m, block_n : int
        Queries and keys of a tile.
    transposed : bool
        A list of tiles of queries for each block of keys.
    share : int
        Blocks of queries of a group, whose order is wanted too; 0 if it is not.
    bits : bool
        Bits instead of lists.
    queue : bool
        Blocks are taken by those that have done with others, the longest lists first.
    """

    block_m: int
    block_n: int
    transposed: bool = False
    share: int = 0
    bits: bool = False
    queue: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of what the kernel gets."""
        if self.bits:
            return ("bits",)
        return ("tiles", *(("order",) if self.share else ()), *(("queue",) if self.queue else ()))


class Made(NamedTuple):
    """What is made of a mask, or its layouts; None where nobody wants it."""

    tiles: Any
    bits: Any
    order: Any
    queue: Any


class Chosen(NamedTuple):
    """A tile, and the problem as its kernel sees it."""

    problem: Any
    tile: Any


def choose(problem, *tiles_of) -> Chosen:
    """The first tile that lies within one block of the mask, wherever it is, of those that
    ``tile_of(problem)`` names for problems without a mask, and for the problem as it is; its kernel
    does without the mask. If none does, or there is no mask of blocks, that of the first for the
    problem as it is.
    """
    p = problem
    if p.options.blocks is None:
        return Chosen(p, tiles_of[0](p))
    without = replace(p, options=replace(p.options, mask=False, block_sparse=True))
    for tile_of in tiles_of:
        for each in (without, p):
            tile = tile_of(each)
            if tile is not None and p.options.blocks.divided_by(tile.block_m, tile.block_n):
                return Chosen(without, tile)
    return Chosen(p, tiles_of[0](p))


class Extras:
    """The optional arrays of kernels that go through lists; as they are where there is no mask.

    Parameters
    ----------
    problem, gpu
        What it is prepared for.
    inputs : named tuple of Layout
        Of the call.
    tiles : Tiles
        What is listed.

    Attributes
    ----------
    layouts : tuple
        As `numba_flash.cuda.runtime.launch.Launch` wants them.
    launches : tuple of Launch
        What makes the lists.
    made : Made
        Layouts of what they make, if there is a mask.
    """

    def __init__(self, problem, gpu, inputs, tiles: TileShape):
        p, t = problem, tiles
        self.layouts, self.launches = grid.extras_layouts(p, inputs), ()
        self._extras_of = build_extras(p.options)
        self._class, self._names = extras_class(p.options, t.names), t.names
        if not p.options.tiled:
            return
        masked = replace(p, options=p.options.as_mask)
        self._extras_of_mask = build_extras(masked.options)
        rows, columns = -(-p.nq // t.block_m), -(-p.nk // t.block_n)
        blocks, across = (columns, rows) if t.transposed else (rows, columns)
        own, all_heads = own_axes(p, inputs.mask), (*p.batch, p.hq)
        words, groups = 2 * -(-across // WORD), -(-rows // t.share) if t.share else 0
        made = Made(
            tiles=Layout.compact((*own, blocks, 1 + across), "int32"),
            bits=Layout.compact((*own, blocks, words), "uint32") if t.share or t.bits else None,
            order=Layout.compact((*own, blocks + 1, groups), "int32") if t.share else None,
            queue=Layout.compact((*own, 1, blocks + 1), "int32") if t.queue else None,
        )
        self.made = made
        self._scratch = Scratch(made, [f"the mask's {name}" for name in Made._fields])
        builder, config, lists = _builder(masked, inputs.mask, t)
        make = Launch(
            builder,
            (masked.options.arrays, t.block_m, t.block_n, *config),
            gpu,
            grid=-(-math.prod(own) * blocks // lists),
            threads=32 * LISTS if lists > 1 else THREADS,
            operands=((made.tiles, 5), (made.bits, 5)),
            extras=grid.extras_layouts(masked, inputs),
            numbers=(p.nq, p.nk, p.low, p.high),
        )
        self.launches, self._operands = (make,), (("tiles", "bits"),)
        if t.share:
            count = Launch(
                "work.tile_lists.build_order",
                (t.share, ORDER_THREADS),
                gpu,
                grid=-(-math.prod(own) * groups // ORDER_THREADS),
                threads=ORDER_THREADS,
                operands=((made.bits, 5), (made.order, 5)),
            )
            self.launches += (count,)
            self._operands += (("bits", "order"),)
        if t.queue:
            queue = Launch(
                "work.tile_lists.build_queue",
                (QUEUE_THREADS,),
                gpu,
                grid=-(-math.prod(own) * blocks // (QUEUE_THREADS // 32)),
                threads=QUEUE_THREADS,
                operands=((made.tiles, 5), (made.queue, 5)),
            )
            self.launches += (queue,)
            self._operands += (("tiles", "queue"),)
        wanted = (getattr(made, name) for name in t.names)
        self.layouts += tuple((x, (*all_heads, *x.shape[3:])) for x in wanted)

    def of(self, inputs):
        """The arrays of a call; its lists are made."""
        extras = self._extras_of(inputs)
        if not self.launches:
            return extras
        made = self._scratch.beside(inputs.q)
        for launch, names in zip(self.launches, self._operands, strict=True):
            of_mask = self._extras_of_mask(inputs) if launch is self.launches[0] else ()
            launch(*[getattr(made, name) for name in names], extras=of_mask)
        return self._class(*extras, *[getattr(made, name) for name in self._names])


def _builder(p, mask, tiles: TileShape) -> tuple[str, tuple, int]:
    """Of the kernel that makes lists, the rest of its configuration, and lists of a block."""
    if p.options.blocks is not None:
        return "work.block_lists.build", (tiles.transposed, LISTS), LISTS
    width = next(w for w in WIDTHS if w == 1 or in_vectors(p, mask, w))
    return "work.tile_lists.build", (width, tiles.transposed), 1


def own_axes(p, mask) -> tuple[int, int, int]:
    """Batch and heads of lists: 1 where they are the same for all, as far as the host knows."""
    varies = [n if stride else 1 for n, stride in zip(mask.shape, mask.strides, strict=True)]
    b0, b1, heads, *_ = [1] * (5 - len(varies)) + varies
    ragged = p.options.q_lengths or p.options.kv_lengths
    return (*(p.batch if ragged else (b0, b1)), heads)
