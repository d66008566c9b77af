"""Gradient of an additive bias of float64 on tensor cores: dbias = dS, summed over the axes that
the bias broadcasts.

As `numba_flash.cuda.sm80.bias_gradient.dbias`: a block owns a tile of dbias, and walks over the
tiles of scores that were made of it. V and dO are copied during Q K^T, and the next Q and K during
dO V^T.
"""

import math
from typing import NamedTuple

from numba_flash import numeric
from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import Extent, extras_type, parameters_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.passes.store_dbias import Fragments, build_store
from numba_flash.cuda.runtime.lang import cuda, f64, i32, i64, inline, once, types, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.fetch import build_fetch, held
from numba_flash.cuda.score.modify import build_drop, build_modify
from numba_flash.cuda.score.score import LOG2E, Head, Region
from numba_flash.cuda.sm80.bias_gradient.dbias import synchronise
from numba_flash.cuda.sm80.bias_gradient.load_dbias import Tensors
from numba_flash.cuda.sm80.config import BiasGradientConfig
from numba_flash.cuda.sm80.operands import products_float64 as products
from numba_flash.cuda.sm80.operands.load_float64 import build_load
from numba_flash.cuda.work.walk_dbias import build_begin, build_places

ROWS_OF_LANE = 2
UNROLLED = 4  # copies of a thread


class Lane(NamedTuple):
    """What is a lane's own, in a tile: the first row and key of its warp, and its own."""

    warp_row: int
    warp_key: int
    row: int
    key: int


@once
def build_loads(shape, tile):
    """``load_qk(smem, tensors, place)``: Q and K of a tile of scores; ``load_dov``: dO and V."""
    SMEM = tile.layout(shape.head_dim, shape.head_dim_v)
    Q, DO, K, V = SMEM.q, SMEM.do, SMEM.k, SMEM.v

    def each(rows, head_dim, pitch):
        columns = pitch // products.BYTES
        return build_load(rows, head_dim, columns, tile.threads, shape.asynchronous, UNROLLED)

    load_q = each(tile.block_m, shape.head_dim, SMEM.pitch_k)
    load_do = each(tile.block_m, shape.head_dim_v, SMEM.pitch_v)
    load_k = each(tile.block_n, shape.head_dim, SMEM.pitch_k)
    load_v = each(tile.block_n, shape.head_dim_v, SMEM.pitch_v)

    @inline
    def load_qk(smem, tensors, place):
        at, region = place.at, place.region
        b0, b1, h = index(at.b0), index(at.b1), index(place.kv_head)
        q, k = tensors.q[b0, b1, index(at.head)], tensors.k[b0, b1, h]
        load_q(u32(smem + u32(Q)), q, region.row0, region.rows)
        load_k(u32(smem + u32(K)), k, region.col0, region.cols)

    @inline
    def load_dov(smem, tensors, place):
        at, region = place.at, place.region
        b0, b1, h = index(at.b0), index(at.b1), index(place.kv_head)
        do, v = tensors.do[b0, b1, index(at.head)], tensors.v[b0, b1, h]
        load_do(u32(smem + u32(DO)), do, region.row0, region.rows)
        load_v(u32(smem + u32(V)), v, region.col0, region.cols)

    return load_qk, load_dov


@once
def build_softmax(options, keys):
    """``read_rows(shift, delta, rows, row, place)``: the lse and delta of a lane's rows;
    ``recompute_p(s, shift)``: scores become P = exp(S - lse); ``differentiate(acc, p, dp, delta,
    parameters)``: acc += dS = P * (dP - delta), where P is negative if dropped.
    """
    DROPOUT, GROUPS = bool(options.dropout), keys // 8

    @inline
    def read_rows(shift, delta, rows, row, place):
        at = place.at
        b0, b1, h = index(at.b0), index(at.b1), index(at.head)
        for r in range(ROWS_OF_LANE):
            i, there = i32(row + 8 * r), i32(row + 8 * r) < place.region.rows
            shift[r] = rows[index(0), b0, b1, h, index(i)] if there else f64(0)
            delta[r] = rows[index(1), b0, b1, h, index(i)] if there else f64(0)

    @inline
    def recompute_p(s, shift):
        for j in range(GROUPS):
            for r in range(ROWS_OF_LANE):
                for c in range(2):
                    e = 4 * j + 2 * r + c
                    s[e] = numeric.exp2((s[e] - shift[r]) * f64(LOG2E))

    @inline
    def differentiate(acc, p, dp, delta, parameters):
        for j in range(GROUPS):
            for r in range(ROWS_OF_LANE):
                for c in range(2):
                    e = 4 * j + 2 * r + c
                    weight, slope = p[e], dp[e]
                    if DROPOUT:  # dP is 0 where the weight is -P
                        slope = slope * parameters.keep_scale if weight > f64(0) else f64(0)
                        weight = abs(weight)
                    acc[e] += weight * (slope - delta[r])

    return read_rows, recompute_p, differentiate


