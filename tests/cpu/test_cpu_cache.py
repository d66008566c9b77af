"""Kernels of the CPU on disk: what is damaged, stale, another's or somebody else's is not executed; several processes share them."""

import errno
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numba
import pytest
from numba import njit
from numba.core.caching import CompileResultCacheImpl

import numba_flash
from numba_flash.cpu import cache
from numba_flash.files import disk, fingerprint


def compiled(shift: float, **options):
    """A function whose constant is its fingerprint, as a new process has it; all have one name, one bytecode and one signature."""

    def shifted(x):
        return x + shift

    shifted.__module__ = "numba_flash.cpu.kernels"  # as if it were defined there
    return cache.cached(njit(**options)(shifted), str(shift))


def found(dispatcher) -> bool:
    """Whether it was read from disk."""
    hits, misses = sum(dispatcher.stats.cache_hits.values()), sum(dispatcher.stats.cache_misses.values())
    assert hits + misses == 1
    return bool(hits)


def runs(shift: float) -> bool:
    """The function is right; True if it came from disk."""
    dispatcher = compiled(shift)
    assert dispatcher(1.0) == 1 + shift
    return found(dispatcher)


def files(folder: Path) -> set[Path]:
    """Of functions."""
    return {path for path in folder.iterdir() if path.name != fingerprint.FILE}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where kernels are kept now."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(disk, "_named", set())
    return Path(compiled(0.0).stats.cache_path)


def test_what_was_compiled_is_found(folder):
    assert folder.is_relative_to(numba.config.CACHE_DIR)
    assert [runs(1.0), runs(1.0), runs(2.0), runs(1.0), runs(2.0)] == [False, True, False, True, True]
    assert len(files(folder)) == 2


