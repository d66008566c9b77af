"""How the Hopper backward adds up dQ in memory, for head dimensions up to 128: whose turn it is, and who may use the tile on its way."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator has no tensor cores", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the schedule is written with numba-cuda")

from support.on_host import on_host
from test_ds_tiles import described, draw

from numba_flash.arguments.options import PLAIN
from numba_flash.arguments.problem import Problem, bind
from numba_flash.cuda.arguments import RAISED_BASE_2
from numba_flash.cuda.config import PreprocessConfig
from numba_flash.cuda.passes import preprocess
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.cuda.sm90 import hopper_kernel
from numba_flash.cuda.sm90.arguments import END, BackwardWork, Sizes
from numba_flash.cuda.sm90.backward import load_backward, prepare_temporaries
from numba_flash.cuda.sm90.backward.backward_tiles import BACKWARD_TILES, WideTile
from numba_flash.cuda.sm90.backward.walk_backward import blocks_after, blocks_before, claims
from numba_flash.cuda.sm90.dq import add_dq, prepare_dq_order
from numba_flash.cuda.sm90.dq.prepare_dq_order import Direction
from numba_flash.cuda.sm90.tiles import ADDERS, DQ_PART, SHARED_LIMIT, WARP_GROUP
from numba_flash.cuda.work import grid
from numba_flash.cuda.work.schedule import RowBlock

H100, H200 = (Gpu(0, (9, 0), 132, bandwidth) for bandwidth in (3.4e12, 4.9e12))
TILES = [row.tile for row in BACKWARD_TILES if row.tile.adds_dq]
EACH_TILE = pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")


def additions(rng, kind, tile, events=None) -> list[list[tuple[int, int]]]:
    """`additions_of` a drawn problem, of which some items go upward, or which goes in swings."""
    p, extras = draw(rng, kind)
    section = int(rng.integers(1, 6))
    of_a_section = section * grid.blocks(p, p.nk, tile.block_n)
    sections = grid.items(p, p.nk, p.hk, tile.block_n) // max(1, of_a_section)
    upward = 0 if p.options.packed else int(rng.integers(0, sections + 1)) * of_a_section
    serpentine = 0 if p.options.packed else int(rng.integers(0, 4))
    low = -p.nq if serpentine else p.low
    return additions_of(replace(p, low=low, d=64, dv=64), extras, tile, section, Direction(upward, serpentine), events)


def additions_of(p, extras, tile, section, way, events=None) -> list[list[tuple[int, int]]]:
    """What each work item of a problem adds to dQ, tile by tile: (number of the row block, how many blocks of keys come before)."""
    row_blocks = prepare_temporaries.row_blocks_of(p, tile)
    build = lambda: load_backward.build_write_work(True, True, p.options, tile, tile.layout(64, 64)).write_work
    lengths, group = 1 if p.options.packed else p.batch[1], p.hq // p.hk
    items = grid.items(p, p.nk, p.hk, tile.block_n)
    sizes = Sizes(items, -p.high, -p.low, columns=p.nq, kv_splits=1, group=group, section=section, b0=p.batch[0], **way._asdict())
    dk = SimpleNamespace(shape=(p.batch[0], lengths, p.hk, p.nk))
    lse2 = SimpleNamespace(shape=(*row_blocks[:3], row_blocks.blocks * tile.block_m))
    flags = np.zeros(math.prod(row_blocks) + 1, np.int32)
    written = described(load_backward, build, (dk, lse2, flags), extras, sizes, events)
    done, tiles = added(written, sizes, lse2, tile), itertools.count()
    return [[done[n] for n in itertools.islice(tiles, group * item.count) if n in done] for item in written]


class Flag:
    """A counter that has every value that is waited for, and notes (number of the row block, value)."""

    def __init__(self, address, waited):
        self.address, self.waited = address, waited

    def __ne__(self, value):
        self.waited.append((int(self.address) // 4, int(value)))
        return False


def added(items, sizes, lse2, tile) -> dict[int, tuple[int, int]]:
    """What the threads that add do with each tile of dQ that sees something: (number of its row block, the count it waits for)."""
    items, done, waited = [*items, BackwardWork(*[0] * 14)._replace(count=END)], {}, []
    nothing = lambda *_: None

    def wait_ready(smem, ring, n):
        if waited:
            done[int(n)] = waited.pop()

    pipeline = SimpleNamespace(
        wait_ready=wait_ready, read=lambda smem, ring, turn, word: items[int(turn)][int(word)], tile=nothing, release=nothing
    )
    ptx = SimpleNamespace(
        **dict.fromkeys(("bulk_store_of", "bulk_add_of"), lambda uses: nothing),
        AGAIN=None,
        **dict.fromkeys(("bulk_commit", "bulk_wait_read", "bulk_wait", "add_flag"), nothing),
        global_address=lambda array: 0,
        load_flag=lambda address: Flag(address, waited),
    )
    with on_host(add_dq, pipeline=pipeline, ptx=ptx):
        add = add_dq.build_add_dq(True, PLAIN, tile, tile.layout(64, 64))
        for me in range(ADDERS):
            add(0, me, lse2, None, None, (), sizes)
    return done


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


@EACH_TILE
@pytest.mark.parametrize("left", [0, 1, 63, 64, 65, 127, 128, 129, 256, 1000])
def test_blocks_of_keys_before_and_after_another_are_those_that_see_something(left, tile):
    """Also where an end of the band falls on that of a tile, which it seldom does where bands are drawn."""
    n = 5 * tile.block_n
    p = bind(*[np.broadcast_to(np.float16(0), (n, 64))] * 3, window=(left, 0))
    diagonal = np.arange(n) - np.arange(n)[:, None]
    visible = (-left <= diagonal) & (diagonal <= 0)
    sees = visible.reshape(n // tile.block_m, tile.block_m, n // tile.block_n, tile.block_n).any(axis=(1, 3))
    before, after = (getattr(each, "py_func", each) for each in (blocks_before, blocks_after))
    for number, block in np.argwhere(sees):
        row0, sizes = block * tile.block_n, (tile.block_m, tile.block_n)
        assert before(row0, -p.low, number, *sizes) == sees[number, :block].sum()
        assert after(row0, -p.high, number, n, n, *sizes) == sees[number, block + 1 :].sum()


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


def steps_waited(items: list) -> int:
    """Of all items together, if all are at work, and each adds a tile per step if it is its turn."""
    left, added, waited = [list(item) for item in items], Counter(), 0
    while left := [item for item in left if item]:
        ready = [item for item in left if added[item[0][0]] == item[0][1]]
        assert ready
        waited += len(left) - len(ready)
        for item in ready:
            added[item.pop(0)[0]] += 1
    return waited


@EACH_TILE
@pytest.mark.parametrize(("low", "high", "otherwise"), [(-640, 0, 10), (-100, 20, 1), (-300, 50, 3), (-100, 640, 10)])
def test_blocks_of_keys_under_a_band_wait_for_nobody(low, high, otherwise, tile):
    """In the direction that is chosen each of a head finds its turn come, but where the first two begin with the same queries. In the other
    one all five would wait: each for those before, if all begin with the same queries."""
    p = replace(problem(640, 1, 1), low=low, high=high)
    up, down = (steps_waited(additions_of(p, (), tile, 1, Direction(upward, 0))) for upward in (5, 0))
    chosen, other = (up, down) if way(p, 2, 1, 5, 132).upward else (down, up)
    assert chosen <= 1
    assert other >= otherwise


def way(p, heads, section, key_blocks, multiprocessors, ordered=True) -> Direction:
    """`prepare_dq_order.way` with so many heads of k."""
    return prepare_dq_order.way(p, heads * key_blocks, section, key_blocks, Gpu(0, (9, 0), multiprocessors), ordered)


def tiles_and_heads(p, tile, way) -> list:
    """Of each work item, a section has one head of k: its tiles, and for each of these the heads of q."""
    found = []
    for item in additions_of(p, (), tile, 1, way):
        heads, tiles = zip(*(divmod(number, p.nq // tile.block_m) for number, _ in item), strict=True)
        group = p.hq // p.hk
        assert all(tiles[i : i + group] == (tiles[i],) * group for i in range(0, len(tiles), group))
        found.append((tiles[::group], [{*heads[i : i + group]} for i in range(0, len(heads), group)]))
    return found


@EACH_TILE
@pytest.mark.parametrize("given", [Direction(0, 0), Direction(10, 0), Direction(0, 2)])
def test_a_block_goes_through_each_tile_of_all_heads_that_share_its_keys(given, tile):
    """So that blocks which are at the same queries read the same."""
    p = problem(640, 6, 2, causal=True)
    for number, (tiles, heads) in enumerate(tiles_and_heads(p, tile, given)):
        assert all(each == ({0, 1, 2} if number < 5 else {3, 4, 5}) for each in heads)
        upward = number < given.upward or (given.serpentine and number % 5 in (2, 3))
        assert list(tiles) == sorted(tiles, reverse=not upward)


@EACH_TILE
def test_a_swing_begins_where_those_end_that_are_done_first(tile):
    """Three blocks of a head begin with its last queries, and are done at the diagonal, the last first. The next three begin there, one
    after the other, and end with the last queries, where another swing begins."""
    found = [tiles for tiles, _ in tiles_and_heads(problem(8 * tile.block_n, 8, 1, causal=True), tile, Direction(0, 3))]
    of_a_block, last = tile.block_n // tile.block_m, 8 * tile.block_n // tile.block_m - 1
    first = [at * of_a_block for at in (2, 1, 0, 3, 4, 5, 7, 6)]
    assert [min(tiles) for tiles in found] == first
    assert all(max(tiles) == last for tiles in found)
    assert [tiles[0] == last for tiles in found] == [True] * 3 + [False] * 3 + [True] * 2


# ---- who does which work: items are claimed one by one ---------------------------------------------------------------------------------


@EACH_TILE
@EACH_KIND
def test_an_item_is_claimed_when_all_tiles_of_the_one_before_have_been_asked_for(kind, tile):
    """From a number behind the flags. Earlier, a block would keep items that others wait for, while it is busy with another one."""
    events, committed = [], 0
    problem, _ = draw(np.random.default_rng(0), kind)
    items = additions(np.random.default_rng(0), kind, tile, events)
    behind_the_flags = 4 * math.prod(prepare_temporaries.row_blocks_of(problem, tile))
    for before, event in zip([None, *events], events, strict=False):
        if event == ("commit",):
            committed += 1
        elif event[0] == "claim":
            assert event[1] == behind_the_flags
            assert before == (("ready", tile.layout(64, 64).fetched, committed - 1) if committed else None)
    assert committed == len(items) + 1 > 2
    assert sum(what == "claim" for what, *_ in events) >= committed


@EACH_TILE
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("claimed", [True, False])
def test_a_block_may_claim_again_when_it_has_asked_for_all_tiles(claimed, group, tile):
    """If it claims items at all."""
    layout, events = tile.layout(64, 64), []
    items = [BackwardWork(*[0] * 14)._replace(count=count) for count in (3, 1, 2, END)]
    pipeline = SimpleNamespace(
        **dict.fromkeys(("wait_ready", "wait_free", "release"), lambda *_: None),
        **dict.fromkeys(("build_load", "build_load_rows"), lambda *_: lambda tensor_map, *_: events.append(tensor_map)),
        build_load_numbers=lambda *_: None,
        read=lambda smem, ring, turn, word: items[int(turn)][int(word)],
        commit=lambda smem, ring, n: events.append((tuple(map(int, ring)), int(n))),
    )
    ptx = SimpleNamespace(global_address=lambda array: 0, ONCE=None)
    rows = SimpleNamespace(shape=(1, 1, 1, tile.block_m))
    with on_host(load_backward, pipeline=pipeline, ptx=ptx):
        produce = load_backward.build_produce(64, 64, claimed, False, PLAIN, tile, layout)
        produce(["do", "q", "k", "v"], 0, rows, rows, (), group, None)
    expected = []
    for turn, item in enumerate(items[:-1]):
        tiles = ["q", "do"] * (item.count * group)
        expected += ["k", tiles[0], "v", *tiles[1:]] + ([(layout.fetched, turn)] if claimed else [])
    assert events == expected


@EACH_TILE
@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("ordered", [True, False])
def test_flags_and_the_number_of_the_next_item_begin_at_zero(blocks, ordered, tile):
    """Each flag by its own block of the kernel before; nothing else is written there. Without turns there is the number."""
    address, stored = 10_000_000, []
    no_rows = SimpleNamespace(build_rows=lambda *_: lambda *_: RowBlock(0, 0, 0, 0, 0, 0, 0, 0, False))
    ptx = SimpleNamespace(
        **dict.fromkeys(("unpack_float16", "unpack_bfloat16", "load_global_words", "load_global_four")),
        fetch=lambda words, early: None,
        repeated=lambda count, function: lambda x: None,  # of rows, of which there are none
        global_address=lambda array: address if array == "flags" else 0,
        store_global=lambda *what: stored.append(what),
    )
    for number in range(blocks):
        cuda = SimpleNamespace(blockIdx=SimpleNamespace(x=number), gridDim=SimpleNamespace(x=blocks), threadIdx=SimpleNamespace(x=0))
        cuda.shfl_xor_sync = lambda lanes, value, lane: value
        cuda.local = SimpleNamespace(array=lambda size, kind: [0] * size)
        with on_host(preprocess, cuda=cuda, ptx=ptx, schedule=no_rows):
            kernel, *_ = preprocess.build(
                PreprocessConfig("float16", 64, False, tile.block_m, 4 * DQ_PART * tile.consumers, ordered, True, RAISED_BASE_2, PLAIN, 256)
            )
            x = mock.MagicMock(strides=[0] * 5)
            kernel(x, x, SimpleNamespace(shape=(1, 1, 1, 0)), None, "rows", None, "flags", (), 0)
    stored = [(int(at - address), values) for at, values in stored if at >= address]
    assert sorted(stored) == [(4 * i, (0,)) for i in range(blocks + 1)]


@EACH_TILE
def test_every_ring_is_initialised(tile):
    """With as many arrivals as there are who fill a slot, and who leave it."""
    layout, found = tile.layout(64, 64), {}

    def initialise(smem, ring, fills, releases):
        found[tuple(map(int, ring))] = (int(fills), int(releases))

    with on_host(hopper_kernel, pipeline=SimpleNamespace(initialise=initialise)):
        hopper_kernel.build_initialise(load_backward.rings_of(tile, layout))(0)
    consumers, threads = tile.consumers, tile.consumers * WARP_GROUP
    assert found == {
        **dict.fromkeys((layout.q, layout.do, layout.k, layout.v), (1, consumers)),
        layout.dq: (threads, 1),
        layout.work: (1, threads + ADDERS + 1),
        layout.fetched: (1, 1),
    }


# ---- who may use the tile of dQ --------------------------------------------------------------------------------------------------------


def waves(counts, maps: bool) -> list[list[tuple[str, int]]]:
    """What consumers and adders do with the tile of dQ, for items of so many tiles; `maps` if dK and dV are stored through its memory."""
    consumer, n = [], 0
    for count in counts:
        for t in range(count):
            consumer += [("commit", n - 1)] if t else []
            consumer += [("meet", n), ("wait_free", n + 1), ("write", n)]
            n += 1
        consumer += [("commit", n - 1)] + ([("wait_free", n + 1), ("write", -1)] if maps else [])
    adders = [[(what, k) for k in range(me, n, ADDERS) for what in ("wait_ready", "read", "release")] for me in range(ADDERS)]
    return [consumer, consumer, *adders]


def explore(counts, maps: bool) -> None:
    """Run every interleaving; assert that each tile is read whole, and that someone can always go on."""
    programs = waves(counts, maps)
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
            elif what == "commit":
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
    [(512, 32, 32, 66), (4096, 32, 32, 16), (16_384, 32, 32, 4), (16_384, 32, 4, 4), (2**20, 4, 4, 1)],
)
def test_sums_of_the_heads_at_work_stay_in_the_cache(nq, heads, heads_kv, expected):
    tile, key_blocks = TILES[0], nq // TILES[0].block_n
    for ordered in (True, False):
        section = prepare_dq_order.section(problem(nq, heads, heads_kv), tile, key_blocks, H200, ordered)
        assert section == expected
        assert section == 1 or section * nq * 64 * 4 <= prepare_dq_order.SUMS_AT_WORK


@pytest.mark.parametrize("kv_heads", [8, 4, 2])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("key_blocks", [1, 4, 16, 23, 24, 33, 128, 1000])
def test_all_blocks_of_a_head_under_a_band_are_at_work(key_blocks, ordered, kv_heads):
    """In some turns of the GPU there is room for all heads of a section, and for no more: in two, if a head has many blocks, or shares its
    keys and goes downward."""
    waves = 2 if ordered and (kv_heads == 2 or (key_blocks >= 24 and kv_heads == 8)) else 1
    for tile in TILES:
        section = prepare_dq_order.section(problem(key_blocks * tile.block_n, 8, kv_heads, True), tile, key_blocks, H200, ordered)
        assert section == 1 or section * key_blocks <= waves * 132
        assert (section + 1) * key_blocks > waves * 132


@pytest.mark.parametrize(("tile", "blocks"), [*zip(TILES, (3, 4), strict=True)])
@pytest.mark.parametrize("multiprocessors", [1, 78, 114, 132])
def test_few_blocks_of_a_head_under_a_mask_wait_for_each_other(tile, blocks, multiprocessors):
    masked = replace(problem(4096, 32, 32, True), options=replace(PLAIN, mask=True))
    gpu = H200._replace(multiprocessors=multiprocessors)
    assert prepare_dq_order.section(masked, tile, 4096 // tile.block_n, gpu, True) == -(-multiprocessors // blocks)


def test_additions_in_any_order_are_in_turns_where_that_is_as_fast():
    """In any order those of a mask, or of packed sequences under a band with many blocks of keys; all of another tile are in one order
    without turns.
    """
    packed = lambda *shape: replace(problem(*shape), options=replace(PLAIN, packed=True))
    for tile in TILES:
        keys = prepare_dq_order.MANY_PACKED * tile.block_n
        assert prepare_dq_order.ordered(packed(keys, 4, 4, True), tile, True)
        assert not prepare_dq_order.ordered(packed(keys, 4, 4, True), tile, False)
        assert prepare_dq_order.ordered(packed(keys - 2 * tile.block_n, 4, 4, True), tile, False)
        assert prepare_dq_order.ordered(packed(keys, 4, 4), tile, False)
        assert prepare_dq_order.ordered(problem(keys, 4, 4, True), tile, False)
        assert not prepare_dq_order.ordered(replace(problem(128, 4, 4), options=replace(PLAIN, mask=True)), tile, False)
    assert not prepare_dq_order.ordered(problem(4096, 4, 4, True), WideTile(), True)


def test_work_is_claimed_where_it_waits_or_differs_in_length():
    for tile in TILES:
        assert claims(False, True, PLAIN, tile)
        assert claims(True, False, PLAIN, tile)
        assert not claims(False, False, PLAIN, tile)
    assert not claims(True, False, PLAIN, WideTile())


@pytest.mark.parametrize(("heads", "section", "expected"), [(4, 4, 0), (5, 4, 4), (8, 4, 4), (9, 4, 8), (3, 100, 0)])
def test_causal_items_go_upward_but_those_of_the_last_section(heads, section, expected):
    """So nobody waits, and the longest do not come last. All others go downward: who comes before does not matter or lists say it, packed
    sequences have no sections, and a band that hides earlier keys alone lets nobody wait downward."""
    causal = problem(384, heads, heads, True)
    upward = lambda p, ordered=True: way(p, heads, section, 3, 132, ordered)
    assert upward(causal) == upward(replace(causal, low=-100)) == Direction(expected * 3, 0)
    assert upward(causal, ordered=False) == Direction(0, 0)
    for change in ({"high": 384}, {"low": -100, "high": 384}):
        assert upward(replace(causal, **change)) == Direction(0, 0)
    for options in ({"packed": True}, {"mask": True}, {"block_sparse": True}):
        assert upward(replace(causal, options=replace(PLAIN, **options))) == Direction(0, 0)


ORDERS = [(64, 1, "UPWARD"), (128, 1, "UPWARD"), (64, 2, "UPWARD"), (128, 2, "DOWNWARD"), (128, 8, "SERPENTINE"), (64, 16, "SERPENTINE")]


@pytest.mark.parametrize("gpu", [H100, H200], ids=["H100", "H200"])
@pytest.mark.parametrize(("d", "group", "expected"), [*ORDERS, (64, 4, "DOWNWARD"), (64, 8, "FEW"), (128, 4, "FEW")])
def test_the_order_of_blocks_depends_on_how_much_shares_keys(d, group, expected, gpu):
    """Swings of few heads are where memory is slow. None goes upward or in swings under a window, if these would wait, nor where all is
    seen, or added in any order. The wider of q and v counts.
    """
    expected = expected.replace("FEW", "SERPENTINE" if gpu is H100 else "DOWNWARD")
    causal = replace(problem(384, group * 3, 3, True), d=d, dv=d)
    order = lambda p, ordered=True: prepare_dq_order.order(p, 3, gpu, ordered).name
    assert order(causal) == order(replace(causal, d=32)) == order(replace(causal, dv=32)) == expected
    assert order(replace(causal, low=-100)) == expected.replace("SERPENTINE", "DOWNWARD")
    assert order(replace(causal, high=384)) == "DOWNWARD"
    assert order(causal, False) == "DOWNWARD"


def test_blocks_go_downward_where_sections_of_swings_would_be_unlike():
    order = lambda heads: prepare_dq_order.order(replace(problem(16384, 8 * heads, heads, True), d=128, dv=128), 128, H200, True).name
    found = {name: [heads for heads in range(1, 21) if order(heads) == name] for name in ("SERPENTINE", "DOWNWARD")}
    assert found == {"SERPENTINE": [1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16, 18, 20], "DOWNWARD": [7, 11, 13, 14, 17, 19]}


@pytest.mark.parametrize(
    ("n", "heads", "section", "serpentine"),
    [
        (8192, 16, 8, 16),
        (8192, 9, 9, 14),
        (8192, 1, 1, 132),
        (8192, 13, 8, 0),
        (16384, 4, 4, 33),
        (2048, 64, 32, 4),
        (1920, 64, 16, 8),
        (1024, 64, 32, 4),
        (128, 500, 250, 1),
    ],
)
def test_sections_of_swings_are_alike_and_a_swing_is_what_a_turn_has_room_for(n, heads, section, serpentine):
    """Four swings of long heads, two of short ones, whatever is left of a GPU of 132 multiprocessors; or none."""
    p, tile = replace(problem(n, 8 * heads, heads, True), d=128), next(tile for tile in TILES if tile.block_m == 64)
    key_blocks = grid.blocks(p, n, tile.block_n)
    if serpentine:
        assert prepare_dq_order.section(p, tile, key_blocks, H200, True) == section
    assert way(p, heads, section, key_blocks, 132) == Direction(0, serpentine)


@EACH_TILE
def test_the_tile_of_dq_has_its_own_memory(tile):
    d = 64 if tile.block_m > 64 else 128
    layout = tile.layout(d, d)
    pieces = [(layout.ds, 2 * layout.ds_bytes), (layout.dq.tiles, 4 * DQ_PART * tile.consumers), (layout.bounds, 16 * tile.consumers)]
    pieces += [(layout.lse, 4 * tile.block_m * tile.stages), (layout.delta, 4 * tile.block_m * tile.do_stages)]
    for name in ("q", "do", "k", "v", "dq", "work", "fetched"):
        slots, slot_bytes, count, ready, free = getattr(layout, name)
        pieces += [(ready, 8 * count), (free, 8 * count)] + ([] if name in ("dq", "fetched") else [(slots, slot_bytes * count)])
    pieces.sort()
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(pieces))
    assert sum(pieces[-1]) + layout.ALIGNMENT <= layout.bytes <= SHARED_LIMIT
    assert layout.dq.tiles % layout.ALIGNMENT == 0, "panels of dK and dV are stored from there"
    assert (layout.dq.slot_bytes, layout.dq.slots) == (0, ADDERS)
    assert (layout.fetched.slot_bytes, layout.fetched.slots) == (0, 1)
