"""What is promised of gradients of float32, on tensor cores that cut their sums off as those of Ampere and of Hopper do."""

from functools import cache

import pytest
from support import SIMULATED, whole

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import machine
from support import gradients_promised as promised
from test_planes_accuracy import CORES

import numba_flash

pytestmark = pytest.mark.machine

N, D = 128, 64
# Of dq. With keys far from the origin the lse, of 30 and more, is rounded, which costs 1e-6 alone; o of 300 K costs 2e-6.
OFFSET = {"one sign": 2e-6, "offset": 3e-6, "kelvin": 4e-6}


@cache
def problem(kind: str) -> tuple:
    """q, k, v and do; what IEEE sums make of them; and what they give."""
    arrays = q, k, v, do = promised.inputs(kind, N, D)
    return arrays, promised.ieee_of(*arrays), [x[0] for x in whole.gradients(do, q, k, v)]


@pytest.mark.full
@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("kind", promised.study.DISTRIBUTIONS)
def test_errors_of_gradients_are_at_most_those_of_ieee_sums(kind, core):
    """And dq of data far from the origin keeps the digits that IEEE sums lose."""
    (q, k, v, do), ieee, expected = problem(kind)
    backend, sums_of_core, capability = CORES[core]
    with machine(core=sums_of_core, capability=capability):
        o, lse = numba_flash.forward(q, k, v, backend=backend, return_lse=True)
        gradients = numba_flash.backward(do, q, k, v, o, lse, backend=backend)
    errors = promised.check(kind, [x[0] for x in gradients], ieee, expected)
    assert errors["dq"] <= OFFSET.get(kind, 1)
