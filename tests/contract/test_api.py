"""The public face: plans, prepared calls, foreign arrays, threads, imports, docstrings."""

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import scipy.sparse
from support import allowed_errors, assert_within, no_gpu, oracle, random_inputs, same_bits, whole

import numba_flash
from numba_flash import api, call, paged, planning, reference
from numba_flash.arguments import arrays, precisions
from numba_flash.arguments.problem import Prepared, Problem, bind
from numba_flash.plan import BACKENDS

GPU_REASON = no_gpu()
DEFAULT_BACKEND = "cpu" if GPU_REASON else "simt"


# ---- plan ----------------------------------------------------------------------------------------------------------------------------


def test_plan_holds_the_problem():
    q, k, v, _ = random_inputs(batch=(3,), hq=4, hk=2, nq=5, nk=7, d=16, dv=8, dtype="float64")
    plan = numba_flash.plan(q, k, v, causal=True, scale=0.5, backend="cpu")
    expected = Problem((1, 3), hq=4, hk=2, nq=5, nk=7, d=16, dv=8, dtype="float64", scale=0.5, low=-5, high=2)
    assert plan.problem == expected
    assert plan.backend == "cpu"
    assert plan.refused == ()
    assert plan == numba_flash.plan(q, k, v, causal=True, scale=0.5, backend="cpu")


def test_plan_gives_defaults():
    q, k, v, _ = random_inputs(batch=(), hq=None, hk=None, nq=5, nk=7, d=16)
    problem = numba_flash.plan(q, k, v).problem
    assert problem.batch == (1, 1)
    assert (problem.hq, problem.hk) == (1, 1)
    assert problem.scale == 0.25
    assert (problem.low, problem.high) == (-5, 7)


def test_plan_says_what_runs_and_why_nothing_faster():
    q, k, v, _ = random_inputs(nq=5, nk=7)
    plan = numba_flash.plan(q, k, v)
    assert plan.backend == DEFAULT_BACKEND
    faster = BACKENDS[: BACKENDS.index(DEFAULT_BACKEND)]
    assert plan.refused == tuple((name, GPU_REASON or no_gpu(name) or "serves float16 and bfloat16; q.dtype is float32") for name in faster)
    text = str(plan)
    assert plan.tiles[0][0] == "forward"
    tiles = ", ".join(f"{kernel} {rows} x {columns}" for kernel, (rows, columns) in plan.tiles)
    assert text.splitlines()[0] == f"runs on {DEFAULT_BACKEND} in tiles of {tiles}: IEEE products and sums"
    assert text.splitlines()[1] == f"  scratch memory: {'512 bytes' if DEFAULT_BACKEND == 'cpu' else 'none'}"
    assert text.splitlines()[2:] == [f"  not {backend}: {reason}" for backend, reason in plan.refused]
    assert repr(plan) == text


def test_plan_computes_and_allocates_nothing(monkeypatch):
    q, k, v, _ = random_inputs(nq=5, nk=7)
    for name in ("_prepare_forward", "_prepare_backward"):
        monkeypatch.setattr(api, name, None)
    monkeypatch.setattr(np, "empty", None)
    numba_flash.plan(q, k, v, backend="cpu")


# ---- prepared calls --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(monkeypatch):
    """Counts how often calls are prepared, and starts from none."""
    counts = {"forward": 0, "backward": 0}
    monkeypatch.setattr(call, "_prepared", {})

    def counted(name, prepare):
        def wrapper(*args):
            counts[name] += 1
            return prepare(*args)

        return wrapper

    for name in counts:
        monkeypatch.setattr(api, f"_prepare_{name}", counted(name, getattr(api, f"_prepare_{name}")))
    return counts


def test_repeated_calls_are_prepared_once(prepared):
    for seed in range(3):
        q, k, v, do = random_inputs(nq=5, nk=7, seed=seed)
        o, lse = numba_flash.forward(q, k, v, return_lse=True, causal=True, backend="cpu")
        numba_flash.backward(do, q, k, v, o, lse, causal=True, backend="cpu")
    assert prepared == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("integer", [int, np.uint64])
