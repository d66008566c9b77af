"""dQ of the backward pass, which blocks of keys add up in memory, in the order of fragments: a tile
of BLOCK_M queries has as many float32 as elements, those of a thread for every one of its
registers side by side with those of its neighbours; and what is done with the sums in the end.
"""

import math
from typing import Any, NamedTuple

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import FACTORS, OF_DLSE, extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, once, types, u32, u64
from numba_flash.cuda.score import softmax
from numba_flash.cuda.score.softmax import RAISED_BACKWARD as RAISED
from numba_flash.cuda.sm80.arguments import finds_again
from numba_flash.cuda.sm80.load import build_store, build_store_floats
from numba_flash.cuda.sm80.operands import products, products_planes
from numba_flash.cuda.sm80.tiles import pitch
from numba_flash.cuda.work import schedule, tile_lists


class Sum(NamedTuple):
    """What a block of keys adds to.

    Attributes
    ----------
    number : int
        Of the row block's copy.
    first : bool
        It is the first block of keys that does so.
    flag : int
        Number of the flag that the row block shares with others of its head.
    before : int
        How many blocks of keys come before this one at that flag.
    begins, ends : bool
        It is the first, or the last, of those row blocks that this block of keys adds to.
    """

    number: int
    first: bool
    flag: int
    before: int
    begins: bool
    ends: bool


class Sums(NamedTuple):
    """Functions of a block of keys; see `build`."""

    of: Any
    wait: Any
    add: Any
    release: Any


def lists_of(ordered) -> tuple[str, ...]:
    """What the kernels of a backward pass want of a mask."""
    return ("tiles", "order") if ordered else ("tiles",)


@once
def build_place(tile, fours, again=False):
    """``place(e)``: bytes from a tile's sums to those of this thread's registers e to e + 3, of
    which neighbours are 16 bytes apart with `fours`, else each register's are on their own; from
    the number of the thread, which is read `again` in every call, for registers.
    """
    THREADS, FOURS, AGAIN = tile.threads, fours, again

    @inline
    def place(e):
        thread = i64(ptx.bounded_thread_here() if AGAIN else cuda.threadIdx.x)
        return u64((i64(e) * THREADS + (4 * thread if FOURS else thread)) * 4)

    return place


class DqOrder(NamedTuple):
    """Functions of a block of keys; see `build_order`."""

    of: Any
    wait: Any
    release: Any


