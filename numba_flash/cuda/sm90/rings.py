"""Shared memory of a block: a table of what lies there, from which addresses and size follow. Numba
is not imported here.
"""

from collections import namedtuple
from functools import cache
from typing import NamedTuple

from numba_flash.cuda.score.swizzle import ALIGNMENT

MBARRIER_BYTES = 8
BULK = 16  # bulk copies begin at a multiple of that many bytes


class Buffer(NamedTuple):
    """Of a table: so many `slots` of so many bytes, from a multiple of `aligned` bytes on."""

    bytes: int
    slots: int = 1
    aligned: int = BULK


class Slots(NamedTuple):
    """Of a table: the `slots` of a `Ring`, of so many bytes; their memory is their own, or a buffer
    further up in the table, ``of`` this name.
    """

    bytes: int
    slots: int
    of: str = ""

    @property
    def own_bytes(self) -> int:
        return 0 if self.of else self.bytes * self.slots


class Ring(NamedTuple):
    """Slots in shared memory that tiles go through; offsets and sizes in bytes.

    Attributes
    ----------
    tiles, slot_bytes, slots : int
        Where the slots are, the size of one, how many there are.
    ready, free : int
        Where the mbarriers of these events are, one per slot.
    """

    tiles: int
    slot_bytes: int
    slots: int
    ready: int
    free: int


def lay_out(*tables: dict[str, Buffer | Slots], **sizes: int) -> NamedTuple:
    """What has a name in a table lies there: by name, the offset of a `Buffer`, and the `Ring` of
    `Slots`. Tables follow each other; in each of them come buffers, in their order, then slots,
    from a multiple of ``ALIGNMENT`` on, then the mbarriers of these.

    It also has the `bytes` of all, ``ALIGNMENT``, and `sizes`; it is hashable.
    """
    places, end = {}, 0
    for table in tables:
        rings = {name: each for name, each in table.items() if isinstance(each, Slots)}
        for name in [each for each in table if each not in rings]:
            size, slots, aligned = table[name]
            places[name] = up_to(end, aligned)
            end = places[name] + size * slots
        end = _add_rings(places, rings, end)
    # the base of dynamic shared memory is aligned by hand
    places |= {"ALIGNMENT": ALIGNMENT, "bytes": end + ALIGNMENT, **sizes}
    return _shared_memory(*places)(*places.values())


def _add_rings(places: dict, rings: dict[str, Slots], end: int) -> int:
    """Put them behind `end`, and return the end of their mbarriers."""
    own = sum(each.own_bytes for each in rings.values())
    begin = up_to(end, ALIGNMENT) if own else end
    mbarriers = begin + own
    for name, (slot_bytes, slots, of) in rings.items():
        free = mbarriers + slots * MBARRIER_BYTES
        places[name] = Ring(places[of] if of else begin, slot_bytes, slots, mbarriers, free)
        begin += rings[name].own_bytes
        mbarriers = free + slots * MBARRIER_BYTES
    return mbarriers


def up_to(offset: int, multiple: int) -> int:
    """The next multiple."""
    return -(-offset // multiple) * multiple


@cache
def _shared_memory(*names: str) -> type:
    return namedtuple("SharedMemory", names)
