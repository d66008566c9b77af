"""Tiles of the `sm90` tier, with what was measured, and where a block keeps what in shared memory.
Numba is not imported here.
"""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

from numba_flash.cuda.sm90.rings import lay_out
from numba_flash.cuda.swizzle import ALIGNMENT, PANEL, ROW_BYTES, panel_bytes, panels
from numba_flash.options import PLAIN

WARP_GROUP = 128
KEYS = 64  # that a consumer owns in the backward pass
OUTPUT_ROWS = 64  # of O that a consumer stores at a time
WORK_BYTES, WORK_SLOTS, BOUND_BYTES = 64, 3, 32  # what consumers find of a work item, and note
SHARED_LIMIT = 227 * 1024
# Registers per thread of the producer's warp group, of the consumers'; by the number of consumers.
REGISTERS = {2: (40, 232), 3: (32, 160)}
KEEPING_DS = 24, 240  # of a tile that keeps dS; with fewer the products wait for each other
# Threads that add up dQ: while one waits until its tile is in memory, the other one's comes.
# Consumers reckon with two.
ADDERS = 2
# Elements of dQ that a consumer of the backward pass hands over at a time, in the order of
# fragments.
DQ_PART = 64 * 64


class WarpGroups:
    """Of a tile: its consumers, and a producer."""

    consumers: int

    @property
    def registers(self) -> tuple[int, int]:
        return REGISTERS[self.consumers]

    @property
    def threads(self) -> int:
        return WARP_GROUP * (self.consumers + 1)


class Consumers(WarpGroups):
    """Of a tile of the forward pass, whose consumers have 64 rows each."""

    block_m: int

    @property
    def consumers(self) -> int:
        return self.block_m // 64


