"""CuPy arrays by NCCL, whoever has made the communicator: CuPy, cupyx.distributed or nccl4py."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np

from numba_flash.arguments import arrays
from numba_flash.distributed import streams
from numba_flash.distributed.communicators import TIMEOUT, Communicator, Message, Transfer, flat, poll, silence

LANE = "NCCL"


class Native(NamedTuple):
    """A communicator of any make.

    Attributes
    ----------
    rank, size, device : int
        The number of this process, how many there are, and of its GPU.
    group : callable
        Context of messages that begin together.
    send, receive : callable
        ``send(array of bytes, peer, stream)``.
    """

    rank: int
    size: int
    device: int
    group: Callable[[], AbstractContextManager]
    send: Callable[[Any, int, Any], None]
    receive: Callable[[Any, int, Any], None]


def native(comm: Any) -> Native | None:
    """What the user gave, if it is one."""
    kind = type(comm)
    if hasattr(kind, "rank_id"):
        return _of_cupy(comm)
    if hasattr(kind, "send_recv") and hasattr(comm, "_comm"):
        return _of_cupy(comm._comm)
    return _of_nccl4py(comm) if hasattr(kind, "nranks") else None


def _of_cupy(comm: Any) -> Native:
    """`cupy.cuda.nccl.NcclCommunicator`, which cupyx.distributed's backend wraps."""
    nccl = importlib.import_module("cupy.cuda.nccl")

    @contextmanager
    def group() -> Iterator[None]:
        nccl.groupStart()
        try:
            yield
        finally:
            nccl.groupEnd()

    return Native(
        comm.rank_id(),
        comm.size(),
        comm.device_id(),
        group,
        lambda x, peer, stream: comm.send(x.data.ptr, x.size, nccl.NCCL_UINT8, peer, stream.ptr),
        lambda x, peer, stream: comm.recv(x.data.ptr, x.size, nccl.NCCL_UINT8, peer, stream.ptr),
    )


def _of_nccl4py(comm: Any) -> Native:
    """`nccl.core.Communicator`."""
    return Native(
        comm.rank,
        comm.nranks,
        comm.device.device_id,
        importlib.import_module("nccl.core").group,
        lambda x, peer, stream: comm.send(x, peer, stream=stream.ptr),
        lambda x, peer, stream: comm.recv(x, peer, stream=stream.ptr),
    )


class Nccl:
    """CuPy arrays by NCCL, on a stream of its own.

    Parameters
    ----------
    comm : cupy.cuda.nccl.NcclCommunicator, nccl.core.Communicator or cupyx.distributed.NCCLBackend
        The processes, one per GPU. Arrays are on the GPU that it was made for.
    host : Communicator, optional
        The same processes, for what they have to agree on before each call: `Mpi`, for example. By default that goes by NCCL, too, from
        each to each, and waits for transfers that are on their way.
    timeout : float
        Seconds after which a process gives up waiting for another to agree.
    """

    def __init__(self, comm: Any, host: Communicator | None = None, timeout: float = TIMEOUT):
        made = native(comm)
        if made is None:
            raise TypeError(f"comm must be a communicator of NCCL (CuPy's, cupyx.distributed's or nccl4py's); got {type(comm).__name__}")
        self._native, self._host, self.timeout = made, host, timeout
        self.rank, self.size = made.rank, made.size

    def takes(self, library: str) -> bool:
        return library == "cupy"

    def exchange(self, sent: list[Message], received: list[Message], what: str) -> Transfer:
        if not any(arrays.library(x.array) == "cupy" for x in (*sent, *received)):
            return Words(self, sent, received, what) if self._host is None else self._host.exchange(sent, received, what)
        with arrays.cupy().cuda.Device(self._native.device):
            lane = streams.lane(self._native.device, LANE)
            lane.follow(streams.recorded())
            self.begin(lane, sent, received)
            return Passage(lane.mark([x.array for x in (*sent, *received)]))

    def begin(self, lane: streams.Lane, sent: list[Message], received: list[Message]) -> None:
        """All messages at once: none waits for another."""
        with self._native.group():
            for x in sent:
                if x.array.size:
                    self._native.send(flat(x.array), x.peer, lane.stream)
            for x in received:
                if x.array.size:
                    self._native.receive(flat(x.array), x.peer, lane.stream)


class Passage:
    """Arrays on their way from GPU to GPU."""

    def __init__(self, mark: streams.Mark):
        self._mark = mark

    def wait(self) -> None:
        """What the GPU computes from now on waits; the process does not."""
        self._mark.precede()


class Words:
    """NumPy arrays, few and small, by way of the GPU's memory."""

    def __init__(self, nccl: Nccl, sent: list[Message], received: list[Message], what: str):
        self._nccl, self._what, self._received = nccl, what, received
        cp, device = importlib.import_module("cupy"), nccl._native.device
        with cp.cuda.Device(device):
            self._lane = streams.lane(device, LANE)
            with self._lane.stream:
                there = [Message(x.peer, cp.asarray(flat(x.array))) for x in sent]
                self._landed = [Message(x.peer, cp.empty(x.array.nbytes, np.uint8)) for x in received]
                nccl.begin(self._lane, there, self._landed)
                self._mark = self._lane.mark([x.array for x in (*there, *self._landed)])

    def wait(self) -> None:
        """Until they are here; TimeoutError if they do not come."""
        waited = poll(lambda: self._mark.event.done, self._nccl.timeout)
        if waited is not None:
            raise silence(self._nccl, waited, {x.peer for x in self._received}, self._what)
        for message, landed in zip(self._received, self._landed, strict=True):
            landed.array.get(stream=self._lane.stream, out=flat(message.array))
