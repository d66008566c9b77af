"""O += P V of few queries with many keys, by threads that have some columns of O each, and every
several-th key; in the end their sums are added in shared memory.
"""

import math

from numba_flash.cuda.lang import cuda, device, once
from numba_flash.cuda.number import ACCUMULATOR, build_convert, index
from numba_flash.cuda.pages import build_access


@once
def build_values(dtype, out_dtype, tile, head_dim_v, pages):
    """``multiply(acc, x, p_smem, v, col0, careful)``: O += P V, a thread's columns and its share of
    the keys, of a cache if there are `pages`; if `careful`, terms of weight -0.0 are absent, not
    zero times v. If the tile is `early`, `x` holds the first values then, as ``begin(x, v, col0)``
    brings them.

    ``write(o, o_smem, acc, inverse, row0, rows)``: all shares are added in their order, and rows of
    O (heads, n, head_dim) stored in `out_dtype`, row r times ``inverse[r]``.
    """
    ROWS, KEYS, GROUP = tile.rows, tile.block_n, tile.group
    LANES = tile.lanes(head_dim_v)
    SHARES, COLS = tile.threads // LANES, -(-head_dim_v // LANES)
    AHEAD, EARLY = tile.ahead, tile.early
    HEAD_DIM_V, THREADS, LOADS, STRIDE = head_dim_v, tile.threads, AHEAD * COLS, AHEAD * SHARES
    ACC = ACCUMULATOR[dtype]
    load, _ = build_convert(dtype)
    _, store = build_convert(out_dtype)
    element, length = build_access(pages)

    @device
    def absent(weight):
        return weight == ACC(0) and math.copysign(ACC(1), weight) < ACC(0)

    @device
    def add(acc, p_smem, j, x, first, careful):
        weights = cuda.local.array(ROWS, ACC)
        for r in range(ROWS):
            weights[r] = p_smem[index(j), index(r)]
        for r in range(ROWS):
            if not (careful and absent(weights[r])):
                for c in range(COLS):
                    acc[r * COLS + c] += weights[r] * x[first + c]

    @device
    def add_four(acc, p_smem, j, x, first, careful):
        add(acc, p_smem, j, x, first, careful)
        add(acc, p_smem, j + SHARES, x, first + COLS, careful)
        add(acc, p_smem, j + 2 * SHARES, x, first + 2 * COLS, careful)
        add(acc, p_smem, j + 3 * SHARES, x, first + 3 * COLS, careful)

    @device
    def add_all(acc, p_smem, j, x, careful):
        add_four(acc, p_smem, j, x, 0, careful)
        if AHEAD > 4:
            add_four(acc, p_smem, j + 4 * SHARES, x, 4 * COLS, careful)

    @device
    def fetch(x, v, first):
        """Values of a thread's keys from that one on, all on their way before any is used."""
        lane, last = cuda.threadIdx.x % LANES, length(v) - 1
        for n in range(AHEAD):
            for c in range(COLS):
                d = min(lane + c * LANES, HEAD_DIM_V - 1)
                x[n * COLS + c] = load(element(v, min(first + n * SHARES, last), d))

    @device
    def begin(x, v, col0):
        fetch(x, v, col0 + cuda.threadIdx.x // LANES)

    @device
    def multiply(acc, x, p_smem, v, col0, careful):
        share = cuda.threadIdx.x // LANES
        following = cuda.local.array(LOADS if EARLY else 1, ACC)
        for j in range(share, KEYS, STRIDE):
            if not EARLY:
                fetch(x, v, col0 + j)
            elif j + STRIDE < KEYS:
                fetch(following, v, col0 + j + STRIDE)
            if careful:
                add_all(acc, p_smem, j, x, True)
            else:
                add_all(acc, p_smem, j, x, False)
            if EARLY:
                for i in range(LOADS):
                    x[i] = following[i]

    @device
    def write(o, o_smem, acc, inverse, row0, rows):
        share, lane = cuda.threadIdx.x // LANES, cuda.threadIdx.x % LANES
        for turn in range(SHARES):
            if share == turn:
                for r in range(ROWS):
                    for c in range(COLS):
                        d = lane + c * LANES
                        if d < HEAD_DIM_V:
                            before = o_smem[index(r), index(d)] if turn > 0 else ACC(0)
                            o_smem[index(r), index(d)] = before + acc[r * COLS + c]
            cuda.syncthreads()  # this share's sums are there
        for number in range(cuda.threadIdx.x, ROWS * HEAD_DIM_V, THREADS):
            r, d = number // HEAD_DIM_V, number % HEAD_DIM_V
            row = row0 + r
            if row < rows:
                x = inverse[index(r)]  # of a row that has seen nothing 0, and whatever O is
                if x != ACC(0):
                    x *= o_smem[index(r), index(d)]
                o[index(row % GROUP), index(row // GROUP), index(d)] = store(x)

    return begin, multiply, write
