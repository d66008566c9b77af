"""dQ and the gradient of an additive bias at once, on tensor cores since Ampere, where all keys of
a head fit in one tile: dQ = dS K, and dbias = dS, summed over the axes that the bias broadcasts.

One block of threads owns some rows of dbias, in registers, and walks over the heads that the bias
is shared by, with S and dP of these rows and all keys: every row of dQ is done there, and every sum
has one owner and one order. Shares of the walk are added by `numba_flash.cuda.passes.sum_shares`.

Every row of dO and O is met there, too, so what a backward pass has to know of it is made there,
and written for `numba_flash.cuda.sm80.bias_gradient.dk_dv` (`numba_flash.cuda.sm80.begin_rows`).

The bias is read once; each thread keeps what belongs to its scores in shared memory, -inf beyond
the last key. Warps that share rows each have a part of the keys; dQ of their parts is added in
shared memory, in their order, while the next tile's products are made.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.passes.store_dbias import Fragments, build_store
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, types, u32, u64
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.fetch import build_fetch, held
from numba_flash.cuda.score.score import LOG2E, Head, Region
from numba_flash.cuda.sm80.backward.store_dq import build_add_dq
from numba_flash.cuda.sm80.begin_rows import ROW_BYTES, build_rows
from numba_flash.cuda.sm80.bias_gradient.dbias import synchronise
from numba_flash.cuda.sm80.bias_gradient.load_dq_dbias import Tensors, build_loads, head_address
from numba_flash.cuda.sm80.config import BiasGradientConfig
from numba_flash.cuda.sm80.operands import products
from numba_flash.cuda.sm80.resident_bias import VECTOR, OwnBias, build_bias
from numba_flash.cuda.sm80.tiles import KEYS, padded, pitch
from numba_flash.cuda.work.broadcast import Walk, build_coordinates
from numba_flash.cuda.work.walk_dbias import Space, build_places, build_share, extent_of

HALF = KEYS // 2  # keys of which a warp has scores in registers at a time


class DqDbiasWork(NamedTuple):
    """What parts of a tile of scores are computed with: registers, where this warp's keys are in
    shared memory, where the thread's bias is, and the scale.
    """

    s: Any
    dp: Any
    ds: Any
    acc: Any
    dq_acc: Any
    q: Any
    do: Any
    shift: Any
    start: Any
    k: int
    v: int
    bias: int
    scale_log2: float


class HeadWalk(NamedTuple):
    """A block's way over the heads that its part of the bias is shared by: number and coordinates
    of the first, all of them, and what it reads and writes.
    """

    number: int
    walk: Walk
    space: Space
    row0: int
    smem: int
    tensors: Tensors
    dq: Any
    rows: Any
    extras: Any
    scale: float


class TileStep(NamedTuple):
    """A block's work on a tile: its slot in shared memory, the number and coordinates of the next
    one, and where dQ of the tile before goes, 0 if there was none.
    """

    way: HeadWalk
    work: DqDbiasWork
    slot: int
    number: int
    walk: Walk
    before: int


@once
def build_half(kind, depths, pitches, words_of, value, tile, hidden):
    """``half(number, work)``: S, P, dP, dS of half a part of the keys, added to dbias, and its dS K
    to dQ. Scores may be `hidden` by the bias, whatever they are.
    """
    M_TILES, HIDDEN, NEG_INF = tile.m_tiles, hidden, -math.inf
    (D, DV), (PITCH_K, PITCH_V) = depths, pitches
    q_kt = products.build_nt(kind, M_TILES, HALF, D, PITCH_K, PITCH_K, True)
    do_vt = products.build_nt_from(kind, M_TILES, HALF, DV, PITCH_V, PITCH_V, True, True)
    ds_k = products.build_nn(kind, M_TILES, D, HALF, PITCH_K)
    first_ds_k = products.build_nn(kind, M_TILES, D, HALF, PITCH_K, fresh=True)
    pack, _ = fragment.build_pack(M_TILES * HALF // 4, *kind)

    @inline
    def half(number, t):
        keys = u32(t.k + u32(number * HALF * PITCH_K))
        # (1) S = Q K^T
        q_kt(t.s, t.q, keys)
        # (4) dP = dO V^T - delta
        do_vt(t.dp, t.do, u32(t.v + u32(number * HALF * PITCH_V)), t.start)
        for m in range(M_TILES):
            words = words_of(number, m, t.bias)
            for r in range(2):
                for x in range(4):
                    e = (2 * m + x // 2) * 4 + 2 * r + x % 2
                    bias = value(words, r, x)
                    # (2) P = exp(S - lse)
                    score = t.s[e] * t.scale_log2 + (bias * f32(LOG2E) - t.shift[2 * m + r])
                    if HIDDEN:
                        score = f32(NEG_INF) if bias == f32(NEG_INF) else score
                    # (5) dbias = dbias + dS, where dS = P * (dP - delta)
                    t.dp[e] *= ptx.ex2(score)
                    to = number // 2 * (M_TILES * HALF)
                    to += (4 * m + number % 2 * 2 + x // 2) * 4 + 2 * r + x % 2
                    t.acc[to] += t.dp[e]
        # (7) dQ = dQ + dS K, from 0
        pack(t.ds, t.dp)
        if number == 0:
            first_ds_k(t.dq_acc, t.ds, keys)
        else:
            ds_k(t.dq_acc, t.ds, keys)

    return half


@once
def build_go(shape, kind, places, loads, half, tile):
    """``go(way, work)``: the whole walk, with the first tile on its way already; `half` as
    `build_half` makes it.
    """
    (place_of, following), (load, begin) = places, loads
    M_TILES, WARPS_N, ROWS_OF_LANE = tile.m_tiles, tile.warps_n, 2 * tile.m_tiles
    BLOCK_M, WARP_ROWS, WARP_KEYS = tile.block_m, 16 * tile.m_tiles, KEYS * tile.parts
    SMEM, (PITCH_K, PITCH_V) = tile.layout(*shape.columns), map(pitch, shape.columns)
    Q, DO, ROWS, K, V, DQ = SMEM.q, SMEM.do, SMEM.rows, SMEM.k, SMEM.v, SMEM.dq
    Q_BYTES, DO_BYTES, ROWS_BYTES = BLOCK_M * PITCH_K, BLOCK_M * PITCH_V, ROW_BYTES * BLOCK_M
    K_BYTES, V_BYTES = tile.block_n * PITCH_K, tile.block_n * PITCH_V
    HALVES = 2 * tile.parts
    LOADED, ADDED, READ = 0, min(1, HALVES - 2), HALVES - 2  # after which half
    D, DV = map(padded, shape[:2])
    hold_q = products.build_hold(M_TILES, D, PITCH_K)
    hold_do = products.build_hold(M_TILES, DV, PITCH_V)
    put_dq, add_dq = build_add_dq(shape.head_dim, tile, kind)

    @inline
    def hold_rows(rows, shift, start):
        """The lse, and what sums of dP begin with, of this lane's rows."""
        for r in range(ROWS_OF_LANE):
            shift[r], start[r] = ptx.load_shared_pair(u32(rows + u32(8 * ROW_BYTES * r)))

    @inline
    def add_last(x, address):
        """dQ of the last tile whose dQ is in shared memory, which begins at this address."""
        queries = x.space.queries
        add_dq(u32(x.smem + u32(DQ)), address, x.dq.strides[3], x.row0, queries, x.scale)

    @inline
    def step(number, t):
        x = t.way
        half(number, t.work)
        if number == LOADED and t.number < x.space.stop:
            load(x.smem, u32(t.slot ^ u32(1)), x.tensors, place_of(t.walk, x.space, x.extras))
        if number == ADDED and t.before != u64(0):
            add_last(x, t.before)
        if number == READ:
            cuda.syncthreads()  # dQ of the tile before has been read

    all_steps = ptx.repeated(HALVES, step)

    @inline
    def go(x, t):
        number, walk, slot, smem, before = x.number, x.walk, u32(0), x.smem, u64(0)
        warp, lane = i32(cuda.threadIdx.x // 32), i32(cuda.threadIdx.x % 32)
        row, key = i32(warp // WARPS_N * WARP_ROWS), i32(warp % WARPS_N * WARP_KEYS)
        while number < x.space.stop:
            ptx.copy_wait()
            here = place_of(walk, x.space, x.extras).at
            begin(smem, slot, x.rows, here, x.row0, x.space.queries)
            cuda.syncthreads()  # this tile is there, and dQ of the one before, which has been read
            number, walk = i32(number + 1), following(walk, x.space.sizes)
            hold_q(t.q, u32(smem + u32(Q) + slot * u32(Q_BYTES) + u32(row * PITCH_K)))
            hold_do(t.do, u32(smem + u32(DO) + slot * u32(DO_BYTES) + u32(row * PITCH_V)))
            rows = u32(smem + u32(ROWS) + slot * u32(ROWS_BYTES) + u32((row + lane // 4) * 8))
            hold_rows(rows, t.shift, t.start)
            k = u32(smem + u32(K) + slot * u32(K_BYTES) + u32(key * PITCH_K))
            v = u32(smem + u32(V) + slot * u32(V_BYTES) + u32(key * PITCH_V))
            work = DqDbiasWork(
                t.s, t.dp, t.ds, t.acc, t.dq_acc, t.q, t.do, t.shift, t.start, k, v, t.bias,
                t.scale_log2,
            )  # fmt: skip
            all_steps(TileStep(x, work, slot, number, walk, before))
            put_dq(u32(smem + u32(DQ)), t.dq_acc)
            before = head_address(x.dq, here, here.head)
            slot = u32(slot ^ u32(1))
        cuda.syncthreads()  # dQ of the last tile is there
        if before != u64(0):
            add_last(x, before)

    return go


def build(config: BiasGradientConfig):
    """Kernel ``dq_dbias_sm80(do, o, q, k, v, dq, lse, dlse, rows, out, hides_some, extras,
    scale_log2, scale)`` with its signature and compile options.

    do, o, q, k, v, dq : (b0, b1, heads, n, head_dim), 16 bits, rows at multiples of 16 bytes; no
        more keys than a tile has.
    lse, dlse : (b0, b1, heads, n); dlse is not read unless ``config.dlse``.
    rows : (b0, b1, heads, row blocks * BLOCK_M, 2), written as
        `numba_flash.cuda.sm80.begin_rows` says.
    out : (shares, b0, b1, heads, n, n) of dtype ``config.out``, with sizes 1 where it is summed;
        the last two axes are not.
    hides_some : int32, for each tile of dbias whether a bias in it is -inf.
    """
    dtype, shape, options, tile = config.dtype, config.shape, config.options, config.tile
    out_dtype, summed = config.out, config.summed
    BLOCK_M, BLOCK_N, THREADS, PARTS = tile.block_m, tile.block_n, tile.threads, tile.parts
    M_TILES, WARPS_N, ROWS_OF_LANE = tile.m_tiles, tile.warps_n, 2 * tile.m_tiles
    WARP_ROWS, WARP_KEYS = 16 * M_TILES, KEYS * PARTS
    SMEM = tile.layout(*shape.columns)
    BIAS, D, DV = SMEM.bias, *map(padded, shape[:2])
    SCORES, WORDS = M_TILES * HALF // 2, M_TILES * HALF // 4
    ALL_SCORES, OUTPUTS = 2 * PARTS * SCORES, M_TILES * D // 2
    Q_WORDS, DO_WORDS, STARTS = M_TILES * D // 4, M_TILES * DV // 4, 2 * M_TILES
    runs = fragment.runs_of_queries(M_TILES, KEYS)
    HELD = held(options, runs).words
    ALL_HELD = PARTS * HELD
    kind = products.Kind(dtype == "bfloat16", False)
    load_tile, (load_rows, begin) = (
        build_loads(shape, tile),
        build_rows(dtype, shape, config.dlse, tile),
    )
    zero, _ = softmax.build_zero(ALL_SCORES)
    fetch_bias = build_fetch(options, runs, shape.vectors)
    hides, keep, words_of, value = build_bias(options, tile)
    depths, pitches = (D, DV), tuple(map(pitch, shape.columns))
    of_half = kind, depths, pitches, words_of, value, tile
    halves = (build_half(*of_half, hidden) for hidden in (False, True))
    keep_all = ptx.repeated(PARTS, keep)
    share_of = build_share(summed, BLOCK_M, BLOCK_N)
    _, walked, following = build_coordinates(summed)
    place_of, _, _ = build_places(options, False, summed, BLOCK_M, BLOCK_N)

    @inline
    def load(smem, slot, tensors, place):
        load_tile(smem, slot, tensors, place)
        load_rows(smem, slot, tensors, place)

    places, loads = (place_of, following), (load, begin)
    go, go_where_some_are_hidden = (
        build_go(shape, kind, places, loads, half, tile) for half in halves
    )
    fragments = Fragments(
        runs, PARTS, KEYS, tile.warps_m, WARPS_N, WARP_ROWS, 8, 0, False, synchronise
    )
    store = build_store(out_dtype, shape.wide, False, summed, fragments)

    def dq_dbias_sm80(
        do, o, q, k, v, dq, lse, dlse, rows, out, hides_some, extras, scale_log2, scale
    ):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S, of half a part of the keys
        dp = cuda.local.array(SCORES, f32)  # of dP, then of dS
        ds = cuda.local.array(WORDS, u32)  # of dS, two elements of 16 bits each
        acc = cuda.local.array(ALL_SCORES, f32)  # of dbias
        dq_acc = cuda.local.array(OUTPUTS, f32)  # of dQ, of the warp's keys
        q_words = cuda.local.array(Q_WORDS, u32)  # of Q
        do_words = cuda.local.array(DO_WORDS, u32)  # of dO
        bias = cuda.local.array(ALL_HELD, u32)
        shift = cuda.local.array(ROWS_OF_LANE, f32)  # lse of the lane's rows
        start = cuda.local.array(STARTS, f32)  # what their dP begins with

        nq, nk = i32(q.shape[3]), i32(k.shape[3])
        extent = extent_of(q, k, i32(-nq), nk)
        space, share, number = share_of(i32(cuda.blockIdx.x), extent, u32(out.shape[0]))
        own, walk = space.own, walked(number, space.sizes)
        tensors = Tensors(do, o, q, k, v, lse, dlse)
        warp, lane = i32(cuda.threadIdx.x // 32), i32(cuda.threadIdx.x % 32)
        warp_m, warp_n = i32(warp // WARPS_N), i32(warp % WARPS_N)
        load(smem, u32(0), tensors, place_of(walk, space, extras))

        row0, col0 = i32(own.i * BLOCK_M), i32(own.j * BLOCK_N)
        row = i32(row0 + warp_m * WARP_ROWS + lane // 4)
        column = i32(col0 + warp_n * WARP_KEYS + fragment.first_key())
        region = Region(row0, col0, nq, nk, i32(-nq), nk)
        at = Head(own.b0, own.b1, i32(0), own.head, extent.heads)
        some_hidden = i32(0)
        for part in range(PARTS):
            key = i32(column + part * KEYS)
            fetch_bias(bias[part * HELD :], row, key, region, at, False, extras)
            some_hidden = i32(1) if hides(part, bias) else some_hidden
        my_bias = u32(smem + u32(BIAS) + u32(cuda.threadIdx.x * VECTOR))
        keep_all(OwnBias(bias, my_bias, column, nk))
        hidden = cuda.syncthreads_or(some_hidden) != 0
        if share == 0 and cuda.threadIdx.x == 0:
            hides_some[index(cuda.blockIdx.x)] = i32(1) if hidden else i32(0)
        zero(acc)
        work = DqDbiasWork(
            s, dp, ds, acc, dq_acc, q_words, do_words, shift, start, u32(0), u32(0),
            my_bias, scale_log2,
        )  # fmt: skip
        way = HeadWalk(number, walk, space, row0, smem, tensors, dq, rows, extras, scale)
        if hidden:
            go_where_some_are_hidden(way, work)
        else:
            go(way, work)
        store(out[share, own.b0, own.b1, own.head], acc, smem, row0, col0)

    signature = types.void(
        *[array(types.uint16, 5)] * 6,
        *[array(f32, 4)] * 2,
        array(f32, 5),
        array(f32 if out_dtype == "float32" else types.uint16, 6),
        array(i32, 1),
        extras_type(options),
        *(f32, f32),
    )
    return dq_dbias_sm80, signature, {"launch_bounds": (THREADS, tile.min_blocks)}
