"""Whether blocks of keys of the backward pass add to dQ in turns, in which order they are handed
out, and of how many heads together.
"""

from numba_flash.cuda import grid
from numba_flash.cuda.sm90.arguments import may_go_upward
from numba_flash.cuda.sm90.tiles import DQ_PART

# Bytes of sums of dq that blocks at work at the same time add to. With their queries and gradients,
# which are as many, they stay in the L2 cache (50 MB on an H100). Full, H100, speed over that with
# twice as many: D = 64, N = 4k and 8k 1.02, 1.00; D = 128, N = 2k to 16k 1.02, 0.995, 0.995, 1.00.
SUMS_AT_WORK = 2**24
# How many sections, the last, go downward, the longest blocks first, for the sake of an even end,
# while all others go upward; and turns of the GPU that a section takes, from how many blocks of
# keys of a head on: otherwise one turn. Causal, N = 512, 1k, 2k, 4k, 8k, 16k, speed over all
# downward with AT_WORK, sections of one turn: H200, D = 64 1.06, 1.05, 1.06, 1.05, 1.04, 1.02; D =
# 128 1.03, 1.03, 1.02, 1.01, 1.01, 1.00; H100 1.06, 1.05, 1.09, 1.07, 1.06, 1.03; 1.06, 1.07, 1.07,
# 1.04, 1.02, 1.00. Of two turns: H200 1.06, 1.04, 1.07, 1.06, 1.05, 1.03; 1.03, 1.03, 1.03, 1.02,
# 1.02, 1.01; H100 1.06, 1.04, 1.09, 1.09, 1.07, 1.04; 0.96, 1.01, 1.07, 1.05, 1.03, 1.02. Of half a
# turn, H200 1.07, 1.04, 1.05, 1.03, 1.03, 1.02; 1.04, 1.00, 0.99, 0.98, 0.97, 1.00; of four, H100
# 0.99, 1.03, 1.08, 1.08, 1.07, 1.03; 0.79, 0.75, 0.72, 0.73, 0.80, 0.89. Of two turns, but none
# downward, H200 1.05, 1.03, 1.04, 1.03, 1.02, 1.00; 1.01, 0.99, 0.98, 0.97, 0.96, 0.96; of one, but
# two downward 1.05, 1.04, 1.05, 1.03, 1.02, 1.00; 1.02, 1.00, 0.99, 0.98, 0.97, 0.96.
# Where heads share keys, all go downward, in sections of two turns: speed over cuDNN's, H200, D =
# 128, N = 512, 2k, 8k, 16k, of 8 heads 1.39, 1.20, 1.12, 1.08, of 4 1.45, 1.27, 1.18, 1.14, of 2
# 1.47, 1.30, 1.18, 1.14. Upward, one head after the other, 1.29, 0.88, 0.91, 0.96; 1.34, 0.93,
# 0.99, 1.07; 1.49, 1.16, 1.20, 1.15. D = 64, N = 1k, 8k, of 8 heads 1.57, 1.33, of 2 1.57, 1.33;
# upward 1.47, 1.19; 1.61, 1.38.
DOWNWARD, TURNS, MANY_BLOCKS = 1, 2, 16
# Fewest blocks of keys under a band for which packed sequences may be added in any order.
MANY_PACKED = 16
# Blocks of keys of one head that are at work at the same time under a mask and a band, by the
# queries of a tile. They go downward, and wait for each other at the first tile, longer if they are
# more, or tiles larger; if they are fewer, more heads have their tiles and sums in the L2 cache.
# Measured without a mask, when all went downward: causal, TFLOP/s at N = 1k, 4k, 8k. D = 64 on an
# H200 with two 328, 451, 484, three 331, 452, 481, four 303, 447, 480; on an H100 293, 394, 370;
# 305, 431, 480; 283, 444, 493. D = 128 on an H200 with four 352, 488, 526, six 347, 484, 518; on an
# H100 311, 476, 529; 323, 482, 521.
AT_WORK = {64: 4, 128: 3}


def ordered(p, tile, deterministic: bool) -> bool:
    """Whether blocks of keys add to dQ in turns: if that has to be deterministic, or is as fast so.
    What is not added in memory needs no turns.

    Additions in any order begin with zeros, but nobody waits. Speed over that in turns where all
    blocks go downward, as with a mask and packed sequences (but measured without), causal, N = 512,
    1k, 2k, 4k, 8k, 16k, H100: D = 64 0.88, 0.98, 1.04, 1.06, 1.07, 1.03; D = 128 0.85, 0.98, 1.03,
    1.03, 1.02, 1.01. Where they go upward, D = 64, 0.84, 0.94, 0.96, 0.97, 1.00, 1.00; without a
    band at most 1.00, on an H200.
    """
    many = p.band != "none" and grid.blocks(p, p.nk, tile.block_n) >= MANY_PACKED
    waits = p.options.tiled or (p.options.packed and many)
    return tile.adds_dq and (deterministic or not waits)


def section(p, tile, key_blocks: int, multiprocessors: int, ordered: bool) -> int:
    """Heads of k whose blocks of keys are handed out together.

    If dQ is not added up in memory, so many that everyone gets the same work. Without a band no
    more than have their sums in the cache: one each, since blocks at work at the same time walk
    over the heads of a group together. With a band as many as have all of their blocks at work
    within a turn, or TURNS; with a mask, where they wait for each other, so many that few are.
    """
    even = grid.even_section(key_blocks, multiprocessors)
    if not tile.adds_dq:
        return even
    if p.band == "none":
        sums_of_a_head = 4 * DQ_PART * tile.consumers * -(-p.nq // tile.block_m)
        return max(1, min(even, SUMS_AT_WORK // sums_of_a_head))
    if ordered and p.options.tiled:
        return -(-multiprocessors // AT_WORK[tile.block_m])
    many = key_blocks >= MANY_BLOCKS or p.hq > p.hk
    turns = TURNS if ordered and many else 1
    return max(1, turns * multiprocessors // max(1, key_blocks))


def upward(p, items: int, of_a_section: int, ordered: bool) -> int:
    """How many work items, the first, go through their tiles of queries upward, with so many in a
    section: if the band hides later keys, all but those of the last sections.

    Each block of keys then begins with queries that those of later keys, which began before, do not
    see, and comes to all others behind them. Downward, all of a causal head would begin at its last
    queries, one after the other; but if the band hides earlier keys alone, none waits downward.
    Where heads share keys, blocks begin with the last queries once for all of these. Upward, each
    would go through so much before the next one comes to the same queries that these have left the
    L2 cache.
    """
    shared = p.hq > p.hk
    if p.high >= p.nk - 1 or shared or not may_go_upward(ordered, p.options):
        return 0
    sections = -(-items // max(1, of_a_section))
    return max(0, sections - DOWNWARD) * of_a_section
