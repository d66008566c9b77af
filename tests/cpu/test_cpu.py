"""What is particular to the CPU backend: threads, forks, the disk cache, NaN behind the mask, memory, the order of sums."""

import inspect
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import numba_flash
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, Problem
from numba_flash.cpu import kernels, scratch, softmax, tier

ROOT = Path(numba_flash.__file__).parents[1]


def problem(n, high=None, d=16):
    return Problem((1, 1), 2, 1, n, n, d, d, "float32", 0.25, -n, n if high is None else high)


def inputs(p):
    """Random q, k, v, do."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 1, h, p.nq, p.d), dtype=np.float32) for h in (p.hq, p.hk, p.hk, p.hq)]


def run(p, q, k, v, do):
    """o, lse, dq, dk, dv."""
    o, lse = np.empty_like(q), np.empty(q.shape[:4], np.float32)
    gradients = BackwardResults(*map(np.empty_like, (q, k, v)))
    tier.forward(p, q, k, v, o, lse)
    tier.backward(p, BackwardInputs(do, q, k, v, o, lse), gradients)
    return [o, lse, gradients.dq, gradients.dk, gradients.dv]


IMPORTS = """
import numpy as np
from numba_flash.cpu import kernels, pool, tier
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, Problem
"""
PRELUDE = "\n".join([IMPORTS, *map(inspect.getsource, (problem, inputs, run))])


def python(code, *, path=ROOT, **environment):
    """Output of `code`, after `PRELUDE`, in a new process that imports the package from `path`."""
    environment = os.environ | {"PYTHONPATH": str(path)} | environment
    done = subprocess.run(
        [sys.executable, "-c", f"{PRELUDE}\n{code}"], cwd=path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cache():
    """The kernels of `PRELUDE` are on disk."""
    python("run(p := problem(40), *inputs(p))")


def test_concurrent_calls():
    """Threads that call at the same time get what one alone gets, bit for bit."""
    problems = [problem(n, 0) for n in (90, 300, 520, 700)]
    expected = [run(p, *inputs(p)) for p in problems]
    failures = []

    def call(p, want):
        for _ in range(5):
            if not all(np.array_equal(a, b) for a, b in zip(run(p, *inputs(p)), want, strict=True)):
                failures.append(p)

    threads = [threading.Thread(target=call, args=pair) for pair in zip(problems, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_result_does_not_depend_on_the_number_of_threads(cache):
    code = "import hashlib; results = run(p := problem(900, 0), *inputs(p)); print([hashlib.sha256(x).hexdigest() for x in results])"
    assert python(code, NUMBA_NUM_THREADS="1") == python(code, NUMBA_NUM_THREADS="2")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_children(cache):
    """Children of a process that has used the kernels, one of them forked while another thread is computing."""
    code = """
import multiprocessing, threading
p = problem(600)
x = inputs(p)
want = run(p, *x)
def child():
    assert all(np.array_equal(a, b) for a, b in zip(run(p, *x), want))
context = multiprocessing.get_context("fork")
busy = threading.Thread(target=lambda: [run(p, *x) for _ in range(30)])
busy.start()
children = [context.Process(target=child) for _ in range(3)]
for c in children: c.start()
for c in children: c.join(60)
busy.join()
print([c.exitcode for c in children])
"""
    assert python(code).strip() == "[0, 0, 0]"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_nobody_forks_while_blas_changes_its_threads(cache):
    """OpenBLAS holds a lock of its own meanwhile, which nobody would open in the child."""
    code = """
import os, threading, time
from threadpoolctl import ThreadpoolController
blas, begun, done = pool.runner.blas, threading.Event(), []
limit = ThreadpoolController.limit
def slowly(self, **numbers):
    begun.set()
    time.sleep(0.3)
    done.append(numbers)
    return limit(self, **numbers)
ThreadpoolController.limit = slowly
p = problem(40)
x = inputs(p)
caller = threading.Thread(target=lambda: run(p, *x))
caller.start()
begun.wait()
child = os.fork()
if child == 0:
    os._exit(2 * (not done) + (not blas.changing.acquire(blocking=False)))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
