"""Float32 as pairs of float16: the pre-pass by itself, heads that are left to IEEE arithmetic, and what centres must not touch."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from support import SIMULATED, random_inputs, same_bits, whole

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import HOPPER, NANS, machine

import numba_flash
from numba_flash import reference
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import BackwardInputs, ForwardInputs, bind, bind_packed
from numba_flash.cuda.passes.prepare_planes import PlanesWriter
from numba_flash.cuda.runtime.launch import Gpu, Launch
from numba_flash.cuda.sm80.tiles import padded
from numba_flash.cuda.sm90.dq import prepare_dq_order

pytestmark = pytest.mark.machine

AMPERE = (8, 0)
TOP, SAMPLES, LOW = 13, 32, 2.0**11  # exponent of a head's largest number; rows that a centre is made of; how much larger low planes are
NOT_WRITTEN = np.uint32(NANS)


# ---- the pre-pass by itself --------------------------------------------------------------------------------------------------------------


def made_of(q, k, v, offsets=(), do=None, **options):
    """What the pre-pass makes of a call's arrays; of a backward pass, if there is `do`."""
    arrays = {name: options[name] for name in ("q_lengths", "kv_lengths", "bias", "mask") if name in options}
    problem = bind_packed(q, k, v, *offsets, **options) if offsets else bind(q, k, v, **options)
    if offsets:
        arrays = {"q_lengths": offsets[0], "kv_lengths": offsets[1]}
    inputs = ForwardInputs(q, k, v, **arrays)
    if do is not None:
        inputs = BackwardInputs(do, q, k, v, do, do, **arrays)
    columns = padded(q.shape[-1]), padded(v.shape[-1])
    with machine(), np.errstate(all="ignore"):
        return PlanesWriter(problem, Gpu(0, HOPPER, 2), type(inputs)(*map(Layout.of, inputs)), columns).of(inputs)


def exponent_of(x: np.ndarray) -> int:
    """Of the power of two that a head is multiplied by."""
    most = np.abs(x).max(initial=0)
    return TOP - (int(np.frexp(most)[1]) - 1) if most else 0


def numbers_of(planes: np.ndarray, columns: int, exponent: int) -> np.ndarray:
    """(n, columns) float64, of one head; columns beyond are 0."""
    high, low = (np.ascontiguousarray(x).view(np.float16).astype(np.float64) for x in np.split(planes, 2, axis=-1))
    x = (high + low / LOW) * 2.0**-exponent
    assert (x[:, columns:] == 0).all()
    return x[:, :columns]


