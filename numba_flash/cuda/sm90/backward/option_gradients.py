"""The `BackwardStage` of bias, mask, dropout and functions of a score, on fragments of transposes,
as in `numba_flash.cuda.sm90.backward.softmax_backward`; but of 16 keys a thread has two neighbours
(`numba_flash.cuda.sm90.interleave`).

What belongs to a score is read straight from memory by the thread that holds it, while the tensor
cores compute S and dP: two neighbouring keys at a time, for which K and V are put in another order
in shared memory. Of a mask only the tiles are visited that it leaves something of.
"""

import math
from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import f32, i32, inline, u32
from numba_flash.cuda.score import fragment
from numba_flash.cuda.score.fetch import EVERYTHING, build_fetch
from numba_flash.cuda.score.fetch import held as words_of
from numba_flash.cuda.score.modify import build_drop, build_modify
from numba_flash.cuda.score.score import Head, Region
from numba_flash.cuda.score.softmax import raised_backward
from numba_flash.cuda.score.swizzle import ROW_BYTES
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.arguments import (
    BACKWARD_SCORES_B1,
    BACKWARD_TILES,
    TileNote,
    one_type,
    words,
)
from numba_flash.cuda.sm90.backward import softmax_backward
from numba_flash.cuda.sm90.backward.backward_stage import BackwardStage
from numba_flash.cuda.sm90.backward.backward_tiles import NOTE_BYTES
from numba_flash.cuda.sm90.backward.load_backward import WORD
from numba_flash.cuda.sm90.backward.softmax_backward import ROWS
from numba_flash.cuda.sm90.interleave import build_interleave, first_key
from numba_flash.cuda.sm90.pair_tiles import KEPT, build_take_bias

NOTE = words(TileNote)


class Part(NamedTuple):
    """A consumer's part of a tile of scores.

    Attributes
    ----------
    query, key : int32
        The first ones of this thread.
    region : Region
        What it may see.
    at : Head
        Its head.
    whole : bool
        Nothing of the tile is hidden, as far as a list tells.
    lse, delta : uint32
        Where this thread finds those of its first queries in shared memory.
    """

    query: int
    key: int
    region: Region
    at: Head
    whole: bool
    lse: int
    delta: int


def build_part_of(tile, layout):
    """`BackwardStage.part_of` of options; Q of the tile is there."""
    COLUMNS, NOTES, ROWS_BYTES = tile.columns, layout.notes, 4 * tile.block_m
    LSE, DELTA = layout.lse, layout.delta
    Q, DO, WORK = map(one_type, (layout.q, layout.do, layout.work))

    @inline
    def note(smem, n, word):
        at = u32(smem + u32(NOTES) + n % u32(Q.slots) * u32(NOTE_BYTES))
        return ptx.load_shared(u32(at + u32(4 * word)))

    @inline
    def row_values(smem, offset, slots, n, part):
        """Where this thread finds those of its first columns that came with the n-th tile."""
        mine = (part * COLUMNS + fragment.first_column()) * 4
        return u32(smem + u32(offset) + n % u32(slots) * u32(ROWS_BYTES) + u32(mine))

    @inline
    def part_of(smem, item_n, me, n, part, step, given):
        row0 = i32(note(smem, n, NOTE.row0) + part * COLUMNS)
        key = i32(pipeline.read(smem, WORK, item_n, WORD.row0) + me * ROWS + first_key())
        low = pipeline.read(smem, WORK, item_n, WORD.low)
        high = pipeline.read(smem, WORK, item_n, WORD.high)
        queries = pipeline.read(smem, WORK, item_n, WORD.queries)
        keys = pipeline.read(smem, WORK, item_n, WORD.keys)
        b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
        b1 = pipeline.read(smem, WORK, item_n, BACKWARD_SCORES_B1)
        heads, batch1 = i32(given.lse2.shape[2]), i32(given.dk.shape[1])
        return Part(
            query=i32(row0 + fragment.first_column()),
            key=key,
            region=Region(row0, key, queries, keys, i32(-high), i32(-low)),
            at=Head(b0, b1, i32(b0 * batch1 + b1), note(smem, n, NOTE.head), heads),
            whole=note(smem, n, NOTE.whole) != 0,
            lse=row_values(smem, LSE, Q.slots, n, part),
            delta=row_values(smem, DELTA, DO.slots, n, part),
        )

    return part_of


