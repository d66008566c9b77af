"""The backward pass of the `sm80` tier from the host: kernels and grids."""

import math
from typing import NamedTuple

import numpy as np

from numba_flash.arguments.problem import BackwardInputs, BackwardResults, Prepared, Problem
from numba_flash.cuda.arguments import (
    BASE_2,
    BASE_E,
    FACTORS,
    FP16X2,
    OF_DLSE,
    Centred,
    build_extras,
    chunked,
    extras_class,
    parameters_of,
    planes_of,
    vectors_of,
)
from numba_flash.cuda.config import PreprocessConfig
from numba_flash.cuda.passes.prepare_planes import PlanesWriter
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.runtime.launch import Gpu, Launch
from numba_flash.cuda.sm80.arguments import Shape, Sizes
from numba_flash.cuda.sm80.backward import prepare_dq
from numba_flash.cuda.sm80.backward.backward_tiles import BackwardTile
from numba_flash.cuda.sm80.backward.prepare_temporaries import Temporaries, temporaries_of
from numba_flash.cuda.sm80.config import BackwardConfig
from numba_flash.cuda.sm80.tiles import hardware
from numba_flash.cuda.work import grid
from numba_flash.cuda.work.prepare_tile_lists import Extras, TileShape

LOG2E = math.log2(math.e)
ROW_THREADS = 256  # of the kernel before the main one, and no more copies than that
# Bytes of sums of dq that blocks at work at the same time add to: they stay in the L2 cache.
SUMS_AT_WORK = 2**25
SUMS_OF_COPIES = 2**27  # bytes of all copies, if there are several
# Blocks of keys of one head are behind each other by LAG tiles and those that share a flag. Under a
# band, where some have fewer tiles than others, waiting for that may take 1 / PATIENCE of their
# time. Without one, as many blocks of a head are at work as leave its sums in the cache, which
# makes D = 256 up to a fifth faster than PATIENCE would. Measured: docs/lab/tensor_cores.md,
# `PATIENCE`.
LAG, PATIENCE = 2, 8


