"""Who may touch which shared memory when: rings of tiles between the producer and the consumers,
and turns among the consumers.

The n-th tile of a `numba_flash.cuda.sm90.rings.Ring` goes into slot ``n % slots``; offsets are
relative to the base of shared memory. "ready": the producer, or the copy engine for it, has filled
the slot. "free": the consumers have read it. An mbarrier completes one phase per tile; a waiter
names the parity of the phase it waits for.
"""

from enum import IntEnum
from typing import NamedTuple

from numba_flash.cuda import ptx
from numba_flash.cuda.number import index
from numba_flash.cuda.runtime.lang import cuda, i32, inline, once, types, u32
from numba_flash.cuda.score import swizzle
from numba_flash.cuda.score.fragment import ALL_LANES
from numba_flash.cuda.sm90.arguments import one_type
from numba_flash.cuda.sm90.rings import MBARRIER_BYTES
from numba_flash.cuda.sm90.tiles import WARP_GROUP


class Barrier(IntEnum):
    """Named barriers, by what is waited for and by whom."""

    BLOCK = 0  # all threads of the block: `cuda.syncthreads`
    PING_PONG = 1  # and the consumer: its turn at starting products, handed over by the one before
    WARP_GROUP = 4  # and the consumer: all threads of its warp group
    CONSUMERS = 7  # all threads of all consumers


WARP = 32
PING_PONG, GROUP, CONSUMERS = (
    int(Barrier.PING_PONG),
    int(Barrier.WARP_GROUP),
    int(Barrier.CONSUMERS),
)


class TilePlace(NamedTuple):
    """Where in an array a tile begins; all are int32."""

    column: int
    row: int
    head: int
    b1: int
    b0: int


@inline
def uniform(x):
    """The same number (int32), but the assembler can tell that it is the same in the whole warp."""
    return i32(cuda.shfl_sync(ALL_LANES, x, 0))


@inline
def shared_base(alignment):
    """Address of the block's dynamic shared memory, aligned."""
    base = ptx.shared_address(cuda.shared.array(0, types.uint8))
    return u32((base + u32(alignment - 1)) & u32(-alignment & 0xFFFFFFFF))


@inline
def tile(smem, ring, n):
    """Address of the n-th tile."""
    return u32(smem + u32(ring.tiles) + n % u32(ring.slots) * u32(ring.slot_bytes))


@inline
def mbarrier(smem, ring, barriers, n):
    """Address of the n-th tile's among the `barriers` of an event, ``ring.ready`` or ``.free``."""
    return u32(smem + u32(barriers) + n % u32(ring.slots) * u32(MBARRIER_BYTES))