@once
def build_order(ordered, options, tile):
    """`DqOrder`, functions of a block of keys that know when it may add:

    ``sum_of(item, walk, following, sizes, extras)``: the `Sum` of a tile, which another one
    follows.
    ``wait(flags, to)``: if `ordered` until all blocks of keys before have added to it. Where tiles
        are long one warp does, and everybody meets it at a barrier: then it can wait for every tile
        while the other warps are at work, and blocks are so close behind each other that sums stay
        in the cache (H200, D = 128, 16k keys: 1.008 of FlashAttention-2's speed, 0.948 if all warps
        wait before they add). Where they are short (D = 64), all warps wait, as late as they can: 1
        to 4 % faster, and under a mask that hides 90 % of the tiles 25 %.
    ``release(flags, to)``: say that this block has added, after everybody has.

    flags : one of each copy for SHARE row blocks, since to wait, and to wait until all has arrived
        in memory, takes as long as a fraction of a tile.
    """
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    ORDERED, SHARE, MASKED = ordered, tile.share, options.tiled

    @inline
    def blocks_before(item, at):
        """Blocks of keys before that see something of the row block `at` of a head or later."""
        return i32(item.row0 // BLOCK_N - max(at * BLOCK_M - item.high, 0) // BLOCK_N)

    @inline
    def sum_under_mask(item, walk, following, extras):
        """The same, of what the mask's lists say."""
        at, shared, order = walk.at, i32(walk.at // SHARE), i32(0)
        if ORDERED:
            block = index(item.row0 // BLOCK_N)
            order = extras.order[
                index(item.b0), index(item.b1), index(walk.head), block, index(shared)
            ]
        return Sum(
            number=i32(walk.base + at),
            first=tile_lists.is_first(order, at % SHARE),
            flag=i32(walk.base + shared * SHARE),
            before=tile_lists.count_before(order),
            begins=walk.begins,
            ends=following.begins or following.tiles_left < 0,
        )

    @inline
    def sum_of(item, walk, following, sizes, extras):
        if MASKED:
            return sum_under_mask(item, walk, following, extras)
        at, last = walk.at, item.first + item.count - 1
        shared, doublings = i32(at // SHARE), i32(sizes.doublings)
        copy = i32(item.row0 // BLOCK_N & i32(i32(i32(1) << doublings) - 1))
        return Sum(
            number=i32(i32(i32(walk.base + at) << doublings) + copy),
            first=i32(blocks_before(item, at) >> doublings) == 0,
            flag=i32(i32(i32(walk.base + shared * SHARE) << doublings) + copy),
            before=i32(blocks_before(item, i32(shared * SHARE)) >> doublings),
            begins=at == last or at % SHARE == SHARE - 1,
            ends=at == item.first or at % SHARE == 0,
        )

    @inline
    def flag_address(flags, to):
        return u64(ptx.global_address(flags) + u64(4) * u64(u32(to.flag)))

    @inline
    def wait(flags, to):
        if ORDERED and to.begins and to.before > 0:
            while ptx.load_flag(flag_address(flags, to)) != to.before:
                pass

    @inline
    def release(flags, to):
        if ORDERED:
            if to.ends and cuda.threadIdx.x == 0:
                ptx.add_flag(flag_address(flags, to), i32(1))

    return DqOrder(sum_of, wait, release)


@once
def build(kind, shape, ordered, options, tile):
    """`Sums`, functions of a block of keys: those of `build_order`, and

    ``add(ds, k, dq_sum, to, factors)``: dQ = dQ + dS K, from tiles of dS^T and K in shared memory;
        of float32, each warp's keys of each part of the queries with the factor they have there.

    dq_sum : float32 (b0, b1, heads, row blocks, copies * BLOCK_M * D): neighbouring blocks of keys
        add to different copies, so that none waits for those that are at work at the same time.
    """
    BLOCK_M, BLOCK_N, D = tile.block_m, tile.block_n, tile.padded(shape.head_dim)
    WARPS_M, WARPS_N = tile.dq_warps
    PARTS, ROWS = tile.dq_parts, BLOCK_M // WARPS_M
    COLUMNS = D // WARPS_N // PARTS  # of a warp, at a time
    COUNT, STRIDE, DQ_BYTES = ROWS * COLUMNS // 32, 4 * tile.threads, 4 * BLOCK_M * D
    ORDERED, FOURS = ordered, shape.fours
    FP16X2, WARPS, PART = shape.planes > 0, tile.warps, tile.columns
    AGAIN = finds_again(options, shape, tile)
    SMEM = tile.layout(shape.head_dim, shape.head_dim_v)
    sizes = ROWS // 16, COLUMNS, BLOCK_N, SMEM.pitch_ds, SMEM.pitch_k
    product = products.build_tn(kind, *sizes) if not FP16X2 else None
    if FP16X2:
        planes = ptx.Planes(2 * BLOCK_M, 2 * D) if shape.planes > 1 else None
        product_times = products_planes.build_planes_tn(*sizes, planes, WARPS)
    place = build_place(tile, FOURS)

    @inline
    def add(ds, k, dq_sum, to, factors):
        acc = cuda.local.array(COUNT, f32)  # registers: fragment of dQ
        factor = cuda.local.array(WARPS, f32)
        warp = i32((ptx.bounded_thread_here() if AGAIN else cuda.threadIdx.x) // 32)
        row, column = i32(warp // WARPS_N * ROWS), i32(warp % WARPS_N * (COLUMNS * PARTS))
        sums = u64(ptx.global_address(dq_sum) + u64(u32(to.number)) * u64(DQ_BYTES))
        if FP16X2:
            for w in range(WARPS):
                at = u32(factors + u32(4 * (row // PART * WARPS + w)))
                factor[w] = ptx.as_float32(u32(ptx.load_shared(at)))
        for part in range(PARTS):
            k_part = u32(k + u32((column + part * COLUMNS) * 2))
            if FP16X2:
                product_times(acc, u32(ds + u32(row * 2)), k_part, factor)
            else:
                product(acc, u32(ds + u32(row * 2)), k_part)
            for e in range(0, COUNT, 4):
                target = u64(sums + place(i32(part * COUNT + e)))
                if ORDERED and to.first:
                    if FOURS:
                        ptx.store_global(target, (acc[e], acc[e + 1], acc[e + 2], acc[e + 3]))
                    else:
                        for x in range(4):
                            ptx.store_global(u64(target + u64(x * STRIDE)), (acc[e + x],))
                elif FOURS:
                    ptx.add_four(target, acc[e], acc[e + 1], acc[e + 2], acc[e + 3])
                else:
                    for x in range(4):
                        ptx.add_one(u64(target + u64(x * STRIDE)), acc[e + x])

    sum_of, wait, release = build_order(ordered, options, tile)
    return Sums(sum_of, wait, add, release)


def build_postprocess(dtype, shape, ordered, options, tile, has_dlse=False):
    """Kernel ``postprocess_sm80(dq_sum, dq, extras, nk, low, high, scale)``: dQ = scale dQ, out of
    the order of fragments, rounded.

    Row blocks that see no key get 0: nobody has written their sum. Of split float32, whose keys
    have lost their centre c, dQ = scale (dQ + dlse c), as rows of dS sum to dlse, if it `has_dlse`.
    """
    D, BLOCK_M, BLOCK_N = tile.padded(shape.head_dim), tile.block_m, tile.block_n
    WARPS_M, WARPS_N = tile.dq_warps
    PARTS, ROWS, PITCH = tile.dq_parts, BLOCK_M // WARPS_M, pitch(D)
    COLUMNS = D // WARPS_N // PARTS
    COUNT, STRIDE, ROOM, DQ_BYTES = (
        ROWS * COLUMNS // 32,
        4 * tile.threads,
        BLOCK_M * PITCH,
        4 * BLOCK_M * D,
    )
    ROWS_HELD, FOURS, PACKED, NAN = ROWS // 8, shape.fours, options.packed, math.nan
    IN_ORDER, SHARE = ordered and options.tiled, tile.share
    WARP_ROWS, FP16X2, HAS_DLSE, INF = BLOCK_M // tile.warps, shape.planes > 0, has_dlse, math.inf
    LOWERED = 2.0**-RAISED
    store_floats = build_store_floats(ROWS // 16, COLUMNS, has_dlse)
    more = () if not FP16X2 else OF_DLSE if has_dlse else FACTORS
    put = products.build_put(ROWS // 16, COLUMNS, PITCH, dtype == "bfloat16", shape.turing)
    store = build_store(WARP_ROWS, shape.head_dim, shape.wide, None, D)
    zero, _ = softmax.build_zero(COUNT)
    place = build_place(tile, FOURS)
    rows_of = schedule.build_rows(options, BLOCK_M)

    def postprocess_sm80(dq_sum, dq, extras, nk, low, high, scale):
        smem = ptx.shared_address(cuda.shared.array(ROOM, types.uint8, 16))  # a tile of dQ
        acc = cuda.local.array(COUNT, f32)  # registers: fragment of dQ
        factor = cuda.local.array(ROWS_HELD, f32)
        weight = cuda.local.array(ROWS_HELD, f32)  # of the centre of the keys
        number = i64(cuda.blockIdx.x)
        rows = rows_of(number, extras, dq.shape, nk)
        row0, queries = i32(rows.row0), i32(rows.queries)
        start, stop = mask.kv_range(
            row0, min(row0 + BLOCK_M, queries), rows.keys, low + rows.shift, high + rows.shift
        )
        some = row0 < queries and start < stop
        if IN_ORDER:
            of_head, at = extras.order[rows.b0, rows.b1, rows.head], i32(row0 // BLOCK_M)
            after_all = of_head[index(of_head.shape[0] - 1), index(at // SHARE)]
            some = some and not tile_lists.is_first(after_all, at % SHARE)
        copies, block = u32(dq_sum.shape[4]) // u32(BLOCK_M * D), u32(start) // u32(BLOCK_N)
        summed = u32(0)
        if some:
            summed = min(copies, u32(u32(stop - 1) // u32(BLOCK_N) - block + u32(1)))
        sums = u64(ptx.global_address(dq_sum) + u64(number * DQ_BYTES) * u64(copies))
        for r in range(ROWS_HELD):
            factor[r] = f32(NAN) if rows.invalid else scale
        warp = i32(cuda.threadIdx.x // 32)
        row, column = i32(warp // WARPS_N * ROWS), i32(warp % WARPS_N * (COLUMNS * PARTS))
        dq_head, last = dq[rows.b0, rows.b1, rows.head], i32(dq.shape[3])
        if PACKED:
            dq_head, last = dq_head[rows.memory_row - rows.row0 :], queries
        if FP16X2:
            kv_head = rows.head // (dq.shape[2] // extras.factors.shape[2])
            of_head = extras.factors[rows.b0, rows.b1, kv_head]
            centre = of_head  # nobody reads it
            for r in range(ROWS_HELD):
                factor[r] *= f32(LOWERED) * of_head[1]
        if HAS_DLSE:
            centre = extras.centres[0, rows.b0, rows.b1, kv_head]
            for r in range(ROWS_HELD):
                at = row + cuda.threadIdx.x % 32 // 4 + 8 * r
                weight[r] = f32(0)
                if row0 + at < queries:
                    there = ptx.load_global_one(
                        u64(ptx.global_address(extras.rows) + u64((number * BLOCK_M + at) * 4))
                    )
                    if there != f32(INF):
                        dlse = extras.dlse[rows.b0, rows.b1, rows.head]
                        weight[r] = scale * dlse[index(rows.memory_row + at)]
        for part in range(PARTS):
            zero(acc)
            for n in range(summed):
                copy = u64(sums + u64((block + n) % copies) * u64(DQ_BYTES))
                for e in range(0, COUNT, 4):
                    at = u64(copy + place(i32(part * COUNT + e)))
                    if FOURS:
                        x = ptx.load_global_four(at)
                        for i in range(4):
                            acc[e + i] += x[i]
                    else:
                        for i in range(4):
                            acc[e + i] += ptx.load_global_one(u64(at + u64(i * STRIDE)))
            if FP16X2:
                for e in range(COUNT):
                    acc[e] *= of_head[2] * of_head[3]
                own, mine = i32(column + part * COLUMNS), row0 + row + cuda.threadIdx.x % 32 // 4
                store_floats(dq_head[:, own:], acc, factor, mine, last, centre[own:], weight)
            else:
                place_in_tile = row * PITCH + (column + part * COLUMNS) * 2
                put(u32(smem + u32(place_in_tile)), acc, factor)
        if not FP16X2:
            cuda.syncthreads()  # all rows are there
            first = i32(warp * WARP_ROWS)
            store(u32(smem + u32(first * PITCH)), dq_head, i32(row0 + first), last)

    numbers = i64, i64, i64, f32
    signature = types.void(
        array(f32, 5),
        array(f32 if FP16X2 else types.uint16, 5),
        extras_type(options, lists_of(ordered), more),
        *numbers,
    )
    return postprocess_sm80, signature, {"launch_bounds": (tile.threads, 1)}
