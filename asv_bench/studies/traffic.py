"""Forward and backward of GPT-2 medium's attention: time, work and memory traffic of standard attention (CuPy) and of numba_flash.

The problem of the FlashAttention paper's figure 2 (arXiv:2205.14135): B = 64, H = 16, N = 1024, D = 64, float16, full and causal, no
dropout. Times are medians of turns, after a check against the float64 oracle. Bytes and operations are counted by Nsight Compute: this
script starts itself under `ncu`, with `--once`, for one forward and one backward call, and adds up all of their kernels. What ncu cannot
count is null in the file, with the reason. Operations are also counted by formula: 4 B H N^2 D forward; backward 8 for standard
attention, which makes four products, and 10 for numba_flash, which makes five; causal, numba_flash skips the half that is hidden.

    python asv_bench/studies/traffic.py --json FILE
"""

import csv
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import common

from numba_flash.bench import peers, timing
from numba_flash.bench.cases import Case, Cell

DRAM = ("dram__bytes_read.sum", "dram__bytes_write.sum")
TENSOR = (  # counters of operations on tensor cores: of Hopper's ncu, which knows them by instruction, and of others'
    re.compile(r"sm__ops_path_tensor_op_hg?mma_src_b?fp?16(_dst_b?fp?(16|32))?_sparsity_off"),
    re.compile(r"sm__ops_path_tensor_src_b?fp?16_dst_b?fp?(16|32)"),
)
SCALAR = {  # operations per thread and instruction elsewhere
    **{f"smsp__sass_thread_inst_executed_op_{kind}add_pred_on.sum": 1 for kind in "fh"},
    **{f"smsp__sass_thread_inst_executed_op_{kind}mul_pred_on.sum": 1 for kind in "fh"},
    **{f"smsp__sass_thread_inst_executed_op_{kind}fma_pred_on.sum": 2 for kind in "fh"},
}


def cells(options, mask: str) -> dict[str, Cell]:
    """The problem, by direction."""
    shape = (options.batch, options.heads, options.heads, options.length, options.head_dim)
    return {direction: Cell(direction, mask, options.dtype, *shape) for direction in ("forward", "backward")}


def flops(cell: Cell, ours: bool) -> float:
    """By formula, forward and backward."""
    product = 2 * cell.batch * cell.heads * cell.length**2 * cell.head_dim
    return product * (7 * (0.5 if cell.causal else 1) if ours else 6)


# ---- counting ------------------------------------------------------------------------------------------------------------------------


def once(contender: peers.Contender, cell: Cell, clock) -> None:
    """One forward and one backward call that a profiler sees, after one of each that it does not see; batch elements are alike."""
    case = Case(replace(cell, batch=1), clock.xp)
    case.cell = cell
    *case.arrays, case.do = (clock.xp.concatenate([x] * cell.batch) for x in (*case.arrays, case.do))
    case.sparse_do = case.do  # nothing is checked here
    contender.bind(case).repeat(1)
    clock.wait()
    if clock.place == "gpu":
        from cupyx.profiler import profile
    else:
        profile = nullcontext
    with profile():
        contender.bind(case).repeat(1)
        clock.wait()


