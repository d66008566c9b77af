"""The gradient of a bias from the host, as far as all kernels that sum it in tiles have it: what is
summed, into how many shares, and the kernel that adds these.
"""

import math
from typing import NamedTuple

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.work import grid

SUM_THREADS = 128
MOST_SHARES, SHARE_COST = 32, 4  # of a walk; in steps of it


def sum_shares(shares: Layout, whole: Layout, dtype: str, gpu) -> Launch:
    """What adds `shares` of an array, along their first axis."""
    return Launch(
        "passes.sum_shares.build",
        (dtype, whole.dtype.name, SUM_THREADS),
        gpu,
        grid=-(-math.prod(shares.shape[1:]) // SUM_THREADS),
        threads=SUM_THREADS,
        operands=((shares, 6), (whole, 5)),
    )


class Summed(NamedTuple):
    """What is handed from kernel to kernel."""

    shares: Layout


def scratch(shares: Layout) -> Scratch:
    """Where shares come from."""
    return Scratch(Summed(shares), ("dbias's shares",))


class Shares:
    """What a kernel sums, and where to.

    Parameters
    ----------
    problem, gpu
        What it is prepared for.
    dbias : Layout
        The gradient.
    tile
        Of its kernel, with `block_m` and `block_n`.
    turns : int
        Blocks at work at the same time.

    Attributes
    ----------
    summed : tuple of five bools
        As `grid.summed_axes` says.
    items : int
        Tiles of the gradient, times shares of each walk.
    out : Layout
        What the kernel writes: the gradient, or shares of it.
    launches : tuple of Launch
        What adds the shares, if there are several.
    """

    def __init__(self, problem, gpu, dbias, tile, turns: int):
        this = grid.Broadcast.of(problem, dbias, tile.block_m, tile.block_n)
        shares = this.shares(turns, MOST_SHARES, SHARE_COST)
        of_gradient = (1,) * (5 - dbias.ndim) + dbias.shape
        of_shares = Layout.compact(
            (shares, *of_gradient), "float64" if problem.dtype == "float64" else "float32"
        )
        self.summed, self.items = this.summed, this.tiles * shares
        self.out, self.launches = dbias, ()
        if shares > 1:
            self.out, self._scratch = of_shares, scratch(of_shares)
            self._sum_shares = sum_shares(of_shares, dbias, problem.dtype, gpu)
            self.launches = (self._sum_shares,)

    def run(self, dbias, sum_to) -> None:
        """``sum_to(out)`` the gradient, or shares of it, which are added then."""
        if not self.launches:
            sum_to(dbias)
            return
        (out,) = self._scratch.beside(dbias)
        sum_to(out)
        self._sum_shares(out, dbias)
