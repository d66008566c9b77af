"""Attention by IEEE float32, each sum in one register and in the order of its terms: what errors of other ways are measured by.

On arrays of NumPy or CuPy.
"""

import math

import numpy as np

LOG2_E = np.float32(math.log2(math.e))


def multiply_add(a, b, c):
    """In float32, as if it were one operation: the product is exact in float64."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def product(a, b):
    """``a @ b``."""
    total = multiply_add(a[:, :1], b[:1], 0)
    for i in range(1, a.shape[1]):
        total = multiply_add(a[:, i, None], b[i], total)
    return total


def forward(q, k, v):
    """o and lse of a head."""
    scale = np.float32(q.shape[1] ** -0.5) * LOG2_E
    s = product(q, k.T)
    shift = s.max(axis=1, keepdims=True) * scale
    p = 2 ** multiply_add(s, scale, -shift)
    l = p[:, 0]
    for j in range(1, p.shape[1]):
        l = l + p[:, j]
    log2_l = np.log2(l.astype(np.float64)).astype(np.float32)
    return product(p, v) / l[:, None], (shift[:, 0] + log2_l) * np.float32(math.log(2))


def backward(do, q, k, v, o, lse):
    """dq, dk and dv of a head."""
    scale = np.float32(q.shape[1] ** -0.5)
    p = 2 ** multiply_add(product(q, k.T), scale * LOG2_E, -(lse * LOG2_E)[:, None])
    delta = multiply_add(do[:, 0], o[:, 0], 0)
    for d in range(1, do.shape[1]):
        delta = multiply_add(do[:, d], o[:, d], delta)
    ds = p * (product(do, v.T) - delta[:, None])
    return product(ds, k) * scale, product(ds.T, q) * scale, product(p.T, do)


def size(x) -> float:
    """Root mean square."""
    return float(np.sqrt((x.astype(np.float64) ** 2).mean()))