def test_another_state_of_the_generator_is_not_another_preparation(prepared, integer):
    """Training takes a new one in every step. (States that are no plain integers are prepared for each.)"""
    q, k, v, do = random_inputs(nq=5, nk=7)
    for seed, offset in ((1, 2), (3, 4), (2**64 - 1, 2**32 - 1)):
        options = {"dropout": 0.3, "rng": (integer(seed), integer(offset))}
        o, lse = numba_flash.forward(q, k, v, return_lse=True, backend="cpu", **options)
        ours = (o, *numba_flash.backward(do, q, k, v, o, lse, backend="cpu", **options))
        expected, _, *gradients = whole.everything(do, q, k, v, **options)
        for x, y in zip(ours, (expected, *gradients), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)
    assert prepared == ({"forward": 1, "backward": 1} if integer is int else {"forward": 3, "backward": 3})


@pytest.mark.parametrize("state", [(1, -1), (True, 1), (1.0, 2), (1, 2, 3), [1, 2, 3], [1, -2], (2**64, 0), (0, 2**32)])
def test_a_bad_state_is_refused_after_a_good_one(prepared, state):
    q, k, v, _ = random_inputs(nq=5, nk=7)
    numba_flash.forward(q, k, v, dropout=0.3, rng=(1, 1), backend="cpu")
    with pytest.raises((TypeError, ValueError), match=r"^rng"):
        numba_flash.forward(q, k, v, dropout=0.3, rng=state, backend="cpu")


@pytest.mark.parametrize(
    "change",
    [{"scale": 0.1}, {"causal": True}, {"window": (1, 1)}, {"causal": True, "q_start": 0}, {"return_lse": True}, {"out": True}],
)
def test_another_option_is_another_preparation(prepared, change):
    q, k, v, do = random_inputs(nq=5, nk=7)
    options = {"out": np.empty_like(do)} if "out" in change else change
    first = numba_flash.forward(q, k, v, backend="cpu")
    changed = numba_flash.forward(q, k, v, backend="cpu", **options)
    again = numba_flash.forward(q, k, v, backend="cpu")
    assert prepared["forward"] == 2
    assert same_bits(first, again)
    assert "return_lse" in change or "out" in change or not same_bits(first, changed)


@pytest.mark.parametrize(
    ("good", "bad"),
    [({"scale": 0.5}, {"scale": np.ones(2)}), ({"window": (1, 2)}, {"window": (1, np.ones(2))}), ({"causal": True}, {"causal": 1})],
    ids=["scale", "window", "causal"],
)
def test_what_cannot_be_compared_or_is_equal_is_refused_after_what_was_accepted(good, bad):
    q = np.ones((2, 3, 4), np.float32)
    for _ in range(2):
        numba_flash.forward(q, q, q, backend="cpu", **good)
    with pytest.raises(TypeError, match=f"^{next(iter(bad))}"):
        numba_flash.forward(q, q, q, backend="cpu", **bad)


def test_another_layout_dtype_or_shape_is_another_preparation(prepared):
    inputs = random_inputs(nq=5, nk=7)[:3]
    strided = tuple(np.repeat(x, 2, axis=-1)[..., ::2] for x in inputs)
    double = tuple(x.astype(np.float64) for x in inputs)
    shorter = (inputs[0][..., 1:, :].copy(), *inputs[1:])
    variants = (inputs, strided, double, shorter)
    for variant in variants * 2:
        o, lse = numba_flash.forward(*variant, return_lse=True, backend="cpu")
        do = np.zeros_like(o)
        assert_within("o", o, oracle(*variant, do)["o"], allowed_errors(*variant, do)["o"])
        assert lse.shape == variant[0].shape[:-1]
    assert prepared["forward"] == len(variants)


@pytest.mark.parametrize("first", [False, True])
def test_packed_sequences_with_lse_and_without_are_two_preparations(monkeypatch, first):
    monkeypatch.setattr(call, "_prepared", {})
    q, k, v, _ = (x[:, :, 0] for x in random_inputs(batch=(5,), nq=1, nk=1))
    offsets = np.array([0, 2, 5])
    for return_lse in (first, not first):
        results = numba_flash.forward_packed(q, k, v, offsets, offsets, return_lse=return_lse, backend="cpu")
        o, *lse = results if return_lse else (results,)
        assert [x.shape for x in (o, *lse)] == [q.shape, q.shape[1::-1]][: 1 + return_lse]
    assert len(call._prepared) == 2


