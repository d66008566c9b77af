"""Functions of the user: what makes two of them the same, in one process and in the next; how long they stay; those that are there."""

import gc
import json
import os
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest
from numba import float32, njit

import numba_flash
from numba_flash.arguments.options import Options
from numba_flash.arguments.problem import ForwardInputs, ForwardResults, bind
from numba_flash.cpu import tier as cpu
from numba_flash.cpu.row_function import row_function_address
from numba_flash.scoremod import functions as scoremod
from numba_flash.scoremod.captures import Capture

SCALE = 0.5
TABLE = np.arange(4.0)


@njit
def helper(x):
    return x * SCALE


def fingerprint(function) -> str:
    return Capture("score_mod", getattr(function, "py_func", function)).fingerprint


def with_globals(score, b, h, i, j):
    return helper(score) + TABLE[j % 4]


def shifted(shift):
    def function(score, b, h, i, j):
        return score + shift

    return function


def nested(shift):
    @njit
    def inner(x):
        return x + shift

    return lambda score, b, h, i, j: inner(score)


def test_equal_code_with_equal_constants_is_one_function():
    assert fingerprint(shifted(1.0)) == fingerprint(shifted(1.0))
    assert fingerprint(nested(1.0)) == fingerprint(nested(1.0))
    assert scoremod.find(shifted(1.0), None) is scoremod.find(shifted(1.0), None)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (shifted(1.0), shifted(2.0)),
        (shifted(1), shifted(1.0)),
        (shifted(0.0), shifted(-0.0)),
        (shifted(np.float32(1)), shifted(np.float64(1))),
        (nested(1.0), nested(2.0)),
        (numba_flash.alibi([1.0, 2.0]), numba_flash.alibi([1.0, 3.0])),
        (numba_flash.alibi(np.float32([1, 2])), numba_flash.alibi(np.float64([1, 2]))),
        (numba_flash.alibi([1.0]), numba_flash.alibi([1.0], q_start=1)),
        (lambda score, b, h, i, j: score + 1, lambda score, b, h, i, j: score + 2),
        (lambda score, b, h, i, j: score + i, lambda score, b, h, i, j: score + j),
    ],
)
def test_anything_that_changes_the_code_makes_another_function(one, other):
    assert fingerprint(one) != fingerprint(other)
    assert scoremod.find(one, None) != scoremod.find(other, None)
    assert scoremod.find(one, one) != scoremod.find(one, other)


def test_globals_count(monkeypatch):
    before = fingerprint(with_globals)
    monkeypatch.setitem(globals(), "TABLE", TABLE + 1)
    assert fingerprint(with_globals) != before
    monkeypatch.undo()
    monkeypatch.setitem(globals(), "SCALE", 0.25)  # named by a function that it calls
    assert fingerprint(with_globals) != before


PROCESS = """
import json, sys
import numpy as np, numba_flash
from numba import types
from numba_flash.cpu.row_function import row_function_address
from numba_flash.cuda.runtime import compile
from numba_flash.arguments.problem import bind

slopes = np.array([0.5, 0.25])

def function(score, b, h, i, j):
    return score - slopes[h] * abs(i - j)

q = np.ones((2, 3, 4), np.float32)
score_mod = bind(q, q, q, score_mod=function).options.score_mod
row_function_address(score_mod, types.float32)
stats = score_mod.rows[types.float32].dispatcher.stats
key = compile.cache_key("simt.forward.build", (score_mod,), (9, 0))
print(json.dumps([score_mod.fingerprint, key, sum(stats.cache_hits.values()), sum(stats.cache_misses.values())]))
"""


def test_the_next_process_finds_what_was_compiled(tmp_path):
    """With another hash seed: the fingerprint, the key of the cubin, and the code on the CPU."""
    runs = []
    for seed in ("1", "2"):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        runs.append(json.loads(run.stdout))
    first, second = runs
    assert first[:2] == second[:2]
    assert first[2:] == [0, 1]
    assert second[2:] == [1, 0]


