"""The backward pass of sm90 on a Hopper GPU: random problems against dense float64, equal bits, lengths, padding, results of the user's."""

import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from support import DTYPES, no_gpu
from support.dense import (
    bits,
    dense_gradients,
    dense_gradients_packed,
    draw_length,
    draw_mask,
    draw_offsets,
    nan,
    normal,
    put,
    verify_gradients,
    wide,
)

import numba_flash
from numba_flash import call
from numba_flash.cuda.runtime import launch
from numba_flash.cuda.sm90.backward import prepare_backward, prepare_temporaries
from numba_flash.cuda.sm90.dq import prepare_dq_order

NO_HOPPER = no_gpu("sm90")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NO_HOPPER is not None, reason=f"sm90 cannot run: {NO_HOPPER}")]

forward = partial(numba_flash.forward, backend="sm90", return_lse=True)
forward_packed = partial(numba_flash.forward_packed, backend="sm90", return_lse=True)
backward = partial(numba_flash.backward, backend="sm90")
backward_packed = partial(numba_flash.backward_packed, backend="sm90")
HEAD_DIMS = [(64, 64), (128, 128), (40, 72), (96, 128), (8, 120)] * 2 + [(256, 256), (192, 128), (136, 256), (256, 64), (72, 200)]
KINDS = ["plain", "kv_lengths", "packed", "softcap", "both lengths"]
CHUNKS = len(HEAD_DIMS)
PROBLEMS = int(os.environ.get("NUMBA_FLASH_FUZZ") or 200)


@pytest.fixture
def cp():
    return pytest.importorskip("cupy")


