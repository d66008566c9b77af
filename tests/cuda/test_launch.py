"""What a launch hands to the driver, with stand-ins for CuPy and the driver: in every call the addresses of its own arrays."""

import ctypes
import re
import struct
import sys
from operator import index
from types import SimpleNamespace

import numpy as np
import pytest
from support import SIMULATED

from numba_flash.arrays import Layout
from numba_flash.cuda import launch
from numba_flash.cuda.launch import Gpu, Launch
from numba_flash.cuda.tensor_maps import MOST, Described, TensorMaps
from numba_flash.plan import tier
from numba_flash.problem import ForwardInputs, ForwardResults, bind


def on_gpu(address: int) -> SimpleNamespace:
    """All that a call looks at of an array."""
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


class Driver:
    """Reads the arguments of each launch where the driver would, each of the type that `kinds` says ("map" for a pointer to a tensor map);
    does `meanwhile` once, when a launch is about to be made; `error` is what it answers.
    """

    def __init__(self):
        self.launched, self.shapes, self.kinds, self.meanwhile, self.error = [], [], None, None, 0

    def launch(self, function, *shape_and_places):
        *shape, stream, pointers, extra = shape_and_places
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        places = (ctypes.c_uint64 * len(self.kinds)).from_address(pointers)
        read = lambda kind, place: struct.unpack(kind, ctypes.string_at(place, struct.calcsize(kind)))[0]
        self.launched.append(tuple(place if kind == "map" else read(kind, place) for kind, place in zip(self.kinds, places, strict=True)))
        self.shapes.append((function, *shape, stream, extra))
        return (self.error,)


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    runtime, stream = SimpleNamespace(getDevice=lambda: 0), SimpleNamespace(ptr=3)
    cupy = SimpleNamespace(runtime=runtime, Device=lambda number: SimpleNamespace(use=lambda: None), get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cupy))
    bindings = SimpleNamespace(CUfunction=lambda handle: ("function", handle), cuLaunchKernel=driver.launch)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=bindings))
    monkeypatch.setattr(launch, "_kernel", lambda *_: SimpleNamespace(handle=5))
    monkeypatch.setattr(launch, "_thread", SimpleNamespace())
    monkeypatch.setattr(TensorMaps, "__missing__", lambda self, addresses: Described(tuple(x + 1 for x in addresses), ()))
    return driver


X, Y = Layout.compact((2, 3), "float32"), Layout.compact((5,), "float64")


def small() -> Launch:
    """Of a kernel that gets a tensor map, two arrays, an optional one, and three numbers."""
    return Launch(
        *("module.build", (), Gpu(0, (9, 0), 132)),
        grid=1,
        threads=32,
        shared_bytes=4096,
        operands=((X, 3), (None, 1)),
        extras=((Y, 1),),
        numbers=((7, 8), 0.5),
        maps=((X, 64),),
    )


KINDS = ("map", *"q" * 25, *"qqd")


def arguments(mapped, x, y, *numbers):
    """Of `small`; the map is where the stand-in says."""
    return mapped + 1, 0, 0, 6, 4, x, 1, 2, 3, 0, 12, 4, *[0] * 7, 0, 0, 5, 8, y, 5, 8, *numbers


def test_every_call_has_its_own_arrays_and_numbers(driver):
    driver.kinds, prepared = KINDS, small()
    for _ in range(2):
        prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),), numbers=((1, 2), 0.25))
        prepared(on_gpu(160), on_gpu(320), None, extras=(on_gpu(480),))
    assert driver.launched == 2 * [arguments(16, 32, 48, 1, 2, 0.25), arguments(160, 320, 480, 7, 8, 0.5)]
    assert len(prepared._blocks) == 1, "calls one after the other use the same memory"
    assert driver.shapes == 4 * [(("function", 5), 1, 1, 1, 32, 1, 1, 4096, 3, 0)]


def test_a_call_in_the_middle_of_another_changes_nothing_of_it(driver):
    """As another thread may make one at any time, until the driver has read the arguments."""
    driver.kinds, prepared = KINDS, small()
    prepared(on_gpu(1), on_gpu(1), None, extras=(on_gpu(1),))
    driver.meanwhile = lambda: prepared(on_gpu(160), on_gpu(320), None, extras=(on_gpu(480),), numbers=((1, 2), 0.25))
    prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),))
    assert driver.launched[1:] == [arguments(160, 320, 480, 1, 2, 0.25), arguments(16, 32, 48, 7, 8, 0.5)]


def test_what_the_driver_refuses_is_an_error(driver):
    class Refused(int):
        name = "CUDA_ERROR_OUT_OF_SPIRITS"

    driver.kinds, driver.error, prepared = KINDS, Refused(1), small()
    with pytest.raises(RuntimeError, match=r"^module\.build cannot be launched: CUDA_ERROR_OUT_OF_SPIRITS$"):
        prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),))


