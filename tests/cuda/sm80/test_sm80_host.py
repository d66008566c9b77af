"""What the sm80 tier decides on the host, with no GPU: what it serves, tiles that fit, and how much is launched."""

import itertools
import math
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from compiled import SHARED_LIMIT
from support import DTYPES, SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator has no tensor cores", allow_module_level=True)

from numba_flash import BlockMask
from numba_flash.arguments import arrays
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.options import NAMES
from numba_flash.arguments.problem import BackwardInputs, BackwardResults, ForwardInputs, ForwardResults, Problem, bind
from numba_flash.cuda.arguments import BASE_2, BASE_E, chunked
from numba_flash.cuda.passes import prepare_kv_splits
from numba_flash.cuda.recipe import Call
from numba_flash.cuda.runtime import launch
from numba_flash.cuda.runtime.launch import Gpu, Launch
from numba_flash.cuda.sm80 import tier
from numba_flash.cuda.sm80.arguments import Shape
from numba_flash.cuda.sm80.bias_gradient import dq_dbias, prepare_dq_dbias_planes
from numba_flash.cuda.sm80.bias_gradient.dbias_tiles import FEWEST_STEPS, KEYS_TILE, LEAST_SHARED, MOST_COLUMNS, MOST_KEYS, dq_dbias_tile
from numba_flash.cuda.sm80.decode.decode_tiles import BACKWARD_DECODE_TILES, DECODE_TILES, MOST_JOINED, float_pitch
from numba_flash.cuda.sm80.short_heads import prepare_short_heads, short_head_tiles
from numba_flash.cuda.sm80.tiles import hardware, pitch

T4, A100, H200 = Gpu(0, (7, 5), 40), Gpu(0, (8, 0), 108), Gpu(0, (9, 0), 132)
EVERY_GPU = pytest.mark.parametrize("capability", SHARED_LIMIT, ids=lambda capability: "{}.{}".format(*capability))


def inputs_of(nq=100, nk=200, d=64, dv=None, batch=(2,), hq=2, hk=1, dtype="float16") -> ForwardInputs:
    """Arrays that take no memory."""
    zeros = lambda *shape: np.broadcast_to(np.zeros((), DTYPES[dtype]), shape)
    return ForwardInputs(zeros(*batch, hq, nq, d), zeros(*batch, hk, nk, d), zeros(*batch, hk, nk, dv or d))


def problem(options=None, **sizes) -> Problem:
    return bind(*inputs_of(**sizes)[:3], **(options or {}))


# ---- what is refused -------------------------------------------------------------------------------------------------------------------

B200, A10, L40, RTX5090 = (Gpu(0, capability, 100) for capability in ((10, 0), (8, 6), (8, 9), (12, 0)))
KINDS = pytest.mark.parametrize("kind", ["forward", "backward"])
REFUSED = {
    "wide float64": ({"dtype": "float64", "d": 129}, {}, "serves float64 up to head dimension 128"),
    "IEEE products": ({"dtype": "float32"}, {"precision": "ieee"}, "computes no IEEE products (precision='ieee')"),
    "scale 0": ({}, {"scale": 0.0}, "needs a positive, finite scale; got 0.0"),
    "scale < 0": ({}, {"scale": -0.5}, "needs a positive, finite scale; got -0.5"),
}
SERVED = {
    "plain": ({}, {}),
    "bfloat16": ({"dtype": "bfloat16"}, {"causal": True}),
    "lengths": ({}, {"kv_lengths": np.array([3, 4])}),
    "head dimensions": ({"d": 13, "dv": 7}, {"window": (3, 5)}),
    "float64, options": ({"dtype": "float64"}, {"softcap": 2.0, "dropout": 0.1, "rng": (1, 2)}),
    "float64": ({"dtype": "float64", "d": 64, "dv": 7}, {"causal": True, "kv_lengths": np.array([3, 4])}),
    "largest head dimensions": ({"d": 256, "dv": 256}, {}),
    "five dimensions": ({"batch": (2, 3)}, {"scale": 1e-3}),
    "no keys": ({"nk": 0}, {}),
    "no queries": ({"nq": 0}, {}),
    "no batch": ({"batch": (0,)}, {}),
}


@KINDS
@pytest.mark.parametrize(("sizes", "options", "sentence"), REFUSED.values(), ids=REFUSED)
def test_problems_that_are_refused(kind, sizes, options, sentence):
    assert tier.why_not(kind, problem(options, **sizes), inputs_of(**sizes), True, A100) == sentence


@KINDS
@pytest.mark.parametrize(("sizes", "options"), SERVED.values(), ids=SERVED)
def test_problems_that_are_served(kind, sizes, options):
    for demanded in (False, True):
        assert tier.why_not(kind, problem(options, **sizes), inputs_of(**sizes), demanded, A100) is None


@pytest.mark.parametrize("gpu", [A100, H200, B200], ids=["A100", "H200", "B200"])
@pytest.mark.parametrize("precision", ["float32", "tf32"])
def test_float32_is_served(gpu, precision):
    """Small problems on demand; backward up to head dimension 128."""
    p, inputs = problem({"precision": precision}, dtype="float32"), inputs_of(dtype="float32")
    sentence = "serves so few products of float32 on demand only (backend='sm80'): others are faster"
    for kind in ("forward", "backward"):
        assert tier.why_not(kind, p, inputs, True, gpu) is None
        assert tier.why_not(kind, p, inputs, False, gpu) == sentence
        more = replace(p, batch=(1, 1), hq=8, hk=8, nq=1024, nk=512, d=64, dv=64)
        assert tier.why_not(kind, more, inputs, False, gpu) is None
        assert tier.why_not(kind, replace(more, nq=1023), inputs, False, gpu) == sentence
    for wide in ({"d": 136}, {"dv": 129}):
        p, inputs = problem({"precision": precision}, dtype="float32", **wide), inputs_of(dtype="float32", **wide)
        assert tier.why_not("forward", p, inputs, True, gpu) is None
        assert tier.why_not("backward", p, inputs, True, gpu) == "has no backward pass of float32 beyond head dimension 128"


