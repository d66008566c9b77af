"""Tiles of scores of the gradient of a bias on their way to shared memory."""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, i32, inline, once, u32, u64
from numba_flash.cuda.score import fragment
from numba_flash.cuda.sm80.load import build_load
from numba_flash.cuda.sm80.tiles import pitch


class Tensors(NamedTuple):
    """The arrays that tiles are loaded from."""

    do: Any
    q: Any
    k: Any
    v: Any
    rows: Any


@once
def build_loads(shape, tile):
    """``load_qk(smem, slot, tensors, place)``: Q, its rows' lse, and K of a tile of scores;
    ``load_dov``: dO, its rows' delta, and V.
    """
    BLOCK_M, BLOCK_N, THREADS, TURING = tile.block_m, tile.block_n, tile.threads, shape.turing
    (COLUMNS_K, COLUMNS_V), CHUNKS = shape.columns, tile.block_m // 4
    PITCH_K, PITCH_V, SMEM = pitch(COLUMNS_K), pitch(COLUMNS_V), tile.layout(*shape.columns)
    Q, DO, ROWS, K, V = SMEM.q, SMEM.do, SMEM.rows, SMEM.k, SMEM.v
    Q_BYTES, DO_BYTES, ROWS_BYTES = BLOCK_M * PITCH_K, BLOCK_M * PITCH_V, 8 * BLOCK_M
    K_BYTES, V_BYTES = BLOCK_N * PITCH_K, BLOCK_N * PITCH_V
    order = fragment.place_of_key
    # planes are compact; 16 bits spill nothing if threads find their rows again
    others = shape.asynchronous, None, shape.planes > 0, not shape.planes
    load_q = build_load(BLOCK_M, COLUMNS_K, THREADS, None, *others)
    load_do = build_load(BLOCK_M, COLUMNS_V, THREADS, None, *others)
    load_k = build_load(BLOCK_N, COLUMNS_K, THREADS, order, *others)
    load_v = build_load(BLOCK_N, COLUMNS_V, THREADS, order, *others)
    FP16X2 = shape.planes > 0
    assert CHUNKS <= THREADS

    @inline
    def load_row_values(target, values, place):
        """Zeros beyond what there is."""
        thread = i32(cuda.threadIdx.x) if FP16X2 else ptx.bounded_thread_here()
        if thread < CHUNKS:
            at, row = place.at, i32(place.region.row0 + thread * 4)
            head = values[index(at.b0), index(at.b1), index(at.head)]
            source, there = u64(ptx.global_address(head) + u64(row * 4)), row < values.shape[3]
            to = u32(target + u32(thread * 16))
            if not TURING:
                ptx.copy16(to, source, u32(1) if there else u32(0))
            elif there:
                ptx.store_shared_vector(to, ptx.load_global_words(source))
            else:
                ptx.store_shared_vector(to, (u32(0), u32(0), u32(0), u32(0)))

    @inline
    def load_qk(smem, slot, tensors, place):
        at, region = place.at, place.region
        b0, b1, h = index(at.b0), index(at.b1), index(place.kv_head)
        q, k = tensors.q[b0, b1, index(at.head)], tensors.k[b0, b1, h]
        load_q(u32(smem + u32(Q) + slot * u32(Q_BYTES)), q, region.row0, region.rows)
        load_k(u32(smem + u32(K) + slot * u32(K_BYTES)), k, region.col0, region.cols)
        lse = u32(smem + u32(ROWS) + slot * u32(ROWS_BYTES))
        load_row_values(lse, tensors.rows[index(0)], place)

    @inline
    def load_dov(smem, slot, tensors, place):
        at, region = place.at, place.region
        b0, b1, h = index(at.b0), index(at.b1), index(place.kv_head)
        do, v = tensors.do[b0, b1, index(at.head)], tensors.v[b0, b1, h]
        load_do(u32(smem + u32(DO) + slot * u32(DO_BYTES)), do, region.row0, region.rows)
        load_v(u32(smem + u32(V) + slot * u32(V_BYTES)), v, region.col0, region.cols)
        delta = u32(smem + u32(ROWS) + slot * u32(ROWS_BYTES) + u32(4 * BLOCK_M))
        load_row_values(delta, tensors.rows[index(1)], place)

    return load_qk, load_dov
