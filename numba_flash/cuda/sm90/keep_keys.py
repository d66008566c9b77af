"""A bias that batch elements share, in shared memory, for kernels whose scores have keys along
their rows: each thread keeps what belongs to its own scores, and reads sixteen bytes at a time,
beside those of its neighbours.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import fragment, ptx
from numba_flash.cuda.fetch import build_fetch, held
from numba_flash.cuda.kept_bias import FAR, VECTOR
from numba_flash.cuda.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.score import Head, Region
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.gradient_tiles import QUERIES
from numba_flash.cuda.sm90.tiles import WARP_GROUP

VECTORS = QUERIES // 16  # of a thread and tile
AWAY, TILE_BYTES = WARP_GROUP * VECTOR, VECTORS * WARP_GROUP * VECTOR


class Columns(NamedTuple):
    """``fill(smem, me, x, extras, sizes)``: keep what belongs to a consumer's keys of a unit x; 1
    if products begin with it, 0 if it is added to scaled ones. ``put_unit(smem, inverse)``: what
    `begin` multiplies by. ``begin(s, smem, me, t)``: what products of the t-th tile of queries
    begin with. ``bias_of(smem, me, t)``: where a thread's part of it is; `away` are bytes from each
    vector of it to the next.
    """

    fill: Any
    put_unit: Any
    begin: Any
    bias_of: Any
    away: int


class Fetched(NamedTuple):
    """A tile of the bias on its way to shared memory: its words, where they go to, and in its only
    word whether one is treated apart.
    """

    words: Any
    to: int
    strange: Any


class Begun(NamedTuple):
    """Registers of scores, where their bias is kept, and a fragment of a matrix."""

    s: Any
    at: int
    unit: Any


@once
def build(options, vectors, pairs, tile):
    """`Columns` of a kernel; `pairs`: of keys, read at once, as `vectors`."""
    SMEM, TILES, BFLOAT16 = tile.layout(), tile.tiles, options.bias == "bfloat16"
    KEPT, UNIT, KIND, KEYS = SMEM.kept, SMEM.unit, int(BFLOAT16), 64  # of a consumer
    as_scores = fragment.runs_of_rows(QUERIES)
    as_operand = fragment.runs_of_operand_of_keys(QUERIES)
    HELD = max(held(options, as_scores).words, held(options, as_operand).words)
    fetch_scores = build_fetch(options, as_scores, vectors)
    fetch_operand = build_fetch(options, as_operand, pairs)
    element, (_, pack2) = fragment.build_unpack(BFLOAT16), fragment.build_pack(0, BFLOAT16)

    @inline
    def bias_of(smem, me, t):
        mine = u32(cuda.threadIdx.x % WARP_GROUP * VECTOR)
        return u32(smem + u32(KEPT) + u32((me * TILES + t) * TILE_BYTES) + mine)

    @inline
    def put_unit(smem, inverse):
        """By a warp, before anyone begins."""
        lane = i32(cuda.threadIdx.x)
        if lane < 32:
            one, zero = pack2(inverse, f32(0)), u32(0)
            row, column = i32(lane // 4), fragment.first_column()
            word = one if row == column else u32(one << u32(16)) if row == column + 1 else zero
            at = u32(smem + u32(UNIT) + u32(lane * VECTOR))
            ptx.store_shared_vector(at, (word, zero, zero, word))

    @inline
    def operand(f, n):
        """Two keys of a query; whether they can be divided is kept in mind."""
        two = f.words[n]
        for x in range(2):
            if not abs(element(two, x)) < f32(FAR):
                f.strange[0] = u32(1)
        return two

    @inline
    def put_operand(j, f):
        n = i32(4 * j)
        four = operand(f, n), operand(f, i32(n + 1)), operand(f, i32(n + 2)), operand(f, i32(n + 3))
        ptx.store_shared_vector(u32(f.to + u32(j * AWAY)), four)

    @inline
    def word(f, n):
        """Two queries of a key."""
        return u32(f.words[2 * n] | f.words[2 * n + 1] << u32(16))

    @inline
    def put(j, f):
        n = i32(4 * j)
        four = word(f, n), word(f, i32(n + 1)), word(f, i32(n + 2)), word(f, i32(n + 3))
        ptx.store_shared_vector(u32(f.to + u32(j * AWAY)), four)

    put_operands, put_all = ptx.repeated(VECTORS, put_operand), ptx.repeated(VECTORS, put)

    @inline
    def fill(smem, me, x, extras, sizes):
        words = cuda.local.array(HELD, u32)
        strange = cuda.local.array(1, u32)
        strange[0] = u32(0)
        at = Head(x.b0, x.b1, i32(0), x.head, i32(0))
        region = Region(i32(0), x.row0, i32(sizes.keys), x.rows, i32(0), i32(0))
        thread = i32(cuda.threadIdx.x % WARP_GROUP)
        key, lane = i32(x.row0 + me * KEYS + thread // 32 * 16), i32(thread % 32)
        for t in range(TILES):
            query, pair = i32(t * QUERIES + lane // 4), i32(key + fragment.first_column())
            fetch_operand(words, query, pair, region, at, False, extras)
            put_operands(Fetched(words, bias_of(smem, me, t), strange))
        if not pipeline.any_of_warp_group(me, strange[0]):
            return u32(1)
        for t in range(TILES):
            query, row = i32(t * QUERIES + fragment.first_column()), i32(key + lane // 4)
            fetch_scores(words, query, row, region, at, False, extras)
            put_all(Fetched(words, bias_of(smem, me, t), strange))
        return u32(0)

    @inline
    def begin_vector(j, b):
        words = ptx.load_shared_words(u32(b.at + u32(j * AWAY)))
        for half in range(2):
            four = ptx.fresh_product(b.unit, words[2 * half], words[2 * half + 1], KIND)
            for e in range(4):
                b.s[8 * j + 4 * half + e] = four[e]

    begin_all = ptx.repeated(VECTORS, begin_vector)

    @inline
    def begin(s, smem, me, t):
        unit = u32(smem + u32(UNIT) + u32(cuda.threadIdx.x % 32 * VECTOR))
        begin_all(Begun(s, bias_of(smem, me, t), ptx.load_shared_words(unit)))

    return Columns(fill, put_unit, begin, bias_of, AWAY)
