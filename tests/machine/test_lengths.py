"""Lengths that come as arguments of a kernel, which the machine executes."""

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

import compiled
from kernels import HOPPER, machine

from numba_flash.arrays import Layout
from numba_flash.cuda.launch import Gpu
from numba_flash.cuda.prepare_lengths import MOST, launch_of

pytestmark = pytest.mark.machine

KINDS = {
    "of keys": (None, ("int64", 64)),
    "of queries": (("int32", 5), None),
    "of both": (("uint8", 30), ("int32", 34)),
    "one": (None, ("uint64", 1)),
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_all_lengths_arrive_where_they_belong(kinds):
    room = [kind and np.full(kind[1] + 1, 99, kind[0]) for kind in kinds]
    arrays = [x if x is None else x[:-1] for x in room]
    words = np.random.default_rng(0).integers(0, 99, MOST)
    with machine():
        launch_of([x if x is None else Layout.of(x) for x in arrays], Gpu(0, HOPPER, 2))(*arrays, numbers=words.tobytes())
    first = 0
    for x in room:
        if x is not None:
            np.testing.assert_array_equal(x, [*words[first : first + x.size - 1], 99])
            first += x.size - 1


@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (12, 0)])
def test_it_compiles_to_selections_in_registers(capability):
    kernel = compiled.Kernel("lengths.build", ("int32", "int64", MOST), capability)
    text = compiled.ptx(kernel)
    assert ".local" not in text
    assert text.count("bra") <= 4
    assert compiled.linked(kernel).cubin
