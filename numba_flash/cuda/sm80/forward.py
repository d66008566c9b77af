"""Forward pass on tensor cores since Turing: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1,
one block of threads per block of queries.

Each warp owns 16 or 32 rows of the block. Where there is room for two tiles of K and V, the next
ones are copied while the products and the softmax of this one run, and one barrier per tile says
that they are there, and that everybody has done with what they overwrite. Else V is copied during Q
K^T, and the next K during the rest, with a barrier for each.

Copies are ordered behind products that do not wait for them: instructions are issued in order, and
a tensor core that has work leaves five of six turns to others. (Ordered before Q K^T, the whole
pass took 5 % longer with D = 64, 11 % with D = 128.)
"""

import math
from typing import NamedTuple

from numba_flash import mask
from numba_flash.cuda import fragment, ptx, softmax, tile_lists
from numba_flash.cuda.arguments import extras_type, parameters_type
from numba_flash.cuda.fetch import build_fetch, held
from numba_flash.cuda.fragment import place_of_key
from numba_flash.cuda.lang import cuda, f32, i32, i64, inline, types, u32
from numba_flash.cuda.modify import build_drop, build_modify
from numba_flash.cuda.number import array, index
from numba_flash.cuda.schedule import build_query_block
from numba_flash.cuda.score import Head, Region
from numba_flash.cuda.sequence import build_sequence
from numba_flash.cuda.sm80 import products
from numba_flash.cuda.sm80.load import build_load, build_store, build_store_floats
from numba_flash.cuda.sm80.tiles import padded, pitch


