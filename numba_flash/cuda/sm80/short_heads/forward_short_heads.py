"""Forward pass of float32 on tensor cores since Ampere, where all keys of a head fit into shared
memory: one block of threads per head makes planes of its K and V there
(`numba_flash.cuda.sm80.short_heads.head_planes`), and each warp goes through rows of queries, whose
planes it makes in registers, and all keys, without waiting for others.

As `numba_flash.cuda.sm80.forward.forward` of planes that others have made, but for powers of two:
each row of queries has one of its own.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.arguments import extras_type
from numba_flash.cuda.number import array, index
from numba_flash.cuda.passes.write_planes import TOP, power_of_two
from numba_flash.cuda.runtime.lang import cuda, f32, f64, i32, inline, once, types, u32, u64
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.score.fragment import place_of_key
from numba_flash.cuda.score.score import LOG2E, Head
from numba_flash.cuda.score.softmax import NEG_INF
from numba_flash.cuda.sm80.bias_gradient.load_dq_dbias import build_copy, plus
from numba_flash.cuda.sm80.config import ForwardConfig
from numba_flash.cuda.sm80.operands import products_planes
from numba_flash.cuda.sm80.short_heads.head_planes import (
    MOST_SCORE,
    WORD,
    build_head,
    build_meet,
    build_pack,
    build_rows,
    exponent_of,
)
from numba_flash.cuda.sm80.short_heads.short_head_tiles import MOST_COLUMNS
from numba_flash.cuda.sm80.store_pairs import Pairs, build_store_pairs
from numba_flash.cuda.sm80.tiles import padded, pitch
from numba_flash.cuda.work.broadcast import divide

LN2 = math.log(2.0)


class HeadScores(NamedTuple):
    """A lane's registers, and what its rows of products are multiplied by."""

    s: Any
    bias: Any
    factor: Any


@once
def build_keys(shape, tile):
    """``load(smem, k, v, at, kv_head)``: K and V of a head on their way to shared memory;
    ``make(smem, keys)``: planes of them, in place: whether keys and values have a centre, the
    powers of two that undo theirs, and whether a number is out of range.
    """
    D, DV, KEYS, THREADS = shape.head_dim, shape.head_dim_v, tile.keys, tile.threads
    SMEM, SECOND = tile.layout(D, DV), WORD * MOST_COLUMNS
    K, V, CENTRES, EXTREMES = SMEM.k, SMEM.v, SMEM.centres, SMEM.extremes
    copies = (build_copy(KEYS, 2 * padded(x), THREADS, place_of_key) for x in (D, DV))
    copy_k, copy_v = copies
    planes_k = build_head(KEYS, D, THREADS, place_of_key, low=1.0)
    planes_v = build_head(KEYS, DV, THREADS, place_of_key)
    extremes_k, centre_k, split_k = planes_k
    extremes_v, centre_v, split_v = planes_v
    (tell, hear), (COLUMNS_K, COLUMNS_V) = build_meet(tile.warps), map(padded, (D, DV))

    @inline
    def load(smem, k, v, at, kv_head):
        keys = i32(k.shape[3])
        copy_k(u32(smem + u32(K)), k, at, kv_head, i32(0), keys, i32(0), i32(2 * D))
        copy_v(u32(smem + u32(V)), v, at, kv_head, i32(0), keys, i32(0), i32(2 * DV))

    @inline
    def make(smem, keys):
        k, v, centres = u32(smem + u32(K)), u32(smem + u32(V)), u32(smem + u32(CENTRES))
        told, thread = u32(smem + u32(EXTREMES)), i32(cuda.threadIdx.x)
        tell(told, 0, extremes_k(k))
        tell(told, 1, extremes_v(v))
        moved, column = i32(0), i32(thread % 32)
        to = u32(centres + u32(thread * WORD))
        if thread < 32 and column < COLUMNS_K:
            moved = i32(1) if centre_k(k, to, keys, column) else i32(0)
        if thread >= 32 and thread < 64 and column < COLUMNS_V:
            moved = i32(2) if centre_v(v, to, keys, column) else i32(0)
        shifted = cuda.syncthreads_or(moved & 1) != 0
        centred = cuda.syncthreads_or(moved & 2) != 0
        of_k, of_v = hear(told, 0), hear(told, 1)
        split_k(k, centres, shifted, power_of_two(of_k.exponent))
        split_v(v, u32(centres + u32(SECOND)), centred, power_of_two(of_v.exponent))
        cuda.syncthreads()  # planes are there
        return Keys(
            shifted,
            centred,
            power_of_two(i32(-of_k.exponent)),
            power_of_two(i32(-of_v.exponent)),
            of_k.flagged | of_v.flagged,
        )

    return load, make


