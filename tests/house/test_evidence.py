"""Traces on paper of what is launched on the machine: they tell apart what a result depends on, and nothing else."""

import evidence
import numpy as np
import pytest
from support import SIMULATED, TESTS, random_inputs

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import machine

import numba_flash


def paper(backend="sm90", kind="forward", seed=3, result=lambda o: o, **options) -> list[str]:
    """What a trace on paper says of a call, of whose results the first is compared."""
    with evidence.traced(paper=True) as trace, machine():
        q, k, v, do = random_inputs(nq=70, nk=90, d=64, hq=2, hk=2, dtype="float16", seed=seed)
        o, lse = numba_flash.forward(q, k, v, backend=backend, return_lse=True, **options)
        if kind == "backward":
            o, *_ = numba_flash.backward(do, q, k, v, o, lse, backend=backend, **options)
        evidence.compared(result(o))
    assert trace.launches > 0
    return [trace.events, *map(repr, trace.kernels)]


@pytest.mark.parametrize("backend", ["sm90", "sm80", "simt"])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_trace_is_the_same_for_the_same_call(backend, kind):
    assert paper(backend, kind) == paper(backend, kind)


MASKS = [{"mask": np.random.default_rng(seed).random((70, 90)) < 0.5} for seed in (1, 2)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"scale": 0.3}),
        ({}, {"seed": 4}),
        ({"causal": True}, {"causal": True, "q_start": 0}),
        MASKS,
        [{"dropout": 0.3, "rng": (1, offset)} for offset in (1, 2)],
        [{"kv_lengths": np.array([90, n])} for n in (50, 51)],
    ],
    ids=["scale", "values", "band", "mask", "state", "lengths"],
)
def test_a_trace_tells_calls_apart(first, second):
    assert paper(**first) != paper(**second)


def test_a_trace_tells_what_the_host_makes_of_results():
    whole, *others = (paper(result=made) for made in (np.copy, lambda o: o[:, ::-1], lambda o: o.swapaxes(1, 2), lambda o: 2 * o))
    assert whole not in others
    assert whole == paper()


def test_addresses_are_refused():
    with evidence.traced(paper=True), pytest.raises(ValueError, match="an address, 0x"):
        evidence.uses(object())


def test_values_count_as_far_as_all_machines_agree():
    x = np.linspace(0.1, 1, 7)
    digests = {evidence._digest(y) for y in (x, x * (1 + 2**-50), np.where(x > 2, np.nan, x))}
    assert len(digests) == 1
    assert evidence._digest(x * (1 + 2**-20)) not in digests
    assert evidence._digest(np.array([np.nan])) == evidence._digest(-np.array([np.nan]))


SOURCE = '''
"""What it is about."""
import helper
TABLE = {1: 2}
TABLE |= {3: 4}
TABLE[5] = OTHER = 6
LIMIT = 7

def test_it():
    assert helper

def test_other():
    assert LIMIT
'''
HELPER = "import another\nTABLE = {1: 2}\nvalue = 1  # of something\n"


@pytest.fixture
def source_of(tmp_path, monkeypatch):
    """``source_of(edited, old, new)``: the hash of `test_it`, where one of three files is edited."""

    def hashed(edited="test_this.py", old="", new=""):
        for name, text in (("test_this.py", SOURCE), ("helper.py", HELPER), ("another.py", "x = 1\n")):
            assert name != edited or old in text
            (tmp_path / name).write_text(text.replace(old, new) if name == edited and old else text)
        monkeypatch.setattr(evidence, "HELPERS", {name: tmp_path / f"{name}.py" for name in ("helper", "another")})
        monkeypatch.setattr(evidence, "TABLES", {"test_this": {"TABLE", "OTHER"}})
        evidence._helper.cache_clear()
        evidence.own_source.cache_clear()
        return evidence.own_source(tmp_path / "test_this.py", "test_it")

    yield hashed
    evidence._helper.cache_clear()
    evidence.own_source.cache_clear()


@pytest.mark.parametrize(
    ("edited", "old", "new"),
    [
        ("test_this.py", "assert helper", "assert helper.value"),
        ("test_this.py", "LIMIT = 7", "LIMIT = 8"),
        ("helper.py", "value = 1", "value = 2"),
        ("helper.py", "{1: 2}", "{1: 3}"),
        ("another.py", "x = 1", "x = 2"),
    ],
)
def test_a_test_is_a_function_of_its_source(source_of, edited, old, new):
    assert source_of(edited, old, new) != source_of()


@pytest.mark.parametrize(
    ("edited", "old", "new"),
    [
        ("test_this.py", "assert LIMIT", "assert LIMIT > 1"),
        ("test_this.py", "{1: 2}", "{1: 3}"),
        ("test_this.py", "{3: 4}", "{3: 5}"),
        ("test_this.py", "= 6", "= 8"),
        ("test_this.py", "it is about", "this tests"),
        ("test_this.py", "\ndef test_it", "\n\n\ndef test_it"),
        ("helper.py", "of something", "of something else"),
    ],
)
def test_a_test_is_no_function_of_others_nor_of_comments(source_of, edited, old, new):
    assert source_of(edited, old, new) == source_of()


@pytest.mark.parametrize(
    ("backend", "test", "some", "none"),
    [
        (
            "cpu",
            "contract/test_options.py",
            ("cpu.softmax", "scoremod.functions", "api"),
            ("cuda.sm", "cuda.simt", "cuda.score.modify", "dask", "bench"),
        ),
        ("cpu", "processes/test_dask.py", ("cpu.softmax", "dask.tasks"), ("cuda.sm", "cuda.simt", "bench")),
        ("simulator", "contract/test_options.py", ("cuda.simt.forward", "cuda.passes.merge", "api"), ("cuda.sm", "dask", "bench")),
    ],
)
def test_a_backend_consists_of_its_modules_and_what_they_import(backend, test, some, none):
    found = evidence.modules_of_backend(backend, TESTS / test)
    assert found >= {*some}
    assert not [module for module in found if module.startswith(none)]


TREE = (
    "tests/docs/test_it.py",
    "tests/docs/test_other.py",
    "docs/examples/program.py",
    "asv_bench/studies/study.py",
    "numba_flash/oracle.py",
    "numba_flash/reference.py",
    "numba_flash/cuda/sm90/forward/forward.py",
)


@pytest.mark.parametrize(
    ("backend", "found"),
    [("cpu", TREE[:1] + TREE[2:3] + TREE[4:6]), (None, TREE[:1] + TREE[2:3] + TREE[4:])],
)
def test_a_test_of_the_host_is_a_function_of_what_it_runs(tmp_path, monkeypatch, backend, found):
    monkeypatch.setattr(evidence, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(evidence, "package", lambda: tmp_path / "numba_flash")
    monkeypatch.setattr(evidence, "of_backend", lambda *_: "its modules")

    def hashed(edited=""):
        for name in TREE:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"x = {name == edited}\n")
        evidence.own_source.cache_clear()
        evidence.sources.cache_clear()
        return evidence.host_sources(tmp_path / TREE[0], "test_it", backend)

    before = hashed()
    assert [name for name in TREE if hashed(name) != before] == [*found]
    evidence.own_source.cache_clear()
    evidence.sources.cache_clear()
