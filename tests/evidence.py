"""What a slow test of kernels is a function of: the kernels that it asks for, the arguments that it launches them with, and its source.

A test runs twice. On paper first, where nothing is compiled and nothing executed: each launch is noted, and what it would have written is
filled with small numbers, so that what the host makes of results is noted, too. A test that asks for the text of a kernel, or for a problem
in a process of its own, ends there. Then in earnest, where the kernels that it asked for are noted as well: a test that asks for more of
them than on paper is one of which paper does not tell everything, and counts as a function of all sources.
"""

import ast
import hashlib
import math
import re
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np

TESTS = Path(__file__).parent
# Begin names of modules that no test's result depends on by being imported. The last three say which kernels there are: for a test, those
# count that it asks for, and what else it `uses` of them.
OF_NO_RESULT = ("test_", "mutants", "evidence", "proven", "simt_kernels", "sm80_kernels", "sm90_kernels")


def module_name(path: Path) -> str:
    """As which tests import it: in a package with its name, elsewhere alone."""
    parts = [path.stem] * (path.stem != "__init__")
    while (path.parent / "__init__.py").exists():
        path = path.parent
        parts.insert(0, path.name)
    return ".".join(parts)


HELPERS = {module_name(path): path for path in sorted(TESTS.rglob("*.py")) if not path.stem.startswith(OF_NO_RESULT)}
# Tables, by module, whose entries count for the tests that use them (`uses`), not for all.
TABLES = {
    "problems": ("PROBLEMS",),
    "test_mutants": ("ALL",),
    **dict.fromkeys(("test_compile", "test_sm80_compile", "test_sm90_compile"), ("SPILLS", "INSPECTIONS")),
}
ORACLES = ("reference.py", "oracle.py")  # of the package
PROGRAMS = {"docs": "docs/examples", "bench": "asv_bench"}  # by folder of tests: what these run
# Of the package, by what runs without a GPU. What their modules import in turn belongs to it, too.
FOLDERS = {"cpu": ("cpu",), "simulator": tuple(f"cuda/{name}" for name in ("", "ptx", "runtime", "work", "score", "passes", "simt"))}
TEXT = "text"


class Enough(BaseException):
    """Ends a test on paper that asks for what there is not on paper. Nobody catches it."""


class Place(NamedTuple):
    """Which of the arrays that a call has made an operand lies in, and at which byte of it; None of another array."""

    number: int | None = None
    offset: int = 0


class Trace:
    """What happens in a test.

    Attributes
    ----------
    kernels : dict
        Those that it asked for, in that order; the values are not used.
    events : list of str
        All that was noted, in order. A kernel is named by its place in `kernels`.
    launches, processes : int
        How many there were.
    """

    def __init__(self, paper: bool):
        self.paper, self.kernels, self.events, self._allocated = paper, {}, [], []
        self.launches = self.processes = 0

    def note(self, *what) -> None:
        """Something that the test depends on, whose repr says all of it."""
        said = repr(what)
        if found := re.search(r"(?<!\w)0x[0-9a-f]{6,}", said):
            raise ValueError(f"an address, {found[0]}, is another one in each process: {said[:300]}")
        self.events.append(said)

    def kernel(self, *kernel) -> int:
        """Number of a kernel: a builder, its configuration, and the compute capability that it is compiled for."""
        self.kernels[kernel] = None
        return [*self.kernels].index(kernel)

    def text(self, *kernel) -> None:
        """A test reads the text of a kernel."""
        self.note(TEXT, self.kernel(*kernel))
        if self.paper:
            raise Enough

    def process(self, *what) -> None:
        """A test runs something in a process of its own, of which this tells what it depends on."""
        self.processes += 1
        self.note(*what)
        if self.paper:
            raise Enough

    def allocated(self, x: np.ndarray) -> None:
        """An array that a call has made for its results. It is not kept alive: tests count what is."""
        self._allocated.append(weakref.ref(x))

    def launch(self, prepared, operands, extras, numbers) -> None:
        """A launch, with a call's arguments."""
        self.launches += 1
        if not self.paper:
            self.kernel(prepared.builder, prepared.config, prepared.gpu.capability)
            return
        own = prepared.operands, prepared.extras, prepared.maps, prepared.numbers
        self.note(
            self.kernel(prepared.builder, prepared.config, prepared.gpu.capability),
            (prepared.grid, prepared.threads, prepared.shared_bytes, prepared.early, own, numbers),
            [self._described(x) for x in (*operands, *extras)],
        )
        places = {self._place(x).number for x in (*operands, *extras) if x is not None}
        for x in (self._allocated[number]() for number in places if number is not None):
            if x.dtype.kind not in "iub":  # lists are the host's
                x[...] = (self.launches % 3 + np.arange(x.size) % 11).reshape(x.shape)

    def values(self, x) -> None:
        """Values that the test compares."""
        x = np.asarray(x)
        self.note(x.dtype.str, x.shape, _digest(x))

    def tells_all_of(self, earnest: "Trace") -> bool:
        """Whether a trace on paper has come as far as one in earnest, and of something that is traced."""
        far = [(x.launches, x.processes, [*x.kernels]) for x in (self, earnest)]
        return far[0] == far[1] != (0, 0, [])

    def _place(self, x: np.ndarray) -> Place:
        """Where it lies."""
        at = x.__array_interface__["data"][0]
        for i, each in enumerate(allocated() for allocated in self._allocated):
            if each is None:
                continue
            first = each.__array_interface__["data"][0]
            if first <= at < first + max(each.nbytes, 1):
                return Place(i, at - first)
        return Place()

    def _described(self, x: np.ndarray | None):
        return None if x is None else (self._place(x), x.dtype.str, x.shape, x.strides, _digest(x))