def test_an_address_on_a_gpu_counts_by_what_is_left_of_16(monkeypatch):
    """What the copy engine takes at one address it may refuse at another."""
    at = lambda ptr: SimpleNamespace(shape=(2, 8), strides=(16, 2), dtype=np.dtype("float16"), data=SimpleNamespace(ptr=ptr, device_id=0))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=SimpleNamespace))
    addresses = 4096, 4096 + 160, 4096 + 8, 4096 + 2
    same = [[arrays.layouts([at(x)]) == arrays.layouts([at(y)]) for x in addresses] for y in addresses]
    assert same == [[x % 16 == y % 16 for x in addresses] for y in addresses]
    assert [arrays.Layout.of(at(ptr)).offset for ptr in addresses] == [0, 0, 8, 2]


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1)], ids=str)
def test_a_part_of_an_array_on_a_gpu_begins_where_its_first_element_does(order, axis):
    """Its layout is that of the view, by the strides of its axis, whatever the array's own address is."""
    x = np.zeros([(5, 7, 6)[at] for at in order], np.float16)[:, :, ::-1].transpose(np.argsort(order))
    for first in (0, 2, 14):
        at = lambda view, first=first: (first + arrays.address(view) - arrays.address(x)) % 16
        whole = arrays.Layout.of(x)._replace(device=0, offset=first)
        for start, stop in ((0, 3), (1, 2), (3, 5)):
            view = x[(slice(None),) * axis + (slice(start, stop),)]
            assert whole.cut(axis, start, stop) == arrays.Layout.of(view)._replace(device=0, offset=at(view))


class Pointer(NamedTuple):
    """Stands in for CuPy's pointer to memory."""

    ptr: int

    def __add__(self, offset: int) -> "Pointer":
        return Pointer(self.ptr + offset)


class Arrays(NamedTuple):
    """What kernels hand to each other."""

    x: Any
    y: Any
    z: Any
    w: Any


SCRATCH = Arrays(*(n and arrays.Layout.compact((2, n), "float32") for n in (3, None, 500, 1)))


def test_what_kernels_hand_to_each_other_is_one_piece_on_a_gpu(monkeypatch):
    allocated = []
    memory = SimpleNamespace(alloc=lambda size: allocated.append(size) or Pointer(1 << 20))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=memory))
    there = arrays.Scratch(SCRATCH, "abcd").beside(SimpleNamespace())
    x, z, w = there.x.data.ptr, there.z.data.ptr, there.w.data.ptr
    ends = [0, x + 2 * 3 * 4, z + 2 * 500 * 4, w + 2 * 4]
    assert there.y is None
    assert all(start % 512 == 0 and start >= end for start, end in zip((x, z, w, (1 << 20) + allocated[0]), ends, strict=True))
    assert (there.z[0].data.ptr, there.z[1].data.ptr) == (z, z + 500 * 4)
    assert len(allocated) == 1
    new = arrays.Scratch(SCRATCH, "abcd").beside(np.empty(1))
    assert [None if x is None else (x.shape, x.dtype.name) for x in new] == [
        ((2, 3), "float32"),
        None,
        ((2, 500), "float32"),
        ((2, 1), "float32"),
    ]


def test_no_room_for_what_kernels_hand_to_each_other_names_it(monkeypatch):
    def alloc(size):
        raise MemoryError

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(alloc=alloc)))
    with pytest.raises(MemoryError, match=r"^a, b, c, d: cannot allocate 5120 bytes for shape \(5120,\), dtype uint8$"):
        arrays.Scratch(SCRATCH, "abcd").beside(SimpleNamespace())


def test_arrays_of_cupy_are_plain_once_it_is_imported(monkeypatch):
    class Array:
        pass

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert not arrays.plain(Array())
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Array))
    assert all(map(arrays.plain, (Array(), None, np.empty(1))))
    subclass = type("Subclass", (Array,), {})()
    assert not arrays.plain(subclass)
    with pytest.raises(TypeError):
        arrays.layouts((np.empty(1), subclass))


def test_prepared_calls_are_bounded(prepared, monkeypatch):
    monkeypatch.setattr(call, "_PREPARED_LIMIT", 4)
    q, k, v, _ = random_inputs(batch=(), nq=3, nk=3)
    for q_start in range(10):
        numba_flash.forward(q, k, v, q_start=q_start, backend="cpu")
        assert len(call._prepared) <= 4


