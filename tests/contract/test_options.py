"""One option at a time: shapes, strides and dtypes of its arrays, what it hides, and what it promises."""

import tracemalloc

import numpy as np
import pytest
from numba import njit
from support import DTYPES, SIMULATED, random_inputs, same_bits, whole
from support.naive import check, run

import numba_flash
from numba_flash import call, rng
from numba_flash.arguments.options import Generator, dropout_threshold
from numba_flash.arguments.problem import bind

simulator, full_on_cpu = pytest.mark.simulator, pytest.mark.full_on_cpu
NQ, NK = (3, 5) if SIMULATED else (140, 270)
"""Several tiles along both axes."""


def problem(seed=0, batch=(2,), hq=2, hk=1, nq=NQ, nk=NK, d=5, dtype="float32"):
    return random_inputs(batch=batch, hq=hq, hk=hk, nq=nq, nk=nk, d=d, dtype=dtype, seed=seed)


def normal(*shape, dtype=np.float32, seed=1):
    return np.array(np.random.default_rng(seed).standard_normal(shape), dtype)


# ---- bias ------------------------------------------------------------------------------------------------------------------------------

FULL = (2, 2, NQ, NK)
SHAPES = [FULL, (1, 2, NQ, NK), (2, 1, NQ, NK), (2, 2, 1, NK), (2, 2, NQ, 1), (NQ, NK), (NK,), (NQ, 1), (2, 1, 1), (1, 1, 1, 1), ()]


@pytest.mark.parametrize("shape", [pytest.param(s, marks=simulator(full=True)) if s in ((NK,), (2, 2, NQ, 1)) else s for s in SHAPES])
def test_bias_broadcasts_and_its_gradient_is_summed(backend, shape):
    results = check(backend, *problem(), bias=normal(*shape), bias_grad=True, causal=True)
    assert results["dbias"].shape == shape


@pytest.mark.parametrize("shape", [pytest.param((), marks=simulator), pytest.param((2, 1, 1), marks=simulator(full=True))])
def test_gradient_of_a_bias_that_is_one_number_for_a_head(backend, shape):
    """Threads sum columns of a tile, and one of them what the others have summed."""
    sizes = {"nq": 3, "nk": 4, "d": 2} if SIMULATED else {}
    check(backend, *problem(batch=(), **sizes), bias=normal(*shape), bias_grad=True)


def test_bias_in_five_dimensions(backend):
    """One bias for all rows of a pair representation, as triangle attention needs it."""
    inputs = problem(batch=(2, 3), nq=20, nk=20)
    check(backend, *inputs, bias=normal(2, 1, 2, 20, 20), bias_grad=True)


@pytest.mark.parametrize(
    ("bias_dtype", "dtype"),
    [
        ("float32", "float32"),
        pytest.param("own", "bfloat16", marks=full_on_cpu),
        *(pytest.param("float32", dtype, marks=pytest.mark.full) for dtype in DTYPES if dtype != "float32"),
        *(pytest.param("own", dtype, marks=pytest.mark.full) for dtype in ("float16", "float64")),
    ],
)
def test_bias_dtypes(backend, dtype, bias_dtype):
    bias = normal(2, NQ, NK).astype(DTYPES[dtype if bias_dtype == "own" else "float32"])
    check(backend, *problem(dtype=dtype), bias=bias, bias_grad=True)


ONE_AXIS_AND_MORE = [(), (1,), (1, 1), (30,), (20, 1), (2, 1, 1), (2, 1, 1, 30), (1, 1, 20, 30)]


@pytest.mark.parametrize("shape", ONE_AXIS_AND_MORE)
@pytest.mark.parametrize(
    ("dtype", "bias_dtype"),
    [
        ("float32", "float32"),
        *(pytest.param(x, x, marks=full_on_cpu) for x in ("float64", "float16")),
        pytest.param("bfloat16", "bfloat16", marks=pytest.mark.full),
        *(pytest.param(x, "float32", marks=pytest.mark.full) for x in ("float16", "bfloat16")),
    ],
)
def test_the_gradient_of_a_bias_has_its_shape(backend, dtype, bias_dtype, shape):
    """In every dtype: each has kernels of its own."""
    bias = normal(*shape).astype(DTYPES[bias_dtype])
    results = check(backend, *problem(nq=20, nk=30, d=16, dtype=dtype), bias=bias, bias_grad=True)
    assert results["dbias"].shape == shape
    assert results["dbias"].dtype == bias.dtype


