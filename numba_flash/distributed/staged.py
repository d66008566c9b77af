"""CuPy arrays by way of host memory, whoever carries NumPy arrays."""

from collections import deque
from typing import Any

import numpy as np

from numba_flash.arguments import arrays
from numba_flash.distributed import streams
from numba_flash.distributed.communicators import Communicator, Message, Transfer, flat

OUT, IN = "to the host", "from the host"


class Staged:
    """A communicator that carries NumPy arrays, and CuPy arrays through pinned memory.

    Copies have a stream for each direction. What they bring to the host is sent when the process comes to wait for the transfer, while the
    GPU is busy with kernels that were launched before.

    Parameters
    ----------
    comm : Communicator
        It carries NumPy arrays. Any number of processes may share a GPU.
    """

    def __init__(self, comm: Communicator):
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        self._waiting: deque[Stop] = deque()

    def takes(self, library: str) -> bool:
        return self._comm.takes("numpy" if library == "cupy" else library)

    def exchange(self, sent: list[Message], received: list[Message], what: str) -> Transfer:
        stop = Stop(self, sent, received, what)
        self._waiting.append(stop)
        if not stop.on_gpu:
            self.send_until(stop)
        return stop

    def send_until(self, last: "Stop") -> None:
        """Send what came before, and then this: everybody's exchanges have one order."""
        while last in self._waiting:
            stop = self._waiting.popleft()
            stop.send(self._comm)


class Stop:
    """A transfer on its way through the host."""

    def __init__(self, staged: Staged, sent: list[Message], received: list[Message], what: str):
        self._staged, self._what = staged, what
        self.on_gpu = any(arrays.library(x.array) == "cupy" for x in (*sent, *received))
        self._sent, self._received, self._landed = sent, received, received
        if self.on_gpu:
            self._device = arrays.device_id((*sent, *received)[0].array)
            self._sent, self._landed = self._fetched(sent), [Message(x.peer, _pinned(x.array)) for x in received]

    def _fetched(self, sent: list[Message]) -> list[Message]:
        """Begin to copy what is sent to the host."""
        with arrays.cupy().cuda.Device(self._device):
            lane, there = streams.lane(self._device, OUT), [_pinned(x.array) for x in sent]
            self._begun = streams.recorded()
            lane.follow(self._begun)
            for message, host in zip(sent, there, strict=True):
                if host.size:
                    flat(message.array).get(stream=lane.stream, out=host, blocking=False)
            self._fetch = lane.mark([*there, *(x.array for x in sent)])
        return [Message(x.peer, host) for x, host in zip(sent, there, strict=True)]

    def send(self, comm: Communicator) -> None:
        """Hand it on, as soon as the host has what is sent."""
        if self.on_gpu:
            self._fetch.event.synchronize()
        self._transfer = comm.exchange(self._sent, self._landed, self._what)

    def wait(self) -> None:
        """Until all is on the host; what the GPU computes from now on waits until it is there."""
        self._staged.send_until(self)
        self._transfer.wait()
        if not self.on_gpu:
            return
        with arrays.cupy().cuda.Device(self._device):
            lane = streams.lane(self._device, IN)
            lane.follow(self._begun)  # not before: what was begun earlier would wait, too
            for message, landed in zip(self._received, self._landed, strict=True):
                if landed.array.size:
                    flat(message.array).set(landed.array, stream=lane.stream)
            self._fetch.precede()
            lane.mark([*(x.array for x in (*self._received, *self._landed))]).precede()


def _pinned(x: Any) -> np.ndarray:
    """Host memory for the bytes of an array, which the GPU copies to and from while the process goes on."""
    import cupyx

    return cupyx.empty_pinned(x.nbytes, np.uint8)
