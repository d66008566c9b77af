"""Traces on paper of what is launched on the machine: they tell apart what a result depends on, and nothing else."""

import evidence
import numpy as np
import pytest
from support import SIMULATED, random_inputs

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from kernels import machine

import numba_flash


def paper(backend="sm90", kind="forward", seed=3, result=lambda o: o, **options) -> list[str]:
    """What a trace on paper says of a call, of whose results the first is compared."""
    with evidence.traced(paper=True) as trace, machine():
        q, k, v, do = random_inputs(nq=70, nk=90, d=64, hq=2, hk=2, dtype="float16", seed=seed)
        o, lse = numba_flash.forward(q, k, v, backend=backend, return_lse=True, **options)
        if kind == "backward":
            o, *_ = numba_flash.backward(do, q, k, v, o, lse, backend=backend, **options)
        evidence.compared(result(o))
    assert trace.launches > 0
    return [trace.events, *map(repr, trace.kernels)]


@pytest.mark.parametrize("backend", ["sm90", "sm80", "simt"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_trace_is_the_same_for_the_same_call(backend, kind):
    assert paper(backend, kind) == paper(backend, kind)


MASKS = [{"mask": np.random.default_rng(seed).random((70, 90)) < 0.5} for seed in (1, 2)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"scale": 0.3}),
        ({}, {"seed": 4}),
        ({"causal": True}, {"causal": True, "q_start": 0}),
        MASKS,
        [{"dropout": 0.3, "rng": (1, offset)} for offset in (1, 2)],
        [{"kv_lengths": np.array([90, n])} for n in (50, 51)],
    ],
    ids=["scale", "values", "band", "mask", "state", "lengths"],
)
def test_a_trace_tells_calls_apart(first, second):
    assert paper(**first) != paper(**second)


def test_a_trace_tells_what_the_host_makes_of_results():
    whole, *others = (paper(result=made) for made in (np.copy, lambda o: o[:, ::-1], lambda o: o.swapaxes(1, 2), lambda o: 2 * o))
    assert whole not in others
    assert whole == paper()


def test_addresses_are_refused():
    with evidence.traced(paper=True), pytest.raises(ValueError, match="an address, 0x"):
        evidence.uses(object())


def test_values_count_as_far_as_all_machines_agree():
    x = np.linspace(0.1, 1, 7)
    digests = {evidence._digest(y) for y in (x, x * (1 + 2**-50), np.where(x > 2, np.nan, x))}
    assert len(digests) == 1
    assert evidence._digest(x * (1 + 2**-20)) not in digests
    assert evidence._digest(np.array([np.nan])) == evidence._digest(-np.array([np.nan]))
