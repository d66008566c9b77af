"""Tiles of the gradient of the bias in the `sm80` tier. Numba is not imported here."""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from numba_flash.cuda.sm80.smem import over, smem
from numba_flash.cuda.sm80.tiles import KB, KEYS, ROWS, WARP, Hardware, padded, pitch


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
    # a bias of 16 heads, N = 2048, 4 in a batch, on an H200: 0.44 ms; the tile below it 0.46
    DbiasRow(64, 2, 227 * KB, DbiasTile(2, 2, 2, 2, 2, 2)),
    DbiasRow(32, 2, 99 * KB, DbiasTile(4, 2, 2, 2, 2, 1)),
    DbiasRow(64, 2, 163 * KB, DbiasTile(4, 2, 2, 2, 2, 1)),
    DbiasRow(64, 4, 64 * KB, DbiasTile(4, 2, 2, 1, 1, 1)),
    # a bias of 16 heads, N = 2048, 4 in a batch: 0.90 ms; DbiasTile(4, 2, 2, 1, 1, 1) 0.97
    DbiasRow(128, 4, 163 * KB, DbiasTile(2, 2, 2, 1, 1, 2)),
    DbiasRow(128, 4, 99 * KB, DbiasTile(4, 2, 1, 1, 1, 1)),
    DbiasRow(128, 4, 64 * KB, DbiasTile(2, 1, 2, 1, 1, 1)),
    DbiasRow(256, 4, 163 * KB, DbiasTile(2, 2, 2, 1, 1, 1)),
    DbiasRow(256, 4, 99 * KB, DbiasTile(2, 1, 1, 1, 1, 1)),
    DbiasRow(256, 4, 64 * KB, DbiasTile(1, 1, 1, 1, 1, 1)),
)

# Of float32, whose rows have twice the columns: high and low. None was timed yet: these are chosen
# for room and registers, of which some go to memory outside the products.
PLANES_DBIAS_TILES = (
    DbiasRow(32, 4, 163 * KB, DbiasTile(2, 2, 2, 1, 2, 2)),
    DbiasRow(64, 4, 163 * KB, DbiasTile(2, 2, 2, 1, 1, 2)),
    DbiasRow(128, 4, 227 * KB, DbiasTile(4, 2, 2, 1, 1, 1)),
    DbiasRow(128, 4, 163 * KB, DbiasTile(4, 2, 1, 1, 1, 1)),
)


def dbias_tile(problem, hardware: Hardware, summed: bool) -> DbiasTile:
    """The first that serves these head dimensions and this bias, and fits. Of a gradient that is
    the sum of nothing, in one part: of two, hundreds of bytes would go to memory (not timed).
    """
    d, size = max(problem.d, problem.dv), 4 if problem.options.bias == "float32" else 2
    tile = next(
        row.tile
        for row in (PLANES_DBIAS_TILES if problem.dtype == "float32" else DBIAS_TILES)
        if d <= row.d and size <= row.bias and row.shared <= hardware.shared_limit
    )
    return tile if summed else replace(tile, parts=1)


@dataclass(frozen=True)
class KeysTile:
    """Shape of a block of dK and dV, where another kernel makes dQ.

    Attributes
    ----------
    warps, m_tiles : int
        Warps of a block; times 16, the keys of each.
    block_m : int
        Queries of a tile, at least half as many as keys.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    """

    warps: int
    m_tiles: int
    block_m: int
    min_blocks: int

    @property
    def block_n(self) -> int:
        return ROWS * self.m_tiles * self.warps

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def layout(self, d: int, dv: int):
        """Where a block keeps what in shared memory: two slots for tiles of queries, of which the
        second has K and V before the first tile does, and dK and dV after the last.
        """
        queries = smem(
            q=self.block_m * pitch(d),
            do=self.block_m * pitch(dv),
            rows=8 * self.block_m,  # lse and delta
            bias=self.block_m * pitch(self.block_n),
        )
        keys = smem(queries.bytes, k=self.block_n * pitch(d), v=self.block_n * pitch(dv))
        return over(smem(slot=(queries, 2)), keys)


@dataclass(frozen=True)
class DqDbiasTile(DbiasTile):
    """Shape of a block of dQ and the gradient of the bias, which has all keys."""

    def layout(self, d: int, dv: int):
        """Where a block keeps what in shared memory."""
        tiles = super().layout(d, dv)
        more = smem(
            tiles.bytes,
            bias=2 * self.block_m * self.block_n,  # each thread's part
            dq=(4 * self.block_m * padded(d), self.warps_n),  # of each warp's keys
            o=2 * self.block_m * padded(dv),
        )
        return over(tiles, more)


# All keys have to fit: registers of dbias, and shared memory for K and V, end that. B = 384, H = 4,
# N = 384, D = 32 on an H200, all of the backward pass: with the kernels of others 784 us, with 8
# warps here 582, with 12, if they have no more keys to do, 555.
MOST_KEYS, MOST_COLUMNS, LEAST_SHARED, FEWEST_STEPS = 384, 32, 227 * KB, 8
# With delta made where dQ is, all together: (4, 2, 64, 3) 597 us, (4, 2, 32, 3) 610, (4, 1, 32, 4)
# 632; without that 629.
KEYS_TILE = KeysTile(4, 2, 64, 3)  # beside it


def dq_dbias_tile(problem, hardware: Hardware, steps: int) -> DqDbiasTile | None:
    """The tile of dQ and the gradient of the bias, where a bias of 16 bits is all that changes
    scores, and several heads, `steps`, share it; else None.
    """
    p, o = problem, problem.options
    if not o.nothing_but("bias") or p.band != "none":
        return None
    if p.dtype not in ("float16", "bfloat16") or o.bias not in ("float16", "bfloat16"):
        return None
    if hardware.turing or steps < FEWEST_STEPS or p.nq * p.nk == 0:
        return None
    if any(MOST_COLUMNS % padded(each) for each in (p.d, p.dv)):  # warps copy whole rows
        return None
    if p.nk > MOST_KEYS or hardware.shared_limit < LEAST_SHARED:
        return None
    parts_of_8, parts_of_12 = (-(-p.nk // (warps_n * KEYS)) for warps_n in (4, 3))
    if 3 * parts_of_12 <= 4 * parts_of_8:
        return DqDbiasTile(4, 3, 1, parts_of_12, 2, 1)
    return DqDbiasTile(2, 4, 2, parts_of_8, 2, 1)
