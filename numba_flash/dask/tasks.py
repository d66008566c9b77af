"""What a task does with the blocks that it gets."""

from functools import reduce

import numpy as np

from numba_flash import api, arrays
from numba_flash.merge import merge


def attend(names: tuple[str, ...], options: dict, *blocks):
    """o in float32 or float64 and lse, over a block of keys."""
    x = _named(names, blocks)
    out = arrays.empty("o", x["q"], (*x["q"].shape[:-1], x["v"].shape[-1]), _accumulator(x["q"].dtype))
    return api.forward(**x, **options, out=out, return_lse=True)


def nothing(dv: int, q):
    """The same of queries that see no key."""
    o = arrays.empty("o", q, (*q.shape[:-1], dv), _accumulator(q.dtype))
    lse = arrays.empty("lse", q, q.shape[:-1], o.dtype.name)
    o[...], lse[...] = 0, -np.inf
    return o, lse


def merged(parts: list):
    """o and lse over all their keys."""
    return reduce(lambda x, y: merge(*map(_aligned, (*x, *y))), parts)


def rounded_o(dtype, part):
    """o in that dtype."""
    return rounded(dtype, part[0])


def log_sum(part):
    """lse."""
    return part[1]


def differentiate(names: tuple[str, ...], options: dict, *blocks) -> tuple:
    """The part of each gradient that belongs to a block of queries and one of keys."""
    return api.backward(**_named(names, blocks), **options)


def added(parts: list):
    """Their sum in float32 or float64, from left to right."""
    return reduce(np.add, [rounded(_accumulator(x.dtype), x) for x in parts])


def rounded(dtype, x):
    """The array, or a copy in that dtype."""
    return x.astype(dtype, copy=False)


def zeros(x):
    """The gradient of what no query sees, or of a query that sees nothing."""
    gradient = arrays.empty("a gradient", x, x.shape)
    gradient[...] = 0
    return gradient


def _named(names: tuple[str, ...], blocks: tuple) -> dict:
    """Blocks by name."""
    return dict(zip(names, map(_aligned, blocks), strict=True))


def _aligned(x):
    """The array, or a copy: one that has come from another process may begin at any byte."""
    return np.require(x, requirements="A") if isinstance(x, np.ndarray) else x


def _accumulator(dtype) -> str:
    return "float64" if dtype.name == "float64" else "float32"
