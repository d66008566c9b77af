"""Which blocks of the arrays of a call belong together."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import dask.array as da
import numpy as np
from dask.array.core import slices_from_chunks
from dask.array.utils import meta_from_array

from numba_flash.arguments import arrays
from numba_flash.arguments.problem import Problem
from numba_flash.dask.arguments import check_dropout
from numba_flash.dask.tasks import moved
from numba_flash.mask import kv_range


class Pair(NamedTuple):
    """A block of queries and one of keys: their number along each leading axis, and along queries and keys."""

    leading: tuple[int, ...]
    row: int
    column: int

    @property
    def at(self) -> tuple[int, ...]:
        return (*self.leading, self.row, self.column)


class Grid:
    """The arrays of a call in chunks that fit each other.

    Parameters
    ----------
    problem : Problem
        What is computed on the whole.
    rows, columns, scores : dict
        Arrays with an axis of queries, of keys, and of both; scores may be None.
    given : dict
        Options of every block.
    """

    def __init__(self, problem: Problem, rows: dict, columns: dict, scores: dict, given: dict):
        self._problem, self._given = problem, given
        ndim, group = rows["q"].ndim, problem.hq // max(1, problem.hk)
        every = [*rows.values(), *columns.values()]
        leading = [_common(*[x.chunks[axis] for x in every]) for axis in range(ndim - 3)]
        heads = [_common(*[x.chunks[-3] for x in columns.values()], _groups(rows["q"].chunks[-3], group))] if ndim > 2 else []
        self._query_heads = [tuple(group * n for n in chunks) for chunks in heads]
        self._rows = _common(*[x.chunks[ndim - 2] for x in rows.values()])
        self._columns = _common(*[x.chunks[-2] for x in columns.values()])
        if problem.options.dropout:
            check_dropout([*leading, *self._query_heads], self._columns)
        of_rows = (*leading, *self._query_heads, self._rows)
        of_columns = (*leading, *heads, self._columns)
        self.arrays = {name: x.rechunk((*of_rows, *[(n,) for n in x.shape[ndim - 1 :]])) for name, x in rows.items()}
        self.arrays |= {name: x.rechunk((*of_columns, x.shape[-1:])) for name, x in columns.items()}
        self._kinds = dict.fromkeys(rows, "rows") | dict.fromkeys(columns, "columns")
        self._shown = None
        for name, x in scores.items():
            if x is not None:
                self._add_scores(name, x, (*of_rows, self._columns))
        self.names = tuple(self.arrays)

    def _add_scores(self, name: str, x, chunks: tuple) -> None:
        """A bias or a mask, in blocks where it is not broadcast."""
        own = tuple((1,) if n == 1 else c for n, c in zip(x.shape, chunks[len(chunks) - x.ndim :], strict=True))
        if name == "mask" and isinstance(x, np.ndarray):
            self._shown = np.array([x[block].any() for block in slices_from_chunks(own)], bool).reshape([len(c) for c in own])
        self.arrays[name] = x.rechunk(own) if isinstance(x, da.Array) else _beside(self.arrays["q"], da.from_array(x, own))
        self._kinds[name] = "scores"

    def blocks(self, name: str) -> Iterator[tuple[int, ...]]:
        """Places of an array's blocks; those of all but scores without the last axis."""
        x = self.arrays[name]
        axes = x.numblocks if self._kinds[name] == "scores" else x.numblocks[:-1]
        return product(*map(range, axes))

    def place(self, name: str, pair: Pair) -> tuple[int, ...]:
        """That of an array which belongs to a pair."""
        if self._kinds[name] == "rows":
            return (*pair.leading, pair.row)
        if self._kinds[name] == "columns":
            return (*pair.leading, pair.column)
        blocks = self.arrays[name].numblocks
        return tuple(0 if n == 1 else at for n, at in zip(blocks, pair.at[len(pair.at) - len(blocks) :], strict=True))

    def key(self, name: str, at: tuple[int, ...]) -> tuple:
        """Of a block, in the array's graph."""
        x = self.arrays[name]
        return (x.name, *at, *[0] * (x.ndim - len(at)))

    def keys(self, pair: Pair) -> list[tuple]:
        """Those of the blocks of all arrays that belong to a pair."""
        return [self.key(name, self.place(name, pair)) for name in self.names]

    def pairs(self, at: tuple[int, ...]) -> Iterator[Pair]:
        """A block of queries with each block of keys of which it sees something, as far as is known before anything is computed."""
        *leading, row = at
        p, first = self._problem, sum(self._rows[:row])
        start, stop = kv_range.py_func(first, first + self._rows[row], p.nk, p.low, p.high)
        end = 0
        for column, size in enumerate(self._columns):
            begin, end = end, end + size
            pair = Pair((*leading,), row, column)
            if max(start, begin) < min(stop, end) and (self._shown is None or self._shown[self.place("mask", pair)]):
                yield pair

    def options(self, pair: Pair) -> dict:
        """Of a call on the blocks of a pair."""
        p, q_start = self._problem, self._given["q_start"]
        row, column = sum(self._rows[: pair.row]), sum(self._columns[: pair.column])
        start = p.nk - p.nq if q_start is None else q_start
        options = self._given | {"scale": p.scale, "q_start": start + row - column}
        if p.options.dropout:
            seed, offset, query, key = p.options.generator
            options["rng"] = seed, offset, query + row, key + column
        return options


def _beside(q: da.Array, x: da.Array) -> da.Array:
    """Blocks in host memory, or copies where those of q are."""
    if arrays.library(q._meta) != "cupy":
        return x
    return x.map_blocks(moved, dtype=x.dtype, meta=meta_from_array(q, x.ndim, x.dtype))


def _common(*chunks: tuple[int, ...]) -> tuple[int, ...]:
    """The largest chunks whose boundaries are those of all."""
    boundaries = sorted(set().union(*(np.cumsum(c).tolist() for c in chunks)))
    return tuple(np.diff([0, *boundaries]).tolist())


def _groups(chunks: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Chunks of key heads: boundaries of chunks of query heads between two groups."""
    boundaries = [n // group for n in np.cumsum(chunks).tolist() if n % group == 0] if group else [0]
    return tuple(np.diff([0, *boundaries]).tolist())
