"""The machine that executes PTX: on the kernels that the compiler makes of this package."""

import re
from functools import partial

import numpy as np
import pytest
from support import SIMULATED, no_gpu, random_inputs, whole

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.instructions.sums import EXACT, HOPPER
from ptx_machine.machine.memory import Fault
from ptx_machine.problems.kernels import SM80, SM90, attention, machine

import numba_flash
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


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("backend", "capability"), [(SM90, (9, 0)), (SM80, (8, 0))], ids=["sm90", "sm80"])
def test_the_oracle_accepts_what_tensor_cores_compute(backend, capability, dtype):
    """O and lse with weights of 16 bits and sums that are cut off, and the gradients that are wanted of them."""
    q, k, v, do = random_inputs(batch=(1,), hq=2, hk=1, nq=70, nk=130, d=64, dtype=dtype)
    with machine(core=HOPPER, capability=capability):
        o, lse = backend.forward(q, k, v, causal=True, return_lse=True)
    assert np.abs(o.astype(np.float64) - reference.forward(q, k, v, causal=True)).max() > 2e-4, "16 bits"
    reference.backward(do, q, k, v, o, lse, causal=True)
    with pytest.raises(ValueError, match="lse is not what forward returns"):
        reference.backward(do, q, k, v, o, lse)


def mutated(monkeypatch, old: str, new: str, count: int | None = None):
    """Let the machine execute texts in which some occurrences of a pattern are replaced."""
    from ptx_machine.problems import kernels

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


def errors_of_lse(forward, q, k, v) -> np.ndarray:
    return np.asarray(forward(q, k, v)).astype(np.float64) - reference.forward(q, k, v, scale=1.0, return_lse=True)[1]


def positive(d: int, nk: int):
    """Scores are sums of positive numbers: what is cut off of them adds up."""
    inputs = random_inputs(batch=(1,), hq=1, hk=1, nq=64, nk=nk, d=d, dtype="float16", draw=lambda rng, shape: rng.random(shape))
    return inputs[:3]


def on_cores(core, q, k, v):
    with machine(core=core):
        return SM90.forward(q, k, v, scale=1.0, return_lse=True)[1]


@pytest.mark.full
def test_tensor_cores_that_cut_off_make_sums_too_small():
    """Scores of positive numbers, and with them lse, come out too small by some units in the last place."""
    inputs = positive(64, 128)
    exact, cut_off = (errors_of_lse(partial(on_cores, core), *inputs) for core in (EXACT, HOPPER))
    unit = np.spacing(np.float32(reference.forward(*inputs, scale=1.0, return_lse=True)[1].mean()))
    assert abs(exact.mean()) < 0.5 * unit
    assert -4 * unit < cut_off.mean() < -unit


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "nk"), [(64, 128), (128, 256), (256, 512)])
def test_a_gpu_cuts_off_as_the_model_says(d, nk):
    """The same bits in most rows; with exact sums in nearly none.

    Special functions of the GPU differ in the last place, and it makes one fused operation of a scaled score and the shift of its row,
    which the machine rounds twice.
    """
    cp = pytest.importorskip("cupy")
    if no_gpu("sm90") is not None:
        pytest.skip(no_gpu("sm90"))
    inputs = positive(d, nk)
    gpu = errors_of_lse(lambda *x: cp.asnumpy(SM90.forward(*map(cp.asarray, x), scale=1.0, return_lse=True)[1]), *inputs)
    exact, cut_off = (errors_of_lse(partial(on_cores, core), *inputs) for core in (EXACT, HOPPER))
    print(f"D={d}: equal rows {(gpu == cut_off).mean():.3f}, with exact sums {(gpu == exact).mean():.3f}")
    assert (gpu == cut_off).mean() > 0.75
    assert (gpu == exact).mean() < 0.2


@pytest.mark.full
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_gradient_of_a_bias_of_float64_has_its_shape(shape):
    """Threads of tensor cores sum it, and write one number."""
    q, k, v, do = random_inputs(batch=(1,), hq=1, hk=1, nq=9, nk=9, d=16, dtype="float64")
    options = {"bias": np.full(shape, 0.5)}
    o, lse = reference.forward(q, k, v, return_lse=True, **options)
    with machine():
        dbias = numba_flash.backward(do, q, k, v, o, lse, bias_grad=True, backend="sm80", **options)[3]
    assert dbias.shape == shape
    np.testing.assert_allclose(dbias, whole.gradients(do, q, k, v, bias_grad=True, **options)[3], atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("backend", [SM90, SM80], ids=["sm90", "sm80"])
def test_a_mask_of_blocks_beside_a_bias_that_batch_elements_share(backend):
    """The kernels that keep such a bias in shared memory know no mask, nor lists in its place."""
    q, k, v, do = random_inputs(batch=(8,), hq=2, hk=2, nq=40, nk=384, d=32, dtype="float16")
    bias, mask = random_inputs(batch=(), hq=2, nq=40, d=384, dtype="float16")[0], np.array([[True, False, True]])
    options = {"bias": bias, "mask": numba_flash.BlockMask(mask, 128)}
    o, lse = reference.forward(q, k, v, return_lse=True, **options)
    with machine(multiprocessors=2):
        same_o = backend.forward(q, k, v, **options)
        found = backend.backward(do, q, k, v, o.astype(q.dtype), lse.astype(np.float32), bias_grad=True, **options)
    np.testing.assert_allclose(same_o.astype(float), o, atol=4e-3)
    for x, expected in zip(found, reference.backward(do, q, k, v, o, lse, bias_grad=True, **options), strict=True):
        np.testing.assert_allclose(x.astype(float), expected, atol=2e-3 * np.abs(expected).max())


@pytest.mark.full
def test_blocks_that_the_tile_of_a_bias_does_not_fit():
    """The copy engine brings the bias to tiles of 128 keys, and lists are of smaller ones."""
    q, k, v, _ = random_inputs(batch=(1,), hq=1, hk=1, nq=128, nk=384, d=64, dtype="float16")
    bias, mask = random_inputs(batch=(), hq=1, nq=128, d=384, dtype="float16")[0], np.array([[True, False, True, False]])
    options = {"bias": bias, "mask": numba_flash.BlockMask(mask, (128, 96))}
    with machine():
        o = SM90.forward(q, k, v, **options)
    np.testing.assert_allclose(o.astype(float), reference.forward(q, k, v, **options), atol=4e-3)
