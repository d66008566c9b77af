"""The only contact with Numba's CUDA compiler and the linker: Python function + signature + compute
capability -> PTX or LTO-IR -> machine code. With what is imported here, part of every kernel.
"""

import importlib
import re
import threading
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import NamedTuple

# What is changed in Numba while a kernel is compiled is put back before the next.
_one_at_a_time = threading.RLock()
TENSOR_MAP_BYTES = 128
GENERATIONS = ((9, 0), (8, 0), (7, 5))


class Linked(NamedTuple):
    """Machine code, and the linker's log."""

    cubin: bytes
    log: str


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
    from numba_flash.cuda.runtime.lang import cuda

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


def link(code: str | bytes, capability: tuple[int, int]) -> Linked:
    """What `intermediate` makes, to machine code."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = {"arch": architecture(capability), "verbose": True}
    if isinstance(code, bytes):
        source, options = ObjectCode.from_ltoir(code), options | {"link_time_optimization": True}
    else:
        source = ObjectCode.from_ptx(code.encode())
    linker = Linker(source, options=LinkerOptions(**options))
    cubin = bytes(linker.link("cubin").code)
    return Linked(cubin, linker.get_info_log())
