"""Forward pass on Hopper with bias, mask, dropout or a function of the score: blocks and loop are
those of `numba_flash.cuda.sm90.forward`.

What belongs to a score is read by the thread that holds it, while the tensor cores compute S: two
neighbouring keys at a time, as they lie in a fragment; from shared memory, where the copy engine
can bring it (`pair_tiles`), else straight from memory. Of a mask only the tiles are visited that it
leaves something of.
"""

from numba_flash.cuda import fragment, softmax
from numba_flash.cuda.arguments import extras_type, parameters_type
from numba_flash.cuda.fetch import build_fetch, held
from numba_flash.cuda.lang import cuda, f32, i32, i64, inline, named, u32
from numba_flash.cuda.modify import build_drop, build_modify
from numba_flash.cuda.number import array
from numba_flash.cuda.preprocess import LEAST_FLOAT32
from numba_flash.cuda.sm90 import pipeline, softmax_options, wgmma
from numba_flash.cuda.sm90.arguments import END, Sizes, one_type
from numba_flash.cuda.sm90.config import ForwardConfig
from numba_flash.cuda.sm90.finish import build_finish
from numba_flash.cuda.sm90.hopper_kernel import Arrivals, Producer, Roles, hopper_kernel
from numba_flash.cuda.sm90.load_forward import build_produce, lists_of, load_nothing, rings_of
from numba_flash.cuda.sm90.pair_tiles import RELEASES, build_load_pairs, build_take_pairs
from numba_flash.cuda.sm90.rows_options import build_rows
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.swizzle import panel_bytes


