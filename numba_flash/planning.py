"""`plan`: which backend a call would use, and why."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from numba_flash import checks
from numba_flash.annotations import Array, State
from numba_flash.arguments import options_of, taken
from numba_flash.block_mask import BlockMask
from numba_flash.call import Given
from numba_flash.pages import PagedInputs
from numba_flash.plan import Backend, Plan, choose, tiles_of
from numba_flash.precisions import Precision, resolved
from numba_flash.problem import bind, bind_paged, check_values


def plan(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    q_start: int | None = None,
    bias: Array | None = None,
    mask: Array | BlockMask | None = None,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    rng: State | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_mod_grad: Callable[..., Any] | None = None,
    page_table: Array | None = None,
    precision: Precision | None = None,
    backend: Backend | None = None,
) -> Plan:
    """Which backend `forward` will use for these arguments, and why every faster one was refused.

    Parameters are those of `forward`, or with `page_table` those of `forward_paged`, pages in the place of k and v; nothing is computed,
    and the same errors are raised.

    Returns
    -------
    Plan
        Prints as a few readable lines.
    """
    mask, size = taken(mask)
    names = PagedInputs._fields if page_table is None else PagedInputs.CALLED
    inputs = PagedInputs(*map(checks.adopt, names, (q, k, v, bias, mask, q_lengths, kv_lengths, page_table)))
    given = Given(scale, causal, window, q_start, softcap, dropout, rng, score_mod, score_mod_grad, resolved(precision))
    options = options_of(inputs, size, given)
    if page_table is None:
        problem = bind(inputs.q, inputs.k, inputs.v, **options)
    else:
        problem = bind_paged(inputs.q, inputs.k, inputs.v, inputs.page_table, **options)
    check_values(problem, inputs)
    chosen = choose(problem, inputs, backend)
    return replace(chosen, tiles=tiles_of(chosen.backend, "forward", problem, inputs))
