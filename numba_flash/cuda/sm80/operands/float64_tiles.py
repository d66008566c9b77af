"""Tiles of float64 in the `sm80` tier, and how they lie in shared memory. Numba is not imported
here.

What a tile of a warp costs, M x N scores or results with K terms each: M N K / 32 clocks of a
Hopper multiprocessor's quarter for products, and, as all four read shared memory at 128 bytes a
clock, 8 / M + 8 / N times that to read the operands; 8 / M alone where A is in registers.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from numba_flash.arguments.options import SHARING
from numba_flash.cuda.sm80.tiles import KB, ROWS, WARP, Row

BYTES = 8  # of an element
# GPUs whose tensor cores multiply float64 faster than the rest of them does.
CAPABILITIES = (8, 0), (9, 0), (10, 0)
MOST = 128  # head dimension


def padded(head_dim: int, unit: int = ROWS) -> int:
    """Columns of a tile: whole rows of all banks."""
    return -(-head_dim // unit) * unit


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
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    terms : int
        Of a sum, that tensor cores take at once.
    """

    warps: int
    m_tiles: int
    block_n: int
    stages: int
    min_blocks: int
    terms: int = 16

    @property
    def group(self) -> int:
        """Heads whose queries are the rows of a tile: always one's alone."""
        return 0

    @property
    def block_m(self) -> int:
        return ROWS * self.m_tiles * self.warps

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def shared_bytes(self, d: int, dv: int) -> int:
        """Q; K and V."""
        d, dv = padded(d), padded(dv)
        return BYTES * (self.block_m * d + self.stages * self.block_n * (d + dv))


