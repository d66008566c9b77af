"""What the sm90 tier decides on the host, and which block computes what, with no GPU."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support import DTYPES, SIMULATED, dense_visible

if SIMULATED:
    pytest.skip("the CUDA simulator has no tensor cores", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the schedule is written with numba-cuda")

from support.on_host import on_host

import numba_flash
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.options import PLAIN, Options
from numba_flash.arguments.problem import MAX_LENGTH, BackwardInputs, BackwardResults, ForwardInputs, ForwardResults, Problem, bind
from numba_flash.cuda.arguments import Extent, build_extras
from numba_flash.cuda.runtime import launch, tensor_maps
from numba_flash.cuda.runtime.launch import Gpu, Launch
from numba_flash.cuda.score.fetch import held
from numba_flash.cuda.score.fragment import runs_of_columns
from numba_flash.cuda.score.swizzle import PANEL
from numba_flash.cuda.sm90 import prepare_pairs, tier
from numba_flash.cuda.sm90.arguments import BACKWARD_TILES, DbiasNote, Sizes, TileNote, scales
from numba_flash.cuda.sm90.backward import prepare_block_sparse
from numba_flash.cuda.sm90.backward.backward_tiles import NOTE_BYTES, BackwardTile, backward_tile
from numba_flash.cuda.sm90.backward.options_tiles import backward_options_tile
from numba_flash.cuda.sm90.bias_gradient import prepare_dbias, resident_dbias
from numba_flash.cuda.sm90.bias_gradient.dbias_tiles import NOTE_BYTES as DBIAS_NOTE_BYTES
from numba_flash.cuda.sm90.bias_gradient.dbias_tiles import ROWS_TILES, dbias_tile, keys_tile, queries_tile
from numba_flash.cuda.sm90.config import NOTED
from numba_flash.cuda.sm90.forward.forward_tiles import (
    COPYING,
    FORWARD_TILES,
    KV_SPLIT_TILES,
    ResidentTile,
    forward_tile,
    kv_split_tile,
    options_tile,
    resident_tile,
    words_held,
)
from numba_flash.cuda.sm90.rings import MBARRIER_BYTES, Buffer, Ring, Slots, lay_out
from numba_flash.cuda.sm90.tiles import KEYS, OUTPUT_ROWS, SHARED_LIMIT, WORK_BYTES
from numba_flash.cuda.work import broadcast, grid, schedule
from numba_flash.cuda.work.prepare_tile_lists import Extras as ListExtras
from numba_flash.cuda.work.prepare_tile_lists import TileShape
from numba_flash.cuda.work.prepare_tile_lists import choose as choose_tile
from numba_flash.plan import choose

H200 = Gpu(0, (9, 0), 132)
HEAD_DIMS = range(8, 257, 8)


def problem(nq=100, nk=200, d=64, dv=None, batch=(2,), hq=2, hk=1, dtype=np.float16, **options) -> Problem:
    zeros = lambda *shape: np.broadcast_to(np.zeros((), dtype), shape)
    return bind(zeros(*batch, hq, nq, d), zeros(*batch, hk, nk, d), zeros(*batch, hk, nk, dv or d), **options)


# ---- what is refused -----------------------------------------------------------------------------------------------------------------


REFUSED = {
    "float64": (problem(dtype=np.float64), "serves float16, bfloat16 and float32; q.dtype is float64"),
    "softcap with float32": (problem(dtype=np.float32, softcap=3.0), "does not know a softcap with float32"),
    "bias with float32": (problem(dtype=np.float32, bias=np.zeros(200, np.float32)), "does not know a bias with float32"),
    "D = 20 with float32": (
        problem(dtype=np.float32, d=20),
        "needs head dimensions that are multiples of 8; q.shape[-1] is 20, v.shape[-1] 20",
    ),
    "d": (problem(d=20), "needs head dimensions that are multiples of 8; q.shape[-1] is 20, v.shape[-1] 20"),
    "dv": (problem(dv=12), "needs head dimensions that are multiples of 8; q.shape[-1] is 64, v.shape[-1] 12"),
    "scale 0": (problem(scale=0.0), "needs a positive, finite scale; got 0.0"),
    "scale < 0": (problem(scale=-0.5), "needs a positive, finite scale; got -0.5"),
    "softcap > 1024": (problem(softcap=1025.0), "needs a softcap between scale / 1e+38 and 1024; got 1025.0"),
    "softcap < scale / 1e38": (problem(softcap=1e-37, scale=11.0), "needs a softcap between scale / 1e+38 and 1024; got 1e-37"),
    "no keys": (problem(nk=0), "needs at least one query and one key"),
    "no queries": (problem(nq=0), "needs at least one query and one key"),
    "no batch": (problem(batch=(0,)), "needs at least one query and one key"),
}
OPTIONS_BEYOND_A_CAP = {
    "bias": (problem(bias=np.zeros(200, np.float32)), "a bias"),
    "mask": (problem(mask=np.ones(200, bool)), "a mask array"),
    "blocks": (problem(mask=numba_flash.BlockMask(np.ones((1, 2), bool), 128)), "a mask array"),
    "blocks that do not fit": (problem(mask=numba_flash.BlockMask(np.ones((2, 4), bool), 50)), "a mask array"),
    "dropout": (problem(dropout=0.5, rng=(1, 2)), "dropout"),
    "score_mod": (problem(score_mod=numba_flash.alibi([0.5, 0.25])), "a score_mod"),
}
SERVED = {
    "a cap of any size with a mask": problem(mask=np.ones(200, bool), softcap=1025.0),
    "plain": problem(),
    "softcap": problem(softcap=3.0, causal=True),
    "softcap 1024": problem(softcap=1024.0),
    "lengths": problem(kv_lengths=np.array([3, 4])),
    "dims": problem(d=8, dv=256),
    "scale": problem(scale=1e-3),
    "five dimensions": problem(batch=(2, 3), window=(3, 5)),
}
WIDE = {"hq": 64, "hk": 64, "nq": 1000, "nk": 1000, "dtype": np.float32}
SERVED |= {
    "float32": problem(**WIDE),
    "float32 with lengths": problem(**WIDE, kv_lengths=np.array([3, 4]), causal=True),
    "float32 of other dims": problem(**WIDE | {"d": 8}, dv=128),
    "float32, less accurate": problem(**WIDE, precision="tf32"),
}


def inputs_of(p: Problem) -> ForwardInputs:
    dtype = "float16" if p.dtype == "bfloat16" else p.dtype
    q, k, v = np.zeros((*p.batch, p.hq, p.nq, p.d), dtype), np.zeros((*p.batch, p.hk, p.nk, p.d), dtype), np.zeros((1, p.dv), dtype)
    return ForwardInputs(q, k, np.broadcast_to(v, (*p.batch, p.hk, p.nk, p.dv)))


@pytest.mark.parametrize(("p", "sentence"), REFUSED.values(), ids=REFUSED)
def test_problems_that_are_refused(p, sentence):
    assert tier._why_not_problem(p) == sentence
    assert tier.why_not("forward", p, inputs_of(p), True, H200) == sentence


@pytest.mark.parametrize("p", SERVED.values(), ids=SERVED)
def test_problems_that_are_served(p):
    assert tier._why_not_problem(p) is None
    assert tier.why_not("forward", p, inputs_of(p), True, H200) is None
    assert tier.why_not("forward", p, inputs_of(p), False, H200) is None


@pytest.mark.parametrize(("p", "option"), OPTIONS_BEYOND_A_CAP.values(), ids=OPTIONS_BEYOND_A_CAP)
def test_gradients_with_options_are_served(p, option):
    """Up to head dimension 128, that of a bias among them. Forward, the tile is that of the kernel with options."""
    inputs = inputs_of(p)
    x = np.zeros((*p.batch, p.hq, p.nq, p.d), np.float16)
    gradients = BackwardInputs(x, *inputs[:3], x, None)
    why_not = lambda p, demanded, **more: tier.why_not("backward", p, gradients, demanded, H200, **more)
    for demanded in (True, False):
        assert tier.why_not("forward", p, inputs, demanded, H200) is None
        wide = f"has no backward pass with {option} beyond head dimension 128"
        assert {why_not(replace(p, d=136), demanded), why_not(replace(p, dv=136), demanded)} == {wide}
        assert why_not(p, demanded, dbias=bool(p.options.bias)) is None
        assert why_not(replace(p, dtype="float64"), demanded) == "serves float16, bfloat16 and float32; q.dtype is float64"
        assert why_not(p, demanded) is why_not(replace(p, d=128, dv=128), demanded) is None
    assert choose(p, inputs, None, gpu=H200).backend == "sm90"
    assert choose(p, gradients, None, "backward", gpu=H200).backend == "sm90"


def test_options_of_gradients_are_named_together():
    p = problem(mask=np.ones(200, bool), dropout=0.5, rng=(1, 2), softcap=3.0, d=136, dv=136)
    x = np.zeros((2, 2, 100, 136), np.float16)
    gradients = BackwardInputs(x, *inputs_of(p)[:3], x, None)
    sentence = "has no backward pass with a mask array or dropout beyond head dimension 128"
    assert tier.why_not("backward", p, gradients, False, H200) == sentence


def test_a_wanted_gradient_of_a_bias_is_refused_before_anything_is_computed():
    x, lse = np.zeros((2, 5, 136), np.float16), np.zeros((2, 5), np.float32)
    bias = np.zeros((5, 5), np.float16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "why_not", lambda x: None)
        patch.setattr(launch, "gpu_of", lambda x: H200)
        with pytest.raises(NotImplementedError, match="backend sm90: has no backward pass with a bias beyond head dimension 128"):
            numba_flash.backward(x, x, x, x, x, lse, bias=bias, bias_grad=True, backend="sm90")


REFUSED_FLOAT32 = {
    "backward, less accurate": (
        "backward",
        problem(**WIDE, precision="tf32"),
        "has no backward pass of one product for three (precision='tf32')",
    ),
    "d": ("forward", problem(**WIDE | {"d": 136}), "serves float32 up to head dimension 128"),
    "dv": ("forward", problem(**WIDE, dv=256), "serves float32 up to head dimension 128"),
    "precision": ("forward", problem(**WIDE, precision="ieee"), "computes no IEEE products (precision='ieee')"),
}


@pytest.mark.parametrize(("kind", "p", "sentence"), REFUSED_FLOAT32.values(), ids=REFUSED_FLOAT32)
def test_float32_that_is_refused(kind, p, sentence):
    for demanded in (True, False):
        assert tier.why_not(kind, p, inputs_of(p), demanded, H200) == sentence


def test_few_products_of_float32_are_served_on_demand():
    p = problem(dtype=np.float32)
    assert tier.why_not("forward", p, inputs_of(p), True, H200) is None
    sentence = "serves so few products of float32 on demand only (backend='sm90'): others are faster"
    assert tier.why_not("forward", p, inputs_of(p), False, H200) == sentence


def test_few_queries_of_many_keys_are_served_on_demand():
    """Those of float32 or float64 have no faster kernel."""
    sentence = "serves so few queries on demand only (backend='sm90'): others read a key but once"
    for sizes, refused in (({}, True), ({"nq": 17}, False), ({"nk": 511}, False), ({"dtype": "float32"}, False)):
        p = replace(problem(nq=16, nk=512), **sizes)
        inputs = inputs_of(p)
        assert tier.why_not("forward", p, inputs, True, H200) is None
        assert (tier.why_not("forward", p, inputs, False, H200) == sentence) == refused
        of_gradients = BackwardInputs(inputs.q, *inputs[:3], inputs.q, None)
        assert (tier.why_not("backward", p, of_gradients, False, H200) == sentence) == refused


@pytest.mark.parametrize(("kind", "nk", "most"), [("forward", 201, 64), ("forward", 208, 32), ("backward", 200, 32)])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_what_a_small_head_waits_for_is_served_on_demand(name, kind, nk, most):
    """Forward up to 64, but for rows at multiples of 16 bytes, which the copy engine brings."""
    which = f"serves such a bias or mask of each pair up to head dimension {most} on demand only"
    sentence = f"{which} (backend='sm90'): it waits for it longer than others"
    dtype = bool if name == "mask" else np.float16
    of_pairs, of_keys = np.zeros((100, nk), dtype), np.zeros(nk, dtype)
    broadcast = np.broadcast_to(of_keys, (100, nk))
    for d, dv, x, refused in (
        (most, most, of_pairs, True),
        (most, most + 8, of_pairs, False),
        (32, 32, of_keys, False),
        (32, 32, of_keys[None], False),
        (32, 32, broadcast, False),
    ):
        p = problem(d=d, dv=dv, nk=nk, **{name: x})
        inputs = inputs_of(p)._replace(**{name: x})
        if kind == "backward":
            o = np.zeros((*p.batch, p.hq, p.nq, p.dv), np.float16)
            inputs = BackwardInputs(o, *inputs[:3], o, None)._replace(**{name: x})
        assert tier.why_not(kind, p, inputs, True, H200) is None
        assert tier.why_not(kind, p, inputs, False, H200) == (sentence if refused else None)


def copied_in_forward(p: Problem, **arrays):
    """The forward kernel's tile, and the box of what belongs to pairs."""
    q, k, v, o = layouts_of(p)
    inputs = ForwardInputs(q, k, v, **{name: Layout.of(x) for name, x in arrays.items()})
    results = ForwardResults(o, Layout.compact(q.shape[:-1], "float32"))
    *_, main = tier.prepare_forward(p, inputs, results, H200).launches
    return main.config[0].tile, main.maps[4:]


