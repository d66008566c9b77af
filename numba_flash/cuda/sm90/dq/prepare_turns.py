"""Whether blocks of keys of the backward pass add to dQ in turns, in which order they are handed
out, of how many heads together, and whether the main kernel rounds dQ itself.
"""

import math
from enum import Enum
from typing import NamedTuple

from numba_flash.arguments.options import PLAIN
from numba_flash.cuda.sm90.arguments import may_go_upward
from numba_flash.cuda.sm90.tiles import DQ_PART
from numba_flash.cuda.work import grid

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
# Where the main kernel rounds dQ, one turn over two: N = 2k, D = 64, 128, H200 1.00, 1.00, H100
# 1.00, 1.09; N = 4k, H100 0.99, 0.99.
# Those of which two share keys, D = 64, upward in sections of one turn, over downward, of two: H200
# 1.005, 1.02, 1.01, 1.02, 1.02, 1.03, H100 1.03, 1.03, 1.01, 1.03, 1.02, 1.02.
DOWNWARD, TURNS, MANY_BLOCKS = 1, 2, 24
# How many head dimensions the heads that share keys have together decides the order: up to
# UPWARD_DIMS upward, from SWING_DIMS on in swings (from half of that on where memory is slow), in
# between downward. A section takes SWINGS turns of the GPU, each of them one swing, if a head has
# SWING_BLOCKS; otherwise TURNS. Memory is slow below SLOW_MEMORY bytes a second: what has left the
# L2 cache comes back later. By clock and wires an H100 has 3.35e12 and an H200 4.92e12; nothing in
# between was measured. Measured before there was asv_bench/studies/orders.py, which does so anew:
# in bfloat16, without options, N = 512, 1k, 2k, 4k, 8k, 16k: two of D = 128, upward, over downward,
# H200 0.97, 0.97, 1.01, 1.01, 1.01, 1.03, H100 0.86, 0.73, 0.72, 0.78, 0.87, 0.96; four of D = 64
# H200 0.98, 0.98, 1.00, 1.01, 1.02, 1.01, H100 0.87, 0.77, 0.78, 0.85, 0.94, 0.98. Eight of D = 128
# in swings, over downward: H200 1.05, 1.05, 1.05, 1.03, 1.02, 1.02, H100 1.11, 1.18, 1.16, 1.19,
# 1.16, 1.14; four of them H200 1.00, 0.99, 0.99, 0.98, 0.96, 0.97, H100 1.06, 1.08, 1.04, 1.04,
# 1.00, 1.00; eight of D = 64 H200 1.01, 0.99, 1.00, 0.98, 0.97, 0.97, H100 1.04, 1.05, 1.03, 1.03,
# 1.00, 0.99. With SWINGS changed by hand, two, from N = 2k on: H200 1.04, 1.02, 1.01, 0.98, H100
# 1.19, 1.18, 1.14, 1.11; eight 1.06, 1.03, 1.02, 1.01, 1.16, 1.19, 1.15, 1.14; four where a head
# has fewer blocks, N = 512, 1k: H200 0.90, 1.03, H100 0.85, 0.94.
UPWARD_DIMS, SWING_DIMS, SWINGS, SWING_BLOCKS, SLOW_MEMORY = 128, 1024, 4, 16, 4.1e12
# How full the turns of a section of swings may be, at least and at most, so that sections are
# alike: in a smaller last one several swings of a head would be at work at the same time, of which
# the later wait. Not measured: by counting who waits, 132 multiprocessors that do a tile a step are
# at work 0.69 of the time for 10 heads of 128 blocks in sections of 4, 0.82 in sections of 5, 0.94
# downward; 13 heads in sections of 4 0.68, downward 0.92. What was measured above has 0.80 and
# 0.88.
FULL = 3 / 4, 4 / 3
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
# FEWEST_ROUNDED, by rows of a tile: blocks of keys that add to one, in the mean, times the head
# dimensions of Q and of V together. With fewer the warp does not keep up; with more than
# MOST_ROUNDED there is nothing to gain. In bfloat16, 2048 / D heads, 16384 queries in all, speed
# over rounding after it, N = 512, 1024, 2048: H200, D = 64 full 1.07, 1.04, 1.02, causal 1.07,
# 1.07, 1.03; D = 128 full 0.97, 1.03, 1.01, causal 0.90, 1.05, 1.03. H100, D = 64 full 1.10,
# 1.06, 1.03, causal 1.09, 1.10, 1.06; D = 128 full 0.93, 1.02, 1.02, causal 0.89, 1.00, 1.06.
# Longer: H200, N = 3072 causal, D = 64 1.02, D = 128 1.02; N = 4096, 8192, D = 128 full 1.00,
# 0.99. H100, N = 4096 causal, D = 64 1.02, D = 128 1.02.
FEWEST_ROUNDED = {128: 320, 64: 1152}
MOST_ROUNDED = 24


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


