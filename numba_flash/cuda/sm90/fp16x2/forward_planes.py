"""Forward pass of float32 on Hopper: FlashAttention-3's blocks, as in
`numba_flash.cuda.sm90.forward.forward`, on planes of float16 (see
`numba_flash.cuda.passes.write_planes`).

Three products for one keep the tensor cores three times as busy, and a tile's sums leave them
before they are added to O. So a consumer waits for each of its products, while those of the others
run; registers hold sums of products with low planes, which are added to the others when both are
there, instead of a second tile.

It is a loop beside `numba_flash.cuda.sm90.forward.forward` since more than three steps of a tile
differ: S is the sum of two accumulators, O += P V goes panel by panel, P is split into planes
before either, and no product is in flight during a softmax. What a work item begins and ends with
is the same.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import FP16X2, extras_type
from numba_flash.cuda.number import array
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, named, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.swizzle import PANEL, panels
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.arguments import END, Scales, Sizes, one_type
from numba_flash.cuda.sm90.config import ForwardConfig
from numba_flash.cuda.sm90.forward.finish import LN2, NEG_INF, build_finish
from numba_flash.cuda.sm90.forward.load_forward import WORD, build_produce, rings_of
from numba_flash.cuda.sm90.hopper_kernel import Producer, Roles, hopper_kernel
from numba_flash.cuda.sm90.rows import build_begin, build_hide
from numba_flash.cuda.sm90.tiles import padded


def build(config: ForwardConfig):
    """Kernel of (maps, o, lse, extras, sizes, scales) with its signature and compile options.

    maps : tensor maps of the planes of q, k and v as (b0, b1, heads, n, planes of columns), boxes
        of one panel of a tile.
    o : (b0, b1, heads, n, head_dim_v), b0 repeated for each part of the keys if
        ``config.store`` is "kv_splits".
    lse : (b0, b1, heads, n), natural logarithm.
    extras : lengths, see `numba_flash.cuda.arguments`, and factors, shifts and centres.
    sizes, scales : `Sizes` and `Scales` of `numba_flash.cuda.sm90.arguments`.
    """
    band, options, tile = config.band, config.options, config.tile
    D, DV, planes = padded(config.d), padded(config.dv), tile.planes
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    CONSUMERS, PING_PONG = tile.consumers, tile.ping_pong
    SMEM, SCORES, OUTPUTS = tile.layout(D, DV), BLOCK_N // 2, DV // 2
    Q, K, V, WORK = map(one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.work))
    ALL_SCORES = panels(D) * SCORES  # of as many sums as a score has
    LOW_SCORES, OF_PANEL = SCORES if planes > 1 else 1, min(DV, PANEL) // 2
    LOW_OF_PANEL, P_WORDS = OF_PANEL if planes > 1 else 1, planes * BLOCK_N // 4
    BANDED, KV_SPLITS = band != "none", config.store == "kv_splits"
    SEQUENCES, LOWERED = options.sequences, 2.0**-softmax.RAISED_P
    produce = build_produce(D, DV, BANDED, KV_SPLITS, options, tile)
    clear_tail = pipeline.build_clear_tail(planes * PANEL * panels(DV), BLOCK_N)
    start_scores, wait_scores, add_low = wgmma.build_planes_scores(BLOCK_N, D, BLOCK_M, planes)
    values = wgmma.build_planes_values(BLOCK_N, DV, planes)
    begin_item, hide = build_begin(BLOCK_N, SMEM.q, SMEM.work), build_hide(BLOCK_N, band == "both")
    (zero, _), reset = softmax.build_zero(OUTPUTS), softmax.reset
    raise_shifts = softmax.build_raise(SCORES, OUTPUTS, 1).all
    exponentials = softmax.build_exponentials(SCORES, 1, raised=softmax.RAISED_P, apart=True)
    split, _ = fragment.build_split(BLOCK_N // 4, planes)
    factor_of = pipeline.build_factor_of(WORK, WORD)

    @inline
    def scores(s, low, smem, me, n, q_tile):
        """(1) S = Q K^T of tile n."""
        pipeline.wait_ready(smem, K, n)
        if PING_PONG:
            pipeline.await_ping_pong(me)
        k_tile = wgmma.descriptor(pipeline.tile(smem, K, n), u32(0))
        start_scores(s, low, q_tile, k_tile)
        if PING_PONG:
            pipeline.pass_ping_pong((me + 1) % CONSUMERS)
        wait_scores(s, low)
        pipeline.release_group(smem, K, n)
        add_low(s, low)

    @inline
    def log_sum(m, l, scale_log2):
        power = ptx.lg2(l * f32(LOWERED))
        return (m * scale_log2 + power) * f32(LN2) if l != f32(0) else f32(NEG_INF)

    @inline
    def factor(smem, item_n, extras, scale_log2):
        return factor_of(smem, item_n, extras, 2)

    finish = build_finish(config, SMEM, log_sum, factor)

    @inline
    def consume(smem, me, given):
        """Equations (1) to (6) for 64 rows of each work item and all its tiles of keys, the last
        tile first; `given` are the kernel's arguments.
        """
        # registers of each thread
        s = cuda.local.array(ALL_SCORES, f32)  # fragment of S, then of P, and sums of S behind
        s_low = cuda.local.array(LOW_SCORES, f32)  # of its products with low planes
        p = cuda.local.array(P_WORDS, u32)  # of P, two elements of 16 bits each
        acc = cuda.local.array(OUTPUTS, f32)  # of O
        high = cuda.local.array(OF_PANEL, f32)  # of some columns of P V
        low = cuda.local.array(LOW_OF_PANEL, f32)  # of their products with low planes
        m_i = cuda.local.array(2, f32)  # shifts of the thread's two rows
        l_i = cuda.local.array(2, f32)  # its part of their sums
        extras, scale = given.extras, given.scales.scale_log2
        item_n, n = u32(0), u32(0)
        item = begin_item(smem, me, item_n)
        while item.count != END:
            scale_log2 = scale * factor_of(smem, item_n, extras, 0)
            scale_log2 *= factor_of(smem, item_n, extras, 1)
            col = item.col
            zero(acc)
            reset(m_i, l_i)
            if SEQUENCES:
                clear_tail(smem, V, n, item.keys - col, me)
            for t in range(item.count):
                # (1) S = Q K^T
                scores(s, s_low, smem, me, n, item.q_tile)
                if t == item.count - 1:
                    pipeline.release_group(smem, Q, item_n)
                if BANDED or t == 0:
                    hide(s, item.row, col, item)
                # (2) m_i, O = alpha O
                raise_shifts(s, acc, m_i, l_i, scale_log2)
                # (3) P, (4) l_i
                exponentials(s, m_i, l_i, scale_log2)
                split(p, s)
                # (5) O += P V
                pipeline.wait_ready(smem, V, n)
                values(acc, high, low, p, pipeline.tile(smem, V, n), f32(1))
                pipeline.release_group(smem, V, n)
                n, col = u32(n + 1), i32(col - BLOCK_N)
            finish(smem, item_n, me, acc, m_i, l_i, given, scale_log2)
            item_n = u32(item_n + 1)
            item = begin_item(smem, me, item_n)

    def load(smem, me, x):
        produce(x.maps, smem, x.o, x.extras, x.sizes)

    return hopper_kernel(
        rings_of(tile, SMEM),
        Roles(tile, (Producer(load, 0),), consume, PING_PONG),
        maps=3,
        o=array(f32, 5),
        lse=array(f32, 4),
        extras=extras_type(options, (), FP16X2),
        sizes=named(Sizes, i64),
        scales=named(Scales, f32),
    )