STRIDES = {
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "reversed": lambda x: np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1],
    "repeated rows": lambda x: np.broadcast_to(x[..., :1, :], x.shape),
    "repeated heads": lambda x: np.broadcast_to(x[:, :1], x.shape),
}


@pytest.mark.parametrize("strides", STRIDES)
def test_bias_and_mask_of_any_strides(backend, strides):
    bias, mask = STRIDES[strides](normal(*FULL)), STRIDES[strides](normal(*FULL, seed=2) > 0)
    check(backend, *problem(), bias=bias, mask=mask, bias_grad=True)


@simulator(full=True)
def test_minus_infinity_in_the_bias_hides(backend):
    q, k, v, do = problem()
    bias = normal(NQ, NK)
    bias[:, 2], bias[1] = -np.inf, -np.inf
    clean = check(backend, q, k, v, do, bias=bias, bias_grad=True)
    assert (clean["o"][..., 1, :] == 0).all()
    assert (clean["dbias"][:, 2] == 0).all()
    k[..., 2, :], v[..., 2, :] = np.nan, np.nan
    results = run(backend, q, k, v, do, bias=bias, bias_grad=True)
    for name, x in results.items():
        np.testing.assert_allclose(x, clean[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("shape", [(2, 1, NQ, NK), (NK,), (1, 2, NQ, 1)])
def test_the_gradient_of_a_bias_is_deterministic(backend, shape):
    first, second = (run(backend, *problem(), bias=normal(*shape), bias_grad=True) for _ in range(2))
    assert same_bits(first["dbias"], second["dbias"])


@pytest.mark.parametrize("shape", [(4096,), (4096, 1)])
def test_the_gradient_of_a_broadcast_bias_stores_no_matrix(backend, shape):
    """N = 4096: a matrix of the scores would take 64 MiB. `sm80` keeps 32 MiB of sums of dq."""
    q, k, v, do = (backend.to_device(x) for x in problem(batch=(), hq=1, nq=4096, nk=4096))
    bias = backend.to_device(normal(*shape))
    o, lse = backend.forward(q, k, v, bias=bias, return_lse=True)
    backward = lambda: backend.backward(do, q, k, v, o, lse, bias=bias, bias_grad=True)
    backward()  # what the compiler takes is not counted
    if backend.name == "cpu":
        tracemalloc.start()
        backward()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    else:
        pool = pytest.importorskip("cupy").get_default_memory_pool()
        pool.free_all_blocks()
        before = pool.total_bytes()
        backward()
        peak = pool.total_bytes() - before
    assert peak < (40 if backend.name == "sm80" else 16) * 2**20


# ---- mask ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_mask_broadcasts(backend, shape):
    check(backend, *problem(), mask=np.array(normal(*shape) > -0.3), window=(60, 60))


@simulator(full=True)
def test_a_mask_of_whole_tiles(backend):
    side = lambda n: np.arange(n) // -(-n // 2)
    mask = side(NQ)[:, None] == side(NK)
    results = check(backend, *problem(), mask=mask)
    assert np.isfinite(results["o"]).all()


@simulator(full=True)
def test_masked_keys_may_hold_anything(backend):
    q, k, v, do = problem()
    mask = np.ones((NQ, NK), bool)
    mask[:, 3:5], mask[0] = False, False
    clean = check(backend, q, k, v, do, mask=mask)
    assert (clean["o"][..., 0, :] == 0).all()
    assert (clean["lse"][..., 0] == -np.inf).all()
    assert (clean["dq"][..., 0, :] == 0).all()
    k[..., 3:5, :], v[..., 3:5, :] = np.nan, np.inf
    results = run(backend, q, k, v, do, mask=mask)
    for name, x in results.items():
        np.testing.assert_allclose(x, clean[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert (clean["dv"][..., 3:5, :] == 0).all()


LIMIT = 4 if SIMULATED else 512
"""Whole tiles of every kernel."""


def fails_beyond_the_limit(score, b, h, i, j):
    return score + 1 // max(LIMIT - j, 0)


@simulator(full=True)
@pytest.mark.parametrize("masked", [False, True])
def test_tiles_without_a_visible_pair_are_skipped(backend, masked):
    """A function that raises there is never asked; without the mask it is, and what it raises reaches the caller."""
    if backend.name in ("simt", "sm80") and not SIMULATED:
        pytest.skip("a function cannot raise on a GPU; the same kernels run in the simulator")
    q, k, v, do = problem(nk=2 * LIMIT)
    options = {"score_mod": fails_beyond_the_limit, "score_mod_grad": one}
    if not masked:
        with pytest.raises(ZeroDivisionError):
            run(backend, q, k, v, do, **options)
        return
    results = run(backend, q, k, v, do, mask=np.arange(2 * LIMIT) < LIMIT, **options)
    alone = run(backend, q, k[..., :LIMIT, :], v[..., :LIMIT, :], do, **options)
    np.testing.assert_allclose(results["o"], alone["o"], rtol=1e-5, atol=1e-6)
    assert (results["dk"][..., LIMIT:, :] == 0).all()


# ---- lengths ---------------------------------------------------------------------------------------------------------------------------

INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint64]


@pytest.mark.parametrize("integer", INTEGERS)
def test_lengths_of_every_integer_dtype(backend, integer):
    lengths = {"q_lengths": np.array([NQ - 30, 3], np.int16).astype(integer), "kv_lengths": np.array([100, 0]).astype(integer)}
    check(backend, *problem(), causal=True, **lengths)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"causal": True}, marks=simulator(full=True)),
        {"window": (20, 3)},
        pytest.param({"causal": True, "q_start": 0}, marks=simulator(full=True)),
    ],
)
def test_what_lies_beyond_the_lengths_is_not_read(backend, options):
    """Padding holds NaN; results are those of each sequence alone, and zeros in the padding."""
    q, k, v, do = problem(batch=(3,))
    q_lengths, kv_lengths = np.array([NQ, 2, NQ - 2]), np.array([4, NK, 0])
    for b in range(3):
        q[b, :, q_lengths[b] :] = do[b, :, q_lengths[b] :] = np.nan
        k[b, :, kv_lengths[b] :] = v[b, :, kv_lengths[b] :] = np.nan
    results = check(backend, q, k, v, do, q_lengths=q_lengths, kv_lengths=kv_lengths, **options)
    for b in range(3):
        i, j = slice(q_lengths[b]), slice(kv_lengths[b])
        alone = run(backend, q[b, :, i], k[b, :, j], v[b, :, j], do[b, :, i], **options)
        for name, x in results.items():
            length = j.stop if name in ("dk", "dv") else i.stop
            np.testing.assert_allclose(x[b, :, :length], alone[name], rtol=1e-4, atol=1e-5)
            assert (x[b, :, length:] == (-np.inf if name == "lse" else 0)).all(), name


