"""Backward passes in sections of batch elements or heads: the bits of the whole, whatever belongs to a section."""

from typing import NamedTuple

import numpy as np
import pytest
from support import DTYPES, SIMULATED, random_inputs, same_bits, whole

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import UNITS, machine

import numba_flash
from numba_flash import reference, sections

HEAD = 2**15  # bytes that sums of dq of a head of so few queries take at least, on either tier
NQ, NK = 9, 12
RNG = np.random.default_rng(0)


class Case(NamedTuple):
    """Batch, heads of q and k; bytes of a section; how many sections there are at least; what else is chosen."""

    batch: tuple[int, ...]
    heads: tuple[int, int]
    most: int
    options: dict = {}  # noqa: RUF012
    dtype: str = "float16"
    d: int = 64


def of_batch(score, b, h, i, j):
    return score + np.float32(0.1) * b


def one(score, b, h, i, j):
    return np.float32(1)


def bias(*shape, dtype=np.float16) -> dict:
    return {"bias": RNG.standard_normal(shape).astype(dtype), "bias_grad": True}


DROPOUT = {"dropout": 0.3, "rng": (3, 4)}
LENGTHS = {"q_lengths": np.array([9, 3, 0, 5]), "kv_lengths": np.array([12, 3, 4, 5])}
CASES = {
    "batch elements": Case((5,), (2, 1), 4 * HEAD),
    "heads": Case((), (6, 3), 2 * HEAD),
    "one axis, then the other": Case((3, 2), (1, 1), HEAD),
    "dropout": Case((5,), (2, 2), 4 * HEAD, DROPOUT),
    "dropout, two axes": Case((3, 2), (1, 1), 2 * HEAD, DROPOUT),
    "a function that uses b": Case((4,), (1, 1), HEAD, {"score_mod": of_batch, "score_mod_grad": one}),
    "a bias of each": Case((4,), (2, 2), 2 * HEAD, bias(4, 2, NQ, NK)),
    "a bias of each batch element's keys": Case((4,), (2, 2), 2 * HEAD, bias(4, 1, 1, NK)),
    "a bias that all share": Case((4,), (2, 2), 2 * HEAD, bias(2, NQ, NK)),
    "a mask and lengths": Case((4,), (2, 2), 2 * HEAD, {"mask": RNG.random((4, 1, NQ, NK)) < 0.7, **LENGTHS}),
    "float32": Case((4,), (2, 2), 2 * HEAD, dtype="float32"),
    "wide heads": Case((4,), (2, 2), 1, d=256),
}


def gradients(backend, case: Case, arrays) -> list:
    q, k, v, do = arrays
    of_forward = {name: x for name, x in case.options.items() if name != "bias_grad"}
    o, lse = reference.forward(q, k, v, return_lse=True, **of_forward)
    with machine():
        return numba_flash.backward(do, q, k, v, o.astype(q.dtype), lse.astype(np.float32), backend=backend, **case.options)


@pytest.mark.full
@pytest.mark.machine
@pytest.mark.parametrize("backend", ["sm90", "sm80"])
@pytest.mark.parametrize("name", CASES)
def test_sections_have_the_bits_of_the_whole(name, backend, monkeypatch):
    """But a gradient of a bias that sections share, which they sum in float32, is only as accurate."""
    case, axes, calls, part, prepare = CASES[name], set(), [], sections._part, sections.prepare
    (hq, hk), dtype = case.heads, DTYPES[case.dtype]
    arrays = random_inputs(batch=case.batch, hq=hq, hk=hk, nq=NQ, nk=NK, d=case.d, dtype=case.dtype)
    expected = gradients(backend, case, arrays)
    monkeypatch.setattr(sections, "MOST", case.most)
    monkeypatch.setattr(sections, "room", lambda inputs: case.most)
    monkeypatch.setattr(sections, "too_large", lambda *arguments: None)  # which cuts, too
    monkeypatch.setattr(sections, "_part", lambda problem, cut: axes.add(cut[:2]) or part(problem, cut))
    monkeypatch.setattr(sections, "prepare", lambda *arguments: calls.append(1) or prepare(*arguments))
    found = gradients(backend, case, arrays)
    assert calls
    assert len(axes) > 1
    usual = "b0" if len(case.batch) == 2 else "b1"
    assert ("heads" if name == "heads" else usual) in {axis for axis, _ in axes}
    shared = name == "a bias that all share"
    assert all(map(same_bits, found[:3], expected[:3]))
    assert shared or same_bits(found[-1], expected[-1])
    q, k, v, do = arrays
    for x, y in zip(found, whole.gradients(do, q, k, v, **case.options), strict=True):
        np.testing.assert_allclose(x.astype(float), y, atol=4 * UNITS[case.dtype] * max(1, abs(y).max()))
    assert found[0].dtype == dtype