@pytest.mark.parametrize("gpu", [T4, A10, L40, RTX5090], ids=["T4", "A10", "L40", "RTX 5090"])
def test_float32_is_refused_where_blocks_have_little_memory(gpu):
    p, inputs = problem(dtype="float32"), inputs_of(dtype="float32")
    sentence = "serves float32 where a block may have 163 KB of shared memory; a GPU of compute capability {}.{} has less"
    for demanded in (False, True):
        assert tier.why_not("forward", p, inputs, demanded, gpu) == sentence.format(*gpu.capability)


@pytest.mark.parametrize("gpu", [T4, A10, L40, RTX5090], ids=["T4", "A10", "L40", "RTX 5090"])
def test_float64_is_refused_where_tensor_cores_do_not_multiply_it_fast(gpu):
    p, inputs = problem(dtype="float64"), inputs_of(dtype="float64")
    sentence = "serves float64 where tensor cores multiply it fast, compute capability 8.0, 9.0 or 10.0; this GPU has {}.{}"
    for kind, demanded in itertools.product(("forward", "backward"), (False, True)):
        assert tier.why_not(kind, p, inputs, demanded, gpu) == sentence.format(*gpu.capability)


@KINDS
@pytest.mark.parametrize("gpu", [A100, H200, B200], ids=["A100", "H200", "B200"])
@pytest.mark.parametrize("d", [1, 16, 17, 32, 33, 64, 65, 100, 128])
def test_tiles_of_float64_fit(kind, gpu, d):
    """In shared memory, with whole fragments for every warp and whole lines of what it reads of a row."""
    p = problem(dtype="float64", d=d)
    if kind == "forward" and gpu is A100 and d > 64:
        sentence = "has no forward pass of float64 beyond head dimension 64 with 163 KB of shared memory"
        assert tier.why_not(kind, p, inputs_of(dtype="float64", d=d), True, gpu) == sentence
        return
    for dv in (d, 16):
        launch = main_launch(kind, problem(dtype="float64", d=d, dv=dv, nq=5000), gpu)
        tile = launch.config[0].tile
        assert launch.shared_bytes <= SHARED_LIMIT[gpu.capability]
        assert tile.terms == (4 if gpu is A100 else 16)
        if kind == "forward":
            continue
        scores, outputs, dq = (tile.warps // each for each in (tile.scores, tile.outputs, tile.dq))
        assert not any(n % 16 for n in (tile.block_n // tile.scores, tile.block_n // tile.outputs, tile.block_m // tile.dq))
        assert tile.block_m % 16 == 0
        assert tile.block_m // scores == 8 or tile.block_m // scores % 16 == 0
        assert not any(tile.padded(each) % (16 * n) for each in (d, dv) for n in (outputs, dq))


def test_gpus_that_are_refused(monkeypatch):
    p, inputs = problem(), inputs_of()
    for capability in ((7, 0), (6, 1)):
        sentence = "needs a GPU of compute capability 7.5 or later; this one has {}.{}".format(*capability)
        other = A100._replace(capability=capability)
        assert tier.why_not("forward", p, inputs, True, other) == sentence
        with monkeypatch.context() as patch:  # the GPU that the arrays are on
            patch.setattr(launch, "why_not", lambda x: None)
            patch.setattr(launch, "gpu_of", lambda x, other=other: other)
            assert tier.why_not("forward", p, inputs, True) == sentence
    assert tier.why_not("forward", None, inputs, True, T4) is None
    assert tier.why_not("forward", p, inputs, True, T4) is None
    sentence = "needs a GPU of compute capability 8.0 or later for bfloat16; this one has 7.5"
    assert tier.why_not("forward", replace(p, dtype="bfloat16"), inputs, True, T4) == sentence
    monkeypatch.setattr(launch, "why_not", lambda x: "no GPU at all")
    assert tier.why_not("forward", p, inputs, True) == "no GPU at all"


# ---- tiles -----------------------------------------------------------------------------------------------------------------------------

HEAD_DIMS = [1, 7, 8, 13, 16, 40, 63, 64, 65, 72, 96, 128, 129, 192, 200, 256]
BIAS = {"bias": np.zeros(200, np.float16)}


def launches(kind: str, p: Problem, gpu: Gpu, inputs: ForwardInputs | None = None) -> tuple[Launch, ...]:
    """For contiguous arrays, and what else is among the inputs, with its gradient."""
    shape = lambda heads, n, d: Layout.compact((*p.batch, heads, n, d), p.dtype)
    q, k, v, o = shape(p.hq, p.nq, p.d), shape(p.hk, p.nk, p.d), shape(p.hk, p.nk, p.dv), shape(p.hq, p.nq, p.dv)
    arrays = {} if inputs is None else {name: Layout.of(x) for name, x in inputs._asdict().items() if name not in "qkv"}
    lse = Layout.compact(q.shape[:-1], "float32")
    if kind == "forward":
        return tier.prepare_forward(p, ForwardInputs(q, k, v, **arrays), ForwardResults(o, lse), gpu).launches
    inputs, results = BackwardInputs(o, q, k, v, o, lse, **arrays), BackwardResults(q, k, v, arrays.get("bias"))
    return tier.prepare_backward(p, inputs, results, True, gpu).launches


def main_launch(kind: str, *arguments) -> Launch:
    """That of the main loop."""
    (main,) = (each for each in launches(kind, *arguments) if each.builder.split(".")[-2].startswith(kind))
    return main


@KINDS
@pytest.mark.parametrize("options", [{}, BIAS], ids=list)
@EVERY_GPU
def test_every_problem_has_a_tile_that_fits(capability, options, kind):
    there, gpu = hardware(capability), Gpu(0, capability, 8)
    assert there.shared_limit == SHARED_LIMIT[capability]
    assert there.turing == (capability == (7, 5))
    for d, dv in itertools.product(HEAD_DIMS, HEAD_DIMS):
        p, inputs = problem(options, d=d, dv=dv), inputs_of(d=d, dv=dv)._replace(**options)
        if tier.why_not(kind, p, inputs, True, gpu) is not None:
            continue
        for each in launches(kind, p, gpu, inputs):
            assert each.shared_bytes <= there.shared_limit, (d, dv, each)
        main = main_launch(kind, p, gpu, inputs)
        tile = main.config[0].tile
        assert main.threads == tile.threads <= 512
        assert (tile.block_m % 16, tile.block_n % 16) == (0, 0)
        if kind == "forward":
            assert tile.block_n % 32 == 0, "keys come in runs of 32"


@pytest.mark.parametrize("d", range(1, 257))
def test_rows_of_a_tile_lie_in_different_banks(d):
    """Eight rows of 16 bytes, which ldmatrix reads at a time, take 32 banks of 4 bytes; each row has room for its columns."""
    assert pitch(d) >= 2 * d
    assert pitch(d) % 16 == 0
    banks = {(row * pitch(d) // 4 + i) % 32 for row in range(8) for i in range(4)}
    assert len(banks) == 32


# ---- launches --------------------------------------------------------------------------------------------------------------------------

X = np.zeros((2, 3, 10, 32), np.float16)
LAYOUTS = {
    "contiguous": (X, True),
    "heads last": (X.swapaxes(1, 2), True),
    "reversed rows": (X[..., ::-1, :], True),
    "broadcast": (np.broadcast_to(X[:1], (5, 3, 10, 32)), True),
    "one row of odd strides": (np.lib.stride_tricks.as_strided(X, (1, 1, 1, 32), (2, -6, 3, 2)), True),
    "rows of 40 bytes": (np.zeros((5, 20), np.float16)[:, :16], False),
    "columns that fill no chunk": (np.zeros((5, 12), np.float16), False),
    "transposed": (X.swapaxes(-1, -2), False),
    "every other column": (X[..., ::2], False),
}


@pytest.mark.parametrize(("x", "whole"), LAYOUTS.values(), ids=LAYOUTS)
def test_rows_that_are_copied_in_whole_chunks(x, whole):
    assert chunked(Layout.of(x)) == whole
    assert not chunked(Layout.of(x)._replace(offset=8))
    assert chunked(Layout.of(X), Layout.of(x)) == whole


def joins(forward) -> bool:
    """True if the last block of a kernel puts parts together, without a second kernel."""
    return forward.builder == "sm80.decode.forward_decode.build" and forward.config[0].joined


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"kv_lengths": np.array([3, 4])}], ids=list)
@pytest.mark.parametrize(("nq", "nk"), [(1, 20000), (128, 20000), (129, 20000), (5000, 500), (300, 300), (0, 5), (5, 0)])
@pytest.mark.parametrize("gpu", [T4, A100, H200], ids=lambda gpu: "{}.{}".format(*gpu.capability))
def test_there_is_a_block_for_every_row_block(nq, nk, options, d, gpu):
    """Once for each part of the keys, where these are shared out because there are few; a second kernel puts parts together."""
    inputs = inputs_of(nq=nq, nk=nk, d=d)._replace(kv_lengths=options.get("kv_lengths"))
    p = problem(options, nq=nq, nk=nk, d=d)
    o = Layout.compact((2, 2, nq, d), "float16")
    results = ForwardResults(o, Layout.compact(o.shape[:-1], "float32"))
    forward, *combine = tier.prepare_forward(p, ForwardInputs(*map(Layout.of, inputs)), results, gpu).launches
    tile = forward.config[0].tile
    row_blocks = 2 * 1 * math.ceil(2 * nq / tile.block_m) if tile.group else 2 * 2 * math.ceil(nq / tile.block_m)
    parts = forward.grid // row_blocks if row_blocks else 1
    assert forward.grid == parts * row_blocks
    assert (parts > 1) == bool(combine or joins(forward))
    assert all(each.config[1 if each.builder == "passes.combine.build" else 2] == d for each in combine), "they know how long rows of o are"
    assert parts == 1 or tile.group or row_blocks * 2 <= gpu.multiprocessors


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, BIAS, {"mask": np.ones(200, bool)}, {"causal": True}], ids=list)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_lse_is_in_the_base_of_the_scores(dtype, options):
    """Those of float32 in planes are in base e, as those of float64 are that something is done to."""
    options = {name: x.astype(dtype) if name == "bias" else x for name, x in options.items()}
    inputs = inputs_of(dtype=dtype)._replace(**{name: x for name, x in options.items() if name in ("bias", "mask")})
    p = problem(options, dtype=dtype)
    (lse_in,) = (each.config[0].lse_in for each in launches("backward", p, A100, inputs) if each.builder == "passes.preprocess.build")
    assert lse_in == (BASE_E if dtype == "float32" or (dtype == "float64" and {"softcap", "bias"} & options.keys()) else BASE_2)


