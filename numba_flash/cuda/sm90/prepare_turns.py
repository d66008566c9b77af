"""Whether blocks of keys of the backward pass add to dQ in turns, and of how many heads they are
handed out together.
"""

from numba_flash.cuda import grid
from numba_flash.cuda.sm90.tiles import DQ_PART

# Bytes of sums of dq that blocks at work at the same time add to. With their queries and gradients,
# which are as many, they stay in the L2 cache (50 MB on an H100). Full, H100, speed over that with
# twice as many: D = 64, N = 4k and 8k 1.02, 1.00; D = 128, N = 2k to 16k 1.02, 0.995, 0.995, 1.00.
SUMS_AT_WORK = 2**24
# Blocks of keys of one head that are at work at the same time under a band, by the queries of a
# tile. They wait for each other at its first tile, longer if they are more, or tiles larger; if
# they are fewer, more heads have their tiles and sums in the L2 cache. Causal, TFLOP/s at N = 1k,
# 4k, 8k. D = 64 on an H200 with two 328, 451, 484, three 331, 452, 481, four 303, 447, 480; on an
# H100 293, 394, 370; 305, 431, 480; 283, 444, 493. D = 128 on an H200 with four 352, 488, 526, six
# 347, 484, 518; on an H100 311, 476, 529; 323, 482, 521.
AT_WORK = {64: 4, 128: 3}
# Fewest blocks of keys of a head whose additions in any order are faster than in turns: those begin
# with zeros, but nobody waits, so that all blocks of a head are at work. Causal, speed in any order
# over that in turns, N = 512, 1k, 2k, 4k, 8k, 16k, H100: D = 64 0.88, 0.98, 1.04, 1.06, 1.07, 1.03;
# D = 128 0.85, 0.98, 1.03, 1.03, 1.02, 1.01. Of full attention at most 1.00, on an H200.
MANY_BLOCKS = 16


def ordered(p, tile, deterministic: bool) -> bool:
    """Whether blocks of keys add to dQ in turns: if that has to be deterministic, or is as fast so,
    as it is without a mask, and a band of many blocks. What is not added in memory needs no turns.
    """
    waits = p.band != "none" and grid.blocks(p, p.nk, tile.block_n) >= MANY_BLOCKS
    return tile.adds_dq and (deterministic or not (waits or p.options.tiled))


def section(p, tile, key_blocks: int, multiprocessors: int, ordered: bool) -> int:
    """Heads of k whose blocks of keys are handed out together.

    With a band, if they wait for each other, so many that few blocks of one head are at work at the
    same time, else few enough that all are. If dQ is not added up in memory, so many that everyone
    gets the same work. Without a band no more than have their sums in the cache: one each, since
    blocks at work at the same time walk over the heads of a group together.
    """
    even = grid.even_section(key_blocks, multiprocessors)
    if not tile.adds_dq:
        return even
    if p.band != "none" and ordered:
        return -(-multiprocessors // AT_WORK[tile.block_m])
    if p.band != "none":
        return max(1, multiprocessors // max(1, key_blocks))
    sums_of_a_head = 4 * DQ_PART * tile.consumers * -(-p.nq // tile.block_m)
    return max(1, min(even, SUMS_AT_WORK // sums_of_a_head))
