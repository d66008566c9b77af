"""What the contract says, of every tensor-core kernel, without a GPU: the public functions against the oracle on the machine, with small
sizes around tiles, some in two orders of warps and copies, which must give the same bits.

A group's problems share their kernels, so that each is compiled once. What a tier refuses is left out, with its sentence as the reason.
"""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from support import DTYPES, SIMULATED, Backend, laid_out, random_inputs, same_bits, whole

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from ptx_machine.problems.kernels import HOPPER, SIMT, SM80, SM90, machine
from support.naive import compare, run

import numba_flash
from numba_flash import reference
from numba_flash.cuda.sm80.backward import prepare_backward as prepare_backward_sm80
from numba_flash.cuda.sm90.backward import prepare_temporaries
from numba_flash.cuda.sm90.dq import prepare_dq_order

pytestmark = pytest.mark.machine


class Shape(NamedTuple):
    """Of a problem: (batch, query heads, key heads), queries, keys, and what else is chosen."""

    heads: tuple[int, int, int]
    nq: int
    nk: int
    options: dict = {}  # noqa: RUF012


class Group(NamedTuple):
    """Problems of the same kernels.

    Attributes
    ----------
    backend : Backend
        The tier.
    dtype : str
        Of q.
    d, dv : int
        Head dimensions.
    shapes : tuple of Shape
        The problems.
    capability : tuple of two ints
        What kernels are compiled for.
    layouts : tuple of str
        How q, k, v and do lie in memory, among `support.LAYOUTS`.
    """

    backend: Backend
    dtype: str
    d: int
    dv: int
    shapes: tuple[Shape, ...]
    capability: tuple[int, int] = HOPPER
    layouts: tuple[str, ...] = ("contiguous",) * 4


ONE, PAIR, BATCH = (1, 1, 1), (1, 2, 1), (2, 1, 1)
AROUND = (Shape((1, 4, 2), 63, 65), Shape(ONE, 1, 1), Shape(BATCH, 128, 129), Shape(PAIR, 70, 257))
BANDS = (
    Shape(PAIR, 129, 129, {"causal": True}),
    Shape(ONE, 1, 130, {"causal": True}),
    Shape(ONE, 200, 70, {"causal": True}),  # the first queries see nothing
    Shape(BATCH, 130, 190, {"causal": True, "q_start": 3}),
)
WINDOWS = (
    Shape(PAIR, 130, 200, {"window": (63, 17)}),
    Shape(ONE, 192, 256, {"window": (128, 0)}),
    Shape(ONE, 257, 90, {"window": (10, 5), "q_start": -30}),
)
lengths = lambda q, kv: {"q_lengths": np.array(q), "kv_lengths": np.array(kv, np.int32)}
LENGTHS = (
    Shape(BATCH, 130, 150, lengths([130, 3], [77, 150])),
    Shape((3, 1, 1), 70, 200, lengths([1, 70, 64], [0, 128, 129])),
)
also = lambda shape, **options: shape._replace(options=shape.options | options)
CAUSAL_LENGTHS = (also(LENGTHS[0], causal=True),)
SOFT = Shape(PAIR, 100, 150)
NOTHING = (Shape(ONE, 5, 0), Shape(PAIR, 0, 5), Shape((0, 1, 1), 5, 5), Shape((1, 0, 2), 5, 5))

hopper = partial(Group, SM90)
ON_HOPPER = {
    "float16 64": hopper("float16", 64, 64, AROUND),
    "bfloat16 64 causal": hopper("bfloat16", 64, 64, BANDS),
    "float16 64 window": hopper("float16", 64, 64, WINDOWS),
    "bfloat16 64 causal lengths": hopper("bfloat16", 64, 64, CAUSAL_LENGTHS),
    "float16 64 causal softcap": hopper("float16", 64, 64, (also(SOFT, softcap=2.0, causal=True),)),
    "bfloat16 128": hopper("bfloat16", 128, 128, AROUND[2:3]),
    "float16 128 causal": hopper("float16", 128, 128, BANDS[:1]),
    "bfloat16 128 window": hopper("bfloat16", 128, 128, WINDOWS[:1]),
    "float16 128 lengths": hopper("float16", 128, 128, LENGTHS[:1]),
    "float16 64 heads as rows": hopper("float16", 64, 64, (Shape((2, 8, 2), 9, 90, {"kv_lengths": np.array([50, 90])}),)),
    "bfloat16 128 softcap": hopper("bfloat16", 128, 128, (also(SOFT, softcap=5.0),)),
    "float16 72, 40": hopper("float16", 72, 40, AROUND[:1]),
    "bfloat16 192, 128": hopper("bfloat16", 192, 128, AROUND[:1]),
    "float16 256 causal": hopper("float16", 256, 256, BANDS[:1]),
    "bfloat16 256 lengths": hopper("bfloat16", 256, 256, LENGTHS[1:]),
}

split = partial(hopper, "float32")
FLOAT32_ON_HOPPER = {
    "float32 64": split(64, 64, AROUND),
    "float32 64 causal": split(64, 64, BANDS),
    "float32 64 window": split(64, 64, WINDOWS),
    "float32 64 causal lengths": split(64, 64, CAUSAL_LENGTHS),
    "float32 40, 24, any strides": split(40, 24, AROUND[:1], layouts=("strided", "reversed", "transposed", "heads last")),
    "float32 128": split(128, 128, (AROUND[0], Shape(ONE, 65, 170))),
    "float32 128 causal": split(128, 128, BANDS[2:3]),
    "float32 128 lengths": split(128, 128, LENGTHS[1:]),
    "float32 72, 40": split(72, 40, AROUND[2:3]),
}

