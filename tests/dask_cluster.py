"""`numba_flash.dask` on two processes: a long sequence in bounded memory (`long`), and a worker that is killed (`killed`).

With CuPy's blocks, each worker started as dask-cuda does: a dtype and one of `OPTIONS` (results in that dtype), or `killed_on_gpus`.
"""

import logging
import os
import sys
import threading
import time

import dask
import dask.array as da
import numpy as np
import psutil
from distributed import Client, LocalCluster, Nanny, Scheduler, SpecCluster, wait

import numba_flash
import numba_flash.dask

MB = 2**20
WORKERS = 2


def peak_memory(workers: list[int], seconds: float = 0.05):
    """Bytes beyond those at the beginning that the worker which needs most has had at some time; a function that returns them."""
    processes = [psutil.Process(pid) for pid in workers]
    begin = [each.memory_info().rss for each in processes]
    peak, done = [0], threading.Event()

    def watch():
        while not done.wait(seconds):
            peak[0] = max(peak[0], *(each.memory_info().rss - first for each, first in zip(processes, begin, strict=True)))

    threading.Thread(target=watch, daemon=True).start()

    def end():
        done.set()
        return peak[0]

    return end


def long(client: Client) -> None:
    """100,000 tokens, each seeing those before it; the matrix of scores would have 40 GB."""
    n, d, chunk = 100_000, 16, 5_000
    blocks = da.random.default_rng(3)
    q, k, v = (blocks.standard_normal((1, n, d), dtype=np.float32, chunks=(1, chunk, d)) for _ in range(3))
    first = slice(2 * chunk)
    warm = numba_flash.dask.forward(q[:, first], k[:, first], v[:, first], causal=True).compute()
    end = peak_memory([*client.run(os.getpid).values()])
    begin = time.perf_counter()
    o = numba_flash.dask.forward(q, k, v, causal=True).persist()
    wait(o)
    peak = end()
    print(f"{time.perf_counter() - begin:.1f} s, {peak / MB:.0f} MB in the worker that needed most")
    np.testing.assert_allclose(o[:, first].compute(), warm, rtol=1e-5, atol=1e-6)
    rows = slice(n - 300, n)
    own = [np.require(x.compute(), requirements="A") for x in (q[:, rows], k, v)]
    expected = numba_flash.forward(*own, causal=True)
    np.testing.assert_allclose(o[:, rows].compute(), expected, rtol=1e-4, atol=1e-6)
    assert peak < 75 * MB, peak  # it is 23; several times that if all blocks are there before the first are merged


def killed(client: Client, put=None) -> None:
    """A worker that dies while gradients are on their way: dask computes again what it held."""
    n, d, chunk = 6_000, 32, 500
    rng = np.random.default_rng(4)
    q, k, v, do = (rng.standard_normal((2, n, d)).astype(np.float32) for _ in range(4))
    blocks = [placed(da.from_array(x, chunks=(1, chunk, d)), put) for x in (q, k, v, do)]
    o, lse = numba_flash.dask.forward(*blocks[:3], return_lse=True)
    gradients = numba_flash.dask.backward(blocks[3], *blocks[:3], o, lse)
    futures = client.compute([fetched(x, put) for x in gradients])
    while not any("pair" in str(key) for key in client.who_has()):
        time.sleep(0.02)
    victim = min(client.run(os.getpid).values())
    psutil.Process(victim).kill()
    results = client.gather(futures)
    assert victim not in client.run(os.getpid).values(), "nobody has died"
    o, lse = numba_flash.forward(q, k, v, return_lse=True)
    for x, expected in zip(results, numba_flash.backward(do, q, k, v, o, lse), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-4 if put else 1e-5)


# ---- GPUs --------------------------------------------------------------------------------------------------------------------------------


def placed(x: da.Array, put) -> da.Array:
    """An array whose blocks are moved by `put`, if there is one."""
    return x if put is None else x.map_blocks(put, dtype=x.dtype, meta=put(np.empty((0,) * x.ndim, x.dtype)))


def fetched(x: da.Array, put) -> da.Array:
    """One whose blocks are back in host memory."""
    return x if put is None else x.map_blocks(on_host, x.dtype, dtype=x.dtype, meta=np.empty((0,) * x.ndim, x.dtype))


def on_host(block, dtype) -> np.ndarray:
    """A copy of a block of a GPU, whose bfloat16 has no name any more if dask has sent it."""
    import cupy

    assert isinstance(block, cupy.ndarray), type(block)
    return cupy.asnumpy(block).view(dtype)


