"""Problems with lengths as one problem per sequence, on views of the arrays: what lies beyond the lengths is never read."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from numba_flash.arguments.problem import Problem


@dataclass(frozen=True)
class Piece:
    """One sequence, or everything where there are no lengths.

    Attributes
    ----------
    problem : Problem
        Of this piece alone.
    number : int
        Batch elements before it.
    batch : tuple of two slices
        Where it lies along the leading axes.
    q, k : slice
        Its queries and keys.
    padded : bool
        True if the rest of its batch element is padding.
    """

    problem: Problem
    number: int
    batch: tuple[slice, slice]
    q: slice
    k: slice
    padded: bool

    def queries(self, x: np.ndarray) -> np.ndarray:
        """Its part of an array (b0, b1, heads, nq, ...)."""
        return x[(*self.batch, slice(None), self.q)]

    def keys(self, x: np.ndarray) -> np.ndarray:
        """Its part of an array (b0, b1, heads, nk, ...)."""
        return x[(*self.batch, slice(None), self.k)]

    def scores(self, x: np.ndarray) -> np.ndarray:
        """Its part of an array (b0, b1, hq, nq, nk)."""
        return x[(*self.batch, slice(None), self.q, self.k)]

    def bias(self, x: np.ndarray) -> np.ndarray:
        """Its part of an array that broadcasts to (b0, b1, hq, nq, nk)."""
        where = (*self.batch, slice(None), self.q, self.k)
        return x[tuple(slice(None) if n == 1 else part for n, part in zip(x.shape, where, strict=True))]

    def clear_queries(self, x: np.ndarray, value: float) -> None:
        """Fill the padding after its queries."""
        if self.padded:
            x[(*self.batch, slice(None), slice(self.q.stop, None))] = value

    def clear_keys(self, x: np.ndarray, value: float) -> None:
        """Fill the padding after its keys."""
        if self.padded:
            x[(*self.batch, slice(None), slice(self.k.stop, None))] = value


def pieces(problem: Problem, q_lengths, kv_lengths) -> Iterator[Piece]:
    """The sequences of a problem, in their order."""
    if not problem.options.sequences:
        whole = slice(None)
        yield Piece(problem, 0, (whole, whole), whole, whole, False)
    elif problem.options.packed:
        for number in range(problem.batch[1]):
            q, k = (slice(int(x[number]), int(x[number + 1])) for x in (q_lengths, kv_lengths))
            yield _piece(problem, number, (slice(None), slice(None)), q, k)
    else:
        lengths = [
            np.broadcast_to(n if x is None else x.reshape((1,) * (2 - x.ndim) + x.shape), problem.batch)
            for n, x in ((problem.nq, q_lengths), (problem.nk, kv_lengths))
        ]
        for number, (b0, b1) in enumerate(np.ndindex(problem.batch)):
            q, k = (slice(0, int(n[b0, b1])) for n in lengths)
            yield _piece(problem, number, (slice(b0, b0 + 1), slice(b1, b1 + 1)), q, k)


def _piece(problem: Problem, number: int, batch: tuple[slice, slice], q: slice, k: slice) -> Piece:
    nq, nk = q.stop - q.start, k.stop - k.start
    shift = (nk - problem.nk) - (nq - problem.nq) if problem.options.follows else 0
    alone = replace(problem, batch=(1, 1), nq=nq, nk=nk, low=problem.low + shift, high=problem.high + shift)
    return Piece(alone, number, batch, q, k, not problem.options.packed)