# ---- changes while a process runs --------------------------------------------------------------------------------------------------------

Q = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(np.float32)


def tilted(score, b, h, i, j):
    return helper(score) + TABLE[j % 4]


def expected(scale, table):
    return numba_flash.forward(Q, Q, Q, scale=0.5 * scale, bias=np.float32(table)[np.arange(5) % 4], backend="cpu")


def test_changed_constants_give_the_result_of_the_new_ones(monkeypatch):
    """A global of a function that it calls, whose old value is compiled already, and an array changed in place; there and back."""
    table = np.arange(4.0)
    monkeypatch.setitem(globals(), "TABLE", table)
    for scale, first in ((0.5, 0.0), (0.25, 0.0), (0.25, 3.0), (0.5, 0.0)):
        monkeypatch.setitem(globals(), "SCALE", scale)
        table[0] = first
        o = numba_flash.forward(Q, Q, Q, scale=0.5, score_mod=tilted, backend="cpu")
        np.testing.assert_allclose(o, expected(scale, table), rtol=1e-5, atol=1e-6)


def test_a_problem_keeps_what_its_function_was(monkeypatch):
    problem, before = bind(Q, Q, Q, scale=0.5, score_mod=tilted), expected(SCALE, TABLE)
    monkeypatch.setitem(globals(), "SCALE", 9.0)
    o = np.empty_like(Q)
    cpu.prepare_forward(problem, None, ForwardResults(None, None)).run(ForwardInputs(Q, Q, Q), ForwardResults(o, None))
    np.testing.assert_allclose(o, before, rtol=1e-5, atol=1e-6)


def test_a_failed_look_is_no_prepared_call(monkeypatch):
    function = shifted(1.0)
    numba_flash.forward(Q, Q, Q, score_mod=function, backend="cpu")
    function.__closure__[0].cell_contents = [1.0]
    with pytest.raises(TypeError, match=r"^score_mod refers to shift, a list; numbers"):
        numba_flash.forward(Q, Q, Q, score_mod=function, backend="cpu")


# ---- how long they stay ------------------------------------------------------------------------------------------------------------------


def test_equal_functions_are_compiled_once():
    found = {id(scoremod.find(lambda score, b, h, i, j: score + 0.125, None)) for _ in range(3)}
    assert len(found) == 1
    results = [numba_flash.forward(Q, Q, Q, score_mod=lambda score, b, h, i, j: score + 0.125, backend="cpu") for _ in range(2)]
    score_mod = scoremod.find(lambda score, b, h, i, j: score + 0.125, None)
    assert len(score_mod.prepared) == len(score_mod.rows) == 1
    assert np.array_equal(*results)


def test_the_least_recently_used_is_forgotten(monkeypatch):
    """With its prepared calls, and at once: it holds nothing that holds it. Numba's own dispatchers wait for the garbage collector."""
    monkeypatch.setattr(scoremod, "KEPT", 2)
    monkeypatch.setattr(scoremod, "_kept", type(scoremod._kept)())
    functions = [shifted(100.0 + n) for n in range(3)]
    numba_flash.forward(Q, Q, Q, score_mod=functions[0], backend="cpu")
    found = [weakref.ref(scoremod.find(functions[0], None))]
    code = weakref.ref(next(iter(found[0]().rows.values())).dispatcher)
    gc.collect()
    gc.disable()
    try:
        found += [weakref.ref(scoremod.find(function, None)) for function in functions[1:]]
        assert [each() is None for each in found] == [True, False, False]
        scoremod.find(functions[1], None)
        scoremod.find(functions[0], None)
        assert [each() is None for each in found] == [True, False, True]
    finally:
        gc.enable()
    gc.collect()
    assert code() is None


