"""The machine that executes PTX: on the kernels that the compiler makes of this package."""

import re

import numpy as np
import pytest
from support import SIMULATED, random_inputs

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from backend import SM90, machine
from kernels import attention
from memory import Fault
from sums import EXACT, HOPPER

from numba_flash import reference

CASES = {
    "simt": ("simt", "float32", 16, 40, 50, (2, 1), {"causal": True}),
    "sm90": ("sm90", "float16", 64, 200, 256, (2, 1), {}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_attention_and_its_gradients(name):
    """Whatever the order in which warps take turns and copies arrive: the same bits."""
    *sizes, options = CASES[name]
    first, second = (attention(*sizes, seed, **options) for seed in (0, 1))
    for x, y in zip(first, second, strict=True):
        assert x is y is None or x.tobytes() == y.tobytes()


def mutated(monkeypatch, old: str, new: str, count: int | None = None):
    """Let the machine execute texts in which some occurrences of a pattern are replaced."""
    import kernels

    text_of = kernels.ptx.__wrapped__

    def ptx(builder, config, capability):
        text, made = re.subn(old, new, text_of(builder, config, capability), count=count or 0)
        assert made
        return text

    monkeypatch.setattr(kernels, "ptx", ptx)


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"selp\.u32 (%r\d+), 1, 0, p;", r"mov.u32 \1, 1;"),  # nobody waits for an mbarrier
        (r"wgmma\.wait_group\.sync\.aligned 0;", r"wgmma.wait_group.sync.aligned 1;"),  # a product is used before it is there
        (r"mbarrier\.arrive\.shared::cta\.b64 _, \[(%r\d+)\];", ""),  # nothing is released
    ],
    ids=["no waits", "accumulators too early", "no arrivals"],
)
def test_what_would_go_wrong_on_a_gpu_goes_wrong_here(monkeypatch, old, new):
    mutated(monkeypatch, old, new)
    with pytest.raises((Fault, AssertionError)):
        attention("sm90", "float16", 64, 200, 256, (2, 1), 0, backward=False)


@pytest.mark.full
def test_tensor_cores_that_cut_off_make_sums_too_small():
    """Scores of positive numbers, and with them lse, come out a little smaller, as on hardware, and not otherwise."""
    q, k, v, _ = random_inputs(batch=(1,), hq=1, hk=1, nq=64, nk=128, d=64, dtype="float16", draw=lambda rng, shape: rng.random(shape))
    found = []
    for core in (EXACT, HOPPER):
        with machine(core=core):
            found.append(SM90.forward(q, k, v, return_lse=True)[1].astype(np.float64))
    _, lse = reference.forward(q, k, v)
    exact, cut_off = (x - lse for x in found)
    assert cut_off.mean() < exact.mean() - 1e-7
    assert np.abs(cut_off).max() < 4e-6
