"""Gradient of an additive bias on Hopper where nothing else acts on scores, and the queries of all
batch elements that are summed fit into shared memory: dbias = dS, summed over these.

A block keeps Q and dO of 128 queries, of all these batch elements, and goes through tiles of the
gradient that have the same queries: so half as much is read for a score as by
`numba_flash.cuda.sm90.dbias`. Bias and gradient come and go by the copy engine. A consumer starts S
of the next batch element before it waits for dP of this one, so that tensor cores do not wait.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.arguments import Extent, extras_type
from numba_flash.cuda.lang import cuda, f32, i32, i64, inline, named, u32
from numba_flash.cuda.number import array
from numba_flash.cuda.score import LOG2E
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.config import BiasGradientConfig
from numba_flash.cuda.sm90.hopper_kernel import Arrivals, Producer, Roles, hopper_kernel
from numba_flash.cuda.sm90.load_dbias_rows import build_loads, build_runs
from numba_flash.cuda.sm90.pair_tiles import RELEASES, WARP, build_take_pairs
from numba_flash.cuda.sm90.pipeline import Place
from numba_flash.cuda.sm90.softmax_dbias import ROWS, build_differentiate
from numba_flash.cuda.sm90.store import build_put_words
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.sm90.wgmma import UNIT
from numba_flash.cuda.swizzle import ROW_BYTES, panel_bytes

NEG_INF = -math.inf
WARP_ROWS = 16


class Step(NamedTuple):
    """A consumer's registers, shared memory, and what leads from products to scores in base 2.

    Attributes
    ----------
    s, p, dp, acc, bias : float32 arrays
        Fragments of S, P, dP and dbias; the bias in base 2.
    lse, delta : float32 arrays
        Of the two queries of this thread.
    q_tiles, k_tiles : uint32
        Descriptors of the first tile of Q or dO, and of that of K or V.
    rows : uint32
        Where the lse or delta lie in shared memory.
    """

    s: Any
    p: Any
    dp: Any
    acc: Any
    bias: Any
    lse: Any
    delta: Any
    smem: int
    q_tiles: int
    k_tiles: int
    rows: int
    scale_log2: float


class Tile(NamedTuple):
    """All steps of a tile of the gradient.

    Attributes
    ----------
    t : Step
        What they have in common.
    first, m, tiles : uint32
        Numbers of the first tile of Q, and of that of keys, and of this one.
    shows, begins, ends, more : bool
        The bias hides nothing; the run begins, or ends; another tile comes after it.
    """

    t: Step
    first: int
    m: int
    tiles: int
    shows: bool
    begins: bool
    ends: bool
    more: bool


def build(config: BiasGradientConfig):
    """Kernel of (maps, rows, extras, extent, across, items, scale_log2) with its signature and
    compile options.

    maps : tensor maps of do, q, k and v as (b0, b1, heads, n, head_dim), boxes of one panel of a
        tile; of the bias as (b0, b1, heads, n, n), without the axes that it is broadcast along,
        boxes of a tile; of its gradient, likewise, boxes of 16 queries.
    rows : (2, b0, b1, heads, at least n): the lse in base 2 and delta of each query, as
        `numba_flash.cuda.preprocess` writes them; a multiple of 64.
    across, items : tiles of a run, and how many runs there are.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    out_dtype, summed, options, tile = config.out, config.summed, config.options, config.tile
    BLOCK_M, BLOCK_N, WALK, CONSUMERS = tile.block_m, tile.block_n, tile.elements, tile.consumers
    SMEM = tile.layout(head_dim, head_dim_v)
    QUERIES, KEYS, PAIRS = map(one_type, (SMEM.rows, SMEM.keys, SMEM.pairs))
    VALUES, VALUES_BYTES = SMEM.values, 4 * BLOCK_M
    SCORES, WORDS, MINE = BLOCK_N // 2, BLOCK_N // 4, ROWS * ROW_BYTES
    BFLOAT16, V_BEHIND_K = dtype == "bfloat16", panel_bytes(BLOCK_N) // UNIT
    NONE, ONE = 0, 1
    load_keys, load_rows = build_loads(head_dim, head_dim_v, summed, options, tile)
    run_of, _ = build_runs(summed, tile)
    start_scores = wgmma.build_scores(BLOCK_N, head_dim, BLOCK_M, BFLOAT16)
    start_dp = wgmma.build_scores(BLOCK_N, head_dim_v, BLOCK_M, BFLOAT16)
    take_pairs = build_take_pairs(options, tile, SMEM.pairs, releases=False)
    put_words = build_put_words(BLOCK_N, ROWS)
    element_of = fragment.build_unpack(options.bias == "bfloat16")
    pack, _ = fragment.build_pack(WORDS, out_dtype == "bfloat16")
    _, differentiate = build_differentiate(options, SCORES, BFLOAT16)
    zero, _ = softmax.build_zero(SCORES)

    @inline
    def rows_of(t, n):
        """Descriptor of a consumer's queries in the n-th tile of Q and dO."""
        return u32(t.q_tiles + n % u32(QUERIES.slots) * u32(QUERIES.slot_bytes // UNIT))

    @inline
    def keys_of(t, m):
        """Descriptor of the m-th tile of K and V."""
        return u32(t.k_tiles + m % u32(KEYS.slots) * u32(KEYS.slot_bytes // UNIT))

    @inline
    def start_next(t, n, m):
        """(1) S = Q K^T of a step, by the numbers of its Q, which is there, and of its keys."""
        pipeline.wait_ready(t.smem, KEYS, m)
        start_scores(t.s, rows_of(t, n), keys_of(t, m))

    @inline
    def read_rows(t, n, values):
        """The lse or delta of this thread's queries."""
        at = u32(t.rows + n % u32(QUERIES.slots) * u32(VALUES_BYTES))
        for r in range(2):
            values[r] = ptx.as_float32(u32(ptx.load_shared(u32(at + u32(32 * r)))))

    @inline
    def take_bias(words, bias, smem, me, number):
        """Bias of a tile, in base 2; True if it hides nothing of this thread."""
        take_pairs(words, smem, me, number)
        least = f32(0)
        for e in range(SCORES):
            value = element_of(words[e // 2], e % 2)
            least = ptx.minimum(least, value)
            bias[e] = value * f32(LOG2E)
        return least != f32(NEG_INF)

    @inline
    def find_exponents(t):
        """S - lse in base 2, in the place of P."""
        for e in range(SCORES):
            t.p[e] = t.s[e] * t.scale_log2 + (t.bias[e] - t.lse[e // 2 % 2])

    @inline
    def recompute_p(t, shows):
        """(2) P = exp(S - lse), 0 where the bias hides it, whatever S is."""
        for e in range(SCORES):
            t.p[e] = ptx.ex2(t.p[e])
        if not shows:
            for e in range(SCORES):
                t.p[e] = t.p[e] if t.bias[e] != f32(NEG_INF) else f32(0)

    @inline
    def release_slot(smem, number):
        """What was stored from a slot of the bias has been read there."""
        if cuda.threadIdx.x % WARP == 0:
            ptx.bulk_wait_read()
            pipeline.release(smem, PAIRS, number)

    @inline
    def add_step(b, x):
        """dbias += dS of the b-th batch element. S of the next step is begun meanwhile; after the
        last of all, of the same again, for nothing.
        """
        t, smem, last = x.t, x.t.smem, b == i32(WALK - 1)
        q_tile, m = u32(x.first + u32(2 * b)), u32(x.m + u32(b))
        do_tile, following, keys = u32(q_tile + u32(1)), u32(q_tile + u32(2)), u32(m + u32(1))
        if last and not x.ends:
            following = x.first
        if last and not x.more:
            following, keys = q_tile, m
        if x.begins:
            pipeline.wait_ready(smem, QUERIES, do_tile)
        read_rows(t, q_tile, t.lse)
        read_rows(t, do_tile, t.delta)
        # (4) dP = dO V^T
        start_dp(t.dp, rows_of(t, do_tile), u32(keys_of(t, m) + u32(V_BEHIND_K)))
        find_exponents(t)
        if x.begins or (last and x.ends):
            pipeline.wait_ready(smem, QUERIES, following)
        start_next(t, following, keys)
        recompute_p(t, x.shows)
        ptx.wgmma_wait(t.dp, t.p, ONE, SCORES, SCORES)
        pipeline.release_group(smem, KEYS, m)
        # (5) dbias = dbias + dS, where dS = P * (dP - delta)
        differentiate(t.acc, t.p, t.dp, t.delta, ())
        ptx.wgmma_wait(t.s, t.acc, NONE, SCORES, SCORES)
        if x.ends:
            pipeline.release(smem, QUERIES, q_tile)
            pipeline.release(smem, QUERIES, do_tile)
        if b == i32(0):
            release_slot(smem, x.tiles)

    @inline
    def store(tensor_map, words, smem, me, acc, number, at):
        """A tile of the gradient, 16 queries of each warp, by way of a slot of the bias."""
        warp = i32(cuda.threadIdx.x % WARP_GROUP // WARP)
        room = u32(pipeline.tile(smem, PAIRS, number) + u32(me * MINE))
        pack(words, acc)
        put_words(room, words, 0)
        ptx.fence_proxy_async()
        cuda.syncwarp()  # all rows are there
        if cuda.threadIdx.x % WARP == 0:
            source = u32(room + u32(warp * (WARP_ROWS * ROW_BYTES)))
            row = i32(at.row + me * ROWS + warp * WARP_ROWS)
            ptx.tensor_store(source, tensor_map, at.column, row, at.head, at.b1, at.b0)
            ptx.bulk_commit()

    @inline
    def consume(maps, smem, me, extent, across, items, scale_log2):
        """All steps of this block, for 64 queries."""
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S
        p = cuda.local.array(SCORES, f32)  # of P
        dp = cuda.local.array(SCORES, f32)  # of dP
        acc = cuda.local.array(SCORES, f32)  # of dbias
        bias = cuda.local.array(SCORES, f32)
        words = cuda.local.array(WORDS, u32)  # of bias or dbias, two elements of 16 bits each
        lse = cuda.local.array(2, f32)
        delta = cuda.local.array(2, f32)
        q_tiles = wgmma.descriptor(u32(smem + u32(QUERIES.tiles) + u32(me * MINE)), u32(0))
        k_tiles = wgmma.descriptor(u32(smem + u32(KEYS.tiles)), u32(0))
        own_rows = u32(smem + u32(VALUES) + u32((me * ROWS + wgmma.first_row()) * 4))
        t = Step(
            s, p, dp, acc, bias, lse, delta, smem, q_tiles, k_tiles, own_rows, scale_log2
        )  # fmt: skip
        number, m, tiles, first = i32(cuda.blockIdx.x), u32(0), u32(0), u32(0)
        x = run_of(number, extent, across)
        at = Place(x.col0, x.row0, x.own.head, x.own.b1, x.own.b0)
        pipeline.wait_ready(smem, QUERIES, first)
        start_next(t, first, m)
        ptx.wgmma_wait(s, s, NONE, SCORES, NONE)
        while True:
            number, tile = i32(number + cuda.gridDim.x), i32(0)
            while tile < x.count:
                shows = take_bias(words, bias, smem, me, tiles)
                if tiles > u32(0):
                    store(maps[5], words, smem, me, acc, tiles, at)
                at = Place(i32(x.col0 + tile * BLOCK_N), x.row0, x.own.head, x.own.b1, x.own.b0)
                zero(acc)
                begins, tile = tile == i32(0), i32(tile + 1)
                ends = tile == x.count
                more = not ends or number < items
                steps = Tile(t, first, m, tiles, shows, begins, ends, more)
                b = i32(0)
                while b < i32(WALK):
                    add_step(b, steps)
                    b = i32(b + 1)
                m = u32(m + u32(WALK))
                tiles = u32(tiles + u32(1))
            if number >= items:
                break
            first = u32(first + u32(2 * WALK))
            x = run_of(number, extent, across)
        store(maps[5], words, smem, me, acc, tiles, at)

    rings = (
        Arrivals((QUERIES,), 1, CONSUMERS * WARP_GROUP),
        Arrivals((KEYS,), 1, CONSUMERS),
        Arrivals((PAIRS,), 1, CONSUMERS * RELEASES),
    )

    def bring_keys(smem, me, x):
        load_keys(x.maps, smem, x.extras, x.extent, i32(x.across), i32(x.items))

    def bring_rows(smem, me, x):
        load_rows(x.maps, smem, x.rows, x.extent, i32(x.across), i32(x.items))

    def compute(smem, me, x):
        consume(x.maps, smem, me, x.extent, i32(x.across), i32(x.items), x.scale_log2)

    roles = Roles(
        tile,
        producers=(Producer(bring_keys, 0), Producer(bring_rows, 1)),
        consume=compute,
        senders=WARP,
    )
    return hopper_kernel(
        rings,
        roles,
        maps=6,
        rows=array(f32, 5),
        extras=extras_type(options),
        extent=named(Extent, i64),
        across=i64,
        items=i64,
        scale_log2=f32,
    )
