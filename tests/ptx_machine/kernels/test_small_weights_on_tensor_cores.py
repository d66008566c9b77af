"""Small weights of float16 are not lost on tensor cores."""

import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import SM80, SM90, machine
from support.small_weights import SMALL_WEIGHTS, check_small_weights, check_small_weights_in_gradients

BACKENDS = {"sm90": SM90, "sm80": SM80}
named = lambda *quick: [x if x in quick else pytest.param(x, marks=pytest.mark.full) for x in SMALL_WEIGHTS]
pytestmark = pytest.mark.machine
on_tensor_cores = pytest.mark.parametrize("backend", BACKENDS)


@on_tensor_cores
@pytest.mark.parametrize("name", named("plain"))
def test_small_weights_are_not_lost(backend, name):
    with machine():
        check_small_weights(BACKENDS[backend], name)


@on_tensor_cores
@pytest.mark.parametrize("name", named())
def test_small_weights_are_not_lost_in_gradients(backend, name):
    with machine():
        check_small_weights_in_gradients(BACKENDS[backend], name)
