"""Arithmetic that rounds (PTX ISA 9.7.3 to 9.7.5): of float64, float32, and of float16 and bfloat16, alone or two in a word.

What the ISA calls approximate is computed in float64 and rounded to the nearest, which is within the error that it documents.
"""

from typing import NamedTuple

import numpy as np

from ptx_machine.instructions.conversions import FLOATS, flushed
from ptx_machine.instructions.rounding import add, fma, multiply
from ptx_machine.machine.operands import LANES, reader, spread

MODES = {"rn", "rz", "rm", "rp"}


class Form(NamedTuple):
    """What the name of an instruction says of its numbers."""

    kind: type
    packed: bool = False
    mode: str = "rn"
    flush: bool = False
    saturate: bool = False
    positive: bool = False
    with_nan: bool = False


def is_float(parts) -> bool:
    return parts[-1].removesuffix("x2") in FLOATS


def _form(parts) -> Form:
    modifiers = set(parts[1:-1])
    if unknown := modifiers - {*MODES, "ftz", "sat", "relu", "NaN", "approx", "full"}:
        raise ValueError(f"modifiers {unknown}")
    (mode,) = modifiers & MODES or {"rn"}
    kind = FLOATS[parts[-1].removesuffix("x2")]
    flush = "ftz" in modifiers and kind == np.float32
    return Form(kind, parts[-1].endswith("x2"), mode, flush, "sat" in modifiers, "relu" in modifiers, "NaN" in modifiers)


def _rounding(function, directed=False):
    """Build ``d = function(form, a, b, ...)``, with flushed and saturated numbers where the name says so.

    Float32 may be rounded in other directions than to the nearest where that is `directed`.
    """

    def build(machine, each, parts):
        form, (destination, *operands) = _form(parts), each.operands
        if form.mode != "rn" and not (directed and form.kind == np.float32):
            raise ValueError(f"rounding {form.mode}")
        get = [reader(machine, text, np.uint32 if form.packed else form.kind) for text in operands]

        def plain(warp):
            warp.write(destination, np.asarray(function(form, *[np.asarray(g(warp)) for g in get]), form.kind))

        if form.kind in (np.float32, np.float64) and form == Form(form.kind, mode=form.mode, with_nan=form.with_nan):
            return plain

        def run(warp):
            values = [np.asarray(g(warp)) for g in get]
            if form.packed:
                values = [np.array(spread(x)).view(form.kind) for x in values]
            if form.flush:
                values = [flushed(x) for x in values]
            value = np.asarray(function(form, *values), form.kind)
            value = _limited(form, value)
            if form.packed:
                value = np.ascontiguousarray(value).view(np.uint32)
            warp.write(destination, value.view(np.uint16) if value.dtype.itemsize == 2 else value)

        return run

    return build


def _limited(form: Form, value):
    zero = form.kind(0)
    if form.flush:
        value = flushed(value)
    if form.saturate:
        value = np.clip(np.where(np.isnan(value), zero, value), zero, form.kind(1))
    if form.positive:
        value = np.where(value < zero, zero, value)
    return value


def _fma(form, a, b, c):
    size = max(LANES, a.size, b.size, c.size)
    return fma(*(np.broadcast_to(x, size) for x in (a, b, c)), form.kind, form.mode)


def _extreme(sign: int):
    """The larger, or the smaller, where -0 is below 0; of a number and a NaN the number, unless the name says otherwise."""
    functions = {(1, False): np.fmax, (-1, False): np.fmin, (1, True): np.maximum, (-1, True): np.minimum}

    def compute(form, a, b, *more):
        value = functions[sign, form.with_nan](a, b)
        value = np.where((a == 0) & (b == 0), sign * (sign * a + sign * b), value)
        return compute(form, value.astype(form.kind), *more) if more else value

    return compute


def _approximate(function):
    """To float32, float16 or bfloat16; of float64 (``.approx.ftz``) the upper word alone."""

    def compute(form, x):
        value = function(x.astype(np.float64))
        if form.kind == np.float64:
            return (np.asarray(value).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
        return value.astype(form.kind)

    return compute


def _exact_or_approximate(function):
    """``.rn`` is the nearest; NumPy's division and square root are."""
    approximate = _rounding(_approximate(function))

    exactly = _rounding(lambda form, x: function(x))
    return lambda machine, each, parts: (approximate if "approx" in parts else exactly)(machine, each, parts)


def _copysign(machine, each, parts):
    kind = FLOATS[parts[-1]]
    a, b = (reader(machine, text, kind) for text in each.operands[1:])
    return lambda warp: warp.write(each.operands[0], np.copysign(b(warp), a(warp)))


TESTS = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
}


def _test(machine, each, parts):
    get, test = reader(machine, each.operands[1], FLOATS[parts[-1]]), TESTS[parts[1]]
    return lambda warp: warp.write(each.operands[0], test(np.asarray(get(warp))))


FLOATING = {
    "add": _rounding(lambda form, a, b: add(a, b, form.kind, form.mode), directed=True),
    "sub": _rounding(lambda form, a, b: add(a, -b, form.kind, form.mode), directed=True),
    "mul": _rounding(lambda form, a, b: multiply(a, b, form.kind, form.mode), directed=True),
    "fma": _rounding(_fma, directed=True), "mad": _rounding(_fma, directed=True), "div": _rounding(lambda form, a, b: np.divide(a, b)),
    "min": _rounding(_extreme(-1)), "max": _rounding(_extreme(1)),
    "neg": _rounding(lambda form, x: -x), "abs": _rounding(lambda form, x: np.abs(x)), "copysign": _copysign, "testp": _test,
    "sqrt": _exact_or_approximate(np.sqrt), "rcp": _exact_or_approximate(np.reciprocal),
    "rsqrt": _rounding(_approximate(lambda x: 1 / np.sqrt(x))), "ex2": _rounding(_approximate(np.exp2)),
    "lg2": _rounding(_approximate(np.log2)), "sin": _rounding(_approximate(np.sin)), "cos": _rounding(_approximate(np.cos)),
    "tanh": _rounding(_approximate(np.tanh)),
}  # fmt: skip
