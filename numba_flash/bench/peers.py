"""Who is compared: this library and its peers, each with the way it is given a case and called.

Arrays go from CuPy or NumPy to the other libraries through DLPack, without a copy; the two that want heads last get a copy in that order
before the clock runs. No library is imported before it is needed: one that is missing is a sentence in the report.
"""

import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from numba_flash.api import backward, forward
from numba_flash.bench import options, standard
from numba_flash.bench.cases import Case, Cell

OURS = "numba_flash"


@dataclass(frozen=True)
class Bound:
    """A contender with its arrays.

    Attributes
    ----------
    repeat : callable
        ``repeat(count)`` makes that many calls, and waits for none of them.
    results : callable
        One call, with `Case.sparse_do` if backward; the last batch element of each result on the host, in the order of `Case.expected`.
    """

    repeat: Callable[[int], Any]
    results: Callable[[], tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class Contender:
    """A library, or one of the ways it has to compute attention.

    Attributes
    ----------
    name : str
        In tables.
    bind : callable
        ``bind(case)`` returns a `Bound`; what it raises is the reason why the contender cannot run the case.
    why_not : callable
        ``why_not(place, dtype)`` with place ``"gpu"`` or ``"cpu"``: reason why it can run no case at all, or None.
    own_stream : bool
        Does not use CuPy's current stream, so that CUDA events do not see it; its `Bound.repeat` waits for the last call.
    host_time : bool
        Also measure the host's time per call.
    """

    name: str
    bind: Callable[[Case], Bound]
    why_not: Callable[[str, str], str | None]
    own_stream: bool = False
    host_time: bool = False


def contenders(backend: str | None) -> list[Contender]:
    """This library, with `backend` demanded unless it is None, and every peer that is known."""
    gpu = partial(_why_not_torch, "gpu")
    return [
        Contender(OURS, partial(bind_ours, backend), lambda place, dtype: None, host_time=True),
        Contender("torch cuDNN", partial(_bind_torch, partial(_sdpa, "CUDNN_ATTENTION")), gpu, host_time=True),
        Contender("torch FA2", partial(_bind_torch, partial(_sdpa, "FLASH_ATTENTION")), gpu, host_time=True),
        Contender("torch efficient", partial(_bind_torch, partial(_sdpa, "EFFICIENT_ATTENTION")), _why_not_efficient),
        Contender("torch Flex", partial(_bind_torch, _flex), gpu),
        Contender("flash-attn-4", bind_flash_attn_4, why_not_flash_attn_4),
        Contender("jax cuDNN", _bind_jax, _why_not_jax, own_stream=True),
        Contender("torch CPU", partial(_bind_torch, partial(_sdpa, None)), partial(_why_not_torch, "cpu"), host_time=True),
        Contender("CuPy", _bind_standard, _why_not_cupy),
        Contender("NumPy", _bind_standard, partial(_elsewhere, "cpu")),
    ]


def sentence(error: BaseException) -> str:
    """Type and first line of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _bound(once, do, to_host, within=nullcontext) -> Bound:
    """A `Bound` of ``once(do)``, which returns a tuple of (B, H, N, D) arrays; `do` is None or (do, sparse_do)."""
    do, sparse = (None, None) if do is None else do

    def repeat(count: int):
        with within():
            for _ in range(count):
                last = once(do)
        return last

    def results():
        with within():
            return tuple(map(to_host, once(sparse)))

    return Bound(repeat, results)


def _elsewhere(needed: str, place: str, dtype: str) -> str | None:
    if needed == place:
        return None
    return "needs a GPU" if needed == "gpu" else "compared on the CPU only"


# ---- this library, and standard attention in NumPy and CuPy ------------------------------------------------------------------------------


def _to_host(x) -> np.ndarray:
    return np.asarray(x[-1].get() if hasattr(x, "get") else x[-1])


def bind_ours(backend: str | None, case: Case) -> Bound:
    """This library."""
    q, k, v = case.arrays
    given = {"causal": case.cell.causal, "backend": backend} | options.ours(case.cell.option, case.cell.heads)
    if case.cell.direction == "forward":
        return _bound(lambda _: (forward(q, k, v, **given),), None, _to_host)
    o, lse = forward(q, k, v, return_lse=True, **given)
    gradients = lambda do: backward(do, q, k, v, o, lse, **given)
    return _bound(gradients, (case.do, case.sparse_do), _to_host)


def _only_plain(name: str, cell: Cell) -> None:
    """Refuse a cell with an option."""
    if cell.option != "none":
        raise NotImplementedError(f"{name} has no {cell.option}")


def _why_not_cupy(place: str, dtype: str) -> str | None:
    return _elsewhere("gpu", place, dtype) or ("CuPy multiplies no matrices of bfloat16" if dtype == "bfloat16" else None)


def _bytes_of_matrices(case: Case) -> int:
    """Of P, and backward also of dS; NumPy multiplies 16-bit numbers as float32 ones."""
    cell, (x, *_) = case.cell, case.arrays
    by_way_of_float32 = 4 if x.dtype.itemsize == 2 and isinstance(x, np.ndarray) else 0
    matrices = 1 if cell.direction == "forward" else 2
    return matrices * cell.batch * cell.heads * cell.length**2 * (x.dtype.itemsize + by_way_of_float32)


def _free_bytes(x) -> int:
    """Of the memory where `x` lives."""
    if isinstance(x, np.ndarray):
        return 1024 * int(re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)[1])
    import cupy

    return x.device.mem_info[0] + cupy.get_default_memory_pool().free_bytes()


def _bind_standard(case: Case) -> Bound:
    """Standard attention with the whole matrix, which is kept for the backward."""
    cell = case.cell
    _only_plain("standard attention here", cell)
    needed, free = _bytes_of_matrices(case), _free_bytes(case.arrays[0])
    if needed > free:
        raise MemoryError(f"its N x N matrices take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    grouped = lambda x: x.reshape(cell.batch, cell.heads_kv, -1, cell.length, cell.head_dim)
    joined = lambda x: x.reshape(cell.batch, -1, cell.length, cell.head_dim)
    q, k, v = map(grouped, case.arrays)
    if cell.direction == "forward":
        return _bound(lambda _: (joined(standard.forward(q, k, v, cell.causal)[0]),), None, _to_host)
    o, p = standard.forward(q, k, v, cell.causal)

    def gradients(do):
        dq, dk, dv = standard.backward(do, q, k, v, o, p)
        return joined(dq), joined(dk.sum(axis=2)), joined(dv.sum(axis=2))

    return _bound(gradients, (grouped(case.do), grouped(case.sparse_do)), _to_host)


# ---- PyTorch, and what works on its tensors ----------------------------------------------------------------------------------------------


def _why_not_torch(needed: str, place: str, dtype: str) -> str | None:
    if reason := _elsewhere(needed, place, dtype):
        return reason
    try:
        import torch
    except Exception as error:
        return f"cannot import torch: {sentence(error)}"
    return "torch sees no GPU" if needed == "gpu" and not torch.cuda.is_available() else None


def _why_not_efficient(place: str, dtype: str) -> str | None:
    return _why_not_torch("gpu", place, dtype) or (None if dtype == "float32" else "compared in float32 only")


def why_not_flash_attn_4(place: str, dtype: str) -> str | None:
    """Reason why it cannot run here."""
    if reason := _why_not_torch("gpu", place, dtype):
        return reason
    try:
        from flash_attn.cute import flash_attn_func  # noqa: F401
    except Exception as error:
        return f"cannot import flash_attn.cute: {sentence(error)}"
    return None


def torch_on(stream: int):
    """Context in which PyTorch works on the CUDA stream with this address; does nothing without PyTorch."""
    try:
        import torch
    except Exception:
        return nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream)) if torch.cuda.is_available() else nullcontext()


def _to_torch(x, heads_last: bool):
    """The same memory as a tensor (heads last: a copy). DLPack of CuPy and NumPy knows no bfloat16, so that travels as int16."""
    import torch

    bits = x.dtype.name == "bfloat16"
    tensor = torch.from_dlpack(x.view(np.int16) if bits else x)
    tensor = tensor.view(torch.bfloat16) if bits else tensor
    return tensor.transpose(1, 2).contiguous() if heads_last else tensor


def _bind_torch(attend, case: Case, heads_last: bool = False) -> Bound:
    """Bind ``attend(cell)``, which returns ``attention(q, k, v)`` and a context to call it in."""
    import torch

    convert = partial(_to_torch, heads_last=heads_last)
    to_host = lambda x: (x[-1].transpose(0, 1) if heads_last else x[-1]).detach().double().cpu().numpy()
    q, k, v = map(convert, case.arrays)
    attention, within = attend(case.cell)
    if case.cell.direction == "forward":
        return _bound(lambda _: (attention(q, k, v),), None, to_host, within)
    for x in (q, k, v):
        x.requires_grad_()
    with within():
        o = attention(q, k, v)
    gradients = lambda do: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    return _bound(gradients, (convert(case.do), convert(case.sparse_do)), to_host)


def _sdpa(kernel: str | None, cell: Cell):
    """`scaled_dot_product_attention`, held to one of its kernels unless that is None."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    _only_plain("scaled_dot_product_attention", cell)
    gqa = {"enable_gqa": True} if cell.group > 1 else {}
    within = nullcontext if kernel is None else partial(sdpa_kernel, getattr(SDPBackend, kernel))
    return partial(scaled_dot_product_attention, is_causal=cell.causal, **gqa), within


def _flex(cell: Cell):
    """`flex_attention`, compiled anew for each cell: beyond a few shapes one compiled function gives up and runs uncompiled."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    if cell.direction == "backward":
        import torch._functorch.config

        torch._functorch.config.donated_buffer = False  # gradients are taken more than once
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    block_mask = None
    if cell.causal:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, cell.length, cell.length, device="cuda")
    score_mod = options.of_flex(cell.option, cell.heads)
    return partial(compiled, score_mod=score_mod, block_mask=block_mask, enable_gqa=cell.group > 1), nullcontext


def bind_flash_attn_4(case: Case) -> Bound:
    """FlashAttention-4, whose gradients need not be the same in every run."""

    def attend(cell: Cell):
        from flash_attn.cute import flash_attn_func

        _only_plain("flash_attn_func here", cell)

        def attention(q, k, v):
            o = flash_attn_func(q, k, v, causal=cell.causal)
            return o[0] if isinstance(o, tuple) else o

        return attention, nullcontext

    return _bind_torch(attend, case, heads_last=True)


# ---- JAX ---------------------------------------------------------------------------------------------------------------------------------


def _why_not_jax(place: str, dtype: str) -> str | None:
    if reason := _elsewhere("gpu", place, dtype):
        return reason
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes most of the memory for itself
    try:
        import jax

        jax.devices("gpu")
    except Exception as error:
        return f"cannot use jax: {sentence(error)}"
    return None


def _to_jax(x):
    """Heads last, (B, N, H, D)."""
    import jax

    bits = x.dtype.name == "bfloat16"
    array = jax.dlpack.from_dlpack(x.view(np.int16) if bits else x)
    return jax.numpy.swapaxes(jax.lax.bitcast_convert_type(array, jax.numpy.bfloat16) if bits else array, 1, 2)


def _bind_jax(case: Case, implementation: str = "cudnn") -> Bound:
    import jax

    _only_plain("jax.nn.dot_product_attention", case.cell)
    given = {"is_causal": case.cell.causal, "implementation": implementation}
    attention = jax.jit(partial(jax.nn.dot_product_attention, **given))
    q, k, v = map(_to_jax, case.arrays)
    do = None
    if case.cell.direction == "forward":
        once = lambda _: (attention(q, k, v),)
    else:
        _, pull_back = jax.vjp(attention, q, k, v)
        once, do = partial(jax.jit(lambda f, do: f(do)), pull_back), (_to_jax(case.do), _to_jax(case.sparse_do))
    bound = _bound(once, do, lambda x: np.asarray(x[-1].swapaxes(0, 1).astype(np.float32)))
    return Bound(lambda count: jax.block_until_ready(bound.repeat(count)), bound.results)
