"""Attention on a GPU with the matrix of all scores, in float64 and CuPy; inputs in several layouts; how close a kernel has to come.

`cp` is the module cupy, which machines without a GPU lack.
"""  # fmt: skip

import math

import ml_dtypes
import numpy as np

from support import DTYPES

RELATIVE = {"float16": 8e-4, "bfloat16": 6e-3}
"""Allowed norm of the error over that of o: the weights and o are rounded once each."""


def put(cp, x: np.ndarray, layout: str = "contiguous"):
    """Array on the GPU with the values of `x` (..., n, d), NaN in the gaps. "repeated" takes the first of the batch for all."""
    if layout == "heads last":
        return cp.asarray(np.ascontiguousarray(x.swapaxes(-3, -2))).swapaxes(-3, -2)
    if layout == "strided":
        buffer = np.full((*x.shape[:-2], 2 * x.shape[-2] + 1, x.shape[-1] + 24), np.nan).astype(x.dtype)
        buffer[..., 1::2, 8 : 8 + x.shape[-1]] = x
        return cp.asarray(buffer)[..., 1::2, 8 : 8 + x.shape[-1]]
    if layout == "repeated" and x.ndim > 3:
        return cp.broadcast_to(cp.asarray(np.ascontiguousarray(x[:1])), x.shape)
    return cp.asarray(np.ascontiguousarray(x))


def normal(cp, *shape, dtype="float16", seed=0):
    return cp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(DTYPES[dtype]))


def nan(cp, shape, dtype="float16", layout="contiguous"):
    return put(cp, np.full(shape, np.nan).astype(DTYPES[dtype]), layout)


def wide(cp, x):
    """The same in float64; bfloat16 by way of its bits."""
    if x.dtype.name == "bfloat16":
        x = (x.view("uint16").astype("uint32") << 16).view("float32")
    return x.astype("float64")


def bits(cp, *arrays) -> list[bytes]:
    return [x.tobytes() if isinstance(x, np.ndarray) else cp.asnumpy(x).tobytes() for x in arrays]