def test_lengths_in_five_dimensions(backend):
    lengths = np.array([[3, 70, 40], [0, 9, 70]])
    check(backend, *problem(batch=(2, 3), nq=70, nk=70), q_lengths=lengths, kv_lengths=lengths[::-1], causal=True)


def test_lengths_of_a_single_sequence(backend):
    check(backend, *problem(batch=()), kv_lengths=np.array(7), causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "length"),
    [
        *(pytest.param(*x, marks=simulator(full=True)) for x in (("kv_lengths", NK + 1), ("kv_lengths", -1), ("q_lengths", NQ + 1))),
    ],
)
def test_impossible_lengths_on_a_gpu_give_nan(monkeypatch, name, length):
    """Nothing of the sequence is read: the simulator raises where an index lies beyond an array."""
    if SIMULATED:  # its arrays are NumPy's, whose values could be checked
        xp, backend = np, "simt"
        monkeypatch.setattr(call, "check_values", lambda *_: None)
    else:
        xp, backend = pytest.importorskip("cupy"), None
    q, k, v, do = map(xp.asarray, problem(**({"hq": 1, "d": 2} if SIMULATED else {})))
    bias, lengths = xp.asarray(normal(2, 1, 1, NK)), {name: xp.array([3, length])}
    options = {"backend": backend, **lengths}
    o, lse = numba_flash.forward(q, k, v, return_lse=True, **options)
    gradients = numba_flash.backward(do, q, k, v, o, lse, **options)
    *_, dbias = numba_flash.backward(do, q, k, v, o, lse, bias=bias, bias_grad=True, **options)
    for x in (o, lse, *gradients, dbias):
        assert bool(xp.isnan(x[1]).all())
        assert not bool(xp.isnan(x[0]).any())


