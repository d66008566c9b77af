"""Time against the shape of the tile: the chosen one of each kernel and its neighbours, full attention at N = 4096.

Every tile is checked against the float64 oracle before it is timed, and all of a kernel take turns. Kernels are prepared by the backend's
own `prepare_forward` and `prepare_backward`, with its choice of a tile replaced.

    python asv_bench/studies/tiles.py --json FILE [--kernels "sm90 forward,simt forward"]
"""

import sys
from functools import partial
from statistics import median
from unittest.mock import patch

import common

import numba_flash
from numba_flash.arguments.arrays import Layout, empty
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, ForwardInputs, ForwardResults, Prepared, bind
from numba_flash.bench import peers, timing
from numba_flash.bench.cases import Case, Cell
from numba_flash.cuda.runtime import launch
from numba_flash.cuda.simt import tier as simt
from numba_flash.cuda.sm90 import recipes
from numba_flash.cuda.sm90.backward.backward_tiles import BackwardTile
from numba_flash.cuda.sm90.forward.forward_tiles import Tile
from numba_flash.cuda.sm90.tiles import SHARED_LIMIT
from numba_flash.plan import tier

LENGTH, TOKENS, WIDTH = 4096, 16384, 2048

# Kernel: dtype, where a function chooses its tile and the name of that, and by head dimension what is tried besides the chosen one.
STUDIES = {
    "sm90 forward": (
        "bfloat16",
        (recipes, "forward_tile"),
        {
            64: [Tile(m, n, 2, 4 if n < 128 else 3, 1, True) for m in (128, 192) for n in (64, 96, 128)] + [Tile(128, 160, 2, 3, 1, True)],
            128: [Tile(128, n, 1, 2, 1, True) for n in (64, 96, 112, 128, 144, 160, 176)],
        },
    ),
    "sm90 backward": (
        "bfloat16",
        (recipes, "backward_tile"),
        {
            64: [BackwardTile(m, 2, 2, ahead) for m in (64, 128) for ahead in (False, True)],
            128: [BackwardTile(64, stages, 2, ahead) for stages in (2, 3) for ahead in (False, True)],
        },
    ),
    "simt forward": (
        "float32",
        (simt, "tile_for"),
        {d: [simt.Tile(rows, cols, 8, 64 // cols, 16, 16, 1) for rows in (2, 4, 8) for cols in (4, 8)] for d in (64, 128)},
    ),
}


def _shape_of(tile) -> dict:
    """Its fields, and the rows and columns of its scores."""
    return vars(tile) | {"block_m": tile.block_m, "block_n": tile.block_n}


def _fits(tile, head_dim: int) -> bool:
    """Whether its shared memory does, where the tile says how much that is."""
    return not hasattr(tile, "layout") or tile.layout(head_dim, head_dim).bytes <= SHARED_LIMIT


def prepare(chosen, choice: tuple, name: str, direction: str, problem, inputs, results) -> Prepared:
    """What the backend `name` makes of the problem and such arrays where the function `choice` returns what is `chosen`."""
    layouts = (type(x)(*map(Layout.of, x)) for x in (inputs, results))
    with patch.object(*choice, lambda *_: chosen):
        return getattr(tier(name), f"prepare_{direction}")(problem, *layouts)


def prepared(chosen, choice: tuple, name: str, direction: str, case: Case) -> peers.Bound:
    """A prepared call where `choice` returns what is `chosen`, on results that are allocated once."""
    (q, k, v), causal = case.arrays, case.cell.causal
    like = lambda x: empty("a result", x, x.shape)
    if direction == "forward":
        results = ForwardResults(like(q), None)
        inputs = lambda do: ForwardInputs(q, k, v)
    else:
        o, lse = numba_flash.forward(q, k, v, causal=causal, return_lse=True, backend=name)
        results = BackwardResults(like(q), like(k), like(v))
        inputs = lambda do: BackwardInputs(do, q, k, v, o, lse)
    run = prepare(chosen, choice, name, direction, bind(q, k, v, causal=causal), inputs(case.do), results).run

    def repeat(count: int) -> None:
        for _ in range(count):
            run(inputs(case.do), results)

    def checked():
        run(inputs(case.sparse_do), results)
        return tuple(x[-1].get() if hasattr(x, "get") else x[-1] for x in results[:-1])

    return peers.Bound(repeat, checked)


def chosen_tile(choice: tuple, problem):
    """The tile that the backend chooses."""
    module, name = choice
    return getattr(module, name)(*(("forward", problem.dtype, problem.d) if module is simt else (problem,)))


def study(name: str, head_dim: int, options, clock) -> list[dict]:
    """Rows of one kernel: every tile that is right, and why others are not."""
    dtype, choice, tiles = STUDIES[name]
    backend, direction = name.split()
    heads = options.width // head_dim
    cell = Cell(direction, "full", dtype, options.tokens // options.length, heads, heads, options.length, head_dim)
    chosen = chosen_tile(choice, bind(*Case(cell, clock.xp).arrays))
    candidates = list(dict.fromkeys([chosen, *(tile for tile in tiles[head_dim] if _fits(tile, head_dim))]))
    everyone = [peers.Contender(str(t), partial(prepared, t, choice, backend, direction), lambda *_: None) for t in candidates]
    outcomes = timing.compare(cell, everyone, clock, common.repeats(options, clock.place))
    rows = []
    for tile in candidates:
        outcome = outcomes[str(tile)]
        row = {"kernel": name, "dtype": dtype, "head_dim": head_dim, "chosen": tile == chosen, "tile": _shape_of(tile)}
        if outcome.status == "ok":
            row |= {"ms": median(outcome.ms), "tflops": outcome.tflops(cell), "error": outcome.error}
        else:
            row["reason"] = outcome.reason or f"wrong: error {outcome.error:.1e}"
        rows.append(row)
        print(row, flush=True)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    parser = common.parser(__doc__)
    for size, default in {"length": LENGTH, "tokens": TOKENS, "width": WIDTH}.items():
        parser.add_argument(f"--{size}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--head-dims", type=common.numbers, default=[64, 128], metavar="D,...", help="default both, 64 and 128")
    parser.add_argument("--kernels", default=",".join(STUDIES), metavar="NAME,...", help="default all")
    options = parser.parse_args(arguments)
    clock = common.clock()
    if clock.place == "cpu" and not launch.simulated():
        parser.error("tiles of CUDA kernels need a GPU")
    with clock.current():
        rows = [row for name in options.kernels.split(",") for d in options.head_dims for row in study(name, d, options, clock)]
    common.write(options, "tiles", clock.place, rows, length=options.length, tokens=options.tokens, width=options.width)


if __name__ == "__main__":
    sys.exit(main())
