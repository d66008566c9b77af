"""Lengths that come as arguments of a kernel, which the machine executes."""

import numpy as np
import pytest
from support import SIMULATED, random_inputs

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

import compiled
from ptx_machine.problems.kernels import HOPPER, backward_pass, forward_pass, lengths_as_numbers, machine

import numba_flash
from numba_flash import call
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.options import AS_NUMBERS, Options
from numba_flash.arguments.problem import Problem
from numba_flash.cuda.runtime import compile
from numba_flash.cuda.runtime.launch import Gpu
from numba_flash.cuda.sm90.config import ForwardConfig
from numba_flash.cuda.sm90.forward import prepare_forward
from numba_flash.cuda.sm90.forward.forward_tiles import forward_tile
from numba_flash.cuda.work.prepare_lengths import MOST, launch_of

pytestmark = pytest.mark.machine

KINDS = {
    "of keys": (None, ("int64", 64)),
    "of queries": (("int32", 5), None),
    "of both": (("uint8", 30), ("int32", 34)),
    "one": (None, ("uint64", 1)),
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_all_lengths_arrive_where_they_belong(kinds):
    room = [kind and np.full(kind[1] + 1, 99, kind[0]) for kind in kinds]
    arrays = [x if x is None else x[:-1] for x in room]
    words = np.random.default_rng(0).integers(0, 99, MOST)
    with machine():
        launch_of([x if x is None else Layout.of(x) for x in arrays], Gpu(0, HOPPER, 2))(*arrays, numbers=words.tobytes())
    first = 0
    for x in room:
        if x is not None:
            np.testing.assert_array_equal(x, [*words[first : first + x.size - 1], 99])
            first += x.size - 1


@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (12, 0)])
def test_it_compiles_to_selections_in_registers(capability):
    kernel = compiled.Kernel("work.lengths.build", ("int32", "int64", MOST), capability)
    text = compiled.ptx(kernel)
    assert ".local" not in text
    assert text.count("bra") <= 4
    assert compiled.linked(kernel).cubin


SHAPES = {"blocks": (130, 4, 4, 2), "parts": (70, 2, 2, 16), "heads as rows": (17, 8, 2, 2)}


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_for_hopper_take_lengths_of_keys_as_numbers(name, monkeypatch):
    monkeypatch.setattr(prepare_forward, "FEW_ITEMS", 1000)
    nq, hq, hk, multiprocessors = SHAPES[name]
    arrays = random_inputs(batch=(3,), hq=hq, hk=hk, nq=nq, nk=2200 if name == "parts" else 300, d=64, dtype="bfloat16")
    lengths = np.array([arrays[1].shape[-2], 0, 77], np.int16)
    with lengths_as_numbers():
        forward_pass("sm90", arrays, 0, multiprocessors, causal=True, kv_lengths=lengths)


IMPOSSIBLE = {  # the backend, the dtype, the lengths that it gets
    "sm90": ("sm90", "float16", {"kv_lengths": np.array([60, 71, 0])}),
    "sm90, queries": ("sm90", "bfloat16", {"q_lengths": np.array([40, -1, 9]), "kv_lengths": np.array([60, 7, 70])}),
    "sm80": ("sm80", "float16", {"kv_lengths": np.array([60, 71, 70])}),
    "sm80, float64": ("sm80", "float64", {"q_lengths": np.array([40, 41, 9])}),
    "simt": ("simt", "float32", {"kv_lengths": np.array([60, -1, 70]), "causal": True}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_lengths_on_a_gpu_give_nan(name, monkeypatch):
    """For their sequence alone; and for the gradient of a bias that others share with it, the first and the last of them, too."""
    monkeypatch.setattr(call, "check_values", lambda *_: None)  # the machine's arrays are NumPy's, whose values could be checked
    backend, dtype, lengths = IMPOSSIBLE[name]
    q, k, v, do = random_inputs(batch=(3,), hq=2, hk=1, nq=40, nk=70, d=16, dtype=dtype)
    bias = np.zeros((2, 40, 70), q.dtype)
    with machine(capability=HOPPER):
        o, lse = numba_flash.forward(q, k, v, return_lse=True, backend=backend, **lengths)
        gradients = numba_flash.backward(do, q, k, v, o, lse, bias=bias, bias_grad=True, backend=backend, **lengths)
    for x in (o, lse, *gradients[:3]):
        x = x.astype(np.float64)
        assert np.isnan(x[1]).all()
        assert not np.isnan(x[[0, 2]]).any()
    assert np.isnan(gradients[3].astype(np.float64)).all()


@pytest.mark.full
@pytest.mark.parametrize("backend", ["sm90", "sm80"])
def test_queries_beyond_an_end_in_the_middle_of_a_later_tile_reach_no_gradient(backend):
    arrays = random_inputs(batch=(1,), hq=1, hk=1, nq=200, nk=90, d=16, dtype="float16")
    lengths = {"q_lengths": np.array([150]), "kv_lengths": np.array([70])}
    for x, n in zip(arrays, (150, 70, 70, 150), strict=True):
        x[..., n:, :] = np.nan
    backward_pass(backend, arrays, 0, **lengths)


@pytest.mark.full
def test_a_kernel_for_hopper_has_registers_for_lengths_that_are_numbers():
    """None goes to memory, as none does where lengths are in an array."""
    used = []
    for kv_lengths in ("int32", AS_NUMBERS):
        options = Options(kv_lengths=kv_lengths, follows=True)
        tile = forward_tile(Problem((1, 3), 8, 8, 4096, 4096, 128, 128, "bfloat16", 1.0, -4096, 0, options, "float32"))
        config = ForwardConfig("bfloat16", 128, 128, False, "above", "map", options.structure, tile)
        kernel = compiled.Kernel("sm90.forward.forward.build", (config,))
        used.append(compile.resources(compiled.linked(kernel).log))
    assert [each["spill_bytes"] for each in used] == [0, 0]
