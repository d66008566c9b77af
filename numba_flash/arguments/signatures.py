"""What `help` shows of a public function's signature, and what is said about arguments that it does not have."""

import inspect
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from numba_flash.arguments import elsewhere

F = TypeVar("F", bound=Callable[..., Any])
ORACLE = "numba_flash.reference"
LIKELY, POSSIBLE = 0.85, 0.6  # how alike a name of another library has to be, and one of the function's own, to be meant


class Written(str):
    """An annotation as it stands in the source."""

    __slots__ = ()
    __repr__ = str.__str__


def shown(function: F) -> F:
    """The same function, of which `help` and `inspect.signature` show a short signature: types of what must be given, and defaults of the
    rest, whose types the docstring says; without ``**unknown``, which no argument may be.
    """
    signature = inspect.signature(function)
    kept = []
    for each in signature.parameters.values():
        if each.kind is not each.VAR_KEYWORD:
            needed = each.default is each.empty and each.annotation is not each.empty
            kept.append(each.replace(annotation=Written(each.annotation) if needed else each.empty))
    returns = signature.return_annotation
    returns = returns if returns in (signature.empty, None) else Written(returns)
    function.__signature__ = signature.replace(parameters=kept, return_annotation=returns)  # type: ignore[attr-defined]
    return function


def refuse(function: Callable[..., Any], unknown: dict[str, Any]) -> NoReturn:
    """Say what there is in the place of keyword arguments that a public function does not have.

    Raises
    ------
    TypeError
        With a line for each.
    """
    raise TypeError("\n".join(_about(function, name) for name in unknown))


def _about(function: Callable[..., Any], name: str) -> str:
    """The line about one."""
    parameters = inspect.signature(function).parameters
    called = full_name(function)
    start = f"{called}() got an unexpected keyword argument {name!r}"
    absent = elsewhere.ABSENT.get(called, {})
    if name in absent:
        return f"{start}: {absent[name]}"
    (meant,) = (
        get_close_matches(name, [*parameters, *elsewhere.NAMES], 1, LIKELY) or get_close_matches(name, parameters, 1, POSSIBLE) or [None]
    )
    if meant in parameters:
        return f"{start}; did you mean {meant}?"
    if meant is None:
        options = [each.name for each in parameters.values() if each.kind is each.KEYWORD_ONLY]
        return f"{start}; the options are {', '.join(options)}"
    there = elsewhere.NAMES[meant]
    missing = [option for option in there.options if option not in parameters]
    if missing and len(missing) == len(there.options):
        return f"{start}, which is {' or '.join(missing)} of forward: {absent.get(missing[0], f'{called} has none')}"
    return f"{start}{there.advice}"


def full_name(function: Callable[..., Any]) -> str:
    """What the user calls it: a function of a package within this one, or of the oracle, by both names."""
    home = function.__module__
    return f"{home}.{function.__name__}" if hasattr(sys.modules[home], "__path__") or home == ORACLE else function.__name__
