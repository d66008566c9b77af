"""`merge`: attention over two sets of keys from the attention over each."""

from __future__ import annotations

from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from numba_flash.arguments import arrays, checks
from numba_flash.arguments.annotations import Array
from numba_flash.arguments.problem import DTYPES
from numba_flash.arguments.signatures import shown

MOST_AXES = 5  # that kernels know


@overload
def merge(o1: NDArray[Any], lse1: Array, o2: Array, lse2: Array) -> tuple[NDArray[Any], NDArray[Any]]: ...
@overload
def merge(o1: Array, lse1: Array, o2: Array, lse2: Array) -> tuple[Any, Any]: ...
@shown
def merge(o1: Array, lse1: Array, o2: Array, lse2: Array) -> tuple[Array, Array]:
    """Attention over the union of two sets of keys: the base of every scheme that splits or distributes keys.

    ``lse = log(exp(lse1) + exp(lse2))``, ``o = exp(lse1 - lse) o1 + exp(lse2 - lse) o2`` (Dao, FlashAttention-2, arXiv:2307.08691,
    section 3.1): the online softmax between partial results. Exact and, up to rounding, commutative and associative.

    Parameters
    ----------
    o1, o2 : arrays, shape (..., Hq, Nq, Dv)
        Partial results of `forward`, or of `merge`, for the same queries and different keys; any dtypes of the library.
    lse1, lse2 : arrays, shape (..., Hq, Nq)
        Their log-sum-exps, float32 or float64.

    Returns
    -------
    o : array, shape (..., Hq, Nq, Dv)
        In float32, or float64 if any argument is: partial results are rounded to 16 bits only when nothing is to be merged any more.
    lse : array, shape (..., Hq, Nq)
        In the same dtype.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind, library, dtype or shape.
    MemoryError
        There is no room for `o`, or for a copy of `o1` or `o2` in its dtype.
    """
    o1, lse1, o2, lse2 = (checks.adopt(name, x) for name, x in (("o1", o1), ("lse1", lse1), ("o2", o2), ("lse2", lse2)))
    for name, x, dtypes in (
        ("o1", o1, DTYPES),
        ("lse1", lse1, DTYPES[2:]),
        ("o2", o2, DTYPES),
        ("lse2", lse2, DTYPES[2:]),
    ):
        checks.layout(name, x)
        checks.library(name, x, "o1", o1)
        if x.dtype.name not in dtypes:
            raise TypeError(f"{name}.dtype ({x.dtype.name}) must be one of {', '.join(dtypes)}")
    if o1.ndim == 0:
        raise ValueError("o1 must have shape (..., Hq, Nq, Dv); got ()")
    for name, x, shape in (("lse1", lse1, o1.shape[:-1]), ("o2", o2, o1.shape), ("lse2", lse2, o1.shape[:-1])):
        if x.shape != shape:
            raise ValueError(f"{name}.shape {tuple(x.shape)} must be {tuple(shape)}, as o1.shape is {tuple(o1.shape)}")
    dtype = "float64" if any(x.dtype == np.float64 for x in (o1, lse1, o2, lse2)) else "float32"
    return (_on_host if arrays.library(o1) == "numpy" else _on_gpu)(o1, lse1, o2, lse2, dtype)


def merge_into(o, lse, o2, lse2) -> None:
    """`merge` of checked arrays, in the place of o and lse, which are both of float32 or of float64."""
    if arrays.library(o) == "numpy":
        o[...], lse[...] = _on_host(o, lse, o2, lse2, o.dtype.name)
    else:
        _launch(o, lse, o2, lse2, o, lse)


def _on_host(o1, lse1, o2, lse2, dtype: str):
    with arrays.named("o", o1.shape, dtype):
        o1, lse1, o2, lse2 = (x.astype(dtype) for x in (o1, lse1, o2, lse2))
        lse = np.logaddexp(lse1, lse2)
        return _weighted(o1, lse1, lse) + _weighted(o2, lse2, lse), lse


def _weighted(o, part, lse):
    """``exp(part - lse) * o``; rows that saw no key have no share, whatever `o` holds."""
    empty = part == -np.inf
    weight = np.exp(np.where(empty, 0, part) - np.where(empty, 0, lse))
    return np.where(empty[..., None], 0, weight[..., None] * o)


def _on_gpu(o1, lse1, o2, lse2, dtype: str):
    with o1.device:
        shape = o1.shape
        if len(shape) > MOST_AXES:
            o1, o2 = (x.reshape(-1, shape[-1]) for x in (o1, o2))
            lse1, lse2 = (x.reshape(-1) for x in (lse1, lse2))
        o, lse = (arrays.empty(name, like, like.shape, dtype) for name, like in (("o", o1), ("lse", lse1)))
        _launch(o1, lse1, o2, lse2, o, lse)
        return o.reshape(shape), lse.reshape(shape[:-1])


def _launch(*parts) -> None:
    """On a GPU, of which only who has one hears."""
    from numba_flash.cuda.passes import prepare_merge

    prepare_merge.merge(prepare_merge.Parts(*parts))