def build(config: BiasGradientConfig):
    """Kernel ``dbias_sm80(do, q, k, v, rows, out, extras, low, high, parameters)`` with its
    signature and compile options, as that of `numba_flash.cuda.sm80.bias_gradient.dbias.build`.
    """
    dtype, shape, options, tile = config.dtype, config.shape, config.options, config.tile
    out_dtype, summed, banded = config.out, config.summed, config.banded
    BLOCK_M, BLOCK_N, KEYS, WARPS_N = tile.block_m, tile.block_n, tile.keys, tile.warps_n
    SMEM = tile.layout(shape.head_dim, shape.head_dim_v)
    Q, DO, K, V, PITCH_K, PITCH_V = SMEM.q, SMEM.do, SMEM.k, SMEM.v, SMEM.pitch_k, SMEM.pitch_v
    SCORES, DROPOUT, MASKED, NAN = KEYS // 2, bool(options.dropout), options.mask, math.nan
    runs = fragment.runs_of_columns(KEYS)
    HELD = held(options, runs).words
    load_qk, load_dov = build_loads(shape, tile)
    q_kt = products.build_nt(1, KEYS, PITCH_K // products.BYTES, PITCH_K, tile.terms)
    do_vt = products.build_nt(1, KEYS, PITCH_V // products.BYTES, PITCH_V, tile.terms)
    zero, _ = softmax.build_zero(SCORES)
    fetch_bias = build_fetch(options, runs, shape.vectors, ("bias",))
    fetch_mask = build_fetch(options, runs, shape.vectors, ("mask",))
    modify, drop = build_modify(dtype, options, runs), build_drop(options, runs, True)
    read_rows, recompute_p, differentiate = build_softmax(options, KEYS)
    begin = build_begin(summed, BLOCK_M, BLOCK_N)
    place_of, find, proceed = build_places(options, banded, summed, BLOCK_M, BLOCK_N)
    of_warps = tile.warps_m, WARPS_N, 16
    fragments = Fragments(runs, 1, KEYS, *of_warps, 2, 0, False, synchronise, True)
    store = build_store(out_dtype, False, False, summed, fragments)

    @inline
    def lane_of(warp):
        row, key = i32(warp // WARPS_N * 16), i32(warp % WARPS_N * KEYS)
        first = i32(row + products.first_row())
        return Lane(row, key, first, i32(key + fragment.first_column()))

    def dbias_sm80(do, q, k, v, rows, out, extras, low, high, parameters):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        # registers of each thread
        s = cuda.local.array(SCORES, f64)  # fragment of S, then of P
        dp = cuda.local.array(SCORES, f64)  # of dP
        acc = cuda.local.array(SCORES, f64)  # of dbias
        bias_mask = cuda.local.array(HELD, u32)
        shift = cuda.local.array(ROWS_OF_LANE, f64)  # the lse of its rows
        delta = cuda.local.array(ROWS_OF_LANE, f64)

        nq, nk, heads = i32(q.shape[3]), i32(k.shape[3]), i32(q.shape[2])
        b0, b1, kv_heads = i32(q.shape[0]), i32(q.shape[1]), i32(k.shape[2])
        extent = Extent(b0, b1, heads, kv_heads, nq, nk, i32(low), i32(high))
        item = begin(i32(cuda.blockIdx.x), extent, out.shape[0])
        space, own, share = item.space, item.space.own, item.share
        tensors, lane = Tensors(do, q, k, v, rows), lane_of(ptx.thread_here() // 32)
        whole = Region(i32(own.i * BLOCK_M), i32(own.j * BLOCK_N), nq, nk, i32(low), i32(high))
        at, row = Head(own.b0, own.b1, i32(0), own.head, heads), i32(whole.row0 + lane.row)
        fetch_bias(bias_mask, row, i32(whole.col0 + lane.key), whole, at, False, extras)
        zero(acc)
        step = find(item.step, space, extras)
        if step.number < space.stop:
            load_qk(smem, tensors, place_of(step.walk, space, extras))

        while step.number < space.stop:
            ptx.copy_wait()
            cuda.syncthreads()  # Q and K are there; V and dO have been read
            place = place_of(step.walk, space, extras)
            at, region = place.at, place.region
            lane = lane_of(ptx.thread_here() // 32)
            row, column = i32(region.row0 + lane.row), i32(region.col0 + lane.key)
            load_dov(smem, tensors, place)
            read_rows(shift, delta, rows, row, place)
            if MASKED:
                fetch_mask(bias_mask, row, column, region, at, step.whole, extras)
            # (1) S = Q K^T
            q_rows = u32(smem + u32(Q) + u32(lane.warp_row * PITCH_K))
            q_kt(s, q_rows, u32(smem + u32(K) + u32(lane.warp_key * PITCH_K)))
            # (2) P = exp(S - lse)
            modify(s, s, bias_mask, row, column, region, at, step.whole, parameters)
            recompute_p(s, shift)
            if DROPOUT:
                drop(s, row, column, at, parameters)
            ptx.copy_wait()
            cuda.syncthreads()  # V and dO are there; Q and K have been read
            step = proceed(step, space, extras)
            if step.number < space.stop:
                load_qk(smem, tensors, place_of(step.walk, space, extras))
            # (4) dP = dO V^T
            do_rows = u32(smem + u32(DO) + u32(lane.warp_row * PITCH_V))
            do_vt(dp, do_rows, u32(smem + u32(V) + u32(lane.warp_key * PITCH_V)))
            # (5) dbias = dbias + dS, where dS = P * (dP - delta)
            differentiate(acc, s, dp, delta, parameters)

        if step.invalid:
            for e in range(SCORES):
                acc[e] = f64(NAN)
        store(out[share, own.b0, own.b1, own.head], acc, smem, whole.row0, whole.col0)

    signature = types.void(
        *[array(f64, 5)] * 5,
        array(out_dtype, 6),
        extras_type(options, ("bits",)),
        *(i64, i64),
        parameters_type(options),
    )
    return dbias_sm80, signature, {"launch_bounds": (tile.threads, 1)}