@pytest.mark.parametrize(("nq", "nk", "hq", "hk"), [(100, 200, 2, 1), (1, 1, 1, 1), (5000, 300, 6, 2), (0, 5, 1, 1), (5, 0, 1, 1)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_there_is_a_block_for_every_block_of_keys(nq, nk, hq, hk, d):
    main = main_launch("backward", problem(nq=nq, nk=nk, hq=hq, hk=hk, d=d), A100)
    assert main.grid == 2 * hk * math.ceil(nk / main.config[0].tile.block_n)


@KINDS
def test_what_is_read_and_written_in_whole_chunks(kind):
    """Rows at multiples of 16 bytes; results may lie in another way than inputs, and Turing copies nothing that goes on."""

    def shape_of(gpu, strided=(), d=64):
        wide = lambda name, n, h: Layout.compact((2, h, n, d + (name in strided)), "float16")._replace(shape=(2, h, n, d))
        q, k, v, o = wide("q", 100, 2), wide("k", 200, 1), wide("v", 200, 1), wide("o", 100, 2)
        lse = Layout.compact((2, 2, 100), "float32")
        p = problem(d=d)
        if kind == "forward":
            main, *_ = tier.prepare_forward(p, ForwardInputs(q, k, v), ForwardResults(o, lse), gpu).launches
        else:
            results = BackwardResults(*(wide(name, n, h) for name, n, h in (("dq", 100, 2), ("dk", 200, 1), ("dv", 200, 1))))
            _, main, *_ = tier.prepare_backward(p, BackwardInputs(o, q, k, v, o, lse), results, True, gpu).launches
        return main.config[0].shape

    assert (shape_of(A100).asynchronous, shape_of(A100).wide) == (True, True)
    for name in ("q", "k", "v"):
        assert not shape_of(A100, (name,)).asynchronous
    assert not shape_of(A100, d=60).asynchronous
    result = {"forward": "o", "backward": "dk"}[kind]
    assert not shape_of(A100, (result,)).wide
    if kind == "forward":
        assert shape_of(A100, (result,)).asynchronous
        assert not shape_of(T4).asynchronous
        assert shape_of(T4).turing


@pytest.mark.parametrize(
    ("sizes", "options", "rows", "keys"),
    [
        ({"nq": 256, "d": 64}, {}, 64, 64),
        ({"nq": 5000, "d": 64}, {}, 128, 64),
        ({"nq": 256, "d": 128}, {"causal": True}, 64, 128),
        ({"nq": 5000, "d": 128}, {"causal": True}, 128, 64),
        ({"nq": 5000, "nk": 5000, "d": 256}, {"causal": True}, 128, 128),
        ({"nq": 5000, "nk": 4000, "d": 256}, {"causal": True}, 64, 64),
        ({"nq": 5000, "nk": 4000, "d": 256}, {}, 128, 128),
        ({"nq": 256, "d": 256}, {}, 64, 64),
    ],
)
def test_small_problems_have_small_blocks(sizes, options, rows, keys):
    """Fewer than 132 blocks of 128 rows leave multiprocessors idle."""
    tile = main_launch("forward", problem(options, hq=4, batch=(1,), **sizes), H200, inputs_of(hq=4, batch=(1,), **sizes)).config[0].tile
    assert (tile.block_m, tile.block_n) == (rows, keys)


@pytest.mark.parametrize(
    ("sizes", "options", "copies"),
    [
        ({"nq": 1000, "nk": 1024}, {}, 8),  # all blocks of keys are at work at the same time
        ({"nq": 1000, "nk": 1025, "hq": 4, "hk": 2}, {"causal": True}, 16),
        ({"nq": 1000, "nk": 1024, "batch": (120,)}, {}, 4),  # 120 heads, so 2.2 blocks of each
        ({"nq": 1000, "nk": 128}, {}, 1),
        ({"nq": 20000, "nk": 20000, "hq": 8, "hk": 8}, {}, 1),  # there is no room for two
        ({"nq": 6000, "nk": 20000, "hq": 8, "hk": 8}, {}, 4),
        ({"nq": 1000, "nk": 1024}, {"mask": np.ones((1000, 1024), bool)}, 1),
        ({"nq": 0, "nk": 1024}, {}, 1),
    ],
)
def test_copies_of_the_sums_of_dq(sizes, options, copies):
    """As many as blocks of keys of a head that are at work at the same time, while there is room."""
    sizes = {"batch": (2,), "hq": 1, "hk": 1} | sizes
    inputs = inputs_of(**sizes)._replace(mask=options.get("mask"))
    main = main_launch("backward", problem(options, **sizes), H200, inputs)
    assert 2 ** main.numbers[0].doublings == copies


# ---- few queries -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "rows", "group"),
    [
        ({"nq": 1, "hq": 8, "hk": 2}, 16, 4),
        ({"nq": 16, "hq": 1, "hk": 1}, 16, 1),
        ({"nq": 4, "hq": 20, "hk": 4, "d": 64}, 32, 5),
        ({"nq": 16, "hq": 64, "hk": 8, "dv": 120}, 32, 8),
        ({"nq": 2, "hq": 16, "hk": 1, "d": 256}, 16, 16),
        ({"nq": 17, "hq": 8, "hk": 2}, None, 0),
        ({"nq": 1, "hq": 8, "hk": 2, "dtype": "float32"}, None, 0),
    ],
)
def test_rows_of_few_queries(sizes, rows, group):
    """Those of all heads that share keys; a block of 16 or 32, where there are that many."""
    sizes = {"nk": 3000, "d": 128} | sizes
    tile = main_launch("forward", problem(**sizes), H200).config[0].tile
    assert tile.group == group
    assert rows is None or tile.block_m == rows
    assert tile.threads == 32 * tile.warps
    assert tile.block_n == tile.warps * tile.warp_n if group else tile.block_n == tile.warp_n


@pytest.mark.parametrize("tile", [row.tile for row in DECODE_TILES], ids=str)
@pytest.mark.parametrize(("d", "dv"), [(8, 8), (8, 256), (64, 64), (128, 16), (256, 256)])
def test_results_of_warps_fit_where_tiles_were(tile, d, dv):
    """Their O, m and l."""
    rows = tile.warps * tile.block_m
    assert tile.shared_bytes(d, dv) >= rows * (float_pitch(dv) + 8)
    both = sum(tile.key_rows(x).bytes for x in (d, dv))
    assert tile.shared_bytes(d, dv) >= tile.block_m * max(pitch(d), pitch(dv)) + tile.stages * tile.block_n * both


@pytest.mark.parametrize("tile", [row.tile for row in DECODE_TILES], ids=str)
@pytest.mark.parametrize(("d", "lines"), [(13, False), (64, True), (72, False), (128, True), (192, True), (256, True)])
def test_keys_of_few_queries_lie_in_lines_where_these_are_whole(tile, d, lines):
    """From a multiple of 128 bytes on, which what is turned within a line relies on; else rows are an odd number of chunks apart."""
    rows = tile.key_rows(d)
    assert rows.lines == lines
    assert rows.bytes == (2 * d if lines else pitch(d))
    if lines:
        assert tile.q_bytes(d, d) % 128 == 0


@pytest.mark.parametrize(
    ("sizes", "gpu", "parts"),
    [
        ({"nk": 131072, "hq": 64, "hk": 8}, H200, 16),  # 8 * 16 blocks, one on nearly each of 132 multiprocessors
        ({"nk": 32768, "hq": 64, "hk": 8, "batch": (16,)}, H200, 1),  # as many
        ({"nk": 32768, "hq": 64, "hk": 8, "batch": (20,)}, H200, 4),  # nearly five turns
        ({"nk": 1024, "hq": 64, "hk": 8}, H200, 8),  # a tile each
        ({"nk": 100, "hq": 64, "hk": 8}, H200, 1),  # a second kernel would take longer
        ({"nk": 131072, "hq": 1, "hk": 1}, H200, 128),  # 8 tiles each, as with 132
        ({"nk": 131072, "hq": 64, "hk": 8}, A100, 27),
        ({"nk": 8192, "hq": 64, "hk": 8}, H200, 16),  # one kernel
        ({"nk": 8193, "hq": 64, "hk": 8}, H200, 13),  # 5 tiles each, as with 16
        ({"nk": 131072, "hq": 264, "hk": 264}, H200, 1),
        ({"nk": 4096, "hq": 32, "hk": 32, "d": 64, "batch": (64,)}, H200, 1),
        ({"nk": 0, "hq": 1, "hk": 1}, H200, 1),
    ],
)
def test_parts_of_few_queries_fill_the_gpu(sizes, gpu, parts):
    sizes = {"nq": 1, "d": 128, "batch": (1,)} | sizes
    forward, *combine = launches("forward", problem(**sizes), gpu)
    assert forward.grid == parts * math.prod(sizes["batch"]) * sizes["hk"]
    assert joins(forward) == (0 if not 1 < parts <= MOST_JOINED else 8 if parts <= 8 else 16)
    assert len(combine) == (parts > MOST_JOINED)
    if combine:
        assert combine[0].grid == math.prod(sizes["batch"]) * sizes["hq"]
        assert combine[0].numbers == (parts,)


def test_who_counts_arrivals_where(monkeypatch):
    """Calls on a stream follow each other; a graph may run beside them, and makes its own 0 but once."""
    like = SimpleNamespace(data=SimpleNamespace(device_id=0))
    stream = SimpleNamespace(ptr=0)
    monkeypatch.setattr(arrays, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream)))
    monkeypatch.setattr(arrays, "compact", lambda name, like, shape, dtype: np.ones(shape, dtype))
    monkeypatch.setattr(prepare_kv_splits, "_arrivals", {})
    monkeypatch.setattr(prepare_kv_splits.driver, "capture_of", lambda handle: captures.get(handle))
    captures = {}
    first = prepare_kv_splits.arrivals(like, 3)
    assert not first.any()
    assert prepare_kv_splits.arrivals(like, 1000) is first
    stream.ptr = 77
    other = prepare_kv_splits.arrivals(like, 3)
    assert other is not first
    captures[77] = 5
    of_graph = prepare_kv_splits.arrivals(like, 3)
    assert of_graph is not other
    assert prepare_kv_splits.arrivals(like, 3) is of_graph
    captures[78], stream.ptr = 5, 78
    assert prepare_kv_splits.arrivals(like, 3) is not of_graph  # beside it in the same graph
    captures[77], stream.ptr = 6, 77
    assert prepare_kv_splits.arrivals(like, 3) is not of_graph
    captures.clear()
    assert prepare_kv_splits.arrivals(like, 3) is other
    assert prepare_kv_splits.arrivals(like, 5000).size >= 5000
    stream.ptr = prepare_kv_splits.PER_THREAD_STREAM  # one handle, a stream of each thread
    own, others = prepare_kv_splits.arrivals(like, 3), []
    thread = threading.Thread(target=lambda: others.append(prepare_kv_splits.arrivals(like, 3)))
    thread.start()
    thread.join()
    assert others[0] is not own


