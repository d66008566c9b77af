"""The machine on kernels for any GPU, under options that bring instructions of their own; and that it knows what the compiler makes."""

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator compiles nothing", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")

from kernels import on_machine, ptx
from machine import Machine
from support import DTYPES, random_inputs

import numba_flash
from numba_flash import reference
from numba_flash.arrays import Layout
from numba_flash.bench.cases import Cell
from numba_flash.cuda.launch import Gpu
from numba_flash.plan import tier
from numba_flash.problem import BackwardInputs, BackwardResults, ForwardInputs, ForwardResults, bind
from numba_flash.warmup import kernels_of

UNIT = {"float32": 2e-6, "float64": 1e-14, "float16": 2e-3, "bfloat16": 1.6e-2}
NQ, NK, D = 20, 37, 8
RNG = np.random.default_rng(0)
OPTIONS = {
    "dropout": lambda kind: {"dropout": 0.3, "rng": (7, 11)},
    "bias and its gradient": lambda kind: {"bias": RNG.standard_normal((1, 2, NQ, NK)).astype(kind), "causal": True},
    "mask": lambda kind: {"mask": RNG.random((1, 2, NQ, NK)) < 0.7},
    "alibi": lambda kind: {"score_mod": numba_flash.alibi(np.array([0.5, 0.25], np.float32)), "softcap": 4.0},
}


def paper(arrays):
    return type(arrays)(*(None if x is None else Layout.of(x) for x in arrays))


def nan(x, dtype=None):
    return np.full(x.shape, np.nan, dtype or x.dtype)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("dropout", "float64"), ("bias and its gradient", "float16"), ("mask", "float32"), ("alibi", "bfloat16")],
)
def test_options_compute_what_they_mean(name, dtype):
    """Forward and backward, within what the dtype allows of the oracle."""
    options = OPTIONS[name](DTYPES[dtype])
    q, k, v, do = random_inputs(batch=(1,), hq=2, hk=1, nq=NQ, nk=NK, d=D, dtype=dtype)
    problem, gpu, unit = bind(q, k, v, **options), Gpu(0, (8, 0), 2), UNIT[dtype]
    arrays = {each: options[each] for each in ("bias", "mask") if each in options}
    inputs, results = ForwardInputs(q, k, v, **arrays), ForwardResults(nan(do), nan(do[..., 0], problem.lse_dtype))
    on_machine(tier("simt").prepare_forward(problem, paper(inputs), paper(results), gpu=gpu), inputs, results, 0)
    o, lse = reference.forward(q, k, v, **options)
    np.testing.assert_allclose(results.o.astype(np.float64), o, atol=unit, rtol=unit)
    np.testing.assert_allclose(results.lse, lse, atol=1e-5 if dtype != "float64" else unit, rtol=1e-5 if dtype != "float64" else unit)
    gradients = BackwardResults(nan(q), nan(k), nan(v), nan(options["bias"]) if "bias" in options else None)
    inputs = BackwardInputs(do, q, k, v, o.astype(DTYPES[dtype]), lse.astype(problem.lse_dtype), **arrays)
    on_machine(tier("simt").prepare_backward(problem, paper(inputs), paper(gradients), gpu=gpu), inputs, gradients, 1)
    wanted = reference.backward(do, q, k, v, bias_grad="bias" in options, **options)
    for x, ref in zip(gradients, wanted, strict=False):
        np.testing.assert_allclose(x.astype(np.float64), ref, atol=8 * unit * max(1, np.abs(ref).max()), rtol=8 * unit)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "capability"), [("float16", (9, 0)), ("float64", (8, 0))])
def test_every_instruction_of_the_kernels_of_a_grid_is_known(dtype, capability):
    """Forward and backward, at a length where a forward pass splits keys too."""
    gpu = Gpu(0, capability, 132)
    cells = [Cell(direction, "causal", dtype, 1, 1, 1, length, 64) for direction, length in (("backward", 512), ("forward", 4096))]
    for builder, config in dict.fromkeys(kernel for cell in cells for kernel in kernels_of(cell, None, gpu)):
        machine = Machine(ptx(builder, config, capability))
        assert len(machine.program) == len(machine.kernel.instructions) > 50
