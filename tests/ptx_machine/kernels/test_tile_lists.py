"""Lists of the tiles of a mask, which the machine makes, against their definition; and that what is hidden is not looked at."""

import numpy as np
import pytest
from support import SIMULATED, named, random_inputs

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import SM80, backward_pass, machine
from support.on_host import on_host

from numba_flash import BlockMask, oracle, reference
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import ForwardInputs, bind
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.cuda.work import tile_lists
from numba_flash.cuda.work.prepare_tile_lists import Extras, TileShape, own_axes
from numba_flash.cuda.work.tile_lists import FIRST

pytestmark = pytest.mark.machine

BATCH, HEADS = 2, 3


def drawn(*shape) -> np.ndarray:
    """A mask of stretches of 16 queries and 16 keys, most of which are all hidden or all visible."""
    (*lead, nq, nk), rng = shape, np.random.default_rng(11)
    kinds = rng.choice([0, 0, 1, 2], (*lead, -(-nq // 48), -(-nk // 48)))
    kinds = kinds.repeat(48, -2).repeat(48, -1)[..., :nq, :nk]
    return (kinds == 2) | (kinds == 1) & (rng.random(shape) < 0.1)


def made(tiles: TileShape, mask, nq: int, nk: int, **options):
    """What kernels get of a mask."""
    q, k = np.empty((BATCH, HEADS, nq, 8), np.float16), np.empty((BATCH, HEADS, nk, 8), np.float16)
    problem = bind(q, k, k, mask=mask, **options)
    lengths = {name: x for name, x in options.items() if name.endswith("lengths")}
    blocks = mask.blocks if isinstance(mask, BlockMask) else mask
    inputs = ForwardInputs(q, k, k, mask=blocks, **lengths)
    extras = Extras(problem, Gpu(0, (9, 0), 2), ForwardInputs(*map(Layout.of, inputs)), tiles)
    with machine():
        found = extras.of(inputs)
    of_all_heads = lambda x: np.broadcast_to(x, (*problem.batch, HEADS, *x.shape[3:])).reshape(BATCH, HEADS, *x.shape[3:])
    return {name: of_all_heads(getattr(found, name)) for name in tiles.names}


@pytest.mark.parametrize(
    ("shape", "lengths", "expected"),
    [
        ((40, 50), (), (1, 1, 1)),
        ((BATCH, 1, 40, 50), (), (1, BATCH, 1)),
        ((HEADS, 40, 50), (), (1, 1, HEADS)),
        ((40, 50), ("q_lengths",), (1, BATCH, 1)),
        ((40, 50), ("kv_lengths",), (1, BATCH, 1)),
        ((HEADS, 40, 50), ("q_lengths", "kv_lengths"), (1, BATCH, HEADS)),
    ],
    ids=str,
)
def test_lists_are_of_all_whose_tiles_may_differ(shape, lengths, expected):
    """Under lengths of either kind, of each batch element, though they share the mask."""
    q, k = np.empty((BATCH, HEADS, 40, 8), np.float16), np.empty((BATCH, HEADS, 50, 8), np.float16)
    mask = np.ones(shape, bool)
    problem = bind(q, k, k, mask=mask, **{name: np.zeros(BATCH, int) for name in lengths})
    assert own_axes(problem, Layout.of(mask)) == expected
    of_one = np.broadcast_to(mask, (BATCH, HEADS, 40, 50))
    assert own_axes(problem, Layout.of(of_one)) == expected


@pytest.mark.parametrize("tiles", [TileShape(16, 64, True, 2), TileShape(64, 128, True, queue=True), TileShape(128, 64)], ids=str)
@pytest.mark.parametrize("of", ["pairs", "blocks"])
def test_there_is_a_thread_for_all_that_is_made_of_a_mask(tiles, of):
    """A block or a warp for each list, a thread for each group of an order, a warp for each place of a queue; and hardly one more."""
    q, n = Layout.compact((5, 7, 1100, 8), "float16"), 1100
    mask = np.broadcast_to(True, (5, 7, n, n)) if of == "pairs" else BlockMask(np.broadcast_to(True, (5, 7, 5, 5)), 256)
    problem = bind(*3 * [np.broadcast_to(np.float16(0), q.shape)], mask=mask)
    blocks = Layout.compact((5, 7, n, n) if of == "pairs" else (5, 7, 5, 5), "bool")
    extras = Extras(problem, Gpu(0, (9, 0), 132), ForwardInputs(q, q, q, mask=blocks), tiles)
    lists = 5 * 7 * extras.made.tiles.shape[3]
    groups = 5 * 7 * (0 if extras.made.order is None else extras.made.order.shape[4])
    of_list = 32 if of == "blocks" else 1024
    needed = {"build": of_list * lists, "build_order": groups, "build_queue": 32 * lists}
    for launch in extras.launches:
        wanted = needed[launch.builder.rsplit(".", 1)[1]]
        assert wanted <= launch.grid * launch.threads < wanted + launch.threads
    assert groups > 1024 or not tiles.share


def visible(mask, nq: int, nk: int, q_lengths=(), kv_lengths=(), **options) -> np.ndarray:
    """Which scores the oracle sees."""
    zeros = np.zeros((BATCH, HEADS, nq, nk))
    q, k = np.empty((BATCH, HEADS, nq, 8), np.float16), np.empty((BATCH, HEADS, nk, 8), np.float16)
    problem, eye = bind(q, k, k, mask=mask, **options), np.broadcast_to(np.eye(nk), (BATCH, HEADS, nk, nk))
    seen = np.broadcast_to(oracle._scores(problem, options | {"mask": mask}, zeros[None], eye[None])[2], (1, *zeros.shape))[0].copy()
    for b, n in enumerate(q_lengths):
        seen[b, :, n:] = False
    for b, n in enumerate(kv_lengths):
        seen[b, :, :, n:] = False
    return seen


def in_tiles(seen: np.ndarray, block_m: int, block_n: int, of) -> np.ndarray:
    """`of` (np.any or np.all) each tile; beyond the ends nothing is visible."""
    *_, nq, nk = seen.shape
    padded = np.pad(seen, [(0, 0)] * 2 + [(0, -nq % block_m), (0, -nk % block_n)])
    b, h, rows, cols = padded.shape
    return of(padded.reshape(b, h, rows // block_m, block_m, cols // block_n, block_n), axis=(3, 5))


CASES = {
    "16 bytes at a time": (drawn(BATCH, HEADS, 150, 160), {}),
    "4 bytes at a time, for all heads": (drawn(BATCH, 1, 150, 164), {}),
    "byte by byte": (drawn(HEADS, 150, 77), {}),
    "of any strides": (drawn(HEADS, 160, 150).swapaxes(-1, -2), {}),
    "the same for all queries": (drawn(BATCH, 1, 1, 192), {}),
    "many tiles": (drawn(70, 1300), {}),
    "a band": (drawn(200, 160), {"window": (40, 30)}),
    "lengths": (drawn(150, 160), {"q_lengths": np.array([150, 70]), "kv_lengths": np.array([96, 3])}),
    "everything up to ends": (np.ones((150, 160), bool), {"q_lengths": np.array([150, 70]), "kv_lengths": np.array([96, 35])}),
    "nothing": (np.zeros((100, 100), bool), {}),
    "everything": (np.ones((100, 100), bool), {"causal": True}),
}


@pytest.mark.parametrize("transposed", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("name", named(CASES, ("16 bytes at a time",)))
def test_lists_and_their_order(name, transposed):
    """What may be seen is listed, ascending; nothing that is not whole is said to be so, and what is whole without a band is said to be."""
    mask, options = CASES[name]
    nq, nk = max(mask.shape[-2], 60 if mask.shape[-2] == 1 else 0), mask.shape[-1]
    block_m, block_n, share = 32, 32, 2
    found = made(TileShape(block_m, block_n, transposed, share), mask, nq, nk, **options)
    seen = visible(mask, nq, nk, **options)
    some, every = (in_tiles(seen, block_m, block_n, of) for of in (np.any, np.all))
    listed, whole = np.zeros_like(some), np.zeros_like(some)
    for at in np.ndindex(found["tiles"].shape[:3]):
        count, *entries = found["tiles"][at].tolist()
        assert entries[:count] == sorted(set(entries[:count]))
        for entry in entries[:count]:
            place = (*at[:2], entry // 2, at[2]) if transposed else (*at, entry // 2)
            listed[place], whole[place] = True, entry % 2
    assert not (some & ~listed).any()
    assert not (whole & ~every).any()
    if "window" not in options:  # a tile of which the band hides what the mask leaves may be listed, too
        np.testing.assert_array_equal(listed, some)
    np.testing.assert_array_equal(whole, every)
    if transposed:
        groups = np.add.reduceat(listed, range(0, listed.shape[2], share), axis=2) > 0
        before, none = (np.cumsum(np.pad(x, [(0, 0)] * 3 + [(1, 0)]), axis=3) for x in (groups, listed))
        order = found["order"].swapaxes(2, 3)
        np.testing.assert_array_equal(order & (1 << FIRST) - 1, before)
        for row in range(listed.shape[2]):
            np.testing.assert_array_equal(order[:, :, row // share] >> FIRST + row % share & 1, none[:, :, row] == 0)


@pytest.mark.full
@pytest.mark.parametrize(("heads", "lengths"), [(1, False), (HEADS, True)])
def test_a_queue_begins_with_the_longest_lists(heads, lengths):
    """Each block has one place in it, of equals the first one the first; and nobody has taken any."""
    nq, nk = 1300, 160
    mask = BlockMask(np.random.default_rng(11).random((heads, -(-nq // 32), nk // 32)) < 0.4, 32)
    options = {"q_lengths": np.array([1300, 70])} if lengths else {}
    found = made(TileShape(32, 32, queue=True), mask, nq, nk, **options)
    assert found["queue"][0, 0, 0, -1] == 0
    for counts, (queue,) in zip(found["tiles"][..., 0].reshape(-1, 41), found["queue"][..., :-1].reshape(-1, 1, 41), strict=True):
        np.testing.assert_array_equal(queue, np.argsort(-counts, kind="stable"))


def test_places_beyond_the_blocks_of_a_queue_are_blocks_of_their_own_number():
    """Packed sequences have such places; the number behind the blocks of the first head is none of these."""
    queue = np.array([[2, 0, 1, 77], [1, 2, 0, -1]], np.int32).reshape(1, 1, 2, 1, 4)
    with on_host(tile_lists):
        found = [[int(tile_lists.queued(queue, 0, 0, head, place)) for place in range(6)] for head in range(2)]
    assert found == [[2, 0, 1, 3, 4, 5], [1, 2, 0, 3, 4, 5]]


BLOCKS = {
    "as large as tiles": (32, 1, {}),
    "larger": (64, HEADS, {"causal": True}),
    "smaller": ((16, 8), HEADS, {}),
    "that do not fit": ((50, 33), 1, {"window": (90, 20)}),
    "long rows": ((1, 64), HEADS, {"q_lengths": np.array([150, 70]), "kv_lengths": np.array([96, 3])}),
    "long columns": ((100, 1), 1, {}),
    "more than a warp's tiles": (32, 1, {"nk": 1300}),
}


WANTED = {"lists": TileShape(32, 32), "order": TileShape(32, 64, True, 2), "bits": TileShape(32, 32, bits=True)}


@pytest.mark.parametrize("of", named(WANTED, ("order",)))
@pytest.mark.parametrize("name", named(BLOCKS, ("that do not fit",)))
def test_lists_made_of_blocks_are_those_of_pairs(name, of):
    """Bit by bit, without the mask of pairs."""
    (size, heads, options), of = BLOCKS[name], WANTED[of]
    nq, nk = 150, options.get("nk", 160)
    options = {each: x for each, x in options.items() if each != "nk"}
    counts = BlockMask(np.ones((1, 1), bool), size).block_size.counts(nq, nk)
    mask = BlockMask(np.random.default_rng(11).random((heads, *counts)) < 0.4, size)
    assert mask.blocks.nbytes < mask.dense(nq, nk).nbytes
    by_blocks, by_pairs = (made(of, each, nq, nk, **options) for each in (mask, mask.dense(nq, nk)))
    for kind, x in by_blocks.items():
        y = by_pairs[kind]
        if kind == "tiles":  # what lies beyond a list's end is nobody's
            there = np.arange(x.shape[-1]) <= x[..., :1]
            assert there.any()
            x, y = np.where(there, x, 0), np.where(there, y, 0)
        np.testing.assert_array_equal(x, y)


@pytest.mark.full
def test_bits_say_the_same_as_lists():
    mask = drawn(HEADS, 150, 1300)
    found = made(TileShape(32, 32, bits=True), mask, 150, 1300)
    words = found["bits"]
    at = np.arange(-(-1300 // 32))
    seen, whole = ((words[..., kind::2][..., at // 32] >> (at % 32).astype(np.uint32)) & 1 == 1 for kind in (0, 1))
    shown = np.broadcast_to(mask, (BATCH, HEADS, 150, 1300))
    np.testing.assert_array_equal(seen, in_tiles(shown, 32, 32, np.any))
    np.testing.assert_array_equal(whole, in_tiles(shown, 32, 32, np.all))


@pytest.mark.full
def test_what_a_mask_hides_as_a_whole_is_not_looked_at():
    """Keys of tiles that no query sees, and queries of tiles that see no key: NaN there would reach everything else in a product."""
    nq, nk, d = 256, 384, 64
    q, k, v, do = random_inputs(batch=(1,), hq=2, hk=1, nq=nq, nk=nk, d=d, dtype="float16")
    mask = np.ones((nq, nk), bool)
    mask[:, 128:256] = mask[128:] = False
    o, lse = reference.forward(q, k, v, mask=mask, return_lse=True)
    for x, hidden in ((k, slice(128, 256)), (v, slice(128, 256)), (q, slice(128, None)), (do, slice(128, None))):
        x[:, :, hidden] = np.nan
    with machine(capability=(8, 0)):
        found = SM80.forward(q, k, v, mask=mask, return_lse=True)
        gradients = SM80.backward(do, q, k, v, o.astype(q.dtype), lse.astype(np.float32), mask=mask)
    np.testing.assert_allclose(found[0].astype(np.float64), o, atol=2e-3)
    np.testing.assert_array_equal(found[1][:, :, 128:], -np.inf)
    dq, dk, dv = gradients
    assert all(np.isfinite(x).all() for x in gradients)
    assert not dq[:, :, 128:].any()
    assert not dk[:, :, 128:256].any()
    assert not dv[:, :, 128:256].any()


@pytest.mark.full
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
def test_heads_whose_lists_are_empty_are_passed_over(backend):
    """However many of those that share keys follow each other, also the first or the last."""
    mask = np.ones((3, 4, 70, 140), bool)
    mask[0, 1:3] = mask[1, :3] = mask[2, :1] = mask[2, 2:] = False
    arrays = random_inputs(batch=(3,), hq=4, hk=1, nq=70, nk=140, d=16, dtype="float16")
    backward_pass(backend, arrays, 0, mask=mask)
