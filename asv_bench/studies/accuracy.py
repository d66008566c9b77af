"""Root mean square errors of o, dq, dk and dv against float64, by backend and dtype, beside peers and the naive computation.

Inputs are N(0, 1), or with outliers, N(0, 1) + N(0, 100) Bernoulli(0.001), rounded to the dtype; do is N(0, 1). The reference is the
float64 oracle on the rounded inputs. "naive" is standard attention that stores every matrix in the dtype and sums in float32 (float64 for
float64). Peers are those of `python -m numba_flash bench` that are installed.

    python asv_bench/studies/accuracy.py --json FILE
"""

import sys
from functools import partial

import common
import numpy as np

from numba_flash import reference
from numba_flash.bench import peers, standard
from numba_flash.bench.cases import BOUNDS, Case, Cell
from numba_flash.plan import BACKENDS

HEADS, SEED = 2, 0
DISTRIBUTIONS = ("normal", "outliers")
RESULTS = ("o", "dq", "dk", "dv")


def inputs(distribution: str, dtype: str, length: int, head_dim: int) -> list[np.ndarray]:
    """q, k, v and do, (1, H, N, D)."""
    rng, shape = np.random.default_rng(SEED), (1, HEADS, length, head_dim)
    arrays = [rng.standard_normal(shape) for _ in range(4)]
    if distribution == "outliers":
        arrays[:3] = [x + 10 * rng.standard_normal(shape) * (rng.random(shape) < 0.001) for x in arrays[:3]]
    return [x.astype(dtype) for x in arrays]


def case_of(q, k, v, do, direction: str, xp) -> Case:
    """A case of the bench with these arrays, whose gradient is checked and not only in some rows."""
    heads = q.shape[1]
    case = Case(Cell(direction, "full", q.dtype.name, 1, heads, heads, *q.shape[-2:]), xp)
    case.arrays = tuple(map(xp.asarray, (q, k, v)))
    case.do = case.sparse_do = xp.asarray(do)
    return case


def naive(q, k, v, do) -> list[np.ndarray]:
    """Standard attention in the dtype of the arrays."""
    o, p = standard.forward(q, k, v)
    return [x[0] for x in (o, *standard.backward(do, q, k, v, o, p))]


def computed(contender: peers.Contender, arrays, xp) -> list[np.ndarray]:
    """What a contender of the bench makes of the arrays."""
    return [x for d in ("forward", "backward") for x in contender.bind(case_of(*arrays, d, xp)).results()]


def errors(results, expected) -> dict[str, float]:
    """Root mean square error of each result, by name."""
    square = lambda x, ref: np.square(np.asarray(x).astype(np.float64) - ref)
    return {name: float(np.sqrt(square(x, ref).mean())) for name, x, ref in zip(RESULTS, results, expected, strict=True)}


def everyone(dtype: str, clock) -> dict:
    """Who computes, by name: a function of the arrays."""
    functions = {"naive": lambda arrays: naive(*arrays)}
    for backend in BACKENDS:
        ours = peers.contenders(backend)[0]
        functions[backend] = partial(computed, ours, xp=np if backend == "cpu" else clock.xp)
    for peer in peers.contenders(None)[1:]:
        if peer.name not in ("NumPy", "CuPy") and peer.why_not(clock.place, dtype) is None:
            functions[peer.name] = partial(computed, peer, xp=clock.xp)
    return functions


def rows_of(distribution: str, dtype: str, head_dim: int, length: int, clock) -> list[dict]:
    """A row for everyone: errors, or why there are none."""
    arrays = inputs(distribution, dtype, length, head_dim)
    q, k, v, do = (x[0] for x in arrays)
    o, lse = reference.forward(q, k, v, return_lse=True)
    expected = (o, *reference.backward(do, q, k, v, o, lse))
    rows = []
    for name, function in everyone(dtype, clock).items():
        row = {"distribution": distribution, "dtype": dtype, "head_dim": head_dim, "who": name}
        try:
            rows.append(row | errors(function(arrays=arrays), expected))
        except Exception as error:  # whatever it is, it is the reason
            rows.append(row | {"reason": peers.sentence(error)})
        print(rows[-1], flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    parser = common.parser(__doc__)
    parser.add_argument("--length", type=int, default=2048, help="default 2048")
    parser.add_argument("--head-dims", type=common.numbers, default=[64, 128], metavar="D,...", help="default 64,128")
    parser.add_argument("--dtypes", default=",".join(BOUNDS), metavar="NAME,...", help="default all")
    options = parser.parse_args(arguments)
    if "bfloat16" in options.dtypes:
        import ml_dtypes  # noqa: F401  (makes the name known to NumPy)
    clock, rows = common.clock(), []
    with clock.current():
        for dtype in options.dtypes.split(","):
            for d in options.head_dims:
                rows += [row for distribution in DISTRIBUTIONS for row in rows_of(distribution, dtype, d, options.length, clock)]
    common.write(options, "accuracy", clock.place, rows, length=options.length, heads=HEADS)


if __name__ == "__main__":
    sys.exit(main())
