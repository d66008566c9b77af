"""The gradient of a bias on Hopper where nothing else acts on scores, and the queries of all batch
elements that are summed fit into shared memory: a `DbiasStage`.

A block keeps Q and dO of 128 queries, of all these batch elements, and goes through runs of tiles
of the gradient that have the same queries: so half as much is read for a score as where steps are
written down. Two threads move data: one K, V and the bias, one Q and dO with what belongs to their
rows. Bias and gradient come and go by the copy engine.
"""

import math
from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import Extent, extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, named, once, u32
from numba_flash.cuda.score import fragment
from numba_flash.cuda.score.score import LOG2E
from numba_flash.cuda.score.swizzle import ROW_BYTES, panel_bytes
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.bias_gradient.dbias_stage import (
    ROWS,
    DbiasStage,
    DbiasWalk,
    ScoreTile,
    build_load_rows,
)
from numba_flash.cuda.sm90.config import BiasGradientConfig
from numba_flash.cuda.sm90.hopper_kernel import Arrivals, Producer
from numba_flash.cuda.sm90.pair_tiles import RELEASES, WARP, build_load_pairs, build_take_pairs
from numba_flash.cuda.sm90.pipeline import TilePlace
from numba_flash.cuda.sm90.store import build_put_words
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.work.broadcast import Walk, build_coordinates

NEG_INF = -math.inf
WARP_ROWS = 16


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


def build_loads(head_dim, head_dim_v, summed, options, tile):
    """What threads of their own do, of ``(smem, me, x)``, x being the kernel's arguments: have
    keys, values and biases of this block's runs fetched, and queries with what belongs to rows.
    """
    layout = tile.layout(head_dim, head_dim_v)
    KEYS, WALK, BLOCK_N = one_type(layout.keys), tile.elements, tile.block_n
    run_of, element = build_runs(summed, tile)
    PANEL_BYTES = panel_bytes(BLOCK_N)
    load_k = pipeline.build_load(KEYS, head_dim, BLOCK_N, PANEL_BYTES)
    load_pairs = build_load_pairs(options, tile, layout.pairs)
    load_q = build_load_rows(head_dim, tile, layout)
    load_do = build_load_rows(head_dim_v, tile, layout)

    @inline
    def load_keys(smem, me, given):
        m, t, number, maps = u32(0), u32(0), i32(cuda.blockIdx.x), given.maps
        while number < i32(given.items):
            x = run_of(number, given.extent, i32(given.across))
            for tile in range(x.count):
                col0 = i32(x.col0 + tile * BLOCK_N)
                pair = TilePlace(col0, x.row0, x.own.head, x.own.b1, x.own.b0)
                load_pairs(maps[4], smem, t, pair, given.extras)
                t = u32(t + u32(1))
                for b in range(WALK):
                    at = element(x.own, i32(b), given.extent)
                    key = TilePlace(0, col0, x.kv_head, at.b1, at.b0)
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
    def load_rows(smem, me, given):
        n, number = u32(0), i32(cuda.blockIdx.x)
        while number < i32(given.items):
            x = run_of(number, given.extent, i32(given.across))
            for b in range(WALK):
                at = element(x.own, i32(b), given.extent)
                row = TilePlace(0, x.row0, x.own.head, at.b1, at.b0)
                load_q(given.maps[1], smem, n, row, given.rows[index(0)])
                load_do(given.maps[0], smem, u32(n + u32(1)), row, given.rows[index(1)])
                n = u32(n + u32(2))
            number = i32(number + cuda.gridDim.x)

    return load_keys, load_rows


class Tile(NamedTuple):
    """A tile of the gradient of a block: its run, and the number of that; its own number there, and
    of all; numbers of the first tile of Q of the run, and of its own first one of keys; where the
    tile before lies; whether the run begins with it, or ends, and whether another tile comes.
    """

    number: int
    run: Run
    tile: int
    tiles: int
    n: int
    m: int
    before: TilePlace
    begins: bool
    ends: bool
    more: bool


class Here(NamedTuple):
    """Where a consumer is: a tile of the gradient, and a batch element."""

    at: Tile
    b: int


