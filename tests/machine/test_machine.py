"""The machine that executes PTX: on texts written by hand, and on the kernels that the compiler makes of this package."""

import re

import numpy as np
import pytest
from support import DTYPES, SIMULATED, random_inputs

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from kernels import Executed
from machine import Deadlock, Machine
from memory import Fault
from ptx_text import parse

from numba_flash import reference
from numba_flash.arrays import Layout
from numba_flash.cuda.launch import Gpu
from numba_flash.plan import tier
from numba_flash.problem import BackwardInputs, BackwardResults, ForwardInputs, ForwardResults, bind

HEAD = """.version 8.0
.target sm_90a
.address_size 64
.shared .align 16 .b8 room[512];
.visible .entry kernel(.param .u64 out)
{
.reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .f32 %f<99>;
ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
"""


def executed(body: str, threads: int = 64, seed: int = 0, grid: int = 1) -> np.ndarray:
    """What each thread of a kernel of that body writes to ``[%rd3]``."""
    machine, out = Machine(HEAD + body + "ret; }", seed), np.full(threads, -1, np.int32)
    machine.launch([machine.memory.place("out", out)], grid, threads)
    return out


# ---- texts -------------------------------------------------------------------------------------------------------------------------------


def test_lanes_that_part_meet_again():
    body = """setp.lt.u32 %p1, %r1, 10; mov.u32 %r2, 5; @%p1 bra $small; mov.u32 %r2, 7; bra.uni $meet;
    $small: add.s32 %r2, %r2, %r1; $meet: add.s32 %r2, %r2, 100; st.global.u32 [%rd3], %r2;"""
    expected = np.where(np.arange(64) < 10, 105 + np.arange(64), 107)
    np.testing.assert_array_equal(executed(body), expected)


def test_each_lane_leaves_a_loop_when_it_is_done():
    body = """and.b32 %r2, %r1, 7; mov.u32 %r3, 0; $again: add.s32 %r3, %r3, 3; add.s32 %r2, %r2, -1;
    setp.ge.s32 %p1, %r2, 0; @%p1 bra $again; st.global.u32 [%rd3], %r3;"""
    np.testing.assert_array_equal(executed(body), 3 * (np.arange(64) % 8 + 1))


@pytest.mark.parametrize("seed", range(5))
def test_a_barrier_lets_warps_see_what_others_wrote(seed):
    body = """mov.u32 %r2, room; shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3; st.shared.u32 [%r4], %r1; bar.sync 0;
    xor.b32 %r5, %r3, 252; add.s32 %r6, %r2, %r5; ld.shared.u32 %r7, [%r6]; st.global.u32 [%rd3], %r7;"""
    np.testing.assert_array_equal(executed(body, seed=seed), 63 - np.arange(64))


def test_without_the_barrier_some_order_shows_that_it_is_missing():
    body = """mov.u32 %r2, room; shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3; st.shared.u32 [%r4], %r1;
    xor.b32 %r5, %r3, 252; add.s32 %r6, %r2, %r5; ld.shared.u32 %r7, [%r6]; st.global.u32 [%rd3], %r7;"""
    assert any((executed(body, seed=seed) != 63 - np.arange(64)).any() for seed in range(5))


def test_who_waits_for_what_nobody_does_is_told():
    with pytest.raises(Deadlock, match=r"block 0, warp 0 waits for barrier 3, line \d+"):
        executed("mov.u32 %r2, 3; mov.u32 %r3, 96; bar.sync %r2, %r3;")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s32 %r2, %r3, 1;", r"%r3 is read before it is written"),
        ("st.global.u32 [%rd1+128], %r1;", r"4 bytes at 128 of out, which has 128"),
        ("st.global.u32 [%rd1+2], %r1;", r"4 bytes at 2 of out: misaligned"),
        ("mov.u64 %rd4, 64; st.global.u32 [%rd4], %r1;", r"nothing lies at address 0x40"),
        ("mov.u32 %r2, room; mbarrier.arrive.shared::cta.b64 _, [%r2];", r"there is no mbarrier at 0"),
    ],
    ids=["unwritten register", "out of bounds", "misaligned", "nowhere", "no mbarrier"],
)
def test_what_a_kernel_must_not_do(body, message):
    """The error says where: block, warp, line and instruction."""
    with pytest.raises(Fault, match=rf"block 0, warp \d, line \d+, .*: {message}"):
        executed(body, threads=32)


def test_an_instruction_that_is_not_known_is_an_error():
    with pytest.raises(NotImplementedError, match=r"line \d+: prmt.b32"):
        executed("prmt.b32 %r2, %r1, %r1, 1;")


def test_shared_memory_and_parameters_have_places():
    kernel = parse(HEAD.replace("room[512];", "room[10]; .shared .align 16 .b8 more[4];") + "ret; }")
    assert kernel.shared == {"room": 0, "more": 16}
    assert [(each.kind, each.offset, each.size) for each in kernel.parameters] == [("u64", 0, 8)]


# ---- kernels -----------------------------------------------------------------------------------------------------------------------------


def on_machine(prepared, inputs, results, seed: int):
    """Run a prepared pass, its launches executed by the machine."""
    for launch in prepared.launches:
        launch._submit = lambda operands, extras, numbers, launch=launch: Executed(launch, seed)(*operands, extras=extras, numbers=numbers)
    prepared.run(inputs, results)


def paper(arrays):
    return type(arrays)(*map(Layout.of, arrays))


def attention(backend, dtype, d, nq, nk, heads, seed, multiprocessors=2, backward=True, **options):
    """Forward and backward on the machine, each result within what the dtype allows of the oracle."""
    hq, hk = heads
    q, k, v, do = random_inputs(batch=(1,), hq=hq, hk=hk, nq=nq, nk=nk, d=d, dtype=dtype)
    problem, gpu = bind(q, k, v, **options), Gpu(0, (9, 0), multiprocessors)
    arrays = {name: options[name] for name in ("q_lengths", "kv_lengths") if name in options}
    nan = lambda x, dtype=None: np.full(x.shape, np.nan, dtype or x.dtype)
    inputs, results = ForwardInputs(q, k, v, **arrays), ForwardResults(nan(do), nan(do[..., 0], np.float32))
    on_machine(tier(backend).prepare_forward(problem, paper(inputs), paper(results), gpu=gpu), inputs, results, seed)
    o, lse = reference.forward(q, k, v, **options)
    unit = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    np.testing.assert_allclose(results.o.astype(np.float64), o, atol=unit, rtol=unit)
    np.testing.assert_allclose(results.lse, lse, atol=4e-6, rtol=4e-6)
    if not backward:
        return results
    inputs = BackwardInputs(do, q, k, v, o.astype(DTYPES[dtype]), lse.astype(np.float32), **arrays)
    gradients = BackwardResults(nan(q), nan(k), nan(v))
    on_machine(tier(backend).prepare_backward(problem, paper(inputs), paper(gradients), gpu=gpu), inputs, gradients, seed)
    for x, ref in zip(gradients, reference.backward(do, q, k, v, **options), strict=False):
        np.testing.assert_allclose(x.astype(np.float64), ref, atol=4 * unit * max(1, np.abs(ref).max()), rtol=4 * unit)
    return gradients


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
