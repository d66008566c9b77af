"""A second stream, on which small kernels run beside a large one that does not need them."""

import threading
from contextlib import contextmanager, nullcontext

import numpy as np

from numba_flash import arrays

_thread = threading.local()


class Side:
    """A stream of this thread on a GPU, and what is told from it to others and back."""

    def __init__(self):
        cuda = arrays.cupy().cuda
        self.stream = cuda.Stream(non_blocking=True)
        self._begun, self._done = (cuda.Event(disable_timing=True) for _ in range(2))
        self._current = cuda.get_current_stream

    @contextmanager
    def beside(self):
        """Context in which this stream is the current one: what was on that before comes first.
        Memory has to be there: it is the other's.
        """
        self._begun.record(self._current())
        self.stream.wait_event(self._begun)
        with self.stream:
            try:
                yield
            finally:
                self._done.record(self.stream)

    def join(self) -> None:
        """What comes on the current stream from now on is done after what was put on this one."""
        self._current().wait_event(self._done)


class Nowhere:
    """In its place where nothing runs on a GPU."""

    def beside(self):
        """Nothing to arrange."""
        return nullcontext()

    def join(self) -> None:
        """Nothing to wait for."""


def side(device: int, like) -> Side | Nowhere:
    """That of this thread on a GPU, the current one, on which the array `like` is."""
    if isinstance(like, np.ndarray):
        return Nowhere()
    sides = _thread.__dict__.setdefault("sides", {})
    if device not in sides:
        sides[device] = Side()
    return sides[device]