caller.join()
"""
    assert python(code).strip() == "0"


def test_second_process_starts_from_the_cache(cache):
    code = """
run(p := problem(40), *inputs(p))
for kernel in (kernels.forward_items, kernels.delta_items, kernels.backward_items, kernels.dq_items):
    assert not kernel.stats.cache_misses and kernel.stats.cache_hits, kernel
"""
    python(code)


@pytest.mark.full
def test_the_process_that_compiles_and_those_after_it_get_the_same_bits(tmp_path):
    """Rows of all lengths, whose sums the compiler may order as it likes."""
    code = """
import hashlib, numba_flash
rng = np.random.default_rng(0)
for dtype in (np.float16, np.float32, np.float64):
    q, k, v, do = (rng.standard_normal((2, n, 24)).astype(dtype) for n in (70, 600, 600, 70))
    for options in ({}, {"softcap": 5.0, "dropout": 0.2, "rng": (1, 2)}):
        for most in (70, 600):
            options["causal"], x = True, (q, k[:, :most], v[:, :most])
            o, lse = numba_flash.forward(*x, return_lse=True, **options)
            for result in (o, lse, *numba_flash.backward(do, *x, o, lse, **options)):
                print(hashlib.sha256(result).hexdigest())
"""
    first, second = (python(code, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert len(first.split()) == 3 * 2 * 2 * 5
    assert first == second


def test_layouts_share_one_compiled_kernel():
    p = problem(33)
    x = inputs(p)
    want = run(p, *x)
    count = len(kernels.forward_items.overloads)
    got = run(p, *(np.moveaxis(np.moveaxis(a, -1, 0).copy(), 0, -1) for a in x))
    assert len(kernels.forward_items.overloads) == count
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.full
def test_edit_of_a_helper_module_is_noticed(tmp_path):
    """Numba watches only the file of the kernel itself; the hash of all that this imports must catch the rest."""
    package = tmp_path / "numba_flash"
    shutil.copytree(ROOT / "numba_flash", package, ignore=shutil.ignore_patterns("__pycache__"))
    code = """
one, delta = np.full((1, 1, 1, 1, 1), 0x3F80, np.uint16), np.zeros((1, 1, 1, 1), np.float32)  # 1 in bfloat16
pool.runner(kernels.delta_items, 1, 1, one, one, delta, np.zeros_like(delta))
print(delta.item())
"""
    environment = {"path": tmp_path, "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert python(code, **environment).strip() == "1.0"
    numeric = package / "numeric.py"
    edited, count = re.subn(r"(def bfloat16_to_float32.*?return )", r"\1np.float32(2) * ", numeric.read_text(), flags=re.DOTALL)
    assert count == 1
    numeric.write_text(edited)
    assert python(code, **environment).strip() == "4.0"


# ---- NaN and Inf ---------------------------------------------------------------------------------------------------------------------

POISON = pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])


@POISON
@pytest.mark.parametrize("n", [70, 700])
def test_what_hidden_keys_hold_does_not_matter(n, poison):
    """Keys behind a causal mask that no query of the first half sees, in tiles that others see in part."""
    p, hidden = problem(n, 0), slice(n // 2, None)
    q, k, v, do = inputs(p)
    clean = run(p, q, k, v, do)
    k[:, :, :, hidden], v[:, :, :, hidden] = poison, poison
    poisoned = run(p, q, k, v, do)
    seen = slice(0, n // 2)
    for a, b in zip(poisoned[:3], clean[:3], strict=True):  # o, lse, dq
        np.testing.assert_allclose(a[:, :, :, seen], b[:, :, :, seen], rtol=1e-4, atol=1e-5)
    assert np.isnan(poisoned[0][:, :, :, hidden]).all()


@POISON
def test_what_hidden_queries_hold_does_not_matter(poison):
    """dk and dv of keys that only see finite queries."""
    n = 700
    p, early = problem(n, 0), slice(0, n // 2)
    q, k, v, do = inputs(p)
    clean = run(p, q, k, v, do)
    q[:, :, :, early], do[:, :, :, early] = poison, poison
    poisoned = run(p, q, k, v, do)
    for a, b in zip(poisoned[3:], clean[3:], strict=True):
        np.testing.assert_allclose(a[:, :, :, n // 2 :], b[:, :, :, n // 2 :], rtol=1e-4, atol=1e-5)
        assert np.isnan(a[:, :, :, early]).all()


@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_a_visible_nan_reaches_exactly_what_it_should(name):
    n, where = 600, 333
    p = problem(n, 5)
    q, k, v, do = x = inputs(p)
    x[["q", "k", "v", "do"].index(name)][0, 0, 0, where, 3] = np.nan
    o, lse, dq, _, _ = run(p, q, k, v, do)
    i = np.arange(n)
    sees = {"q": i == where, "k": i + 5 >= where, "v": i + 5 >= where, "do": np.zeros(n, bool)}[name]
    np.testing.assert_array_equal(np.isnan(o[0, 0, 0]).any(-1), sees)
    np.testing.assert_array_equal(np.isnan(lse[0, 0, 0]), sees & (name in "qk"))
    np.testing.assert_array_equal(np.isnan(dq[0, 0, 0]).any(-1), i == where if name == "do" else sees)


# ---- memory --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.unproven("of what the system gives")
@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
def test_memory_stays_linear(cache):
    """Peak memory of forward and backward beyond inputs and results: a score matrix alone would take 1 GiB."""
    code = """
