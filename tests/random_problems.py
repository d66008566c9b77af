"""Thousands of random problems on a GPU against the oracle in float64: all options, many of them together.

    python tests/random_problems.py [--count 20000] [--backend sm80] [--processes 15] [--seed 0]

Each has one of `STRUCTURES`, so that few kernels are compiled; sizes and values are drawn anew for each problem. What the backend refuses
is given to the one that a call chooses by itself, and counted. It ends with 1 if a result is wrong, and prints how to draw that problem
again.
"""

import argparse
import math
import multiprocessing
import sys
from typing import NamedTuple

import numpy as np
from support import DTYPES, whole

import numba_flash
from numba_flash import BlockMask

BOUND = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-12}  # of the root mean square error
MOST = 300  # queries or keys
TOGETHER = 25  # problems of one structure that a process takes at a time


class Structure(NamedTuple):
    """What makes kernels: dtype, head dimensions, names of options, and whether bias and mask are the same for all of an axis
    (batch, heads, queries, keys).
    """

    dtype: str
    d: int
    dv: int
    options: tuple[str, ...] = ()
    same: tuple[bool, ...] = (True, False, False, False)


STRUCTURES = (
    Structure("float16", 64, 64, ("causal", "bias", "bias_grad")),
    Structure("bfloat16", 32, 32, ("bias", "bias_grad", "dlse")),
    Structure("bfloat16", 128, 128, ("causal", "window", "dropout")),
    Structure("float16", 128, 64, ("mask", "softcap", "q_start", "causal")),
    Structure("bfloat16", 64, 64, ("softcap", "bias", "bias_grad", "lengths"), (False, False, False, False)),
    Structure("float16", 256, 256, ("window", "lengths", "dlse")),
    Structure("float16", 64, 64, ("dropout", "mask", "bias", "bias_grad"), (True, True, False, False)),
    Structure("bfloat16", 40, 72, ("alibi", "causal", "dropout", "lengths")),
    Structure("float16", 13, 7, ("bias", "bias_grad", "causal", "window", "q_start"), (False, True, True, False)),
    Structure("float16", 64, 64, ("causal", "q_start")),
    Structure("bfloat16", 128, 128, ("bias", "bias_grad", "mask", "dropout"), (True, False, False, False)),
    Structure("float16", 192, 128, ("relative", "lengths", "causal")),
    Structure("float32", 64, 64, ("causal", "bias", "bias_grad", "lengths")),
    Structure("float32", 128, 128, ("dropout", "mask", "dlse")),
    Structure("float32", 32, 48, ("softcap", "window", "q_start", "alibi")),
    Structure("float16", 64, 64, ("blocks", "causal"), (True, False, False, False)),
    Structure("bfloat16", 128, 128, ("blocks",), (True, True, False, False)),
    Structure("float16", 256, 192, ("blocks", "lengths"), (False, False, False, False)),
    Structure("bfloat16", 256, 256, ("blocks",), (True, True, False, False)),
    Structure("bfloat16", 64, 128, ("blocks", "bias", "bias_grad"), (True, False, False, False)),
    Structure("float64", 64, 64, ("causal", "bias", "bias_grad", "dlse"), (True, False, False, False)),
    Structure("float64", 128, 40, ("mask", "softcap", "dropout", "lengths"), (True, True, False, False)),
    Structure("float64", 24, 64, ("blocks", "alibi", "window"), (True, False, False, False)),
)
BLOCKS = 64, 128, (64, 128), (100, 33)
MODS = {
    "alibi": numba_flash.alibi(np.linspace(0.1, 0.9, 4)),
    "relative": numba_flash.relative_position(np.linspace(-1, 1, 4 * 33).reshape(4, 33)),
}


