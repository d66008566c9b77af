"""`precision`: which names there are, whose default holds where, which arrays it matters to, and what a plan says of it."""

import asyncio
import doctest
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from support import DTYPES, SIMULATED, compare, random_inputs, readable, run, same_bits

import numba_flash
from numba_flash import call
from numba_flash.arguments import precisions
from numba_flash.arguments.precisions import PRECISIONS
from numba_flash.arguments.problem import bind
from numba_flash.plan import BACKENDS, tier

WRONG = ("tf16", "TF32", "", 32, True, b"ieee", ["tf32"], np.array("tf32"), np.dtype("float32"))
every_wrong = pytest.mark.parametrize("value", WRONG, ids=repr)
OFFSETS = np.array([0, 4])


@pytest.fixture(autouse=True)
def usual(monkeypatch):
    """Each test finds the default that there is without an environment variable, and leaves it."""
    monkeypatch.setattr(precisions, "_of_process", "float32")


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The precision of each prepared call that runs, none of which was prepared before."""
    precisions_of_calls: list[str] = []
    original = call._Call.run

    def noted(self, *arguments):
        precisions_of_calls.append(self.problem.precision)
        return original(self, *arguments)

    monkeypatch.setattr(call._Call, "run", noted)
    monkeypatch.setattr(call, "_prepared", {})
    return precisions_of_calls


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def attend(dtype=np.float32, **options):
    x = ones(4, 8, dtype=dtype)
    return numba_flash.forward(x, x, x, backend="cpu", **options)


def differentiate(dtype=np.float32, **options):
    x = ones(4, 8, dtype=dtype)
    lse = ones(4, dtype=np.float64 if dtype is np.float64 else np.float32)
    return numba_flash.backward(x, x, x, x, x, lse, backend="cpu", **options)


def attend_packed(dtype=np.float32, **options):
    x = ones(4, 1, 8, dtype=dtype)
    return numba_flash.forward_packed(x, x, x, OFFSETS, OFFSETS, backend="cpu", **options)


def differentiate_packed(dtype=np.float32, **options):
    x = ones(4, 1, 8, dtype=dtype)
    lse = ones(1, 4, dtype=np.float64 if dtype is np.float64 else np.float32)
    return numba_flash.backward_packed(x, x, x, x, x, lse, OFFSETS, OFFSETS, backend="cpu", **options)


def plan(dtype=np.float32, **options):
    x = ones(4, 8, dtype=dtype)
    return numba_flash.plan(x, x, x, backend="cpu", **options)


def holds() -> str:
    """What holds here and now where a call does not say it."""
    return plan().problem.precision


PASSES = (attend, differentiate, attend_packed, differentiate_packed)
every_pass = pytest.mark.parametrize("function", PASSES)
every_function = pytest.mark.parametrize("function", [*PASSES, plan])


# ---- names -----------------------------------------------------------------------------------------------------------------------------


def test_names():
    assert PRECISIONS == ("float32", "ieee", "tf32")
    assert [plan(precision=name).problem.precision for name in PRECISIONS] == [*PRECISIONS]


@every_function
@every_wrong
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64], ids=readable)
def test_other_names_are_refused_for_all_dtypes(function, value, dtype):
    with pytest.raises(ValueError, match=rf"^precision must be one of float32, ieee, tf32, or None; got {re.escape(repr(value))}$"):
        function(dtype, precision=value)


@pytest.mark.parametrize("setter", [numba_flash.set_precision, numba_flash.use_precision])
@pytest.mark.parametrize("value", [*WRONG, None], ids=repr)
def test_other_names_are_no_default(setter, value):
    """Neither where it is set, nor in a block, which is not entered."""
    with pytest.raises(ValueError, match=rf"^precision must be one of float32, ieee, tf32; got {re.escape(repr(value))}$"):
        setter(value)
    assert holds() == "float32"


def test_a_name_of_numpy_is_the_same_name():
    assert type(plan(precision=np.str_("tf32")).problem.precision) is str
    with numba_flash.use_precision(np.str_("ieee")):
        assert plan().problem == plan(precision="ieee").problem


# ---- dtypes ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float32"])
def test_problems_of_other_dtypes_do_not_depend_on_it(dtype):
    problems = {plan(DTYPES[dtype], precision=name).problem for name in (None, *PRECISIONS)}
    with numba_flash.use_precision("tf32"):
        problems.add(plan(DTYPES[dtype]).problem)
    assert {problem.precision for problem in problems} == {"float32"}
    assert len(problems) == 1


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "float32"])
def test_results_of_other_dtypes_do_not_depend_on_it(backend, dtype):
    inputs = random_inputs(dtype=dtype)
    expected = run(backend, *inputs)
    for precision in PRECISIONS:
        results = run(backend, *inputs, precision=precision)
        assert all(same_bits(x, expected[name]) for name, x in results.items())


@pytest.mark.parametrize("precision", [None, "float32", pytest.param("ieee", marks=pytest.mark.simulator(full=True))])
def test_float32_means_float32(backend, precision):
    inputs = random_inputs()
    compare(run(backend, *inputs, precision=precision), *inputs)


@pytest.mark.simulator(full=True)
def test_without_tensor_cores_all_precisions_are_one(backend):
    if backend.tensor_cores:
        pytest.skip("this one has tensor cores")
    inputs = random_inputs()
    expected, *others = (run(backend, *inputs, precision=precision) for precision in PRECISIONS)
    assert all(same_bits(x, expected[name]) for results in others for name, x in results.items())


# ---- defaults --------------------------------------------------------------------------------------------------------------------------


def test_the_default_is_float32_until_it_is_set():
    assert holds() == "float32"
    numba_flash.set_precision("tf32")
    assert holds() == "tf32"
    assert plan(precision="ieee").problem.precision == "ieee"
    numba_flash.set_precision("ieee")
    assert holds() == "ieee"


def test_blocks_are_nested():
    with numba_flash.use_precision("tf32"):
        assert holds() == "tf32"
        with numba_flash.use_precision("ieee"):
            assert holds() == "ieee"
            assert plan(precision="float32").problem.precision == "float32"
        assert holds() == "tf32"
    assert holds() == "float32"


def test_a_block_goes_before_what_is_set_within_it():
    with numba_flash.use_precision("tf32"):
        numba_flash.set_precision("ieee")
        assert holds() == "tf32"
    assert holds() == "ieee"


def test_an_exception_ends_a_block():
    with pytest.raises(ValueError, match="tf32, or None"), numba_flash.use_precision("tf32"):
        plan(precision="tf16")
    assert holds() == "float32"


def test_threads_have_blocks_of_their_own():
    """Two are in blocks of their own at the same time, a third began before all blocks; what is set for the process holds for it."""
    inside, finish, seen = threading.Barrier(4, timeout=60), threading.Barrier(4, timeout=60), {}

    def work(name, precision):
        if precision is None:
            inside.wait()
            seen[name] = holds()
            finish.wait()
            return
        with numba_flash.use_precision(precision):
            inside.wait()
            seen[name] = holds()
            finish.wait()

    numba_flash.set_precision("ieee")
    cases = {"none": None, "tf32": "tf32", "float32": "float32"}
    threads = [threading.Thread(target=work, args=case) for case in cases.items()]
    for thread in threads:
        thread.start()
    inside.wait()
    seen["main"] = holds()
    finish.wait()
    for thread in threads:
        thread.join()
    assert seen == {"none": "ieee", "tf32": "tf32", "float32": "float32", "main": "ieee"}


def test_tasks_of_asyncio_have_blocks_of_their_own():
    async def work(precision):
        with numba_flash.use_precision(precision):
            await asyncio.sleep(0)
            return holds()

    async def everything():
        return await asyncio.gather(*map(work, PRECISIONS)), holds()

    assert asyncio.run(everything()) == ([*PRECISIONS], "float32")


def python(code: str, value: str | None) -> str:
    """What a program prints in a process whose environment has that variable."""
    environment = {name: x for name, x in os.environ.items() if name != "NUMBA_FLASH_PRECISION"}
    environment |= {} if value is None else {"NUMBA_FLASH_PRECISION": value}
    program = f"import numpy as np, numba_flash\nx = np.ones((4, 8), np.float32)\n{code}"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


SHOW = "print(numba_flash.plan(x, x, x).problem.precision)\n"


@pytest.mark.parametrize(("value", "expected"), [("tf32", "tf32"), ("ieee", "ieee"), ("", "float32"), (None, "float32")])
def test_the_environment_says_it_first(value, expected):
    code = f"{SHOW}numba_flash.set_precision('float32')\n{SHOW}with numba_flash.use_precision('ieee'): {SHOW}"
    assert python(code, value).split() == [expected, "float32", "ieee"]


def test_a_wrong_environment_is_named_when_it_is_needed():
    """Not on import, and not by calls that say what they need; and `show_config` says it, too."""
    code = f"""
