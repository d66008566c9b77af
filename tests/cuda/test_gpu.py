"""What only a GPU shows: streams, asynchrony, memory, lengths beyond any N x N matrix, threads, foreign arrays."""

import threading

import numpy as np
import pytest
from support import no_gpu

import numba_flash
from numba_flash import reference
from numba_flash.arguments.problem import BackwardInputs, bind
from numba_flash.plan import tier

pytestmark = pytest.mark.gpu


@pytest.fixture
def cp():
    return pytest.importorskip("cupy")


def normal(cp, *shape, dtype="float32", seed=0):
    return cp.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(dtype)


def busy(cp, stream):
    """Work on `stream` that takes far longer than any launch."""
    with stream:
        x = cp.ones((8192, 8192), "float32")
        for _ in range(30):
            x = x @ x * 1e-4
    return x


def test_work_goes_onto_the_current_stream_and_is_not_waited_for(cp):
    q, k, v, do = (normal(cp, 4, 256, 64, seed=i) for i in range(4))
    expected, expected_lse = numba_flash.forward(q, k, v, return_lse=True)
    expected_dq = numba_flash.backward(do, q, k, v, expected, expected_lse)[0]
    cp.cuda.Device().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    kept = busy(cp, stream)
    with stream:
        o, lse = numba_flash.forward(q, k, v, return_lse=True)
        dq = numba_flash.backward(do, q, k, v, o, lse)[0]
        assert not stream.done, "forward or backward waited for the stream"
        stream.synchronize()
        assert cp.array_equal(o, expected)
        assert cp.array_equal(dq, expected_dq)
    del kept


@pytest.mark.parametrize("d", [13, 64, 128])
def test_float32_is_left_to_others_where_it_cannot_be_split_alone(cp, d):
    """What the GPU's compiler makes of the pre-pass, too, flags the head with a NaN, and no other."""
    q, k, v, do = (normal(cp, 1, 3, 300, d, seed=i) for i in range(4))
    k[0, 1, 7, 3] = cp.nan
    reason = tier("sm80").why_not("backward", bind(q, k, v), BackwardInputs(do, q, k, v, do, q[..., 0]), True)
    if reason is not None:
        pytest.skip(reason)
    (o, lse), (other, _) = (numba_flash.forward(q, k, v, return_lse=True, backend=name) for name in ("sm80", "simt"))
    gradients, others = (numba_flash.backward(do, q, k, v, o, lse, backend=name) for name in ("sm80", "simt"))
    for x, y in zip((o, *gradients), (other, *others), strict=True):
        equal = [x[0, h].get().tobytes() == y[0, h].get().tobytes() for h in range(3)]
        assert equal == [False, True, False]


def test_results_stay_on_the_gpu(cp):
    q = normal(cp, 2, 64, 32)
    o, lse = numba_flash.forward(q, q, q, return_lse=True)
    gradients = numba_flash.backward(o, q, q, q, o, lse)
    assert all(isinstance(x, cp.ndarray) for x in (o, lse, *gradients))
    assert numba_flash.plan(q, q, q).backend == "simt"


def test_numpy_arrays_go_over_and_come_back(cp):
    q, k, v, do = (normal(cp, 3, 100, 40, seed=i).get() for i in range(4))
    assert numba_flash.plan(q, k, v).backend == "simt"
    o, lse = numba_flash.forward(q, k, v, return_lse=True)
    out = np.empty_like(q)
    assert numba_flash.forward(q, k, v, out=out) is out
    gradients = numba_flash.backward(do, q, k, v, o, lse)
    assert all(isinstance(x, np.ndarray) for x in (o, lse, *gradients))
    assert np.array_equal(out, o)
    assert np.array_equal(o, numba_flash.forward(*map(cp.asarray, (q, k, v))).get())


