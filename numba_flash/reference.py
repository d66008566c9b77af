"""`reference.forward`, `reference.backward`: what the public functions mean, computed with the whole matrix in float64.

The mathematics is `numba_flash.oracle`'s; here are the arguments, and the comparison of o and lse with what they ought to be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Never, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from numba_flash import oracle
from numba_flash.arguments import arrays, checks
from numba_flash.arguments.annotations import Array, BackwardOptions, ForwardOptions, Integers, State, Window
from numba_flash.arguments.axes import Order, named, turned
from numba_flash.arguments.block_mask import BlockMask
from numba_flash.arguments.inputs import check_of_gradients, options_of, taken
from numba_flash.arguments.precisions import Precision, resolved
from numba_flash.arguments.problem import BackwardInputs, ForwardInputs, Problem, bind, bind_backward, check_values
from numba_flash.arguments.signatures import refuse, shown
from numba_flash.call import Given
from numba_flash.plan import Backend, check_backend

Float64 = NDArray[np.float64]

# How far o and lse may be from the oracle's: relative to a sum of absolute values, what a product of rounded numbers may be wrong by.
STORED = {"float16": 2.0**-8, "bfloat16": 2.0**-5, "float32": 2.0**-16, "float64": 2.0**-45}  # 8 steps of a 16-bit dtype, 128 of others
SCORES = {"float64": 2.0**-45, "tf32": 2.0**-8}  # products of numbers of 11 bits
SCORE = 2.0**-16  # of all else: they are summed in float32
LEAST = {"float16": 2.0**-24}  # a step of a weight or a result that is no normal number
LARGEST = {"bfloat16": 2.0**128}  # which NumPy does not know
FELT = 2.0**-40  # what the scores of smaller weights are wrong by does not matter


@overload
def forward(q: Array, k: Array, v: Array, *, return_lse: Literal[False] = False, **options: Unpack[ForwardOptions]) -> Float64: ...
@overload
def forward(q: Array, k: Array, v: Array, *, return_lse: Literal[True], **options: Unpack[ForwardOptions]) -> tuple[Float64, Float64]: ...
@overload
def forward(q: Array, k: Array, v: Array, *, return_lse: bool, **options: Unpack[ForwardOptions]) -> Any: ...
@shown
@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def forward(
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
) -> Float64 | tuple[Float64, Float64]:
    """What `numba_flash.forward` means, computed in float64 with the whole N x N matrix: to compare with when a result is a surprise.

    Parameters
    ----------
    q, k, v, scale, causal, window, q_start, bias, mask, q_lengths, kv_lengths, softcap, dropout, rng, score_mod, score_mod_grad, axes
        As given to `numba_flash.forward`. Arrays become float64 before any arithmetic; those on a GPU are copied to the host.
    return_lse : bool
        Also return the log-sum-exp of each row.
    dlse, bias_grad, deterministic
        Options of `backward`, as `numba_flash.forward` takes them: of no effect.
    precision, backend
        Checked, and ignored: there is one way to compute this, on the CPU. So the options of a call serve here, too. There is no `out`:
        results are float64, whatever the dtype of q is.

    Returns
    -------
    o : numpy.ndarray of float64, shape (..., Hq, Nq, Dv)
        Rows that see no key are 0. Like q, it is (..., Nq, Hq, Dv) with ``axes="bnhd"``.
    lse : numpy.ndarray of float64, shape (..., Hq, Nq)
        Only with `return_lse`; -inf where no key is seen.

    Raises
    ------
    TypeError, ValueError
        As `numba_flash.forward`.
    MemoryError
        A matrix of Nq x Nk does not fit.

    Examples
    --------
    >>> import numpy as np, numba_flash
    >>> x = np.random.default_rng(0).standard_normal((2, 50, 8)).astype(np.float16)
    >>> o, lse = numba_flash.forward(x, x, x, causal=True, return_lse=True)
    >>> o_ref, lse_ref = numba_flash.reference.forward(x, x, x, causal=True, return_lse=True)
    >>> bool(np.abs(o - o_ref).max() < 1e-3), bool(np.abs(lse - lse_ref).max() < 1e-5)
    (True, True)
    """
    if unknown:
        refuse(forward, unknown)
    return_lse, _ = checks.flag("return_lse", return_lse), check_backend(backend)
    check_of_gradients(dlse, deterministic, bias_grad, bias)
    given = Given(scale, causal, window, q_start, softcap, dropout, rng, score_mod, score_mod_grad, resolved(precision))
    x, size = _adopted(named(axes), ForwardInputs, (q, k, v, bias, mask, q_lengths, kv_lengths))
    problem = bind(x.q, x.k, x.v, axes=x.AXES, **options_of(x, size, given))
    check_values(problem, x)
    x = _on_host(x)
    found = oracle.softmax(problem, options_of(x, size, given), x.q, x.k)
    o = x.AXES.turned("o", oracle.forward(problem, found, x.v).reshape(*x.q.shape[:-1], problem.dv))
    return (o, found.lse.reshape(x.q.shape[:-1])) if return_lse else o


@overload
def backward(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, *, bias_grad: Literal[False] = False, **options: Unpack[BackwardOptions]
) -> tuple[Float64, Float64, Float64]: ...
@overload
def backward(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, *, bias_grad: Literal[True], **options: Unpack[BackwardOptions]
) -> tuple[Float64, Float64, Float64, Float64]: ...
@overload
def backward(
    do: Array, q: Array, k: Array, v: Array, o: Array, lse: Array, *, bias_grad: bool, **options: Unpack[BackwardOptions]
) -> tuple[Float64, ...]: ...
@shown
@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
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
    dlse: Array | None = None,
    bias_grad: bool = False,
    deterministic: bool = True,
    return_lse: bool = False,
    axes: Order = "bhnd",
    precision: Precision | None = None,
    backend: Backend | None = None,
    **unknown: Never,
) -> tuple[Float64, ...]:
    """What `numba_flash.backward` means: gradients of ``sum(do * o) + sum(dlse * lse)``, in float64 with the whole N x N matrix.

    Parameters
    ----------
    do, q, k, v, scale, causal, window, q_start, bias, mask, q_lengths, kv_lengths, softcap, dropout, rng, score_mod, score_mod_grad, axes
        As given to `numba_flash.backward`. Arrays become float64 before any arithmetic; those on a GPU are copied to the host.
    o, lse : array, shapes (..., Hq, Nq, Dv) and (..., Hq, Nq)
        As returned by `numba_flash.forward` or by `forward` here. Gradients are computed from the inputs alone; these are compared with
        what the inputs give, and so find an o of other inputs or options, which `numba_flash.backward` cannot notice.
    dlse : array, shape (..., Hq, Nq), optional
        As given to `numba_flash.backward`.
    bias_grad : bool
        Also return the gradient with respect to the bias.
    return_lse : bool
        An option of `forward`, of no effect here.
    deterministic, precision, backend
        Checked, and ignored, as in `forward`: every sum has one order. But with ``precision="tf32"`` o and lse may be as wrong as
        products of numbers of 11 bits are.

    Returns
    -------
    dq, dk, dv : numpy.ndarray of float64
        In the shapes of q, k and v.
    dbias : numpy.ndarray of float64
        Only with `bias_grad`: in the shape of the bias.

    Raises
    ------
    TypeError, ValueError
        As `numba_flash.backward`; or o or lse is not what these arguments give: the message says where, what is there and what should be.
    MemoryError
        A matrix of Nq x Nk does not fit.

    Notes
    -----
    Let S be the largest ``|slope| scale |q_i| |k_j| + |s_ij|`` of a row's pairs with ``P_ij > 2**-40``, where slope is the derivative of a
    score with respect to its product. Then lse may be wrong by ``2**-16 (S + |lse| + 1)``, and o by ``(r + 2**-15 S) sum_j P_ij |v_j|``,
    where r is 2**-8 for float16, 2**-5 for bfloat16 and 2**-16 for float32: several times what a backend is wrong by, and little beside
    what a forgotten option changes. For float64 the powers are 2**-45, 2**-44 and r = 2**-45, with "tf32" 2**-8, 2**-7 and r = 2**-8. For
    float16, whose smallest step is 2**-24, o may be wrong by that times the sum of ``1 + |v_j|`` besides, and infinite beyond the dtype.

    Examples
    --------
    >>> import numpy as np, numba_flash
    >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, 50, 8)).astype(np.float32)
    >>> o, lse = numba_flash.forward(q, k, v, causal=True, return_lse=True)
    >>> gradients = numba_flash.backward(do, q, k, v, o, lse, causal=True)
    >>> expected = numba_flash.reference.backward(do, q, k, v, o, lse, causal=True)
    >>> all(np.allclose(x, y, atol=1e-5) for x, y in zip(gradients, expected))
    True
    >>> numba_flash.reference.backward(do, q, k, v, o, lse)  # forgotten: causal=True
    Traceback (most recent call last):
        ...
    ValueError: lse is not what forward returns for these arguments: lse[0, 0] is -0.1229, not 4.114; they may differ by 0.00016
    """
    if unknown:
        refuse(backward, unknown)
    bias_grad, _ = checks.flag("bias_grad", bias_grad), check_backend(backend)
    checks.flag("deterministic", deterministic)
    checks.flag("return_lse", return_lse)
    given = Given(scale, causal, window, q_start, softcap, dropout, rng, score_mod, score_mod_grad, resolved(precision))
    x, size = _adopted(named(axes), BackwardInputs, (do, q, k, v, o, lse, dlse, bias, mask, q_lengths, kv_lengths))
    options = options_of(x, size, given) | {"axes": x.AXES}
    problem = bind(x.q, x.k, x.v, **options)
    o, lse = _narrow(x.o, x.q.dtype), _narrow(x.lse, problem.lse_dtype)
    bind_backward(x.do, x.q, x.k, x.v, o, lse, dlse=x.dlse, bias_grad=bias_grad, **options)
    check_values(problem, x)
    x = _on_host(x)
    found = oracle.softmax(problem, options_of(x, size, given), x.q, x.k)
    _compare(problem, found, x)
    dq, dk, dv, ds = oracle.backward(problem, found, x.do, x.q, x.k, x.v, x.dlse)
    gradients = zip(("dq", "dk", "dv"), (dq, dk, dv), (x.q, x.k, x.v), strict=True)
    gradients = tuple(x.AXES.turned(name, gradient.reshape(like.shape)) for name, gradient, like in gradients)
    return (*gradients, _summed(ds, x.bias.shape)) if bias_grad else gradients


def _adopted(order, kind, given: tuple):
    """Arrays as a named tuple of that kind, in the usual order of axes, and the size of the blocks of the mask, None if it has none."""
    inputs = kind(*given)
    mask, size = taken(inputs.mask)
    return turned(order, kind._fields, inputs._replace(mask=mask)), size


def _on_host(inputs):
    """The same arrays of NumPy."""
    return inputs._make(x.get() if arrays.library(x) == "cupy" else x for x in inputs)


def _narrow(x, dtype):
    """`x` in the dtype of a call's result, if it is a wider float, as results of `forward` here are."""
    return x.astype(dtype) if getattr(x, "dtype", None) in (np.float32, np.float64) else x


