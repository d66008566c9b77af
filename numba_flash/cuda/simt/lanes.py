"""Lanes of a warp that share the columns of keys: how they copy keys, multiply them, and add their
partial sums. `numba_flash.cuda.simt.decode_lanes` is the loop.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import ACCUMULATOR
from numba_flash.cuda.runtime.lang import cuda, i32, inline, once, u32, u64
from numba_flash.cuda.score.fragment import ALL_LANES
from numba_flash.cuda.simt.lanes_tiles import CHUNK, WARP

AROUND = 128  # bytes of memory that the cache may fetch around each copy


@once
def build_copy(tile, head_dim):
    """``copy(target, at, step, left)``: a lane's columns of its keys of a step, the first of which
    are at that address, and each `step` bytes behind the one before; zeros where none are `left`,
    and beyond the head dimension.
    """
    KEYS, HELD, LANES = tile.keys, tile.held, tile.lanes
    CHUNKS = head_dim // tile.per_chunk
    WHOLE = CHUNKS == tile.held * tile.lanes
    copy16 = ptx.copy16_far(AROUND)

    @inline
    def copy(target, at, step, left):
        lane = i32(cuda.threadIdx.x % LANES)
        for n in range(KEYS):
            for h in range(HELD):
                there = n < left
                if not WHOLE:
                    there = there and lane + h * LANES < CHUNKS
                to = u32(target + u32((n * HELD + h) * (CHUNK * WARP)))
                copy16(to, u64(at + u64(h * LANES * CHUNK)), u32(1) if there else u32(0))
            at = u64(at + step)

    return copy


@once
def build_read(tile):
    """``read(held, at)``: one chunk of shared memory, to the first elements."""
    DOUBLE = tile.size == 8

    @inline
    def read(held, first, at):
        if DOUBLE:
            two = ptx.load_shared_float64s(at)
            held[first], held[first + 1] = two[0], two[1]
        else:
            four = ptx.load_shared_four(at)
            for c in range(4):
                held[first + c] = four[c]

    return read


@once
def build_fold(dtype, count, distance):
    """``fold(s)``: of `count` numbers that lanes have a part of each, the sum of one, s[0]; lanes
    are `distance` apart first. Number n is that of the lanes from ``n * 2 * distance / count`` on.
    """
    HALF, DISTANCE, LAST = count // 2, distance, distance == 1
    following = None if LAST else build_fold(dtype, max(HALF, 1), distance // 2)

    @inline
    def fold(s):
        if HALF == 0:
            for n in range(1):
                s[n] += cuda.shfl_xor_sync(ALL_LANES, s[n], DISTANCE)
        else:
            upper = (i32(cuda.threadIdx.x) & DISTANCE) != 0
            for n in range(HALF):
                low, high = s[n], s[n + HALF]
                given = low if upper else high
                kept = high if upper else low
                s[n] = kept + cuda.shfl_xor_sync(ALL_LANES, given, DISTANCE)
        if not LAST:
            following(s)

    return fold


@once
def build_over_keys(tile):
    """``over_keys(value, largest)``: its sum, or the largest, over lanes that have other keys of
    the same row.
    """
    FIRST, FOLDS = tile.lanes // tile.keys, (tile.warp_n).bit_length() - 1

    @inline
    def over_keys(value, largest):
        for fold in range(FOLDS):
            other = cuda.shfl_xor_sync(ALL_LANES, value, FIRST << fold)
            value = max(value, other) if largest else value + other
        return value

    return over_keys


class Terms(NamedTuple):
    """What values of a step are multiplied by, and added to.

    Attributes
    ----------
    acc, p, x : arrays
        Registers: sums; room for weights and values of a key.
    p_at, v_at : int
        Where they lie.
    """

    acc: Any
    p: Any
    x: Any
    p_at: int
    v_at: int


@once
def build_products(dtype, tile):
    """``scores(s, q, k_at)``: a lane's part of all scores of its keys of a step.

    ``values(acc, p_at, v_at, careful)``: O += P V of its keys and columns; if `careful`, terms of
    weight -0.0 are absent, not zero times v.
    """
    ROWS, KEYS, HELD, COLS = tile.rows, tile.keys, tile.held, tile.columns
    PER_CHUNK, KEY_BYTES, ROW_BYTES = (
        tile.per_chunk,
        tile.held * CHUNK * WARP,
        tile.rows * tile.size,
    )
    WEIGHTS, ACC = tile.rows // tile.per_chunk, ACCUMULATOR[dtype]  # chunks of a key's
    read = build_read(tile)

    @inline
    def read_key(x, at):
        for h in range(HELD):
            read(x, h * PER_CHUNK, u32(at + u32(h * (CHUNK * WARP))))

    @inline
    def score(s, q, x, n):
        for r in range(ROWS):
            total = ACC(0)
            for c in range(COLS):
                total += q[r * COLS + c] * x[c]
            s[n * ROWS + r] = total

    @inline
    def scores(s, q, k_at):
        x = cuda.local.array(COLS, ACC)
        for n in range(KEYS):
            read_key(x, u32(k_at + u32(n * KEY_BYTES)))
            score(s, q, x, n)

    @inline
    def absent(weight):
        return weight == ACC(0) and math.copysign(ACC(1), weight) < ACC(0)

    @inline
    def add(acc, p, x, careful):
        for r in range(ROWS):
            if not (careful and absent(p[r])):
                for c in range(COLS):
                    acc[r * COLS + c] += p[r] * x[c]

    @inline
    def read_all(n, these):
        read_key(these.x, u32(these.v_at + u32(n * KEY_BYTES)))
        for w in range(WEIGHTS):
            read(these.p, w * PER_CHUNK, u32(these.p_at + u32(n * ROW_BYTES + w * CHUNK)))

    @inline
    def add_key(n, these):
        read_all(n, these)
        add(these.acc, these.p, these.x, False)

    @inline
    def add_seen(n, these):
        read_all(n, these)
        add(these.acc, these.p, these.x, True)

    add_keys, add_all_seen = ptx.repeated(KEYS, add_key), ptx.repeated(KEYS, add_seen)

    @inline
    def values(acc, p_at, v_at, careful):
        x = cuda.local.array(COLS, ACC)
        p = cuda.local.array(ROWS, ACC)
        if careful:
            add_all_seen(Terms(acc, p, x, p_at, v_at))
        else:
            add_keys(Terms(acc, p, x, p_at, v_at))

    return scores, values
