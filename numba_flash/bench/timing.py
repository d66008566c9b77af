"""How long a call takes: every contender in turn, round after round, so that what the machine does meanwhile happens to all of them.

Each round has a new random order, so that nobody always follows the same neighbour and finds the GPU as hot, and its caches as full, as
that one leaves them. A slow contender also gives the others time to cool: beside slow ones fast ones look slower. So compare the fastest
alone (``--peers``).
"""

import random
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import geometric_mean, median

from numba_flash.bench.cases import BOUNDS, Case, Cell, relative_error
from numba_flash.bench.peers import OURS, Bound, Contender, sentence, torch_on
from numba_flash.bench.power import Power, while_running

TURN = 0.01  # seconds that a contender's turn lasts at least
MOST_CALLS = 1000  # in a turn
HOST_CALLS, HOST_TURNS = 100, 30
HOST_CELL = {"batch": 1, "heads": 2, "heads_kv": 2, "length": 64, "head_dim": 64}


class HostClock:
    """Wall-clock time on the CPU, where every call is finished when it returns."""

    place = "cpu"

    def __init__(self):
        import numpy

        self.xp = numpy

    @contextmanager
    def current(self):
        """Nothing to arrange."""
        yield

    def wait(self) -> None:
        """Nothing to wait for."""

    def seconds(self, bound: Bound, count: int, own_stream: bool = False) -> float:
        """Time of `count` calls."""
        self.wait()
        start = time.perf_counter()
        bound.repeat(count)
        return time.perf_counter() - start

    def graph(self, bound: Bound, calls: int) -> Bound:
        """So many calls as one; there is nothing to record."""
        return Bound(lambda count: bound.repeat(count * calls), bound.results)

    def power(self, bound: Bound, count: int) -> Power | None:
        """What the device draws while the contender makes `count` calls again and again; nobody tells of the CPU."""
        return None


class GpuClock(HostClock):
    """CUDA events on one stream that is CuPy's and PyTorch's current one within `current`; L2 is not flushed.

    Everything happens on the device that was current first: a peer that finds all devices (JAX does) may leave another one current.
    """

    place = "gpu"

    def __init__(self):
        import cupy

        self.xp, self.cuda = cupy, cupy.cuda
        self.device = cupy.cuda.Device()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.start, self.stop = cupy.cuda.Event(), cupy.cuda.Event()

    @contextmanager
    def current(self):
        """Context for everything that is bound and timed."""
        with self.device, self.stream, torch_on(self.stream.ptr):
            yield

    def wait(self) -> None:
        """For all streams of the device."""
        self.cuda.Device().synchronize()

    def seconds(self, bound: Bound, count: int, own_stream: bool = False) -> float:
        """Time of `count` calls on the device; of one that has its own stream, wall-clock time until the last is finished."""
        if own_stream:
            return super().seconds(bound, count)
        self.wait()
        self.start.record(self.stream)
        bound.repeat(count)
        self.stop.record(self.stream)
        self.stop.synchronize()
        return self.cuda.get_elapsed_time(self.start, self.stop) / 1e3

    def graph(self, bound: Bound, calls: int) -> Bound:
        """So many calls as one CUDA graph, whose time is the GPU's alone; of calls whose arrays are CuPy's, within `current`."""
        pool = self.cuda.MemoryPool()  # whose memory stays the graph's
        with self.cuda.using_allocator(pool.malloc):
            bound.repeat(calls)  # kernels are loaded, and the pool has memory
            self.wait()
            self.stream.begin_capture()
            bound.repeat(calls)
            graph = self.stream.end_capture()

        def repeat(count: int, kept=pool):
            for _ in range(count):
                graph.launch(self.stream)

        return Bound(repeat, bound.results)

    def power(self, bound: Bound, count: int) -> Power | None:
        """What the GPU draws meanwhile."""

        def run():
            bound.repeat(count)
            self.wait()

        return while_running(run, self.cuda.Device().pci_bus_id)


@dataclass
class Outcome:
    """What became of one contender in one cell.

    Attributes
    ----------
    status : str
        ``"ok"``, ``"WRONG"`` (its error exceeds the bound: not timed) or ``"cannot"``.
    reason : str
        Why it cannot.
    error : float
        Largest relative error against the oracle.
    ms : list of float
        Milliseconds per call, one for each round.
    power : Power or None
        What the GPU drew, if that was wanted and can be told.
    """

    status: str
    reason: str = ""
    error: float = 0.0
    ms: list[float] = field(default_factory=list)
    power: Power | None = None

    def tflops(self, cell: Cell) -> float:
        """Median over the rounds, in the work that `Cell.flops` counts."""
        return cell.flops / median(self.ms) / 1e9


