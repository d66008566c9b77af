"""What a ring is made of: attention to parts of several lengths, merging, copies; and rings of processes, with who waited for what.

On any machine the first three, on one GPU or the CPU. With ``--processes P`` then P processes, each on GPU ``rank % GPUs``, which talk by
NCCL (``--carrier nccl``: a GPU for each) or by way of the host (``--carrier host``: any number of GPUs, also one). Of each is said how long
its kernels and its transfers took, by events, and which share of the transfers was hidden behind kernels.

    python asv_bench/studies/ring.py --json FILE [--processes 2 --carrier host] [--tokens 65536] [--lengths 1024,4096,...]
"""

import multiprocessing
import sys
import time
from contextlib import ExitStack
from functools import partial
from queue import Empty
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import common
import numpy as np

import numba_flash
from numba_flash import distributed
from numba_flash.bench import peers, timing
from numba_flash.distributed import loops, nccl, staged, streams
from numba_flash.merge import merge_into

DEFAULTS = {
    "gpu": {"dtype": "float16", "heads": 16, "heads_kv": 2, "head_dim": 128, "lengths": [2**i for i in range(9, 15)], "tokens": 2**16},
    "cpu": {"dtype": "float32", "heads": 2, "heads_kv": 1, "head_dim": 64, "lengths": [256, 512, 1024], "tokens": 2048},
}
PATIENCE = 600  # seconds until a process is given up


def drawn(xp, shape: dict, n: int, seed: int = 0) -> list:
    """q, k, v and do of so many tokens."""
    rng = np.random.default_rng(seed)
    heads = (shape["heads"], shape["heads_kv"], shape["heads_kv"], shape["heads"])
    return [xp.asarray(rng.standard_normal((h, n, shape["head_dim"]), np.float32).astype(shape["dtype"])) for h in heads]


# ---- what a ring is made of --------------------------------------------------------------------------------------------------------------


def milliseconds(call, clock, rounds: int) -> float:
    """Median time of a call."""
    bound = peers.Bound(lambda count: [call() for _ in range(count)], None)
    bound.repeat(2)
    return 1e3 * timing.median([clock.seconds(bound, 1) for _ in range(rounds)])


def pieces(shape: dict, n: int, clock, rounds: int) -> list[dict]:
    """Both passes over n queries and n keys that all see each other, merging of their results, and copies of K to the host and back."""
    q, k, v, do = drawn(clock.xp, shape, n)
    o = clock.xp.empty(q.shape, "float32")
    forward = partial(numba_flash.forward, q, k, v, out=o, return_lse=True)
    _, lse = forward()
    backward = partial(numba_flash.backward, do, q, k, v, o.astype(q.dtype), lse)
    whole, sums = o.copy(), lse.copy()
    operations = 4 * n * n * shape["heads"] * shape["head_dim"]
    rows = []
    for what, call, work in (("forward", forward, operations), ("backward", backward, 2.5 * operations)):
        ms = milliseconds(call, clock, rounds)
        rows.append({"what": what, "length": n, "ms": ms, "tflops": work / ms / 1e9})
    ms = milliseconds(lambda: merge_into(whole, sums, o, lse), clock, rounds)
    rows.append({"what": "merge", "length": n, "ms": ms, "gb_per_s": 3 * o.nbytes / ms / 1e6})
    if clock.place == "gpu":
        import cupyx

        host = cupyx.empty_pinned(k.shape, k.dtype)
        for what, call in (("to the host", lambda: k.get(out=host, blocking=False)), ("from the host", lambda: k.set(host))):
            ms = milliseconds(call, clock, rounds)
            rows.append({"what": what, "length": n, "ms": ms, "gb_per_s": k.nbytes / ms / 1e6})
    return rows


# ---- rings of processes ------------------------------------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """What all processes of a ring do."""

    shape: dict
    tokens: int
    carrier: str
    algorithm: str
    causal: bool
    rounds: int
    place: str


class Queues:
    """A `Communicator` of processes of one machine: NumPy arrays through queues, one for each pair."""

    def __init__(self, rank: int, boxes: list):
        self.rank, self.size, self._boxes = rank, len(boxes), boxes

    def takes(self, library: str) -> bool:
        return library == "numpy"

    def exchange(self, sent, received, what):
        for x in sent:
            self._boxes[self.rank][x.peer].put(x.array.tobytes())
        return SimpleNamespace(wait=lambda: [self._read(x) for x in received])

    def _read(self, x) -> None:
        data = np.frombuffer(self._boxes[x.peer][self.rank].get(timeout=PATIENCE), np.uint8)
        x.array.reshape(-1).view(np.uint8)[...] = data


