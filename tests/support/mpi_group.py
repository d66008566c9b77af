"""Programs in processes of MPI."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import support

PROCESSES = support.TESTS / "mpi_processes.py"


def mpi(size: int, *program, options=()):
    """A program in so many processes."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    command = [mpiexec, *options, "-n", str(size), sys.executable, "-m", "mpi4py", *program]
    environment = os.environ | {"NUMBA_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # as in a container
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
