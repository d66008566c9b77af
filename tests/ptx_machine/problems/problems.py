"""The smallest problems that show what a kernel does wrong, each run in a process of its own by `apart.run`.

It ends with 0 if the results are right in several orders of warps and copies, with `CAUGHT` if the machine or the oracle finds
something, and else as Python does: then the test itself is broken. Texts of kernels are kept in a folder, under all sources that
they are made of.
"""

import gc
import hashlib
import os
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import evidence
import numpy as np
from support import random_inputs
from support.pages import forward, paged

import numba_flash
from numba_flash import call, reference, sections
from numba_flash.cuda.runtime import compile, compiler
from numba_flash.cuda.score import prepare_relative
from numba_flash.cuda.sm80.backward import prepare_backward as prepare_backward_sm80
from numba_flash.cuda.sm90.backward import prepare_backward, prepare_block_sparse, prepare_temporaries
from numba_flash.cuda.sm90.backward.options_tiles import DQ_TILE
from numba_flash.cuda.sm90.dq import prepare_dq_order
from ptx_machine.machine.machine import Machine
from ptx_machine.machine.memory import Fault
from ptx_machine.problems import kernels
from ptx_machine.problems.kernels import backward_pass, forward_pass

CAUGHT = 3


class Problem(NamedTuple):
    """Random arrays, and the pass over them.

    Attributes
    ----------
    run : function
        `kernels.forward_pass` or `kernels.backward_pass`.
    d, nq, nk, hq, hk, batch
        Of the arrays.
    multiprocessors : int
        How many blocks share the work.
    options : dict
        Of the call. Where there are lengths, what lies beyond is NaN.
    key_blocks : int
        Of how many blocks of keys dS is made at a time, where it is kept.
    copies : int
        Of the sums of dQ that `sm80` keeps.
    slots : int
        Of tiles of dS, where these are listed, after which a section ends.
    resident : int, optional
        How many blocks there is room for; all, by default.
    tier : str
        The backend.
    capability : tuple of two ints
        What its kernels are compiled for.
    dtype : str
        Of the arrays.
    made : function
        What is made of N(0, 1) for q, k, v and do.
    relative : bool
        What a function of the score adds for each distance is read from an array, of few scores, too.
    rounds : bool
        The main kernel rounds dQ.
    """

    run: Callable
    d: int = 16
    nq: int = 70
    nk: int = 200
    hq: int = 1
    hk: int = 1
    batch: int = 1
    multiprocessors: int = 1
    options: dict = {}  # noqa: RUF012
    key_blocks: int = 8
    copies: int = 1
    slots: int = 1000
    resident: int | None = None
    tier: str = "sm90"
    capability: tuple[int, int] = kernels.HOPPER
    dtype: str = "float16"
    made: Callable = lambda *arrays: arrays
    relative: bool = False
    rounds: bool = False


class Watched(Machine):
    """A machine on which no block may claim a work item before it has asked for all tiles of the last one, of which each has LOADS."""

    CLAIM, LOAD, LOADS = "atom", "cp.async.bulk.tensor.5d.shared", 6

    def __post_init__(self):
        super().__post_init__()
        self.seen = Counter()
        for i, each in enumerate(self.kernel.instructions):
            for kind in (self.CLAIM, self.LOAD):
                if each.opcode.startswith(kind):
                    self.program[i] = partial(self.note, kind, self.program[i])

    def note(self, kind, action, warp):
        block = warp.block.number
        claims, loads = self.seen[self.CLAIM, block], self.seen[self.LOAD, block]
        if kind == self.CLAIM and loads != claims * self.LOADS:
            raise Fault(f"block {block} claims item {claims + 1} after {loads} loads")
        self.seen[kind, block] += 1
        action(warp)


def backward_with_claims(*arguments, **options):
    """`kernels.backward_pass` on a `Watched` machine, of two tiles of queries for each block of keys."""
    kernels.Machine = Watched
    return backward_pass(*arguments, **options)


def paged_pass(backend, arrays, seed, multiprocessors, resident, capability, *, size, kv_lengths, missing=None, **options):
    """`kernels.forward_pass` of keys and values in pages of that `size`, with a table of 64 bits; its entry `missing` names no page."""
    q, k, v, _ = arrays
    given = paged(q, k, v, kv_lengths, size, dtype=np.int64)
    call.check_values = lambda *_: None  # the machine's arrays are NumPy's, whose values could be checked
    if missing is not None:
        given.page_table[missing] = len(given.k_pages)
    with kernels.machine(seed, multiprocessors, resident, capability=capability):
        results = forward(kernels.OnMachine(backend, "numpy"), given, **options)
    expected = reference.forward(q, given.k, given.v, kv_lengths=kv_lengths, **options, return_lse=True)
    for x, ref, unit in zip(results.values(), expected, (kernels.UNITS[q.dtype.name], 4e-6), strict=True):
        if missing is not None:
            ref[missing[0]] = np.nan
        np.testing.assert_allclose(x.astype(np.float64), ref, atol=unit, rtol=unit)


def known_pass(*arguments, **options):
    """`kernels.forward_pass` with lengths that are numbers."""
    with kernels.lengths_as_numbers():
        forward_pass(*arguments, **options)


def pass_in_sections(*arguments, **options):
    """`kernels.backward_pass` of one batch element after the other."""
    sections.MOST = 1
    backward_pass(*arguments, **options)


