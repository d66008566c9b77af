"""One sequence on all GPUs of a machine, beside the same one on one of them: how much faster, and who waited for what.

A process per GPU, by NCCL. In each round, and in random order, all compute the sequence together, each its part of it; or process 0
computes all of it while the others wait; or each computes all of it for itself, at the same time. Efficiency is the time alone over (GPUs
times time together). The slowest of those at the same time, over the time alone, says what other chips or clocks make of it: nothing is
sent there. Process 0 compares its part of o and of the gradients with those that it computed alone, and everybody compares the bits of
later calls with those of the first.

Sizes can be measured one at a time: ``--join NEW`` measures nothing and puts rows of an earlier run into FILE.

    python asv_bench/studies/gpus.py --json FILE [--tokens 32768,131072,524288] [--masks causal,full] [--join NEW]
"""

import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import common
import ml_dtypes
import numpy as np
import ring

import numba_flash
from numba_flash import distributed
from numba_flash.bench.cases import BOUNDS
from numba_flash.distributed.communicators import share

SHAPE = {"dtype": "bfloat16", "heads": 16, "heads_kv": 8, "head_dim": 128}
TOKENS = [2**15, 2**17, 2**19]
TURN = 0.1  # seconds that a turn lasts at least
FAST = 5e14  # operations per second of a GPU, to guess how many calls that takes
ROUNDS = 5
DIRECTIONS, WAYS = ("forward", "backward"), ("alone", "at once", "together")


class Spread(NamedTuple):
    """What all processes compute; `place` and `carrier` as `ring` has them."""

    shape: dict
    tokens: int
    causal: bool
    rounds: int
    place: str = "gpu"
    carrier: str = "nccl"

    @property
    def layout(self) -> str:
        return "zigzag" if self.causal else "contiguous"

    def operations(self, direction: str) -> float:
        full = 4 * self.tokens**2 * self.shape["heads"] * self.shape["head_dim"]
        return full * (0.5 if self.causal else 1) * (1 if direction == "forward" else 2.5)


def drawn(cupy, spread: Spread) -> list:
    """The whole of q, k, v and do, alike in all processes."""
    generator = cupy.random.default_rng(0)
    heads = (spread.shape["heads"], spread.shape["heads_kv"], spread.shape["heads_kv"], spread.shape["heads"])
    shape = (spread.tokens, spread.shape["head_dim"])
    made = [cupy.empty((h, *shape), np.dtype(ml_dtypes.bfloat16)) for h in heads]
    for x in made:
        for head in x:
            head[...] = generator.standard_normal(shape, "float32").astype(x.dtype)
    return made


def bound(arrays: list, forward, backward, **given) -> dict:
    """Both passes as functions without arguments; the backward pass on the results of one forward pass."""
    q, k, v, do = arrays
    o, lse = forward(q, k, v, return_lse=True, **given)
    return {
        "forward": lambda: (forward(q, k, v, return_lse=True, **given)[0],),
        "backward": lambda: backward(do, q, k, v, o, lse, **given),
    }


def error(results: tuple, expected: tuple, rows) -> float:
    """Largest relative error over heads, of rows of `expected`."""
    worst = 0.0
    for x, whole in zip(results, expected, strict=True):
        for ours, theirs in zip(x, whole, strict=True):
            ours, theirs = ours.astype("float32"), theirs.astype("float32")[rows]
            worst = max(worst, float(((ours - theirs) ** 2).sum() / (theirs**2).sum()) ** 0.5)
    return worst


def measured(rank: int, boxes: list, spread: Spread) -> dict:
    """What one process has measured."""
    import cupy

    device = cupy.cuda.Device(rank)
    device.use()
    comm, queues = ring.communicator(rank, boxes, spread), ring.Queues(rank, boxes)
    whole = drawn(cupy, spread)
    given = {"comm": comm, "layout": spread.layout}
    rows = cupy.asarray(distributed.positions(spread.tokens, **given))
    own = [distributed.shard(x, **given) for x in whole]
    ways = {"together": bound(own, distributed.forward, distributed.backward, causal=spread.causal, **given)}
    ways["at once"] = bound(whole, numba_flash.forward, numba_flash.backward, causal=spread.causal)
    if rank == 0:
        ways["alone"] = ways["at once"]
    said = {}
    for direction in DIRECTIONS:
        first = ways["together"][direction]()
        off = error(first, ways["alone"][direction](), rows) if rank == 0 else 0.0
        times = in_turns({way: each[direction] for way, each in ways.items()}, direction, spread, queues, device)
        again = ways["together"][direction]()
        same = all(bool((x.view("uint16") == y.view("uint16")).all()) for x, y in zip(first, again, strict=True))
        said[direction] = {"error": off, "same_bits": same} | times
    both = lambda: [ways["together"][direction]() for direction in DIRECTIONS]
    return said | {"timeline": ring.watched(comm, spread.carrier, both)}


