"""The machine that executes PTX: on texts written by hand."""

import re

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.machine.machine import Deadlock, Machine
from ptx_machine.machine.memory import Fault
from ptx_machine.machine.ptx_text import parse

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


@pytest.mark.parametrize("seed", range(5))
def test_without_the_barrier_any_order_is_an_error(seed):
    """The value may be there by chance, or not yet."""
    body = """mov.u32 %r2, room; shl.b32 %r3, %r1, 2; add.s32 %r4, %r2, %r3; st.shared.u32 [%r4], %r1;
    xor.b32 %r5, %r3, 252; add.s32 %r6, %r2, %r5; ld.shared.u32 %r7, [%r6]; st.global.u32 [%rd3], %r7;"""
    with pytest.raises(Fault, match=r"shared memory at \d+ is (read|written) by warp|holds what was never written"):
        executed(body, seed=seed)


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


@pytest.mark.parametrize(
    "instruction",
    [
        "dp4a.s32.s32 %r2, %r1, %r1, 1;",
        "atom.relaxed.gpu.global.max.s32 %r2, [%rd1], %r1;",
        "red.release.gpu.global.add.f32 [%rd1], %f1;",
        "fence.proxy.async.global;",
        "mbarrier.arrive_drop.shared::cta.b64 _, [%r1];",
        "mbarrier.arrive.shared::cta.b64 _, [%r1], 2;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32 [%rd1], [%r1], 16;",
        "st.shared.u8 [%r1], %r2;",
    ],
)
def test_an_instruction_that_is_not_known_is_an_error(instruction):
    """Nor is one taken for another whose name begins like it."""
    with pytest.raises(NotImplementedError, match=rf"line \d+: {re.escape(instruction.split()[0].rstrip(';'))} "):
        executed(instruction)


@pytest.mark.parametrize(
    ("instruction", "least"),
    [
        ("cp.async.wait_all;", 80),
        ("createpolicy.fractional.L2::evict_last.b64 %rd1, 1.0;", 80),
        ("cvt.rn.f16x2.f32 %r2, %f1, %f2;", 80),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1}, {%r1}, {%r2}, {%f1};", 80),
        ("cp.async.bulk.commit_group;", 90),
        ("griddepcontrol.wait;", 90),
    ],
    ids=lambda x: x.split()[0].rstrip(";") if isinstance(x, str) else None,
)
def test_an_instruction_that_the_architecture_lacks_is_an_error(instruction, least):
    text = HEAD.replace("sm_90a", f"sm_{least - 4}") + instruction + " ret; }"
    with pytest.raises(ValueError, match=rf"needs sm_{least}; this is for sm_{least - 4}"):
        Machine(text)


def test_shared_memory_and_parameters_have_places():
    kernel = parse(HEAD.replace("room[512];", "room[10]; .shared .align 16 .b8 more[4];") + "ret; }")
    assert kernel.shared == {"room": 0, "more": 16}
    assert [(each.kind, each.offset, each.size) for each in kernel.parameters] == [("u64", 0, 8)]
