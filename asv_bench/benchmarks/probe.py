"""One measurement of `starts.py`, in the process that runs this file: ``probe.py import``, or ``probe.py calls | memory BACKEND CELL``.

CELL is a `numba_flash.bench.cases.Cell` as JSON; what was measured is printed as JSON.
"""

import ctypes
import gc
import json
import re
import sys
import time
from pathlib import Path

RESET_PEAK = Path("/proc/self/clear_refs")
WARM_UP = 64  # queries and keys


def import_milliseconds() -> float:
    """Of ``import numba_flash``; nothing but the standard library is imported before."""
    start = time.perf_counter()
    import numba_flash  # noqa: F401

    return 1e3 * (time.perf_counter() - start)


def _problem(backend: str, cell: str):
    """``inputs(**sizes)``, which makes arrays q, k, v, do of the cell, and a clock that tells time where they live."""
    from numba_flash.bench import timing
    from numba_flash.bench.cases import Case, Cell

    clock = timing.HostClock() if backend == "cpu" else timing.GpuClock()

    def inputs(**sizes):
        case = Case(Cell(**json.loads(cell) | sizes), clock.xp)
        clock.wait()
        return (*case.arrays, case.do)

    return inputs, clock


def first_calls(backend: str, cell: str) -> dict[str, float]:
    """Milliseconds of the first forward call, and of the first backward call after it."""
    from numba_flash import backward, forward

    inputs, clock = _problem(backend, cell)
    q, k, v, do = inputs()
    start = time.perf_counter()
    o, lse = forward(q, k, v, return_lse=True, backend=backend)
    clock.wait()
    between = time.perf_counter()
    backward(do, q, k, v, o, lse, backend=backend)
    clock.wait()
    return {"forward": 1e3 * (between - start), "backward": 1e3 * (time.perf_counter() - between)}


def peak_bytes(backend: str, cell: str) -> int:
    """Beyond inputs and results of a forward and a backward call, once kernels and libraries are loaded."""
    from numba_flash import backward, forward

    def results(q, k, v, do):
        o, lse = forward(q, k, v, return_lse=True, backend=backend)
        return o, lse, *backward(do, q, k, v, o, lse, backend=backend)

    inputs, clock = _problem(backend, cell)
    results(*inputs(length=WARM_UP))
    arrays, sizes = inputs(), []
    growth = growth_during(lambda: sizes.extend(x.nbytes for x in results(*arrays)), clock)
    return growth - sum(sizes)


def growth_during(run, clock) -> int:
    """Bytes by which the process had grown at its peak during `run()`, or a memory pool of CuPy's, of which nothing may be left after it.

    The pool is a new one: one that has been used finds room in what it already has, also in what is left of blocks that are in use.
    """
    if clock.place == "cpu":
        gc.collect()  # or what is collected meanwhile would be used again unseen
        ctypes.CDLL(None).malloc_trim(0)  # so would what was freed
        RESET_PEAK.write_text("5")
        before = _status("VmRSS")
        run()
        return _status("VmHWM") - before
    clock.xp.get_default_memory_pool().free_all_blocks()  # room for the new one
    pool = clock.xp.cuda.MemoryPool()
    with clock.xp.cuda.using_allocator(pool.malloc):
        run()
        clock.wait()
    if pool.used_bytes():
        raise RuntimeError("what was measured keeps arrays, whose memory goes with its pool")
    return pool.total_bytes()


def _status(field: str) -> int:
    return 1024 * int(re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


if __name__ == "__main__":
    task, *arguments = sys.argv[1:]
    print(json.dumps({"import": import_milliseconds, "calls": first_calls, "memory": peak_bytes}[task](*arguments)))
