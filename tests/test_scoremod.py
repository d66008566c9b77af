"""Functions of the user: what makes two of them the same, in one process and in the next."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from numba import njit

import numba_flash
from numba_flash.scoremod import ScoreMod, fingerprint

SCALE = 0.5
TABLE = np.arange(4.0)


@njit
def helper(x):
    return x * SCALE


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
    assert ScoreMod(shifted(1.0), None) == ScoreMod(shifted(1.0), None)
    assert len({ScoreMod(shifted(1.0), None), ScoreMod(shifted(1.0), None)}) == 1


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
    assert ScoreMod(one, None) != ScoreMod(other, None)
    assert ScoreMod(one, None) != ScoreMod(one, other)


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
from numba_flash import cpu_scores, spec
from numba_flash.cuda import compile

slopes = np.array([0.5, 0.25])

def function(score, b, h, i, j):
    return score - slopes[h] * abs(i - j)

q = np.ones((2, 3, 4), np.float32)
numba_flash.forward(q, q, q, score_mod=function, backend="cpu")
score_mod = spec.bind(q, q, q, score_mod=function).options.score_mod
stats = cpu_scores._row_function(score_mod, types.float32).stats
key = compile.cache_key("forward_simt.build", (score_mod,), (9, 0))
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
