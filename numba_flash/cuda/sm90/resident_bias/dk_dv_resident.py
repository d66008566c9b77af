"""dK and dV on Hopper with a bias that all batch elements share, and narrow heads: persistent
blocks keep the bias of their keys in shared memory, and go through the batch elements
(FlashAttention-2, Algorithm 2, but for dQ, which
`numba_flash.cuda.sm90.resident_bias.dq_dbias_resident` makes).

A consumer owns 64 keys, and walks over tiles of queries. S^T and dP^T have keys along their
rows, so that P^T and dS^T can be operands of dV and dK as they are. While those of a tile are made,
the consumer has P and dS of the next one. Nothing in it knows of ends: what lies beyond the last
query has an lse of +inf, what lies beyond the last key is rows of dK and dV that nobody stores.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import UnitSizes, extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, named, once, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.resident_bias import VECTOR, Room, build_resident
from numba_flash.cuda.score.score import LOG2E, Head, Region
from numba_flash.cuda.score.swizzle import NARROW_ROW_BYTES
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import GradientScales, one_type
from numba_flash.cuda.sm90.bias_gradient.dbias_tiles import ROW_BYTES
from numba_flash.cuda.sm90.config import BackwardConfig
from numba_flash.cuda.sm90.hopper_kernel import Arrivals, Producer, Roles, hopper_kernel
from numba_flash.cuda.sm90.resident_bias.load_resident import build_produce_queries
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.work.units import build_units

ROWS, WARPS = 64, 4  # keys of a consumer, and its warps
AWAY = WARP_GROUP * VECTOR  # bytes from a thread's vector of the bias to its next


class Weighed(NamedTuple):
    """Registers of S^T and dP^T, where this thread's bias of the tile is, and what is known of its
    queries.
    """

    s: Any
    dp: Any
    bias: int
    rows: int
    scale_log2: float


@once
def build_halves(bfloat16):
    """``put_halves(filled, n, to)``: keep four words of two queries in 16 bits."""
    HIDDEN = 0xFF80 if bfloat16 else 0xFC00  # -inf in 16 bits

    @inline
    def word(n, f):
        """Of two queries."""
        one, other = f.words[2 * n], f.words[2 * n + 1]
        if one == u32(HIDDEN) or other == u32(HIDDEN):
            f.special[0] = u32(1)
        return u32(one | other << u32(16))

    @inline
    def put_halves(f, n, to):
        four = word(4 * n, f), word(4 * n + 1, f), word(4 * n + 2, f), word(4 * n + 3, f)
        ptx.store_shared_vector(to, four)

    return put_halves


@once
def build_weigh(queries, bfloat16, raised, hidden):
    """``weigh(weighed)``: P^T, `raised`, in the place of S^T, dS^T in that of dP^T. Scores may be
    `hidden` by the bias, whatever they are.
    """
    HIDDEN, NEG_INF, LOWERED = hidden, -math.inf, 2.0**-raised
    element = fragment.build_unpack(bfloat16)

    @inline
    def weigh_vector(n, t):
        """Of two groups of 8 queries: two of this thread in each, for two keys."""
        words = ptx.load_shared_words(u32(t.bias + u32(n * AWAY)))
        for half in range(2):
            at = u32(t.rows + u32((16 * n + 8 * half) * ROW_BYTES))
            lse_0, delta_0, lse_1, delta_1 = ptx.load_shared_four(at)
            for r in range(2):
                for c in range(2):
                    e = 8 * n + 4 * half + 2 * r + c
                    lse, delta = (lse_1, delta_1) if c else (lse_0, delta_0)
                    bias = element(words[2 * half + r], c)
                    # (2) P^T = exp(S^T - lse)
                    score = t.s[e] * t.scale_log2 + (bias * f32(LOG2E) - lse)
                    if HIDDEN:
                        score = f32(NEG_INF) if bias == f32(NEG_INF) else score
                    t.s[e] = ptx.ex2(score)
                    # (5) dS^T = P^T * (dP^T - delta)
                    t.dp[e] = (t.dp[e] * f32(LOWERED) - delta) * t.s[e]

    return ptx.repeated(queries // 16, weigh_vector)


def build(config: BackwardConfig):
    """Kernel of (maps, dk, dv, rows, extras, sizes, scales) with its signature and compile options.

    maps : tensor maps of do, q, k and v as (b0, b1, heads, n, head_dim), boxes of one narrow panel.
    dk, dv : (b0, b1, heads, nk, head_dim) as words of two elements.
    rows : (b0, b1, heads, row blocks * 64, 2), as `load_kept.build_make_rows` writes them.
    sizes : `UnitSizes`, of blocks of keys: these are its "queries", and queries its "keys".
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    vectors, options, tile = config.vectors, config.options, config.tile
    SMEM, TILES, CONSUMERS = tile.layout(), tile.tiles, tile.consumers
    Q, KV = one_type(SMEM.q), one_type(SMEM.kv)
    DO, ROWS_AT, V, MINE = SMEM.do, SMEM.rows, SMEM.v, ROWS * NARROW_ROW_BYTES
    SCORES, PAIRS, OUTPUTS_K, OUTPUTS_V = (
        tile.queries // 2,
        tile.queries // 4,
        head_dim // 2,
        head_dim_v // 2,
    )
    BFLOAT16, NONE, TWO, ZERO = dtype == "bfloat16", 0, 2, u32(0)
    produce = build_produce_queries(tile)
    first_of, unit_of, after = build_units(tile.block_m)
    runs, meet_any = fragment.runs_of_rows(tile.queries), pipeline.any_of_warp_group
    room = Room(SMEM.resident, TILES, tile.queries // 16, tile.queries, 0, WARP_GROUP, meet_any)
    put_halves = build_halves(options.bias == "bfloat16")
    fill, bias_of = build_resident(options, vectors, runs, room, put_halves)
    raised = softmax.raised_backward(BFLOAT16)
    of_bias, LOWERED = (tile.queries, options.bias == "bfloat16", raised), 2.0**-raised
    weigh, weigh_some = (build_weigh(*of_bias, hidden) for hidden in (False, True))
    start_scores, start_dk = wgmma.build_narrow_gradients(tile.queries, head_dim, BFLOAT16)
    start_dp, start_dv = wgmma.build_narrow_gradients(tile.queries, head_dim_v, BFLOAT16)
    pack, _ = fragment.build_pack(PAIRS, BFLOAT16)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    put_dk = store.build_put_row(head_dim, False, BFLOAT16)
    put_dv = store.build_put_row(head_dim_v, False, BFLOAT16)

    @inline
    def keep(smem, me, x, extras, sizes):
        """The bias of a consumer's keys of a unit; whether some of it is -inf."""
        at = Head(x.b0, x.b1, i32(0), x.head, i32(0))
        region = Region(i32(0), x.row0, i32(sizes.keys), x.rows, i32(0), i32(0))
        key = i32(x.row0 + me * ROWS + wgmma.first_row())
        return fill(smem, me, fragment.first_column(), key, region, at, extras)

    @inline
    def finish(me, x, dk_acc, dv_acc, dk, dv, scale):
        """Store dK and dV of a unit."""
        one = cuda.local.array(2, f32)  # registers: what dV and dK are multiplied by
        scaled = cuda.local.array(2, f32)
        for r in range(2):
            one[r], scaled[r] = f32(LOWERED), scale
        row = i32(x.row0 + me * ROWS + wgmma.first_row())
        for r in range(2):
            j = i32(row + 8 * r)
            if j < x.rows:
                dk_row = dk[index(x.b0), index(x.b1), index(x.head), index(j)]
                dv_row = dv[index(x.b0), index(x.b1), index(x.head), index(j)]
                put_dk(ptx.global_address(dk_row), dk_acc, scaled, r)
                put_dv(ptx.global_address(dv_row), dv_acc, one, r)

    @inline
    def start(smem, me, item_n, n, s, dp):
        """(1) S^T = K Q^T, (4) dP^T = V dO^T of the n-th tile."""
        keys = u32(pipeline.tile(smem, KV, item_n) + u32(me * MINE))
        queries = pipeline.tile(smem, Q, n)
        start_scores(s, wgmma.descriptor(keys, ZERO), wgmma.descriptor(queries, ZERO))
        values, do = u32(keys + u32(V)), u32(queries + u32(DO))
        start_dp(dp, wgmma.descriptor(values, ZERO), wgmma.descriptor(do, ZERO))

    @inline
    def add(smem, n, dk_acc, dv_acc, ds, p):
        """(3) dV = dV + P^T dO, (6) dK = dK + dS^T Q of the n-th tile."""
        queries = pipeline.tile(smem, Q, n)
        start_dv(dv_acc, p, wgmma.descriptor(u32(queries + u32(DO)), ZERO))
        start_dk(dk_acc, ds, wgmma.descriptor(queries, ZERO))

    @inline
    def consume(smem, me, dk, dv, extras, sizes, scales):
        """Equations (1) to (6) for 64 keys of each unit and all its tiles of queries."""
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S^T, then of P^T
        dp = cuda.local.array(SCORES, f32)  # of dP^T, then of dS^T
        p = cuda.local.array(PAIRS, u32)  # of P^T, two elements of 16 bits each
        ds = cuda.local.array(PAIRS, u32)  # of dS^T, likewise
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        number = first_of(cuda.blockIdx.x, sizes)
        stop = first_of(cuda.blockIdx.x + 1, sizes)
        x, n, item_n = unit_of(number, sizes), u32(0), u32(0)
        some_hidden, more = keep(smem, me, x, extras, sizes), True
        zero_k(dk_acc)
        zero_v(dv_acc)
        pipeline.wait_ready(smem, KV, item_n)
        pipeline.wait_ready(smem, Q, n)
        start(smem, me, item_n, n, s, dp)
        ptx.wgmma_wait(s, dp, NONE, SCORES, SCORES)
        while more:
            before, t = x, i32(0)
            while t < TILES:
                if t == TILES - 1:
                    pipeline.release_group(smem, KV, item_n)
                rows = u32(pipeline.tile(smem, Q, n) + u32(ROWS_AT))
                rows = u32(rows + u32(fragment.first_column() * ROW_BYTES))
                weighed = Weighed(s, dp, bias_of(smem, me, t), rows, scales.scale_log2)
                if some_hidden:
                    weigh_some(weighed)
                else:
                    weigh(weighed)
                ptx.wgmma_wait(dk_acc, dv_acc, NONE, OUTPUTS_K, OUTPUTS_V)
                pack(p, s)
                pack(ds, dp)
                n, t = u32(n + 1), i32(t + 1)
                if t == TILES:
                    number, item_n = i32(number + 1), u32(item_n + 1)
                    x, more = after(x, number, sizes), number < stop
                    if more and x.b1 == 0:
                        some_hidden = keep(smem, me, x, extras, sizes)
                    if more:
                        pipeline.wait_ready(smem, KV, item_n)
                if more:
                    pipeline.wait_ready(smem, Q, n)
                    start(smem, me, item_n, n, s, dp)
                add(smem, u32(n - 1), dk_acc, dv_acc, ds, p)
                if t > 1:
                    pipeline.release_warps(smem, Q, u32(n - 2))
                ptx.wgmma_wait(s, dp, TWO, SCORES, SCORES)
            ptx.wgmma_wait(dk_acc, dv_acc, NONE, OUTPUTS_K, OUTPUTS_V)
            pipeline.release_warps(smem, Q, u32(n - 1))
            finish(me, before, dk_acc, dv_acc, dk, dv, scales.scale)
            zero_k(dk_acc)
            zero_v(dv_acc)

    rings = Arrivals((Q,), 1, CONSUMERS * WARPS), Arrivals((KV,), 1, CONSUMERS)
    roles = Roles(
        tile,
        producers=(Producer(lambda smem, me, x: produce(x.maps, smem, x.rows, x.sizes), 0),),
        consume=lambda smem, me, x: consume(smem, me, x.dk, x.dv, x.extras, x.sizes, x.scales),
    )
    return hopper_kernel(
        rings,
        roles,
        maps=4,
        dk=array(u32, 5),
        dv=array(u32, 5),
        rows=array(f32, 5),
        extras=extras_type(options),
        sizes=named(UnitSizes, i64),
        scales=named(GradientScales, f32),
    )