@dataclass(frozen=True)
class Tile(Consumers):
    """Shape of a block's work.

    Attributes
    ----------
    block_m, block_n : int
        Rows and columns of the score tile; 64 rows per consumer warp group, columns a multiple of
        16.
    q_stages, stages : int
        Slots of the ring of Q tiles, and of those of K and of V tiles.
    o_panels : int
        Panels of 64 columns of O that a consumer stages at a time.
    ping_pong : bool
        Consumers take turns at starting products.
    packs_early : bool
        P is rounded while exponentials are computed, not after O has been rescaled.
    """

    block_m: int
    block_n: int
    q_stages: int
    stages: int
    o_panels: int
    ping_pong: bool
    packs_early: bool = field(default=False, kw_only=True)
    planes: ClassVar[int] = 1  # of each of q, k and v

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory: rings ``q k v work`` as `numba_flash.cuda.sm90.pipeline` wants them, where
        ``o`` is staged, and the `bytes` of all.
        """
        rings = {
            "q": (panels(head_dim) * self.block_m * ROW_BYTES, self.q_stages),
            "k": (panels(head_dim) * self.block_n * ROW_BYTES, self.stages),
            "v": (panels(head_dim_v) * self.block_n * ROW_BYTES, self.stages),
            "work": (WORK_BYTES, WORK_SLOTS),
        }
        o_panels = min(self.o_panels, panels(head_dim_v))
        return lay_out(rings, o_panels * self.block_m * ROW_BYTES, o=0, o_panels=o_panels)


class AddingTile(WarpGroups):
    """Of a tile of the backward pass that adds to dQ in memory, part by part, with these rings; see
    `BackwardTile`.
    """

    block_m: int
    stages: int
    do_stages: int
    consumers: ClassVar[int] = 2
    adds_dq: ClassVar[bool] = True
    in_slots: ClassVar[bool] = False  # dS of listed tiles goes to memory
    share: ClassVar[int] = 1  # tiles of a list's entry
    queries_apart: ClassVar[int] = 0  # the consumers' fragments
    planes: ClassVar[int] = 1
    copies_bias: ClassVar[bool] = False

    @property
    def block_n(self) -> int:
        return KEYS * self.consumers

    @property
    def splits_rows(self) -> bool:
        """Each consumer computes some rows of a tile of dQ, not some columns."""
        return self.block_m == KEYS * self.consumers

    def width(self, head_dim: int) -> int:
        """Columns of a tile in shared memory, in whole panels or as many as there are."""
        return head_dim

    @property
    def more_rings(self) -> dict:
        """Of (bytes of a slot, slots), by name."""
        return {}

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory: rings as `numba_flash.cuda.sm90.pipeline` wants them, `ds`, `lse`,
        `delta`, `bounds`, the `bytes` of all.

        "dq" has one tile and two pairs of mbarriers, for even tiles and odd ones: its slots are the
        same memory, and a tile may come when the one before it has left, not when its own slot is
        free. "fetched" has no memory: all tiles of a work item have been asked for.
        """
        rings = {
            "q": (self.planes * panels(head_dim) * panel_bytes(self.block_m), self.stages),
            "do": (self.planes * panels(head_dim_v) * panel_bytes(self.block_m), self.do_stages),
            "k": (self.planes * panels(head_dim) * panel_bytes(self.block_n), 1),
            "v": (self.planes * panels(head_dim_v) * panel_bytes(self.block_n), 1),
            "dq": (0, ADDERS),  # the tile lies elsewhere, see below
            "work": (WORK_BYTES, WORK_SLOTS),
            "fetched": (0, 1),
            **self.more_rings,
        }
        ds_bytes = panels(self.block_m) * panel_bytes(self.block_n)
        dq = 2 * ds_bytes
        lse = dq + 4 * DQ_PART * self.consumers
        delta = lse + 4 * self.block_m * self.stages
        bounds = delta + 4 * self.block_m * self.do_stages
        slots = -(-(bounds + BOUND_BYTES * self.consumers) // ALIGNMENT) * ALIGNMENT
        layout = lay_out(rings, slots, ds=0, ds_bytes=ds_bytes, lse=lse, delta=delta, bounds=bounds)
        layout.dq = layout.dq._replace(tiles=dq)
        return layout


@dataclass(frozen=True)
class BackwardTile(AddingTile):
    """Shape of a block's work in the backward pass.

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
    """

    block_m: int
    stages: int
    do_stages: int
    ahead: bool
    keeps_ds: bool = field(default=False, kw_only=True)

    @property
    def registers(self) -> tuple[int, int]:
        return KEEPING_DS if self.keeps_ds else REGISTERS[2]

    @property
    def columns(self) -> int:
        """Queries of a consumer's fragment."""
        return self.block_m


@dataclass(frozen=True)
class WideTile:
    """Shape of a block's work where dK and dV of 64 keys fill the registers of two consumers, of
    which each owns half of their columns.

    The attributes are those of `BackwardTile`, and properties, too; all of them are given.
    """

    consumers: ClassVar[int] = 2
    block_m: ClassVar[int] = 2 * KEYS
    block_n: ClassVar[int] = KEYS
    columns: ClassVar[int] = KEYS
    queries_apart: ClassVar[int] = KEYS
    adds_dq: ClassVar[bool] = False
    in_slots: ClassVar[bool] = False
    share: ClassVar[int] = 1
    planes: ClassVar[int] = 1
    copies_bias: ClassVar[bool] = False
    registers: ClassVar[tuple[int, int]] = REGISTERS[2]
    threads: ClassVar[int] = 3 * WARP_GROUP

    def width(self, head_dim: int) -> int:
        return -(-head_dim // (2 * PANEL)) * 2 * PANEL

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory, as `BackwardTile`'s, and ``p``. Rings have one slot, so no consumer is a
        tile ahead of the other.
        """
        width, width_v = panels(self.width(head_dim)), panels(self.width(head_dim_v))
        rings = {
            "q": (width * panel_bytes(self.block_m), 1),
            "do": (width_v * panel_bytes(self.block_m), 1),
            "k": (width * panel_bytes(self.block_n), 1),
            "v": (width_v * panel_bytes(self.block_n), 1),
            "dq": (0, 0),
            "work": (WORK_BYTES, WORK_SLOTS),
            "fetched": (0, 0),
        }
        layout = lay_out(rings, 2 * self.ds_bytes, p=0, ds=self.ds_bytes)
        layout.lse = -(-(layout.bytes - ALIGNMENT) // 16) * 16  # of bulk copies
        layout.delta = layout.lse + 4 * self.block_m
        layout.bounds = layout.delta + 4 * self.block_m
        layout.bytes = layout.bounds + BOUND_BYTES * self.consumers + ALIGNMENT
        return layout

    @property
    def ds_bytes(self) -> int:
        """Size of a tile of dS."""
        return self.consumers * panel_bytes(KEYS)

    def dq_layout(self, head_dim: int) -> SimpleNamespace:
        """Shared memory of the kernel that makes dQ: rings ``tiles`` and ``work``, where dQ is
        staged (``o``), the `bytes` of all.
        """
        slot = panels(head_dim) * panel_bytes(self.block_n) + self.ds_bytes
        staged = 2 * self.consumers * panel_bytes(KEYS)
        stages = (SHARED_LIMIT - staged - 2 * ALIGNMENT) // slot
        return lay_out({"tiles": (slot, stages), "work": (WORK_BYTES, WORK_SLOTS)}, staged, o=0)


class Row(NamedTuple):
    """Of a table of tiles: the first whose limits a problem keeps serves it.

    Attributes
    ----------
    keys, d, dv : int
        Most keys, largest head dimension of q and k, and of v.
    tile : Tile, BackwardTile or WideTile
        What it is served with.
    """

    keys: int
    d: int
    dv: int
    tile: Any


ANY = 2**31
# Per kind of mask. With each row: cuDNN's time divided by its own at the lengths named, on an H100,
# and others over its speed, on an H200; bfloat16, B N = 16384, 2048 / D heads, each pair in one
# process.
FORWARD_TILES = {
    "full": (
        # 512 1.15, 4k 1.17, 16k 1.23; with three slots 0.97, 0.96, 0.95 of it, packed late 0.98
        Row(ANY, 64, 64, Tile(192, 128, 2, 4, 1, True, packs_early=True)),
        # 512 1.08, 1k 1.11; packed early 0.96, 0.99 of it
        Row(1024, 128, 128, Tile(128, 128, 2, 2, 2, True)),
        # 4k 1.12, 16k 1.12; packed late 0.99, 0.98 of it, Tile(128, 160, 1, 2, 1, True) 0.96, 0.99
        Row(ANY, 128, 128, Tile(128, 128, 2, 2, 2, True, packs_early=True)),
        # 512 1.13, 4k 1.16, 16k 1.18; packed late 1.00 of it, with turns 1.00
        Row(ANY, 256, 256, Tile(128, 64, 1, 2, 2, False, packs_early=True)),
    ),
    "band": (
        # 512 1.09, 1k 1.01; packed late 0.99, 0.98 of it
        Row(1024, 64, 64, Tile(128, 128, 2, 4, 1, True, packs_early=True)),
        # 2k 1.14, 16k 1.24; packed late, with three slots, 0.96 of it at 4k and 16k,
        # Tile(192, 96, 2, 4, 1, True), packed late, 0.95, 0.94
        Row(ANY, 64, 64, Tile(192, 128, 2, 4, 1, True, packs_early=True)),
        # 512 0.95, 1k 1.13; packed early 0.98, 0.99 of it
        Row(1024, 128, 128, Tile(128, 128, 2, 2, 2, True)),
        # 4k 1.26, 8k 1.27; packed late 0.99 of it at 4k; Tile(128, 176, 1, 2, 1, True) 0.98 at 8k
        Row(12288, 128, 128, Tile(128, 128, 2, 2, 2, True, packs_early=True)),
        # 16k 1.28; packed late 0.98 of it; Tile(128, 128, 2, 2, 2, True) 0.99 at 32k
        Row(ANY, 128, 128, Tile(128, 176, 1, 2, 1, True, packs_early=True)),
        # 512 0.90, 4k 1.26, 16k 1.35; packed late 1.00 of it
        Row(ANY, 256, 256, Tile(128, 64, 1, 2, 2, False, packs_early=True)),
    ),
}
# Where the keys are split into parts: stores of float32 parts leave fewer registers for the tile.
PART_TILES = (
    Row(ANY, 64, 64, Tile(128, 128, 2, 4, 1, True)),
    Row(ANY, 128, 128, Tile(128, 112, 2, 2, 2, True)),
    Row(ANY, 256, 256, Tile(128, 48, 1, 2, 2, False)),
)
# With each row: cuDNN's time divided by its own at N = 1k, 4k, 16k, full, and what was tried
# instead, over its speed or cuDNN's; bfloat16, B N = 16384, 2048 / D heads, deterministic, H200,
# each pair in one process.
BACKWARD_TILES = (
    # dS kept is 1.03 times as fast (16k, causal). Without that 1.21, 1.20, 1.20, and
    # BackwardTile(128, 2, 2, True) 0.93, 0.84, 0.87 of it
    Row(ANY, 64, 64, BackwardTile(128, 2, 2, False, keeps_ds=True)),
    # 1.13, 1.09, 1.11; BackwardTile(64, 3, 2, False) 0.96, 0.95, 0.91 of it; dS not kept, and dQ
    # let go a product later, 0.98, 0.98, causal 0.98, 0.98 (2k, 16k). Full, 2k and 8k: 80 queries,
    # dQ^T for dQ, 0.96, 0.97; dQ of a tile behind dV of the next 0.97, 0.97; dK behind dP of the
    # next 0.97 (4k, 16k); dV before dP is waited for 0.94, 0.93. Nothing added to dQ 1.05, 1.10; if
    # the card rests in between, so that power is no limit, 1.05, 1.04
    Row(ANY, 128, 128, BackwardTile(64, 3, 2, True, keeps_ds=True)),
    # 1.34, 1.18, 1.24; with dQ added up in memory, from registers, 0.95, 0.71, 1.12
    Row(ANY, 256, 256, WideTile()),
)


def _first(table: tuple[Row, ...], problem):
    p = problem
    return next(row.tile for row in table if p.nk <= row.keys and p.d <= row.d and p.dv <= row.dv)


def forward_tile(problem) -> Tile:
    """Tile of the forward kernel."""
    p = problem
    return _first(FORWARD_TILES["full" if p.band == "none" else "band"], p)


def part_tile(problem) -> Tile:
    """Tile of the forward kernel where the keys are split."""
    return _first(PART_TILES, problem)


def with_options(tile, options) -> BackwardTile | WideTile:
    """A tile of the backward pass, but where consumers hold the next scores as well, dS is kept in
    registers only if they need none for options.
    """
    crowded = isinstance(tile, BackwardTile) and tile.ahead and options.structure != PLAIN
    return replace(tile, keeps_ds=False) if crowded else tile


def backward_tile(problem) -> BackwardTile | WideTile:
    """Tile of the main kernel of the backward pass."""
    return with_options(_first(BACKWARD_TILES, problem), problem.options)
