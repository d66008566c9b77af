"""What is said at a terminal while a kernel is compiled, and when nothing is."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from numba import njit

from numba_flash import cpu, cpu_cache, notice


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


def closed() -> Terminal:
    stream = Terminal()
    stream.isatty = io.StringIO.isatty.__get__(stream)
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [io.StringIO(), closed(), None], ids=["file", "closed", "none"])
def test_where_there_is_no_terminal_nothing_is_said(monkeypatch, stream):
    monkeypatch.delenv("NUMBA_FLASH_QUIET", raising=False)
    standard_error(monkeypatch, stream)
    notice.compiling("a kernel")
    if stream is not None and not stream.closed:
        assert stream.getvalue() == ""


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
    for dtype, expected in ((np.int16, "float16"), (np.float32, "float32")):
        for lines in (1, 0):
            kernel = cpu_cache.cached(njit(nogil=True)(doubled_items))
            cpu.Runner().entry(kernel, (np.zeros(3, dtype),))
            assert terminal.getvalue().count("\n") == lines
            if lines:
                assert f"compiling the CPU kernel doubled_items for {expected} (once: it is kept in {tmp_path}" in terminal.getvalue()
            terminal.seek(0)
            terminal.truncate()


def test_somebody_elses_function_is_not_named(terminal):
    with notice.if_compiled(njit(doubled_items)):
        njit(lambda x: x)(1)
    assert terminal.getvalue() == ""
