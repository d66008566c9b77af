"""Backward pass on tensor cores since Turing, where two or four warps share dK and dV of their
keys: for head dimensions at which one warp has no registers for both, and wherever it is faster,
since warps with more keys and fewer columns each read less of Q and dO from shared memory.

Each of them makes P^T and dS^T of its part of a tile's queries; through shared memory they are
operands of its part of the columns of dV and dK, and of dQ. Otherwise as
`numba_flash.cuda.sm80.backward.backward`.
"""

import math

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, types, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.sm80.backward import ds_slots, load_backward, softmax_backward, sum_dq
from numba_flash.cuda.sm80.backward.backward import signature
from numba_flash.cuda.sm80.config import BackwardConfig
from numba_flash.cuda.sm80.load import build_store
from numba_flash.cuda.sm80.operands import products


def build(config: BackwardConfig):
    """Kernel ``backward_sm80(do, q, k, v, dk, dv, rows, dq_sum, flags, extras, sizes, scale_log2,
    scale, parameters)``, as that of `numba_flash.cuda.sm80.backward.backward.build`.
    """
    dtype, shape, options, tile = config.dtype, config.shape, config.options, config.tile
    ordered = config.ordered
    BLOCK_M, M_TILES, COLUMNS = tile.block_m, tile.m_tiles, tile.columns
    STAGES, WAYS, GROUP_KEYS = tile.stages, tile.ways, 16 * tile.m_tiles
    KEY_ROWS, STORED_KEYS = 2 * tile.m_tiles, 16 * tile.m_tiles // tile.ways
    D, DV = tile.padded(shape.head_dim), tile.padded(shape.head_dim_v)
    SMEM = tile.layout(shape.head_dim, shape.head_dim_v)
    K, V, Q, DO, DS, P, ROWS = SMEM.k, SMEM.v, SMEM.q, SMEM.do, SMEM.ds, SMEM.p, SMEM.rows
    PITCH_K, PITCH_V, PITCH_P = SMEM.pitch_k, SMEM.pitch_v, SMEM.pitch_ds
    Q_BYTES, DO_BYTES = BLOCK_M * PITCH_K, BLOCK_M * PITCH_V
    ROWS_BYTES, LSE_BYTES = 8 * BLOCK_M, 4 * BLOCK_M
    SCORES, PAIRS, STARTS = M_TILES * COLUMNS // 2, M_TILES * COLUMNS // 4, COLUMNS // 4
    COLUMNS_K, COLUMNS_V = D // tile.ways, DV // tile.ways  # of a warp's dK and dV
    OUTPUTS_K, OUTPUTS_V = M_TILES * COLUMNS_K // 2, M_TILES * COLUMNS_V // 2
    TURING, PACKED, DROPOUT, NAN = shape.turing, options.packed, bool(options.dropout), math.nan
    MASKED, LAST = options.tiled, tile.warps - 1
    place, key_of = fragment.build_key_rows(M_TILES)
    loads = load_backward.build(shape, ordered, options, tile, place)
    begin, first_tile, next_tile, tiles_left, load_keys, load_tile = loads
    kind = products.Kind(dtype == "bfloat16", TURING)
    k_qt = products.build_nt(kind, M_TILES, COLUMNS, D, PITCH_K, PITCH_K, False)
    v_dot_from = products.build_nt_from(kind, M_TILES, COLUMNS, DV, PITCH_V, PITCH_V)
    p_do = products.build_nn(kind, M_TILES, COLUMNS_V, BLOCK_M, PITCH_V, PITCH_P)
    ds_q = products.build_nn(kind, M_TILES, COLUMNS_K, BLOCK_M, PITCH_K, PITCH_P)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    pack, _ = fragment.build_pack(PAIRS, *kind)
    softmax_of = softmax_backward.build(dtype, options, shape.vectors, M_TILES, COLUMNS, kind)
    tile_of, fetch, _, recompute_p, pack_weights, begin_dp, differentiate, *words = softmax_of
    SLOPES, WORDS = words
    put_p = products.build_put_words(M_TILES, COLUMNS, PITCH_P)
    put_dk = products.build_put(M_TILES, COLUMNS_K, PITCH_K, *kind)
    put_dv = products.build_put(M_TILES, COLUMNS_V, PITCH_V, *kind)
    if tile.slots:
        sum_of, wait, add_dq, release = ds_slots.build(shape, tile)
    else:
        sum_of, wait, add_dq, release = sum_dq.build(kind, shape, ordered, options, tile)

    @inline
    def v_dot(dpT, v, do, delta):
        """V dO^T, and what that begins with."""
        start = cuda.local.array(STARTS, f32)
        begin_dp(start, delta)
        v_dot_from(dpT, v, do, start)

    @inline
    def key_of_part(row):
        """The key of a row of those that this warp stores for its group."""
        return key_of(i32(row + cuda.threadIdx.x // 32 % WAYS * STORED_KEYS))

    store_dk = build_store(STORED_KEYS, shape.head_dim, shape.wide, key_of_part, D)
    store_dv = build_store(STORED_KEYS, shape.head_dim_v, shape.wide, key_of_part, DV)

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
        warp = i32(cuda.threadIdx.x // 32)
        group, part = i32(warp // WAYS), i32(warp % WAYS)
        k_tile, ds, column = u32(smem + u32(K)), u32(smem + u32(DS)), i32(part * COLUMNS)
        k_group = u32(k_tile + u32(group * GROUP_KEYS * PITCH_K))
        v_group = u32(smem + u32(V) + u32(group * GROUP_KEYS * PITCH_V))
        ds_group = u32(ds + u32(group * GROUP_KEYS * PITCH_P))
        p_group = u32(smem + u32(P) + u32(group * GROUP_KEYS * PITCH_P))
        key = i32(item.row0 + group * GROUP_KEYS + cuda.threadIdx.x % 32 // 4 * KEY_ROWS)
        tiles, heads, batch1 = tiles_left(walk, item, sizes), q.shape[2], q.shape[1]
        this = sum_of(item, walk, walk, sizes, extras)
        zero_k(dk_acc)
        zero_v(dv_acc)
        if tiles > 0:
            load_keys(smem, k, v, item)
            load_tile(smem, u32(0), do, q, rows, item, walk)

        n = i32(0)
        while n < tiles:
            if not TURING:
                ptx.copy_wait()
            cuda.syncthreads()  # this tile is there; the one before has been read
            slot, row0 = u32(n % STAGES), i32(walk.at * BLOCK_M + column)
            if n > 0:
                release(flags, this)  # behind the next barrier it takes 2.5 to 4 % longer
            tile = tile_of(row0, key, item, walk, heads, batch1)
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
            lse += u32((column + fragment.first_column()) * 4)
            fetch(bias_mask, tile, extras)
            # (1) S^T = K Q^T
            k_qt(sT, k_group, u32(q_tile + u32(column * PITCH_K)))
            # (4) dP^T = V dO^T
            delta = u32(lse + u32(LSE_BYTES))
            v_dot(dpT, v_group, u32(do_tile + u32(column * PITCH_V)), delta)
            # (2) P^T = exp(S^T - lse)
            recompute_p(sT, slope, bias_mask, lse, scale_log2, tile, parameters)
            pack_weights(p, sT)
            put_p(u32(p_group + u32(column * 2)), p)
            # (5) dS^T = P^T * (dP^T - delta)
            differentiate(dpT, sT, slope, u32(lse + u32(LSE_BYTES)), parameters)
            pack(p, dpT)
            put_p(u32(ds_group + u32(column * 2)), p)
            cuda.syncthreads()  # P^T and dS^T are there
            # (3) dV = dV + P^T dO
            p_do(dv_acc, p_group, u32(do_tile + u32(part * (2 * COLUMNS_V))))
            # (6) dK = dK + dS^T Q
            ds_q(dk_acc, ds_group, u32(q_tile + u32(part * (2 * COLUMNS_K))))
            # (7) dQ = dQ + dS K
            add_dq(ds, k_tile, dq_sum, this, u32(0))
            if STAGES == 1:
                cuda.syncthreads()  # this tile has been read
                if n + 1 < tiles:
                    load_tile(smem, u32(0), do, q, rows, item, walk)
            n = i32(n + 1)

        cuda.syncthreads()  # K and V have been read, the last dQ is added
        if tiles > 0:
            release(flags, this)
        invalid, keep_scale = item.invalid != 0, f32(1)
        if DROPOUT:
            keep_scale = f32(parameters.keep_scale)
        for r in range(KEY_ROWS):
            factor[r] = f32(NAN) if invalid else scale
        put_dk(u32(k_group + u32(part * (2 * COLUMNS_K))), dk_acc, factor)
        for r in range(KEY_ROWS):
            factor[r] = f32(NAN) if invalid else keep_scale
        put_dv(u32(v_group + u32(part * (2 * COLUMNS_V))), dv_acc, factor)
        cuda.syncthreads()  # all of the group's keys are there
        b0, b1, first, stop = (
            item.b0,
            item.b1,
            i32(item.row0 + group * GROUP_KEYS),
            i32(dk.shape[3]),
        )
        if PACKED:
            b1, stop = i32(0), item.rows
        begin_key = item.rows_begin if PACKED else i32(0)
        row = i32(part * STORED_KEYS)
        k_part, v_part = u32(k_group + u32(row * PITCH_K)), u32(v_group + u32(row * PITCH_V))
        store_dk(k_part, dk[b0, b1, item.head, begin_key:], first, stop)
        store_dv(v_part, dv[b0, b1, item.head, begin_key:], first, stop)

    compile_options = {"launch_bounds": (tile.threads, tile.min_blocks)}
    return backward_sm80, signature(options, ordered), compile_options
