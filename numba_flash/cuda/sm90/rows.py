"""A consumer's rows of a block of queries: how it begins a work item, and which of its scores are
hidden.
"""

from typing import NamedTuple

from numba_flash import mask
from numba_flash.cuda import fragment, softmax
from numba_flash.cuda.lang import i32, inline, once, u32
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.arguments import END, one_type
from numba_flash.cuda.sm90.load_forward import WORD
from numba_flash.cuda.swizzle import ROW_BYTES

ROWS = 64  # of a consumer


class Begun(NamedTuple):
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
    """``begin_item(smem, me, turn)``: the work item of a turn as `Begun`, which is there, with its
    tile of Q; `q` and `work` are rings.
    """
    BLOCK_N, Q, WORK = block_n, one_type(q), one_type(work)

    @inline
    def begin_item(smem, me, turn):
        """Wait for a work item, and for its tile of Q."""
        pipeline.wait_ready(smem, WORK, turn)
        count = pipeline.uniform(pipeline.read(smem, WORK, turn, WORD.count))
        row0 = pipeline.read(smem, WORK, turn, WORD.row0)
        row = i32(row0 + me * ROWS + wgmma.first_row())
        first = pipeline.read(smem, WORK, turn, WORD.first)
        col = i32((first + count - 1) * BLOCK_N)
        low = pipeline.read(smem, WORK, turn, WORD.low)
        high = pipeline.read(smem, WORK, turn, WORD.high)
        rows = pipeline.tile(smem, Q, turn) + u32(me * ROWS * ROW_BYTES)
        q_tile = wgmma.descriptor(rows, u32(0))
        if count != END:
            pipeline.wait_ready(smem, Q, turn)
        keys = pipeline.read(smem, WORK, turn, WORD.keys)
        return Begun(count, row, col, keys, low, high, q_tile)

    return begin_item


@once
def build_hide(block_n, starts):
    """``hide(s, row, col0, item)``; with `starts` keys below a diagonal are hidden, too."""
    BLOCK_N = block_n
    hide_row = softmax.build_hide(block_n // 2, starts)

    @inline
    def hide(s, row, col0, item):
        """Scores that the mask hides become -inf; most tiles have none."""
        first, col1 = row - row % ROWS, col0 + BLOCK_N  # from the warp group's first row on
        low, high, keys = item.low, item.high, item.keys
        if col1 > keys or not mask.all_visible(first, first + ROWS, col0, col1, low, high):
            column = i32(col0 + fragment.first_column())
            for r in range(2):
                start, stop = mask.kv_range(row + 8 * r, row + 8 * r + 1, keys, low, high)
                hide_row(s, r, i32(start - column), i32(stop - column))

    return hide
