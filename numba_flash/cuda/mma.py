"""Matrix products of a warp group with wgmma: descriptors of shared tiles, the geometry of fragments, and the verbs on them.

Shared tiles are panels of 64 columns: rows of 128 bytes, swizzled as the copy engine writes them (128-byte mode). A fragment of 64 x N keeps in
register ``4 j + 2 r + c`` of lane l of warp w the element

    row = 16 w + l // 4 + 8 r        column = 8 j + 2 (l % 4) + c

which is also how the A operand of the next product wants pairs of columns, once they are packed: P need not move between threads.
"""

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import ptx

PANEL = 64  # columns
ROW_BYTES = 128
DESCRIPTOR_UNIT = 16


def panels(columns: int) -> int:
    """Panels that hold this many columns."""
    return -(-columns // PANEL)


def panel_bytes(rows: int) -> int:
    return rows * ROW_BYTES


@cuda.jit(device=True, forceinline=True)
def descriptor(address, panel_stride):
    """Low word of the descriptor of a tile; `panel_stride` in bytes matters only where the product runs along the rows."""
    return types.uint32((address & types.uint32(0x3FFFF)) >> types.uint32(4) | types.uint32(panel_stride // DESCRIPTOR_UNIT << 16))


@cuda.jit(device=True, forceinline=True)
def first_row():
    """Row of this thread's register 0 within the 64 of its warp group; r = 1 lies 8 below."""
    thread = types.int32(cuda.threadIdx.x) % types.int32(128)
    return types.int32(thread // 32 * 16 + thread % 32 // 4)


@cuda.jit(device=True, forceinline=True)
def first_column():
    """Column of this thread's register 0."""
    return types.int32(cuda.threadIdx.x % 4 * 2)


def build_scores(block_n, head_dim, block_m, bfloat16):
    """``scores(s, q_descriptor, k_descriptor)``: start S = Q K^T for the 64 rows of a warp group."""
    BLOCK_N, STEPS, BFLOAT16 = block_n, -(-head_dim // 16), int(bfloat16)
    Q_PANEL, K_PANEL = panel_bytes(block_m) // DESCRIPTOR_UNIT, panel_bytes(block_n) // DESCRIPTOR_UNIT

    @cuda.jit(device=True, forceinline=True)
    def scores(s, q_descriptor, k_descriptor):
        ptx.wgmma_shared(s, q_descriptor, k_descriptor, BLOCK_N, STEPS, Q_PANEL, K_PANEL, BFLOAT16)

    return scores


def build_values(block_n, head_dim_v, bfloat16):
    """``values(acc, p, v_descriptor)``: start O += P V."""
    HEAD_DIM_V, STEPS, BFLOAT16 = head_dim_v, block_n // 16, int(bfloat16)

    @cuda.jit(device=True, forceinline=True)
    def values(acc, p, v_descriptor):
        ptx.wgmma_registers(acc, p, v_descriptor, HEAD_DIM_V, STEPS, BFLOAT16)

    return values


def build_wait(block_n, head_dim_v):
    """``wait_scores(s)`` with at most one product behind them, ``wait_all(acc, s)``."""
    SCORES, OUTPUTS, NONE, ONE, ZERO = block_n // 2, head_dim_v // 2, 0, 1, 0

    @cuda.jit(device=True, forceinline=True)
    def wait_scores(s):
        ptx.wgmma_wait(s, s, ONE, SCORES, ZERO)

    @cuda.jit(device=True, forceinline=True)
    def wait_all(acc, s):
        ptx.wgmma_wait(acc, s, NONE, OUTPUTS, SCORES)

    return wait_scores, wait_all


def build_pack(count, bfloat16):
    """``pack(p, x)``: pairs of float32 to words of two 16-bit floats, rounded to nearest even; ``pack2`` for one pair."""
    COUNT, BFLOAT16 = count, bfloat16

    @cuda.jit(device=True, forceinline=True)
    def pack2(x, y):
        if BFLOAT16:
            return ptx.pack_bfloat16(x, y)
        return ptx.pack_float16(x, y)

    @cuda.jit(device=True, forceinline=True)
    def pack(p, x):
        for j in range(COUNT):
            p[j] = pack2(x[2 * j], x[2 * j + 1])

    return pack, pack2


def build_put(head_dim_v, block_m, bfloat16):
    """``put(tile, acc, inverse, me)``: rows of O times `inverse`, rounded, into this warp group's 64 rows of a shared tile in panels."""
    CHUNKS, PANEL_CHUNKS, PANEL_BYTES = head_dim_v // 8, PANEL // 8, panel_bytes(block_m)
    LAST_ODD, u32 = head_dim_v // 8 % 2, types.uint32
    _, pack2 = build_pack(0, bfloat16)

    @cuda.jit(device=True, forceinline=True)
    def address(tile, row, chunk):
        swizzled = (chunk % PANEL_CHUNKS) ^ (row % 8)
        return u32(tile + u32(chunk // PANEL_CHUNKS * PANEL_BYTES + row * ROW_BYTES + swizzled * 16))

    @cuda.jit(device=True, forceinline=True)
    def put(tile, acc, inverse, me):
        lane = types.int32(cuda.threadIdx.x % 32)
        row = types.int32(me * 64 + cuda.threadIdx.x % 128 // 32 * 16 + lane % 16)
        for j in range(0, CHUNKS - LAST_ODD, 2):
            a, b = pack2(acc[4 * j] * inverse[0], acc[4 * j + 1] * inverse[0]), pack2(acc[4 * j + 2] * inverse[1], acc[4 * j + 3] * inverse[1])
            c, d = pack2(acc[4 * j + 4] * inverse[0], acc[4 * j + 5] * inverse[0]), pack2(acc[4 * j + 6] * inverse[1], acc[4 * j + 7] * inverse[1])
            ptx.stmatrix(address(tile, row, types.int32(j) + lane // 16), a, b, c, d)
        if LAST_ODD:
            e = 4 * (CHUNKS - 1)
            a, b = pack2(acc[e] * inverse[0], acc[e + 1] * inverse[0]), pack2(acc[e + 2] * inverse[1], acc[e + 3] * inverse[1])
            ptx.stmatrix2(address(tile, row, types.int32(CHUNKS - 1)), a, b)

    return put
