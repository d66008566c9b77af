"""What the options do to one score, as device functions for the `simt` kernels: bias, mask, softcap, score_mod, dropout, lengths.

Kernels get the optional arrays as one tuple, `extras`, and the optional numbers as another, `parameters`: `slots` says where each is. Plain
attention has two empty tuples, which add nothing to a kernel.

Where there are options, scores stay in base e, and what goes over to base 2 is how far they lie below their row's maximum
(`build_exponential`): times log2(e), a score near the end of the dtype, as of a bias that is meant to hide, would be Inf.

A hidden score is -inf, and the weight of a hidden or dropped term is -0.0, which no computed weight is: the products skip it, so that a NaN
that a row does not see cannot reach it.
"""

import math
from types import SimpleNamespace

from numba import cuda
from numba.cuda import types

from numba_flash import mask, rng
from numba_flash.cuda.tiles import ACCUMULATOR, STORAGE, build_column, build_convert, build_weights, index

LOG2E = math.log2(math.e)
EXTRAS = ("bias", "mask", "q_lengths", "kv_lengths")


def slots(options) -> SimpleNamespace:
    """Position of each optional array in `extras`, None where absent."""
    present = [name for name in EXTRAS if getattr(options, name)]
    return SimpleNamespace(**{name: present.index(name) if name in present else None for name in EXTRAS})


def kernel_arguments(options, scalars) -> tuple:
    """Numba types of what follows a kernel's arrays: `extras`, the named `scalars`, and `parameters`."""
    lengths = 1 if options.packed else 2
    arrays = {
        "bias": options.bias and types.Array(STORAGE[options.bias], 5, "A"),
        "mask": options.mask and types.Array(types.boolean, 5, "A"),
        "q_lengths": options.q_lengths and types.Array(getattr(types, options.q_lengths), lengths, "A"),
        "kv_lengths": options.kv_lengths and types.Array(getattr(types, options.kv_lengths), lengths, "A"),
    }
    extras = types.Tuple([arrays[name] for name in EXTRAS if arrays[name]])
    numbers = (types.float64,) * 3 + (types.uint64,) * 3 if options.modifies else ()
    return extras, *(getattr(types, scalar) for scalar in scalars), types.Tuple(numbers)


def hides(options) -> bool:
    """True if single terms may be absent in any tile, not only in those that the band or an end cuts."""
    return bool(options.score_mod or options.bias or options.mask or options.dropout)


def bends(options) -> bool:
    """True if the derivative of the score is not 1."""
    return bool(options.softcap or options.score_mod)


def build_score(dtype, options):
    """``score(raw, i, j, at, extras, parameters)``: the score, and its derivative with respect to ``scale * raw``.

    `at` is (b0, b1, b, h); `parameters` is (scale, softcap, 1 / (1 - dropout), seed, offset, threshold).
    """
    ACC, SLOTS = ACCUMULATOR[dtype], slots(options)
    CAPPED, MODIFIED = bool(options.softcap), options.score_mod is not None
    DIFFERENTIABLE = MODIFIED and options.score_mod.gradient is not None
    BIASED, BIAS, MASKED, MASK = bool(options.bias), SLOTS.bias, options.mask, SLOTS.mask
    NEG_INF = -math.inf
    load_bias, _ = build_convert(options.bias or "float32")
    score_mod = cuda.jit(device=True)(options.score_mod.function) if MODIFIED else None
    score_mod_grad = cuda.jit(device=True)(options.score_mod.gradient) if DIFFERENTIABLE else None

    @cuda.jit(device=True)
    def score(raw, i, j, at, extras, parameters):
        b0, b1, b, h = at
        x, slope = raw * ACC(parameters[0]), ACC(1)
        if CAPPED:
            cap = ACC(parameters[1])
            unit = math.tanh(x / cap)
            x = cap * unit
            slope = ACC(1) - unit * unit
        if MODIFIED:
            if DIFFERENTIABLE:
                slope *= ACC(score_mod_grad(x, b, h, i, j))
            x = ACC(score_mod(x, b, h, i, j))
        if BIASED:
            bias = ACC(load_bias(extras[BIAS][index(b0), index(b1), index(h), index(i), index(j)]))
            x = ACC(NEG_INF) if bias == ACC(NEG_INF) else x + bias
        if MASKED:
            x = x if extras[MASK][index(b0), index(b1), index(h), index(i), index(j)] else ACC(NEG_INF)
        return x, slope

    return score


