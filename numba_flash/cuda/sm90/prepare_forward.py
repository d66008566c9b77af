"""The forward pass of the `sm90` tier from the host: which kernels run with which grid."""

import math

from numba_flash.arrays import Layout, Scratch
from numba_flash.cuda import grid, launch, tensor_maps
from numba_flash.cuda.arguments import build_extras
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.sm90.arguments import Sizes, scales
from numba_flash.cuda.sm90.tiles import OUTPUT_ROWS, Tile, forward_tile, part_tile
from numba_flash.problem import ForwardResults, Prepared

COMBINE_ROWS, COMBINE_LANES = 4, 32


def prepare(problem, inputs, results, gpu=None) -> Prepared:
    """``run(inputs, results)`` on arrays like these layouts."""
    p, gpu = problem, gpu or launch.gpu(inputs.q.device)
    if tensor_maps.why_not("o", results.o) is not None:  # only an array of the user's is like that
        return tensor_maps.through_compact(
            lambda results: prepare(p, inputs, results, gpu), results
        )
    tile = part_tile(p)
    parts = grid.parts(p, tile.block_m, tile.block_n, gpu.multiprocessors)
    if parts > 1:
        return _prepare_parts(p, inputs, results, gpu, tile, parts)
    forward = _forward(p, inputs, results, gpu, forward_tile(p), 1)
    extras_of = build_extras(p.options)

    def run(inputs, results):
        o, lse = results
        forward(inputs.q, inputs.k, inputs.v, o, o, lse, extras=extras_of(inputs))

    def run_without_map(inputs, results):  # o is not stored through one
        o, lse = results
        forward(inputs.q, inputs.k, inputs.v, o, lse, extras=extras_of(inputs))

    return Prepared(run if len(forward.maps) == 4 else run_without_map, (forward,))


def _prepare_parts(p, inputs, results, gpu, tile: Tile, parts: int) -> Prepared:
    """The same by way of float32 results over parts of the keys, which another kernel combines."""
    partial = partial_results(p, parts)
    forward = _forward(p, inputs, partial, gpu, tile, parts)
    combine = combine_launch(partial, results, gpu, parts)
    extras_of, scratch = build_extras(p.options), scratch_of(partial)

    def run(inputs, results):
        o_parts, lse_parts = scratch.beside(inputs.q)
        forward(inputs.q, inputs.k, inputs.v, o_parts, lse_parts, extras=extras_of(inputs))
        combine(o_parts, lse_parts, results.o, results.lse)

    return Prepared(run, (forward, combine))


def partial_results(p, parts: int) -> ForwardResults:
    """Layouts of float32 results over so many parts of the keys."""
    shape = (parts * p.batch[0], p.batch[1], p.hq, p.nq)
    return ForwardResults(
        Layout.compact((*shape, p.dv), "float32"), Layout.compact(shape, "float32")
    )


def scratch_of(partial: ForwardResults) -> Scratch:
    """Where arrays of these layouts come from."""
    return Scratch(partial, ("parts of o", "parts of lse"))


def combine_launch(partial: ForwardResults, results: ForwardResults, gpu, parts: int) -> Launch:
    """The kernel that makes results of parts of them."""
    return Launch(
        "combine.build",
        (results.o.dtype.name, results.o.shape[-1], results.lse is not None, parts, COMBINE_ROWS),
        gpu,
        grid=-(-math.prod(partial.lse.shape) // parts // COMBINE_ROWS),
        threads=COMBINE_ROWS * COMBINE_LANES,
        operands=((partial.o, 5), (partial.lse, 4), (results.o, 5), (results.lse, 4)),
    )


def sizes_of(p, gpu, tile, parts: int) -> Sizes:
    """Of all work items, and how they are handed out."""
    in_sections = p.band != "none" and not p.options.packed
    section = grid.section(p, tile.block_m, tile.block_n, gpu.multiprocessors) if in_sections else 1
    return Sizes(
        items=grid.items(p, p.nq, p.hq, tile.block_m) * parts,
        low=p.low,
        high=p.high,
        columns=p.nk,
        parts=parts,
        group=p.hq // p.hk,
        section=section,
        b0=p.batch[0],
    )


def _forward(p, inputs, results, gpu, tile: Tile, parts: int) -> Launch:
    """The attention kernel, on results of the problem, or on float32 parts of them."""
    q, k, v, o = grid.heads_first(p, inputs.q, inputs.k, inputs.v, results.o)
    in_float32 = o.dtype.name == "float32"
    store = "parts" if in_float32 else "words" if p.options.packed else "map"
    maps = ((q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (o, OUTPUT_ROWS))
    sizes = sizes_of(p, gpu, tile, parts)
    return Launch(
        "sm90.forward.build",
        (p.dtype, p.d, p.dv, results.lse is not None, p.band, store, p.options.structure, tile),
        gpu,
        grid=min(sizes.items, gpu.multiprocessors),
        threads=tile.threads,
        shared_bytes=tile.layout(p.d, p.dv).bytes,
        operands=((o if in_float32 else o.words(), 5), (results.lse, 4)),
        extras=grid.extras_layouts(p, inputs),
        numbers=(sizes, scales(p)),
        maps=maps if store == "map" else maps[:3],
    )
