"""What all public functions do with the arrays that they are given: what is read, places for results, and what is handed back."""

from functools import partial
from typing import Any, NamedTuple

from numba_flash import call
from numba_flash.arguments import axes, checks
from numba_flash.arguments.block_mask import BlockMask
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, ForwardInputs, ForwardResults
from numba_flash.call import Given, Wanted

# Of a tuple, in half the time of the classes themselves.
forward_inputs, backward_inputs = partial(tuple.__new__, ForwardInputs), partial(tuple.__new__, BackwardInputs)
EXTRAS = ("bias", "mask", "q_lengths", "kv_lengths")  # arrays that are options
NOWHERE = (None,) * len(BackwardResults._fields)


class Mask(NamedTuple):
    """A mask as it was given: the array, and the size of its blocks, None if it is one of pairs."""

    array: Any
    block_size: Any


NO_MASK = Mask(None, None)


def taken(mask) -> Mask:
    """Of an argument of the user's."""
    if mask is None:
        return NO_MASK
    return Mask(mask.blocks, mask.block_size) if isinstance(mask, BlockMask) else Mask(mask, None)


def options_of(inputs, size, given: Given) -> dict:
    """Keyword arguments for `problem.bind`; the mask has blocks of that size, or None."""
    options = given._asdict() | {name: getattr(inputs, name) for name in EXTRAS}
    return options if size is None else options | {"mask": BlockMask(inputs.mask, size)}


def outs_of(out, names: tuple[str, ...]) -> tuple:
    """The four places for gradients of `backward`, as the user gave them."""
    if out is None:
        return NOWHERE
    if not isinstance(out, tuple) or len(out) != len(names):
        got = f"{len(out)} of them" if isinstance(out, tuple) else type(out).__name__
        raise TypeError(f"out must be a tuple ({', '.join(names)}); got {got}")
    return out + NOWHERE[len(out) :]


def check_of_gradients(dlse, deterministic, bias_grad=False, bias=None) -> None:
    """Raise unless these options of a backward pass may be given to a forward pass, too, where they have no effect."""
    if dlse is not None:
        raise TypeError(f"dlse must be None in a forward pass, which returns lse, not takes its gradient; got {type(dlse).__name__}")
    checks.flag("deterministic", deterministic)
    if checks.flag("bias_grad", bias_grad) and bias is None:
        raise ValueError("bias_grad needs a bias; got bias_grad=True with bias=None")


def computed_in(order):
    """`call.computed` for arrays of the user whose axes have that order, which is not the usual one."""
    known = axes.named(order)

    def computed(prepare_call, names: tuple[str, ...], inputs, outs: tuple, given: Given, more: tuple) -> tuple:
        inputs, outs = axes.turned(known, names, inputs), tuple(map(checks.adopt, call.labels(outs), outs))
        fields = ForwardResults._fields if len(outs) == len(ForwardResults._fields) else BackwardResults._fields
        outs = tuple(map(known.turned, fields, outs))
        results = call.computed(prepare_call, names, inputs, outs, given, (*more, known))
        return tuple(map(known.turned, fields, results))

    return computed


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