@pytest.mark.gpu
def test_lengths_may_be_on_either_side():
    cp = pytest.importorskip("cupy")
    q, k, v, _ = map(cp.asarray, problem())
    lengths = np.array([3, 200])
    assert cp.array_equal(numba_flash.forward(q, k, v, kv_lengths=lengths), numba_flash.forward(q, k, v, kv_lengths=cp.asarray(lengths)))


# ---- packed sequences ------------------------------------------------------------------------------------------------------------------

Q_OFFSETS, K_OFFSETS = ((0, 3, 3, 7, 8), (0, 2, 7, 7, 11)) if SIMULATED else ((0, 70, 70, 201, 330), (0, 50, 120, 120, 400))


def tilt(score, b, h, i, j):
    return score * 0.5 + (b - h + i - j) * 0.125


def half(score, b, h, i, j):
    return 0.5


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=simulator(full=True)),
        pytest.param({"causal": True}, marks=simulator(full=True)),
        pytest.param({"causal": True, "q_start": 1, "window": (30, 2)}, marks=simulator(full=True)),
        pytest.param(
            {"dropout": 0.3, "rng": (5, 6), "softcap": 2.0, "score_mod": tilt, "score_mod_grad": half}, marks=simulator(full=True)
        ),
    ],
    ids=lambda options: ", ".join(options) or "plain",
)
def test_packed_sequences_are_sequences_alone(backend, options):
    """Each against the oracle as the last of a batch, so that b is its number."""
    generator = np.random.default_rng(3)
    q, do = (generator.standard_normal((Q_OFFSETS[-1], 4, d)) for d in (6, 3))
    k, v = (generator.standard_normal((K_OFFSETS[-1], 2, d)) for d in (6, 3))
    dlse = generator.standard_normal((4, Q_OFFSETS[-1]))
    offsets = np.array(Q_OFFSETS, np.int32), np.array(K_OFFSETS)
    on_device = [backend.to_device(x) for x in (q, k, v, do, dlse, *offsets)]
    o, lse = backend.forward_packed(*on_device[:3], *on_device[5:], return_lse=True, **options)
    gradients = backend.backward_packed(on_device[3], *on_device[:3], o, lse, *on_device[5:], dlse=on_device[4], **options)
    o, lse, dq, dk, dv = map(backend.to_host, (o, lse, *gradients))
    last = lambda x, b: np.concatenate([np.zeros((b, *x.shape)), x[None]])
    for b in range(len(Q_OFFSETS) - 1):
        i, j = slice(*Q_OFFSETS[b : b + 2]), slice(*K_OFFSETS[b : b + 2])
        inputs = [last(x.swapaxes(0, 1), b) for x in (q[i], k[j], v[j])]
        ref = whole.everything(last(do[i].swapaxes(0, 1), b), *inputs, dlse=last(dlse[:, i], b), **options)
        ours = (o[i].swapaxes(0, 1), lse[:, i], *(x.swapaxes(0, 1) for x in (dq[i], dk[j], dv[j])))
        for x, expected in zip(ours, ref, strict=True):
            np.testing.assert_allclose(x, expected[b], rtol=1e-9, atol=1e-12)


