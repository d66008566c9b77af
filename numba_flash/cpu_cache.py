"""CPU kernels on disk, under keys that cover every source file of the package."""

from numba import njit

from numba_flash.fingerprint import source_fingerprint


def cached(dispatcher, fingerprint: str | None = None):
    """Keep what `dispatcher` compiles on disk; a `fingerprint` stands for what a closure captures, which Numba cannot compare."""
    try:
        dispatcher.enable_caching()
    except RuntimeError:  # no writable cache directory
        return dispatcher
    cache = dispatcher._cache
    cache._cache_file._source_stamp = (cache._cache_file._source_stamp, source_fingerprint())
    if fingerprint is not None:
        cache._index_key = lambda signature, codegen: (signature, codegen.magic_tuple(), fingerprint)
    return dispatcher


def kernel(py_func):
    """Compile `py_func` without the GIL, and keep it on disk."""
    return cached(njit(nogil=True)(py_func))
