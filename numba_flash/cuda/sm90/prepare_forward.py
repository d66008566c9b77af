"""The forward pass of the `sm90` tier from the host: which kernels run with which grid."""

from numba_flash.cuda import grid, prepare_parts, tensor_maps
from numba_flash.cuda.arguments import ONE_BY_ONE, build_extras
from numba_flash.cuda.config import PLAIN
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_lengths import numbers_of, with_numbers
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.sm90.arguments import Sizes, scales
from numba_flash.cuda.sm90.config import ForwardConfig
from numba_flash.cuda.sm90.fold import folded
from numba_flash.cuda.sm90.tiles import OUTPUT_ROWS, Tile
from numba_flash.problem import Prepared

# Work items of a multiprocessor, up to which lengths are numbers. With each, threads choose one of
# `MOST_LENGTHS`, which took longer on an H200 than to read it, as numbers of 64 bits (they have 32
# now, which were not timed): of one item 14.2 us instead of 14.1, where another launch takes more;
# of 15.5 items 207 instead of 200.
FEW_ITEMS = 4


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` on arrays like the call's layouts."""
    p, call, tile = chosen.p, chosen.call, chosen.tile
    inputs, results, gpu = call.inputs, call.results, call.gpu
    if grid.items(p, p.nq, p.hq, tile.block_m) <= FEW_ITEMS * gpu.multiprocessors:
        p = with_numbers(p, inputs)
    fold = folded(p, inputs, results, tile.block_m)
    if fold is not None and fold.results.o is not None:
        problem, inputs, results = fold
        return chosen.again(call._replace(problem=problem, inputs=inputs, results=results))
    if fold is not None:  # the same bits wherever o goes
        again = lambda results: chosen.again(call._replace(problem=p, results=results))
        return tensor_maps.through_compact(again, results, unfit=lambda o: True)
    of_parts = chosen.part_tile
    parts = grid.parts(p, of_parts.block_m, of_parts.block_n, gpu.multiprocessors)
    if parts > 1:
        return _prepare_parts(chosen, p, parts)
    forward, numbers = _forward(chosen, p, results, tile, 1)
    extras_of = build_extras(p.options)

    def run(inputs, results):
        o, lse = results
        q, k, v, extras = inputs.q, inputs.k, inputs.v, extras_of(inputs)
        forward.on((q, k, v, o, o, lse), extras, numbers and numbers(inputs))

    def run_without_map(inputs, results):  # o is not stored through one
        o, lse = results
        q, k, v, extras = inputs.q, inputs.k, inputs.v, extras_of(inputs)
        forward.on((q, k, v, o, lse), extras, numbers and numbers(inputs))

    return Prepared(run if len(forward.maps) == 4 else run_without_map, (forward,))


def _prepare_parts(chosen: Chosen, p, parts: int) -> Prepared:
    """The same by way of float32 results over parts of the keys, which another kernel combines."""
    partial = prepare_parts.layouts(p, parts)
    forward, numbers = _forward(chosen, p, partial, chosen.part_tile, parts)
    combine = prepare_parts.combine(partial, chosen.call.results, chosen.call.gpu, parts)
    extras_of, scratch = build_extras(p.options), prepare_parts.scratch(partial)

    def run(inputs, results):
        o_parts, lse_parts = scratch.beside(inputs.q)
        q, k, v, extras = inputs.q, inputs.k, inputs.v, extras_of(inputs)
        forward.on((q, k, v, o_parts, lse_parts), extras, numbers and numbers(inputs))
        combine(o_parts, lse_parts, results.o, results.lse)

    return Prepared(run, (forward, combine))


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


def config_of(
    p, write_lse: bool, store: str, tile, vectors=ONE_BY_ONE, stage: str = PLAIN
) -> ForwardConfig:
    """What the attention kernel of a problem is compiled for."""
    return ForwardConfig(
        dtype=p.dtype,
        d=p.d,
        dv=p.dv,
        write_lse=write_lse,
        band=p.band,
        store=store,
        options=p.options.structure,
        tile=tile,
        vectors=vectors,
        stage=stage,
    )


def _forward(chosen: Chosen, p, results, tile: Tile, parts: int) -> tuple:
    """The attention kernel, on results of the problem, or on float32 parts of them; and
    ``numbers(inputs)`` of a call, None if they are always the same.
    """
    inputs, gpu = chosen.call.inputs, chosen.call.gpu
    q, k, v, o = grid.heads_first(p, inputs.q, inputs.k, inputs.v, results.o)
    in_float32 = o.dtype.name == "float32"
    store = "parts" if in_float32 else "words" if p.options.packed else "map"
    maps = ((q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (o, OUTPUT_ROWS))
    sizes = sizes_of(p, gpu, tile, parts)
    numbers = numbers_of(p, (sizes, scales(p)))
    forward = Launch(
        chosen.builder,
        (config_of(p, results.lse is not None, store, tile),),
        gpu,
        grid=min(sizes.items, gpu.multiprocessors),
        threads=tile.threads,
        # On an H200, bfloat16, 2048 / D heads, one batch element, 512, 1024, 2048, 4096 queries:
        # 1.044, 1.025, 1.013, 1.005 times as fast at D = 128, causal; 1.041, 1.017, 1.005,
        # 1.001 without a band; 1.050, 1.033, 1.011, 1.003 and 1.029, 1.012, 1.005, 1.002 at D = 64.
        # With as many batch elements as have 16384 queries in all 0.999 to 1.035.
        early=True,
        shared_bytes=tile.layout(p.d, p.dv).bytes,
        operands=((o if in_float32 else o.words(), 5), (results.lse, 4)),
        extras=grid.extras_layouts(p, inputs),
        numbers=numbers.prepared,
        maps=maps if store == "map" else maps[:3],
    )
    return forward, numbers.of
