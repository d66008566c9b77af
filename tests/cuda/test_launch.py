"""What a launch hands to the driver, with stand-ins for CuPy and the driver: in every call the addresses of its own arrays."""

import ctypes
import math
import re
import struct
import sys
import threading
from operator import index
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from support import SIMULATED, named

import numba_flash
from numba_flash import call
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import ForwardInputs, ForwardResults, bind
from numba_flash.cuda.runtime import driver as cuda_driver
from numba_flash.cuda.runtime import launch, packing
from numba_flash.cuda.runtime.launch import Gpu, Launch
from numba_flash.cuda.runtime.tensor_maps import MOST, Described, TensorMaps
from numba_flash.plan import Settings, choose, detailed, tier


def on_gpu(address: int) -> SimpleNamespace:
    """All that a call looks at of an array."""
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


class Error(int):
    """An answer of the driver."""

    name = "CUDA_ERROR_OUT_OF_SPIRITS"


class Driver:
    """Stands in for cuda.bindings. Reads the arguments of each launch where the driver would, each of the type that `kinds` says ("map" for
    a pointer to a tensor map); does `meanwhile` once, when a launch is about to be made. `errors` are what it answers to the next launches,
    `devices` those that were current to launches, and `used` those that were named.
    """

    CUlaunchConfig, CUfunction, cuuint64_t, cuuint32_t = staticmethod(lambda _ptr: _ptr), int, int, int
    CUtensorMapDataType = SimpleNamespace(CU_TENSOR_MAP_DATA_TYPE_UINT16=1)
    CUtensorMapInterleave = SimpleNamespace(CU_TENSOR_MAP_INTERLEAVE_NONE=0)
    CUtensorMapSwizzle = SimpleNamespace(CU_TENSOR_MAP_SWIZZLE_128B=3)
    CUtensorMapL2promotion = SimpleNamespace(CU_TENSOR_MAP_L2_PROMOTION_L2_256B=3)
    CUtensorMapFloatOOBfill = SimpleNamespace(CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE=0)

    def __init__(self):
        self.launched, self.configs, self.kinds, self.meanwhile, self.errors = [], [], None, None, []
        self.current, self.before, self.used, self.devices, self.version = 0, [], [], [], 12030

    def cuLaunchKernelEx(self, config, kernel, pointers, extra):
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        places = (ctypes.c_uint64 * len(self.kinds)).from_address(pointers)
        read = lambda kind, place: struct.unpack(kind, ctypes.string_at(place, struct.calcsize(kind)))[0]
        self.launched.append(tuple(place if kind == "map" else read(kind, place) for kind, place in zip(self.kinds, places, strict=True)))
        self.configs.append((kernel, *struct.unpack("7I4xQQQ", ctypes.string_at(config, 56)), extra))
        self.devices.append(self.current)
        return (Error(self.errors.pop(0) if self.errors else 0),)

    def cuDriverGetVersion(self):
        return Error(0), self.version

    def cuTensorMapEncodeTiled(self, kind, rank, address, *described):
        self.encoded = kind, rank, address, *described
        return Error(self.errors.pop(0) if self.errors else 0), SimpleNamespace(getPtr=lambda: address + 1)


class Device(NamedTuple):
    """Stands in for CuPy's."""

    driver: Driver
    number: int

    def use(self):
        self.driver.used.append(self.number)

    def __enter__(self):
        self.driver.before.append(self.driver.current)
        self.driver.current = self.number
        return self

    def __exit__(self, *_):
        self.driver.current = self.driver.before.pop()


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    runtime, stream = SimpleNamespace(getDevice=lambda: driver.current), SimpleNamespace(ptr=3)
    cupy = SimpleNamespace(runtime=runtime, Device=lambda number: Device(driver, number), get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cupy))
    monkeypatch.setattr(cuda_driver, "library", lambda: driver)
    cuda_driver.launches_early.cache_clear()
    monkeypatch.setattr(launch, "_kernel", lambda *_: 5)
    monkeypatch.setattr(launch, "_thread", threading.local())
    return driver


