"""Matrix products of a warp group with wgmma: descriptors of shared tiles, the geometry of fragments, and the verbs on them.

Shared tiles are panels of 64 columns (`numba_flash.cuda.swizzle`). A fragment of 64 x N keeps in register ``4 j + 2 r + c`` of lane l of
warp w the element

    row = 16 w + l // 4 + 8 r        column = 8 j + 2 (l % 4) + c

which is also how the A operand of the next product wants pairs of columns, once they are packed: P need not move between threads.
"""

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import pipeline, ptx
from numba_flash.cuda.swizzle import PANEL, ROW_BYTES, panel_bytes, panels

DESCRIPTOR_UNIT = 16


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
    BLOCK_N, STEPS, BFLOAT16, OVERWRITE = block_n, -(-head_dim // 16), int(bfloat16), 0
    Q_PANEL, K_PANEL = panel_bytes(block_m) // DESCRIPTOR_UNIT, panel_bytes(block_n) // DESCRIPTOR_UNIT

    @cuda.jit(device=True, forceinline=True)
    def scores(s, q_descriptor, k_descriptor):
        ptx.wgmma_shared(s, q_descriptor, k_descriptor, BLOCK_N, STEPS, Q_PANEL, K_PANEL, OVERWRITE, BFLOAT16)

    return scores


def build_values(block_n, head_dim_v, bfloat16):
    """``values(acc, p, v_descriptor)``: start O += P V."""
    HEAD_DIM_V, STEPS, BFLOAT16 = head_dim_v, block_n // 16, int(bfloat16)

    @cuda.jit(device=True, forceinline=True)
    def values(acc, p, v_descriptor):
        ptx.wgmma_registers(acc, p, v_descriptor, HEAD_DIM_V, STEPS, BFLOAT16)

    return values


def build_sum(count, steps, a_panel, b_panel, bfloat16, add):
    """``sum(acc, a_descriptor, b_descriptor)``: start ``acc = A B``, or ``acc += A B`` with `add`, both in shared memory, B as its rows.

    A is 64 x 16 `steps`, in panels of so many bytes, or its transpose as rows if `a_panel` is 0; B likewise with `count` columns.
    """
    COUNT, STEPS, ADD, BFLOAT16 = count, steps, int(add), int(bfloat16)
    A_PANEL, B_PANEL = a_panel // DESCRIPTOR_UNIT, b_panel // DESCRIPTOR_UNIT

    @cuda.jit(device=True, forceinline=True)
    def sum(acc, a_descriptor, b_descriptor):
        ptx.wgmma_shared(acc, a_descriptor, b_descriptor, COUNT, STEPS, A_PANEL, B_PANEL, ADD, BFLOAT16)

    return sum


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


def build_put_chunks(head_dim_v, first_panel, bfloat16, rows=64):
    """``put_chunks(tile, acc, inverse, j)``: as `build_put`'s, but only chunks of 8 columns j and j + 1, from the first panel on."""
    CHUNKS, PANEL_CHUNKS, FIRST = head_dim_v // 8, PANEL // 8, first_panel * PANEL // 8
    ROWS_BYTES, u32, ZERO = panel_bytes(rows), types.uint32, types.uint32(0)
    _, pack2 = build_pack(0, bfloat16)

    @cuda.jit(device=True, forceinline=True)
    def put_chunks(tile, acc, inverse, j):
        lane, warp, e = types.int32(cuda.threadIdx.x % 32), types.int32(cuda.threadIdx.x % 128 // 32), 4 * (FIRST + j)
        row, right = types.int32(warp * 16 + lane % 16), types.int32(lane // 16)
        a, b = pack2(acc[e] * inverse[0], acc[e + 1] * inverse[0]), pack2(acc[e + 2] * inverse[1], acc[e + 3] * inverse[1])
        c, d = ZERO, ZERO
        if FIRST + j + 1 < CHUNKS:
            c = pack2(acc[e + 4] * inverse[0], acc[e + 5] * inverse[0])
            d = pack2(acc[e + 6] * inverse[1], acc[e + 7] * inverse[1])
        chunk = types.int32((j % PANEL_CHUNKS + right) ^ (row % 8))
        ptx.stmatrix(u32(tile + u32(j // PANEL_CHUNKS * ROWS_BYTES + row * ROW_BYTES + chunk * 16)), a, b, c, d)

    return put_chunks


def build_put(head_dim_v, first_panel, count, bfloat16, rows=64):
    """``put(tile, acc, inverse)``: `count` panels of 64 rows of O times `inverse`, rounded, into a tile of panels of `rows` rows."""
    COUNT = min(count * PANEL, head_dim_v - first_panel * PANEL) // 8
    put_chunks = build_put_chunks(head_dim_v, first_panel, bfloat16, rows)

    @cuda.jit(device=True, forceinline=True)
    def put(tile, acc, inverse):
        for j in range(0, COUNT, 2):
            put_chunks(tile, acc, inverse, j)

    return put


def build_put_row(head_dim_v, float32, bfloat16):
    """``put_row(address, acc, inverse, r)``: this thread's columns of row r of O times its inverse, to memory; rounded unless `float32`.

    `address` is that of the row; its elements are neighbours.
    """
    CHUNKS, FLOAT32, BYTES, u64 = head_dim_v // 8, float32, 4 if float32 else 2, types.uint64
    _, pack2 = build_pack(0, bfloat16)

    @cuda.jit(device=True, forceinline=True)
    def put_row(address, acc, inverse, r):
        mine = u64(address + u64(first_column() * BYTES))
        for j in range(CHUNKS):
            x, y = acc[4 * j + 2 * r] * inverse[r], acc[4 * j + 2 * r + 1] * inverse[r]
            if FLOAT32:
                ptx.store_global(u64(mine + u64(8 * BYTES * j)), (x, y))
            else:
                ptx.store_global(u64(mine + u64(8 * BYTES * j)), (pack2(x, y),))

    return put_row


def build_stage(head_dim_v, panels_at_a_time, bfloat16):
    """``stage(tensor_map, tile, acc, inverse, me, consumers, where)``: store 64 rows of O through shared memory, some panels at a time.

    `where` is (first column, row, head, b1, b0); rows and columns beyond the array's ends are not stored.
    """
    PANELS, STEP, ROWS_BYTES, i32, u32 = panels(head_dim_v), panels_at_a_time, panel_bytes(64), types.int32, types.uint32
    puts = [build_put(head_dim_v, first, min(STEP, PANELS - first), bfloat16) for first in range(0, PANELS, STEP)]

    def build_step(step, rest):
        put, FIRST, COUNT = puts[step], step * STEP, min(STEP, PANELS - step * STEP)

        @cuda.jit(device=True, forceinline=True)
        def one(tensor_map, tile, acc, inverse, me, consumers, where):
            if cuda.threadIdx.x % pipeline.WARP_GROUP == 0:
                ptx.bulk_wait_read()
            pipeline.meet_warp_group(me, consumers)  # what was stored from here before has been read
            put(tile, acc, inverse)
            ptx.fence_proxy_async()
            pipeline.meet_warp_group(me, consumers)  # all rows are there
            if cuda.threadIdx.x % pipeline.WARP_GROUP == 0:
                row, head, b1, b0 = i32(where[1]), i32(where[2]), i32(where[3]), i32(where[4])
                for panel in range(COUNT):
                    column = i32(where[0] + (FIRST + panel) * PANEL)
                    ptx.tensor_store(u32(tile + u32(panel * ROWS_BYTES)), tensor_map, column, row, head, b1, b0)
                ptx.bulk_commit()
            rest(tensor_map, tile, acc, inverse, me, consumers, where)

        return one

    @cuda.jit(device=True, forceinline=True)
    def stage(tensor_map, tile, acc, inverse, me, consumers, where):
        pass

    for step in reversed(range(len(puts))):
        stage = build_step(step, stage)
    return stage
