"""The machine with clocks, for pictures of what goes on at the same time: a model, no measurement.

Each warp has a clock. The earliest goes next: a warp, a copy or a product that is due. A tick is about a cycle of a multiprocessor. Warps
do not disturb each other, an instruction takes one tick or what `COSTS` says, memory and the tensor core what the constants below say.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from ptx_machine.instructions.products import finish
from ptx_machine.machine.machine import Block, Machine, Warp, deadlock
from ptx_machine.machine.operands import Path, readers, spread

LATENCY = 600  # ticks from asking memory to the first bytes
BYTES_PER_TICK = 64  # that a multiprocessor gets from the L2 cache, or gives to it
# Special functions: a quarter of a multiprocessor has 4 units for 32 lanes. A load waits for memory; on a GPU whoever uses its value does.
# Moves mostly vanish when registers are given out.
COSTS = {**dict.fromkeys(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "div", "tanh"), 8), "mov": 0, "ld.global": LATENCY, "atom": LATENCY}
COMPUTES, WAITS, PRODUCTS, COPY, STORE = "computes", "waits", "products", "copy", "store"
TENSOR_CORE, COPIES_IN, COPIES_OUT = "tensor core", "copies in", "copies out"


def cost(opcode: str) -> int:
    """Ticks that a warp is busy with an instruction."""
    words = opcode.split(".")
    return COSTS.get(words[0], COSTS.get(".".join(words[:2]), 1))


class Span(NamedTuple):
    """Something that takes time.

    Attributes
    ----------
    block : int
        Where.
    row : str
        Of the picture: a warp, the tensor core, the copy engine.
    kind, what : str
        One of the kinds above, with products of whom, and in words what is copied or waited for, or the number of products.
    begin, end : int
        In ticks.
    by : str
        Who ended a wait.
    line : int
        Of the text, where the wait stands.
    """

    block: int
    row: str
    kind: str
    what: str
    begin: int
    end: int
    by: str = ""
    line: int = 0


class Watch(NamedTuple):
    """Instructions to write down: those of one warp of block 0 in some lines of the text, with what one lane then has in registers."""

    warp: int
    lane: int
    lines: range


class Step(NamedTuple):
    """An instruction that the watched warp has executed: when, which, whether the lane took part, its registers then."""

    time: int
    number: int
    runs: bool
    values: dict


@dataclass
class Clock:
    """Of a warp: the time, since when it computes or waits, whether it waits, in which line."""

    time: int
    since: int
    waiting: bool = False
    line: int = 0


class Due(NamedTuple):
    """What happens at a time; of several at the same time, in the order in which they were begun."""

    time: int
    number: int
    block: Block
    who: str
    do: Callable


@dataclass
class Timed(Machine):
    """A `Machine` with clocks.

    Attributes
    ----------
    mbarriers, barriers : dict
        What mbarriers at addresses, and named barriers, are called.
    watch : Watch, optional
        Which instructions to write down.
    """

    mbarriers: dict = field(default_factory=dict)
    barriers: dict = field(default_factory=dict)
    watch: Watch | None = None

    def __post_init__(self):
        super().__post_init__()
        self.spans, self.steps, self.now, self.begun = [], [], 0, 0
        self.clocks, self.free = {}, defaultdict(int)  # of warps; when a row of a block is free again
        self.block: Block | None = None  # where something happens now
        wrappers = {"mbarrier.try_wait": _try_wait, "wgmma.commit": _commit, "wgmma.wait": _wait, "ld.acquire": _acquire}
        self.costs, self.alone = [], []  # ticks of an instruction; whether nobody else notices it
        for number, each in enumerate(self.kernel.instructions):
            self.costs.append(cost(each.opcode))
            self.alone.append(self.computes[number] or each.opcode.startswith("bra"))
            for prefix, wrap in wrappers.items():
                if each.opcode.startswith(prefix):
                    self.program[number] = wrap(self, each, self.program[number])

    def later(self, do: Callable, count: int = 0, mbarrier: int | None = None) -> None:
        """Have the copy engine move bytes. They come one after the other, the first of them after a while."""
        if mbarrier is not None:
            end = self._occupy(COPIES_IN, COPY, self.name(mbarrier).replace(" ready", ""), self.now + LATENCY, count)
        elif count:
            end = self._occupy(COPIES_OUT, STORE, "store", self.now, count)
        else:
            end = self.now + LATENCY
        self.at(end, "copy engine", do)

    def _occupy(self, row: str, kind: str, what: str, earliest: int, count: int) -> int:
        begin = max(earliest, self.free[self.block, row])
        end = self.free[self.block, row] = begin + -(-count // BYTES_PER_TICK)
        self.spans.append(Span(self.block.number, row, kind, what, begin, end))
        return end

    def multiply(self, group: list[Warp], number: int) -> None:
        """Have the tensor core work on a group of products. It does so in the order in which they were begun.

        A multiprocessor of Hopper multiplies and adds 2048 pairs of 16-bit numbers in a cycle, so a product m64nNk16 takes N / 2 cycles.
        """
        ticks = sum(len(product.accumulators) for product in group[0].groups[number - 1])  # N / 2 of them
        begin = max(self.now, self.free[self.block, TENSOR_CORE])
        end = self.free[self.block, TENSOR_CORE] = begin + ticks
        kind = f"{PRODUCTS} of warps {group[0].number} to {group[-1].number}"
        self.spans.append(Span(self.block.number, TENSOR_CORE, kind, str(number), begin, end))
        self.at(end, TENSOR_CORE, lambda: finish(group, number))

    def at(self, time: int, who: str, do: Callable) -> None:
        """Do something at a time."""
        self.begun += 1
        heappush(self.engine, Due(time, self.begun, self.block, who, do))

    def name(self, mbarrier: int) -> str:
        """Of the mbarrier at an address."""
        return self.mbarriers.get(mbarrier, f"mbarrier at {mbarrier}")

    def stop(self) -> None:
        """End what still goes on, where an error has ended the launch."""
        for warp, clock in self.clocks.items():
            if clock.waiting:
                self._wake(warp, "nobody")
            elif warp.paths:
                self._close(warp, COMPUTES, COMPUTES, clock.time)

    def _step(self, warps: list) -> None:
        """Let happen what comes first."""
        for warp in warps:
            if warp not in self.clocks:
                self.clocks[warp] = Clock(self.now, self.now)
        able = (warp for warp in warps if not self.clocks[warp].waiting)
        first = min(able, key=lambda warp: self.clocks[warp].time, default=None)
        if self.engine and (first is None or self.engine[0].time <= self.clocks[first].time):
            due = heappop(self.engine)
            self.now, self.block, who = due.time, due.block, due.who
            due.do()
        elif first is None:
            raise deadlock(warps)
        else:
            self.now, self.block, who = self.clocks[first].time, first.block, f"warp {first.number}"
            self._go_on(first)
        for warp in warps:
            if self.clocks[warp].waiting and warp.waits.over():
                self._wake(warp, who)

    def _go_on(self, warp: Warp) -> None:
        """One instruction, and those after it that nobody else notices."""
        clock, going = self.clocks[warp], True
        while going:
            path = _next(warp)
            number, lanes = path.at, path.lanes
            warp.go_on(1)
            clock.time += self.costs[number]
            if self.watch is not None:
                self._write_down(warp, number, lanes)
            going = warp.waits is None and warp.paths and self.alone[_next(warp).at]
        if warp.waits is not None or not warp.paths:
            self._close(warp, COMPUTES, COMPUTES, clock.time)
            clock.waiting, clock.line = bool(warp.paths), warp.line

    def _wake(self, warp: Warp, who: str) -> None:
        """What it waited for is over now."""
        clock = self.clocks[warp]
        what = re.sub(r", line \d+$", "", warp.waits.what)
        barrier = re.fullmatch(r"barrier (\d+)", what)
        if barrier is not None:
            what = self.barriers.get(int(barrier[1]), what)
        clock.time, clock.waiting = max(clock.time, self.now), False
        self._close(warp, WAITS, what, clock.time, who, clock.line)

    def _close(self, warp: Warp, kind: str, what: str, end: int, by: str = "", line: int = 0) -> None:
        clock = self.clocks[warp]
        if end > clock.since:
            self.spans.append(Span(warp.block.number, f"warp {warp.number}", kind, what, clock.since, end, by, line))
        clock.since = end

    def _write_down(self, warp: Warp, number: int, lanes: np.ndarray) -> None:
        each, (wanted, lane, lines) = self.kernel.instructions[number], self.watch
        if (warp.block.number, warp.number) != (0, wanted) or each.line not in lines:
            return
        names = re.findall(r"%\w+", " ".join(map(str, (each.guard, *each.operands))))
        known = [name for name in dict.fromkeys(names) if name in warp.registers and name not in warp.in_flight]
        warp.late.settle(warp)
        unwritten = lambda name: name in warp.unwritten and warp.unwritten[name][lane]
        values = {name: "never written" if unwritten(name) else warp.registers[name][lane] for name in known}
        self.steps.append(Step(self.clocks[warp].time, number, bool(lanes[lane]), values))


def _next(warp: Warp) -> Path:
    """Whose instruction comes next."""
    return next(path for path in reversed(warp.paths) if path.at != path.meet)


# ---- instructions that end waits when it is time -----------------------------------------------------------------------------------------


def _try_wait(machine: Timed, each, action):
    """Waits for the phase, where others ask again and again."""
    get_at, get_parity = readers(machine, each.operands[1:])

    def run(warp):
        action(warp)
        lane = int(np.flatnonzero(warp.lanes)[0])
        address = int(spread(get_at(warp))[lane])
        mbarrier = warp.block.mbarriers[address]
        seen = mbarrier.phase
        if seen % 2 == int(spread(get_parity(warp))[lane]):
            warp.wait_for(f"{machine.name(address)}, line {each.line}", lambda: mbarrier.phase != seen)

    return run


def _acquire(machine: Timed, each, action):
    """Waits for another value of a flag, once it has asked twice."""
    (get_at,) = readers(machine, each.operands[1:], np.uint64)

    def run(warp):
        action(warp)
        if warp.waits is not None:
            at = spread(get_at(warp))[warp.lanes][:1]
            region = machine.memory.find(int(at[0]))
            seen = region.load(at, 4)
            what = f"flag {region.offsets(at, 4)[0] // 4}, line {each.line}"
            warp.wait_for(what, lambda: (region.load(at, 4) != seen).any())

    return run


def _group(warp: Warp) -> list[Warp]:
    first = warp.number // 4 * 4
    return warp.block.warps[first : first + 4]


def _commit(machine: Timed, each, action):
    def run(warp):
        action(warp)
        group, number = _group(warp), warp.committed
        if all(other.committed >= number for other in group):
            machine.multiply(group, number)

    return run


def _wait(machine: Timed, each, action):
    """Waits until products are done, which then are there already."""
    allowed = int(each.operands[0])

    def run(warp):
        group, wanted = _group(warp), warp.committed - allowed
        if all(other.executed_groups >= wanted for other in group):
            action(warp)
        else:
            warp.paths[-1].at -= 1
            warp.wait_for(f"{PRODUCTS} {wanted}, line {each.line}", lambda: all(other.executed_groups >= wanted for other in group))

    return run