class Order(Enum):
    """In which order blocks of keys that add to dQ in turns come, and go through their tiles."""

    DOWNWARD = "the first block first, each beginning with the last queries"
    UPWARD = "the last block first, each beginning with the first queries"
    SWINGS = "some of a head downward, the last first, then as many upward, the first first"


def order(p, key_blocks: int, gpu, ordered: bool) -> Order:
    """The `Order` of blocks of keys, of which a head has so many.

    If the band hides later keys they go upward: each begins with queries that those of later keys,
    which began before, do not see, and comes to all others behind them. Downward, all of a causal
    head would begin at its last queries, one after the other; but if the band hides earlier keys
    alone, none waits downward.

    Where heads share keys, a block takes so many steps for each tile of queries that, upward, a
    tile has left the L2 cache before the next block comes to it. Blocks that begin together with
    the last queries read the same tiles at the same time. In swings those that go upward do so,
    too: a multiprocessor that ends a block at the diagonal goes on with one that begins there,
    while its neighbours arrive at the same tiles. Each swing waits for the one before at its
    beginning and its end. That matters little if many heads share keys, or if memory is slow.
    """
    if p.high >= p.nk - 1 or not may_go_upward(ordered, p.options):
        return Order.DOWNWARD
    dims = p.hq // p.hk * max(p.d, p.dv)
    if dims <= UPWARD_DIMS:
        return Order.UPWARD
    many = SWING_DIMS // 2 if gpu.bandwidth < SLOW_MEMORY else SWING_DIMS
    swings = dims >= many and p.band == "above"
    if swings and math.prod(p.batch) * p.hk % swing_section(p, key_blocks, gpu) == 0:
        return Order.SWINGS
    return Order.DOWNWARD


def swing_section(p, key_blocks: int, gpu) -> int:
    """Heads of k in a section of swings: all of them, or so many that sections are alike, or as
    many as their turns have room for, if there is no such number.
    """
    heads, turns = math.prod(p.batch) * p.hk, SWINGS if key_blocks >= SWING_BLOCKS else TURNS
    most = max(1, turns * gpu.multiprocessors // key_blocks)
    fewest, fullest = (round(most * full) for full in FULL)
    alike = [size for size in range(max(1, fewest), fullest + 1) if heads % size == 0]
    return heads if heads <= most else max(alike, default=most)


def section(p, tile, key_blocks: int, gpu, ordered: bool) -> int:
    """Heads of k whose blocks of keys are handed out together.

    If dQ is not added up in memory, so many that everyone gets the same work. Without a band no
    more than have their sums in the cache: one each, since blocks at work at the same time walk
    over the heads of a group together. With a band as many as have all of their blocks at work
    within some turns of the GPU; with a mask, where they wait for each other, so many that few are.
    """
    even = grid.even_section(key_blocks, gpu.multiprocessors)
    if not tile.adds_dq:
        return even
    if p.band == "none":
        sums_of_a_head = 4 * DQ_PART * tile.consumers * -(-p.nq // tile.block_m)
        return max(1, min(even, SUMS_AT_WORK // sums_of_a_head))
    if ordered and p.options.tiled:
        return -(-gpu.multiprocessors // AT_WORK[tile.block_m])
    how, shared = order(p, key_blocks, gpu, ordered), p.hq > p.hk
    if how is Order.SWINGS:
        return swing_section(p, key_blocks, gpu)
    together = ordered and (shared or key_blocks >= MANY_BLOCKS)
    turns = TURNS if together and not (how is Order.UPWARD and shared) else 1
    return max(1, turns * gpu.multiprocessors // key_blocks)


class Way(NamedTuple):
    """`Sizes.upward` and `Sizes.swing`."""

    upward: int
    swing: int


def way(p, items: int, section: int, key_blocks: int, gpu, ordered: bool) -> Way:
    """Which work items go upward: none, all but those of the last sections, or every other swing,
    of so many blocks of a head as are at work at the same time.
    """
    how = order(p, key_blocks, gpu, ordered)
    if how is Order.SWINGS:
        return Way(upward=0, swing=max(1, gpu.multiprocessors // section))
    if how is Order.DOWNWARD:
        return Way(upward=0, swing=0)
    of_a_section = section * key_blocks
    sections = -(-items // of_a_section)
    return Way(upward=max(0, sections - DOWNWARD) * of_a_section, swing=0)


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
    return FEWEST_ROUNDED[tile.block_m] <= blocks * (p.d + p.dv) and blocks <= MOST_ROUNDED


def mean_blocks(p, tile) -> float:
    """How many blocks of keys add to a tile of dQ, in the mean."""
    tiles = grid.blocks(p, p.nq, tile.block_m)
    last = (min(at * tile.block_m + tile.block_m + p.high, p.nk) for at in range(tiles))
    return sum(-(-keys // tile.block_n) for keys in last) / tiles
