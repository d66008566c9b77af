"""`forward_paged`: keys and values in pages anywhere in a cache, as text is generated with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Never, Unpack, overload

from numpy.typing import NDArray

from numba_flash import call
from numba_flash.arguments import checks
from numba_flash.arguments.annotations import Array, Integers, PagedOptions, T, Window
from numba_flash.arguments.pages import PagedInputs
from numba_flash.arguments.precisions import Precision, resolved
from numba_flash.arguments.problem import ForwardResults, bind_paged
from numba_flash.arguments.signatures import refuse, shown
from numba_flash.call import Given, Wanted
from numba_flash.plan import Backend


@overload
def forward_paged(
    q: NDArray[T],
    k_pages: Array,
    v_pages: Array,
    page_table: Integers,
    kv_lengths: Integers,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PagedOptions],
) -> NDArray[T]: ...
@overload
def forward_paged(
    q: NDArray[T],
    k_pages: Array,
    v_pages: Array,
    page_table: Integers,
    kv_lengths: Integers,
    *,
    return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[NDArray[T], NDArray[Any]]: ...
@overload
def forward_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Integers,
    kv_lengths: Integers,
    *,
    return_lse: bool = False,
    out: Array | None = None,
    **options: Unpack[PagedOptions],
) -> Any: ...
@shown
def forward_paged(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    page_table: Integers,
    kv_lengths: Integers,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_start: int | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    q_lengths: Integers | None = None,
    softcap: float | None = None,
    score_mod: Callable[..., Any] | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    precision: Precision | None = None,
    backend: Backend | None = None,
    **unknown: Never,
) -> Array | tuple[Array, Array]:
    """`forward` for keys and values in pages: those of a sequence lie anywhere in a cache, in the order that a table says.

    The result is that of `forward` with ``kv_lengths``, where k and v of a sequence are the pages that its row of the table names, one
    after the other. Nothing of the cache is copied.

    Parameters
    ----------
    q : array, shape (..., Hq, Nq, D)
        Queries; dtypes, strides and libraries as in `forward`.
    k_pages : array, shape (pages, Hk, page, D)
        Keys, `page` of them in each page, from 1.
    v_pages : array, shape (pages, Hk, page, Dv)
        Values.
    page_table : array of int32 or int64, or lists, shape (..., most pages)
        Entry t of a row is the page that holds keys ``t * page`` to ``(t + 1) * page - 1`` of that batch element; pages may be shared.
        Entries from ``ceil(kv_length / page)`` on are not used and may hold anything. NumPy, or CuPy if q is: values on a GPU cannot
        be checked without waiting for it, so a page that does not exist among those used gives NaN for its batch element.
    kv_lengths : array or list of integers, shape (...)
        Numbers of keys of each batch element, as in `forward`; what lies behind them in the last page is not read.
    scale, causal, window, q_start, softcap, score_mod, precision, backend
        As in `forward`. By default the last query is aligned with the last key of each sequence.
    bias, mask : array, broadcastable to (..., Hq, Nq, most pages * page), optional
        As in `forward`, by the number of a key in its sequence.
    q_lengths : array or list of integers, shape (...), optional
        As in `forward`.
    return_lse : bool
        Also return the log-sum-exp of each row.
    out : array, shape (..., Hq, Nq, Dv), optional
        Written in place and returned; must not overlap an input. For 16 bits it may be float32.

    Returns
    -------
    o : array, shape (..., Hq, Nq, Dv)
        In the dtype of `out`, or q's; in q's library and device.
    lse : array, shape (..., Hq, Nq)
        Only with `return_lse`; float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError, NotImplementedError, MemoryError
        As `forward`.

    Notes
    -----
    There is no backward pass, so options of gradients, `deterministic` among them, and of dropout are refused.
    A call is prepared once for all values of `page_table` and `kv_lengths`, so that a cache which grows by a key in every call costs no
    more than the launch. NumPy arrays are copied to the GPU where there is one, the whole cache in every call: keep it there.

    Examples
    --------
    >>> import numpy as np, numba_flash
    >>> k_pages = v_pages = np.arange(6, dtype=np.float32).reshape(3, 1, 2, 1)  # three pages of two keys
    >>> q, table = np.zeros((1, 1, 1), np.float32), np.array([2, 0])
    >>> numba_flash.forward_paged(q, k_pages, v_pages, table, np.array(3))  # the mean of 4, 5 and 0
    array([[[3.]]], dtype=float32)
    """
    if unknown:
        refuse(forward_paged, unknown)
    inputs = PagedInputs(q, k_pages, v_pages, bias, mask, q_lengths, kv_lengths, page_table)
    given = call.given((scale, causal, window, q_start, softcap, 0.0, None, score_mod, None, resolved(precision)))
    o, lse = call.computed(_prepare, PagedInputs.CALLED, inputs, (out, None), given, (backend, return_lse))
    o = o if out is None else out
    return (o, lse) if return_lse else o


def _prepare(inputs: PagedInputs, outs: tuple, given: Given, backend: str | None, return_lse: bool):
    return_lse, x = checks.flag("return_lse", return_lse), inputs
    options = given._asdict() | {"bias": x.bias, "mask": x.mask, "q_lengths": x.q_lengths}
    problem = bind_paged(x.q, x.k, x.v, x.page_table, x.kv_lengths, **options)
    shape = (*x.q.shape[:-1], problem.dv)
    lse = Wanted("q", shape[:-1], problem.lse_dtype) if return_lse else None
    o = Wanted("q", shape, problem.lse_dtype if getattr(outs[0], "dtype", None) == problem.lse_dtype else None)
    return call.prepare("forward", problem, backend, inputs, outs, ForwardResults(o, lse))
