"""Who may touch which shared memory when: rings of tiles between the producer and the consumers, and turns among the consumers.

A ring is a tuple (offset of its slots, bytes of a slot, slots, offsets of its mbarriers "ready" and "free"), relative to the base of shared
memory. Its n-th tile goes into slot ``n % slots``. "ready": the producer, or the copy engine for it, has filled the slot. "free": the
consumers have read it. An mbarrier completes one phase per tile; a waiter names the parity of the phase it waits for.
"""

import numpy as np
from numba import cuda
from numba.cuda import types

from numba_flash.cuda import ptx, swizzle

MBARRIER_BYTES = 8
TILES, SLOT_BYTES, SLOTS, READY, FREE = range(5)
FIRST_TURN = 1  # named barrier of the first consumer's turn; 0 is that of syncthreads
WARP_GROUP = 128
ALL_LANES = 0xFFFFFFFF


def one_type(numbers) -> tuple:
    """The same integers, none of them a literal to Numba, which would compile every function anew for each; the assembler folds them."""
    return tuple(map(np.uint32, numbers))


@cuda.jit(device=True, forceinline=True)
def uniform(x):
    """The same number (int32), but the assembler can tell that it is the same in the whole warp."""
    return types.int32(cuda.shfl_sync(ALL_LANES, x, 0))


@cuda.jit(device=True, forceinline=True)
def tile(smem, ring, n):
    """Address of the n-th tile."""
    return types.uint32(smem + types.uint32(ring[TILES]) + n % types.uint32(ring[SLOTS]) * types.uint32(ring[SLOT_BYTES]))


@cuda.jit(device=True, forceinline=True)
def mbarrier(smem, ring, event, n):
    """Address of the mbarrier of an event (READY, FREE) of the n-th tile's slot."""
    return types.uint32(smem + types.uint32(ring[event]) + n % types.uint32(ring[SLOTS]) * types.uint32(MBARRIER_BYTES))