@pytest.mark.parametrize(
    ("shape", "change", "described"),
    [
        ((2, 4, 96, 208), lambda x: x, (1, 2, 4, 96, 104)),
        ((96, 208), lambda x: x, (1, 1, 1, 96, 104)),
        ((96, 208), lambda x: np.broadcast_to(x, (2, 4, 96, 208)), (1, 1, 1, 96, 104)),
        ((4, 96, 224), lambda x: x[..., :208], (1, 1, 4, 96, 104)),
        ((96, 216), lambda x: x[:, :208], None),
        ((1, 208), lambda x: x, None),
        ((208, 96), lambda x: x.T, None),
        ((96, 224), lambda x: x[:, :207], None),  # the last key has no neighbour
    ],
)
def test_a_mask_is_copied_in_tiles_two_keys_at_a_time(shape, change, described):
    mask = change(np.ones(shape, bool))
    p = problem(hq=4, hk=4, nq=96, nk=mask.shape[-1], mask=mask)
    tile, maps = copied_in_forward(p, mask=mask)
    assert (tile.pair_stages > 0) == (described is not None)
    assert [(x.shape, x.strides[-1], rows) for x, rows in maps] == ([(described, 2, tile.block_m)] if described else [])


@pytest.mark.parametrize(("d", "dtype", "stages"), [(64, "float16", 2), (72, "float16", 0), (64, "float32", 0)])
def test_a_bias_is_copied_in_the_forward_pass_up_to_64(d, dtype, stages):
    bias = np.zeros((96, 200), dtype)
    tile, maps = copied_in_forward(problem(d=d, dv=d, nq=96, nk=200, bias=bias), bias=bias)
    assert (tile.pair_stages, len(maps)) == (stages, int(stages > 0))


@pytest.mark.parametrize(("size", "copied"), [((128, 96), False), (128, True), ((128, 192), False), (384, True)])
@pytest.mark.parametrize("d", [32, 64])
def test_beside_blocks_a_bias_is_copied_to_tiles_that_lie_within_them(d, size, copied):
    """The main kernel goes through lists, and knows no mask."""
    bias, mask = np.zeros((384, 384), np.float16), numba_flash.BlockMask(np.ones((1, 1), bool), size)
    p = problem(nq=384, nk=384, d=d, dv=d, bias=bias, mask=mask)
    tile, maps = copied_in_forward(p, bias=bias, mask=mask.blocks)
    assert p.options.blocks.divided_by(tile.block_m, tile.block_n)
    assert (tile.pair_stages > 0) == (len(maps) == 1) == copied


def test_a_bias_and_a_mask_together_are_read_by_threads():
    bias, mask = np.zeros((96, 208), np.float16), np.ones((96, 208), bool)
    tile, maps = copied_in_forward(problem(nq=96, nk=208, bias=bias, mask=mask), bias=bias, mask=mask)
    assert (tile.pair_stages, maps) == (0, ())


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_tiles_of_pairs_lie_behind_everything_else(name):
    for row in COPYING[name]:
        tile, d = row.tile, row.d
        layout = tile.layout(d, d)
        assert layout.bytes <= SHARED_LIMIT
        assert layout.pairs.tiles % layout.ALIGNMENT == layout.pairs.slot_bytes % layout.ALIGNMENT == 0
        behind = layout.work.free + MBARRIER_BYTES * layout.work.slots
        assert behind <= layout.pairs.tiles
        assert layout.pairs.tiles + layout.pairs.slot_bytes * layout.pairs.slots == layout.pairs.ready
        assert layout.pairs.free + MBARRIER_BYTES * layout.pairs.slots + layout.ALIGNMENT == layout.bytes
        assert tile.pair_panels * PANEL * tile.keys_of_element >= tile.block_n


def test_float32_in_any_strides_is_served():
    p = problem(**WIDE)
    q, k, v, *_ = inputs_of(p)
    assert tier.why_not("forward", p, ForwardInputs(q[..., ::-1, :], k[..., ::-1], v), True, H200) is None


def test_bfloat16_is_served():
    assert tier._why_not_problem(replace(problem(), dtype="bfloat16")) is None