def centre_of(x: np.ndarray) -> np.ndarray:
    """Of each column: the median of evenly spaced rows if all are on one side of 0, else 0."""
    samples = np.sort(x[np.arange(SAMPLES) * len(x) // SAMPLES], axis=0)
    return np.where((samples[0] > 0) | (samples[-1] < 0), samples[SAMPLES // 2], 0)


def check_planes(planes: np.ndarray, x: np.ndarray, centre: np.ndarray, together: np.ndarray | None = None) -> None:
    """Those of one head say ``x - c`` to 2^-22 of each number that is not far below the largest, and to 2^-49 of that, which is the largest
    of all heads that belong `together`.
    """
    together = x if together is None else together
    exact, largest = x.astype(np.float64) - centre, np.abs(together).max(initial=0).astype(np.float64)
    error = np.abs(numbers_of(planes, x.shape[1], exponent_of(together)) - exact)
    assert (error <= 2.0**-22 * np.abs(exact) + 2.0**-48 * largest).all(), (error / largest).max()


class Given(NamedTuple):
    """Of a call: what is made of N(0, 1) for q, k and v, and which centres are expected."""

    q: object
    k: object
    v: object
    centred: bool = False


same = lambda x: x
around_300 = lambda x: 300 + 10 * x
below = lambda x: -300 + 10 * x
units = lambda *powers: lambda x: x * np.reshape([10.0**p for p in powers], (-1, 1, 1, 1))
columns = lambda x: x * np.logspace(-3, 3, x.shape[-1])
GIVEN = {
    "normal": Given(same, same, same),
    "offset": Given(same, around_300, below, True),
    "in units of their own": Given(units(-12, 8), units(8, -14), units(-12, 8)),
    "columns in units of their own": Given(columns, lambda x: x / np.logspace(-3, 3, x.shape[-1]), columns),
    "rows far below others": Given(lambda x: np.where(np.arange(x.shape[2])[:, None] % 3, x * 1e-6, x), same, same),
}


@pytest.mark.full
@pytest.mark.parametrize("name", GIVEN)
def test_planes_are_the_numbers_without_their_centres(name):
    """With powers of two that are exact, and what undoes them for each head of k."""
    given = GIVEN[name]
    q, k, v, do = random_inputs(batch=(2,), hq=2, hk=1, nq=21, nk=70, d=13, dv=6, dtype="float64")
    q, k, v = (make(x).astype(np.float32) for make, x in zip(given[:3], (q, k, v), strict=True))
    do = (do * np.reshape([1, 64], (2, 1, 1))).astype(np.float32)
    made = made_of(q, k, v, do=do)
    assert not made.flags.any()
    for b, h in np.ndindex(2, 2):
        g = 0
        for planes, x, centres in ((made.k, k, made.centres[0]), (made.v, v, made.centres[1])):
            centre, n = centres[0, b, g], x.shape[-1]  # a batch of one dimension is the second of two
            assert same_bits(centre[:n], centre_of(x[b, g]).astype(np.float32))
            assert (centre[:n] != 0).all() == (centre[:n] != 0).any() == given.centred
            check_planes(planes[0, b, g], x[b, g], centre[:n])
        check_planes(made.q[0, b, h], q[b, h], np.zeros(13), q[b])
        check_planes(made.do[0, b, h], do[b, h], np.zeros(6), do[b])
        powers = [exponent_of(x) for x in (q[b], k[b, g], v[b, g], do[b])]
        assert made.factors[0, b, g].tolist() == [2.0**-power for power in powers]
        exact = 13**-0.5 * (q[b, h].astype(np.float64) @ made.centres[0, 0, b, g, :13].astype(np.float64))
        np.testing.assert_allclose(made.shifts[0, b, h], exact, rtol=2.0**-22)


def later(score, b, h, i, j):
    return score + i


DROPOUT = {"dropout": 0.3, "rng": (7, 11)}
CENTRED = {
    "plain": ({}, True, True),
    "softcap": ({"softcap": 2.0}, False, True),
    "score_mod": ({"score_mod": later}, False, True),
    "dropout": (DROPOUT, True, False),
    "softcap and dropout": ({"softcap": 2.0} | DROPOUT, False, False),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CENTRED)
def test_centres_are_taken_out_where_nothing_notices(name):
    """A function of a score sees its constant; weights of which some are dropped do not sum to 1."""
    options, keys, values = CENTRED[name]
    q, k, v, _ = random_inputs(batch=(1,), hq=1, hk=1, nq=3, nk=40, d=8, draw=lambda rng, shape: 300 + 10 * rng.standard_normal(shape))
    made = made_of(q, k, v, **options)
    for x, taken, planes, centre in ((k, keys, made.k, made.centres[0, 0, 0, 0]), (v, values, made.v, made.centres[1, 0, 0, 0])):
        assert (np.abs(centre - 300) < 10).all() if taken else (centre == 0).all()
        check_planes(planes[0, 0, 0], x[0, 0], centre)


@pytest.mark.full
def test_what_lies_beyond_lengths_and_outside_sequences_is_not_read():
    """Nor does it flag a head, and its planes are not written."""
    n, lengths = 90, np.array([70, 0])
    q, k, v, _ = random_inputs(batch=(2,), hq=2, hk=1, nq=n, nk=n, d=8, draw=lambda rng, shape: 300 + rng.standard_normal(shape))
    for x in (q, k, v):
        x[0, :, 70:] = x[1] = np.nan
    made = made_of(q, k, v, q_lengths=lengths, kv_lengths=lengths)
    assert not made.flags.any()
    assert (made.centres[:, 0, 1] == 0).all()
    for planes, x in ((made.q, q), (made.k, k), (made.v, v)):
        assert (planes[0, 0, :, 70:] == NOT_WRITTEN).all()
        assert (planes[0, 1] == NOT_WRITTEN).all()
        centre = made.centres[1 if x is v else 0, 0, 0, 0] if x is not q else np.zeros(8)
        check_planes(planes[0, 0, 0, :70], x[0, 0, :70], centre)
    q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
    for x in (q, k, v):
        x[:5] = np.nan
    offsets = np.array([5, 5, 31, 70])
    made = made_of(q, k, v, (offsets, offsets))
    assert not made.flags.any()
    for planes, x in ((made.q, q), (made.k, k), (made.v, v)):
        assert (np.delete(planes[0, 0, 0], slice(5, 70), axis=0) == NOT_WRITTEN).all()
        centre = made.centres[1 if x is v else 0, 0, 0, 0] if x is not q else np.zeros(8)
        check_planes(planes[0, 0, 0, 5:70], x[5:70, 0], centre)


@pytest.mark.full
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (65, 31), (2, 600)])
def test_any_number_of_rows(nq, nk):
    """One, one beyond a block of them, and several chunks that no number of rows fills."""
    q, k, v, _ = random_inputs(batch=(1,), hq=1, hk=1, nq=nq, nk=nk, d=5, dv=1)
    k[..., 0] = np.abs(k[..., 0]) + 1
    made = made_of(q, k, v)
    assert not made.flags.any()
    check_planes(made.q[0, 0, 0], q[0, 0], np.zeros(5))
    for planes, x, centres in ((made.k, k, made.centres[0]), (made.v, v, made.centres[1])):
        check_planes(planes[0, 0, 0], x[0, 0], centres[0, 0, 0, : x.shape[-1]])


@pytest.mark.full
@pytest.mark.parametrize("what", list("qkv"))
def test_zeros_are_no_numbers_far_away(what):
    """A head of zeros, and rows of zeros among others."""
    arrays = dict(zip("qkv", random_inputs(batch=(1,), hq=2, hk=2, nq=50, nk=50, d=8)[:3], strict=True))
    arrays[what][0, 0] = 0
    arrays[what][0, 1, 7:20] = 0
    made = made_of(**arrays)
    assert not made.flags.any()
    assert (getattr(made, what)[0, 0, 0] == 0).all()
    check_planes(getattr(made, what)[0, 0, 1], arrays[what][0, 1], made.centres[1 if what == "v" else 0, 0, 0, 1])


# ---- heads that are left to others -------------------------------------------------------------------------------------------------------


def spoilt(what: str, value: float, head: int, row: int = 11):
    """A function that puts a number in one place of one head of q, k or v."""

    def put(arrays):
        arrays[what][0, head, row, 3] = value

    return put


def times(what: str, factor: float, head: int, rows=slice(None)):
    def multiply(arrays):
        arrays[what][0, head, rows] *= np.float32(factor)

    return multiply


# What is done to q of four heads, or to k and v of two; and the heads of q that are flagged by it: all that belong to one of k.
SPOILT = {
    "NaN in k": (spoilt("k", np.nan, 1), {2, 3}),
    "Inf in k": (spoilt("k", np.inf, 0), {0, 1}),
    "Inf in v": (spoilt("v", -np.inf, 1), {2, 3}),
    "a row of k far below": (times("k", 2.0**-30, 0, 5), {0, 1}),
    "q near the end of float32": (times("q", 1e37, 1), {0, 1}),
    "k near 0": (times("k", 1e-30, 1), {2, 3}),
    "what can be split still": (times("k", 2.0**-20, 0, 5), set()),
    "q and k so small that their product is none": (lambda x: (times("q", 4e-15, slice(2))(x), times("k", 4e-15, 0)(x)), set()),
    "q so small, and k": (lambda x: (times("q", 1e-17, 0)(x), times("k", 1e-17, 1)(x)), {0, 1, 2, 3}),
}
NQ, NK = 70, 90
BIAS = np.random.default_rng(0).standard_normal((NQ, NK)).astype(np.float32)


def on_machine(arrays, backend, capability=None, **options):
    capability = capability or (HOPPER if backend == "sm90" else AMPERE)
    with machine(capability=capability), np.errstate(all="ignore"):
        return numba_flash.forward(*arrays.values(), backend=backend, return_lse=True, **options)


def plain_arrays() -> dict:
    return dict(zip("qkv", random_inputs(batch=(1,), hq=4, hk=2, nq=NQ, nk=NK, d=16)[:3], strict=True))


def check_spoilt(name: str, backend: str = "sm80", capability=None, **options) -> None:
    spoil, heads = SPOILT[name]
    arrays = plain_arrays()
    before = on_machine(arrays, backend, capability, **options)
    spoil(arrays)
    after, by_simt = (on_machine(arrays, each, capability, **options) for each in (backend, "simt"))
    with np.errstate(all="ignore"):
        refs = reference.forward(*arrays.values(), **options, return_lse=True)
    changed = [(x != y).any(axis=(0, 2, 3)) for x, y in zip(arrays.values(), plain_arrays().values(), strict=True)]
    touched = {h for h in range(4) for x in changed if x[h * len(x) // 4]}
    equal = {h for h in range(4) if all(same_bits(x[0, h], simt[0, h]) for x, simt in zip(after, by_simt, strict=True))}
    assert equal == heads
    for x, unspoilt, ref in zip(after, before, refs, strict=True):
        for h in range(4):
            assert h in touched | heads or same_bits(x[0, h], unspoilt[0, h]), f"head {h}"
        if "end of float32" not in name:
            assert (np.isnan(x) == np.isnan(ref)).all()
            assert (np.isinf(x) == np.isinf(ref)).all()
        finite = np.isfinite(x) & np.isfinite(ref)
        np.testing.assert_allclose(x[finite], ref[finite], rtol=1e-5, atol=4e-6 * max(1, np.abs(ref[finite]).max()))


@pytest.mark.full
@pytest.mark.parametrize("name", SPOILT)
def test_heads_that_cannot_be_split_are_those_of_simt(name):
    """Bit by bit, and others are what they were; NaN and Inf are where the oracle has them."""
    check_spoilt(name)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["plain", "causal"])
@pytest.mark.parametrize("name", ["NaN in k", "Inf in v", "what can be split still"])
def test_the_same_on_hopper(name, options):
    check_spoilt(name, "sm90", **options)


@pytest.mark.full
@pytest.mark.parametrize("name", ["NaN in k", "Inf in v", "a row of k far below", "k near 0", "what can be split still"])
def test_the_same_where_blocks_make_planes_themselves(name, monkeypatch):
    """In the shared memory of a GPU which has room for all keys of a head."""
    built, launched = set(), Launch.__call__
    monkeypatch.setattr(Launch, "__call__", lambda self, *operands, **more: (built.add(self.builder), launched(self, *operands, **more)))
    check_spoilt(name, capability=HOPPER)
    assert "sm80.short_heads.forward_short_heads.build" in built


@pytest.mark.full
@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 3.0}, {"bias": BIAS}], ids=list)
@pytest.mark.parametrize("name", ["NaN in k", "Inf in v"])
def test_the_same_with_options(name, options):
    check_spoilt(name, **options)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
