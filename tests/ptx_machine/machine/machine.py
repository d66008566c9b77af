"""A machine that executes the PTX of a kernel on a CPU: exactly enough to test with, and stricter than hardware where that is lenient.

A warp is 32 lanes of NumPy vectors. Lanes that part run one after the other, and meet again where all paths do. Warps, those of several
blocks too, take turns as a seeded generator says; copies by the copy engine are executed at any later time, products of wgmma as late as
their wait allows. A wait that nobody can end is a `Deadlock`, which says who waits for what.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from ptx_machine.instructions.instructions import compile_instruction, computes
from ptx_machine.instructions.mma import LateProducts
from ptx_machine.instructions.sums import EXACT, TensorCore
from ptx_machine.machine.async_copies import Copies
from ptx_machine.machine.memory import PARAM, Fault, Global
from ptx_machine.machine.operands import LANES, Path, spread
from ptx_machine.machine.order import STREAMS, Shared
from ptx_machine.machine.ptx_text import Kernel, parse
from ptx_machine.machine.streams import Streams

SLICE = 200  # instructions that a warp executes before another may
DTYPES = {
    **{"pred": np.dtype(bool), "b16": np.dtype(np.uint16), "b32": np.dtype(np.uint32), "b64": np.dtype(np.uint64)},
    **{"f32": np.dtype(np.float32), "f64": np.dtype(np.float64)},
}


class Deadlock(Fault):
    """Everyone who has not ended waits for something that nobody does any more."""


class Wait(NamedTuple):
    """What a warp waits for.

    Attributes
    ----------
    what : str
        In words.
    over : function
        Says whether it is over.
    then : function
        What happens when the warp goes on.
    """

    what: str
    over: Callable
    then: Callable


class Warp:
    """32 threads of a block."""

    def __init__(self, block, number: int, threads: int, instructions: int):
        self.block, self.number = block, number
        self.dtype_of, self.of_products = block.machine.dtype_of, block.machine.of_products
        thread = np.arange(LANES, dtype=np.uint32) + np.uint32(number * LANES)
        self.special = {"%tid.x": thread, "%laneid": np.arange(LANES, dtype=np.uint32)}
        self.registers = {}
        self.unwritten = {}  # lanes in which a register has no value, where it has in others
        self.paths = [Path(0, thread < threads, instructions)]
        self.waits: Wait | None = None
        self.products, self.groups = [], []  # of wgmma: not yet committed; all that were
        self.committed = self.executed_groups = 0
        self.in_flight = {}  # registers that a product has yet to write, or reads
        self.unfenced = set()  # registers of products that were written after the last wgmma.fence
        self.late = LateProducts()  # of mma.sync
        self.awaits = self.late.of
        self.stores, self.copies = {}, Copies()  # bulk stores of each lane that has any; cp.async
        self.at, self.asked = 0, None
        self.taint = None  # lanes in which what an instruction has read was never written
        self.clocks = block.shared.order.begin(number)

    @property
    def lanes(self) -> np.ndarray:
        return self.paths[-1].lanes

    @property
    def line(self) -> int:
        """Of the instruction that runs."""
        return self.block.machine.kernel.instructions[self.at].line

    @property
    def known_streams(self) -> np.ndarray:
        """How far each stream of stores to global memory is known to have come."""
        return self.clocks.seen[-STREAMS:]

    def read(self, name: str) -> np.ndarray:
        """Values of a register in all lanes."""
        if name in self.in_flight:
            raise Fault(f"{name} belongs to a product that has not been waited for")
        if name in self.awaits:
            self.late.settle(self)
        if name not in self.registers:
            raise Fault(f"{name} is read before it is written")
        if name in self.unwritten:
            self._taint(name)
        return self.registers[name]

    def decide(self, predicate: str) -> np.ndarray:
        """Values of a predicate that something depends on."""
        if (self.unwritten.get(predicate, False) & self.lanes).any():
            raise Fault(f"{predicate} holds what was never written")
        return self.read(predicate)

    def _taint(self, name: str) -> None:
        """What is computed from a value that was never written has none either; but nothing may depend on it."""
        lanes = self.unwritten[name] & self.lanes
        if lanes.any():
            if not self.block.machine.computes[self.at]:
                raise Fault(f"{name} holds what was never written")
            self.taint = lanes if self.taint is None else self.taint | lanes

    def write(self, name: str, value: np.ndarray) -> None:
        """Set a register in the lanes that run."""
        if name in self.in_flight:
            raise Fault(f"{name} belongs to a product that has not been waited for")
        if name in self.awaits:
            self.late.settle(self)
        if name in self.of_products:
            self.unfenced.add(name)
        dtype = self.dtype_of[name]
        if value.dtype is not dtype:
            if value.dtype.itemsize < dtype.itemsize:
                value = value.astype(np.int64 if value.dtype.kind == "i" else np.uint64).astype(dtype)
            elif value.dtype != dtype:
                value = value.view(dtype)
        if self.paths[-1].whole:
            self.registers[name] = spread(value)
            if name in self.unwritten:
                del self.unwritten[name]
        else:
            before, lanes = self.registers.get(name), self.lanes
            self.poison(name, (self.unwritten[name] if name in self.unwritten else np.full(LANES, before is None)) & ~lanes)
            self.registers[name] = np.where(lanes, value, 0 if before is None else before).astype(value.dtype, copy=False)
        if self.taint is not None:
            self.poison(name, self.unwritten.get(name, False) | self.taint)

    def poison(self, name: str, lanes: np.ndarray) -> None:
        """What the register holds in these lanes must not be used."""
        if lanes.any():
            self.unwritten[name] = lanes
        else:
            self.unwritten.pop(name, None)

    def wait_for(self, what: str, over: Callable, then: Callable = lambda: None) -> None:
        """Go on when it is over."""
        self.waits = Wait(what, over, then)

    def asks(self, instruction, about, answer) -> None:
        """Wait until something has happened, if it asks the same again while nothing has."""
        machine = self.block.machine
        question, seen = (instruction.line, about, answer, machine.events), machine.events
        if self.asked == question:
            self.wait_for(f"{instruction.opcode} {about}, line {instruction.line}", lambda: machine.events != seen)
        self.asked = question

    def go_on(self, budget: int) -> None:
        """Execute instructions; what the warp waited for is over."""
        if self.waits is not None:
            then, self.waits = self.waits.then, None
            then()
        self.run(budget)

    def run(self, budget: int) -> None:
        """Execute instructions until the warp waits, ends, or has had its share."""
        program = self.block.machine.program
        while budget and self.paths and self.waits is None:
            path = self.paths[-1]
            if path.at == path.meet:
                self.paths.pop()
                continue
            at = self.at = path.at
            path.at += 1
            budget -= 1
            self.taint = None
            try:
                program[at](self)
            except Fault as fault:
                raise type(fault)(f"block {self.block.number}, warp {self.number}, {self.block.machine.where(at)}: {fault}") from None

    def branch(self, taken: np.ndarray, target: int, meet: int) -> None:
        """Lanes `taken` go to the target."""
        path = self.paths[-1]
        lanes = path.lanes
        going, staying = lanes & taken, lanes & ~taken
        if not staying.any():
            path.at = target
        elif going.any():
            rest = path.at
            path.at = meet
            self.paths.append(Path(rest, staying, meet))
            self.paths.append(Path(target, going, meet))

    def gathers(self) -> bool:
        """True if all lanes that have not ended are here; else those that are wait for the others, which come next.

        Where paths may also end, they meet nowhere before that but at a barrier.
        """
        path = self.paths[-1]
        if (path.lanes == self.paths[0].lanes).all():
            return True
        path.at -= 1
        for other in self.paths[:-1]:
            if other.at == path.at and other.lanes is not path.lanes and not (other.lanes & path.lanes).any():
                path.lanes = path.lanes | other.lanes
                path.whole = bool(path.lanes.all())
                self.paths.remove(other)
                return False
        self.paths.insert(-1, self.paths.pop())
        return False

    def end(self) -> None:
        """The lanes that run are done."""
        done = self.lanes.copy()
        self.paths.pop()
        for path in self.paths:
            path.lanes, path.whole = path.lanes & ~done, False
        self.paths = [path for path in self.paths if path.lanes.any()]


def deadlock(warps: list[Warp]) -> Deadlock:
    """Who waits for what."""
    waiting = "\n".join(f"block {w.block.number}, warp {w.number} waits for {w.waits.what}" for w in warps)
    return Deadlock(f"nobody can go on:\n{waiting}")


class Block:
    """Threads that share memory."""

    def __init__(self, machine, number: int, threads: int, shared_bytes: int):
        self.machine, self.number = machine, number
        warps = -(-threads // LANES)
        self.shared = Shared(machine.kernel.shared_bytes + shared_bytes, warps, machine.early)
        self.mbarriers, self.barriers, self.counts, self.product_agents = {}, {}, {}, {}
        self.warps = [Warp(self, w, threads, len(machine.kernel.instructions)) for w in range(warps)]

    @property
    def order(self):
        return self.shared.order

    def ended(self) -> bool:
        """Whether all threads have; they must have waited for what copies do with shared memory, and one of them for the kernels before:
        who waits for this kernel takes it that those have ended, too.
        """
        if any(warp.paths for warp in self.warps):
            return False
        if not any(warp.clocks.seen[self.order.before] for warp in self.warps):
            raise Fault(f"block {self.number} has ended, but has not waited for the kernels before")
        for mbarrier in self.mbarriers.values():
            if max(warp.clocks.seen[mbarrier.agent] for warp in self.warps) < mbarrier.fetched:
                raise Fault(f"block {self.number} has ended, but nobody waited for the copies of the mbarrier at {mbarrier.address}")
        for warp in self.warps:
            if any(warp.clocks.seen[stores.agent] < stores.last for stores in warp.stores.values()):
                raise Fault(f"block {self.number} has ended, but warp {warp.number} has not waited until its stores were read")
            if warp.clocks.seen[self.order.warps + warp.number] < warp.copies.begun:
                raise Fault(f"block {self.number} has ended, but warp {warp.number} has not waited for its copies")
        return True


@dataclass
class Machine:
    """Runs one kernel.

    Attributes
    ----------
    text : str
        Its PTX.
    seed : int
        Of the order in which warps take turns and copies are executed.
    resident : int, optional
        How many blocks there is room for; the next one begins when one has ended. All, by default.
    core : TensorCore, optional
        How tensor cores add; rounded to nearest, by default.
    early : bool
        Whether kernels before it may still run, as after an early `Launch`.
    """

    text: str
    seed: int = 0
    resident: int | None = None
    core: TensorCore | None = EXACT
    early: bool = False
    memory: Global = field(default_factory=Global)

    def __post_init__(self):
        self.kernel: Kernel = parse(self.text)
        self.dtype_of = {name: DTYPES[kind.replace("u", "b").replace("s", "b")] for name, kind in self.kernel.kinds.items()}
        self.random, self.engine, self.events, self.streams = random.Random(self.seed), [], 0, Streams()
        self.haste = self.random.choice((1, 0.2, 0.03))  # of copies: some orders have them as late as can be
        self.of_products = {
            name
            for each in self.kernel.instructions
            if each.opcode.startswith("wgmma.mma_async")
            for names in each.operands
            if isinstance(names, tuple)
            for name in names
        }
        self.computes = [computes(each) for each in self.kernel.instructions]
        self.program = [compile_instruction(self, i) for i in range(len(self.kernel.instructions))]

    def later(self, do: Callable, count: int = 0, mbarrier: int | None = None) -> None:
        """Have the copy engine do something, at any time: move so many bytes, which the mbarrier at an address waits for."""
        self.engine.append(do)

    def where(self, at: int) -> str:
        """An instruction, as it stands in the text."""
        each = self.kernel.instructions[at]
        return f"line {each.line}, {each.opcode} {', '.join(map(str, each.operands))[:80]}"

    def launch(self, arguments: list, grid: int, threads: int, shared_bytes: int = 0) -> None:
        """Run the kernel to its end.

        Parameters
        ----------
        arguments : list
            Numbers, or tensor maps, in the order of the parameters.
        grid, threads, shared_bytes : int
            Blocks, threads of a block, its dynamic shared memory.
        """
        parameters = self.kernel.parameters
        assert len(arguments) == len(parameters), f"{len(arguments)} arguments for {len(parameters)} parameters"
        data = np.zeros(parameters[-1].offset + parameters[-1].size, np.uint8)
        self.maps = {}
        for argument, parameter in zip(arguments, parameters, strict=True):
            if parameter.kind == "b8":
                self.maps[PARAM + parameter.offset] = argument
            else:
                kind = {"u64": np.uint64, "f64": np.float64, "f32": np.float32, "u32": np.uint32}[parameter.kind]
                value = np.array(argument) if isinstance(argument, float) else np.array(int(argument) % 2**64, np.uint64)
                if kind in (np.float64, np.float32):
                    value = np.array(float(argument))
                data[parameter.offset : parameter.offset + parameter.size] = np.frombuffer(value.astype(kind).tobytes(), np.uint8)
        self.parameters, self.grid, self.threads = data, grid, threads
        with np.errstate(all="ignore"), threadpool_limits(1, "blas"):  # the matrices are small
            self._run(threads, shared_bytes)

    def _run(self, threads: int, shared_bytes: int) -> None:
        coming, blocks = iter(range(self.grid)), []
        while True:
            for number in islice(coming, (self.resident or self.grid) - len(blocks)):
                blocks.append(Block(self, number, threads, shared_bytes))
            warps = [warp for block in blocks for warp in block.warps if warp.paths]
            if not warps and not self.engine:
                return
            self._step(warps)
            blocks = [block for block in blocks if not block.ended()]

    def _step(self, warps: list) -> None:
        """Let a warp, or the copy engine, go on."""
        able = [warp for warp in warps if warp.waits is None or warp.waits.over()]
        if not able and not self.engine:
            raise deadlock(warps)
        if able and self.random.random() >= self.haste * len(self.engine) / (len(able) + len(self.engine)):
            self.random.choice(able).go_on(self.random.randrange(1, SLICE))
        else:
            self.engine.pop(self.random.randrange(len(self.engine)))()
