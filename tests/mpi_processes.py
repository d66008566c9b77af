"""`numba_flash.distributed` on processes of MPI: all right ("right"), also with arrays of CuPy on one GPU ("gpu") or of its stand-in
("late"); one whose arrays have another shape ("differ"), and one that dies between two calls ("dies") or in the middle of one
("dies_computing").
"""

import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import numba_flash
import numba_flash.distributed as nd
from numba_flash.distributed import loops

DIED = 3


def right() -> None:
    """Both passes of both layouts by both algorithms, as in one process."""
    comm, rng, lengths = MPI.COMM_WORLD, np.random.default_rng(0), np.array([70, 132])
    q, do = (rng.standard_normal((2, 4, 132, 16)) for _ in range(2))
    k, v = (rng.standard_normal((2, 2, 132, 16)) for _ in range(2))
    for options in ({"causal": True}, {"window": (20, 5), "softcap": 2.0}, {"dropout": 0.3, "rng": (1, 2)}, {"kv_lengths": lengths}):
        o, lse = numba_flash.forward(q, k, v, return_lse=True, **options)
        expected = (o, *numba_flash.backward(do, q, k, v, o, lse, **options))
        for layout in ("contiguous", "zigzag"):
            for algorithm in ("ring", "gather"):
                own = [nd.shard(x, comm=comm, layout=layout) for x in (q, k, v, do)]
                given = options | {"comm": comm, "layout": layout, "algorithm": algorithm}
                o, lse = nd.forward(*own[:3], return_lse=True, **given)
                results = (o, *nd.backward(own[3], *own[:3], o, lse, **given))
                for x, all_of_x in zip(results, expected, strict=True):
                    whole = nd.unshard(x, comm=comm, layout=layout)
                    np.testing.assert_allclose(whole, all_of_x, rtol=1e-9, atol=1e-11, err_msg=f"{layout}, {algorithm}, {options}")
    comm.Barrier()
    print(f"process {comm.Get_rank()} is right", flush=True)


def on_gpu(install: bool) -> None:
    """The bits of NumPy arrays, or nearly, by way of the host."""
    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(0)
    q, do = (rng.standard_normal((2, 4, 132, 16)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((2, 2, 132, 16)).astype(np.float32) for _ in range(2))
    given = {"comm": comm, "layout": "zigzag", "algorithm": "ring", "causal": True}
    expected = passes(do, q, k, v, lambda x: x, given)
    if install:
        from support import late_gpu

        late_gpu.install(pytest.MonkeyPatch(), comm.Get_rank())
        asarray = late_gpu.asarray
    else:
        from cupy import asarray
    for x, y in zip(passes(do, q, k, v, asarray, given), expected, strict=True):
        np.testing.assert_allclose(x.get(), y, rtol=1e-4, atol=1e-5)
    comm.Barrier()
    print(f"process {comm.Get_rank()} is right", flush=True)


def passes(do, q, k, v, put, given):
    """o, dq, dk, dv of this process, and the whole of each."""
    spread = {name: given[name] for name in ("comm", "layout")}
    own = [put(nd.shard(x, **spread)) for x in (q, k, v, do)]
    o, lse = nd.forward(*own[:3], return_lse=True, **given)
    results = (o, *nd.backward(own[3], *own[:3], o, lse, **given))
    return [*results, *(nd.unshard(x, **spread) for x in results)]


def differ() -> None:
    """The last process has another number of heads: all are told."""
    comm = MPI.COMM_WORLD
    last = comm.Get_size() - 1
    x = np.ones((1 if comm.Get_rank() == last else 2, 16, 8))
    message = rf"^q must be the same in all processes; got float64 \(2, N, 8\) in process 0 and float64 \(1, N, 8\) in process {last}$"
    with pytest.raises(ValueError, match=message):
        nd.forward(x, x, x, comm=comm)
    print(f"process {comm.Get_rank()} is right", flush=True)


def dies(computing: bool) -> None:
    """Process 1 ends between the passes, or in the middle of the second; the others say so, and end."""
    comm = nd.Mpi(MPI.COMM_WORLD)
    x = np.ones((1, 64, 8))
    o, lse = nd.forward(x, x, x, comm=comm, algorithm="ring", return_lse=True)
    nd.backward(x, x, x, x, o, lse, comm=comm, algorithm="ring")  # which may have to be compiled
    comm.timeout = 1
    if comm.rank == 1:
        if not computing:
            os._exit(DIED)
        loops.api = SimpleNamespace(backward=lambda **x: os._exit(DIED))
    try:
        nd.backward(x, x, x, x, o, lse, comm=comm, algorithm="ring")
    except TimeoutError as error:
        print(error, flush=True)
        os._exit(DIED)  # MPI's own end would wait for process 1


if __name__ == "__main__":
    programs = {"right": right, "differ": differ, "late": lambda: on_gpu(True), "gpu": lambda: on_gpu(False)}
    programs |= {"dies": lambda: dies(False), "dies_computing": lambda: dies(True)}
    for program in sys.argv[1:]:
        programs[program]()
