"""What is promised of gradients of float32 on tensor cores, on those of the GPU, at a length where sums are long."""

from functools import cache

import pytest
from support import gradients_promised as promised

import numba_flash

pytestmark = pytest.mark.gpu

N, D = 4096, 64
OFFSET = ("one sign", "offset", "kelvin")
# Where the promise is not kept on an H200, as docs/numerics.md says. Nearly all weight is one key's: the error of dV is that of P, on sm80
# 1.04 and on sm90 1.38 of IEEE's. Of one head on sm80 the largest error of dK was 4.06 of it.
EXCEPTIONS = {
    ("scores of 30", "dv"): promised.Bounds(1.5, 2),
    ("outliers of 100", "dk"): promised.Bounds(1.5, 4.5),
}


@cache
def problem(kind: str) -> tuple:
    """q, k, v and do on the GPU; what IEEE sums make of them; and what they give, all in float64 with whole matrices."""
    import cupy

    arrays = [cupy.asarray(x) for x in promised.inputs(kind, N, D)]
    expected = [cupy.asarray(x[0]) for x in promised.study.expected_of(*arrays, cupy)[1:]]
    return arrays, promised.ieee_of(*arrays), expected


@pytest.mark.parametrize("kind", promised.study.DISTRIBUTIONS)
@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_errors_of_gradients_are_at_most_those_of_ieee_sums(kind, backend):
    """And dq of data far from the origin has at most half the error of IEEE sums."""
    (q, k, v, do), ieee, expected = problem(kind)
    try:
        o, lse = numba_flash.forward(q, k, v, backend=backend, return_lse=True)
        gradients = numba_flash.backward(do, q, k, v, o, lse, backend=backend)
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    errors = promised.check(kind, [x[0] for x in gradients], ieee, expected, EXCEPTIONS)
    if kind in OFFSET:
        of_ieee = promised.ieee_sums.size(ieee[0] - expected[0]) / promised.ieee_sums.size(expected[0])
        assert errors["dq"] <= of_ieee / 2
