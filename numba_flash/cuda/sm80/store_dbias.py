"""A block's tile of the gradient of the bias on its way from registers to memory."""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.fragment import ALL_LANES, build_pack
from numba_flash.cuda.lang import cuda, f32, i32, i64, inline, once, types, u32, u64
from numba_flash.cuda.number import index
from numba_flash.cuda.sm80.tiles import KEYS


class Target(NamedTuple):
    """Where a lane's registers go: the head's part of the gradient, and the first query and key."""

    acc: Any
    out: Any
    row: int
    column: int


class Sums(NamedTuple):
    """A lane's registers, and sums of them."""

    acc: Any
    sums: Any


@once
def build_store(out_dtype, shape, runs, summed, tile):
    """``store(out, acc, smem, row0, col0)``: a block's tile, from query row0 and key col0 on, to
    out (n, n) of `out_dtype`, summed over its rows and columns if they are `summed`. Shared memory
    is free to be used.

    shape.wide : runs are written with 16 bytes at a time, out is so aligned.
    """
    if summed[3] or summed[4]:
        return build_store_sums(out_dtype, shape, runs, summed[3:], tile)
    return build_store_runs(out_dtype, shape, runs, tile)


@once
def build_element(out_dtype, turing):
    """``write(x, i, j, value)``: x[i, j] = value, if there is such an element."""
    FLOAT32 = out_dtype == "float32"
    _, pack2 = build_pack(0, out_dtype == "bfloat16", turing)

    @inline
    def write(x, i, j, value):
        if i < x.shape[0] and j < x.shape[1]:
            if FLOAT32:
                x[index(i), index(j)] = value
            else:
                x[index(i), index(j)] = types.uint16(pack2(value, f32(0)) & u32(0xFFFF))

    return write


