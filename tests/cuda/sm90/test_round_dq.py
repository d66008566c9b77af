"""Which problems' dQ is rounded by the main kernel of the Hopper backward, and which tiles by whom."""

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support import SIMULATED, dense_visible

if SIMULATED:
    pytest.skip("the CUDA simulator has no tensor cores", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the kernels are written with numba-cuda")

from support.on_host import on_host
from test_sm90_host import backward_launches, layouts_of, problem

from numba_flash.cuda.sm90.arguments import Sizes
from numba_flash.cuda.sm90.backward.backward_tiles import BACKWARD_TILES, backward_tile
from numba_flash.cuda.sm90.dq import prepare_dq_order, round_dq
from numba_flash.cuda.sm90.dq.prepare_dq_order import mean_blocks, rounds
from numba_flash.cuda.sm90.dq.round_dq import PARTS, Rounding
from numba_flash.cuda.sm90.tiles import KEYS, SHARED_LIMIT

TILES = [replace(row.tile, rounds_dq=True) for row in BACKWARD_TILES if row.tile.adds_dq]
EACH_TILE = pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")


def rounded_by(p, tile, block: int, grid: int, upward: int = 0) -> list[Rounding]:
    """The tiles that a block of the grid writes down, one after the other."""
    blocks, memory = -(-p.nq // tile.block_m), {}
    lse2 = SimpleNamespace(shape=(*p.batch, p.hq, blocks * tile.block_m))
    sizes = Sizes(0, -p.high, -p.low, columns=p.nq, kv_splits=1, group=1, section=1, b0=p.batch[0], upward=upward)
    ptx = SimpleNamespace(
        load_shared=lambda address: memory[int(address)],
        store_shared=lambda address, value: memory.__setitem__(int(address), int(value)),
        copy_wait_but=lambda groups: None,
        bulk_wait_read_but=lambda groups: None,
    )
    cuda = SimpleNamespace(blockIdx=SimpleNamespace(x=block), gridDim=SimpleNamespace(x=grid))
    with on_host(round_dq, cuda=cuda, ptx=ptx):
        layout = tile.layout(64, 64)
        read, _ = round_dq.build_access(layout)
        rounding, found = round_dq.build(tile, layout, False), []
        parts = int(rounding.parts(lse2))
        assert parts % (PARTS * tile.consumers) == 0
        for n in range(parts // (PARTS * tile.consumers)):
            rounding.begin_tile(0, np.uint32(block + n * grid), lse2, sizes, np.int32(p.nk))
            words = [read(0, word) for word in range(Rounding._fields.index("left"))]
            found.append(Rounding(*words, left=0, item_n=0, there=0))
    return found


@EACH_TILE
@pytest.mark.parametrize(
    ("nq", "nk", "batch", "hq", "options"),
    [
        (300, 500, (3,), 2, {}),
        (300, 300, (2,), 3, {"causal": True}),
        (200, 700, (1,), 5, {"causal": True}),
        (500, 200, (2, 3), 1, {"causal": True, "q_start": 0}),
        (1, 1, (1,), 1, {}),
    ],
)
@pytest.mark.parametrize("grid", [1, 4, 13])
@pytest.mark.parametrize("upward", [0, 6], ids=["downward", "upward"])
def test_each_tile_is_rounded_once_when_all_have_added_to_it(tile, nq, nk, batch, hq, options, grid, upward):
    p = problem(nq=nq, nk=nk, batch=batch, hq=hq, hk=hq, **options)
    seen, found = dense_visible(nq, nk, **options), Counter()
    blocks = -(-nq // tile.block_m)
    for block in range(grid):
        for of in rounded_by(p, tile, block, grid, upward):
            at = of.row0 // tile.block_m
            assert of.number == ((of.b0 * p.batch[1] + of.b1) * hq + of.head) * blocks + at
            assert of.b1 < p.batch[1]
            assert of.head < hq
            assert of.place % grid == block
            of_tile = seen[of.row0 : of.row0 + tile.block_m]
            adding = [of_tile[:, key : key + tile.block_n].any() for key in range(0, nk, tile.block_n)]
            assert of.blocks == sum(adding)
            found[of.number] += 1
    assert found == Counter(range(int(np.prod(p.batch)) * hq * blocks))


@pytest.mark.parametrize(("upward", "rows"), [(0, [448, 384, 320, 256, 192, 128, 64, 0]), (3, [0, 64, 128, 192, 256, 320, 384, 448])])
def test_tiles_of_a_head_come_in_the_order_in_which_they_are_complete(upward, rows):
    """In that in which most blocks of keys go through them."""
    p = problem(nq=500, nk=300, batch=(2,), hq=2, hk=2)
    assert [of.row0 for of in rounded_by(p, TILES[1], 0, 1, upward)] == rows * 4


@EACH_TILE
@pytest.mark.parametrize(("nq", "nk", "options"), [(1000, 700, {}), (640, 640, {"causal": True}), (200, 900, {"causal": True})])
def test_blocks_that_add_to_a_tile_are_counted(tile, nq, nk, options):
    p, seen = problem(nq=nq, nk=nk, **options), dense_visible(nq, nk, **options)
    pairs = [
        seen[row : row + tile.block_m, key : key + tile.block_n].any()
        for row in range(0, nq, tile.block_m)
        for key in range(0, nk, tile.block_n)
    ]
    assert mean_blocks(p, tile) == pytest.approx(sum(pairs) / -(-nq // tile.block_m))


LIKE_MEASURED = {"d": 64, "nq": 1024, "nk": 1024, "batch": (16,), "hq": 32, "hk": 32}
MEASURED = {
    "of few blocks": ({}, True),
    "of fewer": ({"nq": 512, "nk": 512, "batch": (32,), "causal": True}, True),
    "of the fewest": ({"nq": 256, "nk": 256, "batch": (64,), "causal": True}, False),
    "D = 128": ({"d": 128, "hq": 16, "hk": 16}, True),
    "D = 128, causal": ({"d": 128, "hq": 16, "hk": 16, "causal": True}, True),
    "D = 128, of few blocks": ({"d": 128, "hq": 32, "hk": 32, "nq": 512, "nk": 512}, False),
    "D = 256": ({"d": 256}, False),
    "of many blocks": ({"nq": 4096, "nk": 4096, "batch": (4,)}, False),
    "of many blocks, causal": ({"nq": 4096, "nk": 4096, "batch": (4,), "causal": True}, True),
    "of more blocks, causal": ({"nq": 8192, "nk": 8192, "batch": (4,), "causal": True}, False),
    "of few work items": ({"batch": (4,)}, False),
    "heads share keys": ({"hk": 16, "batch": (32,)}, False),
    "a window": ({"window": (300, 0)}, False),
    "queries that see nothing": ({"causal": True, "q_start": -100}, False),
    "no keys": ({"nk": 0}, False),
    "a softcap": ({"softcap": 10.0}, False),
    "lengths": ({"kv_lengths": np.full(16, 900)}, False),
}


@pytest.mark.parametrize(("given", "rounded"), MEASURED.values(), ids=MEASURED)
def test_dq_is_rounded_where_that_was_measured_to_be_faster(given, rounded):
    """Then there is no kernel after the main one, which has a map of dq more."""
    p = problem(**LIKE_MEASURED | given)
    _, main, *after = backward_launches(p)
    tile, q = main.config[0].tile, layouts_of(p)[0]
    assert tile.rounds_dq == rounded
    assert len(after) == (0 if rounded else 1)
    if rounded:
        assert main.maps[-1] == (q, KEYS, 32)
        assert main.shared_bytes == tile.layout(p.d, p.dv).bytes
        assert tile == replace(backward_tile(p), rounds_dq=True)


def test_sums_that_are_added_in_any_order_are_rounded_afterwards(monkeypatch):
    """Nobody counts who was there: the warp would wait for ever."""
    p = problem(**LIKE_MEASURED)
    assert len(backward_launches(p)) == 2
    monkeypatch.setattr(prepare_dq_order, "ordered", lambda *_: False)
    assert len(backward_launches(p)) == 3


@pytest.mark.parametrize("bound", ["FEWEST_ROUNDED", "MOST_ROUNDED"])
def test_either_bound_matters(bound, monkeypatch):
    """Four blocks of D = 128 are too few, and 32 of D = 64 too many."""
    few = problem(d=128, nq=512, nk=512, batch=(32,), hq=32, hk=32)
    many = problem(d=64, nq=4096, nk=4096, batch=(4,), hq=32, hk=32)
    assert not rounds(few, backward_tile(few))
    assert not rounds(many, backward_tile(many))
    monkeypatch.setattr(prepare_dq_order, bound, {64: 0, 128: 0} if bound == "FEWEST_ROUNDED" else 32)
    assert rounds(few, backward_tile(few)) == (bound == "FEWEST_ROUNDED")
    assert rounds(many, backward_tile(many)) == (bound == "MOST_ROUNDED")


@pytest.mark.parametrize("d", range(8, 129, 8))
@pytest.mark.parametrize("dv", [8, 64, 128])
def test_there_is_room_for_what_is_rounded(d, dv):
    """Beside everything else, which lies where it would lie without it; and nothing shares memory with anything."""
    plain = backward_tile(problem(d=d, dv=dv))
    tile = replace(plain, rounds_dq=True)
    layout, before = tile.layout(d, dv), plain.layout(d, dv)
    assert layout.bytes <= SHARED_LIMIT
    assert (layout.ds, layout.dq.tiles, layout.lse, layout.delta, layout.bounds) == (
        0,
        before.dq.tiles,
        before.lse,
        before.delta,
        before.bounds,
    )
    assert (layout.q, layout.work, layout.fetched) == (before.q, before.work, before.fetched)
    rounded, sums = 4096 * tile.rounded_slots, 2048 * tile.sum_slots
    sizes = {layout.rounding: 4 * len(Rounding._fields), layout.rounded: rounded, layout.sums: sums, layout.bytes - 1024: 0}
    assert sorted(sizes) == list(sizes)
    assert before.bytes - 1024 <= layout.rounding
    assert all(begin + sizes[begin] <= end for begin, end in itertools.pairwise(sizes))
    assert layout.rounded % 512 == layout.sums % 16 == layout.rounding % 4 == 0
