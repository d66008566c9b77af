"""What tiles of the `sm90` tier have in common: warp groups, sizes of what lies in shared memory,
and tables. Numba is not imported here.
"""

from typing import Any, NamedTuple

from numba_flash.cuda.sm90.rings import Slots

WARP_GROUP = 128
KEYS = 64  # that a consumer owns in the backward pass
OUTPUT_ROWS = 64  # of O that a consumer stores at a time
WORK_BYTES, WORK_SLOTS, BOUND_BYTES = 64, 3, 32  # what consumers find of a work item, and note
WORK = Slots(WORK_BYTES, WORK_SLOTS)
SHARED_LIMIT = 227 * 1024
# Registers per thread of the producer's warp group, of the consumers'; by the number of consumers.
REGISTERS = {2: (40, 232), 3: (32, 160)}
# Threads that add up dQ: while one waits until its tile is in memory, the other one's comes.
# Consumers reckon with two.
ADDERS = 2
# Elements of dQ that a consumer of the backward pass hands over at a time, in the order of
# fragments.
DQ_PART = 64 * 64
STEP = 16  # columns that a product takes at a time; a plane of float32 has a multiple of that
MOST_FLOAT32 = 128  # head dimension


def padded(head_dim: int) -> int:
    """Columns of a plane (`numba_flash.cuda.passes.write_planes`)."""
    return -(-head_dim // STEP) * STEP


class WarpGroups:
    """Of a tile: its consumers, and a producer."""

    consumers: int
    block_m: int
    block_n: int

    @property
    def registers(self) -> tuple[int, int]:
        return REGISTERS[self.consumers]

    @property
    def threads(self) -> int:
        return WARP_GROUP * (self.consumers + 1)

    @property
    def relative_bytes(self) -> int:
        """Of what a `score_mod` adds for each distance (`numba_flash.cuda.score.relative`): a
        number for each diagonal of a tile.
        """
        return 4 * (self.block_m + self.block_n)


class Consumers(WarpGroups):
    """Of a tile whose consumers have 64 rows each."""

    @property
    def consumers(self) -> int:
        return self.block_m // 64


class Row(NamedTuple):
    """Of a table of tiles: the first whose limits a problem keeps serves it.

    Attributes
    ----------
    keys, d, dv : int
        Most keys, largest head dimension of q and k, and of v.
    tile
        What it is served with.
    """

    keys: int
    d: int
    dv: int
    tile: Any


ANY = 2**31


def fitting(table: tuple[Row, ...], problem):
    """The tile of the first row that serves a problem, or None."""
    p = problem
    fits = (row.tile for row in table if p.nk <= row.keys and p.d <= row.d and p.dv <= row.dv)
    return next(fits, None)
