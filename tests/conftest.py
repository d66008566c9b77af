"""The `backend` fixture, ids of parameters, and the rules by which tests are left out: always with a reason."""

import os
import re
import zlib
from pathlib import Path

import pytest
from support import SIMULATED, Backend, no_gpu, readable

import numba_flash

# Tests in processes of their own see the package that is tested here, wherever they run and whatever is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(numba_flash.__file__).parents[1]), os.environ.get("PYTHONPATH")]))

BACKENDS = (
    [pytest.param(Backend("simt", "numpy"), id="simulator")]
    if SIMULATED
    else [
        pytest.param(Backend("cpu", "numpy"), id="cpu"),
        pytest.param(Backend("sm90", "cupy", refuses=True), id="sm90-cupy", marks=pytest.mark.gpu),
        pytest.param(Backend("sm80", "cupy", refuses=True), id="sm80-cupy", marks=pytest.mark.gpu),
        pytest.param(Backend("simt", "cupy"), id="simt-cupy", marks=pytest.mark.gpu),
        pytest.param(Backend("simt", "numpy"), id="simt-numpy", marks=pytest.mark.gpu),
    ]
)


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request) -> Backend:
    return request.param


pytest_plugins = ["proven", "pytester"]
NO_GPU = None if SIMULATED else no_gpu()


def pytest_make_parametrize_id(config, val, argname):
    return readable(val)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector):
    made = yield
    for item in made if isinstance(made, list) else ():
        if re.search(r"(?<!\d)0x[0-9a-f]", item.name):
            raise collector.CollectError(f"an id that holds an address is another one in each process of pytest-xdist: {item.name}")
    return made


# What takes longest comes first. One process compiles the kernels of the CPU, while others simulate a GPU or compile for one. Further tests
# on the CPU come last: they find those kernels on disk.
FOR_THE_CPU = (
    "test_attention",
    "test_api",
    "test_combinations",
    "test_cpu",
    "test_options",
    "test_dask",
    "test_dask_gpu",
    "test_asv_bench",
    "test_bench",
)
FIRST = (*FOR_THE_CPU, "test_simulator", "test_sm90_compile", "test_sm80_compile", "test_compile")
LAST = ("bench", "contract", "cpu", "processes")  # folders


def scope(nodeid: str) -> str:
    """What the test has in common with those that have to run in the same process, so that each kernel of the CPU is compiled once."""
    file, name = Path(nodeid.split("::")[0]).stem, nodeid.split("::", 1)[-1]
    on_the_cpu = file in FOR_THE_CPU and not re.search(r"\[(sm90|sm80|simt)-|_with_a_gpu", name)
    return "kernels of the CPU" if on_the_cpu else nodeid


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers():
    """More do not make the quick suite faster; whoever asks for more (``-n 60 --full``) gets them."""
    return min(8, (yield))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """By `scope`: the marks of pytest-xdist 3.8 form no groups under pytest 9.2, and nobody is told."""
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return scope(nodeid)

    return ByScope(config, log)


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST) + (item.path.parent.name in LAST))
    for item in items:
        if item.get_closest_marker("full_on_cpu") and item.callspec.params["backend"].name == "cpu":
            item.add_marker("full")
    if not config.option.full:
        deselect(config, items, "full")
    if config.option.affected:  # should time end, it is not always for the same ones
        drawn = lambda item: zlib.crc32(f"{config.option.order} {scope(item.nodeid)}".encode())
        items.sort(key=lambda item: (1, drawn(item)) if item.get_closest_marker("full") else (0, 0))
    if SIMULATED:
        deselect(config, items, "simulator", lambda mark: mark is None or (mark.kwargs.get("full") and not config.option.full))
    elif NO_GPU is not None:
        if "gpu" in config.option.markexpr:  # asked for by name: say of each why it cannot run
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason=f"no GPU: {NO_GPU}"))
        else:
            deselect(config, items, "gpu")


def deselect(config, items, name: str, unwanted=lambda mark: mark is not None):
    """Leave out the tests whose mark is `unwanted`."""
    config.hook.pytest_deselected(items=[item for item in items if unwanted(item.get_closest_marker(name))])
    items[:] = [item for item in items if not unwanted(item.get_closest_marker(name))]


def pytest_report_header(config):
    slow = "slow and exhaustive tests "
    if config.option.affected:
        slow += f"run unless they have passed on the same code; in order {config.option.order}"
    elif config.option.full:
        slow += "run"
    else:
        slow += "are deselected; --affected runs those that a change can affect, --full all"
    if SIMULATED:
        gpu = "backend simt in the CUDA simulator"
    else:
        gpu = "GPU tests run" if NO_GPU is None else f"GPU tests are deselected: {NO_GPU}"
    return [f"numba_flash: {slow}", f"numba_flash: {gpu}"]
