"""Numbers that a `score_mod` adds for each distance, on their way to where sums of S begin with
them (`numba_flash.cuda.score.relative`).
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, i32, inline, once, u32, u64
from numba_flash.cuda.score import fragment, relative


class Relative(NamedTuple):
    """Functions; see `build_relative`."""

    load: Any
    begin_sums: Any


@once
def build_relative(tile, shape, there_are):
    """`Relative` of a `numba_flash.cuda.sm80.tiles.Tile`, whose numbers go to slots of shared
    memory behind all else. Both functions do nothing unless `there_are` such numbers.

    ``load(smem, slot, extras, head, row0, col0, there)``: those of a tile with this first row and
    column, by copies that go on if the `shape` says so; none unless they are `there`.
    ``begin_sums(s, smem, slot, row, key0)``: a lane's scores become these; its first row is so far
    from the tile's, the warp's first key from the tile's, too.
    """
    BLOCK_M, CHUNKS, THREADS = tile.block_m, tile.relative_bytes // 16, tile.threads
    RELATIVE, FIRST, BYTES = there_are, tile.shared_bytes(*shape.columns), tile.relative_bytes
    ASYNCHRONOUS, address_of = shape.asynchronous, relative.build_address(tile.block_m)
    runs = fragment.runs_of_queries(tile.m_tiles, tile.warp_n)
    COUNT, WIDTH, register, query_of, key_of = *runs[:2], runs.register, runs.query, runs.key

    @inline
    def load(smem, slot, extras, head, row0, col0, there):
        if RELATIVE:
            to = u32(smem + u32(FIRST) + slot * u32(BYTES))
            address = address_of(extras.relative, head, row0, col0)
            for step in range(0, CHUNKS, THREADS):
                chunk = i32(cuda.threadIdx.x + step)
                source, target = u64(address + u64(16 * chunk)), u32(to + u32(16 * chunk))
                if ASYNCHRONOUS and chunk < CHUNKS:
                    ptx.copy16(target, source, u32(1) if there else u32(0))
                elif there and chunk < CHUNKS:
                    ptx.store_shared_vector(target, ptx.load_global_words(source))

    @inline
    def begin_sums(s, smem, slot, row, key0):
        if RELATIVE:
            first = i32(BLOCK_M - row + key0 + fragment.first_key())
            at = u32(smem + u32(FIRST) + slot * u32(BYTES) + u32(4 * first))
            for n in range(COUNT):
                for x in range(WIDTH):
                    further = i32(key_of(n) + x - query_of(n))
                    s[register(n, x)] = ptx.load_shared_float(u32(at + u32(4 * further)))

    return Relative(load, begin_sums)
