"""The machine that executes PTX: on the kernels that the compiler makes of this package."""

import re

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from kernels import attention
from memory import Fault

LENGTHS = {"q_lengths": np.array([100]), "kv_lengths": np.array([77])}
CASES = {
    "simt": ("simt", "float32", 16, 40, 50, (2, 1), {"causal": True}),
    "D64": ("sm90", "float16", 64, 200, 256, (2, 1), {}),
    "D64 causal": ("sm90", "bfloat16", 64, 200, 200, (2, 2), {"causal": True}),
    "D128 window": ("sm90", "float16", 128, 130, 200, (1, 1), {"window": (60, 10)}),
    "D128 softcap and lengths": ("sm90", "float16", 128, 130, 150, (1, 1), {"softcap": 3.0, **LENGTHS}),
    "D256": ("sm90", "float16", 256, 130, 100, (1, 1), {"causal": True}),
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
