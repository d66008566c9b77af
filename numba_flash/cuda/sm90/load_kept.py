"""The thread that moves data in the forward pass that keeps its part of a bias."""

from numba_flash.cuda import ptx
from numba_flash.cuda.lang import cuda, i32, inline, once, u32
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.pipeline import Place
from numba_flash.cuda.swizzle import NARROW_ROW_BYTES
from numba_flash.cuda.units import build_units


@once
def build_load(ring, rows):
    """``load(tensor_map, smem, n, place)``: have the n-th tile of a ring fetched into its slot once
    that is free (by one thread): so many rows of a narrow panel. What lies outside becomes 0.
    """
    RING, BYTES = one_type(ring), rows * NARROW_ROW_BYTES

    @inline
    def load(tensor_map, smem, n, place):
        pipeline.wait_free(smem, RING, n)
        ready, to = pipeline.mbarrier(smem, RING, RING.ready, n), pipeline.tile(smem, RING, n)
        ptx.mbarrier_expect(ready, u32(BYTES))
        row, head, b1, b0 = i32(place.row), i32(place.head), i32(place.b1), i32(place.b0)
        ptx.tensor_load(to, tensor_map, i32(place.column), row, head, b1, b0, ready)

    return load


@once
def build_produce(tile):
    """``produce(maps, smem, sizes)``: have the copy engine fetch what each unit of this block
    needs.
    """
    SMEM, TILES, BLOCK_N = tile.layout(), tile.tiles, tile.block_n
    load_q = build_load(SMEM.q, tile.block_m)
    load_k, load_v = build_load(SMEM.k, BLOCK_N), build_load(SMEM.v, BLOCK_N)
    first_of, unit_of, after = build_units(tile.block_m)

    @inline
    def produce(maps, smem, sizes):
        number = first_of(cuda.blockIdx.x, sizes)
        stop = first_of(cuda.blockIdx.x + 1, sizes)
        x, n, turn = unit_of(number, sizes), u32(0), u32(0)
        while number < stop:
            kv_head = i32(u32(x.head) // u32(sizes.group))
            for t in range(TILES):
                keys = Place(0, i32(t * BLOCK_N), kv_head, x.b1, x.b0)
                load_k(maps[1], smem, n, keys)
                if t == 0:
                    load_q(maps[0], smem, turn, Place(0, x.row0, x.head, x.b1, x.b0))
                load_v(maps[2], smem, n, keys)
                n = u32(n + 1)
            number, turn = i32(number + 1), u32(turn + 1)
            x = after(x, number, sizes)

    return produce
