"""`plan`: which backend a call would use, why, and what that takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never

import numpy as np

from numba_flash.arguments import checks, pages
from numba_flash.arguments.annotations import Array, Integers, State, Window
from numba_flash.arguments.axes import USUAL, Order, named, turned
from numba_flash.arguments.block_mask import BlockMask
from numba_flash.arguments.inputs import options_of, taken
from numba_flash.arguments.pages import PagedInputs
from numba_flash.arguments.precisions import Precision, resolved
from numba_flash.arguments.problem import Problem, bind, bind_paged, check_differentiable, check_values
from numba_flash.arguments.signatures import refuse, shown
from numba_flash.call import Given
from numba_flash.plan import Backend, Kind, Plan, Settings, backward_inputs, check_kind, choose, detailed


@shown
def plan(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_start: int | None = None,
    bias: Array | None = None,
    mask: Array | BlockMask | None = None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    rng: State | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_mod_grad: Callable[..., Any] | None = None,
    return_lse: bool = False,
    dlse: Array | bool | None = None,
    bias_grad: bool = False,
    deterministic: bool = True,
    page_table: Integers | None = None,
    kind: Kind = "forward",
    axes: Order = "bhnd",
    precision: Precision | None = None,
    backend: Backend | None = None,
    **unknown: Never,
) -> Plan:
    """Which backend `forward`, or `backward`, will use for these arguments, what that takes, and why every faster one was refused.

    Nothing is computed, and the same errors are raised.

    Parameters
    ----------
    q, k, v, scale, causal, window, q_start, bias, mask, q_lengths, kv_lengths, softcap, dropout, rng, score_mod, score_mod_grad
        As given to `forward`, or with `page_table` to `forward_paged`: pages in the place of k and v.
    return_lse : bool
        As given to `forward`; `backward` has one.
    dlse : bool or array, optional
        For `backward`: whether it is given one.
    bias_grad, deterministic : bool
        As given to `backward`.
    page_table : array, optional
        As given to `forward_paged`, which computes no gradients.
    kind : str
        "forward" or "backward". What `backward` is given besides is taken to lie in memory as `forward` returns it.
    axes, precision, backend
        As given to `forward`.

    Returns
    -------
    Plan
        Prints as a few readable lines. `scratch` is how many bytes the call allocates for itself.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `forward`, or `backward`; or `kind` is none of the two, or "backward" with a `page_table`.

    Examples
    --------
    >>> import numpy as np, numba_flash
    >>> x = np.zeros((2, 8, 500, 64), np.float32)
    >>> numba_flash.plan(x, x, x, kind="backward", backend="cpu")
    backward runs on cpu in tiles of backward 192 x 256: IEEE products and sums
      scratch memory: 1.984 MiB
    """
    if unknown:
        refuse(plan, unknown)
    check_kind(kind)
    for name, flag in (("return_lse", return_lse), ("bias_grad", bias_grad), ("deterministic", deterministic)):
        checks.flag(name, flag)
    order, (mask, size) = named(axes), taken(mask)
    names = PagedInputs._fields if page_table is None else PagedInputs.CALLED
    inputs = turned(order, names, PagedInputs(q, k, v, bias, mask, q_lengths, kv_lengths, page_table))
    given = Given(scale, causal, window, q_start, softcap, dropout, rng, score_mod, score_mod_grad, resolved(precision))
    problem = _bound(inputs, kind, options_of(inputs, size, given))
    check_values(problem, inputs)
    if kind == "backward":
        check_differentiable(problem, bias_grad)
        inputs = backward_inputs(problem, inputs, _gives(problem, inputs.q, dlse))
    wants_dbias = {"dbias": True} if bias_grad and kind == "backward" else {}
    chosen = choose(problem, inputs, backend, kind, **wants_dbias)
    return detailed(chosen, inputs, Settings(lse=return_lse, dbias=bias_grad, deterministic=deterministic))


def _bound(inputs: PagedInputs, kind: Kind, options: dict) -> Problem:
    """The problem, of keys in arrays or in pages."""
    if inputs.page_table is None:
        return bind(inputs.q, inputs.k, inputs.v, axes=inputs.AXES, **options)
    pages.check_call(kind, inputs.AXES)
    return bind_paged(inputs.q, inputs.k, inputs.v, inputs.page_table, **options)


def _gives(problem: Problem, q, dlse) -> bool:
    """Whether `backward` is given a gradient of lse; an array is one, if it fits."""
    if dlse is None or isinstance(dlse, bool | np.bool_):
        return bool(dlse)
    x = checks.adopt("dlse", dlse)
    checks.layout("dlse", x)
    checks.library("dlse", x, "q", q)
    checks.dtype_and_shape("dlse", x, problem.lse_dtype, q.shape[:-1], USUAL)
    return True
