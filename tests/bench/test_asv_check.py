"""A malformed benchmark is found before any runs, by `measure.py` as by asv; and both describe the benchmarks in the same way."""

import json
import os
import subprocess
import sys

import pytest
from support.asv_suite import ALL, NO_ASV, ROOT, SUITE, asv, copy_of_the_suite, discovery


def malformed(**contents):
    def track_it(self, backend):
        return 1.0

    track_it.unit = "ms"
    return type("Bad", (), {"version": "1", "param_names": ("backend",), "params": (("cpu",),), "track_it": track_it} | contents)


@pytest.mark.parametrize(
    ("contents", "mistake"),
    [
        ({}, None),
        ({"track_it": lambda self, backend: 1.0}, "bad.Bad.track_it has no unit"),
        ({"version": None}, "bad.Bad.track_it has no version"),
        ({"param_names": ()}, "bad.Bad.track_it has 1 parameters with 0 names"),
        ({"setup": lambda self: None}, "bad.Bad.track_it: setup: too many positional arguments"),
        ({"setup": lambda self, backend, mask: None}, "bad.Bad.track_it: setup: missing a required argument: 'mask'"),
        ({"params": (("cpu",), (1,)), "param_names": ("a", "b")}, "bad.Bad.track_it: track_it: too many positional arguments"),
        ({"setup_cache": lambda self: 1}, "bad.Bad.track_it: track_it: too many positional arguments"),
    ],
)
def test_malformed_benchmarks_are_found_before_any_runs(contents, mistake):
    assert discovery.Benchmark("bad.Bad.track_it", malformed(**contents), "track_it").mistake() == mistake


BAD = '''"""A benchmark whose setup cannot be called."""


class Bad:
    version = "1"

    def setup(self, nothing):
        pass

    def track_it(self):
        return 1.0

    track_it.unit = "ms"
'''


def test_measure_refuses_a_malformed_suite(tmp_path):
    suite = copy_of_the_suite(tmp_path / "asv_bench")
    (suite / "benchmarks" / "bad.py").write_text(BAD)
    command = [sys.executable, suite / "measure.py", "--machine", "m", "--commit", 40 * "0", "--commit-date", "0"]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert run.returncode == 2
    assert "bad.Bad.track_it: setup: missing a required argument: 'nothing'" in run.stderr
    assert not (suite / "results").exists()


def test_asv_finds_nothing_wrong(tmp_path):
    pytest.importorskip("asv", reason=NO_ASV)
    checked = asv(copy_of_the_suite(tmp_path / "asv_bench"), "check", "--python=same")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "No problems found" in checked.stdout


def test_asv_finds_a_malformed_benchmark(tmp_path):
    pytest.importorskip("asv", reason=NO_ASV)
    suite = copy_of_the_suite(tmp_path / "asv_bench")
    (suite / "benchmarks" / "bad.py").write_text(BAD)
    checked = asv(suite, "check", "--python=same")
    assert checked.returncode != 0
    assert "bad.Bad.track_it: setup: wrong number of arguments" in checked.stdout + checked.stderr


def test_asv_describes_the_benchmarks_in_the_same_way(tmp_path):
    pytest.importorskip("asv", reason=NO_ASV)
    found = tmp_path / "found.json"
    code = "import sys, asv_runner.discovery as d; d.list_benchmarks(sys.argv[1], open(sys.argv[2], 'w'))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code, SUITE / "benchmarks", found], env=environment, check=True)
    described = {entry["name"]: entry for entry in json.loads(found.read_text())}
    assert set(described) == set(ALL)
    for name, entry in described.items():
        ours = json.loads(json.dumps(ALL[name].description))
        assert {key for key in entry | ours if entry.get(key) != ours.get(key)} <= {
            "code",
            "less_is_better",
            "setup_cache_key",
            "setup_cache_timeout",
        }
