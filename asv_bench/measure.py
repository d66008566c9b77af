"""Run the benchmarks in this process and write asv's result files: for machines without asv, git or network.

What is measured is the numba_flash beside this directory. `asv publish`, `asv show` and `asv compare` read what is written:
``benchmarks.json``, ``MACHINE/machine.json`` and ``MACHINE/COMMIT-existing-pyVERSION.json``.
"""

import argparse
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from discovery import Benchmark, discover  # noqa: E402  (beside this file)

MACHINE_FORMAT, BENCHMARKS_FORMAT, RESULTS_FORMAT = 1, 2, 2  # versions of asv's files
COLUMNS = ("result", "params", "version", "started_at", "duration")


# ---- measuring ---------------------------------------------------------------------------------------------------------------------------


class Runner:
    """Runs cases one after the other; what classes prepare once, by ``setup_cache``, is kept."""

    def __init__(self):
        self._caches, self._reasons = {}, set()
        self.failed = False

    def value(self, benchmark: Benchmark, case: tuple) -> float | None:
        """What is tracked; NaN if it is skipped, None if it failed, as asv has it."""
        print(benchmark.label(case), end="  ", flush=True)
        try:
            instance = benchmark.cls()
            arguments = (*self._cache(instance), *case)
            try:
                if hasattr(instance, "setup"):
                    instance.setup(*arguments)
            except NotImplementedError as reason:
                print("skipped, as above" if str(reason) in self._reasons else f"skipped: {reason}")
                self._reasons.add(str(reason))
                return math.nan
            value = float(f"{getattr(instance, benchmark.function)(*arguments):.6g}")
        except Exception:
            self.failed = True
            print("failed", flush=True)
            traceback.print_exc()
            return None
        print(f"{value:g} {benchmark.description['unit']}")
        return value

    def _cache(self, instance) -> tuple:
        cls = type(instance)
        if not hasattr(cls, "setup_cache"):
            return ()
        if cls not in self._caches:
            self._caches[cls] = instance.setup_cache()
        return (self._caches[cls],)


# ---- this machine, and this commit -------------------------------------------------------------------------------------------------------


def _cpu() -> str:
    try:
        return re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1]
    except (OSError, TypeError):
        return ""


def _gpu() -> str:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    except Exception:
        return "none"


def this_machine(name: str) -> dict[str, str]:
    """What asv keeps of a machine, and its GPU."""
    return {
        "machine": name,
        "os": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "cpu": _cpu(),
        "num_cpu": str(os.cpu_count()),
        "ram": str(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "gpu": _gpu(),
    }


def machine_of_record(name: str, output: Path) -> dict[str, str]:
    """This machine, as the first results under its name describe it; ValueError if that was another CPU, or another GPU."""
    here, file = this_machine(name), output / name / "machine.json"
    if not file.exists():
        return here
    recorded = {key: value for key, value in json.loads(file.read_text()).items() if key != "version"}
    device = "cpu" if here["gpu"] == "none" else "gpu"
    if recorded.get(device, "none") != here[device]:
        raise ValueError(f"{file} is of a machine with {device} {recorded.get(device, 'none')}; this one has {here[device]}")
    return recorded


def packages() -> dict[str, str]:
    """Versions of what is installed of all that numba_flash works with, or is compared with."""
    from numba_flash.bench.command import PACKAGES as PEERS
    from numba_flash.diagnose import PACKAGES

    found = {}
    for package in (*PACKAGES, *PEERS):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str | None:
    try:
        return subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit_and_date(commit: str | None, date: int | None) -> tuple[str, int]:
    """Full hash, and the author's date in milliseconds as asv has it; ValueError where git is needed and cannot tell."""
    if commit is not None and date is not None:
        if not re.fullmatch("[0-9a-f]{40}", commit):
            raise ValueError(f"--commit must be all 40 digits of the hash where --commit-date is given; got {commit}")
        return commit, date
    found = _git("show", "--no-patch", "--format=%H %at", f"{commit or 'HEAD'}^{{commit}}")
    if found is None:
        raise ValueError(f"git cannot tell what commit {commit or 'HEAD'} is: give --commit and --commit-date")
    if commit is None and _git("status", "--porcelain", "--", "../numba_flash"):
        raise ValueError("numba_flash/ is not as in HEAD: commit it, or say with --commit what is measured")
    full, seconds = found.split()
    return full, 1000 * int(seconds) if date is None else date


# ---- files -------------------------------------------------------------------------------------------------------------------------------


def _write(file: Path, data: dict, format_version: int, indent: int | None = 4) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data | {"version": format_version}, indent=indent, sort_keys=indent is not None) + "\n")


