"""The gradient of a bias on Hopper under any option: a `DbiasStage` whose steps are written down.
A consumer reads the bias from memory, once per tile of the gradient, while the tile before it is
summed for the last time, and stores sums.
"""

import math
from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import Extent, extras_type, parameters_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.passes.store_dbias import Fragments, build_store
from numba_flash.cuda.runtime.lang import f32, i32, i64, inline, named, types, u32
from numba_flash.cuda.score import fragment
from numba_flash.cuda.score.fetch import build_fetch, held
from numba_flash.cuda.score.modify import build_drop, build_modify
from numba_flash.cuda.score.score import LOG2E, Head, Region
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import DbiasKind, one_type
from numba_flash.cuda.sm90.bias_gradient.dbias_notes import (
    NOTE,
    build_loads,
    build_note,
    build_walk,
)
from numba_flash.cuda.sm90.bias_gradient.dbias_stage import DbiasStage, first_row
from numba_flash.cuda.sm90.bias_gradient.dbias_tiles import LOADERS, WARPS
from numba_flash.cuda.sm90.config import BiasGradientConfig
from numba_flash.cuda.sm90.hopper_kernel import Arrivals, Producer
from numba_flash.cuda.sm90.pipeline import TilePlace
from numba_flash.cuda.sm90.tiles import WARP_GROUP


class Here(NamedTuple):
    """Where a thread's first score of a part of the keys is; whether it hides nothing."""

    query: int
    key: int
    region: Region
    at: Head
    whole: bool


@inline
def first_column():
    """Its first key."""
    return i32(ptx.thread_here() % 4 * 2)


