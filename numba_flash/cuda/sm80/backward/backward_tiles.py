"""Tiles of the `sm80` tier's backward pass, what was measured, how they lie in shared memory. Numba
is not imported here.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from numba_flash.cuda.arguments import planes_of
from numba_flash.cuda.sm80.tiles import KB, ROWS, WARP, Hardware, Row, first, pitch


class BackwardLayout(NamedTuple):
    """Where a block of the backward pass keeps what in shared memory, in bytes: tiles of K, V, Q,
    dO, dS^T, P^T, the lse and delta of queries, factors of parts of dS^T; what there is in all; and
    pitches.
    """

    k: int
    v: int
    q: int
    do: int
    ds: int
    p: int
    rows: int
    factors: int
    bytes: int
    pitch_k: int
    pitch_v: int
    pitch_ds: int


@dataclass(frozen=True)
class BackwardTile:
    """Shape of a block of the backward pass.

    Attributes
    ----------
    warps, m_tiles : int
        Warps of a block; times 16, the keys of each.
    block_m, columns : int
        Queries of a tile, and those of which a warp has scores in registers at a time.
    dq_warps : tuple of two ints
        Warps along the rows and the columns of dQ.
    stages : int
        Tiles of Q, dO and dS that there is room for.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    share : int
        Row blocks that share a flag.
    ways : int
        So many warps share keys, each with its part of their scores, and of the columns of their dK
        and dV; P and dS then go through shared memory
        (`numba_flash.cuda.sm80.backward.backward_shared`).
    dq_parts : int
        A warp makes so many parts of its columns of dQ one after the other.
    planes : int
        Of float32, how many numbers of 16 bits each has in its place.
    slots : bool
        Tiles of dS go to memory, and another kernel makes dQ of them (`DqTile`).
    """

    warps: int
    m_tiles: int
    block_m: int
    columns: int
    dq_warps: tuple[int, int]
    stages: int
    min_blocks: int
    share: int = 4
    ways: int = 1
    dq_parts: int = 1
    planes: int = 0
    slots: bool = False

    @property
    def block_n(self) -> int:
        return ROWS * self.m_tiles * self.warps // self.ways

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def padded(self, head_dim: int) -> int:
        """Columns of a tile: whole steps of a product for each of the warps along dQ's columns."""
        unit = ROWS * max(self.dq_warps[1] * self.dq_parts, self.ways)
        return -(-head_dim // unit) * unit

    def layout(self, d: int, dv: int) -> BackwardLayout:
        planes = max(1, self.planes)
        pitch_k, pitch_v = pitch(planes * self.padded(d)), pitch(planes * self.padded(dv))
        pitch_ds = pitch(planes * self.block_m)
        p = self.block_n * pitch_ds
        sizes = (
            *(self.block_n * pitch_k, self.block_n * pitch_v),
            *(self.stages * self.block_m * pitch_k, self.stages * self.block_m * pitch_v),
            *((p, p) if self.ways > 1 else (self.stages * p, 0)),
            self.stages * 2 * 4 * self.block_m,
            4 * self.warps * self.block_m // self.columns if self.planes else 0,
        )
        starts = accumulate(sizes, initial=0)
        return BackwardLayout(*starts, pitch_k, pitch_v, pitch_ds)


@dataclass(frozen=True)
class DqTile:
    """Shape of a block of dQ, which is made of dS in memory.

    Attributes
    ----------
    warps_m, warps_n : int
        Warps along the rows and the columns of dQ.
    stages : int
        Tiles of K and dS that there is room for.
    of_slots : BackwardTile
        Of the kernel that dS is of: two of its row blocks are a block of this one, and its blocks
        of keys are tiles.
    """

    warps_m: int
    warps_n: int
    stages: int
    of_slots: BackwardTile

    @property
    def block_m(self) -> int:
        return 2 * self.of_slots.block_m

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def shared_bytes(self, d: int) -> int:
        """Tiles of K and dS, or dQ on its way out."""
        row, rows = pitch(self.of_slots.padded(d)), self.block_m
        return max(self.stages * self.of_slots.block_n * (row + pitch(rows)), rows * row)


# In the deterministic order, over FlashAttention-2, N = 4096 and 16384: D = 64 1.13, 1.05, D = 128
# 1.07, 1.01, D = 256 0.98, 0.91, and 1.13, 1.10 with dS in memory (see `prepare_dq`). With a flag
# for each four row blocks D = 128 0.99, 0.94.
BACKWARD_TILES = (
    Row(64, 227 * KB, BackwardTile(4, 2, 64, 32, (2, 2), 2, 2, 4)),
    Row(64, 99 * KB, BackwardTile(4, 2, 64, 32, (2, 2), 1, 2, 4)),
    Row(64, 64 * KB, BackwardTile(8, 1, 32, 16, (2, 4), 1, 1, 4)),
    Row(128, 227 * KB, BackwardTile(8, 2, 64, 32, (2, 4), 2, 1, 1, 2)),
    Row(128, 163 * KB, BackwardTile(8, 2, 64, 32, (2, 4), 1, 1, 1, 2)),
    Row(128, 99 * KB, BackwardTile(8, 1, 64, 32, (2, 4), 1, 1, 4, 2)),
    Row(128, 64 * KB, BackwardTile(8, 1, 32, 16, (2, 4), 1, 1, 4, 2)),
    Row(256, 227 * KB, BackwardTile(8, 2, 64, 16, (2, 4), 2, 1, 1, 4)),
    Row(256, 163 * KB, BackwardTile(8, 2, 64, 16, (2, 4), 1, 1, 1, 4)),
    Row(256, 99 * KB, BackwardTile(4, 1, 32, 16, (1, 4), 1, 1, 2, 2)),
    Row(256, 64 * KB, BackwardTile(2, 1, 32, 16, (1, 2), 1, 1, 2, 2, 2)),
)

# With options that bend scores: fewer of them at a time, or fewer columns, for registers.
BENT_BACKWARD_TILES = (
    Row(64, 227 * KB, BackwardTile(4, 2, 64, 16, (2, 2), 2, 2, 4)),
    Row(64, 99 * KB, BackwardTile(4, 2, 64, 16, (2, 2), 1, 2, 4)),
    Row(64, 64 * KB, BackwardTile(8, 1, 32, 16, (2, 4), 1, 1, 4)),
    Row(128, 227 * KB, BackwardTile(8, 1, 64, 32, (2, 4), 2, 1, 4)),
    Row(128, 163 * KB, BackwardTile(8, 1, 64, 32, (2, 4), 1, 1, 4)),
    *BACKWARD_TILES[5:],
)

# Of float32, likewise. Rows of dQ of a warp are of one part of the scores.
PLANES_BACKWARD_TILES = (
    # 76.1; BackwardTile(4, 1, 64, 32, (2, 2), 1, 3, 4) 71.5
    Row(32, 163 * KB, BackwardTile(4, 2, 64, 32, (2, 2), 1, 2, 4)),
    # 79.7; BackwardTile(4, 1, 32, 32, (2, 2), 1, 3, 4) 79.9
    Row(64, 163 * KB, BackwardTile(4, 1, 64, 32, (2, 2), 1, 2, 4)),
    # 86.8; BackwardTile(4, 1, 32, 32, (2, 2), 1, 2, 4) 83.9
    Row(128, 227 * KB, BackwardTile(8, 1, 32, 32, (2, 4), 1, 1, 4)),
    Row(128, 163 * KB, BackwardTile(4, 1, 32, 32, (2, 2), 1, 1, 4)),
)

# Where options take the registers of the first. B = 384, H = 4, N = 384, D = 32 with a bias on an
# H200: 1027 us, with 120 bytes spilled; two blocks of it 1229, of two tiles of keys, 16 queries at
# a time, 1099.
MODIFIED_PLANES_BACKWARD_TILE = Row(32, 163 * KB, BackwardTile(4, 1, 64, 32, (2, 2), 1, 3, 4))


def backward_tile(problem, hardware: Hardware) -> BackwardTile:
    """The first that serves these head dimensions and fits."""
    if problem.dtype == "float32":
        tiles = PLANES_BACKWARD_TILES
        if problem.options.modifies:
            tiles = (MODIFIED_PLANES_BACKWARD_TILE, *tiles[1:])
        tile = first(tiles, max(problem.d, problem.dv), hardware).tile
        return replace(tile, planes=planes_of(problem))
    tiles = BENT_BACKWARD_TILES if problem.options.bends else BACKWARD_TILES
    return first(tiles, max(problem.d, problem.dv), hardware).tile
