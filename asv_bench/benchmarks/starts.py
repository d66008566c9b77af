"""What a new process waits for, and what it needs: import, first calls, peak memory. Each is measured in processes of their own."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numba_flash

from . import probe, workloads


def _probe(task: str, *arguments: str, cache: str | None = None):
    """What `probe.py` prints about `task` in a new process, whose compiled kernels are kept in the directory `cache`."""
    environment = dict(os.environ)
    parts = [str(Path(numba_flash.__file__).parents[1]), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, parts))
    if cache is not None:
        environment |= {"NUMBA_FLASH_CACHE_DIR": cache, "NUMBA_CACHE_DIR": cache}
    command = [sys.executable, "-P", probe.__file__, task, *arguments]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{task} failed in its process:\n{process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])


def _of(name: str, backend: str) -> tuple[str, str]:
    """The backend, and its workload `name`, as `probe.py` takes them."""
    return backend, json.dumps(asdict(workloads.WORKLOADS[name][backend]))


class Import:
    """``import numba_flash`` in a new process, NumPy included."""

    version = "1"
    repeats = 7

    def track_milliseconds(self):
        return median(_probe("import") for _ in range(self.repeats))

    track_milliseconds.unit = "ms"


class FirstCall:
    """First forward call of a new process, and the first backward call after it: with no compiled kernel on disk, and with all of them."""

    version = "1"
    timeout = 600
    param_names = ("backend", "direction")
    params = (workloads.BACKENDS, ("forward", "backward"))

    def setup_cache(self):
        """Milliseconds by backend, then "compiling" or "cached", then direction."""
        found = {}
        for backend in workloads.BACKENDS:
            try:
                self.setup(found, backend, "forward")
            except NotImplementedError:
                continue
            with TemporaryDirectory() as cache:
                found[backend] = {kind: _probe("calls", *_of("start", backend), cache=cache) for kind in ("compiling", "cached")}
        return found

    setup_cache.timeout = 600

    def setup(self, found, backend, direction):
        workloads.demand(backend, workloads.WORKLOADS["start"][backend])

    def track_compiling_milliseconds(self, found, backend, direction):
        return found[backend]["compiling"][direction]

    track_compiling_milliseconds.unit = "ms"

    def track_cached_milliseconds(self, found, backend, direction):
        return found[backend]["cached"][direction]

    track_cached_milliseconds.unit = "ms"


class PeakMemory:
    """What forward and backward together need at their peak, beyond inputs and results: of the process, or of CuPy's memory pool."""

    version = "1"
    timeout = 600
    param_names = ("backend",)
    params = (workloads.BACKENDS,)

    def setup(self, backend):
        workloads.demand(backend, workloads.WORKLOADS["memory"][backend])
        if backend == "cpu" and not os.access(probe.RESET_PEAK, os.W_OK):
            raise NotImplementedError(f"backend cpu: to reset a process' peak takes {probe.RESET_PEAK}, which cannot be written")

    def track_bytes(self, backend):
        return _probe("memory", *_of("memory", backend))

    track_bytes.unit = "bytes"
