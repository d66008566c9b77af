"""What the host hands to the kernels of this tier, by name."""

from typing import NamedTuple


class Shape(NamedTuple):
    """What a kernel is made for, beside dtype, options and tile.

    Attributes
    ----------
    head_dim, head_dim_v : int
        Columns of q and k, of v and o.
    turing : bool
        Products of 8 at a time, and no copies that go on.
    asynchronous : bool
        Rows of what is read lie at multiples of 16 bytes.
    wide : bool
        And those of what is written.
    """

    head_dim: int
    head_dim_v: int
    turing: bool
    asynchronous: bool
    wide: bool


def chunked(*layouts) -> bool:
    """True if rows of all these arrays are whole chunks of 16 bytes at multiples of that."""
    return all(_chunked(x) for x in layouts)


def _chunked(x) -> bool:
    *strides, last = (s if n > 1 else 0 for s, n in zip(x.strides, x.shape, strict=True))
    neighbours = x.shape[-1] == 1 or last == x.dtype.itemsize
    whole = x.shape[-1] * x.dtype.itemsize % 16 == 0
    return neighbours and whole and not x.offset and not any(s % 16 for s in strides)
