"""What a block of `numba_flash.cuda.simt.decode_lanes` works on, and how results of its warps
become one.
"""

import math
from typing import Any, NamedTuple

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.number import ACCUMULATOR, index
from numba_flash.cuda.runtime.lang import cuda, i32, inline, once, u32
from numba_flash.cuda.score import fragment
from numba_flash.cuda.score.fragment import ALL_LANES
from numba_flash.cuda.score.score import build_exponential
from numba_flash.cuda.simt.lanes import build_over_keys
from numba_flash.cuda.simt.lanes_tiles import CHUNK, WARP
from numba_flash.cuda.work.row_blocks import row_block_of_decode
from numba_flash.cuda.work.sequence import build_sequence


class Block(NamedTuple):
    """What a block of threads works on: rows of queries, the keys that they see, and their results.

    Attributes
    ----------
    q, k, v, o, lse : arrays
        Of the heads that share keys, (group, n, ...), and of these, (n, ...).
    row0 : int
        The first row, as `numba_flash.cuda.score.fragment.build_row` has them.
    queries, rows : int
        Rows of the sequence, and of the results.
    keys : int
        Of the sequence.
    low, high : int
        The band, for key - query.
    invalid : bool
        The lengths are impossible.
    kv_split : int
        Of the keys.
    """

    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any
    row0: int
    queries: int
    rows: int
    keys: int
    low: int
    high: int
    invalid: bool
    kv_split: int


class Steps(NamedTuple):
    """Of a block: the first one, and how many there are."""

    first: int
    count: int


