"""How a block that sums the gradient of a bias gets its tiles of scores, one after the other."""

from typing import Any, NamedTuple

from numba_flash import mask
from numba_flash.cuda import fragment, ptx, tile_lists
from numba_flash.cuda.broadcast import Walk, build_coordinates
from numba_flash.cuda.lang import cuda, i32, inline, once, u32, u64
from numba_flash.cuda.number import index
from numba_flash.cuda.score import Head, Region
from numba_flash.cuda.sequence import build_sequence
from numba_flash.cuda.sm80.load import build_load
from numba_flash.cuda.sm80.tiles import pitch


class Space(NamedTuple):
    """What a block walks over: its own coordinates and how many there are of each, its own head of
    k and how many query heads belong to one; the end of its share of the walk; queries and keys of
    the longest possible sequence, and the band there.
    """

    own: Walk
    sizes: Walk
    kv_head: int
    group: int
    stop: int
    queries: int
    keys: int
    low: int
    high: int


class Place(NamedTuple):
    """Where a tile of scores lies, its head of k, and whether its sequence is invalid."""

    at: Head
    kv_head: int
    region: Region
    invalid: bool


class Step(NamedTuple):
    """A tile of scores on the way: its number, coordinates, whether a sequence up to there was
    invalid, and whether a map says that nothing in the tile is hidden.
    """

    number: int
    walk: Walk
    invalid: bool
    whole: bool


class Tensors(NamedTuple):
    """The arrays that tiles are loaded from."""

    do: Any
    q: Any
    k: Any
    v: Any
    rows: Any


