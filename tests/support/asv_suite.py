"""What the tests of `asv_bench/` share: its modules, copies of it, and asv itself."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from support import ROOT

SUITE = ROOT / "asv_bench"
sys.path.insert(0, str(SUITE))

import discovery  # noqa: E402
import measure  # noqa: E402, F401
from benchmarks import probe, starts, workloads  # noqa: E402, F401

ALL = {benchmark.name: benchmark for benchmark in discovery.discover()}
NO_ASV = "needs asv (numba_flash[bench])"


def copy_of_the_suite(folder: Path, repository: Path | str = "..") -> Path:
    shutil.copytree(SUITE, folder, ignore=shutil.ignore_patterns("results", "html", "__pycache__"))
    configuration = folder / "asv.conf.json"
    configuration.write_text(configuration.read_text().replace('"repo": ".."', f'"repo": "{repository}"'))
    return folder


def asv(suite: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"ASV_PYTHONPATH": str(ROOT), "HOME": str(suite), "COLUMNS": "200"}
    command = [sys.executable, "-m", "asv", "--config", str(suite / "asv.conf.json"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)
