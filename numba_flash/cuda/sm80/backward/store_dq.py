"""dQ of warps that share rows and have a part of the keys each, on its way from registers to
memory: it is added in shared memory, in their order.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import i32, inline, once, u32, u64
from numba_flash.cuda.score import fragment
from numba_flash.cuda.sm80.bias_gradient.load_dq_dbias import plus
from numba_flash.cuda.sm80.resident_bias import VECTOR
from numba_flash.cuda.sm80.tiles import padded


@once
def build_add_dq(head_dim, tile, kind=None):
    """``put(smem, dq_acc)``: a warp's dQ of its keys to shared memory; ``add(smem, head, stride,
    row0, queries, scale)``: a share of the block's rows, the sum of all warps that have them, to dQ
    of the head at that address, with rows a `stride` apart: of 16 bits of that `kind`, else of
    float32.
    """
    M_TILES, WARPS_N, THREADS, HEAD_DIM = tile.m_tiles, tile.warps_n, tile.threads, head_dim
    GROUPS = padded(HEAD_DIM) // 8
    VECTORS = M_TILES * GROUPS  # of a thread
    MINE, ALL = -(-VECTORS // WARPS_N), VECTORS % WARPS_N == 0
    SIZE, FLOAT32 = 4 if kind is None else 2, kind is None
    _, pack2 = fragment.build_pack(0, *(kind or (False, False)))

    @inline
    def put(smem, dq_acc):
        mine = u32(smem + u32(ptx.bounded_thread_here() * VECTOR))
        for n in range(VECTORS):
            x = (dq_acc[4 * n], dq_acc[4 * n + 1], dq_acc[4 * n + 2], dq_acc[4 * n + 3])
            ptx.store_shared_vector(u32(mine + u32(n * THREADS * VECTOR)), x)

    @inline
    def write(to, x, y):
        if FLOAT32:
            ptx.store_global(to, (x, y))
        else:
            ptx.store_global(to, (pack2(x, y),))

    @inline
    def add(smem, head, stride, row0, queries, scale):
        thread = ptx.bounded_thread_here()
        warp, lane = i32(thread // 32), i32(thread % 32)
        warp_m, warp_n = i32(warp // WARPS_N), i32(warp % WARPS_N)
        for turn in range(MINE):
            n = i32(warp_n * MINE + turn)
            if not ALL and n >= VECTORS:
                continue
            at = u32(smem + u32((n * THREADS + warp_m * (32 * WARPS_N) + lane) * VECTOR))
            total = ptx.load_shared_four(at)
            for w in range(1, WARPS_N):
                x = ptx.load_shared_four(u32(at + u32(w * 32 * VECTOR)))
                total = (total[0] + x[0], total[1] + x[1], total[2] + x[2], total[3] + x[3])
            m, group = i32(0), n
            if M_TILES > 1:
                m, group = i32(n // GROUPS), i32(n % GROUPS)
            column = i32(group * 8 + lane % 4 * 2)
            row = i32(row0 + warp_m * (16 * M_TILES) + m * 16 + lane // 4)
            if column < HEAD_DIM:
                for r in range(2):
                    i = i32(row + 8 * r)
                    if i < queries:
                        to = u64(plus(head, i, stride) + u64(u32(SIZE * column)))
                        write(to, total[2 * r] * scale, total[2 * r + 1] * scale)

    return put, add
