"""Planes of float32 on their way to shared memory, in kernels that make gradients of heads whose
keys all fit: tiles of keys come in turn through a ring, tiles of queries one at a time.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import fragment, ptx
from numba_flash.cuda.lang import f32, i32, inline, once, u32, u64
from numba_flash.cuda.sm80.load import in_order
from numba_flash.cuda.sm80.load_dq_dbias import build_copy, head_address, plus
from numba_flash.cuda.sm80.tiles import KEYS, padded

FLOAT, VECTOR = 4, 16  # bytes of a number, and of a copy
KINDS = 3  # of numbers that are known of a query
WAYS = 2  # warps that share rows of dQ and of the gradient of the bias


class Tensors(NamedTuple):
    """Planes of dO, Q, K and V, and what is known of each query, as
    `numba_flash.cuda.sm80.split_heads` writes it.
    """

    do: Any
    q: Any
    k: Any
    v: Any
    rows: Any


@once
def build_copy_rows(count, threads):
    """``copy(smem, rows, at, row0)``: the lse, then delta, then powers of two, of so many queries
    from row0 on, which `rows` (3, b0, b1, heads, at least as many) has.
    """
    COPIES, THREADS = count * FLOAT // VECTOR, threads
    assert count * FLOAT % VECTOR == 0

    @inline
    def copy(smem, rows, at, row0):
        for n in range(ptx.bounded_thread_here(), KINDS * COPIES, THREADS):
            which, chunk = i32(u32(n) // u32(COPIES)), i32(u32(n) % u32(COPIES))
            row = i32(row0 + chunk * (VECTOR // FLOAT))
            source = u64(head_address(rows[which], at, at.head) + u64(u32(row * FLOAT)))
            there = u32(1) if row < i32(rows.shape[4]) else u32(0)
            ptx.copy16(u32(smem + u32(n * VECTOR)), source, there)

    return copy


@once
def build_loads(shape, tile):
    """``load_queries(smem, tensors, place)``: Q, dO and their rows; ``load_keys(smem, slot,
    tensors, place, chunk)``: a chunk of K and V, to a slot of the ring.
    """
    BLOCK_M, CHUNK, THREADS = tile.block_m, tile.chunk, tile.threads
    (D, DV), SMEM = (2 * padded(x) for x in (shape.head_dim, shape.head_dim_v)), tile.layout(shape)
    Q, DO, ROWS, K, V, SLOT = SMEM.q, SMEM.do, SMEM.rows, SMEM.k, SMEM.v, SMEM.slot
    copy_q, copy_do = (build_copy(BLOCK_M, x, THREADS, in_order) for x in (D, DV))
    place = fragment.place_of_key
    copy_k, copy_v = (build_copy(CHUNK, x, THREADS, place) for x in (D, DV))
    copy_rows = build_copy_rows(BLOCK_M, THREADS)

    @inline
    def load_queries(smem, x, place):
        at, r = place.at, place.region
        copy_q(u32(smem + u32(Q)), x.q, at, at.head, r.row0, r.rows, i32(0), i32(D))
        copy_do(u32(smem + u32(DO)), x.do, at, at.head, r.row0, r.rows, i32(0), i32(DV))
        copy_rows(u32(smem + u32(ROWS)), x.rows, at, r.row0)

    @inline
    def load_keys(smem, slot, x, place, chunk):
        at, kv_head, stop, first = place.at, place.kv_head, place.region.cols, i32(chunk * CHUNK)
        k, v = u32(smem + u32(K) + slot * u32(SLOT)), u32(smem + u32(V) + slot * u32(SLOT))
        copy_k(k, x.k, at, kv_head, first, stop, i32(0), i32(D))
        copy_v(v, x.v, at, kv_head, first, stop, i32(0), i32(DV))

    return load_queries, load_keys


@once
def build_keep_bias(tile):
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
