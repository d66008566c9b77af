"""What is said while a kernel is compiled: at a terminal, in a notebook, in the log, and when nothing is."""

import io
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from numba import njit
from numba.core import event
from support import DTYPES, ROOT

import numba_flash
from numba_flash.cpu import cache
from numba_flash.cpu import tier as cpu
from numba_flash.files import disk, durations, notice


class Terminal(io.StringIO):
    def isatty(self):
        return True


def standard_error(monkeypatch, stream):
    """Of the module alone: pytest has its own way with the other one."""
    monkeypatch.setattr(notice, "sys", SimpleNamespace(stderr=stream, stdout=None))
    return stream


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.delenv("NUMBA_FLASH_QUIET", raising=False)
    monkeypatch.setattr(notice, "_begun", set())
    monkeypatch.setattr(durations, "_of_this_process", {})
    return standard_error(monkeypatch, Terminal())


def a_kernel(variant="float32", kept_in=None, kernel="a.kernel") -> notice.Compiling:
    return notice.Compiling("CUDA", kernel, variant, kept_in)


def test_what_is_compiled_and_where_it_is_kept(terminal, tmp_path):
    a_kernel("float16", tmp_path)
    a_kernel("float32")
    first, second = terminal.getvalue().splitlines()
    assert first == f"numba_flash: compiling the CUDA kernel a.kernel (float16) (once: it is kept in {tmp_path})"
    assert second == "numba_flash: compiling the CUDA kernel a.kernel (float32) (every process does: there is no place to keep it)"


@pytest.mark.parametrize(("value", "said"), [("", True), ("0", True), ("1", False), ("yes", False)])
def test_it_can_be_switched_off(terminal, monkeypatch, value, said):
    monkeypatch.setenv("NUMBA_FLASH_QUIET", value)
    a_kernel()
    assert bool(terminal.getvalue()) is said


