"""The `simt` tier from the host: tiles, and which kernels run with which grid. Numba is not imported here, so cached kernels start fast."""

import math
from dataclasses import dataclass

import numpy as np

from numba_flash import arrays
from numba_flash.cuda import launch
from numba_flash.options import PLAIN, dropout_threshold

LOG2E = math.log2(math.e)
DELTA_LANES, DELTA_ROWS = 16, 8
DBIAS_BLOCKS, SUM_THREADS = 512, 128


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


def why_not(kind: str, problem, inputs: dict, demanded: bool) -> str | None:
    """Reason why these kernels cannot run on such arrays, or None; they know every dtype and option."""
    if launch.simulated() and not demanded:
        return "the CUDA simulator runs only on demand (backend='simt')"
    return launch.why_not(inputs["q"])


def tiles_of(problem) -> tuple:
    """Rows and columns of the score tiles of each kernel; the rows of dkdv are keys."""
    tiles = ((kernel, tile_for(kernel, problem.dtype, max(problem.d, problem.dv))) for kernel in ("forward", "dkdv", "dq"))
    return tuple((kernel, (tile.block_m, tile.block_n)) for kernel, tile in tiles)


def takes_numpy() -> bool:
    """True if kernels read NumPy arrays in place: in the simulator."""
    return launch.simulated()


def _extras(problem, optional: tuple) -> tuple:
    """Layouts of those of (bias, mask, q_lengths, kv_lengths) that there are, as `numba_flash.cuda.scores` expects them."""
    p = problem
    scores = (*p.batch, p.hq, p.nq, p.nk)
    lengths = 1 if p.options.packed else p.batch
    return tuple((x, view) for x, view in zip(optional, (scores, scores, lengths, lengths), strict=True) if x is not None)


def _parameters(problem, rng=None) -> tuple:
    """Numbers for the options, in the order of `numba_flash.cuda.scores.build_score`; none if they need none."""
    o = problem.with_state(rng).options
    if not o.modifies:
        return ()
    return problem.scale, o.softcap, 1 / (1 - o.dropout), *map(np.uint64, (o.seed, o.offset, dropout_threshold(o.dropout)))


