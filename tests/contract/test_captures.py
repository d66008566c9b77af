"""What a function reaches, by whichever way: a change of it is noticed, in the next process and in this one, or it is refused by name."""

import enum
import math
import sys
import types
from typing import NamedTuple

import numpy as np
import pytest
from numba import njit, vectorize

from numba_flash.scoremod.captures import Capture, paths

settings = types.ModuleType("settings")  # a module of the user
settings.inner = types.ModuleType("settings.inner")


class Color(enum.Enum):
    RED = 1.5


class Pair(NamedTuple):
    left: float
    right: float


SCALE, TABLE, PAIR, xp = 0.5, np.arange(4.0), Pair(1.0, 2.0), np


@njit
def scaled(x):
    return x * SCALE


SCALED = scaled


@njit
def twice(x, factor=2.0):
    return x * factor


@njit
def recursive(x):
    return x if x < 1 else recursive(x - 1) + SCALE


@pytest.fixture(autouse=True)
def fresh():
    """Names that tests change."""
    globals().update(SCALE=0.5, TABLE=np.arange(4.0), PAIR=Pair(1.0, 2.0), scaled=SCALED)
    settings.SLOPE, settings.squash, settings.inner.SLOPE = 0.5, njit(lambda x: x * settings.SLOPE), 2.0


def capture(function) -> Capture:
    return Capture("score_mod", function)


def through_a_global(score, b, h, i, j):
    return score + SCALE


def through_an_array(score, b, h, i, j):
    return score + TABLE[j % 4]


def through_a_tuple(score, b, h, i, j):
    return score + PAIR.right


def through_a_module(score, b, h, i, j):
    return score + settings.SLOPE


def through_a_module_of_a_module(score, b, h, i, j):
    return score + settings.inner.SLOPE


def through_a_function_of_a_module(score, b, h, i, j):
    return settings.squash(score)


def through_a_function(score, b, h, i, j):
    return scaled(score)


def through_a_recursive_function(score, b, h, i, j):
    return recursive(score)


def through_an_inner_function(score, b, h, i, j):
    inner = lambda x: (lambda y: y + SCALE)(x)
    return inner(score)


def through_a_module_in_an_inner_function(score, b, h, i, j):
    inner = lambda x: x * settings.SLOPE
    return inner(score)


def assign(**values):
    return lambda: globals().update(values)


def of(module, **values):
    return lambda: vars(module).update(values)


CHANGES = [
    (through_a_global, assign(SCALE=0.25)),
    (through_a_global, assign(SCALE=np.float32(0.5))),
    (through_an_array, assign(TABLE=np.arange(4.0) + 1)),
    (through_an_array, lambda: TABLE.__setitem__(3, 7.0)),
    (through_an_array, lambda: TABLE.__setitem__(0, -0.0)),
    (through_an_array, lambda: TABLE.resize((2, 2), refcheck=False)),
    (through_a_tuple, assign(PAIR=Pair(1.0, 3.0))),
    (through_a_module, of(settings, SLOPE=0.25)),
    (through_a_module_of_a_module, of(settings.inner, SLOPE=0.25)),
    (through_a_function_of_a_module, of(settings, squash=njit(lambda x: x + 1))),
    (through_a_function_of_a_module, of(settings, SLOPE=0.25)),
    (through_a_function, assign(SCALE=0.25)),
    (through_a_function, assign(scaled=njit(fastmath=True)(scaled.py_func))),
    (through_a_recursive_function, assign(SCALE=0.25)),
    (through_an_inner_function, assign(SCALE=0.25)),
    (through_a_module_in_an_inner_function, of(settings, SLOPE=0.25)),
]


@pytest.mark.parametrize("at", range(len(CHANGES)), ids=lambda at: f"{CHANGES[at][0].__name__}-{at}")
def test_whatever_changes_is_noticed(at):
    function, change = CHANGES[at]
    before = capture(function)
    assert before.holds(function)
    change()
    assert not before.holds(function)
    assert capture(function).fingerprint != before.fingerprint


def test_what_it_does_not_reach_does_not_matter():
    before = capture(through_a_global)
    settings.SLOPE, globals()["TABLE"] = 9.0, None
    assert before.holds(through_a_global)
    assert capture(through_a_global).fingerprint == before.fingerprint


def test_an_equal_value_is_the_same_function():
    before = capture(through_an_array)
    globals()["TABLE"] = TABLE.copy()
    assert not before.holds(through_an_array)
    assert capture(through_an_array).fingerprint == before.fingerprint


@pytest.mark.parametrize(("shape", "dtype"), [((2, 2), np.float64), ((4, 1), np.float64), ((4,), np.int64)], ids=str)
def test_an_array_of_the_same_bytes_is_another_one(shape, dtype):
    """Of another shape, which is compiled with it, or another dtype."""
    before = capture(through_an_array)
    globals()["TABLE"] = TABLE.view(dtype).reshape(shape)
    assert capture(through_an_array).fingerprint != before.fingerprint


@pytest.mark.parametrize("library", [np, math], ids=["of NumPy", "of Python"])
def test_a_function_of_another_version_is_another_one(library, monkeypatch):
    """A part of a library is known by its name and by the version of that, which Python's own modules do not have."""
    of_numpy, of_python = (lambda score, b, h, i, j: np.exp(score)), (lambda score, b, h, i, j: math.exp(score))
    function = of_numpy if library is np else of_python
    before = capture(function).fingerprint
    monkeypatch.setattr(*((np, "__version__") if library is np else (sys, "version")), "another")
    assert capture(function).fingerprint != before


