"""Gradient of an additive bias on tensor cores since Turing: dbias = dS, summed over the axes that
the bias broadcasts.

One block of threads owns a tile of dbias, in registers, and walks over the tiles of scores that
were made of it, with S and dP once more: every sum has one owner and one order. The tile of the
bias is read once. Where there are too few tiles to fill a GPU, each is split into shares of the
walk, which `numba_flash.cuda.passes.sum_shares` adds in their order.

Where there is room for two tiles of Q, K, V and dO, the next ones are copied during the work on
this one. Else V and dO are copied during Q K^T, and the next Q and K during dO V^T.

Float32 arrays are planes of float16 (`numba_flash.cuda.passes.write_planes`), whose powers of two
differ from one head of k to the next: S gets them back before anything else is done to it, dS
before it is added.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import OF_DBIAS, Extent, extras_type, parameters_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.passes.store_dbias import Fragments, build_store
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, once, types, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.fetch import build_fetch, held
from numba_flash.cuda.score.modify import build_drop, build_modify
from numba_flash.cuda.score.score import LOG2E, Head, Region
from numba_flash.cuda.sm80.bias_gradient.load_dbias import Tensors, build_loads
from numba_flash.cuda.sm80.config import BiasGradientConfig
from numba_flash.cuda.sm80.operands import products, products_planes
from numba_flash.cuda.sm80.tiles import KEYS, padded, pitch
from numba_flash.cuda.work.walk_dbias import Space, Step, build_begin, build_places


class Bias(NamedTuple):
    """A block's part of the bias on its way into registers."""

    bias_mask: Any
    region: Region
    at: Head
    extras: Any


class DbiasWork(NamedTuple):
    """What the parts of a tile of scores are computed with: registers, the slot in shared memory,
    this step and the next, and the kernel's arguments.
    """

    s: Any
    dp: Any
    acc: Any
    bias_mask: Any
    smem: int
    slot: int
    step: Step
    next: Step
    space: Space
    tensors: Tensors
    extras: Any
    parameters: Any


@inline
def synchronise():
    """Wait for all threads of the block."""
    cuda.syncthreads()


@once
def build_products(dtype, shape, m_tiles, depths, pitches):
    """``q_kt(s, q, k)`` and ``do_vt(dp, do, v)``, of 16 `m_tiles` queries and KEYS keys; of planes,
    if the shape is `planes`.
    """
    kind = products.Kind(dtype == "bfloat16", shape.turing)

    def product(depth, bytes_):
        if not shape.planes:
            return products.build_nt(kind, m_tiles, KEYS, depth, bytes_, bytes_, False)
        planes = ptx.Planes(2 * depth, 2 * depth) if shape.planes > 1 else None
        return products_planes.build_planes_nt(m_tiles, KEYS, depth, bytes_, bytes_, planes)

    return tuple(map(product, depths, pitches))