def test_one_kernel_combines_any_number_of_parts():
    """So that a cache that grows needs none anew."""
    of = lambda nk, b: launches("forward", problem(nq=1, nk=nk, d=128, hq=8, hk=1, batch=(b,)), H200)
    (short, combine_short), (long, combine_long) = of(15000, 1), of(100000, 1)
    assert combine_short.numbers != combine_long.numbers
    assert (short.config, combine_short.config) == (long.config, combine_long.config)
    (short,), (long,) = of(3000, 32), of(100000, 32)
    assert joins(short)
    assert short.numbers != long.numbers
    assert short.config == long.config


def test_options_of_few_queries_have_the_registers_of_other_rows():
    plain, capped = (
        main_launch("forward", problem(options, nq=16, hq=2, d=128), H200).config[0].tile for options in ({}, {"softcap": 2.0})
    )
    assert (plain.block_m, capped.block_m) == (32, 16)


def test_few_queries_with_a_mask_have_no_lists():
    options = {"mask": np.ones((1, 1, 1, 200), bool)}
    inputs = inputs_of(nq=1)._replace(**options)
    (forward,) = launches("forward", problem(options, nq=1), A100, inputs)
    assert forward.builder == "sm80.decode.forward_decode.build"


@pytest.mark.parametrize(
    ("sizes", "gpu", "parts"),
    [
        ({"batch": (16,)}, H200, 2),
        ({}, H200, 32),
        ({"nk": 1024}, H200, 16),  # a tile each
        ({"hq": 264, "hk": 264}, H200, 1),
        ({"hq": 8, "hk": 1, "nq": 2}, T4, 40),
    ],
)
def test_gradients_of_few_queries(sizes, gpu, parts):
    """Parts of the keys fill the GPU, and what else there is adds their dQ; the band does not matter, as all of dk and dv is written."""
    sizes = {"nq": 1, "d": 128, "batch": (1,), "nk": 32768, "hq": 64, "hk": 8} | sizes
    for options in ({}, {"window": (3, 3)}):
        main, *add = launches("backward", problem(options, **sizes), gpu)
        assert main.builder == "sm80.decode.backward_decode.build"
        assert main.grid == parts * math.prod(sizes["batch"]) * sizes["hk"]
        assert [launch.builder for launch in add] == ["passes.sum_shares.build"] * (parts > 1)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (3, 2)], ids=str)
