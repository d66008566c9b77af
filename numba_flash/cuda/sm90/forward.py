"""Forward pass on Hopper: FlashAttention-3 (Shah et al., arXiv:2407.08608), Algorithm 1, in
persistent blocks.

One thread of the first warp group, the producer, lets the copy engine fill rings of Q, K and V
tiles; every other warp group, a consumer, owns 64 rows of a block of queries. A consumer starts the
scores of the next tile before the product P V of the current one, so that its softmax runs while
the tensor cores do. The next tile may belong to the next block of queries: O is finished and stored
while the tensor cores already work on what follows. With `ping_pong` the consumers also take turns
at starting products, which keeps their softmaxes apart.

Where there is room for one tile of Q, the next block's cannot come before the last scores of this
one are there. Then O is finished and stored while it comes, and work items stay apart: at D = 256,
N = 512, 1k, 2k, 4k and 16k, causal, that is 1.05, 1.02, 1.01, 1.01 and 1.00 times as fast, full
1.03, 1.04, 1.02, 1.02 and 1.01 (H200).

Below a diagonal the first tiles of a work item alone hide keys, and have a loop of their own. In a
loop that asks of each tile whether it does, ptxas puts all of the softmax behind the wait for O, so
that nothing overlaps it: causal, at N = 1k, 4k and 16k, it ran at 0.97, 0.95 and 0.95 of the speed
at D = 64, at 0.98, 0.93 and 0.94 at D = 256; and at 0.96, 0.96 and 0.98 at D = 128, where a branch
kept the exponentials before that wait (H200).
"""

from numba_flash.cuda import fragment, softmax
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.lang import cuda, f32, i32, i64, inline, named, u32
from numba_flash.cuda.number import array
from numba_flash.cuda.preprocess import LEAST_FLOAT32
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.arguments import END, Scales, Sizes, one_type
from numba_flash.cuda.sm90.config import ForwardConfig
from numba_flash.cuda.sm90.finish import build_finish
from numba_flash.cuda.sm90.hopper_kernel import Producer, Roles, hopper_kernel
from numba_flash.cuda.sm90.load_forward import build_produce, lists_of, rings_of
from numba_flash.cuda.sm90.rows import (
    build_begin,
    build_begin_sums,
    build_follow,
    build_hide,
    build_masked,
)
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.softcap import build_tanh
from numba_flash.cuda.swizzle import panel_bytes