def build_exponential(dtype, options):
    """``power(x)`` of a difference of scores, and ``log_sum(m, l)``, the lse of a row with maximum m and sum l: scores are in base 2, with
    options in base e.
    """  # fmt: skip
    ACC, MODIFIED, LN2 = ACCUMULATOR[dtype], options.modifies, math.log(2.0)

    @cuda.jit(device=True)
    def power(x):
        if MODIFIED:
            return math.exp2(x * ACC(LOG2E))
        return math.exp2(x)

    @cuda.jit(device=True)
    def log_sum(m, l):
        if MODIFIED:
            return m + math.log2(l) * ACC(LN2)
        return (m + math.log2(l)) * ACC(LN2)

    return power, log_sum


def build_modify(dtype, options, tile, transposed, bends):
    """``modify(s, slope, w_smem, corner, limits, at, extras, parameters)``: products s[r, c] become scores, -inf where hidden.

    `corner` is the first row and column of the tile, `limits` (rows, columns, low, high); rows are keys if `transposed`. The derivatives go
    into `slope` if the score `bends`. The loop runs over shared memory (each thread's own part of w_smem), because it is not unrolled: a
    function of the user, tanh, or an index that is not a constant would put `s` into local memory.
    """
    ROWS, COLS, THREADS_N, TRANSPOSED, BENDS = tile.rows, tile.cols, tile.threads_n, transposed, bends
    ACC, NEG_INF = ACCUMULATOR[dtype], -math.inf
    score = build_score(dtype, options)
    column = build_column(dtype, tile.threads_n, tile.cols)
    put_weights, get_weight = build_weights(dtype, tile)

    @cuda.jit(device=True)
    def modify(s, slope, w_smem, corner, limits, at, extras, parameters):
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        put_weights(w_smem, s)
        for c in range(COLS):
            col = corner[1] + column(tx, c)
            for r in range(ROWS):
                row = corner[0] + ty * ROWS + r
                x, derivative = ACC(NEG_INF), ACC(0)
                if row < limits[0] and col < limits[1] and mask.visible(row, col, limits[2], limits[3]):
                    i, j = (col, row) if TRANSPOSED else (row, col)
                    x, derivative = score(get_weight(w_smem, r, c), i, j, at, extras, parameters)
                w_smem[index(column(tx, c)), index(ty * ROWS + r)] = x
                if BENDS:
                    slope[r * COLS + c] = derivative
        for r in range(ROWS):
            for c in range(COLS):
                s[r * COLS + c] = get_weight(w_smem, r, c)

    return modify


def build_drop(dtype, options, tile, transposed, negate):
    """``drop(w_smem, corner, at, heads, parameters)``: each thread's own weights in shared memory that dropout drops become -0.0.

    They change their sign instead if `negate`, so that `build_gradient` can still read them.
    """
    ROWS, COLS, THREADS_N, TRANSPOSED, NEGATE = tile.rows, tile.cols, tile.threads_n, transposed, negate
    ACC, DROPOUT = ACCUMULATOR[dtype], bool(options.dropout)
    column = build_column(dtype, tile.threads_n, tile.cols)

    @cuda.jit(device=True)
    def drop(w_smem, corner, at, heads, parameters):
        if DROPOUT:
            tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
            for c in range(COLS):
                for r in range(ROWS):
                    row, col = ty * ROWS + r, column(tx, c)
                    i, j = (corner[1] + col, corner[0] + row) if TRANSPOSED else (corner[0] + row, corner[1] + col)
                    if not rng.keep((parameters[3], parameters[4], parameters[5]), at[2] * heads + at[3], i, j):
                        w_smem[index(col), index(row)] = -abs(w_smem[index(col), index(row)]) if NEGATE else ACC(-0.0)

    return drop


