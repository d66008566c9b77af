"""The `backend` fixture, ids of parameters, and the rules by which tests are left out: always with a reason."""

import os
import re
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
        pytest.param(Backend("sm90", "cupy"), id="sm90-cupy", marks=pytest.mark.gpu),
        pytest.param(Backend("simt", "cupy"), id="simt-cupy", marks=pytest.mark.gpu),
        pytest.param(Backend("simt", "numpy"), id="simt-numpy", marks=pytest.mark.gpu),
    ]
)


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request) -> Backend:
    return request.param


NO_GPU = None if SIMULATED else no_gpu()


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests that are slow or exhaustive (marked `full`)")


def pytest_make_parametrize_id(config, val, argname):
    return readable(val)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector):
    made = yield
    for item in made if isinstance(made, list) else ():
        if re.search(r"(?<!\d)0x[0-9a-f]", item.name):
            raise collector.CollectError(f"an id that holds an address is another one in each process of pytest-xdist: {item.name}")
    return made


def pytest_collection_modifyitems(config, items):
    if not config.option.full:
        deselect(config, items, "full")
    if SIMULATED:
        for item in items:
            if "simulator" not in item.keywords:
                item.add_marker(pytest.mark.skip(reason="not among the small problems that run in the CUDA simulator"))
    elif NO_GPU is not None:
        if "gpu" in config.option.markexpr:  # asked for by name: say of each why it cannot run
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason=f"no GPU: {NO_GPU}"))
        else:
            deselect(config, items, "gpu")


def deselect(config, items, mark: str):
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker(mark)])
    items[:] = [item for item in items if not item.get_closest_marker(mark)]


def pytest_report_header(config):
    full = "slow and exhaustive tests run" if config.option.full else "slow and exhaustive tests are deselected; --full runs them too"
    if SIMULATED:
        gpu = "backend simt in the CUDA simulator"
    else:
        gpu = "GPU tests run" if NO_GPU is None else f"GPU tests are deselected: {NO_GPU}"
    return [f"numba_flash: {full}", f"numba_flash: {gpu}"]