@pytest.fixture
def maps_at_one_more(monkeypatch):
    """Each tensor map seems to lie one byte after its array."""
    monkeypatch.setattr(TensorMaps, "__missing__", lambda self, addresses: Described([x + 1 for x in addresses], None))


X, Y = Layout.compact((2, 3), "float32"), Layout.compact((5,), "float64")


def small(early: bool = False) -> Launch:
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
        early=early,
    )


HOPPER = Gpu(0, (9, 0), 132)
KINDS = ("map", *"q" * 25, *"qqd")


def arguments(mapped, x, y, *numbers):
    """Of `small`; the map is where the stand-in says."""
    return mapped + 1, 0, 0, 6, 4, x, 1, 2, 3, 0, 12, 4, *[0] * 7, 0, 0, 5, 8, y, 5, 8, *numbers


@pytest.mark.usefixtures("maps_at_one_more")
def test_every_call_has_its_own_arrays_and_numbers(driver):
    driver.kinds, prepared, numbers = KINDS, small(), ((1, 2), 0.25)
    for _ in range(2):
        prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),), numbers=numbers)
        prepared(on_gpu(160), on_gpu(320), None, extras=(on_gpu(480),))
    assert driver.launched == 2 * [arguments(16, 32, 48, 1, 2, 0.25), arguments(160, 320, 480, 7, 8, 0.5)]
    assert len(prepared._blocks) == 1, "calls one after the other use the same memory"
    assert driver.configs == 4 * [(5, 1, 1, 1, 32, 1, 1, 4096, 3, 0, 0, 0)]


@pytest.mark.usefixtures("maps_at_one_more")
def test_every_call_has_the_current_stream(driver):
    """Also one that is used again after another, which the memory of the launch holds."""
    driver.kinds, prepared, streams = KINDS, small(), (3, 0, 0, 4, 3, 4, 0)
    for stream in streams:
        sys.modules["cupy"].cuda.get_current_stream().ptr = stream
        prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),))
    assert driver.configs == [(5, 1, 1, 1, 32, 1, 1, 4096, stream, 0, 0, 0) for stream in streams]


@pytest.mark.usefixtures("maps_at_one_more")
def test_an_early_launch_says_so_in_every_call(driver):
    driver.kinds, prepared = KINDS, small(early=True)
    for stream in (3, 4):
        sys.modules["cupy"].cuda.get_current_stream().ptr = stream
        prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),))
    assert driver.launched == 2 * [arguments(16, 32, 48, 7, 8, 0.5)]
    ((*_, of_first, attribute, count, _), (*_, of_second, again, _, _)) = driver.configs
    assert (of_first, of_second, count, again) == (3, 4, 1, attribute)
    assert ctypes.string_at(attribute, 72) == packing.EARLY


@pytest.mark.usefixtures("maps_at_one_more")
def test_no_launch_is_early_if_the_driver_could_not_capture_it(driver):
    driver.kinds, driver.version, prepared = KINDS, 12020, small(early=True)
    prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),))
    assert driver.configs == [(5, 1, 1, 1, 32, 1, 1, 4096, 3, 0, 0, 0)]


@pytest.mark.usefixtures("maps_at_one_more")
def test_a_call_in_the_middle_of_another_changes_nothing_of_it(driver):
    """As another thread may make one at any time, until the driver has read the arguments."""
    driver.kinds, prepared = KINDS, small()
    prepared(on_gpu(1), on_gpu(1), None, extras=(on_gpu(1),))
    driver.meanwhile = lambda: prepared(on_gpu(160), on_gpu(320), None, extras=(on_gpu(480),), numbers=((1, 2), 0.25))
    prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),))
    assert driver.launched[1:] == [arguments(160, 320, 480, 1, 2, 0.25), arguments(16, 32, 48, 7, 8, 0.5)]


