"""Backward pass on Hopper through lists of tiles, up to head dimension 128:
`numba_flash.cuda.sm90.backward` without dQ.

Under a mask of blocks those that add to one tile of dQ are at work at different times, and for the
same bits in every run they would wait for each other. Instead dS^T of each tile that is listed is
written to memory, to a slot of its own (`numba_flash.cuda.sm90.ds_slots`), and
`numba_flash.cuda.sm90.dq` makes dQ of it: nobody waits, and there are no sums in memory. Each
consumer reads its own part of dS^T alone, for dK, so consumers have nothing to say to each other.
"""

from numba_flash.cuda import fragment, ptx, softmax
from numba_flash.cuda.lang import cuda, f32, i32, inline, u32, u64
from numba_flash.cuda.sm90 import begin_backward, pipeline, softmax_backward, store, wgmma
from numba_flash.cuda.sm90.arguments import BACKWARD_TILES, END, StoredNote, one_type, words
from numba_flash.cuda.sm90.config import BackwardConfig
from numba_flash.cuda.sm90.load_backward import WORD, build_kernel
from numba_flash.cuda.sm90.options_tiles import NOTE_BYTES
from numba_flash.cuda.sm90.pipeline import Place
from numba_flash.cuda.sm90.softmax_backward import ROWS
from numba_flash.cuda.sm90.tiles import WARP_GROUP
from numba_flash.cuda.swizzle import ROW_BYTES, panel_bytes, panels

NOTE = words(StoredNote)


