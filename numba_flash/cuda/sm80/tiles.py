"""Tiles of the `sm80` tier, with what was measured, and how they lie in shared memory. Numba is not
imported here.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

CHUNK = 8  # elements of 16 bits that are copied at a time
WARP, ROWS = 32, 16  # threads of a warp; rows of one of its products
KEYS = 32  # in the order of `numba_flash.cuda.fragment.place_of_key`


def padded(head_dim: int) -> int:
    """Columns of a tile: whole steps of a product."""
    return -(-head_dim // 16) * 16


def pitch(head_dim: int) -> int:
    """Bytes from one row of a tile to the next: an odd number of chunks, so that 8 rows lie in
    different banks.
    """
    return 2 * (padded(head_dim) + CHUNK)


@dataclass(frozen=True)
class Tile:
    """Shape of a block of the forward pass.

    Attributes
    ----------
    warps, m_tiles : int
        Warps of a block; times 16, the rows of each.
    block_n : int
        Keys of a tile.
    stages : int
        Tiles of K and of V that there is room for.
    q_registers : bool
        Q stays in registers.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    """

    warps: int
    m_tiles: int
    block_n: int
    stages: int
    q_registers: bool
    min_blocks: int

    @property
    def block_m(self) -> int:
        return ROWS * self.m_tiles * self.warps

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def shared_bytes(self, d: int, dv: int) -> int:
        """Q, or O on its way out; K and V."""
        q = self.block_m * max(pitch(d), pitch(dv))
        return q + self.stages * self.block_n * (pitch(d) + pitch(dv))


class BackwardLayout(NamedTuple):
    """Where a block of the backward pass keeps what in shared memory, in bytes: tiles of K, V, Q,
    dO, dS^T, P^T, the lse and delta of queries; what there is in all; and pitches.
    """

    k: int
    v: int
    q: int
    do: int
    ds: int
    p: int
    rows: int
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
        and dV; P and dS then go through shared memory (`numba_flash.cuda.sm80.backward_shared`).
    dq_parts : int
        A warp makes so many parts of its columns of dQ one after the other.
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

    @property
    def kernel(self) -> str:
        """What builds the main kernel."""
        return "sm80.backward.build" if self.ways == 1 else "sm80.backward_shared.build"

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
        pitch_k, pitch_v = pitch(self.padded(d)), pitch(self.padded(dv))
        pitch_ds = pitch(self.block_m)
        p = self.block_n * pitch_ds
        sizes = (
            *(self.block_n * pitch_k, self.block_n * pitch_v),
            *(self.stages * self.block_m * pitch_k, self.stages * self.block_m * pitch_v),
            *((p, p) if self.ways > 1 else (self.stages * p, 0)),
            self.stages * 2 * 4 * self.block_m,
        )
        starts = accumulate(sizes, initial=0)
        return BackwardLayout(*starts, pitch_k, pitch_v, pitch_ds)


class Hardware(NamedTuple):
    """What differs between the GPUs that the tier serves.

    Attributes
    ----------
    turing : bool
        Products of 8 along the sum, no copies that go on, no bfloat16.
    shared_limit : int
        Bytes of shared memory that a block may have.
    """

    turing: bool
    shared_limit: int


KB = 1024
# CUDA C++ Programming Guide, "Compute Capabilities": shared memory of a block; 99 KB elsewhere.
SHARED_LIMIT = {
    (7, 5): 64 * KB,
    **dict.fromkeys([(8, 0), (8, 7)], 163 * KB),
    **dict.fromkeys([(9, 0), (10, 0), (10, 3), (11, 0)], 227 * KB),
}


def hardware(capability: tuple[int, int]) -> Hardware:
    """Of a GPU of this compute capability."""
    return Hardware(capability < (8, 0), SHARED_LIMIT.get(capability, 99 * KB))


class Row(NamedTuple):
    """The tile that serves head dimensions up to `d`, where a block may have `shared` bytes."""

    d: int
    shared: int
    tile: Tile


# By each row that was measured: TFLOP/s of bfloat16 on an H200 with N = 4096, full and causal, and
# those of another tile (FlashAttention-2: 293, 276 with D = 64; 350, 299; 320, 276). Two blocks run
# on a multiprocessor, or one of 8 warps. The other rows are chosen for room and registers.
FORWARD_TILES = (
    # 334, 314; Tile(4, 2, 128, 2, False, 2), which spills, 345, 316
    Row(64, 163 * KB, Tile(4, 2, 64, 2, True, 2)),
    Row(64, 64 * KB, Tile(4, 2, 64, 1, False, 2)),  # 306, 297
    # 367, 342 with 108 bytes spilled outside the products; Tile(4, 2, 32, 2, False, 2) 365, 338
    Row(128, 163 * KB, Tile(4, 2, 64, 1, False, 2)),
    Row(128, 99 * KB, Tile(8, 2, 32, 1, False, 1)),
    Row(128, 64 * KB, Tile(4, 1, 32, 2, True, 1)),
    # 304, 270; Tile(8, 1, 64, 1, False, 1) 307, 270, but 177 instead of 193 with N = 512, causal
    Row(256, 227 * KB, Tile(4, 1, 64, 1, False, 2)),
    Row(256, 163 * KB, Tile(8, 1, 64, 1, False, 1)),
    Row(256, 99 * KB, Tile(4, 1, 32, 1, False, 1)),
    Row(256, 64 * KB, Tile(2, 1, 32, 1, False, 1)),
)


# With options that change scores or weights, which take registers; none was measured. Assembled for
# Hopper, 64 scores of a lane and 32 columns with D = 128 fit; for other GPUs they spill.
MODIFIED_TILES = (
    Row(64, 227 * KB, Tile(4, 2, 64, 2, False, 2)),
    Row(64, 64 * KB, Tile(4, 2, 32, 2, False, 2)),
    Row(128, 227 * KB, Tile(4, 2, 32, 2, False, 2)),
    Row(128, 163 * KB, Tile(4, 1, 64, 1, False, 2)),
    Row(128, 99 * KB, Tile(8, 1, 64, 1, False, 1)),
    Row(128, 64 * KB, Tile(4, 1, 32, 2, True, 1)),
    *(row for row in FORWARD_TILES if row.d == 256),
)


def forward_tile(problem, hardware: Hardware) -> Tile:
    """The first that serves these head dimensions and fits."""
    d = max(problem.d, problem.dv)
    tiles = MODIFIED_TILES if problem.options.modifies else FORWARD_TILES
    return next(row.tile for row in tiles if d <= row.d and row.shared <= hardware.shared_limit)


BACKWARD_TILES = (
    Row(64, 227 * KB, BackwardTile(4, 2, 64, 32, (2, 2), 2, 2, 4)),
    Row(64, 99 * KB, BackwardTile(4, 2, 64, 32, (2, 2), 1, 2, 4)),
    Row(64, 64 * KB, BackwardTile(8, 1, 32, 16, (2, 4), 1, 1, 4)),
    Row(128, 227 * KB, BackwardTile(8, 2, 64, 32, (2, 4), 2, 1, 4, 2)),
    Row(128, 163 * KB, BackwardTile(8, 2, 64, 32, (2, 4), 1, 1, 4, 2)),
    Row(128, 99 * KB, BackwardTile(8, 1, 64, 32, (2, 4), 1, 1, 4, 2)),
    Row(128, 64 * KB, BackwardTile(8, 1, 32, 16, (2, 4), 1, 1, 4, 2)),
    Row(256, 227 * KB, BackwardTile(8, 2, 64, 16, (2, 4), 2, 1, 2, 4)),
    Row(256, 163 * KB, BackwardTile(8, 2, 64, 16, (2, 4), 1, 1, 2, 4)),
    Row(256, 99 * KB, BackwardTile(4, 1, 32, 16, (1, 4), 1, 1, 2, 2)),
    Row(256, 64 * KB, BackwardTile(2, 1, 32, 16, (1, 2), 1, 1, 2, 2, 2)),
)


# With options that change scores or weights: fewer scores at a time, for registers.
MODIFIED_BACKWARD_TILES = (
    Row(64, 227 * KB, BackwardTile(4, 2, 64, 16, (2, 2), 2, 2, 4)),
    Row(64, 99 * KB, BackwardTile(4, 2, 64, 16, (2, 2), 1, 2, 4)),
    Row(64, 64 * KB, BackwardTile(8, 1, 32, 16, (2, 4), 1, 1, 4)),
    Row(128, 227 * KB, BackwardTile(8, 1, 64, 32, (2, 4), 2, 1, 4)),
    Row(128, 163 * KB, BackwardTile(8, 1, 64, 32, (2, 4), 1, 1, 4)),
    Row(128, 64 * KB, BackwardTile(8, 1, 32, 16, (2, 4), 1, 1, 4, 2)),
    *BACKWARD_TILES[7:],
)


def backward_tile(problem, hardware: Hardware) -> BackwardTile:
    """The first that serves these head dimensions and fits."""
    d = max(problem.d, problem.dv)
    tiles = MODIFIED_BACKWARD_TILES if problem.options.modifies else BACKWARD_TILES
    return next(row.tile for row in tiles if d <= row.d and row.shared <= hardware.shared_limit)


class DbiasLayout(NamedTuple):
    """Where a block of the gradient of the bias keeps what in shared memory, in bytes: Q, dO, the
    lse and delta of queries, K, V; and what there is in all.
    """

    q: int
    do: int
    rows: int
    k: int
    v: int
    bytes: int


@dataclass(frozen=True)
class DbiasTile:
    """Shape of a block of the gradient of the bias.

    Attributes
    ----------
    warps_m, warps_n, m_tiles : int
        Warps along queries and along keys; times 16, the queries of each.
    parts : int
        Times 32, the keys of a warp; it has scores of 32 of them in registers at a time.
    stages : int
        Tiles of Q, K, V and dO that there is room for.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    """

    warps_m: int
    warps_n: int
    m_tiles: int
    parts: int
    stages: int
    min_blocks: int

    @property
    def block_m(self) -> int:
        return ROWS * self.m_tiles * self.warps_m

    @property
    def block_n(self) -> int:
        return KEYS * self.parts * self.warps_n

    @property
    def threads(self) -> int:
        return WARP * self.warps_m * self.warps_n

    def layout(self, d: int, dv: int) -> DbiasLayout:
        of_queries, of_keys = self.stages * self.block_m, self.stages * self.block_n
        sizes = (
            *(of_queries * pitch(d), of_queries * pitch(dv), of_queries * 8),
            *(of_keys * pitch(d), of_keys * pitch(dv)),
        )
        return DbiasLayout(*accumulate(sizes, initial=0))


class DbiasRow(NamedTuple):
    """The tile that serves head dimensions up to `d` and a bias of `bias` bytes an element, where a
    block may have `shared` bytes.
    """

    d: int
    bias: int
    shared: int
    tile: DbiasTile


DBIAS_TILES = (
    DbiasRow(32, 2, 99 * KB, DbiasTile(4, 2, 2, 2, 2, 1)),
    DbiasRow(64, 2, 163 * KB, DbiasTile(4, 2, 2, 2, 2, 1)),
    DbiasRow(64, 4, 64 * KB, DbiasTile(4, 2, 2, 1, 1, 1)),
    DbiasRow(128, 4, 163 * KB, DbiasTile(4, 2, 2, 1, 1, 1)),
    DbiasRow(128, 4, 99 * KB, DbiasTile(4, 2, 1, 1, 1, 1)),
    DbiasRow(128, 4, 64 * KB, DbiasTile(2, 1, 2, 1, 1, 1)),
    DbiasRow(256, 4, 163 * KB, DbiasTile(2, 2, 2, 1, 1, 1)),
    DbiasRow(256, 4, 99 * KB, DbiasTile(2, 1, 1, 1, 1, 1)),
    DbiasRow(256, 4, 64 * KB, DbiasTile(1, 1, 1, 1, 1, 1)),
)


def dbias_tile(problem, hardware: Hardware) -> DbiasTile:
    """The first that serves these head dimensions and this bias, and fits."""
    d, size = max(problem.d, problem.dv), 4 if problem.options.bias == "float32" else 2
    return next(
        row.tile
        for row in DBIAS_TILES
        if d <= row.d and size <= row.bias and row.shared <= hardware.shared_limit
    )
