"""The named workloads, and how they are measured: by `numba_flash.bench`, which checks each result before it is timed."""

from copy import copy
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np

import numba_flash
from numba_flash.bench import peers, timing
from numba_flash.bench.cases import Case, Cell
from numba_flash.bench.command import REPEATS
from numba_flash.bench.peers import Bound, Contender
from numba_flash.bench.timing import Outcome
from numba_flash.plan import tier

BACKENDS = ("cpu", "simt", "sm80", "sm90")
SMALL = ("8 heads of 256", "2 heads of 1024")
CALLS = 20  # of a small problem in a CUDA graph
PEERS = {"cpu": "torch CPU", "simt": "torch efficient", "sm80": "torch FA2", "sm90": "torch cuDNN"}

# Cell(direction, mask, dtype, batch, heads, heads_kv, length, head_dim). A workload that changes needs a new `version` in the classes that
# measure it: asv then begins a new history.
WORKLOADS = {
    "forward": {
        "cpu": Cell("forward", "full", "float32", 1, 8, 8, 2048, 64),
        "simt": Cell("forward", "full", "float32", 1, 16, 16, 8192, 128),
        "sm80": Cell("forward", "full", "float16", 4, 16, 16, 4096, 128),
        "sm90": Cell("forward", "full", "bfloat16", 4, 16, 16, 4096, 128),
    },
    "backward": {
        "cpu": Cell("backward", "full", "float32", 1, 8, 8, 2048, 64),
        "simt": Cell("backward", "full", "float32", 1, 16, 16, 8192, 128),
        "sm80": Cell("backward", "full", "float16", 4, 16, 16, 4096, 128),
        "sm90": Cell("backward", "full", "bfloat16", 4, 16, 16, 4096, 128),
    },
    "long": {
        "cpu": Cell("forward", "full", "float32", 1, 1, 1, 16384, 64),
        "simt": Cell("forward", "full", "float32", 1, 2, 2, 65536, 64),
        "sm80": Cell("forward", "full", "float16", 1, 2, 2, 131072, 128),
        "sm90": Cell("forward", "full", "bfloat16", 1, 2, 2, 131072, 128),
    },
    "decode": {  # one query against these keys
        "cpu": Cell("forward", "full", "float32", 1, 16, 8, 4096, 64),
        "simt": Cell("forward", "full", "float32", 8, 16, 8, 4096, 128),
        "sm80": Cell("forward", "full", "float16", 8, 16, 8, 4096, 128),
        "sm90": Cell("forward", "full", "bfloat16", 8, 16, 8, 4096, 128),
    },
    "options": {  # forward and backward
        "cpu": Cell("forward", "full", "float32", 1, 8, 8, 1024, 64),
        "simt": Cell("forward", "full", "float32", 1, 16, 16, 4096, 64),
        "sm80": Cell("forward", "full", "float16", 4, 16, 16, 4096, 64),
        "sm90": Cell("forward", "full", "bfloat16", 4, 16, 16, 4096, 64),
    },
    "8 heads of 256": {
        "cpu": Cell("forward", "full", "float32", 1, 8, 8, 256, 64),
        "simt": Cell("forward", "full", "float32", 1, 8, 8, 256, 64),
        "sm80": Cell("forward", "full", "float16", 1, 8, 8, 256, 64),
        "sm90": Cell("forward", "full", "bfloat16", 1, 8, 8, 256, 64),
    },
    "2 heads of 1024": {
        "cpu": Cell("forward", "full", "float32", 1, 2, 2, 1024, 64),
        "simt": Cell("forward", "full", "float32", 1, 2, 2, 1024, 64),
        "sm80": Cell("forward", "full", "float16", 1, 2, 2, 1024, 64),
        "sm90": Cell("forward", "full", "bfloat16", 1, 2, 2, 1024, 64),
    },
    "start": {
        "cpu": Cell("backward", "full", "float32", 1, 2, 2, 64, 64),
        "simt": Cell("backward", "full", "float32", 1, 2, 2, 64, 64),
        "sm80": Cell("backward", "full", "float16", 1, 2, 2, 64, 64),
        "sm90": Cell("backward", "full", "bfloat16", 1, 2, 2, 64, 64),
    },
    "memory": {
        "cpu": Cell("backward", "full", "float32", 1, 1, 1, 16384, 64),
        "simt": Cell("backward", "full", "float32", 1, 1, 1, 65536, 64),
        "sm80": Cell("backward", "full", "float16", 1, 1, 1, 65536, 64),
        "sm90": Cell("backward", "full", "bfloat16", 1, 1, 1, 65536, 64),
    },
}


def demand(backend: str, cell: Cell) -> None:
    """Raise NotImplementedError, by which asv skips a benchmark, if `backend` cannot run cells like this one here."""
    if cell.dtype == "bfloat16":
        try:
            import ml_dtypes  # noqa: F401  (makes the name known to NumPy)
        except ImportError:
            raise NotImplementedError(f"backend {backend}: bfloat16 needs the package ml_dtypes") from None
    x = np.empty((1, 1, 1, cell.head_dim), cell.dtype)
    numba_flash.plan(x, x, x, backend=backend)
    if backend != "cpu" and tier(backend).takes_numpy():
        raise NotImplementedError(f"backend {backend}: kernels run in Numba's CUDA simulator")


