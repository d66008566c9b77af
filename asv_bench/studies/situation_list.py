"""The situations that people are in, as `situations.py` measures them: dtypes, options, shapes, and GPUs without `sm90`."""

from dataclasses import dataclass
from functools import partial

SDPA = {
    "cuDNN": "CUDNN_ATTENTION",
    "FlashAttention-2": "FLASH_ATTENTION",
    "memory-efficient": "EFFICIENT_ATTENTION",
    "whole matrix": "MATH",
}
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
    option : str
        One of `numba_flash.bench.options.OPTIONS`.
    graph : bool
        Calls are timed in a CUDA graph.
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
    option: str = "none"
    graph: bool = False

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
ONE, USUAL = "one query per head, in 16 bits, on Hopper", "plain or causal, in 16 bits, on Hopper"
CHANGED = {"softcap": "a softcap", "alibi": "ALiBi", "table": "a table of relative positions"}
TINY = "a small problem, the GPU's time"


def _changed() -> tuple[Situation, ...]:
    """What changes scores, on Hopper and by what other GPUs get."""
    made = partial(_same, dtype="bfloat16", batch=4, heads=16, length=4096, head_dim=64, peers=("FlexAttention",))
    hopper = [made(f"{name}, in 16 bits", option=option) for option, name in CHANGED.items()]
    return (*hopper, *(made(f"{name}, in 16 bits (`sm80`)", option=option, backend="sm80") for option, name in CHANGED.items()))


def _tiny() -> tuple[Situation, ...]:
    """Small problems on each kind of tensor cores."""
    made = partial(_same, dtype="bfloat16", batch=1, head_dim=64, peers=HALF, directions=("forward",), graph=True)
    sizes = ({"heads": 8, "length": 256}, {"heads": 2, "length": 1024})
    kinds = ((TINY, None), (f"{TINY} (`sm80`)", "sm80"))
    return tuple(made(what, backend=backend, **size) for what, backend in kinds for size in sizes)


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
    _same(USUAL, "bfloat16", 4, 16, 4096, 128, HALF),
    _same(USUAL, "bfloat16", 4, 16, 4096, 128, HALF, causal=True),
    *_changed(),
    *_tiny(),
)
