"""Lengths of sequences, or a few offsets, that are on the host beside queries on a GPU: see
`numba_flash.cuda.work.lengths`. Numba is not imported here.
"""

import math
from dataclasses import replace
from functools import partial
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from numba_flash.arguments import arrays
from numba_flash.arguments.arrays import Layout, Scratch
from numba_flash.arguments.options import AS_NUMBERS
from numba_flash.arguments.problem import check_values
from numba_flash.cuda.arguments import MOST_LENGTHS as MOST
from numba_flash.cuda.runtime import launch
from numba_flash.cuda.runtime.launch import Launch
from numba_flash.cuda.runtime.packing import WORD, packed

ABSENT = Layout.compact((0,), "int32")


class Lengths(NamedTuple):
    """Lengths, or offsets, of sequences; None where there are none, or not on the host."""

    q_lengths: Any
    kv_lengths: Any


def sender(problem, inputs, names: list[str], device: int):
    """``send(inputs)``: inputs like these, but those of `names`, which are on the host, on the GPU
    of that number, which is current; their values are checked first. Few lengths go as arguments of
    a kernel: nobody waits, and a call that is captured into a graph keeps its own.
    """
    if {*names} <= {*Lengths._fields}:
        lengths = Lengths(*(getattr(inputs, x) if x in names else None for x in Lengths._fields))
        if 0 < sum(x.size for x in lengths if x is not None) <= MOST:
            by = _by_numbers if _may_be_numbers(problem, names) else _by_launch
            return by(problem, type(inputs), lengths, device)

    def copy(inputs):
        check_values(problem, inputs)
        there = {name: arrays.to_gpu(name, getattr(inputs, name)) for name in names}
        return inputs._replace(**there)

    return copy


class _Given(NamedTuple):
    """Some lengths: their place among the inputs and among all lengths, and the greatest that one
    may be.
    """

    at: int
    number: int
    most: int


def _pack_of(count: int):
    """``pack(*values)``: so many lengths as the words of `MOST`."""
    return Struct(f"{count}q{WORD * (MOST - count)}x").pack


def _by_launch(problem, cls, lengths: Lengths, device: int):
    """The same of up to `MOST` lengths in all, for inputs of that class: a list of them is made
    once in a call, checked and sent.
    """
    there = Lengths(*(None if x is None else Layout.compact(x.shape, x.dtype) for x in lengths))
    flat = [x and Layout.compact((math.prod(x.shape),), x.dtype) for x in there]
    count = sum(x.shape[0] for x in flat if x)
    # what offsets have to be takes more to say
    limits = (-1, -1) if problem.options.packed else (problem.nq, problem.nk)
    given = [
        _Given(cls._fields.index(name), number, limits[number])
        for number, name in enumerate(Lengths._fields)
        if flat[number] is not None
    ]
    store, scratch = launch_of(flat, launch.gpu(device)).on, Scratch(there, Lengths._fields).beside
    pack, sent_of = _pack_of(count), partial(tuple.__new__, cls)

    def run(inputs):
        words, sent = [], [*inputs]
        for at, _, most in given:
            values = inputs[at].ravel().tolist()
            if min(values) < 0 or max(values) > most:
                check_values(problem, inputs)
            words += values
        there = scratch(inputs.q)
        store(there, (), pack(*words))
        for at, number, _ in given:
            sent[at] = there[number]
        return sent_of(sent)

    return run


class Known:
    """Lengths of keys that the host has, of a call.

    Attributes
    ----------
    words : bytes
        In which kernels take them as numbers, `MOST`.
    layout : Layout
        Of the array.
    data
        Where it is on the GPU, beside `like`; it is stored there once a kernel asks for it.
    """

    __slots__ = ("_data", "_like", "_store", "layout", "words")

    def __init__(self, words: bytes, layout: Layout, store, like):
        self.words, self.layout = words, layout
        self._store, self._like, self._data = store, like, None

    @property
    def data(self):
        if self._data is None:
            self._data = self._store(self.words, self._like)
        return self._data


def with_numbers(problem, inputs):
    """The problem of a kernel that takes lengths of keys as numbers, where the host knows them."""
    if problem.options.kv_lengths is None or not inputs.kv_lengths.known:
        return problem
    return replace(problem, options=replace(problem.options, kv_lengths=AS_NUMBERS))


class Numbers(NamedTuple):
    """Of a kernel.

    Attributes
    ----------
    prepared : tuple
        As a `Launch` is made with them.
    of : function or None
        ``of(inputs)``: those of a call; None if they are always the prepared ones.
    """

    prepared: tuple
    of: Any


def numbers_of(problem, numbers: tuple) -> Numbers:
    """`Numbers` of a kernel of such a problem, which are these but for lengths."""
    if problem.options.kv_lengths != AS_NUMBERS:
        return Numbers(numbers, None)
    behind = packed(numbers)
    none = (np.int32(0),) * MOST
    return Numbers((none, *numbers), lambda inputs: inputs.kv_lengths.words + behind)


def _may_be_numbers(problem, names: list[str]) -> bool:
    """Whether kernels may take lengths as numbers: those of keys, of one leading axis."""
    return names == ["kv_lengths"] and problem.batch[0] == 1 and not problem.options.packed


def _by_numbers(problem, cls, lengths: Lengths, device: int):
    """As `_by_launch`, but kernels that take the lengths as numbers find them as such."""
    layout = Layout.compact(lengths.kv_lengths.shape, lengths.kv_lengths.dtype)
    count, at, most = math.prod(layout.shape), cls._fields.index("kv_lengths"), problem.nk
    store = launch_of((None, Layout.compact((count,), layout.dtype)), launch.gpu(device)).on
    scratch = Scratch(Lengths(None, layout), Lengths._fields).beside
    pack, sent_of = _pack_of(count), partial(tuple.__new__, cls)
    known, in_line = layout._replace(known=True), layout.ndim == 1

    def stored(words, like):
        there = scratch(like)
        store(there, (), words)
        return there.kv_lengths.data

    def run(inputs):
        x = inputs[at]
        values = (x if in_line else x.ravel()).tolist()
        if min(values) < 0 or max(values) > most:
            check_values(problem, inputs)
        sent = [*inputs]
        sent[at] = Known(pack(*values), known, stored, inputs.q)
        return sent_of(sent)

    return run


def launch_of(lengths, gpu) -> Launch:
    """The kernel, for layouts of one dimension; None where there are no lengths."""
    return Launch(
        "work.lengths.build",
        (*((x or ABSENT).dtype.name for x in lengths), MOST),
        gpu,
        grid=1,
        threads=MOST,
        operands=tuple((x, 1) for x in lengths),
        numbers=((0,) * MOST,),
    )
