"""dQ and the gradient of a bias that batch elements share, at once, on Hopper, for narrow heads all
of whose keys belong to one block: dQ = dS K, and dbias = dS, summed over the axes that the bias
broadcasts.

A block owns 64 rows of dbias, in registers, and walks over the heads that the bias is shared by.
Each consumer has a part of the keys, in chunks of 64; while dQ of a chunk is made, it has P and dS
of the next one. dQ of the consumers' parts is added in their order, by the first of them. The bias
is read once; each thread keeps what belongs to its scores in shared memory, as float32 in base 2,
-inf beyond the last key. What a backward pass has to know of each row is made here, too, by two
warps beside the one that moves data (`numba_flash.cuda.sm90.resident_bias.load_resident`).
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import Extent, extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.passes.store_dbias import Fragments, build_store
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, named, once, types, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.resident_bias import VECTOR, Room, build_floats, build_resident
from numba_flash.cuda.score.score import LOG2E, Head, Region
from numba_flash.cuda.score.swizzle import NARROW_ROW_BYTES
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import GradientScales, one_type
from numba_flash.cuda.sm90.bias_gradient.dbias_tiles import CHUNK, QUERIES, ROW_BYTES
from numba_flash.cuda.sm90.config import BiasGradientConfig
from numba_flash.cuda.sm90.hopper_kernel import WARPS, Arrivals, Producer, Roles, hopper_kernel
from numba_flash.cuda.sm90.resident_bias.load_resident import (
    Walks,
    build_make_rows,
    build_produce_keys,
)
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.work.walk_dbias import Space, Step, build_begin, build_places

PART_BYTES = 4 * 16 * WARP_GROUP  # of a consumer's dQ: 64 x 32
VECTORS, AWAY = CHUNK // 8, WARP_GROUP * VECTOR  # of the bias of a thread and chunk


@inline
def hides(bias):
    """A score with this bias is hidden, whatever its product is."""
    return bias == f32(-math.inf)


class ResidentWork(NamedTuple):
    """What a consumer works with on all heads: registers, where the rows of its block are, the
    first step, and the kernel's arguments.
    """

    s: Any
    dp: Any
    ds: Any
    acc: Any
    dq_acc: Any
    shift: Any
    delta: Any
    smem: int
    me: int
    row0: int
    step: Step
    space: Space
    given: Any


class ResidentStep(NamedTuple):
    """Its work on a tile: its number among the block's, and whether there is one after it."""

    work: ResidentWork
    n: int
    more: bool


@once
def build_weigh(hidden, raised):
    """``weigh((w, chunk, bias))``: P in the place of S, dS in that of dP, added to dbias, of a
    chunk, whose bias is there. Scores may be `hidden` by it, whatever they are. P is `raised`.
    """
    HIDDEN, NEG_INF, SCORES, BYTES = hidden, -math.inf, CHUNK // 2, AWAY
    LOWERED = 2.0**-raised

    @inline
    def weigh_vector(n, t):
        w, chunk, at = t
        bias = ptx.load_shared_four(u32(at + u32(n * BYTES)))
        for r in range(2):
            for c in range(2):
                e = 4 * n + 2 * r + c
                # (2) P = exp(S - lse)
                score = w.s[e] * w.given.scales.scale_log2 + bias[2 * r + c] - w.shift[r]
                if HIDDEN:
                    score = f32(NEG_INF) if bias[2 * r + c] == f32(NEG_INF) else score
                # (5) dbias = dbias + dS, where dS = P * (dP - delta)
                w.dp[e] = (w.dp[e] * f32(LOWERED) - w.delta[r]) * ptx.ex2(score)
                w.acc[chunk * SCORES + e] += w.dp[e]

    return ptx.repeated(VECTORS, weigh_vector)


