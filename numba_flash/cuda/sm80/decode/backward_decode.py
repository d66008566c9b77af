"""Backward pass of few queries with many keys, which takes as long as the memory needs to give K
and V, and to take dK and dV.

All warps of a block have the same rows, the queries of all heads that read the same keys, and each
has keys of its own, as in `numba_flash.cuda.sm80.decode.forward_decode`. So S^T, dV and dK of a key
are made at once, leave in the place where the key was, and nobody adds anything to them. Of dQ each
warp has a sum over its keys in registers; in the end these are added up in the order of the warps,
and results over parts of the keys by another kernel.
"""

import math
from typing import NamedTuple

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, once, types, u32
from numba_flash.cuda.score import softmax
from numba_flash.cuda.score.fragment import ALL_LANES, build_pack, build_row, first_column
from numba_flash.cuda.sm80.backward import softmax_backward
from numba_flash.cuda.sm80.block import build_block
from numba_flash.cuda.sm80.config import BackwardConfig
from numba_flash.cuda.sm80.decode import decode_steps
from numba_flash.cuda.sm80.load import build_load, build_store
from numba_flash.cuda.sm80.operands import products
from numba_flash.cuda.sm80.tiles import WARP, padded

LOG2E = math.log2(math.e)
LEAST = -float.fromhex("0x1.fffffep127")


def signature_of(dtype, options, kv_splits):
    """Of the kernel; dq is float32 of `kv_splits` of the keys, if there are any."""
    half = types.uint16
    return types.void(
        *[array(half, 5)] * 5,
        *[array(f32, 4)] * 2,
        *[array(half, 5)] * 2,
        array(f32 if kv_splits else half, 5),
        extras_type(options, ()),
        *(f32, f32, i64, i64, i64),
    )


class Keys(NamedTuple):
    """A block's part of the tiles of keys, and which keys any of its rows sees.

    Attributes
    ----------
    first, count : int
        Tiles.
    start, stop : int
        Keys that are seen.
    """

    first: int
    count: int
    start: int
    stop: int


