"""Copies that threads start and go on: what is there before and after their wait."""

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.machine.by_hand import executed
from ptx_machine.machine.machine import Deadlock
from ptx_machine.machine.memory import Fault
from ptx_machine.machine.order import Race

WORDS = np.arange(128, dtype=np.uint32).reshape(32, 4) + 1000
SEEDS = range(4)
# Each thread has 16 bytes of room, which are 7 before anything is copied; `%rd1` is where its words are in global memory.
BEFORE = """mov.u32 %r1, room; shl.b32 %r2, %lane, 4; add.s32 %r3, %r1, %r2; mov.u32 %r5, 7; st.shared.v4.b32 [%r3], {%r5, %r5, %r5, %r5};
mul.wide.u32 %rd1, %lane, 16; add.s64 %rd1, %rd1, %in;"""
AFTER = "ld.shared.v4.b32 {%y0, %y1, %y2, %y3}, [%r3];"


def copied(instructions: str, seed: int = 0, after: str = AFTER) -> np.ndarray:
    return executed(BEFORE + instructions + after, WORDS, 4, seed=seed)


@pytest.mark.parametrize("wait", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"], ids=["group", "all"])
@pytest.mark.parametrize("kind", ["ca.shared", "cg.shared", "cg.shared::cta", "cg.shared.global.L2::128B"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_is_there_after_its_wait(kind, wait, seed):
    kind = kind if "global" in kind else kind + ".global"
    np.testing.assert_array_equal(copied(f"cp.async.{kind} [%r3], [%rd1], 16; {wait}", seed), WORDS)


@pytest.mark.parametrize("without", ["", "cp.async.wait_all;", "cp.async.commit_group; cp.async.wait_group 1;", "cp.async.wait_group 0;"])
@pytest.mark.parametrize("seed", SEEDS)
def test_reading_without_a_wait_for_it_is_a_race(without, seed):
    """No wait, one before the copy, one that allows the last group, and one for groups alone, of which it is none."""
    copy = "cp.async.ca.shared.global [%r3], [%rd1], 16;"
    with pytest.raises(Race, match=r"is read by warp 0, but in line \d+ a copy by warp 0 wrote it"):
        copied(without + copy if without == "cp.async.wait_all;" else copy + without, seed)


@pytest.mark.parametrize("wait", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"], ids=["group", "all"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_wait_knows_nothing_of_later_copies(wait, seed):
    copy = "cp.async.cg.shared.global [%r3], [%rd1], 16;"
    with pytest.raises(Race, match=r"is written by warp 0, but in line \d+ a copy by warp 0 wrote it"):
        copied(copy + wait + copy + "st.shared.b32 [%r3], %r5;", seed)
    with pytest.raises(Fault, match="block 0 has ended, but warp 0 has not waited for its copies"):
        copied(copy + wait + copy.replace("%r3", "%r3+512"), seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_are_counted_from_the_last(seed):
    """Of three groups the wait leaves one: the first two are there."""
    one = "cp.async.ca.shared.global [%r3+{0}], [%rd1+{0}], 4; cp.async.commit_group;"
    text = "".join(one.format(4 * i) for i in range(3)) + "cp.async.wait_group 1;"
    got = copied(text, seed, "ld.shared.v2.b32 {%y0, %y1}, [%r3]; mov.u32 %y2, 0; mov.u32 %y3, 0; cp.async.wait_all;")
    np.testing.assert_array_equal(got[:, :2], WORDS[:, :2])
    with pytest.raises(Race, match="shared memory at 8 is read by warp 0"):
        copied(text, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_lanes_that_wait_for_least_count(seed):
    """Lanes below 10 commit one group more than the others: to those the copy is the last, which the wait allows."""
    text = """cp.async.cg.shared.global [%r3], [%rd1], 16; cp.async.commit_group; setp.lt.u32 %p1, %lane, 10;
    @%p1 cp.async.commit_group; cp.async.wait_group 1;"""
    with pytest.raises(Race, match="is read by warp 0"):
        copied(text, seed)
    np.testing.assert_array_equal(copied(text.replace("@%p1", ""), seed), WORDS)


def test_copies_that_nobody_waits_for():
    with pytest.raises(Fault, match="block 0 has ended, but warp 0 has not waited for its copies"):
        copied("cp.async.ca.shared.global [%r3+512], [%rd1], 16;")


def test_a_copy_is_no_write_that_the_async_proxy_sees():
    """cp.async belongs to the generic proxy: bulk stores see what it brought behind a fence alone."""
    text = """cp.async.cg.shared.global [%r3], [%rd1], 16; cp.async.wait_all; {fence} bar.warp.sync -1; setp.eq.u32 %p1, %lane, 0;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%out], [%r1], 512; @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;"""
    np.testing.assert_array_equal(copied(text.format(fence="fence.proxy.async;")), WORDS)
    with pytest.raises(Race, match="a proxy fence is missing"):
        copied(text.format(fence=""))


def test_a_policy_of_the_cache_changes_no_result():
    """But it has to be one, of a kind that is known."""
    text = """cp.async.cg.shared.global [%r3], [%rd1], 16; cp.async.wait_all; fence.proxy.async; bar.warp.sync -1;
    setp.eq.u32 %p1, %lane, 0; mov.u64 %rd2, 64; createpolicy.fractional.L2::evict_last.b64 %rd2, 1.0;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%out], [%r1], 512, %rd2; @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;"""
    np.testing.assert_array_equal(copied(text), WORDS)
    with pytest.raises(Fault, match="%rd2 is no cache policy"):
        copied(text.replace("createpolicy.fractional.L2::evict_last.b64 %rd2, 1.0;", ""))
    for wrong in ("createpolicy.fractional.L2::evict_best.b64 %rd2, 1.0;", "createpolicy.fractional.L2::evict_last.b64 %rd2, 0.5;"):
        with pytest.raises(NotImplementedError, match="createpolicy"):
            copied(text.replace("createpolicy.fractional.L2::evict_last.b64 %rd2, 1.0;", wrong))


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_are_guarded_copy_nothing(seed):
    got = copied("setp.lt.u32 %p1, %lane, 10; @%p1 cp.async.cg.shared.global [%r3], [%rd1], 16; cp.async.wait_all;", seed)
    np.testing.assert_array_equal(got, np.where(np.arange(32)[:, None] < 10, WORDS, 7))


def test_what_is_not_read_is_zero_and_need_not_exist():
    """The third number says how many bytes are read: here lane % 3 words, none of them where lane % 3 is 0."""
    text = """rem.u32 %r6, %lane, 3; shl.b32 %r7, %r6, 2; setp.eq.u32 %p1, %r6, 0; mov.u64 %rd2, 64; selp.b64 %rd1, %rd2, %rd1, %p1;
    cp.async.cg.shared.global [%r3], [%rd1], 16, %r7; cp.async.wait_all;"""
    words = np.arange(4) < (np.arange(32) % 3)[:, None]
    np.testing.assert_array_equal(copied(text), np.where(words, WORDS, 0))
    text = "setp.lt.u32 %p1, %lane, 5; cp.async.cg.shared.global [%r3], [%rd1], 16, %p1; cp.async.wait_all;"
    np.testing.assert_array_equal(copied(text), np.where(np.arange(32)[:, None] < 5, 0, WORDS))


@pytest.mark.parametrize(("form", "count"), [("", 1), (".noinc", 33)])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_mbarrier_is_told_when_copies_are_there(form, count, seed):
    """Without .noinc only the thread that arrives by itself is expected; with it, the 32 arrivals of copies too."""
    text = f"""mov.u32 %r6, room; add.s32 %r6, %r6, 2048; setp.eq.u32 %p1, %lane, 0; mov.u32 %r7, {count};
    @%p1 mbarrier.init.shared.b64 [%r6], %r7; bar.warp.sync -1;
    cp.async.ca.shared.global [%r3], [%rd1], 8; cp.async.ca.shared.global [%r3+8], [%rd1+8], 8;
    cp.async.mbarrier.arrive{form}.shared.b64 [%r6]; @%p1 mbarrier.arrive.shared.b64 _, [%r6]; mov.u32 %r8, 0;
    $again: mbarrier.try_wait.parity.shared.b64 %p2, [%r6], %r8; @!%p2 bra $again;"""
    np.testing.assert_array_equal(copied(text, seed), WORDS)
    if form:
        with pytest.raises(Deadlock):
            copied(text.replace(f"%r7, {count}", "%r7, 34"), seed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cp.async.cg.shared.global [%r3+8], [%rd1], 16;", "16 bytes at 8 of shared memory: misaligned"),
        ("cp.async.cg.shared.global [%r3], [%rd1+8], 16;", "16 bytes from 0x.*8: misaligned"),
        ("cp.async.cg.shared.global [%r3+4096], [%rd1], 16;", "16 bytes at 4096 of shared memory, which has 4096"),
        ("cp.async.cg.shared.global [%r3], [%rd1+512], 16;", "16 bytes at 512 of in, which has 512"),
        ("cp.async.cg.shared.global [%r3], [%rd1], 16, 17;", "17 bytes of 16 are to be read"),
    ],
)
def test_what_a_copy_must_not_do(text, message):
    """It is said where it is started."""
    with pytest.raises(Fault, match=rf"line \d+, cp.async.*: {message}"):
        copied(text)


def test_sizes_that_there_are_not():
    with pytest.raises(NotImplementedError, match="8 bytes"):
        copied("cp.async.cg.shared.global [%r3], [%rd1], 8;")
