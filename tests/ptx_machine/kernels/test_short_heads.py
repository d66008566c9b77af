"""Gradients of short heads of float32 under a bias: which heads are left to others, and what is promised of errors."""

import numpy as np
import pytest
from support import SIMULATED, random_inputs, same_bits, whole

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.instructions import sums
from ptx_machine.problems.kernels import machine
from support import gradients_promised as promised

import numba_flash
from numba_flash import reference
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.sm80.short_heads import short_head_tiles

pytestmark = [pytest.mark.full, pytest.mark.machine]

HEADS, NQ, NK, D = 2, 70, 72, 32
SPOILT, OTHER = (0, 1), (0, 0)  # batch elements and heads


def scale(what: str, factor, rows=slice(None), columns=slice(None)):
    """A function that multiplies some of one head."""

    def multiply(arrays):
        arrays[what][SPOILT][rows, columns] *= np.float32(factor)

    return multiply


def columns_far_apart(arrays):
    """Of V and dO, whose products are as large as ever."""
    for v, do, column in ((2.0**13, 2.0**-13, 0), (2.0**-13, 2.0**13, 1)):
        arrays["v"][SPOILT][:, column] *= np.float32(v)
        arrays["do"][SPOILT][:, column] *= np.float32(do)


# What is done to a head, and whether others compute it then.
HEADS_OF_OTHERS = {
    "NaN in do": (scale("do", np.nan, 7, 3), True),
    "scores of a million": (scale("q", 2.0**17), True),
    "scores of hundreds": (scale("q", 2.0**7), False),
    "columns of v and do far apart": (columns_far_apart, True),
    "a row of do far below": (scale("do", 2.0**-20, 5), False),
    "no gradient": (scale("do", 0), False),
}


def gradients(arrays: dict, backend: str, o, lse):
    bias = np.random.default_rng(3).standard_normal((NQ, NK)).astype(np.float32)
    inputs = *(arrays[name] for name in ("do", "q", "k", "v")), o, lse
    with machine(multiprocessors=2), np.errstate(all="ignore"):
        return numba_flash.backward(*inputs, bias=bias, bias_grad=True, backend=backend)[:3], bias


@pytest.mark.parametrize("name", HEADS_OF_OTHERS)
def test_heads_whose_planes_lack_digits_are_those_of_simt(name, monkeypatch):
    """Bit by bit; others are what they were."""
    monkeypatch.setattr(short_head_tiles, "FEWEST_STEPS", 1)
    spoil, left = HEADS_OF_OTHERS[name]
    q, k, v, do = random_inputs(batch=(1,), hq=HEADS, hk=HEADS, nq=NQ, nk=NK, d=D)
    arrays = {"q": q, "k": k, "v": v, "do": do}
    o, lse = (x.astype(np.float32) for x in reference.forward(q, k, v, return_lse=True))
    before, _ = gradients(arrays, "sm80", o, lse)
    spoil(arrays)
    after, by_simt = (gradients(arrays, backend, o, lse)[0] for backend in ("sm80", "simt"))
    for x, unspoilt, simt in zip(after, before, by_simt, strict=True):
        assert same_bits(x[SPOILT], simt[SPOILT]) == (left or name == "no gradient")
        assert same_bits(x[OTHER], unspoilt[OTHER])
        assert not same_bits(x[OTHER], simt[OTHER])


@pytest.mark.parametrize("kind", ["normal", "outliers of 10", "kelvin"])
def test_errors_of_gradients_are_at_most_those_of_ieee_sums(kind, monkeypatch):
    """Also where a score is so large that it is off by more than its weight may be, as the lse is off by the same."""
    monkeypatch.setattr(short_head_tiles, "FEWEST_STEPS", 1)
    built, launched = set(), Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda self, *operands, **more: (built.add(self.builder), launched(self, *operands, **more)))
    q, k, v, do = promised.inputs(kind, 128, D)
    ieee, bias = promised.ieee_of(q, k, v, do), np.zeros((1, q.shape[1], 128, 128), np.float32)
    expected = [x[0] for x in whole.gradients(do, q, k, v)]
    with machine(core=sums.HOPPER, multiprocessors=1):
        o, lse = numba_flash.forward(q, k, v, bias=bias, backend="sm80", return_lse=True)
        found = numba_flash.backward(do, q, k, v, o, lse, bias=bias, bias_grad=True, backend="sm80")
    assert {
        "sm80.short_heads.forward_short_heads.build",
        "sm80.bias_gradient.dk_dv_planes.build",
        "sm80.bias_gradient.dq_dbias_planes.build",
    } <= built
    promised.check(kind, [x[0] for x in found[:3]], ieee, expected)
