"""The simt kernels in Numba's CUDA simulator, which has to be chosen before Numba is imported: hence in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

FEWEST = 25  # so that a change of marks cannot leave the run empty


def test_simt_kernels_in_the_cuda_simulator():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "simulator", "-p", "no:cacheprovider", str(Path(__file__).parent)],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(run.stdout)
    assert run.returncode == 0
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed
    assert int(passed[1]) >= FEWEST
