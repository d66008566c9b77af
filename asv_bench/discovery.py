"""Which benchmarks there are, as asv finds, names and describes them."""

import importlib
import inspect
import itertools
import pkgutil
import textwrap
from dataclasses import dataclass
from functools import cached_property

MORE_IS_BETTER = ("TFLOP/s", "GB/s")


@dataclass(frozen=True)
class Benchmark:
    """A ``track_`` function of a class, with all its parameters.

    Attributes
    ----------
    name : str
        Module, class and function, as asv names it.
    cls : type
        The class.
    function : str
        Name of the function.
    """

    name: str
    cls: type
    function: str

    @property
    def params(self) -> list[tuple]:
        return list(getattr(self.cls, "params", ()))

    @property
    def cases(self) -> list[tuple]:
        """Every combination of parameters, in asv's order; one without parameters is ``()``."""
        return list(itertools.product(*self.params))

    def label(self, case: tuple) -> str:
        return f"{self.name}({', '.join(map(repr, case))})" if case else self.name

    @cached_property
    def description(self) -> dict:
        """Its entry in ``benchmarks.json``."""
        optional = {"timeout": self.cls.timeout} if hasattr(self.cls, "timeout") else {}
        return optional | {
            "code": textwrap.dedent(inspect.getsource(self.cls)),
            "less_is_better": getattr(self.cls, self.function).unit not in MORE_IS_BETTER,  # asv-tachyon asks
            "name": self.name,
            "param_names": list(getattr(self.cls, "param_names", ())),
            "params": [[repr(value) for value in values] for values in self.params],
            "type": "track",
            "unit": getattr(self.cls, self.function).unit,
            "version": self.cls.version,
        }

    def mistake(self) -> str | None:
        """What makes it impossible to run or to describe, or None."""
        function, setup = getattr(self.cls, self.function), getattr(self.cls, "setup", None)
        if not isinstance(getattr(function, "unit", None), str):
            return f"{self.name} has no unit"
        if not isinstance(getattr(self.cls, "version", None), str):
            return f"{self.name} has no version"
        if len(getattr(self.cls, "param_names", ())) != len(self.params):
            return f"{self.name} has {len(self.params)} parameters with {len(getattr(self.cls, 'param_names', ()))} names"
        arguments = ("self", *(("cache",) if hasattr(self.cls, "setup_cache") else ()), *self.cases[0])
        for what, called in ((self.function, function), ("setup", setup)):
            try:
                if called is not None:
                    inspect.signature(called).bind(*arguments)
            except TypeError as error:
                return f"{self.name}: {what}: {error}"
        return None


def discover() -> list[Benchmark]:
    """All benchmarks of the package `benchmarks`; ValueError if one is malformed."""
    package, found = importlib.import_module("benchmarks"), []
    for module in pkgutil.iter_modules(package.__path__):
        contents = vars(importlib.import_module(f"benchmarks.{module.name}"))
        for name, cls in contents.items():
            if inspect.isclass(cls) and not name.startswith("_"):
                functions = (f for f, _ in inspect.getmembers(cls, inspect.isfunction) if f.startswith("track_"))
                found += [Benchmark(f"{module.name}.{name}.{function}", cls, function) for function in functions]
    if mistakes := [mistake for benchmark in found if (mistake := benchmark.mistake())]:
        raise ValueError("\n".join(mistakes))
    return found
