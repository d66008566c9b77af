"""How the Hopper backward adds up dQ in memory, for head dimensions up to 128: whose turn it is, and who may use the tile on its way."""

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

from test_ds_tiles import described, draw, plain

from numba_flash.cuda.sm90 import load as movers_sm90
from numba_flash.cuda.sm90 import prepare_backward as sm90_backward
from numba_flash.cuda.sm90 import preprocess as rows_sm90
from numba_flash.cuda.sm90 import tier as sm90
from numba_flash.cuda.swizzle import ADDERS, DQ_PART
from numba_flash.options import PLAIN
from numba_flash.problem import Problem

TILES = [tile for _, _, tile in sm90_backward.TILES if tile.adds_dq]
EACH_TILE = pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")


def captured(function, *names):
    """What a device function has captured under a name, of that what it has captured under the next one, and so on."""
    for name in names:
        function = getattr(function, "py_func", function)
        function = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))[name].cell_contents
    return function


def additions(rng, kind, tile, events=None) -> list[list[tuple[int, int]]]:
    """What each work item of a drawn problem adds to dQ, tile by tile: (number of the row block, how many blocks of keys come before)."""
    p, extras = draw(rng, kind)
    p = replace(p, d=64, dv=64)
    *_, row_blocks = grid = sm90_backward._row_blocks(p, tile)
    describe, _, add_dq = movers_sm90.build(64, 64, True, True, p.options, tile)
    before = plain(captured(add_dq, "add_tile", "blocks_before"))
    key_blocks, lengths, group = sm90_backward._key_blocks(p, tile), 1 if p.options.packed else p.batch[1], p.hq // p.hk
    items = key_blocks * p.hk * (1 if p.options.packed else math.prod(p.batch))
    sizes = items, -p.high, -p.low, p.nq, 1, group, int(rng.integers(1, 6)), p.batch[0]
    operands = SimpleNamespace(shape=(*grid[:3], row_blocks * tile.block_m)), np.zeros(math.prod(grid) + 1, np.int32)
    return [
        [
            (item["BASE"] + g * row_blocks + at, before(item["ROW0"], item["HIGH"], at))
            for g in range(group)
            for at in reversed(range(item["FIRST"], item["FIRST"] + item["COUNT"]))
            if item["QUERIES"]
        ]
        for item in described(movers_sm90, describe, (p.batch[0], lengths, p.hk, p.nk), operands, extras, sizes, events)
    ]


EACH_KIND = pytest.mark.parametrize("kind", ["plain", "lengths", "packed"])


@EACH_TILE
@EACH_KIND
@pytest.mark.parametrize("seed", range(8))
def test_turns_are_counted_without_gaps(kind, seed, tile):
    """In the order in which items are handed out, each tile of dQ waits for just so many others as were added to its row block before."""
    added = Counter()
    for number, before in itertools.chain(*additions(np.random.default_rng(seed), kind, tile)):
        assert before == added[number]
        added[number] += 1


def everything_is_done(items: list, shares: list[list[int]] | None, at_work: int, rng) -> bool:
    """Whether blocks, of which so many are `at_work` at a time, add all of their items' tiles in turns.

    They claim items one by one, or have the shares that they are given, as blocks of a grid of that many.
    """
    claimed, waiting, added = iter(items), None if shares is None else [[items[i] for i in share] for share in shares], Counter()
    working = [[] for _ in range(at_work)]
    while True:
        for block in working:
            if shares is None:
                block += next(claimed, []) if len(block) <= rng.integers(3) else []  # all of its tiles have been asked for
            elif not block and waiting:
                block += itertools.chain(*waiting.pop(0))
        ready = [block for block in working if block and added[block[0][0]] == block[0][1]]
        if not ready:
            return sum(added.values()) == sum(map(len, items))
        added[ready[rng.integers(len(ready))].pop(0)[0]] += 1


@EACH_TILE
@EACH_KIND
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("at_work", [1, 2, 5])
def test_claimed_items_are_done_however_few_blocks_are_at_work(kind, seed, at_work, tile):
    rng = np.random.default_rng(seed)
    assert everything_is_done([item for item in additions(rng, kind, tile) if item], None, at_work, rng)


def test_shares_of_a_grid_are_not_done_if_few_blocks_are_at_work():
    """Two turns of a grid of 4, the second in reverse: the first 2 blocks wait for items of the others, which wait for them to end."""
    items, shares = [[(0, i)] for i in range(8)], [[0, 7], [1, 6], [2, 5], [3, 4]]
    rng = np.random.default_rng(0)
    assert everything_is_done(items, shares, 4, rng)
    assert not everything_is_done(items, shares, 2, rng)
    assert everything_is_done(items, None, 2, rng)


# ---- who does which work: items are claimed one by one ---------------------------------------------------------------------------------


