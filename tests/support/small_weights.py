"""Weights of float16 that are small beside the largest of their row: problems, and what has to come out of them, for backends and for the
machine.
"""

from typing import NamedTuple

import numpy as np

from numba_flash import reference
from support import whole

SCORE = 17.4  # of the key that has nearly all of the weight; the others' exp(-17.4) = 2.8e-8 is no float16


class Case(NamedTuple):
    """Queries, keys, and what else there is."""

    nq: int
    nk: int
    options: dict = {}  # noqa: RUF012
    batch: int = 1
    d: int = 64

    def arrays(self):
        """q and k of zeros, v of ones."""
        shapes = ((self.batch, 1, n, self.d) for n in (self.nq, self.nk, self.nk))
        q, k, v = (np.zeros(shape, np.float16) for shape in shapes)
        return q, k, v + np.float16(1)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


# `sm90` keeps a bias in shared memory that eight batch elements share.
KEPT, KEPT_AS_FLOAT32 = ({"bias": zeros(70, 200, dtype=dtype)} for dtype in (np.float16, np.float32))
SMALL_WEIGHTS = {
    "plain": Case(65, 256),
    "causal": Case(65, 256, {"causal": True}),
    "head dimension 128": Case(65, 256, d=128),
    "a bias": Case(65, 256, {"bias": zeros(65, 256)}),
    "a kept bias": Case(70, 200, KEPT, batch=8, d=32),
    "a kept bias of float32": Case(70, 200, KEPT_AS_FLOAT32, batch=8, d=32),
    "a mask": Case(65, 256, {"mask": np.ones((65, 256), bool)}),
    "a softcap": Case(65, 256, {"softcap": 1000.0}),
    "dropout": Case(65, 256, {"dropout": 0.25, "rng": (1, 2)}),
    "few queries": Case(4, 1000),
    "few queries, a bias": Case(4, 1000, {"bias": zeros(4, 1000)}),
    "few queries, causal": Case(4, 256, {"causal": True}),
}


def one_large_score(case: Case):
    """q, k, v: one key has all of the weight but for exp(-17.4) of each other key's, and a value of 0 where the others have 1."""
    q, k, v = case.arrays()
    q[..., 0], k[..., case.nk // 2, 0], v[..., case.nk // 2, :] = 1, SCORE, 0
    return q, k, v


def on_device(backend, options: dict) -> dict:
    return {name: backend.to_device(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


def forward(backend, q, k, v, **options) -> np.ndarray:
    options = on_device(backend, options)
    return backend.to_host(backend.forward(*map(backend.to_device, (q, k, v)), **options)).astype(np.float64)


def check_small_weights(backend, name: str) -> None:
    """Each is less than half of the least float16 there is; their sum is all that o has."""
    case = SMALL_WEIGHTS[name]
    arrays = one_large_score(case)
    expected = reference.forward(*arrays, scale=1.0, **case.options)
    if name == "plain":
        assert abs(expected - 7.03e-6).max() < 1e-8
    np.testing.assert_allclose(forward(backend, *arrays, scale=1.0, **case.options), expected, rtol=0.03)


def check_small_weights_in_gradients(backend, name: str) -> None:
    """dv of a key is its weight times the sum of do; of a kept bias, the gradient is wanted, too. `sm80` loses weights of less than half of
    the least float16, unless there are few queries.
    """
    case = SMALL_WEIGHTS[name]
    q, k, v = one_large_score(case)
    do = np.full(q.shape, 100, np.float16)
    arrays, options = [backend.to_device(x) for x in (q, k, v)], case.options | {"scale": 1.0}
    given, more = on_device(backend, options), {"bias_grad": True} if "kept" in name else {}
    o, lse = backend.forward(*arrays, return_lse=True, **given)
    dv = backend.to_host(backend.backward(backend.to_device(do), *arrays, o, lse, **given, **more)[2]).astype(np.float64)
    expected = whole.gradients(do, q, k, v, **options)[2]
    assert 0 < expected[expected > 0].min() < 5e-4
    loses = backend.name == "sm80" and name != "few queries"
    lost = case.nq * 100 * 2.0**-25 / (1 - case.options.get("dropout", 0.0))
    np.testing.assert_allclose(dv, expected, rtol=0.03, atol=lost if loses else 0)
