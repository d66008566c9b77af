"""Merges results over parts of the keys, in the last of the blocks that have the same rows: what
`numba_flash.cuda.passes.combine` does, without another launch.

Which block is last differs between runs. What it adds, and in which order, does not.
"""

import math
from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import build_convert, index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, once, u32, u64
from numba_flash.cuda.score import fragment
from numba_flash.cuda.score.fragment import ALL_LANES
from numba_flash.cuda.sm80.decode.decode_tiles import MOST_JOINED
from numba_flash.cuda.sm80.tiles import WARP


class OutputPlace(NamedTuple):
    """Of elements of O that a thread has: the row of the block, the head, the query, and the first
    of the elements.
    """

    row: int
    head: int
    query: int
    d: int


@once
def build_weights(tile, write_lse):
    """``weigh(smem, lse_splits, lse, x, rows, kv_splits)``: the weight of each part of each row, in
    shared memory, ``weights[part * BLOCK_M + row]``, and the lse of all of them.
    """
    BLOCK_M, WARPS, WRITE_LSE, NEG_INF = tile.block_m, tile.warps, write_lse, -math.inf
    ROWS, TURNS = tile.block_m // tile.warps, -(-MOST_JOINED // WARP)  # of a warp; of a lane
    AT_ONCE = math.gcd(ROWS, 4)
    HELD = AT_ONCE * TURNS
    query_of, head_of, _ = fragment.build_row(tile.group)

    @inline
    def over_lanes(value, largest):
        """Their maximum, or their sum in an order that is always the same."""
        for fold in range(5):
            other = cuda.shfl_xor_sync(ALL_LANES, value, 16 >> fold)
            value = ptx.maximum(value, other) if largest else value + other
        return value

    @inline
    def read(powers, lse_splits, x, rows, kv_splits, first):
        """The lse of parts of some rows, all on their way before any is used."""
        b0s = i32(u32(lse_splits.shape[0]) // u32(kv_splits))
        for n in range(AT_ONCE):
            row = i32(first + n * WARPS)
            i = i32(x.row0 + row)
            for turn in range(TURNS):
                part = i32(cuda.threadIdx.x % WARP + turn * WARP)
                powers[n * TURNS + turn] = f32(NEG_INF)
                if row < rows and part < kv_splits:
                    b0 = part * b0s + x.at.b0
                    head = lse_splits[index(b0), index(x.b1), index(x.at.head + head_of(i))]
                    at = u64(ptx.global_address(head) + u64(i64(query_of(i)) * 4))
                    powers[n * TURNS + turn] = ptx.load_global_one(at)

    @inline
    def weigh_row(smem, powers, n, lse, x, row, kv_splits):
        """The n-th of those that were read."""
        lane, largest, total = i32(cuda.threadIdx.x % WARP), f32(NEG_INF), f32(0)
        for turn in range(TURNS):
            largest = ptx.maximum(largest, powers[n * TURNS + turn])
        largest = over_lanes(largest, True)
        # a row that saw nothing in any part is shifted by 0
        shift = largest if largest != f32(NEG_INF) else f32(0)
        for turn in range(TURNS):
            powers[n * TURNS + turn] = math.exp(powers[n * TURNS + turn] - shift)
            total += powers[n * TURNS + turn]
        total = over_lanes(total, False)
        inverse = f32(0) if total == f32(0) else ptx.rcp(total)
        for turn in range(TURNS):
            part = i32(lane + turn * WARP)
            if part < kv_splits:
                at = u32(smem + u32(4 * (part * BLOCK_M + row)))
                ptx.store_shared(at, i32(ptx.as_uint32(powers[n * TURNS + turn] * inverse)))
        i = i32(x.row0 + row)
        if WRITE_LSE and lane == 0 and i < x.rows:
            head, query = index(x.at.head + head_of(i)), index(query_of(i))
            value = shift + math.log(total) if total != f32(0) else f32(NEG_INF)
            lse[index(x.at.b0), index(x.b1), head, query] = value

    @inline
    def weigh(smem, lse_splits, lse, x, rows, kv_splits):
        powers = cuda.local.array(HELD, f32)
        for turn in range(ROWS // AT_ONCE):
            first = i32(cuda.threadIdx.x // WARP + turn * (AT_ONCE * WARPS))
            read(powers, lse_splits, x, rows, kv_splits, first)
            for n in range(AT_ONCE):
                weigh_row(smem, powers, n, lse, x, i32(first + n * WARPS), kv_splits)

    return weigh


@once
def build_join(tile, head_dim_v, out_dtype, write_lse, ahead):
    """``join(smem, o_splits, lse_splits, o, lse, arrivals, x, kv_splits)``: rows of the `Block` x,
    once all `kv_splits` of the keys are done; `arrivals`, a number for each block of rows, is 0
    before and after. A thread has `ahead` parts of an element of O under way at the same time.
    """
    BLOCK_M, THREADS = tile.block_m, tile.threads
    WIDTH = 4 if head_dim_v % 4 == 0 else 1  # elements of O that a thread has at the same time
    ACROSS, AHEAD = head_dim_v // WIDTH, ahead
    LOADED = WIDTH * AHEAD
    query_of, head_of, _ = fragment.build_row(tile.group)
    weigh = build_weights(tile, write_lse)
    _, store = build_convert(out_dtype)

    @inline
    def place_of(number, x):
        """Of some elements of O, by their number in the block."""
        row, d = i32(u32(number) // u32(ACROSS)), i32(u32(number) % u32(ACROSS) * WIDTH)
        i = i32(x.row0 + row)
        return OutputPlace(row, i32(x.at.head + head_of(i)), query_of(i), d)

    @inline
    def ask(loaded, o_splits, x, place, first, kv_splits, step):
        """For these elements of some parts from the `first` on; a part is `step` bytes behind the
        one before.
        """
        own = o_splits[index(x.at.b0), index(x.b1), index(place.head), index(place.query)]
        at = u64(ptx.global_address(own) + u64(i64(place.d) * 4))
        for n in range(AHEAD):
            source = u64(at + u64(i64(min(i32(first + n), i32(kv_splits - 1))) * step))
            if WIDTH == 4:
                four = ptx.load_global_four(source)
                for c in range(4):
                    loaded[n * WIDTH + c] = four[c]
            else:
                loaded[n * WIDTH] = ptx.load_global_one(source)

    @inline
    def add(acc, loaded, smem, row, first, kv_splits):
        """acc += the parts that are there, each times its weight."""
        for n in range(AHEAD):
            part = i32(first + n)
            if part < kv_splits:
                word = ptx.load_shared(u32(smem + u32(4 * (part * BLOCK_M + row))))
                for c in range(WIDTH):
                    acc[c] += ptx.as_float32(u32(word)) * loaded[n * WIDTH + c]

    @inline
    def join(smem, o_splits, lse_splits, o, lse, arrivals, x, kv_splits):
        kv_splits, last = i32(kv_splits), 0
        cuda.syncthreads()  # all threads have written; shared memory has been read
        if cuda.threadIdx.x == 0:
            number = u64(u32(cuda.blockIdx.x) // u32(kv_splits))
            counter = u64(ptx.global_address(arrivals) + number * u64(4))
            last = i32(ptx.count_arrival(counter, u32(kv_splits - 1)) == u32(kv_splits - 1))
        if cuda.syncthreads_or(last) != 0:
            rows = min(i32(x.rows - x.row0), i32(BLOCK_M))
            number, stop = i32(cuda.threadIdx.x), i32(rows * ACROSS)
            acc, loaded = cuda.local.array(WIDTH, f32), cuda.local.array(LOADED, f32)
            step = i64(o.shape[0]) * o_splits.strides[0]
            place = place_of(number, x)
            if number < stop:  # on their way while weights are made
                ask(loaded, o_splits, x, place, i32(0), kv_splits, step)
            weigh(smem, lse_splits, lse, x, rows, kv_splits)
            cuda.syncthreads()  # all weights are there
            while number < stop:
                for c in range(WIDTH):
                    acc[c] = f32(0)
                add(acc, loaded, smem, place.row, i32(0), kv_splits)
                for first in range(i32(AHEAD), kv_splits, AHEAD):
                    ask(loaded, o_splits, x, place, i32(first), kv_splits, step)
                    add(acc, loaded, smem, place.row, i32(first), kv_splits)
                own = o[index(x.at.b0), index(x.b1), index(place.head), index(place.query)]
                for c in range(WIDTH):
                    own[index(place.d + c)] = store(acc[c])
                number = i32(number + THREADS)
                place = place_of(number, x)
                if number < stop:
                    ask(loaded, o_splits, x, place, i32(0), kv_splits, step)

    return join
