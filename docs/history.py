"""The benchmark history as pages: one folder for each machine, in which every line is one set of parameters.

asv-tachyon takes the mean over all parameters of a benchmark. From one commit to the next that is the mean of other things if only some of
them were measured: with the slow backend left out, a mean falls by nine tenths although nothing has become faster. So each set of
parameters becomes a benchmark of its own here, and a machine shows those that were measured on it.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIGURATION = Path(__file__).parents[1] / "asv_bench" / "asv.conf.json"


def _run(module: str, *arguments) -> None:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    run = subprocess.run(command, env=os.environ | {"COLUMNS": "200"}, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{module} failed (numba_flash[docs] installs it):\n{run.stdout}{run.stderr}")


def write_pages(folder: Path) -> None:
    """``folder/MACHINE/index.html`` for each machine: data by asv, the page by asv-tachyon. Needs git."""
    with tempfile.TemporaryDirectory() as published:
        _run("asv", "publish", "--config", CONFIGURATION, "--html-dir", published)
        for machine in split(Path(published), folder):
            _run("asv_tachyon", "install", "--no-backup", folder / machine)


def split(published: Path, folder: Path) -> list[str]:
    """What ``asv publish`` wrote, with a folder for each machine and a benchmark for each set of parameters; names of the machines."""
    index = json.loads((published / "index.json").read_text())
    regressions = json.loads((published / "regressions.json").read_text())["regressions"]
    for machine in index["machines"]:
        pages, benchmarks = folder / machine, {}
        for graph in published.glob(f"graphs/**/machine-{machine}/**/*.json"):
            benchmark = index["benchmarks"].get(graph.stem)  # None: asv's summary, which its own pages show
            for name, series in _series(benchmark, graph).items() if benchmark else ():
                file = pages / graph.relative_to(published).with_name(f"{name}.json")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(series))
                unit = benchmark["unit"].replace("/s", " per s")  # asv-tachyon takes "/s" for operations per second
                benchmarks[name] = benchmark | {"name": name, "unit": unit, "params": [], "param_names": []}
        selections = [selection for selection in index["graph_param_list"] if selection["machine"] == machine]
        alone = {
            "machines": {machine: index["machines"][machine]},
            "graph_param_list": selections,
            "params": {key: sorted({selection[key] for selection in selections}) for key in selections[0]},
            "benchmarks": benchmarks,
        }
        (pages / "index.json").write_text(json.dumps(index | alone))
        here = [[_plain(name), *others] for name, *others in regressions if others[1]["machine"] == machine]
        (pages / "regressions.json").write_text(json.dumps({"regressions": here}))
    return list(index["machines"])


def _plain(name: str) -> str:
    """A name without the quotes of its parameters, which may begin a line."""
    return name.replace("'", "").replace("(", " (", 1)


def _series(benchmark: dict, graph: Path) -> dict[str, list]:
    """``[revision, value]`` of each set of parameters that has values."""
    points = json.loads(graph.read_text())
    if not benchmark["params"]:
        return {benchmark["name"]: points}
    found = {}
    for i, case in enumerate(itertools.product(*benchmark["params"])):
        series = [[revision, values[i]] for revision, values in points if values is not None and values[i] is not None]
        if series:
            found[_plain(f"{benchmark['name']}({', '.join(case)})")] = series
    return found
