"""Prepared launches on the machine: what a tier would launch on a GPU, executed on NumPy arrays."""

from functools import cache

import numpy as np
from asynchronous import TensorMap
from machine import Machine

from numba_flash import arrays
from numba_flash.arrays import Layout
from numba_flash.cuda import compile, launch


@cache
def ptx(builder: str, config: tuple, capability: tuple[int, int]) -> str:
    """The text of a kernel."""
    return compile.intermediate(builder, config, capability, ptx=True)


def as_words(x: np.ndarray) -> np.ndarray:
    """What 16-bit numbers are to kernels that see words, and to the copy engine."""
    return arrays.expand(x, 5).view(np.uint16)


class Executed:
    """In the place of a `Launch`'s call: the same arguments, executed by the machine.

    Parameters
    ----------
    prepared : Launch
        What was prepared on paper.
    seed : int
        Of the machine.
    """

    def __init__(self, prepared, seed: int = 0):
        self.prepared, self.seed = prepared, seed

    def __call__(self, *operands, extras=(), numbers=None) -> None:
        prepared = self.prepared
        machine = Machine(ptx(prepared.builder, prepared.config, prepared.gpu.capability), self.seed)
        mapped = len(prepared.maps)
        arguments = [TensorMap(self._as_described(x, layout), rows) for x, (layout, rows) in zip(operands, prepared.maps, strict=False)]
        views = (*prepared.operands, *prepared.extras)
        for x, (layout, view) in zip((*operands[mapped:], *extras), views, strict=True):
            described = launch._numba_array(layout, view)
            if x is not None:
                described[4] = machine.memory.place(prepared.builder, x)
            arguments += described
        arguments += launch._flat(prepared.numbers if numbers is None else numbers)
        if prepared.grid:
            machine.launch(arguments, prepared.grid, prepared.threads, prepared.shared_bytes)

    @staticmethod
    def _as_described(x: np.ndarray, layout: Layout) -> np.ndarray:
        """The array as five dimensions of 16-bit elements, as its tensor map has it."""
        shape = (1,) * (5 - len(layout.shape)) + layout.shape
        strides = arrays.expanded_strides(layout, 5)
        return np.lib.stride_tricks.as_strided(x.view(np.uint16), shape, strides)
