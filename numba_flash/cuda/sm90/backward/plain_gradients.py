"""The `BackwardStage` without options that belong to pairs: a softcap, a band, lengths, lists of
tiles, and a number for each distance.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import i32, inline, once, u32
from numba_flash.cuda.score import fragment
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.arguments import BACKWARD_TILES, may_go_upward, one_type
from numba_flash.cuda.sm90.backward import softmax_backward
from numba_flash.cuda.sm90.backward.backward_stage import BackwardStage
from numba_flash.cuda.sm90.backward.load_backward import WORD
from numba_flash.cuda.sm90.backward.softmax_backward import BOUND
from numba_flash.cuda.sm90.tiles import KEYS


@once
def build_begin_sums(tile, q, relative):
    """``begin_sums(sT, smem, me, n)``: a thread's scores of the n-th tile of queries, in the ring
    `q`, become what a function of the score adds to them (`numba_flash.cuda.score.relative`), which
    lies from `relative` on. Its second row, 8 keys below, has, but for two, numbers of the first
    one.
    """
    Q, RELATIVE, BYTES, BLOCK_M = one_type(q), relative, tile.relative_bytes, tile.block_m
    GROUPS = tile.columns // 8

    @inline
    def begin_sums(sT, smem, me, n):
        key = i32(me * KEYS + wgmma.first_row())
        of_tile = u32(smem + u32(RELATIVE) + n % u32(Q.slots) * u32(BYTES))
        at = u32(of_tile + u32(4 * i32(BLOCK_M - fragment.first_column() + key)))
        for c in range(2):
            sT[2 + c] = ptx.load_shared_float(u32(at + u32(32) - u32(4 * c)))
        for j in range(GROUPS):
            for c in range(2):
                sT[4 * j + c] = ptx.load_shared_float(u32(at - u32(32 * j + 4 * c)))
                if j + 1 < GROUPS:
                    sT[4 * j + 6 + c] = sT[4 * j + c]

    return begin_sums


def build_begin(config, layout, rows):
    """`BackwardStage.begin_item`, `start_scores` and `start_next`; `rows` is the `SoftmaxBackward`.
    After a work item's last tile the next product is that of the same tile again, which nobody
    uses.
    """
    options, tile, BFLOAT16 = config.options, config.tile, config.dtype == "bfloat16"
    Q, K, V, WORK = map(one_type, (layout.q, layout.k, layout.v, layout.work))
    SCORES, AHEAD, SEQUENCES, NONE = tile.columns // 2, tile.ahead, options.sequences, 0
    clear_k = pipeline.build_clear_tail(config.d, tile.block_n)
    clear_v = pipeline.build_clear_tail(config.dv, tile.block_n)
    RELATIVE, BLOCK_SPARSE = options.relative, options.block_sparse
    multiply = wgmma.build_scores(tile.block_m, config.d, tile.block_n, BFLOAT16, add=RELATIVE)
    begin_sums = build_begin_sums(tile, layout.q, layout.relative) if RELATIVE else None
    note_bounds, bound, wait_q = rows.note_bounds, rows.bound, rows.wait_q

    @inline
    def start_scores(sT, smem, me, n, part, k_rows):
        if RELATIVE:
            begin_sums(sT, smem, me, n)
        multiply(sT, k_rows, wgmma.descriptor(pipeline.tile(smem, Q, n), u32(0)))

    @inline
    def begin_item(held, sT, smem, item_n, me, n, count, k_rows, given):
        group = i32(given.sizes.group)
        note_bounds(smem, item_n, me, group)
        step = bound(smem, me, BOUND.begin)
        keys = pipeline.read(smem, WORK, item_n, WORD.keys)
        keys -= pipeline.read(smem, WORK, item_n, WORD.row0)
        pipeline.wait_ready(smem, K, item_n)
        if SEQUENCES:
            clear_k(smem, K, item_n, keys, me)
        if AHEAD:
            wait_q(smem, item_n, me, n, step)
            start_scores(sT, smem, me, n, u32(0), k_rows)
        pipeline.wait_ready(smem, V, item_n)
        if SEQUENCES:
            clear_v(smem, V, item_n, keys, me)
        if AHEAD:
            ptx.wgmma_wait(sT, sT, NONE, SCORES, NONE)
        tiles = i32(count * group)
        if BLOCK_SPARSE:
            tiles = pipeline.read(smem, WORK, item_n, BACKWARD_TILES)
        return step, u32(n + u32(tiles))

    @inline
    def start_next(sT, smem, item_n, me, n, end, step, k_rows):
        following = u32(n + u32(1))
        if following == end:
            following = n
        else:
            wait_q(smem, item_n, me, following, step)
        start_scores(sT, smem, me, following, u32(0), k_rows)

    return begin_item, start_scores, start_next


def build(config, layout):
    """`BackwardStage` of scores that nothing belongs to, or a number for each distance."""
    options, tile, BFLOAT16 = config.options, config.tile, config.dtype == "bfloat16"
    Q, AHEAD, upward = one_type(layout.q), tile.ahead, may_go_upward(config.ordered, options)
    rows = softmax_backward.build(config.d, config.dv, options, tile, BFLOAT16, upward)
    begin_item, start_scores, start_next = build_begin(config, layout, rows)
    wait_q, exponentiate = rows.wait_q, rows.recompute_p
    bend, multiply = rows.differentiate_cap, rows.differentiate

    @inline
    def begin_tile(smem, item_n, me, n, step):
        if not AHEAD:
            wait_q(smem, item_n, me, n, step)

    @inline
    def part_of(smem, item_n, me, n, part, step, given):
        """A tile has one part: the step says all."""
        return step

    @inline
    def release_before(smem, n, begin):
        if n != u32(0):
            pipeline.release_group(smem, Q, u32(n - 1))

    @inline
    def recompute_p(sT, held, smem, item_n, me, n, part, x, given):
        exponentiate(sT, smem, item_n, me, n, x, given.scales)

    @inline
    def differentiate_cap(dpT, sT, smem, me, n, given):
        bend(dpT, sT, smem, me, n, given.scales.scale_log2)

    @inline
    def differentiate(dpT, sT, held, smem, me, n, x, chunk, given):
        multiply(dpT, sT, smem, me, n, chunk)

    @inline
    def read_first(held, smem, item_n, me, n, end, given):
        """Nothing belongs to pairs."""

    @inline
    def release_last(smem, n):
        """The next work item does that."""

    return BackwardStage(
        begin_item,
        begin_tile,
        start_scores,
        rows.wait_do,
        part_of,
        release_before,
        recompute_p,
        differentiate_cap,
        differentiate,
        rows.next_step,
        start_next,
        read_first,
        release_last,
        rows.factors,
        early=True,
        interleaved=False,
        slopes=1,
        words=1,
        kept=1,
    )
