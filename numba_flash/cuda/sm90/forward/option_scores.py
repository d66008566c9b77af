"""The `ScoreStage` of bias, mask, dropout and functions of a score."""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.passes.preprocess import LEAST_FLOAT32
from numba_flash.cuda.runtime.lang import f32, i32, inline, once, u32, u64
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.fetch import build_fetch, held
from numba_flash.cuda.score.fragment import build_greatest
from numba_flash.cuda.score.modify import build_drop, build_modify
from numba_flash.cuda.score.score import Head, Region
from numba_flash.cuda.score.softmax import LAZIER, NEG_INF, build_exponentials
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import SCORES_B1, one_type
from numba_flash.cuda.sm90.forward.finish import as_it_is, build_log_sum, log_sum_base_2
from numba_flash.cuda.sm90.forward.load_forward import WORD
from numba_flash.cuda.sm90.forward.score_stage import ScoreStage
from numba_flash.cuda.sm90.pair_tiles import build_take_pairs
from numba_flash.cuda.work import tile_lists
from numba_flash.cuda.work.tile_lists import Entry


class OptionTile(NamedTuple):
    """A tile of scores, as a consumer's thread sees it.

    Attributes
    ----------
    count : int32
        Tiles of the work item.
    item_n : uint32
        Number of the work item among the block's.
    q_tile : uint32
        Descriptor of the consumer's rows of Q.
    query, key : int32
        Of the thread's register 0.
    at : Head
        Which head it is.
    region : Region
        Where the tile begins, for this thread its own row; what there is of the sequence.
    whole : bool
        Neither the mask nor the band nor an end hides anything of the tile.
    seen : uint64
        The list of the mask's tiles, if there is one.
    number : int32
        Of the tile, in that list or among all tiles.
    following : Listed
        The tile that comes after it. An entry of a list is read one tile before it is needed; after
        the last tile, which is the first of the list, it is the list's length, and not used.
    """

    count: int
    item_n: int
    q_tile: int
    query: int
    key: int
    at: Head
    region: Region
    whole: bool
    seen: Any
    number: int
    following: Entry