def test_refusals_beyond_the_problem(monkeypatch):
    p = problem()
    inputs = inputs_of(p)
    assert tier.why_not("forward", None, inputs, True, H200) is None
    o = np.zeros((2, 1, 8, 128), np.float16)
    backward = BackwardInputs(o, *inputs[:3], o, None)
    assert tier.why_not("backward", p, backward, True, H200) is None
    for name in ("do", "o"):
        strided = backward._replace(**{name: o[..., ::2]})
        reason = tier.why_not("backward", p, strided, True, H200)
        assert reason.startswith(f"needs neighbours along the head dimension to be neighbours in memory; {name}")
    strided = inputs._replace(k=np.zeros((2, 1, 200, 128), np.float16)[..., ::2])
    assert tier.why_not("forward", p, strided, True, H200).startswith("needs neighbours along the head dimension")
    for capability in ((8, 0), (10, 0), (12, 1)):
        sentence = "needs a GPU of compute capability 9.0 (Hopper); this one has {}.{}".format(*capability)
        other = H200._replace(capability=capability)
        assert tier.why_not("forward", p, inputs, True, other) == sentence
        with monkeypatch.context() as patch:  # the GPU that the arrays are on
            patch.setattr(launch, "why_not", lambda x: None)
            patch.setattr(launch, "gpu_of", lambda x, other=other: other)
            assert tier.why_not("forward", p, inputs, True) == sentence
    monkeypatch.setattr(launch, "why_not", lambda x: "no GPU at all")
    assert tier.why_not("forward", p, inputs, True) == "no GPU at all"


X = np.zeros((2, 3, 10, 32), np.float16)
LAYOUTS = {
    "contiguous": (X, None),
    "heads last": (X.swapaxes(1, 2), None),
    "every other row": (X[..., ::2, :], None),
    "some columns": (X[..., 8:24], None),
    "broadcast": (np.broadcast_to(X[:1], (5, 3, 10, 32)), None),
    "one row of odd strides": (np.zeros((1, 20), np.float16)[:, :16], None),
    "one of each": (np.lib.stride_tricks.as_strided(X, (1, 1, 1, 32), (2, -6, 3, 2)), None),
    "transposed": (X.swapaxes(-1, -2), "needs neighbours along the head dimension to be neighbours in memory; k has strides"),
    "every other column": (X[..., ::2], "needs neighbours along the head dimension"),
    "reversed columns": (X[..., ::-1], "needs neighbours along the head dimension"),
    "columns broadcast": (np.broadcast_to(X[..., :1], X.shape), "needs neighbours along the head dimension"),
    "rows of 40 bytes": (np.zeros((5, 20), np.float16)[:, :16], "needs strides that are multiples of 16 bytes and not negative; k has"),
    "reversed rows": (X[..., ::-1, :], "needs strides that are multiples of 16 bytes and not negative"),
    "reversed heads": (X[:, ::-1], "needs strides that are multiples of 16 bytes and not negative"),
}


@pytest.mark.parametrize(("x", "sentence"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(x, sentence):
    reason = tensor_maps.why_not("k", Layout.of(x))
    assert reason is None if sentence is None else reason.startswith(sentence)
    assert reason is None or str(x.strides) in reason


def test_addresses():
    sentence = "needs addresses that are multiples of 16; k begins 8 bytes after one"
    assert tensor_maps.why_not("k", Layout.of(X)._replace(offset=8)) == sentence


# ---- tiles ---------------------------------------------------------------------------------------------------------------------------


OPTIONS = (
    *(Options(bias=bias, mask=mask) for bias in (None, "float16", "float32") for mask in (False, True)),
    Options(dropout=0.5),
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: " ".join(options.used) + f" {options.bias}")
def test_every_problem_with_options_has_a_tile_that_fits(options):
    """And what a lane keeps of bias and mask is what tiles were chosen by."""
    base = replace(problem(), options=options)
    for d, dv in itertools.product(HEAD_DIMS, HEAD_DIMS):
        tile = choose_tile(replace(base, d=d, dv=dv), options_tile).tile
        assert tile.layout(d, dv).bytes <= SHARED_LIMIT, (d, dv, tile)
        assert tile.block_n % 16 == 0
        assert held(options, runs_of_columns(tile.block_n)).words * 4 == words_held(options) * tile.block_n


@pytest.mark.parametrize(
    "options", [*OPTIONS, Options(dropout=0.5, softcap=1.0)], ids=lambda options: " ".join(options.used) + f" {options.bias}"
)
def test_every_backward_pass_with_options_has_a_tile_that_fits(options):
    """Notes about tiles lie behind everything else; parts of a tile are as many columns as products and dropout's counters want."""
    base = replace(problem(), options=options)
    for d, dv in itertools.product(range(8, 129, 8), repeat=2):
        tile = backward_options_tile(replace(base, d=d, dv=dv))
        layout, plain = tile.layout(d, dv), BackwardTile(tile.block_m, tile.stages, tile.do_stages, False).layout(d, dv)
        assert layout.bytes <= SHARED_LIMIT, (d, dv, tile)
        assert layout.notes % 16 == 0
        assert layout.notes >= plain.bytes - plain.ALIGNMENT
        assert layout.notes + NOTE_BYTES * tile.stages == layout.bias.ready
        assert layout.bias.free + MBARRIER_BYTES * layout.bias.slots + layout.ALIGNMENT == layout.bytes
        assert layout.bias[:3] == (layout.ds, layout.ds_bytes, 2)
        assert NOTE_BYTES >= 4 * len(TileNote._fields)
        assert (tile.block_m % tile.columns, tile.columns % 16) == (0, 0)
    assert 4 * (BACKWARD_TILES + 1) <= WORK_BYTES


@pytest.mark.parametrize(
    ("shape", "dtype", "change", "described"),
    [
        ((2, 4, 96, 200), "float16", lambda x: x, (1, 2, 4, 96, 200)),
        ((1, 4, 96, 200), "bfloat16", lambda x: x, (1, 1, 4, 96, 200)),
        ((96, 200), "float16", lambda x: x, (1, 1, 1, 96, 200)),
        ((96, 200), "float16", lambda x: np.broadcast_to(x, (2, 4, 96, 200)), (1, 1, 1, 96, 200)),
        ((4, 96, 208), "float16", lambda x: x[..., :200], (1, 1, 4, 96, 200)),
        ((96, 201), "float16", lambda x: x[:, :200], None),
        ((1, 200), "float16", lambda x: x, None),
        ((96, 1), "float16", lambda x: x, None),
        ((200, 96), "float16", lambda x: x.T, None),
        ((96, 200), "float32", lambda x: x, None),
    ],
)
def test_a_bias_is_copied_in_tiles_where_a_tensor_map_can_describe_it(shape, dtype, change, described):
    """Axes of heads that it is broadcast along are left out of the map."""
    bias = change(np.zeros(shape, DTYPES[dtype]))
    p = problem(hq=4, hk=4, nq=96, dtype=DTYPES["float16" if dtype == "float32" else dtype], bias=bias)
    found = prepare_pairs.tiles_of_bias(p, Layout.of(bias))
    assert (found and found.shape) == described
    q, k, v, o = layouts_of(p)
    inputs = BackwardInputs(o, q, k, v, o, Layout.compact(q.shape[:-1], "float32"))._replace(bias=Layout.of(bias))
    *_, main, _ = tier.prepare_backward(p, inputs, BackwardResults(q, k, v), True, H200).launches
    assert main.config[0].tile.copies_bias == (described is not None)
    assert main.maps[6:] == (((found, 64),) if described else ())


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 3.0}, {"kv_lengths": np.array([3, 4])}], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_ds_is_kept_in_registers_where_no_option_needs_them(d, options):
    assert backward_tile(problem(d=d, **options)).keeps_ds == (d == 64 or not options or "causal" in options)


@pytest.mark.parametrize("nk", [1, 2, 1024, 1025, 12288, 12289, 2**17, MAX_LENGTH])
@pytest.mark.parametrize("causal", [False, True])
def test_every_problem_has_a_tile_that_fits(nk, causal):
    base = problem(nq=nk, nk=nk, causal=causal)
    for d, dv in itertools.product(HEAD_DIMS, HEAD_DIMS):
        p = replace(base, d=d, dv=dv)
        for tile in (forward_tile(p), kv_split_tile(p)):
            assert tile.layout(d, dv).bytes <= SHARED_LIMIT, (d, dv, tile)


def test_addresses_and_size_follow_from_tables():
    """Equal layouts are one key."""
    first = {"rows": Buffer(40, 2), "k": Slots(512, 3), "dq": Slots(40, 2, of="rows"), "work": Slots(64, 1)}
    behind = {"notes": Buffer(20), "words": Buffer(8), "panel": Buffer(64, aligned=1024), "none": Slots(0, 1)}
    layout = lay_out(first, behind, columns=7)
    mbarriers = 1024 + 3 * 512 + 64
    assert layout.rows == 0
    assert layout.k == Ring(1024, 512, 3, mbarriers, mbarriers + 24)
    assert layout.dq == Ring(0, 40, 2, mbarriers + 48, mbarriers + 64)
    assert layout.work == Ring(1024 + 3 * 512, 64, 1, mbarriers + 80, mbarriers + 88)
    assert (layout.notes, layout.words, layout.panel) == (mbarriers + 96, mbarriers + 128, 3072)
    assert layout.none == Ring(3136, 0, 1, 3136, 3144)
    assert (layout.bytes, layout.ALIGNMENT, layout.columns) == (3152 + 1024, 1024, 7)
    assert {layout: 1}[lay_out(first, behind, columns=7)] == 1


