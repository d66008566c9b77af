"""`vjp`: the bits of `forward` and `backward`, arrays held and not copied, and mistakes named before anything is computed."""

import gc
import weakref

import numpy as np
import pytest
from support import SIMULATED, Backend, random_inputs, same_bits, whole

import numba_flash
from numba_flash import call

CPU = Backend("cpu", "numpy")
SIZES = {"batch": (2,), "hq": 4, "hk": 2, "nq": 5, "nk": 9, "d": 5, "dv": 3}
simulator = pytest.mark.simulator(full=True)


def arrays(backend=CPU, **sizes):
    """q, k, v, do and dlse."""
    host = random_inputs(**(SIZES | sizes))
    dlse = np.random.default_rng(5).standard_normal(host[3].shape[:-1]).astype(np.float64 if host[0].dtype == np.float64 else np.float32)
    return [backend.to_device(x) for x in (*host, dlse)]


def bias_of(backend, *shape):
    return backend.to_device(np.random.default_rng(7).standard_normal(shape).astype(np.float32))


OPTIONS = {
    "plain": lambda backend: {},
    "causal": lambda backend: {"causal": True, "scale": 0.3, "q_start": 2},
    "bias": lambda backend: {"bias": bias_of(backend, 4, 5, 9), "bias_grad": True},
    "mask": lambda backend: {"mask": bias_of(backend, 5, 9) > -1, "deterministic": False},
    "lengths": lambda backend: {"kv_lengths": [9, 4], "q_lengths": np.array([3, 5])},
    "dropout": lambda backend: {"dropout": 0.4, "rng": (3, 4)},
    "score_mod": lambda backend: {"score_mod": numba_flash.alibi([0.5, 0.25, 0.125, 1.0])},
}


@simulator
@pytest.mark.parametrize("name", OPTIONS if not SIMULATED else ["plain", "bias"])
def test_results_are_those_of_both_functions(backend, name):
    q, k, v, do, dlse = arrays(backend)
    options = OPTIONS[name](backend)
    o, lse, pullback = backend.vjp(q, k, v, return_lse=True, **options)
    expected = backend.forward(q, k, v, return_lse=True, **options)
    gradients = backend.backward(do, q, k, v, *expected, dlse=dlse, **options)
    assert len(gradients) == (4 if name == "bias" else 3)
    for x, y in zip((o, lse, *pullback(do, dlse)), (*expected, *gradients), strict=True):
        assert same_bits(backend.to_host(x), backend.to_host(y))


@simulator
def test_a_pullback_may_be_called_again_and_with_dlse_that_was_not_returned(backend):
    q, k, v, do, dlse = arrays(backend)
    o, pullback = backend.vjp(q, k, v, causal=True)
    first, with_dlse, second = pullback(do), pullback(do, dlse=dlse), pullback(do)
    for x, y in zip(first, second, strict=True):
        assert x is not y
        assert same_bits(backend.to_host(x), backend.to_host(y))
    host = [backend.to_host(x) for x in (do, q, k, v)]
    for found, options in ((first, {}), (with_dlse, {"dlse": backend.to_host(dlse)})):
        expected = whole.everything(*host, causal=True, **options)
        for x, y in zip((o, *found), (expected[0], *expected[2:]), strict=True):
            np.testing.assert_allclose(backend.to_host(x), y, atol=2e-6)
    assert not same_bits(backend.to_host(first[0]), backend.to_host(with_dlse[0]))


def test_gradient_descent(backend):
    """On queries, keys, values and a bias, by gradients that nothing else has made."""
    q, k, v, _, _ = arrays(backend, dtype="float32")
    bias = bias_of(backend, 4, 5, 9)
    target = 0.5 * backend.forward(q, k, v)
    losses = []
    for _ in range(20):
        o, pullback = backend.vjp(q, k, v, bias=bias, bias_grad=True)
        losses.append(float(((o - target) ** 2).sum()) / 2)
        steps = pullback(o - target)
        q, k, v, bias = (x - 0.5 * dx for x, dx in zip((q, k, v, bias), steps, strict=True))
    assert losses[-1] < 0.2 * losses[0]
    assert losses == sorted(losses, reverse=True)


def test_gradients_are_computed_from_the_very_arrays(monkeypatch):
    q, k, v, do, _ = arrays()
    mask, given = np.ones((5, 9), bool), []
    o, lse, pullback = numba_flash.vjp(q, k, v, mask=mask, return_lse=True, backend="cpu")
    monkeypatch.setitem(numba_flash.vjp.__globals__, "backward", lambda *arrays, mask, **options: given.extend((*arrays, mask)))
    pullback(do)
    assert list(map(id, given)) == list(map(id, (do, q, k, v, o, lse, mask)))


def test_a_pullback_holds_arrays_as_long_as_it_lives():
    q, k, v, do, _ = arrays()
    o, lse, pullback = numba_flash.vjp(q, k, v, return_lse=True, backend="cpu")
    held = [weakref.ref(x) for x in (q, k, v, o, lse)]
    del q, k, v, o, lse
    gc.collect()
    assert all(x() is not None for x in held)
    pullback(do)
    del pullback
    gc.collect()
    assert [x() for x in held] == [None] * 5


def test_heads_may_come_after_the_length():
    q, k, v, do, dlse = arrays()
    o, lse, *gradients = whole.everything(do, q, k, v, dlse=dlse)
    there = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v, do)]
    found, found_lse, pullback = numba_flash.vjp(*there[:3], axes="bnhd", return_lse=True, backend="cpu")
    for x, y in zip((found, *pullback(there[3], dlse)), (o, *gradients), strict=True):
        np.testing.assert_allclose(x.swapaxes(1, 2), y, atol=2e-6)
    np.testing.assert_allclose(found_lse, lse, atol=2e-6)