def test_flagged_heads_of_packed_sequences(backend):
    """Heads of all sequences together: what one has of NaN is computed by others in all, with the same bits."""
    offsets = np.array([0, 40, 40, 110])
    q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in random_inputs(batch=(1,), hq=2, hk=2, nq=110, nk=110, d=16)[:3])
    k[17, 1, 2] = np.nan
    results = {}
    for name in (backend, "simt"):
        with machine(capability=HOPPER if backend == "sm90" else AMPERE), np.errstate(all="ignore"):
            results[name] = numba_flash.forward_packed(q, k, v, offsets, offsets, backend=name, return_lse=True)
    (o, lse), (o_simt, lse_simt) = results.values()
    assert same_bits(o[:, 1], o_simt[:, 1])
    assert same_bits(lse[1], lse_simt[1])
    assert np.isnan(o[:40, 1]).all()
    assert np.isfinite(o[40:]).all()
    assert not same_bits(o[:, 0], o_simt[:, 0])
    for first, stop in pairwise(offsets):
        ref, ref_lse = reference.forward(*(x[first:stop, 0] for x in (q, k, v)), return_lse=True)
        np.testing.assert_allclose(o[first:stop, 0], ref, atol=2e-6)
        np.testing.assert_allclose(lse[0, first:stop], ref_lse, atol=4e-6)


