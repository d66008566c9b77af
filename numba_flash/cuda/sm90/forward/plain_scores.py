"""The `ScoreStage` without options that belong to pairs: a softcap, a band, lengths, lists of
tiles, and a number for each distance.
"""

from typing import Any, NamedTuple

from numba_flash.cuda.passes.preprocess import LEAST_FLOAT32
from numba_flash.cuda.runtime.lang import i32, i64, inline, once, u32, u64
from numba_flash.cuda.score import softmax
from numba_flash.cuda.score.softcap import build_tanh
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import SCORES_B1, one_type
from numba_flash.cuda.sm90.forward.finish import as_it_is, log_sum_base_2
from numba_flash.cuda.sm90.forward.load_forward import WORD
from numba_flash.cuda.sm90.forward.score_stage import ScoreStage
from numba_flash.cuda.sm90.rows import build_begin_sums, build_hide, build_masked
from numba_flash.cuda.work import tile_lists


class PlainTile(NamedTuple):
    """A tile of scores.

    Attributes
    ----------
    item_n : uint32
        Number of the work item among the block's.
    count, q_tile, row, col, keys, low, high : int
        As those of `numba_flash.cuda.sm90.rows.BegunItem`, but that `col` is this tile's first
        column.
    last : uint64
        Where the last tile of the work item is listed; of an empty list where its length is, 0.
    """

    count: int
    item_n: int
    q_tile: int
    row: int
    col: int
    keys: int
    low: int
    high: int
    last: Any


@once
def build_last_of(block_m, block_n, work):
    """``last_of(smem, item_n, item, lists)``: `PlainTile.last` of a `BegunItem` item."""
    BLOCK_M, BLOCK_N, WORK = block_m, block_n, one_type(work)
    list_of, _ = tile_lists.build_access(True)

    @inline
    def last_of(smem, item_n, item, lists):
        b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
        b1 = pipeline.read(smem, WORK, item_n, SCORES_B1)
        head = pipeline.read(smem, WORK, item_n, WORD.head)
        block = i32(u32(pipeline.read(smem, WORK, item_n, WORD.row0)) // u32(BLOCK_M))
        number = i32(u32(item.col) // u32(BLOCK_N)) if item.keys > 0 else i32(-1)
        return u64(list_of(lists, b0, b1, head, block) + u64(i64(number) * 4))

    return last_of


def build_weigh(config, hides):
    """`ScoreStage.weigh` of plain scores; if it `hides`, of tiles that a band or an end crosses."""
    SCORES, HIDES, CAPPED = config.tile.block_n // 2, hides, bool(config.options.softcap)
    BFLOAT16 = config.dtype == "bfloat16"
    tanh = build_tanh(SCORES, BFLOAT16)
    hide = build_hide(config.tile.block_n, config.band == "both")
    online = softmax.build_online(SCORES, softmax.raised(BFLOAT16, softmax.LAZY))

    @inline
    def weigh(s, bias_mask, m_i, l_i, alpha, x, scales, smem, me, n, more):
        if CAPPED:
            tanh(s, scales.slope, scales.scale_log2)
        if HIDES:
            hide(s, x.row, x.col, x)
        online(s, m_i, l_i, alpha, scales.scale_log2)

    return weigh


def build(config, layout):
    """`ScoreStage` of scores that nothing belongs to, or a number for each distance."""
    BLOCK_N, BLOCK_SPARSE, BANDED = (
        config.tile.block_n,
        config.options.block_sparse,
        config.band != "none",
    )
    ADDS = config.options.relative
    last_of = build_last_of(config.tile.block_m, BLOCK_N, layout.work)
    _, entry_of = tile_lists.build_access(True)
    begin_all = build_begin_sums(config.tile, layout.k, layout.relative) if ADDS else None

    @inline
    def column(last, t):
        return i32(entry_of(last, i32(-t)).at * BLOCK_N)

    @inline
    def first(smem, item_n, item, o, extras):
        col, last = item.col, u64(0)
        if BLOCK_SPARSE:
            last = last_of(smem, item_n, item, extras)
            col = column(last, 0)
        return PlainTile(
            item.count, item_n, item.q_tile, item.row, col, item.keys, item.low, item.high, last
        )

    @inline
    def following(x, before, t):
        col = i32(x.col - t * BLOCK_N)
        if BLOCK_SPARSE and BANDED:
            col = column(x.last, t)
        return PlainTile(x.count, x.item_n, x.q_tile, x.row, col, x.keys, x.low, x.high, x.last)

    @inline
    def rest(x):
        return x.keys - x.col

    @inline
    def begin_sums(s, smem, me, n):
        if ADDS:
            begin_all(s, smem, me, n)

    @inline
    def read(bias_mask, smem, me, n, x, extras, first):
        """Nothing belongs to pairs."""

    @inline
    def numbers(x, scales):
        return ()

    reset = softmax.build_reset(1, LEAST_FLOAT32)
    return ScoreStage(
        first,
        following,
        build_masked(BLOCK_N),
        rest,
        begin_sums,
        read,
        build_weigh(config, True),
        build_weigh(config, False),
        numbers,
        log_sum_base_2,
        as_it_is,
        reset,
        held=1,
    )
