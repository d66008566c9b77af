"""Speed over the fastest kernel of PyTorch, in the situations that people are in: dtypes, options, shapes, and GPUs without `sm90`.

Every contender of a situation is checked against float64 (the last head of all batch elements), then all take turns in random order. With
dropout only numba_flash is checked, as everybody draws bits of his own. What other GPUs get is measured here, with `backend="sm80"`.

With a softcap, ALiBi or a table of relative positions, our own time without takes part, too. Of small problems the GPU's time counts, in
CUDA graphs of many calls. Rows are written one by one; those that FILE has from an earlier run on the same device stay until they are
measured again. Kernels are compiled in several processes first.

    python asv_bench/studies/situations.py --json FILE [--only TEXT TEXT ...]
"""

import json
import math
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import median

import common
import measure
import numpy as np
from situation_list import SDPA, SHAPE, SITUATIONS, Situation

import numba_flash
from numba_flash import rng
from numba_flash.arguments.options import Generator
from numba_flash.bench import options as changes
from numba_flash.bench import timing
from numba_flash.bench.cases import BOUNDS
from numba_flash.bench.peers import Bound, sentence

OURS, PLAIN = "numba_flash", "numba_flash without"
STATE = (7, 0)
CALLS = 20  # in a graph
COMPILERS = 6  # processes


class Arrays:
    """Random arrays of a situation, as PyTorch and as CuPy see the same memory, and the float64 results of the last head."""

    def __init__(self, situation: Situation):
        import torch

        s, self.situation = situation, situation
        dtype, generator = getattr(torch, s.dtype), torch.Generator("cuda").manual_seed(0)
        draw = lambda *shape: torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)
        heads = ((s.heads, s.length), (s.heads_kv, s.length_kv), (s.heads_kv, s.length_kv), (s.heads, s.length))
        self.q, self.k, self.v, self.do = (draw(s.batch, h, n, s.head_dim) for h, n in heads)
        self.bias = draw(1, s.heads, s.length, s.length_kv) if s.bias else None
        uniform = partial(torch.rand, generator=generator, device="cuda")
        self.mask = uniform((1, 1, s.length, s.length_kv)) < 0.7 if s.mask else None

    @property
    def inputs(self) -> list:
        """What has a gradient."""
        return [x for x in (self.q, self.k, self.v, self.bias) if x is not None]

    def expected(self, direction: str) -> list:
        """o, or the gradients, of the last head in float64, with the whole matrix."""
        import torch

        s = self.situation
        q, k, v = (x[:, -1].double().requires_grad_() for x in (self.q, self.k, self.v))
        bias = None if self.bias is None else self.bias[:, -1].double().requires_grad_()
        scores = s.head_dim**-0.5 * (q @ k.transpose(1, 2))
        scores = scores if bias is None else scores + bias
        if s.option == "softcap":
            scores = changes.CAP * torch.tanh(scores / changes.CAP)
        elif s.option != "none":
            added = changes.bias(s.option, s.heads, np.arange(s.length), s.length_kv)[-1]
            scores = scores + torch.from_numpy(added).to("cuda")
        if s.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], device="cuda", dtype=torch.bool).triu(1), -math.inf)
        if s.mask:
            scores = scores.masked_fill(~self.mask[0], -math.inf)
        p = scores.softmax(-1)
        if s.dropout:
            last = np.arange(s.batch) * s.heads + s.heads - 1
            p = p * torch.from_numpy(rng.keep_all(Generator(*STATE), s.dropout, last, s.length, s.length_kv)).to("cuda") / (1 - s.dropout)
        o = p @ v
        if direction == "forward":
            return [o.detach()]
        return list(torch.autograd.grad(o, [x for x in (q, k, v, bias) if x is not None], self.do[:, -1].double()))


def to_cupy(x):
    """The same memory; DLPack of CuPy knows no bfloat16, so that travels as int16."""
    import cupy
    import torch

    if x is None or x.dtype != torch.bfloat16:
        return None if x is None else cupy.from_dlpack(x.detach())
    return cupy.from_dlpack(x.detach().view(torch.int16)).view("bfloat16")


