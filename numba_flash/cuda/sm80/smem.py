"""Where a block of threads keeps what in shared memory: addresses and size follow from one table.
Numba is not imported here.
"""

from collections import namedtuple
from functools import cache


@cache
def _class_of(names: tuple[str, ...]) -> type:
    return namedtuple("Smem", (*names, "bytes"))


def smem(first: int = 0, /, **table):
    """What lies one behind the other from an address on.

    Parameters
    ----------
    first
        That address.
    table
        Of each part its bytes; or bytes and how many slots of as many; or what this function
        returned for the parts that lie in a slot, and how many slots.

    Returns
    -------
    Smem
        A named tuple, which can be hashed: the address of each part, and ``bytes``, where the last
        one ends. Of slots in which several parts lie, these have the names and addresses that they
        have in the first slot, and the name of the slots stands for the bytes of one.
    """
    found, at = {}, first
    for name, part in table.items():
        slot, slots = part if isinstance(part, tuple) else (part, 1)
        if isinstance(slot, tuple):
            inside = slot._asdict()
            size = inside.pop("bytes")
            found |= {each: at + start for each, start in inside.items()} | {name: size}
        else:
            found[name] = at
            size = slot
        at += slots * size
    return _class_of(tuple(found))(*found.values(), at)


def over(*layouts):
    """Parts of all of these, which may lie over each other; as many ``bytes`` as the longest."""
    found = {name: at for each in layouts for name, at in each._asdict().items() if name != "bytes"}
    return _class_of(tuple(found))(*found.values(), max(each.bytes for each in layouts))
