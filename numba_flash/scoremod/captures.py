"""What a function of the user reaches: everything that it captures or calls, followed, hashed and copied.

Numba compiles what a function captures as a constant, and never looks again. So a function is known by the values of all names in its
code, and in the code of functions that it calls: captured variables, globals, attributes of modules. What gets compiled is a copy of it
that refers to copies of them, so that it is what was hashed, and stays it.
"""

import builtins
import dis
import enum
import hashlib
import sys
import types
from functools import lru_cache, partial
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn

import numpy as np

LIBRARIES = ("builtins", "cmath", "math", "numba", "numpy", "operator", "random", "scipy")  # known by name and version
CONSTANTS = (bool, int, float, complex, str, bytes, type(None))
_MISSING = object()


class Path(NamedTuple):
    """A name that code loads, and the attributes that it takes of it at once."""

    captured: bool  # by the function that it is in, else a global
    name: str
    attributes: tuple[str, ...]


class Then(NamedTuple):
    """An array, and what it was when it was copied."""

    array: Any
    dtype: np.dtype
    shape: tuple[int, ...]
    data: bytes


@lru_cache(maxsize=1024)
def paths(code: types.CodeType) -> tuple[Path, ...]:
    """The captured and global names that code loads, with all code that is nested in it."""
    found = {}
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for at, step in enumerate(steps):
        captured = step.opname.endswith("DEREF") and step.argval in code.co_freevars
        if captured or step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            taken = takewhile(lambda other: other.opname in ("LOAD_ATTR", "LOAD_METHOD"), steps[at + 1 :])
            found[Path(captured, step.argval, tuple(other.argval for other in taken))] = None
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= {path: None for path in paths(inner) if not path.captured or path.name in code.co_freevars}
    return tuple(found)


