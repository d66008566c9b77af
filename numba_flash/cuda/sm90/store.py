"""How fragments of a warp group leave its registers: into swizzled tiles of shared memory, from
there through tensor maps, or to memory.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, once, u32, u64
from numba_flash.cuda.score.fragment import build_key_rows, build_pack, first_column
from numba_flash.cuda.score.swizzle import PANEL, ROW_BYTES, panel_bytes, panels
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.pipeline import meet_warp_group
from numba_flash.cuda.sm90.tiles import DQ_PART, WARP_GROUP


@once
def build_put_chunks(head_dim_v, first_panel, bfloat16, rows=64, interleaved=False):
    """``put_chunks(tile, acc, inverse, j)``: as `build_put`'s, but only chunks of 8 columns j and j
    + 1, from the first panel on.
    """
    INTERLEAVED, (_, key_of) = interleaved, build_key_rows(1)
    CHUNKS, PANEL_CHUNKS, FIRST = head_dim_v // 8, PANEL // 8, first_panel * PANEL // 8
    PANEL_BYTES, ZERO = panel_bytes(rows), u32(0)
    _, pack2 = build_pack(0, bfloat16)

    @inline
    def put_chunks(tile, acc, inverse, j):
        lane, warp = i32(cuda.threadIdx.x % 32), i32(cuda.threadIdx.x % 128 // 32)
        row, right = i32(warp * 16 + lane % 16), i32(lane // 16)
        if INTERLEAVED:
            thread = ptx.thread_here()
            row, right = key_of(i32(thread % 128 // 32 * 16 + thread % 16)), i32(thread % 32 // 16)
        e = 4 * (FIRST + j)
        a = pack2(acc[e] * inverse[0], acc[e + 1] * inverse[0])
        b = pack2(acc[e + 2] * inverse[1], acc[e + 3] * inverse[1])
        c, d = ZERO, ZERO
        if FIRST + j + 1 < CHUNKS:
            c = pack2(acc[e + 4] * inverse[0], acc[e + 5] * inverse[0])
            d = pack2(acc[e + 6] * inverse[1], acc[e + 7] * inverse[1])
        chunk = i32((j % PANEL_CHUNKS + right) ^ (row % 8))
        at = j // PANEL_CHUNKS * PANEL_BYTES + row * ROW_BYTES + chunk * 16
        ptx.stmatrix(u32(tile + u32(at)), a, b, c, d)

    return put_chunks


@once
def build_put_ds(bfloat16, rows):
    """``put_ds(at, ds, j, first)``: chunks of 8 columns j and j + 1 of dS^T, rounded, into a tile
    of panels of `rows` rows; `first` is 0, see `build_put_part`. `at` is ``mine(tile)``, the
    address of this thread's: the number of a chunk only changes bits of it.
    """
    PANEL_CHUNKS, PANEL_BYTES = PANEL // 8, panel_bytes(rows)
    _, pack2 = build_pack(0, bfloat16)

    @inline
    def mine(tile):
        lane, warp = i32(cuda.threadIdx.x % 32), i32(cuda.threadIdx.x % 128 // 32)
        row, right = i32(warp * 16 + lane % 16), i32(lane // 16)
        return u32(tile + u32(row * ROW_BYTES + (right ^ row % 8) * 16))

    @inline
    def put_ds(at, ds, j, first):
        e = 4 * j
        a, b = pack2(ds[e], ds[e + 1]), pack2(ds[e + 2], ds[e + 3])
        c, d = pack2(ds[e + 4], ds[e + 5]), pack2(ds[e + 6], ds[e + 7])
        to = u32(u32(at ^ u32(j % PANEL_CHUNKS * 16)) + u32(j // PANEL_CHUNKS * PANEL_BYTES))
        ptx.stmatrix(to, a, b, c, d)

    return mine, put_ds


@once
def build_put(head_dim_v, first_panel, count, bfloat16, rows=64, interleaved=False):
    """``put(tile, acc, inverse)``: `count` panels of 64 rows of O times `inverse`, rounded, into a
    tile of panels of `rows` rows; of rows that are keys, `interleaved`, in the order of the keys.
    """
    COUNT = min(count * PANEL, head_dim_v - first_panel * PANEL) // 8
    put_chunks = build_put_chunks(head_dim_v, first_panel, bfloat16, rows, interleaved)

    @inline
    def put(tile, acc, inverse):
        for j in range(0, COUNT, 2):
            put_chunks(tile, acc, inverse, j)

    return put


@once
def build_put_rows(columns, bfloat16, rows):
    """``put_rows(tile, acc, factor)``: 64 rows of a fragment times a factor, which stays in its
    registers, rounded, into a tile of panels of `rows` rows; of addresses a thread keeps one.
    """
    CHUNKS, PAIRS, ONES = columns // 8, columns // 16 * 2, (1.0, 1.0)
    mine, put_pair = build_put_ds(bfloat16, rows)
    put_chunks = build_put_chunks(columns, 0, bfloat16, rows)

    @inline
    def put_rows(tile, acc, factor):
        at = mine(tile)
        for e in range(4 * CHUNKS):
            acc[e] = acc[e] * factor
        for j in range(0, PAIRS, 2):
            put_pair(at, acc, j, 0)
        if PAIRS < CHUNKS:
            put_chunks(tile, acc, ONES, PAIRS)

    return put_rows


@once
def build_put_part(bfloat16, rows):
    """As `build_put_ds`, but of a fragment whose chunk 0 is the tile's chunk `first`; what a thread
    knows is the address of the tile.
    """
    PANEL_CHUNKS, PANEL_BYTES = PANEL // 8, panel_bytes(rows)
    _, pack2 = build_pack(0, bfloat16)

    @inline
    def mine(tile):
        return tile

    @inline
    def put_part(tile, x, j, first):
        lane, warp = i32(cuda.threadIdx.x % 32), i32(cuda.threadIdx.x % 128 // 32)
        row, right = i32(warp * 16 + lane % 16), i32(lane // 16)
        e, c = 4 * j, first + j
        chunk = i32((c % PANEL_CHUNKS + right) ^ (row % 8))
        at = u32(tile + u32(c // PANEL_CHUNKS * PANEL_BYTES + row * ROW_BYTES + chunk * 16))
        left, below = pack2(x[e], x[e + 1]), pack2(x[e + 2], x[e + 3])
        ptx.stmatrix(at, left, below, pack2(x[e + 4], x[e + 5]), pack2(x[e + 6], x[e + 7]))

    return mine, put_part


@once
def build_hand_over(ring, columns=PANEL):
    """``put_dq(smem, me, n, dq, factor)``: store a consumer's part of the n-th tile of dQ, times a
    factor, to shared memory, with zeros beyond its columns; ``commit_dq(smem, n)``: let it be added
    up, later than that, when products run while the fence waits for what has been stored.
    """
    DQ, DQ_TILE, DQ_BYTES, CHUNKS = one_type(ring), ring.tiles, 4 * DQ_PART, columns // 8

    @inline
    def commit_dq(smem, n):
        ptx.fence_proxy_async()
        pipeline.commit(smem, DQ, n)

    @inline
    def put_dq(smem, me, n, dq, factor):
        pipeline.wait_free(smem, DQ, u32(n + u32(1)))  # tile n - 1, which had that slot, has left
        mine, zero = u32(cuda.threadIdx.x % WARP_GROUP * 16), f32(0)
        to = u32(smem + u32(DQ_TILE + me * DQ_BYTES) + mine)
        for j in range(8):
            four = zero, zero, zero, zero
            if j < CHUNKS:
                e = 4 * j
                four = (
                    dq[e] * factor, dq[e + 1] * factor, dq[e + 2] * factor, dq[e + 3] * factor,
                )  # fmt: skip
            ptx.store_shared_vector(u32(to + u32(2048 * j)), four)

    return commit_dq, put_dq


@once
def build_put_row(head_dim_v, float32, bfloat16):
    """``put_row(address, acc, inverse, r)``: this thread's columns of row r of O times its inverse,
    to memory; rounded unless `float32`.

    `address` is that of the row; its elements are neighbours.
    """
    CHUNKS, FLOAT32, BYTES = head_dim_v // 8, float32, 4 if float32 else 2
    _, pack2 = build_pack(0, bfloat16)

    @inline
    def put_row(address, acc, inverse, r):
        mine = u64(address + u64(first_column() * BYTES))
        for j in range(CHUNKS):
            x = acc[4 * j + 2 * r] * inverse[r]
            y = acc[4 * j + 2 * r + 1] * inverse[r]
            to = u64(mine + u64(8 * BYTES * j))
            if FLOAT32:
                ptx.store_global(to, (x, y))
            else:
                ptx.store_global(to, (pack2(x, y),))

    return put_row


@once
def build_put_words(columns, rows):
    """``put_words(tile, words, first)``: 64 rows of words of two elements, as a fragment is packed,
    from the `first` word on, into a tile of one panel of `rows` rows.
    """
    CHUNKS = columns // 8

    @inline
    def put_words(tile, words, first):
        lane, warp = i32(cuda.threadIdx.x % 32), i32(cuda.threadIdx.x % 128 // 32)
        row, right = i32(warp * 16 + lane % 16), i32(lane // 16)
        for j in range(0, CHUNKS, 2):
            at = u32(tile + u32(row * ROW_BYTES + ((j + right) ^ (row % 8)) * 16))
            w = first + 2 * j
            ptx.stmatrix(at, words[w], words[w + 1], words[w + 2], words[w + 3])

    return put_words


@once
def build_put_floats(head_dim_v, centred):
    """``put_floats(address, acc, factor, r, centre)``: this thread's columns of row r of O times
    its factor, to memory; and plus a `centre` if `centred`, unless the factor is 0: the row saw
    nothing.

    `address` is that of the row; its elements are neighbours, as those of `centre` are.
    """
    CHUNKS, CENTRED = head_dim_v // 8, centred

    @inline
    def put_floats(address, acc, factor, r, centre):
        mine = u64(address + u64(first_column() * 4))
        for j in range(CHUNKS):
            x = acc[4 * j + 2 * r] * factor[r]
            y = acc[4 * j + 2 * r + 1] * factor[r]
            if CENTRED and factor[r] != f32(0):
                x += centre[index(8 * j + first_column())]
                y += centre[index(8 * j + first_column() + 1)]
            ptx.store_global(u64(mine + u64(32 * j)), (x, y))

    return put_floats


@once
def build_send(first_panel, count, rows=64):
    """``send(tensor_map, tile, place)``: have the copy engine store 64 rows of `count` panels at a
    `pipeline.TilePlace`, from the first panel on, of a tile of panels of `rows` rows (by one
    thread).
    """
    FIRST, COUNT, PANEL_BYTES = first_panel, count, panel_bytes(rows)
    tensor_store = ptx.tensor_store_of(ptx.ONCE)

    @inline
    def send(tensor_map, tile, place):
        row, head, b1, b0 = i32(place.row), i32(place.head), i32(place.b1), i32(place.b0)
        for panel in range(COUNT):
            column = i32(place.column + (FIRST + panel) * PANEL)
            source = u32(tile + u32(panel * PANEL_BYTES))
            tensor_store(source, tensor_map, column, row, head, b1, b0)

    return send


@once
def build_stage(head_dim_v, panels_at_a_time, bfloat16, interleaved=False):
    """``stage(tensor_map, tile, acc, inverse, me, place)``: store 64 rows of O at a
    `pipeline.TilePlace` by way of shared memory, some panels at a time; rows and columns beyond the
    array's ends are not stored. Rows may be `interleaved` (`build_put`).
    """  # fmt: skip
    PANELS, STEP = panels(head_dim_v), panels_at_a_time
    firsts = range(0, PANELS, STEP)
    puts = [
        build_put(head_dim_v, first, min(STEP, PANELS - first), bfloat16, 64, interleaved)
        for first in firsts
    ]

    def build_step(step, rest):
        put, send = puts[step], build_send(step * STEP, min(STEP, PANELS - step * STEP))

        @inline
        def one(tensor_map, tile, acc, inverse, me, place):
            if cuda.threadIdx.x % WARP_GROUP == 0:
                ptx.bulk_wait_read()
            meet_warp_group(me)  # what was stored from here before has been read
            put(tile, acc, inverse)
            ptx.fence_proxy_async()
            meet_warp_group(me)  # all rows are there
            if cuda.threadIdx.x % WARP_GROUP == 0:
                send(tensor_map, tile, place)
                ptx.bulk_commit()
            rest(tensor_map, tile, acc, inverse, me, place)

        return one

    @inline
    def stage(tensor_map, tile, acc, inverse, me, place):
        pass

    for step in reversed(range(len(puts))):
        stage = build_step(step, stage)
    return stage
