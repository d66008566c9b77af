"""Tiles of kernels of the `sm80` tier that have all keys of a head in shared memory, as planes of
float16 that they make of float32 there. Numba is not imported here.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from numba_flash.cuda.arguments import planes_of
from numba_flash.cuda.sm80.smem import smem
from numba_flash.cuda.sm80.tiles import KB, ROWS, WARP, Hardware, padded, pitch

WAYS = 2  # warps that share rows of dQ and of the gradient of the bias


@dataclass(frozen=True)
class HeadTile:
    """Shape of a block of the forward pass that has all keys of a head.

    Attributes
    ----------
    warps, m_tiles : int
        Warps of a block; times 16, the rows that each has at a time.
    columns : int
        Keys of which a warp has scores in registers at a time.
    keys : int
        Of a head there is room for so many.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    """

    warps: int
    m_tiles: int
    columns: int
    keys: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def block_m(self) -> int:
        return ROWS * self.m_tiles

    @property
    def block_n(self) -> int:
        return self.columns

    def layout(self, d: int, dv: int):
        """Where a block keeps what in shared memory."""
        return smem(
            k=self.keys * pitch(2 * padded(d)),
            v=self.keys * pitch(2 * padded(dv)),
            centres=2 * 4 * MOST_COLUMNS,  # of K and V
            extremes=2 * 8 * self.warps,  # what warps tell each other of their largest numbers
        )


@dataclass(frozen=True)
class HeadPlanesTile:
    """Shape of a block that makes planes of a head.

    Attributes
    ----------
    keys, queries : int
        There is room for so many.
    columns : int
        Of their rows.
    """

    keys: int
    queries: int
    columns: int
    warps: ClassVar[int] = 8
    min_blocks: ClassVar[int] = 2

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def layout(self):
        """Where a block keeps what in shared memory."""
        row = pitch(2 * padded(self.columns))
        return smem(
            first=self.keys * row,  # a tile of keys
            second=self.queries * row,  # and one of queries
            centres=4 * MOST_COLUMNS,  # of columns
            told=4 * 8 * self.warps,  # what warps tell each other of largest numbers
            delta=8 * self.queries,  # and bounds of dP
            # what the lse of queries is too small by, or the largest numbers of each warp's columns
            shift=max(4 * self.queries, 4 * self.warps * padded(self.columns)),
        )


@dataclass(frozen=True)
class DqDbiasPlanesTile:
    """Shape of a block of dQ and the gradient of the bias, which has all keys, in chunks.

    Attributes
    ----------
    chunks : int
        Of 64 keys each, so many.
    part : int
        Keys of which a warp has scores in registers at a time.
    slots : int
        Of the ring: there is room for so many chunks, no more than there are.
    """

    chunks: int
    part: int
    slots: int = 5
    warps: ClassVar[int] = 8
    chunk: ClassVar[int] = 64  # keys
    block_m: ClassVar[int] = 64
    m_tiles: ClassVar[int] = 1
    warps_n: ClassVar[int] = WAYS
    min_blocks: ClassVar[int] = 1

    @property
    def block_n(self) -> int:
        return self.chunk * self.chunks

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def layout(self, shape):
        """Where a block keeps what in shared memory."""
        d, dv = padded(shape.head_dim), padded(shape.head_dim_v)
        pitch_k, pitch_v = pitch(2 * d), pitch(2 * dv)
        return smem(
            q=self.block_m * pitch_k,
            do=self.block_m * pitch_v,
            rows=(4 * self.block_m, KINDS),  # what is known of queries
            head=32,  # and of their head
            slot=(smem(k=self.chunk * pitch_k, v=self.chunk * pitch_v), self.slots),  # of the ring
            bias=4 * self.block_m * self.block_n,
            dq=(4 * self.block_m * d, WAYS),  # of each warp's keys
        )


@dataclass(frozen=True)
class DkDvPlanesTile:
    """Shape of a block of dK and dV, which has all queries of a head.

    Attributes
    ----------
    warps, m_tiles : int
        Warps of a block; times 16, the keys that each has at a time.
    columns : int
        Queries of which a warp has scores in registers at a time.
    queries : int
        Of a head there is room for so many.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    """

    warps: int
    m_tiles: int
    columns: int
    queries: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def layout(self, shape):
        """Where a block keeps what in shared memory."""
        return smem(
            q=self.queries * pitch(2 * padded(shape.head_dim)),
            do=self.queries * pitch(2 * padded(shape.head_dim_v)),
            rows=(4 * self.queries, KINDS),  # what is known of queries
            powers=8 * self.queries // self.columns,  # of two, of groups of them
        )


# Planes of so many keys leave room for a second block; each head's fill so many chunks of a row.
MOST_KEYS, MOST_COLUMNS, LEAST_SHARED = 384, 32, 227 * KB
KINDS = 3  # of numbers that are known of a query: its lse and delta, a power of two for its dS
FEWEST_ROWS = 64  # what is made of keys is worth it for so many queries
# B = 384, H = 4, N = 384, D = 32 with a bias on an H200, speed over torch's memory-efficient kernel
# in the same process: 4.05; (8, 1, 32, 2) 4.04, (4, 2, 32, 2) 3.81, (8, 1, 64, 1) 3.81; a pre-pass
# and the kernel of others 2.30. With joined planes of Q and K 4.28.
FORWARD_HEAD = 6, 1, 32, 2


# The same with the gradient of the bias: 3.33; (4, 1, 32, 2) 3.22, (6, 1, 32, 2) 3.21, (8, 1, 16,
# 2) 3.21. This kernel takes 571, 614, 614 and 621 us of 1336 to 1386: rows of 32 keys halve what is
# read of Q and dO, and their bias comes in 16 bytes at a time.
DK_DV = 4, 2, 16, 2
PART = 32  # keys of a warp of the other kernel at a time; 16: as fast, 548 us beside 550
CHUNK, FEWEST_STEPS = 64, 8
LEAST_CHUNKS = 5  # so that the next Q and dO come with a chunk that is waited for before them


def _short(problem, hardware: Hardware) -> bool:
    """Heads are short, and a bias is all that may change scores."""
    p, o = problem, problem.options
    if not o.nothing_but("bias") or p.band != "none":
        return False
    if planes_of(p) != 2 or hardware.turing or hardware.shared_limit < LEAST_SHARED:
        return False
    whole = not any(MOST_COLUMNS % padded(each) for each in (p.d, p.dv))
    return whole and 0 < p.nk <= MOST_KEYS and p.nq > 0


def _rows(problem, warps: int, columns: int, rows: int) -> int:
    """The least number of rows from this one on that is one of whole copies of a block, and of
    `columns`.
    """
    copied = 4 * WARP * warps // padded(min(problem.d, problem.dv))
    unit = max(columns, 1 << copied.bit_length() - 1)  # a power of two is copied at a time
    return -(-rows // unit) * unit


def forward_head_tile(problem, hardware: Hardware) -> HeadTile | None:
    """The tile where a bias is all that may change scores, and heads are short; else None."""
    if not _short(problem, hardware) or problem.nq < FEWEST_ROWS:
        return None
    warps, m_tiles, columns, min_blocks = FORWARD_HEAD
    keys = _rows(problem, warps, columns, problem.nk)
    return HeadTile(warps, m_tiles, columns, keys, min_blocks)


class GradientTiles(NamedTuple):
    """Of the kernels of a backward pass."""

    write_planes: HeadPlanesTile
    dq_dbias: DqDbiasPlanesTile
    dk_dv: DkDvPlanesTile


def gradient_tiles(problem, hardware: Hardware, steps: int) -> GradientTiles | None:
    """Those where a bias that several heads, `steps`, share is all that changes scores, and heads
    are short; else None.
    """
    p = problem
    if not p.options.bias or steps < FEWEST_STEPS or not _short(p, hardware):
        return None
    if p.nq > MOST_KEYS or p.hq != p.hk:
        return None
    warps, m_tiles, columns, min_blocks = DK_DV
    queries = _rows(p, warps, columns, p.nq)
    dk_dv = DkDvPlanesTile(warps, m_tiles, columns, queries, min_blocks)
    write_planes = HeadPlanesTile(
        keys=_rows(p, HeadPlanesTile.warps, 1, p.nk),
        queries=_rows(p, HeadPlanesTile.warps, 1, p.nq),
        columns=max(p.d, p.dv),
    )
    dq_dbias = DqDbiasPlanesTile(max(LEAST_CHUNKS, -(-p.nk // CHUNK)), PART)
    return GradientTiles(write_planes, dq_dbias, dk_dv)


def many_heads(problem, multiprocessors: int) -> bool:
    """A block for each head fills the GPU."""
    return math.prod(problem.batch) * problem.hq >= multiprocessors