def build(config: BackwardConfig):
    """Kernel as `numba_flash.cuda.sm90.backward.build`'s with ``options.listed``, but that

    dq_sum : dS^T, as panels of 64 queries and the keys of a tile, in the slots of a section.
    flags : none.
    sizes : of the section; the items of others are not done.
    """
    dtype, head_dim, head_dim_v = config.dtype, config.d, config.dv
    banded, to_map, ordered = config.banded, config.to_map, config.ordered
    options, tile = config.options, config.tile
    BLOCK_M, BLOCK_N = tile.block_m, tile.block_n
    SMEM = tile.layout(head_dim, head_dim_v)
    Q, K, V, DO, WORK = map(one_type, (SMEM.q, SMEM.k, SMEM.v, SMEM.do, SMEM.work))
    Q_PANEL, K_PANEL, MINE = panel_bytes(BLOCK_M), panel_bytes(BLOCK_N), ROWS * ROW_BYTES
    DS, DS_BYTES, DS_PANELS, NOTES = SMEM.ds, SMEM.ds_bytes, panels(BLOCK_M), SMEM.notes
    SCORES, PAIRS, OUTPUTS_K, OUTPUTS_V = BLOCK_M // 2, BLOCK_M // 4, head_dim // 2, head_dim_v // 2
    AHEAD, BFLOAT16 = tile.ahead, dtype == "bfloat16"
    NEXT = SCORES if AHEAD else 0
    ONES, NONE, ONE = (1.0, 1.0), 0, 1
    begin = begin_backward.build(head_dim, head_dim_v, options, tile, BFLOAT16)
    release_before, begin_item = begin.release_before, begin.begin_item
    start_scores, start_next = begin.start_scores, begin.start_next
    start_dp = wgmma.build_scores(BLOCK_M, head_dim_v, BLOCK_N, BFLOAT16)
    start_dv = wgmma.build_values(BLOCK_M, head_dim_v, BFLOAT16)
    start_dk = wgmma.build_sum(head_dim, BLOCK_M // 16, K_PANEL, 0, BFLOAT16, True)
    pack, _ = fragment.build_pack(PAIRS, BFLOAT16)
    put_ds = store.build_put_chunks(BLOCK_M, 0, BFLOAT16, BLOCK_N)
    zero_k, _ = softmax.build_zero(OUTPUTS_K)
    zero_v, _ = softmax.build_zero(OUTPUTS_V)
    shared = softmax_backward.build(head_dim, head_dim_v, options, tile, BFLOAT16)
    wait_q, wait_do, recompute_p = shared.wait_q, shared.wait_do, shared.recompute_p
    differentiate, factors = shared.differentiate, shared.factors
    put_dk = store.build_put_rows(head_dim, BFLOAT16, BLOCK_N)
    put_dv = store.build_put_rows(head_dim_v, BFLOAT16, BLOCK_N)
    send_dk = store.build_send(0, panels(head_dim), BLOCK_N)
    send_dv = store.build_send(0, panels(head_dim_v), BLOCK_N)

    @inline
    def finish(maps, smem, turn, me, dk_acc, dv_acc, scale):
        """Store dV and dK of a work item, by way of where dS^T and K were: of both this consumer
        alone has read its part. (Of K it may be late to put zeros beyond the last key, also into
        the other's part. There dK is 0, too.)
        """
        ptx.wgmma_wait(dk_acc, dv_acc, NONE, OUTPUTS_K, OUTPUTS_V)
        factor = cuda.local.array(2, f32)  # registers: what dV and dK are multiplied by
        scaled = cuda.local.array(2, f32)
        b0 = pipeline.read(smem, WORK, turn, WORD.b0)
        b1 = pipeline.read(smem, WORK, turn, WORD.b1)
        h = pipeline.read(smem, WORK, turn, WORD.kv_head)
        row0 = i32(pipeline.read(smem, WORK, turn, WORD.row0) + me * ROWS)
        factors(smem, turn, factor, scaled, scale)
        pipeline.release(smem, WORK, turn)
        of_dv = u32(smem + u32(DS + me * MINE))
        of_dk = u32(pipeline.tile(smem, K, turn) + u32(me * MINE))
        put_dk(of_dk, dk_acc, scaled[0])
        first = cuda.threadIdx.x % WARP_GROUP == 0
        if first:
            ptx.bulk_wait_read()
        pipeline.meet_warp_group(me)  # dS^T has been read
        put_dv(of_dv, dv_acc, factor[0])
        ptx.fence_proxy_async()
        pipeline.meet_warp_group(me)  # all rows are there
        if first:
            send_dv(maps[5], of_dv, Place(0, row0, h, b1, b0))
            send_dk(maps[4], of_dk, Place(0, row0, h, b1, b0))
            ptx.bulk_commit()

    @inline
    def make_room(smem, turn, me):
        """dV and dK of the work item before have been read: there is room for dS^T and for K."""
        if cuda.threadIdx.x % WARP_GROUP == 0:
            ptx.bulk_wait_read()
            if turn != u32(0):
                pipeline.release(smem, K, u32(turn - u32(1)))
        pipeline.meet_warp_group(me)

    @inline
    def store_ds(smem, me, ds, n):
        """Have this consumer's part of dS^T copied to memory, unless the tile is listed nowhere.
        The copy before has been read once all threads have met: its place is free.
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
    def consume(maps, smem, me, dk, dv, lse2, ds, extras, sizes, scales):
        """Equations (1) to (6) for 64 keys of each work item and all its tiles of queries, the last
        tile first.
        """
        # registers of each thread
        sT = cuda.local.array(SCORES, f32)  # fragment of S^T, then of P^T
        dpT = cuda.local.array(SCORES, f32)  # of dP^T, then of dS^T
        pT = cuda.local.array(PAIRS, u32)  # of P^T, two elements of 16 bits each
        dk_acc = cuda.local.array(OUTPUTS_K, f32)  # of dK
        dv_acc = cuda.local.array(OUTPUTS_V, f32)  # of dV
        mine, turn, n = u32(me * MINE), u32(0), u32(0)
        while True:
            pipeline.wait_ready(smem, WORK, turn)
            count = pipeline.uniform(pipeline.read(smem, WORK, turn, WORD.count))
            if count == END:
                break
            k_rows = wgmma.descriptor(pipeline.tile(smem, K, turn) + mine, u32(0))
            v_rows = wgmma.descriptor(pipeline.tile(smem, V, turn) + mine, u32(0))
            zero_k(dk_acc)
            zero_v(dv_acc)
            step = begin_item(smem, turn, me, n, sT, k_rows, i32(sizes.group))
            make_room(smem, turn, me)
            end = u32(n + u32(pipeline.read(smem, WORK, turn, BACKWARD_TILES)))
            while n != end:
                q_rows, do_rows = pipeline.tile(smem, Q, n), pipeline.tile(smem, DO, n)
                if not AHEAD:  # (1) S^T = K Q^T
                    wait_q(smem, turn, me, n, step)
                    start_scores(smem, me, n, sT, k_rows)
                wait_do(smem, turn, me, n, step)
                # (4) dP^T = V dO^T
                start_dp(dpT, v_rows, wgmma.descriptor(do_rows, u32(0)))
                if not AHEAD:
                    ptx.wgmma_wait(sT, sT, ONE, SCORES, NONE)
                    release_before(smem, n)
                # (2) P^T = exp(S^T - lse), in the place of S^T
                recompute_p(sT, smem, turn, me, n, step, scales)
                ptx.wgmma_wait(dpT, dpT, NONE, SCORES, NONE)
                if AHEAD:
                    release_before(smem, n)
                if u32(n + u32(1)) == end:
                    pipeline.release_group(smem, V, turn)
                # (5) dS^T = P^T * (dP^T - delta), in the place of dP^T
                own_ds = u32(smem + u32(DS) + mine + n % u32(2) * u32(DS_BYTES))
                for chunk in range(0, SCORES // 4, 2):
                    differentiate(dpT, sT, smem, me, n, chunk)
                    put_ds(own_ds, dpT, ONES, chunk)
                # (3) dV = dV + P^T dO
                pack(pT, sT)
                start_dv(dv_acc, pT, wgmma.descriptor(do_rows, u32(Q_PANEL)))
                ptx.fence_proxy_async()
                if AHEAD:
                    start_next(smem, turn, me, n, end, step, sT, k_rows)
                store_ds(smem, me, ds, n)
                # (6) dK = dK + dS^T Q
                dsT_rows = wgmma.descriptor(own_ds, u32(0))
                start_dk(dk_acc, dsT_rows, wgmma.descriptor(q_rows, u32(Q_PANEL)))
                ptx.wgmma_wait(dv_acc, sT, ONE, OUTPUTS_V, NEXT)
                pipeline.release_group(smem, DO, n)
                n = u32(n + 1)
            finish(maps, smem, turn, me, dk_acc, dv_acc, scales.scale)
            turn = u32(turn + 1)
        if cuda.threadIdx.x % WARP_GROUP == 0:
            ptx.bulk_wait()

    return build_kernel(head_dim, head_dim_v, banded, to_map, ordered, options, tile, consume)
