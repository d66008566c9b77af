"""Work of forward kernels that keep their part of a bias: a unit is a block of queries of a head of
a batch element. Those that share a bias come one after the other, and each block of threads has as
many, one more or less.
"""

from typing import NamedTuple

from numba_flash.cuda.runtime.lang import cuda, i32, inline, once, u32, u64


class Unit(NamedTuple):
    """Where it is; all int32. `rows` are those of the head."""

    b0: int
    b1: int
    head: int
    row0: int
    rows: int


@once
def build_units(block_m):
    """``first_of(block, sizes)``: the number of a block's first unit, and of the one after its
    last, that of the next block's; ``unit_of(number, sizes)``; ``after(x, number, sizes)``: unit
    `number`, which comes after x.
    """
    BLOCK_M = block_m

    @inline
    def first_of(block, sizes):
        return i32(u64(block) * u64(sizes.units) // u64(cuda.gridDim.x))

    @inline
    def unit_of(number, sizes):
        tile, b1 = u32(number) // u32(sizes.b1), u32(number) % u32(sizes.b1)
        block, of_all = u32(tile) % u32(sizes.blocks), u32(tile) // u32(sizes.blocks)
        head, b0 = u32(of_all) % u32(sizes.heads), u32(of_all) // u32(sizes.heads)
        return Unit(i32(b0), i32(b1), i32(head), i32(block * BLOCK_M), i32(sizes.queries))

    @inline
    def after(x, number, sizes):
        if i32(x.b1 + 1) < i32(sizes.b1):
            return Unit(x.b0, i32(x.b1 + 1), x.head, x.row0, x.rows)
        return unit_of(number, sizes)

    return first_of, unit_of, after
