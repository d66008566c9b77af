"""How long kernels took to compile, kept beside them: what another variant of one may take on this machine."""

import json
from pathlib import Path
from statistics import median

from numba_flash.files import disk

FILE = "seconds.json"
MOST = 5  # durations of a kernel that are kept, the latest
_of_this_process = {}  # where nothing can be kept


def expected(kept_in: Path | None, kernel: str, first: bool) -> float | None:
    """Seconds that compiling a variant of a kernel may take: the median of what variants of it took before; None if none was compiled.

    Parameters
    ----------
    kept_in : Path or None
        Directory in which it is kept.
    kernel : str
        Its name, which its variants share.
    first : bool
        True for the first kernel of its kind in a process, which takes longer: the compiler begins there. Others are looked at where no
        such one was measured.
    """
    measured = _load(kept_in)
    alike = measured.get(_key(kernel, first)) or measured.get(_key(kernel, not first))
    return median(alike) if alike else None


def add(kept_in: Path | None, kernel: str, first: bool, seconds: float) -> None:
    """Keep what compiling a variant of a kernel took. Of two processes that do so at once, what one says may be lost."""
    measured = _load(kept_in)
    key = _key(kernel, first)
    measured[key] = [*measured.get(key, []), round(seconds, 2)][-MOST:]
    if kept_in is not None:
        disk.store(kept_in / FILE, json.dumps(measured).encode())


def _key(kernel: str, first: bool) -> str:
    return f"{kernel}, {'first' if first else 'later'}"


def _load(kept_in: Path | None) -> dict[str, list[float]]:
    if kept_in is None:
        return _of_this_process
    data = disk.load(kept_in / FILE)
    return {} if data is None else json.loads(data)
