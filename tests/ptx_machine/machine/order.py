"""Who may touch what when: accesses to shared memory that nothing has put in order are a `Race`, and so are those of stores to
global memory that other blocks have to know of.

A launch may be early: kernels before it may still run. Its warps must not touch global memory, nor let the next kernel begin, before they
know that those have ended: from a griddepcontrol.wait of their own, or of a warp that they have waited for.

Every agent counts: a warp its releases; the products of a warp group, the bulk stores of a thread and the copies that an mbarrier
waits for their groups or phases. A location remembers who wrote and read it at which count. A warp knows how far each agent has come:
from barriers, mbarriers and flags that it waited for, and from waits for products and stores of its own. An access is in order if the
one before it is known (vector clocks, Lamport 1978; FastTrack, Flanagan and Freund 2009). What warps write themselves is known to copies
and products, which are the async proxy, only beyond a `fence.proxy.async` that comes between (PTX ISA, 8.9).
"""

from dataclasses import dataclass

import numpy as np

from ptx_machine.machine.memory import Fault, Region

GRANULE = 2  # bytes that are looked at together
NEVER, MBARRIER = -1, -2  # in the place of who wrote: nobody, and that an mbarrier is there
MORE_AGENTS = 160  # than warps, in a block: the kernels before, warp groups, threads that store, mbarriers
KERNELS_BEFORE = "the kernels before"  # an agent, which counts to 1: all have ended
STREAMS = 2048  # of stores to global memory, in all blocks
WHOLE_WARP = -1  # in the place of a lane: all of them together


class Race(Fault):
    """Two accesses to one location, at least one of them a write, in no order."""


@dataclass
class Clocks:
    """How far the agents are known to have come.

    Attributes
    ----------
    seen : np.ndarray
        Count of each agent of the block, and then of each stream of stores to global memory.
    fenced : np.ndarray
        Count of each warp, and of its copies, up to which the async proxy sees what they wrote.
    """

    seen: np.ndarray
    fenced: np.ndarray

    def join(self, other: "Clocks") -> None:
        """Know what the other knows, too."""
        np.maximum(self.seen, other.seen, out=self.seen)
        np.maximum(self.fenced, other.fenced, out=self.fenced)

    def copy(self) -> "Clocks":
        """As it is now."""
        return Clocks(self.seen.copy(), self.fenced.copy())

    @property
    def of_async_proxy(self) -> np.ndarray:
        """What copies and products know that are begun now."""
        seen = self.seen.copy()
        seen[: self.fenced.size] = self.fenced
        return seen


@dataclass
class Access:
    """One access: by which agent, at which count, in which line, knowing what.

    Attributes
    ----------
    agent, count : int
        Whose it is.
    line : int
        Of the instruction.
    seen, seen_writes : np.ndarray
        How far reads, and writes, of others are known.
    lanes : np.ndarray or int
        Of each location; `WHOLE_WARP` if several do it together.
    """

    agent: int
    count: int
    line: int
    seen: np.ndarray
    seen_writes: np.ndarray
    lanes: object = WHOLE_WARP


