"""Every sm80 kernel down to machine code, with no GPU, for the generations that it serves: instructions, registers, memory."""

import re
from dataclasses import replace

import pytest
from support import SIMULATED, named

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")
pytest.importorskip("cuda.core", reason="linking kernels needs cuda-core")

import compiled
import kernel_counts
from compiled import SHARED_LIMIT, Kernel
from inspections import check_counts_of_machine_code, check_counts_of_ptx, inspect, of_machine_code, serving
from sm80_kernels import CASES, COUNTED, KERNELS, LAUNCHES, launches

from numba_flash.arguments.options import PLAIN
from numba_flash.cuda.runtime import compile
from numba_flash.cuda.sm80.tiles import padded

# Bytes of registers that may go to memory, of kernels whose names begin like this or, after "*", hold it, or, after "=", are it.
SPILLS = {
    "*everything": 300,  # softcap, score_mod, bias, mask and dropout in one call
    "sm80 forward 128": 170,  # outside the products; 1 % faster than 32 keys at a time without any
    "sm80 forward, any strides": 140,  # the same tile
    "sm80 forward in parts": 140,
    "sm80 forward float32 32": 200,  # four blocks of a multiprocessor, 1 % faster than three
    "sm80 backward float32 32 for": 200,  # 6 % faster than half the keys without any
    # The fastest of those that were timed on an H200; with options none was.
    "sm80 forward float32 64": 220,
    "sm80 forward float32 128": 260,
    "sm80 forward float32 128 everything": 400,
    "sm80 forward float32 256": 520,
    "sm80 backward float32 32 bias": 130,  # 16 % faster than two blocks of a multiprocessor without any
    "sm80 backward float32 32, short heads": 130,  # outside the products
    "sm80 backward float32 64 everything": 360,
    "=sm80 backward float32 64 everything for 8.0: dbias": 390,  # neither of these two was timed
    "=sm80 backward float32 128 everything for 9.0: dbias": 520,
    "sm80 backward float32 64": 300,
    "sm80 backward float32 100": 360,
    "sm80 backward float32 128": 480,
    "sm80 backward float64 128 for 9.0": 8,  # one number that a thread makes before the loop
    "sm80 forward 32 for 9.0": 40,  # 8 % faster than two blocks of a multiprocessor without any
    "sm80 forward 32 for 10.0": 40,  # the same tile
    "sm80 forward 256, pages of 16, 200 rows for 8.0": 480,  # where a key is takes registers that its tile does not leave; not timed
    "sm80 forward 256 for 7.5": 80,  # no smaller tile is left
    "sm80 forward 256 for 9.0": 20,  # one number, read once for a tile
    "sm80 forward 256 for 10.0": 20,  # the same tile
    "sm80 backward 64 for 8.0": 20,  # sums of dP begin with -delta; 0 for 9.0
    "=sm80 backward": 20,  # the same in bfloat16
    "sm80 backward 64 lengths": 8,  # likewise
    "sm80 backward 64 blocks": 8,  # likewise
    "sm80 backward 64 small softcap": 16,  # one number, outside of the loops
    "sm80 backward 64 for 12.0": 90,  # the same text does not for 8.6 and 8.9
    "sm80 backward 256 for": 40,
    "sm80 backward 128 for": 60,
    "sm80 backward 128, in any order": 40,
    # with as many blocks as 64 registers leave room for; not timed with fewer
    "=sm80 backward: preprocess": 90,
    "=sm80 backward 64 lengths: preprocess": 110,
    # outside the products; not timed without
    "sm80 backward 32, 384 keys, dq with bias gradient": 230,
    # 3 to 9 % faster than half the scores at a time
    "sm80 backward 64 bias of float32": 190,
    "sm80 backward 64 mask": 40,
    "sm80 backward 64 blocks that do not fit": 160,  # in tiles at the edges of blocks alone
    "sm80 backward 128 blocks": 40,
    "sm80 backward 128 dropout": 100,
}
MAIN = [name for name, kernel in KERNELS.items() if re.fullmatch(r"sm80\.(forward|backward)\w*\.build", kernel.builder)]
REGISTERS = 65536  # of a multiprocessor