STEEP = {"scale": 1.0}  # scores so far apart that the largest so far grows from tile to tile
LENGTHS = {"q_lengths": np.array([60]), "kv_lengths": np.array([127])}
PROBLEMS = {
    "plain": Problem(forward_pass),
    "steep": Problem(forward_pass, nq=200, nk=500, options=STEEP),
    "steeper": Problem(forward_pass, nq=130, nk=500, options={"scale": 8.0}),
    "one key missing": Problem(forward_pass, nk=255),
    "heads": Problem(forward_pass, nk=300, hq=4, hk=2, multiprocessors=2, options={"causal": True}),  # rows of heads stay apart
    "many items": Problem(forward_pass, nk=100, hq=7),
    "long items": Problem(forward_pass, nk=500, hq=4),
    "D128": Problem(forward_pass, d=128),
    "D136": Problem(forward_pass, d=136, nk=150, hq=3),
    "D136, items": Problem(forward_pass, d=136, nk=100, hq=3),  # of two tiles, for which there is room at a time
    "causal": Problem(forward_pass, nq=200, options={"causal": True}),
    "causal, earlier queries": Problem(forward_pass, nq=130, nk=64, options={"causal": True}),  # some see nothing
    "causal, later queries": Problem(forward_pass, nq=130, nk=300, options={"causal": True, "q_start": 100}),  # two tiles hide keys
    "window": Problem(forward_pass, nq=300, nk=300, options={"window": (200, 62)}),
    "lengths": Problem(forward_pass, options=LENGTHS),
    "softcap": Problem(forward_pass, options={"softcap": 0.5}),
    "parts": Problem(forward_pass, nk=1100, multiprocessors=2),
    "gradients": Problem(backward_pass, nq=200, nk=300, multiprocessors=2),
    "gradients, long": Problem(backward_pass, nq=400, nk=300, multiprocessors=3),
    "gradients, claims": Problem(backward_with_claims, nq=200, nk=300, multiprocessors=2),
    "gradients, no room": Problem(backward_pass, nk=500, multiprocessors=2, resident=1),
    "gradients, heads": Problem(backward_pass, hq=4, hk=2, multiprocessors=2),
    "gradients, heads and a window": Problem(backward_pass, nq=500, nk=400, hq=4, hk=2, options={"window": (200, 150)}),
    "gradients, causal": Problem(backward_pass, nq=200, options={"causal": True}),
    "gradients, window": Problem(backward_pass, nq=300, nk=300, options={"window": (200, 62)}),
    "gradients, lengths": Problem(backward_pass, options=LENGTHS),
    "gradients, softcap": Problem(backward_pass, options={"softcap": 0.5}),
    "gradients, D128": Problem(backward_pass, d=128, nq=130, nk=130),
    "gradients, D136": Problem(backward_pass, d=136, nq=200, nk=130),
    "gradients, items": Problem(backward_pass, nq=100, nk=300, hq=3, hk=3, options={"causal": True}),
    "gradients, upward": Problem(  # but the last head, whose blocks go downward; whoever waits for one that comes later waits for ever
        backward_pass, nq=300, nk=200, hq=3, hk=3, multiprocessors=2, resident=1, options={"causal": True, "q_start": 0}
    ),
    "gradients, upward, more keys": Problem(backward_pass, nq=150, nk=300, hq=2, hk=2, options={"causal": True, "q_start": 100}),
    "gradients, swings": Problem(  # blocks 1, 0 downward, 2, 3 upward, 4 downward; there is room for one at a time
        backward_pass, d=128, nq=80, nk=600, hq=8, hk=1, multiprocessors=2, resident=1, options={"causal": True, "q_start": 560}
    ),
    "gradients, D136, heads": Problem(backward_pass, d=136, nq=300, nk=64, hq=2, hk=1, options={"causal": True, "q_start": 0}),
    "gradients, D136, items": Problem(backward_pass, d=136, nq=200, nk=64, hq=4, hk=4),
    "gradients, D136, parts": Problem(backward_pass, d=136, nq=130, nk=200, key_blocks=2),
}


RNG = np.random.default_rng(7)
NQ, NK = 70, 90
bias_of = lambda *shape: {"bias": RNG.standard_normal(shape).astype(np.float16)}
DROPOUT = {"dropout": 0.3, "rng": (7, 11)}
MASKED = {"mask": RNG.random((NQ, NK)) < 0.7}
TILES = {"mask": RNG.random((300, 300)) < 0.9}
TILES["mask"][:256, :128] = TILES["mask"][:64, 128:256] = False
TILES["mask"][128:256, 128:256] = True
BLOCKS = {"mask": numba_flash.BlockMask(np.array([[0, 0, 1], [1, 0, 1], [1, 1, 0]], bool), 128)}
# The first 128 queries see nothing, the others all keys of the last 44 that the band leaves them.
WINDOW_OF_BLOCKS = {"mask": numba_flash.BlockMask(np.array([[0, 0, 0], [1, 0, 1], [1, 1, 1]], bool), 128), "window": (150, 40)}
# Blocks that hold no two tiles of queries: sums of dQ are added up in order.
MANY_BLOCKS = {"mask": numba_flash.BlockMask(np.random.default_rng(3).random((4, 10)) < 0.6, (64, 128))}
SMALL = RNG.random((3, 7)) < 0.8
SMALL[0, :3] = True  # of a tile that the band cuts all blocks are visible
SMALL[1, :2] = True, False  # of one that it does not cut a part is
SMALL_BLOCKS = {"mask": numba_flash.BlockMask(SMALL, (128, 48)), "causal": True}
ODD_BLOCKS = {"mask": numba_flash.BlockMask(np.random.default_rng(9).random((3, 10)) < 0.7, (100, 33)), "causal": True}


