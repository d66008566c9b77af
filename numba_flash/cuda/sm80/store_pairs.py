"""Float32 rows of a warp on their way from registers to memory, two neighbours at a time; those of
dQ, of which two warps have a part each, by way of shared memory.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import f32, i32, inline, once, u32, u64
from numba_flash.cuda.score import fragment
from numba_flash.cuda.sm80.bias_gradient.load_dq_dbias import plus
from numba_flash.cuda.sm80.short_heads.load_head import FLOAT, VECTOR, WAYS
from numba_flash.cuda.sm80.tiles import padded


class Pairs(NamedTuple):
    """What `build_store_pairs` stores: registers, each row's factor, the first row of this lane and
    the one after the last of all, and where the centre of columns is in shared memory.
    """

    x: Any
    acc: Any
    factor: Any
    row: int
    stop: int
    centres: int


@once
def build_store_pairs(m_tiles, head_dim, neighbours=False, centred=False):
    """``store(pairs)``: this lane's part of x (n, head_dim), whose rows lie at multiples of 8
    bytes, each times its factor; a lane's rows are `neighbours`
    (`numba_flash.cuda.score.fragment`), or those of a fragment. What is `centred` gets its columns'
    centre back in rows whose factor is not 0.
    """
    ROWS, GROUPS, HEAD_DIM = 2 * m_tiles, padded(head_dim) // 8, head_dim
    NEIGHBOURS, CENTRED = neighbours, centred

    @inline
    def put(number, t):
        r, j = number % ROWS, number // ROWS
        i = i32(t.row + (r if NEIGHBOURS else r // 2 * 16 + r % 2 * 8))
        column = i32(8 * j + fragment.first_column())
        if i < t.stop and column < HEAD_DIM:
            e, factor = (r // 2 * GROUPS + j) * 4 + 2 * (r % 2), t.factor[r]
            x, y = t.acc[e] * factor, t.acc[e + 1] * factor
            if CENTRED and factor != f32(0):
                c = ptx.load_shared_pair(u32(t.centres + u32(column * FLOAT)))
                x, y = x + c[0], y + c[1]
            at = u64(i) * u64(t.x.strides[0]) + u64(u32(column * FLOAT))
            ptx.store_global(u64(ptx.global_address(t.x) + at), (x, y))

    return ptx.repeated(ROWS * GROUPS, put)


@once
def build_add_dq(shape, tile):
    """``put(smem, dq_acc, down)``: a warp's dQ of its keys to shared memory, each row times its
    factor; ``add(smem, head, stride,
    row0, queries, factor)``: half of the columns of its rows, the sum of both warps that have them,
    times a factor, to dQ of the head at that address.
    """
    HEAD_DIM, THREADS = shape.head_dim, tile.threads
    VECTORS = padded(HEAD_DIM) // 8  # of a thread
    MINE = VECTORS // WAYS

    @inline
    def put(smem, acc, down):
        mine = u32(smem + u32(ptx.bounded_thread_here() * VECTOR))
        for n in range(VECTORS):
            for r in range(2):
                acc[4 * n + 2 * r] *= down[r]
                acc[4 * n + 2 * r + 1] *= down[r]
            x = (acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3])
            ptx.store_shared_vector(u32(mine + u32(n * THREADS * VECTOR)), x)

    @inline
    def add(smem, head, stride, row0, queries, factor):
        thread = ptx.bounded_thread_here()
        warp, lane = i32(thread // 32), i32(thread % 32)
        rows, way = i32(warp // WAYS), i32(warp % WAYS)
        for turn in range(MINE):
            n = i32(way * MINE + turn)
            at = u32(smem + u32((n * THREADS + rows * (32 * WAYS) + lane) * VECTOR))
            x, y = ptx.load_shared_four(at), ptx.load_shared_four(u32(at + u32(32 * VECTOR)))
            column = i32(n * 8 + lane % 4 * 2)
            for r in range(2):
                i = i32(row0 + rows * 16 + lane // 4 + 8 * r)
                if i < queries and column < HEAD_DIM:
                    pair = (x[2 * r] + y[2 * r]) * factor, (x[2 * r + 1] + y[2 * r + 1]) * factor
                    to = u64(plus(head, i, stride) + u64(u32(FLOAT * column)))
                    ptx.store_global(to, pair)

    return put, add
