"""The `backend` fixture, and the rules by which tests are left out: always with a reason."""

import pytest
from support import SIMULATED, Backend, no_gpu

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


def pytest_collection_modifyitems(config, items):
    if SIMULATED:
        for item in items:
            if "simulator" not in item.keywords:
                item.add_marker(pytest.mark.skip(reason="not among the small problems that run in the CUDA simulator"))
    elif NO_GPU is not None:
        gpu = [item for item in items if "gpu" in item.keywords]
        if "gpu" in config.option.markexpr:  # asked for by name: say of each why it cannot run
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason=f"no GPU: {NO_GPU}"))
        else:
            items[:] = [item for item in items if "gpu" not in item.keywords]
            config.hook.pytest_deselected(items=gpu)


def pytest_report_header():
    if SIMULATED:
        return "numba_flash: backend simt in the CUDA simulator"
    return "numba_flash: GPU tests run" if NO_GPU is None else f"numba_flash: GPU tests are deselected: {NO_GPU}"
