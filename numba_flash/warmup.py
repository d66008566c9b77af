"""``python -m numba_flash warmup``: compile, ahead of first use, the kernels that a grid of problems takes, and keep them on disk."""

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial

import numpy as np

from numba_flash.arguments import arrays
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, ForwardInputs, ForwardResults, bind
from numba_flash.bench import grid
from numba_flash.bench.cases import Cell, dtype_of
from numba_flash.bench.progress import track
from numba_flash.cuda.runtime import compile, launch
from numba_flash.cuda.runtime.launch import Gpu, gpu
from numba_flash.files import disk, notice
from numba_flash.plan import choose, prepare

ABSENT_MULTIPROCESSORS = 132  # of a GPU that is not here: an H100 SXM's; how many there are decides whether keys are split into parts
MOST_JOBS = 8
NOT_KEPT = "nothing is kept (a warning says why)"
CPU_LENGTH = 8  # kernels for the CPU do not depend on sizes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    grid.add_options(parser, "both")
    parser.add_argument(
        "--arch", type=_capability, metavar="X.Y", help="compile for a GPU of this compute capability, which need not be here"
    )
    jobs = min(MOST_JOBS, os.cpu_count() or 1)
    parser.add_argument("--jobs", type=grid.positive, default=jobs, help=f"processes; default one per CPU thread, at most {MOST_JOBS}")


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a compute capability such as 9.0")
    return int(major), int(minor)


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Compile, print a line for each kernel, and write what was asked for.

    Parameters
    ----------
    options : Namespace
        What `parser` made of the command line.
    parser : ArgumentParser
        Whose ``error`` says what is wrong with them.

    Returns
    -------
    int
        1 if a problem of the grid cannot run, or a kernel did not compile or is not kept; else 0.
    """
    no_gpu = grid.no_gpu(options)
    if options.arch is not None:
        if options.backend == "cpu" or launch.simulated():
            parser.error("--arch: neither --backend cpu nor Numba's CUDA simulator has a GPU")
        for package in ("numba_cuda", "cuda.core"):
            grid.need(parser, "--arch", package, True)
    place = "cpu" if no_gpu and options.arch is None else "gpu"
    cells = grid.cells(options, parser, place)
    if place == "cpu":
        print(f"for the CPU ({no_gpu})")
        tasks, refused, jobs = _cpu_tasks(cells), {}, 1  # processes that write to Numba's index at the same time would lose entries
    else:
        there = _gpu(options.arch)
        print("for compute capability {}.{}, kept in {}".format(*there.capability, compile.cache_directory() or "no directory"))
        tasks, refused = _gpu_tasks(cells, options.backend, there)
        jobs = options.jobs
        if compile.place() is None:
            tasks, refused = [], refused | {NOT_KEPT: "all kernels"}
    for sentence, what in refused.items():
        print(f"cannot: {' '.join(str(what).split())}: {sentence}")
    kernels = []
    for row in track(_compiled(tasks, jobs), len(tasks), lambda row: row["kernel"]):
        kernels.append(row)
        print(line(row), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"place": place, "refused": [*refused], "kernels": kernels}, indent=1))
    return int(bool(refused) or any("error" in row for row in kernels))


def line(row: dict) -> str:
    """One kernel, as text."""
    if "error" in row:
        return f"failed    {row['kernel']}: {row['error']}"
    used = f"{row['registers']:>4} registers {row['spill_bytes']:>4} B spilled  " if "registers" in row else ""
    return f"{row['status']:<8} {row['seconds']:>6.1f} s  {used}{row['kernel']}"


def _compiled(tasks: list, jobs: int):
    """What each task returns, as it is finished, by that many processes."""
    jobs = min(jobs, max(len(tasks), 1))
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=notice.quiet) as pool:
        for future in as_completed([pool.submit(task) for task in tasks]):
            yield future.result()


def _timed(name: str, work) -> dict:
    """The row of one kernel: ``work()`` says whether it was found on disk, and what else there is to tell."""
    start = time.perf_counter()
    try:
        found, more = work()
    except Exception as error:
        return {"kernel": name, "error": f"{type(error).__name__}: {error}"}
    return {"kernel": name, "status": "cached" if found else "compiled", "seconds": time.perf_counter() - start} | more


# ---- on the CPU --------------------------------------------------------------------------------------------------------------------------


def _cpu_tasks(cells: list[Cell]) -> list:
    """One for each pass and dtype."""
    return [partial(_compile_for_cpu, *each) for each in dict.fromkeys((cell.direction, cell.dtype) for cell in cells)]


def _compile_for_cpu(direction: str, dtype: str) -> dict:
    from numba_flash import backward, forward
    from numba_flash.cpu import kernels as cpu_kernels

    def work():
        dispatchers = [each for each in vars(cpu_kernels).values() if hasattr(each, "stats")]
        x = np.zeros((CPU_LENGTH, CPU_LENGTH), dtype_of(dtype))
        o, lse = forward(x, x, x, return_lse=True, backend="cpu")
        if direction == "backward":
            backward(o, x, x, x, o, lse, backend="cpu")
        found = not any(sum(each.stats.cache_misses.values()) for each in dispatchers)
        if not found and disk.given_up():
            raise OSError(f"compiled, but {NOT_KEPT}")
        return found, {}

    return _timed(f"cpu {direction} {dtype}", work)


# ---- for a GPU ---------------------------------------------------------------------------------------------------------------------------


def _gpu(capability: tuple[int, int] | None) -> Gpu:
    """The current GPU, or one of that capability which is not here."""
    if capability is not None:
        return Gpu(0, capability, ABSENT_MULTIPROCESSORS)
    return gpu(arrays.current_gpu().id)


def _gpu_tasks(cells: list[Cell], backend: str | None, gpu: Gpu) -> tuple[list, dict[str, Cell]]:
    """One for each kernel of all cells; and the cells that cannot run, by the reason."""
    found, refused = {}, {}
    for cell in cells:
        try:
            found |= dict.fromkeys(kernels_of(cell, backend, gpu))
        except NotImplementedError as error:
            refused.setdefault(str(error), cell)
    return [partial(_compile_for_gpu, *kernel, gpu.capability) for kernel in found], refused


def _compile_for_gpu(builder: str, config: tuple, capability: tuple[int, int]) -> dict:
    def work():
        kernel = builder, config, capability
        found = compile.kept(*kernel) is not None
        if not found and compile.compiled(*kernel) != compile.kept(*kernel):
            raise OSError(f"compiled, but {NOT_KEPT}")
        return found, compile.kept_resources(*kernel)

    return _timed(f"{builder} {compile.of_config(config)}", work)


def kernels_of(cell: Cell, backend: str | None, gpu: Gpu) -> list[tuple[str, tuple]]:
    """(builder, config) of every kernel that calls of `forward`, or of it with ``return_lse=True`` and of `backward`, launch.

    Parameters
    ----------
    cell : Cell
        The problem.
    backend : str or None
        Demanded by the user.
    gpu : Gpu
        Where they will run; it need not be here.

    Raises
    ------
    NotImplementedError
        No backend, or not the one demanded, can run it there.
    """
    dtype = dtype_of(cell.dtype)
    q = np.empty((cell.batch, cell.heads, cell.length, cell.head_dim), dtype)  # nobody reads or writes any of these
    k = np.empty((cell.batch, cell.heads_kv, cell.length, cell.head_dim), dtype)
    problem = bind(q, k, k, causal=cell.causal)
    lse = np.empty(q.shape[:-1], problem.lse_dtype)

    def launches(kind, inputs, results):
        chosen = choose(problem, inputs, backend, kind, gpu=gpu).backend
        on_paper = (type(x)(*map(Layout.of, x)) for x in (inputs, results))
        return [(launch.builder, launch.config) for launch in prepare(chosen, kind, problem, *on_paper, gpu=gpu).launches]

    forward = ForwardInputs(q, k, k)
    if cell.direction == "forward":
        return launches("forward", forward, ForwardResults(q, None))
    backward = BackwardInputs(q, q, k, k, q, lse)
    return launches("forward", forward, ForwardResults(q, lse)) + launches("backward", backward, BackwardResults(q, k, k))
