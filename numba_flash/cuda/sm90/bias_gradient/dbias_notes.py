"""Notes of the steps in which a block sums the gradient of a bias on Hopper. One thread finds the
tiles of scores of which its tiles of the gradient are made, and writes down which they are. The
consumers read these notes; so do three threads that have queries, keys and values fetched. One
thread for all of that took, by an estimate, longer for a step than consumers: 290 instructions,
most of which wait for each other, and for a new tile 400.
"""

from typing import NamedTuple

from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, i32, inline, u32
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import END, DbiasKind, DbiasNote, one_type, words
from numba_flash.cuda.sm90.bias_gradient.dbias_stage import DbiasWalk, ScoreTile, build_load_rows
from numba_flash.cuda.sm90.pipeline import TilePlace
from numba_flash.cuda.work.walk_dbias import build_begin, build_places

NOTE = words(DbiasNote)


class Noted(NamedTuple):
    """Where a consumer is: the number of a note, of tiles of Q and of keys, the kind of the step
    that is noted, and whether the tile of the gradient before had steps: with the last of them the
    bias of this one came.
    """

    item_n: int
    n: int
    m: int
    kind: int
    fetched: bool


def build_note(notes, banded, summed, options, tile):
    """``note_steps(smem, shares, extras, extent, items)``: write down all steps of this block, and
    in the end that there are no more; arguments are those of `build` and its
    kernel, `notes` a ring.
    """
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    NOTES, KIND = one_type(notes), one_type(DbiasKind())
    begin = build_begin(summed, BLOCK_M, BLOCK_N)
    place_of, find, proceed = build_places(options, banded, summed, BLOCK_M, BLOCK_N)

    @inline
    def note_step(smem, item_n, place, share, kind, next_own):
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
        pipeline.wait_free(smem, NOTES, item_n)
        for word in range(len(note)):
            pipeline.write(smem, NOTES, item_n, word, note[word])
        pipeline.commit(smem, NOTES, item_n)

    @inline
    def kind_of(step, following, empty, stop):
        kind = u32(KIND.whole) if step.whole else u32(0)
        kind |= u32(KIND.empty) if empty else u32(0)
        kind |= u32(KIND.last) if following.number >= stop else u32(0)
        kind |= u32(KIND.invalid) if following.invalid else u32(0)
        return kind

    @inline
    def note_steps(smem, shares, extras, extent, items):
        item_n, number = u32(0), i32(cuda.blockIdx.x)
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
                note_step(smem, item_n, place, item.share, kind, next_own)
                item_n = u32(item_n + u32(1))
                there, step = following.number < space.stop, following
        pipeline.wait_free(smem, NOTES, item_n)
        pipeline.write(smem, NOTES, item_n, NOTE.kind, END)
        pipeline.commit(smem, NOTES, item_n)

    return note_steps


def build_follow(notes, load, first):
    """``follow(smem, me, x)``: have a thread ``load(smem, x, m, rows, keys)`` what each step needs
    that has something to add, from the m-th tile of its ring on, of which the `first` is its own;
    it returns the number of the next one. `rows` and `keys` are where these begin.
    """
    NOTES, KIND, FIRST = one_type(notes), one_type(DbiasKind()), first

    @inline
    def read(smem, item_n, word):
        return pipeline.read(smem, NOTES, item_n, word)

    @inline
    def follow(smem, me, x):
        item_n, m = u32(0), u32(FIRST)
        pipeline.wait_ready(smem, NOTES, item_n)
        kind = read(smem, item_n, NOTE.kind)
        while kind != END:
            b0, b1 = read(smem, item_n, NOTE.b0), read(smem, item_n, NOTE.b1)
            rows = TilePlace(
                0, read(smem, item_n, NOTE.row0), read(smem, item_n, NOTE.head), b1, b0
            )
            keys = TilePlace(
                0, read(smem, item_n, NOTE.col0), read(smem, item_n, NOTE.kv_head), b1, b0
            )
            pipeline.release(smem, NOTES, item_n)
            if kind & i32(KIND.empty) == 0:
                m = load(smem, x, m, rows, keys)
            item_n = u32(item_n + u32(1))
            pipeline.wait_ready(smem, NOTES, item_n)
            kind = read(smem, item_n, NOTE.kind)

    return follow


def build_loads(head_dim, head_dim_v, tile):
    """What threads of their own do, of ``(smem, me, x)``, x being the kernel's arguments: have
    the tiles of Q and dO fetched with what belongs to rows, of K, and of V.
    """
    layout, PART, PARTS = tile.layout(head_dim, head_dim_v), tile.part, tile.parts
    KEYS = one_type(layout.keys)
    load_q = build_load_rows(head_dim, tile, layout)
    load_do = build_load_rows(head_dim_v, tile, layout)

    @inline
    def load_queries(smem, x, n, rows, keys):
        load_q(x.maps[1], smem, n, rows, x.rows[index(0)])
        load_do(x.maps[0], smem, u32(n + u32(1)), rows, x.rows[index(1)])
        return u32(n + u32(2))

    def build_load_keys(number, columns):
        """Of K, or of V, whose tensor map has this number: each second tile of their ring."""
        NUMBER, load = number, pipeline.build_load(layout.keys, columns, PART)

        @inline
        def load_keys(smem, x, m, rows, keys):
            for part in range(PARTS):
                key = TilePlace(0, i32(keys.row + part * PART), keys.head, keys.b1, keys.b0)
                pipeline.wait_free(smem, KEYS, m)
                load(x.maps[NUMBER], smem, m, key)
                m = u32(m + u32(2))
            return m

        return load_keys

    loads = (
        (load_queries, 0),
        (build_load_keys(2, head_dim), 0),
        (build_load_keys(3, head_dim_v), 1),
    )
    return [build_follow(layout.notes, load, first) for load, first in loads]


def build_walk(notes, parts):
    """`DbiasWalk` of what is written down, in tiles of so many `parts`."""
    NOTES, KIND, ALL = one_type(notes), one_type(DbiasKind()), 2 * parts

    @inline
    def kind_of(smem, item_n):
        """The kind of a step that has been written down."""
        pipeline.wait_ready(smem, NOTES, item_n)
        return pipeline.uniform(pipeline.read(smem, NOTES, item_n, NOTE.kind))

    @inline
    def first(w):
        return Noted(u32(0), u32(0), u32(0), kind_of(w.smem, u32(0)), False)

    @inline
    def is_tile(w, x):
        return x.kind != END

    @inline
    def has_steps(x):
        return x.kind & i32(KIND.empty) == 0

    @inline
    def look(w, x, shows):
        last = x.kind & i32(KIND.last) != 0
        return ScoreTile(x.n, x.m, x.n, x.m, True, True, False, last, ())

    @inline
    def proceed(w, x, step):
        item_n, kind = x.item_n, x.kind
        if not step.last:
            pipeline.release(w.smem, NOTES, item_n)
            item_n = u32(item_n + u32(1))
            kind = kind_of(w.smem, item_n)
        return Noted(item_n, u32(x.n + u32(2)), u32(x.m + u32(ALL)), kind, x.fetched)

    @inline
    def leave(w, x):
        pipeline.release(w.smem, NOTES, x.item_n)
        item_n = u32(x.item_n + u32(1))
        return Noted(item_n, x.n, x.m, kind_of(w.smem, item_n), has_steps(x))

    return DbiasWalk(first, is_tile, has_steps, look, proceed, leave)
