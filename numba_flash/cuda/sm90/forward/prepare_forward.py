"""The forward pass of the `sm90` tier from the host: which kernels run with which grid."""

from typing import Any, NamedTuple

import numpy as np

from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.arguments import (
    FP16X2,
    ONE_BY_ONE,
    Vectors,
    build_extras,
    extras_class,
    parameters_of,
    vectors_of,
)
from numba_flash.cuda.config import OPTIONS, RELATIVE
from numba_flash.cuda.passes import prepare_kv_splits
from numba_flash.cuda.passes.prepare_planes import PlanesWriter
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.runtime import tensor_maps
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.score import prepare_resident_bias
from numba_flash.cuda.score.prepare_relative import Relative
from numba_flash.cuda.score.swizzle import NARROW
from numba_flash.cuda.sm90.arguments import LOG2E, Sizes, scales
from numba_flash.cuda.sm90.config import ForwardConfig
from numba_flash.cuda.sm90.fold import folded
from numba_flash.cuda.sm90.forward.forward_tiles import resident_tile
from numba_flash.cuda.sm90.prepare_pairs import copied_pairs
from numba_flash.cuda.sm90.tiles import OUTPUT_ROWS, padded
from numba_flash.cuda.work import grid
from numba_flash.cuda.work.prepare_lengths import numbers_of, with_numbers
from numba_flash.cuda.work.prepare_tile_lists import Extras, TileShape

KEYS_OF_RUN = 2  # neighbours among a lane's scores
# Work items of a multiprocessor, up to which lengths are numbers, which saves the launch that
# writes them into an array. With each item, threads choose one of `MOST_LENGTHS`, which takes a
# little longer than to read it: with one item that is less than a launch, with 15 it is 4 % of the
# pass. Numbers had 64 bits then; those of 32 bits were not timed. Measured:
# docs/lab/hopper_forward.md, `FEW_ITEMS`.
FEW_ITEMS = 4


class Given(NamedTuple):
    """What an attention kernel is launched with besides results.

    Attributes
    ----------
    items : int
        Of work.
    maps : tuple
        Of q, k and v, as `numba_flash.cuda.runtime.launch.Launch` wants them.
    extras, numbers : tuple
        Likewise.
    store : str
        As that of `ForwardConfig`.
    vectors : Vectors
        Likewise.
    beside : tuple
        Maps after those of q, k, v and o.
    early : bool
        The kernel may begin while those before it are still running.
    """

    items: int
    maps: tuple
    extras: tuple
    numbers: tuple
    store: str
    vectors: Vectors = ONE_BY_ONE
    beside: tuple = ()
    early: bool = False


def _launch(chosen: Chosen, p, results, tile, given: Given) -> Launch:
    """The attention kernel of a problem on these results."""
    gpu, (o,) = chosen.call.gpu, grid.heads_first(p, results.o)
    config = ForwardConfig(
        dtype=p.dtype,
        d=p.d,
        dv=p.dv,
        write_lse=results.lse is not None,
        band=p.band,
        store=given.store,
        options=p.options.structure,
        tile=tile,
        vectors=given.vectors,
        stage=chosen.recipe.stage,
    )
    return Launch(
        chosen.builder,
        (config,),
        gpu,
        grid=min(given.items, gpu.multiprocessors),
        threads=tile.threads,
        early=given.early,
        shared_bytes=tile.layout(p.d, p.dv).bytes,
        operands=((o if o.dtype.name == "float32" else o.words(), 5), (results.lse, 4)),
        extras=given.extras,
        numbers=given.numbers,
        maps=(*given.maps, *((o, OUTPUT_ROWS),) * (given.store == "map"), *given.beside),
    )


def sizes_of(p, gpu, tile, kv_splits: int) -> Sizes:
    """Of all work items, and how they are handed out."""
    in_sections = p.band != "none" and not p.options.packed
    section = grid.section(p, tile.block_m, tile.block_n, gpu.multiprocessors) if in_sections else 1
    items = grid.items(p, p.nq, p.hq, tile.block_m) * kv_splits
    return Sizes.of_queries(p, items, section, kv_splits)


def _maps(qkv: tuple, tile, *columns) -> tuple:
    """Of q, k and v, heads first, in boxes of such a tile."""
    rows = tile.block_m, tile.block_n, tile.block_n
    return tuple((x, n, *columns) for x, n in zip(qkv, rows, strict=True))


