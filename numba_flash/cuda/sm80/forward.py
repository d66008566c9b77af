"""Forward pass on tensor cores since Turing: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1,
one block of threads per block of queries.

Each warp owns 16 or 32 rows of the block. The next tiles of K and V are copied while the products
and the softmax of this one run; one barrier per tile says that they are there, and that everybody
has done with what they overwrite.
"""

import math
from numba_flash import mask
from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.arguments import extras_type, parameters_type
from numba_flash.cuda.lang import cuda, f32, i32, i64, inline, types, u32
from numba_flash.cuda.number import array, index
from numba_flash.cuda.schedule import build_row_block
from numba_flash.cuda.sequence import build_sequence
from numba_flash.cuda.sm80 import products
from numba_flash.cuda.sm80.load import build_load, build_store, build_store_floats
from numba_flash.cuda.sm80.tiles import padded, pitch


def build(dtype, shape, write_lse, band, parts, options, tile):
    """Kernel ``forward_sm80(q, k, v, o, lse, extras, scale_log2, low, high, parts, parameters)``
    with its signature and compile options.
    """
    BLOCK_M, BLOCK_N, THREADS = tile.block_m, tile.block_n, tile.threads
    M_TILES, STAGES, Q_REGISTERS = tile.m_tiles, tile.stages, tile.q_registers
    ROWS, WARP_ROWS = 2 * M_TILES, 16 * M_TILES
    D, DV = padded(shape.head_dim), padded(shape.head_dim_v)
    PITCH_K, PITCH_V = pitch(shape.head_dim), pitch(shape.head_dim_v)
    K_SMEM = BLOCK_M * max(PITCH_K, PITCH_V)
    V_SMEM = K_SMEM + STAGES * BLOCK_N * PITCH_K
    K_BYTES, V_BYTES = BLOCK_N * PITCH_K, BLOCK_N * PITCH_V
    SCORES, OUTPUTS = BLOCK_N // 2, DV // 2  # registers of a tile of 16 rows
    ALL_SCORES, ALL_PAIRS, ALL_OUTPUTS = M_TILES * SCORES, M_TILES * SCORES // 2, M_TILES * OUTPUTS
    Q_WORDS = M_TILES * D // 4 if Q_REGISTERS else 1
    BFLOAT16, NEG_INF, NAN, LN2 = dtype == "bfloat16", -math.inf, math.nan, math.log(2.0)
    WRITE_LSE, PARTS, BANDED = write_lse, parts, band != "none"
    SEQUENCES, PACKED, ASYNCHRONOUS = options.sequences, options.packed, shape.asynchronous
    row_block_of = build_row_block(options, False, BLOCK_M)
    sequence_of = build_sequence(options)
    load_q = build_load(BLOCK_M, shape.head_dim, THREADS, None, shape.asynchronous)
    load_k = build_load(BLOCK_N, shape.head_dim, THREADS, fragment.place_of_key, shape.asynchronous)
    load_v = build_load(BLOCK_N, shape.head_dim_v, THREADS, fragment.place_of_key, shape.asynchronous)
    kind = products.Kind(BFLOAT16, shape.turing)
    scores = products.build_nt(kind, M_TILES, BLOCK_N, D, PITCH_K, PITCH_K, Q_REGISTERS)
    values = products.build_nn(kind, M_TILES, DV, BLOCK_N, PITCH_V)
    hold_q = products.build_hold(M_TILES, D, PITCH_K)
    zero, _ = softmax.build_zero(ALL_OUTPUTS)
    pack, _ = fragment.build_pack(ALL_PAIRS, BFLOAT16)
    reset, online = softmax.build_reset(M_TILES), softmax.build_online(SCORES, M_TILES)
    rescale = softmax.build_rescale(OUTPUTS, M_TILES)
    hide_row = softmax.build_hide(SCORES, band == "both", True)
    put = products.build_put(M_TILES, DV, PITCH_V, BFLOAT16)
    store_floats = build_store_floats(M_TILES, shape.head_dim_v)
    store = build_store(WARP_ROWS, shape.head_dim_v, shape.wide)

    @inline
    def hide(s, row, col0, keys, low, high):
        """Scores that the mask hides become -inf; most tiles have none."""
        first, col1 = row - row % WARP_ROWS, col0 + BLOCK_N
        if col1 > keys or not mask.all_visible(first, first + WARP_ROWS, col0, col1, low, high):
            column = i32(col0 + fragment.first_key())
            for r in range(ROWS):
                i = row + r // 2 * 16 + r % 2 * 8
                start, stop = mask.kv_range(i, i + 1, keys, low, high)
                hide_row(s, r, i32(start - column), i32(stop - column))

    @inline
    def load_tile(smem, slot, k_head, v_head, col0, keys):
        load_k(u32(smem + u32(K_SMEM) + slot * u32(K_BYTES)), k_head, col0, keys)
        load_v(u32(smem + u32(V_SMEM) + slot * u32(V_BYTES)), v_head, col0, keys)

    def forward_sm80(q, k, v, o, lse, extras, scale_log2, low, high, parts, parameters):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        s = cuda.local.array(ALL_SCORES, f32)  # fragment of S, then of P
        p = cuda.local.array(ALL_PAIRS, u32)  # of P, two elements of 16 bits each
        q_words = cuda.local.array(Q_WORDS, u32)  # of Q
        acc = cuda.local.array(ALL_OUTPUTS, f32)  # of O
        m_i = cuda.local.array(ROWS, f32)  # shifts of the thread's rows
        l_i = cuda.local.array(ROWS, f32)  # its part of their sums
        alpha = cuda.local.array(ROWS, f32)  # what their O has to be multiplied by

        warp = i32(cuda.threadIdx.x // 32)
        nq, nk, heads = i32(q.shape[3]), i32(k.shape[3]), i32(q.shape[2])
        number, part = i32(cuda.blockIdx.x), i32(0)
        if PARTS:
            number, part = i32(number // parts), i32(number % parts)
        b0, b1, h, block = row_block_of(number, extras, nq, heads, i32(q.shape[1]))
        invalid, rows = False, nq
        if SEQUENCES:
            sequence = sequence_of(extras, b0, b1, nq, nk)
        if PACKED:
            b1 = 0
        kv_head = i32(h) // (heads // i32(k.shape[2]))
        q_head, k_head, v_head = q[b0, b1, h], k[b0, b1, kv_head], v[b0, b1, kv_head]
        o_head, lse_head = o[part * q.shape[0] + b0, b1, h], lse[part * q.shape[0] + b0, b1, h]
        row0, low, high = i32(block * BLOCK_M), i32(low), i32(high)
        if SEQUENCES:
            nq, nk = i32(sequence.queries), i32(sequence.keys)
            q_head = q_head[sequence.q0 : sequence.q0 + nq]
            k_head = k_head[sequence.k0 : sequence.k0 + nk]
            v_head = v_head[sequence.k0 : sequence.k0 + nk]
            low, high = i32(low + sequence.shift), i32(high + sequence.shift)
            invalid = sequence.invalid
            if PACKED:
                rows = nq
                o_head = o_head[sequence.q0 : sequence.q0 + nq]
                lse_head = lse_head[sequence.q0 : sequence.q0 + nq]
        start, stop = mask.kv_range(row0, min(i32(row0 + BLOCK_M), nq), nk, low, high)
        first, count = i32(start // BLOCK_N), i32(0)
        if start < stop and row0 < nq:
            count = i32((stop + BLOCK_N - 1) // BLOCK_N) - first
        if PARTS:
            share = (count + parts - 1) // parts
            first, count = i32(first + part * share), i32(max(0, min(share, count - part * share)))

        q_warp = u32(smem + u32(warp * WARP_ROWS * PITCH_K))
        row = i32(row0 + warp * WARP_ROWS + cuda.threadIdx.x % 32 // 4)
        col0 = i32((first + count - 1) * BLOCK_N)
        if count > 0:
            load_q(smem, q_head, row0, nq)
            load_tile(smem, u32(0), k_head, v_head, col0, nk)
        zero(acc)
        reset(m_i, l_i)
        for t in range(count):
            if ASYNCHRONOUS:
                ptx.copy_wait()
            cuda.syncthreads()  # this tile is there; the one before has been read
            slot = u32(t % STAGES)
            if STAGES > 1:
                if t + 1 < count:
                    load_tile(smem, u32(slot ^ u32(1)), k_head, v_head, i32(col0 - BLOCK_N), nk)
            if Q_REGISTERS:
                if t == 0:
                    hold_q(q_words, q_warp)
            # (1) S = Q K^T
            k_tile = u32(smem + u32(K_SMEM) + slot * u32(K_BYTES))
            scores(s, q_words if Q_REGISTERS else q_warp, k_tile)
            hide(s, row, col0, nk, low, high)
            # (2) m_i, (3) P, (4) l_i
            online(s, m_i, l_i, alpha, scale_log2)
            # (5) O = alpha O + P V
            rescale(acc, alpha)
            pack(p, s)
            values(acc, p, u32(smem + u32(V_SMEM) + slot * u32(V_BYTES)))
            col0 = i32(col0 - BLOCK_N)
            if STAGES == 1:
                cuda.syncthreads()  # this tile has been read
                if t + 1 < count:
                    load_tile(smem, u32(0), k_head, v_head, col0, nk)

        # (6) O = O / l, lse = m + log l; a row that saw nothing has O = 0, lse = -inf
        inverse = alpha
        for r in range(ROWS):
            l, i = fragment.row_sum(l_i[r]), row + r // 2 * 16 + r % 2 * 8
            if SEQUENCES and i >= nq:
                l = f32(0)
            inverse[r] = f32(0) if l == f32(0) else ptx.rcp(l)
            value = (m_i[r] * scale_log2 + ptx.lg2(l)) * f32(LN2) if l != f32(0) else f32(NEG_INF)
            if SEQUENCES and invalid:
                inverse[r] = f32(NAN)
                value = f32(NAN)
            if WRITE_LSE and i < rows and cuda.threadIdx.x % 4 == 0:
                lse_head[index(i)] = value
        if PARTS:
            store_floats(o_head, acc, inverse, row, rows)
        else:
            o_warp = u32(smem + u32(warp * WARP_ROWS * PITCH_V))
            cuda.syncthreads()  # Q has been read
            put(o_warp, acc, inverse)
            cuda.syncwarp()  # all of the warp's rows are there
            store(o_warp, o_head, i32(row0 + warp * WARP_ROWS), rows)

    signature = types.void(
        *[array(types.uint16, 5)] * 3,
        array(f32 if parts else types.uint16, 5),
        array(f32, 4),
        extras_type(options),
        *(f32, i64, i64, i64),
        parameters_type(options),
    )
    return forward_sm80, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