def bind_ours(arrays: Arrays, direction: str, option: str | None = None) -> Bound:
    """numba_flash on CuPy arrays; with another option than the situation's, if one is named."""
    import cupy
    import torch

    s = arrays.situation
    q, k, v, do, bias, mask = map(to_cupy, (arrays.q, arrays.k, arrays.v, arrays.do, arrays.bias, arrays.mask))
    options = {"causal": s.causal, "bias": bias, "mask": mask, "dropout": s.dropout, "backend": s.backend}
    options |= {"rng": STATE} if s.dropout else {}
    options |= changes.ours(option or s.option, s.heads)
    if direction == "forward":
        once = lambda: (numba_flash.forward(q, k, v, **options),)
    else:
        o, lse = numba_flash.forward(q, k, v, return_lse=True, **options)
        once = lambda: numba_flash.backward(do, q, k, v, o, lse, bias_grad=s.bias, **options)
    to_torch = lambda x: torch.from_dlpack(x[:, -1].astype(cupy.float64))
    return Bound(lambda count: [once() for _ in range(count)][-1], lambda: [to_torch(x) for x in once()])


def bind_torch(name: str, arrays: Arrays, direction: str) -> Bound:
    """One of PyTorch's kernels; what it raises is the reason why it cannot."""
    import torch

    attention = _flex(arrays) if name == "FlexAttention" else _sdpa(name, arrays)
    if direction == "forward":
        once = lambda: (attention(),)
    else:
        for x in arrays.inputs:
            x.requires_grad_()
        o = attention()
        once = lambda: torch.autograd.grad(o, arrays.inputs, arrays.do, retain_graph=True)
    return Bound(lambda count: [once() for _ in range(count)][-1], lambda: [x[:, -1].detach().double() for x in once()])


def _sdpa(name: str, arrays: Arrays):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    s = arrays.situation
    options = {"is_causal": s.causal, "dropout_p": s.dropout, "attn_mask": arrays.mask if arrays.bias is None else arrays.bias}
    options |= {"enable_gqa": True} if s.heads != s.heads_kv else {}

    def attention():
        with sdpa_kernel(getattr(SDPBackend, SDPA[name])):
            return scaled_dot_product_attention(arrays.q, arrays.k, arrays.v, **options)

    return attention


def _flex(arrays: Arrays):
    import torch
    import torch._functorch.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # gradients are taken more than once
    bias, compiled = arrays.bias, torch.compile(flex_attention, dynamic=False, fullgraph=True)
    score_mod = changes.of_flex(arrays.situation.option, arrays.situation.heads)
    if bias is not None:
        score_mod = lambda score, b, h, i, j: score + bias[0, h, i, j]
    return lambda: compiled(arrays.q, arrays.k, arrays.v, score_mod=score_mod)


def in_torch_graph(bound: Bound) -> Bound:
    """`CALLS` calls of PyTorch's as one CUDA graph on its current stream."""
    import torch

    graph = torch.cuda.CUDAGraph()
    bound.repeat(CALLS)
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        bound.repeat(CALLS)

    def repeat(count: int, kept=graph):
        for _ in range(count):
            kept.replay()

    return Bound(repeat, bound.results)


def error(results: list, expected: list) -> float:
    """Largest relative error over the results."""
    norms = ((x.reshape(ref.shape) - ref).norm() / ref.norm() for x, ref in zip(results, expected, strict=True))
    return max(float(x) for x in norms)


def bind_all(situation: Situation, direction: str, clock) -> tuple[dict[str, Bound], dict[str, str]]:
    """Everybody who computes what float64 does, and the reasons of the others."""
    arrays = Arrays(situation)
    expected, bound, reasons = arrays.expected(direction), {}, {}
    for name in (OURS, *situation.peers):
        try:
            made = bind_ours(arrays, direction) if name == OURS else bind_torch(name, arrays, direction)
            off = error(made.results(), expected)
            if situation.graph:
                made = clock.graph(made, CALLS) if name == OURS else in_torch_graph(made)
        except Exception as failure:
            reasons[name] = sentence(failure)
            continue
        if off <= BOUNDS[situation.dtype] or (situation.dropout and name != OURS):
            bound[name] = made
        else:
            reasons[name] = f"wrong: error {off:.1e}"
    if OURS in bound and situation.option != "none":
        bound[PLAIN] = bind_ours(arrays, direction, "none")
    return bound, reasons