def offset(q, k, v, do):
    return q, k + 30, v + 30, do


def units(q, k, v, do):
    """Heads in units of their own."""
    q = q * np.logspace(0, -1, q.shape[1])[:, None, None]
    return q, *(x * np.array([1, 1e-3])[:, None, None] for x in (k, v)), do


def not_a_number(q, k, v, do):
    """And numbers beyond those of float16, beside it."""
    v[0, 0, :, 5], v[0, 0, 30, 3] = 1e5 * (1 + np.abs(v[0, 0, :, 5])), np.nan
    return q, k, v, do


def far_below(q, k, v, do):
    """A row of one head, which cannot be split beside the others."""
    do[0, 1, 5] *= 2.0**-30
    return q, k, v, do


def bias_gradient(*shape):
    """Of a bias of float32."""
    return {"bias": np.random.default_rng(8).standard_normal(shape).astype(np.float32), "bias_grad": True}


# Of blocks of 128 queries, the first sees nothing, the second all keys of a tile between two others, the third none of that.
HIDDEN = {"mask": (RNG.random((300, 300)) < 0.9) & (np.arange(300) >= 128)[:, None]}
HIDDEN["mask"][128:256, 128:256], HIDDEN["mask"][256:, 128:256] = True, False
# Of two heads; and the first 128 keys are seen by none, the next 128 by the other head alone.
GAPS = {"mask": HIDDEN["mask"] & (np.arange(300) >= np.array([256, 128])[:, None, None])}
PROBLEMS |= {
    "bias": Problem(forward_pass, nk=NK + 144, options=bias_of(NQ, NK + 144)),
    "D136, bias": Problem(forward_pass, d=136, nk=150, hq=3, options=bias_of(NQ, 150)),
    "dropout": Problem(forward_pass, nk=NK, options=DROPOUT),
    "tiles of a mask": Problem(forward_pass, nq=300, nk=300, options=HIDDEN),
    "gradients, dropout": Problem(backward_pass, nk=NK, options=DROPOUT),
    "gradients, dropout, lengths": Problem(backward_pass, options=DROPOUT | LENGTHS),
    "gradients, dropout, softcap": Problem(backward_pass, nk=NK, options=DROPOUT | {"softcap": 0.5}),
    "gradients, bias": Problem(backward_pass, nk=88, options=bias_of(NQ, 88)),
    "gradients, tiles of a mask": Problem(backward_pass, nq=300, nk=300, hq=2, multiprocessors=2, options=GAPS),
}
mma = partial(Problem, forward_pass, tier="sm80", capability=(8, 0))
few = partial(mma, nq=5, nk=300, hq=3)
in_cache = partial(Problem, paged_pass, tier="sm80", capability=(8, 0), batch=2, nq=5, hq=4, hk=2)
in_pages = lambda size, *lengths, **more: {"size": size, "kv_lengths": np.array(lengths)} | more
split = partial(mma, dtype="float32")
on_wgmma = partial(Problem, forward_pass, dtype="float32")
float64 = partial(Problem, nq=64, nk=64, tier="simt", dtype="float64")
double = partial(Problem, forward_pass, d=16, nq=40, nk=100, tier="sm80", dtype="float64")
double_gradients = partial(Problem, backward_pass, d=16, tier="sm80", dtype="float64", nq=70, nk=100, multiprocessors=2)
mma_gradients = partial(Problem, backward_pass, nq=130, nk=300, multiprocessors=2, tier="sm80", capability=(9, 0))
split_gradients = partial(mma_gradients, dtype="float32")
PROBLEMS |= {
    "mma": mma(),
    "mma, steep": mma(nk=500, options=STEEP),
    "mma, one key missing": mma(nk=191),
    "mma, D128": mma(d=128, nk=150),
    "mma, D13": mma(d=13, nk=100),
    "mma, Turing": mma(nk=70, capability=(7, 5)),
    "mma, causal": mma(nk=100, hq=2, hk=2, options={"causal": True}),  # more blocks of 32 rows a warp than multiprocessors
    "mma, causal lengths": mma(options=LENGTHS | {"causal": True}),
    "mma, lengths": mma(options=LENGTHS),
    "mma, parts": mma(nq=17, nk=700, multiprocessors=8),
    "mma, bias": mma(nk=88, options=bias_of(NQ, 88)),
    "mma, mask and dropout": mma(nk=NK, options=MASKED | DROPOUT),
    "mma, tiles of a mask": mma(nq=300, nk=300, options=TILES),
    "mma, blocks": mma(nq=300, nk=300, options=BLOCKS),
    "mma, blocks that do not fit": mma(nq=300, nk=300, options=SMALL_BLOCKS),
    "few": few(nk=400, hq=6, hk=2),
    "few, parts": few(nk=900, multiprocessors=8),
    "few, D128": few(d=128, nk=100, hq=4),
    "few, causal": few(nq=16, nk=134, options={"causal": True}),  # key 128 is seen by the last query of the first block alone
    "few, options": few(nk=NK, options=bias_of(3, 5, NK) | DROPOUT | {"causal": True}),
    "pages": in_cache(nk=150, options=in_pages(16, 150, 33)),
    "pages, longer": in_cache(nk=150, options=in_pages(128, 150, 33)),
    "pages, any size": in_cache(d=72, nk=100, options=in_pages(7, 100, 33)),
    "pages, one missing": in_cache(nk=700, multiprocessors=8, options=in_pages(16, 690, 33, missing=(0, 43))),
    "split": split(),
    "split, D128": split(d=128, nk=70),
    "split, offset": split(made=offset),
    "split, softcap": split(nk=NK, made=offset, options={"softcap": 2.0}),
    "split, dropout": split(nk=NK, made=offset, options=DROPOUT),
    "split, heads": split(nk=NK, hq=4, hk=2, made=units),
    "split, a NaN": split(nk=NK, made=not_a_number),
    "split, gradients": split_gradients(nq=70, nk=100, made=offset),
    "split, gradients, a NaN": split_gradients(nq=40, nk=40, hq=2, hk=2, made=not_a_number),
    "split, bias gradient": split_gradients(nq=40, nk=40, hq=4, hk=2, made=units, options=bias_gradient(40, 40)),
    "split, bias gradient, a row far below": split_gradients(nq=40, nk=40, hq=2, hk=2, made=far_below, options=bias_gradient(40, 40)),
    "wgmma": on_wgmma(nk=300, hq=2, hk=2),
    "wgmma, blocks": Problem(forward_pass, nq=300, nk=300, batch=2, options=BLOCKS),
    "wgmma, D128": on_wgmma(d=128, nk=100),
    "wgmma, offset": on_wgmma(nq=90, nk=70, made=offset, options={"causal": True}),  # the first queries see nothing
    "wgmma, an end in a second tile": on_wgmma(nk=170, options={"kv_lengths": np.array([140])}),
    "wgmma, heads": on_wgmma(nk=NK, hq=4, hk=2, made=units),
    "wgmma, gradients": Problem(backward_pass, d=32, nq=140, nk=150, dtype="float32", made=offset),
    "float64": float64(forward_pass),
    "float64, Ampere": float64(forward_pass, capability=(8, 0)),
    "float64, gradients": float64(backward_pass),
    "double": double(),
    "double, gradients": double_gradients(),
    "mma, gradients": mma_gradients(),
    "mma, gradients, long": mma_gradients(nq=300),
    "mma, gradients, copies": mma_gradients(nq=310, nk=700, copies=2, options={"window": (0, 300), "q_start": 400}),
    "mma, gradients, Turing": mma_gradients(d=136, nq=40, nk=40, capability=(7, 5)),
    "mma, bias gradient": mma_gradients(nq=150, nk=100, options=bias_of(100) | {"bias_grad": True}),
    "mma, gradients, heads": mma_gradients(nq=70, nk=100, hq=4, hk=2),
    "mma, gradients, causal": mma_gradients(nq=200, nk=70, options={"causal": True}),
    "mma, gradients, little memory": mma_gradients(nk=100, capability=(8, 6)),
    "mma, gradients, D128": mma_gradients(d=128, nq=70, nk=100),
    "mma, gradients, D128, long": mma_gradients(d=128, nk=300),
    "mma, gradients, dropout": mma_gradients(d=72, nq=NQ, nk=NK, capability=(8, 6), options=DROPOUT),
    "mma, gradients, tiles of a mask": mma_gradients(nq=300, nk=300, options=TILES),
    "mma, gradients, blocks": mma_gradients(nq=300, nk=300, options=BLOCKS),
    "gradients, blocks": Problem(backward_pass, d=72, nq=300, nk=300, batch=2, hq=2, multiprocessors=2, options=BLOCKS),
    "gradients, blocks that do not fit": Problem(backward_pass, nq=300, nk=300, multiprocessors=2, options=ODD_BLOCKS),
    "wgmma, blocks, window": Problem(forward_pass, nq=300, nk=300, multiprocessors=2, options=WINDOW_OF_BLOCKS),
    "gradients, many blocks": Problem(backward_pass, d=72, nq=256, nk=1180, multiprocessors=3, options=MANY_BLOCKS),
    # The tile at which the first block of keys begins has nothing hidden, others have.
    "gradients, blocks, window": Problem(backward_pass, nq=384, nk=300, options={**WINDOW_OF_BLOCKS, "window": (300, 40)}),
}

