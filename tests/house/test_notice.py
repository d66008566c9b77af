"""What is said at a terminal while a kernel is compiled, and when nothing is."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from numba import njit
from numba.core import event

from numba_flash import disk, notice
from numba_flash.cpu import cache
from numba_flash.cpu import tier as cpu


class Terminal(io.StringIO):
    def isatty(self):
        return True


def standard_error(monkeypatch, stream):
    """Of the module alone: pytest has its own way with the other one."""
    monkeypatch.setattr(notice, "sys", SimpleNamespace(stderr=stream))
    return stream


@pytest.fixture
def terminal(monkeypatch) -> Terminal:
    monkeypatch.delenv("NUMBA_FLASH_QUIET", raising=False)
    return standard_error(monkeypatch, Terminal())


def test_what_is_compiled_and_where_it_is_kept(terminal):
    notice.compiling("kernel A", "/some/where")
    notice.compiling("kernel B")
    first, second = terminal.getvalue().splitlines()
    assert first == "numba_flash: compiling kernel A (once: it is kept in /some/where)"
    assert second == "numba_flash: compiling kernel B (every process does: there is no place to keep it)"


@pytest.mark.parametrize(("value", "said"), [("", True), ("0", True), ("1", False), ("yes", False)])
def test_it_can_be_switched_off(terminal, monkeypatch, value, said):
    monkeypatch.setenv("NUMBA_FLASH_QUIET", value)
    notice.compiling("a kernel")
    assert bool(terminal.getvalue()) is said


def test_a_process_of_a_warm_up_says_nothing(terminal, monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_QUIET", "0")
    notice.quiet()
    notice.compiling("a kernel")
    assert terminal.getvalue() == ""


def test_in_a_file_nothing_is_said(terminal, monkeypatch):
    file = standard_error(monkeypatch, io.StringIO())
    notice.compiling("a kernel")
    assert file.getvalue() == ""


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
    notice.compiling("a kernel")


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
                assert f"compiling the CPU kernel doubled_items for {expected} (once: it is kept in {tmp_path}" in terminal.getvalue()
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
