"""Functions of a score given by the user: their identity, their compilation on the CPU, and two that are built in.

A score function ``f(score, b, h, i, j) -> score`` gets the scaled (and capped) score of query i and key j in head h of batch element b,
before a bias is added. The same Python function is compiled into the CPU's and the GPU's kernels and called by the oracle. What it
captures or calls becomes constants of the compiled code (`numba_flash.scoremod.captures`).
"""

from __future__ import annotations

import inspect
import types
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike

from numba_flash.arguments import checks
from numba_flash.arguments.signatures import shown
from numba_flash.scoremod.captures import Capture

PARAMETERS = ("score", "b", "h", "i", "j")
KEPT = 64  # functions that stay compiled
UNWRAPPED = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # for what only compiled code calls: 0.5 MB each instead of 2.7
_captured: WeakKeyDictionary = WeakKeyDictionary()  # what each function of the user reached when it was last looked at
_kept: OrderedDict = OrderedDict()  # the least recently used first


class ScoreMod:
    """A score function and its derivative as they are now; equal to another one if they compile to equal code.

    It owns what is made of them: compiled code lives as long as whoever may call it holds its `ScoreMod`.

    Attributes
    ----------
    function, gradient : callable
        Plain Python functions of (score, b, h, i, j), copies that nothing can change; `gradient` may be None.
    fingerprint : str
        Hash of the bytecode and of everything that it refers to.
    adds : bool
        The derivative is that of the functions below, which only add to a score.
    relative : _RowPerHead or None
        The function, if all that it does is to add a number for each head and distance.
    rows : dict
        The compiled functions that change a row of scores on the CPU, by the type of a score (`numba_flash.cpu.scores`).
    prepared : dict
        Calls with this function that were prepared (`numba_flash.call`).
    """

    def __init__(self, fingerprint: str, function: Capture, gradient: Capture | None, relative: _RowPerHead | None = None):
        self.fingerprint, self.function = fingerprint, function.function
        self.gradient = None if gradient is None else gradient.function
        self.adds = gradient is not None and gradient.fingerprint == _capture("score_mod_grad", _one).fingerprint
        self.relative = relative if self.adds else None
        self.rows, self.prepared, self._checked = {}, {}, set()

    @classmethod
    def bind(cls, function, gradient, dtype: str, heads: int) -> ScoreMod | None:
        """Check the arguments score_mod and score_mod_grad for scores of inputs of that dtype, with so many query heads."""
        found = find(function, gradient)
        if isinstance(function, _RowPerHead):
            function.check_heads(heads)
            function.check_range(dtype)
        if found is not None:
            found.check("float64" if dtype == "float64" else "float32")
        return found

    def check(self, number: str) -> None:
        """Raise unless both functions compile for a score of that type, and return a number."""
        if number in self._checked:
            return
        for name, dispatcher in zip(("score_mod", "score_mod_grad"), self.compiled, strict=True):
            result = "float64" if dispatcher is None else _result_type(name, dispatcher, number)
            if not result.startswith(("float", "int", "uint")):
                raise TypeError(f"{name} must return a real number; it returns {result}")
        self._checked.add(number)

    @cached_property
    def compiled(self) -> tuple:
        """Both functions compiled by Numba for the CPU, None for a missing derivative."""
        from numba import njit

        compile = njit(**UNWRAPPED)
        return compile(self.function), None if self.gradient is None else compile(self.gradient)

    def __eq__(self, other):
        return isinstance(other, ScoreMod) and self.fingerprint == other.fingerprint

    def __hash__(self):
        return hash(self.fingerprint)

    def __repr__(self):
        return f"ScoreMod({self.fingerprint})"


