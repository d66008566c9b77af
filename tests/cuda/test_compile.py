"""Every simt kernel down to machine code, with no GPU: instructions, memory, registers, architectures, and the cache of cubins."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support import SIMULATED, named

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")
pytest.importorskip("cuda.core", reason="linking kernels needs cuda-core")

import compiled
import evidence
import kernel_counts
from compiled import H200, Kernel, shared_bytes
from inspections import check_counts_of_machine_code, check_counts_of_ptx, check_entry_point, inspect, serving
from numba import njit
from simt_kernels import CHOSEN, KERNELS, kernel, name_of

import numba_flash
from numba_flash.arguments.options import Generator, Options
from numba_flash.arguments.pages import Pages
from numba_flash.cuda.runtime import compile, compiler, numpy_gaps
from numba_flash.cuda.simt import tier as simt
from numba_flash.files import fingerprint
from numba_flash.scoremod.functions import ScoreMod

ARCHITECTURES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]
STATIC_SHARED_LIMIT = 48 * 1024
SPILL_LIMIT = 1024  # bytes per thread: the largest that the measurements beside simt.TILES found to pay

# Two accumulators; what is left are further kernels, tiles and dtypes.
QUICK = ("forward-float32-64-64", "delta-bfloat16-64-64", "delta-float64-64-64")
NAMED = {name_of(chosen): chosen for chosen in CHOSEN}


def check_instructions(name: str, kernel: Kernel) -> None:
    """Of the accumulators' precision, and nothing in local memory; for the products several numbers are read at once."""
    text = compiled.ptx(kernel)
    which, dtype, *_ = NAMED[name]
    assert ".local" not in text
    assert "__local_depot" not in text
    number = "f64" if dtype == "float64" else "f32"
    assert f"fma.rn.{number}" in text
    if dtype != "float64":
        assert ".f64" not in text.split("bar.sync")[1], "double precision in the loop of a kernel that accumulates in float32"
    if which != "delta":
        single = "ld.shared.v4.b32" if which == "lanes" else "ld.shared.v4.f32"
        assert ("ld.shared.v2.f64" if dtype == "float64" else single) in text
        assert f"ex2.approx.{number}" in text or dtype == "float64"


def check_resources(name: str, kernel: Kernel) -> None:
    """Registers, what is spilled, and shared memory, before and after the assembler."""
    shared = shared_bytes(compiled.ptx(kernel))
    assert shared <= STATIC_SHARED_LIMIT
    assert (shared == 0) == (NAMED[name][0] == "lanes"), "what its tile says is all that it has"
    used = compile.resources(compiled.linked(kernel).log)
    print(used)
    assert 0 < used["registers"] <= 255
    assert used["stack_bytes"] <= SPILL_LIMIT
    assert used["spill_bytes"] == 0 or used["stack_bytes"] > 0
    assert 0 <= used["shared_bytes"] - shared <= 1024  # one kilobyte per block is the system's, and counted


def check_arguments(_, kernel: Kernel) -> None:
    """None is for options."""
    arrays, scalars = 4 * (5 + 2 * 5) + (5 + 2 * 4), 3
    assert len(re.findall(r"\.param ", compiled.ptx(kernel))) == arrays + scalars


# Names of kernels, and what inspects them. The counts say that an option that is off costs no parameter, no load, no operation more than
# plain attention had; what compilers may choose, addresses, within a tolerance.
INSPECTIONS = (
    (KERNELS, check_entry_point, check_instructions, check_resources, check_counts_of_ptx, check_counts_of_machine_code),
    (["forward-float32-64-64"], check_arguments),
)


@pytest.mark.parametrize("name", named(KERNELS, QUICK))
def test_kernel(name):
    inspect(name, KERNELS[name], serving(name, INSPECTIONS))


@pytest.mark.full
@pytest.mark.parametrize("name", ["delta", "dkdv", "dq"])
def test_a_block_that_takes_several_items_meets_after_each(name):
    """Its threads share memory that the next item overwrites: one barrier more than is counted where a block has one item."""
    of_one = kernel_counts.kept()["kernels"][name_of((name, "float32", 64, 64))]["PTX"]["bar.sync"]
    evidence.uses(of_one)
    alone = kernel(name, "float32", 64, 64)
    of_several = alone._replace(config=(*alone.config, True))  # those heads that another tier leaves
    assert compiled.ptx(of_several).count("bar.sync") == of_one + 1