DRAW = np.random.default_rng(11)
learned_bias = lambda *shape: {"bias": DRAW.standard_normal(shape).astype(np.float16), "bias_grad": True}
dbias = partial(Problem, backward_pass, nq=130, nk=200, batch=2)


def unaligned(options):
    """The same with rows of the bias that begin at no multiple of 16 bytes, which the copy engine does not bring."""
    bias = options["bias"]
    rows = np.empty((*bias.shape[:-1], bias.shape[-1] + 2), bias.dtype)[..., :-2]
    rows[...] = bias
    return options | {"bias": rows}


PROBLEMS |= {
    "bias gradient": dbias(options=unaligned(learned_bias(130, 200))),
    "bias gradient, heads": dbias(nq=40, nk=60, hq=4, hk=2, batch=1, options=learned_bias(40, 60)),
    "bias gradient, D128": dbias(d=128, nk=70, batch=1, options=learned_bias(130, 70)),
    "bias gradient, keys": dbias(nq=40, nk=400, batch=1, options=learned_bias(400)),
    "bias gradient, queries": dbias(nk=60, options=learned_bias(130, 1)),
    "bias gradient, causal": dbias(nq=1700, nk=40, batch=1, options=learned_bias(1700, 40) | {"causal": True, "q_start": -1600}),
    "bias gradient, lengths": dbias(
        options=learned_bias(130, 200) | {"q_lengths": np.array([60, 130]), "kv_lengths": np.array([127, 200])}
    ),
    "bias gradient, dropout": dbias(nq=40, nk=60, options=learned_bias(2, 1, 40, 60) | DROPOUT),
    "bias gradient, shares": dbias(nq=40, nk=60, batch=5, multiprocessors=3, options=learned_bias(40, 60)),
    "bias gradient, tiles of a mask": dbias(nq=300, nk=300, batch=1, options=learned_bias(300, 300) | HIDDEN),
}


