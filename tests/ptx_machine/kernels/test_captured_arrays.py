"""Functions of the score that read arrays of their own: kernels find them all, and read nothing beyond their ends."""

import numpy as np
import pytest
from support import SIMULATED, random_inputs

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import HOPPER, backward_pass, forward_pass

pytestmark = [pytest.mark.full, pytest.mark.machine]

NQ, NK = 70, 90  # the last tiles are cut off
OF_QUERIES, OF_KEYS = np.linspace(-1, 1, NQ, dtype=np.float32), np.linspace(1, -1, NK, dtype=np.float32)


def product(score, b, h, i, j):
    return score + OF_QUERIES[i] * OF_KEYS[j]


def one(score, b, h, i, j):
    return np.float32(1)


@pytest.mark.parametrize("run", [forward_pass, backward_pass], ids=["forward", "backward"])
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
def test_two_arrays_as_long_as_queries_and_keys(backend, run):
    arrays = random_inputs(batch=(1,), hq=1, hk=1, nq=NQ, nk=NK, d=16, dtype="float16")
    run(backend, arrays, 0, capability=HOPPER, score_mod=product, score_mod_grad=one)
