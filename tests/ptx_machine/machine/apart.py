"""A problem in a process of its own, which finds the package elsewhere. Compilers are imported once, and the process is a fork of that."""

import multiprocessing
import os
import sys
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import evidence

TESTS = Path(__file__).resolve().parents[2]
COMPILERS = ["numba.cuda.extending", "numba_cuda", "ml_dtypes", "scipy.special", "pytest"]  # nothing that imports the package itself
LONGEST = 300  # seconds


class Ended(NamedTuple):
    """How it ended: the exit code, and what was printed."""

    code: int
    said: str


def _process(package: Path, output: Path, function: str, *arguments) -> None:
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path[:0] = map(str, (package, TESTS))
    from ptx_machine.problems import problems

    sys.exit(getattr(problems, function)(*arguments))


def _ended(package: Path, output: Path, function: str, *arguments) -> Ended:
    """A function of `problems`, with the package in a folder; what is printed goes to a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(COMPILERS)
    process = context.Process(target=_process, args=(package, output, function, *arguments))
    process.start()
    process.join(LONGEST)
    process.kill()
    process.join()
    return Ended(process.exitcode, output.read_text())


def run(problem: str, package: Path, texts: Path, orders: int, output: Path) -> Ended:
    """A problem of `problems.PROBLEMS`, in some orders, with the package in a folder; texts of kernels are kept in another."""
    return _ended(package, output, "main", problem, texts, orders)


def foresee(problem: str, *others) -> None:
    """Let the test that runs depend on a problem, and on others that it knows of; on paper it ends here."""
    if (trace := evidence.current()) is not None:
        trace.process(_on_paper(problem), *others)


@cache
def _on_paper(problem: str) -> str:
    """Hash of what a problem depends on."""
    with NamedTemporaryFile() as file:
        ended = _ended(TESTS.parent, Path(file.name), "trace", problem)
    assert ended.code == 0, ended.said
    return ended.said.split()[-1]
