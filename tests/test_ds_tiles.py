"""dS between the two kernels of the backward pass for head dimensions beyond 128: what one writes is what the other reads, and it fits."""

import math

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator has no tensor cores", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the schedule is written with numba-cuda")

from numba_flash import spec
from numba_flash.cuda import schedule, sm90_backward
from numba_flash.options import PLAIN

TILE = sm90_backward.WideTile()


def tiles(block_m, block_n, nq, nk, low, high, transposed) -> set[tuple[int, int]]:
    """(row block, block of others) of every tile that a work item visits, but those of items in which everything is hidden."""
    item = schedule.build_item(PLAIN, True, False, block_m, block_n, None, None, transposed).py_func
    blocks, found = -(-nq // block_m), set()
    for index in range(blocks):
        (*_, row0), (_, _, _, keys, *_), (first, count, _) = item(index, (1, 1, 1, nq), (), (blocks, low, high, nk, 1, 1, 1, 1))
        found |= {(row0 // block_m, first + t) for t in range(count)} if keys else set()
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_tile_that_is_read_has_been_written(seed):
    rng = np.random.default_rng(seed)
    nq, nk = (int(n) for n in rng.integers(1, 1500, 2))
    low, high = (-nq, nk) if seed % 5 == 0 else sorted(int(n) for n in rng.integers(-nq - 10, nk + 10, 2))
    written = tiles(TILE.block_n, TILE.block_m, nk, nq, -high, -low, transposed=True)
    read = tiles(TILE.block_m, TILE.block_n, nq, nk, low, high, transposed=False)
    assert {(row, column) for column, row in written} == read


@pytest.mark.parametrize("length", [64, 1000, 16_384, 1_000_000])
@pytest.mark.parametrize("heads", [1, 8, 200])
def test_ds_of_some_blocks_of_keys_fits(length, heads):
    """It takes all of the keys, in parts of equal size, at most WORKSPACE bytes at a time, unless that is less than a few blocks."""
    x = np.broadcast_to(np.float16(0), (heads, length, 256))
    p = spec.bind(x, x, x)
    grid = sm90_backward._row_blocks(p, TILE)
    blocks, parts = sm90_backward._parts(p, TILE, math.prod(grid))
    assert (parts - 1) * blocks < -(-length // TILE.block_n) <= parts * blocks
    *_, (_, shape, _) = sm90_backward._temporaries(p, TILE, grid)
    assert 4 * math.prod(shape) == math.prod(grid) * blocks * 128 * 64 * 2
    assert 4 * math.prod(shape) <= sm90_backward.WORKSPACE or blocks <= sm90_backward.FEWEST_BLOCKS
