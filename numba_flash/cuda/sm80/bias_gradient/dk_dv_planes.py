"""dK and dV of float32 on tensor cores, where a bias is the only option:
`numba_flash.cuda.sm80.bias_gradient.dq_dbias_planes` makes dQ and the gradient of the bias.

One block of threads per head keeps planes of all of its Q and dO in shared memory. Each warp owns
keys and goes through all queries, without waiting for other warps. It scales its block of dS by a
power of two that follows from bounds on |dS|, and so is known before dS is computed.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import OF_DBIAS, extras_type
from numba_flash.cuda.number import array
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, types, u32, u64
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.fragment import ALL_LANES
from numba_flash.cuda.score.score import LOG2E
from numba_flash.cuda.sm80.bias_gradient.load_dq_dbias import plus
from numba_flash.cuda.sm80.config import BackwardConfig
from numba_flash.cuda.sm80.load import in_order
from numba_flash.cuda.sm80.operands import products_planes
from numba_flash.cuda.sm80.short_heads.head_planes import RAISED, build_pack, inverse_power
from numba_flash.cuda.sm80.short_heads.load_short_head import (
    FLOAT,
    build_copy_planes,
    build_copy_rows,
)
from numba_flash.cuda.sm80.store_pairs import Pairs, build_store_pairs
from numba_flash.cuda.sm80.tiles import padded, pitch
from numba_flash.cuda.work.broadcast import divide


class Keys(NamedTuple):
    """Where a lane's rows of planes begin in memory, bytes from one key to the next, and how many
    keys there are from its first on.
    """

    words: Any
    first: int
    stride: int
    rest: int


@once
def build_hold(m_tiles, head_dim):
    """``hold(words, x, key, stop)``: a warp's rows of planes of x (n, words) as A's fragments, from
    memory, of which this lane has neighbours from `key` on; zeros from `stop` on.
    """
    COLUMNS = padded(head_dim)
    STEPS, PLANE = COLUMNS // 16, 2 * COLUMNS
    WORDS = 4 * m_tiles * STEPS
    fetch = ptx.fetch(1)

    @inline
    def word(number, t):
        plane, n = number // WORDS, number % WORDS
        m, step, i = n // (4 * STEPS), n // 4 % STEPS, n % 4
        ahead = 2 * m + i % 2
        at = u64(plus(t.first, ahead, t.stride) + u64(plane * PLANE + 32 * step + i // 2 * 16))
        fetch(t.words, number, at, u32(1) if ahead < t.rest else u32(0))

    words_of = ptx.repeated(2 * WORDS, word)

    @inline
    def hold(words, x, key, stop):
        first = plus(ptx.global_address(x), key, x.strides[0])
        first = u64(first + u64(u32(fragment.first_column() * 2)))
        words_of(Keys(words, first, x.strides[0], i32(stop - key)))

    return hold


class Bias(NamedTuple):
    """What `build_fetch` reads; bytes from one query to the next."""

    registers: Any
    first: int
    stride: int
    rest: int


@once
def build_fetch(m_tiles, columns):
    """``fetch(registers, bias, query, key, queries, keys)``: of so many queries, and of this lane's
    keys, the head's bias; -inf beyond the last key.
    """
    WIDTH, QUERIES, INF = 2 * m_tiles, columns // 4, math.inf
    fetch_run = ptx.fetch(WIDTH)

    @inline
    def one(n, t):
        ahead = n // 2 * 8 + n % 2
        there = u32(1) if ahead < t.rest else u32(0)
        fetch_run(t.registers, i32(n * WIDTH), plus(t.first, ahead, t.stride), there)

    all_of_them = ptx.repeated(QUERIES, one)

    @inline
    def fetch(registers, bias, query, key, queries, keys):
        if key < keys:
            first = plus(ptx.global_address(bias), query, bias.strides[0])
            first = u64(first + u64(u32(key * FLOAT)))
            all_of_them(Bias(registers, first, bias.strides[0], i32(queries - query)))
        else:
            for e in range(QUERIES * WIDTH):
                registers[e] = ptx.as_uint32(f32(-INF))

    return fetch


class KeyScores(NamedTuple):
    """A lane's registers, and where the lse of its queries is; what products are multiplied by."""

    s: Any
    dp: Any
    bias: Any
    lse: int
    factor: float
    up: float


