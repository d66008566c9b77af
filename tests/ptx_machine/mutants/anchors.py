"""Mistakes that are made in the syntax tree of the package. A place is found by what stands there and by the names around it: lines,
comments, parentheses and files may change.
"""

import ast
import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SCOPES = (ast.FunctionDef, ast.ClassDef)
ARGUMENTS = ("args", "keywords")
NOTHING_BELOW = (ast.Expr, ast.Name, ast.Constant, ast.operator, ast.cmpop, ast.expr_context)  # that is found on its own
UNSEEN = {"ctx", "kind", "type_comment"}  # fields that say nothing, or follow from where a node stands


class Mutant(NamedTuple):
    """One mistake.

    Attributes
    ----------
    name : str
        What is wrong.
    where : str
        Names of what is around the place, the outermost first: folders, classes and functions, no files. As few as there have to be, so
        that there is one such place: ``"online"``, ``"sm90 consume"``, ``"build_alone meet"``. What encloses the last may be called by
        what is defined in it, as a builder by its kernel: ``"forward_sm80 consume"``.
    old, new : str
        What stands there, and what shall: an expression, arguments that follow each other (``"row, head, first=True"``) or statements.
        ``...`` in `old` is what happens to stand there, as little as possible, and in `new` the same again: ``"if tiles > 1: ..."``. A
        string alone, in its quotes, is a piece of a string. `new` may be empty where other arguments or statements stay.
    problem : str
        Among `problems.PROBLEMS`.
    """

    name: str
    where: str
    old: str
    new: str
    problem: str


class Place(NamedTuple):
    """What a mutant replaces by `new`: from `start` to `stop` in a list below `parent`, in the `tree` of a file."""

    file: str
    tree: ast.Module
    parent: ast.AST
    fields: tuple[str, ...]
    start: int
    stop: int
    new: list[ast.AST]

    def __str__(self):
        lines = [getattr(x, "lineno", None) for x in (_fields(self.parent)[self.fields][self.start], self.parent)]
        return f"{self.file}:{lines[0] or lines[1]}"

    @property
    def module(self) -> str:
        """The full name of the module that is edited."""
        return ".".join(("numba_flash", *Path(self.file).with_suffix("").parts)).removesuffix(".__init__")

    def changes_nothing(self) -> bool:
        """Whether what is new is what was there."""
        return _match(self.new, _fields(self.parent)[self.fields][self.start : self.stop], True) is not None

    def source(self) -> str:
        """All of the file, with the mistake and without comments."""
        copies = {}
        tree = copy.deepcopy(self.tree, copies)
        parent = copies[id(self.parent)]
        items = _fields(parent)[self.fields]
        _set(parent, self.fields, [*items[: self.start], *self.new, *items[self.stop :]])
        return ast.unparse(tree)


def _fields(node: ast.AST) -> dict[tuple[str, ...], list]:
    """What stands below a node: one after the other, or alone. All arguments of a call are one list."""
    below = {(name,): value if isinstance(value, list) else [value] for name, value in ast.iter_fields(node) if name not in UNSEEN}
    return {("func",): [node.func], ARGUMENTS: [*node.args, *node.keywords]} if isinstance(node, ast.Call) else below


def _set(node: ast.AST, fields: tuple[str, ...], items: list) -> None:
    if fields == ARGUMENTS:
        node.args = [x for x in items if not isinstance(x, ast.keyword)]
        node.keywords = [x for x in items if isinstance(x, ast.keyword)]
    elif isinstance(getattr(node, *fields), list):
        setattr(node, *fields, items or [ast.Pass()])
    else:
        setattr(node, *fields, *items)


def _bare(node):
    """A statement that is an expression, as that."""
    return node.value if isinstance(node, ast.Expr) else node


def _is(node, kind: type) -> bool:
    """Whether it is a constant of that type."""
    return isinstance(_bare(node), ast.Constant) and isinstance(_bare(node).value, kind)


def _glance(node) -> tuple:
    """What equal nodes have in common, seen at a glance."""
    node = _bare(node)
    for name in ("func", "op", "attr", "id"):
        if hasattr(node, name):
            below = getattr(node, name)
            return type(node), below if isinstance(below, str) else _glance(below)
    return (type(node),)


def _same(x, y) -> list[list] | None:
    """What stands for each ``...`` of `x`, if `y` is the same otherwise."""
    x, y = _bare(x), _bare(y)
    if type(x) is not type(y):
        return None
    if not isinstance(x, ast.AST):
        return [] if x == y else None
    all_gaps = []
    for these, those in zip(_fields(x).values(), _fields(y).values(), strict=True):
        matched = _match(these, those, True)
        if matched is None:
            return None
        all_gaps += matched[1]
    return all_gaps


def _match(nodes: list, items: list, whole: bool = False) -> tuple[int, list[list]] | None:
    """How many of some items are the same as these nodes, and what stands for each ``...``; all have to be if they are the `whole`."""
    if not nodes:
        return None if whole and items else (0, [])
    gap = _is(nodes[0], type(...))
    for n in range(len(items) + 1) if gap else (1,) if items else ():
        gaps = [items[:n]] if gap else _same(nodes[0], items[0])
        rest = None if gaps is None else _match(nodes[1:], items[n:], whole)
        if rest is not None:
            return n + rest[0], gaps + rest[1]
    return None


