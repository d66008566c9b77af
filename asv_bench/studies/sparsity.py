"""Time against the share of blocks that a mask leaves visible, beside attention without a mask, a mask of pairs, and FlexAttention.

Blocks of 128 x 128 are drawn at random, the same for all heads. Everybody's results are checked, for some of the queries, against float64;
then all take turns in random order. What nothing hides is timed in each round with the others.

    python asv_bench/studies/sparsity.py --json FILE [--length N]
"""

import sys
from statistics import median

import common
import numpy as np

import numba_flash
from numba_flash import reference
from numba_flash.bench import timing
from numba_flash.bench.cases import BOUNDS, relative_error
from numba_flash.bench.peers import Bound, sentence

OURS, PAIRS, DENSE, FLEX = "numba_flash", "numba_flash, a mask of pairs", "numba_flash, dense", "FlexAttention"
DEFAULTS = {
    "gpu": {"dtype": "float16", "batch": 1, "heads": 16, "length": 16384, "head_dim": 128, "block": 128},
    "cpu": {"dtype": "float32", "batch": 1, "heads": 1, "length": 2048, "head_dim": 64, "block": 128},
}
PERCENT = [50, 20, 10, 5, 1]
CHECKED = 64  # queries of each head


class Case:
    """Arrays of one problem, and what some of its queries have to give.

    Attributes
    ----------
    q, k, v, do : array (batch, heads, length, head_dim)
        Where they are timed.
    blocks : array of bool (length / block, length / block)
        On the host; every query sees its own block.
    """

    def __init__(self, percent: int, size: dict, clock):
        rng, n, block = np.random.default_rng(percent), size["length"], size["block"]
        shape = (size["batch"], size["heads"], n, size["head_dim"])
        self.clock, self.block, self.of_host = clock, block, [rng.standard_normal(shape).astype(size["dtype"]) for _ in range(4)]
        self.q, self.k, self.v, self.do = map(clock.xp.asarray, self.of_host)
        self.blocks = rng.random((-(-n // block),) * 2) < percent / 100
        np.fill_diagonal(self.blocks, True)
        self.rows = np.sort(rng.choice(n, min(CHECKED, n), replace=False))
        self.bound = BOUNDS[size["dtype"]]

    def check(self, direction: str, masked: bool, results: list) -> float:
        """Largest relative error of the checked queries' o; or of their dq, and of dk and dv, of which they are all that has a gradient."""
        q, k, v, do = self.of_host
        mask = numba_flash.BlockMask(self.blocks, self.block).dense(q.shape[-2], k.shape[-2])[self.rows] if masked else None
        some = lambda x: x[..., self.rows, :]
        if direction == "forward":
            expected, results = reference.forward(some(q), k, v, mask=mask)[:1], [some(results[0])]
        else:
            expected, results = reference.backward(some(do), some(q), k, v, mask=mask), [some(results[0]), *results[1:]]
        return max(relative_error(x, ref) for x, ref in zip(results, expected, strict=True))

    def sparse_do(self):
        """Of the checked queries alone."""
        sparse = np.zeros_like(self.of_host[3])
        sparse[..., self.rows, :] = self.of_host[3][..., self.rows, :]
        return self.clock.xp.asarray(sparse)


def bind_ours(case: Case, direction: str, name: str) -> Bound:
    """numba_flash, which gets as a mask what the `name` says."""
    xp, n = case.clock.xp, case.q.shape[-2]
    mask = None if name == DENSE else numba_flash.BlockMask(xp.asarray(case.blocks), case.block)
    mask = mask.dense(n, n) if name == PAIRS else mask
    q, k, v = case.q, case.k, case.v
    host = lambda x: x if isinstance(x, np.ndarray) else x.get()
    if direction == "forward":
        once = lambda do: (numba_flash.forward(q, k, v, mask=mask),)
    else:
        o, lse = numba_flash.forward(q, k, v, mask=mask, return_lse=True)
        once = lambda do: numba_flash.backward(do, q, k, v, o, lse, mask=mask)
    return Bound(lambda count: [once(case.do) for _ in range(count)][-1], lambda: [host(x) for x in once(case.sparse_do())])


def bind_flex(case: Case, direction: str) -> Bound:
    """FlexAttention with a block mask of the same blocks."""
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # gradients are taken more than once
    n, block, blocks = case.q.shape[-2], case.block, torch.from_numpy(case.blocks).cuda()
    mask = create_block_mask(lambda b, h, i, j: blocks[i // block, j // block], None, None, n, n, device="cuda", BLOCK_SIZE=block)
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    q, k, v, do, sparse = (torch.from_dlpack(x) for x in (case.q, case.k, case.v, case.do, case.sparse_do()))
    if direction == "forward":
        once = lambda do: (compiled(q, k, v, block_mask=mask),)
    else:
        inputs = [x.requires_grad_() for x in (q, k, v)]
        o = compiled(*inputs, block_mask=mask)
        once = lambda do: torch.autograd.grad(o, inputs, do, retain_graph=True)
    return Bound(lambda count: [once(do) for _ in range(count)][-1], lambda: [x.detach().cpu().numpy() for x in once(sparse)])


def rows_of(percent: int, direction: str, size: dict, clock, repeats: int) -> list[dict]:
    """Everybody's time at one density, or why there is none."""
    case, bound, rows = Case(percent, size, clock), {}, []
    visible = float(case.blocks.mean())
    for name in (OURS, PAIRS, DENSE, *((FLEX,) if clock.place == "gpu" else ())):
        row = {"percent": percent, "visible": visible, "direction": direction, "contender": name}
        try:
            made = bind_flex(case, direction) if name == FLEX else bind_ours(case, direction, name)
            off = case.check(direction, name != DENSE, made.results())
        except Exception as failure:
            rows.append(row | {"reason": sentence(failure)})
            continue
        rows.append(row if off <= case.bound else row | {"reason": f"wrong: error {off:.1e}"})
        if off <= case.bound:
            bound[name] = made
    for name, ms in timing.take_turns(bound, clock, repeats).items():
        next(row for row in rows if row["contender"] == name)["ms"] = median(ms)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    parser = common.parser(__doc__)
    parser.add_argument("--percent", type=common.numbers, default=PERCENT, help="of blocks that are visible; default 50,20,10,5,1")
    parser.add_argument("--length", type=int, help="default 16384; on the CPU 2048")
    parser.add_argument("--head-dim", type=int, help="default 128; on the CPU 64")
    options = parser.parse_args(arguments)
    clock = common.clock()
    size = DEFAULTS[clock.place] | {name: n for name in ("length", "head_dim") if (n := getattr(options, name)) is not None}
    rows = []
    with clock.current():
        for percent in options.percent:
            for direction in ("forward", "backward"):
                before = len(rows)
                rows += rows_of(percent, direction, size, clock, common.repeats(options, clock.place))
                print(*rows[before:], sep="\n", flush=True)
    common.write(options, "sparsity", clock.place, rows, **size)


if __name__ == "__main__":
    sys.exit(main())
