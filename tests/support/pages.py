"""Keys and values in pages for tests: what `forward` would be given, cut up, scattered over a cache in which everything else is NaN."""

from typing import NamedTuple

import numpy as np

from support import laid_out

GARBAGE = (-(2**31), -1, 2**31 - 1)  # entries that nobody may use


class Paged(NamedTuple):
    """What `numba_flash.forward_paged` is given, in its order; and the keys and values that it stands for, NaN beyond the lengths."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    kv_lengths: np.ndarray
    k: np.ndarray
    v: np.ndarray


def paged(q, k, v, kv_lengths, size: int, *, shared: int = 0, more: int = 0, dtype=np.int32, seed: int = 0) -> Paged:
    """Arrays (..., heads, n, d) as pages of `size` keys.

    Parameters
    ----------
    q, k, v, kv_lengths : array
        As `forward` takes them; beyond the lengths, and up to whole pages, keys and values become NaN.
    size : int
        Keys of a page.
    shared : int
        So many pages of the first sequence are those of all that are long enough.
    more : int
        Entries of the table that nobody needs.
    dtype : dtype
        Of the table.
    seed : int
        Of the order of pages.
    """
    rng = np.random.default_rng(seed)
    batch, most = q.shape[:-3], -(-k.shape[-2] // size) + more
    tokens = most * size
    wide = [np.full((*x.shape[:-2], tokens, x.shape[-1]), np.nan, x.dtype) for x in (k, v)]
    for x, given in zip(wide, (k, v), strict=True):
        x[..., : k.shape[-2], :] = given
    pages = int(np.prod(batch)) * most + 3
    free = rng.permutation(pages)
    caches = [np.full((pages, x.shape[-3], size, x.shape[-1]), np.nan, x.dtype) for x in wide]
    table = rng.choice(GARBAGE, (*batch, most)).astype(dtype)
    first = (0,) * len(batch)
    for number, at in enumerate(np.ndindex(*batch)):
        length = int(kv_lengths[at])
        for t in range(-(-length // size)):
            rows = slice(t * size, min((t + 1) * size, length))
            together = t < shared and (t + 1) * size <= min(length, int(kv_lengths[first]))
            table[(*at, t)] = table[(*first, t)] if together and number else free[number * most + t]
            for x, cache in zip(wide, caches, strict=True):
                if together and number:
                    x[at][:, rows] = x[first][:, rows]
                cache[table[(*at, t)], :, : rows.stop - rows.start] = x[at][:, rows]
        for x in wide:
            x[at][:, length:] = np.nan
    return Paged(q, *caches, table, kv_lengths, *wide)


def forward(backend, given: Paged, layouts=("contiguous",) * 3, **options) -> dict:
    """o and lse of a backend, by name, on the host."""
    q, k, v = (laid_out(backend, x, layout) for x, layout in zip(given[:3], layouts, strict=True))
    o, lse = backend.forward_paged(q, k, v, *map(backend.to_device, given[3:5]), return_lse=True, **options)
    return {"o": backend.to_host(o), "lse": backend.to_host(lse)}
