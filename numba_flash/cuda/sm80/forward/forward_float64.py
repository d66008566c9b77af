"""Forward pass of float64 on tensor cores: FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1,
one block of threads per block of queries.

As `numba_flash.cuda.sm80.forward.forward`. P does not leave its registers: a product takes its
terms in any order, so it takes those that a lane holds.
"""

import math

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type, parameters_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, f64, i32, i64, inline, types, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.fetch import build_fetch, held
from numba_flash.cuda.score.modify import build_drop, build_modify
from numba_flash.cuda.score.score import Region
from numba_flash.cuda.sm80.block import build_block
from numba_flash.cuda.sm80.config import ForwardConfig
from numba_flash.cuda.sm80.operands import products_float64 as products
from numba_flash.cuda.sm80.operands.float64_tiles import BYTES, padded
from numba_flash.cuda.sm80.operands.load_float64 import build_load
from numba_flash.cuda.work import tile_lists


def build(config: ForwardConfig):
    """Kernel ``forward_sm80(q, k, v, o, lse, extras, scale_log2, low, high, kv_splits,
    parameters)`` with its signature and compile options; there is one of the `kv_splits`.
    """
    dtype, shape, options, tile = config.dtype, config.shape, config.options, config.tile
    write_lse, band = config.write_lse, config.band
    BLOCK_M, BLOCK_N, THREADS = tile.block_m, tile.block_n, tile.threads
    M_TILES, STAGES, TERMS = tile.m_tiles, tile.stages, tile.terms
    ROWS, WARP_ROWS = 2 * M_TILES, 16 * M_TILES
    D, DV = padded(shape.head_dim), padded(shape.head_dim_v)
    PITCH_K, PITCH_V = BYTES * D, BYTES * DV
    K_BYTES, V_BYTES = BLOCK_N * PITCH_K, BLOCK_N * PITCH_V
    K_SMEM = BLOCK_M * PITCH_K
    V_SMEM = K_SMEM + STAGES * K_BYTES
    SCORES, OUTPUTS = BLOCK_N // 2, DV // 2  # registers of a tile of 16 rows
    ALL_SCORES, ALL_OUTPUTS = M_TILES * SCORES, M_TILES * OUTPUTS
    NEG_INF, NAN, LN2 = -math.inf, math.nan, math.log(2.0)
    WRITE_LSE, SEQUENCES, UNROLLED = write_lse, options.sequences, 4  # with 8, D = 128 spills
    MODIFIED, CHANGES, DROPOUT = options.modifies, options.changes, bool(options.dropout)
    MASKED, runs = options.tiled, fragment.runs_of_columns(BLOCK_N)
    HELD = max(1, held(options, runs).words)
    block_of = build_block(options, band != "none", BLOCK_M, BYTES * (D + DV), False)
    load_q = build_load(BLOCK_M, shape.head_dim, D, THREADS, shape.asynchronous, UNROLLED)
    load_k = build_load(BLOCK_N, shape.head_dim, D, THREADS, shape.asynchronous, UNROLLED)
    load_v = build_load(BLOCK_N, shape.head_dim_v, DV, THREADS, shape.asynchronous, UNROLLED)
    scores = products.build_nt(M_TILES, BLOCK_N, D, PITCH_K, TERMS)
    values = products.build_nn(M_TILES, DV, BLOCK_N, PITCH_V, TERMS)
    (zero, _), reset = softmax.build_zero(ALL_OUTPUTS), softmax.build_reset(M_TILES)
    raise_shifts = softmax.build_raise(SCORES, OUTPUTS, M_TILES, arithmetic=softmax.FLOAT64).all
    in_powers = {"exact": CHANGES, "arithmetic": softmax.FLOAT64}
    exponentials = softmax.build_exponentials(SCORES, M_TILES, **in_powers)
    fetch, modify = (
        build_fetch(options, runs, shape.vectors),
        build_modify(dtype, options, runs),
    )
    drop, (list_of, entry_of) = build_drop(options, runs, True), tile_lists.build_access(MASKED)
    hide_row = softmax.build_hide(SCORES, band == "both")
    store = products.build_store(M_TILES, DV, shape.wide)

    @inline
    def hide(s, first, col0, keys, low, high):
        """Scores of the warp's rows, from `first` on, that the mask hides become -inf; most tiles
        have none.
        """
        clear, unclear = mask.clear_range(first, first + WARP_ROWS, BLOCK_N, keys, low, high)
        if col0 < clear or col0 >= unclear:
            row = i32(first + products.first_row())
            column = i32(col0 + fragment.first_column())
            for r in range(ROWS):
                i = i32(row + (r // 2 * 16 + r % 2 * 8))
                start, stop = mask.kv_range(i, i32(i + 1), keys, low, high)
                hide_row(s, r, i32(i32(start) - column), i32(i32(stop) - column))

    @inline
    def load_keys(smem, slot, k_head, col0, keys):
        load_k(u32(smem + u32(K_SMEM) + slot * u32(K_BYTES)), k_head, col0, keys)

    @inline
    def load_values(smem, slot, v_head, col0, keys):
        load_v(u32(smem + u32(V_SMEM) + slot * u32(V_BYTES)), v_head, col0, keys)

    @inline
    def finish(m_i, l_i, inverse, row, x, scale_log2, parameters):
        """(6) 1 / l for O, lse = m + log l; a row that saw nothing has O = 0, lse = -inf."""
        for r in range(ROWS):
            l, i = fragment.row_sum(l_i[r]), i32(row + (r // 2 * 16 + r % 2 * 8))
            if SEQUENCES and i >= x.queries:
                l = f64(0)
            inverse[r] = f64(0) if l == f64(0) else f64(1) / l
            value = f64(NEG_INF)
            if l != f64(0):
                if CHANGES:  # scores are in base e
                    value = m_i[r] + math.log2(l) * f64(LN2)
                else:
                    value = (m_i[r] * scale_log2 + math.log2(l)) * f64(LN2)
            if DROPOUT:
                inverse[r] *= parameters.keep_scale
            if SEQUENCES and x.invalid:
                inverse[r] = f64(NAN)
                value = f64(NAN)
            if WRITE_LSE and i < x.rows and cuda.threadIdx.x % 4 == 0:
                x.lse[index(i)] = value

    @inline
    def weigh(p, row, column, at, parameters):
        """Weights that dropout drops become 0."""
        drop(p, row, column, at, parameters)
        for e in range(ALL_SCORES):
            p[e] = f64(0) if p[e] < f64(0) else p[e]

    def forward_sm80(q, k, v, o, lse, extras, scale_log2, low, high, kv_splits, parameters):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 128))
        # registers of each thread
        s = cuda.local.array(ALL_SCORES, f64)  # fragment of S, then of P
        acc = cuda.local.array(ALL_OUTPUTS, f64)  # of O
        m_i = cuda.local.array(ROWS, f64)  # shifts of the thread's rows
        l_i = cuda.local.array(ROWS, f64)  # its part of their sums
        inverse = cuda.local.array(ROWS, f64)  # what their O has to be multiplied by in the end
        bias_mask = cuda.local.array(HELD, u32)  # of the tile

        x = block_of(q, k, v, o, lse, extras, low, high, kv_splits)
        row0, nq, nk, low, high = x.row0, x.queries, x.keys, x.low, x.high
        start, stop = mask.kv_range(row0, min(i32(row0 + BLOCK_M), nq), nk, low, high)
        first, count = i32(i32(start) // BLOCK_N), i32(0)
        if start < stop and row0 < nq:
            count = i32((i32(stop) + (BLOCK_N - 1)) // BLOCK_N - first)
        seen = list_of(extras, x.at.b0, x.at.b1, x.at.head, i32(row0 // BLOCK_M))
        if MASKED:
            first, count = i32(0), tile_lists.length(seen)
        last, whole = entry_of(seen, i32(first + count - 1))
        col0 = i32(last * BLOCK_N)
        slot = u32(0)
        zero(acc)
        reset(m_i, l_i)
        if count > 0:
            load_q(smem, x.q, row0, nq)
            load_keys(smem, u32(0), x.k, col0, nk)
            if STAGES > 1:
                load_values(smem, u32(0), x.v, col0, nk)
        while count > 0:
            ptx.copy_wait()
            cuda.syncthreads()  # this tile is there; the one before has been read
            count, next0, next_whole = i32(count - 1), i32(col0 - BLOCK_N), whole
            if MASKED:
                following, next_whole = entry_of(seen, i32(first + count - 1))
                next0 = i32(following * BLOCK_N)
            if STAGES == 1:
                load_values(smem, slot, x.v, col0, nk)
            elif count > 0:
                load_keys(smem, slot ^ u32(1), x.k, next0, nk)
                load_values(smem, slot ^ u32(1), x.v, next0, nk)
            # (1) S = Q K^T
            own = i32(ptx.thread_here() // 32 * WARP_ROWS)  # anew for every tile, for registers
            q_warp = u32(smem + u32(own * PITCH_K))
            if MODIFIED:
                region = Region(row0, col0, nq, nk, low, high)
                row = i32(row0 + own + products.first_row())
                column = i32(col0 + fragment.first_column())
                fetch(bias_mask, row, column, region, x.at, whole, extras)
            scores(s, q_warp, u32(smem + u32(K_SMEM) + slot * u32(K_BYTES)))
            if STAGES == 1:
                ptx.copy_wait()
                cuda.syncthreads()  # V is there; K has been read
                if count > 0:
                    load_keys(smem, slot, x.k, next0, nk)
            if MODIFIED:  # the options, on S
                modify(s, s, bias_mask, row, column, region, x.at, whole, parameters)
            else:
                hide(s, i32(row0 + own), col0, nk, low, high)
            # (2) m_i, O = alpha O
            raise_shifts(s, acc, m_i, l_i, scale_log2)
            # (3) P, (4) l_i
            exponentials(s, m_i, l_i, scale_log2)
            if DROPOUT:
                weigh(s, row, column, x.at, parameters)
            # (5) O += P V
            values(acc, s, u32(smem + u32(V_SMEM) + slot * u32(V_BYTES)))
            if STAGES > 1:
                slot = slot ^ u32(1)
            col0, whole = next0, next_whole

        row = i32(row0 + ptx.thread_here() // 32 * WARP_ROWS + products.first_row())
        finish(m_i, l_i, inverse, row, x, scale_log2, parameters)
        column = fragment.first_column()
        store(products.Stored(x.o, acc, inverse, row, column, x.rows))

    signature = types.void(
        *[array(f64, 5)] * 4,
        array(f64, 4),
        extras_type(options, ("tiles",)),
        *(f64, i64, i64, i64),
        parameters_type(options),
    )
    return forward_sm80, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
