"""Tiles of the forward pass on Hopper with bias, mask, dropout or a function of the score. Numba is
not imported here.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from numba_flash.cuda.sm90.rings import MBARRIER_BYTES, Ring
from numba_flash.cuda.sm90.tiles import ANY, Row, Tile
from numba_flash.cuda.swizzle import panel_bytes, panels


@dataclass(frozen=True)
class OptionsTile(Tile):
    """Shape of a block's work.

    Attributes
    ----------
    pair_stages : int
        Slots of the ring of what belongs to pairs (`numba_flash.cuda.sm90.pair_tiles`), a bias or a
        mask; 0 if threads read it from memory.
    keys_of_element : int
        Keys of an element of 16 bits: 1 of a bias, 2 of a mask.
    pairs_ahead : bool
        What belongs to the pairs of a tile is read as soon as that of the tile before has been
        used.
    """

    pair_stages: int = 0
    keys_of_element: int = 1
    pairs_ahead: bool = False

    @property
    def pair_panels(self) -> int:
        return panels(self.block_n // self.keys_of_element)

    @property
    def pair_bytes(self) -> int:
        return self.pair_panels * panel_bytes(self.block_m)

    def layout(self, head_dim: int, head_dim_v: int) -> SimpleNamespace:
        """Shared memory, as without options, and a ring `pairs`."""
        layout, count = super().layout(head_dim, head_dim_v), self.pair_stages
        begin = -(-(layout.bytes - layout.ALIGNMENT) // layout.ALIGNMENT) * layout.ALIGNMENT
        ready = begin + count * self.pair_bytes
        free = ready + count * MBARRIER_BYTES
        layout.pairs = Ring(begin, self.pair_bytes, count, ready, free)
        if count:
            layout.bytes = free + count * MBARRIER_BYTES + layout.ALIGNMENT
        return layout


# By how many words a lane keeps of bias and mask for four of its scores. Chosen by registers.
# Packed late, dropout ran at 0.97 of the speed at D = 128 (H200, N = 4096); elsewhere, with a bias
# or a mask, too, it is all the same.
TILES = {
    0: (
        Row(ANY, 64, 64, OptionsTile(128, 128, 2, 4, 1, True)),
        Row(ANY, 128, 128, OptionsTile(128, 128, 2, 2, 2, True, packs_early=True)),
        Row(ANY, 256, 256, OptionsTile(128, 64, 1, 2, 2, False)),
    ),
    1: (
        Row(ANY, 64, 64, OptionsTile(128, 128, 2, 4, 1, True)),
        Row(ANY, 128, 128, OptionsTile(128, 96, 2, 2, 2, True)),
        Row(ANY, 256, 256, OptionsTile(128, 48, 1, 2, 2, False)),
    ),
    2: (
        Row(ANY, 64, 64, OptionsTile(128, 96, 2, 4, 1, True)),
        Row(ANY, 128, 128, OptionsTile(128, 64, 2, 3, 2, True)),
        Row(ANY, 256, 256, OptionsTile(128, 32, 1, 3, 2, False)),
    ),
    3: (
        Row(ANY, 64, 64, OptionsTile(128, 64, 2, 4, 1, True)),
        Row(ANY, 128, 128, OptionsTile(128, 48, 2, 3, 2, True)),
        Row(ANY, 256, 256, OptionsTile(128, 32, 1, 3, 2, False)),
    ),
}


# Where the copy engine brings the bias, or the mask, D = 64, on an H200. A bias, bfloat16, N =
# 2048, that batch elements share, with consumers that take turns: 0.249 ms; 64 keys 0.301, read by
# threads 0.335; sm80 0.283, cuDNN 0.290. In another process 0.242, with pairs read ahead 0.245
# (predicted: 0.230), without turns then 0.236; heads of batch elements one after the other, so that
# the bias is read from memory once, 0.238 with turns. A mask, float16, N = 4096: 0.896 ms; with
# three slots of K, V and mask 0.906, read by threads 1.144; sm80 1.068, cuDNN 1.161.
COPYING = {
    "bias": (Row(ANY, 64, 64, OptionsTile(128, 128, 2, 3, 1, False, 2, 1, True)),),
    "mask": (Row(ANY, 64, 64, OptionsTile(128, 128, 2, 4, 1, True, 2, 2)),),
}


def words_held(options) -> int:
    """Words that a lane keeps of bias and mask for four of its scores."""
    bias = {None: 0, "float32": 2}.get(options.bias, 1)
    return bias + int(options.mask)


def _first(rows, p) -> Tile | None:
    fits = (row.tile for row in rows if p.nk <= row.keys and p.d <= row.d and p.dv <= row.dv)
    return next(fits, None)


def tile_of(p) -> Tile:
    """That of a problem whose threads read bias and mask from memory."""
    return _first(TILES[words_held(p.options)], p)


def copying_tile(p, name: str) -> OptionsTile | None:
    """That of a problem whose "bias" or "mask" the copy engine brings, if there is one."""
    return _first(COPYING[name], p)