def _ncu(*arguments: str) -> str:
    """What ncu prints; RuntimeError with its complaint if it fails."""
    try:
        run = subprocess.run(["ncu", *arguments], capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(f"ncu cannot be started: {error}") from None
    if run.returncode:
        complaints = [line for line in (run.stdout + run.stderr).splitlines() if "ERR" in line or "rror" in line]
        raise RuntimeError(f"ncu failed with status {run.returncode}: {' '.join(complaints[-2:])[:300]}")
    return run.stdout


def sums(printed: str) -> tuple[dict[str, float], int]:
    """Sums over all kernels of the metrics in a raw CSV page of ncu, and the number of kernels."""
    lines = printed.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    kernels = (
        [] if start is None else [row for row in csv.DictReader(lines[start:]) if (row["ID"] or "").isdigit()]
    )  # not units, nor remarks
    if not kernels:
        raise RuntimeError("ncu has seen no kernel")
    metrics = [name for name in kernels[0] if name is not None and "__" in name and "." in name]
    return {name: sum(float(kernel[name].replace(",", "")) for kernel in kernels) for name in metrics}, len(kernels)


def count(options, name: str, mask: str, metrics) -> tuple[dict[str, float], int]:
    """Sums of the metrics over one forward and one backward call in a process of its own, and the number of kernels."""
    sizes = [f"--{size}={getattr(options, size)}" for size in ("batch", "heads", "length", "head_dim", "dtype")]
    this = [sys.executable, str(Path(__file__).resolve()), "--once", name, "--mask", mask, *(s.replace("_", "-", 1) for s in sizes)]
    ncu = (
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--profile-from-start",
        "off",
        "--clock-control",
        "none",
        "--metrics",
        ",".join(metrics),
    )
    return sums(_ncu(*ncu, *this))


@cache
def tensor_metrics() -> list[str]:
    """Those counters of operations on tensor cores that this GPU has."""
    names = {line.split(maxsplit=1)[0] for line in _ncu("--query-metrics").splitlines() if line.strip()}
    families = ([f"{name}.sum" for name in sorted(names) if family.fullmatch(name)] for family in TENSOR)
    return next(filter(None, families), [])


def counters(options, name: str, mask: str) -> dict:
    """Bytes and operations as counted; null, with the reason, if they cannot be."""
    row = {"dram_bytes": None, "kernels": None, "tensor_flop": None, "scalar_flop": None}
    try:
        found, row["kernels"] = count(options, name, mask, DRAM)
        row["dram_bytes"] = sum(found.values())
        tensor = tensor_metrics()
        found, _ = count(options, name, mask, [*tensor, *SCALAR])
        row["tensor_flop"] = sum(found[metric] for metric in tensor) if tensor else None
        row["scalar_flop"] = sum(SCALAR[metric] * found[metric] for metric in SCALAR)
        row["counted_by"] = [*DRAM, *tensor, *SCALAR]
    except (RuntimeError, KeyError, ValueError) as error:
        row["reason"] = peers.sentence(error)
    return row


# ---- the study -----------------------------------------------------------------------------------------------------------------------


def rows_of(options, mask: str, invited: list[peers.Contender], clock) -> list[dict]:
    """A row for each contender."""
    problem, found = cells(options, mask), []
    outcomes = {d: timing.compare(cell, invited, clock, common.repeats(options, clock.place)) for d, cell in problem.items()}
    if clock.place == "gpu":
        clock.xp.get_default_memory_pool().free_all_blocks()  # for the processes that ncu watches
    for contender in invited:
        row = {"contender": contender.name, "mask": mask, "flop": flops(problem["forward"], contender.name == peers.OURS)}
        for direction, of in outcomes.items():
            outcome = of[contender.name]
            if outcome.status != "ok":
                raise RuntimeError(f"{contender.name}, {direction}, {mask}: {outcome.reason or f'error {outcome.error:.1e}'}")
            row |= {f"{direction}_ms": median(outcome.ms), f"{direction}_error": outcome.error}
        found.append(row | counters(options, contender.name, mask))
        print(found[-1], flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the study, or with `--once` what is counted of it."""
    parser = common.parser(__doc__)
    for size, default in {"batch": 64, "heads": 16, "length": 1024, "head-dim": 64}.items():
        parser.add_argument(f"--{size}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", default="float16", help="default float16")
    parser.add_argument("--mask", default="full,causal", metavar="full,causal", help="default both")
    parser.add_argument("--once", metavar="NAME", help="run one forward and one backward call of this contender for a profiler")
    options = parser.parse_args(arguments)
    clock, masks = common.clock(), options.mask.split(",")
    invited = {c.name: c for c in peers.contenders(None) if c.name in (peers.OURS, "CuPy" if clock.place == "gpu" else "NumPy")}
    with clock.current():
        if options.once:
            return once(invited[options.once], cells(options, masks[0])["backward"], clock)
        rows = [row for mask in masks for row in rows_of(options, mask, list(invited.values()), clock)]
    sizes = {name: getattr(options, name) for name in ("batch", "heads", "length", "head_dim", "dtype")}
    common.write(options, "traffic", clock.place, rows, **sizes)


if __name__ == "__main__":
    sys.exit(main())
