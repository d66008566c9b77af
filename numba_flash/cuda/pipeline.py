"""Who may touch which shared memory when: rings of tiles between the data movers and the consumers, and turns among the consumers.

A ring is a tuple (offset of its tiles, bytes of a slot, slots, offsets of its mbarriers "ready", "free" and "full", offset of its records),
relative to the base of shared memory. Its n-th tile goes into slot ``n % slots``. "ready": the copy engine has filled the slot. "free": everyone has read it. "full": all
consumers have put their results into it. An mbarrier completes one phase per tile; a waiter names the parity of the phase it waits for.
"""

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import mma, ptx

MBARRIER_BYTES, RECORD_BYTES = 8, 64
TILES, SLOT_BYTES, SLOTS, READY, FREE, FULL, RECORDS = range(7)
FIRST_TURN = 1  # named barrier of the first consumer's turn; 0 is that of syncthreads
WARP_GROUP = 128
ALL_LANES = 0xFFFFFFFF


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
    """Address of the mbarrier of an event (READY, FREE, FULL) of the n-th tile's slot."""
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
    """One arrival of this thread: it has read the tile and its record."""
    ptx.mbarrier_arrive(mbarrier(smem, ring, FREE, n))


@cuda.jit(device=True, forceinline=True)
def hand_over(smem, ring, n):
    """One arrival of this thread: what it has written into the slot may be stored."""
    ptx.fence_proxy_async()  # the copy engine sees it
    ptx.mbarrier_arrive(mbarrier(smem, ring, FULL, n))


@cuda.jit(device=True, forceinline=True)
def record(smem, ring, n, word):
    """Address of a word (4 bytes) of what is written beside the n-th tile."""
    return types.uint32(smem + types.uint32(ring[RECORDS]) + n % types.uint32(ring[SLOTS]) * types.uint32(RECORD_BYTES) + types.uint32(4 * word))


@cuda.jit(device=True, forceinline=True)
def read(smem, ring, n, word):
    """Word of the n-th tile's record, once the tile is ready."""
    return ptx.load_shared(record(smem, ring, n, word))


@cuda.jit(device=True, forceinline=True)
def write(smem, ring, n, word, value):
    """Set a word of the n-th tile's record, once the slot is free and before the tile is ready."""
    ptx.store_shared(record(smem, ring, n, word), types.int32(value))


@cuda.jit(device=True, forceinline=True)
def wait_free(smem, ring, n):
    """Until the slot of the n-th tile has been read by everyone who read what it held before."""
    wait(smem, ring, FREE, n, 1)


@cuda.jit(device=True, forceinline=True)
def initialise(smem, ring, consumers, releases):
    """Initialise the mbarriers of a ring (by one thread): arrivals that complete a phase."""
    for slot in range(ring[SLOTS]):
        ptx.mbarrier_init(mbarrier(smem, ring, READY, types.uint32(slot)), types.uint32(1))
        ptx.mbarrier_init(mbarrier(smem, ring, FREE, types.uint32(slot)), types.uint32(releases))
        ptx.mbarrier_init(mbarrier(smem, ring, FULL, types.uint32(slot)), types.uint32(consumers * WARP_GROUP))


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


def build_fill(ring, columns, rows):
    """``fill(tensor_map, smem, n, where)``: have the n-th tile of a ring fetched into its slot, which is free (by one thread).

    A tile is `rows` rows in panels of 64 columns; `where` is (row, head, b1, b0). What lies outside the array becomes 0.
    """
    RING, PANELS, PANEL, PANEL_BYTES = ring, mma.panels(columns), mma.PANEL, mma.panel_bytes(rows)
    BYTES, u32, i32 = PANELS * PANEL_BYTES, types.uint32, types.int32

    @cuda.jit(device=True, forceinline=True)
    def fill(tensor_map, smem, n, where):
        ready, to = mbarrier(smem, RING, READY, n), tile(smem, RING, n)
        ptx.mbarrier_expect(ready, u32(BYTES))
        for panel in range(PANELS):
            row, head, b1, b0 = i32(where[0]), i32(where[1]), i32(where[2]), i32(where[3])
            ptx.tensor_load(u32(to + u32(panel * PANEL_BYTES)), tensor_map, i32(panel * PANEL), row, head, b1, b0, ready)

    return fill


def build_drain(ring, columns, rows):
    """``drain(tensor_map, smem, n, where)``: store the n-th slot's results when they are all there, and free it (by one thread)."""
    RING, PANELS, PANEL, PANEL_BYTES = ring, mma.panels(columns), mma.PANEL, mma.panel_bytes(rows)
    u32, i32 = types.uint32, types.int32

    @cuda.jit(device=True, forceinline=True)
    def drain(tensor_map, smem, n, where):
        wait(smem, RING, FULL, n, 0)
        for panel in range(PANELS):
            row, head, b1, b0 = i32(where[0]), i32(where[1]), i32(where[2]), i32(where[3])
            ptx.tensor_store(u32(tile(smem, RING, n) + u32(panel * PANEL_BYTES)), tensor_map, i32(panel * PANEL), row, head, b1, b0)
        ptx.bulk_commit()
        ptx.bulk_wait_read()  # the slot may be filled again
        ptx.mbarrier_arrive(mbarrier(smem, RING, FREE, n))

    return drain


def build_clear_tail(columns, rows):
    """``clear_tail(tile, first, consumer, consumers)``: zeros from row `first` of a V tile on, before this warp group's products read them.

    What lies beyond the keys may be NaN, and 0 * NaN is not 0. Every warp group clears for itself; all write the same zeros.
    """
    ROWS, PANELS, PANEL_BYTES, CHUNKS = rows, mma.panels(columns), mma.panel_bytes(rows), mma.ROW_BYTES // 16
    u32 = types.uint32

    @cuda.jit(device=True, forceinline=True)
    def clear_tail(tile, first, consumer, consumers):
        thread = cuda.threadIdx.x % WARP_GROUP
        for panel in range(PANELS):
            for chunk in range(first * CHUNKS + thread, ROWS * CHUNKS, WARP_GROUP):
                ptx.store_shared_zero16(u32(tile + u32(panel * PANEL_BYTES) + u32(chunk * 16)))
        ptx.fence_proxy_async()
        meet_warp_group(consumer, consumers)  # the zeros are there for the products of the whole warp group

    return clear_tail
