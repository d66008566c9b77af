"""P and dS of a consumer of the backward pass on Hopper under options, on fragments of their
transposes, as in `numba_flash.cuda.sm90.softmax_backward`; but of 16 keys a thread has two
neighbours (`numba_flash.cuda.sm90.interleave`).
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import fragment, ptx
from numba_flash.cuda.fetch import EVERYTHING, build_fetch, held
from numba_flash.cuda.lang import f32, i32, inline, once, u32
from numba_flash.cuda.modify import build_drop, build_modify
from numba_flash.cuda.score import Head, Region
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import (
    BACKWARD_SCORES_B1,
    BackwardWork,
    TileNote,
    one_type,
    words,
)
from numba_flash.cuda.sm90.interleave import first_key
from numba_flash.cuda.sm90.options_tiles import NOTE_BYTES
from numba_flash.cuda.softmax import raised_backward

ROWS = 64  # keys of a fragment
WORD, NOTE = words(BackwardWork), words(TileNote)


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


class SoftmaxBackwardOptions(NamedTuple):
    """Functions of a consumer, and its registers for slopes, and for bias and mask; see `build`."""

    part_of: Any
    fetch: Any
    recompute_p: Any
    differentiate: Any
    factors: Any
    slopes: int
    words: int


@once
def build(dtype, head_dim, head_dim_v, vectors, options, tile):
    """`SoftmaxBackwardOptions` of a kernel; arguments as of
    `numba_flash.cuda.sm90.backward_options.build`.

    ``part_of(smem, turn, me, n, part, heads, batch1)``: a `Part` of the n-th tile, whose Q is
        there.
    ``fetch(bias_mask, x, extras)``: what options need from memory, and nobody else brings.
    ``recompute_p(sT, slope, bias_mask, x, scale_log2, parameters)``: the options, on S^T, then (2)
        P^T, in its place, of float16 raised as their lse is lower; negative where dropout drops it.
    ``differentiate(dpT, pT, slope, x, chunk, parameters)``: (5) dS^T, in the place of dP^T, of 16
        columns: a chunk of 8 and the next.
    ``factors(smem, turn, factor, scaled, scales)``: what dV and dK are multiplied by, as in
        `numba_flash.cuda.sm90.softmax_backward`; dV of dropout by 1 / (1 - its probability), too.
    """
    SMEM, BLOCK_M, COLUMNS, SCORES = (
        tile.layout(head_dim, head_dim_v),
        tile.block_m,
        tile.columns,
        tile.columns // 2,
    )
    Q, DO, WORK = map(one_type, (SMEM.q, SMEM.do, SMEM.work))
    LSE, DELTA, NOTES, ROWS_BYTES = SMEM.lse, SMEM.delta, SMEM.notes, 4 * BLOCK_M
    DROPOUT, SLOPED = bool(options.dropout), options.sloped
    SEQUENCES, NAN = options.sequences, math.nan
    runs = fragment.runs_of_keys(1, COLUMNS)
    wanted = ("mask",) if tile.copies_bias else EVERYTHING
    read, drop = build_fetch(options, runs, vectors, wanted), build_drop(options, runs)
    modify = build_modify(dtype, options, runs, True)
    LOWERED = 2.0 ** -raised_backward(dtype == "bfloat16")

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
    def part_of(smem, turn, me, n, part, heads, batch1):
        row0 = i32(note(smem, n, NOTE.row0) + part * COLUMNS)
        key = i32(pipeline.read(smem, WORK, turn, WORD.row0) + me * ROWS + first_key())
        low = pipeline.read(smem, WORK, turn, WORD.low)
        high = pipeline.read(smem, WORK, turn, WORD.high)
        queries = pipeline.read(smem, WORK, turn, WORD.queries)
        keys = pipeline.read(smem, WORK, turn, WORD.keys)
        b0 = pipeline.read(smem, WORK, turn, WORD.b0)
        b1 = pipeline.read(smem, WORK, turn, BACKWARD_SCORES_B1)
        return Part(
            query=i32(row0 + fragment.first_column()),
            key=key,
            region=Region(row0, key, queries, keys, i32(-high), i32(-low)),
            at=Head(b0, b1, i32(b0 * batch1 + b1), note(smem, n, NOTE.head), heads),
            whole=note(smem, n, NOTE.whole) != 0,
            lse=row_values(smem, LSE, Q.slots, n, part),
            delta=row_values(smem, DELTA, DO.slots, n, part),
        )

    @inline
    def fetch(bias_mask, x, extras):
        read(bias_mask, x.query, x.key, x.region, x.at, x.whole, extras)

    @inline
    def recompute_p(sT, slope, bias_mask, x, scale_log2, parameters):
        modify(sT, slope, bias_mask, x.query, x.key, x.region, x.at, x.whole, parameters)
        for j in range(SCORES // 4):
            shift = ptx.load_shared_pair(u32(x.lse + u32(32 * j)))
            for i in range(4):
                sT[4 * j + i] = ptx.ex2(sT[4 * j + i] * scale_log2 - shift[i % 2])
        if DROPOUT:
            drop(sT, x.query, x.key, x.at, parameters)

    @inline
    def ds_of(w, dp, delta, parameters):
        if DROPOUT:  # dP is 0 where w is -P
            dp = dp if w > f32(0) else f32(0)
            return abs(w) * (dp * (f32(parameters.keep_scale) * f32(LOWERED)) - delta)
        return w * (dp * f32(LOWERED) - delta)

    @inline
    def differentiate(dpT, pT, slope, x, chunk, parameters):
        for j in range(chunk, chunk + 2):
            delta = ptx.load_shared_pair(u32(x.delta + u32(32 * j)))
            for i in range(4):
                e = 4 * j + i
                dpT[e] = ds_of(pT[e], dpT[e], delta[i % 2], parameters)
                if SLOPED:
                    dpT[e] *= slope[e]

    @inline
    def factors(smem, turn, factor, scaled, scales):
        for r in range(2):
            invalid = SEQUENCES and pipeline.read(smem, WORK, turn, WORD.invalid) != 0
            factor[r] = f32(NAN) if invalid else f32(1)
            scaled[r] = factor[r] * scales.scale
            factor[r] *= f32(LOWERED)
            if DROPOUT:
                factor[r] *= f32(scales.parameters.keep_scale)

    return SoftmaxBackwardOptions(
        part_of,
        fetch,
        recompute_p,
        differentiate,
        factors,
        SCORES if SLOPED else 1,
        max(1, held(options, runs).words),
    )
