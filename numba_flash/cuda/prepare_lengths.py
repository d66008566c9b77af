"""Lengths of sequences, or a few offsets, that are on the host beside queries on a GPU: see
`numba_flash.cuda.lengths`. Numba is not imported here.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from numba_flash import arrays
from numba_flash.arrays import Layout, Scratch
from numba_flash.cuda import launch
from numba_flash.cuda.launch import Launch

MOST = 64  # values
ABSENT = Layout.compact((0,), "int32")


class Lengths(NamedTuple):
    """Lengths, or offsets, of sequences; None where there are none, or not on the host."""

    q_lengths: Any
    kv_lengths: Any


def sender(inputs, names: list[str], device: int):
    """``send(inputs)``: inputs like these, but those of `names`, which are on the host, on the GPU
    of that number, which is current. Few lengths go as arguments of a kernel: nobody waits, and a
    call that is captured into a graph keeps its own.
    """
    if {*names} <= {*Lengths._fields}:
        lengths = Lengths(*(getattr(inputs, x) if x in names else None for x in Lengths._fields))
        if 0 < sum(x.size for x in lengths if x is not None) <= MOST:
            return _by_launch(type(inputs), lengths, device)
    return lambda inputs: inputs._replace(
        **{name: arrays.to_gpu(name, getattr(inputs, name)) for name in names}
    )


class _Span(NamedTuple):
    """Some lengths: their place among the inputs, and that of their values among all."""

    at: int
    words: slice


def _by_launch(cls, lengths: Lengths, device: int):
    """The same of up to `MOST` lengths in all, for inputs of that class."""
    there = Lengths(*(None if x is None else Layout.compact(x.shape, x.dtype) for x in lengths))
    flat = [x and Layout.compact((math.prod(x.shape),), x.dtype) for x in there]
    scratch, send = Scratch(there, Lengths._fields), launch_of(flat, launch.gpu(device))
    spans, first = [], 0
    for name, x in zip(Lengths._fields, flat, strict=True):
        if x is not None:
            spans.append(_Span(cls._fields.index(name), slice(first, first + x.shape[0])))
            first += x.shape[0]

    def run(inputs):
        words, there, sent = np.zeros(MOST, np.int64), scratch.beside(inputs.q), [*inputs]
        for at, span in spans:
            words[span] = inputs[at].ravel()
        send.on(there, numbers=words.tobytes())
        for (at, _), x in zip(spans, filter(None, there), strict=True):
            sent[at] = x
        return cls._make(sent)

    return run


def launch_of(lengths, gpu) -> Launch:
    """The kernel, for layouts of one dimension; None where there are no lengths."""
    return Launch(
        "lengths.build",
        (*((x or ABSENT).dtype.name for x in lengths), MOST),
        gpu,
        grid=1,
        threads=MOST,
        operands=tuple((x, 1) for x in lengths),
        numbers=((0,) * MOST,),
    )
