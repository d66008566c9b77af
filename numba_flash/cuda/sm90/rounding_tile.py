"""Tiles of the backward pass on Hopper where a warp rounds dQ (`numba_flash.cuda.sm90.round_dq`),
and what that has in shared memory. Numba is not imported here.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from numba_flash.cuda.sm90.tiles import BackwardTile
from numba_flash.cuda.swizzle import ALIGNMENT

ROWS, COLUMNS = 64, 32  # of dQ that it rounds at a time
PARTS = 64 // COLUMNS  # of what a consumer hands over
CHUNKS = COLUMNS // 8  # of their sums, each of them copied by itself
# Slots of what is rounded, and of sums, by queries of a tile: as many as there is room for, since
# sums on their way set the pace. With three of these and two of what is rounded, over that, H200,
# N = 512: D = 64 full 1.00, causal 0.94; D = 128 full 0.98, causal 0.98; N = 1024, 2048 0.99 to
# 1.01.
ROUNDED_SLOTS, SUM_SLOTS = {64: 1, 128: 2}, {64: 5, 128: 8}
ROUNDED_BYTES, CHUNK_BYTES = 2 * ROWS * COLUMNS, 4 * ROWS * COLUMNS // CHUNKS
WORDS_BYTES = 64  # of what it has written down


@dataclass(frozen=True)
class RoundingTile(BackwardTile):
    """A `BackwardTile` beside which there is room for that."""

    @property
    def rounded_slots(self) -> int:
        return ROUNDED_SLOTS[self.block_m]

    @property
    def sum_slots(self) -> int:
        return SUM_SLOTS[self.block_m]

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """The same, and after it `rounding`, what the warp has written down, `rounded` and `sums`.

        Matrices of 8 rows, swizzled, begin at a multiple of 512 bytes.
        """
        layout = super().layout(head_dim, head_dim_v)
        layout.rounding = layout.bytes - ALIGNMENT
        layout.rounded = -(-(layout.rounding + WORDS_BYTES) // ALIGNMENT) * ALIGNMENT
        layout.sums = layout.rounded + self.rounded_slots * ROUNDED_BYTES
        layout.bytes = layout.sums + self.sum_slots * CHUNK_BYTES + ALIGNMENT
        return layout