def build_gradient(dtype, options):
    """``gradient(w, dp, delta, slope, parameters)``: dS * slope of a weight w, which is P, -P where dropped, and -0.0 where hidden; hidden
    ones give -0.0.
    """  # fmt: skip
    ACC, DROPOUT = ACCUMULATOR[dtype], bool(options.dropout)

    @cuda.jit(device=True)
    def gradient(w, dp, delta, slope, parameters):
        if w == ACC(0) and math.copysign(ACC(1), w) < ACC(0):
            return ACC(-0.0)
        if DROPOUT:
            dp = ACC(0) if w < ACC(0) else dp * ACC(parameters[2])
            w = abs(w)
        return w * (dp - delta) * slope + ACC(0)  # never -0.0

    return gradient


def build_seen(options, tile, transposed):
    """``seen(at, row0, rows, col0, cols, extras)``: True in all threads if the mask lets a query of the tile see a key.

    `rows` and `cols` are the numbers that exist; rows are keys if `transposed`. Neighbouring threads read neighbouring keys.
    """
    MASKED, MASK, TRANSPOSED = options.mask, slots(options).mask, transposed
    KEYS, QUERIES = (tile.block_m, tile.block_n) if transposed else (tile.block_n, tile.block_m)
    STEP, CHUNK = tile.threads // KEYS, 8  # loads on their way at the same time
    assert STEP > 0

    @cuda.jit(device=True)
    def seen(at, row0, rows, col0, cols, extras):
        if MASKED:
            head = extras[MASK][index(at[0]), index(at[1]), index(at[3])]
            i0, j0, queries, keys = (col0, row0, cols, rows) if TRANSPOSED else (row0, col0, rows, cols)
            j = min(j0 + cuda.threadIdx.x % KEYS, keys - 1)
            found = 0
            for m0 in range(cuda.threadIdx.x // KEYS, QUERIES, STEP * CHUNK):
                for m in range(CHUNK):
                    i = min(i0 + min(m0 + m * STEP, QUERIES - 1), queries - 1)
                    found |= types.int32(head[index(i), index(j)])
                if found:
                    break
            return cuda.syncthreads_or(found) != 0
        return True

    return seen


def build_sequence(options):
    """``sequence(extras, b0, b1, nq, nk)``: where the queries and keys of a batch element begin and how many there are, how far the band
    shifts, and NaN, else 1, if the lengths are impossible.
    """  # fmt: skip
    SLOTS, PACKED, FOLLOWS = slots(options), options.packed, options.follows
    HAS_Q, Q, HAS_KV, KV = options.q_lengths is not None, SLOTS.q_lengths, options.kv_lengths is not None, SLOTS.kv_lengths
    NAN = math.nan

    @cuda.jit(device=True)
    def sequence(extras, b0, b1, nq, nk):
        q0, k0, q_len, k_len, factor = types.int64(0), types.int64(0), types.int64(nq), types.int64(nk), 1.0
        if PACKED:
            q0, k0 = types.int64(extras[Q][index(b1)]), types.int64(extras[KV][index(b1)])
            q_len, k_len = types.int64(extras[Q][index(b1 + 1)]) - q0, types.int64(extras[KV][index(b1 + 1)]) - k0
        else:
            if HAS_Q:
                q_len = types.int64(extras[Q][index(b0), index(b1)])
            if HAS_KV:
                k_len = types.int64(extras[KV][index(b0), index(b1)])
        if q0 < 0 or k0 < 0 or q_len < 0 or k_len < 0 or q0 + q_len > nq or k0 + k_len > nk:
            q0, k0, q_len, k_len, factor = types.int64(0), types.int64(0), types.int64(0), types.int64(0), NAN
        shift = (k_len - nk) - (q_len - nq) if FOLLOWS else types.int64(0)
        return q0, q_len, k0, k_len, shift, factor

    return sequence


def build_clear(dtype, tile, cols):
    """``clear(acc, row0, rows)``: acc[r, c] = 0 in the rows that lie beyond the last of `rows`."""
    ROWS, COLS, THREADS_N, ACC = tile.rows, cols, tile.threads_n, ACCUMULATOR[dtype]

    @cuda.jit(device=True)
    def clear(acc, row0, rows):
        for r in range(ROWS):
            if row0 + (cuda.threadIdx.x // THREADS_N) * ROWS + r >= rows:
                for c in range(COLS):
                    acc[r * COLS + c] = ACC(0)

    return clear
