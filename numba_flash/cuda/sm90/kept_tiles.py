"""Tiles of the forward kernel that keeps its part of a bias in shared memory. Numba is not imported
here.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

from numba_flash.cuda.sm90.rings import lay_out
from numba_flash.cuda.sm90.tiles import SHARED_LIMIT, Consumers
from numba_flash.cuda.swizzle import NARROW, NARROW_ROW_BYTES

STEP, MOST_STAGES = 16, 2  # keys of a product; stages that help
MOST = NARROW  # columns of a tile


class Kind(NamedTuple):
    """Rows of a block, most keys of a tile, for registers, and whether the bias is float32."""

    rows: int
    keys: int
    wide: bool


# The first whose bias fits, and that has not more rows than the next, serves. Triangle attention,
# bfloat16, B = 384, H = 4, N = 384, D = 32, on an H200: 150, 167, 169 us; 128 keys and float32 177;
# sm80, which reads the bias from memory, 200, FlexAttention 168. To keep it does not pay there: 235
# to 257. With -inf in the bias 191, FlexAttention 158 to 165. With S of the next tile and sums of O
# beside the softmax 183 to 225; with the bias by products of mma.sync and Q as the sum of two, in
# three quarters of the instructions, 161 to 171: these are not what it waits for.
KINDS = (Kind(192, 128, False), Kind(128, 192, True), Kind(128, 192, False))


@dataclass(frozen=True)
class KeptTile(Consumers):
    """Shape of a block's work.

    Attributes
    ----------
    block_m, block_n : int
        Rows and columns of the score tile; 64 rows per consumer, columns a multiple of 16.
    tiles : int
        Of all keys.
    stages : int
        Slots of the rings of K and of V.
    wide : bool
        The bias is kept as float32, else as it is, in 16 bits.
    """

    block_m: int
    block_n: int
    tiles: int
    stages: int
    wide: bool
    q_stages: ClassVar[int] = 1

    @property
    def kept_bytes(self) -> int:
        """Of the bias."""
        return self.block_m * self.block_n * self.tiles * (4 if self.wide else 2)

    def layout(self, head_dim: int = MOST, head_dim_v: int = MOST) -> SimpleNamespace:
        """Shared memory: rings ``q k v`` as `numba_flash.cuda.sm90.pipeline` wants them, after the
        bias, and the `bytes` of all.
        """
        rings = {
            "q": (self.block_m * NARROW_ROW_BYTES, self.q_stages),
            "k": (self.block_n * NARROW_ROW_BYTES, self.stages),
            "v": (self.block_n * NARROW_ROW_BYTES, self.stages),
        }
        return lay_out(rings, self.kept_bytes, kept=0)


def kept_tile(problem) -> KeptTile | None:
    """That for a problem with such a bias, if it can be kept. As float32 it takes two instructions
    fewer for each score than in 16 bits.
    """
    p = problem
    kinds = [kind for kind in KINDS if kind.wide or p.options.bias != "float32"]
    rows_of = lambda kind: kind.rows * -(-p.nq // kind.rows)
    fewest = min(map(rows_of, kinds))
    wanted = (
        _of_keys(kind, p.nk, stages)
        for kind in kinds
        if rows_of(kind) == fewest
        for stages in range(MOST_STAGES, 0, -1)
    )
    return next((tile for tile in wanted if tile.layout().bytes <= SHARED_LIMIT), None)


def _of_keys(kind: Kind, keys: int, stages: int) -> KeptTile:
    tiles = -(-keys // kind.keys)
    return KeptTile(kind.rows, -(-keys // (tiles * STEP)) * STEP, tiles, stages, kind.wide)
