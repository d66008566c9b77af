"""Processes of `numba_flash.distributed` as threads of one process, which talk through queues and are as strict as one may be."""

import threading
from queue import Queue

import numpy as np

from numba_flash.distributed import Message

TIMEOUT = 60


class Member:
    """A `Communicator` of one thread: arrays are read as late as they may be, when the receiver waits, and are garbage before that."""

    def __init__(self, rank: int, boxes: list[list[Queue]]):
        self.rank, self.size, self._boxes = rank, len(boxes), boxes
        self.sent = 0  # bytes

    def takes(self, library: str) -> bool:
        return library == "numpy"

    def exchange(self, sent: list[Message], received: list[Message], what: str) -> "Transfer":
        read = []
        for message in sent:
            assert message.peer != self.rank, f"{what} to oneself"
            assert message.array.flags.c_contiguous
            self.sent += message.array.nbytes
            read.append(threading.Event())
            self._boxes[self.rank][message.peer].put((message.array, read[-1]))
        for message in received:
            message.array.reshape(-1).view(np.uint8)[...] = 0xFF  # NaN
        boxes = [(self._boxes[message.peer][self.rank], message.array) for message in received]
        return Transfer(boxes, read)


class Transfer:
    """Arrays on their way: where those that are received come from, and when those that were sent have been read."""

    def __init__(self, boxes, read):
        self._boxes, self._read = boxes, read

    def wait(self) -> None:
        for box, array in self._boxes:
            sent, event = box.get(timeout=TIMEOUT)
            assert (sent.shape, sent.dtype) == (array.shape, array.dtype)
            array[...] = sent
            event.set()
        for event in self._read:
            assert event.wait(TIMEOUT), "nobody has read what was sent"
        self._boxes, self._read = [], []


def members(size: int) -> list[Member]:
    """As many of one group."""
    boxes = [[Queue() for _ in range(size)] for _ in range(size)]
    return [Member(rank, boxes) for rank in range(size)]


def together(size: int, function) -> list:
    """What ``function(comm)`` returns, or raises, in each of `size` threads."""
    results: list = [None] * size

    def run(comm):
        try:
            results[comm.rank] = function(comm)
        except Exception as error:
            results[comm.rank] = error

    threads = [threading.Thread(target=run, args=(comm,), name=f"process {comm.rank}") for comm in members(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
