"""What to do with an argument that is refused, as the end of a sentence about it; empty where nothing is known about its kind."""

from functools import cache
from typing import Any

import numpy as np

GRADIENT = "numba_flash.backward has the gradient"


def of_array(name: str, x: Any) -> str:
    """Of an object that is no array here."""
    if isinstance(x, np.ma.MaskedArray):
        return f", whose mask would be ignored: pass {name}.data, and say with mask= what to hide"
    if _is_of(type(x), "torch", "Tensor") and x.requires_grad:
        return f", which requires a gradient: pass {name}.detach(); {GRADIENT}, for torch.autograd.Function"
    if _is_of(type(x), "dask", "Array"):
        return ": numba_flash.dask.forward and numba_flash.dask.backward take dask arrays"
    if hasattr(x, "toarray"):  # SciPy's sparse arrays
        return f": pass {name}.toarray()"
    converts = hasattr(x, "__array__") and (not hasattr(x, "__dlpack__") or isinstance(x.dtype, np.dtype))  # not all of PyTorch's do
    if isinstance(x, list | tuple) or converts:
        return f": pass np.asarray({name})"
    return ""


@cache
def of_tracer(kind: type) -> str:
    """Of what a library passes to functions that it differentiates or compiles, which some would hand over as if it had memory."""
    if _is_of(kind, "jax", "Tracer"):
        return (
            ", which has no values while JAX traces a function: call numba_flash outside of it, or by jax.pure_callback;"
            f" {GRADIENT}, for jax.custom_vjp"
        )
    if _is_of(kind, "autograd", "Box"):
        return (
            ", which stands for a value while autograd traces a function: make a primitive of the call by autograd.extend.primitive;"
            f" {GRADIENT}, for autograd.extend.defvjp"
        )
    if _is_of(kind, "torch", "FakeTensor", "FunctionalTensor", "Proxy"):
        return ", which has no values while PyTorch traces a function: make an operator of the call by torch.library.custom_op"
    return ""


def _is_of(kind: type, library: str, *names: str) -> bool:
    """True if a class of that library by one of those names is the kind, or one that it is made of."""
    return any(each.__name__ in names and each.__module__.split(".")[0] == library for each in kind.__mro__)


def of_number(name: str, value: Any) -> str:
    """Of what is no number here."""
    if isinstance(value, np.generic):
        return ""
    return f": pass {name}.item()" if getattr(value, "shape", None) == () and hasattr(value, "item") else ""


def of_shape(name: str, shape: tuple[int, ...], scores: tuple[int, ...]) -> str:
    """Of an array with an axis for each axis of the batch that lacks some of those of the scores (..., Hq, Nq, Nk)."""
    batch = len(scores) - 3
    if batch < 0:
        return ""
    for kept in ((-1,), (-2, -1), (-3, -1), (-2,)):  # by keys, by pairs, by heads and keys, by queries
        sizes = (*scores[:batch], *(scores[axis] for axis in kept))
        if len(shape) == len(sizes) and all(n in (1, m) for n, m in zip(shape, sizes, strict=True)):
            index = [":"] * batch + [":" if axis in kept else "None" for axis in (-3, -2, -1)]
            if index[-2:] == [":", ":"]:
                index = index[:-2]
            return f": pass {name}[{', '.join(index)}]"
    return ""
