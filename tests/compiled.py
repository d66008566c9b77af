"""Kernels on their way to machine code, each once per process: what the compiler makes, PTX, the code, and that in words."""

import hashlib
import importlib
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import evidence

from numba_flash.cuda.runtime import compile, compiler
from numba_flash.cuda.runtime.compiler import Linked
from numba_flash.files import fingerprint

H200 = (9, 0)
SCHEDULE = 41  # the first of the bits, in the upper half of an instruction, that say when it may be issued
KB = 1024
# Bytes of shared memory that a block may have (CUDA C++ Programming Guide, "Compute Capabilities").
SHARED_LIMIT = {
    (7, 5): 64 * KB,
    (8, 0): 163 * KB,
    **dict.fromkeys([(8, 6), (8, 9), (12, 0)], 99 * KB),
    **dict.fromkeys([(9, 0), (10, 0)], 227 * KB),
}


class Kernel(NamedTuple):
    """What `compile.cubin` is asked for: a ``"module.function"`` in `numba_flash.cuda`, its arguments, and a GPU's compute capability."""

    builder: str
    config: tuple
    capability: tuple[int, int] = H200


@cache
def _code(builder: str, config: tuple, generation: tuple[int, int], ptx: bool) -> str | bytes:
    """What `compiler.intermediate` returns, from the cache of kernels if this version of Python has made it."""
    key = (compile.cache_key(builder, config, generation), ptx, of_tests(builder), sys.version_info[:2])
    name = f"{hashlib.sha256(repr(key).encode()).hexdigest()}.intermediate"
    if (found := compile._load(name)) is None:
        found = pickle.dumps(compiler.intermediate(builder, config, generation, ptx))
        compile._store(name, found)
    return pickle.loads(found)


def of_tests(builder: str) -> str:
    """Of a kernel of the tests, which has no source in the package: its own, and what this imports of the package."""
    package, (module, function) = fingerprint.package(), builder.rsplit(".", 1)
    if f"cuda.{module}" in package:
        return ""
    build = getattr(importlib.import_module(f"numba_flash.cuda.{module}"), function)
    source = Path(build.__code__.co_filename).read_bytes()
    return hashlib.sha256(source).hexdigest() + package.closure(*package.imported(source))


@evidence.text_of(lambda *kernel: kernel)
def text(builder: str, config: tuple, capability: tuple[int, int]) -> str:
    """PTX of any kernel, as the compiler makes it."""
    return _code(builder, config, compiler.generation(capability), True)


@evidence.text_of(lambda kernel: kernel)
def code(kernel: Kernel) -> str | bytes:
    """PTX; LTO-IR of a kernel that takes tensor maps."""
    return _code(*kernel[:2], compiler.generation(kernel.capability), False)


@evidence.text_of(lambda kernel: kernel)
@cache
def linked(kernel: Kernel) -> Linked:
    return compiler.link(code(kernel), kernel.capability)


@evidence.text_of(lambda kernel: kernel)
@cache
def ptx(kernel: Kernel) -> str:
    """PTX of any kernel: that which the linker itself makes of LTO-IR, on its way to machine code."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    if isinstance(code(kernel), str):
        return code(kernel)
    options = LinkerOptions(arch=compiler.architecture(kernel.capability), link_time_optimization=True, ptx=True)
    return Linker(ObjectCode.from_ltoir(code(kernel)), options=options).link("ptx").code.decode()


def disassembler() -> str | None:
    """Path of nvdisasm: a wheel's, or a toolkit's."""
    try:
        import nvidia
    except ImportError:
        return shutil.which("nvdisasm")
    found = [path for root in nvidia.__path__ for path in Path(root).glob("*/bin/nvdisasm")]
    return str(found[0]) if found else shutil.which("nvdisasm")


@evidence.text_of(lambda kernel: kernel)
@cache
def machine_text(kernel: Kernel) -> str:
    """Machine code, one instruction per line; beside it, in two lines, its 128 bits."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(linked(kernel).cubin)
        run = subprocess.run([disassembler(), "-c", "-hex", file.name], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def ptx_instructions(text: str) -> list[str]:
    """Each instruction's name with all that belongs to it, as ``"ld.shared.b32"``; also those that share a line."""
    return re.findall(r"(?:^\s*|[;{]\s+)(?:@!?%p\d+\s+)?([a-z]\w*[^\s;]*)", text, re.MULTILINE)


def machine_instructions(text: str) -> list[str]:
    """The same, as ``"BAR.SYNC.DEFER_BLOCKING"``."""
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", text, re.MULTILINE)


def without_addresses(text: str) -> list[str]:
    """Labels and instructions of machine code, each instruction with the bits of its schedule (stalls, barriers), which its words do not
    tell: equal for equal code, wherever it lies, whatever its labels and Numba's functions are called, however it is padded.
    """
    names = {}
    named = lambda line: re.sub(r"\.L_\w+|_cudapy_\w+|_Z\w+", lambda name: names.setdefault(name[0], f"name{len(names)}"), line)
    instruction = r"\s+/\*[0-9a-f]+\*/\s+(.*?) ?;\s+/\* 0x\w{16} \*/\n\s+/\* 0x(\w{16}) \*/"
    lines = re.findall(rf"^(?:([\w.$]+:)|{instruction})", text, re.MULTILINE)
    kept = (label or f"{words} {int(bits, 16) >> SCHEDULE:x}" for label, words, bits in lines if words != "NOP")
    return [named(line) for line in kept]


def normalised(text: str) -> str:
    """PTX without what differs between processes: numbers that Numba gives to functions and arrays as they come, in the order in which
    a process compiles them, and variables of its own that nothing refers to, of those functions that it has compiled for this kernel.
    """
    text = re.sub(r"^\.common \.global .*\b_ZN08NumbaEnv\w+;\n", "", text, flags=re.MULTILINE)
    names = {}
    return re.sub(r"\b(_cudapy_\w+|_Z\w+)", lambda name: names.setdefault(name[0], f"name{len(names)}"), text)


def shared_bytes(text: str) -> int:
    """Static shared memory of a kernel in PTX."""
    return sum(int(size) for size in re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", text))