def beyond(q, k, v, do):
    """A key whose products overflow, which the bias of `HIDES` hides."""
    k[:, :, 5] = 3e38
    return q, k, v, do


# Of one bias for all heads, far below 0, so that a score of 0 has no finite weight; a column of it hides, and a row.
HIDES = np.random.default_rng(10).standard_normal((70, 136)) - 200
HIDES[:, 5], HIDES[3, 7], HIDES[11] = -np.inf, -np.inf, -np.inf
of_a_bias = lambda *shape: {"bias": np.random.default_rng(11).standard_normal(shape).astype(np.float16), "bias_grad": True}
PROBLEMS |= {
    "mma, dq and bias gradient": mma_gradients(d=32, nq=70, nk=136, batch=4, hq=2, options=of_a_bias(70, 136)),
    "mma, dq and bias gradient, D24": mma_gradients(d=24, nq=70, nk=136, batch=4, hq=2, options=of_a_bias(70, 136)),
    "mma, dq and bias gradient, hidden": mma_gradients(
        nq=70, nk=136, batch=4, hq=2, dtype="bfloat16", made=beyond, options={"bias": HIDES.astype("bfloat16"), "bias_grad": True}
    ),
    "mma, D200": mma(d=200, nq=200, nk=300, capability=(9, 0), options=STEEP),
    "gradients, copied bias": Problem(backward_pass, nq=300, nk=200, multiprocessors=2, options=of_a_bias(300, 200) | {"bias_grad": False}),
    "gradients, bias of many queries": Problem(backward_pass, nq=300, nk=60, options=of_a_bias(300, 60) | {"bias_grad": False}),
    "gradients, copied bias, D128": Problem(backward_pass, d=128, nq=150, nk=72, options=of_a_bias(150, 72) | {"bias_grad": False}),
}
PROBLEMS |= {
    "few, six parts": few(nk=700, multiprocessors=8),
    "few, apart": few(nk=400, hq=6, hk=2, capability=kernels.HOPPER),
    "pages of 7": in_cache(nk=100, options=in_pages(7, 33, 100)),
    "few, many parts": Problem(forward_pass, nq=1, nk=700, hq=2, multiprocessors=8, tier="simt", dtype="float32"),
}
of_float32 = partial(Problem, backward_pass, nq=140, nk=100, dtype="float32", made=offset)
PROBLEMS |= {
    "wgmma, gradients, D128": of_float32(d=128, hq=2),
    "wgmma, gradients, D72, lengths": of_float32(d=72, nk=130, options=LENGTHS | {"causal": True}),
}
EVERY_OTHER = np.random.default_rng(12).standard_normal((4, 2, 140)).astype(np.float32)[..., ::2]
PROBLEMS |= {
    "mma, dq and bias gradient, dlse": mma_gradients(d=32, nq=70, nk=200, batch=4, hq=2, options=of_a_bias(70, 200) | {"dlse": EVERY_OTHER})
}
PROBLEMS["few, heads"] = few(nq=1, nk=100, hq=4, hk=2, batch=2)
PROBLEMS["few, parts, D128"] = few(d=128, nk=900, hq=2, multiprocessors=8, capability=kernels.HOPPER)
is_decode_gradient = partial(Problem, backward_pass, nq=5, nk=530, hq=3, tier="sm80", multiprocessors=3)
PROBLEMS |= {
    "few, gradients": is_decode_gradient(hq=6, hk=2, capability=(9, 0)),
    "few, gradients, short": is_decode_gradient(nk=520, hq=1, multiprocessors=8, capability=(9, 0)),  # a tile or two for a block
    "few, gradients, causal": is_decode_gradient(nq=13, hq=2, capability=(8, 0), options={"causal": True}),
    "few, gradients, window": is_decode_gradient(nq=2, nk=600, hq=4, capability=(9, 0), options={"window": (150, 2), "q_start": 300}),
    "few, gradients, lengths": is_decode_gradient(
        batch=2, capability=(9, 0), options={"q_lengths": np.array([5, 2]), "kv_lengths": np.array([530, 70])}
    ),
}
decode_lanes = partial(Problem, forward_pass, nq=1, nk=600, hq=8, tier="simt", dtype="float32", capability=(8, 0))
PROBLEMS |= {
    "lanes": decode_lanes(hq=16, hk=2, d=128, options=STEEP),
    "lanes, short": decode_lanes(nk=530, hq=4, multiprocessors=8),  # a block has a step or two
    "lanes, causal": decode_lanes(nq=3, hq=4, hk=2, d=40, options={"causal": True}),
    "lanes, window": decode_lanes(nq=2, hq=4, options={"window": (150, 2), "q_start": 300}),
    "lanes, lengths": decode_lanes(nq=2, hq=4, batch=2, options={"q_lengths": np.array([2, 1]), "kv_lengths": np.array([600, 77])}),
    "lanes, float64": decode_lanes(d=128, dtype="float64"),
}
# float32 heads whose keys all fit into shared memory; a bias that hides a column, all of a row, and some keys, or is so far below 0 that a
# score of 0 has no finite weight.
SHORT = np.random.default_rng(13).standard_normal((2, 70, 72)).astype(np.float32)
SHORT[:, :, 7], SHORT[0, 5], SHORT[:, 11, ::2] = -np.inf, -np.inf, -np.inf
short = partial(Problem, nq=70, nk=72, hq=2, tier="sm80", dtype="float32", capability=kernels.HOPPER, multiprocessors=2)
PROBLEMS |= {
    "short heads": short(forward_pass, d=32, hk=2, made=offset, options={"bias": SHORT}),
    "short heads, plain": short(forward_pass, d=12, hk=1, made=units),
    "short heads, gradients": short(backward_pass, d=32, batch=8, hq=1, options={"bias": SHORT[0] - 100, "bias_grad": True}),
}
of_blocks = partial(Problem, backward_pass, d=72, nq=300, nk=300, hq=2, hk=2, multiprocessors=2)
PROBLEMS |= {
    "gradients, blocks, sections": of_blocks(hq=4, hk=2, slots=3, options=BLOCKS),
    "gradients, blocks, lengths": of_blocks(
        batch=2, slots=4, options=BLOCKS | {"q_lengths": np.array([290, 130]), "kv_lengths": np.array([170, 290])}
    ),
    "gradients, blocks, D128": of_blocks(d=128, hk=1, options=WINDOW_OF_BLOCKS),
}
OF_ALL = np.random.default_rng(13).standard_normal((2, 70, 421)).astype(np.float16)
HIDES_SOME = np.where(np.random.default_rng(14).random((2, 70, 136)) < 0.2, -np.inf, OF_ALL[..., :136])
HIDES_SOME[..., 5] = -np.inf
kept = partial(Problem, forward_pass, d=32, nq=70, hq=2, batch=8, multiprocessors=3)
PROBLEMS |= {
    "kept bias": kept(nk=250, options={"bias": OF_ALL[..., :250]}),
    "kept bias of 16 bits": kept(nk=421, hq=1, options={"bias": OF_ALL[:1]}),
    "kept bias, hidden": kept(nk=136, dtype="bfloat16", made=beyond, options={"bias": HIDES_SOME.astype("bfloat16")}),
}
EVERY_OTHER_OF_8 = np.random.default_rng(15).standard_normal((8, 1, 140)).astype(np.float32)[..., ::2]
LONG_BIAS = np.random.default_rng(16).standard_normal((2, 150, 136)).astype(np.float16)
kept_gradients = partial(Problem, backward_pass, d=32, nq=70, nk=136, hk=1, batch=8, multiprocessors=2)
PROBLEMS |= {
    "kept bias, gradients": kept_gradients(hq=2, hk=2, nq=150, options={"bias": LONG_BIAS, "bias_grad": True}),
    "kept bias, hidden, gradients": kept_gradients(
        dtype="bfloat16", made=beyond, options={"bias": HIDES.astype("bfloat16"), "bias_grad": True, "dlse": EVERY_OTHER_OF_8}
    ),
}
# Of float64: columns that a mask hides are whole tiles; a bias hides a row and a key of another.
OF_DOUBLE = np.random.default_rng(16).standard_normal((2, 40, 100))
OF_DOUBLE[:, 3], OF_DOUBLE[1, 5, 7] = -np.inf, -np.inf
SEEN = np.random.default_rng(17).random((40, 100)) < 0.7
SEEN[:, 32:64] = SEEN[9] = False
CHANGED = DROPOUT | {"bias": OF_DOUBLE, "mask": SEEN, "softcap": 0.7, "causal": True, "q_start": 60}
# Queries 64 to 127 see nothing: no block of keys adds to their dQ.
FINE_BLOCKS = {"mask": numba_flash.BlockMask(np.array([[1, 0, 1, 1], [0, 1, 0, 1], [0] * 4, [0] * 4, [1, 1, 0, 0]], bool), 32)}
double_options = partial(double, hq=2, capability=kernels.HOPPER)
double_gradients_options = partial(double_gradients, nq=40, hq=2, capability=kernels.HOPPER)
PROBLEMS |= {
    "double, everything": double_options(options=CHANGED),
    "double, mask": double_options(options={"mask": SEEN}),
    "double, dropout": double_options(options=DROPOUT | {"kv_lengths": np.array([77]), "bias": OF_DOUBLE[0].astype(np.float32)}),
    "double, gradients, everything": double_gradients_options(options=CHANGED | {"bias_grad": True}),
    "double, gradients, D72": double_gradients_options(d=72, options=CHANGED),
    "double, gradients, blocks": double_gradients_options(nq=130, options=FINE_BLOCKS),
    "double, bias gradient, queries": double_gradients_options(options={"bias": OF_DOUBLE[:, :, :1], "bias_grad": True}),
    "double, bias gradient, keys": double_gradients_options(
        batch=3, capability=(8, 0), options={"bias": OF_DOUBLE[:1, 4:5], "bias_grad": True}
    ),
}


