"""What processes say to each other, whoever carries it: the protocol, and MPI."""

import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

TIMEOUT = 1800.0  # seconds; a process waits as long as another computes
TAG = 31415
LONGEST_NAP = 1e-3  # seconds between two looks at what has arrived


class Message(NamedTuple):
    """A contiguous array that goes to, or comes from, the process `peer`."""

    peer: int
    array: Any


class Transfer(Protocol):
    """Messages on their way."""

    def wait(self) -> None:
        """Until all that is to be received is there, and what was sent may be overwritten.

        With CuPy arrays the process may go on at once, if what comes on CuPy's current stream from then on waits in its place.
        """


class Communicator(Protocol):
    """A group of processes, each of which calls the same functions in the same order.

    Attributes
    ----------
    rank, size : int
        The number of this process, and how many there are.
    """

    rank: int
    size: int

    def takes(self, library: str) -> bool:
        """True if it carries arrays of that library, "numpy" or "cupy"."""

    def exchange(self, sent: list[Message], received: list[Message], what: str) -> Transfer:
        """Begin to send arrays and to receive others of known shapes; `what` they are is for errors.

        Arrays are of one library that it takes; and, whatever it takes, NumPy's where processes agree on a call. Of CuPy arrays, those that
        are sent are there, and the others free, when all is done that is on the current stream.

        All processes begin exchanges in the same order, and several may be on their way: each is matched with the same one of the others.
        """


def share(comm: Communicator, mine: Any) -> list:
    """What each process says, by its number; any object that can be pickled."""
    text = np.frombuffer(pickle.dumps(mine), np.uint8)
    others = [peer for peer in range(comm.size) if peer != comm.rank]
    sizes = {peer: np.empty(1, np.int64) for peer in others}
    own = np.array([text.size])
    what = "the call that all processes make together"
    comm.exchange([Message(peer, own) for peer in others], [Message(*item) for item in sizes.items()], what).wait()
    texts = {peer: np.empty(int(n[0]), np.uint8) for peer, n in sizes.items()}
    comm.exchange([Message(peer, text) for peer in others], [Message(*item) for item in texts.items()], what).wait()
    return [mine if peer == comm.rank else pickle.loads(texts[peer].tobytes()) for peer in range(comm.size)]


def poll(done: Callable[[], bool], timeout: float) -> float | None:
    """Wait until something is done: None, or the seconds that it has not been."""
    begin = time.monotonic()
    while not done():
        waited = time.monotonic() - begin
        if waited > timeout:
            return waited
        time.sleep(min(LONGEST_NAP, waited / 10))
    return None


def silence(comm: Any, waited: float, peers: set[int], what: str) -> TimeoutError:
    """What is raised if processes do not answer."""
    silent = ", ".join(map(str, sorted(peers)))
    return TimeoutError(
        f"process {comm.rank} of {comm.size} has waited {waited:.0f} s for process {silent} ({what});"
        " it has died, or is not in the same call"
    )


class Mpi:
    """NumPy arrays by mpi4py.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        The processes.
    timeout : float
        Seconds after which a process gives up waiting for another.
    """

    def __init__(self, comm: Any, timeout: float = TIMEOUT):
        self._comm, self.timeout = comm, timeout
        self.rank, self.size = comm.Get_rank(), comm.Get_size()

    def takes(self, library: str) -> bool:
        return library == "numpy"

    def exchange(self, sent: list[Message], received: list[Message], what: str) -> "Requests":
        begun = [(x.peer, self._comm.Irecv(flat(x.array), x.peer, TAG)) for x in received]
        begun += [(x.peer, self._comm.Isend(flat(x.array), x.peer, TAG)) for x in sent]
        return Requests(begun, self, what)


class Requests:
    """Messages on their way by MPI."""

    def __init__(self, begun: list[tuple[int, Any]], comm: Mpi, what: str):
        self._open, self._comm, self._what = begun, comm, what

    def wait(self) -> None:
        """Until all is there; TimeoutError if it does not come."""
        waited = poll(self._arrived, self._comm.timeout)
        if waited is not None:
            for _, request in self._open:
                request.Cancel()
            raise silence(self._comm, waited, {peer for peer, _ in self._open}, self._what)

    def _arrived(self) -> bool:
        self._open = [(peer, request) for peer, request in self._open if not request.Test()]
        return not self._open


def flat(x: Any) -> Any:
    """The bytes of a contiguous array, in place."""
    return x.reshape(-1).view(np.uint8)
