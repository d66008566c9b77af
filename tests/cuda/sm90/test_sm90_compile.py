"""Every sm90 kernel down to machine code, with no GPU: instructions, registers, memory, tensor maps."""

import re
import threading

import pytest
from support import SIMULATED, named

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")
pytest.importorskip("cuda.core", reason="linking kernels needs cuda-core")

import compiled
import kernel_counts
from compiled import H200, disassembler
from sm90_kernels import (
    AROUND,
    BACKWARD,
    BACKWARD_OPTIONS,
    BACKWARD_SPLIT,
    COMBINE,
    DBIAS,
    DBIAS_ROWS,
    DK_DV_KEPT,
    DQ,
    DQ_DBIAS_KEPT,
    FORWARD,
    FORWARD_KEPT,
    FORWARD_OPTIONS,
    FORWARD_SPLIT,
    KERNELS,
)

from numba_flash.cuda import compile, compiler
from numba_flash.cuda.sm90 import walk_backward
from numba_flash.cuda.sm90.split_tiles import padded
from numba_flash.cuda.sm90.tiles import SHARED_LIMIT

# Bytes of registers that may go to memory: softcap needs more of them than there are; the thread that describes packed items does, too.
SPILLS = {"backward softcap": 60, "backward packed": 280, "backward packed, 128": 50}
# Threads that move data have fewer where others keep dS, and need more for lists.
SPILLS |= {"backward packed, in any order": 240, "backward packed, 128, in any order": 30}
SPILLS |= {"backward 64 lists": 40, "backward 64 lists, lengths, in any order": 80, "backward 72, 40 lists, lengths": 40}
SPILLS |= {"backward 128 lists": 30, "backward 128 lists, in any order": 80, "backward 128 lists, packed": 40}
# Threads that add to dQ count who comes before, upward, downward and in swings; that which writes down work items works out which swing a
# block belongs to.
SPILLS |= {
    "backward 64": 310,
    "backward softcap, 64": 410,
    "backward 64 relative": 480,
    "backward lengths": 40,
    "backward 128 relative": 10,
}
SPILLS |= dict.fromkeys(["backward 128", "backward 40, 72"], 250)
# The warp that rounds dQ keeps what it needs later in shared memory, and spills little more.
SPILLS |= {"backward 64 rounding": 350, "backward 128 rounding": 280, "backward 72, 40 rounding": 270}
SPILLS["backward 256"] = 20  # one address, before all loops
# a counter, once per step, and of the thread that writes down steps two words per tile of the gradient
SPILLS |= {"dbias sm90 128 mask": 70, **{f"dbias sm90 {name}": 40 for name in ("64", "128", "64 shares", "64 of keys", "64 lengths")}}
SPILLS |= {"backward 128 relative, packed": 80}
SPILLS |= {"backward float32 64": 80, "backward float32 40, 64, packed": 200}  # the former outside of the loop
SPILLS["backward float32 128"] = 180  # addresses
SPILLS |= dict.fromkeys(["dq and dbias, kept", "dq and dbias 24, 16, kept"], 130)  # addresses, a few per head
SPILLS["dk and dv, kept"] = 190  # addresses, of a tile of 96 queries

# The main loops, and what is around them; what is left are further options, tiles, dtypes and stores.
QUICK = (
    f"64-{2**31}-none",
    "preprocess packed",
    "postprocess packed",
    "combine",
)


def instructions(name: str) -> set[str]:
    """Names of the machine instructions, without what follows their first dot."""
    return {each.split(".")[0] for each in compiled.machine_instructions(compiled.machine_text(KERNELS[name]))}


def resources(name: str) -> dict[str, int]:
    return compile.resources(compiled.linked(KERNELS[name]).log)


@pytest.mark.parametrize("name", named(KERNELS, QUICK))
def test_counts_of_ptx(name):
    kernel_counts.compare(name, kernel_counts.PTX, KERNELS[name])


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(KERNELS, QUICK[:1]))
def test_counts_of_machine_code(name):
    kernel_counts.compare(name, kernel_counts.MACHINE, KERNELS[name])


