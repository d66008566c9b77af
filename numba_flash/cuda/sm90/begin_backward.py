"""How a consumer of the backward pass begins a work item, and its next tile: of the loop up to head
dimension 128 without options.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import fragment, ptx
from numba_flash.cuda.lang import i32, inline, once, u32
from numba_flash.cuda.sm90 import pipeline, softmax_backward, wgmma
from numba_flash.cuda.sm90.arguments import BACKWARD_TILES, one_type
from numba_flash.cuda.sm90.load_backward import WORD
from numba_flash.cuda.sm90.softmax_backward import BOUND
from numba_flash.cuda.sm90.tiles import KEYS


class Begin(NamedTuple):
    """What `build` makes."""

    release_before: Any
    begin_item: Any
    tiles_of: Any
    start_scores: Any
    start_next: Any


@once
def build_begin_sums(tile, q, added):
    """``begin_sums(sT, smem, me, n)``: a thread's scores of the n-th tile of queries, in the ring
    `q`, become what a function of the score adds to them (`numba_flash.cuda.relative`), which lies
    from `added` on. Its second row, 8 keys below, has, but for two, numbers of the first one.
    """
    Q, ADDED, BYTES, BLOCK_M = one_type(q), added, tile.added_bytes, tile.block_m
    GROUPS = tile.columns // 8

    @inline
    def begin_sums(sT, smem, me, n):
        key = i32(me * KEYS + wgmma.first_row())
        of_tile = u32(smem + u32(ADDED) + n % u32(Q.slots) * u32(BYTES))
        at = u32(of_tile + u32(4 * i32(BLOCK_M - fragment.first_column() + key)))
        for c in range(2):
            sT[2 + c] = ptx.load_shared_float(u32(at + u32(32) - u32(4 * c)))
        for j in range(GROUPS):
            for c in range(2):
                sT[4 * j + c] = ptx.load_shared_float(u32(at - u32(32 * j + 4 * c)))
                if j + 1 < GROUPS:
                    sT[4 * j + 6 + c] = sT[4 * j + c]

    return begin_sums


@once
def build(head_dim, head_dim_v, options, tile, bfloat16):
    """``release_before(smem, n)``: all products with the Q tile before the n-th are complete.
    ``begin_item(smem, turn, me, n, sT, k_rows, group)``: wait for K and V of a work item, and, if
    the tile says ahead, for (1) S^T = K Q^T of its first tile; returns the first step.
    ``tiles_of(smem, turn, count, group)``: how many tiles it has, of all heads of its group.
    ``start_scores(smem, me, n, sT, k_rows)``: (1) of the n-th tile, beginning with what a score_mod
    adds, if sums do. ``start_next(smem, turn, me, n, end, step, sT, k_rows)``: start (1) of the
    tile after the n-th; after an item's last tile, (1) of the same tile again, which nobody uses.
    """
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    SMEM = tile.layout(head_dim, head_dim_v)
    Q, K, V, WORK = map(one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.work))
    SCORES, AHEAD, SEQUENCES, NONE = BLOCK_M // 2, tile.ahead, options.sequences, 0
    clear_k = pipeline.build_clear_tail(head_dim, BLOCK_N)
    clear_v = pipeline.build_clear_tail(head_dim_v, BLOCK_N)
    RELATIVE, LISTED = options.relative, options.listed
    multiply = wgmma.build_scores(BLOCK_M, head_dim, BLOCK_N, bfloat16, add=RELATIVE)
    begin_sums = build_begin_sums(tile, SMEM.q, SMEM.added) if RELATIVE else None
    shared = softmax_backward.build(head_dim, head_dim_v, options, tile, bfloat16)
    note_bounds, bound, wait_q = shared.note_bounds, shared.bound, shared.wait_q

    @inline
    def start_scores(smem, me, n, sT, k_rows):
        if RELATIVE:
            begin_sums(sT, smem, me, n)
        multiply(sT, k_rows, wgmma.descriptor(pipeline.tile(smem, Q, n), u32(0)))

    @inline
    def release_before(smem, n):
        if n != u32(0):
            pipeline.release_group(smem, Q, u32(n - 1))

    @inline
    def begin_item(smem, turn, me, n, sT, k_rows, group):
        note_bounds(smem, turn, me, group)
        step = bound(smem, me, BOUND.begin)
        keys = pipeline.read(smem, WORK, turn, WORD.keys)
        keys -= pipeline.read(smem, WORK, turn, WORD.row0)
        pipeline.wait_ready(smem, K, turn)
        if SEQUENCES:
            clear_k(smem, K, turn, keys, me)
        if AHEAD:
            wait_q(smem, turn, me, n, step)
            start_scores(smem, me, n, sT, k_rows)
        pipeline.wait_ready(smem, V, turn)
        if SEQUENCES:
            clear_v(smem, V, turn, keys, me)
        if AHEAD:
            ptx.wgmma_wait(sT, sT, NONE, SCORES, NONE)
        return step

    @inline
    def tiles_of(smem, turn, count, group):
        if LISTED:
            return pipeline.read(smem, WORK, turn, BACKWARD_TILES)
        return i32(count * group)

    @inline
    def start_next(smem, turn, me, n, end, step, sT, k_rows):
        following = u32(n + u32(1))
        if following == end:
            following = n
        else:
            wait_q(smem, turn, me, following, step)
        start_scores(smem, me, following, sT, k_rows)

    return Begin(release_before, begin_item, tiles_of, start_scores, start_next)
