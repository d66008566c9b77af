"""The simt kernels in Numba's CUDA simulator, which has to be chosen before Numba is imported: hence in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import evidence
import pytest
from support import ROOT, TESTS

FILES = [path for path in sorted(TESTS.rglob("test_*.py")) if path != Path(__file__) and "pytest.mark.simulator" in path.read_text()]


def simulated(*arguments) -> int:
    """How many tests passed in the simulator, none of them failing."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "simulator", "-p", "no:cacheprovider", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(run.stdout)
    assert run.returncode == 0
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed
    return int(passed[1])


def test_simt_kernels_in_the_cuda_simulator():
    assert simulated(*FILES) >= 20  # so that a change of marks cannot leave the run empty


@pytest.mark.full
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_of_a_file_in_the_cuda_simulator(path):
    if (trace := evidence.current()) is not None:
        trace.process(evidence.own_source(path), evidence.of_backend("simulator", path))
    assert simulated("--full", path) >= 1