# ---- foreign arrays --------------------------------------------------------------------------------------------------------------------


class Foreign:
    """An array that offers nothing but DLPack."""

    def __init__(self, x):
        self._x = x

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._x.__dlpack_device__()


def test_dlpack_objects_are_accepted():
    inputs = random_inputs(nq=5, nk=7)
    o, lse = numba_flash.forward(*inputs[:3], return_lse=True, causal=True)
    foreign_o, foreign_lse = numba_flash.forward(*map(Foreign, inputs[:3]), return_lse=True, causal=True)
    assert type(foreign_o) is np.ndarray
    assert same_bits(o, foreign_o)
    assert same_bits(lse, foreign_lse)
    gradients = numba_flash.backward(inputs[3], *inputs[:3], o, lse, causal=True)
    foreign = numba_flash.backward(*map(Foreign, (inputs[3], *inputs[:3], o, lse)), causal=True)
    assert all(map(same_bits, gradients, foreign))
    assert numba_flash.plan(*map(Foreign, inputs[:3])) == numba_flash.plan(*inputs[:3])


def test_dlpack_objects_are_read_without_a_copy(monkeypatch):
    seen = []

    def prepare(*_):
        return Prepared(lambda inputs, results: seen.extend(inputs[:3]))

    monkeypatch.setattr(call, "_prepared", {})
    monkeypatch.setattr(call.plan, "prepare", prepare)
    inputs = random_inputs(nq=5, nk=7)[:3]
    inputs = (*inputs[:2], inputs[2][..., ::-1, ::2])
    numba_flash.forward(*map(Foreign, inputs), backend="cpu")
    for x, y in zip(seen, inputs, strict=True):
        assert x.ctypes.data == y.ctypes.data
        assert x.strides == y.strides


def test_dlpack_objects_of_a_bad_dtype_are_refused():
    q, k, v, _ = random_inputs(nq=5, nk=7)
    with pytest.raises(TypeError, match=r"k\.dtype must be one of float16, bfloat16, float32, float64; got int32"):
        numba_flash.forward(q, Foreign(k.astype(np.int32)), v)


# ---- subclasses -------------------------------------------------------------------------------------------------------------------------


class Touchy(np.ndarray):
    """Whoever uses it as an array, instead of the memory under it, hears of it."""

    __array_ufunc__ = None

    def __array_function__(self, function, types, arguments, options):
        raise AssertionError(f"{function.__name__} of a subclass")

    def _refuse(self, *arguments):
        raise AssertionError("a method of a subclass")

    __getitem__ = __setitem__ = swapaxes = reshape = transpose = view = astype = _refuse


def memmap(x: np.ndarray, tmp_path) -> np.memmap:
    """A copy of `x` in a file."""
    name = tmp_path / f"{len(list(tmp_path.iterdir()))}"
    copy = np.memmap(name, x.dtype, "w+", shape=x.shape or 1)
    copy[...] = x
    return copy


SUBCLASSES = {
    "matrix": lambda x, _: x if x.ndim != 2 else x.view(np.matrix),
    "sparse": lambda x, _: x if x.ndim != 2 else scipy.sparse.csr_matrix(x).todense(),
    "memmap": memmap,
    "recarray": lambda x, _: x.view(np.recarray),
    "touchy": lambda x, _: x.view(Touchy),
}
pytestmark = pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
every_subclass = pytest.mark.parametrize("make", SUBCLASSES.values(), ids=SUBCLASSES)


def assert_plain_and_equal(results, expected):
    assert [type(x) for x in results] == [np.ndarray] * len(expected)
    assert all(map(same_bits, results, expected))