@once
def build_rows(dtype, tile, head_dim_v, has_dlse):
    """``put(at, do, o, lse, dlse, queries)``: lse2 of each row in shared memory, and its delta
    behind those of all, as `numba_flash.cuda.passes.preprocess` has them. Arrays are those of the
    group's heads.
    """
    BLOCK_M, LANES, HEAD_DIM_V = tile.block_m, tile.threads // tile.block_m, head_dim_v
    TURNS, FOLDS, HAS_DLSE = -(-head_dim_v // LANES), LANES.bit_length() - 1, has_dlse
    INF = math.inf
    query_of, head_of, _ = build_row(tile.group)
    unpack = ptx.unpack_bfloat16 if dtype == "bfloat16" else ptx.unpack_float16

    @inline
    def put(at, do, o, lse, dlse, queries):
        lane, row = i32(cuda.threadIdx.x % LANES), i32(cuda.threadIdx.x // LANES)
        head, i, there = index(head_of(row)), index(query_of(row)), row < queries
        shift, delta = f32(INF), f32(0)
        if there:
            for n in range(TURNS):
                d = lane + n * LANES
                if d < HEAD_DIM_V:
                    x, y = do[head, i, index(d)], o[head, i, index(d)]
                    delta += unpack(u32(x)) * unpack(u32(y))
        for fold in range(FOLDS):
            delta += cuda.shfl_xor_sync(ALL_LANES, delta, 1 << fold)
        if lane == 0:
            if there and lse[head, i] != f32(-INF):
                shift = max(ptx.multiply_up(lse[head, i], f32(LOG2E)), f32(LEAST))
                if HAS_DLSE:
                    delta -= dlse[head, i]
            else:
                delta = f32(0)
            own = u32(at + u32(4 * row))
            ptx.store_shared(own, i32(ptx.as_uint32(shift)))
            ptx.store_shared(u32(own + u32(4 * BLOCK_M)), i32(ptx.as_uint32(delta)))

    return put


@once
def build_hide(tile):
    """``hide(sT, key, col0, x, clear, unclear)``: scores that the mask hides become -inf, of a
    warp's keys from col0 on, of which `key` is the lane's first; those from `clear` to `unclear`
    hide none.
    """
    COLUMNS, NEG_INF = tile.block_m // 4, -math.inf
    query_of, _, _ = build_row(tile.group)

    @inline
    def hide(sT, key, col0, x, clear, unclear):
        if col0 < clear or col0 >= unclear:
            for n in range(COLUMNS):
                i = query_of(i32(first_column() + n // 2 * 8 + n % 2))
                start, stop = mask.kv_range(i, i32(i + 1), x.keys, x.low, x.high)
                for r in range(2):
                    j = key + 8 * r
                    if j < start or j >= stop:
                        sT[n // 2 * 4 + 2 * r + n % 2] = f32(NEG_INF)

    return hide


def build(config: BackwardConfig):
    """Kernel ``backward_decode(do, q, k, v, o, lse, dlse, dk, dv, dq, extras, scale_log2, scale,
    low, high, kv_splits)`` with its signature and compile options.

    dq : with ``config.kv_splits`` float32 results over each of these of the keys.
    dlse : not read unless ``config.dlse``.
    """
    dtype, shape, options, tile = config.dtype, config.shape, config.options, config.tile
    kv_splits = config.kv_splits
    BLOCK_M, BLOCK_N, WARP_N, STAGES = tile.block_m, tile.block_n, tile.warp_n, tile.stages
    ASYNCHRONOUS, KV_SPLITS, GROUP = shape.asynchronous, kv_splits, tile.group
    D, DV, NAN = padded(shape.head_dim), padded(shape.head_dim_v), math.nan
    SMEM = tile.layout(shape.head_dim, shape.head_dim_v)
    K, V, Q, DO, DS, ROWS = SMEM.k, SMEM.v, SMEM.q, SMEM.do, SMEM.ds, SMEM.rows
    PITCH_K, PITCH_V, PITCH_DS, DELTAS = SMEM.pitch_k, SMEM.pitch_v, SMEM.pitch_ds, 4 * BLOCK_M
    K_BYTES, V_BYTES, DQ_ROWS = BLOCK_N * PITCH_K, BLOCK_N * PITCH_V, 2 * tile.m_tiles
    SCORES, PAIRS, STARTS = BLOCK_M // 2, BLOCK_M // 4, BLOCK_M // 4
    OUTPUTS_K, OUTPUTS_V, OUTPUTS_Q = D // 2, DV // 2, tile.m_tiles * D // 2
    kind = products.Kind(dtype == "bfloat16", shape.turing)
    block_of = build_block(options, False, BLOCK_M, 2 * (D + DV), kv_splits, tile.group)
    query_of, _, _ = build_row(tile.group)
    commit, meet = decode_steps.build_steps(tile, ASYNCHRONOUS)
    load_q = decode_steps.build_load(tile, shape.head_dim, ASYNCHRONOUS)
    load_do = decode_steps.build_load(tile, shape.head_dim_v, ASYNCHRONOUS)
    load_of = lambda d: build_load(WARP_N, d, WARP, None, ASYNCHRONOUS, around=tile.around)
    load_k, load_v = load_of(shape.head_dim), load_of(shape.head_dim_v)
    put_rows = build_rows(dtype, tile, shape.head_dim_v, config.dlse)
    hide = build_hide(tile)
    of_warp = softmax_backward.build(dtype, options, shape.vectors, 1, BLOCK_M, kind)
    exponentiate = of_warp.exponentiate
    begin_dp, differentiate = of_warp.begin_dp, of_warp.differentiate
    RAISED = softmax.raised_backward(kind.bfloat16)
    LOWERED = 2.0**-RAISED
    pack, _ = build_pack(PAIRS, *kind)
    pack_raised, _ = build_pack(PAIRS, *kind, raised=RAISED)
    k_qt = products.build_nt(kind, 1, BLOCK_M, D, PITCH_K, PITCH_K, False)
    v_dot_from = products.build_nt_from(kind, 1, BLOCK_M, DV, PITCH_V, PITCH_V)
    p_do = products.build_nn(kind, 1, DV, BLOCK_M, PITCH_V, fresh=True)
    ds_q = products.build_nn(kind, 1, D, BLOCK_M, PITCH_K, fresh=True)
    ds_k = products.build_tn(kind, tile.m_tiles, D, WARP_N, PITCH_DS, PITCH_K, fresh=False)
    put_ds = products.build_put_words(1, BLOCK_M, PITCH_DS)
    put_dk = products.build_put(1, D, PITCH_K, *kind)
    put_dv = products.build_put(1, DV, PITCH_V, *kind)
    store_dk = build_store(WARP_N, shape.head_dim, shape.wide, None, D)
    store_dv = build_store(WARP_N, shape.head_dim_v, shape.wide, None, DV)
    store_dq = decode_steps.build_store(tile, shape.head_dim, kv_splits, *kind, compact=kv_splits)
    zero, _ = softmax.build_zero(OUTPUTS_Q)
    wait_for_q, wait_for_one = ptx.copy_wait_but(STAGES), ptx.copy_wait_but(STAGES - 1)

    @inline
    def keys_of(x, keys, kv_splits):
        """The `Keys` of a block, of so many in all."""
        first, count = i32(0), i32(u32(keys + (BLOCK_N - 1)) // u32(BLOCK_N))
        if KV_SPLITS:
            share = i32(u32(count + kv_splits - 1) // u32(kv_splits))
            first = min(i32(x.kv_split * share), count)
            count = min(share, i32(count - first))
        start, stop = i32(0), i32(0)
        if x.queries > 0:
            start, stop = mask.kv_range(i32(0), query_of(x.queries), x.keys, x.low, x.high)
        return Keys(first, count, i32(start), i32(stop))

    @inline
    def load(k_tile, v_tile, x, key0, keys):
        """Keys and values of a warp; zeros where nobody sees any of them."""
        stop = keys.stop if key0 + WARP_N > keys.start else i32(0)
        load_k(k_tile, x.k, key0, stop)
        load_v(v_tile, x.v, key0, stop)

    @inline
    def v_dot(dpT, v, do, delta):
        """V dO^T, and what that begins with."""
        start = cuda.local.array(STARTS, f32)
        begin_dp(start, delta)
        v_dot_from(dpT, v, do, start)

    def backward_decode(
        do, q, k, v, o, lse, dlse, dk, dv, dq, extras, scale_log2, scale, low, high, kv_splits
    ):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        sT = cuda.local.array(SCORES, f32)  # fragment of S^T, then of P^T
        dpT = cuda.local.array(SCORES, f32)  # of dP^T, then of dS^T
        p = cuda.local.array(PAIRS, u32)  # of P^T, then of dS^T, two elements of 16 bits each
        slope = cuda.local.array(1, f32)  # of options that bend scores, of which there are none
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        dq_acc = cuda.local.array(OUTPUTS_Q, f32)  # of dQ
        factor = cuda.local.array(DQ_ROWS, f32)

        x = block_of(q, k, v, dq, lse, extras, low, high, kv_splits)
        b0, b1, group = x.at.b0, x.b1, slice(x.at.head, x.at.head + GROUP)
        do_heads, dk_head, dv_head = do[b0, b1, group], dk[b0, b1, x.kv_head], dv[b0, b1, x.kv_head]
        of_rows = o[b0, b1, group], lse[b0, b1, group], dlse[b0, b1, group]
        nk, keys = i32(k.shape[3]), keys_of(x, i32(k.shape[3]), kv_splits)
        clear, unclear = mask.clear_range(
            i32(0), query_of(i32(BLOCK_M - 1)), WARP_N, x.keys, x.low, x.high
        )
        clear, unclear = i32(clear), i32(unclear)
        warp = i32(cuda.threadIdx.x // WARP)
        k_warp = u32(smem + u32(K) + u32(warp * WARP_N * PITCH_K))
        v_warp = u32(smem + u32(V) + u32(warp * WARP_N * PITCH_V))
        ds, rows = u32(smem + u32(DS) + u32(warp * WARP_N * PITCH_DS)), u32(smem + u32(ROWS))
        q_tile, do_tile = u32(smem + u32(Q)), u32(smem + u32(DO))
        lse2 = u32(rows + u32(first_column() * 4))
        delta = u32(lse2 + u32(DELTAS))
        key0 = i32(keys.first * BLOCK_N + warp * WARP_N)
        count, slot = keys.count, u32(0)
        zero(dq_acc)
        load_q(q_tile, x.q, x.row0, x.queries)
        load_do(do_tile, do_heads, x.row0, x.queries)
        commit()
        for n in range(STAGES):
            if n < count:
                k_tile, v_tile = u32(k_warp + u32(n * K_BYTES)), u32(v_warp + u32(n * V_BYTES))
                load(k_tile, v_tile, x, i32(key0 + n * BLOCK_N), keys)
            commit()
        put_rows(rows, do_heads, *of_rows, x.queries)
        if ASYNCHRONOUS:
            wait_for_q()
        cuda.syncthreads()  # rows of all threads are there
        while count > 0:
            k_tile = u32(k_warp + slot * u32(K_BYTES))
            v_tile = u32(v_warp + slot * u32(V_BYTES))
            if ASYNCHRONOUS:
                wait_for_one()
            meet()  # keys and values of all lanes are there
            # (1) S^T = K Q^T
            k_qt(sT, k_tile, q_tile)
            # (4) dP^T = V dO^T
            v_dot(dpT, v_tile, do_tile, delta)
            # (2) P^T = exp(S^T - lse)
            hide(sT, i32(key0 + cuda.threadIdx.x % WARP // 4), key0, x, clear, unclear)
            exponentiate(sT, lse2, scale_log2)
            # (3) dV = P^T dO
            pack_raised(p, sT)
            p_do(dv_acc, p, do_tile)
            # (5) dS^T = P^T * (dP^T - delta)
            differentiate(dpT, sT, slope, delta, ())
            pack(p, dpT)
            put_ds(ds, p)
            meet()  # dS^T of all lanes is there, and V has been read
            # (7) dQ = dQ + dS K
            ds_k(dq_acc, ds, k_tile)
            for r in range(2):
                factor[r] = f32(NAN) if x.invalid else f32(LOWERED)
            put_dv(v_tile, dv_acc, factor)
            # (6) dK = dS^T Q
            ds_q(dk_acc, p, q_tile)
            meet()  # dV of all lanes is there, and K and dS^T have been read
            for r in range(2):
                factor[r] = f32(NAN) if x.invalid else scale
            put_dk(k_tile, dk_acc, factor)
            store_dv(v_tile, dv_head, key0, nk)
            meet()  # dK of all lanes is there
            store_dk(k_tile, dk_head, key0, nk)
            meet()  # both have been read
            if count > STAGES:
                load(k_tile, v_tile, x, i32(key0 + STAGES * BLOCK_N), keys)
            commit()
            count, key0 = i32(count - 1), i32(key0 + BLOCK_N)
            if STAGES > 1:
                slot = slot + u32(1) if slot < u32(STAGES - 1) else u32(0)

        for r in range(DQ_ROWS):
            factor[r] = f32(NAN) if x.invalid else scale
        cuda.syncthreads()  # all tiles have been read
        store_dq(smem, x.o, dq_acc, factor, x.row0, x.rows)

    compile_options = {"launch_bounds": (tile.threads, tile.min_blocks)}
    return backward_decode, signature_of(dtype, options, kv_splits), compile_options
