"""Which tiles a block of the gradient of a bias sums whose queries stay in shared memory, and the
threads that move data for it: one has K, V and the bias fetched, one Q and dO with what belongs to
their rows.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.broadcast import Walk, build_coordinates
from numba_flash.cuda.lang import cuda, i32, inline, once, u32
from numba_flash.cuda.number import index
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.load_dbias import build_load_rows
from numba_flash.cuda.sm90.pair_tiles import build_load_pairs
from numba_flash.cuda.sm90.pipeline import Place
from numba_flash.cuda.swizzle import panel_bytes


class Run(NamedTuple):
    """Neighbouring tiles of the gradient that have the same queries, which a block sums one after
    the other: its own coordinates, of which the last is the number of the run; its head of k; the
    first key, and how many tiles.
    """

    own: Walk
    kv_head: int
    row0: int
    col0: int
    count: int


@once
def build_runs(summed, tile):
    """``run_of(number, extent, across)``: the `Run` of that number, of `across` tiles, of a problem
    of some `numba_flash.cuda.arguments.Extent`; ``element(own, b, extent)``: the coordinates (b0,
    b1) of the b-th batch element that is summed there, as a `Walk`.
    """
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    owned, walked, _ = build_coordinates(summed)

    @inline
    def sizes_of(extent, across):
        rows = i32(u32(i32(extent.queries) + i32(BLOCK_M - 1)) // u32(BLOCK_M))
        tiles = i32(u32(i32(extent.keys) + i32(BLOCK_N - 1)) // u32(BLOCK_N))
        runs = i32(u32(i32(tiles + across - 1)) // u32(across))
        return Walk(i32(extent.b0), i32(extent.b1), i32(extent.heads), rows, runs), tiles

    @inline
    def run_of(number, extent, across):
        sizes, tiles = sizes_of(extent, across)
        own, _ = owned(number, sizes)
        first = i32(own.j * across)
        group = i32(u32(sizes.head) // u32(extent.kv_heads))
        return Run(
            own=own,
            kv_head=i32(u32(own.head) // u32(group)),
            row0=i32(own.i * BLOCK_M),
            col0=i32(first * BLOCK_N),
            count=i32(min(across, i32(tiles - first))),
        )

    @inline
    def element(own, b, extent):
        sizes = Walk(i32(extent.b0), i32(extent.b1), i32(1), i32(1), i32(1))
        walk = walked(b, sizes)
        return Walk(i32(own.b0 + walk.b0), i32(own.b1 + walk.b1), own.head, own.i, own.j)

    return run_of, element


class Loads(NamedTuple):
    """Functions of threads of their own: ``keys(maps, smem, extras, extent, across, items)`` and
    ``rows(maps, smem, rows, extent, across, items)``; see `build_loads`.
    """

    keys: Any
    rows: Any


def build_loads(head_dim, head_dim_v, summed, options, tile):
    """`Loads`, which have all tiles of this block's runs fetched."""
    layout = tile.layout(head_dim, head_dim_v)
    KEYS, WALK, BLOCK_N = one_type(layout.keys), tile.elements, tile.block_n
    run_of, element = build_runs(summed, tile)
    PANEL_BYTES = panel_bytes(BLOCK_N)
    load_k = pipeline.build_load(KEYS, head_dim, BLOCK_N, PANEL_BYTES)
    load_pairs = build_load_pairs(options, tile, layout.pairs)
    load_q = build_load_rows(head_dim, tile, layout)
    load_do = build_load_rows(head_dim_v, tile, layout)

    @inline
    def load_keys(maps, smem, extras, extent, across, items):
        m, t, number = u32(0), u32(0), i32(cuda.blockIdx.x)
        while number < items:
            x = run_of(number, extent, across)
            for tile in range(x.count):
                col0 = i32(x.col0 + tile * BLOCK_N)
                pair = Place(col0, x.row0, x.own.head, x.own.b1, x.own.b0)
                load_pairs(maps[4], smem, t, pair, extras)
                t = u32(t + u32(1))
                for b in range(WALK):
                    at = element(x.own, i32(b), extent)
                    key = Place(0, col0, x.kv_head, at.b1, at.b0)
                    pipeline.wait_free(smem, KEYS, m)
                    load_k(maps[2], smem, m, key)
                    v_tile = u32(pipeline.tile(smem, KEYS, m) + u32(PANEL_BYTES))
                    ready = pipeline.mbarrier(smem, KEYS, KEYS.ready, m)
                    ptx.tensor_load(
                        v_tile, maps[3], i32(0), col0, x.kv_head, at.b1, at.b0, ready
                    )  # fmt: skip
                    m = u32(m + u32(1))
            number = i32(number + cuda.gridDim.x)

    @inline
    def load_rows(maps, smem, rows, extent, across, items):
        n, number = u32(0), i32(cuda.blockIdx.x)
        while number < items:
            x = run_of(number, extent, across)
            for b in range(WALK):
                at = element(x.own, i32(b), extent)
                row = Place(0, x.row0, x.own.head, at.b1, at.b0)
                load_q(maps[1], smem, n, row, rows[index(0)])
                load_do(maps[0], smem, u32(n + u32(1)), row, rows[index(1)])
                n = u32(n + u32(2))
            number = i32(number + cuda.gridDim.x)

    return Loads(load_keys, load_rows)