def build(config: BiasGradientConfig) -> DbiasStage:
    """Its kernel takes (maps, rows, extras, extent, across, items, scale_log2).

    maps : tensor maps of do, q, k and v as (b0, b1, heads, n, head_dim), boxes of one panel of a
        tile; of the bias as (b0, b1, heads, n, n), without the axes that it is broadcast along,
        boxes of a tile; of its gradient, likewise, boxes of 16 queries.
    rows : (2, b0, b1, heads, at least n): the lse in base 2 and delta of each query, as
        `numba_flash.cuda.passes.preprocess` writes them; a multiple of 64.
    across, items : tiles of a run, and how many runs there are.
    """
    options, tile, summed = config.options, config.tile, config.summed
    BLOCK_N, WALK, SMEM = tile.block_n, tile.elements, tile.layout(config.d, config.dv)
    PAIRS, SCORES, WORDS, MINE = one_type(SMEM.pairs), BLOCK_N // 2, BLOCK_N // 4, ROWS * ROW_BYTES
    loads = build_loads(config.d, config.dv, summed, options, tile)
    run_of, _ = build_runs(summed, tile)
    take_pairs = build_take_pairs(options, tile, SMEM.pairs, releases=False)
    put_words = build_put_words(BLOCK_N, ROWS)
    element_of = fragment.build_unpack(options.bias == "bfloat16")
    pack, _ = fragment.build_pack(WORDS, config.out == "bfloat16")

    @inline
    def run_at(w, number):
        return run_of(number, w.given.extent, i32(w.given.across))

    @inline
    def place(run, tile):
        col0 = i32(run.col0 + tile * BLOCK_N)
        return TilePlace(col0, run.row0, run.own.head, run.own.b1, run.own.b0)

    @inline
    def begin(w, number, run, tile, tiles, n, m, before):
        ends, begins = i32(tile + 1) == run.count, tile == i32(0)
        more = not ends or i32(number + cuda.gridDim.x) < i32(w.given.items)
        return Here(Tile(number, run, tile, tiles, n, m, before, begins, ends, more), i32(0))

    @inline
    def first(w):
        number, none = i32(cuda.blockIdx.x), u32(0)
        run = run_at(w, number)
        return begin(w, number, run, i32(0), none, none, none, place(run, i32(0)))

    @inline
    def is_tile(w, x):
        return x.at.number < i32(w.given.items)

    @inline
    def has_steps(x):
        return True

    @inline
    def look(w, x, shows):
        t, last = x.at, x.b == i32(WALK - 1)
        n, m = u32(t.n + u32(2 * x.b)), u32(t.m + u32(x.b))
        next_n, next_m = u32(n + u32(2)), u32(m + u32(1))
        if last and not t.ends:
            next_n = t.n
        if last and not t.more:
            next_n, next_m = n, m
        return ScoreTile(
            n, m, next_n, next_m, t.begins, t.ends, t.begins or (last and t.ends), last, shows
        )  # fmt: skip

    @inline
    def release_slot(smem, number):
        """What was stored from a slot of the bias has been read there."""
        if cuda.threadIdx.x % WARP == 0:
            ptx.bulk_wait_read()
            pipeline.release(smem, PAIRS, number)

    @inline
    def proceed(w, x, step):
        if x.b == i32(0):
            release_slot(w.smem, x.at.tiles)
        return Here(x.at, i32(x.b + 1))

    @inline
    def leave(w, x):
        t, tile, before = x.at, i32(x.at.tile + 1), place(x.at.run, x.at.tile)
        number, run, n = t.number, t.run, t.n
        if t.ends:
            number, tile, n = i32(number + cuda.gridDim.x), i32(0), u32(n + u32(2 * WALK))
            run = run_at(w, number)
        return begin(w, number, run, tile, u32(t.tiles + u32(1)), n, u32(t.m + u32(WALK)), before)

    @inline
    def store(w, x):
        """The tile of the gradient before, 16 rows of each warp, by way of a slot of the bias."""
        warp, at = i32(cuda.threadIdx.x % WARP_GROUP // WARP), x.at.before
        room = u32(pipeline.tile(w.smem, PAIRS, x.at.tiles) + u32(w.me * MINE))
        words = cuda.local.array(WORDS, u32)
        pack(words, w.acc)
        put_words(room, words, 0)
        ptx.fence_proxy_async()
        cuda.syncwarp()  # all rows are there
        if cuda.threadIdx.x % WARP == 0:
            source = u32(room + u32(warp * (WARP_ROWS * ROW_BYTES)))
            row = i32(at.row + w.me * ROWS + warp * WARP_ROWS)
            ptx.tensor_store(source, w.given.maps[5], at.column, row, at.head, at.b1, at.b0)
            ptx.bulk_commit()

    @inline
    def take(w, x):
        """In base 2."""
        words, least = cuda.local.array(WORDS, u32), f32(0)
        take_pairs(words, w.smem, w.me, x.at.tiles)
        for e in range(SCORES):
            value = element_of(words[e // 2], e % 2)
            least = ptx.minimum(least, value)
            w.bias[e] = value * f32(LOG2E)
        if x.at.tiles > u32(0):
            store(w, x)
        return least != f32(NEG_INF)

    @inline
    def read(part, w, x, step):
        """All is in registers."""
        return ()

    @inline
    def exponents(part, w, x, step, here):
        for e in range(SCORES):
            w.p[e] = w.s[e] * w.given.scale_log2 + (w.bias[e] - w.lse[e // 2 % 2])

    @inline
    def weigh(w, step, here):
        """P is 0 where the bias hides it, whatever S is."""
        for e in range(SCORES):
            w.p[e] = ptx.ex2(w.p[e])
        if not step.own:
            for e in range(SCORES):
                w.p[e] = w.p[e] if w.bias[e] != f32(NEG_INF) else f32(0)

    @inline
    def finish(w, x):
        """It is stored when there is a bias whose slot it can leave from."""

    @inline
    def parameters(given):
        return ()

    arguments = {
        "maps": 6,
        "rows": array(f32, 5),
        "extras": extras_type(options),
        "extent": named(Extent, i64),
        "across": i64,
        "items": i64,
        "scale_log2": f32,
    }
    walk = DbiasWalk(first, is_tile, has_steps, look, proceed, leave)
    return DbiasStage(
        *(walk, take, read, exponents, weigh, finish, store, parameters),
        ahead=True,
        held=SCORES,
        number=f32,
        rings=(Arrivals((PAIRS,), 1, tile.consumers * RELEASES),),
        producers=tuple(Producer(load, i) for i, load in enumerate(loads)),
        senders=WARP,
        arguments=arguments,
    )
