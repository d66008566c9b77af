"""Errors of float32 against float64 on data of many kinds, by backend and precision, beside peers: relative root mean square errors of o,
dq, dk and dv.

The kinds of data are those on which ways to compute float32 on tensor cores differ: outliers, large scores, rows or columns of different
scale, other units, all of one sign, and far from the origin. The reference is the float64 oracle on the same float32 numbers.

    python asv_bench/studies/float32.py --json FILE
"""

import sys
from functools import partial

import accuracy
import common
import numpy as np

import numba_flash
from numba_flash import reference
from numba_flash.precisions import PRECISIONS

HEADS, SEED = 1, 0


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


def within(precision: str, function, arrays):
    """What a function computes where that precision is the default."""
    with numba_flash.use_precision(precision):
        return function(arrays=arrays)


def everyone(clock) -> dict:
    """Who computes, by name: a function of the arrays. Our backends that are not always IEEE do so with each precision that they have."""
    functions = accuracy.everyone("float32", clock)
    split = functions.pop("sm80")
    return {f"sm80 {name}": partial(within, name, split) for name in PRECISIONS if name != "ieee"} | functions


def rows_of(distribution: str, head_dim: int, length: int, clock) -> list[dict]:
    """A row for everyone: errors, or why there are none."""
    arrays = inputs(distribution, length, head_dim)
    q, k, v, do = (x[0] for x in arrays)
    expected = (reference.forward(q, k, v)[0], *reference.backward(do, q, k, v))
    rows = []
    for name, function in everyone(clock).items():
        row = {"distribution": distribution, "head_dim": head_dim, "who": name}
        try:
            rows.append(row | relative_errors(function(arrays=arrays), expected))
        except Exception as error:  # whatever it is, it is the reason
            rows.append(row | {"reason": accuracy.peers.sentence(error)})
        print(rows[-1], flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    parser = common.parser(__doc__)
    parser.add_argument("--length", type=int, default=4096, help="default 4096")
    parser.add_argument("--head-dims", type=common.numbers, default=[64, 128], metavar="D,...", help="default 64,128")
    options = parser.parse_args(arguments)
    clock, rows = common.clock(), []
    with clock.current():
        for d in options.head_dims:
            for name in DISTRIBUTIONS:
                rows += rows_of(name, d, options.length, clock)
    common.write(options, "float32", clock.place, rows, length=options.length, heads=HEADS)


if __name__ == "__main__":
    sys.exit(main())
