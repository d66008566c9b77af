"""A block's tile of the gradient of the bias on its way from registers to memory."""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, f32, f64, i32, i64, inline, once, types, u32, u64
from numba_flash.cuda.score.fragment import ALL_LANES, build_pack

WARP = 32  # threads


class Fragments(NamedTuple):
    """How a block's tile lies in the registers of its threads.

    Attributes
    ----------
    runs : Runs
        Of a lane, in one part of its warp's keys.
    parts, part_keys : int
        How many parts there are, after each other, and keys of each.
    warps_m, warps_n : int
        Warps along queries and along keys.
    warp_rows, lane_keys : int
        Queries of a warp; keys from the first of one lane to that of the next.
    first_warp : int
        Warps of the block that have nothing of it come before.
    again : bool
        A thread finds its place again, for registers.
    meet : function
        ``meet()`` waits for all that have some of it.
    double : bool
        Numbers are float64.
    """

    runs: Any
    parts: int
    part_keys: int
    warps_m: int
    warps_n: int
    warp_rows: int
    lane_keys: int
    first_warp: int
    again: bool
    meet: Any
    double: bool = False

    @property
    def columns(self) -> int:
        """Keys of a lane, of which each belongs to `rows`."""
        return self.parts * self.runs.count * self.runs.width // self.rows

    @property
    def rows(self) -> int:
        """Queries of a lane."""
        return self.warp_rows // 8

    @property
    def block_m(self) -> int:
        return self.warps_m * self.warp_rows

    @property
    def block_n(self) -> int:
        return self.warps_n * self.parts * self.part_keys


class Inside(NamedTuple):
    """A lane's registers, of which all have a place: the address of the first, and bytes from one
    query to the next.
    """

    acc: Any
    at: int
    row: int


class Target(NamedTuple):
    """Where a lane's registers go: the head's part of the gradient, and the first query and key."""

    acc: Any
    out: Any
    row: int
    column: int


class Sums(NamedTuple):
    """A lane's registers, and sums of them; its warp and its number there; and where the sums of
    all are put together in shared memory.
    """

    acc: Any
    sums: Any
    warp: int
    lane: int
    smem: int


@once
def build_store(out_dtype, wide, turing, summed, fragments):
    """``store(out, acc, smem, row0, col0)``: a block's tile, from query row0 and key col0 on, to
    out (n, n) of `out_dtype`, summed over its rows and columns if they are `summed`, by way of
    shared memory that is free to be used.

    wide : runs are written with up to 16 bytes at a time, out is so aligned.
    """
    if summed[3] or summed[4]:
        return build_store_sums(out_dtype, turing, summed[3:], fragments)
    return build_store_runs(out_dtype, wide, turing, fragments)


@once
def build_element(out_dtype, turing):
    """``write(x, i, j, value)``: x[i, j] = value, if there is such an element."""
    DIRECT = out_dtype in ("float32", "float64")
    _, pack2 = build_pack(0, out_dtype == "bfloat16", turing)

    @inline
    def write(x, i, j, value):
        if i < x.shape[0] and j < x.shape[1]:
            if DIRECT:
                x[index(i), index(j)] = value
            else:
                x[index(i), index(j)] = types.uint16(pack2(value, f32(0)) & u32(0xFFFF))

    return write


