"""What the consumers of the backward kernels of float32 on Hopper share: how a work item begins and
ends, where its dK and dV go, planes of a tile of P or dS, and the power of two of the latter.
"""

import math
from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, inline, u32
from numba_flash.cuda.score import fragment, powers, softmax
from numba_flash.cuda.score.swizzle import PANEL, panels
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import Scales, may_go_upward, one_type
from numba_flash.cuda.sm90.backward import softmax_backward
from numba_flash.cuda.sm90.backward.load_backward import WORD
from numba_flash.cuda.sm90.backward.softmax_backward import place_of
from numba_flash.cuda.sm90.tiles import WARP_GROUP


class PlanesStage(NamedTuple):
    """Functions of a consumer; see `build`. `scores` are those of `SoftmaxBackward`."""

    scores: Any
    begin: Any
    common_power: Any
    split: Any
    put_planes: Any
    end_tiles: Any
    store_dk: Any
    store_dv: Any


def build(config):
    """`PlanesStage` of a kernel of `numba_flash.cuda.sm90.fp16x2.backward_planes.build`.

    ``split(p, x)``: a fragment as words of two elements, plane after plane. ``put_planes(to, p)``:
        these into tiles of dS^T in shared memory.
    ``end_tiles(smem, item_n, n)``: the tile before the n-th was the last one of a work item.
    """
    options, tile = config.options, config.tile
    D, DV, PLANES, BLOCK_N = tile.width(config.d), tile.width(config.dv), tile.planes, tile.block_n
    SMEM, SCORES, WARPS = tile.layout(D, DV), tile.block_m // 2, WARP_GROUP // 32
    PAIRS, DS_BYTES = tile.block_m // 4, SMEM.ds_bytes
    K, V, WORK, LARGEST = one_type(SMEM.k), one_type(SMEM.v), one_type(SMEM.work), SMEM.largest
    OUTPUTS_K, SEQUENCES, PACKED = D // 2, options.sequences, options.packed
    LOWERED, NAN = 2.0**-softmax.RAISED_BACKWARD, math.nan
    clear_k = pipeline.build_clear_tail(PLANES * PANEL * panels(D), BLOCK_N)
    clear_v = pipeline.build_clear_tail(PLANES * PANEL * panels(DV), BLOCK_N)
    _, largest_of = powers.build_power(SCORES)
    upward = may_go_upward(config.ordered, options)
    scores = softmax_backward.build(D, DV, options, tile, upward=upward)
    note_bounds, (split, _) = scores.note_bounds, fragment.build_split(PAIRS, PLANES)
    put_words = store.build_put_words(tile.block_m, BLOCK_N)
    commit_dq, _ = store.build_hand_over(SMEM.dq)
    put_dk = store.build_put_floats(config.d, False)
    put_dv = store.build_put_floats(config.dv, False)
    factor_of = pipeline.build_factor_of(WORK, WORD)

    @inline
    def begin(smem, item_n, me, extras, scales, group):
        """Wait for K and V of a work item; its `Scales`, of products of planes, in base e."""
        note_bounds(smem, item_n, me, group)
        keys = pipeline.read(smem, WORK, item_n, WORD.keys)
        keys -= pipeline.read(smem, WORK, item_n, WORD.row0)
        pipeline.wait_ready(smem, K, item_n)
        pipeline.wait_ready(smem, V, item_n)
        if SEQUENCES:
            clear_k(smem, K, item_n, keys, me)
            clear_v(smem, V, item_n, keys, me)
        factor = factor_of(smem, item_n, extras, 0) * factor_of(smem, item_n, extras, 1)
        return Scales(f32(0), scales.scale * factor, scales.scale)

    @inline
    def common_power(smem, me, dsT):
        """The `Power` for dS^T of all warps of this consumer."""
        at = u32(smem + u32(LARGEST + 4 * WARPS * me))
        largest = largest_of(dsT)
        if cuda.threadIdx.x % 32 == 0:
            warp = cuda.threadIdx.x % WARP_GROUP // 32
            ptx.store_shared(u32(at + u32(4 * warp)), i32(ptx.as_uint32(largest)))
        pipeline.meet_warp_group(me)  # theirs are there; they have read their tile's delta
        for warp in range(WARPS):
            other = ptx.as_float32(u32(ptx.load_shared(u32(at + u32(4 * warp)))))
            largest = ptx.maximum(largest, other)
        return powers.power_below(largest)

    @inline
    def put_planes(to, p):
        for plane in range(PLANES):
            put_words(u32(to + u32(plane * DS_BYTES)), p, plane * PAIRS)

    @inline
    def end_tiles(smem, item_n, n):
        """Its dQ may be added up, and K and V may be overwritten."""
        commit_dq(smem, u32(n - u32(1)))
        pipeline.release_group(smem, K, item_n)
        pipeline.release_group(smem, V, item_n)

    def build_store(put):
        @inline
        def store_rows(smem, item_n, first, x, acc, factor):
            """Rows of x from the `first` of a work item's keys on, in the order of fragments."""
            factors = cuda.local.array(2, f32)  # registers: what the rows are multiplied by
            at, k0 = place_of(smem, WORK, item_n, first), i32(0)
            rows, invalid = i32(x.shape[3]), False
            if PACKED:
                k0 = pipeline.read(smem, WORK, item_n, WORD.k0)
                rows = pipeline.read(smem, WORK, item_n, WORD.keys)
            if SEQUENCES:
                invalid = pipeline.read(smem, WORK, item_n, WORD.invalid) != 0
            for r in range(2):
                j = at.row + wgmma.first_row() + 8 * r
                factors[r] = f32(NAN) if invalid else factor
                if j < rows:
                    x_row = x[index(at.b0), index(at.b1), index(at.head), index(k0 + j)]
                    put(ptx.global_address(x_row), acc, factors, r, x_row)

        return store_rows

    store_dk_rows, store_dv_rows = build_store(put_dk), build_store(put_dv)

    @inline
    def store_dv(smem, item_n, first, dv, acc, extras):
        """DV of the keys from the `first` of a work item on."""
        factor = f32(LOWERED) * factor_of(smem, item_n, extras, 3)
        store_dv_rows(smem, item_n, first, dv, acc, factor)

    @inline
    def store_dk(smem, item_n, first, dk, acc, extras, scale):
        """DK of them."""
        of_dp = factor_of(smem, item_n, extras, 2) * factor_of(smem, item_n, extras, 3)
        for e in range(OUTPUTS_K):
            acc[e] *= of_dp
        factor = f32(LOWERED) * scale * factor_of(smem, item_n, extras, 0)
        store_dk_rows(smem, item_n, first, dk, acc, factor)

    return PlanesStage(
        scores, begin, common_power, split, put_planes, end_tiles, store_dk, store_dv
    )
