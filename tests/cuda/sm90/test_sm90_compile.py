"""Every sm90 kernel down to machine code, with no GPU: instructions, registers, memory, tensor maps."""

import re
import threading
from dataclasses import replace

import pytest
from support import SIMULATED, named

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")
pytest.importorskip("cuda.core", reason="linking kernels needs cuda-core")

import compiled
from compiled import H200, Kernel
from inspections import check_counts_of_machine_code, check_counts_of_ptx, check_entry_point, inspect, of_machine_code, serving
from sm90_kernels import (
    AROUND,
    BACKWARD,
    BACKWARD_OPTIONS,
    BACKWARD_ROUNDING,
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

from numba_flash.cuda.runtime import compile, compiler
from numba_flash.cuda.sm90.backward import walk_backward
from numba_flash.cuda.sm90.config import BackwardConfig
from numba_flash.cuda.sm90.tiles import SHARED_LIMIT, padded

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
SPILLS |= {"dbias sm90 128 mask": 40, "dbias sm90 64": 24, "dbias sm90 64 shares": 24, "dbias sm90 64 lengths": 16}
SPILLS |= dict.fromkeys(["dbias sm90 128", "dbias sm90 64 of keys"], 32)
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


def machine_code(kernel: Kernel) -> list[str]:
    """Its instructions."""
    return compiled.machine_instructions(compiled.machine_text(kernel))


def first_parts(found: list[str]) -> set[str]:
    """Names of instructions without what follows their first dot."""
    return {each.split(".")[0] for each in found}


def count(found: list[str], begins: str) -> int:
    """How many instructions have a name that begins so."""
    return sum(each.startswith(begins) for each in found)


def config_of(kernel: Kernel):
    """What a loop is compiled for."""
    (config,) = kernel.config
    return config


def resources(kernel: Kernel) -> dict[str, int]:
    used = compile.resources(compiled.linked(kernel).log)
    print(used)
    return used


# ---- registers and memory ----------------------------------------------------------------------------------------------------------------


def fits(name: str, kernel: Kernel, shared_bytes: int) -> None:
    """No more is spilled than `SPILLS` allows, nothing is serialised, and the registers that the warp groups ask for are those that the
    block has been given.
    """
    used, tile = resources(kernel), config_of(kernel).tile
    assert used["stack_bytes"] <= used["spill_bytes"] <= SPILLS.get(name, 0)
    assert used["warnings"] == 0
    assert 0 < used["registers"] <= 65536 // tile.threads
    fewest, most = tile.registers
    assert fewest + tile.consumers * most <= used["registers"] * (tile.consumers + 1), "the consumers would wait for registers forever"
    assert used["shared_bytes"] + shared_bytes <= SHARED_LIMIT


def check_resources(name: str, kernel: Kernel) -> None:
    config = config_of(kernel)
    d, dv, tile = config.d, config.dv, config.tile
    fits(name, kernel, tile.layout(d, dv).bytes)


def check_resources_of_float32(name: str, kernel: Kernel) -> None:
    """The same; rings hold both planes."""
    config = config_of(kernel)
    d, dv, tile = config.d, config.dv, config.tile
    width = padded if kernel.builder == "sm90.fp16x2.forward_planes.build" else tile.width
    fits(name, kernel, tile.layout(width(d), width(dv)).bytes)


def check_resources_where_a_bias_is_kept(name: str, kernel: Kernel) -> None:
    """The same, where a tile says all."""
    fits(name, kernel, config_of(kernel).tile.layout().bytes)


def check_resources_around_the_loops(_, kernel: Kernel) -> None:
    """Nothing is spilled."""
    used = resources(kernel)
    assert used["spill_bytes"] == used["stack_bytes"] == used["warnings"] == 0


def check_memory_of_dq(_, kernel: Kernel) -> None:
    config = config_of(kernel)
    d, tile = config.d, config.tile
    assert resources(kernel)["shared_bytes"] + tile.layout(d).bytes <= SHARED_LIMIT


# ---- arguments ---------------------------------------------------------------------------------------------------------------------------


def check_tensor_maps(_, kernel: Kernel) -> None:
    """The first parameters are 128 bytes each, at multiples of 64: q, k, v, and o if that is stored so."""
    maps = 4 if config_of(kernel).store == "map" else 3
    text = compiled.ptx(kernel)
    by_value = re.findall(r"\.param \.align 64 \.b8 kernel_param_(\d+)\[128\]", text[text.index(".entry") :].split(")")[0])
    assert by_value == [str(i) for i in range(maps)]
    assert "wgmma.mma_async" in text
    assert "cp.async.bulk.tensor" in text


# ---- instructions ------------------------------------------------------------------------------------------------------------------------


@of_machine_code
def check_instructions(_, kernel: Kernel) -> None:
    """Tensor cores, the copy engine and register reallocation; no local memory."""
    found = first_parts(machine_code(kernel))
    assert {"HGMMA", "UTMALDG", "USETMAXREG", "SYNCS"} <= found
    assert ("UTMASTG" in found) == (config_of(kernel).store == "map")
    assert not found & {"STL", "LDL", "HMMA"}


@of_machine_code
def check_instructions_with_options(_, kernel: Kernel) -> None:
    """The same; and what belongs to a tile is asked for before the scores are waited for."""
    found = machine_code(kernel)
    names = first_parts(found)
    assert {"HGMMA", "UTMALDG", "USETMAXREG", "SYNCS"} <= names
    assert not names & {"STL", "LDL", "HMMA"}
    config = config_of(kernel)
    options, tile = config.options, config.tile
    wait = next(i for i, each in enumerate(found) if each.startswith("WARPGROUP.DEPBAR"))
    if tile.pair_stages:
        assert count(found, "LDG") < tile.block_n // 8, "of lists alone"
        loads = tile.block_n // 16 if options.bias else tile.block_n // 4
        assert count(found[:wait], "LDSM" if options.bias else "LDS.U16") == loads
    elif options.bias or options.mask:
        assert count(found[:wait], "LDG") >= tile.block_n // 4


@of_machine_code
def check_reads_of_a_kept_bias(_, kernel: Kernel) -> None:
    """Between two products, scores are read four at a time, and nothing else is; of 16 bits, eight."""
    config = config_of(kernel)
    d, tile = config.d, config.tile
    found = machine_code(kernel)
    of_scores = [i for i, each in enumerate(found) if each.startswith(f"HGMMA.64x{tile.block_n}x16")]
    assert len(of_scores) == 2 * -(-d // 16)
    before = found[: of_scores[len(of_scores) // 2]]  # the loop's
    filled = max(i for i, each in enumerate(before) if each == "STS.128")
    assert before[filled:].count("LDS.128") == tile.block_n // (8 if tile.wide else 16)


@of_machine_code
def check_gradients_where_a_bias_is_kept(_, kernel: Kernel) -> None:
    """As many products as there are: of each chunk, and before the loop, S and dP, and in the loop what they are for; of dQ and dbias in
    two loops. Nothing is added to in memory.
    """
    config = config_of(kernel)
    d, dv, tile = config.d, config.dv, config.tile
    found = machine_code(kernel)
    names, steps = first_parts(found), -(-d // 16) - (-dv // 16)
    assert {"HGMMA", "UTMALDG", "USETMAXREG", "SYNCS"} <= names
    assert not names & {"HMMA", "ATOMG", "REDG", "RED"}
    of_keys = kernel.builder == "sm90.resident_bias.dk_dv_resident.build"
    assert ("UBLKCP" in names) == of_keys
    products = 2 * steps + 2 * (tile.queries // 16) if of_keys else 2 * (steps * (tile.chunks + 1) + 4 * tile.chunks)
    assert count(found, "HGMMA") == products


@of_machine_code
def check_gradient_of_a_bias(_, kernel: Kernel) -> None:
    """As many products as there are, of each part S and dP, none begun a part ahead; no sum leaves its registers but to be stored."""
    config = config_of(kernel)
    d, dv, tile = config.d, config.dv, config.tile
    found = machine_code(kernel)
    names = first_parts(found)
    assert {"HGMMA", "UTMALDG", "UBLKCP", "USETMAXREG", "SYNCS"} <= names
    assert not names & {"HMMA", "UTMASTG", "ATOMG", "REDG"}
    assert count(found, "HGMMA") == tile.parts * (-(-d // 16) - (-dv // 16))


@of_machine_code
def check_gradient_of_a_bias_where_queries_stay(_, kernel: Kernel) -> None:
    """S before the loop, then dP, and S of the next step while exponentials are made; bias and gradient by matrices of 8 x 8."""
    config = config_of(kernel)
    d, dv = config.d, config.dv
    found = machine_code(kernel)
    of_s, of_dp = -(-d // 16), -(-dv // 16)
    products = [i for i, each in enumerate(found) if each.startswith("HGMMA")]
    assert len(products) == 2 * of_s + of_dp
    first, last = products[of_s + of_dp], products[-1]
    assert found[first:last].count("MUFU.EX2") > 8
    names = first_parts(found)
    assert {"LDSM", "STSM", "UTMALDG", "UTMASTG", "UBLKCP", "USETMAXREG"} <= names
    assert not names & {"HMMA", "LDG", "STG", "ATOMG", "REDG"}


@of_machine_code
def check_instructions_of_float32(_, kernel: Kernel) -> None:
    """Three products for one of float16, or one if that is accurate enough."""
    config = config_of(kernel)
    d, dv, tile = config.d, config.dv, config.tile
    found = machine_code(kernel)
    products = padded(d) // 16 + tile.block_n // 16 * -(-dv // 64)
    assert count(found, "HGMMA") == products * (3 if tile.planes > 1 else 1)
    names = first_parts(found)
    assert {"UTMALDG", "USETMAXREG", "SYNCS"} <= names
    assert not names & {"STL", "LDL", "HMMA", "UTMASTG"}


@of_machine_code
def check_backward_pass_of_float32(_, kernel: Kernel) -> None:
    config = config_of(kernel)
    d, dv, tile = config.d, config.dv, config.tile
    found = machine_code(kernel)
    width, width_v, last = tile.width(d), tile.width(dv), tile.block_n == 64
    # of S, dP, panels of dV and dK, and dQ, which the first of consumers that share keys makes a tile later, or after the last one
    halves = 3 if last else 1
    steps = (width + width_v + tile.block_m * (-(-width // 64) - (-width_v // 64)) + 64 * halves) // 16
    assert count(found, "HGMMA") == 3 * steps
    names = first_parts(found)
    assert {"UTMALDG", "UBLKRED", "USETMAXREG", "SYNCS"} <= names
    assert "UTMASTG" not in names


def claimed_by(config: BackwardConfig) -> set[str]:
    """What claims work items."""
    return {"ATOMG"} if walk_backward.claims(config.banded, config.ordered, config.options, config.tile) else set()


@of_machine_code
def check_backward_pass(name: str, kernel: Kernel) -> None:
    """The same, and the reduction that adds up dQ, or the copy of dS; dK and dV through tensor maps or not; flags if ordered.

    Items of lists and bands are claimed in any order, too.
    """
    config = config_of(kernel)
    claimed, to_map, ordered, tile = claimed_by(config), config.to_map, config.ordered, config.tile
    found = first_parts(machine_code(kernel))
    assert {"HGMMA", "UTMALDG", "UBLKRED" if tile.adds_dq else "UBLKCP", "USETMAXREG", "SYNCS"} <= found
    assert ("UTMASTG" in found) == to_map
    assert found & {"ATOMG", "REDG"} == claimed | ({"REDG"} if ordered else set())
    assert not found & ({"HMMA"} if name in SPILLS else {"STL", "LDL", "HMMA"})


@of_machine_code
def check_backward_pass_with_options(name: str, kernel: Kernel) -> None:
    """As many products as there are: of a part of a tile S, dP and dV, of the tile dQ and dK; and the same otherwise."""
    config = config_of(kernel)
    d, dv, to_map, ordered, tile = config.d, config.dv, config.to_map, config.ordered, config.tile
    claimed = claimed_by(config)
    found = machine_code(kernel)
    names = first_parts(found)
    assert {"HGMMA", "UTMALDG", "UBLKRED", "USETMAXREG", "SYNCS"} <= names
    assert ("UTMASTG" in names) == to_map
    assert names & {"ATOMG", "REDG"} == claimed | ({"REDG"} if ordered else set())
    assert not names & ({"HMMA"} if name in SPILLS else {"STL", "LDL", "HMMA"})
    of_part = -(-d // 16) + -(-dv // 16) + tile.part // 16
    assert count(found, "HGMMA") == of_part + (tile.block_n + tile.block_m) // 16


@of_machine_code
def check_order_of_the_backward_pass_with_options(_, kernel: Kernel) -> None:
    """P is made before dP is waited for, and what belongs to the next part is asked for between; keys in pairs."""
    config = config_of(kernel)
    vectors, options, tile = config.vectors, config.options, config.tile
    found = machine_code(kernel)
    first = next(i for i, each in enumerate(found) if each.startswith("HGMMA"))
    scores, dp = [i for i, each in enumerate(found) if i > first and each.startswith("WARPGROUP.DEPBAR")][:2]
    assert not count(found[first:scores], "VHMNMX")  # S does not wait for a bias
    between = found[scores:dp]
    assert count(between, "MUFU.EX2") >= tile.part // 2
    if options.mask or (options.bias and not tile.copies_bias):
        within = options.blocks and options.blocks.keys % 2 == 0  # no block ends between two keys
        pairs = tile.part // 4 if all(vectors) or within else tile.part // 2
        assert count(between, "LDG") >= pairs
    else:
        assert not count(between, "LDG")


@of_machine_code
def check_looks_at_a_flag(_, kernel: Kernel) -> None:
    """All are there. One whose result nobody uses would be left out, and nothing would be acquired."""
    looks = re.findall(r"ld\.acquire\.gpu\.global", compiled.ptx(kernel))
    assert len(looks) == count(machine_code(kernel), "LDG.E.STRONG.GPU") == 3


@of_machine_code
def check_instructions_of_dq(_, kernel: Kernel) -> None:
    to_map = config_of(kernel).to_map
    found = first_parts(machine_code(kernel))
    assert {"HGMMA", "UTMALDG", "UBLKCP", "USETMAXREG", "SYNCS"} <= found
    assert ("UTMASTG" in found) == to_map
    assert not found & {"STL", "LDL", "HMMA"}


# What in machine code reads or writes global memory.
REACHES_GLOBAL = re.compile(r"(LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED|REDG)\b|UTMA(LD|ST|RED)G|UBLK")


@of_machine_code
def check_that_it_waits_first(_, kernel: Kernel) -> None:
    """Of kernels that begin early: neither compiler moves anything in front of the wait for the kernels before, nor the leave of the next
    one; and global memory is not read as if it stayed the same all the time.
    """
    found = machine_code(kernel)
    uses = [i for i, each in enumerate(found) if REACHES_GLOBAL.match(each)]
    assert found.index("ACQBULK") < min(found.index("PREEXIT"), *uses)
    assert not any("CONSTANT" in found[i] for i in uses)


# ---- which are made of which kernels -----------------------------------------------------------------------------------------------------

EARLY = [name for name in KERNELS if re.match(r"(pre|post)process($|,| lengths| packed)", name)]
EARLY += [name for name in (*FORWARD, *BACKWARD) if "lists" not in name and "stored" not in name]
# Names of kernels, and what inspects them. `SPILLS` names none where a bias is kept, and none around the loops.
INSPECTIONS = (
    (KERNELS, check_counts_of_ptx, check_counts_of_machine_code),
    (FORWARD, check_resources, check_instructions),
    (FORWARD_OPTIONS, check_resources, check_instructions_with_options),
    (FORWARD_KEPT, check_resources_where_a_bias_is_kept, check_reads_of_a_kept_bias),
    (FORWARD_SPLIT, check_resources_of_float32, check_instructions_of_float32),
    (BACKWARD, check_resources, check_backward_pass),
    (BACKWARD_OPTIONS, check_resources, check_backward_pass_with_options, check_order_of_the_backward_pass_with_options),
    (BACKWARD_SPLIT, check_resources_of_float32, check_backward_pass_of_float32),
    (DBIAS, check_resources, check_gradient_of_a_bias),
    (DBIAS_ROWS, check_resources, check_gradient_of_a_bias_where_queries_stay),
    (DQ_DBIAS_KEPT | DK_DV_KEPT, check_resources_where_a_bias_is_kept, check_gradients_where_a_bias_is_kept),
    (DQ, check_resources_around_the_loops, check_memory_of_dq, check_instructions_of_dq),
    (AROUND | COMBINE, check_resources_around_the_loops, check_entry_point),
    (EARLY, check_that_it_waits_first),
    (BACKWARD_ROUNDING, check_looks_at_a_flag),
    (["lengths in parts", f"64-{2**31}-none"], check_entry_point, check_tensor_maps),
)


def test_resources_of_every_kernel_are_inspected():
    served = [name for names, *made in INSPECTIONS if any("resources" in each.__name__ for each in made) for name in names]
    assert sorted(served) == sorted(KERNELS)


@pytest.mark.parametrize("name", named(KERNELS, QUICK))
def test_kernel(name):
    inspect(name, KERNELS[name], serving(name, INSPECTIONS), SPILLS.get(name))


@pytest.mark.full
def test_a_mask_makes_no_difference_to_who_adds_in_turns():
    """Blocks that claim their work need not share it out evenly, so one kernel serves both."""
    config = BACKWARD["backward 64"]
    with_mask = compiler.intermediate("sm90.backward.backward.build", (replace(config, banded=not config.banded),), H200)
    assert compiler.link(with_mask, H200).cubin == compiler.link(compiled.code(KERNELS["backward 64"]), H200).cubin


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
