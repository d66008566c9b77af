"""Attention over sequences that are spread over processes, each of which has its part of the queries, keys and values.

K and V go round in a ring, from each process to the next (Liu, Zaharia and Abbeel, Ring Attention, arXiv:2310.01889), or come to
everybody at once where they are small. What a process computes with each part is `numba_flash.forward` in float32, and
`numba_flash.merge` puts results together; gradients of keys and values travel with them, and each process adds its share in float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numba_flash.arguments import arrays, checks
from numba_flash.arguments.annotations import State, Window
from numba_flash.arguments.precisions import Precision
from numba_flash.arguments.signatures import shown
from numba_flash.distributed import layouts, loops
from numba_flash.distributed.agreement import adopted, agree, agree_on_parts, check_choice, communicator
from numba_flash.distributed.carriers import compact, gather
from numba_flash.distributed.communicators import Communicator, Message, Mpi, Transfer
from numba_flash.distributed.nccl import Nccl
from numba_flash.distributed.staged import Staged

__all__ = ["Communicator", "Message", "Mpi", "Nccl", "Staged", "Transfer", "backward", "forward", "positions", "shard", "unshard"]


@shown
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Any,
    layout: str = "contiguous",
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_start: int | None = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    rng: State | None = None,
    dlse: None = None,
    return_lse: bool = False,
    algorithm: str | None = None,
    precision: Precision | None = None,
    backend: str | None = None,
    **others: Any,
) -> Any:
    """`numba_flash.forward` on sequences of which each process has a part. All processes call it, each with its own.

    Parameters
    ----------
    q : array, shape (..., Hq, N of this process, D)
        Its queries.
    k, v : arrays, shape (..., Hk, N of this process, D) and (..., Hk, N of this process, Dv)
        Its keys and values; they may be of another sequence than the queries.
    comm : communicator of mpi4py or NCCL, or Communicator
        The processes. NCCL's, as made by CuPy, cupyx.distributed or nccl4py, carries CuPy arrays, see `Nccl`; an mpi4py communicator
        carries NumPy arrays, and CuPy arrays by way of the host, see `Staged`.
    layout : str
        Whose are which positions, see `shard`: "contiguous" or "zigzag". Contiguous parts may be of any sizes.
    scale, causal, window, q_start, q_lengths, kv_lengths, softcap, dropout, rng
        As `numba_flash.forward` takes them, of the whole sequences; the same in all processes. Dropout has the bits of the whole, and needs
        parts of k that begin at multiples of 8.
    dlse : None
        An option of `backward`, of no effect here.
    return_lse : bool
        Also return the log-sum-exp of each row, which `backward` needs.
    algorithm : str, optional
        "ring": a process holds two parts of K and V beside its own. "gather": it holds all. By default, the second where all K and V have
        no more than 1 MiB.
    precision, backend : str, optional
        As `numba_flash.forward` takes them. The precision of float32 is the same in all processes, also where it is their default.

    Returns
    -------
    o : array, shape (..., Hq, N of this process, Dv)
        In q's dtype. Equal to that of one process up to rounding; the same bits in every run.
    lse : array, shape (..., Hq, N of this process)
        Only with `return_lse`: float32 (float64 for float64).

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        An argument is of the wrong kind or value, or not the same in all processes; nothing was computed.
    RuntimeError
        Another process has raised such an error.
    TimeoutError
        A process has not answered for half an hour, or the seconds of `Mpi` or `Nccl`. (NCCL itself waits for ever once all have agreed.)

    Examples
    --------
    In a program that ``mpiexec -n 4 python -m mpi4py program.py`` runs::

        from mpi4py import MPI
        from numba_flash import distributed

        spread = {"comm": MPI.COMM_WORLD, "layout": "zigzag"}
        own = [distributed.shard(x, **spread) for x in (q, k, v)]
        o = distributed.forward(*own, **spread, causal=True)
        everything = distributed.unshard(o, **spread)
    """
    given = {"layout": layout, "algorithm": algorithm, "scale": scale, "causal": causal, "window": window, "q_start": q_start}
    given |= {"q_lengths": q_lengths, "kv_lengths": kv_lengths, "softcap": softcap, "backend": backend}
    given |= {"dropout": dropout, "rng": rng, "precision": precision}
    given |= {"dlse": dlse, "return_lse": return_lse}
    call = agree(forward, comm, {"q": q, "k": k, "v": v}, given, others)
    with arrays.beside(call.arrays["q"]):
        o, lse = loops.forward(call)
    return (o, lse) if return_lse else o


@shown
def backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    comm: Any,
    layout: str = "contiguous",
    scale: float | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_start: int | None = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    rng: State | None = None,
    dlse: Any = None,
    return_lse: bool = False,
    algorithm: str | None = None,
    precision: Precision | None = None,
    backend: str | None = None,
    **others: Any,
) -> tuple[Any, Any, Any]:
    """`numba_flash.backward` on sequences of which each process has a part.

    Parameters
    ----------
    do, o : arrays, shape (..., Hq, N of this process, Dv)
        Gradient with respect to this process's o, and that as `forward` returned it.
    lse : array, shape (..., Hq, N of this process)
        As `forward` returned it with ``return_lse=True``.
    dlse : array, shape (..., Hq, N of this process), optional
        Gradient with respect to lse.
    return_lse : bool
        An option of `forward`, checked and of no effect here.
    q, k, v, comm, layout, scale, causal, window, q_start, q_lengths, kv_lengths, softcap, dropout, rng, algorithm, precision, backend
        As given to `forward`.

    Returns
    -------
    dq, dk, dv : arrays
        Gradients of this process's q, k and v, in their shapes and dtype: of what all processes have computed with them.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, RuntimeError, TimeoutError
        As `forward`.

    Notes
    -----
    The part of a gradient that belongs to two parts of the sequences is rounded to its dtype; parts are added in float32, in the order of
    processes from the owner on.
    """
    given = {"layout": layout, "algorithm": algorithm, "scale": scale, "causal": causal, "window": window, "q_start": q_start}
    given |= {"q_lengths": q_lengths, "kv_lengths": kv_lengths, "softcap": softcap, "backend": backend}
    given |= {"dropout": dropout, "rng": rng, "precision": precision}
    given |= {"return_lse": return_lse}
    arguments = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, "dlse": dlse}
    call = agree(backward, comm, arguments, given, others)
    with arrays.beside(call.arrays["q"]):
        return loops.backward(call)


@shown
def shard(x: Any, *, comm: Any, layout: str = "contiguous", axis: int = -2) -> Any:
    """The part of a whole array that belongs to this process.

    Parameters
    ----------
    x : array
        The same in all processes; nothing is sent.
    comm : as given to `forward`
        The processes.
    layout : str
        "contiguous": process r has the r-th of as many pieces as there are processes. "zigzag": it has the r-th from the front and the
        r-th from the back of twice as many, so that all have the same work under a causal mask.
    axis : int
        That of the sequence.

    Returns
    -------
    part : array
        A copy. Pieces begin at multiples of 8, as dropout needs, so that sizes differ by up to 15 in a contiguous layout, 30 in a zigzag.
    """
    x = adopted("x", x)
    own = positions(x.shape[axis], comm=comm, layout=layout)
    with arrays.beside(x):
        return x.take(own, axis)


@shown
def unshard(x: Any, *, comm: Any, layout: str = "contiguous", axis: int = -2) -> Any:
    """The whole array, in each process, of which each has the part that `shard` made.

    Parameters
    ----------
    x : array
        The part of this process. Contiguous parts may be of any sizes.
    comm, layout, axis
        As given to `shard`.

    Returns
    -------
    whole : array
        In all processes.

    Raises
    ------
    ValueError
        Parts have other shapes or dtypes than each other, or other sizes than `shard` makes.
    """
    comm = communicator(comm)
    part, chunks = agree_on_parts(comm, x, layout, axis)
    with arrays.beside(part):
        rows = compact(part.swapaxes(0, axis))
        (whole,) = gather(comm, [rows.reshape(len(rows), math.prod(rows.shape[1:]))], chunks, "all of x")
        return whole.reshape(len(whole), *rows.shape[1:]).swapaxes(0, axis)


@shown
def positions(n: int, *, comm: Any, layout: str = "contiguous") -> Any:
    """Which positions of a sequence of length n belong to this process, in the order in which it has them.

    Parameters
    ----------
    n : int
        Length of the whole sequence.
    comm, layout
        As given to `shard`.

    Returns
    -------
    positions : numpy.ndarray of int64
        For embeddings of positions, and for data that processes read themselves.
    """
    comm = communicator(comm)
    check_choice("layout", layout, layouts.LAYOUTS)
    chunks = layouts.even(checks.integer("n", n), comm.size, layout)[comm.rank]
    return np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
