"""`asv_bench/`: each benchmark measures, what cannot run is skipped with its reason, and asv reads what `measure.py` writes."""

import json
import math
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from support.asv_suite import ALL, NO_ASV, asv, copy_of_the_suite, measure, starts, workloads

import numba_flash
from numba_flash.bench import options, peers, timing
from numba_flash.bench.options import OPTIONS
from numba_flash.bench.peers import Contender
from numba_flash.plan import BACKENDS

COMMIT, DATE = "0123456789abcdef0123456789abcdef01234567", 1_700_000_000_000
WHAT = ("--machine", "tiny", "--commit", COMMIT, "--commit-date", str(DATE))


@pytest.fixture(scope="module")
def tiny():
    """Small problems, few repeats, kernels from the usual cache, and this library again as its own peer."""
    twin = [Contender(f"twin on {b}", partial(peers.bind_ours, b), lambda place, dtype: None) for b in workloads.BACKENDS]
    contenders = peers.contenders
    with pytest.MonkeyPatch.context() as patch:
        for name, cells in workloads.WORKLOADS.items():
            length = 2048 if name == "memory" else 150
            for backend, cell in cells.items():
                patch.setitem(cells, backend, replace(cell, batch=1, heads=2, heads_kv=1, length=length, head_dim=16))
        patch.setattr(workloads, "REPEATS", {"cpu": 2, "gpu": 2})
        patch.setattr(workloads, "PEERS", {b: f"twin on {b}" for b in workloads.BACKENDS})
        patch.setattr(peers, "contenders", lambda backend: [*contenders(backend), *twin])
        patch.setattr(timing, "HOST_TURNS", 2)
        patch.setattr(starts.Import, "repeats", 1)
        patch.setattr(starts, "TemporaryDirectory", partial(nullcontext, None))
        yield


@pytest.fixture(scope="module")
def written(tiny, tmp_path_factory) -> Path:
    """What `measure.py` writes about all benchmarks."""
    folder = tmp_path_factory.mktemp("asv") / "results"
    assert measure.main([*WHAT, "--output", str(folder)]) == 0
    return folder


def results_in(folder: Path) -> dict:
    (file,) = folder.glob("tiny/01234567-existing-py3.*.json")
    return json.loads(file.read_text())


def values(folder: Path, name: str) -> dict[tuple, float | None]:
    content = results_in(folder)
    row = dict(zip(content["result_columns"], content["results"][name], strict=True))
    assert row["params"] == ALL[name].description["params"]
    return dict(zip(ALL[name].cases, row["result"], strict=True))


def why_not(backend: str) -> str | None:
    x = np.empty((1, 1, 1, 16), workloads.WORKLOADS["forward"][backend].dtype)
    try:
        numba_flash.plan(x, x, x, backend=backend)
    except NotImplementedError as reason:
        return str(reason)
    return None


# ---- the benchmarks ----------------------------------------------------------------------------------------------------------------------


def test_every_backend_has_every_workload():
    assert set(workloads.BACKENDS) == set(BACKENDS) == set(workloads.PEERS)
    for cells in workloads.WORKLOADS.values():
        assert set(cells) == set(BACKENDS)
    assert set(workloads.PEERS.values()) <= {contender.name for contender in peers.contenders(None)}


@pytest.mark.parametrize("name", ALL)
def test_every_benchmark_gives_numbers(name, written):
    """For the CPU each, for other backends where they can run."""
    for case, value in values(written, name).items():
        if case == () or why_not(case[0]) is None:
            assert math.isfinite(value), case
            assert value > 0, case
        else:
            assert math.isnan(value), case


def test_what_cannot_run_is_skipped_with_the_reason_of_the_library(tiny, capsys):
    refused = {backend: why_not(backend) for backend in BACKENDS if why_not(backend)}
    if not refused:
        pytest.skip("every backend can run here")
    for backend, reason in refused.items():
        with pytest.raises(NotImplementedError) as skipped:
            workloads.demand(backend, workloads.WORKLOADS["forward"][backend])
        assert str(skipped.value) == reason
        runner, benchmark = measure.Runner(), ALL["attention.Decode.track_milliseconds"]
        assert math.isnan(runner.value(benchmark, (backend,)))
        assert f"attention.Decode.track_milliseconds('{backend}')  skipped: {reason}\n" in capsys.readouterr().out
        assert not runner.failed