class BackwardLayout(NamedTuple):
    """Where a block of the backward pass keeps what in shared memory, in bytes: tiles of K, V, Q,
    dO, P^T, dS^T, the lse and delta of queries; what there is in all; and pitches.
    """

    k: int
    v: int
    q: int
    do: int
    p: int
    ds: int
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
    block_n, block_m : int
        Keys of a block, and queries of a tile.
    warps : int
        Of a block.
    scores, outputs : int
        Warps along the keys of S^T and dP^T, and of dK and dV; the others share their columns.
    dq : int
        Warps along the queries of dQ, likewise.
    stages : int
        Tiles of Q and dO that there is room for.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    share : int
        Row blocks that share a flag.
    terms : int
        Of a sum, that tensor cores take at once.
    """

    block_n: int
    block_m: int
    warps: int
    scores: int
    outputs: int
    dq: int
    stages: int = 1
    min_blocks: int = 1
    share: int = 1
    terms: int = 16

    planes, slots = 0, False

    @property
    def m_tiles(self) -> int:
        """Times 16, the keys of a warp's scores."""
        return self.block_n // self.scores // ROWS

    @property
    def shares_counters(self) -> bool:
        """True if lanes that share a counter of the dropout's generator have a query for each."""
        queries = self.block_m // (self.warps // self.scores) // 4  # of a lane
        return queries % (SHARING // (2 * self.m_tiles)) == 0

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def padded(self, head_dim: int) -> int:
        """Columns of a tile: whole lines for each of the warps along a result's columns."""
        return padded(head_dim, ROWS * self.warps // min(self.outputs, self.dq))

    def layout(self, d: int, dv: int) -> BackwardLayout:
        pitch_k, pitch_v = BYTES * self.padded(d), BYTES * self.padded(dv)
        pitch_ds = BYTES * self.block_m
        p = self.block_n * pitch_ds
        sizes = (
            *(self.block_n * pitch_k, self.block_n * pitch_v),
            *(self.stages * self.block_m * pitch_k, self.stages * self.block_m * pitch_v),
            *(p, p, self.stages * 2 * BYTES * self.block_m),
        )
        return BackwardLayout(*accumulate(sizes, initial=0), pitch_k, pitch_v, pitch_ds)


class DbiasLayout(NamedTuple):
    """Where a block of the gradient of the bias keeps what in shared memory, in bytes: Q, dO, K, V;
    what there is in all; and pitches.
    """

    q: int
    do: int
    k: int
    v: int
    bytes: int
    pitch_k: int
    pitch_v: int


@dataclass(frozen=True)
class DbiasTile:
    """Shape of a block of the gradient of the bias.

    Attributes
    ----------
    warps_m, warps_n : int
        Warps along queries, of which each has 16, and along keys.
    keys : int
        Of a warp.
    terms : int
        Of a sum, that tensor cores take at once.
    """

    warps_m: int
    warps_n: int
    keys: int
    terms: int = 16

    min_blocks = 1

    @property
    def block_m(self) -> int:
        return ROWS * self.warps_m

    @property
    def block_n(self) -> int:
        return self.keys * self.warps_n

    @property
    def threads(self) -> int:
        return WARP * self.warps_m * self.warps_n

    def layout(self, d: int, dv: int) -> DbiasLayout:
        pitch_k, pitch_v = BYTES * padded(d), BYTES * padded(dv)
        of_queries, of_keys = self.block_m, self.block_n
        sizes = of_queries * pitch_k, of_queries * pitch_v, of_keys * pitch_k, of_keys * pitch_v
        return DbiasLayout(*accumulate(sizes, initial=0), pitch_k, pitch_v)


# TFLOP/s of an H200 at N = 4096. Forward, D = 64: 35.1, 33.6 in sums of 8, 32.8 with tiles of 64
# keys, 31.3 with 4 warps; in another run 34.4, 35.4 with 16 warps and 16 keys, 31.1 with the next
# tile's scores among exponentials; D = 128: 40.5, 37.7 with 32 keys and one stage. Backward, D =
# 64: 42.1, 40.0 with tiles of 64 by 64; D = 128: 42.2, 41.6 with dK and dV of two warps' columns,
# 32.9 with tiles of 32 keys. simt reaches 20, 20, 12 and 9, torch with the whole matrix 12, 19, 28
# and 39. Tiles for less memory and up to D = 32 have not been timed.
FORWARD_TILES = (
    Row(64, 227 * KB, Tile(8, 1, 32, 2, 1)),
    Row(128, 227 * KB, Tile(8, 1, 16, 2, 1)),
    Row(64, 163 * KB, Tile(8, 1, 32, 2, 1, 4)),
)
# With fewer blocks of rows than multiprocessors.
SMALL_TILES = (Row(128, 227 * KB, Tile(4, 1, 32, 1, 1)),)
# With options that change scores or weights, which need registers. N = 2048, D = 64, a bias: 2.54
# ms on an H200; tiles of 64 by 32 2.92, of 128 by 32 2.56, with more registers in memory; torch
# with the whole matrix 3.67, simt 12.9.
MODIFIED_BACKWARD_TILES = (Row(64, 227 * KB, BackwardTile(64, 64, 8, 2, 4, 4)),)
BACKWARD_TILES = (
    Row(32, 227 * KB, BackwardTile(64, 64, 8, 2, 4, 4)),
    Row(64, 227 * KB, BackwardTile(128, 32, 8, 4, 4, 2)),
    Row(128, 227 * KB, BackwardTile(64, 32, 8, 4, 4, 2)),
    Row(32, 163 * KB, BackwardTile(64, 64, 8, 2, 4, 4, terms=4)),
    Row(64, 163 * KB, BackwardTile(64, 32, 8, 4, 2, 2, terms=4)),
    Row(128, 163 * KB, BackwardTile(32, 32, 8, 2, 2, 2, terms=4)),
)
# With dropout, where a lane of the one above has too few queries to share counters with others.
DROPOUT_BACKWARD_TILES = (Row(128, 163 * KB, BackwardTile(32, 32, 4, 2, 2, 2, terms=4)),)
# The first, N = 2048, D = 64, 16 heads, 2 in a batch, on an H200: all gradients 4.90 ms, torch with
# the whole matrix 4.06. The others have not been timed.
DBIAS_TILES = (
    Row(64, 227 * KB, DbiasTile(4, 2, 32)),
    Row(128, 227 * KB, DbiasTile(2, 4, 16)),
    Row(64, 163 * KB, DbiasTile(4, 2, 32, 4)),
    Row(128, 163 * KB, DbiasTile(2, 2, 16, 4)),
)


def _first(rows, problem, hardware):
    """The first that serves these head dimensions and fits, or None."""
    d = max(problem.d, problem.dv)
    fits = (row.tile for row in rows if d <= row.d and row.shared <= hardware.shared_limit)
    return next(fits, None)


def forward_tile(problem, hardware) -> Tile | None:
    """That of the forward pass; None if there is none."""
    return _first(FORWARD_TILES, problem, hardware)


def small_tile(problem, hardware, few: bool) -> Tile | None:
    """That for a problem with `few` blocks of rows; None for any other."""
    return _first(SMALL_TILES, problem, hardware) if few else None


def backward_tile(problem, hardware) -> BackwardTile:
    """That of the backward pass."""
    modified = MODIFIED_BACKWARD_TILES if problem.options.modifies else ()
    rows = (*modified, *BACKWARD_TILES)
    if problem.options.dropout:
        rows = [x for x in (*rows, *DROPOUT_BACKWARD_TILES) if x.tile.shares_counters]
    return _first(rows, problem, hardware)


def dbias_tile(problem, hardware, summed: bool) -> DbiasTile:
    """That of the gradient of a bias, whether or not it is `summed` over rows or columns."""
    return _first(DBIAS_TILES, problem, hardware)
