"""Where dS^T of the Hopper backward pass goes for dQ: a `DqSink`. The loop,
`numba_flash.cuda.sm90.backward.backward`, is the same for both: sums of dQ, to which blocks of keys
add in memory, and, without options, slots of dS^T in memory, of which another kernel makes dQ.

In slots: under a mask of blocks those that add to one tile of dQ are at work at different times,
and for the same bits in every run they would wait for each other. Instead dS^T of each tile that is
listed is written to memory, to a slot of its own (`numba_flash.cuda.sm90.dq.ds_slots`), and
`numba_flash.cuda.sm90.dq.dq` makes dQ of it: nobody waits, and there are no sums in memory. Each
consumer reads its own part of dS^T alone, for dK, so consumers have nothing to say to each other.
"""

from typing import Any, NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, f32, inline, u32, u64
from numba_flash.cuda.score.swizzle import ROW_BYTES, panel_bytes, panels
from numba_flash.cuda.sm90 import pipeline, store, wgmma
from numba_flash.cuda.sm90.arguments import StoredNote, one_type, words
from numba_flash.cuda.sm90.backward.backward_tiles import NOTE_BYTES
from numba_flash.cuda.sm90.backward.load_backward import WORD
from numba_flash.cuda.sm90.backward.softmax_backward import ROWS, place_of
from numba_flash.cuda.sm90.interleave import first_key
from numba_flash.cuda.sm90.tiles import DQ_PART, WARP_GROUP

NOTE, MINE = words(StoredNote), ROWS * ROW_BYTES


class DqSink(NamedTuple):
    """Device functions of a consumer.

    Attributes
    ----------
    v_rows : function
        ``v_rows(smem, item_n, k_rows, mine)``: descriptor of its rows of V.
    begin : function
        ``begin(smem, item_n, me)``: before a work item's first tile.
    hand_over : function
        ``hand_over(smem, n, begin)``: of the tile before the n-th, while dP of this one is made;
        `begin` is the first tile of the work item.
    release_v : function
        ``release_v(smem, item_n, n, end)``: dP of the n-th tile is complete; `end` is the first
        tile of the next work item.
    share : function
        ``share(smem, me, ds, n)``: this consumer's part of dS^T of the n-th tile is in shared
        memory; `ds` is the array of the kernel.
    start : function
        ``start(dq, dv_acc, ds, k_columns)``: start (7) dQ = dS K, if it is made here.
    wait : function
        ``wait(dq, dv_acc, sT)``: what was started before the product for dK is complete.
    put : function
        ``put(smem, me, n, dq)``: dQ of the n-th tile is in registers.
    finish : function
        ``finish(given, smem, item_n, me, n, dk_acc, dv_acc)``: after a work item's last tile, dK
        and dV; `given` are the kernel's arguments.
    end : function
        ``end()``: after the last work item.
    """

    v_rows: Any
    begin: Any
    hand_over: Any
    release_v: Any
    share: Any
    start: Any
    wait: Any
    put: Any
    finish: Any
    end: Any


