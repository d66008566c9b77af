"""What a kernel of this tier is made for: its tile. Which there are, the tier knows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Shape of a register micro-tile, and of the block that shares it (see
    `numba_flash.cuda.simt.tiles`).

    Attributes
    ----------
    rows, cols : int
        Scores per thread.
    threads_m, threads_n : int
        Threads along rows and columns of the block's tile.
    depth, depth_outer : int
        Length of the staged chunks along the head dimension, and along the second product's sum.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    product : int
        Tensor cores multiply float64, and take so many terms of a sum at once; 0 if they do not.
    """

    rows: int
    cols: int
    threads_m: int
    threads_n: int
    depth: int
    depth_outer: int
    min_blocks: int
    product: int = 0

    @property
    def block_m(self) -> int:
        return self.rows * self.threads_m

    @property
    def block_n(self) -> int:
        return self.cols * self.threads_n

    @property
    def threads(self) -> int:
        return self.threads_m * self.threads_n

    def head_cols(self, head_dim: int) -> int:
        """Columns per thread of a (rows, head_dim) accumulator; beyond two, and on tensor cores,
        padded to whole groups of four for vector loads.
        """
        cols = -(-head_dim // self.threads_n)
        if self.product:
            return -(-cols // 4) * 4
        return cols if cols <= 2 else -(-cols // 4) * 4
