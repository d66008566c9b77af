"""Gradient of an additive bias on any CUDA GPU: dbias = dS, summed over the axes that the bias broadcasts.

One block of threads owns a tile of dbias and walks over everything that was broadcast into it, making S and dP once more: every sum has one
owner and one order, and no N x N matrix is stored unless the bias is one. Where there are too few tiles to fill a GPU, each is split into
shares of that walk, which `sum_simt` adds in their order.
"""

from numba import cuda
from numba.cuda import types

from numba_flash import mask
from numba_flash.cuda import scores, tiles
from numba_flash.cuda.backward_simt import NEG_INF, build_row_value


def build_reduce(dtype, out_dtype, summed, tile):
    """``reduce(out, row0, col0, acc, w_smem)``: the tile acc[r, c], summed over its rows and columns if they are `summed`, to out[i, j]."""
    ROWS, COLS, THREADS_N, THREADS = tile.rows, tile.cols, tile.threads_n, tile.threads
    BLOCK_M, BLOCK_N, (SUM_I, SUM_J) = tile.block_m, tile.block_n, summed[3:]
    ACC, index = tiles.ACCUMULATOR[dtype], tiles.index
    _, store = tiles.build_convert(out_dtype)
    put_weights, _ = tiles.build_weights(dtype, tile)
    column = tiles.build_column(dtype, THREADS_N, COLS)

    @cuda.jit(device=True)
    def write(out, i, j, x):
        if i < out.shape[0] and j < out.shape[1]:
            out[index(i), index(j)] = store(x)

    @cuda.jit(device=True)
    def sum_column(w_smem, n):
        total = ACC(0)
        for m in range(BLOCK_M):
            total += w_smem[index(n), index(m)]
        return total

    @cuda.jit(device=True)
    def sum_row(w_smem, m):
        total = ACC(0)
        for n in range(BLOCK_N):
            total += w_smem[index(n), index(m)]
        return total

    @cuda.jit(device=True)
    def reduce(out, row0, col0, acc, w_smem):
        tx, ty = cuda.threadIdx.x % THREADS_N, cuda.threadIdx.x // THREADS_N
        if not SUM_I and not SUM_J:
            for r in range(ROWS):
                for c in range(COLS):
                    write(out, row0 + ty * ROWS + r, col0 + column(tx, c), acc[r * COLS + c])
            return
        put_weights(w_smem, acc)
        cuda.syncthreads()  # the tile is complete
        if SUM_J and not SUM_I:
            for m in range(cuda.threadIdx.x, BLOCK_M, THREADS):
                write(out, row0 + m, 0, sum_row(w_smem, m))
            return
        for n in range(cuda.threadIdx.x, BLOCK_N, THREADS):
            total = sum_column(w_smem, n)
            if SUM_J:
                w_smem[index(n), index(0)] = total
            else:
                write(out, 0, col0 + n, total)
        cuda.syncthreads()  # every column is summed
        if SUM_J and cuda.threadIdx.x == 0:
            write(out, 0, 0, sum_row(w_smem, 0))

    return reduce