import resource
run(p := problem(40), *inputs(p))
p = problem(16384)
q, k, v, do = inputs(p)
o, gradients = np.zeros_like(q), BackwardResults(*map(np.zeros_like, (q, k, v)))
lse = np.zeros(q.shape[:4], np.float32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tier.forward(p, q, k, v, o, lse)
tier.backward(p, BackwardInputs(do, q, k, v, o, lse), gradients)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    assert int(python(code)) < 100 * 1024


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.full), "float32"])
def test_panels_of_queries_add_up(monkeypatch, dtype):
    """When the partial dq of one head exceeds its cap, its queries are taken in panels; sixteen-bit dk and dv are rounded once."""
    p = replace(problem(1500, 0), dtype=dtype)
    q, k, v, do = (a.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for a in inputs(p))
    o, lse = np.empty_like(q), np.empty(q.shape[:4], np.float32)
    tier.forward(p, q, k, v, o, lse)
    given = BackwardInputs(do, q, k, v, o, lse)
    whole, panels = (BackwardResults(*map(np.empty_like, (q, k, v))) for _ in range(2))
    tier.backward(p, given, whole)
    monkeypatch.setattr(scratch, "DQ_PARTIAL_BYTES", 1)
    tier.backward(p, given, panels)
    rtol = {"bfloat16": 2.0**-7, "float32": 1e-6}[dtype]  # at most to the other neighbour
    for a, b in zip(panels[:3], whole[:3], strict=True):  # dq, dk, dv
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=rtol, atol=2e-6)


def test_sums_over_panels_are_rounded_to_the_gradient_that_they_are_of(monkeypatch):
    """Of each head."""
    p = replace(problem(1500, 0), dtype="float16", hq=6, hk=3)
    q, k, v, do = (a.astype(np.float16) for a in inputs(p))
    results = BackwardResults(*map(np.zeros_like, (q, k, v)))

    def run(dispatcher, items, grain, *arguments):
        if dispatcher is tier.backward_items:
            of = inspect.signature(dispatcher.py_func).bind(0, items, *arguments).arguments
            of["dk"][...], of["dv"][...] = 2 + of["first_unit"], -1 - of["first_unit"]

    monkeypatch.setattr(scratch, "DQ_PARTIAL_BYTES", 1)
    monkeypatch.setattr(tier, "_run", run)
    tier.backward(p, BackwardInputs(do, q, k, v, q, np.zeros(q.shape[:4], np.float32)), results)
    heads = np.arange(math.prod(k.shape[:3])).reshape(*k.shape[:3], 1, 1)
    np.testing.assert_array_equal(results.dk, np.broadcast_to(2 + heads, k.shape))
    np.testing.assert_array_equal(results.dv, np.broadcast_to(-1 - heads, v.shape))


