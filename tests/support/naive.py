"""Textbook attention with every option, one sequence at a time and with the whole matrix: the yardstick of accuracy, written apart from the
oracle; and the comparison of a backend with the oracle by that yardstick.
"""  # fmt: skip

import math

import evidence
import ml_dtypes
import numpy as np

import numba_flash
from numba_flash.arguments.options import CHANCES, dropout_threshold
from support import Backend, allowed_error, assert_within, dense_visible, laid_out, whole

BAND = ("causal", "window", "q_start")


def attention(q, k, v, do, *, rounded, b=0, hq=1, dlse=None, bias=None, mask=None, band=None, **options) -> tuple[dict, dict]:
    """One head of one sequence, with every matrix put through `rounded`: results by name, and the sizes of the sums behind them.

    `hq` heads and `b` batch elements come before it; bias and mask are (nq, nk).
    """
    h, dtype = options["h"], q.dtype
    scale = dtype.type(q.shape[-1] ** -0.5 if options.get("scale") is None else options["scale"])
    visible = dense_visible(q.shape[0], k.shape[0], **(band or {}))
    visible = visible if mask is None else visible & mask
    s, slope, sizes = scale * (q @ k.T), np.ones((), dtype), []
    sizes.append(np.maximum(np.abs(s), scale * np.sqrt(np.square(q) @ np.square(k).T)))
    if options.get("softcap"):
        cap = dtype.type(options["softcap"])
        s = cap * np.tanh(s / cap)
        slope = 1 - np.square(s / cap)
    if options.get("score_mod"):
        i, j = np.indices(s.shape)
        g = np.array(
            [
                [options["score_mod_grad"](s[at], b, h, *at) for at in zip(i_row, j_row, strict=True)]
                for i_row, j_row in zip(i, j, strict=True)
            ]
        )
        s = np.array(
            [[options["score_mod"](s[at], b, h, *at) for at in zip(i_row, j_row, strict=True)] for i_row, j_row in zip(i, j, strict=True)]
        )
        s, g = s.reshape(visible.shape).astype(dtype), g.reshape(visible.shape).astype(dtype)
        slope = slope * g
        sizes.append(np.abs(sizes[0] * g))
        visible = visible & (s != -np.inf)
    sizes.append(np.abs(s))
    if bias is not None:
        s = s + bias
        sizes += [np.abs(bias), np.abs(s)]
        visible = visible & (bias != -np.inf)
    s = np.where(visible, s, -np.inf).astype(dtype)
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    m = np.where(m == -np.inf, 0, m)
    with np.errstate(divide="ignore"):
        l = np.exp(s - m).sum(axis=-1, keepdims=True)
        lse = (m + np.log(l))[:, 0]
    s = rounded(s)
    p = np.exp(s - m)
    p = rounded(p / np.where(p.sum(axis=-1, keepdims=True) == 0, 1, p.sum(axis=-1, keepdims=True)))
    factor = np.ones((), dtype)
    if options.get("dropout"):
        shape = (b * hq + h + 1, *s.shape)
        keep = numba_flash.dropout_mask(shape, dropout=options["dropout"], rng=options["rng"])[-1]
        factor = (keep / (1 - dropout_threshold(options["dropout"]) / CHANCES)).astype(dtype)
    o = rounded((factor * p) @ v)
    dp = rounded(factor * (do @ v.T))
    delta = (do * o).sum(axis=-1, keepdims=True) - (0 if dlse is None else dlse[:, None])
    ds = rounded(p * (dp - delta))
    dx = rounded(ds * slope)
    results = {"o": o, "lse": lse, "dq": scale * (dx @ k), "dk": scale * (dx.T @ q), "dv": (factor * p).T @ do, "dbias": ds}
    square = lambda x: np.square(x, dtype=np.float64)
    size_ds = square(p) * (
        square(factor) * (square(do) @ square(v).T) + square(delta) + (square(do) * square(o)).sum(axis=-1, keepdims=True)
    )
    size_dx = size_ds * square(slope)
    squares = {
        "o": square(factor * p) @ square(v),
        "lse": np.ones(()),
        "dq": scale**2 * (size_dx @ square(k)),
        "dk": scale**2 * (size_dx.T @ square(q)),
        "dv": square(factor * p).T @ square(do),
        "dbias": size_ds,
        "delta": p * (square(do) * square(o)).sum(axis=-1, keepdims=True),
    }
    squares["scores"] = np.where(visible, square(np.max(np.broadcast_arrays(*sizes), axis=0)), 0) if sizes else np.zeros(())
    return results, squares


