"""What belongs to pairs of a query and a key on Hopper: a bias of 16 bits, or in the forward pass a
mask, whose tiles the copy engine brings to shared memory, some tiles ahead of use.

Read from memory by the threads that want it, each load of a warp touches eight rows, and takes
eight turns of what all warps load with; from here it takes one.

In the forward pass a tile is panels of all its queries, rows of 128 bytes: 64 keys of a bias, 128
of a mask, whose keys are copied two at a time, as numbers of 16 bits. In the backward pass a tile
of a bias goes to where dS of the same queries and keys will be, and threads read it there before
they store that; a box has 64 queries, its rows, and the 64 keys of a consumer.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.ptx.mma import Matrices
from numba_flash.cuda.runtime.lang import cuda, i32, inline, once, u32
from numba_flash.cuda.score.swizzle import PANEL, ROW_BYTES, panel_bytes
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.pipeline import TilePlace
from numba_flash.cuda.sm90.tiles import KEYS, WARP_GROUP

ROWS, CHUNK = 64, 16  # of a consumer; bytes that stay neighbours
WARP = 32
RELEASES = WARP_GROUP // WARP  # of a consumer: one of each warp
KEPT = KEYS // 4  # words of two keys that a thread has of a box of the backward pass


@inline
def own(x, stride):
    """A coordinate of an array, which it is broadcast along if it has no stride."""
    return x if stride != 0 else i32(0)


@once
def build_begin_load(ring, size):
    """``begin_load(smem, n, place, x)``: wait until the n-th slot of a ring is free, and expect so
    many bytes there. Returns the slot's mbarrier and `place` as far as `x`, a bias or a mask, has
    its axes.
    """
    RING, BYTES = one_type(ring), size

    @inline
    def begin_load(smem, n, place, x):
        pipeline.wait_free(smem, RING, n)
        ready = pipeline.mbarrier(smem, RING, RING.ready, n)
        ptx.mbarrier_expect(ready, u32(BYTES))
        b0, b1 = own(place.b0, x.strides[0]), own(place.b1, x.strides[1])
        return ready, TilePlace(place.column, place.row, own(place.head, x.strides[2]), b1, b0)

    return begin_load


@once
def build_load_pairs(options, tile, ring):
    """``load_pairs(tensor_map, smem, n, place, extras)``: have the n-th tile fetched, whose first
    key and query `place` has; the map lacks axes that the array is broadcast along.
    """
    PAIRS, BIASED, PER_ELEMENT = one_type(ring), bool(options.bias), 1 if options.bias else 2
    PANELS, PANEL_BYTES = tile.pair_panels, panel_bytes(tile.block_m)
    begin_load = build_begin_load(ring, tile.pair_bytes)

    @inline
    def load(tensor_map, smem, n, place, x):
        ready, at = begin_load(smem, n, place, x)
        for panel in range(PANELS):
            to = u32(pipeline.tile(smem, PAIRS, n) + u32(panel * PANEL_BYTES))
            column = i32(u32(at.column) // u32(PER_ELEMENT) + u32(panel * PANEL))
            ptx.tensor_load(to, tensor_map, column, at.row, at.head, at.b1, at.b0, ready)

    @inline
    def load_pairs(tensor_map, smem, n, place, extras):
        if BIASED:
            load(tensor_map, smem, n, place, extras.bias)
        else:
            load(tensor_map, smem, n, place, extras.mask)

    return load_pairs


@once
def build_take_pairs(options, tile, ring, releases=True):
    """``take_pairs(words, smem, me, n)``: a thread's part of the n-th tile, as
    `numba_flash.cuda.score.fetch` has it of `numba_flash.cuda.score.fragment.runs_of_columns`. The
    warp `releases` its part of the slot, or the caller does.
    """
    RELEASES_SLOT = releases
    PAIRS, BIASED, PANELS = one_type(ring), bool(options.bias), tile.pair_panels
    PANEL_BYTES, MINE, STEPS = panel_bytes(tile.block_m), ROWS * ROW_BYTES, PANEL // 16
    STEP_BYTES, OF_PANEL, RUNS = 2 * CHUNK, PANEL // 4, tile.block_n // 4
    load_matrices = ptx.load_matrices(PANELS, 1, Matrices(PANEL_BYTES, 0, False))
    LOADED = 4 * PANELS

    @inline
    def take_bias(words, rows):
        """By 16 queries and 16 keys of each panel, which lie in registers as scores do."""
        lane = i32(cuda.threadIdx.x % WARP)
        row, chunk = i32(lane % 16), i32(lane // 16 ^ lane % 8)
        first = u32(rows + u32(row * ROW_BYTES + chunk * CHUNK))
        loaded = cuda.local.array(LOADED, u32)
        for step in range(STEPS):
            load_matrices(loaded, u32(first ^ u32(step * STEP_BYTES)))
            for panel in range(PANELS):
                for e in range(4):
                    words[panel * OF_PANEL + step * 4 + e] = loaded[panel * 4 + e]

    @inline
    def take_mask(words, rows):
        lane = i32(cuda.threadIdx.x % WARP)
        row = i32(lane // 4)
        first = u32(rows + u32(row * ROW_BYTES + row * CHUNK + lane % 4 * 2))
        for n in range(RUNS):
            r, j = n % 2, n // 2  # of rows 8 apart, of 8 keys each
            at = u32(first ^ u32(j // 2 * CHUNK))
            words[n] = ptx.load_shared_half(u32(at + u32(r * 8 * ROW_BYTES + j % 2 * 8)))

    @inline
    def take_pairs(words, smem, me, n):
        pipeline.wait_ready(smem, PAIRS, n)
        warp = i32(cuda.threadIdx.x % WARP_GROUP // WARP)
        rows = u32(pipeline.tile(smem, PAIRS, n) + u32(me * MINE + warp * 16 * ROW_BYTES))
        if BIASED:
            take_bias(words, rows)
        else:
            take_mask(words, rows)
        cuda.syncwarp()  # all of it has been read
        if RELEASES_SLOT and cuda.threadIdx.x % WARP == 0:
            pipeline.release(smem, PAIRS, n)

    return take_pairs


def build_load_bias(tile, layout):
    """``load_bias(tensor_map, smem, n, place, bias)``: have the bias of the n-th tile of scores
    fetched. `place` has its first key and query; the map lacks axes that `bias` is broadcast along.
    """
    BIAS, BLOCK_M, CONSUMERS = one_type(layout.bias), tile.block_m, tile.consumers
    BOX_BYTES, PANEL_BYTES = panel_bytes(KEYS), panel_bytes(tile.block_n)
    begin_load = build_begin_load(layout.bias, layout.ds_bytes)

    @inline
    def load_bias(tensor_map, smem, n, place, bias):
        ready, at = begin_load(smem, n, place, bias)
        for i in range(BLOCK_M // KEYS):
            for j in range(CONSUMERS):
                to = u32(pipeline.tile(smem, BIAS, n) + u32(i * PANEL_BYTES + j * BOX_BYTES))
                column, row = i32(at.column + j * KEYS), i32(at.row + i * KEYS)
                ptx.tensor_load(to, tensor_map, column, row, at.head, at.b1, at.b0, ready)

    return load_bias


@once
def build_take_bias(tile, ring):
    """``take_bias(words, box, smem, me, n, part)``: the bias of a part of the n-th tile, as words
    of two keys in the order of `numba_flash.cuda.score.fragment.runs_of_keys`. With the first part
    of a box a thread reads all of its own there into `box`, and parts take theirs from that.
    """
    BIAS, RUNS, PARTS = one_type(ring), tile.columns // 4, KEYS // tile.columns
    BOX_BYTES, PANEL_BYTES, WORDS = panel_bytes(KEYS), panel_bytes(tile.block_n), KEPT

    @inline
    def read_box(box, smem, me, n, number):
        thread = i32(cuda.threadIdx.x % WARP_GROUP)
        row, chunk = i32(thread % 4 * 2), i32(thread // 16)
        at = u32(pipeline.tile(smem, BIAS, n) + number * u32(PANEL_BYTES))
        at += u32(me * BOX_BYTES + row * ROW_BYTES + (chunk ^ row) * 16 + thread // 4 % 4 * 4)
        next_row = u32(at + u32(ROW_BYTES)) ^ u32(16)
        pipeline.wait_ready(smem, BIAS, n)
        for e in range(0, WORDS, 2):
            further = u32(e // 2 * 8 * ROW_BYTES)
            box[e] = u32(ptx.load_shared(u32(at + further)))
            box[e + 1] = u32(ptx.load_shared(u32(next_row + further)))
        pipeline.meet_warp_group(me)  # all of it has read the box

    @inline
    def take_bias(words, box, smem, me, n, part):
        if part % u32(PARTS) == 0:
            read_box(box, smem, me, n, part // u32(PARTS))
        for e in range(RUNS):
            words[e] = box[e]
        for e in range(WORDS - RUNS):
            box[e] = box[e + RUNS]

    return take_bias
