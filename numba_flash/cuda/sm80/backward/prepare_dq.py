"""dQ from dS in memory in the `sm80` tier, from the host: which problems, and its launch."""

import math

import numpy as np

from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.options import PLAIN
from numba_flash.cuda.arguments import chunked
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.sm80.backward.backward_tiles import DqTile
from numba_flash.cuda.work import grid

MOST_BYTES = 2**32  # of dS; beyond that dQ is added up in memory
# Tiles of dS that are on their way; a fourth stage gains nothing. At D = 256 a pass with dS in
# memory is a fifth faster than one with sums of dQ there. Measured: docs/lab/tensor_cores.md,
# `STAGES`.
STAGES = 3


def serves(p, inputs, tile, turing: bool) -> bool:
    """True if dS of a problem without options goes to memory: where there are so many columns that
    warps share dK and dV, and if there is room.
    """
    if p.dtype not in ("float16", "bfloat16") or p.options.structure != PLAIN:
        return False
    if tile.ways != 4 or p.hq * p.nq * p.nk == 0:
        return False
    if turing or not chunked(inputs.do, inputs.q, inputs.k, inputs.v):
        return False
    return math.prod(slots(p, tile).shape) * 4 <= MOST_BYTES


def slots(p, tile) -> Layout:
    """dS^T as float32, (b0, b1, heads, row blocks, blocks of keys times half a tile)."""
    blocks = grid.blocks(p, p.nq, tile.block_m), grid.blocks(p, p.nk, tile.block_n)
    words = tile.block_m * tile.block_n // 2
    return Layout.compact((*p.batch, p.hq, blocks[0], blocks[1] * words), "float32")


def launch(this) -> Launch:
    """The kernel of a `numba_flash.cuda.sm80.backward.prepare_backward.Pass`."""
    p, tile = this.p, DqTile(2, 4, STAGES, this.tile)
    return Launch(
        f"{this.loops[1]}.build",
        (p.dtype, this.shape, tile),
        this.gpu,
        grid=grid.items(p, p.nq, p.hq, tile.block_m),
        threads=tile.threads,
        shared_bytes=tile.shared_bytes(p.d),
        operands=((this.temporaries.dq_sum, 5), (this.inputs.k, 5), (this.results.dq, 5)),
        numbers=(p.low, p.high, np.float32(p.scale)),
    )
