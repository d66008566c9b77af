"""Forward pass of few queries of float32 and float64 with many keys, on GPUs that copy while they
compute: each key is read once, by a warp whose lanes share its columns.

All warps of a block have the same rows, the queries of all heads that read the same keys, and each
has keys of its own. A lane has its columns of all rows, of Q and of O, in registers, and copies
them of K and V itself, several steps ahead; so it waits for nobody's copies, and each number of K
and V is read from shared memory but once.

Of a product q k a lane has the terms of its columns. In `fold` lanes give each other halves of what
they have until each has the sum of one score; weights come back by way of shared memory.
"""

import math

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.number import ACCUMULATOR, array, index
from numba_flash.cuda.runtime.lang import cuda, i32, i64, inline, types, u32, u64
from numba_flash.cuda.score import fragment
from numba_flash.cuda.score.fragment import ALL_LANES
from numba_flash.cuda.score.score import build_exponential
from numba_flash.cuda.simt import lanes, lanes_rows
from numba_flash.cuda.simt.lanes_tiles import CHUNK, WARP


def build(dtype, head_dim, head_dim_v, write_lse, options, tile):
    """Kernel ``decode_lanes(q, k, v, o, lse, extras, scale_log2, low, high, kv_splits)`` with its
    signature and compile options; arguments as in `simt.decode`.
    """
    ROWS, STEP_N, STAGES, COLS = tile.rows, tile.step_n, tile.stages, tile.columns
    KEYS, LANES, WARP_N = tile.keys, tile.lanes, tile.warp_n
    PER_CHUNK, SIZE, HEAD_DIM, SCORES = tile.per_chunk, tile.size, head_dim, tile.scores
    APART, DOUBLE = tile.lanes // tile.scores, tile.size == 8
    PART, WEIGHTS = tile.layout.part, tile.layout.weights
    STEP_BYTES, OUTPUTS, ACC = 2 * PART, tile.rows * tile.columns, ACCUMULATOR[dtype]
    NEG_INF = -math.inf
    block_of, steps_of = lanes_rows.build_block(tile, options)
    query_of, head_of, stop_of = fragment.build_row(tile.group)
    copy_k, copy_v = (lanes.build_copy(tile, d) for d in (head_dim, head_dim_v))
    scores, values = lanes.build_products(dtype, tile)
    fold = lanes.build_fold(dtype, SCORES, LANES // 2)
    over_keys = lanes.build_over_keys(tile)
    finish = lanes_rows.build_finish(dtype, tile, head_dim_v, write_lse, options)
    power, _ = build_exponential(dtype, options)
    wait_for_one = ptx.copy_wait_but(STAGES - 1)

    @inline
    def address_of(x, key0):
        """Of a lane's columns of a key."""
        lane = u64(u32(cuda.threadIdx.x % LANES) * u32(CHUNK))
        return u64(u64(ptx.global_address(x) + lane) + u64(i64(key0) * x.strides[0]))

    @inline
    def hold_q(q_held, x):
        """A lane's columns of all rows."""
        lane = i32(cuda.threadIdx.x % LANES)
        for r in range(ROWS):
            i = i32(x.row0 + r)
            head, query = index(head_of(i)), index(query_of(i))
            for c in range(COLS):
                d = lane * PER_CHUNK + c // PER_CHUNK * (LANES * PER_CHUNK) + c % PER_CHUNK
                q_held[r * COLS + c] = ACC(0)
                if i < x.queries and d < HEAD_DIM:
                    q_held[r * COLS + c] = x.q[head, query, index(d)]

    @inline
    def rescale(acc, alpha):
        for r in range(ROWS):
            of_row = cuda.shfl_sync(ALL_LANES, alpha, r * APART)
            for c in range(COLS):
                acc[r * COLS + c] *= of_row

    @inline
    def put(at, p):
        if DOUBLE:
            ptx.store_shared_float64(at, p)
        else:
            ptx.store_shared(at, i32(ptx.as_uint32(p)))

    def decode_lanes(q, k, v, o, lse, extras, scale_log2, low, high, kv_splits):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        q_held = cuda.local.array(OUTPUTS, ACC)  # its columns of Q
        acc = cuda.local.array(OUTPUTS, ACC)  # of O
        s = cuda.local.array(SCORES, ACC)  # its part of scores

        x = block_of(q, k, v, o, lse, extras, low, high, kv_splits)
        nk = x.keys
        first, count = steps_of(x, i32(kv_splits))
        lane, warp = i32(cuda.threadIdx.x % WARP), i32(cuda.threadIdx.x // WARP)
        own, number = i32(lane % LANES), i32(lane % LANES // APART)
        row, key = i32(number % ROWS), i32(number // ROWS)  # of the lane's score
        ahead = i32(lane // LANES * KEYS)  # of its columns: the first key of a step
        ring = u32(smem + u32(warp * (STAGES * STEP_BYTES)) + u32(lane * CHUNK))
        p_warp = u32(smem + u32(WEIGHTS) + u32(warp * (WARP_N * ROWS * SIZE)))
        p_own = u32(p_warp + u32((i32(ahead + key) * ROWS + row) * SIZE))
        p_keys = u32(p_warp + u32(ahead * (ROWS * SIZE)))
        query0, query1 = query_of(x.row0), stop_of(i32(x.row0 + ROWS))
        clear, unclear = mask.clear_range(query0, query1, WARP_N, nk, x.low, x.high)
        clear, unclear = i32(clear), i32(unclear)
        i = query_of(i32(x.row0 + row))
        start, stop = mask.kv_range(i, i32(i + 1), nk, x.low, x.high)
        start, stop = i32(start), i32(stop)
        col0, slot = i32(first * STEP_N + warp * WARP_N), i32(0)
        # of what is asked for next: its place, and how many keys are left
        k_at, v_at = address_of(x.k, i32(col0 + ahead)), address_of(x.v, i32(col0 + ahead))
        k_step, v_step, left = u64(x.k.strides[0]), u64(x.v.strides[0]), i32(nk - col0 - ahead)
        m_i, l_i = ACC(NEG_INF), ACC(0)  # of the lane's row: shift, and its part of the sum
        for n in range(OUTPUTS):
            acc[n] = ACC(0)
        for n in range(STAGES):
            if n < count:
                at = u32(ring + u32(n * STEP_BYTES))
                copy_k(at, k_at, k_step, left)
                copy_v(u32(at + u32(PART)), v_at, v_step, left)
            ptx.copy_commit()
            k_at, v_at = u64(k_at + k_step * u64(STEP_N)), u64(v_at + v_step * u64(STEP_N))
            left = i32(left - STEP_N)
        hold_q(q_held, x)
        while count > 0:
            at = u32(ring + u32(slot * STEP_BYTES))
            wait_for_one()
            # (1) S = Q K^T
            scores(s, q_held, at)
            fold(s)
            score = s[0] * scale_log2
            edge, hidden = col0 < clear or col0 >= unclear, False
            if edge:
                j = i32(col0 + ahead + key)
                hidden = j < start or j >= stop
                if hidden:
                    score = ACC(NEG_INF)
            # (2) m_i, O = alpha O
            largest = over_keys(score, True)
            if cuda.any_sync(ALL_LANES, largest > m_i):
                m_new = max(m_i, largest)
                alpha = ACC(1) if m_new == m_i else power(m_i - m_new)
                l_i *= alpha
                m_i = m_new
                rescale(acc, alpha)
            # (3) P, (4) l_i; a row that has seen nothing is shifted by 0
            p = power(score - (m_i if m_i != ACC(NEG_INF) else ACC(0)))
            l_i += p
            cuda.syncwarp()  # all lanes have read the weights before
            if own % APART == 0:
                put(p_own, ACC(-0.0) if hidden else p)
            cuda.syncwarp()  # those of all lanes are there
            # (5) O += P V
            values(acc, p_keys, u32(at + u32(PART)), edge)
            if count > STAGES:
                copy_k(at, k_at, k_step, left)
                copy_v(u32(at + u32(PART)), v_at, v_step, left)
            ptx.copy_commit()
            k_at, v_at = u64(k_at + k_step * u64(STEP_N)), u64(v_at + v_step * u64(STEP_N))
            left = i32(left - STEP_N)
            count, col0 = i32(count - 1), i32(col0 + STEP_N)
            slot = i32(slot + 1) if slot < STAGES - 1 else i32(0)

        finish(smem, acc, m_i, l_i, row, x)

    signature = types.void(
        *[array(dtype, 5)] * 4,
        array(ACC, 4),
        extras_type(options, ()),
        *(ACC, i64, i64, i64),
    )
    return decode_lanes, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
