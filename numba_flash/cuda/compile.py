"""The only contact with Numba's CUDA compiler: Python function + signature + compute capability ->
cubin, cached on disk.
"""

import hashlib
import importlib
import os
import re
import threading
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

from numba_flash import disk, notice
from numba_flash.fingerprint import source_fingerprint
from numba_flash.options import Options

# What is changed in Numba while a kernel is compiled is put back before the next.
_one_at_a_time = threading.RLock()
TENSOR_MAP_BYTES = 128
GENERATIONS = ((9, 0), (8, 0), (7, 5))
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
    return hashlib.sha256(
        repr((builder, config, capability, source_fingerprint(), _tool_versions())).encode()
    ).hexdigest()


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
    return _resources((_load(f"{cache_key(builder, config, capability)}.log") or b"").decode())


def of_config(config: tuple) -> str:
    """What a kernel is built with, as text."""
    return ", ".join(map(_constant, config))


def _constant(x) -> str:
    if isinstance(x, Options):
        on = [each.name for each in fields(x) if getattr(x, each.name) != each.default]
        return ", ".join(f"{name}={getattr(x, name)}" for name in on) or "plain"
    if is_dataclass(x):
        return f"{type(x).__name__}{tuple(getattr(x, each.name) for each in fields(x))}"
    return str(x)


def compiled(builder: str, config: tuple, capability: tuple[int, int]) -> bytes:
    """What `cubin` returns if it compiles; kept where that is possible."""
    major, minor = capability
    variant = f"{of_config(config)}; for compute capability {major}.{minor}"
    told = notice.Compiling("CUDA", builder, variant, place())
    code, log = _link(intermediate(builder, config, capability), capability, verbose=True)
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


def generation(capability: tuple[int, int]) -> tuple[int, int]:
    """The compute capability that PTX is made for, which the linker takes to this one or a later
    one.

    For those from 10.0 on, libNVVM 13.2 leaves many loops as they are, so that registers with an
    index lie in memory; what it makes for 9.0 does not.
    """
    return next((each for each in GENERATIONS if capability >= each), capability)


def architecture(capability: tuple[int, int]) -> str:
    """Assembler target; from Hopper on the one with the architecture's own instructions."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def intermediate(
    builder: str, config: tuple, capability: tuple[int, int], ptx: bool = False
) -> str | bytes:
    """PTX of one kernel, its entry point renamed to "kernel"; or LTO-IR, for kernels that take
    tensor maps, unless `ptx` is to be read, not linked.

    The linker assembles PTX as if code from elsewhere could join it, and then ignores setmaxnreg
    and serialises wgmma (ptxas C7504, C7509); LTO-IR it compiles as the whole program that it is.
    """
    from numba_flash.cuda.lang import cuda

    module, build = builder.rsplit(".", 1)
    function, signature, options = getattr(
        importlib.import_module(f"numba_flash.cuda.{module}"), build
    )(*config)
    maps = options.pop("tensor_maps", ())
    by_value = _tensor_maps_by_value(maps) if maps else nullcontext()
    target = capability if maps else generation(capability)
    options |= {"cc": (*target, "a") if maps else target}
    options |= {"output": "ltoir" if maps and not ptx else "ptx"}
    with _one_at_a_time, _target(target), by_value:
        code, _ = cuda.compile(function, signature, device=False, abi="numba", **options)
    if options["output"] == "ltoir":
        return code
    (line,) = (line for line in code.splitlines() if ".entry" in line)
    return _constants_in_global_memory(
        code.replace(line.split(".entry")[1].split("(")[0].strip(), "kernel")
    )


@contextmanager
def _tensor_maps_by_value(maps: tuple[str, ...]):
    """Let the compiler see the kernel's parameters `maps`, addresses (uint64) to Numba, as tensor
    maps that the launch passes by value.

    Numba has no argument of 128 bytes. Each address becomes that of the parameter, and the kernel
    is renamed to "kernel".
    """
    from numba.cuda.cudadrv import nvvm

    compile_ir, here = nvvm.compile_ir, threading.get_ident()

    def compile_rewritten(modules, **options):
        if threading.get_ident() != here:  # a kernel of somebody else's
            return compile_ir(modules, **options)
        kernel, *others = modules
        return compile_ir([_rewrite_kernel(kernel, maps), *others], **options)

    nvvm.compile_ir = compile_rewritten
    try:
        yield
    finally:
        nvvm.compile_ir = compile_ir


def _rewrite_kernel(module: str, maps: tuple[str, ...]) -> str:
    """NVVM IR (section "Parameters and grid_constant") of the module whose only definition is the
    kernel.
    """
    (name,) = re.findall(r'^define void @"([^"]+)"\(', module, re.MULTILINE)
    map_type = f"[{TENSOR_MAP_BYTES} x i8]*"
    was, now = ", ".join(["i64"] * len(maps)), ", ".join([map_type] * len(maps))
    addresses = "".join(
        f'  %"{each}" = ptrtoint {map_type} %"{each}.value" to i64\n' for each in maps
    )
    for each in maps:
        module = module.replace(f'i64 %"{each}"', f'{map_type} byval align 64 %"{each}.value"', 1)
    head, body = module.split("\nentry:\n", 1)
    module = f"{head}\nentry:\n{addresses}{body}".replace(name, "kernel").replace(
        f"void ({was}, ", f"void ({now}, "
    )
    types = re.search(r'!\{ (void \(.*?\)\* @"kernel"), !"kernel"', module)[1]
    indices = ", ".join(f"i32 {i + 1}" for i in range(len(maps)))
    annotations = re.search(r"^!nvvm\.annotations = !\{ (.*) \}$", module, re.MULTILINE)[1]
    module = module.replace(
        f"!nvvm.annotations = !{{ {annotations} }}",
        f"!nvvm.annotations = !{{ {annotations}, !90000 }}",
    )
    return (
        f'{module}\n!90000 = !{{ {types}, !"grid_constant", !90001 }}\n!90001 = !{{ {indices} }}\n'
    )


def _constants_in_global_memory(text: str) -> str:
    """The same PTX, with arrays that a function captures where threads can read different elements
    of them at once: constant memory hands these out one by one, and has 64 KB.
    """
    text = re.sub(r"\b(ld)\.const\b", r"\1.global.nc", text)
    return re.sub(r"\.const\b", ".global", text)


@contextmanager
def _target(capability: tuple[int, int]):
    """Let device functions, which Numba compiles for "the current device", be compiled for
    `capability` on any machine.
    """
    from numba.cuda import dispatcher

    current_device = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = current_device


def link(code: str | bytes, capability: tuple[int, int]) -> bytes:
    """What `intermediate` makes, to cubin."""
    return _link(code, capability)[0]


def resources(code: str | bytes, capability: tuple[int, int]) -> dict[str, int]:
    """What the assembler gave one kernel: ``registers``, ``spill_bytes``, ``stack_bytes``,
    ``shared_bytes`` (static), its ``warnings``.
    """
    return _resources(_link(code, capability, verbose=True)[1])


def _resources(log: str) -> dict[str, int]:
    """Empty if the linker's log does not tell; that happens, and the kernel is good."""
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


def _link(code: str | bytes, capability: tuple[int, int], **options) -> tuple[bytes, str]:
    """Cubin and the linker's log."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    if isinstance(code, bytes):
        source, options = ObjectCode.from_ltoir(code), options | {"link_time_optimization": True}
    else:
        source = ObjectCode.from_ptx(code.encode())
    linker = Linker(source, options=LinkerOptions(arch=architecture(capability), **options))
    result = bytes(linker.link("cubin").code)
    return result, linker.get_info_log()
