"""`numba_flash.dask`: chunks are nothing but a way to compute the same."""

import inspect
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import support
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DTYPES, SIMULATED, random_inputs, same_bits
from support.naive import compare

if SIMULATED:
    pytest.skip("blocks are computed as anywhere", allow_module_level=True)
pytest.importorskip("dask.array", reason="dask is not installed")

import dask
import dask.array as da
from support.dask_group import in_cluster

import numba_flash
import numba_flash.dask
from numba_flash import api
from numba_flash.dask import tasks

RNG = np.random.default_rng(0)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.3},
    "window": {"window": (5, 3), "q_start": -4},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": RNG.standard_normal((4, 21, 33)).astype(np.float32), "bias_grad": True},
    "bias of keys": {"bias": RNG.standard_normal((2, 1, 1, 33)).astype(np.float32), "bias_grad": True, "causal": True},
    "mask": {"mask": RNG.random((21, 33)) < 0.3},
    "mask of batches": {"mask": RNG.random((2, 4, 21, 33)) < 0.3, "softcap": 3.0},
}


def chunked(x, rng):
    """A dask array in random chunks."""
    cut = lambda n: tuple(np.diff([0, *sorted(rng.choice(n + 1, rng.integers(0, 3))), n]).tolist())
    chunks = [tuple(c for c in cut(n) if c) or (n,) for n in x.shape]
    return da.from_array(x, chunks=chunks)


def run(q, k, v, do, bias_grad=False, dlse=None, **options) -> dict:
    """Both passes on dask arrays, computed."""
    o, lse = numba_flash.dask.forward(q, k, v, return_lse=True, **options)
    gradients = numba_flash.dask.backward(do, q, k, v, o, lse, bias_grad=bias_grad, dlse=dlse, **options)
    for x, like in ((o, do), (lse, do[..., 0]), *zip(gradients, (q, k, v), strict=False)):
        assert x.shape == like.shape
    return dict(zip(("o", "lse", "dq", "dk", "dv", "dbias"), dask.compute(o, lse, *gradients), strict=False))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_chunks(options, seed):
    rng = np.random.default_rng(seed)
    inputs = random_inputs(batch=(2,), hq=4, hk=2, nq=21, nk=33, d=5, dv=3)
    scores = {name: chunked(x, rng) for name, x in options.items() if name in ("bias", "mask") and rng.random() < 0.5}
    dlse = rng.standard_normal(inputs[0].shape[:-1]).astype(np.float32)
    results = run(*(chunked(x, rng) for x in inputs), dlse=chunked(dlse, rng), **options | scores)
    compare(results, *inputs, dlse=dlse, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (2, 1)], ids=str)
def test_dtypes_and_ranks(dtype, batch):
    inputs = random_inputs(batch=batch, hq=2, hk=1, nq=40, nk=50, d=8, dtype=dtype)
    results = run(*(chunked(x, np.random.default_rng(4)) for x in inputs), causal=True)
    for name, x in results.items():
        assert x.dtype == ("float64" if dtype == "float64" else "float32" if name == "lse" else dtype)
    compare(results, *inputs, causal=True)


def test_one_head_without_an_axis():
    q, k, v, do = (x[0, 0] for x in random_inputs(batch=(1,), hq=1, hk=1, nq=40, nk=50, d=8))
    results = run(*(chunked(x, np.random.default_rng(5)) for x in (q, k, v, do)), window=(3, 4))
    support.compare(results, q, k, v, do, window=(3, 4))


def test_results_are_rounded_once():
    """o in 16 bits is nearer to the exact one than what is merged of rounded parts."""
    q, k, v, _ = random_inputs(batch=(1,), hq=1, hk=1, nq=64, nk=640, d=16, dtype="bfloat16")
    exact = numba_flash.forward(*(x.astype(np.float32) for x in (q, k, v)))
    parts = [numba_flash.forward(q, k[..., j : j + 64, :], v[..., j : j + 64, :], return_lse=True) for j in range(0, 640, 64)]
    o, lse = parts[0]
    for part in parts[1:]:
        o, lse = numba_flash.merge(o, lse, *part)
    error = lambda x: np.abs(x.astype(np.float32) - exact).mean()
    of_chunks = numba_flash.dask.forward(da.from_array(q), *(da.from_array(x, chunks=(1, 1, 64, 16)) for x in (k, v)))
    assert error(of_chunks.compute()) < 0.9 * error(o.astype(q.dtype))


