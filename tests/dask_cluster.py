"""`numba_flash.dask` on two processes: a long sequence in bounded memory ("long"), and a worker that is killed ("killed")."""

import os
import sys
import threading
import time

import dask.array as da
import numpy as np
import psutil
from distributed import Client, LocalCluster, wait

import numba_flash
import numba_flash.dask

MB = 2**20


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
    assert peak < 150 * MB, peak


def killed(client: Client) -> None:
    """A worker that dies while gradients are on their way: dask computes again what it held."""
    n, d, chunk = 6_000, 32, 500
    rng = np.random.default_rng(4)
    q, k, v, do = (rng.standard_normal((2, n, d)).astype(np.float32) for _ in range(4))
    blocks = [da.from_array(x, chunks=(1, chunk, d)) for x in (q, k, v, do)]
    o, lse = numba_flash.dask.forward(*blocks[:3], return_lse=True)
    gradients = numba_flash.dask.backward(blocks[3], *blocks[:3], o, lse)
    futures = client.compute(gradients)
    while not any("pair" in str(key) for key in client.who_has()):
        time.sleep(0.02)
    victim = min(client.run(os.getpid).values())
    psutil.Process(victim).kill()
    results = client.gather(futures)
    assert victim not in client.run(os.getpid).values(), "nobody has died"
    o, lse = numba_flash.forward(q, k, v, return_lse=True)
    for x, expected in zip(results, numba_flash.backward(do, q, k, v, o, lse), strict=True):
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster, Client(cluster) as client:
        {"long": long, "killed": killed}[sys.argv[1]](client)
    print("right")