def test_tensor_maps_are_made_once_for_an_address_and_few_are_kept(monkeypatch):
    made = []
    of_one = type(TensorMaps([(X, 64)])._each[0])
    monkeypatch.setattr(of_one, "_describe", lambda self, at: made.append(at) or SimpleNamespace(getPtr=lambda: at + 1))
    maps = TensorMaps([(X, 64), (X, 32)])
    for _ in range(2):
        assert maps[16, 32].pointers == (17, 33)
    assert maps[16, 48].pointers == (17, 49)
    assert made == [16, 32, 48]
    for i in range(3 * MOST):
        assert maps[i, 32].pointers == (i + 1, 33)
        assert max(len(maps), *map(len, maps._each)) <= MOST


OF_PTX = {"u64": "Q", "s64": "q", "u32": "I", "s32": "i", "f64": "d", "f32": "f"}
TIERS = {
    "sm90": ("float16", {}),
    "sm80": ("float16", {"dropout": 0.5, "rng": (1, 2)}),
    "simt": ("float32", {"dropout": 0.5, "rng": (1, 2), "causal": True}),
}


@pytest.mark.parametrize("name", ["sm90", *(pytest.param(name, marks=pytest.mark.full) for name in ("sm80", "simt"))])
@pytest.mark.skipif(SIMULATED, reason="the simulator has no parameters")
def test_arguments_lie_as_the_kernel_declares_them(name, request):
    """Each as wide as the compiled code reads it, in its order and number."""
    pytest.importorskip("numba_cuda", reason="the kernel is compiled")
    from compiled import text

    dtype, options = TIERS[name]
    q = np.empty((2, 4, 300, 64), dtype)
    x, lse = Layout.of(q), Layout.compact(q.shape[:-1], "float32")
    inputs, results = ForwardInputs(x, x, x), ForwardResults(x, lse)
    (prepared,) = tier(name).prepare_forward(bind(q, q, q, **options), inputs, results, gpu=Gpu(0, (9, 0), 132)).launches
    (declared,) = re.findall(r"\.entry \w+\((.*?)\)", text(prepared.builder, prepared.config, (9, 0)), re.DOTALL)
    mapped, driver = len(prepared.maps), request.getfixturevalue("driver")  # after the compiler has looked for its own
    driver.kinds = ["map" if "b8" in each else OF_PTX[re.search(r"\.([usf]\d+)", each)[1]] for each in declared.split(",")]
    assert driver.kinds[:mapped].count("map") == driver.kinds.count("map") == mapped
    addresses = [1 << 20, 2 << 20, 3 << 20, 4 << 20, 5 << 20]  # of q, k, v, o, lse
    prepared(*map(on_gpu, [*addresses[:mapped], *addresses[3 if mapped else 0 :]]))
    expected = [address + 1 for address in addresses[:mapped]]
    for array, address in [*zip((q, q, q, q.view(np.uint32) if mapped else q, np.empty(lse.shape, "f4")), addresses, strict=True)][
        3 if mapped else 0 :
    ]:
        first = [1] * ((4 if array.ndim == 3 else 5) - array.ndim)
        expected += [0, 0, array.size, array.itemsize, address, *first, *array.shape, *[0 for _ in first], *array.strides]
    for number in prepared.numbers:
        expected += number if isinstance(number, tuple) else [number]
    (launched,) = driver.launched
    assert [*launched] == [index(x) % 2**64 if kind == "Q" else x for x, kind in zip(expected, driver.kinds, strict=True)]


VIEWS = {
    "as it is": ((2, 3, 4), (2, 3, 4)),
    "leading axes": ((3, 4), 5),
    "broadcast in front": ((4,), (2, 3, 4)),
    "broadcast between": ((2, 1, 4), (2, 3, 4)),
    "broadcast at the end": ((2, 3, 1), (2, 3, 4)),
    "in front and at the end": ((3, 1), (2, 3, 4)),
    "a number": ((), (2, 3, 4)),
}


@pytest.mark.parametrize(("shape", "view"), VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("strided", [False, True])
def test_an_array_is_seen_with_more_axes_or_broadcast(shape, view, strided):
    x = np.arange(float(np.prod(shape))).reshape(shape)
    x = np.repeat(x, 2, axis=-1)[..., ::2] if strided and shape else x
    ndim = view if isinstance(view, int) else len(view)
    *header, address = launch._numba_array(Layout.of(x), view)[:5]
    described = launch._numba_array(Layout.of(x), view)[5:]
    seen = np.lib.stride_tricks.as_strided(x, described[:ndim], described[ndim:])
    expected = x.reshape((1,) * (ndim - x.ndim) + x.shape) if isinstance(view, int) else np.broadcast_to(x, view)
    np.testing.assert_array_equal(seen, expected)
    assert (*header, address) == (0, 0, expected.size, 8, 0)
    assert len(described) == 2 * ndim


def test_an_array_that_is_absent_is_described_by_zeros():
    assert launch._numba_array(None, 4) == [0] * 13
    assert launch._numba_array(None, (2, 3)) == [0] * 9