ALL_TILES = {(row.d, row.dv, row.tile) for row in (*itertools.chain(*FORWARD_TILES.values()), *KV_SPLIT_TILES)}


@pytest.mark.parametrize(("d", "dv", "tile"), sorted(ALL_TILES, key=repr))
def test_shared_memory_is_laid_out_without_overlaps(d, dv, tile):
    for dims in ((d, dv), (8, dv), (d, 8), (d - 24, dv - 8)):
        layout = tile.layout(*dims)
        pieces = [(layout.o, layout.o_panels * tile.block_m * 128)]
        for name in ("q", "k", "v", "work"):
            slots, slot_bytes, count, ready, free = getattr(layout, name)
            if name != "work":
                assert slots % layout.ALIGNMENT == slot_bytes % layout.ALIGNMENT == 0, "swizzled panels begin at multiples of 1024"
            assert ready % 8 == free % 8 == 0
            pieces += [(slots, slot_bytes * count), (ready, 8 * count), (free, 8 * count)]
        pieces.sort()
        assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(pieces))
        assert sum(pieces[-1]) + layout.ALIGNMENT <= layout.bytes
    assert (tile.block_m % 64, tile.block_n % 16, tile.block_n <= 256) == (0, 0, True)
    fewest, most = tile.registers
    assert all(count % 8 == 0 and 24 <= count <= 256 for count in (fewest, most))
    began_with = 65536 // tile.threads // 8 * 8  # registers of each thread, all that a block ever has
    assert 128 * (fewest + tile.consumers * most) <= tile.threads * began_with, "one group would wait for more for ever"


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_every_tile_of_a_backward_pass_has_room_for_what_it_multiplies(d):
    layout = backward_tile(problem(d=d)).layout(d, d)
    for name in ("q", "do", "k", "v"):
        ring = getattr(layout, name)
        assert ring.slots >= 1, name
        assert ring.slot_bytes >= 2 * 64 * d, name


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("nq", "nk"), [(300, 500), (64, 96), (65, 97), (1, 1), (63, 6145)])
def test_lists_have_a_place_for_every_tile(nq, nk, transposed):
    """And for how many there are; bits are in pairs of words."""
    mask = Layout.compact((nq, nk), "bool")
    p = problem(nq=nq, nk=nk, mask=np.broadcast_to(True, (nq, nk)))
    rows, columns = math.ceil(nq / 64), math.ceil(nk / 96)
    blocks, across = (columns, rows) if transposed else (rows, columns)
    made = ListExtras(p, H200, inputs_of(p)._replace(mask=mask), TileShape(64, 96, transposed=transposed, share=1, queue=True)).made
    assert made.tiles.shape[3:] == (blocks, 1 + across)
    assert (made.bits.shape[3], made.bits.shape[4] % 2, 32 * made.bits.shape[4] >= across) == (blocks, 0, True)
    assert (made.order.shape[3:], made.queue.shape[3:]) == ((blocks + 1, rows), (1, blocks + 1))


@pytest.mark.parametrize("seed", range(100))
def test_what_the_band_hides(seed):
    rng = np.random.default_rng(seed)
    nq, nk = (int(n) for n in rng.integers(1, 12, 2))
    window = [None, tuple(int(n) for n in rng.integers(-1, 12, 2))][rng.integers(2)]
    p = problem(nq=nq, nk=nk, causal=bool(rng.integers(2)), window=window, q_start=[None, int(rng.integers(-12, 13))][rng.integers(2)])
    diagonal = np.arange(nk) - np.arange(nq)[:, None]
    below, above = (diagonal < p.low).any(), (diagonal > p.high).any()
    assert p.band == ("both" if below else "above" if above else "none")


# ---- parts of the keys ---------------------------------------------------------------------------------------------------------------


def test_keys_are_split_where_there_are_few_row_blocks():
    parts = lambda p: grid.kv_splits(p, 128, 128, H200.multiprocessors)
    long = problem(nq=1, nk=2**17, batch=(), hq=1)
    assert parts(long) == 132
    assert parts(replace(long, hq=66)) == 2
    assert parts(replace(long, nq=66 * 128)) == 2
    assert parts(replace(long, hq=67)) == 1
    assert parts(replace(long, nq=66 * 128 + 1)) == 1
    one = lambda **options: problem(nq=1, batch=(), hq=1, **options)
    assert parts(one(nk=8 * 128)) == 2
    assert parts(one(nk=8 * 128 - 1)) == 1
    assert parts(one(nk=1)) == 1
    assert parts(one(nk=2**17, window=(100, 0))) == 1, "a narrow window leaves few tiles"
    packed = replace(long, options=Options(q_lengths="int32", kv_lengths="int32", packed=True))
    assert parts(packed) == 1


@pytest.fixture
def calls(monkeypatch):
    """What would be launched: each launch with its arrays and its optional arrays."""
    calls = []
    monkeypatch.setattr(Launch, "on", lambda launch, operands, extras=(), numbers=None: calls.append((launch, operands, extras)))
    return calls


