"""What a kernel is made of, as one hash for the keys of every cache: the source of its module, and those that this imports, at any depth.

Numba's disk cache watches only the file a kernel is defined in, but a kernel inlines helpers from others (`mask`, `numeric`, ...). A hash
of all files would be another after every edit. So this one follows imports, those within functions, too, and hashes syntax trees:
comments, docstrings and the numbers of lines change no kernel. Modules that are named in a string are not found, and the ``__init__``
around a module counts only where something is imported from it: in this package it defines nothing that the module could see.
"""

import ast
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from numba_flash.files import disk

ROOT = Path(__file__).resolve().parents[1]
# They keep kernels or say that one is compiled. What they import, and change when they are edited, no kernel is made of.
APART = {"cpu.cache", "files.notice"}
FILE = "sources.json"
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # of statements
MOST = 600  # sources of which something is kept, about twice as many as there are: the latest


class Source(NamedTuple):
    """What is kept of a source.

    Attributes
    ----------
    digest : str
        SHA-256 (hexadecimal) of its syntax tree.
    imports : sequence of str
        What it imports of the package, relative to it: modules, or names in them.
    """

    digest: str
    imports: tuple[str, ...]


class Sources:
    """The sources of the package in a folder, as they are when this is made.

    Modules are named relative to the package, as ``"cuda.sm90.forward.forward"``, the package itself ``"__init__"``.

    Parameters
    ----------
    root : Path, optional
        The folder; that of this package by default.
    """

    def __init__(self, root: Path = ROOT):
        self._data = dict(_read(root))
        self._keys, self._read, self._kept = {}, {}, {}
        self._one_at_a_time = threading.Lock()

    def __contains__(self, module: str) -> bool:
        return module in self._data

    def closure(self, *modules: str, kept_in: Path | None = None) -> str:
        """SHA-256 (hexadecimal) of the names and syntax trees of all `modules_of` these.

        Parameters
        ----------
        *modules : str
            A module without a source, as in a program that was packed without sources, counts by its name alone.
        kept_in : Path, optional
            A directory in which is kept what has been read of each source, for processes to come. It takes them longer to read the
            sources of a kernel than to load the kernel.
        """
        with self._one_at_a_time:
            if kept_in is not None:
                self._recall(kept_in)
            found = self._found(modules)
            if kept_in is not None:
                self._keep(kept_in, found)
        return hashlib.sha256(repr([(module, found[module].digest) for module in sorted(found)]).encode()).hexdigest()

    def modules_of(self, *modules: str) -> set[str]:
        """These modules and all of the package that they import, transitively, but those that are `APART`."""
        with self._one_at_a_time:
            return set(self._found(modules))

    def imported(self, data: bytes) -> set[str]:
        """The modules of the package that a source imports itself."""
        return {self._known(name) for name in _parsed(data).imports}

    def _found(self, modules: tuple[str, ...]) -> dict[str, Source]:
        found, more = {}, {*modules}
        while more:
            module = more.pop()
            found[module] = self._source(module)
            more |= {self._known(name) for name in found[module].imports} - found.keys() - APART
        return found

    def _known(self, name: str) -> str:
        """The longest name of a module that is `name`, or in which that lies."""
        while name not in self._data and name:
            name = name.rpartition(".")[0]
        return name or "__init__"

    def _key(self, module: str) -> str:
        """The hash of a source's bytes, under which is kept what was read of it."""
        if module not in self._keys:
            self._keys[module] = hashlib.sha256(self._data.get(module, b"")).hexdigest()
        return self._keys[module]

    def _source(self, module: str) -> Source:
        key = self._key(module)
        if key not in self._read:
            self._read[key] = _parsed(self._data.get(module, b""))
        return self._read[key]

    def _recall(self, directory: Path) -> None:
        """Have what earlier processes kept in a directory."""
        if directory not in self._kept:
            data = disk.load(directory / FILE)
            reader, table = ("", {}) if data is None else json.loads(data)
            self._kept[directory] = table if reader == _reader() else {}
            self._read |= {key: Source(*source) for key, source in self._kept[directory].items()}

    def _keep(self, directory: Path, found: dict[str, Source]) -> None:
        """Keep in a directory what is not there yet."""
        kept = self._kept[directory]
        new = {self._key(module): source for module, source in found.items() if self._key(module) not in kept}
        if new:
            self._kept[directory] = dict([*(kept | new).items()][-MOST:])
            disk.store(directory / FILE, json.dumps([_reader(), self._kept[directory]]).encode())


@cache
def package() -> Sources:
    """The sources of this package as they are when the process first asks: it has imported some of them already, and what is edited
    later is not what it has imported.
    """
    return Sources()


@cache
def _reader() -> str:
    """What a table was made by: this file, in this version of Python."""
    return f"{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()} {sys.version_info[:2]}"


def _read(root: Path) -> Iterator[tuple[str, bytes]]:
    """Names of all modules in a folder, and their bytes."""
    for folder, _, names in os.walk(root):
        parts = Path(folder).relative_to(root).parts
        for name in names:
            if name.endswith(".py"):
                with open(os.path.join(folder, name), "rb") as file:
                    own = () if parts and name == "__init__.py" else (name.removesuffix(".py"),)
                    yield ".".join((*parts, *own)), file.read()


def _parsed(data: bytes) -> Source:
    tree = ast.parse(data)
    names = {f"{name}." for name in _imports(tree)}
    prefix = f"{ROOT.name}."
    imports = {name.removeprefix(prefix).rstrip(".") for name in names if name.startswith(prefix)}
    return Source(hashlib.sha256(repr(_shape(tree)).encode()).hexdigest(), tuple(sorted(imports)))


def _imports(statement: ast.AST) -> Iterator[str]:
    """Full names of all that is imported at run time, of type checkers alone nothing."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield from (f"{statement.module}.{alias.name}" for alias in statement.names)
    elif not (isinstance(statement, ast.If) and isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"):
        for block in BLOCKS:
            for inner in getattr(statement, block, ()):
                yield from _imports(inner)


def _shape(node):
    """A syntax tree without positions and docstrings, in tuples; also without what is empty, which differs between versions of Python."""
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if isinstance(node, ast.AST):
        kind = type(node)
        parts = [kind.__name__]
        for name in kind._fields:
            value = getattr(node, name, None)
            if value is not None and value != [] and name != "ctx":
                parts += name, _shape(value)
        return parts
    return [_shape(each) for each in node if not _is_text(each)] if isinstance(node, list) else node


def _is_text(node) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