@once
def build_softmax(options, m_tiles, planes):
    """``recompute_p(s, lse)``: scores become P = exp(S - lse); ``differentiate(acc, p, dp, delta,
    factor, parameters)``: acc += dS = P * (dP - delta), where P is negative if dropped, and times
    the factor if products are `planes`. The lse and delta of this lane's rows are in shared memory.
    """
    DROPOUT, ROWS_OF_LANE, COUNT = bool(options.dropout), 2 * m_tiles, KEYS // 2
    FP16X2 = planes

    @inline
    def of_row(address, r):
        return ptx.as_float32(u32(ptx.load_shared(u32(address + u32(32 * r)))))

    @inline
    def recompute_p(s, lse):
        for r in range(ROWS_OF_LANE):
            shift = of_row(lse, r)
            for j in range(COUNT // 4):
                for c in range(2):
                    e = r // 2 * COUNT + 4 * j + 2 * (r % 2) + c
                    if FP16X2:  # the difference of large numbers loses no digits
                        s[e] = ptx.ex2((s[e] - shift) * f32(LOG2E))
                    else:
                        s[e] = ptx.ex2(s[e] * f32(LOG2E) - shift)

    @inline
    def differentiate(acc, p, dp, delta, factor, parameters):
        for r in range(ROWS_OF_LANE):
            row_delta = of_row(delta, r)
            for j in range(COUNT // 4):
                for c in range(2):
                    e = r // 2 * COUNT + 4 * j + 2 * (r % 2) + c
                    weight, slope = p[e], dp[e]
                    if DROPOUT:  # dP is 0 where the weight is -P
                        slope = slope if weight > f32(0) else f32(0)
                        slope *= f32(parameters.keep_scale)
                        weight = abs(weight)
                    slope -= row_delta
                    if FP16X2:
                        slope *= factor
                    acc[e] += weight * slope

    return recompute_p, differentiate


def build(config: BiasGradientConfig):
    """Kernel ``dbias_sm80(do, q, k, v, rows, out, extras, low, high, parameters)`` with its
    signature and compile options.

    do, q, k, v : (b0, b1, heads, n, head_dim), 16 bits; or planes, whose factors and flags are
        among the `extras`: heads that are flagged are left out.
    rows : (2, b0, b1, heads, at least n): the lse and delta of each query, as
        `numba_flash.cuda.passes.preprocess` writes them.
    out : (shares, b0, b1, heads, n, n) of dtype ``config.out``, with sizes 1 where it is summed.
    """
    dtype, shape, options, tile = config.dtype, config.shape, config.options, config.tile
    out_dtype, summed, banded = config.out, config.summed, config.banded
    BLOCK_M, BLOCK_N, THREADS = tile.block_m, tile.block_n, tile.threads
    M_TILES, WARPS_N, PARTS, STAGES = tile.m_tiles, tile.warps_n, tile.parts, tile.stages
    WARP_ROWS, WARP_KEYS = 16 * M_TILES, KEYS * PARTS
    SMEM, (PITCH_K, PITCH_V) = tile.layout(*shape.columns), map(pitch, shape.columns)
    Q, DO, ROWS, K, V = SMEM.q, SMEM.do, SMEM.rows, SMEM.k, SMEM.v
    Q_BYTES, DO_BYTES, ROWS_BYTES = BLOCK_M * PITCH_K, BLOCK_M * PITCH_V, 8 * BLOCK_M
    K_BYTES, V_BYTES, LSE_BYTES = BLOCK_N * PITCH_K, BLOCK_N * PITCH_V, 4 * BLOCK_M
    K_PART, V_PART = KEYS * PITCH_K, KEYS * PITCH_V
    SCORES, DROPOUT, MASKED = M_TILES * KEYS // 2, bool(options.dropout), options.mask
    ALL_SCORES = PARTS * SCORES
    TWO_STAGES, TURING, NAN, FP16X2 = STAGES > 1, shape.turing, math.nan, shape.planes > 0
    runs = fragment.runs_of_queries(M_TILES, KEYS)
    HELD = held(options, runs).words
    ALL_HELD = PARTS * HELD
    load_qk, load_dov = build_loads(shape, tile)
    depths, pitches = tuple(map(padded, shape[:2])), (PITCH_K, PITCH_V)
    q_kt, do_vt = build_products(dtype, shape, M_TILES, depths, pitches)
    zero, _ = softmax.build_zero(ALL_SCORES)
    fetch_bias = build_fetch(options, runs, shape.vectors, ("bias",))
    fetch_mask = build_fetch(options, runs, shape.vectors, ("mask",))
    modify = build_modify(dtype, options, runs, False, shape.turing)
    drop = build_drop(options, runs)
    recompute_p, differentiate = build_softmax(options, M_TILES, FP16X2)
    begin = build_begin(summed, BLOCK_M, BLOCK_N)
    place_of, find, proceed = build_places(options, banded, summed, BLOCK_M, BLOCK_N, FP16X2)
    fragments = Fragments(
        runs, PARTS, KEYS, tile.warps_m, WARPS_N, WARP_ROWS, 8, 0, False, synchronise
    )
    store = build_store(out_dtype, shape.wide, shape.turing, summed, fragments)

    @inline
    def warp_number():
        return i32(cuda.threadIdx.x // 32)

    @inline
    def first_row(warp):
        """This lane's, in the tile."""
        return i32(warp // WARPS_N * WARP_ROWS + cuda.threadIdx.x % 32 // 4)

    @inline
    def first_key(warp):
        return i32(warp % WARPS_N * WARP_KEYS + fragment.first_key())

    @inline
    def rows_of_lane(t, warp):
        """Where the lse of this lane's rows is."""
        return u32(t.smem + u32(ROWS) + t.slot * u32(ROWS_BYTES) + u32(first_row(warp) * 4))

    @inline
    def factor_of(first, t):
        """What undoes the powers of two of products of q and k (0), or v and do (2)."""
        at, kv_head, _, _ = place_of(t.step.walk, t.space, t.extras)
        of_head = t.extras.factors[index(at.b0), index(at.b1), index(kv_head)]
        return of_head[first] * of_head[first + 1]

    @inline
    def fetch_part(part, t):
        """The bias of a part of the keys."""
        warp = warp_number()
        row = i32(t.region.row0 + first_row(warp))
        column = i32(t.region.col0 + first_key(warp) + part * KEYS)
        fetch_bias(t.bias_mask[part * HELD :], row, column, t.region, t.at, False, t.extras)

    @inline
    def weigh(part, t):
        """P of a part of the keys."""
        s, bias_mask, warp = t.s[part * SCORES :], t.bias_mask[part * HELD :], warp_number()
        at, _, region, _ = place_of(t.step.walk, t.space, t.extras)
        whole = t.step.whole
        row = i32(region.row0 + first_row(warp))
        column = i32(region.col0 + first_key(warp) + part * KEYS)
        if MASKED:
            fetch_mask(bias_mask, row, column, region, at, whole, t.extras)
        # (1) S = Q K^T; what is loaded meanwhile does not keep it from starting
        q_rows = u32(t.smem + u32(Q) + t.slot * u32(Q_BYTES))
        q_rows += u32(warp // WARPS_N * WARP_ROWS * PITCH_K)
        keys = u32(t.smem + u32(K) + t.slot * u32(K_BYTES))
        keys += u32((warp % WARPS_N * PARTS + part) * K_PART)
        q_kt(s, q_rows, keys)
        if part == 0:
            if not TWO_STAGES:
                load_dov(t.smem, t.slot, t.tensors, place_of(t.step.walk, t.space, t.extras))
            elif t.next.number < t.space.stop:
                following, other = place_of(t.next.walk, t.space, t.extras), u32(t.slot ^ u32(1))
                load_qk(t.smem, other, t.tensors, following)
                load_dov(t.smem, other, t.tensors, following)
        # (2) P = exp(S - lse)
        if FP16X2:
            factor = factor_of(0, t)
            for e in range(SCORES):
                s[e] *= factor
        modify(s, s, bias_mask, row, column, region, at, whole, t.parameters)
        recompute_p(s, rows_of_lane(t, warp))
        if DROPOUT:
            drop(s, row, column, at, t.parameters)

    @inline
    def add(part, t):
        """dbias += dS of a part of the keys."""
        warp = warp_number()
        do_rows = u32(t.smem + u32(DO) + t.slot * u32(DO_BYTES))
        do_rows += u32(warp // WARPS_N * WARP_ROWS * PITCH_V)
        keys = u32(t.smem + u32(V) + t.slot * u32(V_BYTES))
        keys += u32((warp % WARPS_N * PARTS + part) * V_PART)
        # (4) dP = dO V^T
        do_vt(t.dp, do_rows, keys)
        # (5) dbias = dbias + dS, where dS = P * (dP - delta)
        acc, p, delta = t.acc[part * SCORES :], t.s[part * SCORES :], rows_of_lane(t, warp)
        factor = f32(1)
        if FP16X2:
            factor = factor_of(2, t)
        differentiate(acc, p, t.dp, u32(delta + u32(LSE_BYTES)), factor, t.parameters)

    @inline
    def weigh_and_add(part, t):
        weigh(part, t)
        add(part, t)

    fetch_all = ptx.repeated(PARTS, fetch_part)
    weigh_all, add_all = ptx.repeated(PARTS, weigh), ptx.repeated(PARTS, add)
    weigh_and_add_all = ptx.repeated(PARTS, weigh_and_add)

    def dbias_sm80(do, q, k, v, rows, out, extras, low, high, parameters):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        s = cuda.local.array(ALL_SCORES, f32)  # fragment of S, then of P
        dp = cuda.local.array(SCORES, f32)  # of dP, of a part of the keys
        acc = cuda.local.array(ALL_SCORES, f32)  # of dbias
        bias_mask = cuda.local.array(ALL_HELD, u32)

        nq, nk, heads = i32(q.shape[3]), i32(k.shape[3]), i32(q.shape[2])
        b0, b1, kv_heads = i32(q.shape[0]), i32(q.shape[1]), i32(k.shape[2])
        extent = Extent(b0, b1, heads, kv_heads, nq, nk, i32(low), i32(high))
        item = begin(i32(cuda.blockIdx.x), extent, out.shape[0])
        space, own, share = item.space, item.space.own, item.share
        tensors = Tensors(do, q, k, v, rows)
        region = Region(i32(own.i * BLOCK_M), i32(own.j * BLOCK_N), nq, nk, i32(low), i32(high))
        at = Head(own.b0, own.b1, i32(0), own.head, heads)
        fetch_all(Bias(bias_mask, region, at, extras))
        zero(acc)
        step = find(item.step, space, extras)
        slot = u32(0)
        if step.number < space.stop:
            place = place_of(step.walk, space, extras)
            load_qk(smem, slot, tensors, place)
            if TWO_STAGES:
                load_dov(smem, slot, tensors, place)

        while step.number < space.stop:
            if not TURING:
                ptx.copy_wait()
            cuda.syncthreads()  # this tile is there; the one before has been read
            following = proceed(step, space, extras)
            work = DbiasWork(
                s, dp, acc, bias_mask, smem, slot, step, following,
                space, tensors, extras, parameters,
            )  # fmt: skip
            if TWO_STAGES:
                weigh_and_add_all(work)
                slot = u32(slot ^ u32(1))
            else:
                weigh_all(work)
                if not TURING:
                    ptx.copy_wait()
                cuda.syncthreads()  # V and dO are there; Q and K have been read
                if following.number < space.stop:
                    load_qk(smem, slot, tensors, place_of(following.walk, space, extras))
                add_all(work)
            step = following

        if step.invalid:
            for e in range(ALL_SCORES):
                acc[e] = f32(NAN)
        store(out[share, own.b0, own.b1, own.head], acc, smem, region.row0, region.col0)

    signature = types.void(
        *[array(u32 if FP16X2 else types.uint16, 5)] * 4,
        array(f32, 5),
        array(f32 if out_dtype == "float32" else types.uint16, 6),
        extras_type(options, ("bits",), OF_DBIAS if FP16X2 else ()),
        *(i64, i64),
        parameters_type(options),
    )
    return dbias_sm80, signature, {"launch_bounds": (THREADS, tile.min_blocks)}
