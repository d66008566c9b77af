"""Arguments of a call, before anything is computed."""

from collections.abc import Callable
from typing import Any

import dask.array as da
import numpy as np

from numba_flash.arguments import arrays, checks, signatures
from numba_flash.arguments.block_mask import BlockMask
from numba_flash.arguments.options import SHARING

REFUSED = {
    "score_mod": "it gets the numbers of queries and keys, which a block does not know; a bias may hold what it adds",
    "score_mod_grad": "there is no score_mod",
    "q_lengths": "chunks say where sequences end",
    "kv_lengths": "chunks say where sequences end; a mask (batch, 1, 1, Nk) hides padding",
    "deterministic": "gradients are added in a fixed order, so that equal chunks give equal bits",
    "axes": "heads come before queries and keys; x.swapaxes(-3, -2) has them so",
    "out": "results are computed when they are asked for, into arrays of their own",
}


def refuse(function: Callable[..., Any], others: dict) -> None:
    """Raise if a public function is given an argument that blocks have no use for."""
    for name in others:
        if name in REFUSED:
            raise NotImplementedError(f"numba_flash.dask does not take {name}: {REFUSED[name]}")
    if others:
        signatures.refuse(function, others)


def adopted(name: str, x):
    """A bias or mask, if there is one, as dask array, NumPy or CuPy array."""
    if x is None or isinstance(x, da.Array):
        return x
    if isinstance(x, BlockMask):
        raise NotImplementedError("numba_flash.dask takes no BlockMask, whose blocks are not the chunks'; mask.dense(nq, nk) has pairs")
    x = checks.adopt(name, x)
    checks.layout(name, x)
    return x


def on_paper(name: str, x):
    """An array of this shape and dtype that takes no memory; None of None."""
    if x is None:
        return None
    if name not in ("bias", "mask") and not isinstance(x, da.Array):
        raise TypeError(f"{name} must be a dask array; got {type(x).__name__}, which numba_flash.forward and backward take")
    if any(n != n for n in x.shape):
        raise ValueError(f"{name} must have chunks of known sizes; {name}.compute_chunk_sizes() finds them out")
    return np.broadcast_to(np.empty((), x.dtype), x.shape)


def check_libraries(given: dict) -> None:
    """Raise if some blocks lie in host memory, and others on a GPU; a bias or mask that is no dask array goes where it is wanted."""
    library = {name: arrays.library(x._meta if isinstance(x, da.Array) else x) for name, x in given.items() if x is not None}
    for name, own in library.items():
        if own in (None, library["q"]) or library["q"] is None or (own == "numpy" and not isinstance(given[name], da.Array)):
            continue
        raise TypeError(f"{name} has blocks of {own}, and q of {library['q']}: map_blocks(cupy.asarray), or cupy.asnumpy, moves them")


def check_dropout(leading: list[tuple[int, ...]], columns: tuple[int, ...]) -> None:
    """Raise unless blocks with these chunks along batch and heads, and along keys, have bits of the whole."""
    if any(len(chunks) > 1 for chunks in leading):
        axes = ", ".join(f"{axis}: -1" for axis in range(len(leading)))
        raise ValueError(
            "dropout needs all batch elements and heads in one chunk, as their numbers decide on its bits;"
            f" got chunks {(*leading,)}: q, k and v.rechunk({{{axes}}})"
        )
    starts = [0, *np.cumsum(columns[:-1]).tolist()]
    if any(start % SHARING for start in starts):
        raise ValueError(f"dropout needs chunks of k and v that begin at multiples of {SHARING}; they begin at {starts}")
