"""Forward pass of float32 on Hopper: FlashAttention-3's blocks, as in
`numba_flash.cuda.sm90.forward`, on planes of float16 (see `numba_flash.cuda.split`).

Three products for one keep the tensor cores three times as busy, and a tile's sums leave them
before they are added to O. So a consumer waits for each of its products, while those of the others
run; registers hold sums of products with low planes, which are added to the others when both are
there, instead of a second tile.
"""

import math

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.arguments import SPLIT, Centred, extras_type
from numba_flash.cuda.lang import cuda, f32, i32, i64, inline, named, u32
from numba_flash.cuda.number import array, index
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import END, Scales, Sizes, one_type
from numba_flash.cuda.sm90.config import ForwardConfig
from numba_flash.cuda.sm90.hopper_kernel import Producer, Roles, hopper_kernel
from numba_flash.cuda.sm90.load_forward import WORD, build_produce, rings_of
from numba_flash.cuda.sm90.rows import ROWS, build_begin, build_hide
from numba_flash.cuda.sm90.split_tiles import padded
from numba_flash.cuda.swizzle import PANEL, panels


def build(config: ForwardConfig):
    """Kernel of (maps, o, lse, extras, sizes, scales) with its signature and compile options.

    maps : tensor maps of the planes of q, k and v as (b0, b1, heads, n, planes of columns), boxes
        of one panel of a tile.
    o : (b0, b1, heads, n, head_dim_v), b0 repeated for each part of the keys if
        ``config.store`` is "parts".
    lse : (b0, b1, heads, n), natural logarithm.
    extras : lengths, see `numba_flash.cuda.arguments`, and factors, shifts and centres.
    sizes, scales : `Sizes` and `Scales` of `numba_flash.cuda.sm90.arguments`.
    """
    band, options, tile, head_dim_v = config.band, config.options, config.tile, config.dv
    D, DV, planes = padded(config.d), padded(head_dim_v), tile.planes
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    CONSUMERS, PING_PONG = tile.consumers, tile.ping_pong
    SMEM, SCORES, OUTPUTS = tile.layout(D, DV), BLOCK_N // 2, DV // 2
    Q, K, V, WORK = map(one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.work))
    ALL_SCORES = panels(D) * SCORES  # of as many sums as a score has
    LOW_SCORES, OF_PANEL = SCORES if planes > 1 else 1, min(DV, PANEL) // 2
    LOW_OF_PANEL, P_WORDS = OF_PANEL if planes > 1 else 1, planes * BLOCK_N // 4
    BANDED, PARTS, WRITE_LSE = band != "none", config.store == "parts", config.write_lse
    SEQUENCES, PACKED, CENTRED = options.sequences, options.packed, Centred.of(options)
    SHIFTED, LOWERED = CENTRED.keys, 2.0**-softmax.RAISED_P
    NEG_INF, NAN, LN2 = -math.inf, math.nan, math.log(2.0)
    produce = build_produce(D, DV, BANDED, PARTS, options, tile)
    clear_tail = pipeline.build_clear_tail(planes * PANEL * panels(DV), BLOCK_N)
    start_scores, wait_scores, add_low = wgmma.build_split_scores(BLOCK_N, D, BLOCK_M, planes)
    values = wgmma.build_split_values(BLOCK_N, DV, planes)
    begin_item, hide = build_begin(BLOCK_N, SMEM.q, SMEM.work), build_hide(BLOCK_N, band == "both")
    (zero, zero_rows), reset = softmax.build_zero(OUTPUTS), softmax.reset
    raise_shifts = softmax.build_raise(SCORES, OUTPUTS, 1).all
    exponentials = softmax.build_exponentials(SCORES, 1, raised=softmax.RAISED_P, apart=True)
    split, _ = fragment.build_split(BLOCK_N // 4, planes)
    put_floats = store.build_put_floats(head_dim_v, CENTRED.values)
    factor_of = pipeline.build_factor_of(WORK, WORD)

    @inline
    def scores(s, low, smem, me, n, q_tile):
        """(1) S = Q K^T of tile n."""
        pipeline.wait_ready(smem, K, n)
        if PING_PONG:
            pipeline.await_turn(me)
        k_tile = wgmma.descriptor(pipeline.tile(smem, K, n), u32(0))
        start_scores(s, low, q_tile, k_tile)
        if PING_PONG:
            pipeline.pass_turn((me + 1) % CONSUMERS)
        wait_scores(s, low)
        pipeline.release_group(smem, K, n)
        add_low(s, low)

    @inline
    def finish(smem, turn, me, acc, m_i, l_i, o, lse, extras, scale_log2, batches):
        """(6) O = O / l, lse = m + log l of a work item, stored; a row that saw nothing has O = 0,
        lse = -inf.
        """
        inverse = cuda.local.array(2, f32)  # registers: factors of the thread's rows of O
        b0 = pipeline.read(smem, WORK, turn, WORD.b0)
        b1 = pipeline.read(smem, WORK, turn, WORD.b1)
        h = pipeline.read(smem, WORK, turn, WORD.head)
        kv_head = pipeline.read(smem, WORK, turn, WORD.kv_head)
        row0 = i32(pipeline.read(smem, WORK, turn, WORD.row0) + me * ROWS)
        q0, queries, rows = i32(0), i32(o.shape[3]), i32(o.shape[3])
        if SEQUENCES:
            q0 = pipeline.read(smem, WORK, turn, WORD.q0)
            queries = pipeline.read(smem, WORK, turn, WORD.queries)
        stored0 = b0
        if PARTS:
            stored0 = i32(b0 + pipeline.read(smem, WORK, turn, WORD.part) * batches)
        if PACKED:
            rows = queries
        factor = factor_of(smem, turn, extras, 2)
        for r in range(2):
            l, i = fragment.row_sum(l_i[r]), row0 + wgmma.first_row() + 8 * r
            if SEQUENCES and i >= queries:
                l = f32(0)
            inverse[r] = f32(0) if l == f32(0) else ptx.rcp(l) * factor
            power = ptx.lg2(l * f32(LOWERED))
            value = (m_i[r] * scale_log2 + power) * f32(LN2) if l != f32(0) else f32(NEG_INF)
            if SHIFTED and i < queries:
                value += extras.shifts[index(b0), index(b1), index(h), index(q0 + i)]
            if SEQUENCES and pipeline.read(smem, WORK, turn, WORD.invalid) != 0:
                inverse[r] = f32(NAN)
                value = f32(NAN)
            if WRITE_LSE and i < rows and cuda.threadIdx.x % 4 == 0:
                lse[index(stored0), index(b1), index(h), index(q0 + i)] = value
        if cuda.any_sync(fragment.ALL_LANES, inverse[0] == f32(0) or inverse[1] == f32(0)):
            zero_rows(acc, inverse)  # 0 * NaN is not 0
        pipeline.release(smem, WORK, turn)
        centre = extras.centres[1, index(b0), index(b1), index(kv_head)]
        for r in range(2):
            i = row0 + wgmma.first_row() + 8 * r
            if i < rows:
                o_row = o[index(stored0), index(b1), index(h), index(q0 + i)]
                put_floats(ptx.global_address(o_row), acc, inverse, r, centre)

    @inline
    def consume(smem, me, o, lse, extras, batches, scale):
        """Equations (1) to (6) for 64 rows of each work item and all its tiles of keys, the last
        tile first.
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
        turn, n = u32(0), u32(0)
        item = begin_item(smem, me, turn)
        while item.count != END:
            scale_log2 = scale * factor_of(smem, turn, extras, 0)
            scale_log2 *= factor_of(smem, turn, extras, 1)
            col = item.col
            zero(acc)
            reset(m_i, l_i)
            if SEQUENCES:
                clear_tail(smem, V, n, item.keys - col, me)
            for t in range(item.count):
                # (1) S = Q K^T
                scores(s, s_low, smem, me, n, item.q_tile)
                if t == item.count - 1:
                    pipeline.release_group(smem, Q, turn)
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
            finish(smem, turn, me, acc, m_i, l_i, o, lse, extras, scale_log2, batches)
            turn = u32(turn + 1)
            item = begin_item(smem, me, turn)

    rings = rings_of(tile, SMEM)

    def compute(smem, me, x):
        scale = x.scales.scale_log2
        consume(smem, me, x.o, x.lse, x.extras, i32(x.sizes.b0), scale)

    roles = Roles(
        tile,
        producers=(Producer(lambda smem, me, x: produce(x.maps, smem, x.o, x.extras, x.sizes), 0),),
        consume=compute,
        ping_pong=PING_PONG,
    )
    return hopper_kernel(
        rings,
        roles,
        maps=3,
        o=array(f32, 5),
        lse=array(f32, 4),
        extras=extras_type(options, (), SPLIT),
        sizes=named(Sizes, i64),
        scales=named(Scales, f32),
    )
