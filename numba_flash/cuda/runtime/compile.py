"""Compiled kernels on disk: the cubin that `compiler` makes of a builder and its configuration,
under a key of all that it is made of.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from numba_flash.arguments.options import Options
from numba_flash.cuda.runtime import compiler
from numba_flash.files import disk, fingerprint, notice

TOOLS = (
    *("numba", "llvmlite", "numba-cuda", "cuda-core"),
    # wheels of the compiler and the linker: CUDA 13's, and CUDA 12's
    *("nvidia-nvvm", "nvidia-nvjitlink"),
    *("nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12"),
)


def cache_directory() -> Path | None:
    """Where cubins are kept: ``$NUMBA_FLASH_CACHE_DIR``, else ``$XDG_CACHE_HOME/numba_flash``, else
    ``~/.cache/numba_flash``.

    None without a home directory.
    """
    named, caches = os.environ.get("NUMBA_FLASH_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(named) if named else Path(caches or Path.home() / ".cache") / "numba_flash"
    except RuntimeError:
        return None


@lru_cache(maxsize=1)
def _tool_versions() -> tuple[str, ...]:
    return tuple(f"{tool} {_version(tool)}" for tool in TOOLS)


def _version(tool: str) -> str:
    try:
        return version(tool)
    except PackageNotFoundError:  # one of CUDA 12's or CUDA 13's, or part of a system-wide toolkit
        return "-"


def cache_key(builder: str, config: tuple, capability: tuple[int, int]) -> str:
    """Everything that a cubin depends on: what is built, for which architecture, from which
    sources, with which tools.
    """
    sources = fingerprint.package().closure(*modules(builder, config), kept_in=place())
    key = builder, config, capability, sources, _tool_versions()
    return hashlib.sha256(repr(key).encode()).hexdigest()


def modules(builder: str, config: tuple) -> list[str]:
    """Of whose sources a kernel is made, beside those that they import: the compiler's, the
    builder's, and those of the classes in its configuration, of which it may ask anything.
    """
    return [
        "cuda.runtime.compiler",
        f"cuda.{builder.rpartition('.')[0]}",
        *sorted({*_homes(config)}),
    ]


def _homes(x) -> Iterator[str]:
    """Where the classes of our own are defined of what is in `x`."""
    package, _, module = type(x).__module__.partition(".")
    if package == __package__.partition(".")[0]:
        yield module
    if is_dataclass(x):
        x = [getattr(x, each.name) for each in fields(x)]
    if isinstance(x, tuple | list):
        for each in x:
            yield from _homes(each)


def cubin(builder: str, config: tuple, capability: tuple[int, int]) -> bytes:
    """Machine code of the kernel that `builder`, a ``"module.function"`` in `numba_flash.cuda`,
    makes of `config`.

    Its entry point is called "kernel".

    Numba is imported, and the kernel compiled, only when the cache does not hold it.
    """
    code = kept(builder, config, capability)
    return compiled(builder, config, capability) if code is None else code


def kept(builder: str, config: tuple, capability: tuple[int, int]) -> bytes | None:
    """What `cubin` finds on disk; None if it has to compile."""
    return _load(f"{cache_key(builder, config, capability)}.cubin")


def kept_resources(builder: str, config: tuple, capability: tuple[int, int]) -> dict[str, int]:
    """`resources` of a kernel on disk; empty where its log is not, or does not tell."""
    return resources((_load(f"{cache_key(builder, config, capability)}.log") or b"").decode())


def of_config(config: Iterable) -> str:
    """What a kernel is built with, as text."""
    return ", ".join(map(_constant, config))


def _constant(x) -> str:
    if isinstance(x, Options):
        on = [each.name for each in fields(x) if getattr(x, each.name) != each.default]
        return ", ".join(f"{name}={getattr(x, name)}" for name in on) or "plain"
    if is_dataclass(x):
        return f"{type(x).__name__}({of_config(getattr(x, each.name) for each in fields(x))})"
    return str(x)


def compiled(builder: str, config: tuple, capability: tuple[int, int]) -> bytes:
    """What `cubin` returns if it compiles; kept where that is possible."""
    major, minor = capability
    variant = f"{of_config(config)}; for compute capability {major}.{minor}"
    told = notice.Compiling("CUDA", builder, variant, place())
    code, log = compiler.link(compiler.intermediate(builder, config, capability), capability)
    told.done()
    key = cache_key(builder, config, capability)
    _store(f"{key}.log", log.encode())
    _store(f"{key}.cubin", code)
    return code


def place() -> Path | None:
    """`cache_directory` if code in it can be trusted, None and one warning if not."""
    directory = cache_directory()
    if directory is None:
        disk.give_up(
            Path("~/.cache/numba_flash"),
            "there is no home directory (NUMBA_FLASH_CACHE_DIR names another place)",
        )
        return None
    return directory if disk.trusted(directory) else None


def _load(name: str) -> bytes | None:
    directory = place()
    return None if directory is None else disk.load(directory / name)


def _store(name: str, data: bytes) -> None:
    directory = place()
    if directory is not None:
        disk.store(directory / name, data)


def resources(log: str) -> dict[str, int]:
    """What the assembler gave one kernel, by the linker's log: ``registers``, ``spill_bytes``,
    ``stack_bytes``, ``shared_bytes`` (static), its ``warnings``.

    Empty if the log does not tell; that happens, and the kernel is good.
    """
    registers = re.search(r"Used (\d+) registers", log)
    if registers is None:
        return {}
    count = lambda pattern: sum(map(int, re.findall(pattern, log)))
    return {
        "registers": int(registers[1]),
        "spill_bytes": count(r"(\d+) bytes spill"),
        "stack_bytes": count(r"(\d+) bytes stack frame"),
        "shared_bytes": count(r"(\d+) bytes smem"),
        "warnings": len(re.findall(r"Performance Loss|[Ww]arning", log)),
    }