@pytest.mark.parametrize("state", [(3, 4), (3, 4, 5, 8)])
@pytest.mark.parametrize("masked", [False, True])
def test_dropout_has_the_bits_of_one_call(masked, state):
    """Chunks of queries may be any, those of keys begin at multiples of 8, also where chunks of k and v are not the same."""
    q, k, v, do = inputs = random_inputs(batch=(2,), hq=4, hk=2, nq=37, nk=48, d=8)
    options = {"window": (20, 3), "softcap": 2.0, "mask": RNG.random((2, 1, 37, 48)) < 0.7} if masked else {"causal": True}
    options |= {"dropout": 0.4, "rng": state}
    keys, values = (8, 24, 16), (32, 16)
    blocks = [da.from_array(x, (2, x.shape[1], n, 8)) for x, n in zip(inputs, ((5, 20, 12), keys, values, (25, 12)), strict=True)]
    results = run(*blocks, **options)
    o, lse = numba_flash.forward(q, k, v, return_lse=True, **options)
    expected = dict(zip(results, (o, lse, *numba_flash.backward(do, q, k, v, o, lse, **options)), strict=True))
    for name, x in results.items():
        np.testing.assert_allclose(x, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_are_added_unrounded(dtype):
    """2048 + 1 is 2048 in 16 bits."""
    parts = [np.array([x], support.DTYPES[dtype]) for x in (2048, *[1] * 64)]
    total = tasks.added([tasks.added(parts[:30]), *parts[30:]])
    assert (total.dtype, total.tolist()) == (np.float32, [2048 + 64])


def test_equal_chunks_give_equal_bits():
    """In any order of tasks; and the same call has the same keys, so that dask computes it once."""
    inputs = random_inputs(batch=(1,), hq=2, hk=2, nq=90, nk=200, d=8)
    results = []
    for scheduler in ("synchronous", "threads"):
        with dask.config.set(scheduler=scheduler):
            results.append(run(*(da.from_array(x, chunks=(1, 1, 20, 8)) for x in inputs), causal=True))
    assert all(same_bits(x, results[1][name]) for name, x in results[0].items())
    q, k, v, _ = (da.from_array(x) for x in inputs)
    assert numba_flash.dask.forward(q, k, v).name == numba_flash.dask.forward(q, k, v).name
    assert numba_flash.dask.forward(q, k, v).name != numba_flash.dask.forward(q, k, v, causal=True).name


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 16),
        ({"causal": True}, 10),
        ({"window": (10, 0)}, 7),
        ({"causal": True, "q_start": -10}, 1 + 2 + 3),
        ({"mask": np.kron(np.eye(4, dtype=bool), np.ones((10, 10), bool))}, 4),
        ({"mask": np.arange(40)[None, :] < 25}, 12),
    ],
    ids=str,
)
def test_what_is_hidden_has_no_task(options, pairs):
    q = da.ones((1, 40, 4), chunks=(1, 10, 4), dtype=np.float32)
    o, lse = numba_flash.dask.forward(q, q, q, return_lse=True, **options)
    gradients = numba_flash.dask.backward(o, q, q, q, o, lse, **options)
    for x, task in ((o, "part"), (gradients[0], "pair")):
        keys = [key for key in x.__dask_graph__() if key[0].startswith(f"{task}-")]
        assert len(keys) == pairs
    assert np.isfinite(gradients[1].compute()).all()


def test_who_sees_nothing_and_is_not_seen():
    q, k, v, do = random_inputs(batch=(1,), hq=1, hk=1, nq=40, nk=40, d=4, dtype="float16")
    results = run(*(da.from_array(x, chunks=(1, 1, 10, 4)) for x in (q, k, v, do)), causal=True, q_start=-20)
    assert np.isneginf(results["lse"][..., :20]).all()
    assert (results["o"][..., :20, :] == 0).all()
    assert (results["dq"][..., :20, :] == 0).all()
    assert (results["dk"][..., 20:, :] == 0).all()
    compare(results, q, k, v, do, causal=True, q_start=-20)