def test_parts_of_dq_of_few_queries_have_a_place_each(batch):
    main, add = launches("backward", problem(nq=1, nk=32768, d=128, batch=batch), H200)
    (written, _), (shares, _), (dq, _) = main.operands[-1], *add.operands
    parts = main.grid // math.prod(batch)
    assert parts > 1
    assert shares.shape == (parts, *((1,) * (2 - len(batch)) + batch), 2, 1, 128)
    assert dq.nbytes * 2 * parts == written.nbytes == shares.nbytes


@pytest.mark.parametrize("row", BACKWARD_DECODE_TILES, ids=str)
@pytest.mark.parametrize(("d", "dv"), [(8, 8), (64, 16), (64, 64)])
def test_tiles_of_gradients_of_few_queries_fit(row, d, dv):
    """Nothing lies in the place of something else, and each warp's dQ fits where all was."""
    if row.d > 64:
        d, dv = 2 * d, 2 * dv
    layout, tile = row.tile.layout(d, dv), row.tile
    keys = tile.stages * tile.block_n
    rows = keys, keys, tile.block_m, tile.block_m, tile.block_n
    pitches = layout.pitch_k, layout.pitch_v, layout.pitch_k, layout.pitch_v, layout.pitch_ds
    ends = [start + n * size for start, n, size in zip(layout, rows, pitches, strict=False)]
    assert ends == list(layout[1:6])
    assert layout.bytes >= max(layout.rows + 8 * tile.block_m, tile.warps * tile.block_m * float_pitch(d))
    assert tile.min_blocks * (layout.bytes + 1024) <= row.shared + 1024


