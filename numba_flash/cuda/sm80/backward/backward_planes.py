"""Backward pass of float32 on tensor cores: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2,
one block of threads per block of keys, with operands that are sums of two of float16
(`numba_flash.cuda.passes.write_planes`).

As `numba_flash.cuda.sm80.backward.backward`, but for what the range of float16 asks for: P is
2^RAISED larger; and the numbers of dS that a warp has at a time, which may be much smaller than
those of others, get a power of two of their own, which goes with them to dK and, through shared
memory, to dQ.
"""

import math

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import FACTORS, extras_type, parameters_type
from numba_flash.cuda.number import array
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, named, types, u32
from numba_flash.cuda.score import fragment, powers, softmax
from numba_flash.cuda.score.softmax import RAISED_BACKWARD as RAISED
from numba_flash.cuda.sm80.arguments import Sizes
from numba_flash.cuda.sm80.backward import load_backward, softmax_backward, sum_dq
from numba_flash.cuda.sm80.config import BackwardConfig
from numba_flash.cuda.sm80.load import build_store_floats
from numba_flash.cuda.sm80.operands import products, products_planes


def build(config: BackwardConfig):
    """Kernel ``backward_sm80(do, q, k, v, dk, dv, rows, dq_sum, flags, extras, sizes, scale_log2,
    scale, parameters)`` with its signature and compile options.

    do, q, k, v : planes, see `numba_flash.cuda.passes.write_planes`, whose factors are among the
    `extras`. dk, dv : float32 (b0, b1, heads, n, head_dim). rows, dq_sum, flags : as in
    `numba_flash.cuda.sm80.backward.backward.build`; lse and delta as
        `numba_flash.cuda.passes.preprocess` writes them for such planes.
    """
    dtype, shape, options, tile = config.dtype, config.shape, config.options, config.tile
    ordered = config.ordered
    BLOCK_M, M_TILES, COLUMNS = tile.block_m, tile.m_tiles, tile.columns
    STAGES, WARPS, WARP_KEYS, KEY_ROWS = tile.stages, tile.warps, 16 * M_TILES, 2 * M_TILES
    D, DV = tile.padded(shape.head_dim), tile.padded(shape.head_dim_v)
    SMEM = tile.layout(shape.head_dim, shape.head_dim_v)
    K, V, Q, DO = SMEM.k, SMEM.v, SMEM.q, SMEM.do
    DS, ROWS, FACTOR = SMEM.ds, SMEM.rows, SMEM.factors
    PITCH_K, PITCH_V, PITCH_DS = SMEM.pitch_k, SMEM.pitch_v, SMEM.pitch_ds
    Q_BYTES, DO_BYTES = BLOCK_M * PITCH_K, BLOCK_M * PITCH_V
    ROWS_BYTES, LSE_BYTES, PARTS = 8 * BLOCK_M, 4 * BLOCK_M, BLOCK_M // COLUMNS
    SCORES, PAIRS = M_TILES * COLUMNS // 2, M_TILES * COLUMNS // 4
    P_WORDS = 2 * PAIRS
    OUTPUTS_K, OUTPUTS_V = M_TILES * D // 2, M_TILES * DV // 2
    PACKED, CHANGES, DROPOUT = options.packed, options.changes, bool(options.dropout)
    MASKED, LAST, LOWERED, NAN = options.tiled, tile.warps - 1, 2.0**-RAISED, math.nan
    place, _ = fragment.build_key_rows(M_TILES)
    loads = load_backward.build(shape, ordered, options, tile, place)
    begin, first_tile, next_tile, tiles_left, load_keys, load_tile = loads
    LOW, planes_k, planes_v = shape.planes > 1, None, None
    if LOW:
        planes_k, planes_v = ptx.Planes(2 * D, 2 * D), ptx.Planes(2 * DV, 2 * DV)
    k_qt = products_planes.build_planes_nt(M_TILES, COLUMNS, D, PITCH_K, PITCH_K, planes_k)
    v_dot = products_planes.build_planes_nt(M_TILES, COLUMNS, DV, PITCH_V, PITCH_V, planes_v)
    if LOW:
        planes_k, planes_v = ptx.Planes(PAIRS, 2 * D), ptx.Planes(PAIRS, 2 * DV)
    p_do, _ = products_planes.build_planes_nn(M_TILES, DV, COLUMNS, PITCH_V, planes_v)
    _, ds_q = products_planes.build_planes_nn(M_TILES, D, COLUMNS, PITCH_K, planes_k)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    kind = products.Kind(False, False)
    softmax_of = softmax_backward.build(
        dtype, options, shape.vectors, M_TILES, COLUMNS, kind, shape.planes
    )
    tile_of, fetch, _, recompute_p, split_weights, _, differentiate, SLOPES, WORDS = softmax_of
    power_of, _ = powers.build_power(SCORES)
    planes, _ = fragment.build_split(PAIRS, shape.planes)
    put_high = products.build_put_words(M_TILES, COLUMNS, PITCH_DS)
    put_low = products.build_put_words(M_TILES, COLUMNS, PITCH_DS, PAIRS)
    store_dk = build_store_floats(M_TILES, D, neighbours=True)
    store_dv = build_store_floats(M_TILES, DV, neighbours=True)
    sum_of, wait, add_dq, release = sum_dq.build(kind, shape, ordered, options, tile)

    @inline
    def times(x, factor):
        for e in range(SCORES):
            x[e] *= factor

    def backward_sm80(
        do, q, k, v, dk, dv, rows, dq_sum, flags, extras, sizes, scale_log2, scale, parameters
    ):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        sT = cuda.local.array(SCORES, f32)  # fragment of S^T, then of P^T
        dpT = cuda.local.array(SCORES, f32)  # of dP^T, then of dS^T
        p = cuda.local.array(P_WORDS, u32)  # of P^T, then of dS^T, high and low
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        slope = cuda.local.array(SLOPES, f32)  # derivatives of scores, where options bend them
        bias_mask = cuda.local.array(WORDS, u32)  # of the scores
        factor = cuda.local.array(KEY_ROWS, f32)

        item = begin(smem, flags, k.shape, extras, sizes)
        walk = first_tile(item, rows, extras, sizes)
        b0, b1 = item.b0, i32(0) if PACKED else item.b1
        of_head = extras.factors[b0, b1, item.head]
        q_factor, k_factor, v_factor, do_factor = of_head[0], of_head[1], of_head[2], of_head[3]
        if not CHANGES:
            scale_log2 = scale * q_factor * k_factor
        k_tile, ds, factors = u32(smem + u32(K)), u32(smem + u32(DS)), u32(smem + u32(FACTOR))
        warp = i32(cuda.threadIdx.x // 32)
        k_warp = u32(k_tile + u32(warp * WARP_KEYS * PITCH_K))
        v_warp = u32(smem + u32(V) + u32(warp * WARP_KEYS * PITCH_V))
        ds_warp = u32(ds + u32(warp * WARP_KEYS * PITCH_DS))
        key = i32(item.row0 + warp * WARP_KEYS + cuda.threadIdx.x % 32 // 4 * KEY_ROWS)
        tiles, heads, batch1 = tiles_left(walk, item, sizes), q.shape[2], q.shape[1]
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
            slot, here = u32(n % STAGES), walk
            if n > 0:
                release(flags, this)
            walk = next_tile(here, item, rows, extras, sizes)
            this = sum_of(item, here, walk, sizes, extras)
            if warp == LAST:
                wait(flags, this)  # by the next barrier everybody has
            if MASKED:
                tiles = i32(n + 1 + tiles_left(walk, item, sizes))
            if STAGES > 1:
                if n + 1 < tiles:
                    load_tile(smem, u32(slot ^ u32(1)), do, q, rows, item, walk)
            for part in range(PARTS):
                q_tile = u32(smem + u32(Q) + slot * u32(Q_BYTES) + u32(part * COLUMNS * PITCH_K))
                do_tile = u32(smem + u32(DO) + slot * u32(DO_BYTES) + u32(part * COLUMNS * PITCH_V))
                lse = u32(smem + u32(ROWS) + slot * u32(ROWS_BYTES) + u32(part * COLUMNS * 4))
                lse += u32(fragment.first_column() * 4)
                row0 = i32(here.at * BLOCK_M + part * COLUMNS)
                tile = tile_of(row0, key, item, here, heads, batch1)
                fetch(bias_mask, tile, extras)
                # (1) S^T = K Q^T
                k_qt(sT, k_warp, q_tile)
                if CHANGES:
                    times(sT, q_factor * k_factor)
                # (4) dP^T = V dO^T
                v_dot(dpT, v_warp, do_tile)
                # (2) P^T = exp(S^T - lse)
                recompute_p(sT, slope, bias_mask, lse, scale_log2, tile, parameters)
                # (3) dV = dV + P^T dO
                split_weights(p, sT)
                p_do(dv_acc, p, do_tile)
                # (5) dS^T = P^T * (dP^T - delta)
                differentiate(dpT, sT, slope, u32(lse + u32(LSE_BYTES)), parameters)
                power = power_of(dpT)
                times(dpT, power.up)
                # (6) dK = dK + dS^T Q
                planes(p, dpT)
                put_high(u32(ds_warp + u32(part * COLUMNS * 2)), p)
                if LOW:
                    put_low(u32(ds_warp + u32((BLOCK_M + part * COLUMNS) * 2)), p)
                factor[0] = power.down
                ds_q(dk_acc, p, q_tile, factor)
                if cuda.threadIdx.x % 32 == 0:
                    at = u32(factors + u32(4 * (part * WARPS + warp)))
                    ptx.store_shared(at, i32(ptx.as_uint32(power.down)))
            cuda.syncthreads()  # dS^T is there; this tile has been read
            if STAGES == 1:
                if n + 1 < tiles:
                    load_tile(smem, u32(0), do, q, rows, item, walk)
            # (7) dQ = dQ + dS K
            add_dq(ds, k_tile, dq_sum, this, factors)
            n = i32(n + 1)

        cuda.syncthreads()  # the last dQ is added
        if tiles > 0:
            release(flags, this)
        invalid, keep_scale = item.invalid != 0, f32(LOWERED)
        if DROPOUT:
            keep_scale = f32(LOWERED) * f32(parameters.keep_scale)
        begin_key, stop = i32(0), i32(dk.shape[3])
        if PACKED:
            begin_key, stop = item.rows_begin, item.rows
        for e in range(OUTPUTS_K):
            dk_acc[e] *= v_factor * do_factor
        for r in range(KEY_ROWS):
            factor[r] = f32(NAN) if invalid else scale * f32(LOWERED) * q_factor
        dk_head, dv_head = dk[b0, b1, item.head, begin_key:], dv[b0, b1, item.head, begin_key:]
        store_dk(dk_head, dk_acc, factor, key, stop, of_head, factor)
        for r in range(KEY_ROWS):
            factor[r] = f32(NAN) if invalid else keep_scale * do_factor
        store_dv(dv_head, dv_acc, factor, key, stop, of_head, factor)

    signature = types.void(
        *[array(u32, 5)] * 4,
        *[array(f32, 5)] * 4,
        array(i32, 1),
        extras_type(options, sum_dq.lists_of(ordered), FACTORS),
        named(Sizes, i64),
        *(f32, f32),
        parameters_type(options),
    )
    return backward_sm80, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
