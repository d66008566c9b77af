"""Copies that threads start and go on: cp.async (PTX ISA 9.7.9.25.3), which belongs to the generic proxy.

One instruction of a warp is one entry of the machine's engine, which executes it at any later time: what is read before its wait may be
what was there before.
"""

import re

import numpy as np

from ptx_machine.machine.barriers import mbarrier_of
from ptx_machine.machine.memory import Fault
from ptx_machine.machine.operands import LANES, address, reader, spread


class Copy:
    """What one instruction copies for its lanes, its `number` among those of the warp; `group`: how many each lane had committed before."""

    def __init__(self, number: int, lanes: np.ndarray, group: np.ndarray, work):
        self.number, self.lanes, self.group, self._work, self.done = number, lanes, group, work, False

    def finish(self) -> None:
        """Do it, unless it is done."""
        if not self.done:
            self.done = True
            self._work()


class Copies:
    """Of a warp: those that may not be done yet, those that it has not waited for, how many it began, and how many groups each lane has
    committed.
    """

    def __init__(self):
        self.pending, self.unawaited, self.begun, self.committed = [], [], 0, np.zeros(LANES, np.int64)

    def begin(self, lanes: np.ndarray, work) -> Copy:
        """The next one."""
        copy = Copy(self.begun, lanes, self.committed.copy(), work)
        self.pending.append(copy)
        self.unawaited.append(copy)
        return copy

    def before(self, lanes: np.ndarray, allowed: int | None) -> list[Copy]:
        """Those of the lanes that are not done, but for their last `allowed` groups; None: those of no group too."""
        self.pending = [copy for copy in self.pending if not copy.done]
        if allowed is None:
            return [copy for copy in self.pending if (copy.lanes & lanes).any()]
        return [copy for copy in self.pending if (copy.lanes & lanes & (copy.group < self.committed - allowed)).any()]

    def known(self, lanes: np.ndarray, allowed: int | None) -> int:
        """How many are there once these lanes have waited, counted up to the first that somebody has yet to wait for."""
        self.unawaited = [copy for copy in self.unawaited if not self._covered(copy, lanes, allowed)]
        return min((copy.number for copy in self.unawaited), default=self.begun + 1) - 1

    def _covered(self, copy: Copy, lanes: np.ndarray, allowed: int | None) -> bool:
        """True if each of its lanes has waited for it."""
        waited = lanes if allowed is None else lanes & (copy.group < self.committed - allowed)
        return bool(waited[copy.lanes].all())


def _copy(machine, each):
    kind, size = re.match(r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global(?:\.L2::\d+B)?$", each.opcode)[1], int(each.operands[2])
    if size not in ((4, 8, 16) if kind == "ca" else (16,)) or len(each.operands) > 4:
        raise ValueError(f"{size} bytes")
    get_to, get_from = (address(machine, text) for text in each.operands[:2])
    get_count = _bytes_read(machine, each.operands[3:], size)

    def run(warp):
        lanes, shared = warp.lanes.copy(), warp.block.shared
        to, source, count = (get(warp)[lanes] for get in (get_to, get_from, get_count))
        if (count > size).any():
            raise Fault(f"{int(count.max())} bytes of {size} are to be read")
        if (source % size).any():
            raise Fault(f"{size} bytes from {int(source[source % size != 0][0]):#x}: misaligned")
        _read(machine.memory, source, count, size, warp)
        copies, granules = warp.copies, shared.granules(to, size)
        copies.begun += 1
        warp.block.order.write(granules, warp.block.order.by_copy(warp, copies.begun), np.zeros(granules.shape, bool))

        def work():
            shared.words[granules] = _read(machine.memory, source, count, size).view(np.uint16)

        _later(machine, copies.begin(lanes, work).finish)

    return run


def _later(machine, work) -> None:
    def entry():
        work()
        machine.events += 1

    machine.later(entry)


def _bytes_read(machine, operands, size: int):
    """``get(warp)`` of the bytes that each lane reads; the others are zero. A predicate that is true reads none."""
    if not operands:
        return lambda warp: np.full(LANES, size)
    if machine.kernel.kinds.get(operands[0]) == "pred":
        ignored = reader(machine, operands[0], bool)
        return lambda warp: np.where(ignored(warp), 0, size)
    get = reader(machine, operands[0], np.uint32)
    return lambda warp: spread(get(warp)).astype(np.int64)


def _read(memory, source: np.ndarray, count: np.ndarray, size: int, warp=None) -> np.ndarray:
    """(lanes, size) bytes; of what is not read, nothing has to exist. A `warp` has to know of all that others wrote there."""
    data = np.zeros((source.size, size), np.uint8)
    left = count > 0
    while left.any():
        region = memory.find(int(source[left][0]))
        here = left & (source >= region.base) & (source <= max(region.base + region.data.size, source[left][0]))
        for n in np.unique(count[here]):
            now = here & (count == n)
            at = source[now][:, None] + np.arange(n)
            data[now, :n] = region.load(source[now], size) if n == size else region.load(at.reshape(-1), 1).reshape(-1, n)
            if warp is not None:
                warp.block.machine.streams.by_threads(region, source[now] - region.base, int(n), warp, False)
        left &= ~here
    return data


def _commit(machine, each):
    def run(warp):
        warp.copies.committed[warp.lanes] += 1

    return run


def _wait(machine, each):
    allowed = int(each.operands[0]) if each.operands else None

    def run(warp):
        awaited = warp.copies.before(warp.lanes, allowed)
        warp.wait_for(f"its own copies, line {each.line}", lambda: all(copy.done for copy in awaited), lambda: _know(warp, allowed))

    return run


def _know(warp, allowed: int | None) -> None:
    """What the lanes that run have copied, but for their last groups, is there."""
    agent = warp.block.order.warps + warp.number
    warp.clocks.seen[agent] = max(warp.clocks.seen[agent], warp.copies.known(warp.lanes, allowed))


def _arrive(machine, each):
    """An arrival at an mbarrier once all copies that the thread has started are done. Without .noinc nobody else has to expect it."""
    get_at, expected = address(machine, each.operands[0]), ".noinc" in each.opcode

    def run(warp):
        arrivals = np.unique(get_at(warp)[warp.lanes], return_counts=True)
        arrivals = [(mbarrier_of(warp, int(at)), int(count)) for at, count in zip(*arrivals, strict=True)]
        awaited = warp.copies.before(warp.lanes, None)
        known = warp.block.order.released(warp)
        known.seen[warp.block.order.warps + warp.number] = warp.copies.known(warp.lanes, None)
        for barrier, count in arrivals:
            barrier.pending += 0 if expected else count

        def arrive():
            for copy in awaited:
                copy.finish()
            for barrier, count in arrivals:
                barrier.arrive(known, count)

        _later(machine, arrive)

    return run


ASYNC_COPIES = {
    "cp.async.ca.": _copy,
    "cp.async.cg.": _copy,
    "cp.async.commit_group": _commit,
    "cp.async.wait_group": _wait,
    "cp.async.wait_all": _wait,
    "cp.async.mbarrier.arrive": _arrive,
}