def run(problem: Problem, seed: int) -> None:
    """A problem, in the order of that seed."""
    p = problem
    drawn = random_inputs(batch=(p.batch,), hq=p.hq, hk=p.hk, nq=p.nq, nk=p.nk, d=p.d, dtype=p.dtype)
    arrays = [x.astype(p.dtype) for x in p.made(*drawn)]
    for name, (first, *others) in {"q_lengths": (0, 3), "kv_lengths": (1, 2)}.items():
        for x in [arrays[i] for i in (first, *others)] if name in p.options else ():
            for b, length in enumerate(p.options[name]):
                x[b, :, length:] = np.nan
    prepare_backward_sm80.copies_of_sums = lambda *problem: p.copies
    prepare_temporaries.WORKSPACE, prepare_temporaries.MOST_WORKSPACE, prepare_temporaries.FEWEST_BLOCKS = 0, 0, p.key_blocks
    prepare_relative.FEWEST = 0 if p.relative else prepare_relative.FEWEST
    if p.rounds:
        prepare_backward.MOST_ITEMS_EARLY, prepare_dq_order.rounds = 0, lambda *_: True
    prepare_block_sparse.WORKSPACE = p.slots * DQ_TILE.ds_bytes
    p.run(p.tier, arrays, seed, p.multiprocessors, p.resident, p.capability, **p.options)


