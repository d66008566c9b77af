"""Tiles of the backward pass on Hopper with bias, mask, dropout or a function of the score, or for
lists of tiles alone. Numba is not imported here.
"""

from dataclasses import replace

from numba_flash.cuda.sm90.backward.backward_tiles import BACKWARD_TILES, DQ_TILE, BackwardTile
from numba_flash.cuda.sm90.tiles import ANY, Row, fitting

MOST = 128  # head dimension

SMALL = BackwardTile(128, 2, 2, False, part=64, noted=True)
LARGE = BackwardTile(64, 3, 2, False, part=32, noted=True)
# By whether options are `crowded`. They were chosen by registers. Where the copy engine brings a
# bias, gradients are faster than where threads read it a part ahead, and these faster than where
# they wait for it at once; a mask of pairs is read a part ahead, too. To read what the engine
# brought before the products of its part is faster than behind them (not timed at D = 128). With a
# function of the score, P is made before dP is waited for, which costs 2 % there. Measured:
# docs/lab/hopper_backward.md, `TILES`.
TILES = {
    False: (Row(ANY, 64, 64, SMALL), Row(ANY, MOST, MOST, LARGE)),
    True: (
        Row(ANY, 64, 64, replace(SMALL, part=32)),
        Row(ANY, MOST, MOST, replace(LARGE, part=16)),
    ),
}


SPARSE_TILES = tuple(
    row._replace(tile=replace(row.tile, keeps_ds=False, noted=True))
    for row in BACKWARD_TILES
    if row.d <= MOST
)
# Where blocks of a mask hold whole tiles of dS, beyond head dimension LEAST_STORING: tiles of dS go
# to memory, and another kernel sums dQ. Nobody waits in turns then, which gains the more the
# sparser the mask is, up to a quarter at D = 128. How many tiles ahead an item is claimed is all
# the same. At D = 64 it gains at most a tenth, for 4 GB more memory. Measured:
# docs/lab/hopper_backward.md, `STORING_TILE`.
STORING_TILE = BackwardTile(64, 3, 2, True, noted=True, k_stages=2, in_slots=True)
LEAST_STORING = 64


def crowded(options) -> bool:
    """True if a thread needs many registers for each score: for its slope, or bias and mask."""
    return options.sloped or bool(options.bias and options.mask)


def backward_options_tile(problem) -> BackwardTile:
    """Tile of the main kernel."""
    options = problem.options
    return fitting(SPARSE_TILES if options.only_lists else TILES[crowded(options)], problem)


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