class Tiles(NamedTuple):
    """Tiles of keys: the number of the first, and how many there are; with a mask those of a list
    (`numba_flash.cuda.tile_lists`).
    """

    first: int
    count: int


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
    # columns of Q and K after which V is loaded, if there is no room for that before
    BEGIN = D if STAGES > 1 or Q_REGISTERS else padded(D // 4)
    K_BYTES, V_BYTES = BLOCK_N * PITCH_K, BLOCK_N * PITCH_V
    SCORES, OUTPUTS = BLOCK_N // 2, DV // 2  # registers of a tile of 16 rows
    ALL_SCORES, ALL_PAIRS, ALL_OUTPUTS = M_TILES * SCORES, M_TILES * SCORES // 2, M_TILES * OUTPUTS
    Q_WORDS = M_TILES * D // 4 if Q_REGISTERS else 1
    BFLOAT16, NEG_INF, NAN, LN2 = dtype == "bfloat16", -math.inf, math.nan, math.log(2.0)
    WRITE_LSE, PARTS, BANDED, MASKED = write_lse, parts, band != "none", options.mask
    SEQUENCES, PACKED, ASYNCHRONOUS = options.sequences, options.packed, shape.asynchronous
    MODIFIED, CHANGES, DROPOUT = options.modifies, options.changes, bool(options.dropout)
    query_block_of = build_query_block(options, BANDED, BLOCK_M, 2 * (D + DV))
    runs = fragment.runs_of_queries(M_TILES, BLOCK_N)
    HELD = max(1, held(options, runs).words)
    sequence_of = build_sequence(options)
    load_q = build_load(BLOCK_M, shape.head_dim, THREADS, None, shape.asynchronous)
    load_k = build_load(BLOCK_N, shape.head_dim, THREADS, place_of_key, shape.asynchronous)
    load_v = build_load(BLOCK_N, shape.head_dim_v, THREADS, place_of_key, shape.asynchronous)
    kind = products.Kind(BFLOAT16, shape.turing)
    scores = products.build_nt(kind, M_TILES, BLOCK_N, BEGIN, PITCH_K, PITCH_K, Q_REGISTERS)
    more_scores = products.build_nt(
        kind, M_TILES, BLOCK_N, D - BEGIN, PITCH_K, PITCH_K, False, fresh=False
    )
    values = products.build_nn(kind, M_TILES, DV, BLOCK_N, PITCH_V)
    hold_q = products.build_hold(M_TILES, D, PITCH_K)
    (zero, _), reset = softmax.build_zero(ALL_OUTPUTS), softmax.build_reset(M_TILES)
    pack, _ = fragment.build_pack(ALL_PAIRS, BFLOAT16, shape.turing)
    raise_shifts = softmax.build_raise(SCORES, OUTPUTS, M_TILES)
    exponentials = softmax.build_exponentials(SCORES, M_TILES, CHANGES)
    fetch, drop = build_fetch(options, runs, shape.vectors), build_drop(options, runs)
    modify = build_modify(dtype, options, runs, False, shape.turing)
    list_of, listed = tile_lists.build_access(options.mask)
    hide_row = softmax.build_hide(SCORES, band == "both", True)
    put = products.build_put(M_TILES, DV, PITCH_V, *kind)
    store_floats = build_store_floats(M_TILES, shape.head_dim_v)
    store = build_store(WARP_ROWS, shape.head_dim_v, shape.wide)

    @inline
    def hide(s, row, col0, clear, unclear, keys, low, high):
        """Scores that the mask hides become -inf; tiles from `clear` to `unclear` have none."""
        if col0 < clear or col0 >= unclear:
            column = i32(col0 + fragment.first_key())
            for r in range(ROWS):
                i = i32(row + (r // 2 * 16 + r % 2 * 8))
                start, stop = mask.kv_range(i, i32(i + 1), keys, low, high)
                hide_row(s, r, i32(i32(start) - column), i32(i32(stop) - column))

    @inline
    def log_sum(m, l, scale_log2):
        if CHANGES:  # scores are in base e
            return m + ptx.lg2(l) * f32(LN2)
        return (m * scale_log2 + ptx.lg2(l)) * f32(LN2)

    @inline
    def load_keys(smem, slot, k_head, col0, keys):
        load_k(u32(smem + u32(K_SMEM) + slot * u32(K_BYTES)), k_head, col0, keys)

    @inline
    def load_values(smem, slot, v_head, col0, keys):
        load_v(u32(smem + u32(V_SMEM) + slot * u32(V_BYTES)), v_head, col0, keys)

    @inline
    def tiles_of(row0, nq, nk, low, high, part, parts, seen):
        """The `Tiles` of keys that rows from row0 on see; `seen` is their list, if there is one."""
        start, stop = mask.kv_range(row0, min(i32(row0 + BLOCK_M), nq), nk, low, high)
        start, stop = i32(start), i32(stop)
        first, count = i32(u32(start) // u32(BLOCK_N)), i32(0)
        if MASKED:
            first, count = i32(0), tile_lists.length(seen)
        elif start < stop and row0 < nq:
            count = i32(i32(u32(i32(stop + (BLOCK_N - 1))) // u32(BLOCK_N)) - first)
        if PARTS:
            share = (count + parts - 1) // parts
            before = min(part * share, count)
            first, count = i32(first + before), i32(min(share, count - before))
        return Tiles(first, count)

    @inline
    def finish(m_i, l_i, inverse, lse, row, queries, rows, invalid, scale_log2, parameters):
        """(6) 1 / l for O, lse = m + log l; a row that saw nothing has O = 0, lse = -inf."""
        for r in range(ROWS):
            l, i = fragment.row_sum(l_i[r]), i32(row + (r // 2 * 16 + r % 2 * 8))
            if SEQUENCES and i >= queries:
                l = f32(0)
            inverse[r] = f32(0) if l == f32(0) else ptx.rcp(l)
            value = log_sum(m_i[r], l, scale_log2) if l != f32(0) else f32(NEG_INF)
            if DROPOUT:
                inverse[r] *= f32(parameters.keep_scale)
            if SEQUENCES and invalid:
                inverse[r] = f32(NAN)
                value = f32(NAN)
            if WRITE_LSE and i < rows and cuda.threadIdx.x % 4 == 0:
                lse[index(i)] = value

    def forward_sm80(q, k, v, o, lse, extras, scale_log2, low, high, parts, parameters):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        s = cuda.local.array(ALL_SCORES, f32)  # fragment of S, then of P
        p = cuda.local.array(ALL_PAIRS, u32)  # of P, two elements of 16 bits each
        q_words = cuda.local.array(Q_WORDS, u32)  # of Q
        acc = cuda.local.array(ALL_OUTPUTS, f32)  # of O
        bias_mask = cuda.local.array(HELD, u32)  # of the tile
        m_i = cuda.local.array(ROWS, f32)  # shifts of the thread's rows
        l_i = cuda.local.array(ROWS, f32)  # its part of their sums
        inverse = cuda.local.array(ROWS, f32)  # what their O has to be multiplied by in the end

        warp = i32(cuda.threadIdx.x // 32)
        nq, nk, heads = i32(q.shape[3]), i32(k.shape[3]), i32(q.shape[2])
        number, part = i32(cuda.blockIdx.x), i32(0)
        if PARTS:
            number, part = i32(number // parts), i32(number % parts)
        b0, b1, h, block = query_block_of(number, extras, q.shape, nk)
        at = Head(b0, b1, b0 * q.shape[1] + b1, h, heads)
        invalid, rows = False, nq
        if SEQUENCES:
            sequence = sequence_of(extras, b0, b1, nq, nk)
        if PACKED:
            b1 = 0
        kv_head = i32(u32(h) // u32(u32(heads) // u32(k.shape[2])))
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
        seen = list_of(extras, b0, b1, h, block)
        first, count = tiles_of(row0, nq, nk, low, high, part, parts, seen)
        last, whole = listed(seen, i32(first + count - 1))
        next_whole = whole

        q_warp = u32(smem + u32(warp * WARP_ROWS * PITCH_K))
        warp0 = i32(row0 + warp * WARP_ROWS)
        row = i32(warp0 + cuda.threadIdx.x % 32 // 4)
        clear, unclear = mask.clear_range(warp0, warp0 + WARP_ROWS, BLOCK_N, nk, low, high)
        clear, unclear = i32(clear), i32(unclear)
        col0 = i32(last * BLOCK_N)
        column = i32(col0 + fragment.first_key())
        slot = u32(0)
        zero(acc)
        reset(m_i, l_i)
        if count > 0:
            load_q(smem, q_head, row0, nq)
            load_keys(smem, u32(0), k_head, col0, nk)
            if STAGES > 1:
                load_values(smem, u32(0), v_head, col0, nk)
            if MODIFIED:
                region = Region(row0, col0, nq, nk, low, high)
                fetch(bias_mask, row, column, region, at, whole, extras)
            if Q_REGISTERS:
                if ASYNCHRONOUS:
                    ptx.copy_wait()
                cuda.syncthreads()
                hold_q(q_words, q_warp)
        while count > 0:
            if ASYNCHRONOUS:
                ptx.copy_wait()
            cuda.syncthreads()  # this tile is there; the one before has been read
            # (1) S = Q K^T; what is loaded meanwhile does not keep it from starting
            k_tile = u32(smem + u32(K_SMEM) + slot * u32(K_BYTES))
            scores(s, q_words if Q_REGISTERS else q_warp, k_tile)
            count, next0 = i32(count - 1), i32(col0 - BLOCK_N)
            if MASKED:
                following, next_whole = listed(seen, i32(first + count - 1))
                next0 = i32(following * BLOCK_N)
            keys = i32(nk) if count > 0 else i32(-BLOCK_N)  # none before the first tile
            if STAGES == 1:
                load_values(smem, slot, v_head, col0, nk)
                if BEGIN < D:
                    more_scores(s, u32(q_warp + u32(2 * BEGIN)), u32(k_tile + u32(2 * BEGIN)))
                if ASYNCHRONOUS:
                    ptx.copy_wait()
                cuda.syncthreads()  # V is there; K has been read
                load_keys(smem, slot, k_head, next0, keys)
            else:
                load_keys(smem, slot ^ u32(1), k_head, next0, keys)
                load_values(smem, slot ^ u32(1), v_head, next0, keys)
            if MODIFIED:  # the options, on S
                region = Region(row0, col0, nq, nk, low, high)
                modify(s, s, bias_mask, row, column, region, at, whole, parameters)
                region = Region(row0, next0, nq, keys, low, high)
                key = i32(next0 + fragment.first_key())
                fetch(bias_mask, row, key, region, at, next_whole, extras)  # of the next tile
            else:
                hide(s, row, col0, clear, unclear, nk, low, high)
            # (2) m_i, O = alpha O
            raise_shifts(s, acc, m_i, l_i, scale_log2)
            # (3) P, (4) l_i
            exponentials(s, m_i, l_i, scale_log2)
            if DROPOUT:
                drop(s, row, column, at, parameters)
            # (5) O += P V
            pack(p, s)
            values(acc, p, u32(smem + u32(V_SMEM) + slot * u32(V_BYTES)))
            if STAGES > 1:
                slot = slot ^ u32(1)
            col0, column, whole = next0, i32(next0 + fragment.first_key()), next_whole

        finish(m_i, l_i, inverse, lse_head, row, nq, rows, invalid, scale_log2, parameters)
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
        extras_type(options, ("tiles",)),
        *(f32, i64, i64, i64),
        parameters_type(options),
    )
    return forward_sm80, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
