"""How a block of dQ and the gradient of a bias gets its tiles. It has few registers for addresses,
and many heads: of these an address takes three instructions, as strides have no more than 32 bits.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import i32, inline, once, u32, u64
from numba_flash.cuda.score import fragment
from numba_flash.cuda.sm80.load import in_order
from numba_flash.cuda.sm80.tiles import CHUNK, padded, pitch

CHUNK_BYTES = 2 * CHUNK


class Tensors(NamedTuple):
    """The arrays that tiles are loaded from."""

    do: Any
    o: Any
    q: Any
    k: Any
    v: Any
    lse: Any
    dlse: Any


@inline
def plus(address, x, stride):
    """Address of what lies x strides further, neither of which is negative."""
    return ptx.add_product(u32(x), u32(stride), address)


@inline
def head_address(x, at, head):
    """Of a head of x (b0, b1, heads, n, ...)."""
    base = plus(plus(ptx.global_address(x), at.b0, x.strides[0]), at.b1, x.strides[1])
    return plus(base, head, x.strides[2])


@once
def build_copy(rows, head_dim, threads, place):
    """``copy(tile, x, at, head, first, stop, column, columns)``: rows [first, first + rows) of a
    head of x, from `column` on, into shared memory, where `place` says; zeros from row `stop` on
    and from column `columns`.
    """
    ROWS, PITCH, PLACE, CHUNKS = rows, pitch(head_dim), place, padded(head_dim) // CHUNK
    # rows that are copied at the same time: a power of two, as places are made of a row's bits, of
    # which all rows are a multiple
    STEP = min(rows & -rows, 1 << (threads // CHUNKS).bit_length() - 1)
    ALL = STEP * CHUNKS == threads
    assert threads % CHUNKS == 0

    @inline
    def copy(tile, x, at, head, first, stop, column, columns):
        thread = ptx.bounded_thread_here()
        row, chunk = i32(thread // CHUNKS), i32(thread % CHUNKS)
        if ALL or row < STEP:
            stride = u32(x.strides[3])
            source = plus(head_address(x, at, head), first + row, stride)
            source = u64(source + u64(u32(2 * column + chunk * CHUNK_BYTES)))
            target = u32(tile + u32(PLACE(row) * PITCH + chunk * CHUNK_BYTES))
            rest = i32(stop - first - row) if column + chunk * CHUNK < columns else i32(0)
            for step in range(ROWS // STEP):
                to = u32(target + u32(PLACE(i32(step * STEP)) * PITCH))
                there = u32(1) if rest > i32(step * STEP) else u32(0)
                ptx.copy16(to, source, there)
                source = plus(source, STEP, stride)

    return copy


@once
def build_copy_rows(block_m):
    """``copy_rows(target, rows, at, row0)``: what `numba_flash.cuda.sm80.begin_rows` says of
    queries from row0 on into shared memory, zeros beyond what there is.
    """
    COPIES = block_m // 2

    @inline
    def copy_rows(target, rows, at, row0):
        thread = ptx.bounded_thread_here()
        if thread < COPIES:
            row = i32(row0 + thread * 2)
            source = u64(head_address(rows, at, at.head) + u64(u32(8 * row)))
            there = u32(1) if row < i32(rows.shape[3]) else u32(0)
            ptx.copy16(u32(target + u32(thread * 16)), source, there)

    return copy_rows


@once
def build_loads(shape, tile):
    """``load(smem, slot, tensors, place)``: Q, dO, K and V of a
    `numba_flash.cuda.work.walk_dbias.ScorePlace`.
    """
    BLOCK_M, THREADS = tile.block_m, tile.threads
    (COLUMNS_K, COLUMNS_V), SMEM = shape.columns, tile.layout(*shape.columns)
    Q, DO, K, V = SMEM.q, SMEM.do, SMEM.k, SMEM.v
    Q_BYTES, DO_BYTES = BLOCK_M * pitch(COLUMNS_K), BLOCK_M * pitch(COLUMNS_V)
    K_BYTES, V_BYTES = tile.block_n * pitch(COLUMNS_K), tile.block_n * pitch(COLUMNS_V)
    copy_q = build_copy(BLOCK_M, COLUMNS_K, THREADS, in_order)
    copy_do = build_copy(BLOCK_M, COLUMNS_V, THREADS, in_order)
    copy_k = build_copy(tile.block_n, COLUMNS_K, THREADS, fragment.place_of_key)
    copy_v = build_copy(tile.block_n, COLUMNS_V, THREADS, fragment.place_of_key)

    @inline
    def load(smem, slot, tensors, place):
        at, kv_head, r = place.at, place.kv_head, place.region
        q, do = u32(smem + u32(Q) + slot * u32(Q_BYTES)), u32(smem + u32(DO) + slot * u32(DO_BYTES))
        k, v = u32(smem + u32(K) + slot * u32(K_BYTES)), u32(smem + u32(V) + slot * u32(V_BYTES))
        copy_q(q, tensors.q, at, at.head, r.row0, r.rows, i32(0), i32(COLUMNS_K))
        copy_do(do, tensors.do, at, at.head, r.row0, r.rows, i32(0), i32(COLUMNS_V))
        copy_k(k, tensors.k, at, kv_head, r.col0, r.cols, i32(0), i32(COLUMNS_K))
        copy_v(v, tensors.v, at, kv_head, r.col0, r.cols, i32(0), i32(COLUMNS_V))

    return load
