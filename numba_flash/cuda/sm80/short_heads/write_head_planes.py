"""Before the backward pass of short heads in float32 under a bias: one block of threads per head
makes planes of float16 of its V, dO, K and Q, and what is known of rows, of which each array is
read once.

As `numba_flash.cuda.passes.write_planes` and `numba_flash.cuda.passes.preprocess`, but for low
planes, which are as large as what they stand for: `numba_flash.cuda.ptx.joined_product`. No digit
of theirs is worth less than 2^-24, 2^-38 of the largest number of a head. That is little beside
what scores and dP are rounded by, unless scores could be thousands, or all of dP is small beside
the largest numbers of V and dO, as where units of columns differ: such heads, too, are flagged.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import array, index
from numba_flash.cuda.passes.preprocess import LEAST_FLOAT32
from numba_flash.cuda.passes.write_planes import TOP, power_of_two
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, types, u32
from numba_flash.cuda.score.fragment import ALL_LANES
from numba_flash.cuda.score.score import Head
from numba_flash.cuda.sm80.bias_gradient.load_dq_dbias import build_copy
from numba_flash.cuda.sm80.load import in_order
from numba_flash.cuda.sm80.operands.write_planes import CHUNK_BYTES, PlaneRows, build_writers
from numba_flash.cuda.sm80.short_heads.head_planes import (
    CHUNK,
    MOST_SCORE,
    WORD,
    build_head,
    build_meet,
    exponent_of,
)
from numba_flash.cuda.sm80.tiles import padded
from numba_flash.cuda.work.broadcast import divide

# The largest sum of |dO| times columns' largest |V|, which are at least 2^13 each in planes.
LEAST_DP = 2.0**16
# Numbers of dS, less than such a sum and |delta|, become less than 2^(14 + 1 - MARGIN), with P of
# 1; rows whose sum is less than 2^SHORTEST count as if it were that.
MARGIN, SHORTEST = 2, -30


class Pair(NamedTuple):
    """Of V and dO, or K and Q: each one's `Summary`, whether the former have a centre, and that of
    this thread's columns.
    """

    keys: Any
    queries: Any
    taken: bool
    centre: Any


@once
def build_most(columns, tile):
    """``tell(values, smem)``: a thread's largest numbers of its columns, those of its warp, to
    shared memory; ``hear(values, smem, power)``: those of all warps, once they are there, times a
    power of two.
    """
    CHUNKS, WARPS = padded(columns) // CHUNK, tile.warps
    FOLDS, ROW = (32 // CHUNKS).bit_length() - 1, WORD * padded(columns)

    @inline
    def tell(values, smem):
        thread = i32(cuda.threadIdx.x)
        for e in range(CHUNK):
            for fold in range(FOLDS):
                other = cuda.shfl_xor_sync(ALL_LANES, values[e], CHUNKS << fold)
                values[e] = max(values[e], other)
        if thread % 32 < CHUNKS:
            to = u32(smem + u32(thread // 32 * ROW + thread % 32 * CHUNK_BYTES))
            ptx.store_shared_vector(to, (values[0], values[1], values[2], values[3]))

    @inline
    def hear(values, smem, power):
        mine = u32(smem + u32(ptx.bounded_thread_here() % CHUNKS * CHUNK_BYTES))
        for e in range(CHUNK):
            values[e] = f32(0)
        for w in range(WARPS):
            x = ptx.load_shared_four(u32(mine + u32(w * ROW)))
            for e in range(CHUNK):
                values[e] = max(values[e], x[e] * power)

    return tell, hear


@inline
def power_of_row(bound, delta):
    """The power of two that numbers of a row of dS are divided by."""
    most = i32(ptx.as_uint32(bound + abs(delta)) >> u32(23)) - 127
    return power_of_two(i32(max(i32(most), i32(SHORTEST)) - (14 - MARGIN)))


@inline
def number_at(numbers, row):
    """A float32 in shared memory."""
    return ptx.as_float32(u32(ptx.load_shared(u32(numbers + u32(row * WORD)))))


@inline
def flagged_of(pair):
    """Whether others compute the head."""
    return pair.keys.flagged | pair.queries.flagged


@once
def build_look(keys, queries, columns, tile):
    """``look(smem, part, count)``: the `Pair` of tiles in shared memory, with so many keys."""
    COLUMNS, SMEM, THREADS = padded(columns), tile.layout, tile.threads
    SECOND, CENTRES, TOLD = SMEM.second, SMEM.centres, SMEM.told
    extremes_of_keys, centre_of_keys, _ = build_head(keys, columns, THREADS, in_order)
    extremes_of_queries, _, _ = build_head(queries, columns, THREADS, in_order)
    tell, hear = build_meet(tile.warps)

    @inline
    def look(smem, part, count):
        told = u32(smem + u32(TOLD))
        tell(told, part, extremes_of_keys(smem))
        tell(told, part + 1, extremes_of_queries(u32(smem + u32(SECOND))))
        moved, column = i32(0), i32(cuda.threadIdx.x)
        if column < COLUMNS:
            to = u32(smem + u32(CENTRES) + u32(column * WORD))
            moved = i32(1) if centre_of_keys(smem, to, count, column) else i32(0)
        taken = cuda.syncthreads_or(moved) != 0
        chunk = i32(ptx.bounded_thread_here() % (COLUMNS // CHUNK))
        centre = ptx.load_shared_four(u32(smem + u32(CENTRES) + u32(chunk * CHUNK_BYTES)))
        return Pair(hear(told, part), hear(told, part + 1), taken, centre)

    return look


def build(shape, tile):
    """Kernel ``write_head_planes_sm80(do, q, k, v, o, lse, do_planes, q_planes, k_planes, v_planes,
    rows, factors, flags, scale)`` with its signature and compile options.

    do, q, k, v, o : float32 (b0, b1, heads, n, columns), rows at multiples of 16 bytes.
    lse : float32 (b0, b1, heads, nq).
    do_planes, and so on : uint32 (b0, b1, heads, n, columns), in each row all high ones, then all
        low ones.
    rows : float32 (3, b0, b1, heads, at least nq), the lse and delta, as
        `numba_flash.cuda.passes.preprocess` says of split float32, and powers of two that numbers
        of dS are divided by.
    factors, flags : as in `numba_flash.cuda.passes.write_planes`, of as many heads of q as of k.
    """
    D, DV, KEYS, QUERIES = shape.head_dim, shape.head_dim_v, tile.keys, tile.queries
    THREADS, SMEM, INF, LEAST = tile.threads, tile.layout, math.inf, LEAST_FLOAT32
    SECOND, DELTA, SHIFT = SMEM.second, SMEM.delta, SMEM.shift
    tiles = ((KEYS, DV), (QUERIES, DV), (KEYS, D), (QUERIES, D))
    copies = (build_copy(n, 2 * padded(x), THREADS, in_order) for n, x in tiles)
    copy_v, copy_do, copy_k, copy_q = copies
    of_v, of_do, of_k, of_q = (build_writers(n, x, THREADS) for n, x in tiles)
    write_v, write_k, write_q = of_v.keys, of_k.keys, of_q.queries
    fetch_o, write_do = of_do.fetch, of_do.gradients
    tell_most, hear_most = build_most(DV, tile)
    look_at_values, look_at_keys = (build_look(KEYS, QUERIES, x, tile) for x in (DV, D))
    O_WORDS = CHUNK * -(-QUERIES // (THREADS // (padded(DV) // CHUNK)))

    def write_head_planes_sm80(
        do, q, k, v, o, lse, do_planes, q_planes, k_planes, v_planes, rows, factors, flags, scale
    ):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        words = cuda.local.array(O_WORDS, u32)  # of O
        most = cuda.local.array(CHUNK, f32)  # of columns of V
        for e in range(CHUNK):
            most[e] = f32(0)
        nq, nk, heads = i32(q.shape[3]), i32(k.shape[3]), i32(q.shape[2])
        head, number = divide(i32(cuda.blockIdx.x), heads, True)
        b1, b0 = divide(number, i32(q.shape[1]), True)
        at, zero = Head(b0, b1, number, head, heads), i32(0)
        second, delta = u32(smem + u32(SECOND)), u32(smem + u32(DELTA))
        shift, none = u32(smem + u32(SHIFT)), (f32(0), f32(0), f32(0), f32(0))
        copy_v(smem, v, at, head, zero, nk, zero, i32(2 * DV))
        copy_do(second, do, at, head, zero, nq, zero, i32(2 * DV))
        fetch_o(
            PlaneRows(smem, none, False, f32(0), o[b0, b1, head], nq, delta, words, f32(0), most)
        )
        ptx.copy_wait()
        cuda.syncthreads()  # V and dO are there
        values = look_at_values(smem, 0, nk)
        power, own = power_of_two(values.keys.exponent), power_of_two(values.queries.exponent)
        centre, taken, to = values.centre, values.taken, v_planes[b0, b1, head]
        write_v(PlaneRows(smem, centre, taken, power, to, nk, delta, words, power, most))
        tell_most(most, shift)
        cuda.syncthreads()  # V has been read
        hear_most(most, shift, power)
        copy_k(smem, k, at, head, zero, nk, zero, i32(2 * D))
        to = do_planes[b0, b1, head]
        write_do(PlaneRows(second, centre, taken, own, to, nq, delta, words, power, most))
        cuda.syncthreads()  # and dO
        copy_q(second, q, at, head, zero, nq, zero, i32(2 * D))
        ptx.copy_wait()
        cuda.syncthreads()  # K and Q are there
        keys = look_at_keys(smem, 2, nk)
        power, own = power_of_two(keys.keys.exponent), power_of_two(keys.queries.exponent)
        centre, taken, to = keys.centre, keys.taken, k_planes[b0, b1, head]
        write_k(PlaneRows(smem, centre, taken, power, to, nk, shift, words, power, most))
        to = q_planes[b0, b1, head]
        write_q(PlaneRows(second, centre, taken, own, to, nq, shift, words, scale, most))
        cuda.syncthreads()  # what is known of rows is there
        lse_head, lse_rows = lse[b0, b1, head], rows[0, b0, b1, head]
        delta_rows, power_rows, some = rows[1, b0, b1, head], rows[2, b0, b1, head], i32(0)
        for row in range(i32(cuda.threadIdx.x), i32(rows.shape[4]), THREADS):
            own_lse, own_delta, bound = f32(INF), f32(0), f32(0)
            if row < nq:
                bound = number_at(delta, i32(row + QUERIES))
                some |= (1 if bound > f32(0) else 0) | (2 if bound >= f32(LEAST_DP) else 0)
            if row < nq and lse_head[index(row)] != f32(-INF):
                own_lse = lse_head[index(row)] - number_at(shift, row)
                if own_lse < f32(LEAST):
                    own_lse = f32(LEAST)
                own_delta = number_at(delta, row)
            lse_rows[index(row)], delta_rows[index(row)] = own_lse, own_delta
            power_rows[index(row)] = power_of_row(bound, own_delta)
        far = cuda.syncthreads_or(some & 1) != 0 and cuda.syncthreads_or(some & 2) == 0
        if cuda.threadIdx.x == 0:
            own_factors = factors[b0, b1, head]
            own_factors[0] = power_of_two(i32(-keys.queries.exponent))
            own_factors[1] = power_of_two(i32(-keys.keys.exponent))
            own_factors[2] = power_of_two(i32(-values.keys.exponent))
            own_factors[3] = power_of_two(i32(-values.queries.exponent))
            score = i32(2 * TOP + exponent_of(own_factors[0] * own_factors[1] * scale))
            flagged = flagged_of(values) | flagged_of(keys)
            flagged |= i32(1) if far or score > MOST_SCORE else i32(0)
            flags[b0, b1, head] = flagged

    signature = types.void(
        *[array(f32, 5)] * 5,
        array(f32, 4),
        *[array(u32, 5)] * 4,
        array(f32, 5),
        array(f32, 4),
        array(i32, 3),
        f32,
    )
    return write_head_planes_sm80, signature, {"launch_bounds": (THREADS, tile.min_blocks)}
