"""`numba_flash.dask` on CuPy arrays: what waits for what, on streams that execute as late as they may. GPUs themselves are at the end."""

from itertools import chain
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from support import SIMULATED, named, same_bits

if SIMULATED:
    pytest.skip("blocks are computed as anywhere", allow_module_level=True)
pytest.importorskip("dask.array", reason="dask is not installed")

import dask
import dask.array as da
from support import late_gpu
from support.dask_group import in_cluster

import numba_flash.dask
from numba_flash.dask import tasks

RNG = np.random.default_rng(0)
CHUNKS = (1, 2, 16, 8)
OPTIONS = {
    "causal": {"causal": True},
    "dropout": {"dropout": 0.3, "rng": (1, 2)},
    "bias": {"bias": RNG.standard_normal((4, 40, 40)).astype(np.float32), "bias_grad": True, "q_start": -24, "causal": True},
    "mask": {"mask": RNG.random((40, 40)) < 0.5, "softcap": 2.0},
}


def inputs(dtype="float32"):
    rng = np.random.default_rng(1)
    return [rng.standard_normal((2, heads, 40, 8)).astype(dtype) for heads in (4, 2, 2, 4)]


def in_blocks(x, put, chunks) -> da.Array:
    """A dask array whose blocks are moved by `put`."""
    x = da.from_array(x, tuple(min(c, n) for c, n in zip(chunks, x.shape, strict=True)))
    return x if put is None else x.map_blocks(put, dtype=x.dtype, meta=late_gpu.empty((0,) * x.ndim, x.dtype))


def blocks_of(arrays, put=None, chunks=CHUNKS, bias_grad=False, **options) -> list[list]:
    """Blocks of o, lse and gradients of both passes, as workers have them."""
    q, k, v, do = (in_blocks(x, put, chunks) for x in arrays)
    o, lse = numba_flash.dask.forward(q, k, v, return_lse=True, **options)
    gradients = numba_flash.dask.backward(do, q, k, v, o, lse, bias_grad=bias_grad, **options)
    return dask.compute(*([*x.to_delayed().ravel()] for x in (o, lse, *gradients)))


def on_stand_in(monkeypatch, arrays, order=(None, 0), put=None, shared=False, **given):
    """The same by the stand-in, and what was done."""
    log = late_gpu.install(monkeypatch, order[1], order[0], shared)
    api = SimpleNamespace(forward=late_gpu.forward, backward=lambda **x: late_gpu.backward(x.pop("do"), **x))
    monkeypatch.setattr(tasks, "api", api)
    monkeypatch.setattr(tasks, "merge", late_gpu.merged)
    with dask.config.set(scheduler="threads", num_workers=3):
        return blocks_of(arrays, put or late_gpu.asarray, **given), log


def equal(expected, results) -> bool:
    pairs = zip(chain(*expected), chain(*results), strict=True)
    return all(isinstance(y, late_gpu.Array) and x.dtype == y.dtype and same_bits(x, y.get()) for x, y in pairs)


def there(x):
    """A block on the GPU, and not only on its way."""
    block = late_gpu.asarray(x)
    late_gpu.current().synchronize()
    return block


ORDERS = [(None, 0), (None, 1), (None, 2)]


@pytest.mark.parametrize("order", named(ORDERS, ["(None, 0)"]))
@pytest.mark.parametrize("options", OPTIONS)
def test_bits_are_those_of_numpy_arrays(options, order, monkeypatch):
    """Threads with streams of their own compute blocks of one call: one that goes on with results of another finds them finished."""
    given = OPTIONS[options] | ({"chunks": (2, 4, 16, 8)} if options == "dropout" else {})
    expected = blocks_of(inputs(), **given)
    results, _ = on_stand_in(monkeypatch, inputs(), order, there, **given)
    assert equal(expected, results)


def test_nobody_waits_on_the_stream_that_all_threads_share(monkeypatch):
    """Tasks put kernels in the order in which they become ready, and dask goes on."""
    expected = blocks_of(inputs(), causal=True)
    results, log = on_stand_in(monkeypatch, inputs(), shared=True, causal=True)
    assert log.log == []
    assert equal(expected, results)
    assert {name for _, name in log.log} == {"kernel", "merge"}


def test_bfloat16_that_dask_has_sent(monkeypatch):
    """Between processes CuPy arrays keep the letters of their dtype alone: V2."""
    sent, arrays = lambda x: there(x.view("V2")), inputs(ml_dtypes.bfloat16)
    expected = blocks_of(arrays, causal=True, q_start=-20)
    results, _ = on_stand_in(monkeypatch, arrays, put=sent, causal=True, q_start=-20)
    assert equal(expected, results)
    parts = [np.float32([1, 2]).astype(ml_dtypes.bfloat16)] * 3
    assert tasks.added([there(x.view("V2")) for x in parts]).get().tolist() == [3, 6]
    assert tasks.rounded(parts[0].dtype, there(parts[0].view("V2"))).dtype == parts[0].dtype


def test_tasks_compute_where_their_blocks_are(monkeypatch):
    """Also on a GPU that is not the thread's current one."""

    def second(x):
        with late_gpu.Device(1):
            return there(x)

    arrays = inputs()
    expected = blocks_of(arrays, causal=True, q_start=-20)
    results, _ = on_stand_in(monkeypatch, arrays, put=second, causal=True, q_start=-20)
    assert {x.device.id for x in chain(*results)} == {1}
    assert equal(expected, results)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_task_that_does_not_wait_is_found(monkeypatch):
    expected, found = blocks_of(inputs(), causal=True), []
    monkeypatch.setattr(tasks, "_settle", lambda stream: None)
    for order in ORDERS:
        with monkeypatch.context() as patch:
            results, _ = on_stand_in(patch, inputs(), order, there, causal=True)
            found.append(not equal(expected, results))
    assert any(found)


def test_blocks_in_two_places(monkeypatch):
    """What is on a GPU does not meet what is not; a mask that is no dask array goes to where it is wanted."""
    late_gpu.install(monkeypatch)
    q, k, v, _ = (in_blocks(x, put, CHUNKS) for x, put in zip(inputs(), (there, there, None, there), strict=True))
    with pytest.raises(TypeError, match=r"^v has blocks of numpy, and q of cupy: map_blocks\(cupy.asarray\), or cupy.asnumpy, moves them$"):
        numba_flash.dask.forward(q, k, v)
    with pytest.raises(TypeError, match=r"^k has blocks of cupy, and q of numpy"):
        numba_flash.dask.forward(v, k, v)
    mask = da.ones((40, 40), dtype=bool)
    with pytest.raises(TypeError, match=r"^mask has blocks of numpy, and q of cupy"):
        numba_flash.dask.forward(q, k, k, mask=mask)
    with pytest.raises(TypeError, match=r"^mask has blocks of cupy, and q of numpy"):
        numba_flash.dask.forward(v, v, v, mask=late_gpu.asarray(np.ones((40, 40), bool)))


# ---- GPUs --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("option", ["causal", "dropout", "mask", "unseen"])
def test_workers_with_a_gpu_each(dtype, option):
    """As dask-cuda starts them; two of them share the GPU where there is one."""
    in_cluster(dtype, option)


@pytest.mark.gpu
def test_a_worker_with_a_gpu_is_killed():
    in_cluster("killed_on_gpus")
