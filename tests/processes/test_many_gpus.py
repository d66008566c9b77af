"""Several GPUs of one machine: arrays on one that is not the current one, threads that have one each, and sequences spread over all."""

import threading

import numpy as np
import pytest
from support import SIMULATED, same_bits
from support.thread_group import together
from test_distributed_gpu import ON_GPU, TOLERANCE, passes

import numba_flash
import numba_flash.distributed as nd

if SIMULATED:
    pytest.skip("the simulator has one GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu
TIMES = 50
SPREAD = {"causal, zigzag": {"causal": True, "layout": "zigzag"}, "full": {"layout": "contiguous"}}


@pytest.fixture(scope="module")
def gpus():
    """How many there are."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"there is {count} GPU")
    return count


@pytest.fixture(scope="module")
def natives(gpus):
    """NCCL's communicator of each GPU, made together."""
    import cupy
    from cupy.cuda import nccl

    if not nccl.available:
        pytest.skip("NCCL is not installed")
    unique = nccl.get_unique_id()

    def make(member):
        with cupy.cuda.Device(member.rank):
            return nccl.NcclCommunicator(gpus, unique, member.rank)

    made = together(gpus, make)
    assert not any(isinstance(x, Exception) for x in made), made
    return made


def arrays(dtype: str, n: int = 320):
    """do, q, k and v, with half as many heads of keys."""
    rng = np.random.default_rng(1)
    return [rng.standard_normal((2, heads, n, 64)).astype(dtype) for heads in (4, 4, 2, 2)]


def on_gpu(number: int, of_host: list, **options) -> list[np.ndarray]:
    """o, lse and gradients by one GPU, on the host."""
    import cupy

    with cupy.cuda.Device(number):
        do, q, k, v = map(cupy.asarray, of_host)
        o, lse = numba_flash.forward(q, k, v, return_lse=True, **options)
        return [x.get() for x in (o, lse, *numba_flash.backward(do, q, k, v, o, lse, **options))]


def spread(natives: list, of_host: list, own_agreement: bool, **given) -> list[list[np.ndarray]]:
    """The whole of o and of the gradients, as each process has them in the end."""
    import cupy

    def run(member):
        with cupy.cuda.Device(member.rank), cupy.cuda.Stream(non_blocking=True):
            native = natives[member.rank]
            comm = native if own_agreement else nd.Nccl(native, host=member)
            own = [nd.shard(cupy.asarray(x), comm=comm, layout=given["layout"]) for x in of_host]
            o, _, *gradients, _ = passes(comm, own, **given)
            assert all(x.device.id == member.rank for x in (o, *gradients))
            return [nd.unshard(x, comm=comm, layout=given["layout"]).get() for x in (o, *gradients)]

    results = together(len(natives), run)
    assert not any(isinstance(x, Exception) for x in results), results
    return results


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", ON_GPU)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_gpu_each_as_on_one(natives, layout, options, dtype):
    """By NCCL, in a ring and gathered, whoever carries what is agreed on; dropout has the bits of the whole."""
    of_host, given = arrays(dtype), ON_GPU[options]
    o, _, *gradients = on_gpu(0, of_host, **given)
    for algorithm, own_agreement in (("ring", False), ("gather", False), ("ring", True)):
        for of_process in spread(natives, of_host, own_agreement, layout=layout, algorithm=algorithm, **given):
            for x, y in zip(of_process, (o, *gradients), strict=True):
                assert x.dtype == y.dtype
                np.testing.assert_allclose(x.astype(np.float32), y.astype(np.float32), rtol=0, atol=TOLERANCE[dtype] * np.abs(y).max())


@pytest.mark.parametrize("given", SPREAD)
def test_bits_do_not_depend_on_who_comes_first(natives, given):
    of_host = arrays("float16", 1000)
    first = spread(natives, of_host, False, algorithm="ring", **SPREAD[given])
    for _ in range(TIMES - 1):
        for one, other in zip(first, spread(natives, of_host, False, algorithm="ring", **SPREAD[given]), strict=True):
            assert all(map(same_bits, one, other))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_arrays_of_a_gpu_that_is_not_the_current_one(gpus, dtype):
    """What is computed, and where results are, goes by the arrays."""
    import cupy

    do, q, k, v = of_host = arrays(dtype)
    expected = on_gpu(0, of_host, causal=True)
    with cupy.cuda.Device(1):
        do, q, k, v = map(cupy.asarray, of_host)
    with cupy.cuda.Device(0):
        o, lse = numba_flash.forward(q, k, v, causal=True, return_lse=True)
        results = (o, lse, *numba_flash.backward(do, q, k, v, o, lse, causal=True))
        assert cupy.cuda.Device().id == 0
    assert all(x.device.id == 1 for x in results)
    cupy.cuda.Device(1).synchronize()
    assert all(same_bits(x.get(), y) for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_threads_with_a_gpu_each(gpus, dtype):
    """At the same time, with the same prepared calls: the bits of one that has all for itself."""
    of_host, results, ready = arrays(dtype), {}, threading.Barrier(gpus)

    def run(number):
        ready.wait(60)
        results[number] = [on_gpu(number, of_host, causal=True) for _ in range(TIMES)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = on_gpu(0, of_host, causal=True)
    assert sorted(results) == list(range(gpus))
    for each in results.values():
        assert all(same_bits(x, y) for one in each for x, y in zip(one, expected, strict=True))


def test_what_is_timed_stays_on_the_device_that_was_current_first(gpus):
    """Whatever a peer makes current before it runs: JAX finds all devices."""
    import cupy

    from numba_flash.bench import timing

    with cupy.cuda.Device(0):
        clock = timing.GpuClock()
    with cupy.cuda.Device(1):
        with clock.current():
            assert cupy.cuda.Device().id == cupy.zeros(1).device.id == 0
        assert cupy.cuda.Device().id == 1