# ---- texts of kernels


def kept_in(directory: Path):
    """`kernels.ptx`, of which every text is compiled once for all processes whose package makes it of the same sources."""

    @cache
    def ptx(builder, config, capability):
        file = directory / compile.cache_key(builder, config, capability)
        if not file.is_file():
            made = file.with_suffix(f".{os.getpid()}")
            made.write_text(compiler.intermediate(builder, config, capability, ptx=True))
            made.replace(file)
        return file.read_text()

    return ptx


def trace(name: str) -> int:
    """Print a hash of what a problem depends on, which paper tells; of all sources, if it does not come to its end there."""
    with evidence.traced(paper=True) as found:
        try:
            run(PROBLEMS[name], 0)
        except (Exception, evidence.Enough) as error:
            found.note(type(error).__name__, evidence.all_sources())
    keys = [evidence.kernel_key(each) for each in found.kernels]
    print(hashlib.sha256(repr((found.events, keys)).encode()).hexdigest())
    return 0


def main(name: str, directory: str, orders: int) -> int:
    gc.disable()
    kernels.ptx = kept_in(Path(directory))
    for seed in range(orders):
        try:
            run(PROBLEMS[name], seed)
        except (Fault, AssertionError) as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return CAUGHT
    return 0


PROBLEMS |= {
    "copied bias": Problem(forward_pass, nq=300, nk=424, multiprocessors=2, options={"bias": of_a_bias(300, 424)["bias"]}),
    "copied mask": Problem(forward_pass, nq=150, nk=560, options={"mask": np.random.default_rng(13).random((150, 560)) < 0.7}),
    "alibi": Problem(forward_pass, nq=150, nk=300, hq=2, hk=1, options={"score_mod": numba_flash.alibi([0.5, 0.25])}),
}
PROBLEMS |= {
    "mma, gradients, wide": mma_gradients(d=136, nq=200, nk=200, hq=4, hk=2, options={"causal": True}),
    "mma, gradients, wide, window": mma_gradients(d=136, nq=100, nk=330, options={"window": (40, 30)}),
}
PROBLEMS["few, lengths"] = Problem(
    known_pass, nq=2, hq=4, nk=200, batch=3, tier="sm80", capability=(8, 0), options={"kv_lengths": np.array([200, 0, 70])}
)