@once
def build_go(dtype, head_dim, head_dim_v, tile, bias_of, walks, hidden):
    """``go(work)``: the whole walk of a consumer."""
    SMEM, CHUNKS, CONSUMERS = tile.layout(), tile.chunks, tile.consumers
    Q, KV, DQ, NOTES = map(one_type, (SMEM.q, SMEM.kv, SMEM.dq, SMEM.rows))
    DO, V, MINE, PART = SMEM.do, SMEM.v, tile.keys * NARROW_ROW_BYTES, CHUNK * NARROW_ROW_BYTES
    SCORES, OUTPUTS, NONE, ONE = CHUNK // 2, head_dim // 2, 0, 1
    BFLOAT16, ZERO, FOURS = dtype == "bfloat16", u32(0), head_dim // 8
    DQ_BYTES, DQ_AWAY, NOTE_BYTES = PART_BYTES, WARP_GROUP * VECTOR, ROW_BYTES
    start_s, start_dq = wgmma.build_narrow_gradients(CHUNK, head_dim, BFLOAT16)
    start_dp, _ = wgmma.build_narrow_gradients(CHUNK, head_dim_v, BFLOAT16)
    pack, _ = fragment.build_pack(SCORES // 2, BFLOAT16)
    zero, _ = softmax.build_zero(OUTPUTS)
    put_row = store.build_put_row(head_dim, False, BFLOAT16)
    weigh = build_weigh(hidden, softmax.raised_backward(BFLOAT16))
    _, place_of, proceed = walks

    @inline
    def keys_of(x, n, chunk):
        """Address of a chunk of a consumer's keys."""
        return u32(pipeline.tile(x.smem, KV, n) + u32(x.me * MINE) + u32(chunk * PART))

    @inline
    def start(x, n, chunk):
        """(1) S = Q K^T, (4) dP = dO V^T of a chunk of the n-th tile."""
        queries, keys = pipeline.tile(x.smem, Q, n), keys_of(x, n, chunk)
        start_s(x.s, wgmma.descriptor(queries, ZERO), wgmma.descriptor(keys, ZERO))
        do, values = u32(queries + u32(DO)), u32(keys + u32(V))
        start_dp(x.dp, wgmma.descriptor(do, ZERO), wgmma.descriptor(values, ZERO))

    @inline
    def start_first(x, n):
        pipeline.wait_ready(x.smem, Q, n)
        pipeline.wait_ready(x.smem, KV, n)
        start(x, n, i32(0))

    @inline
    def parts(x):
        """Where this thread's parts of dQ are."""
        return u32(x.smem + u32(DQ.tiles) + u32(cuda.threadIdx.x % WARP_GROUP * VECTOR))

    @inline
    def put_part(x, n):
        pipeline.wait_free(x.smem, DQ, n)
        at, dq = u32(parts(x) + u32((x.me - 1) * DQ_BYTES)), x.dq_acc
        for j in range(FOURS):
            four = dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]
            ptx.store_shared_vector(u32(at + u32(j * DQ_AWAY)), four)
        pipeline.commit(x.smem, DQ, n)

    @inline
    def add_parts(x, n):
        """Of the other consumers' keys, in their order."""
        pipeline.wait_ready(x.smem, DQ, n)
        at, dq = parts(x), x.dq_acc
        for other in range(CONSUMERS - 1):
            for j in range(FOURS):
                part = ptx.load_shared_four(u32(at + u32(other * DQ_BYTES + j * DQ_AWAY)))
                for e in range(4):
                    dq[4 * j + e] += part[e]
        pipeline.release(x.smem, DQ, n)

    @inline
    def hand_over(x, n, at):
        """(7) dQ of the n-th tile, a head's."""
        if x.me > 0:
            put_part(x, n)
        else:
            add_parts(x, n)
            factor = cuda.local.array(2, f32)
            for r in range(2):
                factor[r] = x.given.scales.scale
            for r in range(2):
                i = i32(x.row0 + wgmma.first_row() + 8 * r)
                if i < x.space.queries:
                    dq_row = x.given.dq[index(at.b0), index(at.b1), index(at.head), index(i)]
                    put_row(ptx.global_address(dq_row), x.dq_acc, factor, r)

    @inline
    def note_rows(x, n):
        """The lse and delta of this thread's rows."""
        pipeline.wait_ready(x.smem, NOTES, n)
        at = u32(pipeline.tile(x.smem, NOTES, n) + u32(wgmma.first_row() * NOTE_BYTES))
        for r in range(2):
            known = ptx.load_shared_pair(u32(at + u32(8 * r * NOTE_BYTES)))
            x.shift[r], x.delta[r] = known
        pipeline.release(x.smem, NOTES, n)

    @inline
    def step(chunk, t):
        w = t.work
        weigh((w, chunk, bias_of(w.smem, w.me, chunk)))
        ptx.wgmma_wait(w.dq_acc, w.dq_acc, NONE, OUTPUTS, NONE)
        pack(w.ds, w.dp)
        if chunk < CHUNKS - 1:
            start(w, t.n, i32(chunk + 1))
        elif t.more:
            start_first(w, u32(t.n + u32(1)))
        # (7) dQ = dQ + dS K
        start_dq(w.dq_acc, w.ds, wgmma.descriptor(keys_of(w, t.n, chunk), ZERO))
        ptx.wgmma_wait(w.s, w.dp, ONE, SCORES, SCORES)

    all_steps = ptx.repeated(CHUNKS, step)

    @inline
    def go(x):
        t, n = x.step, u32(0)
        start_first(x, n)
        ptx.wgmma_wait(x.s, x.dp, NONE, SCORES, SCORES)
        while t.number < x.space.stop:
            at = place_of(t.walk, x.space, x.given.extras).at
            t = proceed(t, x.space, x.given.extras)
            note_rows(x, n)
            zero(x.dq_acc)
            all_steps(ResidentStep(x, n, t.number < x.space.stop))
            ptx.wgmma_wait(x.dq_acc, x.dq_acc, NONE, OUTPUTS, NONE)
            pipeline.release_group(x.smem, KV, n)
            pipeline.release_group(x.smem, Q, n)
            hand_over(x, n, at)
            n = u32(n + u32(1))

    return go