def build(config: ForwardConfig):
    """Kernel of (maps, o, lse, extras, sizes, scale_log2, parameters) with its signature and
    compile options.

    maps, o, lse, sizes : as in `numba_flash.cuda.sm90.forward`.
    extras, parameters : see `numba_flash.cuda.arguments`.
    scale_log2 : what leads from scores to base 2, or, where options hide and drop alone, from raw
        products.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    write_lse, band, store_by = config.write_lse, config.band, config.store
    vectors, options, tile = config.vectors, config.options, config.tile
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    CONSUMERS, PING_PONG, APART = tile.consumers, tile.ping_pong, tile.q_stages == 1
    SMEM, V_PANEL = tile.layout(head_dim, head_dim_v), panel_bytes(BLOCK_N)
    Q, K, V = map(one_type, (SMEM.q, SMEM.k, SMEM.v))
    SCORES, PAIRS, OUTPUTS = BLOCK_N // 2, BLOCK_N // 4, head_dim_v // 2
    SEQUENCES, BFLOAT16, TO_MAP = options.sequences, dtype == "bfloat16", store_by == "map"
    DROPOUT, CHANGES, PARTS = bool(options.dropout), options.changes, store_by == "parts"
    runs = fragment.runs_of_columns(BLOCK_N)
    HELD = max(1, held(options, runs).words)
    COPIES, PAIR_TILES = tile.pair_stages > 0, one_type(SMEM.pairs)
    AHEAD, PACKS_EARLY = tile.pairs_ahead, tile.packs_early
    load_pairs = build_load_pairs(options, tile, SMEM.pairs) if COPIES else load_nothing
    take_pairs = build_take_pairs(options, tile, SMEM.pairs) if COPIES else None
    banded, at_map = band != "none", 4 if TO_MAP else 3
    produce = build_produce(head_dim, head_dim_v, banded, PARTS, options, tile, at_map, load_pairs)
    clear_tail = pipeline.build_clear_tail(head_dim_v, BLOCK_N)
    zero, _ = softmax.build_zero(OUTPUTS)
    reset = softmax.reset if CHANGES else softmax.build_reset(1, LEAST_FLOAT32)
    start_scores = wgmma.build_scores(BLOCK_N, head_dim, BLOCK_M, BFLOAT16)
    start_values = wgmma.build_new_values(BLOCK_N, head_dim_v, BFLOAT16)
    wait_scores, wait_all = wgmma.build_wait(BLOCK_N, head_dim_v)
    pack, _ = fragment.build_pack(PAIRS, BFLOAT16, positive=DROPOUT)
    build_online = softmax_options.build_online if CHANGES else softmax.build_online
    RAISED = softmax.raised(BFLOAT16, softmax.LAZIER if CHANGES else softmax.LAZY)
    online, rescale = build_online(SCORES, RAISED), softmax.build_rescale(OUTPUTS)
    fetch, drop = build_fetch(options, runs, vectors), build_drop(options, runs)
    modify = build_modify(dtype, options, runs, ends_apart=True)
    begin_scores, next_scores = build_rows(options, BLOCK_M, BLOCK_N, SMEM.q, SMEM.work)
    finish = build_finish(head_dim_v, write_lse, store_by, BFLOAT16, options, SMEM, CHANGES, RAISED)

    @inline
    def weigh(s, bias_mask, m_i, l_i, alpha, x, scale_log2, parameters, smem, me, n, more):
        """The options of tile n, then (2) m_i, (3) P, (4) l_i, and dropout; if there are `more`
        tiles in this work item, what belongs to the next one's scores may be read meanwhile.
        """
        modify(s, s, bias_mask, x.query, x.key, x.region, x.at, x.whole, parameters)
        if AHEAD and more:
            take_pairs(bias_mask, smem, me, u32(n + 1))
        online(s, m_i, l_i, alpha, scale_log2)
        if DROPOUT:
            drop(s, x.query, x.key, x.at, parameters)

    @inline
    def read_pairs(bias_mask, smem, me, n, x, extras):
        """What belongs to the scores of tile n."""
        if COPIES:
            take_pairs(bias_mask, smem, me, n)
        else:
            fetch(bias_mask, x.query, x.key, x.region, x.at, x.whole, extras)

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
        what belongs to these scores, unless that was done ahead, as of all tiles of a work item
        but the `first`, and wait for S alone. O has P V of so many tiles `before`; of none, it is
        what begins here.
        """
        pipeline.wait_ready(smem, K, n)
        if PING_PONG:
            pipeline.await_turn(me)
        start_scores(s, x.q_tile, k_tile(smem, n))
        pipeline.wait_ready(smem, V, u32(n - 1))
        start_values(acc, p, v_tile(smem, u32(n - 1)), before)
        if PING_PONG:
            pipeline.pass_turn((me + 1) % CONSUMERS)
        if first or not AHEAD:
            read_pairs(bias_mask, smem, me, n, x, extras)
        wait_scores(s)
        pipeline.release_group(smem, K, n)

    @inline
    def first_scores(s, acc, bias_mask, smem, me, n, x, extras):
        """(1) S = Q K^T of a work item's first tile, while nothing else is in flight."""
        pipeline.wait_ready(smem, K, n)
        start_scores(s, x.q_tile, k_tile(smem, n))
        read_pairs(bias_mask, smem, me, n, x, extras)
        wait_all(acc, s)
        pipeline.release_group(smem, K, n)

    @inline
    def last_values(s, p, acc, smem, n, before):
        """(5) O += P V of a work item's last tile, likewise; `before` as above."""
        pipeline.wait_ready(smem, V, n)
        start_values(acc, p, v_tile(smem, n), before)
        wait_all(acc, s)
        pipeline.release_group(smem, V, n)

    @inline
    def consume(maps, smem, me, o, lse, extras, batches, scale_log2, parameters):
        """Equations (1) to (6) for 64 rows of each work item and all its tiles of keys, the last
        tile first.
        """
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S, then of P
        p = cuda.local.array(PAIRS, u32)  # of P, two elements of 16 bits each
        acc = cuda.local.array(OUTPUTS, f32)  # of O
        bias_mask = cuda.local.array(HELD, u32)  # of the tile
        m_i = cuda.local.array(2, f32)  # shifts of the thread's two rows
        l_i = cuda.local.array(2, f32)  # its part of their sums
        alpha = cuda.local.array(2, f32)  # what their O has to be multiplied by
        m_done = cuda.local.array(2, f32)  # m_i of the work item before, until it is stored
        l_done = cuda.local.array(2, f32)  # the same of l_i
        turn, n = u32(0), u32(0)
        x = begin_scores(smem, me, turn, o, extras)
        zero(acc)
        reset(m_i, l_i)
        first_scores(s, acc, bias_mask, smem, me, n, x, extras)
        more = x.count > 1
        weigh(s, bias_mask, m_i, l_i, alpha, x, scale_log2, parameters, smem, me, n, more)
        pack(p, s)
        while True:
            if SEQUENCES:
                clear_tail(smem, V, n, x.region.cols - x.region.col0, me)
            for t in range(1, x.count):
                n, x = u32(n + 1), next_scores(x)
                overlap_qk_pv(s, p, acc, bias_mask, smem, me, n, x, extras, False, u32(t - 1))
                if t == x.count - 1:
                    pipeline.release_group(smem, Q, turn)
                # the options, (2) m_i, (3) P, (4) l_i, and dropout, while O += P V runs
                more = t < x.count - 1
                weigh(s, bias_mask, m_i, l_i, alpha, x, scale_log2, parameters, smem, me, n, more)
                wait_all(acc, s)
                pipeline.release_group(smem, V, u32(n - 1))
                if PACKS_EARLY:
                    pack(p, s)
                # O = alpha O
                rescale(acc, alpha)
                if not PACKS_EARLY:
                    pack(p, s)
            if x.count == 1:
                pipeline.release_group(smem, Q, turn)
            before = u32(x.count - 1)
            if APART:
                last_values(s, p, acc, smem, n, before)
                finish(maps, smem, turn, me, acc, m_i, l_i, o, lse, batches, parameters)
            # the next tile is the first of the next work item
            turn, n = u32(turn + 1), u32(n + 1)
            x = begin_scores(smem, me, turn, o, extras)
            if x.count == END:
                break
            if APART:
                first_scores(s, acc, bias_mask, smem, me, n, x, extras)
            else:
                overlap_qk_pv(s, p, acc, bias_mask, smem, me, n, x, extras, True, before)
                softmax.hand_over(m_i, l_i, m_done, l_done)
            reset(m_i, l_i)
            more = x.count > 1
            weigh(s, bias_mask, m_i, l_i, alpha, x, scale_log2, parameters, smem, me, n, more)
            if not APART:
                wait_all(acc, s)
                pipeline.release_group(smem, V, u32(n - 1))
                done = u32(turn - 1)
                finish(maps, smem, done, me, acc, m_done, l_done, o, lse, batches, parameters)
            pack(p, s)
        if not APART:
            last_values(s, p, acc, smem, u32(n - 1), before)
            finish(maps, smem, u32(turn - 1), me, acc, m_i, l_i, o, lse, batches, parameters)

    rings = rings_of(tile, SMEM)
    if COPIES:
        rings += (Arrivals((PAIR_TILES,), 1, CONSUMERS * RELEASES),)

    def load(smem, me, x):
        produce(x.maps, smem, x.o, x.extras, x.sizes)

    def compute(smem, me, x):
        batches, scale = i32(x.sizes.b0), x.scale_log2
        consume(x.maps, smem, me, x.o, x.lse, x.extras, batches, scale, x.parameters)

    roles = Roles(tile, (Producer(load, 0),), compute, PING_PONG, WARP_GROUP if TO_MAP else 0)
    return hopper_kernel(
        rings,
        roles,
        maps=at_map + COPIES,
        o=array(f32 if PARTS else u32, 5),
        lse=array(f32, 4),
        extras=extras_type(options, lists_of(options)),
        sizes=named(Sizes, i64),
        scale_log2=f32,
        parameters=parameters_type(options),
    )