class Keys(NamedTuple):
    """What becomes of K and V; see `build_keys`."""

    shifted: bool
    centred: bool
    k_factor: float
    v_factor: float
    flagged: int


@once
def build_shifts(m_tiles, head_dim):
    """``shifts(shift, raw, centres, scale)``: ``scale q . c`` of this lane's rows of Q, by which
    their lse is too small.
    """
    STEPS, ROWS_OF_LANE = padded(head_dim) // 16, 2 * m_tiles

    @inline
    def shifts(shift, raw, centres, scale):
        for r in range(ROWS_OF_LANE):
            total = f64(0)  # of all scores of the row: no average makes its error smaller
            for number in range(2 * STEPS):
                column = i32(8 * number + fragment.first_column())
                c = ptx.load_shared_pair(u32(centres + u32(column * WORD)))
                e = 2 * (r // 2 * 4 * STEPS + number // 2 * 4 + number % 2 * 2 + r % 2)
                total += f64(ptx.as_float32(raw[e])) * f64(c[0])
                total += f64(ptx.as_float32(raw[e + 1])) * f64(c[1])
            for fold in range(2):
                total += cuda.shfl_xor_sync(fragment.ALL_LANES, total, 1 << fold)
            shift[r] = f32(f64(scale) * total)

    return shifts


class Bias(NamedTuple):
    """What `build_fetch` reads."""

    registers: Any
    first: int
    stride: int
    rows: int
    keys: int


@once
def build_fetch(m_tiles, columns):
    """``fetch(registers, bias, row, column, rows, columns)``: a lane's part of a head's bias, of 8
    neighbouring keys at a time, which lie at multiples of 16 bytes; zeros where there is none.
    """
    ROWS, RUNS = 2 * m_tiles, 2 * m_tiles * columns // 32
    fetch_four = ptx.fetch(4)

    @inline
    def fetch_run(n, t):
        r = n % ROWS
        ahead = r // 2 * 16 + r % 2 * 8
        at = u64(t.first + u64(u32(ahead)) * u64(u32(t.stride)) + u64(n // ROWS * 32 * WORD))
        there = u32(1) if ahead < t.rows and n // ROWS * 32 < t.keys else u32(0)
        fetch_four(t.registers, i32(8 * n), at, there)
        fetch_four(t.registers, i32(8 * n + 4), u64(at + u64(4 * WORD)), there)

    fetch_runs = ptx.repeated(RUNS, fetch_run)

    @inline
    def fetch(registers, bias, row, column, rows, columns):
        first = plus(ptx.global_address(bias), row, bias.strides[0])
        first = u64(first + u64(u32(column * WORD)))
        rest = i32(rows - row), i32(columns - column)
        fetch_runs(Bias(registers, first, bias.strides[0], *rest))

    return fetch


def build(config: ForwardConfig):
    """Kernel ``forward_head_sm80(q, k, v, o, lse, flags, extras, scale)`` with its signature and
    compile options.

    q, k, v, o : float32 (b0, b1, heads, n, head_dim), rows at multiples of 16 bytes.
    lse : float32 (b0, b1, heads, nq), written if ``config.write_lse``.
    flags : int32 (b0, b1, heads of q), written: 1 where a number is out of range.
    """
    shape, options, tile = config.shape, config.options, config.tile
    D, DV, WARPS, M_TILES = shape.head_dim, shape.head_dim_v, tile.warps, tile.m_tiles
    COLUMNS, BLOCK_M, ROWS, BIASED = tile.columns, tile.block_m, 2 * M_TILES, bool(options.bias)
    SMEM, PITCH_K, PITCH_V = tile.layout(D, DV), pitch(2 * padded(D)), pitch(2 * padded(DV))
    K, V, CENTRES, SECOND = SMEM.k, SMEM.v, SMEM.centres, WORD * MOST_COLUMNS
    SCORES, OUTPUTS = COLUMNS // 2, padded(DV) // 2  # registers of a tile of 16 rows
    ALL_SCORES, ALL_OUTPUTS = M_TILES * SCORES, M_TILES * OUTPUTS
    Q_WORDS, PAIRS, P_WORDS = 2 * M_TILES * padded(D) // 4, ALL_SCORES // 2, ALL_SCORES
    WRITE_LSE = config.write_lse
    load_keys, make_keys = build_keys(shape, tile)
    load_q, power_of, split_q = build_rows(M_TILES, D)
    shifts, store = build_shifts(M_TILES, D), build_store_pairs(M_TILES, DV, centred=True)
    planes = ptx.Planes(Q_WORDS // 2, 2 * padded(D))
    scores = products_planes.build_joined_nt(M_TILES, COLUMNS, padded(D), PITCH_K, planes)
    planes = ptx.Planes(PAIRS, 2 * padded(DV))
    values, _ = products_planes.build_planes_nn(M_TILES, padded(DV), COLUMNS, PITCH_V, planes)
    pack = build_pack(PAIRS)
    runs = fragment.runs_of_queries(M_TILES, COLUMNS)
    HELD = ALL_SCORES if BIASED else 1
    register, RUNS, WIDTH = runs.register, runs.count, runs.width
    fetch = build_fetch(M_TILES, COLUMNS) if BIASED else None
    (zero, _), reset = softmax.build_zero(ALL_OUTPUTS), softmax.build_reset(M_TILES)
    raise_shifts, _, _ = softmax.build_raise(SCORES, OUTPUTS, M_TILES, softmax.LAZY)
    exponentials = softmax.build_exponentials(SCORES, M_TILES, exact=True)
    hide_row = softmax.build_hide(SCORES, False, True)

    @inline
    def finish_score(number, t):
        n, x = number // WIDTH, number % WIDTH
        e = register(n, x)
        t.s[e] *= t.factor[n % ROWS]
        if BIASED:
            t.s[e] += ptx.as_float32(t.bias[n * WIDTH + x])

    finish_scores = ptx.repeated(RUNS * WIDTH, finish_score)

    def forward_head_sm80(q, k, v, o, lse, flags, extras, scale):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        # registers of each thread
        s = cuda.local.array(ALL_SCORES, f32)  # fragment of S, then of P
        p = cuda.local.array(P_WORDS, u32)  # planes of P
        raw = cuda.local.array(Q_WORDS, u32)  # of Q
        q_words = cuda.local.array(Q_WORDS, u32)  # planes of Q
        acc = cuda.local.array(ALL_OUTPUTS, f32)  # of O
        bias = cuda.local.array(HELD, u32)
        m_i = cuda.local.array(ROWS, f32)
        l_i = cuda.local.array(ROWS, f32)
        factor = cuda.local.array(ROWS, f32)  # what products are multiplied by, then O
        up = cuda.local.array(ROWS, f32)  # powers of two of rows of Q
        shift = cuda.local.array(ROWS, f32)

        nq, nk, heads = i32(q.shape[3]), i32(k.shape[3]), i32(q.shape[2])
        head, number = divide(i32(cuda.blockIdx.x), heads, True)
        b1, b0 = divide(number, i32(q.shape[1]), True)
        kv_head = i32(u32(head) // u32(u32(heads) // u32(k.shape[2])))
        at = Head(b0, b1, number, head, heads)
        load_keys(smem, k, v, at, kv_head)
        q_head, o_head = q[b0, b1, head], o[b0, b1, head]
        warp, lane = i32(cuda.threadIdx.x // 32), i32(cuda.threadIdx.x % 32)
        row0 = i32(warp * BLOCK_M)
        load_q(raw, q_head, i32(row0 + lane // 4), nq)
        ptx.copy_wait()
        cuda.syncthreads()  # K and V are there
        of = make_keys(smem, nk)
        k_tile, v_tile, centres = u32(smem + u32(K)), u32(smem + u32(V)), u32(smem + u32(CENTRES))
        flagged, most = of.flagged, i32(MOST_SCORE - TOP - exponent_of(of.k_factor * scale))
        while row0 < nq:
            row = i32(row0 + lane // 4)
            flagged |= power_of(raw, up, factor, most)
            split_q(q_words, raw, up)
            for r in range(ROWS):
                shift[r] = f32(0)
                factor[r] *= scale * of.k_factor
            if of.shifted:
                shifts(shift, raw, centres, scale)
            column = fragment.first_key()
            if BIASED:
                own_bias = extras.bias[b0, b1, head]
                fetch(bias, own_bias, row, column, nq, nk)
            zero(acc)
            reset(m_i, l_i)
            col0 = i32(0)
            while col0 < nk:
                # (1) S = Q K^T
                scores(s, q_words, u32(k_tile + u32(col0 * PITCH_K)))
                finish_scores(HeadScores(s, bias, factor))
                if BIASED:  # of the next keys
                    fetch(bias, own_bias, row, i32(column + col0 + COLUMNS), nq, nk)
                if i32(col0 + COLUMNS) > nk:
                    for r in range(ROWS):
                        hide_row(s, r, i32(0), i32(nk - col0 - column))
                # (2) m_i, O = alpha O
                raise_shifts(s, acc, m_i, l_i, f32(LOG2E))
                # (3) P, (4) l_i
                exponentials(s, m_i, l_i, f32(LOG2E))
                # (5) O += P V
                pack(p, s)
                values(acc, p, u32(v_tile + u32(col0 * PITCH_V)))
                col0 = i32(col0 + COLUMNS)
            # (6) 1 / l for O, lse = m + log l; a row that saw nothing has O = 0, lse = -inf
            for r in range(ROWS):
                l, i = fragment.row_sum(l_i[r]), i32(row + (r // 2 * 16 + r % 2 * 8))
                factor[r] = f32(0) if l == f32(0) else ptx.rcp(l) * of.v_factor
                if WRITE_LSE and i < nq and lane % 4 == 0:
                    log_sum = m_i[r] + ptx.lg2(l) * f32(LN2) + shift[r]
                    lse[b0, b1, head, index(i)] = log_sum if l != f32(0) else f32(NEG_INF)
            row0 = i32(row0 + WARPS * BLOCK_M)
            load_q(raw, q_head, i32(row0 + lane // 4), nq)
            store(Pairs(o_head, acc, factor, row, nq, u32(centres + u32(SECOND))))
        some = cuda.syncthreads_or(flagged) != 0
        if cuda.threadIdx.x == 0:
            flags[b0, b1, head] = i32(1) if some else i32(0)

    signature = types.void(
        *[array(f32, 5)] * 4,
        array(f32, 4),
        array(i32, 3),
        extras_type(options),
        f32,
    )
    return forward_head_sm80, signature, {"launch_bounds": (tile.threads, tile.min_blocks)}
