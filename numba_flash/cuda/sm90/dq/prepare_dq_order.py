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

# Bytes of sums of dQ that blocks at work at the same time add to. With their queries and gradients,
# which are as many bytes, they stay in the L2 cache (50 MB on an H100). Twice as many make full
# attention up to 2 % slower. Measured: docs/lab/hopper_dq.md, `SUMS_AT_WORK`.
SUMS_AT_WORK = 2**24
# The last DOWNWARD sections of a causal pass go downward, the longest blocks first, so that all
# multiprocessors end at about the same time; all others go upward, where blocks hardly wait for
# each other. A section takes TURNS turns of the GPU if a head has MANY_BLOCKS blocks of keys,
# otherwise one turn. In a shorter section fewer heads have their sums in the L2 cache at the same
# time, but there are more sections; with four turns, D = 128 is up to 28 % slower than all
# downward, presumably since the sums no longer fit. With no section downward, or with two, long
# sequences get a few percent slower. Measured: docs/lab/hopper_dq.md, `DOWNWARD`.
DOWNWARD, WAVES, MANY_BLOCKS = 1, 2, 24
# How many head dimensions the heads that share keys have together decides the order: up to
# UPWARD_DIMS upward, from SERPENTINE_DIMS on in swings (from half of that on where memory is slow),
# in between downward. Upward, tiles of all these heads push each other out of the L2 cache; swings
# keep them there, but blocks wait at both ends, which costs less the more steps lie between. A
# section takes SERPENTINE turns of the GPU, each of them one swing, if a head has
# SERPENTINE_BLOCKS; otherwise TURNS. Memory is slow below SLOW_MEMORY bytes a second: what has left
# the L2 cache comes back later. By clock and wires an H100 has 3.35e12 and an H200 4.92e12; nothing
# in between was measured. Measured: docs/lab/hopper_dq.md, `SERPENTINE`.
UPWARD_DIMS, SERPENTINE_DIMS, SERPENTINE, SERPENTINE_BLOCKS, SLOW_MEMORY = 128, 1024, 4, 16, 4.1e12
# How full the turns of a section of swings may be, at least and at most, so that sections are
# alike: in a smaller last one several swings of a head would be at work at the same time, of which
# the later wait. A wider range admits more problems, whose multiprocessors wait longer. This was
# not timed: who waits was counted, for multiprocessors that do a tile a step. Counted:
# docs/lab/hopper_dq.md, `FULL`.
FULL = 3 / 4, 4 / 3
# Fewest blocks of keys under a band for which packed sequences may be added in any order. With
# fewer, to begin with zeros costs more than nobody waiting gains. Measured: docs/lab/hopper_dq.md,
# `MANY_PACKED`.
MANY_PACKED = 16
# Blocks of keys of one head that are at work at the same time under a mask and a band, by the
# queries of a tile. They go downward, and wait for each other at the first tile, longer if they are
# more, or tiles larger; if they are fewer, more heads have their tiles and sums in the L2 cache,
# which matters for long sequences on an H100, whose memory is slower. All were timed without a
# mask. Measured: docs/lab/hopper_dq.md, `AT_WORK`.
AT_WORK = {64: 4, 128: 3}
# FEWEST_ROUNDED, by rows of a tile: blocks of keys that add to one, in the mean, times the head
# dimensions of Q and of V together, from which on a warp of the main kernel rounds dQ. With fewer
# the warp does not keep up, and a pass is up to a tenth slower; with more it is up to a tenth
# faster, since no other kernel reads the sums from memory again. With more blocks than MOST_ROUNDED
# that no longer matters. Measured: docs/lab/hopper_dq.md, `FEWEST_ROUNDED`.
FEWEST_ROUNDED = {128: 320, 64: 1152}
MOST_ROUNDED = 24


def ordered(p, tile, deterministic: bool) -> bool:
    """Whether blocks of keys add to dQ in turns: if that has to be deterministic, or is as fast so.
    What is not added in memory needs no turns.

    Additions in any order begin with zeros, but nobody waits. Where all blocks go downward, as with
    a mask and packed sequences, that is a few percent faster for long sequences and slower for
    short ones; where they go upward, or there is no band, it is never faster. All were timed
    without a mask. Measured: docs/lab/hopper_dq.md, `MANY_PACKED`.
    """
    many = p.band != "none" and grid.blocks(p, p.nk, tile.block_n) >= MANY_PACKED
    waits = p.options.tiled or (p.options.packed and many)
    return tile.adds_dq and (deterministic or not waits)


class Order(Enum):
    """In which order blocks of keys that add to dQ in turns come, and go through their tiles."""

    DOWNWARD = "the first block first, each beginning with the last queries"
    UPWARD = "the last block first, each beginning with the first queries"
    SERPENTINE = "some of a head downward, the last first, then as many upward, the first first"


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
    many = SERPENTINE_DIMS // 2 if gpu.bandwidth < SLOW_MEMORY else SERPENTINE_DIMS
    serpentine = dims >= many and p.band == "above"
    if serpentine and math.prod(p.batch) * p.hk % serpentine_section(p, key_blocks, gpu) == 0:
        return Order.SERPENTINE
    return Order.DOWNWARD


def serpentine_section(p, key_blocks: int, gpu) -> int:
    """Heads of k in a section of swings: all of them, or so many that sections are alike, or as
    many as their turns have room for, if there is no such number.
    """
    heads, waves = (
        math.prod(p.batch) * p.hk,
        SERPENTINE if key_blocks >= SERPENTINE_BLOCKS else WAVES,
    )
    most = max(1, waves * gpu.multiprocessors // key_blocks)
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
    if how is Order.SERPENTINE:
        return serpentine_section(p, key_blocks, gpu)
    together = ordered and (shared or key_blocks >= MANY_BLOCKS)
    waves = WAVES if together and not (how is Order.UPWARD and shared) else 1
    return max(1, waves * gpu.multiprocessors // key_blocks)


class Direction(NamedTuple):
    """`Sizes.upward` and `Sizes.serpentine`."""

    upward: int
    serpentine: int


def way(p, items: int, section: int, key_blocks: int, gpu, ordered: bool) -> Direction:
    """Which work items go upward: none, all but those of the last sections, or every other swing,
    of so many blocks of a head as are at work at the same time.
    """
    how = order(p, key_blocks, gpu, ordered)
    if how is Order.SERPENTINE:
        return Direction(upward=0, serpentine=max(1, gpu.multiprocessors // section))
    if how is Order.DOWNWARD:
        return Direction(upward=0, serpentine=0)
    of_a_section = section * key_blocks
    sections = -(-items // of_a_section)
    return Direction(upward=max(0, sections - DOWNWARD) * of_a_section, serpentine=0)


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
