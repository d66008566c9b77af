"""The band and its ranges against the definition of visibility, exhaustively on small problems."""

import itertools

import numpy as np
import pytest
from numba import njit
from support import dense_visible

from numba_flash import mask
from numba_flash.arguments.problem import Problem, bind

FAR = 2**40
SIZES = [-1, 0, 1, 3, FAR]


def problem(nq, nk, **options) -> Problem:
    return bind(np.zeros((nq, 1), np.float32), np.zeros((nk, 1), np.float32), np.zeros((nk, 1), np.float32), **options)


def options(nq, nk):
    """All combinations that can differ on such a problem, and some that lie far outside."""
    starts = [None, -FAR, *range(-nq - 2, nk + 3), FAR]
    for causal, left, right, q_start in itertools.product((False, True), SIZES, SIZES, starts):
        yield {"causal": causal, "window": (left, right), "q_start": q_start}


@njit
def same_elements(visible, low, high):
    for i in range(visible.shape[0]):
        for j in range(visible.shape[1]):
            if mask.visible(i, j, low, high) != visible[i, j]:
                return False
    return True


@njit
def same_ranges(visible, low, high):
    """True if `kv_range`, `q_range` and `all_visible` say of every block what `visible` says."""
    nq, nk = visible.shape
    for i0 in range(nq):
        for i1 in range(i0 + 1, nq + 1):
            start, stop = mask.kv_range(i0, i1, nk, low, high)
            for j in range(-1, nk + 1):
                seen = 0 <= j < nk and visible[i0:i1, j].any()
                if seen != (start <= j < stop):
                    return False
            for j0 in range(nk):
                for j1 in range(j0 + 1, nk + 1):
                    if mask.all_visible(i0, i1, j0, j1, low, high) != visible[i0:i1, j0:j1].all():
                        return False
    for j0 in range(nk):
        for j1 in range(j0 + 1, nk + 1):
            start, stop = mask.q_range(j0, j1, nq, low, high)
            for i in range(-1, nq + 1):
                sees = 0 <= i < nq and visible[i, j0:j1].any()
                if sees != (start <= i < stop):
                    return False
    return True


@pytest.mark.parametrize("nk", range(6))
@pytest.mark.parametrize("nq", range(5))
def test_band_and_ranges_equal_the_definition(nq, nk):
    for chosen in options(nq, nk):
        p = problem(nq, nk, **chosen)
        visible = dense_visible(nq, nk, **chosen)
        assert -nq <= p.low <= nk, chosen
        assert -nq <= p.high <= nk, chosen
        assert same_elements(visible, p.low, p.high), chosen
        assert same_ranges(visible, p.low, p.high), chosen


def test_window_none_is_no_limit():
    assert problem(3, 5) == problem(3, 5, window=(-1, -1)) == problem(3, 5, window=(FAR, FAR), q_start=0)


def test_causal_is_a_window_to_the_left():
    assert problem(3, 5, causal=True) == problem(3, 5, window=(-1, 0)) == problem(3, 5, window=(-1, 7), causal=True)


def test_ranges_exclude_what_lies_outside_at_any_distance():
    """A block beyond the band has an empty range, whose ends may lie anywhere but do not overlap."""
    low, high = -(2**30), -(2**29)
    start, stop = mask.kv_range(0, 64, 2**30, low, high)
    assert start >= stop
    start, stop = mask.q_range(2**30 - 64, 2**30, 64, low, high)
    assert start >= stop
