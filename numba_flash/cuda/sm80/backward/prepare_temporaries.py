"""What the kernels of a backward pass hand to each other, from the host."""

import math
from typing import NamedTuple

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.cuda.sm80.backward import backward_tiles, prepare_dq
from numba_flash.cuda.sm80.operands import float64_tiles
from numba_flash.cuda.work import grid


class Temporaries(NamedTuple):
    """Arrays that the kernels of one call hand to each other.

    Attributes
    ----------
    rows : float32 (2, b0, b1, heads, rows)
        The lse and delta, as kernels number rows.
    dq_sum : float32 (b0, b1, heads, row blocks, copies * BLOCK_M * D)
        Sums of dQ, in the order of fragments.
    flags : int32
        How many blocks of keys have added to each row block's copies, and the number of the next
        work item.
    """

    rows: Layout
    dq_sum: Layout
    flags: Layout

    def scratch(self) -> Scratch:
        """Where such arrays come from."""
        return Scratch(self, ("rows", "sums of dq", "flags"))


def temporaries_of(p, tile, copies: int) -> Temporaries:
    """Of a problem with this tile, whose sums of dQ have so many copies."""
    batch = (1, 1) if p.options.packed else p.batch
    blocks = (*batch, p.hq, grid.blocks(p, p.nq, tile.block_m))
    number = "float64" if p.dtype == "float64" else "float32"
    if tile.slots:
        dq_sum = prepare_dq.slots(p, tile)
    else:
        elements = copies * tile.block_m * tile.padded(p.d)
        dq_sum = Layout.compact((*blocks, elements), number)
    return Temporaries(
        rows=Layout.compact((2, *blocks[:3], blocks[3] * tile.block_m), number),
        dq_sum=dq_sum,
        flags=Layout.compact((math.prod(blocks) * copies + 1,), "int32"),
    )


def backward_tile(p, there):
    """The tile of the main loop of gradients of this dtype that knows every option."""
    of = float64_tiles if p.dtype == "float64" else backward_tiles
    return of.backward_tile(p, there)


def padded_sums(p, there) -> int:
    """Bytes of sums of dQ of a problem most of whose rows are padding; 0 of others."""
    if grid.is_decode_gradient(p):
        return 0
    found = temporaries_of(p, backward_tile(p, there), 1)
    return found.dq_sum.nbytes if found.rows.shape[-1] > 2 * p.nq else 0
