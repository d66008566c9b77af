"""A line on stderr while a kernel is compiled, so that nobody takes the first call of a dtype or an option for one that hangs."""

import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

from numba_flash import disk

_KEPT_AS_BITS = {"int16": "float16", "uint16": "bfloat16"}  # how kernels for the CPU see them


def compiling(what: str, kept_in=None) -> None:
    """Say that `what` is compiled, and where it is kept; at a terminal alone, and not if ``NUMBA_FLASH_QUIET=1``.

    Parameters
    ----------
    what : str
        The kernel.
    kept_in : path, optional
        Directory in which later processes find it; None if they do not.
    """
    if os.environ.get("NUMBA_FLASH_QUIET", "") not in ("", "0"):
        return
    kept = f"once: it is kept in {kept_in}" if kept_in else "every process does: there is no place to keep it"
    with suppress(AttributeError, OSError, ValueError):  # there is no standard error, or it is closed
        if sys.stderr.isatty():
            print(f"numba_flash: compiling {what} ({kept})", file=sys.stderr, flush=True)


def quiet() -> None:
    """Say nothing in this process, which says otherwise what it does."""
    os.environ["NUMBA_FLASH_QUIET"] = "1"


@contextmanager
def if_compiled(dispatcher):
    """Say so if Numba compiles `dispatcher` meanwhile: what it finds on disk takes no time."""
    from numba.core import event

    class Say(event.Listener):
        def on_start(self, event):
            if event.data["dispatcher"] is dispatcher:
                path = dispatcher.stats.cache_path
                compiling(_kernel(dispatcher, event.data["args"]), path if path and disk.trusted(Path(path)) else None)

        def on_end(self, event):
            pass

    with event.install_listener("numba:compile", Say()):
        yield


def _kernel(dispatcher, types) -> str:
    """Name and dtypes of a kernel for the CPU."""
    dtypes = dict.fromkeys(str(each.dtype) for each in types if hasattr(each, "ndim"))
    return f"the CPU kernel {dispatcher.py_func.__name__} for {', '.join(_KEPT_AS_BITS.get(name, name) for name in dtypes)}"
