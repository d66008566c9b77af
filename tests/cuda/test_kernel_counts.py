"""That counts of instructions notice what they are there for, and say it; no kernel is compiled."""

import importlib

import compiled
import kernel_counts
import pytest
import simt_kernels
import sm80_kernels
import sm90_kernels
from kernel_counts import ANEW, MACHINE, PTX, complaint, count_machine, count_ptx, differences

# A tile is written and handed over, products read another, and a turn passes on.
TEXT = """
.visible .entry kernel(
	.param .align 64 .b8 kernel_param_0[128],
	.param .u64 kernel_param_1
)
{
	.shared .align 8 .b8 ring[4096];
	ld.param.u64 	%rd1, [kernel_param_1];
$L__BB0_1:
	// begin inline asm
	{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%r433], %r434; selp.u32 %r432, 1, 0, p; }
	// end inline asm
	@%p9 bra 	$L__BB0_1;
	{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [%r1], {z, z, z, z}; }
	st.shared.b32 [%r3], %r4;
	fence.proxy.async.shared::cta;
	{ .reg .b32 low; .reg .b64 a, b; wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1, %f2}, a, b, p, 1, 1, 0, 0;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%f1, %f2}, a, b, p, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned; }
	wgmma.wait_group.sync.aligned 0;
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r5];
	mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], %r6;
	cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r1], %r2;
	bar.sync %r1, %r2;
	ld.acquire.gpu.global.s32 %r7, [%rd1];
	red.release.gpu.global.add.s32 [%rd1], %r1;
	newest.sync.of.all;
	ex2.approx.ftz.f32 	%f9, %f8;
	add.s64 %rd5, %rd6, %rd7;
	ret;
}
"""
COUNTED = {
    "parameters": 2,
    "bytes of shared memory": 4096,
    "bar.sync": 1,
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32": 1,
    "ex2.approx.ftz.f32": 1,
    "fence.proxy.async.shared::cta": 1,
    "ld.acquire.gpu.global.s32": 1,
    "ld.param": 1,
    "mbarrier.arrive": 1,
    "mbarrier.arrive.expect_tx": 1,
    "mbarrier.try_wait": 1,
    "newest.sync.of.all": 1,
    "red.release.gpu.global.add.s32": 1,
    "st.shared": 1,
    "st.shared.v4": 1,
    "wgmma.commit_group": 1,
    "wgmma.fence": 1,
    "wgmma.mma_async.sync.aligned.m64n128k16": 1,
    "wgmma.mma_async.sync.aligned.m64n64k16": 1,
    "wgmma.wait_group": 1,
    "instructions": 23,
}
WORDS = """
        .section        .text.kernel,"ax",@progbits
.L_x_98:
        /*00c0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*00d0*/               @P0 BRA `(.L_x_0) ;
        /*00e0*/                   WARPGROUP.ARRIVE ;
        /*00f0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0 ;
        /*0100*/              @!UP1 UTMALDG.5D [UR8], [UR4], desc[URZ] ;
        /*0110*/                   FENCE.VIEW.ASYNC.S ;
        /*10120*/                  R2UR UR4, R2 ;
        /*10130*/                  LDC R1, c[0x0][0x28] ;
        /*10140*/                  LDS.128 R4, [R3] ;
        /*10150*/                  LDL R4, [R1] ;
        /*10160*/                  DMMA.8x8x4 R4, R6, R8, R4 ;
"""
WORDS_COUNTED = {
    **dict.fromkeys(["FENCE.VIEW.ASYNC.S", "HGMMA.64x128x16.F32.BF16", "LDS.128", "SYNCS.PHASECHK.TRANS64.TRYWAIT"], 1),
    **dict.fromkeys(["DMMA.8x8x4", "UTMALDG.5D", "WARPGROUP.ARRIVE"], 1),
    "instructions": 11,
}


def test_what_is_counted():
    """Also what shares a line, or depends on a predicate, and synchronising instructions that nobody has thought of."""
    assert count_ptx(TEXT) == COUNTED
    assert count_machine(WORDS) == WORDS_COUNTED


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        ("\tfence.proxy.async.shared::cta;\n", "ring, PTX: 1 -> 0 fence.proxy.async.shared::cta"),
        ("\t@%p1 mbarrier.arrive.shared::cta.b64 _, [%r5];\n", "ring, PTX: 1 -> 0 mbarrier.arrive"),
        ("wgmma.fence.sync.aligned;", "ring, PTX: 1 -> 0 wgmma.fence"),
    ],
)
def test_one_instruction_less_is_named(removed, said):
    assert removed in TEXT
    (off,) = (x for x in differences("ring", PTX, COUNTED, count_ptx(TEXT.replace(removed, ""))) if x.instruction != kernel_counts.ALL)
    assert str(off) == said