def build_dbias(dtype, head_dim, head_dim_v, options, out_dtype, summed, tile):
    """Kernel ``dbias_simt(do, q, k, v, lse, delta, out, extras, scale, low, high, parameters)`` with its signature and compile options.

    `out` is (shares, b0, b1, heads, n, n) of `out_dtype`, with sizes 1 where `summed` (five flags).
    """
    BLOCK_M, BLOCK_N, ROWS, COLS, THREADS_N = tile.block_m, tile.block_n, tile.rows, tile.cols, tile.threads_n
    SCORES, PAD = ROWS * COLS, tiles.pad(dtype)
    PITCH_M, PITCH_N = BLOCK_M + PAD, BLOCK_N + PAD
    DEPTH, ALIGNMENT = tile.depth, tiles.ALIGNMENT
    ACC = tiles.ACCUMULATOR[dtype]
    SUM_0, SUM_1, SUM_H, SUM_I, SUM_J = summed
    (shift, value), (power, _) = build_row_value(dtype, options), scores.build_exponential(dtype, options)
    inner_q, inner_do = tiles.build_inner(dtype, tile, head_dim), tiles.build_inner(dtype, tile, head_dim_v)
    put_weights, get_weight = tiles.build_weights(dtype, tile)
    reduce = build_reduce(dtype, out_dtype, summed, tile)
    sequence, seen = scores.build_sequence(options), scores.build_seen(options, tile, False)
    modify, drop = scores.build_modify(dtype, options, tile, False, False), scores.build_drop(dtype, options, tile, False, True)
    gradient = scores.build_gradient(dtype, options)

    @cuda.jit(device=True)
    def split(number, size, is_summed):
        """The next coordinate of `number`, and the rest: along an axis of this size, if it is (not) summed."""
        return (number % size, number // size) if is_summed else (0, number)

    @cuda.jit(device=True)
    def coordinates(number, sizes, wanted):
        j, number = split(number, sizes[4], SUM_J == wanted)
        i, number = split(number, sizes[3], SUM_I == wanted)
        h, number = split(number, sizes[2], SUM_H == wanted)
        b1, number = split(number, sizes[1], SUM_1 == wanted)
        b0, number = split(number, sizes[0], SUM_0 == wanted)
        return b0, b1, h, i, j, number

    def dbias_simt(do, q, k, v, lse, delta, out, extras, scale, low, high, parameters):
        a_smem = cuda.shared.array((DEPTH, PITCH_M), ACC, ALIGNMENT)
        b_smem = cuda.shared.array((DEPTH, PITCH_N), ACC, ALIGNMENT)
        w_smem = cuda.shared.array((BLOCK_N, PITCH_M), ACC, ALIGNMENT)
        s = cuda.local.array(SCORES, ACC)
        acc = cuda.local.array(SCORES, ACC)

        ty = cuda.threadIdx.x // THREADS_N
        heads, rows, columns = q.shape[2], q.shape[3], k.shape[3]
        sizes = (q.shape[0], q.shape[1], heads, (rows + BLOCK_M - 1) // BLOCK_M, (columns + BLOCK_N - 1) // BLOCK_N)
        own0, own1, own_h, own_i, own_j, share = coordinates(cuda.blockIdx.x, sizes, False)
        walk = (sizes[0] if SUM_0 else 1) * (sizes[1] if SUM_1 else 1) * (heads if SUM_H else 1)
        walk *= (sizes[3] if SUM_I else 1) * (sizes[4] if SUM_J else 1)
        for n in range(SCORES):
            acc[n] = ACC(0)

        for step in range(walk * share // out.shape[0], walk * (share + 1) // out.shape[0]):
            t0, t1, t_h, t_i, t_j, _ = coordinates(step, sizes, True)
            b0, b1, h, row0, col0 = own0 + t0, own1 + t1, own_h + t_h, (own_i + t_i) * BLOCK_M, (own_j + t_j) * BLOCK_N
            at = (b0, b1, b0 * q.shape[1] + b1, h)
            _, nq, _, nk, move, factor = sequence(extras, b0, b1, rows, columns)
            if factor != 1.0:
                for n in range(SCORES):
                    acc[n] = ACC(factor)
            start, stop = mask.kv_range(row0, min(row0 + BLOCK_M, nq), nk, low + move, high + move)
            if row0 >= nq or col0 >= stop or col0 + BLOCK_N <= start or not seen(at, row0, nq, col0, nk, extras):
                continue
            kv_head = h // (heads // k.shape[2])
            lse_head, delta_head = lse[b0, b1, h], delta[b0, b1, h]
            # (1) S = Q K^T
            inner_q(s, q[b0, b1, h], row0, k[b0, b1, kv_head], col0, a_smem, b_smem)
            modify(s, s, w_smem, (row0, col0), (nq, nk, low + move, high + move), at, extras, parameters)
            # (2) P = exp(S - lse), kept in shared memory
            for r in range(ROWS):
                i = row0 + ty * ROWS + r
                row_shift = shift(lse_head, i)
                for c in range(COLS):
                    x = s[r * COLS + c]
                    s[r * COLS + c] = ACC(-0.0) if x == ACC(NEG_INF) else power(x - row_shift)
            put_weights(w_smem, s)
            drop(w_smem, (row0, col0), at, heads, parameters)
            # (3) dP = dO V^T
            inner_do(s, do[b0, b1, h], row0, v[b0, b1, kv_head], col0, a_smem, b_smem)
            # (4) dbias = dbias + dS, where dS = P * (dP - delta)
            for r in range(ROWS):
                row_delta = value(delta_head, row0 + ty * ROWS + r)
                for c in range(COLS):
                    acc[r * COLS + c] += gradient(get_weight(w_smem, r, c), s[r * COLS + c], row_delta, ACC(1), parameters)
        reduce(out[share, own0, own1, own_h], own_i * BLOCK_M, own_j * BLOCK_N, acc, w_smem)

    out_type = types.Array(tiles.STORAGE[out_dtype], 6, "A")
    arguments = scores.kernel_arguments(options, ("float64", "int64", "int64"))
    return dbias_simt, tiles.signature(dtype, 4, 2, (out_type, *arguments)), {"launch_bounds": (tile.threads, tile.min_blocks)}


def build_sum(dtype, out_dtype, threads):
    """Kernel ``sum_simt(shares, dbias, extras, parameters)``: one thread adds the shares of one element, in their order."""
    ACC, THREADS, index = tiles.ACCUMULATOR[dtype], threads, tiles.index
    _, store = tiles.build_convert(out_dtype)

    def sum_simt(shares, dbias, extras, parameters):
        number = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
        if number < dbias.size:
            j, number = number % dbias.shape[4], number // dbias.shape[4]
            i, number = number % dbias.shape[3], number // dbias.shape[3]
            h, number = number % dbias.shape[2], number // dbias.shape[2]
            b0, b1 = number // dbias.shape[1], number % dbias.shape[1]
            total = ACC(0)
            for share in range(shares.shape[0]):
                total += shares[index(share), index(b0), index(b1), index(h), index(i), index(j)]
            dbias[index(b0), index(b1), index(h), index(i), index(j)] = store(total)

    shares, dbias = types.Array(tiles.ACCUMULATOR[dtype], 6, "A"), types.Array(tiles.STORAGE[out_dtype], 5, "A")
    return sum_simt, types.void(shares, dbias, types.Tuple(()), types.Tuple(())), {"launch_bounds": (threads, 1)}
