"""Which kernels of `sm90` serve which problems, and that nothing but its tables decides that."""

import importlib
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import SIMULATED

import numba_flash
from numba_flash.cuda.launch import Gpu
from numba_flash.cuda.sm90 import recipes
from numba_flash.plan import Settings, backward_inputs, choose, detailed
from numba_flash.problem import ForwardInputs, bind

pytestmark = pytest.mark.skipif(SIMULATED, reason="the simulator has no tensor cores")

H200 = Gpu(0, (9, 0), 132, 4.9e12)
BFLOAT16 = ml_dtypes.bfloat16
LOOPS = {loop.removeprefix("sm90.") for table in recipes.PASSES.values() for each in table for loop in each.loops}
HOSTS = [path for path in sorted(Path(recipes.__file__).parent.glob("*.py")) if path.name != "recipes.py"]


def blocks(size: int) -> numba_flash.BlockMask:
    return numba_flash.BlockMask(np.ones((2048 // size,) * 2, bool), size)


def planned(kind: str, d=64, batch=(1,), heads=32, n=2048, dtype=BFLOAT16, dbias=False, deterministic=True, **options):
    """The plan of a call on an H200."""
    q = np.zeros((*batch, heads, n, d), dtype)
    mask = options.get("mask")
    mask = mask.blocks if isinstance(mask, numba_flash.BlockMask) else mask
    inputs, p = ForwardInputs(q, q, q, options.get("bias"), mask), bind(q, q, q, **options)
    inputs = backward_inputs(p, inputs) if kind == "backward" else inputs
    chosen = choose(p, inputs, "sm90", kind, gpu=H200, **({"dbias": True} if dbias else {}))
    return detailed(chosen, inputs, Settings(gpu=H200, dbias=dbias, deterministic=deterministic))


SHARED = {"bias": np.zeros((1, 32, 256, 256), BFLOAT16), "d": 32, "batch": (64,), "n": 256}
FULL = {"bias": np.zeros((32, 2048, 2048), BFLOAT16)}
OF_KEYS = {"bias": np.zeros((32, 1, 2048), BFLOAT16)}
ALIBI, LATE = {"score_mod": numba_flash.alibi(np.ones(32))}, {"batch": (8,), "n": 512}
# Beside each row of a table, in its order, a call that it serves.
FORWARD = (
    SHARED,
    {"dtype": np.float32},
    ALIBI,
    {"mask": blocks(128)},
    FULL,
    {"mask": blocks(128), "dropout": 0.5, "rng": (1, 2)},
    {"causal": True},
)
BACKWARD = (
    ALIBI,
    SHARED | {"dbias": True},
    {"dtype": np.float32},
    {"dtype": np.float32, "d": 128},
    {"mask": blocks(128), "d": 128},
    {"mask": blocks(128)},
    FULL,
    {"mask": blocks(64), "softcap": 1.0},
    {"d": 256},
    LATE | {"batch": (32,)},
    {"heads": 1},
)
BIAS_GRADIENT = (FULL | {"dbias": True}, OF_KEYS | {"dbias": True})


def cases(kind: str, table, calls):
    return [pytest.param(kind, each, call, id=f"{kind}: {each.problems}") for each, call in zip(table, calls, strict=True)]


@pytest.mark.parametrize(
    ("kind", "recipe", "call"),
    cases("forward", recipes.FORWARD, FORWARD)
    + cases("backward", recipes.BACKWARD, BACKWARD)
    + cases("backward", recipes.BIAS_GRADIENT, BIAS_GRADIENT),
)
def test_each_row_serves_a_call_whose_plan_says_so(kind, recipe, call):
    """And launches its loops."""
    found = planned(kind, **call)
    assert recipe.about in found.recipes
    assert f"  kernels: {recipe.about}" in str(found).splitlines()


def test_rows_are_told_apart():
    for table in recipes.PASSES.values():
        assert len({each.problems for each in table}) == len(table)


@pytest.mark.parametrize("dbias", [False, True])
def test_who_makes_the_gradient_of_a_bias_is_named_only_if_it_is_wanted(dbias):
    assert len(planned("backward", **FULL, dbias=dbias).recipes) == 1 + dbias


def test_gradients_in_any_order_are_served_by_the_next_row():
    stored, added = recipes.BACKWARD[4:6]
    assert planned("backward", mask=blocks(128), d=128).recipes == (stored.about,)
    assert planned("backward", mask=blocks(128), d=128, deterministic=False).recipes == (added.about,)


def test_a_backend_without_tables_names_no_rows():
    assert numba_flash.plan(*[np.zeros((1, 2, 8, 4), np.float32)] * 3, backend="cpu").recipes == ()


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_loops_are_there(loop):
    assert callable(importlib.import_module(f"numba_flash.cuda.sm90.{loop}").build)


@pytest.mark.parametrize("path", HOSTS, ids=lambda path: path.stem)
def test_no_other_file_names_a_loop(path):
    """So none chooses between them."""
    named = set(re.findall(r"""["']sm90\.(\w+)(?:\.build)?["']""", path.read_text()))
    assert named & LOOPS == set()
