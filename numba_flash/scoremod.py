"""Functions of a score given by the user: their identity, their compilation on the CPU, and two that are built in.

A score function ``f(score, b, h, i, j) -> score`` gets the scaled (and capped) score of query i and key j in head h of batch element b,
before a bias is added. The same Python function is compiled into the CPU's and the GPU's kernels and called by the oracle. What it
captures, numbers and arrays, becomes constants of the compiled code.
"""

import hashlib
import inspect
import types
from collections.abc import Callable
from functools import lru_cache

import numpy as np

PARAMETERS = 5


class ScoreMod:
    """A score function and its derivative; equal to another one if they compile to equal code.

    Attributes
    ----------
    function, gradient : callable
        Plain Python functions of (score, b, h, i, j); `gradient` may be None.
    fingerprint : str
        Hash of the bytecode and of everything that it refers to.
    """

    def __init__(self, function: Callable, gradient: Callable | None):
        self.function, self.gradient = function, gradient
        self.fingerprint = "-".join(fingerprint(f) for f in (function, gradient) if f is not None)

    @classmethod
    def bind(cls, function, gradient, dtype: str) -> "ScoreMod | None":
        """Check the arguments score_mod and score_mod_grad; a function may bring its derivative as an attribute `score_mod_grad`."""
        if function is None:
            if gradient is not None:
                raise ValueError("score_mod_grad needs a score_mod; got score_mod=None")
            return None
        if gradient is None:
            gradient = getattr(function, "score_mod_grad", None)
        plain = _check("score_mod", function, dtype)
        return cls(plain, None if gradient is None else _check("score_mod_grad", gradient, dtype))

    def __eq__(self, other):
        return isinstance(other, ScoreMod) and self.fingerprint == other.fingerprint

    def __hash__(self):
        return hash(self.fingerprint)

    def __repr__(self):
        return f"ScoreMod({self.fingerprint})"


def fingerprint(function: Callable) -> str:
    """Hash of a function's bytecode, constants, captured values, and the globals it names, through all functions that it calls."""
    digest = hashlib.sha256()
    _update(digest, function, set())
    return digest.hexdigest()[:24]


def _update(digest, x, seen: set) -> None:
    x = getattr(x, "py_func", x)
    if isinstance(x, types.FunctionType):
        if id(x) not in seen:
            seen.add(id(x))
            captured = inspect.getclosurevars(x)
            _update(digest, x.__code__, seen)
            _update(digest, sorted({**captured.globals, **captured.nonlocals}.items()), seen)
    elif isinstance(x, types.CodeType):
        digest.update(x.co_code)
        _update(digest, (x.co_names, x.co_varnames, x.co_consts), seen)
    elif isinstance(x, tuple | list):
        digest.update(f"{type(x).__name__}{len(x)}".encode())
        for item in x:
            _update(digest, item, seen)
    elif isinstance(x, np.ndarray):
        digest.update(f"{x.dtype.str}{x.shape}".encode() + x.tobytes())
    elif isinstance(x, types.ModuleType):
        digest.update(x.__name__.encode())
    else:
        digest.update(f"{type(x).__name__} {x!r}\0".encode())


def _check(name: str, function, dtype: str) -> Callable:
    """The plain Python function, once it is known to compile for a score of the accumulation dtype."""
    if not callable(function):
        raise TypeError(f"{name} must be a function of (score, b, h, i, j); got {function!r}")
    plain = getattr(function, "py_func", function)
    if not isinstance(plain, types.FunctionType):
        raise TypeError(f"{name} must be a Python function, so that it can be compiled; got {type(function).__name__}")
    try:
        inspect.signature(plain).bind(*range(PARAMETERS))
    except TypeError as error:
        raise TypeError(f"{name} must take (score, b, h, i, j); it has the signature {inspect.signature(plain)}") from error
    result = _result_type(name, plain, "float64" if dtype == "float64" else "float32")
    if not result.startswith(("float", "int", "uint")):
        raise TypeError(f"{name} must return a real number; it returns {result}")
    return plain


def _result_type(name: str, function: Callable, number: str) -> str:
    """Numba's name of what `function` returns."""
    from numba import types as nb
    from numba.core.errors import NumbaError

    arguments = (getattr(nb, number), *[nb.int64] * (PARAMETERS - 1))
    dispatcher = jitted(function)
    try:
        dispatcher.compile(arguments)
    except NumbaError as error:
        raise TypeError(f"{name} does not compile: {error}") from error
    return str(dispatcher.overloads[arguments].signature.return_type)


@lru_cache(maxsize=256)
def jitted(function: Callable):
    """The function compiled by Numba, for the CPU."""
    from numba import njit

    return njit(function)


def alibi(slopes, q_start: int = 0) -> Callable:
    """Attention with linear biases (Press et al., arXiv:2108.12409): ``score - slopes[h] * |i + q_start - j|``.

    Parameters
    ----------
    slopes : array, shape (Hq,)
        One slope per query head.
    q_start : int
        Position of query 0 among the keys.

    Returns
    -------
    callable
        For `score_mod`; it brings its derivative.
    """
    slopes = np.array(slopes)

    def alibi(score, b, h, i, j):
        return score - slopes[h] * abs(i + q_start - j)

    return _with_derivative_one(alibi)


def relative_position(table, q_start: int = 0) -> Callable:
    """A learned bias for each distance (Shaw et al., arXiv:1803.02155; T5, arXiv:1910.10683): ``score + table[h, j - i - q_start]``.

    The table is a constant of the compiled kernel; to train one, pass a `bias`.

    Parameters
    ----------
    table : array, shape (Hq, 2 R + 1)
        Column R is distance 0; distances beyond R use the first or the last column.
    q_start : int
        Position of query 0 among the keys.

    Returns
    -------
    callable
        For `score_mod`; it brings its derivative.
    """
    table = np.array(table)
    if table.ndim != 2 or table.shape[1] % 2 == 0:
        raise ValueError(f"table must have shape (Hq, 2 R + 1); got {table.shape}")
    reach = table.shape[1] // 2

    def relative_position(score, b, h, i, j):
        return score + table[h, min(max(j - i - q_start, -reach), reach) + reach]

    return _with_derivative_one(relative_position)


def _with_derivative_one(function: Callable) -> Callable:
    def one(score, b, h, i, j):
        return 1.0

    function.score_mod_grad = one
    return function
