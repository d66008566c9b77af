"""Standard attention: the N x N matrix is stored, one array operation follows the other. For NumPy and CuPy, in the dtype of the arrays.

Every operation reads what it needs from memory and writes its result there; on the matrix they work in place where they can. Matrix
products of 16-bit numbers sum in float32, as cuBLAS does; NumPy, and bfloat16 everywhere, take the way over float32 arrays.
"""

import sys

import numpy as np

from numba_flash.arguments import arrays


def forward(q, k, v, causal: bool = False):
    """Output, and the probabilities that `backward` reads.

    Parameters
    ----------
    q, k, v : ndarray
        (..., N, D), whose leading dimensions broadcast.
    causal : bool
        Query i sees keys up to i.
    """
    xp = sys.modules[arrays.library(q)]
    p = _product(q, _transposed(k))
    p *= p.dtype.type(q.shape[-1] ** -0.5)
    if causal:
        xp.copyto(p, -np.inf, where=~xp.tri(p.shape[-1], dtype=bool))
    p -= p.max(axis=-1, keepdims=True)
    xp.exp(p, out=p)
    xp.divide(p, p.sum(axis=-1, keepdims=True, dtype=_wide(p)), out=p, casting="unsafe")
    return _product(p, v), p


def backward(do, q, k, v, o, p):
    """dq, and dk and dv for every head of queries.

    Parameters
    ----------
    do, q, k, v, o, p : ndarray
        The gradient of `o`, and what `forward` took and returned.
    """
    xp = sys.modules[arrays.library(q)]
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    dv = _transposed(_product(_transposed(do), p))  # (do^T P)^T: CuPy would copy P^T
    ds = _product(do, _transposed(v))
    xp.subtract(ds, (do * o).sum(axis=-1, keepdims=True, dtype=_wide(do)), out=ds, casting="unsafe")
    ds *= p
    return scale * _product(ds, k), scale * _transposed(_product(_transposed(q), ds)), dv


def _transposed(x):
    return x.swapaxes(-1, -2)


def _wide(x) -> np.dtype:
    """In which numbers like these are summed."""
    return np.dtype(np.float32) if x.dtype.itemsize == 2 else x.dtype


def _product(a, b):
    if a.dtype.itemsize > 2 or (a.dtype == np.float16 and arrays.library(a) == "cupy"):
        return a @ b
    return (a.astype(np.float32) @ b.astype(np.float32)).astype(a.dtype)