@once
def build_block(tile, options):
    """``block_of(q, k, v, o, lse, extras, low, high, kv_splits)``: the `Block`; ``steps_of(x,
    kv_splits)``: its part of the `Steps` through the keys that its rows see.
    """
    ROWS, GROUP, STEP_N, SEQUENCES = tile.rows, tile.group, tile.step_n, options.sequences
    sequence_of = build_sequence(options)
    query_of, _, stop_of = fragment.build_row(tile.group)

    @inline
    def block_of(q, k, v, o, lse, extras, low, high, kv_splits):
        nq, nk, low, high, invalid = i32(q.shape[3]), i32(k.shape[3]), i32(low), i32(high), False
        number, rows = u32(cuda.blockIdx.x), i32(nq * GROUP)
        part = i32(number % u32(kv_splits))
        blocks = u32(u32(rows + (ROWS - 1)) // u32(ROWS))
        sizes = blocks, u32(k.shape[2]), u32(q.shape[1])
        b0, b1, head, block = row_block_of_decode(u32(number // u32(kv_splits)), *sizes)
        group, into = slice(head * GROUP, (head + 1) * GROUP), part * q.shape[0] + b0
        if SEQUENCES:
            sequence = sequence_of(extras, b0, b1, nq, nk)
            nq, nk, invalid = i32(sequence.queries), i32(sequence.keys), sequence.invalid
            low, high = i32(low + sequence.shift), i32(high + sequence.shift)
        return Block(
            q[b0, b1, group], k[b0, b1, head], v[b0, b1, head], o[into, b1, group],
            lse[into, b1, group], i32(block * ROWS), i32(nq * GROUP), rows, nk, low, high, invalid,
            part,
        )  # fmt: skip

    @inline
    def steps_of(x, kv_splits):
        query0, query1 = query_of(x.row0), stop_of(min(i32(x.row0 + ROWS), x.queries))
        start, stop = mask.kv_range(query0, query1, x.keys, x.low, x.high)
        start, stop = i32(start), i32(stop)
        first, count = i32(u32(start) // u32(STEP_N)), i32(0)
        if start < stop and x.row0 < x.queries:
            count = i32(i32(u32(i32(stop + (STEP_N - 1))) // u32(STEP_N)) - first)
        share = i32(u32(count + kv_splits - 1) // u32(kv_splits))
        before = min(i32(x.kv_split * share), count)
        return Steps(i32(first + before), i32(min(share, count - before)))

    return block_of, steps_of


@once
def build_finish(dtype, tile, head_dim_v, write_lse, options):
    """``finish(smem, acc, m_i, l_i, row, x)``: all warps' results become one, in their order;
    ``row`` is the lane's, of which it has m and l.
    """
    ROWS, WARPS, LANES, HELD, COLS = tile.rows, tile.warps, tile.lanes, tile.held, tile.columns
    THREADS, SIZE, PER_CHUNK = tile.threads, tile.size, tile.per_chunk
    APART, TWO = tile.lanes // tile.scores, tile.lanes < WARP  # lanes alike; keys at a time
    SUMS, PITCH, HEAD_DIM_V = tile.layout.sums, tile.held * CHUNK * tile.lanes, head_dim_v
    OF_WARP, DOUBLE, ACC = tile.rows * PITCH, tile.size == 8, ACCUMULATOR[dtype]
    WRITE_LSE, SEQUENCES, NEG_INF, NAN = write_lse, options.sequences, -math.inf, math.nan
    query_of, head_of, _ = fragment.build_row(tile.group)
    power, log_sum = build_exponential(dtype, options)
    over_keys = build_over_keys(tile)

    @inline
    def put(at, one, other):
        if DOUBLE:
            ptx.store_shared_float64s(at, one, other)
        else:
            ptx.store_shared_vector(at, (one, other))

    @inline
    def pair(at):
        return ptx.load_shared_float64s(at) if DOUBLE else ptx.load_shared_pair(at)

    @inline
    def gather(smem, m_i, l_i, row, x):
        """What the warp's O has to be multiplied by, for the lane's row."""
        own = u32(smem + u32(SUMS) + u32(row * (2 * SIZE)))
        lane, warp = i32(cuda.threadIdx.x % WARP), i32(cuda.threadIdx.x // WARP)
        first = lane < ROWS * APART and lane % APART == 0
        if first:
            put(u32(own + u32(warp * (2 * SIZE * ROWS))), m_i, l_i)
        cuda.syncthreads()  # m and l of all warps are there
        largest, total = ACC(NEG_INF), ACC(0)
        for w in range(WARPS):
            largest = max(largest, pair(u32(own + u32(w * (2 * SIZE * ROWS))))[0])
        # a row that has seen nothing is shifted by 0, so that 2^(-inf - 0) = 0
        shift = largest if largest != ACC(NEG_INF) else ACC(0)
        for w in range(WARPS):
            m, l = pair(u32(own + u32(w * (2 * SIZE * ROWS))))
            total += power(m - shift) * l
        i, value = i32(x.row0 + row), ACC(NEG_INF)
        if SEQUENCES and i >= x.queries:
            total = ACC(0)
        factor = power(m_i - shift) / total if total != ACC(0) else ACC(0)
        if total != ACC(0):
            value = log_sum(shift, total)
        if SEQUENCES and x.invalid:
            factor, value = ACC(NAN), ACC(NAN)
        if WRITE_LSE and first and warp == 0 and i < x.rows:
            x.lse[index(head_of(i)), index(query_of(i))] = value
        return factor

    @inline
    def put_rows(smem, acc, factor):
        lane, warp = i32(cuda.threadIdx.x % LANES), i32(cuda.threadIdx.x // WARP)
        at = u32(smem + u32(warp * OF_WARP) + u32(lane * CHUNK))
        for r in range(ROWS):
            f = cuda.shfl_sync(ALL_LANES, factor, r * APART)
            for h in range(HELD):
                for c in range(0, PER_CHUNK, 2):
                    first = r * COLS + h * PER_CHUNK + c
                    to = u32(at + u32(r * PITCH + h * (CHUNK * LANES) + c * SIZE))
                    put(to, acc[first] * f, acc[first + 1] * f)

    @inline
    def finish(smem, acc, m_i, l_i, row, x):
        l_i = over_keys(l_i, False)
        if TWO:  # the others' keys
            for i in range(ROWS * COLS):
                acc[i] += cuda.shfl_xor_sync(ALL_LANES, acc[i], LANES)
        cuda.syncthreads()  # all steps have been read
        put_rows(smem, acc, gather(smem, m_i, l_i, row, x))
        cuda.syncthreads()  # rows of all warps are there
        rows = min(i32(x.rows - x.row0), i32(ROWS))
        for number in range(i32(cuda.threadIdx.x), i32(rows * (HEAD_DIM_V // 2)), THREADS):
            r, d = i32(number // (HEAD_DIM_V // 2)), i32(number % (HEAD_DIM_V // 2) * 2)
            at, one, other = u32(smem + u32(r * PITCH + d * SIZE)), ACC(0), ACC(0)
            for w in range(WARPS):
                x0, x1 = pair(u32(at + u32(w * OF_WARP)))
                one += x0
                other += x1
            i = i32(x.row0 + r)
            own = x.o[index(head_of(i)), index(query_of(i))]
            own[index(d)], own[index(d + 1)] = one, other

    return finish