# ---- the same of a backward pass ---------------------------------------------------------------------------------------------------------


def gradients_on_machine(arrays, backend, capability=AMPERE, **options):
    forward = {name: x for name, x in options.items() if name not in ("bias_grad", "dlse")}
    with np.errstate(all="ignore"):
        o, lse = reference.forward(arrays["q"], arrays["k"], arrays["v"], **forward, return_lse=True)
    inputs = *arrays.values(), o.astype(np.float32), lse.astype(np.float32)
    with machine(capability=capability), np.errstate(all="ignore"):
        return numba_flash.backward(*inputs, backend=backend, **options)


SPOILT_BACKWARD = {
    "NaN in do": (spoilt("do", np.nan, 1), 0),
    "a row of do far below": (times("do", 2.0**-30, 2, 5), 1),
    "q near the end of float32": (times("q", 1e30, 0), 0),
}


@pytest.mark.full
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
@pytest.mark.parametrize("name", SPOILT_BACKWARD)
def test_gradients_of_heads_that_cannot_be_split_are_those_of_simt(name, backend):
    """Of one head of k and all that belongs to it; the others are what they were."""
    spoil, flagged = SPOILT_BACKWARD[name]
    q, k, v, do = random_inputs(batch=(1,), hq=4, hk=2, nq=50, nk=70, d=16)
    arrays = {"do": do, "q": q, "k": k, "v": v}
    capability = HOPPER if backend == "sm90" else AMPERE
    before = gradients_on_machine(arrays, backend, capability)
    spoil(arrays)
    after, by_simt = (gradients_on_machine(arrays, name, capability) for name in (backend, "simt"))
    for x, unspoilt, simt in zip(after, before, by_simt, strict=True):
        for of_head in np.split(np.arange(x.shape[1]), 2)[flagged]:
            assert same_bits(x[0, of_head], simt[0, of_head])
        for of_head in np.split(np.arange(x.shape[1]), 2)[1 - flagged]:
            assert same_bits(x[0, of_head], unspoilt[0, of_head])
            assert not same_bits(x[0, of_head], simt[0, of_head])