@once
def build_places(options, banded, summed, block_m, block_n, flagged=False):
    """``place_of(walk, space, extras)``: the `Place` of coordinates; ``find(step, space, extras)``:
    the first `Step` from this one on that has something visible; ``proceed(step, space, extras)``:
    the first after it. All have, unless there are lengths or a mask, or the problem is `banded`.

    flagged : heads whose ``extras.flags`` are not 0 are left out.
    """
    BLOCK_M, BLOCK_N, SUM_H, MASKED = block_m, block_n, summed[2], options.tiled
    FLAGGED = flagged
    HIDES = banded or options.sequences or options.tiled or flagged
    _, _, following = build_coordinates(summed)
    sequence_of = build_sequence(options)

    @inline
    def place_of(walk, space, extras):
        own, sizes = space.own, space.sizes
        b0, b1 = i32(own.b0 + walk.b0), i32(own.b1 + walk.b1)
        row0, col0 = i32((own.i + walk.i) * BLOCK_M), i32((own.j + walk.j) * BLOCK_N)
        sequence = sequence_of(extras, b0, b1, space.queries, space.keys)
        queries, keys, shift = i32(sequence.queries), i32(sequence.keys), i32(sequence.shift)
        at = Head(b0, b1, i32(b0 * sizes.b1 + b1), i32(own.head + walk.head), sizes.head)
        low, high = i32(space.low + shift), i32(space.high + shift)
        kv_head = i32(u32(at.head) // u32(space.group)) if SUM_H else space.kv_head
        region = Region(row0, col0, queries, keys, low, high)
        return Place(at, kv_head, region, sequence.invalid)

    @inline
    def find(step, space, extras):
        number, walk, hidden = step.number, step.walk, HIDES
        invalid, whole = step.invalid, step.whole
        while number < space.stop and hidden:
            place = place_of(walk, space, extras)
            r = place.region
            last = min(i32(r.row0 + BLOCK_M), r.rows)
            start, stop = mask.kv_range(r.row0, last, r.cols, r.low, r.high)
            hidden = r.row0 >= r.rows or r.col0 >= stop or i32(r.col0 + BLOCK_N) <= start
            invalid = invalid or place.invalid
            if FLAGGED:
                at = place.at
                hidden = hidden or extras.flags[index(at.b0), index(at.b1), index(at.head)] != 0
            if MASKED and not hidden:
                at, block = place.at, i32(u32(r.row0) // u32(BLOCK_M))
                bits = extras.bits[index(at.b0), index(at.b1), index(at.head), index(block)]
                hidden, whole = tile_lists.look(bits, i32(u32(r.col0) // u32(BLOCK_N)))
            if hidden:
                number, walk = i32(number + 1), following(walk, space.sizes)
        return Step(number, walk, invalid, whole)

    @inline
    def proceed(step, space, extras):
        number, walk = i32(step.number + 1), following(step.walk, space.sizes)
        return find(Step(number, walk, step.invalid, False), space, extras)

    return place_of, find, proceed


@once
def build_loads(shape, tile):
    """``load_qk(smem, slot, tensors, place)``: Q, its rows' lse, and K of a tile of scores;
    ``load_dov``: dO, its rows' delta, and V.
    """
    BLOCK_M, BLOCK_N, THREADS, TURING = tile.block_m, tile.block_n, tile.threads, shape.turing
    (COLUMNS_K, COLUMNS_V), CHUNKS = shape.columns, tile.block_m // 4
    PITCH_K, PITCH_V, SMEM = pitch(COLUMNS_K), pitch(COLUMNS_V), tile.layout(*shape.columns)
    Q, DO, ROWS, K, V = SMEM.q, SMEM.do, SMEM.rows, SMEM.k, SMEM.v
    Q_BYTES, DO_BYTES, ROWS_BYTES = BLOCK_M * PITCH_K, BLOCK_M * PITCH_V, 8 * BLOCK_M
    K_BYTES, V_BYTES = BLOCK_N * PITCH_K, BLOCK_N * PITCH_V
    order = fragment.place_of_key
    # planes are compact; 16 bits spill nothing if threads find their rows again
    others = shape.asynchronous, None, shape.split > 0, not shape.split
    load_q = build_load(BLOCK_M, COLUMNS_K, THREADS, None, *others)
    load_do = build_load(BLOCK_M, COLUMNS_V, THREADS, None, *others)
    load_k = build_load(BLOCK_N, COLUMNS_K, THREADS, order, *others)
    load_v = build_load(BLOCK_N, COLUMNS_V, THREADS, order, *others)
    SPLIT = shape.split > 0
    assert CHUNKS <= THREADS

    @inline
    def load_row_values(target, values, place):
        """Zeros beyond what there is."""
        thread = i32(cuda.threadIdx.x) if SPLIT else ptx.thread_here()
        if thread < CHUNKS:
            at, row = place.at, i32(place.region.row0 + thread * 4)
            head = values[index(at.b0), index(at.b1), index(at.head)]
            source, there = u64(ptx.global_address(head) + u64(row * 4)), row < values.shape[3]
            to = u32(target + u32(thread * 16))
            if not TURING:
                ptx.copy16(to, source, u32(1) if there else u32(0))
            elif there:
                ptx.store_shared_vector(to, ptx.load_global_words(source))
            else:
                ptx.store_shared_vector(to, (u32(0), u32(0), u32(0), u32(0)))

    @inline
    def load_qk(smem, slot, tensors, place):
        at, region = place.at, place.region
        b0, b1, h = index(at.b0), index(at.b1), index(place.kv_head)
        q, k = tensors.q[b0, b1, index(at.head)], tensors.k[b0, b1, h]
        load_q(u32(smem + u32(Q) + slot * u32(Q_BYTES)), q, region.row0, region.rows)
        load_k(u32(smem + u32(K) + slot * u32(K_BYTES)), k, region.col0, region.cols)
        lse = u32(smem + u32(ROWS) + slot * u32(ROWS_BYTES))
        load_row_values(lse, tensors.rows[index(0)], place)

    @inline
    def load_dov(smem, slot, tensors, place):
        at, region = place.at, place.region
        b0, b1, h = index(at.b0), index(at.b1), index(place.kv_head)
        do, v = tensors.do[b0, b1, index(at.head)], tensors.v[b0, b1, h]
        load_do(u32(smem + u32(DO) + slot * u32(DO_BYTES)), do, region.row0, region.rows)
        load_v(u32(smem + u32(V) + slot * u32(V_BYTES)), v, region.col0, region.cols)
        delta = u32(smem + u32(ROWS) + slot * u32(ROWS_BYTES) + u32(4 * BLOCK_M))
        load_row_values(delta, tensors.rows[index(1)], place)

    return load_qk, load_dov