def _digest(x: np.ndarray) -> str:
    """Of its values; of double precision what float32 holds, as libraries of matrix products differ in the last digits."""
    x = np.array(x)  # compact
    if x.dtype == np.float64:
        with np.errstate(over="ignore"):
            x = x.astype(np.float32)
    if x.dtype.kind in "fV":  # NaN of any kind
        x = np.where(x != x, np.array(math.nan, x.dtype), x)
    return hashlib.sha256(x.tobytes()).hexdigest()[:16]


_current: Trace | None = None


def current() -> Trace | None:
    """The trace of the test that runs."""
    return _current


def uses(*what) -> None:
    """Let the test that runs depend on something that stands in a table, or elsewhere."""
    if _current is not None:
        _current.note(*what)


def compared(*results) -> bool:
    """Whether nothing has to be compared with these results, since they are of paper."""
    if _current is None or not _current.paper:
        return False
    for x in results:
        _current.values(x)
    return True


def text_of(kernel_of):
    """Decorator of functions that compile: ``kernel_of(*arguments)`` says which kernel."""

    def decorated(function):
        @wraps(function)
        def noted(*arguments, **options):
            if _current is not None:
                _current.text(*kernel_of(*arguments, **options))
            return function(*arguments, **options)

        return noted

    return decorated


def _no_process(*_, **__):
    """What happens in another process is not traced."""
    raise Enough


@contextmanager
def traced(paper: bool) -> Iterator[Trace]:
    """The trace of what happens within; on paper, comparisons of arrays note their values, and find nothing wrong."""
    global _current
    from numba_flash.cuda.runtime import compiler

    before, _current = _current, Trace(paper)
    try:
        with ExitStack() as stack:
            noted = text_of(lambda *kernel, **_: kernel[:3])(compiler.intermediate)
            stack.enter_context(mock.patch.object(compiler, "intermediate", noted))
            if paper:
                stack.enter_context(mock.patch.object(subprocess, "Popen", _no_process))
            for name in ("assert_allclose", "assert_array_equal", "assert_array_less", "assert_equal") if paper else ():
                stack.enter_context(mock.patch.object(np.testing, name, lambda x, y, *_, trace=_current, **__: trace.values(x)))
            yield _current
    finally:
        _current = before


# ---- sources


def normalised(tree: ast.Module, without=lambda node: False) -> str:
    """A module without comments, docstrings and line numbers, and without some of its statements."""
    from numba_flash.files import fingerprint

    tree.body = [node for node in tree.body if not without(node)]
    return repr(fingerprint._shape(tree))


