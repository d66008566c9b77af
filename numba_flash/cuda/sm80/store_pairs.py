"""Float32 rows of a warp on their way from registers to memory, two neighbours at a time."""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import f32, i32, inline, once, u32, u64
from numba_flash.cuda.score import fragment
from numba_flash.cuda.sm80.short_heads.load_short_head import FLOAT
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
