"""What all processes must say alike, told to all of them before anything is computed or sent."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numba_flash.arguments import arrays, checks, signatures
from numba_flash.arguments.inputs import check_of_gradients
from numba_flash.arguments.options import SHARING
from numba_flash.arguments.problem import Problem, bind, bind_backward, check_lengths
from numba_flash.distributed import layouts
from numba_flash.distributed.communicators import Communicator, Mpi, share
from numba_flash.distributed.layouts import Chunk
from numba_flash.distributed.nccl import Nccl, native
from numba_flash.distributed.staged import Staged

REFUSED = {
    "bias": "each process would need its rows of all columns; numba_flash.dask takes one in blocks",
    "mask": "each process would need its rows of all columns; numba_flash.dask takes one in blocks",
    "score_mod": "it gets the numbers of queries and keys, which a part does not know",
    "score_mod_grad": "there is no score_mod",
    "bias_grad": "there is no bias",
    "axes": "heads come before queries and keys; x.swapaxes(-3, -2) has them so",
    "out": "results are made of parts in arrays of their own",
    "deterministic": "gradients are added in a fixed order, so that equal calls give equal bits",
}
ALGORITHMS = ("ring", "gather")
COLUMNS, LOG_SUMS = ("k", "v"), ("lse", "dlse")


class Call(NamedTuple):
    """A call that all processes make together.

    Attributes
    ----------
    comm : Communicator
        The processes.
    arrays : dict
        Those of this process, by name; None where absent.
    problem : Problem
        What is computed on the whole sequences.
    options : dict
        Of each part of it, except `q_start`, lengths and the dropout's state.
    q_start : int
        The position of query 0 among the keys.
    rows, columns : tuples
        The chunks of queries, and of keys, that each process has.
    lengths : dict
        q_lengths and kv_lengths on the host, of whole sequences, as far as there are.
    algorithm : str or None
        As the user gave it.
    """

    comm: Communicator
    arrays: dict
    problem: Problem
    options: dict
    q_start: int
    rows: tuple[tuple[Chunk, ...], ...]
    columns: tuple[tuple[Chunk, ...], ...]
    lengths: dict
    algorithm: str | None


def agree(function: Callable[..., Any], comm: Any, arguments: dict, given: dict, others: dict) -> Call:
    """The call, if all processes make the same one.

    Parameters
    ----------
    function : callable
        The public one that is called.
    comm : object
        The processes, as the user gave them.
    arguments : dict
        The arrays of this process; None where absent.
    given : dict
        Its options.
    others : dict
        Arguments that are no options of this package.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        The arguments of this process are wrong, or not those of the others.
    RuntimeError
        Another process cannot take part.
    """
    comm = communicator(comm)
    own, sizes = _together(comm, lambda: _described(function, comm, arguments, given, others))
    return _bound(comm, own.arrays, own.given, sizes)


def agree_on_parts(comm: Communicator, x: Any, layout: str, axis: int) -> tuple[Any, tuple[tuple[Chunk, ...], ...]]:
    """The part of this process as an array, and the chunks of each, if all have parts of the same whole."""

    def described():
        part = adopted("x", x)
        check_choice("layout", layout, layouts.LAYOUTS)
        return part, _Said("unshard", {"x": _without(part, axis), "layout": layout, "axis": axis}, part.shape[axis])

    part, sizes = _together(comm, described)
    return part, _chunks("x", layout, sizes, sum(sizes))


def communicator(comm: Any) -> Communicator:
    """What the user gave as `comm`: a `Communicator`, or the adapter for that of another library; by way of the host, if it has to be."""
    if hasattr(comm, "Isend") and hasattr(comm, "Get_rank"):
        comm = Mpi(comm)
    elif native(comm) is not None:
        comm = Nccl(comm)
    if not hasattr(comm, "exchange"):
        raise TypeError(
            "comm must be a communicator of mpi4py, of NCCL (CuPy's, cupyx.distributed's or nccl4py's), or a"
            f" numba_flash.distributed.Communicator; got {type(comm).__name__}"
        )
    return comm if comm.takes("cupy") else Staged(comm)


def adopted(name: str, x: Any) -> Any:
    """A plain array on the memory of `x`."""
    x = checks.adopt(name, x)
    checks.layout(name, x)
    return x


def check_choice(name: str, value: Any, known: tuple) -> None:
    """Raise unless an argument is one of some."""
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}")


def _together(comm: Communicator, describe: Callable[[], tuple[Any, "_Said"]]) -> tuple[Any, list]:
    """What `describe` returns beside a `_Said`, and the sizes that all say, if all else is the same; its error is told to the others."""
    try:
        own, mine = describe()
    except Exception as error:
        share(comm, _Failed(f"{type(error).__name__}: {error}"))
        raise
    every = share(comm, mine)
    for number, said in enumerate(every):
        if isinstance(said, _Failed):
            raise RuntimeError(f"process {number} cannot take part: {said.why}")
    for number, said in enumerate(every):
        for name, here, there in said.differences(every[0]):
            raise ValueError(f"{name} must be the same in all processes; got {there} in process 0 and {here} in process {number}")
    return own, [said.sizes for said in every]


class _Failed(NamedTuple):
    """Why a process cannot take part."""

    why: str


class _Own(NamedTuple):
    """The arrays of this process, and its options with the precision that it computes in."""

    arrays: dict
    given: dict


class _Said(NamedTuple):
    """What a process says about its call: its function, what must be the same, and the sizes of its parts."""

    function: str
    same: dict
    sizes: Any

    def differences(self, other: "_Said"):
        """Names of what is not the same, with its values here and there."""
        if self.function != other.function:
            yield "the function", self.function, other.function
        for name in self.same | other.same:
            if self.same.get(name) != other.same.get(name):
                yield name, self.same.get(name), other.same.get(name)


def _described(function: Callable[..., Any], comm: Communicator, arguments: dict, given: dict, others: dict) -> tuple[_Own, _Said]:
    """What this process computes with, and what it says of that."""
    named = {name: None if x is None else adopted(name, x) for name, x in arguments.items()}
    for name in others:
        if name in REFUSED:
            raise NotImplementedError(f"numba_flash.distributed does not take {name}: {REFUSED[name]}")
    if others:
        signatures.refuse(function, others)
    checks.flag("return_lse", given.get("return_lse", False))
    check_of_gradients(given.get("dlse"), True)
    given = checks.plain_numbers(given)
    check_choice("layout", given["layout"], layouts.LAYOUTS)
    check_choice("algorithm", given["algorithm"], (*ALGORITHMS, None))
    problem = _problem(named, given, {}, {name: x for name, x in _lengths(given).items() if x is not None})
    given = given | {"precision": problem.precision}
    if not comm.takes(arrays.library(named["q"])):
        raise NotImplementedError(f"comm carries no {arrays.library(named['q'])} arrays")
    same = {name: value for name, value in given.items() if "lengths" not in name}
    same |= {name: None if x is None else x.tolist() for name, x in _lengths(given).items()}
    same |= {name: _without(x, -1 if name in LOG_SUMS else -2) for name, x in named.items() if x is not None}
    return _Own(named, given), _Said(function.__name__, same, (named["q"].shape[-2], named["k"].shape[-2]))


def _without(x: Any, axis: int) -> str:
    """Dtype and shape of an array, without the size of the axis along which processes have parts."""
    shape = [str(n) for n in x.shape]
    shape[axis] = "N"
    return f"{x.dtype.name} ({', '.join(shape)})"


def _bound(comm: Communicator, named: dict, given: dict, sizes: list[tuple[int, int]]) -> Call:
    """The call on whole sequences, of which processes have parts of these sizes."""
    of_q, of_k = zip(*sizes, strict=True)
    whole = {"q": sum(of_q), "k": sum(of_k)}
    lengths = {name: x for name, x in _lengths(given).items() if x is not None}
    problem = _problem(named, given, whole, lengths)
    start = _start(given["q_start"], problem, lengths)
    rows, columns = (_chunks(name, given["layout"], [*own], whole[name]) for name, own in (("q", of_q), ("k", of_k)))
    if problem.options.dropout:
        _check_starts(columns)
    return Call(
        comm,
        named,
        _problem(named, given | {"q_start": start}, whole, lengths),
        {"scale": problem.scale} | {name: given[name] for name in ("causal", "window", "softcap", "dropout", "precision", "backend")},
        start,
        rows,
        columns,
        lengths,
        given["algorithm"],
    )


def _problem(named: dict, given: dict, whole: dict, lengths: dict) -> Problem:
    """What is asked of arrays with the numbers of queries and keys in `whole`, or of those of this process alone."""

    def on_paper(name, x):
        if x is None or not whole:
            return x
        n = whole["k" if name in COLUMNS else "q"]
        shape = (*x.shape[:-1], n) if name in LOG_SUMS else (*x.shape[:-2], n, x.shape[-1])
        return np.broadcast_to(np.empty((), x.dtype), shape)

    paper = {name: on_paper(name, x) for name, x in named.items()}
    options = {name: given[name] for name in ("scale", "causal", "window", "q_start", "softcap", "dropout", "rng", "precision")}
    problem = (bind_backward if "do" in paper else bind)(**paper, **options, **lengths)
    if whole:
        check_lengths(problem, lengths.get("q_lengths"), lengths.get("kv_lengths"))
    return problem


def _chunks(name: str, layout: str, sizes: list[int], whole: int) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of processes that have so many rows of an array."""
    if layout == "contiguous":
        return layouts.contiguous(sizes)
    chunks = layouts.even(whole, len(sizes), layout)
    expected = [*map(layouts.count, chunks)]
    if sizes != expected:
        raise ValueError(f"{name}: the sizes of the parts of a zigzag must be {expected}, as shard makes them; got {sizes}")
    return chunks


