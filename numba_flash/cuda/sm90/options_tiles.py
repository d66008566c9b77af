"""Tiles of the backward pass on Hopper with bias, mask, dropout or a function of the score. Numba is
not imported here.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

from numba_flash.cuda.sm90.tiles import BackwardTile, Row, _first

NOTE_BYTES = 16  # of what is written down about a tile of queries
MOST = 128  # head dimension


@dataclass(frozen=True)
class OptionsBackwardTile(BackwardTile):
    """Shape of a block's work.

    Attributes
    ----------
    block_m, stages, do_stages : int
        As those of `BackwardTile`.
    part : int
        Queries of a fragment: a consumer goes through a tile in parts, for registers.
    """

    part: int = 64
    ahead: bool = False
    kernel: ClassVar[str] = "sm90.backward_options.build"

    @property
    def columns(self) -> int:
        return self.part

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory, as `BackwardTile`'s, and `notes` of the tiles of queries."""
        layout = super().layout(head_dim, head_dim_v)
        layout.notes = -(-layout.bytes // NOTE_BYTES) * NOTE_BYTES - layout.ALIGNMENT
        layout.bytes = layout.notes + NOTE_BYTES * self.stages + layout.ALIGNMENT
        return layout


# Chosen by registers.
TILES = (
    Row(2**31, 64, 64, OptionsBackwardTile(128, 2, 2, part=64)),
    Row(2**31, MOST, MOST, OptionsBackwardTile(64, 3, 2, part=32)),
)


def backward_options_tile(problem) -> OptionsBackwardTile:
    """Tile of the main kernel."""
    return _first(TILES, problem)
