"""Attention on dask arrays: lazy, and chunked along batch, heads, queries and keys.

Every pair of a block of queries and a block of keys is a task of its own. Forward, each gives o and lse over its keys alone, in float32,
and a tree of `numba_flash.merge` puts them together (Dao, FlashAttention-2, arXiv:2307.08691, section 3.1); backward, each gives its part
of the gradients, since P = exp(s - lse) needs nothing but the lse over all keys, and trees add these up. Pairs in which the band, or a mask
that is a NumPy array, hides everything have no task. Trees have one shape for each chunking: equal chunks give equal bits.
"""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any

import dask.array as da

from numba_flash.arguments import checks
from numba_flash.arguments.annotations import State, Window
from numba_flash.arguments.inputs import check_of_gradients
from numba_flash.arguments.precisions import Precision
from numba_flash.arguments.problem import bind, bind_backward
from numba_flash.arguments.signatures import shown
from numba_flash.dask.arguments import adopted, check_libraries, on_paper, refuse
from numba_flash.dask.blocks import Grid
from numba_flash.dask.graph import Graph
from numba_flash.dask.tasks import added, attend, differentiate, log_sum, merged, nothing, rounded, rounded_o, zeros

__all__ = ["backward", "forward"]


@shown
def forward(
    q: da.Array,
    k: da.Array,
    v: da.Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_start: int | None = None,
    bias: Any = None,
    mask: Any = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    rng: State | None = None,
    dlse: None = None,
    bias_grad: bool = False,
    return_lse: bool = False,
    precision: Precision | None = None,
    backend: str | None = None,
    **others: Any,
) -> Any:
    """`numba_flash.forward` on dask arrays: exact attention over sequences that need not fit into memory.

    Parameters
    ----------
    q : dask array, shape (..., Hq, Nq, D)
        Queries; blocks are NumPy or CuPy arrays. Chunks may be any along all axes; D is put into one.
    k, v : dask arrays, shape (..., Hk, Nk, D) and (..., Hk, Nk, Dv)
        Keys and values. Where their chunks differ from each other's, or along batch and heads from q's, arrays are rechunked to what
        all of them have in common; a chunk of heads holds whole groups of query heads.
    bias, mask : array, broadcastable to (..., Hq, Nq, Nk), optional
        Dask arrays, or arrays as `numba_flash.forward` takes them; NumPy arrays go to a GPU block by block, if that is where q is.
    scale, causal, window, q_start, softcap, dropout, rng, return_lse, precision, backend
        As `numba_flash.forward` takes them, of the whole sequences. The default of `precision` is that of this call, not of the time
        and place of a task. Dropout has the bits of one call; for that, all batch elements and heads have to be in one chunk, and chunks
        of k and v begin at multiples of 8.
    dlse, bias_grad : None, bool
        Options of `backward`, checked and of no effect here; dlse can only be None.

    Returns
    -------
    o : dask array, shape (..., Hq, Nq, Dv)
        In q's dtype, in its chunks along queries.
    lse : dask array, shape (..., Hq, Nq)
        Only with `return_lse`: float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError
        As `numba_flash.forward`, at once; q, k or v is no dask array, has chunks of unknown size, or lies elsewhere than q.
    NotImplementedError
        An option that has no meaning for blocks; `numba_flash.forward` takes it.

    Notes
    -----
    A task holds a block of each argument, and of o in float32. Chunks of about a thousand queries and keys, and of several heads, keep the
    scheduler's share of the time small.

    Examples
    --------
    >>> import dask.array as da, numba_flash.dask
    >>> q = k = v = da.ones((8, 4000, 64), chunks=(4, 1000, 64), dtype="float32")
    >>> numba_flash.dask.forward(q, k, v, causal=True)
    dask.array<o, shape=(8, 4000, 64), dtype=float32, chunksize=(4, 1000, 64), chunktype=numpy.ndarray>
    """
    refuse(forward, others)
    check_of_gradients(dlse, True, bias_grad, bias)
    given = {"scale": scale, "causal": causal, "window": window, "q_start": q_start, "softcap": softcap}
    given |= {"dropout": dropout, "rng": rng, "precision": precision}
    given = checks.plain_numbers(given)
    bias, mask = adopted("bias", bias), adopted("mask", mask)
    every = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask}
    paper = {name: on_paper(name, x) for name, x in every.items()}
    check_libraries(every)
    problem = bind(**paper, **given)
    given |= {"precision": problem.precision, "backend": backend}
    grid = Grid(problem, {"q": q}, {"k": k, "v": v}, {"bias": bias, "mask": mask}, given)
    graph = Graph("attention", grid)
    o, lse = {}, {}
    for at in grid.blocks("q"):
        parts = [graph.add("part", pair.at, partial(attend, grid.names, grid.options(pair)), grid.keys(pair)) for pair in grid.pairs(at)]
        whole = graph.tree("merged", at, merged, parts) or graph.add("nothing", at, partial(nothing, problem.dv), [grid.key("q", at)])
        o[*at, 0], lse[at] = (partial(rounded_o, q.dtype), whole), (log_sum, whole)
    chunks = grid.arrays["q"].chunks[:-1]
    o_array = graph.array("o", o, (*chunks, (problem.dv,)), q, q.dtype)
    return (o_array, graph.array("lse", lse, chunks, q, problem.lse_dtype)) if return_lse else o_array