def is_table(module: str, node: ast.stmt) -> bool:
    """A statement that fills a table of a module."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []
    names = {each.value if isinstance(each, ast.Subscript) else each for each in targets}
    return bool(names) and all(isinstance(each, ast.Name) and each.id in TABLES.get(module, ()) for each in names)


def helpers(tree: ast.Module) -> set[str]:
    """Modules of the tests that one imports itself."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return names & {*HELPERS}


def all_helpers(path: Path) -> list[Path]:
    """Modules of the tests that one imports, and that these import."""
    open_, closed = helpers(ast.parse(path.read_text())), set()
    while open_:
        name = open_.pop()
        closed.add(name)
        open_ |= helpers(ast.parse(HELPERS[name].read_text())) - closed
    return [HELPERS[name] for name in sorted(closed)]


@cache
def own_source(path: Path, function: str | None = None) -> str:
    """Hash of a test's own source: its module without the other tests, or with all, the modules of the tests that this imports, and the
    oracles.
    """
    is_test = lambda node: function and isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    other = lambda node: is_table(path.stem, node) or (is_test(node) and node.name != function)
    texts = [normalised(ast.parse(path.read_text()), other)]
    texts += [_helper(helper) for helper in all_helpers(path)]
    texts += [normalised(ast.parse((package() / name).read_text())) for name in ORACLES]
    return hashlib.sha256(repr(texts).encode()).hexdigest()


@cache
def _helper(path: Path) -> str:
    return normalised(ast.parse(path.read_text()), lambda node: is_table(path.stem, node))


def package() -> Path:
    """The folder of the package."""
    import numba_flash

    return Path(numba_flash.__file__).parent


@cache
def sources(*folders: Path) -> str:
    """Hash of all modules in some folders."""
    paths = [(path.relative_to(folder).as_posix(), path) for folder in folders for path in folder.rglob("*.py")]
    texts = [(name, normalised(ast.parse(path.read_text()))) for name, path in paths]
    return hashlib.sha256(repr(sorted(texts)).encode()).hexdigest()


def all_sources() -> str:
    """Hash of the package, of all tests, and of the programs that some run."""
    return sources(package(), TESTS, *(TESTS.parent / name for name in PROGRAMS.values()))


def modules_of_backend(backend: str, path: Path) -> set[str]:
    """Modules of the package that a backend consists of, and that a test imports, with all that these import."""
    from numba_flash.files import fingerprint

    modules = fingerprint.package()
    own = [module for folder in FOLDERS[backend] for module in (package() / folder).glob("*.py")]
    imported = [modules.imported(each.read_bytes()) for each in (*own, path, *all_helpers(path))]
    return modules.modules_of("__init__", *map(_module, own), *(name for names in imported for name in names))


def of_backend(backend: str, path: Path) -> str:
    """Hash of `modules_of_backend`."""
    from numba_flash.files import fingerprint

    return fingerprint.package().closure(*sorted(modules_of_backend(backend, path)))


def _module(path: Path) -> str:
    """Its name relative to the package."""
    parts = path.relative_to(package()).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def host_sources(path: Path, function: str, backend: str | None) -> str:
    """Hash of what a test is a function of whose kernels are not all known: its own source, the programs that tests of its folder run,
    and the package, or of that what the only backend that it runs consists of.
    """
    folder = path.parent.name
    programs = [sources(TESTS.parent / PROGRAMS[folder])] if folder in PROGRAMS else []
    of_package = sources(package()) if backend not in FOLDERS else of_backend(backend, path)
    return hashlib.sha256(repr((own_source(path, function), programs, of_package)).encode()).hexdigest()


# ---- kernels


@cache
def tools() -> tuple[str, ...]:
    """Versions of all that makes code, and of what computes what it should give."""
    from numba_flash.cuda.runtime import compile

    return *compile._tool_versions(), *(f"{name} {compile._version(name)}" for name in ("numpy", "scipy", "ml_dtypes"))


@cache
def kernel_key(kernel: tuple) -> str:
    """Of all that its machine code depends on."""
    import compiled

    from numba_flash.cuda.runtime import compile

    return compile.cache_key(*kernel) + compiled.of_tests(kernel[0])


@cache
def kernel_text(kernel: tuple) -> str:
    """Hash of its PTX, in which nothing is of a process."""
    import compiled

    return hashlib.sha256(compiled.normalised(compiled.text(*kernel)).encode()).hexdigest()
