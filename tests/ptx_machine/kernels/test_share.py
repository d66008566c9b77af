"""Warps of `sm80` that share rows, with every option: in tiles that are not theirs, with few columns, so that it does not take long."""

from unittest import mock

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import forward_pass
from support import random_inputs

import numba_flash
from numba_flash.cuda.sm80 import recipes
from numba_flash.cuda.sm80.tiles import Tile

pytestmark = [pytest.mark.full, pytest.mark.machine]
WIDE, NARROW, AHEAD = Tile(8, 2, 128, 1, False, 1, 2), Tile(4, 2, 64, 1, False, 2, 2), Tile(4, 2, 64, 2, False, 1, 2)
RNG = np.random.default_rng(3)
BATCH, HQ, HK, NQ, NK = 2, 4, 2, 150, 200
CASES = {
    "plain": (WIDE, {}),
    "causal": (WIDE, {"causal": True}),
    "steep": (NARROW, {"scale": 1.0}),
    "ahead, steep, window": (AHEAD, {"scale": 1.0, "window": (60, 30)}),
    "lengths": (NARROW, {"q_lengths": np.array([150, 33]), "kv_lengths": np.array([129, 70]), "causal": True}),
    "no keys": (WIDE, {"kv_lengths": np.array([0, 200])}),
    "softcap": (WIDE, {"softcap": 2.0}),
    "bias": (NARROW, {"bias": RNG.standard_normal((HQ, NQ, NK)).astype(np.float16)}),
    "mask": (WIDE, {"mask": RNG.random((NQ, NK)) < 0.7}),
    "dropout": (WIDE, {"dropout": 0.3, "rng": (7, 11)}),
    "score_mod": (NARROW, {"score_mod": numba_flash.alibi(np.linspace(0.1, 0.4, HQ))}),
    "blocks": (WIDE, {"mask": numba_flash.BlockMask(np.array([[0, 1], [1, 0]], bool), 128)}),
}


def run(tile, options, d=16, dv=40, multiprocessors=2, dtype="float16", seed=1):
    sizes = {"batch": (BATCH,), "hq": HQ, "hk": HK, "nq": NQ, "nk": NK, "d": d, "dv": dv}
    with mock.patch.object(recipes, "forward_tile", return_value=tile):
        return forward_pass("sm80", random_inputs(**sizes, dtype=dtype), seed, multiprocessors, **options)


@pytest.mark.parametrize(("tile", "options"), CASES.values(), ids=CASES)
def test_options(tile, options):
    run(tile, options)


def test_parts_of_the_keys():
    """Columns of each warp, of float32."""
    run(NARROW, {}, multiprocessors=100)


@pytest.mark.parametrize(("d", "dv"), [(16, 16), (24, 7), (13, 64), (72, 72)])
def test_head_dimensions(d, dv):
    """Those that fill no tile, and no part of its columns."""
    run(NARROW, {}, d=d, dv=dv, dtype="bfloat16")


def test_no_order_of_warps_matters():
    """Sums of two warps are the same bits in both, and from call to call."""
    results = [run(AHEAD, {"causal": True}, seed=seed) for seed in range(3)]
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(x, y)
