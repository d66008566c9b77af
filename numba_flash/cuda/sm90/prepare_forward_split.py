"""The forward pass of float32 on the `sm90` tier from the host: kernels and grids."""

from numba_flash.arrays import Layout
from numba_flash.cuda import grid, prepare_parts
from numba_flash.cuda.arguments import SPLIT, build_extras, extras_class
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_split import Splitter
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.sm90.arguments import scales
from numba_flash.cuda.sm90.prepare_forward import config_of, sizes_of
from numba_flash.cuda.sm90.split_tiles import padded
from numba_flash.problem import Prepared


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` on arrays like the call's layouts, which returns flags of heads that
    are left to another tier.
    """
    p, tile, (_, inputs, results, gpu, _) = chosen.p, chosen.tile, chosen.call
    splitter = Splitter(p, gpu, inputs, (padded(p.d), padded(p.dv)))
    parts = grid.parts(p, tile.block_m, tile.block_n, gpu.multiprocessors)
    partial = prepare_parts.layouts(p, parts) if parts > 1 else results
    forward = _forward(chosen, splitter, partial, parts)
    combine = prepare_parts.combine(partial, results, gpu, parts) if parts > 1 else None
    lengths_of, scratch = build_extras(p.options), combine and prepare_parts.scratch(partial)
    extras = extras_class(p.options, (), SPLIT)

    def run(inputs, results):
        x = splitter.of(inputs)
        into = scratch.beside(inputs.q) if combine else results
        (o,) = grid.heads_first(p, into.o)
        more = extras(*lengths_of(inputs), *x.extras)
        forward(x.q, x.k, x.v, o, into.lse, extras=more)
        if combine:
            combine(*into, *results)
        return x.flags

    launches = (*splitter.launches, forward, *((combine,) if combine else ()))
    return Prepared(run, launches, splitter.made.flags)


def _forward(chosen: Chosen, splitter: Splitter, results, parts: int) -> Launch:
    """The attention kernel, on results of the problem, or on parts of them."""
    p, tile, (_, inputs, _, gpu, _), made = chosen.p, chosen.tile, chosen.call, splitter.made
    (o,) = grid.heads_first(p, results.o)
    sizes = sizes_of(p, gpu, tile, parts)
    d, dv = padded(p.d), padded(p.dv)
    rows = ((made.q, tile.block_m), (made.k, tile.block_n), (made.v, tile.block_n))
    return Launch(
        chosen.builder,
        (config_of(p, results.lse is not None, "parts" if parts > 1 else "floats", tile),),
        gpu,
        grid=min(sizes.items, gpu.multiprocessors),
        threads=tile.threads,
        shared_bytes=tile.layout(d, dv).bytes,
        operands=((o, 5), (results.lse, 4)),
        extras=(
            *grid.extras_layouts(p, inputs),
            *((made.factors, 4), (made.shifts, 4), (made.centres, 5)),
        ),
        numbers=(sizes, scales(p)),
        maps=tuple((as_float16(x), n) for x, n in rows),
    )


def as_float16(words: Layout) -> Layout:
    """The same bytes as elements, two of each word."""
    return Layout.compact((*words.shape[:-1], 2 * words.shape[-1]), "float16")