def test_threads_that_share_a_launch_share_no_arguments(driver):
    """What each launch reads is of one call: all that it is given are multiples of one number, and so is its tensor map."""
    driver.kinds, prepared = KINDS, small()
    threads, calls, interval = 4, 200, sys.getswitchinterval()

    def make_calls(first):
        for number in range(first, first + calls):
            at = [on_gpu(64 * number * i) for i in (1, 2, 3)]
            prepared(at[0], at[1], None, extras=(at[2],), numbers=((number, 2 * number), 0.5 * number))

    workers = [threading.Thread(target=make_calls, args=(1 + 1000 * i,)) for i in range(threads)]
    sys.setswitchinterval(1e-6)
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    seen = []
    for place, *others in driver.launched:
        number = others[-3]
        seen.append(number)
        assert (place, *others) == arguments(place - 1, 128 * number, 192 * number, number, 2 * number, 0.5 * number)
    assert sorted(seen) == sorted(1000 * i + 1 + j for i in range(threads) for j in range(calls))
    assert len(prepared._blocks) <= threads


def test_a_gpu_tells_what_the_choice_of_kernels_depends_on(driver, monkeypatch):
    """The numbers are those of an H100, cudaDeviceAttr those of the CUDA runtime; a card says nothing of the two bits of a tick."""
    attributes = {75: 9, 76: 0, 16: 132, 36: 2_619_000, 37: 5120}
    monkeypatch.setattr(sys.modules["cupy"].cuda.runtime, "deviceGetAttribute", lambda what, device: attributes[what], raising=False)
    assert launch.gpu.__wrapped__(3) == Gpu(3, (9, 0), 132, 3_352_320_000_000)
    assert launch.gpu.__wrapped__(-1) == Gpu(-1, (0, 0), 1)
    attributes[36] = 0  # as where a driver does not tell
    assert launch.gpu.__wrapped__(3).bandwidth == math.inf


@pytest.mark.usefixtures("maps_at_one_more")
def test_a_new_thread_names_the_device_and_launches_again(driver):
    """The driver has no context for it until then."""
    driver.kinds, prepared = KINDS, small()
    prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),))
    driver.used, driver.errors = [], [201]
    prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),))
    assert driver.used == [0]
    assert driver.launched == 3 * [arguments(16, 32, 48, 7, 8, 0.5)]


@pytest.mark.usefixtures("maps_at_one_more")
def test_what_the_driver_refuses_is_an_error(driver):
    driver.kinds, driver.errors, prepared = KINDS, [1, 1], small()
    with pytest.raises(RuntimeError, match=r"^module\.build cannot be launched: CUDA_ERROR_OUT_OF_SPIRITS \(1\)$"):
        prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),))


def test_tensor_maps_are_made_once_for_an_address_and_few_are_kept(driver, monkeypatch):
    made, encode = [], cuda_driver.TensorMapEncoder.encode
    monkeypatch.setattr(cuda_driver.TensorMapEncoder, "encode", lambda self, at: made.append(at) or encode(self, at))
    maps = TensorMaps([(X, 64), (X, 32)])
    for addresses in ((16, 32), (16, 32), (16, 48)):
        found = maps[addresses]
        assert found.pointers == [each.getPtr() for each in found.maps] == [at + 1 for at in addresses]
    assert made == [16, 32, 16, 48]
    for i in range(1, 3 * MOST):
        assert len(maps[i, 32].pointers) == 2
        assert len(maps) <= MOST


def test_a_tensor_map_has_axes_from_the_last_on(driver):
    maps = TensorMaps([(Layout((4, 1, 300, 64), (900000, 8, 3000, 2), np.dtype("float16")), 128)])
    maps[(16,)]
    assert driver.encoded == (1, 5, 16, [64, 300, 1, 4, 1], [3000, 16, 900000, 16], [64, 128, 1, 1, 1], [1] * 5, 0, 3, 3, 0)
    driver.errors = [1]
    with pytest.raises(RuntimeError, match=r"^no tensor map can be made: CUDA_ERROR_OUT_OF_SPIRITS \(1\)$"):
        maps[(32,)]


