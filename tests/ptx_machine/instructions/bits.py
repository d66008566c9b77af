"""Instructions that pick bits and bytes (PTX ISA 9.7.1, 9.7.8 and 9.7.9.7)."""

import numpy as np

from ptx_machine.machine.operands import KINDS, LANES, reader, spread


def _on_words(function):
    """Build ``d = function(a, b, ...)`` on unsigned words as 64 bits; the name's last part says of how many they are."""

    def build(machine, each, parts):
        kind = KINDS[parts[-1].replace("s", "u").replace("b", "u")]
        work = function(parts, 8 * np.dtype(kind).itemsize)
        first, *others = each.operands[1:]
        fixed = {"popc": 0, "clz": 0, "brev": 0, "lop3": 3, "prmt": 3, "bfi": 2, "bfe": 1, "shf": 3}[parts[0]]
        kinds = [kind if i < max(fixed, 1) else np.uint32 for i in range(len(others) + 1)]
        get = [reader(machine, text, k) for text, k in zip((first, *others), kinds, strict=True)]

        def run(warp):
            values = [spread(g(warp)).astype(np.uint64) for g in get]
            result = work(*values)
            warp.write(each.operands[0], result.astype(np.uint32 if parts[0] in ("popc", "clz") else kind))

        return run

    return build


def _below(n) -> np.ndarray:
    """Words whose lowest n bits are set, n up to 64."""
    n = np.asarray(n, np.uint64)
    return np.where(n >= 64, ~np.uint64(0), (np.uint64(1) << np.minimum(n, 63)) - np.uint64(1))


def _ones(a) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, 8), axis=1).sum(axis=1)


def _popc(parts, bits):
    return _ones


def _clz(parts, bits):
    """Bits above the highest that is set: what is left when all below it are set too."""

    def work(a):
        for shift in (1, 2, 4, 8, 16, 32):
            a = a | a >> np.uint64(shift)
        return bits - _ones(a)

    return work


def _brev(parts, bits):
    return lambda a: sum((a >> np.uint64(i) & np.uint64(1)) << np.uint64(bits - 1 - i) for i in range(bits))


def _lop3(parts, bits):
    def work(a, b, c, table):
        chosen = [np.where(table >> np.uint64(i) & np.uint64(1), _below(bits), np.uint64(0)) for i in range(8)]
        side = lambda x, yes: x if yes else ~x
        return sum(chosen[i] & side(a, i & 4) & side(b, i & 2) & side(c, i & 1) for i in range(8))

    return work


def _prmt(parts, bits):
    """Each half byte of the selector names a byte of b and a; its highest bit asks for the byte's sign alone."""
    if parts != ["prmt", "b32"]:
        raise ValueError(parts)

    def work(a, b, selector):
        result = np.zeros(LANES, np.uint64)
        for i in range(4):
            chosen = selector >> np.uint64(4 * i) & np.uint64(15)
            byte = (b << np.uint64(32) | a) >> np.uint64(8) * (chosen & np.uint64(7)) & np.uint64(0xFF)
            byte = np.where(chosen & np.uint64(8), np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0)), byte)
            result |= byte << np.uint64(8 * i)
        return result

    return work


def _shf(parts, bits):
    """Of the 64 bits of b and a: the upper word, shifted to the left, or the lower one, shifted to the right."""
    limit = {"wrap": lambda n: n & np.uint64(31), "clamp": lambda n: np.minimum(n, np.uint64(32))}[parts[2]]
    if parts[1] == "l":
        return lambda a, b, n: ((b << np.uint64(32) | a) << limit(n)) >> np.uint64(32)
    return lambda a, b, n: (b << np.uint64(32) | a) >> limit(n) & _below(32)


def _bfe(parts, bits):
    """`length` bits from `place` on; signed ones go on with the highest of them, or of the word."""

    def work(a, place, length):
        place, length = place & np.uint64(255), length & np.uint64(255)
        field = np.where(place < 64, a >> np.minimum(place, 63), np.uint64(0)) & _below(length)
        if parts[1][0] == "u":
            return field
        top = np.minimum(place + length - np.uint64(1), np.uint64(bits - 1))
        negative = (length > 0) & (a >> np.minimum(top, np.uint64(63)) & np.uint64(1) == 1)
        kept = np.minimum(length, np.where(place < bits, np.uint64(bits) - np.minimum(place, np.uint64(bits)), np.uint64(0)))
        return np.where(negative, field | ~_below(kept), field)

    return work


def _bfi(parts, bits):
    """The lowest `length` bits of a in the place of those of b."""

    def work(a, b, place, length):
        place, length = place & np.uint64(255), length & np.uint64(255)
        mask = np.where(place < 64, _below(length) << np.minimum(place, 63), np.uint64(0))
        return b & ~mask | a << np.minimum(place, 63) & mask

    return work


BITS = {
    **{"popc": _on_words(_popc), "clz": _on_words(_clz), "brev": _on_words(_brev), "lop3": _on_words(_lop3), "prmt": _on_words(_prmt)},
    **{"shf": _on_words(_shf), "bfe": _on_words(_bfe), "bfi": _on_words(_bfi)},
}
