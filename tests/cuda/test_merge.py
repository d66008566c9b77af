"""The kernel behind `merge` on a GPU: what NumPy's `merge` computes, in any layout and dtype, also in the place of its first part."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
from support import DTYPES, SIMULATED, named, random_inputs

import numba_flash
from numba_flash.cuda.passes import prepare_merge
from numba_flash.cuda.passes.prepare_merge import Parts
from numba_flash.cuda.runtime import launch
from numba_flash.merge import merge_into

CASES = {
    "float32": ((2, 1, 3, 7, 5), "float32", "float32", "float32"),
    "rows of a block and one": ((9, 40), "float32", "float32", "float32"),
    "halves": ((3, 5, 33), "float16", "bfloat16", "float32"),
    "double": ((2, 3, 4), "float32", "float64", "float64"),
    "one row": ((4,), "float32", "float32", "float32"),
    "nothing": ((2, 0, 4), "float32", "float32", "float32"),
}


def parts_of(shape, of_o1, of_o2, dtype):
    """Two parts, with rows that saw nothing in one, the other and both, and NaN in o where they did."""
    rng = np.random.default_rng(0)
    o1, o2 = (rng.standard_normal(shape).astype(DTYPES[x]) for x in (of_o1, of_o2))
    lse1, lse2 = (np.asarray(10 * rng.standard_normal(shape[:-1])).astype(dtype) for _ in range(2))
    for o, lse, rows in ((o1, lse1, rng.random(shape[:-1]) < 0.3), (o2, lse2, rng.random(shape[:-1]) < 0.3)):
        lse[rows], o[rows] = -np.inf, np.nan
    return o1, lse1, o2, lse2


@pytest.mark.parametrize("case", [pytest.param(x, marks=pytest.mark.simulator(full=x not in ("float32", "nothing"))) for x in CASES])
@pytest.mark.skipif(not SIMULATED, reason="runs in the simulator")
def test_the_kernel_is_what_numpy_computes(case):
    shape, *dtypes = CASES[case]
    parts = parts_of(shape, *dtypes)
    expected = numba_flash.merge(*parts)
    room = np.full(shape, np.nan, dtypes[2]), np.full(shape[:-1], np.nan, dtypes[2])
    prepare_merge.merge(Parts(*parts, *room))
    tolerance = 1e-14 if dtypes[2] == "float64" else 1e-6
    for x, y in zip(room, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.simulator(full=True)
@pytest.mark.skipif(not SIMULATED, reason="runs in the simulator")
def test_the_result_may_lie_in_the_place_of_the_first_part():
    """In some rows of a larger array, with heads last, as those of a sequence that is spread."""
    o1, lse1, o2, lse2 = parts_of((2, 3, 10, 6), "float32", "float32", "float32")
    whole, sums = o1.swapaxes(1, 2).copy().swapaxes(1, 2), lse1.copy()
    rows = slice(3, 9)
    expected = numba_flash.merge(o1[..., rows, :], lse1[..., rows], o2[..., rows, :], lse2[..., rows])
    here = whole[..., rows, :], sums[..., rows]
    prepare_merge.merge(Parts(*here, o2[..., rows, :], lse2[..., rows], *here))
    for x, y in zip(here, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(whole[..., 9:, :], o1[..., 9:, :])
    np.testing.assert_array_equal(sums[..., :3], lse1[..., :3])


@pytest.mark.skipif(not SIMULATED, reason="runs in the simulator")
@pytest.mark.parametrize(
    "pair",
    [
        *(pytest.param(x, marks=pytest.mark.simulator) for x in ((3, 3), (-80, 90), (90, -80), (0, -np.inf))),
        *(pytest.param(x, marks=pytest.mark.simulator(full=True)) for x in ((np.inf, np.inf), (np.inf, 0), (np.nan, 0), (0, np.nan))),
    ],
)
def test_the_sum_of_two_weights_is_that_of_numpy(pair):
    lse1, lse2 = (np.array([x], np.float32) for x in pair)
    o, room = np.ones((1, 2), np.float32), (np.empty((1, 2), np.float32), np.empty(1, np.float32))
    prepare_merge.merge(Parts(o, lse1, 2 * o, lse2, *room))
    with np.errstate(invalid="ignore"):
        expected = numba_flash.merge(o, lse1, 2 * o, lse2)
    for x, y in zip(room, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


COMPILED = (
    ("float32", "float32", "float32", "float32", "float32"),
    ("float32", "float16", "float32", "bfloat16", "float32"),
    ("float64", "float64", "float64", "float32", "float64"),
)


@pytest.mark.skipif(SIMULATED, reason="the CUDA simulator compiles nothing")
@pytest.mark.parametrize("capability", [(7, 5), (9, 0), (12, 0)])
@pytest.mark.parametrize("dtypes", named(COMPILED, ["float32 float32 float32 float32 float32"], " ".join))
def test_it_compiles_to_registers_alone(dtypes, capability):
    pytest.importorskip("numba_cuda", reason="compiling kernels needs numba-cuda")
    pytest.importorskip("cuda.core", reason="linking kernels needs cuda-core")
    import compiled

    kernel = compiled.Kernel("passes.merge.build", (*dtypes, prepare_merge.ROWS), capability)
    text = compiled.ptx(kernel)
    assert ".local" not in text
    assert (".f64" in text) == (dtypes[0] == "float64")
    assert compiled.linked(kernel).cubin


# ---- who calls it ----------------------------------------------------------------------------------------------------------------------


class OnGpu:
    """All that `merge` looks at of a CuPy array, made by `__new__`, too; its elements are those of a NumPy array."""

    def __new__(cls, x, dtype=None):
        self, x = super().__new__(cls), x if dtype is None else np.empty(x, dtype)
        self.x, self.dtype, self.shape, self.ndim, self.strides, self.flags, self.size = (
            x,
            x.dtype,
            x.shape,
            x.ndim,
            x.strides,
            x.flags,
            x.size,
        )
        self.data = SimpleNamespace(ptr=x.ctypes.data, device_id=0)
        self.device = nullcontext()
        return self

    def reshape(self, *shape):
        return OnGpu(self.x.reshape(*shape))


@pytest.mark.skipif(SIMULATED, reason="NumPy arrays are enough")
def test_merge_of_arrays_on_a_gpu_is_one_launch(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=OnGpu))
    monkeypatch.setattr(launch, "gpu_of", lambda x: launch.Gpu(0, (9, 0), 132))
    launched = []
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *operands: launched.append((self, operands)))
    for shape in ((2, 3, 7, 4), (2, 2, 2, 2, 3, 4)):
        parts = parts_of(shape, "float16", "float32", "float32")
        o, lse = numba_flash.merge(*map(OnGpu, parts))
        assert (o.shape, lse.shape, o.dtype.name, lse.dtype.name) == (shape, shape[:-1], "float32", "float32")
    (first, operands), (second, _) = launched
    assert first.builder == "passes.merge.build"
    assert first.config == ("float32", "float16", "float32", "float32", "float32", prepare_merge.ROWS)
    assert (first.grid, second.grid) == (-(-42 // 8), 6)
    assert [len(x.shape) for x in operands] == [4, 3] * 3
    o, lse, o2, lse2 = map(OnGpu, parts_of((5, 4), "float32", "float16", "float32"))
    merge_into(o, lse, o2, lse2)
    assert launched[-1][1] == (o, lse, o2, lse2, o, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_merge_on_a_gpu_is_that_of_numpy(case):
    import cupy

    shape, *dtypes = CASES[case]
    parts = parts_of(shape, *dtypes)
    expected = numba_flash.merge(*parts)
    results = numba_flash.merge(*map(cupy.asarray, parts))
    tolerance = 1e-14 if dtypes[2] == "float64" else 2e-6
    for x, y in zip(results, expected, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(cupy.asnumpy(x), y, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
def test_parts_on_a_gpu_are_merged_in_place():
    import cupy

    q, k, v, _ = map(cupy.asarray, random_inputs(nq=300, nk=400, d=64, dtype="float16"))
    o, lse = numba_flash.forward(q, k, v, out=cupy.empty(q.shape, np.float32), return_lse=True)
    first, second = (
        numba_flash.forward(q, k[..., j, :], v[..., j, :], out=cupy.empty(q.shape, np.float32), return_lse=True)
        for j in (slice(0, 150), slice(150, None))
    )
    merge_into(*first, *second)
    np.testing.assert_allclose(cupy.asnumpy(first[0]), cupy.asnumpy(o), atol=2e-3)
    np.testing.assert_allclose(cupy.asnumpy(first[1]), cupy.asnumpy(lse), rtol=1e-5, atol=1e-5)