@shown
def backward(
    do: da.Array,
    q: da.Array,
    k: da.Array,
    v: da.Array,
    o: da.Array,
    lse: da.Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_start: int | None = None,
    bias: Any = None,
    mask: Any = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    rng: State | None = None,
    dlse: da.Array | None = None,
    bias_grad: bool = False,
    return_lse: bool = False,
    precision: Precision | None = None,
    backend: str | None = None,
    **others: Any,
) -> tuple[da.Array, ...]:
    """`numba_flash.backward` on dask arrays.

    Parameters
    ----------
    do, o : dask arrays, shape (..., Hq, Nq, Dv)
        Gradient with respect to o, and o as `forward` returned it.
    lse : dask array, shape (..., Hq, Nq)
        As `forward` returned it with ``return_lse=True``.
    dlse : dask array, shape (..., Hq, Nq), optional
        Gradient with respect to lse.
    bias_grad : bool
        Also return the gradient with respect to the bias.
    return_lse : bool
        An option of `forward`, checked and of no effect here.
    q, k, v, scale, causal, window, q_start, bias, mask, softcap, dropout, rng, precision, backend
        As given to `forward`.

    Returns
    -------
    dq, dk, dv : dask arrays
        In the shapes and dtype of q, k and v.
    dbias : dask array
        Only with `bias_grad`: summed over the axes that the bias broadcasts, in its shape and dtype.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `forward`.

    Notes
    -----
    The part of a gradient that belongs to one pair of blocks is rounded to its dtype; parts are added in float32, in a fixed order.
    """
    refuse(backward, others)
    checks.flag("return_lse", return_lse)
    given = {"scale": scale, "causal": causal, "window": window, "q_start": q_start, "softcap": softcap}
    given |= {"dropout": dropout, "rng": rng, "precision": precision}
    given = checks.plain_numbers(given)
    bias, mask = adopted("bias", bias), adopted("mask", mask)
    rows = {"do": do, "q": q, "o": o, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    every = rows | {"k": k, "v": v, "bias": bias, "mask": mask}
    paper = {name: on_paper(name, x) for name, x in every.items()}
    check_libraries(every)
    problem = bind_backward(**paper, bias_grad=bias_grad, **given)
    given |= {"precision": problem.precision, "backend": backend, "bias_grad": bias_grad}
    grid = Grid(problem, rows, {"k": k, "v": v}, {"bias": bias, "mask": mask}, given)
    graph = Graph("gradients", grid)
    wanted = ("q", "k", "v", "bias") if bias_grad else ("q", "k", "v")
    shares: dict[str, dict] = {name: {at: [] for at in grid.blocks(name)} for name in wanted}
    for at in grid.blocks("q"):
        for pair in grid.pairs(at):
            gradients = graph.add("pair", pair.at, partial(differentiate, grid.names, grid.options(pair)), grid.keys(pair))
            for number, name in enumerate(wanted):
                share = graph.add(f"share of d{name}", pair.at, itemgetter(number), [gradients])
                shares[name][grid.place(name, pair)].append(share)
    results = []
    for name, blocks in shares.items():
        x, sums = grid.arrays[name], {}
        for at, parts in blocks.items():
            key = grid.key(name, at)
            total = graph.tree(f"sum of d{name}", at, added, parts)
            sums[key[1:]] = (partial(rounded, x.dtype), total) if parts else (zeros, key)
        results.append(graph.array(f"d{name}", sums, x.chunks, x, x.dtype))
    return tuple(results)