@EACH_TILE
@EACH_KIND
def test_an_item_is_claimed_when_all_tiles_of_the_one_before_have_been_asked_for(kind, tile):
    """From a number behind the flags. Earlier, a block would keep items that others wait for, while it is busy with another one."""
    events, published = [], 0
    problem, _ = draw(np.random.default_rng(0), kind)
    items = additions(np.random.default_rng(0), kind, tile, events)
    behind_the_flags = 4 * math.prod(sm90_backward._row_blocks(problem, tile))
    for before, event in zip([None, *events], events, strict=False):
        if event == ("publish",):
            published += 1
        elif event[0] == "claim":
            assert event[1] == behind_the_flags
            assert before == (("ready", tile.layout(64, 64).fetched, published - 1) if published else None)
    assert published == len(items) + 1 > 2
    assert sum(what == "claim" for what, *_ in events) >= published


@EACH_TILE
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_block_may_claim_again_when_it_has_asked_for_all_tiles(ordered, group, tile):
    """If it claims items at all."""
    count, events = int(movers_sm90.COUNT), []
    items = [dict.fromkeys(range(14), 0) | {count: tiles} for tiles in (3, 1, 2)] + [{count: movers_sm90.END}]
    _, produce, _ = movers_sm90.build(64, 64, True, ordered, PLAIN, tile)
    sends = {name: lambda *_, name=name: events.append(name) for name in ("send_q", "send_do", "fill_k", "fill_v")}
    pipeline = SimpleNamespace(
        **dict.fromkeys(("wait_ready", "wait_free", "leave"), lambda *_: None),
        read=lambda smem, ring, turn, word: items[int(turn)][int(word)],
        publish=lambda smem, ring, n: events.append((tuple(map(int, ring)), int(n))),
    )
    rows, ptx = SimpleNamespace(shape=(1, 1, 1, tile.block_m)), SimpleNamespace(global_address=lambda array: 0)
    plain(produce, sends, pipeline=pipeline, ptx=ptx)([None] * 4, 0, rows, rows, group)
    expected = []
    for turn, item in enumerate(items[:-1]):
        tiles = ["send_q", "send_do"] * (item[count] * group)
        expected += ["fill_k", tiles[0], "fill_v", *tiles[1:]] + ([(tile.layout(64, 64).fetched, turn)] if ordered else [])
    assert events == expected


@EACH_TILE
@pytest.mark.parametrize("grid", [1, 5])
def test_flags_and_the_number_of_the_next_item_begin_at_zero(grid, tile):
    """Each flag by its own block of the kernel before; nothing else is written there."""
    address, stored = 10_000_000, []
    prepare, *_ = rows_sm90.build_prepare("float16", 64, False, True, PLAIN, tile, 256)
    for number in range(grid):
        where = SimpleNamespace(blockIdx=SimpleNamespace(x=number), gridDim=SimpleNamespace(x=grid), threadIdx=SimpleNamespace(x=0))
        where.shfl_xor_sync = lambda lanes, value, lane: value
        ptx = SimpleNamespace(
            global_address=lambda array: address if array == "flags" else 0, store_global=lambda *what: stored.append(what)
        )
        no_rows = {"rows": lambda number, *_: (0, 0, 0, 0, 0, 0, 0, 0, 1.0)}
        plain(prepare, no_rows, cuda=where, ptx=ptx)(
            *[None] * 2, SimpleNamespace(shape=(1, 1, 1, 0)), None, "shifts", None, "flags", (), 0, ()
        )
    stored = [(int(at - address), values) for at, values in stored if at >= address]
    assert sorted(stored) == [(4 * i, (0,)) for i in range(grid + 1)]


@EACH_TILE
def test_every_ring_is_initialised(tile):
    """With as many arrivals as there are who fill a slot, and who leave it."""
    layout, found = tile.layout(64, 64), {}
    kernel, *_ = movers_sm90.build_kernel(64, 64, True, True, True, PLAIN, tile, None)
    roles = dict.fromkeys(("describe", "produce", "add_dq"), lambda *_: None)
    cuda = SimpleNamespace(threadIdx=SimpleNamespace(x=0), shared=SimpleNamespace(array=lambda *_: None), syncthreads=lambda: None)
    ptx = SimpleNamespace(shared_address=lambda array: 0, fence_mbarrier_init=lambda: None, setmaxnreg=lambda *_: None)
    initialise = lambda smem, ring, fills, releases: found.__setitem__(tuple(map(int, ring)), (int(fills), int(releases)))
    pipeline = SimpleNamespace(WARP_GROUP=128, uniform=lambda x: x, initialise=initialise)
    plain(kernel, roles, cuda=cuda, ptx=ptx, pipeline=pipeline)([], *[None] * 4, None, None, (), (0,) * 8, ())
    consumers, threads = tile.consumers, tile.consumers * 128
    assert found == {
        **dict.fromkeys((layout.q, layout.do, layout.k, layout.v), (1, consumers)),
        layout.dq: (threads, 1),
        layout.work: (1, threads + ADDERS + 1),
        layout.fetched: (1, 1),
    }


# ---- who may use the tile of dQ --------------------------------------------------------------------------------------------------------


