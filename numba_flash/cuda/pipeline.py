"""Who may touch which shared memory when: rings of tiles between the producer and the consumers, and turns among the consumers.

A ring has STAGES slots. The n-th tile goes into slot ``n % STAGES``; two mbarriers per slot say that the copy engine has filled it ("full") and
that all consumers have read it ("empty"). Each completes one phase per tile, and a waiter names the parity of the phase it waits for.
"""

from numba import cuda
from numba.cuda import types

from numba_flash.cuda import mma, ptx

MBARRIER_BYTES = 8
FIRST_TURN = 1  # named barrier of the first consumer's turn; 0 is that of syncthreads
WARP_GROUP = 128


@cuda.jit(device=True)
def barrier(ring, slot):
    """Address of a slot's mbarrier; `ring` is that of slot 0."""
    return types.uint32(ring + types.uint32(MBARRIER_BYTES) * slot)


@cuda.jit(device=True)
def wait(address, parity):
    """Until the phase of this parity is complete."""
    while ptx.mbarrier_try_wait(address, types.uint32(parity)) == types.uint32(0):
        pass


@cuda.jit(device=True)
def release(address):
    """One arrival of this warp group: its products have read the slot (the caller has waited for them)."""
    if cuda.threadIdx.x % WARP_GROUP == 0:
        ptx.mbarrier_arrive(address)


@cuda.jit(device=True)
def initialise(first, slots, arrivals):
    """Initialise the mbarriers of a ring (by one thread)."""
    for slot in range(slots):
        ptx.mbarrier_init(barrier(first, types.uint32(slot)), types.uint32(arrivals))


@cuda.jit(device=True)
def await_turn(consumer):
    """Until the warp group before this one has handed over the tensor cores."""
    ptx.barrier_sync(types.uint32(FIRST_TURN + consumer), types.uint32(2 * WARP_GROUP))


@cuda.jit(device=True)
def pass_turn(consumer):
    """Hand the tensor cores to a warp group, without waiting."""
    ptx.barrier_arrive(types.uint32(FIRST_TURN + consumer), types.uint32(2 * WARP_GROUP))


@cuda.jit(device=True)
def meet_warp_group(consumer, consumers):
    """Until all threads of this warp group are here."""
    ptx.barrier_sync(types.uint32(FIRST_TURN + consumers + consumer), types.uint32(WARP_GROUP))


def build_fill(columns, rows, stages):
    """``fill(tensor_map, tiles, ready, free, n, where)``: have the n-th tile of a ring fetched, once its slot is free (by one thread).

    A tile is `rows` rows in panels of 64 columns; `where` is (row, head, b1, b0). What lies outside the array becomes 0.
    """
    PANELS, PANEL, PANEL_BYTES, STAGES = mma.panels(columns), mma.PANEL, mma.panel_bytes(rows), stages
    BYTES, u32, i32 = PANELS * PANEL_BYTES, types.uint32, types.int32

    @cuda.jit(device=True, forceinline=True)
    def fill(tensor_map, tiles, ready, free, n, where):
        slot, parity = n % u32(STAGES), n // u32(STAGES) % u32(2)
        wait(barrier(free, slot), parity ^ u32(1))  # the consumers have read what lay in the slot
        ptx.mbarrier_expect(barrier(ready, slot), u32(BYTES))
        for panel in range(PANELS):
            address = u32(tiles + u32(slot * u32(BYTES)) + u32(panel * PANEL_BYTES))
            ptx.tensor_load(
                address, tensor_map, i32(panel * PANEL), i32(where[0]), i32(where[1]), i32(where[2]), i32(where[3]), barrier(ready, slot)
            )

    return fill


def build_clear_tail(columns, rows):
    """``clear_tail(tile, first, consumer, consumers)``: zeros from row `first` of a V tile on, before this warp group's products read them.

    What lies beyond the keys may be NaN, and 0 * NaN is not 0. Every warp group clears for itself; all write the same zeros.
    """
    ROWS, PANELS, PANEL_BYTES, CHUNKS = rows, mma.panels(columns), mma.panel_bytes(rows), mma.ROW_BYTES // 16
    u32 = types.uint32

    @cuda.jit(device=True)
    def clear_tail(tile, first, consumer, consumers):
        thread = cuda.threadIdx.x % WARP_GROUP
        for panel in range(PANELS):
            for chunk in range(first * CHUNKS + thread, ROWS * CHUNKS, WARP_GROUP):
                ptx.store_shared_zero16(u32(tile + u32(panel * PANEL_BYTES) + u32(chunk * 16)))
        ptx.fence_proxy_async()
        meet_warp_group(consumer, consumers)  # the zeros are there for the products of the whole warp group

    return clear_tail
