"""Transfers beside the kernels of a GPU: a stream of their own, what waits for what, and memory that is kept until it has been used."""

import threading
from collections import deque
from typing import Any

from numba_flash.arguments import arrays

_thread = threading.local()


class Lane:
    """A stream that waits for no other unless it is told to.

    CuPy gives the memory of an array that is forgotten to the next one of the current stream, and pinned memory to whoever comes: what is
    used here is kept until it has been used.

    Attributes
    ----------
    stream : cupy.cuda.Stream
        The stream.
    """

    def __init__(self):
        self.stream = arrays.cupy().cuda.Stream(non_blocking=True)
        self._marks: deque[Mark] = deque()

    def follow(self, event: Any) -> None:
        """What comes from now on is done after an event."""
        self.stream.wait_event(event)

    def mark(self, used: list) -> "Mark":
        """The end of what is here now, which uses these arrays."""
        while self._marks and self._marks[0].event.done:
            self._marks.popleft()
        self._marks.append(Mark(recorded(self.stream), used))
        return self._marks[-1]


class Mark:
    """A place in a `Lane`, and the arrays that are kept until it has been reached."""

    def __init__(self, event: Any, used: list):
        self.event, self._used = event, used

    def precede(self) -> None:
        """What comes on the current stream from now on is done after it, so that arrays on the GPU need not be kept here any more."""
        arrays.cupy().cuda.get_current_stream().wait_event(self.event)
        self._used[:] = [x for x in self._used if arrays.library(x) == "numpy"]


def lane(device: int, purpose: str) -> Lane:
    """That of this thread on a GPU for one kind of transfers."""
    lanes = _thread.__dict__.setdefault("lanes", {})
    if (device, purpose) not in lanes:
        with arrays.cupy().cuda.Device(device):
            lanes[device, purpose] = Lane()
    return lanes[device, purpose]


def recorded(stream: Any = None) -> Any:
    """An event after all that is on a stream now; by default the current one."""
    cuda = arrays.cupy().cuda
    event = cuda.Event(disable_timing=True)
    event.record(cuda.get_current_stream() if stream is None else stream)
    return event
