"""Gradient of an additive bias on Hopper: dbias = dS, summed over the axes that it is broadcast to.

A block has threads that move data (`load_dbias`), and consumers, each with 64 queries. Blocks are
persistent: each sums one tile of the gradient after the other, in registers, and walks over the
tiles of scores that were made of it, with S and dP once more: every sum has one owner and one
order. The tile of the bias is read once, while the one before it is summed for the last time. A
consumer goes through a tile in parts of its keys, for registers; K and V come in such parts, too,
and each leaves room for the next as soon as its products are complete.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.arguments import Extent, extras_type, parameters_type
from numba_flash.cuda.fetch import build_fetch, held
from numba_flash.cuda.lang import cuda, f32, i32, i64, inline, named, types, u32
from numba_flash.cuda.modify import build_drop, build_modify
from numba_flash.cuda.number import array, index
from numba_flash.cuda.score import Head, Region
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.arguments import END, DbiasKind, one_type
from numba_flash.cuda.sm90.config import BiasGradientConfig
from numba_flash.cuda.sm90.dbias_tiles import LOADERS, WARPS
from numba_flash.cuda.sm90.hopper_kernel import Arrivals, Producer, Roles, hopper_kernel
from numba_flash.cuda.sm90.load_dbias import NOTE, build_loads, build_note
from numba_flash.cuda.sm90.softmax_dbias import (
    ROWS,
    build_differentiate,
    first_column,
    first_row,
    release_keys,
)
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.store_dbias import Fragments, build_store
from numba_flash.cuda.swizzle import ROW_BYTES


class Step(NamedTuple):
    """A step of a consumer: its registers, shared memory, what it works on, as numbers of the note
    and of the tiles, and the kernel's arguments.

    Attributes
    ----------
    s, dp, acc : float32 arrays
        Fragments of S, then of P; of dP; of dbias, of all parts.
    bias_mask : uint32 array
        Of all parts.
    lse, delta : float32 arrays
        Of the two queries of this thread.
    """

    s: Any
    dp: Any
    acc: Any
    bias_mask: Any
    lse: Any
    delta: Any
    smem: int
    me: int
    turn: int
    n: int
    m: int
    kind: int
    extent: Extent
    extras: Any
    parameters: Any


class Bias(NamedTuple):
    """A consumer's part of the bias on its way into registers."""

    bias_mask: Any
    query: int
    key: int
    region: Region
    at: Head
    extras: Any


def rings_of(tile, layout):
    """The rings of a block, and who arrives there."""
    QUERIES, KEYS, NOTES = map(one_type, (layout.rows, layout.keys, layout.notes))
    return (
        Arrivals((NOTES,), 1, tile.consumers * WARP_GROUP + LOADERS),
        Arrivals((QUERIES,), 1, tile.consumers * WARP_GROUP),
        Arrivals((KEYS,), 1, tile.consumers),
    )