class Timeline:
    """Events before and after kernels and transfers of one process on a GPU."""

    def __init__(self, carrier: str):
        import cupy

        self._cupy, self._spans, self._device = cupy, [], cupy.cuda.Device().id
        out, back = (nccl.LANE, nccl.LANE) if carrier == "nccl" else (staged.OUT, staged.IN)
        self._out, self._back = (streams.lane(self._device, purpose).stream for purpose in (out, back))
        self._by_nccl = carrier == "nccl"
        self.begin = self._event(cupy.cuda.get_current_stream())

    def _event(self, stream) -> Any:
        event = self._cupy.cuda.Event()
        event.record(stream)
        return event

    def computed(self, function):
        """A function whose kernels are watched."""

        def watched(*x, **given):
            stream = self._cupy.cuda.get_current_stream()
            start = self._event(stream)
            result = function(*x, **given)
            self._spans.append(("kernels", start, self._event(stream)))
            return result

        return watched

    def exchanged(self, exchange):
        """The `exchange` of a communicator whose transfers of CuPy arrays are watched."""

        def watched(sent, received, what):
            if not any(isinstance(x.array, self._cupy.ndarray) for x in (*sent, *received)):
                return exchange(sent, received, what)
            self._out.wait_event(self._event(self._cupy.cuda.get_current_stream()))
            start = self._event(self._out)
            transfer = exchange(sent, received, what)
            stop = self._event(self._back) if self._by_nccl else None

            def wait():
                transfer.wait()
                self._spans.append(("transfers", start, stop or self._event(self._back)))

            return SimpleNamespace(wait=wait)

        return watched

    def read(self) -> dict:
        """Milliseconds of kernels and of transfers, and the share of these at whose time a kernel ran."""
        self._cupy.cuda.Device().synchronize()
        spans = {"kernels": [], "transfers": []}
        for what, start, stop in self._spans:
            spans[what].append([self._cupy.cuda.get_elapsed_time(self.begin, event) for event in (start, stop)])
        total = lambda each: sum(stop - start for start, stop in each)
        both = [[max(a, c), min(b, d)] for a, b in spans["transfers"] for c, d in spans["kernels"] if max(a, c) < min(b, d)]
        hidden = total(both) / total(spans["transfers"]) if spans["transfers"] else None
        return {"kernels_ms": total(spans["kernels"]), "transfers_ms": total(spans["transfers"]), "hidden": hidden, "spans": spans}


def communicator(rank: int, boxes: list, spread: Spread):
    """Who carries the arrays of this process."""
    queues = Queues(rank, boxes)
    if spread.place == "cpu":
        return queues
    if spread.carrier == "host":
        return distributed.Staged(queues)
    from cupy.cuda import nccl as of_cupy

    if rank == 0:
        unique = of_cupy.get_unique_id()
        for box in boxes[0][1:]:
            box.put(unique)
    else:
        unique = boxes[0][rank].get(timeout=PATIENCE)
    return distributed.Nccl(of_cupy.NcclCommunicator(len(boxes), unique, rank), host=queues)


def process(rank: int, boxes: list, done, spread: Any, work) -> None:
    """One process of a ring: what it says is put into the queue `done`."""
    try:
        done.put((rank, work(rank, boxes, spread)))
    except Exception as error:
        done.put((rank, f"{type(error).__name__}: {error}"))
        raise


def measured(rank: int, boxes: list, spread: Spread) -> dict:
    """Wall-clock milliseconds of each round of both passes, and the timeline of one more."""
    xp, wait = np, lambda: None
    if spread.place == "gpu":
        import cupy as xp

        device = xp.cuda.Device(rank % xp.cuda.runtime.getDeviceCount())
        device.use()
        wait = device.synchronize
    comm = communicator(rank, boxes, spread)
    given = {"layout": "zigzag" if spread.causal else "contiguous"}
    mine = len(distributed.positions(spread.tokens, comm=comm, **given))
    q, k, v, do = drawn(xp, spread.shape, mine, rank)
    given |= {"algorithm": spread.algorithm, "causal": spread.causal}

    def both() -> None:
        o, lse = distributed.forward(q, k, v, comm=comm, return_lse=True, **given)
        distributed.backward(do, q, k, v, o, lse, comm=comm, **given)
        wait()

    rounds = []
    for _ in range(spread.rounds + 1):
        start = time.perf_counter()
        both()
        rounds.append(1e3 * (time.perf_counter() - start))
    row = {"ms": timing.median(rounds[1:])}
    if spread.place == "cpu":
        return row
    return row | watched(comm, spread.carrier, both)


