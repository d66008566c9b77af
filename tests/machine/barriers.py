"""mbarriers (PTX ISA 9.7.13.15) and named barriers (9.7.13.1)."""

import numpy as np
from memory import Fault
from operands import LANES, one, readers


class Mbarrier:
    """Arrivals and bytes that a phase waits for."""

    def __init__(self, count: int):
        self.count = self.pending = count
        self.bytes, self.phase = 0, 0

    def arrive(self, machine, arrivals: int) -> None:
        """Some threads have arrived."""
        if arrivals > self.pending:
            raise Fault(f"{arrivals} arrivals at an mbarrier that waits for {self.pending}")
        self.pending -= arrivals
        self.advance(machine)

    def advance(self, machine) -> None:
        """The next phase, if this one is complete."""
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1
            machine.events += 1


def _mbarrier_init(machine, each):
    at, count = readers(machine, each.operands)

    def run(warp):
        warp.block.mbarriers[one(warp, at)] = Mbarrier(one(warp, count))
        warp.block.machine.events += 1

    return run


def mbarrier_of(warp, address: int) -> Mbarrier:
    try:
        return warp.block.mbarriers[address]
    except KeyError:
        raise Fault(f"there is no mbarrier at {address}; there are {sorted(warp.block.mbarriers)}") from None


def _mbarrier_arrive(machine, each):
    (at,) = readers(machine, each.operands[1:2])

    def run(warp):
        addresses = np.broadcast_to(at(warp), LANES)[warp.lanes]
        for address, arrivals in zip(*np.unique(addresses, return_counts=True), strict=True):
            mbarrier_of(warp, int(address)).arrive(machine, int(arrivals))

    return run


def _mbarrier_expect(machine, each):
    at, more = readers(machine, each.operands[1:])

    def run(warp):
        barrier = mbarrier_of(warp, one(warp, at))
        barrier.bytes += one(warp, more)
        barrier.arrive(machine, 1)

    return run


def _mbarrier_try_wait(machine, each):
    destination, *_ = each.operands
    at, parity = readers(machine, each.operands[1:])

    def run(warp):
        done = np.zeros(LANES, bool)
        for lane in np.flatnonzero(warp.lanes):
            address = int(np.broadcast_to(at(warp), LANES)[lane])
            done[lane] = mbarrier_of(warp, address).phase % 2 != int(np.broadcast_to(parity(warp), LANES)[lane])
        warp.write(destination, done)
        if not done.any():
            warp.asks(each, f"at {address}", False)

    return run


def _barrier(machine, each):
    number, threads = readers(machine, each.operands if len(each.operands) > 1 else [each.operands[0], "0"])
    waits = ".sync" in each.opcode

    def run(warp):
        if not warp.gathers():
            return
        block = warp.block
        lane = int(np.flatnonzero(warp.lanes)[0])
        key = int(np.broadcast_to(number(warp), LANES)[lane])
        expected = int(np.broadcast_to(threads(warp), LANES)[lane]) or block.machine.threads
        state = block.barriers.setdefault(key, {"arrived": 0, "phase": 0})
        state["arrived"] += LANES
        phase = state["phase"]
        if state["arrived"] > expected:
            raise Fault(f"{state['arrived']} threads at barrier {key}, which waits for {expected}")
        if state["arrived"] == expected:
            state["arrived"], state["phase"] = 0, phase + 1
            block.machine.events += 1
        elif waits:
            warp.waits = (f"barrier {key}, line {each.line}", lambda: state["phase"] != phase)

    return run


BARRIERS = {
    "mbarrier.init": _mbarrier_init,
    "mbarrier.arrive.expect_tx": _mbarrier_expect,
    "mbarrier.arrive": _mbarrier_arrive,
    "mbarrier.try_wait": _mbarrier_try_wait,
    "bar.": _barrier,
}
