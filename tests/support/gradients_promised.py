"""What is promised of gradients of float32 on tensor cores, on every kind of data of the study of float32."""

import sys
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from support import ROOT, ieee_sums

sys.path.append(str(ROOT / "asv_bench" / "studies"))

import float32 as study

HEADS = {"outliers of 10": 4, "outliers of 100": 4, "rows, 1e6": 4}  # where single numbers decide the error of one; else 1
NAMES = ("dq", "dk", "dv")


def inputs(kind: str, length: int, head_dim: int) -> list[np.ndarray]:
    """q, k, v and do, (1, H, N, D)."""
    heads, study.HEADS = study.HEADS, HEADS.get(kind, 1)
    try:
        return study.inputs(kind, length, head_dim)
    finally:
        study.HEADS = heads


def ieee_of(q, k, v, do) -> list:
    """dq, dk and dv of each head by IEEE sums, from their own o and lse; (H, N, D)."""
    heads = zip(*(x[0] for x in (q, k, v, do)), strict=True)
    found = [ieee_sums.backward(each, *qkv, *ieee_sums.forward(*qkv)) for *qkv, each in heads]
    stack = np.stack if isinstance(q, np.ndarray) else sys.modules["cupy"].stack
    return [stack(x) for x in zip(*found, strict=True)]


class Bounds(NamedTuple):
    """Of the root mean square error, heads together by their geometric mean, and of the largest, both over those of IEEE sums."""

    rms: float
    largest: float


def promised(kind: str) -> Bounds:
    """Where few numbers lie far outside one product decides, here or there."""
    return Bounds(1.5, 4) if kind in HEADS else Bounds(1, 2)


def check(kind: str, gradients, ieee, expected, exceptions=MappingProxyType({})) -> dict[str, float]:
    """Errors are within what is `promised`, or within `Bounds` of the `exceptions` by kind and name; relative ones are returned."""
    sizes = {}
    for name, x, other, ref in zip(NAMES, gradients, ieee, expected, strict=True):
        errors, others = x - ref, other - ref
        ratios = [ieee_sums.size(mine) / ieee_sums.size(theirs) for mine, theirs in zip(errors, others, strict=True)]
        largest = float(abs(errors).max() / abs(others).max())
        sizes[name] = ieee_sums.size(errors) / ieee_sums.size(ref)
        print(f"{kind}, {name}: {sizes[name]:.1e}, of IEEE's {', '.join(f'{x:.2f}' for x in ratios)}, largest {largest:.2f}")
        bounds = exceptions.get((kind, name), promised(kind))
        assert np.exp(np.mean(np.log(ratios))) <= bounds.rms, name
        assert largest <= bounds.largest, name
    return sizes