def test_a_peer_that_is_missing_is_skipped_with_its_reason(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # as if it were not installed
    monkeypatch.setitem(workloads.PEERS, "cpu", "torch CPU")
    for name in ("forward", "decode"):
        with pytest.raises(NotImplementedError, match="torch CPU: cannot import torch: ModuleNotFoundError"):
            workloads.timed(name, "cpu", "full", beside_peer=True)
    with pytest.raises(NotImplementedError, match="torch CPU: cannot import torch"):
        workloads.host_microseconds("cpu", beside_peer=True)


@pytest.mark.parametrize("name", ["forward", "decode"])
def test_wrong_results_are_not_timed(name, tiny, monkeypatch):
    forward = peers.forward
    monkeypatch.setattr(peers, "forward", lambda *arrays, **options: 2 * forward(*arrays, **options))
    with pytest.raises(RuntimeError, match=r"numba_flash: is off by 1\.0e\+00"):
        workloads.timed(name, "cpu", "full", beside_peer=False)
    with pytest.raises(RuntimeError, match="numba_flash is wrong, or fails"):
        workloads.host_microseconds("cpu", beside_peer=False)


def test_decoding_is_one_query_against_all_keys(tiny, monkeypatch):
    shapes, forward = set(), peers.forward
    monkeypatch.setattr(
        peers, "forward", lambda *arrays, **options: shapes.add(tuple(x.shape for x in arrays)) or forward(*arrays, **options)
    )
    workloads.timed("decode", "cpu", "full", beside_peer=False)
    assert shapes == {((1, 2, 1, 16), (1, 1, 150, 16), (1, 1, 150, 16))}


@pytest.mark.parametrize("option", OPTIONS[1:])
def test_an_option_that_is_left_out_is_noticed(option, tiny, monkeypatch):
    """What is checked has the option, what it is compared with has not; both are timed."""
    ours, plain = workloads.beside_plain("cpu", option, "backward")
    assert len(ours.ms) == len(plain.ms) == 2
    asked, of = [], options.ours
    monkeypatch.setattr(options, "ours", lambda name, heads: asked.append(name) or of(name, heads))
    workloads.beside_plain("cpu", option, "forward")
    assert {"none", option} == set(asked)
    forward = peers.forward
    monkeypatch.setattr(peers, "forward", lambda q, k, v, causal, backend, **given: forward(q, k, v, causal=causal))
    with pytest.raises(RuntimeError, match="numba_flash: is off by"):
        workloads.beside_plain("cpu", option, "forward")


def test_a_small_problem_is_timed_by_call(tiny, monkeypatch):
    """Of a graph of many calls, one's share."""
    made = []
    monkeypatch.setattr(timing.HostClock, "graph", lambda self, bound, calls: made.append(calls) or bound)
    monkeypatch.setattr(timing, "take_turns", lambda bound, *more: {name: [4.0] for name in bound})
    assert workloads.gpu_microseconds("cpu", workloads.SMALL[0]) == 4000 / workloads.CALLS
    assert made == [workloads.CALLS]


def test_a_failure_in_a_process_of_its_own_is_told():
    with pytest.raises(RuntimeError, match=r"calls failed in its process:\n(.|\n)*missing 8 required positional arguments"):
        starts._probe("calls", "cpu", "{}")


def test_first_calls_compile_in_a_directory_of_their_own(monkeypatch):
    seen = []
    done = subprocess.CompletedProcess([], 0, "{}")
    monkeypatch.setattr(starts, "TemporaryDirectory", TemporaryDirectory)
    monkeypatch.setattr(starts.subprocess, "run", lambda command, env, **options: seen.append(env) or done)
    assert set(starts.FirstCall().setup_cache()["cpu"]) == {"compiling", "cached"}
    (directory, *others) = {env[name] for env in seen[:2] for name in ("NUMBA_FLASH_CACHE_DIR", "NUMBA_CACHE_DIR")}
    assert others == []
    assert not Path(directory).exists()


# ---- the files ---------------------------------------------------------------------------------------------------------------------------


def test_files_hold_all_benchmarks(written):
    described = json.loads((written / "benchmarks.json").read_text())
    assert described.pop("version") == 2
    assert set(described) == set(ALL) == set(results_in(written)["results"])
    for name, entry in described.items():
        assert set(entry) - {"timeout"} == {"code", "less_is_better", "name", "param_names", "params", "type", "unit", "version"}
        assert entry["less_is_better"] == (entry["unit"] not in ("TFLOP/s", "GB/s"))
        assert (entry["name"], entry["type"]) == (name, "track")
        assert len(entry["params"]) == len(entry["param_names"])
    machine = json.loads((written / "tiny" / "machine.json").read_text())
    assert machine.pop("version") == 1
    assert machine["machine"] == "tiny"
    assert machine["num_cpu"] == str(os.cpu_count())
    content = results_in(written)
    assert (content["commit_hash"], content["date"], content["version"]) == (COMMIT, DATE, 2)
    assert content["params"] == machine | {"python": content["python"]}
    assert content["requirements"]["numpy"] == np.__version__


def test_a_second_run_keeps_what_it_does_not_repeat(written, tmp_path, monkeypatch):
    folder, name = shutil.copytree(written, tmp_path / "results"), "attention.Forward.track_milliseconds"
    before = results_in(folder)["results"]
    monkeypatch.setattr(workloads, "timed", lambda *what: (None, [timing.Outcome("ok", ms=[4.25])]))
    assert measure.main([*WHAT, "--output", str(folder), "--bench", r"Forward\.track_milliseconds\('cpu', 'full'"]) == 0
    after = results_in(folder)["results"]
    assert {n for n in ALL if repr(before[n]) != repr(after[n])} == {name}
    assert repr(after[name][0][1:]) == repr(before[name][0][1:])
    assert after[name][0][0] == 4.25


def test_what_is_not_run_is_skipped_rather_than_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(workloads, "timed", lambda *what: (None, [timing.Outcome("ok", ms=[4.25])]))
    assert measure.main([*WHAT, "--output", str(tmp_path), "--bench", r"Forward\.track_milliseconds\('cpu', 'full'"]) == 0
    ran, *others = values(tmp_path, "attention.Forward.track_milliseconds").values()
    assert ran == 4.25
    assert others
    assert all(math.isnan(value) for value in others)


def test_a_failure_is_null_and_the_exit_status(written, tmp_path, monkeypatch, capsys):
    def fail(*what):
        raise RuntimeError("no kernel")

    folder = shutil.copytree(written, tmp_path / "results")
    monkeypatch.setattr(workloads, "host_microseconds", fail)
    assert measure.main([*WHAT, "--output", str(folder), "--bench", "Overhead.track"]) == 1
    assert set(values(folder, "attention.Overhead.track_microseconds").values()) == {None}
    assert "RuntimeError: no kernel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine", "a/b"], "--machine: 'a/b' has other characters than"),
        (["--machine", "a", "--commit", "0123", "--commit-date", "1"], "--commit must be all 40 digits"),
        (
            ["--machine", "a", "--commit", "no-such-commit"],
            "git cannot tell what commit no-such-commit is: give --commit and --commit-date",
        ),
        ([], "the following arguments are required: --machine"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        measure.main([*arguments, "--output", str(tmp_path)])
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


def test_a_name_belongs_to_one_machine(tmp_path, capsys):
    measure._write(tmp_path / "tiny" / "machine.json", measure.this_machine("tiny") | {"cpu": "Z80", "gpu": "none such"}, 1)
    with pytest.raises(SystemExit):
        measure.main([*WHAT, "--output", str(tmp_path)])
    assert "machine.json is of a machine with" in capsys.readouterr().err


# ---- asv itself --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """``git(...)`` in a new repository, where `measure.py` believes itself to be."""
    if shutil.which("git") is None:
        pytest.skip("needs git")

    def git(*arguments):
        who = ("-c", "user.name=n", "-c", "user.email=e")
        return subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--initial-branch=main")
    (tmp_path / "asv_bench").mkdir()
    monkeypatch.setattr(measure, "HERE", tmp_path / "asv_bench")
    return git


def test_git_tells_the_commit_and_its_date(repository, tmp_path):
    repository("commit", "--allow-empty", "--message", "m", "--date", "1700000000 +0100")
    head = repository("rev-parse", "HEAD")
    assert measure.commit_and_date(None, None) == measure.commit_and_date(head[:7], None) == (head, DATE)
    assert measure.commit_and_date(head, 5) == (head, 5)
    (tmp_path / "numba_flash").mkdir()
    (tmp_path / "numba_flash" / "api.py").touch()
    with pytest.raises(ValueError, match="numba_flash/ is not as in HEAD"):
        measure.commit_and_date(None, None)
    assert measure.commit_and_date("HEAD", None) == (head, DATE)


def test_asv_publishes_shows_and_compares(written, repository, tmp_path):
    """The results of `written`, as if measured at two commits."""
    pytest.importorskip("asv", reason=NO_ASV)
    suite = copy_of_the_suite(tmp_path / "suite", tmp_path)
    shutil.copytree(written, suite / "results", ignore=shutil.ignore_patterns("0123*"))
    content = results_in(written)
    for factor in (1, 2):
        repository("commit", "--allow-empty", "--message", f"times {factor}")
        commit, date = measure.commit_and_date(None, None)
        rows = {n: [[None if x is None else factor * x for x in row[0]], *row[1:]] for n, row in content["results"].items()}
        file = suite / "results" / "tiny" / f"{commit[:8]}-{content['env_name']}.json"
        measure._write(file, content | {"commit_hash": commit, "date": date, "results": rows}, 2, indent=None)

    published = asv(suite, "publish")
    assert published.returncode == 0, published.stdout + published.stderr
    assert "WARNING" not in published.stdout + published.stderr
    index = json.loads((suite / "html" / "index.json").read_text())
    assert (index["project"], set(index["benchmarks"])) == ("numba_flash", set(ALL))
    assert list(index["machines"]) == index["params"]["machine"] == ["tiny"]
    (graph,) = (suite / "html" / "graphs").rglob("machine-tiny/**/starts.Import.track_milliseconds.json")
    value = values(written, "starts.Import.track_milliseconds")[()]
    assert [y for _, y in json.loads(graph.read_text())] == [value, 2 * value]

    shown = asv(suite, "show", "main~1").stdout
    assert all(f"{name} [tiny/{content['env_name']}]" in shown for name in ALL)
    assert f"{value}" in shown
    compared = asv(suite, "compare", "main~1", "main").stdout.splitlines()
    (line,) = (line for line in compared if "attention.Forward.track_milliseconds('cpu', 'causal')" in line)
    assert line.startswith("| +")
    assert " 2.00 " in line