PRODUCTS = [("forward", 64), ("forward", 128), ("dkdv", 64), ("dq", 64), ("dq", 128)]


@pytest.mark.parametrize("capability", named([(8, 0), (9, 0), (10, 0)], []))
@pytest.mark.parametrize(("name", "d"), [PRODUCTS[0], *(pytest.param(*each, marks=pytest.mark.full) for each in PRODUCTS[1:])])
def test_float64_is_multiplied_on_tensor_cores(name, d, capability):
    """With all that it keeps in registers; what spills belongs to tiles that the band cuts, whose products have other loops."""
    chosen = kernel(name, "float64", d, d)
    tile = simt.tile_for(name, "float64", d, capability)
    text = compiler.intermediate(chosen.builder, (*chosen.config[:-1], tile), capability)
    shape = "m8n8k4" if capability < (9, 0) else "m16n8k8"
    assert f"mma.sync.aligned.{shape}.row.col.f64.f64.f64.f64" in text
    assert "__local_depot" not in text
    assert 0 < shared_bytes(text) <= STATIC_SHARED_LIMIT
    assert compile.resources(compiler.link(text, capability).log)["stack_bytes"] <= SPILL_LIMIT


@pytest.mark.parametrize("capability", [(7, 5), (8, 6), (8, 9), (12, 0)])
def test_float64_is_multiplied_elsewhere_where_tensor_cores_do_not(capability):
    for name in ("forward", "dkdv", "dq"):
        assert simt.tile_for(name, "float64", 64, capability) == simt.tile_for(name, "float64", 64)
        for dtype in ("float16", "bfloat16", "float32"):
            assert not simt.tile_for(name, dtype, 64, (9, 0)).product
        assert not simt.tile_for(name, "float64", 256, (9, 0)).product


# ---- options ---------------------------------------------------------------------------------------------------------------------------


ALIBI = ScoreMod.bind(numba_flash.alibi([0.5, 0.25]), None, "float32", 2)
OPTIONS = {
    "bias": Options(bias="float32"),
    "mask": Options(mask=True),
    "lengths": Options(q_lengths="int32", kv_lengths="uint8", follows=True),
    "packed": Options(q_lengths="int32", kv_lengths="int64", packed=True, follows=True),
    "pages": Options(kv_lengths="int32", follows=True, paged=Pages(48, "int64")),
    "softcap": Options(softcap=1.0),
    "dropout": Options(dropout=0.5),
    "score_mod": Options(score_mod=ALIBI),
    "all": Options(
        softcap=1.0, score_mod=ALIBI, bias="bfloat16", mask=True, q_lengths="int8", kv_lengths="uint64", follows=True, dropout=0.5
    ),
}


WITH_OPTIONS = [*(("forward", option) for option in OPTIONS), ("dkdv", "packed"), ("dkdv", "all"), ("dq", "all"), ("dbias", "all")]


@pytest.mark.full
@pytest.mark.parametrize(("name", "option"), WITH_OPTIONS)
def test_options_stay_in_registers_and_shared_memory(name, option):
    text = compiler.intermediate(*kernel(name, "bfloat16" if option == "all" else "float32", 64, 64, options=OPTIONS[option]))
    assert "__local_depot" not in text
    assert not re.search(r"\.local\s", text)
    assert shared_bytes(text) <= STATIC_SHARED_LIMIT
    used = compile.resources(compiler.link(text, H200).log)
    print(used)
    assert used["stack_bytes"] <= SPILL_LIMIT


@pytest.mark.full
@pytest.mark.parametrize("size", [100, 20_000])
def test_arrays_that_a_function_captures(size):
    """They lie in global memory: a kernel with more than 64 KiB of them in the constant one would not link."""
    table = np.zeros(size, np.float32)
    score_mod = ScoreMod.bind(lambda score, b, h, i, j: score + table[j], None, "float32", 2)
    text = compiler.intermediate(*kernel("forward", "float32", 64, 64, options=Options(score_mod=score_mod)))
    assert re.search(rf"\.global .*\[{table.nbytes}\]", text)
    assert ".const" not in text
    assert compiler.link(text, H200).cubin[:4] == b"\x7fELF"


