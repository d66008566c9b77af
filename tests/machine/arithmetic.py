"""Numbers: arithmetic, comparisons, conversions, and what the lanes of a warp exchange."""

import numpy as np
from memory import Fault
from operands import KINDS, LANES, reader, spread


def _simple(function, kind_at=-1, flush=False):
    """Build an instruction ``d = function(a, b, ...)`` on operands of the type that its name ends with."""

    def build(machine, each, parts):
        kind = KINDS[parts[kind_at]]
        destination, *operands = each.operands
        get = [reader(machine, text, kind) for text in operands]

        def run(warp):
            value = function(*[g(warp) for g in get])
            warp.write(destination, np.asarray(value, kind) if kind is not bool else np.asarray(value))

        return run

    return build


def _wide(text: str):
    return {"s32": (np.int32, np.int64), "u32": (np.uint32, np.uint64), "s16": (np.int16, np.int32), "u16": (np.uint16, np.uint32)}[text]


def _mul(machine, each, parts):
    kind, destination = parts[-1], each.operands[0]
    if kind in ("f32", "f64"):
        return _simple(np.multiply)(machine, each, parts)
    narrow, wide = _wide(kind) if parts[1] == "wide" else (KINDS[kind], KINDS[kind])
    a, b = (reader(machine, text, narrow) for text in each.operands[1:])
    if parts[1] == "hi":
        bits = 8 * np.dtype(narrow).itemsize

        def high(warp):
            x, y = spread(a(warp)), spread(b(warp))
            product = [(int(i) * int(j)) >> bits for i, j in zip(x, y, strict=True)]
            warp.write(destination, np.array([p % 2**bits for p in product], f"u{bits // 8}"))

        return high
    return lambda warp: warp.write(destination, np.asarray(np.multiply(np.asarray(a(warp), wide), np.asarray(b(warp), wide)), wide))


def _mad(machine, each, parts):
    if parts[0] == "fma":
        return _fma(machine, each, parts)
    kind = KINDS[parts[-1]]
    narrow, wide = _wide(parts[-1]) if parts[1] == "wide" else (kind, kind)
    a, b = (reader(machine, text, narrow) for text in each.operands[1:3])
    c, destination = reader(machine, each.operands[3], wide), each.operands[0]
    return lambda warp: warp.write(destination, np.asarray(np.asarray(a(warp), wide) * np.asarray(b(warp), wide) + c(warp), wide))


def _fma(machine, each, parts):
    kind = KINDS[parts[-1]]
    a, b, c = (reader(machine, text, kind) for text in each.operands[1:])
    destination, down = each.operands[0], parts[1] == "rm"

    def run(warp):
        exact = np.asarray(a(warp), np.float64) * np.asarray(b(warp), np.float64) + np.asarray(c(warp), np.float64)
        value = np.asarray(exact.astype(kind))
        if down:
            value = np.where(value > exact, np.nextafter(value, kind(-np.inf)), value)
        warp.write(destination, np.asarray(value, kind))

    return run


def _divide(machine, each, parts):
    kind, destination = KINDS[parts[-1]], each.operands[0]
    a, b = (reader(machine, text, kind) for text in each.operands[1:])
    if kind in (np.float32, np.float64):
        return _simple(np.divide)(machine, each, parts)
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


COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _compare(machine, each, parts):
    kind, name = KINDS[parts[-1]], parts[1]
    unordered = name.endswith("u") and name[:-1] in COMPARE
    if np.dtype(kind).kind == "f" and name == "ne":
        compare = lambda x, y: (x != y) & ~np.isnan(x) & ~np.isnan(y)
    elif unordered:
        compare = lambda x, y: COMPARE[name[:-1]](x, y) | np.isnan(x) | np.isnan(y)
    else:
        compare = COMPARE[name]
    destination = each.operands[0]
    a, b = (reader(machine, text, kind) for text in each.operands[1:])
    return lambda warp: warp.write(destination, np.asarray(compare(a(warp), b(warp))))


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


def _convert(machine, each, parts):
    to, source = parts[-2], parts[-1]
    if to == "f16x2":
        low, high = (reader(machine, each.operands[i], np.float32) for i in (2, 1))
        return lambda warp: warp.write(each.operands[0], _packed(low(warp), high(warp), np.float16))
    if to == "bf16x2":
        low, high = (reader(machine, each.operands[i], np.float32) for i in (2, 1))
        return lambda warp: warp.write(each.operands[0], _packed_bfloat16(low(warp), high(warp)))
    a, destination, into = reader(machine, each.operands[1], KINDS[source]), each.operands[0], KINDS[to]

    def run(warp):
        value = np.asarray(a(warp))
        if "sat" in parts:
            value = np.clip(np.where(np.isnan(value), 0, value), 0, 1)
        value = value.astype(into)
        warp.write(destination, value.view(np.uint16) if into is np.float16 else value)

    return run


