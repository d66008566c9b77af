"""The public face: plans, prepared calls, foreign arrays, threads, imports, docstrings."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support import allowed_errors, assert_within, no_gpu, no_hopper, oracle, random_inputs, same_bits

import numba_flash
from numba_flash import api, call, reference, spec

GPU_REASON = no_gpu()
SM90_REASON = no_hopper() or "serves float16 and bfloat16; q.dtype is float32"
DEFAULT_BACKEND = "cpu" if GPU_REASON else "simt"


# ---- plan ----------------------------------------------------------------------------------------------------------------------------


def test_plan_holds_the_problem():
    q, k, v, _ = random_inputs(batch=(3,), hq=4, hk=2, nq=5, nk=7, d=16, dv=8, dtype="float64")
    plan = numba_flash.plan(q, k, v, causal=True, scale=0.5, backend="cpu")
    expected = spec.Problem((1, 3), hq=4, hk=2, nq=5, nk=7, d=16, dv=8, dtype="float64", scale=0.5, low=-5, high=2)
    assert plan.problem == expected
    assert plan.backend == "cpu"
    assert plan.refused == ()
    assert plan == numba_flash.plan(q, k, v, causal=True, scale=0.5, backend="cpu")


def test_plan_gives_defaults():
    q, k, v, _ = random_inputs(batch=(), hq=None, hk=None, nq=5, nk=7, d=16)
    problem = numba_flash.plan(q, k, v).problem
    assert problem.batch == (1, 1)
    assert (problem.hq, problem.hk) == (1, 1)
    assert problem.scale == 0.25
    assert (problem.low, problem.high) == (-5, 7)


def test_plan_says_what_runs_and_why_nothing_faster():
    q, k, v, _ = random_inputs(nq=5, nk=7)
    plan = numba_flash.plan(q, k, v)
    assert plan.backend == DEFAULT_BACKEND
    assert plan.refused == ((("sm90", GPU_REASON), ("simt", GPU_REASON)) if GPU_REASON else (("sm90", SM90_REASON),))
    text = str(plan)
    assert plan.tiles[0][0] == "forward"
    tiles = ", ".join(f"{kernel} {rows} x {columns}" for kernel, (rows, columns) in plan.tiles)
    assert text.splitlines()[0] == f"runs on {DEFAULT_BACKEND} in tiles of {tiles}: {plan.problem}"
    assert text.splitlines()[1:] == [f"  not {backend}: {reason}" for backend, reason in plan.refused]


def test_plan_computes_and_allocates_nothing(monkeypatch):
    q, k, v, _ = random_inputs(nq=5, nk=7)
    for name in ("_prepare_forward", "_prepare_backward"):
        monkeypatch.setattr(api, name, None)
    monkeypatch.setattr(np, "empty", None)
    numba_flash.plan(q, k, v, backend="cpu")


# ---- prepared calls --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(monkeypatch):
    """Counts how often calls are prepared, and starts from none."""
    counts = {"forward": 0, "backward": 0}
    monkeypatch.setattr(call, "_prepared", {})

    def counted(name, prepare):
        def wrapper(*args):
            counts[name] += 1
            return prepare(*args)

        return wrapper

    for name in counts:
        monkeypatch.setattr(api, f"_prepare_{name}", counted(name, getattr(api, f"_prepare_{name}")))
    return counts


def test_repeated_calls_are_prepared_once(prepared):
    for seed in range(3):
        q, k, v, do = random_inputs(nq=5, nk=7, seed=seed)
        o, lse = numba_flash.forward(q, k, v, return_lse=True, causal=True, backend="cpu")
        numba_flash.backward(do, q, k, v, o, lse, causal=True, backend="cpu")
    assert prepared == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("integer", [int, np.uint64])
def test_another_state_of_the_generator_is_not_another_preparation(prepared, integer):
    """Training takes a new one in every step. (States that are no plain integers are prepared for each.)"""
    q, k, v, do = random_inputs(nq=5, nk=7, dtype="float64")
    for seed, offset in ((1, 2), (3, 4), (2**64 - 1, 2**32 - 1)):
        options = {"dropout": 0.3, "rng": (integer(seed), integer(offset))}
        o, lse = numba_flash.forward(q, k, v, return_lse=True, backend="cpu", **options)
        ours = (o, *numba_flash.backward(do, q, k, v, o, lse, backend="cpu", **options))
        expected = reference.forward(q, k, v, **options)[0], *reference.backward(do, q, k, v, **options)
        for x, y in zip(ours, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)
    assert prepared == ({"forward": 1, "backward": 1} if integer is int else {"forward": 3, "backward": 3})


@pytest.mark.parametrize("state", [(1, -1), (True, 1), (1.0, 2), (1, 2, 3), [1, 2], (2**64, 0), (0, 2**32)])
def test_a_bad_state_is_refused_after_a_good_one(prepared, state):
    q, k, v, _ = random_inputs(nq=5, nk=7)
    numba_flash.forward(q, k, v, dropout=0.3, rng=(1, 1), backend="cpu")
    with pytest.raises((TypeError, ValueError), match=r"^rng"):
        numba_flash.forward(q, k, v, dropout=0.3, rng=state, backend="cpu")


@pytest.mark.parametrize(
    "change",
    [{"scale": 0.1}, {"causal": True}, {"window": (1, 1)}, {"causal": True, "q_start": 0}, {"return_lse": True}, {"out": True}],
)
def test_another_option_is_another_preparation(prepared, change):
    q, k, v, do = random_inputs(nq=5, nk=7)
    options = {"out": np.empty_like(do)} if "out" in change else change
    first = numba_flash.forward(q, k, v, backend="cpu")
    changed = numba_flash.forward(q, k, v, backend="cpu", **options)
    again = numba_flash.forward(q, k, v, backend="cpu")
    assert prepared["forward"] == 2
    assert same_bits(first, again)
    assert "return_lse" in change or "out" in change or not same_bits(first, changed)


def test_another_layout_dtype_or_shape_is_another_preparation(prepared):
    inputs = random_inputs(nq=5, nk=7)[:3]
    strided = tuple(np.repeat(x, 2, axis=-1)[..., ::2] for x in inputs)
    double = tuple(x.astype(np.float64) for x in inputs)
    shorter = (inputs[0][..., 1:, :].copy(), *inputs[1:])
    variants = (inputs, strided, double, shorter)
    for variant in variants * 2:
        o, lse = numba_flash.forward(*variant, return_lse=True, backend="cpu")
        do = np.zeros_like(o)
        assert_within("o", o, oracle(*variant, do)["o"], allowed_errors(*variant, do)["o"])
        assert lse.shape == variant[0].shape[:-1]
    assert prepared["forward"] == len(variants)


def test_prepared_calls_are_bounded(prepared, monkeypatch):
    monkeypatch.setattr(call, "_PREPARED_LIMIT", 4)
    q, k, v, _ = random_inputs(batch=(), nq=3, nk=3)
    for q_start in range(10):
        numba_flash.forward(q, k, v, q_start=q_start, backend="cpu")
        assert len(call._prepared) <= 4


# ---- foreign arrays --------------------------------------------------------------------------------------------------------------------


class Foreign:
    """An array that offers nothing but DLPack."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


