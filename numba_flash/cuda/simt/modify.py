"""What the options do to a tile of scores in registers and shared memory: the loops of the `simt`
kernels around `numba_flash.cuda.score.score`.
"""

import math

from numba_flash import mask, rng
from numba_flash.arguments.options import SHARING
from numba_flash.cuda.number import ACCUMULATOR, index
from numba_flash.cuda.runtime.lang import cuda, device, once, types
from numba_flash.cuda.score.score import build_elements, build_score
from numba_flash.cuda.simt.tiles import build_column, build_weights


@once
def build_modify(dtype, options, tile, transposed, bends):
    """``modify(s, slope, w_smem, region, at, extras, parameters)``: products s[r, c] become scores,
    -inf where hidden.

    `region` is a `score.Region`, whose rows are keys if `transposed`; `at` a `score.Head`. The
    derivatives go into `slope` if the score `bends`. The loop runs over shared memory (each
    thread's own part of w_smem), because it is not unrolled: a function of the user, tanh, or an
    index that is not a constant would put `s` into local memory.
    """
    ROWS, COLS, THREADS_N = tile.rows, tile.cols, tile.threads_n
    TRANSPOSED, BENDS = transposed, bends
    ACC, NEG_INF = ACCUMULATOR[dtype], -math.inf
    score = build_score(dtype, options)
    column = build_column(dtype, tile.threads_n, tile.cols)
    put_weights, get_weight = build_weights(dtype, tile)

    @device
    def modify(s, slope, w_smem, region, at, extras, parameters):
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        put_weights(w_smem, s)
        for c in range(COLS):
            col = region.col0 + column(tx, c)
            for r in range(ROWS):
                row = region.row0 + ty * ROWS + r
                x, derivative = ACC(NEG_INF), ACC(0)
                there = row < region.rows and col < region.cols
                if there and mask.visible(row, col, region.low, region.high):
                    i, j = (col, row) if TRANSPOSED else (row, col)
                    x, derivative = score(get_weight(w_smem, r, c), i, j, at, extras, parameters)
                w_smem[index(column(tx, c)), index(ty * ROWS + r)] = x
                if BENDS:
                    slope[r * COLS + c] = derivative
        for r in range(ROWS):
            for c in range(COLS):
                s[r * COLS + c] = get_weight(w_smem, r, c)

    return modify


@once
def build_drop(dtype, options, tile, transposed, negate):
    """``drop(w_smem, region, at, parameters)``: each thread's own weights in shared memory that
    dropout drops become -0.0.

    They change their sign instead if `negate`, so that `score.build_gradient` can still read them.
    """
    LINES, KEYS = (tile.cols, tile.rows) if transposed else (tile.rows, tile.cols)
    ROWS, THREADS_N, TRANSPOSED, NEGATE = tile.rows, tile.threads_n, transposed, negate
    ACC, DROPOUT = ACCUMULATOR[dtype], bool(options.dropout)
    column = build_column(dtype, tile.threads_n, tile.cols)

    @device
    def drop(w_smem, region, at, parameters):
        if DROPOUT:
            tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
            seed, offset, threshold = parameters.seed, parameters.offset, parameters.threshold
            i0, j0 = types.int64(parameters.first_query), types.int64(parameters.first_key)
            head = (at.batch + types.int64(parameters.first_batch)) * at.heads + at.head
            for line in range(LINES):
                words, before = rng.NO_WORDS, types.int64(-1)
                for x in range(KEYS):
                    r, c = (x, line) if TRANSPOSED else (line, x)
                    m, n = ty * ROWS + r, column(tx, c)
                    row, col = region.row0 + m, region.col0 + n
                    i, j = (i0 + col, j0 + row) if TRANSPOSED else (i0 + row, j0 + col)
                    if j // SHARING != before:  # most neighbours have the same
                        before = j // SHARING
                        words = rng.words_of(seed, offset, head, i, before)
                    if rng.bits_of(words, j) < threshold:
                        w = w_smem[index(n), index(m)]
                        w_smem[index(n), index(m)] = -abs(w) if NEGATE else ACC(-0.0)

    return drop


@once
def build_seen(options, tile, transposed):
    """``seen(region, at, extras)``: True in all threads if the mask lets a query of the tile see a
    key.

    Rows of the region are keys if `transposed`. Neighbouring threads read neighbouring keys.
    """
    MASKED, TRANSPOSED = options.mask, transposed
    KEYS = tile.block_m if transposed else tile.block_n
    QUERIES = tile.block_n if transposed else tile.block_m
    STEP, CHUNK = tile.threads // KEYS, 8  # loads on their way at the same time
    assert STEP > 0
    THREADS, (row_of, column_of) = tile.threads, build_elements(options.blocks)

    @device
    def blocks_seen(region, at, extras):
        head = extras.mask[index(at.b0), index(at.b1), index(at.head)]
        i0, j0, queries, keys = region.row0, region.col0, region.rows, region.cols
        if TRANSPOSED:
            i0, j0, queries, keys = region.col0, region.row0, region.cols, region.rows
        row0, column0 = types.int64(row_of(i0)), types.int64(column_of(j0))
        rows = types.int64(row_of(min(i0 + QUERIES, queries) - 1)) - row0 + 1
        columns = types.int64(column_of(min(j0 + KEYS, keys) - 1)) - column0 + 1
        found = types.int32(0)
        for number in range(cuda.threadIdx.x, rows * columns, THREADS):
            row, column = row0 + number // columns, column0 + number % columns
            found |= types.int32(head[index(row), index(column)])
        return cuda.syncthreads_or(found) != 0

    @device
    def seen(region, at, extras):
        if MASKED:
            head = extras.mask[index(at.b0), index(at.b1), index(at.head)]
            i0, j0, queries, keys = region.row0, region.col0, region.rows, region.cols
            if TRANSPOSED:
                i0, j0, queries, keys = region.col0, region.row0, region.cols, region.rows
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

    return seen if options.blocks is None else blocks_seen


@once
def build_clear(dtype, tile, cols):
    """``clear(acc, row0, rows)``: acc[r, c] = 0 in the rows that lie beyond the last of `rows`."""
    ROWS, COLS, THREADS_N, ACC = tile.rows, cols, tile.threads_n, ACCUMULATOR[dtype]

    @device
    def clear(acc, row0, rows):
        for r in range(ROWS):
            if row0 + (cuda.threadIdx.x // THREADS_N) * ROWS + r >= rows:
                for c in range(COLS):
                    acc[r * COLS + c] = ACC(0)

    return clear
