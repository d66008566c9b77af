"""FlashAttention-2 on the CPU (arXiv:2307.08691, Algorithms 1 and 2).

Tiles of q, k, v and do are packed into contiguous buffers of the accumulation dtype and multiplied by BLAS; what lies between two products
is done row by row while the score tile is in the second-level cache. The softmax works in base 2: the packed q carries scale * log2(e).

Kernels release the GIL and are run by a pool of Python threads that take blocks of work items until none is left, so that causal problems
balance, and concurrent callers and forked children need no care from a parallel runtime. Every item writes its own part of the
result and sums in a fixed order: results do not depend on the number of threads.

float16 arrays reach the kernels as int16, bfloat16 arrays as uint16 (`numeric.widen`).
"""

import math
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import scipy.linalg.cython_blas  # noqa: F401  (the BLAS behind np.dot in kernels: loaded before its threads are counted)
from numba import config, njit, typeof, types
from numba.extending import intrinsic
from threadpoolctl import ThreadpoolController

from numba_flash import mask, numeric
from numba_flash.fingerprint import source_fingerprint

BLOCK_M, BLOCK_N = 128, 512
BACKWARD_BLOCK_M, BACKWARD_BLOCK_N = 128, 256
ITEM_TARGET = 16  # the backward splits keys until it has this many work items
DQ_PARTIAL_BYTES = 64 * 2**20  # cap on the partial dq buffers
BLOCKS_PER_THREAD = 16
LOG2E, LN2 = 1.0 / math.log(2.0), math.log(2.0)

_MINUS_INF = -np.inf


# ---- tiles --------------------------------------------------------------------------------------------------------------------------


@intrinsic
def as_contiguous(typingctx, x):
    """The 1-D array `x`, whose stride is known to be its item size, typed as contiguous, so that LLVM vectorises loops over it."""
    contiguous = x.copy(layout="C")

    def codegen(context, builder, signature, args):
        context.nrt.incref(builder, contiguous, args[0])
        return args[0]

    return contiguous(x), codegen


@njit(fastmath={"contract", "reassoc", "nsz"})
def load_row(tile_row, row, factor):
    """``tile_row = factor * row``; returns 0 if all of it is finite, else NaN."""
    check = tile_row.dtype.type(0)
    for c in range(tile_row.size):
        value = numeric.widen(row[c]) * factor
        tile_row[c] = value
        check += value * tile_row.dtype.type(0)
    return check


@njit
def pack(tile, x, start, factor):
    """``tile = factor * x[start : start + len(tile)]`` in the accumulation dtype; True if all of it is finite."""
    check = tile.dtype.type(0)
    for r in range(tile.shape[0]):
        if x.strides[1] == x.itemsize:
            check += load_row(tile[r], as_contiguous(x[start + r]), factor)
        else:
            check += load_row(tile[r], x[start + r], factor)
    return check == 0


@njit
def store_row(row, tile_row, factor, add):
    """``row = factor * tile_row``, plus what `row` holds if `add`."""
    for c in range(row.size):
        value = tile_row[c] * factor
        row[c] = numeric.narrow(value + numeric.widen(row[c]) if add else value, row[c])


@njit
def unpack(x, start, tile, factor, add):
    """``x[start : start + len(tile)] = factor * tile``, plus what `x` holds if `add`."""
    for r in range(tile.shape[0]):
        if x.strides[1] == x.itemsize:
            store_row(as_contiguous(x[start + r]), tile[r], factor, add)
        else:
            store_row(x[start + r], tile[r], factor, add)


@njit
def view2d(buffer, rows, columns):
    """The first ``rows * columns`` elements of a 1-D buffer as a contiguous matrix."""
    return buffer[: rows * columns].reshape(rows, columns)


@njit
def visible_columns(i, j0, n, low, high):
    """Columns ``[first, last)`` of the tile with keys ``[j0, j0 + n)`` that query `i` sees."""
    start, stop = mask.kv_range(i, i + 1, j0 + n, low, high)
    first = min(max(start - j0, 0), n)
    return first, max(stop - j0, first)


@njit
def dot_rows(p, x, out, clean, corner, band):
    """``out = p @ x``. Unless `clean`, x holds NaN or Inf and hidden elements of p, all 0, must be skipped rather than multiplied."""
    if clean:
        np.dot(p, x, out)
        return
    for r in range(p.shape[0]):
        first, last = visible_columns(corner[0] + r, corner[1], p.shape[1], band[0], band[1])
        out[r] = 0
        for c in range(first, last):
            out[r] += p[r, c] * x[c]


@njit
def dot_columns(p, x, out, clean, corner, band):
    """``out = p.T @ x``, with the same care."""
    if clean:
        np.dot(p.T, x, out)
        return
    out[:] = 0
    for r in range(p.shape[0]):
        first, last = visible_columns(corner[0] + r, corner[1], p.shape[1], band[0], band[1])
        for c in range(first, last):
            out[c] += p[r, c] * x[r]


