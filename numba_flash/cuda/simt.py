"""The `simt` tier from the host: tiles, and which kernels run with which grid. Numba is not imported here, so cached kernels start fast."""

import math
from dataclasses import dataclass

from numba_flash import arrays
from numba_flash.cuda import launch

LOG2E = math.log2(math.e)
DELTA_LANES, DELTA_ROWS = 16, 8


@dataclass(frozen=True)
class Tile:
    """Shape of a register micro-tile, and of the block that shares it (see `numba_flash.cuda.tiles`).

    Attributes
    ----------
    rows, cols : int
        Scores per thread.
    threads_m, threads_n : int
        Threads along rows and columns of the block's tile.
    depth, depth_outer : int
        Length of the staged chunks along the head dimension, and along the second product's sum.
    min_blocks : int
        Blocks per multiprocessor that the register allocation must allow.
    """

    rows: int
    cols: int
    threads_m: int
    threads_n: int
    depth: int
    depth_outer: int
    min_blocks: int

    @property
    def block_m(self) -> int:
        return self.rows * self.threads_m

    @property
    def block_n(self) -> int:
        return self.cols * self.threads_n

    @property
    def threads(self) -> int:
        return self.threads_m * self.threads_n

    def head_cols(self, head_dim: int) -> int:
        """Columns per thread of a (rows, head_dim) accumulator; beyond two, padded to whole groups of four for vector loads."""
        cols = -(-head_dim // self.threads_n)
        return cols if cols <= 2 else -(-cols // 4) * 4


# Per kernel and accumulator: (largest head dimension, tile); the first that fits serves. After each row: TFLOP/s on an H200 with N = 8192
# at that head dimension, and the runner-up; backward kernels count the products they make (4 in dkdv, 3 in dq). The widest accumulators
# spill up to 1 KB per thread: the next smaller tile, which does not, was slower in every case measured.
TILES = {
    ("forward", "float32"): (
        (64, Tile(8, 8, 8, 8, 8, 16, 1)),  # 26.4; Tile(8, 8, 8, 8, 8, 8, 1) 25.5
        (128, Tile(8, 4, 8, 16, 16, 16, 2)),  # 26.0; Tile(8, 4, 8, 16, 8, 16, 2) 23.7
        (256, Tile(8, 4, 8, 16, 16, 8, 1)),  # 23.0; Tile(4, 4, 8, 16, 16, 8, 2) 16.4
    ),
    ("forward", "float64"): (
        (64, Tile(4, 8, 8, 8, 16, 8, 1)),  # 12.4; Tile(4, 8, 8, 8, 8, 8, 1) 12.3
        (128, Tile(4, 4, 8, 16, 16, 8, 2)),  # 11.5; Tile(4, 4, 8, 16, 8, 8, 2) 9.7
        (256, Tile(4, 4, 8, 16, 16, 4, 1)),  # 9.2; Tile(2, 4, 8, 16, 16, 4, 1) 5.8
    ),
    ("dkdv", "float32"): (
        (128, Tile(8, 4, 8, 16, 16, 16, 1)),  # 22.5 (64: 21.8); Tile(8, 4, 8, 16, 8, 8, 1) 20.2 (64: 20.8)
        (256, Tile(4, 4, 8, 16, 16, 8, 1)),  # 17.0; Tile(2, 4, 8, 16, 16, 8, 1) 11.0
    ),
    ("dkdv", "float64"): (
        (128, Tile(4, 4, 8, 16, 16, 8, 1)),  # 10.7 (64: 10.1); Tile(3, 4, 8, 16, 16, 8, 1) 9.2
        (256, Tile(2, 4, 8, 16, 16, 4, 1)),  # 5.9; Tile(1, 4, 16, 16, 16, 4, 1) 4.0
    ),
    ("dq", "float32"): (
        (64, Tile(8, 4, 8, 16, 16, 16, 3)),  # 25.2; Tile(8, 8, 8, 8, 8, 8, 1) 24.9
        (128, Tile(8, 4, 8, 16, 16, 16, 1)),  # 24.3; Tile(8, 4, 8, 16, 8, 8, 1) 20.6
        (256, Tile(8, 4, 8, 16, 8, 8, 1)),  # 17.9; Tile(4, 4, 8, 16, 16, 8, 1) 16.7
    ),
    ("dq", "float64"): (
        (128, Tile(4, 4, 8, 16, 16, 8, 1)),  # 12.2 (64: 10.9); at 64, Tile(4, 8, 8, 8, 8, 8, 1) 9.0
        (256, Tile(4, 4, 8, 16, 16, 4, 1)),  # 10.7; Tile(2, 4, 8, 16, 16, 4, 1) 6.6
    ),
}
SIMULATOR_TILE = Tile(2, 2, 2, 2, 4, 2, 1)


def tile_for(kernel: str, dtype: str, head_dim: int) -> Tile:
    """Tile of one kernel (``"forward"``, ``"dkdv"`` or ``"dq"``) for the wider of the two head dimensions."""
    if launch.simulated():
        return SIMULATOR_TILE
    if kernel == "forward" and dtype == "bfloat16" and head_dim > 128:
        return Tile(4, 4, 8, 16, 16, 8, 2)  # LLVM does not unroll the wider tile's rounding store: its accumulators would be local memory
    accumulator = "float64" if dtype == "float64" else "float32"
    return next(tile for limit, tile in TILES[kernel, accumulator] if head_dim <= limit)


def why_not(problem, x, demanded: bool) -> str | None:
    """Reason why these kernels cannot run on arrays like `x`, or None; they know every dtype and option."""
    if launch.simulated() and not demanded:
        return "the CUDA simulator runs only on demand (backend='simt')"
    return launch.why_not(x)


def tiles_of(problem) -> tuple:
    """Rows and columns of the score tiles of each kernel; the rows of dkdv are keys."""
    tiles = ((kernel, tile_for(kernel, problem.dtype, max(problem.d, problem.dv))) for kernel in ("forward", "dkdv", "dq"))
    return tuple((kernel, (tile.block_m, tile.block_n)) for kernel, tile in tiles)


def takes_numpy() -> bool:
    """True if kernels read NumPy arrays in place: in the simulator."""
    return launch.simulated()


def _blocks(n: int, block: int, *others: int) -> int:
    return -(-n // block) * math.prod(others)


def prepare_forward(problem, q, k, v, o, lse):
    """Prepared launch ``run(q, k, v, o, lse)`` for arrays with these layouts; `lse` may be None."""
    p = problem
    tile = tile_for("forward", p.dtype, max(p.d, p.dv))
    return launch.Launch(
        "forward_simt.build",
        (p.dtype, p.d, p.dv, lse is not None, tile),
        grid=_blocks(p.nq, tile.block_m, p.hq, *p.batch),
        block=tile.threads,
        operands=((q, 5), (k, 5), (v, 5), (o, 5), (lse, 4)),
        scalars=(p.scale * LOG2E, p.low, p.high),
    )


def prepare_backward(problem, do, q, k, v, o, lse, dq, dk, dv):
    """Prepared launches ``run(do, q, k, v, o, lse, dq, dk, dv)`` for arrays with these layouts."""
    p = problem
    heads = max(p.d, p.dv)
    delta_layout = arrays.empty("delta", lse, lse.shape)
    delta_launch = launch.Launch(
        "backward_simt.build_delta",
        (p.dtype, p.dv, DELTA_LANES, DELTA_ROWS),
        grid=_blocks(p.nq, DELTA_ROWS, p.hq, *p.batch),
        block=DELTA_LANES * DELTA_ROWS,
        operands=((do, 5), (o, 5), (delta_layout, 4)),
        scalars=(),
    )
    tile = tile_for("dkdv", p.dtype, heads)
    dkdv_launch = launch.Launch(
        "backward_simt.build_dkdv",
        (p.dtype, p.d, p.dv, tile),
        grid=_blocks(p.nk, tile.block_m, p.hk, *p.batch),
        block=tile.threads,
        operands=((do, 5), (q, 5), (k, 5), (v, 5), (dk, 5), (dv, 5), (lse, 4), (delta_layout, 4)),
        scalars=(p.scale, -p.high, -p.low),
    )
    tile = tile_for("dq", p.dtype, heads)
    dq_launch = launch.Launch(
        "backward_simt.build_dq",
        (p.dtype, p.d, p.dv, tile),
        grid=_blocks(p.nq, tile.block_m, p.hq, *p.batch),
        block=tile.threads,
        operands=((do, 5), (q, 5), (k, 5), (v, 5), (dq, 5), (lse, 4), (delta_layout, 4)),
        scalars=(p.scale, p.low, p.high),
    )

    def run(do, q, k, v, o, lse, dq, dk, dv):
        delta = arrays.empty("delta", lse, lse.shape)
        delta_launch(do, o, delta)
        dkdv_launch(do, q, k, v, dk, dv, lse, delta)
        dq_launch(do, q, k, v, dq, lse, delta)

    return run
