"""Who may touch global memory when: bulk stores are streams of their own, other blocks learn of them by flags alone."""

import numpy as np
from memory import Region
from order import STREAMS, Race

WORD = 2  # bytes that are looked at together: neighbours of 16 bits may belong to two blocks
NEVER, ATOMIC = -1, -2  # in the place of who wrote: nobody, and that it is used by atomic operations
GENERIC = -3  # minus the number of a block: its threads


class Streams:
    """Of one launch: what was written to global memory by whom, and how far flags tell of it."""

    def __init__(self):
        self.numbers, self.flags, self.written = {}, {}, {}

    def number(self, block: int, thread: int) -> int:
        """Of the stream of a thread's bulk stores."""
        number = self.numbers.setdefault((block, thread), len(self.numbers))
        assert number < STREAMS, "more streams than there is room for"
        return number

    def _words(self, region: Region, first: np.ndarray, size: int):
        if region.base not in self.written:
            count = -(-region.data.size // WORD)
            self.written[region.base] = np.full(count, NEVER, np.int32), np.zeros(count, np.int32), np.zeros(count, bool)
        return first[:, None] // WORD + np.arange(-(-size // WORD))

    def _check(self, region: Region, words: np.ndarray, block: int, seen: np.ndarray, adds: bool) -> None:
        by, at, added = (each[words] for each in self.written[region.base])
        late = (by >= 0) & (at > seen[np.maximum(by, 0)]) & ~(added & adds)
        late |= (by <= GENERIC) & (by != GENERIC - block)
        if late.any():
            place, who = WORD * int(words[late][0]), int(by[late][0])
            other = f"block {GENERIC - who}"
            if who >= 0:
                other = "a bulk store of block {}, thread {}".format(*list(self.numbers)[who])
            raise Race(f"{region.name} at {place}: {other} wrote it, and nothing says that this comes after it")
        if (by == ATOMIC).any():
            raise Race(f"{region.name} at {WORD * int(words[by == ATOMIC][0])} is used by atomic operations, but by this as plain memory")

    def by_threads(self, region: Region, first: np.ndarray, size: int, warp, writes: bool) -> None:
        """Check loads and stores of a warp's lanes, at offsets `first`."""
        words, block = self._words(region, first, size), warp.block.number
        self._check(region, words, block, warp.known_streams, False)
        if writes:
            by, _, added = self.written[region.base]
            by[words], added[words] = GENERIC - block, False

    def by_bulk(self, region: Region, first: int, size: int, warp, stream: int, count: int, adds: bool) -> None:
        """Check a bulk store, or an addition; those may come in any order among each other."""
        words = self._words(region, np.array([first]), size)
        self._check(region, words, warp.block.number, warp.known_streams, adds)
        by, at, added = self.written[region.base]
        by[words], at[words], added[words] = stream, count, adds

    def by_atomics(self, region: Region, first: np.ndarray, size: int) -> None:
        """Atomic operations need no order among each other."""
        words = self._words(region, first, size)
        self.written[region.base][0][words] = ATOMIC

    def release(self, address: int, seen: np.ndarray) -> None:
        """Whoever acquires this flag knows of these streams."""
        known = self.flags.setdefault(address, np.zeros(STREAMS, np.int32))
        np.maximum(known, seen, out=known)

    def acquire(self, address: int, seen: np.ndarray) -> None:
        """Know what was released here."""
        if address in self.flags:
            np.maximum(seen, self.flags[address], out=seen)
