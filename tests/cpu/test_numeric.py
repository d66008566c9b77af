"""Conversions over every bit pattern, exp2 in ulp, the row maximum over special values."""

import ml_dtypes
import numpy as np
import pytest
from numba import njit

from numba_flash import numeric

HALVES = {
    "float16": (np.float16, numeric.float16_to_float32, numeric.float32_to_float16),
    "bfloat16": (ml_dtypes.bfloat16, numeric.bfloat16_to_float32, numeric.float32_to_bfloat16),
}
half = pytest.mark.parametrize("name", HALVES)


def mapped(function, x, dtype):
    """`function` of every element, compiled as a loop, so that it is tested vectorised as in the kernels."""

    @njit
    def loop(x, y):
        for i in range(x.size):
            y[i] = function(x[i])

    y = np.empty(x.shape, dtype)
    loop(x, y)
    return y


@half
def test_widening_is_exact_for_every_pattern(name):
    dtype, widen, _ = HALVES[name]
    bits = np.arange(2**16, dtype=np.uint16)
    np.testing.assert_array_equal(mapped(widen, bits, np.float32), bits.view(dtype).astype(np.float32))


@half
def test_narrowing_inverts_widening(name):
    dtype, _, narrow = HALVES[name]
    bits = np.arange(2**16, dtype=np.uint16)
    values = bits.view(dtype).astype(np.float32)
    got = mapped(narrow, values, np.uint16)
    np.testing.assert_array_equal(got[~np.isnan(values)], bits[~np.isnan(values)])
    assert np.isnan(got[np.isnan(values)].view(dtype).astype(np.float32)).all()


@half
def test_narrowing_rounds_to_nearest_even(name):
    """Every midpoint of neighbours and its neighbours in float32, and random floats of every exponent."""
    dtype, _, narrow = HALVES[name]
    grid = np.arange(2**15, dtype=np.uint16).view(dtype).astype(np.float32)
    grid = grid[np.isfinite(grid)]
    middle = ((grid[:-1].astype(np.float64) + grid[1:]) / 2).astype(np.float32)
    random = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32).view(np.float32)
    above, below = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))
    x = np.concatenate([middle, above, below, -middle, random, np.float32([65519.996, 65520, 3.4e38, np.inf, -np.inf, 0, -0.0])])
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(mapped(narrow, x, np.uint16), x.astype(dtype).view(np.uint16))


@njit
def exp2_of(x, y):
    for i in range(x.size):
        y[i] = numeric.exp2(x[i])


def ulp_error(x):
    """Largest error of exp2 at `x`, in units in the last place of the exact value."""
    y = np.empty_like(x)
    exp2_of(x, y)
    exact = np.exp2(x.astype(np.longdouble))
    return float((np.abs(y - exact) / np.spacing(exact.astype(x.dtype))).max())


def test_exp2_float32_is_within_two_ulp():
    rng = np.random.default_rng(0)
    assert ulp_error(rng.uniform(-126, 127.5, 10**6).astype(np.float32)) < 2
    assert ulp_error(rng.uniform(-1, 1, 10**6).astype(np.float32)) < 2


def test_exp2_float64_is_within_two_ulp():
    if np.finfo(np.longdouble).nmant <= 52:
        pytest.skip("no type more precise than float64 here")
    rng = np.random.default_rng(0)
    assert ulp_error(rng.uniform(-1022, 1023.5, 10**6)) < 2
    assert ulp_error(rng.uniform(-1, 1, 10**6)) < 2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exp2_special_values(dtype):
    top = 128 if dtype == np.float32 else 1024
    x = np.array([-np.inf, -1e30, -top, 0, -0.0, 1, -3, np.inf, top, 1e30, np.nan, -np.nan] * 3, dtype)
    y = np.empty_like(x)
    exp2_of(x, y)
    np.testing.assert_array_equal(y[:12], np.array([0, 0, 0, 1, 1, 2, 0.125, np.inf, np.inf, np.inf, np.nan, np.nan], dtype))


@njit
def tanh_of(x, y):
    for i in range(x.size):
        y[i] = numeric.tanh(x[i])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tanh_is_within_four_ulp(dtype):
    if np.finfo(np.longdouble).nmant <= 52:
        pytest.skip("no type more precise than float64 here")
    rng = np.random.default_rng(0)
    for reach in (30.0, 2.0, 0.1, 1e-6):
        x = rng.uniform(-reach, reach, 2 * 10**5).astype(dtype)
        y = np.empty_like(x)
        tanh_of(x, y)
        exact = np.tanh(x.astype(np.longdouble))
        assert float((np.abs(y - exact) / np.spacing(np.abs(exact).astype(dtype))).max()) < 4


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tanh_special_values(dtype):
    x, y = np.array([0, np.inf, -np.inf, 1e30, -1e30, np.nan], dtype), np.empty(6, dtype)
    tanh_of(x, y)
    np.testing.assert_array_equal(y, np.array([0, 1, -1, 1, -1, np.nan], dtype))


@njit
def row_max_of(x):
    return numeric.row_max(x)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_row_max(dtype):
    rng = np.random.default_rng(0)
    for n in (1, 2, 7, 8, 31, 64, 100):
        for x in (rng.standard_normal(n), -np.exp(rng.standard_normal(n)), np.full(n, -np.inf), np.append(rng.standard_normal(n), np.inf)):
            assert row_max_of(x.astype(dtype)) == x.astype(dtype).max()
    assert row_max_of(np.zeros(0, dtype)) == -np.inf
    assert np.isnan(row_max_of(np.array([1, np.nan, 2], dtype)))
    assert row_max_of(np.array([1, np.copysign(np.nan, -1), 2], dtype)) == 2
