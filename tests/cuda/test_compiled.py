"""Kernels that tests compile: under which keys they are kept, and PTX that is the same in every process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

import compiled
from compiled import normalised, ptx_instructions

import numba_flash
from numba_flash.files import fingerprint

TESTS = Path(compiled.__file__).parent
# A kernel with what Numba numbers: functions that are inlined, one for each kernel, and arrays in shared and constant memory.
PROCESS = """
import json, sys, types
import numpy as np
from compiled import Kernel, normalised
from numba_flash.cuda.runtime import compiler
from numba_flash.cuda.runtime.lang import cuda, f32, inline, once, types as nb
import simt_kernels, sm80_kernels, sm90_kernels

TABLE = np.arange(4, dtype=np.float32)

@once
def build_scale(n):
    @inline
    def scaled(x):
        return x * f32(n)
    return scaled

def build(n):
    scaled = build_scale(2)
    def small(out):
        shared = cuda.shared.array(n, f32)
        i = cuda.threadIdx.x
        shared[i] = scaled(out[i])
        cuda.syncthreads()
        out[i] = shared[n - 1 - i] + TABLE[i % 4]
    return small, nb.void(nb.float32[:]), {}

module = types.ModuleType("numba_flash.cuda.small")
module.build = build
sys.modules[module.__name__] = module
KERNELS = {f"small {n}": Kernel("small.build", (n,)) for n in (32, 64)}
KERNELS |= simt_kernels.KERNELS | sm80_kernels.KERNELS | sm90_kernels.KERNELS
texts = {name: compiler.intermediate(*KERNELS[name], ptx=True) for name in sys.argv[1:]}
print(json.dumps({name: [text, normalised(text)] for name, text in texts.items()}))
"""


def texts(seed: int, *names: str) -> dict[str, list[str]]:
    """PTX of kernels that a process of its own compiles in this order, and the same `normalised`."""
    package = Path(numba_flash.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (package, TESTS))), "PYTHONHASHSEED": str(seed)}
    run = subprocess.run([sys.executable, "-c", PROCESS, *names], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("small 32", "small 64"),
        ("64-2147483648-none", "backward packed"),
        ("sm80 forward 64 alibi", "sm80 forward 64 for 7.5"),
        ("forward-float32-40-96", "sm80 forward 64 alibi"),
    ],
)
def test_text_of_a_kernel_is_the_same_in_every_process(name, other):
    """With another hash seed, and after another kernel, with which it shares functions."""
    alone, later = texts(1, name), texts(2, other, name)
    assert alone[name][0] != later[name][0]
    assert alone[name][1] == later[name][1] != later[other][1]
    assert len({str(ptx_instructions(text)) for text in (*alone[name], *later[name])}) == 1


def test_names_stay_apart():
    """Two that differ are not made one, and nothing else changes; the variables of Numba's own, in any order, are left out."""
    variable = ".common .global .align 8 .u64 _ZN08NumbaEnv{};\n".format
    text = "call _Z4oneB2v1x, (_cudapy_smem_3);\nmov _Z4twoB2v7x, _cudapy_smem_1; // %rd1 _cudapy_smem_3\n"
    again = "call _Z4oneB2v5x, (_cudapy_smem_1);\nmov _Z4twoB2v6x, _cudapy_smem_2; // %rd1 _cudapy_smem_1\n"
    named = "call name0, (name1);\nmov name2, name3; // %rd1 name1\n"
    assert normalised(variable("3oneB2v1") + variable("3twoB2v7") + text) == normalised(variable("3twoB2v6") + again) == named
    assert normalised(text.replace("smem_1", "smem_3")) != named
    assert normalised(text.replace("%rd1", "%rd2")) != named
    assert normalised(text + ".common .global .align 8 .u64 x;\n") != named


def test_a_kernel_of_the_tests_is_kept_under_its_own_source(tmp_path, monkeypatch):
    """And those that this imports, of the package; of a kernel of the package the key says all."""
    source = tmp_path / "kernel.py"
    source.write_text("from numba_flash import mask\ndef build(): pass\n")
    module = ModuleType("numba_flash.cuda.of_this_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def key() -> str:
        scope = {}
        exec(compile(source.read_text(), source, "exec"), scope)
        module.build = SimpleNamespace(__code__=scope["build"].__code__)
        return compiled.of_tests("of_this_test.build")

    assert compiled.of_tests("passes.delta.build") == ""
    package = tmp_path / "numba_flash"
    shutil.copytree(Path(numba_flash.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(fingerprint, "package", lambda: fingerprint.Sources(package))
    keys = [key()]
    assert key() == keys[0]
    for edited in (package / "mask.py", source):
        with edited.open("a") as file:
            file.write("\nEDITED = 1\n")
        keys.append(key())
    assert len(set(keys)) == 3