rows_of_bias = partial(Problem, backward_pass, hq=2, nq=150, nk=200, multiprocessors=2)
PROBLEMS |= {
    "bias gradient, rows": rows_of_bias(d=64, batch=4, options=learned_bias(1, 2, 150, 200)),
    "bias gradient, rows of each": rows_of_bias(batch=2, options=learned_bias(2, 2, 150, 200)),
    "bias gradient, rows, heads": rows_of_bias(batch=2, hq=4, hk=2, nq=80, nk=80, options=learned_bias(1, 4, 80, 80)),
    "bias gradient, rows, hidden": rows_of_bias(
        nq=70,
        nk=136,
        hq=1,
        batch=2,
        dtype="bfloat16",
        made=beyond,
        options={"bias": HIDES[None, None].astype("bfloat16"), "bias_grad": True},
    ),
}
rounded = partial(Problem, backward_pass, rounds=True)
PROBLEMS |= {
    "gradients, rounded": rounded(d=64, nq=200, nk=300, hq=3, hk=3, multiprocessors=2),
    "gradients, rounded, D128": rounded(
        d=128, nq=130, nk=200, hq=2, hk=2, batch=2, multiprocessors=3, options={"causal": True, "q_start": 70}
    ),
    "gradients, rounded, few": rounded(nq=60, nk=900, hq=2, hk=2, multiprocessors=5),  # two tiles of dQ, and more blocks
    "gradients, rounded, upward": rounded(d=72, nq=300, nk=200, hq=2, hk=2, resident=1, options={"causal": True, "q_start": 0}),
}
OF_DISTANCES = {"score_mod": numba_flash.relative_position(np.random.default_rng(14).standard_normal((2, 801)))}
PROBLEMS |= {
    "relative": Problem(forward_pass, nq=200, nk=400, hq=2, options=OF_DISTANCES, relative=True),
    "gradients, relative": Problem(backward_pass, nq=200, nk=300, hq=2, options=OF_DISTANCES, relative=True),
    "mma, relative": mma(nk=300, hq=2, options=OF_DISTANCES, relative=True),
    "mma, softcap": mma(nk=300, dtype="bfloat16", options={"softcap": 2.0, "scale": 0.5}),
    "mma, softcap, hidden": mma(
        nq=100,
        nk=150,
        batch=2,
        dtype="bfloat16",
        options={"softcap": 2.0, "scale": 0.5, "causal": True, "q_start": -30, "kv_lengths": np.array([150, 0])},
    ),
    "mma, gradients, softcap": mma_gradients(dtype="bfloat16", options={"softcap": 2.0, "scale": 0.5}),
    "softcap of bfloat16": Problem(forward_pass, dtype="bfloat16", options={"softcap": 2.0, "scale": 0.5}),
}


RATIO = 2 * np.log(2.0)


def at_the_ends(*largest):
    """Weights near the ends of float16: of every other row all but one are below 2**-25 of that, or one is as far above the others, which
    come before or after, as a shift may be exceeded. Columns of v are 0 where the first row sees most.
    """

    def made(q, k, v, do):
        q, k, v = np.zeros_like(q), np.zeros_like(k), np.full_like(v, 60000)
        q[..., 0::2, 0] = q[..., 1::2, 1] = q[..., 1::2, 2] = 1
        k[..., 0, 0], k[..., k.shape[-2] // 2, 1 : 1 + len(largest)] = 17.4 / RATIO, largest
        v[..., 0, :8] = 0
        return q, k, v, do

    return made


def tiny_weights(q, k, v, do):
    """Below 2**-25 of half of the keys in rows that are even, of the others in odd ones; what they weigh adds up where the largest weights
    cancel.
    """
    q, k, do = np.zeros_like(q), np.zeros_like(k), np.full_like(do, 60000)
    q[..., 0], q[..., 0::2, 1], q[..., 1::2, 1] = 1, 1, -1
    k[..., 0, 0], k[..., 1:, 0], k[..., 1::2, 1], k[..., 2::2, 1] = 17.4, -10, 10, -10
    do[..., 1::2, :] *= -1
    return q, k, np.zeros_like(v), do


def large_scores(q, k, v, do):
    """Products with a scale that float32 rounds to multiples of 16, which are powers of two of weights."""
    q, k = np.zeros_like(q), np.full_like(k, 6000)
    q[...] = 6000 + 4 * np.arange(q.shape[-2])[:, None]
    return q, k, v, do


def alike(q, k, v, do):
    """Scores of 0."""
    return 0 * q, k, v, do


def by_batch(score, batch, head, i, j):
    return score * (1 + 0.5 * batch)


def slope_by_batch(score, batch, head, i, j):
    return 1 + 0.5 * batch


AT_THE_END, LAZIER = at_the_ends(1, -1.5 * 2.0**-14), at_the_ends(1.9)  # 2**1.9998 is the greatest P, and 2**3.8
OF_RATIO = {"scale": RATIO}
NO_BIAS = lambda *shape: OF_RATIO | {"bias": np.zeros(shape, np.float16)}
FAR = np.full((NQ, NK), -1.2e12, np.float32)
FAR[:32, ::2], FAR[:32, 1::2] = -1.1e6, -1.1e6 - 2
PROBLEMS |= {
    "ends of float16": Problem(forward_pass, nk=500, made=AT_THE_END, options=OF_RATIO),
    "ends of float16, bias": Problem(forward_pass, nk=500, made=LAZIER, options=NO_BIAS(NQ, 500)),
    "ends of float16, kept bias": kept(nk=421, hq=1, made=LAZIER, options=NO_BIAS(1, 70, 421)),
    "ends of float16, mma": mma(nk=500, made=AT_THE_END, options=OF_RATIO),
    "ends of float16, mma, bias": mma(nk=500, made=LAZIER, options=NO_BIAS(NQ, 500)),
    "ends of float16, few": few(made=AT_THE_END, options=OF_RATIO),
    "ends of float16, few, bias": few(made=LAZIER, options=NO_BIAS(5, 300)),
    "large scores": Problem(forward_pass, made=large_scores),
    "far bias": Problem(forward_pass, nk=NK, made=alike, options={"bias": FAR}),
    "gradients, tiny weights": Problem(backward_pass, nq=130, nk=129, made=tiny_weights, options=STEEP),
}
in_sections = partial(Problem, pass_in_sections, nk=NK, batch=3)
PROBLEMS |= {
    "gradients, dropout, sections": in_sections(options=DROPOUT),
    "gradients, score_mod, sections": in_sections(options={"score_mod": by_batch, "score_mod_grad": slope_by_batch}),
}
