"""Print how many processes may test at the same time: pytest-xdist counts CPU threads, not what a container may use of them, nor memory."""

import os
from pathlib import Path

MOST, BYTES = 8, 3 * 2**29  # processes, and what each may need


def limits(file: str) -> list[int]:
    """Numbers in a file of this container's control group; none where it sets no limit."""
    path = Path("/sys/fs/cgroup") / file
    words = path.read_text().split() if path.exists() else ["max"]
    return [] if words[0] == "max" else [*map(int, words)]


available = [int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
memory = min(available + limits("memory.max"))
quota, period = limits("cpu.max") or (MOST, 1)
print(max(1, min(MOST, len(os.sched_getaffinity(0)), quota // period, memory // BYTES)))
