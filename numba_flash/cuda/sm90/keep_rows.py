"""A bias that batch elements share, in shared memory, for the kernel that makes its gradient: each
thread keeps what belongs to its own scores, as float32 in base 2, and reads four at a time.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import fragment, ptx
from numba_flash.cuda.fetch import build_fetch, held
from numba_flash.cuda.kept_bias import VECTOR
from numba_flash.cuda.lang import cuda, f32, i32, inline, once, u32
from numba_flash.cuda.score import LOG2E, Head, Region
from numba_flash.cuda.sm90 import pipeline, wgmma
from numba_flash.cuda.sm90.gradient_tiles import CHUNK
from numba_flash.cuda.sm90.tiles import WARP_GROUP

VECTORS = CHUNK // 8  # of a thread and chunk
AWAY, CHUNK_BYTES = WARP_GROUP * VECTOR, VECTORS * WARP_GROUP * VECTOR


class Kept(NamedTuple):
    """A chunk of the bias on its way to shared memory: its words, as
    `numba_flash.cuda.fetch` brings them, where they go to, how many keys there are from the
    thread's first one on, and in its only word whether one is -inf.
    """

    words: Any
    to: int
    keys: int
    hides: Any


@once
def build(options, vectors, tile):
    """``fill(smem, me, own, space, extras)``: keep what belongs to a thread's scores; whether some
    of it is -inf. ``bias_of(smem, me, chunk)``: where it is.
    """
    CHUNKS, KEPT, NEG_INF = tile.chunks, tile.layout().kept, -math.inf
    runs, KEYS = fragment.runs_of_columns(CHUNK), tile.keys
    HELD, BYTES, STEP = held(options, runs).words, CHUNK_BYTES, AWAY
    fetch = build_fetch(options, runs, vectors)
    element = fragment.build_unpack(options.bias == "bfloat16")

    @inline
    def bias_of(smem, me, chunk):
        mine = u32(cuda.threadIdx.x % WARP_GROUP * VECTOR)
        return u32(smem + u32(KEPT) + u32((me * CHUNKS + chunk) * BYTES) + mine)

    @inline
    def value(k, n, x):
        """Element x of run n, in base 2."""
        bias = element(k.words[n], x)
        if i32(n // 2 * 8 + x) >= k.keys:
            return f32(NEG_INF)
        if bias == f32(NEG_INF):
            k.hides[0] = u32(1)
        return bias * f32(LOG2E)

    @inline
    def put(n, k):
        one, other = i32(2 * n), i32(2 * n + 1)
        four = value(k, one, 0), value(k, one, 1), value(k, other, 0), value(k, other, 1)
        ptx.store_shared_vector(u32(k.to + u32(n * STEP)), four)

    put_all = ptx.repeated(VECTORS, put)

    @inline
    def fill(smem, me, row0, own, space, extras):
        words = cuda.local.array(HELD, u32)
        hides = cuda.local.array(1, u32)
        hides[0] = u32(0)
        at = Head(own.b0, own.b1, i32(0), own.head, i32(0))
        region = Region(row0, i32(0), space.queries, space.keys, i32(0), i32(0))
        query = i32(row0 + wgmma.first_row())
        for chunk in range(CHUNKS):
            key = i32(me * KEYS + chunk * CHUNK + fragment.first_column())
            fetch(words, query, key, region, at, False, extras)
            put_all(Kept(words, bias_of(smem, me, chunk), i32(space.keys - key), hides))
        return pipeline.any_of_warp_group(me, hides[0])

    return fill, bias_of
