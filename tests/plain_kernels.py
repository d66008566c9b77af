"""What the `simt` kernels of plain attention are made of, counted in their PTX. The counts that are kept are written anew by

    python tests/plain_kernels.py

after a kernel was changed on purpose: the difference in `data/plain_kernels.json` is what the change costs.
"""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path

from numba_flash.cuda import compile
from numba_flash.cuda.simt import tier as simt
from numba_flash.options import PLAIN, Options

H200 = (9, 0)

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


# Every tile of simt.TILES at the head dimension it was made for, every dtype in every kernel, and head dimensions that fill no tile.
FORWARD = [
    ("float32", 64, 64), ("float32", 128, 128), ("float32", 256, 256), ("float64", 64, 64), ("float64", 128, 128), ("float64", 256, 256),
    ("float16", 128, 128), ("bfloat16", 64, 64), ("float32", 40, 96),
]  # fmt: skip
DKDV = [
    ("float32", 64, 64), ("float32", 128, 128), ("float32", 256, 256), ("float64", 128, 128), ("float64", 256, 256),
    ("float16", 64, 64), ("bfloat16", 128, 128),
]  # fmt: skip
DQ = [
    ("float32", 64, 64), ("float32", 128, 128), ("float32", 256, 256), ("float64", 128, 128), ("float64", 256, 256),
    ("float16", 128, 128), ("bfloat16", 33, 1),
]  # fmt: skip


def kernel(name: str, dtype: str, d: int, dv: int, write_lse: bool = True, options: Options = PLAIN) -> tuple[str, tuple]:
    """Builder and configuration, as `simt.prepare_forward` and `simt.prepare_backward` make them."""
    if name == "delta":
        return "delta.build", (dtype, dv, False, simt.DELTA_LANES, simt.DELTA_ROWS)
    tile = simt.tile_for("dq" if name == "dbias" else name, dtype, max(d, dv))
    if name == "forward":
        return "simt.forward.build", (dtype, d, dv, write_lse, options, tile)
    if name == "dbias":
        return "simt.dbias.build", (dtype, d, dv, options, options.bias, (True, False, True, False, True), tile)
    return f"simt.backward.build_{name}", (dtype, d, dv, options, tile)


KERNELS = (
    [("forward", *sizes) for sizes in FORWARD]
    + [("forward", "bfloat16", 256, 256, False)]
    + [("dkdv", *sizes) for sizes in DKDV]
    + [("dq", *sizes) for sizes in DQ]
    + [("delta", dtype, 64, 64) for dtype in ("float16", "bfloat16", "float32", "float64")]
)


def name_of(chosen: tuple) -> str:
    return "-".join(map(str, chosen))


@cache
def ptx(*chosen) -> str:
    return compile.intermediate(*kernel(*chosen), H200)


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
    KEPT.write_text(json.dumps({name_of(kernel): counts(ptx(*kernel)) for kernel in KERNELS}, indent=1) + "\n")


if __name__ == "__main__":
    main()
