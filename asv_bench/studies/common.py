"""What the studies share: where they run, their options, and the file that they write."""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

BENCH = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(BENCH.parent), str(BENCH)]

import measure  # noqa: E402  (of asv_bench)

from numba_flash.bench import timing  # noqa: E402
from numba_flash.bench.command import REPEATS  # noqa: E402
from numba_flash.cuda.runtime import launch  # noqa: E402


def clock(xp_of: str | None = None) -> timing.HostClock:
    """Where arrays live, and how time is told there: the GPU if there is one, unless "cpu" is demanded."""
    on_cpu = xp_of == "cpu" or launch.simulated() or launch.why_not(np.empty(0)) is not None
    return timing.HostClock() if on_cpu else timing.GpuClock()


def parser(doc: str) -> argparse.ArgumentParser:
    """Options that every study has."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    made.add_argument("--commit", metavar="HASH", help="what is measured, for the file")
    made.add_argument("--repeats", type=int, metavar="R", help="rounds in which each is timed once; default 10, on the CPU 5")
    return made


def numbers(text: str) -> list[int]:
    """Integers with commas between them."""
    return [int(part) for part in text.split(",")]


def repeats(options: argparse.Namespace, place: str) -> int:
    """Rounds that were asked for, or those of the bench."""
    return options.repeats or REPEATS[place]


def write(options: argparse.Namespace, study: str, place: str, rows: list[dict], **more) -> None:
    """The file of a study, if one is wanted.

    Parameters
    ----------
    options : Namespace
        With `json` and `commit`.
    study : str
        Its name.
    place : str
        ``"cpu"`` or ``"gpu"``.
    rows : list of dict
        What was measured.
    **more
        Written beside the rows.
    """
    if options.json is None:
        return
    machine = measure.this_machine("")
    device = machine["gpu"] if place == "gpu" else f"{machine['num_cpu']} CPU cores ({machine['cpu']}, {machine['arch']})"
    about = {"study": study, "device": device, "date": time.strftime("%Y-%m-%d"), "commit": options.commit, "packages": measure.packages()}
    write_file(options.json, rows, about | more)


def write_file(path: Path, rows: list[dict], about: dict) -> None:
    """What was measured, a row in a line."""
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    path.write_text(f'{json.dumps(about, indent=1)[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n')