def normals(rng, *shapes, dtype):
    return [rng.standard_normal(shape, np.float32).astype(DTYPES[dtype]) for shape in shapes]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_problems(cp, chunk, monkeypatch):
    """A chunk shares what kernels are built from, as far as possible: few to compile. Every other problem has little room for dS, and every
    third one has three multiprocessors, whose blocks do many work items each.
    """
    gpu = launch.gpu
    monkeypatch.setattr(prepare_temporaries, "FEWEST_BLOCKS", 1)
    dtype, dims, kind = ("float16", "bfloat16")[(chunk + chunk // 5) % 2], HEAD_DIMS[chunk], KINDS[chunk % 5]
    for number in range(chunk, PROBLEMS, CHUNKS):
        rng = np.random.default_rng((30, number))
        for limit in ("WORKSPACE", "MOST_WORKSPACE"):
            monkeypatch.setattr(prepare_temporaries, limit, 2**30 if number // CHUNKS % 2 else 2**20)
        monkeypatch.setattr(prepare_dq_order, "MANY_PACKED", 1)
        monkeypatch.setattr(launch, "gpu", gpu if number // CHUNKS % 3 else lambda device: gpu(device)._replace(multiprocessors=3))
        check = check_packed if kind == "packed" else check_dense
        check(cp, rng, kind, dtype, dims, number // CHUNKS % 3 > 0 if kind in ("plain", "softcap") else chunk % 2 == 0, f"problem {number}")


def check_dense(cp, rng, kind, dtype, dims, follows, what):
    (d, dv), hk, group, batch = dims, int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(1, 4))
    nq, nk, layouts = draw_length(rng, 700), draw_length(rng, 900), rng.choice(["contiguous", "heads last", "strided"], 7)
    options = draw_mask(rng, nq, nk, follows) | ({"softcap": float(rng.choice([1.0, 20.0]))} if kind == "softcap" else {})
    shapes = (batch, hk * group, nq, dv), (batch, hk * group, nq, d), (batch, hk, nk, d), (batch, hk, nk, dv)
    do, q, k, v = normals(rng, *shapes, dtype=dtype)
    lengths = {}
    if kind in ("kv_lengths", "both lengths"):
        lengths["kv_lengths"] = rng.integers(0, nk + 1, batch)
    if kind == "both lengths":
        lengths["q_lengths"] = rng.integers(0, nq + 1, batch)
    for x, name in ((do, "q_lengths"), (q, "q_lengths"), (k, "kv_lengths"), (v, "kv_lengths")):
        if name in lengths:
            for b in range(batch):
                x[b, :, lengths[name][b] :] = np.nan
    do, q, k, v = (put(cp, x, layout) for x, layout in zip((do, q, k, v), layouts, strict=False))
    dlse = cp.asarray(rng.standard_normal((batch, hk * group, nq), np.float32)) if rng.random() < 0.5 else None
    on_gpu = {name: cp.asarray(x) for name, x in lengths.items()}
    out = tuple(nan(cp, x.shape, dtype, layout) for x, layout in zip((q, k, v), layouts[4:], strict=True))
    o, lse = forward(q, k, v, **options, **on_gpu)
    ours = backward(do, q, k, v, o, lse, dlse=dlse, out=out, **options, **on_gpu)
    expected = dense_gradients(cp, do, q, k, v, dlse, **options, **lengths)
    verify_gradients(cp, ours, expected, f"{what}: {kind} {dtype} {shapes} {options} {layouts} {lengths}")


def check_packed(cp, rng, kind, dtype, dims, follows, what):
    (d, dv), hk, group = dims, int(rng.integers(1, 4)), int(rng.integers(1, 5))
    nq, nk = draw_length(rng, 700), draw_length(rng, 900)
    shapes, sequences = ((nq, hk * group, dv), (nq, hk * group, d), (nk, hk, d), (nk, hk, dv)), int(rng.integers(1, 6))
    options, offsets = draw_mask(rng, nq, nk, follows), [draw_offsets(rng, sequences, n) for n in (nq, nk)]
    do, q, k, v = (cp.asarray(x) for x in normals(rng, *shapes, dtype=dtype))
    dlse = cp.asarray(rng.standard_normal((hk * group, nq), np.float32)) if rng.random() < 0.5 else None
    ordered, on_gpu = bool(rng.integers(2)), [cp.asarray(x) for x in offsets]
    o, lse = forward_packed(q, k, v, *on_gpu, **options)
    out = tuple(nan(cp, x.shape, dtype) for x in (q, k, v))
    ours = backward_packed(do, q, k, v, o, lse, *on_gpu, dlse=dlse, deterministic=ordered, out=out, **options)
    expected = dense_gradients_packed(cp, do, q, k, v, offsets, dlse, **options)
    verify_gradients(cp, ours, expected, f"{what}: {kind} {dtype} {shapes} {options} {offsets} {ordered}")


BUSY = {
    "128, causal": ((2, 8, 1000, 128), (2, 2, 1000, 128), {"causal": True}),
    "128": ((2, 8, 2000, 128), (2, 8, 2000, 128), {}),
    "64": ((2, 8, 2000, 64), (2, 8, 2000, 64), {}),
    "256, causal": ((2, 8, 1000, 256), (2, 2, 1000, 256), {"causal": True}),
    "64, window": ((2, 8, 1500, 64), (2, 4, 1700, 64), {"window": (300, 100)}),
}


@pytest.mark.parametrize(("q_shape", "k_shape", "options"), BUSY.values(), ids=BUSY)
def test_fifty_runs_give_the_same_bits(cp, q_shape, k_shape, options):
    do, q, k, v = (normal(cp, *shape, seed=i) for i, shape in enumerate((q_shape, q_shape, k_shape, k_shape)))
    o, lse = forward(q, k, v, **options)
    runs = [bits(cp, *backward(do, q, k, v, o, lse, **options)) for _ in range(50)]
    assert all(run == runs[0] for run in runs)
    verify_gradients(cp, backward(do, q, k, v, o, lse, **options), dense_gradients(cp, do, q, k, v, **options), "after all of them")


SERPENTINE = {
    "128, of six, six and four blocks": ((2, 16, 1900, 128), (2, 2, 2000, 128), {"causal": True}, 6),
    "64, four of three blocks": ((1, 32, 700, 64), (1, 2, 1500, 64), {"causal": True, "q_start": 500}, 3),
}


@pytest.mark.parametrize(("q_shape", "k_shape", "options", "multiprocessors"), SERPENTINE.values(), ids=SERPENTINE)
def test_fifty_runs_in_swings_give_the_same_bits(cp, q_shape, k_shape, options, multiprocessors, monkeypatch):
    """On a part of the GPU that is smaller than a head, so that there is more than one swing, and some go upward."""
    gpu, way, ways = launch.gpu, prepare_dq_order.way, []
    monkeypatch.setattr(launch, "gpu", lambda device: gpu(device)._replace(multiprocessors=multiprocessors))
    monkeypatch.setattr(prepare_dq_order, "way", lambda *given: ways.append(way(*given)) or ways[-1])
    test_fifty_runs_give_the_same_bits(cp, q_shape, k_shape, options)
    assert {each.serpentine for each in ways} == {multiprocessors}


ROUNDED = {
    "64": ((2, 8, 700, 64), (2, 8, 900, 64), "float16", "contiguous", {}),
    "64, causal": ((1, 30, 1000, 64), (1, 30, 1000, 64), "bfloat16", "heads last", {"causal": True}),
    "128": ((2, 9, 1000, 128), (2, 9, 500, 128), "bfloat16", "strided", {}),
    "128, causal": ((2, 8, 600, 128), (2, 8, 900, 128), "float16", "heads last", {"causal": True}),
    "72": ((1, 20, 333, 72), (1, 20, 777, 72), "bfloat16", "contiguous", {}),
    "8, shared": ((1, 32, 500, 8), (1, 4, 600, 8), "float16", "contiguous", {"causal": True}),
}


@pytest.mark.parametrize("multiprocessors", [3, 132])
@pytest.mark.parametrize(("q_shape", "k_shape", "dtype", "layout", "options"), ROUNDED.values(), ids=ROUNDED)
def test_the_main_kernel_rounds_dq_to_the_same_bits(cp, q_shape, k_shape, dtype, layout, options, multiprocessors, monkeypatch):
    """In each of many runs those of a kernel after it; nothing else is written, in any order of rows."""
    gpu = launch.gpu
    monkeypatch.setattr(launch, "gpu", lambda device: gpu(device)._replace(multiprocessors=multiprocessors))
    monkeypatch.setattr(prepare_backward, "MOST_ITEMS_EARLY", 0)
    do, q, k, v = (normal(cp, *shape, dtype=dtype, seed=i) for i, shape in enumerate((q_shape, q_shape, k_shape, k_shape)))
    o, lse = forward(q, k, v, **options)
    results = []
    for rounds in (False, True):
        asked = []
        monkeypatch.setattr(prepare_dq_order, "rounds", lambda *_, rounds=rounds, asked=asked: asked.append(rounds) or rounds)
        monkeypatch.setattr(call, "_prepared", {})
        for _ in range(30 if rounds else 1):
            out = tuple(nan(cp, x.shape, dtype, layout) for x in (q, k, v))
            results.append(bits(cp, *backward(do, q, k, v, o, lse, out=out, **options)))
        assert asked == [rounds]
    assert all(each == results[0] for each in results)
    verify_gradients(cp, backward(do, q, k, v, o, lse, **options), dense_gradients(cp, do, q, k, v, **options), "rounded")


def test_a_captured_call_rounds_dq_in_each_run(cp, monkeypatch):
    """It begins with flags that the graph clears, whatever is in them."""
    rounds, chosen = prepare_dq_order.rounds, []
    monkeypatch.setattr(prepare_dq_order, "rounds", lambda *given: chosen.append(rounds(*given)) or chosen[-1])
    q, k, v, do = (normal(cp, 9, 32, 512, 64, seed=i) for i in range(4))
    o, lse = forward(q, k, v, causal=True)
    expected = backward(do, q, k, v, o, lse, causal=True)
    cp.cuda.Device().synchronize()
    out = tuple(map(cp.empty_like, (q, k, v)))
    with cp.cuda.using_allocator(cp.cuda.MemoryPool().malloc), cp.cuda.Stream(non_blocking=True) as stream:
        backward(do, q, k, v, o, lse, causal=True, out=out)
        stream.begin_capture()
        backward(do, q, k, v, o, lse, causal=True, out=out)
        graph = stream.end_capture()
        for _ in range(3):
            for x in out:
                x.fill(0)
            graph.launch(stream)
            stream.synchronize()
            assert bits(cp, *out) == bits(cp, *expected)
    assert set(chosen) == {True}


@pytest.mark.parametrize(
    ("d", "causal", "share"), [(64, False, 1), (64, True, 1), (128, False, 1), (128, True, 1), (256, True, 1), (128, True, 8)]
)
def test_two_hundred_runs_give_the_same_bits_beyond_the_cache(cp, d, causal, share):
    """Where sums of dq leave the L2 cache, additions that do not wait for each other's arrival in memory were lost in one run of ten."""
    rng, heads = cp.random.default_rng(0), 2048 // d
    shapes = [(4, n, 4096, d) for n in (heads, heads, heads // share, heads // share)]
    do, q, k, v = (rng.standard_normal(shape, dtype=cp.float32).astype(cp.float16) for shape in shapes)
    o, lse = forward(q, k, v, causal=causal)
    first = backward(do, q, k, v, o, lse, causal=causal)
    for run in range(200):
        same = [
            bool((x.view(cp.uint16) == y.view(cp.uint16)).all())
            for x, y in zip(backward(do, q, k, v, o, lse, causal=causal), first, strict=True)
        ]
        assert all(same), f"run {run}: dq, dk, dv the same: {same}"
    expected = dense_gradients(cp, *(x[:1] for x in (do, q, k, v)), causal=causal)
    verify_gradients(cp, [x[:1] for x in first], expected, "the first batch element")


ON_STREAMS = """
import random, cupy as cp, numba_flash
streams = [cp.cuda.Stream(non_blocking=True, priority=priority) for priority in (-5, 0, -3)]
calls, expected, made = [], [], {}

def add(forward, backward, shapes, *lengths, **options):
    do, q, k, v = (cp.random.standard_normal(shape, dtype=cp.float32).astype(cp.float16) for shape in shapes)
    arrays = do, q, k, v, *forward(q, k, v, *lengths, return_lse=True, backend="sm90", **options), *lengths
    calls.append(lambda: backward(*arrays, backend="sm90", **options))
    expected.append([x.get() for x in calls[-1]()])

for batch, heads, heads_kv, n, d, causal in (
    (1, 20, 20, 1024, 64, True), (2, 16, 16, 2048, 64, True), (1, 8, 8, 4096, 64, False), (1, 40, 8, 512, 64, True),
    (3, 9, 9, 1536, 128, True),
):
    shapes = [(batch, h, n, d) for h in (heads, heads, heads_kv, heads_kv)]
    add(numba_flash.forward, numba_flash.backward, shapes, causal=causal)
offsets = cp.asarray([0, 700, 700, 2500, 4000])
add(numba_flash.forward_packed, numba_flash.backward_packed, [(4000, 8, 128)] * 4, offsets, offsets, causal=True)
cp.cuda.Device().synchronize()
random.seed(0)
for _ in range(100):
    for _ in range(60):
        i = random.randrange(len(calls))
        with random.choice(streams):
            made[i] = calls[i]()
    cp.cuda.Device().synchronize()
    assert all((x.get() == y).all() for i in made for x, y in zip(made[i], expected[i]))
"""


def test_calls_on_streams_of_different_priority_do_not_wait_for_each_other(cp):
    """If the grid gave out work, two calls that have part of the multiprocessors each would wait for their other blocks for ever."""
    subprocess.run([sys.executable, "-c", ON_STREAMS], check=True, timeout=300)


@pytest.mark.parametrize("d", [128, 256])
def test_rows_that_see_nothing_have_no_gradient(cp, d):
    """More queries than keys, causal: the first queries see nothing. Nothing may be left of what the gradients' memory held before."""
    do, q, k, v = (normal(cp, 1, 2, n, d, seed=i) for i, n in enumerate((700, 700, 300, 300)))
    o, lse = forward(q, k, v, causal=True)
    out = tuple(nan(cp, x.shape) for x in (q, k, v))
    dq, dk, dv = backward(do, q, k, v, o, lse, causal=True, out=out)
    assert bool((dq[:, :, :400] == 0).all())
    verify_gradients(cp, (dq, dk, dv), dense_gradients(cp, do, q, k, v, causal=True))


@pytest.mark.parametrize("d", [128, 256])
def test_a_captured_call_computes_from_what_its_arrays_hold(cp, d):
    do, q, k, v = (normal(cp, 2, 16, 1000, d, seed=i) for i in range(4))
    o, lse = forward(q, k, v)
    eager = bits(cp, *backward(do, q, k, v, o, lse))
    out, stream = tuple(nan(cp, x.shape) for x in (q, k, v)), cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        backward(do, q, k, v, o, lse, out=out)
        stream.synchronize()
        for x in out:
            x.fill(np.nan)
        stream.begin_capture()
        backward(do, q, k, v, o, lse, out=out)
        graph = stream.end_capture()
        for _ in range(2):
            graph.launch()
            stream.synchronize()
            assert bits(cp, *out) == eager


@pytest.mark.parametrize("d", [64, 128, 256])
def test_sm90_is_chosen(cp, d):
    do, q, k, v = (normal(cp, 2, 100, d, seed=i) for i in range(4))
    o, lse = forward(q, k, v)
    chosen = numba_flash.backward(do, q, k, v, o, lse)
    verify_gradients(cp, chosen, dense_gradients(cp, do, q, k, v), f"D = {d}")
    assert bits(cp, *backward(do, q, k, v, o, lse)) == bits(cp, *chosen)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (150, 10)}])
def test_dq_in_parts_has_the_same_bits(cp, monkeypatch, options):
    """However much room there is for dS, a sum has one order. (The calls are prepared apart: one need not be deterministic.)"""
    do, q, k, v = (normal(cp, 2, heads, n, 200, seed=i) for i, (heads, n) in enumerate(((4, 900), (4, 900), (2, 700), (2, 700))))
    o, lse = forward(q, k, v, **options)
    whole = backward(do, q, k, v, o, lse, **options)
    for name, value in {"FEWEST_BLOCKS": 3, "WORKSPACE": 0, "MOST_WORKSPACE": 0}.items():
        monkeypatch.setattr(prepare_temporaries, name, value)
    parts = backward(do, q, k, v, o, lse, deterministic=False, **options)
    assert bits(cp, *parts) == bits(cp, *whole)
    verify_gradients(cp, whole, dense_gradients(cp, do, q, k, v, **options))


@pytest.mark.parametrize("d", [64, 256])
def test_a_sequence_with_impossible_lengths_is_nan(cp, d):
    do, q, k, v = (normal(cp, 3, 2, 200, d, seed=i) for i in range(4))
    lengths = cp.asarray([200, 201, 50])
    o, lse = forward(q, k, v, kv_lengths=lengths)
    gradients = backward(do, q, k, v, o, lse, kv_lengths=lengths)
    for x in gradients:
        assert bool(cp.isnan(wide(cp, x[1])).all())
    fine = [x[::2] for x in (do, q, k, v)]
    verify_gradients(cp, [x[::2] for x in gradients], dense_gradients(cp, *fine, kv_lengths=lengths[::2]))


@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("side", [0, 1], ids=["queries", "keys"])
def test_an_impossible_packed_sequence_is_left_out(cp, monkeypatch, side, d):
    """The others' gradients have the same bits as without it, in any number of parts."""
    for name, value in {"FEWEST_BLOCKS": 4, "WORKSPACE": 0, "MOST_WORKSPACE": 0}.items():
        monkeypatch.setattr(prepare_temporaries, name, value)
    do, q, k, v = (normal(cp, 2000, 4, d, seed=i) for i in range(4))
    offsets = [cp.asarray([0, 700, 1400, 2000]) for _ in range(2)]
    o, lse = forward_packed(q, k, v, *offsets)
    fine = [x[:1400] for x in backward_packed(do, q, k, v, o, lse, *offsets)]
    offsets[side][-1] = 2001
    left = [x[:1400] for x in backward_packed(do, q, k, v, o, lse, *offsets)]
    assert bits(cp, *left) == bits(cp, *fine)
