"""Masks of blocks: what they say, on every backend; what they hide as a whole takes neither time nor memory."""

import tracemalloc

import numpy as np
import pytest
from support import SIMULATED, Backend, random_inputs, same_bits, whole
from support.naive import check, run

import numba_flash
from numba_flash import BlockMask, call, reference
from numba_flash.cpu import scratch

simulator = pytest.mark.simulator
NQ, NK = (5, 7) if SIMULATED else (270, 330)
SIZES = [1, 2, (3, 1), (1, 4), 8] if SIMULATED else [1, 16, 64, 100, 128, (16, 128), (128, 16), (1, 64), (64, 1), (300, 512)]
CPU = Backend("cpu", "numpy")
LEADS = [(), (1,), (2,), (2, 1), (1, 2), (2, 2)]


def problem(seed=0, batch=(2,), hq=2, hk=1, nq=NQ, nk=NK, d=5, dtype="float32"):
    return random_inputs(batch=batch, hq=hq, hk=hk, nq=nq, nk=nk, d=d, dtype=dtype, seed=seed)


def drawn(size, *lead, nq=NQ, nk=NK, share=0.5, seed=1) -> BlockMask:
    """A share of all blocks is visible; the first queries see nothing."""
    counts = BlockMask(np.ones((1, 1), bool), size).block_size.counts(nq, nk)
    blocks = np.random.default_rng(seed).random((*lead, *counts)) < share
    blocks[..., 0, :] = False
    return BlockMask(blocks, size)


