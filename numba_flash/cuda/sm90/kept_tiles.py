"""Tiles of the forward kernel that keeps its part of a bias in shared memory. Numba is not imported
here.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

from numba_flash.cuda.sm90.tiles import SHARED_LIMIT, Consumers, lay_out
from numba_flash.cuda.swizzle import NARROW, NARROW_ROW_BYTES

ROWS, STEP = 128, 16  # of a block; keys of a product
MOST_KEYS, MOST_STAGES = 192, 2  # of a tile, for registers; that help
MOST = NARROW  # columns of a tile


@dataclass(frozen=True)
class KeptTile(Consumers):
    """Shape of a block's work.

    Attributes
    ----------
    block_m, block_n : int
        Rows and columns of the score tile; 64 rows per consumer, columns a multiple of 16.
    tiles : int
        Of all keys.
    stages : int
        Slots of the rings of K and of V.
    wide : bool
        The bias is kept as float32, else as it is, in 16 bits.
    """

    block_m: int
    block_n: int
    tiles: int
    stages: int
    wide: bool
    q_stages: ClassVar[int] = 1

    @property
    def kept_bytes(self) -> int:
        """Of the bias."""
        return self.block_m * self.block_n * self.tiles * (4 if self.wide else 2)

    def layout(self) -> SimpleNamespace:
        """Shared memory: rings ``q k v`` as `numba_flash.cuda.sm90.pipeline` wants them, after the
        bias, and the `bytes` of all.
        """
        rings = {
            "q": (self.block_m * NARROW_ROW_BYTES, self.q_stages),
            "k": (self.block_n * NARROW_ROW_BYTES, self.stages),
            "v": (self.block_n * NARROW_ROW_BYTES, self.stages),
        }
        return lay_out(rings, self.kept_bytes, kept=0)


def kept_tile(problem) -> KeptTile | None:
    """That for a problem with such a bias, if it can be kept: as float32, which takes two
    instructions fewer for each score, or in 16 bits.
    """
    p = problem
    tiles = -(-p.nk // MOST_KEYS)
    block_n = -(-p.nk // (tiles * STEP)) * STEP
    kinds = (True,) if p.options.bias == "float32" else (True, False)
    wanted = (
        KeptTile(ROWS, block_n, tiles, stages, wide)
        for wide in kinds
        for stages in range(MOST_STAGES, 0, -1)
    )
    return next((tile for tile in wanted if tile.layout().bytes <= SHARED_LIMIT), None)
