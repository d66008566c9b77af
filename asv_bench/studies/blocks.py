"""What attention on dask arrays costs beside one call: time of both passes, what a task takes beyond its share of that call, and memory.

Workers are processes of one thread; on a machine with GPUs each has one, as dask-cuda starts them. By several sizes of chunks along queries
and keys, causal; the call that all is compared with runs in such a worker, too. On GPUs the layer is that of `gpus.py`.

    python asv_bench/studies/blocks.py --json FILE [--workers 1] [--tokens 131072] [--chunks 8192,16384,32768] [--dtype bfloat16]
"""

import argparse
import logging
import resource
import sys
import time
from functools import partial
from statistics import median
from typing import NamedTuple

import common
import dask
import dask.array as da
import ml_dtypes
import numpy as np
import psutil
from distributed import Client, Nanny, Scheduler, SpecCluster, wait

import numba_flash
import numba_flash.dask

DEFAULTS = {
    "gpu": {"dtype": "bfloat16", "heads": 16, "heads_kv": 8, "head_dim": 128, "tokens": 2**17, "chunks": [2**13, 2**14, 2**15]},
    "cpu": {"dtype": "float32", "heads": 2, "heads_kv": 1, "head_dim": 64, "tokens": 2**12, "chunks": [2**9, 2**10, 2**11]},
}
SMALL = 64  # tokens of a call that loads, or compiles, the kernels


class Work(NamedTuple):
    """One layer, and where it is computed."""

    place: str
    dtype: str
    heads: int
    heads_kv: int
    head_dim: int
    tokens: int

    @property
    def xp(self):
        """The library of its arrays."""
        if self.place == "cpu":
            return np
        import cupy

        return cupy

    @property
    def kind(self) -> np.dtype:
        """The dtype of its arrays."""
        return np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Of q, k, v and do."""
        return [(heads, self.tokens, self.head_dim) for heads in (self.heads, self.heads_kv, self.heads_kv, self.heads)]

    def drawn(self, shape: tuple[int, ...], seed: int):
        """Normal numbers."""
        x = self.xp.empty(shape, self.kind)
        rng = self.xp.random.default_rng(seed)
        for head in x:
            head[...] = rng.standard_normal(head.shape, np.float32).astype(self.kind)
        return x

    def settle(self) -> None:
        """Wait for the kernels."""
        if self.place == "gpu":
            self.xp.cuda.Device().synchronize()


# ---- in a worker -------------------------------------------------------------------------------------------------------------------------


def at_rest(work: Work) -> int:
    """Bytes that this process has for arrays now: CuPy's pool, or all of it on the CPU."""
    if work.place == "cpu":
        return psutil.Process().memory_info().rss
    pool = work.xp.get_default_memory_pool()
    pool.free_all_blocks()
    return pool.total_bytes()


def at_most(work: Work) -> int:
    """Bytes that it has had at some time; the pool gives nothing back by itself. Beside it dask has what comes from another worker."""
    if work.place == "cpu":
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return work.xp.get_default_memory_pool().total_bytes()


def one_call(work: Work, rounds: int) -> dict:
    """Milliseconds of each pass on whole arrays, and bytes beyond these."""
    q, k, v, do = (work.drawn(shape, seed) for seed, shape in enumerate(work.shapes))
    work.settle()
    before, ms = at_rest(work), {"forward": [], "backward": []}
    for _ in range(rounds + 1):
        start = time.perf_counter()
        o, lse = numba_flash.forward(q, k, v, causal=True, return_lse=True)
        work.settle()
        middle = time.perf_counter()
        gradients = numba_flash.backward(do, q, k, v, o, lse, causal=True)
        work.settle()
        ms["forward"].append(1e3 * (middle - start))
        ms["backward"].append(1e3 * (time.perf_counter() - middle))
        del o, lse, gradients
    return {f"{name}_ms": median(each[1:]) for name, each in ms.items()} | {"bytes": at_most(work) - before}


def block(work: Work, seed: int, block_info: dict):
    """A block of an array of dask."""
    at = block_info[None]
    return work.drawn(at["chunk-shape"], 1000 * seed + at["chunk-location"][1])


# ---- from outside ------------------------------------------------------------------------------------------------------------------------


def cluster_of(workers: int, gpus: int) -> SpecCluster:
    """Workers of one thread; each sees all GPUs, its own first."""
    seen = lambda rank: {"CUDA_VISIBLE_DEVICES": ",".join(str((rank + i) % gpus) for i in range(gpus))} if gpus else {}
    quiet = {"nthreads": 1, "silence_logs": logging.WARNING, "memory_limit": None}  # or what is spilled would be timed
    each = {rank: {"cls": Nanny, "options": quiet | {"env": seen(rank)}} for rank in range(workers)}
    return SpecCluster(each, scheduler={"cls": Scheduler, "options": {"dashboard": False}}, silence_logs=logging.WARNING)


