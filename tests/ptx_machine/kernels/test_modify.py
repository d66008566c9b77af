"""Options on fragments of one warp, for both ways in which scores lie in registers: queries or keys are the rows of the product."""

import sys
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import Executed

from numba_flash import oracle, rng
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.options import Generator
from numba_flash.arguments.problem import ForwardInputs, bind
from numba_flash.cuda.arguments import Vectors, build_extras, extras_type, parameters_of, parameters_type, vectors_of
from numba_flash.cuda.number import array
from numba_flash.cuda.runtime.lang import cuda, f32, i32, types, u32
from numba_flash.cuda.runtime.launch import Gpu, Launch
from numba_flash.cuda.score import fragment
from numba_flash.cuda.score.fetch import build_fetch, held
from numba_flash.cuda.score.modify import build_drop, build_modify
from numba_flash.cuda.score.score import Head, Region
from numba_flash.cuda.work.grid import extras_layouts

LANES, HEADS = np.arange(32), 2
BENDING = lambda score, b, h, i, j: 0.5 * score - 0.01 * (i - j) * (h + 1)
HALF = lambda score, b, h, i, j: 0.5


def normal(*shape, seed=8) -> np.ndarray:
    """Numbers that are the same in whatever order tests run."""
    return np.random.default_rng(seed).standard_normal(shape)


def chance(p: float, *shape, seed=9) -> np.ndarray:
    """Which of so many come true."""
    return np.random.default_rng(seed).random(shape) < p


