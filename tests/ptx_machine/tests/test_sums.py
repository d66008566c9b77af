"""How the machine adds, against rational numbers."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_machine.instructions.rounding import BFLOAT16, fma, odd, rounded, two_sum
from ptx_machine.instructions.sums import AMPERE, EXACT, HOPPER, TURING, TensorCore, dot

FORMATS = {np.float16: (10, -14, 15), BFLOAT16: (7, -126, 127), np.float32: (23, -126, 127), np.float64: (52, -1022, 1023)}


def of(x: Fraction, kind, mode: str = "rn"):
    """A rational number rounded to a format: the definition, digit by digit."""
    digits, least, most = FORMATS[kind]
    if x == 0:
        return kind(0)
    exponent = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    exponent = max(exponent if abs(x) >= Fraction(2) ** exponent else exponent - 1, least)
    unit = Fraction(2) ** (exponent - digits)
    floor = abs(x) // unit
    rest = abs(x) / unit - floor
    nearest = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor % 2 == 1)
    away = {"rn": True, "rz": False, "rm": x < 0, "rp": x > 0}[mode]
    result = (floor + (nearest if mode == "rn" else away and rest > 0)) * unit
    if result >= Fraction(2) ** (most + 1):
        result = np.inf if away else (2 - Fraction(2) ** -digits) * Fraction(2) ** most
    return kind(-1 if x < 0 else 1) * kind(float(result))


def numbers(kind, spread: int = 40):
    """Finite numbers of a format: any, those near 1, and those with few digits, so that sums cancel and ties are met."""
    bits = 8 * np.dtype(kind).itemsize
    any_of_all = st.integers(0, 2**bits - 1).map(lambda i: np.array(i, f"u{bits // 8}").view(kind)[()]).filter(lambda x: np.isfinite(x))
    digits = FORMATS[kind][0]
    exponents = st.integers(-min(spread, 12 if digits == 10 else spread), min(spread, 12 if digits == 10 else spread))
    near = st.builds(
        lambda m, e: kind(float(m) * 2.0 ** (e - digits)), st.integers(-(2 ** (digits + 1)) + 1, 2 ** (digits + 1) - 1), exponents
    )
    few = st.builds(lambda m, e: kind(float(m) * 2.0**e), st.integers(-3, 3), exponents)
    return st.one_of(near, few, any_of_all)


def same(x, y):
    """The same bits, but for the sign of zero."""
    assert x == y or (np.isnan(x) and np.isnan(y)), f"{x!r} is not {y!r}"


# ---- fused multiplication and addition ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.float16, BFLOAT16, np.float32, np.float64], ids=lambda kind: np.dtype(kind).name)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_fma_is_rounded_once(kind, data):
    a, b, c = (data.draw(numbers(kind)) for _ in range(3))
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    with np.errstate(all="ignore"):
        got = fma(*(np.full(3, x, kind) for x in (a, b, c)), kind)
    assert got.dtype == kind
    same(got[1], of(exact, kind))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_fma_is_rounded_in_other_directions(mode, data):
    a, b, c = (data.draw(numbers(np.float32)) for _ in range(3))
    with np.errstate(all="ignore"):
        got = fma(*(np.full(3, x) for x in (a, b, c)), np.float32, mode)
    same(got[0], of(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)), np.float32, mode))


def test_a_float64_sum_that_is_rounded_again_would_be_wrong():
    """1 + 2**-24 lies halfway between two float32; a product just above it has to go up, one just below it down."""
    one, tiny = np.float32(1), np.float32(2.0**-60)
    for sign in (1, -1):
        a = np.array([1 + 2.0**-12], np.float32)  # a * a = 1 + 2**-11 + 2**-24
        got = fma(a, a, np.array([sign * tiny], np.float32), np.float32)
        assert got[0] == one + np.float32(2.0**-11) + (np.float32(2.0**-23) if sign > 0 else 0)
    assert np.float32(np.float64(a[0]) ** 2 + np.float64(tiny)) == one + np.float32(2.0**-11)  # which goes to even


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_numbers_in_other_formats(data):
    x, rest = data.draw(numbers(np.float64)), data.draw(numbers(np.float64, 400))
    exact = Fraction(float(x)) + Fraction(float(rest))
    with np.errstate(all="ignore"):
        value = odd(*two_sum(np.array([x]), np.array([rest])))
        if not np.isfinite(value[0]) or abs(value[0]) < 2.0**-960:
            return
        for kind, modes in {np.float32: ("rn", "rz", "rm", "rp"), np.float16: ("rn", "rz", "rm", "rp"), BFLOAT16: ("rn", "rz")}.items():
            for mode in modes:
                same(rounded(value, kind, mode)[0], of(exact, kind, mode))


# ---- tensor cores ------------------------------------------------------------------------------------------------------------------------


def exponent_of(x, kind) -> int:
    if x == 0:
        return -126
    return max(int(np.frexp(np.float64(x))[1]) - 1, -14 if kind == np.float16 else -126)


def truncating(a, b, c, kind, core: TensorCore, step: int):
    """The model, with rational numbers: terms aligned to the largest exponent, cut off, added, cut off."""
    for k in range(0, len(a), step):
        terms = [
            Fraction(float(c)),
            *(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a[k : k + step], b[k : k + step], strict=True)),
        ]
        exponents = [exponent_of(x, kind) + exponent_of(y, kind) for x, y in zip(a[k : k + step], b[k : k + step], strict=True)]
        unit = Fraction(2) ** (max(exponent_of(c, type(c)), *exponents) - core.fraction)
        total = sum(int(x / unit) for x in terms) * unit  # int goes toward zero
        if isinstance(c, np.float16):
            c = of(total, np.float16)
        else:
            c = np.float32(np.inf if total > 0 else -np.inf) if abs(total) >= 2**128 else of(total, np.float32, "rz")
        if not np.isfinite(c):
            return c
    return c


def tf32(x):
    return (np.array(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)[()]


CASES = [(np.float16, np.float32), (BFLOAT16, np.float32), (np.float32, np.float32), (np.float16, np.float16)]


@pytest.mark.parametrize(
    "core",
    [
        pytest.param(EXACT, id="exact"),
        pytest.param(TURING, id="Turing", marks=pytest.mark.full),
        pytest.param(AMPERE, id="Ampere", marks=pytest.mark.full),
        pytest.param(HOPPER, id="Hopper"),
    ],
)
@pytest.mark.parametrize(("kind", "result"), CASES, ids=lambda kind: np.dtype(kind).name)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_dot_is_what_rational_numbers_say(core, kind, result, data):
    draw = lambda kind: data.draw(numbers(kind))
    k = data.draw(st.sampled_from([4, 8, 16]))
    a, b, c = [draw(kind) for _ in range(k)], [draw(kind) for _ in range(k)], draw(result)
    if data.draw(st.booleans()):  # everything but the accumulator cancels, at times all of it
        a[k // 2 :], b[k // 2 :] = [-x for x in a[: k // 2]], b[: k // 2]
    got = dot(np.array([a, a], kind), np.array([b, b, b], kind).T, np.full((2, 3), c, result), core)
    assert (got.dtype, got.shape) == (result, (2, 3))
    if kind == np.float32:
        a, b = [tf32(x) for x in a], [tf32(x) for x in b]
    if core is EXACT:
        wanted = of(sum((Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a, b, strict=True)), Fraction(float(c))), result)
    else:
        wanted = truncating(a, b, c, kind, core, core.bits // (32 if kind == np.float32 else 16))
    if np.isfinite(wanted):
        same(got[1, 2], wanted)
    else:
        assert not np.isfinite(got[1, 2])


@pytest.mark.parametrize("core", [EXACT, AMPERE, HOPPER], ids=["exact", "Ampere", "Hopper"])
@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16], ids=lambda kind: np.dtype(kind).name)
def test_infinities_and_what_is_not_a_number(core, kind):
    """inf 1 = inf; inf 0, inf - inf and NaN are the NaN of tensor cores; they stay in their row and column; zero is positive."""
    a, b, c = np.ones((6, 16), kind), np.ones((16, 2), kind), np.zeros((6, 2), np.float32)
    a[0, 3], a[1, 3], a[1, 12], a[2, 5] = np.inf, np.inf, -np.inf, np.nan
    a[4], c[4], c[5, 0] = 0, -0.0, -np.inf
    b[3, 1] = 0
    got = dot(a, b, c, core)
    bits = got.view(np.uint32)
    assert got[0, 0] == np.inf
    assert bits[0, 1] == bits[1, 0] == bits[2, 0] == bits[2, 1] == 0x7FFFFFFF
    assert (*got[3], *got[5]) == (16, 15, -np.inf, 15)
    assert (bits[4] == 0).all()


@pytest.mark.parametrize("core", [EXACT, AMPERE], ids=["exact", "Ampere"])
def test_many_products_at_once_are_each_alone(core):
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((3, 4, 16), (3, 16, 5)))
    c = rng.standard_normal((3, 4, 5)).astype(np.float32)
    for many, *one in zip(dot(a, b, c, core), a, b, c, strict=True):
        assert many.tobytes() == dot(*one, core).tobytes()


def test_float64_is_a_chain_of_fused_operations():
    rng = np.random.default_rng(0)
    a, b, c = rng.standard_normal((3, 16)), rng.standard_normal((16, 2)), rng.standard_normal((3, 2))
    got = dot(a, b, c)
    for i, j in np.ndindex(3, 2):
        wanted = float(c[i, j])
        for x, y in zip(a[i], b[:, j], strict=True):
            wanted = float(Fraction(float(x)) * Fraction(float(y)) + Fraction(wanted))
        assert got[i, j] == wanted


@pytest.mark.parametrize(
    ("core", "cut_sums", "cut_products"),
    [(EXACT, 0, 0), (HOPPER, -2.1e-5, -9.6e-5), (AMPERE, -4.3e-5, -1.8e-4)],
    ids=["exact", "Hopper", "Ampere"],
)
def test_long_sums_of_positive_numbers_come_out_too_small(core, cut_sums, cut_products):
    """16,384 products in a chain, the way that a kernel takes; less so where products are short enough that only sums are cut off."""
    rng = np.random.default_rng(0)
    a, other = (rng.uniform(0, 1, (4, 16384)).astype(np.float16) for _ in range(2))
    for b, expected in ((np.ones_like(a), cut_sums), (other, cut_products)):
        c = np.zeros((4, 4), np.float32)
        for k in range(0, 16384, 16):
            c = dot(a[:, k : k + 16], b[:, k : k + 16].T, c, core)
        bias = (c / (a.astype(np.float64) @ b.astype(np.float64).T) - 1).mean()
        assert abs(bias - expected) < 1e-6 + 0.1 * abs(expected)
