"""How a consumer of the forward pass ends a work item: equation (6), and O and lse on their way to
memory.
"""

import math

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.lang import cuda, f32, i32, inline, u32
from numba_flash.cuda.number import index
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.load_forward import WORD
from numba_flash.cuda.sm90.pipeline import Place
from numba_flash.cuda.sm90.rows import ROWS
from numba_flash.cuda.swizzle import panel_bytes


def build_finish(
    head_dim_v, write_lse, store_by, bfloat16, options, layout, in_base_e=False, raised=0.0
):
    """``finish(maps, smem, turn, me, acc, m_i, l_i, o, lse, batches, parameters)``: the work item
    of a turn, whose rows have these sums; `store_by` and arrays are those of
    `numba_flash.cuda.sm90.forward`, `layout` is that of shared memory.

    in_base_e : m_i are shifts in base e, and l is `raised`; else shifts in base 2, lower by that.
    """
    WORK, O_STAGE, O_BYTES = one_type(layout.work), layout.o, layout.o_panels * panel_bytes(ROWS)
    WRITE_LSE, TO_MAP, PARTS = write_lse, store_by == "map", store_by == "parts"
    SEQUENCES, PACKED, IN_BASE_E, RAISED = options.sequences, options.packed, in_base_e, raised
    DROPOUT = bool(options.dropout)
    NEG_INF, NAN, LN2 = -math.inf, math.nan, math.log(2.0)
    _, zero_rows = softmax.build_zero(head_dim_v // 2)
    put_row = store.build_put_row(head_dim_v, PARTS, bfloat16)
    stage = store.build_stage(head_dim_v, layout.o_panels, bfloat16) if TO_MAP else None

    @inline
    def log_sum(m, l):
        if IN_BASE_E:
            return m + (ptx.lg2(l) - f32(RAISED)) * f32(LN2)
        return (m + ptx.lg2(l)) * f32(LN2)

    @inline
    def finish(maps, smem, turn, me, acc, m_i, l_i, o, lse, batches, parameters):
        """(6) O = O / l, lse = m + log l of a work item, stored; a row that saw nothing has O = 0,
        lse = -inf.
        """
        inverse = cuda.local.array(2, f32)  # registers: 1 / l of the thread's rows
        b0 = pipeline.read(smem, WORK, turn, WORD.b0)
        b1 = pipeline.read(smem, WORK, turn, WORD.b1)
        h = pipeline.read(smem, WORK, turn, WORD.head)
        row0 = i32(pipeline.read(smem, WORK, turn, WORD.row0) + me * ROWS)
        q0, queries, rows = i32(0), i32(o.shape[3]), i32(o.shape[3])
        if SEQUENCES:
            q0 = pipeline.read(smem, WORK, turn, WORD.q0)
            queries = pipeline.read(smem, WORK, turn, WORD.queries)
        if PARTS:
            b0 = i32(b0 + pipeline.read(smem, WORK, turn, WORD.part) * batches)
        if PACKED:
            rows = queries
        for r in range(2):
            l, i = fragment.row_sum(l_i[r]), row0 + wgmma.first_row() + 8 * r
            if SEQUENCES and i >= queries:
                l = f32(0)
            inverse[r] = f32(0) if l == f32(0) else ptx.rcp(l)
            if DROPOUT:
                inverse[r] *= f32(parameters.keep_scale)
            value = log_sum(m_i[r], l) if l != f32(0) else f32(NEG_INF)
            if SEQUENCES and pipeline.read(smem, WORK, turn, WORD.invalid) != 0:
                inverse[r] = f32(NAN)
                value = f32(NAN)
            if WRITE_LSE and i < rows and cuda.threadIdx.x % 4 == 0:
                lse[index(b0), index(b1), index(h), index(q0 + i)] = value
        if cuda.any_sync(fragment.ALL_LANES, inverse[0] == f32(0) or inverse[1] == f32(0)):
            zero_rows(acc, inverse)  # 0 * NaN is not 0
        pipeline.release(smem, WORK, turn)
        if TO_MAP:
            staged = smem + u32(O_STAGE + me * O_BYTES)
            stage(maps[3], staged, acc, inverse, me, Place(0, row0, h, b1, b0))
        else:
            for r in range(2):
                i = row0 + wgmma.first_row() + 8 * r
                if i < rows:
                    o_row = o[index(b0), index(b1), index(h), index(q0 + i)]
                    put_row(ptx.global_address(o_row), acc, inverse, r)

    return finish