def measure_situation(situation: Situation, direction: str, clock, repeats: int) -> dict:
    """Everybody's time, and our speed over each peer's."""
    bound, reasons = bind_all(situation, direction, clock)
    if OURS not in bound:
        raise RuntimeError(f"{situation.what}, {direction}: {reasons[OURS]}")
    calls = CALLS if situation.graph else 1
    ms = {name: [x / calls for x in each] for name, each in timing.take_turns(bound, clock, repeats).items()}
    ratio = lambda name: median(theirs / mine for mine, theirs in zip(ms[OURS], ms[name], strict=True))
    peers = {name: {"reason": reason} for name, reason in reasons.items()}
    peers |= {name: {"ms": median(ms[name]), "ratio": ratio(name)} for name in bound if name not in (OURS, PLAIN)}
    flops = situation.flops * (1 if direction == "forward" else 2.5)
    measured = {"ms": median(ms[OURS]), "tflops": flops / median(ms[OURS]) / 1e9, "peers": peers}
    if PLAIN in ms:
        measured["over_plain"] = 1 / ratio(PLAIN)
    return key_of(situation, direction) | measured


def key_of(situation: Situation, direction: str) -> dict:
    """What a row is about."""
    shape = {name: getattr(situation, name) for name in SHAPE}
    return {"situation": situation.what, "dtype": situation.dtype, "direction": direction, **shape}


def compile_for(number: int, direction: str) -> None:
    """In a process of its own: whatever a row needs is compiled, and on disk. What fails here is told where it is measured."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # FlexAttention has a kernel or two
    clock = common.clock()
    with clock.current():
        bind_all(SITUATIONS[number], direction, clock)


def compile_all(wanted: list[tuple[int, str]]) -> None:
    """Several rows at a time."""
    with ProcessPoolExecutor(COMPILERS, multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(compile_for, *row) for row in wanted]:
            if failure := future.exception():
                print(f"compiling ahead: {sentence(failure)}", flush=True)


def earlier(file, device: str) -> list[dict]:
    """Rows of the file that were measured on the same device; they keep the day and commit that they are of."""
    if file is None or not file.exists():
        return []
    content = json.loads(file.read_text())
    made = {name: content[name] for name in ("date", "commit")}
    return [made | row for row in content["rows"]] if content["device"] == device else []


def beside(rows: list[dict], new: dict) -> list[dict]:
    """The rows with a new one in the place of that about the same, or at the end."""
    about = lambda row: [row[name] for name in ("situation", "dtype", "direction", *SHAPE)]
    return [row for row in rows if about(row) != about(new)] + [new]


def main(arguments: list[str] | None = None) -> int:
    """Run the study; 1 if a row could not be measured."""
    parser = common.parser(__doc__)
    parser.add_argument("--only", metavar="TEXT", nargs="+", default=[""], help="only situations with one of these texts in their name")
    options = parser.parse_args(arguments)
    clock = common.clock()
    if clock.place != "gpu":
        parser.error("this study needs a GPU")
    chosen = [i for i, s in enumerate(SITUATIONS) if any(text in s.what for text in options.only)]
    wanted = [(i, direction) for i in chosen for direction in SITUATIONS[i].directions]
    compile_all(wanted)
    rows, failed = earlier(options.json, measure.this_machine("")["gpu"]), 0
    with clock.current():
        for number, direction in wanted:
            try:
                new = measure_situation(SITUATIONS[number], direction, clock, common.repeats(options, clock.place))
            except Exception as failure:  # the other rows are none the worse
                print(f"not measured: {SITUATIONS[number].what}, {direction}: {sentence(failure)}", flush=True)
                failed = 1
                continue
            print(new, flush=True)
            rows = beside(rows, new)
            common.write(options, "situations", clock.place, rows)
    return failed


if __name__ == "__main__":
    sys.exit(main())