@pytest.mark.full
def test_the_gradient_of_a_bias_of_each_head_is_that_of_simt_where_it_is_flagged():
    """And what it was, where it is not."""
    q, k, v, do = random_inputs(batch=(1,), hq=4, hk=2, nq=50, nk=70, d=16)
    arrays = {"do": do, "q": q, "k": k, "v": v}
    options = {"bias": np.random.default_rng(1).standard_normal((1, 4, 50, 70)).astype(np.float32), "bias_grad": True}
    before = gradients_on_machine(arrays, "sm80", **options)[3]
    spoilt("do", np.nan, 3)(arrays)
    after, by_simt = (gradients_on_machine(arrays, backend, **options)[3] for backend in ("sm80", "simt"))
    assert same_bits(after[0, 2:], by_simt[0, 2:])
    assert same_bits(after[0, :2], before[0, :2])
    assert not same_bits(after[0, :2], by_simt[0, :2])
    assert np.isnan(after[0, 3, 11]).all()
    assert np.isfinite(after[0, :3]).all()


DLSE = np.random.default_rng(5).standard_normal((2, 4, 50)).astype(np.float32)  # without it rows of dS sum to 0
SHARED_BIAS = {
    "NaN in do": (spoilt("do", np.nan, 1), {}, ()),
    "a row of do far below": (times("do", 2.0**-30, 2, 5), {"causal": True}, ()),
    "all heads of a batch element": (times("k", 2.0**-30, slice(None), 5), {"causal": True, "kv_lengths": np.array([70, 33])}, ()),
    "bias of keys": (times("q", 2.0**-30, 1, 5), {}, (2,)),
    "one number": (times("do", 2.0**-30, 2, 5), {"dlse": DLSE}, (2, 3)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SHARED_BIAS)
def test_the_gradient_of_a_bias_that_flagged_heads_share_with_others(name):
    """It is the oracle's sum of both; where the oracle has NaN, NaN."""
    spoil, options, ones = SHARED_BIAS[name]
    q, k, v, do = random_inputs(batch=(2,), hq=4, hk=2, nq=50, nk=70, d=16)
    arrays = {"do": do, "q": q, "k": k, "v": v}
    spoil(arrays)
    shape = [1 if axis in ones else n for axis, n in enumerate((1, 1, 50, 70))]
    options = options | {"bias": np.random.default_rng(1).standard_normal(shape).astype(np.float32), "bias_grad": True}
    ours = gradients_on_machine(arrays, "sm80", **options)[3]
    with np.errstate(all="ignore"):
        ref = whole.gradients(do, q, k, v, **options)[3]
    finite = np.isfinite(ref)
    assert (np.isnan(ours) == ~finite).all()
    assert finite.any()
    assert finite.all() == ("NaN" not in name)
    np.testing.assert_allclose(ours[finite], ref[finite], rtol=1e-5, atol=4e-6 * np.abs(ref[finite]).max())


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["plain", "causal"])
def test_a_gradient_of_the_lse_finds_the_centre_of_the_keys_again(options):
    """Rows of dS sum to dlse, not to 0: dq has that times the centre."""
    draw = lambda rng, shape: 30 + 3 * rng.standard_normal(shape)
    q, k, v, do = random_inputs(batch=(1,), hq=2, hk=1, nq=NQ, nk=NK, d=16, draw=draw)
    q, dlse = q / 100, np.random.default_rng(5).standard_normal((1, 2, NQ)).astype(np.float32)
    o, lse = reference.forward(q, k, v, **options, return_lse=True)
    with machine(capability=AMPERE):
        ours = numba_flash.backward(do, q, k, v, o.astype(np.float32), lse.astype(np.float32), dlse=dlse, backend="sm80", **options)
    for x, ref in zip(ours, whole.gradients(do, q, k, v, dlse=dlse, **options), strict=True):
        assert np.linalg.norm(x - ref) < 3e-5 * np.linalg.norm(ref)