def test_dlpack_objects_are_accepted():
    inputs = random_inputs(nq=5, nk=7)
    o, lse = numba_flash.forward(*inputs[:3], return_lse=True, causal=True)
    foreign_o, foreign_lse = numba_flash.forward(*map(Foreign, inputs[:3]), return_lse=True, causal=True)
    assert type(foreign_o) is np.ndarray
    assert same_bits(o, foreign_o)
    assert same_bits(lse, foreign_lse)
    gradients = numba_flash.backward(inputs[3], *inputs[:3], o, lse, causal=True)
    foreign = numba_flash.backward(*map(Foreign, (inputs[3], *inputs[:3], o, lse)), causal=True)
    assert all(map(same_bits, gradients, foreign))
    assert numba_flash.plan(*map(Foreign, inputs[:3])) == numba_flash.plan(*inputs[:3])


def test_dlpack_objects_are_read_without_a_copy(monkeypatch):
    seen = []

    def prepare(problem, inputs, results):
        return lambda inputs, results: seen.extend(inputs[:3])

    tier = call.tier
    monkeypatch.setattr(call, "_prepared", {})
    monkeypatch.setattr(
        call, "tier", lambda backend: type("Tier", (), {"prepare_forward": staticmethod(prepare), "takes_numpy": lambda: True})
    )
    inputs = random_inputs(nq=5, nk=7)[:3]
    inputs = (*inputs[:2], inputs[2][..., ::-1, ::2])
    numba_flash.forward(*map(Foreign, inputs), backend="cpu")
    assert call.tier is not tier
    for x, y in zip(seen, inputs, strict=True):
        assert x.ctypes.data == y.ctypes.data
        assert x.strides == y.strides


def test_dlpack_objects_of_a_bad_dtype_are_refused():
    q, k, v, _ = random_inputs(nq=5, nk=7)
    with pytest.raises(TypeError, match=r"k\.dtype must be one of float16, bfloat16, float32, float64; got int32"):
        numba_flash.forward(q, Foreign(k.astype(np.int32)), v)


# ---- threads and processes -------------------------------------------------------------------------------------------------------------


