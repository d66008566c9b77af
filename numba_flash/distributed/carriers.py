"""How K and V, and their gradients, come to the processes whose queries see them."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from numba_flash.arguments import arrays
from numba_flash.distributed.agreement import Call
from numba_flash.distributed.communicators import Communicator, Message, Transfer
from numba_flash.distributed.layouts import Chunk, count
from numba_flash.distributed.pieces import steps

# Bytes of all K and V up to which each process gets them all, and computes attention to them in one call. A ring sends as much, but in as
# many messages as there are processes, for each of which they wait: of small K and V, that takes up to twice the time and more. Of larger
# ones it takes as long, and no process needs memory for all. Measured: docs/lab/cpu.md, `GATHERED`.
GATHERED = 2**20


class Visit(NamedTuple):
    """Keys and values that are here now, and the chunks of the sequence that they are."""

    columns: tuple[Chunk, ...]
    k: Any
    v: Any


class Ring:
    """K and V go from each process to the next, while it computes attention to them; so do their gradients, one step behind.

    Liu, Zaharia and Abbeel, Ring Attention, arXiv:2310.01889; with gradients in float32, to which each process adds its part.
    """

    def __init__(self, call: Call, k: Any, v: Any):
        self._call, self._home = call, (k, v)
        self._comm, self._steps = call.comm, steps(call)
        self._sums: list = []
        self._going: Transfer | None = None

    def visits(self) -> Iterator[Visit]:
        """K and V of this process, of the one before it, and so on."""
        here = [compact(x) for x in self._home]
        rooms = [self._room(here) for _ in range(min(2, self._steps - 1))]
        for step in range(self._steps):
            there, transfer = here, None
            if step + 1 < self._steps:
                n = count(self._call.columns[self._source(step + 1)])
                there = [_within(room, x, n) for room, x in zip(rooms[step % 2], here, strict=True)]
                transfer = self._pass_on(here, there, f"K and V, step {step + 1}")
            yield Visit(self._call.columns[self._source(step)], *here)
            if transfer is not None:
                transfer.wait()
            here = there

    def _room(self, here: list) -> list:
        """For K and V of any process: one room is filled while attention to what the other holds is computed."""
        largest = max(map(count, self._call.columns))
        return [_of_size(x, largest).reshape(-1) for x in here]

    def give(self, step: int, dk: Any, dv: Any) -> None:
        """Add gradients of the keys of a visit to those that have come after them, and pass both on."""
        mine = [dk, dv]
        if self._going is not None:
            self._going.wait()
            for own, x in zip(mine, self._sums, strict=True):
                own += x
        last = step + 1 == self._steps
        rank, size = self._comm.rank, self._comm.size
        source = rank if last else self._source(step + 1)
        to, by = (self._source(step), (rank + step) % size) if last else ((rank + 1) % size, (rank - 1) % size)
        self._sums = [_of_size(x, count(self._call.columns[source])) for x in mine]
        if to == rank:
            self._sums, self._going = mine, None
            return
        self._going = exchange(self._comm, [(to, mine)], [(by, self._sums)], f"gradients of K and V, step {step + 1}")

    def end(self) -> list:
        """The gradients of this process's keys and values."""
        if self._going is not None:
            self._going.wait()
        return self._sums

    def _source(self, step: int) -> int:
        return (self._comm.rank - step) % self._comm.size

    def _pass_on(self, here: list, there: list, what: str) -> Transfer:
        rank, size = self._comm.rank, self._comm.size
        return exchange(self._comm, [((rank + 1) % size, here)], [((rank - 1) % size, there)], what)


class Gather:
    """Every process gets all K and V, and its part of the gradients from everyone."""

    def __init__(self, call: Call, k: Any, v: Any):
        self._call, self._home = call, (k, v)
        self._sums: list = []

    def visits(self) -> Iterator[Visit]:
        """All keys, in their order."""
        every = gather(self._call.comm, [*map(compact, self._home)], self._call.columns, "all K and V")
        yield Visit((Chunk(0, self._call.problem.nk, 0),), *every)

    def give(self, step: int, dk: Any, dv: Any) -> None:
        """Send everybody the gradients of its keys and values, and add up those of one's own, in the order of processes."""
        comm = self._call.comm
        parts = {peer: [_joined(x, self._call.columns[peer]) for x in (dk, dv)] for peer in range(comm.size)}
        mine = parts.pop(comm.rank)
        received = {peer: [_of_size(x, x.shape[-2]) for x in mine] for peer in parts}
        exchange(comm, [*parts.items()], [*received.items()], "gradients of all K and V").wait()
        received[comm.rank] = mine
        self._sums = [sum(received[peer][i] for peer in range(comm.size)) for i in range(2)]

    def end(self) -> list:
        """The gradients of this process's keys and values."""
        return self._sums


def gather(comm: Communicator, home: list, chunks: tuple[tuple[Chunk, ...], ...], what: str) -> list:
    """Whole arrays, of which each process has these chunks."""
    others = [peer for peer in range(comm.size) if peer != comm.rank]
    parts = {peer: [_of_size(x, count(chunks[peer])) for x in home] for peer in others}
    exchange(comm, [(peer, home) for peer in others], [*parts.items()], what).wait()
    parts[comm.rank] = home
    every = [_of_size(x, sum(map(count, chunks))) for x in home]
    for peer, part in parts.items():
        for chunk in chunks[peer]:
            for x, own in zip(every, part, strict=True):
                x[..., chunk.start : chunk.stop, :] = own[..., chunk.at : chunk.at + chunk.size, :]
    return every


def carrier(call: Call, k: Any, v: Any) -> Ring | Gather:
    """The one that the user wants, or that suits the size of K and V."""
    p = call.problem
    size = k.dtype.itemsize * p.batch[0] * p.batch[1] * p.hk * p.nk * (p.d + p.dv)
    algorithm = call.algorithm or ("gather" if size <= GATHERED else "ring")
    return Gather(call, k, v) if algorithm == "gather" else Ring(call, k, v)


def exchange(comm: Communicator, sent: list[tuple[int, list]], received: list[tuple[int, list]], what: str) -> Transfer:
    """Several arrays to each of some processes, and from each of others."""
    messages = [[Message(peer, x) for peer, own in each for x in own] for each in (sent, received)]
    return comm.exchange(*messages, what)


def compact(x: Any) -> Any:
    """The array, or a copy of it without gaps."""
    if x.flags.c_contiguous:
        return x
    copy = arrays.compact("what is sent", x, x.shape, x.dtype)
    copy[...] = x
    return copy


def _of_size(x: Any, n: int) -> Any:
    """A new array like this one, of so many keys."""
    return arrays.compact("what is received", x, (*x.shape[:-2], n, x.shape[-1]), x.dtype)


def _within(room: Any, x: Any, n: int) -> Any:
    """An array like this one, of so many keys, in memory that is there."""
    shape = (*x.shape[:-2], n, x.shape[-1])
    return room[: math.prod(shape)].reshape(shape)


def _joined(x: Any, chunks: tuple[Chunk, ...]) -> Any:
    """Those chunks of an array of the whole sequence, as their process has them."""
    part = _of_size(x, count(chunks))
    for chunk in chunks:
        part[..., chunk.at : chunk.at + chunk.size, :] = x[..., chunk.start : chunk.stop, :]
    return part
