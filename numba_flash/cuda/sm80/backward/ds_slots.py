"""dS^T of the backward pass in memory, for `numba_flash.cuda.sm80.backward.dq`: a block of keys
leaves each tile of it in a slot of its own, as it lies in shared memory, row by row.

A tile of dQ has so many more bytes than the tile of dS that it is made from, if there are many
columns, that adding it up in memory takes longer than its products; and nobody waits for turns.
"""

from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.runtime.lang import cuda, i32, i64, inline, once, u32, u64
from numba_flash.cuda.sm80.backward.sum_dq import Sums

CHUNK_BYTES = 16


class Slot(NamedTuple):
    """Where a tile goes: the number of its row block, and of the block of keys in its head."""

    row_block: int
    block: int


@once
def build(shape, tile):
    """`Sums`, functions of a block of keys that adds nothing up, and waits for nobody:

    ``add(ds, k, slots, to, factors)``: a tile of dS^T from shared memory to its slot.

    slots : float32 (b0, b1, heads, row blocks, blocks of keys * elements of a tile / 2).
    """
    BLOCK_N, THREADS, PITCH = tile.block_n, tile.threads, tile.layout(*shape[:2]).pitch_ds
    CHUNKS, SLOT_BYTES = 2 * tile.block_m // CHUNK_BYTES, 2 * tile.block_m * tile.block_n
    STEP, WORDS = THREADS // CHUNKS, SLOT_BYTES // 4  # STEP: rows that are stored at a time
    assert THREADS % CHUNKS == 0
    assert BLOCK_N % STEP == 0

    @inline
    def slot_of(item, walk, following, sizes, extras):
        return Slot(i32(walk.base + walk.at), i32(item.row0 // BLOCK_N))

    @inline
    def nothing(flags, to):
        pass

    @inline
    def put(ds, k, slots, to, factors):
        row, chunk = i32(cuda.threadIdx.x // CHUNKS), i32(cuda.threadIdx.x % CHUNKS)
        blocks = i64(slots.shape[4] // WORDS)
        slot = u64(u64(i64(to.row_block) * blocks + i64(to.block)) * u64(SLOT_BYTES))
        target = u64(ptx.global_address(slots) + slot)
        target = u64(target + u64(u32(cuda.threadIdx.x * CHUNK_BYTES)))
        source = u32(ds + u32(row * PITCH + chunk * CHUNK_BYTES))
        for step in range(BLOCK_N // STEP):
            words = ptx.load_shared_words(u32(source + u32(step * STEP * PITCH)))
            ptx.store_global(u64(target + u64(step * THREADS * CHUNK_BYTES)), words)

    return Sums(slot_of, nothing, put, nothing)
