"""Tiles of the backward pass on Hopper with bias, mask, dropout or a function of the score, or for
lists of tiles alone. Numba is not imported here.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

from numba_flash.cuda.sm90.rings import MBARRIER_BYTES, Ring, lay_out
from numba_flash.cuda.sm90.tiles import (
    ANY,
    BACKWARD_TILES,
    BOUND_BYTES,
    KEYS,
    WORK_BYTES,
    WORK_SLOTS,
    AddingTile,
    BackwardTile,
    Row,
    WarpGroups,
    WideTile,
)
from numba_flash.cuda.swizzle import ALIGNMENT, panel_bytes, panels

NOTE_BYTES = 16  # of what is written down about a tile of queries
MOST = 128  # head dimension
DS_SLOTS = 2


class NotedTile(AddingTile):
    """Of a tile about whose tiles of queries something is written down."""

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory, as without options, and `notes` of the tiles of queries."""
        layout = super().layout(head_dim, head_dim_v)
        layout.notes = -(-layout.bytes // NOTE_BYTES) * NOTE_BYTES - layout.ALIGNMENT
        layout.bytes = layout.notes + NOTE_BYTES * self.stages + layout.ALIGNMENT
        return layout


@dataclass(frozen=True)
class ListedTile(NotedTile, BackwardTile):
    """A tile of the kernel without options that goes through lists."""

    @classmethod
    def of(cls, tile: BackwardTile) -> "ListedTile":
        return cls(tile.block_m, tile.stages, tile.do_stages, tile.ahead)


@dataclass(frozen=True)
class ListedDqTile(WarpGroups):
    """Of the kernel that makes dQ of such tiles, as large as those that are listed."""

    consumers: ClassVar[int] = 2
    block_m: ClassVar[int] = 2 * KEYS
    block_n: ClassVar[int] = 2 * KEYS
    registers: ClassVar[tuple[int, int]] = (72, 216)  # as those of `OptionsBackwardTile`
    dq_layout = WideTile.dq_layout

    @property
    def ds_bytes(self) -> int:
        """Size of a tile of dS, which is a slot."""
        return self.consumers * panel_bytes(self.block_n)


DQ_TILE = ListedDqTile()


@dataclass(frozen=True)
class StoringTile(BackwardTile):
    """A tile of the kernel that goes through lists and stores dS, of which another makes dQ.

    Attributes
    ----------
    k_stages, v_stages : int
        Slots of the rings of K and of V tiles: what the next work item needs comes during this one.
    """

    k_stages: int
    v_stages: int
    adds_dq: ClassVar[bool] = False
    in_slots: ClassVar[bool] = True
    registers: ClassVar[tuple[int, int]] = (56, 224)  # the producer follows lists

    @property
    def share(self) -> int:
        return DQ_TILE.block_m // self.block_m

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory: rings and the rest as `AddingTile.layout`'s, and `notes` of the tiles of
        queries. dK and dV are staged where dS is.
        """
        width, width_v = panels(head_dim), panels(head_dim_v)
        rings = {
            "q": (width * panel_bytes(self.block_m), self.stages),
            "do": (width_v * panel_bytes(self.block_m), self.do_stages),
            "k": (width * panel_bytes(self.block_n), self.k_stages),
            "v": (width_v * panel_bytes(self.block_n), self.v_stages),
            "dq": (0, 0),
            "work": (WORK_BYTES, WORK_SLOTS),
            "fetched": (0, 1),
        }
        ds_bytes = panels(self.block_m) * panel_bytes(self.block_n)
        lse = DS_SLOTS * ds_bytes
        delta = lse + 4 * self.block_m * self.stages
        bounds = delta + 4 * self.block_m * self.do_stages
        notes = bounds + BOUND_BYTES * self.consumers
        slots = -(-(notes + NOTE_BYTES * self.stages) // ALIGNMENT) * ALIGNMENT
        places = {"lse": lse, "delta": delta, "bounds": bounds, "notes": notes}
        return lay_out(rings, slots, ds=0, ds_bytes=ds_bytes, **places)


@dataclass(frozen=True)
class OptionsBackwardTile(NotedTile):
    """Shape of a block's work.

    Attributes
    ----------
    block_m, stages, do_stages : int
        As those of `numba_flash.cuda.sm90.tiles.BackwardTile`.
    part : int
        Queries of a fragment: a consumer goes through a tile in parts, for registers.
    copies_bias : bool
        The copy engine brings the tile of the bias, which has 16 bits, to where dS will be. Threads
        read that of a part before they start its products, after which it would come after these.
    """

    block_m: int
    stages: int
    do_stages: int
    part: int
    copies_bias: bool = False
    ahead: ClassVar[bool] = False
    keeps_ds: ClassVar[bool] = False
    # per thread of the producer's warp group, which follows lists, and of the consumers'
    registers: ClassVar[tuple[int, int]] = (56, 224)

    @property
    def columns(self) -> int:
        return self.part

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory, with mbarriers of a ring `bias`, whose slots are those of dS."""
        layout = super().layout(head_dim, head_dim_v)
        ready = layout.bytes - layout.ALIGNMENT
        free = ready + DS_SLOTS * MBARRIER_BYTES
        layout.bias = Ring(layout.ds, layout.ds_bytes, DS_SLOTS, ready, free)
        layout.bytes += 2 * DS_SLOTS * MBARRIER_BYTES
        return layout


SMALL, LARGE = OptionsBackwardTile(128, 2, 2, part=64), OptionsBackwardTile(64, 3, 2, part=32)
# By whether options are `crowded`. Chosen by registers. Gradients, that of a bias among them, which
# batch elements share, bfloat16, N = 2048, 64 heads in all, on an H200: at D = 64 0.848 ms where
# the copy engine brings the bias, 0.954 where threads read it a part ahead, 1.044 where they wait
# for it at once; at D = 128 1.256, 1.475 and 1.633. Where they read what the engine brought behind
# the products of its part, 0.523 ms without the gradient of the bias at D = 64; before them 0.500
# (predicted: 0.507); not timed at D = 128. Of a mask of pairs read a part ahead, fp16, N = 4096:
# 2.22 ms, else 2.51. With a function of the score, that P is made before dP is waited for costs 2
# %: 1.71 ms, else 1.67.
TILES = {
    False: (Row(ANY, 64, 64, SMALL), Row(ANY, MOST, MOST, LARGE)),
    True: (
        Row(ANY, 64, 64, replace(SMALL, part=32)),
        Row(ANY, MOST, MOST, replace(LARGE, part=16)),
    ),
}


LISTED_TILES = tuple(
    row._replace(tile=ListedTile.of(row.tile)) for row in BACKWARD_TILES if row.d <= MOST
)
# Where blocks of a mask hold whole tiles of dS, beyond head dimension 64. Speed over the kernel
# that adds to dQ in memory, on an H200, N = 16384, 16 heads, random blocks of which 50, 20, 10 and
# 5 % are visible: D = 128 1.08, 1.21, 1.25, 1.25. Since dV and dK leave at once the main kernel
# takes 0.97 and 0.94 of the time at 10 and 5 %; claiming an item 1, 4 or 8 tiles ahead, or a whole
# item, is all the same. (With StoringTile(128, 2, 2, False, 2, 2) at D = 64 0.96, 1.05, 1.06, 1.09,
# for 4 GB more memory; StoringTile(64, 3, 3, True, 2, 2) 0.89, 0.97, 1.01, 1.05.)
STORING_TILE, LEAST_STORING = StoringTile(64, 3, 2, True, 2, 1), 64


def crowded(options) -> bool:
    """True if a thread needs many registers for each score: for its slope, or bias and mask."""
    return options.sloped or bool(options.bias and options.mask)


def backward_options_tile(problem) -> OptionsBackwardTile | ListedTile:
    """Tile of the main kernel."""
    p = problem
    rows = LISTED_TILES if p.options.only_lists else TILES[crowded(p.options)]
    return next(row.tile for row in rows if p.d <= row.d and p.dv <= row.dv)


def storing_tile(problem) -> StoringTile | None:
    """Tile of the main kernel that stores dS; None where lists are not all there is, or name other
    tiles, or where it is no faster.
    """
    p, size = problem, problem.options.blocks
    if not p.options.only_lists or p.options.packed:
        return None
    if not size.divided_by(DQ_TILE.block_m, DQ_TILE.block_n):
        return None
    return STORING_TILE if LEAST_STORING < max(p.d, p.dv) else None
