"""The forward pass of the `sm80` tier with a bias that batch elements share, kept in shared memory,
from the host: tiles, and the launch.
"""

from dataclasses import dataclass

from numba_flash.cuda import grid, launch
from numba_flash.cuda.arguments import build_extras, chunked, vectors_of
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_kept import scales_of, shared_alone, sizes_of
from numba_flash.cuda.sm80.arguments import Shape
from numba_flash.cuda.sm80.tiles import ROWS, WARP, hardware, padded, pitch
from numba_flash.problem import Prepared

KEYS_OF_RUN = 2  # neighbours among a lane's scores
MOST = 32  # columns of q, k and v, for registers and shared memory
KEYS, WARPS = 64, 8  # of a tile; of a block


@dataclass(frozen=True)
class KeptTile:
    """Shape of a block's work.

    Attributes
    ----------
    warps : int
        Of a block; each has 16 rows.
    block_n, tiles : int
        Keys of a tile, and tiles of all keys, two or more: Q is read during the first, and may be
        overwritten from the next on.
    wide : bool
        The bias is kept as float32, else as it is, in 16 bits.
    """

    warps: int
    block_n: int
    tiles: int
    wide: bool

    @property
    def block_m(self) -> int:
        return ROWS * self.warps

    @property
    def threads(self) -> int:
        return WARP * self.warps

    @property
    def kept_bytes(self) -> int:
        """Of the bias, which comes first in shared memory."""
        return self.block_m * self.block_n * self.tiles * (4 if self.wide else 2)

    def shared_bytes(self, d: int, dv: int) -> int:
        """And of Q, and two tiles of K and V."""
        rows = self.block_m * pitch(padded(d))
        return self.kept_bytes + rows + 2 * self.block_n * (pitch(padded(d)) + pitch(padded(dv)))


def kept_tile(problem, gpu) -> KeptTile | None:
    """That for a problem with such a bias, if it can be kept: as float32, or in 16 bits."""
    p, limit = problem, hardware(gpu.capability).shared_limit
    tiles = max(2, -(-p.nk // KEYS))
    kinds = (True,) if p.options.bias == "float32" else (True, False)
    wanted = (KeptTile(WARPS, KEYS, tiles, wide) for wide in kinds)
    return next((tile for tile in wanted if tile.shared_bytes(p.d, p.dv) <= limit), None)


def serves(problem, inputs, results, gpu) -> bool:
    """True if there is a bias that can be kept, and nothing else, and rows are whole chunks."""
    p = problem
    if max(p.d, p.dv) > MOST or p.dv % 8 or hardware(gpu.capability).turing:
        return False
    rows = inputs.q, inputs.k, inputs.v, results.o
    alone = shared_alone(p, inputs, results) and chunked(*rows)
    return alone and kept_tile(p, gpu) is not None


def prepare(problem, inputs, results, gpu=None) -> Prepared:
    """``run(inputs, results)`` on arrays like these layouts."""
    p, gpu = problem, gpu or launch.gpu(inputs.q.device)
    tile, extras_of = kept_tile(p, gpu), build_extras(p.options)
    sizes, vectors = sizes_of(p, tile.block_m), vectors_of(p, inputs, KEYS_OF_RUN)
    shape = Shape(p.d, p.dv, turing=False, asynchronous=True, wide=True, vectors=vectors)
    q, k, v = inputs.q, inputs.k, inputs.v
    forward = Launch(
        "sm80.forward_kept.build",
        (p.dtype, shape, results.lse is not None, p.options.structure, tile),
        gpu,
        grid=min(sizes.units, gpu.multiprocessors),
        threads=tile.threads,
        shared_bytes=tile.shared_bytes(p.d, p.dv),
        operands=((q, 5), (k, 5), (v, 5), (results.o, 5), (results.lse, 4)),
        extras=grid.extras_layouts(p, inputs),
        numbers=(sizes, scales_of(p)),
    )

    def run(inputs, results):
        forward(inputs.q, inputs.k, inputs.v, *results, extras=extras_of(inputs))

    return Prepared(run, (forward,))
