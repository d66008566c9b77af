"""Device functions as plain Python on the host: builders are called while their decorators do nothing."""

from contextlib import contextmanager

import pytest

from numba_flash.cuda.sm90.backward import walk_backward
from numba_flash.cuda.work import schedule, sequence

AS_IT_IS = lambda function: function


@contextmanager
def on_host(*modules, **stand_ins):
    """While this lasts, device functions of these modules, and those that their builders make, are plain Python functions.

    So are those of `numba_flash.cuda.work.schedule`, `numba_flash.cuda.work.sequence` and `numba_flash.cuda.sm90.backward.walk_backward`.
    Each module sees the `stand_ins` in the place of what it has under these names.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in {schedule, sequence, walk_backward, *modules}:
            for name, value in dict(vars(module)).items():
                if hasattr(value, "py_func"):
                    patch.setattr(module, name, value.py_func)
                elif hasattr(value, "cache_info"):  # a builder, which keeps what it has made for the GPU
                    patch.setattr(module, name, value.__wrapped__)
            for name, value in {"device": AS_IT_IS, "inline": AS_IT_IS, **stand_ins}.items():
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        yield
