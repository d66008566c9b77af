"""Forward pass on tensor cores since Turing: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1,
one block of threads per block of queries.

Each warp owns 16 or 32 rows of the block. If shared memory has room for two tiles of K and of V,
the next tiles are copied during the products and the softmax of this one. One barrier per tile then
says that the copies have arrived, and that all warps have read what the next copies overwrite.
Otherwise V is copied during Q K^T, and the next K during the rest, with a barrier for each.

Copies are issued after the products that do not depend on them: a warp issues its instructions in
order, and a busy tensor core leaves five of six issue slots free. (Copies before Q K^T made the
pass 5 % longer at D = 64, 11 % at D = 128.)
"""

import math
from typing import NamedTuple

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import FP16X2 as FP16X2_EXTRAS
from numba_flash.cuda.arguments import Centred, extras_type, parameters_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, types, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.fetch import build_fetch, held
from numba_flash.cuda.score.fragment import place_of_key
from numba_flash.cuda.score.modify import build_drop, build_modify
from numba_flash.cuda.score.score import Region
from numba_flash.cuda.score.softcap import build_is_rough, build_powers
from numba_flash.cuda.score.softmax import NEG_INF, RAISED_P
from numba_flash.cuda.sm80.block import build_block
from numba_flash.cuda.sm80.config import ForwardConfig
from numba_flash.cuda.sm80.forward.share import build_share
from numba_flash.cuda.sm80.load import build_load, build_store_floats
from numba_flash.cuda.sm80.load_pages import build_load_keys
from numba_flash.cuda.sm80.load_relative import build_relative
from numba_flash.cuda.sm80.operands import products
from numba_flash.cuda.sm80.tiles import padded, pitch
from numba_flash.cuda.work import tile_lists
from numba_flash.cuda.work.pages import build_missing

NAN, LN2 = math.nan, math.log(2.0)


def signature_of(options, planes, floats, of_mask):
    """Of the kernel, which reads `planes` float32 or 16 bits, and writes `floats` or 16 bits."""
    return types.void(
        *[array(u32 if planes else types.uint16, 5)] * 3,
        array(f32 if floats else types.uint16, 5),
        array(f32, 4),
        extras_type(options, of_mask, FP16X2_EXTRAS if planes else ()),
        *(f32, i64, i64, i64),
        parameters_type(options),
    )


class KeyTiles(NamedTuple):
    """Tiles of keys: the number of the first, and how many there are; with a mask those of a list
    (`numba_flash.cuda.work.tile_lists`).
    """

    first: int
    count: int