def build(config: BiasGradientConfig):
    """Kernel of (maps, dq, lse, dlse, rows, out, extras, extent, scales) with its signature and
    compile options.

    maps : tensor maps of do, q, k, v and o as (b0, b1, heads, n, head_dim), boxes of one narrow
        panel.
    dq : (b0, b1, heads, nq, head_dim) as words of two elements.
    lse, dlse : (b0, b1, heads, nq); dlse is not read unless ``config.dlse``.
    rows : (b0, b1, heads, row blocks * 64, 2), as `load_kept.build_make_rows` writes them.
    out : (shares, b0, b1, heads, nq, nk) of dtype ``config.out``, with sizes 1 where it is summed;
        the last two axes are not.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    out_dtype, wide, summed = config.out, config.wide, config.summed
    vectors, options, tile = config.vectors, config.options, config.tile
    SMEM, CONSUMERS, KEYS, BLOCK_N = tile.layout(), tile.consumers, tile.keys, tile.block_n
    Q, KV, DQ, NOTES = map(one_type, (SMEM.q, SMEM.kv, SMEM.dq, SMEM.rows))
    SCORES, ALL_SCORES, OUTPUTS = CHUNK // 2, tile.chunks * CHUNK // 2, head_dim // 2
    PAIRS, OTHERS, ROW_THREADS = CHUNK // 4, (CONSUMERS - 1) * WARP_GROUP, QUERIES
    ROW_WARPS = ROW_THREADS // pipeline.WARP
    begin = build_begin(summed, QUERIES, BLOCK_N)
    place_of, _, proceed = build_places(options, False, summed, QUERIES, BLOCK_N)
    walks = Walks(begin, place_of, proceed)
    produce = build_produce_keys(tile, walks)
    make_rows = build_make_rows(dtype, config.dlse, tile, walks)
    runs, meet_any = fragment.runs_of_columns(CHUNK), pipeline.any_of_warp_group
    room = Room(SMEM.resident, tile.chunks, VECTORS, 0, CHUNK, WARP_GROUP, meet_any)
    put_floats, _ = build_floats(options, LOG2E, hides)
    fill, bias_of = build_resident(options, vectors, runs, room, put_floats)
    of_go = dtype, head_dim, head_dim_v, tile, bias_of, walks
    go, go_where_some_are_hidden = (build_go(*of_go, hidden) for hidden in (False, True))
    zero, _ = softmax.build_zero(ALL_SCORES)

    @inline
    def meet():
        pipeline.meet_consumers(CONSUMERS)

    fragments = Fragments(runs, tile.chunks, CHUNK, 4, 1, 16, 2, 4, False, meet)
    put_dbias = build_store(out_dtype, wide, False, summed, fragments)

    def consume(smem, me, given):
        """Equations (1) to (7) of 64 rows of each head, and a consumer's keys."""
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S, then of P, of a chunk
        dp = cuda.local.array(SCORES, f32)  # of dP, then of dS
        ds = cuda.local.array(PAIRS, u32)  # of dS, two elements of 16 bits each
        acc = cuda.local.array(ALL_SCORES, f32)  # of dbias
        dq_acc = cuda.local.array(OUTPUTS, f32)  # of dQ, of the consumer's keys
        shift = cuda.local.array(2, f32)  # the lse of this thread's rows
        delta = cuda.local.array(2, f32)
        out = given.out
        space, share, t = begin(i32(cuda.blockIdx.x), given.extent, i32(out.shape[0]))
        row0 = i32(space.own.i * QUERIES)
        own = space.own
        at = Head(own.b0, own.b1, i32(0), own.head, i32(0))
        region = Region(row0, i32(0), space.queries, space.keys, i32(0), i32(0))
        query, key = i32(row0 + wgmma.first_row()), i32(me * KEYS + fragment.first_column())
        some_hidden = fill(smem, me, query, key, region, at, given.extras)
        zero(acc)
        work = ResidentWork(s, dp, ds, acc, dq_acc, shift, delta, smem, me, row0, t, space, given)
        if some_hidden:
            go_where_some_are_hidden(work)
        else:
            go(work)
        of_head = out[index(share), index(own.b0), index(own.b1), index(own.head)]
        put_dbias(of_head, acc, smem, i32(row0 - me * QUERIES), i32(me * KEYS))

    rings = (
        Arrivals((Q,), 1, CONSUMERS + ROW_THREADS),
        Arrivals((KV,), 1, CONSUMERS),
        Arrivals((NOTES,), ROW_THREADS, CONSUMERS * WARP_GROUP),
        Arrivals((DQ,), OTHERS, WARP_GROUP),
    )

    roles = Roles(
        tile,
        producers=(
            Producer(produce, 0),
            Producer(make_rows, WARPS - ROW_WARPS, ROW_WARPS, whole=True),
        ),
        consume=consume,
    )
    return hopper_kernel(
        rings,
        roles,
        maps=5,
        dq=array(u32, 5),
        lse=array(f32, 4),
        dlse=array(f32, 4),
        rows=array(f32, 5),
        out=array(f32 if out_dtype == "float32" else types.uint16, 6),
        extras=extras_type(options),
        extent=named(Extent, i64),
        scales=named(GradientScales, f32),
    )
