"""Which keys a query sees: scalar predicates shared by the CPU and every CUDA kernel.

`causal`, `window` and `q_start` (DESIGN: ``i + q_start - left <= j <= i + q_start + right``) are one condition on the diagonal index
``j - i``. `problem.bind` folds them into two integers,

    query i sees key j   iff   low <= j - i <= high,

and clips both to ``[-nq, nk]``, where they can no longer change the result. Kernels first ask for a range (`kv_range`, `q_range`), so
that tiles outside the band are never touched, and test single elements (`visible`) only in tiles that `all_visible` cannot clear.
"""

from numba import njit


@njit
def visible(i, j, low, high):
    """True if query `i` sees key `j`."""
    return (j - i >= low) and (j - i <= high)


@njit
def all_visible(i0, i1, j0, j1, low, high):
    """True if every query in ``[i0, i1)`` sees every key in ``[j0, j1)``."""
    return (j0 - (i1 - 1) >= low) and (j1 - 1 - i0 <= high)


@njit
def kv_range(i0, i1, nk, low, high):
    """Keys ``[start, stop)`` that at least one query in ``[i0, i1)`` sees; start >= stop if there are none."""
    return max(0, i0 + low), min(nk, i1 + high)


@njit
def clear_range(i0, i1, n, nk, low, high):
    """Where tiles of `n` keys begin, ``[start, stop)``, that every query in ``[i0, i1)`` sees as a whole."""
    return i1 - 1 + low, min(nk, i0 + high + 1) - n + 1


@njit
def q_range(j0, j1, nq, low, high):
    """Queries ``[start, stop)`` that see at least one key in ``[j0, j1)``; start >= stop if there are none."""
    return max(0, j0 - high), min(nq, j1 - low)
