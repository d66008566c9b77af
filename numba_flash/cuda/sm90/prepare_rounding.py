"""Whether the main kernel of the backward pass rounds dQ itself."""

from numba_flash.cuda import grid
from numba_flash.options import PLAIN

# A warp takes about 11 us for a tile of dQ. FEWEST, by rows of a tile: blocks of keys that add to
# one, in the mean, times the head dimensions of Q and of V together. With fewer it does not keep
# up; with more than MOST_BLOCKS there is nothing to gain. In bfloat16, 2048 / D heads, 16384
# queries in all, on an H200, speed over rounding afterwards: D = 64, N = 512, 1024 full 1.07,
# 1.05; N = 512 causal 1.05 (2.5 blocks add to each tile in the mean); D = 128, N = 1024 1.03,
# 1.06; N = 512 0.96, 0.89; that was before the flag of each tile was loaded a second time, to
# acquire. Of longer sequences with earlier forms of that warp: N = 2048, D = 64 1.00, 1.02, D =
# 128 1.00, 1.01; N = 4096 1.00, 1.00; 1.00, 1.02; N = 16384 0.99, 0.99; 1.00, 1.00. An H100, on
# which it was not measured, takes longer to read sums from memory.
FEWEST = {128: 320, 64: 1152}
MOST_BLOCKS = 24


def rounds(p, tile) -> bool:
    """Whether a problem is like those where that was measured to be faster, or as fast, if it has
    many work items: no heads share keys, and every query sees a key. The sum of one that sees none
    is never written.
    """
    if not tile.adds_dq or p.options != PLAIN or p.hq != p.hk or not p.nq * p.nk:
        return False
    if p.band != "none" and (p.band != "above" or p.high < 0):
        return False
    blocks = mean_blocks(p, tile)
    return FEWEST[tile.block_m] <= blocks * (p.d + p.dv) and blocks <= MOST_BLOCKS


def mean_blocks(p, tile) -> float:
    """How many blocks of keys add to a tile of dQ, in the mean."""
    tiles = grid.blocks(p, p.nq, tile.block_m)
    last = (min(at * tile.block_m + tile.block_m + p.high, p.nk) for at in range(tiles))
    return sum(-(-keys // tile.block_n) for keys in last) / tiles