@once
def build_powers(columns, tile, shape):
    """``powers(smem)``: for each group of `columns` queries a power of two for their dS, and what
    undoes it, side by side in shared memory, and with it their delta there.
    """
    COLUMNS, FOLDS, QUERIES = columns, (columns - 1).bit_length(), tile.queries
    SMEM, THREADS, LOWERED = tile.layout(shape), tile.threads, 2.0**-RAISED
    DELTA, OWN = SMEM.rows + FLOAT * tile.queries, SMEM.rows + 2 * FLOAT * tile.queries
    POWERS = SMEM.powers

    @inline
    def powers(smem):
        thread = i32(cuda.threadIdx.x)
        for row0 in range(i32(thread // 32 * 32), QUERIES, THREADS):
            row, down, delta = i32(row0 + thread % 32), f32(0), f32(0)
            if row < QUERIES:
                delta = ptx.as_float32(u32(ptx.load_shared(u32(smem + u32(DELTA + row * FLOAT)))))
                down = ptx.as_float32(u32(ptx.load_shared(u32(smem + u32(OWN + row * FLOAT)))))
            for fold in range(FOLDS):
                down = max(down, cuda.shfl_xor_sync(ALL_LANES, down, 1 << fold))
            up = inverse_power(down) * f32(LOWERED)
            if row < QUERIES:
                ptx.store_shared_vector(u32(smem + u32(DELTA + row * FLOAT)), (delta * up,))
                if row % COLUMNS == 0:
                    at = u32(smem + u32(POWERS + row // COLUMNS * (2 * FLOAT)))
                    ptx.store_shared_vector(at, (up, down))

    return powers


@once
def build_weigh(m_tiles, columns, queries):
    """``weigh(scores)``: S^T becomes P^T, and dP^T dS^T."""
    COUNT, WIDTH, DELTA = columns // 2, 2 * m_tiles, FLOAT * queries
    HIGHER = 2.0**RAISED

    @inline
    def weigh_pair(j, t):
        """8 queries, of which a lane has two."""
        lse = ptx.load_shared_pair(u32(t.lse + u32(8 * FLOAT * j)))
        delta = ptx.load_shared_pair(u32(t.lse + u32(8 * FLOAT * j + DELTA)))
        for r in range(WIDTH):
            for c in range(2):
                e = r // 2 * COUNT + 4 * j + 2 * (r % 2) + c
                bias = ptx.as_float32(t.bias[(2 * j + c) * WIDTH + r])
                score = t.s[e] * t.factor + bias
                # (2) P^T = exp(S^T - lse)
                t.s[e] = ptx.ex2((score - lse[c]) * f32(LOG2E)) * f32(HIGHER)
                # (5) dS^T = P^T * (dP^T - delta)
                t.dp[e] = t.s[e] * (t.dp[e] * t.up - delta[c])

    return ptx.repeated(columns // 8, weigh_pair)


def build(config: BackwardConfig):
    """Kernel ``dk_dv_planes_sm80(do, q, k, v, dk, dv, rows, extras, scale)`` with its signature and
    compile options.

    do, q, k, v : planes, with as many heads of q as of k; heads that the flags among the `extras`
        name are left out.
    dk, dv : float32 (b0, b1, heads, n, head_dim), rows at multiples of 8 bytes.
    rows : as `numba_flash.cuda.sm80.short_heads.write_head_planes` writes them.
    """
    shape, options, tile = config.shape, config.options, config.tile
    M_TILES, COLUMNS, QUERIES, WARPS = tile.m_tiles, tile.columns, tile.queries, tile.warps
    HEAD_DIM, HEAD_DIM_V = shape.head_dim, shape.head_dim_v
    SMEM, D, DV = tile.layout(shape), padded(HEAD_DIM), padded(HEAD_DIM_V)
    Q, DO, ROWS, KEY_ROWS, WARP_KEYS = SMEM.q, SMEM.do, SMEM.rows, 2 * M_TILES, 16 * M_TILES
    PITCH_K, PITCH_V = pitch(2 * D), pitch(2 * DV)
    SCORES, PAIRS = M_TILES * COLUMNS // 2, M_TILES * COLUMNS // 4
    K_WORDS, V_WORDS = M_TILES * D // 2, M_TILES * DV // 2
    OUTPUTS_K, OUTPUTS_V = M_TILES * D // 2, M_TILES * DV // 2
    copies = (build_copy_planes(QUERIES, x, tile.threads, in_order) for x in (D, DV))
    copy_q, copy_do = copies
    copy_rows = build_copy_rows(QUERIES, tile.threads)
    hold_k, hold_v = build_hold(M_TILES, HEAD_DIM), build_hold(M_TILES, HEAD_DIM_V)
    fetch = build_fetch(M_TILES, COLUMNS)
    weigh = build_weigh(M_TILES, COLUMNS, QUERIES)
    planes_k, planes_v = ptx.Planes(K_WORDS // 2, 2 * D), ptx.Planes(V_WORDS // 2, 2 * DV)
    # whose bits are those of the forward pass: what a large score is off, its lse is off, too
    k_qt = products_planes.build_joined_nt(M_TILES, COLUMNS, D, PITCH_K, planes_k, last=True)
    v_dot = products_planes.build_joined_nt(M_TILES, COLUMNS, DV, PITCH_V, planes_v)
    planes_k, planes_v = ptx.Planes(PAIRS, 2 * D), ptx.Planes(PAIRS, 2 * DV)
    p_do, _ = products_planes.build_joined_nn(M_TILES, DV, COLUMNS, PITCH_V, planes_v)
    _, ds_q = products_planes.build_joined_nn(M_TILES, D, COLUMNS, PITCH_K, planes_k)
    pack, powers, POWERS = build_pack(PAIRS, 1.0), build_powers(COLUMNS, tile, shape), SMEM.powers
    LOWERED = 2.0**-RAISED
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    store_dk = build_store_pairs(M_TILES, HEAD_DIM, neighbours=True)
    store_dv = build_store_pairs(M_TILES, HEAD_DIM_V, neighbours=True)

    def dk_dv_planes_sm80(do, q, k, v, dk, dv, rows, extras, scale):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        s = cuda.local.array(SCORES, f32)  # fragment of S^T, then of P^T
        dp = cuda.local.array(SCORES, f32)  # of dP^T, then of dS^T
        p = cuda.local.array(SCORES, u32)  # planes of P^T, then of dS^T
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        k_words = cuda.local.array(K_WORDS, u32)  # planes of K
        v_words = cuda.local.array(V_WORDS, u32)  # of V
        bias = cuda.local.array(SCORES, u32)
        factor = cuda.local.array(KEY_ROWS, f32)

        nq, nk, heads = i32(q.shape[3]), i32(k.shape[3]), i32(q.shape[2])
        head, number = divide(i32(cuda.blockIdx.x), heads, True)
        b1, b0 = divide(number, i32(q.shape[1]), True)
        head_here, zero = i32(cuda.blockIdx.x), i32(0)
        of_head = extras.factors[b0, b1, head]
        q_factor, k_factor, v_factor, do_factor = of_head[0], of_head[1], of_head[2], of_head[3]
        left_out = extras.flags[b0, b1, head] != 0
        copy_q(u32(smem + u32(Q)), q, head_here, zero, nq)
        copy_do(u32(smem + u32(DO)), do, head_here, zero, nq)
        copy_rows(u32(smem + u32(ROWS)), rows, head_here, zero)
        k_head, v_head = k[b0, b1, head], v[b0, b1, head]
        dk_head, dv_head = dk[b0, b1, head], dv[b0, b1, head]
        warp, lane = i32(cuda.threadIdx.x // 32), i32(cuda.threadIdx.x % 32)
        key0, query = i32(warp * WARP_KEYS), fragment.first_column()
        own_bias = extras.bias[b0, b1, head]
        ptx.copy_wait()
        cuda.syncthreads()  # Q, dO and their rows are there
        powers(smem)
        cuda.syncthreads()  # and their powers
        while key0 < nk and not left_out:
            key, row0 = i32(key0 + lane // 4 * KEY_ROWS), i32(0)
            hold_k(k_words, k_head, key, nk)
            hold_v(v_words, v_head, key, nk)
            fetch(bias, own_bias, query, key, nq, nk)
            zero_k(dk_acc)
            zero_v(dv_acc)
            while row0 < nq:
                q_tile = u32(smem + u32(Q) + u32(row0 * PITCH_K))
                do_tile = u32(smem + u32(DO) + u32(row0 * PITCH_V))
                lse = u32(smem + u32(ROWS) + u32((row0 + query) * FLOAT))
                # (1) S^T = K Q^T
                k_qt(s, k_words, q_tile)
                # (4) dP^T = V dO^T
                v_dot(dp, v_words, do_tile)
                power = ptx.load_shared_pair(u32(smem + u32(POWERS + row0 // COLUMNS * 8)))
                weigh(KeyScores(s, dp, bias, lse, scale * q_factor * k_factor, power[0]))
                row0 = i32(row0 + COLUMNS)
                fetch(bias, own_bias, i32(row0 + query), key, nq, nk)  # of the next queries
                # (3) dV = dV + P^T dO
                pack(p, s)
                p_do(dv_acc, p, do_tile)
                # (6) dK = dK + dS^T Q
                pack(p, dp)
                factor[0] = power[1]
                ds_q(dk_acc, p, q_tile, factor)
            for r in range(KEY_ROWS):
                factor[r] = scale * q_factor * v_factor * do_factor
            store_dk(Pairs(dk_head, dk_acc, factor, key, nk, smem))
            for r in range(KEY_ROWS):
                factor[r] = f32(LOWERED) * do_factor
            store_dv(Pairs(dv_head, dv_acc, factor, key, nk, smem))
            key0 = i32(key0 + WARPS * WARP_KEYS)

    signature = types.void(
        *[array(u32, 5)] * 4,
        *[array(f32, 5)] * 3,
        extras_type(options, more=OF_DBIAS),
        f32,
    )
    return dk_dv_planes_sm80, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