def test_packed_sequences_in_16_bits_and_out(backend):
    q, k, v, do = (backend.to_device(normal(90, 2, 16, seed=s).astype(np.float16)) for s in range(4))
    offsets = backend.to_device(np.array([0, 40, 90]))
    out, gradients = (
        backend.to_device(np.empty((90, 2, 16), np.float16)),
        tuple(backend.to_device(np.empty((90, 2, 16), np.float16)) for _ in range(3)),
    )
    o, lse = backend.forward_packed(q, k, v, offsets, offsets, return_lse=True, out=out)
    assert o is out
    returned = backend.backward_packed(do, q, k, v, o, lse, offsets, offsets, out=gradients)
    assert all(a is b for a, b in zip(returned, gradients, strict=True))
    for part in (slice(0, 40), slice(40, 90)):
        alone = backend.to_host(backend.forward(*(x[part].swapaxes(0, 1) for x in (q, k, v))))
        np.testing.assert_array_equal(backend.to_host(o)[part].swapaxes(0, 1), alone)


@pytest.mark.parametrize("sequences", [0, 1])
def test_packed_without_tokens(backend, sequences):
    q = backend.to_device(np.zeros((0, 2, 8), np.float32))
    offsets = backend.to_device(np.zeros(sequences + 1, np.int64))
    o, lse = backend.forward_packed(q, q, q, offsets, offsets, return_lse=True)
    assert o.shape == (0, 2, 8)
    assert lse.shape == (2, 0)
    assert [x.shape for x in backend.backward_packed(q, q, q, q, o, lse, offsets, offsets)] == [(0, 2, 8)] * 3


# ---- softcap, dropout, dlse ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(x, marks=full_on_cpu) for x in DTYPES if x != "float32")])
@pytest.mark.parametrize("softcap", [0.3, 50.0])
def test_softcap(backend, dtype, softcap):
    check(backend, *problem(dtype=dtype), softcap=softcap, scale=1.0)


@simulator(full=True)
def test_dropout_keeps_the_same_bits_everywhere(backend):
    """With v the unit matrix, o is the matrix of probabilities: it is 0 exactly where `dropout_mask` says."""
    n = 8 if SIMULATED else 128
    q, k, _, _ = problem(nq=n, nk=n, hk=2, d=n)
    v = np.broadcast_to(np.eye(n, dtype=np.float32), (2, 2, n, n))
    plain = backend.to_host(backend.forward(*map(backend.to_device, (q, k, v)), scale=0.1))
    for state in ((1, 2), (2**63 + 5, 2**32 - 1)):
        bits = numba_flash.dropout_mask((2, 2, n, n), dropout=0.4, rng=state)
        o = backend.to_host(backend.forward(*map(backend.to_device, (q, k, v)), dropout=0.4, rng=state, scale=0.1))
        np.testing.assert_array_equal(o != 0, bits)
        np.testing.assert_allclose(o[bits], plain[bits] / (1 - 26214 / 65536), rtol=4e-6)


@simulator(full=True)
@pytest.mark.parametrize("dtype", ["float32"] if SIMULATED else ["float32", pytest.param("float16", marks=full_on_cpu)])
def test_dropout_of_a_part_has_the_bits_of_the_whole(backend, dtype):
    """Results over parts of the keys, put together, are those over all of them; so are sums of gradients."""
    n, parts = (16, [(3, 8)]) if SIMULATED else (96, [(0, 64), (37, 0), (37, 64)])
    inputs, dropout, state = problem(nq=n, nk=n, d=4 if SIMULATED else 16, dtype=dtype), 0.4, (5, 6)
    mask = numba_flash.dropout_mask((2, 2, n, n), dropout=dropout, rng=state)
    for i, j in parts:
        bits = numba_flash.dropout_mask((2, 2, n - i, n - j), dropout=dropout, rng=(*state, i, j))
        np.testing.assert_array_equal(bits, mask[..., i:, j:])
        q, k, v, do = (x[..., at:, :] for x, at in zip(inputs, (i, j, j, i), strict=True))
        check(backend, q, k, v, do, dropout=dropout, rng=(*state, i, j))


def test_no_dropout_is_no_dropout(backend):
    inputs = problem()
    plain, none = run(backend, *inputs), run(backend, *inputs, dropout=0.0, rng=(1, 2))
    assert all(same_bits(plain[name], none[name]) for name in plain)


