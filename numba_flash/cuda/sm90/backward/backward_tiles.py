"""Tiles of the backward pass on Hopper, with what was measured. Those with options and for lists
are in `numba_flash.cuda.sm90.backward.options_tiles`. Numba is not imported here.
"""

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, NamedTuple

from numba_flash.arguments.options import PLAIN
from numba_flash.cuda.score.swizzle import ALIGNMENT, PANEL, panel_bytes, panels
from numba_flash.cuda.sm90.rings import Buffer, Slots, lay_out
from numba_flash.cuda.sm90.tiles import (
    ADDERS,
    ANY,
    BOUND_BYTES,
    DQ_PART,
    KEYS,
    REGISTERS,
    SHARED_LIMIT,
    STEP,
    WORK,
    Row,
    WarpGroups,
    fitting,
    padded,
)

KEEPING_DS = 24, 240  # registers of a tile that keeps dS; with fewer the products wait
NOTING, LISTING = (56, 224), (72, 216)  # where the producer follows lists, and of dQ
NOTE_BYTES = 16  # of what is written down about a tile of queries
DS_SLOTS = 2
# Where a warp rounds dQ (`numba_flash.cuda.sm90.dq.round_dq`): rows and columns of it at a time, in
# chunks of their sums, each of them copied by itself; and what it has written down.
ROUNDED_ROWS, ROUNDED_COLUMNS = 64, 32
CHUNKS = ROUNDED_COLUMNS // 8
ROUNDED_BYTES, CHUNK_BYTES = 2 * ROUNDED_ROWS * ROUNDED_COLUMNS, 4 * ROUNDED_ROWS * 8
WORDS_BYTES = 64
# Slots of what is rounded, and of sums, by queries of a tile: as many as there is room for, since
# sums on their way set the pace. With fewer, short sequences are up to 6 % slower, and longer ones
# hardly. Measured: docs/lab/hopper_backward.md, `SUM_SLOTS`.
ROUNDED_SLOTS, SUM_SLOTS = {64: 1, 128: 2}, {64: 5, 128: 8}