def test_a_process_of_a_warm_up_says_nothing(terminal, monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_QUIET", "0")
    notice.quiet()
    a_kernel()
    assert terminal.getvalue() == ""


def test_in_a_file_nothing_is_said(terminal, monkeypatch):
    file = standard_error(monkeypatch, io.StringIO())
    a_kernel()
    assert file.getvalue() == ""


# ---- how long it takes -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """``clock(seconds)`` makes them pass."""
    now = [0.0]
    monkeypatch.setattr(notice.time, "perf_counter", lambda: now[0])

    def passes(seconds):
        now[0] += seconds

    return passes


def took(clock, seconds, **kernel) -> None:
    told = a_kernel(**kernel)
    clock(seconds)
    told.done()


@pytest.mark.parametrize("kept", [True, False])
def test_what_was_measured_is_expected(terminal, tmp_path, clock, kept):
    """Of the same kernel alone, the middle of the last five; the first one of a process beside those of other processes."""
    kept_in = tmp_path if kept else None
    for process in range(2):
        notice._begun.clear()
        for seconds in (30, 1, 2, 3, 10, 11, 12) if process == 0 else (32, 5):
            took(clock, seconds, kept_in=kept_in)
    took(clock, 100, kept_in=kept_in, kernel="another")
    said = [line.partition("(float32)")[2].split(" (")[0] for line in terminal.getvalue().splitlines()]
    by = " s by what it took here before"
    assert said[:3] == ["", f", about 30{by}", f", about 1{by}"]  # a first one alone; then that of the others
    assert said[7:] == [f", about 30{by}", f", about 10{by}", ""]


def test_less_than_a_second(terminal, clock):
    for _ in range(2):
        took(clock, 0.1)
    assert ", about 1 s by" in terminal.getvalue()


def test_seconds_of_a_kernel_that_did_not_compile_do_not_count(terminal, clock):
    a_kernel()
    clock(5)
    a_kernel()
    assert "about" not in terminal.getvalue()


def test_damaged_durations_are_forgotten(terminal, tmp_path, clock):
    took(clock, 3, kept_in=tmp_path)
    (tmp_path / durations.FILE).write_bytes(b"{}")
    took(clock, 4, kept_in=tmp_path)
    assert "about" not in terminal.getvalue()
    a_kernel(kept_in=tmp_path)
    assert ", about 4 s by" in terminal.getvalue()


# ---- the log, and notebooks --------------------------------------------------------------------------------------------------------------


def test_the_log_has_it_and_how_long_it_took(terminal, monkeypatch, clock, caplog):
    """Also where nobody looks at standard error, and where the line is switched off."""
    standard_error(monkeypatch, io.StringIO())
    monkeypatch.setenv("NUMBA_FLASH_QUIET", "1")
    with caplog.at_level(logging.INFO, "numba_flash"):
        took(clock, 2.5)
    assert [(record.name, record.levelname) for record in caplog.records] == [("numba_flash", "INFO")] * 2
    begin, end = (record.getMessage() for record in caplog.records)
    assert begin == "compiling the CUDA kernel a.kernel (float32) (every process does: there is no place to keep it)"
    assert end == "compiled the CUDA kernel a.kernel (float32) in 2.5 s"


@pytest.mark.parametrize("to", ["the terminal", "the terminal, warnings alone", "a file"])
def test_a_log_at_the_terminal_takes_the_place_of_the_line(terminal, monkeypatch, tmp_path, to):
    handler = logging.FileHandler(tmp_path / "log") if to == "a file" else logging.StreamHandler(terminal)
    handler.setLevel(logging.WARNING if "warnings" in to else logging.DEBUG)
    log = logging.getLogger("numba_flash")
    monkeypatch.setattr(notice, "sys", SimpleNamespace(stderr=terminal, stdout=None))
    monkeypatch.setattr(log, "handlers", [handler])
    monkeypatch.setattr(log, "level", logging.INFO)
    log.manager._clear_cache()
    try:
        a_kernel()
    finally:
        log.setLevel(logging.NOTSET)
        handler.close()
    assert terminal.getvalue().count("compiling") == 1
    assert terminal.getvalue().startswith("numba_flash: ") is (to != "the terminal")


SMALL = """
from numba_flash.cpu import cache

@cache.kernel
def small_items(start, stop, x):
    x[start:stop] = 1
"""
SCRIPT = """
import sys, numba, numpy as np
sys.path.insert(0, {folder!r})
numba.config.CACHE_DIR = {folder!r}
{before}
from small import small_items
from numba_flash.cpu import tier
x = np.zeros(3, np.float32)
tier._entry(small_items, (x,))(0, 3, x)
print(x[0])
"""
LINE = "compiling the CPU kernel small_items (float32 x) (once: it is kept in "


@pytest.fixture
def small(tmp_path):
    """``small(before)``: the code of a program that compiles a small kernel, and its environment."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path), "IPYTHONDIR": str(tmp_path)}
    environment.pop("NUMBA_FLASH_QUIET", None)
    (tmp_path / "small.py").write_text(SMALL)
    return lambda before="": (SCRIPT.format(folder=str(tmp_path), before=before), environment)


@pytest.mark.parametrize("asked", [False, True])
def test_a_batch_job(small, asked):
    """As the pages say it: nothing by default, and lines once the log is on."""
    code, environment = small("import logging; logging.basicConfig(level=logging.INFO)" if asked else "")
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("1.0\n", 0), run.stderr
    if asked:
        begin, end = run.stderr.splitlines()
        assert begin.startswith(f"INFO:numba_flash:{LINE}")
        assert end.startswith("INFO:numba_flash:compiled the CPU kernel small_items (float32 x) in ")
    else:
        assert run.stderr == ""


def test_a_notebook(small, tmp_path, monkeypatch):
    """In the process that Jupyter starts for one."""
    from jupyter_client.manager import start_new_kernel

    for folder in ("CONFIG", "DATA", "RUNTIME"):  # nothing of the user's, and nothing is left there
        monkeypatch.setenv(f"JUPYTER_{folder}_DIR", str(tmp_path / folder))
    code, environment = small()
    manager, client = start_new_kernel(kernel_name="python3", env=environment, startup_timeout=120)
    streams = {"stdout": "", "stderr": ""}

    def keep(message):
        if message["msg_type"] == "stream":
            streams[message["content"]["name"]] += message["content"]["text"]

    try:
        client.execute_interactive(code, timeout=120, output_hook=keep)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert streams["stdout"] == "1.0\n", streams
    assert streams["stderr"].startswith(f"numba_flash: {LINE}")
    assert streams["stderr"].count("\n") == 1


# ---- no standard error, and the CPU ------------------------------------------------------------------------------------------------------


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


class HungUp(Terminal):
    def write(self, text):
        raise OSError("Input/output error")


@pytest.mark.parametrize("stream", [None, closed(), HungUp()], ids=["none", "closed", "hung up"])
def test_without_a_standard_error_kernels_are_compiled_all_the_same(terminal, monkeypatch, stream):
    standard_error(monkeypatch, stream)
    a_kernel()


def doubled_items(start, stop, x):
    """A small kernel for the CPU."""
    for i in range(start, stop):
        x[i] = helper(x[i])


@njit
def helper(x):
    return x + x


def test_kernels_for_the_cpu(terminal, tmp_path, monkeypatch):
    """One line for a kernel that is compiled, none for the functions in it, nor for a kernel that is found on disk."""
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))  # is read again if a test changed a variable that begins with NUMBA_
    for dtype, expected in ((np.int16, "float16"), (np.float32, "float32")):
        for lines in (1, 0):
            kernel = cache.cached(njit(nogil=True)(doubled_items))
            cpu._entry(kernel, (np.zeros(3, dtype),))
            assert terminal.getvalue().count("\n") == lines
            if lines:
                assert f"compiling the CPU kernel doubled_items ({expected} x)" in terminal.getvalue()
                assert f"(once: it is kept in {tmp_path}" in terminal.getvalue()
            terminal.seek(0)
            terminal.truncate()


def test_a_kernel_in_a_directory_that_others_may_write_is_not_said_to_be_kept(terminal, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_named", set())
    kernel = SimpleNamespace(stats=SimpleNamespace(cache_path=str(tmp_path)), py_func=doubled_items)
    tmp_path.chmod(0o777)
    with notice.if_compiled(kernel), pytest.warns(RuntimeWarning, match="others may write"):
        event.broadcast(event.Event("numba:compile", event.EventStatus.START, {"dispatcher": kernel, "args": ()}))
    assert "there is no place to keep it" in terminal.getvalue()


def test_somebody_elses_function_is_not_named(terminal):
    with notice.if_compiled(njit(doubled_items)):
        njit(lambda x: x)(1)
    assert terminal.getvalue() == ""


def test_two_variants_have_two_lines(monkeypatch):
    """Kernels for the CPU that are not of one type are not told alike: every dtype, option and pages."""
    told = {}

    def entry(dispatcher, args):
        types = tuple(map(cpu._numba_type, (0, 0, *args)))
        told[dispatcher, types] = dispatcher.py_func.__name__, notice._dtypes(dispatcher, types)
        return lambda *args: None  # which computes nothing

    monkeypatch.setattr(cpu, "_entry", entry)
    for dtype in DTYPES.values():
        x, bias = (
            np.zeros((1, 2, 8, 4), dtype),
            [np.zeros((8, 8), each) for each in (dtype, np.float64 if dtype == np.float64 else np.float32)],
        )
        lse = np.zeros((1, 2, 8), np.float64 if dtype == np.float64 else np.float32)
        for options in ({}, {"softcap": 2.0}, {"bias": bias[0]}, {"bias": bias[1]}):
            numba_flash.forward(x, x, x, backend="cpu", **options)
            numba_flash.backward(x, x, x, x, x, lse, backend="cpu", bias_grad="bias" in options, **options)
        table = np.zeros((1, 1), np.int32)
        numba_flash.forward_paged(x, x, x, table, np.array([8]), backend="cpu")
    assert len(told) > 40
    assert len(set(told.values())) == len(told)
