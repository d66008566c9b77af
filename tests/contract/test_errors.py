"""Every bad argument gets its documented exception and a message that names it; nothing is computed, no input changes."""

import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from support import no_gpu

import numba_flash
from numba_flash import call
from numba_flash.arguments import arrays, overlap
from numba_flash.arguments.problem import ForwardInputs, ForwardResults, Prepared, bind
from numba_flash.cuda.runtime import driver as cuda_driver
from numba_flash.cuda.runtime import launch

GPU_REASON = no_gpu()


def good(nq=3, nk=4, d=4, dv=5, batch=(2,), h=2, dtype=np.float32) -> dict:
    rng = np.random.default_rng(0)
    shapes = {
        "q": (*batch, h, nq, d),
        "k": (*batch, h, nk, d),
        "v": (*batch, h, nk, dv),
        "do": (*batch, h, nq, dv),
        "o": (*batch, h, nq, dv),
    }
    inputs = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    return inputs | {"lse": np.zeros((*batch, h, nq), np.float64 if dtype is np.float64 else np.float32)}


def call_forward(arguments, **options):
    return numba_flash.forward(arguments["q"], arguments["k"], arguments["v"], backend="cpu", **options)


def call_backward(arguments, **options):
    return numba_flash.backward(*(arguments[name] for name in ("do", "q", "k", "v", "o", "lse")), backend="cpu", **options)


def call_plan(arguments, **options):
    return numba_flash.plan(arguments["q"], arguments["k"], arguments["v"], **options)


CALLS = {"forward": call_forward, "backward": call_backward, "plan": call_plan}
everywhere = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


@pytest.fixture(autouse=True)
def nothing_is_computed(monkeypatch):
    """No backend is reached."""

    def prepare(backend, *_, **__):
        raise AssertionError(f"backend {backend} was reached")

    monkeypatch.setattr(call.plan, "prepare", prepare)
    monkeypatch.setattr(call, "_prepared", {})


def bytes_of(arguments: dict) -> dict:
    small = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray) and x.dtype != object and x.nbytes < 10**6}
    return {name: x.tobytes() for name, x in small.items()}


def assert_raises(error, pattern, call, arguments, **options):
    before = bytes_of(arguments)
    with pytest.raises(error) as caught:
        call(arguments, **options)
    assert type(caught.value) is error
    assert re.search(pattern, str(caught.value)), f"{pattern!r} not in {str(caught.value)!r}"
    assert bytes_of(arguments) == before


# ---- shapes --------------------------------------------------------------------------------------------------------------------------


