"""How much work there is, and how it is shared out: work items, their sections, parts of the keys;
on the host.

`numba_flash.cuda.work.schedule` says the same to the device.
"""

import math
from typing import NamedTuple

import numpy as np

from numba_flash.cuda.arguments import arrays_of

DECODE_QUERIES, MANY = 16, 512  # queries of a head, and keys
MOST_BLOCKS, SHORTEST = 2**31 - 1, 8  # of a grid; rows of a block, at least
# Queries of all heads that share keys whose dQ a warp has registers for, by head dimension.
MOST_GRADIENT_ROWS = {64: 32, 128: 16}
# What a block of few queries does beside its tiles, and a kernel that combines parts, in tiles.
BLOCK_TILES, COMBINE_TILES = 1, 3
MOST_WAVES = 8  # parts that are tried where there are blocks for more than one turn
FEWEST_TILES = 4  # of keys that are worth a part of their own
ZIGZAG_WAVES = 64  # items per multiprocessor from which on their order does not matter
ITEM_TILES = 0.5  # what an item costs besides its tiles, in tiles
# Work that a section may leave to one more than the best does, if it is smaller: more blocks at
# work at the same time then read the same keys. That makes causal attention up to 9 % faster on an
# H100, and is all the same on an H200, whose memory is faster; a section that is less even leaves
# multiprocessors without work in the end. What the best leaves is 0.5 to 3 % more than the mean.
# Measured: docs/lab/any_gpu.md, `UNEVEN`.
UNEVEN = 1.007
# The same where a head has few row blocks: there, memory sets the speed, and smaller sections are
# up to 3 % faster. With eight row blocks they are slower. Measured: docs/lab/any_gpu.md,
# `UNEVEN_OF_FEW`.
FEW_ROW_BLOCKS, UNEVEN_OF_FEW = 4, 1.025
# Sections that are tried have at least a head for every so many multiprocessors, and multiples of a
# head for every so many.
SMALLEST, STEP = 22, 6


def heads_first(problem, *operands) -> tuple:
    """Packed arrays (total, heads, d) as (heads, total, d); others as they are."""
    if not problem.options.packed:
        return operands
    return tuple(x if x is None else x.swapaxes(0, 1) for x in operands)


def inputs_heads_first(problem, inputs):
    """The same of the inputs of a backward pass."""
    if not problem.options.packed:
        return inputs
    do, q, k, v, o = heads_first(problem, inputs.do, inputs.q, inputs.k, inputs.v, inputs.o)
    return inputs._replace(do=do, q=q, k=k, v=v, o=o)