# ---- dS of wide heads --------------------------------------------------------------------------------------------------------------------

IN_SLOTS = {
    "wide heads": ({}, {}, H200, True),
    "a band": ({}, {"causal": True}, H200, True),
    "163 KB": ({}, {}, A100, True),
    "99 KB": ({}, {}, A10, False),
    "Turing": ({}, {}, T4, False),
    "head dimension 128": ({"d": 128}, {}, H200, False),
    "bits that nobody copies": ({"d": 250}, {}, H200, False),
    "as much as there is room for": ({"nq": 2**15, "nk": 2**14}, {}, H200, True),
    "more than there is room for": ({"nq": 2**15, "nk": 2**15}, {}, H200, False),
    "a softcap": ({}, {"softcap": 2.0}, H200, False),
    "lengths": ({}, {"kv_lengths": np.array([500, 3])}, H200, False),
    "no keys": ({"nk": 0}, {}, H200, False),
    "no queries": ({"nq": 0}, {}, H200, False),
    "no heads": ({"hq": 0, "hk": 2}, {}, H200, False),
    "blocks, whose lists have not all tiles": ({}, {"mask": BlockMask(np.ones((4, 4), bool), 128)}, H200, False),
}


@pytest.mark.parametrize(("sizes", "options", "gpu", "there"), IN_SLOTS.values(), ids=IN_SLOTS)
def test_where_ds_goes_to_memory(sizes, options, gpu, there):
    """And no sums of dQ are there then."""
    sizes = {"nq": 512, "nk": 512, "d": 256} | sizes
    masks = {name: x.blocks for name, x in options.items() if name == "mask"}
    built = [each.builder for each in launches("backward", problem(options, **sizes), gpu, inputs_of(**sizes)._replace(**masks))]
    assert ("sm80.backward.dq.build" in built) == there
    assert ("sm80.backward.sum_dq.build_postprocess" in built) == (not there)


# ---- a bias that is all that changes scores ----------------------------------------------------------------------------------------------

JOINT, GENERAL = ("sm80.bias_gradient.dq_dbias.build", "sm80.bias_gradient.dk_dv.build"), ("sm80.bias_gradient.dbias.build",)
LOOPS = {
    "keys of a tile": ({"nk": 384, "d": 32}, {}, H200, JOINT),
    "keys of two tiles": ({"nk": 392, "d": 32}, {}, H200, GENERAL),
    "few that share it": ({"nk": 384, "d": 32, "batch": (2,)}, {}, H200, GENERAL),
    "head dimension 64": ({"nk": 384, "d": 64}, {}, H200, GENERAL),
    "rows that are no power of two": ({"nk": 384, "d": 48}, {}, H200, GENERAL),
    "less shared memory": ({"nk": 384, "d": 32}, {}, A100, GENERAL),
    "Turing": ({"nk": 384, "d": 32}, {}, T4, GENERAL),
    "keys that are no runs": ({"nk": 100, "d": 32}, {}, H200, GENERAL),
    "a band": ({"nk": 384, "d": 32}, {"causal": True}, H200, GENERAL),
    "lengths": ({"nk": 384, "d": 32}, {"kv_lengths": np.full(8, 300)}, H200, GENERAL),
    "a mask": ({"nk": 384, "d": 32}, {"mask": np.ones((100, 384), bool)}, H200, GENERAL),
    "a mask of whole tiles": ({"nk": 384, "d": 32}, {"mask": BlockMask(np.ones((1, 3), bool), 128)}, H200, GENERAL),
    "dropout": ({"nk": 384, "d": 32}, {"dropout": 0.1, "rng": (1, 2)}, H200, GENERAL),
    "a softcap": ({"nk": 384, "d": 32}, {"softcap": 2.0}, H200, GENERAL),
}


@pytest.mark.parametrize(("sizes", "options", "gpu", "loops"), LOOPS.values(), ids=LOOPS)
def test_loops_of_a_bias_alone(sizes, options, gpu, loops):
    """One kernel makes dQ with the gradient of a bias where all keys fit in a tile, and nothing is summed in memory."""
    sizes = {"batch": (8,), "hq": 2, "hk": 2} | sizes
    bias = np.zeros((2, 100, sizes["nk"]), np.float16)
    built = [each.builder for each in gradients_of(bias, options, gpu, **sizes)]
    assert [each for each in built if each in {*JOINT, *GENERAL}] == list(loops)
    assert ("sm80.backward.backward.build" in built) == ("sm80.backward.sum_dq.build_postprocess" in built) == (loops != JOINT)