def reshaped(**shapes) -> dict:
    arguments = good()
    return arguments | {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


BAD_SHAPES = {
    "1-D": (reshaped(q=(4,), k=(4,), v=(4,)), r"q must have 2 to 5 dimensions .*got shape \(4,\)"),
    "0-D": (reshaped(q=()), r"q must have 2 to 5 dimensions .*got shape \(\)"),
    "6-D": (reshaped(q=(1,) * 6, k=(1,) * 6, v=(1,) * 6), r"q must have 2 to 5 dimensions .*got shape \(1, 1, 1, 1, 1, 1\)"),
    "k of another rank": (reshaped(k=(4, 4)), r"k\.ndim \(2\) must equal q\.ndim \(4\)"),
    "v of another rank": (reshaped(v=(2, 4, 5)), r"v\.ndim \(3\) must equal q\.ndim \(4\)"),
    "head dims": (reshaped(k=(2, 2, 4, 7)), r"k\.shape\[-1\] \(7\) must equal q\.shape\[-1\] \(4\)"),
    "numbers of keys": (reshaped(v=(2, 2, 5, 5)), r"v\.shape\[:-1\] \(2, 2, 5\) must equal k\.shape\[:-1\] \(2, 2, 4\)"),
    "heads of k and v": (reshaped(v=(2, 1, 4, 5)), r"v\.shape\[:-1\] \(2, 1, 4\) must equal k\.shape\[:-1\] \(2, 2, 4\)"),
    "heads of q": (reshaped(q=(2, 3, 3, 4)), r"q\.shape\[-3\] \(3\) must be a multiple of k\.shape\[-3\] \(2\)"),
    "fewer heads in q": (reshaped(q=(2, 1, 3, 4)), r"q\.shape\[-3\] \(1\) must be a multiple of k\.shape\[-3\] \(2\)"),
    "no heads in k": (reshaped(k=(2, 0, 4, 4), v=(2, 0, 4, 5)), r"q\.shape\[-3\] \(2\) must be a multiple of k\.shape\[-3\] \(0\)"),
    "batch of k": (reshaped(k=(3, 2, 4, 4)), r"k\.shape\[:-3\] \(3,\) must equal q\.shape\[:-3\] \(2,\)"),
    "batch of v": (reshaped(v=(1, 2, 4, 5)), r"v\.shape\[:-3\] \(1,\) must equal q\.shape\[:-3\] \(2,\)"),
    "D = 0": (reshaped(q=(2, 2, 3, 0), k=(2, 2, 4, 0)), r"q\.shape\[-1\] \(0\) must be between 1 and 256"),
    "D = 257": (reshaped(q=(2, 2, 3, 257), k=(2, 2, 4, 257)), r"q\.shape\[-1\] \(257\) must be between 1 and 256"),
    "Dv = 0": (reshaped(v=(2, 2, 4, 0)), r"v\.shape\[-1\] \(0\) must be between 1 and 256"),
    "Dv = 257": (reshaped(v=(2, 2, 4, 257)), r"v\.shape\[-1\] \(257\) must be between 1 and 256"),
}


@everywhere
@pytest.mark.parametrize(("arguments", "pattern"), BAD_SHAPES.values(), ids=BAD_SHAPES)
def test_shapes(call, arguments, pattern):
    assert_raises(ValueError, pattern, call, arguments)


@pytest.mark.parametrize("name", ["q", "k"])
def test_too_long(name):
    arguments = good(batch=(), d=1, h=1)
    long = np.lib.stride_tricks.as_strided(np.zeros((1, 1, 1), np.float32), (1, 2**30 + 1, 1), (0, 0, 4))
    arguments |= {"q": long} if name == "q" else {"k": long, "v": long}
    assert_raises(ValueError, rf"{name}\.shape\[-2\] \(1073741825\) must be at most 1073741824", call_forward, arguments)


@pytest.mark.parametrize(("name", "shape"), [("do", (2, 2, 3, 4)), ("o", (2, 2, 4, 5)), ("lse", (2, 2, 3, 1)), ("lse", (2, 3))])
def test_shapes_in_backward(name, shape):
    expected = (2, 2, 3) if name == "lse" else (2, 2, 3, 5)
    pattern = re.escape(f"{name}.shape {shape} must be {expected}")
    assert_raises(ValueError, pattern, call_backward, reshaped(**{name: shape}))


# ---- kinds and dtypes ----------------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [[[1.0, 2.0]], None, 3.0, "text", {"a": 1}])
def test_not_an_array(call, name, value):
    got = type(value).__name__ + (rf": pass np\.asarray\({name}\)" if isinstance(value, list) else "")
    assert_raises(TypeError, rf"^{name} must be a NumPy or CuPy array, .*; got {got}$", call, good() | {name: value})


@pytest.mark.parametrize("name", ["do", "o", "lse"])
@pytest.mark.parametrize("value", [[[1.0, 2.0]], None, 3.0])
def test_not_an_array_in_backward(name, value):
    got = type(value).__name__ + (rf": pass np\.asarray\({name}\)" if isinstance(value, list) else "")
    assert_raises(TypeError, rf"^{name} must be a NumPy or CuPy array, .*; got {got}$", call_backward, good() | {name: value})


@everywhere
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_masked_array(call, name):
    arguments = good()
    arguments[name] = np.ma.masked_array(arguments[name], mask=False)
    assert_raises(TypeError, rf"^{name} must .*; got MaskedArray, whose mask would be ignored: pass {name}\.data, ", call, arguments)


class Labelled:
    """Like a DataArray of xarray, or a DataFrame of pandas: converts itself, but offers no memory."""

    def __init__(self, x, dtype=None):
        self._x, self.shape, self.dtype = x, x.shape, dtype or x.dtype

    def __array__(self, dtype=None, copy=None):
        return self._x


class OnGpu(Labelled):
    """Like a JAX array on a GPU, or one of PyTorch, where there is no CuPy."""

    def __dlpack__(self, **options):
        raise AssertionError("read")

    def __dlpack_device__(self):
        return 2, 0


class Bfloat16(Labelled):
    """Like a JAX array of a dtype that NumPy does not read through DLPack."""

    def __dlpack__(self, **options):
        raise BufferError("Unsupported dtype in DLTensor.\nMore about it.")

    def __dlpack_device__(self):
        return 1, 0


class Tracer(Labelled):
    """Like what JAX passes to a function that it compiles."""

    __module__ = "jax._src.core"

    def __getattr__(self, name):
        if name in ("__dlpack_device__", "__dlpack__"):
            return lambda **options: self._concrete()
        raise AttributeError(name)

    def _concrete(self):
        raise TypeError("Abstract tracer value encountered where concrete value is expected.")


class Traced(Tracer):
    """Each transformation of JAX has a kind of its own."""


class Box:
    """Like what HIPS autograd passes to a function that it differentiates."""

    __module__ = "autograd.tracer"


class ArrayBox(Box):
    """Each library under it has a kind of its own."""

    __module__ = "autograd.numpy.numpy_boxes"


class Tensor(Labelled):
    """Like PyTorch's, which hands over no memory that a gradient is asked for, or that there is not."""

    __module__ = "torch"
    requires_grad = False

    def __dlpack__(self, **options):
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    def __dlpack_device__(self):
        return 1, 0


class TensorWithGradient(Tensor):
    """Its dtype is none of NumPy's."""

    requires_grad = True


class FakeTensor(Tensor):
    """Like what stands for one while a function is compiled: it hands over memory that is not there."""

    __module__ = "torch._subclasses.fake_tensor"

    def __dlpack__(self, **options):
        return self._x.__dlpack__(**options)


def dask_array(x):
    return pytest.importorskip("dask.array").from_array(x, chunks=-1)


OTHER_LIBRARIES = {
    "labelled": (Labelled, r"^{0} must be .*; got Labelled: pass np\.asarray\({0}\)$"),
    "on a GPU": (OnGpu, r"^{0} must be .*CuPy for device memory\); got OnGpu: pass np\.asarray\({0}\)$"),
    "on a GPU, another dtype": (lambda x: OnGpu(x, "torch.float32"), r"^{0} must be .*CuPy for device memory\); got OnGpu$"),
    "bfloat16": (
        Bfloat16,
        r"^{0} cannot be read in place \(BufferError: Unsupported dtype in DLTensor\.\); got Bfloat16: pass np\.asarray\({0}\)$",
    ),
    "bfloat16, another dtype": (lambda x: Bfloat16(x, "torch.bfloat16"), r"^{0} cannot be .*; got Bfloat16$"),
    "traced": (
        Traced,
        r"^{0} must be an array that has values; got Traced, which .* JAX traces .*pure_callback; numba_flash\.backward .*custom_vjp$",
    ),
    "of dask": (dask_array, r"^{0} must be .*; got Array: numba_flash\.dask\.forward and numba_flash\.dask\.backward take dask arrays$"),
    "boxed": (
        lambda x: ArrayBox(),
        r"^{0} must be an array that has values; got ArrayBox, which .* autograd\.extend\.primitive; numba_flash\.backward .*defvjp$",
    ),
    "with a gradient": (
        TensorWithGradient,
        r"^{0} cannot be .*; got TensorWithGradient, which requires a gradient: pass {0}\.detach\(\); .*torch\.autograd\.Function$",
    ),
    "fake": (
        FakeTensor,
        r"^{0} must be an array that has values; got FakeTensor, which has no values while PyTorch traces .* torch\.library\.custom_op$",
    ),
    "sparse": (lambda x: scipy.sparse.csr_array(x.reshape(-1, 4)), r"^{0} must be .*; got csr_array: pass {0}\.toarray\(\)$"),
}


@everywhere
@pytest.mark.parametrize("name", ["q", "v"])
@pytest.mark.parametrize(("make", "pattern"), OTHER_LIBRARIES.values(), ids=OTHER_LIBRARIES)
def test_arrays_of_other_libraries(call, name, make, pattern, monkeypatch):
    """The error says what to do; none of these libraries is imported."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    arguments = good(nq=4, dv=4)
    arguments[name] = make(arguments[name])
    assert_raises(TypeError, pattern.format(name), call, arguments)


@pytest.mark.parametrize("name", ["bias", "mask", "dlse"])
def test_options_of_other_libraries(name):
    value = [1.0] if name != "mask" else Labelled(np.ones(4, bool))
    assert_raises(TypeError, rf"^{name} must be .*: pass np\.asarray\({name}\)$", call_backward, good(), **{name: value})


@everywhere
@pytest.mark.parametrize("dtype", ["int32", "uint16", "bool", "complex64", "object", "longdouble"])
def test_dtypes_that_are_not_supported(call, dtype):
    arguments = good()
    for name in ("q", "k", "v"):
        arguments[name] = arguments[name].astype(dtype)
    name = np.dtype(dtype).name
    assert_raises(TypeError, rf"q\.dtype must be one of float16, bfloat16, float32, float64; got {name}", call, arguments)


def test_dtype_without_a_size():
    empty = np.zeros((2, 2, 3, 4), np.dtype([]))
    assert_raises(TypeError, r"q\.dtype must be one of .*; got void", call_forward, good() | {"q": empty})


@everywhere
@pytest.mark.parametrize("name", ["k", "v"])
def test_dtypes_that_differ(call, name):
    arguments = good()
    arguments[name] = arguments[name].astype(np.float64)
    assert_raises(TypeError, rf"{name}\.dtype \(float64\) must equal q\.dtype \(float32\)", call, arguments)


@pytest.mark.parametrize(("name", "dtype"), [("do", "float64"), ("o", "float16"), ("lse", "float64")])
def test_dtypes_in_backward(name, dtype):
    arguments = good()
    arguments[name] = arguments[name].astype(dtype)
    assert_raises(TypeError, rf"{name}\.dtype \({dtype}\) must be float32", call_backward, arguments)


def test_lse_of_float16_is_float32():
    arguments = good(dtype=np.float16)
    arguments["lse"] = arguments["lse"].astype(np.float16)
    assert_raises(TypeError, r"lse\.dtype \(float16\) must be float32", call_backward, arguments)


@everywhere
def test_byte_order(call):
    arguments = good()
    other = ">f4" if sys.byteorder == "little" else "<f4"
    arguments["k"] = arguments["k"].astype(other)
    assert_raises(ValueError, rf"k must be in native byte order; got dtype '{other}'", call, arguments)


def misaligned(x: np.ndarray, offset: int) -> np.ndarray:
    """Copy of x whose first byte lies `offset` bytes after an aligned address."""
    memory = np.zeros(x.nbytes + 64, np.uint8)
    copy = memory[offset : offset + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


@everywhere
def test_misaligned_address(call):
    arguments = good()
    arguments["v"] = misaligned(arguments["v"], 2)
    address = f"{arguments['v'].ctypes.data:#x}"
    message = rf"^v must be aligned to its itemsize \(4 bytes\); it begins at address {address}: pass v\.copy\(\)$"
    assert_raises(ValueError, message, call, arguments)


@everywhere
def test_misaligned_strides(call):
    arguments = good()
    record = np.zeros(arguments["q"].shape, np.dtype([("a", np.float32), ("b", np.uint8)]))
    arguments["q"] = record["a"]
    assert_raises(
        ValueError, r"^q must be aligned to its itemsize \(4 bytes\); it has a stride of 5 bytes: pass q\.copy\(\)$", call, arguments
    )


class FakeCupy:
    """Stands in for CuPy where there is none."""

    class ndarray:
        def __init__(self, x):
            self.__dict__.update({name: getattr(x, name) for name in ("shape", "strides", "dtype", "ndim", "size", "flags")})
            self.data = type("Memory", (), {"ptr": x.ctypes.data, "device_id": 0})()


@everywhere
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_numpy_and_cupy_do_not_mix(call, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy)
    arguments = good()
    arguments[name] = FakeCupy.ndarray(arguments[name])
    pattern = r"k and q must come from one library; k is numpy, q is cupy"
    if name != "q":
        pattern = rf"{name} and q must come from one library; {name} is cupy, q is numpy"
    assert_raises(TypeError, pattern, call, arguments)


def test_arrays_on_two_devices(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy)
    arguments = {name: FakeCupy.ndarray(x) for name, x in good().items()}
    arguments["k"].data.device_id = 1
    assert_raises(ValueError, r"k and q must be on one device; k is on 1, q on 0", call_forward, arguments)


# ---- options -------------------------------------------------------------------------------------------------------------------------

BAD_OPTIONS = [
    ({"scale": "1"}, TypeError, r"scale must be a real number; got '1'"),
    ({"scale": True}, TypeError, r"scale must be a real number; got True"),
    ({"scale": 1j}, TypeError, r"scale must be a real number; got 1j"),
    ({"scale": float("nan")}, ValueError, r"scale must be finite; got nan"),
    ({"scale": float("-inf")}, ValueError, r"scale must be finite; got -inf"),
    ({"scale": 10**309}, ValueError, r"scale must be finite"),
    ({"causal": 1}, TypeError, r"causal must be True or False; got 1"),
    ({"causal": None}, TypeError, r"causal must be True or False; got None"),
    ({"causal": np.int64(1)}, TypeError, r"causal must be True or False; got (np\.int64\()?1"),
    ({"causal": "yes"}, TypeError, r"causal must be True or False; got 'yes'"),
    ({"window": 3}, TypeError, r"window must be a tuple \(left, right\) or None; got 3"),
    ({"window": [1]}, TypeError, r"window must be a tuple \(left, right\) or None; got "),
    ({"window": [1, 2.0]}, TypeError, r"window\[1\] must be an integer; got 2\.0"),
    ({"scale": np.ones(1)}, TypeError, r"scale must be a real number; got array\(\[1\.\]\)$"),
    ({"scale": np.array(True)}, TypeError, r"scale must be a real number; got array\(True\)"),
    ({"q_start": np.array(1.5)}, TypeError, r"q_start must be an integer; got 1\.5"),
    ({"window": (1,)}, TypeError, r"window must be a tuple \(left, right\) or None; got \(1,\)"),
    ({"window": (1, 2, 3)}, TypeError, r"window must be a tuple \(left, right\) or None; got \(1, 2, 3\)"),
    ({"window": (1.0, 2)}, TypeError, r"window\[0\] must be an integer; got 1\.0"),
    ({"window": (1, True)}, TypeError, r"window\[1\] must be an integer; got True"),
    ({"window": (1, None)}, TypeError, r"window\[1\] must be an integer; got None"),
    ({"window": (-2, 0)}, ValueError, r"window must hold sizes >= 0, or -1 for no limit; got \(-2, 0\)"),
    ({"window": (0, -5)}, ValueError, r"window must hold sizes >= 0, or -1 for no limit; got \(0, -5\)"),
    ({"q_start": 1.0}, TypeError, r"q_start must be an integer; got 1\.0"),
    ({"q_start": True}, TypeError, r"q_start must be an integer; got True"),
    ({"q_start": "0"}, TypeError, r"q_start must be an integer; got '0'"),
]


@everywhere
@pytest.mark.parametrize(("options", "error", "pattern"), BAD_OPTIONS)
def test_options(call, options, error, pattern):
    assert_raises(error, pattern, call, good(), **options)


@everywhere
def test_unknown_option(call):
    with pytest.raises(TypeError, match="droppout"):
        call(good(), droppout=0.1)


LOOK_ALIKES = [
    ({"causal": True}, {"causal": 1}, TypeError, "causal"),
    ({"scale": 1.0}, {"scale": True}, TypeError, "scale"),
    ({"q_start": 1}, {"q_start": 1.0}, TypeError, "q_start"),
    ({"q_start": 1}, {"q_start": True}, TypeError, "q_start"),
    ({"window": (1, 0)}, {"window": (1.0, 0)}, TypeError, "window"),
    ({"window": (1, 0)}, {"window": (1, False)}, TypeError, "window"),
]
STATE = {"dropout": 0.5, "rng": (1, 2, 3, 8)}  # a prepared call serves all states
BAD_STATES = [
    (STATE, STATE | {"rng": state}, error, pattern)
    for state, error, pattern in (
        ((-1, 2, 3, 8), ValueError, r"^rng\[0\]"),
        ((1, 2**32, 3, 8), ValueError, r"^rng\[1\]"),
        ((1, 2**32), ValueError, r"^rng\[1\]"),
        ((1, 2, 2**30, 8), ValueError, r"^rng\[2\]"),
        ((1, 2, -1, 8), ValueError, r"^rng\[2\]"),
        ((1, 2, 3, 2**30), ValueError, r"^rng\[3\]"),
        ((1, 2, 3, 12), ValueError, r"^rng\[3\]"),
        ((1, 2, 3, True), TypeError, r"^rng\[3\]"),
        ((1, 2, 3), TypeError, "^rng must be a tuple"),
    )
]


@pytest.mark.parametrize("value", [1, 0, "no", None, np.int64(1), np.array(True)], ids=repr)
def test_return_lse_is_strict(value):
    """Also after a call with the true value that it equals."""
    arguments = good()
    for right in (True, False):
        with pytest.raises(AssertionError, match="was reached"):
            call_forward(arguments, return_lse=right)
    assert_raises(TypeError, r"^return_lse must be True or False; got ", call_forward, arguments, return_lse=value)
    tokens = [arguments[name][0].swapaxes(0, 1) for name in "qkv"]
    with pytest.raises(TypeError, match=r"^return_lse must be True or False; got "):
        numba_flash.forward_packed(*tokens, np.array([0, 3]), np.array([0, 4]), return_lse=value, backend="cpu")


@pytest.mark.parametrize("value", [1, 0, "no", None], ids=repr)
def test_flags_of_gradients_are_strict(value):
    """Also after a call with the true value that they equal."""
    arguments, bias = good(), np.zeros((3, 4), np.float32)
    tokens = [arguments[name][0].swapaxes(0, 1) for name in ("do", "q", "k", "v", "o")]
    packed = lambda **flag: numba_flash.backward_packed(
        *tokens, arguments["lse"][0], np.array([0, 3]), np.array([0, 4]), backend="cpu", **flag
    )
    for right in (True, False):
        for function in (lambda **flag: call_backward(arguments, bias=bias, **flag), packed):
            with pytest.raises(AssertionError, match="was reached"):
                function(deterministic=right)
        with pytest.raises(AssertionError, match="was reached"):
            call_backward(arguments, bias=bias, bias_grad=right)
    for flag in ("bias_grad", "deterministic"):
        assert_raises(TypeError, rf"^{flag} must be True or False; got ", call_backward, arguments, bias=bias, **{flag: value})
    with pytest.raises(TypeError, match=r"^deterministic must be True or False; got "):
        packed(deterministic=value)


class Pair(NamedTuple):
    """A tuple of a kind of its own."""

    first: object
    second: object


@pytest.mark.parametrize("name", ["window", "rng"])
def test_a_bad_pair_is_refused_after_an_equal_good_one(name):
    with pytest.raises(AssertionError, match="was reached"):
        call_forward(good(), **{name: Pair(1, 0)})
    assert_raises(TypeError, rf"^{name}\[0\] must be an integer", call_forward, good(), **{name: Pair(1.0, 0)})


@pytest.mark.parametrize("call", [call_forward, call_backward])
@pytest.mark.parametrize(("right", "wrong", "error", "pattern"), LOOK_ALIKES + BAD_STATES)
def test_a_bad_option_is_refused_after_an_equal_good_one(call, right, wrong, error, pattern):
    """1 == 1.0 == True: a call that was prepared for one must not serve the other; nor one for any state a bad state."""
    with pytest.raises(AssertionError, match="was reached"):
        call(good(), **right)
    assert_raises(error, pattern, call, good(), **wrong)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_bad_array_is_refused_after_a_good_one_of_the_same_layout(name):
    arguments = good()
    with pytest.raises(AssertionError, match="was reached"):
        call_forward(arguments)
    masked = np.ma.masked_array(arguments[name], mask=False)
    assert_raises(TypeError, "got MaskedArray", call_forward, arguments | {name: masked})
    assert_raises(ValueError, "aligned", call_forward, arguments | {name: misaligned(arguments[name], 1)})


# ---- backends ------------------------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize(
    "backend", ["sm75", "CPU", "", 3, b"cpu", ["cpu"], np.array("cpu"), np.array(["cpu"]), np.array(["cpu", "simt"])], ids=repr
)
def test_unknown_backend(call, backend):
    arguments = good()
    names = ("do", "q", "k", "v", "o", "lse") if call is call_backward else ("q", "k", "v")
    function = {call_forward: numba_flash.forward, call_backward: numba_flash.backward, call_plan: numba_flash.plan}[call]
    with pytest.raises(ValueError, match=rf"backend must be one of sm90, sm80, simt, cpu, or None; got {re.escape(repr(backend))}"):
        function(*(arguments[name] for name in names), backend=backend)


@pytest.mark.skipif(GPU_REASON is None, reason="there is a GPU")
@pytest.mark.parametrize("backend", ["sm90", "sm80", "simt"])
def test_gpu_demanded_where_there_is_none(backend):
    arguments = good()
    with pytest.raises(NotImplementedError, match=re.escape(f"backend {backend}: {GPU_REASON}")):
        numba_flash.forward(arguments["q"], arguments["k"], arguments["v"], backend=backend)
    with pytest.raises(NotImplementedError, match=re.escape(f"backend {backend}: {GPU_REASON}")):
        numba_flash.plan(arguments["q"], arguments["k"], arguments["v"], backend=backend)


class NoRuntime:
    """CuPy where there is no GPU that it can use, which its runtime says by raising."""

    def __init__(self, status=None):
        self.cuda = SimpleNamespace(runtime=self)
        self._status = status

    class CUDARuntimeError(RuntimeError):
        def __init__(self, status):
            super().__init__(f"the runtime's words about {status}")
            self.status = status

    def getDeviceCount(self):
        if self._status is not None:
            raise self.CUDARuntimeError(self._status)
        return 0


NO_DRIVER = "no NVIDIA GPU found: there is no driver (libcuda.so.1)"
NO_DEVICE = "no NVIDIA GPU found: there is a driver, but no device (/dev/nvidia[0-9]*)"
REASONS = {
    "nothing": (None, False, False, NO_DRIVER),
    "a driver alone": (None, True, False, NO_DEVICE),
    "no CuPy": (None, True, True, "cupy cannot be imported (import of cupy halted; None in sys.modules); install numba_flash[cuda13] or "),
    "CuPy alone": (NoRuntime(35), False, False, NO_DRIVER),
    "an old driver": (NoRuntime(35), True, True, "the NVIDIA driver is too old for CuPy: the runtime's words about 35"),
    "a hidden GPU": (NoRuntime(100), True, True, "no NVIDIA GPU found: the runtime's words about 100"),
    "a broken GPU": (NoRuntime(999), True, True, "no GPU can be used: the runtime's words about 999"),
    "none counted": (NoRuntime(), True, True, "no NVIDIA GPU found"),
}


@pytest.mark.parametrize(("cupy", "driver", "device", "expected"), REASONS.values(), ids=REASONS)
def test_why_there_is_no_gpu(cupy, driver, device, expected, monkeypatch, tmp_path):
    """Packages to install are spoken of only where there is a GPU for them."""
    if driver:
        monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: None)
    else:
        monkeypatch.setattr(cuda_driver, "NAME", "libcuda.so.of.another.planet")
        expected = expected.replace("libcuda.so.1", "libcuda.so.of.another.planet")
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(launch, "glob", lambda pattern: [*tmp_path.glob("nvidia[0-9]*")] if device and "nvidia[0-9]" in pattern else [])
    for name, module in (("cupy", cupy), ("cuda.core", SimpleNamespace()), ("numba_cuda", SimpleNamespace())):
        monkeypatch.setitem(sys.modules, name, module)
    reason = launch._no_gpu.__wrapped__()
    assert reason.startswith(expected)


@pytest.mark.parametrize("module", ["cuda.core", "numba_cuda"])
def test_a_package_that_compiles_is_missed_before_there_is_something_to_compile(module, monkeypatch):
    monkeypatch.setattr(launch.ctypes, "CDLL", lambda name: None)
    monkeypatch.setattr(launch, "glob", lambda pattern: [pattern])
    for name in ("cupy", "cuda.core", "numba_cuda"):
        monkeypatch.setitem(sys.modules, name, None if name == module else NoRuntime())
    assert launch._no_gpu.__wrapped__() == f"{module} is missing; install numba_flash[cuda13] or numba_flash[cuda12]"


def test_cpu_demanded_for_gpu_arrays(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", FakeCupy)
    arguments = {name: FakeCupy.ndarray(x) for name, x in good().items()}
    with pytest.raises(NotImplementedError, match=r"backend cpu: .*CuPy"):
        call_forward(arguments)


def test_options_are_checked_before_the_backend():
    arguments = good()
    with pytest.raises(TypeError, match="q_start"):
        numba_flash.forward(arguments["q"], arguments["k"], arguments["v"], q_start=0.5, backend="simt")


# ---- out -----------------------------------------------------------------------------------------------------------------------------


def out_for(arguments, call):
    if call is call_forward:
        return np.zeros_like(arguments["o"])
    return tuple(np.zeros_like(arguments[name]) for name in ("q", "k", "v"))


with_out = pytest.mark.parametrize(("call", "label"), [(call_forward, r"out"), (call_backward, r"out\[1\]")], ids=["forward", "backward"])


def replaced(out, x):
    """`out` with its array, or the second of three, replaced."""
    return x if isinstance(out, np.ndarray) else (out[0], x, out[2])


@with_out
@pytest.mark.parametrize("bad", ["shape", "dtype", "list", "nothing", "read-only", "stride 0", "masked", "misaligned", "byte order"])
def test_out(call, label, bad):
    arguments = good()
    out = out_for(arguments, call)
    like = out if isinstance(out, np.ndarray) else out[1]
    shape = re.escape(str(like.shape))
    read_only = like.copy()
    read_only.flags.writeable = False
    stride_0 = np.lib.stride_tricks.as_strided(like, strides=(0, *like.strides[1:]))
    array, error, pattern = {
        "shape": (np.zeros((2, 2, 1, 1), np.float32), ValueError, rf"\.shape \(2, 2, 1, 1\) must be {shape}"),
        "dtype": (like.astype(np.float64), TypeError, r"\.dtype \(float64\) must be float32"),
        "list": (like.tolist(), TypeError, " must be a NumPy or CuPy array, .*; got list$"),
        "nothing": ((), TypeError, " must be a NumPy or CuPy array, .*; got tuple$"),
        "read-only": (read_only, ValueError, " must be writeable; it is read-only"),
        "stride 0": (stride_0, ValueError, " must not overlap itself; it has strides"),
        "masked": (np.ma.masked_array(like), TypeError, " must be a NumPy or CuPy array, .*; got MaskedArray"),
        "misaligned": (misaligned(like, 3), ValueError, r" must be aligned to its itemsize \(4 bytes\)"),
        "byte order": (like.astype(like.dtype.newbyteorder()), ValueError, " must be in native byte order"),
    }[bad]
    assert_raises(error, "^" + label + pattern, call, arguments, out=replaced(out, array))


FORWARD_OVERLAPS = [(call_forward, "out", name) for name in ("q", "k", "v")]
BACKWARD_OVERLAPS = [(call_backward, r"out\[1\]", name) for name in ("do", "q", "k", "v", "o")]


@pytest.mark.parametrize(("call", "label", "name"), FORWARD_OVERLAPS + BACKWARD_OVERLAPS)
@pytest.mark.parametrize("shift", [0, 1])
def test_out_overlaps_an_input(call, label, name, shift):
    arguments = good(nq=4, dv=4)
    memory = np.zeros(arguments[name].size + shift, np.float32)
    arguments[name] = memory[: arguments[name].size].reshape(arguments[name].shape)
    out = replaced(out_for(arguments, call), memory[shift:].reshape(arguments[name].shape))
    assert_raises(ValueError, rf"^{label} must not overlap {name}; they share memory", call, arguments, out=out)


@pytest.mark.parametrize("shift", [0, 1])
def test_out_of_a_subclass_overlaps_an_input(shift):
    """What is compared is the memory."""
    arguments = good(nq=4, dv=4)
    memory = np.zeros(arguments["q"].size + shift, np.float32)
    arguments["q"] = memory[: arguments["q"].size].reshape(arguments["q"].shape).view(np.recarray)
    out = memory[shift:].reshape(arguments["q"].shape).view(np.recarray)
    assert_raises(ValueError, r"^out must not overlap q; they share memory", call_forward, arguments, out=out)


def test_out_overlaps_lse():
    arguments = good(d=1, nq=4)
    out = out_for(arguments, call_backward)
    arguments["lse"] = out[0][..., 0]
    assert_raises(ValueError, r"^out\[0\] must not overlap lse", call_backward, arguments, out=out)


def test_outs_overlap_each_other():
    arguments = good(nq=4, dv=4)
    dq, dk, _ = out_for(arguments, call_backward)
    assert_raises(ValueError, r"^out\[1\] must not overlap out\[0\]", call_backward, arguments, out=(dq, dq, None))
    assert_raises(ValueError, r"^out\[2\] must not overlap out\[1\]", call_backward, arguments, out=(dq, dk, dk[::-1]))


@pytest.mark.parametrize("turned", ["q", "out"])
def test_out_must_not_overlap_what_lies_in_reverse(turned):
    """The address of such an array is that of its last row; rows of both that are the same may be far from either."""
    memory, k = np.ones((9, 4), np.float32), np.ones((5, 4), np.float32)
    q, out = (memory[:6][::-1], memory[:6]) if turned == "q" else (memory[:6], memory[:6][::-1])
    with pytest.raises(ValueError, match=r"^out must not overlap q; they share memory"):
        numba_flash.forward(q, k, k, out=out, backend="cpu")


@pytest.mark.parametrize("count", [1, 2, 4])
def test_out_of_backward_has_three_arrays(count):
    arguments = good()
    assert_raises(TypeError, r"out must be a tuple \(dq, dk, dv\)", call_backward, arguments, out=(None,) * count)


@pytest.mark.parametrize("out", [[None] * 3, np.zeros(3), "abc"])
def test_out_of_backward_is_a_tuple(out):
    pattern = rf"out must be a tuple \(dq, dk, dv\); got {type(out).__name__}"
    assert_raises(TypeError, pattern, call_backward, good(), out=out)


def test_a_bad_out_is_refused_after_a_good_one():
    arguments = good()
    with pytest.raises(AssertionError, match="was reached"):
        call_forward(arguments, out=np.zeros_like(arguments["o"]))
    read_only = np.zeros_like(arguments["o"])
    read_only.flags.writeable = False
    assert_raises(ValueError, "read-only", call_forward, arguments, out=read_only)


def test_an_out_that_overlaps_is_refused_after_a_good_one_of_the_same_layout(monkeypatch):
    """The call that was prepared, and has run, for the one serves the other, too: memory is looked at every time."""
    monkeypatch.undo()
    arguments = good(dv=4)
    call_forward(arguments, out=np.zeros_like(arguments["o"]))
    assert_raises(ValueError, r"^out must not overlap q; they share memory", call_forward, arguments, out=arguments["q"])


def interleaved_views():
    """Pairs (x, y, overlap) within one buffer."""
    b = np.zeros((6, 10), np.float32)
    return {
        "even and odd columns": (b[:, ::2], b[:, 1::2], False),
        "even and odd rows, reversed": (b[::-2], b[::2], False),
        "neighbouring blocks": (b[:3], b[3:], False),
        "every third": (b.ravel()[0:58:3], b.ravel()[1:59:3], False),
        "one corner": (b[:4, :6], b[3:, 5:], True),
        "a column in rows": (b[:, 3], b[2], True),
        "reversed": (b, b[::-1], True),
    }


@pytest.mark.parametrize("name", interleaved_views())
def test_overlap_is_exact(name):
    x, y, expected = interleaved_views()[name]
    assert overlap.shared(x, y) is expected


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_views_of_any_strides_share_what_they_share(seed):
    """Some axes in steps, some in reverse, in any order: an element at the same address."""
    rng, memory = np.random.default_rng(seed), np.arange(360, dtype=np.float32).reshape(6, 5, 4, 3)

    def view():
        cut = [slice(*sorted(rng.integers(0, n + 1, 2).tolist()), int(rng.integers(1, 3))) for n in memory.shape]
        turned = tuple(slice(None, None, -1 if rng.random() < 0.5 else 1) for _ in cut)
        return memory[tuple(cut)][turned].transpose(rng.permutation(4))

    x, y = view(), view()
    assert overlap.shared(x, y) is bool(np.isin(x, y).any())
    reach, start = overlap.Reach.of(x), memory.ctypes.data
    if x.size:
        at = x.__array_interface__["data"][0]
        assert (at + reach.low, at + reach.high) == (start + 4 * int(x.min()), start + 4 * int(x.max()) + 4)


def test_interleaved_out_is_accepted(monkeypatch):
    """q, k, v and out of one (N, 3 + 1, D) buffer, as packed models keep them."""
    monkeypatch.undo()
    packed = np.random.default_rng(0).standard_normal((1, 7, 4, 5)).astype(np.float32)
    q, k, v, out = (packed[:, :, i] for i in range(4))
    expected = numba_flash.forward(q.copy(), k.copy(), v.copy(), backend="cpu")
    np.testing.assert_array_equal(numba_flash.forward(q, k, v, out=out, backend="cpu"), expected)
    np.testing.assert_array_equal(packed[:, :, 3], expected)


# ---- memory --------------------------------------------------------------------------------------------------------------------------


def test_out_of_memory_names_the_array():
    """2**60 bytes: more than any address space."""
    one = np.zeros((1, 1, 1, 1), np.float32)
    arguments = {
        "q": np.lib.stride_tricks.as_strided(one, (2**20, 1, 2**30, 256), (0, 0, 0, 0)),
        "k": np.lib.stride_tricks.as_strided(one, (2**20, 1, 1, 256), (0, 0, 0, 0)),
    }
    arguments["v"] = arguments["k"]
    pattern = r"o: cannot allocate 1152921504606846976 bytes for shape \(1048576, 1, 1073741824, 256\), dtype float32"
    assert_raises(MemoryError, pattern, call_forward, arguments)


def test_out_of_memory_beyond_what_numpy_can_express():
    """2**64 bytes: NumPy calls that a ValueError."""
    one = np.zeros((1, 1, 1, 1), np.float32)
    arguments = {
        "q": np.lib.stride_tricks.as_strided(one, (2**24, 1, 2**30, 1), (0, 0, 0, 0)),
        "k": np.lib.stride_tricks.as_strided(one, (2**24, 1, 1, 1), (0, 0, 0, 0)),
        "v": np.lib.stride_tricks.as_strided(one, (2**24, 1, 1, 256), (0, 0, 0, 0)),
    }
    assert_raises(MemoryError, r"o: cannot allocate 18446744073709551616 bytes", call_forward, arguments)


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_out_of_memory_in_backward(name, monkeypatch):
    arguments = good()
    remaining = iter(range(("dq", "dk", "dv").index(name)))
    empty = np.empty

    def allocate(*args, **kwargs):
        if next(remaining, None) is None:
            raise MemoryError
        return empty(*args, **kwargs)

    monkeypatch.setattr(np, "empty", allocate)
    with pytest.raises(MemoryError) as caught:
        call_backward(arguments)
    x = arguments[name[1]]
    assert str(caught.value) == f"{name}: cannot allocate {x.nbytes} bytes for shape {x.shape}, dtype float32"


class NoRoom:
    """An array library with no memory left."""

    class ndarray(FakeCupy.ndarray):
        def __new__(cls, shape, dtype):  # where CuPy allocates
            raise MemoryError

    @staticmethod
    def empty(*arguments):
        raise MemoryError

    asarray = broadcast_to = logaddexp = empty


@pytest.mark.parametrize("function", ["empty", "transposed", "compact", "to_gpu", "to_host"])
def test_out_of_memory_on_a_gpu_names_the_array(function, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", NoRoom)
    x = np.zeros((2, 3), np.float32)
    there = FakeCupy.ndarray(x.T if function == "transposed" else x)
    there.get = NoRoom.empty
    calls = {
        "empty": lambda: arrays.empty("dq", there, (2, 3)),
        "transposed": lambda: arrays.empty("dq", there, (2, 3)),
        "compact": lambda: arrays.compact("dq", there, (2, 3), "float32"),
        "to_gpu": lambda: arrays.to_gpu("dq", x),
        "to_host": lambda: arrays.to_host("dq", there, x),
    }
    with pytest.raises(MemoryError, match=r"^dq: cannot allocate 24 bytes for shape \(2, 3\), dtype float32$"):
        calls[function]()


def test_out_of_memory_on_the_way_back_from_a_gpu(monkeypatch):
    q, there = np.zeros((2, 3), np.float32), FakeCupy.ndarray(np.zeros((2, 3), np.float32))
    there.get = NoRoom.empty
    for name, replacement in (("current_gpu", nullcontext), ("to_gpu", lambda name, x: x), ("empty", lambda *_: there)):
        monkeypatch.setattr(arrays, name, replacement)
    inputs, wanted = ForwardInputs(q, q, q), ForwardResults(call.Wanted("q", q.shape), None)
    outs = (np.ones_like(q), None)
    prepared = call._CallThroughGpu(lambda inputs, results: Prepared(lambda *_: None), bind(q, q, q), inputs, outs, wanted)
    with pytest.raises(MemoryError, match=r"^o: cannot allocate 24 bytes for shape \(2, 3\), dtype float32$"):
        prepared.run(inputs, outs, None)


def test_sizes_are_counted_in_the_dtype_of_each_result(monkeypatch):
    seen = {}
    monkeypatch.setattr(arrays, "check_size", lambda name, like, shape, dtype: seen.update({name: np.dtype(dtype or like.dtype).name}))
    with pytest.raises(AssertionError, match="was reached"):
        call_backward(good(dtype=np.float16), bias=np.zeros((3, 4), np.float32), bias_grad=True)
    assert seen == {"dq": "float16", "dk": "float16", "dv": "float16", "dbias": "float32"}


def test_out_of_memory_in_merge(monkeypatch):
    monkeypatch.setattr(np, "logaddexp", NoRoom.empty)
    o, lse = np.zeros((2, 3), np.float16), np.zeros(2)
    with pytest.raises(MemoryError, match=r"^o: cannot allocate 48 bytes for shape \(2, 3\), dtype float64$"):
        numba_flash.merge(o, lse, o, lse)


@pytest.mark.parametrize(("shape", "size"), [((2, 2**60), 2**61), ((2**40, 2**40), 2**80)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_out_of_memory_in_dropout_mask(shape, size, dropout):
    with pytest.raises(MemoryError, match=rf"^keep: cannot allocate {size} bytes for shape {re.escape(str(shape))}, dtype bool$"):
        numba_flash.dropout_mask(shape, dropout=dropout, rng=(1, 2))


def test_every_backend_is_named_in_the_tests():
    """Add tests for a new backend's refusals when this fails."""
    assert sys.modules["numba_flash.plan"].BACKENDS == ("sm90", "sm80", "simt", "cpu")