class Order:
    """Of one block: its agents, and what happened to each location of its shared memory."""

    def __init__(self, warps: int, size: int, early: bool = False):
        self.warps, self.generic = warps, 2 * warps  # the first agents are warps, then what they copy by cp.async: the generic proxy
        self.names = [f"warp {w}" for w in range(warps)] + [f"a copy by warp {w}" for w in range(warps)]
        self.most, self.early = self.generic + MORE_AGENTS, early
        self.before = self.agent(KERNELS_BEFORE)
        granules = -(-size // GRANULE)
        self.by, self.at = np.full(granules, NEVER, np.int16), np.zeros(granules, np.int32)
        self.line, self.lane = np.zeros(granules, np.int32), np.zeros(granules, np.int8)
        self.readers = []  # agents that ever read, in the order of the columns of `reads`
        self.reads, self.read_line = np.zeros((granules, 8), np.int32), np.zeros(granules, np.int32)
        self.agreed = np.zeros((granules, self.generic), np.int32)  # count at which a warp wrote what was there already
        self.agree, self.met = False, [0] * warps  # count of each warp at which its lanes have met

    def begin(self, warp: int) -> Clocks:
        """What a warp knows at first: itself, and that the kernels before have ended, unless the launch is early."""
        seen = np.zeros(self.most + STREAMS, np.int32)
        seen[warp], seen[self.before] = 1, not self.early
        return Clocks(seen, np.zeros(self.generic, np.int32))

    def nothing(self) -> Clocks:
        """What one knows who knows nothing."""
        return Clocks(np.zeros(self.most + STREAMS, np.int32), np.zeros(self.generic, np.int32))

    def agent(self, name: str) -> int:
        """A new agent."""
        self.names.append(name)
        assert len(self.names) <= self.most, "more agents than there is room for"
        return len(self.names) - 1

    def by_warp(self, warp, lanes=WHOLE_WARP) -> Access:
        """An access by instructions of a warp."""
        number, seen = warp.number, warp.clocks.seen
        return Access(number, int(seen[number]), warp.line, seen, seen, lanes)

    def by_copy(self, warp, count: int) -> Access:
        """An access by cp.async."""
        return Access(self.warps + warp.number, count, warp.line, warp.clocks.seen, warp.clocks.seen)

    def by_async(self, warp, agent: int, count: int) -> Access:
        """An access by what a warp begins: a copy or a product."""
        return Access(agent, count, warp.line, warp.clocks.seen, warp.clocks.of_async_proxy)

    def released(self, warp) -> Clocks:
        """What whoever waits for this warp knows from now on; what it does next is not part of it."""
        clocks = warp.clocks.copy()
        warp.clocks.seen[warp.number] += 1
        return clocks

    def fence(self, warp) -> None:
        """Proxy fence: what is known now is known to the async proxy."""
        warp.clocks.fenced[:] = warp.clocks.seen[: self.generic]
        warp.clocks.seen[warp.number] += 1

    def meet(self, warp) -> None:
        """The lanes of a warp have met: each knows what the others did."""
        self.met[warp.number] = int(warp.clocks.seen[warp.number])
        warp.clocks.seen[warp.number] += 1

    def wait_for_kernels(self, warp) -> None:
        """The kernels before have ended, as this warp knows from now on."""
        warp.clocks.seen[self.before] = 1

    def after_kernels(self, warp, what: str) -> None:
        """Check that a warp which does that knows that the kernels before have ended."""
        if not warp.clocks.seen[self.before]:
            raise Race(f"{what}, but nothing says that the kernels before this one have ended")

    def read(self, granules: np.ndarray, access: Access) -> np.ndarray:
        """Check a read. Returns which locations were never written: their values must not be used."""
        late = self._late_after_writes(granules, access, "read")
        if late.any():
            raise Race(self._of_write(granules, late, access, "read"))
        column = self._column(access.agent)
        self.reads[granules, column] = access.count
        self.read_line[granules] = access.line
        return self.by[granules] == NEVER

    def write(self, granules: np.ndarray, access: Access, same: np.ndarray) -> None:
        """Check a write, and remember it. What another warp has written may be written once more in no order, if it is the `same`."""
        late = self._late_after_writes(granules, access, "written")
        unread = self._late_after_reads(granules, access)
        by = self.by[granules]
        agreed = same & (by >= 0) & (by < self.warps) & (by != access.agent) & (late | unread.any(axis=-1))
        if (late & ~agreed).any():
            raise Race(self._of_write(granules, late & ~agreed, access, "written"))
        if (unread.any(axis=-1) & ~agreed).any():
            raise Race(self._of_read(granules, unread & ~agreed[..., None], access))
        if agreed.any():
            self.agreed[granules[agreed], access.agent], self.agree = access.count, True
        new = ~agreed
        where = granules[new]
        self.by[where], self.at[where], self.line[where] = access.agent, access.count, access.line
        self.lane[where] = np.broadcast_to(access.lanes, granules.shape)[new]
        if self.agree:
            self.agreed[granules[~same]] = 0

    def keep_for_mbarrier(self, granules: np.ndarray, access: Access) -> None:
        """An mbarrier is made here."""
        self.write(granules, access, np.zeros(granules.shape, bool))
        self.by[granules] = MBARRIER

    def _column(self, agent: int) -> int:
        """Of an agent in `reads`."""
        if agent not in self.readers:
            self.readers.append(agent)
            if len(self.readers) > self.reads.shape[1]:
                self.reads = np.concatenate([self.reads, np.zeros_like(self.reads)], axis=1)
        return self.readers.index(agent)

    def _late_after_writes(self, granules: np.ndarray, access: Access, verb: str) -> np.ndarray:
        """Where the last write is not known."""
        by, at = self.by[granules], self.at[granules]
        if (by == MBARRIER).any():
            raise Fault(f"{self._place(granules, by == MBARRIER)} is {verb}, where an mbarrier is")
        late = (at > access.seen_writes[np.maximum(by, 0)]) & (by >= 0)
        if access.agent < self.warps:
            lanes, own = self.lane[granules], by == access.agent
            unmet = (at > self.met[access.agent]) & ((lanes != access.lanes) | (lanes == WHOLE_WARP))
            late = np.where(own, unmet, late)
        if late.any() and self.agree:
            known = self.agreed[granules[late]]
            late[late] = ~((known > 0) & (known <= access.seen_writes[: self.generic])).any(axis=-1)
        return late

    def _late_after_reads(self, granules: np.ndarray, access: Access) -> np.ndarray:
        """Where, and by which of the readers, a read is not known to be over."""
        known = access.seen[self.readers]
        if access.agent < self.warps and access.agent in self.readers:
            known[self.readers.index(access.agent)] = access.count  # its own
        return self.reads[granules][..., : len(self.readers)] > known

    def _of_write(self, granules, late, access: Access, verb: str) -> str:
        where = granules[late][0]
        writer = int(self.by[where])
        text = f"{self._place(granules, late)} is {verb} by {self.names[access.agent]}, but in line {self.line[where]} "
        text += f"{self.names[writer]} wrote it, and nothing says that this comes after it"
        if writer < self.generic <= access.agent and self.at[where] <= access.seen[writer]:
            text += " for the async proxy: a proxy fence is missing"
        return text

    def _of_read(self, granules, unread, access: Access) -> str:
        reader = self.names[self.readers[int(np.argmax(unread[unread.any(axis=-1)][0]))]]
        place = self._place(granules, unread.any(axis=-1))
        line = self.read_line[granules[unread.any(axis=-1)][0]]
        return f"{place} is written by {self.names[access.agent]} while {reader} may still read it (last read in line {line})"

    @staticmethod
    def _place(granules: np.ndarray, where: np.ndarray) -> str:
        return f"shared memory at {GRANULE * int(granules[where][0])}"


class Shared(Region):
    """Shared memory of a block, whose accesses have to be in order."""

    def __init__(self, size: int, warps: int, early: bool):
        super().__init__("shared memory", 0, np.full(size + size % GRANULE, 0xFF, np.uint8))
        self.words, self.order = self.data.view(np.uint16), Order(warps, size, early)

    def granules(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """(accesses, locations of each)."""
        return self.offsets(addresses, size)[:, None] // GRANULE + np.arange(-(-size // GRANULE))

    def read(self, granules: np.ndarray, access: Access) -> np.ndarray:
        """16-bit words, all of which must have been written."""
        never = self.order.read(granules, access)
        if never.any():
            raise Fault(f"{self.order._place(granules, never)} is read by {self.order.names[access.agent]}, but was never written")
        return self.words[granules]

    def write(self, granules: np.ndarray, access: Access, words: np.ndarray) -> None:
        """Store 16-bit words."""
        self.order.write(granules, access, self.words[granules] == words)
        self.words[granules] = words
        differ = self.words[granules] != words
        if differ.any():
            raise Race(f"{self.order._place(granules, differ)} is written by several lanes of {self.order.names[access.agent]} at once")