def build_pairs(config, layout, fetches, part_of):
    """``fetch_first(held, smem, item_n, me, n, end, given)`` and ``take_first(held, smem, me, n,
    end)``: what belongs to the first part of the n-th tile, from memory, if it `fetches`, and where
    the copy engine has put it. ``read_next(held, smem, item_n, me, n, part, given)``: both, of the
    part after one.
    """
    tile, Q = config.tile, one_type(layout.q)
    PARTS, COPIES, FETCHES = tile.block_m // tile.columns, tile.copies_bias, fetches
    runs, wanted = fragment.runs_of_keys(1, tile.columns), ("mask",) if COPIES else EVERYTHING
    read = build_fetch(config.options, runs, config.vectors, wanted)
    take_bias = build_take_bias(tile, layout.bias)

    @inline
    def fetch(held, smem, item_n, me, n, part, given):
        x = part_of(smem, item_n, me, n, part, i32(0), given)
        read(held.bias_mask, x.query, x.key, x.region, x.at, x.whole, given.extras)

    @inline
    def fetch_first(held, smem, item_n, me, n, end, given):
        """What the producer writes down about a tile is there when its Q is."""
        if FETCHES and n != end:
            pipeline.wait_ready(smem, Q, n)
            fetch(held, smem, item_n, me, n, u32(0), given)

    @inline
    def take_first(held, smem, me, n, end):
        if COPIES and n != end:
            take_bias(held.bias_mask, held.box, smem, me, n, u32(0))

    @inline
    def read_next(held, smem, item_n, me, n, part, given):
        if COPIES and part != u32(PARTS - 1):
            take_bias(held.bias_mask, held.box, smem, me, n, u32(part + 1))
        if FETCHES and part != u32(PARTS - 1):
            fetch(held, smem, item_n, me, n, u32(part + 1), given)

    return fetch_first, take_first, read_next


