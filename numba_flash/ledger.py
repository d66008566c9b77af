"""How much memory a call will take for itself: who prepares to allocate some notes it here, and who asks for the preparation adds it up."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_open: ContextVar[list[int] | None] = ContextVar("numba_flash.ledger", default=None)


@contextmanager
def opened() -> Iterator[list[int]]:
    """A list of what is noted within, in bytes."""
    noted: list[int] = []
    token = _open.set(noted)
    try:
        yield noted
    finally:
        _open.reset(token)


def note(size: int) -> None:
    """A call that is prepared now will allocate so many bytes each time it runs."""
    noted = _open.get()
    if noted is not None:
        noted.append(size)