@every_subclass
def test_subclasses_are_read_as_plain_arrays(make, tmp_path):
    """A matrix keeps two dimensions whatever is done to it: kernels that got one computed nonsense, and wrote where they should not."""
    q, k, v, do = random_inputs(batch=(), hq=None, hk=None, nq=5, nk=7, d=16, dv=6, dtype="float64")
    rng = np.random.default_rng(1)
    bias, mask, dlse = rng.standard_normal((5, 7)), rng.random((5, 7)) < 0.7, rng.standard_normal(5)
    o, lse = numba_flash.forward(q, k, v, bias=bias, mask=mask, return_lse=True, backend="cpu")
    arguments = (do, q, k, v, o, lse, dlse, bias, mask)
    gradients = numba_flash.backward(*arguments[:6], dlse=dlse, bias=bias, mask=mask, bias_grad=True, backend="cpu")
    do, q, k, v, o_, lse_, dlse, bias, mask = (make(x, tmp_path) for x in arguments)
    assert_plain_and_equal(numba_flash.forward(q, k, v, bias=bias, mask=mask, return_lse=True, backend="cpu"), (o, lse))
    options = {"dlse": dlse, "bias": bias, "mask": mask, "bias_grad": True, "backend": "cpu"}
    assert_plain_and_equal(numba_flash.backward(do, q, k, v, o_, lse_, **options), gradients)
    assert_plain_and_equal(numba_flash.merge(o_, lse_, o_, lse_), numba_flash.merge(o, lse, o, lse))
    assert numba_flash.plan(q, k, v, bias=bias, mask=mask) == numba_flash.plan(*arguments[1:4], bias=arguments[7], mask=arguments[8])


@every_subclass
def test_lengths_and_offsets_may_be_of_a_subclass(make, tmp_path):
    q, k, v, do = random_inputs(batch=(2,), hq=1, hk=1, nq=5, nk=5, d=16, dtype="float64")
    lengths, offsets = np.array([2, 5]), np.array([0, 3, 5])
    arguments = [(lengths, make(lengths, tmp_path)), (offsets, make(offsets, tmp_path))]
    padded = [numba_flash.forward(q, k, v, q_lengths=n, kv_lengths=n, return_lse=True, backend="cpu") for n in arguments[0]]
    assert_plain_and_equal(padded[1], padded[0])
    q, k, v, do = (x[0].swapaxes(0, 1) for x in (q, k, v, do))
    packed = [numba_flash.forward_packed(q, k, v, n, n, return_lse=True, backend="cpu") for n in arguments[1]]
    assert_plain_and_equal(packed[1], packed[0])
    gradients = [numba_flash.backward_packed(do, q, k, v, *packed[0], n, n, backend="cpu") for n in arguments[1]]
    assert_plain_and_equal(gradients[1], gradients[0])


@every_subclass
def test_what_was_given_as_out_is_written_and_returned(make, tmp_path):
    q, k, v, do = random_inputs(batch=(), hq=None, hk=None, nq=5, nk=7, d=16, dtype="float64")
    o, lse = numba_flash.forward(q, k, v, return_lse=True, backend="cpu")
    out = make(np.zeros_like(o), tmp_path)
    assert numba_flash.forward(q, k, v, out=out, backend="cpu") is out
    assert same_bits(np.asarray(out), o)
    expected = numba_flash.backward(do, q, k, v, o, lse, backend="cpu")
    outs = make(np.zeros_like(q), tmp_path), None, make(np.zeros_like(v), tmp_path)
    gradients = numba_flash.backward(do, q, k, v, o, lse, out=outs, backend="cpu")
    assert [gradients[i] is outs[i] for i in range(3)] == [True, False, True]
    assert type(gradients[1]) is np.ndarray
    assert all(same_bits(np.asarray(x), y) for x, y in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("library", ["numpy", "foreign"])
def test_out_of_packed_sequences_is_returned(library):
    q, k, v, do = (x[:, :, 0] for x in random_inputs(batch=(5,), nq=1, nk=1, dtype="float64"))
    offsets = np.array([0, 2, 5])
    o, lse = numba_flash.forward_packed(q, k, v, offsets, offsets, return_lse=True, backend="cpu")
    memory = np.zeros((4, *q.shape))
    out = [x.view(Touchy) if library == "numpy" else Foreign(x) for x in memory]
    assert numba_flash.forward_packed(q, k, v, offsets, offsets, out=out[3], return_lse=True, backend="cpu")[0] is out[3]
    gradients = numba_flash.backward_packed(do, q, k, v, o, lse, offsets, offsets, out=tuple(out[:3]), backend="cpu")
    assert all(x is y for x, y in zip(gradients, out[:3], strict=True))
    expected = (*numba_flash.backward_packed(do, q, k, v, o, lse, offsets, offsets, backend="cpu"), o)
    assert all(map(same_bits, memory, expected))


def test_a_subclass_of_cupy_becomes_a_plain_array(monkeypatch):
    class PlainArray:
        def view(self, kind):
            return kind()

    class Subclass(PlainArray):
        view = None

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=PlainArray))
    plain = PlainArray()
    assert arrays.adopt(plain) is plain
    assert type(arrays.adopt(Subclass())) is PlainArray