def test_all_arrays_of_a_kernel_lie_in_global_memory():
    """However many there are, and however they are read."""
    text = """
.const .align 4 .b8 a[8];
.const .align 8 .b8 b[8] = {0, 0, 128, 63};
mov.u64 %rd1, a;
cvta.const.u64 %rd2, %rd1;
ld.const.f32 %f1, [b+4];
ld.const.v2.f32 {%f2, %f3}, [b];
"""
    loads = text.replace("ld.const", "ld.global.nc")
    assert compiler._constants_in_global_memory(text) == loads.replace(".const", ".global")


@pytest.mark.full
def test_functions_of_a_module_that_a_function_calls():
    """The copy of a module that stands in for it, and of a function that Numba compiled for the CPU with another constant."""
    module = types.ModuleType("settings")
    module.FACTOR, module.squash = 3.25, njit(lambda x: x * module.FACTOR)
    assert module.squash(1.0) == 3.25
    module.FACTOR = 0.40625
    score_mod = ScoreMod.bind(lambda score, b, h, i, j: module.squash(score), None, "float32", 2)
    text = compiler.intermediate(*kernel("forward", "float32", 64, 64, options=Options(score_mod=score_mod)))
    constants = {struct.unpack(">d", bytes.fromhex(x))[0] for x in re.findall(r"0d([0-9A-Fa-f]{16})", text)}
    constants |= {struct.unpack(">f", bytes.fromhex(x))[0] for x in re.findall(r"0f([0-9A-Fa-f]{8})", text)}
    assert 0.40625 in constants
    assert 3.25 not in constants


def test_one_kernel_serves_all_values_of_an_option():
    values = (
        Options(softcap=3.0, dropout=0.1, generator=Generator(7, 9)),
        Options(softcap=50.0, dropout=0.9, generator=Generator(1, 2, 3, 4)),
    )
    assert len({options.structure for options in values}) == 1
    assert values[0].structure != Options(dropout=0.1).structure


def test_a_function_of_the_user_is_in_the_key():
    def functions(slope):
        return ScoreMod.bind(lambda score, b, h, i, j: score + slope * (i - j), None, "float32", 2)

    key = lambda score_mod: compile.cache_key(*kernel("forward", "float32", 64, 64, options=Options(score_mod=score_mod)))
    assert key(functions(1.0)) == key(functions(1.0))
    assert len({key(functions(1.0)), key(functions(2.0)), key(ALIBI), key(None)}) == 4


# ---- architectures -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", ARCHITECTURES, ids=lambda capability: "sm_{}{}".format(*capability))
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(("delta", "bfloat16", 64, 64), id="delta"),
        pytest.param(("forward", "float16", 64, 64), id="forward", marks=pytest.mark.full),
    ],
)
def test_architectures(chosen, capability):
    """PTX is made for a generation, machine code for the GPU itself."""
    text = compiler.intermediate(*kernel(*chosen)._replace(capability=capability))
    generation = max(each for each in ((7, 5), (8, 0), (9, 0)) if each <= capability)
    assert re.search(r"^\.target (\S+)", text, re.MULTILINE)[1].rstrip("a,") == "sm_{}{}".format(*generation)
    assert ".local" not in text
    assert compiler.link(text, capability).cubin[:4] == b"\x7fELF"


# ---- the cache -----------------------------------------------------------------------------------------------------------------------

CONFIG = ("float32", 64, False, 16, 8)
PACKAGE = Path(numba_flash.__file__).parent