def test_the_default_precision_is_that_of_the_call():
    q, k, v, do, _ = arrays()
    with numba_flash.use_precision("tf32"):
        _, pullback = numba_flash.vjp(q, k, v, backend="cpu")
    with numba_flash.use_precision("ieee"):
        assert pullback._options["precision"] == "tf32"
        pullback(do)


class Reached(Exception):
    pass


def slopeless(score, b, h, i, j):
    return score


WRONG = {
    "no bias": ({"bias_grad": True}, r"^bias_grad needs a bias; got bias_grad=True with bias=None$"),
    "no derivative": ({"score_mod": slopeless}, r"^score_mod_grad must be the derivative of score_mod in a backward pass; got None$"),
    "bias_grad": ({"bias_grad": 1}, r"^bias_grad must be True or False; got 1$"),
    "deterministic": ({"deterministic": "no"}, r"^deterministic must be True or False; got 'no'$"),
    "return_lse": ({"return_lse": None}, r"^return_lse must be True or False; got None$"),
    "dlse": ({"dlse": np.zeros(3)}, r"^dlse must be None in a forward pass"),
    "out": ({"out": None}, r"^vjp\(\) got an unexpected keyword argument 'out': results and gradients are arrays of their own"),
    "causl": ({"causl": True}, r"^vjp\(\) got an unexpected keyword argument 'causl'; did you mean causal\?$"),
    "is_causal": ({"is_causal": True}, r"^vjp\(\) got an unexpected keyword argument 'is_causal'; did you mean causal=True, q_start=0\?"),
    "q": ({"k": np.zeros((2, 2, 9, 4), np.float32)}, r"^k\.shape\[-1\] \(4\) must equal q\.shape\[-1\] \(5\)$"),
    "axes": ({"axes": "nhd"}, r"^axes must be 'bhnd' .* or 'bnhd' .*; got 'nhd'$"),
    "lengths": ({"kv_lengths": [10, 3]}, r"^kv_lengths must lie between 0 and k\.shape\[-2\] \(9\); kv_lengths\[0\] is 10$"),
    "backend": ({"backend": "gpu"}, r"^backend must be one of sm90, sm80, simt, cpu, or None; got 'gpu'$"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_named_before_anything_is_computed(name, monkeypatch):
    options, message = WRONG[name]
    q, k, v, _, _ = arrays()

    def run(*arguments):
        raise Reached

    monkeypatch.setattr(call._Call, "run", run)
    monkeypatch.setattr(call, "_prepared", {})
    with pytest.raises(Reached):
        numba_flash.vjp(q, k, v, backend="cpu")
    with pytest.raises((TypeError, ValueError), match=message):
        numba_flash.vjp(**{"q": q, "k": k, "v": v, "backend": "cpu", **options})


def test_a_backend_that_has_no_gradients_of_it_says_so_at_once(monkeypatch):
    """Here one that serves no backward pass."""
    monkeypatch.setattr(call, "_prepared", {})
    monkeypatch.setattr(call._Call, "run", None)
    tier = call.plan.tier("cpu")
    why_not = tier.why_not
    monkeypatch.setattr(tier, "why_not", lambda kind, *more, **place: "has none" if kind == "backward" else why_not(kind, *more, **place))
    q, k, v, _, _ = arrays()
    with pytest.raises(NotImplementedError, match=r"^backend cpu: has none$"):
        numba_flash.vjp(q, k, v, backend="cpu")


@pytest.mark.parametrize("bias_grad", [False, True])
def test_backends_are_asked_whether_they_have_the_gradient_of_a_bias_that_is_wanted(bias_grad, monkeypatch):
    """By `vjp` before there is a result, and by `backward`, each of its own."""
    asked = []
    tier = call.plan.tier("cpu")
    why_not = tier.why_not

    def heard(kind, *more, dbias=False, **place):
        asked.append((kind, dbias))
        return why_not(kind, *more, dbias=dbias, **place)

    monkeypatch.setattr(call, "_prepared", {})
    monkeypatch.setattr(tier, "why_not", heard)
    q, k, v, do, _ = arrays()
    bias = np.zeros((5, k.shape[-2]), q.dtype)
    _, pullback = numba_flash.vjp(q, k, v, bias=bias, bias_grad=bias_grad, backend="cpu")
    assert asked == [("forward", False), ("backward", bias_grad)]
    pullback(do)
    assert asked[2:] == [("backward", bias_grad)]


def test_mistakes_of_a_pullback_are_those_of_backward():
    q, k, v, do, dlse = arrays()
    _, pullback = numba_flash.vjp(q, k, v, backend="cpu")
    for given, message in (
        ((do[..., :2],), r"^do\.shape \(2, 4, 5, 2\) must be \(2, 4, 5, 3\)$"),
        ((do.astype(np.float64),), r"^do\.dtype \(float64\) must be float32$"),
        ((do, dlse[0]), r"^dlse\.shape \(4, 5\) must be \(2, 4, 5\)$"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            pullback(*given)


def test_calls_are_prepared_once(monkeypatch):
    prepared = []
    original = call.prepare
    monkeypatch.setattr(call, "prepare", lambda kind, *more, **settings: (prepared.append(kind), original(kind, *more, **settings))[1])
    monkeypatch.setattr(call, "_prepared", {})
    q, k, v, do, _ = arrays()
    for _ in range(3):
        _, pullback = numba_flash.vjp(q, k, v, causal=True, backend="cpu")
        pullback(do)
    assert prepared == ["forward", "backward"]
