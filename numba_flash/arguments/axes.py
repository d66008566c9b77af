"""The order of the axes of q, k, v, o and their gradients, as the user has it: heads before the length, or after it."""

from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

from numba_flash.arguments import arrays, checks

Order: TypeAlias = Literal["bhnd", "bnhd"]
TURNED = frozenset({"do", "q", "k", "v", "o", "dq", "dk", "dv"})  # what has these axes; in the rest heads always come before lengths


class Axes(NamedTuple):
    """An order. Wherever something is computed, arrays are views in the order of `USUAL`.

    Attributes
    ----------
    name : str
        What the user calls it.
    heads, length : int
        Where these axes are.
    said : str
        The axes in words.
    least : int
        Dimensions that an array has at least.
    """

    name: Order
    heads: int
    length: int
    said: str
    least: int

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """That of the user's array, of the shape of its view, for errors."""
        return tuple(shape) if self is USUAL or len(shape) < self.least else (*shape[:-3], shape[-2], shape[-3], shape[-1])

    def turned(self, name: str, x: Any) -> Any:
        """The view in the order of `USUAL` of the array with that name, or the other way round; what is no such array comes back."""
        if self is USUAL or name not in TURNED or arrays.library(x) is None or x.ndim < self.least:
            return x
        return x.swapaxes(-3, -2)


USUAL = Axes("bhnd", -3, -2, "heads, length, head_dim", 2)
HEADS_LAST = Axes("bnhd", -2, -3, "length, heads, head_dim", 3)
KNOWN = {axes.name: axes for axes in (USUAL, HEADS_LAST)}


def named(name: Any) -> Axes:
    """The order of that name.

    Raises
    ------
    ValueError
        There is none.
    """
    if not isinstance(name, str) or name not in KNOWN:
        known = " or ".join(f"{axes.name!r} (..., {axes.said})" for axes in KNOWN.values())
        raise ValueError(f"axes must be {known}; got {name!r}")
    return KNOWN[name]


@cache
def inputs_in(kind: type, axes: Axes) -> type:
    """The named tuple of inputs like `kind` of which the user has arrays in that order, its `AXES`."""
    return kind if kind.AXES is axes else type(kind.__name__, (kind,), {"__slots__": (), "AXES": axes})


def turned(axes: Axes, names: tuple[str, ...], inputs: Any) -> Any:
    """Inputs as the user gave them, as views in the order of `USUAL`, which know the user's.

    Parameters
    ----------
    axes : Axes
        The user's.
    names : tuple of str
        What errors call the inputs.
    inputs : named tuple
        `problem.ForwardInputs`, or another; None where absent.
    """
    adopted = zip(inputs._fields, map(checks.adopt, names, inputs), strict=True)
    return inputs_in(type(inputs), axes)(*(axes.turned(field, x) for field, x in adopted))
