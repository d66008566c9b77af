"""`plan` of both passes: which backend, and how much memory a call takes for itself."""

import tracemalloc

import numpy as np
import pytest
from support import random_inputs

import numba_flash
from numba_flash.arguments.problem import ForwardInputs, bind
from numba_flash.cpu import scratch, tier
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.plan import Settings, backward_inputs, choose, detailed

H200 = Gpu(device=0, capability=(9, 0), multiprocessors=132)
ALIGNMENT = 512


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_a_plan_of_gradients_says_what_runs():
    x, bias = ones(2, 4, 300, 16), ones(300, 300)
    plan = numba_flash.plan(x, x, x, bias=bias, kind="backward", bias_grad=True, deterministic=False, dlse=True, backend="cpu")
    assert (plan.kind, plan.backend) == ("backward", "cpu")
    assert plan.tiles == (("backward", (192, 256)),)
    assert plan.problem == numba_flash.plan(x, x, x, bias=bias, backend="cpu").problem
    assert plan.scratch > 4 * bias.size
    runs = "backward runs on cpu in tiles of backward 192 x 256: IEEE products and sums"
    assert str(plan) == f"{runs}\n  scratch memory: {plan.scratch / 2**10:.4g} KiB"


def taken(call) -> int:
    """Bytes that are allocated at the same time, beside results."""
    call()
    tracemalloc.start()
    results = call()
    peak = tracemalloc.get_traced_memory()[1] - sum(x.nbytes for x in (results if isinstance(results, tuple) else (results,)))
    tracemalloc.stop()
    return peak


CASES = {
    "forward": ("forward", {}, {}),
    "forward with lse": ("forward", {"return_lse": True}, {}),
    "backward": ("backward", {}, {}),
    "dlse": ("backward", {"dlse": True}, {}),
    "dbias": ("backward", {"bias": ones(700, 700), "bias_grad": True}, {}),
    "dbias of each head": ("backward", {"bias": ones(8, 700, 700), "bias_grad": True}, {}),
    "many heads": ("backward", {}, {"hq": 40, "hk": 20}),
    "16 bits": ("backward", {}, {"dtype": "float16"}),
    "float64": ("backward", {"softcap": 3.0}, {"dtype": "float64"}),
    "lengths": ("backward", {"kv_lengths": np.array([700, 10]), "q_lengths": np.array([700, 699])}, {}),
}


@pytest.mark.parametrize("limit", [None, 2**16], ids=["", "in panels"])
@pytest.mark.parametrize("name", CASES)
def test_scratch_memory_is_what_a_call_takes(name, limit, monkeypatch):
    """By what allocators count, beside results, where no thread makes its tiles."""
    kind, options, sizes = CASES[name]
    monkeypatch.setattr(scratch, "DQ_PARTIAL_BYTES", limit or scratch.DQ_PARTIAL_BYTES)
    q, k, v, do = random_inputs(**({"batch": (2,), "hq": 8, "hk": 8, "nq": 700, "nk": 700, "d": 16} | sizes))
    plan = numba_flash.plan(q, k, v, kind=kind, backend="cpu", **options)
    of_forward = {name: x for name, x in options.items() if name not in ("return_lse", "dlse", "bias_grad")}
    o, lse = numba_flash.forward(q, k, v, return_lse=True, backend="cpu", **of_forward)
    if options.get("dlse"):
        options = options | {"dlse": np.ones_like(lse)}
    if kind == "forward":
        call = lambda: numba_flash.forward(q, k, v, backend="cpu", **options)
    else:
        call = lambda: numba_flash.backward(do, q, k, v, o, lse, backend="cpu", **options)
    monkeypatch.setattr(tier, "_run", lambda *arguments: None)
    peak = taken(call)
    assert peak <= plan.scratch + 2**16
    assert plan.scratch <= (2 if "lengths" in name else 1) * peak + 4 * ALIGNMENT


def test_shorter_sequences_take_no_more_than_is_foretold(monkeypatch):
    """Of the longest one two heads at a time fit in the buffer, of these three."""
    q, k, v, do = random_inputs(batch=(2,), hq=3, hk=3, nq=700, nk=700, d=256)
    options = {"q_lengths": np.array([500, 500]), "backend": "cpu"}
    o, lse = numba_flash.forward(q, k, v, return_lse=True, **options)
    monkeypatch.setattr(scratch, "DQ_PARTIAL_BYTES", int(2.5 * 700 * 3 * 256 * 4))
    monkeypatch.setattr(tier, "_run", lambda *arguments: None)
    plan = numba_flash.plan(q, k, v, kind="backward", **options)
    peak = taken(lambda: numba_flash.backward(do, q, k, v, o, lse, **options))
    assert 3 * 500 * 3 * 256 * 4 < peak < plan.scratch + 2**16


