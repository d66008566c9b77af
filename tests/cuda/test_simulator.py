"""The simt kernels in Numba's CUDA simulator, which has to be chosen before Numba is imported: hence in a process of their own."""

import os
import re
import subprocess
import sys

import pytest
from support import ROOT, TESTS

FILES = [str(file) for file in sorted(TESTS.rglob("test_*.py")) if "pytest.mark.simulator" in file.read_text()]


@pytest.mark.parametrize(
    ("options", "fewest"),  # so that a change of marks cannot leave the run empty
    [((), 40), pytest.param(("--full",), 60, marks=pytest.mark.full)],
    ids=["quick", "full"],
)
def test_simt_kernels_in_the_cuda_simulator(options, fewest):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "simulator", "-p", "no:cacheprovider", *options, *FILES],
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
    assert int(passed[1]) >= fewest
