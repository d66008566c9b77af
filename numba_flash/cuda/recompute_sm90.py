"""What the consumers of the backward kernels on Hopper share: P and dS on fragments of their transposes (FlashAttention-2, Algorithm 2,
lines 11 to 14), and what surrounds them.

A fragment has keys along its rows and queries along its columns. It belongs to a consumer, warp group `me`: part of the keys of a work item
and of a tile of BLOCK_M queries, which begins with query row0 of the sequence.
"""

import math

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import mma, pipeline, ptx, softmax
from numba_flash.cuda.movers_sm90 import COUNT, FIRST, HIGH, IMPOSSIBLE, KEYS, LOW, QUERIES, ROW0

CLEAR_FROM, CLEAR_TO, END_OF_HEAD, LAST = pipeline.one_type(range(4))  # bounds
ROWS = 64


def build(head_dim, head_dim_v, options, tile):
    """``note_bounds, bound, next_row0, enter_q, enter_do, weigh, differentiate_cap, differentiate, factors``.

    Arguments are those of `backward_sm90.build`.
    """
    SMEM, CONSUMERS, BLOCK_M, QUERIES_APART = tile.layout(head_dim, head_dim_v), tile.consumers, tile.block_m, tile.queries_apart
    KEYS_APART, COLUMNS, CAPPED = ROWS - QUERIES_APART, tile.columns, bool(options.softcap)
    Q, DO, WORK = map(pipeline.one_type, (SMEM.q, SMEM.do, SMEM.work))
    LSE, DELTA, BOUNDS, SCORES, ROWS_BYTES = SMEM.lse, SMEM.delta, SMEM.bounds, COLUMNS // 2, 4 * BLOCK_M
    SEQUENCES, NAN, ACC, u32, i32 = options.sequences, math.nan, types.float32, types.uint32, types.int32
    cap, hide_row = softmax.build_cap(SCORES), softmax.build_hide(SCORES, True)
    clear_q, clear_do = pipeline.build_clear_tail(head_dim, BLOCK_M), pipeline.build_clear_tail(head_dim_v, BLOCK_M)

    @cuda.jit(device=True, forceinline=True)
    def note_bounds(smem, turn, me):
        """Write down the first and last queries of fragments of which nothing is hidden; the row0 after a head, and its first."""
        first = i32(pipeline.read(smem, WORK, turn, ROW0) + me * KEYS_APART)
        low, high = pipeline.read(smem, WORK, turn, LOW), pipeline.read(smem, WORK, turn, HIGH)
        last = min(i32(pipeline.read(smem, WORK, turn, QUERIES) - COLUMNS), i32(high + first - i32(COLUMNS - 1)))
        if first + ROWS > pipeline.read(smem, WORK, turn, KEYS):
            last = i32(-1)
        before, count = pipeline.read(smem, WORK, turn, FIRST) - i32(1), pipeline.read(smem, WORK, turn, COUNT)
        pipeline.meet_warp_group(me, CONSUMERS)  # nobody reads those of the item before any more
        if cuda.threadIdx.x % pipeline.WARP_GROUP == 0:
            bounds = i32(low + first + i32(ROWS - 1)), last, i32(before * BLOCK_M), i32((before + count) * BLOCK_M)
            for i in range(4):
                ptx.store_shared(u32(smem + u32(BOUNDS + 16 * me + 4 * i)), bounds[i])
        pipeline.meet_warp_group(me, CONSUMERS)

    @cuda.jit(device=True, forceinline=True)
    def bound(smem, me, i):
        """One of the bounds; in shared memory, because registers are short."""
        return ptx.load_shared(u32(smem + u32(BOUNDS + 16 * me + 4 * i)))

    @cuda.jit(device=True, forceinline=True)
    def enter_q(smem, turn, me, n, row0):
        """Wait for a tile of Q, and make zeros of what is beyond its sequence."""
        pipeline.wait_ready(smem, Q, n)
        if SEQUENCES:
            clear_q(smem, Q, n, pipeline.read(smem, WORK, turn, QUERIES) - row0, me, CONSUMERS)

    @cuda.jit(device=True, forceinline=True)
    def enter_do(smem, turn, me, n, row0):
        """The same for dO."""
        pipeline.wait_ready(smem, DO, n)
        if SEQUENCES:
            clear_do(smem, DO, n, pipeline.read(smem, WORK, turn, QUERIES) - row0, me, CONSUMERS)

    @cuda.jit(device=True, forceinline=True)
    def hide(s, smem, turn, me, row0):
        """Scores that the mask hides, or beyond the ends, become -inf; `row0` is the query of the first column."""
        low, high = pipeline.read(smem, WORK, turn, LOW), pipeline.read(smem, WORK, turn, HIGH)
        keys, queries = pipeline.read(smem, WORK, turn, KEYS), pipeline.read(smem, WORK, turn, QUERIES)
        key = i32(pipeline.read(smem, WORK, turn, ROW0) + me * KEYS_APART + mma.first_row())
        for r in range(2):
            j, column = i32(key + 8 * r), i32(row0 + mma.first_column())
            stop = i32(min(queries, i32(j + i32(1) + high)) - column)
            hide_row(s, r, i32(j + low - column), stop if j < keys else i32(0))

    @cuda.jit(device=True, forceinline=True)
    def row_values(smem, me, offset, slots, n):
        """Where this thread finds those of its first columns that came with the n-th tile."""
        return u32(smem + u32(offset) + n % u32(slots) * u32(ROWS_BYTES) + u32((me * QUERIES_APART + mma.first_column()) * 4))

    @cuda.jit(device=True, forceinline=True)
    def exponentiate(s, lse2_smem, scale_log2):
        """(2) P^T = exp(S^T - lse), in the place of S^T."""
        for j in range(SCORES // 4):
            shift = ptx.load_shared_pair(u32(lse2_smem + u32(32 * j)))
            for i in range(4):
                s[4 * j + i] = ptx.ex2(s[4 * j + i] * scale_log2 - shift[i % 2])

    @cuda.jit(device=True, forceinline=True)
    def differentiate_cap(ds, p, smem, me, n, scale_log2):
        """If CAPPED, dP^T - delta times the cap's slope, for which P gives the score again, in the place of dP^T."""
        delta_smem, lse2_smem = row_values(smem, me, DELTA, DO[pipeline.SLOTS], n), row_values(smem, me, LSE, Q[pipeline.SLOTS], n)
        for j in range(SCORES // 4 if CAPPED else 0):
            delta, shift = ptx.load_shared_pair(u32(delta_smem + u32(32 * j))), ptx.load_shared_pair(u32(lse2_smem + u32(32 * j)))
            for i in range(4):
                tanh = (ptx.lg2(p[4 * j + i]) + shift[i % 2]) * ptx.rcp(scale_log2)
                slope = ACC(1) - tanh * tanh
                ds[4 * j + i] = (ds[4 * j + i] - delta[i % 2]) * slope if p[4 * j + i] != ACC(0) else ACC(0)

    @cuda.jit(device=True, forceinline=True)
    def differentiate(ds, p, smem, me, n, chunk):
        """(5) dS^T = P^T * (dP^T - delta), in the place of dP^T (the difference, if CAPPED), of 16 columns: a chunk of 8 and the next."""
        delta_smem = row_values(smem, me, DELTA, DO[pipeline.SLOTS], n)
        for j in range(chunk, chunk + 2):
            delta = (ACC(0), ACC(0)) if CAPPED else ptx.load_shared_pair(u32(delta_smem + u32(32 * j)))
            for i in range(4):
                ds[4 * j + i] = p[4 * j + i] * (ds[4 * j + i] - delta[i % 2])

    @cuda.jit(device=True, forceinline=True)
    def weigh(s, smem, turn, me, n, row0, scales):
        """Softcap and mask, then (2) P^T."""
        row0 = i32(row0 + me * QUERIES_APART)
        if CAPPED:
            cap(s, scales[0])
        if row0 < bound(smem, me, CLEAR_FROM) or row0 > bound(smem, me, CLEAR_TO):
            hide(s, smem, turn, me, row0)
        exponentiate(s, row_values(smem, me, LSE, Q[pipeline.SLOTS], n), scales[1])

    @cuda.jit(device=True, forceinline=True)
    def next_row0(smem, me, row0):
        """First query of the next tile: of the same head, or the last tile of the next one."""
        row0 = i32(row0 - BLOCK_M)
        return bound(smem, me, LAST) if row0 == bound(smem, me, END_OF_HEAD) else row0

    @cuda.jit(device=True, forceinline=True)
    def factors(smem, turn, factor, scaled, scale):
        """What dV and dK are multiplied by: NaN if the lengths are impossible, else 1 and the scale."""
        for r in range(2):
            factor[r] = ACC(NAN) if SEQUENCES and pipeline.read(smem, WORK, turn, IMPOSSIBLE) != 0 else ACC(1)
            scaled[r] = factor[r] * scale

    return note_bounds, bound, next_row0, enter_q, enter_do, weigh, differentiate_cap, differentiate, factors