def test_whoever_holds_a_problem_holds_its_code(monkeypatch):
    """A function is forgotten while a call with it goes on."""
    problem = bind(Q, Q, Q, score_mod=shifted(50.0))
    address = row_function_address(problem.options.score_mod, float32)
    code = weakref.ref(problem.options.score_mod.rows[float32].dispatcher)
    monkeypatch.setattr(scoremod, "KEPT", 1)
    scoremod.find(shifted(51.0), None)
    gc.collect()
    assert code() is not None
    assert row_function_address(problem.options.score_mod, float32) == address


def test_functions_of_the_user_are_not_kept():
    table = np.arange(7.0)
    function = lambda score, b, h, i, j: score + table[j]
    numba_flash.forward(Q, Q, Q, score_mod=function, backend="cpu")
    there = weakref.ref(function)
    del function
    gc.collect()
    assert there() is None


# ---- functions that are there ------------------------------------------------------------------------------------------------------------

THERE = [
    numba_flash.alibi([0.5, 0.25, 0.125]),
    numba_flash.alibi(np.float32([1, 2]), q_start=-3),
    numba_flash.relative_position(np.arange(15.0).reshape(3, 5), q_start=2),
]


@pytest.mark.parametrize("function", THERE, ids=str)
def test_pickled_functions_are_equal(function):
    again = pickle.loads(pickle.dumps(function))
    assert again == function
    assert hash(again) == hash(function)
    assert again is not function
    assert scoremod.find(again, None) is scoremod.find(function, None)
    assert again(1.5, 0, 1, 2, 3) == function(1.5, 0, 1, 2, 3)
    assert again.score_mod_grad(1.5, 0, 1, 2, 3) == 1


def test_what_adds_to_a_score_needs_no_slopes():
    """Of the functions that are there, whose derivative is known; with a softcap it differs, and a user's may."""
    halved, half = (lambda score, b, h, i, j: 0.5 * score), (lambda score, b, h, i, j: 0.5)
    mods = [*(scoremod.find(function, None) for function in THERE), *(scoremod.find(halved, each) for each in (half, None))]
    assert [Options(score_mod=each).sloped for each in mods] == [False, False, False, True, True]
    assert Options(softcap=2.0, score_mod=mods[0]).sloped
    assert Options(score_mod=mods[0]).bends
    assert not Options().sloped


def test_what_they_show():
    assert repr(THERE[0]) == "alibi(array([0.5  , 0.25 , 0.125]), q_start=0)"
    assert eval(repr(THERE[2]), {"array": np.array, **vars(numba_flash)}) == THERE[2]
    assert (THERE[1].slopes.tolist(), THERE[1].q_start, THERE[1].heads) == ([1, 2], -3, 2)
    assert THERE[2].table.shape == (3, 5)
    with pytest.raises(ValueError, match="read-only"):
        THERE[0].slopes[0] = 3
    with pytest.raises(AttributeError):
        THERE[0].slopes = 3


def test_unequal_parts_make_unequal_functions():
    others = [numba_flash.alibi([0.5, 0.25]), numba_flash.alibi([0.5, 0.25], 1), numba_flash.alibi(np.float32([0.5, 0.25])), shifted]
    assert len(set(others)) == 4
    assert [other == others[0] for other in others] == [True, False, False, False]