SIZES = [(1, 20000), (64, 20000), (128, 30000), (129, 20000), (150, 20000), (192, 20000), (193, 20000), (5000, 500), (300, 300)]


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"kv_lengths": np.array([[3]])}], ids=list)
@pytest.mark.parametrize(("nq", "nk"), SIZES)
def test_there_are_as_many_work_items_as_row_blocks(calls, nq, nk, options, d):
    """Each of the tile that the kernel is built with, once for each part of the keys; a second kernel puts parts together."""
    p = problem(nq=nq, nk=nk, d=d, batch=(1, 1), hk=2, **options)
    q, k, v = (np.zeros((1, 1, 2, n, d), np.float16) for n in (nq, nk, nk))
    results = ForwardResults(q.copy(), np.zeros((1, 1, 2, nq), np.float32))
    inputs = ForwardInputs(q, k, v, kv_lengths=options.get("kv_lengths"))
    layouts = (type(x)(*map(Layout.of, x)) for x in (inputs, results))
    prepared = tier.prepare_forward(p, *layouts, H200)
    prepared.run(inputs, results)
    forward, *combine = prepared.launches
    (config,) = forward.config
    store, tile = config.store, config.tile
    sizes, _ = forward.numbers
    assert sizes.items == sizes.kv_splits * 2 * -(-nq // tile.block_m)
    assert (sizes.low, sizes.high, sizes.columns, sizes.group, sizes.b0) == (p.low, p.high, nk, 1, 1)
    assert sizes.section >= 1
    assert forward.grid == min(sizes.items, H200.multiprocessors)
    assert (store == "kv_splits") == (sizes.kv_splits > 1) == bool(combine)
    assert len(forward.maps) == (4 if store == "map" else 3)
    assert [each for each, *_ in calls] == [*prepared.launches]
    for each, operands, extras in calls:
        assert len(operands) == len(each.maps) + len(each.operands)
        assert len(extras) == len(each.extras)
    _, operands, extras = calls[0]
    assert operands[0] is q
    assert extras == tuple(options[name] for name in ("kv_lengths",) if name in options)


# ---- constants, bands and boxes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_factors_of_scores_lead_to_their_exponentials(softcap):
    """As kernels use them: 2 to the power of a score, or of its tanh, times a factor."""
    s = problem(scale=0.3, softcap=softcap)
    slope, scale_log2, scale = map(float, scales(s))
    raw = np.linspace(-12, 12, 25)
    capped = 1 - 2 / (1 + np.exp2(raw * slope)) if softcap else raw
    score = softcap * np.tanh(0.3 * raw / softcap) if softcap else 0.3 * raw
    np.testing.assert_allclose(np.exp2(capped * scale_log2), np.exp(score), rtol=1e-5)
    assert scale == np.float32(0.3)


def layouts_of(p: Problem) -> tuple[Layout, ...]:
    """Those of contiguous q, k, v and o."""
    shapes = (p.hq, p.nq, p.d), (p.hk, p.nk, p.d), (p.hk, p.nk, p.dv), (p.hq, p.nq, p.dv)
    return tuple(Layout.compact((*p.batch, *shape), p.dtype) for shape in shapes)


def backward_launches(p: Problem) -> tuple[Launch, ...]:
    q, k, v, o = layouts_of(p)
    inputs = BackwardInputs(o, q, k, v, o, Layout.compact(q.shape[:-1], "float32"))
    return tier.prepare_backward(p, inputs, BackwardResults(q, k, v), True, H200).launches


@pytest.mark.parametrize("strided", [(), ("do",), ("o",)], ids=" ".join)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_of_do_and_o_are_read_in_chunks_where_they_are_whole(dtype, strided):
    """Tensor maps want that of 16 bits; float32 may lie in any way, and goes through planes."""
    p = problem(dtype=dtype, **{name: size for name, size in WIDE.items() if name != "dtype"})
    q, k, v, o = layouts_of(p)
    odd = o._replace(strides=(*o.strides[:-2], o.strides[-2] + o.dtype.itemsize, o.strides[-1]))
    do, read = (odd if name in strided else o for name in ("do", "o"))
    inputs = BackwardInputs(do, q, k, v, read, Layout.compact(q.shape[:-1], "float32"))
    refused = tier.why_not("backward", p, inputs, True, H200)
    assert (refused is not None) == (dtype == "float16" and bool(strided))
    if refused is None:
        launches = tier.prepare_backward(p, inputs, BackwardResults(q, k, v), True, H200).launches
        assert [each.config[0].chunked for each in launches if each.builder == "passes.preprocess.build"] == [not strided]


def early(launches) -> list[bool]:
    return [each.early for each in launches]


@pytest.mark.parametrize("d", [64, 128])
def test_the_kernels_of_a_small_backward_pass_are_launched_early(d):
    """Up to 8 blocks of keys for each multiprocessor; what is compiled is the same."""
    tile = backward_tile(problem(d=d))
    most = 8 * H200.multiprocessors * tile.block_n
    small, large = (backward_launches(problem(nk=n, nq=500, d=d, batch=(1, 1))) for n in (most, most + 1))
    assert early(small) == [True] * 3
    assert early(large) == [False] * 3
    assert [(each.builder, each.config) for each in small] == [(each.builder, each.config) for each in large]


def test_no_other_backward_pass_is_launched_early():
    """Not beyond D = 128, where dQ is not added up in memory, and not with options."""
    assert not any(early(backward_launches(problem(d=136))))
    p = problem(mask=np.ones((100, 200), bool))
    q, k, v, o = layouts_of(p)
    inputs = BackwardInputs(o, q, k, v, o, Layout.compact(q.shape[:-1], "float32"), mask=Layout.compact((100, 200), "bool"))
    assert not any(early(tier.prepare_backward(p, inputs, BackwardResults(q, k, v), True, H200).launches))


@pytest.mark.parametrize(("n", "expected"), [(100, [True]), (100000, [True, False])])
def test_the_forward_kernel_is_launched_early(n, expected):
    """But not what puts parts of the keys together."""
    p = problem(nq=100, nk=n)
    q, k, v, o = layouts_of(p)
    launches = tier.prepare_forward(p, ForwardInputs(q, k, v), ForwardResults(o, None), H200).launches
    assert early(launches) == expected


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout": 0.1, "rng": (1, 2)}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("batch", [(2, 3), (3, 2)])
def test_kernels_are_told_the_first_of_two_axes_of_batch_elements(batch, d, options):
    """From which they know how many heads there are in all: the last of their sections may have fewer than others."""
    p = problem(nq=500, d=d, batch=batch, **options)
    q, k, v, o = layouts_of(p)
    lse = Layout.compact(q.shape[:-1], "float32")
    forward = tier.prepare_forward(p, ForwardInputs(q, k, v), ForwardResults(o, lse), H200).launches
    backward = ()
    if d <= 128 or "dropout" not in options:
        backward = tier.prepare_backward(p, BackwardInputs(o, q, k, v, o, lse), BackwardResults(q, k, v), True, H200).launches
    told = [number.b0 for each in (*forward, *backward) for number in each.numbers if hasattr(number, "b0")]
    assert set(told) == {batch[0]}


IN_BOTH = {}, {"causal": True}, {"kv_lengths": np.array([200, 3])}


@pytest.mark.parametrize(
    ("dtype", "d", "options"),
    [
        *itertools.product([np.float16], [40, 64, 128], [*IN_BOTH, {"dropout": 0.1, "rng": (1, 2)}]),
        *itertools.product([np.float32], [64, 128], IN_BOTH),
    ],
    ids=str,
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_all_sums_of_dq_begin_at_zero(deterministic, dtype, d, options):
    """The kernel before the main one knows how many bytes of them each row block has, and there is a block for each."""
    p = problem(nq=500, d=d, dtype=dtype, **options)
    q, k, v, o = layouts_of(p)
    inputs = BackwardInputs(o, q, k, v, o, Layout.compact(q.shape[:-1], "float32"), kv_lengths=Layout.of(options.get("kv_lengths")))
    launches = tier.prepare_backward(p, inputs, BackwardResults(q, k, v), deterministic, H200).launches
    clears = [each for each in launches if each.builder == "passes.preprocess.build" and each.config[0].sum_bytes]
    for preprocess in clears:
        _, (sums, _), (flags, _) = preprocess.operands[-3:]
        assert sums.nbytes == preprocess.grid * preprocess.config[0].sum_bytes
        assert flags.shape == (preprocess.grid + 1,)
    assert len(clears) == 1


@pytest.mark.parametrize(
    ("d", "size", "fits"),
    [
        (64, 128, True),
        (64, (384, 128), True),
        (64, (64, 128), False),
        (64, (128, 64), False),
        (128, (64, 128), True),
        (128, (96, 128), False),
        (128, 64, False),
    ],
)
def test_gradients_under_blocks_within_which_tiles_lie_read_nothing_of_the_mask(d, size, fits):
    """The main kernel is that of the problem with lists in the place of the mask, and takes as many queries at a time as without one."""
    bias = np.zeros((300, 300), np.float16)
    p = problem(nq=300, nk=300, d=d, bias=bias, mask=numba_flash.BlockMask(np.ones((1, 1), bool), size))
    q, k, v, o = layouts_of(p)
    inputs = BackwardInputs(o, q, k, v, o, Layout.compact(q.shape[:-1], "float32"))
    inputs = inputs._replace(bias=Layout.of(bias), mask=Layout.compact((1, 1), "bool"))
    for deterministic in (True, False):
        prepared = tier.prepare_backward(p, inputs, BackwardResults(q, k, v), deterministic, H200)
        lists, *order, preprocess, main, postprocess = prepared.launches
        options, tile = main.config[0].options, main.config[0].tile
        assert options == replace(p.options.structure, mask=not fits, block_sparse=fits, blocks=None if fits else p.options.blocks)
        assert tile == backward_options_tile(replace(p, options=options))  # rows of the bias do not lie at multiples of 16 bytes
        assert (tile.part == tile.block_m // 2) == fits
        assert lists.builder == "work.block_lists.build"
        assert lists.config[1:4] == (tile.block_m, tile.block_n, True)
        names = ("tiles", "order") if deterministic else ("tiles", "queue") if fits else ("tiles",)
        assert [each.builder for each in order] == [f"work.tile_lists.build_{name}" for name in names[1:]]
        assert postprocess.config[-1] == names
        arrays = 1 if fits else 2
        assert [len(each.extras) for each in (preprocess, main, postprocess)] == [arrays, *[arrays + len(names)] * 2]


@pytest.mark.parametrize(
    ("options", "plain"),
    [({}, True), ({"causal": True}, True), ({"softcap": 2.0}, False), ({"bias": np.zeros((300, 300), np.float16)}, False)],
)
@pytest.mark.parametrize("d", [64, 128])
def test_blocks_alone_are_served_by_kernels_without_options(d, options, plain):
    """They follow lists, with tiles as large as without a mask, forward and backward."""
    p = problem(nq=300, nk=300, d=d, mask=numba_flash.BlockMask(np.ones((1, 1), bool), 128), **options)
    q, k, v, o = layouts_of(p)
    of_mask, lse = Layout.compact((1, 1), "bool"), Layout.compact(q.shape[:-1], "float32")
    given = {"mask": of_mask, "bias": Layout.of(options["bias"]) if "bias" in options else None}
    lists, queue, forward = tier.prepare_forward(p, ForwardInputs(q, k, v, **given), ForwardResults(o, lse), H200).launches
    assert (lists.builder, queue.builder) == ("work.block_lists.build", "work.tile_lists.build_queue")
    assert (forward.builder, forward.config[0].stage) == ("sm90.forward.forward.build", "plain" if plain else "options")
    inputs = BackwardInputs(o, q, k, v, o, lse, **given)
    for deterministic in (True, False):
        *_, main, last = tier.prepare_backward(p, inputs, BackwardResults(q, k, v), deterministic, H200).launches
        stores = plain and deterministic and d > 64
        assert (main.builder, main.config[0].stage) == ("sm90.backward.backward.build", "plain" if plain else "options")
        assert main.config[0].tile.adds_dq is not stores
        assert last.builder == ("sm90.dq.dq.build" if stores else "sm90.dq.postprocess.build")
        if plain:
            assert forward.numbers[1] == main.numbers[1] == scales(p)
            tile, usual = main.config[0].tile, backward_tile(p)
            assert (tile.block_m, tile.stages, tile.do_stages, tile.ahead) == (usual.block_m, usual.stages, usual.do_stages, usual.ahead)
            assert tile.layout(d, d).bytes <= SHARED_LIMIT


@pytest.mark.parametrize(
    ("nq", "hq", "hk", "whole", "sections"), [(300, 2, 1, 131072, 1), (16384, 16, 16, 131072, 4), (2**19, 4, 2, 131072, 1024)]
)
def test_sections_of_slots(nq, hq, hk, whole, sections):
    """Memory holds a section and a work item more, or all tiles; each section has two launches, and counters of its own."""
    p = problem(nq=nq, nk=nq, d=128, hq=hq, hk=hk, mask=numba_flash.BlockMask(np.ones((1, 1), bool), 128))
    slots, rows = prepare_block_sparse.slots_of(p), -(-nq // 128)
    assert slots == (whole, min(math.prod(p.batch) * hq * rows**2, whole + hq // hk * rows), sections)
    q, k, v, o = layouts_of(p)
    inputs = BackwardInputs(o, q, k, v, o, Layout.compact(q.shape[:-1], "float32"), mask=Layout.compact((1, 1), "bool"))
    launches = tier.prepare_backward(p, inputs, BackwardResults(q, k, v), True, H200).launches
    lists, number, preprocess, main, sum_dq = launches
    assert [each.builder for each in (lists, number)] == ["work.block_lists.build_both", "sm90.dq.ds_slots.build"]
    (of_keys, _), (of_queries, _), _ = lists.operands
    assert of_keys.shape[3:] == of_queries.shape[3:] == (rows, 1 + rows)
    assert [x.shape[3:] for x, _ in number.operands if x.shape[3] != 1] == [(rows, 1 + rows), (rows, rows)]
    (places, _), (dq_sum, _), (ds, _) = number.operands[2], *sum_dq.operands[1:3]
    assert places.shape[4] == rows + 1 + 2 * sections
    assert ds.shape[3:] == (slots.room, 128 * 128 // 2)
    assert dq_sum.shape[4] == (128 * 128 if sections > 1 else 0)
    for each in (main, sum_dq):
        assert (each.numbers[0].kv_splits, each.numbers[0].blocks) == (sections, slots.room)
    assert preprocess.config[0].block_m == 128


def test_more_heads_are_at_work_where_blocks_of_lists_wait_for_each_other():
    """As many as have four times the sums of dq at work that those have whose blocks do not wait; blocks are smaller than tiles of dS."""
    for nq, listed, dense in ((16384, 8, 2), (2**20, 1, 1)):
        p = problem(nq=nq, nk=nq, d=128, hq=16, hk=16, mask=numba_flash.BlockMask(np.ones((1, 1), bool), (64, 128)))
        q, k, v, o = layouts_of(p)
        inputs = BackwardInputs(o, q, k, v, o, Layout.compact(q.shape[:-1], "float32"), mask=Layout.compact((1, 1), "bool"))
        sections = [
            tier.prepare_backward(p, inputs, BackwardResults(q, k, v), ordered, H200).launches[3].numbers[0].section
            for ordered in (True, False)
        ]
        assert sections == [listed, dense]


@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_band_is_transposed_where_rows_are_keys(d):
    p = problem(nq=30, nk=50, d=d, window=(7, 2))
    _, main, last = backward_launches(p)
    visible = dense_visible(p.nq, p.nk, window=(7, 2))
    sizes, factors = main.numbers
    assert sizes.columns == p.nq
    assert factors == scales(p)
    column_minus_row = np.arange(p.nq) - np.arange(p.nk)[:, None]
    np.testing.assert_array_equal((sizes.low <= column_minus_row) & (column_minus_row <= sizes.high), visible.T)
    if d > 128:
        of_queries, _ = last.numbers
        low, high = of_queries.low, of_queries.high
    else:
        _, low, high, _ = last.numbers
    assert (low, high) == (p.low, p.high)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 64), (64, 128), (128, 128), (256, 248)])
def test_boxes_have_as_many_rows_as_tiles(d, dv, causal):
    """Fewer bytes than a tile has would never complete it; more would be another's."""
    p = problem(nq=5000, nk=7000, d=d, dv=dv, hq=8, hk=4, causal=causal)
    q, k, v, o = layouts_of(p)
    (forward,) = tier.prepare_forward(p, ForwardInputs(q, k, v), ForwardResults(o, None), H200).launches
    tile = forward_tile(p)
    assert forward.maps == ((q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (o, OUTPUT_ROWS))
    _, main, last = backward_launches(p)
    tile = backward_tile(p)
    assert main.maps == ((o, tile.block_m), (q, tile.block_m), (k, tile.block_n), (v, tile.block_n), (k, KEYS), (v, KEYS))
    assert last.maps == (() if tile.adds_dq else ((k, tile.block_n), (q, KEYS)))


# ---- the gradient of a bias ----------------------------------------------------------------------------------------------------------


def dbias_launch(p: Problem, bias, **arrays) -> Launch:
    """What sums the gradient of a bias of that layout."""
    q, k, v, o = layouts_of(p)
    given = {name: Layout.of(x) for name, x in arrays.items()}
    lse, bias = Layout.compact((*p.batch, p.hq, p.nq), "float32"), Layout.of(bias)
    inputs, results = BackwardInputs(o, q, k, v, o, lse, bias=bias, **given), BackwardResults(q, k, v, bias)
    launches = tier.prepare_backward(p, inputs, results, True, H200).launches
    return next(each for each in launches if each.builder == "sm90.bias_gradient.dbias.build")


@pytest.mark.parametrize(("d", "dv"), [(8, 8), (64, 64), (128, 64), (40, 128), (128, 128)])
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"dropout": 0.5, "rng": (1, 2)}], ids=list)
def test_shared_memory_of_the_gradient_of_a_bias(d, dv, options):
    p = problem(d=d, dv=dv, bias=np.zeros(200, np.float16), **options)
    tile = dbias_tile(p)
    layout = tile.layout(d, dv)
    assert layout.bytes <= SHARED_LIMIT
    assert 4 * len(DbiasNote._fields) <= DBIAS_NOTE_BYTES
    pieces = [(layout.values, 4 * tile.block_m * tile.row_stages), (layout.sums, 4 * max(8 * tile.block_n, tile.block_m))]
    for name in ("rows", "keys", "notes"):
        ring = getattr(layout, name)
        pieces += [(ring.tiles, ring.slot_bytes * ring.slots), (ring.ready, 8 * ring.slots), (ring.free, 8 * ring.slots)]
        assert name == "notes" or ring.tiles % 1024 == ring.slot_bytes % 1024 == 0, "swizzled panels begin at multiples of 1024"
    pieces.sort()
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(pieces))
    assert tile.row_stages >= 4, "Q of the next step is waited for before this one's is released"
    assert tile.key_stages >= 3, "K of the next part is waited for before K and V of this one are released"
    assert tile.registers[0] + 2 * tile.registers[1] == 504


def test_boxes_of_the_gradient_of_a_bias():
    """Fewer bytes than a part has would never complete it; blocks are no more than multiprocessors, and no more than there is work."""
    bias = np.zeros((4, 1000, 2002), np.float16)[..., :-2]  # rows that the copy engine does not bring
    p = problem(nq=1000, nk=2000, batch=(3,), hq=4, hk=2, bias=bias)
    q, k, v, o = layouts_of(p)
    sums, tile = dbias_launch(p, bias), dbias_tile(p)
    assert sums.maps == ((o, tile.block_m), (q, tile.block_m), (k, tile.part), (v, tile.part))
    extent, items, _ = sums.numbers
    assert extent == (1, 3, 4, 2, 1000, 2000, p.low, p.high)
    assert items == 4 * 8 * 16
    assert sums.grid == 132
    few = problem(nq=100, nk=100, batch=(), bias=bias[0, :100, :100])
    assert dbias_launch(few, bias[0, :100, :100]).grid == 2, "a share for each head"


@pytest.mark.parametrize(("elements", "tile"), ROWS_TILES.items())
@pytest.mark.parametrize(("d", "dv"), [(8, 64), (64, 64)])
def test_shared_memory_where_queries_stay(elements, tile, d, dv):
    layout = tile.layout(d, dv)
    assert tile.elements == elements
    assert layout.bytes <= SHARED_LIMIT
    pieces = [(layout.values, 4 * tile.block_m * tile.row_stages)]
    for name in ("rows", "keys", "pairs"):
        ring = getattr(layout, name)
        pieces += [(ring.tiles, ring.slot_bytes * ring.slots), (ring.ready, 8 * ring.slots), (ring.free, 8 * ring.slots)]
        assert ring.tiles % 1024 == ring.slot_bytes % 1024 == 0, "swizzled panels begin at multiples of 1024"
    pieces.sort()
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(pieces))
    assert tile.row_stages >= 2 * elements, "Q and dO of all elements"
    assert tile.row_stages >= 4, "Q of the next element is waited for before this one's is released"
    assert tile.registers[0] + 2 * tile.registers[1] == 504