def test_threads():
    """Concurrent calls of different problems, forward and backward, give the bits that they give one after the other."""
    problems = [
        random_inputs(hq=2, hk=1 + i % 2, nq=60 + 40 * i, nk=200 - 20 * i, dtype=("float32", "float64")[i % 2], seed=i) for i in range(6)
    ]

    def compute(q, k, v, do):
        o, lse = numba_flash.forward(q, k, v, return_lse=True, causal=True)
        return (o, lse, *numba_flash.backward(do, q, k, v, o, lse, causal=True))

    expected = [compute(*problem) for problem in problems]
    results = [[] for _ in problems]
    start = threading.Barrier(len(problems))

    def work(i):
        start.wait()
        results[i] += [compute(*problems[i]) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, runs in enumerate(results):
        assert len(runs) == 10
        assert all(same_bits(a, b) for run in runs for a, b in zip(run, expected[i], strict=True))


def python(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(numba_flash.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("use", ["pass", "numba_flash.reference.forward(x, x, x)"], ids=["import", "the oracle"])
def test_import_is_light(use):
    heavy = ("cupy", "numba", "scipy", "cuda", "llvmlite", "threadpoolctl")
    code = f"import sys, numpy as np, numba_flash; x = np.eye(3); {use}; print(sorted(set({heavy}) & set(sys.modules)))"
    assert python(code) == "[]\n"


def test_a_refused_call_is_light():
    code = """
import sys, numpy as np, numba_flash
x = np.eye(3)
try:
    numba_flash.forward(x, x, x[:2])
except ValueError:
    print("numba" in sys.modules)
"""
    assert python(code) == "False\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_computes():
    code = """
import os, numpy as np, numba_flash
x = np.random.default_rng(0).standard_normal((8, 200, 16))
expected = numba_flash.forward(x, x, x, backend="cpu")
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(numba_flash.forward(x, x, x, backend="cpu"), expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code) == "0\n"


# ---- documentation ---------------------------------------------------------------------------------------------------------------------

FUNCTIONS = {
    **{name: getattr(numba_flash, name) for name in numba_flash.__all__ if name != "reference"},
    "reference.forward": numba_flash.reference.forward,
    "reference.backward": numba_flash.reference.backward,
}


def documented_parameters(function) -> list[str] | None:
    """Names in the Parameters section of a numpydoc docstring; None if it has none."""
    text = inspect.getdoc(function)
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\S[^\n]*\n-+$|\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        return None
    heads = re.findall(r"^(\S.*?)(?: : .*)?$", section[1], re.MULTILINE)
    return [name.strip().lstrip("*") for head in heads for name in head.split(",")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_parameters_equal_the_signature(name):
    function = FUNCTIONS[name]
    parameters, documented = list(inspect.signature(function).parameters), documented_parameters(function)
    if documented is None and re.search(r"Parameters are those of `forward`", inspect.getdoc(function)):
        documented = [p for p in documented_parameters(FUNCTIONS["forward"]) if p in parameters]
    assert sorted(documented or []) == sorted(parameters)


def test_the_docstring_parser_finds_what_is_there():
    assert documented_parameters(numba_flash.backward)[:3] == ["do", "q", "k"]
    assert documented_parameters(spec.bind) is None


def test_every_public_name_has_a_docstring():
    public = {name: getattr(numba_flash, name) for name in numba_flash.__all__} | FUNCTIONS
    assert set(numba_flash.__all__) >= {"forward", "backward", "plan", "reference", "show_config"}
    for name, thing in public.items():
        assert (inspect.getdoc(thing) or "").strip(), f"{name} has no docstring"


def test_forward_and_backward_take_the_same_options():
    keyword_only = lambda f: {n: p.default for n, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}
    forward, backward, plan = map(keyword_only, (numba_flash.forward, numba_flash.backward, numba_flash.plan))
    assert forward.pop("return_lse") is False
    assert backward.pop("dlse") is None
    assert backward.pop("bias_grad") is False
    assert backward.pop("deterministic") is True
    assert forward == backward
    del forward["out"]
    assert forward == plan


def test_packed_functions_take_the_options_that_make_sense_for_them():
    names = lambda f: {n for n, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}
    padded_only = {"bias", "mask", "q_lengths", "kv_lengths"}
    assert names(numba_flash.forward_packed) == names(numba_flash.forward) - padded_only
    assert names(numba_flash.backward_packed) == names(numba_flash.backward) - padded_only - {"bias_grad"}


def test_docstring_examples():
    import doctest

    results = doctest.testmod(api, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed: it would read the array")
def test_a_device_array_without_cupy_is_a_type_error_that_says_so():
    class DeviceArray:
        __cuda_array_interface__ = {"shape": (4, 4), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012

    with pytest.raises(TypeError, match=r"q must be a NumPy or CuPy array.*CuPy for device memory.*got DeviceArray"):
        numba_flash.forward(DeviceArray(), DeviceArray(), DeviceArray())
