"""`axes="bnhd"`: arrays whose heads come after their length, read and written in place, with the bits of the usual order."""

import re

import numpy as np
import pytest
from support import random_inputs, same_bits

import numba_flash
from numba_flash import call
from numba_flash.arguments.problem import Prepared

SIZES = {"hq": 4, "hk": 2, "nq": 5, "nk": 7, "d": 16, "dv": 8}
simulator = pytest.mark.simulator(full=True)


def turned(x):
    """Heads and length in each other's place."""
    return x.swapaxes(-3, -2)


def heads_last(backend, *arrays) -> list:
    """Compact arrays of the backend with the axes in that order."""
    return [backend.to_device(np.ascontiguousarray(turned(x))) for x in arrays]


def options_of(backend, batch: tuple[int, ...]) -> dict:
    """Every option of an array, none of which has its axes turned."""
    rng, hq, nq, nk = np.random.default_rng(1), SIZES["hq"], SIZES["nq"], SIZES["nk"]
    bias, mask = rng.standard_normal((hq, nq, nk)).astype(np.float32), rng.random((*batch, 1, nq, nk)) < 0.8
    options = {"bias": backend.to_device(bias), "mask": backend.to_device(mask), "causal": True}
    return options | ({"kv_lengths": np.full(batch, nk - 1)} if batch else {})


@pytest.mark.parametrize("batch", [(), pytest.param((2,), marks=simulator), (2, 3)], ids=["3-D", "4-D", "5-D"])
def test_results_have_the_bits_of_the_usual_order(backend, batch):
    q, k, v, do = random_inputs(batch=batch, **SIZES)
    options, there = options_of(backend, batch), heads_last(backend, q, k, v, do)
    usual = [turned(x) for x in there]
    o, lse = backend.forward(*usual[:3], return_lse=True, **options)
    dlse = backend.to_device(np.full(lse.shape, 0.5, np.float32))
    gradients = backend.backward(usual[3], *usual[:3], o, lse, dlse=dlse, bias_grad=True, **options)
    own, own_lse = backend.forward(*there[:3], return_lse=True, axes="bnhd", **options)
    theirs = backend.backward(there[3], *there[:3], own, own_lse, dlse=dlse, bias_grad=True, axes="bnhd", **options)
    expected = [*map(turned, (o, *gradients[:3])), lse, gradients[3]]
    for x, y in zip((own, *theirs[:3], own_lse, theirs[3]), expected, strict=True):
        assert same_bits(backend.to_host(x), backend.to_host(y))
    assert [x.shape for x in (own, *theirs[:3])] == [there[3].shape, *(x.shape for x in there[:3])]
    assert all(x.flags.c_contiguous for x in (own, own_lse, *theirs))


def test_out_is_written_where_it_is(backend):
    q, k, v, do = heads_last(backend, *random_inputs(batch=(2,), **SIZES))
    o, lse = backend.forward(q, k, v, return_lse=True, axes="bnhd")
    expected = (o, *backend.backward(do, q, k, v, o, lse, axes="bnhd"))
    out, dq, dv = (backend.to_device(np.zeros(x.shape, np.float32)) for x in (do, q, v))
    assert backend.forward(q, k, v, axes="bnhd", out=out) is out
    gradients = backend.backward(do, q, k, v, o, lse, axes="bnhd", out=(dq, None, dv))
    assert gradients[0] is dq
    assert gradients[2] is dv
    for x, y in zip((out, dq, gradients[1], dv), expected, strict=True):
        assert same_bits(backend.to_host(x), backend.to_host(y))


