"""`forward_packed`, `backward_packed`: sequences of different lengths one after the other, without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Never, Unpack, overload

from numpy.typing import NDArray

from numba_flash import call
from numba_flash.arguments import checks
from numba_flash.arguments.annotations import Array, Integers, PackedBackwardOptions, PackedForwardOptions, State, T, Window
from numba_flash.arguments.inputs import backward_inputs, check_of_gradients, forward_inputs, gradients, outs_of, returned
from numba_flash.arguments.precisions import Precision, resolved
from numba_flash.arguments.problem import BackwardInputs, ForwardInputs, ForwardResults, bind_packed, bind_packed_backward
from numba_flash.arguments.signatures import refuse, shown
from numba_flash.call import Given, Wanted
from numba_flash.plan import Backend

# What the user calls the inputs: kernels find offsets where lengths are otherwise.
FORWARD = (*ForwardInputs._fields[:-2], "q_offsets", "k_offsets")
BACKWARD = (*BackwardInputs._fields[:-2], "q_offsets", "k_offsets")


@overload
def forward_packed(
    q: NDArray[T],
    k: Array,
    v: Array,
    q_offsets: Integers,
    k_offsets: Integers,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PackedForwardOptions],
) -> NDArray[T]: ...
@overload
def forward_packed(
    q: NDArray[T],
    k: Array,
    v: Array,
    q_offsets: Integers,
    k_offsets: Integers,
    *,
    return_lse: Literal[True],
    **options: Unpack[PackedForwardOptions],
) -> tuple[NDArray[T], NDArray[Any]]: ...
@overload
def forward_packed(
    q: Array,
    k: Array,
    v: Array,
    q_offsets: Integers,
    k_offsets: Integers,
    *,
    return_lse: bool = False,
    out: Array | None = None,
    **options: Unpack[PackedForwardOptions],
) -> Any: ...
@shown
def forward_packed(
    q: Array,
    k: Array,
    v: Array,
    q_offsets: Integers,
    k_offsets: Integers,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_start: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    rng: State | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_mod_grad: Callable[..., Any] | None = None,
    dlse: None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    out: Array | None = None,
    precision: Precision | None = None,
    backend: Backend | None = None,
    **unknown: Never,
) -> Array | tuple[Array, Array]:
    """`forward` for packed sequences: sequence b has the queries ``q_offsets[b] : q_offsets[b + 1]`` and its own keys.

    Parameters
    ----------
    q : array, shape (total queries, Hq, D)
        Queries of all sequences; dtypes, strides and libraries as in `forward`.
    k : array, shape (total keys, Hk, D)
        Keys of all sequences.
    v : array, shape (total keys, Hk, Dv)
        Values of all sequences.
    q_offsets, k_offsets : array or list of integers, shape (sequences + 1,)
        Where each sequence begins, and the total; from 0, not decreasing. NumPy, or CuPy if q is: values on a GPU cannot be checked
        without waiting for it; a sequence that does not fit is left out, and its rows of the results are not written.
    scale, causal, window, q_start, softcap, dropout, rng, score_mod, score_mod_grad, precision, backend
        As in `forward`, for each sequence alone: i, j count from its first query and key, b is the number of the sequence.
    dlse, deterministic : None, bool
        Options of `backward_packed`, checked and of no effect here, so that one set of options serves both; dlse can only be None.
    return_lse : bool
        Also return the log-sum-exp of each row, which `backward_packed` needs.
    out : array, shape (total queries, Hq, Dv), optional
        Written in place and returned; must not overlap an input.

    Returns
    -------
    o : array, shape (total queries, Hq, Dv)
        In q's dtype, library and device.
    lse : array, shape (Hq, total queries)
        Only with `return_lse`; float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError, NotImplementedError, MemoryError
        As `forward`.
    """
    if unknown:
        refuse(forward_packed, unknown)
    if deterministic is not True or dlse is not None:
        check_of_gradients(dlse, deterministic)
    inputs = forward_inputs((q, k, v, None, None, q_offsets, k_offsets))
    given = call.given((scale, causal, window, q_start, softcap, dropout, rng, score_mod, score_mod_grad, resolved(precision)))
    o, lse = call.computed(_prepare_forward, FORWARD, inputs, (out, None), given, (backend, return_lse))
    o = o if out is None else out
    return (o, lse) if return_lse else o


@overload
def backward_packed(
    do: Array,
    q: NDArray[T],
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    q_offsets: Integers,
    k_offsets: Integers,
    **options: Unpack[PackedBackwardOptions],
) -> tuple[NDArray[T], NDArray[T], NDArray[T]]: ...
@overload
def backward_packed(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    q_offsets: Integers,
    k_offsets: Integers,
    *,
    out: tuple[Array | None, Array | None, Array | None] | None = None,
    **options: Unpack[PackedBackwardOptions],
) -> tuple[Any, Any, Any]: ...
@shown
def backward_packed(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    q_offsets: Integers,
    k_offsets: Integers,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_start: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    rng: State | None = None,
    score_mod: Callable[..., Any] | None = None,
    score_mod_grad: Callable[..., Any] | None = None,
    dlse: Array | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    out: tuple[Array | None, Array | None, Array | None] | None = None,
    precision: Precision | None = None,
    backend: Backend | None = None,
    **unknown: Never,
) -> tuple[Array, Array, Array]:
    """`backward` for packed sequences.

    Parameters
    ----------
    do : array, shape (total queries, Hq, Dv)
        Gradient with respect to o, in q's dtype.
    q, k, v, q_offsets, k_offsets
        As given to `forward_packed`.
    o, lse : array
        As returned by `forward_packed` with ``return_lse=True``.
    scale, causal, window, q_start, softcap, dropout, rng, score_mod, score_mod_grad, precision, backend
        As given to `forward_packed`.
    dlse : array, shape (Hq, total queries), optional
        Gradient with respect to lse, in lse's dtype.
    deterministic : bool
        As in `backward`.
    return_lse : bool
        An option of `forward_packed`, checked and of no effect here.
    out : tuple of three arrays, optional
        (dq, dk, dv), written in place and returned; must not overlap an input or each other.

    Returns
    -------
    dq, dk, dv : array
        In the shapes and dtype of q, k and v.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, MemoryError
        As `forward`.
    """
    if unknown:
        refuse(backward_packed, unknown)
    if return_lse is not False:
        checks.flag("return_lse", return_lse)
    inputs, outs = backward_inputs((do, q, k, v, o, lse, dlse, None, None, q_offsets, k_offsets)), outs_of(out, ("dq", "dk", "dv"))
    given = call.given((scale, causal, window, q_start, softcap, dropout, rng, score_mod, score_mod_grad, resolved(precision)))
    results = call.computed(_prepare_backward, BACKWARD, inputs, outs, given, (backend, deterministic))
    return returned(results[:3], out)


def _prepare_forward(inputs: ForwardInputs, outs: tuple, given: Given, backend: str | None, return_lse: bool):
    return_lse, x = checks.flag("return_lse", return_lse), inputs
    problem = bind_packed(x.q, x.k, x.v, x.q_lengths, x.kv_lengths, **given._asdict())
    shape = (*x.q.shape[:-1], problem.dv)
    lse = Wanted("q", shape[1::-1], problem.lse_dtype) if return_lse else None
    return call.prepare("forward", problem, backend, inputs, outs, ForwardResults(Wanted("q", shape), lse))


def _prepare_backward(inputs: BackwardInputs, outs: tuple, given: Given, backend: str | None, deterministic: bool):
    deterministic, x = checks.flag("deterministic", deterministic), inputs
    lengths = x.q_lengths, x.kv_lengths
    problem = bind_packed_backward(x.do, x.q, x.k, x.v, x.o, x.lse, *lengths, dlse=x.dlse, **given._asdict())
    return call.prepare("backward", problem, backend, inputs, outs, gradients(inputs, False), deterministic=deterministic)