def python(code: str, package_root: Path, **environment) -> str:
    environment = os.environ | {"PYTHONPATH": str(package_root)} | {name: str(value) for name, value in environment.items()}
    run = subprocess.run([sys.executable, "-c", code], env=environment, cwd=package_root, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the package's sources, in a directory of its own."""
    shutil.copytree(PACKAGE, tmp_path / "numba_flash", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def key_of(root: Path, **environment) -> str:
    code = f"from numba_flash.cuda.runtime import compile; print(compile.cache_key('simt.forward.build', {CONFIG!r}, (9, 0)))"
    return python(code, root, **environment)


# What a kernel of this builder imports: itself, at two removes, within a function (of the compiler), and by the class of its tile.
USED = {
    "cuda/simt/forward.py": "itself",
    "mask.py": "imported",
    "cuda/score/score.py": "imported by what is imported",
    "numeric.py": "at three removes",
    "cuda/runtime/numpy_gaps.py": "imported by what the compiler imports in a function",
    "cuda/runtime/compiler.py": "what makes code of it",
}
UNUSED = [
    "api.py",
    "files/disk.py",
    "files/notice.py",
    "files/fingerprint.py",
    "arguments/option_checks.py",
    "cuda/runtime/compile.py",
    "cuda/runtime/launch.py",
    "cuda/sm90/forward/forward.py",
]
EDIT = "\nEDITED = 1\n"


def test_cache_key_changes_with_the_sources_that_a_kernel_is_made_of(copy):
    """As processes see it that find another package, with other hash seeds."""
    original = key_of(copy)
    package = copy / "numba_flash"
    for file in UNUSED:
        assert (package / file).exists()
        with (package / file).open("a") as source:
            source.write(EDIT)
    (package / "new.py").write_text("import numba_flash")
    assert key_of(copy, PYTHONHASHSEED=1) == original
    with (package / "mask.py").open("a") as source:
        source.write("# said of it\n")
    assert key_of(copy, PYTHONHASHSEED=2) == original
    with (package / "mask.py").open("a") as source:
        source.write(EDIT)
    assert key_of(copy) != original


@pytest.mark.parametrize("file", [*USED, "cuda/simt/tile.py"])
def test_every_source_that_a_kernel_is_made_of_is_in_its_key(copy, monkeypatch, file):
    """And what a configuration can be asked is in that of whoever gets it: the last is imported by no such builder."""
    builder, tile = ("simt.forward.build", 1) if file in USED else ("passes.combine.build", simt.tile_for("dq", "float32", 64))

    def key() -> str:
        monkeypatch.setattr(fingerprint, "package", lambda: fingerprint.Sources(copy / "numba_flash"))
        return compile.cache_key(builder, (*CONFIG, (tile,)), (9, 0))

    original = key()
    with (copy / "numba_flash" / file).open("a") as source:
        source.write(EDIT)
    assert key() != original
    if file not in USED:
        assert compile.modules(builder, CONFIG) == ["cuda.runtime.compiler", "cuda.passes.combine"]
        assert all(module in fingerprint.package() for module in compile.modules(builder, CONFIG)), "modules that there are"


def test_a_kernel_is_made_of_what_its_options_refer_to():
    of = lambda options: compile.modules("simt.forward.build", (options.structure,))[2:]
    assert of(Options(softcap=1.0)) == ["arguments.options"]
    assert of(OPTIONS["pages"]) == ["arguments.options", "arguments.pages"]
    assert of(OPTIONS["all"]) == ["arguments.options", "scoremod.functions"]


def test_cache_key_does_not_depend_on_where_the_package_lies(copy):
    shutil.copytree(copy / "numba_flash", copy / "elsewhere" / "numba_flash")
    assert key_of(copy) == key_of(copy / "elsewhere")


def test_cache_key_changes_with_what_is_built(monkeypatch):
    tile = simt.tile_for("dq", "float32", 64)
    keys = [
        compile.cache_key("m.f", CONFIG, (9, 0)),
        compile.cache_key("m.g", CONFIG, (9, 0)),
        compile.cache_key("m.f", ("float64", *CONFIG[1:]), (9, 0)),
        compile.cache_key("m.f", (*CONFIG[:-1], 9), (9, 0)),
        compile.cache_key("m.f", (*CONFIG, tile), (9, 0)),
        compile.cache_key("m.f", (*CONFIG, simt.Tile(**vars(tile) | {"min_blocks": 7})), (9, 0)),
        compile.cache_key("m.f", CONFIG, (8, 9)),
    ]
    for i, tool in enumerate(compile.TOOLS):
        versions = [*compile._tool_versions()]
        versions[i] = f"{tool} 0"
        monkeypatch.setattr(compile, "_tool_versions", lambda versions=versions: tuple(versions))
        keys.append(compile.cache_key("m.f", CONFIG, (9, 0)))
        monkeypatch.undo()
    assert len(set(keys)) == len(keys)


def test_tools_that_make_the_code_are_in_the_key():
    named = " ".join(compile._tool_versions())
    for tool in ("numba-cuda", "llvmlite", "nvjitlink", "nvvm"):
        assert tool in named, f"{tool} makes machine code, but its version is not in the key"


def test_who_finds_a_kernel_on_disk_does_not_import_numba(tmp_path):
    """Two processes compile it at once on a cold cache, a third one finds it."""
    code = f"""
import sys, json
from numba_flash.cuda.runtime import compile
code = compile.cubin("passes.delta.build", {CONFIG!r}, (9, 0))
print(json.dumps([code.hex(), "numba" in sys.modules]))
"""  # names in the code are numbered as they come, so that two processes need not make the same bytes
    environment = {"NUMBA_FLASH_CACHE_DIR": tmp_path / "cache"}
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: json.loads(python(code, PACKAGE.parent, **environment)), range(2))
    third = json.loads(python(code, PACKAGE.parent, **environment))
    assert bytes.fromhex(first[0])[:4] == b"\x7fELF"
    assert third[0] in (first[0], second[0])
    assert (first[1], third[1]) == (True, False)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NUMBA_FLASH_CACHE_DIR": "/a/b"}, "/a/b"),
        ({"NUMBA_FLASH_CACHE_DIR": "", "XDG_CACHE_HOME": "/x"}, "/x/numba_flash"),
        ({"NUMBA_FLASH_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/numba_flash"),
    ],
    ids=["named", "XDG", "home"],
)
def test_cache_directory(monkeypatch, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert compile.cache_directory() == Path(expected)


# ---- NumPys that lack what numba-cuda asks for -------------------------------------------------------------------------------------------

# NumPy 2.5 has no row_stack, and a later one will have no time without a unit, which 2.5 warns about. Both are taken away here, once Numba
# for the CPU and SciPy have seen them.
COMING_NUMPY = """
import numba.np.arrayobj, numpy as np, scipy.linalg
if hasattr(np, "row_stack"):
    del np.row_stack
    np.__all__.remove("row_stack")
there_is = np.timedelta64
class timedelta64(there_is):
    def __new__(cls, value, *unit):
        if not unit:
            raise ValueError("a time has a unit")
        return there_is(value, *unit)
np.timedelta64 = timedelta64
"""
# What a user meets who uses numba-cuda before: the first cannot be imported, the second cannot compile.
NO_UNIT = """
try:
    from numba import cuda
except ValueError as error:
    assert "a time has a unit" in str(error)
else:
    raise AssertionError("numba-cuda no longer asks for a time without a unit: numba_flash.cuda.runtime.numpy_gaps need not supply it")
"""
NO_ROW_STACK = """
np.timedelta64 = there_is
from numba import cuda
from numba.cuda import types
try:
    cuda.compile(lambda x: None, types.void(types.float32[:]), cc=(9, 0))
except AttributeError as error:
    assert "row_stack" in str(error)
else:
    raise AssertionError("numba-cuda no longer asks for np.row_stack: numba_flash.cuda.runtime.numpy_gaps need not supply it")
"""


@pytest.mark.parametrize(
    "before",
    ["", *(pytest.param(x, marks=pytest.mark.full) for x in (NO_UNIT, NO_ROW_STACK))],
    ids=["first", "after an import by the user failed", "after a kernel of the user failed"],
)
def test_coming_numpy(before):
    code = f"""{COMING_NUMPY}{before}
from numba_flash.cuda.runtime import compiler
assert ".entry kernel" in compiler.intermediate("passes.delta.build", {CONFIG!r}, (9, 0))
assert not hasattr(np, "row_stack"), "left behind"
"""
    python(code, PACKAGE.parent)


def test_nothing_warns_while_a_kernel_is_compiled(tmp_path):
    """Whoever turns warnings into errors can compile, with every NumPy; the number that stands for no time is what it was."""
    code = f"""
from numba_flash.cuda.runtime import compile
assert compile.cubin("passes.delta.build", {CONFIG!r}, (9, 0))[:4] == b"\\x7fELF"
import numpy as np
from numba.cuda.np import npdatetime_helpers
assert npdatetime_helpers.NAT == np.timedelta64("nat", "s").astype(np.int64)
"""
    python(code, PACKAGE.parent, PYTHONWARNINGS="error", NUMBA_FLASH_CACHE_DIR=tmp_path / "cache")


@pytest.mark.parametrize("there", [True, False])
def test_numpy_and_imports_are_left_as_they_were(monkeypatch, there):
    mine = object()
    monkeypatch.setattr(np, "row_stack", mine, raising=False)
    if not there:
        monkeypatch.delattr(np, "row_stack")
    before = [*sys.meta_path]
    with numpy_gaps.supplied():
        assert hasattr(np, "row_stack")
    assert getattr(np, "row_stack", None) is (mine if there else None)
    assert sys.meta_path == before
