"""Tensor maps: descriptors by which the copy engine of Hopper finds tiles of an array."""

import math
from typing import NamedTuple

from numba_flash import ledger
from numba_flash.arguments import arrays
from numba_flash.cuda.runtime.driver import TensorMapEncoder
from numba_flash.cuda.score.swizzle import PANEL

MOST = 1024  # of a launch
UNIT = 16  # bytes, of strides and addresses


def why_not(name: str, x) -> str | None:
    """Reason why no tensor map can describe an array of this `Layout`, or None."""
    sizes = zip(x.strides, x.shape, strict=True)
    *strides, last = (stride if size > 1 else 0 for stride, size in sizes)
    if last != x.dtype.itemsize:
        return (
            "needs neighbours along the head dimension to be neighbours in memory;"
            f" {name} has strides {x.strides}"
        )
    if any(stride % UNIT or stride < 0 for stride in strides):
        return (
            f"needs strides that are multiples of {UNIT} bytes and not negative;"
            f" {name} has strides {x.strides}"
        )
    if x.offset:
        return (
            f"needs addresses that are multiples of {UNIT};"
            f" {name} begins {x.offset} bytes after one"
        )
    return None


class Described(NamedTuple):
    """Tensor maps of the arrays of a launch, and where each lies."""

    pointers: list[int]
    maps: list


class TensorMaps(dict):
    """Tensor maps for a launch, `Described`, by the addresses of its arrays: programs use the same
    memory again and again.

    Parameters
    ----------
    maps : sequence of (Layout, int) or (Layout, int, int)
        Arrays (..., n, d) of 16-bit elements, which maps take as five dimensions; the rows of
        boxes, of one panel; and its columns, 64 if they are not given.
    """

    def __init__(self, maps):
        self._encoders = [_encoder(*each) for each in maps]

    def __missing__(self, addresses: tuple[int, ...]) -> Described:
        if len(self) >= MOST:
            self.clear()
        there = zip(self._encoders, addresses, strict=True)
        maps = [encoder.encode(address) for encoder, address in there]
        found = self[addresses] = Described([each.getPtr() for each in maps], maps)
        return found


def _encoder(x, rows: int, columns: int = PANEL) -> TensorMapEncoder:
    shape = (1,) * (5 - len(x.shape)) + tuple(x.shape)
    strides = zip(shape[:-1], arrays.expanded_strides(x, 5)[:-1], strict=True)
    # the stride of an axis of one element is never used, but checked
    strides = tuple(UNIT if n == 1 else stride for n, stride in strides)
    return TensorMapEncoder(shape, strides, (1, 1, 1, rows, columns))


def unfit(x) -> bool:
    """True if no tensor map can describe an array of this `Layout`."""
    return why_not("", x) is not None


def through_compact(prepare, results, unfit=unfit):
    """`Prepared` by ``prepare(results)``, by way of arrays in the usual order where `results`,
    named layouts, are `unfit`. The lse is written element by element.
    """
    replaced = [
        name != "lse" and x is not None and unfit(x) for name, x in results._asdict().items()
    ]

    def each(results, function):
        chosen = zip(type(results)._fields, results, replaced, strict=True)
        return type(results)(*(function(name, x) if mine else x for name, x, mine in chosen))

    prepared = prepare(each(results, lambda name, x: arrays.Layout.compact(x.shape, x.dtype)))
    for x, mine in zip(results, replaced, strict=True):
        ledger.note(math.prod(x.shape) * x.dtype.itemsize if mine else 0)

    def run(inputs, results, *state):
        there = each(
            results,
            lambda name, x: arrays.compact(f"{name} before it goes to out", x, x.shape, x.dtype),
        )
        fallback = prepared.run(inputs, there, *state)
        for x, y, mine in zip(results, there, replaced, strict=True):
            if mine:
                x[...] = y
        return fallback

    return prepared._replace(run=run)
