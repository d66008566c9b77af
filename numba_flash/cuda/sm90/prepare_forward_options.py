"""The forward pass of the `sm90` tier with bias, mask, dropout or a function of the score, from the
host: kernels and grids.
"""

from typing import Any, NamedTuple

import numpy as np

from numba_flash.cuda import grid, prepare_parts
from numba_flash.cuda.arguments import parameters_of, vectors_of
from numba_flash.cuda.config import OPTIONS, RELATIVE
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_relative import Added
from numba_flash.cuda.prepare_tile_lists import Extras, Tiles
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.sm90.arguments import LOG2E, scales
from numba_flash.cuda.sm90.forward_options_tiles import copying_tile
from numba_flash.cuda.sm90.prepare_forward import config_of, sizes_of
from numba_flash.cuda.sm90.prepare_pairs import tiles_of_bias, tiles_of_mask
from numba_flash.cuda.sm90.tiles import OUTPUT_ROWS, Tile
from numba_flash.problem import Prepared

KEYS_OF_RUN = 2  # neighbours among a lane's scores


class Copied(NamedTuple):
    """What the copy engine brings of pairs, "bias" or "mask", and the `Layout` of it."""

    name: str
    tiles: Any


def copied_pairs(p, inputs) -> Copied | None:
    """What of inputs of such layouts the copy engine brings, if there is a tile for it; one that
    lies within the blocks of a mask, if tiles are listed.
    """
    if bool(p.options.bias) == p.options.mask:  # neither, or both
        return None
    name, tiles_of = ("bias", tiles_of_bias) if p.options.bias else ("mask", tiles_of_mask)
    tile, tiles = copying_tile(p, name), tiles_of(p, getattr(inputs, name))
    if tile is None or tiles is None:
        return None
    fits = not p.options.listed or p.options.blocks.divided_by(tile.block_m, tile.block_n)
    return Copied(name, tiles) if fits else None


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results, rng)`` on arrays like the call's layouts; `rng` is left out if there
    is no dropout.
    """
    p, (_, inputs, results, gpu, _), of_parts = chosen.p, chosen.call, chosen.part_tile
    copied = copied_pairs(p, inputs)
    parts = grid.parts(p, of_parts.block_m, of_parts.block_n, gpu.multiprocessors)
    tile = of_parts if parts > 1 else chosen.tile
    if chosen.recipe.stage == RELATIVE:
        extras = Added(p, gpu, inputs, tile.block_m, tile.block_n)
    else:
        extras = Extras(p, gpu, inputs, Tiles(tile.block_m, tile.block_n, queue=p.options.listed))
    partial = prepare_parts.layouts(p, parts) if parts > 1 else results
    forward, numbers = _forward(chosen, extras, partial, tile, parts, copied)
    combine = prepare_parts.combine(partial, results, gpu, parts) if parts > 1 else None
    scratch = combine and prepare_parts.scratch(partial)
    mapped_count = len(forward.maps) - int(copied is not None)

    def run(inputs, results, rng=None):
        into = scratch.beside(inputs.q) if combine else results
        mapped = (inputs.q, inputs.k, inputs.v, into.o)[:mapped_count]
        if copied is not None:
            mapped = (*mapped, getattr(inputs, copied.name))
        given = None if rng is None else numbers(rng)
        forward(*mapped, *into, extras=extras.of(inputs), numbers=given)
        if combine:
            combine(*into, *results)

    return Prepared(run, (*extras.launches, forward, *((combine,) if combine else ())))


def _forward(chosen: Chosen, extras: Extras, results, tile: Tile, parts: int, copied):
    """The attention kernel, on results of the problem, or on float32 parts of them; and its numbers
    as a function of the generator's state.
    """
    p, inputs, gpu = chosen.p, chosen.call.inputs, chosen.call.gpu
    q, k, v, o = grid.heads_first(p, inputs.q, inputs.k, inputs.v, results.o)
    in_float32 = o.dtype.name == "float32"
    store = "parts" if in_float32 else "words" if p.options.packed else "map"
    maps = ((q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (o, OUTPUT_ROWS))
    maps = (
        *(maps if store == "map" else maps[:3]),
        *(((copied.tiles, tile.block_m),) if copied is not None else ()),
    )
    sizes, vectors = sizes_of(p, gpu, tile, parts), vectors_of(p, inputs, KEYS_OF_RUN)
    scale_log2 = np.float32(LOG2E if p.options.changes else p.scale * LOG2E)
    numbers = lambda rng=None: (sizes, scale_log2, parameters_of(p, rng))
    if chosen.recipe.stage != OPTIONS:
        numbers = lambda: (sizes, scales(p))
    config = config_of(p, results.lse is not None, store, tile, vectors, chosen.recipe.stage)
    forward = Launch(
        chosen.builder,
        (config,),
        gpu,
        grid=min(sizes.items, gpu.multiprocessors),
        threads=tile.threads,
        shared_bytes=tile.layout(p.d, p.dv).bytes,
        operands=((o if in_float32 else o.words(), 5), (results.lse, 4)),
        extras=extras.layouts,
        numbers=numbers(),
        maps=maps,
    )
    return forward, numbers