@pytest.mark.gpu
def test_subclasses_of_cupy_are_read_as_plain_arrays():
    import cupy

    class Subclass(cupy.ndarray):
        def __getitem__(self, key):
            raise AssertionError("a method of a subclass")

    inputs = [cupy.asarray(x) for x in random_inputs(nq=5, nk=7)[:3]]
    expected = numba_flash.forward(*inputs)
    subclasses = [x.view(Subclass) for x in inputs]
    o = numba_flash.forward(*subclasses)
    assert type(o) is cupy.ndarray
    assert same_bits(o.get(), expected.get())
    out = cupy.empty_like(o).view(Subclass)
    assert numba_flash.forward(*subclasses, out=out) is out
    assert same_bits(out.get(), expected.get())


# ---- empty results ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [{"batch": (0,)}, {"nq": 0}, {"hq": 0, "hk": 0}], ids=["no batch", "no queries", "no heads"])
def test_out_may_be_empty(empty):
    """NumPy gives empty arrays strides of 0, as if their elements lay on top of each other."""
    q, k, v, do = random_inputs(**{"batch": (2,), "hq": 1, "hk": 1, "nq": 5, "nk": 7} | empty)
    out, lse = numba_flash.forward(q, k, v, out=np.empty(do.shape, np.float32), return_lse=True, backend="cpu")
    assert out.shape == do.shape
    outs = tuple(np.empty(x.shape, np.float32) for x in (q, k, v))
    gradients = numba_flash.backward(do, q, k, v, out, lse, out=outs, backend="cpu")
    assert all(x is y for x, y in zip(gradients, outs, strict=True))
    assert not any(gradient.any() for gradient in gradients)


# ---- flags ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("true", [True, np.True_], ids=["bool", "numpy.bool"])
def test_flags_may_be_of_numpy(true):
    q, k, v, do = random_inputs(nq=5, nk=7)
    o, lse = numba_flash.forward(q, k, v, return_lse=true, backend="cpu")
    assert not isinstance(numba_flash.forward(q, k, v, return_lse=not true, backend="cpu"), tuple)
    bias = np.zeros((5, 7), np.float32)
    gradients = numba_flash.backward(do, q, k, v, o, lse, bias=bias, bias_grad=true, deterministic=true, backend="cpu")
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape, bias.shape]


# ---- threads and processes -------------------------------------------------------------------------------------------------------------