def test_arrays_of_the_user_are_copied():
    slopes = np.array([1.0, 2.0])
    function = numba_flash.alibi(slopes)
    slopes[0] = 9
    assert function == numba_flash.alibi([1.0, 2.0])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: numba_flash.alibi(0.5), ValueError, r"^slopes must have shape \(Hq,\); got \(\)$"),
        (lambda: numba_flash.alibi([[0.5]]), ValueError, r"^slopes must have shape \(Hq,\); got \(1, 1\)$"),
        (lambda: numba_flash.alibi([[0.5], []]), TypeError, r"^slopes must be an array of real numbers; got list: "),
        (lambda: numba_flash.alibi(["a"]), TypeError, r"^slopes\.dtype \(str32\) must be float32, float64 or an integer dtype$"),
        (lambda: numba_flash.alibi([1j]), TypeError, r"^slopes\.dtype \(complex128\) must be"),
        (lambda: numba_flash.alibi([True]), TypeError, r"^slopes\.dtype \(bool\) must be"),
        (lambda: numba_flash.alibi(np.float16([1])), TypeError, r"^slopes\.dtype \(float16\) must be"),
        (lambda: numba_flash.alibi([0.5], 1.0), TypeError, r"^q_start must be an integer; got 1\.0$"),
        (lambda: numba_flash.alibi([0.5], None), TypeError, r"^q_start must be an integer; got None$"),
        (lambda: numba_flash.relative_position([1.0]), ValueError, r"^table must have shape \(Hq, 2 R \+ 1\); got \(1,\)$"),
        (lambda: numba_flash.relative_position(np.zeros((2, 4))), ValueError, r"^table must have shape .* got \(2, 4\)$"),
        (lambda: numba_flash.relative_position([[None]]), TypeError, r"^table\.dtype \(object\) must be"),
        (lambda: numba_flash.relative_position([[1.0]], True), TypeError, r"^q_start must be an integer; got True$"),
    ],
)
def test_what_they_are_made_of_is_checked(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (numba_flash.alibi([0.5]), "score_mod is alibi with 1 slope, one for each query head; q has 3 heads"),
        (numba_flash.alibi([0.5] * 4), "score_mod is alibi with 4 slopes, one for each query head; q has 3 heads"),
        (numba_flash.relative_position([[0.5]]), "score_mod is relative_position with 1 row, one for each query head; q has 3 heads"),
    ],
)
def test_a_row_for_each_head_is_needed(function, message):
    """Not only at the first call; and what was prepared for the same code, written by the user, is not for it."""
    assert scoremod.find(function.py_func, function.score_mod_grad) is not scoremod.find(function, None)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^{message}$"):
            numba_flash.forward(Q, Q, Q, score_mod=function, backend="cpu")
        with pytest.raises(ValueError, match=f"^{message}$"):
            numba_flash.forward_packed(*[Q.swapaxes(0, 1)] * 3, *[np.array([0, 5])] * 2, score_mod=function)
    two_dimensions = message.replace("3 heads", "1 head")
    if function.heads != 1:
        with pytest.raises(ValueError, match=f"^{two_dimensions}$"):
            numba_flash.forward(Q[0], Q[0], Q[0], score_mod=function)


# ---- arguments ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda score, b, h, i, j, slope=0.5: score * slope,
            r"^score_mod must take \(score, b, h, i, j\) and nothing else: a function within a function can capture slope; it has the"
            r" signature \(score, b, h, i, j, slope=0\.5\)$",
        ),
        (lambda score, b, h, i, j, *more: score, r"^score_mod must take \(score, b, h, i, j\); it has .*\*more\)$"),
        (lambda score, b, h, i, j, *, slope=2: score, r"^score_mod must take .* can capture slope; it has the signature"),
        (lambda *all: all[0], r"^score_mod must take \(score, b, h, i, j\); it has the signature \(\*all\)$"),
    ],
)
def test_other_arguments_are_refused(function, message):
    with pytest.raises(TypeError, match=message):
        numba_flash.forward(Q, Q, Q, score_mod=function)


@pytest.mark.parametrize("q_start", [0, 9, -9])
@pytest.mark.parametrize(
    "function_of",
    [
        lambda q_start: numba_flash.alibi([0.5, -2.0], q_start),
        lambda q_start: numba_flash.relative_position([[0.5, 1.0, 0.25], [-3.0, 0.0, 1.0]], q_start),
    ],
    ids=["alibi", "relative_position"],
)
def test_the_greatest_number_that_is_added(function_of, q_start):
    """Within a distance: it is reached, and not exceeded. Kernels of plain attention serve such functions as long as it is far from Inf."""
    function = function_of(q_start)
    for distance in (0, 1, 30):
        added = [abs(function.py_func(0.0, 0, h, i, 30)) for h in range(2) for i in range(30 - distance, 31 + distance)]
        assert max(added) <= function.greatest(distance)
    assert max(added) == function.greatest(30)
