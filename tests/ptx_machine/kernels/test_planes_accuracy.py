"""What is promised of float32 on tensor cores: errors of a head, root mean square, that are at most those of IEEE sums of one number after
the other. On cores that cut their sums off as those of Ampere and of Hopper do.
"""

import numpy as np
import pytest
from support import SIMULATED, random_inputs

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.instructions import sums
from ptx_machine.problems.kernels import machine
from support import ieee_sums
from support.ieee_sums import size

import numba_flash
from numba_flash import reference

pytestmark = [pytest.mark.full, pytest.mark.machine]

NQ, NK, D = 128, 500, 64
HEADS = {"outliers": 4}  # together, where single numbers decide the error of one; else 1
CORES = {"Ampere": ("sm80", sums.AMPERE, (8, 0)), "Hopper": ("sm80", sums.HOPPER, (9, 0)), "wgmma": ("sm90", sums.HOPPER, (9, 0))}


def powers_of_ten(rng, low: float, high: float, *shape: int) -> np.ndarray:
    return 10.0 ** rng.uniform(low, high, shape)


def outliers(rng, x: np.ndarray, size: float) -> np.ndarray:
    """One number of a thousand is that much larger."""
    return x + size * rng.standard_normal(x.shape) * (rng.random(x.shape) < 1e-3)


def one_row(rng, q, k, v):
    q[:, :, 3] *= 1e6
    return q, k, v


def columns(rng, q, k, v):
    """In units of their own, up to 1e6 apart, which cancel in q . k."""
    units = powers_of_ten(rng, -3, 3, D)
    return q * units, k / units, v * powers_of_ten(rng, -3, 3, D)


def rows(rng, q, k, v):
    """Up to 1e6 apart."""
    q, k = (x * powers_of_ten(rng, -5, 1, *x.shape[:-1], 1) for x in (q, k))
    return q, k, v * powers_of_ten(rng, -3, 3, *v.shape[:-1], 1)


DRAWN = {
    "normal": lambda rng, *x: x,
    "positive": lambda rng, *x: map(np.abs, x),
    "offset": lambda rng, q, k, v: (q / 10, 300 + 10 * k, 300 + 10 * v),
    "outliers": lambda rng, *x: (outliers(rng, each, 10) for each in x),
    "large logits": lambda rng, q, k, v: (4 * q, k, v),
    "rows far apart": rows,
    "one row far above": one_row,
    "columns far apart": columns,
}


def drawn(name: str) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    arrays = random_inputs(batch=(1,), hq=HEADS.get(name, 1), hk=HEADS.get(name, 1), nq=NQ, nk=NK, d=D, dtype="float64")[:3]
    return [x.astype(np.float32) for x in DRAWN[name](rng, *arrays)]


def errors(o, lse, ref, ref_lse) -> list[float]:
    """Of o, of o in the row in the middle, and of lse, the latter relative where it is above 1."""
    by_rows = np.linalg.norm(o - ref, axis=-1) / np.linalg.norm(ref, axis=-1)
    return [size(o - ref) / size(ref), float(np.median(by_rows)), size((lse - ref_lse) / np.maximum(1, np.abs(ref_lse)))]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", DRAWN)
def test_errors_are_at_most_those_of_ieee_sums(name, core):
    """Those of lse at most twice: keys share what tensor cores cut off, and centred ones take one more rounding."""
    q, k, v = drawn(name)
    ref = [x[0] for x in reference.forward(q, k, v, return_lse=True)]
    ieee = map(np.stack, zip(*map(ieee_sums.forward, q[0], k[0], v[0]), strict=True))
    backend, sums_of_core, capability = CORES[core]
    with machine(core=sums_of_core, capability=capability):
        ours = [x[0] for x in numba_flash.forward(q, k, v, backend=backend, return_lse=True)]
    o, row, lse = pairs = list(zip(errors(*ours, *ref), errors(*ieee, *ref), strict=True))
    print(f"{name}, {core}: " + ", ".join(f"{x:.1e} of {y:.1e}: {x / y:.2f}" for x, y in pairs))
    assert o[1] < 1e-5, "the yardstick"
    assert o[0] <= o[1]
    assert row[0] <= row[1]
    assert lse[0] <= 2 * lse[1]