def contenders(backend: str, cell: Cell, beside_peer: bool) -> list[Contender]:
    """This library, and its peer if it is to be measured too. NotImplementedError if one of them cannot run here."""
    demand(backend, cell)
    ours, *others = peers.contenders(backend)
    if not beside_peer:
        return [ours]
    (peer,) = (contender for contender in others if contender.name == PEERS[backend])
    if reason := peer.why_not("cpu" if backend == "cpu" else "gpu", cell.dtype):
        raise NotImplementedError(f"{peer.name}: {reason}")
    return [ours, peer]


def clock_of(backend: str) -> timing.HostClock:
    """Where the backend's arrays live, and how time is told there."""
    return timing.HostClock() if backend == "cpu" else timing.GpuClock()


def timed(name: str, backend: str, mask: str, beside_peer: bool) -> tuple[Cell, list[Outcome]]:
    """The workload's cell, and what became of this library and, if it takes part, of its peer, in turns.

    NotImplementedError if one of them cannot run it, or the peer is wrong; RuntimeError if this library is.
    """
    cell = replace(WORKLOADS[name][backend], mask=mask)
    invited = contenders(backend, cell, beside_peer)
    if name == "decode":
        invited = [one_query(contender) for contender in invited]
    return cell, compared(cell, invited, clock_of(backend))


def compared(cell: Cell, invited: list[Contender], clock: timing.HostClock) -> list[Outcome]:
    """What became of everyone; whoever is wrong is an error, and a peer that cannot run a reason to skip."""
    with clock.current():
        outcomes = timing.compare(cell, invited, clock, REPEATS[clock.place])
    for who, outcome in outcomes.items():
        if outcome.status != "ok":
            excused = who != peers.OURS or outcome.reason.startswith("NotImplementedError")
            raise (NotImplementedError if excused else RuntimeError)(f"{who}: {outcome.reason or f'is off by {outcome.error:.1e}'}")
    return list(outcomes.values())


def beside_plain(backend: str, option: str, direction: str) -> tuple[Outcome, Outcome]:
    """A pass with what changes scores, and in turns with it the same without."""
    cell = replace(WORKLOADS["options"][backend], direction=direction, option=option)
    (ours,) = contenders(backend, cell, False)
    plain = replace(ours, name="plain", bind=partial(_bind_plain, ours.bind))
    return tuple(compared(cell, [ours, plain], clock_of(backend)))


def _bind_plain(bind, case: Case) -> Bound:
    """Timed without the option; what is checked has it, as that is what the oracle computes."""
    plain = copy(case)
    plain.cell = replace(case.cell, option="none")
    return Bound(bind(plain).repeat, bind(case).results)


def gpu_microseconds(backend: str, problem: str) -> float:
    """The GPU's time for one of the `SMALL` problems: of a call in a CUDA graph; on the CPU that of a call."""
    cell = WORKLOADS[problem][backend]
    (ours,) = contenders(backend, cell, False)
    clock = clock_of(backend)
    in_graph = replace(ours, bind=lambda case: clock.graph(ours.bind(case), CALLS))
    (outcome,) = compared(cell, [in_graph], clock)
    return 1e3 * median(outcome.ms) / CALLS


def host_microseconds(backend: str, beside_peer: bool) -> list[float]:
    """The host's time per forward call at a small shape that is repeated; on the CPU that is all of it."""
    dtype = WORKLOADS["forward"][backend].dtype
    invited = contenders(backend, Cell("forward", "full", dtype, **timing.HOST_CELL), beside_peer)
    clock = clock_of(backend)
    with clock.current():
        times = timing.host_microseconds([replace(contender, host_time=True) for contender in invited], clock, dtype)
    if peers.OURS not in times:
        raise RuntimeError(f"{peers.OURS} is wrong, or fails, at {timing.HOST_CELL}")
    if len(times) < len(invited):
        raise NotImplementedError(f"{invited[-1].name} is wrong, or fails, at {timing.HOST_CELL}")
    return [times[contender.name] for contender in invited]


def one_query(contender: Contender) -> Contender:
    """The same contender with one query at a time: it is checked with each that the oracle looks at, and timed with the last."""
    return replace(contender, bind=partial(_bind_one_query, contender.bind))


def _bind_one_query(bind, case: Case) -> Bound:
    q, k, v = case.arrays
    bounds = {}
    for row in case.rows:
        alone = copy(case)
        alone.arrays = (q[..., row : row + 1, :].copy(), k, v)
        bounds[row] = bind(alone)

    def results():
        o = np.zeros(q.shape[1:])
        for row, bound in bounds.items():
            o[:, row] = bound.results()[0][:, 0].astype(o.dtype)
        return (o,)

    return Bound(bounds[case.rows[-1]].repeat, results)
