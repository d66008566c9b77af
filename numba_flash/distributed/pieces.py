"""Which parts of the matrix of scores are computed in one call."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from numba_flash.distributed.agreement import Call
from numba_flash.distributed.layouts import Chunk, count
from numba_flash.mask import all_visible, kv_range


class Piece(NamedTuple):
    """Neighbouring chunks of queries and of keys that are computed together.

    Attributes
    ----------
    rows, columns : tuples of Chunk
        Several only where all queries see all keys, and it does not matter which they are.
    clear : bool
        All queries see all keys.
    """

    rows: tuple[Chunk, ...]
    columns: tuple[Chunk, ...]
    clear: bool

    @property
    def of_rows(self) -> slice:
        return _places(self.rows)

    @property
    def of_columns(self) -> slice:
        return _places(self.columns)

    def options(self, call: Call) -> dict:
        """Of the call on this piece."""
        options = call.options | {"q_start": call.q_start + self.rows[0].start - self.columns[0].start}
        if self.clear:
            options |= {"causal": False, "window": None, "q_start": None}
        if call.problem.options.dropout:
            seed, offset, query, key = call.problem.options.generator
            options["rng"] = seed, offset, query + self.rows[0].start, key + self.columns[0].start
        for name, chunks in (("q_lengths", self.rows), ("kv_lengths", self.columns)):
            if name in call.lengths:
                options[name] = sum(np.clip(call.lengths[name] - x.start, 0, x.size) for x in chunks)
        return options


def pieces(call: Call, columns: tuple[Chunk, ...]) -> Iterator[Piece]:
    """What the queries of this process see of keys with these chunks."""
    clear: dict[tuple[Chunk, ...], list[Chunk]] = {}
    for row in filter(_any, call.rows[call.comm.rank]):
        run: tuple[Chunk, ...] = ()
        for column in filter(_any, columns):
            every = all_visible.py_func(row.start, row.stop, column.start, column.stop, call.problem.low, call.problem.high)
            if every and not call.problem.options.dropout:  # whose bits depend on the places of chunks
                run = (*run, column)  # neighbours: no process has more than two
            elif sees(call, row, column):
                yield Piece((row,), (column,), every)
        if run:
            clear.setdefault(run, []).append(row)
    for run, rows in clear.items():
        yield Piece((*rows,), run, True)


def sees(call: Call, row: Chunk, column: Chunk) -> bool:
    """True if a query of a chunk sees a key of another."""
    p = call.problem
    start, stop = kv_range.py_func(row.start, row.stop, p.nk, p.low, p.high)
    return max(start, column.start) < min(stop, column.stop)


def steps(call: Call) -> int:
    """Of how many processes one has to meet K and V: its own, and those of so many before it less one."""
    size = call.comm.size
    for distance in range(size - 1, 0, -1):
        for rank in range(size):
            if any(sees(call, *pair) for pair in _pairs(call.rows[rank], call.columns[(rank - distance) % size])):
                return distance + 1
    return 1


def _pairs(rows, columns) -> Iterator[tuple[Chunk, Chunk]]:
    return ((row, column) for row in filter(_any, rows) for column in filter(_any, columns))


def _any(chunk: Chunk) -> bool:
    return chunk.size > 0


def _places(chunks: tuple[Chunk, ...]) -> slice:
    """Where neighbouring chunks lie in the memory of their process."""
    return slice(chunks[0].at, chunks[0].at + count(chunks))
