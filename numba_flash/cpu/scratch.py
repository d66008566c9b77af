"""What a pass on the CPU allocates for itself beside the tiles of its threads: defined once, to be allocated and to be foretold."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from numba_flash import ledger
from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.cpu.kernels import BACKWARD_BLOCK_M, BACKWARD_BLOCK_N

BACKWARD_ITEMS = 16  # the keys of one head are split until there are so many work items
DQ_PARTIAL_BYTES = 64 * 2**20  # cap on the shares of dq that wait for their sum


class Forward(NamedTuple):
    """What the forward pass writes and nobody wants."""

    lse: Any


class Backward(NamedTuple):
    """Of the backward pass; sums of dk and dv of one head where 16 bits would round what panels of queries add, else None."""

    shares: Any
    delta: Any
    dk: Any
    dv: Any


class Bias(NamedTuple):
    """The gradient of a bias, in five dimensions and the accumulation dtype."""

    dbias: Any


class Waves(NamedTuple):
    """How a backward pass is shared out. A wave of heads, or a panel of the queries of one, fits in the buffer of shares of dq.

    Attributes
    ----------
    chunks : int
        Shares of the keys of a key head: work items.
    panel : int
        Queries of a head at a time.
    heads : int
        Key heads at a time.
    row_bytes : int
        Of the shares of a row of dq, of all heads of a group.
    most_bytes : int
        Of the buffer, at most: also of a problem with fewer queries and keys.
    """

    chunks: int
    panel: int
    heads: int
    row_bytes: int
    most_bytes: int

    @classmethod
    def of(cls, p) -> "Waves":
        """Those of a problem that has queries and keys."""
        units = math.prod(p.batch) * p.hk
        chunks = min(-(-BACKWARD_ITEMS // units), -(-p.nk // BACKWARD_BLOCK_N))
        row_bytes = chunks * p.hq // p.hk * p.d * _itemsize(p)
        panel = min(p.nq, max(BACKWARD_BLOCK_M, DQ_PARTIAL_BYTES // row_bytes))
        heads = min(units, max(1, DQ_PARTIAL_BYTES // (row_bytes * p.nq)))
        most = min(units * p.nq * row_bytes, max(DQ_PARTIAL_BYTES, BACKWARD_BLOCK_M * row_bytes))
        return cls(chunks, panel, heads, row_bytes, most)

    def rounds(self, p) -> bool:
        """True if panels add to dk and dv, which are stored in 16 bits."""
        return self.panel < p.nq and p.dtype in ("float16", "bfloat16")


def of_forward(p) -> Scratch:
    """Where its arrays come from."""
    return Scratch(Forward(Layout.compact((*p.batch, p.hq, p.nq), p.lse_dtype)), Forward._fields)


def of_backward(p, waves: Waves) -> Scratch:
    """Likewise."""
    shares = waves.heads, waves.chunks, p.hq // p.hk, waves.panel, p.d
    sums = ((p.nk, p.d), (p.nk, p.dv)) if waves.rounds(p) else (None, None)
    shapes = shares, (*p.batch, p.hq, p.nq), *sums
    layouts = Backward(*(x and Layout.compact(x, p.lse_dtype) for x in shapes))
    return Scratch(layouts, ("shares of dq", "delta", "sum of dk", "sum of dv"))


def of_bias(p, dbias) -> Scratch:
    """Likewise, of an array or layout `dbias`."""
    return Scratch(Bias(Layout.compact((1,) * (5 - dbias.ndim) + tuple(dbias.shape), p.lse_dtype)), ("sum of dbias",))


def foretell(p, kind: str) -> None:
    """Note what a pass allocates: of sequences with lengths, which come one after the other, what the longest one can take."""
    alone = replace(p, batch=(1, 1)) if p.options.sequences else p
    if kind == "forward":
        of_forward(alone)
    elif 0 not in (*alone.batch, alone.hq, alone.nq, alone.nk):
        waves = Waves.of(alone)
        of_backward(alone, waves)
        if p.options.sequences:  # shorter ones may fill the buffer better
            ledger.note(waves.most_bytes - waves.heads * waves.panel * waves.row_bytes)


def _itemsize(p) -> int:
    """Of what sums are kept in."""
    return 8 if p.dtype == "float64" else 4
