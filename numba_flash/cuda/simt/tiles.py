"""Register micro-tiles for kernels without tensor cores: the two matrix products of attention, and
the moves around them.

THREADS_M x THREADS_N threads own a tile of rows x columns. Thread (ty, tx) keeps `rows` consecutive
rows and `cols` columns of it in registers; its columns come in groups of V = `vector(cols, dtype)`
consecutive ones, so that shared-memory reads fuse into vector loads:

    row(ty, r) = ty * rows + r            column(tx, c) = (c // V) * THREADS_N * V + tx * V + c % V

There are no shuffles, so the same source runs in Numba's CUDA simulator.

Where tensor cores multiply float64 (`Tile.product`), they may do so: with four threads along the
columns, what a thread keeps is just what it has of their products of 16 x 8, if rows 2 i and 2 i +
1 of each thread are those that lie 8 apart there.
"""

import math
from typing import NamedTuple

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.number import ACCUMULATOR, build_convert, index
from numba_flash.cuda.runtime.lang import SIMULATED, cuda, device, f64, inline, once
from numba_flash.cuda.work.pages import build_access

TERMS = 8  # of a sum, in one product on tensor cores
APART = 128  # numbers of all accumulators that leave a thread registers for one of them twice

# Of shared arrays, for vector loads; the simulator refuses the argument.
ALIGNMENT = None if SIMULATED else 16


@device
def cuts(region, block_m, block_n):
    """True if the end of the columns or the band cuts the tile: it hides some of its scores."""
    row1, col1 = region.row0 + block_m, region.col0 + block_n
    return col1 > region.cols or not mask.all_visible(
        region.row0, row1, region.col0, col1, region.low, region.high
    )


class Pitches(NamedTuple):
    """Elements from one row of a shared array to the next: of those that lie along a tile's rows,
    of those along its columns, and of the second product's right operand.
    """

    m: int
    n: int
    x: int


def pitches(dtype, tile, columns) -> Pitches:
    """A half warp that stores transposed then hits different banks, and vectors stay aligned; on
    tensor cores a half warp that reads four rows of an operand hits different banks.

    `columns` of each thread are the second product's.
    """
    if tile.product:
        return Pitches(tile.block_m + 1, tile.block_n + 4, columns * tile.threads_n + 4)
    padding = 128 // ACCUMULATOR[dtype].bitwidth
    return Pitches(tile.block_m + padding, tile.block_n + padding, columns * tile.threads_n)


