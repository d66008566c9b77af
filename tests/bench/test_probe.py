"""`asv_bench/benchmarks/probe.py`: how memory is measured on a GPU, and on paper, where there is none."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from support.asv_suite import probe

from numba_flash.bench import timing


class ArrayOnPaper:
    """So many bytes of a block [bytes, bytes in use]."""

    def __init__(self, block: list[int], size: int):
        self.block, self.size = block, size
        block[1] += size

    def __del__(self):
        self.block[1] -= self.size


class PoolOnPaper:
    """A CuPy memory pool that takes no memory: a request is met from a block that has room, or from a new block of its size."""

    def __init__(self):
        self.blocks = []

    def malloc(self, size: int) -> ArrayOnPaper:
        block = next((block for block in self.blocks if block[0] - block[1] >= size), None)
        if block is None:
            self.blocks.append(block := [size, 0])
        return ArrayOnPaper(block, size)

    def free_all_blocks(self):
        self.blocks = [block for block in self.blocks if block[1]]

    def total_bytes(self) -> int:
        return sum(size for size, _ in self.blocks)

    def used_bytes(self) -> int:
        return sum(used for _, used in self.blocks)


def clock_on_paper():
    """And what allocates where it tells time."""
    default = PoolOnPaper()
    allocators = [default.malloc]

    @contextmanager
    def using_allocator(malloc):
        allocators.append(malloc)
        yield
        allocators.pop()

    cuda = SimpleNamespace(MemoryPool=PoolOnPaper, using_allocator=using_allocator)
    xp = SimpleNamespace(get_default_memory_pool=lambda: default, cuda=cuda)
    return SimpleNamespace(place="gpu", xp=xp, wait=lambda: None), lambda size: allocators[-1](size)


def clock_of_the_gpu():
    clock = timing.GpuClock()
    return clock, lambda size: clock.xp.zeros(size, "uint8")


@pytest.mark.parametrize("where", [clock_on_paper, pytest.param(clock_of_the_gpu, marks=pytest.mark.gpu)])
def test_memory_of_a_call(where):
    """Room in the default pool, in a block that is in use, does not hide it; what is freed on the way is used again."""
    clock, allocate = where()
    default, size = clock.xp.get_default_memory_pool(), 2**24
    default.free_all_blocks()
    allocate(4 * size)
    held = allocate(size)
    default.free_all_blocks()
    assert default.total_bytes() - default.used_bytes() >= 3 * size

    def run():
        first, second = allocate(size), allocate(size)
        del first
        return second, allocate(size)

    assert probe.growth_during(run, clock) == 2 * size
    with pytest.raises(RuntimeError, match="keeps arrays"):
        probe.growth_during(lambda kept=[]: kept.append(allocate(size)), clock)
    del held
