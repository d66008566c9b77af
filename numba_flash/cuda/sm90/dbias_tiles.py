"""Tiles of the gradient of a bias on Hopper. Numba is not imported here."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

from numba_flash.cuda.sm90.options_tiles import MOST
from numba_flash.cuda.sm90.rings import lay_out
from numba_flash.cuda.sm90.tiles import ANY, Row, WarpGroups
from numba_flash.cuda.swizzle import ALIGNMENT, PANEL, panel_bytes, panels

WARPS = 4  # of a consumer
LOADERS = 3  # threads that read what is written down of a step, and have its tiles fetched
NOTE_BYTES = 80
ALL_REGISTERS = 504  # per thread, of three warp groups


@dataclass(frozen=True)
class DbiasTile(WarpGroups):
    """Shape of a block of the gradient of the bias.

    Attributes
    ----------
    part, parts : int
        A consumer has scores of so many keys in registers at a time; so many times that are the
        keys of a block.
    row_stages, key_stages : int
        Slots of the ring of Q and dO tiles, and of that of parts of K and V tiles.
    fewest : int
        Registers per thread of the producer's warp group; the consumers have the others.
    """

    part: int
    parts: int
    row_stages: int
    key_stages: int
    fewest: int = 24
    consumers: ClassVar[int] = 2
    block_m: ClassVar[int] = 128
    apart: ClassVar[bool] = True  # K and V have slots of their own
    note_stages: ClassVar[int] = 8  # further ahead than tiles can be

    @property
    def registers(self) -> tuple[int, int]:
        return self.fewest, (ALL_REGISTERS - self.fewest) // self.consumers

    @property
    def block_n(self) -> int:
        return self.part * self.parts

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory: rings as `numba_flash.cuda.sm90.pipeline` wants them; the lse or delta
        (`values`) of each tile of `rows`; where a block's `sums` over its rows or columns go; the
        `bytes` of all.
        """
        most = max(panels(head_dim), panels(head_dim_v))
        rings = {
            "rows": (most * panel_bytes(self.block_m), self.row_stages),
            "keys": (most * panel_bytes(self.part), self.key_stages),
            "notes": (NOTE_BYTES, self.note_stages),
        }
        values = 4 * self.block_m * self.row_stages
        sums = 4 * max(WARPS * self.consumers * self.block_n, self.block_m)
        slots = -(-(values + sums) // ALIGNMENT) * ALIGNMENT
        return lay_out(rings, slots, values=0, sums=values)


@dataclass(frozen=True)
class DbiasRowsTile(WarpGroups):
    """Shape of a block of the gradient of the bias whose queries stay in shared memory.

    Attributes
    ----------
    elements : int
        Batch elements that are summed; Q and dO of all of them stay.
    key_stages, pair_stages : int
        Slots of the ring of tiles of K with V, and of that of tiles of the bias, from which the
        gradient of the tile before is stored.
    """

    elements: int
    key_stages: int
    pair_stages: int
    consumers: ClassVar[int] = 2
    block_m: ClassVar[int] = 128
    part: ClassVar[int] = PANEL
    parts: ClassVar[int] = 1
    block_n: ClassVar[int] = PANEL
    apart: ClassVar[bool] = False
    pair_panels: ClassVar[int] = 1
    pair_bytes: ClassVar[int] = panel_bytes(128)

    @property
    def row_stages(self) -> int:
        """Slots of the ring of Q and dO tiles; of the next element while this one's are in use."""
        return 2 * max(2, self.elements)

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory: rings as `numba_flash.cuda.sm90.pipeline` wants them; the lse or delta
        (`values`) of each tile of `rows`; the `bytes` of all.
        """
        rings = {
            "rows": (panel_bytes(self.block_m), self.row_stages),
            "keys": (2 * panel_bytes(self.block_n), self.key_stages),
            "pairs": (self.pair_bytes, self.pair_stages),
        }
        values = 4 * self.block_m * self.row_stages
        return lay_out(rings, -(-values // ALIGNMENT) * ALIGNMENT, values=0)


# Of 128 queries by 128 keys; and where registers have to hold more than a bias of 16 bits and one
# other option. By 192 keys, which lack registers, gradients took longer (H200, bfloat16, a bias of
# 16 heads, N = 2048, 4 in a batch): 1.09 ms at D = 64 and 1.60 at 128; with these 1.05 and 1.56.
TILES = (
    Row(ANY, 64, 64, DbiasTile(64, 2, 4, 16, 40)),
    Row(ANY, MOST, MOST, DbiasTile(64, 2, 4, 5, 40)),
)
CROWDED = (
    Row(ANY, 64, 64, DbiasTile(32, 4, 4, 16, 56)),
    Row(ANY, MOST, MOST, DbiasTile(32, 4, 4, 8, 56)),
)


def dbias_tile(problem) -> DbiasTile:
    """The one whose bias and sums registers have room for."""
    p, o = problem, problem.options
    several = bool(o.mask) + bool(o.score_mod) + bool(o.sequences) > 1
    rows = CROWDED if o.bias == "float32" or o.dropout or several else TILES
    return next(row.tile for row in rows if p.d <= row.d and p.dv <= row.dv)


# By batch elements that are summed. Gradients of 16 heads, N = 2048, 4 in a batch, bfloat16, with
# that of the bias, on an H200: 0.732 ms, with the kernel of `DbiasTile` 0.852. Its own part of that
# is 0.21 instead of 0.33 (predicted: 0.17); 0.25 where K and V had slots of their own, and S of the
# next step began behind the exponentials. Of one to three elements nothing was timed.
ROWS_TILES = {
    1: DbiasRowsTile(1, 4, 2),
    2: DbiasRowsTile(2, 4, 2),
    3: DbiasRowsTile(3, 4, 2),
    4: DbiasRowsTile(4, 4, 1),
}


def dbias_rows_tile(problem, elements: int) -> DbiasRowsTile | None:
    """The one whose queries stay in shared memory, if there is room for them."""
    return ROWS_TILES.get(elements) if max(problem.d, problem.dv) <= PANEL else None
