"""Functions of a score that only add a number for each head and distance: kernels begin the sums of a tile with these numbers."""

from functools import partial

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import HOPPER, SM80, SM90, machine
from support.naive import compare
from test_contract import AMPERE, TURING, Group, Shape, also, backward, forward, inputs_of, lengths

import numba_flash
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, bind
from numba_flash.cuda import config
from numba_flash.cuda.recipe import Call
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.cuda.score import prepare_relative
from numba_flash.cuda.sm90 import recipes

pytestmark = pytest.mark.machine

PAIR = (2, 2, 1)
SLOPES, TABLE = np.array([0.5, 0.03], np.float32), np.random.default_rng(1).standard_normal((2, 2 * 20 + 1), dtype=np.float32)
mod = lambda function: {"score_mod": function, "score_mod_grad": function.score_mod_grad}
ALIBI, LATER, RELATIVE = (
    mod(numba_flash.alibi(SLOPES)),
    mod(numba_flash.alibi(SLOPES, q_start=100)),
    mod(numba_flash.relative_position(TABLE, q_start=-3)),
)
SHORT = Shape((1, 2, 2), 70, 90)
SOME, MANY, FEW = Shape(PAIR, 150, 330), Shape(PAIR, 300, 200), Shape((1, 2, 2), 64, 700)
LENGTHS = Shape(PAIR, 130, 150, lengths([130, 3], [77, 150]))
hopper, ampere = partial(Group, SM90), lambda *group: Group(SM80, *group) if len(group) > 4 else Group(SM80, *group, AMPERE)
GROUPS = {
    "sm90 bfloat16 64": hopper("bfloat16", 64, 64, (also(SOME, **ALIBI), also(MANY, **RELATIVE))),
    "sm90 float16 64 causal": hopper("float16", 64, 64, (also(SOME, causal=True, **LATER), also(MANY, causal=True, **ALIBI))),
    "sm90 float16 64 window": hopper("float16", 64, 64, (also(SOME, window=(63, 17), **RELATIVE),)),
    "sm90 bfloat16 128 lengths": hopper("bfloat16", 128, 128, (also(LENGTHS, **RELATIVE),)),
    "sm90 float16 72, 40": hopper("float16", 72, 40, (also(SOME, **LATER),)),
    "sm90 bfloat16 256": hopper("bfloat16", 256, 256, (also(FEW, **ALIBI),)),
    "sm80 bfloat16 64": ampere("bfloat16", 64, 64, (also(SOME, **ALIBI), also(MANY, **RELATIVE))),
    "sm80 bfloat16 64 short": ampere("bfloat16", 64, 64, (also(SHORT, **ALIBI),)),
    "sm80 float16 64 causal on Hopper": ampere("float16", 64, 64, (also(SOME, causal=True, **LATER),), HOPPER),
    "sm80 float16 128 window": ampere("float16", 128, 128, (also(SOME, window=(63, 17), **RELATIVE),)),
    "sm80 bfloat16 40, 72 lengths": ampere("bfloat16", 40, 72, (also(LENGTHS, **RELATIVE),)),
    "sm80 bfloat16 256 on Hopper": ampere("bfloat16", 256, 256, (also(FEW, **ALIBI),), HOPPER),
    "sm80 float16 64 on Turing": ampere("float16", 64, 64, (also(SOME, causal=True, **LATER),), TURING),
}


def half(score, b, h, i, j):
    """Of a user's."""
    return score * 0.5


@pytest.fixture(autouse=True)
def of_few_scores(monkeypatch):
    """Small problems are served like large ones."""
    monkeypatch.setattr(prepare_relative, "FEWEST", 0)


def check(run, group):
    """All shapes of a group, on a machine of four multiprocessors."""
    for number, shape in enumerate(group.shapes):
        arrays = inputs_of(group, shape)
        with machine(seed=number, multiprocessors=4, capability=group.capability):
            results = run(group, arrays, **shape.options)
        compare(results, *arrays, **shape.options)


@pytest.mark.full
@pytest.mark.parametrize("name", GROUPS)
def test_forward(name):
    check(forward, GROUPS[name])


BACKWARD = {
    "sm90 bfloat16 64": hopper("bfloat16", 64, 64, (also(SOME, **ALIBI), also(MANY, **RELATIVE))),
    "sm90 float16 64 causal": hopper("float16", 64, 64, (also(SOME, causal=True, **LATER),)),
    "sm90 bfloat16 128 lengths": hopper("bfloat16", 128, 128, (also(LENGTHS, **RELATIVE), also(SOME, causal=True, **ALIBI))),
    "sm90 float16 72, 40": hopper("float16", 72, 40, (also(MANY, **LATER),)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name):
    check(backward, BACKWARD[name])


def test_what_else_changes_scores_keeps_the_function():
    """Kernels of plain attention are for functions that add for each distance, alone, and numbers far from Inf."""
    q = np.zeros((1, 2, 100, 64), np.float16)
    alone = lambda function, **options: prepare_relative.alone(bind(q, q, q, score_mod=function, **options))
    for function in (numba_flash.alibi(SLOPES), numba_flash.relative_position(TABLE)):
        found = alone(function, causal=True)
        assert found.options.relative.relative is not None
        assert found.options.score_mod is None
        assert not found.options.modifies
        for more in ({"softcap": 2.0}, {"mask": np.ones((100, 100), bool)}, {"dropout": 0.1, "rng": (1, 2)}, {"score_mod_grad": half}):
            assert alone(function, **more) is None
    assert alone(half) is None
    assert alone(numba_flash.alibi([1e30, 0.0])) is None
    assert alone(numba_flash.relative_position([[0.0], [np.nan]])) is None
    assert alone(numba_flash.alibi(SLOPES), scale=1e-30) is None


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 72), (40, 128), (64, 136), (136, 64), (256, 256)])
def test_gradients_of_wide_heads_keep_the_function(d, dv):
    """Whether queries and keys are wide, or values; there are tiles for the others alone."""
    x, v = (np.broadcast_to(np.float16(0), (1, 2, 100, n)) for n in (d, dv))
    q, o, lse = Layout.of(x), Layout.of(v), Layout.compact((1, 2, 100), "float32")
    p = bind(x, x, v, score_mod=numba_flash.alibi(SLOPES), score_mod_grad=numba_flash.alibi(SLOPES).score_mod_grad)
    inputs, results = BackwardInputs(o, q, q, o, o, lse), BackwardResults(q, q, o)
    (relative,) = (each for each in recipes.BACKWARD if each.stage == config.RELATIVE)
    call = Call(p, inputs, results, Gpu(0, HOPPER, 132), True)
    served = relative.serves(call)
    assert (served is not None) == (max(d, dv) <= 128)
    assert served is None or relative.tile(served, call).block_n > 0


def test_few_scores_keep_the_function(monkeypatch):
    """To compute numbers costs a launch."""
    q = np.zeros((1, 2, 100, 64), np.float16)
    problem = bind(q, q, q, score_mod=numba_flash.alibi(SLOPES))
    for fewest, found in ((2 * 100**2, True), (2 * 100**2 + 1, False)):
        monkeypatch.setattr(prepare_relative, "FEWEST", fewest)
        assert (prepare_relative.alone(problem) is not None) == found
