"""What the machine forbids although a GPU may let it pass: accesses in no order, and values that were never written. On texts written by
hand; each is tried in several orders of warps and copies, and is an error in every one of them.
"""

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.machine.machine import Deadlock, Machine
from ptx_machine.machine.memory import Fault
from ptx_machine.machine.order import Race

HEAD = """.version 8.0
.target sm_90a
.address_size 64
.shared .align 1024 .b8 room[8192];
.visible .entry kernel(.param .u64 out, .param .u64 flag)
{
.reg .pred %p<10>; .reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .f32 %f<99>;
ld.param.u64 %rd1, [out]; ld.param.u64 %rd4, [flag]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;
mov.u32 %r90, room; shl.b32 %r2, %r1, 2; add.s32 %r3, %r90, %r2; mov.u32 %r4, %ctaid.x; setp.eq.u32 %p8, %r1, 0; setp.eq.u32 %p7, %r1, 32; 
setp.ne.u32 %p9, %r1, %r1; and.b32 %r82, %r1, 31; setp.eq.u32 %p6, %r82, 0;
add.s32 %r80, %r90, 4096; add.s32 %r81, %r90, 4104; mov.u32 %r70, 0; mov.u32 %r71, 1;
"""
MAKE = "@%p8 mbarrier.init.shared::cta.b64 [%r80], 1; @%p8 mbarrier.init.shared::cta.b64 [%r81], 1;"
FENCE, PROXY = "@%p8 fence.mbarrier_init.release.cluster;", "fence.proxy.async.shared::cta;"
WAIT = "${name}: mbarrier.try_wait.parity.shared::cta.b64 %p1, [{at}], {parity}; @!%p1 bra ${name};"


def wait(name: str, at: str, parity: int) -> str:
    return WAIT.format(name=name, at=at, parity=parity)


def run(body: str, threads: int = 64, seed: int = 0, grid: int = 1, resident: int | None = None, early: bool = False) -> np.ndarray:
    """1024 numbers that a kernel of that body writes to ``[out]``; they are 7 before. There is a flag, too, which is 0."""
    machine = Machine(HEAD + body + "ret; }", seed, resident, early=early)
    out, flag = np.full(1024, 7, np.float32), np.zeros(1, np.int32)
    machine.launch([machine.memory.place("out", out), machine.memory.place("flag", flag)], grid, threads)
    return out


SEEDS = range(2)
ONLY_FIRST = "setp.ne.u32 %p6, %r1, 0; @%p6 bra $end;"
FILL, REFILL = "st.shared.u32 [%r3], %r1;", "st.shared.u32 [%r3], %r3;"
NO_FENCE = r"for the async proxy: a proxy fence is missing"
BY_STORE = r"while a bulk store of thread 0 may still read it"
FETCH = """@%p8 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r80], 256;
@%p8 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r90], [%rd1], 256, [%r80];"""
LOAD = FETCH + wait("loaded", "%r80", 0)
STORE = r"while a bulk store of thread 0 may still read it"
LOAD = f"""@%p8 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r80], 256;
@%p8 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r90], [%rd1], 256, [%r80]; {wait("loaded", "%r80", 0)}"""
STORE = "@%p8 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r90], 256;"
COMMIT, STORED = "@%p8 cp.async.bulk.commit_group;", "@%p8 cp.async.bulk.wait_group.read 0;"
READY = MAKE + FENCE + "bar.sync 0;"
OTHER = "xor.b32 %r5, %r2, 128; add.s32 %r6, %r90, %r5; ld.shared.u32 %r7, [%r6];"