RNG = np.random.default_rng(0)
TURING, AMPERE, SMALL = (7, 5), (8, 0), (8, 6)
NEAR, ODD = Shape(PAIR, 70, 90), Shape(BATCH, 61, 77)  # of the former, rows of scores lie at multiples of 4 elements; of the latter of 1


def tilt(score, b, h, i, j):
    return np.float32(0.5) * score + (b - h + (i - 2 * j) % 7) * np.float32(0.1)


def tilt_grad(score, b, h, i, j):
    return np.float32(0.5)


def bias(shape: Shape, dtype: str, *axes: int) -> dict:
    """A bias with its gradient, which is broadcast along these axes; -inf hides what it stands for."""
    whole = (shape.heads[0], shape.heads[1], shape.nq, shape.nk)
    x = RNG.standard_normal([1 if axis in axes else n for axis, n in enumerate(whole)])
    return {"bias": np.where(RNG.random(x.shape) < 0.1, -np.inf, x).astype(DTYPES[dtype]), "bias_grad": True}


def near_the_end(shape: Shape) -> dict:
    """A bias that hides by the least number that there is, all of some rows."""
    x = RNG.standard_normal((shape.nq, shape.nk))
    x[RNG.random(x.shape) < 0.3], x[5] = -3.3e38, -3.3e38
    return {"bias": x.astype(DTYPES["bfloat16"])}


def mask(shape: Shape, *axes: int) -> dict:
    """One that is broadcast along these axes."""
    whole = (shape.heads[0], shape.heads[1], shape.nq, shape.nk)
    return {"mask": RNG.random([1 if axis in axes else n for axis, n in enumerate(whole)]) < 0.7}