def test_a_hidden_builtin_is_noticed(monkeypatch):
    function = lambda score, b, h, i, j: abs(score)
    before = capture(function)
    monkeypatch.setitem(globals(), "abs", njit(lambda x: x))
    assert not before.holds(function)
    assert capture(function).fingerprint != before.fingerprint


def test_new_code_is_noticed():
    function, helper = (lambda score, b, h, i, j: scaled(score)), scaled.py_func
    before, code = capture(function), helper.__code__
    try:
        helper.__code__ = (lambda x: x + SCALE).__code__
        assert not before.holds(function)
        assert capture(function).fingerprint != before.fingerprint
    finally:
        helper.__code__ = code
    assert before.holds(function)
    function.__code__ = (lambda score, b, h, i, j: 2 * scaled(score)).__code__
    assert not before.holds(function)


def test_captured_variables_are_looked_at():
    shift = 1.0
    function = lambda score, b, h, i, j: score + shift  # noqa: F821
    before = capture(function)
    shift = 2.0
    assert not before.holds(function)
    after = capture(function)
    assert after.fingerprint != before.fingerprint
    assert (before.function(0.0, 0, 0, 0, 0), after.function(0.0, 0, 0, 0, 0)) == (1.0, 2.0)
    del shift
    assert not after.holds(function)
    with pytest.raises(TypeError, match=r"^score_mod refers to shift, which is not defined$"):
        capture(function)


def test_default_arguments_of_helpers_count(monkeypatch):
    function = lambda score, b, h, i, j: twice(score)
    before = capture(function)
    monkeypatch.setattr(twice.py_func, "__defaults__", (3.0,))
    assert not before.holds(function)
    assert capture(function).fingerprint != before.fingerprint


@pytest.mark.parametrize("function", dict.fromkeys(function for function, _ in CHANGES))
def test_the_copy_computes_the_same_and_stays_so(function):
    """Also where a helper has compiled an old constant already."""
    now = capture(function).function
    expected = now(3.0, 0, 0, 1, 2)
    assert expected == function(3.0, 0, 0, 1, 2)
    globals().update(SCALE=100.0, PAIR=Pair(100.0, 100.0))
    TABLE[:] = 100.0
    settings.SLOPE = settings.inner.SLOPE = 100.0
    assert now(3.0, 0, 0, 1, 2) == expected
    changed = capture(function)
    assert changed.function(3.0, 0, 0, 1, 2) != expected
    assert changed.function.__globals__.keys() <= {"__builtins__", "__name__", "SCALE", "TABLE", "PAIR", "settings", "scaled", "recursive"}


def test_constants_of_other_kinds_are_followed():
    dtype, member, nothing, text = np.dtype("f4"), Color.RED, None, "a"

    def function(score, b, h, i, j):
        kind = np.float32(math.pi) if nothing is None and text == "a" else xp.inf
        return score + kind if member is Color.RED else dtype

    assert capture(function).fingerprint == capture(function).fingerprint
    assert capture(function).function(0.0, 0, 0, 0, 0) == np.float32(math.pi)


def test_signatures_that_a_helper_was_given_stay():
    whole = njit("int64(float64)")(lambda x: x)
    function = lambda score, b, h, i, j: whole(score)
    assert capture(function).function(1.75, 0, 0, 0, 0) == 1
    free = njit(whole.py_func)
    assert capture(lambda score, b, h, i, j: free(score)).function(1.75, 0, 0, 0, 0) == 1.75


# ---- what cannot be followed -------------------------------------------------------------------------------------------------------------


def plain(x):
    return x


ufunc, things, generator = vectorize(lambda x: x + 1), [1.0], np.random.default_rng(0)
objects = np.array([None])


def module_by_itself(score, b, h, i, j):
    here = settings
    return here.SLOPE


REFUSED = {
    "plain, a Python function; compile it with numba.njit": lambda score, b, h, i, j: plain(score),
    "things, a list; numbers, strings, tuples, NumPy arrays and functions of numba.njit can be compiled": (
        lambda score, b, h, i, j: things[0]
    ),
    "ufunc, a DUFunc; ": lambda score, b, h, i, j: ufunc(score),
    "generator, a Generator; ": lambda score, b, h, i, j: generator.normal(),
    "objects, an array of dtype object, which cannot be compiled": lambda score, b, h, i, j: objects[0],
    "settings, a module; what it takes of it must be written settings.name": module_by_itself,
    "settings.inner, a module; what it takes of it must be written settings.inner.name": (
        lambda score, b, h, i, j: getattr(settings.inner, "SLOPE")  # noqa: B009
    ),
    "settings.MISSING, which is not defined": lambda score, b, h, i, j: settings.MISSING,
    "MISSING, which is not defined": lambda score, b, h, i, j: MISSING,  # noqa: F821
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(message):
    with pytest.raises(TypeError) as caught:
        capture(REFUSED[message])
    assert str(caught.value).startswith(f"score_mod refers to {message}")


def test_paths_of_nested_code():
    outer = 1.0

    def function(score):
        local = outer
        return (lambda x: x + local + outer + settings.inner.SLOPE.real)(score)

    assert set(paths(function.__code__)) == {(True, "outer", ()), (False, "settings", ("inner", "SLOPE", "real"))}