RACES = {
    "a value that another warp writes": (FILL + OTHER + "st.global.u32 [%rd3], %r7;", r"is (read|written) by warp|never written"),
    "a value that another warp may still read": (FILL + "bar.sync 0;" + OTHER + FILL, r"may still read it|is read by warp \d, but"),
    "two values at one place": ("shr.u32 %r5, %r1, 5; st.shared.u32 [%r90], %r5;", r"is written by warp \d, but in line"),
    "two values of lanes at one place": (
        "setp.lt.u32 %p5, %r1, 32; @%p5 st.shared.u32 [%r90], %r1;",
        r"at 0 is written by several lanes of warp 0 at once",
    ),
    "lanes of a warp that have not met": (
        FILL + "xor.b32 %r5, %r2, 4; add.s32 %r6, %r90, %r5; ld.shared.u32 %r7, [%r6]; st.global.u32 [%rd3], %r7;",
        r"is read by warp (\d), but in line \d+ warp \1 wrote it",
    ),
    "a store without a proxy fence": (FILL + "bar.sync 0;" + STORE + COMMIT + STORED, NO_FENCE),
    "a fence that comes before the write": (PROXY + FILL + "bar.sync 0;" + STORE + COMMIT + STORED, NO_FENCE),
    "a fence of other warps": (FILL + "bar.sync 0; @%p7 " + PROXY + STORE + COMMIT + STORED, NO_FENCE),
    "the same by one warp, while another may read it": (
        "setp.lt.u32 %p5, %r1, 32; @!%p5 bra $other; st.shared.u32 [%r90], 5; bar.sync 0; st.shared.u32 [%r90], 5; bra $on;"
        "$other: bar.sync 0; ld.shared.u32 %r7, [%r90]; st.global.u32 [%rd3], %r7; $on:",
        r"while warp 1 may still read it|is read by warp 1, but",
    ),
    "memory that a store may still read": (FILL + PROXY + "bar.sync 0;" + STORE + COMMIT + "bar.sync 0;" + REFILL, BY_STORE),
    "a store that was not committed": (FILL + PROXY + "bar.sync 0;" + STORE + STORED + "bar.sync 0;" + REFILL, BY_STORE),
    "what a copy brings, not waited for": (
        READY + FETCH + "ld.shared.u32 %r7, [%r3]; st.global.u32 [%rd3], %r7;",
        r"is read by warp \d, but in line \d+ a copy that the mbarrier at 4096|is written by a copy.*while warp|never written",
    ),
    "a copy that nobody waits for": (READY + FETCH, r"nobody waited for the copies of the mbarrier at 4096"),
    "a copy onto what another warp may still read": (
        FILL + READY + PROXY + OTHER + LOAD,
        r"may still read it|is read by warp 1, but .* a copy",
    ),
    "a copy onto what was written, without a proxy fence": (FILL + READY + LOAD, NO_FENCE),
    "an mbarrier of which others do not know": (
        MAKE + FENCE + "@%p7 mbarrier.arrive.shared::cta.b64 _, [%r80];",
        r"nothing says that the mbarrier at 4096 has been initialised|there is no mbarrier",
    ),
    "an mbarrier of which copies do not know": (MAKE + "bar.sync 0;" + LOAD, r"copies may not know yet that the mbarrier"),
    "data where an mbarrier is": (READY + "@%p8 st.shared.u32 [%r80], %r1;", r"is written, where an mbarrier is"),
    "too many arrivals": (READY + "mbarrier.arrive.shared::cta.b64 _, [%r80];", r"32 arrivals at the mbarrier at 4096, which waits for 1"),
    "more bytes than expected": (
        READY + LOAD.replace("[%r80], 256;", "[%r80], 128;"),
        r"256 bytes arrive at the mbarrier at 4096, which waits for 128",
    ),
    "a flag read as memory": (
        ONLY_FIRST + "red.release.gpu.global.add.s32 [%rd4], 1; ld.global.s32 %r7, [%rd4]; $end:",
        r"flag at 0 is used by atomic operations",
    ),
    "another block's memory": ("st.global.u32 [%rd3], %r1;", r"out at \d+: block \d wrote it"),
    "a block that ends while its memory is read": (
        FILL + PROXY + "bar.sync 0;" + STORE + COMMIT,
        r"has not waited until its stores were read",
    ),
    "a register that was never written": ("@%p9 mov.u32 %r7, 1; st.global.u32 [%rd3], %r7;", r"%r7 is read before it is written"),
    "a register that was written in one lane": ("@%p6 mov.u32 %r7, 1; st.global.u32 [%rd3], %r7;", r"%r7 holds what was never written"),
    "memory that was never written": ("ld.shared.u32 %r7, [%r3]; st.global.u32 [%rd3], %r7;", r"%r7 holds what was never written"),
    "what is computed from it": (
        "ld.shared.u32 %r7, [%r3]; add.s32 %r8, %r7, 1; setp.eq.u32 %p2, %r8, 0; @%p2 bra $on; $on:",
        r"%p2 holds what was never written",
    ),
    "copies of what was never written": (PROXY + "bar.sync 0;" + STORE + COMMIT + STORED, r"at 0 is read by a bulk store .* never written"),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", RACES)
def test_what_nothing_puts_in_order(name, seed):
    body, message = RACES[name]
    with pytest.raises(Fault, match=message):
        run(body, seed=seed, grid=2 if "another block" in name else 1)


ORDERLY = {
    "written, met, read": FILL + "bar.sync 0;" + OTHER + "st.global.u32 [%rd3], %r7;",
    "read, met, written": FILL + "bar.sync 0;" + OTHER + "bar.sync 0;" + FILL,
    "fenced, met, stored, waited for, written": FILL + PROXY + "bar.sync 0;" + STORE + COMMIT + STORED + "bar.sync 0;" + FILL,
    "fenced by the warp that stores": FILL + "bar.sync 0; @%p8 " + PROXY + STORE + COMMIT + STORED,
    "the same by two warps": "@%p8 st.shared.u32 [%r90], 5; @%p7 st.shared.u32 [%r90], 5; ld.shared.u32 %r7, [%r3];",
    "fetched, waited for, read": READY + LOAD + "ld.shared.u32 %r7, [%r3]; st.global.u32 [%rd3+1024], %r7;",
    "what is computed, but not used": "ld.shared.u32 %r7, [%r3]; add.s32 %r9, %r7, 1;"
    "selp.u32 %r9, %r9, %r1, %p9; st.global.u32 [%rd3], %r9;",
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ORDERLY)
def test_what_is_in_order(name, seed):
    """The same, as it should be."""
    run(ORDERLY[name], seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copy_brings_what_was_there(seed):
    np.testing.assert_array_equal(run(ORDERLY["fetched, waited for, read"], seed=seed)[256:320], np.full(64, 7, np.float32))


def test_blocks_may_store_neighbours_of_16_bits():
    words = run(
        ".reg .b16 %h<2>; cvt.u16.u32 %h1, %r4; mul.wide.u32 %rd5, %r4, 2; add.s64 %rd5, %rd5, %rd1; @%p8 st.global.u16 [%rd5], %h1;",
        grid=4,
    )
    np.testing.assert_array_equal(words.view(np.uint16)[:4], range(4))


# ---- a phase that passes unseen


def test_a_phase_that_nobody_saw():
    """A thread waits for one phase while the other warp completes two: it would wait for one that never comes."""
    body = f"{READY} @%p7 bra $twice; setp.gt.u32 %p6, %r1, 0; @%p6 bra $end; {wait('first', '%r80', 0)} bra $end;"
    body += "$twice:" + 2 * "mbarrier.arrive.shared::cta.b64 _, [%r80];" + "$end:"
    found = []
    for seed in range(20):
        with pytest.raises(Fault) as fault:
            run(body, seed=seed)
        found.append(str(fault.value))
    assert any("has completed two phases while this waited for one" in text for text in found)


# ---- flags between blocks

WAITS = "$again: ld.acquire.gpu.global.s32 %r7, [%rd4]; setp.ne.s32 %p1, %r7, %r4; @%p1 bra $again;"
FIRST = "setp.ne.u32 %p5, %r4, 0; @%p5 bra $add; cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r90], 256; bra $on;"
ADD = "$add: cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r90], 256; $on: cp.async.bulk.commit_group;"
DONE = "cp.async.bulk.wait_group 0; red.release.gpu.global.add.s32 [%rd4], 1;"
ONES = "mov.f32 %f1, 0f3F800000; st.shared.f32 [%r3], %f1;" + PROXY + "bar.sync 0;" + ONLY_FIRST
IN_TURNS = ONES + WAITS + FIRST + ADD + DONE + "$end:"


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_add_in_turns(seed):
    np.testing.assert_array_equal(run(IN_TURNS, seed=seed, grid=4)[:64], np.full(64, 4, np.float32))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("red.release", "red.relaxed"),
        ("ld.acquire", "ld.relaxed"),
        ("cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"),
        ("cp.async.bulk.wait_group 0;", ""),
    ],
    ids=["not released", "not acquired", "only read", "not waited for"],
)
def test_flags_that_say_nothing(right, wrong, seed):
    """Bits may be right by chance; the order is not."""
    assert right in IN_TURNS
    with pytest.raises(Fault, match=r"out at 0: a bulk store of block 0, thread 0 wrote it|used by atomic operations|has not waited until"):
        run(IN_TURNS.replace(right, wrong), seed=seed, grid=4)


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_of_what_another_block_has_written(seed):
    """Who copies it has to know of it, too."""
    copied = "cp.async.ca.shared.global [%r3], [%rd3], 4; cp.async.wait_all;"
    waits = WAITS.replace("%r4", "4")
    run(IN_TURNS.replace("$end:", waits.replace("again", "once") + copied + "$end:"), seed=seed, grid=4)
    relaxed = waits.replace("again", "once").replace("acquire", "relaxed")
    with pytest.raises(Race, match="a bulk store of block"):
        run(IN_TURNS.replace("$end:", relaxed + copied + "$end:"), seed=seed, grid=4)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_phase_may_be_tested_before_it_is_over(seed):
    """Nobody waits; and who finds that it is over knows what happened before."""
    tests = (
        "mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r80], 0; selp.f32 %f1, 0f3F800000, 0f00000000, %p1; st.global.f32 [%rd3], %f1;"
    )
    after = "bar.sync 0; @%p8 st.shared.u32 [%r90], 5; @%p8 mbarrier.arrive.shared::cta.b64 _, [%r80]; bar.sync 0;"
    assert not run(READY + tests, seed=seed)[:64].any()
    np.testing.assert_array_equal(run(READY + tests + after + tests, seed=seed)[:64], np.ones(64, np.float32))
    polls = "$poll: mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r80], 0; nanosleep.u32 100; @!%p1 bra $poll;"
    other = "@%p7 bra $other; @%p8 st.shared.u32 [%r90], 5; @%p8 mbarrier.arrive.shared::cta.b64 _, [%r80]; bra $end;"
    reads = "ld.shared.f32 %f1, [%r90]; st.global.f32 [%rd3], %f1; $end:"
    assert run(f"{READY} {other} $other: {polls} {reads}", seed=seed)[32:33].view(np.int32) == 5
    with pytest.raises(Fault, match=r"is (read|written) by warp|never written"):
        run(f"{READY} {other} $other: {reads}", seed=seed)


