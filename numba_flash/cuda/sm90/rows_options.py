"""A consumer's rows of a block of queries where options act on scores: how it begins a work item,
and goes from tile to tile.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import fragment, tile_lists
from numba_flash.cuda.lang import i32, inline, once, u32, u64
from numba_flash.cuda.score import Head, Region
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import SCORES_B1, one_type
from numba_flash.cuda.sm90.load_forward import WORD
from numba_flash.cuda.sm90.rows import build_begin
from numba_flash.cuda.tile_lists import Listed


class Scores(NamedTuple):
    """A tile of scores of a work item, as a consumer's thread sees it.

    Attributes
    ----------
    count : int32
        Tiles of the work item; END if there is none.
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
        The tile that comes after it.
    """

    count: int
    q_tile: int
    query: int
    key: int
    at: Head
    region: Region
    whole: bool
    seen: Any
    number: int
    following: Listed


@once
def build_rows(options, block_m, block_n, q, work):
    """``begin_scores(smem, me, turn, o, extras)``: the first `Scores` of a turn, whose tile of Q is
    there; ``next_scores(x)``: those after x. The last tile comes first; `q` and `work` are rings.

    An entry of a list is read one tile before it is needed; before the first of them lies how many
    there are, which is read there for nothing.
    """
    BLOCK_M, BLOCK_N, WORK, MASKED = block_m, block_n, one_type(work), options.tiled
    begin_item = build_begin(block_n, q, work)
    list_of, listed = tile_lists.build_access(MASKED)

    @inline
    def begin_scores(smem, me, turn, o, extras):
        item = begin_item(smem, me, turn)
        b0 = pipeline.read(smem, WORK, turn, WORD.b0)
        b1 = pipeline.read(smem, WORK, turn, SCORES_B1)
        head = pipeline.read(smem, WORK, turn, WORD.head)
        queries = pipeline.read(smem, WORK, turn, WORD.queries)
        at = Head(b0, b1, i32(b0 * i32(o.shape[1]) + b1), head, i32(o.shape[2]))
        number = i32(u32(item.col) // u32(BLOCK_N))
        here, following, seen = Listed(number, False), Listed(i32(number - 1), False), u64(0)
        if MASKED and item.keys > 0:
            block = i32(u32(pipeline.read(smem, WORK, turn, WORD.row0)) // u32(BLOCK_M))
            seen = list_of(extras, b0, b1, head, block)
            here, following = listed(seen, number), listed(seen, i32(number - 1))
        col = i32(here.at * BLOCK_N)
        region = Region(item.row, col, queries, item.keys, item.low, item.high)
        key = i32(col + fragment.first_column())
        return Scores(
            item.count, item.q_tile, item.row, key, at, region, here.whole, seen, number, following
        )

    @inline
    def next_scores(x):
        number, col, region = i32(x.number - 1), i32(x.following.at * BLOCK_N), x.region
        region = Region(region.row0, col, region.rows, region.cols, region.low, region.high)
        key = i32(col + fragment.first_column())
        following = listed(x.seen, i32(number - 1))
        return Scores(
            x.count, x.q_tile, x.query, key, x.at, region, x.following.whole, x.seen, number,
            following,
        )  # fmt: skip

    return begin_scores, next_scores
