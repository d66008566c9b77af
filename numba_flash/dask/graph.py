"""The tasks of a call, as dask knows them."""

from collections.abc import Callable

import dask.array as da
from dask.array.utils import meta_from_array
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from numba_flash.dask.blocks import Grid

FAN_IN = 4  # results that one task puts together


class Graph:
    """Tasks of a call, under names that are the same for the same call.

    Parameters
    ----------
    name : str
        Of all together.
    grid : Grid
        Of its arrays.
    """

    def __init__(self, name: str, grid: Grid):
        self._token = tokenize(name, grid.arrays, grid._given)
        self._name, self._inputs, self._tasks = f"{name}-{self._token}", [*grid.arrays.values()], {}

    def add(self, name: str, at: tuple[int, ...], function: Callable, keys: list) -> tuple:
        """Key of a task that hands the values of keys to a function."""
        key = (f"{name}-{self._token}", *at)
        self._tasks[key] = (function, *keys)
        return key

    def tree(self, name: str, at: tuple[int, ...], function: Callable, keys: list) -> tuple | None:
        """Key of what a function of a list makes of all keys, FAN_IN neighbours at a time; None if there are none."""
        level = 0
        while len(keys) > 1:
            groups = [keys[i : i + FAN_IN] for i in range(0, len(keys), FAN_IN)]
            keys = [self.add(name, (*at, level, n), function, [group]) for n, group in enumerate(groups)]
            level += 1
        return keys[0] if keys else None

    def array(self, name: str, tasks: dict, chunks: tuple, like: da.Array, dtype) -> da.Array:
        """The array of what these tasks make, blocks by place, in the library of another."""
        name = f"{name}-{self._token}"
        graph = HighLevelGraph.from_collections(self._name, self._tasks, dependencies=self._inputs)
        layers = {**graph.layers, name: {(name, *at): task for at, task in tasks.items()}}
        graph = HighLevelGraph(layers, {**graph.dependencies, name: {self._name}})
        return da.Array(graph, name, chunks, meta=meta_from_array(like, len(chunks), dtype))