def build(config: BiasGradientConfig):
    """Kernel of (maps, rows, out, extras, extent, items, parameters) with its signature and
    compile options.

    maps : tensor maps of do, q, k and v as (b0, b1, heads, n, head_dim), boxes of one panel of a
        tile of queries, or of a part of the keys.
    rows : (2, b0, b1, heads, at least n): the lse in base 2 and delta of each query, as
        `numba_flash.cuda.preprocess` writes them; a multiple of 64.
    out : (shares, b0, b1, heads, n, n) of dtype ``config.out``, with sizes 1 where it is summed.
    items : tiles of the gradient, times shares.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    banded, vectors, options, tile = config.banded, config.vectors, config.options, config.tile
    BLOCK_M, PART, PARTS, CONSUMERS = tile.block_m, tile.part, tile.parts, tile.consumers
    SMEM, runs = tile.layout(head_dim, head_dim_v), fragment.runs_of_columns(PART)
    QUERIES, KEY_TILES, NOTES = map(one_type, (SMEM.rows, SMEM.keys, SMEM.notes))
    VALUES, SUMS, VALUES_BYTES = SMEM.values, SMEM.sums, 4 * BLOCK_M
    SCORES, ALL_SCORES, MINE = PART // 2, PARTS * PART // 2, ROWS * ROW_BYTES
    BFLOAT16, DROPOUT, MASKED = dtype == "bfloat16", bool(options.dropout), options.mask
    SUM_0, SUM_1, SUM_H, SUM_I, SUM_J = summed = config.summed
    KIND, NONE, ONE, NAN = one_type(DbiasKind()), 0, 1, math.nan
    HELD = held(options, runs).words
    ALL_HELD = PARTS * HELD
    note_steps = build_note(SMEM.notes, banded, summed, options, tile)
    load_queries, load_keys, load_values = build_loads(head_dim, head_dim_v, tile)
    start_scores = wgmma.build_scores(PART, head_dim, BLOCK_M, BFLOAT16)
    start_dp = wgmma.build_scores(PART, head_dim_v, BLOCK_M, BFLOAT16)
    fetch_bias, fetch_mask = (build_fetch(options, runs, vectors, (x,)) for x in ("bias", "mask"))
    modify, drop = build_modify(dtype, options, runs), build_drop(options, runs)
    recompute_p, differentiate = build_differentiate(options, SCORES, dtype == "bfloat16")
    zero, _ = softmax.build_zero(ALL_SCORES)

    @inline
    def meet():
        pipeline.meet_consumers(CONSUMERS)

    fragments = Fragments(runs, PARTS, PART, CONSUMERS * WARPS, 1, 16, 2, WARPS, True, meet)
    store = build_store(config.out, config.wide, False, summed, fragments)

    @inline
    def read(t, word):
        return pipeline.read(t.smem, NOTES, t.turn, word)

    @inline
    def own(x, summed_there):
        """A coordinate of the tile of the gradient."""
        return i32(0) if summed_there else x

    @inline
    def bias_at(t, head, row0, col0):
        """Where the bias of a tile of the gradient is; it has all queries and keys."""
        queries, keys = i32(t.extent.queries), i32(t.extent.keys)
        region = Region(row0, col0, queries, keys, i32(0), i32(0))
        query, key = i32(row0 + first_row(t.me)), i32(col0 + first_column())
        return Bias(t.bias_mask, query, key, region, head, t.extras)

    @inline
    def bias_here(t):
        head = Head(read(t, NOTE.b0), read(t, NOTE.b1), i32(0), read(t, NOTE.head), i32(0))
        return bias_at(t, head, own(read(t, NOTE.row0), SUM_I), own(read(t, NOTE.col0), SUM_J))

    @inline
    def bias_next(t):
        b0, b1, head = read(t, NOTE.next_b0), read(t, NOTE.next_b1), read(t, NOTE.next_head)
        at = Head(b0, b1, i32(0), head, i32(0))
        return bias_at(t, at, read(t, NOTE.next_row0), read(t, NOTE.next_col0))

    @inline
    def fetch_part(part, x):
        key = i32(x.key + part * PART)
        fetch_bias(x.bias_mask[part * HELD :], x.query, key, x.region, x.at, False, x.extras)

    @inline
    def rows_of(smem, me, n):
        """Descriptor of a consumer's queries in the n-th tile."""
        return wgmma.descriptor(u32(pipeline.tile(smem, QUERIES, n) + u32(me * MINE)), u32(0))

    @inline
    def weigh_and_add(part, t):
        """P of a part of the keys, and dbias += dS."""
        smem, k_tile = t.smem, u32(t.m + u32(2 * part))
        v_tile = u32(k_tile + u32(1))
        s, bias_mask = t.s, t.bias_mask[part * HELD :]
        # (1) S = Q K^T, (4) dP = dO V^T
        q_rows = rows_of(smem, t.me, t.n)
        pipeline.wait_ready(smem, KEY_TILES, k_tile)
        k_rows = wgmma.descriptor(pipeline.tile(smem, KEY_TILES, k_tile), u32(0))
        start_scores(s, q_rows, k_rows)
        pipeline.wait_ready(smem, KEY_TILES, v_tile)
        v_rows = wgmma.descriptor(pipeline.tile(smem, KEY_TILES, v_tile), u32(0))
        start_dp(t.dp, rows_of(smem, t.me, u32(t.n + u32(1))), v_rows)
        row0, col0 = read(t, NOTE.row0), i32(read(t, NOTE.col0) + part * PART)
        region = Region(
            row0, col0, read(t, NOTE.queries), read(t, NOTE.keys), read(t, NOTE.low),
            read(t, NOTE.high),
        )  # fmt: skip
        b0, b1, heads = read(t, NOTE.b0), read(t, NOTE.b1), i32(t.extent.heads)
        at = Head(b0, b1, i32(b0 * i32(t.extent.b1) + b1), read(t, NOTE.head), heads)
        whole = t.kind & i32(KIND.whole) != 0
        query = i32(row0 + first_row(t.me))
        key = i32(col0 + first_column())
        if MASKED:
            fetch_mask(bias_mask, query, key, region, at, whole, t.extras)
        ptx.wgmma_wait(s, s, ONE, SCORES, NONE)
        release_keys(smem, KEY_TILES, k_tile)
        # the options, (2) P = exp(S - lse), in the place of S, and dropout
        modify(s, s, bias_mask, query, key, region, at, whole, t.parameters)
        if t.kind & i32(KIND.last) != 0:
            fetch_part(part, bias_next(t))
        recompute_p(s, t.lse)
        if DROPOUT:
            drop(s, query, key, at, t.parameters)
        ptx.wgmma_wait(t.dp, s, NONE, SCORES, SCORES)
        release_keys(smem, KEY_TILES, v_tile)
        # (5) dbias = dbias + dS, where dS = P * (dP - delta)
        differentiate(t.acc[part * SCORES :], s, t.dp, t.delta, t.parameters)

    fetch_all = ptx.repeated(PARTS, fetch_part)
    weigh_and_add_all = ptx.repeated(PARTS, weigh_and_add)

    @inline
    def load_rows(smem, me, n, values):
        """The lse or delta of this thread's queries."""
        row = first_row(me)
        at = u32(smem + u32(VALUES) + n % u32(QUERIES.slots) * u32(VALUES_BYTES) + u32(row * 4))
        for r in range(2):
            values[r] = ptx.as_float32(u32(ptx.load_shared(u32(at + u32(32 * r)))))

    @inline
    def add_step(t):
        """dbias += dS of a tile of scores."""
        following = u32(t.n + u32(1))
        pipeline.wait_ready(t.smem, QUERIES, t.n)
        load_rows(t.smem, t.me, t.n, t.lse)
        pipeline.wait_ready(t.smem, QUERIES, following)
        load_rows(t.smem, t.me, following, t.delta)
        weigh_and_add_all(t)
        pipeline.release(t.smem, QUERIES, t.n)
        pipeline.release(t.smem, QUERIES, following)

    @inline
    def kind_of(smem, turn):
        """The kind of a step that has been written down."""
        pipeline.wait_ready(smem, NOTES, turn)
        return pipeline.uniform(pipeline.read(smem, NOTES, turn, NOTE.kind))

    @inline
    def finish(smem, turn, kind, acc, out):
        """Store a tile of the gradient."""
        if kind & i32(KIND.invalid) != 0:
            for e in range(ALL_SCORES):
                acc[e] = f32(NAN)
        b0 = own(pipeline.read(smem, NOTES, turn, NOTE.b0), SUM_0)
        b1 = own(pipeline.read(smem, NOTES, turn, NOTE.b1), SUM_1)
        head = own(pipeline.read(smem, NOTES, turn, NOTE.head), SUM_H)
        share = pipeline.read(smem, NOTES, turn, NOTE.share)
        row0 = own(pipeline.read(smem, NOTES, turn, NOTE.row0), SUM_I)
        col0 = own(pipeline.read(smem, NOTES, turn, NOTE.col0), SUM_J)
        of_head = out[index(share), index(b0), index(b1), index(head)]
        store(of_head, acc, u32(smem + u32(SUMS)), row0, col0)

    @inline
    def consume(smem, me, out, extras, extent, parameters):
        """All steps of this block, for 64 queries."""
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S, then of P, of a part of the keys
        dp = cuda.local.array(SCORES, f32)  # of dP
        acc = cuda.local.array(ALL_SCORES, f32)  # of dbias
        bias_mask = cuda.local.array(ALL_HELD, u32)
        lse = cuda.local.array(2, f32)
        delta = cuda.local.array(2, f32)
        turn, n, m, fetched = u32(0), u32(0), u32(0), False
        kind = kind_of(smem, turn)
        while kind != END:
            zero(acc)
            there = kind & i32(KIND.empty) == 0
            if there and not fetched:
                t = Step(
                    s, dp, acc, bias_mask, lse, delta, smem, me, turn, n, m, kind, extent, extras,
                    parameters,
                )  # fmt: skip
                fetch_all(bias_here(t))
            fetched = there
            while there:
                t = Step(
                    s, dp, acc, bias_mask, lse, delta, smem, me, turn, n, m, kind, extent, extras,
                    parameters,
                )  # fmt: skip
                add_step(t)
                n, m = u32(n + u32(2)), u32(m + u32(2 * PARTS))
                there = kind & i32(KIND.last) == 0
                if there:
                    pipeline.release(smem, NOTES, turn)
                    turn = u32(turn + u32(1))
                    kind = kind_of(smem, turn)
            finish(smem, turn, kind, acc, out)
            pipeline.release(smem, NOTES, turn)
            turn = u32(turn + u32(1))
            kind = kind_of(smem, turn)

    def note(smem, me, x):
        note_steps(smem, x.out.shape[0], x.extras, x.extent, i32(x.items))

    def bring_queries(smem, me, x):
        load_queries(x.maps, smem, x.rows)

    def bring_keys(smem, me, x):
        load_keys(x.maps[2], smem)

    def bring_values(smem, me, x):
        load_values(x.maps[3], smem)

    def compute(smem, me, x):
        consume(smem, me, x.out, x.extras, x.extent, x.parameters)

    acts = note, bring_queries, bring_keys, bring_values
    roles = Roles(tile, tuple(Producer(act, i) for i, act in enumerate(acts)), compute)
    return hopper_kernel(
        rings_of(tile, SMEM),
        roles,
        maps=4,
        rows=array(f32, 5),
        out=array(f32 if config.out == "float32" else types.uint16, 6),
        extras=extras_type(options, ("bits",)),
        extent=named(Extent, i64),
        items=i64,
        parameters=parameters_type(options),
    )