@dataclass(frozen=True)
class BackwardTile(WarpGroups):
    """Shape of a block's work in `numba_flash.cuda.sm90.backward.backward` and `backward_split`.

    Attributes
    ----------
    block_m : int
        Queries at a time: 64, or 128 where the head dimension is at most 64.
    stages, do_stages : int
        Slots of the rings of Q and of dO tiles.
    ahead : bool
        Start the next tile's scores before this one's dQ.
    keeps_ds : bool
        The product for dK takes dS^T from registers, not from where that for dQ reads it.
    part : int
        Queries of a fragment, where a consumer goes through a tile in parts, for registers; or 0.
    noted : bool
        Something is written down about tiles of queries, which are listed, or have options.
    copies_bias : bool
        The copy engine brings the tile of the bias, which has 16 bits, to where dS will be. Threads
        read that of a part before they start its products, after which it would come after these.
    k_stages, v_stages : int
        Slots of the rings of K and of V tiles: what the next work item needs comes during this one.
    in_slots : bool
        dS goes to memory, and another kernel makes dQ of it. dK and dV are staged where dS is.
    relative : bool
        With each tile of Q comes what a `score_mod` adds for each distance.
    rounds_dq : bool
        A warp rounds dQ.
    planes : int
        Of float32 (`numba_flash.cuda.passes.write_planes`), of which the two slots of dS^T are
        those.
    shares_keys : bool
        Of planes, beyond head dimension 64: consumers have the same keys, and each computes some
        columns of dQ, not dQ of its own keys. P^T goes from one to the other, in float32.
    """

    block_m: int
    stages: int
    do_stages: int
    ahead: bool
    _: KW_ONLY
    keeps_ds: bool = False
    part: int = 0
    noted: bool = False
    copies_bias: bool = False
    k_stages: int = 1
    v_stages: int = 1
    in_slots: bool = False
    relative: bool = False
    rounds_dq: bool = False
    planes: int = 1
    shares_keys: bool = False
    consumers: ClassVar[int] = 2

    @property
    def registers(self) -> tuple[int, int]:
        if self.part or self.in_slots:
            return NOTING
        return KEEPING_DS if self.keeps_ds else REGISTERS[self.consumers]

    @property
    def block_n(self) -> int:
        return KEYS if self.shares_keys else KEYS * self.consumers

    @property
    def columns(self) -> int:
        """Queries of a consumer's fragment."""
        return self.part or self.block_m

    @property
    def adds_dq(self) -> bool:
        return not self.in_slots

    @property
    def splits_rows(self) -> bool:
        """Each consumer computes some rows of a tile of dQ, not some columns."""
        return self.block_m == KEYS * self.consumers

    @property
    def queries_apart(self) -> int:
        """From a consumer's fragment to the next one's, which has the same keys."""
        return KEYS if self.shares_keys else 0

    @property
    def share(self) -> int:
        """Tiles of a list's entry."""
        return DQ_TILE.block_m // self.block_m if self.in_slots else 1

    @property
    def dq_parts(self) -> int:
        """Of the same columns of a tile of dQ, to be added."""
        return self.consumers if self.planes > 1 and not self.shares_keys else 1

    @property
    def rounded_slots(self) -> int:
        return ROUNDED_SLOTS[self.block_m]

    @property
    def sum_slots(self) -> int:
        return SUM_SLOTS[self.block_m]

    def width(self, head_dim: int) -> int:
        """Columns of a tile in shared memory, in whole panels or as many as there are."""
        columns = padded(head_dim) if self.planes > 1 else head_dim
        return max(columns, PANEL + STEP) if self.shares_keys else columns

    def layout(self, head_dim: int, head_dim_v: int) -> NamedTuple:
        """Shared memory.

        "dq" has one tile and two pairs of mbarriers, for even tiles and odd ones: its slots are the
        same memory, and a tile may come when the one before it has left, not when its own slot is
        free. "fetched" has no memory: all tiles of a work item have been asked for; nor has "made":
        dS^T of a tile is there. `largest` is a float32 for each warp of the consumers; of the first
        one's, who has no dS^T if they share keys, the power that undoes what that was multiplied
        by.
        """
        of = lambda columns, rows: self.planes * panels(columns) * panel_bytes(rows)
        ds_bytes, notes = panels(self.block_m) * panel_bytes(self.block_n), {}
        if self.noted:
            notes = {"notes": Buffer(NOTE_BYTES, self.stages)}
        table = {
            "ds": Buffer(ds_bytes, DS_SLOTS),
            **({"dq_sums": Buffer(4 * DQ_PART, self.consumers)} if self.adds_dq else {}),
            "lse": Buffer(4 * self.block_m, self.stages),
            "delta": Buffer(4 * self.block_m, self.do_stages),
            "bounds": Buffer(BOUND_BYTES, self.consumers),
            **({"largest": Buffer(16, self.consumers)} if self.planes > 1 else {}),
            **(notes if self.in_slots else {}),
            "q": Slots(of(head_dim, self.block_m), self.stages),
            "do": Slots(of(head_dim_v, self.block_m), self.do_stages),
            "k": Slots(of(head_dim, self.block_n), self.k_stages),
            "v": Slots(of(head_dim_v, self.block_n), self.v_stages),
            "dq": Slots(0, ADDERS, of="dq_sums") if self.adds_dq else Slots(0, 0),
            "work": WORK,
            "fetched": Slots(0, 1),
        }
        if self.shares_keys:
            table |= {"p": Slots(4 * self.block_m * KEYS, 1), "made": Slots(0, 1)}
        behind = {} if self.in_slots else notes
        if self.part:
            behind["bias"] = Slots(ds_bytes, DS_SLOTS, of="ds")
        if self.relative:
            behind["relative"] = Buffer(self.relative_bytes, self.stages)
        if self.rounds_dq:  # matrices of 8 rows, swizzled, begin at a multiple of 512 bytes
            behind["rounding"] = Buffer(WORDS_BYTES)
            behind["rounded"] = Buffer(ROUNDED_BYTES, self.rounded_slots, ALIGNMENT)
            behind["sums"] = Buffer(CHUNK_BYTES, self.sum_slots)
        return lay_out(table, behind, ds_bytes=ds_bytes)


