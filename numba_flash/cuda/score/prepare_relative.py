"""A function of the score that only adds a number for each head and distance, from the host: see
`numba_flash.cuda.score.relative`. Numba is not imported here.
"""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.cuda.arguments import build_extras, extras_class
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.work import grid

THREADS = 256
LEAST = 64  # queries and keys: with fewer, a number serves few scores
# Of a number in units of raw products: far from where sums of them would be Inf.
GREATEST = 2.0**60
# Scores of a problem from which on one launch more pays. The launch writes what the function adds
# for each distance, and sums of scores begin with that. With fewer scores the launch takes longer
# than the inlined function would; with many, what a table or ALiBi costs falls to a third or less.
# Measured: docs/lab/any_gpu.md, `FEWEST`.
FEWEST = 2**26


class Made(NamedTuple):
    """float32 (heads, distances)."""

    relative: Any


def alone(problem):
    """The problem as kernels see it that find in an array what its `score_mod` adds, if that is all
    that it does, and nothing else changes scores or weights; else None.
    """
    p, options = problem, problem.options
    without = replace(options, score_mod=None)
    relative = options.score_mod and options.score_mod.relative
    if not relative or without.modifies or options.tiled or options.paged:
        return None
    if p.dtype not in ("float16", "bfloat16"):
        return None
    if math.prod(p.batch) * p.hq * p.nq * p.nk < FEWEST or p.nq < LEAST or p.nk < LEAST:
        return None
    if not relative.greatest(p.nq + p.nk) <= GREATEST * p.scale:  # or NaN
        return None
    return replace(p, options=replace(without, relative=options.score_mod))


class Relative:
    """The optional arrays of kernels that get such numbers, in the place of
    `numba_flash.cuda.work.prepare_tile_lists.Extras`.

    Parameters
    ----------
    problem
        As `alone` makes it.
    gpu, inputs
        What it is prepared for, as layouts.
    block_m, block_n : int
        Of the tiles of scores.

    Attributes
    ----------
    layouts : tuple
        As `numba_flash.cuda.runtime.launch.Launch` wants them.
    launches : tuple of Launch
        What computes the numbers.
    """

    def __init__(self, problem, gpu, inputs, block_m: int, block_n: int):
        p = problem
        most = max(-(-p.nq // block_m) * block_m, -(-p.nk // block_n) * block_n)
        made = Made(Layout.compact((p.hq, 2 * most), "float32"))
        self._scratch, self._class = (
            Scratch(made, ("what score_mod adds",)),
            extras_class(p.options),
        )
        self._extras_of = build_extras(replace(p.options, relative=False))
        self.layouts = (*grid.extras_layouts(p, inputs), (made.relative, 2))
        compute = Launch(
            "score.relative.build",
            (p.options.relative, THREADS),
            gpu,
            grid=p.hq * -(-2 * most // THREADS),
            threads=THREADS,
            operands=((made.relative, 2),),
            numbers=(np.float32(1 / p.scale),),
        )
        self.launches = (compute,)

    def of(self, inputs):
        """The arrays of a call; the numbers are computed."""
        made = self._scratch.beside(inputs.q)
        self.launches[0](made.relative)
        return self._class(*self._extras_of(inputs), made.relative)
