"""Forward pass on Hopper with a bias that all batch elements share, and narrow heads: persistent
blocks keep the bias of their queries in shared memory, and go through the batch elements.

Of so few columns, products take less time than exponentials, and what is read for a score more than
either. Here nothing is read for one but its bias, from shared memory, four at a time, into the
registers that the product is added to (`numba_flash.cuda.score.resident_bias`). A consumer brings
the next tile's bias, starts Q K^T of that and O += P V of this one, and waits for both: the other
consumer has its softmax then.

It is a loop beside `numba_flash.cuda.sm90.forward.forward` by measurement: as a score stage of that
one, with a list of work whose innermost axis is the batch, and one flag to wait for both products,
the softmax of a tile stood in the code three times, and triangle attention was 4 to 7 % slower
without -inf in the bias, though 6 % faster with some. Measured: docs/lab/hopper_forward.md,
`build`.
"""

import math

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import ResidentScales, UnitSizes, extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, named, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.resident_bias import build_keep
from numba_flash.cuda.score.swizzle import NARROW_ROW_BYTES
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import LOG2E, one_type
from numba_flash.cuda.sm90.config import ForwardConfig
from numba_flash.cuda.sm90.hopper_kernel import Arrivals, Producer, Roles, hopper_kernel
from numba_flash.cuda.sm90.resident_bias.load_resident import build_produce
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.work.units import build_units

NEG_INF, LN2 = -math.inf, math.log(2.0)
ROWS = 64  # of a consumer


