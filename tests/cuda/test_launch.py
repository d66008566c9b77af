"""What a launch hands to the driver, with stand-ins for CuPy and cuda.core: in every call the addresses of its own arrays."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from numba_flash.arrays import Layout
from numba_flash.cuda import launch
from numba_flash.cuda.launch import Gpu, Launch


def on_gpu(address: int) -> SimpleNamespace:
    """All that a call looks at of an array."""
    return SimpleNamespace(data=SimpleNamespace(ptr=address))


class Driver:
    """Keeps the arguments of each launch; does `meanwhile` once, when one is about to be made."""

    def __init__(self):
        self.launched, self.meanwhile = [], None

    def launch(self, stream, config, kernel, *arguments):
        self.launched.append(arguments)

    def stream(self):
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return SimpleNamespace(ptr=0)


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    runtime = SimpleNamespace(getDevice=lambda: 0)
    cupy = SimpleNamespace(runtime=runtime, Device=lambda number: SimpleNamespace(use=lambda: None), get_current_stream=driver.stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cupy))
    monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(LaunchConfig=dict, launch=driver.launch))
    monkeypatch.setattr(launch, "_kernel", lambda *_: "kernel")
    monkeypatch.setattr(launch, "_stream", lambda handle: "stream")
    monkeypatch.setattr(launch, "_thread", SimpleNamespace())
    monkeypatch.setattr(launch, "TensorMaps", lambda x, rows: SimpleNamespace(at=lambda address: ("map", rows, address)))
    return driver


X, Y = Layout.compact((2, 3), "float32"), Layout.compact((5,), "float64")


def small() -> Launch:
    """Of a kernel that gets a tensor map, two arrays, an optional one, and three numbers."""
    return Launch(
        *("module.build", (), Gpu(0, (9, 0), 132)),
        grid=1,
        threads=32,
        operands=((X, 3), (None, 1)),
        extras=((Y, 1),),
        numbers=((7, 8), 0.5),
        maps=((X, 64),),
    )


def arguments(mapped, x, y, *numbers):
    return "map", 64, mapped, 0, 0, 6, 4, x, 1, 2, 3, 0, 12, 4, *[0] * 7, 0, 0, 5, 8, y, 5, 8, *numbers


def flat(arguments):
    return tuple(x for each in arguments for x in (each if isinstance(each, tuple) else (each,)))


def test_every_call_has_its_own_arrays_and_numbers(driver):
    prepared = small()
    prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),), numbers=((1, 2), 0.25))
    prepared(on_gpu(160), on_gpu(320), None, extras=(on_gpu(480),))
    assert [*map(flat, driver.launched)] == [arguments(16, 32, 48, 1, 2, 0.25), arguments(160, 320, 480, 7, 8, 0.5)]


def test_a_call_in_the_middle_of_another_changes_nothing_of_it(driver):
    """As another thread may make one at any time: the list of arguments is not shared."""
    prepared = small()
    driver.meanwhile = lambda: prepared(on_gpu(160), on_gpu(320), None, extras=(on_gpu(480),), numbers=((1, 2), 0.25))
    prepared(on_gpu(16), on_gpu(32), None, extras=(on_gpu(48),))
    assert [*map(flat, driver.launched)] == [arguments(160, 320, 480, 1, 2, 0.25), arguments(16, 32, 48, 7, 8, 0.5)]


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