def watched(comm, carrier: str, both) -> dict:
    """The timeline of both passes of one process."""
    timeline = Timeline(carrier)
    with ExitStack() as stack:
        api = SimpleNamespace(forward=timeline.computed(loops.api.forward), backward=timeline.computed(loops.api.backward))
        for target, name, seen in (
            (loops, "api", api),
            (loops, "merge_into", timeline.computed(loops.merge_into)),
            (comm, "exchange", timeline.exchanged(comm.exchange)),
        ):
            stack.enter_context(patch.object(target, name, seen))
        both()
    return timeline.read()


def in_processes(count: int, spread: Any, work=measured) -> list[dict]:
    """What ``work(rank, boxes, spread)`` returns in each process."""
    context = multiprocessing.get_context("spawn")
    boxes = [[context.Queue() for _ in range(count)] for _ in range(count)]
    done = context.Queue()
    processes = [context.Process(target=process, args=(rank, boxes, done, spread, work)) for rank in range(count)]
    for each in processes:
        each.start()
    try:
        said = dict(done.get(timeout=PATIENCE) for _ in processes)
    except Empty:
        sys.exit(f"a process has said nothing for {PATIENCE} s")
    finally:
        for each in processes:
            each.join(10)
            if each.is_alive():
                each.terminate()
    failed = {rank: what for rank, what in said.items() if isinstance(what, str)}
    if failed:
        sys.exit(f"processes failed: {failed}")
    return [said[rank] for rank in range(count)]


def rings(options, shape: dict, tokens: int, place: str, rounds: int) -> list[dict]:
    """Rows of rings, causal and not, and of what gathers."""
    rows = []
    for algorithm in ("ring", "gather"):
        for causal in (False, True):
            spread = Spread(shape, tokens, options.carrier, algorithm, causal, rounds, place)
            said = in_processes(options.processes, spread)
            row = {"what": algorithm, "processes": options.processes, "gpus": options.gpus if place == "gpu" else 0}
            row |= {"carrier": options.carrier, "causal": causal, "tokens": tokens, "ms": max(each["ms"] for each in said)}
            if place == "gpu":
                row["of_processes"] = [{name: x for name, x in each.items() if name != "spans"} for each in said]
                row["spans"] = said[0]["spans"]
            rows.append(row)
            print({name: x for name, x in row.items() if name != "spans"}, flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    parser = common.parser(__doc__)
    parser.add_argument("--lengths", type=common.numbers, help="of parts; default 512 to 16384, on the CPU 256 to 1024")
    parser.add_argument("--processes", type=int, default=1, metavar="P", help="also a ring of so many")
    parser.add_argument("--carrier", choices=("host", "nccl"), default="host")
    parser.add_argument("--tokens", type=int, help="of a ring; default 65536, on the CPU 2048")
    options = parser.parse_args(arguments)
    clock = common.clock()
    shape = {name: x for name, x in DEFAULTS[clock.place].items() if name not in ("lengths", "tokens")}
    lengths, tokens = (getattr(options, name) or DEFAULTS[clock.place][name] for name in ("lengths", "tokens"))
    rounds, rows = common.repeats(options, clock.place), []
    options.gpus = min(options.processes, clock.cuda.runtime.getDeviceCount()) if clock.place == "gpu" else 0
    if options.carrier == "nccl" and options.gpus < options.processes:
        parser.error(f"NCCL wants a GPU for each of {options.processes} processes; there are {options.gpus}")
    if options.processes > 1:
        lengths = sorted({*lengths, tokens // options.processes})  # the model wants to know how fast kernels are on such parts
    with clock.current():
        for n in lengths:
            found = pieces(shape, n, clock, rounds)
            print(*found, sep="\n", flush=True)
            rows += found
    if options.processes > 1:
        rows += rings(options, shape, tokens, clock.place, rounds)
    common.write(options, "ring", clock.place, rows, **shape)


if __name__ == "__main__":
    main()
