"""Tiles of a bias of 16 bits in the backward pass on Hopper: the copy engine brings them to where
dS of the same queries and keys will be, and threads read them there before they store it.

A box has 64 queries, its rows, and the 64 keys of a consumer.
"""

from numba_flash.cuda import ptx
from numba_flash.cuda.lang import cuda, i32, inline, once, u32
from numba_flash.cuda.sm90 import pipeline
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.tiles import KEYS, WARP_GROUP
from numba_flash.cuda.swizzle import ROW_BYTES, panel_bytes

KEPT = KEYS // 4  # words of two keys that a thread has of a box


def build_load_bias(tile, layout):
    """``load_bias(tensor_map, smem, n, place, bias)``: have the bias of the n-th tile of scores
    fetched. `place` has its first key and query; the map lacks axes that `bias` is broadcast along.
    """
    BIAS, BLOCK_M, CONSUMERS = one_type(layout.bias), tile.block_m, tile.consumers
    BYTES, BOX_BYTES, PANEL_BYTES = layout.ds_bytes, panel_bytes(KEYS), panel_bytes(tile.block_n)

    @inline
    def own(x, stride):
        return x if stride != 0 else i32(0)

    @inline
    def load_bias(tensor_map, smem, n, place, bias):
        pipeline.wait_free(smem, BIAS, n)
        ready = pipeline.mbarrier(smem, BIAS, BIAS.ready, n)
        ptx.mbarrier_expect(ready, u32(BYTES))
        b0, b1 = own(place.b0, bias.strides[0]), own(place.b1, bias.strides[1])
        head = own(place.head, bias.strides[2])
        for i in range(BLOCK_M // KEYS):
            for j in range(CONSUMERS):
                to = u32(pipeline.tile(smem, BIAS, n) + u32(i * PANEL_BYTES + j * BOX_BYTES))
                column, row = i32(place.column + j * KEYS), i32(place.row + i * KEYS)
                ptx.tensor_load(to, tensor_map, column, row, head, b1, b0, ready)

    return load_bias


@once
def build_take_bias(tile, ring):
    """``take_bias(words, box, smem, me, n, part)``: the bias of a part of the n-th tile, as words
    of two keys in the order of `numba_flash.cuda.fragment.runs_of_keys`. With the first part of a
    box a thread reads all of its own there into `box`, and parts take theirs from that.
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