def _store(p, o: Layout) -> str:
    """How o of such a layout is stored."""
    return "kv_splits" if o.dtype.name == "float32" else "words" if p.options.packed else "map"


class Into(NamedTuple):
    """Where the attention kernel stores: results of a call, or of parts of the keys.

    Attributes
    ----------
    layouts : ForwardResults
        Of these.
    scratch, combine
        Where parts come from, and the kernel that makes results of them, or None.
    """

    layouts: Any
    scratch: Any = None
    combine: Any = None

    @classmethod
    def of(cls, chosen: Chosen, p, kv_splits: int) -> "Into":
        results, gpu = chosen.call.results, chosen.call.gpu
        if kv_splits == 1:
            return cls(results)
        partial = prepare_kv_splits.layouts(p, kv_splits)
        combine = prepare_kv_splits.combine(partial, results, gpu, kv_splits)
        return cls(partial, prepare_kv_splits.scratch(partial), combine)

    @property
    def launches(self) -> tuple:
        return () if self.combine is None else (self.combine,)

    def around(self, run):
        """What `run` does with results of a call, with these."""
        if self.combine is None:
            return run

        def run_on_kv_splits(inputs, results, *rng):
            stored = self.scratch.beside(inputs.q)
            fallback = run(inputs, stored, *rng)
            self.combine(*stored, *results)
            return fallback

        return run_on_kv_splits


def _parts(chosen: Chosen, p) -> tuple[int, Any]:
    """How many parts of the keys there are, and the tile for that."""
    tile = chosen.kv_split_tile
    kv_splits = grid.kv_splits(p, tile.block_m, tile.block_n, chosen.call.gpu.multiprocessors)
    return kv_splits, tile if kv_splits > 1 else chosen.tile


