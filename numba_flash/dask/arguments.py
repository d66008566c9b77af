"""Arguments of a call, before anything is computed."""

import dask.array as da
import numpy as np

from numba_flash import checks

REFUSED = {
    "dropout": "its bits depend on the place in the whole matrix, which a block does not know",
    "rng": "there is no dropout",
    "score_mod": "it gets the numbers of queries and keys, which a block does not know; a bias may hold what it adds",
    "score_mod_grad": "there is no score_mod",
    "q_lengths": "chunks say where sequences end",
    "kv_lengths": "chunks say where sequences end; a mask (batch, 1, 1, Nk) hides padding",
    "out": "results are computed when they are asked for, into arrays of their own",
}


def refuse(others: dict) -> None:
    """Raise if there is an argument that blocks have no use for."""
    for name in others:
        if name in REFUSED:
            raise NotImplementedError(f"numba_flash.dask does not take {name}: {REFUSED[name]}")
        raise TypeError(f"{name} is not an option of numba_flash.dask")


def adopted(name: str, x):
    """A bias or mask, if there is one, as dask array, NumPy or CuPy array."""
    if x is None or isinstance(x, da.Array):
        return x
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
