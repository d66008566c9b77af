"""Which kernels of a tier serve which problems, and that nothing but its tables decides that."""

import importlib
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import SIMULATED
from support.launch_arguments import check_arguments

import numba_flash
from numba_flash.arguments.problem import ForwardInputs, bind
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.cuda.sm80 import recipes as sm80
from numba_flash.cuda.sm90 import recipes as sm90
from numba_flash.plan import Settings, backward_inputs, choose, detailed, on_paper

pytestmark = pytest.mark.skipif(SIMULATED, reason="the simulator has no tensor cores")

H200 = Gpu(0, (9, 0), 132, 4.9e12)
BFLOAT16 = ml_dtypes.bfloat16
TABLES = {"sm90": sm90, "sm80": sm80}
LOOPS = {loop for tables in TABLES.values() for table in tables.PASSES.values() for each in table for loop in each.loops}
HOSTS = [path for tables in TABLES.values() for path in sorted(Path(tables.__file__).parent.rglob("*.py")) if path.name != "recipes.py"]


def blocks(size: int) -> numba_flash.BlockMask:
    return numba_flash.BlockMask(np.ones((2048 // size,) * 2, bool), size)


def given(backend, kind, d=64, batch=(1,), heads=32, nq=None, n=2048, dtype=BFLOAT16, dbias=False, **options):
    """The plan of a call on an H200, without what is known when it is prepared; and its inputs."""
    k = np.zeros((*batch, heads, n, d), dtype)
    q = k[..., :nq, :]
    mask = options.get("mask")
    mask = mask.blocks if isinstance(mask, numba_flash.BlockMask) else mask
    inputs, p = ForwardInputs(q, k, k, options.get("bias"), mask), bind(q, k, k, **options)
    inputs = backward_inputs(p, inputs) if kind == "backward" else inputs
    return choose(p, inputs, backend, kind, gpu=H200, **({"dbias": True} if dbias else {})), inputs


def planned(backend, kind, dbias=False, deterministic=True, **call):
    """The plan of a call on an H200."""
    chosen, inputs = given(backend, kind, dbias=dbias, **call)
    return detailed(chosen, inputs, Settings(gpu=H200, dbias=dbias, deterministic=deterministic))


def scored(backend, kind, **call) -> list:
    """Of each kernel of a call on an H200 that computes scores, whether it goes through lists, and its tile."""
    chosen, inputs = given(backend, kind, **call)
    dbias = kind == "backward" and "bias" in call
    launches = on_paper(backend, kind, chosen.problem, inputs, Settings(gpu=H200, dbias=dbias)).launches
    return [(each.config[0].options.block_sparse, each.scores) for each in launches if each.scores]


SHARED = {"bias": np.zeros((1, 32, 256, 256), BFLOAT16), "d": 32, "batch": (64,), "n": 256}
FULL = {"bias": np.zeros((32, 2048, 2048), BFLOAT16)}
OF_KEYS = {"bias": np.zeros((32, 1, 2048), BFLOAT16)}
ALIBI, LATE = {"score_mod": numba_flash.alibi(np.ones(32))}, {"batch": (8,), "n": 512}
SHORT = {"dtype": np.float32, "batch": (8,), "n": 256, "d": 32}
# Beside each row of a table, in its order, a call that it serves.
CALLS = {
    ("sm90", "forward"): (
        SHARED,
        {"dtype": np.float32},
        ALIBI,
        {"mask": blocks(128)},
        FULL,
        {"mask": blocks(128), "dropout": 0.5, "rng": (1, 2)},
        {"causal": True},
    ),
    ("sm90", "backward"): (
        ALIBI,
        SHARED | {"dbias": True},
        {"dtype": np.float32, "d": 128},
        {"mask": blocks(128), "d": 128},
        {"mask": blocks(128)},
        FULL,
        {"mask": blocks(64), "softcap": 1.0},
        {"d": 256},
        LATE | {"batch": (32,)},
        {"heads": 1},
    ),
    ("sm90", "gradient of a bias"): (FULL | {"dbias": True}, OF_KEYS | {"dbias": True}),
    ("sm80", "forward"): (SHORT, {"nq": 1}, ALIBI, {"dtype": np.float64}, FULL),
    ("sm80", "backward"): (
        {"nq": 1},
        SHARED | {"dbias": True},
        SHORT | {"bias": np.zeros((1, 32, 256, 256), np.float32), "dbias": True},
        {"d": 256, "causal": True},
        {"dtype": np.float64},
        SHORT,
        {"d": 128},
        {"mask": blocks(128), "dropout": 0.5, "rng": (1, 2)},
    ),
    ("sm80", "gradient of a bias"): (
        {"bias": np.zeros((32, 1, 2048)), "dtype": np.float64, "dbias": True},
        FULL | {"dbias": True},
    ),
}
ROWS = [
    pytest.param(backend, "forward" if name == "forward" else "backward", recipe, call, id=f"{backend}, {name}: {recipe.problems}")
    for (backend, name), calls in CALLS.items()
    for recipe, call in zip(TABLES[backend].PASSES[name], calls, strict=True)
]


def test_every_table_is_here():
    assert set(CALLS) == {(backend, name) for backend, tables in TABLES.items() for name in tables.PASSES}


@pytest.mark.parametrize(("backend", "kind", "recipe", "call"), ROWS)
def test_each_row_serves_a_call_whose_plan_says_so(backend, kind, recipe, call):
    """And launches its loops."""
    found = planned(backend, kind, **call)
    assert recipe.about in found.recipes
    assert f"  kernels: {recipe.about}" in str(found).splitlines()


@pytest.mark.parametrize("nq", [2048, 33], ids=lambda nq: f"nq = {nq}")
@pytest.mark.parametrize(("backend", "kind", "recipe", "call"), ROWS)
def test_kernels_of_each_row_take_what_they_are_given(backend, kind, recipe, call, nq):
    """Also of calls with other queries than keys, whichever row then serves them: no random problem is served by every row."""
    call = {"nq": nq, **call} if nq == 2048 or not {"bias", "mask"} & call.keys() else call
    chosen, inputs = given(backend, kind, **call)
    for wanted in {False, call.get("bias") is not None and kind == "backward"}:
        for each in on_paper(backend, kind, chosen.problem, inputs, Settings(gpu=H200, dbias=wanted)).launches:
            check_arguments(each)


@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
def test_rows_are_told_apart(tables):
    for table in tables.PASSES.values():
        assert len({each.problems for each in table}) == len(table)


@pytest.mark.parametrize("backend", TABLES)
@pytest.mark.parametrize("dbias", [False, True])
def test_who_makes_the_gradient_of_a_bias_is_named_only_if_it_is_wanted(backend, dbias):
    assert len(planned(backend, "backward", **FULL, dbias=dbias).recipes) == 1 + dbias


def test_gradients_in_any_order_are_served_by_the_next_row():
    stored, added = sm90.BACKWARD[3:5]
    assert planned("sm90", "backward", mask=blocks(128), d=128).recipes == (stored.about,)
    assert planned("sm90", "backward", mask=blocks(128), d=128, deterministic=False).recipes == (added.about,)


def test_a_backend_without_tables_names_no_rows():
    assert numba_flash.plan(*[np.zeros((1, 2, 8, 4), np.float32)] * 3, backend="cpu").recipes == ()


@pytest.mark.parametrize("loop", sorted(LOOPS))
def test_loops_are_there(loop):
    assert callable(importlib.import_module(f"numba_flash.cuda.{loop}").build)


@pytest.mark.parametrize("path", HOSTS, ids=lambda path: ".".join(path.with_suffix("").parts[-3:]))
def test_no_other_file_names_a_loop(path):
    """So none chooses between them."""
    named = set(re.findall(r"""["'](sm\d+\.\w+)(?:\.build)?["']""", path.read_text()))
    assert named & LOOPS == set()


BLOCK_SPARSE = {
    "alone": {},
    "dropout": {"dropout": 0.5, "rng": (1, 2)},
    "a bias": {"bias": np.zeros((32, 1920, 1920), BFLOAT16)},
    "a bias in float32": {"bias": np.zeros((32, 1920, 1920), np.float32)},
}


@pytest.mark.parametrize("options", BLOCK_SPARSE.values(), ids=BLOCK_SPARSE)
@pytest.mark.parametrize("d", [32, 64, 128])
@pytest.mark.parametrize("kind", ["forward", "backward"])
@pytest.mark.parametrize("backend", TABLES)
def test_tiles_that_lists_name_lie_within_blocks(backend, kind, d, options):
    """A kernel that goes through lists knows no mask."""
    found, n = set(), 1920
    for size in [64, 96, 128, 192, (128, 64), (128, 96), (128, 192)]:
        rows, columns = size if isinstance(size, tuple) else (size, size)
        mask = numba_flash.BlockMask(np.ones((n // rows, n // columns), bool), size)
        for listed, (_, (block_m, block_n)) in scored(backend, kind, d=d, n=n, mask=mask, **options):
            assert not listed or (rows % block_m == 0 and columns % block_n == 0), (size, block_m, block_n)
            found.add(listed)
    assert True in found
