"""Tiles of the `sm80` tier's forward pass, what was measured, how they lie in shared memory; and
what all of its tiles have in common. Numba is not imported here.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

CHUNK = 8  # elements of 16 bits that are copied at a time
WARP, ROWS = 32, 16  # threads of a warp; rows of one of its products
KEYS = 32  # in the order of `numba_flash.cuda.score.fragment.place_of_key`


def padded(head_dim: int) -> int:
    """Columns of a tile: whole steps of a product."""
    return -(-head_dim // 16) * 16


def pitch(head_dim: int) -> int:
    """Bytes from one row of a tile to the next: an odd number of chunks, so that 8 rows lie in
    different banks.
    """
    return 2 * (padded(head_dim) + CHUNK)


class KeyRows(NamedTuple):
    """How rows of a tile of keys or values lie in shared memory.

    Attributes
    ----------
    bytes : int
        From one row to the next.
    lines : bool
        They are whole lines of 128 bytes, swizzled as `numba_flash.cuda.ptx.Matrices` says.
    """

    bytes: int
    lines: bool = False


class SharedRows(NamedTuple):
    """Where warps that share rows keep in shared memory what they tell each other, in bytes: P, and
    a number for each row of a warp; what there is in all; and the pitch of V.
    """

    p: int
    numbers: int
    bytes: int
    pitch_v: int


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
    ways : int
        So many warps, 1 or 2, share rows, each with its part of their scores, and of the columns of
        O (`numba_flash.cuda.sm80.forward.share`).
    """

    warps: int
    m_tiles: int
    block_n: int
    stages: int
    q_registers: bool
    min_blocks: int
    ways: int = 1
    group: ClassVar[int] = 0  # see `numba_flash.cuda.sm80.decode.decode_tiles`

    @property
    def block_m(self) -> int:
        return ROWS * self.m_tiles * self.warps // self.ways

    @property
    def warp_n(self) -> int:
        return self.block_n // self.ways

    @property
    def rows_of_warp(self) -> tuple[int, int]:
        """Those that it works on, and those of O that it stores."""
        return ROWS * self.m_tiles, ROWS * self.m_tiles // self.ways

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def relative_bytes(self) -> int:
        """Of a number for each diagonal of a tile (`numba_flash.cuda.score.relative`)."""
        return 4 * (self.block_m + self.block_n)

    def key_rows(self, head_dim: int) -> KeyRows:
        return KeyRows(pitch(head_dim))

    def columns(self, dv: int) -> int:
        """Of a tile of V or O: whole steps of a product for each of the warps that share them."""
        return -(-dv // (ROWS * self.ways)) * ROWS * self.ways

    def shared_bytes(self, d: int, dv: int) -> int:
        """Q, or O on its way out; K and V; what warps tell each other."""
        return self.shared(d, dv).bytes

    def shared(self, d: int, dv: int) -> SharedRows:
        pitch_v = pitch(self.columns(dv))
        q = self.block_m * max(pitch(d), pitch_v)
        p = q + self.stages * self.block_n * (pitch(d) + pitch_v)
        if self.ways == 1:
            return SharedRows(p, p, p, pitch_v)
        rows = self.warps * ROWS * self.m_tiles
        numbers = p + rows * KEYS * 2
        return SharedRows(p, numbers, numbers + rows * 4, pitch_v)


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


class SmallRow(NamedTuple):
    """The tile for small problems of head dimensions up to `d`, where a block may have `shared`
    bytes, and for fewer than `keys` keys under a band.
    """

    d: int
    shared: int
    tile: Tile
    keys: int


class Row(NamedTuple):
    """The tile that serves head dimensions up to `d`, where a block may have `shared` bytes."""

    d: int
    shared: int
    tile: Tile


# A larger tile reads K and V fewer times, and takes registers; two blocks run on a multiprocessor,
# or one of 8 warps. The rows for the most memory up to D = 32, 64, 128 and 256 are 5 to 25 % faster
# than FlashAttention-2. Bytes that are spilled outside the products do no harm; at D = 64 a larger
# tile, which spills, is 1 to 3 % faster, and was not taken. The other rows are chosen for room and
# registers. Measured: docs/lab/tensor_cores.md, `FORWARD_TILES`.
FORWARD_TILES = (
    Row(32, 163 * KB, Tile(4, 2, 64, 2, True, 3)),
    Row(64, 163 * KB, Tile(4, 2, 64, 2, True, 2)),
    Row(64, 64 * KB, Tile(4, 2, 64, 1, False, 2)),
    Row(128, 163 * KB, Tile(4, 2, 64, 1, False, 2)),
    Row(128, 99 * KB, Tile(8, 2, 32, 1, False, 1)),
    Row(128, 64 * KB, Tile(4, 1, 32, 2, True, 1)),
    # at D = 192 warps that share rows lose 2 to 8 %
    Row(192, 227 * KB, Tile(8, 1, 128, 1, False, 1)),
    Row(256, 227 * KB, Tile(8, 2, 128, 1, False, 1, 2)),
    Row(256, 163 * KB, Tile(8, 1, 64, 1, False, 1)),
    Row(256, 99 * KB, Tile(4, 1, 32, 1, False, 1)),
    Row(256, 64 * KB, Tile(2, 1, 32, 1, False, 1)),
)

# With fewer blocks of rows than multiprocessors, or a band over so few keys: smaller tiles are more
# blocks, which keep more multiprocessors busy, and read K and V more often. They take at most a
# tenth longer than FlashAttention-2, mostly less, and down to half the time of the tile above. The
# band is that of causal attention. Measured: docs/lab/tensor_cores.md, `SMALL_TILES`.
SMALL_TILES = (
    SmallRow(64, 99 * KB, Tile(4, 1, 64, 2, True, 3), 0),
    SmallRow(128, 99 * KB, Tile(4, 1, 128, 1, False, 2), 0),
    SmallRow(256, 227 * KB, Tile(4, 1, 64, 1, False, 2), 4096),
)

# With options that change scores or weights, which take registers. Assembled for Hopper, 64 scores
# of a lane and 32 columns with D = 128 fit; for other GPUs they spill. The rows that were timed are
# as fast as their neighbours, or up to a fifth faster. Measured: docs/lab/tensor_cores.md,
# `MODIFIED_TILES`.
MODIFIED_TILES = (
    Row(32, 163 * KB, Tile(4, 2, 32, 2, True, 3)),
    Row(64, 227 * KB, Tile(4, 2, 64, 2, False, 2)),
    Row(64, 64 * KB, Tile(4, 2, 32, 2, False, 2)),
    Row(128, 227 * KB, Tile(4, 2, 32, 2, False, 2)),
    Row(128, 163 * KB, Tile(4, 1, 64, 1, False, 2)),
    Row(128, 99 * KB, Tile(8, 1, 64, 1, False, 1)),
    Row(128, 64 * KB, Tile(4, 1, 32, 2, True, 1)),
    Row(256, 227 * KB, Tile(8, 2, 64, 1, False, 1, 2)),
    *(row for row in FORWARD_TILES if row.d == 256 and row.shared < 227 * KB),
)

# Tiles of float32 have twice the columns, high and low. So they have half the keys, half the rows,
# or both, for room; other tiles are up to 4 % slower. Rows for less memory were not timed.
# Measured: docs/lab/tensor_cores.md, `PLANES_TILES`.
PLANES_TILES = (
    Row(32, 163 * KB, Tile(4, 1, 64, 2, False, 4)),
    Row(64, 163 * KB, Tile(4, 2, 32, 2, False, 2)),
    Row(128, 227 * KB, Tile(4, 1, 32, 1, False, 3)),
    Row(128, 163 * KB, Tile(4, 1, 32, 1, False, 2)),
    Row(256, 163 * KB, Tile(4, 1, 32, 1, False, 1)),
)
# The same with options. Up to D = 32 a tile that spills was a little faster with a bias, and was
# not taken. Measured: docs/lab/tensor_cores.md, `MODIFIED_PLANES_TILES`.
MODIFIED_PLANES_TILES = (
    Row(32, 163 * KB, Tile(4, 2, 32, 2, False, 2)),
    Row(64, 163 * KB, Tile(4, 1, 64, 1, False, 2)),
    *(row for row in PLANES_TILES if row.d > 64),
)


def first(rows, d: int, hardware: Hardware):
    """The first row that serves these head dimensions and fits, or None."""
    return next((row for row in rows if d <= row.d and row.shared <= hardware.shared_limit), None)


def forward_tile(problem, hardware: Hardware) -> Tile:
    """The first that serves these head dimensions and fits."""
    tiles = MODIFIED_TILES if problem.options.takes_registers else FORWARD_TILES
    if problem.dtype == "float32":
        tiles = MODIFIED_PLANES_TILES if problem.options.modifies else PLANES_TILES
    return first(tiles, max(problem.d, problem.dv), hardware).tile


def small_tile(problem, hardware: Hardware, few: bool) -> Tile | None:
    """That for a small problem, with `few` blocks of rows or keys; None for any other."""
    p, row = problem, first(SMALL_TILES, max(problem.d, problem.dv), hardware)
    if row is None or p.options.modifies or p.dtype == "float32":
        return None
    return row.tile if few or (p.band != "none" and p.nk < row.keys) else None