def test_mixing_numpy_and_cupy_is_a_type_error(cp):
    q = normal(cp, 2, 16, 8)
    with pytest.raises(TypeError, match=r"k and q must come from one library; k is numpy, q is cupy"):
        numba_flash.forward(q, q.get(), q)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_length_whose_matrix_has_17_billion_entries(cp, dtype):
    """N = 131,072: rows picked at random agree with the float64 formula, and memory grows with N, not N x N."""
    n, d = 131_072, 64
    q, k, v, do = (normal(cp, n, d, dtype=dtype, seed=i) for i in range(4))
    do *= 1024  # dv is of the order of do / n: keep it out of float16's subnormal numbers
    pool = cp.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    o, lse = numba_flash.forward(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = numba_flash.backward(do, q, k, v, o, lse, causal=True)
    cp.cuda.Device().synchronize()
    results = sum(x.nbytes for x in (o, lse, dq, dk, dv))
    hopper = no_gpu("sm90") is None
    copies = {"float16": 1, "float32": 2}.get(dtype, 0) if hopper else 0  # of sums of dq, in float32, of two warp groups of their own
    sums = copies * 4 * dq.size
    planes = 4 * q.nbytes if dtype == "float32" and hopper else 0  # of q, k, v and do: as many bytes as they have
    # delta, and the pool's rounding
    assert pool.total_bytes() - before <= results + sums + planes + 2 * lse.nbytes + 2**22
    k64, v64, delta = k.astype("float64"), v.astype("float64"), (do.astype("float64") * o).sum(-1)
    bound = 2 * np.finfo(dtype).eps + 1e-5
    for i in np.random.default_rng(1).integers(0, n, 8):
        s = q[i].astype("float64") @ k64[: i + 1].T / d**0.5
        p = cp.exp(s - s.max())
        p /= p.sum()
        ds = p * (do[i].astype("float64") @ v64[: i + 1].T - delta[i]) / d**0.5
        for ours, ref in ((o[i], p @ v64[: i + 1]), (dq[i], ds @ k64[: i + 1])):
            assert float(cp.linalg.norm(ours - ref) / cp.linalg.norm(ref)) < bound
    for j in (n - 1, n - 3, n - 700):  # keys that few queries see
        s = q[j:].astype("float64") @ k64.T / d**0.5
        s[cp.arange(n)[None] > cp.arange(j, n)[:, None]] = -cp.inf
        p = cp.exp(s - s.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        ref = p[:, j] @ do[j:].astype("float64")
        rounding = bound * float(cp.linalg.norm(ref))
        if dtype == "float16":  # P below 2^-14 is known to half a step of 2^-24
            rounding += 2.0**-25 * float(cp.linalg.norm(abs(do[j:].astype("float64")).sum(axis=0)))
        assert float(cp.linalg.norm(dv[j] - ref)) < rounding


@pytest.mark.parametrize("sequences", [2, 100])
def test_lengths_on_the_host_may_change_after_the_call(cp, sequences):
    """Few of them and many, while the GPU is busy: each call has its own."""
    q, k, v = (normal(cp, sequences, 2, 50, 64, dtype="float16", seed=i) for i in range(3))
    lengths = np.random.default_rng(0).integers(0, 51, (20, sequences))
    expected = [numba_flash.forward(q, k, v, kv_lengths=cp.asarray(x)) for x in lengths]
    given, stream, results = np.zeros(sequences, lengths.dtype), cp.cuda.Stream(non_blocking=True), []
    cp.cuda.Device().synchronize()
    kept = busy(cp, stream)
    with stream:
        for each in lengths:
            given[:] = each
            results.append(numba_flash.forward(q, k, v, kv_lengths=given))
            given[:] = -1
        stream.synchronize()
    assert all(map(cp.array_equal, results, expected))
    del kept


def test_a_captured_call_keeps_its_lengths(cp):
    q, k, v = (normal(cp, 3, 2, 50, 64, dtype="float16", seed=i) for i in range(3))
    lengths, other, out = np.array([7, 50, 0]), np.array([1, 2, 3]), cp.empty_like(q)
    expected = numba_flash.forward(q, k, v, kv_lengths=lengths)
    with cp.cuda.using_allocator(cp.cuda.MemoryPool().malloc), cp.cuda.Stream(non_blocking=True) as stream:
        numba_flash.forward(q, k, v, kv_lengths=lengths, out=out)
        stream.begin_capture()
        numba_flash.forward(q, k, v, kv_lengths=lengths, out=out)
        graph = stream.end_capture()
        for _ in range(3):
            numba_flash.forward(q, k, v, kv_lengths=other, out=out)
            lengths[:] = 5
            graph.launch(stream)
            stream.synchronize()
            assert cp.array_equal(out, expected)


def test_gradients_under_blocks_in_a_graph(cp):
    """Lists and slots are made in the graph, whatever they were before."""
    q, k, v, do = (normal(cp, 1, 2, 700, 128, dtype="float16", seed=i) for i in range(4))
    mask = numba_flash.BlockMask(cp.asarray(np.random.default_rng(0).random((6, 6)) < 0.5), 128)
    o, lse = numba_flash.forward(q, k, v, mask=mask, return_lse=True)
    expected = numba_flash.backward(do, q, k, v, o, lse, mask=mask)
    cp.cuda.Device().synchronize()
    out = tuple(map(cp.empty_like, (q, k, v)))
    with cp.cuda.using_allocator(cp.cuda.MemoryPool().malloc), cp.cuda.Stream(non_blocking=True) as stream:
        numba_flash.backward(do, q, k, v, o, lse, mask=mask, out=out)
        stream.begin_capture()
        numba_flash.backward(do, q, k, v, o, lse, mask=mask, out=out)
        graph = stream.end_capture()
        for _ in range(3):
            for x in out:
                x.fill(0)
            graph.launch(stream)
            stream.synchronize()
            assert all(map(cp.array_equal, out, expected))


def test_threads_on_their_own_streams(cp):
    q, k, v = (normal(cp, 4, 300, 64, seed=i) for i in range(3))
    expected = numba_flash.forward(q, k, v)
    cp.cuda.Device().synchronize()
    results = {}

    def work(name):
        with cp.cuda.Stream(non_blocking=True) as stream:
            results[name] = [numba_flash.forward(q, k, v) for _ in range(20)]
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(cp.array_equal(x, expected) for xs in results.values() for x in xs)


def test_out_of_memory_names_the_array(cp):
    q = cp.broadcast_to(cp.ones((1, 1), "float32"), (2**28, 256))
    k = cp.ones((1, 256), "float32")
    with pytest.raises(MemoryError, match=r"^o: cannot allocate \d+ bytes for shape \(268435456, 256\), dtype float32"):
        numba_flash.forward(q, k, k)


def test_overlapping_out_is_refused_and_interleaved_out_is_not(cp):
    buffer = normal(cp, 4, 128, 4, 32)  # heads, length, (q, k, v, o), head dimension
    q, k, v, o = (buffer[:, :, i] for i in range(4))
    with pytest.raises(ValueError, match="out must not overlap q"):
        numba_flash.forward(q, k, v, out=q)
    expected = numba_flash.forward(q, k, v)
    assert numba_flash.forward(q, k, v, out=o) is o
    assert cp.array_equal(o, expected)


def test_torch_tensors_are_read_without_a_copy(cp):
    torch = pytest.importorskip("torch")
    x = normal(cp, 2, 64, 32)
    tensor = torch.from_dlpack(x)
    o = numba_flash.forward(tensor, tensor, tensor)
    assert isinstance(o, cp.ndarray)
    assert cp.array_equal(o, numba_flash.forward(x, x, x))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_many_blocks_twice_give_the_same_bits(cp, dtype):
    q, k, v, do = (normal(cp, 2, 8, 2048, 96, dtype=dtype, seed=i) for i in range(4))
    k, v = k[:, :2], v[:, :2]
    runs = []
    for _ in range(3):
        o, lse = numba_flash.forward(q, k, v, causal=True, return_lse=True)
        runs.append((o, lse, *numba_flash.backward(do, q, k, v, o, lse, causal=True)))
    for run in runs[1:]:
        assert all(cp.array_equal(a.view("uint8"), b.view("uint8")) for a, b in zip(run, runs[0], strict=True))
    ref = reference.forward(q[0, :1, -64:].get(), k[0, :1].get(), v[0, :1].get(), causal=True)
    assert np.linalg.norm(runs[0][0][0, :1, -64:].get() - ref) < 16 * np.finfo(dtype).eps * np.linalg.norm(ref)


def test_parts_of_a_captured_call_are_counted_for_themselves(cp):
    """The first call on a stream is captured; a graph that has not run yet leaves nothing behind for the call that follows."""
    q, k, v = normal(cp, 1, 8, 1, 64, dtype="float16"), *(normal(cp, 1, 1, 4096, 64, dtype="float16", seed=i) for i in (1, 2))
    expected = numba_flash.forward(q, k, v, backend="sm80")
    out, stream = cp.full_like(expected, cp.nan), cp.cuda.Stream(non_blocking=True)
    pool = cp.cuda.MemoryPool()  # what the graph works in, as docs/numerics.md says
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        with cp.cuda.using_allocator(pool.malloc):
            first = numba_flash.forward(q, k, v, backend="sm80")
            numba_flash.forward(q, k, v, out=out, backend="sm80")  # counts in the same place, once the first has left it as it was
        graph = stream.end_capture()
        eager = numba_flash.forward(q, k, v, backend="sm80")
        for _ in range(2):
            graph.launch()
        stream.synchronize()
    assert (eager == expected).all()
    assert (first == expected).all()
    assert (out == expected).all()


@pytest.mark.parametrize("keys", [320, 4096])
def test_a_captured_call_reads_table_and_lengths_as_they_are_when_the_graph_runs(cp, keys):
    """As where a step of generation is captured once, and the cache grows meanwhile; by one part of the keys, and by several."""
    size, entries = 16, keys // 16
    q, cache = normal(cp, 2, 8, 1, 64, dtype="float16"), [normal(cp, 2 * entries, 1, size, 64, dtype="float16", seed=i) for i in (1, 2)]
    table, lengths = cp.arange(2 * entries, dtype=cp.int32).reshape(2, entries), cp.array([keys - 21, 17])
    of_cache = lambda **out: numba_flash.forward_paged(q, *cache, table, lengths, backend="sm80", **out)
    out, stream, pool = cp.full_like(q, cp.nan), cp.cuda.Stream(non_blocking=True), cp.cuda.MemoryPool()
    of_cache()
    cp.cuda.Device().synchronize()
    with stream:
        with cp.cuda.using_allocator(pool.malloc):
            stream.begin_capture()
            of_cache(out=out)
            graph = stream.end_capture()
        for step in range(3):
            lengths += 7 * step
            table[:] = table[::-1, ::-1].copy()
            graph.launch()
            assert (out == of_cache()).all()
