"""Time against the share of blocks that a mask leaves visible, beside attention without a mask, a mask of pairs, and FlexAttention.

Blocks of 128 x 128 are drawn at random, the same for all heads. Of the first and the last head one query in each block, with all keys, is
checked against float64, and everybody's gradients if these queries alone have one; then all take turns in random order. What nothing hides
is timed in each round with the others. Kernels are compiled in several processes first.

    python asv_bench/studies/sparsity.py --json FILE [--length N]
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
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
DIRECTIONS = ("forward", "backward")
PERCENT = [50, 20, 10, 5, 1]
HEADS = [0, -1]  # that are checked
SMALL = 1024  # length of problems with the same kernels


@cache
def drawn(batch: int, heads: int, length: int, head_dim: int, dtype: str) -> list[np.ndarray]:
    """q, k, v and do, N(0, 1), the same at all densities."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((batch, heads, length, head_dim), np.float32).astype(dtype) for _ in range(4)]


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
        rng, n, block = np.random.default_rng([percent, 1]), size["length"], size["block"]
        self.of_host = drawn(*(size[name] for name in ("batch", "heads", "length", "head_dim", "dtype")))
        self.clock, self.block, self.bound = clock, block, BOUNDS[size["dtype"]]
        self.q, self.k, self.v, self.do = map(clock.xp.asarray, self.of_host)
        self.blocks = rng.random((-(-n // block),) * 2) < percent / 100
        np.fill_diagonal(self.blocks, True)
        first = np.arange(0, n, block)
        self.rows = rng.integers(first, np.minimum(first + block, n))

    def check(self, direction: str, masked: bool, results: list) -> float:
        """Largest relative error of the checked queries' o; or of their dq, and of dk and dv, of which they are all that has a gradient."""
        (q, k, v, do), mask = (x[:, HEADS] for x in self.of_host), None
        if masked:
            mask = np.repeat(self.blocks[self.rows // self.block], self.block, axis=1)[:, : k.shape[-2]]
        some = lambda x: x[..., self.rows, :]
        o, lse = reference.forward(some(q), k, v, mask=mask, return_lse=True)
        if direction == "forward":
            expected, results = [o], [some(results[0])]
        else:
            expected = reference.backward(some(do), some(q), k, v, o, lse, mask=mask)
            results = [some(results[0]), *results[1:]]
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
    host = lambda x: x[:, HEADS] if isinstance(x, np.ndarray) else x[:, HEADS].get()
    if direction == "forward":
        once = lambda do: (numba_flash.forward(q, k, v, mask=mask),)
    else:
        o, lse = numba_flash.forward(q, k, v, mask=mask, return_lse=True)
        once = lambda do: numba_flash.backward(do, q, k, v, o, lse, mask=mask)
    return Bound(lambda count: [once(case.do) for _ in range(count)][-1], lambda: [host(x) for x in once(case.sparse_do())])


@cache
def compiled_flex(blocks: int, block: int) -> tuple:
    """FlexAttention, compiled once for all densities; the blocks that it sees, which each changes; and its function of these."""
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._functorch.config.donated_buffer = False  # gradients are taken more than once
    seen = torch.zeros((blocks, blocks), dtype=torch.bool, device="cuda")
    return torch.compile(flex_attention, dynamic=False, fullgraph=True), seen, lambda b, h, i, j: seen[i // block, j // block]


def bind_flex(case: Case, direction: str) -> Bound:
    """FlexAttention with a block mask of the same blocks."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    n, block = case.q.shape[-2], case.block
    compiled, seen, function = compiled_flex(len(case.blocks), block)
    seen.copy_(torch.from_numpy(case.blocks))
    mask = create_block_mask(function, None, None, n, n, device="cuda", BLOCK_SIZE=block)
    q, k, v, do, sparse = (torch.from_dlpack(x) for x in (case.q, case.k, case.v, case.do, case.sparse_do()))
    if direction == "forward":
        once = lambda do: (compiled(q, k, v, block_mask=mask),)
    else:
        inputs = [x.requires_grad_() for x in (q, k, v)]
        o = compiled(*inputs, block_mask=mask)
        once = lambda do: torch.autograd.grad(o, inputs, do, retain_graph=True)
    return Bound(lambda count: [once(do) for _ in range(count)][-1], lambda: [x.detach()[:, HEADS].cpu().numpy() for x in once(sparse)])


def compile_for(name: str, direction: str, size: dict) -> None:
    """In a process of its own: a contender's kernels are compiled, and on disk. What fails here is told where it is measured."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # FlexAttention has a kernel or two
    clock = common.clock()
    with clock.current():
        if name == FLEX:
            bind_flex(Case(PERCENT[0], size, clock), direction).repeat(1)
        else:
            bind_ours(Case(PERCENT[0], size | {"length": min(SMALL, size["length"])}, clock), direction, name).repeat(1)
        clock.wait()


def compile_all(names: tuple[str, ...], size: dict) -> None:
    """All contenders at the same time."""
    with ProcessPoolExecutor(len(names) * len(DIRECTIONS), multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(compile_for, name, direction, size) for name in names for direction in DIRECTIONS]:
            if failure := future.exception():
                print(f"compiling ahead: {sentence(failure)}", flush=True)


def contenders(clock) -> tuple[str, ...]:
    """Names of those that run there."""
    return (OURS, PAIRS, DENSE, *((FLEX,) if clock.place == "gpu" else ()))


def rows_of(percent: int, direction: str, size: dict, clock, repeats: int) -> list[dict]:
    """Everybody's time at one density, or why there is none."""
    case, bound, rows = Case(percent, size, clock), {}, []
    visible = float(case.blocks.mean())
    for name in contenders(clock):
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
    if clock.place == "gpu":
        compile_all(contenders(clock), size)
    rows = []
    with clock.current():
        for percent in options.percent:
            for direction in DIRECTIONS:
                before = len(rows)
                rows += rows_of(percent, direction, size, clock, common.repeats(options, clock.place))
                print(*rows[before:], sep="\n", flush=True)
                common.write(options, "sparsity", clock.place, rows, **size)


if __name__ == "__main__":
    sys.exit(main())