@pytest.mark.full
@pytest.mark.parametrize("deterministic", [True, False])
def test_gradients_of_packed_sequences_on_hopper(deterministic, monkeypatch):
    """Each as if it were alone, one of them empty; centres of keys and values are those of all together."""
    monkeypatch.setattr(prepare_dq_order, "MANY_PACKED", 1)
    q_offsets, k_offsets = np.array([0, 70, 70, 150]), np.array([0, 50, 120, 121])
    draw = lambda rng, shape: 3 + rng.standard_normal(shape)
    q, k, v, do = random_inputs(batch=(1,), hq=2, hk=1, nq=150, nk=121, d=16, draw=draw)
    q, k, v, do = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v, do - 3))
    with machine(seed=1):
        o, lse = numba_flash.forward_packed(q, k, v, q_offsets, k_offsets, backend="sm90", return_lse=True, causal=True)
        ours = numba_flash.backward_packed(
            do, q, k, v, o, lse, q_offsets, k_offsets, backend="sm90", causal=True, deterministic=deterministic
        )
    for (i, j), (m, n) in zip(pairwise(q_offsets), pairwise(k_offsets), strict=True):
        alone = [x.swapaxes(0, 1) for x in (do[i:j], q[i:j], k[m:n], v[m:n])]
        for x, ref in zip((ours[0][i:j], ours[1][m:n], ours[2][m:n]), whole.gradients(*alone, causal=True), strict=True):
            np.testing.assert_allclose(x.swapaxes(0, 1), ref, atol=1e-5 * max(1, np.abs(ref).max(initial=0)))


# ---- one product instead of three --------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("d", [64, 128])
def test_tf32_on_hopper(d):
    """Likewise, of a forward pass."""
    q, k, v, _ = random_inputs(batch=(1,), hq=2, hk=1, nq=70, nk=90, d=d)
    with machine():
        ours = numba_flash.forward(q, k, v, backend="sm90", precision="tf32")
    ref = reference.forward(q, k, v)
    assert 1e-5 < np.linalg.norm(ours - ref) / np.linalg.norm(ref) < 1.5e-3


