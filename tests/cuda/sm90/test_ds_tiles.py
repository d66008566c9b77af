"""dS between the two kernels of the backward pass for head dimensions beyond 128: what one writes is what the other reads, and it fits."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from types import CellType, FunctionType, SimpleNamespace

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator has no tensor cores", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the schedule is written with numba-cuda")

from numba_flash.cuda.sm90 import dq as dq_sm90
from numba_flash.cuda.sm90 import load as movers_sm90
from numba_flash.cuda.sm90 import prepare_backward as sm90_backward
from numba_flash.options import PLAIN, Options
from numba_flash.problem import Problem, bind

TILE = sm90_backward.WideTile()
BLOCK_M, BLOCK_N, MULTIPROCESSORS = TILE.block_m, TILE.block_n, 132


def plain(function, captured=None, **globals_):
    """A device function, and those that it has captured, as Python functions with some other globals, and others in place of `captured`."""
    function = getattr(function, "py_func", function)
    found = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    values = ((captured or {}).get(name, cell.cell_contents) for name, cell in found.items())
    cells = tuple(CellType(plain(x, **globals_) if hasattr(x, "py_func") else x) for x in values)
    return FunctionType(function.__code__, function.__globals__ | globals_, function.__name__, function.__defaults__, cells)


def described(module, describe, shape, arrays, extras, sizes, events=None) -> list[dict]:
    """The work items, by the names of their words, that `describe` writes down for the only block of a grid.

    `events` gets what else it does, in order: ("claim", byte of the array of flags), ("ready", ring, n) for each wait, ("publish",).
    """
    items, slot, events = [], {}, [] if events is None else events

    def claim(address):
        events.append(("claim", int(address)))
        return np.int32(sum(what == "claim" for what, *_ in events) - 1)

    def publish(*_):
        events.append(("publish",))
        items.append(dict(slot))

    replaced = {
        "pipeline": SimpleNamespace(
            wait_free=lambda *_: None,
            wait_ready=lambda smem, ring, n: events.append(("ready", tuple(map(int, ring)), int(n))),
            write=lambda smem, ring, n, word, value: slot.__setitem__(int(word), int(value)),
            publish=publish,
        ),
        "ptx": SimpleNamespace(global_address=lambda array: 0, next_number=claim),
        "schedule": SimpleNamespace(snake=lambda turn, blocks: np.int32(turn)),
        "cuda": SimpleNamespace(gridDim=SimpleNamespace(x=1), blockIdx=SimpleNamespace(x=0)),
        "packed_item": movers_sm90.schedule.packed_item.py_func,
    }
    plain(describe, **replaced)(0, SimpleNamespace(shape=shape), *arrays, extras, sizes)
    names = {int(word): name for name, word in vars(module).items() if isinstance(word, np.uint32)}
    return [{names[word]: value for word, value in item.items()} for item in items[:-1]]


class OnGpu(np.ndarray):
    """A host array that says where on a GPU it lies."""

    data = SimpleNamespace(device_id=0, ptr=0)


class Traffic:
    """Who writes and reads which tile of dS of a problem, as (row block's number, block of keys), part after part."""

    def __init__(self, p, extras, blocks):
        lengths = 1 if p.options.packed else p.batch[1]
        *_, self.row_blocks = grid = sm90_backward._row_blocks(p, TILE)
        self.numbers, self.group, self.blocks = math.prod(grid), p.hq // p.hk, blocks
        main, *_ = movers_sm90.build(256, 256, True, False, p.options, TILE)
        kernel, *_ = dq_sm90.build(p.dtype, 256, True, False, p.options, TILE)
        after = dict(zip(kernel.__code__.co_freevars, kernel.__closure__, strict=True))["describe"].cell_contents
        lse2 = SimpleNamespace(shape=(*grid[:3], grid[3] * BLOCK_M))
        key_blocks = sm90_backward._key_blocks(p, TILE)
        items = key_blocks * p.hk * (1 if p.options.packed else math.prod(p.batch))
        self.of_keys, self.of_queries = [], []
        for first in range(0, key_blocks, blocks):
            sizes = items, -p.high, -p.low, p.nq, 1, self.group, 3, p.batch[0], first, blocks
            self.of_keys.append(described(movers_sm90, main, (p.batch[0], lengths, p.hk, p.nk), (lse2, None), extras, sizes))
            sizes = self.numbers, p.low, p.high, p.nk, 1, p.hk, 3, p.batch[0], first, blocks
            shape = p.batch[0], lengths, p.hq, p.nq
            self.of_queries.append(described(dq_sm90, after, shape, (lse2,), extras, sizes))

    def written(self, part, seen=0) -> Counter:
        """By items that see at least so many queries; one that sees none writes a tile, too."""
        return Counter(
            (item["BASE"] + g * self.row_blocks + item["FIRST"] + t, item["ROW0"] // BLOCK_N)
            for item in self.of_keys[part]
            if item["QUERIES"] >= seen
            for g, t in itertools.product(range(self.group), range(item["COUNT"]))
        )

    def read(self, part) -> Counter:
        return Counter((item["NUMBER"], item["FIRST"] + t) for item in self.of_queries[part] for t in range(item["COUNT"]))


def draw(rng, kind: str):
    """A problem, and the lengths or offsets that its kernels get."""
    batch, hk, group, (nq, nk) = int(rng.integers(1, 4)), int(rng.integers(1, 3)), int(rng.integers(1, 4)), rng.integers(1, 900, 2)
    low, high = (-nq, nk) if rng.random() < 0.3 else sorted(rng.integers(-nq - 10, nk + 10, 2).clip(-nq, nk))
    p = Problem((1, batch), group * hk, hk, int(nq), int(nk), 256, 256, "float16", 0.1, int(low), int(high), PLAIN)
    follows = bool(rng.integers(2))
    if kind == "plain":
        return p, ()
    if kind == "packed":
        offsets = tuple(np.array([0, *sorted(rng.integers(0, n + 1, batch - 1)), n]) for n in (nq, nk))
        return replace(p, options=Options(q_lengths="int64", kv_lengths="int64", packed=True, follows=follows)), offsets
    lengths = tuple(rng.integers(0, n + 1, (1, batch)) for n in (nq, nk))
    return replace(p, options=Options(q_lengths="int64", kv_lengths="int64", follows=follows)), lengths


@pytest.mark.parametrize("kind", ["plain", "lengths", "packed"])
@pytest.mark.parametrize("seed", range(12))
def test_every_tile_that_is_read_has_been_written(kind, seed):
    """In the same part, by one work item alone, and where there is room for it."""
    rng = np.random.default_rng(seed)
    p, extras = draw(rng, kind)
    blocks = int(rng.integers(1, sm90_backward._key_blocks(p, TILE) + 1))
    traffic = Traffic(p, extras, blocks)
    for part in range(len(traffic.of_keys)):
        written, read, first = traffic.written(part), traffic.read(part), part * blocks
        assert read == traffic.written(part, seen=1)
        assert {*written.values(), *read.values()} <= {1}
        assert all(0 <= number < traffic.numbers and first <= block < first + blocks for number, block in written)


@pytest.mark.parametrize("kind", ["plain", "lengths", "packed"])
@pytest.mark.parametrize("seed", range(6))
def test_a_sum_begins_and_ends_once(kind, seed):
    """Whatever of it there is in each part; and so does that of a row block that sees nothing."""
    rng = np.random.default_rng(seed)
    p, extras = draw(rng, kind)
    traffic, begun, ended = Traffic(p, extras, int(rng.integers(1, 5))), set(), set()
    for item in itertools.chain(*traffic.of_queries):
        number = item["NUMBER"]
        assert (number in begun) != item["BEGINS"]
        assert number not in ended
        begun.add(number)
        ended |= {number} if item["ENDS"] else set()
    assert begun == ended == set(range(traffic.numbers))


IMPOSSIBLE = [(3, [0, 70, 200, 207, 500]), (0, [-300, 70, 200, 207, 400]), (1, [0, 70, -64, -64, 400]), (2, [0, 70, 200, 10, 400])]


@pytest.mark.parametrize(("sequence", "offsets"), IMPOSSIBLE)
@pytest.mark.parametrize("side", ["queries", "keys"])
def test_an_impossible_sequence_touches_nothing_of_the_others(side, sequence, offsets):
    """It has no rows, and so no tile of dS and no sum of dQ."""
    fine = [0, 70, 200, 207, 400]
    both = (np.array(offsets), np.array(fine)) if side == "queries" else (np.array(fine), np.array(offsets))
    options = Options(q_lengths="int64", kv_lengths="int64", packed=True, follows=True)
    p = Problem((1, 4), 2, 1, 400, 400, 256, 256, "float16", 0.1, -400, 400, options)
    traffic = Traffic(p, both, 2)
    for part in range(len(traffic.of_keys)):
        assert set(traffic.written(part).values()) <= {1}
        numbers = [item["NUMBER"] for item in traffic.of_queries[part]]
        assert len(numbers) == len(set(numbers))
        assert all(0 <= number < traffic.numbers for number in numbers)


@pytest.mark.parametrize(("d", "dv"), [(256, 256), (192, 128), (136, 8), (8, 136), (200, 256)])
def test_shared_memory_is_laid_out_without_overlaps(d, dv):
    layout, after = TILE.layout(d, dv), TILE.dq_layout(d)
    rows = [(layout.p, TILE.ds_bytes), (layout.ds, TILE.ds_bytes), *((at, 4 * BLOCK_M) for at in (layout.lse, layout.delta))]
    for shared, names, pieces in (
        (layout, ("q", "do", "k", "v", "work"), [*rows, (layout.bounds, 16 * TILE.consumers)]),
        (after, ("tiles", "work"), [(after.o, TILE.consumers * 2 * 64 * 128)]),
    ):
        for name in names:
            slots, slot_bytes, count, ready, free = getattr(shared, name)
            assert name == "work" or slots % shared.ALIGNMENT == slot_bytes % shared.ALIGNMENT == 0, "panels begin at multiples of 1024"
            pieces += [(slots, slot_bytes * count), (ready, 8 * count), (free, 8 * count)]
        pieces.sort()
        assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(pieces))
        assert sum(pieces[-1]) + shared.ALIGNMENT <= shared.bytes
    assert layout.lse % 16 == layout.delta % 16 == layout.p % 1024 == layout.ds % 1024 == after.o % 1024 == 0
    assert after.tiles[2] >= 2, "one is on its way while another is read"


@pytest.mark.parametrize("length", [64, 1000, 16_384, 1_000_000])
@pytest.mark.parametrize(("heads", "heads_kv"), [(1, 1), (8, 8), (8, 1), (20, 20), (200, 200)])
def test_ds_of_some_blocks_of_keys_fits(length, heads, heads_kv):
    """It takes all of the keys, in parts of equal size: WORKSPACE bytes at most, or as much as keeps everyone busy, or a few blocks."""
    q, k = (np.broadcast_to(np.float16(0), (h, length, 256)) for h in (heads, heads_kv))
    p = bind(q, k, k)
    grid = sm90_backward._row_blocks(p, TILE)
    blocks, parts = sm90_backward._parts(p, TILE, math.prod(grid), MULTIPROCESSORS)
    assert (parts - 1) * blocks < -(-length // BLOCK_N) <= parts * blocks
    *_, (_, shape, _) = sm90_backward._temporaries(p, TILE, grid, MULTIPROCESSORS)
    size = 4 * math.prod(shape)
    assert size == math.prod(grid) * blocks * BLOCK_M * BLOCK_N * 2
    few, busy = blocks <= sm90_backward.FEWEST_BLOCKS, blocks * heads_kv < MULTIPROCESSORS + heads_kv
    assert size <= sm90_backward.WORKSPACE or few or (busy and size <= sm90_backward.MOST_WORKSPACE)


def test_parts_fill_turns_of_the_multiprocessors():
    """20 heads: 13 blocks of keys at a time are two turns, where the 20 that there is room for would be four, one of them nearly empty."""
    x = np.broadcast_to(np.float16(0), (20, 20_480, 256))
    p = bind(x, x, x)
    blocks, parts = sm90_backward._parts(p, TILE, math.prod(sm90_backward._row_blocks(p, TILE)), MULTIPROCESSORS)
    turns = parts * -(-blocks * 20 // MULTIPROCESSORS)
    assert turns <= 1.05 * 320 * 20 / MULTIPROCESSORS


def test_each_part_has_its_blocks_of_keys(monkeypatch):
    """Every launch gets as many arrays as it has maps, operands and lengths; kernels are prepared once for all parts."""
    made, calls = [], []

    def record(builder, config, **keywords):
        made.append(SimpleNamespace(builder=builder, **keywords))
        return lambda *operands, parameters=(), launch=made[-1]: calls.append((launch, operands, parameters))

    monkeypatch.setattr(sm90_backward.launch, "Launch", record)
    monkeypatch.setattr(sm90_backward.launch, "multiprocessors", lambda device: MULTIPROCESSORS)
    for name, value in {"FEWEST_BLOCKS": 3, "WORKSPACE": 0, "MOST_WORKSPACE": 0}.items():
        monkeypatch.setattr(sm90_backward, name, value)
    monkeypatch.setattr(sm90_backward.arrays, "compact", lambda name, shape, dtype: np.empty(shape, dtype).view(OnGpu))
    q, k = (np.zeros((1, 2, h, 500, 256), np.float16).view(OnGpu) for h in (4, 2))
    lse, lengths = np.zeros(q.shape[:-1], np.float32).view(OnGpu), np.array([[500, 3]]).view(OnGpu)
    inputs, results = (q, q, k, k, q, lse, None, None, None, None, lengths), (q, k, k, None)
    p = bind(q, k, k, kv_lengths=lengths)
    sm90_backward.prepare(p, inputs, results, True)(inputs, results)
    assert [each.builder for each in made] == ["sm90.preprocess.build_prepare", TILE.kernel, "sm90.dq.build"]
    assert len(calls) == 1 + 2 * 3
    for launch, operands, parameters in calls[1:]:
        assert len(operands) == len(launch.maps) + len(launch.operands) + len(launch.extras)
        assert launch.scalars[-2:] + launch.parameters == (0, *parameters[1:])
    assert [parameters[:2] for *_, parameters in calls[1:]] == [(0, 3), (0, 3), (3, 3), (3, 3), (6, 3), (6, 3)]
