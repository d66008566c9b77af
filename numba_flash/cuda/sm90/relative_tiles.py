"""Tiles of the `sm90` tier where sums of S begin with what a `score_mod` adds for each distance
(`numba_flash.cuda.relative`). Numba is not imported here.
"""

from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace

from numba_flash.cuda.sm90.tiles import (
    SHARED_LIMIT,
    BackwardTile,
    Tile,
    backward_tile,
    forward_tile,
    part_tile,
)
from numba_flash.cuda.swizzle import ALIGNMENT


class WithNumbers:
    """Of a tile where sums begin with what a `score_mod` adds for each distance
    (`numba_flash.cuda.relative`): with each tile of K, or of Q in the backward pass, comes a number
    for each of its diagonals.
    """

    @property
    def added_bytes(self) -> int:
        return 4 * (self.block_m + self.block_n)

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory, as without, and `added`."""
        layout = super().layout(head_dim, head_dim_v)
        layout.added = -(-(layout.bytes - ALIGNMENT) // 16) * 16  # of bulk copies
        layout.bytes = layout.added + self.stages * self.added_bytes + ALIGNMENT
        return layout


@dataclass(frozen=True)
class RelativeTile(WithNumbers, Tile):
    """Shape of a block of the forward pass with these numbers."""


@dataclass(frozen=True)
class RelativeBackwardTile(WithNumbers, BackwardTile):
    """The same in the backward pass."""


def relative_tile(problem, split=False) -> RelativeTile:
    """That of both where sums begin with what a `score_mod` adds; where there is no room for these
    numbers, O is stored by single panels, or tiles have 16 keys less.
    """
    p = problem
    tile = RelativeTile(**asdict(part_tile(p) if split else forward_tile(p)))
    fewer = replace(tile, o_panels=1)
    tiles = (tile, fewer, replace(fewer, block_n=tile.block_n - 16))
    return next(each for each in tiles if each.layout(p.d, p.dv).bytes <= SHARED_LIMIT)


def relative_backward_tile(problem) -> RelativeBackwardTile:
    """That of the main kernel of the backward pass, likewise."""
    return RelativeBackwardTile(**asdict(backward_tile(problem)))
