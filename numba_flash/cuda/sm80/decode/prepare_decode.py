"""Few queries with many keys in the `sm80` tier from the host: which kernels run with which grid.
Numba is not imported here.
"""

import math

import numpy as np

from numba_flash.arguments.problem import Prepared
from numba_flash.cuda.arguments import (
    build_extras,
    chunked,
    parameters_of,
    vectors_of,
)
from numba_flash.cuda.passes import prepare_kv_splits
from numba_flash.cuda.recipe import Chosen
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.sm80.arguments import Shape
from numba_flash.cuda.sm80.config import ForwardConfig
from numba_flash.cuda.sm80.decode.decode_tiles import (
    ENOUGH_BLOCKS,
    FEW_TILES_EACH,
    MOST_JOINED,
    asked,
)
from numba_flash.cuda.sm80.tiles import hardware
from numba_flash.cuda.work import grid
from numba_flash.cuda.work.prepare_lengths import numbers_of, with_numbers

LOG2E = math.log2(math.e)
KEYS_OF_RUN = 8  # neighbours among a lane's scores


def prepare(chosen: Chosen) -> Prepared:
    """``run(inputs, results, rng)`` on arrays like the call's layouts; `rng` is left out if there
    is no dropout.
    """
    p, tile, gpu = chosen.p, chosen.tile, chosen.call.gpu
    if not p.options.dropout:
        p = with_numbers(p, chosen.call.inputs)
        chosen = chosen._replace(p=p)
    blocks = min(ENOUGH_BLOCKS, tile.resident(p.d, p.dv, hardware(gpu.capability)))
    kv_splits = grid.decode_kv_splits(p, tile, gpu.multiprocessors * blocks)
    if kv_splits > MOST_JOINED and p.nk <= MOST_JOINED * FEW_TILES_EACH * tile.block_n:
        kv_splits = MOST_JOINED
    if kv_splits == 1:
        return _prepare_whole(chosen)
    if kv_splits > MOST_JOINED:
        return _prepare_kv_splits(chosen, kv_splits)
    return _prepare_joined(chosen, kv_splits)


def _prepare_whole(chosen: Chosen) -> Prepared:
    """All keys at once."""
    forward, numbers = _forward(chosen, chosen.call.results, 1)
    extras_of = build_extras(chosen.p.options)

    def run(inputs, results, rng=None):
        q, k, v, extras = inputs.q, inputs.k, inputs.v, extras_of(inputs)
        forward.on((q, k, v, *results, None, None, None), extras, numbers(inputs, rng))

    return Prepared(run, (forward,))


def _prepare_joined(chosen: Chosen, kv_splits: int) -> Prepared:
    """By way of float32 results over parts of the keys, made one by the last block of each."""
    partial = prepare_kv_splits.layouts(chosen.p, kv_splits)
    forward, numbers = _forward(chosen, partial, kv_splits, chosen.call.results)
    extras_of, count = build_extras(chosen.p.options), forward.grid // kv_splits
    scratch = prepare_kv_splits.scratch(partial)

    def run(inputs, results, rng=None):
        o, lse = scratch.beside(inputs.q)
        arrivals = prepare_kv_splits.arrivals(inputs.q, count)
        q, k, v, extras = inputs.q, inputs.k, inputs.v, extras_of(inputs)
        forward.on((q, k, v, o, lse, *results, arrivals), extras, numbers(inputs, rng))

    return Prepared(run, (forward,))


def _prepare_kv_splits(chosen: Chosen, kv_splits: int) -> Prepared:
    """The same of so many parts that another kernel combines them."""
    partial = prepare_kv_splits.layouts(chosen.p, kv_splits)
    forward, numbers = _forward(chosen, partial, kv_splits)
    combine = prepare_kv_splits.combine_many(
        partial, chosen.call.results, chosen.call.gpu, kv_splits
    )
    extras_of, scratch = build_extras(chosen.p.options), prepare_kv_splits.scratch(partial)

    def run(inputs, results, rng=None):
        o, lse = scratch.beside(inputs.q)
        q, k, v, extras = inputs.q, inputs.k, inputs.v, extras_of(inputs)
        forward.on((q, k, v, o, lse, None, None, None), extras, numbers(inputs, rng))
        combine(o, lse, *results)

    return Prepared(run, (forward, combine))


def _forward(chosen: Chosen, into, kv_splits: int, whole=None):
    """The kernel, on results of the problem, or on float32 parts of them, which it joins if there
    are `whole` ones; and ``numbers(inputs, rng)`` of a call.
    """
    p, tile, inputs, gpu = chosen.p, chosen.tile, chosen.call.inputs, chosen.call.gpu
    joined = whole is not None
    whole_o, whole_lse = whole if joined else (None, None)
    last = whole if joined else into
    items = grid.items(p, p.nq * tile.group, p.hk, tile.block_m)
    shape = Shape(
        head_dim=p.d,
        head_dim_v=p.dv,
        turing=hardware(gpu.capability).turing,
        asynchronous=not hardware(gpu.capability).turing and chunked(inputs.q, inputs.k, inputs.v),
        wide=False,
        vectors=vectors_of(p, inputs, KEYS_OF_RUN),
    )
    drawn = lambda rng=None: (
        np.float32(LOG2E if p.options.changes else p.scale * LOG2E),
        p.low,
        p.high,
        kv_splits,
        parameters_of(p, rng),
    )
    known = numbers_of(p, drawn())
    operands = (inputs.q, 5), (inputs.k, 5), (inputs.v, 5), (into.o, 5), (into.lse, 4)
    config = ForwardConfig(
        dtype=p.dtype,
        shape=shape,
        write_lse=last.lse is not None,
        band=p.band,
        kv_splits=kv_splits > 1,
        options=p.options.structure,
        tile=tile,
        out=last.o.dtype.name,
        joined=asked(kv_splits) * joined,
    )
    forward = Launch(
        chosen.builder,
        (config,),
        gpu,
        grid=items * kv_splits,
        threads=tile.threads,
        shared_bytes=tile.shared_bytes(p.d, p.dv),
        operands=(
            *operands,
            *((whole_o, 5), (whole_lse, 4)),
            (prepare_kv_splits.arrivals_layout(items) if joined else None, 1),
        ),
        extras=grid.extras_layouts(p, inputs),
        numbers=known.prepared,
    )

    def numbers(inputs, rng):
        if known.of:
            return known.of(inputs)
        return None if rng is None else drawn(rng)

    return forward, numbers