def build(config: ForwardConfig):
    """Kernel of (maps, o, lse, extras, sizes, scales) with its signature and compile options.

    maps : tensor maps of q, k and v as (b0, b1, heads, n, head_dim), boxes of one panel of a tile,
        and if ``config.store`` is "map" one of o.
    o : (b0, b1, heads, n, head_dim_v) as words of two elements; if it is "parts" as float32, b0
        repeated for each part of the keys.
    lse : (b0, b1, heads, n), natural logarithm.
    extras : lengths, and with ``options.listed`` lists, see `numba_flash.cuda.arguments`.
    sizes, scales : `Sizes` and `Scales` of `numba_flash.cuda.sm90.arguments`.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    write_lse, band, store_by = config.write_lse, config.band, config.store
    options, tile = config.options, config.tile
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    CONSUMERS, PING_PONG, APART = tile.consumers, tile.ping_pong, tile.q_stages == 1
    SMEM, V_PANEL = tile.layout(head_dim, head_dim_v), panel_bytes(BLOCK_N)
    Q, K, V = map(one_type, (SMEM.q, SMEM.k, SMEM.v))
    SCORES, PAIRS, OUTPUTS = BLOCK_N // 2, BLOCK_N // 4, head_dim_v // 2
    TO_MAP, PARTS, LISTED = store_by == "map", store_by == "parts", options.listed
    BANDED, MASKS_FIRST = band != "none", band == "above" and not LISTED
    CAPPED, PACKS_EARLY = bool(options.softcap), tile.packs_early
    SEQUENCES, BFLOAT16 = options.sequences, dtype == "bfloat16"
    produce = build_produce(head_dim, head_dim_v, BANDED, PARTS, options, tile)
    clear_tail = pipeline.build_clear_tail(head_dim_v, BLOCK_N)
    (zero, _), reset = softmax.build_zero(OUTPUTS), softmax.build_reset(1, LEAST_FLOAT32)
    RELATIVE = options.relative
    start_scores = wgmma.build_scores(BLOCK_N, head_dim, BLOCK_M, BFLOAT16, add=RELATIVE)
    begin_sums = build_begin_sums(tile, SMEM.k, SMEM.added) if RELATIVE else None
    release_k = pipeline.release_warps if RELATIVE else pipeline.release_group
    RELEASES_OF_K = WARP_GROUP // pipeline.WARP if RELATIVE else 1
    start_values = wgmma.build_new_values(BLOCK_N, head_dim_v, BFLOAT16)
    wait_scores, wait_all = wgmma.build_wait(BLOCK_N, head_dim_v)
    pack, _ = fragment.build_pack(PAIRS, BFLOAT16)
    finish = build_finish(head_dim_v, write_lse, store_by, BFLOAT16, options, SMEM)
    online = softmax.build_online(SCORES, softmax.raised(BFLOAT16, softmax.LAZY))
    rescale = softmax.build_rescale(OUTPUTS)
    tanh, hide = build_tanh(SCORES, BFLOAT16), build_hide(BLOCK_N, band == "both")
    begin_item, masked = build_begin(BLOCK_N, SMEM.q, SMEM.work), build_masked(BLOCK_N)
    lists_among, last_of, column, begin_at = build_follow(options, BLOCK_M, BLOCK_N, SMEM.work)

    @inline
    def first_softmax(s, m_i, l_i, alpha, item, scales):
        """Softcap and mask, then (2) m_i, (3) P, (4) l_i, of a work item's first tile."""
        if CAPPED:
            tanh(s, scales.slope, scales.scale_log2)
        hide(s, item.row, item.col, item)
        online(s, m_i, l_i, alpha, scales.scale_log2)

    @inline
    def k_tile(smem, n):
        """Descriptor of a tile of K."""
        return wgmma.descriptor(pipeline.tile(smem, K, n), u32(0))

    @inline
    def v_tile(smem, n):
        """Descriptor of a tile of V."""
        return wgmma.descriptor(pipeline.tile(smem, V, n), u32(V_PANEL))

    @inline
    def overlap_qk_pv(s, p, acc, smem, me, n, q_tile, before):
        """Start (1) S = Q K^T of tile n and (5) O += P V of the one before, both in flight; wait
        for S alone. O has P V of so many tiles `before`; of none, it is what begins here.
        """
        pipeline.wait_ready(smem, K, n)
        if RELATIVE:
            begin_sums(s, smem, me, n)
        if PING_PONG:
            pipeline.await_turn(me)
        start_scores(s, q_tile, k_tile(smem, n))
        pipeline.wait_ready(smem, V, u32(n - 1))
        start_values(acc, p, v_tile(smem, u32(n - 1)), before)
        if PING_PONG:
            pipeline.pass_turn((me + 1) % CONSUMERS)
        wait_scores(s)
        release_k(smem, K, n)

    @inline
    def first_scores(s, acc, smem, me, n, q_tile):
        """(1) S = Q K^T of a work item's first tile, while nothing else is in flight."""
        pipeline.wait_ready(smem, K, n)
        if RELATIVE:
            begin_sums(s, smem, me, n)
        start_scores(s, q_tile, k_tile(smem, n))
        wait_all(acc, s)
        release_k(smem, K, n)

    @inline
    def last_values(s, p, acc, smem, n, before):
        """(5) O += P V of a work item's last tile, likewise; `before` as above."""
        pipeline.wait_ready(smem, V, n)
        start_values(acc, p, v_tile(smem, n), before)
        wait_all(acc, s)
        pipeline.release_group(smem, V, n)

    def build_step(hides):
        HIDES = hides

        @inline
        def step(s, p, acc, m_i, l_i, smem, me, n, turn, t, item, scales):
            """The n-th tile of all, the t-th of a work item, from column item.col on."""
            alpha = cuda.local.array(2, f32)  # registers: what O has to be multiplied by
            overlap_qk_pv(s, p, acc, smem, me, n, item.q_tile, u32(t - 1))
            if t == i32(item.count - 1):
                pipeline.release_group(smem, Q, turn)
            # softcap and mask, then (2) m_i, (3) P, (4) l_i, while O += P V runs
            if CAPPED:
                tanh(s, scales.slope, scales.scale_log2)
            if HIDES:
                hide(s, item.row, item.col, item)
            online(s, m_i, l_i, alpha, scales.scale_log2)
            wait_all(acc, s)
            pipeline.release_group(smem, V, u32(n - 1))
            if PACKS_EARLY:
                pack(p, s)
            # O = alpha O
            rescale(acc, alpha)
            if not PACKS_EARLY:
                pack(p, s)

        return step

    step, clear_step = build_step(BANDED), build_step(False)

    @inline
    def consume(maps, smem, me, o, lse, lists, batches, scales):
        """Equations (1) to (6) for 64 rows of each work item and all its tiles of keys, the last
        tile first.
        """
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S, then of P
        p = cuda.local.array(PAIRS, u32)  # of P, two elements of 16 bits each
        acc = cuda.local.array(OUTPUTS, f32)  # of O
        m_i = cuda.local.array(2, f32)  # shifts of the thread's two rows, in base 2
        l_i = cuda.local.array(2, f32)  # its part of their sums
        alpha = cuda.local.array(2, f32)  # what O has to be multiplied by, of an item's first tile
        m_done = cuda.local.array(2, f32)  # m_i of the work item before, until it is stored
        l_done = cuda.local.array(2, f32)  # the same of l_i
        turn, n = u32(0), u32(0)
        item = begin_item(smem, me, turn)
        if LISTED:
            last = last_of(smem, turn, item, lists)
            item = begin_at(item, column(last, 0))
        zero(acc)
        reset(m_i, l_i)
        first_scores(s, acc, smem, me, n, item.q_tile)
        first_softmax(s, m_i, l_i, alpha, item, scales)
        pack(p, s)
        while True:
            col = item.col
            if SEQUENCES:
                clear_tail(smem, V, n, item.keys - col, me)
            stop = masked(item) if MASKS_FIRST else item.count
            for t in range(i32(1), stop):  # 32 bits take fewer instructions
                n, col = u32(n + 1), i32(col - BLOCK_N)
                if LISTED and BANDED:
                    col = column(last, t)
                here = begin_at(item, col)
                step(s, p, acc, m_i, l_i, smem, me, n, turn, t, here, scales)
            if MASKS_FIRST:
                for t in range(stop, item.count):
                    n = u32(n + 1)
                    clear_step(s, p, acc, m_i, l_i, smem, me, n, turn, t, item, scales)
            if item.count == 1:
                pipeline.release_group(smem, Q, turn)
            before = u32(item.count - 1)
            if APART:
                last_values(s, p, acc, smem, n, before)
                finish(maps, smem, turn, me, acc, m_i, l_i, o, lse, batches, ())
            # the next tile is the first of the next work item
            turn, n = u32(turn + 1), u32(n + 1)
            item = begin_item(smem, me, turn)
            if item.count == END:
                break
            if LISTED:
                last = last_of(smem, turn, item, lists)
                item = begin_at(item, column(last, 0))
            if APART:
                first_scores(s, acc, smem, me, n, item.q_tile)
            else:
                overlap_qk_pv(s, p, acc, smem, me, n, item.q_tile, before)
                softmax.hand_over(m_i, l_i, m_done, l_done)
            reset(m_i, l_i)
            first_softmax(s, m_i, l_i, alpha, item, scales)
            if not APART:
                wait_all(acc, s)
                pipeline.release_group(smem, V, u32(n - 1))
                done = u32(turn - 1)
                finish(maps, smem, done, me, acc, m_done, l_done, o, lse, batches, ())
            pack(p, s)
        if not APART:
            last_values(s, p, acc, smem, u32(n - 1), before)
            finish(maps, smem, u32(turn - 1), me, acc, m_i, l_i, o, lse, batches, ())

    rings = rings_of(tile, SMEM, RELEASES_OF_K)

    def load(smem, me, x):
        produce(x.maps, smem, x.o, x.extras, x.sizes)

    def compute(smem, me, x):
        lists, batches = lists_among(x.extras), i32(x.sizes.b0)
        consume(x.maps, smem, me, x.o, x.lse, lists, batches, x.scales)

    roles = Roles(tile, (Producer(load, 0),), compute, PING_PONG, WARP_GROUP if TO_MAP else 0)
    return hopper_kernel(
        rings,
        roles,
        begins_early=True,
        maps=4 if TO_MAP else 3,
        o=array(f32 if PARTS else u32, 5),
        lse=array(f32, 4),
        extras=extras_type(options, lists_of(options)),
        sizes=named(Sizes, i64),
        scales=named(Scales, f32),
    )