def build(config: BiasGradientConfig) -> DbiasStage:
    """Its kernel takes (maps, rows, out, extras, extent, items, parameters).

    maps : tensor maps of do, q, k and v as (b0, b1, heads, n, head_dim), boxes of one panel of a
        tile of queries, or of a part of the keys.
    rows : (2, b0, b1, heads, at least n): the lse in base 2 and delta of each query, as
        `numba_flash.cuda.passes.preprocess` writes them; a multiple of 64.
    out : (shares, b0, b1, heads, n, n) of dtype ``config.out``, with sizes 1 where it is summed.
    items : tiles of the gradient, times shares.
    """
    options, tile, summed, vectors = config.options, config.tile, config.summed, config.vectors
    PART, PARTS, CONSUMERS = tile.part, tile.parts, tile.consumers
    SMEM, runs = tile.layout(config.d, config.dv), fragment.runs_of_columns(PART)
    NOTES, SUMS, SCORES, ALL_SCORES = one_type(SMEM.notes), SMEM.sums, PART // 2, PARTS * PART // 2
    KIND, DROPOUT, MASKED, NAN = (
        one_type(DbiasKind()),
        bool(options.dropout),
        options.mask,
        math.nan,
    )
    SUM_0, SUM_1, SUM_H, SUM_I, SUM_J = summed
    HELD = held(options, runs).words
    note_steps = build_note(SMEM.notes, config.banded, summed, options, tile)
    fetch_bias, fetch_mask = (build_fetch(options, runs, vectors, (x,)) for x in ("bias", "mask"))
    modify, drop = build_modify(config.dtype, options, runs), build_drop(options, runs)
    walk = build_walk(SMEM.notes, PARTS)
    has_steps = walk.has_steps

    @inline
    def meet():
        pipeline.meet_consumers(CONSUMERS)

    fragments = Fragments(runs, PARTS, PART, CONSUMERS * WARPS, 1, 16, 2, WARPS, True, meet)
    store = build_store(config.out, config.wide, False, summed, fragments)

    @inline
    def read(w, item_n, word):
        return pipeline.read(w.smem, NOTES, item_n, word)

    @inline
    def own(x, summed_there):
        """A coordinate of the tile of the gradient."""
        return i32(0) if summed_there else x

    @inline
    def own_at(w, item_n):
        """The tile of the gradient, as far as it has coordinates."""
        b0, b1 = own(read(w, item_n, NOTE.b0), SUM_0), own(read(w, item_n, NOTE.b1), SUM_1)
        row0, col0 = own(read(w, item_n, NOTE.row0), SUM_I), own(read(w, item_n, NOTE.col0), SUM_J)
        return TilePlace(col0, row0, own(read(w, item_n, NOTE.head), SUM_H), b1, b0)

    @inline
    def next_at(w, item_n):
        """The tile after it."""
        b0, b1 = read(w, item_n, NOTE.next_b0), read(w, item_n, NOTE.next_b1)
        row0, col0 = read(w, item_n, NOTE.next_row0), read(w, item_n, NOTE.next_col0)
        return TilePlace(col0, row0, read(w, item_n, NOTE.next_head), b1, b0)

    @inline
    def fetch_part(part, t):
        """The bias of a part of a tile of the gradient, which has all queries and keys."""
        w, x = t
        queries, keys = i32(w.given.extent.queries), i32(w.given.extent.keys)
        region = Region(x.row, x.column, queries, keys, i32(0), i32(0))
        query, key = i32(x.row + first_row(w.me)), i32(x.column + first_column() + part * PART)
        at = Head(x.b0, x.b1, i32(0), x.head, i32(0))
        fetch_bias(w.bias[part * HELD :], query, key, region, at, False, w.given.extras)

    fetch_all = ptx.repeated(PARTS, fetch_part)

    @inline
    def take(w, x):
        if has_steps(x) and not x.fetched:
            fetch_all((w, own_at(w, x.item_n)))
        return True

    @inline
    def read_part(part, w, x, step):
        """The mask, and where the thread's first score of the part is."""
        item_n, given = x.item_n, w.given
        row0, col0 = read(w, item_n, NOTE.row0), i32(read(w, item_n, NOTE.col0) + part * PART)
        region = Region(
            row0, col0, read(w, item_n, NOTE.queries), read(w, item_n, NOTE.keys),
            read(w, item_n, NOTE.low), read(w, item_n, NOTE.high),
        )  # fmt: skip
        b0, b1, heads = read(w, item_n, NOTE.b0), read(w, item_n, NOTE.b1), i32(given.extent.heads)
        at = Head(b0, b1, i32(b0 * i32(given.extent.b1) + b1), read(w, item_n, NOTE.head), heads)
        whole = x.kind & i32(KIND.whole) != 0
        query = i32(row0 + first_row(w.me))
        key = i32(col0 + first_column())
        if MASKED:
            bias_mask = w.bias[part * HELD :]
            fetch_mask(bias_mask, query, key, region, at, whole, given.extras)
        return Here(query, key, region, at, whole)

    @inline
    def exponents(part, w, x, step, here):
        s, bias_mask, numbers = w.s, w.bias[part * HELD :], w.given.parameters
        modify(s, s, bias_mask, here.query, here.key, here.region, here.at, here.whole, numbers)
        if step.last:
            fetch_part(part, (w, next_at(w, x.item_n)))
        for e in range(SCORES):
            w.p[e] = s[e] * f32(LOG2E) - w.lse[e // 2 % 2]

    @inline
    def weigh(w, step, here):
        for e in range(SCORES):
            w.p[e] = ptx.ex2(w.p[e])
        if DROPOUT:
            drop(w.p, here.query, here.key, here.at, w.given.parameters)

    @inline
    def finish(w, x):
        if x.kind & i32(KIND.invalid) != 0:
            for e in range(ALL_SCORES):
                w.acc[e] = f32(NAN)
        at, share = own_at(w, x.item_n), read(w, x.item_n, NOTE.share)
        of_head = w.given.out[index(share), index(at.b0), index(at.b1), index(at.head)]
        store(of_head, w.acc, u32(w.smem + u32(SUMS)), at.row, at.column)

    @inline
    def end(w, x):
        """All are stored."""

    @inline
    def parameters(given):
        return given.parameters

    def note(smem, me, x):
        note_steps(smem, x.out.shape[0], x.extras, x.extent, i32(x.items))

    acts = note, *build_loads(config.d, config.dv, tile)
    arguments = {
        "maps": 4,
        "rows": array(f32, 5),
        "out": array(f32 if config.out == "float32" else types.uint16, 6),
        "extras": extras_type(options, ("bits",)),
        "extent": named(Extent, i64),
        "items": i64,
        "parameters": parameters_type(options),
    }
    return DbiasStage(
        *(walk, take, read_part, exponents, weigh, finish, end, parameters),
        ahead=False,
        held=PARTS * HELD,
        number=u32,
        rings=(Arrivals((NOTES,), 1, CONSUMERS * WARP_GROUP + LOADERS),),
        producers=tuple(Producer(act, i) for i, act in enumerate(acts)),
        senders=0,
        arguments=arguments,
    )