def test_the_driver_is_a_library_of_this_system():
    assert cuda_driver.NAME.startswith("nvcuda" if sys.platform == "win32" else "libcuda.so")


@pytest.mark.parametrize("early", [False, True])
def test_words_of_a_launch_are_those_of_the_driver(early):
    """As cuda.bindings reads them."""
    bindings, places = pytest.importorskip("cuda.bindings.driver"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_driver, "launcher", lambda *addresses: places.append(addresses))
        block = packing.Block(5, 2, 32, 4096, 1, [packing.numba_array(Y, 1)], [7], early)
    block.write(16, 64)
    block.write_stream(3)
    ((config, kernel, _),) = places
    described = bindings.CUlaunchConfig(_ptr=config)
    names = ("gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ", "sharedMemBytes", "hStream", "numAttrs")
    assert (kernel, [int(getattr(described, name)) for name in names]) == (5, [2, 1, 1, 32, 1, 1, 4096, 3, early])
    if early:
        (address,) = struct.unpack("40xQ", ctypes.string_at(config, 48))
        attribute = bindings.CUlaunchAttribute(_ptr=address)
        assert attribute.id == bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert attribute.value.programmaticStreamSerializationAllowed == 1


def test_cuda_bindings_has_what_is_asked_of_it():
    """Names of functions and members, and that they take what they are given; without a driver, their answer is that."""
    pytest.importorskip("cuda.bindings.driver")
    cuda_driver.TensorMapEncoder((1, 1, 2, 300, 64), (76800, 76800, 38400, 128), (1, 1, 1, 64, 64))
    memory = ctypes.create_string_buffer(128)
    assert callable(cuda_driver.launcher(ctypes.addressof(memory), 5, ctypes.addressof(memory) + 56))


class OnGpu:
    """All that a prepared call looks at of CuPy's array; a new one is `OnGpu(shape, dtype)`, of which `__new__` does all, as in CuPy."""

    def __new__(cls, shape, dtype):
        self, x = super().__new__(cls), np.empty(shape, dtype)
        self.shape, self.strides, self.dtype, self.ndim, self.size, self.flags = x.shape, x.strides, x.dtype, x.ndim, x.size, x.flags
        self.data = Memory(1 << 20)
        return self


class Memory(NamedTuple):
    """Of an `OnGpu`."""

    ptr: int
    device_id: int = 0

    def __add__(self, offset: int) -> "Memory":
        return Memory(self.ptr + offset)


@pytest.fixture
def on_stub(driver, monkeypatch):
    """Calls on arrays of an `OnGpu` go to the stub of the driver, and nothing is prepared for them yet."""
    vars(sys.modules["cupy"]).update(ndarray=OnGpu)
    vars(sys.modules["cupy"].cuda).update(alloc=lambda size: Memory(1 << 21))
    for module, attribute, instead in (
        (call, "_prepared", {}),
        (launch, "why_not", lambda x: None),
        (launch, "gpu", lambda device: HOPPER),
    ):
        monkeypatch.setattr(module, attribute, instead)


def test_arrays_of_another_gpu_make_that_the_current_one(driver, on_stub, monkeypatch):
    """From before results are allocated until the last kernel is launched; nobody else asks."""
    q, lse, cuda = OnGpu((2, 64, 512, 64), "float16"), OnGpu((2, 64, 512), "float32"), sys.modules["cupy"].cuda
    q.device, driver.kinds, allocated = Device(driver, 0), (), []

    def noted(allocate):
        return lambda *given: allocated.append(driver.current) or allocate(*given)

    monkeypatch.setattr(cuda, "alloc", noted(cuda.alloc))
    monkeypatch.setattr(OnGpu, "__new__", noted(OnGpu.__new__))
    for _ in range(2):
        driver.current = 1
        numba_flash.forward(q, q, q)
        numba_flash.backward(q, q, q, q, q, lse)
        assert driver.current == 1
    assert len(driver.devices) > 4
    assert len(allocated) == 2 * (1 + 3 + 1)  # o; three gradients; one piece of memory for what is between kernels
    assert {*driver.devices, *allocated} == {0}


