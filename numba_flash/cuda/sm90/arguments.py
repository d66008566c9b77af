"""What the host and the kernels for Hopper hand to each other, and the threads of a block to each
other: by name.
"""

import math
from typing import Any, NamedTuple

import numpy as np

LOG2E = math.log2(math.e)


class Sizes(NamedTuple):
    """Of a problem, as kernels number its work; see `numba_flash.cuda.work.schedule.build_item`.

    Attributes
    ----------
    items : int
        Work items.
    low, high : int
        The band, of column - row; rows are queries, in the main backward kernels keys.
    columns, kv_splits : int
        How many columns there are, and how many parts they are split into.
    group : int
        Query heads of a key head.
    section : int
        Heads whose row blocks are handed out together.
    b0 : int
        The first of the leading sizes.
    upward : int
        In backward kernels that `may_go_upward`: so many work items, the first, go through their
        tiles of queries upward, and their blocks of keys come last first; both are the other way
        round in those that follow.
    serpentine : int
        If not 0, `upward` does not matter: blocks of keys of a head come in serpentine order, so
        many at a time. The first of these goes downward, its last block first, the next upward, its
        first block first. The band may hide later keys alone.
    first_block, blocks : int
        Where dS is made for some blocks of keys at a time: the first, and for how many there is
        room. Where it is made for listed tiles: the section, and how many slots one has, see
        `numba_flash.cuda.sm90.dq.ds_slots`; `kv_splits` is how many sections there may be.
    """

    items: int
    low: int
    high: int
    columns: int
    kv_splits: int
    group: int
    section: int
    b0: int
    upward: int = 0
    serpentine: int = 0
    first_block: int = 0
    blocks: int = 0

    @classmethod
    def of_queries(cls, p, items: int, section=1, kv_splits=1, blocks=0) -> "Sizes":
        """Of kernels whose rows are queries of a problem."""
        group, b0 = p.hq // p.hk, p.batch[0]
        return cls(items, p.low, p.high, p.nk, kv_splits, group, section, b0, blocks=blocks)

    @classmethod
    def of_keys(cls, p, items: int, section: int, kv_splits=1, blocks=0) -> "Sizes":
        """Of kernels whose rows are its keys."""
        group, b0 = p.hq // p.hk, p.batch[0]
        return cls(items, -p.high, -p.low, p.nq, kv_splits, group, section, b0, blocks=blocks)


class Scales(NamedTuple):
    """Factors of scores: with softcap, `slope` leads to the tanh; what comes after, or the score,
    times `scale_log2` is in base 2. And the `scale` itself, of dQ and dK.
    """

    slope: float
    scale_log2: float
    scale: float


class OptionScales(NamedTuple):
    """What leads from scores to base 2, or, where options hide and drop alone, from raw products;
    the scale itself, of dK; and the numbers of the options.
    """

    scale_log2: float
    scale: float
    parameters: Any


class ForwardScales(NamedTuple):
    """`scale_log2` of `OptionScales`, and the numbers of the options."""

    scale_log2: float
    parameters: Any


def scales(problem) -> Scales:
    """Those of a problem."""
    scale, cap = problem.scale, problem.options.softcap
    slope, log2 = (2 * LOG2E * scale / cap, cap * LOG2E) if cap else (0, scale * LOG2E)
    return Scales(*map(np.float32, (slope, log2, scale)))


class GradientScales(NamedTuple):
    """What leads from raw products to base 2, and the scale itself, of dQ and dK."""

    scale_log2: float
    scale: float


# ---- a work item, as it is written down in shared memory: one int32 each


class ForwardWork(NamedTuple):
    """For the forward kernel: a `numba_flash.cuda.work.schedule.Item` whose rows are queries, and
    the head of k and v.
    """

    b0: int
    b1: int
    head: int
    kv_head: int
    row0: int
    q0: int
    queries: int
    k0: int
    keys: int
    low: int
    high: int
    invalid: int
    first: int
    count: int
    kv_split: int


# With a bias, a mask, dropout or a score_mod words follow those of a work item: b1 of the scores,
# which for packed sequences is the number of one, while their arrays have no such axis; and, in the
# backward pass, how many tiles the heads of its group have together.
SCORES_B1 = len(ForwardWork._fields)


def may_go_upward(ordered, options) -> bool:
    """Whether blocks of keys may go through their tiles of queries upward: if they add to dQ in
    turns, and count who comes before by the band. Lists of tiles count those of earlier keys alone,
    and packed sequences have no sections.
    """
    return ordered and not options.tiled and not options.packed


class BackwardWork(NamedTuple):
    """For the backward kernels: an `Item` whose rows are keys, and the number of the first row
    block of queries of its first head. `first` is the tile of queries with which it begins, or its
    complement if it goes downward, see
    `numba_flash.cuda.sm90.backward.walk_backward.build_tile_at`.
    """

    b0: int
    b1: int
    kv_head: int
    row0: int
    k0: int
    keys: int
    q0: int
    queries: int
    low: int
    high: int
    invalid: int
    first: int
    count: int
    base: int


BACKWARD_SCORES_B1 = len(BackwardWork._fields)
BACKWARD_TILES = BACKWARD_SCORES_B1 + 1


class TileNote(NamedTuple):
    """What is written down about a tile of queries of a work item whose scores have options: its
    first query, its head, and whether nothing of it is hidden, as far as a list tells. All int32.
    """

    row0: int
    head: int
    whole: int


class StoredNote(NamedTuple):
    """The same, and where dS of the tile goes: the number of its part of a slot, or -1."""

    row0: int
    head: int
    whole: int
    slot: int


class DqWork(NamedTuple):
    """For the kernel that makes dQ: an `Item` whose rows are queries; the number of its row block;
    whether its sum begins, and ends.
    """

    b0: int
    b1: int
    head: int
    kv_head: int
    row0: int
    q0: int
    queries: int
    k0: int
    keys: int
    invalid: int
    first: int
    count: int
    number: int
    begins: int
    ends: int


DQ_START = len(DqWork._fields)  # where tiles are listed: the place of the first in its list


class DbiasNote(NamedTuple):
    """What is written down about a step of the gradient of a bias: a tile of scores, its head, the
    sequence; the share of the walk, its head of k; what `kind` of step it is, of `DbiasKind`; and
    where the block's next tile of the gradient is, some tile after the last. All int32.
    """

    b0: int
    b1: int
    head: int
    row0: int
    col0: int
    queries: int
    keys: int
    low: int
    high: int
    share: int
    kv_head: int
    kind: int
    next_b0: int
    next_b1: int
    next_head: int
    next_row0: int
    next_col0: int


class DbiasKind(NamedTuple):
    """Bits of the kind of a step: nothing of its tile is hidden, as far as a map tells; the sum is
    complete with it; there is nothing to add; a sequence was invalid.
    """

    whole: int = 1
    last: int = 2
    empty: int = 4
    invalid: int = 8


END = -1  # in the place of the count of tiles: there is no more work


def one_type(numbers):
    """The same named integers, none of them a literal to Numba, which would compile every function
    anew for each; the assembler folds them.
    """
    return type(numbers)._make(map(np.uint32, numbers))


def words(cls):
    """Where each field of what is written down lies: its place among the int32."""
    return one_type(cls._make(range(len(cls._fields))))
