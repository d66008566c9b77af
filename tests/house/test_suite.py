"""The suite's own rules: which tests run, where, and under which ids."""

import os

import evidence
import numpy as np
import proven
import pytest
import support
from conftest import FIRST, scope
from support import SIMULATED, TESTS, readable

if SIMULATED:
    pytest.skip("these are the rules of the run outside the CUDA simulator", allow_module_level=True)


@pytest.fixture
def suite(pytester, monkeypatch):
    """``suite(source, *options, gpu=False)``: outcome of pytest for the tests in `source`, by the rules of this suite."""
    pytester.makeconftest((TESTS / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers =\n    full\n    gpu\n    unproven")
    monkeypatch.setattr(proven, "RECORD", pytester.path / "proven.json")
    for name in ("all_sources", "host_sources"):
        monkeypatch.setattr(evidence, name, lambda *_, name=name: name)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(source: str, *options: str, gpu: bool = False):
        pytester.makepyfile(source)
        proven.RECORD.unlink(missing_ok=True)
        monkeypatch.setattr(support, "no_gpu", lambda backend="simt": None if gpu else "it is elsewhere")
        return pytester.runpytest_inprocess(*options)

    return run


QUICK_AND_SLOW = """
import pytest

def test_quick(): ...

@pytest.mark.full
def test_slow(): ...

@pytest.mark.gpu
def test_quick_on_a_gpu(): ...

@pytest.mark.full
@pytest.mark.gpu
def test_slow_on_a_gpu(): ...
"""


@pytest.mark.parametrize(
    ("options", "with_a_gpu", "without"),
    [
        ((), {"passed": 2, "deselected": 2}, {"passed": 1, "deselected": 3}),
        (("--full",), {"passed": 4}, {"passed": 2, "deselected": 2}),
        (("-m", "gpu"), {"passed": 1, "deselected": 3}, {"skipped": 1, "deselected": 3}),
        (("--affected", "--order", "7"), {"passed": 4}, {"passed": 2, "deselected": 2}),
        (("--full", "-m", "gpu"), {"passed": 2, "deselected": 2}, {"skipped": 2, "deselected": 2}),
    ],
)
def test_what_runs(suite, options, with_a_gpu, without):
    for gpu, expected in ((True, with_a_gpu), (False, without)):
        done = suite(QUICK_AND_SLOW, *options, gpu=gpu)
        assert done.parseoutcomes() == expected
        said = {
            "--full": "run",
            "--affected": "run unless they have passed on the same code; in order 7",
        }.get(options[0] if options else "", "are deselected; --affected runs those that a change can affect, --full all")
        assert f"numba_flash: slow and exhaustive tests {said}" in done.outlines


@pytest.mark.parametrize("value", ["lambda: 0", "object()"])
def test_an_id_that_holds_an_address_is_refused(suite, value):
    """Processes of pytest-xdist would collect different tests."""
    source = f"import pytest\n@pytest.mark.parametrize('value', [{value}], ids=%s)\ndef test_it(value): ..."
    refused = suite(source % "str")
    assert refused.ret == pytest.ExitCode.INTERRUPTED
    refused.stdout.fnmatch_lines(["*an id that holds an address is another one in each process of pytest-xdist: test_it*0x*"])
    assert suite(source % "None").parseoutcomes() == {"passed": 1}


def test_ids_can_be_read():
    options = {"scale": 0.5, "window": (3, -1), "softcap": None, "bias": np.ones((2, 3), np.float32), "score_mod": readable}
    assert readable(options) == "scale=0.5, window=(3, -1), softcap=None, bias=float32(2, 3), score_mod=readable"
    assert readable([lambda: 0, object(), np.int8, "x" * 100, {}]) == f"[<lambda>, object, int8, {'x' * 40}, default]"


def test_what_needs_kernels_of_the_cpu_runs_in_one_process():
    on_the_cpu = [
        "contract/test_api.py::test_threads",
        "contract/test_attention.py::test_dtypes[cpu-float32]",
        "contract/test_options.py::test_bias[cpu-(2, [3])]",
        "cpu/test_cpu.py::test_threads",
        "processes/test_dask_gpu.py::test_bfloat16_that_dask_has_sent",
    ]
    assert len({scope(f"tests/{name}") for name in on_the_cpu}) == 1
    others = [
        "cuda/test_compile.py::test_kernel[packed, 128]",
        "contract/test_attention.py::test_dtypes[simt-cupy-float32]",
        "contract/test_attention.py::test_dtypes[sm80-cupy-float16]",
        "contract/test_api_more.py::test_threads",
        "processes/test_dask_gpu.py::test_workers_with_a_gpu_each[causal-float16]",
        "processes/test_dask_gpu.py::test_workers_with_a_gpu_each[causal-float32]",
    ]
    assert len({scope(f"tests/{name}") for name in [*on_the_cpu, *others]}) == 1 + len(others)


def test_files_that_come_first_are_there():
    assert set(FIRST) <= {file.stem for file in TESTS.rglob("test_*.py")}


def test_processes_take_tests_by_scope(pytester, monkeypatch):
    """What pytest-xdist does with that: it once ignored its own marks, and every kernel of the CPU was compiled in every process."""
    pytester.makeconftest((TESTS / "conftest.py").read_text())
    pytester.makepyfile(
        test_cpu="""
        import os, pathlib, pytest, time

        def note(x):
            time.sleep(0.1)
            pathlib.Path(f"{x}-{os.environ['PYTEST_XDIST_WORKER']}").touch()

        @pytest.mark.parametrize("x", range(8))
        def test_on_the_cpu(x):
            note(f"cpu-{x}")

        @pytest.mark.full  # in an order that is drawn, once for both processes
        @pytest.mark.unproven("of processes")
        @pytest.mark.parametrize("x", [f"simt-{i}" for i in range(8)])
        def test_elsewhere(x):
            note(x)
        """
    )
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert pytester.runpytest_subprocess("-p", "xdist.plugin", "-n", "2", "--affected").parseoutcomes()["passed"] == 16
    ran = [file.name.split("-") for file in pytester.path.glob("*-gw*")]
    assert sorted(what + i for what, i, _ in ran) == [f"{what}{i}" for what in ("cpu", "simt") for i in range(8)]
    assert len({process for what, _, process in ran if what == "cpu"}) == 1
    assert {process for *_, process in ran} == {"gw0", "gw1"}
