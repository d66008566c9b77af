"""What the consumers of the backward kernels on Hopper share: P and dS on fragments of their
transposes (FlashAttention-2, Algorithm 2, lines 11 to 14), and what surrounds them.

A fragment has keys along its rows and queries along its columns. It belongs to a consumer, warp
group `me`: part of the keys of a work item and of a tile of BLOCK_M queries, which begins with
query row0 of the sequence. Fragments of S^T, P^T, dP^T and dS^T are called sT, pT, dpT and dsT.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.arguments import BackwardWork, TileNote, one_type, words
from numba_flash.cuda.sm90.options_tiles import NOTE_BYTES
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.sm90.walk_backward import build_tile_at
from numba_flash.cuda.softcap import build_tanh
from numba_flash.cuda.swizzle import PANEL, panels

ROWS = 64  # keys of a fragment
WORD, NOTE = words(BackwardWork), words(TileNote)


class Bounds(NamedTuple):
    """What a consumer writes down about a work item, in shared memory because registers are short;
    all are int32.

    Attributes
    ----------
    clear_from, clear_to : int
        First and last queries of fragments of which nothing is hidden.
    end_of_head, begin : int
        The row0 that would follow a head's last tile, and that of its first.
    """

    clear_from: int
    clear_to: int
    end_of_head: int
    begin: int


BOUND = words(Bounds)


class SoftmaxBackward(NamedTuple):
    """Functions of a consumer; see `build`."""

    note_bounds: Any
    bound: Any
    next_row0: Any
    wait_q: Any
    wait_do: Any
    recompute_p: Any
    differentiate_cap: Any
    differentiate: Any
    factors: Any


@once
def build(head_dim, head_dim_v, options, tile, bfloat16=False, upward=False):
    """`SoftmaxBackward` of a kernel; arguments as of `numba_flash.cuda.sm90.backward.build`.

    upward : some work items may go through their tiles upward.
    """
    SMEM = tile.layout(head_dim, head_dim_v)
    BLOCK_M, QUERIES_APART = tile.block_m, tile.queries_apart
    KEYS_APART, COLUMNS, SCORES = ROWS - QUERIES_APART, tile.columns, tile.columns // 2
    Q, DO, WORK = map(one_type, (SMEM.q, SMEM.do, SMEM.work))
    LSE, DELTA, BOUNDS, ROWS_BYTES = SMEM.lse, SMEM.delta, SMEM.bounds, 4 * BLOCK_M
    SEQUENCES, CAPPED, NAN = options.sequences, bool(options.softcap), math.nan
    tanh, hide_row = build_tanh(SCORES, bfloat16), softmax.build_hide(SCORES, True)
    clear_q = pipeline.build_clear_tail(tile.planes * PANEL * panels(head_dim), BLOCK_M)
    clear_do = pipeline.build_clear_tail(tile.planes * PANEL * panels(head_dim_v), BLOCK_M)
    LISTED, NOTES = options.listed, SMEM.notes if options.listed else 0
    # the latter, once per item, of any kind: `begin_backward` does not know which there are
    UPWARD, tile_at = upward, build_tile_at(True)
    SPLIT, LARGEST, LOG2E = tile.planes > 1, 2.0**softmax.RAISED_BACKWARD, math.log2(math.e)

    @inline
    def note_bounds(smem, turn, me):
        """Write down the `Bounds` of a work item."""
        first = i32(pipeline.read(smem, WORK, turn, WORD.row0) + me * KEYS_APART)
        low = pipeline.read(smem, WORK, turn, WORD.low)
        high = pipeline.read(smem, WORK, turn, WORD.high)
        queries = pipeline.read(smem, WORK, turn, WORD.queries)
        last = min(i32(queries - COLUMNS), i32(high + first - i32(COLUMNS - 1)))
        if first + ROWS > pipeline.read(smem, WORK, turn, WORD.keys):
            last = i32(-1)
        first_tile = pipeline.read(smem, WORK, turn, WORD.first)
        count = pipeline.read(smem, WORK, turn, WORD.count)
        pipeline.meet_warp_group(me)  # nobody reads those of the item before any more
        if cuda.threadIdx.x % WARP_GROUP == 0:
            bounds = Bounds(
                clear_from=i32(low + first + i32(ROWS - 1)),
                clear_to=last,
                end_of_head=i32(tile_at(first_tile, count) * BLOCK_M),
                begin=i32(tile_at(first_tile, i32(0)) * BLOCK_M),
            )
            for i in range(4):
                ptx.store_shared(u32(smem + u32(BOUNDS + 16 * me + 4 * i)), bounds[i])
        pipeline.meet_warp_group(me)

    @inline
    def bound(smem, me, i):
        """One of the bounds."""
        return ptx.load_shared(u32(smem + u32(BOUNDS + 16 * me + 4 * i)))

    @inline
    def next_row0(smem, turn, me, row0):
        """First query of the next tile: of the same head, or with which the next one begins; tiles
        that are listed have it in their `TileNote`.
        """
        if LISTED:
            return row0
        if UPWARD and pipeline.read(smem, WORK, turn, WORD.first) >= 0:
            row0 = i32(row0 + BLOCK_M)
        else:
            row0 = i32(row0 - BLOCK_M)
        return bound(smem, me, BOUND.begin) if row0 == bound(smem, me, BOUND.end_of_head) else row0

    @inline
    def listed_row0(smem, n):
        """First query of the n-th tile, which is listed, and whose Q is there."""
        at = u32(smem + u32(NOTES) + n % u32(Q.slots) * u32(NOTE_BYTES))
        return ptx.load_shared(u32(at + u32(4 * NOTE.row0)))

    @inline
    def wait_q(smem, turn, me, n, row0):
        """Wait for a tile of Q, and make zeros of what is beyond its sequence."""
        pipeline.wait_ready(smem, Q, n)
        if SEQUENCES:
            if LISTED:
                row0 = listed_row0(smem, n)
            rest = pipeline.read(smem, WORK, turn, WORD.queries) - row0
            clear_q(smem, Q, n, rest, me)

    @inline
    def wait_do(smem, turn, me, n, row0):
        """The same for dO."""
        pipeline.wait_ready(smem, DO, n)
        if SEQUENCES:
            if LISTED:
                row0 = listed_row0(smem, n)
            rest = pipeline.read(smem, WORK, turn, WORD.queries) - row0
            clear_do(smem, DO, n, rest, me)

    @inline
    def hide(sT, smem, turn, me, row0):
        """Scores that the mask hides, or beyond the ends, become -inf; `row0` is the query of the
        first column.
        """
        low = pipeline.read(smem, WORK, turn, WORD.low)
        high = pipeline.read(smem, WORK, turn, WORD.high)
        keys = pipeline.read(smem, WORK, turn, WORD.keys)
        queries = pipeline.read(smem, WORK, turn, WORD.queries)
        key0 = pipeline.read(smem, WORK, turn, WORD.row0)
        key = i32(key0 + me * KEYS_APART + wgmma.first_row())
        for r in range(2):
            j, column = i32(key + 8 * r), i32(row0 + fragment.first_column())
            stop = i32(min(queries, i32(j + i32(1) + high)) - column)
            hide_row(sT, r, i32(j + low - column), stop if j < keys else i32(0))

    @inline
    def row_values(smem, me, offset, slots, n):
        """Where this thread finds those of its first columns that came with the n-th tile."""
        mine = (me * QUERIES_APART + fragment.first_column()) * 4
        return u32(smem + u32(offset) + n % u32(slots) * u32(ROWS_BYTES) + u32(mine))

    @inline
    def exponentiate(sT, lse2_smem, scale_log2):
        """(2) P^T = exp(S^T - lse), in the place of S^T; of planes 2^RAISED_BACKWARD larger, and
        `scale_log2` and the lse are in base e: the difference of large numbers loses no digits.
        """
        for j in range(SCORES // 4):
            shift = ptx.load_shared_pair(u32(lse2_smem + u32(32 * j)))
            for i in range(4):
                x = sT[4 * j + i] * scale_log2 - shift[i % 2]
                if SPLIT:
                    sT[4 * j + i] = ptx.ex2(x * f32(LOG2E)) * f32(LARGEST)
                else:
                    sT[4 * j + i] = ptx.ex2(x)

    @inline
    def recompute_p(sT, smem, turn, me, n, row0, scales):
        """Softcap and mask, then (2) P^T."""
        if LISTED:
            row0 = listed_row0(smem, n)
        row0 = i32(row0 + me * QUERIES_APART)
        if CAPPED:
            tanh(sT, scales.slope, scales.scale_log2)
        if row0 < bound(smem, me, BOUND.clear_from) or row0 > bound(smem, me, BOUND.clear_to):
            hide(sT, smem, turn, me, row0)
        exponentiate(sT, row_values(smem, me, LSE, Q.slots, n), scales.scale_log2)

    @inline
    def differentiate_cap(dpT, pT, smem, me, n, scale_log2):
        """If CAPPED, dP^T - delta times the cap's slope, for which P gives the score again, in the
        place of dP^T.
        """
        delta_smem = row_values(smem, me, DELTA, DO.slots, n)
        lse2_smem = row_values(smem, me, LSE, Q.slots, n)
        for j in range(SCORES // 4 if CAPPED else 0):
            delta = ptx.load_shared_pair(u32(delta_smem + u32(32 * j)))
            shift = ptx.load_shared_pair(u32(lse2_smem + u32(32 * j)))
            for i in range(4):
                e = 4 * j + i
                tanh = (ptx.lg2(pT[e]) + shift[i % 2]) * ptx.rcp(scale_log2)
                slope = f32(1) - tanh * tanh
                dpT[e] = (dpT[e] - delta[i % 2]) * slope if pT[e] != f32(0) else f32(0)

    @inline
    def differentiate(dpT, pT, smem, me, n, chunk):
        """(5) dS^T = P^T * (dP^T - delta), in the place of dP^T (the difference, if CAPPED), of 16
        columns: a chunk of 8 and the next.
        """
        delta_smem = row_values(smem, me, DELTA, DO.slots, n)
        for j in range(chunk, chunk + 2):
            delta = (f32(0), f32(0))
            if not CAPPED:
                delta = ptx.load_shared_pair(u32(delta_smem + u32(32 * j)))
            for i in range(4):
                dpT[4 * j + i] = pT[4 * j + i] * (dpT[4 * j + i] - delta[i % 2])

    @inline
    def factors(smem, turn, factor, scaled, scale):
        """What dV and dK are multiplied by: 1 and the scale; NaN if the lengths are impossible."""
        for r in range(2):
            invalid = SEQUENCES and pipeline.read(smem, WORK, turn, WORD.invalid) != 0
            factor[r] = f32(NAN) if invalid else f32(1)
            scaled[r] = factor[r] * scale

    return SoftmaxBackward(
        note_bounds,
        bound,
        next_row0,
        wait_q,
        wait_do,
        recompute_p,
        differentiate_cap,
        differentiate,
        factors,
    )
