"""Matrix products of a warp group with wgmma: descriptors of shared tiles, and the verbs on
fragments.

Shared tiles are panels of 64 columns (`numba_flash.cuda.score.swizzle`). A fragment of 64 x N is
one of 16 rows (`numba_flash.cuda.score.fragment`) for each warp of the group.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.score.swizzle import PANEL, panel_bytes, panels

UNIT = 16  # bytes, of what descriptors count


@inline
def descriptor(address, panel_stride):
    """Low word of the descriptor of a tile; `panel_stride` in bytes matters only where the product
    runs along the rows.
    """
    return u32((address & u32(0x3FFFF)) >> u32(4) | u32(panel_stride // UNIT << 16))


@inline
def first_row():
    """Row of this thread's register 0 within the 64 of its warp group; r = 1 lies 8 below."""
    thread = i32(cuda.threadIdx.x) % i32(128)
    return i32(thread // 32 * 16 + thread % 32 // 4)


@once
def build_scores(block_n, head_dim, block_m, bfloat16, k_rows=None, add=False):
    """``scores(s, q_descriptor, k_descriptor)``: start S = Q K^T for 64 rows of a warp group, or S
    += Q K^T with `add`; a tile of K may have more rows, `k_rows`.
    """
    BLOCK_N, STEPS, BFLOAT16, ADD = block_n, -(-head_dim // 16), int(bfloat16), int(add)
    Q_PANEL, K_PANEL = panel_bytes(block_m) // UNIT, panel_bytes(k_rows or block_n) // UNIT

    @inline
    def scores(s, q_descriptor, k_descriptor):
        ptx.wgmma_shared(
            s, q_descriptor, k_descriptor, BLOCK_N, STEPS, Q_PANEL, K_PANEL, ADD, BFLOAT16
        )

    return scores


@once
def build_values(block_n, head_dim_v, bfloat16):
    """``values(acc, p, v_descriptor)``: start O += P V."""
    HEAD_DIM_V, STEPS, BFLOAT16 = head_dim_v, block_n // 16, int(bfloat16)

    @inline
    def values(acc, p, v_descriptor):
        ptx.wgmma_registers(acc, p, v_descriptor, HEAD_DIM_V, STEPS, BFLOAT16)

    return values


@once
def build_new_values(block_n, head_dim_v, bfloat16):
    """``values(acc, p, v_descriptor, add)``: start O += P V, or O = P V if `add` (uint32) is 0."""
    HEAD_DIM_V, STEPS, BFLOAT16 = head_dim_v, block_n // 16, int(bfloat16)

    @inline
    def values(acc, p, v_descriptor, add):
        ptx.wgmma_add_registers(acc, p, v_descriptor, add, HEAD_DIM_V, STEPS, BFLOAT16)

    return values


@once
def build_narrow(block_n, head_dim, head_dim_v, bfloat16):
    """Of tiles in narrow panels: ``scores(s, q_descriptor, k_descriptor, add)``: start S += Q K^T
    for 64 rows of a warp group, or S = Q K^T if `add` is 0; ``values(acc, p, v_descriptor)``: start
    O += P V.
    """
    BLOCK_N, STEPS, BFLOAT16 = block_n, -(-head_dim // 16), int(bfloat16)
    HEAD_DIM_V, KEY_STEPS = head_dim_v, block_n // 16

    @inline
    def scores(s, q_descriptor, k_descriptor, add):
        ptx.wgmma_add_narrow(s, q_descriptor, k_descriptor, add, BLOCK_N, STEPS, BFLOAT16)

    @inline
    def values(acc, p, v_descriptor):
        ptx.wgmma_registers_narrow(acc, p, v_descriptor, HEAD_DIM_V, KEY_STEPS, BFLOAT16)

    return scores, values


@once
def build_narrow_gradients(rows, columns, bfloat16):
    """Of tiles in narrow panels, B of so many rows and columns: ``start(s, a_descriptor,
    b_descriptor)``: start S = A B^T for 64 rows of A; ``add(acc, p, b_descriptor)``: start acc += P
    B.
    """
    ROWS, COLUMNS, BFLOAT16 = rows, columns, int(bfloat16)
    STEPS, ROW_STEPS = -(-columns // 16), rows // 16

    @inline
    def start(s, a_descriptor, b_descriptor):
        ptx.wgmma_shared_narrow(s, a_descriptor, b_descriptor, ROWS, STEPS, BFLOAT16)

    @inline
    def add(acc, p, b_descriptor):
        ptx.wgmma_registers_narrow(acc, p, b_descriptor, COLUMNS, ROW_STEPS, BFLOAT16)

    return start, add


@once
def build_sum(count, steps, a_panel, b_panel, bfloat16, add):
    """``sum(acc, a_descriptor, b_descriptor)``: start ``acc = A B``, or ``acc += A B`` with `add`,
    both in shared memory, B as its rows.

    A is 64 x 16 `steps`, in panels of so many bytes, or its transpose as rows if `a_panel` is 0; B
    likewise with `count` columns.
    """
    COUNT, STEPS, ADD, BFLOAT16 = count, steps, int(add), int(bfloat16)
    A_PANEL, B_PANEL = a_panel // UNIT, b_panel // UNIT

    @inline
    def sum(acc, a_descriptor, b_descriptor):
        ptx.wgmma_shared(
            acc, a_descriptor, b_descriptor, COUNT, STEPS, A_PANEL, B_PANEL, ADD, BFLOAT16
        )

    return sum


@once
def build_wait(block_n, head_dim_v):
    """``wait_scores(s)`` with at most one product behind them, ``wait_all(acc, s)``."""
    SCORES, OUTPUTS, NONE, ONE, ZERO = block_n // 2, head_dim_v // 2, 0, 1, 0

    @inline
    def wait_scores(s):
        ptx.wgmma_wait(s, s, ONE, SCORES, ZERO)

    @inline
    def wait_all(acc, s):
        ptx.wgmma_wait(acc, s, NONE, OUTPUTS, SCORES)

    return wait_scores, wait_all


# ---- float32 in planes of float16, see `numba_flash.cuda.passes.write_planes`


@once
def build_planes_scores(block_n, columns, block_m, planes):
    """``scores(s, low, q_descriptor, k_descriptor)``: start S = Q K^T for 64 rows of a warp group,
    in a sum for each panel, after each other, and products with low planes in one of their own;
    ``wait(s, low)`` for all, ``add(s, low)`` them.
    """
    BLOCK_N, STEPS, PLANES = block_n, columns // 16, planes
    Q_PANEL, K_PANEL = panel_bytes(block_m) // UNIT, panel_bytes(block_n) // UNIT
    Q_PLANE, K_PLANE = panels(columns) * Q_PANEL, panels(columns) * K_PANEL
    COUNT, NONE, LOWERED = block_n // 2, 0, 1 / ptx.LOW
    COUNT_LOW, SUMS = COUNT if planes > 1 else 0, panels(columns)
    COUNT_ALL = SUMS * COUNT

    @inline
    def scores(s, low, q_descriptor, k_descriptor):
        ptx.wgmma_planes_shared(
            s, low, q_descriptor, k_descriptor,
            BLOCK_N, STEPS, PLANES, Q_PANEL, K_PANEL, Q_PLANE, K_PLANE,
        )  # fmt: skip

    @inline
    def wait(s, low):
        ptx.wgmma_wait(s, low, NONE, COUNT_ALL, COUNT_LOW)

    @inline
    def add(s, low):
        for e in range(COUNT):
            for n in range(1, SUMS):
                s[e] += s[n * COUNT + e]
        for e in range(COUNT_LOW):
            s[e] += low[e] * f32(LOWERED)

    return scores, wait, add


@once
def build_planes_values(block_n, columns, planes):
    """``values(acc, high, low, p, v_tile, factor)``: O += factor P V, one panel of V after the
    other; their sums leave the tensor cores before they are added to O. The caller hands over
    `high` and `low`, registers for a panel.

    `v_tile` is the address of a tile, in panels, all high ones first.
    """
    PANEL_BYTES = panel_bytes(block_n)
    V_PLANE = panels(columns) * PANEL_BYTES // UNIT

    def build_panel(panel, rest):
        N, STEPS, PLANES = min(PANEL, columns - panel * PANEL), block_n // 16, planes
        AT, FIRST, LOWERED = panel * PANEL_BYTES, panel * PANEL // 2, 1 / ptx.LOW
        COUNT, COUNT_LOW, NONE = N // 2, N // 2 if planes > 1 else 0, 0

        @inline
        def one(acc, high, low, p, v_tile, factor):
            v_descriptor = descriptor(u32(v_tile + u32(AT)), u32(PANEL_BYTES))
            ptx.wgmma_planes_registers(high, low, p, v_descriptor, N, STEPS, PLANES, V_PLANE)
            ptx.wgmma_wait(high, low, NONE, COUNT, COUNT_LOW)
            for e in range(COUNT_LOW):
                high[e] += low[e] * f32(LOWERED)
            for e in range(COUNT):
                acc[FIRST + e] += high[e] * factor
            rest(acc, high, low, p, v_tile, factor)

        return one

    @inline
    def values(acc, high, low, p, v_tile, factor):
        pass

    for panel in reversed(range(panels(columns))):
        values = build_panel(panel, values)
    return values


@once
def build_planes_rows(columns, depth, b_rows, planes):
    """``start(high, low, a, b_tile)``: start A B, A in registers, `columns` of B, which are no more
    than a panel, as `depth` of the `b_rows` rows of its planes.
    """
    N, STEPS, PLANES, B_PLANE = columns, depth // 16, planes, panel_bytes(b_rows) // UNIT

    @inline
    def start(high, low, a, b_tile):
        b_descriptor = descriptor(b_tile, u32(0))
        ptx.wgmma_planes_registers(high, low, a, b_descriptor, N, STEPS, PLANES, B_PLANE)

    return start


@once
def build_planes_columns(columns, depth, a_plane, b_plane, planes):
    """``start(high, low, a_tile, b_tile)``: start A B of 64 rows of A, both as rows along the sum,
    of which there are `depth`; low planes lie so many bytes behind high ones.
    """
    N, STEPS, PLANES, ALONG = columns, depth // 16, planes, 0
    A_PLANE, B_PLANE = a_plane // UNIT, b_plane // UNIT

    @inline
    def start(high, low, a_tile, b_tile):
        ptx.wgmma_planes_shared(
            high, low, descriptor(a_tile, u32(0)), descriptor(b_tile, u32(0)),
            N, STEPS, PLANES, ALONG, ALONG, A_PLANE, B_PLANE,
        )  # fmt: skip

    return start


@once
def build_planes_sum(columns, planes, pending=0):
    """``join(high, low)``: wait for a product, but not for so many after it, and add its low sums
    to the high ones; ``add(acc, high, factor)``: acc += high factor.
    """
    COUNT, PENDING, LOWERED = columns // 2, pending, 1 / ptx.LOW
    COUNT_LOW = COUNT if planes > 1 else 0

    @inline
    def join(high, low):
        ptx.wgmma_wait(high, low, PENDING, COUNT, COUNT_LOW)
        for e in range(COUNT_LOW):
            high[e] += low[e] * f32(LOWERED)

    @inline
    def add(acc, high, factor):
        for e in range(COUNT):
            acc[e] += high[e] * factor

    return join, add
