"""Time of causal gradients on Hopper against the order in which blocks of keys add to dQ, by how many heads share keys.

Each `Order` of `numba_flash.cuda.sm90.dq.prepare_dq_order` is checked against the float64 oracle before it is timed, and all take turns.
The kernels are the same; `chosen` is the order that the backend takes on this GPU.

    python asv_bench/studies/orders.py --json FILE [--groups 2,4,8] [--head-dims 64,128] [--lengths 512,...]
"""

import sys
from functools import partial
from statistics import median

import common
import tiles

from numba_flash.arguments.problem import ForwardInputs, bind
from numba_flash.bench import peers, timing
from numba_flash.bench.cases import Case, Cell
from numba_flash.cuda.runtime import launch
from numba_flash.cuda.sm90.backward.backward_tiles import backward_tile
from numba_flash.cuda.sm90.dq import prepare_dq_order
from numba_flash.cuda.sm90.dq.prepare_dq_order import Order
from numba_flash.cuda.work import grid
from numba_flash.plan import tier

TOKENS, WIDTH, LENGTHS = 16384, 4096, [512, 1024, 2048, 4096, 8192, 16384]
CHOICE, MOST = (prepare_dq_order, "order"), 128  # head dimensions of kernels that add to dQ in turns


def study(group: int, head_dim: int, length: int, options, clock) -> list[dict]:
    """Rows of one problem: every order, and how fast it is over DOWNWARD, the median of all rounds."""
    heads, batch = options.width // head_dim, max(1, options.tokens // length)
    cell = Cell("backward", "causal", "bfloat16", batch, heads, heads // group, length, head_dim)
    chosen = chosen_order(Case(cell, clock.xp))
    prepared = {order.name: partial(tiles.prepared, order, CHOICE, "sm90", "backward") for order in Order}
    everyone = [peers.Contender(name, bound, lambda *_: None) for name, bound in prepared.items()]
    outcomes = timing.compare(cell, everyone, clock, common.repeats(options, clock.place))
    rows = []
    for order in Order:
        outcome = outcomes[order.name]
        row = {"head_dim": head_dim, "group": group, "length": length, "order": order.name, "chosen": order is chosen}
        if outcome.status == "ok":
            row |= {"ms": median(outcome.ms), "tflops": outcome.tflops(cell), "error": outcome.error}
            row["speed"] = timing.ratio(outcome, outcomes[Order.DOWNWARD.name])
        else:
            row["reason"] = outcome.reason or f"wrong: error {outcome.error:.1e}"
        rows.append(row)
        print(row, flush=True)
    return rows


def chosen_order(case: Case) -> Order:
    """What the backend takes on this GPU."""
    problem = bind(*case.arrays, causal=True)
    key_blocks = grid.blocks(problem, problem.nk, backward_tile(problem).block_n)
    return prepare_dq_order.order(problem, key_blocks, launch.gpu_of(case.arrays[0]), True)


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    parser = common.parser(__doc__)
    parser.add_argument("--groups", type=common.numbers, default=[2, 4, 8], metavar="G,...", help="heads that share keys; default 2,4,8")
    parser.add_argument("--head-dims", type=common.numbers, default=[64, 128], metavar="D,...", help="up to 128; default both, 64 and 128")
    parser.add_argument("--lengths", type=common.numbers, default=LENGTHS, metavar="N,...", help="default 512 to 16,384")
    for size, default in {"tokens": TOKENS, "width": WIDTH}.items():
        parser.add_argument(f"--{size}", type=int, default=default, help=f"default {default}")
    options, clock = parser.parse_args(arguments), common.clock()
    problems = [(group, d, n) for d in options.head_dims for group in options.groups for n in options.lengths]
    for group, d, _ in problems:
        if d > MOST or options.width // d % group or options.width < d:
            parser.error(f"{options.width} columns must be heads of D <= {MOST}, of which {group} share keys each; got D = {d}")
    reason = tier("sm90").why_not("backward", None, ForwardInputs(*[clock.xp.empty(0)] * 3), True)
    if reason is not None:
        parser.error(reason)
    with clock.current():
        rows = [row for problem in problems for row in study(*problem, options, clock)]
    common.write(options, "orders", clock.place, rows, tokens=options.tokens, width=options.width)


if __name__ == "__main__":
    sys.exit(main())
