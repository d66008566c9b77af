"""The thread that moves data for the gradient of a bias on Hopper: it finds the tiles of scores of
which a block's tiles of the gradient are made, writes down which they are, and has them fetched.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.lang import cuda, i32, inline, u32, u64
from numba_flash.cuda.number import index
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import END, DbiasKind, DbiasNote, one_type, words
from numba_flash.cuda.sm90.pipeline import Place
from numba_flash.cuda.walk_dbias import build_begin, build_places

NOTE = words(DbiasNote)
CHUNK = 64  # rows of queries, of which memory has whole ones


def _build_load_rows(columns, tile, layout):
    """``load_rows(tensor_map, smem, n, place, values)``: have the n-th tile of Q or dO fetched, and
    its rows' lse or delta; instead of those beyond the last any others.
    """
    ROWS, VALUES, BYTES = one_type(layout.rows), layout.values, 4 * tile.block_m
    CHUNKS, CHUNK_BYTES = tile.block_m // CHUNK, 4 * CHUNK
    load = pipeline.build_load(ROWS, columns, tile.block_m, BYTES)

    @inline
    def load_rows(tensor_map, smem, n, place, values):
        head = values[index(place.b0), index(place.b1), index(place.head)]
        address, last = ptx.global_address(head), i32(head.shape[0] - CHUNK)
        to = u32(smem + u32(VALUES) + n % u32(ROWS.slots) * u32(BYTES))
        pipeline.wait_free(smem, ROWS, n)
        load(tensor_map, smem, n, place)
        ready = pipeline.mbarrier(smem, ROWS, ROWS.ready, n)
        for chunk in range(CHUNKS):
            row = min(i32(place.row + chunk * CHUNK), last)
            source = u64(address + u64(row * 4))
            ptx.bulk_load(u32(to + u32(chunk * CHUNK_BYTES)), source, u32(CHUNK_BYTES), ready)

    return load_rows


def build_produce(head_dim, head_dim_v, banded, summed, options, tile):
    """``produce(maps, smem, rows, shares, extras, extent, items)``; arguments are those of
    `numba_flash.cuda.sm90.dbias.build` and its kernel.
    """
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    PART, PARTS, layout = tile.part, tile.parts, tile.layout(head_dim, head_dim_v)
    NOTES, KEY_TILES, KIND = one_type(layout.notes), one_type(layout.keys), one_type(DbiasKind())
    begin = build_begin(summed, BLOCK_M, BLOCK_N)
    place_of, find, proceed = build_places(options, banded, summed, BLOCK_M, BLOCK_N)
    load_q = _build_load_rows(head_dim, tile, layout)
    load_do = _build_load_rows(head_dim_v, tile, layout)
    load_k = pipeline.build_load(KEY_TILES, head_dim, PART)
    load_v = pipeline.build_load(KEY_TILES, head_dim_v, PART)

    @inline
    def note_step(smem, turn, place, share, kind, next_own):
        at, region = place.at, place.region
        note = DbiasNote(
            b0=at.b0,
            b1=at.b1,
            head=at.head,
            row0=region.row0,
            col0=region.col0,
            queries=region.rows,
            keys=region.cols,
            low=region.low,
            high=region.high,
            share=share,
            kind=i32(kind),
            next_b0=next_own.b0,
            next_b1=next_own.b1,
            next_head=next_own.head,
            next_row0=i32(next_own.i * BLOCK_M),
            next_col0=i32(next_own.j * BLOCK_N),
        )
        pipeline.wait_free(smem, NOTES, turn)
        for word in range(len(note)):
            pipeline.write(smem, NOTES, turn, word, note[word])
        pipeline.commit(smem, NOTES, turn)

    @inline
    def load_step(maps, smem, n, m, rows, place):
        """The n-th tiles of Q and dO, and the parts of K and V from the m-th on."""
        at, col0 = place.at, place.region.col0
        row = Place(0, place.region.row0, at.head, at.b1, at.b0)
        load_q(maps[1], smem, n, row, rows[index(0)])
        for part in range(PARTS):
            key = Place(0, i32(col0 + part * PART), place.kv_head, at.b1, at.b0)
            pipeline.wait_free(smem, KEY_TILES, m)
            load_k(maps[2], smem, m, key)
            if part == 0:
                load_do(maps[0], smem, u32(n + u32(1)), row, rows[index(1)])
            m = u32(m + u32(1))
            pipeline.wait_free(smem, KEY_TILES, m)
            load_v(maps[3], smem, m, key)
            m = u32(m + u32(1))

    @inline
    def kind_of(step, following, empty, stop):
        kind = u32(KIND.whole) if step.whole else u32(0)
        kind |= u32(KIND.empty) if empty else u32(0)
        kind |= u32(KIND.last) if following.number >= stop else u32(0)
        kind |= u32(KIND.invalid) if following.invalid else u32(0)
        return kind

    @inline
    def produce(maps, smem, rows, shares, extras, extent, items):
        turn, n, m, number = u32(0), u32(0), u32(0), i32(cuda.blockIdx.x)
        while number < items:
            item = begin(number, extent, shares)
            number = i32(number + cuda.gridDim.x)
            next_own, space = begin(number, extent, shares).space.own, item.space
            step, there = find(item.step, space, extras), True
            while there:
                empty, following = step.number >= space.stop, step
                if not empty:
                    following = proceed(step, space, extras)
                kind = kind_of(step, following, empty, space.stop)
                place = place_of(step.walk, space, extras)
                note_step(smem, turn, place, item.share, kind, next_own)
                turn = u32(turn + u32(1))
                if not empty:
                    load_step(maps, smem, n, m, rows, place)
                    n, m = u32(n + u32(2)), u32(m + u32(2 * PARTS))
                there, step = following.number < space.stop, following
        pipeline.wait_free(smem, NOTES, turn)
        pipeline.write(smem, NOTES, turn, NOTE.kind, END)
        pipeline.commit(smem, NOTES, turn)

    return produce