def test_blocks_that_wait_for_one_for_which_there_is_no_room():
    """Each waits for the block after it; all have to be there at once."""
    backwards = IN_TURNS.replace("ld.acquire", "sub.s32 %r4, 3, %r4; ld.acquire", 1).replace(
        "$again: sub.s32 %r4, 3, %r4;", "sub.s32 %r4, 3, %r4; $again:"
    )
    np.testing.assert_array_equal(run(backwards, grid=4)[:64], np.full(64, 4, np.float32))
    with pytest.raises(Deadlock, match=r"block 0, warp 0 waits for ld\.acquire\.gpu\.global\.s32"):
        run(backwards, grid=4, resident=2)
    np.testing.assert_array_equal(run(IN_TURNS, grid=4, resident=1)[:64], np.full(64, 4, np.float32))


# ---- kernels that begin while those before are still running

BEFORE, NEXT = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
USES = {
    "a load": "ld.global.u32 %r7, [%rd3];",
    "a load that names no memory": "ld.u32 %r7, [%rd3];",
    "a load that acquires": "ld.acquire.gpu.global.s32 %r7, [%rd4];",
    "a store": "st.global.u32 [%rd3], %r1;",
    "an addition": "red.relaxed.gpu.global.add.f32 [%rd3], 0f00000000;",
    "an atomic operation": "@%p8 atom.relaxed.gpu.global.add.s32 %r7, [%rd4], 1;",
    "a copy": "cp.async.ca.shared.global [%r3], [%rd3], 4; cp.async.wait_all;",
    "a bulk copy": READY + LOAD,
    "a bulk store": FILL + PROXY + "bar.sync 0;" + STORE + COMMIT + STORED,
    "a bulk addition": ONES.removesuffix(ONLY_FIRST)
    + STORE.replace("cp.async.bulk", "cp.reduce.async.bulk").replace("group [", "group.add.f32 [")
    + COMMIT
    + STORED,
}
UNKNOWN = r"block 0, warp \d, line \d+, .*: {what}, but nothing says that the kernels before this one have ended"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", USES)
def test_global_memory_is_used_after_the_kernels_before(name, seed):
    use = USES[name]
    with pytest.raises(Race, match=UNKNOWN.format(what="global memory is used")):
        run(use + BEFORE, seed=seed, early=True)
    run(BEFORE + NEXT + use, seed=seed, early=True)
    run(use, seed=seed)
    run(NEXT + use + BEFORE, seed=seed)


