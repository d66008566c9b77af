"""Float32 arrays in planes of float16 for tensor cores, from the host: see
`numba_flash.cuda.passes.write_planes`. Numba is not imported here.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.cuda.arguments import Centred, Words, build_extras, chunked, planes_of
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.work import grid

THREADS, ROWS = 256, 128  # of a block, and the rows that it writes
# Multiplications of a forward pass of float32 below which the launches of the pre-pass take longer
# than tensor cores save. The limit lies between 2^26, where loops in IEEE arithmetic are about
# twice as fast or more, and 2^30, where tensor cores are. Measured: docs/lab/any_gpu.md, `LEAST`.
LEAST = 2**29
# How products and sums are computed on tensor cores, by the planes of float32.
ALGORITHMS = (
    "tensor cores, sums in float32",
    "float32 as scaled float16: one product on tensor cores, sums in float32",
    "float32 as the sum of two float16: three products on tensor cores, sums in float32",
)
MOST_CHUNKS, CHUNK_ROWS = 32, 256  # pieces of a head that are looked at at the same time


class Split(NamedTuple):
    """What the kernels get in the place of a call's arrays; of a `PlanesWriter`, layouts.

    Attributes
    ----------
    q, k, v, do : uint32 (b0, b1, heads, n, words)
        Planes; do None in a forward pass.
    factors, shifts, centres, flags
        As in `numba_flash.cuda.passes.write_planes`.
    extremes : int32 (heads of arrays, chunks, 2)
        What one kernel finds for the other.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    factors: Any
    shifts: Any
    centres: Any
    flags: Any
    extremes: Any

    @property
    def extras(self) -> tuple:
        """What the main kernel gets besides the planes."""
        return (self.factors, self.shifts, self.centres)


def why_not(problem, demanded: bool, backend: str) -> str | None:
    """Reason why a tier does not serve a problem of float32, or None."""
    p = problem
    if p.precision == "ieee":
        return "computes no IEEE products (precision='ieee')"
    blocks = parts_of(p, True) * -(-max(p.nq, p.nk) // ROWS)
    if blocks > grid.MOST_BLOCKS:
        return (
            f"splits at most {grid.MOST_BLOCKS} blocks of {ROWS} rows of float32; of all arrays, as"
            f" many of each head as the longest has, these are {blocks}"
        )
    if not demanded and math.prod(p.batch) * p.hq * p.nq * p.nk * (p.d + p.dv) < LEAST:
        return (
            "serves so few products of float32 on demand only"
            f" (backend='{backend}'): others are faster"
        )
    return None


def parts_of(p, of_do: bool) -> int:
    """Heads of all arrays, one after the other; of do, too, in a backward pass."""
    batch = 1 if p.options.packed else math.prod(p.batch)
    return batch * (p.hq * (2 if of_do else 1) + 2 * p.hk)


class PlanesWriter:
    """Two launches: one reads all numbers, the other writes their planes.

    Parameters
    ----------
    problem, gpu
        What it is prepared for.
    inputs : ForwardInputs or BackwardInputs
        Layouts.
    columns : tuple of two ints
        Of tiles of k and of v.

    Attributes
    ----------
    made : Split
        Layouts.
    launches : tuple of Launch
        In their order.
    """

    def __init__(self, problem, gpu, inputs, columns: tuple[int, int]):
        p, centred = problem, Centred.of(problem.options)
        self._p, self._extras_of = p, build_extras(p.options)
        x = self._given(inputs)
        words, of_do = Words(*(d // 2 for d in columns)), x[3] is not None
        planes = planes_of(p)
        batch = (1, 1) if p.options.packed else p.batch
        queries, keys = (*batch, p.hq, p.nq), (*batch, p.hk, p.nk)
        parts = parts_of(p, of_do)
        longest = max(p.nq, p.nk)
        chunks = max(1, min(MOST_CHUNKS, longest // CHUNK_ROWS))
        self.made = Split(
            q=Layout.compact((*queries, planes * words.k), "uint32"),
            k=Layout.compact((*keys, planes * words.k), "uint32"),
            v=Layout.compact((*keys, planes * words.v), "uint32"),
            do=Layout.compact((*queries, planes * words.v), "uint32") if of_do else None,
            factors=Layout.compact((*keys[:3], 4), "float32"),
            shifts=Layout.compact(queries, "float32"),
            centres=Layout.compact((2, *keys[:3], max(p.d, p.dv)), "float32"),
            flags=Layout.compact(queries[:3], "int32"),
            extremes=Layout.compact((parts, chunks, 2), "int32"),
        )
        self._scratch = Scratch(self.made, [f"float16 planes: {name}" for name in Split._fields])
        made, given = self.made, tuple((each, 5) for each in x)
        wide = chunked(*(each for each in x if each is not None))
        extras = grid.extras_layouts(p, inputs)
        statistics = Launch(
            "passes.write_planes.build_statistics",
            (p.options.arrays, p.d, p.dv, centred, wide),
            gpu,
            grid=parts * chunks,
            threads=THREADS,
            operands=(*given, (made.extremes, 3), (made.centres, 5)),
            extras=extras,
        )
        split = Launch(
            "passes.write_planes.build",
            (p.options.arrays, p.d, p.dv, words, planes, centred, wide),
            gpu,
            grid=parts * -(-longest // ROWS),
            threads=THREADS,
            operands=(
                *(*given, (made.extremes, 3), (made.centres, 5)),
                *((made.q, 5), (made.k, 5), (made.v, 5), (made.do, 5)),
                *((made.factors, 4), (made.shifts, 4), (made.flags, 3)),
            ),
            extras=extras,
            numbers=(np.float32(p.scale),),
        )
        self.launches = (statistics, split)

    def of(self, inputs) -> Split:
        """The arrays of a call; what is in them is made."""
        x, extras, y = self._given(inputs), self._extras_of(inputs), self._scratch.beside(inputs.q)
        statistics, split = self.launches
        statistics(*x, y.extremes, y.centres, extras=extras)
        split(*x, y.extremes, y.centres, *y[:4], y.factors, y.shifts, y.flags, extras=extras)
        return y

    def _given(self, inputs) -> tuple:
        """q, k, v, and do or None."""
        do = getattr(inputs, "do", None)
        return grid.heads_first(self._p, inputs.q, inputs.k, inputs.v, do)