@pytest.mark.parametrize("name", named([*FORWARD, *FORWARD_OPTIONS, *BACKWARD, *BACKWARD_OPTIONS], QUICK))
def test_resources(name):
    """No more is spilled than `SPILLS` allows, nothing is serialised, and the registers that the warp groups ask for are those that the
    block has been given.
    """
    _, d, dv, *_, tile = KERNELS[name].config
    check_resources(name, tile, tile.layout(d, dv).bytes)


@pytest.mark.parametrize("name", named([*FORWARD_SPLIT, *BACKWARD_SPLIT], QUICK))
def test_resources_of_float32(name):
    """The same; rings hold both planes."""
    d, dv, *_, tile = KERNELS[name].config
    width = tile.width if name in BACKWARD_SPLIT else padded
    check_resources(name, tile, tile.layout(width(d), width(dv)).bytes)


@pytest.mark.parametrize("name", named(FORWARD_KEPT, QUICK))
def test_a_kept_bias(name):
    """Nothing is serialised, and nothing spilled, as `SPILLS` names none of these; between two products, scores are read four at a time,
    and nothing else is; of 16 bits, eight.
    """
    tile = FORWARD_KEPT[name][-1]
    check_resources(name, tile, tile.layout().bytes)
    if disassembler() is not None:
        found = compiled.machine_instructions(compiled.machine_text(KERNELS[name]))
        of_scores = [i for i, each in enumerate(found) if each.startswith(f"HGMMA.64x{tile.block_n}x16")]
        assert len(of_scores) == 2 * -(-FORWARD_KEPT[name][1] // 16)
        before = found[: of_scores[len(of_scores) // 2]]  # the loop's
        filled = max(i for i, each in enumerate(before) if each == "STS.128")
        assert before[filled:].count("LDS.128") == tile.block_n // (8 if tile.wide else 16)


@pytest.mark.parametrize("name", named([*DQ_DBIAS_KEPT, *DK_DV_KEPT], QUICK))
def test_resources_of_gradients_where_a_bias_is_kept(name):
    """The same."""
    tile = KERNELS[name].config[-1]
    check_resources(name, tile, tile.layout().bytes)


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named([*DQ_DBIAS_KEPT, *DK_DV_KEPT], QUICK))
def test_instructions_of_gradients_where_a_bias_is_kept(name):
    """As many products as there are: of each chunk, and before the loop, S and dP, and in the loop what they are for; of dQ and dbias in
    two loops. Nothing is added to in memory.
    """
    _, d, dv, *_, tile = KERNELS[name].config
    found = compiled.machine_instructions(compiled.machine_text(KERNELS[name]))
    names, steps = {each.split(".")[0] for each in found}, -(-d // 16) - (-dv // 16)
    assert {"HGMMA", "UTMALDG", "USETMAXREG", "SYNCS"} <= names
    assert not names & {"HMMA", "ATOMG", "REDG", "RED"}
    of_keys = name in DK_DV_KEPT
    assert ("UBLKCP" in names) == of_keys
    products = 2 * steps + 2 * (tile.queries // 16) if of_keys else 2 * (steps * (tile.chunks + 1) + 4 * tile.chunks)
    assert sum(each.startswith("HGMMA") for each in found) == products


# Kernels that may be launched early; what in machine code reads or writes global memory.
EARLY = [name for name in KERNELS if re.match(r"(pre|post)process($|,| lengths| packed)", name)]
EARLY += [name for name in (*FORWARD, *BACKWARD) if "lists" not in name and "stored" not in name]
REACHES_GLOBAL = re.compile(r"(LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED|REDG)\b|UTMA(LD|ST|RED)G|UBLK")


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(EARLY, QUICK))
def test_kernels_that_begin_early_wait_first(name):
    """Neither compiler moves anything in front of the wait for the kernels before, nor the leave of the next one; and global memory is not
    read as if it stayed the same all the time.
    """
    found = compiled.machine_instructions(compiled.machine_text(KERNELS[name]))
    uses = [i for i, each in enumerate(found) if REACHES_GLOBAL.match(each)]
    assert found.index("ACQBULK") < min(found.index("PREEXIT"), *uses)
    assert not any("CONSTANT" in found[i] for i in uses)


def check_resources(name, tile, shared_bytes):
    used = resources(name)
    print(used)
    assert used["stack_bytes"] <= used["spill_bytes"] <= SPILLS.get(name, 0)
    assert used["warnings"] == 0
    assert 0 < used["registers"] <= 65536 // tile.threads
    fewest, most = tile.registers
    assert fewest + tile.consumers * most <= used["registers"] * (tile.consumers + 1), "the consumers would wait for registers forever"
    assert used["shared_bytes"] + shared_bytes <= SHARED_LIMIT


@pytest.mark.parametrize("name", named([*DBIAS, *DBIAS_ROWS], QUICK))
def test_resources_of_the_gradient_of_a_bias(name):
    """The same."""
    _, d, dv, *_, tile = KERNELS[name].config
    check_resources(name, tile, tile.layout(d, dv).bytes)


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(DBIAS, QUICK))
def test_instructions_of_the_gradient_of_a_bias(name):
    """As many products as there are, of each part S and dP; no sum leaves its registers but to be stored."""
    _, d, dv, *_, tile = DBIAS[name]
    found = compiled.machine_instructions(compiled.machine_text(KERNELS[name]))
    names = {each.split(".")[0] for each in found}
    assert {"HGMMA", "UTMALDG", "UBLKCP", "USETMAXREG", "SYNCS"} <= names
    assert not names & {"HMMA", "UTMASTG", "ATOMG", "REDG"}
    assert sum(each.startswith("HGMMA") for each in found) == tile.parts * (-(-d // 16) - (-dv // 16))


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(DBIAS_ROWS, QUICK))
def test_instructions_where_queries_stay(name):
    """S before the loop, then dP, and S of the next step while exponentials are made; bias and gradient by matrices of 8 x 8."""
    _, d, dv, *_ = DBIAS_ROWS[name]
    found = compiled.machine_instructions(compiled.machine_text(KERNELS[name]))
    of_s, of_dp = -(-d // 16), -(-dv // 16)
    products = [i for i, each in enumerate(found) if each.startswith("HGMMA")]
    assert len(products) == 2 * of_s + of_dp
    first, last = products[of_s + of_dp], products[-1]
    assert found[first:last].count("MUFU.EX2") > 8
    names = {each.split(".")[0] for each in found}
    assert {"LDSM", "STSM", "UTMALDG", "UTMASTG", "UBLKCP", "USETMAXREG"} <= names
    assert not names & {"HMMA", "LDG", "STG", "ATOMG", "REDG"}


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(FORWARD_SPLIT, QUICK))
def test_instructions_of_float32(name):
    """Three products for one of float16, or one if that is accurate enough."""
    d, dv, *_, tile = KERNELS[name].config
    found = compiled.machine_instructions(compiled.machine_text(KERNELS[name]))
    products = padded(d) // 16 + tile.block_n // 16 * -(-dv // 64)
    assert sum(each.startswith("HGMMA") for each in found) == products * (3 if tile.planes > 1 else 1)
    names = {each.split(".")[0] for each in found}
    assert {"UTMALDG", "USETMAXREG", "SYNCS"} <= names
    assert not names & {"STL", "LDL", "HMMA", "UTMASTG"}


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(BACKWARD_SPLIT, QUICK))
def test_instructions_of_the_backward_pass_of_float32(name):
    d, dv, *_, tile = KERNELS[name].config
    found = compiled.machine_instructions(compiled.machine_text(KERNELS[name]))
    width, width_v, last = tile.width(d), tile.width(dv), tile.block_n == 64
    # of S, dP, panels of dV and dK, and dQ, which the first of consumers that share keys makes a tile later, or after the last one
    halves = 3 if last else 1
    steps = (width + width_v + tile.block_m * (-(-width // 64) - (-width_v // 64)) + 64 * halves) // 16
    assert sum(each.startswith("HGMMA") for each in found) == 3 * steps
    names = {each.split(".")[0] for each in found}
    assert {"UTMALDG", "UBLKRED", "USETMAXREG", "SYNCS"} <= names
    assert "UTMASTG" not in names


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(FORWARD, QUICK))
def test_instructions(name):
    """Tensor cores, the copy engine and register reallocation; no local memory."""
    store = FORWARD[name][5]
    found = instructions(name)
    assert {"HGMMA", "UTMALDG", "USETMAXREG", "SYNCS"} <= found
    assert ("UTMASTG" in found) == (store == "map")
    assert not found & {"STL", "LDL", "HMMA"}


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(FORWARD_OPTIONS, QUICK))
def test_instructions_with_options(name):
    """The same; and what belongs to a tile is asked for before the scores are waited for."""
    found = compiled.machine_instructions(compiled.machine_text(KERNELS[name]))
    names = {each.split(".")[0] for each in found}
    assert {"HGMMA", "UTMALDG", "USETMAXREG", "SYNCS"} <= names
    assert not names & {"STL", "LDL", "HMMA"}
    options, tile = FORWARD_OPTIONS[name][7], FORWARD_OPTIONS[name][-1]
    wait = next(i for i, each in enumerate(found) if each.startswith("WARPGROUP.DEPBAR"))
    if tile.pair_stages:
        assert sum(each.startswith("LDG") for each in found) < tile.block_n // 8, "of lists alone"
        loads = tile.block_n // 16 if options.bias else tile.block_n // 4
        assert sum(each.startswith("LDSM" if options.bias else "LDS.U16") for each in found[:wait]) == loads
    elif options.bias or options.mask:
        assert sum(each.startswith("LDG") for each in found[:wait]) >= tile.block_n // 4


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(BACKWARD, QUICK))
def test_instructions_of_the_backward_pass(name):
    """The same, and the reduction that adds up dQ, or the copy of dS; dK and dV through tensor maps or not; flags if ordered.

    Items of lists and bands are claimed in any order, too.
    """
    *_, banded, to_map, ordered, options, tile = BACKWARD[name]
    claimed = {"ATOMG"} if walk_backward.claims(banded, ordered, options, tile) else set()
    found = instructions(name)
    assert {"HGMMA", "UTMALDG", "UBLKRED" if tile.adds_dq else "UBLKCP", "USETMAXREG", "SYNCS"} <= found
    assert ("UTMASTG" in found) == to_map
    assert found & {"ATOMG", "REDG"} == claimed | ({"REDG"} if ordered else set())
    assert not found & ({"HMMA"} if name in SPILLS else {"STL", "LDL", "HMMA"})


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(BACKWARD_OPTIONS, QUICK))
def test_instructions_of_the_backward_pass_with_options(name):
    """As many products as there are: of a part of a tile S, dP and dV, of the tile dQ and dK. P is made before dP is waited for, and what
    belongs to the next part is asked for between; keys in pairs.
    """
    _, d, dv, banded, to_map, ordered, vectors, options, tile = BACKWARD_OPTIONS[name]
    claimed = {"ATOMG"} if walk_backward.claims(banded, ordered, options, tile) else set()
    found = compiled.machine_instructions(compiled.machine_text(KERNELS[name]))
    names = {each.split(".")[0] for each in found}
    assert {"HGMMA", "UTMALDG", "UBLKRED", "USETMAXREG", "SYNCS"} <= names
    assert ("UTMASTG" in names) == to_map
    assert names & {"ATOMG", "REDG"} == claimed | ({"REDG"} if ordered else set())
    assert not names & ({"HMMA"} if name in SPILLS else {"STL", "LDL", "HMMA"})
    of_part = -(-d // 16) + -(-dv // 16) + tile.part // 16
    assert sum(each.startswith("HGMMA") for each in found) == of_part + (tile.block_n + tile.block_m) // 16
    first = next(i for i, each in enumerate(found) if each.startswith("HGMMA"))
    scores, dp = [i for i, each in enumerate(found) if i > first and each.startswith("WARPGROUP.DEPBAR")][:2]
    assert not any(each.startswith("VHMNMX") for each in found[first:scores])  # S does not wait for a bias
    between = found[scores:dp]
    assert sum(each.startswith("MUFU.EX2") for each in between) >= tile.part // 2
    if options.mask or (options.bias and not tile.copies_bias):
        within = options.blocks and options.blocks.keys % 2 == 0  # no block ends between two keys
        pairs = tile.part // 4 if all(vectors) or within else tile.part // 2
        assert sum(each.startswith("LDG") for each in between) >= pairs
    else:
        assert not any(each.startswith("LDG") for each in between)


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named([name for name in BACKWARD if "rounding" in name], QUICK))
def test_every_look_at_a_flag_is_there(name):
    """One whose result nobody uses would be left out, and nothing would be acquired."""
    looks = re.findall(r"ld\.acquire\.gpu\.global", compiled.ptx(KERNELS[name]))
    found = compiled.machine_instructions(compiled.machine_text(KERNELS[name]))
    assert len(looks) == sum(each.startswith("LDG.E.STRONG.GPU") for each in found) == 3


@pytest.mark.full
def test_a_mask_makes_no_difference_to_who_adds_in_turns():
    """Blocks that claim their work need not share it out evenly, so one kernel serves both."""
    dtype, d, dv, banded, *others = BACKWARD["backward 64"]
    with_mask = compiler.intermediate("sm90.backward.build", (dtype, d, dv, not banded, *others), H200)
    assert compiler.link(with_mask, H200).cubin == compiler.link(compiled.code(KERNELS["backward 64"]), H200).cubin


@pytest.mark.parametrize("name", named([*AROUND, *COMBINE], QUICK))
def test_kernels_around_the_loops(name):
    assert re.findall(r"\.entry (\w+)", compiled.ptx(KERNELS[name])) == ["kernel"]
    used = resources(name)
    assert used["spill_bytes"] == used["stack_bytes"] == used["warnings"] == 0


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(DQ, QUICK))
def test_the_kernel_that_makes_dq_of_ds(name):
    _, d, _, to_map, _, tile = DQ[name]
    used = resources(name)
    assert used["spill_bytes"] == used["stack_bytes"] == used["warnings"] == 0
    assert used["shared_bytes"] + tile.dq_layout(d).bytes <= SHARED_LIMIT
    found = instructions(name)
    assert {"HGMMA", "UTMALDG", "UBLKCP", "USETMAXREG", "SYNCS"} <= found
    assert ("UTMASTG" in found) == to_map
    assert not found & {"STL", "LDL", "HMMA"}