# ---- plain scores


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` on arrays like the call's layouts."""
    p, call, block_m = chosen.p, chosen.call, chosen.tile.block_m
    inputs, results, gpu = call.inputs, call.results, call.gpu
    if grid.items(p, p.nq, p.hq, block_m) <= FEW_ITEMS * gpu.multiprocessors:
        p = with_numbers(p, inputs)
    fold = folded(p, inputs, results, block_m)
    if fold is not None and fold.results.o is not None:
        problem, inputs, results = fold
        return chosen.again(call._replace(problem=problem, inputs=inputs, results=results))
    if fold is not None:  # the same bits wherever o goes
        again = lambda results: chosen.again(call._replace(problem=p, results=results))
        return tensor_maps.through_compact(again, results, unfit=lambda o: True)
    kv_splits, tile = _parts(chosen, p)
    into, sizes = Into.of(chosen, p, kv_splits), sizes_of(p, gpu, tile, kv_splits)
    numbers = numbers_of(p, (sizes, scales(p)))
    maps = _maps(grid.heads_first(p, inputs.q, inputs.k, inputs.v), tile)
    extras, store = grid.extras_layouts(p, inputs), _store(p, into.layouts.o)
    # Launched before the kernel in front has ended, a short pass is up to 5 % faster, and a long
    # one is as fast. Measured: docs/lab/hopper_forward.md, `prepare`.
    given = Given(sizes.items, maps, extras, numbers.prepared, store, early=True)
    forward = _launch(chosen, p, into.layouts, tile, given)
    of_lengths, extras_of, to_map = numbers.of, build_extras(p.options), store == "map"

    def run(inputs, results):
        o, lse = results
        q, k, v, extras = inputs.q, inputs.k, inputs.v, extras_of(inputs)
        arrays = (q, k, v, o, o, lse) if to_map else (q, k, v, o, lse)
        forward.on(arrays, extras, of_lengths and of_lengths(inputs))

    return Prepared(into.around(run), (forward, *into.launches))


# ---- bias, mask, dropout or a function of the score


def prepare_options(chosen: Chosen) -> Prepared:
    """``run(inputs, results, rng)`` on arrays like the call's layouts; `rng` is left out if there
    is no dropout.
    """
    p, (_, inputs, _, gpu, _) = chosen.p, chosen.call
    copied, (kv_splits, tile) = copied_pairs(p, inputs), _parts(chosen, p)
    if chosen.recipe.stage == RELATIVE:
        extras = Relative(p, gpu, inputs, tile.block_m, tile.block_n)
    else:
        extras = Extras(
            p, gpu, inputs, TileShape(tile.block_m, tile.block_n, queue=p.options.block_sparse)
        )
    into, sizes = Into.of(chosen, p, kv_splits), sizes_of(p, gpu, tile, kv_splits)
    scale_log2 = np.float32(LOG2E if p.options.changes else p.scale * LOG2E)
    numbers = lambda rng=None: (sizes, scale_log2, parameters_of(p, rng))
    if chosen.recipe.stage != OPTIONS:
        numbers = lambda: (sizes, scales(p))
    given = Given(
        items=sizes.items,
        maps=_maps(grid.heads_first(p, inputs.q, inputs.k, inputs.v), tile),
        extras=extras.layouts,
        numbers=numbers(),
        store=_store(p, into.layouts.o),
        vectors=vectors_of(p, inputs, KEYS_OF_RUN),
        beside=() if copied is None else ((copied.tiles, tile.block_m),),
    )
    forward = _launch(chosen, p, into.layouts, tile, given)
    mapped_count = 4 if given.store == "map" else 3

    def run(inputs, results, rng=None):
        mapped = (inputs.q, inputs.k, inputs.v, results.o)[:mapped_count]
        if copied is not None:
            mapped = (*mapped, getattr(inputs, copied.name))
        forward.on((*mapped, *results), extras.of(inputs), None if rng is None else numbers(rng))

    return Prepared(into.around(run), (*extras.launches, forward, *into.launches))


# ---- float32 in planes of float16


def prepare_split(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` on arrays like the call's layouts, which returns flags of heads that
    are left to another tier.
    """
    p, (_, inputs, _, gpu, _), (kv_splits, tile) = chosen.p, chosen.call, _parts(chosen, chosen.p)
    planes_writer = PlanesWriter(p, gpu, inputs, (padded(p.d), padded(p.dv)))
    into, sizes, made = (
        Into.of(chosen, p, kv_splits),
        sizes_of(p, gpu, tile, kv_splits),
        planes_writer.made,
    )
    planes = tuple(as_float16(x) for x in (made.q, made.k, made.v))
    given = Given(
        items=sizes.items,
        maps=_maps(planes, tile),
        extras=(
            *grid.extras_layouts(p, inputs),
            *((made.factors, 4), (made.shifts, 4), (made.centres, 5)),
        ),
        numbers=(sizes, scales(p)),
        store="kv_splits" if kv_splits > 1 else "floats",
    )
    forward = _launch(chosen, p, into.layouts, tile, given)
    lengths_of, extras = build_extras(p.options), extras_class(p.options, (), FP16X2)

    def run(inputs, results):
        x, (o,) = planes_writer.of(inputs), grid.heads_first(p, results.o)
        more = extras(*lengths_of(inputs), *x.extras)
        forward.on((x.q, x.k, x.v, o, results.lse), more)
        return x.flags

    return Prepared(
        into.around(run), (*planes_writer.launches, forward, *into.launches), made.flags
    )


def as_float16(words: Layout) -> Layout:
    """The same bytes as elements, two of each word."""
    return Layout.compact((*words.shape[:-1], 2 * words.shape[-1]), "float16")


# ---- a bias that batch elements share, kept in shared memory


def has_resident_bias(problem, inputs, results=None) -> bool:
    """True if there is a bias that can be kept, and nothing else."""
    narrow = max(problem.d, problem.dv) <= NARROW
    alone = narrow and prepare_resident_bias.shared_alone(problem, inputs, results)
    return alone and resident_tile(problem) is not None


def prepare_resident(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` on arrays like the call's layouts."""
    p, tile, (_, inputs, results, _, _) = chosen.p, chosen.tile, chosen.call
    sizes = prepare_resident_bias.sizes_of(p, tile.block_m)
    given = Given(
        items=sizes.units,
        maps=_maps(grid.heads_first(p, inputs.q, inputs.k, inputs.v), tile, NARROW),
        extras=grid.extras_layouts(p, inputs),
        numbers=(sizes, prepare_resident_bias.scales_of(p)),
        store="words",
        vectors=vectors_of(p, inputs, KEYS_OF_RUN),
    )
    forward, extras_of = _launch(chosen, p, results, tile, given), build_extras(p.options)

    def run(inputs, results):
        forward.on((inputs.q, inputs.k, inputs.v, *results), extras_of(inputs))

    return Prepared(run, (forward,))
