"""What the `simt` kernels of plain attention are made of, counted in their PTX. The counts that are kept are written anew by

    python tests/plain_kernels.py

after a kernel was changed on purpose: the difference in `data/plain_kernels.json` is what the change costs.
"""

import json
import re
from collections import Counter
from pathlib import Path

KEPT = Path(__file__).parent / "data" / "plain_kernels.json"
TOLERANCE = 0.05  # of all instructions: compilers from CUDA 13.0 to 13.5 differ by 1 %, in arithmetic on addresses alone
CLASSES = {  # the first that matches counts an instruction
    "loads of parameters": r"ld\.param",
    "loads from shared memory": r"ld\.shared",
    "stores to shared memory": r"st\.shared",
    "loads": r"ld\.",
    "stores": r"st\.",
    "barriers": r"bar\.",
    "floating-point operations": r"(add|sub|mul|fma|div|rcp|sqrt|ex2|lg2|neg|abs|max|min)\S*\.f(16|32|64)$",
    "": "",
}


def shared_bytes(ptx: str) -> int:
    return sum(int(size) for size in re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", ptx))


def counts(ptx: str) -> dict[str, int]:
    """Parameters, bytes of shared memory, instructions by class, and all instructions."""
    instructions = re.findall(r"^\s+(?:@!?%p\d+ )?([a-z]\w*[^\s;]*)", ptx, re.MULTILINE)
    found = Counter(next(name for name, pattern in CLASSES.items() if re.match(pattern, each)) for each in instructions)
    return {
        "parameters": len(re.findall(r"^\s+\.param ", ptx, re.MULTILINE)),
        "bytes of shared memory": shared_bytes(ptx),
        **{name: found[name] for name in CLASSES if name},
        "instructions": len(instructions),
    }


def main() -> None:
    from test_compile import KERNELS, name_of, ptx

    KEPT.write_text(json.dumps({name_of(kernel): counts(ptx(*kernel)) for kernel in KERNELS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