@once
def build_store_runs(out_dtype, wide, turing, fragments):
    """As `build_store`, of a tile that is not summed."""
    f, runs = fragments, fragments.runs
    WIDE, FLOAT32, WIDTH, COUNT = wide, out_dtype == "float32", runs.width, runs.count
    SCORES, WARPS_N, PAIRS = runs.count * runs.width, f.warps_n, runs.width == 2
    WARP_ROWS, PART_KEYS, LANE_KEYS = f.warp_rows, f.part_keys, f.lane_keys
    WARP_KEYS, SIZE = f.parts * f.part_keys, 4 if FLOAT32 else 2
    register, query_of, key_of = runs.register, runs.query, runs.key
    write, FIRST_WARP, AGAIN = build_element(out_dtype, turing), f.first_warp, f.again
    APART, BLOCK_M, BLOCK_N = f.again and wide and PAIRS and not FLOAT32, f.block_m, f.block_n
    _, pack2 = build_pack(0, out_dtype == "bfloat16", turing)

    @inline
    def store_run(number, t):
        part, n = number // COUNT, number % COUNT
        e = i32(part * SCORES)
        i, j = i32(t.row + query_of(n)), i32(t.column + part * PART_KEYS + key_of(n))
        if not WIDE:
            for x in range(WIDTH):
                write(t.out, i, i32(j + x), t.acc[e + register(n, x)])
        elif i < t.out.shape[0] and j < t.out.shape[1]:
            at = u64(i64(i) * t.out.strides[0] + i64(j) * SIZE)
            at = u64(at + ptx.global_address(t.out))
            if PAIRS and FLOAT32:
                ptx.store_global(at, (t.acc[e + register(n, 0)], t.acc[e + register(n, 1)]))
            elif PAIRS:
                word = pack2(t.acc[e + register(n, 0)], t.acc[e + register(n, 1)])
                ptx.store_global(at, (word,))
            elif FLOAT32:
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

    @inline
    def store_run_inside(number, t):
        """A pair of 16 bits, of a tile that has no end."""
        part, n = number // COUNT, number % COUNT
        e = i32(part * SCORES)
        word = pack2(t.acc[e + register(n, 0)], t.acc[e + register(n, 1)])
        further = u64(SIZE * (part * PART_KEYS + key_of(n)))
        ptx.store_global(u64(t.at + u64(query_of(n)) * t.row + further), (word,))

    store_all = ptx.repeated(f.parts * COUNT, store_run)
    store_all_inside = ptx.repeated(f.parts * COUNT, store_run_inside)

    @inline
    def store(out, acc, smem, row0, col0):
        warp, lane = i32(cuda.threadIdx.x // WARP), i32(cuda.threadIdx.x % WARP)
        if AGAIN:
            warp, lane = i32(ptx.thread_here() // WARP), i32(ptx.thread_here() % WARP)
        warp = i32(warp - FIRST_WARP)
        row = i32(row0 + warp // WARPS_N * WARP_ROWS + lane // 4)
        column = i32(col0 + warp % WARPS_N * WARP_KEYS + lane % 4 * LANE_KEYS)
        # most tiles have no end: then a store takes two instructions, not twenty
        whole = row0 + BLOCK_M <= out.shape[0] and col0 + BLOCK_N <= out.shape[1]
        if APART and whole:
            at = u64(i64(row) * out.strides[0] + i64(column) * SIZE)
            store_all_inside(Inside(acc, u64(at + ptx.global_address(out)), u64(out.strides[0])))
        else:
            store_all(Target(acc, out, row, column))

    return store


@once
def build_store_sums(out_dtype, turing, summed, fragments):
    """As `build_store`, of a tile that is `summed` over rows, columns or both: each lane adds its
    own registers, then lanes those of each other, then one thread for each sum those of the warps.
    """
    SUM_I, SUM_J = summed
    f, runs = fragments, fragments.runs
    WARPS_N, THREADS, meet = f.warps_n, f.warps_m * f.warps_n * WARP, f.meet
    WARP_ROWS, PART_KEYS, LANE_KEYS = f.warp_rows, f.part_keys, f.lane_keys
    WARP_KEYS, ROWS_OF_LANE, COLUMNS = f.parts * f.part_keys, f.rows, f.columns // f.parts
    WIDTH, COUNT, SCORES = runs.width, runs.count, runs.count * runs.width
    register, query_of, key_of = runs.register, runs.query, runs.key
    # of a lane, of a block, and of the warps' for each of these
    OWN = {(True, False): f.columns, (False, True): ROWS_OF_LANE}.get(summed, 1)
    LENGTH = {(True, False): f.block_n, (False, True): f.block_m}.get(summed, 1)
    WAYS = (f.warps_m if SUM_I else 1) * (f.warps_n if SUM_J else 1)
    write, FIRST_WARP, AGAIN = build_element(out_dtype, turing), f.first_warp, f.again
    DOUBLE, NUMBER, BYTES = f.double, f64 if f.double else f32, 8 if f.double else 4

    @inline
    def add_run(number, t):
        part, n = number // COUNT, number % COUNT
        for x in range(WIDTH):
            column = part * COLUMNS + n // ROWS_OF_LANE * WIDTH + x
            to = (0 if SUM_J else column) if SUM_I else n % ROWS_OF_LANE
            t.sums[to] += t.acc[part * SCORES + register(n, x)]

    add_all = ptx.repeated(f.parts * COUNT, add_run)

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
            part, run = n // COLUMNS, n % COLUMNS // WIDTH * ROWS_OF_LANE
            of_warp = part * PART_KEYS + key_of(run) + lane % 4 * LANE_KEYS + n % WIDTH
            return i32(k * WARP_KEYS + of_warp), m
        return i32(m * WARP_ROWS + lane // 4 + query_of(n)), k

    @inline
    def clear(n, t):
        t.sums[n] = NUMBER(0)

    @inline
    def put(n, t):
        total, (at, way) = fold(t.sums[n]), place(n, t.warp, t.lane)
        if (not SUM_I or t.lane < 4) and (not SUM_J or t.lane % 4 == 0):
            to = u32(t.smem + u32((way * LENGTH + at) * BYTES))
            if DOUBLE:
                ptx.store_shared_float64(to, total)
            else:
                ptx.store_shared_vector(to, (total,))

    @inline
    def get(address):
        if DOUBLE:
            return ptx.load_shared_float64(address)
        return ptx.as_float32(u32(ptx.load_shared(address)))

    clear_all, put_all = ptx.repeated(OWN, clear), ptx.repeated(OWN, put)

    @inline
    def store(out, acc, smem, row0, col0):
        warp, lane = i32(cuda.threadIdx.x // WARP), i32(cuda.threadIdx.x % WARP)
        if AGAIN:
            warp, lane = i32(ptx.thread_here() // WARP), i32(ptx.thread_here() % WARP)
        warp = i32(warp - FIRST_WARP)
        t = Sums(acc, cuda.local.array(OWN, NUMBER), warp, lane, smem)
        clear_all(t)
        add_all(t)
        meet()  # what was there has been read
        put_all(t)
        meet()  # all parts of all sums are there
        for at in range(i32(warp * WARP + lane), LENGTH, THREADS):
            total = NUMBER(0)
            for way in range(WAYS):
                total += get(u32(smem + u32((way * LENGTH + at) * BYTES)))
            i, j = (i32(0) if SUM_I else i32(row0 + at)), (i32(0) if SUM_J else i32(col0 + at))
            write(out, i, j, total)

    return store
