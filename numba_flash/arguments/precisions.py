"""How accurate the products of float32 arrays have to be: the names for it, and which one holds where a call gives none."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

Precision: TypeAlias = Literal["float32", "ieee", "tf32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
USUAL: Precision = "float32"
VARIABLE = "NUMBA_FLASH_PRECISION"

_of_block: ContextVar[Precision | None] = ContextVar("numba_flash.precision", default=None)
_of_process: Precision | None = None  # until `set_precision` is called


def resolved(precision: Any) -> Any:
    """What a call was given as `precision`, which nobody has checked yet; the default in the place of None."""
    return get_precision() if precision is None else precision


@cache
def _of_environment() -> Precision:
    """What the environment variable says, as it is when somebody first asks."""
    return checked(VARIABLE, os.environ.get(VARIABLE) or USUAL)


def checked(argument: str, precision: Any, also: str = "") -> Precision:
    """One of `PRECISIONS`; the error for all else calls it `argument`, and ends what is expected with `also`."""
    if not isinstance(precision, str) or precision not in PRECISIONS:
        raise ValueError(f"{argument} must be one of {', '.join(PRECISIONS)}{also}; got {precision!r}")
    return PRECISIONS[PRECISIONS.index(precision)]  # of a subclass of str, too


def set_precision(precision: Precision) -> None:
    """Say how accurate float32 has to be in the calls of this process that do not say it themselves.

    Parameters
    ----------
    precision : str
        "float32": as accurate as IEEE float32, by whatever algorithm is. "ieee": IEEE products and sums, no tensor cores. "tf32":
        products of numbers of 11 bits are enough. It is what results have at least: a backend that has nothing faster may be more
        accurate.

    Raises
    ------
    ValueError
        It is none of these.

    Notes
    -----
    Until this is called, the environment variable ``NUMBA_FLASH_PRECISION`` says it, or where there is none, "float32" holds. Blocks of
    `use_precision` go before it, and ``precision=`` of a call before both. Arrays of other dtypes have one precision, their own.

    Examples
    --------
    >>> import numpy as np, numba_flash
    >>> x = np.eye(4, dtype=np.float32)
    >>> numba_flash.set_precision("tf32")
    >>> numba_flash.plan(x, x, x).problem.precision
    'tf32'
    >>> numba_flash.set_precision("float32")
    """
    global _of_process
    _of_process = checked("precision", precision)


def get_precision() -> Precision:
    """How accurate float32 has to be in calls that do not say it themselves.

    Returns
    -------
    str
        What the innermost block of `use_precision` says in this thread, or task of asyncio; else what `set_precision` has said; else the
        environment variable ``NUMBA_FLASH_PRECISION``; else "float32".

    Raises
    ------
    ValueError
        It is left to the environment variable, which holds none of these names.

    Examples
    --------
    >>> import numba_flash
    >>> numba_flash.get_precision()
    'float32'
    >>> with numba_flash.use_precision("tf32"):
    ...     numba_flash.get_precision()
    'tf32'
    """
    return _of_block.get() or _of_process or _of_environment()


def use_precision(precision: Precision) -> AbstractContextManager[None]:
    """Say how accurate float32 has to be in the calls of a ``with`` block that do not say it themselves.

    Parameters
    ----------
    precision : str
        "float32", "ieee" or "tf32", as in `set_precision`.

    Returns
    -------
    context manager
        For one ``with`` statement. It holds for this thread, or this task of asyncio, alone; blocks may be nested.

    Raises
    ------
    ValueError
        It is none of these names.

    Examples
    --------
    >>> import numpy as np, numba_flash
    >>> x = np.eye(4, dtype=np.float32)
    >>> with numba_flash.use_precision("tf32"):
    ...     numba_flash.plan(x, x, x).problem.precision
    'tf32'
    >>> numba_flash.plan(x, x, x).problem.precision
    'float32'
    """
    return _block(checked("precision", precision))


@contextmanager
def _block(precision: Precision) -> Iterator[None]:
    token = _of_block.set(precision)
    try:
        yield
    finally:
        _of_block.reset(token)
