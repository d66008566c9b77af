"""Queries of heads that share keys as rows of one head: what becomes of layouts, and who is served."""

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator has no tensor cores", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the schedule is written with numba-cuda")

import numba_flash
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import ForwardInputs, ForwardResults, Problem, bind
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.cuda.sm90 import tier
from numba_flash.cuda.sm90.fold import folded

H200 = Gpu(0, (9, 0), 132)
BLOCK_M = 128
NOTHING = ForwardResults(None, None)


def arrays_of(nq=9, nk=600, hq=8, hk=2, d=64) -> ForwardInputs:
    return ForwardInputs(*(np.zeros((3, h, n, d), np.float16) for h, n in ((hq, nq), (hk, nk), (hk, nk))))


def problem(x: ForwardInputs, **options) -> Problem:
    return bind(x.q, x.k, x.v, **options)


def of(p: Problem, x: ForwardInputs, results=NOTHING):
    return folded(p, type(x)(*map(Layout.of, x)), results, BLOCK_M)


LAYOUTS = {
    "contiguous": lambda x: x,
    "rows apart": lambda x: x.repeat(2, 3)[..., ::2],
    "batch inside": lambda x: x.transpose(1, 2, 0, 3).copy().transpose(2, 0, 1, 3),
}


@pytest.mark.parametrize("nq", [1, 9])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_rows_of_one_head_are_those_of_the_heads_that_share_its_keys(layout, nq):
    """In memory as it is."""
    x = arrays_of(nq=nq)
    q = layout(np.arange(x.q.size, dtype=np.float64).reshape(x.q.shape))
    found = of(problem(x), x._replace(q=q), ForwardResults(Layout.of(q), Layout.of(q[..., 0])))
    assert (found.problem.hq, found.problem.hk, found.problem.nq, found.problem.band) == (2, 2, 4 * nq, "none")
    for there, expected in ((found.inputs.q, q), (found.results.o, q), (found.results.lse, q[..., 0])):
        seen = np.lib.stride_tricks.as_strided(expected, there.shape, there.strides)
        np.testing.assert_array_equal(seen, expected.reshape(3, 2, 4 * nq, *expected.shape[3:]))
    assert found.inputs[1:] == tuple(map(Layout.of, x))[1:]


def test_rows_at_unequal_distances_stay_where_they_are():
    tokens_first = lambda x: x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)
    x, one = arrays_of(), arrays_of(nq=1)
    assert of(problem(x), x._replace(q=tokens_first(x.q))) is None
    assert of(problem(x), x, ForwardResults(Layout.of(tokens_first(x.q)), None)).results.o is None
    assert of(problem(x), x, ForwardResults(None, Layout.of(x.q.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)[..., 0]))) is None
    assert of(problem(one), one._replace(q=tokens_first(one.q))) is not None, "one row of each head"


ROWS_DIFFER = {
    "causal": {"causal": True},
    "window": {"window": (100, -1)},
    "q_lengths": {"q_lengths": np.array([1, 2, 3])},
    "bias": {"bias": np.zeros((9, 600), np.float16)},
    "mask": {"mask": np.ones((9, 600), bool)},
    "dropout": {"dropout": 0.5, "rng": (1, 2)},
    "score_mod": {"score_mod": numba_flash.alibi(np.ones(8))},
}


@pytest.mark.parametrize("options", ROWS_DIFFER.values(), ids=ROWS_DIFFER)
def test_heads_whose_rows_see_other_things_stay_apart(options):
    x = arrays_of()
    assert of(problem(x, **options), x) is None


def test_heads_stay_apart_where_that_takes_no_more_blocks():
    for sizes, together in (({"nq": 128}, False), ({"nq": 127}, False), ({"nq": 96}, True), ({"hk": 8}, False), ({}, True)):
        x = arrays_of(**sizes)
        assert (of(problem(x), x) is not None) == together, sizes


def test_a_kernel_gets_one_head_for_each_of_the_keys():
    x = arrays_of(nk=2000)
    results = ForwardResults(Layout.of(x.q), Layout.compact(x.q.shape[:3], "float32"))
    p = problem(x, softcap=3.0, kv_lengths=np.array([5, 6, 7]))
    inputs = x._replace(kv_lengths=np.array([5, 6, 7]))
    for there, parts in ((H200, 3), (H200._replace(multiprocessors=2), 1)):
        forward, *_ = tier.prepare_forward(p, type(x)(*map(Layout.of, inputs)), results, there).launches
        sizes, _ = forward.numbers
        assert (sizes.group, sizes.items, sizes.kv_splits) == (1, 3 * 2 * parts, parts)


def test_o_in_any_order_has_the_same_kernel():
    """As rows of heads together add up in another order than apart, in parts of the keys; a compact array is copied to o."""
    x = arrays_of(nk=2000)
    p, inputs = problem(x), type(x)(*map(Layout.of, x))
    last, lse = x.q.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3), Layout.compact(x.q.shape[:3], "float32")
    usual, other = (tier.prepare_forward(p, inputs, ForwardResults(Layout.of(o), lse), H200) for o in (x.q, last))
    assert [each.config for each in usual.launches] == [each.config for each in other.launches]
    assert other.launches[0].numbers[0].group == 1


def served(x: ForwardInputs, **options) -> bool:
    """Without demand."""
    return tier.why_not("forward", problem(x, **options), x, False, H200) is None


def test_many_rows_of_few_queries_are_served():
    """sm80's tiles for few queries have places for 32, at D = 64 enough warps for 64."""
    for d, most in ((64, 16), (72, 8), (128, 8), (256, 8)):
        assert not served(arrays_of(nq=most, d=d)), "of 4 heads"
        assert served(arrays_of(nq=most + 1, hq=8 if d > 64 else 10, d=d))
    x = arrays_of(nq=9, d=128)
    assert not served(x, causal=True)
    assert not served(x._replace(q=x.q.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)))
    assert not served(arrays_of(nq=16, hq=2, d=128)), "no heads share keys"
