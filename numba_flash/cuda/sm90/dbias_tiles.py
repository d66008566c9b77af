"""Tiles of the gradient of a bias on Hopper. Numba is not imported here."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

from numba_flash.cuda.sm90.tiles import ANY, WORK_BYTES, Row, WarpGroups, lay_out
from numba_flash.cuda.swizzle import ALIGNMENT, panel_bytes, panels

WARPS = 4  # of a consumer
MOST = 128  # head dimension


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
    """

    part: int
    parts: int
    row_stages: int
    key_stages: int
    consumers: ClassVar[int] = 2
    block_m: ClassVar[int] = 128
    note_stages: ClassVar[int] = 4
    # per thread of the producer's warp group, which finds the tiles, and of the consumers'
    registers: ClassVar[tuple[int, int]] = (24, 240)

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
            "notes": (WORK_BYTES, self.note_stages),
        }
        values = 4 * self.block_m * self.row_stages
        sums = 4 * max(WARPS * self.consumers * self.block_n, self.block_m)
        slots = -(-(values + sums) // ALIGNMENT) * ALIGNMENT
        return lay_out(rings, slots, values=0, sums=values)


# By the bytes of what a thread keeps of a score besides its sum. Chosen by registers.
NARROW = (Row(ANY, 64, 64, DbiasTile(64, 2, 4, 16)), Row(ANY, MOST, MOST, DbiasTile(64, 2, 4, 5)))
WIDE = (Row(ANY, 64, 64, DbiasTile(64, 3, 4, 16)), Row(ANY, MOST, MOST, DbiasTile(64, 3, 4, 5)))


def _of(table):
    return lambda p: next(row.tile for row in table if p.d <= row.d and p.dv <= row.dv)


narrow_tile, wide_tile = _of(NARROW), _of(WIDE)


def dbias_tile(problem) -> DbiasTile:
    """The wider one, which reads less for each score, where a bias of 16 bits is all that a thread
    needs registers for.
    """
    o = problem.options
    alone = o.bias != "float32" and not (o.mask or o.dropout or o.score_mod or o.softcap)
    return (wide_tile if alone else narrow_tile)(problem)
