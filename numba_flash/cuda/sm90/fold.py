"""Queries of all heads that share keys as the rows of one head: a tile reads keys for all of them.

Arrays stay where they are, as what a kernel sees is a layout. Numba is not imported here.
"""

from dataclasses import replace
from typing import NamedTuple

from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import ForwardInputs, ForwardResults, Problem


class Folded(NamedTuple):
    """What a tier's kernels see in the place of a call's problem and layouts; of results, o is None
    where its rows are not at equal distances.
    """

    problem: Problem
    inputs: ForwardInputs
    results: ForwardResults


def rows(problem) -> int:
    """Queries of all heads that share keys."""
    return problem.nq * (problem.hq // problem.hk) if problem.hk else 0


def folded(problem, inputs, results, block_m: int) -> Folded | None:
    """The same with as many heads of queries as of keys, if a head's queries do not fill a block of
    rows, if that leaves fewer blocks, and if no row sees other keys than the rest; None otherwise.
    """
    p, options = problem, problem.options
    if not p.hk or p.hq == p.hk or p.nq >= block_m or p.band != "none":
        return None
    if (
        options.packed
        or options.q_lengths
        or options.modifies_beyond_softcap
        or options.block_sparse
    ):
        return None
    group, together = p.hq // p.hk, rows(p)
    if -(-together // block_m) >= group:
        return None
    q, o, lse = _merged(inputs.q, group, 2), _merged(results.o, group, 2), results.lse
    there = ForwardResults(o, _merged(lse, group, 1))
    if q is None or (lse is not None and there.lse is None):
        return None
    one = replace(p, hq=p.hk, nq=together, low=-together)
    return Folded(one, inputs._replace(q=q), there)


def _merged(x: Layout | None, group: int, last: int) -> Layout | None:
    """The layout of (..., heads / group, group * n, d) on the memory of (..., heads, n, d), or
    without d; None if rows are not at equal distances there.
    """
    if x is None:
        return None
    at = x.ndim - last
    (heads, n), (of_head, of_row) = x.shape[at - 1 : at + 1], x.strides[at - 1 : at + 1]
    if n == 1:
        of_row = of_head
    elif of_head != n * of_row:
        return None
    shape = (*x.shape[: at - 1], heads // group, group * n, *x.shape[at + 1 :])
    strides = (*x.strides[: at - 1], group * of_head, of_row, *x.strides[at + 1 :])
    return x._replace(shape=shape, strides=strides)
