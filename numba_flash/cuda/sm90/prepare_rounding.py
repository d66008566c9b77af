"""Whether the main kernel of the backward pass rounds dQ itself."""

from numba_flash.cuda import grid
from numba_flash.options import PLAIN

# FEWEST, by rows of a tile: blocks of keys that add to one, in the mean, times the head dimensions
# of Q and of V together. With fewer the warp does not keep up; with more than MOST_BLOCKS there is
# nothing to gain. In bfloat16, 2048 / D heads, 16384 queries in all, speed over rounding after it,
# N = 512, 1024, 2048: H200, D = 64 full 1.07, 1.04, 1.02, causal 1.07, 1.07, 1.03; D = 128 full
# 0.97, 1.03, 1.01, causal 0.90, 1.05, 1.03. H100, D = 64 full 1.10, 1.06, 1.03, causal 1.09, 1.10,
# 1.06; D = 128 full 0.93, 1.02, 1.02, causal 0.89, 1.00, 1.06. Longer: H200, N = 3072 causal, D =
# 64 1.02, D = 128 1.02; N = 4096, 8192, D = 128 full 1.00, 0.99. H100, N = 4096 causal, D = 64
# 1.02, D = 128 1.02.
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
