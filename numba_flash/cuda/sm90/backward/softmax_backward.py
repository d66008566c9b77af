"""What the consumers of the backward kernels on Hopper share: P and dS on fragments of their
transposes (FlashAttention-2, Algorithm 2, lines 11 to 14), and what surrounds them.

A fragment has keys along its rows and queries along its columns. It belongs to a consumer, warp
group `me`: part of the keys of a work item and of a tile of BLOCK_M queries. Fragments of S^T, P^T,
dP^T and dS^T are called sT, pT, dpT and dsT.

A `step` says which tile it is, by its number in the sequence. Where all heads of a group go
together, each tile has as many steps, one after the other.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.softcap import build_tanh
from numba_flash.cuda.score.swizzle import PANEL, panels
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.arguments import BackwardWork, TileNote, one_type, words
from numba_flash.cuda.sm90.backward.backward_tiles import NOTE_BYTES
from numba_flash.cuda.sm90.backward.walk_backward import build_tile_at, goes_together
from numba_flash.cuda.sm90.pipeline import TilePlace
from numba_flash.cuda.sm90.tiles import BOUND_BYTES, WARP_GROUP

ROWS = 64  # keys of a fragment
WORD, NOTE = words(BackwardWork), words(TileNote)


class Bounds(NamedTuple):
    """What a consumer writes down about a work item, in shared memory because registers are short;
    all are int32.

    Attributes
    ----------
    clear_from, clear_to : int
        First and last steps of fragments of which nothing is hidden.
    begin : int
        The first step.
    end_of_head : int
        That which would follow a head's last tile, where heads come one after the other.
    heads : int
        Steps of a tile.
    """

    clear_from: int
    clear_to: int
    begin: int
    end_of_head: int
    heads: int


BOUND = words(Bounds)


@inline
def place_of(smem, ring, item_n, first):
    """`TilePlace` of a work item's rows of dK and dV, from so many keys after its first one on."""
    b0 = pipeline.read(smem, ring, item_n, WORD.b0)
    b1 = pipeline.read(smem, ring, item_n, WORD.b1)
    head = pipeline.read(smem, ring, item_n, WORD.kv_head)
    row = i32(pipeline.read(smem, ring, item_n, WORD.row0) + first)
    return TilePlace(0, row, head, b1, b0)


@inline
def await_item(smem, ring, item_n):
    """Wait for a work item; how many tiles of queries it has, or that there is none: `END`."""
    pipeline.wait_ready(smem, ring, item_n)
    return pipeline.uniform(pipeline.read(smem, ring, item_n, WORD.count))


class SoftmaxBackward(NamedTuple):
    """Functions of a consumer; see `build`."""

    note_bounds: Any
    bound: Any
    next_step: Any
    wait_q: Any
    wait_do: Any
    recompute_p: Any
    differentiate_cap: Any
    differentiate: Any
    factors: Any


