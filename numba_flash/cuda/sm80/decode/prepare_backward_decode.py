"""The backward pass of few queries with many keys in the `sm80` tier from the host: which kernels
run with which grid. Numba is not imported here.
"""

import math
from typing import NamedTuple

import numpy as np

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.arguments import build_extras, chunked
from numba_flash.cuda.passes.prepare_dbias import sum_shares
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.sm80.arguments import Shape
from numba_flash.cuda.sm80.config import BackwardConfig
from numba_flash.cuda.sm80.tiles import hardware
from numba_flash.cuda.work import grid

LOG2E = math.log2(math.e)


class Partial(NamedTuple):
    """Results over parts of the keys."""

    dq: Layout | None


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results)`` on arrays like the call's layouts, the same bits in every run."""
    p, tile, (_, _, results, gpu, _) = chosen.p, chosen.tile, chosen.call
    kv_splits = grid.decode_kv_splits(p, tile, gpu.multiprocessors * tile.min_blocks, whole=True)
    if kv_splits == 1:
        return _prepare_whole(chosen)
    sizes = *p.batch, p.hq, p.nq, p.d
    partial = Partial(Layout.compact((kv_splits * sizes[0], *sizes[1:]), "float32"))
    main = _main(chosen, results._replace(dq=partial.dq), kv_splits)
    add = sum_shares(Layout.compact((kv_splits, *sizes), "float32"), results.dq, p.dtype, gpu)
    extras_of, scratch = build_extras(p.options), Scratch(partial, ("parts of dq",))

    def run(inputs, results):
        x, (dq,) = inputs, scratch.beside(inputs.q)
        arrays = x.do, x.q, x.k, x.v, x.o, x.lse, x.dlse, results.dk, results.dv, dq
        main(*arrays, extras=extras_of(x))
        add(dq, results.dq)

    return Prepared(run, (main, add))


def _prepare_whole(chosen: Chosen) -> Prepared:
    """All keys of a head by one block."""
    main, extras_of = _main(chosen, chosen.call.results, 1), build_extras(chosen.p.options)

    def run(inputs, results):
        x, y = inputs, results
        arrays = x.do, x.q, x.k, x.v, x.o, x.lse, x.dlse, y.dk, y.dv, y.dq
        main(*arrays, extras=extras_of(x))

    return Prepared(run, (main,))


def _main(chosen: Chosen, y, kv_splits: int) -> Launch:
    """The kernel, on results y, of which dq may be parts."""
    p, tile, x, gpu = chosen.p, chosen.tile, chosen.call.inputs, chosen.call.gpu
    turing = hardware(gpu.capability).turing
    shape = Shape(
        head_dim=p.d,
        head_dim_v=p.dv,
        turing=turing,
        asynchronous=not turing and chunked(x.do, x.q, x.k, x.v),
        wide=chunked(y.dk, y.dv),
    )
    config = BackwardConfig(
        dtype=p.dtype,
        shape=shape,
        options=p.options.structure,
        tile=tile,
        dlse=x.dlse is not None,
        kv_splits=kv_splits > 1,
    )
    return Launch(
        chosen.builder,
        (config,),
        gpu,
        grid=grid.items(p, p.nq * tile.group, p.hk, tile.block_m) * kv_splits,
        threads=tile.threads,
        shared_bytes=tile.layout(p.d, p.dv).bytes,
        operands=(
            *((x.do, 5), (x.q, 5), (x.k, 5), (x.v, 5), (x.o, 5), (x.lse, 4), (x.dlse, 4)),
            *((y.dk, 5), (y.dv, 5), (y.dq, 5)),
        ),
        extras=grid.extras_layouts(p, x),
        numbers=(np.float32(p.scale * LOG2E), np.float32(p.scale), p.low, p.high, kv_splits),
    )