# Python functions of the package that run in one call: each is a twentieth of a microsecond or more.
MOST_CALLED = {"forward": 10, "forward out": 14, "backward": 26}


@pytest.mark.parametrize("name", MOST_CALLED)
def test_a_call_that_is_prepared_goes_through_few_functions(name, driver, on_stub):
    package, called = str(Path(numba_flash.__file__).parent), []
    q, k, v, do, o = (OnGpu((2, 64, 512, 64), "float16") for _ in range(5))
    lse = OnGpu(q.shape[:-1], "float32")
    for i, x in enumerate((q, k, v, do, o, lse), start=1):
        x.data = Memory(i << 30)
    run = {
        "forward": lambda: numba_flash.forward(q, k, v),
        "forward out": lambda: numba_flash.forward(q, k, v, out=o),
        "backward": lambda: numba_flash.backward(do, q, k, v, o, lse),
    }[name]
    driver.kinds = ()
    run()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            called.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert len(called) <= MOST_CALLED[name], "\n".join(called)


@pytest.fixture
def launched(on_stub, monkeypatch):
    """Kernels that calls on arrays of an `OnGpu` launch: builder, addresses of arrays and optional arrays, numbers."""
    launched = []
    address = lambda x: x and x.data.ptr

    def note(self, operands, extras=(), numbers=None):
        launched.append((self.builder, [*map(address, operands)], [*map(address, extras)], numbers))

    monkeypatch.setattr(Launch, "on", note)
    return launched


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_few_lengths_on_the_host_are_arguments_of_a_kernel(dtype, launched):
    """Those of each call; the next kernel reads them where that one stores them."""
    q, k, out = (OnGpu((3, 2, n, 64), "float16") for n in (100, 200, 100))
    out.data = Memory(1 << 30)
    for kv_lengths in ([7, 0, 200], [1, 2, 3]):
        launched.clear()
        lengths = {"q_lengths": np.array([[9, 8], [100, 0], [6, 5]], dtype)[:, 0], "kv_lengths": np.array(kv_lengths, dtype)}
        numba_flash.forward(q, k, k, out=out, **lengths)
        (builder, stored, _, words), (_, _, read, _) = launched
        assert builder == "work.lengths.build"
        assert [*np.frombuffer(words, "int64")] == [9, 100, 6, *kv_lengths] + [0] * 58
        assert read == stored
        assert len({*read}) == 2


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "return_lse": True}])
def test_few_queries_take_lengths_as_numbers(options, launched):
    """Of each call, before the other numbers; nothing is launched that stores them."""
    q, k = OnGpu((3, 4, 1, 64), "float16"), OnGpu((3, 2, 20000, 64), "float16")
    for kv_lengths in ([7, 0, 20000], [1, 2, 3]):
        launched.clear()
        numba_flash.forward(q, k, k, kv_lengths=np.array(kv_lengths, np.uint8 if max(kv_lengths) < 256 else np.int64), **options)
        (builder, _, extras, words), *others = launched
        assert builder == "sm80.decode.forward_decode.build"
        assert all(each[0] == "passes.combine.build_many" for each in others)
        assert extras == []
        assert [*np.frombuffer(words[: 8 * 64], "int64")] == kv_lengths + [0] * 61
        assert len(words) > 8 * 64


def test_lengths_of_one_kind_or_of_one_sequence(launched):
    q = OnGpu((2, 100, 64), "float16")
    numba_flash.forward(q, q, q, q_lengths=np.array(33))
    (_, (stored, absent), _, words), (_, _, read, _) = launched
    assert (absent, [stored]) == (None, read)
    assert np.frombuffer(words, "int64")[0] == 33
    launched.clear()
    numba_flash.forward(q, q, q, kv_lengths=np.array(33))
    ((builder, _, read, words),) = launched
    assert builder == "sm90.forward.forward.build"
    assert read == []
    assert np.frombuffer(words[: 8 * 64], "int64")[0] == 33


