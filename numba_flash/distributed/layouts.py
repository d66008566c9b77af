"""Which positions of a sequence are whose."""

from itertools import accumulate, pairwise
from typing import NamedTuple

from numba_flash.arguments.options import SHARING

LAYOUTS = ("contiguous", "zigzag")


class Chunk(NamedTuple):
    """Neighbouring positions ``[start, stop)`` of the sequence, which a process has from its row `at` on."""

    start: int
    stop: int
    at: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def even(n: int, size: int, layout: str) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of each of `size` processes, which have about equally many of n positions.

    "contiguous" gives each process its neighbours. "zigzag" cuts twice as many pieces and gives process r the piece r from the front and
    the piece r from the back: under a causal mask all have the same work. Pieces begin where a counter of dropout's generator does.
    """
    count = size if layout == "contiguous" else 2 * size
    pieces = [*pairwise([n * i // (count * SHARING) * SHARING for i in range(count)] + [n])]
    return tuple(_placed([pieces[r]] if layout == "contiguous" else [pieces[r], pieces[-1 - r]]) for r in range(size))


def contiguous(sizes: list[int]) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of processes that have so many positions, one after the other."""
    return tuple(_placed([piece]) for piece in pairwise(accumulate(sizes, initial=0)))


def _placed(pieces) -> tuple[Chunk, ...]:
    """Chunks that lie one after the other in the memory of a process."""
    places = accumulate((stop - start for start, stop in pieces), initial=0)
    return tuple(Chunk(start, stop, at) for (start, stop), at in zip(pieces, places, strict=False))


def count(chunks: tuple[Chunk, ...]) -> int:
    """Of all positions."""
    return sum(chunk.size for chunk in chunks)