def tiles_of_a_mask(shape: Shape) -> dict:
    """One of tiles of 64 x 64 that are hidden, visible as a whole, or mixed."""
    whole = np.empty((shape.heads[1], shape.nq, shape.nk), bool)
    kinds = RNG.integers(3, size=(shape.heads[1], -(-shape.nq // 64), -(-shape.nk // 64)))
    at = kinds.repeat(64, 1).repeat(64, 2)[:, : shape.nq, : shape.nk]
    whole[:] = (at == 2) | (at == 1) & (RNG.random(whole.shape) < 0.5)
    return {"mask": whole}


def blocks_of_a_mask(shape: Shape, size, share=0.4) -> dict:
    """One of blocks; the first queries see nothing."""
    counts = numba_flash.BlockMask(np.ones((1, 1), bool), size).block_size.counts(shape.nq, shape.nk)
    blocks = RNG.random((shape.heads[1], *counts)) < share
    blocks[:, 0] = False
    return {"mask": numba_flash.BlockMask(blocks, size)}


ALIBI = numba_flash.alibi(np.array([0.5, 0.25], np.float32))
SLOPES = {"score_mod": ALIBI, "score_mod_grad": ALIBI.score_mod_grad}
SCORE_MOD = {"score_mod": tilt, "score_mod_grad": tilt_grad}
DROPOUT = {"dropout": 0.3, "rng": (7, 11)}
LONE = Shape(ONE, 75, 90)
LARGE = Shape((1, 4, 2), 200, 330)
WIDE = Shape((1, 2, 1), 130, 200)  # of wide heads, which take long
EVEN = Shape((2, 2, 2), 150, 264)  # rows of scores lie at multiples of 8 elements
TILES = also(LARGE, **tiles_of_a_mask(LARGE))
NO_BLOCK = {"mask": numba_flash.BlockMask(np.zeros((1, 1), bool), 128)}
EMPTY = {"mask": np.ones((1, 1), bool)}
EVERYTHING = SCORE_MOD | DROPOUT | bias(LONE, "float16") | mask(LONE) | {"softcap": 3.0}

ampere = partial(Group, SM80, capability=AMPERE)
SINCE_TURING = {
    "float16 64": ampere("float16", 64, 64, (AROUND[0], AROUND[3])),
    "bfloat16 64 causal": ampere("bfloat16", 64, 64, (Shape(PAIR, 70, 90, {"causal": True}), *BANDS[2:])),
    "float16 64 window on Hopper": ampere("float16", 64, 64, WINDOWS[:2], capability=HOPPER),
    "bfloat16 64 causal lengths on Hopper": ampere("bfloat16", 64, 64, CAUSAL_LENGTHS, capability=HOPPER),
    "float16 64 of nothing": ampere("float16", 64, 64, NOTHING),
    "float16 13, 7": ampere("float16", 13, 7, (AROUND[0], WINDOWS[2])),
    "bfloat16 40, 72 causal": ampere("bfloat16", 40, 72, BANDS[:1]),
    "float16 64, any strides": ampere("float16", 64, 64, AROUND[:1], layouts=("strided", "reversed", "transposed", "heads last")),
    "float16 128": ampere("float16", 128, 128, (AROUND[0], AROUND[3])),
    "bfloat16 128 window on Hopper": ampere("bfloat16", 128, 128, WINDOWS[:1], capability=HOPPER),
    "float16 128 lengths": ampere("float16", 128, 128, LENGTHS[1:]),
    "bfloat16 256 causal": ampere("bfloat16", 256, 256, (Shape(ONE, 129, 70, {"causal": True}),)),
    "bfloat16 192, 128 on Hopper": ampere("bfloat16", 192, 128, AROUND[:1], capability=HOPPER),
    "float16 64 on Turing": ampere("float16", 64, 64, (AROUND[0], also(ODD, causal=True)), capability=TURING),
    "float16 128 on Turing": ampere("float16", 128, 128, (Shape(ONE, 65, 70),), capability=TURING),
    "float16 256, 24 on Turing": ampere("float16", 256, 24, (Shape(BATCH, 40, 50, lengths([40, 3], [0, 50])),), capability=TURING),
    "float16 128, little memory": ampere("float16", 128, 128, (Shape(ONE, 130, 70),), capability=SMALL),
    "bfloat16 256, little memory": ampere("bfloat16", 256, 256, (Shape(ONE, 65, 70),), capability=SMALL),
    # options
    "float16 64 softcap": ampere("float16", 64, 64, (also(NEAR, softcap=2.0),)),
    "bfloat16 64 bias": ampere("bfloat16", 64, 64, (also(NEAR, **bias(NEAR, "bfloat16")),)),
    "float16 64 bias of float32 for all": ampere("float16", 64, 64, (also(ODD, causal=True, **bias(ODD, "float32", 0, 1)),)),
    "float16 128 bias of keys": ampere("float16", 128, 128, (also(ODD, **bias(ODD, "float16", 1, 2)),)),
    "float16 64 mask": ampere("float16", 64, 64, (also(NEAR, **mask(NEAR)), also(ODD, **mask(ODD, 0)))),
    "bfloat16 64 tiles of a mask": ampere("bfloat16", 64, 64, (TILES, Shape(ONE, 5, 0, EMPTY), Shape(PAIR, 0, 5, EMPTY))),
    "bfloat16 64 tiles of a mask, causal": ampere("bfloat16", 64, 64, (also(TILES, causal=True),)),
    "float16 128 tiles of a mask on Hopper": ampere("float16", 128, 128, (TILES,), capability=HOPPER),
    "bfloat16 64 blocks": ampere("bfloat16", 64, 64, (also(LARGE, **blocks_of_a_mask(LARGE, 128)),)),
    "float16 64 blocks, causal": ampere("float16", 64, 64, (also(LARGE, causal=True, **blocks_of_a_mask(LARGE, 64)),)),
    "float16 64 blocks that do not fit": ampere("float16", 64, 64, (also(LARGE, **blocks_of_a_mask(LARGE, (100, 48))),)),
    "float16 64 blocks and a bias": ampere(
        "float16", 64, 64, (also(LARGE, **blocks_of_a_mask(LARGE, 128), **bias(LARGE, "float16", 1)),), capability=HOPPER
    ),
    "bfloat16 128 blocks and lengths": ampere("bfloat16", 128, 128, (also(LENGTHS[0], **blocks_of_a_mask(LENGTHS[0], (128, 64))),)),
    "float16 64 blocks, dropout, softcap on Turing": ampere(
        "float16", 64, 64, (also(LARGE, softcap=3.0, **blocks_of_a_mask(LARGE, 128), **DROPOUT),), capability=TURING
    ),
    "bfloat16 40 mask of keys": ampere("bfloat16", 40, 40, (also(ODD, causal=True, **mask(ODD, 1, 2)),)),
    "float16 64 dropout": ampere("float16", 64, 64, (also(NEAR, **DROPOUT), also(ODD, **DROPOUT))),
    "bfloat16 128 dropout lengths": ampere("bfloat16", 128, 128, (also(LENGTHS[1], **DROPOUT),)),
    "bfloat16 64 score_mod": ampere("bfloat16", 64, 64, (also(NEAR, **SCORE_MOD),)),
    "float16 128 alibi": ampere("float16", 128, 128, (also(NEAR, causal=True, **SLOPES),)),
    "float16 64 everything": ampere("float16", 64, 64, (also(LONE, window=(30, 20), **lengths([70], [77]), **EVERYTHING),)),
    "float16 256 mask and dropout": ampere("float16", 256, 256, (also(LONE, **mask(LONE), **DROPOUT),)),
    "float16 64 everything on Turing": ampere("float16", 64, 64, (also(LONE, **EVERYTHING),), capability=TURING),
    "float16 192 blocks on Hopper": ampere("float16", 192, 192, (also(WIDE, **blocks_of_a_mask(WIDE, 64)),), capability=HOPPER),
}

ALL_SEEN = Shape(ONE, 3, 40, EMPTY)


OPTIONS_ON_HOPPER = {
    "bfloat16 64 bias": hopper("bfloat16", 64, 64, (also(NEAR, **bias(NEAR, "bfloat16")), also(LARGE, **bias(LARGE, "bfloat16")))),
    "bfloat16 64 copied bias": hopper(
        "bfloat16", 64, 64, (also(EVEN, **bias(EVEN, "bfloat16")), also(EVEN, causal=True, **bias(EVEN, "bfloat16", 0)))
    ),
    "float16 64 copied mask": hopper("float16", 64, 64, (also(EVEN, **mask(EVEN)), also(EVEN, causal=True, **mask(EVEN, 0, 1)))),
    "bfloat16 40, 64 copied bias near the end": hopper("bfloat16", 40, 64, (also(EVEN, **near_the_end(EVEN)),)),
    "float16 128 copied bias and a mask": hopper("float16", 128, 128, (also(EVEN, **mask(EVEN), **bias(EVEN, "float16", 0, 1)),)),
    "float16 64 bias of float32 for all": hopper("float16", 64, 64, (also(ODD, causal=True, **bias(ODD, "float32", 0, 1)),)),
    "bfloat16 128 bias of keys": hopper("bfloat16", 128, 128, (also(NEAR, **bias(NEAR, "bfloat16", 0, 1, 2)),)),
    "float16 40, 72 bias of queries": hopper("float16", 40, 72, (also(ODD, causal=True, **bias(ODD, "float16", 0, 3)),)),
    "bfloat16 64 tiles of a mask, causal": hopper("bfloat16", 64, 64, (also(TILES, causal=True), also(ALL_SEEN, causal=True))),
    "bfloat16 64 blocks": hopper("bfloat16", 64, 64, (also(LARGE, **blocks_of_a_mask(LARGE, 128)), Shape(ONE, 5, 40, NO_BLOCK))),
    "float16 128 blocks that do not fit": hopper("float16", 128, 128, (also(LARGE, causal=True, **blocks_of_a_mask(LARGE, (100, 33))),)),
    "float16 64 blocks, a bias and lengths": hopper(
        "float16", 64, 64, (also(LENGTHS[0], **blocks_of_a_mask(LENGTHS[0], 128), **bias(LENGTHS[0], "float16")),)
    ),
    "float16 128 dropout": hopper("float16", 128, 128, (also(NEAR, **DROPOUT), also(LARGE, **DROPOUT))),
    "float16 64 everything": hopper("float16", 64, 64, (also(LONE, window=(30, 20), **lengths([70], [77]), **EVERYTHING),)),
    "float16 256 mask and dropout": hopper("float16", 256, 256, (also(LONE, **mask(LONE), **DROPOUT),)),
    "bfloat16 64 score_mod": hopper("bfloat16", 64, 64, (also(NEAR, **SCORE_MOD),)),
    "float16 128 tiles of a mask": hopper("float16", 128, 128, (TILES,)),
    "float16 72, 40 softcap, dropout, lengths": hopper("float16", 72, 40, (also(LENGTHS[0], softcap=2.0, **DROPOUT),)),
    "bfloat16 128 everything": hopper("bfloat16", 128, 128, (also(LONE, causal=True, **(EVERYTHING | bias(LONE, "float32"))),)),
}

FLOAT32 = {
    "float32 64": ampere("float32", 64, 64, AROUND[:1]),
    "float32 64 causal on Hopper": ampere("float32", 64, 64, BANDS, capability=HOPPER),
    "float32 64 of nothing": ampere("float32", 64, 64, NOTHING),
    "float32 128": ampere("float32", 128, 128, (AROUND[0], Shape(ONE, 65, 170))),
    "float32 64 bias for all on Hopper": ampere(
        "float32", 64, 64, (also(ODD, causal=True, **bias(ODD, "float32", 0, 1)),), capability=HOPPER
    ),
    "float32 32 bias of keys": ampere("float32", 32, 32, (also(ODD, **bias(ODD, "float32", 1, 2)),)),
    "float32 64 bias and lengths": ampere("float32", 64, 64, (also(CAUSAL_LENGTHS[0], **bias(LENGTHS[0], "float32", 0)),)),
    "float32 64 tiles of a mask": ampere("float32", 64, 64, (TILES, Shape(ONE, 5, 0, EMPTY), Shape(PAIR, 0, 5, EMPTY))),
    "float32 64 blocks": ampere("float32", 64, 64, (also(LARGE, **blocks_of_a_mask(LARGE, 128)),)),
    "float32 64 blocks that do not fit": ampere("float32", 64, 64, (also(NEAR, **blocks_of_a_mask(NEAR, (20, 30))),)),
    "float32 64 dropout": ampere("float32", 64, 64, (also(ODD, **DROPOUT),)),
    "float32 64 everything": ampere(
        "float32", 64, 64, (also(LONE, window=(30, 20), **lengths([70], [77]), **(EVERYTHING | bias(LONE, "float32"))),)
    ),
}

ieee = partial(Group, SIMT, "float64")
FLOAT64 = {  # products of float64 on tensor cores; edges of tiles and options without them
    "float64 64": ieee(64, 64, AROUND[:1]),
    "float64 64 on Ampere": ieee(64, 64, (Shape(ONE, 65, 70),), capability=AMPERE),
    "float64 13, 40 causal": ieee(13, 40, BANDS[:1]),
}
double = partial(Group, SM80, "float64")
DOUBLE = {
    "float64 24, 8 causal": double(24, 8, (Shape(ONE, 30, 50, {"causal": True}), Shape(ONE, 70, 40, {"causal": True}))),
    "float64 40, 24 on Ampere": double(
        40,
        24,
        (Shape(BATCH, 33, 50, lengths([33, 3], [7, 50])), Shape(ONE, 5, 0, lengths([5], [0]))),
        capability=AMPERE,
        layouts=("strided", "reversed", "transposed", "heads last"),
    ),
    "float64 24, 8 window": double(24, 8, (Shape(PAIR, 70, 130, {"window": (40, 5)}), WINDOWS[2])),
}
WIDE, LONG = also(LARGE, window=(150, 40), **blocks_of_a_mask(LARGE, 128, 0.7)), Shape(PAIR, 70, 520)
BLOCKS_ON_HOPPER = {
    "float16 128 blocks, window, dropout, softcap": hopper("float16", 128, 128, (also(WIDE, softcap=3.0, **DROPOUT),)),
    "float16 72, 40 blocks of (64, 256)": hopper("float16", 72, 40, (also(LONG, **blocks_of_a_mask(LONG, (64, 256), 0.7)),)),
    "bfloat16 64 blocks of 64, causal": hopper("bfloat16", 64, 64, (also(LARGE, causal=True, **blocks_of_a_mask(LARGE, 64)),)),
    "float16 64 blocks and a score_mod": hopper("float16", 64, 64, (also(LARGE, **blocks_of_a_mask(LARGE, 128), **SCORE_MOD),)),
    "bfloat16 128 blocks, window": hopper("bfloat16", 128, 128, (also(LARGE, window=(150, 40), **blocks_of_a_mask(LARGE, 128, 0.7)),)),
    "float16 64 blocks, causal, lengths": hopper("float16", 64, 64, (also(CAUSAL_LENGTHS[0], **blocks_of_a_mask(LENGTHS[0], 128)),)),
}
BLOCKS_OF_LARGE = blocks_of_a_mask(LARGE, 128)
# A bias that batch elements share, kept in shared memory: with keys that it hides, and without.
FINITE = RNG.standard_normal((2, 150, 400)).astype(np.float32)
MANY, SHORT, NARROW = Shape((9, 2, 1), 150, 250), Shape((8, 1, 1), 70, 431), Shape((8, 2, 2), 130, 70)
finite = lambda shape, dtype: {"bias": FINITE[: shape.heads[1], : shape.nq, : shape.nk].astype(DTYPES[dtype])}
KEPT_ON_HOPPER = {
    "bfloat16 32 kept bias": hopper(
        "bfloat16", 32, 32, (also(MANY, **finite(MANY, "bfloat16")), also(NARROW, **bias(NARROW, "bfloat16", 0)))
    ),
    "float16 24, 16 kept bias of 16 bits": hopper("float16", 24, 16, (also(SHORT, **bias(SHORT, "float16", 0)),)),
    "float16 32, 8 kept bias of float32": hopper("float16", 32, 8, (also(NARROW, **finite(NARROW, "float32")),)),
}
SAME_HEADS, LONGER = Shape((8, 2, 2), 130, 200), Shape((9, 1, 1), 70, 330)
KEPT_GRADIENTS = {
    "bfloat16 32 gradients of a kept bias": hopper(
        "bfloat16", 32, 32, (also(SAME_HEADS, **bias(SAME_HEADS, "bfloat16", 0)), also(LONGER, **bias(LONGER, "bfloat16", 0)))
    ),
    "float16 24, 16 gradients of a kept bias": hopper("float16", 24, 16, (also(LONGER, **bias(LONGER, "float16", 0)),)),
}
TIERS = {
    "sm90": ON_HOPPER | FLOAT32_ON_HOPPER | OPTIONS_ON_HOPPER | BLOCKS_ON_HOPPER | KEPT_ON_HOPPER | KEPT_GRADIENTS,
    "sm80": SINCE_TURING | FLOAT32 | DOUBLE,
    "simt": FLOAT64,
}
GROUPS = {f"{tier} {name}": group for tier, groups in TIERS.items() for name, group in groups.items()}
QUICK = {"sm80 bfloat16 64 causal": 1}  # problems of a group that run backward without --full
# One of each kind of kernel runs in two orders. (What must not happen in any order the machine finds in one.)
AGAIN = {
    *(f"sm90 {name}" for name in ("bfloat16 64 causal", "bfloat16 128", "float16 72, 40", "float16 256 causal")),
    "sm90 bfloat16 64 bias",
    "sm90 bfloat16 32 kept bias",
    "sm90 bfloat16 32 gradients of a kept bias",
    *(f"sm90 {name}" for name in ("float32 64 causal", "float32 128", "bfloat16 64 tiles of a mask, causal", "float16 128 dropout")),
    *(f"sm80 {name}" for name in ("bfloat16 64 causal", "float16 128", "bfloat16 192, 128 on Hopper", "float16 64 on Turing")),
    *(f"{tier} bfloat16 64 blocks" for tier in ("sm80", "sm90")),
    "sm90 bfloat16 128 blocks, window",
    *(f"sm80 {name}" for name in ("float16 128, little memory", "bfloat16 64 tiles of a mask", "float16 128 bias of keys")),
    "sm80 float64 40, 24 on Ampere",
    *(f"sm80 {name}" for name in ("float32 64 causal on Hopper", "float32 128", "float32 64 tiles of a mask")),
}


def named(quick) -> list:
    """The groups, those that are not quick for ``--full`` alone."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.full) for name in GROUPS]


def inputs_of(group: Group, shape: Shape):
    """q, k, v, do; beyond the lengths there is NaN."""
    batch, hq, hk = shape.heads
    q, k, v, do = random_inputs(batch=(batch,), hq=hq, hk=hk, nq=shape.nq, nk=shape.nk, d=group.d, dv=group.dv, dtype=group.dtype)
    for name, arrays in {"q_lengths": (q, do), "kv_lengths": (k, v)}.items():
        for b, length in enumerate(shape.options.get(name, ())):
            for x in arrays:
                x[b, :, length:] = np.nan
    return q, k, v, do


def forward(group: Group, arrays, bias_grad=False, **options) -> dict:
    """o and lse."""
    q, k, v, _ = (laid_out(group.backend, x, layout) for x, layout in zip(arrays, group.layouts, strict=True))
    o, lse = group.backend.forward(q, k, v, return_lse=True, **options)
    return {"o": o, "lse": lse}


def backward(group: Group, arrays, **options) -> dict:
    """The gradients, from the oracle's o and lse."""
    o, lse = reference.forward(
        *arrays[:3],
        return_lse=True,
        **{name: x for name, x in options.items() if name not in ("bias_grad", "dlse", "deterministic")},
    )
    q, k, v, do = (laid_out(group.backend, x, layout) for x, layout in zip(arrays, group.layouts, strict=True))
    kept = lse.astype(np.result_type(q.dtype, np.float32))
    gradients = group.backend.backward(do, q, k, v, o.astype(q.dtype), kept, **options)
    return dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=False))


def check(run, name: str, full: bool) -> None:
    """What `run` returns for the problems of a group is right, and of some groups the first is the same in another order."""
    group = GROUPS[name]
    shapes = group.shapes if full else group.shapes[: QUICK[name]]
    for number, shape in enumerate(shapes):
        arrays = inputs_of(group, shape)
        try:
            with machine(seed=number, capability=group.capability):
                results = run(group, arrays, **shape.options)
            compare(results, *arrays, **shape.options)
            if number == 0 and name in AGAIN and full:
                with machine(seed=number + 100, capability=group.capability):
                    again = run(group, arrays, **shape.options)
                for key, x in results.items():
                    assert same_bits(x, again[key]), f"{key} depends on the order of warps, copies or blocks"
        except Exception as error:
            error.add_note(f"of {shape}")
            raise


@pytest.mark.parametrize("name", named(()))
def test_forward(name, pytestconfig):
    check(forward, name, pytestconfig.option.full)


FORWARD_ALONE = {f"sm90 {name}" for name, group in FLOAT32_ON_HOPPER.items() if max(group.d, group.dv) > 64}
FORWARD_ALONE |= {"sm90 float16 256 mask and dropout", *(f"sm90 {name}" for name in KEPT_ON_HOPPER)}


@pytest.mark.parametrize("name", [x for x in named(QUICK) if x.values[0] not in FORWARD_ALONE])
def test_backward(name, pytestconfig):
    check(backward, name, pytestconfig.option.full)


@pytest.mark.full
def test_gradients_of_float64_with_dropout_in_wide_heads():
    """On a GPU that has no forward pass of them."""
    group = double(128, 40, (), capability=AMPERE)
    shape = Shape(PAIR, 40, 50, DROPOUT)
    arrays = inputs_of(group, shape)
    with machine(capability=AMPERE):
        results = backward(group, arrays, **shape.options)
    compare(results, *arrays, **shape.options)


every_tier = pytest.mark.parametrize("backend", [SM90, SM80], ids=lambda backend: backend.name)


@pytest.mark.full
@pytest.mark.parametrize(("backend", "d", "nk"), [(SM90, 128, 1200), (SM80, 64, 1056)], ids=["sm90", "sm80"])
def test_parts_of_the_keys_are_combined(backend, d, nk):
    """Few queries on a GPU with many multiprocessors: several blocks share the keys of one, or the tiles that a mask leaves."""
    nq = 17 if backend is SM80 else 3  # there, fewer have a kernel of their own
    arrays = random_inputs(batch=(1,), hq=1, hk=1, nq=nq, nk=nk, d=d, dtype="float16")
    some = np.random.default_rng(0).random((nq, nk)) < 0.02
    masks = [{"mask": some}, {"mask": some | True}][: 2 if backend is SM80 else 1]
    for options in ({}, {"kv_lengths": np.array([nk * 3 // 4])}, *masks):
        with machine(multiprocessors=8, capability=AMPERE if backend is SM80 else HOPPER):
            results = forward(Group(backend, "float16", d, d, ()), arrays, **options)
        compare(results, *arrays, **options)


@pytest.mark.full
@every_tier
def test_out_of_float32_is_what_o_is_rounded_from(backend):
    """In one part, and where results over parts of the keys are combined."""
    for nq, nk in ((70, 90), (3, 1200)):
        q, k, v, do = random_inputs(batch=(1,), hq=1, hk=1, nq=nq, nk=nk, d=64, dtype="bfloat16")
        with machine(multiprocessors=4):
            out, lse = backend.forward(q, k, v, out=np.full(do.shape, np.nan, np.float32), return_lse=True)
            o, same_lse = backend.forward(q, k, v, return_lse=True)
        assert same_bits(o, out.astype(o.dtype))
        assert (out != o).any()
        assert same_bits(lse, same_lse)


@pytest.mark.full
def test_gradients_of_lse_in_any_order():
    """Sums of dq that are added as they come are right, if not repeatable."""
    arrays = random_inputs(batch=(1,), hq=2, hk=1, nq=130, nk=300, d=64, dtype="bfloat16")
    options = {"causal": True, "dlse": np.random.default_rng(5).standard_normal((1, 2, 130)).astype(np.float32)}
    for deterministic in (False, True):
        with machine(seed=3):
            results = backward(Group(SM80, "bfloat16", 64, 64, ()), arrays, deterministic=deterministic, **options)
        compare(results, *arrays, **options)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_gradients_of_wide_dtypes_in_any_order(dtype):
    """No block of keys may take its sums of dq for the first ones."""
    arrays = random_inputs(batch=(1,), hq=1, hk=1, nq=40, nk=300, d=16, dtype=dtype)
    for seed in range(2):
        with machine(seed=seed, multiprocessors=4):
            results = backward(Group(SM80, dtype, 16, 16, ()), arrays, deterministic=False)
        compare(results, *arrays)


@pytest.mark.full
@pytest.mark.parametrize(
    ("d", "masked"), [(64, TILES.options), (64, BLOCKS_OF_LARGE), (128, BLOCKS_OF_LARGE)], ids=("pairs", "blocks", "blocks, D128")
)
def test_gradients_under_a_mask_in_any_order(d, masked):
    """On Hopper; and with a gradient of the lse."""
    group = Group(SM90, "bfloat16", d, d, ())
    arrays = inputs_of(group, LARGE)
    options = masked | {"dlse": np.random.default_rng(5).standard_normal((1, 4, LARGE.nq)).astype(np.float32)}
    results = []
    for deterministic, resident in ((False, None), (True, None), (True, 1)):
        with machine(seed=len(results), multiprocessors=4, resident=resident):
            results.append(backward(group, arrays, deterministic=deterministic, **options))
        compare(results[-1], *arrays, **options)
    assert all(same_bits(x, results[2][name]) for name, x in results[1].items()), "bits depend on how many blocks are at work"


@pytest.mark.full
@pytest.mark.parametrize(("d", "capability", "causal"), [(64, AMPERE, True), (128, AMPERE, False), (256, HOPPER, True)])
def test_few_rows_have_small_blocks(d, capability, causal):
    """Three blocks of 64 rows of each head, where two of 128 would leave multiprocessors idle."""
    arrays = random_inputs(batch=(1,), hq=2, hk=1, nq=150, nk=300, d=d, dtype="float16")
    with machine(seed=2, multiprocessors=6, capability=capability):
        results = forward(Group(SM80, "float16", d, d, ()), arrays, causal=causal)
    compare(results, *arrays, causal=causal)


@pytest.mark.full
@pytest.mark.parametrize(("copies", "d"), [(1, 64), (2, 64), (4, 64), (2, 128)])
def test_sums_of_dq_in_copies(copies, d, monkeypatch):
    """Blocks of keys that add to different copies wait for nobody; which keys a query sees begins anywhere. The same in any order."""
    monkeypatch.setattr(prepare_backward_sm80, "copies_of_sums", lambda *problem: copies)
    arrays = random_inputs(batch=(1,), hq=2, hk=1, nq=100, nk=600, d=d, dtype="bfloat16")
    group, first = SINCE_TURING["bfloat16 64 causal"]._replace(d=d, dv=d), None
    for seed, resident in ((0, None), (1, 1)):
        with machine(seed, resident=resident, capability=AMPERE):
            results = backward(group, arrays, causal=True)
        compare(results, *arrays, causal=True)
        first = first or results
        assert all(same_bits(x, first[name]) for name, x in results.items())
    for q_start in (0, 400):
        with machine(capability=AMPERE):
            results = backward(group, arrays, causal=True, q_start=q_start)
        compare(results, *arrays, causal=True, q_start=q_start)


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "d", "options", "deterministic"),
    [(SM90, 64, {}, True), (SM90, 64, {}, False), (SM90, 64, SLOPES, True), (SM90, 256, {}, True), (SM80, 64, {}, True)],
    ids=["sm90, 64", "sm90, 64, any order", "sm90, 64, alibi", "sm90, 256", "sm80, 64"],
)
def test_packed_sequences(backend, d, options, deterministic, monkeypatch):
    """Sequences of any length, one of them empty, beside each other; each as if it were alone."""
    monkeypatch.setattr(prepare_dq_order, "MANY_PACKED", 1)
    q_offsets, k_offsets = np.array([0, 70, 70, 199, 230]), np.array([0, 50, 120, 250, 251])
    rng = np.random.default_rng(2)
    draw = lambda n, heads: rng.standard_normal((n, heads, d)).astype(np.float16)
    q, do, k, v = draw(230, 2), draw(230, 2), draw(251, 1), draw(251, 1)
    sequences = lambda x, offsets: [x[slice(*part)].swapaxes(0, 1) for part in pairwise(offsets)]
    one_by_one = [[*zip(*(sequences(x, offsets) for x in xs), strict=True)] for xs, offsets in (((do, q), q_offsets), ((k, v), k_offsets))]
    alone = [(do, q, k, v) for (do, q), (k, v) in zip(*one_by_one, strict=True)]

    def agree(x, offsets, refs):
        for each, ref in zip(sequences(x, offsets), refs, strict=True):
            np.testing.assert_allclose(each.astype(np.float64), ref, atol=6e-3 * max(1, np.abs(ref).max(initial=0)), rtol=6e-3)

    with machine(seed=1):
        o, lse = backend.forward_packed(q, k, v, q_offsets, k_offsets, return_lse=True, causal=True, **options)
    ref_o, ref_lse = zip(*(reference.forward(*inputs[1:], causal=True, **options, return_lse=True) for inputs in alone), strict=True)
    agree(o, q_offsets, ref_o)
    np.testing.assert_allclose(lse, np.concatenate(ref_lse, axis=-1), atol=1e-5)
    with machine(seed=1):
        gradients = backend.backward_packed(do, q, k, v, o, lse, q_offsets, k_offsets, causal=True, deterministic=deterministic, **options)
    refs = zip(*(whole.gradients(*inputs, causal=True, **options) for inputs in alone), strict=True)
    for x, offsets, ref in zip(gradients, (q_offsets, k_offsets, k_offsets), refs, strict=True):
        agree(x, offsets, ref)


@pytest.mark.full
def test_packed_gradients_have_the_bits_of_dropout_of_another_backend():
    """Those of a head of a sequence, wherever it begins among the packed ones."""
    offsets = np.array([0, 70, 70, 140]), np.array([0, 50, 60, 190])
    draw = lambda n: np.random.default_rng(n).standard_normal((n // 2, 2, 64)).astype(np.float16)
    q, do, k, v = draw(280), draw(281), draw(380), draw(381)
    with machine(capability=AMPERE):
        o, lse = SM80.forward_packed(q, k, v, *offsets, return_lse=True, **DROPOUT)
        expected = SM80.backward_packed(do, q, k, v, o, lse, *offsets, **DROPOUT)
    with machine():
        gradients = SM90.backward_packed(do, q, k, v, o, lse, *offsets, **DROPOUT)
    for x, y in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), atol=1e-2 * np.abs(y).max(), rtol=1e-2)


@pytest.mark.full
def test_ds_of_some_keys_at_a_time(monkeypatch):
    """Where memory for dS^T is short, it is made for some of the keys, in several launches, and dq is kept between them."""
    for name, value in {"FEWEST_BLOCKS": 1, "WORKSPACE": 0, "MOST_WORKSPACE": 0}.items():
        monkeypatch.setattr(prepare_temporaries, name, value)
    arrays = random_inputs(batch=(1,), hq=2, hk=1, nq=140, nk=300, d=256, dtype="bfloat16")
    with machine():
        results = backward(Group(SM90, "bfloat16", 256, 256, ()), arrays, causal=True)
    compare(results, *arrays, causal=True)


WINDOW, HALVES = {"window": (100, 20)}, {"causal": True} | lengths([200, 70], [150, 280])
UPWARD = {
    "64 causal": ("float16", 64, {"causal": True}),
    "64 window": ("bfloat16", 64, WINDOW),
    "64 causal lengths": ("float16", 64, HALVES),
    "128 causal": ("bfloat16", 128, {"causal": True}),
    "128 window": ("float16", 128, WINDOW),
    "float32 64 causal": ("float32", 64, {"causal": True}),
    "float32 64 causal lengths": ("float32", 64, HALVES),
    "float32 128 causal": ("float32", 128, {"causal": True}),
    "float32 128 window, lengths": ("float32", 128, HALVES | {"causal": False} | WINDOW),
    "64 causal softcap": ("float16", 64, {"causal": True, "softcap": 2.0}),
    "64 window alibi": ("float16", 64, WINDOW | SLOPES),
    "128 causal dropout": ("bfloat16", 128, {"causal": True} | DROPOUT),
}


FEWEST = {"UPWARD": (1000, 1000), "DOWNWARD": (0, 1000), "SERPENTINE": (0, 0)}  # UPWARD_DIMS and SERPENTINE_DIMS
IN_EACH_ORDER = [(name, order) for name in UPWARD for order in FEWEST if order != "SERPENTINE" or "window" not in name]


@pytest.mark.full
@pytest.mark.parametrize(("name", "order"), IN_EACH_ORDER)
def test_gradients_whose_blocks_of_keys_come_in_each_order(name, order, monkeypatch):
    """Of two heads of k, each of two heads of q and three blocks or five: upward but for the last, or all downward, or in swings of two
    blocks: the same bits, however many work.
    """
    dtype, d, options = UPWARD[name]
    group, results, way, among = Group(SM90, dtype, d, d, ()), [], prepare_dq_order.way, []
    for name_of, fewest in zip(("UPWARD_DIMS", "SERPENTINE_DIMS"), FEWEST[order], strict=True):
        monkeypatch.setattr(prepare_dq_order, name_of, fewest)
    monkeypatch.setattr(prepare_dq_order, "way", lambda *given: among.append(way(*given)) or among[-1])
    arrays = random_inputs(batch=(2,), hq=2, hk=1, nq=200, nk=280, d=d, dtype=dtype)
    for resident in (None, 1):
        with machine(len(results), multiprocessors=2, resident=resident):
            results.append(backward(group, arrays, **options))
    compare(results[0], *arrays, **options)
    assert all(same_bits(x, results[1][name]) for name, x in results[0].items())
    assert among
    for given in among:
        assert (given.upward > 0, given.serpentine) == (order == "UPWARD", 2 if order == "SERPENTINE" else 0)


@pytest.mark.full
def test_blocks_for_which_there_is_no_room():
    """Turns at dq are claimed by blocks at work: a grid that fits in parts alone, one block at a time, still ends, with the same bits."""
    arrays = random_inputs(batch=(1,), hq=1, hk=1, nq=130, nk=400, d=64, dtype="float16")
    results = []
    for resident in (None, 1):
        with machine(multiprocessors=4, resident=resident):
            results.append(run(SM90, *arrays))
    for name, x in results[0].items():
        assert all(same_bits(x, other[name]) for other in results[1:]), name
