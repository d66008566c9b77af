"""Planes of float32 on their way to shared memory, in kernels that make gradients of heads whose
keys all fit: tiles of keys come in turn through a ring, tiles of queries one at a time.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, u32, u64
from numba_flash.cuda.score import fragment
from numba_flash.cuda.sm80.bias_gradient.load_dq_dbias import plus
from numba_flash.cuda.sm80.load import in_order
from numba_flash.cuda.sm80.short_heads.short_head_tiles import KINDS, WAYS
from numba_flash.cuda.sm80.tiles import KEYS, padded, pitch

FLOAT, VECTOR = 4, 16  # bytes of a number, and of a copy


class Tensors(NamedTuple):
    """Planes of dO, Q, K and V, what is known of each query, as
    `numba_flash.cuda.sm80.short_heads.write_head_planes` writes it, and factors and flags of heads:
    of all, one head lies behind the other.
    """

    do: Any
    q: Any
    k: Any
    v: Any
    rows: Any
    factors: Any
    flags: Any


@inline
def head_number(at):
    """Of a `Head` among all."""
    return i32(at.batch * at.heads + at.head)


@once
def build_copy_planes(rows, columns, threads, place):
    """``copy(tile, x, number, first, stop)``: rows [first, first + rows) of the head of that number
    of planes x into shared memory, where `place` says; zeros from row `stop` on.
    """
    ROW_BYTES, PITCH, PLACE = FLOAT * padded(columns), pitch(2 * padded(columns)), place
    CHUNKS = ROW_BYTES // VECTOR
    # rows that are copied at the same time: a power of two, as places are made of a row's bits
    STEP = min(rows, 1 << (threads // CHUNKS).bit_length() - 1)
    STEPS, ALL = rows // STEP, STEP * CHUNKS == threads
    assert rows % STEP == 0

    @inline
    def copy(tile, x, number, first, stop):
        thread = ptx.bounded_thread_here()
        row = i32(thread // CHUNKS)
        if ALL or row < STEP:
            source = plus(ptx.global_address(x), number, x.strides[2])
            source = u64(source + u64(u32(first * ROW_BYTES + thread * VECTOR)))
            target = u32(tile + u32(PLACE(row) * PITCH + thread % CHUNKS * VECTOR))
            rest = i32(stop - first - row)
            for step in range(STEPS):
                to = u32(target + u32(PLACE(i32(step * STEP)) * PITCH))
                there = u32(1) if rest > i32(step * STEP) else u32(0)
                ptx.copy16(to, u64(source + u64(step * STEP * ROW_BYTES)), there)

    return copy


@once
def build_copy_rows(count, threads):
    """``copy(smem, rows, number, row0)``: the lse, then delta, then powers of two, of so many
    queries from row0 on of the head of that number, which `rows` (3, b0, b1, heads, at least as
    many) has.
    """
    COPIES, THREADS = count * FLOAT // VECTOR, threads
    assert count * FLOAT % VECTOR == 0

    @inline
    def copy(smem, rows, number, row0):
        for n in range(ptx.bounded_thread_here(), KINDS * COPIES, THREADS):
            which, chunk = i32(u32(n) // u32(COPIES)), i32(u32(n) % u32(COPIES))
            row = i32(row0 + chunk * (VECTOR // FLOAT))
            source = plus(ptx.global_address(rows[which]), number, rows.strides[3])
            source = u64(source + u64(u32(row * FLOAT)))
            there = u32(1) if row < i32(rows.shape[4]) else u32(0)
            ptx.copy16(u32(smem + u32(n * VECTOR)), source, there)

    return copy


@once
def build_loads(shape, tile):
    """``load_queries(smem, tensors, number, row0, queries)``: Q and dO of the head of that number,
    and what is known of its rows and of it; ``load_keys(smem, slot, tensors, number, chunk,
    keys)``: a chunk of K and V, to a slot of the ring.
    """
    BLOCK_M, CHUNK, THREADS = tile.block_m, tile.chunk, tile.threads
    (D, DV), SMEM = (padded(x) for x in (shape.head_dim, shape.head_dim_v)), tile.layout(shape)
    Q, DO, ROWS, K, V, SLOT = SMEM.q, SMEM.do, SMEM.rows, SMEM.k, SMEM.v, SMEM.slot
    HEAD, LAST = SMEM.head, tile.threads - 1
    copy_q, copy_do = (build_copy_planes(BLOCK_M, x, THREADS, in_order) for x in (D, DV))
    place = fragment.place_of_key
    copy_k, copy_v = (build_copy_planes(CHUNK, x, THREADS, place) for x in (D, DV))
    copy_rows = build_copy_rows(BLOCK_M, THREADS)

    @inline
    def load_queries(smem, x, number, row0, queries):
        copy_q(u32(smem + u32(Q)), x.q, number, row0, queries)
        copy_do(u32(smem + u32(DO)), x.do, number, row0, queries)
        copy_rows(u32(smem + u32(ROWS)), x.rows, number, row0)
        if cuda.threadIdx.x == LAST:
            head, one = u32(smem + u32(HEAD)), u32(1)
            ptx.copy16(head, plus(ptx.global_address(x.factors), number, VECTOR), one)
            flag = plus(ptx.global_address(x.flags), number, FLOAT)
            ptx.copy4(u32(head + u32(VECTOR)), flag, one)

    @inline
    def load_keys(smem, slot, x, number, chunk, keys):
        k, v = u32(smem + u32(K) + slot * u32(SLOT)), u32(smem + u32(V) + slot * u32(SLOT))
        copy_k(k, x.k, number, i32(chunk * CHUNK), keys)
        copy_v(v, x.v, number, i32(chunk * CHUNK), keys)

    return load_queries, load_keys


@once
def build_resident_bias(tile):
    """``keep(smem, bias, row, column, rows, keys)``: a thread's part of a head's bias on its way to
    shared memory, where what it reads at a time lies side by side with that of its neighbours; -inf
    beyond the last of the keys.
    """
    THREADS, HALVES, INF = tile.threads, 2 * tile.chunks, math.inf

    @inline
    def keep(smem, bias, row, column, rows, keys):
        for number in range(HALVES):
            key = i32(column + number // 2 * (WAYS * KEYS) + number % 2 * 4)
            for r in range(2):
                i = i32(row + 8 * r)
                to = u32(smem + u32((number * 2 + r) * THREADS * VECTOR))
                if key < keys:
                    source = u64(plus(ptx.global_address(bias), i, bias.strides[0]))
                    source = u64(source + u64(u32(key * FLOAT)))
                    ptx.copy16(to, source, u32(1) if i < rows else u32(0))
                else:
                    ptx.store_shared_vector(to, (f32(-INF), f32(-INF), f32(-INF), f32(-INF)))

    return keep