def _filled(nodes: list, gaps: Iterator[list]) -> list:
    """Nodes with what stands for each ``...``."""
    made = []
    for node in nodes:
        if isinstance(node, ast.AST) and not _is(node, type(...)):
            for fields, items in _fields(node).items():
                _set(node, fields, _filled(items, gaps)) if items else None
        made += next(gaps) if _is(node, type(...)) else [node]
    return made


def _arguments(text: str) -> list[ast.AST]:
    call = ast.parse(f"_(\n{text}\n)", mode="eval").body
    return [*call.args, *call.keywords]


def _statements(text: str) -> list[ast.AST]:
    return ast.parse(text).body


def _readings(text: str) -> list[list[ast.AST]]:
    """What a text may be: arguments, of which an expression is one, or statements; ``x = 1`` and ``x, y = z`` are both."""
    readings = []
    for read in (_arguments, _statements):
        with suppress(SyntaxError):
            readings.append(read(text))
    return [x for x in readings if len(x) != 1 or not isinstance(x[0], ast.Expr)] or [_statements(text)]


def _replaced(nodes: list[ast.AST], items: list, start: int, new: str) -> Iterator[tuple[int, int, list[ast.AST]]]:
    """From where to where nodes stand among others, if they do from `start` on, and what they become."""
    item = items[start]
    if len(nodes) == 1 and _is(nodes[0], str):
        for _ in range(item.value.count(nodes[0].value) if isinstance(item, ast.Constant) and _is(item, str) else 0):
            yield start, start + 1, [ast.Constant(str.replace(item.value, nodes[0].value, ast.literal_eval(new)))]
    elif len(nodes) > 1 and isinstance(nodes[0], ast.stmt) != isinstance(item, ast.stmt):
        return  # arguments are not statements, though they look alike
    elif (matched := _match(nodes, items[start:])) is not None:
        made = _statements(new) if isinstance(item, ast.stmt) else _arguments(new)
        yield start, start + matched[0], _filled(made, iter(matched[1]))


class Sources:
    """Syntax trees of files below the package, in which mutants are found."""

    def __init__(self, trees: dict[str, ast.Module]):
        self.trees = trees
        self.scopes = defaultdict(list)  # by name: what each scope around it may be called, its file, its tree, and that of the file
        self.below = {}  # of a scope, by `_glance`: the nodes in it, as the list that each stands in, and where
        for file, tree in trees.items():
            folders = Path(file).parts[:-1]
            around = tuple({name} for name in folders)
            for i, name in enumerate(("", *folders)):
                self.scopes[name].append((around[: max(i - 1, 0)], file, tree, tree))
            self._add(around, file, tree, tree)

    @classmethod
    def of(cls, package: Path) -> "Sources":
        """Those on disk."""
        return cls({path.relative_to(package).as_posix(): ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))})

    def _add(self, around, file, tree, node):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, SCOPES):
                self.scopes[child.name].append((around, file, child, tree))
                inside = {x.name for x in child.body if isinstance(x, SCOPES)}
                self._add((*around, {child.name} | inside), file, tree, child)
            elif not isinstance(child, ast.expr):
                self._add(around, file, tree, child)

    def _nodes(self, scope) -> dict:
        if scope not in self.below:
            self.below[scope] = below = defaultdict(list)
            for parent in ast.walk(scope):
                for fields, items in _fields(parent).items() if not isinstance(parent, NOTHING_BELOW) else ():
                    for start, item in enumerate(items):
                        if isinstance(item, ast.AST):
                            below[_glance(item)].append((parent, fields, items, start))
        return self.below[scope]

    def places(self, where: str, old: str, new: str) -> Iterator[Place]:
        """Every place with these names around it where `old` stands."""
        *outer, last = where.split() or [""]
        readings = _readings(old)
        for around, file, scope, tree in self.scopes.get(last, ()):
            rest = iter(around)
            if all(any(name in names for names in rest) for name in outer):
                for nodes in readings:
                    for parent, fields, items, start in self._nodes(scope)[_glance(nodes[0])]:
                        yield from (Place(file, tree, parent, fields, *each) for each in _replaced(nodes, items, start, new))

    def find(self, mutant: Mutant) -> Place:
        """The only place of a mutant.

        Raises
        ------
        LookupError
            There is none, or there are several: names the mutant, and where they are, or where else `old` stands.
        ValueError
            A text is no Python, or `new` has more ``...`` than `old`, or is no string where `old` is one.
        """
        try:
            places = list(self.places(*mutant[1:4]))
            if len(places) == 1:
                return places[0]
            others = places or list(self.places("", *mutant[2:4]))
        except (SyntaxError, RuntimeError, ValueError, TypeError) as error:  # one of a generator whose gaps have ended
            raise ValueError(f"{mutant.name!r}: {mutant.old!r} cannot become {mutant.new!r}: {error}") from error
        lines = ", ".join(map(str, others[:8]))
        found = f"{len(places)} times: {lines}" if places else f"nowhere there, but elsewhere: {lines}" if others else "nowhere"
        raise LookupError(f"{mutant.name!r}: {mutant.old!r} should be in {mutant.where!r} once, and is found {found}")