def vector(cols, dtype):
    """Consecutive columns per group: 16 bytes, or the widest smaller power of two that divides
    `cols`.
    """
    return math.gcd(cols, 128 // ACCUMULATOR[dtype].bitwidth)


@once
def build_fetch_rows(dtype, head_dim, width, row_step, pages=None):
    """``fetch_rows(regs, x, x0, first, d, steps)``: regs[i] = x[x0 + first + i * row_step, d], x
    padded with zeros to `width` columns; of a cache if there are `pages`.

    Rows beyond the end repeat the last one. All loads are issued before any is used, so that their
    latencies overlap.
    """
    HEAD_DIM, RAGGED, ROW_STEP = head_dim, width != head_dim, row_step
    ACC = ACCUMULATOR[dtype]
    load, _ = build_convert(dtype)
    element, length = build_access(pages)

    @device
    def fetch(x, i, d):
        if RAGGED:
            value = load(element(x, i, min(d, HEAD_DIM - 1)))
            return value if d < HEAD_DIM else ACC(0)
        return load(element(x, i, d))

    @device
    def fetch_rows(regs, x, x0, first, d, steps):
        row, last = x0 + first, length(x) - 1
        if row + (steps - 1) * ROW_STEP <= last:
            for i in range(steps):
                regs[i] = fetch(x, row + i * ROW_STEP, d)
        else:
            for i in range(steps):
                regs[i] = fetch(x, min(row + i * ROW_STEP, last), d)

    return fetch_rows


@once
def build_column(dtype, threads_n, cols):
    """``column(tx, c)``: column within the tile of thread tx's c-th register column."""
    V, STRIDE = vector(cols, dtype), threads_n * vector(cols, dtype)

    @device
    def column(tx, c):
        return (c // V) * STRIDE + tx * V + c % V

    return column


@once
def build_product(tile, cols):
    """``product(acc, a_smem, b_smem, a0, b0, tx, ty)``: acc[r, c] += sum_k a_smem[a0 + k, row] *
    b_smem[b0 + k, column], TERMS terms on tensor cores, with `cols` columns of each thread.
    """
    ROWS, COLS, HELD = tile.rows, cols, 2 * tile.rows
    multiply = ptx.product_float64(ROWS, COLS, tile.product == TERMS)

    @inline
    def product(acc, a_smem, b_smem, a0, b0, tx, ty):
        a, b = cuda.local.array(HELD, f64), cuda.local.array(COLS, f64)
        for k in range(2):
            for r in range(ROWS):
                a[ROWS * k + r] = a_smem[index(a0 + tx + 4 * k), index(ty * ROWS + r)]
            for j in range(COLS // 2):
                b[2 * j + k] = b_smem[index(b0 + tx + 4 * k), index(8 * j + ty % 8)]
        multiply(acc, a, b)

    return product


@once
def build_inner(dtype, tile, head_dim, pages=None):
    """``inner(acc, a, b, region, a_smem, b_smem)``: a tile of A B^T, b a cache with `pages`,

        acc[r, c] = sum_d a[row0 + row, d] * b[col0 + column, d]

    The sum runs over chunks of DEPTH, staged transposed so that both operands are read along their
    rows. Rows beyond the end repeat the last one: the caller ignores their scores.
    """
    ROWS, COLS, THREADS_N = tile.rows, tile.cols, tile.threads_n
    DEPTH, HEAD_DIM = tile.depth, head_dim
    ROW_STEP = tile.threads // tile.depth
    STEPS_M, STEPS_N = tile.block_m // ROW_STEP, tile.block_n // ROW_STEP
    ACC = ACCUMULATOR[dtype]
    column = build_column(dtype, tile.threads_n, tile.cols)
    fetch_rows, fetch_keys = (
        build_fetch_rows(dtype, head_dim, -(-head_dim // DEPTH) * DEPTH, ROW_STEP, x)
        for x in (None, pages)
    )
    PRODUCT, product = tile.product > 0, None
    if PRODUCT:
        product = build_product(tile, tile.cols)

    @device
    def rank_one(acc, a_smem, b_smem, d, tx, ty):
        b_frag = cuda.local.array(COLS, ACC)
        for c in range(COLS):
            b_frag[c] = b_smem[index(d), index(column(tx, c))]
        for r in range(ROWS):
            a_value = a_smem[index(d), index(ty * ROWS + r)]
            for c in range(COLS):
                acc[r * COLS + c] += a_value * b_frag[c]

    @device
    def inner(acc, a, b, region, a_smem, b_smem):
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        first, lane = cuda.threadIdx.x // DEPTH, cuda.threadIdx.x % DEPTH
        a_regs = cuda.local.array(STEPS_M, ACC)
        b_regs = cuda.local.array(STEPS_N, ACC)
        for i in range(ROWS * COLS):
            acc[i] = ACC(0)
        for d0 in range(0, HEAD_DIM, DEPTH):
            fetch_rows(a_regs, a, region.row0, first, d0 + lane, STEPS_M)
            fetch_keys(b_regs, b, region.col0, first, d0 + lane, STEPS_N)
            cuda.syncthreads()  # everyone has read the previous chunk
            for i in range(STEPS_M):
                a_smem[index(lane), index(first + i * ROW_STEP)] = a_regs[i]
            for i in range(STEPS_N):
                b_smem[index(lane), index(first + i * ROW_STEP)] = b_regs[i]
            cuda.syncthreads()  # the chunk is complete
            if PRODUCT:
                for d in range(0, DEPTH, TERMS):
                    product(acc, a_smem, b_smem, d, d, tx, ty)
            else:
                for d in range(0, DEPTH, 4):
                    rank_one(acc, a_smem, b_smem, d, tx, ty)
                    rank_one(acc, a_smem, b_smem, d + 1, tx, ty)
                    rank_one(acc, a_smem, b_smem, d + 2, tx, ty)
                    rank_one(acc, a_smem, b_smem, d + 3, tx, ty)

    return inner


@once
def build_outer(dtype, tile, head_dim, absent="band", accumulators=1, pages=None):
    """``outer(acc, w_smem, x, region, x_smem, edge)``: acc[r, c] += sum_j w_smem[j, row] * x[col0 +
    j, column], x a cache if there are `pages`.

    In an `edge` tile some terms are absent, not zero times x: a NaN that a row does not see cannot
    reach it. They are those that the band hides, or that lie beyond the end (`absent` is
    ``"band"``), those of weight -0.0 (``"zero"``), or those of weight -0.0 or less
    (``"negative"``).

    Of float32, if registers allow beside so many `accumulators`, the terms of one call are summed
    by themselves before they are added: what rounding adds up then grows with the number of tiles,
    not of terms.
    """
    BLOCK_N, ROWS, DEPTH, THREADS_N = tile.block_n, tile.rows, tile.depth_outer, tile.threads_n
    COLS, WIDTH = tile.head_cols(head_dim), tile.head_cols(head_dim) * tile.threads_n
    LANES = math.gcd(WIDTH, tile.threads)
    ROW_STEP = tile.threads // LANES
    STEPS = DEPTH // ROW_STEP
    ACC = ACCUMULATOR[dtype]
    SLICES = WIDTH // LANES
    FETCHES = SLICES * STEPS
    MARKED, NEGATIVE = absent != "band", absent == "negative"
    OUTPUTS = ROWS * COLS
    SUMMED_APART = dtype != "float64" and (accumulators + 1) * OUTPUTS <= APART
    PRODUCT, product = tile.product > 0, None
    if PRODUCT:
        product = build_product(tile, COLS)
    fetch_rows = build_fetch_rows(dtype, head_dim, WIDTH, ROW_STEP, pages)
    _, length = build_access(pages)
    column = build_column(dtype, tile.threads_n, COLS)

    @device
    def present(weight):
        return not (
            (weight == ACC(0) or (NEGATIVE and weight < ACC(0)))
            and math.copysign(ACC(1), weight) < ACC(0)
        )

    @device
    def fetch(regs, x, x0, first, lane):
        for n in range(SLICES):
            fetch_rows(regs[n * STEPS :], x, x0, first, lane + n * LANES, STEPS)

    @device
    def multiply(acc, w_smem, j0, x_smem, diagonal, stop, careful, region):
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        x_frag = cuda.local.array(COLS, ACC)
        for j in range(DEPTH):
            for c in range(COLS):
                x_frag[c] = x_smem[index(j), index(column(tx, c))]
            for r in range(ROWS):
                if MARKED and careful and not present(w_smem[index(j0 + j), index(ty * ROWS + r)]):
                    continue
                row = ty * ROWS + r
                if (
                    MARKED
                    or not careful
                    or (j < stop and mask.visible(row, diagonal + j, region.low, region.high))
                ):
                    weight = w_smem[index(j0 + j), index(ty * ROWS + r)]
                    for c in range(COLS):
                        acc[r * COLS + c] += weight * x_frag[c]

    @device
    def outer(acc, w_smem, x, region, x_smem, edge):
        first, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        x0 = region.col0
        regs = cuda.local.array(FETCHES, ACC)
        own = acc
        if SUMMED_APART:
            own = cuda.local.array(OUTPUTS, ACC)
            for i in range(OUTPUTS):
                own[i] = ACC(0)
        fetch(regs, x, x0, first, lane)
        for j0 in range(0, BLOCK_N, DEPTH):
            cuda.syncthreads()  # the weights are written, and everyone has read the previous chunk
            for n in range(SLICES):
                for i in range(STEPS):
                    x_smem[index(first + i * ROW_STEP), index(lane + n * LANES)] = regs[
                        n * STEPS + i
                    ]
            cuda.syncthreads()  # the chunk is complete
            if j0 + DEPTH < BLOCK_N:  # the next chunk is on its way while this one is multiplied
                fetch(regs, x, x0 + j0 + DEPTH, first, lane)
            diagonal, stop = x0 + j0 - region.row0, length(x) - x0 - j0
            if edge:
                multiply(own, w_smem, j0, x_smem, diagonal, stop, True, region)
            elif PRODUCT:
                tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
                for j in range(0, DEPTH, TERMS):
                    product(acc, w_smem, x_smem, j0 + j, j, tx, ty)
            else:
                multiply(own, w_smem, j0, x_smem, diagonal, stop, False, region)
        if SUMMED_APART:
            for i in range(OUTPUTS):
                acc[i] += own[i]

    return outer


@once
def build_weights(dtype, tile):
    """``put_weights(w_smem, w)``: the register tile w[r, c] to w_smem[column, row], the operand of
    `build_outer`.

    ``get_weight(w_smem, r, c)`` reads one of the thread's own weights back.
    """
    ROWS, COLS, THREADS_N = tile.rows, tile.cols, tile.threads_n
    column = build_column(dtype, tile.threads_n, tile.cols)

    @device
    def put_weights(w_smem, w):
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        for c in range(COLS):
            for r in range(ROWS):
                w_smem[index(column(tx, c)), index(ty * ROWS + r)] = w[r * COLS + c]

    @device
    def get_weight(w_smem, r, c):
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        return w_smem[index(column(tx, c)), index(ty * ROWS + r)]

    return put_weights, get_weight


@once
def build_write(dtype, tile, head_dim, out_dtype=None):
    """``write(x, row0, acc, factor)``: x[row0 + row, column] = acc[r, c] * factor for the rows and
    columns that exist, in `out_dtype`, by default `dtype`.
    """
    ROWS, THREADS_N, COLS, HEAD_DIM = tile.rows, tile.threads_n, tile.head_cols(head_dim), head_dim
    ACC = ACCUMULATOR[dtype]
    _, store = build_convert(out_dtype or dtype)
    column = build_column(dtype, THREADS_N, COLS)

    @device
    def write(x, row0, acc, factor):
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        for r in range(ROWS):
            i = row0 + ty * ROWS + r
            if i < x.shape[0]:
                row = x[index(i)]
                for c in range(COLS):
                    if column(tx, c) < HEAD_DIM:
                        row[index(column(tx, c))] = store(acc[r * COLS + c] * ACC(factor))

    return write
