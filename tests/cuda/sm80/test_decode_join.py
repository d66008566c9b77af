"""Results over parts of the keys, made one by the last block: which of them it reads, with the loop as plain Python and no GPU."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from support import SIMULATED

if SIMULATED:
    pytest.skip("the CUDA simulator has no tensor cores", allow_module_level=True)
pytest.importorskip("numba_cuda", reason="the kernels are written with numba-cuda")

from support.on_host import on_host

from numba_flash.cuda import number
from numba_flash.cuda.score import fragment
from numba_flash.cuda.sm80.decode import decode_join

BLOCK_M, THREADS, PARTS, SMEM = 16, 16, 5, 4096


def joined(o_parts, weights, o, group: int, at: SimpleNamespace, ahead: int) -> None:
    """What all threads of the last block write of one block of rows; `weights` (parts, rows) are those in shared memory."""

    def read(address, count):
        assert 0 <= address - o_parts.ctypes.data <= o_parts.nbytes - 4 * count  # nothing beyond the last part
        return np.ctypeslib.as_array((ctypes.c_float * count).from_address(int(address)))

    def weight(address):
        part, row = divmod((int(address) - SMEM) // 4, BLOCK_M)
        return np.float32(weights[part, row]).view(np.uint32)

    no_gpu = SimpleNamespace(
        threadIdx=SimpleNamespace(x=0),
        blockIdx=SimpleNamespace(x=0),
        syncthreads=lambda: None,
        syncthreads_or=lambda last: 1,
        local=SimpleNamespace(array=lambda n, dtype: np.zeros(n, np.float32)),
    )
    ptx = SimpleNamespace(
        global_address=lambda x: x.ctypes.data,
        load_global_four=lambda address: read(address, 4),
        load_global_one=lambda address: read(address, 1)[0],
        load_shared=weight,
        as_float32=lambda x: np.uint32(x).view(np.float32),
        count_arrival=lambda counter, last: last,
    )
    tile = SimpleNamespace(block_m=BLOCK_M, threads=THREADS, group=group)
    x = SimpleNamespace(at=at, b1=at.b1, row0=at.row0, rows=o.shape[3] * group)
    arrivals = np.zeros(1, np.int32)
    with on_host(decode_join, fragment, number, ptx=ptx, cuda=no_gpu, build_weights=lambda *_: lambda *_: None):
        join = decode_join.build_join(tile, o.shape[-1], "float32", False, ahead)
        for no_gpu.threadIdx.x in range(THREADS):
            join(SMEM, o_parts, None, o, None, arrivals, x, PARTS)


@pytest.mark.parametrize(("d", "group", "ahead"), [(8, 1, 4), (3, 3, 8), (4, 3, 1)])
def test_all_parts_of_a_row_are_added(d, group, ahead):
    """Of two axes of batch elements, several blocks of rows, and heads that are rows of one block."""
    rng = np.random.default_rng(0)
    shape = 3, 1, 2 * group, 7, d  # rows of 7 queries: of one head, or of three
    o_parts = rng.standard_normal((PARTS * shape[0], *shape[1:])).astype(np.float32)
    o, expected = np.full(shape, np.nan, np.float32), np.full(shape, np.nan)
    of_parts = o_parts.reshape(PARTS, *shape).astype(np.float64)
    for b0, b1, head in np.ndindex(3, 1, 2):
        for row0 in range(0, 7 * group, BLOCK_M):
            weights = rng.random((PARTS, BLOCK_M)).astype(np.float32)
            joined(o_parts, weights, o, group, SimpleNamespace(b0=b0, b1=b1, head=head * group, row0=row0), ahead)
            for row in range(min(BLOCK_M, 7 * group - row0)):
                query, of_group = divmod(row0 + row, group)
                place = b0, b1, head * group + of_group, query
                expected[place] = weights[:, row] @ of_parts[(slice(None), *place)]
    np.testing.assert_allclose(o, expected, rtol=1e-5, atol=1e-6)