def tasks_of(results: tuple, inputs: tuple) -> int:
    """How many tasks make these arrays of those."""
    keys = lambda arrays: {key for x in arrays for key in x.__dask_graph__()}
    return len(keys(results) - keys(inputs))


def in_blocks(client: Client, work: Work, chunk: int, rounds: int) -> dict:
    """Milliseconds of each pass in chunks, and bytes beyond the inputs in the worker that needs most."""
    meta = work.xp.empty((0, 0, 0), work.kind)
    arrays = [
        da.map_blocks(partial(block, work, seed), chunks=da.core.normalize_chunks((-1, chunk, -1), shape), dtype=work.kind, meta=meta)
        for seed, shape in enumerate(work.shapes)
    ]
    q, k, v, do = dask.persist(*arrays)
    wait([q, k, v, do])
    before, row = client.run(at_rest, work), {"forward_ms": [], "backward_ms": []}

    def timed(name: str, results: tuple, inputs: tuple) -> tuple:
        row[f"{name}_tasks"] = tasks_of(results, inputs)
        start = time.perf_counter()
        results = dask.persist(*results)
        wait(results)
        client.run(work.settle)
        row[f"{name}_ms"].append(1e3 * (time.perf_counter() - start))
        return results

    for turn in range(rounds + 1):
        options = {"causal": True, "scale": (1 + 1e-6 * turn) * work.head_dim**-0.5}  # or dask would know the results
        inputs = (q, k, v)
        o, lse = timed("forward", numba_flash.dask.forward(*inputs, return_lse=True, **options), inputs)
        inputs = (do, q, k, v, o, lse)
        gradients = timed("backward", numba_flash.dask.backward(*inputs, **options), inputs)
        del o, lse, gradients, inputs
    most = client.run(at_most, work)
    row["bytes"] = max(most[worker] - rest for worker, rest in before.items())
    return row | {name: median(ms[1:]) for name, ms in row.items() if name.endswith("_ms")}


def said(row: dict, whole: dict) -> str:
    """A line about a row beside the one call."""
    if row is whole:
        return f"one call: {row['forward_ms']:.1f} and {row['backward_ms']:.1f} ms, {row['bytes'] / 1e6:.0f} MB"
    parts = []
    for name in ("forward", "backward"):
        share = whole[f"{name}_ms"] / row["workers"]
        ms, tasks = row[f"{name}_ms"], row[f"{name}_tasks"]
        more = row["workers"] * (ms - share) / tasks
        parts.append(f"{name} {ms:.1f} ms, {ms / share:.2f} of its share of one call, {tasks} tasks, each {more:.2f} ms more")
    return f"chunks of {row['chunk']}: {'; '.join(parts)}; {row['bytes'] / 1e6:.0f} MB in the worker that needs most"


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    parser: argparse.ArgumentParser = common.parser(__doc__)
    parser.add_argument("--workers", type=int, metavar="W", help="default: as many as there are GPUs, on the CPU 1")
    parser.add_argument("--tokens", type=int, help="default 131072, on the CPU 4096")
    parser.add_argument("--dtype", help="default bfloat16, on the CPU float32")
    parser.add_argument("--chunks", type=common.numbers, help="default 8192, 16384 and 32768, on the CPU 512 to 2048")
    options = parser.parse_args(arguments)
    clock = common.clock()
    shape = DEFAULTS[clock.place] | {name: x for name in ("tokens", "chunks", "dtype") if (x := getattr(options, name))}
    chunks, rounds = shape.pop("chunks"), options.repeats or 3
    work = Work(clock.place, **shape)
    gpus = clock.cuda.runtime.getDeviceCount() if clock.place == "gpu" else 0
    workers, rows = options.workers or max(1, gpus), []
    for chunk in (None, *chunks):
        with cluster_of(1 if chunk is None else workers, gpus) as cluster, Client(cluster) as client:
            client.run(one_call, work._replace(tokens=SMALL), 1)
            row = {"chunk": chunk, "workers": workers, "gpus": min(workers, gpus)}
            if chunk is None:
                row = {"chunk": None, "workers": 1, "gpus": min(1, gpus)} | client.submit(one_call, work, rounds).result()
            else:
                row |= in_blocks(client, work, chunk, rounds)
        rows.append(row)
        print(said(row, rows[0]), flush=True)
        common.write(options, "blocks", clock.place, rows, **shape)


if __name__ == "__main__":
    sys.exit(main())
