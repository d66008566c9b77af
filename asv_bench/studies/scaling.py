"""Time and memory against N of standard attention and of numba_flash, forward and backward, until standard attention runs out of memory.

Standard attention stores the N x N matrix of every head (`numba_flash.bench.standard`: CuPy on a GPU, NumPy without one). Results are
checked against the float64 oracle before they are timed; both take turns. Memory is what a forward call and the backward call after it
need at their peak beyond q, k, v and do: their results, what is kept between them, and all that they use meanwhile.

    python asv_bench/studies/scaling.py --json FILE [--lengths 1024,2048,...]
"""

import resource
import sys

import common
from benchmarks import probe

from numba_flash.bench import peers, timing
from numba_flash.bench.cases import Case, Cell

DEFAULTS = {
    "gpu": {"dtype": "float16", "heads": 8, "lengths": [2**i for i in range(10, 19)]},
    "cpu": {"dtype": "float32", "heads": 1, "lengths": [2**i for i in range(11, 16)]},
}
HEAD_DIM = 64


def limit_memory(gigabytes: float) -> None:
    """Let this process have so much more than it has: beyond, NumPy raises MemoryError, before the machine has none left."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int(1e9 * gigabytes), resource.RLIM_INFINITY))


def memory(contender: peers.Contender, cell: Cell, clock) -> int:
    """Bytes of a forward and a backward call beyond their inputs, at their peak."""
    case = Case(cell, clock.xp)
    clock.wait()
    return probe.growth_during(lambda: contender.bind(case).repeat(1), clock)


def row_of(cell: Cell, contender: peers.Contender, outcomes: dict, clock) -> dict:
    """Times of one contender by direction, and its memory, or why there are none."""
    row = {"length": cell.length, "mask": cell.mask, "contender": contender.name}
    for direction, of in outcomes.items():
        outcome = of[contender.name]
        if outcome.status != "ok":
            return row | {"failed": direction, "reason": outcome.reason or f"wrong: error {outcome.error:.1e}"}
        row[f"{direction}_ms"] = timing.median(outcome.ms)
    return row | {"bytes": memory(contender, cell, clock)}


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    parser = common.parser(__doc__)
    parser.add_argument("--lengths", type=common.numbers, help="default 1024 to 262144; on the CPU 2048 to 32768")
    parser.add_argument("--mask", choices=("full", "causal"), default="full")
    parser.add_argument("--memory", type=float, default=4, metavar="GB", help="what may be used on the CPU; default 4")
    options = parser.parse_args(arguments)
    clock = common.clock()
    default = DEFAULTS[clock.place]
    invited = [c for c in peers.contenders(None) if c.name in (peers.OURS, "CuPy" if clock.place == "gpu" else "NumPy")]
    if clock.place == "cpu":
        limit_memory(options.memory)
    rows = []
    with clock.current():
        for length in options.lengths or default["lengths"]:
            shape = (1, default["heads"], default["heads"], length, HEAD_DIM)
            cells = {direction: Cell(direction, options.mask, default["dtype"], *shape) for direction in ("forward", "backward")}
            outcomes = {d: timing.compare(cell, invited, clock, common.repeats(options, clock.place)) for d, cell in cells.items()}
            for contender in tuple(invited):
                rows.append(row_of(cells["backward"], contender, outcomes, clock))
                print(rows[-1], flush=True)
                if "failed" in rows[-1]:
                    invited.remove(contender)  # the matrix does not get smaller
    more = {"memory_gb": options.memory} if clock.place == "cpu" else {}
    shape = {"batch": 1, "heads": default["heads"], "head_dim": HEAD_DIM}
    common.write(options, "scaling", clock.place, rows, dtype=default["dtype"], **shape, **more)


if __name__ == "__main__":
    sys.exit(main())