@cuda.jit(device=True, forceinline=True)
def wait(smem, ring, event, n, before):
    """Until the event has happened to the n-th tile, or, with `before` = 1, to the one before it in the slot (if there was one)."""
    address = mbarrier(smem, ring, event, n)
    parity = types.uint32((n // types.uint32(ring[SLOTS]) + types.uint32(before)) % types.uint32(2))
    while ptx.mbarrier_try_wait(address, parity) == types.uint32(0):
        pass


@cuda.jit(device=True, forceinline=True)
def wait_ready(smem, ring, n):
    """Until the n-th tile is there."""
    wait(smem, ring, READY, n, 0)


@cuda.jit(device=True, forceinline=True)
def release(smem, ring, n):
    """One arrival of this warp group: its products have read the tile (the caller has waited for them)."""
    if cuda.threadIdx.x % WARP_GROUP == 0:
        ptx.mbarrier_arrive(mbarrier(smem, ring, FREE, n))


@cuda.jit(device=True, forceinline=True)
def leave(smem, ring, n):
    """One arrival of this thread: it has read the slot."""
    ptx.mbarrier_arrive(mbarrier(smem, ring, FREE, n))


@cuda.jit(device=True, forceinline=True)
def publish(smem, ring, n):
    """What this thread has written into the slot is ready."""
    ptx.mbarrier_arrive(mbarrier(smem, ring, READY, n))


@cuda.jit(device=True, forceinline=True)
def read(smem, ring, n, word):
    """Word (int32) of a slot that is ready."""
    return ptx.load_shared(types.uint32(tile(smem, ring, n) + types.uint32(4 * word)))


@cuda.jit(device=True, forceinline=True)
def write(smem, ring, n, word, value):
    """Set a word of a slot that is free."""
    ptx.store_shared(types.uint32(tile(smem, ring, n) + types.uint32(4 * word)), types.int32(value))


@cuda.jit(device=True, forceinline=True)
def wait_free(smem, ring, n):
    """Until the slot of the n-th tile has been read by everyone who read what it held before."""
    wait(smem, ring, FREE, n, 1)


@cuda.jit(device=True, forceinline=True)
def initialise(smem, ring, fills, releases):
    """Initialise the mbarriers of a ring (by one thread): `fills` arrivals make a slot ready, `releases` make it free."""
    for slot in range(ring[SLOTS]):
        ptx.mbarrier_init(mbarrier(smem, ring, READY, types.uint32(slot)), types.uint32(fills))
        ptx.mbarrier_init(mbarrier(smem, ring, FREE, types.uint32(slot)), types.uint32(releases))


@cuda.jit(device=True, forceinline=True)
def await_turn(consumer):
    """Until the warp group before this one has handed over the tensor cores."""
    ptx.barrier_sync(types.uint32(FIRST_TURN + consumer), types.uint32(2 * WARP_GROUP))


@cuda.jit(device=True, forceinline=True)
def pass_turn(consumer):
    """Hand the tensor cores to a warp group, without waiting."""
    ptx.barrier_arrive(types.uint32(FIRST_TURN + consumer), types.uint32(2 * WARP_GROUP))


@cuda.jit(device=True, forceinline=True)
def meet_warp_group(consumer, consumers):
    """Until all threads of this warp group are here."""
    ptx.barrier_sync(types.uint32(FIRST_TURN + consumers + consumer), types.uint32(WARP_GROUP))


@cuda.jit(device=True, forceinline=True)
def meet_consumers(consumers):
    """Until all threads of all consumers are here."""
    ptx.barrier_sync(types.uint32(FIRST_TURN), types.uint32(consumers * WARP_GROUP))


def build_fill(ring, columns, rows, more=0):
    """``fill(tensor_map, smem, n, where)``: have the n-th tile of a ring fetched into its slot, which is free (by one thread).

    A tile is `rows` rows in panels of 64 columns; `where` is (row, head, b1, b0). What lies outside the array becomes 0. The slot is ready
    when as many bytes `more` have arrived, which the caller sends for.
    """
    RING, PANELS, PANEL, PANEL_BYTES = ring, swizzle.panels(columns), swizzle.PANEL, swizzle.panel_bytes(rows)
    BYTES, u32, i32 = PANELS * PANEL_BYTES + more, types.uint32, types.int32

    @cuda.jit(device=True, forceinline=True)
    def fill(tensor_map, smem, n, where):
        ready, to = mbarrier(smem, RING, READY, n), tile(smem, RING, n)
        ptx.mbarrier_expect(ready, u32(BYTES))
        for panel in range(PANELS):
            row, head, b1, b0 = i32(where[0]), i32(where[1]), i32(where[2]), i32(where[3])
            ptx.tensor_load(u32(to + u32(panel * PANEL_BYTES)), tensor_map, i32(panel * PANEL), row, head, b1, b0, ready)

    return fill


def build_clear_tail(columns, rows):
    """``clear_tail(smem, ring, n, keys, consumer, consumers)``: zeros beyond the first `keys` rows of the n-th V tile, before it is used.

    What lies beyond the keys may be NaN, and 0 * NaN is not 0. Every warp group clears for itself; all write the same zeros.
    """
    ROWS, PANELS, PANEL_BYTES, CHUNKS = rows, swizzle.panels(columns), swizzle.panel_bytes(rows), swizzle.ROW_BYTES // 16
    u32 = types.uint32

    @cuda.jit(device=True, forceinline=True)
    def clear_tail(smem, ring, n, keys, consumer, consumers):
        if keys < ROWS:
            wait_ready(smem, ring, n)
            for panel in range(PANELS):
                for chunk in range(max(keys, 0) * CHUNKS + cuda.threadIdx.x % WARP_GROUP, ROWS * CHUNKS, WARP_GROUP):
                    ptx.store_shared_zero16(u32(tile(smem, ring, n) + u32(panel * PANEL_BYTES) + u32(chunk * 16)))
            ptx.fence_proxy_async()
            meet_warp_group(consumer, consumers)  # the zeros are there for the products of the whole warp group

    return clear_tail
