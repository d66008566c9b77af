"""Few queries with many keys: warps of a block share the keys of its tiles, not its rows, which are
the queries of all heads that read these keys, so that each key is read once.

Each warp has m_w, l_w and O_w over the keys that it has seen, and in the end

    m = max_w m_w    l = sum_w 2^(m_w - m) l_w    O = sum_w 2^(m_w - m) O_w / l,

in the order of the warps, by way of shared memory.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, once, types, u32, u64
from numba_flash.cuda.score import fragment
from numba_flash.cuda.sm80.decode.decode_tiles import float_pitch
from numba_flash.cuda.sm80.load import build_chunk
from numba_flash.cuda.sm80.tiles import CHUNK, padded, pitch


class Steps(NamedTuple):
    """Functions; see `build_steps`."""

    commit: Any
    meet: Any


@once
def build_steps(tile, asynchronous):
    """`Steps`: ``commit()`` ends a group of copies; ``meet()`` waits for all lanes that share
    tiles, those of a warp or of all, who know what each other did then.
    """
    APART, ASYNCHRONOUS = tile.apart, asynchronous

    @inline
    def commit():
        if ASYNCHRONOUS:
            ptx.copy_commit()

    @inline
    def meet():
        if APART:
            cuda.syncwarp()
        else:
            cuda.syncthreads()

    return Steps(commit, meet)


@once
def build_load(tile, head_dim, asynchronous):
    """``load(at, x, first, stop)``: rows of x (group, n, head_dim) from `first` on, zeros from
    `stop` on, into a tile in shared memory.
    """
    ROWS, THREADS, PITCH = tile.block_m, tile.threads, pitch(head_dim)
    CHUNKS = padded(head_dim) // CHUNK
    query_of, head_of, _ = fragment.build_row(tile.group)
    chunk_of = build_chunk(head_dim, padded(head_dim), asynchronous)

    @inline
    def load(at, x, first, stop):
        for number in range(i32(cuda.threadIdx.x), ROWS * CHUNKS, THREADS):
            row, chunk = i32(number // CHUNKS), i32(number % CHUNKS)
            i = query_of(i32(first + row))
            own = x[index(head_of(i32(first + row)))]
            source = ptx.global_address(own) + u64(i64(i) * own.strides[0])
            source = u64(source + u64(i64(chunk * (2 * CHUNK))))
            target = u32(at + u32(row * PITCH + chunk * (2 * CHUNK)))
            chunk_of(target, own, source, i, chunk, first + row < stop)

    return load


@once
def build_gather(tile, head_dim_v):
    """``gather(smem, m_i, l_i, factor, scale_log2)``: m and l of a warp become those of all, l in
    the first lane of a row alone; the warp's O has to be multiplied by `factor`.
    """
    ROWS, WARPS, BLOCK_M, NEG_INF = 2 * tile.m_tiles, tile.warps, tile.block_m, -math.inf
    SUMS = tile.warps * tile.block_m * float_pitch(head_dim_v)  # behind the O of all

    @inline
    def place(smem, warp, r):
        row = cuda.threadIdx.x % 32 // 4 + r // 2 * 16 + r % 2 * 8
        return u32(smem + u32(SUMS) + u32((warp * BLOCK_M + row) * 8))

    @inline
    def gather(smem, m_i, l_i, factor, scale_log2):
        first_lane = cuda.threadIdx.x % 4 == 0
        cuda.syncthreads()  # all tiles have been read
        for r in range(ROWS):
            l = fragment.row_sum(l_i[r])
            if first_lane:
                own = place(smem, cuda.threadIdx.x // 32, r)
                ptx.store_shared_vector(own, (m_i[r], l))
        cuda.syncthreads()  # m and l of all warps are there
        for r in range(ROWS):
            largest = f32(NEG_INF)
            for warp in range(WARPS):
                m, _ = ptx.load_shared_pair(place(smem, warp, r))
                largest = ptx.maximum(largest, m)
            # a row that has seen nothing is shifted by 0, so that 2^(-inf - 0) = 0
            shift, total = largest if largest != f32(NEG_INF) else f32(0), f32(0)
            for warp in range(WARPS):
                m, l = ptx.load_shared_pair(place(smem, warp, r))
                total += ptx.ex2((m - shift) * scale_log2) * l
            factor[r] = ptx.ex2((m_i[r] - shift) * scale_log2)
            m_i[r] = largest
            l_i[r] = total if first_lane else f32(0)

    return gather


@once
def build_store(tile, head_dim_v, floats, bfloat16, turing, compact=False):
    """``store(smem, x, acc, factor, first, stop)``: the sum of all warps' rows, each warp's times
    its factors, to rows of x (group, n, head_dim_v) from `first` on, before `stop`; in float32 if
    `floats`, four of a row at the same time if rows follow each other (`compact`).
    """
    M_TILES, WARPS, BLOCK_M, THREADS = tile.m_tiles, tile.warps, tile.block_m, tile.threads
    HEAD_DIM_V, PITCH, GROUPS = head_dim_v, float_pitch(head_dim_v), padded(head_dim_v) // 8
    FLOATS, WIDE = floats, compact and head_dim_v % 4 == 0
    WIDTH = 4 if WIDE else 2
    ACROSS, WARP_BYTES = -(-head_dim_v // WIDTH), tile.block_m * float_pitch(head_dim_v)
    query_of, head_of, _ = fragment.build_row(tile.group)
    _, pack2 = fragment.build_pack(0, bfloat16, turing)

    @inline
    def put(smem, acc, factor):
        lane, warp = i32(cuda.threadIdx.x % 32), i32(cuda.threadIdx.x // 32)
        mine = u32(smem + u32((warp * BLOCK_M + lane // 4) * PITCH + lane % 4 * 8))
        for m in range(M_TILES):
            for j in range(GROUPS):
                for r in range(2):
                    e, x = (m * GROUPS + j) * 4 + 2 * r, factor[2 * m + r]
                    at = u32(mine + u32((16 * m + 8 * r) * PITCH + 32 * j))
                    ptx.store_shared_vector(at, (acc[e] * x, acc[e + 1] * x))

    @inline
    def put_pair(row, column, one, other):
        if FLOATS:
            row[index(column)] = one
            if column + 1 < HEAD_DIM_V:
                row[index(column + 1)] = other
        else:
            word = pack2(one, other)
            row[index(column)] = types.uint16(word & u32(0xFFFF))
            if column + 1 < HEAD_DIM_V:
                row[index(column + 1)] = types.uint16(word >> u32(16))

    @inline
    def sum_pair(at):
        """Of two columns of a row, over all warps in their order."""
        one, other = f32(0), f32(0)
        for warp in range(WARPS):
            x0, x1 = ptx.load_shared_pair(u32(at + u32(warp * WARP_BYTES)))
            one += x0
            other += x1
        return one, other

    @inline
    def store(smem, x, acc, factor, first, stop):
        put(smem, acc, factor)
        cuda.syncthreads()  # rows of all warps are there
        rows = min(i32(stop - first), i32(BLOCK_M))
        for number in range(i32(cuda.threadIdx.x), i32(rows * ACROSS), THREADS):
            row, column = i32(u32(number) // u32(ACROSS)), i32(u32(number) % u32(ACROSS) * WIDTH)
            at = u32(smem + u32(row * PITCH + column * 4))
            i = i32(first + row)
            own = x[index(head_of(i)), index(query_of(i))]
            one, other = sum_pair(at)
            if WIDE:
                more = sum_pair(u32(at + u32(8)))
                target = u64(ptx.global_address(own) + u64(i64(column) * 4))
                ptx.store_global(target, (one, other, more[0], more[1]))
            else:
                put_pair(own, column, one, other)

    return store


def build_rows(tile, shape, floats, compact, bfloat16):
    """``load``, ``gather`` and ``store`` of the above, as `sm80.forward.forward` uses them."""
    load = build_load(tile, shape.head_dim, shape.asynchronous)
    gather = build_gather(tile, shape.head_dim_v)
    store = build_store(tile, shape.head_dim_v, floats, bfloat16, shape.turing, compact)
    return load, gather, store
