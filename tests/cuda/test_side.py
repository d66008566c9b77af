"""A second stream for small kernels: what waits for what."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from numba_flash.cuda import side


class Stream:
    """Writes down what is put on it; within, it is the current one."""

    def __init__(self, on, number=0):
        self._on, self.name = on, f"stream {number}"

    def __enter__(self):
        self._on.current, self._before = self, self._on.current

    def __exit__(self, *_):
        self._on.current = self._before

    def wait_event(self, event):
        self._on.log.append((self.name, "waits for", event.recorded_on))


@pytest.fixture
def on(monkeypatch):
    """A stand-in for CuPy's streams: the current one, and what was put on all."""
    made = SimpleNamespace(log=[], streams=0)

    class Event:
        recorded_on = None

        def __init__(self, disable_timing):
            assert disable_timing

        def record(self, stream):
            self.recorded_on = stream.name
            made.log.append((stream.name, "tells"))

    def stream(non_blocking):
        assert non_blocking
        made.streams += 1
        return Stream(made, made.streams)

    made.current = Stream(made)
    cuda = SimpleNamespace(Stream=stream, Event=Event, get_current_stream=lambda: made.current)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(side, "_thread", SimpleNamespace())
    return made


def test_small_kernels_come_after_what_was_there_and_before_what_follows(on):
    aside = side.side(0, SimpleNamespace())
    with aside.beside():
        on.log.append((on.current.name, "small"))
    on.log.append((on.current.name, "large"))
    aside.join()
    assert on.log == [
        ("stream 0", "tells"),
        ("stream 1", "waits for", "stream 0"),
        ("stream 1", "small"),
        ("stream 1", "tells"),
        ("stream 0", "large"),
        ("stream 0", "waits for", "stream 1"),
    ]


def test_what_fails_beside_can_be_waited_for(on):
    aside = side.side(0, SimpleNamespace())
    with pytest.raises(ZeroDivisionError), aside.beside():
        raise ZeroDivisionError
    aside.join()
    assert on.current.name == "stream 0"
    assert on.log[-2:] == [("stream 1", "tells"), ("stream 0", "waits for", "stream 1")]


def test_a_gpu_has_one(on):
    assert side.side(0, SimpleNamespace()) is side.side(0, SimpleNamespace())
    assert side.side(1, SimpleNamespace()) is not side.side(0, SimpleNamespace())
    assert on.streams == 2


def test_there_is_none_beside_numpy():
    aside = side.side(-1, np.empty(0))
    with aside.beside():
        pass
    aside.join()
