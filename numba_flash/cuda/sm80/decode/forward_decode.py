"""Forward pass of few queries with many keys. Its time is that of reading K and V.

All warps of a block have the same rows: the queries of all heads that read the same keys. Each warp
has keys of its own (`numba_flash.cuda.sm80.decode.decode_steps`), copies them and their values into
its own part of the tiles, and waits for other warps only once, after all keys. It asks for the next
tile as soon as it has read one.

The copies of a thread form groups: one for the keys and one for the values of each tile. The first
group also has Q; groups behind the last tile are empty. 2 STAGES - 1 groups are under way when the
next one is waited for.
"""

import math
from typing import NamedTuple

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type, parameters_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, types, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.fetch import build_fetch, held
from numba_flash.cuda.score.fragment import place_of_key
from numba_flash.cuda.score.modify import build_drop, build_modify
from numba_flash.cuda.score.score import Region
from numba_flash.cuda.sm80.block import build_block
from numba_flash.cuda.sm80.config import ForwardConfig
from numba_flash.cuda.sm80.decode import decode_steps
from numba_flash.cuda.sm80.decode.decode_join import build_join
from numba_flash.cuda.sm80.load_pages import build_load_decode
from numba_flash.cuda.sm80.operands import products
from numba_flash.cuda.sm80.tiles import padded, pitch
from numba_flash.cuda.work.pages import build_missing


class KeyTiles(NamedTuple):
    """Tiles of keys: the first one, and how many there are."""

    first: int
    count: int


def signature_of(out_dtype, options, kv_splits):
    """Of the kernel; o and lse are float32 of `kv_splits` of the keys, if there are any, and the
    arrays of results come behind them.
    """
    floats = kv_splits or out_dtype == "float32"
    return types.void(
        *[array(types.uint16, 5)] * 3,
        array(f32 if floats else types.uint16, 5),
        array(f32, 4),
        array(out_dtype, 5),
        array(f32, 4),
        array(u32, 1),
        extras_type(options, ()),
        *(f32, i64, i64, i64),
        parameters_type(options),
    )