@pytest.mark.parametrize(
    "bias",
    [
        np.zeros((8, 2, 100, 384), np.float16),
        np.zeros((100, 384), np.float32),
        np.zeros(384, np.float16),
        np.zeros((100, 768), np.float16)[:, ::2],
    ],
    ids=["not shared", "float32", "of keys", "strided"],
)
def test_other_biases_have_the_general_loop(bias):
    built = [each.builder for each in gradients_of(bias, {}, H200, batch=(8,), hq=2, hk=2, nk=384, d=32)]
    assert set(built) & {*JOINT, *GENERAL} == {*GENERAL}


SPLIT = ("sm80.bias_gradient.dk_dv_planes.build", "sm80.bias_gradient.dq_dbias_planes.build")
SHORT = {"hq": 2, "hk": 2, "d": 32, "dtype": "float32"}
LOOPS_OF_FLOAT32 = {
    "short heads": ({}, {}, H200, True),
    "longer ones": ({"nk": 392}, {}, H200, False),
    "queries of longer ones": ({"nq": 400}, {}, H200, False),
    "few queries": ({"nq": 40}, {}, H200, False),
    "few heads": ({"batch": (20,)}, {}, H200, False),
    "fewer heads of keys": ({"hk": 1}, {}, H200, False),
    "head dimension 64": ({"d": 64}, {}, H200, False),
    "less shared memory": ({}, {}, A100, False),
    "keys that are no runs": ({"nk": 100}, {}, H200, False),
    "one product": ({}, {"precision": "tf32"}, H200, False),
    "a band": ({}, {"causal": True}, H200, False),
    "a softcap": ({}, {"softcap": 2.0}, H200, False),
    "a mask of whole tiles": ({}, {"mask": BlockMask(np.ones((1, 3), bool), 128)}, H200, False),
}


@pytest.mark.parametrize(("sizes", "options", "gpu", "short"), LOOPS_OF_FLOAT32.values(), ids=LOOPS_OF_FLOAT32)
def test_loops_of_a_bias_alone_in_float32(sizes, options, gpu, short):
    """Short heads have all keys, or all queries, in shared memory."""
    sizes = {"batch": (100,), "nq": 100, "nk": 384} | SHORT | sizes
    bias = np.zeros((2, sizes["nq"], sizes["nk"]), np.float32)
    built = [each.builder for each in gradients_of(bias, options, gpu, **sizes)]
    assert [each for each in built if each in SPLIT] == list(SPLIT if short else ())
    assert ("sm80.backward.backward_planes.build" in built) == ("sm80.backward.sum_dq.build_postprocess" in built) == (not short)


FORWARD_OF_FLOAT32 = {
    "short heads": ({}, {}, H200, True),
    "fewer heads of keys": ({"hk": 1}, {}, H200, True),
    "longer ones": ({"nk": 392}, {}, H200, False),
    "few queries": ({"nq": 40}, {}, H200, False),
    "few heads": ({"batch": (2,)}, {}, H200, False),
    "head dimension 64": ({"d": 64}, {}, H200, False),
    "less shared memory": ({}, {}, A100, False),
    "one product": ({}, {"precision": "tf32"}, H200, False),
    "a band": ({}, {"causal": True}, H200, False),
}


@pytest.mark.parametrize(("sizes", "options", "gpu", "short"), FORWARD_OF_FLOAT32.values(), ids=FORWARD_OF_FLOAT32)
def test_short_heads_of_float32_make_their_planes_themselves(sizes, options, gpu, short):
    sizes = {"batch": (100,), "nq": 100, "nk": 384} | SHORT | sizes
    built = [each.builder for each in launches("forward", problem(options, **sizes), gpu, inputs_of(**sizes))]
    assert ("sm80.short_heads.forward_short_heads.build" in built) == short
    assert ("passes.write_planes.build" in built) == (not short)


@pytest.mark.parametrize("axis", [-4, -3, -2])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_short_heads_that_lie_in_reverse_are_planes_of_others(name, axis):
    """The kernel adds up addresses without signs."""
    q, k, v, bias = (np.empty((100, 2, n, m), np.float32) for n, m in ((100, 32), (72, 32), (72, 32), (100, 72)))
    p, usual = bind(q, k, v, bias=bias), ForwardInputs(q, k, v, bias=bias)
    turned = usual._replace(**{name: np.flip(getattr(usual, name), axis)})
    for inputs, short in ((usual, True), (turned, False)):
        layouts = ForwardInputs(*map(Layout.of, inputs))
        results = ForwardResults(Layout.compact(inputs.q.shape, "float32"), None)
        assert (prepare_short_heads.tile_of(Call(p, layouts, results, H200)) is not None) == short


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
@pytest.mark.parametrize(("stride", "short"), [(2**32 - 16, True), (2**32, False)])
def test_batch_elements_of_short_heads_are_less_than_4_gib_apart(name, stride, short):
    """The kernels have 32 bits for a distance; in both passes."""
    inputs = inputs_of(nq=100, nk=72, batch=(100,), **SHORT)
    inputs = inputs._replace(bias=np.zeros((100, 72), np.float32))
    p, (q, k, v, bias) = problem({"bias": inputs.bias}, nq=100, nk=72, batch=(100,), **SHORT), inputs[:4]
    compact = {name: Layout.compact(x.shape, "float32") for name, x in {"q": q, "k": k, "v": v, "bias": bias}.items()}
    given = compact | {name: compact[name]._replace(strides=(stride, *compact[name].strides[1:]))}
    o, lse = compact["q"], Layout.compact(q.shape[:-1], "float32")
    forward = Call(p, ForwardInputs(**given), ForwardResults(o, lse), H200)
    backward = Call(
        p, BackwardInputs(do=o, o=o, lse=lse, **given), BackwardResults(*(compact[name] for name in ("q", "k", "v", "bias"))), H200
    )
    assert (prepare_short_heads.tile_of(forward) is not None) == short
    assert (prepare_dq_dbias_planes.tiles_of(backward) is not None) == short


