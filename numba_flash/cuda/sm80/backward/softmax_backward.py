"""P and dS of the backward pass, on fragments of their transposes: keys along rows, queries along
columns (FlashAttention-2, Algorithm 2, lines 11 to 14). Fragments of S^T, P^T, dP^T and dS^T are
called sT, pT, dpT and dsT.
"""

import math
from typing import Any, NamedTuple

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import f32, i32, inline, once, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.fetch import build_fetch, held
from numba_flash.cuda.score.modify import build_drop, build_modify
from numba_flash.cuda.score.score import Head, Region


class Tile(NamedTuple):
    """A warp's part of a tile of scores.

    Attributes
    ----------
    row0 : int
        Its first query.
    query, key : int
        The first ones of this lane.
    region : Region
        What it may see.
    at : Head
        Its head.
    whole : bool
        Nothing in the tile is hidden, as far as a list tells.
    """

    row0: int
    query: int
    key: int
    region: Region
    at: Head
    whole: bool


@inline
def tile_of(row0, key, item, walk, heads, batch1):
    """The `Tile` from query row0 on, of a work item on its walk."""
    region = Region(row0, key, item.columns, item.rows, -item.high, -item.low)
    at = Head(item.b0, item.b1, item.b0 * batch1 + item.b1, walk.head, heads)
    return Tile(row0, i32(row0 + fragment.first_column()), key, region, at, walk.whole)


class SoftmaxBackward(NamedTuple):
    """Functions of a warp, and its registers for slopes, and for bias and mask; see `build`."""

    tile_of: Any
    fetch: Any
    exponentiate: Any
    recompute_p: Any
    pack_weights: Any
    begin_dp: Any
    differentiate: Any
    slopes: int
    words: int


@once
def build(dtype, options, vectors, m_tiles, columns, kind, planes=0):
    """`SoftmaxBackward` of a warp's 16 `m_tiles` keys and `columns` queries; weights become
    operands of so many planes, if they are `planes`, and are 2^RAISED_BACKWARD larger; `scale_log2`
    and the lse then are in base e.
    """
    COUNT, COLUMNS = columns // 2, columns  # scores of a tile of 16 keys in registers
    WARP_KEYS, KEY_ROWS, PAIRS = 16 * m_tiles, 2 * m_tiles, m_tiles * columns // 4
    MODIFIED, CHANGES, DROPOUT = options.modifies, options.changes, bool(options.dropout)
    SLOPES = options.sloped
    runs = fragment.runs_of_keys(m_tiles, columns)
    hide_row = softmax.build_hide(COUNT, True)
    read = build_fetch(options, runs, vectors)
    modify = build_modify(dtype, options, runs, True, kind.turing)
    drop = build_drop(options, runs)
    FP16X2, LESS = planes > 0, not (planes or options.dropout)
    if planes:
        pack_weights, _ = fragment.build_split(PAIRS, planes, DROPOUT)
    else:
        pack_weights, _ = fragment.build_pack(PAIRS, *kind, DROPOUT)
    LARGEST, LOG2E = 2.0**softmax.RAISED_BACKWARD, math.log2(math.e)

    @inline
    def fetch(bias_mask, tile, extras):
        """What options need from memory."""
        if MODIFIED:
            read(bias_mask, tile.query, tile.key, tile.region, tile.at, tile.whole, extras)

    @inline
    def hide(sT, tile):
        """Scores that the mask or the end of the keys hides become -inf; most tiles have none."""
        first, row1, region = tile.key - tile.key % WARP_KEYS, tile.row0 + COLUMNS, tile.region
        low, high, keys, queries = -region.high, -region.low, region.cols, region.rows
        clear = mask.all_visible(first, first + WARP_KEYS, tile.row0, row1, low, high)
        if not clear or first + WARP_KEYS > keys:
            for r in range(KEY_ROWS):
                key = tile.key + r
                start, stop = mask.kv_range(key, key + 1, queries, low, high)
                if key >= keys:
                    stop = start
                hide_row(sT, r, i32(start - tile.query), i32(stop - tile.query))

    @inline
    def exponentiate(sT, lse, scale_log2):
        """P = exp(S - lse), in the place of S."""
        for j in range(COLUMNS // 8):
            shift = ptx.load_shared_pair(u32(lse + u32(32 * j)))
            for r in range(KEY_ROWS):
                for c in range(2):
                    e = r // 2 * COUNT + 4 * j + 2 * (r % 2) + c
                    if FP16X2:  # the difference of large numbers loses no digits
                        score = sT[e] if CHANGES else sT[e] * scale_log2
                        sT[e] = ptx.ex2((score - shift[c]) * f32(LOG2E))
                    else:
                        sT[e] = ptx.ex2(sT[e] * scale_log2 - shift[c])
                    if FP16X2:
                        sT[e] *= f32(LARGEST)

    @inline
    def recompute_p(sT, slope, bias_mask, lse, scale_log2, tile, parameters):
        """(2) P = exp(S - lse), in the place of S, negative where dropout drops it."""
        if MODIFIED:  # the options, on S
            i, j, region, at, whole = tile.query, tile.key, tile.region, tile.at, tile.whole
            modify(sT, slope, bias_mask, i, j, region, at, whole, parameters)
        else:
            hide(sT, tile)
        exponentiate(sT, lse, scale_log2)
        if DROPOUT:
            drop(sT, tile.query, tile.key, tile.at, parameters)

    @inline
    def begin_dp(start, delta):
        """What the product dP begins with, for each of a lane's columns: -delta, or 0 where dropout
        or planes make something else of the product first.
        """
        for j in range(COLUMNS // 8):
            row_delta = (f32(0), f32(0))
            if LESS:
                row_delta = ptx.load_shared_pair(u32(delta + u32(32 * j)))
            for c in range(2):
                start[2 * j + c] = -row_delta[c]

    @inline
    def ds_of(w, dp, delta, parameters):
        if DROPOUT:  # dP is 0 where w is -P
            dp = dp if w > f32(0) else f32(0)
            return abs(w) * (dp * f32(parameters.keep_scale) - delta)
        return w * dp if LESS else w * (dp - delta)

    @inline
    def differentiate(dpT, pT, slope, delta, parameters):
        """(5) dS = P * (dP - delta), in the place of dP, which may have begun with -delta."""
        for j in range(COLUMNS // 8):
            row_delta = (f32(0), f32(0))
            if not LESS:
                row_delta = ptx.load_shared_pair(u32(delta + u32(32 * j)))
            for r in range(KEY_ROWS):
                for c in range(2):
                    e = r // 2 * COUNT + 4 * j + 2 * (r % 2) + c
                    dpT[e] = ds_of(pT[e], dpT[e], row_delta[c], parameters)
                    if SLOPES:
                        dpT[e] *= slope[e]

    slopes = m_tiles * COUNT if SLOPES else 1
    words = max(1, held(options, runs).words)
    of_p = exponentiate, recompute_p, pack_weights
    return SoftmaxBackward(tile_of, fetch, *of_p, begin_dp, differentiate, slopes, words)
