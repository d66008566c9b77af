"""What the kernels of a backward pass on Hopper hand to each other, from the host: how much memory
that takes.
"""

import math
from typing import NamedTuple

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.arguments.problem import Problem
from numba_flash.cuda.sm90.backward.backward_tiles import backward_tile, planes_backward_tile
from numba_flash.cuda.sm90.tiles import DQ_PART
from numba_flash.cuda.work import grid

# Bytes of dS at a time; as many as it takes to keep all multiprocessors busy, up to MOST_WORKSPACE;
# but at least FEWEST_BLOCKS blocks of keys, so that dq, which is kept as float32 in between, is not
# read and written for each of them.
WORKSPACE, MOST_WORKSPACE, FEWEST_BLOCKS = 2**30, 2**32, 8


class RowBlocks(NamedTuple):
    """Batch elements, heads, row blocks of a head, by which kernels number blocks of queries."""

    b0: int
    b1: int
    heads: int
    blocks: int


class Temporaries(NamedTuple):
    """Arrays that the kernels of one call hand to each other; None where a tile needs none.

    Attributes
    ----------
    rows : float32 (2, b0, b1, heads, rows)
        The lse in base 2 and delta, as kernels number rows.
    dq_sum : float32
        What there is of dQ, in the order of fragments.
    flags : int32, or None
        How many blocks of keys have added to each row block, and the number of the next work item.
    ds : float32, or None
        dS^T of some blocks of keys.
    """

    rows: Layout
    dq_sum: Layout
    flags: Layout | None
    ds: Layout | None

    def sums(self, p: Problem) -> int:
        """Bytes of `dq_sum`, and of `ds` where that is mostly padding."""
        of_ds = 0 if self.ds is None or self.rows.shape[-1] <= 2 * p.nq else self.ds.nbytes
        return self.dq_sum.nbytes + of_ds

    def scratch(self) -> Scratch:
        """Where such arrays come from."""
        return Scratch(self, ("rows", "sums of dq", "flags", "dS"))


def padded_sums(p) -> int:
    """Bytes of sums of dQ of a problem most of whose rows are padding; 0 of others."""
    tile = planes_backward_tile(p) if p.dtype == "float32" else backward_tile(p)
    row_blocks = row_blocks_of(p, tile)
    if row_blocks.blocks * tile.block_m <= 2 * p.nq:
        return 0
    return temporaries(p, tile, row_blocks, 1).sums(p)


def row_blocks_of(p, tile) -> RowBlocks:
    """Those of a problem."""
    if p.options.packed:
        return RowBlocks(1, 1, p.hq, grid.blocks(p, p.nq, tile.block_m))
    return RowBlocks(*p.batch, p.hq, grid.blocks(p, p.nq, tile.block_m))


def temporaries(p, tile, row_blocks: RowBlocks, multiprocessors: int) -> Temporaries:
    """Those of a problem."""
    rows = Layout.compact((2, *row_blocks[:3], row_blocks.blocks * tile.block_m), "float32")
    if tile.adds_dq:
        dq_sum = Layout.compact((*row_blocks, tile.consumers * DQ_PART), "float32")
        flags = Layout.compact((math.prod(row_blocks) + 1,), "int32")
        return Temporaries(rows, dq_sum, flags, None)
    blocks, parts = key_parts(p, tile, math.prod(row_blocks), multiprocessors)
    dq_sum = Layout.compact((*row_blocks, tile.block_m * p.d if parts > 1 else 0), "float32")
    ds = Layout.compact((*row_blocks, blocks * tile.ds_bytes // 4), "float32")
    return Temporaries(rows, dq_sum, None, ds)


def key_parts(p, tile, row_blocks: int, multiprocessors: int) -> tuple[int, int]:
    """(blocks of keys that dS is made for at a time, how many times): so many that work items fill
    turns of the multiprocessors.
    """
    blocks = max(1, grid.blocks(p, p.nk, tile.block_n))
    heads = max(1, p.hk * (1 if p.options.packed else math.prod(p.batch)))
    bytes_each = max(1, row_blocks * tile.ds_bytes)
    room = max(
        WORKSPACE // bytes_each,
        min(-(-multiprocessors // heads), MOST_WORKSPACE // bytes_each),
        FEWEST_BLOCKS,
    )
    most = min(room, blocks)
    turns = lambda at_a_time: -(-blocks // at_a_time) * -(-at_a_time * heads // multiprocessors)
    best = min(range(most, most // 2, -1), key=turns)
    return best, -(-blocks // best)
