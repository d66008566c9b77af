"""Work items of the persistent kernels, as plain Python: everything is done, once, and nothing beyond the arrays."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SIMULATED

if SIMULATED:
    pytest.skip("the persistent kernels do not run in the CUDA simulator", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the schedule is written with numba-cuda")

import numpy as np

from numba_flash import mask
from numba_flash.arguments.options import PLAIN
from numba_flash.arguments.problem import bind_packed
from numba_flash.cuda.sm90.arguments import Sizes
from numba_flash.cuda.work import grid, row_blocks, schedule

ANY = 2**31
small = st.integers(1, 4)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.tuples(small, small), heads=small, nq=st.integers(1, 300), nk=st.integers(1, 300), low=st.integers(-300, 300),
    width=st.integers(-50, 600), banded=st.booleans(), parts=st.integers(1, 5), section=st.integers(1, 40),
)  # fmt: skip
def test_items_cover_the_problem_once(batch, heads, nq, nk, low, width, banded, parts, section):
    block_m, block_n = 64, 32
    low, high = (low, low + width) if banded else (-nq, nk)
    item = schedule.build_item(PLAIN, banded, parts > 1, block_m, block_n).py_func
    blocks = -(-nq // block_m)
    items = batch[0] * batch[1] * heads * blocks * parts
    shape = (batch[0] * parts, batch[1], heads, nq)  # that of results in parts, one after the other
    sizes = Sizes(items, low, high, columns=nk, kv_splits=parts, group=1, section=section, b0=batch[0])
    seen, tiles = set(), {}
    for index in range(items):
        it = schedule.Item(*map(int, item(index, shape, (), sizes)))
        assert (it.rows_begin, it.columns_begin, it.rows, it.invalid) == (0, 0, nq, 0)
        assert (it.low, it.high, it.count >= 1) == (low, high, True)
        seen.add((it.b0, it.b1, it.head, it.row0, it.kv_split))
        if it.columns:
            assert it.columns == nk
            tiles.setdefault((it.b0, it.b1, it.head, it.row0), []).extend(range(it.first, it.first + it.count))
    rows = range(0, blocks * block_m, block_m)
    everything = {(*b, h, r, p) for b in np.ndindex(batch) for h in range(heads) for r in rows for p in range(parts)}
    assert seen == everything
    for b0, b1, head, row0 in {each[:4] for each in everything}:
        start, stop = mask.kv_range.py_func(row0, min(row0 + block_m, nq), nk, low, high)
        needed = list(range(start // block_n, -(-stop // block_n))) if start < stop else []
        assert sorted(tiles.get((b0, b1, head, row0), [])) == needed


@settings(max_examples=60, deadline=None)
@given(batch=st.tuples(small, small), heads=small, blocks=small, section=st.integers(1, 20))
def test_each_number_is_another_block_of_rows(batch, heads, blocks, section):
    """Of all heads of all batch elements along both axes, whoever numbers them."""
    pairs = batch[0] * batch[1] * heads
    numbered = {
        "one after the other": lambda n: row_blocks.row_block.py_func(n, blocks, heads, batch[1]),
        "in sections": lambda n: row_blocks.row_block_in_sections.py_func(n, blocks, section, pairs, heads, batch[1]),
        "of few queries": lambda n: row_blocks.row_block_of_decode.py_func(n, blocks, heads, batch[1]),
    }
    expected = [(b0, b1, h, n) for b0, b1 in np.ndindex(batch) for h in range(heads) for n in range(blocks)]
    for name, of_number in numbered.items():
        found = [tuple(map(int, of_number(number))) for number in range(pairs * blocks)]
        assert sorted(found) == expected, name
    assert [at[:3] for at in found] == [at[:3] for at in expected], "of few queries, in the order of memory"


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 50), max_size=7), heads=small, block=st.integers(1, 20), keys=st.booleans())
def test_the_grid_of_packed_sequences_has_a_block_for_each_of_theirs(lengths, heads, block, keys):
    """And none that would belong to another head, or to a sequence that there is not."""
    offsets = np.append(0, np.cumsum(lengths, dtype=int))
    total = int(offsets[-1])
    x = np.broadcast_to(np.float16(0), (total, heads, 8))
    problem = bind_packed(x, x, x, offsets, offsets)
    rows, of = (problem.nk, problem.hk) if keys else (problem.nq, problem.hq)
    items = grid.items(problem, rows, of, block)
    seen = []
    for index in range(items):
        at = row_blocks.packed_row_block.py_func(index, offsets, total, block)
        assert (at.b0, 0 <= at.b1 < len(lengths), 0 <= at.head < heads) == (0, True, True)
        if at.block * block < lengths[at.b1]:
            seen.append((int(at.b1), int(at.head), int(at.block)))
    expected = [(b, h, n) for b, length in enumerate(lengths) for h in range(heads) for n in range(-(-length // block))]
    assert sorted(seen) == expected


def test_sections_take_the_last_row_blocks_first():
    item = schedule.build_item(PLAIN, True, False, 64, 64).py_func
    sizes = Sizes(items=15, low=-192, high=0, columns=192, kv_splits=1, group=1, section=2, b0=1)
    order = [item(i, (1, 1, 5, 192), (), sizes) for i in range(15)]
    assert [(int(it.head), int(it.row0)) for it in order] == [
        *((0, 128), (1, 128), (0, 64), (1, 64), (0, 0), (1, 0)),
        *((2, 128), (3, 128), (2, 64), (3, 64), (2, 0), (3, 0)),
        *((4, 128), (4, 64), (4, 0)),
    ]


@pytest.mark.parametrize(("grid", "items"), [(1, 5), (3, 10), (132, 500), (7, 7)])
def test_the_grid_takes_every_item_once(monkeypatch, grid, items):
    taken = []
    for block in range(grid):
        monkeypatch.setattr(schedule, "cuda", SimpleNamespace(blockIdx=SimpleNamespace(x=block)))
        at = schedule.zigzag.py_func(0, grid)
        turn = 0
        while at < items:
            taken.append(int(at))
            turn += 1
            at = schedule.zigzag.py_func(turn, grid)
    assert sorted(taken) == list(range(items))


@pytest.mark.parametrize(("nq", "pairs", "section", "turns"), [(700, 9, 2, 4), (700, 9, 4, 5), (64, 30, 8, 7), (640, 3, 100, 6)])
def test_the_work_of_the_busiest_block_is_foreseen(monkeypatch, nq, pairs, section, turns):
    block_m, block_n = 64, 32
    item = schedule.build_item(PLAIN, True, False, block_m, block_n).py_func
    blocks = -(-nq // block_m)
    items, busiest, work = blocks * pairs, 0, [0] * blocks
    sizes = Sizes(items, low=-nq, high=0, columns=nq, kv_splits=1, group=1, section=section, b0=1)
    for block in range(turns):
        monkeypatch.setattr(schedule, "cuda", SimpleNamespace(blockIdx=SimpleNamespace(x=block)))
        load = 0
        for turn in range(-(-items // turns)):
            at = schedule.zigzag.py_func(turn, turns)
            if at < items:
                it = item(at, (1, 1, pairs, nq), (), sizes)
                work[int(it.row0) // block_m] = int(it.count)
                load += int(it.count)
        busiest = max(busiest, load)
    assert grid.most_work(np.array(work), pairs, section, turns) == busiest


def test_the_section_makes_the_busiest_block_least_busy():
    """Causal N = 1024 with 512 heads: sections of 33 heads leave one of 17 to the end, which gives someone 2 % too much; of those that
    are as good as the best, the smallest is taken.
    """
    problem = SimpleNamespace(nq=1024, nk=1024, batch=(1, 16), hq=32, low=-ANY, high=0, options=PLAIN)
    section = grid.section(problem, 128, 128, 132)
    work = np.arange(1, 9) + grid.ITEM_TILES
    most = lambda section: grid.most_work(work, 512, section, 132)
    best = min(map(most, range(1, 265)))
    assert most(33) > 1.015 * best
    assert section == 44
    assert most(section) <= grid.UNEVEN * best


def test_a_small_section_may_leave_a_little_more_to_one():
    """Causal N = 2048 with 128 heads: with sections of 33 heads the busiest block has 0.3 % more to do than with 66."""
    problem = SimpleNamespace(nq=2048, nk=2048, batch=(1, 8), hq=16, low=-ANY, high=0, options=PLAIN)
    work = np.arange(1, 17) + grid.ITEM_TILES
    assert grid.most_work(work, 128, 66, 132) < grid.most_work(work, 128, 33, 132)
    assert grid.section(problem, 128, 128, 132) == 33


def test_heads_of_few_row_blocks_have_small_sections():
    """Causal N = 512 with 512 heads: a section of 6 leaves 2 % more to one, and its keys are read once."""
    problem = SimpleNamespace(nq=512, nk=512, batch=(1, 32), hq=16, low=-ANY, high=0, options=PLAIN)
    work = np.arange(1, 5) + grid.ITEM_TILES
    assert grid.most_work(work, 512, 6, 132) > grid.UNEVEN * grid.most_work(work, 512, 44, 132)
    assert grid.section(problem, 128, 128, 132) == 6


def test_sections_are_multiples_of_a_sixth_of_the_gpu():
    """Causal N = 4096 with 8 heads, which no section splits: the first that is tried and has room for all of them."""
    problem = SimpleNamespace(nq=4096, nk=4096, batch=(1, 1), hq=8, low=-ANY, high=0, options=PLAIN)
    assert grid.section(problem, 128, 128, 132) == 132 // 6
