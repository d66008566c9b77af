"""What the contract says, of every tensor-core kernel, without a GPU: the public functions against the oracle on the machine, with small
sizes around tiles, each in several orders of warps and copies, which must give the same bits.

A group's problems share their kernels, so that each is compiled once.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from support import SIMULATED, random_inputs, same_bits

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from backend import SM90, machine
from naive import check, run

from numba_flash import reference
from numba_flash.cuda.sm90 import prepare_backward

pytestmark = [pytest.mark.machine, pytest.mark.full]


class Shape(NamedTuple):
    """Of a problem: (batch, query heads, key heads), queries, keys, and what else is chosen."""

    heads: tuple[int, int, int]
    nq: int
    nk: int
    more: dict | None = None


class Group(NamedTuple):
    """Problems of the same kernels.

    Attributes
    ----------
    dtype : str
        Of q.
    d, dv : int
        Head dimensions.
    options : dict
        What the kernels are compiled for.
    shapes : tuple of Shape
        The problems.
    """

    dtype: str
    d: int
    dv: int
    options: dict
    shapes: tuple[Shape, ...]


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
CAUSAL_LENGTHS = (LENGTHS[0]._replace(more={**LENGTHS[0].more, "causal": True}),)
SOFT = (Shape(PAIR, 100, 150),)

GROUPS = {
    "float16 64": Group("float16", 64, 64, {}, AROUND),
    "bfloat16 64 causal": Group("bfloat16", 64, 64, {}, BANDS),
    "float16 64 window": Group("float16", 64, 64, {}, WINDOWS),
    "bfloat16 64 causal lengths": Group("bfloat16", 64, 64, {}, CAUSAL_LENGTHS),
    "float16 64 causal softcap": Group("float16", 64, 64, {"softcap": 2.0, "causal": True}, SOFT),
    "bfloat16 128": Group("bfloat16", 128, 128, {}, AROUND[2:3]),
    "float16 128 causal": Group("float16", 128, 128, {}, BANDS[:1]),
    "bfloat16 128 window": Group("bfloat16", 128, 128, {}, WINDOWS[:1]),
    "float16 128 lengths": Group("float16", 128, 128, {}, LENGTHS[:1]),
    "bfloat16 128 softcap": Group("bfloat16", 128, 128, {"softcap": 5.0}, SOFT),
    "float16 72, 40": Group("float16", 72, 40, {}, AROUND[:1]),
    "bfloat16 192, 128": Group("bfloat16", 192, 128, {}, AROUND[:1]),
    "float16 256 causal": Group("float16", 256, 256, {}, BANDS[:1]),
    "bfloat16 256 lengths": Group("bfloat16", 256, 256, {}, LENGTHS[1:]),
}


def inputs_of(group: Group, shape: Shape):
    """q, k, v, do; beyond the lengths there is NaN."""
    batch, hq, hk = shape.heads
    q, k, v, do = random_inputs(batch=(batch,), hq=hq, hk=hk, nq=shape.nq, nk=shape.nk, d=group.d, dv=group.dv, dtype=group.dtype)
    if shape.more is not None and "q_lengths" in shape.more:
        for b, (queries, keys) in enumerate(zip(shape.more["q_lengths"], shape.more["kv_lengths"], strict=True)):
            q[b, :, queries:] = do[b, :, queries:] = np.nan
            k[b, :, keys:] = v[b, :, keys:] = np.nan
    return q, k, v, do


@pytest.mark.parametrize("name", GROUPS)
def test_forward_and_backward(name):
    group = GROUPS[name]
    for number, shape in enumerate(group.shapes):
        options = group.options | (shape.more or {})
        arrays = inputs_of(group, shape)
        try:
            with machine(seed=number):
                results = check(SM90, *arrays, **options)
            if number == 0:
                with machine(seed=number + 100, multiprocessors=3):
                    again = run(SM90, *arrays, **options)
                for key in ("o", "lse", "dk", "dv", "dq"):
                    assert same_bits(results[key], again[key]), f"{key} depends on the order of warps, copies or blocks"
        except Exception as error:
            error.add_note(f"of {shape}")
            raise


def test_parts_of_the_keys_are_combined():
    """Few queries on a GPU with many multiprocessors: several blocks share the keys of one."""
    q, k, v, do = random_inputs(batch=(1,), hq=2, hk=1, nq=3, nk=1200, d=128, dtype="float16")
    with machine(multiprocessors=8):
        check(SM90, q, k, v, do)
        check(SM90, q, k, v, do, kv_lengths=np.array([900]))


def test_gradients_of_lse_in_any_order():
    """Sums of dq that are added as they come are right, if not repeatable."""
    q, k, v, do = random_inputs(batch=(1,), hq=2, hk=1, nq=130, nk=300, d=64, dtype="bfloat16")
    dlse = np.random.default_rng(5).standard_normal((1, 2, 130)).astype(np.float32)
    with machine(seed=3):
        o, lse = SM90.forward(q, k, v, return_lse=True, causal=True)
        for deterministic in (False, True):
            gradients = SM90.backward(do, q, k, v, o, lse, causal=True, dlse=dlse, deterministic=deterministic)
            for x, ref in zip(gradients, reference.backward(do, q, k, v, dlse=dlse, causal=True), strict=True):
                np.testing.assert_allclose(x.astype(np.float64), ref, atol=0.02 * np.abs(ref).max(), rtol=0.05)


@pytest.mark.parametrize("d", [64, 256])
def test_packed_sequences(d):
    """Sequences of any length, one of them empty, beside each other; each as if it were alone."""
    q_offsets, k_offsets = np.array([0, 70, 70, 199, 230]), np.array([0, 50, 120, 250, 251])
    rng = np.random.default_rng(2)
    draw = lambda n, heads: rng.standard_normal((n, heads, d)).astype(np.float16)
    q, do, k, v = draw(230, 2), draw(230, 2), draw(251, 1), draw(251, 1)
    with machine(seed=1):
        o, lse = SM90.forward_packed(q, k, v, q_offsets, k_offsets, return_lse=True, causal=True)
        gradients = SM90.backward_packed(do, q, k, v, o, lse, q_offsets, k_offsets, causal=True)
    for i, j in zip(pairwise(q_offsets), pairwise(k_offsets), strict=True):
        inputs = [x[slice(*part)].swapaxes(0, 1) for x, part in ((do, i), (q, i), (k, j), (v, j))]
        ref_o, ref_lse = reference.forward(*inputs[1:], causal=True)
        ref = (ref_o, *reference.backward(*inputs, causal=True))
        ours = [x[slice(*part)].swapaxes(0, 1) for x, part in zip((o, *gradients), (i, i, j, j), strict=True)]
        for x, expected in zip(ours, ref, strict=True):
            np.testing.assert_allclose(x.astype(np.float64), expected, atol=6e-3 * max(1, np.abs(expected).max(initial=0)), rtol=6e-3)
        np.testing.assert_allclose(lse[:, slice(*i)], ref_lse, atol=1e-5)


def test_ds_of_some_keys_at_a_time(monkeypatch):
    """Where memory for dS^T is short, it is made for some of the keys, in several launches, and dq is kept between them."""
    for name, value in {"FEWEST_BLOCKS": 1, "WORKSPACE": 0, "MOST_WORKSPACE": 0}.items():
        monkeypatch.setattr(prepare_backward, name, value)
    with machine():
        check(SM90, *random_inputs(batch=(1,), hq=2, hk=1, nq=140, nk=300, d=256, dtype="bfloat16"), causal=True)


def test_blocks_for_which_there_is_no_room():
    """Turns at dq are claimed by blocks at work: a grid that fits in parts alone, one block at a time, still ends, with the same bits."""
    arrays = random_inputs(batch=(1,), hq=1, hk=1, nq=130, nk=400, d=64, dtype="float16")
    results = []
    for resident in (None, 1):
        with machine(multiprocessors=4, resident=resident):
            results.append(run(SM90, *arrays))
    for name, x in results[0].items():
        assert all(same_bits(x, other[name]) for other in results[1:]), name