SHARED_BIAS = np.zeros((1, 4, 136, 200), np.float16)
OTHER_SUMS = {
    "more elements than fit": ({"batch": (5,)}, SHARED_BIAS, {}),
    "a wide head": ({"d": 72}, SHARED_BIAS, {}),
    "heads": ({}, SHARED_BIAS[:, :1], {}),
    "queries": ({}, SHARED_BIAS[:, :, :1], {}),
    "a band": ({}, SHARED_BIAS, {"causal": True}),
    "a softcap": ({}, SHARED_BIAS, {"softcap": 2.0}),
    "dropout": ({}, SHARED_BIAS, {"dropout": 0.5, "rng": (1, 2)}),
    "lengths": ({}, SHARED_BIAS, {"kv_lengths": np.array([3, 4])}),
    "a mask": ({}, SHARED_BIAS, {"mask": np.ones((136, 200), bool)}),
    "float32": ({}, SHARED_BIAS.astype(np.float32), {}),
    "rows that the copy engine does not bring": ({}, np.zeros((1, 4, 136, 201), np.float16)[..., :-1], {}),
}


@pytest.mark.parametrize(("sizes", "bias", "options"), OTHER_SUMS.values(), ids=OTHER_SUMS)
def test_gradients_of_a_bias_whose_queries_do_not_stay(sizes, bias, options):
    p = problem(**{"nq": 136, "hq": 4, "hk": 2} | sizes, bias=bias, **options)
    arrays = {name: x for name, x in options.items() if name in ("mask", "kv_lengths")}
    assert dbias_launch(p, bias, **arrays).config[0].stage == NOTED


