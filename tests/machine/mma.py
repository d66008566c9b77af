"""Products of a warp: mma.sync (PTX ISA 9.7.14.5), whose operands are registers.

One rule places the elements of all shapes here. Lane l belongs to row (or, of B, column) ``l // 4``, and to place ``l % 4`` along K. A
register of A or B holds two elements of 16 bits, or one of TF32 or float64; four places one after the other are a stretch, and further
registers are the next eight rows first (A alone), then the next stretch of K. In C and D a place has two neighbouring columns.
"""

import re
from typing import NamedTuple

import numpy as np
from matrices import LANE, together
from operands import LANES, reader, spread
from rounding import BFLOAT16
from sums import dot

DTYPES = {"f16": np.float16, "bf16": BFLOAT16, "tf32": np.float32, "f32": np.float32, "f64": np.float64}
SHAPES = {
    ("f16", "f32"): {(16, 8), (16, 16)},
    ("f16", "f16"): {(16, 8), (16, 16)},
    ("bf16", "f32"): {(16, 8), (16, 16)},
    ("tf32", "f32"): {(16, 4), (16, 8)},
    ("f64", "f64"): {(8, 4), (16, 4), (16, 8), (16, 16)},
}  # (rows, K) of what can be multiplied, and what it is added to


class Places(NamedTuple):
    """Of the elements that each lane holds, (lanes, elements): where they lie in their matrix, register by register."""

    rows: np.ndarray
    columns: np.ndarray


def places_of_a(rows: int, k: int, width: int) -> Places:
    """Of a (rows, k) left operand; `width` elements share a register."""
    element = np.arange(rows * k // LANES)
    register, part = element // width, element % width
    tall = rows // 8
    lane = LANE[:, None]
    return Places(lane // 4 + 8 * (register % tall), width * (lane % 4) + part + 4 * width * (register // tall))


def places_of_b(k: int, width: int) -> Places:
    """Of a (k, 8) right operand: those of its transpose, as a left one of 8 rows."""
    return Places(*places_of_a(8, k, width)[::-1])


def places_of_c(rows: int) -> Places:
    """Of an accumulator of 8 columns."""
    element, lane = np.arange(rows // 4), LANE[:, None]
    return Places(lane // 4 + 8 * (element // 2) + 0 * element, 2 * (lane % 4) + element % 2)


def _fragment(machine, names, dtype, shape, places: Places):
    """``get(warp)`` of a matrix, from registers of 4 bytes, or of 8 for float64."""
    word = dtype if np.dtype(dtype).itemsize >= 4 else np.uint32
    get = [reader(machine, name, word) for name in names]
    if len(names) * np.dtype(word).itemsize != places.rows.shape[1] * np.dtype(dtype).itemsize:
        raise ValueError(f"{len(names)} registers for {shape} elements")

    def run(warp):
        words = np.stack([spread(g(warp)) for g in get], axis=1)
        matrix = np.empty(shape, dtype)
        matrix[places] = np.ascontiguousarray(words).view(dtype)
        return matrix

    return run


def _mma(machine, each):
    form = r"mma\.sync\.aligned\.m(\d+)n8k(\d+)\.row\.col\.(f16|f32|f64)\.(\w+)\.(\w+)\.(\w+)"
    rows, k, result, kind, other, added = re.fullmatch(form, each.opcode.replace(".rn", "")).groups()
    rows, k = int(rows), int(k)
    if kind != other or result != added or (rows, k) not in SHAPES[kind, result]:
        raise ValueError("there is no such product")
    dtype, accumulator = DTYPES[kind], DTYPES[result]
    width = 2 if np.dtype(dtype).itemsize == 2 else 1
    d, a, b, c = (names if isinstance(names, tuple) else (names,) for names in each.operands)
    get_a = _fragment(machine, a, dtype, (rows, k), places_of_a(rows, k, width))
    get_b = _fragment(machine, b, dtype, (k, 8), places_of_b(k, width))
    places = places_of_c(rows)
    get_c = _fragment(machine, c, accumulator, (rows, 8), places)

    def run(warp):
        together(warp)
        values = np.ascontiguousarray(dot(get_a(warp), get_b(warp), get_c(warp), machine.core)[places])
        words = values.view(np.uint64 if accumulator == np.float64 else np.uint32)
        for name, word in zip(d, words.T, strict=True):
            warp.write(name, np.ascontiguousarray(word))

    return run


MMA = {"mma.sync.aligned": _mma}
