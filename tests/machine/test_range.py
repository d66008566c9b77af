"""float16 near both of its ends, on tensor cores: small weights are not lost, and a mean is no larger than what it is of."""

import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from float16_range import MEANS, SCORES, SMALL_WEIGHTS, check_mean, check_small_weights, check_small_weights_in_gradients
from kernels import SM80, SM90, machine

BACKENDS = {"sm90": SM90, "sm80": SM80}
on_tensor_cores = pytest.mark.parametrize("backend", BACKENDS)


@on_tensor_cores
@pytest.mark.parametrize("name", SMALL_WEIGHTS)
def test_small_weights_are_not_lost(backend, name):
    with machine():
        check_small_weights(BACKENDS[backend], name)


@on_tensor_cores
@pytest.mark.parametrize("name", SMALL_WEIGHTS)
def test_small_weights_are_not_lost_in_gradients(backend, name):
    with machine():
        check_small_weights_in_gradients(BACKENDS[backend], name)


@on_tensor_cores
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_of_the_largest_number_is_that(backend, name, scores):
    with machine():
        check_mean(BACKENDS[backend], name, scores)