# ---- softmax ------------------------------------------------------------------------------------------------------------------------


@njit(fastmath={"contract", "reassoc", "nsz"})
def exp2_row(row, shift):
    """``row = exp2(row - shift)``; returns its sum."""
    total = row.dtype.type(0)
    for c in range(row.size):
        p = numeric.exp2(row[c] - shift)
        row[c] = p
        total += p
    return total


@njit
def online_softmax(s, m_i, l_i, alpha, corner, band):
    """One step of the online softmax: s becomes P, m_i and l_i are updated, alpha is the factor for what was accumulated so far."""
    for r in range(s.shape[0]):
        first, last = visible_columns(corner[0] + r, corner[1], s.shape[1], band[0], band[1])
        m_new = max(m_i[r], numeric.row_max(s[r, first:last]))
        shift = s.dtype.type(0) if m_new == _MINUS_INF else m_new  # a row whose scores are all -inf gives P = 0, not NaN
        alpha[r] = numeric.exp2(m_i[r] - shift)
        l_i[r] = l_i[r] * alpha[r] + exp2_row(s[r, first:last], shift)
        m_i[r] = m_new
        s[r, :first] = 0
        s[r, last:] = 0


@njit(fastmath={"contract"})
def rescale_add(acc, alpha, pv):
    """``acc = alpha * acc + pv``, row by row."""
    for r in range(acc.shape[0]):
        for c in range(acc.shape[1]):
            acc[r, c] = acc[r, c] * alpha[r] + pv[r, c]


@njit
def accumulate(acc, x):
    """``acc += x``."""
    for r in range(acc.shape[0]):
        for c in range(acc.shape[1]):
            acc[r, c] += x[r, c]


@njit(fastmath={"contract", "nsz"})
def recompute_row(p, dp, shift, delta):
    """``p = exp2(p - shift)``, ``dp = p * (dp - delta)``."""
    for c in range(p.size):
        prob = numeric.exp2(p[c] - shift)
        p[c] = prob
        dp[c] = prob * (dp[c] - delta)