def _dense(cp, q, k, v, *, causal=False, window=None, q_start=None, softcap=None, q_lengths=None, kv_lengths=None):
    """(q, k, v, P, lse, the cap's slope, rows within the lengths), with keys for every query head, and zeros beyond the lengths."""
    (hq, nq), (hk, nk), scale = q.shape[-3:-1], k.shape[-3:-1], q.shape[-1] ** -0.5
    batch = tuple(q.shape[:-3])
    lengths = [cp.full(batch, n) if x is None else cp.asarray(x) for x, n in ((q_lengths, nq), (kv_lengths, nk))]
    q_length, k_length = (x[..., None, None, None] for x in lengths)
    i, j = cp.arange(nq)[:, None], cp.arange(nk)[None]
    start = k_length - q_length if q_start is None else q_start
    left, right = (-1, -1) if window is None else window
    visible = (i < q_length) & (j < k_length)
    if causal or right != -1:
        visible = visible & (j <= i + start + (0 if causal else right))
    if left != -1:
        visible = visible & (j >= i + start - left)
    rows = i < q_length
    q = cp.where(rows, wide(cp, q), 0)
    k, v = (cp.repeat(cp.where(cp.arange(nk)[:, None] < k_length, wide(cp, x), 0), hq // hk, axis=x.ndim - 3) for x in (k, v))
    s, slope = scale * (q @ k.swapaxes(-1, -2)), 1.0
    if softcap is not None:
        s = softcap * cp.tanh(s / softcap)
        slope = 1 - (s / softcap) ** 2
    s = cp.where(visible, s, -math.inf)
    m = s.max(axis=-1, keepdims=True)
    m = cp.where(m == -math.inf, 0, m)
    p = cp.exp(s - m)
    l = p.sum(axis=-1, keepdims=True)
    seen = l > 0
    lse = cp.where(seen, m + cp.log(cp.where(seen, l, 1)), -math.inf)
    return q, k, v, p / cp.where(seen, l, 1), lse[..., 0], slope, rows


def dense(cp, q, k, v, **options):
    """(o, lse) in float64 of arrays (..., heads, n, d), with the matrix of all scores. What lies beyond the lengths is not looked at."""
    *_, v, p, lse, _, _ = _dense(cp, q, k, v, **options)
    return p @ v, lse


def dense_gradients(cp, do, q, k, v, dlse=None, **options):
    """(dq, dk, dv) in the same way."""
    hk, scale = k.shape[-3], q.shape[-1] ** -0.5
    q, k, v, p, _, slope, rows = _dense(cp, q, k, v, **options)
    do = cp.where(rows, wide(cp, do), 0)
    dp = do @ v.swapaxes(-1, -2)
    delta = (p * dp).sum(axis=-1, keepdims=True)
    if dlse is not None:
        delta -= cp.where(rows, wide(cp, dlse)[..., None], 0)
    ds = p * (dp - delta) * slope * scale
    groups = lambda x: x.reshape(*x.shape[:-3], hk, -1, *x.shape[-2:]).sum(axis=-3)
    return ds @ k, groups(ds.swapaxes(-1, -2) @ q), groups(p.swapaxes(-1, -2) @ do)


def dense_packed(cp, q, k, v, offsets, **options):
    """The same for packed sequences (total, heads, d), one after the other."""
    o, lse = cp.zeros((*q.shape[:-1], v.shape[-1])), cp.full(q.shape[1::-1], -math.inf)
    for b in range(len(offsets[0]) - 1):
        i, j = (slice(int(x[b]), int(x[b + 1])) for x in offsets)
        if i.start < i.stop and j.start < j.stop:
            alone, lse[:, i] = dense(cp, *(x.swapaxes(0, 1) for x in (q[i], k[j], v[j])), **options)
            o[i] = alone.swapaxes(0, 1)
    return o, lse


def dense_gradients_packed(cp, do, q, k, v, offsets, dlse=None, **options):
    """The same for packed sequences."""
    gradients = tuple(cp.zeros(x.shape) for x in (q, k, v))
    for b in range(len(offsets[0]) - 1):
        i, j = (slice(int(x[b]), int(x[b + 1])) for x in offsets)
        if i.start < i.stop and j.start < j.stop:
            alone = dense_gradients(
                cp, *(x.swapaxes(0, 1) for x in (do[i], q[i], k[j], v[j])), None if dlse is None else dlse[:, i], **options
            )
            for x, y, rows in zip(gradients, alone, (i, j, j), strict=True):
                x[rows] = y.swapaxes(0, 1)
    return gradients


def verify_gradients(cp, gradients, expected, what=""):
    """As accurate as the arithmetic, and exactly 0 where the formula is."""
    for name, ours, ref in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        dtype, ours = ours.dtype.name, wide(cp, ours)
        assert not bool(cp.isnan(ours).any()), f"{what}: NaN in {name}"
        error, size = (float(cp.linalg.norm(x)) for x in (ours - ref, ref))
        noise = 1e-2 * RELATIVE[dtype] * math.sqrt(ref.size)  # where terms of size 1 cancel
        assert error <= 2 * RELATIVE[dtype] * size + noise, f"{what}: {name}: {error} of {size}"


def draw_length(rng, most: int) -> int:
    edges = [n * tile + m for tile in (64, 112, 128, 176, 192) for n in (1, 2, 3) for m in (-1, 0, 1)]
    return min(most, int(rng.choice([rng.integers(1, 10), rng.choice(edges), rng.integers(1, most + 1)])))


def draw_mask(rng, nq: int, nk: int, follows: bool) -> dict:
    window = tuple(int(rng.choice([-1, 0, rng.integers(0, nk + 1)])) for _ in range(2))
    start = {} if follows else {"q_start": int(rng.integers(-nq, nk + 1))}
    return [start, {"causal": True} | start, {"window": window} | start, {"window": window, "causal": True} | start][rng.integers(4)]


def draw_offsets(rng, sequences: int, total: int) -> np.ndarray:
    return np.array([0, *sorted(rng.integers(0, total + 1, sequences - 1)), total], np.int32)


def verify(cp, o, lse, expected, v, what=""):
    """Rows that see nothing are exactly 0 and -inf; the others as accurate as the arithmetic."""
    (ref, ref_lse), dtype = expected, o.dtype.name
    ours, eps = wide(cp, o), float(ml_dtypes.finfo(dtype).eps)
    error, largest = cp.abs(ours - ref), float(cp.max(cp.nan_to_num(cp.abs(wide(cp, v)))))
    assert not bool(cp.isnan(ours).any()), f"{what}: NaN in o"
    assert float(cp.linalg.norm(error)) <= RELATIVE[dtype] * float(cp.linalg.norm(ref)), what
    assert float(error.max()) <= 4 * eps * largest, what
    blind = ref_lse == -math.inf
    if lse is not None:
        assert lse.dtype == np.float32
        assert bool(((lse == -math.inf) == blind).all()), f"{what}: -inf in other places of lse"
        finite = cp.where(blind, 0, ref_lse)
        assert bool((cp.abs(cp.where(blind, 0, lse) - finite) <= 1e-4 * (1 + cp.abs(finite))).all()), f"{what}: lse"
    assert bool((ours[(ref == 0).all(axis=-1)] == 0).all()), f"{what}: rows that see nothing"
