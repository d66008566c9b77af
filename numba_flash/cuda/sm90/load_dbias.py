"""Threads that move data for the gradient of a bias on Hopper. One finds the tiles of scores of
which a block's tiles of the gradient are made, and writes down which they are; three others read
that, and have queries, keys and values fetched. One thread for all took, by an estimate, longer for
a step than consumers: 290 instructions, most of which wait for each other, and for a new tile 400.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.lang import cuda, i32, inline, u32, u64
from numba_flash.cuda.number import index
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import END, DbiasKind, DbiasNote, one_type, words
from numba_flash.cuda.sm90.pipeline import Place
from numba_flash.cuda.walk_dbias import build_begin, build_places

NOTE = words(DbiasNote)
CHUNK = 64  # rows of queries, of which memory has whole ones


def build_load_rows(columns, tile, layout):
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


def build_note(notes, banded, summed, options, tile):
    """``note_steps(smem, shares, extras, extent, items)``: write down all steps of this block, and
    in the end that there are no more; arguments are those of `numba_flash.cuda.sm90.dbias.build`
    and its kernel, `notes` a ring.
    """
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    NOTES, KIND = one_type(notes), one_type(DbiasKind())
    begin = build_begin(summed, BLOCK_M, BLOCK_N)
    place_of, find, proceed = build_places(options, banded, summed, BLOCK_M, BLOCK_N)

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
            kv_head=place.kv_head,
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
    def kind_of(step, following, empty, stop):
        kind = u32(KIND.whole) if step.whole else u32(0)
        kind |= u32(KIND.empty) if empty else u32(0)
        kind |= u32(KIND.last) if following.number >= stop else u32(0)
        kind |= u32(KIND.invalid) if following.invalid else u32(0)
        return kind

    @inline
    def note_steps(smem, shares, extras, extent, items):
        turn, number = u32(0), i32(cuda.blockIdx.x)
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
                there, step = following.number < space.stop, following
        pipeline.wait_free(smem, NOTES, turn)
        pipeline.write(smem, NOTES, turn, NOTE.kind, END)
        pipeline.commit(smem, NOTES, turn)

    return note_steps


class Loads(NamedTuple):
    """Functions of threads of their own: ``queries(maps, smem, rows)``, ``keys(tensor_map, smem)``
    and ``values(tensor_map, smem)``; see `build_loads`.
    """

    queries: Any
    keys: Any
    values: Any


def build_loads(head_dim, head_dim_v, tile):
    """`Loads`, which have the tiles of all steps fetched that have been written down: those of Q
    and dO with what belongs to rows, of K, and of V; `maps` and `rows` are the kernel's.
    """
    layout = tile.layout(head_dim, head_dim_v)
    NOTES, KIND = one_type(layout.notes), one_type(DbiasKind())
    load_q = build_load_rows(head_dim, tile, layout)
    load_do = build_load_rows(head_dim_v, tile, layout)

    @inline
    def read(smem, turn, word):
        return pipeline.read(smem, NOTES, turn, word)

    @inline
    def kind_of(smem, turn):
        pipeline.wait_ready(smem, NOTES, turn)
        return read(smem, turn, NOTE.kind)

    @inline
    def load_queries(maps, smem, rows):
        turn, n = u32(0), u32(0)
        kind = kind_of(smem, turn)
        while kind != END:
            b0, b1 = read(smem, turn, NOTE.b0), read(smem, turn, NOTE.b1)
            row = Place(0, read(smem, turn, NOTE.row0), read(smem, turn, NOTE.head), b1, b0)
            pipeline.release(smem, NOTES, turn)
            if kind & i32(KIND.empty) == 0:
                load_q(maps[1], smem, n, row, rows[index(0)])
                load_do(maps[0], smem, u32(n + u32(1)), row, rows[index(1)])
                n = u32(n + u32(2))
            turn = u32(turn + u32(1))
            kind = kind_of(smem, turn)

    def build_load_keys(first, columns):
        """Of K, or of V: each second tile of a ring that they share, from the `first` on."""
        FIRST, PART, PARTS = first, tile.part, tile.parts
        RING = one_type(layout.keys)
        load = pipeline.build_load(RING, columns, PART)

        @inline
        def load_keys(tensor_map, smem):
            turn, m = u32(0), u32(FIRST)
            kind = kind_of(smem, turn)
            while kind != END:
                b0, b1 = read(smem, turn, NOTE.b0), read(smem, turn, NOTE.b1)
                col0, kv_head = read(smem, turn, NOTE.col0), read(smem, turn, NOTE.kv_head)
                pipeline.release(smem, NOTES, turn)
                if kind & i32(KIND.empty) == 0:
                    for part in range(PARTS):
                        key = Place(0, i32(col0 + part * PART), kv_head, b1, b0)
                        pipeline.wait_free(smem, RING, m)
                        load(tensor_map, smem, m, key)
                        m = u32(m + u32(2))
                turn = u32(turn + u32(1))
                kind = kind_of(smem, turn)

        return load_keys

    return Loads(load_queries, build_load_keys(0, head_dim), build_load_keys(1, head_dim_v))