def build_p_and_ds(config, layout, read_next):
    """`BackwardStage.recompute_p`, whose P is raised, of float16, as its lse is lower, and negative
    where dropout drops it; `differentiate`; and `factors`, of dV with dropout by 1 / (1 - its
    probability), too.
    """
    options, tile, BFLOAT16 = config.options, config.tile, config.dtype == "bfloat16"
    WORK, SCORES, SEQUENCES = one_type(layout.work), tile.columns // 2, options.sequences
    DROPOUT, SLOPED, NAN = bool(options.dropout), options.sloped, math.nan
    runs, LOWERED = fragment.runs_of_keys(1, tile.columns), 2.0 ** -raised_backward(BFLOAT16)
    drop, modify = build_drop(options, runs), build_modify(config.dtype, options, runs, True)

    @inline
    def recompute_p(sT, held, smem, item_n, me, n, part, x, given):
        scale_log2, parameters = given.scales.scale_log2, given.scales.parameters
        modify(sT, held.slope, held.bias_mask, x.query, x.key, x.region, x.at, x.whole, parameters)
        for j in range(SCORES // 4):
            shift = ptx.load_shared_pair(u32(x.lse + u32(32 * j)))
            for i in range(4):
                sT[4 * j + i] = ptx.ex2(sT[4 * j + i] * scale_log2 - shift[i % 2])
        if DROPOUT:
            drop(sT, x.query, x.key, x.at, parameters)
        read_next(held, smem, item_n, me, n, part, given)

    @inline
    def ds_of(w, dp, delta, parameters):
        if DROPOUT:  # dP is 0 where w is -P
            dp = dp if w > f32(0) else f32(0)
            return abs(w) * (dp * (f32(parameters.keep_scale) * f32(LOWERED)) - delta)
        return w * (dp * f32(LOWERED) - delta)

    @inline
    def differentiate(dpT, pT, held, smem, me, n, x, chunk, given):
        for j in range(chunk, chunk + 2):
            delta = ptx.load_shared_pair(u32(x.delta + u32(32 * j)))
            for i in range(4):
                e = 4 * j + i
                dpT[e] = ds_of(pT[e], dpT[e], delta[i % 2], given.scales.parameters)
                if SLOPED:
                    dpT[e] *= held.slope[e]

    @inline
    def factors(smem, item_n, factor, scaled, scales):
        for r in range(2):
            invalid = SEQUENCES and pipeline.read(smem, WORK, item_n, WORD.invalid) != 0
            factor[r] = f32(NAN) if invalid else f32(1)
            scaled[r] = factor[r] * scales.scale
            factor[r] *= f32(LOWERED)
            if DROPOUT:
                factor[r] *= f32(scales.parameters.keep_scale)

    return recompute_p, differentiate, factors


def build(config, layout):
    """`BackwardStage` of bias, mask, dropout and functions of a score."""
    options, tile = config.options, config.tile
    Q, K, V, WORK = map(one_type, (layout.q, layout.k, layout.v, layout.work))
    COPIES, BIAS, PART_BYTES = tile.copies_bias, one_type(layout.bias), tile.columns * ROW_BYTES
    fetches = options.mask or (bool(options.bias) and not COPIES)
    interleave_k = build_interleave(config.d, tile.block_n)
    interleave_v = build_interleave(config.dv, tile.block_n)
    multiply = wgmma.build_scores(
        tile.columns, config.d, tile.block_n, config.dtype == "bfloat16", tile.block_m
    )
    rows = softmax_backward.build(config.d, config.dv, options, tile)
    wait_q, wait_row = rows.wait_q, rows.wait_do
    part_of = build_part_of(tile, layout)
    fetch_first, take_first, read_next = build_pairs(config, layout, fetches, part_of)
    recompute_p, differentiate, factors = build_p_and_ds(config, layout, read_next)

    @inline
    def begin_item(held, sT, smem, item_n, me, n, count, k_rows, given):
        """And put the keys in order."""
        end = u32(n + u32(pipeline.read(smem, WORK, item_n, BACKWARD_TILES)))
        fetch_first(held, smem, item_n, me, n, end, given)
        keys = pipeline.read(smem, WORK, item_n, WORD.keys)
        keys -= pipeline.read(smem, WORK, item_n, WORD.row0)
        pipeline.wait_ready(smem, K, item_n)
        interleave_k(smem, K, item_n, keys, me)
        pipeline.wait_ready(smem, V, item_n)
        interleave_v(smem, V, item_n, keys, me)
        take_first(held, smem, me, n, end)
        return i32(0), end  # steps are noted

    @inline
    def begin_tile(smem, item_n, me, n, step):
        wait_q(smem, item_n, me, n, step)
        wait_row(smem, item_n, me, n, step)

    @inline
    def start_scores(sT, smem, me, n, part, k_rows):
        rows = u32(pipeline.tile(smem, Q, n) + u32(part * u32(PART_BYTES)))
        multiply(sT, k_rows, wgmma.descriptor(rows, u32(0)))

    @inline
    def wait_do(smem, item_n, me, n, step):
        """`begin_tile` has."""

    @inline
    def release_last(smem, n):
        pipeline.release_group(smem, Q, u32(n - u32(1)))
        if COPIES:
            pipeline.release_group(smem, BIAS, u32(n - u32(1)))

    @inline
    def release_before(smem, n, begin):
        if n != begin:
            release_last(smem, n)

    @inline
    def differentiate_cap(dpT, sT, smem, me, n, given):
        """Slopes are in an array."""

    @inline
    def next_step(smem, item_n, me, step):
        return step

    @inline
    def read_first(held, smem, item_n, me, n, end, given):
        fetch_first(held, smem, item_n, me, n, end, given)
        take_first(held, smem, me, n, end)

    return BackwardStage(
        begin_item,
        begin_tile,
        start_scores,
        wait_do,
        part_of,
        release_before,
        recompute_p,
        differentiate_cap,
        differentiate,
        next_step,
        None,
        read_first,
        release_last,
        factors,
        early=fetches,
        interleaved=True,
        slopes=tile.columns // 2 if options.sloped else 1,
        words=max(1, words_of(options, fragment.runs_of_keys(1, tile.columns)).words),
        kept=KEPT,
    )
