"""Who may touch global memory when: stores of each warp, and bulk ones of each thread, are streams; other blocks learn of them by flags."""

import numpy as np

from ptx_machine.machine.memory import Region
from ptx_machine.machine.order import STREAMS, Race

WORD = 2  # bytes that are looked at together: neighbours of 16 bits may belong to two blocks
NEVER, ATOMIC = -1, -2  # in the place of who wrote: nobody, and that it is used by atomic operations
ANY = -1  # in the place of the block whose accesses a stream need not be ordered with: none


class Streams:
    """Of one launch: what was written to global memory by whom, and how far flags tell of it."""

    def __init__(self):
        self.numbers, self.flags, self.written = {}, {}, {}
        self.block_of, self.count = np.full(STREAMS, ANY), np.zeros(STREAMS, np.int32)

    def number(self, block: int, thread: int | str) -> int:
        """Of the stream of a thread's bulk stores."""
        number = self.numbers.setdefault((block, thread), len(self.numbers))
        assert number < STREAMS, "more streams than there is room for"
        return number

    def of_warp(self, warp) -> int:
        """The same of a warp's other stores, with which those of its block need no order here: shared memory and its barriers have one."""
        number = self.number(warp.block.number, f"warp {warp.number}")
        self.block_of[number] = warp.block.number
        return number

    def _words(self, region: Region, first: np.ndarray, size: int):
        if region.base not in self.written:
            count = -(-region.data.size // WORD)
            self.written[region.base] = np.full(count, NEVER, np.int32), np.zeros(count, np.int32), np.zeros(count, bool)
        return first[:, None] // WORD + np.arange(-(-size // WORD))

    def _check(self, region: Region, words: np.ndarray, block: int, seen: np.ndarray, adds: bool) -> None:
        by, at, added = (each[words] for each in self.written[region.base])
        stream = np.maximum(by, 0)
        late = (by >= 0) & (at > seen[stream]) & ~(added & adds) & (self.block_of[stream] != block)
        if late.any():
            place, (who, which) = WORD * int(words[late][0]), list(self.numbers)[int(by[late][0])]
            other = f"block {who}" if isinstance(which, str) else f"a bulk store of block {who}, thread {which}"
            raise Race(f"{region.name} at {place}: {other} wrote it, and nothing says that this comes after it")
        if (by == ATOMIC).any():
            raise Race(f"{region.name} at {WORD * int(words[by == ATOMIC][0])} is used by atomic operations, but by this as plain memory")

    def by_threads(self, region: Region, first: np.ndarray, size: int, warp, writes: bool, adds: bool = False) -> None:
        """Check loads, stores, or additions of a warp's lanes, at offsets `first`; additions may come in any order among each other."""
        words = self._words(region, first, size)
        self._check(region, words, warp.block.number, warp.known_streams, adds)
        if writes:
            stream = self.of_warp(warp)
            self.count[stream] += 1
            warp.known_streams[stream] = self.count[stream]
            by, at, added = self.written[region.base]
            by[words], at[words], added[words] = stream, self.count[stream], adds

    def by_bulk(self, region: Region, first: int, size: int, warp, stream: int, count: int, adds: bool) -> None:
        """Check a bulk store, or an addition; those may come in any order among each other."""
        words = self._words(region, np.array([first]), size)
        self._check(region, words, warp.block.number, warp.known_streams, adds)
        by, at, added = self.written[region.base]
        by[words], at[words], added[words] = stream, count, adds

    def by_relaxed_load(self, region: Region, first: np.ndarray, size: int, warp) -> None:
        """Check a load that may read what atomic operations write, or else what the warp knows of."""
        words = self._words(region, first, size)
        if (self.written[region.base][0][words] != ATOMIC).any():
            self.by_threads(region, first, size, warp, False)

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
