"""Errors of float32 against float64 on data of many kinds, by backend and precision, beside peers: relative root mean square errors of o,
dq, dk and dv; and how long they take.

The kinds of data are those on which ways to compute float32 on tensor cores differ: outliers, large scores, rows or columns of different
scale, other units, all of one sign, and far from the origin. The reference is the float64 oracle on the same float32 numbers.

    python asv_bench/studies/float32.py --json FILE
"""

import sys
from dataclasses import replace
from functools import partial
from statistics import median

import accuracy
import common
import numpy as np

import numba_flash
from numba_flash import reference
from numba_flash.bench import peers, timing
from numba_flash.bench.cases import Case, Cell

HEADS, SEED = 1, 0
PEERS = ("torch efficient", "torch CPU", "NumPy")
SPLIT = ("sm90", "sm80")  # whose float32 is not IEEE's


def powers(rng, low: float, high: float, *shape: int) -> np.ndarray:
    """Powers of 10, evenly in their exponents."""
    return 10.0 ** rng.uniform(low, high, shape)


def outliers(rng, arrays, size: float):
    """One number of a thousand is so many times larger."""
    return [x + size * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.001) for x in arrays]


def of_rows(rng, arrays):
    """Rows whose sizes differ by a million."""
    ranges = (-5, 1), (-5, 1), (-3, 3), (-3, 3)
    return [x * powers(rng, *ends, *x.shape[:-1], 1) for x, ends in zip(arrays, ranges, strict=True)]


def of_columns(rng, arrays):
    """Columns in units that differ by a million; products do not depend on them."""
    q, k, v, do = arrays
    unit, unit_v = powers(rng, -3, 3, q.shape[-1]), powers(rng, -3, 3, v.shape[-1])
    return [q * unit, k / unit, v * unit_v, do / unit_v]


def times(factors, rng, arrays):
    """Each array in other units."""
    return [x * factor for x, factor in zip(arrays, factors, strict=True)]


def plus(offsets, spreads, rng, arrays):
    """Each array around an offset."""
    return [offset + spread * x for x, offset, spread in zip(arrays, offsets, spreads, strict=True)]


DISTRIBUTIONS = {
    "normal": lambda rng, arrays: arrays,
    "outliers of 10": partial(outliers, size=10.0),
    "outliers of 100": partial(outliers, size=100.0),
    "scores of 30": partial(times, (30, 1, 1, 1)),
    "scores of 0.01": partial(times, (0.01, 1, 1, 1)),
    "rows, 1e6": of_rows,
    "columns, 1e6": of_columns,
    "units": partial(times, (1e8, 1e-8, 1e-12, 1e8)),
    "one sign": partial(plus, (0, 0, 300, 1), (1, 1, 10, 0.1)),
    "offset": partial(plus, (1, 3, 3, 1), (1, 1, 1, 1)),
    "kelvin": partial(plus, (0, 300, 300, 0), (0.1, 10, 10, 1)),
}


def inputs(distribution: str, length: int, head_dim: int) -> list[np.ndarray]:
    """q, k, v and do, float32 (1, H, N, D)."""
    rng, shape = np.random.default_rng(SEED), (1, HEADS, length, head_dim)
    arrays = [rng.standard_normal(shape) for _ in range(4)]
    return [x.astype(np.float32) for x in DISTRIBUTIONS[distribution](rng, arrays)]


def relative_errors(results, expected) -> dict[str, float]:
    """Root mean square error of each result over its root mean square, by name."""
    norm = lambda x: float(np.linalg.norm(x.astype(np.float64)))
    return {name: norm(x - ref) / norm(ref) for name, x, ref in zip(accuracy.RESULTS, results, expected, strict=True)}


def within(precision: str, contender: peers.Contender, case: Case) -> peers.Bound:
    """A contender, where that precision is the default."""

    def call(function, *arguments):
        with numba_flash.use_precision(precision):
            return function(*arguments)

    bound = call(contender.bind, case)
    return peers.Bound(partial(call, bound.repeat), partial(call, bound.results))


