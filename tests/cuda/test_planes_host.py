"""Which heads of float32 can be split, and who looks at which rows: the functions of the pre-pass as plain Python, with no GPU."""

from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator has no tensor cores", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the kernels are written with numba-cuda")

from support.on_host import AS_IT_IS, on_host

from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import ForwardInputs, bind
from numba_flash.cuda.passes import write_planes
from numba_flash.cuda.passes.prepare_planes import PlanesWriter
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.cuda.sm80.short_heads import head_planes

LEAST, INF = 2.0**-149, np.inf  # of float32
TOP, FARTHEST, WIDEST = 13, 50, 24  # 2^(-2 (13 + 50)) is the least normal number; planes keep 2^-22 of what is 2^-27 of the largest


def bits(x: float) -> int:
    return int(np.float32(x).view(np.int32))


@pytest.mark.parametrize(
    ("most", "least", "exponent"),
    [
        (1.0, 1.0, TOP),
        (1.99, 1.0, TOP),
        (2.0**FARTHEST * 1.99, 2.0**FARTHEST, TOP - FARTHEST),
        (2.0**-FARTHEST, 2.0**-FARTHEST, TOP + FARTHEST),
        (1.0, 2.0**-WIDEST, TOP),
        (1.99, 2.0**-WIDEST, TOP),
        (2.0 ** (FARTHEST + 1), 2.0 ** (FARTHEST + 1), None),
        (1.99 * 2.0 ** -(FARTHEST + 1), 2.0 ** -(FARTHEST + 1), None),
        (1.0, 1.99 * 2.0 ** -(WIDEST + 1), None),
        (LEAST, LEAST, None),
        (INF, 1.0, None),
        (np.nan, 1.0, None),
        (0.0, INF, 0),  # zeros alone: the kernel begins with Inf as the least
    ],
)
def test_heads_that_can_be_split(most, least, exponent):
    """Those of a number that is not too far from 1, whose rows are not too far below it; others are flagged."""
    with on_host(write_planes):
        found = write_planes.summary_of(bits(most), bits(least))
    assert found == ((0, 1) if exponent is None else (exponent, 0))


def test_powers_of_heads_that_can_be_split_are_undone_in_float32():
    """The least factor of two arrays together is no subnormal number."""
    assert 2.0 ** (-2 * (write_planes.TOP + write_planes.FARTHEST)) >= np.finfo(np.float32).tiny
    x = np.float32(1 + 2.0**-11 + 2.0**-22) * np.float32(2.0 ** (write_planes.TOP - write_planes.WIDEST))
    high = np.float16(x)
    low = np.float16((x - np.float32(high)) * np.float32(2.0**11))
    assert abs(np.float64(high) + np.float64(low) * 2.0**-11 - np.float64(x)) <= 2.0**-22 * x


@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (300, 100), (1, 8448), (8449, 3), (20_000, 100_000)])
def test_every_piece_of_a_head_is_looked_at_again(nq, nk):
    """A lane of the second kernel reads each of the pieces that the first one made; both have a block for everything."""
    q, k = np.broadcast_to(np.float32(0), (1, 1, nq, 64)), np.broadcast_to(np.float32(0), (1, 1, nk, 64))
    problem = bind(q, k, k)
    splitter = PlanesWriter(problem, Gpu(0, (9, 0), 132), ForwardInputs(*map(Layout.of, (q, k, k))), (64, 64))
    (parts, pieces, _), (statistics, planes) = splitter.made.extremes.shape, splitter.launches
    assert (statistics.grid, planes.grid) == (parts * pieces, parts * -(-max(nq, nk) // write_planes.ROWS))
    extremes = np.arange(1, 1 + parts * pieces * 2).reshape(parts, pieces, 2)
    for part, first in product(range(parts), (0, 1)):
        seen = set()
        for lane in range(32):
            own = {"warp_maximum": AS_IT_IS, "warp_minimum": AS_IT_IS, "summary_of": lambda *found: found}
            with on_host(write_planes, cuda=SimpleNamespace(threadIdx=SimpleNamespace(x=lane)), **own):
                seen.add(write_planes.summarise(extremes, part, 1)[first])
        assert set(extremes[part, :, first].tolist()) <= seen


@pytest.mark.parametrize(
    ("largest", "most", "flagged"),
    [
        (2.0**FARTHEST, 127, 0),
        (2.0**-FARTHEST, 127, 0),
        (2.0 ** (FARTHEST + 1), 127, 1),
        (1.99 * 2.0 ** -(FARTHEST + 1), 127, 1),
        (1.99 * 2.0**5, 5, 0),
        (2.0**6, 5, 1),
        (0.0, 127, 0),
        (INF, 127, 1),
    ],
)
def test_rows_of_short_heads_that_can_be_split(largest, most, flagged):
    """Each row has a power of its own, which brings its largest number to 2^13 and is undone."""
    no_gpu = SimpleNamespace(shfl_xor_sync=lambda lanes, x, distance: x)
    ptx = SimpleNamespace(as_float32=lambda x: np.uint32(x).view(np.float32), fetch=lambda n: None, repeated=lambda n, of: None)
    with on_host(head_planes, write_planes, cuda=no_gpu, ptx=ptx):
        _, power_of, _ = head_planes.build_rows(1, 8)
        raw, up, down = [*np.float32((largest, -largest / 2) * 8).view(np.uint32)], [None] * 2, [None] * 2
        assert power_of(raw, up, down, most) == flagged
    for row in range(2):
        assert up[row] * down[row] == 1
        assert flagged or largest == 0 or 2.0**TOP <= abs(largest) * up[row] < 2.0 ** (TOP + 1)
