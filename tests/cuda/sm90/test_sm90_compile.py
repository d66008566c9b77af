"""Every sm90 kernel down to machine code, with no GPU: instructions, registers, memory, tensor maps."""

import re
import shutil
import subprocess
import threading
import time
from functools import cache
from pathlib import Path

import pytest
from support import SIMULATED, named

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")
pytest.importorskip("cuda.core", reason="linking kernels needs cuda-core")

from numba_flash.cuda import compile
from numba_flash.cuda.sm90.prepare_backward import ROW_THREADS
from numba_flash.cuda.sm90.prepare_forward import COMBINE_ROWS
from numba_flash.cuda.sm90.tiles import BACKWARD_TILES, FORWARD_TILES, PART_TILES, SHARED_LIMIT, BackwardTile, Row, Tile, WideTile
from numba_flash.options import PLAIN, Options

H200 = (9, 0)
LENGTHS = Options(q_lengths="int32", kv_lengths="int64", follows=True)
PACKED = Options(q_lengths="int32", kv_lengths="int32", packed=True, follows=True)
SOFTCAP = Options(softcap=1.0)


def first(table: tuple[Row, ...], d: int, dv: int):
    """Tile of long sequences."""
    return next(row.tile for row in table if 2**20 <= row.keys and d <= row.d and dv <= row.dv)


def tile_of(d: int, dv: int) -> Tile:
    return first(FORWARD_TILES["full"], d, dv)


def part_tile_of(d: int) -> Tile:
    return first(PART_TILES, d, d)


# Every tile at the head dimension it was made for; and one of each: dtype, store, options, head dimensions that fill no panel.
KERNELS = {
    **{f"{row.d}-{row.keys}-none": ("bfloat16", row.d, row.dv, True, "none", "map", PLAIN, row.tile) for row in FORWARD_TILES["full"]},
    **{f"{row.d}-{row.keys}-above": ("bfloat16", row.d, row.dv, True, "above", "map", PLAIN, row.tile) for row in FORWARD_TILES["band"]},
    **{f"{d}-both": ("bfloat16", d, d, True, "both", "map", PLAIN, tile_of(d, d)) for d in (64, 128, 256)},
    **{f"{row.d}-parts": ("bfloat16", row.d, row.dv, True, "none", "parts", PLAIN, row.tile) for row in PART_TILES},
    "float16": ("float16", 128, 128, False, "none", "map", PLAIN, tile_of(128, 128)),
    "72, 40": ("bfloat16", 72, 40, True, "above", "map", PLAIN, tile_of(72, 40)),
    "192, 128": ("float16", 192, 128, True, "none", "map", PLAIN, tile_of(192, 128)),
    "lengths": ("bfloat16", 128, 128, True, "above", "map", LENGTHS, tile_of(128, 128)),
    "lengths in parts": ("float16", 128, 128, True, "above", "parts", LENGTHS, part_tile_of(128)),
    "packed": ("bfloat16", 64, 64, True, "above", "words", PACKED, tile_of(64, 64)),
    "packed, 128": ("float16", 128, 128, True, "none", "words", PACKED, tile_of(128, 128)),
    "softcap": ("bfloat16", 128, 128, True, "none", "map", SOFTCAP, tile_of(128, 128)),
    "softcap, 64": ("float16", 64, 64, True, "above", "map", SOFTCAP, tile_of(64, 64)),
}


def backward_tile(d: int, dv: int) -> BackwardTile | WideTile:
    return first(BACKWARD_TILES, d, dv)


# dtype, head dimensions, banded, stored through maps, ordered, options
BACKWARD = {
    "backward 64": ("bfloat16", 64, 64, False, True, True, PLAIN),
    "backward 64, causal": ("float16", 64, 64, True, True, False, PLAIN),
    "backward 128": ("float16", 128, 128, False, True, False, PLAIN),
    "backward 128, in order": ("bfloat16", 128, 128, False, True, True, PLAIN),
    "backward 40, 72": ("bfloat16", 40, 72, False, True, True, PLAIN),
    "backward lengths": ("bfloat16", 128, 128, False, True, True, LENGTHS),
    "backward packed": ("float16", 64, 64, False, False, True, PACKED),
    "backward packed, 128": ("bfloat16", 128, 128, False, False, True, PACKED),
    "backward softcap": ("bfloat16", 128, 128, False, True, True, SOFTCAP),
    "backward 256": ("bfloat16", 256, 256, True, True, False, PLAIN),
    "backward 192, 128": ("float16", 192, 128, False, True, False, PLAIN),
    "backward packed, 136, 256": ("bfloat16", 136, 256, True, False, False, PACKED),
    "backward softcap, 64": ("bfloat16", 64, 64, False, True, True, SOFTCAP),
}
# Bytes of registers that may go to memory: softcap needs more of them than there are; the thread that describes packed items does, too.
SPILLS = {"backward softcap": 60, "backward softcap, 64": 330, "backward packed": 80, "backward packed, 128": 50}
BACKWARD = {name: (*config, backward_tile(*config[1:3])) for name, config in BACKWARD.items()}