def build(config: ForwardConfig):
    """Kernel ``forward_sm80(q, k, v, o, lse, extras, scale_log2, low, high, kv_splits,
    parameters)`` with its signature and compile options.
    """
    dtype, shape, options, tile = config.dtype, config.shape, config.options, config.tile
    BLOCK_M, BLOCK_N, WARP_N, WAYS = tile.block_m, tile.block_n, tile.warp_n, tile.ways
    M_TILES, STAGES, Q_REGISTERS = tile.m_tiles, tile.stages, tile.q_registers
    ROWS, WARP_ROWS, THREADS = 2 * M_TILES, 16 * M_TILES, tile.threads
    D, DV = padded(shape.head_dim), tile.columns(shape.head_dim_v) // WAYS  # of a warp
    FP16X2, (COLUMNS_K, COLUMNS_V) = shape.planes > 0, shape.columns  # of a row of a tile
    ALL_V = tile.columns(COLUMNS_V)  # with those that no warp may lack
    PITCH_K, PITCH_V = pitch(COLUMNS_K), pitch(ALL_V)
    K_SMEM = BLOCK_M * max(PITCH_K, PITCH_V)
    V_SMEM = K_SMEM + STAGES * BLOCK_N * PITCH_K
    # columns of Q and K after which V is loaded, if there is no room for that before
    BEGIN = D if STAGES > 1 or Q_REGISTERS or FP16X2 else padded(D // 4)
    K_BYTES, V_BYTES = BLOCK_N * PITCH_K, BLOCK_N * PITCH_V
    SCORES, OUTPUTS = WARP_N // 2, DV // 2  # registers of a tile of 16 rows
    ALL_SCORES, ALL_OUTPUTS = M_TILES * SCORES, M_TILES * OUTPUTS
    P_WORDS, Q_WORDS = ALL_SCORES // (1 if FP16X2 else 2), M_TILES * D // 4 if Q_REGISTERS else 1
    CENTRED = Centred.of(options) if FP16X2 else Centred(False, False)
    LAZY = softmax.LAZIER if options.changes and not FP16X2 else softmax.LAZY
    RAISED = RAISED_P if FP16X2 else softmax.raised(dtype == "bfloat16", LAZY)
    LOWERED, SHIFTED, FLOATS = 2.0**-RAISED, CENTRED.keys, config.kv_splits or FP16X2
    WRITE_LSE, KV_SPLITS, MASKED = config.write_lse, config.kv_splits, options.tiled
    SEQUENCES, PAGED, ASYNCHRONOUS = options.sequences, bool(options.paged), shape.asynchronous
    MODIFIED, CHANGES, DROPOUT = options.modifies, options.changes, bool(options.dropout)
    FAR = bool(options.score_mod or options.bias)  # a cap keeps scores from it
    key_bytes = 2 * (D + DV * WAYS) * max(1, shape.planes)
    block_of = build_block(options, config.band != "none", BLOCK_M, key_bytes, KV_SPLITS)
    missing, runs = build_missing(options), fragment.runs_of_queries(M_TILES, WARP_N)
    HELD = max(1, held(options, runs).words)
    load_q = build_load(BLOCK_M, COLUMNS_K, THREADS, None, ASYNCHRONOUS)
    load_k = build_load_keys(BLOCK_N, COLUMNS_K, THREADS, place_of_key, ASYNCHRONOUS, options)
    of_v = BLOCK_N, COLUMNS_V, THREADS, place_of_key, ASYNCHRONOUS, options
    load_v = build_load_keys(*of_v, ALL_V)
    of_products = dtype, shape, tile, BEGIN, DROPOUT, not options.relative
    scores, more_scores, pack, values = products.build_products(*of_products)
    load_relative, begin_sums = build_relative(tile, shape, options.relative)
    hold_q = products.build_hold(M_TILES, D, PITCH_K)
    (zero, _), reset = softmax.build_zero(ALL_OUTPUTS), softmax.build_reset(M_TILES)
    raising = softmax.build_raise(SCORES, OUTPUTS, M_TILES, LAZY)
    exponentials = softmax.build_exponentials(SCORES, M_TILES, FAR, FP16X2, RAISED, apart=FP16X2)
    fetch, drop = build_fetch(options, runs, shape.vectors), build_drop(options, runs)
    POWERS = bool(options.softcap) and dtype == "bfloat16" and not FAR and WAYS == 1
    modify = build_modify(dtype, options, runs, False, shape.turing, powers=POWERS)
    is_rough, powers = build_is_rough(POWERS), build_powers(SCORES, M_TILES)
    list_of, entry_of = tile_lists.build_access(MASKED)
    hide_row = softmax.build_hide(SCORES, config.band == "both", True)
    store_floats = build_store_floats(M_TILES, DV, CENTRED.values)
    share = build_share(tile, shape, dtype == "bfloat16", raising, values, store_floats)
    raise_shifts, values, add_sums, store_floats, store = share

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
    def times(s, factor):
        for e in range(ALL_SCORES):
            s[e] *= factor

    @inline
    def log_sum(m, l, scale_log2):
        power = ptx.lg2(l * f32(LOWERED))
        if CHANGES:  # scores are in base e
            return m + power * f32(LN2)
        return (m * scale_log2 + power) * f32(LN2)

    @inline
    def load_keys(smem, slot, k_head, col0, keys):
        load_k(u32(smem + u32(K_SMEM) + slot * u32(K_BYTES)), k_head, col0, keys)

    @inline
    def load_values(smem, slot, v_head, col0, keys):
        load_v(u32(smem + u32(V_SMEM) + slot * u32(V_BYTES)), v_head, col0, keys)

    @inline
    def tiles_of(row0, nq, nk, low, high, part, kv_splits, seen):
        """The `KeyTiles` that rows from row0 on see; `seen` is their list, if there is one."""
        start, stop = mask.kv_range(row0, min(i32(row0 + BLOCK_M), nq), nk, low, high)
        start, stop = i32(start), i32(stop)
        first, count = i32(u32(start) // u32(BLOCK_N)), i32(0)
        if MASKED:
            first, count = i32(0), tile_lists.length(seen)
        elif start < stop and row0 < nq:
            count = i32(i32(u32(i32(stop + (BLOCK_N - 1))) // u32(BLOCK_N)) - first)
        if KV_SPLITS:
            share = (count + kv_splits - 1) // kv_splits
            before = min(part * share, count)
            first, count = i32(first + before), i32(min(share, count - before))
        return KeyTiles(first, count)

    @inline
    def finish(m_i, l_i, inverse, row, first, x, missed, scale_log2, extras, parameters):
        """(6) 1 / l for O, lse = m + log l; a row that saw nothing has O = 0, lse = -inf. The
        `first` warp of those that have the row writes that.
        """
        invalid = x.invalid
        if PAGED:  # what does not exist has not been read; now all threads hear of it
            invalid = invalid or cuda.syncthreads_or(missed) != 0
        for r in range(ROWS):
            l, i = fragment.row_sum(l_i[r]), i32(row + (r // 2 * 16 + r % 2 * 8))
            if SEQUENCES and i >= x.queries:
                l = f32(0)
            inverse[r] = f32(0) if l == f32(0) else ptx.rcp(l)
            value = log_sum(m_i[r], l, scale_log2) if l != f32(0) else f32(NEG_INF)
            if FP16X2:
                inverse[r] *= extras.factors[index(x.at.b0), index(x.b1), index(x.kv_head), 2]
            if SHIFTED and i < x.queries:
                shifts = extras.shifts[index(x.at.b0), index(x.b1), index(x.at.head)]
                value += shifts[index(x.q0 + i)]
            if DROPOUT:
                inverse[r] *= f32(parameters.keep_scale)
            if SEQUENCES and invalid:
                inverse[r] = f32(NAN)
                value = f32(NAN)
            if WRITE_LSE and first and i < x.rows and cuda.threadIdx.x % 4 == 0:
                x.lse[index(i)] = value

    def forward_sm80(q, k, v, o, lse, extras, scale_log2, low, high, kv_splits, parameters):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        s = cuda.local.array(ALL_SCORES, f32)  # fragment of S, then of P
        p = cuda.local.array(P_WORDS, u32)  # of P, two elements of 16 bits each
        q_words = cuda.local.array(Q_WORDS, u32)  # of Q
        acc = cuda.local.array(ALL_OUTPUTS, f32)  # of O
        bias_mask = cuda.local.array(HELD, u32)  # of the tile
        m_i = cuda.local.array(ROWS, f32)  # shifts of the thread's rows
        l_i = cuda.local.array(ROWS, f32)  # its part of their sums
        inverse = cuda.local.array(ROWS, f32)  # what their O has to be multiplied by in the end

        warp = i32(cuda.threadIdx.x // 32)
        x = block_of(q, k, v, o, lse, extras, low, high, kv_splits)
        at, row0, nq, nk, low, high = x.at, x.row0, x.queries, x.keys, x.low, x.high
        missed = missing(k, extras, at, nk, x.kv_split, kv_splits if KV_SPLITS else 1)
        seen = list_of(extras, at.b0, at.b1, at.head, i32(row0 // BLOCK_M))
        first, count = tiles_of(row0, nq, nk, low, high, x.kv_split, kv_splits, seen)
        last, whole = entry_of(seen, i32(first + count - 1))
        next_whole = whole

        row_warp, key_warp = i32(warp // WAYS), i32(warp % WAYS)
        q_warp = u32(smem + u32(row_warp * WARP_ROWS * PITCH_K))
        warp0 = i32(row0 + row_warp * WARP_ROWS)
        row = i32(warp0 + cuda.threadIdx.x % 32 // 4)
        clear, unclear = mask.clear_range(warp0, warp0 + WARP_ROWS, WARP_N, nk, low, high)
        clear, unclear = i32(clear), i32(unclear)
        col0, key0 = i32(last * BLOCK_N), i32(key_warp * WARP_N)  # of the tile, of the warp in it
        column, slot = i32(col0 + key0 + fragment.first_key()), u32(0)
        if FP16X2:
            of_head = extras.factors[index(at.b0), index(x.b1), index(x.kv_head)]
            factor = of_head[0] * of_head[1]
            scale_log2 = scale_log2 if CHANGES else scale_log2 * factor
        zero(acc)
        reset(m_i, l_i)
        rough = POWERS and is_rough(f32(parameters.softcap))  # the cap is the shift
        for r in range(ROWS if POWERS else 0):
            m_i[r] = f32(parameters.softcap) if rough else m_i[r]
        if count > 0:
            load_q(smem, x.q, row0, nq)
            load_keys(smem, u32(0), x.k, col0, nk)
            load_relative(smem, u32(0), extras, at.head, row0, col0, True)
            if STAGES > 1:
                load_values(smem, u32(0), x.v, col0, nk)
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
            k_tile = u32(smem + u32(K_SMEM) + slot * u32(K_BYTES) + u32(key0 * PITCH_K))
            begin_sums(s, smem, slot, i32(row - row0), key0)
            scores(s, q_words if Q_REGISTERS else q_warp, k_tile)
            count, next0 = i32(count - 1), i32(col0 - BLOCK_N)
            if MASKED:
                following, next_whole = entry_of(seen, i32(first + count - 1))
                next0 = i32(following * BLOCK_N)
            keys = i32(nk) if count > 0 else i32(-BLOCK_N)  # none before the first tile
            if STAGES == 1:
                load_values(smem, slot, x.v, col0, nk)
                if BEGIN < D:
                    more_scores(s, u32(q_warp + u32(2 * BEGIN)), u32(k_tile + u32(2 * BEGIN)))
                if ASYNCHRONOUS:
                    ptx.copy_wait()
                cuda.syncthreads()  # V is there; K has been read
                load_keys(smem, slot, x.k, next0, keys)
                load_relative(smem, slot, extras, at.head, row0, next0, count > 0)
            else:
                load_keys(smem, slot ^ u32(1), x.k, next0, keys)
                load_relative(smem, slot ^ u32(1), extras, at.head, row0, next0, count > 0)
                load_values(smem, slot ^ u32(1), x.v, next0, keys)
            if FP16X2 and CHANGES:
                times(s, factor)
            if MODIFIED:  # the options, on S
                region = Region(row0, col0, nq, nk, low, high)
                modify(s, s, bias_mask, row, column, region, at, whole, parameters)
                region = Region(row0, next0, nq, keys, low, high)
                key = i32(next0 + key0 + fragment.first_key())
                fetch(bias_mask, row, key, region, at, next_whole, extras)  # of the next tile
            else:
                hide(s, row, i32(col0 + key0), clear, unclear, nk, low, high)
            if POWERS and rough:
                powers(s, l_i)  # (3) P, (4) l_i
            else:
                # (2) m_i, O = alpha O
                raise_shifts(s, acc, m_i, l_i, scale_log2, smem)
                # (3) P, (4) l_i
                exponentials(s, m_i, l_i, scale_log2)
            if DROPOUT:
                drop(s, row, column, at, parameters)
            # (5) O += P V
            pack(p, s)
            v_tile = u32(smem + u32(V_SMEM) + slot * u32(V_BYTES) + u32(key0 * PITCH_V))
            values(acc, p, v_tile, smem)
            if STAGES > 1:
                slot = slot ^ u32(1)
            col0, whole = next0, next_whole
            column = i32(col0 + key0 + fragment.first_key())

        if ASYNCHRONOUS:
            ptx.copy_wait()  # also zeros of what would be the next tile
        add_sums(l_i, smem)
        finish(m_i, l_i, inverse, row, key_warp == 0, x, missed, scale_log2, extras, parameters)
        if FLOATS:
            centre = x.lse  # nobody reads it
            if FP16X2:
                centre = extras.centres[1, index(at.b0), index(x.b1), index(x.kv_head)]
                for r in range(ROWS):
                    m_i[r] = f32(0 if inverse[r] == f32(0) else 1)
            store_floats(x.o, acc, inverse, row, x.rows, centre, m_i)
        else:
            cuda.syncthreads()  # Q has been read
            store(smem, x, acc, inverse)

    signature = signature_of(options, FP16X2, FLOATS, ("tiles",))
    return forward_sm80, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
