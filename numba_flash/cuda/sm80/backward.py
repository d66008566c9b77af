"""Backward pass on tensor cores since Turing up to head dimension 128: FlashAttention-2 (Dao,
arXiv:2307.08691), Algorithm 2, one block of threads per block of keys.

Each warp owns 16 or 32 keys, and the dK and dV of these. Scores are computed transposed, S^T = K
Q^T, so that P^T and dS^T leave the softmax in the registers from which they are operands of dV and
dK; dS^T goes once through shared memory, for dQ, which is added up in memory
(`numba_flash.cuda.sm80.sum_dq`).
"""

import math
from typing import NamedTuple

from numba_flash import mask
from numba_flash.cuda import fragment, ptx, schedule, softmax
from numba_flash.cuda.arguments import extras_type, parameters_type
from numba_flash.cuda.lang import cuda, f32, i32, i64, inline, named, types, u32, u64
from numba_flash.cuda.number import array
from numba_flash.cuda.sm80 import products, sum_dq
from numba_flash.cuda.sm80.arguments import Sizes
from numba_flash.cuda.sm80.load import build_load, build_store
from numba_flash.cuda.sm80.sum_dq import Sum


class Place(NamedTuple):
    """Where a tile of queries is.

    Attributes
    ----------
    b0, b1, head, begin : int
        Its batch element and head, and the first query of its sequence there.
    row0, rows : int
        Its first query, and how many the sequence has.
    number : int
        Of its row block.
    """

    b0: int
    b1: int
    head: int
    begin: int
    row0: int
    rows: int
    number: int


