"""Backward pass of float64 on tensor cores: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2,
one block of threads per block of keys.

As in `numba_flash.cuda.sm80.backward.backward_shared`, a warp has a part of the scores of some
keys, and of the columns of some dK and dV; P^T and dS^T go through shared memory. A number takes
two registers, and products of small tiles as much time to read as to make: so each of the three
kinds of results is shared out among the warps in its own way.
"""

import math
from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type, parameters_type
from numba_flash.cuda.number import array
from numba_flash.cuda.runtime.lang import cuda, f64, i32, i64, inline, named, types, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.sm80.arguments import Sizes
from numba_flash.cuda.sm80.backward import load_backward, softmax_backward_float64, sum_dq
from numba_flash.cuda.sm80.backward.softmax_backward import tile_of
from numba_flash.cuda.sm80.backward.sum_dq_float64 import build_add
from numba_flash.cuda.sm80.config import BackwardConfig
from numba_flash.cuda.sm80.operands import products_float64 as products
from numba_flash.cuda.sm80.operands.float64_tiles import BYTES


class Own(NamedTuple):
    """What is a warp's own.

    Attributes
    ----------
    key, column : int
        The first of its scores.
    key_out, part : int
        The first of its dK and dV, and which part of their columns.
    """

    key: int
    column: int
    key_out: int
    part: int


