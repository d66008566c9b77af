"""What numba-cuda asks of NumPy while it is imported, and newer NumPys do not have.

Its metadata do not say which NumPys it works with. What is missing is supplied meanwhile, to it
alone where that is possible, and taken away again.
"""

import sys
from contextlib import contextmanager
from importlib.machinery import PathFinder, SourceFileLoader

import numpy as np

# It makes a time of no unit when it is imported: deprecated in NumPy 2.5, and an error later. Only
# the number of the result is used, which is the same in every unit.
UNITLESS = "numba.cuda.np.npdatetime_helpers"
ASKED, MENDED = b'np.timedelta64("nat")', b'np.timedelta64("nat", "s")'


@contextmanager
def supplied():
    """Meanwhile `numba.cuda`, and what it imports once it compiles, can be imported."""
    with _times_with_units(), _row_stack():
        yield


class _Mended(SourceFileLoader):
    """Reads a module whose source asks for what is gone; neither reads nor writes its bytecode."""

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path).replace(ASKED, MENDED), path)


class _Finder:
    """Finds that module, and leaves all others to others."""

    def find_spec(self, name, path, target=None):
        """As the import system asks for it: the folder `path` is that of the package."""
        spec = PathFinder.find_spec(name, path, target) if name == UNITLESS else None
        if spec is not None:
            spec.loader = _Mended(name, spec.origin)
        return spec


@contextmanager
def _times_with_units():
    """`UNITLESS` is imported as if it named a unit."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


@contextmanager
def _row_stack():
    """`numpy.row_stack`, which NumPy 2.5 lacks, is there."""
    missing = not hasattr(np, "row_stack")
    if missing:
        np.row_stack = lambda tup: np.vstack(tup)  # noqa: NPY201
    try:
        yield
    finally:
        if missing:
            del np.row_stack  # noqa: NPY201