def everyone(clock) -> dict[str, peers.Contender]:
    """Who computes, by name. Our backends that are not always IEEE do so with each precision that they have."""
    everyone = {}
    for backend in ("cpu",) if clock.place == "cpu" else ("sm90", "sm80", "simt"):
        ours = peers.contenders(backend)[0]
        for precision in ("float32", "tf32") if backend in SPLIT else ("ieee",):
            name = f"{backend} {precision}" if backend in SPLIT else backend
            everyone[name] = replace(ours, name=name, bind=partial(within, precision, ours))
    others = peers.contenders(None)[1:]
    return everyone | {peer.name: peer for peer in others if peer.name in PEERS and peer.why_not(clock.place, "float32") is None}


def expected_of(q, k, v, do, xp) -> list[np.ndarray]:
    """o, dq, dk and dv of float32 arrays (1, H, N, D) by the oracle; on a GPU, as that takes long, in float64 with whole matrices."""
    if xp is np:
        o, lse = reference.forward(q, k, v, return_lse=True)
        return [o, *reference.backward(do, q, k, v, o, lse)]
    q, k, v, do = (xp.asarray(x, np.float64) for x in (q, k, v, do))
    turned, scale = lambda x: x.swapaxes(-2, -1), q.shape[-1] ** -0.5
    p = scale * (q @ turned(k))
    p = xp.exp(p - p.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    o, dp = p @ v, do @ turned(v)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
    return [x.get() for x in (o, ds @ k, turned(ds) @ q, turned(p) @ do)]


def rows_of(distribution: str, head_dim: int, length: int, clock) -> list[dict]:
    """A row for everyone: errors, or why there are none."""
    arrays = inputs(distribution, length, head_dim)
    expected, rows = [x[0] for x in expected_of(*arrays, clock.xp)], []
    for name, contender in everyone(clock).items():
        row = {"distribution": distribution, "head_dim": head_dim, "who": name}
        try:
            rows.append(row | relative_errors(accuracy.computed(contender, arrays, clock.xp), expected))
        except Exception as error:  # whatever it is, it is the reason
            rows.append(row | {"reason": peers.sentence(error)})
        print(rows[-1], flush=True)
    return rows


def timed_rows(head_dim: int, options, clock) -> list[dict]:
    """A row for everyone and each direction: milliseconds and TFLOP/s on normal data; none for whoever cannot compute that."""
    heads, rows = options.width // head_dim, []
    for direction in ("forward", "backward"):
        cell = Cell(direction, "full", "float32", options.tokens // options.length, heads, heads, options.length, head_dim)
        case, bound = Case(cell, clock.xp), {}
        for name, contender in everyone(clock).items():
            try:
                bound[name] = contender.bind(case)
                bound[name].repeat(1)
            except NotImplementedError as error:
                print(f"{name}, {direction}, D = {head_dim}: {error}", flush=True)
                bound.pop(name, None)
        for name, ms in timing.take_turns(bound, clock, common.repeats(options, clock.place)).items():
            time = median(ms)
            row = {"direction": direction, "head_dim": head_dim, "who": name, "ms": time, "tflops": cell.flops / time / 1e9}
            rows.append(row)
            print(row, flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    parser = common.parser(__doc__)
    parser.add_argument("--length", type=int, default=4096, help="default 4096")
    parser.add_argument("--tokens", type=int, default=16384, help="of all batch elements that are timed; default 16384")
    parser.add_argument("--width", type=int, default=2048, help="of all heads that are timed; default 2048")
    parser.add_argument("--head-dims", type=common.numbers, default=[64, 128], metavar="D,...", help="default 64,128")
    options = parser.parse_args(arguments)
    clock, rows, timed = common.clock(), [], []
    with clock.current():
        for d in options.head_dims:
            timed += timed_rows(d, options, clock)
            for name in DISTRIBUTIONS:
                rows += rows_of(name, d, options.length, clock)
    common.write(options, "float32", clock.place, rows, length=options.length, heads=HEADS, times=timed)


if __name__ == "__main__":
    sys.exit(main())
