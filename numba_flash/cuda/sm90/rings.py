"""Rings of slots in shared memory, and where they lie. Numba is not imported here."""

from types import SimpleNamespace
from typing import NamedTuple

from numba_flash.cuda.swizzle import ALIGNMENT

MBARRIER_BYTES = 8


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


def lay_out(rings: dict, begin: int, **others) -> SimpleNamespace:
    """Rings, of (bytes of a slot, slots), from an offset on, their mbarriers after them, the
    `bytes` of all; and `others`.
    """
    layout = SimpleNamespace(ALIGNMENT=ALIGNMENT, **others)
    mbarriers = begin + sum(slot_bytes * count for slot_bytes, count in rings.values())
    for name, (slot_bytes, count) in rings.items():
        free = mbarriers + count * MBARRIER_BYTES
        setattr(layout, name, Ring(begin, slot_bytes, count, mbarriers, free))
        begin += slot_bytes * count
        mbarriers = free + count * MBARRIER_BYTES
    layout.bytes = mbarriers + ALIGNMENT  # the base of dynamic shared memory is aligned by hand
    return layout