@pytest.mark.parametrize("name", [pytest.param("lengths in parts", marks=pytest.mark.full), f"64-{2**31}-none"])
def test_tensor_maps_are_passed_by_value(name):
    """The kernel is called "kernel"; its first parameters are 128 bytes each, at multiples of 64: q, k, v, and o if that is stored so."""
    maps = 4 if FORWARD[name][5] == "map" else 3
    text = compiled.ptx(KERNELS[name])
    assert re.findall(r"\.entry (\w+)", text) == ["kernel"]
    by_value = re.findall(r"\.param \.align 64 \.b8 kernel_param_(\d+)\[128\]", text[text.index(".entry") :].split(")")[0])
    assert by_value == [str(i) for i in range(maps)]
    assert "wgmma.mma_async" in text
    assert "cp.async.bulk.tensor" in text


def test_the_compiler_is_left_as_it_was():
    """The module's parameters are rewritten in passing; compilations of other kernels are not touched."""
    from numba.cuda.cudadrv import nvvm

    before = nvvm.compile_ir
    with compiler._tensor_maps_by_value(("maps.0",)):
        assert nvvm.compile_ir is not before
    assert nvvm.compile_ir is before


def test_a_kernel_compiled_meanwhile_by_another_thread_is_left_alone(monkeypatch):
    """Only the kernel with tensor maps is rewritten, whoever else compiles something at that moment."""
    from numba.cuda.cudadrv import nvvm

    compiled = []
    monkeypatch.setattr(nvvm, "compile_ir", lambda modules, **options: compiled.append(modules))
    original = nvvm.compile_ir
    with compiler._tensor_maps_by_value(("maps.0",)):
        assert nvvm.compile_ir is not original
        other = threading.Thread(target=nvvm.compile_ir, args=(["somebody else's"],))
        other.start()
        other.join()
    assert compiled == [["somebody else's"]]
    assert nvvm.compile_ir is original