@pytest.mark.parametrize(
    ("of_q", "of_k", "expected"),
    [((3, 1), (2,), (4,)), ((1, 1, 1, 1), (2,), (2, 2)), ((2, 2), (2,), (2, 2)), ((4,), (1, 1), (2, 2)), ((1, 2, 1), (2,), (4,))],
    ids=str,
)
def test_a_chunk_of_heads_holds_whole_groups(of_q, of_k, expected):
    """And no more chunks than that takes, none of them empty."""
    q, k = (da.ones((sum(heads), 6, 4), chunks=(heads, 6, 4), dtype=np.float32) for heads in (of_q, of_k))
    o, lse = numba_flash.dask.forward(q, k, k, return_lse=True)
    gradients = numba_flash.dask.backward(o, q, k, k, o, lse)
    assert [x.chunks[0] for x in (o, lse, gradients[0])] == [expected] * 3
    assert gradients[1].chunks[0] == tuple(n // 2 for n in expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3)], ids=str)
def test_a_block_of_a_gpu_is_what_it_was_before_it_was_sent(dtype, shape):
    """Where CuPy has given up the name of bfloat16, an empty one, too."""
    block = np.arange(6, dtype=np.float32)[: math.prod(shape)].reshape(shape).astype(DTYPES[dtype])
    on_gpu = lambda x: SimpleNamespace(dtype=x.dtype, view=x.view, astype=x.astype)  # no array of NumPy
    arrived = tasks._received(on_gpu(block.view("V2") if dtype == "bfloat16" else block))
    assert arrived.dtype == block.dtype
    assert same_bits(np.asarray(arrived.astype(np.float32)), block.astype(np.float32))


def test_tasks_leave_blocks_alone():
    """dask hands them to a task again if what it made is lost with a worker."""
    q, k, v, do = random_inputs(batch=(), hq=1, hk=1, nq=20, nk=20, d=8)
    parts = [tasks.attend(("q", "k", "v"), {}, q, k, v) for _ in range(3)]
    o, lse = tasks.merged(parts)
    names = ("do", "q", "k", "v", "o", "lse")
    shares = [tasks.differentiate(names, {}, do, q, k, v, o, lse)[0] for _ in range(3)]
    for x in (q, k, v, do, *parts[0], o, lse, *shares):
        x.flags.writeable = False
    assert all(same_bits(x, y) for x, y in zip(tasks.merged(parts), (o, lse), strict=True))
    assert same_bits(tasks.added(shares), tasks.added(shares))
    assert same_bits(tasks.differentiate(names, {}, do, q, k, v, o, lse)[0], shares[0])
    assert (tasks.zeros(q) == 0).all()


def sent(x: np.ndarray) -> np.ndarray:
    """The array as dask may bring it: it begins at any byte, and nobody may write into it."""
    buffer = np.zeros(x.nbytes + 1, np.uint8)
    buffer[1:] = x.reshape(-1).view(np.uint8)
    block = buffer[1:].view(x.dtype).reshape(x.shape)
    block.flags.writeable = False
    return block


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_task(dtype):
    """What it makes of blocks that dask has sent is what it makes of others, in the dtypes of sums until it is rounded."""
    inputs = q, k, v, do = random_inputs(batch=(), hq=2, hk=1, nq=12, nk=16, d=8, dv=5, dtype=dtype)
    sums = np.dtype(np.float64 if dtype == "float64" else np.float32)
    names, parts = ("do", "q", "k", "v", "o", "lse"), [tasks.attend(("q", "k", "v"), {}, q, x, y) for x, y in ((k, v), (-k, v))]
    o, lse = tasks.merged(parts)
    tasks_of = {
        "attend": lambda q, k, v, do, *_: tasks.attend(("q", "k", "v"), {"causal": True}, q, k, v),
        "nothing": lambda q, *_: tasks.nothing(5, q),
        "merged": lambda q, k, v, do, *parts: tasks.merged([parts[:2], parts[2:]]),
        "differentiate": lambda q, k, v, do, o, lse, *_: tasks.differentiate(names, {}, do, q, k, v, tasks.rounded(q.dtype, o), lse),
        "added": lambda q, *_: (tasks.added([q, q, q]),),
        "rounded": lambda q, k, v, do, o, lse, *_: (tasks.rounded(q.dtype, o), tasks.rounded_o(q.dtype, (o, lse)), tasks.log_sum((o, lse))),
        "zeros": lambda q, *_: (tasks.zeros(q),),
    }
    blocks = (*inputs, *parts[0], *parts[1])
    made = {name: task(*blocks) for name, task in tasks_of.items()}
    for name, task in tasks_of.items():
        assert all(map(same_bits, made[name], map(np.asarray, task(*map(sent, blocks))))), name
    dtypes = {name: [x.dtype for x in results] for name, results in made.items()}
    assert dtypes == {
        "attend": [sums] * 2,
        "nothing": [sums] * 2,
        "merged": [sums] * 2,
        "differentiate": [q.dtype] * 3,
        "added": [sums],
        "rounded": [q.dtype, q.dtype, sums],
        "zeros": [q.dtype],
    }
    assert [x.shape for x in made["nothing"]] == [do.shape, lse.shape]
    assert (made["nothing"][0] == 0).all()
    assert np.isneginf(made["nothing"][1]).all()
    assert (made["zeros"][0] == 0).all()
    assert same_bits(made["merged"][0], o)


def test_nothing_is_computed_before_it_is_wanted():
    def fail(block):
        raise AssertionError("a block has been computed")

    q = da.ones((2, 40, 4), chunks=(1, 10, 4), dtype=np.float32).map_blocks(fail, meta=np.empty((0, 0, 0), np.float32))
    o, lse = numba_flash.dask.forward(q, q, q, return_lse=True)
    for x in (o, *numba_flash.dask.backward(q, q, q, q, o, lse)):
        with pytest.raises(AssertionError, match="a block has been computed"):
            x.compute()


X = da.ones((2, 40, 4), dtype=np.float32)


@pytest.mark.parametrize(
    ("error", "message", "arguments", "options"),
    [
        (TypeError, "q must be a dask array; got ndarray, which numba_flash.forward", (np.ones((2, 40, 4), np.float32), X, X), {}),
        (TypeError, "k must be a dask array; got list", (X, [1.0], X), {}),
        (
            ValueError,
            r"v must have chunks of known sizes; v.compute_chunk_sizes\(\) finds them out",
            (X, X, X[:, X[0, :, 0] > 0.5]),
            {},
        ),
        (ValueError, r"k.shape\[-1\] \(3\) must equal q.shape\[-1\] \(4\)", (X, X[..., :3], X), {}),
        (TypeError, r"k.dtype \(float64\) must equal q.dtype", (X, X.astype(float), X), {}),
        (ValueError, r"rng must be a tuple \(seed, offset\) when dropout > 0", (X, X, X), {"dropout": 0.1}),
        (
            ValueError,
            r"dropout needs all batch elements and heads in one chunk, .*; got chunks \(\(1, 1\),\): q, k and v.rechunk\(\{0: -1\}\)",
            (X.rechunk((1, 40, 4)),) * 3,
            {"dropout": 0.1, "rng": (1, 2)},
        ),
        (
            ValueError,
            r"dropout needs chunks of k and v that begin at multiples of 8; they begin at \[0, 16, 28\]",
            (X, X.rechunk((2, (16, 24), 4)), X.rechunk((2, (28, 12), 4))),
            {"dropout": 0.1, "rng": (1, 2)},
        ),
        (NotImplementedError, "does not take score_mod: it gets the numbers", (X, X, X), {"score_mod": min}),
        (NotImplementedError, "does not take kv_lengths: chunks say", (X, X, X), {"kv_lengths": np.array([3])}),
        (
            NotImplementedError,
            r"takes no BlockMask, whose blocks .* mask.dense\(nq, nk\) has pairs",
            (X, X, X),
            {"mask": numba_flash.BlockMask(np.ones((1, 1), bool), 128)},
        ),
        (
            TypeError,
            r"^numba_flash\.dask\.forward\(\) got an unexpected keyword argument 'droppout'; did you mean dropout\?$",
            (X, X, X),
            {"droppout": 0.1},
        ),
        (TypeError, "bias must be a NumPy or CuPy array", (X, X, X), {"bias": [1.0]}),
        (ValueError, r"mask.shape \(3, 3\) must be broadcastable", (X, X, X), {"mask": np.ones((3, 3), bool)}),
        (ValueError, "window", (X, X, X), {"window": (-2, 0)}),
    ],
    ids=lambda x: "" if not isinstance(x, str) else re.sub(r"\W+", " ", x)[:30],
)
def test_errors_come_before_anything_is_computed(error, message, arguments, options):
    with pytest.raises(error, match=message):
        numba_flash.dask.forward(*arguments, **options)


@pytest.mark.parametrize("function", ["forward", "backward"])
def test_what_one_call_takes_is_taken_or_refused_with_a_reason(function):
    every, taken = (inspect.signature(getattr(module, function)).parameters for module in (numba_flash, numba_flash.dask))
    arguments = {name: X[..., 0] if name == "lse" else X for name in ("do", "q", "k", "v", "o", "lse") if name in taken}
    for name in every.keys() - taken.keys():
        with pytest.raises(NotImplementedError, match=f"^numba_flash.dask does not take {name}: .{{15}}"):
            getattr(numba_flash.dask, function)(**arguments, **{name: 1})


def test_precision_is_that_of_the_call(monkeypatch):
    """Not of the time and place of a task."""
    seen, forward = [], api.forward
    monkeypatch.setattr(tasks.api, "forward", lambda *x, **given: (seen.append(given["precision"]), forward(*x, **given))[1])
    with numba_flash.use_precision("ieee"):
        o = numba_flash.dask.forward(X, X, X)
    o.compute()
    assert seen == ["ieee"]


def test_one_set_of_options_serves_both_passes():
    q, k, v, do = (da.from_array(x, chunks=(1, 1, 9, -1)) for x in random_inputs(batch=(2,), hq=2, hk=2, nq=21, nk=33, d=5))
    both = {"window": [5, 3], "scale": np.array(0.3), "q_start": np.array(4), "dlse": None, "bias_grad": False, "return_lse": True}
    o, lse = numba_flash.dask.forward(q, k, v, **both)
    gradients = numba_flash.dask.backward(do, q, k, v, o, lse, **both)
    results = dict(zip(("o", "lse", "dq", "dk", "dv"), dask.compute(o, lse, *gradients), strict=True))
    compare(results, *dask.compute(q, k, v, do), window=(5, 3), scale=0.3, q_start=4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dlse": X[..., 0]}, TypeError, "dlse must be None in a forward pass"),
        ({"bias_grad": 1}, TypeError, "bias_grad must be True or False; got 1"),
        ({"bias_grad": True}, ValueError, "bias_grad needs a bias"),
    ],
)
def test_options_of_gradients_are_checked_in_the_forward_pass(options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        numba_flash.dask.forward(X, X, X, **options)


def test_errors_of_gradients():
    with pytest.raises(ValueError, match="bias_grad needs a bias"):
        numba_flash.dask.backward(X, X, X, X, X, X[..., 0], bias_grad=True)
    with pytest.raises(TypeError, match=r"^return_lse must be True or False; got 1"):
        numba_flash.dask.backward(X, X, X, X, X, X[..., 0], return_lse=1)
    with pytest.raises(TypeError, match=r"^numba_flash\.dask\.backward\(\) got .* 'is_causal'; did you mean causal=True, q_start=0\?"):
        numba_flash.dask.backward(X, X, X, X, X, X[..., 0], is_causal=True)
    with pytest.raises(TypeError, match="do must be a dask array; got ndarray"):
        numba_flash.dask.backward(X.compute(), X, X, X, X, X[..., 0])
    with pytest.raises(ValueError, match=r"lse.shape \(2, 40, 4\) must be \(2, 40\)"):
        numba_flash.dask.backward(X, X, X, X, X, X)


@pytest.mark.full
@pytest.mark.parametrize("program", ["long", "killed"])
def test_processes(program):
    """Two of them share 100,000 tokens in bounded memory; one that dies in the middle loses nothing."""
    in_cluster(program)
