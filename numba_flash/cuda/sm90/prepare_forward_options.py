"""The forward pass of the `sm90` tier with bias, mask, dropout or a function of the score, from the
host: tiles, kernels and grids.
"""

import numpy as np

from numba_flash.cuda import grid, launch, prepare_parts, tensor_maps
from numba_flash.cuda.arguments import parameters_of, vectors_of
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_tile_lists import Extras, Tiles, choose
from numba_flash.cuda.sm90.arguments import LOG2E, scales
from numba_flash.cuda.sm90.prepare_forward import sizes_of
from numba_flash.cuda.sm90.tiles import OUTPUT_ROWS, Row, Tile
from numba_flash.problem import Prepared

KEYS_OF_RUN = 2  # neighbours among a lane's scores
ANY = 2**31
# By how many words a lane keeps of bias and mask for four of its scores. Chosen by registers.
TILES = {
    0: (
        Row(ANY, 64, 64, Tile(128, 128, 2, 4, 1, True)),
        Row(ANY, 128, 128, Tile(128, 128, 2, 2, 2, True)),
        Row(ANY, 256, 256, Tile(128, 64, 1, 2, 2, False)),
    ),
    1: (
        Row(ANY, 64, 64, Tile(128, 128, 2, 4, 1, True)),
        Row(ANY, 128, 128, Tile(128, 96, 2, 2, 2, True)),
        Row(ANY, 256, 256, Tile(128, 48, 1, 2, 2, False)),
    ),
    2: (
        Row(ANY, 64, 64, Tile(128, 96, 2, 4, 1, True)),
        Row(ANY, 128, 128, Tile(128, 64, 2, 3, 2, True)),
        Row(ANY, 256, 256, Tile(128, 32, 1, 3, 2, False)),
    ),
    3: (
        Row(ANY, 64, 64, Tile(128, 64, 2, 4, 1, True)),
        Row(ANY, 128, 128, Tile(128, 48, 2, 3, 2, True)),
        Row(ANY, 256, 256, Tile(128, 32, 1, 3, 2, False)),
    ),
}


def words_held(options) -> int:
    """Words that a lane keeps of bias and mask for four of its scores."""
    bias = {None: 0, "float32": 2}.get(options.bias, 1)
    return bias + int(options.mask)


def options_tile(problem) -> Tile:
    """Tile of the forward kernel."""
    return choose(problem, _tile).tile


def _tile(p) -> Tile:
    rows = TILES[words_held(p.options)]
    return next(row.tile for row in rows if p.nk <= row.keys and p.d <= row.d and p.dv <= row.dv)


def prepare(problem, inputs, results, gpu=None) -> Prepared:
    """``run(inputs, results, rng)`` on arrays like these layouts; `rng` is left out if there is no
    dropout.
    """
    gpu, (p, tile) = gpu or launch.gpu(inputs.q.device), choose(problem, _tile)
    if tensor_maps.why_not("o", results.o) is not None:  # only an array of the user's is like that
        return tensor_maps.through_compact(
            lambda results: prepare(problem, inputs, results, gpu), results
        )
    extras = Extras(p, gpu, inputs, Tiles(tile.block_m, tile.block_n, queue=p.options.listed))
    parts = grid.parts(p, tile.block_m, tile.block_n, gpu.multiprocessors)
    partial = prepare_parts.layouts(p, parts) if parts > 1 else results
    forward, numbers = _forward(p, inputs, extras, partial, gpu, tile, parts)
    combine = prepare_parts.combine(partial, results, gpu, parts) if parts > 1 else None
    scratch = prepare_parts.scratch(partial)

    def run(inputs, results, rng=None):
        into = scratch.beside(inputs.q) if combine else results
        mapped = (inputs.q, inputs.k, inputs.v, into.o)[: len(forward.maps)]
        given = None if rng is None else numbers(rng)
        forward(*mapped, *into, extras=extras.of(inputs), numbers=given)
        if combine:
            combine(*into, *results)

    return Prepared(run, (*extras.launches, forward, *((combine,) if combine else ())))


def _forward(p, inputs, extras: Extras, results, gpu, tile: Tile, parts: int):
    """The attention kernel, on results of the problem, or on float32 parts of them; and its numbers
    as a function of the generator's state.
    """
    q, k, v, o = grid.heads_first(p, inputs.q, inputs.k, inputs.v, results.o)
    in_float32 = o.dtype.name == "float32"
    store = "parts" if in_float32 else "words" if p.options.packed else "map"
    maps = ((q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (o, OUTPUT_ROWS))
    sizes, vectors = sizes_of(p, gpu, tile, parts), vectors_of(p, inputs, KEYS_OF_RUN)
    scale_log2 = np.float32(LOG2E if p.options.changes else p.scale * LOG2E)
    numbers = lambda rng=None: (sizes, scale_log2, parameters_of(p, rng))
    builder, how_read = "sm90.forward_options.build", (vectors,)
    if p.options.only_lists:
        builder, how_read = "sm90.forward.build", ()
        numbers = lambda: (sizes, scales(p))
    write_lse, structure = results.lse is not None, p.options.structure
    forward = Launch(
        builder,
        (p.dtype, p.d, p.dv, write_lse, p.band, store, *how_read, structure, tile),
        gpu,
        grid=min(sizes.items, gpu.multiprocessors),
        threads=tile.threads,
        shared_bytes=tile.layout(p.d, p.dv).bytes,
        operands=((o if in_float32 else o.words(), 5), (results.lse, 4)),
        extras=extras.layouts,
        numbers=numbers(),
        maps=maps if store == "map" else maps[:3],
    )
    return forward, numbers
