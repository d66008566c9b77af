"""Keys and values in pages, and the table that says which pages are a sequence's: what an option knows of them, and their checks."""

from typing import Any, NamedTuple

import numpy as np

from numba_flash.arguments import arrays, checks
from numba_flash.arguments.axes import USUAL, Axes

TABLES = ("int32", "int64")  # dtypes of numbers of pages


class Pages(NamedTuple):
    """How keys and values lie in pages.

    Attributes
    ----------
    size : int
        Keys of a page.
    table : str
        Dtype of the table's entries.
    """

    size: int
    table: str


class PagedInputs(NamedTuple):
    """`problem.ForwardInputs` with k and v in pages (pages, heads, size, d), and the table (..., most pages).

    Attributes
    ----------
    AXES : Axes
        As of those.
    CALLED : tuple of str
        What the user calls them.
    """

    AXES = USUAL
    CALLED = ("q", "k_pages", "v_pages", "bias", "mask", "q_lengths", "kv_lengths", "page_table")

    q: Any
    k: Any
    v: Any
    bias: Any = None
    mask: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    page_table: Any = None


def check_call(kind: str, axes: Axes) -> None:
    """Raise unless calls with pages compute that kind of results on arrays with such axes."""
    if axes is not USUAL:
        raise TypeError(f"axes must be {USUAL.name!r} with a page_table: q is (..., {USUAL.said}); got {axes.name!r}")
    if kind != "forward":
        raise ValueError(f"kind must be 'forward' with a page_table: there are no gradients of keys in pages; got {kind!r}")


def check(q, k_pages, v_pages, page_table) -> None:
    """Raise unless these may be pages (pages, heads, size, d) for q, and the table of each of its batch elements."""
    for name, x in (("k_pages", k_pages), ("v_pages", v_pages)):
        checks.layout(name, x)
        checks.library(name, x, "q", q)
        if x.dtype != q.dtype:
            raise TypeError(f"{name}.dtype ({x.dtype.name}) must equal q.dtype ({q.dtype.name})")
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions (pages, heads, keys of a page, head_dim); got shape {tuple(x.shape)}")
    if k_pages.shape[-1] != q.shape[-1]:
        raise ValueError(f"k_pages.shape[-1] ({k_pages.shape[-1]}) must equal q.shape[-1] ({q.shape[-1]})")
    if v_pages.shape[:-1] != k_pages.shape[:-1]:
        raise ValueError(f"v_pages.shape[:-1] {tuple(v_pages.shape[:-1])} must equal k_pages.shape[:-1] {tuple(k_pages.shape[:-1])}")
    if k_pages.shape[2] < 1:
        raise ValueError(f"k_pages.shape[2] ({k_pages.shape[2]}), the keys of a page, must be at least 1")
    _check_table("page_table", page_table, q)


def _check_table(name: str, x, q) -> None:
    """A NumPy table goes with any q; one on a GPU needs q there too."""
    checks.layout(name, x)
    if x.dtype.name not in TABLES:
        raise TypeError(f"{name}.dtype ({x.dtype.name}) must be {' or '.join(TABLES)}")
    if arrays.library(x) == "cupy":
        checks.library(name, x, "q", q)
    batch = tuple(q.shape[:-3])
    if x.ndim != len(batch) + 1 or tuple(x.shape[:-1]) != batch:
        belong = f"q (B, Hq, Nq, D) goes with {name} (B, most pages) and kv_lengths (B,), and q (Hq, Nq, D) with (most pages,) and ()"
        if q.ndim == 3 and q.shape[:1] == x.shape[:-1]:
            belong += "; pass q[:, :, None] if q is (B, Hq, D)"
        raise ValueError(f"{name}.shape {tuple(x.shape)} must be q.shape[:-3] {batch} and the most pages of a sequence: {belong}")


def check_values(name: str, x, kv_lengths, size: int, pages: int) -> None:
    """Raise if an entry that these lengths make use of names none of the `pages`, where both arrays are NumPy's."""
    if not (isinstance(x, np.ndarray) and isinstance(kv_lengths, np.ndarray)):
        return
    used = np.arange(x.shape[-1]) * size < kv_lengths[..., None]
    bad = used & ((x < 0) | (x >= pages))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        where = ", ".join(map(str, at))
        raise ValueError(f"{name} must name one of the {pages} pages wherever a sequence has keys; {name}[{where}] is {x[at]}")