@pytest.mark.parametrize("limit", [2**12, 2**16, 2**20])
def test_a_sequence_of_all_tokens_takes_what_it_takes_without_lengths(limit, monkeypatch):
    """At least, however little the buffer should be, which has room for some queries of a head in any case."""
    monkeypatch.setattr(scratch, "DQ_PARTIAL_BYTES", limit)
    x = ones(1, 4, 700, 64)
    whole, alone = (numba_flash.plan(x, x, x, kind="backward", backend="cpu", **lengths).scratch for lengths in ({}, {"kv_lengths": [700]}))
    assert whole <= alone <= whole + max(limit, 192 * 4 * 64 * 4)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_nothing_is_allocated_for_empty_arrays(kind):
    x = ones(2, 0, 5, 8)
    assert numba_flash.plan(x, x, x, kind=kind, return_lse=True, backend="cpu").scratch == 0
    assert "scratch memory: none" in str(numba_flash.plan(x, x, x, kind=kind, return_lse=True, backend="cpu"))


def test_scratch_memory_of_a_gpu_that_is_described():
    """None; rows, flags and sums of dQ, more than the sums and less than twice as much; results over parts of the keys."""
    q = k = v = np.empty((4, 16, 1024, 64), np.float16)
    problem, inputs = bind(q, k, v), ForwardInputs(q, k, v)
    forward = detailed(choose(problem, inputs, None, gpu=H200), inputs, Settings(gpu=H200))
    assert (forward.backend, forward.scratch) == ("sm90", 0)
    given = backward_inputs(problem, inputs)
    backward = detailed(choose(problem, given, None, "backward", gpu=H200), given, Settings(gpu=H200))
    sums = 4 * q.size
    assert backward.backend == "sm90"
    assert sums < backward.scratch < 2 * sums
    few = ForwardInputs(q[:1, :, :1], k[:1], v[:1])
    parts = detailed(choose(bind(*few[:3]), few, None, gpu=H200), few, Settings(gpu=H200))
    assert 16 * 64 * 4 < parts.scratch < 2**20, "results of a row of each head over some parts of the keys"


def test_heads_may_come_after_the_length():
    x = ones(2, 300, 4, 16)
    usual = x.swapaxes(1, 2)
    for kind in ("forward", "backward"):
        there, expected = numba_flash.plan(x, x, x, kind=kind, axes="bnhd"), numba_flash.plan(usual, usual, usual, kind=kind)
        assert there == expected
    with pytest.raises(ValueError, match=r"v\.shape\[:-1\] \(2, 299, 4\) must equal k\.shape\[:-1\] \(2, 300, 4\)"):
        numba_flash.plan(x, x, x[:, 1:], axes="bnhd")


def slopeless(score, b, h, i, j):
    return score


WRONG = {
    "kind": ({"kind": "both"}, r"^kind must be forward or backward; got 'both'$"),
    "no bias": ({"bias_grad": True}, r"^bias_grad needs a bias; got bias_grad=True with bias=None$"),
    "no derivative": ({"score_mod": slopeless}, r"^score_mod_grad must be the derivative of score_mod in a backward pass; got None$"),
    "bias_grad": ({"bias_grad": 1}, r"^bias_grad must be True or False; got 1$"),
    "deterministic": ({"deterministic": "no"}, r"^deterministic must be True or False; got 'no'$"),
    "return_lse": ({"return_lse": None}, r"^return_lse must be True or False; got None$"),
    "dlse": ({"dlse": ones(4)}, r"^dlse\.shape \(4,\) must be \(2, 4, 5\)$"),
    "dlse's dtype": ({"dlse": ones(2, 4, 5, dtype=np.float64)}, r"^dlse\.dtype \(float64\) must be float32$"),
    "no dlse": ({"dlse": 1}, r"^dlse must be a NumPy or CuPy array"),
    "axes": ({"axes": "nhd"}, r"^axes must be 'bhnd' .* or 'bnhd' .*; got 'nhd'$"),
    "backend": ({"backend": "gpu"}, r"^backend must be one of sm90, sm80, simt, cpu, or None; got 'gpu'$"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_named(name):
    options, message = WRONG[name]
    x = ones(2, 4, 5, 8)
    with pytest.raises((TypeError, ValueError), match=message):
        numba_flash.plan(x, x, x, **{"kind": "backward", **options})


def test_what_only_gradients_need_does_not_matter_to_a_forward_pass():
    x = ones(2, 4, 5, 8)
    plain = numba_flash.plan(x, x, x)
    assert plain == numba_flash.plan(x, x, x, deterministic=False, bias_grad=True, dlse=True)
    assert numba_flash.plan(x, x, x, score_mod=slopeless).kind == "forward"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "backward"}, r"^kind must be 'forward' with a page_table: there are no gradients of keys in pages; got 'backward'$"),
        ({"axes": "bnhd"}, r"^axes must be 'bhnd' with a page_table: q is \(\.\.\., heads, length, head_dim\); got 'bnhd'$"),
    ],
)
def test_pages_have_one_order_and_no_gradients(options, message):
    pages, table = ones(6, 2, 16, 8), np.array([[0, 1]])
    with pytest.raises((TypeError, ValueError), match=message):
        numba_flash.plan(ones(1, 2, 3, 8), pages, pages, page_table=table, kv_lengths=np.array([20]), **options)