def find(function, gradient) -> ScoreMod | None:
    """What the arguments score_mod and score_mod_grad are now: the same `ScoreMod` again, unless something that they reach has changed.

    A function may bring its derivative as an attribute `score_mod_grad`.
    """
    if function is None:
        if gradient is not None:
            raise ValueError("score_mod_grad needs a score_mod; got score_mod=None")
        return None
    if gradient is None:
        gradient = getattr(function, "score_mod_grad", None)
    own, brought = _capture("score_mod", function), None if gradient is None else _capture("score_mod_grad", gradient)
    fingerprint = own.fingerprint if brought is None else f"{own.fingerprint}-{brought.fingerprint}"
    relative = function if isinstance(function, _RowPerHead) else None
    if relative is not None:  # a prepared call of the same code by the user has not checked that
        fingerprint = f"{fingerprint}-{function.heads}"
    found = _kept.get(fingerprint) or _kept.setdefault(fingerprint, ScoreMod(fingerprint, own, brought, relative))
    with suppress(KeyError):  # another thread has just forgotten it; a lock would be held for ever in a child forked meanwhile
        _kept.move_to_end(fingerprint)
    if len(_kept) > KEPT:
        _, forgotten = _kept.popitem(last=False)
        forgotten.prepared.clear()  # these calls hold it, too
    return found


def _capture(name: str, function) -> Capture:
    """What the function is now; it is only looked through anew where that has changed."""
    plain = getattr(function, "py_func", function)
    if not isinstance(plain, types.FunctionType):
        _refuse(name, function)
    known = _captured.get(plain)
    if known is None or not known.holds(plain):
        _check_parameters(name, plain)
        known = _captured[plain] = Capture(name, plain)
    return known


def _refuse(name: str, function) -> None:
    if not callable(function):
        raise TypeError(f"{name} must be a function of ({', '.join(PARAMETERS)}); got {function!r}")
    raise TypeError(f"{name} must be a Python function, so that it can be compiled; got {type(function).__name__}")


