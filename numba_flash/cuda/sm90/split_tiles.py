"""Tiles for float32 in planes of float16 (`numba_flash.cuda.split`), and where a block keeps them
in shared memory. Numba is not imported here.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

from numba_flash.cuda.arguments import planes_of
from numba_flash.cuda.sm90.rings import lay_out
from numba_flash.cuda.sm90.tiles import (
    BOUND_BYTES,
    KEYS,
    WORK_BYTES,
    WORK_SLOTS,
    BackwardTile,
    Consumers,
)
from numba_flash.cuda.swizzle import PANEL, panel_bytes, panels

STEP = 16  # columns that a product takes at a time; a plane has a multiple of that
MOST = 128  # head dimension


def padded(head_dim: int) -> int:
    """Columns of a plane."""
    return -(-head_dim // STEP) * STEP


@dataclass(frozen=True)
class SplitTile(Consumers):
    """Shape of a block's work in the forward pass.

    Attributes
    ----------
    block_m, block_n : int
        Rows and columns of the score tile; 64 rows per consumer warp group, columns a multiple of
        16.
    q_stages, stages : int
        Slots of the ring of Q tiles, and of those of K and of V tiles.
    ping_pong : bool
        Consumers take turns at starting scores.
    planes : int
        Of each of q, k and v.
    """

    block_m: int
    block_n: int
    q_stages: int
    stages: int
    ping_pong: bool
    planes: int = 2

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory: rings ``q k v work`` as `numba_flash.cuda.sm90.pipeline` wants them, and
        the `bytes` of all. In a slot, the panels of the low plane come after those of the high one.
        """
        of = lambda columns, rows: self.planes * panels(columns) * panel_bytes(rows)
        rings = {
            "q": (of(head_dim, self.block_m), self.q_stages),
            "k": (of(head_dim, self.block_n), self.stages),
            "v": (of(head_dim_v, self.block_n), self.stages),
            "work": (WORK_BYTES, WORK_SLOTS),
        }
        return lay_out(rings, 0)


def split_tile(problem) -> SplitTile:
    """Tile of the forward kernel: of 128 keys, of which registers hold S and its low sums, or P in
    two planes, unless they have to hold O with more than 64 columns.
    """
    # float32 TFLOP/s on an H200, N = 4096 and 1024, when sums of S still were of all columns
    if max(problem.d, problem.dv) <= 64:
        # 168, 123; SplitTile(128, 176, 1, 2, True) 172, 120, (128, 64, 2, 4, True) 155, 114
        return SplitTile(128, 128, 1, 2, True, planes_of(problem))
    # 186, 132; SplitTile(128, 80, 1, 2, True) 188, 130, (128, 128, 1, 1, False) 178, 124
    return SplitTile(128, 64, 1, 2, True, planes_of(problem))


class SplitBackwardTile(BackwardTile):
    """Shape of a block's work in the backward pass, with head dimensions up to 64.

    Attributes and shared memory are those of a `BackwardTile`, where the two slots of dS^T are its
    planes. A consumer computes dQ from its own keys.
    """

    planes: ClassVar[int] = 2
    dq_parts: ClassVar[int] = 2  # of the same columns of a tile of dQ, to be added

    def width(self, head_dim: int) -> int:
        return padded(head_dim)

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """And ``largest``: a float32 for each warp of the consumers, behind the bounds."""
        layout = super().layout(head_dim, head_dim_v)
        layout.largest = layout.bounds + BOUND_BYTES * self.consumers
        return layout


class WideSplitBackwardTile(SplitBackwardTile):
    """The same with head dimensions up to 128: consumers share their keys, and each computes some
    columns of dQ, of which there are more than a panel.

    In shared memory there are also rings ``p``, of P^T in float32, and ``made``, of no memory:
    dS^T of a tile is there; and the ``power`` that undoes what it was multiplied by.
    """

    queries_apart: ClassVar[int] = KEYS  # and no keys
    dq_parts: ClassVar[int] = 1

    @property
    def block_n(self) -> int:
        return KEYS

    @property
    def more_rings(self) -> dict:
        return {"p": (4 * self.block_m * KEYS, 1), "made": (0, 1)}

    def width(self, head_dim: int) -> int:
        return max(padded(head_dim), PANEL + STEP)

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        layout = super().layout(head_dim, head_dim_v)
        layout.power = layout.largest  # the first consumer's, who has no dS^T
        return layout


# TFLOP/s of float32 on an H200, N = 4096: at D = 64 167; at 128 162, causal 153, where those of
# `sm80` reached 90 and 78.
def split_backward_tile(problem) -> SplitBackwardTile:
    """Tile of the main kernel of the backward pass."""
    if max(problem.d, problem.dv) <= PANEL:
        return SplitBackwardTile(64, 2, 2, False)
    return WideSplitBackwardTile(64, 2, 1, False)
