"""FlashAttention-2 on the CPU (arXiv:2307.08691, Algorithms 1 and 2).

Tiles of q, k, v and do are made contiguous in the accumulation dtype and multiplied by BLAS; what lies between two products is done row
by row. The softmax works in base 2: the packed q (in the backward, k) carries scale * log2(e).

Kernels release the GIL and are run by a pool of Python threads that take blocks of work items until none is left, so that causal problems
balance, and concurrent callers and forked children depend on no parallel runtime. Every item writes its own part of the result and
sums in a fixed order: results do not depend on the number of threads.
"""

import math
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import scipy.linalg.cython_blas  # noqa: F401  (the BLAS of np.dot in kernels, loaded before ThreadpoolController looks for it)
from numba import config, njit, typeof, types
from threadpoolctl import ThreadpoolController

from numba_flash import arrays, mask, numeric
from numba_flash import cpu_tiles as tiles
from numba_flash.fingerprint import source_fingerprint

# Time over that of torch 2.13 SDPA (MKL), medians of interleaved calls, two Zen 3 cores, (B, H, N, D) = (1, 8, 2048, 64), float32:
BLOCK_M, BLOCK_N = 256, 512  # forward 1.07-1.11 full, 0.94-1.03 causal; 192 x 512: 1.05-1.13, 0.95-1.01
BACKWARD_BLOCK_M, BACKWARD_BLOCK_N = 192, 256  # forward + backward 1.01-1.03 full, 0.77-0.95 causal; 256 x 256: 1.04, 0.88
BACKWARD_ITEMS = 16  # the keys of one head are split until there are so many work items
DQ_PARTIAL_BYTES = 64 * 2**20  # cap on the shares of dq that wait for their sum
BLOCKS_PER_THREAD = 64  # that a thread takes, one by one: 2 % faster than 16, 5 to 8 % than 4
ROW_GRAIN = 1024  # rows that are worth a block


# ---- kernels ------------------------------------------------------------------------------------------------------------------------


def kernel(py_func):
    """Compile `py_func` without the GIL, cached on disk under a key that covers every source file of the package."""
    dispatcher = njit(nogil=True)(py_func)
    try:
        dispatcher.enable_caching()
    except RuntimeError:  # no writable cache directory
        return dispatcher
    cache_file = dispatcher._cache._cache_file
    cache_file._source_stamp = (cache_file._source_stamp, source_fingerprint())
    return dispatcher


