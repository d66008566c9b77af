"""Problems on paper: inputs and results are layouts, and no array is as large as it seems."""

import importlib
from typing import NamedTuple

import numpy as np

import numba_flash
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import (
    BackwardInputs,
    BackwardResults,
    ForwardInputs,
    ForwardResults,
    Prepared,
    Problem,
    bind,
    bind_packed,
)

plan = importlib.import_module("numba_flash.plan")  # in the package, a function has that name


def paper(*shape, dtype=np.float16) -> np.ndarray:
    """An array of one element, all over."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _layout(x) -> Layout | None:
    x = x.blocks if isinstance(x, numba_flash.BlockMask) else x
    return None if x is None else Layout.compact(x.shape, x.dtype)


class OnPaper(NamedTuple):
    """What a pass is prepared from."""

    kind: str
    problem: Problem
    inputs: ForwardInputs | BackwardInputs
    results: ForwardResults | BackwardResults

    def why_not(self, backend: str, gpu) -> str | None:
        """Why a tier does not serve it on demand, or None."""
        return plan.tier(backend).why_not(self.kind, self.problem, self.inputs, True, gpu=gpu)

    def prepared(self, backend: str, gpu) -> Prepared:
        return plan.prepare(backend, self.kind, self.problem, self.inputs, self.results, gpu=gpu)


def on_paper(kind, q, k, offsets=None, bias_grad=False, **options) -> OnPaper:
    """Of q, and of k which v is like; of packed sequences with their `offsets`."""
    if offsets is None:
        problem, rows = bind(q, k, k, **options), q.shape[:-1]
    else:
        problem, rows = bind_packed(q, k, k, offsets, offsets, **options), q.shape[1::-1]
        options = options | {"q_lengths": offsets, "kv_lengths": offsets}
    given = {name: _layout(options.get(name)) for name in ("bias", "mask", "q_lengths", "kv_lengths")}
    q, k, lse = _layout(q), _layout(k), Layout.compact(rows, problem.lse_dtype)
    if kind == "forward":
        return OnPaper(kind, problem, ForwardInputs(q, k, k, **given), ForwardResults(q, lse))
    results = BackwardResults(q, k, k, given["bias"] if bias_grad else None)
    return OnPaper(kind, problem, BackwardInputs(q, q, k, k, q, lse, **given), results)
