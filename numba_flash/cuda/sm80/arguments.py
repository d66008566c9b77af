"""What the host hands to the kernels of this tier, by name."""

from typing import NamedTuple

from numba_flash.cuda.arguments import Vectors
from numba_flash.cuda.sm80.tiles import padded


class Shape(NamedTuple):
    """What a kernel is made for, beside dtype, options and tile.

    Attributes
    ----------
    head_dim, head_dim_v : int
        Columns of q and k, of v and o.
    turing : bool
        Products of 8 at a time, and no copies that go on.
    asynchronous : bool
        Rows of what is read lie at multiples of 16 bytes.
    wide : bool
        And those of what is written.
    planes : int
        Of float32, how many planes of float16 are read (`numba_flash.cuda.passes.write_planes`);
        else 0.
    fours : bool
        Four float32 can be added to memory at a time.
    vectors : Vectors
        Which of bias and mask are read by several elements at once.
    double : bool
        Numbers are float64.
    """

    head_dim: int
    head_dim_v: int
    turing: bool
    asynchronous: bool
    wide: bool
    planes: int = 0
    fours: bool = False
    vectors: Vectors = Vectors()
    double: bool = False

    @property
    def columns(self) -> tuple[int, int]:
        """Of 16 bits, of the rows of k and v as they are read."""
        if not self.planes:
            return self.head_dim, self.head_dim_v
        return self.planes * padded(self.head_dim), self.planes * padded(self.head_dim_v)


class Sizes(NamedTuple):
    """Of a problem, as the backward kernel numbers its work; see
    `numba_flash.cuda.work.schedule.build_item`.

    Attributes
    ----------
    low, high : int
        The band, of query - key.
    columns : int
        How many queries there are.
    group : int
        Query heads of a key head.
    section : int
        Heads whose blocks of keys are handed out together.
    b0 : int
        The first of the leading sizes.
    doublings : int
        Of the sums of dq, of which there are so many times two copies.
    """

    low: int
    high: int
    columns: int
    group: int
    section: int
    b0: int
    doublings: int


def finds_again(options, shape, tile) -> bool:
    """Whether threads of the backward pass compute for every tile anew what is theirs of it, since
    bias or mask take the registers in which they would keep that: it would go to memory, from which
    it comes back behind the copies of the next tile (ncu, H200, a bias, D = 64: a sixth of all
    samples waited for that).
    """
    return not shape.planes and bool(options.bias or (options.mask and tile.stages > 1))