@pytest.mark.parametrize("room", [1, 2, 3, 4, 0.3], ids="{} heads at a time".format)
@pytest.mark.parametrize("batch", [(1, 1), (2, 1), (3, 2)])
def test_waves_and_panels_have_each_query_of_each_head_once(batch, room, monkeypatch):
    """The last wave has the heads that are left, and the last panel the queries; the buffer has room for no more than that."""
    p = replace(problem(700), batch=batch, hq=10, hk=5, scale=0.25)
    chunks = scratch.Waves.of(p).chunks
    monkeypatch.setattr(scratch, "DQ_PARTIAL_BYTES", int(room * chunks * 2 * 16 * 4 * 700))
    q, k = (np.zeros((*batch, h, 700, 16), np.float32) for h in (10, 5))
    units, lse = math.prod(batch) * 5, np.zeros((*batch, 10, 700), np.float32)
    seen = {tier.backward_items: np.zeros((units, 700), int), tier.dq_items: np.zeros((units, 700), int)}

    def run(dispatcher, items, grain, *arguments):
        if dispatcher not in seen:
            return
        of = inspect.signature(dispatcher.py_func).bind(0, items, *arguments).arguments
        heads, _, group, rows, _ = of["dq_partial"].shape
        assert items == heads * (chunks if dispatcher is tier.backward_items else group * rows)
        assert of["first_unit"] + heads <= units
        if dispatcher is tier.backward_items:
            run.first = of["low"] - p.low
            assert of["high"] - p.high == run.first
            assert of["add"] == (run.first > 0)
            assert of["q"].shape[3] == of["lse"].shape[3] == rows
        seen[dispatcher][of["first_unit"] : of["first_unit"] + heads, run.first : run.first + rows] += 1

    monkeypatch.setattr(tier, "_run", run)
    tier.backward(p, BackwardInputs(q, q, k, k, q, lse), BackwardResults(*map(np.empty_like, (q, k, k))))
    for count in seen.values():
        assert (count == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_hidden_terms_alone_are_marked(dtype):
    """By a weight, and a gradient, of -0.0: neither a weight that is too small to hold nor a product of zero and a negative number."""
    row = np.array([0, -np.inf, -1, -1e5], dtype)
    total = softmax.marked_exp_row(row, row.dtype.type(0))
    assert (np.signbit(row) == [False, True, False, False]).all()
    assert (row[[1, 3]] == 0).all()
    np.testing.assert_allclose([row[0], row[2], total], [1, np.exp(-1), 1 + np.exp(-1)], rtol=1e-6)
    for delta in (2, -2):
        dp = np.array([1, 1, 1, 1], dtype)
        softmax.marked_gradient_row(row, dp, np.array([0, 3, 3, 3], dtype), row.dtype.type(delta))
        assert (np.signbit(dp) == [False, True, delta > 0, False]).all()
        assert (dp[[0, 1, 3]] == 0).all()


def test_a_gradient_of_a_bias_that_float16_cannot_hold_is_infinite():
    """As other results are, without a warning of NumPy's."""
    p = Problem((1, 1), 1, 1, 2, 2, 4, 4, "float16", 1.0, -2, 2)
    dbias, sums = np.zeros((1, 1, 1, 1, 2), np.float16), scratch.of_bias(p, np.zeros((1, 1, 1, 1, 2), np.float16))
    x = np.zeros((1, 1, 1, 2, 4), np.float16)

    def add(problem, inputs, results, extras):
        results.dbias[...] = [1e6, 3]

    given = BackwardInputs(x, x, x, x, x, np.zeros((1, 1, 1, 2), np.float32))
    with mock.patch.object(tier, "backward", add), warnings.catch_warnings():
        warnings.simplefilter("error")
        tier._backward(p, sums, given, BackwardResults(x.copy(), x.copy(), x.copy(), dbias))
    assert dbias.ravel().tolist() == [np.inf, 3]