@pytest.mark.parametrize(("batch", "own", "elements"), [((4,), 1, 4), ((2, 2), 1, 4), ((3,), 3, 1), ((1,), 1, 1)])
def test_gradients_of_a_bias_whose_queries_stay(batch, own, elements):
    """A bias of one batch element for all, or of one for each."""
    bias = np.broadcast_to(SHARED_BIAS, (own, *SHARED_BIAS.shape[1:])).copy()
    bias = bias if len(batch) == 1 else bias[None]
    p = problem(nq=136, hq=4, hk=2, batch=batch, bias=bias)
    assert dbias_launch(p, bias).config[0].tile == ROWS_TILES[elements]
    assert prepare_dbias.elements_of(p, bias) == elements


def test_boxes_where_queries_stay():
    p = problem(nq=136, hq=4, hk=2, batch=(4,), bias=SHARED_BIAS)
    q, k, v, o = layouts_of(p)
    lse, bias = Layout.compact((4, 4, 136), "float32"), Layout.of(SHARED_BIAS)
    inputs, results = BackwardInputs(o, q, k, v, o, lse, bias=bias), BackwardResults(q, k, v, bias)
    *_, sums = tier.prepare_backward(p, inputs, results, True, H200).launches
    tiles = prepare_pairs.tiles_of_bias(p, bias)
    assert sums.maps == ((o, 128), (q, 128), (k, 64), (v, 64), (tiles, 128), (bias, 16))
    extent, across, items, scale_log2 = sums.numbers
    assert extent == (1, 4, 4, 2, 136, 200, p.low, p.high)
    assert items == 4 * 2 * -(-4 // across)
    assert sums.grid == min(132, items)
    assert scale_log2 == np.float32(p.scale * math.log2(math.e))


@pytest.mark.parametrize(
    ("rows", "tiles", "elements", "turns"), [(256, 32, 4, 132), (4, 9, 1, 132), (1, 1, 2, 3), (133, 7, 4, 132), (64, 5, 2, 3)]
)
def test_runs_of_tiles(rows, tiles, elements, turns):
    """As many that the busiest block has least to do; a run that begins takes some time."""
    across, items = prepare_dbias.runs_of(rows, tiles, elements, turns)
    assert 1 <= across <= tiles
    assert items == rows * -(-tiles // across)
    steps = lambda n: -(-rows * -(-tiles // n) // turns) * (n * elements + prepare_dbias.BEGIN)
    assert steps(across) == min(map(steps, range(1, tiles + 1)))


@pytest.mark.parametrize("summed", [(False, True, False, False, False), (True, True, False, False, False), (False,) * 5])
@pytest.mark.parametrize("across", [1, 2, 3])
def test_runs_have_each_tile_of_the_gradient_once(summed, across):
    """And each of its scores has one batch element there."""
    tile, sizes = ROWS_TILES[4], (2, 2, 4)  # batch, heads
    extent = Extent(*sizes, 2, 300, 200, 0, 0)
    own = [1 if gone else n for n, gone in zip(sizes, summed, strict=False)]
    with on_host(resident_dbias, broadcast):
        run_of, element = resident_dbias.build_runs(summed, tile)
        seen = []
        for number in range(math.prod(own) * 3 * -(-4 // across)):
            run = run_of(number, extent, across)
            assert int(run.kv_head) == int(run.own.head) // 2
            for t in range(int(run.count)):
                for b in range(math.prod(sizes[:2]) // math.prod(own[:2])):
                    at = element(run.own, b, extent)
                    seen.append((int(at.b0), int(at.b1), int(run.own.head), int(run.row0), int(run.col0) + 64 * t))
    everything = itertools.product(*map(range, sizes), (0, 128, 256), (0, 64, 128, 192))
    assert sorted(seen) == sorted(everything)


@pytest.mark.parametrize("size", [None, 128, (128, 256), 100, (128, 192)])
def test_tiles_of_the_gradient_of_a_bias_under_blocks(size):
    """Where they lie in blocks, no score is masked."""
    bias = np.zeros((300, 300), np.float16)
    blocks = None if size is None else numba_flash.BlockMask(np.ones([-(-300 // n) for n in np.broadcast_to(size, 2)], bool), size)
    p = problem(nq=300, nk=300, bias=bias, **({} if blocks is None else {"mask": blocks}))
    arrays = {} if blocks is None else {"mask": blocks.blocks}
    sums = dbias_launch(p, bias, **arrays)
    assert sums.config[0].tile.block_n == 128
    assert sums.config[0].options.mask == (size in (100, (128, 192)))


# ---- who computes what ---------------------------------------------------------------------------------------------------------------


def items_of_blocks(monkeypatch, item, blocks, items, arguments):
    """(block, turn, what `item` says) of every work item that some block of the grid takes, in the order of its turns."""
    zigzag = getattr(schedule.zigzag, "py_func", schedule.zigzag)
    for block in range(blocks):
        with monkeypatch.context() as patch:
            patch.setattr(schedule, "cuda", SimpleNamespace(blockIdx=SimpleNamespace(x=block)))
            numbers = [int(zigzag(turn, blocks)) for turn in range(items // blocks + 2)]
        for turn, number in enumerate(numbers):
            if number < items:
                yield block, turn, item(number, *arguments)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("banded", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_work_item_is_visited_once(monkeypatch, seed, banded, split):
    """By some block of the grid, whatever the grid, the section and the number of parts; parts share out the tiles that are not hidden."""
    rng = np.random.default_rng(seed)
    b0, b1, heads, nq, nk = (int(rng.integers(1, most)) for most in (4, 3, 4, 60, 60))
    block_m, block_n, parts = int(rng.integers(4, 20)), int(rng.integers(4, 20)), int(rng.integers(1, 5)) if split else 1
    low, high = sorted(int(x) for x in rng.integers(-nq, nk + 1, 2)) if banded else (-nq, nk)
    blocks, section = -(-nq // block_m), int(rng.integers(1, 9))
    items = b0 * b1 * heads * blocks * parts
    blocks_at_work = int(rng.integers(1, items + 1))
    item = schedule.build_item(PLAIN, banded, split, block_m, block_n).py_func
    shape, sizes = (b0 * parts, b1, heads, nq), Sizes(items, low, high, columns=nk, kv_splits=parts, group=1, section=section, b0=b0)
    seen, tiles = set(), {}
    for _, _, it in items_of_blocks(monkeypatch, item, blocks_at_work, items, (shape, (), sizes)):
        at = tuple(map(int, it[:4]))
        assert (*at, int(it.kv_split)) not in seen
        seen.add((*at, int(it.kv_split)))
        assert (it.rows_begin, it.rows, it.columns_begin) == (0, nq, 0)
        assert it.count >= 1
        assert it.columns == nk or (it.columns, it.count) == (0, 1)
        if it.columns:
            tiles.setdefault(at, []).extend(range(it.first, it.first + it.count))
    expected = itertools.product(range(b0), range(b1), range(heads), range(0, blocks * block_m, block_m), range(parts))
    assert seen == set(expected)
    diagonal = np.arange(nk) - np.arange(nq)[:, None]
    visible = (low <= diagonal) & (diagonal <= high)
    for *_, row0 in tiles:
        columns = np.flatnonzero(visible[row0 : row0 + block_m].any(axis=0)) // block_n
        for at in itertools.product(range(b0), range(b1), range(heads)):
            taken = tiles.get((*at, row0), [])
            assert len(taken) == len(set(taken))
            assert set(columns) <= set(taken)
            assert all(tile * block_n < nk for tile in taken)


@pytest.mark.parametrize("seed", range(12))
def test_every_block_of_packed_sequences_is_visited_once(monkeypatch, seed):
    """The boundaries are known to the device alone: some work items have no rows, but none is missing."""
    rng = np.random.default_rng(seed)
    heads, block_m, block_n, sequences = (int(n) for n in rng.integers((1, 4, 4, 1), (4, 20, 20, 7)))
    q_lengths, k_lengths = rng.integers(0, 50, (2, sequences)) * (rng.random((2, sequences)) < 0.8)
    q_offsets, k_offsets = (np.append(0, np.cumsum(lengths)) for lengths in (q_lengths, k_lengths))
    total, keys_in_all = int(q_offsets[-1]), int(k_offsets[-1])
    options = Options(q_lengths="int64", kv_lengths="int64", packed=True, follows=True)
    items, blocks_at_work = (total // block_m + sequences) * heads, int(rng.integers(1, 9))
    sizes, seen = Sizes(items, -total, keys_in_all, columns=keys_in_all, kv_splits=1, group=1, section=1, b0=1), set()
    extras = build_extras(options)(ForwardInputs(None, None, None, q_lengths=q_offsets, kv_lengths=k_offsets))
    with on_host():
        item = schedule.build_item(options, False, False, block_m, block_n)
        found = [*items_of_blocks(monkeypatch, item, blocks_at_work, items, ((1, 1, heads, total), extras, sizes))]
    for _, _, it in found:
        b = int(it.b1)
        assert (it.b0, it.invalid) == (0, 0)
        assert (it.rows_begin, it.rows, it.columns_begin) == (q_offsets[b], q_lengths[b], k_offsets[b])
        if it.row0 < it.rows:
            assert (b, it.head, it.row0) not in seen
            seen.add((b, int(it.head), int(it.row0)))
            assert (it.first, it.columns) == (0, k_lengths[b])
            assert it.count == max(1, math.ceil(k_lengths[b] / block_n))
        else:
            assert (it.columns, it.count) == (0, 1)
    expected = {(b, h, row) for b in range(sequences) for h in range(heads) for row in range(0, int(q_lengths[b]), block_m)}
    assert seen == expected


def test_a_zigzag_shares_out_what_gets_shorter(monkeypatch):
    """Two turns of items that come longest first give every block the same length."""
    lengths = list(range(14, 0, -1))
    item, work = (lambda number: lengths[number]), [0] * 7
    for block, _, length in items_of_blocks(monkeypatch, item, 7, 14, ()):
        work[block] += length
    assert set(work) == {15}


bias_of = lambda *shape: np.zeros(shape, np.float16)


@pytest.mark.parametrize(
    ("given", "options", "kept"),
    [
        (bias_of(1, 4, 300, 300), {}, True),
        (bias_of(4, 300, 300), {}, True),
        (bias_of(1, 1, 300, 1), {}, True),
        (bias_of(16, 4, 300, 300), {}, False),  # each batch element has its own
        (bias_of(4, 300, 300), {"causal": True}, False),
        (bias_of(4, 300, 300), {"softcap": 2.0}, False),
        (bias_of(4, 300, 300), {"dropout": 0.5, "rng": (1, 2)}, False),
        (bias_of(4, 300, 300), {"scale": 1e-8}, False),  # not divided by that
    ],
)
def test_a_bias_that_batch_elements_share_is_kept(given, options, kept):
    """If it is the only option; then the tier need not be demanded, either. Results in float32 are another kernel's."""
    x = np.empty((16, 4, 300, 32), np.float16)
    p, inputs = bind(x, x, x, bias=given, **options), ForwardInputs(x, x, x, bias=given)
    assert (tier.why_not("forward", p, inputs, False, gpu=H200) is None) == kept
    inputs = ForwardInputs(*(each if each is None else Layout.of(each) for each in inputs))
    for dtype in ("float16", "float32"):
        o = ForwardResults(Layout.compact(x.shape, dtype), None)
        *_, forward = tier.prepare_forward(p, inputs, o, gpu=H200).launches
        assert (forward.builder == "sm90.resident_bias.forward_resident.build") == (kept and dtype == "float16")


def test_a_bias_is_kept_as_float32_if_there_is_room():
    """Else in 16 bits, with as many slots as there is room for; in the end it is not kept. By three consumers in 16 bits, where they take
    no more rows.
    """
    assert resident_tile(problem(nq=384, nk=384, bias=np.zeros(384, np.float16))) == ResidentTile(192, 128, 3, 2, False)
    assert resident_tile(problem(nq=150, nk=384, bias=np.zeros(384, np.float32))) == ResidentTile(128, 192, 2, 1, True)
    assert resident_tile(problem(nq=256, nk=384, bias=np.zeros(384, np.float16))) == ResidentTile(128, 192, 2, 1, True)
    of = lambda nk, kind: resident_tile(problem(nk=nk, bias=np.zeros(nk, kind)))
    assert of(384, "float16") == ResidentTile(128, 192, 2, 1, True)
    assert of(256, "float32") == ResidentTile(128, 128, 2, 2, True)
    assert of(400, "float32") is None
    assert of(768, "float16") == ResidentTile(128, 192, 4, 1, False)
    assert of(800, "float16") is None
    for nk in range(1, 800):
        tile = of(nk, "float16")
        if tile is not None:
            assert tile.block_n * tile.tiles >= nk > tile.block_n * (tile.tiles - 1)
            assert tile.layout().bytes <= SHARED_LIMIT


@pytest.mark.parametrize(
    ("shape", "given", "heads_kv", "kept"),
    [
        ((16, 4, 300, 32), bias_of(4, 300, 300), 4, True),
        ((16, 4, 300, 24), bias_of(300, 300), 4, True),
        ((16, 4, 300, 32), bias_of(4, 300, 300).astype(np.float32), 4, False),
        ((16, 4, 300, 32), bias_of(4, 300, 300), 2, False),  # heads share keys
        ((16, 4, 300, 32), bias_of(4, 1, 300), 4, False),  # a sum over queries
        ((16, 4, 300, 40), bias_of(4, 300, 300), 4, False),
        ((16, 4, 400, 32), bias_of(4, 400, 400), 4, False),  # more keys than registers of the gradient
        ((4, 4, 300, 32), bias_of(4, 300, 300), 4, False),
    ],
)
def test_gradients_of_a_bias_that_batch_elements_share(shape, given, heads_kv, kept):
    """Two kernels keep it, if its gradient is wanted; then the tier need not be demanded, either. Else others serve."""
    q, k = np.empty(shape, np.float16), np.empty((shape[0], heads_kv, *shape[2:]), np.float16)
    p, lse = bind(q, k, k, bias=given), np.empty(shape[:-1], np.float32)
    inputs = BackwardInputs(q, q, k, k, q, lse, bias=given)
    anyway = shape[-1] > 32 or given.shape[-2] == 1  # by kernels that do not wait for a bias
    assert (tier.why_not("backward", p, inputs, False, gpu=H200, dbias=True) is None) == (kept or anyway)
    assert (tier.why_not("backward", p, inputs, False, gpu=H200) is None) == anyway
    layouts = BackwardInputs(*(each if each is None else Layout.of(each) for each in inputs))
    results = BackwardResults(layouts.q, layouts.k, layouts.v, layouts.bias)
    builders = [each.builder for each in tier.prepare_backward(p, layouts, results, gpu=H200).launches]
    assert ("sm90.resident_bias.dq_dbias_resident.build" in builders and "sm90.resident_bias.dk_dv_resident.build" in builders) == kept
    again = [each.builder for each in tier.prepare_backward(p, layouts, results._replace(dbias=None), gpu=H200).launches]
    assert "sm90.resident_bias.dq_dbias_resident.build" not in again


def test_tiles_of_gradients_of_a_bias_that_is_kept():
    """All keys have a place, and shared memory is enough."""
    for n in range(1, 400):
        p = problem(nq=n, nk=n, bias=np.zeros(n, np.float16))
        of_queries, of_keys = queries_tile(p), keys_tile(p)
        assert (of_queries is None) == (n > 384)
        for tile in filter(None, (of_queries, of_keys)):
            assert tile.layout().bytes <= SHARED_LIMIT
        if of_queries is not None:
            assert of_queries.block_n >= n
        if of_keys is not None:
            assert of_keys.tiles * of_keys.queries >= n
    assert keys_tile(problem(nq=384, nk=384, bias=np.zeros(384, np.float16))) is not None
