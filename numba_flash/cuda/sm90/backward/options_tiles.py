"""Tiles of the backward pass on Hopper with bias, mask, dropout or a function of the score, or for
lists of tiles alone. Numba is not imported here.
"""

from dataclasses import replace

from numba_flash.cuda.sm90.backward.backward_tiles import BACKWARD_TILES, DQ_TILE, BackwardTile
from numba_flash.cuda.sm90.tiles import ANY, Row, fitting

MOST = 128  # head dimension

SMALL = BackwardTile(128, 2, 2, False, part=64, noted=True)
LARGE = BackwardTile(64, 3, 2, False, part=32, noted=True)
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
    row._replace(tile=replace(row.tile, keeps_ds=False, noted=True))
    for row in BACKWARD_TILES
    if row.d <= MOST
)
# Where blocks of a mask hold whole tiles of dS, beyond head dimension 64. Speed over the kernel
# that adds to dQ in memory, on an H200, N = 16384, 16 heads, random blocks of which 50, 20, 10 and
# 5 % are visible: D = 128 1.08, 1.21, 1.25, 1.25. Since dV and dK leave at once the main kernel
# takes 0.97 and 0.94 of the time at 10 and 5 %; claiming an item 1, 4 or 8 tiles ahead, or a whole
# item, is all the same. (At D = 64 a tile of 128 queries, two slots of each ring, not ahead,
# reached 0.96, 1.05, 1.06, 1.09, for 4 GB more memory; one of 64, three of Q and of dO, ahead,
# 0.89, 0.97, 1.01, 1.05.)
STORING_TILE = BackwardTile(64, 3, 2, True, noted=True, k_stages=2, in_slots=True)
LEAST_STORING = 64


def crowded(options) -> bool:
    """True if a thread needs many registers for each score: for its slope, or bias and mask."""
    return options.sloped or bool(options.bias and options.mask)


def backward_options_tile(problem) -> BackwardTile:
    """Tile of the main kernel."""
    options = problem.options
    return fitting(LISTED_TILES if options.only_lists else TILES[crowded(options)], problem)


def storing_tile(problem) -> BackwardTile | None:
    """Tile of the main kernel that stores dS; None where lists are not all there is, or name other
    tiles, or where it is no faster.
    """
    p, size = problem, problem.options.blocks
    if not p.options.only_lists or p.options.packed:
        return None
    if not size.divided_by(DQ_TILE.block_m, DQ_TILE.block_n):
        return None
    return STORING_TILE if LEAST_STORING < max(p.d, p.dv) else None
