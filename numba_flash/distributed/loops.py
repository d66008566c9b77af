"""The forward and the backward pass of one process, over all keys that come by."""

from typing import Any

from numba_flash import api
from numba_flash.arguments import arrays
from numba_flash.distributed.agreement import Call
from numba_flash.distributed.carriers import carrier
from numba_flash.distributed.pieces import pieces
from numba_flash.merge import merge_into


def forward(call: Call) -> tuple[Any, Any]:
    """o and lse of the queries of this process."""
    q, k, v = (call.arrays[name] for name in "qkv")
    o = _zeros("o", q, (*q.shape[:-1], v.shape[-1]))
    lse = _zeros("lse", q, q.shape[:-1])
    lse[...] = float("-inf")
    begun: set[int] = set()  # where rows begin that have results
    for visit in carrier(call, k, v).visits():
        for piece in pieces(call, visit.columns):
            rows, columns = piece.of_rows, piece.of_columns
            first = begun.isdisjoint(chunk.at for chunk in piece.rows)
            begun.update(chunk.at for chunk in piece.rows)
            here = o[..., rows, :]
            part = here if first else arrays.empty("a part of o", here, here.shape)
            own = q[..., rows, :], visit.k[..., columns, :], visit.v[..., columns, :]
            _, log_sums = api.forward(*own, **piece.options(call), out=part, return_lse=True)
            if first:
                lse[..., rows] = log_sums
            else:
                merge_into(here, lse[..., rows], part, log_sums)
    return o.astype(q.dtype, copy=False), lse


def backward(call: Call) -> tuple[Any, Any, Any]:
    """dq, dk and dv of this process."""
    named = {name: x for name, x in call.arrays.items() if x is not None}
    q, k, v = (named[name] for name in "qkv")
    dq = _zeros("dq", q, q.shape)
    way = carrier(call, k, v)
    for step, visit in enumerate(way.visits()):
        dk, dv = _zeros("dk", visit.k, visit.k.shape), _zeros("dv", visit.v, visit.v.shape)
        for piece in pieces(call, visit.columns):
            rows, columns = piece.of_rows, piece.of_columns
            own = {name: x[..., rows] if name in ("lse", "dlse") else x[..., rows, :] for name, x in named.items()}
            own |= {"k": visit.k[..., columns, :], "v": visit.v[..., columns, :]}
            parts = api.backward(**own, **piece.options(call))
            for total, place, part in zip((dq, dk, dv), (rows, columns, columns), parts, strict=True):
                there = total[..., place, :]
                there += part.astype(total.dtype, copy=False)
        way.give(step, dk, dv)
    dk, dv = way.end()
    return dq.astype(q.dtype, copy=False), dk.astype(q.dtype, copy=False), dv.astype(q.dtype, copy=False)


def _zeros(name: str, like: Any, shape: tuple[int, ...]) -> Any:
    x = arrays.empty(name, like, shape, "float64" if like.dtype.name == "float64" else "float32")
    x[...] = 0
    return x
