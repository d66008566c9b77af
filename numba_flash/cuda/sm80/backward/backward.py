"""Backward pass on tensor cores since Turing, where a warp holds dK and dV of its keys:
FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, one block of threads per block of keys.

Scores are computed transposed, S^T = K Q^T, so that P^T and dS^T leave the softmax in the registers
from which they are operands of dV and dK; dS^T goes once through shared memory, for dQ, which is
added up in memory (`numba_flash.cuda.sm80.backward.sum_dq`), while the next tile's scores are made.
"""

import math

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type, parameters_type
from numba_flash.cuda.number import array
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, named, types, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.sm80.arguments import Sizes
from numba_flash.cuda.sm80.backward import load_backward, softmax_backward, sum_dq
from numba_flash.cuda.sm80.config import BackwardConfig
from numba_flash.cuda.sm80.load import build_store
from numba_flash.cuda.sm80.operands import products

# Columns of dK and dV beside which there are registers for the bias of the next scores, so that it
# is on its way meanwhile. H200, ms with and without, each in a process of its own: 0.53 and 0.57
# with D = Dv = 32, 0.78 and 0.75 with 64, where it takes registers from addresses.
ROOM = 64


def signature(options, ordered):
    """Of the backward kernels."""
    return types.void(
        *[array(types.uint16, 5)] * 6,
        array(f32, 5),
        array(f32, 5),
        array(i32, 1),
        extras_type(options, sum_dq.lists_of(ordered)),
        named(Sizes, i64),
        *(f32, f32),
        parameters_type(options),
    )


