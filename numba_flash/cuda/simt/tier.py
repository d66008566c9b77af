"""The `simt` tier from the host: tiles, and which kernels run with which grid. Numba is not
imported here, so cached kernels start fast.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.arguments.options import PLAIN
from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.arguments import FLAGS, build_extras, extras_class, parameters_of
from numba_flash.cuda.passes import prepare_dbias
from numba_flash.cuda.runtime import launch
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.simt import prepare_decode
from numba_flash.cuda.simt.items import Items
from numba_flash.cuda.simt.tile import Tile
from numba_flash.cuda.work import grid

LOG2E = math.log2(math.e)
DELTA_LANES, DELTA_ROWS = 16, 8
DBIAS_BLOCKS, SUM_THREADS = 512, 128

# Per kernel and accumulator: (largest head dimension, tile); the first that fits serves. A thread
# with more rows and columns of scores reads fewer numbers for each product, but needs more
# registers: the widest accumulators spill up to 1 KB per thread, and yet the next smaller tile,
# which does not, was slower in every case measured. A smaller block of threads is up to a sixth
# slower at D = 128. Measured: docs/lab/any_gpu.md, `TILES`.
TILES = {
    ("forward", "float32"): (
        (64, Tile(8, 8, 8, 8, 8, 16, 1)),
        (128, Tile(8, 4, 8, 16, 16, 16, 2)),
        (256, Tile(8, 4, 8, 16, 16, 8, 1)),
    ),
    ("forward", "float64"): (
        (64, Tile(4, 8, 8, 8, 16, 8, 1)),
        (128, Tile(4, 4, 8, 16, 16, 8, 2)),
        (256, Tile(4, 4, 8, 16, 16, 4, 1)),
    ),
    ("dkdv", "float32"): (
        (128, Tile(8, 4, 8, 16, 16, 16, 1)),
        (256, Tile(4, 4, 8, 16, 16, 8, 1)),
    ),
    ("dkdv", "float64"): (
        (128, Tile(4, 4, 8, 16, 16, 8, 1)),
        (256, Tile(2, 4, 8, 16, 16, 4, 1)),
    ),
    ("dq", "float32"): (
        (64, Tile(8, 4, 8, 16, 16, 16, 3)),
        (128, Tile(8, 4, 8, 16, 16, 16, 1)),
        (256, Tile(8, 4, 8, 16, 8, 8, 1)),
    ),
    ("dq", "float64"): (
        (128, Tile(4, 4, 8, 16, 16, 8, 1)),
        (256, Tile(4, 4, 8, 16, 16, 4, 1)),
    ),
}
# Likewise, where tensor cores multiply float64, and how many terms of a sum they take at once: on
# other GPUs they are as slow as everything else in float64, or slower. Forward, they make float64
# 1.7 times as fast as the table above; backward kernels were not timed. Measured:
# docs/lab/any_gpu.md, `PRODUCT_TILES`.
PRODUCTS = {(8, 0): 4, (9, 0): 8, (10, 0): 8}
PRODUCT_TILES = {
    "forward": (
        (64, Tile(2, 8, 32, 4, 16, 16, 2)),
        (128, Tile(2, 8, 32, 4, 16, 8, 2)),
    ),
    "dkdv": ((64, Tile(2, 8, 32, 4, 16, 8, 2)),),
    "dq": ((64, Tile(2, 8, 32, 4, 16, 16, 2)), (128, Tile(2, 8, 32, 4, 16, 8, 2))),
}
SIMULATOR_TILE = Tile(2, 2, 2, 2, 4, 2, 1)


def tile_for(kernel: str, dtype: str, head_dim: int, capability=(7, 0)) -> Tile:
    """Tile of one kernel (``"forward"``, ``"dkdv"`` or ``"dq"``) for the wider of the two head
    dimensions, on a GPU of that compute capability.
    """
    if launch.simulated():
        return SIMULATOR_TILE
    if dtype == "float64" and capability in PRODUCTS:
        for limit, tile in PRODUCT_TILES[kernel]:
            if head_dim <= limit:
                return replace(tile, product=PRODUCTS[capability])
    if kernel == "forward" and dtype == "bfloat16" and head_dim > 128:
        # LLVM does not unroll the wider tile's rounding store: accumulators would be local memory
        return Tile(4, 4, 8, 16, 16, 8, 2)
    accumulator = "float64" if dtype == "float64" else "float32"
    return next(tile for limit, tile in TILES[kernel, accumulator] if head_dim <= limit)


def why_not(kind: str, problem, inputs, demanded: bool, gpu=None, dbias=False) -> str | None:
    """Reason why these kernels cannot run on such arrays, or None; they know every dtype and
    option.
    """
    if launch.simulated() and not demanded:
        return "the CUDA simulator runs only on demand (backend='simt')"
    reason = launch.why_not(inputs.q) if gpu is None else None
    return reason or (None if problem is None else grid.too_many_blocks(problem))


def algorithm(problem) -> str:
    """How products and sums are computed: 16-bit floats become float32, exactly, before that."""
    if problem.dtype in ("float32", "float64"):
        return "IEEE products and sums"
    return "products and sums in float32"


def takes_numpy() -> bool:
    """True if kernels read NumPy arrays in place: in the simulator."""
    return launch.simulated()


def prepare_forward(problem, inputs, results, gpu=None, fallback=None) -> Prepared:
    """``run(inputs, results, rng, fallback)`` on arrays like these layouts; `rng` is left out if
    there is no dropout, and `fallback` if all heads are to be computed
    (`numba_flash.arguments.problem.Prepared`).
    """
    p, gpu = problem, gpu or launch.gpu(inputs.q.device)
    if fallback is None and prepare_decode.serves(p):
        return prepare_decode.prepare(p, inputs, results, gpu)
    tile = tile_for("forward", p.dtype, max(p.d, p.dv), gpu.capability)
    scale_log2 = 1.0 if p.options.modifies else p.scale * LOG2E
    numbers = lambda rng=None: (scale_log2, p.low, p.high, parameters_of(p, rng))
    q, k, v, o = grid.heads_first(p, inputs.q, inputs.k, inputs.v, results.o)
    forward = Launch(
        "simt.forward.build",
        (
            *(p.dtype, o.dtype.name, p.d, p.dv, results.lse is not None),
            *(p.options.structure, tile, *(() if fallback is None else (True,))),
        ),
        gpu,
        grid=grid.items(p, p.nq, p.hq, tile.block_m),
        threads=tile.threads,
        operands=((q, 5), (k, 5), (v, 5), (o, 5), (results.lse, 4)),
        extras=grid.extras_layouts(p, inputs) + (() if fallback is None else ((fallback, 3),)),
        numbers=numbers(),
    )

    extras_of, with_flags = build_extras(p.options), extras_class(p.options, more=FLAGS)

    def run(inputs, results, rng=None, fallback=None):
        q, k, v, o = grid.heads_first(p, inputs.q, inputs.k, inputs.v, results.o)
        extras = extras_of(inputs)
        if fallback is not None:
            extras = with_flags(*extras, fallback)
        forward(
            q, k, v, o, results.lse, extras=extras, numbers=None if rng is None else numbers(rng)
        )

    return Prepared(run, (forward,))


def prepare_backward(
    problem, inputs, results, deterministic=True, gpu=None, fallback=None
) -> Prepared:
    """``run(inputs, results, rng, fallback)`` likewise, always `deterministic`; what heads that are
    `fallback` make of the gradient of a bias is added to that of the others, which is there.
    """
    p, gpu = problem, gpu or launch.gpu(inputs.q.device)
    x = grid.inputs_heads_first(p, inputs)
    delta = Layout.compact(inputs.lse.shape, inputs.lse.dtype)
    dq, dk, dv = grid.heads_first(p, results.dq, results.dk, results.dv)
    config, extras = (p.dtype, p.d, p.dv, p.options.structure), grid.extras_layouts(p, inputs)
    flagged, of_delta, blocks = (True,), ((fallback, 3),), 1
    if fallback is None:
        flagged, of_delta, blocks = (), (), -(-inputs.lse.shape[-1] // DELTA_ROWS)
    with_flags = extras + of_delta
    preprocess = Launch(
        "passes.delta.build",
        (p.dtype, p.dv, inputs.dlse is not None, DELTA_LANES, DELTA_ROWS, *flagged),
        gpu,
        grid=blocks * math.prod(inputs.lse.shape[:-1]),
        threads=DELTA_LANES * DELTA_ROWS,
        operands=((x.do, 5), (x.o, 5), (x.dlse, 4), (delta, 4)),
        extras=of_delta,
    )
    tensors, rows = ((x.do, 5), (x.q, 5), (x.k, 5), (x.v, 5)), ((x.lse, 4), (delta, 4))
    tile = tile_for("dkdv", p.dtype, max(p.d, p.dv), gpu.capability)
    items = Items.of(grid.items(p, p.nk, p.hk, tile.block_m), gpu, fallback)
    numbers_dkdv = lambda rng=None: (p.scale, -p.high, -p.low, parameters_of(p, rng), *items.number)
    dkdv_launch = Launch(
        "simt.backward.build_dkdv",
        (*config, tile, *flagged),
        gpu,
        grid=items.grid,
        threads=tile.threads,
        operands=(*tensors, (dk, 5), (dv, 5), *rows),
        extras=with_flags,
        numbers=numbers_dkdv(),
    )
    tile = tile_for("dq", p.dtype, max(p.d, p.dv), gpu.capability)
    of_dq = Items.of(grid.items(p, p.nq, p.hq, tile.block_m), gpu, fallback)
    numbers_dbias = lambda rng=None: (p.scale, p.low, p.high, parameters_of(p, rng))
    numbers_dq = lambda rng=None: (*numbers_dbias(rng), *of_dq.number)
    dq_launch = Launch(
        "simt.backward.build_dq",
        (*config, tile, *flagged),
        gpu,
        grid=of_dq.grid,
        threads=tile.threads,
        operands=(*tensors, (dq, 5), *rows),
        extras=with_flags,
        numbers=numbers_dq(),
    )
    of_dbias = (p, gpu, tensors, rows, with_flags, numbers_dbias, results.dbias, flagged)
    dbias = None if results.dbias is None else _Dbias(*of_dbias)

    extras_of, class_with_flags = build_extras(p.options), extras_class(p.options, more=FLAGS)
    flags_alone = extras_class(PLAIN, more=FLAGS)
    scratch = Scratch(RowStats(delta), RowStats._fields)

    def run(inputs, results, rng=None, fallback=None):
        x, extras = grid.inputs_heads_first(p, inputs), extras_of(inputs)
        own = extras if fallback is None else class_with_flags(*extras, fallback)
        dq, dk, dv = grid.heads_first(p, results.dq, results.dk, results.dv)
        (delta,) = scratch.beside(x.q)
        preprocess(
            x.do, x.o, x.dlse, delta, extras=() if fallback is None else flags_alone(fallback)
        )
        others = {} if rng is None else {"numbers": numbers_dkdv(rng)}
        dkdv_launch(x.do, x.q, x.k, x.v, dk, dv, x.lse, delta, extras=own, **others)
        others = {} if rng is None else {"numbers": numbers_dq(rng)}
        dq_launch(x.do, x.q, x.k, x.v, dq, x.lse, delta, extras=own, **others)
        if dbias is not None:
            others = {} if rng is None else {"numbers": numbers_dbias(rng)}
            dbias.run(x, delta, results.dbias, own, others)

    return Prepared(
        run, (preprocess, dkdv_launch, dq_launch, *(dbias.launches if dbias is not None else ()))
    )


class RowStats(NamedTuple):
    """What is prepared of each row of a backward pass."""

    delta: Layout


class _Dbias:
    """Gradient of the bias: one launch, or two where the walk over what the bias broadcasts is
    split into shares. If only heads that are `flagged` are summed, there are none.
    """

    def __init__(self, problem, gpu, tensors, rows, extras, numbers, dbias, flagged):
        p = problem
        tile = tile_for("dq", p.dtype, max(p.d, p.dv), gpu.capability)
        this = grid.Broadcast.of(p, dbias, tile.block_m, tile.block_n)
        shares = max(1, min(this.walk, DBIAS_BLOCKS // max(this.tiles, 1)))
        shares = 1 if flagged else shares
        shape = (1,) * (5 - dbias.ndim) + dbias.shape
        self._shares = Layout.compact(
            (shares, *shape), "float64" if p.dtype == "float64" else "float32"
        )
        out = dbias if shares == 1 else self._shares
        self._sum = Launch(
            "simt.dbias.build",
            (p.dtype, p.d, p.dv, p.options.structure, out.dtype.name, this.summed, tile, *flagged),
            gpu,
            grid=this.tiles * shares,
            threads=tile.threads,
            operands=(*tensors, *rows, (out, 6)),
            extras=extras,
            numbers=numbers(),
        )
        self.launches = (self._sum,)
        if shares > 1:
            self._scratch = prepare_dbias.scratch(self._shares)
            self._sum_shares = Launch(
                "passes.sum_shares.build",
                (p.dtype, dbias.dtype.name, SUM_THREADS),
                gpu,
                grid=-(-math.prod(shape) // SUM_THREADS),
                threads=SUM_THREADS,
                operands=((self._shares, 6), (dbias, 5)),
            )
            self.launches = (self._sum, self._sum_shares)

    def run(self, x, delta, dbias, extras, others):
        """Launch them; `others` are the numbers of this call, if it brings any."""
        split, out = len(self.launches) > 1, dbias
        if split:
            (out,) = self._scratch.beside(dbias)
        self._sum(x.do, x.q, x.k, x.v, x.lse, delta, out, extras=extras, **others)
        if split:
            self._sum_shares(out, dbias)