def test_code_of_another_function_is_not_taken(folder):
    """Whatever two processes do to each other's files."""
    runs(1.0)
    (one,) = files(folder)
    runs(2.0)
    (other,) = files(folder) - {one}
    shutil.copy(one, other)
    assert not runs(2.0)
    assert runs(2.0)
    assert runs(1.0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: os.urandom(len(data)),
        lambda data: bytes(len(data)),
        *(
            lambda data, at=at: data[: (i := int(at * len(data)))] + bytes([data[i] ^ 16]) + data[i + 1 :]
            for at in (0, 0.01, 0.3, 0.6, 0.99)
        ),
    ],
    ids=["empty", "head", "half", "cut", "random", "zeros", *(f"bit{n}" for n in range(5))],
)
def test_damaged_kernels_are_compiled_again(folder, damage):
    runs(1.0)
    (file,) = files(folder)
    file.write_bytes(damage(file.read_bytes()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not runs(1.0)
        assert runs(1.0)


def test_another_version_of_what_a_function_is_made_of_takes_the_place(folder, tmp_path, monkeypatch):
    """It is edited in a copy of the package: what is imported, and by what, then what is not, and a comment."""
    package = tmp_path / "numba_flash"
    shutil.copytree(Path(numba_flash.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))

    def edited(name: str, text: str) -> list[bool]:
        with (package / name).open("a") as file:
            file.write(text)
        monkeypatch.setattr(cache, "package", lambda: fingerprint.Sources(package))
        return [runs(1.0), runs(1.0)]

    assert edited("cpu/kernels.py", "") == [False, True]
    for name in ("cpu/kernels.py", "cpu/softmax.py", "rng.py"):
        assert edited(name, "\nEDITED = 1\n") == [False, True], name
    for name in ("api.py", "cpu/tier.py", "cpu/cache.py", "files/disk.py", "files/notice.py", "cuda/runtime/lang.py"):
        assert edited(name, "\nEDITED = 1\n") == [True, True], name
    assert edited("rng.py", "\n# said of it\n") == [True, True]
    assert len(files(folder)) == 1
    monkeypatch.setattr(numba, "__version__", "0.0")
    assert [runs(1.0), runs(1.0)] == [False, True]


def test_other_options_of_the_compiler_take_the_place(folder):
    results = []
    for fast in (False, True, True):
        dispatcher = compiled(1.0, fastmath=fast)
        dispatcher(1.0)
        results.append(found(dispatcher))
    assert results == [False, False, True]


def test_files_in_the_format_of_numba_are_left_alone(folder):
    """Those of earlier versions, and those of other packages, in the folder above."""
    for name in ("cpu_kernels.forward_items-21.py311.nbi", "cpu_kernels.forward_items-21.py311.1.nbc"):
        (folder.parent / name).write_bytes(b"")
    assert [runs(1.0), runs(1.0)] == [False, True]


def test_a_folder_that_others_may_write_to_is_not_used(folder):
    runs(1.0)
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=rf"^compiled kernels are not kept in {folder}: others may write to it \(mode 0777\)") as caught:
        assert [runs(1.0), runs(1.0)] == [False, False]
    assert len(caught) == 1
    folder.chmod(0o700)
    assert runs(1.0)


def test_a_full_disk_costs_time_alone(folder, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "write_atomically", full)
    with pytest.warns(RuntimeWarning, match=rf"^compiled kernels are not kept in {folder}: No space left on device") as caught:
        assert [runs(1.0), runs(1.0)] == [False, False]
    assert len(caught) == 1


def test_no_place_costs_time_alone(monkeypatch):
    """Neither the package nor the home can be written to."""
    monkeypatch.setattr(disk, "_named", set())
    monkeypatch.setattr(CompileResultCacheImpl, "_locator_classes", [])
    with pytest.warns(RuntimeWarning, match=r"__pycache__: neither it nor the user's folder for caches can be written to") as caught:
        assert [compiled(shift)(1.0) for shift in (1.0, 2.0)] == [2.0, 3.0]
    assert len(caught) == 1


# ---- several processes -------------------------------------------------------------------------------------------------------------------

PROCESSES = """
import json, os, sys, tempfile
import numpy as np, numba, numba_flash


rounds, processes, functions = map(int, sys.argv[1:])
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 9, 4)).astype(np.float32) for _ in range(3))
i, j = np.ogrid[:9, :9]

def tilted(slope):
    def function(score, b, h, i, j):
        return score + slope * (j - 2 * i)
    return function

def wrong(order):
    count = 0
    for n in order:
        o = numba_flash.forward(q, k, v, score_mod=tilted(0.25 * n), backend="cpu")
        count += not np.allclose(o, expected[n], rtol=1e-5, atol=1e-5)
    return count

expected = [numba_flash.forward(q, k, v, bias=np.float32(0.25 * n * (j - 2 * i)), backend="cpu") for n in range(functions)]
numba_flash.forward(q, k, v, score_mod=tilted(-1.0), backend="cpu")  # the kernel itself is there
results = []
for _ in range(rounds):
    numba.config.CACHE_DIR = tempfile.mkdtemp()
    for cache in ("cold", "warm"):
        children = []
        for seed in range(processes):
            child = os.fork()
            if child == 0:
                order = [(seed + n) % functions for n in range(functions)]  # at any time each compiles another one
                status = 99
                try:
                    status = wrong(order)
                finally:
                    os._exit(status)
            children.append(child)
        results.append([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
print(json.dumps(results))
"""


def wrong_results(folder, rounds: int, processes: int, functions: int) -> list:
    """How many results each process of each round got wrong, all with a cache that begins cold."""
    command = [sys.executable, "-c", PROCESSES, str(rounds), str(processes), str(functions)]
    run = subprocess.run(command, env=os.environ | {"TMPDIR": str(folder)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.unproven("of processes and their timing")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize(
    ("rounds", "processes", "functions"), [(1, 2, 3), pytest.param(10, 8, 8, marks=pytest.mark.full)], ids=["quick", "exhaustive"]
)
def test_processes_share_a_cold_cache(tmp_path, rounds, processes, functions):
    """Functions of one name, bytecode and signature, which differ in what they capture, compiled by several processes at once."""
    assert wrong_results(tmp_path, rounds, processes, functions) == [[0] * processes] * (2 * rounds)