def build(config: BackwardConfig):
    """Kernel ``backward_sm80(do, q, k, v, dk, dv, rows, dq_sum, flags, extras, sizes, scale_log2,
    scale, parameters)`` with its signature and compile options.

    do, q, k, v, dk, dv : (b0, b1, heads, n, head_dim), 16 bits.
    rows : (2, b0, b1, heads, row blocks * BLOCK_M): the lse and delta of each query, as
        `numba_flash.cuda.passes.preprocess` numbers and writes them.
    dq_sum, flags : see `numba_flash.cuda.sm80.backward.sum_dq`; flags has one more element, the
        number of the next work item, read only if ``config.ordered``.
    """
    dtype, shape, options, tile = config.dtype, config.shape, config.options, config.tile
    ordered = config.ordered
    BLOCK_M, BLOCK_N, M_TILES, COLUMNS = tile.block_m, tile.block_n, tile.m_tiles, tile.columns
    STAGES, WARP_KEYS, KEY_ROWS = tile.stages, 16 * tile.m_tiles, 2 * tile.m_tiles
    D, DV = tile.padded(shape.head_dim), tile.padded(shape.head_dim_v)
    SMEM = tile.layout(shape.head_dim, shape.head_dim_v)
    K, V, Q, DO, DS, ROWS = SMEM.k, SMEM.v, SMEM.q, SMEM.do, SMEM.ds, SMEM.rows
    PITCH_K, PITCH_V, PITCH_DS = SMEM.pitch_k, SMEM.pitch_v, SMEM.pitch_ds
    Q_BYTES, DO_BYTES, DS_BYTES = BLOCK_M * PITCH_K, BLOCK_M * PITCH_V, BLOCK_N * PITCH_DS
    ROWS_BYTES, LSE_BYTES, PARTS = 8 * BLOCK_M, 4 * BLOCK_M, BLOCK_M // COLUMNS
    SCORES, PAIRS, STARTS = M_TILES * COLUMNS // 2, M_TILES * COLUMNS // 4, COLUMNS // 4
    OUTPUTS_K, OUTPUTS_V = M_TILES * D // 2, M_TILES * DV // 2
    TURING, PACKED, DROPOUT, NAN = shape.turing, options.packed, bool(options.dropout), math.nan
    MASKED, AHEAD = options.tiled, bool(options.bias) and D + DV <= ROOM
    place, key_of = fragment.build_key_rows(M_TILES)
    loads = load_backward.build(shape, ordered, options, tile, place)
    begin, first_tile, next_tile, tiles_left, load_keys, load_tile = loads
    kind = products.Kind(dtype == "bfloat16", TURING)
    k_qt = products.build_nt(kind, M_TILES, COLUMNS, D, PITCH_K, PITCH_K, False)
    v_dot_from = products.build_nt_from(kind, M_TILES, COLUMNS, DV, PITCH_V, PITCH_V)
    p_do = products.build_nn(kind, M_TILES, DV, COLUMNS, PITCH_V)
    ds_q = products.build_nn(kind, M_TILES, D, COLUMNS, PITCH_K)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    pack, _ = fragment.build_pack(PAIRS, *kind)
    softmax_of = softmax_backward.build(dtype, options, shape.vectors, M_TILES, COLUMNS, kind)
    tile_of, fetch, _, recompute_p, pack_weights, begin_dp, differentiate, *words = softmax_of
    SLOPES, WORDS = words
    put_ds = products.build_put_words(M_TILES, COLUMNS, PITCH_DS)
    put_dk = products.build_put(M_TILES, D, PITCH_K, *kind)
    put_dv = products.build_put(M_TILES, DV, PITCH_V, *kind)
    store_dk = build_store(WARP_KEYS, shape.head_dim, shape.wide, key_of, D)
    store_dv = build_store(WARP_KEYS, shape.head_dim_v, shape.wide, key_of, DV)
    sum_of, wait, add_dq, release = sum_dq.build(kind, shape, ordered, options, tile)

    @inline
    def v_dot(dpT, v, do, delta):
        """V dO^T, and what that begins with."""
        start = cuda.local.array(STARTS, f32)
        begin_dp(start, delta)
        v_dot_from(dpT, v, do, start)

    def backward_sm80(
        do, q, k, v, dk, dv, rows, dq_sum, flags, extras, sizes, scale_log2, scale, parameters
    ):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        sT = cuda.local.array(SCORES, f32)  # fragment of S^T, then of P^T
        dpT = cuda.local.array(SCORES, f32)  # of dP^T, then of dS^T
        p = cuda.local.array(PAIRS, u32)  # of P^T, then of dS^T, two elements of 16 bits each
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        slope = cuda.local.array(SLOPES, f32)  # derivatives of scores, where options bend them
        bias_mask = cuda.local.array(WORDS, u32)  # of the scores
        factor = cuda.local.array(KEY_ROWS, f32)

        item = begin(smem, flags, k.shape, extras, sizes)
        walk = first_tile(item, rows, extras, sizes)
        k_tile, ds = u32(smem + u32(K)), u32(smem + u32(DS))
        warp = i32(cuda.threadIdx.x // 32)
        k_warp = u32(k_tile + u32(warp * WARP_KEYS * PITCH_K))
        v_warp = u32(smem + u32(V) + u32(warp * WARP_KEYS * PITCH_V))
        ds_warp = u32(ds + u32(warp * WARP_KEYS * PITCH_DS))
        key = i32(item.row0 + warp * WARP_KEYS + cuda.threadIdx.x % 32 // 4 * KEY_ROWS)
        tiles, heads, batch1 = tiles_left(walk, item, sizes), q.shape[2], q.shape[1]
        this = sum_of(item, walk, walk, sizes, extras)
        done = this
        zero_k(dk_acc)
        zero_v(dv_acc)
        if tiles > 0:
            load_keys(smem, k, v, item)
            load_tile(smem, u32(0), do, q, rows, item, walk)
            if AHEAD:
                row0 = i32(walk.at * BLOCK_M)
                fetch(bias_mask, tile_of(row0, key, item, walk, heads, batch1), extras)

        n = i32(0)
        while n < tiles:
            if not TURING:
                ptx.copy_wait()
            cuda.syncthreads()  # this tile is there, and dS^T of the last, which has been read
            slot, here = u32(n % STAGES), walk
            if n > 1:
                release(flags, done)
            walk = next_tile(here, item, rows, extras, sizes)
            done, this = this, sum_of(item, here, walk, sizes, extras)
            if MASKED:
                tiles = i32(n + 1 + tiles_left(walk, item, sizes))
            if STAGES > 1:
                other = u32(slot ^ u32(1))
                if n + 1 < tiles:
                    load_tile(smem, other, do, q, rows, item, walk)
                if n > 0:
                    # (7) dQ = dQ + dS K of the tile before
                    wait(flags, done)
                    add_dq(u32(ds + other * u32(DS_BYTES)), k_tile, dq_sum, done, u32(0))
            for part in range(PARTS):
                q_tile = u32(smem + u32(Q) + slot * u32(Q_BYTES) + u32(part * COLUMNS * PITCH_K))
                do_tile = u32(smem + u32(DO) + slot * u32(DO_BYTES) + u32(part * COLUMNS * PITCH_V))
                lse = u32(smem + u32(ROWS) + slot * u32(ROWS_BYTES) + u32(part * COLUMNS * 4))
                lse += u32(fragment.first_column() * 4)
                row0 = i32(here.at * BLOCK_M + part * COLUMNS)
                tile = tile_of(row0, key, item, here, heads, batch1)
                if not AHEAD:
                    fetch(bias_mask, tile, extras)
                # (1) S^T = K Q^T
                k_qt(sT, k_warp, q_tile)
                # (4) dP^T = V dO^T
                v_dot(dpT, v_warp, do_tile, u32(lse + u32(LSE_BYTES)))
                # (2) P^T = exp(S^T - lse)
                recompute_p(sT, slope, bias_mask, lse, scale_log2, tile, parameters)
                row0, ahead = i32(row0 + COLUMNS), here
                if part + 1 == PARTS:
                    row0, ahead = i32(walk.at * BLOCK_M), walk
                if AHEAD and (part + 1 < PARTS or n + 1 < tiles):
                    fetch(bias_mask, tile_of(row0, key, item, ahead, heads, batch1), extras)
                # (3) dV = dV + P^T dO
                pack_weights(p, sT)
                p_do(dv_acc, p, do_tile)
                # (5) dS^T = P^T * (dP^T - delta)
                differentiate(dpT, sT, slope, u32(lse + u32(LSE_BYTES)), parameters)
                # (6) dK = dK + dS^T Q
                pack(p, dpT)
                put_ds(u32(ds_warp + slot * u32(DS_BYTES) + u32(part * COLUMNS * 2)), p)
                ds_q(dk_acc, p, q_tile)
            if STAGES == 1:
                cuda.syncthreads()  # dS^T is there; this tile has been read
                if n + 1 < tiles:
                    load_tile(smem, u32(0), do, q, rows, item, walk)
                # (7) dQ = dQ + dS K
                wait(flags, this)
                add_dq(ds, k_tile, dq_sum, this, u32(0))
            n = i32(n + 1)

        cuda.syncthreads()  # the last dS^T is there
        if tiles > 1:
            release(flags, done)
        if STAGES > 1 and tiles > 0:
            wait(flags, this)
            add_dq(
                u32(ds + u32((tiles - 1) % STAGES) * u32(DS_BYTES)), k_tile, dq_sum, this, u32(0)
            )
        cuda.syncthreads()  # K and V have been read, the last dQ is added
        if tiles > 0:
            release(flags, this)
        invalid, keep_scale = item.invalid != 0, f32(1)
        if DROPOUT:
            keep_scale = f32(parameters.keep_scale)
        for r in range(KEY_ROWS):
            factor[r] = f32(NAN) if invalid else scale
        put_dk(k_warp, dk_acc, factor)
        for r in range(KEY_ROWS):
            factor[r] = f32(NAN) if invalid else keep_scale
        put_dv(v_warp, dv_acc, factor)
        cuda.syncwarp()  # all of the warp's keys are there
        b0, b1, first, stop = item.b0, item.b1, i32(item.row0 + warp * WARP_KEYS), i32(dk.shape[3])
        if PACKED:
            b1, stop = i32(0), item.rows
        begin_key = item.rows_begin if PACKED else i32(0)
        store_dk(k_warp, dk[b0, b1, item.head, begin_key:], first, stop)
        store_dv(v_warp, dv[b0, b1, item.head, begin_key:], first, stop)

    compile_options = {"launch_bounds": (tile.threads, tile.min_blocks)}
    return backward_sm80, signature(options, ordered), compile_options
