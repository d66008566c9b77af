"""dS between the two kernels of the backward pass for head dimensions beyond 128: what one writes is what the other reads, and it fits."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator has no tensor cores", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the schedule is written with numba-cuda")

from support.on_host import on_host

from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.options import PLAIN, Options
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, ForwardInputs, Problem, bind
from numba_flash.cuda.arguments import build_extras
from numba_flash.cuda.runtime.launch import Gpu, Launch
from numba_flash.cuda.sm90 import tier
from numba_flash.cuda.sm90.arguments import END, Sizes
from numba_flash.cuda.sm90.backward import load_backward, prepare_temporaries
from numba_flash.cuda.sm90.backward.backward_tiles import WIDE_DQ_TILE, WideTile
from numba_flash.cuda.sm90.dq import dq
from numba_flash.cuda.work import grid

TILE = WideTile()
BLOCK_M, BLOCK_N, MULTIPROCESSORS = TILE.block_m, TILE.block_n, 132


def described(module, build, arrays, extras, sizes, events=None) -> list:
    """The work items, by name, that the function of ``build()``, a builder of a module, writes down for the only block of a grid.

    `events` gets what else it does, in order: ("claim", byte of the array of flags), ("ready", ring, n) for each wait, ("commit",).
    """
    items, slot, events = [], {}, [] if events is None else events

    def claim(address):
        events.append(("claim", int(address)))
        return np.int32(sum(what == "claim" for what, *_ in events) - 1)

    def commit(*_):
        events.append(("commit",))
        items.append(dict(slot))

    stand_ins = {
        "pipeline": SimpleNamespace(
            wait_free=lambda *_: None,
            wait_ready=lambda smem, ring, n: events.append(("ready", tuple(map(int, ring)), int(n))),
            write=lambda smem, ring, n, word, value: slot.__setitem__(int(word), int(value)),
            commit=commit,
        ),
        "ptx": SimpleNamespace(global_address=lambda array: 0, next_number=claim),
        "cuda": SimpleNamespace(gridDim=SimpleNamespace(x=1), blockIdx=SimpleNamespace(x=0)),
    }
    with on_host(module, **stand_ins):
        build()(0, *arrays, extras, sizes)
    *items, last = items
    assert last[int(module.WORD.count)] == END
    return [module.WORD._make(item[int(word)] for word in module.WORD) for item in items]


class Traffic:
    """Who writes and reads which tile of dS of a problem, as (row block's number, block of keys), part after part."""

    def __init__(self, p, extras, blocks):
        lengths = 1 if p.options.packed else p.batch[1]
        row_blocks = prepare_temporaries.row_blocks_of(p, TILE)
        self.row_blocks, self.numbers, self.group = row_blocks.blocks, math.prod(row_blocks), p.hq // p.hk
        of_keys = lambda: load_backward.build_write_work(True, False, p.options, TILE, TILE.layout(256, 256)).write_work
        of_queries = lambda: dq.build_write_work(True, p.options, TILE, WIDE_DQ_TILE.layout(256))
        lse2 = SimpleNamespace(shape=(*row_blocks[:3], row_blocks.blocks * BLOCK_M))
        dk, dq_array = (SimpleNamespace(shape=(p.batch[0], lengths, heads, n)) for heads, n in ((p.hk, p.nk), (p.hq, p.nq)))
        self.of_keys, self.of_queries = [], []
        for first in range(0, grid.blocks(p, p.nk, BLOCK_N), blocks):
            same = {"kv_splits": 1, "group": self.group, "section": 3, "b0": p.batch[0], "first_block": first, "blocks": blocks}
            sizes = Sizes(items=grid.items(p, p.nk, p.hk, BLOCK_N), low=-p.high, high=-p.low, columns=p.nq, **same)
            self.of_keys.append(described(load_backward, of_keys, (dk, lse2, None), extras, sizes))
            sizes = Sizes(items=self.numbers, low=p.low, high=p.high, columns=p.nk, **same)
            self.of_queries.append(described(dq, of_queries, (dq_array, lse2), extras, sizes))

    def written(self, part, seen=0) -> Counter:
        """By items that see at least so many queries; one that sees none writes a tile, too."""
        return Counter(
            (item.base + g * self.row_blocks + (~item.first - t), item.row0 // BLOCK_N)
            for item in self.of_keys[part]
            if item.queries >= seen
            for g, t in itertools.product(range(self.group), range(item.count))
        )

    def read(self, part) -> Counter:
        return Counter((item.number, item.first + t) for item in self.of_queries[part] for t in range(item.count))


def lengths_of(p, q_lengths, kv_lengths):
    """Lengths or offsets, as kernels get them."""
    return build_extras(p.options)(ForwardInputs(None, None, None, q_lengths=q_lengths, kv_lengths=kv_lengths))


def draw(rng, kind: str):
    """A problem, and the lengths or offsets that its kernels get."""
    batch, hk, group, (nq, nk) = int(rng.integers(1, 4)), int(rng.integers(1, 3)), int(rng.integers(1, 4)), rng.integers(1, 900, 2)
    low, high = (-nq, nk) if rng.random() < 0.3 else sorted(rng.integers(-nq - 10, nk + 10, 2).clip(-nq, nk))
    p = Problem((1, batch), group * hk, hk, int(nq), int(nk), 256, 256, "float16", 0.1, int(low), int(high), PLAIN)
    follows = bool(rng.integers(2))
    if kind == "plain":
        return p, ()
    if kind == "packed":
        lengths = (np.array([0, *sorted(rng.integers(0, n + 1, batch - 1)), n]) for n in (nq, nk))
    else:
        lengths = (rng.integers(0, n + 1, (1, batch)) for n in (nq, nk))
    p = replace(p, options=Options(q_lengths="int64", kv_lengths="int64", packed=kind == "packed", follows=follows))
    return p, lengths_of(p, *lengths)


@pytest.mark.parametrize("kind", ["plain", "lengths", "packed"])
@pytest.mark.parametrize("seed", range(12))
def test_every_tile_that_is_read_has_been_written(kind, seed):
    """In the same part, by one work item alone, and where there is room for it."""
    rng = np.random.default_rng(seed)
    p, extras = draw(rng, kind)
    blocks = int(rng.integers(1, grid.blocks(p, p.nk, BLOCK_N) + 1))
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
        assert (item.number in begun) != item.begins
        assert item.number not in ended
        begun.add(item.number)
        ended |= {item.number} if item.ends else set()
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
    traffic = Traffic(p, lengths_of(p, *both), 2)
    for part in range(len(traffic.of_keys)):
        assert set(traffic.written(part).values()) <= {1}
        numbers = [item.number for item in traffic.of_queries[part]]
        assert len(numbers) == len(set(numbers))
        assert all(0 <= number < traffic.numbers for number in numbers)


@pytest.mark.parametrize(("d", "dv"), [(256, 256), (192, 128), (136, 8), (8, 136), (200, 256)])
def test_shared_memory_is_laid_out_without_overlaps(d, dv):
    layout, after = TILE.layout(d, dv), WIDE_DQ_TILE.layout(d)
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
    row_blocks = prepare_temporaries.row_blocks_of(p, TILE)
    blocks, parts = prepare_temporaries.key_parts(p, TILE, math.prod(row_blocks), MULTIPROCESSORS)
    assert (parts - 1) * blocks < -(-length // BLOCK_N) <= parts * blocks
    ds = prepare_temporaries.temporaries(p, TILE, row_blocks, MULTIPROCESSORS).ds
    size = 4 * math.prod(ds.shape)
    assert (ds.dtype, size) == ("float32", math.prod(row_blocks) * blocks * BLOCK_M * BLOCK_N * 2)
    few, busy = blocks <= prepare_temporaries.FEWEST_BLOCKS, blocks * heads_kv < MULTIPROCESSORS + heads_kv
    assert size <= prepare_temporaries.WORKSPACE or few or (busy and size <= prepare_temporaries.MOST_WORKSPACE)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_few_long_heads_take_more_memory_to_keep_all_multiprocessors_busy(heads):
    """More than WORKSPACE: with one block of keys less, of each head, there would be a multiprocessor without any."""
    x = np.broadcast_to(np.float16(0), (heads, 65_536, 256))
    p = bind(x, x, x)
    row_blocks = prepare_temporaries.row_blocks_of(p, TILE)
    blocks, _ = prepare_temporaries.key_parts(p, TILE, math.prod(row_blocks), MULTIPROCESSORS)
    assert blocks * heads >= MULTIPROCESSORS > (blocks - 1) * heads
    assert 4 * math.prod(prepare_temporaries.temporaries(p, TILE, row_blocks, MULTIPROCESSORS).ds.shape) > prepare_temporaries.WORKSPACE


def test_parts_fill_turns_of_the_multiprocessors():
    """20 heads: 13 blocks of keys at a time are two turns, where the 20 that there is room for would be four, one of them nearly empty."""
    x = np.broadcast_to(np.float16(0), (20, 20_480, 256))
    p = bind(x, x, x)
    blocks, parts = prepare_temporaries.key_parts(p, TILE, math.prod(prepare_temporaries.row_blocks_of(p, TILE)), MULTIPROCESSORS)
    turns = parts * -(-blocks * 20 // MULTIPROCESSORS)
    assert turns <= 1.05 * 320 * 20 / MULTIPROCESSORS


def test_each_part_has_its_blocks_of_keys(monkeypatch):
    """Every launch gets as many arrays as it has maps, operands and lengths; kernels are prepared once for all parts."""
    calls = []
    record = lambda launch, operands, extras=(), numbers=None: calls.append((launch, operands, extras, numbers))
    monkeypatch.setattr(Launch, "on", record)
    for name, value in {"FEWEST_BLOCKS": 3, "WORKSPACE": 0, "MOST_WORKSPACE": 0}.items():
        monkeypatch.setattr(prepare_temporaries, name, value)
    q, k = (np.zeros((1, 2, h, 500, 256), np.float16) for h in (4, 2))
    lse, lengths = np.zeros(q.shape[:-1], np.float32), np.array([[500, 3]])
    inputs, results = BackwardInputs(q, q, k, k, q, lse, kv_lengths=lengths), BackwardResults(q, k, k)
    layouts = (type(x)(*map(Layout.of, x)) for x in (inputs, results))
    prepared = tier.prepare_backward(bind(q, k, k, kv_lengths=lengths), *layouts, True, Gpu(0, (9, 0), MULTIPROCESSORS))
    prepared.run(inputs, results)
    assert [launch.builder for launch in prepared.launches] == [
        "passes.preprocess.build",
        "sm90.backward.backward_wide.build",
        "sm90.dq.dq.build",
    ]
    preprocess, main, sum_dq = prepared.launches
    assert [launch for launch, *_ in calls] == [preprocess, *[main, sum_dq] * 3]
    for launch, operands, extras, _ in calls:
        assert len(operands) == len(launch.maps) + len(launch.operands)
        assert (len(launch.extras), extras) == (1, (lengths,))
    for part, (launch, *_, (sizes, scales)) in enumerate(calls[1:]):
        made_with, *_ = launch.numbers
        assert (sizes, scales) == (made_with._replace(first_block=3 * (part // 2)), launch.numbers[1])
        assert (made_with.first_block, made_with.blocks) == (0, 3)
