"""A consumer's rows of a block of queries: how it begins a work item, and which of its scores are
hidden.
"""

from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import i32, inline, once, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.swizzle import ROW_BYTES
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.arguments import END, one_type
from numba_flash.cuda.sm90.forward.load_forward import WORD

ROWS = 64  # of a consumer


class BegunItem(NamedTuple):
    """A work item as a consumer's thread begins it.

    Attributes
    ----------
    count : int32
        Its tiles of keys; END if there is none.
    row, col : int32
        The thread's first row, the last tile's first column.
    keys, low, high : int32
        Of its sequence.
    q_tile : uint32
        Descriptor of the consumer's rows of Q.
    """

    count: int
    row: int
    col: int
    keys: int
    low: int
    high: int
    q_tile: int


@once
def build_begin(block_n, q, work):
    """``begin_item(smem, me, item_n)``: the block's work item `item_n` as `BegunItem`, which is
    there, with its tile of Q; `q` and `work` are rings.
    """
    BLOCK_N, Q, WORK = block_n, one_type(q), one_type(work)

    @inline
    def begin_item(smem, me, item_n):
        """Wait for a work item, and for its tile of Q."""
        pipeline.wait_ready(smem, WORK, item_n)
        count = pipeline.uniform(pipeline.read(smem, WORK, item_n, WORD.count))
        row0 = pipeline.read(smem, WORK, item_n, WORD.row0)
        row = i32(row0 + me * ROWS + wgmma.first_row())
        first = pipeline.read(smem, WORK, item_n, WORD.first)
        col = i32((first + count - 1) * BLOCK_N)
        low = pipeline.read(smem, WORK, item_n, WORD.low)
        high = pipeline.read(smem, WORK, item_n, WORD.high)
        rows = pipeline.tile(smem, Q, item_n) + u32(me * ROWS * ROW_BYTES)
        q_tile = wgmma.descriptor(rows, u32(0))
        if count != END:
            pipeline.wait_ready(smem, Q, item_n)
        keys = pipeline.read(smem, WORK, item_n, WORD.keys)
        return BegunItem(count, row, col, keys, low, high, q_tile)

    return begin_item


@once
def build_begin_sums(tile, k, relative):
    """``begin_sums(s, smem, me, n)``: a thread's scores of the n-th tile, in the ring `k`, become
    what a function of the score adds to them (`numba_flash.cuda.score.relative`), which lies from
    `relative` on. Its second row has, but for two, numbers of the first one, which lies 8 above.
    """
    K, RELATIVE, BYTES, BLOCK_M = one_type(k), relative, tile.relative_bytes, tile.block_m
    GROUPS = tile.block_n // 8

    @inline
    def begin_sums(s, smem, me, n):
        row = i32(me * ROWS + wgmma.first_row())
        of_tile = u32(smem + u32(RELATIVE) + n % u32(K.slots) * u32(BYTES))
        at = u32(of_tile + u32(4 * i32(BLOCK_M - row + fragment.first_column())))
        for c in range(2):
            s[2 + c] = ptx.load_shared_float(u32(at + u32(4 * c) - u32(32)))
        for j in range(GROUPS):
            for c in range(2):
                s[4 * j + c] = ptx.load_shared_float(u32(at + u32(32 * j + 4 * c)))
                if j + 1 < GROUPS:
                    s[4 * j + 6 + c] = s[4 * j + c]

    return begin_sums


@once
def build_hide(block_n, starts):
    """``hide(s, row, col0, item)``; with `starts` keys below a diagonal are hidden, too."""
    BLOCK_N, STARTS = block_n, starts
    hide_row = softmax.build_hide(block_n // 2, starts)

    @inline
    def hide(s, row, col0, item):
        """Scores that the mask hides become -inf; most tiles have none."""
        low, high, keys = item.low, item.high, item.keys
        # from the warp group's first row on; in 32 bits, which take fewer instructions
        first, col1 = i32(row - row % ROWS), i32(col0 + BLOCK_N)
        hides = col1 > keys or i32(col1 - first) > i32(high + 1)
        if STARTS:
            hides = hides or i32(col0 - first) < i32(low + ROWS - 1)
        if hides:
            column = i32(col0 + fragment.first_column())
            for r in range(2):
                i = i32(row + 8 * r)
                stop = min(i32(keys - column), i32(i32(high - column) + i32(i + 1)))
                hide_row(s, r, i32(i32(low - column) + i), stop)

    return hide


@once
def build_masked(block_n):
    """``masked(item)``: how many of a work item's tiles, the first ones, hide something from a row
    of this consumer, where only keys above a diagonal are hidden; the first counts as one.
    """
    BLOCK_N = block_n

    @inline
    def masked(item):
        first = item.row - item.row % ROWS
        hidden = i32(item.col + BLOCK_N - (first + item.high + 1))  # columns, of the first row
        tiles = i32((max(hidden, i32(0)) + BLOCK_N - 1) // BLOCK_N)
        return pipeline.uniform(min(max(tiles, i32(1)), item.count))

    return masked