def build_sums(config, layout, stage):
    """`DqSink` of sums in memory; `stage` is the `BackwardStage`."""
    tile, BFLOAT16 = config.tile, config.dtype == "bfloat16"
    K, V, DQ, WORK = map(one_type, (layout.k, layout.v, layout.dq, layout.work))
    CONSUMERS, AHEAD, TO_MAP = tile.consumers, tile.ahead, config.to_map
    # a tile of dQ is fenced and let go while the product for dK runs, or else the next one for dP
    AT_ONCE = AHEAD and tile.keeps_ds
    DQ_TILE, DQ_BYTES = layout.dq.tiles, 4 * DQ_PART  # where it is, and a consumer's part of it
    V_BEHIND_K, K_PANEL = (V.tiles - K.tiles) // wgmma.UNIT, panel_bytes(tile.block_n)
    OUTPUTS_K, OUTPUTS_V, NEXT = config.d // 2, config.dv // 2, tile.block_m // 2 if AHEAD else 0
    NONE, ONE, INTERLEAVED = 0, 1, stage.interleaved
    factors, release_last = stage.factors, stage.release_last
    start_dq = wgmma.build_sum(64, tile.block_n // 16, 0, 0, BFLOAT16, False)
    commit_dq, put_dq = store.build_hand_over(layout.dq)
    put_dk = store.build_put_row(config.d, False, BFLOAT16)
    put_dv = store.build_put_row(config.dv, False, BFLOAT16)
    stage_dk = store.build_stage(config.d, 2, BFLOAT16, INTERLEAVED) if TO_MAP else None
    stage_dv = store.build_stage(config.dv, 2, BFLOAT16, INTERLEAVED) if TO_MAP else None

    @inline
    def v_rows(smem, item_n, k_rows, mine):
        return u32(k_rows + u32(V_BEHIND_K))

    @inline
    def begin(smem, item_n, me):
        """There is room for everything."""

    @inline
    def hand_over(smem, n, begin):
        if not AT_ONCE and n != begin:
            commit_dq(smem, u32(n - u32(1)))

    @inline
    def release_v(smem, item_n, n, end):
        """`finish` releases it, with K."""

    @inline
    def share(smem, me, ds, n):
        pipeline.meet_consumers(CONSUMERS)  # all of dS^T is there

    @inline
    def start(dq, dv_acc, ds, k_columns):
        if AHEAD:  # dV is complete: the registers of P are free for dQ
            ptx.wgmma_wait(dv_acc, dv_acc, ONE, OUTPUTS_V, NONE)
        start_dq(dq, wgmma.descriptor(ds, u32(K_PANEL)), k_columns)

    @inline
    def wait(dq, dv_acc, sT):
        ptx.wgmma_wait(dq, sT, ONE, 32, NEXT)

    @inline
    def put(smem, me, n, dq):
        put_dq(smem, me, n, dq, f32(1))
        if AT_ONCE:
            commit_dq(smem, n)

    @inline
    def finish(given, smem, item_n, me, n, dk_acc, dv_acc):
        """Let the last tile of dQ be added up, and store dK and dV of a work item."""
        dk, dv, maps = given.dk, given.dv, given.maps
        if not AT_ONCE:
            commit_dq(smem, u32(n - u32(1)))
        ptx.wgmma_wait(dk_acc, dv_acc, NONE, OUTPUTS_K, OUTPUTS_V)
        release_last(smem, n)
        pipeline.release_group(smem, K, item_n)
        pipeline.release_group(smem, V, item_n)
        factor = cuda.local.array(2, f32)  # registers: what dV and dK are multiplied by
        scaled = cuda.local.array(2, f32)
        at = place_of(smem, WORK, item_n, me * ROWS)
        k0 = pipeline.read(smem, WORK, item_n, WORD.k0)
        keys = pipeline.read(smem, WORK, item_n, WORD.keys)
        factors(smem, item_n, factor, scaled, given.scales)
        pipeline.release(smem, WORK, item_n)
        if TO_MAP:
            # tile n - 1 of dQ, which had the slot of tile n + 1, has left
            pipeline.wait_free(smem, DQ, u32(n + u32(1)))
            room = u32(smem + u32(DQ_TILE + me * DQ_BYTES))
            stage_dv(maps[5], room, dv_acc, factor, me, at)
            stage_dk(maps[4], room, dk_acc, scaled, me, at)
            if cuda.threadIdx.x % WARP_GROUP == 0:
                ptx.bulk_wait_read()
            pipeline.meet_warp_group(me)
        else:
            for r in range(2):
                j = at.row + (first_key() + r if INTERLEAVED else wgmma.first_row() + 8 * r)
                if j < keys:
                    put_dv(ptx.global_address(dv[at.b0, at.b1, at.head, k0 + j]), dv_acc, factor, r)
                    put_dk(ptx.global_address(dk[at.b0, at.b1, at.head, k0 + j]), dk_acc, scaled, r)

    @inline
    def end():
        """Threads that move data see to the last tile."""

    return DqSink(v_rows, begin, hand_over, release_v, share, start, wait, put, finish, end)


def build_slots(config, layout, stage):
    """`DqSink` of slots of dS^T; arguments as those of `build_sums`."""
    tile, BFLOAT16 = config.tile, config.dtype == "bfloat16"
    K, V, Q, WORK = map(one_type, (layout.k, layout.v, layout.q, layout.work))
    DS, DS_BYTES, DS_PANELS = layout.ds, layout.ds_bytes, panels(tile.block_m)
    NOTES, K_PANEL = layout.notes, panel_bytes(tile.block_n)
    OUTPUTS_K, OUTPUTS_V = config.d // 2, config.dv // 2
    NEXT, NONE, ONE = tile.block_m // 2 if tile.ahead else 0, 0, 1
    factors = stage.factors
    put_dk = store.build_put_rows(config.d, BFLOAT16, tile.block_n)
    put_dv = store.build_put_rows(config.dv, BFLOAT16, tile.block_n)
    send_dk = store.build_send(0, panels(config.d), tile.block_n)
    send_dv = store.build_send(0, panels(config.dv), tile.block_n)

    @inline
    def v_rows(smem, item_n, k_rows, mine):
        return wgmma.descriptor(pipeline.tile(smem, V, item_n) + mine, u32(0))

    @inline
    def begin(smem, item_n, me):
        """dV and dK of the work item before have been read: there is room for dS^T and for K."""
        if cuda.threadIdx.x % WARP_GROUP == 0:
            ptx.bulk_wait_read()
            if item_n != u32(0):
                pipeline.release(smem, K, u32(item_n - u32(1)))
        pipeline.meet_warp_group(me)

    @inline
    def hand_over(smem, n, begin):
        """No dQ is made here."""

    @inline
    def release_v(smem, item_n, n, end):
        if u32(n + u32(1)) == end:
            pipeline.release_group(smem, V, item_n)

    @inline
    def share(smem, me, ds, n):
        """Have it copied to memory, unless the tile is listed nowhere. The copy before has been
        read once all threads have met: its place is free.
        """
        first = cuda.threadIdx.x % WARP_GROUP == 0
        if first:
            ptx.bulk_wait_read()
        pipeline.meet_warp_group(me)  # all of this part is there
        if first:
            note = u32(smem + u32(NOTES) + n % u32(Q.slots) * u32(NOTE_BYTES))
            slot = ptx.load_shared(u32(note + u32(4 * NOTE.slot)))
            if slot >= 0:
                source = u32(smem + u32(DS + me * MINE) + n % u32(2) * u32(DS_BYTES))
                to = u64(ptx.global_address(ds) + u64(slot) * u64(DS_BYTES) + u64(me * MINE))
                for panel in range(DS_PANELS):
                    at = panel * K_PANEL
                    ptx.bulk_store(u64(to + u64(at)), u32(source + u32(at)), u32(MINE))
                ptx.bulk_commit()

    @inline
    def start(dq, dv_acc, ds, k_columns):
        """No dQ is made here."""

    @inline
    def wait(dq, dv_acc, sT):
        ptx.wgmma_wait(dv_acc, sT, ONE, OUTPUTS_V, NEXT)

    @inline
    def put(smem, me, n, dq):
        """No dQ is made here."""

    @inline
    def finish(given, smem, item_n, me, n, dk_acc, dv_acc):
        """Store dV and dK of a work item, by way of where dS^T and K were: of both this consumer
        alone has read its part. (Of K it may be late to put zeros beyond the last key, also into
        the other's part. There dK is 0, too.)
        """
        ptx.wgmma_wait(dk_acc, dv_acc, NONE, OUTPUTS_K, OUTPUTS_V)
        factor = cuda.local.array(2, f32)  # registers: what dV and dK are multiplied by
        scaled = cuda.local.array(2, f32)
        at = place_of(smem, WORK, item_n, me * ROWS)
        factors(smem, item_n, factor, scaled, given.scales)
        pipeline.release(smem, WORK, item_n)
        of_dv = u32(smem + u32(DS + me * MINE))
        of_dk = u32(pipeline.tile(smem, K, item_n) + u32(me * MINE))
        put_dk(of_dk, dk_acc, scaled[0])
        first = cuda.threadIdx.x % WARP_GROUP == 0
        if first:
            ptx.bulk_wait_read()
        pipeline.meet_warp_group(me)  # dS^T has been read
        put_dv(of_dv, dv_acc, factor[0])
        ptx.fence_proxy_async()
        pipeline.meet_warp_group(me)  # all rows are there
        if first:
            send_dv(given.maps[5], of_dv, at)
            send_dk(given.maps[4], of_dk, at)
            ptx.bulk_commit()

    @inline
    def end():
        if cuda.threadIdx.x % WARP_GROUP == 0:
            ptx.bulk_wait()

    return DqSink(v_rows, begin, hand_over, release_v, share, start, wait, put, finish, end)
