"""Forward pass on tensor cores since Ampere with a bias that batch elements share: blocks keep the
bias of their queries in shared memory, and go through the batch elements.

Nothing is read for a score but its bias, from shared memory, four at a time, into the registers
that the product is added to (`numba_flash.cuda.kept_bias`). Each warp owns 16 rows. The next tile
of keys, often of the next batch element, is copied while this one is worked on.
"""

import math

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.arguments import KeptScales, UnitSizes, extras_type
from numba_flash.cuda.kept_bias import build_keep
from numba_flash.cuda.lang import cuda, f32, i32, i64, inline, named, types, u32, u64
from numba_flash.cuda.number import array, index
from numba_flash.cuda.score import LOG2E
from numba_flash.cuda.sm80 import products
from numba_flash.cuda.sm80.load import build_load
from numba_flash.cuda.sm80.tiles import ROWS, WARP, padded, pitch
from numba_flash.cuda.units import build_units

NEG_INF, LN2 = -math.inf, math.log(2.0)


@inline
def any_of_warp(me, word):
    """True if a thread of the warp has a word that is not 0."""
    return cuda.any_sync(fragment.ALL_LANES, word != u32(0)) != 0


def build(dtype, shape, write_lse, options, tile):
    """Kernel ``forward_kept_sm80(q, k, v, o, lse, extras, sizes, scales)`` with its signature and
    compile options.

    shape : `numba_flash.cuda.sm80.arguments.Shape`; the bias is read by two keys at a time, or one.
    sizes, scales : `UnitSizes` and `KeptScales` of `numba_flash.cuda.arguments`.
    """
    head_dim, head_dim_v = shape.head_dim, shape.head_dim_v
    BLOCK_M, BLOCK_N, TILES, THREADS = tile.block_m, tile.block_n, tile.tiles, tile.threads
    D, DV, BFLOAT16 = padded(head_dim), padded(head_dim_v), dtype == "bfloat16"
    PITCH_K, WARP_ROWS, CHUNKS = pitch(D), ROWS, head_dim_v // 8
    K_BYTES, V_BYTES = BLOCK_N * PITCH_K, BLOCK_N * pitch(DV)
    Q_SMEM = tile.kept_bytes
    K_SMEM = Q_SMEM + BLOCK_M * PITCH_K
    V_SMEM = K_SMEM + 2 * K_BYTES
    SCORES, PAIRS, OUTPUTS, Q_WORDS = BLOCK_N // 2, BLOCK_N // 4, DV // 2, D // 4
    WRITE_LSE, MOST = write_lse, softmax.LAZIER
    first_of, unit_of, after = build_units(BLOCK_M)
    fill, begin, add = build_keep(options, shape.vectors, tile, 0, WARP, any_of_warp)
    load_q = build_load(BLOCK_M, head_dim, THREADS, None, True)
    load_k = build_load(BLOCK_N, head_dim, THREADS, None, True)
    load_v = build_load(BLOCK_N, head_dim_v, THREADS, None, True)
    kind = products.Kind(BFLOAT16, False)
    of_scores = kind, 1, BLOCK_N, D, PITCH_K, PITCH_K, True
    scores, more_scores = (products.build_nt(*of_scores, fresh=fresh) for fresh in (True, False))
    values = products.build_nn(kind, 1, DV, BLOCK_N, pitch(DV))
    hold_q = products.build_hold(1, D, PITCH_K)
    all_of_them = softmax.build_raise(SCORES, OUTPUTS, 1, MOST).all
    exponentials = softmax.build_exponentials(SCORES, 1, True)
    pack, pack2 = fragment.build_pack(PAIRS, BFLOAT16)
    zero, zero_rows = softmax.build_zero(OUTPUTS)

    @inline
    def row_of(x, warp):
        """A thread's first row of a unit."""
        return i32(x.row0 + warp * WARP_ROWS + cuda.threadIdx.x % 32 // 4)

    @inline
    def put_row(row, acc, factor, r):
        """This thread's columns of row r of O times a factor, to memory."""
        mine = u64(ptx.global_address(row) + u64(fragment.first_column() * 2))
        for j in range(CHUNKS):
            x, y = acc[4 * j + 2 * r] * factor, acc[4 * j + 2 * r + 1] * factor
            ptx.store_global(u64(mine + u64(16 * j)), (pack2(x, y),))

    @inline
    def finish(x, warp, acc, m_i, l_i, o, lse, unit):
        """(6) O = O / l, lse = m + log l, stored; a row that saw nothing has O = 0, lse = -inf.
        `unit` leads from scores to base e.
        """
        inverse = cuda.local.array(2, f32)  # registers: 1 / l of the thread's rows
        row = row_of(x, warp)
        for r in range(2):
            l, i = fragment.row_sum(l_i[r]), i32(row + 8 * r)
            inverse[r] = f32(0) if l == f32(0) else ptx.rcp(l)
            if WRITE_LSE and i < x.rows and cuda.threadIdx.x % 4 == 0:
                value = m_i[r] * unit + ptx.lg2(l) * f32(LN2) if l != f32(0) else f32(NEG_INF)
                lse[index(x.b0), index(x.b1), index(x.head), index(i)] = value
        zero_rows(acc, inverse)  # 0 * NaN is not 0
        for r in range(2):
            i = i32(row + 8 * r)
            if i < x.rows:
                o_row = o[index(x.b0), index(x.b1), index(x.head), index(i)]
                put_row(o_row, acc, inverse[r], r)

    @inline
    def load_keys(smem, k_head, v_head, t, slot, keys):
        """A tile of K and V."""
        col0 = i32(t * BLOCK_N)
        load_k(u32(smem + u32(K_SMEM) + slot * u32(K_BYTES)), k_head, col0, keys)
        load_v(u32(smem + u32(V_SMEM) + slot * u32(V_BYTES)), v_head, col0, keys)

    @inline
    def load_queries(smem, q, x):
        load_q(u32(smem + u32(Q_SMEM)), q[index(x.b0), index(x.b1), index(x.head)], x.row0, x.rows)

    def forward_kept_sm80(q, k, v, o, lse, extras, sizes, scales):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S, then of P
        p = cuda.local.array(PAIRS, u32)  # of P, two elements of 16 bits each
        q_words = cuda.local.array(Q_WORDS, u32)  # of Q
        acc = cuda.local.array(OUTPUTS, f32)  # of O
        m_i = cuda.local.array(2, f32)  # shifts of the thread's two rows
        l_i = cuda.local.array(2, f32)  # its part of their sums
        warp = i32(cuda.threadIdx.x // 32)
        q_warp = u32(smem + u32(Q_SMEM + warp * WARP_ROWS * PITCH_K))
        number = first_of(cuda.blockIdx.x, sizes)
        stop = first_of(cuda.blockIdx.x + 1, sizes)
        keys, inverse, group = i32(sizes.keys), scales.inverse, u32(sizes.group)
        x, t, slot = unit_of(number, sizes), i32(0), u32(0)
        k_head = k[index(x.b0), index(x.b1), index(u32(x.head) // group)]
        v_head = v[index(x.b0), index(x.b1), index(u32(x.head) // group)]
        load_queries(smem, q, x)
        load_keys(smem, k_head, v_head, t, slot, keys)
        begins = fill(smem, warp, row_of(x, warp), x, extras, keys, inverse)
        zero(acc)
        softmax.reset(m_i, l_i)
        while number < stop:
            ptx.copy_wait()
            cuda.syncthreads()  # this tile is there; the one before has been read, and Q
            if t == 0:
                hold_q(q_words, q_warp)
            here, t, number_next = x, i32(t + 1), number
            ends = t == TILES
            if ends:
                number_next, t = i32(number + 1), i32(0)
                x = after(here, number_next, sizes)
                if number_next < stop:
                    k_head = k[index(x.b0), index(x.b1), index(u32(x.head) // group)]
                    v_head = v[index(x.b0), index(x.b1), index(u32(x.head) // group)]
                    load_queries(smem, q, x)
            if number_next < stop:
                load_keys(smem, k_head, v_head, t, slot ^ u32(1), keys)
            # (1) S = bias / scale + Q K^T
            of_tile = i32(TILES - 1) if ends else i32(t - 1)
            k_tile = u32(smem + u32(K_SMEM) + slot * u32(K_BYTES))
            if begins != u32(0):
                begin(s, smem, warp, of_tile, inverse)
                more_scores(s, q_words, k_tile)
            else:
                scores(s, q_words, k_tile)
                add(s, smem, warp, of_tile, scales.scale)
            # (2) m_i, O = alpha O, (3) P, (4) l_i
            scale_log2 = scales.scale_log2 if begins != u32(0) else f32(LOG2E)
            all_of_them(s, acc, m_i, l_i, scale_log2)
            exponentials(s, m_i, l_i, scale_log2)
            # (5) O += P V
            pack(p, s)
            values(acc, p, u32(smem + u32(V_SMEM) + slot * u32(V_BYTES)))
            slot = slot ^ u32(1)
            if ends:
                unit = scales.scale if begins != u32(0) else f32(1)
                finish(here, warp, acc, m_i, l_i, o, lse, unit)
                zero(acc)
                softmax.reset(m_i, l_i)
                if x.b1 == 0 and number_next < stop:
                    begins = fill(smem, warp, row_of(x, warp), x, extras, keys, inverse)
            number = number_next

    signature = types.void(
        *[array(types.uint16, 5)] * 4,
        array(f32, 4),
        extras_type(options),
        named(UnitSizes, i64),
        named(KeptScales, f32),
    )
    return forward_kept_sm80, signature, {"launch_bounds": (tile.threads, 1)}
