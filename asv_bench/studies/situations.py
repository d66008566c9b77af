"""Speed over the fastest kernel of PyTorch, in the situations that people are in: dtypes, options, shapes, and GPUs without `sm90`.

Every contender of a situation is checked against float64 (the last head of all batch elements), then all take turns in random order. With
dropout only numba_flash is checked, as everybody draws bits of his own. What other GPUs get is measured here, with `backend="sm80"`.

    python asv_bench/studies/situations.py --json FILE
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from statistics import median

import common
import numpy as np

import numba_flash
from numba_flash import rng
from numba_flash.bench import timing
from numba_flash.bench.cases import BOUNDS
from numba_flash.bench.peers import Bound, sentence
from numba_flash.options import Generator

SDPA = {
    "cuDNN": "CUDNN_ATTENTION",
    "FlashAttention-2": "FLASH_ATTENTION",
    "memory-efficient": "EFFICIENT_ATTENTION",
    "whole matrix": "MATH",
}
OURS = "numba_flash"
STATE = (7, 0)
SHAPE = ("batch", "heads", "heads_kv", "length", "length_kv", "head_dim", "causal", "bias")


@dataclass(frozen=True)
class Situation:
    """One problem, and who is compared.

    Attributes
    ----------
    what : str
        In words, for tables; several problems may stand for one situation.
    dtype : str
        Of all arrays.
    batch, heads, heads_kv, length, length_kv, head_dim : int
        Sizes.
    peers : tuple of str
        Names in `SDPA`, or "FlexAttention".
    causal, bias, mask : bool
        A bias with gradient that batch elements share; a mask that heads share, too, with 70 % visible.
    dropout : float
        Probability.
    backend : str or None
        Of numba_flash.
    directions : tuple of str
        What is timed.
    """

    what: str
    dtype: str
    batch: int
    heads: int
    heads_kv: int
    length: int
    length_kv: int
    head_dim: int
    peers: tuple[str, ...]
    causal: bool = False
    bias: bool = False
    mask: bool = False
    dropout: float = 0.0
    backend: str | None = None
    directions: tuple[str, ...] = ("forward", "backward")

    @property
    def flops(self) -> float:
        """Of the forward pass."""
        whole = 4 * self.batch * self.heads * self.length * self.length_kv * self.head_dim
        return whole / 2 if self.causal else whole


def _same(what: str, dtype: str, batch: int, heads: int, length: int, head_dim: int, peers: tuple[str, ...], **more) -> Situation:
    return Situation(what, dtype, batch, heads, heads, length, length, head_dim, peers, **more)


HALF, SINGLE, WHOLE = ("cuDNN", "FlashAttention-2"), ("memory-efficient",), ("whole matrix",)
BIASED = ("cuDNN", "memory-efficient", "FlexAttention")
OTHER = "16 bits on a GPU that is no Hopper (`sm80`, timed on an H200)"
BIAS, TRIANGLE = "a bias with gradient, in 16 bits", "triangle attention, in 16 bits"
ONE, PLAIN = "one query per head, in 16 bits, on Hopper", "plain or causal, in 16 bits, on Hopper"
SITUATIONS = (  # what hurts most people first
    _same(OTHER, "float16", 4, 16, 4096, 128, ("FlashAttention-2",), backend="sm80"),
    _same(BIAS, "bfloat16", 4, 16, 2048, 64, BIASED, bias=True),
    _same(TRIANGLE, "bfloat16", 384, 4, 384, 32, BIASED, bias=True),
    _same("a mask array, in 16 bits", "float16", 4, 16, 4096, 64, ("cuDNN", "memory-efficient"), mask=True),
    _same("dropout, in 16 bits", "float16", 4, 16, 4096, 64, HALF, dropout=0.1),
    Situation(ONE, "bfloat16", 16, 64, 8, 1, 32768, 128, HALF, directions=("forward",)),
    Situation(ONE, "bfloat16", 64, 32, 32, 1, 4096, 64, HALF, directions=("forward",)),
    Situation("one query per head, in float32", "float32", 16, 8, 8, 1, 32768, 128, (*SINGLE, *WHOLE), directions=("forward",)),
    Situation("one query per head, in float64", "float64", 16, 8, 8, 1, 32768, 128, WHOLE, directions=("forward",)),
    _same("float32", "float32", 4, 32, 4096, 64, SINGLE),
    _same("float32", "float32", 4, 16, 4096, 128, SINGLE),
    _same("float32", "float32", 4, 16, 4096, 128, SINGLE, causal=True),
    _same("triangle attention, in float32", "float32", 384, 4, 384, 32, SINGLE, bias=True),
    _same("float64", "float64", 1, 16, 4096, 64, WHOLE),
    _same("float64", "float64", 1, 16, 4096, 128, WHOLE),
    _same("a small problem, in 16 bits, on Hopper", "bfloat16", 1, 8, 256, 64, HALF),
    _same(PLAIN, "bfloat16", 4, 16, 4096, 128, HALF),
    _same(PLAIN, "bfloat16", 4, 16, 4096, 128, HALF, causal=True),
)


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


def bind_ours(arrays: Arrays, direction: str) -> Bound:
    """numba_flash on CuPy arrays."""
    import cupy
    import torch

    s = arrays.situation
    q, k, v, do, bias, mask = map(to_cupy, (arrays.q, arrays.k, arrays.v, arrays.do, arrays.bias, arrays.mask))
    options = {"causal": s.causal, "bias": bias, "mask": mask, "dropout": s.dropout, "backend": s.backend}
    options |= {"rng": STATE} if s.dropout else {}
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
    return lambda: compiled(arrays.q, arrays.k, arrays.v, score_mod=lambda score, b, h, i, j: score + bias[0, h, i, j])


def error(results: list, expected: list) -> float:
    """Largest relative error over the results."""
    norms = ((x.reshape(ref.shape) - ref).norm() / ref.norm() for x, ref in zip(results, expected, strict=True))
    return max(float(x) for x in norms)


def measure_situation(situation: Situation, direction: str, clock, repeats: int) -> dict:
    """Everybody's time, and our speed over each peer's."""
    arrays = Arrays(situation)
    expected, bound, reasons = arrays.expected(direction), {}, {}
    for name in (OURS, *situation.peers):
        try:
            made = bind_ours(arrays, direction) if name == OURS else bind_torch(name, arrays, direction)
            off = error(made.results(), expected)
        except Exception as failure:
            reasons[name] = sentence(failure)
            continue
        if off <= BOUNDS[situation.dtype] or (situation.dropout and name != OURS):
            bound[name] = made
        else:
            reasons[name] = f"wrong: error {off:.1e}"
    del expected
    if OURS not in bound:
        raise RuntimeError(f"{situation.what}, {direction}: {reasons[OURS]}")
    ms = timing.take_turns(bound, clock, repeats)
    flops = situation.flops * (1 if direction == "forward" else 2.5)
    peers = {name: {"reason": reason} for name, reason in reasons.items()}
    for name in bound:
        if name != OURS:
            ratio = median(theirs / mine for mine, theirs in zip(ms[OURS], ms[name], strict=True))
            peers[name] = {"ms": median(ms[name]), "ratio": ratio}
    shape = {name: getattr(situation, name) for name in SHAPE}
    tflops = flops / median(ms[OURS]) / 1e9
    row = {"situation": situation.what, "dtype": situation.dtype, "direction": direction, **shape}
    return row | {"ms": median(ms[OURS]), "tflops": tflops, "peers": peers}


def main(arguments: list[str] | None = None) -> None:
    """Run the study."""
    parser = common.parser(__doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="only situations with this text in their name")
    options = parser.parse_args(arguments)
    clock = common.clock()
    if clock.place != "gpu":
        parser.error("this study needs a GPU")
    rows = []
    with clock.current():
        for situation in (s for s in SITUATIONS if options.only in s.what):
            for direction in situation.directions:
                rows.append(measure_situation(situation, direction, clock, common.repeats(options, clock.place)))
                print(rows[-1], flush=True)
    common.write(options, "situations", clock.place, rows)


if __name__ == "__main__":
    sys.exit(main())