@kernel
def forward_items(start, stop, q, k, v, o, lse, scale, low, high):
    """Algorithm 1 for the work items ``[start, stop)``: one item is one block of queries of one head, the longest first."""
    number, band = lse.dtype.type, (low, high)
    d, dv, hq, nq, nk = q.shape[4], v.shape[4], q.shape[2], q.shape[3], k.shape[3]
    dtype, size_m, size_n = lse.dtype, min(BLOCK_M, nq), min(BLOCK_N, max(nk, 1))
    blocks = (nq + size_m - 1) // size_m
    q_buffer, acc_buffer, pv_buffer = np.empty(size_m * d, dtype), np.empty(size_m * dv, dtype), np.empty(size_m * dv, dtype)
    k_buffer, v_buffer, s_buffer = np.empty(size_n * d, dtype), np.empty(size_n * dv, dtype), np.empty(size_m * size_n, dtype)
    m_i, l_i, alpha = np.empty(size_m, dtype), np.empty(size_m, dtype), np.empty(size_m, dtype)
    for item in range(start, stop):
        head, block = item // blocks, blocks - 1 - item % blocks
        b0, b1, h = head // hq // q.shape[1], head // hq % q.shape[1], head % hq
        k_head, v_head = k[b0, b1, h // (hq // k.shape[2])], v[b0, b1, h // (hq // k.shape[2])]
        i0 = block * size_m
        m = min(size_m, nq - i0)
        acc, pv = tiles.view2d(acc_buffer, m, dv), tiles.view2d(pv_buffer, m, dv)
        q_tile = tiles.pack(q[b0, b1, h], i0, m, q_buffer, number(scale * numeric.LOG2E))
        acc[:], m_i[:], l_i[:] = 0, tiles.MINUS_INF, 0
        first, last = mask.kv_range(i0, i0 + m, nk, low, high)
        for j0 in range(first, last, size_n):
            n = min(size_n, last - j0)
            k_tile, v_tile, s = tiles.load(k_head, j0, n, k_buffer), tiles.load(v_head, j0, n, v_buffer), tiles.view2d(s_buffer, m, n)
            clean = mask.all_visible(i0, i0 + m, j0, j0 + n, low, high) or tiles.all_finite(v_tile)
            # (1) S = Q K^T
            np.dot(q_tile, k_tile.T, s)
            # (2) m_new = max(m, rowmax S), P = exp(S - m_new), l = exp(m - m_new) l + rowsum P
            tiles.online_softmax(s, m_i, l_i, alpha, (i0, j0), band)
            # (3) acc = exp(m - m_new) acc + P V
            tiles.dot_rows(s, v_tile, pv, clean, (i0, j0), band)
            tiles.rescale_add(acc, alpha, pv)
        # (4) O = acc / l, lse = m + log l
        for r in range(m):
            l_r = l_i[r] if l_i[r] != 0 else number(1)
            for c in range(dv):
                acc[r, c] /= l_r
            lse[b0, b1, h, i0 + r] = number(m_i[r] * numeric.LN2) + np.log(l_r)
        tiles.unpack(o[b0, b1, h], i0, acc, number(1), False)


@kernel
def delta_items(start, stop, do, o, delta):
    """delta = rowsum(dO * O) for the work items ``[start, stop)``: one item is one row."""
    number = delta.dtype.type
    heads, nq = delta.shape[2], delta.shape[3]
    for item in range(start, stop):
        i, head = item % nq, item // nq
        b0, b1, h = head // heads // delta.shape[1], head // heads % delta.shape[1], head % heads
        do_row, o_row, total = do[b0, b1, h, i], o[b0, b1, h, i], number(0)
        for c in range(do_row.size):
            total += numeric.widen(do_row[c]) * numeric.widen(o_row[c])
        delta[b0, b1, h, i] = total


@kernel
def backward_items(start, stop, do, q, k, v, lse, delta, dq_partial, dk, dv, scale, low, high, first_unit, add):
    """Algorithm 2 for the work items ``[start, stop)``: one item is one of the `chunks` shares of the keys of one key head.

    dk and dv are finished here (added to if `add`); dq_partial (units, chunks, group, nq, d) receives each chunk's share of dQ / ln 2.
    """
    number, band = lse.dtype.type, (low, high)
    d, dv_dim, nq, nk, hk = q.shape[4], v.shape[4], q.shape[3], k.shape[3], k.shape[2]
    chunks, group = dq_partial.shape[1], dq_partial.shape[2]
    dtype, size_m, size_n = lse.dtype, min(BACKWARD_BLOCK_M, nq), min(BACKWARD_BLOCK_N, nk)
    blocks = (nk + size_n - 1) // size_n
    q_buffer, do_buffer, dq_buffer = np.empty(size_m * d, dtype), np.empty(size_m * dv_dim, dtype), np.empty(size_m * d, dtype)
    k_buffer, dk_buffer, dk_sum_buffer = np.empty(size_n * d, dtype), np.empty(size_n * d, dtype), np.empty(size_n * d, dtype)
    v_buffer, dv_buffer = np.empty(size_n * dv_dim, dtype), np.empty(size_n * dv_dim, dtype)
    dv_sum_buffer = np.empty(size_n * dv_dim, dtype)
    s_buffer, dp_buffer = np.empty(size_m * size_n, dtype), np.empty(size_m * size_n, dtype)
    for item in range(start, stop):
        unit, chunk = first_unit + item // chunks, item % chunks
        b0, b1, h_k = unit // hk // k.shape[1], unit // hk % k.shape[1], unit % hk
        dq_item = dq_partial[item // chunks, chunk]
        dq_item[:] = 0
        for turn in range((blocks + chunks - 1) // chunks):
            block = turn * chunks + (chunk if turn % 2 == 0 else chunks - 1 - chunk)
            j0 = block * size_n
            n = min(size_n, nk - j0)
            if n <= 0:
                continue
            k_tile = tiles.pack(k[b0, b1, h_k], j0, n, k_buffer, number(scale * numeric.LOG2E))
            v_tile = tiles.load(v[b0, b1, h_k], j0, n, v_buffer)
            dk_tile, dk_acc = tiles.view2d(dk_buffer, n, d), tiles.view2d(dk_sum_buffer, n, d)
            dv_tile, dv_acc = tiles.view2d(dv_buffer, n, dv_dim), tiles.view2d(dv_sum_buffer, n, dv_dim)
            dk_acc[:], dv_acc[:] = 0, 0
            first, last = mask.q_range(j0, j0 + n, nq, low, high)
            for g in range(group):
                h = h_k * group + g
                for i0 in range(first, last, size_m):
                    m = min(size_m, last - i0)
                    q_tile, do_tile = tiles.load(q[b0, b1, h], i0, m, q_buffer), tiles.load(do[b0, b1, h], i0, m, do_buffer)
                    s, dp, dq_tile = tiles.view2d(s_buffer, m, n), tiles.view2d(dp_buffer, m, n), tiles.view2d(dq_buffer, m, d)
                    clean = mask.all_visible(i0, i0 + m, j0, j0 + n, low, high)
                    clean = clean or (tiles.all_finite(k_tile) and tiles.all_finite(q_tile) and tiles.all_finite(do_tile))
                    # (1) S = Q K^T, dP = dO V^T
                    np.dot(q_tile, k_tile.T, s)
                    np.dot(do_tile, v_tile.T, dp)
                    # (2) P = exp(S - lse), dS = P * (dP - delta)
                    tiles.recompute_p(s, dp, lse[b0, b1, h, i0 : i0 + m], delta[b0, b1, h, i0 : i0 + m], (i0, j0), band)
                    # (3) dV += P^T dO
                    tiles.dot_columns(s, do_tile, dv_tile, clean, (i0, j0), band)
                    tiles.accumulate(dv_acc, dv_tile)
                    # (4) dK += dS^T Q
                    tiles.dot_columns(dp, q_tile, dk_tile, clean, (i0, j0), band)
                    tiles.accumulate(dk_acc, dk_tile)
                    # (5) dQ += dS K
                    tiles.dot_rows(dp, k_tile, dq_tile, clean, (i0, j0), band)
                    tiles.accumulate(dq_item[g, i0 : i0 + m], dq_tile)
            tiles.unpack(dk[b0, b1, h_k], j0, dk_acc, number(scale), add)
            tiles.unpack(dv[b0, b1, h_k], j0, dv_acc, number(1), add)


@kernel
def dq_items(start, stop, dq_partial, dq, first_unit):
    """dQ = ln 2 * sum over chunks, in their order, for the work items ``[start, stop)``: one item is one row of one key head's group."""
    chunks, group, nq = dq_partial.shape[1], dq_partial.shape[2], dq_partial.shape[3]
    hk = dq.shape[2] // group
    row = np.empty((1, dq_partial.shape[4]), dq_partial.dtype)
    for item in range(start, stop):
        i, g, part = item % nq, item // nq % group, item // nq // group
        unit = first_unit + part
        b0, b1, h = unit // hk // dq.shape[1], unit // hk % dq.shape[1], unit % hk * group + g
        row[0] = dq_partial[part, 0, g, i]
        for chunk in range(1, chunks):
            row[0] += dq_partial[part, chunk, g, i]
        tiles.unpack(dq[b0, b1, h], i, row, row.dtype.type(numeric.LN2), False)


# ---- running them -------------------------------------------------------------------------------------------------------------------


class Runner:
    """Runs kernels on all cores, one call at a time, with BLAS held to one thread."""

    def __init__(self):
        self.threads = config.NUMBA_NUM_THREADS
        self.blas = ThreadpoolController()
        self.entries = {}
        self.renew()

    def renew(self):
        """A free lock and living threads, also in a forked child."""
        self.lock = threading.Lock()
        self.pool = ThreadPoolExecutor(self.threads, "numba_flash")

    def entry(self, dispatcher, args):
        """The kernel compiled for arrays of these dtypes, whatever their layout (the dispatcher would compile it for each layout)."""
        key = (dispatcher, *(a.dtype.char for a in args if isinstance(a, np.ndarray)))
        if key not in self.entries:
            arguments = [types.Array(typeof(a).dtype, a.ndim, "A") if isinstance(a, np.ndarray) else typeof(a) for a in args]
            self.entries[key] = dispatcher.compile((types.int64, types.int64, *arguments))
        return self.entries[key]

    def __call__(self, dispatcher, items, grain, *args):
        """Run the kernel over work items ``[0, items)``, at least `grain` of them at a time."""
        entry = self.entry(dispatcher, args)
        step = max(grain, items // (self.threads * BLOCKS_PER_THREAD))
        blocks = deque(range(0, items, step))

        def work():
            while True:
                try:
                    start = blocks.popleft()
                except IndexError:
                    return
                entry(start, min(start + step, items), *args)

        helpers = [self.pool.submit(work) for _ in range(min(self.threads, len(blocks)) - 1)]
        try:
            work()
        finally:  # an interrupted call leaves nothing running behind
            blocks.clear()
            for helper in helpers:
                helper.result()


_runner = Runner()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_runner.renew)


def _bits(x):
    """The array as kernels see it: float16 as int16, bfloat16 as uint16."""
    return x.view({"float16": np.int16, "bfloat16": np.uint16}.get(x.dtype.name, x.dtype))


def why_not(problem, x, demanded: bool) -> str | None:
    """Reason why this backend cannot run on arrays like `x`, or None; it knows every dtype and option."""
    return None if isinstance(x, np.ndarray) else "CuPy arrays live on a GPU; copy them to NumPy to compute on the CPU"


def tiles_of(problem) -> tuple:
    """Rows and columns of the score tiles of each pass."""
    return ("forward", (BLOCK_M, BLOCK_N)), ("backward", (BACKWARD_BLOCK_M, BACKWARD_BLOCK_N))


def takes_numpy() -> bool:
    """True: kernels read NumPy arrays in place."""
    return True


def prepare_forward(problem, *layouts):
    """``run(q, k, v, o, lse)`` for arrays of 2 to 5 dimensions; `lse` may be None."""
    return lambda *operands: forward(problem, *_expanded(operands, rows={4}))


def prepare_backward(problem, *layouts):
    """``run(do, q, k, v, o, lse, dq, dk, dv)`` for arrays of 2 to 5 dimensions."""
    return lambda *operands: backward(problem, *_expanded(operands, rows={5}))


def _expanded(operands, rows):
    """Views with all five dimensions; four of those whose index is in `rows`, which have no head dimension."""
    return [x if x is None else arrays.expand(x, 4 if index in rows else 5) for index, x in enumerate(operands)]


def forward(problem, q, k, v, o, lse):
    """Attention by Algorithm 1 of FlashAttention-2 (arXiv:2307.08691).

    Parameters
    ----------
    problem : numba_flash.spec.Problem
        What to compute.
    q, k, v : numpy.ndarray
        Inputs (b0, b1, heads, n, d), of any strides.
    o : numpy.ndarray
        Receives the result (b0, b1, hq, nq, dv).
    lse : numpy.ndarray or None
        Receives the logarithm of the softmax denominators (b0, b1, hq, nq); float32, or float64 for float64 inputs.
    """
    if lse is None:
        lse = np.empty(o.shape[:4], np.float64 if problem.dtype == "float64" else np.float32)
    items = math.prod(o.shape[:3]) * -(-problem.nq // BLOCK_M)
    with _runner.lock, _runner.blas.limit(limits=1, user_api="blas"):
        _runner(forward_items, items, 1, *map(_bits, (q, k, v, o)), lse, float(problem.scale), problem.low, problem.high)


def backward(problem, do, q, k, v, o, lse, dq, dk, dv):
    """Gradients of attention by Algorithm 2 of FlashAttention-2 (arXiv:2307.08691), deterministic.

    Parameters
    ----------
    problem : numba_flash.spec.Problem
        What was computed.
    do, q, k, v, o, lse : numpy.ndarray
        Gradient of o, and what `forward` received and wrote.
    dq, dk, dv : numpy.ndarray
        Receive the gradients, with the shapes of q, k and v.
    """
    if 0 in (q.size, k.size):
        for gradient in (dq, dk, dv):
            gradient[...] = 0
        return
    p, units, group = problem, math.prod(k.shape[:3]), problem.hq // problem.hk
    do, q, k, v, o = map(_bits, (do, q, k, v, o))
    # A work item is a share of the keys of one key head. A wave of heads, or a panel of the queries of one, fits the partial dq buffer.
    chunks = min(-(-BACKWARD_ITEMS // units), -(-p.nk // BACKWARD_BLOCK_N))
    row_bytes = chunks * group * p.d * lse.itemsize
    panel = min(p.nq, max(BACKWARD_BLOCK_M, DQ_PARTIAL_BYTES // row_bytes))
    wave = min(units, max(1, DQ_PARTIAL_BYTES // (row_bytes * p.nq)))
    buffer = np.empty((wave, chunks, group, panel, p.d), lse.dtype)
    delta = np.empty(lse.shape, lse.dtype)
    round_sums = panel < p.nq and q.itemsize == 2
    sums = [_one_head(x, lse.dtype) if round_sums else _bits(x) for x in (dk, dv)]
    with _runner.lock, _runner.blas.limit(limits=1, user_api="blas"):
        _runner(delta_items, delta.size, ROW_GRAIN, do, o, delta)
        for unit in range(0, units, wave):
            heads = min(wave, units - unit)
            for i0 in range(0, p.nq, panel):
                i = slice(i0, min(i0 + panel, p.nq))
                partial, band = buffer[:heads, :, :, : i.stop - i0], (float(p.scale), p.low + i0, p.high + i0)
                inputs = (do[:, :, :, i], q[:, :, :, i], k, v, lse[..., i], delta[..., i])
                _runner(backward_items, heads * chunks, 1, *inputs, partial, *sums, *band, unit, i0 > 0)
                _runner(dq_items, heads * group * (i.stop - i0), ROW_GRAIN, partial, _bits(dq)[:, :, :, i], unit)
            if round_sums:
                head = np.unravel_index(unit, k.shape[:3])
                with np.errstate(over="ignore"):
                    dk[head], dv[head] = sums[0][head], sums[1][head]


def _one_head(x, dtype):
    """One head of `x` in the accumulation dtype, in the place of all of them: where its panels add up without being rounded."""
    head = np.empty(x.shape[3:], dtype)
    return np.lib.stride_tricks.as_strided(head, x.shape, (0, 0, 0, *head.strides))