@inline
def wait(smem, ring, barriers, n, before):
    """Until the event has happened to the n-th tile, or, with `before` = 1, to the one before it in
    the slot (if there was one).
    """
    address = mbarrier(smem, ring, barriers, n)
    parity = u32((n // u32(ring.slots) + u32(before)) % u32(2))
    while ptx.mbarrier_try_wait(address, parity) == u32(0):
        pass


@inline
def wait_ready(smem, ring, n):
    """Until the n-th tile is there."""
    wait(smem, ring, ring.ready, n, 0)


@inline
def is_ready(smem, ring, n):
    """Whether the n-th tile is there: 1 or 0."""
    parity = u32((n // u32(ring.slots)) % u32(2))
    return i32(ptx.mbarrier_test_wait(mbarrier(smem, ring, ring.ready, n), parity))


@inline
def wait_free(smem, ring, n):
    """Until the slot of the n-th tile has been read by everyone who read what it held before."""
    wait(smem, ring, ring.free, n, 1)


@inline
def commit(smem, ring, n):
    """What this thread has written into the slot is ready."""
    ptx.mbarrier_arrive(mbarrier(smem, ring, ring.ready, n))


@inline
def release(smem, ring, n):
    """One arrival of this thread: it has read the slot."""
    ptx.mbarrier_arrive(mbarrier(smem, ring, ring.free, n))


@inline
def release_group(smem, ring, n):
    """One arrival of this warp group: its products have read the tile (the caller has waited for
    them).
    """
    if cuda.threadIdx.x % WARP_GROUP == 0:
        ptx.mbarrier_arrive(mbarrier(smem, ring, ring.free, n))


@inline
def release_warps(smem, ring, n):
    """One arrival of each warp of this group: its lanes have read the slot, too."""
    cuda.syncwarp()
    if cuda.threadIdx.x % WARP == 0:
        ptx.mbarrier_arrive(mbarrier(smem, ring, ring.free, n))


@inline
def read(smem, ring, n, word):
    """Word (int32) of a slot that is ready."""
    return ptx.load_shared(u32(tile(smem, ring, n) + u32(4 * word)))


@inline
def write(smem, ring, n, word, value):
    """Set a word of a slot that is free."""
    ptx.store_shared(u32(tile(smem, ring, n) + u32(4 * word)), i32(value))


@inline
def initialise(smem, ring, fills, releases):
    """Initialise the mbarriers of a ring (by one thread): `fills` arrivals make a slot ready,
    `releases` make it free.
    """
    for slot in range(ring.slots):
        ptx.mbarrier_init(mbarrier(smem, ring, ring.ready, u32(slot)), u32(fills))
        ptx.mbarrier_init(mbarrier(smem, ring, ring.free, u32(slot)), u32(releases))


@inline
def await_ping_pong(consumer):
    """Until the warp group before this one has handed over the tensor cores."""
    ptx.barrier_sync(u32(PING_PONG + consumer), u32(2 * WARP_GROUP))


@inline
def pass_ping_pong(consumer):
    """Hand the tensor cores to a warp group, without waiting."""
    ptx.barrier_arrive(u32(PING_PONG + consumer), u32(2 * WARP_GROUP))


@inline
def meet_warp_group(consumer):
    """Until all threads of this warp group are here."""
    ptx.barrier_sync(u32(GROUP + consumer), u32(WARP_GROUP))


@inline
def any_of_warp_group(consumer, word):
    """True if a thread of this warp group, all of which meet here, has a word that is not 0."""
    found = ptx.barrier_any(u32(consumer + GROUP), u32(WARP_GROUP), u32(word))
    return found != u32(0)


@inline
def meet_consumers(consumers):
    """Until all threads of all consumers are here."""
    ptx.barrier_sync(u32(CONSUMERS), u32(consumers * WARP_GROUP))


@once
def build_load(ring, columns, rows, more=0, planes=1, uses=None):
    """``load(tensor_map, smem, n, place)``: have the n-th tile of a ring fetched into its slot,
    which is free (by one thread).

    A tile is `rows` rows in panels of 64 columns. What lies outside the array becomes 0. The slot
    is ready when as many bytes `more` have arrived, which the caller sends for. Of several planes,
    which are so many columns of an array beside each other, a tile has the panels of all. `uses` is
    what its lines of the L2 cache are, see `numba_flash.cuda.ptx.copy`.
    """
    RING, PANELS, PANEL = one_type(ring), swizzle.panels(columns), swizzle.PANEL
    PANEL_BYTES, PLANES, COLUMNS = swizzle.panel_bytes(rows), planes, columns
    BYTES, tensor_load = PLANES * PANELS * PANEL_BYTES + more, ptx.tensor_load_of(uses)

    @inline
    def load(tensor_map, smem, n, place):
        ready = mbarrier(smem, RING, RING.ready, n)
        to = tile(smem, RING, n)
        ptx.mbarrier_expect(ready, u32(BYTES))
        row, head, b1, b0 = i32(place.row), i32(place.head), i32(place.b1), i32(place.b0)
        for number in range(PLANES * PANELS):
            plane, panel = number // PANELS, number % PANELS
            column = i32(place.column + plane * COLUMNS + panel * PANEL)
            panel_to = u32(to + u32(number * PANEL_BYTES))
            tensor_load(panel_to, tensor_map, column, row, head, b1, b0, ready)

    return load


@once
def build_load_numbers(ring, numbers, size):
    """``load_numbers(smem, n, address)``: have `size` bytes that belong to the n-th tile of a ring
    fetched, into as many for each slot from `numbers` on; the slot waits for them, too.
    """
    RING, NUMBERS, BYTES = one_type(ring), numbers, size

    @inline
    def load_numbers(smem, n, address):
        to = u32(smem + u32(NUMBERS) + n % u32(RING.slots) * u32(BYTES))
        ptx.bulk_load(to, address, u32(BYTES), mbarrier(smem, RING, RING.ready, n))

    return load_numbers


@once
def build_load_rows(ring, columns, rows, values, planes, more=0):
    """``load_rows(tensor_map, smem, n, place, address)``: have the n-th tile fetched, and a float32
    for each of its rows from an address; bytes `more` are sent for by the caller.
    """
    RING, BYTES = one_type(ring), 4 * rows
    load = build_load(ring, columns, rows, BYTES + more, planes)
    load_numbers = build_load_numbers(ring, values, BYTES)

    @inline
    def load_rows(tensor_map, smem, n, place, address):
        wait_free(smem, RING, n)
        load(tensor_map, smem, n, place)
        load_numbers(smem, n, address)

    return load_rows


@once
def build_clear_tail(columns, rows):
    """``clear_tail(smem, ring, n, keys, consumer)``: zeros beyond the first `keys` rows of the n-th
    tile, before it is used.

    What lies beyond the end may be NaN, and 0 * NaN is not 0. Every warp group clears for itself;
    all write the same zeros.
    """
    ROWS, PANELS, PANEL_BYTES = rows, swizzle.panels(columns), swizzle.panel_bytes(rows)
    CHUNKS = swizzle.ROW_BYTES // 16

    @inline
    def clear_tail(smem, ring, n, keys, consumer):
        if keys < ROWS:
            wait_ready(smem, ring, n)
            first = max(keys, 0) * CHUNKS + cuda.threadIdx.x % WARP_GROUP
            for panel in range(PANELS):
                to = u32(tile(smem, ring, n) + u32(panel * PANEL_BYTES))
                for chunk in range(first, ROWS * CHUNKS, WARP_GROUP):
                    ptx.store_shared_zero16(u32(to + u32(chunk * 16)))
            ptx.fence_proxy_async()
            meet_warp_group(
                consumer
            )  # the zeros are there for the products of the whole warp group

    return clear_tail


@once
def build_factor_of(ring, word):
    """``factor_of(smem, item_n, extras, which)``: what undoes the power of two of q, k, v or dO (0
    to 3), of the head of a work item in its `ring`, in whose slots things are where `word` says.
    """
    RING, WORD = ring, word

    @inline
    def factor_of(smem, item_n, extras, which):
        b0, b1 = read(smem, RING, item_n, WORD.b0), read(smem, RING, item_n, WORD.b1)
        head = read(smem, RING, item_n, WORD.kv_head)
        return extras.factors[index(b0), index(b1), index(head), which]

    return factor_of
