"""What all public functions do with the arrays that they are given: plain ones to read, places for results, and what is handed back."""

from typing import Any, NamedTuple

from numba_flash import arrays, checks
from numba_flash.block_mask import BlockMask
from numba_flash.call import Wanted
from numba_flash.problem import BackwardInputs, BackwardResults

OUTS = ("out[0]", "out[1]", "out[2]", "out[3]")


def adopted(cls, names: tuple[str, ...], inputs: tuple):
    """`ForwardInputs` or `BackwardInputs` of plain arrays; errors call them `names`."""
    return cls(*inputs) if arrays.plain(*inputs) else cls(*map(checks.adopt, names, inputs))


class Mask(NamedTuple):
    """A mask as it was given: the array, and the size of its blocks, None if it is one of pairs."""

    array: Any
    block_size: Any


def taken(mask) -> Mask:
    """Of an argument of the user's."""
    return Mask(mask.blocks, mask.block_size) if isinstance(mask, BlockMask) else Mask(mask, None)


def outs_of(out, names: tuple[str, ...]) -> tuple:
    """The four places for gradients of `backward`, as arrays that kernels can write."""
    if out is None:
        out = (None,) * len(names)
    elif not isinstance(out, tuple) or len(out) != len(names):
        got = f"{len(out)} of them" if isinstance(out, tuple) else type(out).__name__
        raise TypeError(f"out must be a tuple ({', '.join(names)}); got {got}")
    return (*map(checks.adopt, OUTS, out), *[None] * (4 - len(out)))


def returned(results: tuple, out: tuple | None) -> tuple:
    """The results, in the place of those that the user gave the very objects."""
    return results if out is None else tuple(x if given is None else given for x, given in zip(results, out, strict=True))


def gradients(inputs: BackwardInputs, bias_grad: bool) -> BackwardResults:
    """What `backward` wants: arrays like q, k, v, and the bias."""
    return BackwardResults(
        Wanted("q", inputs.q.shape),
        Wanted("k", inputs.k.shape),
        Wanted("v", inputs.v.shape),
        Wanted("bias", inputs.bias.shape) if bias_grad else None,
    )
