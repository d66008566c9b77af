"""What is compared: a cell of the grid, its arrays, and which results are right."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from numba_flash import reference
from numba_flash.bench import options

BOUNDS = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-4, "float64": 1e-10}
"""Largest relative error ``||x - ref|| / ||ref||`` of a contender that is timed."""

ROWS = 128
"""Queries that are checked, spread over the whole length."""


@dataclass(frozen=True)
class Cell:
    """One problem: self-attention of `length` queries and keys.

    Attributes
    ----------
    direction : str
        ``"forward"`` or ``"backward"``.
    mask : str
        ``"full"`` or ``"causal"``.
    dtype : str
        One of `BOUNDS`.
    batch, heads, heads_kv, length, head_dim : int
        B, Hq, Hk, N and D.
    option : str
        One of `numba_flash.bench.options.OPTIONS`.
    """

    direction: str
    mask: str
    dtype: str
    batch: int
    heads: int
    heads_kv: int
    length: int
    head_dim: int
    option: str = "none"

    @property
    def causal(self) -> bool:
        return self.mask == "causal"

    @property
    def group(self) -> int:
        """Query heads per head of keys and values."""
        return self.heads // self.heads_kv

    @property
    def flops(self) -> float:
        """4 B H N^2 D; half of it if causal; 2.5 times as many backward: five products instead of two."""
        forward = 4 * self.batch * self.heads * self.length**2 * self.head_dim
        return forward * (0.5 if self.causal else 1.0) * (2.5 if self.direction == "backward" else 1.0)

    def __str__(self) -> str:
        with_option = "" if self.option == "none" else f"  {self.option}"
        return f"{self.direction:<8} {self.mask:<6} D {self.head_dim:>3}  N {self.length:>5}{with_option}"


class Case:
    """Arrays of a cell, and the check of results against the float64 oracle.

    The oracle sees `ROWS` queries of the last group of heads of the last batch element. Backward, contenders are checked with a gradient
    `sparse_do` that is 0 in all other rows, so that these rows are also all that dk and dv consist of; they are timed with a dense one.

    Parameters
    ----------
    cell : Cell
        The problem.
    xp : module
        NumPy or CuPy, whose arrays are made.
    """

    def __init__(self, cell: Cell, xp):
        self.cell = cell
        heads, n, d = (cell.heads, cell.heads_kv, cell.heads_kv, cell.heads), cell.length, cell.head_dim
        noise = _noise(cell.dtype, 1 << (cell.batch * cell.heads * n * d - 1).bit_length())
        shapes = [(cell.batch, h, n, d) for h in heads]
        q, k, v, do = (x[: np.prod(shape)].reshape(shape) for x, shape in zip(noise, shapes, strict=True))
        self.rows = np.linspace(0, n - 1, min(n, ROWS)).astype(int)
        own = (slice(-cell.group, None), self.rows)
        self._small = (do[-1][own], q[-1][own], k[-1, -1:], v[-1, -1:])
        self.arrays = tuple(map(xp.asarray, (q, k, v)))
        self.do = self.sparse_do = None
        if cell.direction == "backward":
            sparse = np.zeros_like(do)
            sparse[-1][own] = do[-1][own]
            self.do, self.sparse_do = xp.asarray(do), xp.asarray(sparse)

    def expected(self) -> tuple[np.ndarray, ...]:
        """The oracle's o, or dq, dk, dv, of the part that is checked."""
        do, *qkv = self._small
        cell = self.cell
        given = options.of_oracle(cell.option, cell.heads, self.rows, cell.length, cell.dtype)
        if "bias" in given:
            given["bias"] = given["bias"][-cell.group :]
        given["mask"] = np.arange(cell.length) <= self.rows[:, None] if cell.causal else None
        o, lse = reference.forward(*qkv, return_lse=True, **given)
        return (o,) if cell.direction == "forward" else reference.backward(do, *qkv, o, lse, **given)

    def part(self, results: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """The same part of a contender's results, given the last batch element (H, N, D) of each on the host."""
        rowwise, *others = results
        return (rowwise[-self.cell.group :, self.rows], *(x[-1:] for x in others))


def relative_error(results: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> float:
    """Largest ``||x - ref|| / ||ref||`` over the results; NaN if one holds a NaN, infinite if a shape is wrong."""
    if [x.shape for x in results] != [ref.shape for ref in expected]:
        return float("inf")
    errors = [np.linalg.norm(x.astype(np.float64) - ref) / np.linalg.norm(ref) for x, ref in zip(results, expected, strict=True)]
    return float(np.max(errors))


@lru_cache(maxsize=1)
def _noise(dtype: str, size: int) -> tuple[np.ndarray, ...]:
    """Normally distributed values for q, k, v and do; cells of one size share them."""
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(size, dtype=np.float32).astype(dtype_of(dtype)) for _ in range(4))


def dtype_of(name: str) -> np.dtype:
    """The dtype of that name, one of `BOUNDS`."""
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401  (makes the name known to NumPy)
    return np.dtype(name)