def standard_attention(q, k, v, do, *, rounded, dlse=None, bias=None, mask=None, q_lengths=None, kv_lengths=None, **options):
    """`attention` of every head, put together: results by name; and by name the root of the largest sum of squares."""
    batch, (hq, nq), nk = q.shape[:-3], q.shape[-3:-1], k.shape[-2]
    group, dtype = hq // max(k.shape[-3], 1), np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    scores = (*batch, hq, nq, nk)
    wide = lambda x, shape: None if x is None else np.broadcast_to(x, shape)
    mask = mask.dense(nq, nk) if isinstance(mask, numba_flash.BlockMask) else mask
    bias, mask = wide(None if bias is None else bias.astype(dtype), scores), wide(mask, scores)
    dlse = wide(dlse, (*batch, hq, nq))
    q_lengths, kv_lengths = (np.broadcast_to(n if x is None else x, batch) for n, x in ((nq, q_lengths), (nk, kv_lengths)))
    band = {name: options.pop(name) for name in BAND if name in options}
    shapes = {"o": do.shape, "lse": do.shape[:-1], "dq": q.shape, "dk": k.shape, "dv": v.shape, "dbias": scores}
    results = {name: np.full(shape, -np.inf if name == "lse" else 0, dtype) for name, shape in shapes.items()}
    squares = {name: np.zeros(shape) for name, shape in shapes.items()} | {"scores": np.zeros(()), "delta": np.zeros(scores)}
    for number, at in enumerate(np.ndindex(batch)):
        i, j = slice(int(q_lengths[at])), slice(int(kv_lengths[at]))
        for h in range(hq):
            where = {"o": (*at, h, i), "lse": (*at, h, i), "dq": (*at, h, i), "dbias": (*at, h, i, j)}
            where |= dict.fromkeys(("dk", "dv"), (*at, h // group, j))
            x = [q[where["dq"]], k[where["dk"]], v[where["dk"]], do[where["dq"]]]
            part = lambda x, name, where=where: None if x is None else x[where[name]]
            one, size = attention(
                *(a.astype(dtype) for a in x), rounded=rounded, b=number, hq=hq, h=h, dlse=part(dlse, "lse"),
                bias=part(bias, "dbias"), mask=part(mask, "dbias"), band=band, **options,
            )  # fmt: skip
            for name, to in where.items():
                results[name][to] = one[name] if name in ("o", "lse", "dq", "dbias") else results[name][to] + one[name]
                squares[name][to] += size[name]
            squares["delta"][where["dbias"]] = size["delta"]
            squares["scores"] = np.maximum(squares["scores"], size["scores"].max(initial=0))
    return {name: rounded(x) if name != "lse" else x for name, x in results.items()}, squares


def _summed(x, shape):
    """`x` summed over the axes that an array of this shape broadcasts."""
    wide = (1,) * (x.ndim - len(shape)) + tuple(shape)
    return x.sum(axis=tuple(axis for axis, n in enumerate(wide) if n == 1), keepdims=True).reshape(shape)


def oracle(q, k, v, do, *, dlse=None, bias_grad=False, **options) -> dict:
    """Every result of the oracle by name."""
    results = whole.everything(do, q, k, v, dlse=dlse, bias_grad=bias_grad, **options)
    return dict(zip(("o", "lse", "dq", "dk", "dv", "dbias"), results, strict=False))


def allowed_errors(q, k, v, do, *, dlse=None, bias_grad=False, **options) -> dict:
    """Allowed error of each result, by the rule of `support.allowed_errors`."""
    dtype, accumulator = q.dtype, np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    rounded = lambda x: np.asarray(x).astype(dtype).astype(accumulator)
    with np.errstate(over="ignore", invalid="ignore"):
        naive, squares = standard_attention(q, k, v, do, rounded=rounded, dlse=dlse, **options)
    terms = max(k.shape[-2], q.shape[-3] // max(k.shape[-3], 1) * q.shape[-2]) + q.shape[-1] + v.shape[-1]
    unit = np.finfo(accumulator).eps * (math.sqrt(terms) + 2 * math.sqrt(squares["scores"])) * (2 if dtype == np.float64 else 1)
    allowed = {}
    for name, x in oracle(q, k, v, do, dlse=dlse, bias_grad=bias_grad, **options).items():
        stored, size, yardstick = accumulator if name == "lse" else dtype, squares[name], naive[name]
        if name == "lse":
            size = np.ones(1)
        if name == "dbias":
            shape, stored = options["bias"].shape, options["bias"].dtype
            size, yardstick = _summed(size, shape), _summed(yardstick, shape)
            terms_summed = max(1, naive["dbias"].size // max(yardstick.size, 1))
            size = size * (1 + math.sqrt(terms_summed) / math.sqrt(terms))
        noise = unit * math.sqrt(np.max(size, initial=0.0))
        if name == "dbias":  # every row shares the error of its delta, made of the o that was stored
            noise += ml_dtypes.finfo(dtype).eps * math.sqrt(np.max(_summed(squares["delta"], shape), initial=0.0))
        allowed[name] = allowed_error(x, yardstick.astype(stored), factor=2.0 if name in ("o", "lse") else 3.0, noise=float(noise))
    return allowed


ARRAYS = ("bias", "mask", "q_lengths", "kv_lengths", "dlse")


def run(backend: Backend, q, k, v, do, layouts=("contiguous",) * 4, *, dlse=None, bias_grad=False, **options) -> dict:
    """All results of a backend for host arrays, by name, on the host."""
    q, k, v, do = (laid_out(backend, x, layout) for x, layout in zip((q, k, v, do), layouts, strict=True))
    options = {name: backend.to_device(x) if name in ARRAYS else x for name, x in options.items()}
    o, lse = backend.forward(q, k, v, return_lse=True, **options)
    dlse = None if dlse is None else backend.to_device(dlse)
    gradients = backend.backward(do, q, k, v, o, lse, dlse=dlse, bias_grad=bias_grad, **options)
    assert len(gradients) == 3 + bias_grad
    results = {"o": o, "lse": lse} | dict(zip(("dq", "dk", "dv", "dbias"), gradients, strict=False))
    for name, x in results.items():
        expected = {"lse": np.float64 if q.dtype == np.float64 else np.float32, "dbias": options["bias"].dtype if bias_grad else None}
        assert x.dtype == expected.get(name, q.dtype), f"{name} has dtype {x.dtype}"
    return {name: backend.to_host(x) for name, x in results.items()}


def check(backend: Backend, q, k, v, do, layouts=("contiguous",) * 4, **options) -> dict:
    """Run forward and backward on host arrays (..., heads, n, d) and compare every result with the oracle."""
    results = run(backend, q, k, v, do, layouts, **options)
    compare(results, q, k, v, do, **options)
    return results


def compare(results: dict, q, k, v, do, **options) -> None:
    """Those results that there are, with the oracle's."""
    if evidence.compared(*results.values()):
        return
    allowed, ref = allowed_errors(q, k, v, do, **options), oracle(q, k, v, do, **options)
    for name, x in results.items():
        assert_within(name, x, ref[name], allowed[name])