class Capture:
    """A function as it is now.

    Parameters
    ----------
    name : str
        The argument that it is, for errors.
    function : function
        What the user gave.

    Attributes
    ----------
    function : function
        The copy, which nothing that is done to the original reaches.
    fingerprint : str
        Equal for two functions that compile to equal code.

    Raises
    ------
    TypeError
        Something that it refers to cannot be followed; the message names it.
    """

    def __init__(self, name: str, function: types.FunctionType):
        self._name, self._code = name, function.__code__
        self._digest, self._copies = hashlib.sha256(), {}
        self._seen, self._arrays = [], []
        self.function = self._function(function)
        self.fingerprint = self._digest.hexdigest()[:24]
        del self._digest, self._copies

    def holds(self, function: types.FunctionType) -> bool:
        """True while nothing of what the same function reaches has changed. (It is not kept here, so that it can be forgotten.)"""
        if function.__code__ is not self._code:
            return False
        try:
            for look, name, value in self._seen:
                if look(name, _MISSING) is not value:
                    return False
        except ValueError:  # a captured variable was deleted
            return False
        for then in self._arrays:
            if then.array.dtype != then.dtype or then.array.shape != then.shape or then.array.tobytes() != then.data:
                return False
        return True

    def _put(self, *parts) -> None:
        """Add to the hash."""
        for part in parts:
            data = part if isinstance(part, bytes) else f"{type(part).__name__} {part!r}".encode()
            self._digest.update(f"{len(data)} ".encode() + data)

    def _refuse(self, label: str, why: str) -> NoReturn:
        raise TypeError(f"{self._name} refers to {label}, {why}")

    def _look(self, label: str, look, name: str):
        """What `name` stands for now, which `holds` compares with what it stands for then."""
        try:
            value = look(name, _MISSING)
        except ValueError:  # a captured variable without a value
            value = _MISSING
        if value is _MISSING:
            self._refuse(label, "which is not defined")
        self._seen.append((look, name, value))
        return value

    # ---- functions and modules ----

    def _function(self, function: types.FunctionType, dispatcher=None):
        """The copy of a function, compiled like its `dispatcher` if it has one."""
        key = id(function) if dispatcher is None else id(dispatcher)
        if key in self._copies:
            self._put("again", [*self._copies].index(key))
            return self._copies[key]
        if self._copies:  # called by the one that was given
            self._seen += [(partial(getattr, function), "__code__", function.__code__)]
            self._seen += [(partial(getattr, function), "__defaults__", function.__defaults__)]
        code, namespace = function.__code__, {"__builtins__": builtins, "__name__": function.__module__}
        cells = tuple(types.CellType() for _ in code.co_freevars)
        copy = types.FunctionType(code, namespace, function.__name__, None, cells)
        self._put_code(code)
        copy.__defaults__ = self._copy("a default argument", function.__defaults__)
        self._copies[key] = copy if dispatcher is None else self._compiled(dispatcher, copy)  # before names, which may lead back here
        for captured, name, attributes in paths(code):
            if captured:
                at = code.co_freevars.index(name)
                value = self._look(name, partial(getattr, function.__closure__[at]), "cell_contents")
                cells[at].cell_contents = self._copy(name, value, attributes)
            elif name not in function.__globals__ and hasattr(builtins, name):
                self._seen.append((function.__globals__.get, name, _MISSING))
            else:
                namespace[name] = self._copy(name, self._look(name, function.__globals__.get, name), attributes)
        return self._copies[key]

    def _put_code(self, code: types.CodeType) -> None:
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        self._put(code.co_code, code.co_exceptiontable, counts, names, len(code.co_consts))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._put_code(constant)
            else:
                self._put(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)

    def _compiled(self, dispatcher, copy: types.FunctionType):
        """A function of Numba with the options of `dispatcher` that has compiled nothing yet: the other may know old constants."""
        options = [(name, sorted(x) if isinstance(x, set) else x) for name, x in sorted(dispatcher.targetoptions.items())]
        self._put("njit", options, sorted(map(str, dispatcher.locals.items())))
        return type(dispatcher)(copy, dispatcher.locals, dispatcher.targetoptions, dispatcher._compiler.pipeline_class)

    def _dispatcher(self, dispatcher):
        """The same for all that it calls; if it was declared with signatures, it has these and no others."""
        copy = self._function(dispatcher.py_func, dispatcher)
        if not dispatcher._can_compile and copy._can_compile:
            signatures = [each.signature for each in dispatcher.overloads.values()]
            self._put("signatures", list(map(str, signatures)))
            for signature in signatures:
                copy.compile(signature)
            copy.disable_compile()
        return copy

    def _module(self, label: str, module: types.ModuleType, attributes: tuple[str, ...]) -> types.ModuleType:
        """A module of the user: another one with nothing but what is taken of it."""
        if not attributes:
            self._refuse(label, f"a module; what it takes of it must be written {label}.name")
        label = f"{label}.{attributes[0]}"
        value = self._look(label, partial(getattr, module), attributes[0])
        copy = self._copies.setdefault(id(module), types.ModuleType(module.__name__))
        setattr(copy, attributes[0], self._copy(label, value, attributes[1:]))
        return copy

    # ---- values ----

    def _copy(self, label: str, x, attributes: tuple[str, ...] = ()):
        """`x` as it is now, once it is hashed; of a module what its `attributes` lead to."""
        from numba.core.registry import CPUDispatcher
        from numba.core.types import Type

        self._put(f"{type(x).__module__}.{type(x).__qualname__}")
        if isinstance(x, CPUDispatcher):
            return self._dispatcher(x)
        if isinstance(x, types.ModuleType) and x.__name__.split(".")[0] not in LIBRARIES:
            return self._module(label, x, attributes)
        if isinstance(x, np.ndarray | np.void):
            return self._array(label, x)
        if isinstance(x, tuple):
            items = [self._copy(label, item) for item in x]
            self._put(len(items), getattr(x, "_fields", ()))
            return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
        if isinstance(x, enum.EnumMeta | enum.Enum):
            members = x.__members__.values() if isinstance(x, enum.EnumMeta) else [x]
            self._put([(member.name, repr(member.value)) for member in members])
        elif type(x) in CONSTANTS or isinstance(x, np.generic | np.dtype | Type):
            self._put(repr(x), repr(getattr(x, "dtype", None)))
        elif isinstance(x, type) and hasattr(x, "_fields"):  # a named tuple
            self._put(x.__qualname__, x._fields)
        else:
            self._put(self._library_name(label, x))
        return x

    def _array(self, label: str, x):
        if x.dtype.hasobject:
            self._refuse(label, f"an array of dtype {x.dtype}, which cannot be compiled")
        copy, data = np.array(x) if isinstance(x, np.ndarray) else x.copy(), x.tobytes()
        if isinstance(x, np.ndarray):
            copy.setflags(write=False)
        self._arrays.append(Then(x, x.dtype, x.shape, data))
        self._put(repr(x.dtype), x.shape, data)
        return copy

    def _library_name(self, label: str, x) -> str:
        """Name and version of a part of a library that Numba knows."""
        home = "numpy" if isinstance(x, np.ufunc) else getattr(x, "__name__" if isinstance(x, types.ModuleType) else "__module__", None)
        root = str(home).split(".")[0]
        if root in LIBRARIES and hasattr(x, "__name__"):
            return f"{home} {x.__name__} {getattr(sys.modules[root], '__version__', sys.version)}"
        if isinstance(x, types.FunctionType):
            self._refuse(label, "a Python function; compile it with numba.njit")
        self._refuse(label, f"a {type(x).__name__}; numbers, strings, tuples, NumPy arrays and functions of numba.njit can be compiled")
