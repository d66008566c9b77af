"""The loop of the causal forward pass that asks no tile whether it hides keys, in machine code; with no GPU."""

from itertools import pairwise

import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")
pytest.importorskip("cuda.core", reason="linking kernels needs cuda-core")

import compiled
from compiled import Kernel, disassembler
from sm90_kernels import FORWARD

CAUSAL = [name for name in FORWARD if name.endswith("-above")]


@pytest.mark.full
@pytest.mark.skipif(disassembler() is None, reason="there is no nvdisasm (nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("name", CAUSAL)
def test_a_softmax_begins_before_the_wait_for_o(name):
    """In some loop all maxima of a tile, and some exponentials, stand between the wait for S and that for O; else nothing overlaps O."""
    tile = FORWARD[name].tile
    found = compiled.machine_instructions(compiled.machine_text(Kernel("sm90.forward.forward.build", (FORWARD[name],))))
    events = [each for each in found if each.startswith(("HGMMA", "WARPGROUP.DEPBAR", "FMNMX", "MUFU.EX2"))]
    waits = [i for i, each in enumerate(events) if each.startswith("WARPGROUP")]
    between = [events[i:j] for i, j in pairwise(waits) if not any(each.startswith("HGMMA") for each in events[i:j])]
    count = lambda part, name: sum(each.startswith(name) for each in part)
    assert any(count(part, "FMNMX") >= tile.block_n // 2 and count(part, "MUFU") > 2 for part in between)