def test_what_kernels_before_may_write_is_no_constant():
    load = "ld.global.nc.u32 %r7, [%rd3];"
    with pytest.raises(Race, match=r"ld\.global\.nc\.u32 .*: global memory is read as if nobody wrote it while this kernel runs"):
        run(BEFORE + load, early=True)
    run(BEFORE + load)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_next_kernel_begins_after_those_before(seed):
    """Whoever waits for this one takes it that those before it have ended, too: so a block may not end without having waited, either."""
    with pytest.raises(Race, match=UNKNOWN.format(what="the next kernel may begin")):
        run(NEXT + BEFORE, seed=seed, early=True)
    with pytest.raises(Fault, match="block 1 has ended, but has not waited for the kernels before"):
        run("setp.ne.u32 %p5, %r4, 0; @%p5 bra $end;" + BEFORE + "$end:", seed=seed, grid=2, early=True)


ONE_WAITS = "setp.gt.u32 %p5, %r1, 31; @%p5 bra $on;" + BEFORE  # the first warp


@pytest.mark.parametrize("seed", SEEDS)
def test_a_warp_may_wait_for_one_that_has_waited(seed):
    """At a barrier, or at an mbarrier; that the other has come there by chance says nothing."""
    use = USES["a store"]
    run(ONE_WAITS + "$on: bar.sync 0;" + use, seed=seed, early=True)
    arrive = READY + ONE_WAITS + "@%p8 mbarrier.arrive.shared::cta.b64 _, [%r80]; $on:"
    run(arrive + wait("come", "%r80", 0) + use, seed=seed, early=True)
    for no_order in ("$on:", "$on: bar.warp.sync -1;", f"bar.sync 0; {use} bra $end; $on: {use} bar.sync 0; $end:"):
        with pytest.raises(Race, match=UNKNOWN.replace("warp \\d", "warp 1").format(what="global memory is used")):
            run(ONE_WAITS + no_order + use, seed=seed, early=True)