def _row_blocks(problem, transposed: bool, block: int) -> int:
    """Blocks of threads along the queries (or keys) of all batch elements, of one head."""
    p = problem
    rows = p.nk if transposed else p.nq
    if p.options.packed:
        return rows // block + p.batch[1] if p.batch[1] else 0
    return -(-rows // block) * math.prod(p.batch)


def _heads_first(problem, *operands) -> tuple:
    """Packed arrays (total, heads, d) as (heads, total, d)."""
    if not problem.options.packed:
        return operands
    return tuple(x if x is None else x.swapaxes(0, 1) for x in operands)


def prepare_forward(problem, inputs, results):
    """Prepared launch ``run((q, k, v, bias, mask, q_lengths, kv_lengths), (o, lse), rng)`` for arrays of these layouts.

    Absent ones are None; `rng` is left out if there is no dropout.
    """
    p, (o, lse) = problem, results
    tile = tile_for("forward", p.dtype, max(p.d, p.dv))
    q, k, v, o = _heads_first(p, *inputs[:3], o)
    forward = launch.Launch(
        "forward_simt.build",
        (p.dtype, p.d, p.dv, lse is not None, p.options.structure, tile),
        grid=_row_blocks(p, False, tile.block_m) * p.hq,
        block=tile.threads,
        operands=((q, 5), (k, 5), (v, 5), (o, 5), (lse, 4)),
        scalars=(1.0 if p.options.modifies else p.scale * LOG2E, p.low, p.high),
        extras=_extras(p, inputs[3:]),
        parameters=_parameters(p),
    )
    if p.options == PLAIN:
        return lambda inputs, results: forward(*inputs[:3], *results)

    def run(inputs, results, rng=None):
        q, k, v, o = _heads_first(p, *inputs[:3], results[0])
        forward(q, k, v, o, results[1], *(x for x in inputs[3:] if x is not None), parameters=() if rng is None else _parameters(p, rng))

    return run


def prepare_backward(problem, inputs, results, deterministic=True):
    """Prepared launches ``run((do, q, k, v, o, lse, dlse, bias, mask, q_lengths, kv_lengths), (dq, dk, dv, dbias), rng)`` likewise.

    Always `deterministic`.
    """
    p, (*gradients, dbias) = problem, results
    *tensors, lse, dlse = inputs[:7]
    do, q, k, v, o, dq, dk, dv = _heads_first(p, *tensors, *gradients)
    delta_layout = arrays.empty("delta", lse, lse.shape)
    common = {"extras": _extras(p, inputs[7:]), "parameters": _parameters(p)}
    delta_launch = launch.Launch(
        "backward_simt.build_delta",
        (p.dtype, p.dv, dlse is not None, DELTA_LANES, DELTA_ROWS),
        grid=-(-lse.shape[-1] // DELTA_ROWS) * math.prod(lse.shape[:-1]),
        block=DELTA_LANES * DELTA_ROWS,
        operands=((do, 5), (o, 5), (delta_layout, 4)),
        extras=() if dlse is None else ((dlse, 4),),
    )
    config = (p.dtype, p.d, p.dv, p.options.structure)
    tile = tile_for("dkdv", p.dtype, max(p.d, p.dv))
    dkdv_launch = launch.Launch(
        "backward_simt.build_dkdv",
        (*config, tile),
        grid=_row_blocks(p, True, tile.block_m) * p.hk,
        block=tile.threads,
        operands=((do, 5), (q, 5), (k, 5), (v, 5), (dk, 5), (dv, 5), (lse, 4), (delta_layout, 4)),
        scalars=(p.scale, -p.high, -p.low),
        **common,
    )
    tile = tile_for("dq", p.dtype, max(p.d, p.dv))
    dq_launch = launch.Launch(
        "backward_simt.build_dq",
        (*config, tile),
        grid=_row_blocks(p, False, tile.block_m) * p.hq,
        block=tile.threads,
        operands=((do, 5), (q, 5), (k, 5), (v, 5), (dq, 5), (lse, 4), (delta_layout, 4)),
        scalars=(p.scale, p.low, p.high),
        **common,
    )
    dbias_run = None if dbias is None else _prepare_dbias(p, (do, q, k, v, lse, delta_layout), dbias, common)

    def run(inputs, results, rng=None):
        *gradients, dbias = results
        parameters = () if rng is None else _parameters(p, rng)
        *tensors, lse, dlse = inputs[:7]
        do, q, k, v, o, dq, dk, dv = _heads_first(p, *tensors, *gradients)
        extras = [x for x in inputs[7:] if x is not None]
        delta = arrays.empty("delta", lse, lse.shape)
        delta_launch(do, o, delta, *(() if dlse is None else (dlse,)))
        dkdv_launch(do, q, k, v, dk, dv, lse, delta, *extras, parameters=parameters)
        dq_launch(do, q, k, v, dq, lse, delta, *extras, parameters=parameters)
        if dbias_run is not None:
            dbias_run((do, q, k, v, lse, delta), dbias, extras, parameters)

    return run


def _prepare_dbias(problem, inputs: tuple, dbias, common: dict):
    """``run(inputs, dbias, extras, parameters)``: one launch, or two where the walk over what the bias broadcasts is split into shares."""
    p, tile = problem, tile_for("dq", problem.dtype, max(problem.d, problem.dv))
    shape = (1,) * (5 - dbias.ndim) + tuple(dbias.shape)
    summed = tuple(n == 1 for n in shape)
    sizes = (*p.batch, p.hq, -(-p.nq // tile.block_m), -(-p.nk // tile.block_n))
    blocks = math.prod(1 if gone else n for n, gone in zip(sizes, summed, strict=True))
    walk = math.prod(n if gone else 1 for n, gone in zip(sizes, summed, strict=True))
    shares = max(1, min(walk, DBIAS_BLOCKS // max(blocks, 1)))
    accumulator = "float64" if p.dtype == "float64" else "float32"
    allocate = lambda like: arrays.empty("dbias's shares", like, (shares, *shape), accumulator)
    out = dbias if shares == 1 else allocate(dbias)
    do, q, k, v, lse, delta = inputs
    dbias_launch = launch.Launch(
        "dbias_simt.build_dbias",
        (p.dtype, p.d, p.dv, p.options.structure, out.dtype.name, summed, tile),
        grid=blocks * shares,
        block=tile.threads,
        operands=((do, 5), (q, 5), (k, 5), (v, 5), (lse, 4), (delta, 4), (out, 6)),
        scalars=(p.scale, p.low, p.high),
        **common,
    )
    if shares == 1:
        return lambda inputs, dbias, extras, parameters: dbias_launch(*inputs, dbias, *extras, parameters=parameters)
    sum_launch = launch.Launch(
        "dbias_simt.build_sum",
        (p.dtype, dbias.dtype.name, SUM_THREADS),
        grid=-(-dbias.size // SUM_THREADS),
        block=SUM_THREADS,
        operands=((out, 6), (dbias, 5)),
    )

    def run(inputs, dbias, extras, parameters):
        out = allocate(dbias)
        dbias_launch(*inputs, out, *extras, parameters=parameters)
        sum_launch(out, dbias)

    return run