print(numba_flash.plan(x, x, x, precision="ieee").problem.precision)
for call in (lambda: numba_flash.forward(x, x, x), lambda: numba_flash.plan(x, x, x)):
    try:
        call()
    except ValueError as error:
        print(error)
numba_flash.show_config()
numba_flash.set_precision("tf32")
{SHOW}"""
    lines = python(code, "tf16").splitlines()
    message = "NUMBA_FLASH_PRECISION must be one of float32, ieee, tf32; got 'tf16'"
    assert lines[:3] == ["ieee", message, message]
    assert f"precision of float32: {message}" in lines
    assert lines[-1] == "tf32"


def test_show_config_says_it(capsys):
    for precision in PRECISIONS:
        numba_flash.set_precision(precision)
        numba_flash.show_config()
        assert f"precision of float32: {precision}\n" in capsys.readouterr().out


def test_get_precision_says_it():
    assert numba_flash.get_precision() == "float32"
    for precision in PRECISIONS:
        numba_flash.set_precision(precision)
        assert numba_flash.get_precision() == precision
    with numba_flash.use_precision("ieee"):
        assert numba_flash.get_precision() == "ieee"
        with numba_flash.use_precision("float32"):
            assert numba_flash.get_precision() == "float32"
    assert numba_flash.get_precision() == PRECISIONS[-1]


# ---- prepared calls --------------------------------------------------------------------------------------------------------------------


@every_pass
def test_prepared_calls_notice_another_default(function, ran):
    function()
    numba_flash.set_precision("tf32")
    function()
    with numba_flash.use_precision("ieee"):
        function()
        function(precision="float32")
    function()
    assert ran == ["float32", "tf32", "ieee", "float32", "tf32"]
    assert len([key for key in call._prepared if isinstance(key, tuple)]) == 3


def test_a_score_mod_notices_another_default(ran):
    """Its prepared calls are kept elsewhere."""
    half = lambda score, b, h, i, j: 0.5 * score
    attend(score_mod=half)
    with numba_flash.use_precision("tf32"):
        attend(score_mod=half)
    attend(score_mod=half)
    assert ran == ["float32", "tf32", "float32"]


# ---- plans -----------------------------------------------------------------------------------------------------------------------------

IEEE, WIDENED, TENSOR_CORES = "IEEE products and sums", "products and sums in float32", "tensor cores, sums in float32"
OF_ANY = {"float16": WIDENED, "bfloat16": WIDENED, "float32": IEEE, "float64": IEEE}
OF_TENSOR_CORES = {"float16": TENSOR_CORES, "bfloat16": TENSOR_CORES}
SPLIT = "float32 as the sum of two float16: three products on tensor cores, sums in float32"
ONE_PRODUCT = "float32 as scaled float16: one product on tensor cores, sums in float32"
ALGORITHMS = {"sm90": OF_TENSOR_CORES | {"float32": SPLIT}, "sm80": OF_TENSOR_CORES | {"float32": SPLIT}, "simt": OF_ANY, "cpu": OF_ANY}


def test_every_backend_names_its_algorithm():
    assert ALGORITHMS.keys() == set(BACKENDS)
    for name, algorithms in ALGORITHMS.items():
        for dtype, algorithm in algorithms.items():
            x = ones(4, 8, dtype=DTYPES[dtype])
            for precision in PRECISIONS:
                one = algorithm == SPLIT and precision == "tf32"
                assert tier(name).algorithm(bind(x, x, x, precision=precision)) == (ONE_PRODUCT if one else algorithm)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plan_shows_the_algorithm(backend, dtype):
    if dtype not in ALGORITHMS[backend.name]:
        pytest.skip("this one does not serve it")
    q, k, v, _ = map(backend.to_device, random_inputs(dtype=dtype))
    chosen = numba_flash.plan(q, k, v, backend=backend.name)
    assert chosen.algorithm == ALGORITHMS[backend.name][dtype]
    assert repr(chosen).splitlines()[0].endswith(f": {chosen.algorithm}")


# ---- blocks of dask, and processes -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(SIMULATED, reason="blocks are computed as anywhere")
def test_tasks_of_dask_have_the_default_of_their_call(ran):
    da = pytest.importorskip("dask.array", reason="dask is not installed")
    import numba_flash.dask as nd

    x = da.ones((1, 8, 4), chunks=(1, 4, 4), dtype=np.float32)
    for precision in (None, "ieee"):
        ran.clear()
        with numba_flash.use_precision("tf32"):
            o, lse = nd.forward(x, x, x, return_lse=True, precision=precision)
            gradients = nd.backward(x, x, x, x, o, lse, precision=precision)
        o.compute(scheduler="threads")
        assert ran == 4 * [precision or "tf32"]
        gradients[0].compute(scheduler="threads")
        assert ran == 12 * [precision or "tf32"]
    assert nd.forward(x, x, x).name != nd.forward(x, x, x, precision="tf32").name
    for function, arguments in ((nd.forward, (x, x, x)), (nd.backward, (x, x, x, x, x, x[..., 0]))):
        with pytest.raises(ValueError, match=r"^precision must be one of float32, ieee, tf32, or None; got 'tf16'"):
            function(*arguments, precision="tf16")


def spread(call, dtype=np.float32) -> list:
    """What becomes of ``call(numba_flash.distributed, array, comm)`` in each of two processes."""
    from support.thread_group import together

    import numba_flash.distributed as nd

    x = ones(1, 4, 4, dtype=dtype)
    results = together(2, lambda comm: call(nd, x, comm))
    return [str(x) if isinstance(x, Exception) else "computed" for x in results]


def forward_of(options):
    """A forward pass of each process with options of its own."""
    return lambda nd, x, comm: nd.forward(x, x, x, comm=comm, **options(comm.rank))


def backward_of(options):
    """A backward pass likewise."""
    return lambda nd, x, comm: nd.backward(x, x, x, x, x, x[..., 0], comm=comm, **options(comm.rank))


@pytest.mark.parametrize("function", [forward_of, backward_of])
def test_processes_that_differ(function, ran):
    message = "precision must be the same in all processes; got float32 in process 0 and tf32 in process 1"
    assert spread(function(lambda rank: {"precision": ("float32", "tf32")[rank]})) == 2 * [message]
    assert spread(function(lambda rank: {"precision": (None, "tf32")[rank]})) == 2 * [message]
    assert ran == []


def test_processes_whose_defaults_differ(ran):
    def call(nd, x, comm):
        with numba_flash.use_precision(("float32", "tf32")[comm.rank]):
            return nd.forward(x, x, x, comm=comm)

    message = "precision must be the same in all processes; got float32 in process 0 and tf32 in process 1"
    assert spread(call) == 2 * [message]
    assert ran == []
    assert spread(call, np.float64) == 2 * ["computed"]


@pytest.mark.parametrize("function", [forward_of, backward_of])
def test_processes_that_agree(function, ran):
    """One says what is the other's default; all parts are computed so."""
    numba_flash.set_precision("tf32")
    assert spread(function(lambda rank: {"precision": (None, "tf32")[rank]})) == 2 * ["computed"]
    assert set(ran) == {"tf32"}
    ran.clear()
    assert spread(function(lambda rank: {"precision": "ieee"})) == 2 * ["computed"]
    assert set(ran) == {"ieee"}


def test_a_process_with_another_name_tells_the_others():
    expected = "precision must be one of float32, ieee, tf32, or None; got 'tf16'"
    results = spread(forward_of(lambda rank: {"precision": (None, "tf16")[rank]}))
    assert results == [f"process 1 cannot take part: ValueError: {expected}", expected]


# ---- documentation ---------------------------------------------------------------------------------------------------------------------


def test_examples():
    results = doctest.testmod(precisions)
    assert results.attempted == 12
    assert results.failed == 0