class Pass(NamedTuple):
    """A backward pass that is being prepared: the problem, its GPU, tile and main loops, layouts
    with heads first.
    """

    p: Problem
    gpu: Gpu
    tile: BackwardTile
    loops: tuple[str, ...]
    shape: Shape
    ordered: bool
    inputs: BackwardInputs
    results: BackwardResults
    temporaries: Temporaries
    copies: int
    lists: Extras
    planes_writer: PlanesWriter | None

    @property
    def planes(self) -> bool:
        """The arrays are float32, which kernels read as planes of float16."""
        return self.planes_writer is not None

    def more_extras(self, names: tuple[str, ...]) -> tuple:
        """Layouts of what kernels read beside the optional arrays, if it is `planes`."""
        if not self.planes:
            return ()
        made, there, x = self.planes_writer.made, self.temporaries, self.inputs
        views = {
            "factors": (made.factors, 4),
            "shifts": (made.shifts, 4),
            "centres": (made.centres, 5),
            "rows": (there.rows, 5),
            "dlse": (x.dlse, 4),
        }
        return tuple(views[name] for name in names)

    @property
    def of_dlse(self) -> tuple[str, ...]:
        """Names of what the last kernel reads so."""
        wanted = self.inputs.dlse is not None and Centred.of(self.p.options).keys
        return OF_DLSE if wanted else FACTORS

    @property
    def number(self):
        """What scores and sums are computed in."""
        return np.dtype(self.temporaries.rows.dtype).type

    @property
    def row_blocks(self) -> int:
        return math.prod(self.temporaries.dq_sum.shape[:-1])

    @property
    def extras(self) -> tuple:
        return grid.extras_layouts(self.p, self.inputs)


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results, rng)`` on arrays like the call's layouts; `rng` is left out if there
    is no dropout. The same bits in every run if the call is `deterministic`.
    """
    this, dbias = _pass(chosen), None
    p, tile, lists, there = this.p, this.tile, this.lists, this.temporaries
    if chosen.beside is not None:
        dbias = _dbias(this, chosen.beside)
    preprocess, (main, numbers), postprocess = _preprocess(this), _main(this), _postprocess(this)
    extras_of, scratch = build_extras(p.options), there.scratch()

    def run(inputs, results, rng=None):
        x, extras, own = grid.inputs_heads_first(p, inputs), extras_of(inputs), lists.of(inputs)
        dq, dk, dv = grid.heads_first(p, results.dq, results.dk, results.dv)
        rows, dq_sum, flags = scratch.beside(inputs.q)
        preprocess(x.do, x.o, x.lse, x.dlse, rows, dq_sum, flags, extras=extras)
        given = None if rng is None else numbers(rng)
        main(x.do, x.q, x.k, x.v, dk, dv, rows, dq_sum, flags, extras=own, numbers=given)
        postprocess(dq_sum, *((x.k,) if tile.slots else ()), dq, extras=own)
        if dbias is not None:
            dbias.run(x, rows, results, rng)

    made = *lists.launches, preprocess, main, postprocess, *(dbias.launches if dbias else ())
    if not this.planes:
        return Prepared(run, made, sums=there.dq_sum.nbytes)
    wanted, planes_writer = ("tiles", "order") if this.ordered else ("tiles",), this.planes_writer
    of_preprocess = extras_class(p.options, more=FP16X2)
    of_main = extras_class(p.options, wanted, FACTORS)
    of_postprocess = extras_class(p.options, wanted, this.of_dlse)

    def run_planes(inputs, results, rng=None):
        x, extras, own = grid.inputs_heads_first(p, inputs), extras_of(inputs), lists.of(inputs)
        dq, dk, dv = grid.heads_first(p, results.dq, results.dk, results.dv)
        rows, dq_sum, flags = scratch.beside(inputs.q)
        y = planes_writer.of(inputs)
        own_planes = of_preprocess(*extras, *y.extras)
        preprocess(x.do, x.o, x.lse, x.dlse, rows, dq_sum, flags, extras=own_planes)
        given = None if rng is None else numbers(rng)
        own_planes = of_main(*own, y.factors)
        main(y.do, y.q, y.k, y.v, dk, dv, rows, dq_sum, flags, extras=own_planes, numbers=given)
        named = {"factors": y.factors, "centres": y.centres, "rows": rows, "dlse": x.dlse}
        own_planes = of_postprocess(*own, *[named[name] for name in this.of_dlse])
        postprocess(dq_sum, dq, extras=own_planes)
        if dbias is not None:
            dbias.run(x, rows, results, rng, y)
        return y.flags

    made = *planes_writer.launches, *made
    return Prepared(run_planes, made, planes_writer.made.flags, sums=there.dq_sum.nbytes)


def _pass(chosen: Chosen) -> Pass:
    """What its kernels have in common."""
    p, tile, (_, inputs, results, gpu, deterministic) = chosen.p, chosen.tile, chosen.call
    # without rows nobody sets the flags to 0; in slots nothing is added up
    ordered = deterministic and p.nq * p.hq > 0 and not tile.slots
    copies = copies_of_sums(p, tile, gpu.multiprocessors) if ordered else 0 if tile.slots else 1
    x, share = grid.inputs_heads_first(p, inputs), tile.share if ordered else 0
    dq, dk, dv = grid.heads_first(p, *results[:3])
    planes_writer = None
    if tile.planes:
        planes_writer = PlanesWriter(p, gpu, inputs, (tile.padded(p.d), tile.padded(p.dv)))
    listed = TileShape(tile.block_m, tile.block_n, transposed=True, share=share)
    return Pass(
        p=p,
        gpu=gpu,
        tile=tile,
        loops=chosen.recipe.loops,
        shape=shape_of(chosen, 2 * tile.m_tiles),
        ordered=ordered,
        inputs=x,
        results=results._replace(dq=dq, dk=dk, dv=dv),
        temporaries=temporaries_of(p, tile, copies),
        copies=copies,
        lists=Extras(p, gpu, x, listed),
        planes_writer=planes_writer,
    )


def shape_of(chosen: Chosen, run: int) -> Shape:
    """How kernels of a backward pass read and write the arrays of a call, of whose bias and mask a
    lane has `run` neighbouring keys.
    """
    p, (_, x, y, gpu, _), planes = chosen.p, chosen.call, planes_of(chosen.p)
    turing = hardware(gpu.capability).turing
    return Shape(
        head_dim=p.d,
        head_dim_v=p.dv,
        turing=turing,
        asynchronous=not turing and (planes > 0 or chunked(x.do, x.q, x.k, x.v)),
        wide=chunked(y.dq, y.dk, y.dv),
        planes=planes,
        fours=gpu.capability >= (9, 0),
        vectors=vectors_of(p, x, run),
        double=p.dtype == "float64",
    )


def copies_of_sums(p, tile, multiprocessors: int) -> int:
    """Copies of the sums of dq, of a deterministic pass: a power of two, as many as blocks of keys
    of one head are at work at the same time, unless that is too much memory. Lists of a mask know
    of one alone.
    """
    if p.options.tiled:
        return 1
    blocks = grid.blocks(p, p.nk, tile.block_n)
    heads = max(1, grid.items(p, p.nk, p.hk, tile.block_n) // max(1, blocks))
    together = min(heads, section(p, tile, multiprocessors, True))
    at_work = -(-multiprocessors * tile.min_blocks // together)
    sums = temporaries_of(p, tile, 1).dq_sum
    size = math.prod(sums.shape) * np.dtype(sums.dtype).itemsize
    most = min(SUMS_OF_COPIES // max(1, size), 2 * min(blocks, at_work) - 1, ROW_THREADS)
    return 1 << max(1, most).bit_length() - 1


def _preprocess(this: Pass) -> Launch:
    """The lse in the base of the scores, delta, and flags or zeros."""
    p, x, there, tile = this.p, this.inputs, this.temporaries, this.tile
    sum_bytes = this.number().itemsize * tile.block_m * tile.padded(p.d) if this.copies else 0
    whole = chunked(x.do, x.o)
    config = PreprocessConfig(
        dtype=p.dtype,
        dv=p.dv,
        dlse=x.dlse is not None,
        block_m=tile.block_m,
        sum_bytes=sum_bytes,
        ordered=this.ordered,
        chunked=whole,
        lse_in=BASE_E if this.planes or (this.shape.double and p.options.changes) else BASE_2,
        options=p.options.arrays,
        threads=ROW_THREADS,
        copies=this.ordered,
    )
    return Launch(
        "passes.preprocess.build",
        (config,),
        this.gpu,
        grid=this.row_blocks,
        threads=ROW_THREADS,
        operands=(
            *((x.do, 5), (x.o, 5), (x.lse, 4), (x.dlse, 4)),
            *((there.rows, 5), (there.dq_sum, 5), (there.flags, 1)),
        ),
        extras=this.extras + this.more_extras(FP16X2),
        numbers=(p.nk,),
    )


def _main(this: Pass):
    """The main kernel, and its numbers as a function of the generator's state."""
    p, x, y, there, tile = this.p, this.inputs, this.results, this.temporaries, this.tile
    items, read = grid.items(p, p.nk, p.hk, tile.block_n), x
    if this.planes:
        read = this.planes_writer.made
    sizes = Sizes(
        low=-p.high,
        high=-p.low,
        columns=p.nq,
        group=p.hq // max(1, p.hk),
        section=section(p, tile, this.gpu.multiprocessors, this.ordered),
        b0=p.batch[0],
        doublings=max(0, this.copies.bit_length() - 1),
    )
    scale_log2 = this.number(LOG2E if p.options.changes else p.scale * LOG2E)
    numbers = lambda rng=None: (sizes, scale_log2, this.number(p.scale), parameters_of(p, rng))
    main = Launch(
        f"{this.loops[0]}.build",
        (BackwardConfig(p.dtype, this.shape, p.options.structure, tile, this.ordered),),
        this.gpu,
        grid=items,
        threads=tile.threads,
        shared_bytes=tile.layout(p.d, p.dv).bytes,
        operands=(
            *((read.do, 5), (read.q, 5), (read.k, 5), (read.v, 5), (y.dk, 5), (y.dv, 5)),
            *((there.rows, 5), (there.dq_sum, 5), (there.flags, 1)),
        ),
        extras=this.lists.layouts + this.more_extras(FACTORS),
        numbers=numbers(),
    )
    return main, numbers


