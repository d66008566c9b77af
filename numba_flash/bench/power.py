"""What a GPU draws, and at which clock, while a contender runs alone: nvidia-smi tells, some twenty times a second."""

import subprocess
import threading
import time
from statistics import median
from typing import NamedTuple

EVERY = 50  # milliseconds
COMMAND = ("nvidia-smi", "--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits", f"-lms={EVERY}")
IGNORED, SAMPLES = 6, 14  # until the contender has its own temperature and clock, and then
MOST = 10.0  # seconds, where nvidia-smi says nothing


class Power(NamedTuple):
    """Medians of what was told.

    Attributes
    ----------
    watts : float
        Of the whole card.
    mhz : float
        Clock of its multiprocessors.
    """

    watts: float
    mhz: float


def while_running(run, bus_id: str) -> Power | None:
    """What the GPU at that address of the bus draws while ``run()`` is called again and again; None if nobody tells."""
    try:
        process = subprocess.Popen([*COMMAND, f"--id={bus_id}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None
    lines: list[str] = []
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    end = time.perf_counter() + MOST
    while len(lines) < IGNORED + SAMPLES and time.perf_counter() < end and reader.is_alive():
        run()
    process.terminate()
    process.wait()
    reader.join()
    return of(lines[IGNORED:])


def _read(stream, lines: list[str]) -> None:
    """Lines as they come."""
    for line in stream:
        lines.append(line)


def of(lines: list[str]) -> Power | None:
    """Medians of whole lines ``watts, MHz``; of some cards nvidia-smi tells neither."""
    try:
        pairs = [tuple(map(float, line.split(","))) for line in lines if line.endswith("\n") and "," in line]
        return Power(*map(median, zip(*pairs, strict=True))) if pairs else None
    except ValueError:
        return None
