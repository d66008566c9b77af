"""CPU kernels on disk: where Numba would keep them, under keys that cover all sources that they are made of, and checked before use.

Numba's own cache shares one index between functions of one name, and executes what it reads unchecked. Here every function and signature
has a file of its own, which is replaced as a whole, begins with a checksum, and says what it is made of.
"""

import hashlib
import pickle
import sys
from functools import partial
from pathlib import Path

import numba
from numba import njit
from numba.core.caching import CompileResultCacheImpl, NullCache
from numba.core.serialize import dumps

from numba_flash.files import disk
from numba_flash.files.fingerprint import package


class Cache(NullCache):
    """What Numba compiled of one function, with these `options`; `fingerprint` stands for what a closure captures, which Numba cannot
    compare.

    Numba asks `load_overload` before it compiles for new types, and hands what it compiled to `save_overload`.
    """

    def __init__(self, py_func, fingerprint: str | None, options: dict):
        self._format = CompileResultCacheImpl(py_func)  # RuntimeError if there is no place for it
        self._directory = Path(self._format.locator.get_cache_path()) / "kernels"
        self._name, self._fingerprint, self._options = py_func.__name__, fingerprint, sorted(options.items())
        self._module = py_func.__module__.partition(".")[2]

    @property
    def cache_path(self) -> str:
        """The folder in which the files are."""
        return str(self._directory)

    def _place(self, signature, codegen) -> tuple[Path, bytes]:
        """The file of an overload, and what it must begin with: an edited package or another Numba takes the place of the old."""
        name = repr((self._name, self._fingerprint, signature, codegen.magic_tuple(), sys.version))
        path = self._directory / f"{self._name}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        sources = package().closure(self._module, kept_in=self._directory)
        return path, repr((name, sources, self._options, numba.__version__)).encode()

    def load_overload(self, sig, target_context):
        """The compiled overload, None if it is not there whole and unchanged."""
        target_context.refresh()
        path, key = self._place(sig, target_context.codegen())
        data = disk.load(path)
        if data is None or not data.startswith(key):
            return None
        return self._format.rebuild(target_context, pickle.loads(data[len(key) :]))

    def save_overload(self, sig, data) -> None:
        """Keep a compiled overload."""
        if self._format.check_cachable(data):
            path, key = self._place(sig, data.codegen)
            disk.store(path, key + dumps(self._format.reduce(data)))


def cached(dispatcher, fingerprint: str | None = None):
    """Keep what `dispatcher` compiles on disk, if there is a place for it."""
    try:
        dispatcher._cache = Cache(dispatcher.py_func, fingerprint, dispatcher.targetoptions)
    except RuntimeError:
        disk.give_up(Path(__file__).parent / "__pycache__", "neither it nor the user's folder for caches can be written to")
    return dispatcher


PART = {"forceinline": True}
part = partial(njit, **PART)
"""Compile a function into each kernel that calls it. Where `fastmath` lets the compiler reorder sums, a function compiled beside the kernel
may round otherwise: a process that compiles the kernel has two versions of it, one that reads the kernel from disk has another one.
"""


def kernel(py_func):
    """Compile `py_func` without the GIL, and keep it on disk."""
    return cached(njit(nogil=True)(py_func))