def section(p, tile, multiprocessors: int, ordered: bool) -> int:
    """Heads of k whose blocks of keys are handed out together.

    Without a band no more than have their sums in the cache; but if blocks wait for each other, so
    many that few of one head are at work at the same time.
    """
    even = grid.even_section(max(1, grid.blocks(p, p.nk, tile.block_n)), multiprocessors)
    tiles = max(1, -(-p.nq // tile.block_m))
    size = 8 if p.dtype == "float64" else 4
    in_cache = SUMS_AT_WORK // (size * tile.block_m * tile.padded(p.d) * tiles)
    if not ordered:
        return even if p.band != "none" else max(1, min(even, in_cache))
    at_work = multiprocessors * tile.min_blocks
    lag = at_work * (LAG + tile.share)
    most = PATIENCE * lag // tiles if p.band != "none" else max(in_cache, lag // tiles)
    return max(1, min(at_work, most))


def _dbias(this: Pass, beside: Chosen):
    """The gradient of the bias; tiles of planes have as many columns as those of dq, dk, dv."""
    shape, planes = this.shape, None
    if this.planes:
        d, dv = map(this.tile.padded, shape[:2])
        shape, planes = shape._replace(head_dim=d, head_dim_v=dv), this.planes_writer.made
    return beside.recipe.prepare(beside, shape, this.inputs, this.temporaries.rows, planes)


def _postprocess(this: Pass) -> Launch:
    """dQ, rounded, of its sums or of dS."""
    if this.tile.slots:
        return prepare_dq.launch(this)
    p, there = this.p, this.temporaries
    module = "sum_dq_float64" if this.shape.double else "sum_dq"
    return Launch(
        f"sm80.backward.{module}.build_postprocess",
        (
            *(p.dtype, this.shape, this.ordered and p.options.tiled, p.options.arrays, this.tile),
            this.planes and this.of_dlse is OF_DLSE,
        ),
        this.gpu,
        grid=this.row_blocks,
        threads=this.tile.threads,
        operands=((there.dq_sum, 5), (this.results.dq, 5)),
        extras=this.lists.layouts + this.more_extras(this.of_dlse),
        numbers=(p.nk, p.low, p.high, this.number(p.scale)),
    )