@pytest.mark.parametrize("dropout", [1e-3, 0.5, 0.99])
def test_dropout(backend, dropout):
    check(backend, *problem(), dropout=dropout, rng=(11, 3), causal=True)


def test_the_share_that_dropout_keeps():
    for dropout in (0.1, 0.5, 0.9):
        kept = numba_flash.dropout_mask((4, 3, 200, 300), dropout=dropout, rng=(0, 0)).mean()
        assert abs(kept - (1 - dropout)) < 5 * np.sqrt(dropout * (1 - dropout) / (4 * 3 * 200 * 300))
    assert numba_flash.dropout_mask((2, 3), dropout=0.0, rng=(0, 0)).all()
    assert not (
        numba_flash.dropout_mask((50, 60), dropout=0.5, rng=(0, 0)) == numba_flash.dropout_mask((50, 60), dropout=0.5, rng=(0, 1))
    ).all()


def test_a_threshold_of_dropout_is_a_half_word():
    """To the nearest, but one of the random bits, which all lie below 2**16: that would drop everything."""
    assert [dropout_threshold(dropout) for dropout in (0.0, 0.5, 0.3, 1 - 2**-16)] == [0, 2**15, 19661, 2**16 - 1]
    assert [dropout_threshold(dropout) for dropout in (2**-18, 2**-17 * 1.01, 1 - 2**-40)] == [0, 1, 2**16 - 1]


@pytest.mark.parametrize(("dropout", "used"), [(0.3, 19661 / 65536), (1e-5, 1 / 65536), (1 - 2**-40, 65535 / 65536)])
def test_the_probability_that_is_used(backend, dropout, used):
    """The nearest multiple of 2**-16 below 1: what is kept is divided by 1 minus that, so that expectations are exact."""
    q, k, v, do = problem()
    assert bind(q, k, v, dropout=dropout, rng=(11, 3)).options.dropout == used
    rounded, given = run(backend, q, k, v, do, dropout=used, rng=(11, 3)), run(backend, q, k, v, do, dropout=dropout, rng=(11, 3))
    assert all(same_bits(rounded[name], given[name]) for name in given)