def drawn(structure: Structure, rng) -> tuple[tuple, dict]:
    """q, k, v, do, and options."""
    s, size = structure, lambda: round(math.exp(rng.uniform(0, math.log(MOST))))
    batch, hk = ((), (2,), (3, 1))[rng.integers(3)], int(rng.integers(1, 3))
    hq, nq, nk = hk * int(rng.integers(1, 4)), size(), size()
    if MODS.keys() & set(s.options):
        hk, hq = 2, 4  # their numbers are part of the kernel
    if rng.random() < 0.5:
        nk = -(-nk // 8) * 8  # rows of bias and mask at multiples of 16 bytes
    shapes = ((*batch, hq, nq, s.d), (*batch, hk, nk, s.d), (*batch, hk, nk, s.dv), (*batch, hq, nq, s.dv))
    inputs = tuple(rng.standard_normal(shape).astype(DTYPES[s.dtype]) for shape in shapes)
    scores = (*batch, hq, nq, nk)
    kept = (1 if same else n for same, n in zip((*(s.same[0],) * len(batch), *s.same[1:]), scores, strict=True))
    shape, one = tuple(kept), lambda name, make: {name: make()} if name in s.options else {}
    side = lambda: int(rng.integers(-1, MOST // 2))
    options = {"scale": float(rng.choice([-1, 1, 1]) * rng.uniform(0.3, 2) * s.d**-0.5)}
    options |= one("causal", lambda: bool(rng.random() < 0.7))
    options |= one("window", lambda: (side(), side()))
    options |= one("q_start", lambda: int(rng.integers(-20, MOST)))
    options |= one("softcap", lambda: float(rng.uniform(0.5, 30)))
    options |= one("bias_grad", lambda: True)
    options |= one("mask", lambda: rng.random(shape) < rng.choice([0.05, 0.5, 0.95]))
    options |= one("dlse", lambda: rng.standard_normal(scores[:-1]).astype(np.float64 if s.dtype == "float64" else np.float32))
    if "blocks" in s.options:
        size = BLOCKS[rng.integers(len(BLOCKS))]
        counts = BlockMask(np.ones((1, 1), bool), size).block_size.counts(nq, nk)
        options["mask"] = BlockMask(rng.random((*shape[:-2], *counts)) < rng.choice([0.1, 0.5]), size)
    if "bias" in s.options:
        bias = rng.standard_normal(shape)
        bias[rng.random(shape) < rng.choice([0.0, 0.2])] = -np.inf
        options["bias"] = bias.astype(DTYPES[s.dtype])
    if "lengths" in s.options:
        options |= {name: rng.integers(0, n + 1, batch, np.int32).reshape(batch) for name, n in (("q_lengths", nq), ("kv_lengths", nk))}
    if "dropout" in s.options:
        options |= {"dropout": float(rng.choice([0.1, 0.5])), "rng": (int(rng.integers(2**63)), int(rng.integers(2**32)))}
    for name in MODS.keys() & set(s.options):
        options["score_mod"] = MODS[name]
    return inputs, options


def sizes_of(inputs, options) -> dict:
    """How large results are, but for cancellation."""
    q, k, v, _ = inputs
    group, nq, nk = q.shape[-3] // k.shape[-3], q.shape[-2], k.shape[-2]
    of_dp = math.sqrt(v.shape[-1]) / (1 - options.get("dropout", 0.0))
    of_key = math.sqrt(max(1, group * nq / max(1, nk)))
    sizes = {"o": 1.0, "lse": 3.0, "dq": abs(options["scale"]) * of_dp, "dv": of_key}
    sizes["dk"] = sizes["dq"] * of_key
    if "bias" in options:
        pairs = math.prod(q.shape[:-1]) * nk / max(1, options["bias"].size)
        sizes["dbias"] = of_dp * math.sqrt(max(1, pairs / max(1, nk)))
    return sizes


def errors(inputs, options, backend: str | None) -> dict:
    """Root mean square error of each result over its size; infinite if NaN or Inf is elsewhere than in the oracle's."""
    import cupy

    q, k, v, do = inputs
    there = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    if isinstance(options.get("mask"), BlockMask):
        there["mask"] = BlockMask(cupy.asarray(options["mask"].blocks), options["mask"].block_size)
    of_forward = {name: x for name, x in there.items() if name not in ("bias_grad", "dlse")}
    arrays = [cupy.asarray(x) for x in inputs]
    o, lse = numba_flash.forward(*arrays[:3], return_lse=True, backend=backend, **of_forward)
    found = (o, lse, *numba_flash.backward(arrays[3], *arrays[:3], o, lse, backend=backend, **there))
    wanted = whole.everything(do, q, k, v, **options)
    sizes, off = sizes_of(inputs, options), {}
    for name, x, ref in zip(("o", "lse", "dq", "dk", "dv", "dbias"), found, wanted, strict=False):
        x = cupy.asnumpy(x).astype(np.float64)
        finite = np.isfinite(ref)
        square = np.square(np.where(finite, x - np.where(finite, ref, 0), 0), where=finite, out=np.zeros(ref.shape))
        size = sizes[name] + math.sqrt(np.mean(np.square(ref[finite]))) if finite.any() else 1.0
        same = np.array_equal(np.isfinite(x), finite)
        off[name] = math.sqrt(square.mean()) / size if same and square.size else 0.0 if same else math.inf
    return off


class Task(NamedTuple):
    """Problems of a structure, from the first on."""

    structure: int
    first: int
    count: int
    seed: int
    backend: str


class Found(NamedTuple):
    """Sentences about what is wrong among some problems, and how many of them the backend refused."""

    wrong: list[str]
    refused: int


def work(task: Task) -> Found:
    """Solve these problems."""
    number, first, count, seed, backend = task
    wrong, refused, structure = [], 0, STRUCTURES[number]
    for problem in range(first, first + count):
        inputs, options = drawn(structure, np.random.default_rng((seed, number, problem)))
        for scale, served_by in ((options["scale"], backend), (abs(options["scale"]), backend), (options["scale"], None)):
            try:
                off = errors(inputs, options | {"scale": scale}, served_by)
                break
            except NotImplementedError:  # of a scale below 0, or of these kernels
                pass
        refused += served_by != backend
        if max(off.values()) > BOUND[structure.dtype]:
            shapes = [x.shape for x in inputs]
            wrong.append(f"structure {number}, problem {problem}, seed {seed}: {off} {shapes} {sorted(options)}")
    return Found(wrong, refused)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"count": 20_000, "processes": 15, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", default="sm80")
    given = parser.parse_args()
    rounds = -(-given.count // (len(STRUCTURES) * TOGETHER))
    tasks = [
        Task(number, first * TOGETHER, TOGETHER, given.seed, given.backend) for first in range(rounds) for number in range(len(STRUCTURES))
    ]
    wrong, refused = [], 0
    with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
        for done, some in enumerate(pool.imap_unordered(work, tasks), 1):
            wrong, refused = wrong + some.wrong, refused + some.refused
            counts = f"{done * TOGETHER} of {len(tasks) * TOGETHER} problems, {refused} refused by {given.backend}, {len(wrong)} wrong"
            lines = [*some.wrong, counts]
            print(*lines, sep="\n", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
