"""A problem in a process of its own, which finds the package elsewhere. Compilers are imported once, and the process is a fork of that."""

import multiprocessing
import os
import sys
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parents[1]
COMPILERS = ["numba.cuda.extending", "numba_cuda", "ml_dtypes", "scipy.special", "pytest"]  # nothing that imports the package itself
LONGEST = 300  # seconds


class Ended(NamedTuple):
    """How it ended: the exit code, and what was printed."""

    code: int
    said: str


def _process(problem: str, package: Path, texts: Path, orders: int, output: Path) -> None:
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path[:0] = map(str, (package, TESTS, TESTS / "machine"))
    from problems import main

    sys.exit(main(problem, texts, orders))


def run(problem: str, package: Path, texts: Path, orders: int, output: Path) -> Ended:
    """A problem of `problems.PROBLEMS`, in some orders, with the package in a folder; texts of kernels are kept in another."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(COMPILERS)
    process = context.Process(target=_process, args=(problem, package, texts, orders, output))
    process.start()
    process.join(LONGEST)
    process.kill()
    process.join()
    return Ended(process.exitcode, output.read_text())