def test_shared_memory_of_short_heads_fits():
    """Of every number of keys and queries, at the largest head dimension."""
    shape = Shape(32, 32, False, True, True, 2)
    for rows in range(8, 392, 8):
        p = problem({"bias": np.zeros((rows, rows), np.float32)}, batch=(8,), nq=rows, nk=rows, **SHORT)
        tiles = short_head_tiles.gradient_tiles(p, hardware(H200.capability), 16)
        assert tiles.dq_dbias.slots <= tiles.dq_dbias.chunks
        assert tiles.dq_dbias.block_n >= rows
        assert tiles.dk_dv.queries >= rows
        assert tiles.dq_dbias.layout(shape).bytes <= 227 * 1024
        assert tiles.dk_dv.min_blocks * (tiles.dk_dv.layout(shape).bytes + 1024) <= 228 * 1024
        forward = short_head_tiles.forward_head_tile(p, hardware(H200.capability))
        assert forward is None or forward.min_blocks * (forward.layout(32, 32).bytes + 1024) <= 228 * 1024


OTHERS = {"softcap": 2.0, "score_mod": max, "mask": True, "q_lengths": "int32", "kv_lengths": "int32", "dropout": 0.1, "paged": True}


@pytest.mark.parametrize("name", OTHERS)
def test_kernels_that_know_a_bias_alone_are_not_taken_with_another_option(name):
    """With none that there is; a new one has to be added here."""
    assert {"bias", *OTHERS} == set(NAMES)
    of_bias = lambda p: dq_dbias_tile(p, hardware(H200.capability), FEWEST_STEPS)
    short_gradients = lambda p: short_head_tiles.gradient_tiles(p, hardware(H200.capability), 16)
    short_forward = lambda p: short_head_tiles.forward_head_tile(p, hardware(H200.capability))
    half = problem({"bias": np.zeros((100, 384), np.float16)}, nk=384, d=32)
    single = problem({"bias": np.zeros((384, 384), np.float32)}, batch=(8,), nq=384, nk=384, **SHORT)
    for tile_of, p in ((of_bias, half), (short_gradients, single), (short_forward, single)):
        assert tile_of(p) is not None
        assert tile_of(replace(p, options=replace(p.options, **{name: OTHERS[name]}))) is None


def gradients_of(bias, options, gpu, **sizes) -> tuple[Launch, ...]:
    """Launches of a backward pass with that of the bias."""
    unwrapped = lambda x: x.blocks if isinstance(x, BlockMask) else x
    arrays = {name: unwrapped(options[name]) for name in ("mask", "kv_lengths") if name in options}
    inputs = inputs_of(**sizes)._replace(bias=bias, **arrays)
    return launches("backward", problem({"bias": bias, **options}, **sizes), gpu, inputs)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 2, 100, 200), (2, 100, 200), (2, 1, 100, 200), (100, 1), (1, 200), (2, 2, 1, 200)], ids=str
)
def test_a_gradient_of_a_bias_is_made_in_parts_where_any_axis_is_summed(shape):
    """Of one that is the sum of nothing, parts would go to memory."""
    found = gradients_of(np.zeros(shape, np.float16), {"softcap": 3.0}, H200)
    (dbias,) = (each for each in found if each.builder == "sm80.bias_gradient.dbias.build")
    assert (dbias.config[0].tile.parts > 1) == (shape != (2, 2, 100, 200))


def tile_of_a_bias(nk: int):
    bias = np.broadcast_to(np.float16(0), (100, nk))
    return dq_dbias_tile(problem({"bias": bias}, nk=nk, d=32), hardware(H200.capability), FEWEST_STEPS)


def test_shared_memory_of_a_bias_alone_fits():
    """Of every tile, at its largest head dimension."""
    for nk in range(8, MOST_KEYS + 1, 8):
        tile = tile_of_a_bias(nk)
        assert nk <= tile.block_n <= MOST_KEYS
        assert tile.layout(MOST_COLUMNS, MOST_COLUMNS).bytes <= LEAST_SHARED
    assert KEYS_TILE.min_blocks * (KEYS_TILE.layout(MOST_COLUMNS, MOST_COLUMNS).bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize(("d", "dv"), [*itertools.product([8, 16, 24, 32], repeat=2)])
def test_keys_of_a_bias_alone_lie_in_the_second_of_two_slots(d, dv):
    """There is room for both slots, and for K and V, which of them is more."""
    tile, layout = KEYS_TILE, KEYS_TILE.layout(d, dv)
    m, n = tile.block_m, tile.block_n
    ends = layout.q + m * pitch(d), layout.do + m * pitch(dv), layout.rows + 8 * m, layout.bias + m * pitch(n)
    assert ends == (layout.do, layout.rows, layout.bias, layout.slot)
    assert (layout.k, layout.v) == (layout.slot, layout.slot + n * pitch(d))
    assert layout.bytes >= 2 * layout.slot
    assert layout.bytes >= layout.v + n * pitch(dv)


@pytest.mark.parametrize("d", [16, 32])
@pytest.mark.parametrize("nk", range(32, MOST_KEYS + 1, 32))
def test_there_is_a_loop_of_a_bias_alone_for_every_number_of_keys(nk, d):
    """It can be built; its rows are copied by whole steps."""
    bias = np.zeros((2, 100, nk), np.float16)
    sizes = {"batch": (8,), "hq": 2, "hk": 2, "nk": nk, "d": d}
    (launch,) = (each for each in gradients_of(bias, {}, H200, **sizes) if each.builder == JOINT[0])
    _, _, options = dq_dbias.build(*launch.config)
    assert options["launch_bounds"] == (launch.threads, 1)
    assert launch.config[0].tile.block_n >= nk


@pytest.mark.parametrize(("nk", "warps", "block_n"), [(96, 12, 96), (128, 8, 128), (136, 12, 192), (200, 8, 256), (384, 12, 384)])
def test_twelve_warps_of_a_bias_where_they_have_no_more_keys_to_do(nk, warps, block_n):
    tile = tile_of_a_bias(nk)
    assert (tile.threads // 32, tile.block_n, tile.block_m) == (warps, block_n, 64)