def turns(counts, maps: bool) -> list[list[tuple[str, int]]]:
    """What consumers and adders do with the tile of dQ, for items of so many tiles; `maps` if dK and dV are stored through its memory."""
    consumer, n = [], 0
    for count in counts:
        for t in range(count):
            consumer += [("publish", n - 1)] if t else []
            consumer += [("meet", n), ("wait_free", n + 1), ("write", n)]
            n += 1
        consumer += [("publish", n - 1)] + ([("wait_free", n + 1), ("write", -1)] if maps else [])
    adders = [[(what, k) for k in range(me, n, ADDERS) for what in ("wait_ready", "read", "leave")] for me in range(ADDERS)]
    return [consumer, consumer, *adders]


def explore(counts, maps: bool) -> None:
    """Run every interleaving; assert that each tile is read whole, and that someone can always go on."""
    programs = turns(counts, maps)
    start = (0,) * len(programs), ((0, 0),) * ADDERS, (0,) * ADDERS, (None, None)
    seen, stack = {start}, [start]
    while stack:
        places, ready, free, halves = stack.pop()
        following = []
        for i, program in enumerate(programs):
            if places[i] == len(program):
                continue
            what, n = program[places[i]]
            slot, phase = n % ADDERS, n // ADDERS
            others, r, f, h = list(places), list(ready), list(free), list(halves)
            if what == "meet":
                if programs[1 - i][places[1 - i] : places[1 - i] + 1] != [(what, n)]:
                    continue
                others[1 - i] += 1
            elif what == "wait_ready":
                if r[slot][1] % 2 == phase % 2:  # the phase of this parity is not complete
                    continue
            elif what == "wait_free":
                if f[slot] % 2 == (phase + 1) % 2:
                    continue
            elif what == "publish":
                arrivals, current = r[slot]
                r[slot] = (0, current + 1) if arrivals else (1, current)
            elif what == "write":
                h[i] = n
            elif what == "read":
                assert h == [n, n], f"{counts}: tile {n} is read when there are {h}"
            else:
                f[slot] += 1
            others[i] += 1
            following.append((tuple(others), tuple(r), tuple(f), tuple(h)))
        assert following or all(place == len(program) for place, program in zip(places, programs, strict=True)), f"{counts}: nobody goes on"
        stack += set(following) - seen
        seen |= set(following)


@pytest.mark.parametrize("maps", [False, True], ids=["stored", "maps"])
def test_the_tile_of_dq_is_never_overwritten_nor_waited_for_in_vain(maps):
    for items in range(1, 4):
        for counts in itertools.product((1, 2, 3), repeat=items):
            explore(counts, maps)


def problem(nq: int, hq: int, hk: int, causal: bool = False):
    return Problem((1, 1), hq, hk, nq, nq, 64, 64, "float16", 0.1, -nq, 0 if causal else nq, PLAIN)


@pytest.mark.parametrize(
    ("nq", "heads", "heads_kv", "expected"),
    [(512, 32, 32, 66), (4096, 32, 32, 32), (16_384, 32, 32, 8), (16_384, 32, 4, 8), (2**20, 4, 4, 1)],
)
def test_sums_of_the_heads_at_work_stay_in_the_cache(nq, heads, heads_kv, expected):
    tile, key_blocks = TILES[0], nq // TILES[0].block_n
    for ordered in (True, False):
        section = sm90_backward._section(problem(nq, heads, heads_kv), tile, key_blocks, 132, ordered)
        assert section == expected
        assert section == 1 or section * nq * 64 * 4 <= sm90_backward.SUMS_AT_WORK
    causal = sm90_backward._section(problem(nq, heads, heads_kv, True), tile, key_blocks, 132, False)
    assert causal == sm90.even_section(key_blocks, 132), "work of different lengths has to be handed out evenly"


@pytest.mark.parametrize(("tile", "blocks"), [*zip(TILES, (2, 4), strict=True)])
@pytest.mark.parametrize("multiprocessors", [1, 78, 114, 132])
def test_few_causal_blocks_of_a_head_wait_for_each_other(tile, blocks, multiprocessors):
    section = sm90_backward._section(problem(4096, 32, 32, True), tile, 4096 // tile.block_n, multiprocessors, True)
    assert section == -(-multiprocessors // blocks)


@EACH_TILE
def test_the_tile_of_dq_has_its_own_memory(tile):
    d = 64 if tile.block_m > 64 else 128
    layout = tile.layout(d, d)
    pieces = [(layout.ds, 2 * layout.ds_bytes), (layout.dq[0], 4 * DQ_PART * tile.consumers), (layout.bounds, 16 * tile.consumers)]
    pieces += [(layout.lse, 4 * tile.block_m * tile.stages), (layout.delta, 4 * tile.block_m * tile.do_stages)]
    for name in ("q", "do", "k", "v", "dq", "work", "fetched"):
        slots, slot_bytes, count, ready, free = getattr(layout, name)
        pieces += [(ready, 8 * count), (free, 8 * count)] + ([] if name in ("dq", "fetched") else [(slots, slot_bytes * count)])
    pieces.sort()
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(pieces))
    assert sum(pieces[-1]) + layout.ALIGNMENT <= layout.bytes <= sm90.SHARED_LIMIT
    assert layout.dq[0] % layout.ALIGNMENT == 0, "panels of dK and dV are stored from there"
    assert layout.dq[1:3] == (0, ADDERS)
    assert layout.fetched[1:3] == (0, 1)
