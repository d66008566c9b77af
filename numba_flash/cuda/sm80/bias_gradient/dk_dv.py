"""dK and dV on tensor cores since Ampere, where a bias is all that changes scores, and dQ is made
with its gradient (`numba_flash.cuda.sm80.bias_gradient.dq_dbias`): FlashAttention-2, Algorithm 2,
but for dQ.

One block of threads per block of keys: each warp has rows of K and V, and sums of dK and dV, in
registers, and goes through tiles of queries, with their part of the bias, for 16 of them at a time.
Nothing in it knows of ends: what lies beyond the last query has an lse of +inf, what lies beyond
the last key is rows of dK and dV that nobody stores.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, types, u32
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.score import LOG2E, Head
from numba_flash.cuda.sm80.begin_rows import ROW_BYTES
from numba_flash.cuda.sm80.bias_gradient.load_dq_dbias import build_copy, build_copy_rows
from numba_flash.cuda.sm80.config import BackwardConfig
from numba_flash.cuda.sm80.load import build_store, in_order
from numba_flash.cuda.sm80.operands import products
from numba_flash.cuda.sm80.tiles import padded, pitch

HALF = 16  # queries of which a warp has scores in registers at a time


class DkDvWork(NamedTuple):
    """What scores are computed with: registers, where the tile's Q, dO, rows and bias are in shared
    memory, seen from this lane, and the scale.
    """

    s: Any
    dp: Any
    p: Any
    dk_acc: Any
    dv_acc: Any
    k: Any
    v: Any
    q: int
    do: int
    rows: int
    bias: int
    scale_log2: float


class QueryWalk(NamedTuple):
    """A block's way through the queries of the heads that share its keys: the first head and how
    many there are, the first key, sizes, and what it reads.
    """

    at: Head
    group: int
    key0: int
    queries: int
    keys: int
    smem: int
    do: Any
    q: Any
    rows: Any
    bias: Any


@inline
def head_of(at, head):
    """The `Head` of that number beside `at`."""
    return Head(at.b0, at.b1, at.batch, head, at.heads)


@inline
def divide(number, size):
    """What a number is made of: how many times `size`, and the rest."""
    quotient = i32(u32(number) // u32(size))
    return quotient, i32(number - quotient * size)


@once
def build_half(bfloat16, kind, depths, pitches, tile, hidden):
    """``half(number, work)``: P^T and dS^T of 16 queries of a tile, and what they add to dV and dK.
    Scores may be `hidden` by the bias, whatever they are.
    """
    HIDDEN, NEG_INF, M_TILES, (D, DV), (PITCH_K, PITCH_V) = (
        hidden,
        -math.inf,
        tile.m_tiles,
        depths,
        pitches,
    )
    PITCH_BIAS = pitch(tile.block_n)
    k_qt = products.build_nt(kind, M_TILES, HALF, D, PITCH_K, PITCH_K, True)
    v_dot = products.build_nt_from(kind, M_TILES, HALF, DV, PITCH_V, PITCH_V, True)
    p_do = products.build_nn(kind, M_TILES, DV, HALF, PITCH_V)
    ds_q = products.build_nn(kind, M_TILES, D, HALF, PITCH_K)
    pack, _ = fragment.build_pack(M_TILES * HALF // 4, *kind)
    element = fragment.build_unpack(bfloat16)

    @inline
    def half(number, t):
        start = cuda.local.array(4, f32)
        shift = cuda.local.array(4, f32)
        q, do = u32(t.q + u32(number * HALF * PITCH_K)), u32(t.do + u32(number * HALF * PITCH_V))
        for j in range(2):
            x = ptx.load_shared_four(u32(t.rows + u32((number * HALF + 8 * j) * ROW_BYTES)))
            shift[2 * j], start[2 * j], shift[2 * j + 1], start[2 * j + 1] = x
        # (1) S^T = K Q^T
        k_qt(t.s, t.k, q)
        # (4) dP^T = V dO^T - delta
        v_dot(t.dp, t.v, do, start)
        for n in range(4):
            query = number * HALF + n // 2 * 8 + n % 2
            words = ptx.load_shared_pair(u32(t.bias + u32(query * PITCH_BIAS)))
            for x in range(2 * M_TILES):
                e = (x // 2 * 2 + n // 2) * 4 + 2 * (x % 2) + n % 2
                bias = element(ptx.as_uint32(words[x // 2]), x)
                # (2) P^T = exp(S^T - lse)
                score = t.s[e] * t.scale_log2 + (bias * f32(LOG2E) - shift[n])
                if HIDDEN:
                    score = f32(NEG_INF) if bias == f32(NEG_INF) else score
                t.s[e] = ptx.ex2(score)
                # (5) dS^T = P^T * (dP^T - delta)
                t.dp[e] *= t.s[e]
        # (3) dV = dV + P^T dO
        pack(t.p, t.s)
        p_do(t.dv_acc, t.p, do)
        # (6) dK = dK + dS^T Q
        pack(t.p, t.dp)
        ds_q(t.dk_acc, t.p, q)

    return half


@once
def build_go(shape, half, tile):
    """``load(slot, head, row0, way)``: a tile of queries of a head; ``go(way, work)``: all of them,
    with the first on its way already, in slot 0.
    """
    BLOCK_M, BLOCK_N, THREADS = tile.block_m, tile.block_n, tile.threads
    SMEM, WARP_KEYS, KEYS_OF_LANE = tile.layout(*shape.columns), 16 * tile.m_tiles, 2 * tile.m_tiles
    Q, DO, ROWS, BIAS, SLOT = SMEM.q, SMEM.do, SMEM.rows, SMEM.bias, SMEM.slot
    (D, DV), PITCH_BIAS = shape.columns, pitch(BLOCK_N)
    copy_q = build_copy(BLOCK_M, D, THREADS, in_order)
    copy_do = build_copy(BLOCK_M, DV, THREADS, in_order)
    copy_bias = build_copy(BLOCK_M, BLOCK_N, THREADS, in_order)
    copy_rows = build_copy_rows(BLOCK_M)
    all_halves = ptx.repeated(BLOCK_M // HALF, half)

    @inline
    def load(slot, head, row0, x):
        smem, at, stop = u32(x.smem + slot * u32(SLOT)), head_of(x.at, head), x.queries
        copy_q(u32(smem + u32(Q)), x.q, at, head, row0, stop, i32(0), i32(D))
        copy_do(u32(smem + u32(DO)), x.do, at, head, row0, stop, i32(0), i32(DV))
        copy_rows(u32(smem + u32(ROWS)), x.rows, at, row0)
        copy_bias(u32(smem + u32(BIAS)), x.bias, at, head, row0, stop, x.key0, x.keys)

    @inline
    def go(x, t):
        head, row0, slot = x.at.head, i32(0), u32(0)
        warp, lane = i32(cuda.threadIdx.x // 32), i32(cuda.threadIdx.x % 32)
        of_lane = u32(fragment.first_column() * PITCH_BIAS)
        of_lane += u32((warp * WARP_KEYS + lane // 4 * KEYS_OF_LANE) * 2)
        while head < x.at.head + x.group:
            ptx.copy_wait()
            cuda.syncthreads()  # this tile is there; the one before, or K and V, have been read
            row0 = i32(row0 + BLOCK_M)
            if row0 >= x.queries:
                head, row0 = i32(head + 1), i32(0)
            if head < x.at.head + x.group:
                load(u32(slot ^ u32(1)), head, row0, x)
            smem = u32(x.smem + slot * u32(SLOT))
            q, do = u32(smem + u32(Q)), u32(smem + u32(DO))
            rows = u32(smem + u32(ROWS) + u32(fragment.first_column() * ROW_BYTES))
            bias = u32(smem + u32(BIAS) + of_lane)
            all_halves(
                DkDvWork(
                    t.s, t.dp, t.p, t.dk_acc, t.dv_acc, t.k, t.v, q, do, rows, bias, t.scale_log2
                )
            )  # fmt: skip
            slot = u32(slot ^ u32(1))

    return load, go


def build(config: BackwardConfig):
    """Kernel ``dk_dv_sm80(do, q, k, v, dk, dv, rows, hides_some, extras, scale_log2, scale)``
    with its signature and compile options.

    do, q, k, v, dk, dv : (b0, b1, heads, n, head_dim), 16 bits, rows at multiples of 16 bytes.
    rows, hides_some : as `numba_flash.cuda.sm80.bias_gradient.dq_dbias` writes them.
    """
    dtype, shape, options, tile = config.dtype, config.shape, config.options, config.tile
    BLOCK_N, THREADS, M_TILES = tile.block_n, tile.threads, tile.m_tiles
    SMEM, WARP_KEYS, KEY_ROWS = tile.layout(*shape.columns), 16 * tile.m_tiles, 2 * tile.m_tiles
    K, V, (D, DV) = SMEM.k, SMEM.v, shape.columns
    (PADDED_D, PADDED_DV), (PITCH_K, PITCH_V) = map(padded, (D, DV)), map(pitch, (D, DV))
    SCORES, WORDS = M_TILES * HALF // 2, M_TILES * HALF // 4
    OUTPUTS_K, OUTPUTS_V = M_TILES * PADDED_D // 2, M_TILES * PADDED_DV // 2
    K_WORDS, V_WORDS = M_TILES * PADDED_D // 4, M_TILES * PADDED_DV // 4
    kind = products.Kind(dtype == "bfloat16", False)
    place, key_of = fragment.build_key_rows(M_TILES)
    copy_k, copy_v = (build_copy(BLOCK_N, each, THREADS, place) for each in (D, DV))
    hold_k, hold_v = (products.build_hold(M_TILES, padded(each), pitch(each)) for each in (D, DV))
    of_half = options.bias == "bfloat16", kind, (PADDED_D, PADDED_DV), (PITCH_K, PITCH_V), tile
    halves = (build_half(*of_half, hidden) for hidden in (False, True))
    (load, go), (_, go_where_some_are_hidden) = (build_go(shape, half, tile) for half in halves)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    put_dk = products.build_put(M_TILES, PADDED_D, PITCH_K, *kind)
    put_dv = products.build_put(M_TILES, PADDED_DV, PITCH_V, *kind)
    store_dk = build_store(WARP_KEYS, D, True, key_of, PADDED_D)
    store_dv = build_store(WARP_KEYS, DV, True, key_of, PADDED_DV)

    def dk_dv_sm80(do, q, k, v, dk, dv, rows, hides_some, extras, scale_log2, scale):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S^T, then of P^T
        dp = cuda.local.array(SCORES, f32)  # of dP^T, then of dS^T
        p = cuda.local.array(WORDS, u32)  # of P^T, then of dS^T, two elements of 16 bits each
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        k_words = cuda.local.array(K_WORDS, u32)  # of K
        v_words = cuda.local.array(V_WORDS, u32)  # of V
        factor = cuda.local.array(KEY_ROWS, f32)

        nk, kv_heads = i32(k.shape[3]), i32(k.shape[2])
        column_blocks = i32(u32(i32(nk + (BLOCK_N - 1))) // u32(BLOCK_N))
        number, block = divide(i32(cuda.blockIdx.x), column_blocks)
        number, kv_head = divide(number, kv_heads)
        b0, b1 = divide(number, i32(k.shape[1]))
        heads = i32(q.shape[2])
        group = i32(u32(heads) // u32(kv_heads))
        at, key0 = Head(b0, b1, i32(0), i32(kv_head * group), heads), i32(block * BLOCK_N)
        way = QueryWalk(at, group, key0, i32(q.shape[3]), nk, smem, do, q, rows, extras.bias)
        warp = i32(cuda.threadIdx.x // 32)
        k_tile, v_tile = u32(smem + u32(K)), u32(smem + u32(V))
        k_warp = u32(k_tile + u32(warp * WARP_KEYS * PITCH_K))
        v_warp = u32(v_tile + u32(warp * WARP_KEYS * PITCH_V))
        copy_k(k_tile, k, at, kv_head, key0, nk, i32(0), i32(D))
        copy_v(v_tile, v, at, kv_head, key0, nk, i32(0), i32(DV))
        load(u32(0), at.head, i32(0), way)
        some_hidden, n = i32(0), i32(cuda.threadIdx.x)
        while n < i32(hides_some.shape[0]):
            some_hidden |= hides_some[index(n)]
            n = i32(n + THREADS)
        zero_k(dk_acc)
        zero_v(dv_acc)
        ptx.copy_wait()
        some = cuda.syncthreads_or(some_hidden) != 0  # K and V are there
        hold_k(k_words, k_warp)
        hold_v(v_words, v_warp)
        work = DkDvWork(
            s, dp, p, dk_acc, dv_acc, k_words, v_words, smem, smem, smem, smem, scale_log2
        )  # fmt: skip
        if some:
            go_where_some_are_hidden(way, work)
        else:
            go(way, work)
        cuda.syncthreads()  # the last tile has been read
        for r in range(KEY_ROWS):
            factor[r] = scale
        put_dk(k_warp, dk_acc, factor)
        for r in range(KEY_ROWS):
            factor[r] = f32(1)
        put_dv(v_warp, dv_acc, factor)
        cuda.syncwarp()  # all of the warp's keys are there
        first = i32(key0 + warp * WARP_KEYS)
        store_dk(k_warp, dk[index(b0), index(b1), index(kv_head)], first, nk)
        store_dv(v_warp, dv[index(b0), index(b1), index(kv_head)], first, nk)

    signature = types.void(
        *[array(types.uint16, 5)] * 6,
        array(f32, 5),
        array(i32, 1),
        extras_type(options),
        *(f32, f32),
    )
    return dk_dv_sm80, signature, {"launch_bounds": (THREADS, tile.min_blocks)}