def test_one_instruction_more_is_named():
    assert [str(x) for x in differences("ring", MACHINE, WORDS_COUNTED | {"instructions": 1000}, WORDS_COUNTED | {"BAR.SYNC": 2})] == [
        "ring, machine code: 0 -> 2 BAR.SYNC",
        "ring, machine code: 1000 -> 11 instructions",
    ]


def test_compilers_may_choose_how_many_instructions_there_are():
    assert not differences("ring", PTX, {"instructions": 1000}, {"instructions": 1050})
    assert differences("ring", PTX, {"instructions": 1000}, {"instructions": 1051})
    assert differences("ring", PTX, {"instructions": 1000}, {"instructions": 1001}, tolerance=0)


def test_it_is_said_which_tools_are_others():
    off = differences("ring", PTX, {"bar.sync": 2}, {"bar.sync": 1})
    assert complaint(off, {"nvidia-nvvm": "1"}, {"nvidia-nvvm": "1"}).splitlines() == [
        "ring, PTX: 2 -> 1 bar.sync",
        "the tools are the same",
        f"if that was meant: {ANEW}",
    ]
    others = complaint(off, {"nvidia-nvvm": "1", "numba": "2"}, {"nvidia-nvvm": "3", "numba": "2", "cuda-core": "4"})
    assert "other tools than those that the counts are kept of: cuda-core None -> 4, nvidia-nvvm 1 -> 3" in others.splitlines()


def test_counts_are_kept_of_all_kernels_and_no_other():
    names = [*simt_kernels.KERNELS, *sm80_kernels.COUNTED, *sm90_kernels.KERNELS]
    assert sorted(kernel_counts.kept()["kernels"]) == sorted(names)
    assert len(names) == len(set(names))


def test_builders_of_kernels_are_there():
    """As modules of the package that have a function of this name."""
    kernels = simt_kernels.KERNELS | sm80_kernels.KERNELS | sm90_kernels.KERNELS
    assert len(kernels) > 400
    for builder in {kernel.builder for kernel in kernels.values()}:
        module, _, function = builder.rpartition(".")
        assert callable(getattr(importlib.import_module(f"numba_flash.cuda.{module}"), function)), builder


@pytest.fixture
def ring(tmp_path, monkeypatch) -> compiled.Kernel:
    """The only kernel that there is, of which nothing is kept yet."""
    kernel = compiled.Kernel("ring", ())
    monkeypatch.setattr(kernel_counts, "KEPT", tmp_path / "counts.json")
    kernel_counts.KEPT.write_text('{"tools": {}, "kernels": {"other": {}}}')
    monkeypatch.setattr(sm90_kernels, "KERNELS", {"ring": kernel})
    monkeypatch.setattr(simt_kernels, "KERNELS", {})
    monkeypatch.setattr(sm80_kernels, "COUNTED", {})
    monkeypatch.setattr(compiled, "ptx", lambda kernel: TEXT)
    monkeypatch.setattr(compiled, "machine_text", lambda kernel: WORDS)
    return kernel


def test_the_command_prints_what_is_new_and_keeps_it(ring, monkeypatch, capsys):
    with pytest.raises(AssertionError, match=f"no counts are kept of ring: {ANEW}"):
        kernel_counts.compare("ring", PTX, ring)
    kernel_counts.main()
    assert capsys.readouterr().out.splitlines() == ["ring: counted for the first time", "other: no longer counted"]
    for where in (PTX, MACHINE):
        kernel_counts.compare("ring", where, ring)
    monkeypatch.setattr(compiled, "ptx", lambda kernel: TEXT.replace("fence.proxy", "ret; fence.proxy").replace("bar.sync", "bar.arrive"))
    with pytest.raises(AssertionError, match=r"ring, PTX: 0 -> 1 bar\.arrive\nring, PTX: 1 -> 0 bar\.sync\nthe tools are the same"):
        kernel_counts.compare("ring", PTX, ring)
    kernel_counts.main(["--only", "others"])
    assert capsys.readouterr().out == "", "what is not counted is kept as it was"
    kernel_counts.main(["--only", "^rin"])
    said = ["ring, PTX: 0 -> 1 bar.arrive", "ring, PTX: 1 -> 0 bar.sync", "ring, PTX: 23 -> 24 instructions"]
    assert capsys.readouterr().out.splitlines() == said
    kernel_counts.compare("ring", PTX, ring)