@once
def build_store_runs(out_dtype, shape, runs, tile):
    """As `build_store`, of a tile that is not summed."""
    WIDE, FLOAT32, WIDTH, COUNT = shape.wide, out_dtype == "float32", runs.width, runs.count
    SCORES, WARPS_N = runs.count * runs.width, tile.warps_n
    WARP_ROWS, WARP_KEYS = 16 * tile.m_tiles, KEYS * tile.parts
    register, query_of, key_of = runs.register, runs.query, runs.key
    write = build_element(out_dtype, shape.turing)
    _, pack2 = build_pack(0, out_dtype == "bfloat16", shape.turing)

    @inline
    def store_run(number, t):
        part, n = number // COUNT, number % COUNT
        e = i32(part * SCORES)
        i, j = i32(t.row + query_of(n)), i32(t.column + part * KEYS + key_of(n))
        if not WIDE:
            for x in range(WIDTH):
                write(t.out, i, i32(j + x), t.acc[e + register(n, x)])
        elif i < t.out.shape[0] and j < t.out.shape[1]:
            at = u64(i64(i) * t.out.strides[0] + i64(j) * t.out.strides[1])
            at = u64(at + ptx.global_address(t.out))
            if FLOAT32:
                for x in range(0, WIDTH, 4):
                    a, b = t.acc[e + register(n, x)], t.acc[e + register(n, x + 1)]
                    c, d = t.acc[e + register(n, x + 2)], t.acc[e + register(n, x + 3)]
                    ptx.store_global(u64(at + u64(4 * x)), (a, b, c, d))
            else:
                a = pack2(t.acc[e + register(n, 0)], t.acc[e + register(n, 1)])
                b = pack2(t.acc[e + register(n, 2)], t.acc[e + register(n, 3)])
                c = pack2(t.acc[e + register(n, 4)], t.acc[e + register(n, 5)])
                d = pack2(t.acc[e + register(n, 6)], t.acc[e + register(n, 7)])
                ptx.store_global(at, (a, b, c, d))

    store_all = ptx.repeated(tile.parts * COUNT, store_run)

    @inline
    def store(out, acc, smem, row0, col0):
        warp, lane = i32(cuda.threadIdx.x // 32), i32(cuda.threadIdx.x % 32)
        row = i32(row0 + warp // WARPS_N * WARP_ROWS + lane // 4)
        store_all(Target(acc, out, row, i32(col0 + warp % WARPS_N * WARP_KEYS + lane % 4 * 8)))

    return store


@once
def build_store_sums(out_dtype, shape, runs, summed, tile):
    """As `build_store`, of a tile that is `summed` over rows, columns or both: each lane adds its
    own registers, then lanes those of each other, then one thread for each sum those of the warps.
    """
    SUM_I, SUM_J = summed
    WARPS_M, WARPS_N, THREADS = tile.warps_m, tile.warps_n, tile.threads
    WARP_ROWS, WARP_KEYS, ROWS_OF_LANE = 16 * tile.m_tiles, KEYS * tile.parts, 2 * tile.m_tiles
    WIDTH, COUNT, SCORES = runs.width, runs.count, runs.count * runs.width
    register = runs.register
    # of a lane, of a block, and of the warps' for each of these
    OWN = {(True, False): WIDTH * tile.parts, (False, True): ROWS_OF_LANE}.get(summed, 1)
    LENGTH = {(True, False): tile.block_n, (False, True): tile.block_m}.get(summed, 1)
    WAYS = (WARPS_M if SUM_I else 1) * (WARPS_N if SUM_J else 1)
    write = build_element(out_dtype, shape.turing)

    @inline
    def add_run(number, t):
        part, n = number // COUNT, number % COUNT
        for x in range(WIDTH):
            to = (0 if SUM_J else part * WIDTH + x) if SUM_I else n % ROWS_OF_LANE
            t.sums[to] += t.acc[part * SCORES + register(n, x)]

    add_all = ptx.repeated(tile.parts * COUNT, add_run)

    @inline
    def fold(x):
        """Over the lanes that have parts of this sum."""
        if SUM_J:
            x += cuda.shfl_xor_sync(ALL_LANES, x, 1)
            x += cuda.shfl_xor_sync(ALL_LANES, x, 2)
        if SUM_I:
            x += cuda.shfl_xor_sync(ALL_LANES, x, 4)
            x += cuda.shfl_xor_sync(ALL_LANES, x, 8)
            x += cuda.shfl_xor_sync(ALL_LANES, x, 16)
        return x

    @inline
    def place(n, warp, lane):
        """Which of the block's sums is a lane's n-th, and which way it comes."""
        m, k = i32(warp // WARPS_N), i32(warp % WARPS_N)
        if SUM_I and SUM_J:
            return i32(0), warp
        if SUM_I:
            return i32(k * WARP_KEYS + n // WIDTH * KEYS + lane % 4 * WIDTH + n % WIDTH), m
        return i32(m * WARP_ROWS + lane // 4 + 8 * n), k

    @inline
    def store(out, acc, smem, row0, col0):
        sums = cuda.local.array(OWN, f32)
        warp, lane = i32(cuda.threadIdx.x // 32), i32(cuda.threadIdx.x % 32)
        for n in range(OWN):
            sums[n] = f32(0)
        add_all(Sums(acc, sums))
        cuda.syncthreads()  # the last tile has been read
        for n in range(OWN):
            total, (at, way) = fold(sums[n]), place(i32(n), warp, lane)
            if (not SUM_I or lane < 4) and (not SUM_J or lane % 4 == 0):
                ptx.store_shared_vector(u32(smem + u32((way * LENGTH + at) * 4)), (total,))
        cuda.syncthreads()  # all parts of all sums are there
        for at in range(i32(cuda.threadIdx.x), LENGTH, THREADS):
            total = f32(0)
            for way in range(WAYS):
                total += ptx.as_float32(
                    u32(ptx.load_shared(u32(smem + u32((way * LENGTH + at) * 4))))
                )
            i, j = (i32(0) if SUM_I else i32(row0 + at)), (i32(0) if SUM_J else i32(col0 + at))
            write(out, i, j, total)

    return store
