"""Forward pass on Hopper: FlashAttention-3 (Shah et al., arXiv:2407.08608), Algorithm 1, in
persistent blocks.

One thread of the first warp group, the producer, lets the copy engine fill rings of Q, K and V
tiles; every other warp group, a consumer, owns 64 rows of a block of queries. A consumer starts the
scores of the next tile before the product P V of the current one, so that its softmax runs while
the tensor cores do. The next tile may belong to the next block of queries: O is finished and stored
while the tensor cores already work on what follows. With `ping_pong` the consumers also take turns
at starting products, which keeps their softmaxes apart.

What happens to scores is said by a `numba_flash.cuda.sm90.forward.score_stage.ScoreStage`: of plain
scores, or of options, whose bias and mask are read while the tensor cores compute S.

Where there is room for one tile of Q, the next block's cannot come before the last scores of this
one are there. Then O is finished and stored while it comes, and work items stay apart: at D = 256
that is up to 5 % faster for short sequences, and as fast for long ones.

Below a diagonal the first tiles of a work item alone hide keys, and have a loop of their own. In a
loop that asks of each tile whether it does, ptxas puts all of the softmax behind the wait for O, so
that nothing overlaps it, and causal attention is 2 to 7 % slower; at D = 128 a loop with a branch
that keeps the exponentials before that wait is 2 to 4 % slower, too.

Measured: docs/lab/hopper_forward.md, `build`.
"""

from numba_flash.cuda.arguments import extras_type, parameters_type
from numba_flash.cuda.config import OPTIONS
from numba_flash.cuda.number import array
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, named, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.swizzle import panel_bytes
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.arguments import END, ForwardScales, Scales, Sizes, one_type
from numba_flash.cuda.sm90.config import ForwardConfig
from numba_flash.cuda.sm90.forward import option_scores, plain_scores
from numba_flash.cuda.sm90.forward.finish import build_finish
from numba_flash.cuda.sm90.forward.load_forward import (
    build_produce,
    lists_of,
    load_nothing,
    rings_of,
)
from numba_flash.cuda.sm90.hopper_kernel import Arrivals, Producer, Roles, hopper_kernel
from numba_flash.cuda.sm90.pair_tiles import RELEASES, build_load_pairs
from numba_flash.cuda.sm90.rows import build_begin
from numba_flash.cuda.sm90.tiles import WARP_GROUP


