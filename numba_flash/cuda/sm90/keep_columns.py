"""A bias that batch elements share, in shared memory, for kernels whose scores have keys along
their rows: each thread keeps what belongs to its own scores, and reads sixteen bytes at a time,
beside those of its neighbours.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import fragment, ptx
from numba_flash.cuda.fetch import build_fetch, held
from numba_flash.cuda.kept_bias import VECTOR
from numba_flash.cuda.lang import cuda, i32, inline, once, u32
from numba_flash.cuda.score import Head, Region
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.tiles import WARP_GROUP

AWAY = WARP_GROUP * VECTOR


class Columns(NamedTuple):
    """``fill(smem, me, x, extras, sizes)``: keep what belongs to a consumer's keys of a unit x;
    whether some of it is -inf. ``bias_of(smem, me, t)``: where a thread's part of the t-th tile of
    queries is; `away` are bytes from each vector of it to the next.
    """

    fill: Any
    bias_of: Any
    away: int


class Fetched(NamedTuple):
    """A tile of the bias on its way to shared memory: an element in each word; where they go to;
    and in its only word whether one was -inf.
    """

    words: Any
    to: int
    hides: Any


@once
def build(options, vectors, tile):
    """`Columns` of a kernel."""
    TILES, KEPT, BFLOAT16 = tile.tiles, tile.layout().kept, options.bias == "bfloat16"
    HIDDEN = 0xFF80 if BFLOAT16 else 0xFC00  # -inf in 16 bits
    QUERIES, VECTORS = tile.queries, tile.queries // 16  # of a tile, and of a thread and tile
    TILE_BYTES = VECTORS * AWAY
    runs = fragment.runs_of_rows(QUERIES)
    HELD, KEYS = held(options, runs).words, 64  # of a consumer
    fetch = build_fetch(options, runs, vectors)

    @inline
    def bias_of(smem, me, t):
        mine = u32(cuda.threadIdx.x % WARP_GROUP * VECTOR)
        return u32(smem + u32(KEPT) + u32((me * TILES + t) * TILE_BYTES) + mine)

    @inline
    def word(n, f):
        """Of two queries."""
        one, other = f.words[2 * n], f.words[2 * n + 1]
        if one == u32(HIDDEN) or other == u32(HIDDEN):
            f.hides[0] = u32(1)
        return u32(one | other << u32(16))

    @inline
    def put(n, f):
        four = word(4 * n, f), word(4 * n + 1, f), word(4 * n + 2, f), word(4 * n + 3, f)
        ptx.store_shared_vector(u32(f.to + u32(n * AWAY)), four)

    put_all = ptx.repeated(VECTORS, put)

    @inline
    def fill(smem, me, x, extras, sizes):
        words = cuda.local.array(HELD, u32)
        hides = cuda.local.array(1, u32)
        hides[0] = u32(0)
        at = Head(x.b0, x.b1, i32(0), x.head, i32(0))
        region = Region(i32(0), x.row0, i32(sizes.keys), x.rows, i32(0), i32(0))
        key = i32(x.row0 + me * KEYS + wgmma.first_row())
        for t in range(TILES):
            query = i32(t * QUERIES + fragment.first_column())
            fetch(words, query, key, region, at, False, extras)
            put_all(Fetched(words, bias_of(smem, me, t), hides))
        return pipeline.any_of_warp_group(me, hides[0])

    return Columns(fill, bias_of, AWAY)