def may_spill(name: str) -> int:
    """How many bytes of registers of a kernel may go to memory."""
    matches = lambda part: {"*": part[1:] in name, "=": part[1:] == name}.get(part[0], name.startswith(part))
    return max((n for part, n in SPILLS.items() if matches(part)), default=0)


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_prepared(name):
    """Or left out, with the tier's sentence."""
    try:
        assert launches(name)
    except NotImplementedError as error:
        pytest.skip(str(error))


def check_resources(name: str, kernel: Kernel) -> None:
    """No more is spilled than `SPILLS` allows, no array lies in local memory, and as many blocks have room as the tile says."""
    launch = LAUNCHES[name]
    assert ".local" not in compiled.ptx(kernel)
    used = compile.resources(compiled.linked(kernel).log)
    print(used)
    assert used["stack_bytes"] <= used["spill_bytes"] <= may_spill(name)
    assert used["warnings"] == 0
    last = kernel.config[-1]
    blocks = getattr(getattr(last, "tile", last), "min_blocks", 1)
    assert 0 < used["registers"] * launch.threads * blocks <= REGISTERS
    assert used["shared_bytes"] + launch.shared_bytes <= SHARED_LIMIT[kernel.capability]


def check_instructions_of_float64(_, kernel: Kernel) -> None:
    """As many products as there are to make, as large as the generation has them; copies that go on."""
    found = compiled.ptx_instructions(compiled.ptx(kernel))
    (config,) = kernel.config
    shape, tile = config.shape, config.tile
    rows, terms = (16, 16) if kernel.capability >= (9, 0) else (8, 4)
    if kernel.builder == "sm80.forward.forward_float64.build":
        warps, sizes = tile.warps, [tile.block_m * tile.block_n * each for each in shape[:2]]
    else:
        warps, d, dv = tile.warps, tile.padded(shape.head_dim), tile.padded(shape.head_dim_v)
        sizes = [tile.block_m * tile.block_n * each for each in (d, dv, d, dv, d)]
    products = f"mma.sync.aligned.m{rows}n8k{terms}.row.col.f64.f64.f64.f64"
    assert {each for each in found if "mma" in each} == {products}
    assert found.count(products) == sum(sizes) // (warps * rows * 8 * terms)
    assert f"cp.async.{'cg' if shape.asynchronous else 'ca'}.shared.global" in found


@of_machine_code
def check_machine_code_of_float64(name: str, kernel: Kernel) -> None:
    """Nothing is moved between products."""
    machine = {each.split(".")[0] for each in compiled.machine_instructions(compiled.machine_text(kernel))}
    assert {"DMMA", "LDGSTS"} <= machine
    assert may_spill(name) or not machine & {"STL", "LDL"}


def copies(found: list[str]) -> int:
    """How many of these instructions copy to shared memory while others run."""
    return sum(each.startswith("cp.async.cg.shared.global") for each in found)