def build(dtype, shape, ordered, options, tile):
    """Kernel ``backward_sm80(do, q, k, v, dk, dv, rows, dq_sum, flags, extras, sizes, scale_log2,
    scale, parameters)`` with its signature and compile options.

    do, q, k, v, dk, dv : (b0, b1, heads, n, head_dim), 16 bits.
    rows : (2, b0, b1, heads, row blocks * BLOCK_M): the lse and delta of each query, as
        `numba_flash.cuda.preprocess` numbers and writes them.
    dq_sum : float32, see `numba_flash.cuda.sm80.sum_dq`.
    flags : one per row block, how many blocks of keys have added to it, and one more, the number of
        the next work item; read only if `ordered`.
    """
    BLOCK_M, BLOCK_N, THREADS = tile.block_m, tile.block_n, tile.threads
    M_TILES, COLUMNS, STAGES = tile.m_tiles, tile.columns, tile.stages
    WARP_KEYS, KEY_ROWS = 16 * M_TILES, 2 * M_TILES
    D, DV = tile.padded(shape.head_dim), tile.padded(shape.head_dim_v)
    SMEM = tile.layout(shape.head_dim, shape.head_dim_v)
    K, V, Q, DO, DS, ROWS = SMEM.k, SMEM.v, SMEM.q, SMEM.do, SMEM.ds, SMEM.rows
    PITCH_K, PITCH_V, PITCH_DS = SMEM.pitch_k, SMEM.pitch_v, SMEM.pitch_ds
    Q_BYTES, DO_BYTES, ROWS_BYTES = BLOCK_M * PITCH_K, BLOCK_M * PITCH_V, 8 * BLOCK_M
    COUNT = COLUMNS // 2  # scores of a tile of 16 keys in registers
    SCORES, PAIRS = M_TILES * COUNT, M_TILES * COUNT // 2
    OUTPUTS_K, OUTPUTS_V = M_TILES * D // 2, M_TILES * DV // 2
    BFLOAT16, TURING, NAN = dtype == "bfloat16", shape.turing, math.nan
    DS_BYTES = BLOCK_N * PITCH_DS
    ORDERED, PACKED, SEQUENCES = ordered, options.packed, options.sequences
    item_of = schedule.build_item(options, True, False, BLOCK_N, BLOCK_M, transposed=True)
    first_block = schedule.build_first_block(PACKED, BLOCK_M)
    place, key_of = fragment.build_key_rows(M_TILES)
    load_k = build_load(BLOCK_N, shape.head_dim, THREADS, place, shape.asynchronous, D)
    load_v = build_load(BLOCK_N, shape.head_dim_v, THREADS, place, shape.asynchronous, DV)
    load_q = build_load(BLOCK_M, shape.head_dim, THREADS, None, shape.asynchronous, D)
    load_do = build_load(BLOCK_M, shape.head_dim_v, THREADS, None, shape.asynchronous, DV)
    kind = products.Kind(BFLOAT16, TURING)
    k_qt = products.build_nt(kind, M_TILES, COLUMNS, D, PITCH_K, PITCH_K, False)
    v_dot = products.build_nt(kind, M_TILES, COLUMNS, DV, PITCH_V, PITCH_V, False)
    p_do = products.build_nn(kind, M_TILES, DV, COLUMNS, PITCH_V)
    ds_q = products.build_nn(kind, M_TILES, D, COLUMNS, PITCH_K)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    pack, _ = fragment.build_pack(PAIRS, BFLOAT16)
    hide_row = softmax.build_hide(COUNT, True)
    put_ds = products.build_put_words(M_TILES, COLUMNS, PITCH_DS)
    put_dk = products.build_put(M_TILES, D, PITCH_K, BFLOAT16)
    put_dv = products.build_put(M_TILES, DV, PITCH_V, BFLOAT16)
    store_dk = build_store(WARP_KEYS, shape.head_dim, shape.wide, key_of, D)
    store_dv = build_store(WARP_KEYS, shape.head_dim_v, shape.wide, key_of, DV)
    add_dq, blocks_before = sum_dq.build(kind, shape, ordered, tile)

    @inline
    def load_rows(target, rows, number):
        """The lse and delta of a row block."""
        thread = i32(cuda.threadIdx.x)
        if thread < BLOCK_M // 2:
            which, chunk = i32(thread // (BLOCK_M // 4)), i32(thread % (BLOCK_M // 4))
            at = u64(i64(number) * (4 * BLOCK_M) + chunk * 16)
            source = u64(ptx.global_address(rows[which]) + at)
            to = u32(target + u32(thread * 16))
            if TURING:
                ptx.store_shared_vector(to, ptx.load_global_words(source))
            else:
                ptx.copy16(to, source, u32(16))

    @inline
    def hide(sT, key, row0, item):
        """Scores that the mask or the end of the keys hides become -inf; most tiles have none."""
        first, row1 = key - key % WARP_KEYS, row0 + COLUMNS
        low, high, keys, queries = item.low, item.high, item.rows, item.columns
        clear = mask.all_visible(first, first + WARP_KEYS, row0, row1, low, high)
        if not clear or first + WARP_KEYS > keys:
            column = i32(row0 + fragment.first_column())
            for r in range(KEY_ROWS):
                start, stop = mask.kv_range(key + r, key + r + 1, queries, low, high)
                if key + r >= keys:
                    stop = start
                hide_row(sT, r, i32(start - column), i32(stop - column))

    @inline
    def recompute_p(sT, lse, scale_log2):
        """(2) P = exp(S - lse)."""
        for j in range(COLUMNS // 8):
            shift = ptx.load_shared_pair(u32(lse + u32(32 * j)))
            for r in range(KEY_ROWS):
                for c in range(2):
                    e = r // 2 * COUNT + 4 * j + 2 * (r % 2) + c
                    sT[e] = ptx.ex2(sT[e] * scale_log2 - shift[c])

    @inline
    def differentiate(dpT, pT, delta):
        """(5) dS = P * (dP - delta), in the place of dP."""
        for j in range(COLUMNS // 8):
            row_delta = ptx.load_shared_pair(u32(delta + u32(32 * j)))
            for r in range(KEY_ROWS):
                for c in range(2):
                    e = r // 2 * COUNT + 4 * j + 2 * (r % 2) + c
                    dpT[e] = pT[e] * (dpT[e] - row_delta[c]) if pT[e] != f32(0) else f32(0)

    @inline
    def claim(smem, flags):
        """Number of this block's work item. If ORDERED, blocks claim them: whom an item waits for
        has been claimed before, by a block at work, however few blocks the GPU has room for.
        """
        number = i32(cuda.blockIdx.x)
        if ORDERED:
            if cuda.threadIdx.x == 0:
                last = u64(flags.shape[0] - 1)
                number = ptx.next_number(u64(ptx.global_address(flags) + u64(4) * last))
                ptx.store_shared(smem, number)
            cuda.syncthreads()
            number = ptx.load_shared(smem)
            cuda.syncthreads()  # everybody has read it
        return number

    @inline
    def release(flags, number):
        """Say that this block has added to a row block, after everybody has."""
        if cuda.threadIdx.x == 0:
            ptx.add_flag(u64(ptx.global_address(flags) + u64(4) * u64(u32(number))), i32(1))

    @inline
    def place_of(item, head, base, at):
        """The `Place` of the tile of queries `at` of a head whose first row block is `base`."""
        b1 = i32(0) if PACKED else item.b1
        row0 = i32(at * BLOCK_M)
        return Place(item.b0, b1, head, item.columns_begin, row0, item.columns, i32(base + at))

    @inline
    def load_tile(smem, slot, do, q, rows, place):
        b0, b1, head, begin = place.b0, place.b1, place.head, place.begin
        to_q, to_do = u32(smem + u32(Q) + slot * u32(Q_BYTES)), u32(smem + u32(DO) + slot * u32(DO_BYTES))
        load_q(to_q, q[b0, b1, head, begin:], place.row0, place.rows)
        load_do(to_do, do[b0, b1, head, begin:], place.row0, place.rows)
        load_rows(u32(smem + u32(ROWS) + slot * u32(ROWS_BYTES)), rows, place.number)

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
        factor = cuda.local.array(KEY_ROWS, f32)

        item = item_of(claim(smem, flags), k.shape, extras, sizes)
        b0, b1, kv_head = item.b0, i32(0) if PACKED else item.b1, item.head
        group, blocks = i32(sizes.group), i32(rows.shape[4] // BLOCK_M)
        head = i32(kv_head * group)
        base = first_block(item.b0, item.b1, head, item.columns_begin, rows[0].shape)
        k_head, v_head = k[b0, b1, kv_head], v[b0, b1, kv_head]
        dk_head, dv_head, stop = dk[b0, b1, kv_head], dv[b0, b1, kv_head], i32(k.shape[3])
        if SEQUENCES:
            k_head, v_head = k_head[item.rows_begin :], v_head[item.rows_begin :]
            if PACKED:
                dk_head, dv_head = dk_head[item.rows_begin :], dv_head[item.rows_begin :]
                stop = item.rows
        warp = i32(cuda.threadIdx.x // 32)
        k_tile, ds = u32(smem + u32(K)), u32(smem + u32(DS))
        k_warp = u32(k_tile + u32(warp * WARP_KEYS * PITCH_K))
        v_warp = u32(smem + u32(V) + u32(warp * WARP_KEYS * PITCH_V))
        ds_warp = u32(ds + u32(warp * WARP_KEYS * PITCH_DS))
        key = i32(item.row0 + warp * WARP_KEYS + cuda.threadIdx.x % 32 // 4 * KEY_ROWS)
        last = i32(item.first + item.count - 1)
        at, this = last, Sum(i32(0), i32(0))
        done, before = this, this
        tiles = i32(group * item.count) if item.columns > 0 else i32(0)
        zero_k(dk_acc)
        zero_v(dv_acc)
        if tiles > 0:
            load_k(k_tile, k_head, item.row0, item.rows)
            load_v(u32(smem + u32(V)), v_head, item.row0, item.rows)
            load_tile(smem, u32(0), do, q, rows, place_of(item, head, base, at))

        for n in range(tiles):
            if not TURING:
                ptx.copy_wait()
            cuda.syncthreads()  # this tile is there; the one before has been read, its dS^T is there
            slot, row0 = u32(n % STAGES), i32(at * BLOCK_M)
            done, this = this, Sum(i32(base + at), blocks_before(item.row0, item.high, at))
            # the next tile is that before, or the last one of the next head
            at = i32(at - 1)
            if at < item.first:
                at, head, base = last, i32(head + 1), i32(base + blocks)
            if STAGES > 1:
                if n + 1 < tiles:
                    load_tile(smem, u32(slot ^ u32(1)), do, q, rows, place_of(item, head, base, at))
                if n > 0:
                    # (7) dQ = dQ + dS K of the tile before
                    add_dq(u32(ds + u32(u32(slot ^ u32(1)) * u32(DS_BYTES))), k_tile, dq_sum, flags, done)
            for part in range(BLOCK_M // COLUMNS):
                q_tile = u32(smem + u32(Q) + slot * u32(Q_BYTES) + u32(part * COLUMNS * PITCH_K))
                do_tile = u32(smem + u32(DO) + slot * u32(DO_BYTES) + u32(part * COLUMNS * PITCH_V))
                lse = u32(smem + u32(ROWS) + slot * u32(ROWS_BYTES) + u32(part * COLUMNS * 4))
                lse += u32(fragment.first_column() * 4)
                # (1) S^T = K Q^T
                k_qt(sT, k_warp, q_tile)
                # (4) dP^T = V dO^T
                v_dot(dpT, v_warp, do_tile)
                # (2) P^T = exp(S^T - lse)
                hide(sT, key, i32(row0 + part * COLUMNS), item)
                recompute_p(sT, lse, scale_log2)
                # (3) dV = dV + P^T dO
                pack(p, sT)
                p_do(dv_acc, p, do_tile)
                # (5) dS^T = P^T * (dP^T - delta)
                differentiate(dpT, sT, u32(lse + u32(4 * BLOCK_M)))
                # (6) dK = dK + dS^T Q
                pack(p, dpT)
                put_ds(u32(ds_warp + slot * u32(DS_BYTES) + u32(part * COLUMNS * 2)), p)
                ds_q(dk_acc, p, q_tile)
            if STAGES == 1:
                cuda.syncthreads()  # dS^T is there; this tile has been read
                if n + 1 < tiles:
                    load_tile(smem, u32(0), do, q, rows, place_of(item, head, base, at))
                # (7) dQ = dQ + dS K
                add_dq(ds, k_tile, dq_sum, flags, this)
                if ORDERED and n > 0:
                    release(flags, done.number)
            elif ORDERED and n > 1:
                release(flags, before.number)
            before = done

        cuda.syncthreads()  # the last dS^T is there
        if STAGES > 1 and tiles > 0:
            slot = u32((tiles - 1) % STAGES)
            add_dq(u32(ds + slot * u32(DS_BYTES)), k_tile, dq_sum, flags, this)
            if ORDERED and tiles > 1:
                release(flags, done.number)
        cuda.syncthreads()  # K and V have been read, the last dQ is added
        if ORDERED and tiles > 0:
            release(flags, this.number)
        scale_k, scale_v = scale, f32(1)
        if item.invalid != 0:
            scale_k, scale_v = f32(NAN), f32(NAN)
        for r in range(KEY_ROWS):
            factor[r] = scale_k
        put_dk(k_warp, dk_acc, factor)
        for r in range(KEY_ROWS):
            factor[r] = scale_v
        put_dv(v_warp, dv_acc, factor)
        cuda.syncwarp()  # all of the warp's keys are there
        first = i32(item.row0 + warp * WARP_KEYS)
        store_dk(k_warp, dk_head, first, stop)
        store_dv(v_warp, dv_head, first, stop)

    signature = types.void(
        *[array(types.uint16, 5)] * 6,
        array(f32, 5),
        array(f32, 5),
        array(i32, 1),
        extras_type(options),
        named(Sizes, i64),
        *(f32, f32),
        parameters_type(options),
    )
    return backward_sm80, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