def test_threads():
    """Concurrent calls of different problems, forward and backward, give the bits that they give one after the other."""
    problems = [
        random_inputs(hq=2, hk=1 + i % 2, nq=60 + 40 * i, nk=200 - 20 * i, dtype=("float32", "float64")[i % 2], seed=i) for i in range(6)
    ]

    def compute(q, k, v, do):
        o, lse = numba_flash.forward(q, k, v, return_lse=True, causal=True)
        return (o, lse, *numba_flash.backward(do, q, k, v, o, lse, causal=True))

    expected = [compute(*problem) for problem in problems]
    results = [[] for _ in problems]
    start = threading.Barrier(len(problems))

    def work(i):
        start.wait()
        results[i] += [compute(*problems[i]) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, runs in enumerate(results):
        assert len(runs) == 10
        assert all(same_bits(a, b) for run in runs for a, b in zip(run, expected[i], strict=True))


def python(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(Path(numba_flash.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("use", ["pass", "numba_flash.reference.forward(x, x, x)"], ids=["import", "the oracle"])
def test_import_is_light(use):
    heavy = ("cupy", "numba", "scipy", "cuda", "llvmlite", "threadpoolctl")
    code = f"import sys, numpy as np, numba_flash; x = np.eye(3); {use}; print(sorted(set({heavy}) & set(sys.modules)))"
    assert python(code) == "[]\n"


def test_a_refused_call_is_light():
    code = """
import sys, numpy as np, numba_flash
x = np.eye(3)
try:
    numba_flash.forward(x, x, x[:2])
except ValueError:
    print("numba" in sys.modules)
"""
    assert python(code) == "False\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_computes():
    code = """
import os, numpy as np, numba_flash
x = np.random.default_rng(0).standard_normal((8, 200, 16))
expected = numba_flash.forward(x, x, x, backend="cpu")
child = os.fork()
if child == 0:
    os._exit(0 if np.array_equal(numba_flash.forward(x, x, x, backend="cpu"), expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code) == "0\n"


# ---- names ------------------------------------------------------------------------------------------------------------------------------


def test_dir_shows_the_public_names():
    shown = dir(numba_flash)
    assert [name for name in shown if not name.startswith("_")] == sorted(numba_flash.__all__)
    assert {"__version__", "__doc__", "__file__", "__all__", "__path__"} <= set(shown)
    assert all(hasattr(numba_flash, name) for name in shown)


# ---- documentation ---------------------------------------------------------------------------------------------------------------------

FUNCTIONS = {
    **{name: getattr(numba_flash, name) for name in numba_flash.__all__ if name != "reference"},
    "reference.forward": numba_flash.reference.forward,
    "reference.backward": numba_flash.reference.backward,
}


def documented_parameters(function) -> list[str] | None:
    """Names in the Parameters section of a numpydoc docstring; None if it has none."""
    text = inspect.getdoc(function)
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\S[^\n]*\n-+$|\Z)", text, re.MULTILINE | re.DOTALL)
    if section is None:
        return None
    heads = re.findall(r"^(\S.*?)(?: : .*)?$", section[1], re.MULTILINE)
    return [name.strip().lstrip("*") for head in heads for name in head.split(",")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_parameters_equal_the_signature(name):
    function = FUNCTIONS[name]
    parameters, documented = list(inspect.signature(function).parameters), documented_parameters(function)
    assert sorted(documented or []) == sorted(parameters)


def test_the_docstring_parser_finds_what_is_there():
    assert documented_parameters(numba_flash.backward)[:3] == ["do", "q", "k"]
    assert documented_parameters(bind) is None


def test_every_public_name_has_a_docstring():
    public = {name: getattr(numba_flash, name) for name in numba_flash.__all__} | FUNCTIONS
    assert set(numba_flash.__all__) >= {"forward", "backward", "plan", "reference", "show_config"}
    for name, thing in public.items():
        assert (inspect.getdoc(thing) or "").strip(), f"{name} has no docstring"


def test_forward_and_backward_take_the_same_options():
    keyword_only = lambda f: {n: p.default for n, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}
    forward, backward, plan = map(keyword_only, (numba_flash.forward, numba_flash.backward, numba_flash.plan))
    assert forward == backward
    assert keyword_only(numba_flash.vjp) | {"out": None} == forward
    assert plan.pop("page_table") is None
    assert plan.pop("kind") == "forward"
    assert plan | {"out": None} == forward


def test_packed_functions_take_the_options_that_make_sense_for_them():
    names = lambda f: {n for n, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}
    padded_only = {"bias", "bias_grad", "mask", "q_lengths", "kv_lengths", "axes"}
    assert names(numba_flash.forward_packed) == names(numba_flash.forward) - padded_only
    assert names(numba_flash.backward_packed) == names(numba_flash.backward) - padded_only


def test_pages_take_the_options_that_make_sense_for_them():
    names = lambda f: {n for n, p in inspect.signature(f).parameters.items() if p.kind is p.KEYWORD_ONLY}
    of_training = {"dropout", "rng", "score_mod_grad", "dlse", "bias_grad", "deterministic"}
    of_all = {"kv_lengths", "axes"}
    assert names(numba_flash.forward_paged) == names(numba_flash.forward) - of_training - of_all


@pytest.mark.parametrize("module", [api, paged, planning, precisions, reference, sys.modules["numba_flash.vjp"]], ids=lambda x: x.__name__)
def test_docstring_examples(module):
    import doctest

    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed: it would read the array")
def test_a_device_array_without_cupy_is_a_type_error_that_says_so():
    class DeviceArray:
        __cuda_array_interface__ = {"shape": (4, 4), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012

    with pytest.raises(TypeError, match=r"q must be a NumPy or CuPy array.*CuPy for device memory.*got DeviceArray"):
        numba_flash.forward(DeviceArray(), DeviceArray(), DeviceArray())
