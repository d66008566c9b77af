"""dQ of the backward pass from tiles of dS^T in memory (`numba_flash.cuda.sm80.backward.ds_slots`):
FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2, line 15, dQ = dS K, in the order of the keys.

One block of threads per block of queries has its rows of dQ in registers, and goes through the
blocks of keys that these see, some of whose tiles are on their way ahead.
"""

from typing import NamedTuple

from numba_flash import mask
from numba_flash.cuda import ptx
from numba_flash.cuda.number import array, index
from numba_flash.cuda.runtime.lang import cuda, f32, i32, i64, inline, once, types, u32, u64
from numba_flash.cuda.score import fragment, softmax
from numba_flash.cuda.sm80.backward.ds_slots import CHUNK_BYTES
from numba_flash.cuda.sm80.load import build_load, build_store
from numba_flash.cuda.sm80.operands import products
from numba_flash.cuda.sm80.tiles import pitch


class Seen(NamedTuple):
    """Keys that a row block sees, and the address of its first slot; nothing if start >= stop."""

    start: int
    stop: int
    slots: int


@once
def build_load_ds(tile):
    """``load(target, upper, lower, block)``: dS^T of a block of keys and two row blocks, as `Seen`,
    side by side into shared memory; zeros where there is none.
    """
    SLOT, THREADS, BLOCK_N = tile.of_slots, tile.threads, tile.of_slots.block_n
    CHUNKS, PITCH = 2 * SLOT.block_m // CHUNK_BYTES, pitch(tile.block_m)
    SLOT_BYTES, STEP = 2 * SLOT.block_m * BLOCK_N, THREADS // CHUNKS
    assert tile.block_m == 2 * SLOT.block_m
    assert BLOCK_N % STEP == 0

    @inline
    def load_half(target, seen, block):
        row, chunk = i32(cuda.threadIdx.x // CHUNKS), i32(cuda.threadIdx.x % CHUNKS)
        first = i32(block * BLOCK_N)
        some = seen.start < seen.stop and first < seen.stop and first + BLOCK_N > seen.start
        source = u64(seen.slots + u64(i64(block) * SLOT_BYTES))
        source = u64(source + u64(u32(cuda.threadIdx.x * CHUNK_BYTES)))
        to = u32(target + u32(row * PITCH + chunk * CHUNK_BYTES))
        for step in range(BLOCK_N // STEP):
            at = u64(source + u64(step * THREADS * CHUNK_BYTES))
            ptx.copy16(u32(to + u32(step * STEP * PITCH)), at, u32(1) if some else u32(0))

    @inline
    def load(target, upper, lower, block):
        load_half(target, upper, block)
        load_half(u32(target + u32(CHUNKS * CHUNK_BYTES)), lower, block)

    return load


def build(dtype, shape, tile):
    """Kernel ``dq_sm80(slots, k, dq, low, high, scale)`` with its signature and compile options.

    slots : as `numba_flash.cuda.sm80.backward.ds_slots` says.
    k, dq : (b0, b1, heads, n, head_dim), 16 bits.
    """
    SLOT, THREADS, STAGES, BLOCK_M = tile.of_slots, tile.threads, tile.stages, tile.block_m
    BLOCK_N, HALF, D = SLOT.block_n, SLOT.block_m, SLOT.padded(shape.head_dim)
    WARPS_N, ROWS, COLUMNS = tile.warps_n, BLOCK_M // tile.warps_m, D // tile.warps_n
    PITCH, PITCH_DS, DS = pitch(D), pitch(BLOCK_M), BLOCK_N * pitch(D)
    STAGE = DS + BLOCK_N * PITCH_DS
    COUNT, HELD, AHEAD = ROWS * COLUMNS // 32, ROWS // 8, STAGES - 1
    WARP_ROWS = BLOCK_M // tile.warps
    kind = products.Kind(dtype == "bfloat16", False)
    sizes = ROWS // 16, COLUMNS, BLOCK_N, PITCH_DS, PITCH
    ds_k = products.build_tn(kind, *sizes, fresh=False)
    place, _ = fragment.build_key_rows(SLOT.m_tiles)
    load_k = build_load(BLOCK_N, shape.head_dim, THREADS, place, True, D)
    load_ds = build_load_ds(tile)
    put = products.build_put(ROWS // 16, COLUMNS, PITCH, *kind)
    store = build_store(WARP_ROWS, shape.head_dim, shape.wide, None, D)
    zero, _ = softmax.build_zero(COUNT)
    wait = ptx.copy_wait_but(STAGES - 2)

    @inline
    def seen_by(first, nq, nk, low, high, slots):
        """Of the row block that begins there."""
        start, stop = mask.kv_range(first, min(i32(first + HALF), nq), nk, low, high)
        return Seen(i32(start), i32(stop) if first < nq else i32(start), slots)

    @inline
    def load(smem, slot, k_head, nk, upper, lower, block, end):
        """A tile of K and dS^T, if there is one, into a slot."""
        if block < end:
            to = u32(smem + u32(slot * STAGE))
            load_k(to, k_head, i32(block * BLOCK_N), nk)
            load_ds(u32(to + u32(DS)), upper, lower, block)
        ptx.copy_commit()

    def dq_sm80(slots, k, dq, low, high, scale):
        smem = ptx.shared_address(cuda.shared.array(0, types.uint8, 16))
        acc = cuda.local.array(COUNT, f32)  # registers: fragment of dQ
        factor = cuda.local.array(HELD, f32)
        nq, nk, heads = i32(dq.shape[3]), i32(k.shape[3]), i32(dq.shape[2])
        low, high = i32(low), i32(high)
        blocks = i32(u32(i32(nq + (BLOCK_M - 1))) // u32(BLOCK_M))
        number = i32(u32(cuda.blockIdx.x) // u32(blocks))
        row0 = i32(i32(blocks - 1 - i32(cuda.blockIdx.x) % blocks) * BLOCK_M)  # most keys first
        head, batch = i32(number % heads), i32(number // heads)
        b0, b1 = i32(batch // i32(dq.shape[1])), i32(batch % i32(dq.shape[1]))
        kv_head = i32(u32(head) // u32(u32(heads) // u32(k.shape[2])))
        k_head = k[index(b0), index(b1), index(kv_head)]
        halves = i32(u32(i32(nq + (HALF - 1))) // u32(HALF))  # row blocks of a head
        base = i64(i64(number) * i64(halves) + i64(row0 // HALF))
        of_row_block = i64(slots.shape[4]) * 4
        first_slots = u64(ptx.global_address(slots) + u64(base * of_row_block))
        upper = seen_by(row0, nq, nk, low, high, first_slots)
        lower = seen_by(i32(row0 + HALF), nq, nk, low, high, u64(first_slots + u64(of_row_block)))
        start, stop = mask.kv_range(row0, min(i32(row0 + BLOCK_M), nq), nk, low, high)
        block, end = i32(u32(start) // u32(BLOCK_N)), i32(0)
        if start < stop:
            end = i32(u32(i32(stop) + (BLOCK_N - 1)) // u32(BLOCK_N))
        warp = i32(cuda.threadIdx.x // 32)
        row, column = i32(warp // WARPS_N * ROWS), i32(warp % WARPS_N * COLUMNS)
        zero(acc)
        for ahead in range(AHEAD):
            load(smem, i32(ahead), k_head, nk, upper, lower, i32(block + ahead), end)
        slot = i32(0)
        while block < end:
            wait()
            cuda.syncthreads()  # this tile is there; the one before has been read
            before = i32(slot + AHEAD) if slot == 0 else i32(slot - 1)
            load(smem, before, k_head, nk, upper, lower, i32(block + AHEAD), end)
            # (7) dQ = dQ + dS K
            at = u32(smem + u32(slot * STAGE))
            ds_k(acc, u32(at + u32(DS + 2 * row)), u32(at + u32(2 * column)))
            block, slot = i32(block + 1), i32(slot + 1)
            slot = i32(0) if slot == STAGES else slot
        for r in range(HELD):
            factor[r] = scale
        ptx.copy_wait()
        cuda.syncthreads()  # the last tile has been read
        put(u32(smem + u32(row * PITCH + 2 * column)), acc, factor)
        cuda.syncthreads()  # all rows are there
        mine = i32(warp * WARP_ROWS)
        dq_head = dq[index(b0), index(b1), index(head)]
        store(u32(smem + u32(mine * PITCH)), dq_head, i32(row0 + mine), nq)

    signature = types.void(array(f32, 5), *[array(types.uint16, 5)] * 2, i64, i64, f32)
    return dq_sm80, signature, {"launch_bounds": (THREADS, 1)}
