"""mbarriers (PTX ISA 9.7.13.15), named barriers (9.7.13.1), fences (9.7.13.4), and what orders kernels (9.7.13.13)."""

from functools import partial

import numpy as np

from ptx_machine.machine.memory import Fault
from ptx_machine.machine.operands import LANES, one, readers, spread
from ptx_machine.machine.order import Clocks, Race

MBARRIER_BYTES = 8


class Mbarrier:
    """Arrivals and bytes that a phase waits for, and what is known when it is complete.

    Parameters
    ----------
    block : Block
        In whose shared memory it is.
    address, count : int
        Where, and how many arrivals complete a phase.
    maker : Warp
        Who initialises it.
    """

    def __init__(self, block, address: int, count: int, maker):
        self.block, self.address, self.count, self.pending = block, address, count, count
        self.bytes, self.phase, self.fetched = 0, 0, 0  # `fetched`: the last phase that waits for a copy, plus 1
        self.agent = block.order.agent(f"a copy that the mbarrier at {address} waits for")
        self.maker, self.made, self.known_to_copies = maker.number, int(maker.clocks.seen[maker.number]), False
        self.asked = {}  # the phase that each warp waits for
        self.done, self.arriving = block.order.nothing(), block.order.nothing()

    def used_by(self, warp) -> "Mbarrier":
        """Itself, if the warp knows that it has been initialised."""
        if warp.clocks.seen[self.maker] < self.made:
            raise Race(f"nothing says that the mbarrier at {self.address} has been initialised before")
        return self

    def arrive(self, known: Clocks, arrivals: int) -> None:
        """Some threads have arrived, who knew that."""
        if arrivals > self.pending:
            raise Fault(f"{arrivals} arrivals at the mbarrier at {self.address}, which waits for {self.pending}")
        self.arriving.join(known)
        self.pending -= arrivals
        self._advance()

    def expect(self, more: int) -> None:
        """The phase waits for more bytes."""
        self.bytes += more

    def receive(self, count: int) -> None:
        """Bytes have come."""
        if count > self.bytes:
            raise Fault(f"{count} bytes arrive at the mbarrier at {self.address}, which waits for {self.bytes}")
        self.bytes -= count
        self._advance()

    def _advance(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1
            self.arriving.seen[self.agent] = self.phase
            self.done.join(self.arriving)
            self.arriving = self.block.order.nothing()
            self.block.machine.events += 1

    def is_over(self, warp, parity: int) -> bool:
        """Whether the phase of this parity is complete; the warp then knows what was done before."""
        asked = self.asked.setdefault(warp.number, self.phase)
        if self.phase - asked > 1:
            raise Fault(f"the mbarrier at {self.address} has completed two phases while this waited for one")
        if self.phase % 2 == parity:
            return False
        del self.asked[warp.number]
        warp.clocks.join(self.done)
        return True


def mbarrier_of(warp, address: int) -> Mbarrier:
    """What is at an address."""
    try:
        return warp.block.mbarriers[address].used_by(warp)
    except KeyError:
        raise Fault(f"there is no mbarrier at {address}; there are {sorted(warp.block.mbarriers)}") from None


def _mbarrier_init(machine, each):
    at, count = readers(machine, each.operands)

    def run(warp):
        address, block = one(warp, at), warp.block
        granules = block.shared.granules(np.array([address]), MBARRIER_BYTES)
        block.order.keep_for_mbarrier(granules, block.order.by_warp(warp))
        block.mbarriers[address] = Mbarrier(block, address, one(warp, count), warp)
        machine.events += 1

    return run


def _fence_mbarrier_init(machine, each):
    def run(warp):
        for mbarrier in warp.block.mbarriers.values():
            mbarrier.known_to_copies |= mbarrier.maker == warp.number

    return run


def _mbarrier_arrive(machine, each):
    if each.opcode not in ("mbarrier.arrive.shared.b64", "mbarrier.arrive.shared::cta.b64") or len(each.operands) != 2:
        raise ValueError("only arrivals of one")
    (at,) = readers(machine, each.operands[1:])

    def run(warp):
        addresses = spread(at(warp))[warp.lanes]
        for address, arrivals in zip(*np.unique(addresses, return_counts=True), strict=True):
            mbarrier_of(warp, int(address)).arrive(warp.block.order.released(warp), int(arrivals))

    return run


def _mbarrier_expect(machine, each):
    at, more = readers(machine, each.operands[1:])

    def run(warp):
        mbarrier = mbarrier_of(warp, one(warp, at))
        mbarrier.expect(one(warp, more))
        mbarrier.arrive(warp.block.order.released(warp), 1)

    return run


def _mbarrier_wait(machine, each, returns=False):
    """`returns`: not only when the phase is over. A loop that asks for nothing else would not be found to have no end."""
    destination, *_ = each.operands
    at, parity = readers(machine, each.operands[1:])

    def run(warp):
        addresses, parities = spread(at(warp)), spread(parity(warp))
        lanes = np.flatnonzero(warp.lanes)
        address, wanted = int(addresses[lanes[0]]), int(parities[lanes[0]])
        if (addresses[lanes] != address).any() or (parities[lanes] != wanted).any():
            raise Fault("lanes wait for different phases")
        done = mbarrier_of(warp, address).is_over(warp, wanted)
        warp.write(destination, np.full(LANES, done))
        if not done and not returns:
            warp.asks(each, f"at {address}", False)

    return run


class Meeting:
    """One use of a named barrier: who has come, and what they knew."""

    def __init__(self, order):
        self.arrived, self.complete, self.known = 0, False, order.nothing()


def _barrier(machine, each):
    number, threads = readers(machine, each.operands if len(each.operands) > 1 else [each.operands[0], "0"])
    waits = ".sync" in each.opcode

    def run(warp):
        if not warp.gathers():
            return
        block, lane = warp.block, int(np.flatnonzero(warp.lanes)[0])
        key = int(spread(number(warp))[lane])
        expected = int(spread(threads(warp))[lane]) or block.machine.threads
        meeting = block.barriers.setdefault(key, Meeting(block.order))
        meeting.arrived += LANES
        if meeting.arrived > expected:
            raise Fault(f"{meeting.arrived} threads at barrier {key}, which waits for {expected}")
        block.order.meet(warp)
        meeting.known.join(block.order.released(warp))

        def goes_on():
            warp.clocks.join(meeting.known)

        if meeting.arrived == expected:
            meeting.complete = True
            del block.barriers[key]
            machine.events += 1
            if waits:
                goes_on()
        elif waits:
            warp.wait_for(f"barrier {key}, line {each.line}", lambda: meeting.complete, goes_on)

    return run


def _fence_proxy_async(machine, each):
    if each.opcode not in ("fence.proxy.async", "fence.proxy.async.shared::cta"):
        raise ValueError("a fence for other memory")

    def run(warp):
        warp.block.order.fence(warp)

    return run


def _wait_for_kernels(machine, each):
    def run(warp):
        if (warp.lanes != warp.paths[0].lanes).any():
            raise Fault("only some lanes of a warp wait for the kernels before")
        warp.block.order.wait_for_kernels(warp)

    return run


def _let_next_begin(machine, each):
    def run(warp):
        warp.block.order.after_kernels(warp, "the next kernel may begin")

    return run


BARRIERS = {
    "griddepcontrol.wait": _wait_for_kernels,
    "griddepcontrol.launch_dependents": _let_next_begin,
    "mbarrier.init": _mbarrier_init,
    "mbarrier.arrive.expect_tx": _mbarrier_expect,
    "mbarrier.arrive": _mbarrier_arrive,
    "mbarrier.try_wait": _mbarrier_wait,
    "mbarrier.test_wait": partial(_mbarrier_wait, returns=True),
    "fence.mbarrier_init": _fence_mbarrier_init,
    "fence.proxy.async": _fence_proxy_async,
    "bar.sync": _barrier,
    "bar.arrive": _barrier,
}
