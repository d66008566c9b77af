"""Which arrays that belong to pairs of a query and a key the copy engine of Hopper can bring in
tiles. Numba is not imported here.
"""

from typing import Any, NamedTuple

import numpy as np

from numba_flash.arguments import arrays
from numba_flash.cuda.runtime import tensor_maps
from numba_flash.cuda.sm90.forward.forward_tiles import copying_tile

HALF = ("float16", "bfloat16")


def tiles_of_bias(problem, bias):
    """The `Layout` whose tiles the copy engine can bring, without the axes of heads that a bias of
    16 bits is broadcast along; None if there is no such bias, or it cannot.
    """
    return _tiles_of(problem, bias, 1) if problem.options.bias in HALF else None


def tiles_of_mask(problem, mask):
    """The same of a mask with an element for each pair: of two neighbours as 16 bits."""
    p = problem
    of_pairs = p.options.mask and p.options.blocks is None and p.nk % 2 == 0
    return _tiles_of(p, mask, 2) if of_pairs else None


def _tiles_of(p, x, neighbours: int):
    """Of an array with so many `neighbours` in 16 bits."""
    sizes = (1,) * (5 - len(x.shape)) + tuple(x.shape)
    strides = arrays.expanded_strides(x, 5)
    heads = tuple(n if s else 1 for n, s in zip(sizes[:3], strides[:3], strict=True))
    whole = sizes[3:] == (p.nq, p.nk) and (strides[3] or p.nq == 1)
    if not whole or strides[4] != x.dtype.itemsize:
        return None
    found = x._replace(
        shape=(*heads, p.nq, p.nk // neighbours),
        strides=(*strides[:4], strides[4] * neighbours),
        dtype=np.dtype("uint16") if neighbours > 1 else x.dtype,
    )
    return found if tensor_maps.why_not("", found) is None else None


class Copied(NamedTuple):
    """What the copy engine brings of pairs, "bias" or "mask", and the `Layout` of it."""

    name: str
    tiles: Any


def copied_pairs(p, inputs) -> Copied | None:
    """What of inputs of such layouts the copy engine brings, if there is a tile for it; one that
    lies within the blocks of a mask, if tiles are listed.
    """
    if bool(p.options.bias) == p.options.mask:  # neither, or both
        return None
    name, tiles_of = ("bias", tiles_of_bias) if p.options.bias else ("mask", tiles_of_mask)
    tile, tiles = copying_tile(p, name), tiles_of(p, getattr(inputs, name))
    if tile is None or tiles is None:
        return None
    fits = not p.options.block_sparse or p.options.blocks.divided_by(tile.block_m, tile.block_n)
    return Copied(name, tiles) if fits else None