def test_a_tiny_dropout_is_none(backend):
    inputs = problem()
    plain, tiny = run(backend, *inputs), run(backend, *inputs, dropout=2**-18, rng=(1, 2))
    assert all(same_bits(plain[name], tiny[name]) for name in plain)
    assert numba_flash.dropout_mask((2, 300), dropout=2**-18, rng=(1, 2)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_through_lse(backend, dtype):
    dlse = normal(2, 2, NQ, dtype=np.float64 if dtype == "float64" else np.float32)
    check(backend, *problem(dtype=dtype), dlse=dlse, causal=True)


# ---- Philox ----------------------------------------------------------------------------------------------------------------------------

COUNTERS = [(0,) * 4, (0xFFFFFFFF,) * 4, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
KEYS = [(0,) * 2, (0xFFFFFFFF,) * 2, (0xA4093822, 0x299F31D0)]
# Known answers of Random123 (kat_vectors, philox4x32) to these, by rounds.
KNOWN = {
    7: [
        (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
        (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ],
    10: [
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ],
}


def philox_of_the_paper(counter, key, rounds: int) -> tuple[int, ...]:
    """As Salmon et al. write it down, with Python's integers."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(rounds):
        (high0, low0), (high1, low1) = divmod(0xD2511F53 * x0, 2**32), divmod(0xCD9E8D57 * x2, 2**32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


@pytest.mark.parametrize("rounds", KNOWN)
def test_known_answers_of_the_paper(rounds):
    assert [philox_of_the_paper(*each, rounds) for each in zip(COUNTERS, KEYS, strict=True)] == KNOWN[rounds]


@pytest.mark.parametrize(("counter", "key", "words"), [*zip(COUNTERS, KEYS, KNOWN[7], strict=True)])
@pytest.mark.parametrize("how", ["compiled", "NumPy"])
def test_philox_known_answers(counter, key, words, how):
    philox = rng.philox4x32 if how == "compiled" else rng.philox4x32.py_func
    assert tuple(int(x) for x in philox(*map(np.uint64, (*counter, *key)))) == words


def test_the_bit_of_a_position():
    """`keep`, which kernels call, says what `keep_all` says, which `dropout_mask` and the oracle use."""
    heads, seed, offset = np.array([[0, 1], [2, 2**31 + 5]]), 2**64 - 3, 12345
    bits = rng.keep_all(Generator(seed, offset), 0.3, heads, 3, 19)
    generator = tuple(map(np.uint64, (seed, offset, round(0.3 * 2**16))))
    for at in np.ndindex(bits.shape):
        assert rng.keep(*generator, heads[at[:2]], at[2], at[3]) == bits[at]


def test_halves_of_words_belong_to_neighbouring_keys():
    """Eight keys share a counter; the lower half of a word is that of the first of two."""
    seed, offset, head, i = 2**63 + 77, 2**32 - 5, 9, 2**30 - 1
    for j in (0, 8, 2**29 + 16):
        words = philox_of_the_paper((j // 8, i, head, offset), (seed % 2**32, seed // 2**32), 7)
        state = (np.uint64(seed), np.uint64(offset), head, i)
        assert [int(rng.bits(*state, j + x)) for x in range(8)] == [words[x // 2] >> 16 * (x % 2) & 0xFFFF for x in range(8)]


# ---- score_mod -------------------------------------------------------------------------------------------------------------------------


def one(score, b, h, i, j):
    return 1.0


def additive(bias):
    def added(score, b, h, i, j):
        return score + bias[h, i, j]

    return added


def test_an_additive_function_is_a_bias(backend):
    bias = normal(2, NQ, NK, seed=5)
    inputs = problem()
    by_function = check(backend, *inputs, score_mod=additive(bias), score_mod_grad=one)
    by_array = run(backend, *inputs, bias=bias)
    for name, x in by_function.items():
        np.testing.assert_allclose(x, by_array[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["function", *(pytest.param(x, marks=full_on_cpu) for x in ("lambda", "compiled"))])
def test_kinds_of_functions(backend, kind):
    function = {"function": tilt, "lambda": lambda s, b, h, i, j: s * 0.5 + (b - h + i - j) * 0.125, "compiled": njit(tilt)}[kind]
    check(backend, *problem(), score_mod=function, score_mod_grad=half, causal=True)


def test_a_function_may_hide(backend):
    def same_parity(score, b, h, i, j):
        return score if (i + j) % 2 == 0 and i != 3 else -np.inf

    q, k, v, do = problem()
    results = check(backend, q, k, v, do, score_mod=same_parity, score_mod_grad=one)
    assert (results["o"][..., 3, :] == 0).all()
    mask = np.add.outer(np.arange(NQ), np.arange(NK)) % 2 == 0
    mask[3] = False
    np.testing.assert_allclose(results["o"], run(backend, q, k, v, do, mask=mask)["o"], rtol=1e-5, atol=1e-6)


@full_on_cpu
def test_alibi_and_relative_position(backend):
    slopes, table = np.array([0.5, 0.25]), normal(2, 7, dtype=np.float64)
    distance = np.arange(NK)[None, :] - (np.arange(NQ)[:, None] + NK - NQ)
    expected = {
        numba_flash.alibi(slopes, q_start=NK - NQ): -slopes[:, None, None] * np.abs(distance),
        numba_flash.relative_position(table, q_start=NK - NQ): table[:, np.clip(distance, -3, 3) + 3],
    }
    for function, bias in expected.items():
        inputs = problem(dtype="float64")
        results = check(backend, *inputs, score_mod=function, score_mod_grad=function.score_mod_grad)
        np.testing.assert_allclose(results["o"], run(backend, *inputs, bias=bias)["o"], rtol=1e-9, atol=1e-12)


def test_a_function_may_bring_its_derivative(backend):
    function = numba_flash.alibi([0.5, 0.25])
    brought = run(backend, *problem(), score_mod=function)
    given = run(backend, *problem(), score_mod=function, score_mod_grad=function.score_mod_grad)
    assert all(same_bits(brought[name], given[name]) for name in given)


@full_on_cpu
def test_functions_with_other_constants_are_other_functions(backend):
    """Two closures of one source, one after the other: neither is served the other's code."""
    q, k, v, do = problem()
    for slope in (0.1, 3.0, 0.1):
        check(backend, q, k, v, do, score_mod=numba_flash.alibi([slope, slope]), score_mod_grad=one)


# ---- merge -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_is_attention_over_all_keys(backend, dtype):
    q, k, v, _ = map(backend.to_device, problem(dtype=dtype))
    parts = [backend.forward(q, k[..., j, :], v[..., j, :], return_lse=True) for j in (slice(0, 1), slice(1, 90), slice(90, None))]
    left = numba_flash.merge(*numba_flash.merge(*parts[0], *parts[1]), *parts[2])
    right = numba_flash.merge(*parts[0], *numba_flash.merge(*parts[1], *parts[2]))
    o, lse = map(backend.to_host, backend.forward(q, k, v, return_lse=True))
    eps = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    for o_merged, lse_merged in (left, right):
        assert o_merged.dtype == lse_merged.dtype == (np.float64 if dtype == "float64" else np.float32)
        np.testing.assert_allclose(backend.to_host(o_merged), o.astype(np.float64), rtol=0, atol=4 * eps)
        np.testing.assert_allclose(backend.to_host(lse_merged), lse, rtol=1e-5 if dtype != "float64" else 1e-14)
    tiny = 1e-6 if dtype != "float64" else 1e-14
    np.testing.assert_allclose(backend.to_host(left[0]), backend.to_host(right[0]), rtol=0, atol=tiny)


@pytest.mark.parametrize("double", [("lse1", "lse2"), ("o1",), ("lse1",), ("o2",), ("lse2",)], ids=", ".join)
def test_merge_is_in_float64_if_anything_is(double):
    rng = np.random.default_rng(0)
    shapes = {"o1": (2, 3, 4), "lse1": (2, 3), "o2": (2, 3, 4), "lse2": (2, 3)}
    given = {name: rng.standard_normal(shape).astype("float64" if name in double else "float32") for name, shape in shapes.items()}
    o, lse = numba_flash.merge(**given)
    assert o.dtype == lse.dtype == np.float64
    p1, p2 = (np.exp(given[name].astype(np.float64)) for name in ("lse1", "lse2"))
    np.testing.assert_allclose(lse, np.log(p1 + p2), rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(o, (p1[..., None] * given["o1"] + p2[..., None] * given["o2"]) / (p1 + p2)[..., None], rtol=1e-13)


def test_merge_with_nothing(backend):
    o, lse = (backend.to_device(x) for x in (normal(2, 3, 4), normal(2, 3)))
    nothing = backend.to_device(np.full((2, 3, 4), np.nan, np.float32)), backend.to_device(np.full((2, 3), -np.inf, np.float32))
    for arguments in ((o, lse, *nothing), (*nothing, o, lse)):
        merged = numba_flash.merge(*arguments)
        np.testing.assert_array_equal(backend.to_host(merged[0]), backend.to_host(o))
        np.testing.assert_array_equal(backend.to_host(merged[1]), backend.to_host(lse))
    empty = numba_flash.merge(*nothing, *nothing)
    assert (backend.to_host(empty[0]) == 0).all()
    assert (backend.to_host(empty[1]) == -np.inf).all()


@pytest.mark.parametrize("sizes", [{"batch": (0,)}, {"nq": 0}, {"nk": 0}])
def test_zero_sizes_with_options(backend, sizes):
    sizes = {"batch": (2,), "nq": 3, "nk": 4} | sizes
    q, k, v, do = problem(**sizes)
    bias = normal(sizes["nk"])
    results = run(backend, q, k, v, do, bias=bias, bias_grad=True, kv_lengths=np.zeros(sizes["batch"], np.int32), dropout=0.1, rng=(0, 0))
    assert all((x == (-np.inf if name == "lse" else 0)).all() for name, x in results.items())
    assert results["dbias"].shape == bias.shape
