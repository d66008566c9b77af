"""Two axes of batch elements, both longer than one: the place of each, and its number, which dropout and functions of the score use."""

from typing import NamedTuple

import numpy as np
import pytest
from support import SIMULATED, random_inputs

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import HOPPER, backward_pass, forward_pass

pytestmark = [pytest.mark.full, pytest.mark.machine]

AMPERE, BATCH = (8, 0), (2, 3)
RNG = np.random.default_rng(0)
DROPOUT = {"dropout": 0.3, "rng": (3, 4)}
LENGTHS = {"q_lengths": np.array([[5, 2, 4], [3, 5, 1]]), "kv_lengths": np.array([[9, 8, 3], [9, 4, 7]]), "causal": True}
KEYS = {"kv_lengths": np.array([[530, 77, 300], [0, 513, 529]])}


def of_batch(score, b, h, i, j):
    return score + np.float32(0.1) * b


def one(score, b, h, i, j):
    return np.float32(1)


def bias(*shape, kind=np.float16, grad=False) -> dict:
    return {"bias": RNG.standard_normal(shape).astype(kind)} | ({"bias_grad": True} if grad else {})


class Case(NamedTuple):
    """A pass, the backend, heads of q and k, queries, keys, options, dtype, and how many multiprocessors there are."""

    run: object
    backend: str
    heads: tuple[int, int]
    nq: int
    nk: int
    options: dict = {}  # noqa: RUF012
    dtype: str = "float16"
    capability: tuple[int, int] = AMPERE
    multiprocessors: int = 2


USES_NUMBERS = DROPOUT | {"score_mod": of_batch, "score_mod_grad": one}
CASES = {
    "simt": Case(forward_pass, "simt", (2, 1), 5, 9, USES_NUMBERS | LENGTHS, "float32"),
    "simt, gradients": Case(backward_pass, "simt", (2, 1), 5, 9, USES_NUMBERS | bias(2, 3, 1, 5, 9, kind=np.float32, grad=True), "float32"),
    "simt, a bias of one axis": Case(backward_pass, "simt", (1, 1), 5, 9, bias(3, 1, 5, 9, kind=np.float32, grad=True), "float32"),
    "simt, few queries in parts": Case(forward_pass, "simt", (4, 2), 1, 530, bias(2, 3, 4, 1, 530), "float16", multiprocessors=132),
    "lanes in parts": Case(forward_pass, "simt", (4, 2), 1, 530, KEYS, "float32", multiprocessors=132),
    "sm80": Case(forward_pass, "sm80", (2, 1), 70, 90, USES_NUMBERS),
    "sm80, gradients": Case(backward_pass, "sm80", (2, 1), 70, 90, DROPOUT | bias(2, 1, 2, 70, 90, grad=True)),
    "sm80, few queries in parts": Case(forward_pass, "sm80", (4, 2), 2, 530, KEYS | DROPOUT, multiprocessors=132),
    "sm80, few gradients in parts": Case(backward_pass, "sm80", (4, 2), 2, 530, KEYS, capability=HOPPER, multiprocessors=132),
    "sm80, float32": Case(forward_pass, "sm80", (2, 1), 70, 90, DROPOUT, "float32"),
    "sm90": Case(forward_pass, "sm90", (2, 1), 70, 90, USES_NUMBERS, capability=HOPPER),
    "sm90, gradients": Case(backward_pass, "sm90", (2, 1), 70, 90, DROPOUT | bias(2, 1, 2, 70, 90, grad=True), capability=HOPPER),
}


@pytest.mark.parametrize("name", CASES)
def test_two_axes_of_batch_elements(name):
    case = CASES[name]
    hq, hk = case.heads
    arrays = random_inputs(batch=BATCH, hq=hq, hk=hk, nq=case.nq, nk=case.nk, d=16, dtype=case.dtype)
    case.run(case.backend, arrays, 0, case.multiprocessors, capability=case.capability, **case.options)


@pytest.mark.parametrize("shape", [(2, 1), (1, 3)], ids=str)
def test_a_bias_of_one_of_two_axes_that_is_copied(shape):
    """By the copy engine, which knows only the axes that there are; rows lie at multiples of 16 bytes."""
    arrays = random_inputs(batch=BATCH, hq=2, hk=1, nq=70, nk=136, d=16, dtype="float16")
    backward_pass("sm90", arrays, 0, capability=HOPPER, **bias(*shape, 2, 70, 136))