def one_worker_per_gpu(count: int, gpus: int) -> SpecCluster:
    """Workers of one thread; each sees all GPUs, its own first, as dask-cuda has it.

    Their memory has no limit: by default it is a thread's share of what the machine says that it has, and CUDA itself may take that.
    """
    seen = lambda rank: ",".join(str((rank + i) % gpus) for i in range(gpus))
    quiet = {"nthreads": 1, "silence_logs": logging.WARNING, "memory_limit": None}
    options = [quiet | {"env": {"CUDA_VISIBLE_DEVICES": seen(rank)}} for rank in range(count)]
    workers = {rank: {"cls": Nanny, "options": each} for rank, each in enumerate(options)}
    return SpecCluster(workers, scheduler={"cls": Scheduler, "options": {"dashboard": False}}, silence_logs=logging.WARNING)


def gpu_of_worker() -> tuple[str, str]:
    """What a worker sees, and the address of the GPU that it uses."""
    import cupy

    return os.environ["CUDA_VISIBLE_DEVICES"], cupy.cuda.Device().pci_bus_id


OPTIONS = {
    "causal": {"causal": True},
    "dropout": {"dropout": 0.3, "rng": (1, 2)},
    "mask": {"mask": np.random.default_rng(5).random((700, 800)) < 0.6, "softcap": 3.0},
    "unseen": {"causal": True, "q_start": -300},
}
TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 2e-4}


def on_gpus(client: Client, put, dtype: str, option: str) -> None:
    """Both passes beside one call; the same bits twice, wherever tasks have run."""
    import ml_dtypes

    seen = client.run(gpu_of_worker)
    print(seen)
    assert len({first for first, _ in seen.values()}) == len({address for _, address in seen.values()}), "each uses the first that it sees"
    rng = np.random.default_rng(6)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    shapes = ((4, 700, 64), (2, 800, 64), (2, 800, 64), (4, 700, 64))
    q, k, v, do = (rng.standard_normal(shape).astype(kind) for shape in shapes)
    options = OPTIONS[option]
    o, lse = numba_flash.forward(*map(put, (q, k, v)), return_lse=True, **moved(options, put))
    expected = [o, lse, *numba_flash.backward(*map(put, (do, q, k, v)), o, lse, **moved(options, put))]
    first, second = (computed((q, k, v, do), put, options) for _ in range(2))
    for x, again, whole in zip(first, second, expected, strict=True):
        assert x.tobytes() == again.tobytes(), "other bits"
        assert x.dtype == whole.dtype
        x, whole = x.astype("float32"), whole.get().astype("float32")
        assert np.array_equal(np.isinf(x), np.isinf(whole))
        error, largest = np.abs(np.where(np.isinf(x), 0, x - whole)).max(), np.abs(whole[np.isfinite(whole)]).max()
        assert error <= TOLERANCE[dtype] * largest, f"{error} of {largest}"
    sent = client.run(lambda dask_worker: dask_worker.transfer_outgoing_count_total)
    print(sent)
    assert sum(sent.values()) > 0, "no block has gone from one worker to another"


def moved(options: dict, put) -> dict:
    """Options of a call on one GPU."""
    return {name: put(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


def computed(arrays, put, options: dict) -> tuple:
    """o, lse and gradients, of blocks, in host memory."""
    chunks = (4, 200, 64) if "dropout" in options else (2, 200, 64)
    q, k, v, do = (placed(da.from_array(x, tuple(min(c, n) for c, n in zip(chunks, x.shape, strict=True))), put) for x in arrays)
    o, lse = numba_flash.dask.forward(q, k, v, return_lse=True, **options)
    gradients = numba_flash.dask.backward(do, q, k, v, o, lse, **options)
    return dask.compute(*(fetched(x, put) for x in (o, lse, *gradients)))


def main(program: str, *option: str) -> None:
    if program in ("long", "killed"):
        cluster = LocalCluster(n_workers=WORKERS, threads_per_worker=1, processes=True, dashboard_address=None)
        with cluster, Client(cluster) as client:
            {"long": long, "killed": killed}[program](client)
    else:
        import cupy

        gpus = cupy.cuda.runtime.getDeviceCount()
        with one_worker_per_gpu(max(WORKERS, gpus), gpus) as cluster, Client(cluster) as client:
            if program in TOLERANCE:
                on_gpus(client, cupy.asarray, program, *option)
            else:
                killed(client, cupy.asarray)
    print("right")


if __name__ == "__main__":
    main(*sys.argv[1:])