@njit
def recompute_p(s, dp, lse, delta, corner, band):
    """s becomes P = exp2(S - lse), dp becomes dS = P * (dP - delta); hidden elements of both become 0."""
    for r in range(s.shape[0]):
        first, last = visible_columns(corner[0] + r, corner[1], s.shape[1], band[0], band[1])
        shift = s.dtype.type(0) if lse[r] == _MINUS_INF else s.dtype.type(lse[r] * s.dtype.type(LOG2E))
        recompute_row(s[r, first:last], dp[r, first:last], shift, delta[r])
        for hidden in (s[r, :first], s[r, last:], dp[r, :first], dp[r, last:]):
            hidden[:] = 0


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
    blocks = (nq + BLOCK_M - 1) // BLOCK_M
    q_buffer, acc_buffer, pv_buffer = np.empty(BLOCK_M * d, lse.dtype), np.empty(BLOCK_M * dv, lse.dtype), np.empty(BLOCK_M * dv, lse.dtype)
    k_buffer, v_buffer, s_buffer = np.empty(BLOCK_N * d, lse.dtype), np.empty(BLOCK_N * dv, lse.dtype), np.empty(BLOCK_M * BLOCK_N, lse.dtype)
    m_i, l_i, alpha = np.empty(BLOCK_M, lse.dtype), np.empty(BLOCK_M, lse.dtype), np.empty(BLOCK_M, lse.dtype)
    for item in range(start, stop):
        head, block = item // blocks, blocks - 1 - item % blocks
        b0, b1, h = head // hq // q.shape[1], head // hq % q.shape[1], head % hq
        k_head, v_head = k[b0, b1, h // (hq // k.shape[2])], v[b0, b1, h // (hq // k.shape[2])]
        i0 = block * BLOCK_M
        m = min(BLOCK_M, nq - i0)
        q_tile, acc, pv = view2d(q_buffer, m, d), view2d(acc_buffer, m, dv), view2d(pv_buffer, m, dv)
        pack(q_tile, q[b0, b1, h], i0, number(scale * LOG2E))
        acc[:], m_i[:], l_i[:] = 0, _MINUS_INF, 0
        first, last = mask.kv_range(i0, i0 + m, nk, low, high)
        for j0 in range(first, last, BLOCK_N):
            n = min(BLOCK_N, last - j0)
            k_tile, v_tile, s = view2d(k_buffer, n, d), view2d(v_buffer, n, dv), view2d(s_buffer, m, n)
            pack(k_tile, k_head, j0, number(1))
            clean = pack(v_tile, v_head, j0, number(1)) or mask.all_visible(i0, i0 + m, j0, j0 + n, low, high)
            # (1) S = Q K^T
            np.dot(q_tile, k_tile.T, s)
            # (2) m_new = max(m, rowmax S), P = exp(S - m_new), l = exp(m - m_new) l + rowsum P
            online_softmax(s, m_i, l_i, alpha, (i0, j0), band)
            # (3) acc = exp(m - m_new) acc + P V
            dot_rows(s, v_tile, pv, clean, (i0, j0), band)
            rescale_add(acc, alpha, pv)
        # (4) O = acc / l, lse = m + log l
        for r in range(m):
            l_r = l_i[r] if l_i[r] != 0 else number(1)
            for c in range(dv):
                acc[r, c] /= l_r
            lse[b0, b1, h, i0 + r] = number(m_i[r] * LN2) + np.log(l_r)
        unpack(o[b0, b1, h], i0, acc, number(1), False)


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

    dk and dv are finished here (added to if `add`); dq_partial (units, chunks, group, nq, d) receives each chunk's share of dQ / scale.
    """
    number, band = lse.dtype.type, (low, high)
    d, dv_dim, nq, nk, hk = q.shape[4], v.shape[4], q.shape[3], k.shape[3], k.shape[2]
    chunks, group = dq_partial.shape[1], dq_partial.shape[2]
    blocks = (nk + BACKWARD_BLOCK_N - 1) // BACKWARD_BLOCK_N
    size_m, size_n = BACKWARD_BLOCK_M, BACKWARD_BLOCK_N
    q_buffer, do_buffer, dq_buffer = np.empty(size_m * d, lse.dtype), np.empty(size_m * dv_dim, lse.dtype), np.empty(size_m * d, lse.dtype)
    k_buffer, dk_buffer, dk_sum_buffer = np.empty(size_n * d, lse.dtype), np.empty(size_n * d, lse.dtype), np.empty(size_n * d, lse.dtype)
    v_buffer, dv_buffer, dv_sum_buffer = np.empty(size_n * dv_dim, lse.dtype), np.empty(size_n * dv_dim, lse.dtype), np.empty(size_n * dv_dim, lse.dtype)
    s_buffer, dp_buffer = np.empty(size_m * size_n, lse.dtype), np.empty(size_m * size_n, lse.dtype)
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
            k_tile, dk_tile, dk_acc = view2d(k_buffer, n, d), view2d(dk_buffer, n, d), view2d(dk_sum_buffer, n, d)
            v_tile, dv_tile, dv_acc = view2d(v_buffer, n, dv_dim), view2d(dv_buffer, n, dv_dim), view2d(dv_sum_buffer, n, dv_dim)
            k_finite = pack(k_tile, k[b0, b1, h_k], j0, number(1))
            pack(v_tile, v[b0, b1, h_k], j0, number(1))
            dk_acc[:], dv_acc[:] = 0, 0
            first, last = mask.q_range(j0, j0 + n, nq, low, high)
            for g in range(group):
                h = h_k * group + g
                for i0 in range(first, last, size_m):
                    m = min(size_m, last - i0)
                    q_tile, do_tile, dq_tile = view2d(q_buffer, m, d), view2d(do_buffer, m, dv_dim), view2d(dq_buffer, m, d)
                    s, dp = view2d(s_buffer, m, n), view2d(dp_buffer, m, n)
                    q_finite = pack(q_tile, q[b0, b1, h], i0, number(scale * LOG2E))
                    do_finite = pack(do_tile, do[b0, b1, h], i0, number(1))
                    clean = (k_finite and q_finite and do_finite) or mask.all_visible(i0, i0 + m, j0, j0 + n, low, high)
                    # (1) S = Q K^T, dP = dO V^T
                    np.dot(q_tile, k_tile.T, s)
                    np.dot(do_tile, v_tile.T, dp)
                    # (2) P = exp(S - lse), dS = P * (dP - delta)
                    recompute_p(s, dp, lse[b0, b1, h, i0 : i0 + m], delta[b0, b1, h, i0 : i0 + m], (i0, j0), band)
                    # (3) dV += P^T dO
                    dot_columns(s, do_tile, dv_tile, clean, (i0, j0), band)
                    accumulate(dv_acc, dv_tile)
                    # (4) dK += dS^T Q
                    dot_columns(dp, q_tile, dk_tile, clean, (i0, j0), band)
                    accumulate(dk_acc, dk_tile)
                    # (5) dQ += dS K
                    dot_rows(dp, k_tile, dq_tile, clean, (i0, j0), band)
                    accumulate(dq_item[g, i0 : i0 + m], dq_tile)
            unpack(dk[b0, b1, h_k], j0, dk_acc, number(LN2), add)
            unpack(dv[b0, b1, h_k], j0, dv_acc, number(1), add)


@kernel
def dq_items(start, stop, dq_partial, dq, scale, first_unit):
    """dQ = scale * sum over chunks, in their order, for the work items ``[start, stop)``: one item is one row of one key head's group."""
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
        unpack(dq[b0, b1, h], i, row, row.dtype.type(scale), False)


# ---- running them -------------------------------------------------------------------------------------------------------------------


class Runner:
    """Runs kernels on all cores, one call at a time, with BLAS held to one thread."""

    def __init__(self):
        self.lock = threading.Lock()
        self.threads = config.NUMBA_NUM_THREADS
        self.pool = ThreadPoolExecutor(self.threads, "numba_flash")
        self.blas = ThreadpoolController()
        self.entries = {}

    def entry(self, dispatcher, args):
        """The compiled kernel for arrays of these dtypes, whatever their layout (Numba alone would compile it for each anew)."""
        key = (dispatcher, *(a.dtype.char for a in args if isinstance(a, np.ndarray)))
        if key not in self.entries:
            arrays = {i: types.Array(typeof(a).dtype, a.ndim, "A") for i, a in enumerate(args) if isinstance(a, np.ndarray)}
            signature = (types.int64, types.int64, *(arrays.get(i, typeof(a)) for i, a in enumerate(args)))
            self.entries[key] = dispatcher.compile(signature)
        return self.entries[key]

    def __call__(self, dispatcher, items, *args):
        """Run the kernel over work items ``[0, items)``."""
        entry = self.entry(dispatcher, args)
        step = max(1, items // (self.threads * BLOCKS_PER_THREAD))
        blocks = deque(range(0, items, step))

        def work():
            try:
                while True:
                    start = blocks.popleft()
                    entry(start, min(start + step, items), *args)
            except IndexError:
                return

        helpers = [self.pool.submit(work) for _ in range(min(self.threads, len(blocks)) - 1)]
        work()
        for helper in helpers:
            helper.result()


_runner = Runner()


def _reset():
    global _runner
    _runner = Runner()


os.register_at_fork(after_in_child=_reset)


def _bits(x):
    """The array as kernels see it."""
    return x.view({"float16": np.int16, "bfloat16": np.uint16}.get(x.dtype.name, x.dtype))


def why_not(problem):
    """None: the CPU serves every problem."""
    return None


def forward(problem, q, k, v, o, lse):
    """Write ``softmax(scale * q k^T) v`` to `o` and, unless it is None, the logarithm of its denominator to `lse`."""
    p = problem
    if lse is None:
        lse = np.empty(o.shape[:4], np.float64 if p.dtype == "float64" else np.float32)
    with _runner.lock, _runner.blas.limit(limits=1, user_api="blas"):
        items = math.prod(o.shape[:3]) * -(-p.nq // BLOCK_M)
        _runner(forward_items, items, *map(_bits, (q, k, v, o)), lse, p.scale, p.low, p.high)


def backward(problem, do, q, k, v, o, lse, dq, dk, dv):
    """Write the gradients."""
    p = problem
    do, q, k, v, o, dq, dk, dv = map(_bits, (do, q, k, v, o, dq, dk, dv))
    units, group = math.prod(k.shape[:3]), p.hq // max(p.hk, 1)
    if 0 in (units, p.hq, p.nq, p.nk):
        for gradient in (dq, dk, dv):
            gradient[...] = 0
        return
    chunks = min(-(-ITEM_TARGET // units), -(-p.nk // BACKWARD_BLOCK_N))
    row_bytes = chunks * group * p.d * lse.itemsize
    panel = min(p.nq, max(BACKWARD_BLOCK_M, DQ_PARTIAL_BYTES // row_bytes))
    wave = min(units, max(1, DQ_PARTIAL_BYTES // (row_bytes * p.nq)))
    buffer = np.empty((wave, chunks, group, panel, p.d), lse.dtype)
    delta = np.empty(lse.shape, lse.dtype)
    with _runner.lock, _runner.blas.limit(limits=1, user_api="blas"):
        _runner(delta_items, delta.size, do, o, delta)
        for unit in range(0, units, wave):
            n_units = min(wave, units - unit)
            for i0 in range(0, p.nq, panel):
                i = slice(i0, min(i0 + panel, p.nq))
                partial = buffer[:n_units, :, :, : i.stop - i0]
                _runner(
                    backward_items, n_units * chunks, do[:, :, :, i], q[:, :, :, i], k, v, lse[..., i], delta[..., i], partial, dk, dv,
                    p.scale, p.low + i0, p.high + i0, unit, i0 > 0,
                )
                _runner(dq_items, n_units * group * (i.stop - i0), partial, dq[:, :, :, i], p.scale, unit)