def _earlier(file: Path, benchmark: Benchmark) -> dict[tuple, float | None]:
    """Values by parameters that the file holds of this version of the benchmark."""
    content = json.loads(file.read_text()) if file.exists() else {"results": {}, "result_columns": []}
    row = dict(zip(content["result_columns"], content["results"].get(benchmark.name, []), strict=False))
    if row.get("version") != benchmark.cls.version or row["params"] != benchmark.description["params"] or row["result"] is None:
        return {}
    return dict(zip(benchmark.cases, row["result"], strict=True))


def measure(benchmarks: list[Benchmark], pattern: str, about: dict, file: Path) -> bool:
    """Run every case whose label `pattern` is found in, and write the file after each benchmark. True if nothing failed.

    Parameters
    ----------
    benchmarks : list of Benchmark
        All that there are.
    pattern : str
        Regular expression.
    about : dict
        What the file says beside the results.
    file : Path
        Results of the same commit that it holds of cases that are not run are kept.
    """
    runner, results = Runner(), json.loads(file.read_text())["results"] if file.exists() else {}
    for benchmark in benchmarks:
        selected = [case for case in benchmark.cases if re.search(pattern, benchmark.label(case))]
        if not selected:
            continue
        earlier, started = _earlier(file, benchmark), time.time()
        values = [runner.value(benchmark, case) if case in selected else earlier.get(case, math.nan) for case in benchmark.cases]
        times = (round(1e3 * started), round(time.time() - started, 3))
        results[benchmark.name] = [values, benchmark.description["params"], benchmark.cls.version, *times]
        _write(file, about | {"result_columns": COLUMNS, "results": results, "durations": {}}, RESULTS_FORMAT, indent=None)
    return not runner.failed


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 1 if a benchmark failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", required=True, metavar="NAME", help="whose history this belongs to, e.g. h200")
    parser.add_argument("--commit", metavar="HASH", help="what is measured; default HEAD")
    parser.add_argument("--commit-date", type=int, metavar="MS", help="of the author, in milliseconds since 1970; default: git tells")
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="DIR", help="default asv_bench/results")
    parser.add_argument("--bench", default="", metavar="REGEX", help="only those whose name(parameters) it is found in, as in asv")
    options = parser.parse_args(arguments)
    if not re.fullmatch(r"[\w.-]+", options.machine):
        parser.error(f"--machine: {options.machine!r} has other characters than letters, digits, '.', '_' and '-'")
    try:
        commit, date = commit_and_date(options.commit, options.commit_date)
        machine = machine_of_record(options.machine, options.output)
        benchmarks = discover()
    except ValueError as error:
        parser.error(str(error))
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    about = {
        "commit_hash": commit,
        "env_name": f"existing-py{python}",
        "date": date,
        "params": machine | {"python": python},
        "python": python,
        "requirements": packages(),
        "env_vars": {},
    }
    folder = options.output / options.machine
    _write(folder / "machine.json", machine, MACHINE_FORMAT)
    _write(options.output / "benchmarks.json", {b.name: b.description for b in benchmarks}, BENCHMARKS_FORMAT)
    return 0 if measure(benchmarks, options.bench, about, folder / f"{commit[:8]}-{about['env_name']}.json") else 1


if __name__ == "__main__":
    sys.exit(main())