def in_turns(calls: dict, direction: str, spread: Spread, queues, device) -> dict:
    """Milliseconds of each way in each round; a process that has no part in one waits for the others."""
    count = round(TURN * FAST * queues.size / spread.operations(direction))
    warm, count = int(count > 0), max(1, count)  # rounds that do not count; a call that takes longer than a turn was warm after its first
    times, order = {way: [] for way in WAYS}, random.Random(0)
    for turn in range(spread.rounds + warm):
        for way in order.sample(WAYS, len(WAYS)):
            device.synchronize()
            share(queues, turn)  # all are here
            start = time.perf_counter()
            for _ in range(count if way in calls else 0):
                calls[way]()
            device.synchronize()
            if turn >= warm:
                times[way].append(1e3 * (time.perf_counter() - start) / count)
    return times


def rows_of(said: list[dict], spread: Spread) -> list[dict]:
    """A row for each direction, of what all processes say: a round together takes as long as its slowest process."""
    rows = []
    for direction in DIRECTIONS:
        each = [one[direction] for one in said]
        together, at_once = ([max(times) for times in zip(*(one[way] for one in each), strict=True)] for way in ("together", "at once"))
        alone = each[0]["alone"]
        if not each[0]["error"] <= BOUNDS[spread.shape["dtype"]] or not all(one["same_bits"] for one in each):
            raise RuntimeError(f"{direction}, {spread}: error {each[0]['error']}, same bits: {[one['same_bits'] for one in each]}")
        efficiencies = [one / (len(said) * all_) for one, all_ in zip(alone, together, strict=True)]
        row = {"direction": direction, "tokens": spread.tokens, "causal": spread.causal, "layout": spread.layout, "gpus": len(said)}
        row |= {"ms": median(together), "ms_alone": median(alone), "ms_at_once": median(at_once)}
        row |= {"efficiency": median(efficiencies), "error": each[0]["error"]}
        rows.append(row | {"least": min(efficiencies), "most": max(efficiencies)})
    return rows


def joined(old: dict, new: dict) -> dict:
    """The content of a file with rows of a later one in the place of those about the same tokens and mask; they say when they were made."""
    for name in ("study", "device", *SHAPE):
        if old[name] != new[name]:
            raise ValueError(f"{name} must be the same: {old[name]} and {new[name]}")
    made = {name: new[name] for name in ("date", "commit", "packages") if new[name] != old[name]}
    of = lambda row: (row["tokens"], not row["causal"])
    again = {of(row) for row in new["rows"]}
    rows = [row for row in old["rows"] if of(row) not in again] + [row | made for row in new["rows"]]
    return old | {"rows": sorted(rows, key=of)}


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=common.numbers, default=TOKENS, help="of the sequences; default 32768,131072,524288")
    parser.add_argument("--masks", choices=("causal", "full", "causal,full"), default="causal,full", help="default: both")
    parser.add_argument("--join", type=Path, metavar="NEW", help="measure nothing; put the rows of this file into that of --json")
    options = parser.parse_args(arguments)
    if options.join:
        about = joined(*(json.loads(path.read_text()) for path in (options.json, options.join)))
        common.write_file(options.json, about.pop("rows"), about)
        return
    clock = common.clock()
    gpus = clock.cuda.runtime.getDeviceCount() if clock.place == "gpu" else 0
    if gpus < 2:
        parser.error(f"this study needs two GPUs or more; there are {gpus}")
    rows = []
    for tokens in options.tokens:
        for causal in (mask == "causal" for mask in options.masks.split(",")):
            spread = Spread(SHAPE, tokens, causal, options.repeats or ROUNDS)
            said = ring.in_processes(gpus, spread, measured)
            rows += rows_of(said, spread)
            print(*rows[-2:], sep="\n", flush=True)
            timeline = said[0]["timeline"]
            rows.append({"what": "timeline", "tokens": tokens, "causal": causal, "gpus": gpus} | timeline)
            print({name: x for name, x in rows[-1].items() if name != "spans"}, flush=True)
            common.write(options, "gpus", clock.place, rows, **SHAPE)


if __name__ == "__main__":
    sys.exit(main())
