"""What is said while a kernel is compiled, so that nobody takes the first call of a dtype or an option for one that hangs.

A line on standard error at a terminal and in a notebook; everywhere a record of the logger ``numba_flash``, level INFO.
"""

import inspect
import logging
import os
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from numba_flash.files import disk, durations

_KEPT_AS_BITS = {"int16": "float16", "uint16": "bfloat16"}  # how kernels for the CPU see them
_log = logging.getLogger("numba_flash")
_begun = set()  # kinds of which this process has compiled one


class Compiling:
    """Says that a kernel is being compiled, and, once it is `done`, remembers how long that took.

    Parameters
    ----------
    kind : str
        ``"CUDA"`` or ``"CPU"``.
    kernel : str
        The kernel's name.
    variant : str
        Which of its variants: no two have the same.
    kept_in : Path, optional
        Directory in which later processes find it; None if they do not.
    """

    def __init__(self, kind: str, kernel: str, variant: str, kept_in: Path | None = None):
        self._key = kept_in, kernel, kind not in _begun
        _begun.add(kind)
        self._what = f"the {kind} kernel {kernel} ({variant})"
        kept = f"once: it is kept in {kept_in}" if kept_in else "every process does: there is no place to keep it"
        _say(f"compiling {self._what}{_estimate(durations.expected(*self._key))} ({kept})")
        self._start = time.perf_counter()

    def done(self) -> None:
        """It has been compiled."""
        seconds = time.perf_counter() - self._start
        durations.add(*self._key, seconds)
        _log.info("compiled %s in %.1f s", self._what, seconds)


def _estimate(seconds: float | None) -> str:
    return "" if seconds is None else f", about {max(1, round(seconds))} s by what it took here before"


def _say(text: str) -> None:
    """To the log; and on standard error, if somebody looks at that, the log does not go there, and ``NUMBA_FLASH_QUIET`` is not set."""
    shown = _log.isEnabledFor(logging.INFO) and any(_shows(handler) for handler in _handlers())
    _log.info("%s", text)
    if shown or os.environ.get("NUMBA_FLASH_QUIET", "") not in ("", "0"):
        return
    with suppress(AttributeError, OSError, ValueError):  # there is no standard error, or it is closed
        if sys.stderr.isatty() or _is_notebook(sys.stderr):
            print(f"numba_flash: {text}", file=sys.stderr, flush=True)


def _is_notebook(stream) -> bool:
    """True for what stands for standard error in the process behind a notebook."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def _handlers():
    """All that records of the logger come to."""
    logger = _log
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _shows(handler: logging.Handler) -> bool:
    """True if a record of level INFO goes where the line would go."""
    stream = getattr(handler, "stream", None)
    return stream is not None and handler.level <= logging.INFO and stream in (sys.stderr, sys.stdout)


def quiet() -> None:
    """Print nothing in this process, which says otherwise what it does."""
    os.environ["NUMBA_FLASH_QUIET"] = "1"


@contextmanager
def if_compiled(dispatcher, captures: str = ""):
    """Say so if Numba compiles `dispatcher` meanwhile: what it finds on disk takes no time. `captures`: what else tells it from others."""
    from numba.core import event

    class Say(event.Listener):
        told = None

        def on_start(self, event):
            if event.data["dispatcher"] is dispatcher:
                path = dispatcher.stats.cache_path
                kept_in = Path(path) if path and disk.trusted(Path(path)) else None
                variant = "; ".join(filter(None, (captures, _dtypes(dispatcher, event.data["args"]))))
                self.told = Compiling("CPU", dispatcher.py_func.__name__, variant, kept_in)

        def on_end(self, event):
            pass

    with event.install_listener("numba:compile", Say()) as say:
        yield
    if say.told is not None:
        say.told.done()


def _dtypes(dispatcher, types) -> str:
    """The dtypes of all arrays of a kernel for the CPU, those among its options, too: its variants differ in nothing else."""
    by_dtype = {}
    for parameter, kind in zip(inspect.signature(dispatcher.py_func).parameters, types, strict=False):
        for name, array in _arrays(parameter, kind):
            dtype = str(array.dtype)
            by_dtype.setdefault(_KEPT_AS_BITS.get(dtype, dtype), []).append(name)
    return "; ".join(f"{dtype} {', '.join(names)}" for dtype, names in by_dtype.items())


def _arrays(name: str, kind) -> list:
    """Numba's types of the arrays in what has that type, each with its name."""
    if hasattr(kind, "fields"):
        return [each for field, inner in zip(kind.fields, kind.types, strict=True) for each in _arrays(f"{name}.{field}", inner)]
    return [(name, kind)] if hasattr(kind, "ndim") else []