@dataclass(frozen=True)
class WideTile(WarpGroups):
    """Shape of a block's work in `numba_flash.cuda.sm90.backward.backward_wide`, where dK and dV of
    64 keys fill the registers of two consumers, of which each owns half of their columns.

    The attributes are those of `BackwardTile`, and properties, too; all of them are given.
    """

    consumers: ClassVar[int] = 2
    block_m: ClassVar[int] = 2 * KEYS
    block_n: ClassVar[int] = KEYS
    columns: ClassVar[int] = KEYS
    queries_apart: ClassVar[int] = KEYS
    ahead: ClassVar[bool] = False
    adds_dq: ClassVar[bool] = False
    in_slots: ClassVar[bool] = False
    rounds_dq: ClassVar[bool] = False
    copies_bias: ClassVar[bool] = False
    share: ClassVar[int] = 1
    planes: ClassVar[int] = 1

    def width(self, head_dim: int) -> int:
        return -(-head_dim // (2 * PANEL)) * 2 * PANEL

    def layout(self, head_dim: int, head_dim_v: int) -> NamedTuple:
        """Shared memory. Rings have one slot, so no consumer is a tile ahead of the other."""
        of = lambda columns, rows: panels(self.width(columns)) * panel_bytes(rows)
        table = {
            "p": Buffer(self.ds_bytes),
            "ds": Buffer(self.ds_bytes),
            "q": Slots(of(head_dim, self.block_m), 1),
            "do": Slots(of(head_dim_v, self.block_m), 1),
            "k": Slots(of(head_dim, self.block_n), 1),
            "v": Slots(of(head_dim_v, self.block_n), 1),
            "dq": Slots(0, 0),
            "work": WORK,
            "fetched": Slots(0, 0),
        }
        behind = {
            "lse": Buffer(4 * self.block_m),
            "delta": Buffer(4 * self.block_m),
            "bounds": Buffer(BOUND_BYTES, self.consumers),
        }
        return lay_out(table, behind)

    @property
    def ds_bytes(self) -> int:
        """Size of a tile of dS."""
        return self.consumers * panel_bytes(self.block_n)


@dataclass(frozen=True)
class DqTile(WarpGroups):
    """Shape of a block's work in `numba_flash.cuda.sm90.dq.dq`, which makes dQ of dS in memory.

    Attributes
    ----------
    block_sparse : bool
        Tiles of dS have slots, which lists name; else they are as `WideTile` leaves them.
    """

    block_sparse: bool
    consumers: ClassVar[int] = 2
    block_m: ClassVar[int] = 2 * KEYS

    @property
    def registers(self) -> tuple[int, int]:
        return LISTING if self.block_sparse else REGISTERS[self.consumers]

    @property
    def block_n(self) -> int:
        return 2 * KEYS if self.block_sparse else KEYS

    @property
    def ds_bytes(self) -> int:
        """Size of a tile of dS."""
        return self.consumers * panel_bytes(self.block_n)

    def layout(self, head_dim: int) -> NamedTuple:
        """Shared memory, with dQ staged in `o`."""
        staged = Buffer(2 * panel_bytes(KEYS), self.consumers)
        slot = panels(head_dim) * panel_bytes(self.block_n) + self.ds_bytes
        stages = (SHARED_LIMIT - staged.bytes * staged.slots - 2 * ALIGNMENT) // slot
        return lay_out({"o": staged, "tiles": Slots(slot, stages), "work": WORK})


WIDE_DQ_TILE, DQ_TILE = DqTile(block_sparse=False), DqTile(block_sparse=True)

# Registers limit the tile: they hold dK, dV, S and dP, so that there are 128 queries up to D = 64,
# and half as many at D = 128, where S of the next tile is begun ahead. At D = 128 nothing else that
# was tried came nearer than 2 %; sums of dQ cost at most a tenth, as timings without them show. At
# D = 256 the wide tile does not add dQ up in memory. Measured: docs/lab/hopper_backward.md,
# `BACKWARD_TILES`.
BACKWARD_TILES = (
    Row(ANY, 64, 64, BackwardTile(128, 2, 2, False, keeps_ds=True)),
    Row(ANY, 128, 128, BackwardTile(64, 3, 2, True, keeps_ds=True)),
    Row(ANY, 256, 256, WideTile()),
)


def with_options(tile, options) -> BackwardTile | WideTile:
    """A tile of the backward pass, but where consumers hold the next scores as well, dS is kept in
    registers only if they need none for options.
    """
    crowded = tile.ahead and options.structure != PLAIN
    return replace(tile, keeps_ds=False) if crowded else tile


def backward_tile(problem) -> BackwardTile | WideTile:
    """Tile of the main kernel of the backward pass."""
    return with_options(fitting(BACKWARD_TILES, problem), problem.options)


# Tiles of float32 have two planes of each operand, and so half as many queries at D = 64. They are
# nearly twice as fast as those of `sm80`. Measured: docs/lab/hopper_backward.md, `PLANES_TILES`.
PLANES_TILES = (
    Row(ANY, 64, 64, BackwardTile(64, 2, 2, False, planes=2)),
    Row(ANY, 128, 128, BackwardTile(64, 2, 1, False, planes=2, shares_keys=True)),
)


def planes_backward_tile(problem) -> BackwardTile:
    """Tile of the main kernel of float32."""
    return fitting(PLANES_TILES, problem)
