"""The forward pass of float32 in the `sm80` tier from the host, where all keys of a head fit into
shared memory.
"""

import math
from typing import NamedTuple

import numpy as np

from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.arguments import build_extras, chunked, vectors_of
from numba_flash.cuda.recipe import Call, Chosen
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.sm80.arguments import Shape
from numba_flash.cuda.sm80.config import ForwardConfig
from numba_flash.cuda.sm80.short_heads.short_head_tiles import (
    HeadTile,
    forward_head_tile,
    many_heads,
)
from numba_flash.cuda.sm80.tiles import hardware
from numba_flash.cuda.work import grid

KEYS_OF_RUN = 8  # neighbours among a lane's scores
MOST_STRIDE = 2**32  # bytes


class Made(NamedTuple):
    """What the kernel writes beside results: int32 (b0, b1, heads of q), heads that it leaves."""

    flags: Layout


def tile_of(call: Call) -> HeadTile | None:
    """The tile of a problem that has one, of arrays whose rows are whole chunks, else None."""
    problem, inputs, results, gpu = call.problem, call.inputs, call.results, call.gpu
    x = inputs.q, inputs.k, inputs.v, results.o
    tile = forward_head_tile(problem, hardware(gpu.capability))
    if tile is None or not many_heads(problem, gpu.multiprocessors) or not chunked(*x):
        return None
    if problem.options.bias:
        if not vectors_of(problem, inputs, KEYS_OF_RUN).bias:
            return None
        x += (inputs.bias,)
    if any(not 0 <= stride < MOST_STRIDE for each in x for stride in each.strides):
        return None
    return None if results.o.dtype.name != "float32" else tile


def prepare(chosen: Chosen) -> Prepared:
    """As `numba_flash.cuda.sm80.forward.prepare_forward.prepare` says."""
    p, tile, (_, inputs, results, gpu, _) = chosen.p, chosen.tile, chosen.call
    extras_of = build_extras(p.options)
    made = Made(Layout.compact((*p.batch, p.hq), "int32"))
    scratch = Scratch(made, ("heads that are left",))
    shape = Shape(
        head_dim=p.d,
        head_dim_v=p.dv,
        turing=False,
        asynchronous=True,
        wide=True,
        planes=2,
    )
    config = ForwardConfig(
        dtype=p.dtype,
        shape=shape,
        write_lse=results.lse is not None,
        band=p.band,
        kv_splits=False,
        options=p.options.structure,
        tile=tile,
    )
    forward = Launch(
        chosen.builder,
        (config,),
        gpu,
        grid=math.prod(made.flags.shape),
        threads=tile.threads,
        shared_bytes=tile.layout(p.d, p.dv).bytes,
        operands=(
            *((inputs.q, 5), (inputs.k, 5), (inputs.v, 5), (results.o, 5), (results.lse, 4)),
            (made.flags, 3),
        ),
        extras=grid.extras_layouts(p, inputs),
        numbers=(np.float32(p.scale),),
    )

    def run(inputs, results, rng=None):
        (flags,) = scratch.beside(inputs.q)
        x = inputs.q, inputs.k, inputs.v, results.o, results.lse
        forward(*x, flags, extras=extras_of(inputs))
        return flags

    return Prepared(run, (forward,), made.flags)
