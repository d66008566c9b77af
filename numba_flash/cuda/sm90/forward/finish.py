"""The epilogue of a work item of the forward pass: equation (6), and O and lse on their way to
memory.
"""

import math

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import Centred
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.swizzle import panel_bytes
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.forward.load_forward import WORD
from numba_flash.cuda.sm90.pipeline import TilePlace
from numba_flash.cuda.sm90.rows import ROWS

LN2, NEG_INF = math.log(2.0), -math.inf


def build_finish(config, layout, log_sum, factor):
    """``finish(smem, item_n, me, acc, m_i, l_i, given, numbers)``: the block's work item `item_n`,
    whose rows have these sums; `given` are the kernel's arguments.

    log_sum : ``log_sum(m, l, numbers)``: of a row, the natural logarithm of its sum, or -inf.
    factor : ``factor(smem, item_n, extras, numbers)``: what leads from sums of P V, divided by
    those
        of P, to O.
    """
    options, dv, WORK = config.options, config.dv, one_type(layout.work)
    WRITE_LSE, TO_MAP, KV_SPLITS = (
        config.write_lse,
        config.store == "map",
        config.store == "kv_splits",
    )
    SEQUENCES, PACKED, FP16X2 = options.sequences, options.packed, config.dtype == "float32"
    SHIFTED, CENTRED = Centred.of(options) if FP16X2 else (False, False)
    NAN, BFLOAT16 = math.nan, config.dtype == "bfloat16"
    _, zero_rows = softmax.build_zero(dv // 2)
    put_row = store.build_put_row(dv, FP16X2 or KV_SPLITS, BFLOAT16)
    put_centred = store.build_put_floats(dv, True)
    O_STAGE, O_BYTES, stage = 0, 0, None
    if TO_MAP:
        O_STAGE, O_BYTES = layout.o, layout.o_panels * panel_bytes(ROWS)
        stage = store.build_stage(dv, layout.o_panels, BFLOAT16)

    @inline
    def finish(smem, item_n, me, acc, m_i, l_i, given, numbers):
        """(6) O = O / l, lse = m + log l of a work item, stored; a row that saw nothing has O = 0,
        lse = -inf.
        """
        o, lse, extras = given.o, given.lse, given.extras
        inverse = cuda.local.array(2, f32)  # registers: factors of the thread's rows of O
        b0 = pipeline.read(smem, WORK, item_n, WORD.b0)
        b1 = pipeline.read(smem, WORK, item_n, WORD.b1)
        h = pipeline.read(smem, WORK, item_n, WORD.head)
        if CENTRED:
            kv_head = pipeline.read(smem, WORK, item_n, WORD.kv_head)
        row0 = i32(pipeline.read(smem, WORK, item_n, WORD.row0) + me * ROWS)
        q0, queries, rows = i32(0), i32(o.shape[3]), i32(o.shape[3])
        if SEQUENCES:
            q0 = pipeline.read(smem, WORK, item_n, WORD.q0)
            queries = pipeline.read(smem, WORK, item_n, WORD.queries)
        stored0 = b0
        if KV_SPLITS:
            part = pipeline.read(smem, WORK, item_n, WORD.kv_split)
            stored0 = i32(b0 + part * i32(given.sizes.b0))
        if PACKED:
            rows = queries
        to_o = factor(smem, item_n, extras, numbers)
        for r in range(2):
            l, i = fragment.row_sum(l_i[r]), row0 + wgmma.first_row() + 8 * r
            if SEQUENCES and i >= queries:
                l = f32(0)
            inverse[r] = f32(0) if l == f32(0) else ptx.rcp(l) * to_o
            value = log_sum(m_i[r], l, numbers)
            if SHIFTED and i < queries:
                value += extras.shifts[index(b0), index(b1), index(h), index(q0 + i)]
            if SEQUENCES and pipeline.read(smem, WORK, item_n, WORD.invalid) != 0:
                inverse[r] = f32(NAN)
                value = f32(NAN)
            if WRITE_LSE and i < rows and cuda.threadIdx.x % 4 == 0:
                lse[index(stored0), index(b1), index(h), index(q0 + i)] = value
        if cuda.any_sync(fragment.ALL_LANES, inverse[0] == f32(0) or inverse[1] == f32(0)):
            zero_rows(acc, inverse)  # 0 * NaN is not 0
        pipeline.release(smem, WORK, item_n)
        if TO_MAP:
            staged = smem + u32(O_STAGE + me * O_BYTES)
            stage(given.maps[3], staged, acc, inverse, me, TilePlace(0, row0, h, b1, b0))
        else:
            if CENTRED:
                centre = extras.centres[1, index(b0), index(b1), index(kv_head)]
            for r in range(2):
                i = row0 + wgmma.first_row() + 8 * r
                if i < rows:
                    o_row = o[index(stored0), index(b1), index(h), index(q0 + i)]
                    if CENTRED:
                        put_centred(ptx.global_address(o_row), acc, inverse, r, centre)
                    else:
                        put_row(ptx.global_address(o_row), acc, inverse, r)

    return finish


@inline
def log_sum_base_2(m, l, numbers):
    """Of shifts in base 2; `l` is of P that is lower or larger by as much."""
    return (m + ptx.lg2(l)) * f32(LN2) if l != f32(0) else f32(NEG_INF)


@once
def build_log_sum(raised):
    """``log_sum(m, l, numbers)``: of shifts in base e, and `l` larger by two to a power."""
    RAISED = raised

    @inline
    def log_sum(m, l, numbers):
        return m + (ptx.lg2(l) - f32(RAISED)) * f32(LN2) if l != f32(0) else f32(NEG_INF)

    return log_sum


@inline
def as_it_is(smem, item_n, extras, numbers):
    """Of sums that only have to be divided."""
    return f32(1)