def _check_starts(columns: tuple[tuple[Chunk, ...], ...]) -> None:
    """Raise if a chunk of keys begins within the eight that share a counter of dropout's generator."""
    starts = sorted(chunk.start for chunks in columns for chunk in chunks)
    if any(start % SHARING for start in starts):
        raise ValueError(f"dropout needs parts of k that begin at multiples of {SHARING}; they begin at {starts}")


def _lengths(given: dict) -> dict:
    """Lengths on the host, as far as there are."""
    return {name: None if given[name] is None else _on_host(checks.adopt(name, given[name])) for name in ("q_lengths", "kv_lengths")}


def _on_host(x: Any) -> np.ndarray:
    """A NumPy array; one of a GPU has to be waited for."""
    return x.get() if arrays.library(x) == "cupy" else np.asarray(x)


def _start(q_start: int | None, problem: Problem, lengths: dict) -> int:
    """The position of query 0 among the keys."""
    if q_start is not None:
        return q_start
    ends = lengths.get("kv_lengths", problem.nk) - lengths.get("q_lengths", problem.nq)
    starts = np.unique(ends)
    if starts.size > 1 and problem.band != "none":
        raise NotImplementedError(
            "numba_flash.distributed aligns all sequences alike: kv_lengths - q_lengths must be the same for all, or q_start given;"
            f" got {starts.tolist()}"
        )
    return int(starts[0]) if starts.size else 0