def ratio(ours: Outcome | None, peer: Outcome) -> float | None:
    """Speed of ours over the peer's: median of the ratios of each round. None if one of them was not timed."""
    if ours is None or not (ours.ms and peer.ms):
        return None
    return median(theirs / mine for mine, theirs in zip(ours.ms, peer.ms, strict=True))


def compare(cell: Cell, contenders: list[Contender], clock: HostClock, repeats: int, watts: bool = False) -> dict[str, Outcome]:
    """Bind, check, and then time all contenders that are right; after that find out what they draw, if `watts` are wanted."""
    case = Case(cell, clock.xp)
    clock.wait()
    expected = case.expected()
    outcomes, bound = {}, {}
    for contender in contenders:
        outcomes[contender.name], bound[contender.name] = _check(contender, case, expected)
    runners = [c for c in contenders if outcomes[c.name].status == "ok"]
    own_stream = {c.name for c in runners if c.own_stream}
    for name, ms in take_turns({c.name: bound[c.name] for c in runners}, clock, repeats, own_stream).items():
        outcomes[name].ms = ms
        if watts:
            outcomes[name].power = clock.power(bound[name], max(1, round(1e3 * TURN / median(ms))))
    return outcomes


def take_turns(bound: dict[str, Bound], clock: HostClock, repeats: int, own_stream: set[str] = frozenset()) -> dict[str, list[float]]:
    """Milliseconds per call of each, one number for each round, after a round to warm up; every round has a random order of its own.

    Parameters
    ----------
    bound : dict
        Contenders by name, with their arrays.
    clock : HostClock
        Tells the time.
    repeats : int
        Rounds that count.
    own_stream : set of str
        Names of those that do not use CuPy's current stream.
    """
    counts = {name: _calls_per_turn(clock, each, name in own_stream) for name, each in bound.items()}
    ms: dict[str, list[float]] = {name: [] for name in bound}
    order = random.Random(0)
    for turn in range(repeats + 1):
        for name in order.sample(list(bound), len(bound)):
            seconds = clock.seconds(bound[name], counts[name], name in own_stream)
            if turn > 0:
                ms[name].append(1e3 * seconds / counts[name])
    return ms


def _check(contender: Contender, case: Case, expected) -> tuple[Outcome, Bound | None]:
    """Run it once and compare; whatever it raises is the reason why it cannot, with what it warned of before."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            bound = contender.bind(case)
            error = relative_error(case.part(bound.results()), expected)
            bound.repeat(1)
        except Exception as failure:
            remarks = dict.fromkeys(str(w.message).splitlines()[0][:200] for w in said[-3:])
            return Outcome("cannot", "; ".join([sentence(failure), *remarks])), None
    return Outcome("ok" if error <= BOUNDS[case.cell.dtype] else "WRONG", error=error), bound


def _calls_per_turn(clock: HostClock, bound: Bound, own_stream: bool) -> int:
    clock.seconds(bound, 1, own_stream)
    once = clock.seconds(bound, 2, own_stream) / 2
    return max(1, min(MOST_CALLS, round(TURN / max(once, 1e-9))))


def host_microseconds(contenders: list[Contender], clock: HostClock, dtype: str) -> dict[str, float]:
    """The host's time per forward call at `HOST_CELL`: many calls, none waited for; median of batches in random order."""
    case = Case(Cell("forward", "full", dtype, **HOST_CELL), clock.xp)
    clock.wait()
    expected = case.expected()
    checked = {c.name: _check(c, case, expected) for c in contenders if c.host_time}
    times = {name: [] for name, (outcome, _) in checked.items() if outcome.status == "ok"}
    order = random.Random(0)
    for _ in range(HOST_TURNS):
        for name in order.sample(list(times), len(times)):
            clock.wait()
            start = time.perf_counter()
            checked[name][1].repeat(HOST_CALLS)
            times[name].append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    clock.wait()
    return {name: median(batches) for name, batches in times.items()}


def summary(results: list[tuple[Cell, dict[str, Outcome]]]) -> dict[str, dict]:
    """For each peer that was timed beside this library: geometric mean and minimum of `ratio` over the cells, and where that is."""
    ratios: dict[str, list[tuple[float, str]]] = {}
    for cell, outcomes in results:
        for name, outcome in outcomes.items():
            value = None if name == OURS else ratio(outcomes.get(OURS), outcome)
            if value is not None:
                ratios.setdefault(name, []).append((value, " ".join(str(cell).split())))
    return {
        name: {
            "geometric_mean": geometric_mean(value for value, _ in values),
            "minimum": min(values)[0],
            "minimum_at": min(values)[1],
            "cells": len(values),
        }
        for name, values in ratios.items()
    }