def build(config: ForwardConfig):
    """Kernel of (maps, o, lse, extras, sizes, scales) with its signature and compile options.

    maps : tensor maps of q, k and v as (b0, b1, heads, n, head_dim), boxes of one panel of a tile,
        if ``config.store`` is "map" one of o, and if the tile has pairs copied one of a bias or
        mask.
    o : (b0, b1, heads, n, head_dim_v) as words of two elements; if it is "kv_splits" as float32, b0
        repeated for each part of the keys.
    lse : (b0, b1, heads, n), natural logarithm.
    extras : see `numba_flash.cuda.arguments`.
    sizes, scales : `Sizes` and `Scales` of `numba_flash.cuda.sm90.arguments`; `ForwardScales` if
        ``config.stage`` is of options.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    options, tile = config.options, config.tile
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    CONSUMERS, PING_PONG, APART = tile.consumers, tile.ping_pong, tile.q_stages == 1
    SMEM, V_PANEL = tile.layout(head_dim, head_dim_v), panel_bytes(BLOCK_N)
    Q, K, V = map(one_type, (SMEM.q, SMEM.k, SMEM.v))
    SCORES, PAIRS, OUTPUTS = BLOCK_N // 2, BLOCK_N // 4, head_dim_v // 2
    HAS_OPTIONS, TO_MAP = config.stage == OPTIONS, config.store == "map"
    BANDED, SEQUENCES, BFLOAT16 = config.band != "none", options.sequences, dtype == "bfloat16"
    MASKS_FIRST = config.band == "above" and not options.block_sparse and not HAS_OPTIONS
    PACKS_EARLY, RELATIVE = tile.packs_early, options.relative
    produce, copied = build_produce_pairs(config, SMEM)
    stage = (option_scores if HAS_OPTIONS else plain_scores).build(config, SMEM)
    first, following, masked, rest = stage.first, stage.following, stage.masked, stage.rest
    begin_sums, read, reset, HELD = stage.begin_sums, stage.read, stage.reset, stage.held
    weigh, numbers_of = stage.weigh, stage.numbers
    clear_tail = pipeline.build_clear_tail(head_dim_v, BLOCK_N)
    zero, _ = softmax.build_zero(OUTPUTS)
    start_scores = wgmma.build_scores(BLOCK_N, head_dim, BLOCK_M, BFLOAT16, add=RELATIVE)
    release_k = pipeline.release_warps if RELATIVE else pipeline.release_group
    start_values = wgmma.build_new_values(BLOCK_N, head_dim_v, BFLOAT16)
    wait_scores, wait_all = wgmma.build_wait(BLOCK_N, head_dim_v)
    pack, _ = fragment.build_pack(PAIRS, BFLOAT16, positive=bool(options.dropout))
    rescale, begin_item = softmax.build_rescale(OUTPUTS), build_begin(BLOCK_N, SMEM.q, SMEM.work)
    finish = build_finish(config, SMEM, stage.log_sum, stage.factor)

    @inline
    def k_tile(smem, n):
        """Descriptor of a tile of K."""
        return wgmma.descriptor(pipeline.tile(smem, K, n), u32(0))

    @inline
    def v_tile(smem, n):
        """Descriptor of a tile of V."""
        return wgmma.descriptor(pipeline.tile(smem, V, n), u32(V_PANEL))

    @inline
    def overlap_qk_pv(s, p, acc, bias_mask, smem, me, n, x, extras, first, before):
        """Start (1) S = Q K^T of tile n and (5) O += P V of the one before, both in flight, read
        what belongs to these scores, and wait for S alone. O has P V of so many tiles `before`; of
        none, it is what begins here.
        """
        pipeline.wait_ready(smem, K, n)
        begin_sums(s, smem, me, n)
        if PING_PONG:
            pipeline.await_ping_pong(me)
        start_scores(s, x.q_tile, k_tile(smem, n))
        pipeline.wait_ready(smem, V, u32(n - 1))
        start_values(acc, p, v_tile(smem, u32(n - 1)), before)
        if PING_PONG:
            pipeline.pass_ping_pong((me + 1) % CONSUMERS)
        read(bias_mask, smem, me, n, x, extras, first)
        wait_scores(s)
        release_k(smem, K, n)

    @inline
    def first_scores(s, acc, bias_mask, smem, me, n, x, extras):
        """(1) S = Q K^T of a work item's first tile, while nothing else is in flight."""
        pipeline.wait_ready(smem, K, n)
        begin_sums(s, smem, me, n)
        start_scores(s, x.q_tile, k_tile(smem, n))
        read(bias_mask, smem, me, n, x, extras, True)
        wait_all(acc, s)
        release_k(smem, K, n)

    @inline
    def last_values(s, p, acc, smem, n, before):
        """(5) O += P V of a work item's last tile, likewise; `before` as above."""
        pipeline.wait_ready(smem, V, n)
        start_values(acc, p, v_tile(smem, n), before)
        wait_all(acc, s)
        pipeline.release_group(smem, V, n)

    def build_step(weigh):
        @inline
        def step(s, p, acc, bias_mask, m_i, l_i, smem, me, n, t, x, given):
            """The n-th tile of all, the t-th of a work item."""
            alpha = cuda.local.array(2, f32)  # registers: what O has to be multiplied by
            before = u32(t - 1)
            overlap_qk_pv(s, p, acc, bias_mask, smem, me, n, x, given.extras, False, before)
            last = t == i32(x.count - 1)
            if last:
                pipeline.release_group(smem, Q, x.item_n)
            # the options, (2) m_i, (3) P, (4) l_i, and dropout, while O += P V runs
            weigh(s, bias_mask, m_i, l_i, alpha, x, given.scales, smem, me, n, not last)
            wait_all(acc, s)
            pipeline.release_group(smem, V, u32(n - 1))
            if PACKS_EARLY:
                pack(p, s)
            # O = alpha O
            rescale(acc, alpha)
            if not PACKS_EARLY:
                pack(p, s)

        return step

    clear_step = build_step(stage.weigh_clear)
    step = build_step(weigh) if BANDED or HAS_OPTIONS else clear_step

    def consume(smem, me, given):
        """Equations (1) to (6) for 64 rows of each work item and all its tiles of keys, the last
        tile first; `given` are the kernel's arguments.
        """
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S, then of P
        p = cuda.local.array(PAIRS, u32)  # of P, two elements of 16 bits each
        acc = cuda.local.array(OUTPUTS, f32)  # of O
        bias_mask = cuda.local.array(HELD, u32)  # of the tile
        m_i = cuda.local.array(2, f32)  # shifts of the thread's two rows
        l_i = cuda.local.array(2, f32)  # its part of their sums
        alpha = cuda.local.array(2, f32)  # what O has to be multiplied by, of an item's first tile
        m_done = cuda.local.array(2, f32)  # m_i of the work item before, until it is stored
        l_done = cuda.local.array(2, f32)  # the same of l_i
        o, extras, scales = given.o, given.extras, given.scales
        item_n, n = u32(0), u32(0)
        x = first(smem, item_n, begin_item(smem, me, item_n), o, extras)
        zero(acc)
        reset(m_i, l_i)
        first_scores(s, acc, bias_mask, smem, me, n, x, extras)
        weigh(s, bias_mask, m_i, l_i, alpha, x, scales, smem, me, n, x.count > 1)
        pack(p, s)
        while True:
            if SEQUENCES:
                clear_tail(smem, V, n, rest(x), me)
            stop, here = masked(x) if MASKS_FIRST else x.count, x
            for t in range(i32(1), stop):  # 32 bits take fewer instructions
                n, here = u32(n + 1), following(x, here, t)
                step(s, p, acc, bias_mask, m_i, l_i, smem, me, n, t, here, given)
            if MASKS_FIRST:
                for t in range(stop, x.count):
                    n = u32(n + 1)
                    clear_step(s, p, acc, bias_mask, m_i, l_i, smem, me, n, t, x, given)
            if x.count == 1:
                pipeline.release_group(smem, Q, item_n)
            before = u32(x.count - 1)
            if APART:
                last_values(s, p, acc, smem, n, before)
                finish(smem, item_n, me, acc, m_i, l_i, given, numbers_of(x, scales))
            # the next tile is the first of the next work item
            numbers, item_n, n = numbers_of(x, scales), u32(item_n + 1), u32(n + 1)
            item = begin_item(smem, me, item_n)
            if item.count == END:
                break
            x = first(smem, item_n, item, o, extras)
            if APART:
                first_scores(s, acc, bias_mask, smem, me, n, x, extras)
            else:
                overlap_qk_pv(s, p, acc, bias_mask, smem, me, n, x, extras, True, before)
                softmax.hand_over(m_i, l_i, m_done, l_done)
            reset(m_i, l_i)
            weigh(s, bias_mask, m_i, l_i, alpha, x, scales, smem, me, n, x.count > 1)
            if not APART:
                wait_all(acc, s)
                pipeline.release_group(smem, V, u32(n - 1))
                finish(smem, u32(item_n - 1), me, acc, m_done, l_done, given, numbers)
            pack(p, s)
        if not APART:
            last_values(s, p, acc, smem, u32(n - 1), before)
            finish(smem, u32(item_n - 1), me, acc, m_i, l_i, given, numbers)

    def load(smem, me, x):
        produce(x.maps, smem, x.o, x.extras, x.sizes)

    scales = named(Scales, f32)
    if HAS_OPTIONS:
        scales = named(ForwardScales, f32, parameters_type(options))
    return hopper_kernel(
        (*rings_of(tile, SMEM, WARP_GROUP // pipeline.WARP if RELATIVE else 1), *copied),
        Roles(tile, (Producer(load, 0),), consume, PING_PONG, WARP_GROUP if TO_MAP else 0),
        begins_early=not HAS_OPTIONS,
        maps=(4 if TO_MAP else 3) + len(copied),
        o=array(f32 if config.store == "kv_splits" else u32, 5),
        lse=array(f32, 4),
        extras=extras_type(options, lists_of(options)),
        sizes=named(Sizes, i64),
        scales=scales,
    )


def build_produce_pairs(config, layout):
    """What the producer does, and the ring of pairs, if it has them copied."""
    options, tile, pairs_map = config.options, config.tile, 4 if config.store == "map" else 3
    load_pairs, copied = load_nothing, ()
    if config.stage == OPTIONS and tile.pair_stages > 0:
        load_pairs = build_load_pairs(options, tile, layout.pairs)
        copied = (Arrivals((one_type(layout.pairs),), 1, tile.consumers * RELEASES),)
    banded, in_kv_splits = config.band != "none", config.store == "kv_splits"
    produce = build_produce(
        config.d, config.dv, banded, in_kv_splits, options, tile, pairs_map, load_pairs
    )
    return produce, copied
