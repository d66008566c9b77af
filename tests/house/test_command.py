"""`python -m numba_flash`: its version, and what `info` says of caches."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

import numba_flash
from numba_flash import diagnose
from numba_flash.files import disk
from numba_flash.plan import BACKENDS

FILL = """
import numpy as np
from numba_flash.cpu.kernels import delta_items  # the smallest
x = np.ones((1, 1, 1, 3, 4))
delta_items(0, 3, x, x, x[..., 0].copy(), x[..., 0])
"""


def python(*arguments, **environment) -> str:
    """What a new process prints."""
    run = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True)
    return run.stdout


def test_version():
    assert python("-m", "numba_flash", "--version") == f"numba_flash {numba_flash.__version__}\n"


def test_a_selftest_runs_no_backend_that_refuses(monkeypatch):
    monkeypatch.setattr(diagnose, "_why_not", lambda backend: f"no {backend} here")
    monkeypatch.setattr(diagnose, "forward", None)
    table = io.StringIO()
    assert diagnose.selftest(table)
    assert table.getvalue().splitlines()[: len(BACKENDS)] == [f"{backend}: skipped: no {backend} here" for backend in BACKENDS]


def test_info_lists_both_caches_with_their_sizes(tmp_path):
    caches = {"NUMBA_FLASH_CACHE_DIR": str(tmp_path / "cubins"), "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    lines = python("-m", "numba_flash", "info", **caches).splitlines()
    assert f"cubin cache: {tmp_path}/cubins (0 files, 0 bytes)" in lines
    cpu = next(line for line in lines if line.startswith("CPU kernel cache: "))
    assert re.fullmatch(rf"CPU kernel cache: {tmp_path}/numba/\S+/kernels \(0 files, 0 bytes\)", cpu)
    disk.store(tmp_path / "cubins" / "one", bytes(2**20 - disk.CHECKSUM_BYTES))
    python("-c", FILL, **caches)
    lines = python("-m", "numba_flash", "info", **caches).splitlines()
    assert f"cubin cache: {tmp_path}/cubins (1 file, 1 MiB)" in lines
    directory = Path(cpu.split()[3])
    sizes = [file.stat().st_size for file in directory.iterdir()]
    assert sizes
    assert f"CPU kernel cache: {directory} ({len(sizes)} file{'s' * (len(sizes) > 1)}, {sum(sizes) / 2**10:.4g} KiB)" in lines


def test_info_without_a_place_for_kernels_of_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr(diagnose, "_of_cpu_kernels", lambda: None)
    numba_flash.show_config()
    assert "CPU kernel cache: none: neither the package's folder nor the user's for caches can be written to\n" in capsys.readouterr().out


WORDS = {0: "0 bytes", 1023: "1023 bytes", 1536: "1.5 KiB", 2**20: "1 MiB", 3 * 2**40: "3072 GiB"}


@pytest.mark.parametrize("size", WORDS)
def test_bytes_in_words(size):
    assert diagnose.in_words(size) == WORDS[size]
