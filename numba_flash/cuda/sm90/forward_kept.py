"""Forward pass on Hopper with a bias that all batch elements share, and narrow heads: persistent
blocks keep the bias of their queries in shared memory, and go through the batch elements.

Of so few columns, products take less time than exponentials, and what is read for a score more than
either. Here nothing is read for one but its bias, from shared memory, four at a time, into the
registers that the product is added to (`numba_flash.cuda.kept_bias`). A consumer brings the next
tile's bias and starts its Q K^T before it has the softmax of this one, and O += P V of this one is
added up while it brings that of another.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.arguments import KeptScales, UnitSizes, extras_type
from numba_flash.cuda.kept_bias import build_keep
from numba_flash.cuda.lang import cuda, f32, i32, i64, inline, named, types, u32, u64
from numba_flash.cuda.number import array, index
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import LOG2E, one_type
from numba_flash.cuda.sm90.load_kept import build_produce
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.swizzle import NARROW_ROW_BYTES
from numba_flash.cuda.units import Unit, build_units

NEG_INF, LN2 = -math.inf, math.log(2.0)
ROWS = 64  # of a consumer


class At(NamedTuple):
    """A tile of scores: its unit, the number of that among all and among the block's, its own among
    the block's and among the unit's; and of its bias, whether products begin with it, and what
    leads from scores to base e.
    """

    x: Unit
    number: int
    turn: int
    n: int
    t: int
    begins: int
    unit: float


class Rows(NamedTuple):
    """Registers of a consumer, and what it reads and writes."""

    q: Any
    p: Any
    acc: Any
    m_i: Any
    l_i: Any
    best: Any
    alpha: Any
    smem: int
    me: int
    stop: int
    o: Any
    lse: Any
    extras: Any
    sizes: Any
    scales: Any


def build(dtype, head_dim, head_dim_v, write_lse, vectors, options, tile):
    """Kernel ``forward_kept_sm90(maps, o, lse, extras, sizes, scales)`` with its signature and
    compile options.

    maps : tensor maps of q, k and v as (b0, b1, heads, n, head_dim), boxes of one narrow panel.
    o : (b0, b1, heads, n, head_dim_v) as words of two elements.
    lse : (b0, b1, heads, n), natural logarithm.
    vectors : whether the bias is read by two keys at a time, `numba_flash.cuda.arguments.Vectors`.
    sizes, scales : `UnitSizes` and `KeptScales` of `numba_flash.cuda.arguments`.
    """
    BLOCK_N, TILES, CONSUMERS, SMEM = tile.block_n, tile.tiles, tile.consumers, tile.layout()
    Q, K, V, (FEWEST, REGISTERS) = *map(one_type, (SMEM.q, SMEM.k, SMEM.v)), tile.registers
    ALIGNMENT, Q_ROWS, ON, OFF, NONE = SMEM.ALIGNMENT, ROWS * NARROW_ROW_BYTES, 1, 0, 0
    SCORES, PAIRS, OUTPUTS = BLOCK_N // 2, BLOCK_N // 4, head_dim_v // 2
    Q_WORDS, WARPS = 4 * -(-head_dim // 16), 4 * tile.consumers
    WRITE_LSE, BFLOAT16, MOST = write_lse, dtype == "bfloat16", softmax.LAZIER
    produce = build_produce(tile)
    kept_by = tile, SMEM.kept, WARP_GROUP, pipeline.any_of_warp_group
    first_of, unit_of, after = build_units(tile.block_m)
    fill, begin, add = build_keep(options, vectors, *kept_by)
    hold_q, start_scores = wgmma.build_held(BLOCK_N, head_dim, BFLOAT16)
    _, start_values = wgmma.build_narrow(BLOCK_N, head_dim_v, BFLOAT16)
    find = softmax.build_raise(SCORES, OUTPUTS, 1, MOST).find
    exponentials = softmax.build_exponentials(SCORES, 1, far=True)
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
                value = m_i[r] * unit + ptx.lg2(l) * f32(LN2) if l != f32(0) else f32(NEG_INF)
                lse[index(x.b0), index(x.b1), index(x.head), index(i)] = value
        if inverse[0] == f32(0) or inverse[1] == f32(0):
            zero_rows(acc, inverse)  # 0 * NaN is not 0
        for r in range(2):
            i = i32(row + 8 * r)
            if i < x.rows:
                o_row = o[index(x.b0), index(x.b1), index(x.head), index(i)]
                put_row(ptx.global_address(o_row), acc, inverse, r)

    @inline
    def raise_shifts(r, scale_log2):
        """(2) m_i, and what l_i and O have to be multiplied by, where scores have outgrown their
        shift; whether some of the warp's have.
        """
        outgrown = False
        for i in range(2):
            outgrown = outgrown or (r.best[i] - r.m_i[i]) * scale_log2 > f32(MOST)
        outgrown = cuda.any_sync(fragment.ALL_LANES, outgrown)
        if outgrown:
            for i in range(2):
                best, r.alpha[i] = fragment.row_maximum(r.best[i]), f32(1)
                if (best - r.m_i[i]) * scale_log2 > f32(MOST):
                    r.alpha[i] = ptx.ex2((r.m_i[i] - best) * scale_log2)
                    r.m_i[i] = best
                r.l_i[i] *= r.alpha[i]
        return outgrown

    @inline
    def bring(r, s, y):
        """What the scores of a tile begin with."""
        begins, unit = y.begins, y.unit
        if y.t == 0:
            if y.x.b1 == 0 or y.n == u32(0):
                keys, inverse = i32(r.sizes.keys), r.scales.inverse
                row = row_of(y.x, r.me)
                begins = fill(r.smem, r.me, row, y.x, r.extras, keys, inverse)
                unit = r.scales.scale if begins != u32(0) else f32(1)
            pipeline.wait_ready(r.smem, Q, y.turn)
            hold_q(r.q, u32(pipeline.tile(r.smem, Q, y.turn) + u32(r.me * Q_ROWS)))
            cuda.syncwarp()
            pipeline.release_warp(r.smem, Q, y.turn)
        begin(s, r.smem, r.me, y.t, r.scales.inverse)
        pipeline.wait_ready(r.smem, K, y.n)
        return At(y.x, y.number, y.turn, y.n, y.t, begins, unit)

    @inline
    def start(r, s, y):
        """(1) S = bias / scale + Q K^T of a tile."""
        keys = pipeline.tile(r.smem, K, y.n)
        start_scores(s, r.q, wgmma.descriptor(keys, u32(0)), y.begins)

    @inline
    def following(y, sizes):
        """The tile after one."""
        n, t = u32(y.n + u32(1)), i32(y.t + 1)
        if t < TILES:
            return At(y.x, y.number, y.turn, n, t, y.begins, y.unit)
        number, turn = i32(y.number + 1), u32(y.turn + u32(1))
        return At(after(y.x, number, sizes), number, turn, n, i32(0), y.begins, y.unit)

    @inline
    def step(r, s, s_next, y):
        """(2) to (5) of a tile; returns the next one, whose scores are there; after the last of
        all, they are of nothing.
        """
        if y.begins == u32(0):
            add(s, r.smem, r.me, y.t, r.scales.scale)
        z = following(y, r.sizes)
        more = z.number < r.stop
        if more:
            z = bring(r, s_next, z)
        start(r, s_next, z if more else y)
        # (2) m_i, (3) P, (4) l_i, while O += P V of the last tile and S of the next one are made
        scale_log2 = r.scales.scale_log2 if y.begins != u32(0) else f32(LOG2E)
        find(r.best, s, r.m_i, scale_log2)
        outgrown = raise_shifts(r, scale_log2)
        exponentials(s, r.m_i, r.l_i, scale_log2)
        ptx.wgmma_wait(r.acc, s_next, NONE, OUTPUTS, SCORES)
        if more:
            pipeline.release_group(r.smem, K, z.n)
        if y.t > 0:
            pipeline.release_group(r.smem, V, u32(y.n - u32(1)))
        if outgrown:  # O = alpha O
            for j in range(OUTPUTS // 4):
                for i in range(2):
                    r.acc[4 * j + 2 * i] *= r.alpha[i]
                    r.acc[4 * j + 2 * i + 1] *= r.alpha[i]
        pack(r.p, s)
        # (5) O += P V
        pipeline.wait_ready(r.smem, V, y.n)
        start_values(r.acc, r.p, wgmma.descriptor(pipeline.tile(r.smem, V, y.n), u32(0)))
        return z

    @inline
    def consume(smem, me, o, lse, extras, sizes, scales):
        """Equations (1) to (6) for 64 rows of each unit and all its tiles of keys."""
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S, then of P, of every other tile
        s_next = cuda.local.array(SCORES, f32)  # of the others
        q = cuda.local.array(Q_WORDS, u32)  # of Q, two elements of 16 bits each
        p = cuda.local.array(PAIRS, u32)  # of P, two elements of 16 bits each
        acc = cuda.local.array(OUTPUTS, f32)  # of O
        m_i = cuda.local.array(2, f32)  # shifts of the thread's two rows
        l_i = cuda.local.array(2, f32)  # its part of their sums
        best = cuda.local.array(2, f32)  # its largest scores of the tile
        alpha = cuda.local.array(2, f32)  # what O has to be multiplied by
        number = first_of(cuda.blockIdx.x, sizes)
        stop = first_of(cuda.blockIdx.x + 1, sizes)
        r = Rows(q, p, acc, m_i, l_i, best, alpha, smem, me, stop, o, lse, extras, sizes, scales)
        y = At(unit_of(number, sizes), number, u32(0), u32(0), i32(0), u32(0), f32(1))
        y = bring(r, s, y)
        start(r, s, y)
        ptx.wgmma_wait(s, s, NONE, SCORES, NONE)
        pipeline.release_group(smem, K, y.n)
        while y.number < stop:
            x, number, unit = y.x, y.number, y.unit
            zero(acc)
            softmax.reset(m_i, l_i)
            while y.number == number:
                y = step(r, s_next, s, step(r, s, s_next, y))
            ptx.wgmma_wait(acc, acc, NONE, OUTPUTS, NONE)
            pipeline.release_group(smem, V, u32(y.n - u32(1)))
            finish(me, x, acc, m_i, l_i, o, lse, unit)

    def forward_kept_sm90(maps, o, lse, extras, sizes, scales):
        smem = pipeline.shared_base(ALIGNMENT)
        group = pipeline.uniform(i32(cuda.threadIdx.x) // WARP_GROUP)
        if cuda.threadIdx.x == 0:
            pipeline.initialise(smem, Q, 1, WARPS)
            pipeline.initialise(smem, K, 1, CONSUMERS)
            pipeline.initialise(smem, V, 1, CONSUMERS)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()  # everyone sees the barriers initialised

        if group == 0:
            ptx.setmaxnreg(FEWEST, OFF)
            if cuda.threadIdx.x == 0:
                produce(maps, smem, sizes)
        else:
            ptx.setmaxnreg(REGISTERS, ON)
            consume(smem, group - 1, o, lse, extras, sizes, scales)

    maps = [f"maps.{i}" for i in range(3)]
    signature = types.void(
        types.UniTuple(u64, 3),
        array(u32, 5),
        array(f32, 4),
        extras_type(options),
        named(UnitSizes, i64),
        named(KeptScales, f32),
    )
    more = {"launch_bounds": (tile.threads, 1), "tensor_maps": tuple(maps)}
    return forward_kept_sm90, signature, more