def build_walk(options, block_m, block_n, work):
    """`ScoreStage.first` and `following` of options."""
    BLOCK_M, BLOCK_N, WORK, MASKED = block_m, block_n, one_type(work), options.tiled
    list_of, entry_of = tile_lists.build_access(MASKED)

    @inline
    def first(smem, item_n, item, o, extras):
        b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
        b1 = pipeline.read(smem, WORK, item_n, SCORES_B1)
        head = pipeline.read(smem, WORK, item_n, WORD.head)
        queries = pipeline.read(smem, WORK, item_n, WORD.queries)
        at = Head(b0, b1, i32(b0 * i32(o.shape[1]) + b1), head, i32(o.shape[2]))
        number = i32(u32(item.col) // u32(BLOCK_N))
        here, after, seen = Entry(number, False), Entry(i32(number - 1), False), u64(0)
        if MASKED and item.keys > 0:
            block = i32(u32(pipeline.read(smem, WORK, item_n, WORD.row0)) // u32(BLOCK_M))
            seen = list_of(extras, b0, b1, head, block)
            here, after = entry_of(seen, number), entry_of(seen, i32(number - 1))
        col = i32(here.at * BLOCK_N)
        region = Region(item.row, col, queries, item.keys, item.low, item.high)
        key = i32(col + fragment.first_column())
        return OptionTile(
            item.count,
            item_n,
            item.q_tile,
            item.row,
            key,
            at,
            region,
            here.whole,
            seen,
            number,
            after,
        )

    @inline
    def following(x, before, t):
        number, col, region = i32(before.number - 1), i32(before.following.at * BLOCK_N), x.region
        region = Region(region.row0, col, region.rows, region.cols, region.low, region.high)
        key, after = i32(col + fragment.first_column()), entry_of(x.seen, i32(number - 1))
        return OptionTile(
            x.count,
            x.item_n,
            x.q_tile,
            x.query,
            key,
            x.at,
            region,
            before.following.whole,
            x.seen,
            number,
            after,
        )

    return first, following


def build(config, layout):
    """`ScoreStage` of bias, mask, dropout and functions of a score. What belongs to a pair is read
    by the thread that has its score, two neighbouring keys at a time; from shared memory, where the
    copy engine can bring it (`numba_flash.cuda.sm90.pair_tiles`), else from memory.
    """
    options, tile, BFLOAT16 = config.options, config.tile, config.dtype == "bfloat16"
    COPIES, AHEAD, DROPOUT = tile.pair_stages > 0, tile.pairs_ahead, bool(options.dropout)
    SCORES, CHANGES = tile.block_n // 2, options.changes
    RAISED = softmax.raised(BFLOAT16, softmax.LAZIER if CHANGES else softmax.LAZY)
    runs = fragment.runs_of_columns(tile.block_n)
    take_pairs = build_take_pairs(options, tile, layout.pairs) if COPIES else None
    fetch, drop = build_fetch(options, runs, config.vectors), build_drop(options, runs)
    modify = build_modify(config.dtype, options, runs, ends_apart=True)
    online = (build_far_online if CHANGES else softmax.build_online)(SCORES, RAISED)
    first, following = build_walk(options, tile.block_m, tile.block_n, layout.work)

    @inline
    def masked(x):
        return x.count

    @inline
    def rest(x):
        return x.region.cols - x.region.col0

    @inline
    def begin_sums(s, smem, me, n):
        """With nothing."""

    @inline
    def read(bias_mask, smem, me, n, x, extras, first):
        if COPIES:
            if first or not AHEAD:
                take_pairs(bias_mask, smem, me, n)
        else:
            fetch(bias_mask, x.query, x.key, x.region, x.at, x.whole, extras)

    @inline
    def weigh(s, bias_mask, m_i, l_i, alpha, x, scales, smem, me, n, more):
        numbers = scales.parameters
        modify(s, s, bias_mask, x.query, x.key, x.region, x.at, x.whole, numbers)
        if AHEAD and more:
            take_pairs(bias_mask, smem, me, u32(n + 1))
        online(s, m_i, l_i, alpha, scales.scale_log2)
        if DROPOUT:
            drop(s, x.query, x.key, x.at, numbers)

    @inline
    def numbers(x, scales):
        return scales.parameters

    @inline
    def factor(smem, item_n, extras, numbers):
        return f32(numbers.keep_scale)

    return ScoreStage(
        first,
        following,
        masked,
        rest,
        begin_sums,
        read,
        weigh,
        weigh,
        numbers,
        build_log_sum(RAISED) if CHANGES else log_sum_base_2,
        factor if DROPOUT else as_it_is,
        softmax.reset if CHANGES else softmax.build_reset(1, LEAST_FLOAT32),
        held=max(1, held(options, runs).words),
    )


@once
def build_far_online(count, raised):
    """As `numba_flash.cuda.score.softmax.build_online`, of scores that may lie near the end of
    float32, as with a bias that is meant to hide; m_i are the shifts themselves, and P and l are
    `raised`.
    """
    ACC, greatest = f32, build_greatest(count)
    exponentials = build_exponentials(count, 1, far=True, raised=raised)

    @inline
    def online(s, m_i, l_i, alpha, scale_log2):
        for r in range(2):
            m_new = ptx.maximum(m_i[r], greatest(s, r))
            if (m_new - m_i[r]) * scale_log2 <= ACC(LAZIER):
                m_new = m_i[r]
            shift = m_new if m_new != ACC(NEG_INF) else ACC(0)
            alpha[r] = ptx.ex2((m_i[r] - shift) * scale_log2)
            m_i[r] = m_new
            l_i[r] *= alpha[r]
        exponentials(s, m_i, l_i, scale_log2)

    return online
