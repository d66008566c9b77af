"""What kernels are made of, counted in their PTX and in their machine code. The counts that are kept are written anew by

    python tests/kernel_counts.py [--only "dbias sm90"]

after a kernel was changed on purpose: what it prints is what the change costs.

What is counted is what makes a kernel right, or slow: products of tensor cores, waiting and telling, what goes to and comes from memory,
and floating-point functions. All of that is the same with every compiler and linker from CUDA 12.9 to 13.5, and compared exactly. What
differs between them is arithmetic on addresses, in which registers it is done (R2UR, UMOV), where empty instructions pad (NOP), and, in
kernels that need more registers than there are, what goes to local memory (LDL, STL): no more is compared than how many there are in all.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import compiled
import simt_kernels
import sm80_kernels
import sm90_kernels

from numba_flash.cuda.runtime import compile

KEPT = Path(__file__).parent / "data" / "kernel_counts.json"
ANEW = "python tests/kernel_counts.py"
ALL, TOLERANCE = "instructions", 0.05  # of all instructions: compilers differ by 1 % in PTX, by 2 % in machine code
PTX, MACHINE = "PTX", "machine code"

# An instruction counts under as much of its name as the first of these matches.
CLASSES = {
    PTX: (
        r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16",
        r"(wgmma|mbarrier|setmaxnreg|shfl\.sync|bar|barrier|membar|griddepcontrol)\.\w+(\.expect_tx)?",
        r"(fence|cp|createpolicy|red|atom|vote|match|redux|elect)\.\S+",
        r"(stmatrix|ldmatrix)\b",
        r"(ld|st)\.(acquire|release|relaxed|volatile)\S*",
        r"(ld|st)(\.(param|shared|global|local|const))?(\.v\d)?",
        r"(add|sub|mul|fma|div|rcp|sqrt|ex2|lg2|neg|abs|max|min|tanh)\S*\.f(16|32|64)$",
        r"\S*sync\S*",
    ),
    MACHINE: (
        r"(HGMMA|HMMA|DMMA|WARPGROUP|SYNCS|BAR|FENCE|MEMBAR|ERRBAR|CCTL|DEPBAR|LDGDEPBAR|WARPSYNC|USETMAXREG|ELECT|SHFL|VOTE|MATCH|REDUX)\b\S*",
        r"(ACQBULK|PREEXIT)\b",
        r"(UTMA|UBLK|LDG|STG|LDS|STS|ATOM|RED|MUFU|CREDUX)\S*",
        r"(LD|ST)\b\S*",
    ),
}  # fmt: skip


class Difference(NamedTuple):
    """One count of one kernel that is not what was kept."""

    kernel: str
    where: str
    instruction: str
    kept: int
    found: int

    def __str__(self) -> str:
        return f"{self.kernel}, {self.where}: {self.kept} -> {self.found} {self.instruction}"


def count(instructions: list[str], classes: tuple[str, ...]) -> dict[str, int]:
    """How many there are of each class, and of all."""
    patterns = [re.compile(each) for each in classes]
    matches = (next(filter(None, (pattern.match(each) for pattern in patterns)), None) for each in instructions)
    return dict(sorted(Counter(match.group() for match in matches if match).items())) | {ALL: len(instructions)}


def count_ptx(text: str) -> dict[str, int]:
    """Parameters, bytes of shared memory, instructions by class, and all instructions."""
    return {
        "parameters": len(re.findall(r"^\s+\.param ", text, re.MULTILINE)),
        "bytes of shared memory": compiled.shared_bytes(text),
    } | count(compiled.ptx_instructions(text), CLASSES[PTX])


def count_machine(text: str) -> dict[str, int]:
    """Instructions by class, and all instructions."""
    return count(compiled.machine_instructions(text), CLASSES[MACHINE])


def counts(kernel: compiled.Kernel, where: str) -> dict[str, int]:
    """Of the PTX or of the machine code of a kernel."""
    return count_ptx(compiled.ptx(kernel)) if where == PTX else count_machine(compiled.machine_text(kernel))


def differences(name: str, where: str, kept: dict[str, int], found: dict[str, int], tolerance: float = TOLERANCE) -> list[Difference]:
    """Counts that are not equal, and a number of all instructions that is off by more than the tolerance."""
    each = [Difference(name, where, x, kept.get(x, 0), found.get(x, 0)) for x in sorted(kept | found)]
    return [x for x in each if abs(x.found - x.kept) > (tolerance * x.kept if x.instruction == ALL else 0)]


def tools() -> dict[str, str]:
    """Versions of what makes PTX, machine code, and words of it, as far as they come as wheels."""
    found = {}
    for tool in (*compile.TOOLS, "nvidia-cuda-nvdisasm"):
        try:
            found[tool] = version(tool)
        except PackageNotFoundError:  # CUDA 12's in the presence of CUDA 13's, or part of a toolkit
            continue
    return found


def kept() -> dict:
    """``{"tools": tools(), "kernels": {name: {where: counts(kernel, where)}}}`` of the time when they were written."""
    return json.loads(KEPT.read_text())


def changed_tools(before: dict[str, str], now: dict[str, str]) -> str:
    """Those of another version, with both."""
    return ", ".join(f"{tool} {before.get(tool)} -> {now.get(tool)}" for tool in sorted(before | now) if before.get(tool) != now.get(tool))


def complaint(off: list[Difference], before: dict[str, str], now: dict[str, str]) -> str:
    """What a test says: what changed, whether the tools did, too, and how to keep it so."""
    other = changed_tools(before, now)
    return "\n".join(
        [
            *map(str, off),
            f"other tools than those that the counts are kept of: {other}" if other else "the tools are the same",
            f"if that was meant: {ANEW}",
        ]
    )


def compare(name: str, where: str, kernel: compiled.Kernel) -> None:
    """The counts of a kernel are those that are kept."""
    was = kept()
    assert name in was["kernels"], f"no counts are kept of {name}: {ANEW}"
    off = differences(name, where, was["kernels"][name][where], counts(kernel, where))
    assert not off, complaint(off, was["tools"], tools())


def main(arguments: Sequence[str] = ()) -> None:
    """Count kernels, print what is new, and keep it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--only", default="", help="a regular expression of the names of those to count; others are kept as they were")
    only = parser.parse_args(arguments).only
    kernels = simt_kernels.KERNELS | sm80_kernels.COUNTED | sm90_kernels.KERNELS
    was, now = kept()["kernels"], {}
    for name, kernel in kernels.items():
        if not re.search(only, name) and name in was:
            now[name] = was[name]
            continue
        now[name] = {where: counts(kernel, where) for where in (PTX, MACHINE)}
        if name not in was:
            print(f"{name}: counted for the first time", flush=True)
            continue
        for where, found in now[name].items():
            for each in differences(name, where, was[name][where], found, tolerance=0):
                print(each, flush=True)
    for name in was.keys() - kernels.keys():
        print(f"{name}: no longer counted")
    KEPT.write_text(json.dumps({"tools": tools(), "kernels": now}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
