"""Tiles of few queries with many keys. Numba is not imported here.

What such a problem takes is how long the memory needs for K and V, if enough of them is under way:
about bandwidth times latency, 4.8 TB/s times 800 ns on an H200, 29 KB for each multiprocessor.
Each warp has places for its keys and values of one or two tiles, and asks for others as soon as it
has read what is there; several blocks run on each multiprocessor.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from numba_flash.cuda.sm80.tiles import (
    CHUNK,
    KB,
    ROWS,
    WARP,
    Hardware,
    KeyRows,
    Tile,
    padded,
    pitch,
)

LINE = 64  # columns, 128 bytes of shared memory
RESERVED = KB  # of the shared memory of each block, by the driver
# Parts of the keys whose results the last of their blocks makes one; of more, a second kernel does.
# More parts keep more multiprocessors busy, but the last block reads all of their results, which
# takes over a fifth longer with 32 than with 16; in a graph a second kernel takes no longer. If so
# many parts have no more tiles each than FEW_TILES_EACH, there are no more. Measured:
# docs/lab/tensor_cores.md, `MOST_JOINED`.
MOST_JOINED, FEW_TILES_EACH = 16, 4
ENOUGH_BLOCKS = 2  # of a multiprocessor, for parts of the keys
# Of parts that are joined, a thread asks for the first, or for all, before it uses one. If more are
# asked for at once, memory is waited for less often, but there are more to ask for where keys are
# few: with 8 parts a kernel that asks for 16 takes 7 % longer, with 16 it takes 3 % less. Measured:
# docs/lab/tensor_cores.md, `FIRST_ASKED`.
FIRST_ASKED = 8


def asked(kv_splits: int) -> int:
    """So many at the same time."""
    return FIRST_ASKED if kv_splits <= FIRST_ASKED else MOST_JOINED


def float_pitch(head_dim: int) -> int:
    """Bytes from one row of a tile of float32 to the next, where lanes store two at a time."""
    return 4 * (padded(head_dim) + CHUNK)


@dataclass(frozen=True)
class DecodeTile(Tile):
    """Shape of a block whose warps share the keys of a tile, and all have the same rows.

    Attributes
    ----------
    group : int
        Heads that read the same keys: their queries are the rows.
    around : int
        Bytes of memory that the cache may fetch around each copy.
    apart : bool
        Warps do not wait for each other while they go through the keys. For GPUs before Hopper the
        assembler makes calls of what lets lanes of a warp wait, and keeps registers for them.
    """

    group: int = 1
    around: int = 128
    apart: bool = True

    @property
    def block_m(self) -> int:
        return ROWS * self.m_tiles

    @property
    def warp_n(self) -> int:
        """Keys of a tile that are a warp's."""
        return self.block_n // self.warps

    def key_rows(self, head_dim: int) -> KeyRows:
        """Lines, if they are whole: what a copy brings of a line of memory then comes to one of
        shared memory, and is asked for at once.
        """
        lines = head_dim % LINE == 0
        return KeyRows(2 * head_dim if lines else pitch(head_dim), lines)

    def q_bytes(self, d: int, dv: int) -> int:
        """Of Q, before the first tile of keys."""
        return self.block_m * max(pitch(d), pitch(dv))

    def shared_bytes(self, d: int, dv: int) -> int:
        """Q, K and V; in the end, in the place of all, each warp's O, m and l, and then weights of
        parts of the keys.
        """
        of_keys = self.stages * self.block_n * (self.key_rows(d).bytes + self.key_rows(dv).bytes)
        of_rows = self.warps * self.block_m * (float_pitch(dv) + 8)
        return max(self.q_bytes(d, dv) + of_keys, of_rows, 4 * self.block_m * MOST_JOINED)

    def resident(self, d: int, dv: int, hardware: Hardware) -> int:
        """Blocks that a multiprocessor has at the same time."""
        memory = hardware.shared_limit + RESERVED
        return min(self.min_blocks, memory // (self.shared_bytes(d, dv) + RESERVED))


class DecodeRow(NamedTuple):
    """The tile that serves head dimensions up to `d`, and up to `rows` rows if others have more,
    where a block may have `shared` bytes.
    """

    d: int
    rows: int
    shared: int
    tile: DecodeTile


# What counts is how many bytes are on their way: tiles differ by less than two processes do, in
# which memory lies elsewhere, and are as fast as a kernel that only reads, or cuDNN. But rows of
# shared memory have to be whole lines of 128 bytes, without which long sequences take 3 to 6 %
# longer, and more if the cache fetches nothing around each copy (`around`). Of 1k keys, fewer warps
# are faster. Warps do not wait for each other, which shorter sequences would feel. Rows for less
# memory and of 32 queries were not compared. Measured: docs/lab/tensor_cores.md, `DECODE_TILES`.
DECODE_TILES = (
    DecodeRow(64, 16, 227 * KB, DecodeTile(4, 1, 128, 2, True, 3)),
    DecodeRow(64, 16, 99 * KB, DecodeTile(4, 1, 128, 2, True, 3, apart=False)),
    DecodeRow(64, 16, 64 * KB, DecodeTile(4, 1, 128, 1, False, 2, apart=False)),
    DecodeRow(64, 32, 227 * KB, DecodeTile(4, 2, 128, 2, False, 2)),
    DecodeRow(64, 32, 99 * KB, DecodeTile(4, 2, 128, 2, False, 2, apart=False)),
    DecodeRow(128, 16, 227 * KB, DecodeTile(4, 1, 128, 2, True, 1)),
    DecodeRow(128, 16, 99 * KB, DecodeTile(4, 1, 128, 1, False, 2, apart=False)),
    DecodeRow(128, 16, 64 * KB, DecodeTile(2, 1, 64, 1, False, 2, apart=False)),
    DecodeRow(128, 32, 227 * KB, DecodeTile(2, 2, 64, 2, False, 3)),
    DecodeRow(256, 16, 227 * KB, DecodeTile(2, 1, 64, 1, False, 2)),
)


def decode_tile(problem, hardware: Hardware) -> DecodeTile | None:
    """The one for few queries, None if none fits. Of more rows than any has, blocks next to
    each other read the same keys.
    """
    p, d = problem, max(problem.d, problem.dv)
    fit = [row for row in DECODE_TILES if d <= row.d and row.shared <= hardware.shared_limit]
    most = ROWS if p.options.modifies else 2 * ROWS  # options take registers
    fit = [row for row in fit if row.d == fit[0].d and row.rows <= most]
    if not fit:
        return None
    group, rows_of = p.hq // p.hk, lambda row: row.rows
    chosen = next((row for row in fit if group * p.nq <= row.rows), max(fit, key=rows_of))
    return replace(chosen.tile, group=group)


@dataclass(frozen=True)
class BackwardDecodeTile:
    """Shape of a block of the backward pass whose warps have the same rows, and keys of their own.

    Attributes
    ----------
    warps : int
        Of a block; each has 16 keys of a tile.
    block_m : int
        Rows: the queries of all heads that read the same keys.
    stages : int
        Tiles of K and V that there is room for.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    group, around, apart
        As of a `DecodeTile`.
    """

    warps: int
    block_m: int
    stages: int
    min_blocks: int
    group: int = 1
    around: int = 128
    apart: bool = True

    @property
    def m_tiles(self) -> int:
        return self.block_m // ROWS

    @property
    def warp_n(self) -> int:
        """Keys of a tile that are a warp's."""
        return ROWS

    @property
    def block_n(self) -> int:
        return ROWS * self.warps

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def layout(self, d: int, dv: int) -> "BackwardDecodeLayout":
        pitch_k, pitch_v, pitch_ds = pitch(d), pitch(dv), pitch(self.block_m)
        keys = self.stages * self.block_n
        sizes = (
            *(keys * pitch_k, keys * pitch_v, self.block_m * pitch_k, self.block_m * pitch_v),
            *(self.block_n * pitch_ds, 8 * self.block_m),
        )
        *starts, size = accumulate(sizes, initial=0)
        sums = self.warps * self.block_m * float_pitch(d)
        return BackwardDecodeLayout(*starts, max(size, sums), pitch_k, pitch_v, pitch_ds)


class BackwardDecodeLayout(NamedTuple):
    """Where such a block keeps what in shared memory, in bytes: tiles of K and V, which dK and dV
    replace on their way out, Q, dO, dS^T, the lse and delta of queries; what there is in all, in
    the end each warp's dQ in its place; and pitches.
    """

    k: int
    v: int
    q: int
    do: int
    ds: int
    rows: int
    bytes: int
    pitch_k: int
    pitch_v: int
    pitch_ds: int


class BackwardDecodeRow(NamedTuple):
    """As a `DecodeRow`."""

    d: int
    rows: int
    shared: int
    tile: BackwardDecodeTile


# Gradients take a tenth longer than a copy of K and V; numbers of warps, stages and blocks change
# little. Only D = 128 was timed. Measured: docs/lab/tensor_cores.md, `BACKWARD_DECODE_TILES`.
BACKWARD_DECODE_TILES = (
    BackwardDecodeRow(64, 16, 227 * KB, BackwardDecodeTile(4, 16, 2, 3)),
    BackwardDecodeRow(64, 16, 64 * KB, BackwardDecodeTile(4, 16, 1, 2, apart=False)),
    BackwardDecodeRow(64, 32, 227 * KB, BackwardDecodeTile(4, 32, 2, 2)),
    BackwardDecodeRow(64, 32, 64 * KB, BackwardDecodeTile(4, 32, 1, 1, apart=False)),
    BackwardDecodeRow(128, 16, 227 * KB, BackwardDecodeTile(4, 16, 2, 2)),
    BackwardDecodeRow(128, 16, 64 * KB, BackwardDecodeTile(4, 16, 1, 1, apart=False)),
)


def backward_decode_tile(problem, hardware: Hardware) -> BackwardDecodeTile:
    """The tile for gradients of so few queries, see
    `numba_flash.cuda.work.grid.is_decode_gradient`.
    """
    p, d, group = problem, max(problem.d, problem.dv), problem.hq // problem.hk
    row = next(
        row
        for row in BACKWARD_DECODE_TILES
        if d <= row.d and p.nq * group <= row.rows and row.shared <= hardware.shared_limit
    )
    return replace(row.tile, group=group)
