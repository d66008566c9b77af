"""How a consumer of the backward pass begins a work item, and its next tile: of the loops up to
head dimension 128 without options, with sums of dQ in memory and without.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.lang import inline, once, u32
from numba_flash.cuda.sm90 import pipeline, softmax_backward, wgmma
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.load_backward import WORD
from numba_flash.cuda.sm90.softmax_backward import BOUND


class Begin(NamedTuple):
    """What `build` makes."""

    release_before: Any
    begin_item: Any
    start_scores: Any
    start_next: Any


@once
def build(head_dim, head_dim_v, options, tile, bfloat16):
    """``release_before(smem, n)``: all products with the Q tile before the n-th are complete.
    ``begin_item(smem, turn, me, n, sT, k_rows)``: wait for K and V of a work item, and, if the tile
    says ahead, for (1) S^T = K Q^T of its first tile; returns row0. ``start_scores(sT, k_rows,
    q_rows)``: (1). ``start_next(smem, turn, me, n, end, row0, sT, k_rows)``: start (1) of the tile
    after the n-th; after an item's last, of the same again, for nothing.
    """
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    SMEM = tile.layout(head_dim, head_dim_v)
    Q, K, V, WORK = map(one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.work))
    SCORES, AHEAD, SEQUENCES, NONE = BLOCK_M // 2, tile.ahead, options.sequences, 0
    clear_k = pipeline.build_clear_tail(head_dim, BLOCK_N)
    clear_v = pipeline.build_clear_tail(head_dim_v, BLOCK_N)
    start_scores = wgmma.build_scores(BLOCK_M, head_dim, BLOCK_N, bfloat16)
    shared = softmax_backward.build(head_dim, head_dim_v, options, tile)
    note_bounds, bound, wait_q = shared.note_bounds, shared.bound, shared.wait_q

    @inline
    def release_before(smem, n):
        if n != u32(0):
            pipeline.release_group(smem, Q, u32(n - 1))

    @inline
    def begin_item(smem, turn, me, n, sT, k_rows):
        note_bounds(smem, turn, me)
        row0 = bound(smem, me, BOUND.last)
        keys = pipeline.read(smem, WORK, turn, WORD.keys)
        keys -= pipeline.read(smem, WORK, turn, WORD.row0)
        pipeline.wait_ready(smem, K, turn)
        if SEQUENCES:
            clear_k(smem, K, turn, keys, me)
        if AHEAD:
            wait_q(smem, turn, me, n, row0)
            start_scores(sT, k_rows, wgmma.descriptor(pipeline.tile(smem, Q, n), u32(0)))
        pipeline.wait_ready(smem, V, turn)
        if SEQUENCES:
            clear_v(smem, V, turn, keys, me)
        if AHEAD:
            ptx.wgmma_wait(sT, sT, NONE, SCORES, NONE)
        return row0

    @inline
    def start_next(smem, turn, me, n, end, row0, sT, k_rows):
        following = u32(n + u32(1))
        if following == end:
            following = n
        else:
            wait_q(smem, turn, me, following, row0)
        start_scores(sT, k_rows, wgmma.descriptor(pipeline.tile(smem, Q, following), u32(0)))

    return Begin(release_before, begin_item, start_scores, start_next)