class Foreign:
    """An array that offers nothing but DLPack."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


def cpu_inputs(batch=(2,), **sizes):
    """q, k, v, do of NumPy, with heads last."""
    return [np.ascontiguousarray(turned(x)) for x in random_inputs(batch=batch, **(SIZES | sizes))]


@pytest.mark.parametrize("make", [lambda x: x, Foreign], ids=["numpy", "foreign"])
def test_arrays_are_read_and_written_without_a_copy(monkeypatch, make):
    seen = []
    monkeypatch.setattr(call, "_prepared", {})
    monkeypatch.setattr(call.plan, "prepare", lambda *_, **__: Prepared(lambda inputs, results: seen.extend((*inputs[:3], results[0]))))
    inputs = cpu_inputs()[:3]
    o = numba_flash.forward(*map(make, inputs), axes="bnhd", backend="cpu")
    for x, y in zip(seen, (*inputs, o), strict=True):
        assert x.ctypes.data == y.ctypes.data
        assert x.shape == turned(y).shape
        assert x.strides == turned(y).strides


def test_foreign_arrays_may_have_heads_last():
    q, k, v, do = cpu_inputs()
    out = np.zeros_like(do)
    o, lse = numba_flash.forward(*map(Foreign, (q, k, v)), axes="bnhd", return_lse=True, out=Foreign(out), backend="cpu")
    expected, _ = numba_flash.forward(q, k, v, axes="bnhd", return_lse=True, backend="cpu")
    assert isinstance(o, Foreign)
    assert same_bits(out, expected)
    gradients = numba_flash.backward(*map(Foreign, (do, q, k, v)), expected, lse, axes="bnhd", backend="cpu")
    assert all(map(same_bits, gradients, numba_flash.backward(do, q, k, v, expected, lse, axes="bnhd", backend="cpu")))


def test_calls_are_prepared_once_for_each_order(monkeypatch):
    """With as many heads as queries and keys, layouts do not tell the orders apart."""
    monkeypatch.setattr(call, "_prepared", {})
    x = np.random.default_rng(0).standard_normal((2, 3, 3, 8))
    for _ in range(3):
        o, turned_o = (numba_flash.forward(y, y, y, axes=axes, backend="cpu") for y, axes in ((x, "bhnd"), (turned(x), "bnhd")))
        assert same_bits(o, turned(turned_o))
    kept = [key for key in call._prepared if isinstance(key, tuple)]
    assert len(kept) == 2


# ---- errors: in the user's axes ---------------------------------------------------------------------------------------------------------

Q, K, V, DO = cpu_inputs()  # (2, 5, 4, 16), (2, 7, 2, 16), (2, 7, 2, 8), (2, 5, 4, 8)
LSE = np.zeros((2, 4, 5), np.float32)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def long(length: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(zeros(1, 1, 1), (length, 1, 1), (0, 0, 4))


FORWARD_ERRORS = {
    "another order": (
        {"axes": "bndh"},
        "axes must be 'bhnd' (..., heads, length, head_dim) or 'bnhd' (..., length, heads, head_dim); got 'bndh'",
    ),
    "no name": (
        {"axes": ["bnhd"]},
        "axes must be 'bhnd' (..., heads, length, head_dim) or 'bnhd' (..., length, heads, head_dim); got ['bnhd']",
    ),
    "2-D": (
        {"q": zeros(5, 16), "k": zeros(7, 16), "v": zeros(7, 8)},
        "q must have 3 to 5 dimensions (..., length, heads, head_dim); got shape (5, 16)",
    ),
    "6-D": ({"q": zeros(1, 1, 1, 2, 3, 4)}, "q must have 3 to 5 dimensions (..., length, heads, head_dim); got shape (1, 1, 1, 2, 3, 4)"),
    "heads of q": ({"q": zeros(2, 5, 3, 16)}, "the number of heads q.shape[-2] (3) must be a multiple of k.shape[-2] (2)"),
    "keys of v": ({"v": zeros(2, 6, 2, 8)}, "v.shape[:-1] (2, 6, 2) must equal k.shape[:-1] (2, 7, 2)"),
    "long q": ({"q": long(2**30 + 1), "k": zeros(3, 1, 1), "v": zeros(3, 1, 1)}, "q.shape[-3] (1073741825) must be at most 1073741824"),
    "long k": ({"q": zeros(3, 1, 1), "k": long(2**30 + 1), "v": long(2**30 + 1)}, "k.shape[-3] (1073741825) must be at most 1073741824"),
    "lengths of keys": ({"kv_lengths": np.array([7, 8])}, "kv_lengths must lie between 0 and k.shape[-3] (7); kv_lengths[1] is 8"),
    "lengths of queries": ({"q_lengths": np.array([6, 1])}, "q_lengths must lie between 0 and q.shape[-3] (5); q_lengths[0] is 6"),
    "bias": ({"bias": zeros(5, 4, 7)}, "bias.shape (5, 4, 7) must be broadcastable to (..., Hq, Nq, Nk) (2, 4, 5, 7)"),
    "out": ({"out": zeros(2, 4, 5, 8)}, "out.shape (2, 4, 5, 8) must be (2, 5, 4, 8)"),
    "out of one row": (
        {"out": np.broadcast_to(zeros(5, 1, 8), (2, 5, 4, 8))},
        "out must not overlap itself; it has strides (0, 32, 0, 4) for shape (2, 5, 4, 8)",
    ),
}


@pytest.mark.parametrize(("change", "message"), FORWARD_ERRORS.values(), ids=FORWARD_ERRORS)
def test_errors_of_forward(change, message):
    arguments = {"q": Q, "k": K, "v": V, "axes": "bnhd"} | change
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        numba_flash.forward(**arguments, backend="cpu")


BACKWARD_ERRORS = {
    "do": ({"do": turned(DO)}, "do.shape (2, 4, 5, 8) must be (2, 5, 4, 8)"),
    "o": ({"o": DO[0, 0]}, "o.shape (4, 8) must be (2, 5, 4, 8)"),
    "lse": ({"lse": LSE.swapaxes(1, 2)}, "lse.shape (2, 5, 4) must be (2, 4, 5)"),
    "dlse": ({"dlse": LSE.swapaxes(1, 2)}, "dlse.shape (2, 5, 4) must be (2, 4, 5)"),
    "dk": ({"out": (None, turned(K).copy(), None)}, "out[1].shape (2, 2, 7, 16) must be (2, 7, 2, 16)"),
    "dbias": (
        {"bias": zeros(4, 5, 7), "bias_grad": True, "out": (None, None, None, zeros(5, 4, 7))},
        "out[3].shape (5, 4, 7) must be (4, 5, 7)",
    ),
}


@pytest.mark.parametrize(("change", "message"), BACKWARD_ERRORS.values(), ids=BACKWARD_ERRORS)
def test_errors_of_backward(change, message):
    arguments = {"do": DO, "q": Q, "k": K, "v": V, "o": DO, "lse": LSE, "axes": "bnhd"} | change
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        numba_flash.backward(**arguments, backend="cpu")


def test_an_array_that_is_none_is_named():
    with pytest.raises(TypeError, match=r"^k must be a NumPy or CuPy array, .*; got list: pass np\.asarray\(k\)$"):
        numba_flash.forward(Q, [[[1.0]]], V, axes="bnhd")


def test_lengths_of_a_prepared_call_are_checked_in_its_own_axes():
    x = zeros(2, 3, 3, 8)
    for axes, axis in (("bhnd", -2), ("bnhd", -3)):
        own = {"axes": axes, "backend": "cpu"}
        y = x if axes == "bhnd" else turned(x)
        numba_flash.forward(y, y, y, kv_lengths=np.array([1, 2]), **own)
        with pytest.raises(ValueError, match=rf"^kv_lengths must lie between 0 and k\.shape\[{axis}\] \(3\)"):
            numba_flash.forward(y, y, y, kv_lengths=np.array([1, 4]), **own)


@pytest.mark.parametrize("batch", [(), (32,)], ids=["beyond memory", "beyond 63 bits"])
def test_a_result_that_finds_no_room_is_named_with_its_shape(batch):
    q, v = np.broadcast_to(np.float64(0), (*batch, 2**30, 2**20, 1)), np.zeros((*batch, 1, 1, 256))
    shape = ", ".join(map(str, (*q.shape[:-1], 256)))
    with pytest.raises(MemoryError, match=rf"^o: cannot allocate \d+ bytes for shape \({shape}\), dtype float64$"):
        numba_flash.forward(q, v[..., :1], v, axes="bnhd", backend="cpu")