def _packed(low, high, kind):
    low, high = (spread(np.asarray(x).astype(kind)).copy().view(np.uint16).astype(np.uint32) for x in (low, high))
    return low | high << np.uint32(16)


def to_bfloat16(x):
    """Bits of the nearest bfloat16, ties to even."""
    bits = spread(np.asarray(x, np.float32)).copy().view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint32)


def _packed_bfloat16(low, high):
    return to_bfloat16(low) | to_bfloat16(high) << np.uint32(16)


def _move(machine, each, parts):
    destination, source = each.operands
    kind = KINDS[parts[-1]]
    if isinstance(destination, tuple):  # a word into its halves
        a = reader(machine, source, kind)
        half = {4: np.uint16, 8: np.uint32}[np.dtype(kind).itemsize]

        def apart(warp):
            value = spread(a(warp)).copy().view(half).reshape(LANES, 2)
            for i, name in enumerate(destination):
                warp.write(name, value[:, i].copy())

        return apart
    if isinstance(source, tuple):  # halves into a word
        half = {4: np.uint16, 8: np.uint32}[np.dtype(kind).itemsize]
        get = [reader(machine, text, half) for text in source]

        def together(warp):
            value = np.stack([spread(g(warp)) for g in get], axis=1)
            warp.write(destination, np.ascontiguousarray(value).view(kind)[:, 0])

        return together
    a = reader(machine, source, kind)
    return lambda warp: warp.write(destination, np.asarray(a(warp)))


def _extreme(machine, each, parts):
    is_float = parts[-1] in ("f32", "f64")
    function = {("min", True): np.fmin, ("max", True): np.fmax, ("min", False): np.minimum, ("max", False): np.maximum}
    return _simple(function[parts[0], is_float])(machine, each, parts)


def _logical(function):
    def build(machine, each, parts):
        chosen = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}
        return _simple(chosen[parts[0]] if parts[-1] == "pred" else function)(machine, each, parts)

    return build


def _approximate(function):
    """Within the documented error: computed in float64 and rounded; with .ftz, numbers below the least normal one are 0."""

    def build(machine, each, parts):
        flush, tiny = "ftz" in parts, np.finfo(np.float32).tiny

        def compute(x):
            x = np.asarray(x)
            x = np.where(np.abs(x) < tiny, np.copysign(np.float32(0), x), x) if flush else x
            value = function(x.astype(np.float64)).astype(np.float32)
            return np.where(np.abs(value) < tiny, np.copysign(np.float32(0), value), value) if flush else value

        return _simple(compute)(machine, each, parts)

    return build


def _shuffle(machine, each, parts):
    destination, value, source, _, _ = (*each.operands, None)[:5]
    mode = parts[2]
    a, b = reader(machine, value, np.uint32), reader(machine, source, np.uint32)
    destination = destination.split("|")[0]

    def run(warp):
        if not warp.lanes.all():
            raise Fault("lanes of the mask are not here")
        lane, other = np.arange(LANES), spread(b(warp)).astype(np.int64)
        warp.write(destination, spread(a(warp))[lane ^ other if mode == "bfly" else other % LANES])

    return run


def _vote(machine, each, parts):
    destination, a = each.operands[0], reader(machine, each.operands[1], bool)
    assert parts[2] == "any"
    return lambda warp: warp.write(destination, np.full(LANES, (spread(a(warp)) & warp.lanes).any()))


ELEMENTWISE = {
    "add": _simple(np.add), "sub": _simple(np.subtract), "neg": _simple(np.negative), "abs": _simple(np.abs), "sqrt": _simple(np.sqrt),
    "mul": _mul, "mad": _mad, "fma": _fma, "div": _divide, "rem": _divide, "shl": _shift, "shr": _shift,
    "and": _logical(np.bitwise_and), "or": _logical(np.bitwise_or), "xor": _logical(np.bitwise_xor), "not": _logical(np.invert),
    "min": _extreme, "max": _extreme, "setp": _compare, "selp": _select, "cvt": _convert, "mov": _move, "cvta": _move,
    "ex2": _approximate(np.exp2), "lg2": _approximate(np.log2), "rcp": _approximate(np.reciprocal), "shfl": _shuffle, "vote": _vote,
}  # fmt: skip