class Fragments(NamedTuple):
    """Of a warp's scores: are its rows `keys`, how many tiles of 16 rows there are, and its columns; keys are columns in `order`."""

    keys: bool
    m_tiles: int
    columns: int
    order: bool = False

    @property
    def runs(self):
        if self.order:
            return fragment.runs_of_columns(self.columns)
        return (fragment.runs_of_keys if self.keys else fragment.runs_of_queries)(self.m_tiles, self.columns)

    def places(self, row0: int, col0: int):
        """Query and key (lanes, registers) of every element, from the ISA's fragment and the order in which keys are stored."""
        register = np.arange(self.m_tiles * self.columns // 2)
        m, j = register // (self.columns // 2), register % (self.columns // 2) // 4
        r, c = register // 2 % 2, register % 2
        lane = LANES[:, None]
        if self.keys:
            return row0 + 8 * j + 2 * (lane % 4) + c, col0 + 2 * self.m_tiles * (lane // 4) + 2 * m + r
        if self.order:
            return row0 + 8 * r + lane // 4, col0 + 8 * j + 2 * (lane % 4) + c
        return row0 + 16 * m + 8 * r + lane // 4, col0 + 32 * (j // 4) + 8 * (lane % 4) + 2 * (j % 4) + c


SHAPES = [
    *(Fragments(False, *each) for each in ((1, 32), (2, 64))),
    *(Fragments(True, *each) for each in ((1, 16), (2, 32), (4, 16))),
    Fragments(False, 1, 32, True),
]

# How bias and mask are read: by runs, or, of two shapes, one element at a time.
READ = [
    pytest.param(fragments, vectors, kind, marks=() if (fragments, vectors, kind) == (SHAPES[3], True, np.float16) else pytest.mark.full)
    for fragments in SHAPES
    for vectors in (True, False)
    for kind in (np.float16, np.float32)
    if vectors or fragments in SHAPES[1:3] or fragments.order
]


def build(options, fragments, vectors, dtype):
    """Kernel: one warp's raw products become scores, in a second array derivatives, in a third signs after dropout."""
    runs, KEYS, WIDTH, BESIDE = fragments.runs, fragments.keys, fragments.runs.width, 2 if fragments.order else 8
    COUNT, DROPOUT = runs.count * runs.width, bool(options.dropout)
    HELD = max(1, held(options, runs).words)
    fetch, modify = build_fetch(options, runs, vectors), build_modify(dtype, options, runs, True)
    drop = build_drop(options, runs)

    def fragments_of_a_warp(s, slope, kept, extras, row0, col0, rows, cols, low, high, whole, parameters):
        registers, x = cuda.local.array(HELD, u32), cuda.local.array(COUNT, f32)
        slopes, p = cuda.local.array(COUNT, f32), cuda.local.array(COUNT, f32)
        lane = i32(cuda.threadIdx.x)
        if KEYS:
            query, key = i32(row0 + 2 * (lane % 4)), i32(col0 + WIDTH * (lane // 4))
        else:
            query, key = i32(row0 + lane // 4), i32(col0 + BESIDE * (lane % 4))
        for e in range(COUNT):
            x[e], p[e] = s[lane, e], f32(1)
        at, region = Head(0, 1, 1, 1, 2), Region(row0, col0, rows, cols, low, high)
        fetch(registers, query, key, region, at, whole != 0, extras)
        modify(x, slopes, registers, query, key, region, at, whole != 0, parameters)
        if DROPOUT:
            drop(p, query, key, at, parameters)
        for e in range(COUNT):
            s[lane, e], slope[lane, e], kept[lane, e] = x[e], slopes[e], p[e]

    numbers = [types.int64] * 7
    signature = types.void(*[array(f32, 2)] * 3, extras_type(options), *numbers, parameters_type(options))
    return fragments_of_a_warp, signature, {"launch_bounds": (32, 1)}


MODULE = ModuleType("numba_flash.cuda.fragments_of_tests")
MODULE.build = build
sys.modules[MODULE.__name__] = MODULE


def executed(fragments, raw, nq, nk, row0, col0, vectors=None, whole=False, dtype="float16", **options):
    """Scores, derivatives and signs of a warp's elements, of head 1 of batch element 1."""
    q, k = np.empty((2, HEADS, nq, 8), np.float16), np.empty((2, HEADS, nk, 8), np.float16)
    problem = bind(q, k, k, **options)
    inputs = ForwardInputs(q, k, k, **{name: options[name] for name in ("bias", "mask") if name in options})
    described = vectors_of(problem, ForwardInputs(*map(Layout.of, inputs)), fragments.runs.width)
    vectors = described if vectors is None else vectors
    results = [np.array(raw, np.float32), np.full(raw.shape, np.nan, np.float32), np.full(raw.shape, np.nan, np.float32)]
    launch = Launch(
        "fragments_of_tests.build",
        (problem.options.structure, fragments, vectors, dtype),
        Gpu(0, (9, 0), 1),
        grid=1,
        threads=32,
        operands=tuple((Layout.of(x), 2) for x in results),
        extras=extras_layouts(problem, ForwardInputs(*map(Layout.of, inputs))),
        numbers=(row0, col0, nq, nk, problem.low, problem.high, int(whole), parameters_of(problem)),
    )
    Executed(launch)(*results, extras=build_extras(problem.options)(inputs))
    return (*results, described)


def expected(fragments, raw, nq, nk, row0, col0, **options):
    """The same by the oracle; scores in base e."""
    q, k = np.empty((2, HEADS, nq, 8), np.float16), np.empty((2, HEADS, nk, 8), np.float16)
    problem, at = bind(q, k, k, **options), fragments.places(row0, col0)
    inside = (at[0] < nq) & (at[1] < nk)
    product, wanted = np.zeros((2, HEADS, nq, nk)), [np.full(raw.shape, -np.inf), np.zeros(raw.shape)]
    there = tuple(x[inside] for x in at)
    product[(1, 1, *there)] = raw[inside]
    # the oracle's scores of this product: that of q with rows of the unit matrix
    unit = np.broadcast_to(np.eye(nk), (2, HEADS, nk, nk))
    s, slope, visible = oracle._scores(problem, options, product[None], unit[None])
    wanted[0][inside] = np.where(visible, s, -np.inf)[0, 1, 1][there]
    wanted[1][inside] = np.where(visible, np.broadcast_to(slope, s.shape), 0)[0, 1, 1][there]
    return wanted


@pytest.mark.parametrize(("fragments", "vectors", "kind"), READ)
def test_scores_under_all_options(fragments, vectors, kind):
    """Around the ends, a band and everything that hides, with the derivatives."""
    nq, nk = 50, 80
    bias = normal(2, 1, nq, nk).astype(kind)
    bias[chance(0.1, *bias.shape)] = -np.inf
    options = {
        "bias": bias, "mask": chance(0.8, HEADS, nq, nk), "softcap": 2.0, "scale": 0.7, "window": (30, 25),
        "score_mod": BENDING, "score_mod_grad": HALF,
    }  # fmt: skip
    raw = normal(32, fragments.m_tiles * fragments.columns // 2, seed=10).astype(np.float32)
    for row0, col0 in ((8, 16), (32, 64), (0, 48)):
        chosen = None if vectors else Vectors()
        s, slope, _, described = executed(fragments, raw, nq, nk, row0, col0, chosen, **options)
        assert described == Vectors(True, True)
        wanted_s, wanted_slope = expected(fragments, raw, nq, nk, row0, col0, **options)
        np.testing.assert_allclose(s, wanted_s, rtol=3e-6, atol=3e-6)
        np.testing.assert_allclose(slope, wanted_slope, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    "bias",
    [pytest.param({}, id="alone"), pytest.param({"bias": normal(50, 80).astype(np.float16)}, id="bias")],
)
@pytest.mark.full
def test_of_a_whole_tile_no_mask_is_read(bias):
    """It is said to be visible, and so it is, whatever the mask says."""
    fragments, hidden = SHAPES[1], {"mask": np.zeros((HEADS, 50, 80), bool)}
    raw = normal(32, fragments.m_tiles * fragments.columns // 2, seed=10).astype(np.float32)
    s, _, _, _ = executed(fragments, raw, 50, 80, 8, 16, whole=True, scale=1.0, **hidden, **bias)
    wanted, _ = expected(fragments, raw, 50, 80, 8, 16, scale=1.0, **bias)
    np.testing.assert_allclose(s, wanted, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("fragments", [pytest.param(x, marks=() if x == SHAPES[3] else pytest.mark.full) for x in SHAPES], ids=str)
def test_dropped_weights(fragments):
    """The contract's bits, which the CPU computes with numbers of 64 bits: head 1 of batch element 1 is the fourth."""
    raw = np.zeros((32, fragments.m_tiles * fragments.columns // 2), np.float32)
    state, dropout, nq, nk = (2**63 + 2**31 + 12345, 2**32 - 2, 1001, 2**29 + 24), 0.4, 100, 300
    _, _, kept, _ = executed(fragments, raw, nq, nk, 16, 64, dropout=dropout, rng=state)
    queries, keys = np.broadcast_arrays(*fragments.places(16, 64))
    wanted = rng.keep_all(Generator(*state), dropout, np.arange(4), nq, nk)[3][queries, keys]
    np.testing.assert_array_equal(kept, np.where(wanted, 1, -1))


@pytest.mark.full
@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("hidden", [0.0, 0.1])
def test_scores_that_a_bias_hides(hidden, kind):
    """Whatever they are; and where it hides none, a lane adds it alone."""
    fragments, nq, nk = SHAPES[1], 50, 80
    bias = normal(nq, nk).astype(kind)
    bias[chance(hidden, *bias.shape)] = -np.inf
    raw = normal(32, fragments.m_tiles * fragments.columns // 2, seed=10).astype(np.float32)
    queries, keys = np.broadcast_arrays(*fragments.places(8, 16))
    inside = (queries < nq) & (keys < nk)
    unseen = np.zeros(raw.shape, bool)
    unseen[inside] = bias[queries[inside], keys[inside]] == -np.inf
    assert unseen.any() == (hidden > 0)
    s, _, _, _ = executed(fragments, np.where(unseen, np.nan, raw), nq, nk, 8, 16, scale=0.7, bias=bias)
    wanted, _ = expected(fragments, raw, nq, nk, 8, 16, scale=0.7, bias=bias)
    np.testing.assert_allclose(s, wanted, rtol=3e-6, atol=3e-6)


CAPS = pytest.mark.parametrize(
    ("softcap", "scale"),
    [(3.0, -1.0), *(pytest.param(*each, marks=pytest.mark.full) for each in [(1e-30, 1.0), (3.0, 1.0), (1e4, 1.0), (1e30, 1.0)])],
)
DTYPES = pytest.mark.parametrize("dtype", ["float16", pytest.param("float32", marks=pytest.mark.full)])


def sizes(least, largest):
    """Numbers for each register of a warp, of both signs."""
    rng = np.random.default_rng(8)
    size = np.float32(2.0) ** rng.uniform(np.log2(least), np.log2(largest), (32, 16))
    return (size * rng.choice([-1, 1], size.shape)).astype(np.float32)


@CAPS
@DTYPES
def test_a_cap_of_any_size(softcap, scale, dtype):
    """Small scores, of which tanh is the number itself, and large ones, of which it is 1; and where a lane has no large one. In 16 bits
    less exact, but where a score is so large that this would matter.
    """
    fragments, unit_of_s = SHAPES[0], 8e-7 if dtype == "float16" and softcap < 1e4 else 5e-7
    raw = sizes(2.0**-20, 2.0**20) * np.float32(1 if softcap < 1e20 else softcap * 2.0**-16)
    for x in (raw, *(np.where(np.abs(raw) < part * softcap, raw, 0) for part in (0.45, 0.15))):
        s, slope, _, _ = executed(fragments, x, 16, 32, 0, 0, dtype=dtype, softcap=softcap, scale=scale)
        unit = np.tanh(scale * x.astype(np.float64) / softcap)
        np.testing.assert_allclose(s, softcap * unit, rtol=unit_of_s)
        np.testing.assert_allclose(slope, 1 - np.square(unit), atol=5e-7)


@pytest.mark.full
@pytest.mark.parametrize("softcap", [2.0**-10, 0.3, 2.0, 30.0, 64.0])
def test_large_scores_in_16_bits_share_inverses(softcap):
    """A score is as exact as the largest can be, to 2^-21 of the cap."""
    raw = sizes(2.0**-20, 17) * np.float32(softcap)
    s, slope, _, _ = executed(SHAPES[1], np.tile(raw, 4), 50, 80, 8, 8, softcap=softcap, scale=1.0)
    unit = np.tile(np.tanh(raw.astype(np.float64) / softcap), 4)
    assert np.abs(s / softcap - unit).max() < 2.0**-21
    np.testing.assert_allclose(slope, 1 - np.square(unit), atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("softcap", [2.0**-10, 2.0, 4.0, 4.5])
def test_small_caps_of_bfloat16(softcap):
    """By the instruction for tanh, of any size and of NaN; not beyond."""
    raw = sizes(2.0**-20, 2.0**20)
    raw[:, 3] = np.nan
    s, slope, _, _ = executed(SHAPES[0], raw, 16, 32, 0, 0, dtype="bfloat16", softcap=softcap, scale=0.5)
    unit = np.tanh(0.5 * raw.astype(np.float64) / softcap)
    np.testing.assert_allclose(s, softcap * unit, rtol=2.0**-11)
    np.testing.assert_allclose(slope, 1 - np.square(unit), atol=2.0**-10)


@DTYPES
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 1e30])
def test_a_number_beyond_a_cap_is_alone(odd, dtype):
    """As that of a key that is not seen, or of one too large to share an inverse: its neighbour is what it was."""
    raw = sizes(0.1, 9)
    raw[:, 5] = odd
    s, slope, _, _ = executed(SHAPES[0], raw, 16, 32, 0, 0, dtype=dtype, softcap=3.0, scale=1.0)
    unit = np.tanh(raw.astype(np.float64) / 3)
    np.testing.assert_allclose(s, 3 * unit, rtol=5e-7)
    np.testing.assert_allclose(slope, 1 - np.square(unit), atol=5e-7)


def test_what_is_read_in_vectors():
    """Rows that begin at multiples of a vector, neighbours in memory, whole runs."""

    def bias_in_vectors(bias, width=8, offset=0, nk=16):
        q, k = np.empty((2, HEADS, 16, 8), np.float16), np.empty((2, HEADS, nk, 8), np.float16)
        layout = Layout.of(bias)._replace(offset=offset)
        return vectors_of(bind(q, k, k, bias=bias), ForwardInputs(q, k, k, bias=layout), width).bias

    half, single = np.zeros((16, 16), np.float16), np.zeros((16, 16), np.float32)
    assert all(map(bias_in_vectors, (half, single, half[:1], half[0], np.zeros((2, HEADS, 16, 16), np.float16))))
    assert not any(map(bias_in_vectors, (half.T, half[:, :1], half[:, ::-1], np.zeros((16, 17), np.float16)[:, :16], np.array(half[0, 0]))))
    assert bias_in_vectors(np.zeros((16, 20), np.float16)[:, :16], width=4)
    assert not bias_in_vectors(half, offset=8)
    assert bias_in_vectors(half, offset=8, width=4)
    assert not bias_in_vectors(half[:, :12], nk=12)
    assert bias_in_vectors(half[:, :12], nk=12, width=4)
