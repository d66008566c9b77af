"""`forward`, `backward`: gather the arguments, find or prepare the call, make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Never, Unpack, overload

from numpy.typing import NDArray

from numba_flash import call
from numba_flash.arguments import checks
from numba_flash.arguments.annotations import Array, BackwardOptions, ForwardOptions, Integers, State, T, Window
from numba_flash.arguments.axes import USUAL, Axes, Order
from numba_flash.arguments.block_mask import BlockMask
from numba_flash.arguments.inputs import (
    backward_inputs,
    check_of_gradients,
    computed_in,
    forward_inputs,
    gradients,
    options_of,
    outs_of,
    returned,
    taken,
)
from numba_flash.arguments.precisions import Precision, resolved
from numba_flash.arguments.problem import BackwardInputs, ForwardInputs, ForwardResults, bind, bind_backward
from numba_flash.arguments.signatures import refuse, shown
from numba_flash.call import Given, Wanted
from numba_flash.plan import Backend

FORWARD, BACKWARD = ForwardInputs._fields, BackwardInputs._fields


@overload
def forward(q: NDArray[T], k: Array, v: Array, *, return_lse: Literal[False] = False, **options: Unpack[ForwardOptions]) -> NDArray[T]: ...
@overload
def forward(
    q: NDArray[T], k: Array, v: Array, *, return_lse: Literal[True], **options: Unpack[ForwardOptions]
) -> tuple[NDArray[T], NDArray[Any]]: ...
@overload
def forward(
    q: Array, k: Array, v: Array, *, return_lse: bool = False, out: Array | None = None, **options: Unpack[ForwardOptions]
) -> Any: ...
@shown
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
    out: Array | None = None,
    axes: Order = "bhnd",
    precision: Precision | None = None,
    backend: Backend | None = None,
    **unknown: Never,
) -> Array | tuple[Array, Array]:
    """Exact attention ``softmax(scale * q k^T + mask) v`` without the N x N matrix.

    FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 1: tiles of keys and values stream past a block of queries whose running row
    maximum m and sum l rescale the output (online softmax). With every option::

        s_ij = scale * q_i . k_j
        s_ij = softcap * tanh(s_ij / softcap)
        s_ij = score_mod(s_ij, b, h, i, j)
        s_ij = s_ij + bias_ij
        s_ij = -inf unless query i sees key j         causal, window, q_start, q_lengths, kv_lengths, mask
        P    = softmax(s), lse_i = log sum_j exp(s_ij)
        P    = keep_ij * P / (1 - dropout)
        o    = P v

    Parameters
    ----------
    q : array, shape (..., Hq, Nq, D)
        Queries; 2 to 5 dimensions, ``(N, D)`` means one head. float16, bfloat16 (ml_dtypes), float32 or float64; any strides, read in
        place. NumPy, CuPy, or any object with ``__dlpack__`` or ``__cuda_array_interface__``; subclasses are read as plain arrays.
        1 <= D <= 256.
    k : array, shape (..., Hk, Nk, D)
        Keys. Hq must be a multiple of Hk: query head h reads key head ``h // (Hq // Hk)`` (grouped-query attention).
    v : array, shape (..., Hk, Nk, Dv)
        Values; 1 <= Dv <= 256.
    scale : float, optional
        Factor of ``q . k``; default ``1 / sqrt(D)``.
    causal : bool
        Query i sees key j iff ``j <= i + q_start``.
    window : (int, int), tuple or list, optional
        Query i sees key j iff ``i + q_start - left <= j <= i + q_start + right``; -1 is no limit.
    q_start : int, optional
        Position of query 0 among the keys; default ``Nk - Nq`` (the last query is aligned with the last key), with lengths
        ``kv_length - q_length`` of each sequence. 0 aligns the first ones.
    bias : array, broadcastable to (..., Hq, Nq, Nk), optional
        Added to the scores; q's dtype or float32, any strides, stride 0 included. -inf hides.
    mask : array of bool, broadcastable to (..., Hq, Nq, Nk), or BlockMask, optional
        False hides. Tiles without a True are skipped. A `BlockMask` says it of blocks of pairs.
    q_lengths, kv_lengths : array or list of integers, shape (...), optional
        Numbers of queries and keys of each batch element; the rest is padding, which is not read and gets zeros. NumPy, or CuPy if q is:
        values on a GPU cannot be checked without waiting for it, so one outside ``[0, N]`` gives NaN for its batch element.
    softcap : float, optional
        Caps scores smoothly, positive.
    dropout : float
        Probability in [0, 1) that a probability is dropped, rounded to the nearest multiple of 2**-16 below 1, also in the formula.
    rng : (int, int) or (int, int, int, int), tuple or list, optional
        Seed and offset of the dropout, with those of a part its first query and key, see `dropout_mask`; needed if dropout > 0.
    score_mod : callable, optional
        ``f(score, b, h, i, j)`` returns the score of query i and key j in query head h of batch element b (leading dimensions counted
        together); compiled by Numba into the kernel. What it captures is a constant. -inf hides.
    score_mod_grad : callable, optional
        Its derivative ``g(score, b, h, i, j)`` with respect to score, which only `backward` needs; default
        ``score_mod.score_mod_grad``, if there is one.
    dlse, bias_grad, deterministic : None, bool, bool
        Options of `backward`, checked and of no effect here, so that one set of options serves both; dlse can only be None.
    return_lse : bool
        Also return the log-sum-exp of each row, which `backward` needs.
    out : array, shape (..., Hq, Nq, Dv), optional
        Written in place and returned; must not overlap an input. For 16 bits it may be float32: o unrounded, for `merge`.
    axes : str
        "bhnd": q, k, v, o and `out` are (..., heads, length, head dimension), as it says here. "bnhd": they are (..., length, heads, head
        dimension), of 3 to 5 dimensions; all else is as it says here: lse (..., Hq, Nq), bias and mask (..., Hq, Nq, Nk).
    precision : str, optional
        How accurate float32 has to be at least; other dtypes ignore it. "float32": as IEEE float32 is, by whatever algorithm. "ieee": IEEE
        products and sums, no tensor cores. "tf32": products of numbers of 11 bits are enough. Default: that of `use_precision` or
        `set_precision`, which is "float32" at first.
    backend : str, optional
        Demand "sm90", "sm80", "simt" or "cpu" instead of the fastest that can run.

    Returns
    -------
    o : array, shape (..., Hq, Nq, Dv)
        In the dtype of `out`, or q's; in q's library and device. Rows that see no key are 0.
    lse : array, shape (..., Hq, Nq)
        Only with `return_lse`: natural logarithm of the row's sum of exponentials, float32 (float64 for float64); -inf where no key
        is seen.

    Raises
    ------
    TypeError, ValueError
        An argument is of the wrong kind or value; nothing was computed.
    NotImplementedError
        No backend, or not the one demanded, can run this; the message holds each one's reason.
    MemoryError
        Naming the array that could not be allocated.

    Notes
    -----
    Work on CuPy arrays goes onto CuPy's current stream and is not waited for. NumPy arrays are computed on the GPU where there is one.
    Equal inputs give equal bits. A hidden key is absent: NaN or Inf in it does not reach the rows that do not see it, with one exception:
    on backends "sm90" and "sm80", a NaN or Inf in v behind a mask may reach rows that share a tile with those that see it.

    Examples
    --------
    >>> import numpy as np, numba_flash
    >>> q = k = v = np.eye(4, dtype=np.float32)
    >>> numba_flash.forward(q, k, v, causal=True).round(2)
    array([[1.  , 0.  , 0.  , 0.  ],
           [0.38, 0.62, 0.  , 0.  ],
           [0.27, 0.27, 0.45, 0.  ],
           [0.22, 0.22, 0.22, 0.35]], dtype=float32)
    """
    if unknown:
        refuse(forward, unknown)
    if deterministic is not True or bias_grad is not False or dlse is not None:
        check_of_gradients(dlse, deterministic, bias_grad, bias)
    mask, size = (None, None) if mask is None else taken(mask)
    inputs = forward_inputs((q, k, v, bias, mask, q_lengths, kv_lengths))
    given = call.given((scale, causal, window, q_start, softcap, dropout, rng, score_mod, score_mod_grad, resolved(precision)))
    computed = call.computed if axes == "bhnd" else computed_in(axes)
    o, lse = computed(_prepare_forward, FORWARD, inputs, (out, None), given, (backend, return_lse, size))
    o = o if out is None else out
    return (o, lse) if return_lse else o


@overload
def backward(
    do: Array,
    q: NDArray[T],
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    *,
    bias_grad: Literal[False] = False,
    **options: Unpack[BackwardOptions],
) -> tuple[NDArray[T], NDArray[T], NDArray[T]]: ...
@overload
def backward(
    do: Array, q: NDArray[T], k: Array, v: Array, o: Array, lse: Array, *, bias_grad: Literal[True], **options: Unpack[BackwardOptions]
) -> tuple[NDArray[T], NDArray[T], NDArray[T], NDArray[Any]]: ...
@overload
def backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    *,
    bias_grad: bool = False,
    out: tuple[Array | None, ...] | None = None,
    **options: Unpack[BackwardOptions],
) -> tuple[Any, ...]: ...
@shown
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
    out: tuple[Array | None, ...] | None = None,
    axes: Order = "bhnd",
    precision: Precision | None = None,
    backend: Backend | None = None,
    **unknown: Never,
) -> tuple[Array, ...]:
    """Gradients of attention; the probabilities are recomputed, tile by tile, from q, k and lse.

    FlashAttention-2 (Dao, arXiv:2307.08691), Algorithm 2.

    Parameters
    ----------
    do : array, shape (..., Hq, Nq, Dv)
        Gradient with respect to o, in q's dtype.
    q, k, v, scale, causal, window, q_start, bias, mask, q_lengths, kv_lengths
        As given to `forward`.
    softcap, dropout, rng, score_mod, score_mod_grad, precision, backend
        As given to `forward`.
    o, lse : array
        As returned by `forward` with ``return_lse=True``.
    dlse : array, shape (..., Hq, Nq), optional
        Gradient with respect to lse, in lse's dtype.
    bias_grad : bool
        Also return the gradient with respect to the bias.
    deterministic : bool
        True: the same bits in every run. False allows a backend to add parts of dq in the order in which they are ready, in float32,
        which `sm80` does, and `sm90` for head dimensions up to 128 with `mask` or of packed sequences; the others are deterministic
        anyway.
    return_lse : bool
        An option of `forward`, checked and of no effect here.
    out : tuple of arrays, optional
        (dq, dk, dv), with `bias_grad` (dq, dk, dv, dbias), written in place and returned; None for those to be allocated. They must not
        overlap an input or each other.
    axes : str
        As given to `forward`: "bnhd" for do, q, k, v, o, and dq, dk, dv in turn, but not for lse, dlse and dbias.

    Returns
    -------
    dq, dk, dv : array
        In the shapes and dtype of q, k and v; 0 in padding.
    dbias : array
        Only with `bias_grad`: summed over the axes that the bias broadcasts, in its shape and dtype.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, MemoryError
        As `forward`.

    Notes
    -----
    What a mask hides is absent, as in `forward`; but on backends "sm90" and "sm80" a NaN or Inf in q, k, v or do behind a mask may
    reach the gradients of what shares a tile with it.
    Every sum has one fixed order, that of the parts of dq unless `deterministic` is False.
    """
    if unknown:
        refuse(backward, unknown)
    if return_lse is not False:
        checks.flag("return_lse", return_lse)
    bias_grad = checks.flag("bias_grad", bias_grad)
    mask, size = (None, None) if mask is None else taken(mask)
    inputs = backward_inputs((do, q, k, v, o, lse, dlse, bias, mask, q_lengths, kv_lengths))
    outs = outs_of(out, ("dq", "dk", "dv", "dbias") if bias_grad else ("dq", "dk", "dv"))
    given = call.given((scale, causal, window, q_start, softcap, dropout, rng, score_mod, score_mod_grad, resolved(precision)))
    computed = call.computed if axes == "bhnd" else computed_in(axes)
    results = computed(_prepare_backward, BACKWARD, inputs, outs, given, (backend, bias_grad, deterministic, size))
    return returned(results[: 4 if bias_grad else 3], out)


def _prepare_forward(inputs: ForwardInputs, outs: tuple, given: Given, backend: str | None, return_lse: bool, size, axes: Axes = USUAL):
    return_lse = checks.flag("return_lse", return_lse)
    problem = bind(inputs.q, inputs.k, inputs.v, axes=axes, **options_of(inputs, size, given))
    shape = (*inputs.q.shape[:-1], problem.dv)
    lse = Wanted("q", shape[:-1], problem.lse_dtype) if return_lse else None
    o = Wanted("q", shape, problem.lse_dtype if getattr(outs[0], "dtype", None) == problem.lse_dtype else None)
    return call.prepare("forward", problem, backend, inputs, outs, ForwardResults(o, lse))


def _prepare_backward(
    inputs: BackwardInputs, outs: tuple, given: Given, backend: str | None, bias_grad: bool, deterministic: bool, size, axes: Axes = USUAL
):
    deterministic, x = checks.flag("deterministic", deterministic), inputs
    options = options_of(x, size, given) | {"axes": axes, "dlse": x.dlse, "bias_grad": bias_grad}
    problem = bind_backward(x.do, x.q, x.k, x.v, x.o, x.lse, **options)
    return call.prepare("backward", problem, backend, inputs, outs, gradients(inputs, bias_grad), deterministic=deterministic)
