"""Gradients of few queries with many keys: tiles whose rows are the queries of all heads of a group, and whose keys warps share."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import SIMULATED, same_bits

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import HOPPER, SM80, machine
from support.naive import compare
from test_contract import AMPERE, SMALL, TURING, Group, Shape, backward, inputs_of, lengths

from numba_flash import call, reference

pytestmark = pytest.mark.machine

MANY = 3  # multiprocessors: enough for several parts of the keys
FOUR, SIX = (1, 4, 1), (2, 6, 2)
few = lambda dtype, d, dv, *shapes, capability=AMPERE, **more: Group(SM80, dtype, d, dv, shapes, capability, **more)
DLSE = {"dlse": np.random.default_rng(3).standard_normal((2, 6, 2)).astype(np.float32)}
GROUPS = {
    "one query": few("bfloat16", 64, 64, Shape((1, 2, 2), 1, 513)),
    "one query, shared keys": few("bfloat16", 64, 64, Shape(FOUR, 1, 530)),
    "one query, D128": few("float16", 128, 128, Shape((1, 8, 1), 2, 530), capability=HOPPER),
    "32 rows": few("bfloat16", 64, 64, Shape((1, 2, 1), 13, 530, {"causal": True}), capability=HOPPER),
    "causal": few("float16", 64, 64, *(Shape((1, 6, 2), n, 530, {"causal": True}) for n in (2, 5))),
    "window": few("bfloat16", 128, 128, Shape((1, 6, 2), 5, 600, {"window": (150, 2), "q_start": 300}), capability=HOPPER),
    "before the first key": few("bfloat16", 64, 64, Shape(SIX, 4, 530, {"causal": True, "q_start": -2})),
    "lengths": few("float16", 64, 64, Shape((4, 4, 2), 4, 530, {"causal": True} | lengths([4, 2, 0, 3], [530, 130, 200, 0]))),
    "dlse": few("float16", 64, 64, Shape(SIX, 2, 520, DLSE)),
    "D13, 7": few("float16", 13, 7, Shape((1, 6, 2), 4, 520, {"window": (30, 0)})),
    "any strides": few("float16", 72, 40, Shape((1, 6, 2), 3, 530), layouts=("strided", "reversed", "transposed", "heads last")),
    "Turing": few("float16", 64, 64, Shape((1, 6, 2), 4, 520, {"causal": True}), capability=TURING),
    "little memory": few("float16", 128, 128, Shape((1, 6, 2), 4, 520, {"causal": True}), capability=SMALL),
}
AGAIN = ("32 rows", "little memory")


@pytest.mark.full
@pytest.mark.parametrize("name", GROUPS)
def test_gradients_of_few_queries(name):
    """Each problem, the first of some in two orders of warps, copies and blocks, which give the same bits."""
    group = GROUPS[name]
    for number, shape in enumerate(group.shapes):
        arrays = inputs_of(group, shape)
        with machine(seed=number, multiprocessors=MANY, capability=group.capability):
            results = backward(group, arrays, **shape.options)
        compare(results, *arrays, **shape.options)
        if number == 0 and name in AGAIN:
            with machine(seed=number + 100, multiprocessors=MANY, resident=2, capability=group.capability):
                again = backward(group, arrays, **shape.options)
            assert all(same_bits(x, again[key]) for key, x in results.items())


@pytest.mark.full
def test_a_block_for_all_keys_writes_dq_itself():
    """In the place of a kernel that adds parts."""
    group = GROUPS["one query"]
    arrays = inputs_of(group, group.shapes[0])
    with machine(multiprocessors=1, capability=AMPERE):
        gradients = backward(group, arrays)
    compare(gradients, *arrays)


@pytest.mark.full
def test_impossible_lengths_give_nan(monkeypatch):
    """For that sequence alone."""
    monkeypatch.setattr(call, "check_values", lambda *_: None)  # the machine's arrays are NumPy's, whose values could be checked
    group = GROUPS["lengths"]
    arrays = inputs_of(group, Shape((2, 4, 2), 4, 530))
    o, lse = reference.forward(*arrays[:3], return_lse=True)
    o, lse = o.astype(arrays[3].dtype), lse.astype(np.float32)
    with machine(multiprocessors=MANY, capability=AMPERE):
        gradients = SM80.backward(arrays[3], *arrays[:3], o, lse, kv_lengths=np.array([530, 531]))
    for x in gradients:
        assert np.isnan(x[1].astype(np.float64)).all()
        assert np.isfinite(x[0].astype(np.float64)).all()


@pytest.mark.full
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    *(st.integers(1, 2), st.integers(1, 2), st.integers(1, 5), st.integers(512, 700)),
    *(st.one_of(st.none(), st.tuples(st.integers(-1, 200), st.integers(-1, 20))), st.integers(-20, 720), st.integers(1, 5)),
)
def test_random_shapes(batch, hk, nq, nk, window, q_start, multiprocessors):
    """Of one kernel, or one with parts, so that few are compiled."""
    shape = Shape((batch, 3 * hk, hk), nq, nk, {"window": window or (5, 5), "q_start": q_start})
    group = few("float16", 64, 64, shape)
    arrays = inputs_of(group, shape)
    with machine(seed=nk, multiprocessors=multiprocessors, capability=AMPERE):
        results = backward(group, arrays, **shape.options)
    compare(results, *arrays, **shape.options)
