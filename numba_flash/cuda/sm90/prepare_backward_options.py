"""The backward pass of the `sm90` tier with bias, mask, dropout or a function of the score, or with
lists of tiles alone, from the host: kernels and grids.
"""

import math

import numpy as np

from numba_flash.cuda import grid
from numba_flash.cuda.arguments import build_extras, parameters_of, vectors_of
from numba_flash.cuda.launch import Launch
from numba_flash.cuda.prepare_tile_lists import Extras, Tiles
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.sm90 import prepare_turns
from numba_flash.cuda.sm90.arguments import LOG2E, Sizes, scales
from numba_flash.cuda.sm90.prepare_backward import (
    Pass,
    boxes,
    config_of,
    preprocess_launch,
    sizes_of,
)
from numba_flash.cuda.sm90.prepare_pairs import tiles_of_bias
from numba_flash.cuda.sm90.prepare_temporaries import row_blocks_of, temporaries
from numba_flash.cuda.sm90.tiles import DQ_PART, KEYS, WARP_GROUP
from numba_flash.problem import BackwardResults, Prepared

KEYS_OF_RUN = 2  # neighbours among a lane's scores
# Bytes of sums of dq of heads whose blocks of keys are handed out together, where these wait for
# each other at tiles of lists: the more heads, the fewer blocks of one are at work at the same
# time, and the less they wait, but the less of the sums is in the L2 cache. D = 128, N = 16384, 16
# heads, random blocks of which 50, 20, 10 and 5 % are visible, on an H200: 6.3, 2.8, 1.6, 1.03 ms;
# half as many bytes 6.4, 3.2, 1.9, 1.32; twice as many 7.1, 3.0, 1.6, 0.96.
SUMS_AT_WORK = 2**26


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results, rng)`` on arrays like the call's layouts; `rng` is left out if there
    is no dropout.
    """
    p, tile, (_, inputs, results, gpu, deterministic) = chosen.p, chosen.tile, chosen.call
    bias_tiles = tiles_of_bias(p, inputs.bias)
    row_blocks = row_blocks_of(p, tile)
    do, q, k, v, o = grid.heads_first(p, inputs.do, inputs.q, inputs.k, inputs.v, inputs.o)
    this = Pass(
        p=p,
        tile=tile,
        loops=chosen.recipe.loops,
        gpu=gpu,
        ordered=prepare_turns.ordered(p, tile, deterministic),
        inputs=inputs._replace(do=do, q=q, k=k, v=v, o=o),
        results=BackwardResults(*grid.heads_first(p, *results[:3])),
        row_blocks=row_blocks,
        temporaries=temporaries(p, tile, row_blocks, gpu.multiprocessors),
    )
    share, queue = (1, False) if deterministic else (0, p.options.listed)
    tiles = Tiles(tile.block_m, tile.block_n, transposed=True, share=share, queue=queue)
    lists, preprocess = Extras(p, gpu, inputs, tiles), preprocess_launch(this)
    (main, numbers), postprocess = _main(this, lists, bias_tiles), _postprocess(this, lists, tiles)
    extras_of, scratch = build_extras(p.options), this.temporaries.scratch()
    dbias = None
    if chosen.beside is not None:
        dbias = chosen.beside.recipe.prepare(chosen.beside, this.inputs, this.temporaries.rows)

    def run(inputs, results, rng=None):
        x, there, own = inputs, scratch.beside(inputs.q), lists.of(inputs)
        dq, dk, dv = results[:3]
        rows, sums, flags, _ = there
        preprocess(x.do, x.o, x.lse, x.dlse, rows, sums, flags, extras=extras_of(inputs))
        mapped = (x.do, x.q, x.k, x.v, dk, dv, x.bias)[: len(main.maps)]
        given = None if rng is None else numbers(rng)
        main(*mapped, dk, dv, rows[0], rows[1], sums, flags, extras=own, numbers=given)
        postprocess(sums, dq, extras=own)
        if dbias is not None:
            dbias.run(x, rows, results.dbias, rng)

    launches = () if dbias is None else dbias.launches
    made = (*lists.launches, preprocess, main, postprocess, *launches)
    return Prepared(run, made, sums=this.temporaries.sums(p))


def _sizes_of(this: Pass) -> Sizes:
    """Numbers of the main kernel's work."""
    p, sizes = this.p, sizes_of(this)
    if not (this.ordered and p.options.listed):
        return sizes
    sums_of_a_head = 4 * DQ_PART * this.tile.consumers * -(-p.nq // this.tile.block_m)
    return sizes._replace(section=max(1, SUMS_AT_WORK // sums_of_a_head))


def _main(this: Pass, lists: Extras, bias_tiles):
    """The main kernel, and its numbers as a function of the generator's state."""
    p, tile, results, there = this.p, this.tile, this.results, this.temporaries
    sizes = _sizes_of(this)
    scale_log2 = np.float32(LOG2E if p.options.changes else p.scale * LOG2E)
    numbers = lambda rng=None: (sizes, scale_log2, np.float32(p.scale), parameters_of(p, rng))
    vectors = vectors_of(p, this.inputs, KEYS_OF_RUN)
    if p.options.only_lists:
        numbers = lambda: (sizes, scales(p))
    main = Launch(
        f"{this.loops[0]}.build",
        (config_of(this, vectors),),
        this.gpu,
        grid=min(sizes.items, this.gpu.multiprocessors),
        threads=tile.threads,
        shared_bytes=tile.layout(p.d, p.dv).bytes,
        operands=(
            *((results.dk.words(), 5), (results.dv.words(), 5)),
            *((this.rows, 4), (this.rows, 4), (there.dq_sum, 5), (there.flags, 1)),
        ),
        extras=lists.layouts,
        numbers=numbers(),
        maps=(*boxes(this), *(((bias_tiles, KEYS),) if bias_tiles is not None else ())),
    )
    return main, numbers


def _postprocess(this: Pass, lists: Extras, tiles: Tiles) -> Launch:
    """dQ, rounded."""
    p, tile = this.p, this.tile
    return Launch(
        "sm90.postprocess.build",
        (p.dtype, p.d, p.options.arrays, tile, tiles.names if p.options.tiled else ()),
        this.gpu,
        grid=math.prod(this.row_blocks),
        threads=WARP_GROUP * tile.consumers,
        operands=((this.temporaries.dq_sum, 5), (this.results.dq.words(), 5)),
        extras=lists.layouts,
        numbers=(p.nk, p.low, p.high, np.float32(p.scale)),
    )
