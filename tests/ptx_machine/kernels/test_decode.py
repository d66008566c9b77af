"""Few queries with many keys: tiles whose rows are the queries of all heads of a group, and whose keys warps share, against the oracle."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import SIMULATED, random_inputs, same_bits

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.machine.memory import Fault
from ptx_machine.problems.kernels import HOPPER, SM80, lengths_as_numbers, machine
from support.naive import compare
from support.pages import paged
from test_contract import ALIBI, AMPERE, DROPOUT, ONE, SMALL, TURING, Group, Shape, also, bias, forward, inputs_of, lengths, mask, tilt

from numba_flash.arguments.arrays import Layout
from numba_flash.cuda.runtime.launch import Gpu, Launch
from numba_flash.cuda.sm80.decode import prepare_decode

pytestmark = pytest.mark.machine

MANY = 8  # multiprocessors: enough for several parts of the keys
FOUR, SIX, FIVE = (1, 4, 1), (2, 6, 2), (1, 10, 2)
GROUP = Shape((1, 6, 2), 4, 150)
NO_GRADIENT = lambda options: {name: x for name, x in options.items() if name != "bias_grad"}
few = lambda dtype, d, dv, *shapes, capability=AMPERE, **more: Group(SM80, dtype, d, dv, shapes, capability, **more)
GROUPS = {
    "one query": few("bfloat16", 64, 64, Shape(FOUR, 1, 300)),
    "one query, other sizes": few("bfloat16", 64, 64, Shape((1, 2, 2), 1, 65), Shape(FOUR, 1, 700)),
    "one query, D128": few("float16", 128, 128, Shape(FOUR, 1, 100), Shape((2, 8, 1), 1, 500), capability=HOPPER),
    "causal": few("float16", 64, 64, *(Shape(FIVE, n, 200, {"causal": True}) for n in (2, 5, 16))),
    "causal, before the first key": few("bfloat16", 64, 64, Shape(SIX, 4, 200, {"causal": True, "q_start": -2})),
    "window": few("bfloat16", 128, 128, Shape(FIVE, 5, 500, {"window": (150, 2)}), Shape(FOUR, 6, 90, {"window": (3, -1), "q_start": 20})),
    "lengths": few("float16", 64, 64, Shape((3, 4, 2), 4, 400, {"causal": True} | lengths([4, 2, 0], [400, 130, 0]))),
    "more rows than a tile": few("float16", 128, 128, Shape((1, 16, 1), 13, 200, {"causal": True}), capability=HOPPER),
    "D256": few("bfloat16", 256, 256, Shape(FIVE, 2, 150, {"causal": True}), capability=HOPPER),
    "D13, 7": few("float16", 13, 7, Shape(SIX, 4, 150, {"window": (30, 0)})),
    "any strides": few("float16", 72, 40, Shape(SIX, 3, 130), layouts=("strided", "reversed", "transposed", "heads last")),
    "Turing": few("float16", 64, 64, Shape(SIX, 4, 200, {"causal": True}), capability=TURING),
    "little memory": few("float16", 128, 128, Shape(SIX, 4, 200, {"causal": True}), capability=SMALL),
    "bias": few("bfloat16", 128, 128, also(GROUP, **NO_GRADIENT(bias(GROUP, "bfloat16")))),
    "bias for all heads": few("float16", 64, 64, also(GROUP, causal=True, **NO_GRADIENT(bias(GROUP, "float32", 1)))),
    "mask": few("bfloat16", 64, 64, also(GROUP, window=(120, 0), **mask(GROUP))),
    "dropout": few("float16", 64, 64, also(GROUP, causal=True, **DROPOUT)),
    "score_mod and softcap": few(
        "float16", 64, 64, also(GROUP, causal=True, score_mod=tilt, score_mod_grad=lambda x, b, h, i, j: np.float32(0.5), softcap=3.0)
    ),
    "alibi": few("bfloat16", 64, 64, Shape((1, 2, 1), 3, 200, {"score_mod": ALIBI, "score_mod_grad": ALIBI.score_mod_grad})),
    "nothing": few("float16", 64, 64, Shape(ONE, 5, 0), Shape((1, 0, 2), 5, 5), Shape((0, 1, 1), 5, 5)),
}
AGAIN = ("one query, D128", "mask")


@pytest.mark.full
@pytest.mark.parametrize("name", GROUPS)
def test_few_queries(name):
    """Each problem, the first of some in two orders of warps, copies and blocks, which give the same bits."""
    group = GROUPS[name]
    for number, shape in enumerate(group.shapes):
        arrays = inputs_of(group, shape)
        with machine(seed=number, multiprocessors=MANY, capability=group.capability):
            results = forward(group, arrays, **shape.options)
        compare(results, *arrays, **shape.options)
        if number == 0 and name in AGAIN:
            with machine(seed=number + 100, multiprocessors=MANY, resident=3, capability=group.capability):
                again = forward(group, arrays, **shape.options)
            assert all(same_bits(x, again[key]) for key, x in results.items())


@pytest.mark.full
def test_a_number_of_another_kind_than_its_parameter_is_a_fault(monkeypatch):
    """The driver copies bytes: a float of 64 bits for a parameter of 32 would be another number on a GPU."""
    monkeypatch.setattr(prepare_decode, "np", SimpleNamespace(float32=float))
    group = GROUPS["one query"]
    arrays = inputs_of(group, group.shapes[0])
    with machine(multiprocessors=MANY, capability=group.capability), pytest.raises(Fault, match="for a parameter that is f32"):
        forward(group, arrays)


@pytest.mark.full
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    *(st.integers(1, 2), st.integers(1, 2), st.integers(1, 16), st.integers(1, 600)),
    *(st.one_of(st.none(), st.tuples(st.integers(-1, 200), st.integers(-1, 20))), st.integers(-20, 620), st.integers(1, 9)),
)
def test_random_shapes(batch, hk, nq, nk, window, q_start, multiprocessors):
    """Of one kernel, so that few are compiled."""
    shape = Shape((batch, 3 * hk, hk), nq, nk, {"window": window or (5, 5), "q_start": q_start})
    group = few("float16", 64, 64, shape)
    arrays = inputs_of(group, shape)
    with machine(seed=nk, multiprocessors=multiprocessors, capability=AMPERE):
        results = forward(group, arrays, **shape.options)
    compare(results, *arrays, **shape.options)


@pytest.mark.full
def test_out_of_float32_and_no_lse():
    q, k, v, do = random_inputs(batch=(1,), hq=4, hk=1, nq=2, nk=600, d=16, dtype="bfloat16")
    for multiprocessors in (1, MANY):
        with machine(multiprocessors=multiprocessors, capability=AMPERE):
            out = SM80.forward(q, k, v, out=np.full(do.shape, np.nan, np.float32))
            o = SM80.forward(q, k, v)
        assert same_bits(o, out.astype(o.dtype))
        assert (out != o).any()


KNOWN = {"all keys": (1, 3, 100), "parts": (MANY, 2, 300), "many parts": (60, 2, 3000)}


@pytest.mark.full
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("size", [None, 16])
def test_lengths_of_the_host_are_numbers(name, size):
    """Of keys, beside a dtype that nobody reads; nothing else is launched for them."""
    multiprocessors, batch, nk = KNOWN[name]
    arrays = random_inputs(batch=(batch,), hq=4, hk=2, nq=2, nk=nk, d=64, dtype="bfloat16")
    lengths = {"kv_lengths": np.array([nk, 7, 0][:batch], np.int16), "causal": True}
    with machine(multiprocessors=multiprocessors, capability=AMPERE), lengths_as_numbers():
        if size is None:
            o, lse = SM80.forward(*arrays[:3], return_lse=True, **lengths)
        else:
            given = paged(*arrays[:3], lengths["kv_lengths"], size)
            o, lse = SM80.forward_paged(*given[:5], return_lse=True, causal=True)
    compare({"o": o, "lse": lse}, *arrays, **lengths)


@pytest.mark.parametrize(("parts", "dv"), [(1, 7), *(pytest.param(*each, marks=pytest.mark.full) for each in ((9, 64), (40, 40)))])
def test_many_parts_are_combined(parts, dv):
    """Of rows that saw nothing in some, or in any, of two axes of batch elements; the weights are those of the union."""
    rng, shape = np.random.default_rng(parts), (2, 3, 3, 2)
    lse_parts = rng.standard_normal((parts * shape[0], *shape[1:])).astype(np.float32) * 5
    lse_parts[rng.random(lse_parts.shape) < 0.3] = -np.inf
    lse_parts[::2, 0, 1, 1] = -np.inf
    o_parts = np.where(lse_parts[..., None] == -np.inf, 0, rng.standard_normal((*lse_parts.shape, dv))).astype(np.float32)
    o, lse = np.full((*shape, dv), np.nan, np.float32), np.full(shape, np.nan, np.float32)
    views = tuple((Layout.of(x), n) for x, n in ((o_parts, 5), (lse_parts, 4), (o, 5), (lse, 4)))
    launch = Launch(
        *("passes.combine.build_many", ("float32", "float32", dv, True, 8), Gpu(0, AMPERE, 8)),
        grid=math.prod(shape),
        threads=256,
        operands=views,
        numbers=(parts,),
    )
    with machine(capability=AMPERE):
        launch(o_parts, lse_parts, o, lse)
    by_part = lse_parts.reshape(parts, *shape).astype(np.float64)
    with np.errstate(divide="ignore"):
        ref = np.log(np.exp(by_part).sum(0))
    weights = np.exp(by_part - np.where(ref == -np.inf, 0, ref))
    np.testing.assert_allclose(lse, ref, atol=1e-5)
    np.testing.assert_allclose(o, (weights[..., None] * o_parts.reshape(parts, *o.shape)).sum(0), atol=1e-5)
    assert lse[0, 0, 1, 1] == -np.inf
    assert (o[0, 0, 1, 1] == 0).all()