def build(config: BackwardConfig):
    """Kernel ``backward_sm80(do, q, k, v, dk, dv, rows, dq_sum, flags, extras, sizes, scale_log2,
    scale, parameters)`` with its signature and compile options.

    do, q, k, v, dk, dv : (b0, b1, heads, n, head_dim).
    rows, dq_sum, flags : as in `numba_flash.cuda.sm80.backward.backward.build`.
    """
    shape, ordered, options, tile = config.shape, config.ordered, config.options, config.tile
    BLOCK_M, BLOCK_N, STAGES, LAST = tile.block_m, tile.block_n, tile.stages, tile.warps - 1
    D, DV = tile.padded(shape.head_dim), tile.padded(shape.head_dim_v)
    SMEM = tile.layout(shape.head_dim, shape.head_dim_v)
    K, V, Q, DO, P, DS, ROWS = SMEM.k, SMEM.v, SMEM.q, SMEM.do, SMEM.p, SMEM.ds, SMEM.rows
    PITCH_K, PITCH_V, PITCH_P = SMEM.pitch_k, SMEM.pitch_v, SMEM.pitch_ds
    Q_BYTES, DO_BYTES = BLOCK_M * PITCH_K, BLOCK_M * PITCH_V
    ROWS_BYTES, LSE_BYTES = 2 * BYTES * BLOCK_M, BYTES * BLOCK_M
    # of a warp: keys and columns of scores; keys and columns of dK and dV
    SHARES, PARTS = tile.warps // tile.scores, tile.warps // tile.outputs
    KEYS, COLUMNS = BLOCK_N // tile.scores, BLOCK_M // SHARES
    KEYS_OUT, COLUMNS_K, COLUMNS_V = BLOCK_N // tile.outputs, D // PARTS, DV // PARTS
    SCORES, KEY_ROWS, MODIFIED = KEYS * COLUMNS // 32, KEYS // 8, options.modifies
    MASKED, DROPOUT = options.tiled, bool(options.dropout)
    place, key_of = fragment.build_key_rows(KEYS // 16) if MODIFIED else (None, None)
    OUTPUTS_K, OUTPUTS_V = KEYS_OUT * COLUMNS_K // 32, KEYS_OUT * COLUMNS_V // 32
    OUT_ROWS, PACKED, NAN = KEYS_OUT // 8, options.packed, math.nan
    loads = load_backward.build(shape, ordered, options, tile, place)
    begin, first_tile, next_tile, tiles_left, load_keys, load_tile = loads
    k_qt = products.build_nt(KEYS // 16, COLUMNS, D, PITCH_K, tile.terms)
    v_dot = products.build_nt(KEYS // 16, COLUMNS, DV, PITCH_V, tile.terms)
    of_output = BLOCK_M, PITCH_K, tile.terms, PITCH_P
    ds_q = products.build_nn(KEYS_OUT // 16, COLUMNS_K, *of_output)
    of_output = BLOCK_M, PITCH_V, tile.terms, PITCH_P
    p_do = products.build_nn(KEYS_OUT // 16, COLUMNS_V, *of_output)
    put = products.build_put(KEYS // 16, COLUMNS, PITCH_P)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    softmax_of = softmax_backward_float64.build(options, shape.vectors, KEYS, COLUMNS, PITCH_P)
    fetch, recompute_p, put_weights, differentiate, SLOPES, WORDS = softmax_of
    store_dk = products.build_store(KEYS_OUT // 16, COLUMNS_K, shape.wide, key_of)
    store_dv = products.build_store(KEYS_OUT // 16, COLUMNS_V, shape.wide, key_of)
    sum_of, wait, release = sum_dq.build_order(ordered, options, tile)
    add_dq = build_add(shape, ordered, tile)

    @inline
    def own_of(warp):
        key, column = i32(warp // SHARES * KEYS), i32(warp % SHARES * COLUMNS)
        return Own(key, column, i32(warp // PARTS * KEYS_OUT), i32(warp % PARTS))

    def backward_sm80(
        do, q, k, v, dk, dv, rows, dq_sum, flags, extras, sizes, scale_log2, scale, parameters
    ):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        # registers of each thread
        sT = cuda.local.array(SCORES, f64)  # fragment of S^T, then of P^T
        dpT = cuda.local.array(SCORES, f64)  # of dP^T, then of dS^T
        dk_acc = cuda.local.array(OUTPUTS_K, f64)  # of dK
        dv_acc = cuda.local.array(OUTPUTS_V, f64)  # of dV
        factor = cuda.local.array(OUT_ROWS, f64)
        slope = cuda.local.array(SLOPES, f64)  # derivatives of scores, where options bend them
        bias_mask = cuda.local.array(WORDS, u32)  # of the scores

        item = begin(smem, flags, k.shape, extras, sizes)
        walk = first_tile(item, rows, extras, sizes)
        k_tile, p_tile, ds = u32(smem + u32(K)), u32(smem + u32(P)), u32(smem + u32(DS))
        tiles = tiles_left(walk, item, sizes)
        this = sum_of(item, walk, walk, sizes, extras)
        zero_k(dk_acc)
        zero_v(dv_acc)
        if tiles > 0:
            load_keys(smem, k, v, item)
            load_tile(smem, u32(0), do, q, rows, item, walk)

        n = i32(0)
        while n < tiles:
            ptx.copy_wait()
            cuda.syncthreads()  # this tile is there; the one before, and its dS^T, have been read
            slot, warp = u32(n % STAGES), i32(ptx.thread_here() // 32)
            own = own_of(warp)  # anew for every tile, for registers
            row0 = i32(walk.at * BLOCK_M + own.column)
            if n > 0:
                release(flags, this)
            key, first = i32(item.row0 + own.key), i32(item.row0 + own.key)
            if MODIFIED:
                key = i32(key + products.first_row() * KEY_ROWS)
            tile = tile_of(row0, key, item, walk, q.shape[2], q.shape[1])
            here, walk = walk, next_tile(walk, item, rows, extras, sizes)
            this = sum_of(item, here, walk, sizes, extras)
            if warp == LAST:
                wait(flags, this)  # by the next barrier everybody has
            if MASKED:
                tiles = i32(n + 1 + tiles_left(walk, item, sizes))
            if STAGES > 1:
                if n + 1 < tiles:
                    load_tile(smem, u32(slot ^ u32(1)), do, q, rows, item, walk)
            q_tile = u32(smem + u32(Q) + slot * u32(Q_BYTES))
            do_tile = u32(smem + u32(DO) + slot * u32(DO_BYTES))
            lse = u32(smem + u32(ROWS) + slot * u32(ROWS_BYTES))
            lse += u32((own.column + fragment.first_column()) * BYTES)
            fetch(bias_mask, tile, extras)
            # (1) S^T = K Q^T
            k_warp = u32(k_tile + u32(own.key * PITCH_K))
            k_qt(sT, k_warp, u32(q_tile + u32(own.column * PITCH_K)))
            # (2) P^T = exp(S^T - lse)
            of_tile = first, tile, item, parameters
            recompute_p(sT, slope, bias_mask, lse, scale_log2, *of_tile)
            p_warp = u32(p_tile + u32(own.key * PITCH_P))
            dropped = put_weights(p_warp, own.column, sT, slope)
            # (4) dP^T = V dO^T
            v_warp = u32(smem + u32(V) + u32(own.key * PITCH_V))
            v_dot(dpT, v_warp, u32(do_tile + u32(own.column * PITCH_V)))
            # (5) dS^T = P^T * (dP^T - delta)
            differentiate(dpT, sT, dropped, u32(lse + u32(LSE_BYTES)), parameters)
            put(u32(ds + u32(own.key * PITCH_P)), own.column, dpT)
            cuda.syncthreads()  # P^T and dS^T are there
            own = own_of(ptx.thread_here() // 32)
            of_keys, line = u32(own.key_out * PITCH_P), u32(own.part * BYTES)
            # (3) dV = dV + P^T dO
            p_do(dv_acc, u32(p_tile + of_keys), u32(do_tile + line * u32(COLUMNS_V)))
            # (6) dK = dK + dS^T Q
            ds_q(dk_acc, u32(ds + of_keys), u32(q_tile + line * u32(COLUMNS_K)))
            if STAGES == 1:
                cuda.syncthreads()  # this tile has been read
                if n + 1 < tiles:
                    load_tile(smem, u32(0), do, q, rows, item, walk)
            # (7) dQ = dQ + dS K
            add_dq(ds, k_tile, dq_sum, this)
            n = i32(n + 1)

        cuda.syncthreads()  # the last dQ is added
        if tiles > 0:
            release(flags, this)
        invalid, own = item.invalid != 0, own_of(ptx.thread_here() // 32)
        keep_scale = f64(1)
        if DROPOUT:
            keep_scale = parameters.keep_scale
        begin_key, b1, stop = i32(0), item.b1, i32(dk.shape[3])
        if PACKED:
            begin_key, b1, stop = item.rows_begin, i32(0), item.rows
        dk_head, dv_head = (
            dk[item.b0, b1, item.head, begin_key:],
            dv[item.b0, b1, item.head, begin_key:],
        )
        first, pair = i32(item.row0 + own.key_out + products.first_row()), fragment.first_column()
        for r in range(OUT_ROWS):
            factor[r] = f64(NAN) if invalid else scale
        column = i32(own.part * COLUMNS_K + pair)
        store_dk(products.Stored(dk_head, dk_acc, factor, first, column, stop))
        for r in range(OUT_ROWS):
            factor[r] = f64(NAN) if invalid else keep_scale
        column = i32(own.part * COLUMNS_V + pair)
        store_dv(products.Stored(dv_head, dv_acc, factor, first, column, stop))

    signature = types.void(
        *[array(f64, 5)] * 8,
        array(i32, 1),
        extras_type(options, sum_dq.lists_of(ordered)),
        named(Sizes, i64),
        *(f64, f64),
        parameters_type(options),
    )
    return backward_sm80, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