def _summed(ds, shape) -> Float64:
    """The gradient of a bias of this shape: that of the scores, summed over the axes that the bias broadcasts."""
    wide = (1,) * (ds.ndim - len(shape)) + tuple(shape)
    return ds.sum(axis=tuple(axis for axis, n in enumerate(wide) if n == 1)).reshape(shape)


def _compare(problem: Problem, found: oracle.Softmax, x: BackwardInputs) -> None:
    """Raise unless o and lse are what q, k, v give, but for what rounding may do to them (see the notes of `backward`)."""
    wide = lambda y, ndim: np.asarray(y).astype(np.float64).reshape((1,) * (ndim - y.ndim) + y.shape)
    heads = lambda y: np.repeat(wide(y, 5), problem.hq // max(problem.hk, 1), axis=2)
    size = lambda y: np.sqrt(np.square(y).sum(axis=-1))
    products = abs(problem.scale) * size(wide(x.q, 5))[..., None] * size(heads(x.k))[..., None, :]
    slope = 1.0 if found.slope is None else np.abs(found.slope)
    largest = np.max(slope * products + np.abs(found.s), axis=-1, initial=0.0, where=found.p > FELT)
    step = SCORES.get(problem.dtype if problem.precision != "tf32" else "tf32", SCORE)
    _check_near("lse", x, found.lse, step * (largest + np.abs(found.lse) + 1))
    weights = (max(STORED[problem.dtype], step) + 2 * step * largest)[..., None] * found.p * found.factor
    least = LEAST.get(problem.dtype, 0.0)
    allowed = (weights + least * found.visible) @ np.abs(heads(x.v)) + least
    o = oracle.forward(problem, found, x.v)
    if not np.isfinite(x.v).all():  # it may reach a row that does not see it
        allowed[~np.isfinite(wide(x.o, 5))] = np.inf
    _check_near("o", x, o, allowed)


def _check_near(name: str, inputs: BackwardInputs, own, allowed) -> None:
    """Raise where that input is farther from `own` than `allowed`; all is right where that is infinite, or own NaN or beyond the dtype."""
    x = getattr(inputs, name)
    beyond = 0.9 * float(LARGEST.get(x.dtype.name) or np.finfo(x.dtype).max)
    x, own, allowed = (inputs.AXES.turned(name, y) for y in (x.astype(np.float64), own.reshape(x.shape), allowed.reshape(x.shape)))
    free = np.isnan(own) | ((np.abs(own) > beyond) & ~np.isneginf(own)) | (~np.isfinite(allowed) & ~np.isneginf(own))
    wrong = ~((np.abs(x - own) <= allowed) | (x == own) | free) | (np.isneginf(own) & (x != own))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        where = f"{name}[{', '.join(map(str, at))}]"
        raise ValueError(
            f"{name} is not what forward returns for these arguments: {where} is {x[at]:.4g}, not {own[at]:.4g};"
            f" they may differ by {allowed[at]:.3g}"
        )