# Each main loop, and what changes it most; what is left are further tiles, dtypes and stores.
QUICK = (
    *(f"64-{2**31}-none", "packed", "softcap"),
    *("backward 64, causal", "backward packed, 136, 256"),
)


@cache
def code(name: str) -> bytes:
    start = time.perf_counter()
    builder = "sm90.forward.build" if name in KERNELS else BACKWARD[name][-1].kernel
    intermediate = compile.intermediate(builder, (KERNELS | BACKWARD)[name], H200)
    print(f"{name}: compiled in {time.perf_counter() - start:.1f} s")
    return intermediate


@cache
def linked(name: str) -> tuple[bytes, str]:
    """Machine code, and the linker's log."""
    return compile._link(code(name), H200, verbose=True)


def disassembler() -> str | None:
    """Path of nvdisasm: a wheel's, or a toolkit's."""
    try:
        import nvidia
    except ImportError:
        return shutil.which("nvdisasm")
    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/nvdisasm")]
    return str(found[0]) if found else shutil.which("nvdisasm")


def instructions(cubin: bytes, folder: Path) -> set[str]:
    """Names of the machine instructions, without what follows their first dot."""
    (folder / "kernel.cubin").write_bytes(cubin)
    run = subprocess.run([disassembler(), "-c", folder / "kernel.cubin"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return set(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][A-Z0-9]+)", run.stdout, re.MULTILINE))


@pytest.mark.parametrize("name", named([*KERNELS, *BACKWARD], QUICK))
def test_resources(name):
    """Nothing is spilled or serialised, and the registers that the warp groups ask for are those that the block has been given."""
    _, d, dv, *_, tile = (KERNELS | BACKWARD)[name]
    used = compile._resources(linked(name)[1])
    print(used)
    assert used["stack_bytes"] <= used["spill_bytes"] <= SPILLS.get(name, 0)
    assert used["warnings"] == 0
    assert 0 < used["registers"] <= 65536 // tile.threads
    fewest, most = tile.registers
    assert fewest + tile.consumers * most <= used["registers"] * (tile.consumers + 1), "the consumers would wait for registers forever"
    assert used["shared_bytes"] + tile.layout(d, dv).bytes <= SHARED_LIMIT


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(KERNELS, QUICK))
def test_instructions(name, tmp_path):
    """Tensor cores, the copy engine and register reallocation; no local memory."""
    store = KERNELS[name][5]
    found = instructions(linked(name)[0], tmp_path)
    assert {"HGMMA", "UTMALDG", "USETMAXREG", "SYNCS"} <= found
    assert ("UTMASTG" in found) == (store == "map")
    assert not found & {"STL", "LDL", "HMMA"}


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", named(BACKWARD, QUICK))
def test_instructions_of_the_backward_pass(name, tmp_path):
    """The same, and the reduction that adds up dQ, or the copy of dS; dK and dV through tensor maps or not; claims and flags if ordered."""
    *_, to_map, ordered, _, tile = BACKWARD[name]
    found = instructions(linked(name)[0], tmp_path)
    assert {"HGMMA", "UTMALDG", "UBLKRED" if tile.adds_dq else "UBLKCP", "USETMAXREG", "SYNCS"} <= found
    assert ("UTMASTG" in found) == to_map
    assert found & {"ATOMG", "REDG"} == ({"ATOMG", "REDG"} if ordered else set())
    assert not found & ({"HMMA"} if name in SPILLS else {"STL", "LDL", "HMMA"})


