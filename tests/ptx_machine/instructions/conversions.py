"""Numbers in other formats, and registers in others (PTX ISA 9.7.9.1 and 9.7.9.21)."""

import numpy as np

from ptx_machine.instructions.rounding import BFLOAT16, odd, rounded, two_sum
from ptx_machine.machine.operands import KINDS, LANES, reader, spread

FLOATS = {"f16": np.float16, "bf16": BFLOAT16, "f32": np.float32, "f64": np.float64}
WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
TINY = np.finfo(np.float32).tiny


def flushed(x):
    """Float32 numbers; those below the least normal one are zeros of their sign."""
    x = np.asarray(x)
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def bits_of(value: np.ndarray) -> np.ndarray:
    """What a register holds of numbers."""
    return value.view(f"u{value.dtype.itemsize}") if value.dtype.itemsize == 2 else value


def _convert(machine, each, parts):
    *modes, to, source = parts[1:]
    if unknown := set(modes) - {"rn", "rz", "rm", "rp", "rna", *WHOLE, "ftz", "sat", "relu", "satfinite"} | {"satfinite"} & set(modes):
        raise ValueError(f"modifiers {unknown}")
    if to in ("f16x2", "bf16x2"):
        return _pack(machine, each, FLOATS[to[:-2]], modes)
    if to == "tf32":
        return _to_tf32(machine, each, modes)
    work = _conversion(to, source, modes)
    get, destination = reader(machine, each.operands[1], FLOATS.get(source) or KINDS[source]), each.operands[0]
    return lambda warp: warp.write(destination, bits_of(np.ascontiguousarray(work(np.asarray(get(warp))))))


def _conversion(to: str, source: str, modes):
    mode = next((m for m in modes if m in ("rn", "rz", "rm", "rp")), "rn")
    whole = next((WHOLE[m] for m in modes if m in WHOLE), None)
    if to in FLOATS and source in FLOATS:
        return _float_to_float(FLOATS[to], FLOATS[source], mode, whole, modes)
    if to in FLOATS:
        return lambda x: _from_integer(x, FLOATS[to], mode)
    kind = np.dtype(KINDS[to])
    if source in FLOATS:
        if whole is None:
            raise ValueError("a conversion to integers has to say how it rounds")
        flush = "ftz" in modes
        return lambda x: _to_integer(whole(_widened(x, flush)), kind)
    if "sat" not in modes:
        return lambda x: x.astype(kind)
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    return lambda x: np.array([min(max(int(i), least), most) for i in x.reshape(-1)], kind).reshape(x.shape)


def _widened(x, flush: bool):
    return np.asarray(flushed(x) if flush and x.dtype == np.float32 else x).astype(np.float64)


def _float_to_float(to, source, mode: str, whole, modes):
    flush, saturate, positive = (name in modes for name in ("ftz", "sat", "relu"))

    def work(x):
        wide = _widened(x, flush)
        wide = wide if whole is None else whole(wide)
        value = wide if to == np.float64 else rounded(wide, to, mode)
        if saturate:
            value = np.clip(np.where(np.isnan(value), to(0), value), to(0), to(1))
        if positive:
            value = np.where(value < 0, to(0), value).astype(to)
        return flushed(value) if flush and to == np.float32 else value

    return work


def _to_integer(x, kind):
    """The nearest that there is; 0 of what is not a number."""
    least, most = np.iinfo(kind).min, np.iinfo(kind).max
    inside = (x >= float(least)) & (x < float(most + 1))  # both are powers of two, or zero, and exact
    value = np.where(inside, x, 0).astype(kind)
    value = np.where(x < float(least), kind.type(least), value)
    return np.where(x >= float(most + 1), kind.type(most), value)


def _from_integer(x, to, mode: str):
    """Rounded once: of 64 bits the halves are exact in float64."""
    if x.dtype.itemsize < 8:
        wide = x.astype(np.float64)
        return wide if to == np.float64 else rounded(wide, to, mode)
    if to == np.float64:
        if mode != "rn":
            raise KeyError(mode)
        return x.astype(to)
    low = x & x.dtype.type(0xFFFFFFFF)
    return rounded(odd(*two_sum((x - low).astype(np.float64), low.astype(np.float64))), to, mode)


def _pack(machine, each, kind, modes):
    """Two float32 into a word; the first is the upper half."""
    low, high = (reader(machine, each.operands[i], np.float32) for i in (2, 1))
    work = _float_to_float(kind, np.float32, "rz" if "rz" in modes else "rn", None, modes)

    def run(warp):
        halves = [np.broadcast_to(work(np.asarray(g(warp))), LANES) for g in (low, high)]
        warp.write(each.operands[0], np.ascontiguousarray(np.stack(halves, axis=1)).view(np.uint32)[:, 0])

    return run


def _to_tf32(machine, each, modes):
    """19 bits: away from zero at ties (rna), to nearest (rn), or cut off (rz)."""
    get = reader(machine, each.operands[1], np.float32)
    (mode,) = set(modes) & {"rna", "rn", "rz"}

    def run(warp):
        x = np.array(spread(get(warp)), np.float32)
        bits = x.view(np.uint32)
        up = {"rna": np.uint32(0x1000), "rz": np.uint32(0), "rn": np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))}[mode]
        value = np.where(np.isfinite(x), bits + up & np.uint32(0xFFFFE000), np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits))
        if "relu" in modes:
            value = np.where(x < 0, np.uint32(0), value)
        warp.write(each.operands[0], value)

    return run


def _move(machine, each, parts):
    destination, source = each.operands
    kind = KINDS[parts[-1]]
    if isinstance(destination, tuple):  # a word into its parts
        a = reader(machine, source, kind)
        part = f"u{np.dtype(kind).itemsize // len(destination)}"

        def apart(warp):
            value = np.array(spread(a(warp))).view(part).reshape(LANES, -1)
            for i, name in enumerate(destination):
                if name != "_":
                    warp.write(name, value[:, i].copy())

        return apart
    if isinstance(source, tuple):  # parts into a word
        part = np.dtype(f"u{np.dtype(kind).itemsize // len(source)}").type
        get = [reader(machine, text, part) for text in source]

        def together(warp):
            value = np.stack([spread(g(warp)) for g in get], axis=1)
            warp.write(destination, np.ascontiguousarray(value).view(kind)[:, 0])

        return together
    a = reader(machine, source, kind)
    return lambda warp: warp.write(destination, np.asarray(a(warp)))


CONVERSIONS = {"cvt": _convert, "mov": _move, "cvta": _move}
