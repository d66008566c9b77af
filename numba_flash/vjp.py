"""`vjp`: attention, and the function that takes gradients back through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, Never, TypeAlias, TypeVar, Unpack, overload

from numpy.typing import NDArray

from numba_flash import call
from numba_flash.api import FORWARD, backward
from numba_flash.arguments import checks
from numba_flash.arguments.annotations import Array, Integers, State, T, VjpOptions, Window
from numba_flash.arguments.axes import USUAL, Axes, Order
from numba_flash.arguments.block_mask import BlockMask
from numba_flash.arguments.inputs import check_of_gradients, computed_in, forward_inputs, options_of, taken
from numba_flash.arguments.precisions import Precision, resolved
from numba_flash.arguments.problem import ForwardInputs, ForwardResults, bind, check_differentiable
from numba_flash.arguments.signatures import refuse, shown
from numba_flash.call import Given, Wanted
from numba_flash.plan import Backend, backward_inputs, choose

G = TypeVar("G", bound=tuple[Any, ...], covariant=True)


class Pullback(Generic[G]):
    """What `vjp` returns last: ``pullback(do, dlse=None)``. It holds the arrays of the call, o and lse among them, not copies."""

    def __init__(self, arrays: tuple[Array, ...], options: dict[str, Any]):
        self._arrays, self._options = arrays, options

    def __call__(self, do: Array, dlse: Array | None = None) -> G:
        """Gradients of a number from those with respect to o and lse.

        Parameters
        ----------
        do : array, shape (..., Hq, Nq, Dv)
            Gradient with respect to o, in q's dtype, and in the axes of the call.
        dlse : array, shape (..., Hq, Nq), optional
            Gradient with respect to lse, in lse's dtype; whether or not `vjp` returned lse.

        Returns
        -------
        dq, dk, dv : array
            In the shapes and dtype of q, k and v.
        dbias : array
            Only with `bias_grad`: in the shape and dtype of the bias.

        Raises
        ------
        TypeError, ValueError, MemoryError
            As `backward`.
        """
        return backward(do, *self._arrays, dlse=dlse, **self._options)  # type: ignore[return-value]


Three: TypeAlias = tuple[NDArray[T], NDArray[T], NDArray[T]]
Four: TypeAlias = tuple[NDArray[T], NDArray[T], NDArray[T], NDArray[Any]]


@overload
def vjp(
    q: NDArray[T],
    k: Array,
    v: Array,
    *,
    return_lse: Literal[False] = False,
    bias_grad: Literal[False] = False,
    **options: Unpack[VjpOptions],
) -> tuple[NDArray[T], Pullback[Three[T]]]: ...
@overload
def vjp(
    q: NDArray[T], k: Array, v: Array, *, return_lse: Literal[True], bias_grad: Literal[False] = False, **options: Unpack[VjpOptions]
) -> tuple[NDArray[T], NDArray[Any], Pullback[Three[T]]]: ...
@overload
def vjp(
    q: NDArray[T], k: Array, v: Array, *, return_lse: Literal[False] = False, bias_grad: Literal[True], **options: Unpack[VjpOptions]
) -> tuple[NDArray[T], Pullback[Four[T]]]: ...
@overload
def vjp(
    q: NDArray[T], k: Array, v: Array, *, return_lse: Literal[True], bias_grad: Literal[True], **options: Unpack[VjpOptions]
) -> tuple[NDArray[T], NDArray[Any], Pullback[Four[T]]]: ...
@overload
def vjp(
    q: Array, k: Array, v: Array, *, return_lse: bool = False, bias_grad: bool = False, **options: Unpack[VjpOptions]
) -> tuple[Any, ...]: ...
@shown
def vjp(
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
    dlse: None = None,
    bias_grad: bool = False,
    deterministic: bool = True,
    return_lse: bool = False,
    axes: Order = "bhnd",
    precision: Precision | None = None,
    backend: Backend | None = None,
    **unknown: Never,
) -> tuple[Any, ...]:
    """Attention, and the function that takes gradients back through it: `forward` and `backward` with one set of arguments.

    For training loops that are written by hand. The name is JAX's, for vector-Jacobian product.

    Parameters
    ----------
    q, k, v, scale, causal, window, q_start, bias, mask, q_lengths, kv_lengths
        As given to `forward`.
    softcap, dropout, rng, score_mod, score_mod_grad, axes, precision, backend
        As given to `forward`, for both passes. A `score_mod` needs its derivative here, and the backend has to serve both. A default
        precision is that of now, whenever gradients are computed.
    return_lse : bool
        Also return the log-sum-exp of each row.
    bias_grad : bool
        Gradients include that with respect to the bias.
    deterministic : bool
        As given to `backward`.
    dlse : None
        `pullback` takes it; here it may only be None, as in `forward`.

    Returns
    -------
    o : array, shape (..., Hq, Nq, Dv)
        As returned by `forward`.
    lse : array, shape (..., Hq, Nq)
        Only with `return_lse`.
    pullback : callable
        ``pullback(do, dlse=None)`` returns dq, dk, dv, with `bias_grad` also dbias, as `backward` does: new arrays, each time it is
        called. `dlse` does not need `return_lse`. It holds all arrays that were given, and o and lse, but no copies: change none of them
        before its last call.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, MemoryError
        As `forward`, and as `backward` where it can be known without do: nothing was computed.

    Examples
    --------
    Gradient descent on queries, whose attention over fixed points is to reach a target:

    >>> import numpy as np, numba_flash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((n, 4)) for n in (8, 50, 50))
    >>> target = numba_flash.forward(rng.standard_normal((8, 4)), k, v)
    >>> losses = []
    >>> for step in range(100):
    ...     o, pullback = numba_flash.vjp(q, k, v)
    ...     losses.append(np.square(o - target).sum() / 2)
    ...     dq, dk, dv = pullback(o - target)
    ...     q -= 5 * dq
    >>> bool(losses[-1] < 0.1 * losses[0])
    True
    """
    if unknown:
        refuse(vjp, unknown)
    return_lse, bias_grad = checks.flag("return_lse", return_lse), checks.flag("bias_grad", bias_grad)
    check_of_gradients(dlse, deterministic, bias_grad, bias)
    array, size = taken(mask)
    precision = resolved(precision)
    given = call.given((scale, causal, window, q_start, softcap, dropout, rng, score_mod, score_mod_grad, precision))
    inputs = forward_inputs((q, k, v, bias, array, q_lengths, kv_lengths))
    computed = call.computed if axes == "bhnd" else computed_in(axes)
    o, lse = computed(_prepare, FORWARD, inputs, (None, None), given, (backend, bias_grad, size))
    options = given._asdict() | {"bias": bias, "mask": mask, "q_lengths": q_lengths, "kv_lengths": kv_lengths, "axes": axes}
    pullback: Pullback[Any] = Pullback(
        (q, k, v, o, lse), options | {"bias_grad": bias_grad, "deterministic": deterministic, "backend": backend}
    )
    return (o, lse, pullback) if return_lse else (o, pullback)


def _prepare(inputs: ForwardInputs, outs: tuple, given: Given, backend: Backend | None, bias_grad: bool, size, axes: Axes = USUAL):
    """The forward pass, once it is known that there is a backward one."""
    problem = bind(inputs.q, inputs.k, inputs.v, axes=axes, **options_of(inputs, size, given))
    check_differentiable(problem, bias_grad)
    shape = (*inputs.q.shape[:-1], problem.dv)
    wanted = ForwardResults(Wanted("q", shape), Wanted("q", shape[:-1], problem.lse_dtype))
    prepared = call.prepare("forward", problem, backend, inputs, outs, wanted)
    choose(problem, backward_inputs(problem, inputs), backend, "backward", **({"dbias": True} if bias_grad else {}))
    return prepared