def blocks(problem, rows: int, block: int) -> int:
    """Blocks of so many of the `rows` of one head; for packed sequences at least as many as all of
    them have together.
    """
    if not problem.options.packed:
        return -(-rows // block)
    return rows // block + problem.batch[1] if problem.batch[1] else 0


def items(problem, rows: int, heads: int, block: int) -> int:
    """Blocks of rows of all heads of all batch elements."""
    batches = 1 if problem.options.packed else math.prod(problem.batch)
    return batches * heads * blocks(problem, rows, block)


def too_many_blocks(problem) -> str | None:
    """Why a problem has more blocks of rows than kernels can number, or None."""
    p = problem
    count = max(items(p, p.nq, p.hq, SHORTEST), items(p, p.nk, p.hk, SHORTEST))
    if count <= MOST_BLOCKS:
        return None
    return f"numbers at most {MOST_BLOCKS} blocks of rows; of {SHORTEST} rows, these are {count}"


def tiles_in_band(problem, block_m: int, block_n: int) -> int:
    """Tiles of scores of a head that the band does not hide, of the longest possible sequence."""
    p, rows = problem, np.arange(0, problem.nq, block_m)
    if p.options.sequences:  # each has its band
        return len(rows) * blocks(p, p.nk, block_n)
    first = np.clip(p.low + rows, 0, p.nk) // block_n
    last = -(-np.clip(p.high + np.minimum(rows + block_m, p.nq), 0, p.nk) // block_n)
    return int(np.maximum(last - first, 0).sum())


def lengths_shape(problem) -> int | tuple[int, int]:
    """Layout in which kernels read lengths (one per batch element) and offsets, see
    `numba_flash.cuda.runtime.launch.Launch`.
    """
    return 1 if problem.options.packed else problem.batch


def extras_layouts(problem, inputs) -> tuple:
    """Layouts of the optional arrays that there are among `inputs`, in the order of
    `numba_flash.cuda.arguments.EXTRAS`.
    """
    p = problem
    heads, blocks = (*p.batch, p.hq), p.options.blocks
    views = {
        "bias": (*heads, p.nq, p.nk),
        "mask": (*heads, *(blocks.counts(p.nq, p.nk) if blocks else (p.nq, p.nk))),
        "q_lengths": lengths_shape(p),
        "kv_lengths": lengths_shape(p),
    }
    if p.options.paged:
        views["page_table"] = (*p.batch, p.nk // p.options.paged.size)
    return tuple((getattr(inputs, name), views[name]) for name in arrays_of(p.options))


def kv_splits(problem, block_m: int, block_n: int, multiprocessors: int) -> int:
    """Parts that the keys of each row block are split into: more than one where there are too few
    row blocks for the GPU.
    """
    p, count = problem, items(problem, problem.nq, problem.hq, block_m)
    if not count or p.options.packed or 2 * count > multiprocessors:
        return 1
    tiles = min(p.nk, p.high - p.low + block_m) // block_n
    return max(1, min(multiprocessors // count, tiles // FEWEST_TILES))


def is_decode(problem) -> bool:
    """True if a problem is one of reading K and V: the queries of all heads that share keys are
    better rows of one tile then. Those of a mask of blocks that has few of these.
    """
    p = problem
    return 0 < p.nq <= DECODE_QUERIES and p.hk > 0 and not p.options.packed and not p.options.blocks


def bound_by_memory(problem) -> bool:
    """True if it is that to such a degree that it matters who reads K and V but once."""
    p = problem
    half = p.dtype in ("float16", "bfloat16")
    return is_decode_without_tensor_cores(p) or (half and is_decode(p) and p.nk >= MANY)


def is_decode_without_tensor_cores(problem, many: int = MANY) -> bool:
    """True if it stays one of reading K and V where no tensor cores multiply, with `many` keys: all
    heads that share them have few queries together.
    """
    p = problem
    few = is_decode(p) and p.nq * (p.hq // p.hk) <= DECODE_QUERIES
    return few and p.nk >= many and not p.options.dropout


def is_decode_gradient(problem) -> bool:
    """True if gradients are one of reading K and V, and of writing as much: one tile has the
    queries of all heads that share keys, and the sums of their dQ.
    """
    p = problem
    half, d = p.dtype in ("float16", "bfloat16"), max(p.d, p.dv)
    most = next((rows for most, rows in MOST_GRADIENT_ROWS.items() if d <= most), 0)
    few = half and is_decode(p) and p.nq * (p.hq // p.hk) <= most
    return few and p.nk >= MANY and not p.options.modifies


def decode_kv_splits(problem, tile, at_once: int, whole: bool = False) -> int:
    """The same of few queries, where a tile has rows of all heads that share keys: so many that the
    last block is done first, if blocks take turns, `at_once` at a time; of the `whole` of the keys,
    or of those that a band leaves. By another rule, as if one began whenever another is done, long
    sequences take 8 % longer. Measured: docs/lab/any_gpu.md, `decode_kv_splits`.
    """
    p = problem
    count = items(p, p.nq * tile.group, p.hk, tile.block_m)
    tiles = -(-(p.nk if whole else min(p.nk, p.high - p.low + p.nq)) // tile.block_n)
    if count == 0 or tiles <= 0:
        return 1

    def time(kv_splits):
        waves = -(-count * kv_splits // at_once)
        return waves * (-(-tiles // kv_splits) + BLOCK_TILES) + (
            COMBINE_TILES if kv_splits > 1 else 0
        )

    return min(range(1, min(tiles, max(MOST_WAVES, at_once // count)) + 1), key=time)


def even_section(row_blocks: int, multiprocessors: int) -> int:
    """Fewest heads of so many blocks that are a whole number of turns there and back."""
    return 2 * multiprocessors // math.gcd(row_blocks, 2 * multiprocessors)


def section(problem, block_m: int, block_n: int, multiprocessors: int) -> int:
    """Heads whose row blocks are handed out together, longest first, so that no multiprocessor gets
    much more work than another: the smallest that is as good as the best.
    """
    p, waves = problem, multiprocessors
    row_blocks, pairs = blocks(p, p.nq, block_m), math.prod(p.batch) * p.hq
    smallest, step = max(1, waves // SMALLEST), max(1, waves // STEP)
    even = even_section(row_blocks, waves)
    if row_blocks * pairs > ZIGZAG_WAVES * waves:  # one item more or less is nothing
        return even
    rows = np.arange(row_blocks) * block_m
    first = np.maximum(p.low + rows, 0) // block_n
    last = -(-np.clip(p.high + rows + block_m, 0, p.nk) // block_n)
    work = np.maximum(last - first, 1) + ITEM_TILES
    most = lambda size: most_work(work, pairs, size, waves)
    works = {size: most(size) for size in (smallest, even, *range(step, 2 * waves + 1, step))}
    limit = min(works.values()) * (UNEVEN_OF_FEW if row_blocks <= FEW_ROW_BLOCKS else UNEVEN)
    return min(size for size, work in works.items() if work <= limit)


def most_work(work, pairs: int, section: int, waves: int) -> float:
    """Work of the busiest of `waves` blocks that take what `schedule.build_item` numbers, as
    `schedule.zigzag` says.

    `work` is that of the row blocks of one of `pairs` heads.
    """
    number = np.arange(len(work) * pairs)
    begin = number // (section * len(work)) * section
    block = len(work) - 1 - (number - begin * len(work)) // np.minimum(section, pairs - begin)
    load = np.pad(work[block], (0, -len(number) % waves)).reshape(-1, waves)
    return (load[::2].sum(0) + load[1::2, ::-1].sum(0)).max()


def summed_axes(problem, dbias) -> tuple[bool, ...]:
    """Which axes of the scores a bias broadcasts, where these are not 1 themselves; of its gradient
    (array or layout).
    """
    shape = (1,) * (5 - dbias.ndim) + tuple(dbias.shape)
    scores = (*problem.batch, problem.hq, problem.nq, problem.nk)
    return tuple(n == 1 != size for n, size in zip(shape, scores, strict=True))


class Broadcast(NamedTuple):
    """What becomes the gradient of a bias, in tiles.

    Attributes
    ----------
    summed : tuple of five bools
        As `summed_axes` says.
    tiles : int
        Of the gradient.
    walk : int
        Tiles of scores that are summed to one of them.
    """

    summed: tuple[bool, ...]
    tiles: int
    walk: int

    @classmethod
    def of(cls, problem, dbias, block_m: int, block_n: int) -> "Broadcast":
        """Of a gradient (array or layout) in such tiles."""
        p, summed = problem, summed_axes(problem, dbias)
        sizes = (*p.batch, p.hq, -(-p.nq // block_m), -(-p.nk // block_n))
        product = lambda which: math.prod(
            n for n, gone in zip(sizes, summed, strict=True) if gone == which
        )
        return cls(summed, product(False), product(True))

    def shares(self, waves: int, most: int, cost: int) -> int:
        """So many, up to `most`, that the busiest of `waves` that take them in their order is done
        first; a share costs `cost` steps of the walk beside its own.
        """
        time = lambda n: -(-self.tiles * n // waves) * (-(-self.walk // n) + cost)
        return min(range(1, max(1, min(self.walk, most)) + 1), key=time)
