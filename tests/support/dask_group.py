"""Programs in a cluster of dask."""

import subprocess
import sys

from support import TESTS


def in_cluster(*program: str) -> None:
    """Run one of `dask_cluster.py`, in processes of its own."""
    run = subprocess.run([sys.executable, TESTS / "dask_cluster.py", *program], capture_output=True, text=True, timeout=400)
    print(run.stdout, run.stderr)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "right"
