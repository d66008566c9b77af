"""The machine on kernels for any GPU, under options that bring instructions of their own; and that it knows what the compiler makes."""

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.machine.machine import Machine
from ptx_machine.problems.kernels import SIMT, forward_pass, machine, ptx
from support import DTYPES, random_inputs
from support.naive import check

import numba_flash
from numba_flash.bench.cases import Cell
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.cuda.simt.decode_tiles import TILES
from numba_flash.warmup import kernels_of

NQ, NK, D = 20, 37, 8
RNG = np.random.default_rng(0)
ALIBI = numba_flash.alibi(np.array([0.5, 0.25], np.float32))
OPTIONS = {
    "dropout": lambda kind: {"dropout": 0.3, "rng": (7, 11)},
    "bias": lambda kind: {"bias": RNG.standard_normal((1, 2, NQ, NK)).astype(kind), "bias_grad": True, "causal": True},
    "mask": lambda kind: {"mask": RNG.random((1, 2, NQ, NK)) < 0.7},
    "alibi": lambda kind: {"score_mod": ALIBI, "score_mod_grad": ALIBI.score_mod_grad, "softcap": 4.0},
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "dtype"), [("dropout", "float64"), ("bias", "float16"), ("mask", "float32"), ("alibi", "bfloat16")])
def test_options_compute_what_they_mean(name, dtype):
    """Forward and backward, within what the dtype allows of the oracle."""
    arrays = random_inputs(batch=(1,), hq=2, hk=1, nq=NQ, nk=NK, d=D, dtype=dtype)
    with machine(capability=(8, 0)):
        check(SIMT, *arrays, **OPTIONS[name](DTYPES[dtype]))


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "heads", "nq"), [("float32", (2, 2), 1), ("float64", (1, 1), 1), ("float32", (4, 1), 1), ("float64", (1, 1), 2)]
)
def test_few_queries_have_a_tile_of_as_many_rows(dtype, heads, nq):
    """One, two or four; without lanes of their own, where maxima and sums are made. On a GPU where lanes do not share columns."""
    hq, hk = heads
    arrays = random_inputs(batch=(1,), hq=hq, hk=hk, nq=nq, nk=600, d=40, dtype=dtype)
    rows = nq * hq // hk
    assert rows in [tile.rows for tile in TILES[dtype]]
    for multiprocessors in (1, 3):
        forward_pass("simt", arrays, rows, multiprocessors, capability=(7, 5))


LANES = {
    "float32, D128": (("float32", 8, 1, 1, 600, 128, 128), {}),
    "causal, D40, 24": (("float32", 6, 2, 1, 700, 40, 24), {"causal": True}),
    "D256, 200": (("float32", 5, 1, 1, 600, 256, 200), {}),
    "float64, D128": (("float64", 8, 1, 1, 530, 128, 128), {}),
    "before the first key": (("float64", 4, 2, 3, 600, 20, 32), {"causal": True, "q_start": -2}),
    "window": (("float32", 2, 1, 4, 600, 64, 64), {"window": (150, 2), "q_start": 400}),
    "nothing": (("float32", 4, 2, 2, 600, 64, 64), {"kv_lengths": np.array([0])}),
    "padding": (("float32", 4, 2, 2, 600, 64, 64), {"q_lengths": np.array([1]), "kv_lengths": np.array([530])}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LANES)
def test_lanes_that_share_columns(name):
    """Of all rows that a block may have; with keys of two halves of a warp, and two chunks of a lane; in one part, and in several."""
    (dtype, hq, hk, nq, nk, d, dv), options = LANES[name]
    arrays = random_inputs(batch=(1,), hq=hq, hk=hk, nq=nq, nk=nk, d=d, dv=dv, dtype=dtype)
    for multiprocessors in (1, 3):
        forward_pass("simt", arrays, nk, multiprocessors, capability=(8, 0), **options)


@pytest.mark.full
def test_a_value_that_a_lane_hides_does_not_reach_its_row():
    """Not even as zero times NaN."""
    q, k, v, _ = random_inputs(batch=(), hq=2, hk=1, nq=2, nk=600, d=64, dtype="float32")
    v[0, 599] = np.nan  # seen by the last query alone
    with machine(capability=(8, 0)):
        o = SIMT.forward(q, k, v, causal=True)
    assert np.isfinite(o[:, 0]).all()
    assert np.isnan(o[:, 1]).all()


@pytest.mark.parametrize("dtype", TILES)
def test_rows_of_keys_of_few_queries_lie_in_different_banks(dtype):
    """Eight rows of 16 bytes, which threads read at a time, take 32 banks of 4 bytes; each row has room for its columns."""
    for tile in TILES[dtype]:
        pitch = tile.pitch(tile.depth, dtype) * np.dtype(dtype).itemsize
        assert pitch >= tile.depth * np.dtype(dtype).itemsize
        assert pitch % 16 == 0
        assert len({(row * pitch // 4 + i) % 32 for row in range(8) for i in range(4)}) == 32


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "capability"), [("float16", (9, 0)), ("float64", (8, 0))])
def test_every_instruction_of_the_kernels_of_a_grid_is_known(dtype, capability):
    """Forward and backward, at a length where a forward pass splits keys too."""
    gpu = Gpu(0, capability, 132)
    cells = [Cell(direction, "causal", dtype, 1, 1, 1, length, 64) for direction, length in (("backward", 512), ("forward", 4096))]
    for builder, config in dict.fromkeys(kernel for cell in cells for kernel in kernels_of(cell, None, gpu)):
        machine = Machine(ptx(builder, config, capability))
        assert len(machine.program) == len(machine.kernel.instructions) > 50