def build(config: ForwardConfig):
    """Kernel ``forward_decode(q, k, v, o, lse, whole_o, whole_lse, arrivals, extras, scale_log2,
    low, high, kv_splits, parameters)`` with its signature and compile options.

    o, lse : results; if there are parts of the keys float32 over each, one after the other.
    whole_o, whole_lse, arrivals : if parts are joined, so many at the same time, what the last
        block of those that share rows makes of them; see
        `numba_flash.cuda.sm80.decode.decode_join`.
    """
    dtype, shape, options, tile = config.dtype, config.shape, config.options, config.tile
    write_lse, band, kv_splits = config.write_lse, config.band, config.kv_splits
    out_dtype, joined = config.out, config.joined
    BLOCK_N, THREADS, STAGES = tile.block_n, tile.threads, tile.stages
    WARP_N, GROUP, M_TILES, Q_REGISTERS = tile.warp_n, tile.group, tile.m_tiles, tile.q_registers
    ROWS, BLOCK_M = 2 * tile.m_tiles, tile.block_m
    D, DV = padded(shape.head_dim), padded(shape.head_dim_v)
    PITCH_K, PITCH_V = (tile.key_rows(x).bytes for x in shape[:2])
    K_SMEM = tile.q_bytes(shape.head_dim, shape.head_dim_v)
    V_SMEM = K_SMEM + STAGES * BLOCK_N * PITCH_K
    K_BYTES, V_BYTES = BLOCK_N * PITCH_K, BLOCK_N * PITCH_V
    SCORES, OUTPUTS = WARP_N // 2, DV // 2  # registers of a tile of 16 rows
    ALL_SCORES, ALL_OUTPUTS = M_TILES * SCORES, M_TILES * OUTPUTS
    P_WORDS, Q_WORDS = ALL_SCORES // 2, M_TILES * D // 4 if Q_REGISTERS else 1
    NEG_INF, NAN, LN2 = -math.inf, math.nan, math.log(2.0)
    LAZY = softmax.LAZIER if options.changes else softmax.LAZY
    WRITE_LSE, KV_SPLITS, JOINED = write_lse or kv_splits, kv_splits, joined > 0
    SEQUENCES, PAGED, ASYNCHRONOUS = options.sequences, bool(options.paged), shape.asynchronous
    MODIFIED, CHANGES, DROPOUT = options.modifies, options.changes, bool(options.dropout)
    FAR = bool(options.score_mod or options.bias)  # a cap keeps scores from it
    FLOATS = kv_splits or out_dtype == "float32"
    block_of = build_block(options, band != "none", BLOCK_M, 2 * (D + DV), kv_splits, GROUP)
    query_of, head_of, stop_of = fragment.build_row(GROUP)
    missing = build_missing(options)
    runs = fragment.runs_of_queries(M_TILES, WARP_N, GROUP)
    HELD = max(1, held(options, runs).words)
    commit, meet = decode_steps.build_steps(tile, ASYNCHRONOUS)
    load_q, gather, store_rows = decode_steps.build_rows(
        tile, shape, FLOATS, kv_splits, dtype == "bfloat16"
    )
    find, load_k, load_v, FOUND = build_load_decode(tile, shape, place_of_key, options)
    scores, _, pack, values = products.build_products(dtype, shape, tile, D, DROPOUT)
    hold_q = products.build_hold(M_TILES, D, pitch(D))
    (zero, _), reset = softmax.build_zero(ALL_OUTPUTS), softmax.build_reset(M_TILES)
    raise_shifts = softmax.build_raise(SCORES, OUTPUTS, M_TILES, LAZY).all
    RAISED = softmax.raised(dtype == "bfloat16", LAZY)
    exponentials = softmax.build_exponentials(SCORES, M_TILES, FAR, raised=RAISED)
    fetch, drop = build_fetch(options, runs, shape.vectors), build_drop(options, runs)
    modify = build_modify(dtype, options, runs, False, shape.turing)
    hide_row = softmax.build_hide(SCORES, band == "both", True)
    wait_for_one = ptx.copy_wait_but(2 * STAGES - 1)
    join = build_join(tile, shape.head_dim_v, out_dtype, write_lse, joined)

    @inline
    def hide(s, row, col0, clear, unclear, keys, low, high):
        """Scores that the mask hides become -inf; tiles from `clear` to `unclear` have none."""
        if col0 < clear or col0 >= unclear:
            column = i32(col0 + fragment.first_key())
            for r in range(ROWS):
                i = query_of(i32(row + (r // 2 * 16 + r % 2 * 8)))
                start, stop = mask.kv_range(i, i32(i + 1), keys, low, high)
                hide_row(s, r, i32(i32(start) - column), i32(i32(stop) - column))

    @inline
    def tiles_of(x, kv_splits):
        """The `KeyTiles` of keys that rows of the block see, and of these its part."""
        query0, query1 = query_of(x.row0), stop_of(min(i32(x.row0 + BLOCK_M), x.queries))
        start, stop = mask.kv_range(query0, query1, x.keys, x.low, x.high)
        start, stop = i32(start), i32(stop)
        first, count = i32(u32(start) // u32(BLOCK_N)), i32(0)
        if start < stop and x.row0 < x.queries:
            count = i32(i32(u32(i32(stop + (BLOCK_N - 1))) // u32(BLOCK_N)) - first)
        if KV_SPLITS:
            share = i32(u32(count + kv_splits - 1) // u32(kv_splits))
            before = min(i32(x.kv_split * share), count)
            first, count = i32(first + before), i32(min(share, count - before))
        return KeyTiles(first, count)

    @inline
    def wait():
        """Until the oldest group of all lanes is there."""
        if ASYNCHRONOUS:
            wait_for_one()
        meet()

    @inline
    def finish(m_i, l_i, inverse, row, x, missed, scale_log2, parameters):
        """(6) 1 / l for O, lse = m + log l; a row that saw nothing has O = 0, lse = -inf."""
        invalid = x.invalid
        if PAGED:  # what does not exist has not been read; now all threads hear of it
            invalid = invalid or cuda.syncthreads_or(missed) != 0
        for r in range(ROWS):
            l, i = fragment.row_sum(l_i[r]), i32(row + (r // 2 * 16 + r % 2 * 8))
            if SEQUENCES and i >= x.queries:
                l = f32(0)
            inverse[r], value = f32(0), f32(NEG_INF)
            if l != f32(0):
                inverse[r] = ptx.rcp(l)
                power = ptx.lg2(l) - f32(RAISED)
                if CHANGES:  # scores are in base e
                    value = m_i[r] + power * f32(LN2)
                else:
                    value = (m_i[r] * scale_log2 + power) * f32(LN2)
            if DROPOUT:
                inverse[r] *= f32(parameters.keep_scale)
            if SEQUENCES and invalid:
                inverse[r] = f32(NAN)
                value = f32(NAN)
            # all warps have the same
            if WRITE_LSE and i < x.rows and cuda.threadIdx.x < 32 and cuda.threadIdx.x % 4 == 0:
                x.lse[index(head_of(i)), index(query_of(i))] = value

    def forward_decode(
        q, k, v, o, lse, whole_o, whole_lse, arrivals, extras, scale_log2, low, high, kv_splits,
        parameters,
    ):  # fmt: skip
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        # registers of each thread
        s = cuda.local.array(ALL_SCORES, f32)  # fragment of S, then of P
        p = cuda.local.array(P_WORDS, u32)  # of P, two elements of 16 bits each
        q_words = cuda.local.array(Q_WORDS, u32)  # of Q
        acc = cuda.local.array(ALL_OUTPUTS, f32)  # of O
        bias_mask = cuda.local.array(HELD, u32)  # of the tile
        found = cuda.local.array(FOUND, u32)  # pages of the tile that is asked for next
        m_i = cuda.local.array(ROWS, f32)  # shifts of the thread's rows
        l_i = cuda.local.array(ROWS, f32)  # its part of their sums
        inverse = cuda.local.array(ROWS, f32)  # what their O has to be multiplied by in the end
        factor_of_warp = cuda.local.array(ROWS, f32)  # the warp's share of that

        x = block_of(q, k, v, o, lse, extras, low, high, kv_splits)
        at, row0, nq, nk, low, high = x.at, x.row0, x.queries, x.keys, x.low, x.high
        missed = missing(k, extras, at, nk, x.kv_split, kv_splits if KV_SPLITS else 1)
        first, count = tiles_of(x, kv_splits)
        key0 = i32(i32(cuda.threadIdx.x // 32) * WARP_N)  # of the warp in each tile
        k_smem = u32(smem + u32(K_SMEM) + u32(key0 * PITCH_K))
        v_smem = u32(smem + u32(V_SMEM) + u32(key0 * PITCH_V))
        row = i32(row0 + cuda.threadIdx.x % 32 // 4)
        query0, query1 = query_of(row0), stop_of(row0 + BLOCK_M)
        clear, unclear = mask.clear_range(query0, query1, WARP_N, nk, low, high)
        clear, unclear = i32(clear), i32(unclear)
        col0 = i32((first + count - 1) * BLOCK_N + key0)  # of the warp, in the last tile first
        column, slot = i32(col0 + fragment.first_key()), u32(0)
        zero(acc)
        reset(m_i, l_i)
        if count > 0:
            for n in range(STAGES):
                next0 = i32(col0 - n * BLOCK_N)
                if n < count:
                    find(found, x.k, next0, nk)
                    load_k(u32(k_smem + u32(n * K_BYTES)), x.k, next0, nk, found)
                if n == 0:
                    load_q(smem, x.q, row0, nq)
                commit()
                if n < count:
                    load_v(u32(v_smem + u32(n * V_BYTES)), x.v, next0, nk, found)
                commit()
            if MODIFIED:
                region = Region(row0, col0, nq, nk, low, high)
                fetch(bias_mask, row, column, region, at, False, extras)
            wait()  # for the first keys, and Q
            cuda.syncthreads()  # Q of all threads is there
            if Q_REGISTERS:
                hold_q(q_words, smem)
        while count > 0:
            k_tile = u32(k_smem + slot * u32(K_BYTES))
            v_tile = u32(v_smem + slot * u32(V_BYTES))
            next0 = i32(col0 - STAGES * BLOCK_N)  # what takes the place of this tile
            if count > STAGES:
                find(found, x.k, next0, nk)
            # (1) S = Q K^T
            wait()
            scores(s, q_words if Q_REGISTERS else smem, k_tile)
            meet()  # all lanes have read K
            if count > STAGES:
                load_k(k_tile, x.k, next0, nk, found)
            commit()
            if MODIFIED:  # the options, on S
                region = Region(row0, col0, nq, nk, low, high)
                modify(s, s, bias_mask, row, column, region, at, False, parameters)
                following = i32(col0 - BLOCK_N)
                keys = i32(nk) if count > 1 else i32(following)
                region = Region(row0, following, nq, keys, low, high)
                key = i32(following + fragment.first_key())
                fetch(bias_mask, row, key, region, at, False, extras)  # of the next tile
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
            wait()
            values(acc, p, v_tile)
            meet()  # all lanes have read V
            if count > STAGES:
                load_v(v_tile, x.v, next0, nk, found)
            commit()
            count, col0 = i32(count - 1), i32(col0 - BLOCK_N)
            column = i32(col0 + fragment.first_key())
            if STAGES > 1:
                slot = slot + u32(1) if slot < u32(STAGES - 1) else u32(0)

        gather(smem, m_i, l_i, factor_of_warp, scale_log2)
        finish(m_i, l_i, inverse, row, x, missed, scale_log2, parameters)
        for r in range(ROWS):
            inverse[r] *= factor_of_warp[r]
        store_rows(smem, x.o, acc, inverse, row0, x.rows)
        if JOINED:
            join(smem, o, lse, whole_o, whole_lse, arrivals, x, kv_splits)

    signature = signature_of(out_dtype, options, kv_splits)
    return forward_decode, signature, {"launch_bounds": (THREADS, tile.min_blocks)}