def test_all_lanes_of_a_warp_wait_for_the_kernels_before():
    """What some know, others would have to be told."""
    with pytest.raises(Fault, match="only some lanes of a warp wait for the kernels before"):
        run("@%p8 " + BEFORE, early=True)


# ---- products

FRAGMENTS = "mov.u32 %r20, 0; mov.u32 %r21, 0; mov.u32 %r22, 0; mov.u32 %r23, 0;"
FRAGMENTS += "mov.f32 %f0, 0f00000000; mov.f32 %f1, %f0; mov.f32 %f2, %f0; mov.f32 %f3, %f0;"
PRODUCT = """wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, {%r20, %r21, %r22, %r23}, %rd5, 1, 1, 1, 0;
wgmma.commit_group.sync.aligned;"""
OPERAND = "shr.u32 %r10, %r90, 4; mov.u32 %r11, 1073741888; mov.b64 %rd5, {%r10, %r11};"
B_TILE = f"st.shared.u32 [%r3], 0; st.shared.u32 [%r3+512], 0; {PROXY} bar.sync 0;"
FENCED, WAITED = "wgmma.fence.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
WHOLE = FRAGMENTS + OPERAND + B_TILE + FENCED + PRODUCT + WAITED + "bar.sync 0; st.shared.u32 [%r3], %r1; st.global.f32 [%rd3], %f0;"


def test_a_product_in_order():
    np.testing.assert_array_equal(run(WHOLE, threads=128)[:128], np.zeros(128))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (FENCED, "", r"%f0 was written after the last wgmma.fence"),
        (FENCED + PRODUCT, FENCED + "mov.u32 %r20, 1;" + PRODUCT, r"%r20 was written after the last wgmma.fence"),
        (WAITED, "", r"%f0 belongs to a product|while a product of warp group 0 may still read it"),
        (WAITED, "mov.u32 %r21, 5;" + WAITED, r"%r21 belongs to a product that has not been waited for"),
        (WAITED + "bar.sync 0;", WAITED.replace(" 0;", " 1;"), r"while a product of warp group 0 may still read it"),
        (PROXY, "", r"is read by a product of warp group 0, but .* a proxy fence is missing"),
        (PROXY + " bar.sync 0;", PROXY, r"is read by a product of warp group 0, but .* comes after it|never written"),
    ],
    ids=["no fence", "a fragment after the fence", "no wait", "a fragment too early", "another's rows", "no proxy fence", "no meeting"],
)
def test_products_out_of_order(right, wrong, message, seed):
    assert right in WHOLE
    with pytest.raises(Fault, match=message):
        run(WHOLE.replace(right, wrong), threads=128, seed=seed)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            OPERAND.replace("4; mov", "4; add.u32 %r10, %r10, 8; mov"),
            r"swizzled rows from \d+ on, not from the first of eight: a multiple of 1024",
        ),
        (OPERAND.replace("1073741888", "1073741889"), "a descriptor of a kind that is not known: 0x40000041"),
    ],
    ids=["the second of eight rows", "an unknown kind"],
)
def test_products_of_wrong_descriptors(wrong, message):
    assert wrong != OPERAND
    with pytest.raises(Fault, match=message):
        run(WHOLE.replace(OPERAND, wrong), threads=128)


def test_errors_are_told_apart():
    with pytest.raises(Race, match=r"block 0, warp \d, line \d+, st.shared.u32 \[%r90\], %r5: shared memory at 0"):
        run(RACES["two values at one place"][0])