@pytest.mark.full
@pytest.mark.parametrize(
    ("d", "options"), [(64, {}), (128, {"causal": True}), (40, {"softcap": 3.0}), (64, {"bias": BIAS})], ids=["64", "128", "40", "bias"]
)
def test_tf32(d, options):
    """Errors are those of 11 bits, and not of 22."""
    q, k, v, do = random_inputs(batch=(1,), hq=2, hk=1, nq=70, nk=90, d=d)
    o, lse = reference.forward(q, k, v, **options, return_lse=True)
    with machine(capability=AMPERE):
        ours = numba_flash.forward(q, k, v, backend="sm80", precision="tf32", **options)
        inputs = do, q, k, v, o.astype(np.float32), lse.astype(np.float32)
        options = options | {"bias_grad": "bias" in options}
        gradients = numba_flash.backward(*inputs, backend="sm80", precision="tf32", **options)
    for x, ref in zip((ours, *gradients), (o, *whole.gradients(do, q, k, v, **options)), strict=True):
        assert 1e-5 < np.linalg.norm(x - ref) / np.linalg.norm(ref) < 1.5e-3


# ---- what centres must not touch ---------------------------------------------------------------------------------------------------------

hidden = np.ones((NQ, NK), bool)
hidden[[3, 69]] = False
UNSEEN = {
    "causal": ({"causal": True, "q_start": -20}, range(20)),
    "a mask": ({"mask": hidden}, [3, 69]),
    "no keys": ({"kv_lengths": np.array([0])}, range(NQ)),
    "beyond the queries": ({"q_lengths": np.array([33]), "q_start": 0}, range(33, NQ)),
}


@pytest.mark.full
@pytest.mark.parametrize("multiprocessors", [2, 60], ids=["whole", "in parts"])
@pytest.mark.parametrize(
    ("backend", "name"), [*(("sm80", name) for name in UNSEEN), *(("sm90", name) for name in UNSEEN if name != "a mask")]
)
def test_rows_that_see_nothing_are_zero(backend, name, multiprocessors):
    """O = 0 and lse = -inf exactly, not the centre and not the shift."""
    options, rows = UNSEEN[name]
    q, k, v, _ = random_inputs(batch=(1,), hq=1, hk=1, nq=NQ, nk=NK, d=16, draw=lambda rng, shape: 300 + 10 * rng.standard_normal(shape))
    with machine(multiprocessors=multiprocessors, capability=HOPPER if backend == "sm90" else AMPERE):
        o, lse = numba_flash.forward(q / 300, k, v, backend=backend, return_lse=True, **options)
    ref, ref_lse = reference.forward(q / 300, k, v, **options, return_lse=True)
    assert (o[0, 0, rows] == 0).all()
    assert (lse[0, 0, rows] == -np.inf).all()
    np.testing.assert_allclose(o, ref, rtol=2e-6)
    np.testing.assert_allclose(lse, ref_lse, rtol=2e-6)


@pytest.mark.full
@pytest.mark.parametrize(("backend", "capability"), [("sm80", AMPERE), ("sm90", HOPPER)], ids=["sm80", "sm90"])
@pytest.mark.parametrize(("nq", "nk", "multiprocessors"), [(70, 90, 2), (3, 1100, 8)], ids=["whole", "in parts"])
def test_out_and_the_order_of_warps(backend, capability, nq, nk, multiprocessors):
    """`out=` gets the same bits, with any strides, and so does another order."""
    q, k, v, _ = random_inputs(batch=(1,), hq=2, hk=1, nq=nq, nk=nk, d=64, draw=lambda rng, shape: 3 + rng.standard_normal(shape))
    out = np.full((1, 2, nq, 128), np.nan, np.float32)[..., ::-2]
    with machine(0, multiprocessors, capability=capability):
        first = numba_flash.forward(q, k, v, backend=backend, return_lse=True)
    with machine(1, multiprocessors, resident=1, capability=capability):
        o, lse = numba_flash.forward(q, k, v, backend=backend, return_lse=True, out=out)
    assert o is out
    assert same_bits(np.ascontiguousarray(out), first[0])
    assert same_bits(lse, first[1])
    ref, ref_lse = reference.forward(q, k, v, return_lse=True)
    np.testing.assert_allclose(out, ref, atol=2e-6, rtol=2e-6)
    np.testing.assert_allclose(lse, ref_lse, atol=4e-6, rtol=1e-6)
