"""Numbers: arithmetic on integers, comparisons, choices, shifts and logic. `floating` has what rounds."""

from typing import NamedTuple

import numpy as np

from ptx_machine.instructions.bits import BITS
from ptx_machine.instructions.conversions import CONVERSIONS, flushed
from ptx_machine.instructions.floating import FLOATING, is_float
from ptx_machine.machine.exchange import EXCHANGE, predicate
from ptx_machine.machine.operands import KINDS, reader, spread


def _simple(function):
    """Build an instruction ``d = function(a, b, ...)`` on operands of the type that its name ends with, and that has no other modifiers."""

    def build(machine, each, parts):
        if len(parts) > 2:
            raise ValueError(f"modifiers {parts[1:-1]}")
        kind = KINDS[parts[-1]]
        destination, *operands = each.operands
        get = [reader(machine, text, kind) for text in operands]

        def run(warp):
            value = function(*[g(warp) for g in get])
            warp.write(destination, np.asarray(value, kind) if kind is not bool else np.asarray(value))

        return run

    return build


def _either(on_integers):
    """Build an instruction that there is for integers, and in `floating` for what rounds."""

    def build(machine, each, parts):
        return FLOATING[parts[0]](machine, each, parts) if is_float(parts) else on_integers(machine, each, parts)

    return build


def _wide(text: str):
    return {"s32": (np.int32, np.int64), "u32": (np.uint32, np.uint64), "s16": (np.int16, np.int32), "u16": (np.uint16, np.uint32)}[text]


def _high(x, y, kind):
    """The upper halves of products."""
    bits = 8 * np.dtype(kind).itemsize
    product = [(int(i) * int(j)) >> bits for i, j in zip(spread(x), spread(y), strict=True)]
    return np.array([p % 2**bits for p in product], f"u{bits // 8}").view(kind)


def _products(parts):
    """(what operands are, what the result is, product) of mul and mad."""
    form, kind = parts[1:]
    if form == "wide":
        narrow, wide = _wide(kind)
        return narrow, wide, lambda x, y: np.asarray(x, wide) * np.asarray(y, wide)
    kind = KINDS[kind]
    return kind, kind, {"lo": lambda x, y: np.multiply(x, y), "hi": lambda x, y: _high(x, y, kind)}[form]


def _mul(machine, each, parts):
    narrow, wide, product = _products(parts)
    a, b = (reader(machine, text, narrow) for text in each.operands[1:])
    return lambda warp: warp.write(each.operands[0], np.asarray(product(a(warp), b(warp)), wide))


def _mad(machine, each, parts):
    narrow, wide, product = _products(parts)
    a, b = (reader(machine, text, narrow) for text in each.operands[1:3])
    c = reader(machine, each.operands[3], wide)
    return lambda warp: warp.write(each.operands[0], np.asarray(product(a(warp), b(warp)) + c(warp), wide))


def _two_products(machine, each, parts):
    """d = c + a0 b0 + a1 b1 of the halves of a and the two lower, or upper, bytes of b (PTX ISA 9.7.1.24)."""
    if parts[1] not in ("lo", "hi") or parts[2:] != ["u32", "u32"]:
        raise ValueError(parts)
    get, first = [reader(machine, text, np.uint32) for text in each.operands[1:]], 0 if parts[1] == "lo" else 16

    def run(warp):
        a, b, c = (spread(g(warp)).astype(np.uint64) for g in get)
        byte = lambda i: b >> np.uint64(first + 8 * i) & np.uint64(0xFF)
        half = lambda i: a >> np.uint64(16 * i) & np.uint64(0xFFFF)
        warp.write(each.operands[0], (c + half(0) * byte(0) + half(1) * byte(1)).astype(np.uint32))

    return run