def check_instructions(_, kernel: Kernel) -> None:
    """Products as wide as the generation has them, of the inputs' dtype; ldmatrix, and cp.async where there is that."""
    found = compiled.ptx_instructions(compiled.ptx(kernel))
    (config,) = kernel.config
    dtype, shape, tile = config.dtype, config.shape, config.tile
    short, depth = "bf16" if dtype == "bfloat16" else "f16", 8 if kernel.capability < (8, 0) else 16
    products = {each for each in found if "mma" in each}
    count = sum("mma" in each for each in found)
    if dtype == "float32" and kernel.builder == "sm80.forward.forward.build":  # three for one: all but low times low
        columns = padded(shape.head_dim) + padded(shape.head_dim_v)
        assert count == 3 * tile.m_tiles * tile.block_n * columns // (8 * 16)
    assert dtype != "float32" or count % 3 == 0
    assert products == {f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{short}.{short}.f32"}
    assert any(each.startswith("ldmatrix.sync.aligned.m8n8.x4.trans") for each in found)
    tiles = copies(found) > 0
    whole = kernel.builder.startswith("sm80.backward.backward")  # lse and delta are, in any case
    assert tiles == (shape.asynchronous or (whole and depth == 16))
    assert not (tiles and depth == 8)


@of_machine_code
def check_machine_code(name: str, kernel: Kernel) -> None:
    """The same; a copy each, not one for rows that are there and one for zeros."""
    made = copies(compiled.ptx_instructions(compiled.ptx(kernel)))
    machine = [each.split(".")[0] for each in compiled.machine_instructions(compiled.machine_text(kernel))]
    assert {"HMMA", "LDSM"} <= {*machine}
    assert may_spill(name) or not {*machine} & {"STL", "LDL"}
    assert ("LDGSTS" in machine) == (made > 0)
    # the assembler may unroll the loop of several words of a table
    assert machine.count("LDGSTS") < 2 * made or made == 0 or "pages of 1," in name


def check_reads_of_a_table(_, kernel: Kernel) -> None:
    """A table of pages is read once for rows of one page. Of 16 rows of a thread in a warp's 32 keys of a tile, before the loop and in it:
    once for K and V, if there are few words; else four at a time, for each.
    """
    (config,) = kernel.config
    page = config.options.paged.size
    text = compiled.ptx(kernel)
    assert text.count("ld.global.nc.b32") == {1: 16, 16: 4, 256: 2}[page]
    assert text.count("cp.async.cg") >= 4 * (4 if page == 1 else 16)


# Names of kernels, and what inspects them.
INSPECTIONS = (
    (KERNELS, check_resources),
    ([name for name in MAIN if KERNELS[name].config[0].dtype == "float64"], check_instructions_of_float64, check_machine_code_of_float64),
    ([name for name in MAIN if KERNELS[name].config[0].dtype != "float64"], check_instructions, check_machine_code),
    ([f"sm80 forward 128, pages of {page}, 16 rows for 9.0" for page in (1, 16, 256)], check_reads_of_a_table),
    (COUNTED, check_counts_of_ptx, check_counts_of_machine_code),
)


@pytest.mark.parametrize("name", named(KERNELS, ()))
def test_kernel(name):
    launch = LAUNCHES[name]
    inspect(name, KERNELS[name], serving(name, INSPECTIONS), may_spill(name), launch.threads, launch.shared_bytes)


LIST_LOADS = 6  # of a list: how long it is, the first tile, and the next


@pytest.mark.parametrize("name", named(("sm80 forward 64 blocks", "sm80 forward 128 blocks"), ()))
def test_a_mask_of_blocks_is_lists_alone(name):
    """Where tiles lie within blocks, kernels are those of plain attention but for a list: no mask, no number of the options."""
    kernel = KERNELS[name]
    (config,) = kernel.config
    assert config.options == replace(PLAIN, block_sparse=True)
    plain = kernel._replace(config=(replace(config, options=PLAIN),))
    with_list, without = (kernel_counts.counts(each, kernel_counts.PTX) for each in (kernel, plain))
    loads = lambda found: sum(n for what, n in found.items() if what.startswith("ld.global"))
    assert 0 < loads(with_list) - loads(without) <= LIST_LOADS
    same = lambda found: {what: n for what, n in found.items() if not what.startswith(("ld.", "parameters", kernel_counts.ALL))}
    assert same(with_list) == same(without)
    assert with_list[kernel_counts.ALL] < 1.05 * without[kernel_counts.ALL]
    of_list, of_none = (compile.resources(compiled.linked(each).log) for each in (kernel, plain))
    print(of_list, of_none)
    assert of_list["registers"] <= of_none["registers"] + 2  # what the assembler makes of it