# ---- what it says ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, (2, 5), (5, 1), 20])
def test_dense_is_each_element_repeated(size):
    mask = drawn(size, 2, nq=9, nk=14)
    by_hand = np.array(
        [[[mask.blocks[h, i // mask.block_size[0], j // mask.block_size[1]] for j in range(14)] for i in range(9)] for h in (0, 1)]
    )
    np.testing.assert_array_equal(mask.dense(9, 14), by_hand)
    one = BlockMask(mask.blocks[:, :1, :1], size)
    assert one.dense(9, 14).shape == (2, 9, 14)
    assert (one.dense(9, 14) == mask.blocks[:, :1, :1]).all()
    assert repr(one) == f"BlockMask(blocks of shape (2, 1, 1), block_size={tuple(mask.block_size)})"


def test_the_oracle_knows_it():
    q, k, v, do = problem()
    mask = drawn(64, 2)
    dense = mask.dense(NQ, NK)
    for of_blocks, of_pairs in zip(
        whole.everything(do, q, k, v, mask=mask),
        whole.everything(do, q, k, v, mask=dense),
        strict=True,
    ):
        np.testing.assert_array_equal(of_blocks, of_pairs)


# ---- every backend -----------------------------------------------------------------------------------------------------------------------


@simulator(full=True)
@pytest.mark.parametrize("size", [size if n in (2, 3, 5) else pytest.param(size, marks=pytest.mark.full) for n, size in enumerate(SIZES)])
def test_block_sizes(backend, size):
    results = check(backend, *problem(), mask=drawn(size, 2))
    hidden = size[0] if isinstance(size, tuple) else size
    assert not results["o"][..., :hidden, :].any()
    assert (results["lse"][..., :hidden] == -np.inf).all()
    assert not results["dq"][..., :hidden, :].any()


@simulator(full=True)
@pytest.mark.parametrize("lead", LEADS)
def test_leading_axes_broadcast(backend, lead):
    check(backend, *problem(), mask=drawn(SIZES[2], *lead), window=(60, 60))


@simulator(full=True)
def test_with_a_bias_and_its_gradient(backend):
    bias = np.random.default_rng(2).standard_normal((2, NQ, NK)).astype(np.float32)
    check(backend, *problem(), mask=drawn(SIZES[1], 2), bias=bias, bias_grad=True, causal=True)


@simulator(full=True)
def test_with_lengths(backend):
    lengths = {"q_lengths": np.array([NQ, 3]), "kv_lengths": np.array([2, NK], np.int32)}
    check(backend, *problem(), mask=drawn(SIZES[1], 2, 1), **lengths)


STRIDES = {
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "reversed": lambda x: x[..., ::-1, ::-1],
    "strided": lambda x: np.repeat(x, 3, axis=-1)[..., ::3],
    "one element": lambda x: np.broadcast_to(x[..., 1:2, 1:2], x.shape),
}


@simulator(full=True)
@pytest.mark.parametrize("strides", STRIDES)
def test_blocks_of_any_strides(backend, strides):
    mask = drawn(SIZES[1], 2)
    check(backend, *problem(), mask=BlockMask(STRIDES[strides](mask.blocks), mask.block_size))


@simulator(full=True)
@pytest.mark.full_on_cpu
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_dtypes(backend, dtype):
    check(backend, *problem(dtype=dtype, d=16), mask=drawn(SIZES[4], 2))


@simulator(full=True)
def test_nothing_is_visible(backend):
    q, k, v, do = problem()
    results = run(backend, q, k, v, do, mask=BlockMask(np.zeros((1, 1), bool), max(NQ, NK)))
    assert (results.pop("lse") == -np.inf).all()
    assert not any(x.any() for x in results.values())


@simulator(full=True)
def test_equal_bits(backend):
    """In every run, and whatever a block is called: the same tiles are visited."""
    first, again = (run(backend, *problem(), mask=drawn(SIZES[3])) for _ in range(2))
    assert all(same_bits(x, again[name]) for name, x in first.items())


@simulator(full=True)
def test_zero_sizes(backend):
    for nq, nk in ((0, 3), (3, 0)):
        results = run(backend, *problem(nq=nq, nk=nk), mask=BlockMask(np.ones((-(-nq // 2), -(-nk // 2)), bool), 2))
        assert not results["o"].any()


def test_layouts_share_a_prepared_call(monkeypatch):
    """Two masks with blocks that lie alike, whatever they say; another size is another call."""
    q, k, v, _ = problem()
    monkeypatch.setattr(call, "_prepared", {})
    masks = [drawn(100, seed=seed) for seed in (1, 2)]
    results = [numba_flash.forward(q, k, v, mask=mask, backend="cpu") for mask in masks]
    keys = lambda: [key for key in call._prepared if isinstance(key, tuple)]
    assert len(keys()) == 1
    for mask, x in zip(masks, results, strict=True):
        np.testing.assert_allclose(x, reference.forward(q, k, v, mask=mask), atol=1e-5)
    numba_flash.forward(q, k, v, mask=BlockMask(masks[0].blocks, (99, 99)), backend="cpu")
    assert len(keys()) == 2


def test_what_is_written_may_not_be_the_blocks():
    q = k = v = np.zeros((64, 4), np.float32)
    memory = np.zeros((64, 4), np.float32)
    blocks = memory.view(bool)[:8, :8]
    with pytest.raises(ValueError, match=r"^out must not overlap mask; they share memory"):
        numba_flash.forward(q, k, v, mask=BlockMask(blocks, 8), out=memory, backend="cpu")


# ---- time and memory ---------------------------------------------------------------------------------------------------------------------


def test_panels_of_queries(monkeypatch):
    """The backward pass takes part of the queries at a time where its sums are many: blocks are counted from the first of all."""
    monkeypatch.setattr(scratch, "DQ_PARTIAL_BYTES", 2**14)
    check(CPU, *problem(nq=700), mask=drawn(100, nq=700))


LONG, BLOCK, NEAR = 2**17, 128, 2  # a matrix of 17 G pairs; of 1024 x 1024 blocks half a percent is visible


def fails_far_away(score, b, h, i, j):
    return score + 0 * (1 // max((NEAR + 2) * BLOCK - min(abs(i - j), j), 0))  # tiles have two blocks of queries


def long_problem():
    """Local and global blocks of a sequence whose mask of pairs has 17 GB."""
    at = np.arange(LONG // BLOCK)
    blocks = abs(at[:, None] - at) <= NEAR
    blocks[:, 0] = True
    return random_inputs(batch=(), hq=1, hk=1, nq=LONG, nk=LONG, d=1), BlockMask(blocks, BLOCK)


@pytest.mark.skipif(SIMULATED, reason="of the CPU")
def test_tiles_that_are_visited_are_those_that_are_visible():
    """A function raises where it is asked for a score that is far from visible blocks: so it is asked for no more than a few percent."""
    (q, k, v, _), mask = long_problem()
    rows = slice(3000, 3010)
    q[..., : rows.start, :] = q[..., rows.stop :, :] = 0
    forward = lambda: numba_flash.forward(q, k, v, mask=mask, score_mod=fails_far_away, return_lse=True, backend="cpu")
    forward()  # compiles
    tracemalloc.start()
    o, lse = forward()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * (o.nbytes + lse.nbytes) + 2**20
    dense = np.abs(np.arange(rows.start, rows.stop)[:, None] // BLOCK - np.arange(LONG) // BLOCK) <= NEAR
    dense[:, :BLOCK] = True
    expected = reference.forward(q[..., rows, :], k, v, mask=dense, return_lse=True)
    np.testing.assert_allclose(o[..., rows, :], expected[0], atol=1e-5)
    np.testing.assert_allclose(lse[..., rows], expected[1], atol=1e-5)
