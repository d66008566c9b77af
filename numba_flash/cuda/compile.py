"""The only contact with Numba's CUDA compiler: Python function + signature + compute capability -> cubin, cached on disk."""

import hashlib
import importlib
import os
import re
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

from numba_flash.fingerprint import source_fingerprint

CONSTANT_BYTES = 2**16
TOOLS = (
    *("numba", "llvmlite", "numba-cuda", "cuda-core"),
    *("nvidia-nvvm", "nvidia-nvjitlink"),  # CUDA 13's wheels of the compiler and the linker, and below CUDA 12's
    *("nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"),
)


def cache_directory() -> Path:
    """Where cubins are kept: ``$NUMBA_FLASH_CACHE_DIR``, else ``$XDG_CACHE_HOME/numba_flash``, else ``~/.cache/numba_flash``."""
    named = os.environ.get("NUMBA_FLASH_CACHE_DIR")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba_flash"


@lru_cache(maxsize=1)
def _cache():
    from cuda.core.utils import FileStreamProgramCache

    return FileStreamProgramCache(cache_directory())


@lru_cache(maxsize=1)
def _tool_versions() -> tuple[str, ...]:
    return tuple(f"{tool} {_version(tool)}" for tool in TOOLS)


def _version(tool: str) -> str:
    try:
        return version(tool)
    except PackageNotFoundError:  # one of CUDA 12's or CUDA 13's, or part of a system-wide toolkit
        return "-"


def cache_key(builder: str, config: tuple, capability: tuple[int, int]) -> str:
    """Everything that a cubin depends on: what is built, for which architecture, from which sources, with which tools."""
    return hashlib.sha256(repr((builder, config, capability, source_fingerprint(), _tool_versions())).encode()).hexdigest()


def cubin(builder: str, config: tuple, capability: tuple[int, int]) -> bytes:
    """Machine code of the kernel that `builder`, a ``"module.function"`` in `numba_flash.cuda`, makes of `config`.

    Its entry point is called "kernel".

    Numba is imported, and the kernel compiled, only when the cache does not hold it.
    """
    key = cache_key(builder, config, capability)
    code = _cache().get(key)
    if code is None:
        code = link(ptx(builder, config, capability), capability)
        _cache()[key] = code
    return code


def architecture(capability: tuple[int, int]) -> str:
    """Assembler target; from Hopper on the one with the architecture's own instructions."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def ptx(builder: str, config: tuple, capability: tuple[int, int]) -> str:
    """PTX of one kernel, its entry point renamed to "kernel"."""
    from numba import cuda

    module, build = builder.split(".")
    function, signature, options = getattr(importlib.import_module(f"numba_flash.cuda.{module}"), build)(*config)
    with _target(capability):
        text, _ = cuda.compile(function, signature, device=False, abi="numba", cc=capability, **options)
    (line,) = (line for line in text.splitlines() if ".entry" in line)
    return _constants_that_fit(text.replace(line.split(".entry")[1].split("(")[0].strip(), "kernel"))


def _constants_that_fit(text: str) -> str:
    """The same PTX, with arrays that a function captures in global memory if they are too large for the constant one."""
    arrays = re.findall(r"^\s*\.const .*\.b(\d+) \S+\[(\d+)\]", text, re.MULTILINE)
    too_large = sum(int(bits) // 8 * int(count) for bits, count in arrays) > CONSTANT_BYTES
    return re.sub(r"\.const\b", ".global", text) if too_large else text


@contextmanager
def _target(capability: tuple[int, int]):
    """Let device functions, which Numba compiles for "the current device", be compiled for `capability` on any machine."""
    from numba.cuda import dispatcher

    current_device = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = current_device


def link(text: str, capability: tuple[int, int]) -> bytes:
    """PTX to cubin."""
    return _link(text, capability)[0]


def resources(text: str, capability: tuple[int, int]) -> dict[str, int]:
    """What the assembler gave one kernel: ``registers``, ``spill_bytes``, ``stack_bytes``, ``shared_bytes`` (static)."""
    log = _link(text, capability, verbose=True)[1]
    count = lambda pattern: sum(map(int, re.findall(pattern, log)))
    return {
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "spill_bytes": count(r"(\d+) bytes spill"),
        "stack_bytes": count(r"(\d+) bytes stack frame"),
        "shared_bytes": count(r"(\d+) bytes smem"),
    }


def _link(text: str, capability: tuple[int, int], **options) -> tuple[bytes, str]:
    """Cubin and the linker's log."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    linker = Linker(ObjectCode.from_ptx(text.encode()), options=LinkerOptions(arch=architecture(capability), **options))
    code = bytes(linker.link("cubin").code)
    return code, linker.get_info_log()
