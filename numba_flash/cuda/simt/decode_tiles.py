"""Tiles of few queries with many keys on any GPU. Numba is not imported here.

Such a problem takes as long as the memory needs for K and V, if enough of them is under way: a
chunk of K for each thread's registers, and some rows of V.
"""

from dataclasses import dataclass

MOST_COLUMNS = 4  # of O, that a thread has of each row
WARP = 32
MOST_FOLDS = 16  # threads that share a row, as one goes through what they have


@dataclass(frozen=True)
class DecodeTile:
    """Shape of a block that has a key of a tile for each thread.

    Attributes
    ----------
    rows : int
        Queries of all heads that read the same keys.
    threads : int
        Of a block, and keys of a tile.
    depth : int
        Columns of K that are staged at the same time.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    ahead : int
        Keys whose V a thread has under way at the same time, 4 or 8.
    group : int
        Heads that read the same keys.
    """

    rows: int
    threads: int
    depth: int
    min_blocks: int
    ahead: int = 4
    group: int = 1

    @property
    def block_m(self) -> int:
        return self.rows

    @property
    def block_n(self) -> int:
        return self.threads

    @property
    def folds(self) -> int:
        """Threads that share a row where its maximum or sum is made."""
        return min(self.threads // self.rows, MOST_FOLDS)

    def padded(self, head_dim: int) -> int:
        """Columns of Q and K in whole chunks."""
        return -(-head_dim // self.depth) * self.depth

    def lanes(self, head_dim_v: int) -> int:
        """Threads that share the columns of O; the others have other keys."""
        enough = max(-(-head_dim_v // MOST_COLUMNS), min(head_dim_v, WARP), self.ahead)
        return min(1 << (enough - 1).bit_length(), self.threads // 2)

    def pitch(self, columns: int, dtype: str) -> int:
        """Elements from one row of a shared array to the next: threads that read 16 bytes of rows
        next to each other hit different banks.
        """
        return columns + (2 if dtype == "float64" else 4)


# By accumulator, those of fewer rows first: these take fewer registers, so that more blocks have
# something under way. With one row a pass takes as long as a copy of as many bytes, with eight up
# to two thirds longer. Measured: docs/lab/any_gpu.md, `TILES`.
TILES = {
    "float32": (
        DecodeTile(1, 128, 32, 5, 8),
        DecodeTile(2, 128, 32, 4),
        DecodeTile(4, 128, 32, 3),
        DecodeTile(8, 128, 32, 3),
        DecodeTile(16, 128, 32, 2),
    ),
    "float64": (
        DecodeTile(1, 128, 16, 4),
        DecodeTile(2, 128, 16, 3),
        DecodeTile(4, 128, 16, 2),
        DecodeTile(8, 128, 16, 2),
    ),
}
SIMULATOR_TILE = DecodeTile(2, 8, 2, 1)