def _divide(machine, each, parts):
    kind, destination = KINDS[parts[-1]], each.operands[0]
    a, b = (reader(machine, text, kind) for text in each.operands[1:])
    remainder = parts[0] == "rem"

    def run(warp):
        x, y = spread(a(warp)), spread(b(warp))
        y = np.where(y == 0, kind(1), y)  # lanes that do not run
        quotient = np.asarray(np.sign(x) * np.sign(y) * (np.abs(x) // np.abs(y)), kind) if np.dtype(kind).kind == "i" else x // y
        warp.write(destination, np.asarray(x - quotient * y if remainder else quotient, kind))

    return run


def _shift(machine, each, parts):
    kind, destination = KINDS[parts[-1]], each.operands[0]
    a, b = reader(machine, each.operands[1], kind), reader(machine, each.operands[2], np.uint32)
    bits = 8 * np.dtype(kind).itemsize
    left = parts[0] == "shl"

    def run(warp):
        x, n = np.asarray(a(warp)), np.asarray(b(warp)).astype(np.int64)
        over = n >= bits
        n = np.where(over, bits - 1, n).astype(kind)
        moved = x << n if left else x >> n
        none = np.asarray(0, kind) if left or np.dtype(kind).kind == "u" else moved
        warp.write(destination, np.asarray(np.where(over, none, moved), kind))

    return run


# ---- comparisons -------------------------------------------------------------------------------------------------------------------------

COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


class Found(NamedTuple):
    """Whether a comparison holds in each lane, and whether its opposite does, each combined with a further predicate."""

    yes: np.ndarray
    no: np.ndarray


def _comparison(name: str, is_float: bool):
    """Of floating-point numbers, one with a NaN is false, or true if the name ends with u."""
    unordered = lambda x, y: np.isnan(x) | np.isnan(y)
    if not is_float:
        return COMPARE[name]
    if name in ("num", "nan"):
        return unordered if name == "nan" else lambda x, y: ~unordered(x, y)
    if name.endswith("u"):
        compare = COMPARE[name[:-1]]
        return lambda x, y: compare(x, y) | unordered(x, y)
    compare = COMPARE[name]
    return (lambda x, y: (x != y) & ~unordered(x, y)) if name == "ne" else compare


def _compared(machine, operands, parts):
    """``get(warp)``, for setp and set, of whether ``.compare{.combine}{.ftz}`` holds, and whether its opposite does."""
    kind = KINDS[parts[-1]]
    compare, flush = _comparison(parts[1], np.dtype(kind).kind == "f"), "ftz" in parts
    a, b = (reader(machine, text, kind) for text in operands[:2])
    combine = COMBINE[parts[2]] if len(operands) > 2 else None
    third = predicate(machine, operands[2]) if combine else None

    def found(warp):
        x, y = a(warp), b(warp)
        said = np.asarray(compare(flushed(x), flushed(y)) if flush else compare(x, y))
        return Found(combine(said, third(warp)), combine(~said, third(warp))) if combine else Found(said, ~said)

    return found


def _compare(machine, each, parts):
    found, (name, _, opposite) = _compared(machine, each.operands[1:], parts), each.operands[0].partition("|")

    def run(warp):
        for destination, value in zip((name.strip(), opposite.strip()), found(warp), strict=True):
            if destination not in ("", "_"):
                warp.write(destination, value)

    return run


def _set(machine, each, parts):
    """All bits or none, or one and zero as a float32."""
    yes = {"f32": np.float32(1), "u32": np.uint32(0xFFFFFFFF), "s32": np.uint32(0xFFFFFFFF)}[parts[-2]]
    found = _compared(machine, each.operands[1:], parts)
    return lambda warp: warp.write(each.operands[0], np.where(found(warp).yes, yes, type(yes)(0)))


def _select(machine, each, parts):
    kind, destination = KINDS[parts[-1]], each.operands[0]
    a, b = (reader(machine, text, kind) for text in each.operands[1:3])
    chosen = reader(machine, each.operands[3], bool)

    def run(warp):
        (which, undecided), (x, no_x), (y, no_y) = (_apart(warp, get) for get in (chosen, a, b))
        without = undecided | np.where(which, no_x, no_y)  # the one that is not chosen need not be there
        warp.taint = without if without.any() else None
        warp.write(destination, np.asarray(np.where(which, x, y), kind))

    return run


def _apart(warp, get):
    """A value, and the lanes in which it is none."""
    value, without, warp.taint = get(warp), warp.taint, None
    return value, np.False_ if without is None else without


def _logical(function):
    def build(machine, each, parts):
        chosen = {**COMBINE, "not": np.logical_not}
        return _simple(chosen[parts[0]] if parts[-1] == "pred" else function)(machine, each, parts)

    return build


ELEMENTWISE = {
    **FLOATING,
    "add": _either(_simple(np.add)), "sub": _either(_simple(np.subtract)), "neg": _either(_simple(np.negative)),
    "abs": _either(_simple(np.abs)), "min": _either(_simple(np.minimum)), "max": _either(_simple(np.maximum)),
    "mul": _either(_mul), "mad": _either(_mad), "dp2a": _two_products, "div": _either(_divide), "rem": _divide,
    "shl": _shift, "shr": _shift,
    "and": _logical(np.bitwise_and), "or": _logical(np.bitwise_or), "xor": _logical(np.bitwise_xor), "not": _logical(np.invert),
    "setp": _compare, "set": _set, "selp": _select, **CONVERSIONS, **BITS, **EXCHANGE,
}  # fmt: skip
