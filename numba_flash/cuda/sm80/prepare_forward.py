"""The forward pass of the `sm80` tier from the host: which kernels run with which grid."""

import math

import numpy as np

from numba_flash import arrays
from numba_flash.arrays import Layout
from numba_flash.cuda import grid, launch
from numba_flash.cuda.arguments import parameters_of, vectors_of
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_tile_lists import Extras, Tiles
from numba_flash.cuda.sm80.arguments import Shape, chunked
from numba_flash.cuda.sm80.tiles import Tile, forward_tile, hardware, small_tile
from numba_flash.problem import ForwardResults, Prepared

LOG2E = math.log2(math.e)
COMBINE_ROWS, COMBINE_LANES = 4, 32
KEYS_OF_RUN = 8  # neighbours among a lane's scores


def prepare(problem, inputs, results, gpu=None) -> Prepared:
    """``run(inputs, results, rng)`` on arrays like these layouts; `rng` is left out if there is no
    dropout.
    """
    p, gpu = problem, gpu or launch.gpu(inputs.q.device)
    tile = _tile(p, gpu)
    parts = grid.parts(p, tile.block_m, tile.block_n, gpu.multiprocessors)
    if parts > 1:
        return _prepare_parts(p, inputs, results, gpu, tile, parts)
    extras = Extras(p, gpu, inputs, Tiles(tile.block_m, tile.block_n))
    forward, numbers = _forward(p, inputs, results, gpu, tile, 1, extras)

    def run(inputs, results, rng=None):
        q, k, v, o = grid.heads_first(p, inputs.q, inputs.k, inputs.v, results.o)
        given = None if rng is None else numbers(rng)
        forward(q, k, v, o, results.lse, extras=extras.of(inputs), numbers=given)

    return Prepared(run, (*extras.launches, forward))


def _tile(p, gpu) -> Tile:
    there = hardware(gpu.capability)
    tile = forward_tile(p, there)
    few = grid.items(p, p.nq, p.hq, tile.block_m) <= gpu.multiprocessors
    return small_tile(p, there, few) or tile


def _prepare_parts(p, inputs, results, gpu, tile: Tile, parts: int) -> Prepared:
    """The same by way of float32 results over parts of the keys, which another kernel combines."""
    shape = (parts * p.batch[0], p.batch[1], p.hq, p.nq)
    partial = ForwardResults(
        Layout.compact((*shape, p.dv), "float32"), Layout.compact(shape, "float32")
    )
    extras = Extras(p, gpu, inputs, Tiles(tile.block_m, tile.block_n))
    forward, numbers = _forward(p, inputs, partial, gpu, tile, parts, extras)
    combine = Launch(
        "combine.build",
        (results.o.dtype.name, p.dv, results.lse is not None, parts, COMBINE_ROWS),
        gpu,
        grid=-(-math.prod(shape) // parts // COMBINE_ROWS),
        threads=COMBINE_ROWS * COMBINE_LANES,
        operands=((partial.o, 5), (partial.lse, 4), (results.o, 5), (results.lse, 4)),
    )

    def run(inputs, results, rng=None):
        o_parts, lse_parts = (
            arrays.compact(f"parts of {x}", inputs.q, y.shape, y.dtype)
            for x, y in partial._asdict().items()
        )
        given = None if rng is None else numbers(rng)
        own = extras.of(inputs)
        forward(inputs.q, inputs.k, inputs.v, o_parts, lse_parts, extras=own, numbers=given)
        combine(o_parts, lse_parts, results.o, results.lse)

    return Prepared(run, (*extras.launches, forward, combine))


def _forward(p, inputs, results, gpu, tile: Tile, parts: int, extras: Extras):
    """The attention kernel, on results of the problem or on float32 parts of them; and its numbers
    as a function of the generator's state.
    """
    q, k, v, o = grid.heads_first(p, inputs.q, inputs.k, inputs.v, results.o)
    there = hardware(gpu.capability)
    shape = Shape(
        head_dim=p.d,
        head_dim_v=p.dv,
        turing=there.turing,
        asynchronous=not there.turing and chunked(q, k, v),
        wide=chunked(o),
        vectors=vectors_of(p, inputs, KEYS_OF_RUN),
    )
    numbers = lambda rng=None: (
        np.float32(LOG2E if p.options.changes else p.scale * LOG2E),
        p.low,
        p.high,
        parts,
        parameters_of(p, rng),
    )
    write_lse = results.lse is not None
    forward = Launch(
        "sm80.forward.build",
        (p.dtype, shape, write_lse, p.band, o.dtype.name == "float32", p.options.structure, tile),
        gpu,
        grid=grid.items(p, p.nq, p.hq, tile.block_m) * parts,
        threads=tile.threads,
        shared_bytes=tile.shared_bytes(p.d, p.dv),
        operands=((q, 5), (k, 5), (v, 5), (o, 5), (results.lse, 4)),
        extras=extras.layouts,
        numbers=numbers(),
    )
    return forward, numbers