@pytest.mark.full
def test_a_mask_makes_no_difference_to_who_adds_in_turns():
    """Blocks that claim their work need not share it out evenly, so one kernel serves both."""
    dtype, d, dv, banded, *others = BACKWARD["backward 64"]
    with_mask = compile.intermediate("sm90.backward.build", (dtype, d, dv, not banded, *others), H200)
    assert compile.link(with_mask, H200) == compile.link(code("backward 64"), H200)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.full),
        pytest.param(LENGTHS, id="lengths", marks=pytest.mark.full),
        pytest.param(PACKED, id="packed"),
    ],
)
def test_kernels_around_the_backward_pass(options):
    tile = backward_tile(96, 72)
    for builder, config in (
        ("sm90.preprocess.build", ("bfloat16", 72, True, True, options, tile, ROW_THREADS)),
        ("sm90.preprocess.build", ("float16", 72, False, False, options, tile, ROW_THREADS)),
        ("sm90.postprocess.build", ("bfloat16", 96, options, tile)),
    ):
        used = compile.resources(compile.intermediate(builder, config, H200), H200)
        assert used["spill_bytes"] == used["stack_bytes"] == used["warnings"] == 0


@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(("bfloat16", 256, False, True, PLAIN), id="256", marks=pytest.mark.full),
        pytest.param(("float16", 136, True, False, PACKED), id="packed, 136"),
        pytest.param(("bfloat16", 192, True, True, LENGTHS), id="lengths, 192", marks=pytest.mark.full),
    ],
)
def test_the_kernel_that_makes_dq_of_ds(config, tmp_path):
    tile = backward_tile(256, 256)
    intermediate = compile.intermediate("sm90.dq.build", (*config, tile), H200)
    used = compile.resources(intermediate, H200)
    assert used["spill_bytes"] == used["stack_bytes"] == used["warnings"] == 0
    assert used["shared_bytes"] + tile.dq_layout(config[1]).bytes <= SHARED_LIMIT
    found = instructions(compile.link(intermediate, H200), tmp_path)
    assert {"HGMMA", "UTMALDG", "UBLKCP", "USETMAXREG", "SYNCS"} <= found
    assert ("UTMASTG" in found) == config[3]
    assert not found & {"STL", "LDL", "HMMA"}


@pytest.mark.parametrize("name", [pytest.param("lengths in parts", marks=pytest.mark.full), f"64-{2**31}-none"])
def test_tensor_maps_are_passed_by_value(name):
    """The kernel is called "kernel"; its first parameters are 128 bytes each, at multiples of 64: q, k, v, and o if that is stored so."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    maps = 4 if KERNELS[name][5] == "map" else 3
    options = LinkerOptions(arch="sm_90a", link_time_optimization=True, ptx=True)
    text = Linker(ObjectCode.from_ltoir(code(name)), options=options).link("ptx").code.decode()
    assert re.findall(r"\.entry (\w+)", text) == ["kernel"]
    by_value = re.findall(r"\.param \.align 64 \.b8 kernel_param_(\d+)\[128\]", text[text.index(".entry") :].split(")")[0])
    assert by_value == [str(i) for i in range(maps)]
    assert "wgmma.mma_async" in text
    assert "cp.async.bulk.tensor" in text


def test_the_compiler_is_left_as_it_was():
    """The module's parameters are rewritten in passing; compilations of other kernels are not touched."""
    from numba.cuda.cudadrv import nvvm

    before = nvvm.compile_ir
    with compile._tensor_maps_by_value(("maps.0",)):
        assert nvvm.compile_ir is not before
    assert nvvm.compile_ir is before


@pytest.mark.parametrize("write_lse", [False, True])
def test_combining_parts(write_lse):
    text = compile.intermediate("combine.build", ("bfloat16", 128, write_lse, 5, COMBINE_ROWS), H200)
    assert isinstance(text, str)
    assert re.findall(r"\.entry (\w+)", text) == ["kernel"]
    used = compile.resources(text, H200)
    assert used["spill_bytes"] == used["stack_bytes"] == used["warnings"] == 0


def test_a_kernel_compiled_meanwhile_by_another_thread_is_left_alone(monkeypatch):
    """Only the kernel with tensor maps is rewritten, whoever else compiles something at that moment."""
    from numba.cuda.cudadrv import nvvm

    compiled = []
    monkeypatch.setattr(nvvm, "compile_ir", lambda modules, **options: compiled.append(modules))
    original = nvvm.compile_ir
    with compile._tensor_maps_by_value(("maps.0",)):
        assert nvvm.compile_ir is not original
        other = threading.Thread(target=nvvm.compile_ir, args=(["somebody else's"],))
        other.start()
        other.join()
    assert compiled == [["somebody else's"]]
    assert nvvm.compile_ir is original
