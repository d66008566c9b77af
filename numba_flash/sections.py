"""A backward pass in sections of batch elements or heads, one after the other, where what kernels keep for all of them at the same time
would take much more memory than the arrays: sums of dq, which have whole tiles for each head, however few queries that has.
"""

import math
from dataclasses import replace
from typing import NamedTuple

from numba_flash import ledger
from numba_flash.arguments import arrays
from numba_flash.arguments.arrays import Layout
from numba_flash.arguments.problem import Prepared, Problem

MOST = 2**30  # bytes of sums, unless the inputs take more
AXES = ("b0", "b1", "heads")  # along which there are sections


class Axis(NamedTuple):
    """One of `AXES`, and how many elements that has; of heads, those of k."""

    name: str
    size: int


class Cut(NamedTuple):
    """Elements of an axis from `start` on, before `stop`."""

    axis: str
    start: int
    stop: int


# How far from the last axis each of `AXES` is, in arrays by their names; those of all others are like those of q.
PLACES = {
    **{name: {"b0": 4, "b1": 3, "heads": 2} for name in ("lse", "dlse")},
    **{name: {"b0": 2, "b1": 1} for name in ("q_lengths", "kv_lengths")},
}
OF_SCORES = {"b0": 5, "b1": 4, "heads": 3}
OF_KEYS = ("k", "v", "dk", "dv")


def room(inputs) -> int:
    """Bytes that sums may take: as many as the inputs, where these are large."""
    return max(MOST, sum(_size(x if isinstance(x, Layout) else Layout.of(x)) for x in inputs))


def _size(x) -> int:
    """Bytes of a layout; what an axis repeats counts once."""
    return 0 if x is None else x.dtype.itemsize * math.prod(n for n, stride in zip(x.shape, x.strides, strict=True) if stride or not n)


def axis_of(problem: Problem) -> Axis:
    """The longest one whose elements can be computed apart from each other. Random bits and a `score_mod` want the number of the batch
    element, which only the first axis that there is tells a part of, and the number of the head; packed sequences know their places.
    """
    p, (b0, b1) = problem, problem.batch
    sizes = {"b0": b0, "b1": b1, "heads": p.hk}
    if _numbered(p):
        sizes["b1" if b0 > 1 else "b0"] = sizes["heads"] = 1
    if p.options.packed:
        sizes["b1"] = 1
    name = max(sizes, key=sizes.get)
    return Axis(name, sizes[name])


def too_large(problem: Problem, inputs, padded_sums) -> str | None:
    """Why even the smallest section takes more memory than there is `room` for, or None; ``padded_sums(problem)`` says how much that is if
    most of it is padding.
    """
    least = problem
    while (axis := axis_of(least)).size > 1:
        least = _part(least, Cut(axis.name, 0, 1))
    sums = padded_sums(least)
    if sums <= room(inputs):
        return None
    apart = "the batch elements" if _numbered(problem) else "the heads of a batch element"
    return f"needs {sums} bytes for sums of dq, mostly padding, as {apart} of so few queries are not computed apart from each other"


def prepare(whole, problem: Problem, inputs, results, sums: int) -> Prepared:
    """``run(inputs, results, *state)`` in sections.

    Parameters
    ----------
    whole : callable
        ``whole(problem, inputs, results)``: a part as `plan.prepare` prepares it.
    problem : Problem
        All of it; its `axis_of` has at least two elements.
    inputs, results : named tuples of Layout
        Of the arrays.
    sums : int
        Bytes of sums of dq that all of it would take at the same time.
    """
    axis = axis_of(problem)
    count = -(-axis.size // max(1, axis.size * MOST // sums))
    each = -(-axis.size // count)  # so that no section is much shorter than another
    cuts = [Cut(axis.name, start, min(start + each, axis.size)) for start in range(0, axis.size, each)]
    shares, dbias = None, results.dbias
    if dbias is not None and _place(problem, "dbias", dbias, axis.name) is None:  # summed over sections
        of_one = Layout.compact(dbias.shape, problem.lse_dtype)._replace(device=dbias.device)
        shares, results = (len(cuts), *dbias.shape), results._replace(dbias=of_one)
    made, parts, noted = {}, [], [0]
    for cut in cuts:
        key = _part(problem, cut), _cut(problem, cut, inputs), _cut(problem, cut, results)
        if key not in made:
            with ledger.opened() as own:
                made[key] = whole(*key)
            noted.append(sum(own))
        parts.append((cut, made[key].run))
    ledger.note(max(noted) + (_size(results.dbias) * len(cuts) if shares else 0))

    def run(inputs, results, *state):
        sums = arrays.compact("dbias of sections", results.dbias, shares, problem.lse_dtype) if shares else None
        for number, (cut, part) in enumerate(parts):
            own = results._replace(dbias=sums[number]) if shares else results
            part(_cut(problem, cut, inputs), _cut(problem, cut, own), *state)
        if shares:
            results.dbias[...] = sums.sum(0)

    first = next(iter(made.values()))
    return Prepared(run, first.launches, recipes=first.recipes)


def _part(problem: Problem, cut: Cut) -> Problem:
    """The problem of a section."""
    p, size = problem, cut.stop - cut.start
    if cut.axis == "heads":
        return replace(p, hq=p.hq // p.hk * size, hk=size)
    b0, b1 = p.batch
    first = cut.start * (b1 if cut.axis == "b0" else 1) if _numbered(p) else 0
    return replace(p, batch=(size, b1) if cut.axis == "b0" else (b0, size), first_batch=p.first_batch + first)


def _numbered(problem: Problem) -> bool:
    """Whether the number of a head or batch element matters."""
    return bool(problem.options.dropout or problem.options.score_mod or problem.options.relative)


def _place(problem: Problem, name: str, x, axis: str) -> int | None:
    """Which axis of an array, or layout, has an element for each of `axis`."""
    place = PLACES.get(name, OF_SCORES).get(axis)
    if problem.options.packed and name not in PLACES:
        place = 2  # (tokens, heads, d)
    if place is None or place > x.ndim or x.shape[-place] == 1:
        return None
    return x.ndim - place


def _cut(problem: Problem, cut: Cut, given):
    """What a section has of the arrays, or layouts, in a named tuple."""
    group = problem.hq // problem.hk

    def of(name, x):
        place = None if x is None else _place(problem, name, x, cut.axis)
        if place is None:
            return x
        each = group if cut.axis == "heads" and name not in OF_KEYS else 1
        start, stop = cut.start * each, cut.stop * each
        return x.cut(place, start, stop) if isinstance(x, Layout) else x[(slice(None),) * place + (slice(start, stop),)]

    return given._make(map(of, given._fields, given))