@once
def build(head_dim, head_dim_v, options, tile, bfloat16=False, upward=False):
    """`SoftmaxBackward` of a kernel; arguments as of
    `numba_flash.cuda.sm90.backward.backward.build`.

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
    NOTED, TOGETHER = hasattr(SMEM, "notes"), goes_together(options, tile)
    NOTES = SMEM.notes if NOTED else 0
    # the latter, once per item, of any kind: `plain_gradients` does not know which there are
    UPWARD, tile_at = upward, build_tile_at(True)
    FP16X2, LARGEST, LOG2E = tile.planes > 1, 2.0**softmax.RAISED_BACKWARD, math.log2(math.e)
    LOWERED = 2.0 ** -softmax.raised_backward(bfloat16 or FP16X2)

    @inline
    def note_bounds(smem, item_n, me, group):
        """Write down the `Bounds` of a work item."""
        apart, heads = i32(me * QUERIES_APART), i32(group if TOGETHER else 1)
        first = i32(pipeline.read(smem, WORK, item_n, WORD.row0) + me * KEYS_APART)
        low = pipeline.read(smem, WORK, item_n, WORD.low)
        high = pipeline.read(smem, WORK, item_n, WORD.high)
        queries = pipeline.read(smem, WORK, item_n, WORD.queries)
        # first and last queries of fragments of which nothing is hidden
        clear_from = min(max(i32(low + first + i32(ROWS - 1)), apart), max(queries, apart))
        clear_to = min(i32(queries - COLUMNS), i32(high + first - i32(COLUMNS - 1)))
        if first + ROWS > pipeline.read(smem, WORK, item_n, WORD.keys):
            clear_to = i32(-1)
        tiles_hidden = i32(i32(clear_from - apart + i32(BLOCK_M - 1)) // BLOCK_M)
        tiles_clear = i32(max(i32(clear_to - apart + BLOCK_M), i32(0)) // BLOCK_M)
        first_tile = pipeline.read(smem, WORK, item_n, WORD.first)
        count = pipeline.read(smem, WORK, item_n, WORD.count)
        before = i32(0) if first_tile >= i32(0) else i32(heads - i32(1))
        pipeline.meet_warp_group(me)  # nobody reads those of the item before any more
        if cuda.threadIdx.x % WARP_GROUP == 0:
            bounds = Bounds(
                clear_from=i32(tiles_hidden * heads),
                clear_to=i32(tiles_clear * heads - i32(1)),
                begin=i32(tile_at(first_tile, i32(0)) * heads + before),
                end_of_head=tile_at(first_tile, count),
                heads=heads,
            )
            for i in range(len(bounds)):
                ptx.store_shared(u32(smem + u32(BOUNDS + BOUND_BYTES * me + 4 * i)), bounds[i])
        pipeline.meet_warp_group(me)

    @inline
    def bound(smem, me, i):
        """One of the bounds."""
        return ptx.load_shared(u32(smem + u32(BOUNDS + BOUND_BYTES * me + 4 * i)))

    @inline
    def next_step(smem, item_n, me, step):
        """The step behind one; tiles that are noted have it in their `TileNote`."""
        if NOTED:
            return step
        if UPWARD and pipeline.read(smem, WORK, item_n, WORD.first) >= 0:
            step = i32(step + i32(1))
        else:
            step = i32(step - i32(1))
        if TOGETHER:
            return step
        return bound(smem, me, BOUND.begin) if step == bound(smem, me, BOUND.end_of_head) else step

    @inline
    def row0_of(smem, me, n, step):
        """First query of the n-th tile, whose Q is there if it is noted."""
        if NOTED:
            at = u32(smem + u32(NOTES) + n % u32(Q.slots) * u32(NOTE_BYTES))
            return ptx.load_shared(u32(at + u32(4 * NOTE.row0)))
        if TOGETHER:
            step = i32(u32(step) // u32(bound(smem, me, BOUND.heads)))
        return i32(step * BLOCK_M)

    @inline
    def rest_of(smem, item_n, me, n, step):
        """How many queries are left from the n-th tile on, or a tile of them, if that is clear."""
        rest = i32(BLOCK_M)
        if NOTED or not TOGETHER or step > bound(smem, me, BOUND.clear_to):
            queries = pipeline.read(smem, WORK, item_n, WORD.queries)
            rest = i32(queries - row0_of(smem, me, n, step))
        return rest

    @inline
    def wait_q(smem, item_n, me, n, step):
        """Wait for a tile of Q, and make zeros of what is beyond its sequence."""
        pipeline.wait_ready(smem, Q, n)
        if SEQUENCES:
            clear_q(smem, Q, n, rest_of(smem, item_n, me, n, step), me)

    @inline
    def wait_do(smem, item_n, me, n, step):
        """The same for dO."""
        pipeline.wait_ready(smem, DO, n)
        if SEQUENCES:
            clear_do(smem, DO, n, rest_of(smem, item_n, me, n, step), me)

    @inline
    def hide(sT, smem, item_n, me, n, step):
        """Scores that the mask hides, or beyond the ends, become -inf."""
        row0 = i32(row0_of(smem, me, n, step) + me * QUERIES_APART)
        low = pipeline.read(smem, WORK, item_n, WORD.low)
        high = pipeline.read(smem, WORK, item_n, WORD.high)
        keys = pipeline.read(smem, WORK, item_n, WORD.keys)
        queries = pipeline.read(smem, WORK, item_n, WORD.queries)
        key0 = pipeline.read(smem, WORK, item_n, WORD.row0)
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
        """(2) P^T = exp(S^T - lse), in the place of S^T; of float16 1 / LOWERED as large, as their
        lse is lower; of planes 2^RAISED_BACKWARD larger, and `scale_log2` and the lse are in base
        e: the difference of large numbers loses no digits.
        """
        for j in range(SCORES // 4):
            shift = ptx.load_shared_pair(u32(lse2_smem + u32(32 * j)))
            for i in range(4):
                x = sT[4 * j + i] * scale_log2 - shift[i % 2]
                if FP16X2:
                    sT[4 * j + i] = ptx.ex2(x * f32(LOG2E)) * f32(LARGEST)
                else:
                    sT[4 * j + i] = ptx.ex2(x)

    @inline
    def recompute_p(sT, smem, item_n, me, n, step, scales):
        """Softcap and mask, then (2) P^T."""
        if NOTED:
            step = i32(u32(row0_of(smem, me, n, step)) // u32(BLOCK_M))
        if CAPPED:
            tanh(sT, scales.slope, scales.scale_log2)
        if step < bound(smem, me, BOUND.clear_from) or step > bound(smem, me, BOUND.clear_to):
            hide(sT, smem, item_n, me, n, step)
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
                dp = dpT[e] * f32(LOWERED) - delta[i % 2]
                dpT[e] = dp * slope if pT[e] != f32(0) else f32(0)

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
                dp = dpT[4 * j + i]
                if not CAPPED:
                    dp = dp * f32(LOWERED) - delta[i % 2]
                dpT[4 * j + i] = pT[4 * j + i] * dp

    @inline
    def factors(smem, item_n, factor, scaled, scales):
        """What dV and dK are multiplied by: 1, or as P is raised 1 / 2^raised, and the scale; NaN
        if the lengths are impossible.
        """
        for r in range(2):
            invalid = SEQUENCES and pipeline.read(smem, WORK, item_n, WORD.invalid) != 0
            factor[r] = f32(NAN) if invalid else f32(1)
            scaled[r] = factor[r] * scales.scale
            factor[r] *= f32(LOWERED)

    return SoftmaxBackward(
        note_bounds,
        bound,
        next_step,
        wait_q,
        wait_do,
        recompute_p,
        differentiate_cap,
        differentiate,
        factors,
    )