def _check_parameters(name: str, function: types.FunctionType) -> None:
    """Raise unless the function takes exactly the arguments that it gets: one with a default is no way to hand over a constant."""
    signature = inspect.signature(function)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if kinds != [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(PARAMETERS):
        wanted, defaults = ", ".join(PARAMETERS), [each.name for each in signature.parameters.values() if each.default is not each.empty]
        hint = f" and nothing else: a function within a function can capture {', '.join(defaults)}" if defaults else ""
        raise TypeError(f"{name} must take ({wanted}){hint}; it has the signature {signature}")


def _result_type(name: str, dispatcher, number: str) -> str:
    """Numba's name of what the function returns."""
    from numba import types as nb
    from numba.core.errors import NumbaError

    arguments = (getattr(nb, number), *[nb.int64] * (len(PARAMETERS) - 1))
    try:
        dispatcher.compile(arguments)
    except NumbaError as error:
        raise TypeError(f"{name} does not compile: {error}") from error
    return str(dispatcher.overloads[arguments].signature.return_type)


# ---- functions that are there ------------------------------------------------------------------------------------------------------------


def _one(score, b, h, i, j):
    return 1.0


class _RowPerHead:
    """A score function made of an array with a row for each query head, which adds a number for each distance j - i; equal to another one
    that is made of equal parts.
    """

    row = ""  # what a row is called
    array = ""  # and all of them
    score_mod_grad = staticmethod(_one)

    def __init__(self, array: np.ndarray, q_start: int, function: Callable):
        self._parts = array, q_start
        self.py_func = function  # what is compiled

    @property
    def q_start(self) -> int:
        """Position of query 0 among the keys."""
        return self._parts[1]

    @property
    def heads(self) -> int:
        """Number of query heads that it is for."""
        return len(self._parts[0])

    def greatest(self, distance: int) -> float:
        """An upper bound of the absolute number that is added up to that distance; NaN if one is."""
        return float(np.abs(self._parts[0].astype(np.float64)).max(initial=0.0))

    def check_heads(self, heads: int) -> None:
        """Raise unless there is a row for each of so many query heads."""
        if heads != self.heads:
            rows, count = f"{self.heads} {self.row}{'s' * (self.heads != 1)}", f"{heads} head{'s' * (heads != 1)}"
            raise ValueError(f"score_mod is {type(self).__name__} with {rows}, one for each query head; q has {count}")

    def check_range(self, dtype: str) -> None:
        """Raise if a number would be no number where scores of inputs of that dtype are computed."""
        most = np.finfo("float64" if dtype == "float64" else "float32").max
        size = np.abs(self._parts[0].astype(np.float64))
        beyond = size[np.isfinite(size) & (size > most)]
        if beyond.size:
            raise ValueError(f"{self.array} must lie between -{most:.3g} and {most:.3g}, computed in {most.dtype}; got {beyond.max():.3g}")

    def __call__(self, score, b, h, i, j):
        return self.py_func(score, b, h, i, j)

    def __eq__(self, other):
        return type(self) is type(other) and self._identity() == other._identity()

    def __hash__(self):
        return hash(self._identity())

    def _identity(self) -> tuple:
        array, q_start = self._parts
        return array.dtype.str, array.shape, array.tobytes(), q_start

    def __reduce__(self):
        return type(self), self._parts

    def __repr__(self):
        array, q_start = self._parts
        return f"{type(self).__name__}({array!r}, q_start={q_start})"


def _numbers(name: str, x, ndim: int, shape: str) -> np.ndarray:
    """A copy of `x` that nobody can change, if it is an array of real numbers that Numba knows."""
    try:
        x = np.array(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be an array of real numbers; got {type(x).__name__}: {error}") from error
    if x.dtype.kind not in "iu" and x.dtype.name not in ("float32", "float64"):
        raise TypeError(f"{name}.dtype ({x.dtype.name}) must be float32, float64 or an integer dtype")
    if x.ndim != ndim:
        raise ValueError(f"{name} must have shape {shape}; got {x.shape}")
    x = x.astype(x.dtype.newbyteorder("="), copy=False)
    x.setflags(write=False)
    return x


def _index(offset: int) -> type:
    """The shortest type of integers that holds every ``i - j`` with at most so much added."""
    return np.int32 if abs(offset) <= 2**30 else np.int64


class alibi(_RowPerHead):
    """Attention with linear biases (Press et al., arXiv:2108.12409): ``score - slopes[h] * |i + q_start - j|``.

    A function for `score_mod`; it brings its derivative.

    Parameters
    ----------
    slopes : array, shape (Hq,)
        One slope per query head.
    q_start : int
        Position of query 0 among the keys.
    """

    row, array = "slope", "slopes"

    @shown
    def __init__(self, slopes: ArrayLike, q_start: int = 0):
        slopes, q_start = _numbers("slopes", slopes, 1, "(Hq,)"), checks.integer("q_start", q_start)
        index = _index(q_start)

        def alibi(score, b, h, i, j):
            number = type(score)
            return score - number(slopes[h]) * abs(number(index(i + q_start - j)))

        super().__init__(slopes, q_start, alibi)

    def greatest(self, distance: int) -> float:
        return super().greatest(distance) * (distance + abs(self.q_start))

    @property
    def slopes(self) -> np.ndarray:
        """One slope per query head."""
        return self._parts[0]


class relative_position(_RowPerHead):
    """A learned bias for each distance (Shaw et al., arXiv:1803.02155; T5, arXiv:1910.10683): ``score + table[h, j - i - q_start]``.

    A function for `score_mod`; it brings its derivative. The table is a constant of the compiled kernel; to train one, pass a `bias`.

    Parameters
    ----------
    table : array, shape (Hq, 2 R + 1)
        Column R is distance 0; distances beyond R use the first or the last column.
    q_start : int
        Position of query 0 among the keys.
    """

    row, array = "row", "table"

    @shown
    def __init__(self, table: ArrayLike, q_start: int = 0):
        table, q_start = _numbers("table", table, 2, "(Hq, 2 R + 1)"), checks.integer("q_start", q_start)
        if table.shape[1] % 2 == 0:
            raise ValueError(f"table must have shape (Hq, 2 R + 1); got {table.shape}")
        reach = table.shape[1] // 2
        index = _index(abs(q_start) + reach)
        first, last, columns, flat = index(reach - q_start), index(2 * reach), index(table.shape[1]), table.ravel()

        def relative_position(score, b, h, i, j):
            of_first = index(i - first)  # the key of the first column
            column = max(min(index(j - of_first), last), index(0))
            return score + type(score)(flat[np.uint32(h * columns + column)])

        super().__init__(table, q_start, relative_position)

    @property
    def table(self) -> np.ndarray:
        """A row per query head, a column per distance."""
        return self._parts[0]
