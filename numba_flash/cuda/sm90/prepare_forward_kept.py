"""The forward pass of the `sm90` tier with a bias that batch elements share, kept in shared memory,
from the host.
"""

from numba_flash.cuda import grid
from numba_flash.cuda.arguments import build_extras, vectors_of
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_kept import scales_of, shared_alone, sizes_of
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.sm90.kept_tiles import MOST, kept_tile
from numba_flash.cuda.sm90.prepare_forward import config_of
from numba_flash.cuda.swizzle import NARROW
from numba_flash.problem import Prepared

KEYS_OF_RUN = 2  # neighbours among a lane's scores


def serves(problem, inputs, results=None) -> bool:
    """True if there is a bias that can be kept, and nothing else."""
    alone = max(problem.d, problem.dv) <= MOST and shared_alone(problem, inputs, results)
    return alone and kept_tile(problem) is not None


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` on arrays like the call's layouts."""
    forward, extras_of = _forward(chosen), build_extras(chosen.p.options)

    def run(inputs, results):
        forward(inputs.q, inputs.k, inputs.v, *results, extras=extras_of(inputs))

    return Prepared(run, (forward,))


def _forward(chosen: Chosen) -> Launch:
    """The kernel."""
    p, tile, (_, inputs, results, gpu, _) = chosen.p, chosen.tile, chosen.call
    sizes, vectors = sizes_of(p, tile.block_m), vectors_of(p, inputs, KEYS_OF_RUN)
    box = lambda x, rows: (x, rows, NARROW)
    stage = chosen.recipe.stage
    return Launch(
        chosen.builder,
        (config_of(p, results.lse is not None, "words", tile, vectors, stage),),
        gpu,
        grid=min(sizes.units, gpu.multiprocessors),
        threads=tile.threads,
        shared_bytes=tile.layout().bytes,
        operands=((results.o.words(), 5), (results.lse, 4)),
        extras=grid.extras_layouts(p, inputs),
        numbers=(sizes, scales_of(p)),
        maps=(
            box(inputs.q, tile.block_m), box(inputs.k, tile.block_n), box(inputs.v, tile.block_n),
        ),
    )  # fmt: skip