def build(config: ForwardConfig):
    """Kernel of (maps, o, lse, extras, sizes, scales) with its signature and compile options.

    maps : tensor maps of q, k and v as (b0, b1, heads, n, head_dim), boxes of one narrow panel.
    o : (b0, b1, heads, n, head_dim_v) as words of two elements.
    lse : (b0, b1, heads, n), natural logarithm.
    sizes, scales : `UnitSizes` and `ResidentScales` of `numba_flash.cuda.arguments`.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    vectors, options, tile = config.vectors, config.options, config.tile
    BLOCK_N, TILES, CONSUMERS, SMEM = tile.block_n, tile.tiles, tile.consumers, tile.layout()
    Q, K, V = map(one_type, (SMEM.q, SMEM.k, SMEM.v))
    SCORES, PAIRS, OUTPUTS = BLOCK_N // 2, BLOCK_N // 4, head_dim_v // 2
    WRITE_LSE, BFLOAT16, MOST = config.write_lse, dtype == "bfloat16", softmax.LAZIER
    Q_ROWS = ROWS * NARROW_ROW_BYTES
    produce = build_produce(tile)
    resident_by = tile, SMEM.resident, WARP_GROUP, pipeline.any_of_warp_group
    first_of, unit_of, after = build_units(tile.block_m)
    fill, begin, add = build_keep(options, vectors, *resident_by)
    start_scores, start_values = wgmma.build_narrow(BLOCK_N, head_dim, head_dim_v, BFLOAT16)
    _, wait_all = wgmma.build_wait(BLOCK_N, head_dim_v)
    raising = softmax.build_raise(SCORES, OUTPUTS, 1, MOST)
    find, rescale_rows = raising.find, raising.rescale
    RAISED = softmax.raised(BFLOAT16, MOST)
    exponentials = softmax.build_exponentials(SCORES, 1, True, raised=RAISED)
    pack, _ = fragment.build_pack(PAIRS, BFLOAT16)
    zero, zero_rows = softmax.build_zero(OUTPUTS)
    put_row = store.build_put_row(head_dim_v, False, BFLOAT16)

    @inline
    def row_of(x, me):
        """A thread's first row of a unit."""
        return i32(x.row0 + me * ROWS + wgmma.first_row())

    @inline
    def finish(me, x, acc, m_i, l_i, o, lse, unit):
        """(6) O = O / l, lse = m + log l, stored; a row that saw nothing has O = 0, lse = -inf.
        `unit` leads from scores to base e.
        """
        inverse = cuda.local.array(2, f32)  # registers: 1 / l of the thread's rows
        row = row_of(x, me)
        for r in range(2):
            l, i = fragment.row_sum(l_i[r]), i32(row + 8 * r)
            inverse[r] = f32(0) if l == f32(0) else ptx.rcp(l)
            if WRITE_LSE and i < x.rows and cuda.threadIdx.x % 4 == 0:
                value = m_i[r] * unit + (ptx.lg2(l) - f32(RAISED)) * f32(LN2)
                value = value if l != f32(0) else f32(NEG_INF)
                lse[index(x.b0), index(x.b1), index(x.head), index(i)] = value
        if inverse[0] == f32(0) or inverse[1] == f32(0):
            zero_rows(acc, inverse)  # 0 * NaN is not 0
        for r in range(2):
            i = i32(row + 8 * r)
            if i < x.rows:
                o_row = o[index(x.b0), index(x.b1), index(x.head), index(i)]
                put_row(ptx.global_address(o_row), acc, inverse, r)

    @inline
    def raise_shifts(best, acc, m_i, l_i, scale_log2):
        """(2) m_i, O = alpha O, where scores have outgrown their shift."""
        outgrown = False
        for r in range(2):
            outgrown = outgrown or (best[r] - m_i[r]) * scale_log2 > f32(MOST)
        if cuda.any_sync(fragment.ALL_LANES, outgrown):
            for r in range(2):
                best[r] = fragment.row_maximum(best[r])
            rescale_rows(best, acc, m_i, l_i, scale_log2)

    @inline
    def q_tile(smem, me, item_n):
        """Descriptor of a consumer's rows of Q."""
        rows = pipeline.tile(smem, Q, item_n) + u32(me * Q_ROWS)
        return wgmma.descriptor(rows, u32(0))

    @inline
    def k_tile(smem, n):
        """Descriptor of a tile of K."""
        return wgmma.descriptor(pipeline.tile(smem, K, n), u32(0))

    @inline
    def v_tile(smem, n):
        """Descriptor of a tile of V."""
        return wgmma.descriptor(pipeline.tile(smem, V, n), u32(0))

    @inline
    def consume(smem, me, o, lse, extras, sizes, scales):
        """Equations (1) to (6) for 64 rows of each unit and all its tiles of keys."""
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S, then of P
        p = cuda.local.array(PAIRS, u32)  # of P, two elements of 16 bits each
        acc = cuda.local.array(OUTPUTS, f32)  # of O
        m_i = cuda.local.array(2, f32)  # shifts of the thread's two rows
        l_i = cuda.local.array(2, f32)  # its part of their sums
        best = cuda.local.array(2, f32)  # its largest scores of the tile
        number = first_of(cuda.blockIdx.x, sizes)
        stop = first_of(cuda.blockIdx.x + 1, sizes)
        keys, inverse = i32(sizes.keys), scales.inverse
        x, n, item_n, t = unit_of(number, sizes), u32(0), u32(0), i32(0)
        before, begins = x, fill(smem, me, row_of(x, me), x, extras, keys, inverse)
        unit = scales.scale if begins != u32(0) else f32(1)
        unit_before = unit
        zero(acc)
        softmax.reset(m_i, l_i)
        # (1) S = bias / scale + Q K^T of the first tile of all
        begin(s, smem, me, t, inverse)
        pipeline.wait_ready(smem, Q, item_n)
        pipeline.wait_ready(smem, K, n)
        start_scores(s, q_tile(smem, me, item_n), k_tile(smem, n), begins)
        wait_all(acc, s)
        while True:
            pipeline.release_group(smem, K, n)
            if t == TILES - 1:
                pipeline.release_group(smem, Q, item_n)
            if n > u32(0):
                pipeline.release_group(smem, V, u32(n - 1))
            if t == 0 and n > u32(0):
                finish(me, before, acc, m_i, l_i, o, lse, unit_before)
                zero(acc)
                softmax.reset(m_i, l_i)
            if begins == u32(0):
                add(s, smem, me, t, scales.scale)
            # (2) m_i, O = alpha O, (3) P, (4) l_i
            scale_log2 = scales.scale_log2 if begins != u32(0) else f32(LOG2E)
            find(best, s, m_i, scale_log2)
            raise_shifts(best, acc, m_i, l_i, scale_log2)
            exponentials(s, m_i, l_i, scale_log2)
            pack(p, s)
            n, t = u32(n + 1), i32(t + 1)
            if t == TILES:
                before, number, item_n, t = x, i32(number + 1), u32(item_n + 1), i32(0)
                x, unit_before = after(x, number, sizes), unit
                if number == stop:
                    break
                if x.b1 == 0:
                    begins = fill(smem, me, row_of(x, me), x, extras, keys, inverse)
                    unit = scales.scale if begins != u32(0) else f32(1)
                pipeline.wait_ready(smem, Q, item_n)
            # (1) S of the next tile, (5) O += P V, both in flight
            begin(s, smem, me, t, inverse)
            pipeline.wait_ready(smem, K, n)
            start_scores(s, q_tile(smem, me, item_n), k_tile(smem, n), begins)
            pipeline.wait_ready(smem, V, u32(n - 1))
            start_values(acc, p, v_tile(smem, u32(n - 1)))
            wait_all(acc, s)
        # (5) O += P V of the last tile of all
        pipeline.wait_ready(smem, V, u32(n - 1))
        start_values(acc, p, v_tile(smem, u32(n - 1)))
        wait_all(acc, s)
        finish(me, before, acc, m_i, l_i, o, lse, unit_before)

    rings = Arrivals((Q,), 1, CONSUMERS), Arrivals((K,), 1, CONSUMERS), Arrivals((V,), 1, CONSUMERS)
    roles = Roles(
        tile,
        producers=(Producer(lambda smem, me, x: produce(x.maps, smem, x.sizes), 0),),
        consume=lambda smem, me, x: consume(smem, me, x.o, x.lse, x.extras, x.sizes, x.scales),
    )
    return hopper_kernel(
        rings,
        roles,
        maps=3,
        o=array(u32, 5),
        lse=array(f32, 4),
        extras=extras_type(options),
        sizes=named(UnitSizes, i64),
        scales=named(ResidentScales, f32),
    )
