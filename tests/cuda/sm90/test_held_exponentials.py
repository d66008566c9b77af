"""Exponentials of P that `ptx.hold` keeps before the wait for the product that runs meanwhile, in machine code; with no GPU."""

import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")
pytest.importorskip("cuda.core", reason="linking kernels needs cuda-core")

import compiled
from compiled import Kernel, disassembler
from sm90_kernels import FORWARD

HELD = [name for name in FORWARD if name.endswith("held")]


@pytest.mark.full
@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", HELD)
def test_exponentials_stand_before_the_wait(name):
    """Between the wait for S and the next wait are all exponentials of a tile; else ptxas puts most behind that."""
    *_, tile = FORWARD[name]
    found = compiled.machine_instructions(compiled.machine_text(Kernel("sm90.forward.build", FORWARD[name])))
    events = [each for each in found if each.startswith(("HGMMA", "WARPGROUP.DEPBAR", "MUFU.EX2"))]
    parts, exponentials = [], 0  # how many there are between two events, and which the second is
    for each in events:
        if each.startswith("MUFU"):
            exponentials += 1
        elif exponentials:
            parts.append((exponentials, each.split(".")[0]))
            exponentials = 0
    held = [part for part in parts if part[1] == "WARPGROUP"]
    assert len(held) == 1
    assert held[0][0] >= tile.block_n // 2