@pytest.mark.parametrize(("heads", "kernels"), [(4 * 132 // 3, 1), (4 * 132 // 3 + 1, 2)])
def test_kernels_with_few_work_items_take_numbers(heads, kernels, launched):
    """On Hopper up to four for each of 132 multiprocessors, here one for each head; of more, all read an array."""
    q = OnGpu((3, heads, 100, 64), "float16")
    numba_flash.forward(q, q, q, kv_lengths=np.array([7, 0, 100]))
    assert [builder for builder, *_ in launched] == ["work.lengths.build", "sm90.forward.forward.build"][-kernels:]


def test_kernels_that_take_no_numbers_read_lengths_of_keys_where_they_are_stored_once(launched):
    """Those of a backward pass, or with a bias."""
    q, lse = OnGpu((3, 2, 100, 64), "float16"), OnGpu((3, 2, 100), "float32")
    numba_flash.backward(q, q, q, q, q, lse, kv_lengths=np.array([7, 0, 100]))
    stores = [each for each in launched if each[0] == "work.lengths.build"]
    assert len(stores) == 1
    (_, (absent, stored), _, words) = stores[0]
    assert absent is None
    assert [*np.frombuffer(words, "int64")] == [7, 0, 100] + [0] * 61
    readers = [extras for _, _, extras, _ in launched if extras]
    assert len(readers) > 1
    assert all(extras == [stored] for extras in readers)


@pytest.mark.parametrize("count", [0, 65])
def test_no_lengths_and_many_lengths_are_copied(count, launched, monkeypatch):
    copied = OnGpu((count,), "int64")
    monkeypatch.setattr(call.arrays, "to_gpu", lambda name, x: copied)
    q = OnGpu((count, 1, 100, 64), "float16")
    numba_flash.forward(q, q, q, kv_lengths=np.full(count, 7))
    ((builder, _, read, _),) = launched
    assert builder.endswith(".forward.build")
    assert read == [copied.data.ptr]


def test_lengths_on_the_host_are_checked_before_anything_is_launched(launched):
    q = OnGpu((2, 1, 100, 64), "float16")
    numba_flash.forward(q, q, q, kv_lengths=np.array([1, 100]))
    launched.clear()
    with pytest.raises(ValueError, match=r"kv_lengths\[1\] is 101"):
        numba_flash.forward(q, q, q, kv_lengths=np.array([1, 101]))
    assert launched == []


def test_numbers_may_be_bytes(driver):
    driver.kinds, prepared = "q" * 9, Launch("module.build", (), HOPPER, grid=1, threads=1, operands=((Y, 1),), numbers=(5, 6))
    prepared(on_gpu(16), numbers=struct.pack("2q", 8, -9))
    prepared(on_gpu(16))
    assert [numbers[-2:] for numbers in driver.launched] == [(8, -9), (5, 6)]


OF_PTX = {"u64": "Q", "s64": "q", "u32": "I", "s32": "i", "f64": "d", "f32": "f"}
TIERS = {
    "sm90": ("float16", {}),
    "sm80": ("float16", {"dropout": 0.5, "rng": (1, 2)}),
    "simt": ("float32", {"dropout": 0.5, "rng": (1, 2), "causal": True}),
    "simt, plain": ("float32", {}),
}


@pytest.mark.parametrize("name", named(TIERS, ("simt, plain",)))
@pytest.mark.skipif(SIMULATED, reason="the simulator has no parameters")
@pytest.mark.usefixtures("maps_at_one_more")
def test_arguments_lie_as_the_kernel_declares_them(name, request):
    """Each as wide as the compiled code reads it, in its order and number."""
    pytest.importorskip("numba_cuda", reason="the kernel is compiled")
    from compiled import text

    dtype, options = TIERS[name]
    q = np.empty((2, 4, 300, 64), dtype)
    x, lse = Layout.of(q), Layout.compact(q.shape[:-1], "float32")
    inputs, results = ForwardInputs(x, x, x), ForwardResults(x, lse)
    (prepared,) = tier(name.split(",")[0]).prepare_forward(bind(q, q, q, **options), inputs, results, gpu=Gpu(0, (9, 0), 132)).launches
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
    *header, address = packing.numba_array(Layout.of(x), view)[:5]
    described = packing.numba_array(Layout.of(x), view)[5:]
    seen = np.lib.stride_tricks.as_strided(x, described[:ndim], described[ndim:])
    expected = x.reshape((1,) * (ndim - x.ndim) + x.shape) if isinstance(view, int) else np.broadcast_to(x, view)
    np.testing.assert_array_equal(seen, expected)
    assert (*header, address) == (0, 0, expected.size, 8, 0)
    assert len(described) == 2 * ndim


TRIANGLE = {"batch": 384, "hq": 4, "hk": 4, "nq": 384, "nk": 384, "d": 32}
LONG = {"batch": 16, "hq": 64, "hk": 8, "nq": 1, "nk": 4096, "d": 128}


@pytest.mark.parametrize(
    ("dtype", "sizes", "with_bias", "expected"),
    [
        ("float16", TRIANGLE, True, ("sm90", "forward_resident", (192, 128))),
        ("float32", TRIANGLE, True, ("sm80", "forward_short_heads", (16, 32))),
        ("float16", LONG, False, ("sm80", "forward_decode", (16, 128))),
        ("float32", LONG, False, ("simt", "decode_lanes", (8, 64))),
        ("float16", LONG | {"nq": 16}, False, ("sm90", "forward", (128, 128))),
        ("float16", LONG | {"nq": 256, "d": 64}, True, ("sm90", "forward", (128, 128))),
    ],
)
def test_a_plan_names_the_kernel_that_runs(dtype, sizes, with_bias, expected):
    """Whatever a tier prepares for such arrays, be it chosen by their strides."""
    n = SimpleNamespace(**sizes)
    q, k = (np.empty((n.batch, heads, rows, n.d), dtype) for heads, rows in ((n.hq, n.nq), (n.hk, n.nk)))
    bias = np.empty((1, n.hq, n.nq, n.nk), dtype) if with_bias else None
    p, inputs = bind(q, k, k, bias=bias), ForwardInputs(q, k, k, bias=bias)
    chosen = choose(p, inputs, None, gpu=HOPPER)
    [(kernel, tile)] = detailed(chosen, inputs, Settings(gpu=HOPPER)).tiles
    assert (chosen.backend, kernel, tile) == expected


def test_an_array_that_is_absent_is_described_by_zeros():
    assert packing.numba_array(None, 4) == [0] * 13
    assert packing.numba_array(None, (2, 3)) == [0] * 9


# ---- in the simulator --------------------------------------------------------------------------------------------------------------------


def test_a_simulated_launch_has_its_own_arrays_and_numbers(monkeypatch):
    """And those numbers that it was made with, if a call brings none."""
    launched = []

    class Kernel:
        def __getitem__(self, sizes):
            return lambda *arguments: launched.append((sizes, *(x if isinstance(x, tuple) else np.asarray(x).tolist() for x in arguments)))

    monkeypatch.setattr(launch, "_simulated_kernel", lambda builder, config: Kernel())
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(6, dtype=np.float32).reshape(2, 3) + 10
    prepared = Launch("module.build", (), Gpu(-1, (0, 0), 1), grid=2, threads=4, operands=((X, 3),), numbers=(7, 0.5))
    for given, numbers in ((x, (1, 0.25)), (y, None), (x, (2, 0.75)), (y, (3, 1.5))):
        prepared(given, numbers=numbers)
    assert [(sizes, numbers) for sizes, _, extras, *numbers in launched] == [
        ((2, 4), [*n]) for n in ((1, 0.25), (7, 0.5), (2, 0.75), (3, 1.5))
    ]
    assert all(extras == () for _, _, extras, *_ in launched)
